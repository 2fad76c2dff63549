use epoxide::Result;
use epoxide::throughput::{Options, Shape};

/// Fields can be added later: options are made by `new`.
fn options(shape: Shape) -> Result<Options> {
    Ok(Options { num_nvl_bytes: Some(0), ..Options::new(shape) })
}

fn main() {}
