//! Counts and times that grow with each operation, in memory of the caller's.

use epoxide_gpu::kernels::AddCounts;
use epoxide_gpu::layout::{AddCountsArgs, Comm, DevicePtr};

use super::Choice;
use crate::driver::Stream;
use crate::ep::{DType, TypedTensor};
use crate::error::Result;

/// The name of the argument in both modes.
pub const CUMULATIVE_COUNTS: &str = "cumulative_counts";
/// Threads of the one block.
const THREADS: u32 = AddCounts::INFO.max_threads;

/// An error unless the tensor has a count for each local expert.
pub fn check_cumulative(counts: Option<&TypedTensor<'_, i32>>, local_experts: u32) -> Result<()> {
    let experts = ("local_experts", Some(local_experts.into()));
    counts.map_or(Ok(()), |counts| counts.expect(CUMULATIVE_COUNTS, &[DType::I32], &[experts]))
}

/// An error unless the tensor has a time for each rank.
pub fn check_wait_ns(times: &TypedTensor<'_, i64>, num_ranks: u32) -> Result<()> {
    times.expect("cumulative_wait_ns", &[DType::I64], &[("num_ranks", Some(num_ranks.into()))])
}

/// Enqueues the addition of a dispatch's `counts`, of `local_experts` experts, to cumulative ones.
/// `header`: that of its plan, or null.
///
/// # Safety
/// The addresses are live until the stream has passed the kernel.
pub unsafe fn add_counts(
    kernel: &Choice<AddCountsArgs>,
    stream: &Stream,
    comm: Comm,
    header: DevicePtr,
    counts: DevicePtr,
    (cumulative, local_experts): (DevicePtr, u32),
) -> Result<()> {
    let (counts, cumulative) = (counts.into(), cumulative.into());
    let args = AddCountsArgs { comm, counts, cumulative, header, len: local_experts.into() };
    // SAFETY: passed on to the caller.
    unsafe { kernel.call(stream, 1, THREADS, 0, args) }
}
