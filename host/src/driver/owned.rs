//! Owners of raw driver handles. Each keeps its device alive and frees its handle on drop.

use std::borrow::Cow;
use std::ffi::OsString;
use std::fmt;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::{Arc, LazyLock, OnceLock};
use std::time::{Duration, Instant};

use bytemuck::AnyBitPattern;
use epoxide_gpu::kernels::{self as gpu, Call, ContractError};
use epoxide_gpu::layout::{DevicePtr, Section};
use epoxide_gpu::simt::ptx::{CutPtx, StalePtx, check_fresh};

use super::device::Device;
use super::raw::{CopyEnd, FabricHandle, LaunchConfig, MemoryKind, RawMemory, RawStream};
use super::staging::{self, HostSide};
use super::streams::{List, Listed, Streams};
use crate::bounded::{self, read_text_file};
use crate::error::{Error, Result};
use crate::virtual_time::{Poller, VirtualTime};

/// Gives the device up unless `ended` is that `what` of it has ended, after a wait of `waited` in
/// the drop of an owner. Kernels that may still run, perhaps for ever, use memory and code that
/// owners are about to free. From now on all memory of the device, and the device itself, are
/// leaked until the process ends. After a free, such a kernel could write to memory that has
/// another owner by then.
pub(crate) fn give_up_unless(ended: Result<bool>, device: &Device, what: &str, waited: Duration) {
    match ended {
        Ok(true) => {}
        Ok(false) => leak_all(device, format_args!("{what} has not ended in {waited:?}")),
        // A virtual GPU drops its work at a fault.
        Err(Error::VirtualFault(fault)) => tracing::warn!("{what} has not ended well: {fault}"),
        // A driver also rejects the question, where a stream is being captured.
        Err(error) => leak_all(device, format_args!("{what} may not have ended: {error}")),
    }
}

/// Frees nothing of the device any more, nor the device itself, until the process ends.
fn leak_all(device: &Device, why: fmt::Arguments<'_>) {
    if device.driver.streams().give_up() {
        let ordinal = device.info().ordinal;
        tracing::error!("{why}: nothing of device {ordinal} is freed any more");
        std::mem::forget(device.clone());
    }
}

/// Device memory, peer memory or mapped host memory; freed or unmapped on drop.
#[derive(Debug)]
pub struct Memory {
    device: Device,
    raw: RawMemory,
    requested: u64,
}

// SAFETY: `RawMemory` is an address range without thread affinity; access to it goes through unsafe
// or stream calls.
unsafe impl Send for Memory {}
// SAFETY: as above; `&Memory` gives out addresses only.
unsafe impl Sync for Memory {}

impl Memory {
    /// The host has loaded the word at `offset` and relies on it. A device in check mode adds the
    /// releases there to the calling thread's past. An error if the word is not in this host
    /// memory.
    pub(crate) fn host_has_loaded(&self, offset: u64) -> Result<()> {
        self.check_host_word(offset)?;
        // SAFETY: just checked; the memory is this owner's.
        unsafe { self.device.driver.host_load(&self.raw, offset) }.map(drop)
    }

    /// Stores a word at `offset`, with release: a kernel that acquires it may then read what the
    /// host has written, and write over what the host has read. An error if the word is not in this
    /// host memory, or if a device in check mode finds a race.
    pub(crate) fn host_store(&self, offset: u64, value: u64) -> Result<()> {
        self.check_host_word(offset)?;
        // SAFETY: just checked; the memory is this owner's.
        unsafe { self.device.driver.host_store(&self.raw, offset, value) }
    }

    fn check_host_word(&self, offset: u64) -> Result<()> {
        let is_there = offset.checked_add(8).is_some_and(|end| end <= self.requested);
        if self.raw.host.is_null() || !offset.is_multiple_of(8) || !is_there {
            return Err(Error::argument("offset", offset, "must be that of a word of host memory"));
        }
        Ok(())
    }

    /// Enables the checks of a device in check mode, before the first use of this host memory. The
    /// host must then access it only through the methods `host_*`.
    pub(crate) fn watch_host(&self) {
        self.device.driver.watch_host(&self.raw);
    }

    /// Checks a read by the host itself of `bytes` bytes at `offset`. In check mode, an error if a
    /// kernel wrote there and has not released its write to a word that this thread has loaded.
    pub(crate) fn host_takes(&self, offset: u64, bytes: u64) -> Result<()> {
        let is_there = offset.checked_add(bytes).is_some_and(|end| end <= self.requested);
        // The read itself rejects a range beyond the end.
        if is_there { self.device.driver.host_reads(&self.raw, offset, bytes) } else { Ok(()) }
    }

    /// Checks a write by the host itself of `bytes` bytes at `offset`, which must be in it. In check
    /// mode, an error if a kernel has accessed them and has not released that to a word that a host
    /// thread has loaded. Words that this thread stores next release them to kernels, and words of
    /// other threads behind [`Memory::host_takes`] of them.
    pub(crate) fn host_gives(&self, offset: u64, bytes: u64) -> Result<()> {
        self.device.driver.host_writes(&self.raw, offset, bytes)
    }

    /// Allocates `bytes`, which may be 0; `label` names the memory in errors. Its contents are zero,
    /// those of [`MemoryKind::Device`] and [`MemoryKind::Unpooled`] unspecified.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] where the device has not so much, and errors of the driver.
    pub fn alloc(device: &Device, bytes: u64, kind: MemoryKind, label: &str) -> Result<Memory> {
        let raw = device.driver.alloc(bytes, kind, label)?;
        if matches!(kind, MemoryKind::MappedHost | MemoryKind::SharedHost) {
            // SAFETY: fresh host memory of at least `bytes`; no other code has its address yet.
            unsafe { raw.host.write_bytes(0, bytes as usize) };
        }
        Ok(Memory { device: device.clone(), raw, requested: bytes })
    }

    /// Maps `bytes` of memory that a peer exported.
    pub(crate) fn import(device: &Device, fd: OwnedFd, bytes: u64, peer: &str) -> Result<Memory> {
        let raw = device.driver.import(fd, bytes, peer)?;
        Ok(Memory { device: device.clone(), raw, requested: bytes })
    }

    /// Maps `bytes` of [`MemoryKind::SharedHost`] memory that a peer exported, so that kernels
    /// reach it.
    pub(crate) fn import_host(device: &Device, fd: OwnedFd, bytes: u64, peer: &str) -> Result<Memory> {
        let raw = device.driver.import_host(fd, bytes, peer)?;
        Ok(Memory { device: device.clone(), raw, requested: bytes })
    }

    /// Maps `bytes` of memory by the fabric handle of a peer.
    pub(crate) fn import_fabric(
        device: &Device,
        handle: &FabricHandle,
        bytes: u64,
        peer: &str,
    ) -> Result<Memory> {
        let raw = device.driver.import_fabric(handle, bytes, peer)?;
        Ok(Memory { device: device.clone(), raw, requested: bytes })
    }

    /// A handle that a peer in the same NVLink domain can [`Memory::import_fabric`].
    pub(crate) fn export_fabric(&self) -> Result<FabricHandle> {
        self.device.driver.export_fabric(&self.raw)
    }

    /// A descriptor that a peer can [`Memory::import`].
    pub(crate) fn export(&self) -> Result<OwnedFd> {
        self.device.driver.export(&self.raw)
    }

    /// A dma-buf of it, by which a network card reaches it.
    #[cfg(any(feature = "rdma", test))]
    pub(crate) fn export_dma_buf(&self) -> Result<OwnedFd> {
        self.device.driver.export_dma_buf(&self.raw)
    }

    /// Device address of the first byte.
    pub fn ptr(&self) -> DevicePtr {
        self.raw.ptr
    }

    /// Copies host bytes to `offset` in it, through page-locked memory in the order of `stream`,
    /// and waits for it.
    ///
    /// # Errors
    /// [`Error::Argument`] where it is too short for them, or one of the two devices is virtual and
    /// the other is not. Errors of the driver.
    pub fn write(&self, stream: &Stream, offset: u64, bytes: &[u8]) -> Result<()> {
        self.device.check_driver_of("stream", &stream.device)?;
        self.check_range(offset, bytes.len() as u64)?;
        // SAFETY: this owner keeps the memory, and the check above ensures that the range is in it.
        unsafe { stream.write(self.raw.ptr.add(offset), bytes) }
    }

    /// Copies bytes at `offset` in it to the host, through page-locked memory in the order of
    /// `stream`, and waits for it.
    ///
    /// # Errors
    /// The same as [`Memory::write`].
    pub fn read(&self, stream: &Stream, offset: u64, into: &mut [u8]) -> Result<()> {
        self.device.check_driver_of("stream", &stream.device)?;
        self.check_range(offset, into.len() as u64)?;
        // SAFETY: as in `write`.
        unsafe { stream.read(into, self.raw.ptr.add(offset)) }
    }

    /// [`Memory::write`] at an address in it.
    pub(crate) fn write_at(&self, stream: &Stream, at: DevicePtr, bytes: &[u8]) -> Result<()> {
        self.write(stream, at.0.wrapping_sub(self.raw.ptr.0), bytes)
    }

    fn check_range(&self, offset: u64, bytes: u64) -> Result<()> {
        let have = self.raw.bytes;
        if offset.checked_add(bytes).is_some_and(|end| end <= have) {
            return Ok(());
        }
        Err(Error::argument("offset", offset, format!("{bytes} bytes there must lie inside of {have} bytes")))
    }

    /// Host address of the first byte; null unless the memory is [`MemoryKind::MappedHost`] or
    /// [`MemoryKind::SharedHost`].
    pub fn host_ptr(&self) -> *mut u8 {
        self.raw.host
    }

    /// Names its parts in the reports of a device in check mode.
    pub(crate) fn describe(&self, sections: &[Section]) {
        self.device.driver.describe(&self.raw, sections);
    }

    /// Requested bytes.
    pub fn bytes(&self) -> u64 {
        self.requested
    }

    /// Bytes taken from the device, rounding included.
    pub(crate) fn footprint(&self) -> u64 {
        self.raw.bytes
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.device.driver.streams().are_given_up() {
            return;
        }
        // SAFETY: this owner frees once; users of the address hold a borrow, or wait for their
        // stream first and `give_up_unless` that has ended.
        unsafe { self.device.driver.free(&self.raw) }
    }
}

/// Mapped host memory that kernels write. The host reads it by these methods alone. So a device in
/// check mode checks that the host reads only bytes that were released to it.
#[derive(Debug)]
pub struct MappedMemory(Memory);

impl MappedMemory {
    /// Allocates `bytes`, zeroed; `label` names the memory in errors.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] where the device has not so much, and errors of the driver.
    pub fn alloc(device: &Device, bytes: u64, label: &str) -> Result<MappedMemory> {
        let memory = Memory::alloc(device, bytes, MemoryKind::MappedHost, label)?;
        memory.watch_host();
        Ok(MappedMemory(memory))
    }

    /// Device address of the first byte.
    pub fn ptr(&self) -> DevicePtr {
        self.0.ptr()
    }

    /// See [`Memory::describe`].
    pub(crate) fn describe(&self, sections: &[Section]) {
        self.0.describe(sections);
    }

    /// Zeroes all of it, in the order of `stream`, and waits for that.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn clear(&self, stream: &Stream) -> Result<()> {
        self.0.write(stream, 0, &vec![0; self.0.requested as usize])
    }

    /// Loads the 8-byte word at `offset`, with acquire: the host may then read all bytes that the
    /// kernel wrote before it released the word's value.
    ///
    /// # Errors
    /// [`Error::Argument`] where there is no such word, [`Error::VirtualFault`] where a device that
    /// checks finds a race.
    pub fn load(&self, offset: u64) -> Result<u64> {
        self.check_range(offset, 8, 8)?;
        // SAFETY: mapped host memory of this owner; the range was just checked.
        unsafe { self.0.device.driver.host_load(&self.0.raw, offset) }
    }

    /// Reads the `T` at `offset`, as plain memory.
    ///
    /// # Errors
    /// See [`MappedMemory::load`].
    pub fn read<T: AnyBitPattern>(&self, offset: u64) -> Result<T> {
        let bytes = size_of::<T>() as u64;
        self.check_range(offset, bytes, align_of::<T>() as u64)?;
        self.0.device.driver.host_reads(&self.0.raw, offset, bytes)?;
        // SAFETY: inside of the memory, aligned, and any bytes are a `T`. Volatile, since a kernel
        // has written it.
        Ok(unsafe { self.0.raw.host.add(offset as usize).cast::<T>().read_volatile() })
    }

    /// Reads `count` values of type `T` from `offset` on, as plain memory.
    ///
    /// # Errors
    /// See [`MappedMemory::load`].
    pub fn read_all<T: AnyBitPattern>(&self, offset: u64, count: u32) -> Result<Vec<T>> {
        let bytes = size_of::<T>() as u64 * u64::from(count);
        self.check_range(offset, bytes, align_of::<T>() as u64)?;
        self.0.device.driver.host_reads(&self.0.raw, offset, bytes)?;
        // SAFETY: as in `read`, for each of them.
        let value = |i| unsafe { self.0.raw.host.add(offset as usize).cast::<T>().add(i).read_volatile() };
        Ok((0..count as usize).map(value).collect())
    }

    fn check_range(&self, offset: u64, bytes: u64, align: u64) -> Result<()> {
        let have = self.0.requested;
        if offset.is_multiple_of(align) && offset.checked_add(bytes).is_some_and(|end| end <= have) {
            return Ok(());
        }
        let rule = format!("{bytes} bytes at a multiple of {align} must lie inside of {have} bytes");
        Err(Error::argument("offset", offset, rule))
    }
}

/// A queue of device work.
#[derive(Debug)]
pub struct Stream {
    device: Device,
    handle: u64,
    id: u64,
    multiprocessors: u32,
}

impl Stream {
    /// A stream of our own that does not synchronise with the default stream.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn new(device: &Device) -> Result<Stream> {
        Ok(Stream::listed(device, device.driver.stream_create(false)?, true))
    }

    /// The same with the highest priority of the device: its blocks start ahead of those of other
    /// streams.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn high_priority(device: &Device) -> Result<Stream> {
        Ok(Stream::listed(device, device.driver.stream_create(true)?, true))
    }

    /// A stream of high priority that fences do not wait for: for work that is ordered otherwise.
    pub(crate) fn unfenced(device: &Device) -> Result<Stream> {
        Ok(Stream::listed(device, device.driver.stream_create(true)?, false))
    }

    fn listed(device: &Device, handle: u64, fenced: bool) -> Stream {
        let id = Streams::new_id();
        device.driver.streams().add(Listed { id, handle, fenced });
        let multiprocessors = device.info().sm_count;
        Stream { device: device.clone(), handle, id, multiprocessors }
    }

    /// The caller's stream, used and never synchronised or destroyed. Synchronise it before other
    /// code begins to capture it. Results that are dropped during that capture are reused without a
    /// wait for the stream's earlier work, and so are all results where the `Stream` is dropped
    /// then.
    ///
    /// # Safety
    /// `raw` is a stream of this device's primary context and outlives the result.
    ///
    /// # Errors
    /// [`Error::Argument`] where it is of another context, or the per-thread default stream, which
    /// is another stream on each thread; errors of the driver.
    pub unsafe fn adopt(device: &Device, raw: RawStream) -> Result<Stream> {
        // SAFETY: passed on to the caller.
        let handle = unsafe { device.driver.stream_adopt(raw)? };
        let multiprocessors = device.driver.stream_multiprocessors(handle)?;
        let mut stream = Stream::listed(device, handle, true);
        stream.multiprocessors = multiprocessors;
        Ok(stream)
    }

    /// Multiprocessors that its kernels can run on: all of the device, or those of the green context
    /// that an adopted stream is of.
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// A number that no other [`Stream`] of this process has or had.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// The `CUstream`, for interop.
    pub fn raw(&self) -> RawStream {
        self.device.driver.stream_raw(self.handle)
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Blocks until all work is done.
    ///
    /// # Errors
    /// Errors of the driver, and of work that has failed on the device before.
    pub fn synchronize(&self) -> Result<()> {
        self.device.driver.stream_synchronize(self.handle)
    }

    /// True when all work is done.
    ///
    /// # Errors
    /// Errors of the driver, and of work that has failed on the device before.
    pub fn is_done(&self) -> Result<bool> {
        self.device.driver.stream_query(self.handle)
    }

    /// Polls until all work is done or `timeout` is over; false means it is over.
    pub(crate) fn wait_timeout(&self, timeout: Duration) -> Result<bool> {
        poll(&self.device, timeout, || self.is_done())
    }

    /// Orders later fences behind the stream's work so far, also where they leave the stream out.
    pub(crate) fn order_fences_behind(&self) -> Result<()> {
        let mut list = self.device.driver.streams().hold();
        let work = Listed { id: self.id, handle: self.handle, fenced: true };
        order_fences_behind(&self.device, &mut list, work)
    }

    /// Makes this stream wait for the event's last record. On GPUs, the event may be of another one.
    ///
    /// # Errors
    /// [`Error::Argument`] where one of the two devices is virtual and the other is not, and errors
    /// of the driver.
    pub fn wait(&self, event: &Event) -> Result<()> {
        self.device.check_driver_of("event", &event.device)?;
        let streams = self.device.driver.streams();
        let mut list = streams.hold();
        // The wait may make the stream join a capture, if one is under way.
        if streams.are_recorded() {
            order_behind(&self.device, &mut list, self.id)?;
        }
        self.device.driver.stream_wait_event(self.handle, event.handle)
    }

    /// True while the stream is being captured.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn is_capturing(&self) -> Result<bool> {
        self.device.driver.stream_is_capturing(self.handle)
    }

    /// The number of the buffer for whose step the stream is captured, if any.
    ///
    /// # Errors
    /// Errors of the driver.
    pub(crate) fn captured_for(&self) -> Result<Option<u64>> {
        let (driver, streams) = (&self.device.driver, self.device.driver.streams());
        let _list = streams.hold();
        let steps = streams.recorded_steps();
        if steps.is_empty() {
            return Ok(None);
        }
        let capture = driver.stream_capture(self.handle)?;
        for (origin, buffer) in steps {
            // 0 is no capture, or one that became invalid.
            if origin == self.handle || (capture != 0 && driver.stream_capture(origin)? == capture) {
                return Ok(Some(buffer));
            }
        }
        Ok(None)
    }

    /// Launches a kernel.
    ///
    /// # Errors
    /// [`Error::Argument`] where `kernel` is of the other driver. Errors of the driver, such as of a
    /// shape that the device cannot run.
    ///
    /// # Safety
    /// The parameters fit the kernel's signature. Until the kernel ends, every address in them is
    /// live, and `kernel`, a clone of it, or its [`Module`] is kept. A kernel that is launched as
    /// [`LaunchConfig::dependent`] begins with `griddepcontrol.wait`.
    pub unsafe fn launch(&self, kernel: &Kernel, config: &LaunchConfig, params: &[&[u8]]) -> Result<()> {
        self.device.check_driver_of("kernel", &kernel.module.0.device)?;
        self.keep_if_recorded(std::slice::from_ref(&kernel.module))?;
        // SAFETY: passed on to the caller.
        unsafe { self.device.driver.launch(self.handle, kernel.handle, config, params) }
    }

    /// If the stream is captured, keeps the modules of kernels that it is about to record.
    fn keep_if_recorded(&self, modules: &[Module]) -> Result<()> {
        let streams = self.device.driver.streams();
        if streams.are_recorded() && self.is_capturing()? {
            streams.keep_modules(modules);
        }
        Ok(())
    }

    /// Launches `kernel`, a `K`, on `grid` blocks of `block` threads with a call that has been
    /// checked: `K::call(args)`.
    ///
    /// # Errors
    /// [`Error::Launch`] if a clause of the kernel's contract does not hold, its attribute names
    /// another shape, or `kernel` is another kernel. [`Error::Ptx`] if the PTX describes `kernel` as
    /// another one than `K`: it was built from another source than this program. Also errors of the
    /// driver.
    ///
    /// # Safety
    /// Until the kernel ends, the addresses in the call's arguments are live and hold the data that
    /// the argument struct describes, and `kernel`, a clone of it, or its [`Module`] is kept.
    pub unsafe fn call<K: gpu::Entry>(
        &self,
        kernel: &Kernel,
        grid: u32,
        block: u32,
        shared_bytes: u32,
        call: std::result::Result<Call<K>, ContractError>,
    ) -> Result<()> {
        // SAFETY: the caller vouches for the addresses.
        unsafe { self.launch_shaped(kernel, LaunchShape::All { grid, block, shared_bytes }, call) }
    }

    /// Launches `kernel`, a `K`, in the shape that its attribute gives a call:
    /// `#[kernel(grid = .., block = .., ..)]`.
    ///
    /// # Errors
    /// As [`Stream::call`]; and [`Error::Launch`] where the attribute names no grid or no block.
    ///
    /// # Safety
    /// As [`Stream::call`].
    pub unsafe fn launch_call<K: gpu::Entry>(
        &self,
        kernel: &Kernel,
        call: std::result::Result<Call<K>, ContractError>,
    ) -> Result<()> {
        // SAFETY: the caller vouches for the addresses.
        unsafe { self.launch_shaped(kernel, LaunchShape::Named, call) }
    }

    /// Launches `kernel`, a `K`, in a shape that its attribute may give, or a part of it.
    ///
    /// # Errors
    /// As [`Stream::call`]; and [`Error::Launch`] where the attribute does not name what is not
    /// given.
    ///
    /// # Safety
    /// The same as of [`Stream::call`].
    pub(crate) unsafe fn launch_shaped<K: gpu::Entry>(
        &self,
        kernel: &Kernel,
        shape: LaunchShape,
        call: std::result::Result<Call<K>, ContractError>,
    ) -> Result<()> {
        let call = kernel.takes(call)?;
        let shape = match shape {
            LaunchShape::Named => call.shape(),
            LaunchShape::Blocks(grid) => call.shape_on(grid),
            LaunchShape::All { grid, block, shared_bytes } => call.shape_of(grid, block, shared_bytes),
        };
        // SAFETY: the caller vouches for the addresses.
        unsafe { self.launch_checked(kernel, shape.map_err(broken)?, &call) }
    }

    /// Launches a call in a shape that fits it.
    ///
    /// # Safety
    /// As [`Stream::call`].
    unsafe fn launch_checked<K: gpu::Entry>(
        &self,
        kernel: &Kernel,
        shape: gpu::Shape,
        call: &Call<K>,
    ) -> Result<()> {
        let config = LaunchConfig {
            grid: shape.grid,
            block: shape.block,
            shared_bytes: shape.shared_bytes,
            cooperative: false,
            dependent: K::INFO.dependent && kernel.waits,
        };
        // SAFETY: `Call<K>` holds exactly kernel K's parameter; the caller vouches for the
        // addresses. A lint holds the PTX of dependent kernels to their wait.
        unsafe { self.launch(kernel, &config, &[call.param()]) }
    }

    /// Copies host bytes to the device, through page-locked memory, and waits for it.
    ///
    /// # Errors
    /// Errors of the driver, and of work that has failed on the device before.
    ///
    /// # Safety
    /// `src.len()` bytes from `dst` on are live memory of this device, and no other code relies on
    /// their contents.
    pub unsafe fn write(&self, dst: DevicePtr, src: &[u8]) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { staging::copy(&self.device, self.handle, dst, HostSide::Source(src)) }
    }

    /// Copies device bytes to the host, through page-locked memory, and waits for it.
    ///
    /// # Errors
    /// Errors of the driver, and of work that has failed on the device before.
    ///
    /// # Safety
    /// `dst.len()` bytes from `src` on are live memory of this device.
    pub unsafe fn read(&self, dst: &mut [u8], src: DevicePtr) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { staging::copy(&self.device, self.handle, src, HostSide::Target(dst)) }
    }

    /// Copies between device addresses, in stream order.
    ///
    /// # Errors
    /// Errors of the driver.
    ///
    /// # Safety
    /// Both ranges are live until the stream has passed the copy.
    pub unsafe fn copy(&self, dst: DevicePtr, src: DevicePtr, bytes: u64) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.device.driver.copy(self.handle, CopyEnd::Device(dst), CopyEnd::Device(src), bytes) }
    }

    /// Copies between any addresses, in stream order. For pageable host memory the driver decides
    /// whether the call waits ([`Stream::read`] and [`Stream::write`] always wait).
    ///
    /// # Safety
    /// Both ranges are live until the stream has passed the copy.
    pub(crate) unsafe fn copy_ends(&self, dst: CopyEnd, src: CopyEnd, bytes: u64) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.device.driver.copy(self.handle, dst, src, bytes) }
    }

    /// Sets bytes, in stream order.
    ///
    /// # Errors
    /// Errors of the driver.
    ///
    /// # Safety
    /// The range is live until the stream has passed the call.
    pub unsafe fn fill(&self, dst: DevicePtr, value: u8, bytes: u64) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { self.device.driver.fill(self.handle, dst, value, bytes) }
    }

    /// Records the work that `work` enqueues instead of running it.
    ///
    /// # Errors
    /// The error of `work`, and errors of the driver, such as of work that cannot be recorded.
    pub fn capture(&self, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        self.capture_for(None, work)
    }

    /// [`Stream::capture`] for a step of the buffer of this number, if any.
    pub(crate) fn capture_for(
        &self,
        buffer: Option<u64>,
        work: impl FnOnce() -> Result<()>,
    ) -> Result<Graph> {
        let streams = self.device.driver.streams();
        {
            let mut list = streams.hold();
            order_behind(&self.device, &mut list, self.id)?;
            self.device.driver.capture_begin(self.handle)?;
            streams.begin_recording(self.id, self.handle, buffer);
        }
        let outcome = catch_unwind(AssertUnwindSafe(work));
        // The capture must end in any case, or the stream stays unusable.
        let graph = self.device.driver.capture_end(self.handle);
        let modules = streams.end_recording(self.id);
        let outcome = outcome.unwrap_or_else(|panic| {
            if let Ok(handle) = graph {
                self.device.driver.graph_destroy(handle);
            }
            resume_unwind(panic)
        });
        let handle = match (outcome, graph) {
            (Ok(()), Ok(handle)) => handle,
            (Err(error), Ok(handle)) => {
                self.device.driver.graph_destroy(handle);
                return Err(error);
            }
            (Err(error), Err(_)) | (Ok(()), Err(error)) => return Err(error),
        };
        Ok(Graph { device: self.device.clone(), handle, modules })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // Held until the driver has destroyed the stream too: otherwise a fence, or a free of
        // memory, could miss its work.
        let mut list = self.device.driver.streams().hold();
        if let Some(gone) = list.remove(self.id) {
            if let Err(error) = self.device.driver.order_frees_behind(gone.handle) {
                leak_all(&self.device, format_args!("work of a destroyed stream may still use it: {error}"));
            }
            if let Err(error) = order_fences_behind(&self.device, &mut list, gone) {
                tracing::debug!("later fences do not wait for the work of a destroyed stream: {error}");
            }
        }
        self.device.driver.stream_destroy(self.handle);
    }
}

/// Orders later fences and frees behind the work so far of a stream that is about to be captured.
/// Afterwards they leave the stream itself out.
fn order_behind(device: &Device, list: &mut List, id: u64) -> Result<()> {
    let Some(stream) = list.find(id) else { return Ok(()) };
    device.driver.order_frees_behind(stream.handle)?;
    order_fences_behind(device, list, stream)
}

/// Orders later fences behind the work so far of a stream that is about to be destroyed, returned
/// to its caller or captured.
fn order_fences_behind(device: &Device, list: &mut List, gone: Listed) -> Result<()> {
    // Work that the stream had before a capture was ordered when the capture began.
    if !gone.fenced || device.driver.stream_is_capturing(gone.handle)? {
        return Ok(());
    }
    let departed = match list.departed {
        Some(stream) => stream,
        // The device's drop destroys this stream.
        None => *list.departed.insert(device.driver.stream_create(false)?),
    };
    let event = device.driver.event_create(false)?;
    let outcome = device.driver.event_record(event, gone.handle);
    let outcome = outcome.and_then(|()| device.driver.stream_wait_event(departed, event));
    device.driver.event_destroy(event);
    outcome
}

/// Polls until something is done or `timeout` of the device's time is over; false means it is over.
pub(crate) fn poll(
    device: &Device,
    timeout: Duration,
    mut is_done: impl FnMut() -> Result<bool>,
) -> Result<bool> {
    let time = device.driver.time();
    let (start, began) = (Instant::now(), time.as_ref().map(VirtualTime::now));
    let elapsed = || match (&time, began) {
        (Some(time), Some(began)) => time.now().saturating_sub(began),
        _ => start.elapsed(),
    };
    let poller = Poller::new(time.as_ref());
    while !is_done()? {
        // The limit does not apply while the host itself runs work: the machine may be busy.
        if !device.driver.make_progress() && elapsed() > timeout {
            return is_done();
        }
        poller.pause();
    }
    Ok(true)
}

/// The outcome of enqueued work before an event, or that makes a result. A host that waits for the
/// event, or reads the result, gets the work's error, if any.
pub(crate) trait Outcome: fmt::Debug + Send + Sync {
    /// The error of the work, if it has failed.
    fn report(&self) -> Result<()>;

    /// Makes `stream` wait for the last of the work, on any stream.
    fn order_before(&self, stream: &Stream) -> Result<()>;

    /// [`Outcome::report`] where `stream` has passed the work.
    fn check_behind(&self, _stream: &Stream) -> Result<()> {
        self.report()
    }

    /// Whether it owns memory that operations reuse.
    fn owns_memory(&self) -> bool {
        false
    }
}

/// A point in a stream.
///
/// The event of an operation of a buffer also holds the operation's outcome.
/// [`Event::synchronize`], [`Event::is_done`] and [`Event::wait_timeout`] return the error of a
/// failed operation instead of `Ok`, once the event has passed.
#[derive(Debug)]
pub struct Event {
    device: Device,
    handle: u64,
    of: Option<Arc<dyn Outcome>>,
}

impl Event {
    /// A new event that records no time.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn new(device: &Device) -> Result<Event> {
        Event::create(device, false)
    }

    /// A new event that records its time, for [`Event::elapsed_ms`].
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn timed(device: &Device) -> Result<Event> {
        Event::create(device, true)
    }

    fn create(device: &Device, timing: bool) -> Result<Event> {
        Ok(Event { device: device.clone(), handle: device.driver.event_create(timing)?, of: None })
    }

    /// The same event, with the outcome that `report` holds.
    pub(crate) fn of(mut self, report: Arc<dyn Outcome>) -> Event {
        self.of = Some(report);
        self
    }

    /// Records the event in the stream of this handle.
    pub(super) fn record_raw(&self, stream: u64) -> Result<()> {
        self.device.driver.event_record(self.handle, stream)
    }

    /// Records the event in `stream`, which is of the event's device.
    ///
    /// # Errors
    /// [`Error::Argument`] where one of the two devices is virtual and the other is not, and errors
    /// of the driver.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        self.device.check_driver_of("stream", &stream.device)?;
        self.device.driver.event_record(self.handle, stream.handle)
    }

    /// Blocks until the last record has passed.
    ///
    /// # Errors
    /// The error of the operation that the event is of, if it has failed.
    pub fn synchronize(&self) -> Result<()> {
        self.device.driver.event_synchronize(self.handle)?;
        self.report()
    }

    /// True when the last record has passed.
    ///
    /// # Errors
    /// As for [`Event::synchronize`].
    pub fn is_done(&self) -> Result<bool> {
        let is_done = self.device.driver.event_query(self.handle)?;
        if is_done {
            self.report()?;
        }
        Ok(is_done)
    }

    fn report(&self) -> Result<()> {
        self.of.as_ref().map_or(Ok(()), |of| of.report())
    }

    /// Polls until the last record has passed or `timeout` is over; false means it is over.
    ///
    /// # Errors
    /// As for [`Event::synchronize`].
    pub fn wait_timeout(&self, timeout: Duration) -> Result<bool> {
        poll(&self.device, timeout, || self.is_done())
    }

    /// [`Event::wait_timeout`] for several events of one device, with one timeout for all.
    pub(super) fn wait_all(events: &[&Event], timeout: Duration) -> Result<bool> {
        let Some(first) = events.first() else { return Ok(true) };
        let mut left = events.iter().peekable();
        poll(&first.device, timeout, || {
            while let Some(event) = left.peek() {
                if !event.is_done()? {
                    return Ok(false);
                }
                left.next();
            }
            Ok(true)
        })
    }

    /// Milliseconds from this event to `end`.
    ///
    /// # Errors
    /// [`Error::Argument`] where one of the two devices is virtual and the other is not. Errors of
    /// the driver, such as where one of the two has not happened or records no time.
    pub fn elapsed_ms(&self, end: &Event) -> Result<f32> {
        self.device.check_driver_of("end", &end.device)?;
        self.device.driver.event_elapsed_ms(self.handle, end.handle)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        self.device.driver.event_destroy(self.handle);
    }
}

/// A clause that does not hold, as an error of this crate.
fn broken(error: ContractError) -> Error {
    Error::Launch { kernel: error.kernel, rule: format!("requires {}: {}", error.clause, error.values) }
}

#[derive(Debug)]
struct LoadedModule {
    device: Device,
    handle: u64,
    text: Described,
}

/// The part of a PTX text that launches need.
#[derive(Debug)]
struct Described {
    /// Kernels that wait for the previous kernel of the stream.
    waiting: Vec<String>,
    /// The lines that describe kernels. PTX of other compilers has none.
    lines: Cow<'static, str>,
    origin: Origin,
}

/// The source that a PTX text was compiled from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// That of this program. Its kernels are what the program was built with.
    Program,
    /// Another version of epoxide's kernels, which is measured or tested in place of the embedded
    /// one. Its kernels take the same argument structs.
    OtherVersion,
}

impl Described {
    fn of(ptx: &str, origin: Origin) -> Described {
        let cut = CutPtx::new(ptx);
        let waiting = cut.waiting().map(str::to_owned).collect();
        Described { waiting, lines: Cow::Owned(cut.descriptions().collect()), origin }
    }

    /// An error where the text describes another kernel of the name, by [`check_fresh`] of the
    /// kernel. One without a description is not compared.
    fn check(&self, check_fresh: fn(&str) -> std::result::Result<(), StalePtx>) -> Result<()> {
        let Err(stale) = check_fresh(&self.lines) else { return Ok(()) };
        match &stale.ptx {
            None => Ok(()),
            Some(line) if self.origin == Origin::OtherVersion && params(line) == params(&stale.source) => {
                Ok(())
            }
            Some(_) => Err(Error::Ptx(stale.to_string())),
        }
    }
}

/// The argument structs in the description of a kernel.
fn params(line: &str) -> Option<&str> {
    line.split_once(" params=").and_then(|(_, params)| params.split(' ').next())
}

impl Drop for LoadedModule {
    fn drop(&mut self) {
        if self.device.driver.streams().are_given_up() {
            return;
        }
        // SAFETY: every `Kernel`, and every `Graph` with one, holds this `Arc`. Callers keep these
        // alive while their stream runs them, or give the device up.
        unsafe { self.device.driver.module_unload(self.handle) }
    }
}

/// A loaded PTX module. It is unloaded with the last of its clones, its kernels and the graphs that
/// recorded them. That last drop waits until running kernels of the device have ended.
#[derive(Debug, Clone)]
pub struct Module(Arc<LoadedModule>);

impl Module {
    /// Loads PTX text. [`Stream::call`] compares kernels that the text describes, as that of `cargo
    /// build-ptx` does, with those that this program was built with.
    ///
    /// # Errors
    /// [`Error::Ptx`] where the text is not PTX that the device runs, and errors of the driver.
    pub fn load(device: &Device, ptx: &str) -> Result<Module> {
        Module::load_described(device, ptx, Described::of(ptx, Origin::Program))
    }

    fn load_described(device: &Device, ptx: &str, text: Described) -> Result<Module> {
        let handle = device.driver.module_load(ptx)?;
        Ok(Module(Arc::new(LoadedModule { device: device.clone(), handle, text })))
    }

    /// An address that no other loaded module has.
    pub(super) fn address(&self) -> *const () {
        Arc::as_ptr(&self.0).cast()
    }

    /// Loads these kernels of [`shipped_ptx`].
    pub(crate) fn shipped(device: &Device, file: Option<&Path>, names: &[&str]) -> Result<Module> {
        // Found once a process: each buffer loads megabytes of text.
        static EMBEDDED: LazyLock<(Vec<&str>, String)> = LazyLock::new(|| {
            (epoxide_gpu::shipped().waiting().collect(), epoxide_gpu::shipped().descriptions().collect())
        });
        match shipped_ptx(file)? {
            Cow::Borrowed(_) => {
                let (all_waiting, lines) = &*EMBEDDED;
                let waiting = names.iter().filter(|name| all_waiting.contains(name));
                let waiting = waiting.map(|&name| name.to_owned()).collect();
                let text = Described { waiting, lines: Cow::Borrowed(lines), origin: Origin::Program };
                Module::load_described(device, &epoxide_gpu::shipped().only(names), text)
            }
            Cow::Owned(ptx) => {
                let ptx = CutPtx::new(&ptx).only(names);
                Module::load_described(device, &ptx, Described::of(&ptx, Origin::OtherVersion))
            }
        }
    }

    /// A kernel by its entry name; `max_shared_bytes` is the most dynamic shared memory it will be
    /// launched with.
    ///
    /// # Errors
    /// Errors of the driver, such as where the module has no such entry or the device less shared
    /// memory.
    pub fn kernel(&self, name: &'static str, max_shared_bytes: u32) -> Result<Kernel> {
        let limit = self.0.device.info().max_shared_bytes_per_block;
        if max_shared_bytes > limit {
            return Err(Error::Launch {
                kernel: name,
                rule: format!(
                    "{max_shared_bytes} bytes of dynamic shared memory wanted, the device has {limit}"
                ),
            });
        }
        let handle = self.0.device.driver.module_kernel(self.0.handle, name, max_shared_bytes)?;
        let waits = self.0.text.waiting.iter().any(|waiting| waiting == name);
        Ok(Kernel { module: self.clone(), handle, name, waits, compared: OnceLock::new() })
    }
}

/// Names a file with PTX to load instead of the embedded one. Development only.
const PTX_OVERRIDE: &str = "EPOXIDE_PTX";

/// The PTX of epoxide's kernels: the embedded one, or that of the file that is given or that
/// `EPOXIDE_PTX` names.
///
/// # Errors
/// [`Error::Argument`] where the file cannot be read.
pub fn shipped_ptx(file: Option<&Path>) -> Result<Cow<'static, str>> {
    ptx_of(file, std::env::var_os(PTX_OVERRIDE))
}

/// The text of the file that is given, or that the environment names.
fn ptx_of(given: Option<&Path>, named: Option<OsString>) -> Result<Cow<'static, str>> {
    let (argument, file) = match (given, &named) {
        (Some(given), _) => ("ptx", given),
        (None, Some(named)) => (PTX_OVERRIDE, Path::new(named)),
        (None, None) => return Ok(Cow::Borrowed(epoxide_gpu::PTX)),
    };
    read_text_file(file, bounded::PTX)
        .map(Cow::Owned)
        .map_err(|error| Error::argument(argument, file.display(), format!("cannot be read: {error}")))
}

/// A kernel of a loaded module, which it keeps. The last drop, of the [`Module`] or of a kernel of
/// it, waits until running kernels of the device have ended.
#[derive(Debug, Clone)]
pub struct Kernel {
    module: Module,
    handle: u64,
    name: &'static str,
    /// Whether it waits for the previous kernel of the stream, which kernels of other PTX may not.
    waits: bool,
    /// The kernel of this program that its description was compared with. A comparison of texts is
    /// too slow for each launch.
    compared: OnceLock<gpu::KernelInfo>,
}

impl Kernel {
    /// Kernel `K` of the PTX that epoxide ships, for [`Stream::call`]; `max_shared_bytes` is the
    /// most dynamic shared memory it will be launched with.
    ///
    /// # Errors
    /// If the device does not take the PTX, has less shared memory, or `EPOXIDE_PTX` names a file
    /// that cannot be read.
    pub fn shipped<K: gpu::Entry>(device: &Device, max_shared_bytes: u32) -> Result<Kernel> {
        let name = K::INFO.name;
        Module::shipped(device, None, &[name])?.kernel(name, max_shared_bytes)
    }

    /// The call, if its clauses hold and this is its kernel, of the source that this program was
    /// built with.
    fn takes<K: gpu::Entry>(&self, call: std::result::Result<Call<K>, ContractError>) -> Result<Call<K>> {
        let call = call.map_err(broken)?;
        self.is(&K::INFO, check_fresh::<K>)?;
        Ok(call)
    }

    /// An error where this is not the kernel, of the source that this program was built with.
    fn is(
        &self,
        kernel: &gpu::KernelInfo,
        check_fresh: fn(&str) -> std::result::Result<(), StalePtx>,
    ) -> Result<()> {
        if self.name != kernel.name {
            let rule = format!("its arguments were given to {}", self.name);
            return Err(Error::Launch { kernel: kernel.name, rule });
        }
        if self.compared.get() != Some(kernel) {
            self.module.0.text.check(check_fresh)?;
            // Two types of one name, such as of two versions of a crate, are compared each time.
            let _ = self.compared.set(*kernel);
        }
        Ok(())
    }
}

/// The shape of a launch.
#[derive(Debug, Clone, Copy)]
pub(crate) enum LaunchShape {
    /// All that the kernel's attribute names: `#[kernel(grid = .., block = .., ..)]`.
    Named,
    /// Blocks of the threads and dynamic shared memory that the kernel's attribute names:
    /// `#[kernel(block = .., ..)]`.
    Blocks(u32),
    /// Blocks, threads of a block, and bytes of its dynamic shared memory.
    All { grid: u32, block: u32, shared_bytes: u32 },
}

/// A recorded piece of stream work. It keeps the modules of its kernels.
#[derive(Debug)]
pub struct Graph {
    device: Device,
    handle: u64,
    modules: Vec<Module>,
}

impl Graph {
    /// Runs it in `stream`.
    ///
    /// # Errors
    /// Errors of the driver, such as of a shape that the device cannot run.
    ///
    /// # Safety
    /// All recorded addresses are live until the stream has passed the run. The graph is, too,
    /// unless the kernels in it are kept otherwise.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        self.check_stream(stream)?;
        stream.keep_if_recorded(&self.modules)?;
        self.device.driver.graph_launch(self.handle, stream.handle)
    }

    /// An error where the stream is of another device.
    pub(crate) fn check_stream(&self, stream: &Stream) -> Result<()> {
        if stream.device.is(&self.device) {
            return Ok(());
        }
        let rule = "must be one of the device that the graph was recorded on: make it there";
        Err(Error::argument("stream", format!("one of {}", stream.device.info().name), rule))
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.device.driver.graph_destroy(self.handle);
    }
}

#[cfg(test)]
mod tests {
    use epoxide_gpu::kernels::{CeilingPull, CeilingPush};
    use epoxide_gpu::layout::CeilingArgs;

    use super::*;
    use crate::driver::virt::{VirtConfig, VirtualGpu};

    #[test]
    fn another_file_takes_the_place_of_the_embedded_ptx() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("kernels.ptx");
        std::fs::write(&file, ".version 8.4").unwrap();
        let none = directory.path().join("none.ptx");
        let named = |file: &Path| Some(file.into());
        assert_eq!(ptx_of(None, named(&file)).unwrap(), ".version 8.4");
        assert_eq!(ptx_of(Some(&file), named(&none)).unwrap(), ".version 8.4");
        assert_eq!(ptx_of(None, None).unwrap(), epoxide_gpu::PTX);
        let error = ptx_of(None, named(&none)).unwrap_err().to_string();
        assert!(error.contains("EPOXIDE_PTX") && error.contains("none.ptx"), "{error}");
        let error = ptx_of(Some(&none), named(&file)).unwrap_err().to_string();
        assert!(!error.contains("EPOXIDE_PTX") && error.contains("none.ptx"), "{error}");
    }

    #[test]
    fn shipped_kernels_wait_as_their_text_says() {
        let device = VirtualGpu::new(VirtConfig::default());
        let waiting = epoxide_gpu::shipped().waiting().next().unwrap();
        let names = [CeilingPush::INFO.name, waiting];
        let shipped = Module::shipped(&device, None, &names).unwrap();
        let loaded = Module::load(&device, &epoxide_gpu::shipped().only(&names)).unwrap();
        assert_eq!(shipped.0.text.waiting, [waiting]);
        assert_eq!(loaded.0.text.waiting, [waiting]);
    }

    #[test]
    fn calls_that_break_the_contract_or_fit_another_kernel_are_refused() {
        let device = VirtualGpu::new(VirtConfig::default());
        let stream = Stream::new(&device).unwrap();
        let push = Kernel::shipped::<CeilingPush>(&device, 0).unwrap();
        let zero = bytemuck::Zeroable::zeroed();
        let args = CeilingArgs { row_bytes: 16, stages: 2, fanout: 1, num_ranks: 2, ..zero };
        let odd = CeilingArgs { row_bytes: 24, ..args };
        // SAFETY: both are refused before anything is launched.
        let (other, broken) = unsafe {
            (
                stream.call(&push, 1, 32, 0, CeilingPull::call(args)).unwrap_err(),
                stream.call(&push, 1, 32, 0, CeilingPush::call(odd)).unwrap_err(),
            )
        };
        assert!(other.to_string().contains("its arguments were given to ceiling_push"), "{other}");
        assert!(broken.to_string().contains("row_bytes"), "{broken}");
    }

    #[test]
    fn kernels_of_another_source_are_refused() {
        let device = VirtualGpu::new(VirtConfig::default());
        let name = CeilingPush::INFO.name;
        let ptx = epoxide_gpu::shipped().only(&[name]);
        let described = CeilingPush::INFO.to_string();
        assert_eq!(ptx.matches(&described).count(), 1);
        let edited = |from: &str, to: &str| ptx.replace(&described, &described.replace(from, to));
        let taken = |module: Module| {
            let zero = bytemuck::Zeroable::zeroed();
            let args = CeilingArgs { row_bytes: 16, stages: 2, fanout: 1, num_ranks: 2, ..zero };
            let kernel = module.kernel(name, 0).unwrap();
            let outcomes = [(); 2].map(|()| kernel.takes(CeilingPush::call(args)));
            outcomes.map(|outcome| outcome.map(drop).map_err(|error| error.to_string()))
        };
        let load = |ptx: &str| taken(Module::load(&device, ptx).unwrap());
        assert_eq!(load(&ptx), [Ok(()), Ok(())]);
        // Not of the builder: nothing describes it.
        assert_eq!(load(&edited("// kernel", "// of nvcc:")), [Ok(()), Ok(())]);
        let other_source = edited("source=", "source=1");
        let other_struct = edited("params=args:48:8", "params=args:56:8");
        for stale in [&other_source, &other_struct] {
            for outcome in load(stale) {
                let error = outcome.unwrap_err();
                assert!(error.contains("run `cargo build-ptx`") && error.contains(&described), "{error}");
            }
        }

        // A file in place of the embedded PTX may have kernels of other commits: they are measured
        // against each other. Their structs are those of this program.
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("other.ptx");
        let of_file = |text: &str| {
            std::fs::write(&file, text).unwrap();
            taken(Module::shipped(&device, Some(&file), &[name]).unwrap())
        };
        assert_eq!(of_file(&other_source), [Ok(()), Ok(())]);
        assert!(of_file(&other_struct).iter().all(Result::is_err));
    }
}
