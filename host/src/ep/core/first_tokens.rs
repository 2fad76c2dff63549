//! Batches whose size is only on the device: their ids, with -1 behind the last token.

use epoxide_gpu::kernels::FirstTokens;
use epoxide_gpu::layout::{FirstTokensArgs, MAX_TOPK};

use super::{Core, HasCore, StreamOrder, Uses};
use crate::ep::experts::is_narrow;
use crate::ep::tensor::Owner;
use crate::ep::{DType, ExpertId, TypedTensor};
use crate::error::{Error, Result};

/// Blocks at most: the kernel is small, and runs before one that takes the whole device.
const MOST_BLOCKS: u32 = 16;
/// Threads of a block.
const THREADS: u32 = FirstTokens::INFO.max_threads;

/// `first_tokens` of a buffer.
pub fn first_tokens<B: HasCore, T: ExpertId>(
    buffer: &mut B,
    topk_idx: &TypedTensor<'_, T>,
    num_tokens: &TypedTensor<'_, i32>,
    order: StreamOrder<'_>,
) -> Result<TypedTensor<'static, T>> {
    let capturing = buffer.core().begin(order)?;
    topk_idx.expect("topk_idx", &[DType::I64, DType::I32], &[("max_tokens", None), ("num_topk", None)])?;
    num_tokens.expect("num_tokens", &[DType::I32], &[("count", Some(1))])?;
    let (max_tokens, num_topk) = (topk_idx.rows(), topk_idx.columns());
    if num_topk == 0 || num_topk > MAX_TOPK.into() {
        return Err(Error::argument("num_topk", num_topk, format!("must be 1 to {MAX_TOPK}")));
    }
    let most = i32::MAX as u64 / num_topk;
    if max_tokens > most {
        let rule = format!("must be at most {most} with {num_topk} entries: entries are counted in 31 bits");
        return Err(Error::argument("max_tokens", max_tokens, rule));
    }
    let (block, out) = buffer
        .core()
        .arena()
        .take(|pieces| pieces.array("first_topk_idx", max_tokens * num_topk, T::DTYPE.size()))?;
    let args = FirstTokensArgs {
        topk_idx: topk_idx.ptr(),
        num_tokens: num_tokens.ptr().into(),
        out,
        max_tokens: max_tokens as u32,
        num_topk: num_topk as u32,
        narrow_ids: is_narrow(topk_idx),
        reserved: 0,
    };
    let inputs = [("topk_idx", Some(&**topk_idx)), ("num_tokens", Some(&**num_tokens))];
    let mut uses = Uses::from(buffer.core().owners(inputs)?);
    uses.push(block.clone() as Owner);
    Core::run(buffer, order, capturing, None, &uses, |buffer, stream| {
        let grid = (args.max_tokens * args.num_topk).div_ceil(THREADS).clamp(1, MOST_BLOCKS);
        // SAFETY: the memory of tensors and block is freed only behind all work enqueued on
        // streams, and a recording keeps them.
        unsafe { buffer.first_tokens().call(stream, grid, THREADS, 0, args) }
    })?;
    let out = TypedTensor::in_memory(out, &[max_tokens, num_topk], block);
    Ok(out.result("topk_idx", buffer.core().sequence()))
}
