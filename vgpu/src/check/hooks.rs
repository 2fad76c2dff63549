//! Hooks that the interpreter calls in check mode.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::block::{BlockCheck, Poll, join_fenced};
use super::clock::{self, Key};
use super::cluster::Peers;
use super::grids::Grids;
use super::history::{Fenced, Wait};
use super::past::{CausalPast, GLOBAL, PastView, SHARED};
use super::record::{Accessor, How, ROW_LANES, Record, Row, Update, Violation, ViolationAt, Violations};
use super::releases::{OWN, Release};
use super::report;
use super::reports::{Line, Pair};
use super::shadow::{NOT_KEPT, Shadow};
use super::word::Stamp;
use super::world::World;
use crate::exec::bulk_queue::Landed;
use crate::exec::cluster::offset_of;
use crate::exec::lanes::lanes;
use crate::exec::state::RecentStep;
use crate::explore::Touch;
use crate::fault::FaultKind;
use crate::ir::{Fence, Order, Scope, Sem};

/// The location of an access in memory that is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Global {
        shadow: u32,
        offset: u64,
    },
    /// Address in the shared window, in the part of a block of the cluster.
    Shared {
        offset: u64,
    },
    /// A lane's own, or constant.
    Private,
}

impl Place {
    /// The place `bytes` bytes behind.
    fn behind(self, bytes: u64) -> Place {
        match self {
            Place::Global { shadow, offset } => Place::Global { shadow, offset: offset + bytes },
            Place::Shared { offset } => Place::Shared { offset: offset + bytes },
            Place::Private => Place::Private,
        }
    }
}

/// Lanes of a warp that access memory at once: all the same element, or, as a row of neighbouring
/// lanes, elements at distances of 4, 8 or 16 bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) lanes: u32,
    /// The length of an element, or, in a row, the distance of the elements.
    pub(crate) size: u64,
    /// The bytes of an element that are accessed: all of it, or, in a row that is read, less than
    /// 4.
    pub(crate) width: u64,
    pub(crate) row: bool,
}

impl Part {
    /// One lane.
    pub(crate) fn of(lane: usize, size: u64) -> Self {
        Self { lanes: 1 << lane, size, width: size, row: false }
    }

    /// The lowest lane.
    pub(crate) fn first(&self) -> usize {
        self.lanes.trailing_zeros() as usize % 32
    }

    /// Bytes from the first that is accessed to the last.
    fn bytes(&self) -> u64 {
        let others = if self.row { self.lanes.count_ones() - 1 } else { 0 };
        self.size * u64::from(others) + self.width
    }

    /// The lanes before the first that is not among `lanes`, or the lanes among them where all
    /// access the same element; and the others, with their place.
    fn split(self, lanes: u32, place: Place) -> (Self, Option<(Self, Place)>) {
        let mut here = self.lanes & lanes;
        if self.row {
            let first = self.first();
            here &= ((1u64 << first << (lanes >> first).trailing_ones()) - 1) as u32;
        }
        let rest = self.lanes & !here;
        let part = |lanes: u32| Self { lanes, row: self.row && !lanes.is_power_of_two(), ..self };
        let step = if self.row { self.size * u64::from(here.count_ones()) } else { 0 };
        (part(here), (rest != 0).then(|| (part(rest), place.behind(step))))
    }

    /// Each lane by itself, and its place.
    fn each(self, place: Place) -> impl Iterator<Item = (usize, Place)> {
        let step = if self.row { self.size } else { 0 };
        (0..).zip(lanes(self.lanes)).map(move |(i, lane)| (lane, place.behind(i * step)))
    }
}

/// How a program observes the end of a copy.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Completion {
    /// A bulk copy completes on the mbarrier at this shared address.
    Mbarrier(u64),
    /// A store by `st.async` or `red.async` completes on the mbarrier.
    Store(u64),
    /// A bulk copy belongs to a group of its lane, which has committed so many before.
    Group(u32),
    /// A copy by `cp.async` has this number among those of its lane.
    Thread(u32),
}

/// A copy as it is issued.
pub(crate) struct Copy {
    /// The parts of the source and of the destination, with their lengths.
    pub(crate) src: Vec<(Place, u64)>,
    pub(crate) dst: Vec<(Place, u64)>,
    pub(crate) lane: usize,
    pub(crate) pc: u32,
    pub(crate) completion: Completion,
    /// The manner in which it writes its destination.
    pub(crate) writes: How,
}

/// How long a kernel rests after a release that the host may wait for.
const HOST_READS: Duration = Duration::from_micros(50);

/// An access that breaks a rule.
pub(crate) struct Blamed {
    /// Names the memory.
    pub(crate) label: String,
    pub(crate) place: Place,
    pub(crate) violation: ViolationAt,
    pub(crate) lane: usize,
    pub(crate) pc: u32,
    pub(crate) how: How,
    pub(crate) write: bool,
    /// Lanes that execute the instruction together.
    pub(crate) beside: u32,
}

/// Words of a copy's source that it reads as they were before: offset in the source, value.
pub(crate) type Stale = Vec<(u64, u32)>;

/// A strong read of one element by lanes, of one part of an instruction, that changed nothing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Repeated {
    pub(crate) lanes: u32,
    pub(crate) place: Place,
    poll: Poll,
    /// The last stamp of the memory then: while there is no later one, the element is unchanged.
    last: Stamp,
}

/// Watches the warp that runs. Without checks it is `()`, whose methods are empty and cost nothing.
pub(crate) trait Hooks {
    const ON: bool;
    /// Loads may return older values.
    fn weak_memory(&self) -> bool {
        false
    }
    /// `Place` is that of the first lane.
    /// Whether `ld.global.nc` is assumed to read as `ld.global` does.
    fn has_coherent_loads(&self) -> bool {
        false
    }
    fn read(&mut self, _: Place, _: Part, _pc: u32, _: How) -> Violations {
        Violations::default()
    }
    /// A strong read that has just changed nothing ([`Violations::repeats`]), to be repeated.
    fn repeated(&mut self, _: Place, _: Part, _pc: u32) -> Option<Repeated> {
        None
    }
    /// Whether these reads, all of one load, change nothing again. They are noted then.
    fn repeats(&mut self, _: &mut [Option<Repeated>], _pc: u32, _: Sem, _: Scope) -> bool {
        false
    }
    /// The schedule and the values of loads are choices of an exploration.
    fn is_explored(&self) -> bool {
        false
    }
    /// Whether the values of a load come later than they could.
    fn defers_load(&mut self) -> bool {
        false
    }
    /// The older value that a load returns instead, if any. Includes the 8 bytes behind it where
    /// they are read at once.
    fn stale(&mut self, _: Place, _bytes: u64, _lane: usize, _: How) -> Option<[u64; 2]> {
        None
    }
    /// Whether [`Hooks::stale`] returns `None` for each of these lanes. False may also mean
    /// undecided.
    fn is_settled(&mut self, _: Place, _: Part, _: How) -> bool {
        false
    }
    /// Stands for so many calls of [`Hooks::stale`] that find nothing.
    fn skip_stale(&mut self, _calls: u64) {}
    /// `now` is the value in memory, `new` the value to be written. Returns whether the place held
    /// a strong write, and a violation.
    fn write(
        &mut self,
        _: Place,
        _lane: usize,
        _pc: u32,
        _: How,
        _now: &[u8],
        _new: &[u8],
    ) -> (bool, Option<ViolationAt>) {
        (false, None)
    }
    /// A row of lanes writes. `values` gives the value in memory and the value to be written of the
    /// 4 bytes at an offset in the element of a lane. Returns the lanes whose place held a strong
    /// write, and the lanes' violations.
    fn write_row(
        &mut self,
        _: Place,
        _: Part,
        _pc: u32,
        _: How,
        _values: impl Fn(usize, usize) -> [u32; 2],
    ) -> (u32, Vec<(usize, ViolationAt)>) {
        (0, vec![])
    }
    /// A lane discards what it has just overwritten, which counts as unwritten.
    fn discard(&mut self, _: Place, _lane: usize, _bytes: u64) {}
    /// The lanes of a mask have read the last write of a location, or the one before.
    fn observe(&mut self, _: Place, _mask: u32, _pc: u32, _: Sem, _: Scope, _older: bool) {}
    /// The lanes of a mask have read the last write of a location as before:
    /// [`Violations::repeats`].
    fn observe_again(&mut self, _: Place, _mask: u32, _pc: u32, _: Sem, _: Scope) {}
    /// A lane has written a location.
    fn wrote(&mut self, _: Place, _lane: usize, _pc: u32, _: Sem, _: Scope, _rmw: bool) {}
    fn fence(&mut self, _mask: u32, _pc: u32, _: Fence) {}
    fn sync_warp(&mut self, _mask: u32) {}
    /// The lanes of a mask have run in step, or have met at a collective, which orders no memory.
    /// They are about to take different ways.
    fn in_step(&mut self, _mask: u32) {}
    /// The lanes of a mask are about to execute an instruction that concerns others.
    fn together(&mut self, _mask: u32) {}
    fn arrive(&mut self, _mask: u32, _barrier: u32) {}
    /// The lanes of a mask arrive at the barrier of the cluster, and release nothing.
    fn arrive_relaxed(&mut self, _mask: u32) {}
    /// The lanes of a mask pass a barrier that completed before they reached it.
    fn pass(&mut self, _mask: u32, _barrier: u32) {}
    fn init_mbarrier(&mut self, _pc: u32, _offset: u64) {}
    fn inval_mbarrier(&mut self, _offset: u64) {}
    /// Whether the block has an mbarrier at this place.
    fn has_mbarrier(&self, _offset: u64) -> bool {
        false
    }
    /// Whether no test has returned true for the last completed phase of an mbarrier.
    fn is_unseen(&self, _offset: u64) -> bool {
        false
    }
    fn arrive_mbarrier(&mut self, _lane: usize, _pc: u32, _offset: u64, _: Order) {}
    /// A lane executes an instruction with an effect that the manual leaves undefined. The fault, if
    /// the run must end.
    fn undefined(
        &mut self,
        _lane: usize,
        _pc: u32,
        _: FaultKind,
        _recent: impl Iterator<Item = RecentStep>,
    ) -> Option<FaultKind> {
        None
    }
    fn complete_mbarrier(&mut self, _offset: u64) {}
    fn pass_mbarrier(&mut self, _mask: u32, _offset: u64, _: Order) {}
    /// A copy is issued. Its violations name the wrong end, and whether that is the written
    /// one.
    fn copy(&mut self, _: &Copy) -> (Stale, Vec<(Place, bool, ViolationAt)>) {
        (vec![], vec![])
    }
    /// A lane has closed its bulk group `group`, counted from 1, which has a copy in it.
    fn closed(&mut self, _lane: usize, _pc: u32, _group: u32) {}
    /// A lane that has issued a copy has waited for its groups up to this number.
    fn waited(&mut self, _lane: usize, _pc: u32, _group: u32, _landed: bool) {}
    /// A lane has waited for its copies by `cp.async` up to this number.
    fn waited_for_copies(&mut self, _lane: usize, _pc: u32, _copies: u32) {}
    fn landed(&mut self, _: &Landed) {}
    /// A product of `group` reads these parts of shared memory, until a wait. Its violations.
    fn matrices(&mut self, _: &[Range<u64>], _pc: u32, _group: u32) -> Vec<(Place, ViolationAt)> {
        vec![]
    }
    /// The warp has waited for the products of its warpgroup up to a group.
    fn waited_products(&mut self, _group: u32) {}
    /// Reports a violation by an access of a lane, with the steps of its warp before. The fault, if
    /// the run must end.
    fn report(&mut self, blamed: &Blamed, _recent: impl Iterator<Item = RecentStep>) -> Option<FaultKind> {
        Some(FaultKind::Unsupported(format!("a report on '{}' without checks", blamed.label)))
    }
}

impl Hooks for () {
    const ON: bool = false;
}

/// Watches one warp of a block.
pub(crate) struct CheckHooks<'a> {
    pub(crate) world: &'a mut World,
    pub(crate) block: &'a mut BlockCheck,
    pub(crate) peers: Peers<'a>,
    pub(crate) warp: u32,
}

impl CheckHooks<'_> {
    fn record(&self, lane: usize, pc: u32, how: How, write: bool) -> Record {
        let key = self.block.key(self.warp);
        let (actor, lanes) = if write { (clock::lane(key, lane), 0) } else { (key, 1 << lane) };
        Record { lanes, ..Record::of(actor, self.block.tick(self.warp), pc, how) }
    }

    /// The record of an access of several lanes, which begins at the offset `at`.
    fn wide_record(&self, part: Part, at: u64, pc: u32, how: How) -> Record {
        let record = Record::of(self.block.key(self.warp), self.block.tick(self.warp), pc, how);
        match part.row {
            true => Record { lanes: ROW_LANES, row: Row::new(at, part.size, part.first()), ..record },
            false => Record { lanes: part.lanes, ..record },
        }
    }

    /// The actor and the record of a read by lanes, which begins at the offset `at`.
    fn reader(&self, part: Part, at: u64, pc: u32, how: How) -> (Key, Record) {
        match part.lanes.is_power_of_two() {
            true => (self.own(part.first()), self.record(part.first(), pc, how, false)),
            false => (self.block.key(self.warp), self.wide_record(part, at, pc, how)),
        }
    }

    /// Collects a report at lines where there was none before. The fault, if there is no room.
    fn collect(
        &mut self,
        pair: Pair,
        kind: FaultKind,
        (own, pc): (Key, u32),
        recent: impl Iterator<Item = RecentStep>,
    ) -> Option<FaultKind> {
        if self.world.reports.is_full() {
            return Some(kind);
        }
        let fault = report::collected(&self.world.grids, kind, (own, pc), Some(self.block), recent);
        self.world.reports.add(pair, fault);
        None
    }

    fn read_at_once(&mut self, place: Place, part: Part, pc: u32, how: How) -> Option<Violations> {
        let (Place::Global { offset, .. } | Place::Shared { offset }) = place else {
            return Some(Violations::default());
        };
        let (own, record) = self.reader(part, offset, pc, how);
        let weak_memory = self.weak_memory();
        let start = how.read_only.then(|| self.block.start.clone());
        let bytes = part.bytes();
        let (shadow, grids, at, view) = self.look(place, part.lanes)?;
        let who = Accessor { record, own, published: None, view };
        let mut found = match part.row && part.width < part.size {
            true => shadow.read_apart(grids, (at, part.size, part.width), bytes, &who),
            false => shadow.read(grids, at, bytes, &who),
        };
        if let Some(start) = start {
            let begin = Accessor { own: 0, view: PastView::all(&start), ..who };
            // A lane is blamed once.
            shadow.take(grids, at, bytes, &begin).all.into_iter().for_each(|(lane, v)| found.note(lane, v));
            shadow.read_only(grids, at, bytes, &begin);
        }
        // In weak-memory mode the read may return an older value.
        if how.strong.is_some() && !weak_memory && found.may_observe {
            shadow.saw(grids, at, bytes, &who);
        }
        Some(found)
    }

    /// The record of a strong read of one element. None where the read may draw from the seed, or
    /// is checked for other purposes.
    fn poll(&self, place: Place, part: Part, pc: u32, how: How) -> Option<Poll> {
        if how.strong.is_none() || part.row || self.weak_memory() || self.world.path.is_some() {
            return None;
        }
        self.poll_at(place, part, pc)
    }

    fn poll_at(&self, place: Place, part: Part, pc: u32) -> Option<Poll> {
        let (shadow, offset) = self.polled(place)?;
        let stamps = shadow.stamps(offset, part.size)?;
        Some(self.block.poll(self.warp, pc, (place, part.lanes, part.size), stamps))
    }

    /// The shadow of memory whose reads are recorded, and the offset in it.
    fn polled(&self, place: Place) -> Option<(&Shadow, u64)> {
        match place {
            Place::Global { shadow, offset } => Some((self.world.shadows.get(shadow as usize)?, offset)),
            Place::Shared { offset } if !self.peers.is_remote(offset) => {
                Some((&self.block.shared, offset_of(offset)))
            }
            _ => None,
        }
    }

    /// [`Hooks::write_row`] by lanes whose causal pasts are the same.
    fn write_at_once(
        &mut self,
        place: Place,
        part: Part,
        pc: u32,
        how: How,
        values: impl Fn(usize, usize) -> [u32; 2],
    ) -> (u32, Vec<(usize, ViolationAt)>) {
        let (first, own, weak_memory) = (part.first(), self.block.key(self.warp), self.weak_memory());
        let (Place::Global { offset, .. } | Place::Shared { offset }) = place else { return (0, vec![]) };
        let record = self.wide_record(part, offset, pc, how);
        self.touch(place, part.bytes(), true);
        self.visit(place, part.lanes, pc, how, true);
        self.world.accesses += u64::from(part.lanes.count_ones());
        if self.world.stores.are_counted() {
            part.each(place)
                .for_each(|(lane, place)| self.world.stores.add(self.own(lane), place, part.size));
        }
        let Some((shadow, grids, at, view)) = self.look(place, part.lanes) else { return (0, vec![]) };
        let who = Accessor { record, own, published: None, view };
        let values = |word: u64| {
            values(first + ((word - at) / part.size) as usize, ((word - at) % part.size) as usize)
        };
        let unchanged = |word| {
            let [now, new] = values(word);
            now == new
        };
        let before = weak_memory.then_some(|word| values(word)[0]);
        let (strong, found) = shadow.write(grids, at, part.bytes(), &who, unchanged, before);
        (strong, if self.world.config.races { found.all } else { vec![] })
    }

    /// Records in an exploration what the current step accesses.
    fn touch(&self, place: Place, bytes: u64, write: bool) {
        let Some(path) = &self.world.path else { return };
        // Shared memory is a block's own.
        let (memory, from) = match place {
            Place::Global { shadow, offset } => (u64::from(shadow), offset),
            Place::Shared { offset } => {
                let block = self.peers.at(self.block, offset);
                (1 << 63 | clock::block_of(block.key(0)), offset_of(offset))
            }
            Place::Private => return,
        };
        path.touch(Touch { memory, from, bytes, write });
    }

    fn own(&self, lane: usize) -> Key {
        clock::lane(self.block.key(self.warp), lane)
    }

    /// Keeps a strong read by the first of the lanes `mask` for reports, and whether it found the
    /// same as before.
    fn note_read(&mut self, place: Place, mask: u32, (pc, sem, scope): (u32, Sem, Scope), again: bool) {
        let by = self.own(mask.trailing_zeros() as usize % 32);
        let tick = self.block.tick(self.warp);
        self.world.history.read((by, pc), (sem, scope), place, (tick, again));
    }

    /// Drops a violation if only weak memory is simulated: the kernel's results show it then.
    fn unless_only_weak(&self, found: Option<ViolationAt>) -> Option<ViolationAt> {
        found.filter(|_| self.world.config.races)
    }

    fn line(&self, actor: Key, pc: u32) -> Line {
        let kernel = self.world.grids.facts(actor).map(|facts| &facts.kernel);
        kernel.map_or_else(Line::default, |kernel| (Arc::as_ptr(kernel) as usize, kernel.lines(pc)))
    }

    /// The lines of a violation by a lane with this causal past, and the kind.
    fn pair(&self, blamed: &Blamed, past: &CausalPast) -> Pair {
        let grids = &self.world.grids;
        let own = self.own(blamed.lane);
        let here = self.line(own, blamed.pc);
        match blamed.violation.1 {
            Violation::Unwritten => ("unwritten-read", [here; 2], None),
            Violation::Race { other, wrote } => {
                let there = self.line(other.actor, other.pc);
                // A missing proxy fence is another report than a missing order.
                let proxy = report::lacks_proxy_fence(grids, blamed.how, own, past, &other);
                let kind = if proxy { "missing-proxy-fence" } else { "race" };
                let hazard = report::hazard((blamed.how, blamed.write), (other.how, wrote));
                (kind, [here.min(there), here.max(there)], Some(hazard))
            }
        }
    }

    /// Gives the shadow of a place, the offset in it, and the lanes' causal past. None where the
    /// lanes of a mask have different ones.
    fn look(&mut self, place: Place, mask: u32) -> Option<(&mut Shadow, &Grids, u64, PastView<'_>)> {
        let CheckHooks { world, block, peers, warp } = self;
        let World { shadows, grids, .. } = &mut **world;
        match place {
            Place::Private => None,
            Place::Shared { offset } => {
                let (own, view) = block.shared_and_view(*warp, mask)?;
                let shared = peers.other(offset).map_or(own, |peer| &mut peer.shared);
                Some((shared, grids, offset_of(offset), view))
            }
            Place::Global { shadow, offset } => {
                let (_, view) = block.shared_and_view(*warp, mask)?;
                Some((shadows.get_mut(shadow as usize)?, grids, offset, view))
            }
        }
    }

    /// Notes that lanes access shared memory of another block.
    fn visit(&mut self, place: Place, mask: u32, pc: u32, how: How, write: bool) {
        let Place::Shared { offset } = place else { return };
        let (key, tick) = (self.block.key(self.warp), self.block.tick(self.warp));
        if let Some(peer) = self.peers.other(offset) {
            peer.visit_by((key, mask), tick, pc, how, write);
        }
    }

    fn hidden(&self, place: Place) -> bool {
        matches!(place, Place::Global { shadow, .. } if self.world.shadows.get(shadow as usize).is_none_or(|s| s.hidden))
    }
}

impl Hooks for CheckHooks<'_> {
    const ON: bool = true;

    fn weak_memory(&self) -> bool {
        self.world.config.weak_memory.is_some()
    }

    fn has_coherent_loads(&self) -> bool {
        self.world.config.assume.coherent_loads
    }

    fn read(&mut self, place: Place, part: Part, pc: u32, how: How) -> Violations {
        self.world.accesses += u64::from(part.lanes.count_ones());
        self.touch(place, part.bytes(), false);
        self.visit(place, part.lanes, pc, how, false);
        if self.world.loads.are_counted() {
            part.each(place).for_each(|(lane, place)| self.world.loads.add(self.own(lane), place, 1));
        }
        let poll = self.poll(place, part, pc, how);
        if poll.is_some_and(|poll| self.block.remembers(self.warp, &poll)) {
            return Violations::of_repeat();
        }
        let found = self.read_at_once(place, part, pc, how).unwrap_or_else(|| {
            let (mut all, mut rest) = (Violations::default(), Some((part, place)));
            while let Some((part, place)) = rest {
                let (alike, others) = part.split(self.block.alike(self.warp, part.lanes), place);
                let found = self.read_at_once(place, alike, pc, how).unwrap_or_default().all;
                let alone = alike.lanes.is_power_of_two().then(|| alike.first());
                found.into_iter().for_each(|(lane, found)| all.note(alone.unwrap_or(lane), found));
                rest = others;
            }
            all
        });
        if let Some(poll) = poll.filter(|_| found.all.is_empty())
            && self.poll(place, part, pc, how) == Some(poll)
        {
            self.block.remember(self.warp, poll);
        }
        if self.world.config.races { found } else { Violations::default() }
    }

    fn repeated(&mut self, place: Place, part: Part, pc: u32) -> Option<Repeated> {
        let poll = self.poll_at(place, part, pc)?;
        let last = self.polled(place)?.0.last_stamp()?;
        self.block.remembers(self.warp, &poll).then_some(Repeated { lanes: part.lanes, place, poll, last })
    }

    fn repeats(&mut self, reads: &mut [Option<Repeated>], pc: u32, sem: Sem, scope: Scope) -> bool {
        if self.world.path.is_some() || self.world.loads.are_counted() {
            return false;
        }
        for read in reads.iter_mut().map_while(Option::as_mut) {
            let Some((shadow, offset)) = self.polled(read.place) else { return false };
            let last = shadow.last_stamp();
            if last != Some(read.last) {
                let (Some(last), Some(stamps)) = (last, shadow.stamps(offset, read.poll.size)) else {
                    return false;
                };
                if !read.poll.has(stamps) {
                    return false;
                }
                read.last = last;
            }
            if !self.block.is_as_at(self.warp, &read.poll) {
                return false;
            }
        }
        for read in reads.iter().map_while(Option::as_ref) {
            self.world.accesses += u64::from(read.lanes.count_ones());
            self.observe_again(read.place, read.lanes, pc, sem, scope);
        }
        true
    }

    fn is_explored(&self) -> bool {
        self.world.path.is_some()
    }

    fn defers_load(&mut self) -> bool {
        match &self.world.path {
            Some(path) => path.either(),
            None => self.world.rng.below(4) == 0,
        }
    }

    fn stale(&mut self, place: Place, bytes: u64, lane: usize, how: How) -> Option<[u64; 2]> {
        let record = self.record(lane, 0, how, false);
        let own = self.own(lane);
        self.touch(place, bytes, false);
        let path = self.world.path.clone();
        let drawn = path.is_none() && self.world.rng.below(3) == 0;
        let (shadow, grids, at, view) = self.look(place, 1 << lane)?;
        let who = Accessor { record, own, published: None, view };
        let words = shadow.stale(grids, at, bytes, &who)?;
        // An exploration has a choice only where there is an older value.
        if path.map_or(drawn, |path| path.sees_older()) {
            return Some([0, 2].map(|low| u64::from(words[low]) | u64::from(words[low + 1]) << 32));
        }
        if how.strong.is_some() {
            shadow.saw(grids, at, bytes, &who);
        }
        None
    }

    fn is_settled(&mut self, place: Place, part: Part, how: How) -> bool {
        if self.world.path.is_some() {
            return false;
        }
        match place {
            Place::Private => true,
            Place::Global { offset, .. } | Place::Shared { offset } => {
                let (own, record) = self.reader(part, offset, 0, how);
                self.look(place, part.lanes).is_some_and(|(shadow, grids, at, view)| {
                    let who = Accessor { record, own, published: None, view };
                    shadow.is_settled(grids, at, part.bytes(), &who)
                })
            }
        }
    }

    fn skip_stale(&mut self, calls: u64) {
        self.world.rng.skip(calls);
    }

    fn write(
        &mut self,
        place: Place,
        lane: usize,
        pc: u32,
        how: How,
        now: &[u8],
        new: &[u8],
    ) -> (bool, Option<ViolationAt>) {
        self.world.accesses += 1;
        self.touch(place, now.len() as u64, true);
        self.visit(place, 1 << lane, pc, how, true);
        let record = self.record(lane, pc, how, true);
        let (own, weak_memory) = (self.own(lane), self.weak_memory());
        self.world.stores.add(own, place, now.len() as u64);
        let Some((shadow, grids, at, view)) = self.look(place, 1 << lane) else { return (false, None) };
        let who = Accessor { record, own, published: None, view };
        let part =
            |word: u64| (word.max(at) - at) as usize..((word + 4).min(at + now.len() as u64) - at) as usize;
        let before = |word: u64| {
            let mut bytes = [0; 4];
            let from = (word.max(at) - word) as usize;
            bytes[from..].iter_mut().zip(&now[part(word)]).for_each(|(to, old)| *to = *old);
            u32::from_le_bytes(bytes)
        };
        let (strong_before, found) = shadow.write(
            grids,
            at,
            now.len() as u64,
            &who,
            |word| now.get(part(word)) == new.get(part(word)),
            weak_memory.then_some(before),
        );
        (strong_before != 0, self.unless_only_weak(found.first()))
    }

    fn discard(&mut self, place: Place, lane: usize, bytes: u64) {
        if let Some((shadow, _, at, _)) = self.look(place, 1 << lane) {
            shadow.renew(at, bytes);
        }
    }

    fn write_row(
        &mut self,
        place: Place,
        part: Part,
        pc: u32,
        how: How,
        values: impl Fn(usize, usize) -> [u32; 2],
    ) -> (u32, Vec<(usize, ViolationAt)>) {
        if self.block.alike(self.warp, part.lanes) == part.lanes && !part.lanes.is_power_of_two() {
            return self.write_at_once(place, part, pc, how, values);
        }
        let (mut strong, mut all, mut todo) = (0, vec![], Some((part, place)));
        while let Some((part, place)) = todo {
            let (alike, others) = part.split(self.block.alike(self.warp, part.lanes), place);
            todo = others;
            if !alike.lanes.is_power_of_two() {
                let (was_strong, found) = self.write_at_once(place, alike, pc, how, &values);
                strong |= was_strong;
                all.extend(found);
                continue;
            }
            let (lane, words) = (alike.first(), part.size as usize / 4);
            let mut value = [[0u8; 16]; 2];
            for word in 0..words {
                for (to, from) in value.iter_mut().zip(values(lane, 4 * word)) {
                    to[4 * word..4 * word + 4].copy_from_slice(&from.to_le_bytes());
                }
            }
            let [now, new] = value.each_ref().map(|value| &value[..4 * words]);
            let (was_strong, found) = self.write(place, lane, pc, how, now, new);
            strong |= u32::from(was_strong) << lane;
            all.extend(found.map(|found| (lane, found)));
        }
        (strong, all)
    }

    fn observe_again(&mut self, place: Place, mask: u32, pc: u32, sem: Sem, scope: Scope) {
        self.note_read(place, mask, (pc, sem, scope), true);
    }

    fn observe(&mut self, place: Place, mask: u32, pc: u32, sem: Sem, scope: Scope, older: bool) {
        if sem == Sem::Weak || place == Place::Private {
            return;
        }
        self.note_read(place, mask, (pc, sem, scope), false);
        let acquire = sem.acquires();
        if self.hidden(place) {
            if acquire && scope == Scope::Sys {
                self.block.acquire(self.warp, mask, &self.world.outside);
            }
            return;
        }
        let CheckHooks { world, block, peers, warp } = self;
        if !block.acquires(acquire) {
            return;
        }
        let World { grids, releases, chains, .. } = &mut **world;
        if older {
            let found = match place {
                Place::Private => None,
                Place::Shared { offset } => peers.at(block, offset).releases.get(OWN, offset_of(offset)),
                Place::Global { shadow, offset } => releases.get(shadow, offset),
            };
            // An older release gets a chain of its own: the chain's present past would include
            // later releases.
            let mut found = found.map_or(vec![], |found| found.before().to_vec());
            for release in &mut found {
                *chains += 1;
                release.chain = *chains;
            }
            return block.observe(grids, *warp, mask, scope, acquire, &found);
        }
        match place {
            Place::Private => {}
            Place::Shared { offset } => {
                let at = offset_of(offset);
                let releases = peers.of(block, offset).releases.get_mut(OWN, at);
                let Some(patterns) = releases.and_then(|r| r.patterns.take()) else { return };
                block.observe(grids, *warp, mask, scope, acquire, &patterns.last);
                if let Some(releases) = peers.of(block, offset).releases.get_mut(OWN, at) {
                    releases.patterns = Some(patterns);
                }
            }
            Place::Global { shadow, offset } => {
                if let Some(found) = releases.get(shadow, offset) {
                    block.observe(grids, *warp, mask, scope, acquire, found.last());
                }
            }
        }
    }

    fn wrote(&mut self, place: Place, lane: usize, pc: u32, sem: Sem, scope: Scope, rmw: bool) {
        let (release, wider) = match sem {
            Sem::Release | Sem::AcqRel => (Some(self.block.release(self.warp, lane, scope)), vec![]),
            Sem::Relaxed | Sem::Acquire => {
                let assumed = self.world.config.assume.fence_before_barrier;
                let fenced = self.block.fenced(self.warp, lane, scope, assumed);
                fenced.map_or((None, vec![]), |(last, wider)| (Some(last), wider))
            }
            Sem::Weak => (None, vec![]),
        };
        let ahead = match sem {
            Sem::Relaxed | Sem::Acquire => self.block.fenced_ahead(self.warp, lane),
            _ => None,
        };
        let (own, fence) = (self.own(lane), self.block.fence_site(self.warp, lane));
        let hidden = self.hidden(place);
        let CheckHooks { world, block, peers, .. } = self;
        let releases = match place {
            Place::Private => return,
            Place::Shared { offset } => {
                peers.of(block, offset).releases.get_or_default(OWN, offset_of(offset))
            }
            Place::Global { shadow, offset } => world.releases.get_or_default(shadow, offset),
        };
        let manner = (sem, scope);
        let order = (release.is_some(), fence);
        world.history.wrote(&mut releases.writes, (own, pc), manner, rmw, order);
        if ahead.is_none() && release.is_none() && releases.patterns.is_none() {
            return;
        }
        let patterns = releases.patterns.get_or_insert_default();
        if rmw {
            join_fenced(&mut patterns.ahead, ahead.as_ref());
        } else {
            patterns.ahead = ahead;
        }
        if hidden {
            let releases = release.iter().chain(&wider).filter(|r| r.scope == Scope::Sys);
            let mut outside = false;
            for release in releases {
                world.outside.join(&release.past);
                outside = true;
            }
            if outside {
                // The host polls such words. A sleep now and then gives it time to read the present
                // value.
                if world.path.is_none() && world.rng.below(4) == 0 {
                    std::thread::sleep(HOST_READS);
                }
            }
            return;
        }
        // A release write followed by strong writes of the same thread is still a release pattern,
        // of the last write's scope, and so is a chain of read-modify-writes.
        let mut kept = vec![];
        if rmw {
            patterns.before.clone_from(&patterns.last);
        } else {
            std::mem::swap(&mut patterns.before, &mut patterns.last);
            patterns.last.clear();
            if sem == Sem::Relaxed {
                let of_thread = patterns.before.iter().filter(|r| r.by == own && !r.shared);
                kept.extend(of_thread.map(|r| Release { scope: r.scope.min(scope), ..r.clone() }));
            }
        }
        for mut new in kept.into_iter().chain(release).chain(wider) {
            if new.chain == 0 {
                world.chains += 1;
                new.chain = world.chains;
            }
            // A chain of read-modify-writes continues the releases before it.
            let same_chain =
                |r: &&mut Release| r.scope == new.scope && world.grids.same_scopes(new.scope, r.by, new.by);
            match patterns.last.iter_mut().find(same_chain) {
                Some(old) => {
                    old.shared |= old.by != new.by;
                    old.past.join(&new.past);
                }
                None => patterns.last.push(new),
            }
        }
    }

    fn fence(&mut self, mask: u32, pc: u32, fence: Fence) {
        let World { grids, fences, history, .. } = &mut *self.world;
        if fence != Fence::Other {
            let tick = self.block.note_fence(self.warp, mask, pc, fence);
            history.fenced(self.block.key(self.warp), Fenced { pc, lanes: mask, tick, fence });
        }
        self.block.fence(grids, fences, self.warp, mask, fence);
    }

    fn sync_warp(&mut self, mask: u32) {
        self.block.sync_warp(self.warp, mask);
    }

    fn arrive(&mut self, mask: u32, barrier: u32) {
        self.block.arrive(self.warp, mask, barrier as usize);
    }

    fn arrive_relaxed(&mut self, mask: u32) {
        if mask != 0 {
            self.block.arrive_relaxed(self.warp, mask);
        }
    }

    fn pass(&mut self, mask: u32, barrier: u32) {
        self.block.pass(self.warp, mask, barrier as usize);
    }

    fn init_mbarrier(&mut self, pc: u32, offset: u64) {
        self.block.init_mbarrier(pc, offset_of(offset));
    }

    fn inval_mbarrier(&mut self, offset: u64) {
        self.block.inval_mbarrier(offset_of(offset));
    }

    fn has_mbarrier(&self, offset: u64) -> bool {
        self.block.has_mbarrier(offset_of(offset))
    }

    fn is_unseen(&self, offset: u64) -> bool {
        self.peers.at(self.block, offset).is_unseen(offset_of(offset))
    }

    fn undefined(
        &mut self,
        lane: usize,
        pc: u32,
        kind: FaultKind,
        recent: impl Iterator<Item = RecentStep>,
    ) -> Option<FaultKind> {
        let config = &self.world.config;
        let is_reported = match kind {
            FaultKind::NarrowArrival => config.races && !config.assume.cluster_arrivals,
            FaultKind::UnwrittenRegister { .. } => config.races,
            _ => true,
        };
        if !is_reported {
            return None;
        }
        let own = self.own(lane);
        let pair = (kind.name(), [self.line(own, pc); 2], None);
        if self.world.reports.count_again(&pair) {
            return None;
        }
        self.collect(pair, kind, (own, pc), recent)
    }

    fn arrive_mbarrier(&mut self, lane: usize, pc: u32, offset: u64, order: Order) {
        let reach = if self.peers.is_remote(offset) { Scope::Cluster } else { Scope::Cta };
        let past = self.block.arrival(self.warp, lane, order, reach);
        self.peers.of(self.block, offset).arrive_mbarrier(&past, pc, offset_of(offset));
    }

    fn complete_mbarrier(&mut self, offset: u64) {
        self.peers.of(self.block, offset).complete_mbarrier(offset_of(offset));
    }

    fn pass_mbarrier(&mut self, mask: u32, offset: u64, order: Order) {
        self.block.pass_mbarrier(self.warp, mask, offset_of(offset), order);
    }

    fn copy(&mut self, copy: &Copy) -> (Stale, Vec<(Place, bool, ViolationAt)>) {
        let &Copy { ref src, ref dst, lane, pc, completion, writes: how } = copy;
        let warp = self.block.key(self.warp);
        // A copy by `cp.async` is in the generic proxy, behind its lane's accesses before.
        let own = if how.bulk { 0 } else { self.own(lane) };
        let read = How { strong: None, size: 0, rmw: Update::No, ..how };
        let (reads, writes) = match completion {
            Completion::Mbarrier(offset) | Completion::Store(offset) => {
                let actor = self.peers.of(self.block, offset).load_actor(offset_of(offset));
                (actor, actor)
            }
            Completion::Group(committed) => {
                let group = committed + 1;
                ((clock::store_reads(warp, lane), group), (clock::store_writes(warp, lane), group))
            }
            Completion::Thread(number) => {
                let actor = (clock::copies(warp, lane), number);
                (actor, actor)
            }
        };
        dst.iter().for_each(|&(dst, bytes)| self.world.stores.add(warp, dst, bytes));
        let record = |(actor, tick), how| Record::of(actor, tick, pc, how);
        self.block.join_acquired(self.warp, lane);
        let mut past = self.block.past(self.warp, lane);
        let published = [SHARED, GLOBAL].map(|space| self.block.published(self.warp, lane, &past, space));
        let after_reads = how.bulk && self.world.config.assume.reads_before_bulk_copies;
        if after_reads {
            past.all.raise(self.own(lane), self.block.tick(self.warp));
        }
        let who = |place, actor, how: How| {
            let space = if matches!(place, Place::Shared { .. }) { SHARED } else { GLOBAL };
            Accessor {
                record: record(actor, how),
                own,
                published: how.bulk.then_some(&published[space]),
                view: PastView::all(&past),
            }
        };
        let mut old = vec![];
        if let (true, &[(src, bytes)]) = (self.weak_memory(), src.as_slice()) {
            let reader = who(src, reads, read);
            let mut picks = vec![];
            if let Some((shadow, grids, at, _)) = self.look(src, 1 << lane) {
                for o in (0..bytes).step_by(4) {
                    if let Some([value, ..]) = shadow.stale(grids, at + o, 4.min(bytes - o), &reader) {
                        picks.push((o, value));
                    }
                }
            }
            for pick in picks {
                let older = match &self.world.path {
                    Some(path) => path.sees_older(),
                    None => self.world.rng.below(2) == 0,
                };
                if older {
                    old.push(pick);
                }
            }
        }
        let mut violations = vec![];
        if let Completion::Mbarrier(mbarrier) | Completion::Store(mbarrier) = completion
            && self.peers.is_remote(mbarrier)
        {
            // Another block's mbarrier must have been initialised before.
            let place = Place::Shared { offset: mbarrier };
            let record = record(reads, How::WEAK);
            let lane_of =
                Accessor { record, own: self.own(lane), published: None, view: PastView::all(&past) };
            let found = self
                .look(place, 1 << lane)
                .and_then(|(shadow, grids, at, _)| shadow.take(grids, at, 8, &lane_of).first());
            let of_init =
                |found: &ViolationAt| matches!(found.1, Violation::Race { other, .. } if other.how.init);
            violations
                .extend(self.unless_only_weak(found.filter(of_init)).map(|found| (place, false, found)));
        }
        for &(src, bytes) in src {
            let reader = who(src, reads, read);
            let read = self
                .look(src, 1 << lane)
                .and_then(|(shadow, grids, at, _)| shadow.read(grids, at, bytes, &reader).first());
            violations.extend(self.unless_only_weak(read).map(|violation| (src, false, violation)));
        }
        for &(dst, bytes) in dst {
            let writer = who(dst, writes, How { after_reads, ..how });
            if let Place::Shared { offset } = dst
                && let Some(peer) = self.peers.other(offset)
            {
                peer.visit(writes.0, writes.1, pc, how, true);
            }
            let wrote = self.look(dst, 1 << lane).and_then(|(shadow, grids, at, _)| {
                shadow.write(grids, at, bytes, &writer, |_| false, NOT_KEPT).1.first()
            });
            violations.extend(self.unless_only_weak(wrote).map(|violation| (dst, true, violation)));
        }
        (old, violations)
    }

    fn closed(&mut self, lane: usize, pc: u32, group: u32) {
        self.world.history.closed(self.own(lane), pc, group);
    }

    fn waited(&mut self, lane: usize, pc: u32, group: u32, landed: bool) {
        self.world.history.waited(self.own(lane), Wait { pc, group, landed });
        self.block.waited(self.warp, lane, group, landed);
    }

    fn waited_for_copies(&mut self, lane: usize, pc: u32, copies: u32) {
        let by = clock::copies(self.block.key(self.warp), lane);
        self.world.history.waited(by, Wait { pc, group: copies, landed: true });
        self.block.waited_for_copies(self.warp, lane, copies);
    }

    fn landed(&mut self, landed: &Landed) {
        self.peers.landed(self.block, landed);
    }

    fn matrices(&mut self, read: &[Range<u64>], pc: u32, group: u32) -> Vec<(Place, ViolationAt)> {
        let record = Record::of(self.block.products(self.warp), group, pc, How::PRODUCT);
        self.block.join_acquired(self.warp, 0);
        let past = self.block.past(self.warp, 0);
        let published = self.block.published(self.warp, 0, &past, SHARED);
        let reader = Accessor { record, own: 0, published: Some(&published), view: PastView::all(&past) };
        let mut violations = vec![];
        for range in read {
            let (place, bytes) = (Place::Shared { offset: range.start }, range.end - range.start);
            let found = self
                .look(place, 1)
                .and_then(|(shadow, grids, at, _)| shadow.read(grids, at, bytes, &reader).first());
            violations.extend(self.unless_only_weak(found).map(|violation| (place, violation)));
        }
        violations
    }

    fn waited_products(&mut self, group: u32) {
        if group > 0 {
            self.block.waited_products(self.warp, group);
        }
    }

    fn in_step(&mut self, mask: u32) {
        if self.world.config.assume.converged_warps {
            self.block.sync_warp(self.warp, mask);
        } else if self.world.config.collect > 0 {
            // Only a class depends on it, and the shadow of a word that a warp polls grows.
            self.block.in_step(self.warp, mask);
        }
    }

    fn together(&mut self, mask: u32) {
        if self.world.config.assume.converged_warps && !mask.is_power_of_two() {
            self.block.sync_warp(self.warp, mask);
        }
    }

    fn report(&mut self, blamed: &Blamed, recent: impl Iterator<Item = RecentStep>) -> Option<FaultKind> {
        let past = self.block.past(self.warp, blamed.lane);
        let pair = self.pair(blamed, &past);
        if self.world.reports.count_again(&pair) {
            return None;
        }
        let &Blamed { lane, pc, how, write, beside, place, violation, .. } = blamed;
        let (own, mine) = (self.own(lane), self.record(lane, pc, how, write));
        let recent: Vec<_> = recent.collect();
        let me = report::Me {
            record: &mine,
            own,
            wrote: write,
            past: &past,
            block: self.block,
            peers: &self.peers,
            beside,
            recent: &recent,
        };
        let kind = report::fault(self.world, blamed.label.clone(), place, violation, &me);
        self.collect(pair, kind, (own, pc), recent.into_iter())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_split_into_lanes_that_are_alike_and_the_others() {
        let place = Place::Shared { offset: 64 };
        let row = Part { lanes: 0xff0, size: 8, width: 8, row: true };
        let split = |part: Part, alike| {
            let (here, rest) = part.split(alike, place);
            let each = |part: Part, place| part.each(place).collect::<Vec<_>>();
            let rest = rest.map_or(vec![], |(part, place)| each(part, place));
            (here, each(here, place).into_iter().chain(rest).collect::<Vec<_>>())
        };
        for (alike, here, is_row) in [
            (u32::MAX, 0xff0, true),
            (0xff0, 0xff0, true),
            (!0x100, 0x0f0, true),
            (0x810, 0x010, false),
            (0xff0 & !0x20, 0x010, false),
        ] {
            let (part, each) = split(row, alike);
            assert_eq!((part.lanes, part.row), (here, is_row), "{alike:#x}");
            // All lanes, each at its place.
            assert_eq!(each, row.each(place).collect::<Vec<_>>(), "{alike:#x}");
        }
        let same = Part { lanes: 0xff0, size: 4, width: 4, row: false };
        let (part, each) = split(same, 0xf10);
        assert_eq!((part.lanes, part.row), (0xf10, false));
        assert_eq!(each.len(), 8);
        assert!(each.iter().all(|(_, at)| *at == place));
        let last = Part { lanes: 1 << 31 | 1 << 30, size: 16, width: 16, row: true };
        assert_eq!(split(last, u32::MAX).0.lanes, 3 << 30);
    }
}
