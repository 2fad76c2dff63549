//! Combine: every rank gathers the rows that its tokens were given and sums them.
//!
//! Soundness: a rank's combine rows are read behind its ready word, which it publishes behind the
//! kernel that wrote them. They are read before this rank publishes its done word, and are written
//! again only behind that word. Rows and outputs lie inside their tensors, because the dispatch
//! that is answered has planned them so. A piece of a token's sum has one warp, and its slots are
//! loaded again once all lanes have read them. Collectives stand where all lanes of a warp arrive:
//! the conditions around them are the same in all lanes.

mod stage;
mod staged;
mod sum;
mod weight_gradients;

use super::epoch::{
    Phase, ReadyEntry, current_epoch, give_up_combine, leave, tell_ready, trace, wait_ranks_ready,
};
use super::ring::{Ring, Turn, block_range};
use crate::layout::{CombineArgs, ExpertCombineArgs, Wait, ring_bytes};
use crate::simt::*;
use sum::ByExpert;

#[cfg(not(target_arch = "nvptx64"))]
pub use stage::{StageByExpert, StageCombine};
#[cfg(not(target_arch = "nvptx64"))]
pub use staged::{CombineStagedBf16, CombineStagedF32, CombineStagedManyBf16, CombineStagedManyF32};
pub use sum::{
    Bf16, Contributors, F16, F32, Gather, Item, Listed, Outputs, Peers, Ranks, Sink, Summand, VECTORS, spoil,
    sum_rows, vectors_of,
};
#[cfg(not(target_arch = "nvptx64"))]
pub use weight_gradients::WeightGradients;

kernels! {
    kernel(
        threads = 512, barriers = 2, registers = 128, dependent,
        block >= 32, shared = shared_bytes(&args, block)
    );
    fn(args: CombineArgs);

    /// Sums BF16 rows in FP32, in rank order, and rounds once. Unweighted.
    ///
    /// Bulk loads fill a warp's ring of slots, one slot per (piece of a row, contributing rank). So the
    /// bytes in flight do not depend on how many ranks a token went to. Shared memory: per warp `slots
    /// * slot_bytes`, then all barriers.
    combine_bf16 { combine::<Bf16, Ranks, false>(&args, || Ranks::new(&args, args.send_row.0)) }

    /// Sums FP32 rows, otherwise as [`CombineBf16`].
    combine_f32 { combine::<F32, Ranks, false>(&args, || Ranks::new(&args, args.send_row.0)) }

    /// Sums F16 rows, otherwise as [`CombineBf16`]; a sum that is too large for F16 is infinite.
    combine_f16 { combine::<F16, Ranks, false>(&args, || Ranks::new(&args, args.send_row.0)) }

    /// Sums BF16 rows of up to 64 ranks, otherwise as [`CombineBf16`].
    combine_many_bf16 { combine::<Bf16, Listed, true>(&args, || <Listed as Peers>::new(&args)) }

    /// Sums FP32 rows of up to 64 ranks, otherwise as [`CombineBf16`].
    combine_many_f32 { combine::<F32, Listed, true>(&args, || <Listed as Peers>::new(&args)) }

    /// Sums F16 rows of up to 64 ranks, otherwise as [`CombineF16`].
    combine_many_f16 { combine::<F16, Listed, true>(&args, || <Listed as Peers>::new(&args)) }
}

kernels! {
    kernel(
        threads = 512, barriers = 2, registers = 128, dependent,
        block >= 32, shared = shared_bytes(&args.combine, block),
        requires(..CombineArgs(args.combine))
    );
    fn(args: ExpertCombineArgs);

    /// Sums BF16 rows by expert in FP32, in the order of the token's entries, each times its weight,
    /// and rounds once.
    combine_by_expert_bf16 { combine::<Bf16, ByExpert, true>(&args.combine, || ByExpert::new(&args)) }

    /// Sums FP32 rows by expert, otherwise as [`CombineByExpertBf16`].
    combine_by_expert_f32 { combine::<F32, ByExpert, true>(&args.combine, || ByExpert::new(&args)) }

    /// Sums F16 rows by expert, otherwise as [`CombineByExpertBf16`].
    combine_by_expert_f16 { combine::<F16, ByExpert, true>(&args.combine, || ByExpert::new(&args)) }
}

/// # Safety
/// Rows were planned inside the pools.
#[device]
unsafe fn combine<E: Summand, C: Contributors, const MANY: bool>(
    args: &CombineArgs,
    ranks: impl FnOnce() -> C,
) {
    let comm = &args.comm;
    let (warp, warps) = (tid() / 32, ntid() / 32);
    trace(comm, Phase::Enter);
    let entry = ReadyEntry::read(comm, args.header.0);
    let epoch = current_epoch(comm);
    let ready = entry.ready_word(comm, epoch);
    if ctaid() == 0 && warp == 0 {
        tell_ready::<MANY>(comm, ready);
    }
    let planned = entry.is_planned();
    let (begin, end) = block_range(args.num_tokens);
    let ring = Ring::new(args.slots, args.slot_bytes, warps);
    let ranks = ranks();

    // This rank's own tables are read while the peers' words are on their way.
    let gather = Gather::start(args, &ranks, begin, end, warp, warps);
    let joined = dynamic_shared() + ring_bytes(warps, args.slots, args.slot_bytes);
    let joined = wait_ranks_ready::<MANY>(comm, &entry, epoch, ready, joined, Wait::CombineReady);
    if joined && planned {
        // The peers' rows were released to this thread; the copy engine must see them too.
        fence_proxy_async_global();
        let mut sums = Outputs::<false>::new(args);
        sum_rows::<E, _, _, false>(args, &ring, &mut Turn::first(), &ranks, &mut sums, gather);
    } else {
        spoil::<false>(args, begin, end, warp, warps);
    }
    if leave::<MANY>(comm, epoch, joined, Wait::CombineDone) && give_up_combine::<MANY>(comm, epoch) {
        spoil::<false>(args, 0, args.num_tokens, 0, 1);
    }
}

/// Shared memory of a block of so many threads: the rings, then a word for whether it has joined.
#[cfg(not(target_arch = "nvptx64"))]
fn shared_bytes(args: &CombineArgs, block: u32) -> u32 {
    crate::layout::shared_with_rings(block / 32, args.slots, args.slot_bytes, super::epoch::JOINED_BYTES)
}
