//! The argument struct of `copy_by_expert`.

use epoxide_simt::{Global, kernel_args};

use super::assert::layout_assert;
use super::device_ptr::DevicePtr;

/// Arguments of `copy_by_expert`.
#[kernel_args(requires(
    self.row_bytes.is_multiple_of(16),
    self.row_stride.is_multiple_of(16),
    self.num_topk <= 32,
))]
pub struct CopyByExpertArgs {
    /// In: `[num_rows]` received rows of `row_bytes`, `row_stride` bytes apart.
    pub rows: DevicePtr,
    /// In: f32 `[num_rows, num_scales]`; not read if `num_scales` is 0.
    pub scales: DevicePtr,
    /// In: i32 `[num_rows, num_topk]`, the rows of `out` that a row is copied to; -1 for none.
    pub places: Global<i32>,
    /// Out: `[num_out_rows]` rows of `row_bytes`, back to back.
    pub out: DevicePtr,
    /// Out: f32 `[num_out_rows, num_scales]`.
    pub out_scales: DevicePtr,
    /// Bytes from one received row to the next, a multiple of 16.
    pub row_stride: u64,
    /// Received rows.
    pub num_rows: u32,
    /// Rows of `out`; places behind them are left out.
    pub num_out_rows: u32,
    /// Bytes per row, a multiple of 16.
    pub row_bytes: u32,
    /// Scales per row.
    pub num_scales: u32,
    /// Places per row, at most 32.
    pub num_topk: u32,
    /// 0.
    pub reserved: u32,
}

layout_assert!(CopyByExpertArgs, size = 72, num_topk at 64);
