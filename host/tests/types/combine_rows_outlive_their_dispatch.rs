use epoxide::Result;
use epoxide::throughput::{Buffer, DispatchRequest, Place};
use epoxide::{DType, StreamOrder};

/// Rows for a combine belong to the dispatch that they answer.
fn two(buffer: &mut Buffer, place: &mut Place, request: DispatchRequest<'_>, order: StreamOrder<'_>) -> Result<u64> {
    let rows = buffer.dispatch(place, request, order)?.combine_rows(DType::Bf16, 64)?;
    drop(buffer.dispatch(place, request, order)?);
    Ok(rows.tensor().rows())
}

fn main() {}
