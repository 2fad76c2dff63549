//! Shared-memory barriers that also count bytes (`mbarrier`), as a typestate: only a barrier that
//! has been initialised can be armed or waited for.

use core::marker::PhantomData;

#[cfg(target_arch = "nvptx64")]
use core::arch::asm;

use crate::device;

/// State of a barrier whose memory is not initialised.
#[derive(Clone, Copy)]
pub struct Uninit;
/// State of a barrier that can be used.
#[derive(Clone, Copy)]
pub struct Ready;

/// A barrier at an offset of the block's shared memory. Eight bytes, 8-byte aligned.
#[derive(Clone, Copy)]
pub struct Mbarrier<State> {
    offset: u32,
    state: PhantomData<State>,
}

impl Mbarrier<Uninit> {
    /// Bytes of shared memory per barrier.
    pub const BYTES: u32 = 8;

    /// The barrier at `offset`.
    ///
    /// # Safety
    /// `offset` is inside the block's shared memory, 8-byte aligned, and used for nothing else.
    #[device]
    pub unsafe fn at(offset: u32) -> Self {
        Self { offset, state: PhantomData }
    }

    /// Expects `count` arrivals per phase. One thread calls it. A barrier afterwards makes it
    /// visible to other threads, and
    /// [`fence_proxy_async_shared`](super::fence_proxy_async_shared) to the copy engine.
    /// `mbarrier.init.shared.b64 [m], count;`
    ///
    /// # Safety
    /// No thread uses the barrier yet.
    #[device]
    pub unsafe fn init(self, count: u32) -> Mbarrier<Ready> {
        mbarrier_init(self.offset, count);
        Mbarrier { offset: self.offset, state: PhantomData }
    }

    /// The barrier, which another lane has initialised.
    ///
    /// # Safety
    /// Another lane's initialisation is ordered before this call.
    #[device]
    pub unsafe fn assume_ready(self) -> Mbarrier<Ready> {
        Mbarrier { offset: self.offset, state: PhantomData }
    }
}

impl Mbarrier<Ready> {
    /// Offset in the shared window.
    #[device]
    pub fn offset(self) -> u32 {
        self.offset
    }

    /// Arrives once and expects `bytes` more of this phase.
    /// `mbarrier.arrive.expect_tx.shared.b64 _, [m], bytes;`
    ///
    /// # Safety
    /// The phase still lacks this arrival.
    #[device]
    pub unsafe fn arrive_expect_tx(self, bytes: u32) {
        mbarrier_arrive_expect_tx(self.offset, bytes)
    }

    /// Waits until the phase of this parity has completed; then the bytes it counted are visible.
    ///
    /// # Safety
    /// The phase will complete: its copies are under way.
    #[device]
    pub unsafe fn wait(self, parity: u32) {
        while !mbarrier_try_wait_parity(self.offset, parity) {}
    }
}

device_fns! {
    /// `mbarrier.init.shared.b64 [m], count;`
    ///
    /// # Safety
    /// See [`Mbarrier::init`].
    pub unsafe fn mbarrier_init(m: u32, count: u32) {
        // SAFETY: the caller vouches for the offset.
        unsafe { asm!("mbarrier.init.shared.b64 [{m}], {c};", m = in(reg32) m, c = in(reg32) count, options(nostack)) };
    }

    /// Makes initialised barriers visible to the other blocks of a cluster.
    /// `fence.mbarrier_init.release.cluster;`
    pub fn fence_mbarrier_init() {
        // SAFETY: orders memory only.
        unsafe { asm!("fence.mbarrier_init.release.cluster;", options(nostack)) };
    }

    /// `mbarrier.arrive.expect_tx.shared.b64 _, [m], bytes;`
    ///
    /// # Safety
    /// See [`Mbarrier::arrive_expect_tx`].
    pub unsafe fn mbarrier_arrive_expect_tx(m: u32, bytes: u32) {
        // SAFETY: the caller vouches for the barrier.
        unsafe {
            asm!("mbarrier.arrive.expect_tx.shared.b64 _, [{m}], {n};", m = in(reg32) m, n = in(reg32) bytes, options(nostack))
        };
    }

    /// True when the phase of this parity has completed; may sleep for a while first.
    /// `mbarrier.try_wait.parity.shared.b64 p, [m], parity;`
    ///
    /// # Safety
    /// See [`Mbarrier::wait`].
    pub unsafe fn mbarrier_try_wait_parity(m: u32, parity: u32) -> bool {
        let done: u32;
        // SAFETY: the caller vouches for the barrier.
        unsafe {
            asm!("{{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [{m}], {q}; selp.u32 {d}, 1, 0, p; }}",
                m = in(reg32) m, q = in(reg32) parity, d = out(reg32) done, options(nostack))
        };
        done != 0
    }
}
