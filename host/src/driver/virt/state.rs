//! The tables of one virtual GPU, from handles to objects.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use epoxide_vgpu::stream::{Capture, Graph, Launch, Mark, Op, Queue};
use epoxide_vgpu::{Checker, DeviceConfig, Grid, Kernel, Memory, Module, Region, Residency};

use super::config::Stop;
use super::work::{Enqueued, Recorded};
use crate::driver::{DeviceInfo, MemoryKind, NoDriverCalls};
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::virtual_time::{Membership, VirtualTime};

/// The next handle. Handles are unique in the process, so that one device's handle never names a
/// thing of another.
pub(super) fn new_handle() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// State that the host side and the engine of one device share.
pub(super) struct GpuCore {
    pub(super) info: DeviceInfo,
    pub(super) memory: Memory,
    /// Watches the memory, and the order of the work.
    pub(super) checker: Option<Checker>,
    pub(super) config: DeviceConfig,
    /// Stops this device.
    pub(super) stop: Option<Arc<Stop>>,
    state: Mutex<State>,
    /// Signalled when there may be work for the engine.
    pub(super) work: Condvar,
    /// Signalled when work is done, or has failed, and when the context's lock is free again.
    pub(super) done: Condvar,
}

impl GpuCore {
    pub(super) fn new(
        info: DeviceInfo,
        config: DeviceConfig,
        checker: Option<Checker>,
        stop: Option<Arc<Stop>>,
    ) -> GpuCore {
        let memory = Memory::checked(config.schedule_seed.unwrap_or(0), checker.clone());
        if let Some(checker) = &checker {
            checker.number_device(&memory, info.ordinal);
        }
        let stop = stop.filter(|stop| stop.is_of(info.ordinal));
        GpuCore {
            info,
            memory,
            checker,
            config,
            stop,
            state: Mutex::default(),
            work: Condvar::new(),
            done: Condvar::new(),
        }
    }

    /// Begins a call: every call of the driver calls this first. Returns the tables once the
    /// context's lock is free, or an error if the device is unusable. A call by a thread that must
    /// not call the driver makes the device unusable.
    pub(super) fn enter(&self) -> Result<MutexGuard<'_, State>> {
        let state = self.enter_regardless();
        state.check_usable()?;
        Ok(state)
    }

    /// The same for calls that return nothing: they tidy up on an unusable device too.
    pub(super) fn enter_regardless(&self) -> MutexGuard<'_, State> {
        if let Err(error) = NoDriverCalls::check() {
            self.fail(&error.to_string());
        }
        let held = |state: &mut State| state.held;
        // Also on a machine: the holder of the lock runs the machine meanwhile.
        self.done.wait_while(self.lock(), held).unwrap_or_else(PoisonError::into_inner)
    }

    /// The tables, regardless of the device's state and of the context's lock: for the engine, and
    /// within calls.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        // A panic under the lock is a bug; the tables are still the best data for its report.
        lock(&self.state)
    }

    /// [`GpuCore::lock`], an error where the device is unusable: for calls that wait.
    pub(super) fn usable(&self) -> Result<MutexGuard<'_, State>> {
        let state = self.lock();
        state.check_usable()?;
        Ok(state)
    }

    /// A host thread is about to enqueue in a queue: its causal past precedes the enqueued work.
    pub(super) fn host_enqueues(&self, state: &mut State, queue: u64) {
        if let (Some(checker), Some(queue)) = (&self.checker, state.queues.get_mut(&queue)) {
            queue.past.join(&checker.host_past());
        }
    }

    /// The calling thread has waited for work of the device. Its past then includes all work that
    /// is done, not only the awaited work.
    pub(super) fn host_waited(&self, state: &State) {
        if let Some(checker) = &self.checker {
            state.queues.values().for_each(|queue| checker.host_waited(&queue.past));
        }
    }

    /// Makes the device unusable. Every later call fails with the first `fault`, no call waits any
    /// more, work not yet begun is dropped, and the engine drops running work. Returns the first
    /// fault.
    pub(super) fn fail(&self, fault: &str) -> String {
        let mut state = self.lock();
        let first =
            state.fault.get_or_insert_with(|| format!("device {}: {fault}", self.info.ordinal)).clone();
        for queue in state.queues.values_mut() {
            queue.ops.clear();
        }
        drop(state);
        self.work.notify_one();
        self.done.notify_all();
        first
    }

    /// An [`Error::Argument`] for an unknown handle.
    fn unknown(&self, what: &'static str, handle: u64) -> Error {
        let ordinal = self.info.ordinal;
        Error::argument(
            what,
            handle,
            format!("virtual GPU {ordinal} has none such: destroyed, or of another device"),
        )
    }

    /// The queue of a stream handle.
    pub(super) fn queue_id(&self, state: &State, stream: u64) -> Result<u64> {
        let id = state.handles.get(&stream).copied().filter(|id| state.queues.contains_key(id));
        id.ok_or_else(|| self.unknown("stream", stream))
    }

    /// The queue of a stream handle, and its id.
    pub(super) fn queue<'a>(
        &self,
        state: &'a mut State,
        stream: u64,
    ) -> Result<(u64, &'a mut Queue<Enqueued>)> {
        let id = self.queue_id(state, stream)?;
        state.queues.get_mut(&id).map(|queue| (id, queue)).ok_or_else(|| self.unknown("stream", stream))
    }

    pub(super) fn event<'a>(&self, state: &'a mut State, event: u64) -> Result<&'a mut EventState> {
        state.events.get_mut(&event).ok_or_else(|| self.unknown("event", event))
    }

    pub(super) fn module<'a>(&self, state: &'a State, module: u64) -> Result<&'a Module> {
        state.modules.get(&module).map(Arc::as_ref).ok_or_else(|| self.unknown("module", module))
    }

    pub(super) fn kernel<'a>(&self, state: &'a State, kernel: u64) -> Result<&'a LoadedKernel> {
        state.kernels.get(&kernel).ok_or_else(|| self.unknown("kernel", kernel))
    }

    pub(super) fn graph<'a>(&self, state: &'a mut State, graph: u64) -> Result<&'a mut Graph<Recorded>> {
        state.graphs.get_mut(&graph).ok_or_else(|| self.unknown("graph", graph))
    }

    pub(super) fn allocation<'a>(&self, state: &'a State, memory: u64) -> Result<&'a Allocation> {
        state.allocations.get(&memory).ok_or_else(|| self.unknown("memory", memory))
    }

    /// Rejects a launch of kernel `name` that the device cannot run.
    pub(super) fn check_launch(&self, name: &'static str, launch: &Launch) -> Result<()> {
        let refuse = |rule| Error::Launch { kernel: name, rule };
        let Launch { kernel, config, params, .. } = launch;
        Grid::check_launch(kernel, &self.memory, &self.config, config, params)
            .map_err(|error| refuse(error.to_string()))?;
        let shared_bytes = kernel.static_shared_bytes() + config.dynamic_shared_bytes;
        // A launch here has one dimension.
        let (blocks, resident) = (config.grid[0], self.config.resident_blocks(config.block[0], shared_bytes));
        if launch.residency == Residency::Together && blocks > resident {
            return Err(refuse(format!(
                "{blocks} blocks cannot be resident at once, only {resident}; launch fewer or smaller blocks"
            )));
        }
        Ok(())
    }

    /// The op of the next launch, with a schedule seed of its own where the device has one.
    pub(super) fn launch_op(&self, state: &mut State, launch: Launch) -> Op<Enqueued> {
        Op::Work(self.next_launch(&mut state.launches, launch))
    }

    fn next_launch(&self, launches: &mut u64, launch: Launch) -> Enqueued {
        *launches += 1;
        Enqueued::Launch(Box::new(launch), self.config.schedule_seed.map(|seed| mix(seed, *launches)))
    }

    /// Enqueues a graph's steps: lane 0 in `queue_id`, the other lanes in queues of their own that
    /// begin with it and that it waits for.
    pub(super) fn enqueue_graph(&self, state: &mut State, handle: u64, queue_id: u64) -> Result<()> {
        let mut launches = state.launches;
        let (ops, side) = self.graph(state, handle)?.launch(|work| match work {
            Recorded::Launch(launch) => self.next_launch(&mut launches, launch.clone()),
            Recorded::Transfer(transfer) => Enqueued::Transfer(transfer.clone()),
        });
        state.launches = launches;
        let queue = state.queues.entry(queue_id).or_default();
        ops.into_iter().for_each(|op| queue.push(op));
        side.into_iter().for_each(|queue| drop(state.queues.insert(new_handle(), queue)));
        Ok(())
    }
}

/// The context's lock, held by the thread that has this. Until it is dropped, calls of other
/// threads wait where they begin.
///
/// The thread is a member of the device's clock meanwhile: a deadline must not pass because this
/// thread is kept from its processor.
pub(super) struct Held<'a> {
    shared: &'a GpuCore,
    _member: Option<Membership>,
}

impl<'a> Held<'a> {
    /// Takes the lock for a call that has begun, of a device with the clock `time`.
    pub(super) fn new(shared: &'a GpuCore, state: &mut State, time: Option<&VirtualTime>) -> Held<'a> {
        state.held = true;
        Held { shared, _member: time.and_then(VirtualTime::join_as_guest) }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.shared.lock().held = false;
        self.shared.done.notify_all();
    }
}

/// A point in the work of a device: queues, and how many of their ops have been done there.
pub(super) type Until = Vec<(u64, u64)>;

/// The tables.
#[derive(Default)]
pub(super) struct State {
    /// All queues, in order of creation: streams, and the side lanes of running graphs.
    pub(super) queues: BTreeMap<u64, Queue<Enqueued>>,
    /// Stream handles. Several may refer to one queue; the handle of the queue's owner is the
    /// queue's id.
    pub(super) handles: HashMap<u64, u64>,
    /// The queue of a caller's null stream.
    pub(super) default_queue: Option<u64>,
    pub(super) events: HashMap<u64, EventState>,
    pub(super) captures: HashMap<u64, Capture<Recorded>>,
    pub(super) graphs: HashMap<u64, Graph<Recorded>>,
    pub(super) modules: HashMap<u64, Arc<Module>>,
    pub(super) kernels: HashMap<u64, LoadedKernel>,
    pub(super) allocations: HashMap<u64, Allocation>,
    /// Memory freed while work was queued. Each is removed once the queues have done the work that
    /// they held at the free, in the order of streams.
    freed: Vec<Freed>,
    /// A call holds the context's lock.
    pub(super) held: bool,
    /// Bytes of device memory in use, freed memory that queued work may still use included.
    pub(super) used: u64,
    /// Launches enqueued so far.
    launches: u64,
    /// Jobs begun so far.
    pub(super) jobs: u64,
    /// The first fault.
    fault: Option<String>,
    /// The device is being dropped.
    pub(super) shutdown: bool,
}

/// Memory that queued work may still use.
pub(super) struct Freed {
    allocation: Allocation,
    until: Until,
}

impl State {
    fn check_usable(&self) -> Result<()> {
        match &self.fault {
            Some(fault) => Err(Error::VirtualFault(fault.clone())),
            None => Ok(()),
        }
    }

    /// True once the device is unusable.
    pub(super) fn is_unusable(&self) -> bool {
        self.fault.is_some()
    }

    /// The end of all that is enqueued now.
    pub(super) fn enqueued(&self) -> Until {
        let busy = self.queues.iter().filter(|(_, queue)| !queue.is_idle());
        busy.map(|(id, queue)| (*id, queue.submitted)).collect()
    }

    /// True when the device's work has reached this point.
    pub(super) fn has_reached(&self, until: &[(u64, u64)]) -> bool {
        until.iter().all(|(id, ops)| self.queues.get(id).is_none_or(|queue| queue.completed >= *ops))
    }

    /// Takes memory out of the tables. The returned allocation is to be unmapped, best without the
    /// lock. Memory that peers map is returned at once ([`MemoryKind::Shareable`] requires it).
    /// Other memory that queued work may use stays until [`State::take_released`].
    pub(super) fn free(&mut self, memory: u64) -> Option<Allocation> {
        let allocation = self.allocations.remove(&memory)?;
        let at_once = matches!(allocation.kind, None | Some(MemoryKind::Shareable));
        let until = self.enqueued();
        if at_once || until.is_empty() {
            self.used -= allocation.charged;
            return Some(allocation);
        }
        self.freed.push(Freed { allocation, until });
        None
    }

    /// Freed memory that no queued work can use any more. Dropping it unmaps it, which is best done
    /// without the lock.
    pub(super) fn take_released(&mut self) -> Vec<Freed> {
        let mut freed = std::mem::take(&mut self.freed);
        let released = freed.extract_if(.., |freed| self.has_reached(&freed.until)).collect();
        self.freed = freed;
        self.uncharged(released)
    }

    /// Ends the charge for released memory, which is returned.
    fn uncharged(&mut self, released: Vec<Freed>) -> Vec<Freed> {
        self.used -= released.iter().map(|freed| freed.allocation.charged).sum::<u64>();
        released
    }

    /// Marks all queues of an unusable device as idle. Returns all freed memory, as
    /// [`State::take_released`].
    pub(super) fn abandon(&mut self) -> Vec<Freed> {
        self.queues.values_mut().for_each(|queue| queue.busy = false);
        let freed = std::mem::take(&mut self.freed);
        self.uncharged(freed)
    }

    /// The capture of a queue, if it is being captured; an error once the capture cannot be
    /// finished any more.
    pub(super) fn recording(&mut self, queue: u64) -> Result<Option<(&mut Capture<Recorded>, usize)>> {
        let Some((id, lane)) = self.queues.get(&queue).and_then(|queue| queue.capture) else {
            return Ok(None);
        };
        let Some(capture) = self.captures.get_mut(&id) else { return Ok(None) };
        match &capture.invalid {
            Some(reason) => Err(Error::argument(
                "stream",
                queue,
                format!("its capture became invalid ({reason}); end it and begin again"),
            )),
            None => Ok(Some((capture, lane))),
        }
    }

    /// An error if the queue is being captured; the capture is then invalid, as in CUDA.
    pub(super) fn forbid_on_captured(&mut self, queue: u64, call: &'static str) -> Result<()> {
        let capture = self.queues.get(&queue).and_then(|queue| queue.capture);
        let Some(capture) = capture.and_then(|(id, _)| self.captures.get_mut(&id)) else { return Ok(()) };
        capture.invalid.get_or_insert_with(|| format!("{call} was called"));
        Err(Error::argument(
            "stream",
            queue,
            format!(
                "{call} is not possible while the stream is being captured: call it before the capture or behind it, and \
                 read results behind a launch of the recording"
            ),
        ))
    }

    /// An error if the calling thread is capturing; the capture is then invalid, as in CUDA.
    pub(super) fn forbid_while_capturing(&mut self, call: &'static str) -> Result<()> {
        let thread = std::thread::current().id();
        let Some(capture) = self.captures.values_mut().find(|capture| capture.thread == thread) else {
            return Ok(());
        };
        capture.invalid.get_or_insert_with(|| format!("{call} was called"));
        let stream = capture.lanes[0];
        Err(Error::argument(
            "stream",
            stream,
            format!(
                "{call} is not possible while this thread captures the stream: call it before the capture or behind it. A \
                 buffer's operation needs no memory if it was called once before, in `Buffer::capture` or between \
                 `begin_warmup` and `end_warmup`, or if it is given memory such as `recv_x`"
            ),
        ))
    }
}

/// An event.
pub(super) struct EventState {
    pub(super) timing: bool,
    pub(super) last: LastRecord,
}

/// The last record of an event.
pub(super) enum LastRecord {
    Never,
    Stream(Arc<Mark>),
    /// In a capture, as the mark of this number.
    Capture(u64, usize),
}

/// A kernel that was looked up in a module.
#[derive(Clone)]
pub(super) struct LoadedKernel {
    pub(super) kernel: Arc<Kernel>,
    pub(super) name: &'static str,
    pub(super) module: u64,
    /// Most dynamic shared memory of a launch, in bytes.
    pub(super) max_shared_bytes: u32,
}

/// Memory that was allocated or imported.
pub(super) struct Allocation {
    pub(super) region: Region,
    /// `None` for a peer's memory.
    pub(super) kind: Option<MemoryKind>,
    /// Bytes counted in [`State::used`].
    pub(super) charged: u64,
}

/// 2^64 divided by the golden ratio: the increment of SplitMix64.
pub(super) const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Mixes a word into a hash, by the finaliser of SplitMix64.
pub(super) fn mix(hash: u64, word: u64) -> u64 {
    let mut z = hash.rotate_left(23) ^ word.wrapping_mul(GOLDEN) ^ GOLDEN;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
