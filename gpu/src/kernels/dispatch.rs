//! Dispatch: every rank writes its tokens' rows straight to their final places in the peers' pools.

use epoxide_macros::kernel;

use super::epoch::{aborted, current_epoch, leave, pool_of, tell_ready, wait_ready};
use super::ring::{Ring, Turn};
#[cfg(not(target_arch = "nvptx64"))]
use super::{Call, ContractError, Kernel, KernelInfo, ParamLayout};
use crate::layout::{DispatchArgs, PlanStatus, SEND_ROW_STRIDE, Wait, row_stride};
use crate::simt::*;

/// Moves rows (and, unless cached, their metadata) to the ranks that want them.
///
/// A block owns a contiguous range of tokens, a warp every n-th of them. The warp's copy engine work is a ring of
/// `stages` buffers: one bulk load brings a row (or a piece of it) in, then lane r's bulk store sends it to rank r, so a
/// row is read once however many ranks want it. Shared memory: per warp `stages * stage_bytes`, then all barriers.
#[kernel(
    threads = 512, min_blocks = 1, barriers = 1, registers = 128,
    requires(
        args.row_bytes.is_multiple_of(16),
        args.row_bytes >= 16,
        args.stages >= 2,
        args.stages <= 32,
        args.stage_bytes.is_multiple_of(128),
        args.stage_bytes >= 128,
        args.local_experts >= 1,
    )
)]
pub unsafe fn dispatch(args: DispatchArgs) {
    let comm = &args.comm;
    let (lane, warp, warps) = (laneid(), tid() / 32, ntid() / 32);
    let epoch = current_epoch(comm);
    if ctaid() == 0 && warp == 0 {
        tell_ready(comm, epoch);
    }

    // With no valid plan, no row moves; the words still do, so that the next operation finds them in step.
    let planned = ld_u32(args.header.0) == PlanStatus::Ready as u32;
    let per_block = args.num_tokens.div_ceil(nctaid());
    let begin = (per_block * ctaid()).min(args.num_tokens) + warp;
    let end = (per_block * (ctaid() + 1)).min(args.num_tokens);
    let ring = Ring::new(args.stages, args.stage_bytes);

    // Fill the ring while the peers' words are on their way.
    let mut load = Cursor::new(begin, warps);
    while planned && load.piece < args.stages && load.token < end {
        load_piece(&ring, &args, &load, load.piece);
        load.advance(&args);
    }

    let mut turn = Turn::first();
    if wait_ready(comm, epoch, Wait::DispatchReady) && planned && !aborted(comm) {
        let peer = if lane < comm.num_ranks { pool_of(comm, lane) } else { 0 };
        let mut next_row = send_row(&args, begin, end, lane);
        let mut send = Cursor::new(begin, warps);
        let (mut row, mut previous) = (-1, 0);
        while send.token < end {
            if send.offset == 0 {
                row = next_row;
                next_row = send_row(&args, send.token + warps, end, lane);
                if args.with_metadata != 0 {
                    send_metadata(&args, send.token, row, peer, lane);
                }
                if args.num_scales != 0 {
                    send_scales(&args, send.token, row, peer, lane);
                }
            }
            ring.wait(&turn);
            if row >= 0 {
                let target = row as u64 * row_stride(args.row_bytes as u64) + send.offset as u64;
                bulk_store(peer + comm.pool.recv_x + target, ring.buffer(turn.slot), send.bytes(&args));
            }
            bulk_commit();

            // Refill the stage before this one: its store has had a whole turn to read it.
            if load.token < end && send.piece >= 1 {
                bulk_wait_read::<1>();
                syncwarp();
                load_piece(&ring, &args, &load, previous);
                load.advance(&args);
            }
            previous = turn.slot;
            turn.advance(&ring);
            send.advance(&args);
        }
        bulk_wait::<0>();
        fence_proxy_async();
    } else {
        // The loads in flight must land before the block gives its shared memory back.
        let mut loaded = load.piece;
        while loaded != 0 {
            ring.wait(&turn);
            turn.advance(&ring);
            loaded -= 1;
        }
    }
    fence_acq_rel_sys();
    leave(comm, epoch, Wait::DispatchDone);
}

/// A warp's place in its sequence of pieces: rows, or parts of rows that are longer than a stage.
struct Cursor {
    token: u32,
    offset: u32,
    piece: u32,
    step: u32,
}

impl Cursor {
    #[inline(always)]
    fn new(token: u32, step: u32) -> Self {
        Cursor { token, offset: 0, piece: 0, step }
    }

    #[inline(always)]
    fn bytes(&self, args: &DispatchArgs) -> u32 {
        (args.row_bytes - self.offset).min(args.stage_bytes)
    }

    #[inline(always)]
    fn advance(&mut self, args: &DispatchArgs) {
        self.piece += 1;
        self.offset += args.stage_bytes;
        if self.offset >= args.row_bytes {
            (self.offset, self.token) = (0, self.token + self.step);
        }
    }
}

/// Lane 0 starts the load of a piece into a stage that no store reads any more.
#[inline(always)]
unsafe fn load_piece(ring: &Ring, args: &DispatchArgs, piece: &Cursor, stage: u32) {
    // SAFETY: the piece lies inside `x`.
    unsafe {
        if laneid() == 0 {
            let from = args.x.0 + piece.token as u64 * args.row_bytes as u64 + piece.offset as u64;
            ring.load(stage, from, piece.bytes(args));
        }
    }
}

/// Lane r: the row of `token` at rank r, or -1.
#[inline(always)]
unsafe fn send_row(args: &DispatchArgs, token: u32, end: u32, lane: u32) -> i32 {
    // SAFETY: the entry lies inside `send_row`.
    unsafe {
        if token < end && lane < SEND_ROW_STRIDE {
            ld_i32(args.send_row.0 + (token * SEND_ROW_STRIDE + lane) as u64 * 4)
        } else {
            -1
        }
    }
}

/// Writes source index, local expert ids and weights of one token to every rank that wants it. Lane k has entry k.
#[inline(always)]
unsafe fn send_metadata(args: &DispatchArgs, token: u32, row: i32, peer: u64, lane: u32) {
    // SAFETY: rows were planned inside the pools; this is the row's only writer.
    unsafe {
        let pool = &args.comm.pool;
        let active = lane < args.num_topk;
        let (mut expert, mut weight) = (-1i64, 0.0f32);
        if active {
            let entry = token as u64 * args.num_topk as u64 + lane as u64;
            expert = ld_i64(args.topk_idx.0 + entry * 8);
            weight = ld_f32(args.topk_weights.0 + entry * 4);
        }
        let mut wanted = ballot(row >= 0);
        while wanted != 0 {
            let rank = wanted.trailing_zeros();
            wanted &= wanted - 1;
            let (base, row) = (shfl_u64(peer, rank), shfl_u32(row as u32, rank) as u64);
            if active {
                let local = expert - (rank * args.local_experts) as i64;
                let here = local >= 0 && local < args.local_experts as i64;
                let entry = row * args.num_topk as u64 + lane as u64;
                st_i64(base + pool.recv_topk_idx + entry * 8, if here { local } else { -1 });
                st_f32(base + pool.recv_topk_weights + entry * 4, if here { weight } else { 0.0 });
            }
            if lane == 0 {
                st_u32(base + pool.recv_src_idx + row * 4, token);
            }
        }
    }
}

/// Writes the scales of one token to every rank that wants it.
#[inline(always)]
unsafe fn send_scales(args: &DispatchArgs, token: u32, row: i32, peer: u64, lane: u32) {
    // SAFETY: as in `send_metadata`.
    unsafe {
        let mut column = lane;
        // All lanes take the same number of turns, so that the shuffles stay full.
        let mut first = 0;
        while first < args.num_scales {
            let active = column < args.num_scales;
            let from = args.scales.0 + (token as u64 * args.num_scales as u64 + column as u64) * 4;
            let scale = ld_f32_if(active, from);
            let mut wanted = ballot(row >= 0);
            while wanted != 0 {
                let rank = wanted.trailing_zeros();
                wanted &= wanted - 1;
                let (base, row) = (shfl_u64(peer, rank), shfl_u32(row as u32, rank) as u64);
                if active {
                    let entry = row * args.num_scales as u64 + column as u64;
                    st_f32(base + args.comm.pool.recv_scales + entry * 4, scale);
                }
            }
            first += 32;
            column += 32;
        }
    }
}
