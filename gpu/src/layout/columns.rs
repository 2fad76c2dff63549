//! Columns: bytes of a token that travel with its row, such as scales. Those of one token lie
//! together, as a record, in the place of its scales.

use epoxide_simt::{Global, kernel_args};

use super::assert::layout_assert;
use super::device_ptr::DevicePtr;

/// Most columns that travel with a row.
pub const MAX_COLUMNS: usize = 4;

/// Bytes that a column takes in a record: each begins at a multiple of 4.
#[inline(always)]
pub const fn column_stride(bytes: u32) -> u32 {
    (bytes + 3) & !3
}

/// Arguments of `pack_columns`.
#[kernel_args(requires(
    self.record_bytes.is_multiple_of(4),
    self.record_bytes >= 4,
    self.record_bytes as u64 >= column_stride(self.bytes_0) as u64
        + column_stride(self.bytes_1) as u64
        + column_stride(self.bytes_2) as u64
        + column_stride(self.bytes_3) as u64,
))]
pub struct PackArgs {
    /// In, or null: the first column, u8 `[num_tokens, bytes_0]`.
    pub column_0: DevicePtr,
    /// In, or null: the second column.
    pub column_1: DevicePtr,
    /// In, or null: the third column.
    pub column_2: DevicePtr,
    /// In, or null: the fourth column.
    pub column_3: DevicePtr,
    /// Out: u32 `[num_tokens, record_bytes / 4]`.
    pub records: DevicePtr,
    /// Bytes of the first column of a token.
    pub bytes_0: u32,
    /// Bytes of the second column of a token.
    pub bytes_1: u32,
    /// Bytes of the third column of a token.
    pub bytes_2: u32,
    /// Bytes of the fourth column of a token.
    pub bytes_3: u32,
    /// Bytes of a record, a multiple of 4; those behind the last column are 0.
    pub record_bytes: u32,
    /// Tokens of this rank.
    pub num_tokens: u32,
}

layout_assert!(PackArgs, size = 64, num_tokens at 60);

/// Arguments of `transpose_column`.
#[kernel_args(requires(
    self.record_bytes.is_multiple_of(4),
    self.num_words <= self.record_bytes / 4,
    self.out_stride >= self.num_rows as u64,
))]
pub struct TransposeArgs {
    /// In: [`super::PlanHeader`], for the number of rows.
    pub header: DevicePtr,
    /// In: the first word of the column of the first row, u32, `record_bytes` from row to row.
    pub words: DevicePtr,
    /// Out: u32 `[num_words, out_stride]`.
    pub out: Global<u32>,
    /// In, or null where rows are not by expert: u32 `[local_experts]`, rows of each expert.
    pub expert_counts: Global<u32>,
    /// In, or null where rows are not by expert: u32 `[local_experts]`, the first row of each.
    pub expert_starts: Global<u32>,
    /// Words from one row of `out` to the next.
    pub out_stride: u64,
    /// Bytes of a record.
    pub record_bytes: u32,
    /// Words of the column.
    pub num_words: u32,
    /// Most rows.
    pub num_rows: u32,
    /// Experts on each rank.
    pub local_experts: u32,
}

layout_assert!(TransposeArgs, size = 64, local_experts at 60);
