//! Which expert has which of the received rows.

use super::NodeShared;
use super::ranks::{Ranks, each_rank};
use super::team::Team;
use crate::layout::{FEW_RANKS, LowLatencyArgs};
use crate::simt::*;

/// A token of a source rank, and its entries on this rank.
#[derive(Clone, Copy)]
pub(super) struct Listed {
    pub(super) source: u32,
    pub(super) token: u32,
    /// Its entries for the expert, as bits.
    pub(super) entries: u32,
    /// Those that are for no expert of this rank.
    pub(super) of_others: u32,
    /// Where `weight` finds the weights of its entries.
    pub(super) weights: u64,
}

impl Listed {
    /// A thread without a token.
    pub(super) const NONE: Listed = Listed { source: 0, token: 0, entries: 0, of_others: 0, weights: 0 };

    /// Where a received row is that has it.
    #[device]
    pub(super) fn row(&self, args: &LowLatencyArgs) -> u32 {
        self.source * args.max_tokens + self.token
    }
}

/// Words of shared memory: rows of each source, and of each warp, of which a block has as many as
/// lanes.
pub(super) struct Words {
    pub(super) of_source: u32,
    pub(super) of_warp: SharedArray<u32, 32>,
}

/// Lists the rows of a local expert, by source rank, then by token. All threads of the team call
/// it. `total`: tokens of all sources; `look` returns the token of a number, by source, then by
/// token; `weight` returns the bits of the weight of an entry of the expert. `RANKS`: the most ranks
/// that there may be.
///
/// # Safety
/// An expert's tables are one block's, and so is shared memory.
#[device]
pub(super) unsafe fn list_rows<const RANKS: usize, const BARRIER: u32>(
    args: &LowLatencyArgs,
    team: Team<BARRIER>,
    words: &Words,
    expert: u32,
    total: u32,
    look: impl Fn(u32) -> Listed,
    weight: impl Fn(&Listed, u32) -> u32,
) {
    let num_ranks = args.comm.num_ranks;
    let (thread, warp, lane) = (team.thread(), team.warp(), laneid());
    let rows = num_ranks * args.max_tokens;
    if thread < RANKS as u32 {
        st_shared_u32(words.of_source + thread * 4, 0);
    }
    let (mut first, mut found) = (0, 0);
    while first < total {
        let is_there = first + thread < total;
        let listed = if is_there { look(first + thread) } else { Listed::NONE };
        let hits = ballot(listed.entries != 0);
        if lane == 0 {
            words.of_warp.st(warp, hits.count_ones());
        }
        team.sync();
        let (mut before, mut all) = (0, 0);
        stride!(other in 0..team.threads / 32 => {
            let count = words.of_warp.ld(other);
            before += if other < warp { count } else { 0 };
            all += count;
        });
        if listed.entries != 0 {
            red_relaxed_cta_shared_add_u32(words.of_source + listed.source * 4, 1);
        }
        let slot = expert * rows + found + before + (hits & lanemask_lt()).count_ones();
        store(args, listed, expert, slot, &weight);
        (first, found) = (first + team.threads, found + all);
        team.sync();
    }
    team.sync();
    if thread < num_ranks {
        let mut begin = 0;
        if RANKS > FEW_RANKS {
            stride!(source in 0..thread => {
                begin += ld_shared_u32(words.of_source + source * 4);
            });
        } else {
            unroll!(8, SOURCE => {
                let count = ld_shared_u32(words.of_source + SOURCE as u32 * 4);
                begin += if (SOURCE as u32) < thread { count } else { 0 };
            });
        }
        let count = ld_shared_u32(words.of_source + thread * 4);
        let ranges = args.tables.layout_range.array::<u64>();
        st_u64(ranges.at(expert * num_ranks + thread), (begin as u64) << 32 | count as u64);
    }
    if thread == 0 {
        args.tables.expert_counts.array::<u32>().st(expert, found);
    }
    // The words are the next expert's.
    team.sync();
}

/// The same of [`FEW_TOKENS`](crate::layout::FEW_TOKENS) tokens at most: a warp's lanes have one
/// each in `listed`, by source, then by token, and it needs no other warp. The whole warp calls it.
///
/// # Safety
/// An expert's tables are one warp's, and the numbers of tokens in `shared` are not written
/// meanwhile.
#[device]
pub(super) unsafe fn list_few_rows<R: Ranks>(
    args: &LowLatencyArgs,
    shared: &NodeShared<R>,
    expert: u32,
    listed: Listed,
    weight: impl Fn(&Listed, u32) -> u32,
) {
    let (lane, num_ranks) = (laneid(), args.comm.num_ranks);
    let hits = ballot(listed.entries != 0);
    let first = expert * num_ranks * args.max_tokens;
    store(args, listed, expert, first + (hits & lanemask_lt()).count_ones(), &weight);
    each_rank!(R, lane, rank => {
        if rank < num_ranks {
            let mut first_lane = 0;
            if R::MANY {
                first_lane = shared.before.ld(rank);
            } else {
                unroll!(8, SOURCE => {
                    let of_source = shared.tokens.ld(SOURCE as u32);
                    first_lane += if (SOURCE as u32) < rank { of_source } else { 0 };
                });
            }
            let of_lanes_below = |lane: u32| (hits & ((1u64 << lane) - 1) as u32).count_ones();
            let begin = of_lanes_below(first_lane);
            let count = of_lanes_below(first_lane + shared.tokens.ld(rank)) - begin;
            let ranges = args.tables.layout_range.array::<u64>();
            st_u64(ranges.at(expert * num_ranks + rank), (begin as u64) << 32 | count as u64);
        }
    });
    if lane == 0 {
        st_u32(args.tables.expert_counts.array::<u32>().at(expert), hits.count_ones());
    }
}

/// Stores a token in the tables of the expert. Row `slot` of the tables is the token's where it has
/// entries for the expert.
#[device]
pub(super) unsafe fn store(
    args: &LowLatencyArgs,
    mut listed: Listed,
    expert: u32,
    slot: u32,
    weight: &impl Fn(&Listed, u32) -> u32,
) {
    let row = listed.row(args);
    if listed.entries != 0 {
        args.tables.expert_rows.array::<i32>().st(slot, row as i32);
        args.tables.src_info.array::<i32>().st(slot, listed.token as i32);
        while listed.entries != 0 {
            let entry = listed.entries.trailing_zeros();
            let of_row = (row * args.num_topk + entry) as u64;
            args.tables.slots.array::<i32>().st(of_row, slot as i32);
            st_u32(args.tables.weights.array::<u32>().at(of_row), weight(&listed, entry));
            listed.entries &= listed.entries - 1;
        }
    }
    // The others' entries have no block or warp of their own.
    while expert == 0 && listed.of_others != 0 {
        let entry = listed.of_others.trailing_zeros();
        args.tables.slots.array::<i32>().st(row * args.num_topk + entry, -1);
        listed.of_others &= listed.of_others - 1;
    }
}
