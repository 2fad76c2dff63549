//! The virtual driver: [`Device`] over `epoxide_vgpu`, which interprets the same PTX that a GPU runs.
//!
//! Streams and events behave as CUDA's do. Work of one stream runs in order, work of different streams concurrently. An
//! event stands for the point of its last record. A fault in a kernel, copy or fill makes the device unusable, as a lost
//! context does: what runs or is still queued is dropped, every later call fails with the same [`Error::VirtualFault`], and
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

#[cfg(test)]
mod blocking_tests;
mod capture;
mod coverage;
mod engine;
mod machine;
mod state;
mod stream;
#[cfg(test)]
mod tests;

use std::os::fd::OwnedFd;
use std::sync::{Arc, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;

pub use epoxide_vgpu::{CheckConfig, Checker, Schedule, host_meets};
use epoxide_vgpu::{Clock, DeviceConfig, GridConfig, MemoryError, Module, PtxError, Region};

use self::capture::{Capture, Graph, Launch, Step};
use self::engine::Engine;
pub use self::machine::{Drive, Machine};
use self::state::{Allocation, Event, Held, LastRecord, LoadedKernel, Shared, State, new_handle};
use self::stream::{HostPtr, Mark, Op, Queue, Source, Target, Transfer};
use super::{
    CopyEnd, Device, DeviceInfo, DevicePtr, LaunchConfig, MemoryKind, RawMemory, RawStream, RdmaWriteOrder,
    Section, Staging, Streams,
};
use crate::error::{Error, Result};

/// Most shared memory of a block, in bytes, as on an H100 or H200.
const MAX_SHARED_BYTES: u32 = 227 * 1024;
/// Dynamic shared memory that every kernel may have, in bytes.
const DEFAULT_SHARED_BYTES: u32 = 48 * 1024;
/// The unit of allocation, in bytes.
const PAGE: u64 = 4096;
/// Most bytes of pageable host memory that a copy to the device reads at once, without waiting for its stream.
const PAGEABLE_AT_ONCE_BYTES: u64 = 1 << 20;
/// Warp instructions that one [`Device::make_progress`] runs.
const PROGRESS_SLICE: u64 = 16 * 1024;

/// Who runs a virtual GPU's work.
#[derive(Debug, Clone, Default)]
pub enum Executor {
    /// A thread of its own.
    #[default]
    Threaded,
    /// The threads that wait for it, in seeded order.
    Manual(Machine),
}

/// What a virtual GPU is like.
#[derive(Debug, Clone)]
pub struct VirtConfig {
    /// Its index.
    pub ordinal: u32,
    /// Streaming multiprocessors; they bound how many blocks are resident at once.
    pub sm_count: u32,
    /// Device memory in bytes. Only what is written costs real memory.
    pub memory_bytes: u64,
    /// Draws the order of warps within a grid; without it, warps take turns. A [`Machine`] has its own seed, which is
    /// used where this is `None`.
    pub schedule_seed: Option<u64>,
    /// How the seed orders the warps.
    pub schedule: Schedule,
    /// Who runs the work.
    pub executor: Executor,
    /// Runs kernels in check mode and watches the device's memory, together with that of other devices of this process that have the
    /// same one. What other processes do stays out of its sight, so all ranks should be threads of this process.
    pub checker: Option<Checker>,
    /// Links to other devices have native atomics, as NVLink has. Without, a buffer refuses them; the memory is the host's either way.
    pub native_atomics: bool,
}

impl Default for VirtConfig {
    fn default() -> VirtConfig {
        VirtConfig {
            ordinal: 0,
            sm_count: 132,
            memory_bytes: 16 << 30,
            schedule_seed: None,
            schedule: Schedule::Random,
            executor: Executor::Threaded,
            checker: None,
            native_atomics: true,
        }
    }
}

/// A GPU that is a program.
pub struct VirtualGpu {
    shared: Arc<Shared>,
    runner: Runner,
    staging: Staging,
    streams: Streams,
    native_atomics: bool,
}

enum Runner {
    /// `None` if the thread could not be started; the device has the reason as its fault.
    Thread(Option<JoinHandle<()>>),
    Machine(Machine),
}

impl std::fmt::Debug for VirtualGpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VirtualGpu").field("ordinal", &self.shared.info.ordinal).finish_non_exhaustive()
    }
}

impl VirtualGpu {
    /// A new virtual GPU. If its thread cannot be started, its first call fails.
    // Callers hold devices of either driver, always in this form.
    #[allow(clippy::new_ret_no_self)]
    pub fn new(config: VirtConfig) -> Arc<dyn Device> {
        Arc::new(VirtualGpu::start(config))
    }

    fn start(config: VirtConfig) -> VirtualGpu {
        let (clock, seed) = match &config.executor {
            Executor::Threaded => (Clock::Real, config.schedule_seed),
            Executor::Manual(machine) => (machine.clock(), config.schedule_seed.or(Some(machine.seed()))),
        };
        let info = DeviceInfo {
            ordinal: config.ordinal,
            name: "virtual GPU".to_owned(),
            is_virtual: true,
            sm_count: config.sm_count.max(1),
            max_shared_bytes_per_block: MAX_SHARED_BYTES,
            total_memory: config.memory_bytes,
            driver_version: 0,
            pci_bus_id: String::new(),
            // Its memory is the host's.
            rdma_write_order: RdmaWriteOrder::AllDevices,
        };
        let device_config = DeviceConfig {
            sm_count: info.sm_count,
            shared_bytes_per_block: MAX_SHARED_BYTES,
            schedule_seed: seed.map(|seed| machine::mix(seed, u64::from(config.ordinal))),
            schedule: config.schedule,
            clock,
            ..DeviceConfig::default()
        };
        let shared = Arc::new(Shared::new(info, device_config, config.checker));
        let runner = match config.executor {
            Executor::Threaded => {
                let engine = Engine::new(shared.clone());
                let builder = std::thread::Builder::new().name(format!("virtual GPU {}", config.ordinal));
                let thread = builder.spawn(move || engine.run_thread());
                Runner::Thread(
                    thread.map_err(|error| shared.fail(&format!("no thread for it: {error}"))).ok(),
                )
            }
            Executor::Manual(machine) => {
                machine.add(shared.clone());
                Runner::Machine(machine)
            }
        };
        VirtualGpu {
            shared,
            runner,
            staging: Staging::default(),
            streams: Streams::default(),
            native_atomics: config.native_atomics,
        }
    }

    /// Tells whoever runs the work that there is some.
    fn submitted(&self) {
        match &self.runner {
            Runner::Thread(_) => self.shared.work.notify_one(),
            Runner::Machine(machine) => machine.submitted(),
        }
    }

    /// Waits, or runs the machine, until `done`; `call` names the waiting call in errors. Other calls get through meanwhile,
    /// unless the calling thread holds the context's lock.
    fn wait_until(&self, call: &'static str, done: impl Fn(&State) -> bool) -> Result<()> {
        match &self.runner {
            Runner::Machine(machine) => machine.run_until(call, || Ok(done(&*self.shared.usable()?)))?,
            Runner::Thread(_) => {
                let mut state = self.shared.usable()?;
                while !done(&state) {
                    drop(self.shared.done.wait(state).unwrap_or_else(PoisonError::into_inner));
                    state = self.shared.usable()?;
                }
            }
        }
        self.shared.host_waited(&self.shared.lock());
        Ok(())
    }

    /// Begins a call that enqueues: waits until the stream has room. Gives the stream's queue, and the tables.
    fn enter_stream(&self, call: &'static str, stream: u64) -> Result<(u64, MutexGuard<'_, State>)> {
        loop {
            let mut state = self.shared.enter()?;
            let id = self.shared.queue_id(&state, stream)?;
            self.shared.host_enqueues(&mut state, id);
            let has_room = |state: &State| state.queues.get(&id).is_none_or(Queue::has_room);
            if has_room(&state) {
                return Ok((id, state));
            }
            drop(state);
            self.wait_until(call, has_room)?;
        }
    }

    /// Takes the context's lock for a call that has begun, and waits until all that was enqueued before has ended. The lock
    /// is held however the wait ends.
    fn hold<'a>(&'a self, call: &'static str, mut state: MutexGuard<'a, State>) -> (Held<'a>, Result<()>) {
        let held = Held::new(&self.shared, &mut state);
        let until = state.enqueued();
        drop(state);
        (held, self.wait_until(call, |state| state.has_reached(&until)))
    }

    /// Enqueues a copy or fill of a call that [`VirtualGpu::enter_stream`] began, or records it. Where host memory is pageable, it
    /// may wait.
    fn transfer(
        &self,
        stream: u64,
        (id, mut state): (u64, MutexGuard<'_, State>),
        mut transfer: Transfer,
    ) -> Result<()> {
        if let Some((capture, lane)) = state.recording(id)? {
            capture.work(lane, Step::Transfer(transfer));
            return Ok(());
        }
        // Staging may take a while: not under the lock.
        drop(state);
        let is_pageable = |host: HostPtr, bytes: u64| self.shared.memory.check(host.0 as u64, bytes).is_err();
        let mut waits = false;
        let mut landing = None;
        if let Transfer::Copy { target, source, bytes } = &mut transfer {
            if let Source::Host(host) = *source
                && is_pageable(host, *bytes)
            {
                // SAFETY: the caller of `Device::copy` has the source readable for `bytes` bytes.
                *source = Source::Staged(unsafe { host.read(*bytes) });
                waits = *bytes > PAGEABLE_AT_ONCE_BYTES;
            }
            if let Target::Host(host) = *target
                && is_pageable(host, *bytes)
            {
                let landed = Arc::new(OnceLock::new());
                *target = Target::Staged(landed.clone());
                landing = Some((host, landed));
                waits = true;
            }
        }
        let mut state = self.shared.enter()?;
        let (id, queue) = self.shared.queue(&mut state, stream)?;
        queue.push(Op::Transfer(transfer));
        let until = [(id, queue.submitted)];
        drop(state);
        self.submitted();
        if waits {
            self.wait_until("copy", |state| state.has_reached(&until))?;
        }
        if let Some((host, landed)) = landing
            && let Some(bytes) = landed.get()
        {
            // SAFETY: the caller of `Device::copy` has the target writable for as many bytes until this returns.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), host.0, bytes.len()) };
        }
        Ok(())
    }

    /// An error unless `address..address + bytes` is this device's memory.
    fn check_range(&self, argument: &'static str, address: DevicePtr, bytes: u64) -> Result<()> {
        self.shared
            .memory
            .check(address.0, bytes)
            .map_err(|error| Error::argument(argument, format!("{:#x}", address.0), error.to_string()))
    }

    /// Does something with the region of an allocation, if the device checks what kernels do.
    fn with_checked_region(&self, memory: &RawMemory, f: impl FnOnce(&Region)) {
        if self.shared.checker.is_some()
            && let Some(allocation) = self.shared.lock().allocations.get(&memory.handle)
        {
            f(&allocation.region);
        }
    }

    /// The result of a host access that was checked. A race is a fault of the device, as a kernel's is.
    fn checked<T>(&self, outcome: std::result::Result<T, MemoryError>) -> Result<T> {
        outcome.map_err(|error| match error {
            MemoryError::Race { .. } => Error::VirtualFault(self.shared.fail(&error.to_string())),
            other => memory_error(other, "mapped host memory"),
        })
    }

    /// A new allocation as the caller sees it.
    fn file(&self, state: &mut State, allocation: Allocation) -> RawMemory {
        let handle = new_handle();
        let address = allocation.region.addr();
        let host = match allocation.kind {
            Some(MemoryKind::MappedHost | MemoryKind::SharedHost) => address as *mut u8,
            _ => std::ptr::null_mut(),
        };
        let bytes = allocation.region.bytes();
        state.allocations.insert(handle, allocation);
        RawMemory { handle, ptr: DevicePtr(address), host, bytes }
    }

    /// The mark of an event's last record; `None` if it was never recorded.
    fn last_mark(&self, state: &mut State, event: u64, call: &'static str) -> Result<Option<Arc<Mark>>> {
        match &self.shared.event(state, event)?.last {
            LastRecord::Never => Ok(None),
            LastRecord::Stream(mark) => Ok(Some(mark.clone())),
            LastRecord::Capture(..) => Err(Error::argument(
                "event",
                event,
                format!("{call} is not possible on an event whose last record was captured; record it again"),
            )),
        }
    }

    /// Checks the arguments of a launch against the kernel and packs them.
    fn prepare(&self, kernel: &LoadedKernel, config: &LaunchConfig, params: &[&[u8]]) -> Result<Launch> {
        let refuse = |rule: String| Error::Launch { kernel: kernel.name, rule };
        let wanted = kernel.kernel.params();
        if params.len() != wanted.len() {
            return Err(refuse(format!("it takes {} parameters, {} were given", wanted.len(), params.len())));
        }
        let mut packed = vec![0; kernel.kernel.param_bytes()].into_boxed_slice();
        for (index, (value, param)) in params.iter().zip(wanted).enumerate() {
            if value.len() != param.size {
                return Err(refuse(format!(
                    "parameter {index} ({}) is {} bytes, {} were given",
                    param.name,
                    param.size,
                    value.len()
                )));
            }
            packed[param.offset..param.offset + param.size].copy_from_slice(value);
        }
        let shared_limit = kernel.max_shared_bytes.max(DEFAULT_SHARED_BYTES);
        if config.shared_bytes > shared_limit {
            return Err(refuse(format!(
                "{} bytes of dynamic shared memory, but it was looked up for at most {shared_limit}",
                config.shared_bytes
            )));
        }
        if config.cooperative {
            let resident = self.resident_blocks(config);
            if config.grid > resident {
                return Err(refuse(format!(
                    "{} blocks cannot be resident at once, only {resident}; launch fewer or smaller blocks",
                    config.grid
                )));
            }
        }
        let config = GridConfig {
            grid: [config.grid, 1, 1],
            block: [config.block, 1, 1],
            dynamic_shared_bytes: config.shared_bytes,
        };
        Ok(Launch { name: kernel.name, kernel: kernel.kernel.clone(), config, params: packed })
    }

    /// How many blocks of this shape fit on the device at once: an SM has 2048 threads, 32 blocks and 228 KiB of shared
    /// memory, of which each block takes 1 KiB for the system.
    fn resident_blocks(&self, config: &LaunchConfig) -> u32 {
        let threads = config.block.max(1).next_multiple_of(32);
        let by_shared = (228 * 1024) / config.shared_bytes.saturating_add(1024);
        (2048 / threads).min(32).min(by_shared).saturating_mul(self.shared.info.sm_count)
    }
}

impl Drop for VirtualGpu {
    fn drop(&mut self) {
        match &mut self.runner {
            Runner::Machine(machine) => machine.remove(&self.shared),
            Runner::Thread(thread) => {
                self.shared.lock().shutdown = true;
                self.shared.work.notify_one();
                if let Some(thread) = thread.take() {
                    // A panic in there is already the device's fault.
                    let _ = thread.join();
                }
            }
        }
    }
}

/// What the system said about memory, as the library's error.
fn memory_error(error: MemoryError, what: &str) -> Error {
    match error {
        MemoryError::OutOfMemory { requested, available } => {
            Error::OutOfMemory { what: what.to_owned(), requested, available }
        }
        MemoryError::Os { call, message, .. } => Error::os(call, format!("{message}, for {what}")),
        other => Error::argument("memory", what, other.to_string()),
    }
}

impl Device for VirtualGpu {
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
        let mut state = self.shared.enter()?;
        if bytes == 0 {
            return Err(Error::argument("bytes", bytes, format!("{label} must be at least 1 byte")));
        }
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
        let module = Module::parse(ptx).map_err(|error| {
            let PtxError { line, column, message, source_line } = error;
            Error::Ptx(format!("line {line}, column {column}: {message}\n  | {}", source_line.trim_end()))
        })?;
        coverage::prepare(&module);
        let handle = new_handle();
        self.shared.usable()?.modules.insert(handle, module);
        Ok(handle)
    }

    fn module_kernel(&self, module: u64, name: &'static str, max_shared_bytes: u32) -> Result<u64> {
        let mut state = self.shared.enter()?;
        let loaded = self.shared.module(&state, module)?;
        let kernel = loaded.kernel(name).ok_or_else(|| {
            let names: Vec<&str> = loaded.kernels().map(|kernel| kernel.name()).collect();
            Error::Ptx(format!("no entry {name}; there are: {}", names.join(", ")))
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
            // Launches have what they need of it.
            tracing::debug!("a module was unloaded while kernels run: {error}");
        }
    }

    unsafe fn launch(&self, stream: u64, kernel: u64, config: &LaunchConfig, params: &[&[u8]]) -> Result<()> {
        let (id, mut state) = self.enter_stream("launch", stream)?;
        let kernel = self.shared.kernel(&state, kernel)?.clone();
        let launch = self.prepare(&kernel, config, params)?;
        self.shared.check_launch(&launch)?;
        if let Some((capture, lane)) = state.recording(id)? {
            capture.work(lane, Step::Launch(launch));
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
        self.shared.enter()?.events.insert(handle, Event { timing, last: LastRecord::Never });
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
        let mark = self.last_mark(&mut *self.shared.enter()?, event, "event_synchronize")?;
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
            CopyEnd::Host(host) => Target::Host(HostPtr(host)),
        };
        let source = match src {
            CopyEnd::Device(address) => {
                self.check_range("src", address, bytes)?;
                Source::Device(address.0)
            }
            CopyEnd::Host(host) => Source::Host(HostPtr(host)),
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

    fn make_progress(&self) {
        if let Runner::Machine(machine) = &self.runner
            && machine.drive(PROGRESS_SLICE) == Drive::Ran
        {
            return;
        }
        std::thread::yield_now();
    }

    fn stream_is_capturing(&self, stream: u64) -> Result<bool> {
        let mut state = self.shared.enter()?;
        Ok(self.shared.queue(&mut state, stream)?.1.capture.is_some())
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
        let Graph { steps, .. } = self.shared.graph(&mut state, graph)?.clone();
        if let Some((capture, lane)) = state.recording(id)? {
            // In one lane, the recorded order is order enough.
            for (_, step) in steps.iter() {
                if let Step::Launch(_) | Step::Transfer(_) = step {
                    capture.work(lane, step.clone());
                }
            }
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
