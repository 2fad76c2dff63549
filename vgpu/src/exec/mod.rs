//! Runs the instructions of one warp for one slice of time.
//!
//! A warp is a set of [`Group`]s: lanes that stand at the same instruction and run together. A divergent branch splits
//! a group. Groups mostly merge again when they meet at the same instruction; some, drawn from the seed, stay apart until a `.sync` asks
//! for them, and run in any order, since nothing else promises that lanes converge. To make groups meet, the one with the lowest program
//! counter runs first (LLVM lays blocks out so that joins come after both arms). A group that spins
//! gives way to the others, so every lane makes progress in the end: independent thread scheduling.

pub(crate) mod access;
pub(crate) mod bulk;
pub(crate) mod lanes;
mod simd;
mod sync;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::check::watch::Watch;
use crate::device::Clock;
use crate::fault::{FaultKind, WaitingFor};
use crate::ir::{Access, GUARD_NOT, Inst, NO_GUARD, Op, Regs, Timer};
use crate::kernel::Kernel;
use crate::memory::{Found, Table};
use access::SharedMemory;
use bulk::BulkQueue;

/// Instructions a group may run before it must let the other runnable groups of its warp run.
const GROUP_FUEL: u32 = 4096;

/// Named barriers per block.
pub(crate) const BARRIERS: usize = 16;

/// What a group of lanes is doing.
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

/// Lanes that run together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group {
    pub(crate) mask: u32,
    pub(crate) pc: u32,
    pub(crate) state: GroupState,
    /// Has given way; runs again when the others have had their turn.
    deferred: bool,
    /// Joins no other group before a warp-wide instruction or a block barrier makes it.
    apart: bool,
    /// Its last look at memory found what was there before, and the warp has changed nothing since.
    spins: bool,
}

impl Group {
    /// Stands at a block barrier to which other lanes of the warp have yet to come.
    fn waits_for_its_warp(&self) -> bool {
        matches!(self.state, GroupState::Barrier { arrived: false, .. })
    }
}

impl Inst {
    /// A block barrier that all lanes of a warp come to together.
    fn aligned(&self) -> bool {
        matches!(self.op, Op::Barrier { aligned: true, .. })
    }
}

/// A load that a warp repeats, waiting for the value to change.
#[derive(Clone, Copy, Debug)]
struct Poll {
    pc: u32,
    addr: u64,
    value: u64,
}

/// Instructions that are kept of a warp's past.
const TRACED: usize = 32;

/// The last instructions of a warp that concern others, each once, latest last: for reports. Empty without checks.
#[derive(Debug, Default)]
pub(crate) struct Trace {
    pub(crate) steps: VecDeque<u32>,
}

impl Trace {
    fn add(&mut self, pc: u32) {
        match self.steps.iter().position(|step| *step == pc) {
            Some(at) if at + 1 == self.steps.len() => return,
            Some(at) => drop(self.steps.remove(at)),
            None if self.steps.len() == TRACED => drop(self.steps.pop_front()),
            None => {}
        }
        self.steps.push_back(pc);
    }
}

/// A load under weak memory whose values are yet to come.
#[derive(Clone, Copy, Debug)]
struct LateLoad {
    access: Access,
    addr: [u64; 32],
    lanes: u32,
}

impl LateLoad {
    fn registers(&self) -> &[u32] {
        &self.access.regs[..usize::from(self.access.n)]
    }

    fn addresses(&self) -> impl Iterator<Item = u64> {
        lanes::lanes(self.lanes).map(|i| self.addr[i])
    }

    /// Length of each lane's part.
    fn bytes(&self) -> u64 {
        u64::from(self.access.bytes) * u64::from(self.access.n)
    }
}

/// State of one warp.
#[derive(Debug, Default)]
pub(crate) struct Warp {
    pub(crate) index: u32,
    /// Lanes that have not exited.
    pub(crate) live: u32,
    pub(crate) regs: Regs,
    /// Local memory, lane after lane.
    pub(crate) local: Vec<u64>,
    pub(crate) groups: Vec<Group>,
    polls: Vec<Poll>,
    /// The last look at memory found what was there before, and nothing was changed since.
    spinning: bool,
    /// What it polls, for reports.
    pub(crate) waiting: Option<WaitingFor>,
    pub(crate) trace: Trace,
    /// Empty but under weak memory.
    late: Vec<LateLoad>,
    since_switch: u32,
}

impl Warp {
    /// Prepares a warp to start at the first instruction. Registers must have been set already.
    pub(crate) fn start(&mut self, index: u32, live: u32) {
        self.index = index;
        self.live = live;
        self.groups.clear();
        self.groups.push(Group {
            mask: live,
            pc: 0,
            state: GroupState::Ready,
            deferred: false,
            apart: false,
            spins: false,
        });
        self.polls.clear();
        self.spinning = false;
        self.waiting = None;
        self.trace.steps.clear();
        self.late.clear();
        self.since_switch = 0;
    }

    /// Lets groups go that wait at barrier `id`. Returns their lanes.
    pub(crate) fn release_barrier(&mut self, barrier: u32) -> u32 {
        let mut released = 0;
        for g in &mut self.groups {
            if matches!(g.state, GroupState::Barrier { id, arrived: true, .. } if id == barrier) {
                g.state = GroupState::Ready;
                g.pc += 1;
                g.apart = false;
                released |= g.mask;
            }
        }
        released
    }
}

/// One of a block's 16 barriers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Barrier {
    pub(crate) arrived: u32,
    /// Threads expected; 0 while nobody has arrived.
    pub(crate) expected: u32,
    /// Some warp waits for "all threads", which exited warps satisfy.
    all: bool,
    /// Votes of `barrier.red` so far, and those of the time before: how many were for, and how many there were.
    votes: [u32; 2],
    outcome: [u32; 2],
}

/// What the warps of a block share.
#[derive(Debug)]
pub(crate) struct BlockState {
    pub(crate) ctaid: [u32; 3],
    pub(crate) shared: SharedMemory,
    pub(crate) barriers: [Barrier; BARRIERS],
    pub(crate) warps: u32,
    pub(crate) exited_warps: u32,
    /// Whether a barrier for all threads that not all threads reach is a fault ([`CheckConfig::strict_exits`]).
    ///
    /// [`CheckConfig::strict_exits`]: crate::CheckConfig::strict_exits
    pub(crate) strict_exits: bool,
    /// Barriers that completed and whose warps must be woken, one bit each.
    pub(crate) completed: u32,
    pub(crate) bulk: BulkQueue,
    /// Mbarriers, by their offset, of which bulk copies have completed a phase, for the checks.
    pub(crate) phases: Vec<u64>,
}

impl BlockState {
    /// Counts a warp at a barrier.
    fn arrive(&mut self, id: u32, count: Option<u32>) -> Result<(), FaultKind> {
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
        b.arrived += 32;
        if b.arrived > b.expected {
            let message = format!("{} threads have arrived, {expected} were expected", b.arrived);
            return Err(FaultKind::BadBarrier { barrier: id, message });
        }
        self.settle(id)
    }

    fn settle(&mut self, id: u32) -> Result<(), FaultKind> {
        let b = &mut self.barriers[id as usize];
        if self.strict_exits && b.all && b.arrived != 0 && self.exited_warps != 0 {
            let message = format!(
                "a warp waits for all threads of the block, but {} of its warps have ended",
                self.exited_warps
            );
            return Err(FaultKind::BadBarrier { barrier: id, message });
        }
        let missing = if b.all { self.exited_warps * 32 } else { 0 };
        if b.arrived != 0 && b.arrived + missing >= b.expected {
            *b = Barrier { outcome: b.votes, ..Barrier::default() };
            self.completed |= 1 << id;
        }
        Ok(())
    }

    /// A warp has ended: barriers that wait for all threads no longer wait for it.
    pub(crate) fn warp_exited(&mut self) -> Result<(), FaultKind> {
        self.exited_warps += 1;
        (0..BARRIERS as u32).try_for_each(|id| self.settle(id))
    }
}

/// What all warps of a grid share.
#[derive(Debug)]
pub(crate) struct Env {
    pub(crate) kernel: Arc<Kernel>,
    pub(crate) table: Arc<Table>,
    /// The parameter block, 16-byte aligned.
    pub(crate) params: Vec<u128>,
    pub(crate) param_bytes: u64,
    pub(crate) clock: Clock,
    /// What memory and registers hold before anybody writes them.
    pub(crate) poison: u64,
    /// How often lanes that diverged stay apart until a warp-wide instruction joins them: one time in so many; 0 for never.
    pub(crate) apart_one_in: u64,
    /// Warp instructions before this slice.
    pub(crate) executed: u64,
}

/// A fault before it knows its place.
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

/// What becomes of the running group after an instruction.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    /// Go on at `self.pc`, which has been set.
    Next,
    /// Let others run first.
    GiveWay,
    /// The group was parked in `warp.groups`, or its lanes have exited.
    Gone,
}

/// Why a slice ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Ready,
    Blocked,
    /// Blocked, and nothing outside of the warp can change that.
    Stuck,
    Done,
}

/// What a slice brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Activity {
    /// Something changed, or the warp computes.
    Progress,
    /// The warp is known to spin, but did not get to look again in this slice.
    Neutral,
    /// The warp looked again and found nothing new.
    Idle,
}

/// What a slice did.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slice {
    pub(crate) status: Status,
    pub(crate) executed: u64,
    pub(crate) activity: Activity,
}

/// A warp in the act of running.
pub(crate) struct Exec<'a, W> {
    kernel: &'a Kernel,
    env: &'a Env,
    block: &'a mut BlockState,
    warp: &'a mut Warp,
    /// Lanes and place of the running group.
    mask: u32,
    pub(crate) pc: u32,
    apart: bool,
    executed: u64,
    side_effect: bool,
    /// A look at memory in this slice found what was there before.
    looked_again: bool,
    /// [`Group::spins`] of the running group.
    spins: bool,
    /// Region used last, for loads and for stores.
    regions: [Found; 2],
    pub(crate) watch: W,
}

impl<'a, W: Watch> Exec<'a, W> {
    pub(crate) fn new(env: &'a Env, block: &'a mut BlockState, warp: &'a mut Warp, watch: W) -> Self {
        Exec {
            kernel: &env.kernel,
            env,
            block,
            warp,
            mask: 0,
            pc: 0,
            apart: false,
            executed: 0,
            side_effect: false,
            looked_again: false,
            spins: false,
            regions: [Found::default(); 2],
            watch,
        }
    }

    /// Runs up to `budget` instructions.
    pub(crate) fn run(&mut self, budget: u64) -> Run<Slice> {
        // Two loops, so that coverage costs nothing where nobody asked for it.
        match self.kernel.executed.get() {
            None => self.run_slice::<false>(budget),
            Some(_) => self.run_slice::<true>(budget),
        }
    }

    fn run_slice<const COVER: bool>(&mut self, budget: u64) -> Run<Slice> {
        let mut running = self.next_group();
        while running {
            if self.executed >= budget {
                self.park(GroupState::Ready, false);
                break;
            }
            if !self.warp.groups.is_empty() {
                self.reconverge();
            }
            running = match self.instruction::<COVER>()? {
                Flow::Next => true,
                Flow::GiveWay => self.give_way(),
                Flow::Gone => {
                    self.warp.since_switch = 0;
                    self.next_group()
                }
            };
        }
        let mut status = if self.warp.groups.is_empty() { Status::Done } else { Status::Stuck };
        let mut all_spin = true;
        for g in &self.warp.groups {
            match g.state {
                GroupState::Ready => {
                    status = Status::Ready;
                    all_spin &= g.spins;
                }
                GroupState::Barrier { arrived: true, .. } if status != Status::Ready => {
                    status = Status::Blocked
                }
                _ => {}
            }
        }
        let activity = match () {
            () if status != Status::Ready || self.side_effect || !self.warp.spinning => Activity::Progress,
            () if self.looked_again && all_spin => Activity::Idle,
            () => Activity::Neutral,
        };
        Ok(Slice { status, executed: self.executed, activity })
    }

    #[inline(always)]
    fn instruction<const COVER: bool>(&mut self) -> Run<Flow> {
        let kernel = self.kernel;
        // The lowering ends every kernel with `exit`, so `pc` is always in range.
        let inst: &Inst = &kernel.code[self.pc as usize];
        self.executed += 1;
        let mut m = self.mask;
        if inst.guard != NO_GUARD {
            let p = self.warp.regs.pred[(inst.guard & !GUARD_NOT) as usize];
            m &= if inst.guard & GUARD_NOT != 0 { !p } else { p };
            if m == 0 {
                // A branch has done its work when nobody takes it.
                if COVER && matches!(inst.op, Op::Bra { .. }) {
                    self.cover();
                }
                self.pc += 1;
                return Ok(Flow::Next);
            }
        }
        if COVER {
            self.cover();
        }
        if W::ON && inst.op.concerns_others() {
            self.warp.trace.add(self.pc);
        }
        if W::ON && !self.warp.late.is_empty() {
            self.take_late(&inst.op, m)?;
        }
        match &inst.op {
            Op::Alu { f, s } => f(&mut self.warp.regs, s, m),
            Op::Bra { target } => return Ok(self.branch(m, *target)),
            Op::BrxIdx { index, table } => {
                return self.indexed_branch(m, *index, &kernel.tables[*table as usize]);
            }
            Op::Ld(access) => return self.load(access, m),
            Op::St(access) => {
                self.store(access, m)?;
                // Others may see the store before the load in front of it has its value.
                if W::ON && !self.warp.late.is_empty() {
                    self.pc += 1;
                    return Ok(Flow::GiveWay);
                }
            }
            Op::Atom(atomic) => return self.atomic(atomic, m),
            Op::Fence(fence) => {
                std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
                self.watch.fence(m, *fence);
            }
            Op::Timer { what, d } => self.timer(*what, *d, m),
            Op::ActiveMask { d } => lanes::lanes(m).for_each(|i| self.warp.regs.r32[*d as usize][i] = m),
            Op::Warp { op, mask } => {
                self.split_off(m);
                return self.warp_wide(op, *mask);
            }
            Op::Barrier { kind, id, count, aligned } => {
                self.split_off(m);
                return self.barrier(*kind, *id, *count, *aligned);
            }
            Op::BarrierVote { id, p } => self.vote(*id, *p, m),
            Op::BarrierResult { what, id, d } => self.outcome(*what, *id, *d, m),
            Op::Mbar { op, addr, space } => return self.mbarrier(op, addr, *space, m),
            Op::PendingCount { d, state } => self.pending_count(*d, *state, m)?,
            Op::Bulk(op) => self.bulk(op, m)?,
            Op::Sleep => {
                self.pc += 1;
                return Ok(Flow::GiveWay);
            }
            Op::Exit => return self.exit(m),
            Op::Trap => return stop(FaultKind::Trap, lanes::lanes(m).next()),
            Op::Nop => {}
        }
        self.pc += 1;
        Ok(Flow::Next)
    }

    /// Notes that the instruction at hand was executed.
    fn cover(&self) {
        let marks = self.kernel.executed.get();
        if let Some(mark) = marks.and_then(|marks| marks.get(self.pc as usize)) {
            mark.store(true, Ordering::Relaxed);
        }
    }

    #[inline(always)]
    fn branch(&mut self, m: u32, target: u32) -> Flow {
        let fallthrough = self.pc + 1;
        if m != self.mask {
            // Hardware promises nowhere that the arms join again by themselves.
            let one_in = self.env.apart_one_in;
            let draw = crate::rng::mix(self.env.poison ^ (self.env.executed + self.executed));
            if one_in != 0 && draw.is_multiple_of(one_in) {
                self.apart = true;
            }
            // Run the lower arm first; the other one waits for it at the join. Arms that stay apart come in any order.
            let swapped = self.apart && draw >> 63 != 0;
            let (first, second) = if (target < fallthrough) != swapped {
                ((m, target), (self.mask & !m, fallthrough))
            } else {
                ((self.mask & !m, fallthrough), (m, target))
            };
            self.push(second.0, second.1, GroupState::Ready);
            (self.mask, self.pc) = first;
        } else {
            self.pc = target;
        }
        Flow::Next
    }

    fn indexed_branch(&mut self, m: u32, index: u32, table: &[u32]) -> Run<Flow> {
        self.split_off(m);
        let row = self.warp.regs.r32[index as usize];
        let mut todo = m;
        while todo != 0 {
            let lane = todo.trailing_zeros() as usize;
            let Some(&target) = table.get(row[lane] as usize) else {
                let what = format!("brx.idx with index {} into {} targets", row[lane], table.len());
                return stop(FaultKind::Unsupported(what), Some(lane));
            };
            let same = lanes::lanes(todo).filter(|&i| row[i] == row[lane]).fold(0, |a, i| a | 1 << i);
            todo &= !same;
            self.push(same, target, GroupState::Ready);
        }
        Ok(Flow::Gone)
    }

    fn exit(&mut self, m: u32) -> Run<Flow> {
        self.side_effect = true;
        self.warp.live &= !m;
        self.mask &= !m;
        // Whoever waits for lanes of this warp must look again.
        for g in &mut self.warp.groups {
            if matches!(g.state, GroupState::Lanes { .. }) {
                g.state = GroupState::Ready;
            }
        }
        if !self.warp.groups.is_empty() {
            self.none_waits_aligned(m)?;
            self.recount_barriers()?;
        }
        self.pc += 1;
        Ok(if self.mask == 0 { Flow::Gone } else { Flow::Next })
    }

    fn timer(&mut self, what: Timer, d: u32, m: u32) {
        let clock = self.env.executed + self.executed;
        let value = match what {
            Timer::Clock | Timer::Clock64 => clock,
            Timer::ClockHi => clock >> 32,
            Timer::Global | Timer::GlobalLo | Timer::GlobalHi => {
                let mut ns = self.env.clock.now_ns();
                if matches!(self.env.clock, Clock::Virtual(_)) {
                    ns += self.executed * crate::device::VIRTUAL_NS_PER_WARP_INSTRUCTION;
                }
                if what == Timer::GlobalHi { ns >> 32 } else { ns }
            }
        };
        let wide = what.is_wide();
        for i in lanes::lanes(m) {
            if wide {
                self.warp.regs.r64[d as usize][i] = value;
            } else {
                self.warp.regs.r32[d as usize][i] = value as u32;
            }
        }
    }

    fn push(&mut self, mask: u32, pc: u32, state: GroupState) {
        let (apart, spins) = (self.apart, self.spins);
        self.warp.groups.push(Group { mask, pc, state, deferred: false, apart, spins });
    }

    /// Puts the running group aside.
    fn park(&mut self, state: GroupState, deferred: bool) {
        let (apart, spins) = (self.apart, self.spins);
        self.warp.groups.push(Group { mask: self.mask, pc: self.pc, state, deferred, apart, spins });
    }

    /// Keeps the lanes `m` of the running group; the others go on at the next instruction.
    fn split_off(&mut self, m: u32) {
        if m != self.mask {
            self.push(self.mask & !m, self.pc + 1, GroupState::Ready);
            self.mask = m;
        }
    }

    /// Takes up the runnable group with the lowest program counter. False if there is none.
    fn next_group(&mut self) -> bool {
        for pass in 0..2 {
            let best = (0..self.warp.groups.len())
                .filter(|&i| self.warp.groups[i].state == GroupState::Ready && !self.warp.groups[i].deferred)
                .min_by_key(|&i| self.warp.groups[i].pc);
            if let Some(i) = best {
                let g = self.warp.groups.swap_remove(i);
                (self.mask, self.pc, self.apart, self.spins) = (g.mask, g.pc, g.apart, g.spins);
                return true;
            }
            if pass == 0 {
                self.warp.groups.iter_mut().for_each(|g| g.deferred = false);
            }
        }
        false
    }

    /// The running group lets others run: another group of the warp, or, when all have had their turn, other warps.
    fn give_way(&mut self) -> bool {
        self.park(GroupState::Ready, true);
        if self.warp.groups.iter().any(|g| g.state == GroupState::Ready && !g.deferred) {
            return self.next_group();
        }
        self.warp.groups.iter_mut().for_each(|g| g.deferred = false);
        false
    }

    /// With several groups: merges those that stand where the running one stands, and prefers the lowest one.
    fn reconverge(&mut self) {
        let pc = self.pc;
        let mut lower = false;
        let mut i = 0;
        while let Some(g) = self.warp.groups.get(i) {
            match g.state {
                GroupState::Ready | GroupState::Lanes { .. } if g.pc == pc && !g.apart && !self.apart => {
                    self.mask |= g.mask;
                    self.spins &= g.spins;
                    self.warp.groups.swap_remove(i);
                    continue;
                }
                // Lanes that stay apart need not wait for a join.
                GroupState::Ready => lower |= g.pc < pc && !g.deferred && !self.apart,
                _ => {}
            }
            i += 1;
        }
        self.warp.since_switch += 1;
        if lower {
            self.warp.since_switch = 0;
            self.park(GroupState::Ready, false);
            self.next_group();
        } else if self.warp.since_switch > GROUP_FUEL {
            self.warp.since_switch = 0;
            // Whoever gave way before has waited long enough when nobody else is left.
            let fresh = |g: &Group| g.state == GroupState::Ready && !g.deferred;
            if !self.warp.groups.iter().any(fresh) {
                self.warp.groups.iter_mut().for_each(|g| g.deferred = false);
            }
            self.park(GroupState::Ready, true);
            self.next_group();
        }
    }

    /// Notes that something was changed that others can see.
    fn changed(&mut self) {
        self.side_effect = true;
        self.spins = false;
        self.warp.groups.iter_mut().for_each(|g| g.spins = false);
        if !self.warp.polls.is_empty() {
            self.warp.polls.clear();
        }
        self.warp.spinning = false;
        self.warp.waiting = None;
    }

    /// Notes a look at memory that others may change. True when the same look at this place gave the same value
    /// before and nothing was changed since: the warp spins.
    fn poll(&mut self, addr: u64, value: u64) -> bool {
        let pc = self.pc;
        let now = Poll { pc, addr, value };
        let spins = match self.warp.polls.iter_mut().find(|p| p.pc == pc) {
            Some(p) => {
                let spins = p.addr == addr && p.value == value;
                *p = now;
                spins
            }
            None => {
                if self.warp.polls.len() >= 8 {
                    self.warp.polls.clear();
                }
                self.warp.polls.push(now);
                false
            }
        };
        self.warp.spinning = spins;
        self.looked_again |= spins;
        self.spins = spins;
        spins
    }

    /// `base + offset` of every lane.
    #[inline(always)]
    fn addresses(&self, a: &crate::ir::Addr) -> [u64; 32] {
        let offset = a.offset as u64;
        if a.wide {
            let row = &self.warp.regs.r64[a.slot as usize];
            lanes::every_lane(|i| row[i].wrapping_add(offset))
        } else {
            let row = &self.warp.regs.r32[a.slot as usize];
            lanes::every_lane(|i| u64::from(row[i].wrapping_add(offset as u32)))
        }
    }

    fn address(&self, a: &crate::ir::Addr, lane: usize) -> u64 {
        if a.wide {
            self.warp.regs.r64[a.slot as usize][lane].wrapping_add(a.offset as u64)
        } else {
            u64::from(self.warp.regs.r32[a.slot as usize][lane].wrapping_add(a.offset as u32))
        }
    }
}
