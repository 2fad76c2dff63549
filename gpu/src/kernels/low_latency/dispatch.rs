//! Low-latency dispatch: every token's row goes to each rank that has one of its experts, once, at its final place.
//!
//! What makes it sound: a row, its weights and its packets have one block of one rank that writes them, and nobody reads them before that
//! rank's word for their chunk, or, of a packet, before its epoch. A chunk's word is released by the block that sent the chunk's last token,
//! which has acquired what the others did. An expert's tables have one block. The threads of a block meet at a barrier between the writers
//! and readers of each word of shared memory; collectives stand where all lanes of a warp arrive.

use core::mem::offset_of;

use epoxide_macros::kernel;

use super::super::epoch::{Phase, pool_of, record, share, trace, wait_at_least};
use super::{
    Begun, Shared, begin, chunk_offset, chunks_of, completes, finish, id_packets, ids_offset, tell_call,
    tokens_in_chunk, wait_calls, wait_packet, wait_ready,
};
use crate::layout::{
    LowLatencyDispatchArgs, LowLatencyTurns, MAX_RANKS, MAX_TOPK, Quantise, SCALE_BLOCK, Wait, phase,
    row_stride,
};
use crate::simt::*;

/// Elements that a thread quantises: as many as make 16 bytes.
const ELEMENTS: usize = 16;
/// Lanes that quantise a block of elements together.
const LANES_PER_SCALE: u32 = SCALE_BLOCK / ELEMENTS as u32;
/// The largest e4m3 number.
const E4M3_MAX: f32 = 448.0;
/// The least magnitude that a scale is made for.
const LEAST_AMAX: f32 = 1e-4;

/// Sends rows, or waits for them and says which expert has which, or both.
#[kernel(
    threads = 512, min_blocks = 1, barriers = 9, registers = 128,
    requires(
        args.common.comm.num_ranks >= 1,
        args.common.comm.num_ranks <= MAX_RANKS as u32,
        args.common.num_topk >= 1,
        args.common.num_topk <= MAX_TOPK,
        args.common.local_experts >= 1,
        args.common.chunk_tokens >= 1,
        args.common.num_tokens <= args.common.max_tokens,
        args.row_bytes.is_multiple_of(16),
        args.quantise == Quantise::Not as u32 || args.row_bytes.is_multiple_of(SCALE_BLOCK),
    )
)]
pub unsafe fn low_latency_dispatch(args: LowLatencyDispatchArgs) {
    let comm = &args.common.comm;
    let shared = Shared::lay_out();
    let begun = begin(&args.common, &shared);
    if args.common.phases & phase::SEND != 0 {
        send(&args, &shared, &begun);
        trace(comm, Phase::Moved);
    }
    if args.common.phases & phase::RECEIVE != 0 {
        receive(&args, &shared, begun.epoch);
        finish(comm);
    }
}

/// Sends this rank's tokens, a token to a block.
#[inline(always)]
unsafe fn send(args: &LowLatencyDispatchArgs, shared: &Shared, begun: &Begun) {
    // SAFETY: passed on to the kernel's caller; the head of the file says the rest.
    unsafe {
        let (common, comm, epoch) = (&args.common, &args.common.comm, begun.epoch);
        let (thread, warp, lane) = (tid(), tid() / 32, laneid());
        let mut takes_part = begun.takes_part;
        if takes_part {
            tell_call(comm, epoch);
        }
        // A place that no combine has answered since its last dispatch may be in use: then all wait for all.
        if begun.dispatches != ld_u64(common.tables.turns.0 + offset_of!(LowLatencyTurns, answered) as u64) {
            if takes_part && warp == 0 && !wait_ready(comm, epoch) && lane == 0 {
                st_shared_u32(shared.expired, 1);
            }
            barrier_sync();
            takes_part = ld_shared_u32(shared.expired) == 0;
        }
        let mut token = ctaid();
        while token < common.num_tokens && takes_part {
            let row = comm.rank * common.max_tokens + token;
            let mask = send_ids(args, token, row, warp == 0, epoch);
            if thread == 0 {
                st_u32(common.tables.token_ranks.0 + token as u64 * 4, mask);
            }
            if args.quantise == Quantise::Not as u32 {
                send_row(args, token, row, mask);
            } else {
                quantise_row(args, token, row, mask);
            }
            barrier_sync();
            if warp == 0 {
                let chunk = token / common.chunk_tokens;
                let parts = tokens_in_chunk(common, common.num_tokens, chunk);
                let word = common.tables.sent.0 + chunk as u64 * 8;
                if completes(word, token - chunk * common.chunk_tokens, parts) && lane < comm.num_ranks {
                    let word = pool_of(comm, lane) + common.place.arrived;
                    st_release_sys_u64(word + chunk_offset(common, comm.rank, chunk), epoch);
                }
            }
            token += nctaid();
        }
        // The kernel that waits for rows may be another one, of another grid: the turn belongs to this half. All threads have read it in front
        // of a barrier.
        if thread == 0 {
            red_relaxed_gpu_add_u64(common.tables.turns.0, share(ctaid(), nctaid()));
        }
    }
}

/// The ranks that a token goes to, as bits. `sends`: tells them, and all others, which of their experts it is for, with its weights. The
/// whole warp calls it.
#[inline(always)]
unsafe fn send_ids(args: &LowLatencyDispatchArgs, token: u32, row: u32, sends: bool, epoch: u64) -> u32 {
    // SAFETY: passed on to the caller.
    unsafe {
        let (common, comm) = (&args.common, &args.common.comm);
        let lane = laneid();
        let entry = (token * common.num_topk + lane) as u64;
        let mut expert = -1;
        if lane < common.num_topk {
            expert = ld_i64(args.topk_idx.0 + entry * 8);
        }
        let experts = (common.local_experts * comm.num_ranks) as i64;
        let is_known = expert >= 0 && expert < experts;
        if expert >= experts || expert < -1 {
            record(comm, 0, comm.rank, epoch, token as u64, expert as u64, Wait::LowLatencyExpert);
        }
        let expert = expert as u32;
        let rank = expert / common.local_experts;
        let local = expert - rank * common.local_experts;
        let mask = redux_or(if is_known { 1 << rank } else { 0 });
        if !sends {
            return mask;
        }
        // Lane w has packet w, of the entries 2 w and 2 w + 1; lanes from 16 on have none, and their sources are any.
        let of_lane = if is_known { rank << 16 | local } else { u32::MAX };
        let low = shfl_u32(of_lane, (lane * 2) & 31);
        let high = shfl_u32(of_lane, (lane * 2 + 1) & 31);
        if lane < id_packets(common) {
            unroll8!(RANK => {
                if (RANK as u32) < comm.num_ranks {
                    let id = |of: u32| if of >> 16 == RANK as u32 { of & 0xffff } else { 0xffff };
                    let packet = epoch << 32 | (id(high) << 16 | id(low)) as u64;
                    let at = comm.pools[RANK].0 + common.place.ids + ids_offset(common, row);
                    st_relaxed_sys_u64(at + lane as u64 * 8, packet);
                }
            });
        }
        if is_known {
            let weight =
                if args.topk_weights.is_null() { 1.0 } else { ld_f32(args.topk_weights.0 + entry * 4) };
            let at = pool_of(comm, rank) + common.place.weights;
            st_f32(at + (row * common.num_topk + lane) as u64 * 4, weight);
        }
        mask
    }
}

/// Sends a row as it is, with the scales it has, to the ranks of `mask`.
#[inline(always)]
unsafe fn send_row(args: &LowLatencyDispatchArgs, token: u32, row: u32, mask: u32) {
    // SAFETY: passed on to the caller.
    unsafe {
        let from = args.x.0 + token as u64 * args.row_bytes as u64;
        let mut at = tid() * 16;
        while at < args.row_bytes {
            // Two at a time, so that their loads are in flight together.
            let next = at + ntid() * 16;
            let first = ld_stream_v4(from + at as u64);
            let second = ld_stream_v4_if(next < args.row_bytes, from + next as u64);
            store(args, row, mask, at, first);
            if next < args.row_bytes {
                store(args, row, mask, next, second);
            }
            at = next + ntid() * 16;
        }
        let mut scale = tid();
        while scale < args.num_scales {
            let value = ld_f32(args.scales.0 + (token * args.num_scales + scale) as u64 * 4);
            store_scale(args, row, mask, scale, value);
            scale += ntid();
        }
    }
}

/// Stores 16 bytes of a row, from byte `at` on, at the ranks of `mask`.
#[inline(always)]
unsafe fn store(args: &LowLatencyDispatchArgs, row: u32, mask: u32, at: u32, vector: [u32; 4]) {
    // SAFETY: passed on to the caller.
    unsafe {
        let offset = args.common.place.recv_x + row as u64 * row_stride(args.row_bytes as u64) + at as u64;
        unroll8!(RANK => {
            if mask >> RANK & 1 != 0 {
                st_v4(args.common.comm.pools[RANK].0 + offset, vector);
            }
        });
    }
}

/// Stores a scale of a row at the ranks of `mask`.
#[inline(always)]
unsafe fn store_scale(args: &LowLatencyDispatchArgs, row: u32, mask: u32, scale: u32, value: f32) {
    // SAFETY: passed on to the caller.
    unsafe {
        let rows = (args.common.comm.num_ranks * args.common.max_tokens) as u64;
        let offset = args.common.place.recv_scales + (scale as u64 * rows + row as u64) * 4;
        unroll8!(RANK => {
            if mask >> RANK & 1 != 0 {
                st_f32(args.common.comm.pools[RANK].0 + offset, value);
            }
        });
    }
}

/// Sends a BF16 row as e4m3, with a scale for each block of elements, to the ranks of `mask`. All threads of the block call it.
#[inline(always)]
unsafe fn quantise_row(args: &LowLatencyDispatchArgs, token: u32, row: u32, mask: u32) {
    // SAFETY: passed on to the caller.
    unsafe {
        let from = args.x.0 + token as u64 * args.row_bytes as u64 * 2;
        let lane = laneid();
        // Whole warps go on together, since lanes ask each other.
        let mut first = tid() / 32 * 32;
        while first * (ELEMENTS as u32) < args.row_bytes {
            let at = (first + lane) * ELEMENTS as u32;
            let is_there = at < args.row_bytes;
            let low = ld_stream_v4_if(is_there, from + at as u64 * 2);
            let high = ld_stream_v4_if(is_there, from + at as u64 * 2 + 16);
            // Magnitudes of floats order as their bits do.
            let mut amax = 0;
            unroll4!(J => {
                let largest = |pair: u32| (pair << 16 & 0x7fff_ffff).max(pair & 0x7fff_0000);
                amax = amax.max(largest(low[J])).max(largest(high[J]));
            });
            let mut step = 1;
            while step < LANES_PER_SCALE {
                amax = amax.max(shfl_u32(amax, lane ^ step));
                step *= 2;
            }
            let (scale, inverse) = scales(f32::from_bits(amax), args.quantise);
            if is_there {
                let pack = |pair: u32| pack_e4m3x2(bf16x2_lo(pair) * inverse, bf16x2_hi(pair) * inverse);
                let four = |from: [u32; 2]| pack(from[0]) | pack(from[1]) << 16;
                let vector = [
                    four([low[0], low[1]]),
                    four([low[2], low[3]]),
                    four([high[0], high[1]]),
                    four([high[2], high[3]]),
                ];
                store(args, row, mask, at, vector);
                if lane.is_multiple_of(LANES_PER_SCALE) {
                    store_scale(args, row, mask, at / SCALE_BLOCK, scale);
                }
            }
            first += ntid();
        }
    }
}

/// What e4m3 numbers of a block with this largest magnitude are multiplied with to give the numbers, and what these are to give those.
#[inline(always)]
fn scales(amax: f32, quantise: u32) -> (f32, f32) {
    // Not `max`, which takes a NaN for a small number.
    let amax = if amax < LEAST_AMAX { LEAST_AMAX } else { amax };
    let scale = amax / E4M3_MAX;
    if quantise == Quantise::Fp8PowerOfTwo as u32 {
        // The next power of two: of a finite scale, the exponent is what counts; the inverse has the opposite one.
        let exponent = (scale.to_bits() + 0x007f_ffff) >> 23;
        return (f32::from_bits(exponent << 23), f32::from_bits((254 - exponent) << 23));
    }
    (scale, E4M3_MAX / amax)
}

/// Says which expert has which rows, and waits for them.
#[inline(always)]
unsafe fn receive(args: &LowLatencyDispatchArgs, shared: &Shared, epoch: u64) {
    // SAFETY: passed on to the kernel's caller; the head of the file says the rest.
    unsafe {
        let (common, comm) = (&args.common, &args.common.comm);
        let thread = tid();
        if !wait_calls(common, shared, epoch) {
            return;
        }
        if ctaid() == 0 && thread < MAX_RANKS as u32 {
            st_u32(common.tables.num_tokens.0 + thread as u64 * 4, ld_shared_u32(shared.tokens + thread * 4));
        }
        let mut expert = ctaid();
        while expert < common.local_experts {
            list_rows(args, shared, expert, epoch);
            expert += nctaid();
        }
        // Each chunk has a thread that waits for it, in the blocks that have the least else to do.
        let chunks = chunks_of(common, common.max_tokens);
        core::hint::assert_unchecked(chunks >= 1);
        let mut index = (nctaid() - 1 - ctaid()) * ntid() + thread;
        while index < comm.num_ranks * chunks {
            let (source, chunk) = (index / chunks, index % chunks);
            if chunk < chunks_of(common, ld_shared_u32(shared.tokens + source * 4)) {
                let word =
                    pool_of(comm, comm.rank) + common.place.arrived + chunk_offset(common, source, chunk);
                wait_at_least(comm, word, epoch, source, epoch, Wait::LowLatencyRows);
            }
            index += nctaid() * ntid();
        }
    }
}

/// Lists the rows of a local expert, by source rank, then by token. All threads of the block call it.
#[inline(always)]
unsafe fn list_rows(args: &LowLatencyDispatchArgs, shared: &Shared, expert: u32, epoch: u64) {
    // SAFETY: passed on to the caller.
    unsafe {
        let (common, comm) = (&args.common, &args.common.comm);
        let (thread, warp, lane) = (tid(), tid() / 32, laneid());
        let rows = comm.num_ranks * common.max_tokens;
        let pool = pool_of(comm, comm.rank);
        if thread < MAX_RANKS as u32 {
            st_shared_u32(shared.of_source + thread * 4, 0);
        }
        let mut total = 0;
        unroll8!(SOURCE => { total += ld_shared_u32(shared.tokens + SOURCE as u32 * 4) });
        let (mut first, mut found) = (0, 0);
        while first < total {
            // The token `first + thread` of all sources' behind each other.
            let (mut source, mut token) = (0, first + thread);
            let is_there = token < total;
            unroll8!(SOURCE => {
                let of_source = ld_shared_u32(shared.tokens + SOURCE as u32 * 4);
                if source == SOURCE as u32 && token >= of_source {
                    (source, token) = (source + 1, token - of_source);
                }
            });
            let row = source * common.max_tokens + token;
            let mut entries = 0;
            if is_there {
                entries = entries_of(args, pool, row, source, expert, epoch);
            }
            let hits = ballot(entries != 0);
            if lane == 0 {
                st_shared_u32(shared.of_warp + warp * 4, hits.count_ones());
            }
            barrier_sync();
            let (mut before, mut all, mut other) = (0, 0, 0);
            while other < ntid() / 32 {
                let count = ld_shared_u32(shared.of_warp + other * 4);
                before += if other < warp { count } else { 0 };
                all += count;
                other += 1;
            }
            if entries != 0 {
                let slot = expert * rows + found + before + (hits & lanemask_lt()).count_ones();
                st_i32(common.tables.expert_rows.0 + slot as u64 * 4, row as i32);
                st_i32(common.tables.src_info.0 + slot as u64 * 4, token as i32);
                let slots = common.tables.slots.0 + (row * common.num_topk) as u64 * 4;
                while entries != 0 {
                    st_i32(slots + entries.trailing_zeros() as u64 * 4, slot as i32);
                    entries &= entries - 1;
                }
                red_relaxed_cta_shared_add_u32(shared.of_source + source * 4, 1);
            }
            (first, found) = (first + ntid(), found + all);
            barrier_sync();
        }
        barrier_sync();
        if thread < comm.num_ranks {
            let mut begin = 0;
            unroll8!(SOURCE => {
                begin += if (SOURCE as u32) < thread { ld_shared_u32(shared.of_source + SOURCE as u32 * 4) } else { 0 };
            });
            let count = ld_shared_u32(shared.of_source + thread * 4);
            let range = common.tables.layout_range.0 + (expert * comm.num_ranks + thread) as u64 * 8;
            st_u64(range, (begin as u64) << 32 | count as u64);
        }
        if thread == 0 {
            st_u32(common.tables.expert_counts.0 + expert as u64 * 4, found);
        }
        // The words are the next expert's.
        barrier_sync();
    }
}

/// The entries of a row, as bits, that are for the local expert `expert`. 0 when a wait expired.
#[inline(always)]
unsafe fn entries_of(
    args: &LowLatencyDispatchArgs,
    pool: u64,
    row: u32,
    source: u32,
    expert: u32,
    epoch: u64,
) -> u32 {
    // SAFETY: passed on to the caller.
    unsafe {
        let (common, comm) = (&args.common, &args.common.comm);
        let ids = pool + common.place.ids + ids_offset(common, row);
        let (mut entries, mut packet) = (0, 0);
        while packet < id_packets(common) {
            // A packet that does not come names no expert.
            let at = ids + packet as u64 * 8;
            let pair = wait_packet::<false>(comm, at, source, epoch, Wait::LowLatencyIds);
            let pair = pair.unwrap_or(u32::MAX);
            entries |= ((pair & 0xffff == expert) as u32) << (packet * 2);
            entries |= ((pair >> 16 == expert) as u32) << (packet * 2 + 1);
            packet += 1;
        }
        entries
    }
}
