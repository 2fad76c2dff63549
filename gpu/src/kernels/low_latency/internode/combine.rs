//! Low-latency combine across nodes: the experts' results for another rank's tokens return in one
//! message, in the order in which the rows came.
//!
//! Soundness: a returned row has one writer, one block of one rank. The block that wrote the
//! message's last row releases the message's packet, and has acquired the stores of the message's
//! other blocks. The owner reads the row behind that packet. Each sum has one block. A barrier
//! stands between the writers and the readers of each word of shared memory. Collectives stand
//! where all lanes of a warp arrive.

use super::super::super::combine::{Bf16, F16, F32, Summand};
use super::super::super::epoch::{Phase, trace};
use super::super::super::fp8::from_e4m3;
use super::super::combine::{RowAhead, add, return_row, spoil_rows, sum_bytes};
use super::super::element::Element;
use super::super::ranks::Few;
use super::super::team::Team;
use super::super::{Opened, Opening, ROWS_AT_ONCE, begin, completes, finish, note_answer};
use super::{Kind, MEMBERS, MemberShared, Route, deliver, wait_messages};
use crate::layout::{
    LowLatencyArgs, LowLatencyCombineArgs, LowLatencyInternodeCombineArgs, MAX_MEMBERS, Quantise,
    SCALE_BLOCK, answer_slot_bytes, phase,
};
use crate::simt::*;

kernels! {
    kernel(
        threads = 512, barriers = 6, registers = 128,
        block = 512, shared = super::LOW_LATENCY_INTERNODE_SHARED_BYTES,
        requires(
            ..LowLatencyArgs(args.combine.common),
            ..LowLatencyCombineArgs(args.combine),
            args.combine.common.comm.num_ranks <= MAX_MEMBERS as u32,
            args.combine.quantise == Quantise::None as u32,
        )
    );
    fn(args: LowLatencyInternodeCombineArgs);

    /// Returns BF16 rows, or waits for them and sums, or both.
    low_latency_internode_combine_bf16 { combine::<Bf16, false>(&args) }

    /// Returns F16 rows, otherwise as [`LowLatencyInternodeCombineBf16`]; a sum that is too large for
    /// F16 is infinite.
    low_latency_internode_combine_f16 { combine::<F16, false>(&args) }

    /// Returns FP32 rows, otherwise as [`LowLatencyInternodeCombineBf16`].
    low_latency_internode_combine_f32 { combine::<F32, false>(&args) }
}

/// Returns rows as e4m3 with scales, otherwise as [`LowLatencyInternodeCombineBf16`].
#[kernel(
    threads = 512, barriers = 6, registers = 128,
    block = 512, shared = super::LOW_LATENCY_INTERNODE_SHARED_BYTES,
    requires(
        ..LowLatencyArgs(args.combine.common),
        ..LowLatencyCombineArgs(args.combine),
        args.combine.common.comm.num_ranks <= MAX_MEMBERS as u32,
        args.combine.row_bytes.is_multiple_of(SCALE_BLOCK),
        args.combine.quantise != Quantise::None as u32,
    )
)]
pub unsafe fn low_latency_internode_combine_fp8(args: LowLatencyInternodeCombineArgs) {
    combine::<Bf16, true>(&args);
}

/// `E`: the type of the experts' rows and of the sums. `FP8`: whether rows, of BF16, return as e4m3.
#[device]
unsafe fn combine<E: Element, const FP8: bool>(args: &LowLatencyInternodeCombineArgs) {
    let (common, thread) = (&args.combine.common, tid());
    let shared = MemberShared::dynamic();
    trace(&common.comm, Phase::Enter);
    let opening = Opening::<Few>::load::<true>(common, thread == 0);
    if thread < MEMBERS {
        // The slots of the dispatch that is answered, which an earlier kernel has completed.
        // They are read behind the barrier of `begin`.
        shared.slots().st(thread, args.messages.num_slots.array::<u32>().ld(thread));
    }
    let opened = begin::<Few, true>(common, &opening, shared.opened());
    if common.phases & phase::SEND != 0 && opened.takes_part() {
        if ctaid() == 0 && thread == 0 {
            note_answer(common, &opening);
        }
        send::<E, FP8>(args, &shared, &opened);
        trace(&common.comm, Phase::Moved);
    }
    if common.phases & phase::RECEIVE != 0 {
        if wait_messages::<false>(common, &args.messages, &shared, &opened) {
            receive::<E, FP8>(args, &shared);
        } else {
            spoil_rows::<FP8, 0>(&args.combine, Team::block(), ctaid());
        }
        finish(&common.comm);
    }
}

/// Bytes from one returned row to the next.
#[device]
fn stride<const FP8: bool>(args: &LowLatencyInternodeCombineArgs) -> u64 {
    let bytes = args.combine.row_bytes;
    answer_slot_bytes(bytes, if FP8 { bytes / SCALE_BLOCK } else { 0 }) as u64
}

/// Returns this rank's results for the tokens that it received, a row to a block, all sources'
/// first rows first.
#[device]
unsafe fn send<E: Element, const FP8: bool>(
    args: &LowLatencyInternodeCombineArgs,
    shared: &MemberShared,
    opened: &Opened<Few>,
) {
    let (common, messages) = (&args.combine.common, &args.messages);
    let (num_ranks, warp, lane) = (common.comm.num_ranks, tid() / 32, laneid());
    core::hint::assert_unchecked(num_ranks >= 1);
    let mut most = 0;
    unroll!(8, J => {
        let [a, b, c, d] = messages.num_slots.array::<u32>().ld_v4(J as u32 * 4);
        most = a.max(b).max(c.max(d)).max(most);
    });
    // A source without rows is answered by no other block.
    if ctaid() == nctaid() - 1 && opened.has_member(tid()) && shared.slots().ld(tid()) == 0 {
        deliver(common, Route::to(messages, tid()), tid(), Kind::Answer, 0, opened.epoch());
    }
    let (rows, mut turn) = (most * num_ranks, 0);
    stride!(number in ctaid()..rows, nctaid() => {
        let (index, source) = (number / num_ranks, number % num_ranks);
        if index < shared.slots().ld(source) {
            let first = source * common.max_tokens;
            let token = messages.slot_tokens.array::<u32>().ld(first + index);
            let ahead = RowAhead::of_row(&args.combine, source, token, true);
            let to = Route::to(messages, source).written(Kind::Answer);
            return_row::<E, FP8, 0>(
                &args.combine,
                Team::block(),
                first + token,
                ahead,
                DevicePtr(to).row(index, stride::<FP8>(args)),
            );
        }
        let unsaid = turn % ROWS_AT_ONCE + 1;
        if unsaid == ROWS_AT_ONCE || number + nctaid() >= rows {
            barrier_sync();
            if warp == 0 && lane < unsaid {
                say_returned::<FP8>(args, shared, number - lane * nctaid(), opened.epoch());
            }
        }
        turn += 1;
    });
}

/// Adds the row of number `number`, if there is one, to those that have returned to its source.
/// After the last one it sends the message.
#[device]
unsafe fn say_returned<const FP8: bool>(
    args: &LowLatencyInternodeCombineArgs,
    shared: &MemberShared,
    number: u32,
    epoch: u64,
) {
    let common = &args.combine.common;
    let (index, source) = (number / common.comm.num_ranks, number % common.comm.num_ranks);
    let slots = shared.slots().ld(source);
    if index < slots && completes(args.messages.returned.array::<u64>().at(source), index, slots) {
        let bytes = slots as u64 * stride::<FP8>(args);
        deliver(common, Route::to(&args.messages, source), source, Kind::Answer, bytes, epoch);
    }
}

/// Sums what has come back, a token to a block.
#[device]
unsafe fn receive<E: Element, const FP8: bool>(args: &LowLatencyInternodeCombineArgs, shared: &MemberShared) {
    let (common, messages, thread) = (&args.combine.common, &args.messages, tid());
    let bytes = sum_bytes::<FP8>(&args.combine);
    stride!(token in ctaid()..common.num_tokens, nctaid() => {
        if thread < common.comm.num_ranks {
            let position = messages.positions.array::<u32>().ld(token * MEMBERS + thread);
            let message = Route::to(messages, thread).arrives(Kind::Answer);
            shared.set_address(thread, DevicePtr(message).row(position, stride::<FP8>(args)));
        }
        barrier_sync();
        let mask = common.tables.token_ranks.array::<u32>().ld(token);
        let to = args.combine.combined_x.row(token, bytes);
        if FP8 {
            sum_quantised(args, shared, mask, to);
        } else {
            sum::<E>(args, shared, mask, to);
        }
        // The addresses are the next token's.
        barrier_sync();
    });
}

/// The address of the first row of the ranks `left`, which is taken from them; whether there was
/// one.
///
/// # Safety
/// The word is the block's; barriers are the caller's.
#[device]
unsafe fn next_row(shared: &MemberShared, left: &mut u32) -> (bool, u64) {
    let is_there = *left != 0;
    let rank = left.trailing_zeros() & 31;
    *left &= left.wrapping_sub(1);
    (is_there, shared.address(rank))
}

/// Sums rows of the ranks of `mask`, in their order. All threads of the block call it.
#[device]
unsafe fn sum<E: Element>(args: &LowLatencyInternodeCombineArgs, shared: &MemberShared, mask: u32, to: u64) {
    let mut at = tid() * 16;
    while at < args.combine.row_bytes {
        let next = at + ntid() * 16;
        let (mut sums, mut left) = ([[0.0; 8]; 2], mask);
        while left != 0 {
            // Four at a time, so that their loads are in flight together.
            let (mut vectors, mut vectors_next) = ([[0; 4]; 4], [[0; 4]; 4]);
            unroll!(4, J => {
                let (is_there, row) = next_row(shared, &mut left);
                vectors[J] = ld_stream_v4_if(is_there, row + at as u64);
                let has_next = is_there & (next < args.combine.row_bytes);
                vectors_next[J] = ld_stream_v4_if(has_next, row + next as u64);
            });
            // A missing row adds zeros.
            unroll!(4, J => { add(&mut sums[0], E::numbers(vectors[J]), 1.0) });
            unroll!(4, J => { add(&mut sums[1], E::numbers(vectors_next[J]), 1.0) });
        }
        st_v4(to + at as u64, E::round(&sums[0]));
        if next < args.combine.row_bytes {
            st_v4(to + next as u64, E::round(&sums[1]));
        }
        at = next + ntid() * 16;
    }
}

/// The same of e4m3 rows, which have their scales behind them.
#[device]
unsafe fn sum_quantised(args: &LowLatencyInternodeCombineArgs, shared: &MemberShared, mask: u32, to: u64) {
    let row_bytes = args.combine.row_bytes;
    stride!(at in tid() * 16..row_bytes, ntid() * 16 => {
        let (mut sums, mut left) = ([[0.0; 8]; 2], mask);
        while left != 0 {
            let (mut vectors, mut scales) = ([[0; 4]; 4], [0.0; 4]);
            unroll!(4, J => {
                let (is_there, row) = next_row(shared, &mut left);
                vectors[J] = ld_stream_v4_if(is_there, row + at as u64);
                scales[J] = ld_f32_if(is_there, row + (row_bytes + at / SCALE_BLOCK * 4) as u64);
            });
            unroll!(4, J => {
                // A missing row adds zeros.
                let [low, high] = from_e4m3(vectors[J]);
                add(&mut sums[0], low, scales[J]);
                add(&mut sums[1], high, scales[J]);
            });
        }
        let to = to + at as u64 * 2;
        st_v4(to, Bf16::round(&sums[0]));
        st_v4(to + 16, Bf16::round(&sums[1]));
    });
}
