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
    #[device]
    pub(super) fn block() -> Self {
        Team { first: 0, threads: ntid() }
    }
}

impl<const BARRIER: u32> Team<BARRIER> {
    /// Whether this thread's warp is one of the team.
    #[device]
    pub(super) fn has_this_warp(&self) -> bool {
        (tid() / 32).wrapping_sub(self.first / 32) < self.threads / 32
    }

    /// The number of this thread in the team.
    #[device]
    pub(super) fn thread(&self) -> u32 {
        tid() - self.first
    }

    /// The number of this thread's warp in the team.
    #[device]
    pub(super) fn warp(&self) -> u32 {
        tid() / 32 - self.first / 32
    }

    /// Warps of the team.
    #[device]
    pub(super) fn warps(&self) -> u32 {
        self.threads / 32
    }

    /// Waits for the whole team, and returns whether `is` was true in any of its threads. `words`:
    /// two words of shared memory, zero before vote 0; votes that follow each other take turns with
    /// them, so that no word is written before all have read it.
    ///
    /// Words, since no barrier takes the vote of some of a block's warps (docs/KERNELS.md).
    ///
    /// # Safety
    /// The whole team calls it.
    #[device]
    pub(super) unsafe fn any<const N: usize>(&self, is: bool, words: SharedArray<u32, N>, vote: u32) -> bool {
        if BARRIER == 0 {
            return barrier_any(is);
        }
        let word = words.at(vote & 1);
        if is {
            red_relaxed_cta_shared_add_u32(word, 1);
        }
        self.sync();
        ld_shared_u32(word) != 0
    }

    /// Waits for the whole team.
    ///
    /// # Safety
    /// The whole team calls it.
    #[device]
    pub(super) unsafe fn sync(&self) {
        if BARRIER == 0 {
            barrier_sync();
        } else {
            barrier_sync_part::<BARRIER>(self.threads);
        }
    }
}
