//! Structs that host and device share: `#[repr(C)]`, plain data, no padding, addresses as
//! [`DevicePtr`]. The size and offset asserts compile on both sides.
//!
//! The structs of the library's own kernels are public for the host crate. They are not documented
//! here, because they are no interface.

mod args;
mod assert;
mod backward;
mod call;
mod columns;
mod copy_by_expert;
mod device_ptr;
mod example;
mod experts;
mod halves;
mod handle;
mod internode_by_expert;
mod limits;
mod low_latency;
mod low_latency_gather_columns;
mod low_latency_internode;
mod low_latency_wait;
mod pool;
mod quantise;
mod ring;
#[cfg(not(target_arch = "nvptx64"))]
mod sections;
mod wire;

pub use device_ptr::DevicePtr;
pub use example::*;
pub use limits::*;

/// Structs that the library's own kernels and its host share. Other kernels need none of them.
mod own {
    pub use super::args::*;
    pub use super::backward::*;
    pub use super::call::*;
    pub use super::columns::*;
    pub use super::copy_by_expert::*;
    pub use super::experts::*;
    pub use super::halves::*;
    pub use super::handle::*;
    pub use super::internode_by_expert::*;
    pub use super::low_latency::*;
    pub use super::low_latency_gather_columns::*;
    pub use super::low_latency_internode::*;
    pub use super::low_latency_wait::*;
    pub use super::pool::*;
    pub use super::quantise::*;
    pub use super::ring::*;
    #[cfg(not(target_arch = "nvptx64"))]
    pub use super::sections::*;
    pub use super::wire::*;
}
#[doc(hidden)]
pub use own::*;
