//! The device side of epoxide: the structs that host and device share ([`layout`]), the kernel DSL ([`simt`]), the
//! kernels ([`kernels`]) and their PTX.
//!
//! Built for a GPU by `cargo xtask build-ptx`. Built for the host, this crate offers the layouts, one typed launcher per
//! kernel, and the committed PTX, so that consumers need neither a nightly compiler nor the core library's source.
#![cfg_attr(target_arch = "nvptx64", no_std, feature(abi_ptx, asm_experimental_arch))]
#![cfg_attr(epoxide_backend = "nvvm", allow(unused_features))]

pub mod kernels;
pub mod layout;
pub mod simt;

/// The kernels as PTX for sm_90, as `cargo xtask build-ptx` wrote and linted them.
#[cfg(not(target_arch = "nvptx64"))]
pub const PTX: &str = include_str!("../ptx/epoxide.sm_90.ptx");

/// Kernels hold no panicking code (a lint counts traps); this exists because `no_std` wants it.
#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {}
}
