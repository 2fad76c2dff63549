//! The floating-point mode of the processor while kernels run.
//!
//! A program that embeds the virtual GPU may have set its threads to flush subnormals: one that is
//! linked with `-ffast-math` does, and so does `torch.set_flush_denormal`. Threads pass the mode on
//! to those that they create. Results of kernels must not depend on it.

#[cfg(all(target_arch = "x86_64", not(miri)))]
use std::arch::asm;
use std::marker::PhantomData;

/// MXCSR of Rust: nothing is flushed, results are rounded to nearest, and no exception is a trap.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const IEEE: u32 = 0x1f80;

/// The bits of MXCSR that note which exceptions have occurred.
#[cfg(all(target_arch = "x86_64", not(miri)))]
const SEEN: u32 = 0x3f;

/// The mode that Rust assumes, until it is dropped: then the thread has its own mode again.
#[derive(Debug)]
pub(crate) struct IeeeMode {
    /// The thread's own mode, if it is another.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    own: Option<u32>,
    /// The mode is that of one thread.
    thread: PhantomData<*const ()>,
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
impl IeeeMode {
    #[inline]
    pub(crate) fn enter() -> Self {
        let mut now = 0u32;
        // SAFETY: the instruction stores MXCSR to the variable, and changes nothing else.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut now, options(nostack, preserves_flags)) };
        let own = (now & !SEEN != IEEE).then_some(now);
        if own.is_some() {
            set(IEEE);
        }
        Self { own, thread: PhantomData }
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
impl Drop for IeeeMode {
    #[inline]
    fn drop(&mut self) {
        if let Some(own) = self.own {
            set(own);
        }
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
#[cold]
fn set(mode: u32) {
    // SAFETY: the instruction loads MXCSR from the variable, which has no reserved bit: it is the
    // mode of Rust or one that the processor has stored. `IeeeMode` gives the thread its own back.
    unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const mode, options(nostack, preserves_flags)) };
}

#[cfg(not(all(target_arch = "x86_64", not(miri))))]
impl IeeeMode {
    pub(crate) fn enter() -> Self {
        Self { thread: PhantomData }
    }
}
