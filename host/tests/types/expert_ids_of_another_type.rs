use epoxide::Result;
use epoxide::throughput::Buffer;
use epoxide::{StreamOrder, TypedTensor};

/// Expert ids are i64 or i32.
fn floats(buffer: &mut Buffer, ids: &TypedTensor<'_, f32>, order: StreamOrder<'_>) -> Result<()> {
    buffer.get_dispatch_layout(ids, 8, order).map(drop)
}

fn main() {}
