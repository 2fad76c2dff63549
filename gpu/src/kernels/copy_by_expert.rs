//! The copy of received rows to the segments of their experts, behind an ordinary dispatch. The
//! benchmark of rows by expert compares itself with it; no operation launches it.
//!
//! Soundness: the kernel reads rows, scales and places that are not written meanwhile. The caller
//! names each row of the output once, so it has one warp. Collectives stand where all lanes of a
//! warp arrive: every condition around them is the same in all lanes.

use super::dispatch::copy_scales;
use crate::layout::CopyByExpertArgs;
use crate::simt::*;

/// Copies each received row, and its scales, to up to `num_topk` rows of the output. A warp takes a
/// row at a time: it reads the row once, and lane k has the place of entry k.
#[kernel(threads = 512, registers = 80, dependent, block >= 32)]
pub unsafe fn copy_by_expert(args: CopyByExpertArgs) {
    let (lane, warps) = (laneid(), ntid() / 32);
    stride!(row in ctaid() * warps + tid() / 32..args.num_rows, nctaid() * warps => {
        let entry = args.places.at(row_major(row, args.num_topk, lane));
        let place = ld_i32_if(lane < args.num_topk, entry, -1) as u32;
        // -1 is behind all rows.
        let is_wanted = place < args.num_out_rows;
        let wanted = ballot(is_wanted);
        if args.num_scales != 0 {
            let scale_bytes = args.num_scales as u64 * 4;
            let to = args.out_scales.row(place, scale_bytes);
            // A choice would be made by a branch, with the collectives in both of its arms.
            let to = to & 0u64.wrapping_sub(is_wanted as u64);
            copy_scales(args.scales.row(row, scale_bytes), args.num_scales, to);
        }
        let from = args.rows.row(row, args.row_stride);
        // All lanes take the same number of turns, so that the shuffles stay full.
        let mut first = 0;
        while first < args.row_bytes {
            // Eight loads of a lane are in flight together.
            let at = first + lane * 16;
            let mut vectors = [[0; 4]; 8];
            unroll!(8, J => {
                let at = at + J as u32 * 512;
                vectors[J] = ld_stream_v4_if(at < args.row_bytes, from + at as u64);
            });
            let mut left = wanted;
            while left != 0 {
                let place = shfl_u32(place, left.trailing_zeros());
                left &= left - 1;
                let to = args.out.row(place, args.row_bytes);
                unroll!(8, J => {
                    let at = at + J as u32 * 512;
                    if at < args.row_bytes {
                        st_v4(to + at as u64, vectors[J]);
                    }
                });
            }
            first += 8 * 512;
        }
    });
}
