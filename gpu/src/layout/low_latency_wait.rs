//! Low latency: the wait between the halves of an operation, which is measured.

use epoxide_simt::{Global, kernel_args};

use super::assert::layout_assert;
use super::low_latency::LowLatencyArgs;
use super::low_latency_internode::LowLatencyMessages;

/// Arguments of `low_latency_wait` and `low_latency_internode_wait`.
#[kernel_args]
pub struct LowLatencyWaitArgs {
    /// Peers, place and shapes, as of the operation.
    pub common: LowLatencyArgs,
    /// Messages of the place, across nodes; else zero.
    pub messages: LowLatencyMessages,
    /// In and out: i64 `[num_ranks]`, ns that each rank has been waited for.
    pub waited: Global<u64>,
    /// Bytes of a row that a combine returns, as it travels; 0 where none travels.
    pub row_bytes: u32,
    /// 1 in a combine.
    pub is_combine: u32,
}

layout_assert!(LowLatencyWaitArgs, size = size_of::<LowLatencyArgs>() + 88, is_combine at size_of::<LowLatencyArgs>() + 84);
