//! Some of a block's warps, which meet without the others.

use crate::simt::*;

/// The first warps of a block, with so many threads. They meet at a barrier of their own; the team that is the whole block at 0.
#[derive(Clone, Copy)]
pub(super) struct Team<const BARRIER: u32> {
    pub(super) threads: u32,
}

impl Team<0> {
    #[inline(always)]
    pub(super) fn block() -> Self {
        Team { threads: ntid() }
    }
}

impl<const BARRIER: u32> Team<BARRIER> {
    /// Whether this thread's warp is one of the team.
    #[inline(always)]
    pub(super) fn has_this_warp(&self) -> bool {
        tid() / 32 < self.threads / 32
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
