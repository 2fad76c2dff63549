//! The sending half of a combine: returns the experts' results of received tokens to their owners.

use super::super::super::combine::Bf16;
use super::super::super::fp8::{Sixteen, quantised};
use super::super::super::progress::Progress;
use super::super::element::Element;
use super::super::ranks::{Ranks, each_rank};
use super::super::team::Team;
use super::super::{
    Opened, Piece, ROWS_AT_ONCE, chunk_offset, completes, in_packets, inside, send_packets, sending_blocks,
    tokens_in_chunk,
};
use super::scale_offset;
use super::{add_rows, own_row, sum_bytes};
use crate::layout::{
    LowLatencyArgs, LowLatencyCombineArgs, PUSHED_TOKENS, SCALE_BLOCK, pieces_of, row_stride,
};
use crate::simt::*;

/// Bytes of a row as it travels that a warp writes at a time.
const WARP_BYTES: u32 = 512;

/// A lane's first loads of a received row. Loads that are in flight together take the time of one.
pub(in super::super) struct RowAhead {
    /// Tokens of the row's source.
    tokens: u32,
    /// The slot of the lane's entry, negative where the expert is on another rank.
    slot: i32,
    /// The entry's weight, without meaning where `slot` is negative.
    weight: f32,
}

impl RowAhead {
    /// Loads for the row of index `index` in the order in which rows return. `is_there`: whether
    /// the result is used.
    #[device]
    pub(super) unsafe fn of<const SUMMED: bool>(
        args: &LowLatencyCombineArgs,
        index: u32,
        is_there: bool,
    ) -> RowAhead {
        let (token, source) = row_at::<SUMMED>(args, index);
        RowAhead::of_row(args, source, token, is_there & (source < args.common.comm.num_ranks))
    }

    /// Loads for the row that piece number `number` belongs to.
    #[device]
    pub(super) unsafe fn of_piece(args: &LowLatencyCombineArgs, number: u32, is_there: bool) -> RowAhead {
        let piece = Piece::of(number, args.row_bytes, args.common.comm.num_ranks);
        RowAhead::of_row(args, piece.rank, piece.token, is_there)
    }

    /// # Safety
    /// Tables have all rows; a dispatch that an earlier kernel has completed wrote the entries that
    /// are used.
    #[device]
    pub(in super::super) unsafe fn of_row(
        args: &LowLatencyCombineArgs,
        source: u32,
        token: u32,
        is_there: bool,
    ) -> RowAhead {
        let common = &args.common;
        let mut ahead = RowAhead { tokens: 0, slot: -1, weight: 0.0 };
        if is_there & (token < common.max_tokens) {
            let (lane, row) = (laneid(), source * common.max_tokens + token);
            ahead.tokens = common.tables.num_tokens.array::<u32>().ld(source);
            if lane < common.num_topk {
                let entry = (row * common.num_topk + lane) as u64;
                ahead.slot = common.tables.slots.array::<i32>().ld(entry);
                ahead.weight = common.tables.weights.array::<f32>().ld(entry);
            }
        }
        ahead
    }
}

/// Ranks that rows return to: a rank that sums rows from where the experts left them does not
/// return its own.
#[device]
fn sources<const SUMMED: bool>(args: &LowLatencyCombineArgs) -> u32 {
    args.common.comm.num_ranks - SUMMED as u32
}

/// Token and source rank of the row of index `index` in the order in which rows return: all
/// sources' first tokens first. Where there is no source, the rank is that of none.
#[device]
fn row_at<const SUMMED: bool>(args: &LowLatencyCombineArgs, index: u32) -> (u32, u32) {
    let sources = sources::<SUMMED>(args).max(1);
    // SAFETY: a maximum with one is not zero.
    unsafe { assume(sources >= 1) };
    let (token, source) = (index / sources, index % sources);
    (token, source + (SUMMED & (source >= args.common.comm.rank)) as u32)
}

/// The most tokens of any rank that gets its rows behind words, and of any rank that gets packets.
pub(super) struct ReturnCounts {
    pub(super) words: u32,
    pub(super) packets: u32,
}

impl ReturnCounts {
    /// The whole warp calls it.
    ///
    /// # Safety
    /// A dispatch that an earlier kernel has completed wrote the table.
    #[device]
    pub(super) unsafe fn of<R: Ranks>(args: &LowLatencyCombineArgs) -> ReturnCounts {
        let table = args.common.tables.num_tokens.array::<u32>();
        let mut most = ReturnCounts { words: 0, packets: 0 };
        if R::MANY {
            let lane = laneid();
            each_rank!(R, lane, rank => {
                let tokens = table.ld(rank);
                let as_packets = in_packets(&args.common, tokens);
                most.packets = most.packets.max(if as_packets { tokens } else { 0 });
                most.words = most.words.max(if as_packets { 0 } else { tokens });
            });
            // The maximum over all lanes.
            return ReturnCounts { words: !redux_min(!most.words), packets: !redux_min(!most.packets) };
        }
        let (low, high) = (table.ld_v4(0), table.ld_v4(4));
        let mut count = |tokens: u32| {
            if in_packets(&args.common, tokens) {
                most.packets = tokens.max(most.packets);
            } else {
                most.words = tokens.max(most.words);
            }
        };
        unroll!(4, J => { count(low[J]) });
        unroll!(4, J => { count(high[J]) });
        most
    }
}

/// Returns this rank's results for the tokens that it received, a row to a block. All sources'
/// first tokens come first, because their owners wait for them in that order. All threads of the
/// team call it. `most`: the most tokens of a rank that gets its rows behind words. `progress`:
/// where the team publishes how many rows it has written, if another warp publishes them to their
/// owners.
#[device]
pub(super) unsafe fn send<E: Element, R: Ranks, const FP8: bool, const SUMMED: bool, const BARRIER: u32>(
    args: &LowLatencyCombineArgs,
    team: Team<BARRIER>,
    opened: &Opened<R>,
    most: u32,
    first: RowAhead,
    progress: Option<&Progress>,
) {
    let (common, comm) = (&args.common, &args.common.comm);
    let lane = laneid();
    let (rows, mut unsaid) = (most * sources::<SUMMED>(args), 0);
    let (mut index, mut ahead) = (ctaid(), first);
    while index < rows {
        // On its way while the rows of this one are.
        let next = index + nctaid();
        let after = RowAhead::of::<SUMMED>(args, next, true);
        let (token, source) = row_at::<SUMMED>(args, index);
        if token < ahead.tokens && !in_packets(common, ahead.tokens) {
            let rows = DevicePtr(R::pool(comm, source) + common.place.returned_x);
            let number = comm.rank * common.max_tokens + token;
            let to = rows.row(number, row_stride(sum_bytes::<FP8>(args) as u64));
            return_row::<E, FP8, BARRIER>(args, team, source * common.max_tokens + token, ahead, to);
        }
        unsaid += 1;
        if let Some(progress) = progress {
            syncwarp();
            if lane == 0 {
                progress.publish(unsaid);
            }
        } else if unsaid == ROWS_AT_ONCE || next >= rows {
            team.sync();
            if team.warp() == 0 && lane < unsaid {
                say_returned::<R, SUMMED>(args, index - lane * nctaid(), opened.epoch());
            }
            unsaid = 0;
        }
        (index, ahead) = (next, after);
    }
}

/// Publishes to their owners the rows that the block returns, as soon as `progress` shows that they
/// are written. One warp calls it.
///
/// # Safety
/// Reading `progress` acquires the stores of every warp up to the progress of the slowest one.
#[device]
pub(super) unsafe fn publish_rows<R: Ranks>(
    args: &LowLatencyCombineArgs,
    opened: &Opened<R>,
    most: u32,
    progress: &Progress,
) {
    let (rows, mut said, mut index) = (most * sources::<true>(args), 0, ctaid());
    while index < rows {
        let written = (progress.slowest() - said).min(32);
        if laneid() < written {
            say_returned::<R, true>(args, index + laneid() * nctaid(), opened.epoch());
        }
        syncwarp();
        (said, index) = (said + written, index + written * nctaid());
    }
}

/// Adds the row of index `index`, if there is one, to the returned rows of its chunk. After the
/// last one it publishes the chunk to the owner.
///
/// # Safety
/// The store releases what the block did in front of its barrier, and what the last of a chunk's
/// blocks has acquired.
#[device]
unsafe fn say_returned<R: Ranks, const SUMMED: bool>(args: &LowLatencyCombineArgs, index: u32, epoch: u64) {
    let (common, comm) = (&args.common, &args.common.comm);
    let (token, source) = row_at::<SUMMED>(args, index);
    let tokens = common.tables.num_tokens.array::<u32>().ld(source);
    if token >= tokens || in_packets(common, tokens) {
        return;
    }
    let chunk = token / common.chunk_tokens;
    let parts = tokens_in_chunk(common, tokens, chunk);
    let word = common.tables.answered.0 + chunk_offset(common, source, chunk);
    if completes(word, token - chunk * common.chunk_tokens, parts) {
        let word = R::pool(comm, source) + common.place.returned;
        st_release_sys_u64(word + chunk_offset(common, comm.rank, chunk), epoch);
    }
}

/// Writes this rank's share of the received row `row` to `to`, if it has one. All threads of the
/// team call it.
#[device]
pub(in super::super) unsafe fn return_row<E: Element, const FP8: bool, const BARRIER: u32>(
    args: &LowLatencyCombineArgs,
    team: Team<BARRIER>,
    row: u32,
    ahead: RowAhead,
    to: u64,
) {
    let share = Share::of(args, row, ahead);
    let (lane, bytes) = (laneid(), sum_bytes::<FP8>(args));
    // Whole warps go on together, since lanes ask each other; a lane has two vectors of each
    // entry, so that their loads are in flight together: a turn's and those of another one, or
    // the two that make one of e4m3.
    let (mut turn, warps) = (team.warp(), team.warps());
    while turn * WARP_BYTES < args.row_bytes && share.entries != 0 {
        let own = turn * WARP_BYTES + lane * 16;
        let at = if FP8 { own * 2 } else { own };
        let next = if FP8 { at + 16 } else { at + warps * WARP_BYTES };
        turn += if FP8 { warps } else { 2 * warps };
        let sums = share.sum::<E, FP8>(args, at, next);
        if FP8 {
            let (vector, scale) = quantised(&sums, args.quantise);
            if own < args.row_bytes {
                st_v4(to + own as u64, vector);
                if own.is_multiple_of(SCALE_BLOCK) {
                    st_f32(to + (args.row_bytes + own / SCALE_BLOCK * 4) as u64, scale);
                }
            }
        } else {
            if at < bytes {
                st_v4(to + at as u64, E::round(&sums[0]));
            }
            if next < bytes {
                st_v4(to + next as u64, E::round(&sums[1]));
            }
        }
    }
}

/// Returns the rows of ranks that get them as packets, a piece to a warp. `most`: tokens of such a
/// rank.
#[device]
pub(super) unsafe fn return_pieces<E: Element, R: Ranks, const FP8: bool>(
    args: &LowLatencyCombineArgs,
    most: u32,
    first: RowAhead,
    epoch: u64,
) {
    let (common, comm) = (&args.common, &args.common.comm);
    let pieces = most * comm.num_ranks * pieces_of(args.row_bytes);
    let (mut number, mut ahead) = (Piece::first_to_send(), first);
    while number < pieces {
        let next = number + sending_blocks() * (ntid() / 32);
        let after = RowAhead::of_piece(args, next, true);
        let piece = Piece::of(number, args.row_bytes, comm.num_ranks);
        let is_there = piece.token < ahead.tokens && in_packets(common, ahead.tokens);
        let share = Share::of(args, piece.rank * common.max_tokens + piece.token, ahead);
        if is_there && share.entries != 0 {
            let pool = R::pool(comm, piece.rank);
            let vectors = if FP8 {
                let (vectors, scales) = quantised_piece_of_row(args, &piece, &share);
                unroll!(3, V => {
                    let at = piece.at(V as u32);
                    if at < args.row_bytes && at.is_multiple_of(SCALE_BLOCK) {
                        let index = at / SCALE_BLOCK;
                        let at = scale_offset(common, args.row_bytes, comm.rank, piece.token, index);
                        let packet = epoch << 32 | scales[V].to_bits() as u64;
                        st_relaxed_sys_u64(pool + common.place.returned_scales + at, packet);
                    }
                });
                vectors
            } else {
                piece_of_row::<E>(args, &piece, &share)
            };
            let at = common.place.returned_packets + piece.offset(common, args.row_bytes, comm.rank);
            send_packets(pool + at, &vectors, epoch);
        }
        (number, ahead) = (next, after);
    }
}

/// Tokens of a rank whose rows leave the pool as packets in a combine of rows that owners gather:
/// they are on their way before the owners know that they may read, when links are idle. The first
/// ones, if the rank has more.
#[device]
pub(super) fn pushed_tokens(args: &LowLatencyArgs) -> u32 {
    (PUSHED_TOKENS >> halvings(args)).min(args.packet_tokens)
}

/// How often the tokens are halved: not at all between two ranks, once among three, and so on.
#[device]
fn halvings(args: &LowLatencyArgs) -> u32 {
    32 - args.comm.num_ranks.saturating_sub(2).leading_zeros()
}

/// The pieces that a warp sends of the rows that leave the pool as packets. A block has some tokens,
/// or pieces of one, and its last warps come first, since its first ones have sums. Nothing is
/// divided: warps compute this in front of the first barrier.
pub(super) struct Pushing {
    token: u32,
    /// The next of the block's tokens.
    token_step: u32,
    /// Among the pieces of all peers' rows of the token.
    item: u32,
    /// The warp's next one.
    item_step: u32,
    /// The first piece, loaded ahead.
    ahead: PushedAhead,
}

/// A lane's vectors of a piece, and whether its row is there.
struct PushedAhead {
    row: RowAhead,
    vectors: [[u32; 4]; 3],
}

impl Pushing {
    /// Nothing where not `sends`.
    ///
    /// # Safety
    /// Rows are there from the kernel's start, as is what [`RowAhead`] loads.
    #[device]
    pub(super) unsafe fn first(args: &LowLatencyCombineArgs, sends: bool) -> Pushing {
        // Block 0 publishes the call: its fence would wait for what it stores.
        let (blocks, block) = if nctaid() > 1 { (nctaid() - 1, ctaid().wrapping_sub(1)) } else { (1, 0) };
        let of_group = u32::BITS - (PUSHED_TOKENS - 1).leading_zeros();
        let of_buffer = u32::BITS - args.common.max_tokens.saturating_sub(1).leading_zeros();
        let log2 = of_group.saturating_sub(halvings(&args.common)).min(of_buffer);
        let (mut groups, mut group, mut token, mut token_step) = (1, 0, block, blocks);
        if blocks >> log2 != 0 {
            token_step = 1 << log2;
            (groups, group, token) = (blocks >> log2, block >> log2, block & (token_step - 1));
        }
        let warps = ntid() / 32;
        let item = group + groups * (warps - 1 - tid() / 32);
        let is_there = sends & (block < blocks) & (group < groups);
        if !is_there {
            token = u32::MAX;
        }
        let ahead = PushedAhead::of(args, token, item);
        Pushing { token, token_step, item, item_step: groups * warps, ahead }
    }
}

impl PushedAhead {
    /// # Safety
    /// As of [`Pushing::first`].
    #[device]
    unsafe fn of(args: &LowLatencyCombineArgs, token: u32, item: u32) -> PushedAhead {
        let mut ahead =
            PushedAhead { row: RowAhead { tokens: 0, slot: -1, weight: 0.0 }, vectors: [[0; 4]; 3] };
        if token < pushed_tokens(&args.common) && item < items(args) {
            let piece = pushed_piece(args, token, item);
            ahead.row = RowAhead::of_row(args, piece.rank, token, true);
            let from = own_row(args, piece.rank, token);
            unroll!(3, V => {
                ahead.vectors[V] = ld_stream_v4(from + inside(piece.at(V as u32), args.row_bytes) as u64);
            });
        }
        ahead
    }
}

/// Pieces of all peers' rows of a token.
#[device]
fn items(args: &LowLatencyCombineArgs) -> u32 {
    sources::<true>(args) * pieces_of(args.row_bytes)
}

/// One of them.
#[device]
fn pushed_piece(args: &LowLatencyCombineArgs, token: u32, item: u32) -> Piece {
    let (mut rank, mut index) = (0, item);
    while index >= pieces_of(args.row_bytes) {
        (rank, index) = (rank + 1, index - pieces_of(args.row_bytes));
    }
    Piece { rank: rank + (rank >= args.common.comm.rank) as u32, token, index }
}

/// Sends the rows of each peer's first tokens as packets from this rank's pool, a piece to a warp.
#[device]
pub(super) unsafe fn push_pieces<R: Ranks>(args: &LowLatencyCombineArgs, pushing: Pushing, epoch: u64) {
    let (common, comm) = (&args.common, &args.common.comm);
    let Pushing { mut token, token_step, item: first, item_step, mut ahead } = pushing;
    let mut item = first;
    while token < pushed_tokens(common) && item < items(args) {
        let piece = pushed_piece(args, token, item);
        if ballot(ahead.row.slot >= 0) != 0 && token < ahead.row.tokens {
            let at = common.place.returned_packets + piece.offset(common, args.row_bytes, comm.rank);
            send_packets(R::pool(comm, piece.rank) + at, &ahead.vectors, epoch);
        }
        item += item_step;
        if item >= items(args) {
            (token, item) = (token + token_step, first);
        }
        ahead = PushedAhead::of(args, token, item);
    }
}

/// A lane's vectors of this rank's share of a token; any numbers behind the row's end. The whole
/// warp calls it.
#[device]
unsafe fn piece_of_row<E: Element>(
    args: &LowLatencyCombineArgs,
    piece: &Piece,
    share: &Share,
) -> [[u32; 4]; 3] {
    let mut sums = [[0.0; 8]; 3];
    let at = [0, 1, 2].map(|vector| inside(piece.at(vector), args.row_bytes));
    add_rows::<E, 2, 3>(share.entries, &at, &mut sums, |entry| share.row(args, entry));
    let mut vectors = [[0; 4]; 3];
    unroll!(3, V => { vectors[V] = E::round(&sums[V]) });
    vectors
}

/// The same as e4m3, with the scale of each vector's block. The whole warp calls it.
#[device]
unsafe fn quantised_piece_of_row(
    args: &LowLatencyCombineArgs,
    piece: &Piece,
    share: &Share,
) -> ([[u32; 4]; 3], [f32; 3]) {
    let (mut vectors, mut scales) = ([[0; 4]; 3], [0.0; 3]);
    // A vector at a time: the sums of all three leave no registers for loads in flight.
    unroll!(3, V => {
        let at = piece.at(V as u32);
        let sums = share.sum::<Bf16, true>(args, at * 2, at * 2 + 16);
        (vectors[V], scales[V]) = quantised(&sums, args.quantise);
    });
    (vectors, scales)
}

/// The part of a received row that returns.
struct Share {
    /// The entries whose experts' rows are summed, as bits; rows that are summed already are one
    /// entry's.
    entries: u32,
    /// The slot of the expert's row for the lane's entry.
    slot: i32,
    /// The entry's weight.
    weight: f32,
}

impl Share {
    /// The share of row `row`. The whole warp calls it.
    #[device]
    unsafe fn of(args: &LowLatencyCombineArgs, row: u32, ahead: RowAhead) -> Share {
        let entries = ballot(ahead.slot >= 0);
        if args.by_expert == 0 {
            return Share { entries: (entries != 0) as u32, slot: row as i32, weight: 1.0 };
        }
        Share { entries, slot: ahead.slot, weight: ahead.weight }
    }

    /// The sums of a lane's vectors from the bytes `at` and `next` of the experts' rows on; any
    /// numbers behind a row's end. The whole warp calls it.
    #[device]
    unsafe fn sum<E: Element, const FP8: bool>(
        &self,
        args: &LowLatencyCombineArgs,
        at: u32,
        next: u32,
    ) -> Sixteen {
        let bytes = sum_bytes::<FP8>(args);
        let mut sums = [[0.0; 8]; 2];
        let at = [inside(at, bytes), inside(next, bytes)];
        let row = |entry| self.row(args, entry);
        // Four at a time would spill registers of the FP8 kernel.
        if FP8 {
            add_rows::<E, 3, 2>(self.entries, &at, &mut sums, row);
        } else {
            add_rows::<E, 4, 2>(self.entries, &at, &mut sums, row);
        }
        sums
    }

    /// Where the row of an entry is, and its weight. The whole warp calls it.
    #[device]
    unsafe fn row(&self, args: &LowLatencyCombineArgs, entry: u32) -> (u64, f32) {
        let slot = shfl_u32(self.slot as u32, entry);
        let weight = f32::from_bits(shfl_u32(self.weight.to_bits(), entry));
        (args.x.row(slot, args.x_stride), weight)
    }
}
