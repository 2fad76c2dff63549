//! Low-latency combine: what the experts of a rank made of a token goes back as one row, and the
//! token's owner sums those of all ranks.
//!
//! Soundness: a returned row has one writer, one block of one rank. The owner reads the row behind
//! that rank's word for the row's chunk. The block that returned the chunk's last row releases the
//! word, and has acquired the stores of the chunk's other blocks. A barrier stands between the
//! thread that acquires and the threads that read. A row that returns as packets has one warp for
//! each piece. A packet, of a piece or of a scale, is read together with its epoch: all of it or
//! nothing. Each sum has one block, or one warp for each piece. Collectives stand where all lanes
//! of a warp arrive.

use super::super::combine::{Bf16, F16, F32};
use super::super::epoch::{Phase, trace};
use super::super::progress::Progress;
use super::element::Element;
use super::ranks::{Few, Many, Ranks};
use super::team::Team;
use super::{
    Opening, Piece, add_share, begin, fence_call, let_next_launch, note_answer, publishes_call, store_call,
};
use crate::layout::{FEW_RANKS, LowLatencyArgs, LowLatencyCombineArgs, Quantise, SCALE_BLOCK, phase};
use crate::simt::*;

mod pooled;
mod receive;
mod send;

#[cfg(not(target_arch = "nvptx64"))]
pub use self::pooled::{LowLatencyCombineManyPooled, LowLatencyCombinePooled, LowLatencyCombineTwoPooled};
pub(super) use self::receive::spoil_rows;
use self::receive::{first_ranks, receive, spoil};
use self::send::{ReturnCounts, publish_rows, return_pieces, send};
pub(super) use self::send::{RowAhead, return_row};

few_and_many! {
    kernel(threads = 512, barriers = 4, registers = 128, dependent, block = 512);
    few(shared = super::LOW_LATENCY_SHARED_BYTES) many(shared = super::LOW_LATENCY_MANY_SHARED_BYTES);
    requires(..LowLatencyArgs(args.common), args.quantise == Quantise::None as u32);
    ranks(args.common.comm);
    fn(args: LowLatencyCombineArgs);

    /// Returns BF16 rows, or waits for them and sums, or both.
    low_latency_combine_bf16, low_latency_combine_many_bf16<R> { combine::<Bf16, R, false, false>(&args) }

    /// Returns F16 rows, otherwise as [`LowLatencyCombineBf16`]; a sum that is too large for F16 is
    /// infinite.
    low_latency_combine_f16, low_latency_combine_many_f16<R> { combine::<F16, R, false, false>(&args) }

    /// Returns FP32 rows, otherwise as [`LowLatencyCombineBf16`].
    low_latency_combine_f32, low_latency_combine_many_f32<R> { combine::<F32, R, false, false>(&args) }
}

few_and_many! {
    kernel(threads = 512, barriers = 4, registers = 128, dependent, block = 512);
    few(shared = super::LOW_LATENCY_SHARED_BYTES) many(shared = super::LOW_LATENCY_MANY_SHARED_BYTES);
    requires(
        ..LowLatencyArgs(args.common),
        args.row_bytes.is_multiple_of(SCALE_BLOCK),
        args.quantise != Quantise::None as u32
    );
    ranks(args.common.comm);
    fn(args: LowLatencyCombineArgs);

    /// Returns rows as e4m3 with scales, otherwise as [`LowLatencyCombineBf16`].
    low_latency_combine_fp8, low_latency_combine_many_fp8<R> { combine::<Bf16, R, true, false>(&args) }
}

few_and_many! {
    kernel(
        threads = 512, barriers = 3, registers = 128, dependent,
        block = (RETURNING_WARPS + 1 + SUMMING_WARPS) * 32
    );
    few(shared = super::LOW_LATENCY_SHARED_BYTES) many(shared = super::LOW_LATENCY_MANY_SHARED_BYTES);
    requires(
        ..LowLatencyArgs(args.common),
        args.common.num_tokens > args.common.packet_tokens,
        args.common.phases == phase::SEND | phase::RECEIVE,
        args.quantise == Quantise::None as u32,
        args.by_expert == 0
    );
    ranks(args.common.comm);
    fn(args: LowLatencyCombineArgs);

    /// The same as [`LowLatencyCombineBf16`] of rows that are summed over experts already, both halves
    /// in one. Some warps return the rows of other ranks while the others sum, which pays where blocks
    /// have several tokens. This rank's own rows are summed from where the experts left them.
    low_latency_combine_summed, low_latency_combine_many_summed<R> {
        combine::<Bf16, R, false, true>(&args)
    }
}

/// `E`: the type of the experts' rows and of the sums. `FP8`: whether rows, of BF16, return as e4m3.
/// `SUMMED`: whether they are summed over experts already, and warps return rows while others sum.
#[device]
unsafe fn combine<E: Element, R: Ranks, const FP8: bool, const SUMMED: bool>(args: &LowLatencyCombineArgs) {
    let comm = &args.common.comm;
    let shared = R::shared();
    let sends = args.common.phases & phase::SEND != 0;
    trace(comm, Phase::Enter);
    let receives = args.common.phases & phase::RECEIVE != 0;
    let publishes = publishes_call(&args.common);
    fence_call(publishes);
    let opening = Opening::<R>::load::<true>(&args.common, tid() == 0);
    let first = RowAhead::of::<SUMMED>(args, ctaid(), sends);
    let first_piece = RowAhead::of_piece(args, Piece::first_to_send(), sends);
    let most = if sends { ReturnCounts::of::<R>(args) } else { ReturnCounts { words: 0, packets: 0 } };
    let ranks: R = first_ranks(args, receives);
    if tid() == 0 {
        shared.set_call_targets(opening.call_targets::<true>(&args.common));
    }
    if laneid() == 0 {
        shared.set_ranks(ranks);
    }
    let mut progress = None;
    if SUMMED {
        // Its words are those of `shared.tokens`, which a combine has no other use for.
        progress = Some(Progress::new(0, RETURNING_WARPS));
        if tid() < 2 {
            shared.of_source.st(tid(), 0);
        }
    }
    let opened = begin::<R, true>(&args.common, &opening, shared.opened);
    if publishes {
        store_call(&args.common, &shared, opened.epoch());
    }
    if sends && opened.takes_part() {
        if ctaid() == 0 && tid() == 0 {
            note_answer(&args.common, &opening);
        }
        return_pieces::<E, R, FP8>(args, most.packets, first_piece, opened.epoch());
        match &progress {
            None => send::<E, R, FP8, SUMMED, 0>(args, Team::block(), &opened, most.words, first, None),
            Some(progress) => {
                if RETURNING.has_this_warp() {
                    let progress = Some(progress);
                    send::<E, R, FP8, SUMMED, 1>(args, RETURNING, &opened, most.words, first, progress);
                } else if tid() / 32 == RETURNING_WARPS {
                    publish_rows(args, &opened, most.words, progress);
                }
            }
        }
        trace(comm, Phase::Moved);
    }
    let_next_launch(&args.common);
    if receives {
        // The operation must not end before all members have entered it: the place's next
        // dispatch overwrites what they read before that. Sums need not wait for it.
        let mut is_given_up = !opened.takes_part();
        if !is_given_up && !SUMMED {
            is_given_up = receive::<E, R, FP8, false, 0>(args, Team::block(), &shared, opened);
        } else if !is_given_up && SUMMING.has_this_warp() {
            is_given_up = receive::<E, R, FP8, true, 2>(args, SUMMING, &shared, opened);
        }
        if barrier_any(is_given_up) {
            spoil::<FP8>(args);
        }
        add_share(comm);
    }
}

/// Warps of a block that return rows while others sum. The one behind them publishes that the rows
/// are there.
const RETURNING_WARPS: u32 = 7;
/// Warps of a block that sum meanwhile: all others.
const SUMMING_WARPS: u32 = 8;
const RETURNING: Team<1> = Team { first: 0, threads: RETURNING_WARPS * 32 };
const SUMMING: Team<2> = Team { first: (RETURNING_WARPS + 1) * 32, threads: SUMMING_WARPS * 32 };

/// Bytes of a row as experts made it and as it is summed.
#[device]
pub(super) fn sum_bytes<const FP8: bool>(args: &LowLatencyCombineArgs) -> u32 {
    if FP8 { args.row_bytes * 2 } else { args.row_bytes }
}

/// Where this rank's experts left their row for token `token` of rank `source`, which its owner
/// gathers.
#[device]
unsafe fn own_row(args: &LowLatencyCombineArgs, source: u32, token: u32) -> u64 {
    args.x.row(source * args.common.max_tokens + token, args.x_stride)
}

/// Adds to `sums` the vectors at the bytes `at` of the rows of several ranks, in the order of the
/// ranks, as [`add_rows`] does.
#[device]
unsafe fn add_ranks<E: Element, R: Ranks, const MOST: usize, const V: usize>(
    ranks: R,
    at: &[u32; V],
    sums: &mut [[f32; 8]; V],
    row: impl Fn(u32) -> (u64, f32),
) {
    let (low, high) = ranks.halves();
    if R::MANY {
        add_rows::<E, MOST, V>(low, at, sums, &row);
        add_rows::<E, MOST, V>(high, at, sums, |rank| row(rank + 32));
    } else {
        add_rows::<E, MOST, V>(low, at, sums, row);
    }
}

/// Adds to `sums` the vectors at the bytes `at` of several rows: those whose numbers are the bits
/// `left`, in their order, up to `MOST` of them at a time. `row` gives a row's address and its
/// weight.
#[device]
pub(super) unsafe fn add_rows<E: Element, const MOST: usize, const V: usize>(
    mut left: u32,
    at: &[u32; V],
    sums: &mut [[f32; 8]; V],
    row: impl Fn(u32) -> (u64, f32),
) {
    while MOST >= 4 && left.count_ones() >= 4 {
        add_some::<E, 4, V>(&mut left, at, sums, &row);
    }
    while MOST >= 3 && left.count_ones() >= 3 {
        add_some::<E, 3, V>(&mut left, at, sums, &row);
    }
    while left.count_ones() >= 2 {
        add_some::<E, 2, V>(&mut left, at, sums, &row);
    }
    if left != 0 {
        add_some::<E, 1, V>(&mut left, at, sums, &row);
    }
}

/// The same of the first `N` of the rows `left`, which it takes out. There are as many.
///
/// The loads have no condition, so that they are in flight together. ptxas gives loads under a
/// condition the same registers and moves each value on, so that each load waits for the one
/// before.
#[device]
unsafe fn add_some<E: Element, const N: usize, const V: usize>(
    left: &mut u32,
    at: &[u32; V],
    sums: &mut [[f32; 8]; V],
    row: &impl Fn(u32) -> (u64, f32),
) {
    let (mut vectors, mut weights) = ([[[0; 4]; V]; N], [0.0; N]);
    few!(4, of in 0..N => {
        let (from, weight) = row(left.trailing_zeros() & 31);
        *left &= left.wrapping_sub(1);
        weights[of] = weight;
        few!(4, vector in 0..V => {
            vectors[of][vector] = ld_stream_v4(from + at[vector] as u64);
        });
    });
    few!(4, of in 0..N => {
        few!(4, vector in 0..V => {
            add(&mut sums[vector], E::numbers(vectors[of][vector]), weights[of]);
        });
    });
}

/// Adds eight numbers, `weight` times.
#[device]
pub(super) fn add(sum: &mut [f32; 8], numbers: [f32; 8], weight: f32) {
    unroll!(8, J => { sum[J] += numbers[J] * weight });
}

/// Offset of the packet of a scale, in bytes from the start of an array
/// `[num_ranks * packet_tokens, row_bytes / 128 rounded up]`.
#[device]
fn scale_offset(args: &LowLatencyArgs, row_bytes: u32, rank: u32, token: u32, index: u32) -> u64 {
    let of_row = row_bytes.div_ceil(SCALE_BLOCK);
    ((rank * args.packet_tokens + token) * of_row + index) as u64 * 8
}
