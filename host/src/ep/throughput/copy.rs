//! The copy of received rows into tensors of the caller's.

use epoxide_gpu::layout::{Call, CallKind, DevicePtr, ExpertStageArgs, ROW_ALIGN, StageArgs, row_stride};

use super::combine::STAGE_THREADS;
use super::{Buffer, DType, Received, StreamOrder, Tensor, TypedTensor};
use crate::driver::Event;
use crate::ep::core::Uses;
use crate::error::{Error, Result};

impl Buffer {
    /// Copies received rows into `out`, a tensor of the caller's, `[num_recv_tokens, hidden]` of
    /// the dtype of [`Received::recv_x`], in the order of its rows. A kernel of this rank copies
    /// only the received rows. Padding of rows by expert is not copied; rows of `out` behind the
    /// last one stay as they are. `out_topk_weights` gets [`Received::recv_topk_weights`], of the
    /// same shape. Scales, ids and sources stay in the place.
    ///
    /// Senders write to the pool, which all of them map; the caller's memory cannot be mapped like
    /// it. Kernels that read [`Place::recv_x_ptr`](super::Place::recv_x_ptr), which never changes,
    /// need no copy.
    ///
    /// Only this rank takes part; the host waits for nothing, nothing is allocated, and the call
    /// can be captured. Gives the event of an asynchronous call. Reading `out` on the host gives
    /// the error of the dispatch, if it has failed, until [`Tensor::write`] fills it.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use epoxide::driver::Stream;
    /// # use epoxide::driver::virt::{VirtConfig, VirtualGpu};
    /// # use epoxide::group::run_threads;
    /// # use epoxide::half::bf16;
    /// # use epoxide::throughput::*;
    /// # use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
    /// # let sums = run_threads(2, Duration::from_secs(60), |rank, group| {
    /// #     let device = VirtualGpu::new(VirtConfig { ordinal: rank, ..VirtConfig::default() });
    /// #     let stream = Stream::new(&device)?;
    /// #     let order = StreamOrder::on(&stream);
    /// #     let dtype = DType::Bf16;
    /// #     let shape = Shape { max_tokens: 2, hidden: 64, dtype, max_topk: 2, max_scales: 0 };
    /// #     let mut buffer = Buffer::new(device, &*group, Options::new(shape))?;
    /// #     let mut place = buffer.place(0)?;
    /// #     let numbers = [bf16::from_f32(rank as f32 + 1.0); 128];
    /// #     let x = Tensor::from_host(&stream, DType::Bf16, &[2, 64], &numbers)?;
    /// #     let topk_idx = TypedTensor::from_host(&stream, &[2, 2], &[0i64, 3, 1, -1])?;
    /// #     let layout = buffer.get_dispatch_layout(&topk_idx, 4, order)?;
    /// let received = buffer.dispatch(&mut place, DispatchRequest::new(&x, &layout), order)?;
    /// let rows = Tensor::alloc(stream.device(), DType::Bf16, received.recv_x.shape())?;
    /// buffer.copy_received(&received, &rows, None, order)?;
    /// // The experts work on `rows` here, in place.
    /// let combined = buffer.combine(CombineRequest::new(&rows, &received.handle), order)?;
    /// #     combined.combined_x.to_host::<bf16>(&stream)
    /// # })?;
    /// # assert_eq!((sums[1][0].to_f32(), sums[1][64].to_f32()), (4.0, 2.0));
    /// # Ok::<(), epoxide::group::RankFailure>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::DType`], [`Error::Shape`] and [`Error::Argument`] where a tensor breaks a rule,
    /// such as that rows have a multiple of 128 bytes. [`Error::StaleHandle`] where a later
    /// dispatch has overwritten the rows. Also errors of [`Buffer::check`] and of the driver.
    pub fn copy_received(
        &mut self,
        received: &Received<'_>,
        out: &Tensor<'_>,
        out_topk_weights: Option<&TypedTensor<'_, f32>>,
        order: StreamOrder<'_>,
    ) -> Result<Option<Event>> {
        let (capturing, place, handle) = self.begin_on(received, order)?;
        let (rows, dtype) = (handle.output_rows(), received.recv_x.dtype());
        let hidden = received.recv_x.columns();
        out.expect("out", &[dtype], &[("num_recv_tokens", Some(rows)), ("hidden", Some(hidden))])?;
        out.expect_rows_of_16("out")?;
        self.check_row_capacity(out.row_bytes())?;
        if row_stride(out.row_bytes()) != out.row_bytes() {
            let rule = format!(
                "rows are copied at the distance of the pool's, so that hidden * element size must be a multiple \
                 of {ROW_ALIGN} bytes"
            );
            let value = format!("{hidden} x {dtype} ({} bytes per row)", out.row_bytes());
            return Err(Error::argument("hidden", value, rule));
        }
        // Fields of `Received` are the caller's to replace: the shape is the handle's.
        let num_topk = handle.num_topk.filter(|_| received.recv_topk_weights.is_some());
        let weights = match (out_topk_weights, num_topk) {
            (Some(given), Some(num_topk)) => {
                let dims = [("num_recv_tokens", Some(rows)), ("num_topk", Some(num_topk.into()))];
                let dims = if handle.tables.by_expert.is_some() { &dims[..1] } else { &dims[..] };
                given.expect("out_topk_weights", &[DType::F32], dims)?;
                Some((given.ptr(), rows * given.columns() * 4))
            }
            (Some(_), None) => {
                let rule =
                    "no weights travelled with the rows: leave them out, or dispatch with topk_weights";
                return Err(Error::argument("out_topk_weights", "given", rule));
            }
            (None, _) => None,
        };
        let call = Call { kind: CallKind::CombineBf16, place: place.index(), row_bytes: 0, columns: 0 };
        let stage = StageArgs {
            comm: self.comm_in(&place, call, None),
            x: place.at(place.room().layout.recv_x),
            x_stride: out.row_bytes(),
            rows: out.ptr(),
            weights: DevicePtr::NULL,
            weight_rows: DevicePtr::NULL,
            header: handle.tables.header,
            num_rows: rows,
            row_bytes: out.row_bytes() as u32,
            num_topk: 0,
            is_for_peers: 0,
            reserved: 0,
        };
        let from = place.at(place.room().layout.recv_topk_weights);
        let outs = [("out", Some(out)), ("out_topk_weights", out_topk_weights.map(|it| &**it))];
        let mut uses = Uses::from(self.core.owners(outs)?);
        outs.into_iter().filter_map(|(_, out)| out).for_each(|out| uses.fills(out, &handle));
        self.run_on(received, order, capturing, uses, |buffer, stream| {
            let sms = buffer.core.device().info().sm_count;
            // SAFETY: the memory of tensors and of the handle's block is freed only behind all work
            // enqueued on streams, and a recording keeps them; the pool has so many rows there.
            unsafe {
                match handle.tables.by_expert {
                    Some(at) => {
                        let args = ExpertStageArgs {
                            stage,
                            expert_counts: at.expert_counts,
                            expert_starts: at.expert_starts,
                            local_experts: handle.local_experts.into(),
                        };
                        buffer.kernels.stage_by_expert.call(stream, sms, STAGE_THREADS, 0, args)?;
                    }
                    None => buffer.kernels.stage_combine.call(stream, sms, STAGE_THREADS, 0, stage)?,
                }
                match weights {
                    Some((to, bytes)) if bytes > 0 => stream.copy(to, from, bytes),
                    _ => Ok(()),
                }
            }
        })
    }
}
