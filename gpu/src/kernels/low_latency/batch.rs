//! A dispatch of many tokens within a node, which lists received rows while links are full.
//!
//! A load waits in its multiprocessor behind the stores in front of it. While links are full, that
//! takes microseconds. An expert's list of 2,048 tokens by 256 threads had eight turns of two such
//! waits. Here a thread loads four tokens' ids, and then the weights of all four, before it uses any.
//!
//! These are kernels of their own. As a branch of [`LowLatencyDispatch`](super::LowLatencyDispatch)
//! the list costs calls of few tokens 0.2 us.
//!
//! Soundness: as in `dispatch.rs`; the table's rows have the same places as there.

use super::dispatch::dispatch;
use super::list::{Listed, Words, store, store_ranges};
use super::ranks::{Few, Many, Ranks};
use super::team::Team;
use super::{NodeShared, id_packets, ids_offset, packet_seen};
use crate::layout::{
    BATCH_TOPK, FEW_RANKS, LowLatencyArgs, LowLatencyDispatchArgs, MAX_RANKS, Quantise, Wait,
};
use crate::simt::*;

/// The same as [`LowLatencyDispatch`](super::LowLatencyDispatch), for many tokens of up to
/// [`BATCH_TOPK`] experts.
#[kernel(
    threads = 512, barriers = 10, registers = 128, dependent,
    block = 512, shared = super::low_latency_dispatch_shared_bytes(&args),
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
    block = 512, shared = super::low_latency_dispatch_shared_bytes(&args),
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

/// Warps that a team has at most: a warp has two words of [`Words::of_warp`].
const MOST_WARPS: u32 = 16;

/// Lists the rows of all local experts. All threads of the team call it.
///
/// # Safety
/// As of [`list_rows`](super::list::list_rows).
#[device]
pub(super) unsafe fn list<R: Ranks, const BARRIER: u32>(
    args: &LowLatencyDispatchArgs,
    team: Team<BARRIER>,
    shared: &NodeShared<R>,
    epoch: u64,
) {
    let common = &args.common;
    let (pool, total) = (R::pool(&common.comm, common.comm.rank), shared.all_tokens());
    let words = Words { of_source: shared.of_source.at(0), of_warp: shared.of_warp };
    stride!(expert in ctaid()..common.local_experts, nctaid() => {
        let tokens = Tokens { args: common, shared, pool, expert, epoch };
        if R::MANY {
            tokens.list::<MAX_RANKS, BARRIER>(team, &words, total);
        } else {
            tokens.list::<FEW_RANKS, BARRIER>(team, &words, total);
        }
    });
}

/// The tokens of all ranks, for the list of a local expert's rows.
struct Tokens<'a, R> {
    args: &'a LowLatencyArgs,
    shared: &'a NodeShared<R>,
    /// This rank's pool.
    pool: u64,
    expert: u32,
    epoch: u64,
}

impl<R: Ranks> Tokens<'_, R> {
    /// Lists the rows of the expert, of `total` tokens, by source rank, then by token. All threads of
    /// the team call it.
    ///
    /// # Safety
    /// An expert's tables are one block's, and so is shared memory. The team has at most
    /// [`MOST_WARPS`] warps.
    #[device]
    unsafe fn list<const RANKS: usize, const BARRIER: u32>(
        &self,
        team: Team<BARRIER>,
        words: &Words,
        total: u32,
    ) {
        let (args, expert) = (self.args, self.expert);
        let (thread, warp, lane) = (team.thread(), team.warp(), laneid());
        let num_ranks = args.comm.num_ranks;
        let rows = num_ranks * args.max_tokens;
        if thread < RANKS as u32 {
            st_shared_u32(words.of_source + thread * 4, 0);
        }
        let (mut first, mut found) = (0, 0);
        while first < total {
            let number = |turn: usize| first + turn as u32 * team.threads + thread;
            let mut packets = [[0; 4]; 4];
            unroll!(4, TURN => {
                // The last token's again where there is none: no load has a condition.
                packets[TURN] = self.packets(number(TURN).min(total - 1));
            });
            let (mut listed, mut hits) = ([Listed::NONE; 4], [0; 4]);
            // Rows of the warp in each turn, in 16 bits.
            let mut counts = [0; 2];
            unroll!(4, TURN => {
                if number(TURN) < total {
                    listed[TURN] = self.look(number(TURN), packets[TURN]);
                }
                hits[TURN] = ballot(listed[TURN].entries != 0);
                counts[TURN / 2] |= hits[TURN].count_ones() << (TURN % 2 * 16);
            });
            let mut weights = [0; 4];
            unroll!(4, TURN => {
                weights[TURN] = self.weight_packet(&listed[TURN], first_entry(&listed[TURN]));
            });
            if lane == 0 {
                words.of_warp.st(warp, counts[0]);
                words.of_warp.st(MOST_WARPS + warp, counts[1]);
            }
            team.sync();
            let (mut before, mut all) = ([0; 2], [0; 2]);
            stride!(other in 0..team.warps() => {
                unroll!(2, WORD => {
                    let count = words.of_warp.ld(WORD as u32 * MOST_WARPS + other);
                    before[WORD] += if other < warp { count } else { 0 };
                    all[WORD] += count;
                });
            });
            unroll!(4, TURN => {
                let of_turn = |words: [u32; 2]| words[TURN / 2] >> (TURN % 2 * 16) & 0xffff;
                if listed[TURN].entries != 0 {
                    red_relaxed_cta_shared_add_u32(words.of_source + listed[TURN].source * 4, 1);
                }
                let in_turn = of_turn(before) + (hits[TURN] & lanemask_lt()).count_ones();
                let first_entry = first_entry(&listed[TURN]);
                let weight = |listed: &Listed, entry: u32| {
                    let is_loaded = entry == first_entry;
                    let seen = if is_loaded { weights[TURN] } else { self.weight_packet(listed, entry) };
                    self.weight(listed, entry, seen)
                };
                store(args, listed[TURN], expert, expert * rows + found + in_turn, &weight);
                found += of_turn(all);
            });
            first += team.threads * 4;
            team.sync();
        }
        store_ranges!(RANKS, args, team, (words, thread, num_ranks), expert, found);
    }

    /// Token `number`, without entries.
    #[device]
    unsafe fn token(&self, number: u32) -> Listed {
        let (source, token) = self.shared.find(number);
        Listed { source, token, ..Listed::NONE }
    }

    /// The packets of a row's ids.
    #[device]
    unsafe fn ids(&self, row: u32) -> Global<u64> {
        Global::new(self.pool + self.args.place.ids + ids_offset(self.args, row))
    }

    /// Loads the packets of token `number`'s ids, the first one again where there is none.
    #[device]
    unsafe fn packets(&self, number: u32) -> [u64; 4] {
        let ids = self.ids(self.token(number).row(self.args));
        let mut packets = [0; 4];
        unroll!(4, J => {
            let packet = if (J as u32) < id_packets(self.args) { J as u32 } else { 0 };
            packets[J] = ld_relaxed_sys_u64(ids.at(packet));
        });
        packets
    }

    /// Token `number` with its entries, of its packets as they were loaded.
    #[device]
    unsafe fn look(&self, number: u32, packets: [u64; 4]) -> Listed {
        let (args, mut listed) = (self.args, self.token(number));
        let row = listed.row(args);
        unroll!(4, J => {
            if (J as u32) < id_packets(args) {
                // A packet that does not come names no expert.
                let (at, what) = (self.ids(row).at(J as u32), Wait::LowLatencyIds);
                let pair = packet_seen(&args.comm, at, packets[J], listed.source, self.epoch, what);
                let pair = pair.unwrap_or(u32::MAX);
                let (low, high) = (pair & 0xffff, pair >> 16);
                listed.entries |= ((low == self.expert) as u32) << (J * 2);
                listed.entries |= ((high == self.expert) as u32) << (J * 2 + 1);
                listed.of_others |= ((low == 0xffff) as u32) << (J * 2);
                listed.of_others |= ((high == 0xffff) as u32) << (J * 2 + 1);
            }
        });
        // An odd number of entries leaves the last packet's upper half without one.
        listed.of_others &= u32::MAX >> (32 - args.num_topk);
        listed.weights = Global::<u64>::new(self.pool + args.place.weights).at(row * args.num_topk);
        listed
    }

    /// Loads the packet of an entry's weight, or any word of the pool of a token without entries.
    #[device]
    unsafe fn weight_packet(&self, listed: &Listed, entry: u32) -> u64 {
        let packet = Global::<u64>::new(listed.weights).at(entry);
        ld_relaxed_sys_u64(if listed.entries != 0 { packet } else { self.pool })
    }

    /// The bits of an entry's weight, of its packet as it was loaded.
    #[device]
    unsafe fn weight(&self, listed: &Listed, entry: u32, seen: u64) -> u32 {
        let (comm, packet) = (&self.args.comm, Global::<u64>::new(listed.weights).at(entry));
        // A weight that does not come is recorded as an error, so that the value here does not
        // matter.
        packet_seen(comm, packet, seen, listed.source, self.epoch, Wait::LowLatencyIds).unwrap_or(0)
    }
}

/// The first of a token's entries for the expert.
#[device]
fn first_entry(listed: &Listed) -> u32 {
    listed.entries.trailing_zeros() & 31
}
