//! The virtual driver: [`Device`] over `epoxide_vgpu`, which interprets the same PTX that a GPU
//! runs.
//!
//! Streams and events behave as CUDA's do. Work of one stream runs in order, work of different
//! streams concurrently. An event stands for the point of its last record. A fault in a kernel,
//! copy or fill makes the device unusable, as a lost context does. Running and queued work is
//! dropped. Every later call fails with the same
//! [`Error::VirtualFault`](crate::Error::VirtualFault), and none waits.
//!
//! Calls wait, and block each other, as CUDA's were measured to do on an H200. So a program that
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
//! Calls of other devices are never blocked. Pageable host memory is all host memory except the
//! device's own mapped memory; up to 1 MiB of it is read before `copy` returns. Mapped host memory,
//! and the host side of a captured copy, is read when the stream reaches the copy. A free that does
//! not wait leaves the memory in place, and counts it as used, until all work enqueued before has
//! ended.
//!
//! A driver call by a thread that must not make one (`NoDriverCalls`) makes the device unusable.
//! Permitted are `info`, `staging`, `make_progress`, and the methods by which the host describes
//! and reads mapped memory (`describe` to `host_reads`): they are no driver calls.
//!
//! Each device has a thread that runs its work. In tests of epoxide whose runs can be repeated
//! exactly, the threads that wait run it (`ManualGpus`). If these give a wait up, the call fails;
//! calls without a result continue. A dropped device abandons work that has not run.
//!
//! Capture is thread-local, as with `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`. The capturing thread may
//! not allocate, load modules or synchronise, and no thread may synchronise or query a stream under
//! capture. Such a call invalidates the capture.
//!
//! A [`RawStream`] of this driver carries the id of one of the device's own streams
//! ([`Stream::raw`]). So one part of a program can lend its stream to another ([`Stream::adopt`]).
//! Null is one more stream, which all its adopters share. It does not synchronise with other
//! streams as CUDA's legacy default stream does.
//!
//! [`Device`]: super::Device
//! [`MemoryKind::MappedHost`]: super::MemoryKind::MappedHost
//! [`MemoryKind::SharedHost`]: super::MemoryKind::SharedHost
//! [`MemoryKind::Unpooled`]: super::MemoryKind::Unpooled
//! [`MemoryKind::Device`]: super::MemoryKind::Device
//! [`MemoryKind::Shareable`]: super::MemoryKind::Shareable
//! [`RawStream`]: super::RawStream
//! [`Stream::adopt`]: super::Stream::adopt
//! [`Stream::raw`]: super::Stream::raw

#[cfg(test)]
mod blocking_tests;
mod calls;
pub(crate) mod config;
mod engine;
mod gpu;
pub(crate) mod manual;
mod modules;
mod state;
#[cfg(test)]
pub(crate) mod tests;
mod work;

pub use epoxide_vgpu::{CheckConfig, Checker, Loaded, Stored};

pub use self::config::{Time, VirtConfig};
pub use self::gpu::VirtualGpu;
