//! The state of warps and blocks, and of the running warp.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::again::Again;
use super::bulk_queue::{BulkQueue, Landed};
use super::cluster::{ClusterMemory, RANK_SHIFT};
use super::converged::Converged;
use super::copies::CopyQueue;
use super::lanes;
use super::polls::Polls;
use super::wgmma::{Products, Warpgroup};
use crate::device::{Clock, Output};
use crate::fault::{FaultKind, WaitingFor};
use crate::ir::{Access, BARRIERS, CLUSTER_BARRIER};
use crate::kernel::Kernel;
use crate::memory::{Found, Table};
use crate::registers::Regs;

/// State of a group of lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GroupState {
    Ready,
    /// At a warp-wide instruction, waiting for lanes of its member mask.
    Lanes {
        mask: u32,
    },
    /// At a block barrier. `arrived`: the whole warp has been counted.
    Barrier {
        id: u32,
        count: Option<u32>,
        arrive_only: bool,
        arrived: bool,
    },
}

/// Lanes that run together. Its length is a power of two, so that finding one takes no product. The
/// mask and the program counter are apart: otherwise both are loaded from an [`Exec`] as a whole,
/// right after the counter was stored.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(crate) struct Group {
    pub(crate) mask: u32,
    pub(crate) state: GroupState,
    pub(crate) pc: u32,
    /// Has yielded; runs again when the others have had their turn.
    pub(super) deferred: bool,
    /// Joins no other group before a warp-wide instruction or a block barrier makes it.
    pub(super) apart: bool,
    /// When its last read of memory returned the same value as before ([`Exec::now`], at least 1),
    /// if the warp has changed nothing since; otherwise 0.
    pub(super) spun: u32,
}

impl Group {
    /// Stands at a block barrier to which other lanes of the warp have yet to come.
    pub(super) fn waits_for_its_warp(&self) -> bool {
        matches!(self.state, GroupState::Barrier { arrived: false, .. })
    }

    /// The same at this barrier.
    pub(super) fn waits_at(&self, barrier: u32) -> bool {
        matches!(self.state, GroupState::Barrier { id, arrived: false, .. } if id == barrier)
    }
}

/// Instructions that are kept of a warp's past.
const TRACED: usize = 32;

/// An instruction, and the lanes that executed it.
pub(crate) type RecentStep = (u32, u32);

/// The last instructions of a warp that concern others, each once for the same lanes, latest last:
/// for reports. Empty without checks.
#[derive(Debug, Default)]
pub(crate) struct RecentSteps {
    pub(crate) steps: VecDeque<RecentStep>,
}

impl RecentSteps {
    pub(super) fn add(&mut self, new: RecentStep) {
        if self.steps.back() == Some(&new) {
            return;
        }
        match self.steps.iter().rposition(|step| *step == new) {
            Some(at) => drop(self.steps.remove(at)),
            None if self.steps.len() == TRACED => drop(self.steps.pop_front()),
            // All at once: a list that grows from nothing would be allocated four times.
            None if self.steps.is_empty() => self.steps.reserve(TRACED),
            None => {}
        }
        self.steps.push_back(new);
    }

    /// The steps other than `pc`, latest first.
    pub(crate) fn before(&self, pc: u32) -> impl Iterator<Item = RecentStep> + '_ {
        self.steps.iter().rev().copied().filter(move |(step, _)| *step != pc)
    }
}

/// A load under weak memory whose values are still to be delivered.
#[derive(Clone, Copy, Debug)]
pub(super) struct LateLoad {
    pub(super) access: Access,
    pub(super) addr: [u64; 32],
    pub(super) lanes: u32,
}

impl LateLoad {
    pub(super) fn registers(&self) -> &[u32] {
        &self.access.regs[..usize::from(self.access.n)]
    }

    pub(super) fn addresses(&self) -> impl Iterator<Item = u64> {
        lanes::lanes(self.lanes).map(|i| self.addr[i])
    }

    /// Length of each lane's part.
    pub(super) fn bytes(&self) -> u64 {
        u64::from(self.access.bytes) * u64::from(self.access.n)
    }
}

/// How a warp waits for memory that others change, for the scheduler.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Waits {
    /// When the warp was last idle, in epochs of its grid.
    pub(crate) idle_epoch: u64,
    /// Slices in a row that were idle.
    pub(crate) idle_slices: u32,
}

/// Rows of 512 bytes that a warp has accessed.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LongRows {
    /// The last one, and its distance from the one before.
    pub(super) last: u64,
    pub(super) distance: u64,
    /// How far rows with this distance have come.
    pub(super) bytes: u64,
}

/// State of one warp. The fields that a turn of a polling warp needs are together, so that they take
/// few cache lines.
#[derive(Debug, Default)]
#[repr(C, align(64))]
pub(crate) struct Warp {
    pub(crate) regs: Regs,
    pub(crate) groups: Vec<Group>,
    pub(super) polls: Polls,
    /// Instructions that it has executed before this slice, modulo 2^32.
    pub(super) executed: u32,
    pub(super) since_switch: u32,
    /// The last read of memory returned the same value as before, and nothing was changed since.
    pub(super) spinning: bool,
    pub(crate) waits: Waits,
    /// The place that it polls, for reports.
    pub(crate) waiting: Option<WaitingFor>,
    /// The regions used last, latest first, for loads and for stores.
    pub(super) regions: [[Found; 4]; 2],
    pub(crate) index: u32,
    /// Lanes that it began with.
    pub(super) threads: u32,
    /// Lanes that have not exited.
    pub(crate) live: u32,
    pub(super) converged: Converged,
    /// Votes of the last `barrier.red`: how many were for, and how many there were. The warp's own,
    /// since other warps may complete the barrier again before this one reads them.
    pub(super) outcome: [u32; 2],
    /// Local memory, lane after lane.
    pub(crate) local: Vec<u64>,
    /// Lanes that have read a stepped clock, and are expected to read it again in their wait.
    pub(crate) clock_readers: u32,
    /// The last reading of that clock, and the lanes that have read it.
    pub(crate) clock_seen: (u64, u32),
    pub(crate) trace: RecentSteps,
    /// Empty but under weak memory.
    pub(super) late: Vec<LateLoad>,
    pub(super) products: Products,
    /// How often it has arrived at the barrier of the cluster.
    pub(super) cluster_arrivals: u32,
    /// Lanes that have waited at that barrier since the last arrival: those that may arrive again.
    pub(super) cluster_waited: u32,
    /// The long rows that it has accessed, by loads and by stores.
    pub(super) rows: [LongRows; 2],
    /// Strong loads that changed nothing. Empty without checks.
    pub(super) again: Vec<Again>,
}

impl Warp {
    /// A warp of these registers, which has not started.
    pub(crate) fn new(regs: Regs) -> Warp {
        Warp { regs, ..Warp::default() }
    }

    /// Prepares a warp to start at the first instruction. Registers must have been set already.
    pub(crate) fn start(&mut self, index: u32, live: u32) {
        self.index = index;
        (self.threads, self.live) = (live, live);
        self.converged.start(live);
        self.groups.clear();
        self.groups.push(Group {
            mask: live,
            pc: 0,
            state: GroupState::Ready,
            deferred: false,
            apart: false,
            spun: 0,
        });
        self.polls.clear();
        self.executed = 0;
        self.spinning = false;
        self.clock_readers = 0;
        self.clock_seen = (0, 0);
        self.waiting = None;
        self.waits = Waits::default();
        self.trace.steps.clear();
        self.late.clear();
        self.products.start();
        self.cluster_arrivals = 0;
        self.cluster_waited = u32::MAX;
        self.since_switch = 0;
        self.again.clear();
    }

    /// The instruction that the warp executes next, if lanes are ready: that of the group which
    /// [`Exec::next_group`] takes up.
    pub(crate) fn next_pc(&self) -> Option<u32> {
        let ready = |g: &&Group| g.state == GroupState::Ready;
        let first = self.groups.iter().filter(|g| ready(g) && !g.deferred).map(|g| g.pc).min();
        first.or_else(|| self.groups.iter().filter(ready).map(|g| g.pc).min())
    }

    /// Looks regions up again, after the table has changed.
    pub(crate) fn forget_regions(&mut self) {
        self.regions = Default::default();
        self.again.clear();
    }

    /// Lanes that run, read a clock in their wait, and have not read `now` from it.
    pub(crate) fn behind_the_clock(&self, now: u64) -> u32 {
        let ready = self.groups.iter().filter(|group| group.state == GroupState::Ready);
        let running = ready.fold(0, |lanes, group| lanes | group.mask);
        let seen = if self.clock_seen.0 == now { self.clock_seen.1 } else { 0 };
        self.clock_readers & running & !seen
    }

    /// Releases the groups that wait at a barrier, which had these votes. Returns their lanes.
    pub(crate) fn release_barrier(&mut self, barrier: u32, outcome: [u32; 2]) -> u32 {
        let mut released = 0;
        for g in &mut self.groups {
            if matches!(g.state, GroupState::Barrier { id, arrived: true, .. } if id == barrier) {
                g.state = GroupState::Ready;
                g.pc += 1;
                g.apart = false;
                released |= g.mask;
            }
        }
        if released != 0 {
            self.outcome = outcome;
        }
        if barrier == CLUSTER_BARRIER {
            self.cluster_waited |= released;
        }
        released
    }
}

/// One of a block's barriers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Barrier {
    pub(crate) arrived: u32,
    /// Threads expected; 0 before the first arrival.
    pub(crate) expected: u32,
    /// Some warp waits for "all threads", which exited warps satisfy.
    pub(super) all: bool,
    /// Warps that have arrived, one bit each.
    warps: u32,
    /// Votes of `barrier.red` so far, and those when it last completed: how many were for, and how
    /// many there were.
    pub(super) votes: [u32; 2],
    pub(crate) outcome: [u32; 2],
}

/// State shared by the warps of a block.
#[derive(Debug)]
pub(crate) struct BlockState {
    pub(crate) ctaid: [u32; 3],
    pub(crate) shared: SharedMemory,
    pub(crate) barriers: [Barrier; BARRIERS],
    pub(crate) warps: u32,
    pub(crate) exited_warps: u32,
    /// Whether a barrier for all threads that not all threads reach is a fault
    /// ([`CheckConfig::strict_exits`]).
    ///
    /// [`CheckConfig::strict_exits`]: crate::CheckConfig::strict_exits
    pub(crate) strict_exits: bool,
    /// Barriers that have completed and must wake their warps, one bit each.
    pub(crate) completed: u32,
    /// Its number in its cluster, and the shared memory there. `None` in a cluster of one block.
    pub(crate) rank: u32,
    pub(crate) cluster: Option<Arc<ClusterMemory>>,
    /// Warps that have arrived at the barrier of the cluster in this phase, and those that have
    /// ended, one bit each.
    pub(crate) cluster_arrivals: u32,
    pub(crate) ended_warps: u32,
    /// All of the block has arrived at the barrier of the cluster, and other blocks have not.
    pub(crate) waits_for_cluster: bool,
    /// How often the barrier of the cluster has completed.
    pub(crate) cluster_phases: u32,
    pub(crate) bulk: BulkQueue,
    pub(crate) copies: CopyQueue,
    /// Progress of copies that was not yet reported to the checks.
    pub(crate) landed: Vec<Landed>,
    /// Empty unless the kernel has `wgmma`.
    pub(crate) warpgroups: Vec<Warpgroup>,
    /// A warp has read memory by a strong load that others outside of the block's cluster may change,
    /// for the scheduler.
    pub(crate) read_outside: bool,
}

impl BlockState {
    /// Whether copies are under way.
    pub(crate) fn is_copying(&self) -> bool {
        !(self.bulk.is_empty() && self.copies.is_empty())
    }

    /// Counts a warp at a barrier.
    pub(super) fn arrive(&mut self, warp: u32, id: u32, count: Option<u32>) -> Result<(), FaultKind> {
        let total = self.warps * 32;
        let b = &mut self.barriers[id as usize];
        let expected = count.unwrap_or(total);
        if b.arrived != 0 && b.expected != expected {
            let message =
                format!("this warp expects {expected} threads, warps before it expected {}", b.expected);
            return Err(FaultKind::BadBarrier { barrier: id, message });
        }
        b.expected = expected;
        b.all |= count.is_none();
        b.warps |= 1 << warp;
        b.arrived += 32;
        if b.arrived > b.expected {
            let message = format!("{} threads have arrived, {expected} were expected", b.arrived);
            return Err(FaultKind::BadBarrier { barrier: id, message });
        }
        self.complete_barrier(id)
    }

    pub(super) fn complete_barrier(&mut self, id: u32) -> Result<(), FaultKind> {
        if id == CLUSTER_BARRIER {
            self.complete_part_of_cluster();
            return Ok(());
        }
        let b = &mut self.barriers[id as usize];
        // A warp may have arrived before it ended.
        let absent = if b.all { self.ended_warps & !b.warps } else { 0 };
        let missing = if absent == 0 { 0 } else { absent.count_ones() * 32 };
        if self.strict_exits && b.arrived != 0 && missing != 0 {
            let warps = missing / 32;
            let message =
                format!("a warp waits for all threads of the block, but {warps} of its warps have ended");
            return Err(FaultKind::BadBarrier { barrier: id, message });
        }
        if b.arrived != 0 && b.arrived + missing >= b.expected {
            *b = Barrier { outcome: b.votes, ..Barrier::default() };
            self.completed |= 1 << id;
        }
        Ok(())
    }

    /// A warp has ended: barriers that wait for all threads no longer wait for it.
    pub(crate) fn warp_exited(&mut self, warp: u32) -> Result<(), FaultKind> {
        self.exited_warps += 1;
        self.ended_warps |= 1 << warp;
        (0..BARRIERS as u32).try_for_each(|id| self.complete_barrier(id))
    }
}

/// State shared by all warps of a grid.
#[derive(Debug)]
pub(crate) struct Env {
    pub(crate) kernel: Arc<Kernel>,
    pub(crate) table: Arc<Table>,
    /// The parameter block, 16-byte aligned.
    pub(crate) params: Vec<u128>,
    pub(crate) param_bytes: u64,
    pub(crate) clock: Clock,
    /// Seed of the contents of unwritten memory and registers.
    pub(crate) poison: u64,
    pub(crate) output: Output,
    /// How often lanes that diverged stay apart until a warp-wide instruction joins them: one time
    /// in so many; 0 for never.
    pub(crate) apart_one_in: u64,
    /// Warp instructions before this slice.
    pub(crate) executed: u64,
}

/// A fault whose place is added later.
#[derive(Debug)]
pub(crate) struct Stop {
    pub(crate) kind: FaultKind,
    pub(crate) lane: Option<u32>,
}

/// Boxed, because it is the rare case and results are returned per instruction.
pub(crate) type Run<T> = Result<T, Box<Stop>>;

pub(crate) fn stop<T>(kind: FaultKind, lane: Option<usize>) -> Run<T> {
    Err(Box::new(Stop { kind, lane: lane.map(|l| l as u32) }))
}

/// Next step of the running group after an instruction.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Flow {
    /// Go on at `self.pc`, which has been set.
    Next,
    /// Yield to other groups or warps.
    GiveWay,
    /// The group was parked in `warp.groups`, or its lanes have exited.
    Gone,
}

/// Why a slice ended. A word long, as [`Activity`], because a load of a value that was stored in
/// parts stalls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Status {
    Ready,
    Blocked,
    /// Blocked, and nothing outside of the warp can change that.
    Stuck,
    Done,
}

/// Outcome of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub(crate) enum Activity {
    /// Something changed, or the warp computes.
    Progress,
    /// The warp is known to spin, but did not poll again in this slice.
    Neutral,
    /// The warp polled again, and no value had changed.
    Idle,
}

/// Result of a slice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slice {
    pub(crate) status: Status,
    pub(crate) executed: u64,
    pub(crate) activity: Activity,
}

/// A running warp.
pub(crate) struct Exec<'a, W> {
    pub(super) kernel: &'a Kernel,
    pub(super) env: &'a Env,
    pub(super) block: &'a mut BlockState,
    pub(super) warp: &'a mut Warp,
    /// Lanes and place of the running group.
    pub(super) mask: u32,
    pub(crate) pc: u32,
    pub(super) apart: bool,
    pub(super) executed: u64,
    pub(super) side_effect: bool,
    /// A read of memory in this slice returned the same value as before.
    pub(super) read_same: bool,
    /// [`Group::spun`] of the running group.
    pub(super) spun: u32,
    /// The value of `executed` at which the budget of compiled code ends.
    pub(super) run_end: u64,
    /// Outcome of the instruction with which compiled code ended, where there was no fault. Apart
    /// from the fault, because a load of an outcome that was stored in parts stalls.
    pub(super) called: Option<Flow>,
    /// Stores have bypassed the caches since the last [`Exec::drain`].
    pub(super) streamed: bool,
    /// The fault with which compiled code ended.
    pub(super) called_fault: Option<Box<Stop>>,
    pub(crate) watch: W,
}

/// First valid offset of the shared window. As on sm_90, the first KiB belongs to the system; so
/// offset 0, the usual sign of a missing initialisation, is a fault.
pub(crate) const SHARED_BASE: u32 = 1024;

/// 16 bytes of shared memory.
#[repr(align(16))]
#[derive(Debug)]
struct Unit([AtomicU64; 2]);

/// Shared memory of one block. Clones are the same memory: the blocks of a cluster have each
/// other's.
#[derive(Clone, Debug, Default)]
pub(crate) struct SharedMemory {
    units: Arc<[Unit]>,
    bytes: u64,
    /// The first address.
    base: u64,
}

impl SharedMemory {
    /// Memory of `bytes` bytes that holds `poison` everywhere, of the block with this number in its
    /// cluster.
    pub(crate) fn reset(&mut self, bytes: u32, poison: u64, rank: u32) {
        let units = bytes.div_ceil(16) as usize;
        if let (true, Some(units)) = (self.units.len() == units, Arc::get_mut(&mut self.units)) {
            units.iter_mut().flat_map(|unit| &mut unit.0).for_each(|half| *half.get_mut() = poison);
        } else if self.units.len() == units {
            self.units.iter().flat_map(|unit| &unit.0).for_each(|half| half.store(poison, Ordering::Relaxed));
        } else {
            // 128-byte alignment is by offset only: nothing depends on the host address.
            self.units = (0..units).map(|_| Unit([poison, poison].map(AtomicU64::new))).collect();
        }
        self.bytes = u64::from(bytes);
        self.base = u64::from(rank) << RANK_SHIFT | u64::from(SHARED_BASE);
    }

    /// The address of an offset in the block's window.
    pub(super) fn address(&self, offset: u64) -> u64 {
        self.base - u64::from(SHARED_BASE) + offset
    }

    /// The 16 bytes at `offset` of the block's window, a multiple of 16.
    pub(super) fn unit(&self, offset: u64) -> Result<[u8; 16], FaultKind> {
        let at = offset.wrapping_sub(u64::from(SHARED_BASE));
        let unit = self.units.get((at / 16) as usize).filter(|_| at.saturating_add(16) <= self.bytes);
        let unit = unit.ok_or_else(|| window("shared", offset, 16, u64::from(SHARED_BASE), self.bytes))?;
        let [low, high] = unit.0.each_ref().map(|half| half.load(Ordering::Relaxed).to_ne_bytes());
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&low);
        bytes[8..].copy_from_slice(&high);
        Ok(bytes)
    }

    /// The first address, the length in bytes, and the pointer to the first.
    #[inline]
    pub(super) fn window(&self) -> (u64, u64, *mut u8) {
        (self.base, self.bytes, self.units.as_ptr().cast::<u8>().cast_mut())
    }

    /// Pointer to `address`, if `bytes` bytes from there on exist.
    #[inline]
    pub(crate) fn pointer(&self, address: u64, bytes: u64) -> Result<*mut u8, FaultKind> {
        let at = address.wrapping_sub(self.base);
        if at > self.bytes || bytes > self.bytes - at {
            return Err(window("shared", address, bytes, self.base, self.bytes));
        }
        // SAFETY: `at` is inside of (or one past) the allocation, which has at least `self.bytes`
        // bytes. All of it is in atomics, so that it may be written through a shared reference.
        Ok(unsafe { self.units.as_ptr().cast::<u8>().cast_mut().add(at as usize) })
    }
}

pub(super) fn window(space: &'static str, offset: u64, bytes: u64, start: u64, len: u64) -> FaultKind {
    FaultKind::OutOfWindow { space, offset, bytes, start, end: start + len }
}
