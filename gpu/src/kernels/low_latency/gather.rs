//! The expert-major copy of what a low-latency dispatch brought: each expert's rows together, for who has no use for a list of rows.
//!
//! What makes it sound: received rows and tables are as the dispatch left them, a kernel before, and nobody writes them while this one runs; a
//! piece of a row of the copy has one warp that writes it. Counts and rows are looked at before they are used, since the caller's code could have
//! written to them. Loops are the same for all lanes of a warp, so that collectives stand where all of them arrive.

use epoxide_macros::kernel;

use crate::layout::{LowLatencyGatherArgs, SCALE_BLOCK, row_stride};
use crate::simt::*;

/// Vectors of 16 bytes of a piece that a lane has: as many loads are in flight together.
const VECTORS: usize = 4;
/// Bytes of a row that a warp copies at a time.
const GATHER_BYTES: u32 = VECTORS as u32 * 32 * 16;
/// Scales that the elements of a piece have, one byte each.
const SCALES: u32 = GATHER_BYTES / SCALE_BLOCK;
const _: () = assert!(SCALES <= 32, "a lane copies one");

/// Copies each local expert's rows to where the expert's part of the copy begins, one after the other.
#[kernel(
    threads = 512, min_blocks = 1, barriers = 0, registers = 64, dependent,
    requires(
        args.local_experts >= 1,
        args.row_bytes >= 16,
        args.row_bytes.is_multiple_of(16),
        args.num_scales <= args.row_bytes.div_ceil(SCALE_BLOCK),
    )
)]
pub unsafe fn low_latency_gather(args: LowLatencyGatherArgs) {
    let pieces = args.row_bytes.div_ceil(GATHER_BYTES);
    let mut experts = Experts::of(&args, 0, 0);
    // All experts' rows count through, and pieces of a row follow each other on different multiprocessors: nobody is idle where counts differ.
    let mut number = tid() / 32 * nctaid() + ctaid();
    loop {
        let row = number / pieces;
        while row >= experts.end && experts.first + 32 < args.local_experts {
            experts = Experts::of(&args, experts.first + 32, experts.end);
        }
        if row >= experts.end {
            break;
        }
        let (expert, index) = experts.find(row);
        copy_piece(&args, expert, index, number % pieces);
        number += nctaid() * (ntid() / 32);
    }
}

/// Up to 32 local experts, one to a lane, and the rows that they have.
struct Experts {
    first: u32,
    /// Rows of the lane's expert.
    count: u32,
    /// Rows of all experts up to it.
    upto: u32,
    /// Rows of all experts up to the last of these.
    end: u32,
}

impl Experts {
    /// The experts from `first` on; those in front of them have `before` rows. The whole warp calls it.
    #[inline(always)]
    unsafe fn of(args: &LowLatencyGatherArgs, first: u32, before: u32) -> Experts {
        // SAFETY: loads that are made lie in the table; the caller says that all lanes are here.
        unsafe {
            let (lane, expert) = (laneid(), first + laneid());
            let mut count = 0;
            if expert < args.local_experts {
                count = ld_u32(args.expert_counts.0 + expert as u64 * 4).min(args.rows);
            }
            let (mut upto, mut step) = (count, 1);
            while step < 32 {
                let of_others = shfl_u32(upto, lane.wrapping_sub(step) & 31);
                upto += if lane >= step { of_others } else { 0 };
                step *= 2;
            }
            upto += before;
            Experts { first, count, upto, end: shfl_u32(upto, 31) }
        }
    }

    /// Whose row number `row` of all is, which one of them has, and which of the expert's it is. The whole warp calls it.
    #[inline(always)]
    unsafe fn find(&self, row: u32) -> (u32, u32) {
        // SAFETY: the caller says that all lanes are here. The last lane's sum is above `row`, so that not all bits are set.
        unsafe {
            let lane = ballot(self.upto <= row).count_ones() & 31;
            (self.first + lane, row - shfl_u32(self.upto - self.count, lane))
        }
    }
}

/// Copies piece `piece` of an expert's row `index`, with the scales of its elements. The whole warp calls it.
#[inline(always)]
unsafe fn copy_piece(args: &LowLatencyGatherArgs, expert: u32, index: u32, piece: u32) {
    // SAFETY: passed on to the kernel's caller; the row is one of those received.
    unsafe {
        let slot = (expert * args.rows + index) as u64;
        let row = ld_u32(args.expert_rows.0 + slot * 4);
        if row >= args.rows {
            return;
        }
        let (lane, bytes) = (laneid(), args.row_bytes as u64);
        let (from, to) = (args.recv_x.0 + row as u64 * row_stride(bytes), args.x.0 + slot * bytes);
        let at = |vector: usize| piece * GATHER_BYTES + (vector as u32 * 32 + lane) * 16;
        let mut vectors = [[0; 4]; VECTORS];
        // Without a condition, so that all are in flight together; what lies behind the row's end is its start, for nobody.
        unroll4!(J => {
            let inside = if at(J) < args.row_bytes { at(J) } else { 0 };
            vectors[J] = ld_stream_v4(from + inside as u64);
        });
        let scale = piece * SCALES + lane;
        if lane < SCALES && scale < args.num_scales {
            let value = ld_f32(args.recv_scales.0 + (scale as u64 * args.rows as u64 + row as u64) * 4);
            // An expert's scales are transposed, as those received are.
            let of_expert = expert as u64 * args.num_scales as u64 + scale as u64;
            st_f32(args.scales.0 + (of_expert * args.rows as u64 + index as u64) * 4, value);
        }
        unroll4!(J => {
            if at(J) < args.row_bytes {
                st_v4(to + at(J) as u64, vectors[J]);
            }
        });
    }
}
