//! A warp's ring of shared-memory buffers, each filled by one bulk load and guarded by one
//! mbarrier.
//!
//! All warps' buffers come first in dynamic shared memory, then all barriers:
//! [`crate::layout::ring_bytes`] for them all.

use crate::simt::mbarrier::{Mbarrier, Ready};
use crate::simt::*;

/// One warp's part of the shared memory.
pub struct Ring {
    buffers: u32,
    barriers: u32,
    /// Buffers in the ring.
    pub count: u32,
    /// Bytes per buffer.
    pub bytes: u32,
}

/// A turn in a ring: which buffer, and which of its barrier's two phases.
pub struct Turn {
    /// The buffer.
    pub slot: u32,
    parity: u32,
}

impl Turn {
    /// The first turn.
    #[device]
    pub fn first() -> Self {
        Turn { slot: 0, parity: 0 }
    }

    /// The buffer of the turn before.
    #[device]
    pub fn slot_before(&self, ring: &Ring) -> u32 {
        (if self.slot == 0 { ring.count } else { self.slot }) - 1
    }

    /// Goes on to the next buffer.
    #[device]
    pub fn advance(&mut self, ring: &Ring) {
        self.slot += 1;
        if self.slot == ring.count {
            (self.slot, self.parity) = (0, self.parity ^ 1);
        }
    }
}

impl Ring {
    /// Lays the ring out and initialises its barriers. The whole warp calls it, if it is one of the
    /// first `warps`, which are those that have a ring.
    #[device]
    pub unsafe fn new(count: u32, bytes: u32, warps: u32) -> Self {
        let ring = Ring::lay_out(count, bytes, warps);
        ring.init();
        ring
    }

    /// Where the warp's ring is, if it is one of the first `warps`.
    #[device]
    pub fn lay_out(count: u32, bytes: u32, warps: u32) -> Self {
        Ring::at(dynamic_shared(), count, bytes, tid() / 32, warps)
    }

    /// Where the ring of warp `warp` is, of `warps` that have one, with all rings at `shared`.
    #[device]
    pub fn at(shared: u32, count: u32, bytes: u32, warp: u32, warps: u32) -> Self {
        let warp_bytes = count * bytes;
        let buffers = shared + warp * warp_bytes;
        let barriers = shared + warps * warp_bytes + warp * count * Mbarrier::BYTES;
        Ring { buffers, barriers, count, bytes }
    }

    /// Initialises its barriers. The whole warp calls it, if it has a ring.
    ///
    /// # Safety
    /// The host sizes dynamic shared memory for all warps. The barriers are this warp's own, and
    /// the warp meets before any lane uses them.
    #[device]
    pub unsafe fn init(&self) {
        if laneid() == 0 {
            stride!(slot in 0..self.count => {
                Mbarrier::at(self.barriers + slot * Mbarrier::BYTES).init(1);
            });
            // The copy engine completes on them in the async proxy.
            fence_proxy_async_shared();
        }
        syncwarp();
    }

    /// Offset of a buffer in the shared window.
    #[device]
    pub fn buffer(&self, slot: u32) -> u32 {
        self.buffers + slot * self.bytes
    }

    /// Waits until the load of this turn has landed.
    ///
    /// # Safety
    /// The caller has started that load.
    #[device]
    pub unsafe fn wait(&self, turn: &Turn) {
        self.barrier(turn.slot).wait(turn.parity)
    }

    /// One lane starts a load into a buffer that is not read any more.
    ///
    /// # Safety
    /// `from` is live, and no thread reads the buffer.
    #[device]
    pub unsafe fn load(&self, slot: u32, from: u64, bytes: u32) {
        self.expect(slot, bytes);
        self.load_at(slot, 0, from, bytes);
    }

    /// Expects the bytes of this turn's loads at the mbarrier; called before the loads.
    ///
    /// # Safety
    /// The turn before has been waited for, so the phase lacks its one arrival.
    #[device]
    pub unsafe fn expect(&self, slot: u32, bytes: u32) {
        self.barrier(slot).arrive_expect_tx(bytes)
    }

    /// Starts one of several loads into the buffer, at `offset`.
    ///
    /// # Safety
    /// `from` is live, and no thread reads the buffer.
    #[device]
    pub unsafe fn load_at(&self, slot: u32, offset: u32, from: u64, bytes: u32) {
        bulk_load(self.buffer(slot) + offset, from, bytes, self.barrier(slot))
    }

    /// # Safety
    /// `new` initialised it, ordered by its `syncwarp`.
    #[device]
    unsafe fn barrier(&self, slot: u32) -> Mbarrier<Ready> {
        Mbarrier::at(self.barriers + slot * Mbarrier::BYTES).assume_ready()
    }
}

/// The contiguous range of `count` items that this block owns: sizes differ by at most one.
#[device]
pub fn block_range(count: u32) -> (u32, u32) {
    share_of(count, ctaid(), nctaid())
}

/// The contiguous range of `count` items that is the share of block `block` of `blocks`: sizes
/// differ by at most one.
#[device]
pub fn share_of(count: u32, block: u32, blocks: u32) -> (u32, u32) {
    let (each, more) = (count / blocks, count % blocks);
    let begin = block * each + block.min(more);
    (begin, begin + each + (block < more) as u32)
}

/// The channel's range of `num_tokens` tokens: each has `ceil(num_tokens / channels)` until there
/// are none left.
#[device]
pub fn channel_range(num_tokens: u32, channels: u32, channel: u32) -> (u32, u32) {
    let each = num_tokens.div_ceil(channels);
    let begin = (each * channel).min(num_tokens);
    (begin, (begin + each).min(num_tokens))
}
