//! [`VirtualGpu`], and the parts of its calls: enqueuing, waiting, holding the context's lock.

use std::sync::{Arc, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;

use epoxide_vgpu::stream::{HostPtr, Launch, Mark, Op, Queue, Source, Target, Transfer};
use epoxide_vgpu::{Clock, DeviceConfig, GridConfig, MemoryError, Region, Residency};

use super::config::{Executor, Time, VirtConfig};
use super::engine::Engine;
use super::manual::ManualGpus;
use super::state::{Allocation, GpuCore, Held, LastRecord, LoadedKernel, State, mix, new_handle};
use super::work::{Enqueued, Recorded};
use crate::driver::{
    Device, DeviceInfo, DevicePtr, LaunchConfig, MemoryKind, RawMemory, RdmaWriteOrder, Staging, Streams,
};
use crate::error::{Error, Result};
use crate::virtual_time::{VirtualTime, as_member};

/// Most shared memory of a block, in bytes, as on an H100 or H200.
const MAX_SHARED_BYTES: u32 = 227 * 1024;

/// Shared memory, static and dynamic, that every kernel may have, in bytes.
const DEFAULT_SHARED_BYTES: u32 = 48 * 1024;

/// Most bytes of pageable host memory that a copy to the device reads at once, without waiting for
/// its stream.
pub(super) const PAGEABLE_AT_ONCE_BYTES: u64 = 1 << 20;

/// A GPU that is a program.
pub struct VirtualGpu {
    pub(super) shared: Arc<GpuCore>,
    pub(super) runner: Runner,
    /// Clock of its kernels' deadlines; `None` with the real clock, and on a machine.
    pub(super) time: Option<VirtualTime>,
    pub(super) staging: Staging,
    pub(super) streams: Streams,
    pub(super) native_atomics: bool,
}

/// Runner of the enqueued work.
pub(super) enum Runner {
    /// `None` if the thread could not be started; the device has the reason as its fault.
    Thread(Option<JoinHandle<()>>),
    Manual(ManualGpus),
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
    pub fn new(config: VirtConfig) -> Device {
        Device { driver: Arc::new(VirtualGpu::start(config)) }
    }

    pub(super) fn start(config: VirtConfig) -> VirtualGpu {
        epoxide_base::meeting::observe(epoxide_vgpu::host_meets);
        let time = match (&config.hooks.executor, config.time) {
            (Executor::Threaded, Time::Virtual) => VirtualTime::of_this_thread(),
            _ => None,
        };
        let (clock, seed) = match &config.hooks.executor {
            Executor::Threaded => (
                time.as_ref().map_or(Clock::Real, |time| Clock::Stepped(time.now_ns())),
                config.schedule_seed,
            ),
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
            schedule_seed: seed.map(|seed| mix(seed, u64::from(config.ordinal))),
            schedule: config.hooks.schedule,
            clock,
            max_blocks_resident: config.hooks.max_blocks_resident,
            ..DeviceConfig::default()
        };
        let shared = Arc::new(GpuCore::new(info, device_config, config.checker, config.hooks.stop));
        let runner = match config.hooks.executor {
            Executor::Threaded => {
                let (engine, on) = (Engine::new(shared.clone()), time.clone());
                let builder = std::thread::Builder::new().name(format!("virtual GPU {}", config.ordinal));
                let thread = builder.spawn(as_member(time.clone(), move || engine.run_thread(on.as_ref())));
                Runner::Thread(
                    thread.map_err(|error| shared.fail(&format!("no thread for it: {error}"))).ok(),
                )
            }
            Executor::Manual(gpus) => {
                gpus.add(shared.clone());
                Runner::Manual(gpus)
            }
        };
        VirtualGpu {
            shared,
            runner,
            time,
            staging: Staging::default(),
            streams: Streams::default(),
            native_atomics: config.hooks.native_atomics,
        }
    }

    /// Wakes the runner of the work.
    pub(super) fn submitted(&self) {
        match &self.runner {
            Runner::Thread(_) => self.shared.work.notify_one(),
            Runner::Manual(gpus) => gpus.submitted(),
        }
    }

    /// Waits, or runs the machine, until `done`; `call` names the waiting call in errors. Other
    /// calls get through meanwhile, unless the calling thread holds the context's lock.
    pub(super) fn wait_until(&self, call: &'static str, done: impl Fn(&State) -> bool) -> Result<()> {
        match &self.runner {
            Runner::Manual(gpus) => gpus.run_until(call, || Ok(done(&*self.shared.usable()?)))?,
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

    /// Begins a call that enqueues: waits until the stream has room. Gives the stream's queue, and
    /// the tables.
    pub(super) fn enter_stream(
        &self,
        call: &'static str,
        stream: u64,
    ) -> Result<(u64, MutexGuard<'_, State>)> {
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

    /// Takes the context's lock for a call that has begun, and waits until all that was enqueued
    /// before has ended. The lock is held after the wait in all cases.
    pub(super) fn hold<'a>(
        &'a self,
        call: &'static str,
        mut state: MutexGuard<'a, State>,
    ) -> (Held<'a>, Result<()>) {
        let held = Held::new(&self.shared, &mut state, self.time.as_ref());
        let until = state.enqueued();
        drop(state);
        (held, self.wait_until(call, |state| state.has_reached(&until)))
    }

    /// Enqueues a copy or fill of a call that [`VirtualGpu::enter_stream`] began, or records it.
    /// May wait if host memory is pageable.
    pub(super) fn transfer(
        &self,
        stream: u64,
        (id, mut state): (u64, MutexGuard<'_, State>),
        mut transfer: Transfer,
    ) -> Result<()> {
        if let Some((capture, lane)) = state.recording(id)? {
            capture.work(lane, Recorded::Transfer(transfer));
            return Ok(());
        }
        // Staging may take a while: not under the lock.
        drop(state);
        let is_pageable =
            |host: HostPtr, bytes: u64| self.shared.memory.check(host.as_ptr() as u64, bytes).is_err();
        let mut waits = false;
        let mut landing = None;
        if let Transfer::Copy { target, source, bytes } = &mut transfer {
            if let Source::Host(host) = *source
                && is_pageable(host, *bytes)
            {
                // SAFETY: the caller of `Driver::copy` has the source readable for `bytes` bytes.
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
        queue.push(Op::Work(Enqueued::Transfer(transfer)));
        let until = [(id, queue.submitted)];
        drop(state);
        self.submitted();
        if waits {
            self.wait_until("copy", |state| state.has_reached(&until))?;
        }
        if let Some((host, landed)) = landing
            && let Some(bytes) = landed.get()
        {
            // SAFETY: the caller of `Driver::copy` has the target writable for as many bytes until
            // this returns.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), host.as_ptr(), bytes.len()) };
        }
        Ok(())
    }

    /// An error unless `address..address + bytes` is this device's memory.
    pub(super) fn check_range(&self, argument: &'static str, address: DevicePtr, bytes: u64) -> Result<()> {
        self.shared
            .memory
            .check(address.0, bytes)
            .map_err(|error| Error::argument(argument, format!("{:#x}", address.0), error.to_string()))
    }

    /// Calls `f` with the region of an allocation, if the device is in check mode.
    pub(super) fn with_checked_region(&self, memory: &RawMemory, f: impl FnOnce(&Region)) {
        if self.shared.checker.is_some()
            && let Some(allocation) = self.shared.lock().allocations.get(&memory.handle)
        {
            f(&allocation.region);
        }
    }

    /// The result of a host access that was checked. A race is a fault of the device, as a kernel's
    /// is.
    pub(super) fn checked<T>(&self, outcome: std::result::Result<T, MemoryError>) -> Result<T> {
        outcome.map_err(|error| match error {
            MemoryError::Race { .. } => Error::VirtualFault(self.shared.fail(&error.to_string())),
            other => memory_error(other, "mapped host memory"),
        })
    }

    /// A new allocation as the caller gets it.
    pub(super) fn file(&self, state: &mut State, allocation: Allocation) -> RawMemory {
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
    pub(super) fn last_mark(
        &self,
        state: &mut State,
        event: u64,
        call: &'static str,
    ) -> Result<Option<Arc<Mark>>> {
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
    pub(super) fn prepare(
        &self,
        kernel: &LoadedKernel,
        config: &LaunchConfig,
        params: &[&[u8]],
    ) -> Result<Launch> {
        let refuse = |rule: String| Error::Launch { kernel: kernel.name, rule };
        let wanted = kernel.kernel.params();
        if params.len() != wanted.len() {
            return Err(refuse(format!("it takes {} parameters, {} were given", wanted.len(), params.len())));
        }
        let mut packed = vec![0; kernel.kernel.param_bytes()];
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
        let static_bytes = kernel.kernel.static_shared_bytes();
        let shared_limit = kernel.max_shared_bytes.max(DEFAULT_SHARED_BYTES.saturating_sub(static_bytes));
        if config.shared_bytes > shared_limit {
            return Err(refuse(format!(
                "{} bytes of dynamic shared memory, but it was looked up for at most {shared_limit}, beside \
                 {static_bytes} of static shared memory: look it up for more",
                config.shared_bytes
            )));
        }
        let residency = if config.cooperative { Residency::Together } else { Residency::InTurn };
        let config = GridConfig {
            grid: [config.grid, 1, 1],
            block: [config.block, 1, 1],
            dynamic_shared_bytes: config.shared_bytes,
            cluster: None,
        };
        Ok(Launch { kernel: kernel.kernel.clone(), residency, config, params: packed })
    }
}

impl Drop for VirtualGpu {
    fn drop(&mut self) {
        match &mut self.runner {
            Runner::Manual(gpus) => gpus.remove(&self.shared),
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

/// Converts an error of memory to the library's error.
pub(super) fn memory_error(error: MemoryError, what: &str) -> Error {
    match error {
        MemoryError::OutOfMemory { requested, available } => {
            Error::OutOfMemory { what: what.to_owned(), requested, available }
        }
        MemoryError::Os { call, message, errno } => {
            Error::Os { call, reason: format!("{message}, for {what}"), errno: Some(errno) }
        }
        other => Error::argument("memory", what, other.to_string()),
    }
}
