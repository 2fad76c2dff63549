//! Combine: every rank gathers the rows that its tokens were given and sums them.

use core::mem::offset_of;

use epoxide_macros::kernel;

use super::epoch::{Phase, current_epoch, leave, pool_of, tell_ready, trace, wait_ready};
use super::ring::{Ring, Turn, block_range};
#[cfg(not(target_arch = "nvptx64"))]
use super::{Call, ContractError, Kernel, KernelInfo, ParamLayout};
use crate::layout::{
    CombineArgs, MAX_RANKS, PlanHeader, PlanStatus, SEND_ROW_STRIDE, StageArgs, Wait, row_stride,
};
use crate::simt::*;

/// Most bytes of a slot: 32 lanes with eight vectors of 16 bytes each.
pub const MAX_SLOT_BYTES: u32 = 32 * 16 * VECTORS as u32;

/// Vectors of 16 bytes that a lane sums at a time, in registers.
const VECTORS: usize = 8;

/// Copies the caller's rows and weights into this rank's pool, where peers can gather them. One warp per row.
#[kernel(
    threads = 512, min_blocks = 1, barriers = 0, registers = 64,
    requires(args.row_bytes.is_multiple_of(16), args.x_stride.is_multiple_of(16))
)]
pub unsafe fn stage_combine(args: StageArgs) {
    let (lane, warps) = (laneid(), ntid() / 32);
    if ld_u32(args.header.0) != PlanStatus::Ready as u32 {
        return;
    }
    let rows =
        ld_u32(args.header.0 + offset_of!(PlanHeader, num_recv_tokens) as u64).min(args.capacity as u32);
    let mut row = ctaid() * warps + tid() / 32;
    while row < rows {
        if !args.x.is_null() {
            let from = args.x.0 + row as u64 * args.x_stride;
            let to = args.rows.0 + row as u64 * row_stride(args.row_bytes as u64);
            let mut at = lane * 16;
            // Four vectors in flight per lane.
            while at + 3 * 512 < args.row_bytes {
                let vectors = [
                    ld_stream_v4(from + at as u64),
                    ld_stream_v4(from + at as u64 + 512),
                    ld_stream_v4(from + at as u64 + 1024),
                    ld_stream_v4(from + at as u64 + 1536),
                ];
                st_v4(to + at as u64, vectors[0]);
                st_v4(to + at as u64 + 512, vectors[1]);
                st_v4(to + at as u64 + 1024, vectors[2]);
                st_v4(to + at as u64 + 1536, vectors[3]);
                at += 2048;
            }
            while at < args.row_bytes {
                st_v4(to + at as u64, ld_stream_v4(from + at as u64));
                at += 512;
            }
        }
        if !args.weights.is_null() && lane < args.num_topk {
            let entry = (row as u64 * args.num_topk as u64 + lane as u64) * 4;
            st_f32(args.weight_rows.0 + entry, ld_f32(args.weights.0 + entry));
        }
        row += nctaid() * warps;
    }
}

/// Sums BF16 rows in FP32, in rank order, and rounds once. Unweighted.
///
/// A warp's ring of slots is filled by bulk loads, one slot per (piece of a row, contributing rank), so that the bytes in
/// flight do not depend on how many ranks a token went to. Shared memory: per warp `slots * slot_bytes`, then all barriers.
#[kernel(
    threads = 512, min_blocks = 1, barriers = 2, registers = 128,
    requires(
        args.row_bytes.is_multiple_of(16),
        args.row_bytes >= 16,
        args.slots >= 2,
        args.slots <= 32,
        args.slot_bytes.is_multiple_of(16),
        args.slot_bytes >= 16,
        args.slot_bytes <= MAX_SLOT_BYTES,
        args.pieces == args.row_bytes.div_ceil(args.slot_bytes),
        args.pieces >= 1,
    )
)]
pub unsafe fn combine_bf16(args: CombineArgs) {
    combine::<Bf16>(&args);
}

/// Sums FP32 rows, otherwise as [`CombineBf16`].
#[kernel(
    threads = 512, min_blocks = 1, barriers = 2, registers = 128,
    requires(
        args.row_bytes.is_multiple_of(16),
        args.row_bytes >= 16,
        args.slots >= 2,
        args.slots <= 32,
        args.slot_bytes.is_multiple_of(16),
        args.slot_bytes >= 16,
        args.slot_bytes <= MAX_SLOT_BYTES,
        args.pieces == args.row_bytes.div_ceil(args.slot_bytes),
        args.pieces >= 1,
    )
)]
pub unsafe fn combine_f32(args: CombineArgs) {
    combine::<F32>(&args);
}

/// What 16 bytes of a row hold.
trait Element {
    /// Adds a vector to its sums.
    fn add(sum: &mut [f32; 8], vector: [u32; 4]);
    /// Rounds the sums to a vector.
    unsafe fn round(sum: &[f32; 8]) -> [u32; 4];
}

struct Bf16;
struct F32;

impl Element for Bf16 {
    #[inline(always)]
    fn add(sum: &mut [f32; 8], v: [u32; 4]) {
        sum[0] += bf16x2_lo(v[0]);
        sum[1] += bf16x2_hi(v[0]);
        sum[2] += bf16x2_lo(v[1]);
        sum[3] += bf16x2_hi(v[1]);
        sum[4] += bf16x2_lo(v[2]);
        sum[5] += bf16x2_hi(v[2]);
        sum[6] += bf16x2_lo(v[3]);
        sum[7] += bf16x2_hi(v[3]);
    }

    #[inline(always)]
    unsafe fn round(s: &[f32; 8]) -> [u32; 4] {
        // SAFETY: arithmetic on registers.
        unsafe {
            [
                pack_bf16x2(s[0], s[1]),
                pack_bf16x2(s[2], s[3]),
                pack_bf16x2(s[4], s[5]),
                pack_bf16x2(s[6], s[7]),
            ]
        }
    }
}

impl Element for F32 {
    #[inline(always)]
    fn add(sum: &mut [f32; 8], v: [u32; 4]) {
        sum[0] += f32::from_bits(v[0]);
        sum[1] += f32::from_bits(v[1]);
        sum[2] += f32::from_bits(v[2]);
        sum[3] += f32::from_bits(v[3]);
    }

    #[inline(always)]
    unsafe fn round(s: &[f32; 8]) -> [u32; 4] {
        [s[0].to_bits(), s[1].to_bits(), s[2].to_bits(), s[3].to_bits()]
    }
}

#[inline(always)]
unsafe fn combine<E: Element>(args: &CombineArgs) {
    // SAFETY: as the argument struct documents; rows were planned inside the pools.
    unsafe {
        let comm = &args.comm;
        let (lane, warp, warps) = (laneid(), tid() / 32, ntid() / 32);
        trace(comm, Phase::Enter);
        let epoch = current_epoch(comm);
        if ctaid() == 0 && warp == 0 {
            tell_ready(comm, epoch);
        }
        let planned = ld_u32(args.header.0) == PlanStatus::Ready as u32;
        let (begin, end) = block_range(args.num_tokens);
        let first = Item::nth(args, begin, warp);
        let step = Item::nth(args, 0, warps);
        let ring = Ring::new(args.slots, args.slot_bytes);
        let peer = if lane < comm.num_ranks { pool_of(comm, lane) } else { 0 };

        let joined = wait_ready(comm, epoch, Wait::CombineReady);
        if joined && planned {
            // The peers' rows were released to this thread; the copy engine must see them too.
            fence_proxy_async();
            let mut load = Gather::new(args, peer, first, step, end);
            let mut filled = 0;
            while filled < args.slots && load.rank_bits != 0 {
                load_piece(&ring, args, &load, filled);
                load.advance(args);
                filled += 1;
            }
            let mut sum = Gather::new(args, peer, first, step, end);
            let (mut turn, mut item) = (Turn::first(), first);
            while item.token < end {
                // Tokens that went nowhere are not in the gather's sequence.
                let gathered = sum.item == item;
                if item.piece == 0 && !args.combined_weights.is_null() {
                    let row = if gathered { sum.row } else { -1 };
                    sum_weights(args, item.token, row, peer, lane);
                }
                let bytes = item.bytes(args);
                let mut sums = [[0.0f32; 8]; VECTORS];
                let mut contributors = if gathered { sum.rank_bits.count_ones() } else { 0 };
                while contributors != 0 {
                    ring.wait(&turn);
                    let from = ring.buffer(turn.slot);
                    unroll8!(J => {
                        let at = lane * 16 + J as u32 * 512;
                        if at < bytes {
                            E::add(&mut sums[J], ld_shared_v4(from + at));
                        }
                    });
                    // All lanes have read the slot: fill it again.
                    syncwarp();
                    if load.rank_bits != 0 {
                        load_piece(&ring, args, &load, turn.slot);
                        load.advance(args);
                    }
                    turn.advance(&ring);
                    contributors -= 1;
                }
                let row = args.combined_x.0 + item.token as u64 * args.row_bytes as u64;
                let to = row + (item.piece * args.slot_bytes) as u64;
                unroll8!(J => {
                    let at = lane * 16 + J as u32 * 512;
                    if at < bytes {
                        st_v4(to + at as u64, E::round(&sums[J]));
                    }
                });
                if gathered {
                    sum.next_item(args);
                }
                item = item.plus(args, step);
            }
        }
        leave(comm, epoch, joined, Wait::CombineDone);
    }
}

/// A piece of a token's row. A warp takes every n-th item of its block, so that pieces, not rows, are what is spread.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Item {
    token: u32,
    piece: u32,
}

impl Item {
    /// The `n`-th item from piece 0 of `token` on.
    #[inline(always)]
    fn nth(args: &CombineArgs, token: u32, n: u32) -> Self {
        Item { token: token + n / args.pieces, piece: n % args.pieces }
    }

    /// The item `step` further on.
    #[inline(always)]
    fn plus(self, args: &CombineArgs, step: Item) -> Self {
        let piece = self.piece + step.piece;
        let carry = (piece >= args.pieces) as u32;
        Item { token: self.token + step.token + carry, piece: piece - carry * args.pieces }
    }

    #[inline(always)]
    fn bytes(self, args: &CombineArgs) -> u32 {
        (args.row_bytes - self.piece * args.slot_bytes).min(args.slot_bytes)
    }
}

/// A warp's place in its sequence of (item, contributing rank). Items without contributors are left out.
struct Gather {
    item: Item,
    next: Item,
    step: Item,
    end: u32,
    /// Contributors of this item that are still to come; 0 at the end of the sequence.
    rank_bits: u32,
    /// Lane r: the token's row at rank r, or -1.
    row: i32,
    /// The same of the next item, fetched ahead.
    next_row: i32,
    /// Lane r: the address of rank r's combine rows.
    rows: u64,
}

impl Gather {
    #[inline(always)]
    unsafe fn new(args: &CombineArgs, peer: u64, first: Item, step: Item, end: u32) -> Self {
        // SAFETY: passed on to the caller.
        unsafe {
            let mut gather = Gather {
                item: first,
                next: first,
                step,
                end,
                rank_bits: 0,
                row: -1,
                next_row: send_row(args, first.token, end),
                rows: peer + args.comm.pool.combine_x,
            };
            gather.next_item(args);
            gather
        }
    }

    /// Goes on to the next item that has contributors.
    #[inline(always)]
    unsafe fn next_item(&mut self, args: &CombineArgs) {
        // SAFETY: `send_row` stays inside its matrix.
        unsafe {
            loop {
                (self.item, self.row) = (self.next, self.next_row);
                self.next = self.item.plus(args, self.step);
                self.next_row = send_row(args, self.next.token, self.end);
                self.rank_bits = ballot(self.row >= 0);
                if self.rank_bits != 0 || self.item.token >= self.end {
                    return;
                }
            }
        }
    }

    /// Goes on to the next contributor or item.
    #[inline(always)]
    unsafe fn advance(&mut self, args: &CombineArgs) {
        // SAFETY: passed on.
        unsafe {
            self.rank_bits &= self.rank_bits - 1;
            if self.rank_bits == 0 {
                self.next_item(args);
            }
        }
    }
}

/// Lane r: the row of `token` at rank r, or -1.
#[inline(always)]
unsafe fn send_row(args: &CombineArgs, token: u32, end: u32) -> i32 {
    // SAFETY: the entry lies inside `send_row`.
    unsafe {
        let lane = laneid();
        if token < end && lane < SEND_ROW_STRIDE {
            ld_i32(args.send_row.0 + (token * SEND_ROW_STRIDE + lane) as u64 * 4)
        } else {
            -1
        }
    }
}

/// Lane k: sums entry k of the token's weights over the ranks it went to.
#[inline(always)]
unsafe fn sum_weights(args: &CombineArgs, token: u32, row: i32, peer: u64, lane: u32) {
    // SAFETY: rows were planned inside the pools.
    unsafe {
        let active = lane < args.num_topk;
        let mut parts = [0.0f32; MAX_RANKS];
        // All loads first, so that they are in flight together.
        for (rank, part) in parts.iter_mut().enumerate() {
            let (base, row) = (shfl_u64(peer, rank as u32), shfl_u32(row as u32, rank as u32) as i32);
            let entry = row as i64 * args.num_topk as i64 + lane as i64;
            let from = (base + args.comm.pool.combine_weights).wrapping_add_signed(entry * 4);
            *part = ld_f32_if(active && row >= 0, from);
        }
        if active {
            let total = parts.into_iter().fold(0.0, |sum, part| sum + part);
            st_f32(args.combined_weights.0 + (token as u64 * args.num_topk as u64 + lane as u64) * 4, total);
        }
    }
}

/// The lane that knows the contributor's address starts the load, into a slot that no lane reads any more.
#[inline(always)]
unsafe fn load_piece(ring: &Ring, args: &CombineArgs, from: &Gather, slot: u32) {
    // SAFETY: the piece lies inside the contributor's combine rows.
    unsafe {
        if from.rank_bits.trailing_zeros() == laneid() {
            let row = from.row as u64 * row_stride(args.row_bytes as u64);
            let offset = (from.item.piece * args.slot_bytes) as u64;
            // The slot was read by ordinary loads; the copy engine writes it next.
            fence_proxy_async_shared();
            ring.load(slot, from.rows + row + offset, from.item.bytes(args));
        }
    }
}
