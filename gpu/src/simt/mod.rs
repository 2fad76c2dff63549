//! The kernel DSL: one `#[inline(always)]` function per PTX idea, named as PTX names it. Each function's doc shows the
//! line it emits.
//!
//! Everything that orders memory or crosses lanes goes through here, never through `core::sync::atomic` read-modify-write
//! (rustc drops its ordering on this target) and never through `_syncthreads` (LLVM may duplicate it). Addresses are
//! plain `u64` for global memory and `u32` offsets for shared memory, which is what the instructions take.
//!
//! What is sound wherever it is called, such as reading a special register, is a safe function. What takes an address, or counts on
//! other lanes, is not.
//!
//! On the host these functions exist so that kernels type-check, documentation builds and editors work; calling one
//! there panics.

/// Writes each function twice: with its body for the device, and as a stub for the host. A macro can repeat an `unsafe` that it has
/// met only by a variable that was inside the repetition: that is what the one behind `@` is for, which never matches.
macro_rules! device_fns {
    ($( $(#[$meta:meta])* pub $(unsafe $(@$unsafe:tt)?)? fn $name:ident $(<const $cg:ident : $cgt:ty>)? ( $($arg:ident : $ty:ty),* $(,)? ) $(-> $ret:ty)? $body:block )*) => {
        $(
            $(#[$meta])*
            #[cfg(target_arch = "nvptx64")]
            #[inline(always)]
            pub $(unsafe $(@$unsafe)?)? fn $name $(<const $cg: $cgt>)? ($($arg: $ty),*) $(-> $ret)? $body

            $(#[$meta])*
            #[cfg(not(target_arch = "nvptx64"))]
            pub $(unsafe $(@$unsafe)?)? fn $name $(<const $cg: $cgt>)? ($($arg: $ty),*) $(-> $ret)? {
                $(let _ = $arg;)*
                $crate::simt::device_only(stringify!($name))
            }
        )*
    };
}

mod bulk;
mod convert;
mod memory;
mod nvvm;
mod order;
mod sreg;
mod warp;

pub mod mbarrier;

pub use bulk::*;
pub use convert::*;
pub use memory::*;
pub use order::*;
pub use sreg::*;
pub use warp::*;

pub(crate) use nvvm::assume;

#[cfg(not(target_arch = "nvptx64"))]
fn device_only(name: &str) -> ! {
    panic!("{name} runs on the device only")
}
