//! A grid that an exploration drives: it runs one step of one warp or copy at a time.

use super::{Grid, Locked, WarpRef};
use crate::exec::{Activity, Slice, Status};
use crate::explore::Actor;
use crate::fault::Fault;
use crate::float_mode::IeeeMode;
use crate::ir::{MbarOp, Op};

/// Instructions that a warp computes at the most before others get their turn.
const LONGEST_COMPUTATION: u64 = 10_000;

/// A step that was taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    /// It may depend on any other step.
    pub(crate) everything: bool,
    /// Others may find something new.
    pub(crate) changed: bool,
}

#[allow(clippy::result_large_err)] // See `Grid::step`.
impl Grid {
    /// Prepares the grid for an exploration: all blocks that fit are resident, lanes that part join
    /// again where they meet, and warps that wait do not rest.
    pub(crate) fn begin_exploration(&mut self) {
        self.resting.on = false;
        self.env.apart_one_in = 0;
        while self.has_room() {
            self.admit();
        }
    }

    /// Lets warps compute up to their next steps. True if the grid has ended.
    pub(crate) fn compute(&mut self) -> Result<bool, Fault> {
        let done = self.compute_all();
        self.fail_with(done)
    }

    fn compute_all(&mut self) -> Result<bool, Box<Fault>> {
        self.refresh_table();
        let checker = self.checker();
        let mut locked = Locked::new(checker.as_ref());
        while self.live_blocks > 0 {
            let Some(at) = self.ready.iter().position(|&warp| !self.is_at_step(warp)) else { break };
            let Some(pick) = self.ready.remove(at) else { break };
            let mut all = Slice { status: Status::Ready, executed: 0, activity: Activity::Neutral };
            while all.status == Status::Ready && all.executed < LONGEST_COMPUTATION && !self.is_at_step(pick)
            {
                let one = self.run_picked(pick, 1, &mut locked)?;
                all = Slice { status: one.status, executed: all.executed + one.executed.max(1), ..all };
            }
            if all.status == Status::Done {
                // Others may wait for the rest of the block.
                all.activity = Activity::Progress;
            }
            let endless = all.executed >= LONGEST_COMPUTATION && all.status == Status::Ready;
            self.account(pick, all, &mut locked)?;
            if endless {
                break;
            }
        }
        Ok(self.live_blocks == 0)
    }

    /// Whether the next instruction of a warp is a step.
    fn is_at_step(&self, at: WarpRef) -> bool {
        self.next_op(at).is_none_or(Op::is_step)
    }

    fn next_op(&self, at: WarpRef) -> Option<&Op> {
        let warp = &self.blocks[at.block as usize].warps[at.warp as usize];
        self.env.kernel.code.get(warp.next_pc()? as usize).map(|inst| &inst.op)
    }

    /// Adds the warps and copies of the grid that can take a step. Warps that would find nothing
    /// new are left out.
    pub(crate) fn actors(&self, device: usize, all: &mut Vec<Actor>) {
        let waits = |at: &&WarpRef| {
            self.blocks[at.block as usize].warps[at.warp as usize].waits.idle_epoch == self.epoch
        };
        let mut warps: Vec<_> = self.ready.iter().filter(|at| !waits(at)).collect();
        // The order of the queue depends on the schedule.
        warps.sort_unstable_by_key(|at| (at.block, at.warp));
        all.extend(warps.into_iter().map(|at| Actor::Warp { device, block: at.block, warp: at.warp }));
        for (slot, block) in (0..).zip(&self.blocks) {
            let copies = 0..block.state.copy_steps();
            all.extend(copies.map(|index| Actor::Copy { device, block: slot, index }));
        }
    }

    /// Takes a step of one of [`Grid::actors`].
    pub(crate) fn take_step(&mut self, actor: Actor) -> Result<Step, Fault> {
        let _mode = IeeeMode::enter();
        let step = match actor {
            Actor::Warp { block, warp, .. } => self.step_warp(WarpRef { block, warp }),
            Actor::Copy { block, index, .. } => self.step_copy(block, index),
        };
        self.fail_with(step)
    }

    fn step_warp(&mut self, at: WarpRef) -> Result<Step, Box<Fault>> {
        let (mut everything, mut looks) = (true, false);
        if let Some(op) = self.next_op(at) {
            everything = self.check.is_none() || !matches!(op, Op::Ld(_) | Op::St(_) | Op::Atom(_));
            looks = match op {
                Op::Ld(_) | Op::Multimem { loads: true, .. } => true,
                Op::Mbar { op, .. } => {
                    matches!(op, MbarOp::TestState { .. } | MbarOp::TestParity { .. })
                }
                _ => false,
            };
        }
        self.ready.retain(|warp| *warp != at);
        let checker = self.checker();
        let mut locked = Locked::new(checker.as_ref());
        let mut slice = self.run_picked(at, 1, &mut locked)?;
        if looks && slice.activity == Activity::Progress {
            slice.activity = Activity::Neutral;
        }
        let changed = slice.activity == Activity::Progress;
        self.account(at, slice, &mut locked)?;
        Ok(Step { everything, changed })
    }

    fn step_copy(&mut self, slot: u32, index: usize) -> Result<Step, Box<Fault>> {
        let state = &mut self.blocks[slot as usize].state;
        state.step_copy(&self.env.table, index).map_err(|late| self.late_fault(slot, late))?;
        self.note_landed(slot);
        self.poll_again();
        Ok(Step { everything: true, changed: true })
    }

    /// Called when no actor can take a step. True if waiting warps should poll once more.
    pub(crate) fn may_go_on(&mut self) -> Result<bool, Fault> {
        let stalled = self.may_be_stalled();
        self.poll_again();
        self.fail_with(stalled)
    }

    /// Makes waiting warps poll again after a change.
    pub(crate) fn poll_again(&mut self) {
        self.new_epoch();
    }
}
