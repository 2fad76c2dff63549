//! Cumulative counts: those of a dispatch are added to the caller's.
//!
//! Soundness: the kernel reads what earlier kernels of the stream wrote, and each count of the
//! caller's has one thread.

use crate::layout::{AddCountsArgs, LOCAL_RECORDED, PlanHeader, PlanStatus};
use crate::simt::*;

/// Adds the counts of a dispatch to cumulative ones, unless the dispatch has no plan or this rank has
/// recorded a failure. In low latency an expert id out of range is such a failure, though rows move.
#[kernel(threads = 256, registers = 32)]
pub unsafe fn add_counts(args: AddCountsArgs) {
    let is_planned =
        args.header.is_null() || ld_u32(field!(args.header.0, PlanHeader.status)) == PlanStatus::Ready as u32;
    if !is_planned || ld_u32(args.comm.local.0 + LOCAL_RECORDED) != 0 {
        return;
    }
    grid_stride!(at in 0..args.len as u32 => {
        args.cumulative.st(at, args.cumulative.ld(at).wrapping_add(args.counts.ld(at)));
    });
}
