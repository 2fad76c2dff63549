//! A GPU as epoxide and kernels of your own need it. A [`Device`] is one of [`virt`], the virtual
//! GPU, or, with the Cargo feature `cuda`, of `cuda`. Nothing outside this module names CUDA.
//!
//! [`Memory`], [`Stream`], [`Event`], [`Module`] and [`Graph`] each own a handle of the driver and
//! free it on drop.

#[cfg(feature = "cuda")]
#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
pub mod cuda;
/// NVIDIA GPUs, with the Cargo feature `cuda`: `CudaDevice::open(ordinal)` is a [`Device`],
/// `devices()` lists the GPUs, `doctor()` lists the faults of this machine. This page was made
/// without the feature; `cargo doc --features cuda` has the rest.
#[cfg(all(doc, not(feature = "cuda")))]
#[cfg_attr(docsrs, doc(cfg(feature = "cuda")))]
pub mod cuda {}
pub(crate) mod device;
pub(crate) mod owned;
pub(crate) mod raw;
pub(crate) mod rule;
pub(crate) mod staging;
pub(crate) mod streams;
pub mod virt;

pub use device::Device;
pub(crate) use device::Driver;
pub use owned::{Event, Graph, Kernel, Memory, Module, Stream};
pub(crate) use owned::{LaunchShape, MappedMemory, Outcome, give_up_unless, poll};
pub(crate) use raw::{CopyEnd, FabricHandle, RawMemory};
pub use raw::{DeviceInfo, LaunchConfig, MemoryKind, RawStream, RdmaWriteOrder};
pub(crate) use rule::NoDriverCalls;
pub(crate) use staging::Staging;
pub(crate) use streams::{Fence, Streams};

/// A device address in bytes. On the virtual GPU it is a host virtual address of this process.
pub use epoxide_gpu::layout::DevicePtr;
