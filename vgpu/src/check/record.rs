//! Accesses as the shadow keeps them, and whether one comes after another.

use super::clock::{self, Key, Passed, VectorClock};
use super::grids::Grids;
use super::past::PastView;
use crate::exec::lanes::lanes;
use crate::ir::{FULL, Scope, Sem};

/// One access, or the accesses of several lanes of a warp by one instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// The actor of the access; 0 for none. The warp, for a generic read and for a row.
    pub(crate) actor: Key,
    pub(crate) tick: u32,
    /// For a generic read: the lanes of the warp `actor` that read. All of them for a row.
    pub(crate) lanes: u32,
    /// Instruction, in the kernel of the actor's grid.
    pub(crate) pc: u32,
    pub(crate) how: How,
    /// Bytes of the word.
    pub(crate) bytes: u8,
    pub(crate) row: Row,
}

/// Maps bytes to lanes where the lanes of a warp access consecutive elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row(u8);

impl Row {
    /// The bytes are not divided among lanes.
    pub(crate) const NONE: Row = Row(0);

    /// Consecutive elements of `size` bytes (4, 8 or 16), of which the one at `at`, a multiple of
    /// `size`, is accessed by `lane`.
    pub(crate) fn new(at: u64, size: u64, lane: usize) -> Self {
        let shift = size.trailing_zeros();
        let first = (at >> shift).wrapping_sub(lane as u64) & 31;
        Self((shift as u8 - 1) << 5 | first as u8)
    }

    /// The lane that accesses the byte at `at`. None where the bytes are not divided among lanes.
    pub(super) fn lane(self, at: u64) -> Option<usize> {
        let shift = (self.0 >> 5) + 1;
        let element = (at >> shift).wrapping_sub(u64::from(self.0 & 31));
        (self != Self::NONE).then_some((element & 31) as usize)
    }
}

/// Whether an access is a read and a write in one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Update {
    /// A read or a write alone.
    No,
    /// One that writes a value which does not depend on the old one, such as `exch`. Nothing need
    /// have written the old value.
    Replaces,
    /// One that computes with the old value.
    Modifies,
}

/// The manner of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct How {
    /// Relaxed or stronger, with this scope; weak otherwise.
    pub(crate) strong: Option<Scope>,
    /// Bytes of the whole access: two strong accesses that do not cover the same bytes count as
    /// weak.
    pub(crate) size: u8,
    /// It is by the async proxy: a bulk copy's, or a product's.
    pub(crate) bulk: bool,
    /// It is a copy's, of either kind: it happens later than its instruction, and only an observed
    /// completion orders later accesses behind it.
    pub(crate) late: bool,
    /// Whether it is a read and a write in one.
    pub(crate) rmw: Update,
    /// It is a read by `wgmma`.
    pub(crate) product: bool,
    /// A read by `ld.global.nc`: the memory must not change while the kernel runs.
    pub(crate) read_only: bool,
    /// The initialisation of an mbarrier, which `fence.mbarrier_init` orders.
    pub(crate) init: bool,
    /// A write by a bulk copy that comes after reads of the generic proxy without a proxy fence:
    /// `Assumptions::reads_before_bulk_copies`.
    pub(crate) after_reads: bool,
}

impl How {
    /// A plain access in the generic proxy.
    pub(crate) const WEAK: How = How {
        strong: None,
        size: 0,
        bulk: false,
        late: false,
        rmw: Update::No,
        product: false,
        read_only: false,
        init: false,
        after_reads: false,
    };
    pub(crate) const BULK: How = How { bulk: true, late: true, ..How::WEAK };
    pub(crate) const PRODUCT: How = How { product: true, ..How::BULK };
    /// A copy by `cp.async`, in the generic proxy.
    pub(crate) const ASYNC: How = How { late: true, ..How::WEAK };

    /// An access in the generic proxy, of elements of `size` bytes.
    pub(crate) fn generic(sem: Sem, scope: Scope, size: u8, rmw: Update) -> Self {
        Self { strong: (sem != Sem::Weak).then_some(scope), size, rmw, ..How::WEAK }
    }

    /// Whether it is a read and a write in one.
    pub(crate) fn is_rmw(&self) -> bool {
        self.rmw != Update::No
    }
}

pub(super) const NOBODY: Record =
    Record { actor: 0, tick: 0, lanes: 0, pc: 0, how: How::WEAK, bytes: 0, row: Row::NONE };

/// Whether a record is one of reads or of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write,
}

impl Record {
    /// An access of its own by `actor`, which is no lane: a bulk copy, or the host.
    pub(crate) fn of(actor: Key, tick: u32, pc: u32, how: How) -> Self {
        Self { actor, tick, pc, how, ..NOBODY }
    }

    /// The record at the byte `at`: the access of the one lane that this byte belongs to.
    pub(super) fn at(self, at: u64, kind: Kind) -> Self {
        self.row.lane(at).map_or(self, |lane| self.by(lane, kind))
    }

    fn by(self, lane: usize, kind: Kind) -> Self {
        match kind {
            Kind::Read => Self { lanes: 1 << lane, row: Row::NONE, ..self },
            Kind::Write => Self { actor: clock::lane(self.actor, lane), lanes: 0, row: Row::NONE, ..self },
        }
    }

    pub(super) fn is_row(&self) -> bool {
        self.row != Row::NONE
    }

    /// Whether several lanes access, each with a causal past that lacks its own accesses.
    pub(super) fn is_wide(&self) -> bool {
        self.lanes & self.lanes.wrapping_sub(1) != 0
    }

    /// The actors of the access, one for each lane. Not for rows.
    pub(super) fn actors(&self) -> impl Iterator<Item = Key> + use<> {
        let (actor, mask) = (self.actor, self.lanes);
        let lone = (mask == 0).then_some(actor);
        lanes(mask).map(move |l| clock::lane(actor, l)).chain(lone)
    }

    /// The writes of these actors, each by itself.
    pub(super) fn each_write(&self) -> impl Iterator<Item = Record> + use<> {
        let write = *self;
        self.actors().map(move |actor| Record { actor, lanes: 0, ..write })
    }

    /// The write of a lane in the form for several lanes of its warp. Other accesses as they are.
    pub(super) fn in_warp(self) -> Self {
        match clock::lane_of(self.actor) {
            Some((actor, lane)) => Self { actor, lanes: 1 << lane, ..self },
            None => self,
        }
    }

    /// Whether both are by lanes of one warp.
    fn same_warp(&self, other: &Record) -> bool {
        self.actor & !clock::WITHIN_WARP == other.actor & !clock::WITHIN_WARP
    }
}

/// Whether an access comes after another one, in all of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    After,
    /// Nowhere in the range.
    Unordered,
    /// Each lane must be checked by itself.
    ByLane,
}

/// The actor of an access, and its causal past. Lanes of a warp with equal causal pasts access
/// together.
#[derive(Clone, Copy)]
pub(crate) struct Accessor<'a> {
    pub(crate) record: Record,
    /// The lane's own key. Its causal past need not include its own accesses. Bulk copies have no
    /// such key. Where several lanes access, it is the key of the warp.
    pub(crate) own: Key,
    pub(crate) view: PastView<'a>,
    /// For a bulk copy: the generic accesses that it may rely on.
    pub(crate) published: Option<&'a VectorClock>,
}

impl<'a> Accessor<'a> {
    /// The lanes that access the byte `at`, each as an access of its own; a lane as it is. The
    /// numbers of the lanes come with them, and 0 with actors that are none.
    pub(super) fn at(self, at: u64, kind: Kind) -> impl Iterator<Item = (usize, Accessor<'a>)> {
        let Self { record, own, .. } = self;
        let wide = record.is_wide();
        let mask = record.row.lane(at).map_or(record.lanes, |lane| 1 << lane);
        let lone = (!wide).then_some((record.lanes.trailing_zeros() as usize % 32, self));
        let narrow = move |l| (l, Self { record: record.by(l, kind), own: clock::lane(own, l), ..self });
        lanes(if wide { mask } else { 0 }).map(narrow).chain(lone)
    }

    /// The same where it is compared with reads.
    pub(super) fn beside_reads(&self) -> Self {
        let published = self.published.filter(|_| !self.record.how.after_reads);
        Self { published, ..*self }
    }

    /// Whether a lone access comes after the access `record` of the actor `key`.
    pub(super) fn after(&self, grids: &Grids, key: Key, record: &Record) -> bool {
        if record.how.late {
            return self.view.includes(grids, key, record.tick);
        }
        (key == self.own && !self.record.how.bulk)
            || self.after_tick(grids, key, record.tick)
            || record.how.init && self.view.includes(grids, clock::inits(key), record.tick)
    }

    /// Whether the access comes after all accesses of an actor up to a tick, bulk copies excepted.
    pub(super) fn after_tick(&self, grids: &Grids, key: Key, tick: u32) -> bool {
        match self.published {
            Some(published) => grids.includes_tick(published, key, tick),
            None => self.view.includes(grids, key, tick),
        }
    }

    /// Whether the access comes after `record`, of all its lanes, wherever in a range they meet.
    pub(super) fn order(&self, grids: &Grids, record: &Record) -> Order {
        let mine = &self.record;
        let own_lanes = !mine.how.late && !record.how.late && mine.same_warp(record);
        if record.is_row() {
            if own_lanes && mine.row == record.row {
                return Order::After;
            }
            let passed = match self.published {
                Some(published) => grids.passed(published, record.actor, record.tick),
                None => self.view.passed(grids, record.actor, record.tick),
            };
            return match passed {
                Passed::All => Order::After,
                Passed::None if !own_lanes => Order::Unordered,
                _ => Order::ByLane,
            };
        }
        if record.actors().all(|key| self.after(grids, key, record)) {
            return Order::After;
        }
        if own_lanes && mine.is_wide() { Order::ByLane } else { Order::Unordered }
    }

    /// Whether all lanes come after the write `last`, wherever in a range they meet.
    pub(super) fn follows(&self, grids: &Grids, last: &Record) -> bool {
        self.order(grids, last) == Order::After
    }

    /// The lane that accesses the byte at `at`, as a bit; 1 where it is not one of several.
    pub(super) fn lane_bit(&self, at: u64) -> u32 {
        self.record.row.lane(at).map_or(1, |lane| 1 << lane)
    }

    /// Whether both are strong, of one proxy, in each other's scope, and touch the same bytes in
    /// the same way.
    pub(super) fn morally_strong(&self, grids: &Grids, record: &Record) -> bool {
        let (Some(mine), Some(theirs)) = (self.record.how.strong, record.how.strong) else { return false };
        // Bulk copies have no lane.
        let own = if self.own == 0 { self.record.actor } else { self.own };
        record.how.bulk == self.record.how.bulk
            && record.how.size == self.record.how.size
            && record.bytes == self.record.bytes
            && grids.mutual(mine, own, theirs, record.actor)
    }

    /// Whether the access comes after the whole kernel of an actor.
    pub(super) fn after_kernel_of(&self, grids: &Grids, key: Key) -> bool {
        let Some(facts) = grids.facts(key) else { return true };
        match self.published {
            Some(published) => published.timeline(facts.timeline) >= facts.tick,
            None => self.view.includes_all(facts.timeline, facts.tick),
        }
    }

    /// Whether a lone access is ordered behind the access `record` of the actor `key`, or needs no
    /// order.
    pub(super) fn does_not_race_with(&self, grids: &Grids, key: Key, record: &Record) -> bool {
        self.after(grids, key, record) || self.morally_strong(grids, record)
    }
}

/// A row of all lanes of a warp.
pub(crate) const ROW_LANES: u32 = FULL;

/// Rule that an access breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Violation {
    /// It races with this one. `wrote`: with a write.
    Race { other: Record, wrote: bool },
    /// The access reads unwritten bytes.
    Unwritten,
}

/// A violation, and the byte of its memory that it is at.
pub(crate) type ViolationAt = (u64, Violation);

/// The first violation of each lane of an access, with the lane's number; of actors that are no
/// lane, the first of all, with the number 0.
#[derive(Debug, Default)]
pub(crate) struct Violations {
    pub(crate) all: Vec<(usize, ViolationAt)>,
    lanes: u32,
    /// Not all of the last writes that a read has found come before it in every way: a strong read
    /// may have observed one.
    pub(super) may_observe: bool,
    /// The same read has changed nothing before, nor has [`Hooks::observe`] behind it, and neither
    /// would now.
    ///
    /// [`Hooks::observe`]: super::hooks::Hooks::observe
    pub(crate) repeats: bool,
}

impl Violations {
    /// The violations of a read that repeats another.
    pub(super) fn of_repeat() -> Self {
        Self { repeats: true, ..Self::default() }
    }

    pub(super) fn note(&mut self, lane: usize, found: ViolationAt) {
        if self.lanes >> lane & 1 == 0 {
            self.lanes |= 1 << lane;
            // In the order of the lanes, whichever of their bytes comes first.
            let at = self.all.partition_point(|(other, _)| *other < lane);
            self.all.insert(at, (lane, found));
        }
    }

    pub(crate) fn first(&self) -> Option<ViolationAt> {
        self.all.first().map(|(_, found)| *found)
    }
}
