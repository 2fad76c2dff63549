//! Shadow memory: for every word of memory, the last write and the reads since. A word is split
//! once an access has only some of its bytes. Each byte then has a history of its own, until a
//! write covers the whole word.

use std::collections::HashMap;
use std::sync::Arc;

use super::clock::{self, Key, VectorClock};
use super::grids::Grids;
use super::past::PastView;
use crate::ir::{Scope, Sem};

/// Words in a page of shadow, which comes to be when it is first touched.
const PAGE_WORDS: u64 = 1024;

/// One access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// The actor of the access; 0 for none.
    pub(crate) actor: Key,
    pub(crate) tick: u32,
    /// For a generic read: the lanes of the warp `actor` that read.
    pub(crate) lanes: u32,
    /// Instruction, in the kernel of the actor's grid.
    pub(crate) pc: u32,
    pub(crate) how: How,
    /// Bytes of the word.
    pub(crate) bytes: u8,
}

/// The manner of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct How {
    /// Relaxed or stronger, with this scope; weak otherwise.
    pub(crate) strong: Option<Scope>,
    /// Bytes of the whole access: two strong accesses that do not cover the same bytes are no
    /// better than weak ones.
    pub(crate) size: u8,
    /// It is a bulk copy's.
    pub(crate) bulk: bool,
    /// A read and a write in one.
    pub(crate) rmw: bool,
    /// A read by `ld.global.nc`: the memory must not change while the kernel runs.
    pub(crate) read_only: bool,
}

impl How {
    /// A plain access in the generic proxy.
    pub(crate) const WEAK: How = How { strong: None, size: 0, bulk: false, rmw: false, read_only: false };
    pub(crate) const BULK: How = How { bulk: true, ..How::WEAK };

    /// An access in the generic proxy, of elements of `size` bytes.
    pub(crate) fn generic(sem: Sem, scope: Scope, size: u8, rmw: bool) -> Self {
        Self { strong: (sem != Sem::Weak).then_some(scope), size, rmw, ..How::WEAK }
    }
}

const NOBODY: Record = Record { actor: 0, tick: 0, lanes: 0, pc: 0, how: How::WEAK, bytes: 0 };

/// The history of a word, or of a byte of a split word.
#[derive(Clone, Copy, Debug)]
struct Cell {
    write: Record,
    read: Record,
    /// Whether it was written.
    written: bool,
    /// The word is split: its bytes are in `Shadow::split`, and nothing else here counts.
    split: bool,
    /// More readers than one are in `Shadow::readers`.
    crowded: bool,
    /// Strong reads of the last write are in `Shadow::seen`.
    seen: bool,
    /// Kernels that read it as read-only memory are in `Shadow::read_only`.
    read_only: bool,
    /// The word before the last write, where it is known; of a byte, that byte of it counts.
    before: Option<u32>,
}

const UNTOUCHED: Cell = Cell {
    write: NOBODY,
    read: NOBODY,
    written: false,
    split: false,
    crowded: false,
    seen: false,
    read_only: false,
    before: None,
};

/// A piece of memory with a history: a word that is not split, or a byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Unit {
    word: u64,
    /// Which byte, of a split word.
    byte: Option<u8>,
}

impl Unit {
    /// Where it begins.
    fn at(self) -> u64 {
        4 * self.word + u64::from(self.byte.unwrap_or(0))
    }
}

/// The bytes of a word that are set in `mask`, as units.
fn bytes_of(word: u64, mask: u8) -> impl Iterator<Item = Unit> {
    (0..4).filter(move |byte| mask >> byte & 1 == 1).map(move |byte| Unit { word, byte: Some(byte) })
}

/// The readers of a unit, by warp.
#[derive(Clone, Debug, Default)]
struct Readers {
    by_actor: HashMap<Key, Vec<Record>>,
    count: usize,
    /// With more than this, those are looked for that need not be kept.
    limit: usize,
}

impl Readers {
    fn add(&mut self, grids: &Grids, me: Record, who: &Accessor) {
        let mine = self.by_actor.entry(me.actor).or_default();
        // Later reads of a lane stand for its earlier ones.
        if let Some(reader) = mine.iter_mut().find(|r| r.lanes & !me.lanes == 0) {
            *reader = me;
            return;
        }
        mine.push(me);
        self.count += 1;
        if self.count > self.limit.max(64) {
            // An access after this read is also after the reads in this reader's causal past.
            self.by_actor.retain(|_, records| {
                records.retain(|r| !by_lane(r).all(|key| who.after(grids, key, r)) || *r == me);
                !records.is_empty()
            });
            self.count = self.by_actor.values().map(Vec::len).sum();
            self.limit = 2 * self.count;
        }
    }
}

/// Names the byte at an offset of a piece of memory, such as `ready[3]`.
#[derive(Clone)]
pub(crate) struct Names(pub(crate) Arc<dyn Fn(u64) -> Option<String> + Send + Sync>);

impl std::fmt::Debug for Names {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Names")
    }
}

/// The shadow of one piece of memory.
#[derive(Debug, Default)]
pub(crate) struct Shadow {
    pages: Vec<Option<Box<[Cell]>>>,
    /// The bytes of split words.
    split: HashMap<u64, [Cell; 4]>,
    /// Where a unit has several readers that nothing orders.
    readers: HashMap<Unit, Readers>,
    /// Lanes that have observed the last write of a unit by a morally strong read, and the tick.
    /// The write comes before all accesses after one of these reads. The other accesses of its
    /// thread do not.
    seen: HashMap<Unit, Vec<(Key, u32)>>,
    /// Reads by `ld.global.nc` since the last write, the first of each kernel.
    read_only: HashMap<Unit, Vec<Record>>,
    /// Memory that is also accessed outside of the checker. Checked are only read-modify-writes
    /// against each other, and host reads by [`Memory::host_reads`](crate::Memory::host_reads)
    /// against kernels' writes.
    pub(crate) hidden: bool,
    /// Memory that was filled before the checker saw it: bytes without a seen write count as
    /// written.
    pub(crate) filled: bool,
    /// Names of its parts, for reports.
    pub(crate) names: Option<Names>,
    /// Identity of the device that it belongs to, and its label there.
    pub(crate) origin: Option<(u64, Arc<str>)>,
}

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

/// The actor of an access, and its causal past.
pub(crate) struct Accessor<'a> {
    pub(crate) record: Record,
    /// The lane's own key. Its causal past need not include its own accesses. Bulk copies have no
    /// such key.
    pub(crate) own: Key,
    pub(crate) view: PastView<'a>,
    /// For a bulk copy: the generic accesses that it may rely on.
    pub(crate) published: Option<&'a VectorClock>,
}

/// One lane of a record of reads.
fn by_lane(record: &Record) -> impl Iterator<Item = Key> + use<> {
    let (actor, lanes) = (record.actor, record.lanes);
    let lone = (lanes == 0).then_some(actor);
    crate::exec::lanes::lanes(lanes).map(move |l| clock::lane(actor, l)).chain(lone)
}

impl Accessor<'_> {
    fn after(&self, grids: &Grids, key: Key, record: &Record) -> bool {
        if record.how.bulk {
            return self.view.includes(grids, key, record.tick);
        }
        (key == self.own && !self.record.how.bulk) || self.after_tick(grids, key, record.tick)
    }

    /// Whether the access comes after all accesses of an actor up to a tick, bulk copies excepted.
    fn after_tick(&self, grids: &Grids, key: Key, tick: u32) -> bool {
        match self.published {
            Some(published) => grids.includes_tick(published, key, tick),
            None => self.view.includes(grids, key, tick),
        }
    }

    /// Both are strong, take in each other, and touch the same bytes in the same way.
    fn morally_strong(&self, grids: &Grids, key: Key, record: &Record) -> bool {
        let (Some(mine), Some(theirs)) = (self.record.how.strong, record.how.strong) else { return false };
        !record.how.bulk
            && !self.record.how.bulk
            && record.how.size == self.record.how.size
            && record.bytes == self.record.bytes
            && grids.mutual(mine, self.own, theirs, key)
    }

    /// Whether the access comes after the whole kernel of an actor.
    fn after_kernel_of(&self, grids: &Grids, key: Key) -> bool {
        let Some(facts) = grids.facts(key) else { return true };
        match self.published {
            Some(published) => published.timeline(facts.timeline) >= facts.tick,
            None => self.view.includes_all(facts.timeline, facts.tick),
        }
    }

    fn gets_on_with(&self, grids: &Grids, key: Key, record: &Record) -> bool {
        self.after(grids, key, record) || self.morally_strong(grids, key, record)
    }
}

impl Shadow {
    /// The shadow of untouched memory.
    pub(crate) fn new(hidden: bool, filled: bool) -> Self {
        Self { hidden, filled, ..Self::default() }
    }

    fn word(&mut self, index: u64) -> &mut Cell {
        let page = (index / PAGE_WORDS) as usize;
        if page >= self.pages.len() {
            self.pages.resize_with(page + 1, || None);
        }
        let fresh = Cell { written: self.filled, ..UNTOUCHED };
        let page =
            self.pages[page].get_or_insert_with(|| vec![fresh; PAGE_WORDS as usize].into_boxed_slice());
        &mut page[(index % PAGE_WORDS) as usize]
    }

    fn cell(&mut self, unit: Unit) -> &mut Cell {
        match unit.byte {
            None => self.word(unit.word),
            Some(byte) => &mut self.split.entry(unit.word).or_insert([UNTOUCHED; 4])[usize::from(byte)],
        }
    }

    /// The units of the bytes `mask` of a word, which is split where these are not all of it.
    fn units(&mut self, word: u64, mask: u8) -> impl Iterator<Item = Unit> + use<> {
        if mask != 15 {
            self.split(word);
        }
        let whole = mask == 15 && !self.is_split(word);
        // The mask of a whole word has one bit too many for a byte.
        let mut left = if whole { 16 } else { mask };
        std::iter::from_fn(move || {
            let byte = left.trailing_zeros() as u8;
            left &= left.wrapping_sub(1);
            (byte < 8).then_some(Unit { word, byte: (byte < 4).then_some(byte) })
        })
    }

    fn is_split(&mut self, word: u64) -> bool {
        !self.split.is_empty() && self.word(word).split
    }

    /// Gives each byte of a word a history of its own, which begins with the word's.
    fn split(&mut self, word: u64) {
        let whole = Unit { word, byte: None };
        let cell = *self.word(word);
        if cell.split {
            return;
        }
        self.word(word).split = true;
        self.split.insert(word, [cell; 4]);
        if let Some(readers) = self.readers.remove(&whole) {
            self.readers.extend(bytes_of(word, 15).map(|unit| (unit, readers.clone())));
        }
        if let Some(readers) = self.read_only.remove(&whole) {
            self.read_only.extend(bytes_of(word, 15).map(|unit| (unit, readers.clone())));
        }
        if let Some(seen) = self.seen.remove(&whole) {
            self.seen.extend(bytes_of(word, 15).map(|unit| (unit, seen.clone())));
        }
    }

    /// Each word of a range, and the bytes of it that the range has.
    fn words(at: u64, bytes: u64) -> impl Iterator<Item = (u64, u8)> {
        let end = at + bytes;
        (at / 4..end.div_ceil(4)).map(move |w| {
            let (from, to) = (at.max(4 * w) - 4 * w, end.min(4 * w + 4) - 4 * w);
            (w, ((1u16 << to) - (1 << from)) as u8)
        })
    }

    /// Notes a read of `bytes` bytes at `at`. Returns the first violation, if there is one: the
    /// byte and the reason.
    pub(crate) fn read(&mut self, grids: &Grids, at: u64, bytes: u64, who: &Accessor) -> Option<ViolationAt> {
        if self.hidden {
            return None;
        }
        let mut found = None;
        // Neighbouring words mostly have the same history.
        let (mut fine, mut replaceable) = (NOBODY, NOBODY);
        for (w, mask) in Self::words(at, bytes) {
            let mut me = who.record;
            me.bytes = mask;
            for unit in self.units(w, mask) {
                let mut cell = self.cell(unit);
                if !cell.written {
                    found = found.or(Some((unit.at(), Violation::Unwritten)));
                    continue;
                }
                let last = cell.write;
                if last.actor != 0 && last != fine {
                    let this = Accessor { record: me, ..*who };
                    if this.gets_on_with(grids, last.actor, &last) {
                        fine = last;
                    } else if cell.seen && self.observed(grids, unit, who) {
                        // Says nothing of other words that the same thread wrote.
                        cell = self.cell(unit);
                    } else {
                        found = found.or(Some((unit.at(), Violation::Race { other: last, wrote: true })));
                        cell = self.cell(unit);
                    }
                }
                let old = cell.read;
                let same = |o: &Record| o.actor == me.actor && o.how == me.how && o.pc == me.pc;
                if old.actor == 0 || old == replaceable {
                    cell.read = me;
                } else if same(&old) && old.tick == me.tick && old.bytes == me.bytes {
                    cell.read = Record { lanes: old.lanes | me.lanes, ..me };
                } else if by_lane(&old).all(|key| who.after(grids, key, &old)) {
                    // An access behind this read is behind that one too.
                    replaceable = old;
                    cell.read = me;
                } else {
                    cell.crowded = true;
                    self.readers.entry(unit).or_default().add(grids, me, who);
                }
            }
        }
        found
    }

    /// Notes a read by `ld.global.nc`, which [`Shadow::read`] has noted as a read. `begin` is the
    /// begin of its kernel: what comes after this kernel comes after those that had ended by then.
    pub(crate) fn read_only(&mut self, grids: &Grids, at: u64, bytes: u64, begin: &Accessor) {
        if self.hidden {
            return;
        }
        for (w, mask) in Self::words(at, bytes) {
            let me = Record { bytes: mask, ..begin.record };
            for unit in self.units(w, mask) {
                self.cell(unit).read_only = true;
                let readers = self.read_only.entry(unit).or_default();
                let grid = clock::grid_of(me.actor);
                if !readers.iter().any(|r| clock::grid_of(r.actor) == grid) {
                    readers.retain(|r| !begin.after_kernel_of(grids, r.actor));
                    readers.push(me);
                }
            }
        }
    }

    /// Checks a read of `bytes` bytes at `at` against the last writes: it must come after all of
    /// them. Nothing is noted. Host reads of hidden memory are checked so, and reads by
    /// `ld.global.nc`, for which `who` is the begin of their kernel.
    pub(crate) fn take(
        &mut self,
        grids: &Grids,
        at: u64,
        bytes: u64,
        who: &Accessor,
    ) -> Result<(), ViolationAt> {
        let mut fine = NOBODY;
        for (w, mask) in Self::words(at, bytes) {
            for unit in self.units(w, mask) {
                let last = self.cell(unit).write;
                if last.actor == 0 || last == fine {
                    continue;
                }
                if !who.after(grids, last.actor, &last) {
                    return Err((unit.at(), Violation::Race { other: last, wrote: true }));
                }
                fine = last;
            }
        }
        Ok(())
    }

    /// Notes a write of `bytes` bytes at `at`. Returns whether the range held a strong write, and
    /// the first violation, if there is one. Weak writes of equal values do no harm, so `unchanged`
    /// tells whether a word of memory already holds the written value. `before` gives the old value
    /// of the written bytes of a word, if it is known.
    pub(crate) fn write(
        &mut self,
        grids: &Grids,
        at: u64,
        bytes: u64,
        who: &Accessor,
        unchanged: impl Fn(u64) -> bool,
        before: impl Fn(u64) -> Option<u32>,
    ) -> (bool, Option<ViolationAt>) {
        // Neighbouring words mostly have the same history.
        let (mut fine, mut harmless) = (NOBODY, NOBODY);
        let (mut strong_before, mut found) = (false, None);
        let race = |unit: Unit, other, wrote| Some((unit.at(), Violation::Race { other, wrote }));
        for (w, mask) in Self::words(at, bytes) {
            let mut me = who.record;
            me.bytes = mask;
            let this = Accessor { record: me, ..*who };
            let value_before = if self.hidden { None } else { before(4 * w) };
            for unit in self.units(w, mask) {
                let cell = self.cell(unit);
                let (last, read, crowded, seen) = (cell.write, cell.read, cell.crowded, cell.seen);
                let read_only = std::mem::take(&mut cell.read_only);
                (cell.write, cell.read, cell.before) = (me, NOBODY, value_before);
                (cell.written, cell.crowded, cell.seen) = (true, false, false);
                if self.hidden && !(me.how.rmw && last.how.rmw) {
                    strong_before = true;
                    continue;
                }
                strong_before |= last.how.strong.is_some();
                if last.actor != 0
                    && last != fine
                    && !this.gets_on_with(grids, last.actor, &last)
                    && !(!last.how.rmw && !me.how.rmw && unchanged(4 * w))
                {
                    if !(seen && self.observed(grids, unit, who)) {
                        found = found.or(race(unit, last, true));
                    }
                } else {
                    fine = last;
                }
                let clash =
                    |r: &Record| r.actor != 0 && by_lane(r).any(|key| !this.gets_on_with(grids, key, r));
                if read_only
                    && let Some(readers) = self.read_only.remove(&unit)
                    && let Some(other) = readers.into_iter().find(|r| !this.after_kernel_of(grids, r.actor))
                {
                    found = found.or(race(unit, other, false));
                }
                if read != harmless {
                    if clash(&read) {
                        found = found.or(race(unit, read, false));
                    } else {
                        harmless = read;
                    }
                }
                if crowded {
                    let readers = self.readers.remove(&unit).unwrap_or_default();
                    if let Some(other) = readers.by_actor.into_values().flatten().find(clash) {
                        found = found.or(race(unit, other, false));
                    }
                }
                if seen {
                    self.seen.remove(&unit);
                }
            }
            if mask == 15 {
                self.join(w);
            }
        }
        (strong_before, found)
    }

    /// A write had all bytes of a word: they have one history again.
    fn join(&mut self, word: u64) {
        if self.is_split(word)
            && let Some([cell, ..]) = self.split.remove(&word)
        {
            *self.word(word) = cell;
        }
    }

    /// The value before the last write of a range, as little-endian words, if a reader may still
    /// see it. A reader may if the write is not in its past, and it does not come after a strong
    /// read of the write. None unless that holds for every byte, and a single write wrote all
    /// bytes.
    pub(crate) fn stale(&mut self, grids: &Grids, at: u64, bytes: u64, who: &Accessor) -> Option<[u32; 4]> {
        if self.hidden || bytes > 16 {
            return None;
        }
        let mut values = [0; 4];
        let mut writer = None;
        for (i, (w, mask)) in Self::words(at, bytes).enumerate() {
            for unit in self.units(w, mask) {
                let Cell { write, before, seen, .. } = *self.cell(unit);
                let one = *writer.get_or_insert((write.actor, write.tick, write.pc));
                if write.actor == 0
                    || one != (write.actor, write.tick, write.pc)
                    || who.after(grids, write.actor, &write)
                    || seen && self.observed(grids, unit, who)
                {
                    return None;
                }
                let of_unit = unit.byte.map_or(u32::MAX, |byte| 0xff << (8 * byte));
                *values.get_mut(i)? |= before? & of_unit;
            }
        }
        // Accesses are aligned: one that does not begin with a word is within one.
        values[0] >>= 8 * (at % 4);
        Some(values)
    }

    /// Notes that a strong read has seen the last write of a range.
    pub(crate) fn saw(&mut self, grids: &Grids, at: u64, bytes: u64, who: &Accessor) {
        for (w, mask) in Self::words(at, bytes) {
            let mut me = who.record;
            me.bytes = mask;
            let this = Accessor { record: me, ..*who };
            for unit in self.units(w, mask) {
                let cell = self.cell(unit);
                let last = cell.write;
                if last.actor == 0
                    || this.after(grids, last.actor, &last)
                    || !this.morally_strong(grids, last.actor, &last)
                {
                    continue;
                }
                cell.seen = true;
                let seen = self.seen.entry(unit).or_default();
                if !seen.iter().any(|s| s.0 == who.own) {
                    seen.push((who.own, me.tick));
                }
            }
        }
    }

    /// Whether an access comes after a strong read of the last write of a unit, so after that
    /// write.
    fn observed(&self, grids: &Grids, unit: Unit, who: &Accessor) -> bool {
        self.seen.get(&unit).is_some_and(|seen| {
            seen.iter().any(|&(key, tick)| key == who.own || who.after_tick(grids, key, tick))
        })
    }

    /// Forgets all accesses of a range: it counts as unwritten.
    pub(crate) fn renew(&mut self, at: u64, bytes: u64) {
        for (w, mask) in Self::words(at, bytes) {
            for unit in self.units(w, mask) {
                *self.cell(unit) = UNTOUCHED;
                self.readers.remove(&unit);
                self.read_only.remove(&unit);
                self.seen.remove(&unit);
            }
            if mask == 15 {
                self.join(w);
            }
        }
    }
}
