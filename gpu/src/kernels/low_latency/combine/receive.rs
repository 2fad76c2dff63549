//! A token's owner sums what has come back.

use super::super::super::combine::{Bf16, Summand};
use super::super::super::epoch::note_missing_token;
use super::super::super::fp8::{LANES_PER_SCALE, Sixteen, from_e4m3};
use super::super::super::peer_wait::PeerWait;
use super::super::element::Element;
use super::super::ranks::Ranks;
use super::super::team::Team;
use super::super::{
    NodeShared, Opened, Piece, PieceOf, ROWS_AT_ONCE, chunk_offset, have_all_entered, in_packets, inside,
    is_piece_late, last_warp, late_with, load_packets, packet_seen, wait_piece,
};
use super::scale_offset;
use super::{add, add_ranks, own_row, sum_bytes};
use crate::layout::{
    Comm, FEW_RANKS, LowLatencyCombineArgs, NAN_BITS, PIECE_BYTES, SCALE_BLOCK, Wait, pieces_of, row_stride,
};
use crate::simt::*;

/// Scales of a piece: a lane loads one.
const PIECE_SCALES: u32 = PIECE_BYTES / SCALE_BLOCK;

/// The ranks that a token went to; none where there is no such token.
///
/// # Safety
/// A dispatch that an earlier kernel has completed wrote the table.
#[device]
pub(super) unsafe fn ranks_of<R: Ranks>(args: &LowLatencyCombineArgs, token: u32) -> R {
    if token >= args.common.num_tokens {
        return R::NONE;
    }
    args.common.tables.token_ranks.array::<R>().ld(token)
}

/// The ranks that the first token went to of which the warp sums a row or a piece; none where not
/// `receives`. [`receive`] finds them in the warp's word of shared memory: registers are scarce.
#[device]
pub(super) unsafe fn first_ranks<R: Ranks>(args: &LowLatencyCombineArgs, receives: bool) -> R {
    let token = if in_packets(&args.common, args.common.num_tokens) {
        Piece::of(Piece::first_to_receive(), args.row_bytes, 1).token
    } else {
        ctaid()
    };
    ranks_of(args, if receives { token } else { u32::MAX })
}

/// Sums what has come back, a token to a block, while the last warp waits until all members have
/// entered the combine. Gives whether one has not and sums are to be spoiled. All threads of the
/// team call it.
#[device]
pub(super) unsafe fn receive<
    E: Element,
    R: Ranks,
    const FP8: bool,
    const SUMMED: bool,
    const BARRIER: u32,
>(
    args: &LowLatencyCombineArgs,
    team: Team<BARRIER>,
    shared: &NodeShared<R>,
    opened: Opened<R>,
) -> bool {
    let (common, comm) = (&args.common, &args.common.comm);
    let thread = team.thread();
    let mut failed = tid() / 32 == last_warp() && !have_all_entered(common, opened);
    let mut ranks = shared.ranks();
    if in_packets(common, common.num_tokens) {
        if !failed {
            receive_pieces::<E, R, FP8>(args, ranks, opened);
        }
        return failed;
    }
    let pool = R::pool(comm, comm.rank);
    let bytes = sum_bytes::<FP8>(args);
    let (mut token, stride) = (ctaid(), nctaid());
    // Rows that others of the block return meanwhile come one by one.
    let at_once = if SUMMED { 1 } else { ROWS_AT_ONCE };
    let mut vote = 0;
    let waits_for = |rank| opened.has_member(rank) & !(SUMMED & (rank == comm.rank));
    while token < common.num_tokens {
        // The block waits for the word of every member, also of one that the token did not go
        // to: its word is on its way as well. It waits for the words of several tokens at once,
        // which takes the time of one.
        let (rank, ahead) = (thread % R::ROOM, thread / R::ROOM);
        let of_lane = token + ahead * stride;
        if ahead < at_once && waits_for(rank) && of_lane < common.num_tokens {
            let chunk = of_lane / common.chunk_tokens;
            let word = pool + common.place.returned + chunk_offset(common, rank, chunk);
            failed |= !wait_returned::<R>(comm, word, rank, opened.epoch());
        }
        if team.any(failed, shared.of_source, vote) {
            spoil_rows::<FP8, BARRIER>(args, team, token);
            return false;
        }
        vote += 1;
        let end = (token + at_once * stride).min(common.num_tokens);
        while token < end {
            let to = args.combined_x.row(token, bytes);
            let next_ranks = ranks_of(args, token + stride);
            if FP8 {
                sum_quantised(args, token, ranks, to);
            } else if SUMMED {
                sum::<E, R, 4, SUMMED, BARRIER>(args, team, token, ranks, to);
            } else {
                sum::<E, R, 2, SUMMED, BARRIER>(args, team, token, ranks, to);
            }
            (token, ranks) = (token + stride, next_ranks);
        }
    }
    failed
}

/// Waits until a rank has returned a chunk, by the word at `word`; false when the wait expired.
///
/// # Safety
/// The word is in this rank's own pool.
#[device]
unsafe fn wait_returned<R: Ranks>(comm: &Comm, word: u64, rank: u32, epoch: u64) -> bool {
    let mut wait = PeerWait::new(comm, rank, epoch, Wait::LowLatencyReturned);
    loop {
        let seen = ld_acquire_sys_u64(word);
        if seen >= epoch {
            return true;
        }
        if wait.has_expired() {
            wait.what = late_with::<R>(comm, rank, epoch, wait.what);
            wait.record(epoch, seen);
            return false;
        }
    }
}

/// Sums the ranks' rows of a token. All threads of the team call it. `V`: vectors of a row
/// that a thread has in flight.
#[device]
unsafe fn sum<E: Element, R: Ranks, const V: usize, const SUMMED: bool, const BARRIER: u32>(
    args: &LowLatencyCombineArgs,
    team: Team<BARRIER>,
    token: u32,
    ranks: R,
    to: u64,
) {
    let (common, rank) = (&args.common, args.common.comm.rank);
    let (stride, max_tokens) = (row_stride(args.row_bytes as u64), common.max_tokens);
    let returned = R::pool(&common.comm, rank) + common.place.returned_x;
    let row = |from: u32| {
        let number = from * max_tokens + token;
        if SUMMED && from == rank {
            (args.x.0 + number as u64 * args.x_stride, 1.0)
        } else {
            (returned + number as u64 * stride, 1.0)
        }
    };
    stride!(at in team.thread() * 16..args.row_bytes, V as u32 * team.threads * 16 => {
        let (mut ats, mut sums) = ([0; V], [[0.0; 8]; V]);
        unroll!(4, J => { if J < V { ats[J] = at + J as u32 * team.threads * 16 } });
        let inside = ats.map(|at| inside(at, args.row_bytes));
        if V > 2 {
            add_ranks::<E, R, 2, V>(ranks, &inside, &mut sums, row);
        } else {
            add_ranks::<E, R, 4, V>(ranks, &inside, &mut sums, row);
        }
        unroll!(4, J => {
            if J < V && ats[J] < args.row_bytes {
                st_v4(to + ats[J] as u64, E::round(&sums[J]));
            }
        });
    });
}

/// The same of e4m3 rows, which have their scales behind them.
#[device]
unsafe fn sum_quantised<R: Ranks>(args: &LowLatencyCombineArgs, token: u32, ranks: R, to: u64) {
    let (common, stride) = (&args.common, row_stride(sum_bytes::<true>(args) as u64));
    let of_rank = common.max_tokens as u64 * stride;
    let pool = R::pool(&common.comm, common.comm.rank);
    let rows = DevicePtr(pool + common.place.returned_x).row(token, stride);
    stride!(at in tid() * 16..args.row_bytes, ntid() * 16 => {
        let mut sums = [[0.0; 8]; 2];
        if R::MANY {
            let scale_at = (args.row_bytes + at / SCALE_BLOCK * 4) as u64;
            add_quantised_of_many(ranks, rows, of_rank, (at as u64, scale_at), &mut sums);
        } else {
            let (mut vectors, mut scales) = ([[0; 4]; FEW_RANKS], [0.0; FEW_RANKS]);
            unroll!(8, RANK => {
                if ranks.has(RANK as u32) {
                    let row = rows + RANK as u64 * of_rank;
                    vectors[RANK] = ld_stream_v4(row + at as u64);
                    scales[RANK] = ld_f32(row + (args.row_bytes + at / SCALE_BLOCK * 4) as u64);
                }
            });
            unroll!(8, RANK => {
                // A missing row adds zeros.
                let [low, high] = from_e4m3(vectors[RANK]);
                add(&mut sums[0], low, scales[RANK]);
                add(&mut sums[1], high, scales[RANK]);
            });
        }
        let to = to + at as u64 * 2;
        st_v4(to, Bf16::round(&sums[0]));
        st_v4(to + 16, Bf16::round(&sums[1]));
    });
}

/// Ranks whose rows are in flight together.
const ROWS_IN_FLIGHT: usize = 4;

/// Adds the vectors of several ranks' e4m3 rows, in the order of the ranks. The ranks' rows lie
/// `of_rank` bytes apart from `rows` on. `at`: where the vector and its scale are in each.
#[device]
unsafe fn add_quantised_of_many<R: Ranks>(
    ranks: R,
    rows: u64,
    of_rank: u64,
    (at, scale_at): (u64, u64),
    sums: &mut Sixteen,
) {
    let mut left = ranks;
    while !left.is_empty() {
        let (mut vectors, mut scales) = ([[0; 4]; ROWS_IN_FLIGHT], [0.0; ROWS_IN_FLIGHT]);
        unroll!(4, J => {
            if !left.is_empty() {
                let row = rows + left.first() as u64 * of_rank;
                left = left.without_first();
                vectors[J] = ld_stream_v4(row + at);
                scales[J] = ld_f32(row + scale_at);
            }
        });
        unroll!(4, J => {
            // A missing row adds zeros.
            let [low, high] = from_e4m3(vectors[J]);
            add(&mut sums[0], low, scales[J]);
            add(&mut sums[1], high, scales[J]);
        });
    }
}

/// Sums what has come back as packets, a piece of a token to a warp. `first`: the ranks of its
/// first one.
///
/// # Safety
/// Packets are in this rank's own pool, and each has one writer.
#[device]
unsafe fn receive_pieces<E: Element, R: Ranks, const FP8: bool>(
    args: &LowLatencyCombineArgs,
    first: R,
    opened: Opened<R>,
) {
    let common = &args.common;
    let (mut number, mut ranks) = (Piece::first_to_receive(), first);
    while number < common.num_tokens * pieces_of(args.row_bytes) {
        let piece = Piece::of(number, args.row_bytes, 1);
        let to = args.combined_x.row(piece.token, sum_bytes::<FP8>(args));
        let is_done = if FP8 {
            sum_quantised_pieces(args, &piece, ranks, to, opened)
        } else {
            sum_pieces::<E, R, false>(args, &piece, ranks, to, opened)
        };
        if !is_done {
            return spoil_pieces::<FP8, 3>(args, number);
        }
        number += nctaid() * (ntid() / 32);
        ranks = ranks_of(args, Piece::of(number, args.row_bytes, 1).token);
    }
}

/// Records that the piece of rank `from` has not come, behind an expired wait of `waited` ns. It
/// also notes the ranks of `left` that are late. The whole warp calls it.
#[device]
unsafe fn record_late_piece<R: Ranks>(
    args: &LowLatencyCombineArgs,
    piece: &Piece,
    mut from: u32,
    mut left: R,
    waited: u64,
    epoch: u64,
) {
    let (common, comm) = (&args.common, &args.common.comm);
    let packets = R::pool(comm, comm.rank) + common.place.returned_packets;
    let mut is_first = true;
    loop {
        let seen = load_packets(packets + piece.offset(common, args.row_bytes, from));
        if (is_piece_late(seen, epoch as u32) || is_first) && laneid() == 0 {
            let what = late_with::<R>(comm, from, epoch, Wait::LowLatencyReturned);
            let mut wait = PeerWait::new(comm, from, epoch, what);
            wait.waited = waited;
            if is_first {
                wait.record(epoch, seen[0][3] as u64);
            } else {
                wait.note_late();
            }
        }
        if left.is_empty() {
            return;
        }
        (from, is_first) = (left.first(), false);
        left = left.without_first();
    }
}

/// Leaves NaN in the sums of this block, because a rank has not come.
#[device]
pub(super) unsafe fn spoil<const FP8: bool>(args: &LowLatencyCombineArgs) {
    if in_packets(&args.common, args.common.num_tokens) {
        spoil_pieces::<FP8, 3>(args, Piece::first_to_receive());
    } else {
        spoil_rows::<FP8, 0>(args, Team::block(), ctaid());
    }
}

/// The same in the block's tokens from `first` on, if it is to, and notes them. All threads of the
/// team call it.
///
/// # Safety
/// The sums have room for every token.
#[device]
pub(in super::super) unsafe fn spoil_rows<const FP8: bool, const BARRIER: u32>(
    args: &LowLatencyCombineArgs,
    team: Team<BARRIER>,
    first: u32,
) {
    let bytes = sum_bytes::<FP8>(args);
    stride!(token in first..args.common.num_tokens, nctaid() => {
        if team.thread() == 0 {
            note_missing_token(&args.common.comm, token);
        }
        let mut at = team.thread() * 16;
        while at < bytes && args.spoils != 0 {
            st_v4(args.combined_x.row(token, bytes) + at as u64, [NAN_BITS; 4]);
            at += team.threads * 16;
        }
    });
}

/// The same in the warp's pieces from the one of number `first` on. The whole warp calls it.
///
/// # Safety
/// The sums have room for every token.
#[device]
pub(super) unsafe fn spoil_pieces<const FP8: bool, const VECTORS: usize>(
    args: &LowLatencyCombineArgs,
    first: u32,
) {
    let pieces = args.common.num_tokens * PieceOf::<VECTORS>::count(args.row_bytes);
    stride!(number in first..pieces, nctaid() * (ntid() / 32) => {
        spoil_piece::<FP8, VECTORS>(args, &PieceOf::<VECTORS>::of(number, args.row_bytes, 1));
    });
}

/// The same in one piece.
///
/// # Safety
/// The sums have room for every token.
#[device]
pub(super) unsafe fn spoil_piece<const FP8: bool, const VECTORS: usize>(
    args: &LowLatencyCombineArgs,
    piece: &PieceOf<VECTORS>,
) {
    let bytes = sum_bytes::<FP8>(args);
    // Elements are twice as long as they travelled.
    let scale = if FP8 { 2 } else { 1 };
    if laneid() == 0 {
        note_missing_token(&args.common.comm, piece.token);
    }
    let row = args.combined_x.row(piece.token, bytes);
    let end = ((piece.index + 1) * PieceOf::<VECTORS>::BYTES * scale).min(bytes);
    let mut at = piece.index * PieceOf::<VECTORS>::BYTES * scale + laneid() * 16;
    while at < end && args.spoils != 0 {
        st_v4(row + at as u64, [NAN_BITS; 4]);
        at += 512;
    }
}

/// Sums the ranks' pieces of a row, and stores the sum in the row at `to`. False when a wait
/// expired: the same in all lanes. The whole warp calls it. `POOLED`: this rank's own row is in its
/// pool, where the experts left it, and no packet.
#[device]
pub(super) unsafe fn sum_pieces<E: Element, R: Ranks, const POOLED: bool>(
    args: &LowLatencyCombineArgs,
    piece: &Piece,
    ranks: R,
    to: u64,
    opened: Opened<R>,
) -> bool {
    let (common, comm) = (&args.common, &args.common.comm);
    let packets = R::pool(comm, comm.rank) + common.place.returned_packets;
    let (mut sums, mut left) = ([[0.0; 8]; 3], ranks);
    // In flight beside the packets; any numbers where the row did not stay here.
    let mut own = [[0; 4]; 3];
    if POOLED {
        let from = own_row(args, comm.rank, piece.token);
        unroll!(3, V => { own[V] = ld_stream_v4(from + inside(piece.at(V as u32), args.row_bytes) as u64) });
    }
    while !left.is_empty() {
        let from = left.first();
        left = left.without_first();
        if POOLED && from == comm.rank {
            unroll!(3, V => { add(&mut sums[V], E::numbers(own[V]), 1.0) });
            continue;
        }
        let at = packets + piece.offset(common, args.row_bytes, from);
        let seen = load_packets(at);
        let wait = PeerWait::new(comm, from, opened.epoch(), Wait::LowLatencyReturned);
        let vectors = match wait_piece(wait, at, seen) {
            Ok(vectors) => vectors,
            Err(waited) => {
                let left = if POOLED { left.without(R::only(comm.rank)) } else { left };
                record_late_piece(args, piece, from, left, waited, opened.epoch());
                return false;
            }
        };
        unroll!(3, V => { add(&mut sums[V], E::numbers(vectors[V]), 1.0) });
    }
    unroll!(3, V => {
        let at = piece.at(V as u32);
        if at < args.row_bytes {
            st_v4(to + at as u64, E::round(&sums[V]));
        }
    });
    true
}

/// The same of e4m3 rows, whose scales come as packets of their own.
#[device]
unsafe fn sum_quantised_pieces<R: Ranks>(
    args: &LowLatencyCombineArgs,
    piece: &Piece,
    ranks: R,
    to: u64,
    opened: Opened<R>,
) -> bool {
    let (common, comm) = (&args.common, &args.common.comm);
    let pool = R::pool(comm, comm.rank);
    let (mut sums, mut left) = ([[[0.0; 8]; 2]; 3], ranks);
    while !left.is_empty() {
        let from = left.first();
        left = left.without_first();
        // All first loads are in flight together.
        let at = pool + common.place.returned_packets + piece.offset(common, args.row_bytes, from);
        let seen = load_packets(at);
        let index = piece.index * PIECE_SCALES + laneid();
        let is_there = laneid() < PIECE_SCALES && index * SCALE_BLOCK < args.row_bytes;
        let of_scale = pool
            + common.place.returned_scales
            + scale_offset(common, args.row_bytes, from, piece.token, index);
        let mut scale = if is_there { ld_relaxed_sys_u64(of_scale) } else { 0 };
        let wait = PeerWait::new(comm, from, opened.epoch(), Wait::LowLatencyReturned);
        let vectors = match wait_piece(wait, at, seen) {
            Ok(vectors) => vectors,
            Err(waited) => {
                record_late_piece(args, piece, from, left, waited, opened.epoch());
                return false;
            }
        };
        let mut is_missing = false;
        if is_there {
            let epoch = opened.epoch();
            let packet = packet_seen(comm, of_scale, scale, from, epoch, Wait::LowLatencyReturned);
            (scale, is_missing) = (packet.unwrap_or(0) as u64, packet.is_none());
        }
        if ballot(is_missing) != 0 {
            return false;
        }
        unroll!(3, V => {
            let block = V as u32 * (PIECE_SCALES / 3) + laneid() / LANES_PER_SCALE;
            let scale = f32::from_bits(shfl_u32(scale as u32, block));
            let [low, high] = from_e4m3(vectors[V]);
            add(&mut sums[V][0], low, scale);
            add(&mut sums[V][1], high, scale);
        });
    }
    unroll!(3, V => {
        let at = piece.at(V as u32);
        if at < args.row_bytes {
            let to = to + at as u64 * 2;
            st_v4(to, Bf16::round(&sums[V][0]));
            st_v4(to + 16, Bf16::round(&sums[V][1]));
        }
    });
    true
}
