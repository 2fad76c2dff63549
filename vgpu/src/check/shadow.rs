//! Shadow memory: for every word of memory, the last write and the reads since. A word is split
//! once an access has only some of its bytes. Each byte then has a history of its own, until all
//! four have the same.
//!
//! Words hold the numbers of their histories. An access that covers many words changes the history
//! of a run of equal words once, because copies and whole warps access long ranges at once.

use std::ops::Range;
use std::sync::Arc;

use super::clock::{self, Key};
use super::grids::Grids;
use super::past::{CausalPast, PastView};
use super::record::{Accessor, How, Kind, NOBODY, Record, Violation, Violations};
use super::word::{Fine, Histories, History, Id, Noted, Stamp, UNTOUCHED};

/// Bytes of memory of which a page is the shadow. Pages are allocated when first accessed.
const PAGE: u64 = 4096;
const WORDS: usize = PAGE as usize / 4;

/// How far a report searches for written words around an unwritten one, in bytes.
const NEAR: u64 = 1 << 16;

/// Stands for the number of a history where a word is split.
const SPLIT: Id = Id::MAX;

/// The shadow of [`PAGE`] bytes.
#[derive(Debug)]
struct Page {
    words: Box<[Id]>,
    /// The histories of the bytes of split words. Allocated with the first split word.
    bytes: Option<Box<[Id]>>,
    /// The words before their last writes, where [`History::before`] is set.
    before: Option<Box<[u32]>>,
}

/// Neighbouring words with one history, or bytes of a split word with one history.
struct Run<'a> {
    ids: &'a mut [Id],
    /// The first byte.
    at: u64,
    /// Bytes of each: 4 or 1.
    each: u64,
    /// Bytes of the word that the access has.
    mask: u8,
}

impl Run<'_> {
    fn id(&self) -> Id {
        self.ids[0]
    }

    fn len(&self) -> u32 {
        self.ids.len() as u32
    }

    /// Gives all of the run another history.
    fn set(&mut self, histories: &mut Histories, id: Id) {
        histories.take(id, self.len());
        histories.release(self.id(), self.len());
        self.ids.fill(id);
    }

    /// Calls `f` with the history of each word or byte, which becomes its own, and where it begins.
    fn each(&mut self, histories: &mut Histories, mut f: impl FnMut(&mut History, u64)) {
        let mut last: Option<Id> = None;
        for (i, id) in (0..).zip(self.ids.iter_mut()) {
            let at = self.at + i * self.each;
            if let Some(history) = histories.alone(*id, 1) {
                history.narrow(at);
                f(history, at);
                match last {
                    Some(last) if *histories.get(last) == *histories.get(*id) => {
                        histories.take(last, 1);
                        histories.release(*id, 1);
                        *id = last;
                    }
                    _ => last = Some(*id),
                }
                continue;
            }
            let mut history = histories.get(*id).clone();
            history.narrow(at);
            f(&mut history, at);
            let new = match last {
                Some(last) if *histories.get(last) == history => last,
                _ => histories.add(history),
            };
            histories.take(new, 1);
            histories.release(*id, 1);
            (*id, last) = (new, Some(new));
        }
    }
}

/// How many of the first elements are equal.
fn equal(ids: &[Id]) -> usize {
    const AT_ONCE: usize = 16;
    let first = ids[0];
    let differs = |chunk: &&[Id]| chunk.iter().fold(0, |all, id| all | (id ^ first)) != 0;
    let from = AT_ONCE * ids.chunks_exact(AT_ONCE).take_while(|chunk| !differs(chunk)).count();
    from + ids[from..].iter().take_while(|id| **id == first).count()
}

impl Page {
    fn new() -> Self {
        Self { words: vec![UNTOUCHED; WORDS].into_boxed_slice(), bytes: None, before: None }
    }

    /// Calls `f` for each run of the bytes `from .. to` of this page, which begins at `start`.
    fn runs(
        &mut self,
        histories: &mut Histories,
        start: u64,
        (mut from, to): (u64, u64),
        f: &mut impl FnMut(&mut Histories, Run<'_>),
    ) {
        while from < to {
            let word = (from / 4) as usize;
            let end = to.min(4 * word as u64 + 4);
            let mask = ((1u16 << (end - 4 * word as u64)) - (1 << (from % 4))) as u8;
            if mask == 15 && self.words[word] != SPLIT {
                let ids = &mut self.words[word..(to / 4) as usize];
                let len = equal(ids);
                f(histories, Run { ids: &mut ids[..len], at: start + from, each: 4, mask });
                from += 4 * len as u64;
            } else {
                self.bytes(histories, start, (from, end), mask, f);
                from = end;
            }
        }
    }

    /// Calls `f` for each run of the bytes `from .. to` of a word, which is split for it.
    fn bytes(
        &mut self,
        histories: &mut Histories,
        start: u64,
        (mut from, to): (u64, u64),
        mask: u8,
        f: &mut impl FnMut(&mut Histories, Run<'_>),
    ) {
        let word = (from / 4) as usize;
        let bytes = self.bytes.get_or_insert_with(|| vec![UNTOUCHED; PAGE as usize].into_boxed_slice());
        let of_word = 4 * word..4 * word + 4;
        let whole = std::mem::replace(&mut self.words[word], SPLIT);
        if whole != SPLIT {
            bytes[of_word.clone()].fill(whole);
            histories.take(whole, 3);
        }
        while from < to {
            let ids = &mut bytes[from as usize..to as usize];
            let len = ids.iter().take_while(|id| **id == ids[0]).count();
            f(histories, Run { ids: &mut ids[..len], at: start + from, each: 1, mask });
            from += len as u64;
        }
        let first = bytes[4 * word];
        if bytes[of_word].iter().all(|id| *id == first) {
            self.words[word] = first;
            histories.release(first, 3);
        }
    }
}

/// A read that was found in order and is to be noted. `view` is the number of its reader's causal
/// past.
#[derive(Clone, Copy, Debug)]
struct Deferred {
    record: Record,
    own: Key,
    at: u64,
    bytes: u64,
    view: usize,
}

/// Reads of a block's shared memory that are not noted yet. Some of it is never written again: a
/// block reads what its warps have exchanged, and ends. The reads are noted before another access
/// to their range that is not deferred, with the causal pasts that their readers had.
#[derive(Debug, Default)]
struct Later {
    /// Whether reads may be deferred: until [`Later::NOTED`] had to be noted after all.
    on: bool,
    reads: Vec<Deferred>,
    /// Causal pasts, and the ticks that their warps have met at.
    views: Vec<(CausalPast, (Key, u32))>,
    /// All reads are within these bytes.
    range: Range<u64>,
    /// Reads that had to be noted.
    noted: usize,
}

impl Later {
    /// Reads that may have to be noted before deferring ends, and the most that are kept.
    const NOTED: usize = 32;
    const MOST: usize = 4096;
    /// Reads that there is room for at first.
    const ROOM: usize = 256;

    #[inline(always)]
    fn meets(&self, at: u64, bytes: u64) -> bool {
        !self.reads.is_empty() && at < self.range.end && self.range.start < at + bytes
    }

    fn add(&mut self, at: u64, bytes: u64, who: &Accessor) {
        let same = |(past, met): &(CausalPast, _)| past.same(who.view.past) && *met == who.view.met;
        if !self.views.last().is_some_and(same) {
            self.views.push((who.view.past.clone(), who.view.met));
        }
        if self.reads.is_empty() {
            self.range = at..at + bytes;
            self.reads.reserve(Self::ROOM);
        }
        self.range = self.range.start.min(at)..self.range.end.max(at + bytes);
        let view = self.views.len() - 1;
        self.reads.push(Deferred { record: who.record, own: who.own, at, bytes, view });
    }
}

/// A read while it is noted.
struct Noting {
    violations: Violations,
    fine: Fine,
    /// Histories before and after the last change.
    changed: (Id, Id),
}

impl Default for Noting {
    fn default() -> Self {
        Self { violations: Violations::default(), fine: Fine::default(), changed: (SPLIT, SPLIT) }
    }
}

impl Noting {
    /// Notes the read of a run.
    #[inline(always)]
    fn note(&mut self, grids: &Grids, who: &Accessor, histories: &mut Histories, mut run: Run<'_>) {
        // The host may read unwritten memory, as a debugger does. A race may lie behind it.
        let by_host = clock::is_timeline(who.own);
        let mut who = *who;
        who.record.bytes = run.mask;
        let old = run.id();
        match histories.get(old).read_all(grids, &who, &mut self.fine) {
            Some(Noted::Nothing) => {}
            Some(Noted::Reader) if histories.get(old).has_reader(&who.record) => {}
            Some(_) if self.changed.0 == old => run.set(histories, self.changed.1),
            Some(noted) => {
                if let Some(history) = histories.alone(old, run.len()) {
                    return history.apply(grids, &who, noted);
                }
                let mut history = histories.get(old).clone();
                history.apply(grids, &who, noted);
                let new = histories.add(history);
                run.set(histories, new);
                self.changed = (old, new);
            }
            None => run.each(histories, |history, at| {
                for (lane, who) in who.at(at, Kind::Read) {
                    if let Some(violation) = history.read(grids, &who)
                        && !(by_host && violation == Violation::Unwritten)
                    {
                        self.violations.note(lane, (at, violation));
                    }
                }
            }),
        }
    }

    fn end(mut self) -> Violations {
        self.violations.may_observe = self.fine.unordered;
        self.violations
    }
}

/// For writes whose old values no load may return.
pub(super) const NOT_KEPT: Option<fn(u64) -> u32> = None;

/// A range of offsets whose elements of `bytes` bytes have names, such as `ready[3]`.
#[derive(Debug)]
struct Part {
    range: Range<u64>,
    bytes: u64,
    label: Arc<str>,
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
#[derive(Debug)]
pub(crate) struct Shadow {
    pages: Vec<Option<Page>>,
    histories: Histories,
    later: Later,
    /// Memory that is also accessed outside of the checker. Checked are only read-modify-writes
    /// against each other, and host reads by [`Memory::host_reads`](crate::Memory::host_reads)
    /// against kernels' writes.
    pub(crate) hidden: bool,
    /// Names of its parts, for reports.
    pub(crate) names: Option<Names>,
    /// Later ones hide earlier ones, and all of them `names`.
    parts: Vec<Part>,
    /// Identity of the device that it belongs to, and its label there.
    pub(crate) origin: Option<(u64, Arc<str>)>,
    /// The time in the history at which it was mapped.
    pub(crate) since: u64,
}

impl Default for Shadow {
    fn default() -> Self {
        Self::new(false, false)
    }
}

impl Shadow {
    /// The shadow of untouched memory. `filled`: memory that was filled before the checker tracked
    /// it, where bytes without a recorded write count as written.
    pub(crate) fn new(hidden: bool, filled: bool) -> Self {
        let (histories, later) = (Histories::new(filled), Later::default());
        Self { pages: vec![], histories, later, hidden, names: None, parts: vec![], origin: None, since: 0 }
    }

    /// Names the elements of `bytes` bytes in a range of offsets.
    pub(crate) fn name_part(&mut self, range: Range<u64>, bytes: u64, label: Arc<str>) {
        // A range that is named again and again, in a loop, stays one part.
        self.parts.retain(|part| part.range != range);
        self.parts.push(Part { range, bytes, label });
    }

    /// The name of the byte at an offset, if it has one.
    pub(crate) fn name(&self, at: u64) -> Option<String> {
        match self.parts.iter().rev().find(|part| part.range.contains(&at)) {
            Some(part) => Some(format!("{}[{}]", part.label, (at - part.range.start) / part.bytes)),
            None => self.names.as_ref().and_then(|names| (names.0)(at)),
        }
    }

    /// The shadow of memory that is mostly read for the last time: its reads are noted late.
    pub(crate) fn deferring(filled: bool) -> Self {
        Self { later: Later { on: true, ..Later::default() }, ..Self::new(false, filled) }
    }

    /// Defers a read, if it is one of words by lanes in the generic proxy, and behind the last
    /// writes of all of them.
    #[inline(never)]
    fn defers(&mut self, grids: &Grids, at: u64, bytes: u64, who: &Accessor) -> bool {
        let How { strong, late, read_only, .. } = who.record.how;
        let by_lanes = strong.is_none() && !late && !read_only && who.published.is_none();
        if !by_lanes || clock::is_timeline(who.own) || !who.view.is_joined() {
            return false;
        }
        let Some(Some(page)) = self.pages.get((at / PAGE) as usize) else { return false };
        let first = (at % PAGE) as usize / 4;
        let Some(words) = page.words.get(first..first + bytes as usize / 4) else { return false };
        if (at | bytes) & 3 != 0 {
            return false;
        }
        let (mut last, mut fine) = (SPLIT, NOBODY);
        for id in words {
            if *id == SPLIT {
                return false;
            }
            if *id == last {
                continue;
            }
            let history = self.histories.get(*id);
            let History { written, write, .. } = history;
            let in_order = write.actor == 0 || *write == fine || who.follows(grids, write);
            if !written || !in_order || !history.earlier().is_empty() {
                return false;
            }
            (last, fine) = (*id, *write);
        }
        self.histories.next_stamp();
        self.later.add(at, bytes, who);
        if self.later.reads.len() == Later::MOST {
            self.note_deferred(grids);
        }
        true
    }

    /// Notes the deferred reads, if one of them meets this range.
    #[inline(always)]
    fn settle(&mut self, grids: &Grids, at: u64, bytes: u64) {
        if self.later.meets(at, bytes) {
            self.note_deferred(grids);
        }
    }

    #[cold]
    fn note_deferred(&mut self, grids: &Grids) {
        let Later { reads, views, noted, .. } = std::mem::take(&mut self.later);
        for Deferred { record, own, at, bytes, view } in &reads {
            let (past, met) = &views[*view];
            let view = PastView { met: *met, ..PastView::all(past) };
            let who = Accessor { record: *record, own: *own, view, published: None };
            self.note_read(grids, *at, *bytes, &who);
        }
        let noted = noted + reads.len();
        self.later = Later { on: noted < Later::NOTED, noted, ..Later::default() };
    }

    fn page(pages: &mut Vec<Option<Page>>, number: u64) -> &mut Page {
        let number = number as usize;
        if number >= pages.len() {
            pages.resize_with(number + 1, || None);
        }
        pages[number].get_or_insert_with(Page::new)
    }

    /// Calls `f` for each run of a range.
    fn runs(&mut self, at: u64, bytes: u64, mut f: impl FnMut(&mut Histories, Run<'_>)) {
        let Self { pages, histories, .. } = self;
        let (mut at, end) = (at, at + bytes);
        while at < end {
            let start = at & !(PAGE - 1);
            let to = end.min(start + PAGE);
            Self::page(pages, at / PAGE).runs(histories, start, (at - start, to - start), &mut f);
            at = to;
        }
    }

    /// The stamps of the histories of the words of an element of up to 16 bytes. None where a word
    /// is split, or the memory is not watched.
    pub(crate) fn stamps(&self, at: u64, bytes: u64) -> Option<[Stamp; 4]> {
        if self.later.meets(at, bytes) {
            return None;
        }
        let page = self.pages.get((at / PAGE) as usize)?.as_ref()?;
        let first = (at % PAGE) as usize / 4;
        let words = page.words.get(first..first + (at % 4 + bytes).div_ceil(4) as usize)?;
        let mut stamps = [0; 4];
        if words.len() > stamps.len() {
            return None;
        }
        for (stamp, id) in stamps.iter_mut().zip(words) {
            *stamp = if self.hidden || *id == SPLIT { return None } else { self.histories.stamp(*id)? };
        }
        Some(stamps)
    }

    /// The last stamp of all: a history that changes has a later one. None where there are no more.
    pub(crate) fn last_stamp(&self) -> Option<Stamp> {
        self.histories.last_stamp()
    }

    /// Notes a read of `bytes` bytes at `at`. Returns the violations.
    pub(crate) fn read(&mut self, grids: &Grids, at: u64, bytes: u64, who: &Accessor) -> Violations {
        let mut violations = Violations::default();
        if self.hidden {
            violations.may_observe = true;
            return violations;
        }
        if self.later.on && self.defers(grids, at, bytes, who) {
            return violations;
        }
        self.settle(grids, at, bytes);
        self.note_read(grids, at, bytes, who)
    }

    /// The same for a weak read of parts of words: `width` bytes from `at` on, and so on at the
    /// distance `step`, within `bytes` bytes.
    pub(crate) fn read_apart(
        &mut self,
        grids: &Grids,
        (at, step, width): (u64, u64, u64),
        bytes: u64,
        who: &Accessor,
    ) -> Violations {
        if self.hidden {
            return Violations::default();
        }
        self.settle(grids, at, bytes);
        let mut noting = Noting::default();
        for at in (at..at + bytes).step_by(step as usize) {
            self.runs(at, width, |histories, run| noting.note(grids, who, histories, run));
        }
        noting.end()
    }

    /// [`Shadow::read`] at once.
    #[inline(always)]
    fn note_read(&mut self, grids: &Grids, at: u64, bytes: u64, who: &Accessor) -> Violations {
        let mut noting = Noting::default();
        self.runs(at, bytes, |histories, run| noting.note(grids, who, histories, run));
        noting.end()
    }

    /// Notes a read by `ld.global.nc`, which [`Shadow::read`] has noted as a read. `begin` is the
    /// begin of its kernel: what comes after this kernel comes after those that had ended by then.
    pub(crate) fn read_only(&mut self, grids: &Grids, at: u64, bytes: u64, begin: &Accessor) {
        if self.hidden {
            return;
        }
        self.settle(grids, at, bytes);
        self.runs(at, bytes, |histories, mut run| {
            let mut begin = *begin;
            begin.record.bytes = run.mask;
            if histories.get(run.id()).has_read_only(begin.record.actor) {
                return;
            }
            if let Some(history) = histories.alone(run.id(), run.len()) {
                return history.note_read_only(grids, &begin);
            }
            let mut history = histories.get(run.id()).clone();
            history.note_read_only(grids, &begin);
            let new = histories.add(history);
            run.set(histories, new);
        });
    }

    /// Checks a read of `bytes` bytes at `at` against the last writes: it must come after all of
    /// them. Nothing is noted. Host reads of hidden memory are checked so, and reads by
    /// `ld.global.nc`, for which `who` is the begin of their kernel.
    pub(crate) fn take(&mut self, grids: &Grids, at: u64, bytes: u64, who: &Accessor) -> Violations {
        let mut violations = Violations::default();
        self.runs(at, bytes, |histories, run| {
            let history = histories.get(run.id());
            let earlier = history.earlier().iter().map(|e| &e.write);
            let writes = std::iter::once(&history.write).chain(earlier);
            if writes.clone().all(|write| write.actor == 0 || who.follows(grids, write)) {
                return;
            }
            for at in (0..).map(|i| run.at + i * run.each).take(run.ids.len()) {
                for other in writes.clone().flat_map(|write| write.at(at, Kind::Write).each_write()) {
                    for (lane, who) in who.at(at, Kind::Read) {
                        if other.actor != 0 && !who.after(grids, other.actor, &other) {
                            violations.note(lane, (at, Violation::Race { other, wrote: true }));
                        }
                    }
                }
            }
        });
        violations
    }

    /// Notes a write of `bytes` bytes at `at`. Returns the lanes whose bytes held a strong write,
    /// or 1 for an actor that is no lane, and the violations. Weak writes of equal values do no
    /// harm, so `unchanged` returns whether a word of memory already holds the written value.
    /// `before` gives the old value of the written bytes of a word, if they are to be kept.
    pub(crate) fn write(
        &mut self,
        grids: &Grids,
        at: u64,
        bytes: u64,
        who: &Accessor,
        unchanged: impl Fn(u64) -> bool,
        before: Option<impl Fn(u64) -> u32>,
    ) -> (u32, Violations) {
        self.settle(grids, at, bytes);
        let mut violations = Violations::default();
        let mut strong_before = 0;
        let before = before.filter(|_| !self.hidden);
        if let Some(before) = &before {
            self.keep(at, bytes, before);
        }
        let hidden = self.hidden;
        let mut fine = Fine::default();
        // The history behind the write, of whole words and of parts of one.
        let mut new: Option<(u8, Id)> = None;
        self.runs(at, bytes, |histories, mut run| {
            let mut who = *who;
            who.record.bytes = run.mask;
            let old = histories.get(run.id());
            let units = (0..).map(|i| run.at + i * run.each).take(run.ids.len());
            let unchecked = hidden && !(who.record.how.is_rmw() && old.write.how.is_rmw());
            if unchecked || old.write.how.strong.is_some() {
                for at in units.clone() {
                    strong_before |= who.lane_bit(at);
                }
            }
            let replaces_all = unchecked
                || old.is_free(grids, &who, &mut fine)
                    && (!fine.unordered || who.record.how.is_rmw())
                    && old.earlier().is_empty();
            if !replaces_all {
                let write = who.record;
                return run.each(histories, |history, at| {
                    let mut after = None;
                    for (lane, who) in who.at(at, Kind::Write) {
                        match history.clash(grids, &who, || unchanged(at & !3)) {
                            Some(violation) => violations.note(lane, (at, violation)),
                            None => after = Some(history.overwritten(grids, &who, write, before.is_some())),
                        }
                    }
                    *history = after.unwrap_or_else(|| History::written_by(write, before.is_some()));
                });
            }
            let id = match new {
                Some((mask, id)) if mask == run.mask => id,
                _ => histories.add(History::written_by(who.record, before.is_some())),
            };
            new = Some((run.mask, id));
            run.set(histories, id);
        });
        (strong_before, violations)
    }

    /// Keeps the values before a write.
    fn keep(&mut self, at: u64, bytes: u64, value: impl Fn(u64) -> u32) {
        for word in (at / 4..(at + bytes).div_ceil(4)).map(|word| 4 * word) {
            let (from, to) = (at.max(word) - word, (at + bytes).min(word + 4) - word);
            let mask = (u64::from(u32::MAX) >> (32 - 8 * (to - from))) << (8 * from);
            let page = Self::page(&mut self.pages, word / PAGE);
            let all = page.before.get_or_insert_with(|| vec![0; WORDS].into_boxed_slice());
            let before = &mut all[(word % PAGE) as usize / 4];
            *before = *before & !mask as u32 | value(word) & mask as u32;
        }
    }

    /// The value before the last write of a range, as little-endian words, if a reader may still
    /// read it. That is so if the write is not in the reader's past, and the reader does not come
    /// after a strong read of the write. None unless that holds for every byte, and a single write
    /// wrote all bytes.
    pub(crate) fn stale(&mut self, grids: &Grids, at: u64, bytes: u64, who: &Accessor) -> Option<[u32; 4]> {
        if self.hidden || bytes > 16 {
            return None;
        }
        let mut values = [0; 4];
        let (mut writer, mut may) = (None, true);
        self.runs(at, bytes, |histories, run| {
            let history = histories.get(run.id());
            for at in (0..).map(|i| run.at + i * run.each).take(run.ids.len()) {
                let write = history.write.at(at, Kind::Write);
                let one = (write.actor, write.tick, write.pc);
                may &= history.before
                    && write.actor != 0
                    && *writer.get_or_insert(one) == one
                    && !who.after(grids, write.actor, &write)
                    && !history.is_observed_at(grids, who, at);
            }
        });
        if !may {
            return None;
        }
        for (value, word) in values.iter_mut().zip(at / 4..(at + bytes).div_ceil(4)) {
            let before = self.pages.get(4 * word as usize / PAGE as usize)?.as_ref()?.before.as_ref()?;
            *value = before[word as usize % WORDS];
        }
        // Accesses are aligned: one that does not begin with a word is within one.
        values[0] >>= 8 * (at % 4);
        if bytes < 4 {
            values[0] &= (1 << (8 * bytes)) - 1;
        }
        Some(values)
    }

    /// Whether a reader observes the last write of every byte of a range: [`Shadow::stale`] returns
    /// `None` for each part of it. False may also mean undecided.
    pub(crate) fn is_settled(&mut self, grids: &Grids, at: u64, bytes: u64, who: &Accessor) -> bool {
        if self.hidden {
            return true;
        }
        let (mut settled, mut fine) = (true, NOBODY);
        self.runs(at, bytes, |histories, run| {
            let History { before, write, .. } = histories.get(run.id());
            if !settled || !before || write.actor == 0 || *write == fine {
                return;
            }
            if who.follows(grids, write) {
                fine = *write;
            } else {
                settled = false;
            }
        });
        settled
    }

    /// Notes that a strong read has observed the last write of a range.
    pub(crate) fn saw(&mut self, grids: &Grids, at: u64, bytes: u64, who: &Accessor) {
        self.settle(grids, at, bytes);
        // Histories before and after the last change.
        let mut changed = (SPLIT, SPLIT);
        self.runs(at, bytes, |histories, mut run| {
            let mut who = *who;
            who.record.bytes = run.mask;
            let old = run.id();
            let history = histories.get(old);
            let Some(order) = history.order_to_note(grids, &who) else { return };
            let Some(seen) = history.seen_by_all(grids, &who, order) else {
                if run.len() == 1 && history.has_noted(&who, run.at) {
                    return;
                }
                return run.each(histories, |history, at| {
                    who.at(at, Kind::Read).for_each(|(_, who)| history.note_seen(grids, &who));
                });
            };
            if history.has_seen(seen) {
                return;
            }
            if changed.0 == old {
                return run.set(histories, changed.1);
            }
            if let Some(history) = histories.alone(old, run.len()) {
                return history.set_seen(seen);
            }
            let mut history = histories.get(old).clone();
            history.set_seen(seen);
            let new = histories.add(history);
            run.set(histories, new);
            changed = (old, new);
        });
    }

    /// The history of the byte at `at`, for reports. `None` where nothing has accessed its page.
    fn history(&self, at: u64) -> Option<&History> {
        let page = self.pages.get((at / PAGE) as usize)?.as_ref()?;
        let byte = (at % PAGE) as usize;
        let id = match page.words[byte / 4] {
            SPLIT => page.bytes.as_ref()?[byte],
            id => id,
        };
        Some(self.histories.get(id))
    }

    /// Whether something has written the byte at `at`. True in hidden memory.
    pub(crate) fn is_written(&self, at: u64) -> bool {
        self.hidden || self.history(at).unwrap_or(self.histories.get(UNTOUCHED)).written
    }

    /// The last write of the byte at `at`, if it was a kernel's.
    pub(super) fn last_write(&self, at: u64) -> Option<Record> {
        let write = self.history(at)?.write.at(at, Kind::Write);
        (write.actor != 0 && !clock::is_timeline(write.actor)).then_some(write)
    }

    /// The nearest words before and after the one at `at` that kernels have written, with their
    /// writes, up to [`NEAR`] bytes away, of those that `is_meant` takes.
    pub(super) fn written_near(
        &self,
        at: u64,
        is_meant: impl Fn(u64, &Record) -> bool,
    ) -> [Option<(u64, Record)>; 2] {
        let word = at & !3;
        let find = |at: u64| self.last_write(at).filter(|write| is_meant(at, write)).map(|write| (at, write));
        let distances = || (4..=NEAR).step_by(4);
        let before = distances().map_while(|distance| word.checked_sub(distance)).find_map(find);
        [before, distances().map(|distance| word + distance).find_map(find)]
    }

    /// The last reads of each word, of those that `is_meant` takes, one for each history: the word,
    /// the read, and the last write by a kernel.
    pub(super) fn last_reads(
        &self,
        is_meant: impl Fn(&Record) -> bool,
    ) -> Vec<(u64, Record, Option<Record>)> {
        let mut last = UNTOUCHED;
        // Histories lack the reads that are deferred.
        let deferred = self.later.reads.iter().filter(|read| is_meant(&read.record));
        let mut all: Vec<_> = deferred.map(|read| (read.at, read.record, self.last_write(read.at))).collect();
        for (number, page) in (0..).zip(&self.pages) {
            let words = page.iter().flat_map(|page| page.words.iter());
            for (word, id) in (0..).zip(words) {
                if *id == last || *id == SPLIT {
                    continue;
                }
                last = *id;
                let at = number * PAGE + 4 * word;
                let read = self.histories.get(*id).reads().find(|read| is_meant(read));
                all.extend(read.map(|read| (at, read.at(at, Kind::Read), self.last_write(at))));
            }
        }
        all
    }

    /// Discards all accesses of a range: it counts as unwritten.
    pub(crate) fn renew(&mut self, at: u64, bytes: u64) {
        let mut unwritten = None;
        self.runs(at, bytes, |histories, mut run| {
            let unwritten = *unwritten.get_or_insert_with(|| histories.add(History::untouched(false)));
            run.set(histories, unwritten);
        });
    }
}
