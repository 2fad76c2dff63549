use epoxide::Result;
use epoxide::throughput::{Buffer, DispatchRequest, Place};
use epoxide::StreamOrder;

/// The first dispatch's rows would be overwritten while they are read.
fn two(buffer: &mut Buffer, place: &mut Place, request: DispatchRequest<'_>, order: StreamOrder<'_>) -> Result<u64> {
    let first = buffer.dispatch(place, request, order)?;
    let second = buffer.dispatch(place, request, order)?;
    Ok(first.recv_x.rows() + second.recv_x.rows())
}

fn main() {}
