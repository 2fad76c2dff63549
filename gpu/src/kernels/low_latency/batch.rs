//! A dispatch of many tokens within a node, whose last blocks list received rows and send none.
//!
//! A load waits in its multiprocessor behind the stores in front of it. While links are full, that
//! takes microseconds, and a list has two loads one after the other. So the blocks that send rows list
//! none. All their warps move rows, and load the next row ahead of the stores of this one. The others
//! list the rows of 32 experts at a time, an expert to a lane, and wait for all rows.
//!
//! A sending block announces the ids of all its tokens ahead of its first row, a token to a warp.
//!
//! These are kernels of their own: in place of the others, they would make a pair of 128 tokens
//! 0.6 us longer.
//!
//! Soundness: as in `dispatch.rs`; the table's rows have the same places as there. A word of shared
//! memory that counts a warp's rows has that warp's lane as its only writer. Counts of sources are
//! added to. Barriers stand between the writers and the readers of both.

use super::dispatch::{Blocks, dispatch};
use super::ranks::{Few, Many, Ranks};
use super::team::Team;
use super::{NodeShared, dispatch_shared_bytes, id_packets, ids_offset, packet_seen};
use crate::layout::{
    BATCH_TOPK, BLOCKS_FOR_A_LISTER, FEW_RANKS, LowLatencyArgs, LowLatencyDispatchArgs, MAX_RANKS, Quantise,
    Wait,
};
use crate::simt::*;

/// The same as [`LowLatencyDispatch`](super::LowLatencyDispatch), of many tokens of up to
/// [`BATCH_TOPK`] experts.
#[kernel(
    threads = 512, barriers = 10, registers = 128, dependent,
    block = 512, shared = super::low_latency_dispatch_batch_shared_bytes(&args),
    requires(
        ..LowLatencyArgs(args.common),
        args.common.comm.num_ranks <= FEW_RANKS as u32,
        args.common.num_topk <= BATCH_TOPK,
        args.quantise != Quantise::Mxfp8 as u32,
    )
)]
pub unsafe fn low_latency_dispatch_batch(args: LowLatencyDispatchArgs) {
    dispatch::<Few, false, true, false>(&args);
}

/// The same to up to [`MAX_RANKS`] ranks.
#[kernel(
    threads = 512, barriers = 11, registers = 128, dependent,
    block = 512, shared = super::low_latency_dispatch_batch_shared_bytes(&args),
    requires(
        ..LowLatencyArgs(args.common),
        args.common.comm.num_ranks > FEW_RANKS as u32,
        args.common.num_topk <= BATCH_TOPK,
        args.quantise != Quantise::Mxfp8 as u32,
    )
)]
pub unsafe fn low_latency_dispatch_many_batch(args: LowLatencyDispatchArgs) {
    dispatch::<Many, false, true, false>(&args);
}

/// Local experts whose rows a block lists together: a lane of each warp has one.
const EXPERTS: u32 = 32;
/// Warps that a team has at most.
const MOST_WARPS: u32 = 16;

/// Blocks that list rows and send none: the last ones.
#[device]
pub(super) fn listers() -> u32 {
    nctaid() / BLOCKS_FOR_A_LISTER
}

/// Shared memory of [`Words`] in bytes, of up to `ranks` ranks.
#[inline(always)]
pub(super) const fn words_bytes(ranks: u32) -> u32 {
    (MOST_WARPS + ranks) * EXPERTS * 4
}

/// Rows of each of a block's experts.
#[derive(Clone, Copy)]
struct Words {
    /// Those that a warp has found in this turn: `[warps, EXPERTS]`.
    of_warps: SharedArray<u32, { (MOST_WARPS * EXPERTS) as usize }>,
    /// Those of a source rank: `[ranks, EXPERTS]`.
    of_sources: SharedArray<u32, { MAX_RANKS * EXPERTS as usize }>,
}

/// Lists the rows of the block's share of local experts. All threads of the team call it.
///
/// # Safety
/// An expert's tables are one block's, and so is shared memory. The team has at most
/// [`MOST_WARPS`] warps.
#[device]
pub(super) unsafe fn list<R: Ranks, const BARRIER: u32>(
    args: &LowLatencyDispatchArgs,
    team: Team<BARRIER>,
    blocks: Blocks,
    shared: &NodeShared<R>,
    epoch: u64,
) {
    let common = &args.common;
    let (pool, total) = (R::pool(&common.comm, common.comm.rank), shared.all_tokens());
    let at = dynamic_shared() + dispatch_shared_bytes::<R>(args);
    let words =
        Words { of_warps: SharedArray::new(at), of_sources: SharedArray::new(at + MOST_WARPS * EXPERTS * 4) };
    stride!(group in blocks.number..common.local_experts.div_ceil(EXPERTS), blocks.count => {
        let tokens = Tokens { args: common, shared, pool, first_expert: group * EXPERTS, epoch };
        tokens.list(team, words, total);
    });
}

/// The tokens of all ranks, for the lists of [`EXPERTS`] local experts' rows.
struct Tokens<'a, R> {
    args: &'a LowLatencyArgs,
    shared: &'a NodeShared<R>,
    /// This rank's pool.
    pool: u64,
    first_expert: u32,
    epoch: u64,
}

impl<R: Ranks> Tokens<'_, R> {
    /// Lists the rows of the experts, of `total` tokens, by source rank, then by token. A thread has
    /// one token in each turn; a lane has one expert, and counts its rows in the warp's tokens. All
    /// threads of the team call it.
    ///
    /// # Safety
    /// As of [`list`].
    #[device]
    unsafe fn list<const BARRIER: u32>(&self, team: Team<BARRIER>, words: Words, total: u32) {
        let (args, tables) = (self.args, &self.args.tables);
        let (thread, warp, lane) = (team.thread(), team.warp(), laneid());
        let (num_ranks, rows) = (args.comm.num_ranks, args.comm.num_ranks * args.max_tokens);
        let expert = self.first_expert + lane;
        stride!(word in thread..num_ranks * EXPERTS, team.threads => { words.of_sources.st(word, 0) });
        team.sync();
        let (mut first, mut found) = (0, 0);
        while first < total {
            let number = first + thread;
            let is_there = number < total;
            // The last token again where there is none: no load has a condition.
            let (source, token) = self.shared.find(number.min(total - 1));
            let row = source * args.max_tokens + token;
            let ids = self.ids(row, source, is_there);
            let entry = |entry: usize| ids[entry / 2] >> (entry % 2 * 16) & 0xffff;
            let of_block = |id: u32| id.wrapping_sub(self.first_expert);
            let weight = |entry: u32| {
                Global::<u64>::new(self.pool + args.place.weights).at(row * args.num_topk + entry)
            };
            let (mut experts, mut weights) = (0, [0; BATCH_TOPK as usize]);
            unroll!(8, ENTRY => {
                let of_block = of_block(entry(ENTRY));
                if of_block < EXPERTS {
                    experts |= 1 << of_block;
                    weights[ENTRY] = ld_relaxed_sys_u64(weight(ENTRY as u32));
                }
            });
            // The warp's tokens that have the lane's expert.
            let tokens = transposed(experts);
            words.of_warps.st(warp * EXPERTS + lane, tokens.count_ones());
            let mut left = u32::MAX;
            while left != 0 {
                let of_first = shfl_u32(source, left.trailing_zeros());
                let same = ballot(source == of_first);
                let count = (tokens & same).count_ones();
                red_relaxed_cta_shared_add_u32(words.of_sources.at(of_first * EXPERTS + lane), count);
                left &= !same;
            }
            team.sync();
            let (mut before, mut all) = (0, 0);
            stride!(other in 0..team.warps() => {
                let count = words.of_warps.ld(other * EXPERTS + lane);
                before += if other < warp { count } else { 0 };
                all += count;
            });
            let first_slot = expert * rows + found + before;
            unroll!(8, ENTRY => {
                let (id, of_row) = (entry(ENTRY), row * args.num_topk + ENTRY as u32);
                let of_block = of_block(id);
                let (first_slot, tokens) = (shfl_u32(first_slot, of_block & 31), shfl_u32(tokens, of_block & 31));
                if of_block < EXPERTS {
                    let slot = first_slot + (tokens & lanemask_lt()).count_ones();
                    // A weight that does not come is recorded as an error, so that the value here
                    // does not matter.
                    let (at, seen) = (weight(ENTRY as u32), weights[ENTRY]);
                    let bits = packet_seen(&args.comm, at, seen, source, self.epoch, Wait::LowLatencyIds);
                    tables.expert_rows.array::<i32>().st(slot, row as i32);
                    tables.src_info.array::<i32>().st(slot, token as i32);
                    tables.slots.array::<i32>().st(of_row as u64, slot as i32);
                    st_u32(tables.weights.array::<u32>().at(of_row as u64), bits.unwrap_or(0));
                } else if self.first_expert == 0 && is_there && id == 0xffff && (ENTRY as u32) < args.num_topk {
                    // Entries of other ranks' experts have no block of their own.
                    tables.slots.array::<i32>().st(of_row as u64, -1);
                }
            });
            (first, found) = (first + team.threads, found + all);
            // The words are those of the next turn, or of the next experts.
            team.sync();
        }
        if warp == 0 && expert < args.local_experts {
            let mut begin = 0;
            stride!(source in 0..num_ranks => {
                let count = words.of_sources.ld(source * EXPERTS + lane);
                let ranges = tables.layout_range.array::<u64>();
                st_u64(ranges.at(expert * num_ranks + source), (begin as u64) << 32 | count as u64);
                begin += count;
            });
            tables.expert_counts.array::<u32>().st(expert, found);
        }
        team.sync();
    }

    /// The ids of a row's entries, two in a word, `0xffff` for those of other ranks' experts, and of a
    /// token that is not there.
    #[device]
    unsafe fn ids(&self, row: u32, source: u32, is_there: bool) -> [u32; 4] {
        let packets = Global::<u64>::new(self.pool + self.args.place.ids + ids_offset(self.args, row));
        let (mut seen, mut ids) = ([0; 4], [u32::MAX; 4]);
        unroll!(4, J => {
            let packet = if (J as u32) < id_packets(self.args) { J as u32 } else { 0 };
            seen[J] = ld_relaxed_sys_u64(packets.at(packet));
        });
        unroll!(4, J => {
            if is_there && (J as u32) < id_packets(self.args) {
                // A packet that does not come names no expert.
                let (at, what) = (packets.at(J as u32), Wait::LowLatencyIds);
                let pair = packet_seen(&self.args.comm, at, seen[J], source, self.epoch, what);
                ids[J] = pair.unwrap_or(u32::MAX);
            }
        });
        ids
    }
}

/// Lane r's bit c becomes lane c's bit r. The whole warp calls it.
///
/// Source: Warren, Hacker's Delight, 7-3, with a row for each lane.
#[device]
unsafe fn transposed(rows: u32) -> u32 {
    let rows = swapped::<16>(rows, 0x0000_ffff);
    let rows = swapped::<8>(rows, 0x00ff_00ff);
    let rows = swapped::<4>(rows, 0x0f0f_0f0f);
    let rows = swapped::<2>(rows, 0x3333_3333);
    swapped::<1>(rows, 0x5555_5555)
}

/// Swaps the upper right and the lower left of each square of `2 * SIZE` lanes and bits. `low`: the
/// left half of each.
#[device]
unsafe fn swapped<const SIZE: u32>(row: u32, low: u32) -> u32 {
    let other = shfl_bfly_u32::<SIZE>(row);
    if laneid() & SIZE == 0 { row & low | other << SIZE & !low } else { row & !low | other >> SIZE & low }
}
