//! Runs the instructions of one warp for one slice of time.
//!
//! A warp is a set of [`Group`]s: lanes that stand at the same instruction and run together. A
//! divergent branch splits a group. Groups mostly merge again when they meet at the same
//! instruction. Some, drawn from the seed, stay apart until a `.sync` needs them, and run in any
//! order, because only `.sync` guarantees that lanes converge. To make groups merge, the one with
//! the lowest program counter runs first (LLVM lays blocks out so that joins come after both arms).
//! A group that spins yields to the others, so every lane makes progress in the end: independent
//! thread scheduling.

pub(crate) mod access;
mod again;
mod bulk;
pub(crate) mod bulk_queue;
mod called;
pub(crate) mod cluster;
mod converged;
pub(crate) mod copies;
pub(crate) mod descriptor;
pub(crate) mod lanes;
pub(crate) mod mma;
mod multimem;
mod parts;
pub(crate) mod polls;
mod print;
pub(crate) mod products;
mod simd;
pub(crate) mod sparse;
pub(crate) mod state;
mod sums;
mod sync;
mod unchecked;
pub(crate) mod wgmma;

use std::sync::atomic::Ordering;

use crate::check::hooks::Hooks;
use crate::compiled::Window;
use crate::device::Clock;
use crate::fault::FaultKind;
use crate::ir::{GUARD_NOT, Inst, NO_GUARD, Op, Timer};

pub(crate) use state::{
    Activity, Barrier, BlockState, Env, Exec, Group, GroupState, Slice, Status, Stop, Warp,
};
use state::{Flow, Run, stop};

/// Instructions a group may run before it must let the other runnable groups of its warp run.
const GROUP_FUEL: u32 = 4096;

impl<'a, W: Hooks> Exec<'a, W> {
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
            read_same: false,
            spun: 0,
            run_end: 0,
            called: None,
            called_fault: None,
            streamed: false,
            watch,
        }
    }

    /// Runs up to `budget` instructions.
    pub(crate) fn run(&mut self, budget: u64) -> Run<Slice> {
        // Two loops, so that coverage costs nothing when it is off.
        if self.kernel.executed.get().is_some() {
            return self.run_slice_with_coverage(budget);
        }
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: this processor has AVX2.
            return unsafe { self.run_slice_with_avx2(budget) };
        }
        self.run_slice_without_avx2(budget)
    }

    // The loop is a large function: each of its forms is compiled once, whoever calls it.

    #[inline(never)]
    fn run_slice_with_coverage(&mut self, budget: u64) -> Run<Slice> {
        self.run_slice::<true>(budget)
    }

    #[inline(never)]
    fn run_slice_without_avx2(&mut self, budget: u64) -> Run<Slice> {
        self.run_slice::<false>(budget)
    }

    /// The loop again, with loads and stores compiled for AVX2.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn run_slice_with_avx2(&mut self, budget: u64) -> Run<Slice> {
        self.run_slice::<false>(budget)
    }

    #[inline(always)]
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
            let run = if COVER { None } else { self.straight_run(budget) };
            let flow = match run {
                Some(flow) => flow,
                None => self.instruction::<COVER>(),
            };
            running = match flow {
                Ok(Flow::Next) => true,
                Ok(Flow::GiveWay) => self.give_way(),
                Ok(Flow::Gone) => {
                    self.warp.since_switch = 0;
                    self.next_group()
                }
                Err(fault) => {
                    self.drain();
                    return Err(fault);
                }
            };
        }
        self.drain();
        let mut status = if self.warp.groups.is_empty() { Status::Done } else { Status::Stuck };
        let mut all_spin = true;
        for g in &self.warp.groups {
            match g.state {
                GroupState::Ready => {
                    status = Status::Ready;
                    all_spin &= g.spun != 0 && self.warp.is_wait(g.spun, self.now());
                }
                GroupState::Barrier { arrived: true, .. } if status != Status::Ready => {
                    status = Status::Blocked
                }
                _ => {}
            }
        }
        let activity = match () {
            () if status != Status::Ready || self.side_effect || !self.warp.spinning => Activity::Progress,
            () if self.read_same && all_spin => Activity::Idle,
            () => Activity::Neutral,
        };
        self.warp.executed = self.now();
        if !COVER {
            self.kernel.compiled.note(self.kernel, W::ON, self.executed);
        }
        Ok(Slice { status, executed: self.executed, activity })
    }

    /// Runs arithmetic instructions from the present one on, and what compiled code can. Stops at the
    /// first instruction at which the budget ends, or the running group meets another one or must
    /// let others run. `None` if there is none.
    #[inline(always)]
    fn straight_run(&mut self, budget: u64) -> Option<Run<Flow>> {
        if let Some(flow) = self.compiled_run(budget) {
            return Some(flow);
        }
        let code = &self.kernel.code[self.pc as usize..];
        let mut run = u64::from(code[0].straight).min(budget - self.executed);
        // Late loads are delivered before the instruction that uses them.
        if run == 0 || W::ON && !self.warp.late.is_empty() {
            return None;
        }
        if !self.warp.groups.is_empty() {
            run = run.min(u64::from(self.until_others()));
            self.warp.since_switch += run as u32 - 1;
        }
        for inst in &code[..run as usize] {
            let Op::Alu { f, s, .. } = &inst.op else { unreachable!("a straight run is arithmetic") };
            let m = self.guarded(inst);
            if m != 0 {
                // SAFETY: the constructor of `f` checked that this processor has the instructions
                // that it uses.
                unsafe { f(&mut self.warp.regs, s, m) };
            }
        }
        self.executed += run;
        self.pc += run as u32;
        Some(Ok(Flow::Next))
    }

    /// With several groups, just reconverged: the instructions around the present one at which no
    /// group stands that the running one would join, or give way to.
    fn window(&self) -> Window {
        let (pc, mut window) = (self.pc as i32, Window::ALL);
        for g in &self.warp.groups {
            let at = g.pc as i32;
            // One that stays apart may be at the present instruction, and is next behind it.
            let next = at == pc && g.state == GroupState::Ready && !g.deferred;
            match g.state {
                GroupState::Barrier { .. } => {}
                _ if at > pc || next => window.ahead = window.ahead.min(at),
                _ if at < pc => window.behind = window.behind.max(at),
                _ => {}
            }
        }
        window
    }

    /// Runs compiled code from the present instruction on: arithmetic, branches by all lanes of the
    /// running group, and without checks all other instructions, up to one at which it may meet
    /// another group. `None` if nothing was executed.
    #[inline(always)]
    fn compiled_run(&mut self, budget: u64) -> Option<Run<Flow>> {
        let code = self.kernel.compiled.code(W::ON, self.mask)?;
        // Late loads are delivered before the instruction that uses them.
        if W::ON && !self.warp.late.is_empty() {
            return None;
        }
        let mut budget = budget - self.executed;
        let (alone, mut window) = (self.warp.groups.is_empty(), Window::ALL);
        if !alone {
            budget = budget.min((GROUP_FUEL + 1).saturating_sub(self.warp.since_switch).into());
            if !self.apart {
                window = self.window();
            }
        }
        let before = self.executed;
        self.run_end = before + budget;
        let (pc, mask, calls) = (self.pc, self.mask, self.calls());
        // SAFETY: the registers are those of a warp of this kernel, which nothing resizes while the
        // warp runs, and the code is the one for these lanes. The calls are those of this execution,
        // of the kernel with its parameters, and may be made while nothing else uses it.
        let ran = unsafe { code.run(pc, &raw mut self.warp.regs, mask, budget, window, calls) };
        let Some((pc, executed @ 1..)) = ran else { return None };
        if !alone {
            self.warp.since_switch += executed as u32 - 1;
        }
        self.executed = before + executed;
        Some(match self.called.take() {
            // A call has set the next instruction by itself.
            Some(flow) => Ok(flow),
            None => match self.called_fault.take() {
                Some(fault) => Err(fault),
                None => {
                    self.pc = pc;
                    Ok(Flow::Next)
                }
            },
        })
    }

    /// With several groups, just reconverged: instructions until [`Exec::reconverge`] may have
    /// anything to do again.
    fn until_others(&self) -> u32 {
        let fuel = (GROUP_FUEL + 1).saturating_sub(self.warp.since_switch);
        let ahead = self.warp.groups.iter().filter_map(|g| g.pc.checked_sub(self.pc));
        ahead.fold(fuel, u32::min).max(1)
    }

    /// The lanes of the running group for which the guard of an instruction holds.
    #[inline(always)]
    fn guarded(&self, inst: &Inst) -> u32 {
        if inst.guard == NO_GUARD {
            return self.mask;
        }
        let p = self.warp.regs.pred[(inst.guard & !GUARD_NOT) as usize];
        self.mask & if inst.guard & GUARD_NOT != 0 { !p } else { p }
    }

    #[inline(always)]
    fn instruction<const COVER: bool>(&mut self) -> Run<Flow> {
        let kernel = self.kernel;
        // The lowering ends every kernel with `exit`, so `pc` is always in range.
        let inst: &Inst = &kernel.code[self.pc as usize];
        self.executed += 1;
        let m = self.guarded(inst);
        if m == 0 {
            // A branch counts as executed even if no lane takes it.
            if COVER && matches!(inst.op, Op::Bra { .. }) {
                self.cover();
            }
            self.pc += 1;
            return Ok(Flow::Next);
        }
        if COVER {
            self.cover();
        }
        if W::ON && inst.op.concerns_others() {
            self.warp.trace.add((self.pc, m));
            self.watch.together(self.mask);
        }
        if W::ON && !self.warp.late.is_empty() {
            self.take_late(&inst.op, m)?;
        }
        self.execute(inst, m)
    }

    /// Executes the present instruction for the lanes `m`.
    #[inline(always)]
    fn execute(&mut self, inst: &Inst, m: u32) -> Run<Flow> {
        if !W::ON && self.streamed && !inst.op.is_weak() {
            self.drain();
        }
        match &inst.op {
            // SAFETY: the constructor of `f` checked that this processor has the instructions that
            // it uses.
            Op::Alu { f, s, .. } => unsafe { f(&mut self.warp.regs, s, m) },
            Op::Bra { target } => return Ok(self.branch(m, *target)),
            Op::BrxIdx { index, table } => {
                let kernel = self.kernel;
                return self.indexed_branch(m, *index, &kernel.tables[*table as usize]);
            }
            Op::Ld(access) => return self.load(access, m),
            Op::St(access) => {
                self.store(access, m)?;
                // Other warps may read the store before the load in front of it has its value.
                if W::ON && !self.warp.late.is_empty() {
                    self.pc += 1;
                    return Ok(Flow::GiveWay);
                }
            }
            Op::Atom(atomic) => return self.atomic(atomic, m),
            Op::Multimem { access, .. } => return self.multimem(*access, m),
            Op::Fence(fence) => {
                std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
                self.watch.fence(m, self.pc, *fence);
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
            Op::ClusterArrive { aligned, .. } => {
                self.split_off(m);
                return self.arrive_at_cluster(*aligned);
            }
            Op::ClusterWait { aligned } => {
                self.split_off(m);
                return self.wait_for_cluster(*aligned);
            }
            Op::BarrierVote { id, p } => self.vote(*id, *p, m),
            Op::BarrierResult { what, d } => self.outcome(*what, *d, m),
            Op::Mbar { op, addr, space } => return self.mbarrier(op, addr, *space, m),
            Op::PendingCount { d, state } => self.pending_count(*d, *state, m)?,
            Op::Bulk(op) => self.bulk(op, m)?,
            Op::Copy(op) => self.copy(op, m)?,
            Op::Wgmma(op) => {
                self.split_off(m);
                return self.wgmma(op);
            }
            Op::Line { addr, discards } => self.line(addr, *discards, m)?,
            Op::CheckRows { addr, rows } => self.check_rows(addr, *rows, m)?,
            Op::CheckRegisters(check) => self.check_registers(*check, m)?,
            Op::UnwrittenRegisters(read) => self.unwritten_registers(*read, m)?,
            Op::Print { format, arguments, d } => self.print(*format, *arguments, *d, m)?,
            Op::Sleep => {
                self.pc += 1;
                return Ok(Flow::GiveWay);
            }
            Op::Exit => return self.exit(m),
            Op::Trap => return stop(FaultKind::Trap, lanes::lanes(m).next()),
            Op::CallThroughPointer => {
                let what = "a call through a pointer".to_owned();
                return stop(FaultKind::Unsupported(what), lanes::lanes(m).next());
            }
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
            self.watch.in_step(self.mask);
            self.warp.converged.part(m, self.pc);
            // Hardware does not guarantee that the arms join again by themselves.
            let one_in = self.env.apart_one_in;
            let draw = crate::seeds::mix(self.env.poison ^ (self.env.executed + self.executed));
            if one_in != 0 && draw.is_multiple_of(one_in) {
                self.apart = true;
            }
            // Run the lower arm first; the other one waits for it at the join. Arms that stay apart
            // come in any order.
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
        self.watch.in_step(m);
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
            self.warp.converged.part(same, self.pc);
            self.push(same, target, GroupState::Ready);
        }
        Ok(Flow::Gone)
    }

    fn exit(&mut self, m: u32) -> Run<Flow> {
        self.side_effect = true;
        if m != self.mask {
            self.watch.in_step(self.mask);
        }
        self.warp.live &= !m;
        self.mask &= !m;
        // Groups that wait for lanes of this warp must check again.
        for g in &mut self.warp.groups {
            if matches!(g.state, GroupState::Lanes { .. }) {
                g.state = GroupState::Ready;
            }
        }
        if !self.warp.groups.is_empty() {
            self.none_waits(m)?;
            self.recount_barriers()?;
        }
        if self.warp.live == 0 {
            self.leave_warpgroup()?;
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
                match self.env.clock {
                    Clock::Virtual(_) => ns += self.executed * crate::device::VIRTUAL_NS_PER_WARP_INSTRUCTION,
                    Clock::Stepped(_) => self.note_clock_reading(ns, m),
                    Clock::Real => {}
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
        let (apart, spun) = (self.apart, self.spun);
        self.warp.groups.push(Group { mask, pc, state, deferred: false, apart, spun });
    }

    /// Parks the running group.
    fn park(&mut self, state: GroupState, deferred: bool) {
        let (apart, spun) = (self.apart, self.spun);
        self.warp.groups.push(Group { mask: self.mask, pc: self.pc, state, deferred, apart, spun });
    }

    /// Keeps the lanes `m` of the running group; the others continue at the next instruction.
    fn split_off(&mut self, m: u32) {
        if m != self.mask {
            self.watch.in_step(self.mask);
            self.warp.converged.part(m, self.pc);
            self.push(self.mask & !m, self.pc + 1, GroupState::Ready);
            self.mask = m;
        }
    }

    /// Takes up the runnable group with the lowest program counter. False if there is none.
    pub(super) fn next_group(&mut self) -> bool {
        // The lowest one that has not given way, or else that has.
        let (mut best, mut deferred) = ((0, u32::MAX), (0, u32::MAX));
        for (i, g) in self.warp.groups.iter().enumerate() {
            match g.state {
                GroupState::Ready if !g.deferred && g.pc < best.1 => best = (i, g.pc),
                GroupState::Ready if g.deferred && g.pc < deferred.1 => deferred = (i, g.pc),
                _ => {}
            }
        }
        if best.1 == u32::MAX {
            self.warp.groups.iter_mut().for_each(|g| g.deferred = false);
            best = deferred;
        }
        if best.1 == u32::MAX {
            return false;
        }
        let g = self.warp.groups.swap_remove(best.0);
        (self.mask, self.pc, self.apart, self.spun) = (g.mask, g.pc, g.apart, g.spun);
        true
    }

    /// Yields to another group of the warp or, when all groups have had their turn, to other warps.
    fn give_way(&mut self) -> bool {
        if self.warp.groups.iter().any(|g| g.state == GroupState::Ready && !g.deferred) {
            self.park(GroupState::Ready, true);
            return self.next_group();
        }
        self.warp.groups.iter_mut().for_each(|g| g.deferred = false);
        self.park(GroupState::Ready, false);
        false
    }

    /// With several groups: merges those that stand where the running one stands, and prefers the
    /// lowest one.
    #[inline(always)]
    fn reconverge(&mut self) {
        let pc = self.pc;
        let mut lower = false;
        let mut i = 0;
        while let Some(g) = self.warp.groups.get(i) {
            match g.state {
                GroupState::Ready | GroupState::Lanes { .. } if g.pc == pc && !g.apart && !self.apart => {
                    self.mask |= g.mask;
                    // Lanes that join spin if both groups do.
                    self.spun = if g.spun == 0 { 0 } else { self.spun };
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
            // Groups that yielded before may run again once no other group is ready.
            let fresh = |g: &Group| g.state == GroupState::Ready && !g.deferred;
            if !self.warp.groups.iter().any(fresh) {
                self.warp.groups.iter_mut().for_each(|g| g.deferred = false);
            }
            self.park(GroupState::Ready, true);
            self.next_group();
        }
    }

    /// Notes a change that other warps can observe.
    fn changed(&mut self) {
        self.side_effect = true;
        self.spun = 0;
        self.warp.groups.iter_mut().for_each(|g| g.spun = 0);
        if !self.warp.polls.is_empty() {
            self.warp.polls.clear();
        }
        self.warp.spinning = false;
        self.warp.waiting = None;
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

    #[inline(always)]
    fn address(&self, a: &crate::ir::Addr, lane: usize) -> u64 {
        self.warp.regs.address(a, lane)
    }
}
