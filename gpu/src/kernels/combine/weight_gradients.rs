//! The gradients of the weights that experts' rows are summed with.
//!
//! Soundness: the kernel reads rows and tables that are not written meanwhile, as many as the plan
//! has, and each row of the output has one warp. Collectives stand where all lanes of a warp
//! arrive: the conditions around them are the same in all lanes.

use super::stage::rows_of_plan;
use crate::layout::{PlanHeader, PlanStatus, WeightGradientsArgs};
use crate::simt::*;

/// Writes the inner product of a row's gradient and of what its expert made of the row, in FP32, to
/// the column of the entry that selected the expert. Other columns become 0. One warp per row.
#[kernel(threads = 512, registers = 64, block >= 32)]
pub unsafe fn weight_gradients(args: WeightGradientsArgs) {
    if ld_u32(field!(args.header.0, PlanHeader.status)) != PlanStatus::Ready as u32 {
        return;
    }
    let (lane, warps) = (laneid(), ntid() / 32);
    let rows = rows_of_plan(args.header.0).min(args.num_rows);
    stride!(row in ctaid() * warps + tid() / 32..rows, nctaid() * warps => {
        let row = row as u64;
        let grad = args.grad_rows.row(row, args.grad_stride);
        let mut own = 0.0;
        if args.src_idx.is_null() {
            stride!(k in 0..args.num_topk => {
                let entry = row_major(row, args.num_topk, k);
                if args.entries.array::<i64>().ld(entry) >= 0 {
                    let product = inner_product(&args, grad, args.expert_rows.row(entry, args.expert_stride));
                    own = if lane == k { product } else { own };
                }
            });
        } else if args.src_idx.ld(row) >= 0 {
            // An entry has two words: the source rank, then k.
            let k = ld_u32(args.entries.array::<[u32; 2]>().at(row) + 4);
            let product = inner_product(&args, grad, args.expert_rows.row(row, args.expert_stride));
            own = if lane == k { product } else { own };
        }
        if lane < args.columns {
            args.out.st(row_major(row, args.columns, lane), own);
        }
    });
}

/// The inner product of two rows, summed in FP32 in a fixed order. The whole warp calls it.
///
/// # Safety
/// Both rows are live, for so many bytes.
#[device]
unsafe fn inner_product(args: &WeightGradientsArgs, a: u64, b: u64) -> f32 {
    let (mut sum, mut at) = (0.0, laneid() * 16);
    while at < args.row_bytes {
        let (left, right) = (ld_stream_v4(a + at as u64), ld_stream_v4(b + at as u64));
        if args.is_f32 != 0 {
            unroll!(4, J => { sum += f32::from_bits(left[J]) * f32::from_bits(right[J]) });
        } else {
            unroll!(4, J => {
                sum += bf16x2_lo(left[J]) * bf16x2_lo(right[J]);
                sum += bf16x2_hi(left[J]) * bf16x2_hi(right[J]);
            });
        }
        at += 512;
    }
    warp_sum_f32(sum)
}
