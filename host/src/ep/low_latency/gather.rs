//! The expert-major copy of received rows.

use epoxide_gpu::kernels::{LowLatencyGather, LowLatencyGatherColumns};
use epoxide_gpu::layout::{DevicePtr, LowLatencyGatherArgs, LowLatencyGatherColumnsArgs, SCALE_BLOCK};

use super::Buffer;
use super::dispatch::{ROWS, check_row_bytes, elements_of};
use super::results::Received;
use crate::driver::Event;
use crate::ep::core::Uses;
use crate::ep::{DType, StreamOrder, Tensor, TypedTensor};
use crate::error::{Error, Result};

impl Buffer {
    /// Copies received rows together by expert, as DeepEP's low-latency dispatch gives them. Row
    /// `e * rows + i` of `x` is row `expert_rows[e][i]` of [`Received::x`], for the
    /// `expert_counts[e]` rows that expert e has. Behind those, `x` and `scales` stay as they are.
    /// `rows` stands for `num_ranks * max_tokens`. Counts, [`Received::src_info`] and
    /// [`Received::layout_range`] are valid for the copy.
    /// [`CombineRequest::by_expert`](super::CombineRequest::by_expert) takes the experts' results
    /// for its rows, in the same order.
    ///
    /// * `x`: `[local_experts * rows, hidden]`, of the dtype of the received rows.
    /// * `scales`, where the received rows have any:
    ///   `[local_experts * (hidden / 128 rounded up), rows]`; those of row i of expert e are column
    ///   i of the expert's part. Columns, and the scales of MXFP8 rows, are not copied here:
    ///   [`Buffer::gather_columns_by_expert`] copies them with the rows.
    ///
    /// Only this rank takes part; the host waits for nothing, nothing is allocated, and the call
    /// can be captured. An asynchronous one gives the event at its end. A grouped GEMM that reads
    /// its rows by [`Received::expert_rows`] needs no copy.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use epoxide::driver::Stream;
    /// # use epoxide::driver::virt::{VirtConfig, VirtualGpu};
    /// # use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
    /// # use epoxide::group::run_threads;
    /// # use epoxide::low_latency::{Buffer, CombineRequest, DispatchRequest, Options, Shape};
    /// # use epoxide::half::bf16;
    /// # let sums = run_threads(2, Duration::from_secs(60), |rank, group| {
    /// #     let device = VirtualGpu::new(VirtConfig { ordinal: rank, ..VirtConfig::default() });
    /// #     let stream = Stream::new(&device)?;
    /// #     let mut buffer = Buffer::new(device, &*group, Options::new(Shape { max_tokens: 8, hidden: 64, num_topk: 2, num_experts: 4 }))?;
    /// #     let mut place = buffer.place(0)?;
    /// #     let order = StreamOrder::on(&stream);
    /// #     let x = Tensor::from_host(&stream, DType::Bf16, &[2, 64], &[bf16::from_f32(rank as f32 + 1.0); 128])?;
    /// #     let topk_idx = TypedTensor::from_host(&stream, &[2, 2], &[0i64, 3, 1, -1])?;
    /// let received = buffer.dispatch(&mut place, DispatchRequest::new(&x, &topk_idx), order)?;
    /// let shape = [u64::from(buffer.local_experts()) * buffer.rows(), 64];
    /// let by_expert = Tensor::alloc(stream.device(), DType::Bf16, &shape)?;
    /// buffer.gather_by_expert(&received, &by_expert, None, order)?;
    /// // The experts work on the rows of `by_expert` here, in place.
    /// let combined = buffer.combine(received, CombineRequest::by_expert(&by_expert), order)?;
    /// #     combined.x.to_host::<bf16>(&stream)
    /// # })?;
    /// # assert_eq!((sums[1][0].to_f32(), sums[1][64].to_f32()), (4.0, 2.0));
    /// # Ok::<(), epoxide::group::RankFailure>(())
    /// ```
    ///
    /// Reading `x` or `scales` on the host gives the error of the dispatch or of the copy, if one
    /// has failed, until [`Tensor::write`] fills them.
    ///
    /// # Errors
    /// [`Error::DType`], [`Error::Shape`] and [`Error::Argument`] where a tensor breaks a rule, or
    /// where scales are missing or superfluous. [`Error::StaleHandle`] where a later dispatch has
    /// overwritten the rows, such as that of a step. Also errors of [`Buffer::check`] and of the
    /// driver. Nothing has been enqueued then.
    pub fn gather_by_expert(
        &mut self,
        received: &Received<'_>,
        x: &Tensor<'_>,
        scales: Option<&TypedTensor<'_, f32>>,
        order: StreamOrder<'_>,
    ) -> Result<Option<Event>> {
        self.gather(received, x, scales, None, order)
    }

    /// [`Buffer::gather_by_expert`] of rows with columns, or with the scales of
    /// [`Quantise::Mxfp8`](crate::low_latency::Quantise::Mxfp8), and of these:
    ///
    /// * `columns`: `[local_experts * words, rows]`. The part of an expert has the `words` lines of
    ///   all [`Received::columns`], those of the first column first. The words of row i of the
    ///   expert are column i of that part.
    ///
    /// A second kernel copies them; else the call is the same.
    ///
    /// # Errors
    /// The same as [`Buffer::gather_by_expert`]; [`Error::Argument`] where the rows have no
    /// columns.
    pub fn gather_columns_by_expert(
        &mut self,
        received: &Received<'_>,
        x: &Tensor<'_>,
        columns: &TypedTensor<'_, i32>,
        order: StreamOrder<'_>,
    ) -> Result<Option<Event>> {
        self.gather(received, x, None, Some(columns), order)
    }

    fn gather(
        &mut self,
        received: &Received<'_>,
        x: &Tensor<'_>,
        scales: Option<&TypedTensor<'_, f32>>,
        columns: Option<&TypedTensor<'_, i32>>,
        order: StreamOrder<'_>,
    ) -> Result<Option<Event>> {
        let place = self.place_of(received)?;
        received.lease.check_current()?;
        let (rows, hidden) = (self.rows(), self.options.shape.hidden);
        let experts = u64::from(self.local_experts());
        let of_row = hidden.div_ceil(SCALE_BLOCK.into());
        let dtype = received.x.dtype();
        // The caller can replace fields, so the shape is computed from the buffer instead.
        let received_shape = [("rows", Some(rows)), ("hidden", elements_of(dtype, hidden))];
        received.x.expect_strided("received.x", &ROWS, &received_shape)?;
        check_row_bytes("received.x", &received.x, hidden)?;
        let elements = ("hidden", Some(received.x.columns()));
        x.expect("x", &[dtype], &[("local_experts * rows", Some(experts * rows)), elements])?;
        x.expect_rows_of_16("x")?;
        x.expect_apart("x", &received.x, "received.x")?;
        if let (Some(scales), Some(read)) = (scales, &received.scales) {
            scales.expect_apart("scales", read, "received.scales")?;
        }
        if let Some(columns) = columns {
            let read =
                |words: &TypedTensor<'_, i32>| columns.expect_apart("columns", words, "received.columns");
            received.columns.iter().try_for_each(read)?;
        }
        let num_scales = match (scales, &received.scales) {
            _ if columns.is_some() => 0,
            (Some(scales), Some(_)) => {
                let shape =
                    [("local_experts * (hidden / 128)", Some(experts * of_row)), ("rows", Some(rows))];
                scales.expect("scales", &[DType::F32], &shape)?;
                of_row as u32
            }
            (None, None) => 0,
            (None, Some(_)) => {
                let rule = format!("the received rows have some: give f32 [{}, {rows}]", experts * of_row);
                return Err(Error::argument("scales", "none", rule));
            }
            (Some(_), None) => {
                return Err(Error::argument(
                    "scales",
                    "given",
                    "the received rows have none: leave them out",
                ));
            }
        };
        let args = LowLatencyGatherArgs {
            expert_counts: place.room().own.tables.expert_counts.into(),
            expert_rows: place.room().own.tables.expert_rows.into(),
            recv_x: place.room().recv_x,
            recv_scales: place.room().recv_scales.into(),
            x: x.ptr(),
            scales: scales.map_or(DevicePtr::NULL, |scales| scales.ptr()).into(),
            rows: rows as u32,
            local_experts: experts as u32,
            row_bytes: received.x.row_bytes() as u32,
            num_scales,
        };
        let of_columns = match columns {
            None => None,
            Some(columns) => Some(LowLatencyGatherColumnsArgs {
                expert_counts: args.expert_counts,
                expert_rows: args.expert_rows,
                recv_columns: place.room().recv_scales.into(),
                columns: columns.ptr().into(),
                rows: args.rows,
                local_experts: args.local_experts,
                num_words: self.check_gathered_columns(received, columns)?,
                reserved: 0,
            }),
        };
        // A row of each expert that a token can have, of every token that there can be.
        let most_rows = rows * experts.min(self.options.shape.num_topk.into());
        let blocks = self.blocks_for(u32::try_from(most_rows).unwrap_or(u32::MAX), None);
        let outs = [("x", Some(x)), ("scales", scales.map(|it| &**it)), ("columns", columns.map(|it| &**it))];
        let mut uses = Uses::from(self.core.owners(outs)?);
        let outcome = self.outcome(order)?;
        outs.into_iter().filter_map(|(_, out)| out).for_each(|out| uses.fills(out, &outcome));
        self.run(order, None, &uses, |buffer, stream, _| {
            received.lease.check_current()?;
            let threads = LowLatencyGather::INFO.max_threads;
            // SAFETY: the memory of the tensors is freed only behind all work enqueued on streams,
            // and a recording keeps them; the rest is the buffer's.
            unsafe { buffer.kernels.gather.call(stream, blocks, threads, 0, args)? };
            let Some(args) = of_columns else { return Ok(()) };
            let threads = LowLatencyGatherColumns::INFO.max_threads;
            // A warp takes four lines of an expert at a time.
            let warps = args.local_experts * args.num_words.div_ceil(4);
            let blocks = buffer.blocks_for(warps.div_ceil(threads / 32), None);
            // SAFETY: as above.
            unsafe { buffer.kernels.gather_columns.call(stream, blocks, threads, 0, args) }
        })
    }

    /// Words of each received row, for which `columns` must have lines.
    fn check_gathered_columns(&self, received: &Received<'_>, columns: &TypedTensor<'_, i32>) -> Result<u32> {
        let (rows, experts) = (self.rows(), u64::from(self.local_experts()));
        // Fields are the caller's to replace, so that their lines are held against the room.
        let words: u64 = received.columns.iter().map(|column| column.rows()).sum();
        let most = self.options.most_words();
        if words == 0 || words > most {
            let rule = format!(
                "the received rows have {words} words, and must have 1 to {most}: send some with column or \
                 Quantise::Mxfp8, or call gather_by_expert"
            );
            return Err(Error::argument("columns", "given", rule));
        }
        let shape = [("local_experts * words", Some(experts * words)), ("rows", Some(rows))];
        columns.expect("columns", &[DType::I32], &shape)?;
        Ok(words as u32)
    }
}
