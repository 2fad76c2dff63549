//! The two kernels of `examples/moe_layer.rs`: a router and the experts of a small MoE layer. Short
//! rather than fast.
//!
//! Soundness: the kernels use only weak loads and stores, of memory that no other kernel writes
//! meanwhile. The rows of the experts lie in the own pool, which is the caller's between dispatch
//! and combine.

use core::f32::consts::LOG2_E;

use crate::layout::{MoeExpertsArgs, MoeRouterArgs, row_stride};
use crate::simt::*;

/// Selects `num_topk` experts for every token, the largest logit `x * w` first and the lowest
/// expert first among equals, and weighs them by the softmax over those selected.
///
/// One warp per token, one lane per expert. A logit is summed in FP32 from the first element to the
/// last, each product rounded, so that a host can repeat it bit for bit. Logits must be numbers.
#[kernel(threads = 256, registers = 64, block >= 32)]
pub unsafe fn moe_router(args: MoeRouterArgs) {
    let (lane, warps, experts) = (laneid(), ntid() / 32, args.num_experts);
    // Lanes without an expert of their own repeat the last one: collectives need all lanes.
    let w = args.w.0 + lane.min(experts - 1) as u64 * 4;
    let w_row = experts as u64 * 4;
    stride!(token in ctaid() * warps + tid() / 32..args.num_tokens, nctaid() * warps => {
        let x = args.x.0 + token as u64 * args.hidden as u64 * 2;
        let mut logit = 0.0;
        stride!(i in 0..args.hidden as u64, 2 => {
            let pair = ld_u32(x + i * 2);
            logit += bf16x2_lo(pair) * ld_f32(w + i * w_row);
            logit += bf16x2_hi(pair) * ld_f32(w + (i + 1) * w_row);
        });

        // How many experts come before this one, and the largest logit of all.
        let (mut place, mut largest, mut other) = (0, logit, 0);
        while other < experts {
            let theirs = f32::from_bits(shfl_u32(logit.to_bits(), other));
            place += (theirs > logit || (theirs == logit && other < lane)) as u32;
            largest = if theirs > largest { theirs } else { largest };
            other += 1;
        }
        let selected = lane < experts && place < args.num_topk;
        let power = if selected { ex2_approx((logit - largest) * LOG2_E) } else { 0.0 };
        let mut sum = 0.0;
        stride!(other in 0..experts => {
            sum += f32::from_bits(shfl_u32(power.to_bits(), other));
        });
        if selected {
            let entry = token as u64 * args.num_topk as u64 + place as u64;
            st_i64(args.topk_idx.0 + entry * 8, lane as i64);
            st_f32(args.topk_weights.0 + entry * 4, power / sum);
        }
    });
}

/// Runs the local experts on received rows: `out = sum over k of weight[k] * (x * w[expert[k]])`,
/// summed in FP32 and rounded once.
///
/// A block takes every n-th row, a thread two columns at a time. How many rows there are is read on
/// the device, so no host has to know.
#[kernel(threads = 256, registers = 64, block >= 32)]
pub unsafe fn moe_experts(args: MoeExpertsArgs) {
    let hidden = args.hidden as u64;
    let stride = row_stride(hidden * 2);
    let rows = ld_u32(args.num_rows.0).min(args.capacity);
    stride!(row in ctaid()..rows, nctaid() => {
        let x = args.x.0 + row as u64 * stride;
        let out = args.out.0 + row as u64 * stride;
        stride!(column in tid() as u64 * 2..hidden, ntid() as u64 * 2 => {
            let (mut out_lo, mut out_hi) = (0.0, 0.0);
            stride!(k in 0..args.num_topk => {
                let entry = row as u64 * args.num_topk as u64 + k as u64;
                let expert = ld_i64(args.topk_idx.0 + entry * 8);
                if expert >= 0 && expert < args.local_experts as i64 {
                    let weight = ld_f32(args.topk_weights.0 + entry * 4);
                    let w = args.w.0 + (expert as u64 * hidden * hidden + column) * 2;
                    let (mut lo, mut hi) = (0.0, 0.0);
                    stride!(i in 0..hidden, 2 => {
                        let pair = ld_u32(x + i * 2);
                        let (w_even, w_odd) = (ld_u32(w + i * hidden * 2), ld_u32(w + (i + 1) * hidden * 2));
                        lo += bf16x2_lo(pair) * bf16x2_lo(w_even);
                        hi += bf16x2_lo(pair) * bf16x2_hi(w_even);
                        lo += bf16x2_hi(pair) * bf16x2_lo(w_odd);
                        hi += bf16x2_hi(pair) * bf16x2_hi(w_odd);
                    });
                    out_lo += weight * lo;
                    out_hi += weight * hi;
                }
            });
            st_u32(out + column * 2, pack_bf16x2(out_lo, out_hi));
        });
    });
}
