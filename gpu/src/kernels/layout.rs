//! Dispatch layout: counts tokens per rank and selections per expert, on the sender's side.

use epoxide_macros::kernel;

#[cfg(not(target_arch = "nvptx64"))]
use super::{Call, ContractError, Kernel, KernelInfo, ParamLayout};
use crate::layout::{LayoutArgs, MAX_RANKS, MAX_TOPK};
use crate::simt::*;

/// Counts tokens per rank (each token once per rank) and selections per expert, and marks which token goes where.
///
/// One warp per token, one lane per top-k entry. Counters gather in shared memory first: `num_ranks + num_experts` words.
#[kernel(
    threads = 1024, min_blocks = 1, barriers = 2, registers = 64,
    requires(
        args.num_topk >= 1,
        args.num_topk <= MAX_TOPK,
        args.num_ranks >= 1,
        args.num_ranks <= MAX_RANKS as u32,
        args.num_experts >= args.num_ranks,
        args.num_experts.is_multiple_of(args.num_ranks),
    )
)]
pub unsafe fn dispatch_layout(args: LayoutArgs) {
    let (lane, counters) = (laneid(), dynamic_shared());
    let num_counters = args.num_ranks + args.num_experts;
    let mut i = tid();
    while i < num_counters {
        st_shared_u32(counters + i * 4, 0);
        i += ntid();
    }
    barrier_sync();

    let local_experts = args.num_experts / args.num_ranks;
    let warps = ntid() / 32;
    let mut token = ctaid() * warps + tid() / 32;
    while token < args.num_tokens {
        let mut ranks = 0;
        if lane < args.num_topk {
            let entry = token as u64 * args.num_topk as u64 + lane as u64;
            let expert = ld_i64(args.topk_idx.0 + entry * 8);
            if expert >= 0 && expert < args.num_experts as i64 {
                ranks = 1 << (expert as u32 / local_experts);
                red_relaxed_cta_shared_add_u32(counters + (args.num_ranks + expert as u32) * 4, 1);
            } else if expert != -1 {
                red_relaxed_gpu_min_u64(args.invalid.0, (token as u64) << 8 | lane as u64);
            }
        }
        let ranks = redux_or(ranks);
        if lane < args.num_ranks {
            let hit = ranks >> lane & 1;
            st_u8(args.is_token_in_rank.0 + token as u64 * args.num_ranks as u64 + lane as u64, hit);
            if hit != 0 {
                red_relaxed_cta_shared_add_u32(counters + lane * 4, 1);
            }
        }
        token += nctaid() * warps;
    }
    barrier_sync();

    let mut i = tid();
    while i < num_counters {
        let count = ld_shared_u32(counters + i * 4);
        if count != 0 {
            let out = if i < args.num_ranks {
                args.num_tokens_per_rank.0 + i as u64 * 4
            } else {
                args.num_tokens_per_expert.0 + (i - args.num_ranks) as u64 * 4
            };
            red_relaxed_gpu_add_u32(out, count);
        }
        i += ntid();
    }
}
