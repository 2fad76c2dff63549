//! The virtual driver: [`Device`] over `epoxide_vgpu`, which interprets the same PTX that a GPU runs.
//!
//! Streams and events behave as CUDA's do. Work of one stream runs in order, work of different streams concurrently. An
//! event stands for the point of its last record. A fault in a kernel, copy or fill makes the device unusable, as a lost
//! context does: what runs or is still queued is dropped, every later call fails with the same [`Error::VirtualFault`](crate::Error::VirtualFault), and
//! none waits.
//!
//! Calls wait, and keep each other waiting, as those of CUDA do: what was measured on an H200, so that a program which
//! would hang there hangs here.
//!
//! | call | waits for | other calls of the device meanwhile |
//! |---|---|---|
//! | `free` of [`MemoryKind::MappedHost`], [`MemoryKind::SharedHost`], [`MemoryKind::Unpooled`]; `module_load` | all that was enqueued before, in any stream | **wait** |
//! | `module_unload` | the same | get through |
//! | `copy` to pageable host memory, or of more than 1 MiB from there | its stream, up to and with the copy | get through |
//! | `stream_synchronize`, `event_synchronize` | the stream, up to the point | get through |
//! | whatever enqueues, in a stream that holds 1024 ops | room | get through |
//! | all others: any allocation, `free` of [`MemoryKind::Device`], [`MemoryKind::Shareable`] and imported memory, other copies, events, queries, streams, graphs | nothing | get through |
//!
//! Calls of other devices always get through. Pageable host memory is what is not the device's own mapped memory; up to 1 MiB
//! of it is read before `copy` returns. Mapped host memory, and the host side of a captured copy, is read when the stream
//! comes to it. Memory that waits for nothing when it is freed stays until the work has ended that was enqueued before.
//!
//! A thread that must not call the driver ([`NoDriverCalls`](super::NoDriverCalls)) and does makes the device unusable:
//! whatever calls it, but for [`Device::info`], [`Device::staging`], [`Device::make_progress`], and the methods by which the host
//! describes and reads mapped memory ([`Device::describe`] to [`Device::host_reads`]), which are no driver calls.
//!
//! Who runs the work is up to the [`Executor`]: a thread per device, or, for runs that can be repeated exactly, the
//! threads that wait ([`Machine`]). Where a machine gives a wait up, the call fails; those that return nothing go on. A device
//! that is dropped abandons what it has not yet run.
//!
//! Capture is thread-local, as with `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`: the capturing thread may not allocate or
//! load modules, and nobody may synchronise or query a stream under capture; such a call invalidates the capture.
//!
//! A [`RawStream`] of this driver carries the id of one of the device's own streams ([`Device::stream_raw`]), so that
//! one part of a program can lend its stream to another ([`Device::stream_adopt`]); null is one more stream, which all
//! who adopt it share. It does not synchronise with other streams as CUDA's legacy default stream does.
//!
//! [`Device`]: super::Device
//! [`Device::info`]: super::Device::info
//! [`Device::staging`]: super::Device::staging
//! [`Device::make_progress`]: super::Device::make_progress
//! [`Device::describe`]: super::Device::describe
//! [`Device::host_reads`]: super::Device::host_reads
//! [`Device::stream_raw`]: super::Device::stream_raw
//! [`Device::stream_adopt`]: super::Device::stream_adopt
//! [`MemoryKind::MappedHost`]: super::MemoryKind::MappedHost
//! [`MemoryKind::SharedHost`]: super::MemoryKind::SharedHost
//! [`MemoryKind::Unpooled`]: super::MemoryKind::Unpooled
//! [`MemoryKind::Device`]: super::MemoryKind::Device
//! [`MemoryKind::Shareable`]: super::MemoryKind::Shareable
//! [`RawStream`]: super::RawStream

#[cfg(test)]
mod blocking_tests;
mod calls;
mod capture;
mod config;
mod coverage;
mod engine;
mod gpu;
mod machine;
mod mix;
mod modules;
mod state;
mod stream;
#[cfg(test)]
mod tests;
mod work;

#[doc(hidden)]
pub use epoxide_vgpu::host_meets;
pub use epoxide_vgpu::{CheckConfig, Checker, Loaded, Stored};

#[doc(hidden)]
pub use self::config::Executor;
#[doc(hidden)]
pub use self::config::Stop;
pub use self::config::{Time, VirtConfig};
pub use self::gpu::VirtualGpu;
#[doc(hidden)]
pub use self::machine::{Drive, Machine};
