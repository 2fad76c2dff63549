//! The copy of received rows to the segments of their experts, which the benchmark of rows by
//! expert compares itself with. Users get such rows by
//! [`DispatchRequest::by_expert`](super::DispatchRequest::by_expert).

use epoxide_gpu::kernels::CopyByExpert;
use epoxide_gpu::layout::{CopyByExpertArgs, DevicePtr, row_stride};

use super::{Buffer, DType, Received, StreamOrder, Tensor, TypedTensor, check_fits};
use crate::ep::core::Uses;
use crate::error::{Error, Result};

/// Threads per block.
const THREADS: u32 = CopyByExpert::INFO.max_threads;
/// Most places of a row: a lane has each.
const MOST_PLACES: u64 = 32;

/// Copies received rows into `out`, `[num_out_rows, hidden]`, and their scales into
/// `out_scales`, `[num_out_rows, num_scales]`: row r to each row of `places[r]`, `[num_rows,
/// num_topk]`. Places below 0 or behind the last row of `out` are left out. Only this rank takes
/// part, and the call can be captured. The first call loads the kernel, and no operation may be
/// under way meanwhile.
///
/// # Errors
/// [`Error::DType`], [`Error::Shape`] and [`Error::Argument`] where a tensor breaks a rule;
/// [`Error::StaleHandle`] where a later dispatch has overwritten the rows. Also errors of
/// [`Buffer::check`] and of the driver.
pub fn copy_by_expert(
    buffer: &mut Buffer,
    received: &Received<'_>,
    places: &TypedTensor<'_, i32>,
    (out, out_scales): (&Tensor<'_>, Option<&TypedTensor<'_, f32>>),
    order: StreamOrder<'_>,
) -> Result<()> {
    let (capturing, place, handle) = buffer.begin_on(received, order)?;
    let (recv_x, came) = (&received.recv_x, handle.output_rows());
    places.expect("places", &[DType::I32], &[("num_rows", None), ("num_topk", None)])?;
    if places.rows() > came || places.columns() > MOST_PLACES {
        let rule = format!("at most the {came} rows of recv_x, and {MOST_PLACES} of each");
        return Err(Error::argument("places", format!("{:?}", places.shape()), rule));
    }
    out.expect("out", &[recv_x.dtype()], &[("num_out_rows", None), ("hidden", Some(recv_x.columns()))])?;
    out.expect_rows_of_16("out")?;
    buffer.check_row_capacity(out.row_bytes())?;
    out.expect_apart("out", recv_x, "recv_x")?;
    // Fields of `Received` are the caller's to replace: the pool has no more scales than these.
    let num_scales = received.recv_x_scales.as_ref().map_or(0, |scales| scales.columns());
    check_fits(("scales", "of a row"), num_scales, buffer.options.shape.max_scales.into(), "max_scales")?;
    match out_scales {
        Some(given) => {
            let dims = [("num_out_rows", Some(out.rows())), ("num_scales", Some(num_scales))];
            given.expect("out_scales", &[DType::F32], &dims)?;
        }
        None if num_scales > 0 => {
            let rule =
                format!("{num_scales} scales came with each row: give f32 [num_out_rows, {num_scales}]");
            return Err(Error::argument("out_scales", "none", rule));
        }
        None => {}
    }
    let rows_below_2_32 = |name: &'static str, rows: u64| {
        u32::try_from(rows).map_err(|_| Error::argument(name, rows, "rows are counted in 32 bits"))
    };
    let args = CopyByExpertArgs {
        rows: place.at(place.room().layout.recv_x),
        scales: place.at(place.room().layout.recv_scales),
        places: places.ptr().into(),
        out: out.ptr(),
        out_scales: out_scales.map_or(DevicePtr::NULL, |scales| scales.ptr()),
        row_stride: row_stride(out.row_bytes()),
        num_rows: rows_below_2_32("places", places.rows())?,
        num_out_rows: rows_below_2_32("out", out.rows())?,
        row_bytes: out.row_bytes() as u32,
        num_scales: num_scales as u32,
        num_topk: places.columns() as u32,
        reserved: 0,
    };
    let outs = [("out", Some(out)), ("out_scales", out_scales.map(|it| &**it))];
    let mut uses = Uses::from(buffer.core.owners(outs)?);
    outs.into_iter().filter_map(|(_, out)| out).for_each(|out| uses.fills(out, &handle));
    uses.extend(buffer.core.owners([("places", Some(&**places))])?);
    let copied = buffer.run_on(received, order, capturing, uses, |buffer, stream| {
        let sms = buffer.core.device().info().sm_count;
        // A warp for each row, up to the number of multiprocessors.
        let grid = args.num_rows.div_ceil(THREADS / 32).clamp(1, sms);
        let kernel = buffer.kernels.copy_by_expert()?;
        // SAFETY: the memory of tensors and of the handle's block is freed only behind all work
        // enqueued on streams, and a recording keeps them; the pool has so many rows there. The
        // kernel writes no row behind the last one of `out`.
        unsafe { stream.call(kernel, grid, THREADS, 0, CopyByExpert::call(args)) }
    });
    copied.map(drop)
}
