//! Bulk asynchronous copies (TMA) between global and shared memory. Addresses and sizes are
//! multiples of 16 bytes.

#[cfg(target_arch = "nvptx64")]
use core::arch::asm;

use super::device;
use super::mbarrier::{Mbarrier, Ready};

device_fns! {
    /// Starts a copy from shared to global memory in this thread's current bulk group. Other
    /// devices' memory is global memory too.
    /// `cp.async.bulk.global.shared::cta.bulk_group [dst], [src], bytes;`
    ///
    /// # Safety
    /// Both ranges are live until the group has completed; shared memory written by ordinary stores
    /// was followed by [`fence_proxy_async_shared`](super::fence_proxy_async_shared). All three
    /// values are multiples of 16.
    pub unsafe fn bulk_store(dst: u64, src_shared: u32, bytes: u32) {
        // SAFETY: the caller vouches for both ranges.
        unsafe {
            asm!("cp.async.bulk.global.shared::cta.bulk_group [{d}], [{s}], {n};",
                d = in(reg64) dst, s = in(reg32) src_shared, n = in(reg32) bytes, options(nostack))
        };
    }

    /// Closes this thread's bulk group; an empty group is fine. `cp.async.bulk.commit_group;`
    pub fn bulk_commit() {
        // SAFETY: bookkeeping of this thread's own copies.
        unsafe { asm!("cp.async.bulk.commit_group;", options(nostack)) };
    }

    /// Waits until at most `PENDING` of this thread's groups still have to *read* their shared
    /// memory. `cp.async.bulk.wait_group.read PENDING;`
    pub fn bulk_wait_read<const PENDING: u32>() {
        // SAFETY: waits for this thread's own copies.
        unsafe { asm!("cp.async.bulk.wait_group.read {n};", n = const PENDING, options(nostack)) };
    }

    /// Waits until at most `PENDING` of this thread's groups are incomplete; the writes of the
    /// others are visible to this thread. `cp.async.bulk.wait_group PENDING;`
    pub fn bulk_wait<const PENDING: u32>() {
        // SAFETY: waits for this thread's own copies.
        unsafe { asm!("cp.async.bulk.wait_group {n};", n = const PENDING, options(nostack)) };
    }

    /// Starts a copy from global to shared memory that completes `bytes` of the barrier's expected
    /// transactions. `cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [dst],
    /// [src], bytes, [mbar];`
    ///
    /// # Safety
    /// Both ranges are live until the barrier's phase has completed, no lane still reads
    /// `dst_shared`, and the barrier expects these bytes. All three values are multiples of 16.
    pub unsafe fn bulk_load_raw(dst_shared: u32, src: u64, bytes: u32, mbar_shared: u32) {
        // SAFETY: the caller vouches for both ranges and the barrier.
        unsafe {
            asm!("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{d}], [{s}], {n}, [{m}];",
                d = in(reg32) dst_shared, s = in(reg64) src, n = in(reg32) bytes, m = in(reg32) mbar_shared,
                options(nostack))
        };
    }
}

/// [`bulk_load_raw`] onto an initialised barrier.
///
/// # Safety
/// See [`bulk_load_raw`].
#[device]
pub unsafe fn bulk_load(dst_shared: u32, src: u64, bytes: u32, mbar: Mbarrier<Ready>) {
    bulk_load_raw(dst_shared, src, bytes, mbar.offset())
}
