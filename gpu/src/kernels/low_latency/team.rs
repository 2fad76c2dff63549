//! Some of a block's warps, which meet without the others.

use crate::simt::*;

/// Warps of a block that follow each other: the first thread of the first one, and the number of
/// threads. They meet at a barrier of their own; the team that is the whole block at 0.
#[derive(Clone, Copy)]
pub(super) struct Team<const BARRIER: u32> {
    pub(super) first: u32,
    pub(super) threads: u32,
}

impl Team<0> {
    #[inline(always)]
    pub(super) fn block() -> Self {
        Team { first: 0, threads: ntid() }
    }
}

impl<const BARRIER: u32> Team<BARRIER> {
    /// Whether this thread's warp is one of the team.
    #[inline(always)]
    pub(super) fn has_this_warp(&self) -> bool {
        (tid() / 32).wrapping_sub(self.first / 32) < self.threads / 32
    }

    /// The number of this thread in the team.
    #[inline(always)]
    pub(super) fn thread(&self) -> u32 {
        tid() - self.first
    }

    /// Waits for the whole team.
    #[inline(always)]
    pub(super) unsafe fn sync(&self) {
        // SAFETY: the caller says that the whole team calls it.
        unsafe {
            if BARRIER == 0 {
                barrier_sync();
            } else {
                barrier_sync_part::<BARRIER>(self.threads);
            }
        }
    }
}
