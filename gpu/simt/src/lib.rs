//! A small language for GPU kernels: Rust functions that become PTX entries, with one
//! `#[inline(always)]` function per PTX instruction, named as PTX names it. Each function's
//! documentation shows the line that it emits.
//!
//! ```
//! use epoxide_simt::*;
//!
//! /// `out[i] = a[i] + b[i]`
//! #[kernel(
//!     threads = 256, grid = len.div_ceil(256).min(1024), block = 256,
//!     requires(len >= 1, len <= 1 << 31)
//! )]
//! pub unsafe fn add(a: Global<f32>, b: Global<f32>, out: Global<f32>, len: u32) {
//!     grid_stride!(i in 0..len => {
//!         out.st(i, a.ld(i) + b.ld(i));
//!     });
//! }
//! # // On the host, the kernel is a type whose calls are checked.
//! # let call = Add::call(Global::new(0), Global::new(0), Global::new(0), 1000).unwrap();
//! # assert_eq!(call.shape().unwrap(), launch::Shape { grid: 4, block: 256, shared_bytes: 0 });
//! # let error = Add::call(Global::new(0), Global::new(0), Global::new(0), 0).err().unwrap();
//! # assert_eq!(error.to_string(), "kernel add requires len >= 1: 0 against 1");
//! ```
//!
//! [`kernel`] makes two things of the function. For a GPU it is the PTX entry `add`, which
//! `cargo build-ptx` compiles (the package `epoxide-build-ptx`). For the host it is the type `Add`.
//! `Add::call(..)` checks the clauses and returns a [`launch::Call`] with the parameters and the
//! shape of the launch.
//!
//! Everything that orders memory or crosses lanes goes through this crate. It never goes through
//! `core::sync::atomic` read-modify-write, whose ordering rustc drops on this target, and never
//! through `_syncthreads`, which LLVM may duplicate. Addresses are `u64` for global memory and
//! `u32` offsets for shared memory, because that is what the instructions take. [`Global`] and
//! [`SharedArray`] put a type on them.
//!
//! Functions that are sound wherever they are called, such as reading a special register, are safe.
//! Functions that take an address, or that rely on other lanes, are unsafe.
//!
//! On the host these functions exist so that kernels type-check, documentation builds and editors
//! work. Calling one there panics.
//!
//! A crate of kernels needs no attribute and no panic handler: `cargo build-ptx` sets the former,
//! and this crate has the latter. On the device there is `core` and no `std`.
#![no_std]
#![cfg_attr(target_arch = "nvptx64", feature(asm_experimental_arch))]
#![cfg_attr(
    epoxide_backend = "nvvm",
    allow(unused_features, internal_features),
    feature(link_llvm_intrinsics)
)]

#[cfg(not(target_arch = "nvptx64"))]
extern crate alloc;
// The attributes write paths that begin with the crate's name; its own tests and examples use them
// too.
extern crate self as epoxide_simt;

/// Writes each function twice: with its body for the device, and as a stub for the host. A macro
/// can repeat a matched `unsafe` only with a variable from inside the repetition. The one behind
/// `@`, which never matches, is there for that.
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
                $crate::device_only(stringify!($name))
            }
        )*
    };
}

mod bulk;
mod convert;
mod device_ptr;
mod entry;
mod global;
mod loops;
mod matrix;
mod memory;
mod nvvm;
mod order;
mod reduce;
mod shared;
mod sreg;
mod warp;

#[cfg(not(target_arch = "nvptx64"))]
pub mod launch;
pub mod mbarrier;
#[cfg(not(target_arch = "nvptx64"))]
pub mod ptx;

pub use bulk::*;
pub use convert::*;
pub use device_ptr::DevicePtr;
/// ```
/// use epoxide_simt::*;
///
/// /// The sum of the first two elements.
/// ///
/// /// # Safety
/// /// The array is live and has two elements.
/// #[device]
/// unsafe fn first_two(x: Global<u32>) -> u32 {
///     x.ld(0) + x.ld(1)
/// }
/// ```
///
/// A function that is not unsafe itself needs a block for unsafe things, and so does its caller
/// for a function that is:
///
/// ```compile_fail,E0133
/// # use epoxide_simt::*;
/// #[device]
/// fn first(x: Global<u32>) -> u32 {
///     x.ld(0)
/// }
/// ```
///
/// ```compile_fail,E0133
/// # use epoxide_simt::*;
/// # #[device]
/// # unsafe fn first_two(x: Global<u32>) -> u32 {
/// #     x.ld(0) + x.ld(1)
/// # }
/// fn caller(x: Global<u32>) -> u32 {
///     first_two(x)
/// }
/// ```
pub use epoxide_macros::device;
/// ```
/// # #![deny(warnings)]
/// use epoxide_simt::*;
///
/// /// `out[i] = i` for an even number of elements.
/// #[kernel(threads = 256, requires(len >= 1))]
/// #[allow(clippy::cast_possible_wrap)]
/// pub unsafe fn count(out: Global<u32>, mut len: u32) {
///     len -= len % 2;
///     grid_stride!(i in 0..len => { out.st(i, i) });
/// }
/// # fn main() {
/// assert!(Count::call(Global::new(16), 2).is_ok());
/// # }
/// ```
///
/// A kernel has no generics and returns nothing:
///
/// ```compile_fail
/// # use epoxide_simt::*;
/// #[kernel(threads = 256)]
/// pub unsafe fn fill<const N: u32>(out: Global<u32>, len: u32) {
///     block_stride!(i in 0..len => { out.st(i, N) });
/// }
/// ```
pub use epoxide_macros::kernel;
/// ```
/// use epoxide_simt::*;
///
/// #[kernel_args(requires(self.len >= 1))]
/// pub struct Rows {
///     pub data: Global<u32>,
///     pub len: u64,
/// }
///
/// #[kernel(threads = 256, requires(args.len <= 1000))]
/// pub unsafe fn clear(args: Rows) {
///     block_stride!(i in 0..args.len as u32 => { args.data.st(i, 0) });
/// }
/// # fn main() {
/// let error = Clear::call(Rows { data: Global::new(16), len: 0 }).err().unwrap();
/// assert_eq!(error.to_string(), "kernel clear requires args.len >= 1: 0 against 1");
/// # }
/// ```
///
/// Clauses name fields, and fields have names:
///
/// ```compile_fail
/// #[epoxide_simt::kernel_args(requires(len >= 1))]
/// pub struct Rows {
///     pub len: u64,
/// }
/// ```
///
/// ```compile_fail
/// #[epoxide_simt::kernel_args]
/// pub struct Rows(u64);
/// ```
pub use epoxide_macros::kernel_args;
pub use global::{Element, Global, Index, row_major};
pub use matrix::*;
pub use memory::*;
pub use nvvm::{assume, at_least_one, keep_loop, same_in_lanes, trailing_zeros_u64};
pub use order::*;
pub use reduce::*;
pub use shared::{SharedArray, SharedElement};
pub use sreg::*;
pub use warp::*;

/// The items that attributes write paths to.
#[doc(hidden)]
pub mod __private {
    #[cfg(not(target_arch = "nvptx64"))]
    pub use alloc::{format, string::String};
    pub use bytemuck;

    /// A hash of a type's source: 0 for every type that is no struct of `#[kernel_args]`.
    pub trait Source {
        const __SOURCE: u64 = 0;
    }
    impl<T> Source for T {}

    /// A hash (FNV-1a) of a module's path, for names of symbols in PTX.
    pub const fn hash_of_name(text: &str) -> u32 {
        let bytes = text.as_bytes();
        let (mut hash, mut at) = (0x811c_9dc5_u32, 0);
        while at < bytes.len() {
            hash = (hash ^ bytes[at] as u32).wrapping_mul(0x0100_0193);
            at += 1;
        }
        hash
    }

    /// One hash of two: a step of FNV-1a, by words.
    pub const fn combined(a: u64, b: u64) -> u64 {
        (a ^ b).wrapping_mul(0x0100_0000_01b3).rotate_left(29)
    }
}

#[cfg(not(target_arch = "nvptx64"))]
fn device_only(name: &str) -> ! {
    panic!("{name} runs on the device only")
}

/// Kernels hold no panicking code, and a lint counts traps. The handler exists because `no_std`
/// requires one.
#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {}
}
