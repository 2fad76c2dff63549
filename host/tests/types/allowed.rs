//! Rows are dropped first, detached, or lie in two places.

use epoxide::Result;
use epoxide::StreamOrder;
use epoxide::throughput::{Buffer, CombineRequest, DispatchRequest, Place};

fn right(
    buffer: &mut Buffer,
    [one, other]: &mut [Place; 2],
    request: DispatchRequest<'_>,
    order: StreamOrder<'_>,
) -> Result<u64> {
    drop(buffer.dispatch(one, request, order)?);
    let first = buffer.dispatch(one, request, order)?;
    let second = buffer.dispatch(other, request, order)?;
    let sum = buffer.combine(CombineRequest::new(&first.recv_x, &first.handle), order)?;
    let rows = first.recv_x.rows() + second.recv_x.rows();
    let detached = first.detach();
    drop(buffer.dispatch(one, request, order)?);
    Ok(rows + sum.combined_x.rows() + detached.at(one).map_or(0, |rows| rows.recv_x.rows()))
}
