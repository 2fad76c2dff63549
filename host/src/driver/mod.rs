//! epoxide's needs of a GPU, as one trait with two implementations: [`virt`] over the virtual GPU
//! and, with the Cargo feature `cuda`, `cuda` over cust. Nothing outside this module names CUDA.
//!
//! [`Device`] is the raw trait: small integer handles, one method per driver call. The types beside
//! it ([`Memory`], [`Stream`], [`Event`], [`Module`], [`Graph`]) own such a handle and give it back
//! on drop; callers use those.

#[cfg(feature = "cuda")]
#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
pub mod cuda;
/// NVIDIA GPUs, with the Cargo feature `cuda`: `CudaDevice::open(ordinal)` is a [`Device`],
/// `devices()` lists the GPUs, `doctor()` lists the faults of this machine. This page was made
/// without the feature; `cargo doc --features cuda` has the rest.
#[cfg(all(doc, not(feature = "cuda")))]
#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
pub mod cuda {}
mod device;
mod fence;
mod owned;
mod raw;
mod rule;
mod staged_copy;
mod staging;
mod streams;
pub mod virt;

pub use device::Device;

#[doc(hidden)]
pub use fence::Fence;
#[doc(hidden)]
pub use owned::MappedMemory;
#[doc(hidden)]
pub use owned::shipped_ptx;
pub use owned::{Event, Graph, Kernel, Memory, Module, Stream};
pub(crate) use owned::{Report, give_up, poll};
#[doc(hidden)]
pub use raw::{CopyEnd, FabricHandle, RawMemory};
pub use raw::{DeviceInfo, LaunchConfig, MemoryKind, RawStream, RdmaWriteOrder};
#[doc(hidden)]
pub use rule::NoDriverCalls;
#[doc(hidden)]
pub use staging::Staging;
#[doc(hidden)]
pub use streams::Streams;

/// A device address in bytes. On the virtual GPU it is a host virtual address of this process.
pub use epoxide_gpu::layout::DevicePtr;
