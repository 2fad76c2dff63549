//! Common code of dispatch within a node and across nodes: rows and their scales are loaded into
//! stages of shared memory and stored from them.

use crate::kernels::ring::Ring;
use crate::layout::{DispatchArgs, bulk_scale_bytes};
use crate::simt::*;

/// A warp's place in its sequence of pieces: rows, or parts of rows that are longer than a stage.
pub struct Cursor {
    pub token: u32,
    pub offset: u32,
    pub piece: u32,
    step: u32,
}

impl Cursor {
    #[device]
    pub fn new(token: u32, step: u32) -> Self {
        Cursor { token, offset: 0, piece: 0, step }
    }

    #[device]
    pub fn bytes(&self, args: &DispatchArgs) -> u32 {
        (args.row_bytes - self.offset).min(args.piece_bytes)
    }

    #[device]
    pub fn advance(&mut self, args: &DispatchArgs) {
        self.piece += 1;
        self.offset += args.piece_bytes;
        if self.offset >= args.row_bytes {
            (self.offset, self.token) = (0, self.token + self.step);
        }
    }
}

/// Lane 0 starts the load of the piece at `offset` of a token's row in x, and of its scales with
/// the first one, into a stage that is not read any more.
///
/// # Safety
/// All lanes call it. The piece lies inside `x`, the scales inside `scales`.
#[device]
pub unsafe fn load_piece(ring: &Ring, args: &DispatchArgs, token: u32, offset: u32, stage: u32) {
    let row = args.x.row(token, args.row_bytes);
    let scales = args.scales.row(token, bulk_scale_bytes(args.num_scales));
    load_stage::<true>(ring, args, stage, row, scales, Tail::NONE, offset);
}

/// Bytes that are loaded into a stage with the first piece of a row, behind the scales; multiples
/// of 16.
#[derive(Clone, Copy)]
pub struct Tail {
    pub from: u64,
    pub bytes: u32,
}

impl Tail {
    pub const NONE: Tail = Tail { from: 0, bytes: 0 };

    /// Where it is in a stage.
    #[device]
    pub fn offset(args: &DispatchArgs) -> u32 {
        args.piece_bytes + bulk_scale_bytes(args.num_scales)
    }
}

/// Lane 0 starts the load of the piece at `offset` of a row. With the first piece it starts those
/// of the row's tail, and with `SCALES` of its scales where the copy engine moves them.
///
/// # Safety
/// All lanes call it. The row, its scales and its tail are live, and no thread reads the stage.
#[device]
pub unsafe fn load_stage<const SCALES: bool>(
    ring: &Ring,
    args: &DispatchArgs,
    stage: u32,
    row: u64,
    scales: u64,
    tail: Tail,
    offset: u32,
) {
    keep_loop();
    if laneid() == 0 {
        let bytes = (args.row_bytes - offset).min(args.piece_bytes);
        let (mut scale_bytes, mut tail_bytes) = (0, 0);
        if offset == 0 {
            let all = bulk_scale_bytes(args.num_scales);
            (scale_bytes, tail_bytes) = (if SCALES { all } else { 0 }, tail.bytes);
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

/// Copies a piece by ordinary stores: 16 bytes a lane, four at a time in flight.
///
/// # Safety
/// `to` is live; the piece is in the buffer.
#[device]
pub unsafe fn store_plain(to: u64, buffer: u32, bytes: u32, lane: u32) {
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

/// Stores `bytes` of scales, a multiple of 16, from a stage to the address that each lane names, 0
/// for none, by ordinary stores: 16 bytes a lane. The whole warp calls it.
///
/// # Safety
/// The addresses are live. The stage is not loaded again before the warp has met.
#[device]
pub unsafe fn store_scales(scales: u32, bytes: u32, to: u64) {
    let mut left = ballot(to != 0);
    while left != 0 {
        let to = shfl_u64(to, left.trailing_zeros());
        left &= left - 1;
        stride!(at in laneid() * 16..bytes, 512 => {
            st_v4(to + at as u64, ld_shared_v4(scales + at));
        });
    }
}

/// Copies `bytes` of scales, a multiple of 16, to the address that each lane names, 0 for none, by
/// ordinary loads and stores: 16 bytes a lane. The whole warp calls it.
///
/// # Safety
/// The addresses are live, and multiples of 16.
#[device]
pub unsafe fn copy_scales_by_lanes(from: u64, bytes: u32, to: u64) {
    let wanted = ballot(to != 0);
    stride!(first in 0..bytes, 512 => {
        let at = first + laneid() * 16;
        let scales = ld_stream_v4_if(at < bytes, from + at as u64);
        let mut left = wanted;
        while left != 0 {
            let to = shfl_u64(to, left.trailing_zeros());
            left &= left - 1;
            if at < bytes {
                st_v4(to + at as u64, scales);
            }
        }
    });
}

/// Where a row's scales go in the pool `pool`; 0 where the row is -1.
#[device]
pub fn scale_place(args: &DispatchArgs, pool: u64, row: i32) -> u64 {
    let offset = row as u64 * args.num_scales as u64 * 4;
    if row >= 0 { pool + args.comm.pool.recv_scales + offset } else { 0 }
}

/// Copies a token's scales to the address that each lane names, 0 for none, where the copy engine
/// cannot. The whole warp calls it.
///
/// # Safety
/// The addresses are live.
#[device]
pub unsafe fn copy_scales(from: u64, num_scales: u32, to: u64) {
    let (wanted, from) = (ballot(to != 0), Global::<f32>::new(from));
    // All lanes take the same number of turns, so that the shuffles stay full.
    let (mut column, mut first) = (laneid(), 0);
    while first < num_scales {
        let active = column < num_scales;
        let scale = ld_f32_if(active, from.at(column));
        let mut left = wanted;
        while left != 0 {
            let to = shfl_u64(to, left.trailing_zeros());
            left &= left - 1;
            if active {
                Global::<f32>::new(to).st(column, scale);
            }
        }
        first += 32;
        column += 32;
    }
}
