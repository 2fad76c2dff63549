//! The engine of a device: a thread that takes work from the device's streams and runs it.
//!
//! All streams of a device run concurrently: the grids take turns. A grid that only waits yields to
//! others, so a kernel may wait for work of another stream, of another device, or for the host.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use epoxide_vgpu::stream::{Launch, Transfer};
use epoxide_vgpu::{Clock, Fault, FaultKind, Grid, LaunchError, Past, Progress, Timeline};

use crate::abi::*;
use crate::work::{HostCall, Work};
use crate::world::{Stream, Tables, World, memory_code};

/// Warp instructions that a grid runs before the next one has its turn.
const SLICE: u64 = 64 * 1024;
/// Warp instructions per warp within which a grid that only waits is found to do so.
const SLICE_PER_WARP: u64 = 256;
/// How often the engine yields its time slice before it sleeps, when all grids wait.
const YIELDS: u32 = 4;
/// Most time that counts for a round in which all jobs only waited: a debugger may stop the program.
const LONGEST_ROUND: Duration = Duration::from_secs(1);
/// Longest sleep when all grids wait: the host, or another process, must store the polled words.
const LONGEST_NAP: Duration = Duration::from_micros(500);

/// Work that has begun.
struct Job {
    stream: Handle,
    context: Handle,
    running: Running,
    /// In check mode: its stream, and the causal past before it; once it is done, behind it.
    order: Option<(Timeline, Past)>,
}

enum Running {
    /// Not a grid yet, with the seed of its schedule if it has one.
    Launch(Arc<Launch>, Option<u64>),
    /// A grid, and its number of warps.
    Grid(Box<Grid>, u64),
    Transfer(Transfer),
    Host(JoinHandle<()>),
    /// A host function for which the system had no thread.
    Call(HostCall),
    Nothing,
}

/// A fault: the context's code, and the report.
type Failure = (CUresult, String);

/// Starts the thread of a device.
pub(crate) fn start(world: &'static World, device: usize) -> Res {
    let run = move || {
        let mut engine = Engine { world, device, jobs: vec![], launches: 0 };
        if catch_unwind(AssertUnwindSafe(|| engine.run())).is_err() {
            let mut tables = world.lock();
            // The next work of another context starts a new thread.
            tables.has_engine[device] = false;
            let own: Vec<Handle> = tables
                .contexts
                .iter()
                .filter(|(_, context)| context.device == device)
                .map(|(own, _)| *own)
                .collect();
            own.into_iter().for_each(|context| tables.fail(context, UNKNOWN));
            eprintln!(
                "libcuda of virtual GPUs: the thread of device {device} has panicked, please report it"
            );
            world.done.notify_all();
            world.work.notify_all();
        }
    };
    std::thread::Builder::new()
        .name(format!("virtual GPU {device}"))
        .spawn(run)
        .map_err(|_| OPERATING_SYSTEM)?;
    Ok(())
}

struct Engine {
    world: &'static World,
    device: usize,
    jobs: Vec<Job>,
    /// Launches so far.
    launches: u64,
}

impl Engine {
    fn run(&mut self) {
        // Rounds in a row in which all jobs only waited, and for how long.
        let (mut waits, mut waited, mut last) = (0, Duration::ZERO, Instant::now());
        let mut seen = 0;
        loop {
            let rested = self.jobs.is_empty();
            self.await_work(waits);
            if rested {
                (waited, last) = (Duration::ZERO, Instant::now());
            }
            let mut progress = false;
            let mut index = 0;
            while index < self.jobs.len() {
                match self.jobs[index].turn(self.world, self.device) {
                    Ok(Turn::Waits) => index += 1,
                    Ok(Turn::Runs) => {
                        progress = true;
                        index += 1;
                    }
                    Ok(Turn::Ended) => {
                        progress = true;
                        let job = self.jobs.remove(index);
                        self.finish(&job);
                    }
                    Err((code, report)) => {
                        progress = true;
                        let context = self.jobs[index].context;
                        self.fail(context, code, &report);
                    }
                }
            }
            // A kernel of another device may wait for a host function.
            let calls_host = self.jobs.iter().any(|job| matches!(job.running, Running::Host(_)));
            if progress || calls_host {
                self.world.made_progress();
            }
            let now = self.world.progress.load(Ordering::Relaxed);
            let since_last = std::mem::replace(&mut last, Instant::now()).elapsed();
            waited += since_last.min(LONGEST_ROUND);
            if now != seen {
                waited = Duration::ZERO;
                seen = now;
            }
            waits = if progress { 0 } else { waits + 1 };
            let limit = self.world.config.stuck_seconds.map(Duration::from_secs);
            if limit.is_some_and(|limit| waited >= limit) {
                self.report_stuck();
                waited = Duration::ZERO;
            }
        }
    }

    /// All kernels have only waited for as long as the configuration allows.
    fn report_stuck(&mut self) {
        let seconds = self.world.config.stuck_seconds.unwrap_or(0);
        while let Some(job) = self.jobs.first() {
            let context = job.context;
            let mut report = format!(
                "kernels have only waited for {seconds} s, and nothing else has happened (EPOXIDE_VGPU_STUCK_SECONDS \
                 changes the time, 0 lets them wait for ever)"
            );
            for job in self.jobs.iter().filter(|job| job.context == context) {
                if let Running::Grid(grid, _) = &job.running {
                    report.push_str(&format!("\n{}", grid.stuck_report()));
                }
            }
            self.fail(context, LAUNCH_TIMEOUT, &report);
        }
    }

    /// Returns when there are jobs to run.
    fn await_work(&mut self, waits: u32) {
        let world = self.world;
        let mut tables = world.lock();
        loop {
            let changed = self.collect(&mut tables);
            if self.jobs.is_empty() {
                tables = world.work.wait(tables).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            if changed || waits == 0 {
                return;
            }
            if waits <= YIELDS {
                drop(tables);
                std::thread::yield_now();
                return;
            }
            let nap = LONGEST_NAP.min(Duration::from_micros(1 << (waits - YIELDS).min(10)));
            // New work ends the nap early.
            let woken: (MutexGuard<'_, Tables>, _) =
                world.work.wait_timeout(tables, nap).unwrap_or_else(PoisonError::into_inner);
            tables = woken.0;
            self.collect(&mut tables);
            if !self.jobs.is_empty() {
                return;
            }
        }
    }

    /// Passes marks and begins the work at the front of the streams. True when anything happened.
    fn collect(&mut self, tables: &mut Tables) -> bool {
        // Work of a context that failed or was destroyed is dropped.
        self.jobs.retain(|job| tables.is_alive(job.context));
        let before = self.jobs.len();
        let now_ns = Clock::Real.now_ns();
        let mut any_passed = false;
        loop {
            let mut passed = false;
            let Tables { streams, contexts, .. } = &mut *tables;
            let is_alive = |context| contexts.get(&context).is_some_and(|context| context.error.is_none());
            let is_own = |stream: &Stream| stream.device == self.device && is_alive(stream.context);
            for (handle, stream) in streams.iter_mut().filter(|(_, stream)| is_own(stream)) {
                let Some(work) = stream.queue.next_work(now_ns, &mut passed) else { continue };
                let running = match work {
                    Work::Launch(launch) => {
                        self.launches += 1;
                        let seed = self.world.devices[self.device].config.schedule_seed;
                        Running::Launch(launch, seed.map(|seed| seed.wrapping_add(self.launches << 20)))
                    }
                    Work::Transfer(transfer) => Running::Transfer(transfer),
                    Work::Host(call) => match std::thread::Builder::new().spawn(move || call.run(0)) {
                        Ok(thread) => Running::Host(thread),
                        Err(_) => Running::Call(call),
                    },
                    Work::Await(_) => Running::Nothing,
                    Work::Free(allocation) => {
                        drop(allocation.lock().unwrap_or_else(PoisonError::into_inner).take());
                        Running::Nothing
                    }
                };
                let order = self.world.checker.as_ref().map(|checker| {
                    let timeline = *stream.queue.timeline.get_or_insert_with(|| checker.timeline());
                    (timeline, stream.queue.past.clone())
                });
                self.jobs.push(Job { stream: *handle, context: stream.context, running, order });
            }
            if !passed {
                break;
            }
            any_passed = true;
        }
        let closed: Vec<Handle> = tables
            .streams
            .iter()
            .filter(|(_, stream)| {
                stream.device == self.device && stream.queue.closed && stream.queue.is_idle()
            })
            .map(|(handle, _)| *handle)
            .collect();
        closed.into_iter().for_each(|handle| tables.remove_stream(handle));
        if any_passed {
            self.world.made_progress();
            self.world.done.notify_all();
            // Streams of other devices may wait for these marks.
            self.world.work.notify_all();
        }
        any_passed || self.jobs.len() > before
    }

    fn finish(&self, job: &Job) {
        let mut tables = self.world.lock();
        // A context that failed meanwhile has no such work any more.
        if tables.is_alive(job.context)
            && let Some(stream) = tables.streams.get_mut(&job.stream)
        {
            stream.queue.finish_work(job.order.as_ref().map(|(_, past)| past));
        }
        drop(tables);
        self.world.done.notify_all();
    }

    /// Makes a context unusable and prints the report.
    fn fail(&mut self, context: Handle, code: CUresult, report: &str) {
        eprintln!("libcuda of virtual GPUs: device {}: {report}", self.device);
        self.jobs.retain(|job| job.context != context);
        self.world.lock().fail(context, code);
        self.world.done.notify_all();
        self.world.work.notify_all();
    }
}

/// How a turn of a job ended.
enum Turn {
    Runs,
    Waits,
    Ended,
}

impl Job {
    fn turn(&mut self, world: &World, device: usize) -> Result<Turn, Failure> {
        match &mut self.running {
            Running::Launch(launch, seed) => {
                let device = &world.devices[device];
                let grid = launch
                    .grid(&device.memory, &device.config, *seed, self.order.as_ref())
                    .map_err(|error| (launch_code(&error), error.to_string()))?;
                self.running = Running::Grid(Box::new(grid), launch.warps());
                Ok(Turn::Runs)
            }
            Running::Grid(grid, warps) => match grid.step(SLICE.max(1024 + SLICE_PER_WARP * *warps)) {
                Ok(Progress::Running) => Ok(Turn::Runs),
                Ok(Progress::Spinning) => Ok(Turn::Waits),
                Ok(Progress::Done) => {
                    if let Some((_, past)) = &mut self.order {
                        *past = grid.past();
                    }
                    Ok(Turn::Ended)
                }
                Err(fault) => Err((fault_code(&fault), report_of(&fault))),
            },
            Running::Transfer(transfer) => {
                let run = || transfer.run(&world.all);
                let done = match (&world.checker, &mut self.order) {
                    (Some(checker), Some((timeline, past))) => checker.act(*timeline, past, run),
                    _ => run(),
                };
                done.map_err(|error| (memory_code(error.clone()), format!("copy or fill: {error}")))?;
                Ok(Turn::Ended)
            }
            Running::Host(thread) => Ok(if thread.is_finished() { Turn::Ended } else { Turn::Waits }),
            Running::Call(call) => {
                call.run(0);
                Ok(Turn::Ended)
            }
            Running::Nothing => Ok(Turn::Ended),
        }
    }
}

/// The report of a fault, with the remedy that users of the library have.
fn report_of(fault: &Fault) -> String {
    let report = fault.to_string();
    match fault.kind {
        FaultKind::Livelock { .. } => report
            .replace("raise the device's livelock limit", "EPOXIDE_VGPU_STEPS sets the limit, 0 lifts it"),
        _ => report,
    }
}

/// The code that a fault leaves in its context.
fn fault_code(fault: &Fault) -> CUresult {
    match &fault.kind {
        FaultKind::OutOfBounds { .. } | FaultKind::OutOfWindow { .. } | FaultKind::Multicast { .. } => {
            ILLEGAL_ADDRESS
        }
        FaultKind::Misaligned { .. } => MISALIGNED_ADDRESS,
        // A call that traps is one of `__assertfail`.
        FaultKind::Trap if fault.at.ptx_text.starts_with("call") => ASSERT,
        FaultKind::Deadlock(_) | FaultKind::Livelock { .. } => LAUNCH_TIMEOUT,
        FaultKind::Unsupported(_)
        | FaultKind::BadBarrier { .. }
        | FaultKind::AsyncCopy { .. }
        | FaultKind::BulkCopy { .. } => ILLEGAL_INSTRUCTION,
        _ => LAUNCH_FAILED,
    }
}

/// The code of a launch that is not possible.
pub(crate) fn launch_code(error: &LaunchError) -> CUresult {
    match error {
        LaunchError::Memory(error) => memory_code(error.clone()),
        LaunchError::Cluster { .. } => INVALID_CLUSTER_SIZE,
        LaunchError::TooManyThreads { max, .. } if *max < 1024 => LAUNCH_OUT_OF_RESOURCES,
        LaunchError::TooLargeToCheck { .. } => LAUNCH_FAILED,
        _ => INVALID_VALUE,
    }
}
