//! A device, and the raw trait behind it: small integer handles, one method per driver call.

use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use epoxide_gpu::layout::{DevicePtr, Section};

use super::raw::{CopyEnd, DeviceInfo, FabricHandle, LaunchConfig, MemoryKind, RawMemory, RawStream};
use super::rule::NoDriverCalls;
use super::staging::Staging;
use super::streams::Streams;
use crate::error::{Error, Result};
use crate::virtual_time::VirtualTime;

/// A GPU, real or virtual: [`VirtualGpu::new`](super::virt::VirtualGpu::new) and, with the Cargo
/// feature `cuda`, `CudaDevice::open` make one. Clones are the same device, which is freed with the
/// last of them and of all that was made on it.
#[derive(Clone, Debug)]
pub struct Device {
    pub(crate) driver: Arc<dyn Driver>,
}

impl Device {
    /// Properties of this device.
    pub fn info(&self) -> &DeviceInfo {
        self.driver.info()
    }

    /// Whether `other` is a clone of it, or was opened as the same device.
    pub(crate) fn is(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.driver, &other.driver)
    }

    /// An error where `other`, the device of `argument`, is virtual and this one is not, or the other
    /// way round. Each of the two drivers takes the other's handle for one of its own: CUDA for an
    /// address. A driver itself rejects handles of its other devices.
    pub(super) fn check_driver_of(&self, argument: &'static str, other: &Device) -> Result<()> {
        let (own, others) = (self.info(), other.info());
        if own.is_virtual == others.is_virtual {
            return Ok(());
        }
        let rule = format!("must be of the same driver as {}: make it there", own.name);
        Err(Error::argument(argument, format!("one of {}", others.name), rule))
    }

    /// Bytes of device memory now free.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn free_memory(&self) -> Result<u64> {
        self.driver.free_memory()
    }
}

/// The raw driver of one device. Handles are opaque; asynchronous calls return at once and run in
/// stream order.
///
/// Some calls wait for the device's running kernels. Some of those block every other call of the
/// device until then (docs/waits.md has the table). So threads that running kernels wait for must
/// make no call: they hold a `NoDriverCalls`.
///
/// Errors of asynchronous work are returned by the next [`Driver::stream_synchronize`],
/// [`Driver::event_synchronize`] or query, as CUDA's do.
///
/// # Safety
/// The `unsafe` methods do not check addresses and handles, which must be live until the stream has
/// passed the call.
pub trait Driver: Send + Sync + Debug {
    /// Properties of this device.
    fn info(&self) -> &DeviceInfo;

    /// Whether kernels of this device can use atomics in memory of the device at this PCI address,
    /// as over NVLink; PCIe has none. True if that device is not visible to this process.
    fn has_native_atomics_with(&self, pci_bus_id: &str) -> Result<bool>;

    /// Runs `call` with this device current on the calling thread. Other libraries need that: they
    /// query the CUDA runtime for the device to use.
    fn run_current(&self, call: &mut dyn FnMut()) -> Result<()> {
        NoDriverCalls::check()?;
        call();
        Ok(())
    }

    /// Bytes of device memory now free.
    fn free_memory(&self) -> Result<u64>;

    /// Allocates memory. `label` names it in errors. The contents are unspecified, except that
    /// [`MemoryKind::Shareable`] memory is zero.
    fn alloc(&self, bytes: u64, kind: MemoryKind, label: &str) -> Result<RawMemory>;

    /// Names the parts of memory, for the reports of a device in check mode. This method and the
    /// five below are no driver calls: they never wait.
    fn describe(&self, _memory: &RawMemory, _sections: &[Section]) {}

    /// Enables checks of this unused [`MemoryKind::MappedHost`] memory on a device in check mode. The
    /// host must then access it only through [`Driver::host_load`] and [`Driver::host_store`], and
    /// behind [`Driver::host_reads`] and [`Driver::host_writes`].
    fn watch_host(&self, _memory: &RawMemory) {}

    /// Loads the 8-byte word at `offset` of mapped host memory, with acquire. An error where a
    /// device that checks finds a race.
    ///
    /// # Safety
    /// The memory is live and has a host address, and the word lies inside of it at a multiple of
    /// 8.
    unsafe fn host_load(&self, memory: &RawMemory, offset: u64) -> Result<u64> {
        // SAFETY: the caller promises that the word is live; all other accesses are by kernels.
        Ok(unsafe { AtomicU64::from_ptr(memory.host.add(offset as usize).cast()) }.load(Ordering::Acquire))
    }

    /// The host is about to read `bytes` bytes at `offset` of mapped host memory. An error where a
    /// device that checks finds a race.
    fn host_reads(&self, _memory: &RawMemory, _offset: u64, _bytes: u64) -> Result<()> {
        Ok(())
    }

    /// Stores `value` in the 8-byte word at `offset` of mapped host memory, with release. An error
    /// where a device that checks finds a race.
    ///
    /// # Safety
    /// See [`Driver::host_load`].
    unsafe fn host_store(&self, memory: &RawMemory, offset: u64, value: u64) -> Result<()> {
        // SAFETY: the caller promises that the word is live; all other accesses of it are atomic.
        let word = unsafe { AtomicU64::from_ptr(memory.host.add(offset as usize).cast()) };
        word.store(value, Ordering::Release);
        Ok(())
    }

    /// The host is about to write `bytes` bytes at `offset` of mapped host memory. An error where a
    /// device that checks finds a race. A word that this thread stores next
    /// ([`Driver::host_store`]) releases them to kernels. So does a word of another thread behind
    /// [`Driver::host_reads`] of the bytes.
    fn host_writes(&self, _memory: &RawMemory, _offset: u64, _bytes: u64) -> Result<()> {
        Ok(())
    }

    /// On a device in check mode, lines about the longest waits of kernels, for the report of one that
    /// has expired ([`epoxide_vgpu::Checker::longest_waits`]). Empty on others.
    fn longest_waits(&self) -> String {
        String::new()
    }

    /// On a device in check mode, lines about the writer of the byte at `ptr`, for the report of a
    /// wrong value ([`epoxide_vgpu::Memory::origin`]).
    fn origin(&self, _ptr: DevicePtr) -> Option<String> {
        None
    }

    /// The page-locked memory that host data passes through on its way to and from the device.
    fn staging(&self) -> &Staging;

    /// The streams of this device that have an owner. A `Fence` and freed memory are ordered behind
    /// them. Owners hold the list when a stream is destroyed, or a capture begins or spreads: in
    /// [`Driver::stream_destroy`], [`Driver::capture_begin`] and [`Driver::stream_wait_event`].
    fn streams(&self) -> &Streams;

    /// Orders later frees of [`MemoryKind::Device`] behind the work so far of a stream that is
    /// about to be destroyed or captured. The caller holds the list of streams. A device whose
    /// frees run behind all of its work has nothing to do.
    ///
    /// # Errors
    /// Errors of the driver. Later frees may then run before the stream's work.
    fn order_frees_behind(&self, _stream: u64) -> Result<()> {
        Ok(())
    }

    /// A descriptor of [`MemoryKind::Shareable`] or [`MemoryKind::SharedHost`] memory, for this or
    /// another process.
    fn export(&self, memory: &RawMemory) -> Result<OwnedFd>;

    /// A dma-buf of [`MemoryKind::Shareable`] memory, by which a network card reaches it.
    fn export_dma_buf(&self, _memory: &RawMemory) -> Result<OwnedFd> {
        let what = format!("a dma-buf of memory of {}", self.info().name);
        Err(Error::Unavailable { what, reason: "its driver has none".into() })
    }

    /// Maps memory that a peer exported; `peer` names it in errors.
    fn import(&self, fd: OwnedFd, bytes: u64, peer: &str) -> Result<RawMemory>;

    /// Maps [`MemoryKind::SharedHost`] memory that a peer exported into the device's address space;
    /// `peer` names it in errors.
    fn import_host(&self, fd: OwnedFd, bytes: u64, peer: &str) -> Result<RawMemory>;

    /// A handle of [`MemoryKind::Shareable`] memory, for every host of the same NVLink domain.
    fn export_fabric(&self, _memory: &RawMemory) -> Result<FabricHandle> {
        let what = format!("a fabric handle for memory of {}", self.info().name);
        Err(Error::Unavailable { what, reason: "its driver has none".into() })
    }

    /// Maps memory by a peer's fabric handle; `peer` names it in errors.
    fn import_fabric(&self, _handle: &FabricHandle, _bytes: u64, peer: &str) -> Result<RawMemory> {
        let what = format!("{peer}, by a fabric handle");
        Err(Error::Unavailable { what, reason: "the driver has none".into() })
    }

    /// Frees or unmaps memory; [`MemoryKind`] lists the work that it waits for.
    ///
    /// # Safety
    /// No work in flight uses it, except for [`MemoryKind::Device`] in streams of this device, and
    /// it is not freed twice.
    unsafe fn free(&self, memory: &RawMemory);

    /// Loads a PTX module; the error carries the JIT log, or line and column.
    fn module_load(&self, ptx: &str) -> Result<u64>;

    /// Looks up a kernel of a module and raises its dynamic shared memory limit to
    /// `max_shared_bytes`.
    fn module_kernel(&self, module: u64, name: &'static str, max_shared_bytes: u32) -> Result<u64>;

    /// Unloads a module.
    ///
    /// # Safety
    /// No kernel of it is in flight.
    unsafe fn module_unload(&self, module: u64);

    /// Launches a kernel. `params` points to one value per kernel parameter, as for
    /// `cuLaunchKernel`, with their sizes in bytes.
    ///
    /// # Safety
    /// The parameters fit the kernel's signature and every address in them is live until the kernel
    /// ends. A kernel that is launched as [`LaunchConfig::dependent`] begins with
    /// `griddepcontrol.wait`.
    unsafe fn launch(&self, stream: u64, kernel: u64, config: &LaunchConfig, params: &[&[u8]]) -> Result<()>;

    /// Creates a stream that does not synchronise with the default stream.
    fn stream_create(&self, high_priority: bool) -> Result<u64>;

    /// A handle for the caller's stream; it stays the caller's.
    ///
    /// # Safety
    /// The stream is of this device's primary context and outlives the handle.
    unsafe fn stream_adopt(&self, raw: RawStream) -> Result<u64>;

    /// Multiprocessors that the stream's kernels can run on: all, or those of its green context.
    fn stream_multiprocessors(&self, _stream: u64) -> Result<u32> {
        Ok(self.info().sm_count)
    }

    /// The stream as other code of this process may adopt it: its `CUstream`, or the virtual GPU's
    /// own token.
    fn stream_raw(&self, stream: u64) -> RawStream;

    /// Destroys a stream. Work in it still runs; an adopted stream is not destroyed.
    fn stream_destroy(&self, stream: u64);

    /// Blocks until all work of the stream is done.
    fn stream_synchronize(&self, stream: u64) -> Result<()>;

    /// True when all work of the stream is done. An error under capture. Threads that capture may
    /// query streams and events outside of the capture, and must not block.
    fn stream_query(&self, stream: u64) -> Result<bool>;

    /// Creates an event.
    fn event_create(&self, timing: bool) -> Result<u64>;

    /// Destroys an event.
    fn event_destroy(&self, event: u64);

    /// Records the event in the stream.
    fn event_record(&self, event: u64, stream: u64) -> Result<()>;

    /// Makes the stream wait for the event's last record. An event that was never recorded does not
    /// wait.
    fn stream_wait_event(&self, stream: u64, event: u64) -> Result<()>;

    /// Blocks until the event's last record has passed.
    fn event_synchronize(&self, event: u64) -> Result<()>;

    /// True when the event's last record has passed.
    fn event_query(&self, event: u64) -> Result<bool>;

    /// Milliseconds between two recorded events.
    fn event_elapsed_ms(&self, start: u64, end: u64) -> Result<f32>;

    /// Copies bytes between device and host addresses, in stream order.
    ///
    /// # Safety
    /// Both ranges are live until the stream has passed the copy. Pageable host memory may be read
    /// before this returns.
    unsafe fn copy(&self, stream: u64, dst: CopyEnd, src: CopyEnd, bytes: u64) -> Result<()>;

    /// Sets bytes, in stream order.
    ///
    /// # Safety
    /// The range is live until the stream has passed the call.
    unsafe fn fill(&self, stream: u64, dst: DevicePtr, value: u8, bytes: u64) -> Result<()>;

    /// The clock that deadlines of the device's kernels pass by; `None` where that is the real one.
    fn time(&self) -> Option<VirtualTime> {
        None
    }

    /// Called in every host-side polling loop. It yields the processor. On a virtual GPU that is
    /// driven by hand it also runs device work, and returns whether there was any.
    fn make_progress(&self) -> bool {
        std::thread::yield_now();
        false
    }

    /// True while the stream is being captured.
    fn stream_is_capturing(&self, stream: u64) -> Result<bool>;

    /// The number of the capture that the stream is in: 0 for none, or one that became invalid.
    fn stream_capture(&self, stream: u64) -> Result<u64>;

    /// Starts recording the stream's work instead of running it.
    fn capture_begin(&self, stream: u64) -> Result<()>;

    /// Ends the recording.
    fn capture_end(&self, stream: u64) -> Result<u64>;

    /// Runs a recording in the stream.
    fn graph_launch(&self, graph: u64, stream: u64) -> Result<()>;

    /// Destroys a recording.
    fn graph_destroy(&self, graph: u64);
}
