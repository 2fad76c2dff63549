//! Additions that Rust-CUDA's back end needs beside the instructions themselves. With rustc's own
//! back end they do nothing.
//!
//! rustc_codegen_nvvm does not mark an `asm!` as a collective, which only all lanes together may
//! execute. So libNVVM copies a collective into both arms of a branch that lanes take differently:
//! some wait in one copy, the others in the other. An intrinsic that LLVM models as convergent
//! keeps its basic block from being copied.

use crate::device;

#[cfg(epoxide_backend = "nvvm")]
unsafe extern "C" {
    #[link_name = "llvm.nvvm.bar.warp.sync"]
    fn bar_warp_sync(mask: u32);
    #[link_name = "llvm.nvvm.barrier.sync"]
    fn barrier_sync_all(barrier: u32);
    #[link_name = "llvm.nvvm.barrier.sync.cnt"]
    fn barrier_sync_cnt(barrier: u32, threads: u32);
}

/// States a fact that libNVVM's LLVM 7 does not derive, so that a division would have a trap.
/// rustc's LLVM derives it and gets no statement: its PTX is unchanged.
///
/// # Safety
/// `condition` is true.
#[inline(always)]
pub unsafe fn assume(condition: bool) {
    #[cfg(epoxide_backend = "nvvm")]
    // SAFETY: the caller upholds the condition.
    unsafe {
        core::hint::assert_unchecked(condition)
    };
    #[cfg(not(epoxide_backend = "nvvm"))]
    let _ = condition;
}

/// `v`, but at least one: a divisor without a trap behind either back end. libNVVM does not find by
/// itself that a maximum with one is not zero.
#[device]
pub fn at_least_one(v: u32) -> u32 {
    let v = v.max(1);
    // SAFETY: a maximum with one is not zero.
    unsafe { assume(v != 0) };
    v
}

/// Keeps a loop in which one lane does more than the others as one loop. libNVVM would split it
/// into one loop for that lane and one for the others, and the lanes would diverge. With rustc's
/// own back end it does nothing; with libNVVM it is a `bar.warp.sync 0xffffffff;`.
///
/// # Safety
/// All 32 lanes call it.
#[device]
pub unsafe fn keep_loop() {
    #[cfg(target_arch = "nvptx64")]
    stay();
}

/// `v`, which is the same in all lanes, for a test after a divergent branch. libNVVM would
/// fold the test into the arms of the branch, so that a collective after the test would appear
/// to be in one arm. With rustc's own back end it does nothing; with libNVVM it is a
/// `mov.b32 r, v;`.
#[device]
pub fn same_in_lanes(v: u32) -> u32 {
    #[cfg(all(target_arch = "nvptx64", epoxide_backend = "nvvm"))]
    let v = crate::unknown(v);
    v
}

/// `v.trailing_zeros()`. Rust-CUDA's back end loses the bit counts of 64-bit numbers, so the halves
/// are counted there.
#[device]
pub fn trailing_zeros_u64(v: u64) -> u32 {
    #[cfg(not(epoxide_backend = "nvvm"))]
    let zeros = v.trailing_zeros();
    #[cfg(epoxide_backend = "nvvm")]
    let zeros = match (v as u32, (v >> 32) as u32) {
        (0, high) => 32 + high.trailing_zeros(),
        (low, _) => low.trailing_zeros(),
    };
    zeros
}

/// Keeps the collective of a warp that follows where the source has it:
/// `bar.warp.sync 0xffffffff;`, as an intrinsic.
///
/// # Safety
/// All 32 lanes call it.
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
pub(super) unsafe fn stay() {
    #[cfg(epoxide_backend = "nvvm")]
    // SAFETY: the caller vouches for the lanes.
    unsafe {
        bar_warp_sync(u32::MAX)
    };
}

/// `barrier.sync 0;`, as an intrinsic.
///
/// # Safety
/// Every live thread of the block reaches it.
#[cfg(epoxide_backend = "nvvm")]
#[inline(always)]
pub(super) unsafe fn barrier_sync() {
    // SAFETY: the caller vouches for the arrival count.
    unsafe { barrier_sync_all(0) };
}

/// `barrier.sync barrier, threads;`, as an intrinsic.
///
/// # Safety
/// Every live thread of so many warps reaches it.
#[cfg(epoxide_backend = "nvvm")]
#[inline(always)]
pub(super) unsafe fn barrier_sync_part(barrier: u32, threads: u32) {
    // SAFETY: the caller vouches for the arrival count.
    unsafe { barrier_sync_cnt(barrier, threads) };
}
