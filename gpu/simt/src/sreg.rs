//! Special registers.

#[cfg(target_arch = "nvptx64")]
use core::arch::asm;

macro_rules! sreg32 {
    ($($(#[$meta:meta])* $name:ident = $reg:literal in $first:literal $to:tt $last:literal;)*) => {
        device_fns! { $(
            $(#[$meta])*
            #[doc = concat!("`mov.u32 r, ", $reg, ";`")]
            pub fn $name() -> u32 {
                let r: u32;
                // SAFETY: reads a register that cannot change during the kernel.
                unsafe { asm!(concat!("mov.u32 {r}, ", $reg, ";"), r = out(reg32) r, options(pure, nomem, nostack)) };
                // SAFETY: the hardware's own bounds, so that no division by a dimension needs a
                // trap. libNVVM does not analyse `contains`, keeps its argument in memory, and does
                // not derive the bounds of a range. So each bound is stated by itself below.
                #[cfg(not(epoxide_backend = "nvvm"))]
                unsafe {
                    core::hint::assert_unchecked(($first $to $last).contains(&r))
                };
                // SAFETY: as above.
                #[cfg(epoxide_backend = "nvvm")]
                unsafe {
                    core::hint::assert_unchecked(matches!(r, $first..));
                    core::hint::assert_unchecked(matches!(r, 0 $to $last))
                };
                r
            }
        )* }
    };
}

sreg32! {
    /// Thread index in the block.
    tid = "%tid.x" in 0..1024;
    /// Threads per block.
    ntid = "%ntid.x" in 1..=1024;
    /// Block index in the grid.
    ctaid = "%ctaid.x" in 0..0x7fff_ffff;
    /// Blocks in the grid.
    nctaid = "%nctaid.x" in 1..=0x7fff_ffff;
    /// Lane in the warp, 0 to 31.
    laneid = "%laneid" in 0..32;
    /// Mask of the lanes below this one.
    lanemask_lt = "%lanemask_lt" in 0..0x8000_0000;
}

device_fns! {
    /// Nanoseconds of a clock that all devices of the machine share roughly.
    /// `mov.u64 r, %globaltimer;`
    pub fn globaltimer() -> u64 {
        let r: u64;
        // SAFETY: reads a clock; not `pure`, since it changes.
        unsafe { asm!("mov.u64 {r}, %globaltimer;", r = out(reg64) r, options(nomem, nostack)) };
        r
    }

    /// [`tid`], read again: for rarely executed code, where keeping it in a register would cost
    /// more. `mov.u32 r, %tid.x;`
    pub fn tid_now() -> u32 {
        let r: u32;
        // SAFETY: reads a register; not `pure`, so that it is not merged with `tid`.
        unsafe { asm!("mov.u32 {r}, %tid.x;", r = out(reg32) r, options(nomem, nostack)) };
        r
    }

    /// `v`, as a value that the compiler cannot analyse. `mov.b32 r, v;`
    ///
    /// LLVM does not unroll a loop whose counter goes through it ([`rolled!`](crate::rolled)).
    pub fn unknown(v: u32) -> u32 {
        let r: u32;
        // SAFETY: copies a register; not `pure`, so that it stays where it is.
        unsafe { asm!("mov.b32 {r}, {v};", r = out(reg32) r, v = in(reg32) v, options(nomem, nostack)) };
        r
    }

    /// Keeps ptxas from unrolling the loop whose body it begins ([`rolled!`](crate::rolled)).
    /// `.pragma "nounroll";`
    pub fn no_unroll() {
        // SAFETY: no instruction.
        unsafe { asm!(".pragma \"nounroll\";", options(nomem, nostack)) };
    }

    /// Offset of the block's dynamic shared memory in the shared window: as many bytes as the
    /// launch gives the block. `mov.u32 r, EPOXIDE_SHARED;`
    pub fn dynamic_shared() -> u32 {
        let r: u32;
        // SAFETY: takes the address of the symbol declared below.
        unsafe { asm!("mov.u32 {r}, EPOXIDE_SHARED;", r = out(reg32) r, options(pure, nomem, nostack)) };
        r
    }
}

#[cfg(target_arch = "nvptx64")]
core::arch::global_asm!(".extern .shared .align 128 .b8 EPOXIDE_SHARED[];");
