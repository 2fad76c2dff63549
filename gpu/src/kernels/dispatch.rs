//! Dispatch: every rank writes its tokens' rows straight to their final places in the peers' pools.

use epoxide_macros::kernel;

use super::epoch::{Phase, current_epoch, leave, pool_of, tell_ready, trace, wait_ready};
use super::ring::{Ring, Turn, block_range};
#[cfg(not(target_arch = "nvptx64"))]
use super::{Call, ContractError, Kernel, KernelInfo, ParamLayout};
use crate::layout::{
    DispatchArgs, MAX_RANKS, PlanStatus, SEND_ROW_STRIDE, Wait, bulk_scale_bytes, row_stride,
};
use crate::simt::*;

/// Moves rows (and, unless cached, their metadata) to the ranks that want them.
///
/// A block owns a contiguous range of tokens, a warp every n-th of them. The warp's copy engine work is a ring of
/// `stages` buffers: one bulk load brings a row (or a piece of it) in, then lane r's bulk store sends it to rank r, so a
/// row is read once however many ranks want it. A rank's rows for itself go out through ordinary stores, which leaves the
/// copy engine to the links. Shared memory: the ring module says.
#[kernel(
    threads = 256, min_blocks = 1, barriers = 2, registers = 200,
    requires(
        args.row_bytes.is_multiple_of(16),
        args.row_bytes >= 16,
        args.stages >= 2,
        args.stages <= 32,
        args.piece_bytes.is_multiple_of(16),
        args.piece_bytes >= 16,
        args.stage_bytes.is_multiple_of(128),
        args.stage_bytes >= args.piece_bytes + bulk_scale_bytes(args.num_scales),
        args.local_experts >= 1,
    )
)]
pub unsafe fn dispatch(args: DispatchArgs) {
    let comm = &args.comm;
    let (lane, warp, warps) = (laneid(), tid() / 32, ntid() / 32);
    trace(comm, Phase::Enter);
    let epoch = current_epoch(comm);
    if ctaid() == 0 && warp == 0 {
        tell_ready(comm, epoch);
    }

    // With no valid plan, no row moves; the words still do, so that the next operation finds them in step.
    let planned = ld_u32(args.header.0) == PlanStatus::Ready as u32;
    let (begin, end) = block_range(args.num_tokens);
    let begin = begin + warp;
    let ring = Ring::new(args.stages, args.stage_bytes, warps);

    // Fill the ring while the peers' words are on their way.
    let mut load = Cursor::new(begin, warps);
    while planned && load.piece < args.stages && load.token < end {
        load_piece(&ring, &args, &load, load.piece);
        load.advance(&args);
    }

    let mut turn = Turn::first();
    let joined = wait_ready(comm, epoch, Wait::DispatchReady);
    if joined && planned {
        let peer = if lane < comm.num_ranks { pool_of(comm, lane) } else { 0 };
        let own = shfl_u64(peer, comm.rank);
        let mut pools = [0u64; MAX_RANKS];
        unroll8!(RANK => { pools[RANK] = shfl_u64(peer, RANK as u32) });
        let mut next = Metadata::fetch(&args, begin, end, lane);
        let mut token = Metadata::NONE;
        let mut send = Cursor::new(begin, warps);
        let mut previous = 0;
        while send.token < end {
            if send.offset == 0 {
                token = next;
                next = Metadata::fetch(&args, send.token + warps, end, lane);
                if args.with_metadata != 0 {
                    token.send(&args, send.token, &pools, lane);
                }
                if args.num_scales != 0 && bulk_scale_bytes(args.num_scales) == 0 {
                    let scale_bytes = args.num_scales as u64 * 4;
                    let to = scale_place(&args, peer, token.row);
                    copy_scales(args.scales.0 + send.token as u64 * scale_bytes, args.num_scales, to);
                }
            }
            let (bytes, buffer) = (send.bytes(&args), ring.buffer(turn.slot));
            let row_offset = comm.pool.recv_x + send.offset as u64;
            let stride = row_stride(args.row_bytes as u64);
            ring.wait(&turn);
            if token.row >= 0 {
                if lane != comm.rank {
                    bulk_store(peer + row_offset + token.row as u64 * stride, buffer, bytes);
                }
                let scale_bytes = bulk_scale_bytes(args.num_scales);
                if scale_bytes != 0 && send.offset == 0 {
                    bulk_store(scale_place(&args, peer, token.row), buffer + args.piece_bytes, scale_bytes);
                }
            }
            bulk_commit();
            let own_row = shfl_u32(token.row as u32, comm.rank) as i32;
            if own_row >= 0 {
                store_plain(own + row_offset + own_row as u64 * stride, buffer, bytes, lane);
            }

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
        // The stores have landed for this thread, so that the releases in `leave` pass them on: no proxy fence.
        bulk_wait::<0>();
    } else {
        // The loads in flight must land before the block gives its shared memory back.
        let mut loaded = load.piece;
        while loaded != 0 {
            ring.wait(&turn);
            turn.advance(&ring);
            loaded -= 1;
        }
    }
    leave(comm, epoch, joined, Wait::DispatchDone);
}

// `unroll8` covers every possible rank.
const _: () = assert!(MAX_RANKS == 8);

/// A warp's place in its sequence of pieces: rows, or parts of rows that are longer than a stage.
pub(super) struct Cursor {
    pub token: u32,
    pub offset: u32,
    pub piece: u32,
    step: u32,
}

impl Cursor {
    #[inline(always)]
    pub fn new(token: u32, step: u32) -> Self {
        Cursor { token, offset: 0, piece: 0, step }
    }

    #[inline(always)]
    pub fn bytes(&self, args: &DispatchArgs) -> u32 {
        (args.row_bytes - self.offset).min(args.piece_bytes)
    }

    #[inline(always)]
    pub fn advance(&mut self, args: &DispatchArgs) {
        self.piece += 1;
        self.offset += args.piece_bytes;
        if self.offset >= args.row_bytes {
            (self.offset, self.token) = (0, self.token + self.step);
        }
    }
}

/// Lane 0 starts the load of a piece of x, and of the token's scales with its first, into a stage that nobody reads any more.
#[inline(always)]
pub(super) unsafe fn load_piece(ring: &Ring, args: &DispatchArgs, piece: &Cursor, stage: u32) {
    // SAFETY: the piece lies inside `x`, the scales inside `scales`.
    unsafe {
        let row = args.x.0 + piece.token as u64 * args.row_bytes as u64;
        let scales = args.scales.0 + piece.token as u64 * bulk_scale_bytes(args.num_scales) as u64;
        load_stage(ring, args, stage, row, scales, Tail::NONE, piece.offset);
    }
}

/// What else is loaded into a stage with the first piece of a row, behind the scales; multiples of 16.
#[derive(Clone, Copy)]
pub(super) struct Tail {
    pub from: u64,
    pub bytes: u32,
}

impl Tail {
    pub const NONE: Tail = Tail { from: 0, bytes: 0 };

    /// Where it is in a stage.
    #[inline(always)]
    pub fn offset(args: &DispatchArgs) -> u32 {
        args.piece_bytes + bulk_scale_bytes(args.num_scales)
    }
}

/// Lane 0 starts the load of the piece at `offset` of a row, and with the first piece that of its scales, where the copy engine
/// moves them, and of its tail.
#[inline(always)]
pub(super) unsafe fn load_stage(
    ring: &Ring,
    args: &DispatchArgs,
    stage: u32,
    row: u64,
    scales: u64,
    tail: Tail,
    offset: u32,
) {
    // SAFETY: passed on to the caller.
    unsafe {
        if laneid() == 0 {
            let bytes = (args.row_bytes - offset).min(args.piece_bytes);
            let (mut scale_bytes, mut tail_bytes) = (0, 0);
            if offset == 0 {
                (scale_bytes, tail_bytes) = (bulk_scale_bytes(args.num_scales), tail.bytes);
            }
            // Own rows were read by ordinary loads; the copy engine writes the stage next.
            fence_proxy_async_shared();
            ring.expect(stage, bytes + scale_bytes + tail_bytes);
            ring.load_at(stage, 0, row + offset as u64, bytes);
            if scale_bytes != 0 {
                ring.load_at(stage, args.piece_bytes, scales, scale_bytes);
            }
            if tail_bytes != 0 {
                ring.load_at(stage, Tail::offset(args), tail.from, tail_bytes);
            }
        }
    }
}

/// Copies a piece by ordinary stores: 16 bytes a lane, four at a time in flight.
#[inline(always)]
pub(super) unsafe fn store_plain(to: u64, buffer: u32, bytes: u32, lane: u32) {
    // SAFETY: the caller vouches for `to`; the piece is in the buffer.
    unsafe {
        let mut at = lane * 16;
        while at + 3 * 512 < bytes {
            let vectors = [
                ld_shared_v4(buffer + at),
                ld_shared_v4(buffer + at + 512),
                ld_shared_v4(buffer + at + 1024),
                ld_shared_v4(buffer + at + 1536),
            ];
            st_v4(to + at as u64, vectors[0]);
            st_v4(to + at as u64 + 512, vectors[1]);
            st_v4(to + at as u64 + 1024, vectors[2]);
            st_v4(to + at as u64 + 1536, vectors[3]);
            at += 2048;
        }
        while at < bytes {
            st_v4(to + at as u64, ld_shared_v4(buffer + at));
            at += 512;
        }
    }
}

/// What lane r knows of a token's row at rank r, and lane k of its top-k entry k.
#[derive(Clone, Copy)]
pub(super) struct Metadata {
    /// The row at rank r, or -1.
    pub row: i32,
    /// A global id.
    pub expert: i64,
    pub weight: f32,
}

impl Metadata {
    pub const NONE: Metadata = Metadata { row: -1, expert: -1, weight: 0.0 };

    /// Reads a token's entries, a turn before they are used.
    #[inline(always)]
    unsafe fn fetch(args: &DispatchArgs, token: u32, end: u32, lane: u32) -> Metadata {
        // SAFETY: the entries lie inside their tensors.
        unsafe {
            let mut metadata = Metadata::NONE;
            if token < end {
                if lane < SEND_ROW_STRIDE {
                    metadata.row = ld_i32(args.send_row.0 + (token * SEND_ROW_STRIDE + lane) as u64 * 4);
                }
                if args.with_metadata != 0 && lane < args.num_topk {
                    let entry = token as u64 * args.num_topk as u64 + lane as u64;
                    metadata.expert = ld_i64(args.topk_idx.0 + entry * 8);
                    metadata.weight = ld_f32(args.topk_weights.0 + entry * 4);
                }
            }
            metadata
        }
    }

    /// Writes source index, local expert ids and weights to every rank that wants the token.
    #[inline(always)]
    pub unsafe fn send(&self, args: &DispatchArgs, token: u32, pools: &[u64; MAX_RANKS], lane: u32) {
        // SAFETY: rows were planned inside the pools; this is the row's only writer.
        unsafe {
            let pool = &args.comm.pool;
            // All rows first: the shuffles overlap, and the stores do not wait for them one by one.
            let mut rows = [0i32; MAX_RANKS];
            unroll8!(RANK => { rows[RANK] = shfl_u32(self.row as u32, RANK as u32) as i32 });
            unroll8!(RANK => {
                if rows[RANK] >= 0 {
                    let (base, row) = (pools[RANK], rows[RANK] as u64);
                    if lane < args.num_topk {
                        let first = args.first_expert + RANK as u32 * args.local_experts;
                        let local = self.expert - first as i64;
                        let here = local >= 0 && local < args.local_experts as i64;
                        let entry = row * args.num_topk as u64 + lane as u64;
                        st_i64(base + pool.recv_topk_idx + entry * 8, if here { local } else { -1 });
                        st_f32(base + pool.recv_topk_weights + entry * 4, if here { self.weight } else { 0.0 });
                    }
                    if lane == 0 {
                        st_u32(base + pool.recv_src_idx + row * 4, token);
                    }
                }
            });
        }
    }
}

/// Where a row's scales go in the pool `pool`; 0 where the row is -1.
#[inline(always)]
pub(super) fn scale_place(args: &DispatchArgs, pool: u64, row: i32) -> u64 {
    let offset = row as u64 * args.num_scales as u64 * 4;
    if row >= 0 { pool + args.comm.pool.recv_scales + offset } else { 0 }
}

/// Copies a token's scales to the address that each lane names, 0 for none, where the copy engine cannot. The whole warp calls it.
#[inline(always)]
pub(super) unsafe fn copy_scales(from: u64, num_scales: u32, to: u64) {
    // SAFETY: the caller vouches for the addresses.
    unsafe {
        let wanted = ballot(to != 0);
        // All lanes take the same number of turns, so that the shuffles stay full.
        let (mut column, mut first) = (laneid(), 0);
        while first < num_scales {
            let active = column < num_scales;
            let scale = ld_f32_if(active, from + column as u64 * 4);
            let mut left = wanted;
            while left != 0 {
                let to = shfl_u64(to, left.trailing_zeros());
                left &= left - 1;
                if active {
                    st_f32(to + column as u64 * 4, scale);
                }
            }
            first += 32;
            column += 32;
        }
    }
}
