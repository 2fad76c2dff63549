//! What travels with rows: their source indices and top-k entries, which a block's last warps send.
//!
//! Rows of consecutive tokens at a rank are consecutive, so a warp that takes several tokens at once, an entry a lane, fills whole packets
//! of the link, where the warps that move rows would send a token's few bytes at a time.

use crate::kernels::ids::ld_id;
use crate::kernels::list::{Destination, entry_at};
use crate::layout::{DispatchArgs, FEW_RANKS, SEND_LIST_STRIDE, SEND_ROW_STRIDE};
use crate::simt::*;

/// A lane's entry among those of the tokens that its warp takes together: of token `token`, top-k entry `k`.
#[derive(Clone, Copy)]
pub struct Metadata {
    /// The lane's token, or `u32::MAX` where there is none for it.
    token: u32,
    k: u32,
    /// Where the token goes: its row at every rank, or -1. Of many ranks, the list of its destinations is read when they are sent to.
    rows: [i32; FEW_RANKS],
    /// A global id.
    expert: i64,
    weight: f32,
}

/// Tokens that a warp takes together.
#[inline(always)]
pub fn tokens_at_once(args: &DispatchArgs) -> u32 {
    // A clamp instead of a test, so that no division needs a trap. A token has at most 32 entries.
    32 / args.num_topk.clamp(1, 32)
}

impl Metadata {
    /// Reads the entries of the tokens from `first` on that are before `end`, ahead of their use.
    #[inline(always)]
    pub unsafe fn fetch<const MANY: bool>(args: &DispatchArgs, first: u32, end: u32) -> Metadata {
        // SAFETY: the entries of tokens before `end` lie inside their tensors.
        unsafe {
            let (lane, columns) = (laneid(), args.num_topk.clamp(1, 32));
            let (nth, k) = (lane / columns, lane % columns);
            let token = first + nth;
            let exists = (nth < tokens_at_once(args)) & (token < end);
            let (mut expert, mut weight) = (-1, 0.0);
            let mut rows = [-1; FEW_RANKS];
            if exists {
                if !MANY {
                    let at = args.send_row.0 + (token * SEND_ROW_STRIDE) as u64 * 4;
                    let (low, high) = (ld_v4(at), ld_v4(at + 16));
                    unroll8!(RANK => {
                        rows[RANK] = if RANK < 4 { low[RANK % 4] } else { high[RANK % 4] } as i32;
                    });
                }
                if k < args.num_topk {
                    let entry = token as u64 * args.num_topk as u64 + k as u64;
                    expert = ld_id(args.topk_idx, args.narrow_ids, entry);
                    weight = ld_f32(args.topk_weights.0 + entry * 4);
                }
            }
            Metadata { token: if exists { token } else { u32::MAX }, k, rows, expert, weight }
        }
    }

    /// Writes source index, local expert ids and weights to every rank that wants the lane's token.
    #[inline(always)]
    pub unsafe fn send<const MANY: bool>(&self, args: &DispatchArgs) {
        // SAFETY: rows were planned inside the pools; this is the entry's only writer.
        unsafe {
            if MANY {
                let mut nth = if self.token == u32::MAX { SEND_LIST_STRIDE } else { 0 };
                while nth < SEND_LIST_STRIDE {
                    let to = Destination::at(entry_at(args.send_row.0, self.token, nth), true);
                    if to.row < 0 {
                        break;
                    }
                    self.send_to(args, to.rank, to.pool(&args.comm), to.row as u64);
                    nth += 1;
                }
                return;
            }
            unroll8!(RANK => {
                if self.rows[RANK] >= 0 {
                    self.send_to(args, RANK as u32, args.comm.pools[RANK].0, self.rows[RANK] as u64);
                }
            });
        }
    }

    /// The same to rank `rank`, whose pool begins at `base`.
    #[inline(always)]
    unsafe fn send_to(&self, args: &DispatchArgs, rank: u32, base: u64, row: u64) {
        // SAFETY: passed on to the caller.
        unsafe {
            let pool = &args.comm.pool;
            if self.k < args.num_topk {
                let first = rank * args.local_experts;
                let local = self.expert - first as i64;
                let here = local >= 0 && local < args.local_experts as i64;
                let entry = row * args.num_topk as u64 + self.k as u64;
                st_i64(base + pool.recv_topk_idx + entry * 8, if here { local } else { -1 });
                st_f32(base + pool.recv_topk_weights + entry * 4, if here { self.weight } else { 0.0 });
            }
            if self.k == 0 {
                st_u32(base + pool.recv_src_idx + row * 4, self.token);
            }
        }
    }
}
