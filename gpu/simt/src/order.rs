//! Read-modify-write, fences and block barriers: everything that orders memory between threads.

#[cfg(target_arch = "nvptx64")]
use core::arch::asm;

device_fns! {
    /// Adds and publishes what this thread did before, to every device and the host.
    /// `red.release.sys.global.add.u64 [p], v;`
    ///
    /// # Safety
    /// `p` is a live, writable global address, 8-byte aligned.
    pub unsafe fn red_release_sys_add_u64(p: u64, v: u64) {
        // SAFETY: the caller vouches for `p`.
        unsafe { asm!("red.release.sys.global.add.u64 [{p}], {v};", p = in(reg64) p, v = in(reg64) v, options(nostack)) };
    }

    /// Adds, with no order, on this device. `red.relaxed.gpu.global.add.u32 [p], v;`
    ///
    /// # Safety
    /// `p` is a live, writable global address, 4-byte aligned.
    pub unsafe fn red_relaxed_gpu_add_u32(p: u64, v: u32) {
        // SAFETY: the caller vouches for `p`.
        unsafe { asm!("red.relaxed.gpu.global.add.u32 [{p}], {v};", p = in(reg64) p, v = in(reg32) v, options(nostack)) };
    }

    /// Adds, with no order, on this device. `red.relaxed.gpu.global.add.u64 [p], v;`
    ///
    /// # Safety
    /// `p` is a live, writable global address, 8-byte aligned.
    pub unsafe fn red_relaxed_gpu_add_u64(p: u64, v: u64) {
        // SAFETY: the caller vouches for `p`.
        unsafe { asm!("red.relaxed.gpu.global.add.u64 [{p}], {v};", p = in(reg64) p, v = in(reg64) v, options(nostack)) };
    }

    /// Sets bits, with no order, for every device and the host.
    /// `red.relaxed.sys.global.or.b64 [p], v;`
    ///
    /// # Safety
    /// `p` is a live, writable global address, 8-byte aligned.
    pub unsafe fn red_relaxed_sys_or_u64(p: u64, v: u64) {
        // SAFETY: the caller vouches for `p`.
        unsafe { asm!("red.relaxed.sys.global.or.b64 [{p}], {v};", p = in(reg64) p, v = in(reg64) v, options(nostack)) };
    }

    /// Lowers to the minimum, with no order, on this device.
    /// `red.relaxed.gpu.global.min.u64 [p], v;`
    ///
    /// # Safety
    /// `p` is a live, writable global address, 8-byte aligned.
    pub unsafe fn red_relaxed_gpu_min_u64(p: u64, v: u64) {
        // SAFETY: the caller vouches for `p`.
        unsafe { asm!("red.relaxed.gpu.global.min.u64 [{p}], {v};", p = in(reg64) p, v = in(reg64) v, options(nostack)) };
    }

    /// Raises to the maximum, with no order, on this device.
    /// `red.relaxed.gpu.global.max.u64 [p], v;`
    ///
    /// # Safety
    /// `p` is a live, writable global address, 8-byte aligned.
    pub unsafe fn red_relaxed_gpu_max_u64(p: u64, v: u64) {
        // SAFETY: the caller vouches for `p`.
        unsafe { asm!("red.relaxed.gpu.global.max.u64 [{p}], {v};", p = in(reg64) p, v = in(reg64) v, options(nostack)) };
    }

    /// Adds and returns the old value; ordered both ways on this device.
    /// `atom.acq_rel.gpu.global.add.u64 r, [p], v;`
    ///
    /// # Safety
    /// `p` is a live, writable global address, 8-byte aligned.
    pub unsafe fn atom_acq_rel_gpu_add_u64(p: u64, v: u64) -> u64 {
        let r: u64;
        // SAFETY: the caller vouches for `p`.
        unsafe {
            asm!("atom.acq_rel.gpu.global.add.u64 {r}, [{p}], {v};",
                r = out(reg64) r, p = in(reg64) p, v = in(reg64) v, options(nostack))
        };
        r
    }

    /// Adds and returns the old value, with no order, on this device.
    /// `atom.relaxed.gpu.global.add.u64 r, [p], v;`
    ///
    /// # Safety
    /// `p` is a live, writable global address, 8-byte aligned.
    pub unsafe fn atom_relaxed_gpu_add_u64(p: u64, v: u64) -> u64 {
        let r: u64;
        // SAFETY: the caller vouches for `p`.
        unsafe {
            asm!("atom.relaxed.gpu.global.add.u64 {r}, [{p}], {v};",
                r = out(reg64) r, p = in(reg64) p, v = in(reg64) v, options(nostack))
        };
        r
    }

    /// The same where `active`, else `otherwise`, with no branch; only a use of the value waits for
    /// it. `@active atom.relaxed.gpu.global.add.u64 r, [p], v;`
    ///
    /// # Safety
    /// Where `active`, `p` is a live, writable global address, 8-byte aligned.
    pub unsafe fn atom_relaxed_gpu_add_u64_if(active: bool, p: u64, v: u64, otherwise: u64) -> u64 {
        let r: u64;
        // SAFETY: the caller vouches for `p`.
        unsafe {
            asm!(
                "{{ .reg .pred q; setp.ne.u32 q, {a}, 0; mov.b64 {r}, {o}; \
                 @q atom.relaxed.gpu.global.add.u64 {r}, [{p}], {v}; }}",
                r = out(reg64) r, a = in(reg32) active as u32, p = in(reg64) p, v = in(reg64) v,
                o = in(reg64) otherwise, options(nostack)
            )
        };
        r
    }

    /// Swaps in `new` where the value is `expected`; returns the old value.
    /// `atom.acq_rel.gpu.global.cas.b32 r, [p], expected, new;`
    ///
    /// # Safety
    /// `p` is a live, writable global address, 4-byte aligned.
    pub unsafe fn atom_acq_rel_gpu_cas_u32(p: u64, expected: u32, new: u32) -> u32 {
        let r: u32;
        // SAFETY: the caller vouches for `p`.
        unsafe {
            asm!("atom.acq_rel.gpu.global.cas.b32 {r}, [{p}], {e}, {n};",
                r = out(reg32) r, p = in(reg64) p, e = in(reg32) expected, n = in(reg32) new, options(nostack))
        };
        r
    }

    /// Adds in shared memory, with no order. `red.relaxed.cta.shared.add.u32 [s], v;`
    ///
    /// # Safety
    /// `s` is an offset inside the block's shared memory, 4-byte aligned.
    pub unsafe fn red_relaxed_cta_shared_add_u32(s: u32, v: u32) {
        // SAFETY: the caller vouches for `s`.
        unsafe { asm!("red.relaxed.cta.shared.add.u32 [{s}], {v};", s = in(reg32) s, v = in(reg32) v, options(nostack)) };
    }

    /// Orders this thread's accesses, and the writes that it has observed, before its later
    /// accesses, for every device and the host. Behind it several relaxed stores release, each of
    /// which would otherwise wait by itself. `fence.acq_rel.sys;`
    pub fn fence_acq_rel_sys() {
        // SAFETY: orders memory only.
        unsafe { asm!("fence.acq_rel.sys;", options(nostack)) };
    }

    /// Waits until the kernels that this one was launched behind have ended; their writes are
    /// visible then.
    pub fn griddepcontrol_wait() {
        // SAFETY: orders memory only.
        unsafe { asm!("griddepcontrol.wait;", options(nostack)) };
    }

    /// Lets the next kernel be launched, once all blocks have executed this or ended.
    /// `griddepcontrol.launch_dependents;`
    pub fn griddepcontrol_launch_dependents() {
        // SAFETY: orders nothing; that kernel waits by itself.
        unsafe { asm!("griddepcontrol.launch_dependents;", options(nostack)) };
    }

    /// Orders ordinary accesses and those of the bulk copy engine (the async proxy).
    /// `fence.proxy.async;`
    pub fn fence_proxy_async() {
        // SAFETY: orders memory only.
        unsafe { asm!("fence.proxy.async;", options(nostack)) };
    }

    /// The same for global memory only. `fence.proxy.async.global;`
    pub fn fence_proxy_async_global() {
        // SAFETY: orders memory only.
        unsafe { asm!("fence.proxy.async.global;", options(nostack)) };
    }

    /// The same for shared memory only. `fence.proxy.async.shared::cta;`
    pub fn fence_proxy_async_shared() {
        // SAFETY: orders memory only.
        unsafe { asm!("fence.proxy.async.shared::cta;", options(nostack)) };
    }

    /// Waits for all threads of the block and orders their memory accesses.
    /// `bar.warp.sync 0xffffffff; barrier.sync 0;`
    ///
    /// First the lanes of the warp converge, then the warps of the block. The block's barrier alone
    /// does not hold back a diverged warp: some of its lanes may continue while others still wait
    /// (docs/KERNELS.md has the observations). It is the unaligned form, which stays legal where
    /// the compiler has copied it.
    ///
    /// # Safety
    /// Every live thread of the block reaches it.
    pub unsafe fn barrier_sync() {
        // SAFETY: the caller vouches for the arrival count, and with it for the lanes of each warp.
        unsafe {
            super::warp::syncwarp();
            #[cfg(epoxide_backend = "nvvm")]
            super::nvvm::barrier_sync();
            #[cfg(not(epoxide_backend = "nvvm"))]
            asm!("barrier.sync 0;", options(nostack));
        };
    }

    /// [`barrier_sync`], and whether `is` was true in any thread of the block.
    /// `bar.warp.sync 0xffffffff; barrier.red.or.aligned.pred p, 0, q;`
    ///
    /// The aligned form: in front of the other one, ptxas sends a diverged warp to a copy of the
    /// barrier (docs/KERNELS.md).
    ///
    /// # Safety
    /// Every live thread of the block reaches it.
    pub unsafe fn barrier_any(is: bool) -> bool {
        let any: u32;
        // SAFETY: the caller vouches for the arrival count, and with it for the lanes of each warp.
        unsafe {
            super::warp::syncwarp();
            asm!("{{ .reg .pred q; setp.ne.u32 q, {is}, 0; barrier.red.or.aligned.pred q, 0, q; selp.u32 {any}, 1, 0, q; }}",
                is = in(reg32) is as u32, any = out(reg32) any, options(nostack));
        }
        any != 0
    }

    /// [`barrier_sync`] of the threads of some warps alone, `threads` of them, at barrier
    /// `BARRIER`: 1 to 15, one for each group of warps.
    /// `bar.warp.sync 0xffffffff; barrier.sync BARRIER, threads;`
    ///
    /// # Safety
    /// Every live thread of those warps reaches it, and no other.
    pub unsafe fn barrier_sync_part<const BARRIER: u32>(threads: u32) {
        // SAFETY: the caller vouches for the arrival count, and with it for the lanes of each warp.
        unsafe {
            super::warp::syncwarp();
            #[cfg(epoxide_backend = "nvvm")]
            super::nvvm::barrier_sync_part(BARRIER, threads);
            #[cfg(not(epoxide_backend = "nvvm"))]
            asm!("barrier.sync {b}, {n};", b = const BARRIER, n = in(reg32) threads, options(nostack));
        };
    }

    /// Arrives at the barrier that other warps wait at with [`barrier_sync_part`], without waiting.
    /// The thread's stores are visible to them after it. `threads`: those that arrive and those
    /// that wait. `bar.warp.sync 0xffffffff; barrier.arrive BARRIER, threads;`
    ///
    /// # Safety
    /// Every live thread of these warps reaches it, and every live thread of the others waits.
    pub unsafe fn barrier_arrive_part<const BARRIER: u32>(threads: u32) {
        // SAFETY: the caller vouches for the arrival count, and with it for the lanes of each warp.
        unsafe {
            super::warp::syncwarp();
            asm!("barrier.arrive {b}, {n};", b = const BARRIER, n = in(reg32) threads, options(nostack));
        };
    }

    /// Sleeps for 0 to `2 * ns` nanoseconds, and for 1 ms at most. `nanosleep.u32 ns;`
    pub fn nanosleep(ns: u32) {
        // SAFETY: touches no memory; the clobber keeps polling loops honest.
        unsafe { asm!("nanosleep.u32 {n};", n = in(reg32) ns, options(nostack)) };
    }
}
