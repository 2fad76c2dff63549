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
pub(super) const VECTORS: usize = 8;

/// How many of them there are where warps take whole rows: one fewer, so that sixteen warps have registers enough.
pub(super) const fn vectors_of(whole_rows: bool) -> usize {
    if whole_rows { VECTORS - 1 } else { VECTORS }
}

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
pub(super) trait Element {
    /// Adds a vector to its sums.
    fn add(sum: &mut [f32; 8], vector: [u32; 4]);
    /// Rounds the sums to a vector.
    unsafe fn round(sum: &[f32; 8]) -> [u32; 4];
}

pub(super) struct Bf16;
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
        let (warp, warps) = (tid() / 32, ntid() / 32);
        trace(comm, Phase::Enter);
        let epoch = current_epoch(comm);
        if ctaid() == 0 && warp == 0 {
            tell_ready(comm, epoch);
        }
        let planned = ld_u32(args.header.0) == PlanStatus::Ready as u32;
        let (begin, end) = block_range(args.num_tokens);
        let ring = Ring::new(args.slots, args.slot_bytes, warps);
        let ranks = Ranks::new(args, args.send_row.0);

        let joined = wait_ready(comm, epoch, Wait::CombineReady);
        if joined && planned {
            // The peers' rows were released to this thread; the copy engine must see them too.
            fence_proxy_async();
            let mut sums = Outputs::<false>::new(args);
            sum_rows::<E, _, _, false>(args, &ring, &mut Turn::first(), &ranks, &mut sums, begin, end, warps);
        }
        leave(comm, epoch, joined, Wait::CombineDone);
    }
}

/// What a token's sum is made of: lane l knows contributor l, if there is one. They are added in ascending order.
pub(super) trait Contributors {
    /// The lane's row of `token`, or -1.
    unsafe fn row(&self, token: u32) -> i32;
    /// Where the lane's row is.
    unsafe fn address(&self, row: i32) -> u64;
    /// Where the lane's weights of that row are.
    unsafe fn weights(&self, row: i32) -> u64;
    /// Returns when the lane's row may be read.
    unsafe fn wait(&self, row: i32);
    /// Lanes that may have one, rounded up to a multiple of 8.
    fn lanes(&self) -> u32;
}

/// The combine rows of the ranks of this node. They may be read once all ranks are ready.
pub(super) struct Ranks<'a> {
    args: &'a CombineArgs,
    /// The lane's pool. What can be had from the arguments is not kept in registers.
    pool: u64,
    table: u64,
}

impl<'a> Ranks<'a> {
    /// `table`: i32 `[tokens, SEND_ROW_STRIDE]`.
    #[inline(always)]
    pub unsafe fn new(args: &'a CombineArgs, table: u64) -> Self {
        // SAFETY: the table of pools has an entry for every rank.
        unsafe {
            let (comm, lane) = (&args.comm, laneid());
            Ranks { args, pool: if lane < comm.num_ranks { pool_of(comm, lane) } else { 0 }, table }
        }
    }

    /// Lane l: rank l's row of the token whose entries begin at `entry`, or -1; -1 in all lanes unless there is such a token. Nobody
    /// waits for the load here.
    #[inline(always)]
    pub unsafe fn row_at(entry: u64, exists: bool) -> i32 {
        // SAFETY: the caller vouches for the entries of a token that exists.
        unsafe { ld_i32_if((laneid() < SEND_ROW_STRIDE) & exists, entry + laneid() as u64 * 4, -1) }
    }
}

impl Contributors for Ranks<'_> {
    #[inline(always)]
    unsafe fn row(&self, token: u32) -> i32 {
        // SAFETY: the entries lie inside the table.
        unsafe { Ranks::row_at(self.table + token as u64 * SEND_ROW_STRIDE as u64 * 4, true) }
    }

    #[inline(always)]
    unsafe fn address(&self, row: i32) -> u64 {
        let offset = row as u64 * row_stride(self.args.row_bytes as u64);
        self.pool + self.args.comm.pool.combine_x + offset
    }

    #[inline(always)]
    unsafe fn weights(&self, row: i32) -> u64 {
        let offset = row as i64 * (self.args.num_topk * 4) as i64;
        (self.pool + self.args.comm.pool.combine_weights).wrapping_add_signed(offset)
    }

    #[inline(always)]
    unsafe fn wait(&self, _row: i32) {}

    #[inline(always)]
    fn lanes(&self) -> u32 {
        MAX_RANKS as u32
    }
}

/// Where sums go. The whole warp calls each method.
pub(super) trait Sink {
    /// Where the token's weights go; 0 where none are wanted.
    unsafe fn weights(&self, token: u32) -> u64;
    /// Takes an item's sum: vector J of a lane belongs at byte `lane * 16 + J * 512` of its `bytes`.
    unsafe fn store(&mut self, item: Item, bytes: u32, vectors: [[u32; 4]; VECTORS]);
}

/// The operation's outputs: that of token t at `rows + t * row_bytes`, its weights at `weights + t * num_topk * 4`.
pub(super) struct Outputs<'a, const WHOLE: bool>(&'a CombineArgs);

impl<'a, const WHOLE: bool> Outputs<'a, WHOLE> {
    #[inline(always)]
    pub fn new(args: &'a CombineArgs) -> Self {
        Outputs(args)
    }
}

impl<const WHOLE: bool> Sink for Outputs<'_, WHOLE> {
    #[inline(always)]
    unsafe fn weights(&self, token: u32) -> u64 {
        let weights = self.0.combined_weights.0;
        if weights == 0 { 0 } else { weights + token as u64 * self.0.num_topk as u64 * 4 }
    }

    #[inline(always)]
    unsafe fn store(&mut self, item: Item, bytes: u32, vectors: [[u32; 4]; VECTORS]) {
        // SAFETY: the output has room for every token.
        unsafe {
            let row = self.0.combined_x.0 + item.token as u64 * self.0.row_bytes as u64;
            let to = row + (item.piece * self.0.slot_bytes) as u64;
            unroll8!(J => {
                let at = laneid() * 16 + J as u32 * 512;
                if J < vectors_of(WHOLE) && at < bytes {
                    st_v4(to + at as u64, vectors[J]);
                }
            });
        }
    }
}

/// Sums the rows of tokens `begin..end`, spread over the first `warps` warps of the block, which all call it. A warp takes whole rows,
/// every `warps`-th: what there is to find out of a token is found out once. Or it takes pieces, where there are too few tokens for all
/// warps to have as many.
#[allow(clippy::too_many_arguments)] // One call is the whole inner part of a combine.
#[inline(always)]
pub(super) unsafe fn sum_rows<E: Element, C: Contributors, S: Sink, const WHOLE: bool>(
    args: &CombineArgs,
    ring: &Ring,
    turn: &mut Turn,
    from: &C,
    to: &mut S,
    begin: u32,
    end: u32,
    warps: u32,
) {
    // SAFETY: passed on to the caller.
    unsafe {
        let lane = laneid();
        let warp = tid() / 32;
        let (first, step) = if WHOLE {
            (Item { token: begin + warp, piece: 0 }, Item { token: warps, piece: 0 })
        } else {
            (Item::nth(args, begin, warp), Item::nth(args, 0, warps))
        };
        let mut load = Gather::<WHOLE>::new(args, from, first, step, end);
        let (mut filled, mut slot) = (0, turn.slot);
        while filled < args.slots && load.bits != 0 {
            load_piece(ring, args, from, &load, slot);
            load.advance(args, from);
            filled += 1;
            slot = if slot + 1 == ring.count { 0 } else { slot + 1 };
        }
        let mut sum = Gather::<WHOLE>::new(args, from, first, step, end);
        let mut item = first;
        while item.token < end {
            // Tokens that went nowhere are not in the gather's sequence.
            let gathered = sum.item == item;
            if item.piece == 0 {
                let weights = to.weights(item.token);
                if weights != 0 {
                    sum_weights(args, from, weights, if gathered { sum.row } else { -1 });
                }
            }
            let bytes = item.bytes(args);
            let mut sums = [[0.0f32; 8]; VECTORS];
            let mut contributors = if gathered { sum.bits.count_ones() } else { 0 };
            while contributors != 0 {
                ring.wait(turn);
                let buffer = ring.buffer(turn.slot);
                unroll8!(J => {
                    let at = lane * 16 + J as u32 * 512;
                    if J < vectors_of(WHOLE) && at < bytes {
                        E::add(&mut sums[J], ld_shared_v4(buffer + at));
                    }
                });
                // All lanes have read the slot: fill it again.
                syncwarp();
                if load.bits != 0 {
                    load_piece(ring, args, from, &load, turn.slot);
                    load.advance(args, from);
                }
                turn.advance(ring);
                contributors -= 1;
            }
            let mut vectors = [[0; 4]; VECTORS];
            unroll8!(J => {
                if J < vectors_of(WHOLE) {
                    vectors[J] = E::round(&sums[J]);
                }
            });
            to.store(item, bytes, vectors);
            if gathered {
                sum.next_item(args, from);
            }
            item = item.next::<WHOLE>(args, step);
        }
    }
}

/// A piece of a token's row. A warp takes every n-th item of its block, so that pieces, not rows, are what is spread.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Item {
    pub token: u32,
    pub piece: u32,
}

impl Item {
    /// The `n`-th item from piece 0 of `token` on.
    #[inline(always)]
    fn nth(args: &CombineArgs, token: u32, n: u32) -> Self {
        Item { token: token + n / args.pieces, piece: n % args.pieces }
    }

    /// The warp's next item: the next piece of the row, or of pieces the one `step` further on.
    #[inline(always)]
    fn next<const WHOLE: bool>(self, args: &CombineArgs, step: Item) -> Self {
        if WHOLE {
            let ends = self.piece + 1 == args.pieces;
            return Item {
                token: if ends { self.token + step.token } else { self.token },
                piece: if ends { 0 } else { self.piece + 1 },
            };
        }
        let piece = self.piece + step.piece;
        let carry = (piece >= args.pieces) as u32;
        Item { token: self.token + step.token + carry, piece: piece - carry * args.pieces }
    }

    #[inline(always)]
    fn bytes(self, args: &CombineArgs) -> u32 {
        (args.row_bytes - self.piece * args.slot_bytes).min(args.slot_bytes)
    }
}

/// A warp's place in its sequence of (item, contributor). Items without contributors are left out.
struct Gather<const WHOLE: bool> {
    item: Item,
    next: Item,
    step: Item,
    end: u32,
    /// Contributors of this item that are still to come; 0 at the end of the sequence.
    bits: u32,
    /// Lane l: contributor l's row of the token, or -1.
    row: i32,
    /// The same of the next item, fetched ahead.
    next_row: i32,
}

impl<const WHOLE: bool> Gather<WHOLE> {
    #[inline(always)]
    unsafe fn new<C: Contributors>(args: &CombineArgs, from: &C, first: Item, step: Item, end: u32) -> Self {
        // SAFETY: passed on to the caller.
        unsafe {
            let next_row = row_before(from, first.token, end);
            let mut gather = Gather { item: first, next: first, step, end, bits: 0, row: -1, next_row };
            gather.next_item(args, from);
            gather
        }
    }

    /// Goes on to the next item that has contributors.
    #[inline(always)]
    unsafe fn next_item<C: Contributors>(&mut self, args: &CombineArgs, from: &C) {
        // SAFETY: `row` is asked for tokens of the range only.
        unsafe {
            loop {
                (self.item, self.row) = (self.next, self.next_row);
                self.next = self.item.next::<WHOLE>(args, self.step);
                if !WHOLE || self.next.token != self.item.token {
                    self.next_row = row_before(from, self.next.token, self.end);
                }
                self.bits = ballot(self.row >= 0);
                if self.bits != 0 || self.item.token >= self.end {
                    return;
                }
            }
        }
    }

    /// Goes on to the next contributor or item.
    #[inline(always)]
    unsafe fn advance<C: Contributors>(&mut self, args: &CombineArgs, from: &C) {
        // SAFETY: passed on.
        unsafe {
            self.bits &= self.bits - 1;
            if self.bits == 0 {
                self.next_item(args, from);
            }
        }
    }
}

/// The lane's row of `token`, or -1; also -1 from `end` on.
#[inline(always)]
unsafe fn row_before<C: Contributors>(from: &C, token: u32, end: u32) -> i32 {
    // SAFETY: the token is in the range.
    unsafe { if token < end { from.row(token) } else { -1 } }
}

/// Lane k: sums entry k of a token's weights over its contributors, to entry k at `to`.
#[inline(always)]
unsafe fn sum_weights<C: Contributors>(args: &CombineArgs, from: &C, to: u64, row: i32) {
    // SAFETY: rows were planned inside their memory; the wait says when they may be read, and the warp meets behind it.
    unsafe {
        let lane = laneid();
        let active = lane < args.num_topk;
        if row >= 0 {
            from.wait(row);
        }
        syncwarp();
        let weights = from.weights(row);
        let (mut total, mut first) = (0.0f32, 0);
        while first < from.lanes() {
            let mut parts = [0.0f32; 8];
            // All loads first, so that they are in flight together.
            unroll8!(PART => {
                let source = first + PART as u32;
                let (base, row) = (shfl_u64(weights, source), shfl_u32(row as u32, source) as i32);
                parts[PART] = ld_f32_if(active && row >= 0, base + lane as u64 * 4);
            });
            total = parts.into_iter().fold(total, |sum, part| sum + part);
            first += 8;
        }
        if active {
            st_f32(to + lane as u64 * 4, total);
        }
    }
}

/// The lane that knows the contributor's address starts the load, into a slot that no lane reads any more.
#[inline(always)]
unsafe fn load_piece<C: Contributors, const WHOLE: bool>(
    ring: &Ring,
    args: &CombineArgs,
    from: &C,
    piece: &Gather<WHOLE>,
    slot: u32,
) {
    // SAFETY: the piece lies inside the contributor's row.
    unsafe {
        if piece.bits.trailing_zeros() == laneid() {
            from.wait(piece.row);
            let offset = (piece.item.piece * args.slot_bytes) as u64;
            // The slot was read by ordinary loads; the copy engine writes it next.
            fence_proxy_async_shared();
            ring.load(slot, from.address(piece.row) + offset, piece.item.bytes(args));
        }
    }
}
