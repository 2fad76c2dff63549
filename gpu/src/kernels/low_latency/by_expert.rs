//! Rows by expert: the receiving half of a dispatch copies each row to the segments of its experts
//! as soon as it has come.
//!
//! The place of a row follows from the selections of all tokens, which come ahead of the rows.
//! Every block that places rows counts them for itself, so none of them waits for another one.
//! Blocks that send a token place none, where enough others do. A block has some tokens of each
//! source rank, or parts of their rows. Its own rank's come first: they are counted ahead of the
//! wait for the other ranks, or while other warps wait. Where the kernel has sent them too, their
//! rows are read from the input, while those of other ranks are under way.
//!
//! The first [`TOKENS`] warps lay segments out and find places. A team's other warps load their first
//! pieces meanwhile, and wait for the places before they store.
//!
//! Most of this code runs once in a block, and fetching it takes longer than running it. So loops
//! are [`rolled!`], nothing is divided, and no step has a second copy for its first turn.
//!
//! Soundness: words of shared memory have a barrier between their writers and their readers: of the
//! team, of the warps that find places, or of those and the ones that wait for places. Counters are
//! added to by atomics. A row of a segment, or a part of it, has one warp of
//! one block, since every block derives the same places from the same selections. A row is read
//! behind the word of its chunk, which a lane has acquired in front of a barrier of its warp.
//! Places are checked against the room before use. Collectives stand where all lanes of a warp
//! arrive.

use super::super::segments::sum_upto;
use super::dispatch::Blocks;
use super::inside;
use super::team::Team;
use crate::layout::{
    LowLatencyArgs, LowLatencyExpertRows, LowLatencyMessages, MAX_TOPK, SCALE_BLOCK, row_stride,
};
use crate::simt::*;

/// Tokens that a block takes together; a warp reads the entries of one.
const TOKENS: u32 = 8;
/// The barrier of the warps that find places, and the one at which the others wait for them.
const ENTRIES: u32 = 5;
const PLACES: u32 = 6;
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
    /// The same, before it is known whether there is such a token; `None` where a load then has no
    /// meaning.
    unsafe fn load_ahead(&self, source: u32, index: u32, pair: u32) -> Option<u64>;
    /// The local experts of those two entries, of which `seen` was loaded; any larger number where
    /// there is none.
    unsafe fn pair(&self, seen: u64, source: u32, index: u32, pair: u32) -> (u32, u32);
    /// The bits of the weight of an entry for a local expert.
    unsafe fn weight(&self, source: u32, index: u32, entry: u32) -> u32;
    /// The token's index on its rank.
    unsafe fn token(&self, source: u32, index: u32) -> u32;
    /// Whether all rows of the source are here from the start.
    unsafe fn is_here(&self, source: u32) -> bool;
    /// Waits for the row; false when the wait expired.
    unsafe fn wait(&self, source: u32, index: u32) -> bool;
    /// Where the row is.
    unsafe fn row(&self, source: u32, index: u32) -> u64;
    /// A scale of the row.
    unsafe fn scale(&self, source: u32, index: u32, scale: u32) -> f32;
    /// Puts a scale of the row where the row's scales are received, if it is not there.
    unsafe fn keep_scale(&self, source: u32, index: u32, scale: u32, value: f32);
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

    /// Rows of the segments that a warp has laid out: two words for each warp.
    #[device]
    fn of_warp(self, number: u32) -> u32 {
        self.place(TOKENS, number)
    }

    /// The first of a rank's tokens that the block has.
    #[device]
    fn first(self, source: u32) -> u32 {
        self.of_warp(2 * TOKENS) + source * 4
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

/// A word that all lanes have loaded from the same address. The shuffle shows that to the checks of the
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
    fn of(count: u32, Blocks { number: block, count: blocks }: Blocks) -> Share {
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

/// A lane's part of a piece of a row, and a scale.
struct Piece {
    vectors: [[u32; 4]; VECTORS],
    scale: f32,
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
    /// The blocks that place rows.
    pub(super) blocks: Blocks,
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
        core::hint::assert_unchecked(self.blocks.count >= 1 && shape.bytes >= 1);
        team.sync();
        if !self.count_selections() {
            return false;
        }
        team.sync();
        let all = same(ld_shared_u32(scratch.upto(args.comm.num_ranks - 1)));
        // One copy of a round: the compiler does not see that the first one lays segments out.
        let mut first = unknown(0);
        // A block without tokens has an empty round, which lays segments out.
        loop {
            let count = (all - first).min(TOKENS);
            let mut ahead = Entry { token: None, seen: 0 };
            if first + TOKENS < all {
                // On its way while the tokens in front of these are placed.
                ahead = self.entry(first + TOKENS + team.warp());
            }
            self.place_round(first, count);
            first += unknown(TOKENS);
            if first >= all {
                break;
            }
            // The words are the next tokens'.
            team.sync();
            self.note_keys(&ahead);
        }
        self.write_tables();
        true
    }

    /// Places and copies the rows of a round: those of the block's `count` tokens from number `first`
    /// on, a piece to a warp.
    ///
    /// The warps behind those that find places load their first piece meanwhile.
    #[device]
    unsafe fn place_round(&self, first: u32, count: u32) {
        let Placing { args, shape, team, scratch, .. } = *self;
        let pieces = shape.bytes.div_ceil(PIECE);
        let finds = team.warp() < TOKENS;
        if finds {
            self.find_places(first, count);
        }
        // From the last warp on: the first ones write tables.
        let (mut number, mut mine) = (0, team.warps() - 1 - team.warp());
        // One copy of the loads: the compiler does not see that the first turn is another one.
        let mut are_placed = unknown(finds as u32);
        loop {
            no_unroll();
            let (mut token, mut piece) = (Token { source: args.comm.rank, index: 0 }, 0);
            while number < count {
                no_unroll();
                token = self.token(first + number).unwrap_or(token);
                let parts = same(ld_shared_u32(scratch.parts(token.source)));
                let (part, shift) = (parts >> 16, parts & 31);
                // The block has every `1 << shift`th piece, the warp those of them from `mine` on.
                piece = part + (mine << shift);
                if piece < pieces {
                    break;
                }
                // Pieces of the next token follow those of this one.
                mine -= (pieces + (1 << shift) - 1 - part) >> shift;
                number += unknown(1);
            }
            let mut loaded = None;
            if number < count {
                loaded = self.load_piece(number, token, piece, are_placed != 0);
            }
            if are_placed == 0 {
                barrier_sync_part::<PLACES>(team.threads);
                are_placed = unknown(1);
            }
            if number >= count {
                break;
            }
            if let Some(loaded) = loaded {
                self.store_piece(number, token, piece, &loaded);
            }
            mine += unknown(team.warps());
        }
    }

    /// The rank whose turn it is.
    #[device]
    unsafe fn source(&self, turn: u32) -> u32 {
        let (source, ranks) = (self.args.comm.rank + turn, self.args.comm.num_ranks);
        if source < ranks { source } else { source - ranks }
    }

    /// The turn of a rank.
    #[device]
    unsafe fn turn(&self, source: u32) -> u32 {
        let (rank, ranks) = (self.args.comm.rank, self.args.comm.num_ranks);
        if source < rank { source + ranks - rank } else { source - rank }
    }

    /// Tokens that the block has of the ranks in front of the one of turn `turn`.
    #[device]
    unsafe fn before(&self, turn: u32) -> u32 {
        if turn == 0 { 0 } else { ld_shared_u32(self.scratch.upto(turn - 1)) }
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
        let source = self.source(turn);
        Some(Token { source, index: ld_shared_u32(scratch.first(source)) + number - self.before(turn) })
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
    /// tokens, and leaves in shared memory which tokens the block has and the keys of the first
    /// round's: its own rank's first, which need not come. False, in all threads, when the counts of
    /// the other ranks have not come.
    #[device]
    unsafe fn count_selections(&self) -> bool {
        let Placing { args, team, scratch, come, .. } = *self;
        // A token has a power of two of threads, so that nothing is divided.
        let pairs = args.num_topk.div_ceil(2);
        let shift = u32::BITS - (pairs - 1).leading_zeros();
        let pair = team.thread() & ((1 << shift) - 1);
        let (begin, step) = (team.thread() >> shift, team.threads >> shift);
        let (mut upto, mut ahead) = (0, None);
        rolled!(turn in 0..args.comm.num_ranks => {
            let before = upto;
            let source = self.source(turn);
            let count = come.count(source);
            let share = Share::of(count, self.blocks);
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
                let mut loaded = PAIRS * step;
                if let Some(first) = ahead {
                    (seen[0], loaded, ahead) = (first, step, None);
                } else {
                    unroll!(4, J => {
                        let at = index + J as u32 * step;
                        seen[J] = come.load(source, if at < count { at } else { index }, pair);
                    });
                }
                let end = (index + loaded).min(count);
                while index < end {
                    no_unroll();
                    let (low, high) = come.pair(seen[0], source, index, pair);
                    let more = 1 + if index < share.first { 1 << 16 } else { 0 };
                    self.count_selection(source, low, more);
                    self.count_selection(source, high, more);
                    // The first round's tokens are at hand.
                    let number = before + index - share.first;
                    if index >= share.first && index < share.end && number < TOKENS {
                        self.note_key(number, pair * 2, source, low);
                        self.note_key(number, pair * 2 + 1, source, high);
                    }
                    seen = [seen[1], seen[2], seen[3], 0];
                    index += unknown(step);
                }
            }
            ahead = None;
            if turn == 0 {
                // On its way while the block waits.
                let (index, pair) = (begin.min(args.max_tokens - 1), pair.min(pairs - 1));
                ahead = come.load_ahead(self.source(unknown(1)), index, pair);
                if !come.wait_for_counts() {
                    return false;
                }
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
    /// end, and where the next selection of each rank goes. The warps that find places call it: a
    /// thread has an expert, of more experts than threads one in each turn.
    #[device]
    unsafe fn lay_out_segments(&self) {
        let Placing { args, to, team, scratch, .. } = *self;
        let (experts, ranks, warp) = (args.local_experts, args.comm.num_ranks, team.warp());
        let aligned = |rows: u32| (rows + to.alignment - 1) & !(to.alignment - 1);
        let (mut begin, mut words) = (0, 0);
        rolled!(first in 0..experts, TOKENS * 32 => {
            let expert = first + team.thread();
            let (mut rows, mut start) = (0, 0);
            if expert < experts {
                rolled!(source in 0..ranks => {
                    rows += ld_shared_u32(scratch.next(source, expert)) & 0xffff;
                });
                start = aligned(rows);
            }
            // Rows of the segments up to this one, of the warp and then of all warps.
            let upto = sum_upto(start, |a, b| a + b);
            if laneid() == 31 {
                st_shared_u32(scratch.of_warp(words + warp), upto);
            }
            barrier_sync_part::<ENTRIES>(TOKENS * 32);
            let (mut all, mut before) = (begin, begin + upto - start);
            rolled!(other in 0..TOKENS => {
                let of_other = ld_shared_u32(scratch.of_warp(words + other));
                all += of_other;
                before += if other < warp { of_other } else { 0 };
            });
            if expert < experts {
                st_shared_u32(scratch.start(expert), before);
                rolled!(source in 0..ranks => {
                    let of = ld_shared_u32(scratch.next(source, expert));
                    st_shared_u32(scratch.next(source, expert), before + (of >> 16));
                    before += of & 0xffff;
                });
                st_shared_u32(scratch.end(expert), before);
            }
            // The next turn's words are others, so that no barrier stands behind this one.
            (begin, words) = (all, words ^ TOKENS);
        });
        if team.thread() == 0 {
            st_shared_u32(scratch.start(experts), begin);
        }
    }

    /// Writes the tables of the block's experts, and marks padding. Each warp has some of the experts:
    /// the middle warp the first, because the first warps write tables of rows and the last ones copy.
    #[device]
    unsafe fn write_tables(&self) {
        let Placing { args, to, team, scratch, .. } = *self;
        let (lane, experts, middle) = (laneid(), args.local_experts, team.warps() / 2);
        let turn = if team.warp() < middle { team.warp() + team.warps() } else { team.warp() } - middle;
        let Blocks { number: block, count: blocks } = self.blocks;
        rolled!(expert in block + turn * blocks..experts, blocks * team.warps() => {
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

    /// Leaves the key of an entry in shared memory, if there is such an entry.
    #[device]
    unsafe fn note_key(&self, number: u32, entry: u32, source: u32, expert: u32) {
        if entry < self.args.num_topk {
            let key = if expert < self.args.local_experts { key_of(source, expert) } else { NOWHERE };
            st_shared_u32(self.scratch.key(number, entry), key);
        }
    }

    /// Leaves the keys of a round behind the first one in shared memory; `entry`: the lane's, of the
    /// warp's token. The warps that find places meet behind it.
    #[device]
    unsafe fn note_keys(&self, entry: &Entry) {
        let (lane, number) = (laneid(), self.team.warp());
        if number >= TOKENS {
            return;
        }
        if let Some(Token { source, index }) = entry.token
            && lane < self.args.num_topk
        {
            let (low, high) = self.come.pair(entry.seen, source, index, lane / 2);
            self.note_key(number, lane, source, if lane.is_multiple_of(2) { low } else { high });
        }
        barrier_sync_part::<ENTRIES>(TOKENS * 32);
    }

    /// Leaves in shared memory where the entries of the round's tokens go, and writes the tables of
    /// their rows. The first [`TOKENS`] warps call it. They do not wait for the others, which load
    /// pieces and then wait for them.
    #[device]
    unsafe fn find_places(&self, first: u32, count: u32) {
        let Placing { args, to, team, scratch, .. } = *self;
        let (lane, topk, number) = (laneid(), args.num_topk, team.warp());
        if first == 0 {
            self.lay_out_segments();
            barrier_sync_part::<ENTRIES>(TOKENS * 32);
        }
        let (mut key, mut place) = (NOWHERE, NOWHERE);
        if number < count && lane < topk {
            key = ld_shared_u32(scratch.key(number, lane));
            if key != NOWHERE {
                let source = key >> 16;
                place = ld_shared_u32(scratch.next(source, key & 0xffff));
                // Those in front of this one: of the source's other tokens in the round, and of the
                // token, which may select an expert twice.
                let others = number.min(first + number - self.before(self.turn(source)));
                rolled!(other in number - others..number + 1 => {
                    rolled!(of_other in 0..if other == number { lane } else { topk } => {
                        place += (ld_shared_u32(scratch.key(other, of_other)) == key) as u32;
                    });
                });
                place = if place < to.rows { place } else { NOWHERE };
            }
            st_shared_u32(scratch.place(number, lane), place);
        }
        if team.warps() > TOKENS {
            barrier_arrive_part::<PLACES>(team.threads);
        }
        barrier_sync_part::<ENTRIES>(TOKENS * 32);
        if key != NOWHERE {
            red_relaxed_cta_shared_add_u32(scratch.next(key >> 16, key & 0xffff), 1);
        }
        if number < count {
            self.write_rows(first + number, place);
        }
    }

    /// Writes the tables of the rows of the block's token of number `number`; `place`: where the lane's
    /// entry goes. The whole warp calls it.
    #[device]
    unsafe fn write_rows(&self, number: u32, place: u32) {
        let Placing { args, to, scratch, come, .. } = *self;
        let (lane, topk) = (laneid(), args.num_topk);
        if let Some(Token { source, index }) = self.token(number)
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

    /// Whether the row of a token goes anywhere, by its entries. The whole warp calls it.
    #[device]
    unsafe fn has_entries(&self, Token { source, index }: Token) -> bool {
        let Placing { args, come, .. } = *self;
        let (lane, mut has) = (laneid(), false);
        if lane < args.num_topk.div_ceil(2) {
            let (low, high) = come.pair(come.load(source, index, lane), source, index, lane);
            has = low < args.local_experts || high < args.local_experts;
        }
        ballot(has) != 0
    }

    /// Waits for the row of the round's token of number `number`, and loads a piece of it; `None` where
    /// the row does not come or goes nowhere. `is_placed`: whether the token's entries have places. The
    /// whole warp calls it.
    #[device]
    unsafe fn load_piece(&self, number: u32, token: Token, piece: u32, is_placed: bool) -> Option<Piece> {
        let Placing { args, shape, scratch, come, .. } = *self;
        let (Token { source, index }, lane) = (token, laneid());
        let goes = if is_placed {
            let has_place = lane < args.num_topk && ld_shared_u32(scratch.place(number, lane)) != NOWHERE;
            ballot(has_place) != 0
        } else {
            come.is_here(source) || self.has_entries(token)
        };
        let has_come = lane != 0 || come.wait(source, index);
        // Orders the other lanes' loads behind lane 0's wait.
        syncwarp();
        if ballot(!has_come) != 0 || !goes && come.home(source, index).is_none() {
            return None;
        }
        let (from, mut vectors) = (come.row(source, index), [[0; 4]; VECTORS]);
        // The loads have no condition, so that all are in flight together.
        unroll!(4, J => { vectors[J] = ld_stream_v4(from + inside(offset_of(piece, J), shape.bytes) as u64) });
        let scale = piece * SCALES + lane;
        let has_scale = lane < SCALES && scale < shape.scales;
        let scale = if has_scale { come.scale(source, index, scale) } else { 0.0 };
        Some(Piece { vectors, scale })
    }

    /// Stores a piece of the row of the round's token of number `number` where its entries go: a row
    /// is read once. The whole warp calls it.
    #[device]
    unsafe fn store_piece(&self, number: u32, Token { source, index }: Token, piece: u32, loaded: &Piece) {
        let Placing { args, to, shape, scratch, come, .. } = *self;
        let lane = laneid();
        let mut place = NOWHERE;
        if lane < args.num_topk {
            place = ld_shared_u32(scratch.place(number, lane));
        }
        let mut left = ballot(place != NOWHERE);
        let scale = piece * SCALES + lane;
        let has_scale = lane < SCALES && scale < shape.scales;
        if has_scale {
            come.keep_scale(source, index, scale, loaded.scale);
        }
        if let Some(home) = come.home(source, index) {
            unroll!(4, J => {
                let at = offset_of(piece, J);
                if at < shape.bytes {
                    st_v4(home.row + at as u64, loaded.vectors[J]);
                }
            });
            if has_scale {
                st_f32(DevicePtr(home.scales).row(scale, home.stride), loaded.scale);
            }
        }
        while left != 0 {
            no_unroll();
            let row = shfl_u32(place, left.trailing_zeros() & 31);
            left &= left.wrapping_sub(1);
            let x = to.x.row(row, to.x_stride);
            unroll!(4, J => {
                let at = offset_of(piece, J);
                if at < shape.bytes {
                    st_v4(x + at as u64, loaded.vectors[J]);
                }
            });
            if has_scale {
                to.scales.array::<f32>().st(row_major(scale, to.rows, row), loaded.scale);
            }
        }
    }
}

/// Where the lane's vector `vector` of a piece begins in the row, in bytes.
#[device]
fn offset_of(piece: u32, vector: usize) -> u32 {
    piece * PIECE + (vector as u32 * 32 + laneid()) * 16
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
