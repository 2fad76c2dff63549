use epoxide::Result;
use epoxide::ep::{Buffer, StreamOrder, TypedTensor};

/// Expert ids are 64 bits wide.
fn narrow(buffer: &mut Buffer, ids: &TypedTensor<'_, i32>, order: StreamOrder<'_>) -> Result<()> {
    buffer.get_dispatch_layout(ids, 8, order).map(drop)
}

fn main() {}
