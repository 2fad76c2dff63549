//! Rows by expert: the receiving half of a dispatch copies each row to the segments of its experts
//! as soon as it has come.
//!
//! The place of a row follows from the selections of all tokens, which come ahead of the rows.
//! Every block counts them for itself, so no block waits for another one, and a grid need not be
//! resident as a whole. A block has some tokens of each source rank, or parts of their rows. Its own
//! rank's come first: they are counted ahead of the wait for the other ranks. Where the kernel has
//! sent them too, their rows are read from the input, while those of other ranks are under way.
//!
//! Most of this code runs once in a block, and fetching it takes longer than running it. So loops
//! are [`rolled!`], nothing is divided, and no step has a second copy for its first turn.
//!
//! Soundness: words of shared memory have a barrier of the team between their writers and their
//! readers; counters are added to by atomics. A row of a segment, or a part of it, has one warp of
//! one block, since every block derives the same places from the same selections. A row is read
//! behind the word of its chunk, which a lane has acquired in front of a barrier of its warp.
//! Places are checked against the room before use. Collectives stand where all lanes of a warp
//! arrive.

use super::super::segments::sum_upto;
use super::inside;
use super::team::Team;
use crate::layout::{
    LowLatencyArgs, LowLatencyExpertRows, LowLatencyMessages, MAX_TOPK, SCALE_BLOCK, row_stride,
};
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
    /// Waits until the numbers of tokens of the other ranks are known; false, in all threads, when
    /// a wait expired. All threads of the team call it.
    unsafe fn wait_for_counts(&self) -> bool;
    /// Tokens of a rank. This rank's own are known from the start.
    unsafe fn count(&self, source: u32) -> u32;
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

/// Words of a block's shared memory from the offset `at` on, with room for so many ranks.
#[derive(Clone, Copy)]
pub(super) struct Scratch<const MOST: usize> {
    pub(super) at: u32,
    pub(super) ranks: u32,
    pub(super) experts: u32,
}

impl<const MOST: usize> Scratch<MOST> {
    /// Bytes of the words for so many ranks, and experts of each.
    pub(super) const fn bytes(ranks: u32, experts: u32) -> u32 {
        ((ranks + 2) * experts + 1 + 2 * TOKENS * (MAX_TOPK + 1) + 3 * MOST as u32) * 4
    }

    /// Zeroes the counts. The team has a barrier behind it, and then places rows.
    #[device]
    pub(super) unsafe fn clear<const BARRIER: u32>(self, team: Team<BARRIER>) {
        rolled!(word in team.thread()..self.ranks * self.experts, team.threads => {
            st_shared_u32(self.next(0, word), 0);
        });
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

    /// The source and the expert of an entry of the round's token of number `number`, as
    /// [`key_of`] gives them.
    #[device]
    fn key(self, number: u32, entry: u32) -> u32 {
        self.end(self.experts) + (number * MAX_TOPK + entry) * 4
    }

    /// The place of that entry.
    #[device]
    fn place(self, number: u32, entry: u32) -> u32 {
        self.key(TOKENS + number, entry)
    }

    /// The source of that token, and behind it the token's index.
    #[device]
    fn token(self, number: u32) -> u32 {
        self.place(TOKENS, 2 * number)
    }

    /// The first of a rank's tokens that the block has.
    #[device]
    fn first(self, source: u32) -> u32 {
        self.token(TOKENS) + source * 4
    }

    /// Which parts of the rows of a rank's tokens the block has, [`Share::parts`].
    #[device]
    fn parts(self, source: u32) -> u32 {
        self.first(2 * MOST as u32 + source)
    }

    /// Tokens that the block has of the ranks up to the one of turn `turn`.
    #[device]
    fn upto(self, turn: u32) -> u32 {
        self.first(MOST as u32 + turn)
    }
}

/// A word that all lanes have loaded from the same address. The shuffle says so to the checks of the
/// PTX, which do not see it where the compiler has computed the address twice. The whole warp calls
/// it.
#[device]
unsafe fn same(word: u32) -> u32 {
    shfl_u32(word, 0)
}

/// A source and a local expert as one word.
#[device]
fn key_of(source: u32, expert: u32) -> u32 {
    source << 16 | expert
}

/// Tokens of a rank that a block has, and which parts of their rows.
struct Share {
    first: u32,
    end: u32,
    /// The number of parts of a row, as the power of two that it is, and in the high half the
    /// block's.
    parts: u32,
}

impl Share {
    /// The share of `count` tokens. Where there are more blocks than tokens, several blocks have
    /// parts of the same row.
    #[device]
    fn of(count: u32) -> Share {
        let (block, blocks) = (ctaid(), nctaid());
        if count < blocks {
            let tokens = at_least_one(count);
            // The largest number of blocks for a token that is a power of two.
            let mut shift = tokens.leading_zeros() - blocks.leading_zeros();
            if tokens << shift > blocks {
                shift -= 1;
            }
            let first = (block >> shift).min(count);
            let part = block & ((1 << shift) - 1);
            return Share { first, end: (first + 1).min(count), parts: part << 16 | shift };
        }
        // A loop of few turns: a division takes 20 instructions.
        let mut each = 1;
        while each * blocks < count {
            no_unroll();
            each += unknown(1);
        }
        let first = (block * each).min(count);
        Share { first, end: (first + each).min(count), parts: 0 }
    }
}

/// A token of a source rank.
#[derive(Clone, Copy)]
struct Token {
    source: u32,
    index: u32,
}

/// A lane's entry of a token, of which `seen` was loaded. `None` in the place of the token where
/// the warp has none.
struct Entry {
    token: Option<Token>,
    seen: u64,
}

/// Pairs of entries whose loads a thread has in flight together.
const PAIRS: u32 = 4;

/// The placing of rows by a block.
pub(super) struct Placing<'a, C, const MOST: usize, const BARRIER: u32> {
    pub(super) args: &'a LowLatencyArgs,
    /// Where rows go.
    pub(super) to: &'a LowLatencyExpertRows,
    pub(super) shape: RowShape,
    /// The warps that place rows, at least [`TOKENS`].
    pub(super) team: Team<BARRIER>,
    pub(super) scratch: Scratch<MOST>,
    /// The tokens that come.
    pub(super) come: &'a C,
}

impl<C: Arrivals, const MOST: usize, const BARRIER: u32> Placing<'_, C, MOST, BARRIER> {
    /// Copies rows to the segments of their experts as they come, and writes the tables of the
    /// segments; false, in all threads, when the counts of the other ranks have not come. All
    /// threads of the team call it, behind [`Scratch::clear`].
    #[device]
    pub(super) unsafe fn place_rows(&self) -> bool {
        let Placing { args, shape, team, scratch, .. } = *self;
        // SAFETY: a grid has blocks, and a row bytes.
        core::hint::assert_unchecked(nctaid() >= 1 && shape.bytes >= 1);
        team.sync();
        if !self.count_selections() {
            return false;
        }
        team.sync();
        let all = same(ld_shared_u32(scratch.upto(args.comm.num_ranks - 1)));
        let (mut first, mut placed) = (0, Entry { token: None, seen: 0 });
        loop {
            // On its way while the tokens in front of these are placed, or segments are laid out.
            let ahead = self.entry(first + team.warp());
            if first == 0 {
                if team.warp() == 0 {
                    self.lay_out_segments();
                }
            } else {
                self.place_round(&placed, (all + TOKENS - first).min(TOKENS));
            }
            // A block without tokens has an empty round, so that a barrier follows the layout.
            if first >= all.max(1) {
                break;
            }
            // The words are the next tokens'.
            team.sync();
            (first, placed) = (first + TOKENS, ahead);
        }
        self.write_tables();
        true
    }

    /// Copies the rows of the round's `count` tokens, and writes the tables of these rows; `entry`:
    /// the lane's, of the warp's token.
    #[device]
    unsafe fn place_round(&self, entry: &Entry, count: u32) {
        let (key, place) = self.find_places(entry);
        self.write_rows(entry, place);
        self.copy_rows(count);
        if key != NOWHERE {
            red_relaxed_cta_shared_add_u32(self.scratch.next(key >> 16, key & 0xffff), 1);
        }
    }

    /// The rank whose turn it is.
    #[device]
    unsafe fn source(&self, turn: u32) -> u32 {
        let (source, ranks) = (self.args.comm.rank + turn, self.args.comm.num_ranks);
        if source < ranks { source } else { source - ranks }
    }

    /// The block's token of number `number`, if it has so many. The whole warp calls it.
    #[device]
    unsafe fn token(&self, number: u32) -> Option<Token> {
        let Placing { args, scratch, .. } = *self;
        let mut turn = 0;
        rolled!(first in 0..args.comm.num_ranks, 32 => {
            let of_lane = first + laneid();
            let is_before = of_lane < args.comm.num_ranks && ld_shared_u32(scratch.upto(of_lane)) <= number;
            turn += ballot(is_before).count_ones();
        });
        if turn >= args.comm.num_ranks {
            return None;
        }
        let before = if turn == 0 { 0 } else { ld_shared_u32(scratch.upto(turn - 1)) };
        let source = self.source(turn);
        Some(Token { source, index: ld_shared_u32(scratch.first(source)) + number - before })
    }

    /// Loads the lane's entry of the block's token of number `number`, as far as it has come. The
    /// whole warp calls it.
    #[device]
    unsafe fn entry(&self, number: u32) -> Entry {
        let (mut entry, lane) = (Entry { token: None, seen: 0 }, laneid());
        if self.team.warp() < TOKENS
            && let Some(token) = self.token(number)
        {
            entry.token = Some(token);
            if lane < self.args.num_topk {
                entry.seen = self.come.load(token.source, token.index, lane / 2);
            }
        }
        entry
    }

    /// Counts the selections of each local expert by each rank, and those in front of the block's
    /// tokens, and leaves in shared memory which tokens the block has: its own rank's first, which
    /// need not come. False, in all threads, when the counts of the other ranks have not come.
    #[device]
    unsafe fn count_selections(&self) -> bool {
        let Placing { args, team, scratch, come, .. } = *self;
        // A token has a power of two of threads, so that nothing is divided.
        let pairs = args.num_topk.div_ceil(2);
        let shift = u32::BITS - (pairs - 1).leading_zeros();
        let pair = team.thread() & ((1 << shift) - 1);
        let (begin, step) = (team.thread() >> shift, team.threads >> shift);
        let mut upto = 0;
        rolled!(turn in 0..args.comm.num_ranks => {
            let source = self.source(turn);
            let count = come.count(source);
            let share = Share::of(count);
            upto += share.end - share.first;
            if team.thread() == 0 {
                st_shared_u32(scratch.first(source), share.first);
                st_shared_u32(scratch.parts(source), share.parts);
                st_shared_u32(scratch.upto(turn), upto);
            }
            let mut index = if pair < pairs { begin } else { count };
            while index < count {
                no_unroll();
                // Loads that are in flight together; the first again where there is no such token.
                let mut seen = [0; PAIRS as usize];
                unroll!(4, J => {
                    let at = index + J as u32 * step;
                    seen[J] = come.load(source, if at < count { at } else { index }, pair);
                });
                let end = (index + PAIRS * step).min(count);
                while index < end {
                    no_unroll();
                    let (low, high) = come.pair(seen[0], source, index, pair);
                    let more = 1 + if index < share.first { 1 << 16 } else { 0 };
                    self.count_selection(source, low, more);
                    self.count_selection(source, high, more);
                    seen = [seen[1], seen[2], seen[3], 0];
                    index += unknown(step);
                }
            }
            if turn == 0 && !come.wait_for_counts() {
                return false;
            }
        });
        true
    }

    /// Adds to the count of an expert, if it is one of this rank.
    #[device]
    unsafe fn count_selection(&self, source: u32, expert: u32, more: u32) {
        if expert < self.args.local_experts {
            red_relaxed_cta_shared_add_u32(self.scratch.next(source, expert), more);
        }
    }

    /// Lays the segments out, one behind the other, and leaves in shared memory where they begin and
    /// end, and where the next selection of each rank goes. A whole warp calls it: its lanes have
    /// adjacent experts, so that it takes one sum over lanes and no barrier.
    #[device]
    unsafe fn lay_out_segments(&self) {
        let Placing { args, to, scratch, .. } = *self;
        let (lane, experts, ranks) = (laneid(), args.local_experts, args.comm.num_ranks);
        let each = experts.div_ceil(32);
        let first = (lane * each).min(experts);
        let end = (first + each).min(experts);
        let aligned = |rows: u32| (rows + to.alignment - 1) & !(to.alignment - 1);
        let mut of_lane = 0;
        rolled!(expert in first..end => {
            let mut rows = 0;
            rolled!(source in 0..ranks => {
                rows += ld_shared_u32(scratch.next(source, expert)) & 0xffff;
            });
            of_lane += aligned(rows);
        });
        let mut start = sum_upto(of_lane, |a, b| a + b) - of_lane;
        rolled!(expert in first..end => {
            let mut row = start;
            rolled!(source in 0..ranks => {
                let of = ld_shared_u32(scratch.next(source, expert));
                st_shared_u32(scratch.next(source, expert), row + (of >> 16));
                row += of & 0xffff;
            });
            st_shared_u32(scratch.start(expert), start);
            st_shared_u32(scratch.end(expert), row);
            start += aligned(row - start);
        });
        if lane == 31 {
            st_shared_u32(scratch.start(experts), start);
        }
    }

    /// Writes the tables of the block's experts, and marks padding. Each warp has some of the experts:
    /// the middle warp the first, because the first warps write tables of rows and the last ones copy.
    #[device]
    unsafe fn write_tables(&self) {
        let Placing { args, to, team, scratch, .. } = *self;
        let (lane, experts, middle) = (laneid(), args.local_experts, team.warps() / 2);
        let turn = if team.warp() < middle { team.warp() + team.warps() } else { team.warp() } - middle;
        rolled!(expert in ctaid() + turn * nctaid()..experts, nctaid() * team.warps() => {
            let (start, end) = (ld_shared_u32(scratch.start(expert)), ld_shared_u32(scratch.end(expert)));
            let next = ld_shared_u32(scratch.start(expert + 1));
            if lane == 0 {
                let (starts, ends) = (to.expert_starts.array::<u32>(), to.psum_expert.array::<u32>());
                st_u32(to.expert_counts.array::<u32>().at(expert), end - start);
                starts.st(expert, start);
                ends.st(expert, end);
                if expert + 1 == experts {
                    starts.st(expert as u64 + 1, next);
                    ends.st(expert as u64 + 1, next);
                }
            }
            rolled!(row in end + lane..next.min(to.rows), 32 => {
                to.src_idx.array::<u32>().st(row, NOWHERE);
            });
        });
    }

    /// Leaves in shared memory where the entries of the round's tokens go, and gives the key and
    /// the place of the lane's entry.
    #[device]
    unsafe fn find_places(&self, entry: &Entry) -> (u32, u32) {
        let Placing { args, to, team, scratch, come, .. } = *self;
        let (lane, topk, number) = (laneid(), args.num_topk, team.warp());
        let (mut key, mut place) = (NOWHERE, NOWHERE);
        if let Some(Token { source, index }) = entry.token
            && lane < topk
        {
            let (low, high) = come.pair(entry.seen, source, index, lane / 2);
            let expert = if lane.is_multiple_of(2) { low } else { high };
            if expert < args.local_experts {
                key = key_of(source, expert);
            }
            st_shared_u32(scratch.key(number, lane), key);
            if lane == 0 {
                st_shared_u32(scratch.token(number), source);
                st_shared_u32(scratch.token(number) + 4, index);
            }
        }
        team.sync();
        if let Some(Token { source, index }) = entry.token
            && lane < topk
        {
            if key != NOWHERE {
                place = ld_shared_u32(scratch.next(source, key & 0xffff));
                // Those in front of this one: of the source's other tokens in the round, and of the
                // token, which may select an expert twice.
                let others = number.min(index - ld_shared_u32(scratch.first(source)));
                rolled!(other in number - others..number + 1 => {
                    rolled!(of_other in 0..if other == number { lane } else { topk } => {
                        place += (ld_shared_u32(scratch.key(other, of_other)) == key) as u32;
                    });
                });
                place = if place < to.rows { place } else { NOWHERE };
            }
            st_shared_u32(scratch.place(number, lane), place);
        }
        team.sync();
        (key, place)
    }

    /// Writes the tables of a token's rows; `place`: where the lane's entry goes.
    #[device]
    unsafe fn write_rows(&self, entry: &Entry, place: u32) {
        let Placing { args, to, scratch, come, .. } = *self;
        let (lane, topk) = (laneid(), args.num_topk);
        if let Some(Token { source, index }) = entry.token
            && ld_shared_u32(scratch.parts(source)) >> 16 == 0
        {
            if lane == 0 {
                come.note(source, index);
            }
            if lane < topk {
                let token = come.token(source, index);
                let row = source * args.max_tokens + token;
                to.slots.array::<u32>().st(row * topk + lane, place);
                if place != NOWHERE {
                    to.src_idx.array::<u32>().st(place, token);
                    st_u64(to.src_entry.array::<u64>().at(place), (lane as u64) << 32 | source as u64);
                    st_u32(to.weights.array::<u32>().at(place), come.weight(source, index, lane));
                }
            }
        }
    }

    /// Copies the block's parts of the rows of the round's `count` tokens to where their entries
    /// go, as they come, a piece to a warp: a row is read once.
    #[device]
    unsafe fn copy_rows(&self, count: u32) {
        let Placing { shape, team, scratch, .. } = *self;
        let pieces = shape.bytes.div_ceil(PIECE);
        // From the last warp on: the first ones write tables.
        let mut mine = team.warps() - 1 - team.warp();
        rolled!(number in 0..count => {
            let source = same(ld_shared_u32(scratch.token(number)));
            let token = Token { source, index: ld_shared_u32(scratch.token(number) + 4) };
            let parts = same(ld_shared_u32(scratch.parts(source)));
            let (part, shift) = (parts >> 16, parts & 31);
            // The block has every `1 << shift`th piece, the warp those of them from `mine` on.
            while part + (mine << shift) < pieces {
                no_unroll();
                self.copy_piece(number, token, part + (mine << shift));
                mine += unknown(team.warps());
            }
            // Pieces of the next token follow those of this one.
            mine -= (pieces + (1 << shift) - 1 - part) >> shift;
        });
    }

    /// Copies a piece of the row of the round's token of number `number`. The whole warp calls it.
    #[device]
    unsafe fn copy_piece(&self, number: u32, Token { source, index }: Token, piece: u32) {
        let Placing { args, to, shape, scratch, come, .. } = *self;
        let (lane, topk) = (laneid(), args.num_topk);
        let has_come = lane != 0 || come.wait(source, index);
        // Orders the other lanes' loads behind lane 0's wait.
        syncwarp();
        let mut place = NOWHERE;
        if lane < topk {
            place = ld_shared_u32(scratch.place(number, lane));
        }
        // A row that does not come goes nowhere.
        if ballot(!has_come) != 0 {
            return;
        }
        let (mut left, home) = (ballot(place != NOWHERE), come.home(source, index));
        if left == 0 && home.is_none() {
            return;
        }
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
                st_f32(DevicePtr(home.scales).row(scale, home.stride), value);
            }
        }
        while left != 0 {
            no_unroll();
            let row = shfl_u32(place, left.trailing_zeros() & 31);
            left &= left.wrapping_sub(1);
            let x = to.x.row(row, to.x_stride);
            unroll!(4, J => {
                if at(J) < shape.bytes {
                    st_v4(x + at(J) as u64, vectors[J]);
                }
            });
            if has_scale {
                to.scales.array::<f32>().st(row_major(scale, to.rows, row), value);
            }
        }
    }
}

/// The place of row `row` of those received, `rows` in all.
#[device]
pub(super) fn home_of(messages: &LowLatencyMessages, shape: RowShape, row: u32, rows: u32) -> Home {
    Home {
        row: messages.recv_x.row(row, row_stride(shape.bytes as u64)),
        scales: messages.recv_scales.array::<f32>().at(row),
        stride: rows as u64 * 4,
    }
}
