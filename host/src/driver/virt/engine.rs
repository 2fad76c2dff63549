//! The engine of a virtual GPU: takes work from the queues of one device and runs it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use epoxide_vgpu::stream::{Launch, Transfer};
use epoxide_vgpu::{Clock, Grid, Past, Progress, Timeline};

use super::state::{GpuCore, State};
use super::work::Enqueued;
use crate::virtual_time::{Poller, VirtualTime};

/// Warp instructions that a grid runs before the next one has its turn.
const SLICE: u64 = 64 * 1024;
/// Warp instructions per warp within which a grid that only spins is found to do so: every warp has
/// had a turn.
const PROBE_PER_WARP: u64 = 256;
/// Most turns of a grid that only spins until its warps have read the clock. Each poll in vain ends a
/// warp's turn. A wait for the counts of eight ranks polls eight words in each of 64 rounds and then
/// reads the clock, which takes 512 turns. The limit is twice as many.
const CLOCK_PROBES: u32 = 1024;
/// How often the engine gives its time slice away before it sleeps, when all grids spin.
const YIELDS: u32 = 4;
/// Longest sleep of the engine when all grids spin: another thread or process must store the polled
/// words.
const LONGEST_NAP: Duration = Duration::from_micros(500);

/// Work that has begun.
struct Job {
    queue: u64,
    /// How many jobs of this device began before it.
    number: u64,
    work: Work,
    /// The job only spun in its last turn, and nothing has happened since.
    spinning: bool,
    /// The job only spun in its last turn. The next turn must be long enough to detect spinning
    /// again, or it would count as progress.
    probe: bool,
    /// In check mode: its stream, and the causal past before it; once it is done, the past for
    /// later work.
    order: Option<(Timeline, Past)>,
}

enum Work {
    /// Not a grid yet.
    Launch(Box<Launch>, Option<u64>),
    /// A grid that runs, with its number of warps.
    Grid(Box<Grid>, u64),
    Transfer(Transfer),
}

impl Work {
    /// Runs at most `slice` warp instructions. The error is the device's fault.
    fn turn(
        &mut self,
        shared: &GpuCore,
        slice: u64,
        order: &mut Option<(Timeline, Past)>,
    ) -> Result<OpProgress, String> {
        match self {
            Work::Launch(launch, seed) => {
                let grid = launch
                    .grid(&shared.memory, &shared.config, *seed, order.as_ref())
                    .map_err(|error| format!("launch of {}: {error}", launch.kernel.name()))?;
                *self = Work::Grid(Box::new(grid), launch.warps());
                self.turn(shared, slice, order)
            }
            Work::Grid(grid, _) => {
                let left = shared.stop.as_ref().map_or(u64::MAX, |stop| stop.left());
                if left == 0 {
                    // The clock of the ranks does not wait for its warps to read it.
                    grid.expect_no_more_readings(shared.config.clock.now_ns());
                    return Ok(OpProgress::Spinning);
                }
                let before = grid.stats().warp_instructions;
                let mut progress = grid.step(slice.min(left));
                // Warps read the clock once in many polls.
                let mut probes = 0;
                while matches!(progress, Ok(Progress::Spinning)) {
                    // One reading for both: another rank may move the clock at any moment.
                    let now_ns = shared.config.clock.now_ns();
                    if grid.has_read_the_clock(now_ns) {
                        break;
                    }
                    if probes == CLOCK_PROBES {
                        grid.expect_no_more_readings(now_ns);
                        break;
                    }
                    probes += 1;
                    progress = grid.step(slice);
                }
                if let Some(stop) = &shared.stop {
                    stop.executed(grid.stats().warp_instructions - before);
                }
                match progress.map_err(|fault| fault.to_string())? {
                    Progress::Done => {
                        if let Some((_, past)) = order {
                            *past = grid.past();
                        }
                        Ok(OpProgress::Done(grid.schedule_digest()))
                    }
                    Progress::Running => Ok(OpProgress::Running),
                    Progress::Spinning => Ok(OpProgress::Spinning),
                }
            }
            Work::Transfer(transfer) => {
                let run = || transfer.run(&shared.memory);
                let done = match (&shared.checker, order) {
                    (Some(checker), Some((timeline, past))) => checker.act(*timeline, past, run),
                    _ => run(),
                };
                done.map_err(|error| format!("copy or fill: {error}"))?;
                Ok(OpProgress::Done(0))
            }
        }
    }
}

/// How a turn of a job ended.
pub(super) enum OpProgress {
    Running,
    Spinning,
    /// Complete, with the digest of its schedule.
    Done(u64),
    /// The device is unusable from now on.
    Fault,
}

/// The engine of one device.
pub(super) struct Engine {
    shared: Arc<GpuCore>,
    jobs: Vec<Job>,
}

impl Engine {
    pub(super) fn new(shared: Arc<GpuCore>) -> Engine {
        Engine { shared, jobs: Vec::new() }
    }

    /// True for the engine of this device.
    pub(super) fn is_of(&self, shared: &Arc<GpuCore>) -> bool {
        Arc::ptr_eq(&self.shared, shared)
    }

    /// True when no work has begun.
    pub(super) fn is_idle(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Jobs that did not merely spin in their last turn.
    pub(super) fn ready(&self) -> impl Iterator<Item = usize> {
        self.jobs.iter().enumerate().filter(|(_, job)| !job.spinning).map(|(index, _)| index)
    }

    /// Has every job tried again: something may have changed that it waits for.
    pub(super) fn clear_spinning(&mut self) {
        self.jobs.iter_mut().for_each(|job| job.spinning = false);
    }

    /// The turn that a job needs at the least, in warp instructions.
    pub(super) fn least_slice(&self, index: usize) -> u64 {
        match &self.jobs[index] {
            Job { work: Work::Grid(_, warps), probe: true, .. } => 1024 + PROBE_PER_WARP * warps,
            _ => 1,
        }
    }

    /// How many jobs of this device began before this one.
    pub(super) fn job_number(&self, index: usize) -> u64 {
        self.jobs[index].number
    }

    /// The waits of every warp of every grid, a grid per paragraph.
    pub(super) fn stuck_report(&self) -> String {
        const LINES_PER_GRID: usize = 40;
        let mut text = String::new();
        for job in &self.jobs {
            let Work::Grid(grid, _) = &job.work else { continue };
            let report = grid.stuck_report().to_string();
            text.push_str(&format!("\nvirtual GPU {}: ", self.shared.info.ordinal));
            let mut lines = report.lines();
            lines.by_ref().take(LINES_PER_GRID).for_each(|line| text.extend([line, "\n"]));
            match lines.count() {
                0 => {}
                more => text.push_str(&format!("  and {more} lines more\n")),
            }
        }
        text
    }

    /// Passes marks and begins the work at the front of the queues. True when anything happened.
    pub(super) fn collect(&mut self) -> bool {
        let shared = self.shared.clone();
        let mut state = shared.lock();
        self.collect_locked(&mut state)
    }

    fn collect_locked(&mut self, state: &mut State) -> bool {
        if state.is_unusable() {
            // Running jobs are dropped like queued ones, and only then the memory that they used.
            self.jobs.clear();
            drop(state.abandon());
            return false;
        }
        let jobs_before = self.jobs.len();
        let mut any_passed = false;
        // Events measure how long the work takes.
        let now_ns = match &self.shared.config.clock {
            Clock::Stepped(_) => Clock::Real.now_ns(),
            clock => clock.now_ns(),
        };
        loop {
            let mut passed = false;
            for (id, queue) in &mut state.queues {
                let work = match queue.next_work(now_ns, &mut passed) {
                    Some(Enqueued::Launch(launch, seed)) => Work::Launch(launch, seed),
                    Some(Enqueued::Transfer(transfer)) => Work::Transfer(transfer),
                    None => continue,
                };
                let order = self.shared.checker.as_ref().map(|checker| {
                    let timeline = *queue.timeline.get_or_insert_with(|| checker.timeline());
                    (timeline, queue.past.clone())
                });
                let (number, spinning, probe) = (state.jobs, false, false);
                self.jobs.push(Job { queue: *id, number, work, spinning, probe, order });
                state.jobs += 1;
            }
            if !passed {
                break;
            }
            // A passed mark may unblock a queue that is earlier in the order.
            any_passed = true;
        }
        state.queues.retain(|_, queue| !(queue.closed && queue.is_idle()));
        drop(state.take_released());
        if any_passed {
            self.shared.done.notify_all();
        }
        any_passed || self.jobs.len() > jobs_before
    }

    /// Gives a job a turn of at most `slice` warp instructions, and files the result.
    pub(super) fn step(&mut self, index: usize, slice: u64) -> OpProgress {
        let job = &mut self.jobs[index];
        let outcome = match job.work.turn(&self.shared, slice, &mut job.order) {
            Ok(outcome) => outcome,
            Err(fault) => {
                self.jobs.clear();
                self.shared.fail(&fault);
                return OpProgress::Fault;
            }
        };
        let spinning = matches!(outcome, OpProgress::Spinning);
        (job.spinning, job.probe) = (spinning, spinning);
        if let OpProgress::Done(_) = outcome {
            let job = self.jobs.remove(index);
            let mut state = self.shared.lock();
            if let Some(queue) = state.queues.get_mut(&job.queue) {
                queue.finish_work(job.order.as_ref().map(|(_, past)| past));
            }
            let released = state.take_released();
            drop(state);
            drop(released);
            self.shared.done.notify_all();
        }
        outcome
    }

    /// The engine's thread: runs until the device is dropped. A panic in here becomes the device's
    /// fault.
    pub(super) fn run_thread(mut self, time: Option<&VirtualTime>) {
        let shared = self.shared.clone();
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.run(&Poller::new(time)))) {
            let text = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("no message");
            shared.fail(&format!("the engine has panicked, please report it: {text}"));
        }
    }

    fn run(&mut self, poller: &Poller) {
        // Rounds in a row in which all grids only span.
        let mut spins = 0;
        while self.await_work(&mut spins, poller) {
            let mut progress = false;
            let mut index = 0;
            while index < self.jobs.len() {
                match self.step(index, SLICE.max(self.least_slice(index))) {
                    OpProgress::Spinning => index += 1,
                    OpProgress::Running => {
                        progress = true;
                        index += 1;
                    }
                    // The job was removed: another one has its index.
                    OpProgress::Done(_) | OpProgress::Fault => progress = true,
                }
            }
            if progress {
                spins = 0;
                poller.acts();
            } else {
                spins += 1;
                poller.found_nothing();
            }
            if poller.is_stuck() {
                let report = self.stuck_report();
                self.shared.fail(&format!(
                    "kernels of every rank have only waited for an hour of their clock, and no thread has done anything; a kernel \
                     waits for something that no other one, nor the host, will do{report}"
                ));
            }
        }
    }

    /// Returns when there are jobs to run; false when the device is being dropped.
    fn await_work(&mut self, spins: &mut u32, poller: &Poller) -> bool {
        let shared = self.shared.clone();
        let mut state = shared.lock();
        loop {
            if state.shutdown {
                return false;
            }
            let changed = self.collect_locked(&mut state);
            if changed || self.jobs.is_empty() {
                poller.acts();
            }
            if self.jobs.is_empty() {
                state = shared.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            if changed || *spins == 0 {
                *spins = 0;
            } else if *spins <= YIELDS {
                drop(state);
                std::thread::yield_now();
            } else {
                let nap = LONGEST_NAP.min(Duration::from_micros(1 << (*spins - YIELDS).min(10)));
                // New work ends the nap early.
                let woken = shared.work.wait_timeout(state, nap).unwrap_or_else(PoisonError::into_inner);
                state = woken.0;
                if self.collect_locked(&mut state) {
                    poller.acts();
                }
            }
            return true;
        }
    }
}
