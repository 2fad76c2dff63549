//! Gradients through a dispatch and its combine, along the handle of the forward pass.

use epoxide_gpu::kernels::WeightGradients;
use epoxide_gpu::layout::{DevicePtr, WeightGradientsArgs};

use super::{
    Buffer, CachedDispatchRequest, CombineRequest, CombineRows, Combined, DType, DispatchHandle, Place,
    Received, StreamOrder, Tensor, TypedTensor,
};
use crate::driver::Event;
use crate::ep::core::Uses;
use crate::ep::tensor::Owner;
use crate::error::{Error, Result};

/// Threads per block of the kernel that makes gradients of weights.
const THREADS: u32 = WeightGradients::INFO.max_threads;

/// The result of [`Buffer::weights_backward`], in memory of its own.
#[derive(Debug)]
#[non_exhaustive]
pub struct GradWeights {
    /// f32 `[num_tokens, num_topk]`: the gradient of the dispatch's weights, 0 where an entry
    /// selected nothing. Rows are `row_stride()` bytes apart.
    pub grad_topk_weights: TypedTensor<'static, f32>,
    /// Where an asynchronous call ends.
    pub event: Option<Event>,
}

impl Buffer {
    /// Backward of [`Buffer::combine`]: gives each row that the combine summed its gradient.
    /// Collective; the host does not wait.
    ///
    /// `grad`, `[num_tokens, hidden]`, is the gradient of
    /// [`combined_x`](super::Combined::combined_x), of any dtype of a dispatch, and `handle` that
    /// of the forward pass. [`Received::recv_x`] of the result has the gradients of the rows,
    /// `[num_recv_tokens, hidden]`, in their order: a combine is a sum, so each row has the
    /// gradient of its token, bit for bit. Padding of rows by expert holds anything.
    ///
    /// A combine of rows by expert with [`weights`](CombineRequest::weights) has multiplied them:
    /// multiply the gradient of each row by its
    /// [`recv_topk_weights`](Received::recv_topk_weights) of the forward pass.
    ///
    /// It is [`Buffer::dispatch_cached`], which sends scales as well. `place` is another one than
    /// that of the forward pass, as long as those rows are needed.
    ///
    /// # Errors
    /// The same as [`Buffer::dispatch_cached`].
    pub fn combine_backward<'p>(
        &mut self,
        place: &'p mut Place,
        grad: &Tensor<'_>,
        handle: &DispatchHandle,
        order: StreamOrder<'_>,
    ) -> Result<Received<'p>> {
        self.dispatch_cached(place, CachedDispatchRequest::new(grad, handle), order)
    }

    /// Backward of [`Buffer::dispatch`]: sums the gradients of a token's rows. Collective; the host
    /// does not wait.
    ///
    /// `grad_rows`, `[num_recv_tokens, hidden]`, bf16, f16 or f32, are the gradients of
    /// [`Received::recv_x`] in the order of its rows, and `handle` is that of the forward pass.
    /// [`combined_x`](Combined::combined_x) of the result is the gradient of `x`, `[num_tokens,
    /// hidden]`: a dispatch copies a token to its rows, so the gradient of the token is their sum,
    /// in FP32 and in the order of [`Buffer::combine`].
    ///
    /// It is [`Buffer::combine`] without weights. Rows of
    /// [`Place::combine_rows`](super::Place::combine_rows) are those of the forward pass's place.
    ///
    /// # Errors
    /// The same as [`Buffer::combine`].
    pub fn dispatch_backward<'a>(
        &mut self,
        grad_rows: impl Into<CombineRows<'a>>,
        handle: &'a DispatchHandle,
        order: StreamOrder<'_>,
    ) -> Result<Combined> {
        self.combine(CombineRequest::new(grad_rows, handle), order)
    }

    /// Gradient of the top-k weights. For entry k of token t it is the inner product `<grad[t],
    /// y[t][k]>` of the gradient of the token's sum and the result of the entry's expert for the
    /// token. Collective; the host does not wait.
    ///
    /// The ranks of the experts compute the products in FP32. A combine of its own, with 4 bytes
    /// for each weight, returns them to the tokens' owners.
    ///
    /// * `received`: of the forward pass. By token it needs the ids, which are sent with
    ///   [`topk_weights`](super::DispatchRequest::topk_weights).
    /// * `grad_rows`: `[num_recv_tokens, hidden]`, bf16 or f32, the rows of
    ///   [`Buffer::combine_backward`], not weighted.
    /// * `expert_rows`: the experts' results for the rows, not weighted, of the same dtype. Where
    ///   rows are by expert: `[num_recv_tokens, hidden]`, in their order. Else `[num_recv_tokens *
    ///   num_topk, hidden]`: row `r * num_topk + k` is that of the expert `recv_topk_idx[r][k]`.
    ///   Rows of -1 and of padding are not read.
    ///
    /// # Errors
    /// The same as [`Buffer::combine`]; [`Error::StaleHandle`] where a later dispatch has
    /// overwritten `received`; [`Error::Argument`] if its rows have no ids, or while
    /// [`PoolRows`](super::PoolRows) of its place are in use.
    pub fn weights_backward(
        &mut self,
        received: &Received<'_>,
        grad_rows: &Tensor<'_>,
        expert_rows: &Tensor<'_>,
        order: StreamOrder<'_>,
    ) -> Result<GradWeights> {
        let (capturing, place, handle) = self.begin_on(received, order)?;
        place.check_rows_free()?;
        let (by_expert, rows) = (handle.tables.by_expert, handle.output_rows());
        // Fields of `Received` are the caller's to replace: shapes are the handle's, and ids and
        // sources are read in the place.
        let num_topk = match by_expert {
            Some(tables) if received.recv_src_entry.is_some() => tables.num_topk,
            Some(_) => {
                let rule = "its rows came without their entries: give the one of the uncached dispatch";
                return Err(Error::argument("received", "without recv_src_entry", rule));
            }
            None => handle.num_topk.filter(|_| received.recv_topk_idx.is_some()).ok_or_else(|| {
                let rule = "its rows came without ids: give the dispatch topk_weights";
                Error::argument("received", "without recv_topk_idx", rule)
            })?,
        };
        let dtypes = [DType::Bf16, DType::F32];
        grad_rows.expect_strided(
            "grad_rows",
            &dtypes,
            &[("num_recv_tokens", Some(rows)), ("hidden", None)],
        )?;
        grad_rows.expect_rows_of_16("grad_rows")?;
        let (dtype, hidden) = (grad_rows.dtype(), grad_rows.columns());
        self.check_row_capacity(grad_rows.row_bytes())?;
        let (label, of_experts) = match by_expert {
            Some(_) => ("num_recv_tokens", rows),
            None => ("num_recv_tokens * num_topk", rows * u64::from(num_topk)),
        };
        let dims = [(label, Some(of_experts)), ("hidden", Some(hidden))];
        expert_rows.expect_strided("expert_rows", &[dtype], &dims)?;
        expert_rows.expect_rows_of_16("expert_rows")?;

        // By expert each entry's product has its own row, 0 except one column, so a combine adds
        // nothing to it. Rows are a multiple of 16 bytes.
        let columns = if by_expert.is_some() { num_topk.next_multiple_of(4) } else { num_topk };
        let (block, (products_at, empty_at)) = self.core.arena().take(|pieces| {
            let products = pieces.array("grad_weights", rows * u64::from(columns), 4);
            let empty = by_expert.is_none().then(|| pieces.array("empty rows", rows, 16));
            (products, empty)
        })?;
        let layout = &place.room().layout;
        let args = WeightGradientsArgs {
            grad_rows: grad_rows.ptr(),
            grad_stride: grad_rows.row_stride(),
            expert_rows: expert_rows.ptr(),
            expert_stride: expert_rows.row_stride(),
            // Rows by expert have an entry each, in the place of ids.
            entries: place.at(layout.recv_topk_idx),
            src_idx: by_expert.map_or(DevicePtr::NULL, |_| place.at(layout.recv_src_idx)).into(),
            header: handle.tables.header,
            out: products_at.into(),
            num_rows: rows as u32,
            row_bytes: grad_rows.row_bytes() as u32,
            num_topk,
            columns,
            is_f32: (dtype == DType::F32).into(),
            reserved: 0,
        };
        let inputs = [("grad_rows", Some(grad_rows)), ("expert_rows", Some(expert_rows))];
        let mut uses = Uses::from(self.core.owners(inputs)?);
        uses.push(block.clone() as Owner);
        self.run_on(received, order, capturing, uses, |buffer, stream| {
            let sms = buffer.core.device().info().sm_count;
            // SAFETY: the memory of tensors and blocks is freed only behind all work enqueued on
            // streams, and a recording keeps it; the pool has the tables of so many rows.
            unsafe {
                if let Some(empty) = empty_at.filter(|_| rows > 0) {
                    stream.fill(empty, 0, rows * 16)?;
                }
                buffer.kernels.weight_gradients.call(stream, sms, THREADS, 0, args)
            }
        })?;

        let shape = [rows, u64::from(columns)];
        let Some(empty) = empty_at else {
            let products = Tensor::in_memory(products_at, DType::F32, &shape, block as Owner);
            let combined = self.combine(CombineRequest::new(&products, &received.handle), order)?;
            let sums = &combined.combined_x;
            let owner = sums.owner().cloned().unwrap_or_else(|| handle.block.clone() as Owner);
            let shape = [u64::from(handle.num_tokens), u64::from(num_topk)];
            let grads = Tensor::in_memory(sums.ptr(), DType::F32, &shape, owner);
            let grads = grads.with_row_stride(u64::from(columns) * 4).result("grad_topk_weights", &handle);
            return Ok(GradWeights { grad_topk_weights: grads.typed()?, event: combined.event });
        };
        let products = TypedTensor::in_memory(products_at, &shape, block.clone() as Owner);
        let empty = Tensor::in_memory(empty, DType::Bf16, &[rows, 8], block as Owner);
        let request = CombineRequest::new(&empty, &received.handle).topk_weights(&products);
        let combined = self.combine(request, order)?;
        let grads = combined
            .combined_topk_weights
            .ok_or_else(|| Error::internal("weights_backward", "a combine of weights has left none"))?;
        Ok(GradWeights { grad_topk_weights: grads, event: combined.event })
    }
}
