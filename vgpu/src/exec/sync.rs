//! Operations across lanes and warps: shuffles, votes, block barriers, mbarriers.

use super::bulk_queue::Landed;
use super::lanes::{lanes, mask_of, put};
use super::state::{BlockState, Exec, Flow, GroupState, Run, Stop, stop};
use crate::check::hooks::{Hooks, Part, Place};
use crate::check::record::{How, Update};
use crate::fault::{FaultKind, WaitingFor};
use crate::ir::{
    Addr, BARRIERS, BarrierKind, CLUSTER_BARRIER, MbarOp, NAMED_BARRIERS, Op, Rmw, SINK, Scope, Sem,
    ShflMode, Space, Votes, WarpOp,
};
use crate::mbarrier::Mbarrier;
use crate::registers::Regs;

/// Lanes of a shuffle that read from absent lanes of its mask, and these absent lanes.
#[derive(Clone, Copy, Default)]
struct Missed {
    readers: u32,
    sources: u32,
}

impl<W: Hooks> Exec<'_, W> {
    /// Executes a warp-wide instruction for every member mask whose lanes have all arrived; the
    /// other lanes wait.
    pub(super) fn warp_wide(&mut self, op: &WarpOp, mask_slot: u32) -> Run<Flow> {
        let masks = self.warp.regs.r32[mask_slot as usize];
        self.gather();
        let (mut todo, mut done) = (self.mask, 0);
        let mut waiting = 0;
        while todo != 0 {
            let mask = masks[todo.trailing_zeros() as usize];
            let here = mask_of(|i| masks[i] == mask) & todo;
            todo &= !here;
            if here != self.mask {
                self.warp.converged.part(here, self.pc);
            }
            if here & !mask != 0 {
                let kind = FaultKind::BadMemberMask { mask, lanes: here };
                return stop(kind, lanes(here & !mask).next());
            }
            let needed = mask & self.warp.live;
            let absent = mask & !needed;
            // Without checks a lane that is there is elected. A product would be one of registers
            // that absent lanes never wrote.
            let tolerated = !W::ON && matches!(op, WarpOp::Elect { .. });
            if absent != 0 && op.needs_all_members() && !tolerated {
                return stop(FaultKind::AbsentMembers { mask, absent }, lanes(here).next());
            }
            let elsewhere = needed & !here;
            if elsewhere == 0 || self.wait_elsewhere(op, elsewhere, mask) {
                if matches!(op, WarpOp::Sync) {
                    self.warp.converged.meet(here);
                    if W::ON {
                        self.watch.sync_warp(mask & self.warp.live);
                    }
                } else if W::ON {
                    self.watch.in_step(needed);
                }
                let missed = match *op {
                    WarpOp::Product { product } => {
                        self.warp_product(product);
                        Missed::default()
                    }
                    _ if elsewhere != 0 => self.execute_with_elsewhere(op, needed, elsewhere, mask),
                    _ => self.execute_warp_op(op, here, mask),
                };
                if W::ON && missed.sources & absent != 0 {
                    let absent = missed.sources & absent;
                    return stop(FaultKind::AbsentMembers { mask, absent }, lanes(missed.readers).next());
                }
                done |= here;
            } else {
                waiting |= here;
                self.push(here, self.pc, GroupState::Lanes { mask });
            }
        }
        debug_assert_eq!(done | waiting, self.mask);
        if done == 0 {
            return Ok(Flow::Gone);
        }
        self.mask = done;
        self.pc += 1;
        Ok(Flow::Next)
    }

    /// Takes in the groups that wait at the running one's instruction, however long they have
    /// stayed apart.
    pub(super) fn gather(&mut self) {
        let pc = self.pc;
        self.apart = false;
        for g in
            self.warp.groups.extract_if(.., |g| g.pc == pc && matches!(g.state, GroupState::Lanes { .. }))
        {
            self.mask |= g.mask;
        }
    }

    /// Whether the lanes `missing` all wait at other places, for instructions of the same
    /// qualifiers and member mask. By the PTX manual they meet: compilers may copy a collective
    /// into both sides of a branch.
    fn wait_elsewhere(&self, op: &WarpOp, missing: u32, mask: u32) -> bool {
        let there =
            self.warp.groups.iter().filter(|g| self.waits_for(g, op, mask)).fold(0, |a, g| a | g.mask);
        missing & !there == 0
    }

    fn waits_for(&self, g: &super::Group, op: &WarpOp, mask: u32) -> bool {
        g.state == GroupState::Lanes { mask }
            && matches!(&self.kernel.code[g.pc as usize].op, Op::Warp { op: other, .. } if op.meets(other))
    }

    /// Executes a warp-wide instruction for the lanes `all`. The lanes `elsewhere` of these wait at
    /// other places, with other registers, and continue behind it.
    fn execute_with_elsewhere(&mut self, op: &WarpOp, all: u32, elsewhere: u32, mask: u32) -> Missed {
        let Operands { inputs, outputs } = op.operands();
        let own: Vec<_> = inputs.iter().chain(&outputs).map(|&r| (r, self.warp.regs.row(r))).collect();
        let mut rows: Vec<_> = inputs.iter().map(|&r| self.warp.regs.row(r)).collect();
        let mut released = vec![];
        for at in 0..self.warp.groups.len() {
            let g = &self.warp.groups[at];
            if !self.waits_for(g, op, mask) {
                continue;
            }
            let Op::Warp { op: other, .. } = &self.kernel.code[g.pc as usize].op else { continue };
            let theirs = other.operands();
            for (row, &r) in rows.iter_mut().zip(&theirs.inputs) {
                let there = self.warp.regs.row(r);
                lanes(g.mask).for_each(|i| row[i] = there[i]);
            }
            released.push((g.mask, theirs.outputs));
            let g = &mut self.warp.groups[at];
            g.state = GroupState::Ready;
            g.apart = false;
            g.pc += 1;
        }
        let missed = match *op {
            // Two inputs of a shuffle may be one register here, and differ at the other places.
            WarpOp::Shfl { mode, d, p, .. } => {
                let [src, b, c] = std::array::from_fn(|k| rows[k].map(|v| v as u32));
                let (absent, poison) = (mask & !self.warp.live, self.env.poison as u32);
                self.warp.regs.shuffle(mode, [d, p], [&src, &b, &c], [all, absent], poison)
            }
            // Other instructions have one input at most.
            _ => {
                inputs.iter().zip(&rows).for_each(|(&r, row)| self.warp.regs.set_row(r, elsewhere, row));
                self.execute_warp_op(op, all, mask)
            }
        };
        let results: Vec<_> = outputs.iter().map(|&r| self.warp.regs.row(r)).collect();
        // The other lanes' registers of this instruction hold something else.
        own.iter().for_each(|(r, row)| self.warp.regs.set_row(*r, elsewhere, row));
        for (lanes, outputs) in released {
            outputs.iter().zip(&results).for_each(|(&r, row)| self.warp.regs.set_row(r, lanes, row));
        }
        missed
    }

    fn execute_warp_op(&mut self, op: &WarpOp, here: u32, mask: u32) -> Missed {
        let absent = mask & !self.warp.live;
        let regs = &mut self.warp.regs;
        let flag = |pred: &[u32], p: u32| pred[p as usize] & here;
        let set = |pred: &mut Vec<u32>, p: u32, v: bool| {
            let old = &mut pred[p as usize];
            *old = *old & !here | if v { here } else { 0 };
        };
        match *op {
            WarpOp::Sync | WarpOp::Product { .. } => {}
            WarpOp::Shfl { mode, d, p, a, lane, clamp } => {
                let src = regs.r32[a as usize];
                let (b, c) = (regs.r32[lane as usize], regs.r32[clamp as usize]);
                let poison = self.env.poison as u32;
                return regs.shuffle(mode, [d, p], [&src, &b, &c], [here, absent], poison);
            }
            WarpOp::VoteAll { d, p } => {
                let v = flag(&regs.pred, p) == here;
                set(&mut regs.pred, d, v);
            }
            WarpOp::VoteAny { d, p } => {
                let v = flag(&regs.pred, p) != 0;
                set(&mut regs.pred, d, v);
            }
            WarpOp::VoteUni { d, p } => {
                let f = flag(&regs.pred, p);
                set(&mut regs.pred, d, f == 0 || f == here);
            }
            WarpOp::Ballot { d, p } => {
                let v = flag(&regs.pred, p);
                put(regs, d, here, &[v; 32]);
            }
            WarpOp::MatchAny { d, a, wide } => {
                let v = regs.row(Register::sized(a, wide));
                for i in lanes(here) {
                    regs.r32[d as usize][i] =
                        lanes(here).filter(|&k| v[k] == v[i]).fold(0, |acc, k| acc | 1 << k);
                }
            }
            WarpOp::MatchAll { d, p, a, wide } => {
                let v = regs.row(Register::sized(a, wide));
                let first = here.trailing_zeros() as usize % 32;
                let all = lanes(here).all(|i| v[i] == v[first]);
                put(regs, d, here, &[if all { here } else { 0 }; 32]);
                set(&mut regs.pred, p, all);
            }
            WarpOp::Redux { op, d, a } => {
                let v = regs.r32[a as usize];
                let fold = |f: fn(u32, u32) -> u32| lanes(here).map(|i| v[i]).reduce(f).unwrap_or(0);
                let r = match op {
                    Rmw::Add => fold(u32::wrapping_add),
                    Rmw::Min => fold(u32::min),
                    Rmw::Max => fold(u32::max),
                    Rmw::MinS => fold(|x, y| (x as i32).min(y as i32) as u32),
                    Rmw::MaxS => fold(|x, y| (x as i32).max(y as i32) as u32),
                    Rmw::And => fold(|x, y| x & y),
                    Rmw::Or => fold(|x, y| x | y),
                    _ => fold(|x, y| x ^ y),
                };
                put(regs, d, here, &[r; 32]);
            }
            WarpOp::Mma { mma, d, a, b } => mma.multiply(regs, &d, &a, &b),
            WarpOp::Elect { d, p } => {
                // The hardware chooses the lane, always the same one for a mask: here the lowest.
                let leader = (mask & here).trailing_zeros() % 32;
                put(regs, d, here, &[leader; 32]);
                let old = &mut regs.pred[p as usize];
                *old = *old & !here | 1 << leader;
            }
        }
        Missed::default()
    }

    /// `barrier.sync` and `barrier.arrive`: a warp counts once all of its live lanes are there.
    pub(super) fn barrier(&mut self, kind: BarrierKind, id: u32, count: u32, aligned: bool) -> Run<Flow> {
        let first = self.mask.trailing_zeros() as usize;
        let uniform = |slot: u32| {
            let row = &self.warp.regs.r32[slot as usize];
            lanes(self.mask).find(|&i| row[i] != row[first]).map_or(Ok(row[first]), Err)
        };
        let same = |v: Result<u32, usize>| {
            v.or_else(|i| {
                stop(FaultKind::BadBarrier { barrier: 0, message: "lanes disagree".into() }, Some(i))
            })
        };
        let number = same(uniform(id))?;
        let threads = if count == SINK { None } else { Some(same(uniform(count))?) };
        let bad = |message: String| stop(FaultKind::BadBarrier { barrier: number, message }, Some(first));
        if number as usize >= NAMED_BARRIERS {
            return bad("barriers are numbered 0 to 15".into());
        }
        // The barrier has completed in this slice, whose end releases the warps that wait there. An
        // arrival is for the next phase, so it comes after that.
        if self.block.completed >> number & 1 != 0 {
            return Ok(Flow::GiveWay);
        }
        if let Some(n) = threads.filter(|&n| n == 0 || n % 32 != 0) {
            return bad(format!("thread count {n} is not a positive multiple of 32"));
        }
        if aligned {
            self.one_aligned_barrier(number)?;
        }
        let arrive_only = kind == BarrierKind::Arrive;
        self.push(
            self.mask,
            self.pc,
            GroupState::Barrier { id: number, count: threads, arrive_only, arrived: false },
        );
        self.changed();
        self.count_warp(number)?;
        Ok(Flow::Gone)
    }

    /// Checks that the lanes of a warp, which have all reached a barrier, were sure to reach it
    /// together, unless it is aligned. By the manual each lane waits. On GPUs, lanes of a diverged
    /// warp have passed such a barrier (docs/KERNELS.md). In front of an aligned barrier the
    /// assembler converges the warp itself. CUDA's `this_grid().sync()` relies on the manual, so
    /// its barriers pass. Lanes that have exited meanwhile miss nothing behind the barrier.
    fn came_together(&mut self, barrier: u32, threads: Option<u32>) -> Run<()> {
        let live = self.warp.live;
        if self.warp.converged.with(live.trailing_zeros()) & live == live
            || self.kernel.reads_workspace && threads.is_none()
        {
            return Ok(());
        }
        let code = &self.kernel.code;
        let apart = |g: &&super::Group| {
            g.waits_at(barrier) && matches!(code[g.pc as usize].op, Op::Barrier { aligned: false, .. })
        };
        // The lanes that came last.
        let Some(g) = self.warp.groups.iter().rev().find(apart) else { return Ok(()) };
        let first = g.mask.trailing_zeros();
        self.pc = g.pc;
        let together = self.warp.converged.with(first) & live;
        let parted_on = self.kernel.place_of(self.warp.converged.parted_at).ptx_line;
        stop(FaultKind::ApartAtBarrier { barrier, together, live, parted_on }, Some(first as usize))
    }

    /// [`CheckConfig::strict_exits`]: checks that no lane of the warp has exited in front of a
    /// barrier for all threads.
    ///
    /// [`CheckConfig::strict_exits`]: crate::CheckConfig::strict_exits
    fn none_has_exited(&mut self, barrier: u32) -> Run<()> {
        let exited = self.warp.threads & !self.warp.live;
        let Some(g) = self.warp.groups.iter().find(|g| g.waits_at(barrier)).filter(|_| exited != 0) else {
            return Ok(());
        };
        let first = lanes(g.mask).next();
        self.pc = g.pc;
        let message =
            format!("a warp waits for all threads of the block, but lanes {exited:#010x} of it have ended");
        stop(FaultKind::BadBarrier { barrier, message }, first)
    }

    /// An aligned barrier is one instruction for all lanes of the warp. Lanes may reach it late,
    /// after another wait, but none may reach another barrier.
    pub(super) fn one_aligned_barrier(&self, barrier: u32) -> Run<()> {
        if self.warp.groups.iter().any(|g| g.waits_for_its_warp() && g.pc != self.pc) {
            let kind = FaultKind::DivergentBarrier { barrier, lanes: self.mask, live: self.warp.live };
            return stop(kind, lanes(self.mask).next());
        }
        Ok(())
    }

    /// The lanes `leaving` exit. A fault if other lanes of the warp already wait for them at an
    /// aligned instruction of the cluster's barrier, which by the manual all threads of the warp
    /// execute. Barriers of the block wait for the threads that have not exited.
    pub(super) fn none_waits(&mut self, leaving: u32) -> Run<()> {
        let code = &self.kernel.code;
        let alone = |pc: u32| matches!(code[pc as usize].op, Op::ClusterArrive { aligned: false, .. });
        let waits = |g: &&super::Group| g.waits_at(CLUSTER_BARRIER) && !alone(g.pc);
        let Some(g) = self.warp.groups.iter().find(waits) else { return Ok(()) };
        let (barrier, live) = (CLUSTER_BARRIER, self.warp.live | leaving);
        let kind = FaultKind::DivergentBarrier { barrier, lanes: g.mask, live };
        let lane = lanes(g.mask).next();
        self.pc = g.pc;
        stop(kind, lane)
    }

    /// Counts the warp at barrier `number` if all of its live lanes are there.
    pub(super) fn count_warp(&mut self, number: u32) -> Run<()> {
        let here = |s: GroupState| match s {
            GroupState::Barrier { id, count, arrived: false, .. } if id == number => Some(count),
            _ => None,
        };
        let (mut union, mut threads) = (0, None);
        for g in &self.warp.groups {
            if let Some(count) = here(g.state) {
                union |= g.mask;
                threads = count;
            }
        }
        if union == 0 || union != self.warp.live {
            return Ok(());
        }
        if number != CLUSTER_BARRIER {
            self.came_together(number, threads)?;
            if self.block.strict_exits && threads.is_none() {
                self.none_has_exited(number)?;
            }
        }
        self.warp.converged.meet(union);
        let relaxed = if number == CLUSTER_BARRIER { self.relaxed_arrivals() } else { 0 };
        for g in &mut self.warp.groups {
            if here(g.state).is_none() {
                continue;
            }
            if let GroupState::Barrier { arrive_only, arrived, .. } = &mut g.state {
                *arrived = true;
                if *arrive_only {
                    g.state = GroupState::Ready;
                    g.pc += 1;
                }
            }
        }
        if number == CLUSTER_BARRIER {
            self.watch.arrive_relaxed(relaxed);
            if union & !relaxed != 0 {
                self.watch.arrive(union & !relaxed, number);
            }
            self.warp.cluster_arrivals += 1;
            self.warp.cluster_waited = 0;
            self.block.arrive_at_cluster(self.warp.index);
            return Ok(());
        }
        self.watch.arrive(union, number);
        self.block.arrive(self.warp.index, number, threads).or_else(|kind| stop(kind, None))
    }

    /// After lanes have exited: the rest of the warp may now be complete at a barrier.
    pub(super) fn recount_barriers(&mut self) -> Run<()> {
        for number in 0..BARRIERS as u32 {
            if self
                .warp
                .groups
                .iter()
                .any(|g| matches!(g.state, GroupState::Barrier { id, .. } if id == number))
            {
                self.count_warp(number)?;
            }
        }
        Ok(())
    }

    /// The first part of `barrier.red`. A bad number is left to the barrier itself.
    pub(super) fn vote(&mut self, id: u32, p: u32, m: u32) {
        let regs = &self.warp.regs;
        for i in lanes(m) {
            if let Some(b) = self.block.barriers.get_mut(regs.r32[id as usize][i] as usize) {
                b.votes[0] += regs.pred[p as usize] >> i & 1;
                b.votes[1] += 1;
            }
        }
    }

    /// The last part of `barrier.red`.
    pub(super) fn outcome(&mut self, what: Votes, d: u32, m: u32) {
        let [yes, all] = self.warp.outcome;
        let regs = &mut self.warp.regs;
        for i in lanes(m) {
            let holds = match what {
                Votes::Count => {
                    regs.r32[d as usize][i] = yes;
                    continue;
                }
                Votes::All => yes == all,
                Votes::Any => yes != 0,
            };
            let old = &mut regs.pred[d as usize];
            *old = *old & !(1 << i) | u32::from(holds) << i;
        }
    }

    pub(super) fn mbarrier(&mut self, op: &MbarOp, addr: &Addr, space: Space, m: u32) -> Run<Flow> {
        let mut failed = None;
        let mut passed = (0, 0);
        // A warp mostly tests one mbarrier: the first lane's result is that of all then.
        let once = self.tests_once(op, addr, m);
        for i in lanes(if once { m & m.wrapping_neg() } else { m }) {
            let address = self.address(addr, i);
            let offset = Self::shared_offset(space, address).or_else(|kind| stop(kind, Some(i)))?;
            if self.block.is_remote(offset) {
                self.reaches_mbarrier(op, offset, space).or_else(|kind| stop(kind, Some(i)))?;
            }
            let bits = self.mbarrier_bits(offset).or_else(|kind| stop(kind, Some(i)))?;
            let place = |message: String| {
                Box::new(Stop { kind: FaultKind::Mbarrier { offset, message }, lane: Some(i as u32) })
            };
            if W::ON {
                self.watch_mbarrier(op, offset, bits, i, if once { m } else { 1 << i })?;
            }
            let regs = &mut self.warp.regs;
            let word = |regs: &Regs, slot: u32| regs.r32[slot as usize][i];
            let object = Mbarrier::from_bits(bits);
            let next = match *op {
                MbarOp::Init { count } => Mbarrier::new(word(regs, count)).map(Some),
                MbarOp::Inval => object.map(|_| None),
                MbarOp::Arrive { state, count, tx, drop, no_complete, .. } => object.and_then(|mut b| {
                    let n = if count == SINK { 1 } else { word(regs, count) };
                    let tx = (tx != SINK).then(|| word(regs, tx));
                    let phase = b.phase;
                    if drop { b.arrive_drop(n, tx) } else { b.arrive(n, tx) }?;
                    if no_complete && b.phase != phase {
                        return Err(format!("an arrival of .noComplete completes phase {phase}"));
                    }
                    if state != SINK {
                        regs.r64[state as usize][i] = bits;
                    }
                    Ok(Some(b))
                }),
                MbarOp::ExpectTx { tx } => {
                    object.and_then(|mut b| b.expect_tx(word(regs, tx)).map(|()| Some(b)))
                }
                MbarOp::CompleteTx { tx } => {
                    object.and_then(|mut b| b.complete_tx(word(regs, tx)).map(|()| Some(b)))
                }
                MbarOp::TestState { p, .. } | MbarOp::TestParity { p, .. } => {
                    let now = object.as_ref().ok().copied();
                    let done = object.and_then(|b| match *op {
                        MbarOp::TestState { state, .. } => b.state_done(regs.r64[state as usize][i]),
                        MbarOp::TestParity { parity, .. } => Ok(b.parity_done(word(regs, parity))),
                        _ => Ok(false),
                    });
                    let done = done.map_err(place)?;
                    let tested = if once { m } else { 1 << i };
                    if W::ON && done {
                        match &mut passed {
                            // Lanes mostly wait together.
                            (mask, at) if *at == offset => *mask |= tested,
                            passed => {
                                self.watch.pass_mbarrier(passed.0, passed.1, op.order());
                                *passed = (tested, offset);
                            }
                        }
                    }
                    let old = &mut regs.pred[p as usize];
                    *old = *old & !tested | if done { tested } else { 0 };
                    if !done {
                        failed = Some((offset, bits));
                        self.warp.waiting = now.map(|b| WaitingFor::Mbarrier {
                            offset,
                            pending: b.pending,
                            pending_bytes: i64::from(b.tx),
                            phase: b.phase,
                        });
                    }
                    continue;
                }
            };
            let next = next.map_err(place)?;
            match (next, Mbarrier::from_bits(bits)) {
                (Some(next), Ok(old)) if next.phase != old.phase => self.watch.complete_mbarrier(offset),
                _ => {}
            }
            self.set_mbarrier_bits(offset, next.map_or(0, Mbarrier::to_bits))
                .or_else(|kind| stop(kind, Some(i)))?;
            self.changed();
        }
        if W::ON && passed.0 != 0 {
            self.watch.pass_mbarrier(passed.0, passed.1, op.order());
        }
        let Some((offset, bits)) = failed else {
            self.pc += 1;
            return Ok(Flow::Next);
        };
        self.poll(offset, bits);
        self.pc += 1;
        Ok(Flow::GiveWay)
    }

    /// Whether the lanes `m` all test the same phase of the same mbarrier.
    fn tests_once(&self, op: &MbarOp, addr: &Addr, m: u32) -> bool {
        let regs = &self.warp.regs;
        let same = |wide: bool, slot: u32| {
            if wide { uniform(&regs.r64[slot as usize], m) } else { uniform(&regs.r32[slot as usize], m) }
        };
        match *op {
            MbarOp::TestState { state, .. } => same(addr.wide, addr.slot) && same(true, state),
            MbarOp::TestParity { parity, .. } => same(addr.wide, addr.slot) && same(false, parity),
            _ => false,
        }
    }

    /// Watches an operation on an mbarrier before it happens: setting one up is a plain write,
    /// using it a strong access. A test may be one of several lanes `mask`.
    fn watch_mbarrier(&mut self, op: &MbarOp, offset: u64, bits: u64, lane: usize, mask: u32) -> Run<()> {
        let place = Place::Shared { offset };
        let (how, write) = match op {
            MbarOp::Init { .. } => {
                (How { init: true, ..How::generic(Sem::Weak, Scope::Cta, 8, Update::No) }, true)
            }
            MbarOp::Inval => (How::generic(Sem::Weak, Scope::Cta, 8, Update::No), true),
            // Each of them is one access, whatever the scope of the order that it makes.
            MbarOp::TestState { .. } | MbarOp::TestParity { .. } => {
                (How::generic(Sem::Relaxed, Scope::Cluster, 8, Update::No), false)
            }
            _ => (How::generic(Sem::Relaxed, Scope::Cluster, 8, Update::Replaces), true),
        };
        let violations: Vec<_> = if write {
            let (_, found) = self.watch.write(place, lane, self.pc, how, &bits.to_ne_bytes(), &[]);
            found.into_iter().map(|violation| (lane, violation)).collect()
        } else {
            self.watch.read(place, Part { lanes: mask, size: 8, width: 8, row: false }, self.pc, how).all
        };
        for (lane, violation) in violations {
            self.blame(place, violation, lane, how, write)?;
        }
        let misuse = match op {
            MbarOp::Init { .. } if Mbarrier::from_bits(bits).is_ok() && self.watch.has_mbarrier(offset) => {
                Some(
                    "its place holds a valid mbarrier, which mbarrier.inval ends before mbarrier.init begins another",
                )
            }
            MbarOp::Arrive { .. } if self.watch.is_unseen(offset) => Some(
                "no test_wait or try_wait has returned true for the last phase: one does, before the next arrival",
            ),
            _ => None,
        };
        if let Some(message) = misuse {
            self.undefined(FaultKind::Mbarrier { offset, message: message.into() }, lane)?;
        }
        match op {
            MbarOp::Init { .. } => self.watch.init_mbarrier(self.pc, offset),
            MbarOp::Inval => self.watch.inval_mbarrier(offset),
            MbarOp::Arrive { order, .. } => {
                self.watch.arrive_mbarrier(lane, self.pc, offset, *order);
                if order.scope == Scope::Cta && !order.relaxed && self.block.is_remote(offset) {
                    self.undefined(FaultKind::NarrowArrival, lane)?;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Watches the arrival that a lane's asynchronous copies make later.
    pub(super) fn watch_copy_arrival(&mut self, offset: u64, lane: usize) -> Run<()> {
        if !W::ON {
            return Ok(());
        }
        let (place, how) =
            (Place::Shared { offset }, How::generic(Sem::Relaxed, Scope::Cluster, 8, Update::Replaces));
        let bits = self.mbarrier_bits(offset).or_else(|kind| stop(kind, Some(lane)))?;
        let (_, found) = self.watch.write(place, lane, self.pc, how, &bits.to_ne_bytes(), &[]);
        found.map_or(Ok(()), |violation| self.blame(place, violation, lane, how, true))
    }

    /// Whether an operation may be on the mbarrier of another block of the cluster.
    fn reaches_mbarrier(&self, op: &MbarOp, offset: u64, space: Space) -> Result<(), FaultKind> {
        let message = match *op {
            _ if space == Space::Shared => "it is another block's, and the instruction is of .shared::cta",
            MbarOp::Init { .. } | MbarOp::Inval => {
                "it is another block's: a block initialises its own mbarriers"
            }
            MbarOp::TestState { .. } | MbarOp::TestParity { .. } => {
                "it is another block's: a block waits on its own mbarriers"
            }
            MbarOp::Arrive { state, .. } if state != SINK => {
                "it is another block's, of which an arrival returns no state: write _ for it"
            }
            _ => return Ok(()),
        };
        Err(FaultKind::Mbarrier { offset, message: message.into() })
    }

    fn mbarrier_bits(&mut self, offset: u64) -> Result<u64, FaultKind> {
        self.block.mbarrier_bits(offset)
    }

    fn set_mbarrier_bits(&mut self, offset: u64, bits: u64) -> Result<(), FaultKind> {
        self.block.set_mbarrier_bits(offset, bits)
    }

    pub(super) fn pending_count(&mut self, d: u32, state: u32, m: u32) -> Run<()> {
        for i in lanes(m) {
            let b = Mbarrier::from_bits(self.warp.regs.r64[state as usize][i])
                .or_else(|message| stop(FaultKind::Mbarrier { offset: 0, message }, Some(i)))?;
            self.warp.regs.r32[d as usize][i] = b.pending;
        }
        Ok(())
    }
}

impl BlockState {
    fn mbarrier_pointer(&mut self, offset: u64) -> Result<*mut u64, FaultKind> {
        if !offset.is_multiple_of(8) {
            return Err(FaultKind::Misaligned { addr: offset, align: 8 });
        }
        Ok(self.in_cluster(offset, 8)?.cast())
    }

    pub(super) fn mbarrier_bits(&mut self, offset: u64) -> Result<u64, FaultKind> {
        let p = self.mbarrier_pointer(offset)?;
        // SAFETY: in bounds and aligned; shared memory belongs to this thread alone.
        Ok(unsafe { p.read() })
    }

    pub(super) fn set_mbarrier_bits(&mut self, offset: u64, bits: u64) -> Result<(), FaultKind> {
        let p = self.mbarrier_pointer(offset)?;
        // SAFETY: as above.
        unsafe { p.write(bits) };
        Ok(())
    }

    /// An error unless there is an mbarrier at `offset`.
    pub(super) fn initialised(&mut self, offset: u64) -> Result<(), FaultKind> {
        let bits = self.mbarrier_bits(offset)?;
        Mbarrier::from_bits(bits).map(drop).map_err(|message| FaultKind::Mbarrier { offset, message })
    }

    /// A bulk copy of `bytes` bytes has landed.
    pub(super) fn complete_tx(&mut self, offset: u64, bytes: u32) -> Result<(), FaultKind> {
        let bits = self.mbarrier_bits(offset)?;
        let mut b = Mbarrier::from_bits(bits).map_err(|message| FaultKind::Mbarrier { offset, message })?;
        let phase = b.phase;
        b.complete_tx(bytes).map_err(|message| FaultKind::Mbarrier { offset, message })?;
        self.landed.push(Landed::Copy { offset });
        if b.phase != phase {
            self.landed.push(Landed::Phase { offset });
        }
        self.set_mbarrier_bits(offset, b.to_bits())
    }

    /// The arrival of a lane whose asynchronous copies have happened.
    pub(super) fn arrive_of_copies(&mut self, offset: u64) -> Result<(), FaultKind> {
        let bits = self.mbarrier_bits(offset)?;
        let mbarrier = |message| FaultKind::Mbarrier { offset, message };
        let mut b = Mbarrier::from_bits(bits).map_err(mbarrier)?;
        let phase = b.phase;
        b.arrive(1, None).map_err(mbarrier)?;
        if b.phase != phase {
            self.landed.push(Landed::Phase { offset });
        }
        self.set_mbarrier_bits(offset, b.to_bits())
    }

    /// The present phase of an mbarrier waits for one more arrival.
    pub(super) fn expect_one_more(&mut self, offset: u64) -> Result<(), FaultKind> {
        let bits = self.mbarrier_bits(offset)?;
        let mbarrier = |message| FaultKind::Mbarrier { offset, message };
        let mut b = Mbarrier::from_bits(bits).map_err(mbarrier)?;
        b.expect_one_more().map_err(mbarrier)?;
        self.set_mbarrier_bits(offset, b.to_bits())
    }
}

/// A register of one of the files.
#[derive(Clone, Copy)]
enum Register {
    R32(u32),
    R64(u32),
    Pred(u32),
}

impl Register {
    /// A register of 64 bits, or of 32.
    fn sized(slot: u32, wide: bool) -> Self {
        if wide { Register::R64(slot) } else { Register::R32(slot) }
    }
}

/// The registers that a warp-wide instruction reads and writes.
struct Operands {
    inputs: Vec<Register>,
    outputs: Vec<Register>,
}

impl WarpOp {
    /// Whether lanes at two instructions meet: those have the same qualifiers. Products of matrices
    /// are aligned, so all lanes execute one instruction.
    fn meets(&self, other: &WarpOp) -> bool {
        match (self, other) {
            (WarpOp::Mma { .. } | WarpOp::Product { .. }, _) => false,
            (WarpOp::Shfl { mode, .. }, WarpOp::Shfl { mode: theirs, .. }) => mode == theirs,
            (WarpOp::Redux { op, .. }, WarpOp::Redux { op: theirs, .. }) => op == theirs,
            (WarpOp::MatchAny { wide, .. }, WarpOp::MatchAny { wide: theirs, .. })
            | (WarpOp::MatchAll { wide, .. }, WarpOp::MatchAll { wide: theirs, .. }) => wide == theirs,
            _ => std::mem::discriminant(self) == std::mem::discriminant(other),
        }
    }

    /// The operands, in the same order for all instructions that meet.
    fn operands(&self) -> Operands {
        use Register::{Pred, R32};
        let (inputs, outputs) = match *self {
            WarpOp::Sync | WarpOp::Mma { .. } | WarpOp::Product { .. } => (vec![], vec![]),
            WarpOp::Shfl { d, p, a, lane, clamp, .. } => {
                (vec![R32(a), R32(lane), R32(clamp)], vec![R32(d), Pred(p)])
            }
            WarpOp::VoteAll { d, p } | WarpOp::VoteAny { d, p } | WarpOp::VoteUni { d, p } => {
                (vec![Pred(p)], vec![Pred(d)])
            }
            WarpOp::Ballot { d, p } => (vec![Pred(p)], vec![R32(d)]),
            WarpOp::MatchAny { d, a, wide } => (vec![Register::sized(a, wide)], vec![R32(d)]),
            WarpOp::MatchAll { d, p, a, wide } => (vec![Register::sized(a, wide)], vec![R32(d), Pred(p)]),
            WarpOp::Redux { d, a, .. } => (vec![R32(a)], vec![R32(d)]),
            WarpOp::Elect { d, p } => (vec![], vec![R32(d), Pred(p)]),
        };
        Operands { inputs, outputs }
    }
}

impl Regs {
    /// Executes a shuffle into `d` and `p` with the values, lane operands and clamp operands of all
    /// lanes. The lanes `here` take part, and the lanes `absent` of the mask are not there.
    #[inline(always)]
    fn shuffle(
        &mut self,
        mode: ShflMode,
        [d, p]: [u32; 2],
        [src, b, c]: [&[u32; 32]; 3],
        [here, absent]: [u32; 2],
        poison: u32,
    ) -> Missed {
        let (row, mut in_range) = (&mut self.r32[d as usize], 0);
        let mut missed = Missed::default();
        for i in lanes(here) {
            let (from, ok) = shuffle_source(mode, i as u32, b[i], c[i]);
            // A value read from a lane outside of the mask is undefined.
            let took_part = here >> from & 1 != 0;
            row[i] = if took_part { src[from as usize & 31] } else { poison };
            in_range |= u32::from(ok) << i;
            let misses = absent >> from & 1;
            missed.readers |= misses << i;
            missed.sources |= misses << from;
        }
        let old = &mut self.pred[p as usize];
        *old = *old & !here | in_range;
        missed
    }

    /// A register of all lanes, whatever its width.
    fn row(&self, register: Register) -> [u64; 32] {
        match register {
            Register::R32(r) => self.r32[r as usize].map(u64::from),
            Register::R64(r) => self.r64[r as usize],
            Register::Pred(r) => std::array::from_fn(|i| u64::from(self.pred[r as usize] >> i & 1)),
        }
    }

    /// Sets a register of the lanes `m`.
    fn set_row(&mut self, register: Register, m: u32, row: &[u64; 32]) {
        for i in lanes(m) {
            match register {
                Register::R32(r) => self.r32[r as usize][i] = row[i] as u32,
                Register::R64(r) => self.r64[r as usize][i] = row[i],
                Register::Pred(r) => {
                    let old = &mut self.pred[r as usize];
                    *old = *old & !(1 << i) | (row[i] as u32) << i;
                }
            }
        }
    }
}

/// Whether the lanes `m` of a register hold the same.
fn uniform<T: Copy + PartialEq>(row: &[T; 32], m: u32) -> bool {
    let first = row[m.trailing_zeros() as usize & 31];
    lanes(m).all(|i| row[i] == first)
}

/// Source lane of a shuffle, and whether it is in range, by the pseudo code of the PTX manual. `b`
/// is the lane operand. `c` holds the clamp value in bits 0..5 and the segment mask in bits 8..13.
fn shuffle_source(mode: ShflMode, lane: u32, b: u32, c: u32) -> (u32, bool) {
    let b = b & 0x1f;
    let clamp = c & 0x1f;
    let segment = c >> 8 & 0x1f;
    let max = lane & segment | clamp & !segment;
    let min = lane & segment;
    let (j, ok) = match mode {
        ShflMode::Up => {
            let j = lane as i32 - b as i32;
            (j, j >= max as i32)
        }
        ShflMode::Down => {
            let j = lane + b;
            (j as i32, j <= max)
        }
        ShflMode::Bfly => {
            let j = lane ^ b;
            (j as i32, j <= max)
        }
        ShflMode::Idx => {
            let j = min | b & !segment;
            (j as i32, j <= max)
        }
    };
    (if ok { j as u32 & 31 } else { lane }, ok)
}
