//! The methods of [`Driver`], with the waits of the table in the module above.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use epoxide_gpu::layout::Section;
use epoxide_vgpu::stream::{Capture, HostPtr, Mark, Op, Queue, Source, Target, Transfer};
use epoxide_vgpu::{PtxError, Region};

use super::gpu::{Runner, VirtualGpu, memory_error};
use super::manual::Drive;
use super::modules;
use super::state::{Allocation, EventState, LastRecord, LoadedKernel, new_handle};
use super::work::Recorded;
use crate::driver::{
    CopyEnd, DeviceInfo, DevicePtr, Driver, LaunchConfig, MemoryKind, RawMemory, RawStream, Staging, Streams,
};
use crate::error::{Error, Result};
use crate::virtual_time::VirtualTime;

/// The unit of allocation, in bytes.
const PAGE: u64 = 4096;

/// How long a polling thread yields its processor to the engine's.
const NAP: Duration = Duration::from_micros(50);
/// Waits that the report of one that has expired names.
const LONGEST_WAITS: usize = 4;
/// Warp instructions that one [`Driver::make_progress`] runs.
const PROGRESS_SLICE: u64 = 16 * 1024;

impl Driver for VirtualGpu {
    fn info(&self) -> &DeviceInfo {
        &self.shared.info
    }

    fn has_native_atomics_with(&self, _pci_bus_id: &str) -> Result<bool> {
        Ok(self.native_atomics)
    }

    fn free_memory(&self) -> Result<u64> {
        Ok(self.shared.info.total_memory.saturating_sub(self.shared.enter()?.used))
    }

    fn alloc(&self, bytes: u64, kind: MemoryKind, label: &str) -> Result<RawMemory> {
        // As on a GPU: memory of no bytes has an address too.
        let bytes = bytes.max(1);
        let mut state = self.shared.enter()?;
        state.forbid_while_capturing("an allocation")?;
        let available = self.shared.info.total_memory.saturating_sub(state.used);
        let out_of_memory = || Error::OutOfMemory { what: label.to_owned(), requested: bytes, available };
        let charged = match kind {
            MemoryKind::MappedHost | MemoryKind::SharedHost => 0,
            MemoryKind::Device | MemoryKind::Unpooled | MemoryKind::Shareable => bytes
                .checked_next_multiple_of(PAGE)
                .filter(|charged| *charged <= available)
                .ok_or_else(out_of_memory)?,
        };
        state.used += charged;
        drop(state);

        let memory = &self.shared.memory;
        let region = match kind {
            MemoryKind::Device | MemoryKind::Unpooled => memory.alloc(bytes, label),
            MemoryKind::Shareable => memory.alloc_zeroed(bytes, label),
            MemoryKind::MappedHost | MemoryKind::SharedHost => memory.alloc_host(bytes, label),
        };
        let mut state = self.shared.lock();
        match region {
            Ok(region) => Ok(self.file(&mut state, Allocation { region, kind: Some(kind), charged })),
            Err(error) => {
                state.used -= charged;
                Err(memory_error(error, label))
            }
        }
    }

    fn describe(&self, memory: &RawMemory, sections: &[Section]) {
        self.with_checked_region(memory, |region| {
            let sections = sections.to_vec();
            region.name_parts(move |at| Section::name_of(&sections, at));
        });
    }

    fn watch_host(&self, memory: &RawMemory) {
        self.with_checked_region(memory, Region::watch);
    }

    unsafe fn host_load(&self, memory: &RawMemory, offset: u64) -> Result<u64> {
        self.checked(self.shared.memory.load_acquire(memory.ptr.0 + offset))
    }

    fn host_reads(&self, memory: &RawMemory, offset: u64, bytes: u64) -> Result<()> {
        if self.shared.checker.is_none() {
            return Ok(());
        }
        self.checked(self.shared.memory.host_reads(memory.ptr.0 + offset, bytes))
    }

    unsafe fn host_store(&self, memory: &RawMemory, offset: u64, value: u64) -> Result<()> {
        self.checked(self.shared.memory.store_release(memory.ptr.0 + offset, value))
    }

    fn host_writes(&self, memory: &RawMemory, offset: u64, bytes: u64) -> Result<()> {
        if self.shared.checker.is_none() {
            return Ok(());
        }
        self.checked(self.shared.memory.host_writes(memory.ptr.0 + offset, bytes))
    }

    fn longest_waits(&self) -> String {
        let checker = self.shared.checker.as_ref();
        checker.map_or_else(String::new, |checker| checker.longest_waits(LONGEST_WAITS))
    }

    fn origin(&self, ptr: DevicePtr) -> Option<String> {
        self.shared.memory.origin(ptr.0)
    }

    fn staging(&self) -> &Staging {
        &self.staging
    }

    fn streams(&self) -> &Streams {
        &self.streams
    }

    fn export(&self, memory: &RawMemory) -> Result<OwnedFd> {
        let state = self.shared.enter()?;
        let allocation = self.shared.allocation(&state, memory.handle)?;
        if !matches!(allocation.kind, Some(MemoryKind::Shareable | MemoryKind::SharedHost)) {
            let rule = "only MemoryKind::Shareable and MemoryKind::SharedHost can be exported";
            return Err(Error::argument("memory", allocation.region.label(), rule));
        }
        allocation.region.export().map_err(|error| memory_error(error, allocation.region.label()))
    }

    fn export_dma_buf(&self, _memory: &RawMemory) -> Result<OwnedFd> {
        drop(self.shared.enter()?);
        let what = format!("a dma-buf of memory of {}", self.shared.info.name);
        Err(Error::Unavailable { what, reason: "its driver has none".into() })
    }

    fn import(&self, fd: OwnedFd, bytes: u64, peer: &str) -> Result<RawMemory> {
        self.shared.enter()?.forbid_while_capturing("an import")?;
        let region = self.shared.memory.import(fd, bytes, peer).map_err(|error| memory_error(error, peer))?;
        let mut state = self.shared.usable()?;
        Ok(self.file(&mut state, Allocation { region, kind: None, charged: 0 }))
    }

    // Kernels reach all memory by its host address.
    fn import_host(&self, fd: OwnedFd, bytes: u64, peer: &str) -> Result<RawMemory> {
        self.import(fd, bytes, peer)
    }

    unsafe fn free(&self, memory: &RawMemory) {
        let mut state = self.shared.enter_regardless();
        let kind = state.allocations.get(&memory.handle).and_then(|allocation| allocation.kind);
        let waits =
            matches!(kind, Some(MemoryKind::MappedHost | MemoryKind::SharedHost | MemoryKind::Unpooled));
        let _held = if waits && !state.is_unusable() {
            let (held, ended) = self.hold("free", state);
            if let Err(error) = ended {
                // The memory stays until the work that is left has ended.
                tracing::warn!("memory is freed while kernels run: {error}");
            }
            state = self.shared.lock();
            Some(held)
        } else {
            None
        };
        let allocation = state.free(memory.handle);
        drop(state);
        drop(allocation);
    }

    fn module_load(&self, ptx: &str) -> Result<u64> {
        let mut state = self.shared.enter()?;
        state.forbid_while_capturing("loading a module")?;
        let (_held, ended) = self.hold("module_load", state);
        ended?;
        let module = modules::parsed(ptx).map_err(|error| {
            let PtxError { line, column, message, source_line } = error;
            Error::Ptx(format!("line {line}, column {column}: {message}\n  | {}", source_line.trim_end()))
        })?;
        let handle = new_handle();
        self.shared.usable()?.modules.insert(handle, module);
        Ok(handle)
    }

    fn module_kernel(&self, module: u64, name: &'static str, max_shared_bytes: u32) -> Result<u64> {
        let mut state = self.shared.enter()?;
        let loaded = self.shared.module(&state, module)?;
        let kernel = loaded.kernel(name).ok_or_else(|| {
            let names: Vec<&str> = loaded.kernels().map(|kernel| kernel.name()).collect();
            let names = names.join(", ");
            Error::Ptx(format!(
                "no entry {name}; there are: {names}; `cargo build-ptx` builds the PTX of a crate of kernels anew"
            ))
        })?;
        let handle = new_handle();
        state.kernels.insert(handle, LoadedKernel { kernel, name, module, max_shared_bytes });
        Ok(handle)
    }

    unsafe fn module_unload(&self, module: u64) {
        let mut state = self.shared.enter_regardless();
        state.modules.remove(&module);
        state.kernels.retain(|_, kernel| kernel.module != module);
        let until = state.enqueued();
        drop(state);
        if let Err(error) = self.wait_until("module_unload", |state| state.has_reached(&until)) {
            // Launches hold their own references to the code.
            tracing::debug!("a module was unloaded while kernels run: {error}");
        }
    }

    unsafe fn launch(&self, stream: u64, kernel: u64, config: &LaunchConfig, params: &[&[u8]]) -> Result<()> {
        let (id, mut state) = self.enter_stream("launch", stream)?;
        let kernel = self.shared.kernel(&state, kernel)?.clone();
        let launch = self.prepare(&kernel, config, params)?;
        self.shared.check_launch(kernel.name, &launch)?;
        if let Some((capture, lane)) = state.recording(id)? {
            capture.work(lane, Recorded::Launch(launch));
            return Ok(());
        }
        let op = self.shared.launch_op(&mut state, launch);
        self.shared.queue(&mut state, stream)?.1.push(op);
        drop(state);
        self.submitted();
        Ok(())
    }

    fn stream_create(&self, _high_priority: bool) -> Result<u64> {
        let mut state = self.shared.enter()?;
        let handle = new_handle();
        state.queues.insert(handle, Queue::default());
        state.handles.insert(handle, handle);
        Ok(handle)
    }

    unsafe fn stream_adopt(&self, raw: RawStream) -> Result<u64> {
        let mut state = self.shared.enter()?;
        let id = match raw.0.addr() as u64 {
            0 => match state.default_queue {
                Some(id) => id,
                None => {
                    let id = new_handle();
                    state.queues.insert(id, Queue::default());
                    *state.default_queue.insert(id)
                }
            },
            id if state.queues.get(&id).is_some_and(|queue| !queue.closed) => id,
            id => {
                let rule =
                    "on a virtual GPU this must be null or what Stream::raw gave for a stream of this device";
                return Err(Error::argument("raw stream", id, rule));
            }
        };
        let handle = new_handle();
        state.handles.insert(handle, id);
        Ok(handle)
    }

    fn stream_raw(&self, stream: u64) -> RawStream {
        let id = self.shared.enter_regardless().handles.get(&stream).copied().unwrap_or_default();
        RawStream(std::ptr::without_provenance_mut(id as usize))
    }

    fn stream_destroy(&self, stream: u64) {
        let mut state = self.shared.enter_regardless();
        // A handle that is not the queue's own was adopted.
        if state.handles.remove(&stream) == Some(stream) {
            let _ = state.forbid_on_captured(stream, "destroying the stream");
            if let Some(queue) = state.queues.get_mut(&stream) {
                queue.closed = true;
                if queue.is_idle() {
                    state.queues.remove(&stream);
                }
            }
        }
    }

    fn stream_synchronize(&self, stream: u64) -> Result<()> {
        let mut state = self.shared.enter()?;
        let id = self.shared.queue_id(&state, stream)?;
        state.forbid_on_captured(id, "stream_synchronize")?;
        state.forbid_while_capturing("stream_synchronize")?;
        let until = [(id, self.shared.queue(&mut state, stream)?.1.submitted)];
        drop(state);
        self.wait_until("stream_synchronize", |state| state.has_reached(&until))
    }

    fn stream_query(&self, stream: u64) -> Result<bool> {
        let mut state = self.shared.enter()?;
        let id = self.shared.queue_id(&state, stream)?;
        state.forbid_on_captured(id, "stream_query")?;
        let idle = self.shared.queue(&mut state, stream)?.1.is_idle();
        if idle {
            self.shared.host_waited(&state);
        }
        Ok(idle)
    }

    fn event_create(&self, timing: bool) -> Result<u64> {
        let handle = new_handle();
        self.shared.enter()?.events.insert(handle, EventState { timing, last: LastRecord::Never });
        Ok(handle)
    }

    fn event_destroy(&self, event: u64) {
        self.shared.enter_regardless().events.remove(&event);
    }

    fn event_record(&self, event: u64, stream: u64) -> Result<()> {
        let (id, mut state) = self.enter_stream("event_record", stream)?;
        self.shared.event(&mut state, event)?;
        let captured = state.recording(id)?.map(|(capture, lane)| capture.record(lane));
        let (_, queue) = self.shared.queue(&mut state, stream)?;
        let last = match (captured, queue.capture) {
            (Some(mark), Some((capture, _))) => LastRecord::Capture(capture, mark),
            _ => {
                let mark = Arc::new(Mark::default());
                queue.push(Op::Record(mark.clone()));
                LastRecord::Stream(mark)
            }
        };
        self.shared.event(&mut state, event)?.last = last;
        drop(state);
        self.submitted();
        Ok(())
    }

    fn stream_wait_event(&self, stream: u64, event: u64) -> Result<()> {
        let (id, mut state) = self.enter_stream("stream_wait_event", stream)?;
        let own = self.shared.queue(&mut state, stream)?.1.capture;
        let refuse = |rule: &str| Err(Error::argument("event", event, rule));
        match &self.shared.event(&mut state, event)?.last {
            LastRecord::Never => Ok(()),
            LastRecord::Stream(mark) => {
                let mark = mark.clone();
                if own.is_some() {
                    state.forbid_on_captured(id, "waiting for an event recorded outside of the capture")?;
                }
                self.shared.queue(&mut state, stream)?.1.push(Op::Wait(mark));
                drop(state);
                self.submitted();
                Ok(())
            }
            &LastRecord::Capture(capture, mark) => {
                let Some(recording) = state.captures.get_mut(&capture) else {
                    return refuse(
                        "its last record was captured, and that capture has ended; record it again",
                    );
                };
                let lane = match own {
                    Some((own, lane)) if own == capture => lane,
                    Some(_) => return refuse("it was recorded in another capture than the stream's"),
                    None => {
                        let lane = recording.join(id);
                        self.shared.queue(&mut state, stream)?.1.capture = Some((capture, lane));
                        lane
                    }
                };
                if let Some((recording, _)) = state.recording(id)? {
                    recording.wait(lane, mark);
                }
                Ok(())
            }
        }
    }

    fn event_synchronize(&self, event: u64) -> Result<()> {
        let mut state = self.shared.enter()?;
        state.forbid_while_capturing("event_synchronize")?;
        let mark = self.last_mark(&mut state, event, "event_synchronize")?;
        drop(state);
        match mark {
            Some(mark) => self.wait_until("event_synchronize", |_| mark.passed_ns().is_some()),
            None => Ok(()),
        }
    }

    fn event_query(&self, event: u64) -> Result<bool> {
        let mut state = self.shared.enter()?;
        let mark = self.last_mark(&mut state, event, "event_query")?;
        let passed = mark.is_none_or(|mark| mark.passed_ns().is_some());
        if passed {
            self.shared.host_waited(&state);
        }
        Ok(passed)
    }

    fn event_elapsed_ms(&self, start: u64, end: u64) -> Result<f32> {
        let mut state = self.shared.enter()?;
        let mut passed_ns = |event: u64| -> Result<u64> {
            if !self.shared.event(&mut state, event)?.timing {
                return Err(Error::argument("event", event, "it was created without timing"));
            }
            let mark = self.last_mark(&mut state, event, "event_elapsed_ms")?;
            let mark = mark.ok_or_else(|| Error::argument("event", event, "it was never recorded"))?;
            mark.passed_ns()
                .ok_or_else(|| Error::argument("event", event, "its stream has not come to it yet"))
        };
        let (start, end) = (passed_ns(start)?, passed_ns(end)?);
        let nanoseconds = end as i128 - start as i128;
        Ok((nanoseconds as f64 / 1e6) as f32)
    }

    unsafe fn copy(&self, stream: u64, dst: CopyEnd, src: CopyEnd, bytes: u64) -> Result<()> {
        let entered = self.enter_stream("copy", stream)?;
        if bytes == 0 {
            return Ok(());
        }
        let target = match dst {
            CopyEnd::Device(address) => {
                self.check_range("dst", address, bytes)?;
                Target::Device(address.0)
            }
            // SAFETY: the caller of `Driver::copy` keeps the target alive until the stream has
            // passed it.
            CopyEnd::Host(host) => Target::Host(unsafe { HostPtr::new(host) }),
        };
        let source = match src {
            CopyEnd::Device(address) => {
                self.check_range("src", address, bytes)?;
                Source::Device(address.0)
            }
            // SAFETY: as for the target.
            CopyEnd::Host(host) => Source::Host(unsafe { HostPtr::new(host) }),
        };
        let is_null = |end: CopyEnd| matches!(end, CopyEnd::Host(host) if host.is_null());
        if is_null(dst) || is_null(src) {
            return Err(Error::argument(
                "host address",
                "null",
                format!("{bytes} bytes cannot be copied there"),
            ));
        }
        self.transfer(stream, entered, Transfer::Copy { target, source, bytes })
    }

    unsafe fn fill(&self, stream: u64, dst: DevicePtr, value: u8, bytes: u64) -> Result<()> {
        let entered = self.enter_stream("fill", stream)?;
        if bytes == 0 {
            return Ok(());
        }
        self.check_range("dst", dst, bytes)?;
        self.transfer(stream, entered, Transfer::Fill { target: dst.0, value, bytes })
    }

    fn time(&self) -> Option<VirtualTime> {
        self.time.clone()
    }

    fn make_progress(&self) -> bool {
        match &self.runner {
            Runner::Manual(gpus) if gpus.drive(PROGRESS_SLICE) == Drive::Ran => return true,
            // With a clock of the ranks, `Poller::pause` sleeps.
            Runner::Thread(_) if self.time.is_none() => std::thread::sleep(NAP),
            _ => std::thread::yield_now(),
        }
        false
    }

    fn stream_is_capturing(&self, stream: u64) -> Result<bool> {
        let mut state = self.shared.enter()?;
        Ok(self.shared.queue(&mut state, stream)?.1.capture.is_some())
    }

    fn stream_capture(&self, stream: u64) -> Result<u64> {
        let mut state = self.shared.enter()?;
        let capture = self.shared.queue(&mut state, stream)?.1.capture.map_or(0, |(capture, _)| capture);
        let is_valid = |recording: &Capture<Recorded>| recording.invalid.is_none();
        Ok(if state.captures.get(&capture).is_some_and(is_valid) { capture } else { 0 })
    }

    fn capture_begin(&self, stream: u64) -> Result<()> {
        let mut state = self.shared.enter()?;
        let (id, queue) = self.shared.queue(&mut state, stream)?;
        if queue.capture.is_some() {
            return Err(Error::argument("stream", stream, "it is being captured already"));
        }
        let capture = new_handle();
        queue.capture = Some((capture, 0));
        state.captures.insert(capture, Capture::new(id));
        Ok(())
    }

    fn capture_end(&self, stream: u64) -> Result<u64> {
        let mut state = self.shared.enter()?;
        let refuse = |rule: String| Err(Error::argument("stream", stream, rule));
        let capture = match self.shared.queue(&mut state, stream)?.1.capture {
            None => return refuse("no capture was begun on it".to_owned()),
            Some((capture, 0)) => capture,
            Some(_) => {
                return refuse("it joined the capture of another stream, which must end it".to_owned());
            }
        };
        let Some(recording) = state.captures.remove(&capture) else {
            return refuse("its capture is gone".to_owned());
        };
        for lane in &recording.lanes {
            if let Some(queue) = state.queues.get_mut(lane) {
                queue.capture = None;
            }
        }
        if let Some(reason) = &recording.invalid {
            return refuse(format!("its capture became invalid: {reason}"));
        }
        match recording.finish() {
            Ok(graph) => {
                let handle = new_handle();
                state.graphs.insert(handle, graph);
                Ok(handle)
            }
            Err(unjoined) => refuse(format!(
                "stream {unjoined} joined the capture, and work in it is not joined back; have this stream wait for \
                 an event recorded behind it"
            )),
        }
    }

    fn graph_launch(&self, graph: u64, stream: u64) -> Result<()> {
        let (id, mut state) = self.enter_stream("graph_launch", stream)?;
        let recorded = self.shared.graph(&mut state, graph)?.clone();
        if let Some((capture, lane)) = state.recording(id)? {
            // In one lane, the recorded order is order enough.
            recorded.work().for_each(|work| capture.work(lane, work.clone()));
            return Ok(());
        }
        self.shared.enqueue_graph(&mut state, graph, id)?;
        drop(state);
        self.submitted();
        Ok(())
    }

    fn graph_destroy(&self, graph: u64) {
        self.shared.enter_regardless().graphs.remove(&graph);
    }
}
