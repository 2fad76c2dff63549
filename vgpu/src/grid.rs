//! A launched kernel: blocks, their warps, and the scheduler that lets the warps take turns.

mod cluster;
mod stepped;

use std::collections::{BTreeSet, HashSet, VecDeque};

use crate::check::block::BlockCheck;
use crate::check::clock::{self, MAX_BLOCKS, MAX_GRIDS};
use crate::check::hooks::{CheckHooks, Hooks};
use crate::check::report::waits_for_store;
use crate::check::world::World;
use crate::check::{CausalPast, Checker, Past, Report, Reports, Timeline};
use crate::coverage;
use crate::device::{Clock, DeviceConfig, GridConfig, Schedule};
use crate::exec::access::{SHARED_TAG, TAG};
use crate::exec::bulk_queue::{BulkQueue, Landed};
use crate::exec::cluster::{RANK_SHIFT, map_shared, offset_of, rank_of};
use crate::exec::copies::CopyQueue;
use crate::exec::polls::PolledWord;
use crate::exec::state::{SHARED_BASE, SharedMemory};
use crate::exec::{Activity, Barrier, BlockState, Env, Exec, Group, GroupState, Slice, Status, Stop, Warp};
use crate::fault::{
    Fault, FaultKind, InstructionPlace, Launch, LaunchError, OtherWord, StuckReport, StuckWarp, Trace,
    TraceStep, WaitingFor, address_of,
};
use crate::float_mode::IeeeMode;
use crate::ir::{BARRIERS, Fence, File, Init, NAMED_BARRIERS, Op, Special, WgmmaOp};
use crate::kernel::Kernel;
use crate::memory::{Memory, Region};
use crate::registers::Regs;
use crate::seeds::{Rng, mix};
use std::sync::{Arc, MutexGuard};

use cluster::Clusters;
pub(crate) use stepped::Step;

/// Slices of a run among which preemptions are drawn.
const PREEMPTION_SPAN: u64 = 20_000;

/// Warp instructions per turn with the round-robin scheduler: without checks, the same while blocks
/// begin and end, and with checks. Longer turns load the registers of warps into the nearest cache
/// less often. Blocks that begin together should run beside each other, however short they are.
const SLICE: u64 = 1024;
const FIRST_SLICE: u64 = 512;
const CHECKED_SLICE: u64 = 256;

/// Blocks begin or end if one did so as many warp instructions of the grid ago, or fewer.
const BEGINNING: u64 = 16 * 1024;

/// The least warp instructions of a warp that polls again: most polling loops are shorter, and a
/// part of a loop observes no change.
const LEAST_POLL: u64 = 64;

/// A warp at rest polls again after up to `2^MOST_REST_BITS` turns of all ready warps.
const MOST_REST_BITS: u32 = 4;

/// Slices for which the checker stays locked.
const LOCKED_SLICES: u32 = 32;

/// How slowly blocks follow those that are resident at first: one in up to `2^MAX_ADMISSION_BITS`
/// slices.
const MAX_ADMISSION_BITS: u64 = 10;

/// Bytes of the workspace of a cooperative grid: its length, and a barrier of all blocks, 32 bits
/// each (`cooperative_groups/details/driver_abi.h`). The kernel's environment registers 1 and 2 have
/// the high and the low half of its address.
const WORKSPACE_BYTES: u64 = 8;

/// Whether the blocks of a grid may rely on each other's presence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Residency {
    /// Blocks may run one behind the other.
    #[default]
    InTurn,
    /// A cooperative launch: all blocks are resident together, and may wait for each other by
    /// `cooperative_groups::this_grid().sync()`. In other launches that function traps, as on a
    /// GPU.
    Together,
}

/// Limits of sm_90.
const MAX_THREADS: u32 = 1024;
const MAX_BLOCK: [u32; 3] = [1024, 1024, 64];
const MAX_GRID: [u32; 3] = [i32::MAX as u32, 65535, 65535];

/// Bytes of a block's part of the window of shared memory, whatever a device is configured to have.
const MAX_SHARED_BYTES: u32 = (1 << RANK_SHIFT) - SHARED_BASE;

/// Result of [`Grid::step`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// All blocks have ended.
    Done,
    /// More work remains.
    Running,
    /// Every live warp only waits for memory that someone else must change, and nothing has changed
    /// since the call began. The caller should let other devices run, or yield its thread, before
    /// it calls again.
    Spinning,
}

/// Counters of a grid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Instructions executed, each counted once per warp.
    pub warp_instructions: u64,
    /// Turns given to warps.
    pub slices: u64,
    /// Blocks that have ended.
    pub blocks_done: u64,
}

#[derive(Debug)]
struct Block {
    state: BlockState,
    warps: Vec<Warp>,
    /// Warps that can run: in the ready queue, or at rest.
    ready: u32,
    sm: u32,
    /// In check mode.
    check: Option<Box<BlockCheck>>,
    /// Hash of its state when all of it was last found to wait for itself; 0 when it did not.
    stalled: u64,
    /// The priority of each warp, with [`Schedule::Preemptions`].
    priority: Vec<u64>,
    /// The epoch in which one of its warps last read memory that others outside may change.
    polled_memory: u64,
}

/// A warp that waits, left out of the ready queue.
#[derive(Clone, Copy, Debug)]
struct Rest {
    warp: WarpRef,
    /// The epoch in which it was idle. Until it ends, the warp would find nothing new.
    epoch: u64,
    /// The slice from which on it polls again.
    until: u64,
}

/// Warps that wait. In the ready queue they would take turns from the warps that work.
#[derive(Debug)]
struct Resting {
    /// Whether warps rest at all.
    on: bool,
    warps: Vec<Rest>,
    /// No warp is recalled before this slice; `u64::MAX` until the epoch ends.
    next: u64,
}

impl Resting {
    fn add(&mut self, rest: Rest) {
        self.warps.push(rest);
        self.next = self.next.min(rest.until);
    }

    /// An epoch has ended.
    fn epoch_ended(&mut self) {
        if self.next == u64::MAX {
            self.next = 0;
        }
    }

    /// Moves the warps back to the ready queue for which `f` holds.
    fn recall(&mut self, ready: &mut VecDeque<WarpRef>, f: impl Fn(&Rest) -> bool) {
        self.warps.retain(|rest| {
            let recalled = f(rest);
            if recalled {
                ready.push_back(rest.warp);
            }
            !recalled
        });
    }

    /// Moves the warps back that are to poll again at slice `now`.
    fn recall_due(&mut self, ready: &mut VecDeque<WarpRef>, epoch: u64, now: u64) {
        if now >= self.next {
            self.recall(ready, |rest| rest.epoch != epoch && rest.until <= now);
            let later = self.warps.iter().map(|rest| rest.until).filter(|until| *until > now);
            self.next = later.min().unwrap_or(u64::MAX);
        }
    }
}

/// The state of a grid's checker, which stays locked over several slices. The thread of another
/// device that waits for the lock has to be woken, which costs more than a slice.
struct Locked<'c> {
    checker: Option<&'c Checker>,
    world: Option<MutexGuard<'c, World>>,
    /// Slices since it was locked.
    slices: u32,
}

impl<'c> Locked<'c> {
    fn new(checker: Option<&'c Checker>) -> Self {
        Self { checker, world: None, slices: 0 }
    }

    /// The state; `None` without a checker.
    fn world(&mut self) -> Option<&mut World> {
        let checker = self.checker?;
        Some(self.world.get_or_insert_with(|| checker.world()))
    }

    fn unlock(&mut self) {
        (self.world, self.slices) = (None, 0);
    }

    /// A slice has ended: unlocks after every [`LOCKED_SLICES`] slices.
    fn count_slice(&mut self) {
        self.slices += 1;
        if self.slices == LOCKED_SLICES {
            self.unlock();
        }
    }
}

/// A grid under check.
struct GridCheck {
    checker: Checker,
    /// Number of the grid. `start` and `end` are the causal pasts at its start and at its end.
    number: u32,
    start: CausalPast,
    end: CausalPast,
    /// The grid has no timeline, so the host acquires its end directly.
    host_acquires_end: bool,
    /// The kernel has fences that lend their order to relaxed accesses.
    has_fences: bool,
    strict_exits: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct WarpRef {
    block: u32,
    warp: u32,
}

/// A launched kernel. Runs only while [`step`](Self::step) is called.
pub struct Grid {
    env: Env,
    memory: Memory,
    generation: u64,
    config: GridConfig,
    sm_count: u32,
    /// The resident blocks. There are fewer at first than fit: on hardware, other grids may hold
    /// multiprocessors for a while.
    blocks: Vec<Block>,
    clusters: Clusters,
    /// How many fit: whole clusters.
    resident: u32,
    /// While more fit, one block is admitted in so many slices.
    admit_one_in: u64,
    next_block: u64,
    total_blocks: u64,
    live_blocks: u32,
    ready: VecDeque<WarpRef>,
    resting: Resting,
    rng: Rng,
    schedule: Schedule,
    /// Slices until the running warp loses its priority, latest first.
    preemptions: Vec<u64>,
    check: Option<GridCheck>,
    digest: u64,
    stats: Stats,
    /// Reports without check mode.
    collected: Reports,
    /// The device as faults name it.
    device: Option<u32>,
    livelock_limit: u64,
    /// Warp instructions when a block last began or ended, or all warps only waited.
    progress_at: u64,
    /// Counts changes that a warp may wait for, here or elsewhere: slices that changed something,
    /// copies that moved, and blocks that began or ended.
    changes: u64,
    /// Grows with every change, and once more where all warps wait. A warp whose `idle_epoch` is
    /// the present epoch has been idle since.
    epoch: u64,
    idle: usize,
    fault: Option<Fault>,
    globals: Option<Arc<Region>>,
    /// The workspace of a cooperative grid.
    workspace: Option<Region>,
    /// Initial registers that all warps share. A warp copies those of them that it may read before
    /// it writes them.
    registers: Option<Regs>,
    /// Blocks with copies under way.
    copying: Vec<u32>,
}

impl std::fmt::Debug for Grid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grid")
            .field("kernel", &self.env.kernel.name)
            .field("config", &self.config)
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}

impl Grid {
    /// Checks a launch and prepares it. `params` is the parameter block, with the layout of
    /// [`Kernel::params`].
    pub fn new(
        kernel: Arc<Kernel>,
        memory: Memory,
        dev: &DeviceConfig,
        cfg: GridConfig,
        params: &[u8],
    ) -> Result<Self, LaunchError> {
        Self::launch(Residency::InTurn, kernel, memory, dev, cfg, params, None)
    }

    /// Checks a launch as [`Grid::new`] does, without making a grid.
    ///
    /// # Errors
    /// Those of [`Grid::new`].
    pub fn check_launch(
        kernel: &Kernel,
        memory: &Memory,
        dev: &DeviceConfig,
        cfg: &GridConfig,
        params: &[u8],
    ) -> Result<(), LaunchError> {
        check_launch(kernel, dev, cfg, params)?;
        if let Some(g) = &kernel.globals {
            memory.module_globals(g)?;
        }
        if memory.checker().is_some() { allows_checks(kernel, cfg) } else { Ok(()) }
    }

    /// The same as work of a stream. In check mode, `timeline` is the stream, and the grid comes
    /// after the given [`Past`], not after the calling thread's past. [`Grid::past`] then gives the
    /// past for the work behind it.
    ///
    /// # Errors
    /// The launch is not allowed; also where blocks are to be resident together and do not all fit
    /// on the device.
    pub fn launch(
        residency: Residency,
        kernel: Arc<Kernel>,
        memory: Memory,
        dev: &DeviceConfig,
        cfg: GridConfig,
        params: &[u8],
        order: Option<(Timeline, &Past)>,
    ) -> Result<Self, LaunchError> {
        check_launch(&kernel, dev, &cfg, params)?;
        let threads = cfg.block.iter().product::<u32>();
        let shared = kernel.static_shared + cfg.dynamic_shared_bytes;
        let total_blocks: u64 = cfg.grid.iter().map(|&d| u64::from(d)).product();
        let clusters = Clusters::new(&kernel, &cfg)?;
        let resident = u64::from(clusters.resident(&kernel, dev, threads, shared)?);
        let workspace = match residency {
            Residency::InTurn => None,
            Residency::Together if total_blocks > resident => {
                let kernel = kernel.name.clone();
                return Err(LaunchError::NotResident { kernel, blocks: total_blocks, resident });
            }
            Residency::Together if kernel.reads_workspace => {
                Some(memory.alloc_zeroed(WORKSPACE_BYTES, "workspace of the grid")?)
            }
            Residency::Together => None,
        };
        let globals = match &kernel.globals {
            Some(g) => Some(memory.module_globals(g)?),
            None => None,
        };
        coverage::prepare(&kernel);
        let mut block = vec![0u128; params.len().div_ceil(16)];
        for (word, bytes) in block.iter_mut().zip(params.chunks(16)) {
            let mut b = [0; 16];
            b[..bytes.len()].copy_from_slice(bytes);
            *word = u128::from_ne_bytes(b);
        }
        let generation = memory.generation();
        let env = Env {
            table: memory.snapshot(),
            param_bytes: params.len() as u64,
            params: block,
            clock: dev.clock.clone(),
            poison: memory.poison(),
            output: dev.output.clone(),
            apart_one_in: match (memory.checker().map(|checker| checker.world().config.assume), dev.assume) {
                (Some(assume), _) | (None, assume) if assume.converged_warps => 0,
                (Some(_), _) => 4,
                (None, _) => 16,
            },
            executed: 0,
            kernel,
        };
        let resident = resident.min(total_blocks) as u32;
        let mut rng = Rng::new(dev.schedule_seed.unwrap_or(memory.poison()));
        let schedule = if dev.schedule_seed.is_some() { dev.schedule } else { Schedule::RoundRobin };
        let mut preemptions = vec![];
        if let Schedule::Preemptions(count) = schedule {
            preemptions = (0..count).map(|_| rng.below(PREEMPTION_SPAN)).collect();
            preemptions.sort_unstable_by(|a, b| b.cmp(a));
        }
        let check = match memory.checker() {
            Some(checker) => {
                allows_checks(&env.kernel, &cfg)?;
                let mut world = checker.world();
                let mut start = order.map_or_else(|| world.host_past(), |(_, past)| past.inner().clone());
                let shape = (cfg.grid, clusters.shape);
                let (on, kernel) = (order.map(|o| o.0), env.kernel.clone());
                let strict_exits = world.config.strict_exits;
                let number = world.begin_grid(&mut start, on, memory.id(), kernel, shape);
                if number >= MAX_GRIDS {
                    return Err(LaunchError::TooLargeToCheck {
                        kernel: env.kernel.name.clone(),
                        blocks: total_blocks,
                    });
                }
                drop(world);
                let orders = |fence: Fence| fence.releases().is_some() || fence.acquires().is_some();
                let has_fences =
                    env.kernel.code.iter().any(|i| matches!(i.op, Op::Fence(fence) if orders(fence)));
                let (end, host_acquires_end) = (start.clone(), order.is_none());
                let checker = checker.clone();
                Some(GridCheck { checker, number, start, end, host_acquires_end, has_fences, strict_exits })
            }
            None => None,
        };
        let livelock_limit = dev.instructions_allowed(check.is_some());
        // Half of all seeds start with every resident block, the rest with fewer.
        let alone = rng.below(2) == 0;
        let most = resident / clusters.size();
        let first = if alone { most } else { 1 + rng.below(most.into()) as u32 };
        let mut grid = Grid {
            env,
            memory,
            generation,
            config: cfg,
            sm_count: dev.sm_count.max(1),
            blocks: vec![],
            clusters,
            resident,
            admit_one_in: 1 << rng.below(MAX_ADMISSION_BITS + 1),
            next_block: 0,
            total_blocks,
            live_blocks: 0,
            ready: VecDeque::new(),
            // A schedule with priorities has given warps that wait the lowest.
            resting: Resting {
                on: !matches!(schedule, Schedule::Preemptions(_)),
                warps: vec![],
                next: u64::MAX,
            },
            rng,
            schedule,
            preemptions,
            check,
            digest: 0,
            stats: Stats::default(),
            collected: Reports::new(dev.collect),
            device: None,
            livelock_limit,
            progress_at: 0,
            changes: 0,
            epoch: 1,
            idle: 0,
            fault: None,
            globals,
            workspace,
            registers: None,
            copying: vec![],
        };
        (0..first).for_each(|_| grid.admit());
        Ok(grid)
    }

    /// The kernel that runs.
    #[must_use]
    pub fn kernel(&self) -> &Arc<Kernel> {
        &self.env.kernel
    }

    /// Counters so far.
    #[must_use]
    pub fn stats(&self) -> Stats {
        self.stats
    }

    /// The causal past at the end of the grid. Empty without checks.
    #[must_use]
    pub fn past(&self) -> Past {
        self.check.as_ref().map(|check| Past::of(check.end.clone())).unwrap_or_default()
    }

    /// Whether each lane that has read a [`Clock::Stepped`] before its wait, or in it, has read it
    /// at `now_ns`, its present value. Until then a deadline may have passed that no lane has
    /// observed.
    #[must_use]
    pub fn has_read_the_clock(&self, now_ns: u64) -> bool {
        let Clock::Stepped(_) = &self.env.clock else { return true };
        self.blocks.iter().flat_map(|block| &block.warps).all(|warp| warp.behind_the_clock(now_ns) == 0)
    }

    /// Assumes that lanes which have not read the clock at `now_ns` wait without a deadline.
    /// [`Grid::has_read_the_clock`] counts them again once they have read the clock. `now_ns` must
    /// be the argument of that call: all lanes would be late for a later value.
    pub fn expect_no_more_readings(&mut self, now_ns: u64) {
        for warp in self.blocks.iter_mut().flat_map(|block| &mut block.warps) {
            warp.clock_readers &= !warp.behind_the_clock(now_ns);
        }
    }

    /// Hash of the sequence of scheduling decisions (block, warp, length of slice). Two runs with
    /// the same digest took the same path.
    #[must_use]
    pub fn schedule_digest(&self) -> u64 {
        self.digest
    }

    /// Whether one more block fits.
    fn has_room(&self) -> bool {
        self.blocks.len() < self.resident as usize && self.next_block < self.total_blocks
    }

    /// Makes one cluster more resident, mostly one block.
    fn admit(&mut self) {
        let first = self.blocks.len() as u32;
        (0..self.clusters.size()).for_each(|_| self.add_slot());
        self.start_cluster(first);
    }

    fn add_slot(&mut self) {
        let slot = self.blocks.len() as u32;
        let warps = self.config.block.iter().product::<u32>().div_ceil(32);
        let registers = Regs::of_warps(warps as usize, self.env.kernel.slots);
        self.blocks.push(Block {
            state: BlockState {
                ctaid: [0; 3],
                shared: SharedMemory::default(),
                barriers: [Barrier::default(); BARRIERS],
                warps,
                exited_warps: 0,
                strict_exits: self.check.as_ref().is_some_and(|check| check.strict_exits),
                completed: 0,
                rank: 0,
                cluster: None,
                cluster_arrivals: 0,
                ended_warps: 0,
                waits_for_cluster: false,
                cluster_phases: 0,
                bulk: BulkQueue::default(),
                copies: CopyQueue::default(),
                landed: vec![],
                warpgroups: vec![],
                read_outside: false,
            },
            warps: registers.into_iter().map(Warp::new).collect(),
            ready: 0,
            sm: slot % self.sm_count,
            check: None,
            stalled: 0,
            polled_memory: 0,
            priority: vec![0; warps as usize],
        });
    }

    /// Puts the next block of the grid in `slot`. Blocks of a cluster follow each other.
    fn start_block(&mut self, slot: u32) {
        let (ctaid, rank) = self.clusters.block(self.next_block);
        let [gx, gy, _] = self.config.grid.map(u64::from);
        let [x, y, z] = ctaid.map(u64::from);
        let linear = x + gx * (y + gy * z);
        self.next_block += 1;
        self.live_blocks += 1;
        self.changes += 1;
        self.progress_at = self.stats.warp_instructions;
        let kernel = &self.env.kernel;
        let threads = self.config.block.iter().product::<u32>();
        let b = &mut self.blocks[slot as usize];
        b.state.ctaid = ctaid;
        b.state.shared.reset(kernel.static_shared + self.config.dynamic_shared_bytes, self.env.poison, rank);
        b.state.barriers = [Barrier::default(); BARRIERS];
        b.state.exited_warps = 0;
        b.state.completed = 0;
        b.state.start_in_cluster(rank);
        b.state.bulk.reset(b.state.warps * 32);
        b.state.copies.reset();
        b.state.landed.clear();
        b.state.warpgroups.clear();
        if !kernel.operands.products.is_empty() {
            b.state.warpgroups.resize_with(b.state.warps.div_ceil(4) as usize, Default::default);
        }
        b.stalled = 0;
        b.polled_memory = 0;
        b.check = self.check.as_ref().map(|check| {
            Box::new(BlockCheck::new(check.number, linear, threads, &check.start, check.has_fences))
        });
        b.priority.iter_mut().for_each(|p| *p = self.rng.next());
        b.ready = b.state.warps;
        let inputs = SpecialInputs {
            ctaid,
            clusters: self.clusters,
            rank,
            cfg: self.config,
            static_shared: kernel.static_shared,
            sm: b.sm,
            sm_count: self.sm_count,
            globals: self.globals.as_ref().map_or(0, |r| r.addr()),
            workspace: self.workspace.as_ref().map_or(0, Region::addr),
        };
        let regs = self.registers.get_or_insert_with(|| {
            let mut regs = poisoned_registers(kernel.slots, self.env.poison);
            kernel.inits.iter().for_each(|init| inputs.initialise(&mut regs, kernel, 0, init));
            regs
        });
        for (w, warp) in (0..).zip(&mut b.warps) {
            let lanes = (threads - w * 32).min(32);
            let live = if lanes == 32 { u32::MAX } else { (1 << lanes) - 1 };
            kernel.alive_at_start.iter().for_each(|&(file, slot)| warp.regs.copy(regs, file, slot));
            let several = self.clusters.size() > 1;
            let own = kernel.inits.iter().filter(|(_, _, init)| init.differs_by_warp(several));
            own.for_each(|init| inputs.initialise(&mut warp.regs, kernel, w, init));
            warp.local.clear();
            warp.local.resize(kernel.local_bytes as usize * 32 / 8, self.env.poison);
            warp.start(w, live);
            self.ready.push_back(WarpRef { block: slot, warp: w });
        }
    }

    /// Runs for about `max_warp_instructions`: a slice that has begun is finished. After a fault
    /// every further call returns the same fault.
    #[allow(clippy::result_large_err)] // Once per launch at most, and plain to match on.
    pub fn step(&mut self, max_warp_instructions: u64) -> Result<Progress, Fault> {
        if let Some(fault) = &self.fault {
            return Err(fault.clone());
        }
        let mode = IeeeMode::enter();
        let outcome = self.run(max_warp_instructions);
        drop(mode);
        if !matches!(outcome, Ok(Progress::Running | Progress::Spinning)) {
            coverage::note(&self.env.kernel);
        }
        self.fail_with(outcome)
    }

    /// Keeps a fault for later calls.
    #[allow(clippy::result_large_err)] // See `step`.
    fn fail_with<T>(&mut self, outcome: Result<T, Box<Fault>>) -> Result<T, Fault> {
        outcome.map_err(|fault| {
            self.fault = Some(*fault.clone());
            *fault
        })
    }

    fn run(&mut self, max: u64) -> Result<Progress, Box<Fault>> {
        let checker = self.checker();
        let mut locked = Locked::new(checker.as_ref());
        let (mut used, changes) = (0, self.changes);
        while used < max {
            if self.live_blocks == 0 {
                return Ok(Progress::Done);
            }
            if self.memory.generation() != self.generation {
                // Memory locks its table and then the checker.
                locked.unlock();
                self.refresh_table();
            }
            self.progress_copies(false)?;
            if self.idle >= self.ready.len() + self.resting.warps.len() {
                // All warps wait. They may wait for copies under way, or for blocks that are not
                // resident yet. A grid that fits is resident as a whole in the end, so its blocks
                // may wait for each other.
                let moved = self.progress_copies(true)?;
                self.new_epoch();
                if !moved {
                    if !self.has_room() {
                        if self.may_be_stalled()? {
                            continue;
                        }
                        self.progress_at = self.stats.warp_instructions;
                        // Others may wait for what this call has changed.
                        let waits = self.changes == changes;
                        return Ok(if waits { Progress::Spinning } else { Progress::Running });
                    }
                    // Several at a time, because all resident blocks must have begun to wait before
                    // the next ones start.
                    let most = (u64::from(self.resident) - self.blocks.len() as u64)
                        / u64::from(self.clusters.size());
                    for _ in 0..=self.rng.below(most) {
                        if self.has_room() {
                            self.admit();
                        }
                    }
                }
            } else if self.ready.is_empty() {
                // Some have not polled since the last change. Copies come first: warps wait for
                // those of their own blocks, and the others for these warps.
                if !self.progress_copies(true)? {
                    let epoch = self.epoch;
                    self.resting.recall(&mut self.ready, |rest| rest.epoch != epoch);
                }
                continue;
            } else if self.has_room() && self.rng.below(self.admit_one_in) == 0 {
                self.admit();
            }
            // All may be at rest still, and poll in the next turn.
            if self.ready.is_empty() {
                continue;
            }
            used += self.slice(&mut locked)?;
            locked.count_slice();
        }
        Ok(if self.live_blocks == 0 { Progress::Done } else { Progress::Running })
    }

    /// Grows with every slice and every copy that changes something.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    fn checker(&self) -> Option<Checker> {
        self.check.as_ref().map(|check| check.checker.clone())
    }

    /// Takes up allocations and frees since the last time.
    fn refresh_table(&mut self) {
        let generation = self.memory.generation();
        if generation != self.generation {
            self.generation = generation;
            self.env.table = self.memory.snapshot();
            self.blocks.iter_mut().for_each(|b| b.state.bulk.forget_regions());
            self.blocks.iter_mut().flat_map(|b| &mut b.warps).for_each(Warp::forget_regions);
        }
    }

    /// No warp of the grid can run: searches for clusters, mostly of one block, whose warps all
    /// wait at barriers, on mbarriers and for the other warps of a warpgroup. Only the cluster
    /// itself could complete these waits. A cluster that is found twice in the same state never
    /// will. True when a cluster was found for the first time.
    fn may_be_stalled(&mut self) -> Result<bool, Box<Fault>> {
        let mut first = false;
        let size = self.clusters.size() as usize;
        for slot in (0..self.blocks.len()).step_by(size) {
            let state = self.cluster_waits_for_itself(slot..slot + size);
            let before = std::mem::replace(&mut self.blocks[slot].stalled, state);
            first |= state != 0 && before == 0;
            if state != 0 && state == before {
                let waits = |warp: &Warp| {
                    let ready = warp.groups.iter().find(|g| g.state == GroupState::Ready)?;
                    self.waits_for_its_block(ready.pc)
                };
                let blocks = (slot as u32..).zip(&self.blocks[slot..slot + size]);
                let mut warps = blocks.flat_map(|(slot, b)| b.warps.iter().map(move |warp| (slot, warp)));
                let at = warps.find_map(|(block, warp)| waits(warp).map(|pc| (block, warp.index, pc)));
                let (block, warp, pc) = at.unwrap_or((slot as u32, 0, 0));
                return Err(self.deadlock(WarpRef { block, warp }, pc));
            }
        }
        Ok(first)
    }

    /// The instruction at which lanes that are idle at `pc` wait for the block itself: a
    /// `wgmma.wait_group` there, or the test of an mbarrier before.
    fn waits_for_its_block(&self, pc: u32) -> Option<u32> {
        let op = |pc: u32| self.env.kernel.code.get(pc as usize).map(|inst| &inst.op);
        if matches!(op(pc), Some(Op::Wgmma(WgmmaOp::Wait { .. }))) {
            return Some(pc);
        }
        pc.checked_sub(1).filter(|&before| matches!(op(before), Some(Op::Mbar { .. })))
    }

    /// A hash of the registers and places of a block whose warps all wait at a barrier or for a
    /// warpgroup, or have just tested an mbarrier. `None` for other blocks.
    fn waits_for_itself(&self, block: &Block) -> Option<u64> {
        if block.state.is_copying() || block.polled_memory + 1 == self.epoch {
            return None;
        }
        // A clock may end the wait as well.
        if block.warps.iter().any(Warp::waits_for_the_clock) {
            return None;
        }
        let groups = || block.warps.iter().flat_map(|warp| &warp.groups);
        if !groups().all(|g| g.state != GroupState::Ready || self.waits_for_its_block(g.pc).is_some()) {
            return None;
        }
        let mut hash = 1;
        for warp in &block.warps {
            warp.groups.iter().for_each(|g| hash = mix(hash ^ (u64::from(g.mask) << 32 | u64::from(g.pc))));
            warp.regs.r32.iter().flatten().for_each(|&v| hash = mix(hash ^ u64::from(v)));
            warp.regs.r64.iter().flatten().for_each(|&v| hash = mix(hash ^ v));
            warp.regs.pred.iter().for_each(|&v| hash = mix(hash ^ u64::from(v)));
        }
        Some(hash | 1)
    }

    fn new_epoch(&mut self) {
        self.epoch += 1;
        self.idle = 0;
        self.resting.epoch_ended();
    }

    /// Warp instructions of a turn with the round-robin scheduler.
    fn turn(&self) -> u64 {
        match &self.check {
            Some(_) => CHECKED_SLICE,
            None if self.stats.warp_instructions - self.progress_at < BEGINNING => FIRST_SLICE,
            None => SLICE,
        }
    }

    /// Picks a warp and runs it for one slice. The ready queue must not be empty.
    fn slice(&mut self, locked: &mut Locked<'_>) -> Result<u64, Box<Fault>> {
        self.resting.recall_due(&mut self.ready, self.epoch, self.stats.slices);
        let (index, budget) = match self.schedule {
            Schedule::RoundRobin => (0, self.turn()),
            // Mostly short slices, now and then a long one.
            Schedule::Random => {
                let index = self.rng.below(self.ready.len() as u64) as usize;
                let bits = self.rng.below(9);
                (index, 1 + self.rng.below(1 << bits))
            }
            Schedule::Preemptions(_) => (self.most_urgent(), 1 + self.rng.below(64)),
        };
        let Some(pick) =
            (if index == 0 { self.ready.pop_front() } else { self.ready.swap_remove_back(index) })
        else {
            return Ok(1);
        };
        let waits = self.blocks[pick.block as usize].warps[pick.warp as usize].waits.idle_slices > 0;
        let budget = if waits && self.resting.on { budget.max(LEAST_POLL) } else { budget };
        let slice = self.run_picked(pick, budget, locked)?;
        self.account(pick, slice, locked)?;
        Ok(slice.executed.max(1))
    }

    /// Runs a warp that was taken from the ready queue.
    fn run_picked(
        &mut self,
        pick: WarpRef,
        budget: u64,
        locked: &mut Locked<'_>,
    ) -> Result<Slice, Box<Fault>> {
        let ran = if self.check.is_none() {
            let block = &mut self.blocks[pick.block as usize];
            run_warp(&self.env, &mut block.state, &mut block.warps[pick.warp as usize], (), budget)
        } else {
            let (block, peers) = cluster::with_peers(&mut self.blocks, self.clusters, pick.block);
            let (state, warp) = (&mut block.state, &mut block.warps[pick.warp as usize]);
            match (&mut block.check, locked.world()) {
                (Some(block), Some(world)) => {
                    let watch = CheckHooks { world, block, peers, warp: pick.warp };
                    run_warp(&self.env, state, warp, watch, budget)
                }
                _ => run_warp(&self.env, state, warp, (), budget),
            }
        };
        ran.map_err(|(pc, stop)| self.fault_at(pick, pc, stop.lane, stop.kind))
    }

    /// Processes the outcome of a slice of a warp, and returns the warp to the ready queue if it
    /// can continue.
    #[inline(always)]
    fn account(&mut self, pick: WarpRef, slice: Slice, locked: &mut Locked<'_>) -> Result<(), Box<Fault>> {
        let block = &mut self.blocks[pick.block as usize];
        self.env.executed += slice.executed;
        self.env.clock.advance(slice.executed);
        self.stats.warp_instructions += slice.executed;
        self.stats.slices += 1;
        let pick_bits = u64::from(pick.block) << 32 | u64::from(pick.warp) << 16 | slice.executed & 0xffff;
        self.digest = mix(self.digest ^ pick_bits).wrapping_add(slice.executed);

        if block.state.read_outside {
            block.state.read_outside = false;
            block.polled_memory = self.epoch;
        }
        let waits = &mut block.warps[pick.warp as usize].waits;
        match slice.activity {
            Activity::Idle => {
                waits.idle_slices = waits.idle_slices.saturating_add(1);
                if waits.idle_epoch != self.epoch {
                    waits.idle_epoch = self.epoch;
                    self.idle += 1;
                }
                if self.resting.on {
                    // An idle warp is ready. It has changed nothing, so that nothing else follows.
                    let turns = 1 << (waits.idle_slices - 1).min(MOST_REST_BITS);
                    let until = self.stats.slices + turns * (self.ready.len() as u64 + 1);
                    self.resting.add(Rest { warp: pick, epoch: self.epoch, until });
                    return self.has_lived(pick);
                }
                // A warp that only waits gets the lowest priority.
                block.priority[pick.warp as usize] = 0;
            }
            Activity::Neutral => {}
            Activity::Progress => {
                waits.idle_slices = 0;
                self.changes += 1;
                self.new_epoch();
            }
        }
        self.move_on(pick, slice.status, locked)
    }

    /// Processes the changes of a slice.
    fn move_on(&mut self, pick: WarpRef, status: Status, locked: &mut Locked<'_>) -> Result<(), Box<Fault>> {
        let block = &mut self.blocks[pick.block as usize];
        match status {
            Status::Ready => self.ready.push_back(pick),
            Status::Blocked => block.ready -= 1,
            Status::Stuck => {
                let pc = block.warps[pick.warp as usize].groups.first().map_or(0, |g| g.pc);
                return Err(self.deadlock(pick, pc));
            }
            Status::Done => {
                block.ready -= 1;
                if let Err(kind) = block.state.warp_exited(pick.warp) {
                    return Err(self.barrier_fault(pick.block, kind));
                }
            }
        }
        if block.state.is_copying() && !self.copying.contains(&pick.block) {
            self.copying.push(pick.block);
        }
        self.wake(pick.block);
        let block = &mut self.blocks[pick.block as usize];
        if block.state.exited_warps == block.state.warps {
            self.retire(pick.block, locked)?;
        }
        self.wake_cluster(pick.block);
        if let Some(at) = self.waits_for_ever(pick) {
            let warps = &self.blocks[at.block as usize].warps;
            let pc = warps.iter().flat_map(|w| w.groups.first()).map(|g| g.pc).next().unwrap_or(0);
            return Err(self.deadlock(at, pc));
        }
        self.has_lived(pick)
    }

    /// A fault, of the warp that ran last, if the grid has executed too many instructions without
    /// progress.
    #[inline(always)]
    fn has_lived(&self, pick: WarpRef) -> Result<(), Box<Fault>> {
        let instructions = self.stats.warp_instructions - self.progress_at;
        if instructions > self.livelock_limit { Err(self.livelock(pick, instructions)) } else { Ok(()) }
    }

    /// The same fault of a grid that exchanges words with others for ever, at its first live warp.
    pub(crate) fn exchanges_for_ever(&self, instructions: u64) -> Fault {
        let is_live = |block: &Block| block.state.exited_warps != block.state.warps;
        let block = self.blocks.iter().position(is_live).unwrap_or(0);
        let live = |warp: &Warp| !warp.groups.is_empty();
        let warp = self.blocks[block].warps.iter().position(live).unwrap_or(0);
        *self.livelock(WarpRef { block: block as u32, warp: warp as u32 }, instructions)
    }

    #[cold]
    fn livelock(&self, pick: WarpRef, instructions: u64) -> Box<Fault> {
        let groups = &self.blocks[pick.block as usize].warps[pick.warp as usize].groups;
        let pc = groups.first().map_or(0, |g| g.pc);
        let kind = FaultKind::Livelock { instructions, report: self.stuck_report() };
        self.fault_at(pick, pc, None, kind)
    }

    /// The ready warp of the highest priority. At a preemption, the one before it loses its own.
    fn most_urgent(&mut self) -> usize {
        let urgent = |grid: &Self| {
            let of = |w: &WarpRef| grid.blocks[w.block as usize].priority[w.warp as usize];
            // Among equals, take the one that has waited longest: two warps that only wait must
            // both get to poll again.
            (0..grid.ready.len()).rev().max_by_key(|&i| of(&grid.ready[i])).unwrap_or(0)
        };
        let mut index = urgent(self);
        if self.preemptions.pop_if(|at| *at <= self.stats.slices).is_some() {
            let warp = self.ready[index];
            self.blocks[warp.block as usize].priority[warp.warp as usize] = 0;
            index = urgent(self);
        }
        index
    }

    /// Makes the warps of completed barriers ready.
    fn wake(&mut self, slot: u32) {
        let block = &mut self.blocks[slot as usize];
        let completed = std::mem::take(&mut block.state.completed);
        if completed == 0 {
            return;
        }
        if let Some(check) = &mut block.check {
            let own = if self.clusters.size() == 1 { BARRIERS } else { NAMED_BARRIERS };
            (0..own).filter(|id| completed >> id & 1 != 0).for_each(|id| check.complete(id));
        }
        for (w, warp) in block.warps.iter_mut().enumerate() {
            let was_ready = warp.groups.iter().any(|g| g.state == GroupState::Ready);
            let mut woken = false;
            for id in (0..BARRIERS as u32).filter(|id| completed & (1 << id) != 0) {
                let released = warp.release_barrier(id, block.state.barriers[id as usize].outcome);
                woken |= released != 0;
                if let Some(check) = &mut block.check {
                    check.pass(w as u32, released, id as usize);
                }
            }
            if woken && !was_ready {
                block.ready += 1;
                self.ready.push_back(WarpRef { block: slot, warp: w as u32 });
            }
        }
    }

    fn retire(&mut self, slot: u32, locked: &mut Locked<'_>) -> Result<(), Box<Fault>> {
        let block = &mut self.blocks[slot as usize];
        if let Err(mut late) = block.state.finish_bulk(&self.env.table) {
            if let (FaultKind::CopyOutlivesBlock { message }, Some(world)) = (&mut late.0, locked.world())
                && let (Some(check), Some((thread, group))) = (&block.check, block.state.store_without_wait())
            {
                let thread = clock::lane(check.key(thread / 32), (thread % 32) as usize);
                message.push_str(&waits_for_store(world, thread, group));
            }
            let fault = self.late_fault(slot, late);
            let FaultKind::CopyOutlivesBlock { .. } = fault.kind else { return Err(fault) };
            let (reports, setting) = match locked.world() {
                Some(world) => (&mut world.reports, "CheckConfig::collect"),
                None => (&mut self.collected, "DeviceConfig::collect"),
            };
            let limit = reports.limit;
            reports.note(fault).map_err(|mut fault| {
                if let FaultKind::CopyOutlivesBlock { message } = &mut fault.kind {
                    *message += &format!(
                        "\n  the run ends here, because {setting} is {limit}: a larger limit lets it continue"
                    );
                }
                fault
            })?;
            // The shared memory is still there.
            let state = &mut self.blocks[slot as usize].state;
            let done = state.progress(&self.env.table, None);
            done.map_err(|late| self.late_fault(slot, late))?;
        }
        let clustered = self.clusters.size() > 1;
        if clustered {
            self.note_landed(slot);
            self.leave_cluster(slot, locked)?;
        }
        self.live_blocks -= 1;
        self.stats.blocks_done += 1;
        self.changes += 1;
        self.progress_at = self.stats.warp_instructions;
        // The checks of a cluster's blocks live as long as the cluster.
        let block = &mut self.blocks[slot as usize];
        let end = match clustered {
            true => block.check.as_ref().map(|block| block.end()),
            false => block.check.take().map(|block| block.end()),
        };
        if let (Some(check), Some(end)) = (&mut self.check, end) {
            check.end.join(&end);
            if self.live_blocks == 0
                && self.next_block >= self.total_blocks
                && let Some(world) = locked.world()
            {
                world.end_grid(check.number, &mut check.end);
                if check.host_acquires_end {
                    world.host_acquires_past(&check.end);
                }
            }
        }
        let first = self.clusters.first(slot);
        let mut cluster = self.blocks[first as usize..].iter().take(self.clusters.size() as usize);
        if self.next_block < self.total_blocks && cluster.all(|b| b.state.exited_warps == b.state.warps) {
            self.start_cluster(first);
        }
        Ok(())
    }

    /// Moves copies on, or half of the time does not; see [`BlockState::progress`].
    #[inline(always)]
    fn progress_copies(&mut self, all: bool) -> Result<bool, Box<Fault>> {
        if self.copying.is_empty() || (!all && self.rng.below(2) == 0) {
            return Ok(false);
        }
        self.move_copies(all)
    }

    fn move_copies(&mut self, all: bool) -> Result<bool, Box<Fault>> {
        let mut moved = false;
        let blocks = &mut self.blocks;
        self.copying.retain(|&slot| blocks[slot as usize].state.is_copying());
        for at in 0..self.copying.len() {
            let slot = self.copying[at];
            let rng = if all { None } else { Some(&mut self.rng) };
            match self.blocks[slot as usize].state.progress(&self.env.table, rng) {
                Ok(m) => moved |= m,
                Err(late) => return Err(self.late_fault(slot, late)),
            }
            self.note_landed(slot);
        }
        if moved {
            self.changes += 1;
            self.new_epoch();
        }
        Ok(moved)
    }

    /// Reports the progress of a block's copies to the checks.
    fn note_landed(&mut self, slot: u32) {
        let landed = std::mem::take(&mut self.blocks[slot as usize].state.landed);
        let ends_wait = |landed: &Landed| !matches!(landed, Landed::Copy { .. });
        if !self.resting.warps.is_empty() && landed.iter().any(ends_wait) {
            // Its warps may wait for these copies.
            self.resting.recall(&mut self.ready, |rest| rest.warp.block == slot);
        }
        if self.check.is_none() || landed.is_empty() {
            return;
        }
        let (block, mut peers) = cluster::with_peers(&mut self.blocks, self.clusters, slot);
        if let Some(block) = &mut block.check {
            landed.iter().for_each(|landed| peers.landed(block, landed));
        }
    }

    fn late_fault(&self, block: u32, (kind, warp, pc): (FaultKind, u32, u32)) -> Box<Fault> {
        self.fault_at(WarpRef { block, warp }, pc, None, kind)
    }

    fn fault_at(&self, at: WarpRef, pc: u32, lane: Option<u32>, kind: FaultKind) -> Box<Fault> {
        let block = self.blocks[at.block as usize].state.ctaid;
        let kernel = self.env.kernel.name.clone();
        let traces = self.traces(at, pc, &kind);
        let check = self.blocks[at.block as usize].check.as_ref();
        let writers = |pc| {
            let own =
                check.zip(lane).map(|(check, lane)| (check, clock::lane(check.key(at.warp), lane as usize)));
            own.map(|(check, own)| check.shared_writers(own, pc)).unwrap_or_default()
        };
        let address = address_of(&self.env.kernel, pc, &kind, &writers);
        Box::new(Fault {
            device: self.device,
            kernel,
            block,
            warp: at.warp,
            lane,
            at: self.env.kernel.place_of(pc),
            kind,
            address,
            traces,
        })
    }

    /// Last steps of a warp before instruction `pc`; for a race also those of the other warp, if it
    /// is still resident.
    fn traces(&self, at: WarpRef, pc: u32, kind: &FaultKind) -> Vec<Trace> {
        let mut warps = vec![at];
        if let FaultKind::Race(race) = kind
            && race.other.launch == Launch::Same
            && let Some(warp) = race.other.warp
            && let Some(block) = self.blocks.iter().position(|b| b.state.ctaid == race.other.block)
            && (block as u32, warp) != (at.block, at.warp)
        {
            warps.push(WarpRef { block: block as u32, warp });
        }
        let trace = |at: WarpRef| {
            let block = &self.blocks[at.block as usize];
            let recent = block.warps.get(at.warp as usize)?.trace.before(pc);
            let steps = TraceStep::list(&self.env.kernel, recent);
            let trace = Trace { block: block.state.ctaid, warp: at.warp, steps };
            (!trace.steps.is_empty()).then_some(trace)
        };
        warps.into_iter().filter_map(trace).collect()
    }

    /// A warp ended before a barrier: the place of the fault is that of another warp that waits
    /// there.
    fn barrier_fault(&self, slot: u32, kind: FaultKind) -> Box<Fault> {
        let waits = |g: &&Group| match (g.state, &kind) {
            (GroupState::Barrier { id, .. }, FaultKind::BadBarrier { barrier, .. }) => id == *barrier,
            _ => false,
        };
        let waiting = self.blocks[slot as usize]
            .warps
            .iter()
            .find_map(|warp| warp.groups.iter().find(waits).map(|g| (warp.index, g.pc)));
        let (warp, pc) = waiting.unwrap_or_default();
        self.fault_at(WarpRef { block: slot, warp }, pc, None, kind)
    }

    fn deadlock(&self, at: WarpRef, pc: u32) -> Box<Fault> {
        self.fault_at(at, pc, None, FaultKind::Deadlock(self.stuck_report()))
    }

    /// Has faults name the device.
    pub(crate) fn on_device(self, device: Option<u32>) -> Self {
        Self { device, ..self }
    }

    /// The reports after which the grid continued without check mode ([`DeviceConfig::collect`]).
    #[must_use]
    pub fn collected(&self) -> &[Report] {
        self.collected.all()
    }

    /// The word or the mbarrier that lanes of a block wait for, with a name. Empty without one.
    fn place_of(&self, block: &Block, waiting: &WaitingFor) -> String {
        let at = match *waiting {
            WaitingFor::Mbarrier { offset, .. } => offset,
            WaitingFor::Memory { addr, .. } if addr & TAG == SHARED_TAG => addr & !TAG,
            // No global memory lies in the range of the shared windows.
            WaitingFor::Memory { addr, .. } if addr >> 32 == 0 => addr,
            WaitingFor::Memory { addr, .. } => return self.env.table.place_of(addr).unwrap_or_default(),
            _ => return String::new(),
        };
        let place = match self.env.kernel.shared_part(at) {
            part if part.is_empty() => format!("shared offset {:#x}", offset_of(at)),
            part => format!("'{part}' in shared memory"),
        };
        let remote = block.state.cluster.as_ref().filter(|_| block.state.is_remote(at));
        match remote.and_then(|cluster| cluster.ctaid(rank_of(at))) {
            Some(block) => format!("{place} of block {block:?}"),
            None => place,
        }
    }

    /// Every live group of lanes, and the event that it waits for.
    #[must_use]
    pub fn stuck_report(&self) -> StuckReport {
        let kernel = &self.env.kernel;
        let mut warps = vec![];
        for block in self.blocks.iter().filter(|b| b.state.exited_warps < b.state.warps) {
            for warp in &block.warps {
                for g in &warp.groups {
                    let mut words = vec![];
                    let waiting = match g.state {
                        GroupState::Ready => {
                            let (shared, code) = (&block.state.shared, &kernel.code);
                            words = warp.polled_words(code, g.mask, &self.env.table, shared);
                            let noted = warp.waiting.clone().unwrap_or(WaitingFor::Nothing);
                            match (noted, words.first()) {
                                // The note is that of the warp's last wait, maybe of other lanes.
                                (WaitingFor::Memory { addr, value }, Some(word)) if addr == word.addr => {
                                    WaitingFor::Memory { addr, value }
                                }
                                (_, Some(word)) => WaitingFor::Memory { addr: word.addr, value: word.value },
                                (noted, None) => noted,
                            }
                        }
                        GroupState::Lanes { mask } => {
                            let arrived =
                                warp.groups.iter().filter(|o| o.pc == g.pc).fold(0, |a, o| a | o.mask);
                            WaitingFor::Lanes { mask: mask & warp.live, arrived }
                        }
                        GroupState::Barrier { id, arrived: true, .. } => {
                            let b = self.barrier_of(block, id);
                            WaitingFor::Barrier { barrier: id, arrived: b.arrived, expected: b.expected }
                        }
                        // The rest of its own warp is missing.
                        GroupState::Barrier { .. } => WaitingFor::Lanes { mask: warp.live, arrived: g.mask },
                    };
                    let past = match (&waiting, &block.check) {
                        (WaitingFor::Mbarrier { offset, .. }, Some(check)) => {
                            check.mbarrier_past(offset_of(*offset))
                        }
                        _ => None,
                    };
                    let pcs = past.into_iter().flat_map(|(init, arrival)| [Some(init), arrival]).flatten();
                    let mbarrier = pcs.map(|pc| TraceStep::at(kernel, pc)).collect();
                    let place = |at: &WaitingFor| self.place_of(block, at);
                    let other = |word: &PolledWord| OtherWord {
                        lanes: word.lanes,
                        place: place(&WaitingFor::Memory { addr: word.addr, value: word.value }),
                        value: word.value,
                    };
                    warps.push(StuckWarp {
                        place: place(&waiting),
                        others: words.iter().skip(1).map(other).collect(),
                        block: block.state.ctaid,
                        warp: warp.index,
                        lanes: g.mask,
                        at: kernel.place_of(g.pc),
                        waiting,
                        mbarrier,
                    });
                }
            }
        }
        StuckReport { kernel: kernel.name.clone(), barriers: self.other_arrivals(&warps), warps }
    }

    /// The barriers of a part of a block at which groups of lanes wait, with the other instructions
    /// that arrive there.
    fn other_arrivals(&self, warps: &[StuckWarp]) -> Vec<(u32, Vec<InstructionPlace>)> {
        let number = |warp: &StuckWarp| match warp.waiting {
            WaitingFor::Barrier { barrier, .. } => Some(barrier),
            _ => None,
        };
        let waits: BTreeSet<u32> = warps.iter().filter_map(number).collect();
        let is_waiting = |place: &InstructionPlace| warps.iter().any(|warp| warp.at == *place);
        let others = |number: u32| {
            let places = self.env.kernel.arrivals_of_parts(number).filter(|place| !is_waiting(place));
            let mut known = HashSet::new();
            let is_new = |place: &InstructionPlace| {
                place.source.is_none() || known.insert((place.source.clone(), place.callers.clone()))
            };
            (number, places.filter(is_new).take(MOST_ARRIVALS).collect::<Vec<_>>())
        };
        waits.into_iter().map(others).filter(|(_, places)| !places.is_empty()).collect()
    }
}

/// Instructions that a report of a hang lists for a barrier at the most.
const MOST_ARRIVALS: usize = 6;

impl Kernel {
    /// Checks a launch on such a device without making a [`Grid`].
    ///
    /// # Errors
    /// The shape, the length of the parameter block, or the shared memory is not allowed.
    pub fn check_launch(
        &self,
        dev: &DeviceConfig,
        cfg: &GridConfig,
        params: &[u8],
    ) -> Result<(), LaunchError> {
        check_launch(self, dev, cfg, params)
    }
}

fn check_launch(
    kernel: &Kernel,
    dev: &DeviceConfig,
    cfg: &GridConfig,
    params: &[u8],
) -> Result<(), LaunchError> {
    let name = || kernel.name.clone();
    if params.len() != kernel.param_bytes {
        return Err(LaunchError::ParamBytes {
            kernel: name(),
            expected: kernel.param_bytes,
            actual: params.len(),
        });
    }
    for (what, value, max) in [("grid", cfg.grid, MAX_GRID), ("block", cfg.block, MAX_BLOCK)] {
        if value.iter().zip(max).any(|(&v, m)| v == 0 || v > m) {
            return Err(LaunchError::Dimension { kernel: name(), what, value, max });
        }
    }
    let threads = cfg.block.iter().map(|&d| u64::from(d)).product::<u64>();
    let max = kernel.max_threads.unwrap_or(MAX_THREADS).min(MAX_THREADS);
    if threads > u64::from(max) {
        return Err(LaunchError::TooManyThreads { kernel: name(), threads, max });
    }
    if let Some(required) = kernel.required_block.filter(|r| *r != cfg.block) {
        return Err(LaunchError::BlockShape { kernel: name(), required, block: cfg.block });
    }
    let total = u64::from(kernel.static_shared) + u64::from(cfg.dynamic_shared_bytes);
    if total > u64::from(dev.shared_bytes_per_block.min(MAX_SHARED_BYTES)) {
        return Err(LaunchError::SharedMemory {
            kernel: name(),
            static_bytes: kernel.static_shared,
            dynamic_bytes: cfg.dynamic_shared_bytes,
            max: dev.shared_bytes_per_block.min(MAX_SHARED_BYTES),
        });
    }
    Clusters::new(kernel, cfg)?.resident(kernel, dev, threads as u32, total as u32).map(drop)
}

/// Whether a launch can run in check mode.
fn allows_checks(kernel: &Kernel, cfg: &GridConfig) -> Result<(), LaunchError> {
    let blocks = cfg.grid.iter().map(|&d| u64::from(d)).product();
    match blocks > MAX_BLOCKS {
        true => Err(LaunchError::TooLargeToCheck { kernel: kernel.name.clone(), blocks }),
        false => Ok(()),
    }
}

/// Where dynamic shared memory starts in the shared window.
fn dynamic_shared_offset(kernel: &Kernel) -> u32 {
    // The lowering has rounded the static part up to the alignment of the dynamic part.
    SHARED_BASE + kernel.static_shared
}

fn poisoned_registers(slots: [u32; 3], poison: u64) -> Regs {
    let mut regs = Regs::of_warps(1, slots).remove(0);
    regs.r32.fill([poison as u32; 32]);
    regs.r64.fill([poison; 32]);
    regs.pred.fill(poison as u32);
    regs
}

/// Runs a warp for a slice; an error with the instruction where it stopped.
fn run_warp<W: Hooks>(
    env: &Env,
    block: &mut BlockState,
    warp: &mut Warp,
    watch: W,
    budget: u64,
) -> Result<Slice, (u32, Box<Stop>)> {
    let mut exec = Exec::new(env, block, warp, watch);
    exec.run(budget).map_err(|stop| (exec.pc, stop))
}

/// Inputs of a block's special registers.
struct SpecialInputs {
    ctaid: [u32; 3],
    clusters: Clusters,
    /// The block's number in its cluster.
    rank: u32,
    cfg: GridConfig,
    static_shared: u32,
    sm: u32,
    sm_count: u32,
    /// Where the module's variables are.
    globals: u64,
    workspace: u64,
}

impl SpecialInputs {
    /// Sets a register of a warp to its initial value.
    fn initialise(
        &self,
        regs: &mut Regs,
        kernel: &Kernel,
        warp: u32,
        &(file, reg, init): &(File, u32, Init),
    ) {
        let values = match init {
            Init::Bits(v) => [v; 32],
            Init::GlobalAddress(offset) => [self.globals.wrapping_add(offset); 32],
            Init::SharedAddress(offset) => [map_shared(offset, self.rank); 32],
            Init::DynamicShared(offset) => {
                let offset = offset.wrapping_add(dynamic_shared_offset(kernel).into());
                [map_shared(offset, self.rank); 32]
            }
            Init::Special(s) => std::array::from_fn(|lane| special(s, warp, lane as u32, self)),
        };
        let row = reg as usize;
        match file {
            File::R32 => regs.r32[row] = values.map(|v| v as u32),
            File::R64 => regs.r64[row] = values,
            File::Pred => regs.pred[row] = if values[0] != 0 { u32::MAX } else { 0 },
        }
    }
}

/// Value of a special register for one lane of a warp.
fn special(s: Special, warp: u32, lane: u32, inputs: &SpecialInputs) -> u64 {
    let SpecialInputs { ctaid, clusters, rank, cfg, static_shared, sm, sm_count, workspace, .. } = *inputs;
    let linear = warp * 32 + lane;
    let [bx, by, bz] = cfg.block;
    let v = match s {
        Special::Tid(0) => linear % bx,
        Special::Tid(1) => linear / bx % by,
        Special::Tid(_) => linear / bx / by % bz,
        Special::Ntid(d) => cfg.block[usize::from(d)],
        Special::Ctaid(d) => ctaid[usize::from(d)],
        Special::Nctaid(d) => cfg.grid[usize::from(d)],
        Special::LaneId => lane,
        Special::WarpId => warp,
        Special::NWarpId => (bx * by * bz).div_ceil(32),
        Special::SmId => sm,
        Special::NSmId => sm_count,
        Special::LaneMaskEq => 1 << lane,
        Special::LaneMaskLt => (1 << lane) - 1,
        Special::LaneMaskLe => (1 << lane) | ((1 << lane) - 1),
        Special::LaneMaskGt => !((1 << lane) | ((1 << lane) - 1)),
        Special::LaneMaskGe => !((1u32 << lane) - 1),
        Special::WorkspaceLow => workspace as u32,
        Special::WorkspaceHigh => (workspace >> 32) as u32,
        Special::DynamicSmemSize => cfg.dynamic_shared_bytes,
        Special::TotalSmemSize => static_shared + cfg.dynamic_shared_bytes,
        Special::ClusterId(d) => ctaid[usize::from(d)] / clusters.shape[usize::from(d)],
        Special::NClusterId(d) => cfg.grid[usize::from(d)] / clusters.shape[usize::from(d)],
        Special::ClusterCtaid(d) => ctaid[usize::from(d)] % clusters.shape[usize::from(d)],
        Special::ClusterNctaid(d) => clusters.shape[usize::from(d)],
        Special::ClusterRank => rank,
        Special::ClusterSize => clusters.size(),
        Special::ExplicitCluster => clusters.explicit.into(),
        // Grids are not numbered.
        Special::GridId | Special::Zero => 0,
    };
    u64::from(v)
}
