use epoxide::Result;
use epoxide::throughput::{Buffer, DispatchRequest, Place};
use epoxide::StreamOrder;

/// A clone of a tensor is no way around its place.
fn two(buffer: &mut Buffer, place: &mut Place, request: DispatchRequest<'_>, order: StreamOrder<'_>) -> Result<u64> {
    let rows = buffer.dispatch(place, request, order)?.recv_x.clone();
    drop(buffer.dispatch(place, request, order)?);
    Ok(rows.rows())
}

fn main() {}
