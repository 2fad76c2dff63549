//! The methods of [`Driver`], each a binding of the context and one call.

use std::os::fd::OwnedFd;

use super::device::CudaDevice;
use super::{context, copy, graph, memory, module, stream};
use crate::driver::{
    CopyEnd, DeviceInfo, DevicePtr, Driver, FabricHandle, LaunchConfig, MemoryKind, RawMemory, RawStream,
    Staging, Streams,
};
use crate::error::Result;

impl Driver for CudaDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn has_native_atomics_with(&self, pci_bus_id: &str) -> Result<bool> {
        context::has_native_atomics(self.device, pci_bus_id)
    }

    fn run_current(&self, call: &mut dyn FnMut()) -> Result<()> {
        let _bound = self.bind()?;
        call();
        Ok(())
    }

    fn free_memory(&self) -> Result<u64> {
        context::free_bytes(&self.bind()?.current)
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
        stream::create(&self.bind()?, high_priority)
    }

    unsafe fn stream_adopt(&self, raw: RawStream) -> Result<u64> {
        // SAFETY: passed on to the caller.
        unsafe { stream::adopt(&self.bind()?, raw) }
    }

    fn stream_multiprocessors(&self, stream: u64) -> Result<u32> {
        stream::multiprocessors(&self.bind()?, stream)
    }

    fn stream_raw(&self, stream: u64) -> RawStream {
        RawStream(stream::raw(stream))
    }

    fn stream_destroy(&self, stream: u64) {
        self.clean_up(|bound| {
            // SAFETY: the stream is live until the next line, and its owner holds the list of
            // streams.
            unsafe { self.pool.come_behind(stream::raw(stream)) };
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
        stream::wait_event(&self.bind()?, stream, event)
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
        unsafe { copy::copy(&self.bind()?, stream, dst, src, bytes) }
    }

    unsafe fn fill(&self, stream: u64, dst: DevicePtr, value: u8, bytes: u64) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { copy::fill(&self.bind()?, stream, dst, value, bytes) }
    }

    fn stream_is_capturing(&self, stream: u64) -> Result<bool> {
        stream::is_capturing(&self.bind()?, stream)
    }

    fn capture_begin(&self, stream: u64) -> Result<()> {
        graph::begin(&self.bind()?, stream)
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
                // SAFETY: nothing is left that could copy through them, and they were taken out of
                // their only list.
                unsafe { memory::free(bound, piece) };
            }
        });
    }
}
