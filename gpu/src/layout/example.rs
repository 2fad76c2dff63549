//! The argument structs of the example's kernels.

use epoxide_simt::kernel_args;

use super::assert::layout_assert;
use super::device_ptr::DevicePtr;

/// Arguments of `moe_router`.
#[kernel_args(requires(
    self.hidden.is_multiple_of(8),
    self.num_experts >= 1,
    self.num_experts <= 32,
    self.num_topk >= 1,
    self.num_topk <= self.num_experts,
))]
pub struct MoeRouterArgs {
    /// In: bf16 `[num_tokens, hidden]`, contiguous.
    pub x: DevicePtr,
    /// In: f32 `[hidden, num_experts]`.
    pub w: DevicePtr,
    /// Out: i64 `[num_tokens, num_topk]`.
    pub topk_idx: DevicePtr,
    /// Out: f32 `[num_tokens, num_topk]`.
    pub topk_weights: DevicePtr,
    /// Tokens of this rank.
    pub num_tokens: u32,
    /// Elements per row, a multiple of 8.
    pub hidden: u32,
    /// Experts of all ranks, at most 32.
    pub num_experts: u32,
    /// Experts that a token selects.
    pub num_topk: u32,
}

layout_assert!(MoeRouterArgs, size = 48, num_topk at 44);

/// Arguments of `moe_experts`.
#[kernel_args(requires(self.hidden.is_multiple_of(8), self.num_topk >= 1))]
pub struct MoeExpertsArgs {
    /// In: received rows, bf16 `[num_rows, hidden]` at the pool's stride.
    pub x: DevicePtr,
    /// In: local ids or -1, i64 `[num_rows, num_topk]`.
    pub topk_idx: DevicePtr,
    /// In: f32 `[num_rows, num_topk]`.
    pub topk_weights: DevicePtr,
    /// In: rows received, u32.
    pub num_rows: DevicePtr,
    /// In: bf16 `[local_experts, hidden, hidden]`, one row per element of x.
    pub w: DevicePtr,
    /// Out: bf16 `[num_rows, hidden]` at the pool's stride.
    pub out: DevicePtr,
    /// Rows there is room for.
    pub capacity: u32,
    /// Elements per row, a multiple of 8.
    pub hidden: u32,
    /// Experts on this rank.
    pub local_experts: u32,
    /// Entries per row.
    pub num_topk: u32,
}

layout_assert!(MoeExpertsArgs, size = 64, num_topk at 60);
