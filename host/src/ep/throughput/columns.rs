//! Received columns as grouped GEMMs read scales.

use epoxide_gpu::kernels::TransposeColumn;
use epoxide_gpu::layout::{DevicePtr, TransposeArgs};

use super::{Buffer, DType, Received, StreamOrder, TypedTensor};
use crate::driver::Event;
use crate::ep::core::Uses;
use crate::error::{Error, Result};

/// Threads per block.
const THREADS: u32 = TransposeColumn::INFO.max_threads;

impl Buffer {
    /// Copies column `index` of received rows into `out`, with the rows side by side: i32 `[bytes /
    /// 4 rounded up, n]`, n at least the rows. Word w of row r is `out[w][r]`; bytes behind the
    /// column are 0 in its last word. UE8M0 scales then have the layout of grouped GEMMs: four to
    /// an i32, and with n a multiple of 4, each row of `out` at a multiple of 16 bytes. Only
    /// received rows are copied; other columns of `out`, padding included, are not written.
    ///
    /// Only this rank takes part; the host waits for nothing, nothing is allocated, and the call
    /// can be captured. Gives the event of an asynchronous call. Reading `out` on the host gives
    /// the error of the dispatch, if it has failed, until [`Tensor::write`](crate::Tensor::write)
    /// fills it.
    ///
    /// # Errors
    /// [`Error::DType`], [`Error::Shape`] and [`Error::Argument`] where an argument breaks a rule.
    /// [`Error::StaleHandle`] where a later dispatch has overwritten the rows. Also errors of
    /// [`Buffer::check`] and of the driver.
    pub fn transpose_column(
        &mut self,
        received: &Received<'_>,
        index: usize,
        out: &TypedTensor<'_, i32>,
        order: StreamOrder<'_>,
    ) -> Result<Option<Event>> {
        let (capturing, place, handle) = self.begin_on(received, order)?;
        // Fields of `Received` are the caller's to replace; the record is not among them.
        let record = &received.record;
        let Some(column) = record.columns.get(index) else {
            let rule = format!("{} columns came with the rows, numbered from 0", record.columns.len());
            return Err(Error::argument("index", index, rule));
        };
        let (rows, words) = (handle.output_rows(), column.bytes.div_ceil(4));
        out.expect("out", &[DType::I32], &[("words", Some(words.into())), ("rows", None)])?;
        if out.columns() < rows {
            let rule = format!("must have at least the {rows} rows of recv_x");
            return Err(Error::argument("out", format!("{} rows", out.columns()), rule));
        }
        if let Some(read) = received.recv_columns.get(index) {
            out.expect_apart("out", read, "recv_columns")?;
        }
        let null = DevicePtr::NULL;
        let tables = handle.tables.by_expert;
        let args = TransposeArgs {
            header: handle.tables.header,
            words: place.at(place.room().layout.recv_scales).add(column.offset.into()),
            out: out.ptr().into(),
            expert_counts: tables.map_or(null, |at| at.expert_counts).into(),
            expert_starts: tables.map_or(null, |at| at.expert_starts).into(),
            out_stride: out.columns(),
            record_bytes: record.bytes,
            num_words: words,
            num_rows: rows as u32,
            local_experts: handle.local_experts,
        };
        let mut uses = Uses::from(self.core.owners([("out", Some(&**out))])?);
        uses.fills(out, &handle);
        self.run_on(received, order, capturing, uses, |buffer, stream| {
            let sms = buffer.core.device().info().sm_count;
            let grid = (rows as u32).div_ceil(THREADS).clamp(1, sms);
            // SAFETY: the memory of the tensor and of the handle's block is freed only behind all
            // work enqueued on streams, and a recording keeps them; the pool has so many records.
            unsafe { buffer.kernels.transpose_column.call(stream, grid, THREADS, 0, args) }
        })
    }
}
