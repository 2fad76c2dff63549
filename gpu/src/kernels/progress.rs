//! How far the warps of a block have come: most of them work, and the last one looks on and
//! delivers.

use crate::simt::*;

/// Warps of a block but the last, which posts puts.
///
/// # Safety
/// The host launches at least two warps, so that no division by their number needs a trap.
#[device]
pub unsafe fn workers() -> u32 {
    let workers = ntid() / 32 - 1;
    core::hint::assert_unchecked(workers >= 1);
    workers
}

/// Bytes of the progress words in shared memory: a word for each warp that a block can have.
pub const PROGRESS_BYTES: u32 = 128;

/// How far each warp of a block has come, in shared memory: the workers publish, one warp reads.
pub struct Progress {
    words: SharedArray<u32, 32>,
    workers: u32,
}

impl Progress {
    /// The words lie at offset `at` of dynamic shared memory, one for each of `workers` warps. All
    /// threads call it, and meet before any of them uses it.
    ///
    /// # Safety
    /// The host has sized shared memory for them; no thread reads them before the block has met.
    #[device]
    pub unsafe fn new(at: u32, workers: u32) -> Self {
        let words = SharedArray::new(dynamic_shared() + at);
        if tid() < workers {
            words.st(tid(), 0);
        }
        Progress { words, workers }
    }

    /// Publishes the progress of a worker warp, and the stores of the warp before it last met. One
    /// lane of the warp calls it.
    ///
    /// # Safety
    /// The word is this warp's.
    #[device]
    pub unsafe fn publish(&self, value: u32) {
        st_release_cta_shared_u32(self.words.at(tid() / 32), value)
    }

    /// The progress of the slowest worker. One warp calls it; every worker's stores up to that
    /// progress are visible to it.
    ///
    /// # Safety
    /// The words are inside shared memory.
    #[device]
    pub unsafe fn slowest(&self) -> u32 {
        let mut value = u32::MAX;
        if laneid() < self.workers {
            value = ld_acquire_cta_shared_u32(self.words.at(laneid()));
        }
        let slowest = redux_min(value);
        syncwarp();
        slowest
    }
}
