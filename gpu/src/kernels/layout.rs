//! Dispatch layout: counts tokens per rank and selections per expert, on the sender's side.
//!
//! Soundness: the kernel reads ids that are not written meanwhile. Counters are added to by
//! atomics, in shared memory between two block barriers; each byte of `is_token_in_rank` has one
//! lane. Collectives stand where all lanes of a warp arrive: a warp has one token.

use super::ids::{ld_id, place};
use crate::layout::LayoutArgs;
use crate::simt::*;

/// Counts tokens per rank (each token once per rank), per node (once per node) and selections per
/// expert, and marks which token goes where. With a table of experts it writes the physical ones as
/// well, which dispatch reads in place of the ids.
///
/// One warp per token, one lane per top-k entry. Counters gather in shared memory first:
/// `num_ranks + num_experts + num_nodes` words.
#[kernel(
    threads = 1024, barriers = 2, registers = 64, dependent, block >= 32,
    shared = (args.num_ranks + args.num_ranks / args.ranks_per_node)
        .saturating_add(args.num_experts)
        .saturating_mul(4)
)]
pub unsafe fn dispatch_layout(args: LayoutArgs) {
    let (lane, counters) = (laneid(), dynamic_shared());
    let num_nodes = args.num_ranks / args.ranks_per_node;
    let (experts_at, nodes_at) = (args.num_ranks, args.num_ranks + args.num_experts);
    let num_counters = nodes_at + num_nodes;
    block_stride!(i in 0..num_counters => {
        st_shared_u32(counters + i * 4, 0);
    });
    barrier_sync();

    let local_experts = args.num_experts / args.num_ranks;
    let warps = ntid() / 32;
    stride!(token in ctaid() * warps + tid() / 32..args.num_tokens, nctaid() * warps => {
        let mut owner = NOBODY;
        if lane < args.num_topk {
            let entry = row_major(token, args.num_topk, lane);
            let id = ld_id(args.topk_idx, args.narrow_ids, entry);
            let expert = place(&args.table, id, token, args.rank, args.num_experts);
            let is_known = expert >= 0 && expert < args.num_experts as i64;
            if !args.physical.is_null() {
                st_i32(args.physical.array::<i32>().at(entry), if is_known { expert as i32 } else { -1 });
            }
            if is_known {
                owner = expert as u32 / local_experts;
                red_relaxed_cta_shared_add_u32(counters + (experts_at + expert as u32) * 4, 1);
            } else if expert != -1 {
                red_relaxed_gpu_min_u64(args.invalid.0, (token as u64) << 8 | lane as u64);
            }
        }
        // 32 ranks at a time, a lane each.
        stride!(first in 0..args.num_ranks, 32 => {
            let bit = owner.wrapping_sub(first);
            let ranks = redux_or(if bit < 32 { 1 << bit } else { 0 });
            let rank = first + lane;
            if rank < args.num_ranks {
                let hit = ranks >> lane & 1;
                st_u8(args.is_token_in_rank.array::<u8>().at(row_major(token, args.num_ranks, rank)), hit);
                if hit != 0 {
                    red_relaxed_cta_shared_add_u32(counters + rank * 4, 1);
                }
            }
        });
        if num_nodes > 1 {
            let nodes = redux_or(if owner != NOBODY { 1 << (owner / args.ranks_per_node) } else { 0 });
            if nodes >> lane & 1 != 0 {
                red_relaxed_cta_shared_add_u32(counters + (nodes_at + lane) * 4, 1);
            }
        }
    });
    barrier_sync();

    block_stride!(i in 0..num_counters => {
        let count = ld_shared_u32(counters + i * 4);
        if count != 0 {
            let out = if i < experts_at {
                args.num_tokens_per_rank.array::<u32>().at(i)
            } else if i < nodes_at {
                args.num_tokens_per_expert.array::<u32>().at(i - experts_at)
            } else {
                args.num_tokens_per_rdma_rank.array::<u32>().at(i - nodes_at)
            };
            // With one node, nodes are not counted.
            red_relaxed_gpu_add_u32(out, count);
        }
    });
}

/// The owner of an entry that selects nothing.
const NOBODY: u32 = u32::MAX;
