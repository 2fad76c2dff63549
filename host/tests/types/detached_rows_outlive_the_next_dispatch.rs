use epoxide::Result;
use epoxide::throughput::{Buffer, Detached, DispatchRequest, Place};
use epoxide::StreamOrder;

/// A reader of detached rows borrows their place meanwhile.
fn look(
    buffer: &mut Buffer,
    place: &mut Place,
    detached: &Detached,
    request: DispatchRequest<'_>,
    order: StreamOrder<'_>,
) -> Result<u64> {
    let before = detached.at(place)?;
    drop(buffer.dispatch(place, request, order)?);
    Ok(before.recv_x.rows())
}

fn main() {}
