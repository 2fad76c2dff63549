use epoxide::Result;
use epoxide::ep::{BufferOptions, BufferShape};

/// Fields can be added later: options are made by `new`.
fn options(shape: BufferShape) -> Result<BufferOptions> {
    Ok(BufferOptions { num_nvl_bytes: Some(0), ..BufferOptions::new(shape) })
}

fn main() {}
