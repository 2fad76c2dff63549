//! The argument structs of kernels of backward passes.

use epoxide_simt::{Global, kernel_args};

use super::assert::layout_assert;
use super::device_ptr::DevicePtr;

/// Arguments of `weight_gradients`.
#[kernel_args(requires(
    self.row_bytes.is_multiple_of(16),
    self.grad_stride.is_multiple_of(16),
    self.expert_stride.is_multiple_of(16),
    self.num_topk <= self.columns,
    self.columns <= 32,
))]
pub struct WeightGradientsArgs {
    /// In: a gradient for each received row, `grad_stride` bytes apart.
    pub grad_rows: DevicePtr,
    /// Bytes from one gradient to the next, a multiple of 16.
    pub grad_stride: u64,
    /// In: experts' rows, `expert_stride` bytes apart. There is one for each received row where
    /// rows are by expert, else one for each entry of it.
    pub expert_rows: DevicePtr,
    /// Bytes from one experts' row to the next, a multiple of 16.
    pub expert_stride: u64,
    /// In: `recv_src_entry` i32 `[num_rows, 2]` where rows are by expert, else `recv_topk_idx` i64
    /// `[num_rows, num_topk]`.
    pub entries: DevicePtr,
    /// In: i32 `[num_rows]`, -1 in padding, where rows are by expert; else null.
    pub src_idx: Global<i32>,
    /// In: [`super::PlanHeader`], for the number of rows.
    pub header: DevicePtr,
    /// Out: f32 `[num_rows, columns]`.
    pub out: Global<f32>,
    /// Rows of the tensors.
    pub num_rows: u32,
    /// Bytes per row, a multiple of 16.
    pub row_bytes: u32,
    /// Entries per token.
    pub num_topk: u32,
    /// Columns of the output: a lane has one.
    pub columns: u32,
    /// 1 where elements are f32, 0 where they are bf16.
    pub is_f32: u32,
    /// Not used.
    pub reserved: u32,
}

layout_assert!(WeightGradientsArgs, size = 88, reserved at 84);
