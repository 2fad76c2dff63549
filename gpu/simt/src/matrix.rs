//! Matrix instructions of a warp, and the copies that feed them. All work from sm_80 on.
//!
//! A warp holds a matrix in pieces. For an 8 x 8 matrix of 16-bit numbers, lane `t` holds numbers
//! `2 (t % 4)` and the next of row `t / 4`, as one register.

#[cfg(target_arch = "nvptx64")]
use core::arch::asm;

#[cfg(target_arch = "nvptx64")]
use super::nvvm;

device_fns! {
    /// Loads four 8 x 8 matrices of 16-bit numbers from shared memory. Lane `8 m + r` gives the
    /// offset of row `r` of matrix `m`, and each lane gets its piece of matrix `m` in `[m]`.
    /// `ldmatrix.sync.aligned.m8n8.x4.shared.b16 {..}, [row];`
    ///
    /// # Safety
    /// All 32 lanes call it. Each `row` is an offset inside the block's shared memory with 16 bytes
    /// behind it, a multiple of 16.
    pub unsafe fn ldmatrix_x4(row: u32) -> [u32; 4] {
        let (a, b, c, d): (u32, u32, u32, u32);
        // SAFETY: the caller vouches for the lanes and the offsets.
        unsafe {
            nvvm::stay();
            asm!(
                "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{{a}, {b}, {c}, {d}}}, [{s}];",
                a = out(reg32) a, b = out(reg32) b, c = out(reg32) c, d = out(reg32) d,
                s = in(reg32) row, options(nostack)
            )
        };
        [a, b, c, d]
    }

    /// The same, with each matrix transposed: a lane's piece is of column `t / 4`.
    /// `ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {..}, [row];`
    ///
    /// # Safety
    /// See [`ldmatrix_x4`].
    pub unsafe fn ldmatrix_x4_trans(row: u32) -> [u32; 4] {
        let (a, b, c, d): (u32, u32, u32, u32);
        // SAFETY: the caller vouches for the lanes and the offsets.
        unsafe {
            nvvm::stay();
            asm!(
                "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{{a}, {b}, {c}, {d}}}, [{s}];",
                a = out(reg32) a, b = out(reg32) b, c = out(reg32) c, d = out(reg32) d,
                s = in(reg32) row, options(nostack)
            )
        };
        [a, b, c, d]
    }

    /// `a * b + c` on the tensor cores, for `a` of 16 x 16 and `b` of 16 x 8 BF16 numbers, and `c`
    /// of 16 x 8 numbers. The order of a sum's products is the hardware's.
    /// `mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {..}, {a..}, {b..}, {c..};`
    ///
    /// The pieces of a lane, with 8 x 8 matrices as [`ldmatrix_x4`] loads them:
    ///
    /// | | holds |
    /// |---|---|
    /// | `a` | rows 0 to 7 and 8 to 15 of columns 0 to 7, then those of columns 8 to 15 |
    /// | `b` | rows 0 to 7, then rows 8 to 15, each transposed: [`ldmatrix_x4_trans`] |
    /// | `c` | columns `2 (t % 4)` and the next of row `t / 4`, then those of row `t / 4 + 8` |
    ///
    /// # Safety
    /// All 32 lanes call it.
    pub unsafe fn mma_m16n8k16_bf16(a: [u32; 4], b: [u32; 2], c: [f32; 4]) -> [f32; 4] {
        let [mut c0, mut c1, mut c2, mut c3] = c;
        // SAFETY: arithmetic on registers; the caller vouches for the lanes.
        unsafe {
            nvvm::stay();
            asm!(
                "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{c0}, {c1}, {c2}, {c3}}}, \
                 {{{a0}, {a1}, {a2}, {a3}}}, {{{b0}, {b1}}}, {{{c0}, {c1}, {c2}, {c3}}};",
                c0 = inout(reg32) c0, c1 = inout(reg32) c1, c2 = inout(reg32) c2, c3 = inout(reg32) c3,
                a0 = in(reg32) a[0], a1 = in(reg32) a[1], a2 = in(reg32) a[2], a3 = in(reg32) a[3],
                b0 = in(reg32) b[0], b1 = in(reg32) b[1], options(nomem, nostack)
            )
        };
        [c0, c1, c2, c3]
    }

    /// Starts a copy of 16 bytes from global to shared memory, in the thread's current group.
    /// The copy bypasses the first-level cache.
    /// `cp.async.cg.shared.global [dst_shared], [src], 16;`
    ///
    /// # Safety
    /// Both addresses are live until the group has completed, and multiples of 16. Nothing else
    /// accesses the 16 bytes of shared memory until then.
    pub unsafe fn cp_async_16(dst_shared: u32, src: u64) {
        // SAFETY: the caller vouches for both addresses.
        unsafe {
            asm!("cp.async.cg.shared.global [{d}], [{s}], 16;",
                d = in(reg32) dst_shared, s = in(reg64) src, options(nostack))
        };
    }

    /// Closes this thread's group of [`cp_async_16`]; an empty group is fine.
    /// `cp.async.commit_group;`
    pub fn cp_async_commit() {
        // SAFETY: bookkeeping of this thread's own copies.
        unsafe { asm!("cp.async.commit_group;", options(nostack)) };
    }

    /// Waits until at most the latest `PENDING` of this thread's groups are incomplete; the others'
    /// copies are then visible to this thread, and after a block barrier to the block.
    /// `cp.async.wait_group PENDING;`
    pub fn cp_async_wait<const PENDING: u32>() {
        // SAFETY: waits for this thread's own copies.
        unsafe { asm!("cp.async.wait_group {n};", n = const PENDING, options(nostack)) };
    }
}
