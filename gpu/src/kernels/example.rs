//! The kernels of `examples/moe_model`: top-k routing, SwiGLU, and products of rows by expert with
//! the experts' matrices. Short rather than fast.
//!
//! Soundness: the kernels use only weak loads and stores, of memory that no other kernel writes
//! meanwhile, and each element of an output has one thread. Rows in the own pool are the caller's
//! between dispatch and combine. Collectives stand where all lanes of a warp arrive: the bounds of
//! the loops around them are the same in all lanes.

use core::f32::consts::LOG2_E;

use crate::layout::{MoeGemmArgs, MoeGemmWeightsArgs, MoeSwigluArgs, MoeTopkArgs};
use crate::simt::*;

/// The rows of an expert.
///
/// # Safety
/// Both tables have an entry for it.
#[device]
unsafe fn rows_of(expert: u32, starts: Global<i32>, counts: Global<i32>) -> core::ops::Range<u32> {
    let start = starts.ld(expert) as u32;
    start..start + counts.ld(expert) as u32
}

/// Multiplies each row by the matrix of its expert: `c = a * b`, summed in FP32 from the first
/// element to the last.
///
/// A block takes every n-th row of an expert, a thread two columns at a time.
#[kernel(threads = 256, registers = 64, block >= 32)]
pub unsafe fn moe_gemm(args: MoeGemmArgs) {
    let (k, n) = (args.k as u64, args.n as u64);
    stride!(expert in 0..args.num_experts => {
        let b = args.b.array::<u16>().at(expert as u64 * k * n);
        let rows = rows_of(expert, args.starts, args.counts);
        stride!(row in rows.start + ctaid()..rows.end, nctaid() => {
            let a = args.a.row(row, args.a_stride);
            let c = args.c.row(row, args.c_stride);
            stride!(column in tid() as u64 * 2..n, ntid() as u64 * 2 => {
                let (mut lo, mut hi) = (0.0, 0.0);
                if args.transposed == 0 {
                    stride!(i in 0..k, 2 => {
                        let pair = ld_u32(a + i * 2);
                        let at = b + (i * n + column) * 2;
                        let (even, odd) = (ld_u32(at), ld_u32(at + n * 2));
                        lo += bf16x2_lo(pair) * bf16x2_lo(even);
                        hi += bf16x2_lo(pair) * bf16x2_hi(even);
                        lo += bf16x2_hi(pair) * bf16x2_lo(odd);
                        hi += bf16x2_hi(pair) * bf16x2_hi(odd);
                    });
                } else {
                    stride!(i in 0..k, 2 => {
                        let pair = ld_u32(a + i * 2);
                        let at = b + (column * k + i) * 2;
                        let (left, right) = (ld_u32(at), ld_u32(at + k * 2));
                        lo += bf16x2_lo(pair) * bf16x2_lo(left);
                        hi += bf16x2_lo(pair) * bf16x2_lo(right);
                        lo += bf16x2_hi(pair) * bf16x2_hi(left);
                        hi += bf16x2_hi(pair) * bf16x2_hi(right);
                    });
                }
                if args.c_is_f32 != 0 {
                    let at = Global::<f32>::new(c).at(column);
                    if args.accumulate != 0 {
                        lo += ld_f32(at);
                        hi += ld_f32(at + 4);
                    }
                    st_f32(at, lo);
                    st_f32(at + 4, hi);
                } else {
                    if args.accumulate != 0 {
                        let pair = ld_u32(c + column * 2);
                        lo += bf16x2_lo(pair);
                        hi += bf16x2_hi(pair);
                    }
                    st_u32(c + column * 2, pack_bf16x2(lo, hi));
                }
            });
        });
    });
}

/// The gradient of each expert's matrix: `c = sum over its rows of a[row] * b[row]`, in FP32 and in
/// the order of the rows. It is 0 for an expert without rows.
///
/// A block takes every n-th pair of a matrix's rows, a thread two of their columns at a time.
#[kernel(threads = 256, registers = 64, block >= 32)]
pub unsafe fn moe_gemm_weights(args: MoeGemmWeightsArgs) {
    let (pairs, n) = (args.m / 2, args.n as u64);
    stride!(expert in 0..args.num_experts => {
        let rows = rows_of(expert, args.starts, args.counts);
        stride!(pair in ctaid()..pairs, nctaid() => {
            let c = args.c.skip(row_major(expert * args.m + pair * 2, n, 0));
            stride!(column in tid() as u64 * 2..n, ntid() as u64 * 2 => {
                let (mut upper_lo, mut upper_hi, mut lower_lo, mut lower_hi) = (0.0, 0.0, 0.0, 0.0);
                stride!(row in rows.start..rows.end => {
                    let a = Global::<u32>::new(args.a.row(row, args.a_stride)).ld(pair);
                    let b = ld_u32(args.b.row(row, args.b_stride) + column * 2);
                    upper_lo += bf16x2_lo(a) * bf16x2_lo(b);
                    upper_hi += bf16x2_lo(a) * bf16x2_hi(b);
                    lower_lo += bf16x2_hi(a) * bf16x2_lo(b);
                    lower_hi += bf16x2_hi(a) * bf16x2_hi(b);
                });
                st_f32(c.at(column), upper_lo);
                st_f32(c.at(column) + 4, upper_hi);
                st_f32(c.at(n + column), lower_lo);
                st_f32(c.at(n + column) + 4, lower_hi);
            });
        });
    });
}

#[device]
fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + ex2_approx(-x * LOG2_E))
}

/// `product = gate * sigmoid(gate) * up`, computed in FP32 and rounded once.
#[kernel(threads = 256, registers = 64, block >= 32)]
pub unsafe fn moe_swiglu(args: MoeSwigluArgs) {
    let n = args.intermediate as u64;
    stride!(expert in 0..args.num_experts => {
        let rows = rows_of(expert, args.starts, args.counts);
        stride!(row in rows.start + ctaid()..rows.end, nctaid() => {
            let gate_up = args.gate_up.array::<u32>().at(row_major(row, n, 0));
            let product = args.product.array::<u16>().at(row_major(row, n, 0));
            stride!(column in tid() as u64 * 2..n, ntid() as u64 * 2 => {
                let (gate, up) = (ld_u32(gate_up + column * 2), ld_u32(gate_up + (n + column) * 2));
                let lo = bf16x2_lo(gate) * sigmoid(bf16x2_lo(gate)) * bf16x2_lo(up);
                let hi = bf16x2_hi(gate) * sigmoid(bf16x2_hi(gate)) * bf16x2_hi(up);
                st_u32(product + column * 2, pack_bf16x2(lo, hi));
            });
        });
    });
}

/// Gradients of gate and up, and the product, each times `weight`, for the product's gradient.
#[device]
fn swiglu_backward(gate: f32, up: f32, grad: f32, weight: f32) -> (f32, f32, f32) {
    let s = sigmoid(gate);
    let weighted = weight * grad;
    let grad_gate = weighted * up * s * (1.0 + gate * (1.0 - s));
    (grad_gate, weighted * gate * s, weight * gate * s * up)
}

/// The backward of [`MoeSwiglu`] for rows that are multiplied by a weight behind their expert.
#[kernel(threads = 256, registers = 64, block >= 32)]
pub unsafe fn moe_swiglu_backward(args: MoeSwigluArgs) {
    let n = args.intermediate as u64;
    stride!(expert in 0..args.num_experts => {
        let rows = rows_of(expert, args.starts, args.counts);
        stride!(row in rows.start + ctaid()..rows.end, nctaid() => {
            let gate_up = args.gate_up.array::<u32>().at(row_major(row, n, 0));
            let grad_gate_up = args.grad_gate_up.array::<u32>().at(row_major(row, n, 0));
            let product = args.product.array::<u16>().at(row_major(row, n, 0));
            let weight =
                if args.weights.is_null() { 1.0 } else { args.weights.ld(row) };
            stride!(column in tid() as u64 * 2..n, ntid() as u64 * 2 => {
                let (gate, up) = (ld_u32(gate_up + column * 2), ld_u32(gate_up + (n + column) * 2));
                let grad = ld_u32(product + column * 2);
                let (gate_lo, up_lo, lo) =
                    swiglu_backward(bf16x2_lo(gate), bf16x2_lo(up), bf16x2_lo(grad), weight);
                let (gate_hi, up_hi, hi) =
                    swiglu_backward(bf16x2_hi(gate), bf16x2_hi(up), bf16x2_hi(grad), weight);
                st_u32(grad_gate_up + column * 2, pack_bf16x2(gate_lo, gate_hi));
                st_u32(grad_gate_up + (n + column) * 2, pack_bf16x2(up_lo, up_hi));
                st_u32(product + column * 2, pack_bf16x2(lo, hi));
            });
        });
    });
}

/// Selects the `num_topk` experts with the largest logits of every token, the lowest expert first
/// among equals, and weighs them. Logits must be numbers. One warp per token.
#[kernel(threads = 256, registers = 64, block >= 32)]
pub unsafe fn moe_topk(args: MoeTopkArgs) {
    let (lane, warps) = (laneid(), ntid() / 32);
    stride!(token in ctaid() * warps + tid() / 32..args.num_tokens, nctaid() * warps => {
        let logits = args.logits.skip(row_major(token, args.num_experts, 0));
        let (mut last, mut last_id) = (f32::INFINITY, 0);
        let (mut first, mut own, mut own_id) = (0.0, 0.0, 0);
        stride!(k in 0..args.num_topk => {
            // The largest of those behind the last one that was selected.
            let (mut best, mut best_id) = (f32::NEG_INFINITY, u32::MAX);
            stride!(expert in lane..args.num_experts, 32 => {
                let logit = logits.ld(expert);
                let is_behind = logit < last || (logit == last && expert > last_id);
                if (is_behind || k == 0) && (logit > best || best_id == u32::MAX) {
                    (best, best_id) = (logit, expert);
                }
            });
            unroll!(5, N => {
                let other = f32::from_bits(shfl_bfly_u32::<{ 16 >> N }>(best.to_bits()));
                let other_id = shfl_bfly_u32::<{ 16 >> N }>(best_id);
                if other_id != u32::MAX && (other > best || (other == best && other_id < best_id)) {
                    (best, best_id) = (other, other_id);
                }
            });
            (last, last_id) = (best, best_id);
            first = if k == 0 { best } else { first };
            if lane == k {
                (own, own_id) = (best, best_id);
            }
        });
        let is_own = lane < args.num_topk;
        let score = if args.sigmoid != 0 { sigmoid(own) } else { ex2_approx((own - first) * LOG2_E) };
        let sum = warp_sum_f32(if is_own { score } else { 0.0 });
        if is_own {
            let entry = row_major(token, args.num_topk, lane);
            st_i64(args.topk_idx.at(entry), own_id as i64);
            st_f32(args.topk_weights.at(entry), score / sum);
        }
    });
}

/// The gradients of the logits, 0 for experts that a token did not select. One warp per token.
#[kernel(threads = 256, registers = 64, block >= 32)]
pub unsafe fn moe_topk_backward(args: MoeTopkArgs) {
    let (lane, warps) = (laneid(), ntid() / 32);
    let pairs = args.num_experts / 2;
    stride!(token in ctaid() * warps + tid() / 32..args.num_tokens, nctaid() * warps => {
        let entry = row_major(token, args.num_topk, lane);
        let is_own = lane < args.num_topk;
        let id = ld_i64_if(is_own, args.topk_idx.at(entry), 0) as u32;
        let weight = ld_f32_if(is_own, args.topk_weights.at(entry));
        let grads = args.grad_topk_weights.row(token, args.grad_stride);
        let grad = ld_f32_if(is_own, Global::<f32>::new(grads).at(lane));
        // Weights sum to 1, so a change of one score changes all of them.
        let mean = warp_sum_f32(if is_own { weight * grad } else { 0.0 });
        let mut own = weight * (grad - mean);
        if args.sigmoid != 0 {
            let logit = args.logits.ld(row_major(token, args.num_experts, id));
            own *= 1.0 - sigmoid(logit);
        }
        let out = args.grad_logits.array::<u32>();
        stride!(first in 0..pairs, 32 => {
            let pair = first + lane;
            let (mut lo, mut hi) = (0.0, 0.0);
            stride!(k in 0..args.num_topk => {
                let (theirs, expert) = (f32::from_bits(shfl_u32(own.to_bits(), k)), shfl_u32(id, k));
                lo += if expert == pair * 2 { theirs } else { 0.0 };
                hi += if expert == pair * 2 + 1 { theirs } else { 0.0 };
            });
            if pair < pairs {
                out.st(row_major(token, pairs, pair), pack_bf16x2(lo, hi));
            }
        });
    });
}
