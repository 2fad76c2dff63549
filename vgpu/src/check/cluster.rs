//! Checks of the blocks of a cluster: whose shared memory an address is in, their barrier, and
//! accesses to memory of a block that may have ended.

use super::block::BlockCheck;
use super::clock::{self, Key};
use super::grids::Grids;
use super::past::CausalPast;
use super::record::How;
use super::report;
use crate::exec::bulk_queue::Landed;
use crate::exec::cluster::rank_of;
use crate::exec::lanes::lanes;
use crate::ir::CLUSTER_BARRIER;

/// The other blocks of a cluster, as seen from one of them.
#[derive(Debug, Default)]
pub(crate) struct Peers<'a> {
    rank: u32,
    /// By number in the cluster, without the block itself. Empty in a cluster of one block.
    others: Vec<Option<&'a mut BlockCheck>>,
}

impl<'a> Peers<'a> {
    pub(crate) fn new(rank: u32, others: Vec<Option<&'a mut BlockCheck>>) -> Self {
        Self { rank, others }
    }

    /// Whether an address is that of another block's shared memory.
    pub(super) fn is_remote(&self, address: u64) -> bool {
        !self.others.is_empty() && rank_of(address) != self.rank
    }

    /// The other block that has an address; `None` where it is the block itself.
    pub(super) fn other(&mut self, address: u64) -> Option<&mut BlockCheck> {
        if !self.is_remote(address) {
            return None;
        }
        self.others.get_mut(rank_of(address) as usize)?.as_deref_mut()
    }

    /// The block that has an address; `own` is the one whose peers these are.
    pub(super) fn of<'b>(&'b mut self, own: &'b mut BlockCheck, address: u64) -> &'b mut BlockCheck {
        self.other(address).unwrap_or(own)
    }

    /// The same as [`Peers::of`], to read.
    pub(super) fn at<'b>(&'b self, own: &'b BlockCheck, address: u64) -> &'b BlockCheck {
        if !self.is_remote(address) {
            return own;
        }
        self.others.get(rank_of(address) as usize).and_then(Option::as_deref).unwrap_or(own)
    }

    /// Records the progress of copies of the block `own`.
    pub(crate) fn landed(&mut self, own: &mut BlockCheck, landed: &Landed) {
        match *landed {
            Landed::Copies { .. } => own.landed(landed),
            Landed::Copy { offset } | Landed::Phase { offset } => self.of(own, offset).landed(landed),
        }
    }

    /// The barrier of a cluster of these blocks completes: each of them continues behind all.
    pub(crate) fn complete_barrier<'b>(blocks: impl Iterator<Item = &'b mut BlockCheck>) {
        let barrier = CLUSTER_BARRIER as usize;
        let mut all = CausalPast::default();
        let mut blocks: Vec<_> = blocks.collect();
        for block in &mut blocks {
            block.complete(barrier);
            all.join(block.opened(barrier));
        }
        blocks.into_iter().for_each(|block| block.open(barrier, &all));
    }
}

/// The last access of an actor to shared memory of another block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Visit {
    tick: u32,
    pc: u32,
    how: How,
    wrote: bool,
}

impl BlockCheck {
    /// An actor of another block accesses shared memory of this one.
    pub(super) fn visit(&mut self, actor: Key, tick: u32, pc: u32, how: How, wrote: bool) {
        self.visits.insert(actor, Visit { tick, pc, how, wrote });
    }

    /// Lanes of another block's warp access shared memory of this one.
    pub(super) fn visit_by(&mut self, (warp, mask): (Key, u32), tick: u32, pc: u32, how: How, wrote: bool) {
        lanes(mask).for_each(|lane| self.visit(clock::lane(warp, lane), tick, pc, how, wrote));
    }

    /// The block ends: returns an access to its memory by another block that is not ordered before
    /// the end, as its actor, its instruction, and the missing order.
    pub(crate) fn unordered_visitor(&self, grids: &Grids) -> Option<(Key, u32, String)> {
        let end = (!self.visits.is_empty()).then(|| self.end())?;
        let late =
            self.visits.iter().filter(|(actor, visit)| !grids.includes_tick(&end.all, **actor, visit.tick));
        let (actor, visit) = late.min_by_key(|(actor, visit)| (visit.pc, **actor))?;
        let what = format!(
            "nothing orders its end behind this {}. A barrier.cluster.arrive behind the access and a .wait before the end do",
            report::manner(visit.how, visit.wrote)
        );
        Some((*actor, visit.pc, what))
    }

    /// A relaxed arrival at the barrier of the cluster: it releases what the lanes did before their
    /// fences.
    pub(super) fn arrive_relaxed(&mut self, warp: u32, mask: u32) {
        self.forget_arrival(warp);
        let (fenced, inits) = self.fenced_by(warp, mask);
        let past = self.gathered(CLUSTER_BARRIER as usize);
        past.join(&fenced);
        inits.into_iter().for_each(|(actor, tick)| past.raise(actor, tick));
    }
}
