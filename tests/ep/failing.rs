//! A device whose driver rejects a launch, an allocation or an ordering on a test's request, or
//! calls the test.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use epoxide::driver::{Device, DeviceInfo, DevicePtr, LaunchConfig, MemoryKind, RawStream};
use epoxide::internal::VirtualTime;
use epoxide::internal::driver::{CopyEnd, Driver, FabricHandle, RawMemory, Staging, Streams, driver};
use epoxide::{Error, Result};
use epoxide_gpu::layout::Section;

/// Forwards every call to another device, except for the next launch of some kernels after a
/// request to reject it, and for allocations with one label.
#[derive(Debug)]
pub struct FailingDevice {
    inner: Arc<dyn Driver>,
    kernels: &'static [&'static str],
    /// Handles of these kernels.
    handles: Mutex<Vec<u64>>,
    refuses: AtomicBool,
    /// Allocations with this label fail; for [`LINKS`], queries of links.
    refused_label: Option<&'static str>,
    /// Frees cannot be ordered behind streams.
    refuses_order: AtomicBool,
    /// Runs within the next call of this kind.
    within: Mutex<Option<(DriverCall, Within)>>,
}

/// Calls of the driver that call the test.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum DriverCall {
    CreateEvent,
    WaitForEvent,
}

/// A call of the test's.
struct Within(Box<dyn FnOnce() + Send>);

impl fmt::Debug for Within {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Within")
    }
}

/// The label that stands for queries of links.
pub const LINKS: &str = "links";

/// Error of the rejected call.
pub const REFUSAL: &str = "the test refuses it";

impl FailingDevice {
    pub fn new(inner: Device, kernels: &'static [&'static str]) -> Arc<FailingDevice> {
        FailingDevice::over(inner, kernels, None)
    }

    /// A device whose allocations with this label fail, or its queries of links where it is
    /// [`LINKS`].
    pub fn without(inner: Device, label: &'static str) -> Arc<FailingDevice> {
        FailingDevice::over(inner, &[], Some(label))
    }

    fn over(
        inner: Device,
        kernels: &'static [&'static str],
        refused_label: Option<&'static str>,
    ) -> Arc<FailingDevice> {
        let inner = driver(&inner).clone();
        let (handles, refuses) = (Mutex::default(), AtomicBool::new(false));
        let (refuses_order, within) = (AtomicBool::new(false), Mutex::default());
        Arc::new(FailingDevice { inner, kernels, handles, refuses, refused_label, refuses_order, within })
    }

    /// From now on frees cannot be ordered behind streams.
    pub fn refuse_order(&self) {
        self.refuses_order.store(true, Ordering::Relaxed);
    }

    /// The next call of this kind first calls `work`.
    pub fn call_within(&self, call: DriverCall, work: impl FnOnce() + Send + 'static) {
        *self.within.lock().unwrap() = Some((call, Within(Box::new(work))));
    }

    fn enter(&self, call: DriverCall) {
        let work = self.within.lock().unwrap().take_if(|(of, _)| *of == call);
        if let Some((_, Within(work))) = work {
            work();
        }
    }

    /// The next launch of one of the kernels fails.
    pub fn refuse_next(&self) {
        self.refuses.store(true, Ordering::Relaxed);
    }
}

// SAFETY of all unsafe methods: the caller upholds the conditions of the forwarded call.
impl Driver for FailingDevice {
    fn module_kernel(&self, module: u64, name: &'static str, max_shared_bytes: u32) -> Result<u64> {
        let kernel = self.inner.module_kernel(module, name, max_shared_bytes)?;
        if self.kernels.contains(&name) {
            self.handles.lock().unwrap().push(kernel);
        }
        Ok(kernel)
    }

    unsafe fn launch(&self, stream: u64, kernel: u64, config: &LaunchConfig, params: &[&[u8]]) -> Result<()> {
        if self.handles.lock().unwrap().contains(&kernel) && self.refuses.swap(false, Ordering::Relaxed) {
            return Err(Error::os("launch", REFUSAL));
        }
        // SAFETY: as above.
        unsafe { self.inner.launch(stream, kernel, config, params) }
    }

    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn has_native_atomics_with(&self, pci_bus_id: &str) -> Result<bool> {
        if self.refused_label == Some(LINKS) {
            return Err(Error::os("links", REFUSAL));
        }
        self.inner.has_native_atomics_with(pci_bus_id)
    }

    fn free_memory(&self) -> Result<u64> {
        self.inner.free_memory()
    }

    fn alloc(&self, bytes: u64, kind: MemoryKind, label: &str) -> Result<RawMemory> {
        if self.refused_label == Some(label) {
            return Err(Error::os("alloc", REFUSAL));
        }
        self.inner.alloc(bytes, kind, label)
    }

    fn order_frees_behind(&self, stream: u64) -> Result<()> {
        if self.refuses_order.load(Ordering::Relaxed) {
            return Err(Error::os("order", REFUSAL));
        }
        self.inner.order_frees_behind(stream)
    }

    fn describe(&self, memory: &RawMemory, sections: &[Section]) {
        self.inner.describe(memory, sections);
    }

    fn watch_host(&self, memory: &RawMemory) {
        self.inner.watch_host(memory);
    }

    unsafe fn host_load(&self, memory: &RawMemory, offset: u64) -> Result<u64> {
        // SAFETY: as above.
        unsafe { self.inner.host_load(memory, offset) }
    }

    fn host_reads(&self, memory: &RawMemory, offset: u64, bytes: u64) -> Result<()> {
        self.inner.host_reads(memory, offset, bytes)
    }

    unsafe fn host_store(&self, memory: &RawMemory, offset: u64, value: u64) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.inner.host_store(memory, offset, value) }
    }

    fn host_writes(&self, memory: &RawMemory, offset: u64, bytes: u64) -> Result<()> {
        self.inner.host_writes(memory, offset, bytes)
    }

    fn staging(&self) -> &Staging {
        self.inner.staging()
    }

    fn streams(&self) -> &Streams {
        self.inner.streams()
    }

    fn export(&self, memory: &RawMemory) -> Result<OwnedFd> {
        self.inner.export(memory)
    }

    fn export_dma_buf(&self, memory: &RawMemory) -> Result<OwnedFd> {
        self.inner.export_dma_buf(memory)
    }

    fn import(&self, fd: OwnedFd, bytes: u64, peer: &str) -> Result<RawMemory> {
        self.inner.import(fd, bytes, peer)
    }

    fn import_host(&self, fd: OwnedFd, bytes: u64, peer: &str) -> Result<RawMemory> {
        self.inner.import_host(fd, bytes, peer)
    }

    fn export_fabric(&self, memory: &RawMemory) -> Result<FabricHandle> {
        self.inner.export_fabric(memory)
    }

    fn import_fabric(&self, handle: &FabricHandle, bytes: u64, peer: &str) -> Result<RawMemory> {
        self.inner.import_fabric(handle, bytes, peer)
    }

    unsafe fn free(&self, memory: &RawMemory) {
        // SAFETY: as above.
        unsafe { self.inner.free(memory) }
    }

    fn module_load(&self, ptx: &str) -> Result<u64> {
        self.inner.module_load(ptx)
    }

    unsafe fn module_unload(&self, module: u64) {
        // SAFETY: as above.
        unsafe { self.inner.module_unload(module) }
    }

    fn stream_create(&self, high_priority: bool) -> Result<u64> {
        self.inner.stream_create(high_priority)
    }

    unsafe fn stream_adopt(&self, raw: RawStream) -> Result<u64> {
        // SAFETY: as above.
        unsafe { self.inner.stream_adopt(raw) }
    }

    fn stream_raw(&self, stream: u64) -> RawStream {
        self.inner.stream_raw(stream)
    }

    fn stream_destroy(&self, stream: u64) {
        self.inner.stream_destroy(stream);
    }

    fn stream_synchronize(&self, stream: u64) -> Result<()> {
        self.inner.stream_synchronize(stream)
    }

    fn stream_query(&self, stream: u64) -> Result<bool> {
        self.inner.stream_query(stream)
    }

    fn event_create(&self, timing: bool) -> Result<u64> {
        self.enter(DriverCall::CreateEvent);
        self.inner.event_create(timing)
    }

    fn event_destroy(&self, event: u64) {
        self.inner.event_destroy(event);
    }

    fn event_record(&self, event: u64, stream: u64) -> Result<()> {
        self.inner.event_record(event, stream)
    }

    fn stream_wait_event(&self, stream: u64, event: u64) -> Result<()> {
        self.enter(DriverCall::WaitForEvent);
        self.inner.stream_wait_event(stream, event)
    }

    fn event_synchronize(&self, event: u64) -> Result<()> {
        self.inner.event_synchronize(event)
    }

    fn event_query(&self, event: u64) -> Result<bool> {
        self.inner.event_query(event)
    }

    fn event_elapsed_ms(&self, start: u64, end: u64) -> Result<f32> {
        self.inner.event_elapsed_ms(start, end)
    }

    unsafe fn copy(&self, stream: u64, dst: CopyEnd, src: CopyEnd, bytes: u64) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.inner.copy(stream, dst, src, bytes) }
    }

    unsafe fn fill(&self, stream: u64, dst: DevicePtr, value: u8, bytes: u64) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.inner.fill(stream, dst, value, bytes) }
    }

    fn time(&self) -> Option<VirtualTime> {
        self.inner.time()
    }

    fn make_progress(&self) -> bool {
        self.inner.make_progress()
    }

    fn stream_is_capturing(&self, stream: u64) -> Result<bool> {
        self.inner.stream_is_capturing(stream)
    }

    fn stream_capture(&self, stream: u64) -> Result<u64> {
        self.inner.stream_capture(stream)
    }

    fn capture_begin(&self, stream: u64) -> Result<()> {
        self.inner.capture_begin(stream)
    }

    fn capture_end(&self, stream: u64) -> Result<u64> {
        self.inner.capture_end(stream)
    }

    fn graph_launch(&self, graph: u64, stream: u64) -> Result<()> {
        self.inner.graph_launch(graph, stream)
    }

    fn graph_destroy(&self, graph: u64) {
        self.inner.graph_destroy(graph);
    }
}
