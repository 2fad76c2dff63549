//! Strong reads of other blocks' writes, closed bulk groups, and last waits: the intended orders, for
//! reports.
//!
//! The checks do not use this history. A race report searches it for the reads that were meant to
//! order the later access behind the earlier one. The report shows the step that fails.

use std::collections::{BTreeMap, HashSet, VecDeque};

use super::clock::{self, Key};
use super::hooks::Place;
use crate::ir::{Fence, Scope, Sem};

/// Strong writes that are kept of a location.
const MOST_WRITES: usize = 64;
/// Strong reads that are kept of a block.
const MOST_SIGHTS: usize = 32;
/// Most blocks whose reads are kept, and most threads whose waits and groups are kept.
const MOST_OLD: usize = 4096;
/// Waits that are kept of a thread, each instruction once, and runs of groups that one instruction has
/// closed.
const MOST_WAITS: usize = 4;
/// Fences that are kept of a warp, each instruction once for the same lanes.
const MOST_FENCES: usize = 8;
/// Most reads that a report lists if no way is found.
const MOST_LISTED: usize = 3;
/// Blocks through which a way leads at the most.
const LONGEST_WAY: usize = 4;

/// A strong write of a location.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Strong {
    /// The lane.
    pub(crate) by: Key,
    pub(crate) pc: u32,
    pub(crate) sem: Sem,
    pub(crate) scope: Scope,
    pub(crate) rmw: bool,
    /// It is a release, or behind a fence.
    pub(crate) releases: bool,
    /// The last fence of its thread before it.
    pub(crate) fence: Option<FenceSite>,
    /// The number of this write among all of the history.
    pub(crate) at: u64,
}

/// A fence's instruction, and its scope.
pub(crate) type FenceSite = (u32, Scope);

/// A fence by lanes of a warp, the last of them by this instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fenced {
    pub(crate) pc: u32,
    pub(crate) lanes: u32,
    /// The warp's tick, which moves on behind it.
    pub(crate) tick: u32,
    pub(crate) fence: Fence,
}

/// The last strong writes of a location. Most locations have one, which needs no allocation.
#[derive(Clone, Debug, Default)]
pub(crate) struct Writes {
    last: Option<Strong>,
    /// Those before, latest last. `None` where there are none.
    #[allow(clippy::box_collection)] // A word in each of very many locations.
    older: Option<Box<VecDeque<Strong>>>,
}

impl Writes {
    pub(crate) fn last(&self) -> Option<&Strong> {
        self.last.as_ref()
    }

    /// All that are kept, latest first.
    fn latest_first(&self) -> impl Iterator<Item = &Strong> {
        let older = self.older.iter().flat_map(|older| older.iter().rev());
        self.last.iter().chain(older)
    }

    fn add(&mut self, new: Strong) {
        let Some(last) = self.last.replace(new) else { return };
        if (last.by, last.pc) == (new.by, new.pc) {
            return;
        }
        let older = self.older.get_or_insert_default();
        // The last one counts as well.
        if older.len() + 1 == MOST_WRITES {
            older.pop_front();
        }
        older.push_back(last);
    }
}

/// A strong read of a location, the last by this instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sight {
    /// The lane.
    pub(crate) by: Key,
    pub(crate) pc: u32,
    pub(crate) sem: Sem,
    pub(crate) scope: Scope,
    /// The location; shared memory is the reading block's.
    pub(crate) place: Place,
    /// The tick of its warp.
    pub(crate) tick: u32,
    /// How many reads in a row have changed nothing, up to this one.
    pub(crate) repeats: u32,
    /// The number of the last write of all of the history.
    pub(crate) at: u64,
}

/// The last strong reads of a block, each instruction and place once.
#[derive(Debug)]
struct Sights {
    /// Up to [`MOST_SIGHTS`], in no order.
    all: Vec<Linked>,
    /// Numbers of the latest and of the oldest, or [`NONE`].
    latest: u8,
    oldest: u8,
    /// The first entry to search for a read, by its instruction and lane.
    hints: [u8; HINTS],
}

/// A read, and the numbers of the reads before and behind it in time, or [`NONE`].
#[derive(Clone, Copy, Debug)]
struct Linked {
    sight: Sight,
    older: u8,
    later: u8,
}

const HINTS: usize = 16;
/// The number of no read.
const NONE: u8 = u8::MAX;

impl Default for Sights {
    fn default() -> Self {
        Self { all: vec![], latest: NONE, oldest: NONE, hints: [NONE; HINTS] }
    }
}

impl Sights {
    /// Notes a read, which becomes the latest. The oldest is dropped if there is no room.
    fn add(&mut self, sight: Sight) {
        let same = |kept: &Linked| kept.sight.pc == sight.pc && kept.sight.place == sight.place;
        let hint = (u64::from(sight.pc).wrapping_add(sight.by) % HINTS as u64) as usize;
        let hinted = usize::from(self.hints[hint]);
        let found = match self.all.get(hinted) {
            Some(kept) if same(kept) => Some(hinted),
            _ => self.all.iter().position(same),
        };
        let at = match found {
            Some(at) => at as u8,
            None if self.all.len() == MOST_SIGHTS => self.oldest,
            None => {
                self.all.push(Linked { sight, older: NONE, later: NONE });
                self.hints[hint] = (self.all.len() - 1) as u8;
                return self.append(self.hints[hint]);
            }
        };
        self.hints[hint] = at;
        let kept = &mut self.all[usize::from(at)].sight;
        // A loop that polls reads the same again and again.
        if found.is_some() && kept.by == sight.by {
            let repeats = if sight.repeats == 0 { 0 } else { kept.repeats.saturating_add(1) };
            (kept.tick, kept.at, kept.repeats) = (sight.tick, sight.at, repeats);
        } else {
            *kept = sight;
        }
        if at != self.latest {
            self.remove(at);
            self.append(at);
        }
    }

    /// Removes a read that is not the latest from the order.
    fn remove(&mut self, at: u8) {
        let Linked { older, later, .. } = self.all[usize::from(at)];
        self.all[usize::from(later)].older = older;
        match self.all.get_mut(usize::from(older)) {
            Some(older) => older.later = later,
            None => self.oldest = later,
        }
    }

    /// Makes a read the latest.
    fn append(&mut self, at: u8) {
        let before = std::mem::replace(&mut self.latest, at);
        match self.all.get_mut(usize::from(before)) {
            Some(before) => before.later = at,
            None => self.oldest = at,
        }
        let new = &mut self.all[usize::from(at)];
        (new.older, new.later) = (before, NONE);
    }

    /// Whether one of them is a read of global memory.
    fn has_global(&self) -> bool {
        self.all.iter().any(|read| matches!(read.sight.place, Place::Global { .. }))
    }

    fn latest_first(&self) -> impl Iterator<Item = &Sight> {
        let mut at = self.latest;
        std::iter::from_fn(move || {
            let Linked { sight, older, .. } = self.all.get(usize::from(at))?;
            at = *older;
            Some(sight)
        })
    }
}

/// A thread's last wait by an instruction for its bulk stores, or for its copies by `cp.async`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wait {
    pub(crate) pc: u32,
    /// Up to this group or copy, and whether for their arrival too.
    pub(crate) group: u32,
    pub(crate) landed: bool,
}

/// Bulk groups of a thread in a row that an instruction has closed.
#[derive(Clone, Copy, Debug)]
struct Closed {
    pc: u32,
    first: u32,
    last: u32,
}

/// A read of a thread, and the write that it observed or may have been meant to observe.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) read: Sight,
    pub(crate) write: Option<Strong>,
}

impl Wait {
    /// Whether it is for a copy of this group or number. `wrote`: for its arrival, too.
    pub(crate) fn is_for(&self, group: u32, wrote: bool) -> bool {
        self.group >= group && (self.landed || !wrote)
    }
}

impl Step {
    /// Whether the write came behind the read.
    pub(crate) fn is_early(&self) -> bool {
        self.write.is_some_and(|write| write.at > self.read.at)
    }
}

#[derive(Debug, Default)]
pub(crate) struct History {
    /// Counts strong writes.
    now: u64,
    /// The last reads of each block, by block. Empty for the block of `current`.
    sights: BTreeMap<Key, Sights>,
    /// The block that has read last, and its reads: a block mostly reads many times in turn.
    current: Option<(Key, Sights)>,
    /// The last waits of each lane, by lane, and for its copies, by their actor. Latest last.
    waits: BTreeMap<Key, Vec<Wait>>,
    /// The bulk groups that each lane has closed, latest last.
    closed: BTreeMap<Key, Vec<Closed>>,
    /// The last fences of each warp, latest last.
    fences: BTreeMap<Key, Vec<Fenced>>,
}

impl History {
    /// A lane has written a location, of which `writes` are the writes before. `releases`: it is a
    /// release, or behind a fence; and the last fence of the lane.
    pub(crate) fn wrote(
        &mut self,
        writes: &mut Writes,
        (by, pc): (Key, u32),
        (sem, scope): (Sem, Scope),
        rmw: bool,
        (releases, fence): (bool, Option<FenceSite>),
    ) {
        self.now += 1;
        let new = Strong { by, pc, sem, scope, rmw, releases, fence, at: self.now };
        writes.add(new);
    }

    /// A time that is later than all reads and writes so far.
    pub(crate) fn mark(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// Lanes of a warp have fenced.
    pub(crate) fn fenced(&mut self, warp: Key, new: Fenced) {
        let fences = self.fences.entry(warp).or_default();
        fences.retain(|old| (old.pc, old.lanes) != (new.pc, new.lanes));
        if fences.len() == MOST_FENCES {
            fences.remove(0);
        }
        fences.push(new);
        if self.fences.len() > MOST_OLD {
            self.fences.pop_first();
        }
    }

    /// The last fences of a lane, latest first.
    pub(crate) fn fences_of(&self, lane: Key) -> impl Iterator<Item = &Fenced> {
        let within = clock::place_of(lane).and_then(|(_, within)| within?.1).unwrap_or(0);
        let of_warp = self.fences.get(&(lane & !clock::WITHIN_WARP)).into_iter().flatten();
        of_warp.rev().filter(move |fence| fence.lanes >> within & 1 != 0)
    }

    /// The last reads of a block that reads, to add to.
    fn sights_of_reader(&mut self, block: Key) -> &mut Sights {
        if let Some((last, sights)) = self.current.take_if(|(last, _)| *last != block) {
            self.sights.insert(last, sights);
        }
        if self.current.is_none() {
            let sights = std::mem::take(self.sights.entry(block).or_default());
            self.current = Some((block, sights));
            if self.sights.len() > MOST_OLD {
                // Grids are numbered, so that the first are the oldest.
                self.sights.pop_first();
            }
        }
        &mut self.current.get_or_insert_with(|| (block, Sights::default())).1
    }

    /// The last reads of a block.
    fn sights_of(&self, block: Key) -> Option<&Sights> {
        let current = self.current.as_ref().filter(|(last, _)| *last == block);
        current.map(|(_, sights)| sights).or_else(|| self.sights.get(&block))
    }

    /// A lane has read a place at this tick of its warp. `again`: the same as before, which has changed
    /// nothing.
    pub(crate) fn read(
        &mut self,
        (by, pc): (Key, u32),
        (sem, scope): (Sem, Scope),
        place: Place,
        (tick, again): (u32, bool),
    ) {
        let new = Sight { by, pc, sem, scope, place, tick, repeats: again.into(), at: self.now };
        self.sights_of_reader(clock::block_of(by)).add(new);
    }

    pub(crate) fn waited(&mut self, by: Key, wait: Wait) {
        let waits = self.waits.entry(by).or_default();
        match waits.last_mut() {
            // A loop waits by one instruction again and again.
            Some(last) if last.pc == wait.pc => *last = wait,
            _ => {
                waits.retain(|old| old.pc != wait.pc);
                if waits.len() == MOST_WAITS {
                    waits.remove(0);
                }
                waits.push(wait);
            }
        }
        if self.waits.len() > MOST_OLD {
            self.waits.pop_first();
        }
    }

    /// The last waits of a thread, latest first.
    pub(crate) fn waits_of(&self, by: Key) -> impl Iterator<Item = &Wait> {
        self.waits.get(&by).into_iter().flatten().rev()
    }

    /// A lane has closed its bulk group `group`, counted from 1.
    pub(crate) fn closed(&mut self, by: Key, pc: u32, group: u32) {
        let closed = self.closed.entry(by).or_default();
        match closed.last_mut() {
            Some(last) if last.pc == pc && last.last + 1 == group => last.last = group,
            _ => {
                if closed.len() == MOST_WAITS {
                    closed.remove(0);
                }
                closed.push(Closed { pc, first: group, last: group });
            }
        }
        if self.closed.len() > MOST_OLD {
            self.closed.pop_first();
        }
    }

    /// Whether no instruction has closed a lane's bulk group yet.
    pub(crate) fn is_open(&self, by: Key, group: u32) -> bool {
        self.closed.get(&by).and_then(|runs| runs.last()).is_none_or(|run| run.last < group)
    }

    /// The instruction that has closed a lane's bulk group. `None` where none has, or where it is long
    /// ago.
    pub(crate) fn closed_by(&self, by: Key, group: u32) -> Option<u32> {
        let of = self.closed.get(&by).into_iter().flatten();
        of.rev().find(|run| (run.first..=run.last).contains(&group)).map(|run| run.pc)
    }

    /// Reads by `block` of other blocks' writes, latest first. `writes` gives the writes of a
    /// location.
    fn steps<'a>(
        &'a self,
        block: Key,
        before: u64,
        writes: impl Fn(Key, Place) -> Option<&'a Writes> + Copy,
    ) -> impl Iterator<Item = Step> {
        self.reads_by(block).filter(move |read| read.at <= before).flat_map(move |&read| {
            let mut seen = vec![];
            for &write in writes(block, read.place).into_iter().flat_map(Writes::latest_first) {
                if write.at <= read.at {
                    seen.push(Step { read, write: Some(write) });
                    // A read-modify-write also passes on the releases of the write before it.
                    if !write.rmw {
                        break;
                    }
                }
            }
            if seen.is_empty() {
                seen.push(Step { read, write: None });
            }
            seen
        })
    }

    /// All blocks whose reads of global memory are kept, those of the latest grid first.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = Key> {
        let blocks = self.sights.keys().rev().copied();
        blocks.filter(|block| self.sights_of(*block).is_some_and(Sights::has_global))
    }

    /// Reads that have found the same more than once in a row, those of the most repeats first.
    pub(crate) fn repeated(&self) -> Vec<Sight> {
        let current = self.current.iter().map(|(_, sights)| sights);
        let all = current.chain(self.sights.values()).flat_map(Sights::latest_first);
        let mut repeated: Vec<Sight> = all.filter(|sight| sight.repeats > 0).copied().collect();
        repeated.sort_by_key(|sight| std::cmp::Reverse(sight.repeats));
        repeated
    }

    /// The reads by `block` of writes by a thread that `is_meant` takes, latest first.
    pub(crate) fn steps_to<'a>(
        &'a self,
        block: Key,
        is_meant: impl Fn(Key) -> bool,
        writes: impl Fn(Key, Place) -> Option<&'a Writes> + Copy,
    ) -> impl Iterator<Item = Step> {
        let steps = self.steps(block, u64::MAX, writes);
        steps.filter(move |step| step.write.is_some_and(|write| is_meant(write.by)))
    }

    /// The strong reads of shared memory by `block`, latest first.
    pub(crate) fn shared_reads(&self, block: Key) -> impl Iterator<Item = &Sight> {
        self.reads_by(block).filter(|read| matches!(read.place, Place::Shared { .. }))
    }

    /// The last reads by `block`, latest first.
    pub(crate) fn reads_by(&self, block: Key) -> impl Iterator<Item = &Sight> {
        self.sights_of(block).into_iter().flat_map(Sights::latest_first)
    }

    /// The chain of reads that may have ordered block `block` after block `of`, first to last.
    pub(crate) fn way<'a>(
        &'a self,
        block: Key,
        of: Key,
        writes: impl Fn(Key, Place) -> Option<&'a Writes> + Copy,
    ) -> Option<Vec<Step>> {
        let mut seen = HashSet::from([block]);
        let mut ways: VecDeque<Vec<Step>> = VecDeque::from([vec![]]);
        while let Some(way) = ways.pop_front() {
            let (at, before) = match way.last().and_then(|step| step.write) {
                Some(write) => (clock::block_of(write.by), write.at),
                None => (block, u64::MAX),
            };
            for step in self.steps(at, before, writes) {
                let Some(write) = step.write else { continue };
                let writer = clock::block_of(write.by);
                if writer == of {
                    return Some(way.into_iter().chain([step]).rev().collect());
                }
                if way.len() + 1 < LONGEST_WAY && seen.insert(writer) {
                    ways.push_back(way.iter().copied().chain([step]).collect());
                }
            }
        }
        None
    }

    /// The last reads by `block`: for reports without a way to block `of`, or without a known block
    /// `of`.
    pub(crate) fn last_reads<'a>(
        &'a self,
        block: Key,
        of: Option<Key>,
        writes: impl Fn(Key, Place) -> Option<&'a Writes> + Copy,
    ) -> Vec<Step> {
        let telling = |step: &Step| match (step.read.place, step.write) {
            // No other block writes shared memory.
            (Place::Shared { .. }, _) => of == Some(block),
            (_, Some(write)) => clock::block_of(write.by) != block,
            (_, None) => step.read.sem.acquires(),
        };
        let mut last: Vec<Step> = vec![];
        for step in self.steps(block, u64::MAX, writes).filter(telling) {
            // The other lanes' reads, by the same instruction, are alike.
            if last.len() < MOST_LISTED && last.iter().all(|listed| listed.read.pc != step.read.pc) {
                last.push(step);
            }
        }
        last.reverse();
        last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lane 0 of warp 0 of a block.
    fn lane(block: u64) -> Key {
        clock::lane(clock::warp(1, block, 0), 0)
    }

    fn global(offset: u64) -> Place {
        Place::Global { shadow: 1, offset }
    }

    #[test]
    fn without_a_way_the_last_reads_of_others_are_told_once_each() {
        let mut history = History::default();
        let mut flag = Writes::default();
        let strong = (Sem::Acquire, Scope::Gpu);
        history.read((lane(0), 1), strong, Place::Shared { offset: 8 }, (1, false));
        history.read((lane(0), 2), (Sem::Relaxed, Scope::Gpu), global(8), (1, false));
        history.read((lane(0), 3), strong, global(16), (1, false));
        history.wrote(&mut flag, (lane(5), 9), (Sem::Release, Scope::Gpu), false, (true, None));
        for pc in [4, 4, 5] {
            history.read((lane(0), pc), strong, global(0), (1, false));
        }
        let writes = |_, place| (place == global(0)).then_some(&flag);
        let block = |b| clock::block_of(lane(b));
        let pcs = |way: Vec<Step>| -> Vec<(u32, bool)> {
            way.iter().map(|step| (step.read.pc, step.write.is_some())).collect()
        };
        // Reads of shared memory, and relaxed reads without a write, show nothing about other
        // blocks.
        let listed = |of| pcs(history.last_reads(block(0), of, writes));
        assert_eq!(listed(None), [(3, false), (4, true), (5, true)]);
        assert_eq!(listed(Some(block(7))), listed(None));
        assert!(history.way(block(0), block(7), writes).is_none());
        assert_eq!(pcs(history.way(block(0), block(5), writes).unwrap()), [(5, true)]);
        assert_eq!(history.blocks().collect::<Vec<_>>(), [block(0)]);
    }

    #[test]
    fn the_latest_writes_are_kept_and_those_of_one_instruction_are_one() {
        let (mut history, mut flag) = (History::default(), Writes::default());
        for pc in 0..MOST_WRITES as u32 + 3 {
            (0..2).for_each(|_| {
                history.wrote(&mut flag, (lane(0), pc), (Sem::Relaxed, Scope::Gpu), false, (false, None))
            });
        }
        let pcs: Vec<u32> = flag.latest_first().map(|write| write.pc).collect();
        let latest = (3..MOST_WRITES as u32 + 3).rev();
        assert_eq!(pcs, latest.collect::<Vec<_>>());
        assert_eq!(flag.last().map(|write| write.at), Some(2 * (MOST_WRITES as u64 + 3)));
    }

    /// Against a list in the order of time.
    #[test]
    fn the_latest_reads_are_kept_each_instruction_and_place_once() {
        let mut r = crate::seeds::Rng::new(3);
        let (mut sights, mut list) = (Sights::default(), VecDeque::new());
        for at in 0..4000 {
            // Now few places, now more than are kept.
            let most = if at / 200 % 2 == 0 { 8 } else { 48 };
            let (pc, place) = (r.below(3) as u32, global(8 * r.below(most)));
            let by = clock::lane(clock::warp(1, 0, 0), r.below(32) as usize);
            sights.add(Sight {
                by,
                pc,
                sem: Sem::Acquire,
                scope: Scope::Gpu,
                place,
                tick: 1,
                repeats: 0,
                at,
            });
            list.retain(|(of, there, _)| (*of, *there) != (pc, place));
            list.push_back((pc, place, at));
            if list.len() > MOST_SIGHTS {
                list.pop_front();
            }
            let kept = sights.latest_first().map(|sight| (sight.pc, sight.place, sight.at));
            assert!(kept.eq(list.iter().rev().copied()));
        }
    }

    #[test]
    fn reads_of_blocks_that_take_turns_are_all_kept() {
        let (mut history, mut flag) = (History::default(), Writes::default());
        let strong = (Sem::Acquire, Scope::Gpu);
        history.wrote(&mut flag, (lane(5), 9), (Sem::Release, Scope::Gpu), false, (true, None));
        for (block, pc) in [(0, 1), (1, 2), (0, 3), (2, 4), (0, 5)] {
            history.read((lane(block), pc), strong, global(0), (1, false));
        }
        let writes = |_, place| (place == global(0)).then_some(&flag);
        let pcs = |block| -> Vec<u32> {
            let way = history.last_reads(clock::block_of(lane(block)), None, writes);
            way.iter().map(|step| step.read.pc).collect()
        };
        assert_eq!([pcs(0), pcs(1), pcs(2)], [vec![1, 3, 5], vec![2], vec![4]]);
        assert_eq!(history.blocks().count(), 3);
    }

    #[test]
    fn a_way_leads_through_reads_of_others_before_their_writes() {
        let mut history = History::default();
        let (mut first, mut second) = (Writes::default(), Writes::default());
        let (release, acquire) = ((Sem::Release, Scope::Gpu), (Sem::Acquire, Scope::Gpu));
        history.wrote(&mut first, (lane(1), 10), release, false, (true, None));
        history.read((lane(2), 20), acquire, global(0), (1, false));
        history.wrote(&mut second, (lane(2), 21), release, false, (true, None));
        history.read((lane(3), 30), acquire, global(8), (1, false));
        // Too late to be part of it.
        history.read((lane(2), 22), acquire, global(8), (1, false));
        let writes = |_, place| match place {
            Place::Global { offset: 0, .. } => Some(&first),
            Place::Global { offset: 8, .. } => Some(&second),
            _ => None,
        };
        let [first, last] = [1, 3].map(|block| clock::block_of(lane(block)));
        let way = history.way(last, first, writes).unwrap();
        let pcs: Vec<_> = way.iter().map(|step| (step.read.pc, step.write.map(|w| w.pc))).collect();
        assert_eq!(pcs, [(20, Some(10)), (30, Some(21))]);
    }
}
