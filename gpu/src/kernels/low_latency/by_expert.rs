//! Rows by expert: the receiving half of a dispatch copies each row to the segments of its experts
//! as soon as it has come.
//!
//! The place of a row follows from the selections of all tokens, which come ahead of the rows.
//! Every block counts them for itself, so no block waits for another one, and a grid need not be
//! resident as a whole. A block has some tokens of each source rank, or parts of their rows. So it
//! copies rows of one rank while those of another one are under way.
//!
//! Soundness: words of shared memory have a barrier of the team between their writers and their
//! readers; counters are added to by atomics. A row of a segment, or a part of it, has one warp of
//! one block, since every block derives the same places from the same selections. A row is read
//! behind the word of its chunk, which a lane has acquired in front of a barrier of the team.
//! Places are checked against the room before use. Collectives stand where all lanes of a warp
//! arrive.

use super::super::segments::sum_upto;
use super::inside;
use super::team::Team;
use crate::layout::{LowLatencyArgs, LowLatencyExpertRows, MAX_MEMBERS, MAX_TOPK, SCALE_BLOCK, row_stride};
use crate::simt::*;

/// Tokens that a block takes together; a warp reads the entries of one.
const TOKENS: u32 = 8;
/// Vectors of 16 bytes of a piece that a lane has: as many loads are in flight together.
const VECTORS: usize = 4;
/// Bytes of a row that a warp copies at a time.
const PIECE: u32 = VECTORS as u32 * 32 * 16;
/// Scales that the elements of a piece have, one byte each.
const SCALES: u32 = PIECE / SCALE_BLOCK;
const _: () = assert!(SCALES <= 32, "a lane copies one");
/// No row.
const NOWHERE: u32 = u32::MAX;

/// Tokens that come from each source rank, by rank and in their order. An implementation waits for
/// what it gives.
pub(super) trait Arrivals {
    /// Tokens of a rank.
    unsafe fn count(&self, source: u32) -> u32;
    /// Tokens of all ranks.
    unsafe fn all(&self) -> u32;
    /// The source, and the index there, of token `number` of all.
    unsafe fn find(&self, number: u32) -> (u32, u32);
    /// Loads the entries `2 * pair` and `2 * pair + 1` of a token, as far as they have come.
    unsafe fn load(&self, source: u32, index: u32, pair: u32) -> u64;
    /// The local experts of those two entries, of which `seen` was loaded; any larger number where
    /// there is none.
    unsafe fn pair(&self, seen: u64, source: u32, index: u32, pair: u32) -> (u32, u32);
    /// The bits of the weight of an entry for a local expert.
    unsafe fn weight(&self, source: u32, index: u32, entry: u32) -> u32;
    /// The token's index on its rank.
    unsafe fn token(&self, source: u32, index: u32) -> u32;
    /// Waits for the row; false when the wait expired.
    unsafe fn wait(&self, source: u32, index: u32) -> bool;
    /// Where the row is.
    unsafe fn row(&self, source: u32, index: u32) -> u64;
    /// A scale of the row.
    unsafe fn scale(&self, source: u32, index: u32, scale: u32) -> f32;
    /// Where the row belongs as it is received, if it is not there.
    unsafe fn home(&self, source: u32, index: u32) -> Option<Home>;
    /// Notes the token's index where a combine needs it. One lane calls it.
    unsafe fn note(&self, source: u32, index: u32);
}

/// The place of a row as it is received.
pub(super) struct Home {
    /// Address of the row.
    pub(super) row: u64,
    /// Address of its first scale.
    pub(super) scales: u64,
    /// Bytes from one scale to the next.
    pub(super) stride: u64,
}

/// Bytes of a row and its number of scales, as it travels.
#[derive(Clone, Copy)]
pub(super) struct RowShape {
    pub(super) bytes: u32,
    pub(super) scales: u32,
}

/// Words of a block's shared memory from the offset `at` on.
#[derive(Clone, Copy)]
pub(super) struct Scratch {
    pub(super) at: u32,
    pub(super) ranks: u32,
    pub(super) experts: u32,
}

impl Scratch {
    /// Bytes of the words for so many ranks, and experts of each.
    pub(super) const fn bytes(ranks: u32, experts: u32) -> u32 {
        ((ranks + 2) * experts + TOKENS * MAX_TOPK + MAX_MEMBERS as u32 + 1) * 4
    }

    /// First the selections of a local expert by a rank, and in the high half those in front of the
    /// block's tokens. Then the place of the next one.
    #[device]
    fn next(self, source: u32, expert: u32) -> u32 {
        self.at + (source * self.experts + expert) * 4
    }

    /// The start of an expert's segment; behind the last one, rows of all segments.
    #[device]
    fn start(self, expert: u32) -> u32 {
        self.next(self.ranks, expert)
    }

    /// The end of an expert's rows.
    #[device]
    fn end(self, expert: u32) -> u32 {
        self.next(self.ranks + 1, expert) + 4
    }

    /// First the expert, then the place of an entry of the block's token of number `number`.
    #[device]
    fn entry(self, number: u32, entry: u32) -> u32 {
        self.end(self.experts) + (number * MAX_TOPK + entry) * 4
    }

    /// The first of a rank's tokens that the block has.
    #[device]
    fn first(self, source: u32) -> u32 {
        self.entry(TOKENS, source)
    }
}

/// Tokens of a rank that a block has, and which parts of their rows.
struct Share {
    first: u32,
    end: u32,
    part: u32,
    parts: u32,
}

impl Share {
    /// The share of `count` tokens, whose rows have so many pieces. Where there are more blocks than
    /// tokens, several blocks have parts of the same row.
    #[device]
    fn of(count: u32, pieces: u32) -> Share {
        let (block, blocks) = (ctaid(), nctaid());
        if count >= blocks {
            let each = count.div_ceil(blocks);
            let first = (block * each).min(count);
            return Share { first, end: (first + each).min(count), part: 0, parts: 1 };
        }
        let parts = at_least_one((blocks / at_least_one(count)).min(pieces));
        let first = (block / parts).min(count);
        Share { first, end: (first + 1).min(count), part: block % parts, parts }
    }
}

/// The placing of rows by a block.
pub(super) struct Placing<'a, C, const BARRIER: u32> {
    pub(super) args: &'a LowLatencyArgs,
    /// Where rows go.
    pub(super) to: &'a LowLatencyExpertRows,
    pub(super) shape: RowShape,
    /// The warps that place rows.
    pub(super) team: Team<BARRIER>,
    pub(super) scratch: Scratch,
    /// The tokens that come.
    pub(super) come: &'a C,
}

impl<C: Arrivals, const BARRIER: u32> Placing<'_, C, BARRIER> {
    /// Copies rows to the segments of their experts as they come, and writes the tables of the
    /// segments. All threads of the team call it.
    #[device]
    pub(super) unsafe fn place_rows(&self) {
        let Placing { args, shape, team, scratch, come, .. } = *self;
        // SAFETY: a grid has blocks, and a row bytes.
        core::hint::assert_unchecked(nctaid() >= 1 && shape.bytes >= 1);
        let pieces = shape.bytes.div_ceil(PIECE);
        stride!(word in team.thread()..args.comm.num_ranks * args.local_experts, team.threads => {
            st_shared_u32(scratch.next(0, word), 0);
        });
        if team.thread() < args.comm.num_ranks {
            let share = Share::of(come.count(team.thread()), pieces);
            st_shared_u32(scratch.first(team.thread()), share.first);
        }
        team.sync();
        self.count_selections();
        team.sync();
        self.lay_out_segments();
        team.sync();
        self.write_tables();
        // The own rows first: they are here before those of other ranks.
        stride!(turn in 0..args.comm.num_ranks => {
            let source = args.comm.rank + turn;
            let source = if source < args.comm.num_ranks { source } else { source - args.comm.num_ranks };
            let share = Share::of(come.count(source), pieces);
            stride!(first in share.first..share.end, TOKENS => {
                let count = (share.end - first).min(TOKENS);
                self.find_places((source, first, count));
                self.wait_for_rows((source, first, count), &share);
                team.sync();
                self.copy_rows((source, first, count), &share);
                // The words are the next tokens'.
                team.sync();
            });
        });
    }

    /// Counts the selections of each local expert by each rank, and those in front of the block's
    /// tokens.
    #[device]
    unsafe fn count_selections(&self) {
        let Placing { args, team, scratch, come, .. } = *self;
        let pairs = args.num_topk.div_ceil(2);
        core::hint::assert_unchecked(pairs >= 1);
        let all = come.all() * pairs;
        stride!(first in team.thread()..all, team.threads * 4 => {
            // Four at a time, so that their loads are in flight together.
            let (mut seen, mut sources, mut indices) = ([0; 4], [0; 4], [0; 4]);
            unroll!(4, J => {
                let number = first + J as u32 * team.threads;
                // A load of the first again where there is no such pair.
                let number = if number < all { number } else { first };
                (sources[J], indices[J]) = come.find(number / pairs);
                seen[J] = come.load(sources[J], indices[J], number % pairs);
            });
            unroll!(4, J => {
                let number = first + J as u32 * team.threads;
                if number < all {
                    let (source, index) = (sources[J], indices[J]);
                    let (low, high) = come.pair(seen[J], source, index, number % pairs);
                    let is_in_front = index < ld_shared_u32(scratch.first(source));
                    let more = 1 + if is_in_front { 1 << 16 } else { 0 };
                    if low < args.local_experts {
                        red_relaxed_cta_shared_add_u32(scratch.next(source, low), more);
                    }
                    if high < args.local_experts {
                        red_relaxed_cta_shared_add_u32(scratch.next(source, high), more);
                    }
                }
            });
        });
    }

    /// Lays the segments out, one behind the other, and leaves in shared memory where they begin and
    /// end, and where the next selection of each rank goes.
    #[device]
    unsafe fn lay_out_segments(&self) {
        let Placing { args, to, team, scratch, .. } = *self;
        let (lane, experts, ranks) = (laneid(), args.local_experts, args.comm.num_ranks);
        stride!(expert in team.thread()..experts, team.threads => {
            let mut rows = 0;
            stride!(source in 0..ranks => {
                rows += ld_shared_u32(scratch.next(source, expert)) & 0xffff;
            });
            st_shared_u32(scratch.start(expert), (rows + to.alignment - 1) & !(to.alignment - 1));
        });
        team.sync();
        if team.warp() == 0 {
            // Prefix sums, 32 experts at a time.
            let (mut first, mut before) = (0, 0);
            while first < experts {
                let expert = first + lane;
                let rows = if expert < experts { ld_shared_u32(scratch.start(expert)) } else { 0 };
                let upto = sum_upto(rows, |a, b| a + b);
                if expert < experts {
                    st_shared_u32(scratch.start(expert), before + upto - rows);
                }
                before += shfl_u32(upto, 31);
                first += 32;
            }
            if lane == 0 {
                st_shared_u32(scratch.start(experts), before);
            }
        }
        team.sync();
        stride!(expert in team.thread()..experts, team.threads => {
            let mut row = ld_shared_u32(scratch.start(expert));
            stride!(source in 0..ranks => {
                let of = ld_shared_u32(scratch.next(source, expert));
                st_shared_u32(scratch.next(source, expert), row + (of >> 16));
                row += of & 0xffff;
            });
            st_shared_u32(scratch.end(expert), row);
        });
    }

    /// Writes the tables of the block's experts, and marks padding.
    #[device]
    unsafe fn write_tables(&self) {
        let Placing { args, to, team, scratch, .. } = *self;
        let (thread, experts) = (team.thread(), args.local_experts);
        stride!(expert in ctaid()..experts, nctaid() => {
            let (start, end) = (ld_shared_u32(scratch.start(expert)), ld_shared_u32(scratch.end(expert)));
            if thread == 0 {
                let at = expert as u64 * 4;
                st_u32(to.expert_counts.0 + at, end - start);
                st_u32(to.expert_starts.0 + at, start);
                st_u32(to.psum_expert.0 + at, end);
            }
            let next = ld_shared_u32(scratch.start(expert + 1)).min(to.rows);
            stride!(row in end + thread..next, team.threads => {
                st_u32(to.src_idx.0 + row as u64 * 4, NOWHERE);
            });
        });
        if ctaid() == 0 && thread == 0 {
            let (rows, at) = (ld_shared_u32(scratch.start(experts)), experts as u64 * 4);
            st_u32(to.expert_starts.0 + at, rows);
            st_u32(to.psum_expert.0 + at, rows);
        }
    }

    /// Leaves in shared memory where the entries of a source's `count` tokens from `first` on go.
    #[device]
    unsafe fn find_places(&self, (source, first, count): (u32, u32, u32)) {
        let Placing { args, to, team, scratch, come, .. } = *self;
        let (lane, topk) = (laneid(), args.num_topk);
        if team.warp() < count && lane < topk {
            let (index, pair) = (first + team.warp(), lane / 2);
            let (low, high) = come.pair(come.load(source, index, pair), source, index, pair);
            st_shared_u32(scratch.entry(team.warp(), lane), if lane % 2 == 0 { low } else { high });
        }
        team.sync();
        if team.warp() == 0 {
            stride!(number in 0..count => {
                let mut expert = NOWHERE;
                if lane < topk {
                    expert = ld_shared_u32(scratch.entry(number, lane));
                }
                // A token may select an expert twice.
                let mut earlier = 0;
                stride!(entry in 0..topk => {
                    let other = shfl_u32(expert, entry);
                    earlier += (other == expert && entry < lane) as u32;
                });
                let mut place = NOWHERE;
                if expert < args.local_experts {
                    place = ld_shared_u32(scratch.next(source, expert)) + earlier;
                }
                syncwarp();
                if expert < args.local_experts {
                    red_relaxed_cta_shared_add_u32(scratch.next(source, expert), 1);
                }
                syncwarp();
                if lane < topk {
                    st_shared_u32(scratch.entry(number, lane), if place < to.rows { place } else { NOWHERE });
                }
            });
        }
        team.sync();
    }

    /// Writes the tables of the rows of these tokens, and waits for the rows, a warp for each. Rows that
    /// do not come go nowhere.
    #[device]
    unsafe fn wait_for_rows(&self, (source, first, count): (u32, u32, u32), share: &Share) {
        let Placing { args, to, team, scratch, come, .. } = *self;
        let (lane, topk) = (laneid(), args.num_topk);
        if team.warp() >= count {
            return;
        }
        let index = first + team.warp();
        if share.part == 0 && lane == 0 {
            come.note(source, index);
        }
        if share.part == 0 && lane < topk {
            let token = come.token(source, index);
            let place = ld_shared_u32(scratch.entry(team.warp(), lane));
            let row = source * args.max_tokens + token;
            st_u32(to.slots.0 + (row * topk + lane) as u64 * 4, place);
            if place != NOWHERE {
                st_u32(to.src_idx.0 + place as u64 * 4, token);
                st_u64(to.src_entry.0 + place as u64 * 8, (lane as u64) << 32 | source as u64);
                st_u32(to.weights.0 + place as u64 * 4, come.weight(source, index, lane));
            }
        }
        let has_come = lane != 0 || come.wait(source, index);
        if ballot(!has_come) != 0 && lane < topk {
            st_shared_u32(scratch.entry(team.warp(), lane), NOWHERE);
        }
    }

    /// Copies the block's parts of the rows of these tokens to where their entries go, a piece to a
    /// warp: a row is read once.
    #[device]
    unsafe fn copy_rows(&self, (source, first, count): (u32, u32, u32), share: &Share) {
        let Placing { args, to, shape, team, scratch, come } = *self;
        let (lane, topk) = (laneid(), args.num_topk);
        let pieces = shape.bytes.div_ceil(PIECE);
        // SAFETY: a row has no fewer pieces than parts.
        core::hint::assert_unchecked(share.parts >= 1);
        let of_part = (pieces + share.parts - 1 - share.part) / share.parts;
        core::hint::assert_unchecked(of_part >= 1);
        stride!(number in team.warp()..count * of_part, team.warps() => {
            let (token, piece) = (number / of_part, share.part + number % of_part * share.parts);
            let index = first + token;
            let mut place = NOWHERE;
            if lane < topk {
                place = ld_shared_u32(scratch.entry(token, lane));
            }
            let (mut left, home) = (ballot(place != NOWHERE), come.home(source, index));
            if left != 0 || home.is_some() {
                let at = |vector: usize| piece * PIECE + (vector as u32 * 32 + lane) * 16;
                let (from, mut vectors) = (come.row(source, index), [[0; 4]; VECTORS]);
                // The loads have no condition, so that all are in flight together.
                unroll!(4, J => { vectors[J] = ld_stream_v4(from + inside(at(J), shape.bytes) as u64) });
                let scale = piece * SCALES + lane;
                let has_scale = lane < SCALES && scale < shape.scales;
                let value = if has_scale { come.scale(source, index, scale) } else { 0.0 };
                if let Some(home) = home {
                    unroll!(4, J => {
                        if at(J) < shape.bytes {
                            st_v4(home.row + at(J) as u64, vectors[J]);
                        }
                    });
                    if has_scale {
                        st_f32(home.scales + scale as u64 * home.stride, value);
                    }
                }
                while left != 0 {
                    let row = shfl_u32(place, left.trailing_zeros() & 31) as u64;
                    left &= left.wrapping_sub(1);
                    let x = to.x.0 + row * to.x_stride;
                    unroll!(4, J => {
                        if at(J) < shape.bytes {
                            st_v4(x + at(J) as u64, vectors[J]);
                        }
                    });
                    if has_scale {
                        st_f32(to.scales.0 + (scale as u64 * to.rows as u64 + row) * 4, value);
                    }
                }
            }
        });
    }
}

/// The place of row `row` of those received, `rows` in all.
#[device]
pub(super) fn home_of(recv_x: u64, recv_scales: u64, shape: RowShape, row: u32, rows: u32) -> Home {
    Home {
        row: recv_x + row as u64 * row_stride(shape.bytes as u64),
        scales: recv_scales + row as u64 * 4,
        stride: rows as u64 * 4,
    }
}
