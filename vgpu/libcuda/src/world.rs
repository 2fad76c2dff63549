//! All state of the library: devices and their memory, and the tables from handles to objects.
//!
//! Devices have unified addresses. Every region lies at one address in the memory of its device, of
//! the peers that may access it, and in `World::all`, which copies use.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::mem::ManuallyDrop;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::ThreadId;

use epoxide_vgpu::ClusterSizes;
use epoxide_vgpu::stream::{Capture, Graph, Mark, Op, Queue};
use epoxide_vgpu::{
    CheckConfig, Checker, Clock, DeviceConfig, Kernel, Memory, MemoryError, Module, Past, Region, Reservation,
};

use crate::abi::*;
use crate::calls::multicast::Team;
use crate::config::Config;
use crate::engine;
use crate::work::Work;

/// The legacy default stream, and the one of the calling thread.
pub(crate) const LEGACY: Handle = 1;
pub(crate) const PER_THREAD: Handle = 2;

static WORLD: OnceLock<Result<World, CUresult>> = OnceLock::new();

thread_local! {
    /// The contexts of this thread, current one last. Exit handlers of the program run behind the
    /// destructors of thread-local data, and call the library: so this has none.
    static CONTEXTS: ManuallyDrop<RefCell<Vec<Handle>>> =
        const { ManuallyDrop::new(RefCell::new(Vec::new())) };
    /// Has a destructor, as the data that the checker keeps of a thread.
    static DROPPED: Vec<()> = const { Vec::new() };
    /// The capture mode of this thread.
    pub(crate) static THREAD_MODE: Cell<i32> = const { Cell::new(GLOBAL) };
    /// Made with a stream of this thread.
    static ENDS: Ends = Ends(std::thread::current().id());
}

/// Calls `f` with the contexts of this thread, current one last.
pub(crate) fn with_contexts<T>(f: impl FnOnce(&mut Vec<Handle>) -> T) -> T {
    CONTEXTS.with(|contexts| f(&mut contexts.borrow_mut()))
}

/// Threads that have ended with streams of their own. A thread takes no lock of the tables at its
/// end, since that may be the end of the process.
static ENDED: Mutex<Vec<ThreadId>> = Mutex::new(Vec::new());

/// Notes the end of its thread.
struct Ends(ThreadId);

impl Drop for Ends {
    fn drop(&mut self) {
        ENDED.lock().unwrap_or_else(PoisonError::into_inner).push(self.0);
    }
}

/// `CU_STREAM_CAPTURE_MODE_GLOBAL`.
pub(crate) const GLOBAL: i32 = 0;
/// `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`.
pub(crate) const THREAD_LOCAL: i32 = 1;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`.
pub(crate) const RELAXED: i32 = 2;

/// The devices, and everything that the program has made.
pub(crate) struct World {
    pub(crate) config: Config,
    /// The process that called `cuInit`.
    process: u32,
    pub(crate) devices: Vec<Device>,
    /// All memory of all devices, as copies access it.
    pub(crate) all: Memory,
    pub(crate) checker: Option<Checker>,
    tables: Mutex<Tables>,
    /// Signalled when there may be work for an engine.
    pub(crate) work: Condvar,
    /// Signalled when work is done or has failed.
    pub(crate) done: Condvar,
    /// Counts turns in which anything happened, on any device.
    pub(crate) progress: AtomicU64,
}

/// A device.
pub(crate) struct Device {
    pub(crate) memory: Memory,
    pub(crate) config: DeviceConfig,
}

/// Initialises the library, once.
pub(crate) fn initialise() -> Res {
    let _ = WORLD.get_or_init(|| match Config::from_environment() {
        Ok(config) => Ok(World::new(config)),
        Err(message) => {
            eprintln!("libcuda of virtual GPUs: {message}");
            Err(INVALID_VALUE)
        }
    });
    // A forked process cannot use its parent's.
    if world()?.devices.is_empty() { Err(NO_DEVICE) } else { Ok(()) }
}

/// The world, after `cuInit`. A forked process has none: it lacks the threads of the devices.
pub(crate) fn world() -> Res<&'static World> {
    match WORLD.get() {
        Some(Ok(world)) if world.process != std::process::id() => Err(NOT_INITIALIZED),
        Some(Ok(world)) => Ok(world),
        Some(Err(code)) => Err(*code),
        None => Err(NOT_INITIALIZED),
    }
}

impl World {
    fn new(config: Config) -> World {
        // Each region has a file descriptor.
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let raised = rustix::process::Rlimit { current: limit.maximum, ..limit };
        // If that fails, the limit stays as it was.
        let _ = rustix::process::setrlimit(rustix::process::Resource::Nofile, raised);
        let check = CheckConfig { assume: config.assume, ..CheckConfig::default() };
        let checker = config.check.then(|| Checker::new(check));
        let seed = config.seed.unwrap_or(0);
        let device = |number: u32| {
            let memory = Memory::checked(seed ^ u64::from(number), checker.clone());
            if let Some(checker) = &checker {
                checker.number_device(&memory, number);
            }
            let config = DeviceConfig {
                schedule_seed: config.seed,
                assume: config.assume,
                livelock_limit: config.livelock_limit,
                clock: Clock::Real,
                ..DeviceConfig::default()
            };
            Device { memory, config }
        };
        World {
            devices: (0..config.devices).map(device).collect(),
            all: Memory::checked(seed, checker.clone()),
            checker,
            tables: Mutex::new(Tables::new(config.devices)),
            work: Condvar::new(),
            done: Condvar::new(),
            progress: AtomicU64::new(0),
            process: std::process::id(),
            config,
        }
    }

    /// The tables.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Tables> {
        // No code panics while it changes the tables.
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The device of this number.
    pub(crate) fn device(&self, device: CUdevice) -> Res<&Device> {
        usize::try_from(device).ok().and_then(|at| self.devices.get(at)).ok_or(INVALID_DEVICE)
    }

    /// Waits until `done` gives a result.
    pub(crate) fn wait<'a, T>(
        &'a self,
        mut tables: MutexGuard<'a, Tables>,
        mut done: impl FnMut(&mut Tables) -> Res<Option<T>>,
    ) -> Res<(MutexGuard<'a, Tables>, T)> {
        loop {
            if let Some(result) = done(&mut tables)? {
                return Ok((tables, result));
            }
            tables = self.done.wait(tables).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until a stream has done all that is enqueued in it now.
    pub(crate) fn synchronise<'a>(
        &'a self,
        mut tables: MutexGuard<'a, Tables>,
        streams: &[Handle],
    ) -> Res<MutexGuard<'a, Tables>> {
        let mut until = vec![];
        for handle in streams {
            let stream = tables.stream(*handle)?;
            until.push((*handle, stream.context, stream.queue.submitted));
        }
        let (tables, ()) = self.wait(tables, |tables| {
            for (handle, context, submitted) in &until {
                tables.observe(*context)?;
                if tables.streams.get(handle).is_some_and(|stream| stream.queue.completed < *submitted) {
                    return Ok(None);
                }
            }
            Ok(Some(()))
        })?;
        self.host_waited(&tables);
        Ok(tables)
    }

    /// Waits until the streams of all contexts have done all that is enqueued in them now. The work
    /// of contexts that failed or were destroyed is dropped.
    pub(crate) fn drain<'a>(&'a self, tables: MutexGuard<'a, Tables>) -> Res<MutexGuard<'a, Tables>> {
        let until: Vec<(Handle, u64)> =
            tables.streams.iter().map(|(handle, stream)| (*handle, stream.queue.submitted)).collect();
        let (tables, ()) = self.wait(tables, |tables| {
            let is_busy = |(handle, submitted): &(Handle, u64)| {
                tables.streams.get(handle).is_some_and(|stream| stream.queue.completed < *submitted)
            };
            Ok((!until.iter().any(is_busy)).then_some(()))
        })?;
        self.host_waited(&tables);
        Ok(tables)
    }

    /// The checker, while it has data of the calling thread. An exit handler has none.
    fn checker_of_thread(&self) -> Option<&Checker> {
        self.checker.as_ref().filter(|_| DROPPED.try_with(|_| ()).is_ok())
    }

    /// In check mode: the calling thread has waited for all work that is done. The checker does not
    /// track how threads of the program synchronise, so they count as one.
    pub(crate) fn host_waited(&self, tables: &Tables) {
        if let Some(checker) = self.checker_of_thread() {
            let streams = tables.streams.values().map(|stream| &stream.queue.past);
            let retired =
                tables.contexts.values().flat_map(|context| [&context.retired, &context.retired_blocking]);
            streams.chain(retired).for_each(|past| checker.host_waited(past));
            epoxide_vgpu::host_meets();
        }
    }

    /// Enqueues an op in a stream that is not captured, after waiting for room in it. Work of the
    /// legacy default stream and of blocking streams waits for each other.
    pub(crate) fn enqueue(
        &'static self,
        tables: MutexGuard<'static, Tables>,
        stream: Handle,
        op: Op<Work>,
    ) -> Res<MutexGuard<'static, Tables>> {
        let (mut tables, ()) = self.wait(tables, |tables| {
            let stream = tables.stream(stream)?;
            let (context, room) = (stream.context, stream.queue.has_room());
            tables.usable(context)?;
            Ok(room.then_some(()))
        })?;
        if let Some(checker) = self.checker_of_thread() {
            let past = checker.host_past();
            epoxide_vgpu::host_meets();
            let queue = &mut tables.stream(stream)?.queue;
            queue.past.join(&past);
            queue.past.join(&checker.host_past());
        }
        let context = tables.stream(stream)?.context;
        if let Some(code) = tables.context(context)?.error {
            // No engine runs it. Its mark passes, so that no stream waits for it.
            tables.stream(stream)?.queue.push(op);
            tables.fail(context, code);
            return Ok(tables);
        }
        tables.order_with_legacy(stream, self.checker.is_some());
        let own = tables.stream(stream)?;
        own.queue.push(op);
        let device = own.device;
        self.start_engine(&mut tables, device)?;
        self.work.notify_all();
        Ok(tables)
    }

    /// Starts the engine of a device if it has none.
    pub(crate) fn start_engine(&'static self, tables: &mut Tables, device: usize) -> Res {
        if !tables.has_engine[device] {
            engine::start(self, device)?;
            tables.has_engine[device] = true;
        }
        Ok(())
    }

    /// Maps memory into the memories that may access it: of `owner`, its peers, and all devices
    /// where there is no owner.
    pub(crate) fn share(&self, tables: &Tables, owner: Option<usize>, region: &Region) -> Res<Vec<Shared>> {
        let mut shared = vec![];
        for (device, Device { memory, .. }) in self.devices.iter().enumerate() {
            if owner.is_none_or(|owner| tables.has_peer_access(device, owner)) {
                shared.push(Shared {
                    device: Some(device),
                    access: READ_WRITE,
                    _region: memory.share(region).map_err(memory_code)?,
                });
            }
        }
        if owner.is_some() {
            let _region = self.all.share(region).map_err(memory_code)?;
            shared.push(Shared { device: None, access: READ_WRITE, _region });
        }
        Ok(shared)
    }
}

/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
pub(crate) const READ_WRITE: u32 = 3;

/// A region in the memory of another device, or of [`World::all`].
pub(crate) struct Shared {
    pub(crate) device: Option<usize>,
    /// `CU_MEM_ACCESS_FLAGS_*`. Kernels store to memory that is set to be read, too.
    pub(crate) access: u32,
    pub(crate) _region: Region,
}

/// The code of an error of memory.
pub(crate) fn memory_code(error: MemoryError) -> CUresult {
    match error {
        MemoryError::OutOfMemory { .. } => OUT_OF_MEMORY,
        MemoryError::OutOfBounds { .. }
        | MemoryError::ImportTooSmall { .. }
        | MemoryError::Multicast { .. } => INVALID_VALUE,
        MemoryError::Misaligned { .. } => MISALIGNED_ADDRESS,
        MemoryError::Race { .. } => LAUNCH_FAILED,
        MemoryError::Os { .. } => OPERATING_SYSTEM,
        _ => UNKNOWN,
    }
}

/// A context.
pub(crate) struct Context {
    pub(crate) device: usize,
    pub(crate) primary: bool,
    pub(crate) flags: u32,
    pub(crate) limits: HashMap<u32, usize>,
    pub(crate) cache_config: i32,
    pub(crate) shared_config: i32,
    /// The fault that made it unusable. From then on the queues of its streams stay empty.
    pub(crate) error: Option<CUresult>,
    /// A call that waits or queries has returned the fault.
    pub(crate) is_error_seen: bool,
    pub(crate) legacy: Handle,
    pub(crate) of_threads: HashMap<ThreadId, Handle>,
    /// In check mode: the causal past of removed streams, for calls that wait.
    pub(crate) retired: Past,
    /// The same of its blocking streams, for work of the legacy default stream too.
    pub(crate) retired_blocking: Past,
}

/// A primary context's users.
#[derive(Default)]
pub(crate) struct Primary {
    pub(crate) context: Option<Handle>,
    pub(crate) users: u32,
    pub(crate) flags: u32,
}

/// A stream.
pub(crate) struct Stream {
    pub(crate) context: Handle,
    pub(crate) device: usize,
    pub(crate) flags: u32,
    pub(crate) priority: i32,
    pub(crate) number: u64,
    pub(crate) queue: Queue<Work>,
}

/// `CU_STREAM_NON_BLOCKING`.
pub(crate) const NON_BLOCKING: u32 = 1;

/// An event.
pub(crate) struct Event {
    pub(crate) context: Handle,
    pub(crate) timing: bool,
    pub(crate) last: LastRecord,
}

/// The last record of an event.
#[derive(Clone)]
pub(crate) enum LastRecord {
    Never,
    Stream(Arc<Mark>),
    /// In a capture, as the mark of this number.
    Capture(u64, usize),
}

/// A loaded module.
pub(crate) struct Loaded {
    pub(crate) context: Handle,
    pub(crate) module: Arc<Module>,
    /// Its variables in [`World::all`].
    pub(crate) _shared: Option<Region>,
    pub(crate) functions: HashMap<String, Handle>,
}

/// A kernel of a module.
#[derive(Clone)]
pub(crate) struct Function {
    pub(crate) module: Handle,
    pub(crate) kernel: Arc<Kernel>,
    pub(crate) max_dynamic_shared: u32,
    pub(crate) carveout: i32,
    /// `CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED`.
    pub(crate) cluster_sizes: ClusterSizes,
    /// Whether its code is loaded, which counts where code is loaded lazily.
    pub(crate) is_loaded: bool,
}

/// A library: a module that is loaded into each context at its first use there.
pub(crate) struct Library {
    pub(crate) ptx: Arc<str>,
    /// In no context.
    pub(crate) parsed: Arc<Module>,
    pub(crate) modules: HashMap<Handle, Handle>,
    pub(crate) kernels: HashMap<String, Handle>,
}

/// Kind of an allocation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    Device,
    /// Page-locked host memory.
    Host,
    /// Memory of the program that it registered as page-locked.
    Registered,
    Managed,
    /// Memory of another process.
    Ipc,
    /// A mapping at a reserved address.
    Mapping,
}

impl Kind {
    /// Whether it is memory of the host.
    pub(crate) fn is_host(self) -> bool {
        matches!(self, Kind::Host | Kind::Registered)
    }
}

/// Memory at an address.
pub(crate) struct Allocation {
    pub(crate) kind: Kind,
    pub(crate) context: Option<Handle>,
    /// The device that it counts for.
    pub(crate) device: Option<usize>,
    pub(crate) bytes: u64,
    pub(crate) id: u64,
    pub(crate) host_flags: u32,
    /// Counts against the device's memory.
    pub(crate) charged: bool,
    /// The memory, which [`World::all`] has for host memory and mappings, else the device.
    pub(crate) region: Region,
    pub(crate) shared: Vec<Shared>,
    /// The handle of the physical memory of a mapping.
    pub(crate) physical: Option<u64>,
    /// The file that other processes open: `cuIpcGetMemHandle` was called.
    pub(crate) exported: Option<OwnedFd>,
    /// The file behind it, and how often its context has opened it: `cuIpcOpenMemHandle` was
    /// called.
    pub(crate) opened: Option<Opened>,
}

/// An allocation of another process, or of another context, that a context has opened.
pub(crate) struct Opened {
    /// Device and inode of its file.
    pub(crate) file: (u64, u64),
    /// Calls that have opened it, less those that have closed it.
    pub(crate) count: u64,
}

impl Allocation {
    /// `CU_MEM_ACCESS_FLAGS_*` of a device's kernels.
    pub(crate) fn access_of(&self, device: usize) -> u32 {
        match self.kind {
            Kind::Host | Kind::Registered | Kind::Managed => READ_WRITE,
            Kind::Device | Kind::Ipc if self.device == Some(device) => READ_WRITE,
            _ => {
                let shared = self.shared.iter().find(|shared| shared.device == Some(device));
                shared.map_or(0, |shared| shared.access)
            }
        }
    }
}

/// Physical memory of `cuMemCreate`.
pub(crate) struct Physical {
    pub(crate) fd: OwnedFd,
    pub(crate) bytes: u64,
    /// The device that it counts for; `None` for imported memory.
    pub(crate) device: Option<usize>,
    pub(crate) properties: CUmemAllocationProp,
    /// Its handle and its mappings.
    pub(crate) users: u32,
    /// Keeps the checker's record of its contents.
    pub(crate) region: Region,
}

/// The tables. Handles are unique in the process.
pub(crate) struct Tables {
    next: Handle,
    pub(crate) contexts: HashMap<Handle, Context>,
    pub(crate) primaries: Vec<Primary>,
    pub(crate) streams: BTreeMap<Handle, Stream>,
    pub(crate) events: HashMap<Handle, Event>,
    pub(crate) modules: HashMap<Handle, Loaded>,
    pub(crate) functions: HashMap<Handle, Function>,
    pub(crate) libraries: HashMap<Handle, Library>,
    /// Library and name of each `CUkernel`.
    pub(crate) kernels: HashMap<Handle, (Handle, String)>,
    /// By address.
    pub(crate) allocations: BTreeMap<u64, Allocation>,
    pub(crate) captures: HashMap<u64, (Capture<Work>, CaptureMode)>,
    pub(crate) graphs: HashMap<Handle, Option<Recorded>>,
    pub(crate) executables: HashMap<Handle, Option<Recorded>>,
    pub(crate) reservations: BTreeMap<u64, Reservation>,
    pub(crate) physical: HashMap<u64, Physical>,
    /// Multicast objects, whose handles are those of physical memory too.
    pub(crate) teams: HashMap<u64, Team>,
    /// Device and release threshold of each memory pool.
    pub(crate) pools: HashMap<Handle, (usize, u64)>,
    pub(crate) default_pools: Vec<Handle>,
    pub(crate) current_pools: Vec<Handle>,
    /// `(a, b)`: context a accesses the memory of context b, with their devices. Access is a
    /// device's: as long as one of its contexts has it, kernels of all of them have it.
    pub(crate) peers: HashMap<(Handle, Handle), (usize, usize)>,
    /// Bytes of each device in use.
    pub(crate) used: Vec<u64>,
    pub(crate) has_engine: Vec<bool>,
}

/// A graph that a capture made.
#[derive(Clone)]
pub(crate) struct Recorded {
    pub(crate) graph: Graph<Work>,
    /// The context of each lane, in which its work runs.
    pub(crate) contexts: Vec<Handle>,
}

/// The threads that a capture forbids calls that it cannot record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CaptureMode {
    /// All threads whose own mode is global too, and its own.
    Global,
    /// Its own.
    ThreadLocal,
    Relaxed,
}

impl Tables {
    fn new(devices: u32) -> Tables {
        let devices = devices as usize;
        let mut tables = Tables {
            next: 0x4000_0000,
            contexts: HashMap::new(),
            primaries: (0..devices).map(|_| Primary::default()).collect(),
            streams: BTreeMap::new(),
            events: HashMap::new(),
            modules: HashMap::new(),
            functions: HashMap::new(),
            libraries: HashMap::new(),
            kernels: HashMap::new(),
            allocations: BTreeMap::new(),
            captures: HashMap::new(),
            graphs: HashMap::new(),
            executables: HashMap::new(),
            reservations: BTreeMap::new(),
            physical: HashMap::new(),
            teams: HashMap::new(),
            pools: HashMap::new(),
            default_pools: vec![],
            current_pools: vec![],
            peers: HashMap::new(),
            used: vec![0; devices],
            has_engine: vec![false; devices],
        };
        for device in 0..devices {
            let pool = tables.new_handle();
            tables.pools.insert(pool, (device, 0));
            tables.default_pools.push(pool);
        }
        tables.current_pools = tables.default_pools.clone();
        tables
    }

    pub(crate) fn new_handle(&mut self) -> Handle {
        self.next += 16;
        self.next
    }

    /// The current context of the calling thread, unless a fault has made it unusable.
    pub(crate) fn current(&self) -> Res<Handle> {
        let current = with_contexts(|contexts| contexts.last().copied()).ok_or(INVALID_CONTEXT)?;
        self.usable(current)?;
        Ok(current)
    }

    /// The error of a fault, once a call has returned it by [`Tables::observe`]. Until then work is
    /// accepted, and dropped. So results of calls do not depend on how fast a kernel fails.
    pub(crate) fn usable(&self, context: Handle) -> Res {
        let context = self.contexts.get(&context).ok_or(INVALID_CONTEXT)?;
        match context.error.filter(|_| context.is_error_seen) {
            Some(code) => Err(code),
            None => Ok(()),
        }
    }

    /// The error of a fault, for calls that wait or query.
    pub(crate) fn observe(&mut self, context: Handle) -> Res {
        let own = self.context(context)?;
        own.is_error_seen |= own.error.is_some();
        self.usable(context)
    }

    /// Whether work of a context runs.
    pub(crate) fn is_alive(&self, context: Handle) -> bool {
        self.contexts.get(&context).is_some_and(|context| context.error.is_none())
    }

    pub(crate) fn context(&mut self, handle: Handle) -> Res<&mut Context> {
        self.contexts.get_mut(&handle).ok_or(INVALID_CONTEXT)
    }

    pub(crate) fn device_of(&self, context: Handle) -> Res<usize> {
        Ok(self.contexts.get(&context).ok_or(INVALID_CONTEXT)?.device)
    }

    pub(crate) fn stream(&mut self, handle: Handle) -> Res<&mut Stream> {
        self.streams.get_mut(&handle).ok_or(INVALID_HANDLE)
    }

    pub(crate) fn event(&mut self, handle: Handle) -> Res<&mut Event> {
        self.events.get_mut(&handle).ok_or(INVALID_HANDLE)
    }

    /// The stream that a caller's handle stands for: null and the legacy handle are the default
    /// stream of the current context. Its context must be usable.
    pub(crate) fn resolve(&mut self, handle: Handle) -> Res<Handle> {
        let stream = match handle {
            0 | LEGACY => {
                let current = self.current()?;
                self.context(current)?.legacy
            }
            PER_THREAD => {
                let current = self.current()?;
                let thread = std::thread::current().id();
                match self.context(current)?.of_threads.get(&thread) {
                    Some(stream) => *stream,
                    None => {
                        self.remove_streams_of_ended_threads();
                        let stream = self.new_stream(current, 0, 0)?;
                        self.context(current)?.of_threads.insert(thread, stream);
                        // If the thread's local data is already dropped, the stream ends with its
                        // context.
                        let _ = ENDS.try_with(|_| ());
                        stream
                    }
                }
            }
            handle => handle,
        };
        let own = self.stream(stream)?;
        // A stream that was destroyed stays until its work is done.
        if own.queue.closed {
            return Err(INVALID_HANDLE);
        }
        let context = own.context;
        self.usable(context)?;
        Ok(stream)
    }

    /// Removes the streams of threads that have ended, once their work is done.
    fn remove_streams_of_ended_threads(&mut self) {
        let mut noted = ENDED.lock().unwrap_or_else(PoisonError::into_inner);
        let ended: HashSet<ThreadId> = noted.drain(..).collect();
        let (mut left, mut gone) = (HashSet::new(), vec![]);
        for context in self.contexts.values_mut() {
            context.of_threads.retain(|thread, handle| {
                if !ended.contains(thread) {
                    return true;
                }
                let is_needed = |stream: &Stream| !stream.queue.is_idle() || stream.queue.capture.is_some();
                let stays = self.streams.get(handle).is_some_and(is_needed);
                if stays {
                    left.insert(*thread);
                } else {
                    gone.push(*handle);
                }
                stays
            });
        }
        noted.extend(left);
        drop(noted);
        gone.into_iter().for_each(|stream| self.remove_stream(stream));
    }

    pub(crate) fn new_stream(&mut self, context: Handle, flags: u32, priority: i32) -> Res<Handle> {
        let device = self.device_of(context)?;
        let handle = self.new_handle();
        let (number, queue) = (handle as u64, Queue::default());
        self.streams.insert(handle, Stream { context, device, flags, priority, number, queue });
        Ok(handle)
    }

    /// Ends the part of a stream in its capture. A capture ends with the stream that it began on,
    /// and is not valid any more without one that joined it.
    pub(crate) fn leave_capture(&mut self, stream: Handle) {
        let Some((id, lane)) = self.streams.get_mut(&stream).and_then(|stream| stream.queue.capture.take())
        else {
            return;
        };
        if lane > 0 {
            self.invalidate(id);
            return;
        }
        self.captures.remove(&id);
        for stream in self.streams.values_mut() {
            stream.queue.capture.take_if(|(own, _)| *own == id);
        }
    }

    /// Removes a stream whose work is done. Its context keeps the causal past.
    pub(crate) fn remove_stream(&mut self, handle: Handle) {
        let Some(stream) = self.streams.remove(&handle) else { return };
        let Some(context) = self.contexts.get_mut(&stream.context) else { return };
        let is_blocking = stream.flags & NON_BLOCKING == 0;
        let retired = if is_blocking { &mut context.retired_blocking } else { &mut context.retired };
        retired.join(&stream.queue.past);
    }

    /// All streams of a context.
    pub(crate) fn streams_of(&self, context: Handle) -> Vec<Handle> {
        let own = self.streams.iter().filter(|(_, stream)| stream.context == context);
        own.map(|(handle, _)| *handle).collect()
    }

    /// Has the next op of a stream wait as the legacy default stream demands: that one for all
    /// blocking streams, and these for it. `idle_too`: also for streams that are done, whose causal
    /// pasts count in check mode.
    fn order_with_legacy(&mut self, handle: Handle, idle_too: bool) {
        let Some(stream) = self.streams.get(&handle) else { return };
        if stream.flags & NON_BLOCKING != 0 {
            return;
        }
        let Some(context) = self.contexts.get(&stream.context) else { return };
        let (own, legacy) = (stream.context, context.legacy);
        let others: Vec<Handle> = if handle == legacy {
            let retired = context.retired_blocking.clone();
            if let Some(stream) = self.streams.get_mut(&legacy) {
                stream.queue.past.join(&retired);
            }
            let blocking = |stream: &Stream| stream.context == own && stream.flags & NON_BLOCKING == 0;
            self.streams.iter().filter(|(_, stream)| blocking(stream)).map(|(handle, _)| *handle).collect()
        } else {
            vec![legacy]
        };
        for other in others.into_iter().filter(|other| *other != handle) {
            let Some(queue) = self.streams.get_mut(&other).map(|stream| &mut stream.queue) else { continue };
            if queue.capture.is_some() || (queue.is_idle() && !idle_too) {
                continue;
            }
            let mark = Arc::new(Mark::default());
            queue.push(Op::Record(mark.clone()));
            if let Some(stream) = self.streams.get_mut(&handle) {
                stream.queue.push(Op::Wait(mark));
            }
        }
    }

    /// Whether kernels of device `own` access the memory of device `other`.
    pub(crate) fn has_peer_access(&self, own: usize, other: usize) -> bool {
        self.peers.values().any(|devices| *devices == (own, other))
    }

    /// Ends the access of one context to the memory of another, and that of its device if no other
    /// contexts of the two devices have it.
    pub(crate) fn close_to_peer(&mut self, pair: (Handle, Handle)) {
        let Some((own, other)) = self.peers.remove(&pair) else { return };
        if self.has_peer_access(own, other) {
            return;
        }
        for allocation in self.allocations.values_mut().filter(|allocation| allocation.device == Some(other))
        {
            if matches!(allocation.kind, Kind::Device | Kind::Ipc) {
                allocation.shared.retain(|shared| shared.device != Some(own));
            }
        }
    }

    /// The address at which a context has opened this file.
    pub(crate) fn opened_by(&mut self, context: Handle, file: (u64, u64)) -> Option<(u64, &mut Opened)> {
        let own = self.allocations.iter_mut().filter(|(_, own)| own.context == Some(context));
        own.filter_map(|(addr, own)| Some((*addr, own.opened.as_mut()?))).find(|(_, own)| own.file == file)
    }

    /// The allocation that holds an address.
    pub(crate) fn allocation_at(&self, addr: u64) -> Option<(u64, &Allocation)> {
        let (start, allocation) = self.allocations.range(..=addr).next_back()?;
        (addr - start < allocation.bytes).then_some((*start, allocation))
    }

    /// Ends the validity of a capture.
    pub(crate) fn invalidate(&mut self, capture: u64) {
        if let Some((capture, _)) = self.captures.get_mut(&capture) {
            capture.invalid.get_or_insert_with(String::new);
        }
    }

    /// Whether a stream is the legacy default stream of its context.
    pub(crate) fn is_legacy(&self, stream: Handle) -> bool {
        self.contexts.values().any(|context| context.legacy == stream)
    }

    /// The captures of blocking streams beside a legacy default stream, which make it unusable.
    pub(crate) fn captures_beside(&mut self, stream: Handle) -> Res<Vec<u64>> {
        let own = self.stream(stream)?.context;
        if self.captures.is_empty() || !self.is_legacy(stream) {
            return Ok(vec![]);
        }
        let blocking = |stream: &&Stream| stream.context == own && stream.flags & NON_BLOCKING == 0;
        let captures = self.streams.values().filter(blocking).filter_map(|stream| stream.queue.capture);
        Ok(captures.map(|(id, _)| id).collect())
    }

    /// An error, and the end of their validity, if captures make a stream unusable.
    fn forbid_beside_captures(&mut self, stream: Handle) -> Res {
        let captures = self.captures_beside(stream)?;
        captures.iter().for_each(|capture| self.invalidate(*capture));
        if captures.is_empty() { Ok(()) } else { Err(STREAM_CAPTURE_IMPLICIT) }
    }

    /// The capture that records a stream, with its lane.
    pub(crate) fn recording(&mut self, stream: Handle) -> Res<Option<(&mut Capture<Work>, usize)>> {
        self.forbid_beside_captures(stream)?;
        let Some((id, lane)) = self.stream(stream)?.queue.capture else { return Ok(None) };
        let Some((capture, _)) = self.captures.get_mut(&id) else { return Ok(None) };
        if capture.invalid.is_some() {
            return Err(STREAM_CAPTURE_INVALIDATED);
        }
        Ok(Some((capture, lane)))
    }

    /// An error, and the end of the capture's validity, if the stream is captured. The error is
    /// another one where the capture is not valid any more.
    pub(crate) fn forbid_on_captured(&mut self, stream: Handle) -> Res {
        self.recording(stream)?;
        let Some((id, _)) = self.stream(stream)?.queue.capture else { return Ok(()) };
        self.invalidate(id);
        Err(STREAM_CAPTURE_UNSUPPORTED)
    }

    /// An error, and the end of their validity, if captures forbid the calling thread calls that
    /// they cannot record.
    pub(crate) fn forbid_while_capturing(&mut self) -> Res {
        let own = THREAD_MODE.get();
        if own == RELAXED {
            return Ok(());
        }
        let thread = std::thread::current().id();
        let forbids = |capture: &Capture<Work>, mode: CaptureMode| match mode {
            CaptureMode::Global => own == GLOBAL || capture.thread == thread,
            CaptureMode::ThreadLocal => capture.thread == thread,
            CaptureMode::Relaxed => false,
        };
        let mut result = Ok(());
        for (capture, mode) in self.captures.values_mut() {
            if forbids(capture, *mode) {
                capture.invalid.get_or_insert_with(String::new);
                result = Err(STREAM_CAPTURE_UNSUPPORTED);
            }
        }
        result
    }

    /// Makes a context unusable: drops the work of its streams, but for callbacks.
    pub(crate) fn fail(&mut self, context: Handle, code: CUresult) {
        let own = self.contexts.get_mut(&context);
        let code = own.map_or(code, |own| *own.error.get_or_insert(code));
        let now_ns = Clock::Real.now_ns();
        for stream in self.streams.values_mut().filter(|stream| stream.context == context) {
            for op in &stream.queue.ops {
                if let Op::Work(Work::Host(call)) = op {
                    call.run_failed(code);
                }
            }
            stream.queue.abandon(now_ns);
        }
    }

    /// Removes what belongs to a context. The memory and the modules' variables are to be freed
    /// without the lock.
    pub(crate) fn remove_context(&mut self, handle: Handle) -> (Vec<Allocation>, Vec<Loaded>) {
        self.fail(handle, INVALID_CONTEXT);
        self.contexts.remove(&handle);
        let is_own = |pair: &&(Handle, Handle)| pair.0 == handle || pair.1 == handle;
        let peers: Vec<(Handle, Handle)> = self.peers.keys().filter(is_own).copied().collect();
        peers.into_iter().for_each(|pair| self.close_to_peer(pair));
        for stream in self.streams_of(handle) {
            self.leave_capture(stream);
            self.streams.remove(&stream);
        }
        self.events.retain(|_, event| event.context != handle);
        let gone: Vec<Handle> =
            self.modules.iter().filter(|(_, module)| module.context == handle).map(|(own, _)| *own).collect();
        let modules = gone.into_iter().filter_map(|module| self.remove_module(module)).collect();
        for library in self.libraries.values_mut() {
            library.modules.remove(&handle);
        }
        let own = self.allocations.iter().filter(|(_, allocation)| allocation.context == Some(handle));
        let addresses: Vec<u64> = own.map(|(addr, _)| *addr).collect();
        (addresses.into_iter().filter_map(|addr| self.remove_allocation(addr)).collect(), modules)
    }

    pub(crate) fn remove_module(&mut self, handle: Handle) -> Option<Loaded> {
        let module = self.modules.remove(&handle)?;
        self.functions.retain(|_, function| function.module != handle);
        Some(module)
    }

    pub(crate) fn remove_allocation(&mut self, addr: u64) -> Option<Allocation> {
        let allocation = self.allocations.remove(&addr)?;
        if let (true, Some(device)) = (allocation.charged, allocation.device) {
            self.used[device] -= allocation.bytes;
        }
        if let Some(physical) = allocation.physical {
            self.release_physical(physical);
        }
        Some(allocation)
    }

    /// The uses of physical memory, or of a multicast object.
    pub(crate) fn users_of(&mut self, handle: u64) -> Res<&mut u32> {
        let physical = self.physical.get_mut(&handle).map(|physical| &mut physical.users);
        physical.or(self.teams.get_mut(&handle).map(|team| &mut team.users)).ok_or(INVALID_VALUE)
    }

    /// Ends one use of physical memory, or of a multicast object.
    pub(crate) fn release_physical(&mut self, handle: u64) {
        if let Some(team) = self.teams.get_mut(&handle) {
            team.users -= 1;
            if team.users == 0 {
                let bound = team.physical();
                self.teams.remove(&handle);
                bound.into_iter().for_each(|physical| self.release_physical(physical));
            }
            return;
        }
        let Some(physical) = self.physical.get_mut(&handle) else { return };
        physical.users -= 1;
        if physical.users == 0 {
            let (bytes, device) = (physical.bytes, physical.device);
            if let Some(device) = device {
                self.used[device] -= bytes;
            }
            self.physical.remove(&handle);
        }
    }
}

impl World {
    /// Notes that something has happened.
    pub(crate) fn made_progress(&self) {
        self.progress.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use epoxide_vgpu::stream::{Source, Target, Transfer};

    use super::*;
    use crate::calls::context::new_context;

    #[test]
    fn contexts_made_behind_a_panic_of_their_device_have_a_new_thread() {
        let config = Config {
            devices: 1,
            memory_bytes: 1 << 30,
            check: false,
            assume: epoxide_vgpu::Assumptions::default(),
            seed: None,
            livelock_limit: None,
            stuck_seconds: None,
            loads_lazily: false,
        };
        let world: &'static World = Box::leak(Box::new(World::new(config)));
        let run = |bytes: u64| {
            let mut tables = world.lock();
            let context = new_context(&mut tables, 0, false, 0)?;
            let stream = tables.context(context)?.legacy;
            let landed = Arc::new(OnceLock::new());
            let (target, source) = (Target::Staged(landed.clone()), Source::Staged([5].into()));
            let source = if bytes == 1 { source } else { Source::Device(64) };
            let transfer = Transfer::Copy { target, source, bytes };
            let tables = world.enqueue(tables, stream, Op::Work(Work::Transfer(transfer)))?;
            drop(world.synchronise(tables, &[stream])?);
            Ok(landed.get().cloned())
        };
        assert_eq!(run(1), Ok(Some([5].into())));
        // No vector is that large. Calls of the API reject the copy before it is enqueued.
        assert_eq!(run(u64::MAX), Err(UNKNOWN));
        assert!(!world.lock().has_engine[0]);
        assert_eq!(run(1), Ok(Some([5].into())));
    }

    #[test]
    fn streams_of_threads_that_have_ended_are_removed_once_they_are_idle() {
        let mut tables = Tables::new(1);
        let context = new_context(&mut tables, 0, false, 0).unwrap();
        let mut of_thread = |is_busy: bool| {
            let run = || {
                with_contexts(|contexts| contexts.push(context));
                let stream = tables.resolve(PER_THREAD).unwrap();
                assert_eq!(tables.resolve(PER_THREAD), Ok(stream));
                tables.stream(stream).unwrap().queue.busy = is_busy;
                let streams = tables.streams_of(context);
                (stream, streams, tables.context(context).unwrap().of_threads.len())
            };
            // A join waits for the end of the thread's local data.
            std::thread::scope(|threads| threads.spawn(run).join().unwrap())
        };
        let legacy = of_thread(false).1[0];
        let (first, streams, threads) = of_thread(false);
        assert_eq!((streams, threads), (vec![legacy, first], 1));
        let (busy, streams, threads) = of_thread(true);
        assert_eq!((streams, threads), (vec![legacy, busy], 1));
        for _ in 0..2 {
            let (last, streams, threads) = of_thread(false);
            assert_eq!((streams, threads), (vec![legacy, busy, last], 2));
        }
    }
}
