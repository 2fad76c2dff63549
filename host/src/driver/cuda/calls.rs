//! The methods of [`Driver`]: each binds the context first.
//!
//! A stream's handle is its `CUstream`; an adopted one carries [`ADOPTED`] as well, a bit no
//! user-space pointer has.

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;

use super::context::Relaxed;
use super::device::CudaDevice;
use super::ffi::{self, CuContext, CuEvent, CuGraph, CuGraphExec, CuResult, CuStream};
use super::late::{self, DevResource};
use super::pool::is_captured;
use super::{context, memory, module};
use crate::driver::{
    CopyEnd, DeviceInfo, DevicePtr, Driver, FabricHandle, LaunchConfig, MemoryKind, RawMemory, RawStream,
    Staging, Streams,
};
use crate::error::{Error, Result};

pub(super) const ADOPTED: u64 = 1 << 63;

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: usize = 2;

/// The `CUstream` behind a handle.
pub(super) fn raw(stream: u64) -> CuStream {
    (stream & !ADOPTED) as CuStream
}

/// The green context that a live stream is of. It shares the memory of the primary context.
fn green_context(stream: CuStream) -> Option<*mut c_void> {
    let context_of = late::late().stream_get_green_ctx?;
    let mut context = std::ptr::null_mut();
    // SAFETY: the out pointer is valid, and the stream is live.
    let result = unsafe { context_of(stream, &mut context) };
    (result == CuResult::SUCCESS && !context.is_null()).then_some(context)
}

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

    fn order_frees_behind(&self, stream: u64) -> Result<()> {
        let _bound = self.bind()?;
        // Under a capture of this library, whose beginning has ordered earlier work, nothing is left
        // to order.
        // SAFETY: the stream is live and the list of streams held, as the trait demands.
        unsafe { self.pool.order_behind(raw(stream)) }.map(|_| ())
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

    fn import_host(&self, fd: OwnedFd, bytes: u64, peer: &str) -> Result<RawMemory> {
        memory::import_host(&self.bind()?, fd, bytes, peer)
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
        let _bound = self.bind()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: both out pointers are valid.
        unsafe { ffi::cuCtxGetStreamPriorityRange(&mut least, &mut greatest) }
            .check("cuCtxGetStreamPriorityRange")?;
        let priority = if high_priority { greatest } else { least };
        let mut stream: CuStream = std::ptr::null_mut();
        // SAFETY: the out pointer is valid and a context is bound.
        unsafe { ffi::cuStreamCreateWithPriority(&mut stream, ffi::CU_STREAM_NON_BLOCKING, priority) }
            .check("cuStreamCreateWithPriority")?;
        Ok(stream as u64)
    }

    unsafe fn stream_adopt(&self, stream: RawStream) -> Result<u64> {
        if stream.0 as usize == PER_THREAD {
            let rule = "it is another stream on each thread: make a stream, and give that";
            return Err(Error::argument("stream", "the per-thread default stream", rule));
        }
        let _bound = self.bind()?;
        let mut context: CuContext = std::ptr::null_mut();
        // SAFETY: the out pointer is valid; the caller promises a live stream.
        let result = unsafe { ffi::cuStreamGetCtx(stream.0, &mut context) };
        let is_primary = context == self.context.as_raw().cast();
        // A driver may reject the query; only a clear "no" is an error.
        if result == CuResult::SUCCESS && !is_primary && green_context(stream.0).is_none() {
            let ordinal = self.info.ordinal;
            let rule =
                format!("it belongs to another context; pass a stream of device {ordinal}'s primary context");
            return Err(Error::argument("stream", format!("{:p}", stream.0), rule));
        }
        Ok(stream.0 as u64 | ADOPTED)
    }

    fn stream_multiprocessors(&self, stream: u64) -> Result<u32> {
        let _bound = self.bind()?;
        let (context, resource_of) = (green_context(raw(stream)), late::late().green_ctx_get_dev_resource);
        let (Some(context), Some(resource_of)) = (context, resource_of) else {
            return Ok(self.info.sm_count);
        };
        let mut resource = DevResource::default();
        // SAFETY: the driver has just returned this green context; `resource` has room for any
        // kind.
        unsafe { resource_of(context, &mut resource, DevResource::SM) }.check("cuGreenCtxGetDevResource")?;
        Ok(resource.sm_count)
    }

    fn stream_raw(&self, stream: u64) -> RawStream {
        RawStream(raw(stream))
    }

    fn stream_destroy(&self, stream: u64) {
        if stream & ADOPTED == 0 {
            // SAFETY: its owner frees it once; the driver lets its work finish.
            self.clean_up(|_| unsafe { ffi::cuStreamDestroy_v2(raw(stream)) }.log("cuStreamDestroy"));
        }
    }

    fn stream_synchronize(&self, stream: u64) -> Result<()> {
        let _bound = self.bind()?;
        // SAFETY: the stream is live, as the trait demands.
        unsafe { ffi::cuStreamSynchronize(raw(stream)) }.check("cuStreamSynchronize")
    }

    fn stream_query(&self, stream: u64) -> Result<bool> {
        let (_bound, _relaxed) = (self.bind()?, Relaxed::new());
        // SAFETY: the stream is live, as the trait demands.
        unsafe { ffi::cuStreamQuery(raw(stream)) }.check_ready("cuStreamQuery")
    }

    fn event_create(&self, timing: bool) -> Result<u64> {
        let _bound = self.bind()?;
        let flags = if timing { ffi::CU_EVENT_DEFAULT } else { ffi::CU_EVENT_DISABLE_TIMING };
        let mut event: CuEvent = std::ptr::null_mut();
        // SAFETY: the out pointer is valid and a context is bound.
        unsafe { ffi::cuEventCreate(&mut event, flags) }.check("cuEventCreate")?;
        Ok(event as u64)
    }

    fn event_destroy(&self, event: u64) {
        // SAFETY: its owner frees it once; a pending record still completes.
        self.clean_up(|_| unsafe { ffi::cuEventDestroy_v2(event as CuEvent) }.log("cuEventDestroy"));
    }

    fn event_record(&self, event: u64, stream: u64) -> Result<()> {
        let _bound = self.bind()?;
        // SAFETY: both are live, as the trait demands.
        unsafe { ffi::cuEventRecord(event as CuEvent, raw(stream)) }.check("cuEventRecord")
    }

    fn stream_wait_event(&self, stream: u64, event: u64) -> Result<()> {
        let _bound = self.bind()?;
        // SAFETY: both are live, as the trait demands.
        unsafe { ffi::cuStreamWaitEvent(raw(stream), event as CuEvent, 0) }.check("cuStreamWaitEvent")
    }

    fn event_synchronize(&self, event: u64) -> Result<()> {
        let _bound = self.bind()?;
        // SAFETY: the event is live, as the trait demands.
        unsafe { ffi::cuEventSynchronize(event as CuEvent) }.check("cuEventSynchronize")
    }

    fn event_query(&self, event: u64) -> Result<bool> {
        let (_bound, _relaxed) = (self.bind()?, Relaxed::new());
        // SAFETY: the event is live, as the trait demands.
        unsafe { ffi::cuEventQuery(event as CuEvent) }.check_ready("cuEventQuery")
    }

    fn event_elapsed_ms(&self, start: u64, end: u64) -> Result<f32> {
        const CALL: &str = "cuEventElapsedTime";
        let _bound = self.bind()?;
        let mut milliseconds = 0.0;
        // SAFETY: both are live, as the trait demands, and the out pointer is valid.
        let result = unsafe { ffi::cuEventElapsedTime(&mut milliseconds, start as CuEvent, end as CuEvent) };
        let remedy = match result {
            CuResult::NOT_READY => "; an event has not passed yet: synchronise with the later one first",
            CuResult::INVALID_HANDLE => {
                "; both events must be created with timing, and recorded outside of a capture"
            }
            other => return other.check(CALL).map(|()| milliseconds),
        };
        Err(result.error_with(CALL, remedy.into()))
    }

    unsafe fn copy(&self, stream: u64, dst: CopyEnd, src: CopyEnd, bytes: u64) -> Result<()> {
        let _bound = self.bind()?;
        if bytes == 0 {
            return Ok(());
        }
        let (stream, bytes) = (raw(stream), bytes as usize);
        // SAFETY: passed on to the caller; with unified addressing a host pointer is a valid
        // CUdeviceptr.
        unsafe {
            match (dst, src) {
                (CopyEnd::Device(dst), CopyEnd::Host(src)) => {
                    ffi::cuMemcpyHtoDAsync_v2(dst.0, src.cast(), bytes, stream).check("cuMemcpyHtoDAsync")
                }
                (CopyEnd::Host(dst), CopyEnd::Device(src)) => {
                    ffi::cuMemcpyDtoHAsync_v2(dst.cast(), src.0, bytes, stream).check("cuMemcpyDtoHAsync")
                }
                (CopyEnd::Device(dst), CopyEnd::Device(src)) => {
                    ffi::cuMemcpyDtoDAsync_v2(dst.0, src.0, bytes, stream).check("cuMemcpyDtoDAsync")
                }
                (CopyEnd::Host(dst), CopyEnd::Host(src)) => {
                    ffi::cuMemcpyAsync(dst as u64, src as u64, bytes, stream).check("cuMemcpyAsync")
                }
            }
        }
    }

    unsafe fn fill(&self, stream: u64, dst: DevicePtr, value: u8, bytes: u64) -> Result<()> {
        let _bound = self.bind()?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: passed on to the caller.
        unsafe { ffi::cuMemsetD8Async(dst.0, value, bytes as usize, raw(stream)) }.check("cuMemsetD8Async")
    }

    fn stream_is_capturing(&self, stream: u64) -> Result<bool> {
        let _bound = self.bind()?;
        is_captured(raw(stream))
    }

    fn stream_capture(&self, stream: u64) -> Result<u64> {
        use std::ptr::null_mut;

        let _bound = self.bind()?;
        let (mut status, mut id) = (ffi::CU_STREAM_CAPTURE_STATUS_NONE, 0);
        // SAFETY: the stream is live, as the trait demands; the out pointers are valid, or null
        // where the driver leaves the result out.
        let info = unsafe {
            let (status, id) = (&mut status, &mut id);
            ffi::cuStreamGetCaptureInfo_v2(raw(stream), status, id, null_mut(), null_mut(), null_mut())
        };
        info.check("cuStreamGetCaptureInfo")?;
        // The driver leaves the number as it was unless a capture is active.
        Ok(id)
    }

    fn capture_begin(&self, stream: u64) -> Result<()> {
        let _bound = self.bind()?;
        // Other threads are free to make any call meanwhile; this one must only enqueue.
        let mode = ffi::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is live, as the trait demands.
        unsafe { ffi::cuStreamBeginCapture_v2(raw(stream), mode) }.check("cuStreamBeginCapture")
    }

    fn capture_end(&self, stream: u64) -> Result<u64> {
        let _bound = self.bind()?;
        let mut graph: CuGraph = std::ptr::null_mut();
        // SAFETY: the stream is live, as the trait demands, and the out pointer is valid.
        unsafe { ffi::cuStreamEndCapture(raw(stream), &mut graph) }.check("cuStreamEndCapture")?;
        let mut exec: CuGraphExec = std::ptr::null_mut();
        // SAFETY: the graph is the one just recorded, and the out pointer is valid.
        let instantiated = unsafe { ffi::cuGraphInstantiateWithFlags(&mut exec, graph, 0) };
        // The executable graph is a copy, so the recording itself can be destroyed in either case.
        // SAFETY: the graph is ours and is not used again.
        unsafe { ffi::cuGraphDestroy(graph) }.log("cuGraphDestroy");
        instantiated.check("cuGraphInstantiateWithFlags")?;
        Ok(exec as u64)
    }

    fn graph_launch(&self, graph: u64, stream: u64) -> Result<()> {
        let _bound = self.bind()?;
        // SAFETY: both are live, as the trait demands.
        unsafe { ffi::cuGraphLaunch(graph as CuGraphExec, raw(stream)) }.check("cuGraphLaunch")
    }

    fn graph_destroy(&self, graph: u64) {
        // SAFETY: its owner frees it once; a run in flight completes.
        self.clean_up(|_| unsafe { ffi::cuGraphExecDestroy(graph as CuGraphExec) }.log("cuGraphExecDestroy"));
    }
}

impl Drop for CudaDevice {
    fn drop(&mut self) {
        // Without the context the pool is leaked, as the pieces are.
        let (pieces, mut pool) = (self.staging.drain(), ManuallyDrop::new(self.pool.take()));
        if let Some(departed) = self.streams.hold().departed.take() {
            self.stream_destroy(departed);
        }
        self.clean_up(|bound| {
            for piece in &pieces {
                // SAFETY: nothing is left that could copy through them, and they were taken out of
                // their only list.
                unsafe { memory::free(bound, piece) };
            }
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut pool) };
        });
    }
}
