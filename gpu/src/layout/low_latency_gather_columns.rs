//! Low latency: the expert-major copy of the columns of received rows.

use epoxide_simt::{Global, kernel_args};

use super::assert::layout_assert;

/// Arguments of `low_latency_gather_columns`. `rows` stands for `num_ranks * max_tokens`.
#[kernel_args(requires(self.local_experts >= 1, self.num_words >= 1))]
pub struct LowLatencyGatherColumnsArgs {
    /// In: i32 `[local_experts]`.
    pub expert_counts: Global<u32>,
    /// In: i32 `[local_experts, rows]`, the received row of each of an expert's.
    pub expert_rows: Global<u32>,
    /// In: i32 `[num_words, rows]`.
    pub recv_columns: Global<u32>,
    /// Out: i32 `[local_experts, num_words, rows]`; as many of each expert's rows as it has.
    pub columns: Global<u32>,
    /// Places for received rows.
    pub rows: u32,
    /// Experts of this rank.
    pub local_experts: u32,
    /// Words of a row.
    pub num_words: u32,
    /// Zero.
    pub reserved: u32,
}

layout_assert!(LowLatencyGatherColumnsArgs, size = 48, num_words at 40);
