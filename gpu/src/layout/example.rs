//! The argument structs of the example's kernels.

use epoxide_simt::{Global, kernel_args};

use super::assert::layout_assert;
use super::device_ptr::DevicePtr;

/// Arguments of `moe_gemm`.
#[kernel_args(requires(self.k.is_multiple_of(2), self.n.is_multiple_of(2)))]
pub struct MoeGemmArgs {
    /// In: bf16 rows of `k` elements, `a_stride` bytes apart.
    pub a: DevicePtr,
    /// Bytes from one row of `a` to the next.
    pub a_stride: u64,
    /// In: bf16 `[num_experts, k, n]`, or `[num_experts, n, k]` where `transposed` is 1.
    pub b: DevicePtr,
    /// Out: rows of `n` elements, `c_stride` bytes apart.
    pub c: DevicePtr,
    /// Bytes from one row of `c` to the next.
    pub c_stride: u64,
    /// In: i32 `[num_experts]`, the first row of each expert.
    pub starts: Global<i32>,
    /// In: i32 `[num_experts]`, the rows of each expert.
    pub counts: Global<i32>,
    /// Experts, each with a matrix.
    pub num_experts: u32,
    /// Elements of a row of `a`.
    pub k: u32,
    /// Elements of a row of `c`.
    pub n: u32,
    /// 1 where matrices are `[n, k]`.
    pub transposed: u32,
    /// 1 where products are added to what `c` has.
    pub accumulate: u32,
    /// 1 where `c` is f32, 0 where it is bf16.
    pub c_is_f32: u32,
}

layout_assert!(MoeGemmArgs, size = 80, c_is_f32 at 76);

/// Arguments of `moe_gemm_weights`.
#[kernel_args(requires(self.m.is_multiple_of(2), self.n.is_multiple_of(2)))]
pub struct MoeGemmWeightsArgs {
    /// In: bf16 rows of `m` elements, `a_stride` bytes apart.
    pub a: DevicePtr,
    /// Bytes from one row of `a` to the next.
    pub a_stride: u64,
    /// In: bf16 rows of `n` elements, `b_stride` bytes apart.
    pub b: DevicePtr,
    /// Bytes from one row of `b` to the next.
    pub b_stride: u64,
    /// Out: f32 `[num_experts, m, n]`.
    pub c: Global<f32>,
    /// In: i32 `[num_experts]`, the first row of each expert.
    pub starts: Global<i32>,
    /// In: i32 `[num_experts]`, the rows of each expert.
    pub counts: Global<i32>,
    /// Experts, each with a matrix.
    pub num_experts: u32,
    /// Elements of a row of `a`.
    pub m: u32,
    /// Elements of a row of `b`.
    pub n: u32,
    /// Not used.
    pub reserved: u32,
}

layout_assert!(MoeGemmWeightsArgs, size = 72, reserved at 68);

/// Arguments of `moe_swiglu` and `moe_swiglu_backward`.
#[kernel_args(requires(self.intermediate.is_multiple_of(2)))]
pub struct MoeSwigluArgs {
    /// In: bf16 `[rows, 2 * intermediate]`: of each row first the gate's elements, then the others.
    pub gate_up: DevicePtr,
    /// Out, and of the backward in: bf16 `[rows, intermediate]`. The backward reads the gradient of
    /// the product and leaves the product times the row's weight.
    pub product: DevicePtr,
    /// Out, of the backward alone: bf16 `[rows, 2 * intermediate]`.
    pub grad_gate_up: DevicePtr,
    /// In, of the backward alone: f32 `[rows]`, or null for 1.
    pub weights: Global<f32>,
    /// In: i32 `[num_experts]`, the first row of each expert.
    pub starts: Global<i32>,
    /// In: i32 `[num_experts]`, the rows of each expert.
    pub counts: Global<i32>,
    /// Experts.
    pub num_experts: u32,
    /// Elements of a product.
    pub intermediate: u32,
}

layout_assert!(MoeSwigluArgs, size = 56, intermediate at 52);

/// Arguments of `moe_topk` and `moe_topk_backward`.
#[kernel_args(requires(
    self.num_experts.is_multiple_of(2),
    self.num_topk >= 1,
    self.num_topk <= 32,
    self.num_topk <= self.num_experts,
))]
pub struct MoeTopkArgs {
    /// In: f32 `[num_tokens, num_experts]`.
    pub logits: Global<f32>,
    /// Out, and of the backward in: i64 `[num_tokens, num_topk]`.
    pub topk_idx: Global<i64>,
    /// Out, and of the backward in: f32 `[num_tokens, num_topk]`.
    pub topk_weights: Global<f32>,
    /// In, of the backward alone: f32 `[num_tokens, num_topk]`, `grad_stride` bytes apart.
    pub grad_topk_weights: DevicePtr,
    /// Bytes from one row of gradients to the next.
    pub grad_stride: u64,
    /// Out, of the backward alone: bf16 `[num_tokens, num_experts]`.
    pub grad_logits: DevicePtr,
    /// Tokens of this rank.
    pub num_tokens: u32,
    /// Experts of all ranks, an even number.
    pub num_experts: u32,
    /// Experts that a token selects.
    pub num_topk: u32,
    /// 0 for the softmax over the selected, 1 for sigmoids divided by their sum.
    pub sigmoid: u32,
}

layout_assert!(MoeTopkArgs, size = 64, sigmoid at 60);
