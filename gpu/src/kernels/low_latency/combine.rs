//! Low-latency combine: what the experts of a rank made of a token goes back as one row, and the token's owner sums those of all ranks.
//!
//! What makes it sound: a returned row has one block of one rank that writes it, and its owner reads it behind that rank's word for its
//! chunk, released by the block that returned the chunk's last row, which has acquired what the others did. Threads meet at a barrier between
//! the one that acquires and those that read. Sums have one block each; collectives stand where all lanes of a warp arrive.

use core::mem::offset_of;

use epoxide_macros::kernel;

use super::super::epoch::{Phase, pool_of, trace, wait_at_least};
use super::{
    Begun, Shared, begin, chunk_offset, completes, finish, ids_offset, tell_call, tokens_in_chunk, wait_calls,
};
use crate::layout::{LowLatencyCombineArgs, LowLatencyTurns, MAX_RANKS, MAX_TOPK, Wait, phase, row_stride};
use crate::simt::*;

/// Elements of 16 bytes.
const ELEMENTS: usize = 8;
/// Bytes that a warp adds at a time.
const WARP_BYTES: u32 = 512;

/// Returns rows, or waits for them and sums, or both.
#[kernel(
    threads = 512, min_blocks = 1, barriers = 5, registers = 128,
    requires(
        args.common.comm.num_ranks >= 1,
        args.common.comm.num_ranks <= MAX_RANKS as u32,
        args.common.num_topk >= 1,
        args.common.num_topk <= MAX_TOPK,
        args.common.local_experts >= 1,
        args.common.chunk_tokens >= 1,
        args.common.num_tokens <= args.common.max_tokens,
        args.row_bytes.is_multiple_of(16),
        args.x_stride.is_multiple_of(16),
    )
)]
pub unsafe fn low_latency_combine(args: LowLatencyCombineArgs) {
    let comm = &args.common.comm;
    let shared = Shared::lay_out();
    let begun = begin(&args.common, &shared);
    if args.common.phases & phase::SEND != 0 && begun.takes_part {
        send(&args, &begun);
        trace(comm, Phase::Moved);
    }
    if args.common.phases & phase::RECEIVE != 0 {
        if wait_calls(&args.common, &shared, begun.epoch) {
            receive(&args, &shared, begun.epoch);
        }
        finish(comm);
    }
}

/// Returns what this rank has of the tokens that it received, a row to a block: all sources' first tokens first, since their owners wait
/// for them in that order.
#[inline(always)]
unsafe fn send(args: &LowLatencyCombineArgs, begun: &Begun) {
    // SAFETY: passed on to the kernel's caller; the head of the file says the rest.
    unsafe {
        let (common, comm, epoch) = (&args.common, &args.common.comm, begun.epoch);
        let (warp, lane) = (tid() / 32, laneid());
        tell_call(comm, epoch);
        if ctaid() == 0 && tid() == 0 {
            let answered = common.tables.turns.0 + offset_of!(LowLatencyTurns, answered) as u64;
            st_u64(answered, begun.dispatches);
        }
        let mut most = 0;
        let of_source = |source: u32| ld_u32(common.tables.num_tokens.0 + source as u64 * 4);
        unroll8!(SOURCE => { most = of_source(SOURCE as u32).max(most) });
        let mut index = ctaid();
        while index < most * comm.num_ranks {
            let (token, source) = (index / comm.num_ranks, index % comm.num_ranks);
            let tokens = of_source(source);
            index += nctaid();
            if token >= tokens {
                continue;
            }
            return_row(args, source, token);
            barrier_sync();
            if warp == 0 {
                let chunk = token / common.chunk_tokens;
                let parts = tokens_in_chunk(common, tokens, chunk);
                let word = common.tables.answered.0 + chunk_offset(common, source, chunk);
                if completes(word, token - chunk * common.chunk_tokens, parts) && lane == 0 {
                    let word = pool_of(comm, source) + common.place.returned;
                    st_release_sys_u64(word + chunk_offset(common, comm.rank, chunk), epoch);
                }
            }
        }
    }
}

/// Writes this rank's share of a token of `source` into that one's pool, if it has one. All threads of the block call it.
#[inline(always)]
unsafe fn return_row(args: &LowLatencyCombineArgs, source: u32, token: u32) {
    // SAFETY: passed on to the caller. Packets and weights came with a dispatch that an earlier kernel has completed.
    unsafe {
        let (common, comm) = (&args.common, &args.common.comm);
        let lane = laneid();
        let row = source * common.max_tokens + token;
        let entry = (row * common.num_topk + lane) as u64;
        let pool = pool_of(comm, comm.rank);
        let (mut local, mut slot, mut weight) = (0xffff, 0, 0.0);
        if lane < common.num_topk {
            let pair = ld_u32(pool + common.place.ids + ids_offset(common, row) + (lane / 2) as u64 * 8);
            local = pair >> (lane % 2 * 16) & 0xffff;
        }
        if local != 0xffff {
            slot = ld_u32(common.tables.slots.0 + entry * 4);
            weight = ld_f32(pool + common.place.weights + entry * 4);
        }
        let entries = ballot(local != 0xffff);
        if entries == 0 {
            return;
        }
        let to = pool_of(comm, source)
            + common.place.returned_x
            + (comm.rank * common.max_tokens + token) as u64 * row_stride(args.row_bytes as u64);
        if args.by_expert == 0 {
            let from = args.x.0 + row as u64 * args.x_stride;
            let mut at = tid() * 16;
            while at < args.row_bytes {
                st_v4(to + at as u64, ld_stream_v4(from + at as u64));
                at += ntid() * 16;
            }
            return;
        }
        // Whole warps go on together, since lanes ask each other.
        let mut turn = tid() / 32;
        while turn * WARP_BYTES < args.row_bytes {
            let at = turn * WARP_BYTES + lane * 16;
            let mut sum = [0.0; ELEMENTS];
            let mut left = entries;
            while left != 0 {
                // Four rows at a time, so that their loads are in flight together.
                let (mut vectors, mut weights) = ([[0; 4]; 4], [0.0; 4]);
                unroll4!(J => {
                    let is_there = left != 0;
                    let entry = left.trailing_zeros() & 31;
                    left &= left.wrapping_sub(1);
                    let slot = shfl_u32(slot, entry);
                    let weight = f32::from_bits(shfl_u32(weight.to_bits(), entry));
                    weights[J] = if is_there { weight } else { 0.0 };
                    let from = args.x.0 + slot as u64 * args.x_stride + at as u64;
                    vectors[J] = ld_stream_v4_if(is_there & (at < args.row_bytes), from);
                });
                // What is not there adds zeros.
                unroll4!(J => { add(&mut sum, vectors[J], weights[J]) });
            }
            if at < args.row_bytes {
                st_v4(to + at as u64, round(&sum));
            }
            turn += ntid() / 32;
        }
    }
}

/// Sums what has come back, a token to a block.
#[inline(always)]
unsafe fn receive(args: &LowLatencyCombineArgs, shared: &Shared, epoch: u64) {
    // SAFETY: passed on to the kernel's caller; the head of the file says the rest.
    unsafe {
        let (common, comm) = (&args.common, &args.common.comm);
        let thread = tid();
        let pool = pool_of(comm, comm.rank);
        let mut token = ctaid();
        while token < common.num_tokens {
            let mask = ld_u32(common.tables.token_ranks.0 + token as u64 * 4);
            // Of every rank, also of one that the token did not go to: the word also says that the rank has read what this one wrote there.
            if thread < comm.num_ranks {
                let chunk = token / common.chunk_tokens;
                let word = pool + common.place.returned + chunk_offset(common, thread, chunk);
                if !wait_at_least(comm, word, epoch, thread, epoch, Wait::LowLatencyReturned) {
                    st_shared_u32(shared.expired, 1);
                }
            }
            barrier_sync();
            if ld_shared_u32(shared.expired) != 0 {
                return;
            }
            let stride = row_stride(args.row_bytes as u64);
            let rows = pool + common.place.returned_x + token as u64 * stride;
            let to = args.combined_x.0 + token as u64 * args.row_bytes as u64;
            let mut at = thread * 16;
            while at < args.row_bytes {
                let mut vectors = [[0; 4]; MAX_RANKS];
                unroll8!(RANK => {
                    let row = rows + RANK as u64 * common.max_tokens as u64 * stride;
                    vectors[RANK] = ld_stream_v4_if(mask >> RANK & 1 != 0, row + at as u64);
                });
                let mut sum = [0.0; ELEMENTS];
                // What is not there adds zeros.
                unroll8!(RANK => { add(&mut sum, vectors[RANK], 1.0) });
                st_v4(to + at as u64, round(&sum));
                at += ntid() * 16;
            }
            token += nctaid();
        }
    }
}

/// Adds eight BF16 numbers, `weight` times.
#[inline(always)]
fn add(sum: &mut [f32; ELEMENTS], vector: [u32; 4], weight: f32) {
    unroll4!(J => {
        sum[2 * J] += bf16x2_lo(vector[J]) * weight;
        sum[2 * J + 1] += bf16x2_hi(vector[J]) * weight;
    });
}

/// Eight sums as BF16.
#[inline(always)]
fn round(sum: &[f32; ELEMENTS]) -> [u32; 4] {
    let mut vector = [0; 4];
    unroll4!(J => { vector[J] = pack_bf16x2(sum[2 * J], sum[2 * J + 1]) });
    vector
}
