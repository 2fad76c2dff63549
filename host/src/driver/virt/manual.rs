//! Virtual GPUs that run on the threads of their users, in an order drawn from a seed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use epoxide_vgpu::Clock;

use super::engine::{Engine, OpProgress};
use super::state::{GOLDEN, GpuCore, mix};
use crate::error::{Error, Result};
use crate::lock::lock;

/// Longest turn of a grid, in warp instructions.
const LONGEST_SLICE: u64 = 1024;
/// How far the clock advances when all grids spin and the host does not wait for them, in
/// nanoseconds.
const SPIN_NS: u64 = 1_000;
/// The longest jump of the clock when all grids spin and the host waits, in nanoseconds.
const LONGEST_JUMP_NS: u64 = 10_000_000_000;
/// How long all grids may spin before the host stops waiting for them, in nanoseconds of the
/// virtual clock.
const STUCK_NS: u64 = 1_000 * 1_000_000_000;
/// How many warp instructions the host waits for while nothing gets done: minutes of interpreting.
const ENDLESS: u64 = 1 << 33;
/// How long a host thread sleeps before it polls again for work that another one enqueued.
const NAP: Duration = Duration::from_micros(100);

/// Result of [`ManualGpus::drive`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drive {
    /// Work ran; there may be more.
    Ran,
    /// All grids wait for something that none of them will do.
    Spinning,
    /// No work to run.
    Idle,
}

/// Several virtual GPUs that run only when driven, on the calling thread: in [`ManualGpus::drive`],
/// in [`Driver::make_progress`](crate::driver::device::Driver::make_progress) and in calls that
/// wait. The seed draws the grid whose turn it is, and the length of the turn; `%globaltimer` is a
/// virtual clock. So a single host thread that makes the same calls gets the same run each time,
/// down to the interleaving of warps. Clones are the same GPUs.
///
/// A call that waits while all grids only spin moves the clock forward in growing steps, so that
/// the kernels' own deadlines expire. The call fails with a report of every stuck warp in two
/// cases: grids still spin 1000 virtual seconds later, or kernels run and none ends. A call without
/// a result continues as if it had waited.
#[derive(Clone)]
pub struct ManualGpus {
    inner: Arc<Inner>,
}

struct Inner {
    seed: u64,
    clock_ns: Arc<AtomicU64>,
    patience: Duration,
    /// Counts enqueued ops.
    submissions: AtomicU64,
    run: Mutex<MachineState>,
}

struct MachineState {
    engines: Vec<Engine>,
    random: u64,
    digest: u64,
}

impl std::fmt::Debug for ManualGpus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ManualGpus").field("seed", &self.inner.seed).finish_non_exhaustive()
    }
}

impl ManualGpus {
    /// No devices yet, for a single host thread.
    pub fn new(seed: u64) -> ManualGpus {
        ManualGpus::with_patience(seed, Duration::ZERO)
    }

    /// The same for several host threads. A call that waits while all grids spin gives the other
    /// threads `patience` (real time) to enqueue work before it moves the virtual clock. Runs are
    /// then as repeatable as the threads are.
    pub fn with_patience(seed: u64, patience: Duration) -> ManualGpus {
        let run = MachineState { engines: Vec::new(), random: mix(seed, 0), digest: 0 };
        ManualGpus {
            inner: Arc::new(Inner {
                seed,
                clock_ns: Arc::default(),
                patience,
                submissions: AtomicU64::new(0),
                run: Mutex::new(run),
            }),
        }
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.inner.seed
    }

    /// Virtual time in nanoseconds.
    pub fn now_ns(&self) -> u64 {
        self.inner.clock_ns.load(Ordering::Relaxed)
    }

    /// Advances the virtual clock while kernels run, as time passes on a GPU whose blocks do not
    /// progress alike.
    pub fn advance(&self, time: Duration) {
        self.inner.clock_ns.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Identifies the order in which everything has run so far: equal digests, equal runs.
    pub fn schedule_digest(&self) -> u64 {
        lock(&self.inner.run).digest
    }

    /// Runs at most about `budget` warp instructions, over all devices.
    pub fn drive(&self, budget: u64) -> Drive {
        let mut run = lock(&self.inner.run);
        // The host may have stored a word that a grid polls.
        run.clear_spinning();
        let mut left = budget;
        let mut ran = false;
        while left > 0 {
            match run.turn() {
                Turn::Done => {
                    ran = true;
                    left = left.saturating_sub(1);
                }
                Turn::Progress(slice) => {
                    ran = true;
                    left = left.saturating_sub(slice);
                }
                Turn::Spun(slice) => left = left.saturating_sub(slice),
                Turn::AllSpinning => {
                    self.inner.clock_ns.fetch_add(SPIN_NS, Ordering::Relaxed);
                    return if ran { Drive::Ran } else { Drive::Spinning };
                }
                Turn::Idle => return if ran { Drive::Ran } else { Drive::Idle },
            }
        }
        if ran { Drive::Ran } else { Drive::Spinning }
    }

    /// Runs until `done`; `call` names the waiting call in errors.
    pub(super) fn run_until(&self, call: &'static str, done: impl Fn() -> Result<bool>) -> Result<()> {
        let (mut stuck_ns, mut jump_ns) = (0, SPIN_NS);
        let mut instructions = 0;
        let mut quiet: Option<(Instant, u64)> = None;
        loop {
            if done()? {
                return Ok(());
            }
            let mut run = lock(&self.inner.run);
            let idle = match run.turn() {
                Turn::Done => {
                    (stuck_ns, jump_ns, quiet, instructions) = (0, SPIN_NS, None, 0);
                    continue;
                }
                Turn::Progress(slice) => {
                    (stuck_ns, jump_ns, quiet) = (0, SPIN_NS, None);
                    instructions += slice;
                    if instructions > ENDLESS {
                        let what =
                            format!("kernels have run for {instructions} warp instructions without an end");
                        return Err(self.give_up(&run, call, &what));
                    }
                    continue;
                }
                Turn::Spun(_) => continue,
                Turn::AllSpinning => false,
                Turn::Idle => true,
            };
            // Another thread may have run the missing work since the last check.
            if done()? {
                return Ok(());
            }
            let submissions = self.inner.submissions.load(Ordering::Relaxed);
            let (since, seen) = *quiet.get_or_insert_with(|| (Instant::now(), submissions));
            if seen != submissions {
                quiet = None;
            } else if since.elapsed() < self.inner.patience {
                drop(run);
                std::thread::sleep(NAP);
                lock(&self.inner.run).clear_spinning();
                continue;
            } else if idle {
                return Err(Error::VirtualFault(format!(
                    "{call} waits for work that nothing on this machine can start; was it enqueued?"
                )));
            } else if stuck_ns >= STUCK_NS {
                let seconds = stuck_ns / 1_000_000_000;
                let what = format!("all kernels have been spinning for {seconds} virtual seconds");
                return Err(self.give_up(&run, call, &what));
            } else {
                self.inner.clock_ns.fetch_add(jump_ns, Ordering::Relaxed);
                stuck_ns += jump_ns;
                jump_ns = (jump_ns * 2).min(LONGEST_JUMP_NS);
            }
            run.clear_spinning();
        }
    }

    fn give_up(&self, run: &MachineState, call: &'static str, what: &str) -> Error {
        let reports: String = run.engines.iter().map(Engine::stuck_report).collect();
        Error::VirtualFault(format!(
            "{call} gave up: {what} (seed {}); a kernel waits for something that no other one, nor this thread, will \
             do{reports}",
            self.inner.seed
        ))
    }

    /// The clock that the machine's devices share.
    pub(super) fn clock(&self) -> Clock {
        Clock::Virtual(self.inner.clock_ns.clone())
    }

    /// Records that work was enqueued.
    pub(super) fn submitted(&self) {
        self.inner.submissions.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn add(&self, shared: Arc<GpuCore>) {
        lock(&self.inner.run).engines.push(Engine::new(shared));
    }

    pub(super) fn remove(&self, shared: &Arc<GpuCore>) {
        lock(&self.inner.run).engines.retain(|engine| !engine.is_of(shared));
    }
}

/// How a turn ended; where it may have been long, with its longest length in warp instructions.
enum Turn {
    /// A job ended, a mark was passed, or new work began.
    Done,
    Progress(u64),
    /// A grid tried and only span.
    Spun(u64),
    /// Every grid only span since anything last happened.
    AllSpinning,
    Idle,
}

impl MachineState {
    /// Gives one job of one device a turn.
    fn turn(&mut self) -> Turn {
        // Each engine must collect, even if an earlier one did.
        let collected = self.engines.iter_mut().fold(false, |any, engine| engine.collect() | any);
        if collected {
            self.clear_spinning();
        }
        let ready: Vec<(usize, usize)> = self
            .engines
            .iter()
            .enumerate()
            .flat_map(|(device, engine)| engine.ready().map(move |job| (device, job)))
            .collect();
        if ready.is_empty() {
            return match (collected, self.engines.iter().all(Engine::is_idle)) {
                (true, _) => Turn::Done,
                (false, true) => Turn::Idle,
                (false, false) => Turn::AllSpinning,
            };
        }
        let (device, job) = ready[(self.draw() % ready.len() as u64) as usize];
        let slice = 1 + self.draw() % LONGEST_SLICE;
        let engine = &mut self.engines[device];
        let (slice, number) = (slice.max(engine.least_slice(job)), engine.job_number(job));
        let outcome = engine.step(job, slice);
        let code = match &outcome {
            OpProgress::Running => 1,
            OpProgress::Spinning => 2,
            OpProgress::Done(digest) => mix(3, *digest),
            OpProgress::Fault => 4,
        };
        for word in [device as u64, number, slice, code] {
            self.digest = mix(self.digest, word);
        }
        let turn = match outcome {
            OpProgress::Spinning => return Turn::Spun(slice),
            OpProgress::Running => Turn::Progress(slice),
            OpProgress::Done(_) | OpProgress::Fault => Turn::Done,
        };
        self.clear_spinning();
        turn
    }

    fn clear_spinning(&mut self) {
        self.engines.iter_mut().for_each(Engine::clear_spinning);
    }

    fn draw(&mut self) -> u64 {
        self.random = self.random.wrapping_add(GOLDEN);
        mix(self.random, 0)
    }
}
