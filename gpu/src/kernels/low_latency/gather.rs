//! The expert-major copy of the rows of a low-latency dispatch: each expert's rows together, for
//! callers that cannot use a list of rows.
//!
//! Soundness: received rows and tables are as the dispatch left them, a kernel before, and are not
//! written while this kernel runs. A piece of a row of the copy has one writer, a warp. Counts and
//! rows are checked before use, because the caller's code could have written to them. Loops are the
//! same for all lanes of a warp, so that collectives stand where all of them arrive.

use super::super::segments::Segments;
use super::inside;
use crate::layout::{LowLatencyGatherArgs, SCALE_BLOCK, row_stride};
use crate::simt::*;

/// Vectors of 16 bytes of a piece that a lane has: as many loads are in flight together.
const VECTORS: usize = 4;
/// Bytes of a row that a warp copies at a time.
const GATHER_BYTES: u32 = VECTORS as u32 * 32 * 16;
/// Scales that the elements of a piece have, one byte each.
const SCALES: u32 = GATHER_BYTES / SCALE_BLOCK;
const _: () = assert!(SCALES <= 32, "a lane copies one");

/// Copies each local expert's rows to where the expert's part of the copy begins, one after the
/// other.
#[kernel(threads = 512, registers = 64, dependent, block >= 32)]
pub unsafe fn low_latency_gather(args: LowLatencyGatherArgs) {
    let pieces = args.row_bytes.div_ceil(GATHER_BYTES);
    assume(pieces >= 1);
    let mut experts = experts_from(&args, 0, 0);
    // Rows are numbered through all experts, and consecutive pieces of a row lie on different
    // multiprocessors. So no multiprocessor idles where counts differ.
    let mut number = tid() / 32 * nctaid() + ctaid();
    loop {
        let row = number / pieces;
        while row >= experts.end && experts.first + 32 < args.local_experts {
            experts = experts_from(&args, experts.first + 32, experts.end);
        }
        if row >= experts.end {
            break;
        }
        let (lane, index) = experts.find(row);
        copy_piece(&args, experts.first + lane, index, number % pieces);
        number += nctaid() * (ntid() / 32);
    }
}

/// The rows of the local experts from `first` on, one to a lane; those in front of them have
/// `before` rows. The whole warp calls it.
///
/// # Safety
/// Loads that are made lie in the table; all lanes are here.
#[device]
unsafe fn experts_from(args: &LowLatencyGatherArgs, first: u32, before: u32) -> Segments {
    let expert = first + laneid();
    let mut count = 0;
    if expert < args.local_experts {
        count = args.expert_counts.ld(expert).min(args.rows);
    }
    Segments::new(first, before, count)
}

/// Copies piece `piece` of an expert's row `index`, with the scales of its elements. The whole warp
/// calls it.
///
/// # Safety
/// The row is one of those received.
#[device]
unsafe fn copy_piece(args: &LowLatencyGatherArgs, expert: u32, index: u32, piece: u32) {
    let slot = expert * args.rows + index;
    let row = args.expert_rows.ld(slot);
    if row >= args.rows {
        return;
    }
    let (lane, bytes) = (laneid(), args.row_bytes as u64);
    let (from, to) = (args.recv_x.row(row, row_stride(bytes)), args.x.row(slot, bytes));
    let at = |vector: usize| piece * GATHER_BYTES + (vector as u32 * 32 + lane) * 16;
    let mut vectors = [[0; 4]; VECTORS];
    // The loads have no condition, so that all are in flight together.
    unroll!(4, J => { vectors[J] = ld_stream_v4(from + inside(at(J), args.row_bytes) as u64) });
    let scale = piece * SCALES + lane;
    if lane < SCALES && scale < args.num_scales {
        let value = args.recv_scales.ld(row_major(scale, args.rows, row));
        // An expert's scales are transposed, as those received are.
        let of_expert = row_major(expert, args.num_scales, scale);
        args.scales.st(row_major(of_expert, args.rows, index), value);
    }
    unroll!(4, J => {
        if at(J) < args.row_bytes {
            st_v4(to + at(J) as u64, vectors[J]);
        }
    });
}
