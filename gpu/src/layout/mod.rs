//! Structs that host and device share: `#[repr(C)]`, plain data, no padding, addresses as [`DevicePtr`]. The size and
//! offset asserts compile on both sides.
//!
//! What the library's own kernels and its host share is public for the host crate, and not documented here: it is no interface.

mod args;
mod assert;
mod call;
mod device_ptr;
mod example;
mod experts;
mod handle;
mod limits;
mod low_latency;
mod low_latency_internode;
mod pool;
mod ring;
#[cfg(not(target_arch = "nvptx64"))]
mod sections;
mod wire;

pub use device_ptr::DevicePtr;
pub use example::*;
pub use limits::*;

// What the library's own kernels and its host share. Whoever writes another kernel needs none of it.
#[doc(hidden)]
pub use args::*;
#[doc(hidden)]
pub use call::*;
#[doc(hidden)]
pub use experts::*;
#[doc(hidden)]
pub use handle::*;
#[doc(hidden)]
pub use low_latency::*;
#[doc(hidden)]
pub use low_latency_internode::*;
#[doc(hidden)]
pub use pool::*;
#[doc(hidden)]
pub use ring::*;
#[cfg(not(target_arch = "nvptx64"))]
#[doc(hidden)]
pub use sections::*;
#[doc(hidden)]
pub use wire::*;
