//! Collectives of a full warp. All 32 lanes must call them together, outside divergent code.

#[cfg(target_arch = "nvptx64")]
use core::arch::asm;

#[cfg(target_arch = "nvptx64")]
use super::nvvm;
use crate::device;

device_fns! {
    /// Waits for all lanes and orders their memory accesses. `bar.warp.sync 0xffffffff;`
    ///
    /// # Safety
    /// All 32 lanes call it.
    pub unsafe fn syncwarp() {
        // SAFETY: the caller vouches for the lanes.
        unsafe {
            nvvm::stay();
            #[cfg(not(epoxide_backend = "nvvm"))]
            asm!("bar.warp.sync 0xffffffff;", options(nostack));
        };
    }

    /// Bit i is lane i's predicate. `vote.sync.ballot.b32 r, p, 0xffffffff;`
    ///
    /// # Safety
    /// All 32 lanes call it.
    pub unsafe fn ballot(p: bool) -> u32 {
        let r: u32;
        // SAFETY: the caller vouches for the lanes.
        unsafe {
            nvvm::stay();
            asm!("{{ .reg .pred q; setp.ne.u32 q, {p}, 0; vote.sync.ballot.b32 {r}, q, 0xffffffff; }}",
                r = out(reg32) r, p = in(reg32) p as u32, options(nomem, nostack))
        };
        r
    }

    /// The value of lane `src`. `shfl.sync.idx.b32 r, v, src, 31, 0xffffffff;`
    ///
    /// # Safety
    /// All 32 lanes call it; `src` is below 32.
    pub unsafe fn shfl_u32(v: u32, src: u32) -> u32 {
        let r: u32;
        // SAFETY: the caller vouches for the lanes.
        unsafe {
            nvvm::stay();
            asm!("shfl.sync.idx.b32 {r}, {v}, {s}, 31, 0xffffffff;",
                r = out(reg32) r, v = in(reg32) v, s = in(reg32) src, options(nomem, nostack))
        };
        r
    }

    /// The value of the lane whose number differs in the bits of `MASK`.
    /// `shfl.sync.bfly.b32 r, v, MASK, 31, 0xffffffff;`
    ///
    /// # Safety
    /// All 32 lanes call it; `MASK` is below 32.
    pub unsafe fn shfl_bfly_u32<const MASK: u32>(v: u32) -> u32 {
        let r: u32;
        // SAFETY: the caller vouches for the lanes.
        unsafe {
            nvvm::stay();
            asm!("shfl.sync.bfly.b32 {r}, {v}, {m}, 31, 0xffffffff;",
                r = out(reg32) r, v = in(reg32) v, m = const MASK, options(nomem, nostack))
        };
        r
    }

    /// The bitwise or over all lanes. `redux.sync.or.b32 r, v, 0xffffffff;`
    ///
    /// # Safety
    /// All 32 lanes call it.
    pub unsafe fn redux_or(v: u32) -> u32 {
        let r: u32;
        // SAFETY: the caller vouches for the lanes.
        unsafe {
            nvvm::stay();
            asm!("redux.sync.or.b32 {r}, {v}, 0xffffffff;", r = out(reg32) r, v = in(reg32) v, options(nomem, nostack));
        };
        r
    }

    /// The minimum over all lanes. `redux.sync.min.u32 r, v, 0xffffffff;`
    ///
    /// # Safety
    /// All 32 lanes call it.
    pub unsafe fn redux_min(v: u32) -> u32 {
        let r: u32;
        // SAFETY: the caller vouches for the lanes.
        unsafe {
            nvvm::stay();
            asm!("redux.sync.min.u32 {r}, {v}, 0xffffffff;", r = out(reg32) r, v = in(reg32) v, options(nomem, nostack));
        };
        r
    }

    /// The sum over all lanes. `redux.sync.add.u32 r, v, 0xffffffff;`
    ///
    /// # Safety
    /// All 32 lanes call it.
    pub unsafe fn redux_add(v: u32) -> u32 {
        let r: u32;
        // SAFETY: the caller vouches for the lanes.
        unsafe {
            nvvm::stay();
            asm!("redux.sync.add.u32 {r}, {v}, 0xffffffff;", r = out(reg32) r, v = in(reg32) v, options(nomem, nostack));
        };
        r
    }
}

/// The value of lane `src`, 64 bits wide, as two shuffles.
///
/// # Safety
/// All 32 lanes call it; `src` is below 32.
#[device]
pub unsafe fn shfl_u64(v: u64, src: u32) -> u64 {
    shfl_u32(v as u32, src) as u64 | (shfl_u32((v >> 32) as u32, src) as u64) << 32
}

device_fns! {
    /// Bit i is whether lane i has the same value as this one. `match.any.sync.b32 r, v, 0xffffffff;`
    ///
    /// # Safety
    /// All 32 lanes call it.
    pub unsafe fn match_any(v: u32) -> u32 {
        let r: u32;
        // SAFETY: the caller vouches for the lanes.
        unsafe {
            nvvm::stay();
            asm!("match.any.sync.b32 {r}, {v}, 0xffffffff;", r = out(reg32) r, v = in(reg32) v, options(nomem, nostack));
        };
        r
    }
}
