//! [`CudaDevice`]: the trait's methods, each a binding of the context and one call.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cust::context::Context;
use cust::device::Device as CustDevice;

use super::error::unavailable;
use super::ffi::CuStream;
use super::pool::Pool;
use super::vmm::{self, Sharing};
use super::{context, graph, memory, module, stream};
use crate::driver::{
    CopyEnd, Device, DeviceInfo, DevicePtr, FabricHandle, LaunchConfig, MemoryKind, RawMemory, RawStream,
    Staging, Streams,
};
use crate::error::{Error, Result};

/// Kernels are compiled for `sm_90`.
const OLDEST_COMPUTE_CAPABILITY: (i32, i32) = (9, 0);

/// One CUDA device, through its primary context.
///
/// May be used from any thread and opened more than once. Other users of the primary context in this process (candle,
/// burn, the CUDA runtime) see the same streams and addresses.
#[derive(Debug)]
pub struct CudaDevice {
    pub(super) info: DeviceInfo,
    pub(super) device: CustDevice,
    /// Where [`MemoryKind::Device`] comes from. Before the context, which it needs to go.
    pub(super) pool: Pool,
    pub(super) context: Context,
    /// What [`MemoryKind::Shareable`] can do, or why it cannot be had.
    pub(super) sharing: Result<Sharing>,
    staging: Staging,
    streams: Streams,
    /// The files behind [`MemoryKind::SharedHost`], by host address.
    files: Mutex<HashMap<u64, OwnedFd>>,
    /// Names of the kernels looked up so far, for errors.
    kernels: Mutex<HashMap<u64, &'static str>>,
}

impl CudaDevice {
    /// Opens a device by its ordinal among the visible ones.
    ///
    /// [`Error::Unavailable`](crate::Error::Unavailable) where there is no driver, no such device, or one that is too
    /// old for the kernels.
    pub fn open(ordinal: u32) -> Result<Arc<dyn Device>> {
        let what = || format!("CUDA device {ordinal}");
        let count = context::device_count()?;
        if ordinal >= count {
            return Err(unavailable(
                what(),
                format!(
                    "this process sees {count} device(s), 0 to {}; start fewer ranks per node, or look at \
                     CUDA_VISIBLE_DEVICES",
                    count - 1
                ),
            ));
        }
        let device = context::cust_device(ordinal)?;
        let info = context::describe(device)?;
        let (major, minor) = context::compute_capability(device)?;
        if (major, minor) < OLDEST_COMPUTE_CAPABILITY {
            return Err(unavailable(
                what(),
                format!(
                    "{} has compute capability {major}.{minor}, and the kernels are built for sm_90; use a Hopper or \
                     newer GPU, or the virtual GPU",
                    info.name
                ),
            ));
        }
        let context = context::retain_primary(device)?;
        let sharing = vmm::sharing(device);
        let pool = {
            let _current = context::Current::set(&context)?;
            Pool::new(device.as_raw())?
        };
        Ok(Arc::new(CudaDevice {
            info,
            device,
            context,
            sharing,
            pool,
            staging: Staging::default(),
            streams: Streams::default(),
            files: Mutex::default(),
            kernels: Mutex::default(),
        }))
    }

    pub(super) fn keep_file(&self, host: u64, file: OwnedFd) {
        self.files().insert(host, file);
    }

    pub(super) fn take_file(&self, host: u64) -> Option<OwnedFd> {
        self.files().remove(&host)
    }

    /// A descriptor of the file that is mapped at this host address.
    pub(super) fn file(&self, host: u64) -> Result<OwnedFd> {
        let files = self.files();
        let file = files
            .get(&host)
            .ok_or_else(|| Error::argument("memory", format!("{host:#x}"), "it was freed"))?;
        file.try_clone().map_err(|error| Error::os("dup", error))
    }

    fn files(&self) -> MutexGuard<'_, HashMap<u64, OwnedFd>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn remember_kernel(&self, kernel: u64, name: &'static str) {
        self.kernels.lock().unwrap_or_else(PoisonError::into_inner).insert(kernel, name);
    }

    pub(super) fn kernel_name(&self, kernel: u64) -> &'static str {
        let kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        kernels.get(&kernel).copied().unwrap_or("an unknown kernel")
    }

    /// Runs a clean-up that cannot return an error.
    fn clean_up(&self, work: impl FnOnce(&context::Bound<'_>)) {
        match self.bind() {
            Ok(bound) => work(&bound),
            Err(error) => tracing::warn!("a CUDA object is leaked: {error}"),
        }
    }
}

impl Device for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn has_native_atomics_with(&self, pci_bus_id: &str) -> Result<bool> {
        context::has_native_atomics(self.device, pci_bus_id)
    }

    fn free_memory(&self) -> Result<u64> {
        memory::free_bytes(&self.bind()?)
    }

    fn alloc(&self, bytes: u64, kind: MemoryKind, label: &str) -> Result<RawMemory> {
        memory::alloc(&self.bind()?, bytes, kind, label)
    }

    fn staging(&self) -> &Staging {
        &self.staging
    }

    fn streams(&self) -> &Streams {
        &self.streams
    }

    fn export(&self, memory: &RawMemory) -> Result<OwnedFd> {
        memory::export(&self.bind()?, memory)
    }

    fn export_dma_buf(&self, memory: &RawMemory) -> Result<OwnedFd> {
        let _bound = self.bind()?;
        memory::export_dma_buf(memory.ptr, memory.bytes)
    }

    fn import(&self, fd: OwnedFd, bytes: u64, peer: &str) -> Result<RawMemory> {
        memory::import(&self.bind()?, fd, bytes, peer)
    }

    fn export_fabric(&self, memory: &RawMemory) -> Result<FabricHandle> {
        memory::export_fabric(&self.bind()?, memory)
    }

    fn import_fabric(&self, handle: &FabricHandle, bytes: u64, peer: &str) -> Result<RawMemory> {
        memory::import_fabric(&self.bind()?, handle, bytes, peer)
    }

    unsafe fn free(&self, memory: &RawMemory) {
        // SAFETY: passed on to the caller.
        self.clean_up(|bound| unsafe { memory::free(bound, memory) });
    }

    fn module_load(&self, ptx: &str) -> Result<u64> {
        module::load(&self.bind()?, ptx)
    }

    fn module_kernel(&self, module: u64, name: &'static str, max_shared_bytes: u32) -> Result<u64> {
        module::kernel(&self.bind()?, module, name, max_shared_bytes)
    }

    unsafe fn module_unload(&self, module: u64) {
        // SAFETY: passed on to the caller.
        self.clean_up(|bound| unsafe { module::unload(bound, module) });
    }

    unsafe fn launch(&self, stream: u64, kernel: u64, config: &LaunchConfig, params: &[&[u8]]) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { module::launch(&self.bind()?, stream, kernel, config, params) }
    }

    fn stream_create(&self, high_priority: bool) -> Result<u64> {
        let stream = stream::create(&self.bind()?, high_priority)?;
        self.pool.add_stream(stream as CuStream);
        Ok(stream)
    }

    unsafe fn stream_adopt(&self, raw: RawStream) -> Result<u64> {
        // SAFETY: passed on to the caller.
        let stream = unsafe { stream::adopt(&self.bind()?, raw) }?;
        self.pool.add_stream(raw.0);
        Ok(stream)
    }

    fn stream_raw(&self, stream: u64) -> RawStream {
        RawStream(stream::raw(stream))
    }

    fn stream_destroy(&self, stream: u64) {
        self.clean_up(|bound| {
            self.pool.remove_stream(stream::raw(stream));
            stream::destroy(bound, stream);
        });
    }

    fn stream_synchronize(&self, stream: u64) -> Result<()> {
        stream::synchronize(&self.bind()?, stream)
    }

    fn stream_query(&self, stream: u64) -> Result<bool> {
        stream::query(&self.bind()?, stream)
    }

    fn event_create(&self, timing: bool) -> Result<u64> {
        stream::event_create(&self.bind()?, timing)
    }

    fn event_destroy(&self, event: u64) {
        self.clean_up(|bound| stream::event_destroy(bound, event));
    }

    fn event_record(&self, event: u64, stream: u64) -> Result<()> {
        stream::event_record(&self.bind()?, event, stream)
    }

    fn stream_wait_event(&self, stream: u64, event: u64) -> Result<()> {
        let bound = self.bind()?;
        // A stream may join a capture by this.
        let _still = self.pool.streams();
        stream::wait_event(&bound, stream, event)
    }

    fn event_synchronize(&self, event: u64) -> Result<()> {
        stream::event_synchronize(&self.bind()?, event)
    }

    fn event_query(&self, event: u64) -> Result<bool> {
        stream::event_query(&self.bind()?, event)
    }

    fn event_elapsed_ms(&self, start: u64, end: u64) -> Result<f32> {
        stream::event_elapsed_ms(&self.bind()?, start, end)
    }

    unsafe fn copy(&self, stream: u64, dst: CopyEnd, src: CopyEnd, bytes: u64) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { memory::copy(&self.bind()?, stream, dst, src, bytes) }
    }

    unsafe fn fill(&self, stream: u64, dst: DevicePtr, value: u8, bytes: u64) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { memory::fill(&self.bind()?, stream, dst, value, bytes) }
    }

    fn stream_is_capturing(&self, stream: u64) -> Result<bool> {
        stream::is_capturing(&self.bind()?, stream)
    }

    fn capture_begin(&self, stream: u64) -> Result<()> {
        let bound = self.bind()?;
        let _still = self.pool.streams();
        graph::begin(&bound, stream)
    }

    fn capture_end(&self, stream: u64) -> Result<u64> {
        graph::end(&self.bind()?, stream)
    }

    fn graph_launch(&self, graph: u64, stream: u64) -> Result<()> {
        graph::launch(&self.bind()?, graph, stream)
    }

    fn graph_destroy(&self, graph: u64) {
        self.clean_up(|bound| graph::destroy(bound, graph));
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        let pieces = self.staging.drain();
        self.clean_up(|bound| {
            for piece in &pieces {
                // SAFETY: nothing is left that could copy through them, and they were taken out of their only list.
                unsafe { memory::free(bound, piece) };
            }
        });
    }
}
