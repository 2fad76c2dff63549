//! Copies of rows by expert behind a dispatch that is launched as two halves: the kernel that moves
//! rows makes none then, so that it waits for no peer's rows.
//!
//! Soundness: `announce_tokens` runs behind the movement of rows, which all ranks had entered.
//! `copy_received_rows` runs behind `end_operation`, which has acquired that all peers are done: rows
//! and records are complete. Peers write other ones behind this rank's ready word of a later
//! dispatch, which follows in stream order. A row that is copied to has one writer. All loads and
//! stores have landed when a block ends.

use super::copies::{COPY_STAGES, Copies};
use crate::kernels::epoch::{current_epoch, warp_aborted};
use crate::kernels::ring::Ring;
use crate::layout::{DevicePtr, DispatchArgs, ExpertDispatchArgs, PlanHeader, PlanStatus};
use crate::simt::*;

/// Publishes at every other rank how many tokens this one has, for peers whose kernels wait for it
/// while they copy.
#[kernel(
    threads = 32, registers = 40, dependent, grid = 1, block = 32,
    requires(..DispatchArgs(args.dispatch))
)]
pub unsafe fn announce_tokens(args: ExpertDispatchArgs) {
    let comm = &args.dispatch.comm;
    let epoch = current_epoch(comm);
    if is_planned(args.dispatch.header) && !warp_aborted(comm) {
        Copies::of(&args).tell_tokens(&args.dispatch, epoch);
    }
}

/// Copies received rows to the places of further entries, for a dispatch that has just ended. A warp
/// takes every n-th token of each source.
#[kernel(
    threads = 192, registers = 96, dependent, block >= 32, shared = shared_bytes(&args, block),
    requires(..DispatchArgs(args.dispatch))
)]
pub unsafe fn copy_received_rows(args: ExpertDispatchArgs) {
    let (rows, warp, warps) = (&args.dispatch, tid() / 32, ntid() / 32);
    let ended = current_epoch(&rows.comm) - 1;
    if !is_planned(rows.header) || warp_aborted(&rows.comm) {
        return;
    }
    let ring = Ring::at(dynamic_shared(), COPY_STAGES, rows.stage_bytes, warp, warps);
    ring.init();
    Copies::of(&args).make_late(rows, ended, &ring, (ctaid() * warps + warp, nctaid() * warps));
    bulk_wait::<0>();
}

/// Whether rows had places, by the plan at `header`.
///
/// # Safety
/// The header is live, and an earlier kernel of the stream wrote it.
#[device]
unsafe fn is_planned(header: DevicePtr) -> bool {
    ld_u32(field!(header.0, PlanHeader.status)) == PlanStatus::Ready as u32
}

/// Shared memory of a block of so many threads: a ring for each warp.
#[cfg(not(target_arch = "nvptx64"))]
fn shared_bytes(args: &ExpertDispatchArgs, block: u32) -> u32 {
    crate::layout::shared_with_rings(block / 32, COPY_STAGES, args.dispatch.stage_bytes, 0)
}
