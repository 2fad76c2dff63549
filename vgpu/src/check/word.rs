//! The history of a word: its last write, earlier writes that this one is not ordered behind, and
//! the reads since. Words with equal histories share one.

use std::ops::Range;
use std::sync::Arc;

use super::clock::{self, Key};
use super::grids::Grids;
use super::record::{Accessor, Kind, NOBODY, Order, Record, Row, Update, Violation};

/// The history of a word, or of a byte of a split word.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct History {
    pub(super) write: Record,
    pub(super) read: Record,
    /// Whether it was written.
    pub(super) written: bool,
    /// Whether the shadow has the value before the last write.
    pub(super) before: bool,
    /// The first lane or row that has observed the last write by a morally strong read; actor 0
    /// where there is none. The write comes before all accesses after the read. The other accesses
    /// of its thread do not.
    seen: Seen,
    /// Rarely anything.
    more: Option<Arc<More>>,
}

/// The parts that few histories have.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct More {
    /// Readers besides `History::read`, unordered with it.
    readers: Readers,
    /// Lanes that have observed the last write besides `History::seen`.
    seen: Vec<Seen>,
    /// Reads by `ld.global.nc` since the last write, the first of each kernel.
    read_only: Vec<Record>,
    /// Writes that the last one is not ordered behind, and need not be: strong ones, or ones of an
    /// equal value. The last [`MOST_EARLIER`].
    earlier: Vec<Earlier>,
}

/// Writes before the last one that are kept.
const MOST_EARLIER: usize = 16;

/// A write before the last one, or those of several lanes of a warp by one instruction, and the
/// lanes that have observed it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Earlier {
    pub(super) write: Record,
    seen: Vec<Seen>,
}

impl Earlier {
    /// The first of these writes that an access of a lone actor does not come after.
    fn not_before(&self, grids: &Grids, who: &Accessor) -> Option<Record> {
        let write = self.write.each_write().find(|write| !who.after(grids, write.actor, write))?;
        (!is_observed(self.seen.iter().copied(), grids, who)).then_some(write)
    }
}

/// Whether an access of a lone actor comes after one of these strong reads of a write.
fn is_observed(mut seen: impl Iterator<Item = Seen>, grids: &Grids, who: &Accessor) -> bool {
    seen.any(|seen| seen.by == who.own || who.after_tick(grids, seen.by, seen.tick))
}

/// A lane that has observed a write, and its tick; or a row of lanes of the warp `by`, of which
/// each has observed the write of its own part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    by: Key,
    tick: u32,
    row: Row,
}

const UNSEEN: Seen = Seen { by: 0, tick: 0, row: Row::NONE };

impl Seen {
    /// The one lane that has observed the byte `at`.
    fn at(self, at: u64) -> Self {
        let lone = |lane| Self { by: clock::lane(self.by, lane), row: Row::NONE, ..self };
        self.row.lane(at).map_or(self, lone)
    }
}

/// Readers, sorted by actor.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Readers {
    all: Vec<Record>,
    /// Above this number, readers that need not be kept are removed.
    limit: usize,
}

impl Readers {
    /// The readers of an actor, or the place where they would be.
    fn of(&self, actor: Key) -> Range<usize> {
        // Warps mostly come in order. Long lists are seldom in the cache.
        if self.all.last().is_none_or(|last| last.actor < actor) {
            return self.all.len()..self.all.len();
        }
        let first = self.all.partition_point(|r| r.actor < actor);
        first..first + self.all[first..].iter().take_while(|r| r.actor == actor).count()
    }

    fn add(&mut self, grids: &Grids, who: &Accessor) {
        let me = who.record;
        let Range { start: first, end: last } = self.of(me.actor);
        // Later reads of a lane stand for its earlier ones.
        let replaced = |r: &Record| {
            if me.is_row() { r.row == me.row } else { !r.is_row() && r.lanes & !me.lanes == 0 }
        };
        if let Some(reader) = self.all[first..last].iter_mut().find(|r| replaced(r)) {
            *reader = me;
            return;
        }
        self.all.insert(last, me);
        if self.all.len() > self.limit.max(64) {
            // An access after this read is also after the reads in this reader's causal past.
            self.all.retain(|r| *r == me || who.order(grids, r) != Order::After);
            self.limit = 2 * self.all.len();
        }
    }
}

/// The change of a history by a read.
#[derive(Clone, Copy, Debug)]
pub(super) enum Noted {
    Nothing,
    /// `History::read` becomes this.
    Read(Record),
    /// One more reader.
    Reader,
}

/// Accesses that were found not to race with the present one: neighbours mostly have the same.
#[derive(Debug)]
pub(super) struct Fine {
    pub(super) write: Record,
    pub(super) read: Record,
    /// Some are not ordered, and need not be. For a write: whether that holds for `write`.
    pub(super) unordered: bool,
    /// For a write to whole words: the readers besides `read`.
    more: Option<Arc<More>>,
}

impl Default for Fine {
    fn default() -> Self {
        Self { write: NOBODY, read: NOBODY, unordered: false, more: None }
    }
}

impl History {
    pub(super) const fn untouched(written: bool) -> Self {
        Self { write: NOBODY, read: NOBODY, written, before: false, seen: UNSEEN, more: None }
    }

    /// The history behind a write.
    pub(super) fn written_by(write: Record, before: bool) -> Self {
        Self { write, before, ..Self::untouched(true) }
    }

    fn more(&mut self) -> &mut More {
        Arc::make_mut(self.more.get_or_insert_default())
    }

    fn readers(&self) -> &[Record] {
        self.more.as_ref().map_or(&[], |more| &more.readers.all)
    }

    /// Writes that the last one is not ordered behind.
    pub(super) fn earlier(&self) -> &[Earlier] {
        self.more.as_ref().map_or(&[], |more| &more.earlier)
    }

    /// The last reads since the last write.
    pub(super) fn reads(&self) -> impl Iterator<Item = &Record> {
        std::iter::once(&self.read).chain(self.readers()).filter(|read| read.actor != 0)
    }

    fn read_only(&self) -> &[Record] {
        self.more.as_ref().map_or(&[], |more| &more.read_only)
    }

    /// Makes it the history of the one word or byte at `at`, where each row is an access of one
    /// lane.
    pub(super) fn narrow(&mut self, at: u64) {
        self.write = self.write.at(at, Kind::Write);
        self.read = self.read.at(at, Kind::Read);
        self.seen = self.seen.at(at);
        if self.readers().iter().any(Record::is_row) {
            self.more().readers.all.iter_mut().for_each(|r| *r = r.at(at, Kind::Read));
        }
    }

    /// Checks a read of all of a range with this history. Returns what changes; `None` where that
    /// differs within the range, or a violation may be found: [`History::read`] must decide for
    /// each word and lane.
    pub(super) fn read_all(&self, grids: &Grids, who: &Accessor, fine: &mut Fine) -> Option<Noted> {
        if !self.written {
            return None;
        }
        let (me, last, old) = (who.record, &self.write, &self.read);
        if last.actor != 0 && *last != fine.write {
            if who.order(grids, last) != Order::After {
                fine.unordered = true;
                if !who.morally_strong(grids, last) {
                    return None;
                }
            }
            fine.write = *last;
        }
        let in_order =
            |e: &Earlier| who.order(grids, &e.write) == Order::After || who.morally_strong(grids, &e.write);
        if !self.earlier().iter().all(in_order) {
            return None;
        }
        if old.actor == 0 || *old == fine.read {
            return Some(Noted::Read(me));
        }
        if old.row == me.row && old.joins(&me) {
            return Some(if old.lanes | me.lanes == old.lanes {
                Noted::Nothing
            } else {
                Noted::Read(Record { lanes: old.lanes | me.lanes, ..me })
            });
        }
        match who.order(grids, old) {
            Order::After => {
                // An access behind this read is behind that one too.
                fine.read = *old;
                Some(Noted::Read(me))
            }
            Order::Unordered => Some(Noted::Reader),
            Order::ByLane => None,
        }
    }

    /// Whether this read is one of the readers already.
    pub(super) fn has_reader(&self, me: &Record) -> bool {
        let Some(more) = &self.more else { return false };
        more.readers.all[more.readers.of(me.actor)].contains(me)
    }

    /// Applies the result of [`History::read_all`].
    pub(super) fn apply(&mut self, grids: &Grids, who: &Accessor, noted: Noted) {
        match noted {
            Noted::Nothing => {}
            Noted::Read(read) => self.read = read,
            Noted::Reader => self.more().readers.add(grids, who),
        }
    }

    /// Notes a read by a lone actor of the word that this is the history of. Returns the violation,
    /// if there is one.
    pub(super) fn read(&mut self, grids: &Grids, who: &Accessor) -> Option<Violation> {
        if !self.written {
            return Some(Violation::Unwritten);
        }
        let (me, last, old) = (who.record, self.write, self.read);
        // An observed write proves nothing about other words that its thread wrote.
        let fine = last.actor == 0
            || who.does_not_race_with(grids, last.actor, &last)
            || self.is_observed(grids, who);
        if old.actor == 0 {
            self.read = me;
        } else if old.joins(&me) {
            self.read = Record { lanes: old.lanes | me.lanes, ..me };
        } else if old.actors().all(|key| who.after(grids, key, &old)) {
            self.read = me;
        } else {
            self.more().readers.add(grids, who);
        }
        let other = if fine { self.earlier_race(grids, who) } else { Some(last) }?;
        Some(Violation::Race { other, wrote: true })
    }

    /// A write before the last one that an access of a lone actor races with.
    fn earlier_race(&self, grids: &Grids, who: &Accessor) -> Option<Record> {
        let races = |write: &Record| !who.morally_strong(grids, write);
        self.earlier().iter().find_map(|e| e.not_before(grids, who).filter(races))
    }

    /// Whether a write computes with an old value that nothing has written.
    fn lacks_old_value(&self, me: &Record) -> bool {
        me.how.rmw == Update::Modifies && !self.written
    }

    /// Whether a write to all of a range with this history breaks no rule. If not,
    /// [`History::clash`] must decide for each word and lane.
    pub(super) fn is_free(&self, grids: &Grids, who: &Accessor, fine: &mut Fine) -> bool {
        if self.lacks_old_value(&who.record) {
            return false;
        }
        let free = |other: &Record| {
            other.actor == 0 || who.order(grids, other) == Order::After || who.morally_strong(grids, other)
        };
        let free_of_read = |read: &Record| {
            free(read) || who.record.how.after_reads && who.beside_reads().order(grids, read) == Order::After
        };
        if self.write != fine.write {
            let after = self.write.actor == 0 || who.order(grids, &self.write) == Order::After;
            if !after && !who.morally_strong(grids, &self.write) {
                return false;
            }
            (fine.write, fine.unordered) = (self.write, !after);
        }
        if self.read != fine.read {
            if !free_of_read(&self.read) {
                return false;
            }
            fine.read = self.read;
        }
        let Some(more) = &self.more else { return true };
        // Neighbours mostly have equal lists, and each may be long.
        if who.record.bytes == 15 && fine.more.as_ref() == Some(more) {
            return true;
        }
        let free = more.readers.all.iter().all(free_of_read)
            && more.earlier.iter().all(|e| free(&e.write))
            && more.read_only.iter().all(|r| who.after_kernel_of(grids, r.actor));
        if free && who.record.bytes == 15 {
            fine.more = Some(more.clone());
        }
        free
    }

    /// The violation of a write by a lone actor to the word that this is the history of.
    /// `unchanged`: memory already holds the written value. Weak writes of equal values do no harm.
    pub(super) fn clash(
        &self,
        grids: &Grids,
        who: &Accessor,
        unchanged: impl Fn() -> bool,
    ) -> Option<Violation> {
        let (me, last) = (&who.record, &self.write);
        if self.lacks_old_value(me) {
            return Some(Violation::Unwritten);
        }
        let equal_values = || !last.how.is_rmw() && !me.how.is_rmw() && unchanged();
        let fine = last.actor == 0
            || who.does_not_race_with(grids, last.actor, last)
            || self.is_observed(grids, who)
            || equal_values();
        if !fine {
            return Some(Violation::Race { other: *last, wrote: true });
        }
        if let Some(other) = self.earlier_race(grids, who)
            && !equal_values()
        {
            return Some(Violation::Race { other, wrote: true });
        }
        let beside = who.beside_reads();
        let clashes =
            |r: &&Record| r.actor != 0 && r.actors().any(|key| !beside.does_not_race_with(grids, key, r));
        let in_use = |r: &&Record| !who.after_kernel_of(grids, r.actor);
        // A read that the write is not ordered behind is the worse one.
        let other = (std::iter::once(&self.read).find(clashes))
            .or_else(|| self.readers().iter().find(clashes))
            .or_else(|| self.read_only().iter().find(in_use))?;
        Some(Violation::Race { other: *other, wrote: false })
    }

    /// The history behind a write by the lone actor `who` that breaks no rule; `write` is its
    /// record, or that of its row. The history is that of one word or byte ([`History::narrow`]).
    /// Writes that the new one is not ordered behind are kept: an access behind the new one alone
    /// may race with them.
    pub(super) fn overwritten(&self, grids: &Grids, who: &Accessor, write: Record, before: bool) -> History {
        let kept = |e: &&Earlier| e.not_before(grids, who).is_some();
        let mut earlier: Vec<Earlier> = self.earlier().iter().filter(kept).cloned().collect();
        let last = Earlier { write: self.write.in_warp(), seen: self.seen().collect() };
        // A read-modify-write observes the last write.
        if last.write.actor != 0 && !write.how.is_rmw() && kept(&&last) {
            let same = |e: &&mut Earlier| e.write.joins(&last.write) && e.seen == last.seen;
            match earlier.iter_mut().find(same) {
                Some(e) => e.write.lanes |= last.write.lanes,
                None => earlier.push(last),
            }
            if earlier.len() > MOST_EARLIER {
                earlier.remove(0);
            }
        }
        let mut new = History::written_by(write, before);
        if !earlier.is_empty() {
            new.more().earlier = earlier;
        }
        new
    }

    /// Whether a read by `ld.global.nc` of this actor's kernel is noted.
    pub(super) fn has_read_only(&self, actor: Key) -> bool {
        self.read_only().iter().any(|r| clock::grid_of(r.actor) == clock::grid_of(actor))
    }

    /// Notes a read by `ld.global.nc` of a kernel that begins at `begin`.
    pub(super) fn note_read_only(&mut self, grids: &Grids, begin: &Accessor) {
        let read_only = &mut self.more().read_only;
        read_only.retain(|r| !begin.after_kernel_of(grids, r.actor));
        read_only.push(begin.record);
    }

    /// Notes that the lane `who` has observed the last write by a strong read. The history is that
    /// of one word or byte ([`History::narrow`]).
    pub(super) fn note_seen(&mut self, grids: &Grids, who: &Accessor) {
        if !self.awaits_note(grids, who) {
            return;
        }
        let new = Seen { by: who.own, tick: who.record.tick, row: Row::NONE };
        if self.seen.by == 0 {
            self.seen = new;
        } else if !self.seen().any(|s| s.by == who.own) {
            self.more().seen.push(new);
        }
    }

    /// The note that a lane, or each lane of a row, has observed the last write of all of a range
    /// with this history. `None` where [`History::note_seen`] must decide for each word and lane.
    /// `order`: that of the access behind the last write.
    pub(super) fn seen_by_all(&self, grids: &Grids, who: &Accessor, order: Order) -> Option<Seen> {
        let record = &who.record;
        let seen = Seen { by: who.own, tick: record.tick, row: record.row };
        if (record.is_wide() && !record.is_row()) || order != Order::Unordered {
            return None;
        }
        let noted = self.seen.by == seen.by && self.seen.row == seen.row;
        match noted {
            true => Some(self.seen),
            false if self.seen.by == 0 && who.morally_strong(grids, &self.write) => Some(seen),
            false => None,
        }
    }

    /// Whether [`History::note_seen`] has nothing to do for a lone lane in the one word or byte at
    /// `at`, because the lane has noted it before.
    pub(super) fn has_noted(&self, who: &Accessor, at: u64) -> bool {
        !who.record.is_wide() && self.seen().any(|seen| seen.at(at).by == who.own)
    }

    /// Applies the result of [`History::seen_by_all`].
    pub(super) fn set_seen(&mut self, seen: Seen) {
        self.seen = seen;
    }

    /// Whether [`History::set_seen`] would change nothing.
    pub(super) fn has_seen(&self, seen: Seen) -> bool {
        self.seen == seen
    }

    /// Whether the last write is morally strong with the access `who`, and not in its past.
    fn awaits_note(&self, grids: &Grids, who: &Accessor) -> bool {
        let last = &self.write;
        last.actor != 0 && !who.after(grids, last.actor, last) && who.morally_strong(grids, last)
    }

    /// The order of an access behind the last write, in all of a range with this history. `None`
    /// where [`History::note_seen`] has nothing to do.
    pub(super) fn order_to_note(&self, grids: &Grids, who: &Accessor) -> Option<Order> {
        let last = &self.write;
        if last.actor == 0 || last.how.strong.is_none() {
            return None;
        }
        Some(who.order(grids, last)).filter(|order| *order != Order::After)
    }

    /// Whether an access of a lone actor comes after a strong read of the last write, so after that
    /// write. The history is that of one word or byte ([`History::narrow`]).
    pub(super) fn is_observed(&self, grids: &Grids, who: &Accessor) -> bool {
        is_observed(self.seen(), grids, who)
    }

    /// The same for the byte `at` of a range with this history.
    pub(super) fn is_observed_at(&self, grids: &Grids, who: &Accessor, at: u64) -> bool {
        is_observed(self.seen().map(|seen| seen.at(at)), grids, who)
    }

    /// Lanes and rows that have observed the last write.
    fn seen(&self) -> impl Iterator<Item = Seen> {
        let more = self.more.iter().flat_map(|more| &more.seen);
        std::iter::once(&self.seen).filter(|seen| seen.by != 0).chain(more).copied()
    }
}

impl Record {
    /// Whether this read and `new` can be one record of several lanes.
    fn joins(&self, new: &Record) -> bool {
        self.actor == new.actor
            && self.how == new.how
            && self.pc == new.pc
            && self.tick == new.tick
            && self.bytes == new.bytes
    }
}

/// Number of a history.
pub(super) type Id = u32;

/// The history of untouched words.
pub(super) const UNTOUCHED: Id = 0;

/// A history, and how many words and bytes have it.
#[derive(Debug)]
struct Entry {
    history: History,
    uses: u32,
    stamp: Stamp,
}

/// Stands for the contents of a history: other contents have another stamp.
pub(super) type Stamp = u32;

/// The stamp of all histories once there are no more numbers. It identifies no contents.
const NO_STAMP: Stamp = Stamp::MAX;

/// All histories of a piece of memory.
#[derive(Debug)]
pub(super) struct Histories {
    all: Vec<Entry>,
    free: Vec<Id>,
    /// The last stamp.
    stamps: Stamp,
}

impl Histories {
    /// Histories of memory that is all untouched. `written`: it counts as written.
    pub(super) fn new(written: bool) -> Self {
        let history = History::untouched(written);
        Self { all: vec![Entry { history, uses: 0, stamp: 0 }], free: vec![], stamps: 0 }
    }

    pub(super) fn get(&self, id: Id) -> &History {
        &self.all[id as usize].history
    }

    /// The stamp of a history.
    pub(super) fn stamp(&self, id: Id) -> Option<Stamp> {
        Some(self.all[id as usize].stamp).filter(|stamp| *stamp != NO_STAMP)
    }

    /// The last stamp that was given out.
    pub(super) fn last_stamp(&self) -> Option<Stamp> {
        Some(self.stamps).filter(|stamp| *stamp != NO_STAMP)
    }

    /// A new stamp.
    pub(super) fn next_stamp(&mut self) -> Stamp {
        self.stamps = self.stamps.saturating_add(1);
        self.stamps
    }

    /// The history, if just these `uses` words or bytes have it, to change it.
    pub(super) fn alone(&mut self, id: Id, uses: u32) -> Option<&mut History> {
        if self.all[id as usize].uses != uses || id == UNTOUCHED {
            return None;
        }
        let stamp = self.next_stamp();
        let entry = &mut self.all[id as usize];
        entry.stamp = stamp;
        Some(&mut entry.history)
    }

    /// Adds a history that no word has yet.
    pub(super) fn add(&mut self, history: History) -> Id {
        let entry = Entry { history, uses: 0, stamp: self.next_stamp() };
        match self.free.pop() {
            Some(id) => {
                self.all[id as usize] = entry;
                id
            }
            None => {
                self.all.push(entry);
                (self.all.len() - 1) as Id
            }
        }
    }

    /// More words or bytes have this history.
    pub(super) fn take(&mut self, id: Id, more: u32) {
        if id != UNTOUCHED {
            self.all[id as usize].uses += more;
        }
    }

    /// Fewer words or bytes have this history.
    pub(super) fn release(&mut self, id: Id, fewer: u32) {
        if id == UNTOUCHED {
            return;
        }
        let Entry { history, uses, .. } = &mut self.all[id as usize];
        *uses -= fewer;
        if *uses == 0 {
            history.more = None;
            self.free.push(id);
        }
    }
}
