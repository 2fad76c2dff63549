//! What happened before: vector clocks over everything that touches memory, in a form that stays small.
//!
//! An *actor* is a lane, a warp as a whole, one side of a lane's bulk stores, an mbarrier (for the bulk loads that complete on it), or a
//! timeline: a stream or a host thread. Each counts its own ticks, and a [`Clock`] says up to which tick of which actor everything is
//! known. Most of it is said in few words: an entry of a warp stands for its lanes, a barrier that all of a block has passed for its
//! warps, and an entry of a timeline for all grids that ran there.
//!
//! Clocks are compared and joined at every barrier and every acquire, and mostly know the same. So a clock is a tree that others share
//! parts of, by grid and by block: equal parts are the same allocation, and a join looks only into those that differ.

use std::cmp::Ordering;
use std::sync::Arc;

/// An actor. From the top: grid (27 bits), block (20), within the block (16).
pub(crate) type Key = u64;

/// Marks the key of a timeline.
const TIMELINE: Key = 1 << 63;
/// Marks, within a block, the key of an mbarrier.
const MBARRIER: Key = 1 << 15;
/// Bits below a warp: itself (0), its lanes, and the two sides of their bulk stores.
const WITHIN_WARP: Key = 127;
const LANE: Key = 1;
const STORE_READS: Key = 33;
const STORE_WRITES: Key = 65;

/// Grids and blocks that keys can tell apart.
pub(crate) const MAX_GRIDS: u32 = 1 << 27;
pub(crate) const MAX_BLOCKS: u64 = 1 << 20;

pub(crate) fn timeline(number: u64) -> Key {
    TIMELINE | number
}

pub(crate) fn is_timeline(key: Key) -> bool {
    key & TIMELINE != 0
}

pub(crate) fn warp(grid: u32, block: u64, warp: u32) -> Key {
    // Number 0 within a block is nobody.
    Key::from(grid) << 36 | block << 16 | Key::from(warp + 1) << 7
}


/// A lane of the warp `warp`.
pub(crate) fn lane(warp: Key, lane: usize) -> Key {
    warp + LANE + lane as Key
}

/// The reading side of the bulk stores of a lane: done once their sources may be overwritten.
pub(crate) fn store_reads(warp: Key, lane: usize) -> Key {
    warp + STORE_READS + lane as Key
}

/// Their writing side: done once they have landed.
pub(crate) fn store_writes(warp: Key, lane: usize) -> Key {
    warp + STORE_WRITES + lane as Key
}

/// The `index`th mbarrier of the block of `warp`: the bulk loads that complete on it, a tick per phase.
pub(crate) fn mbarrier(warp: Key, index: usize) -> Key {
    block_of(warp) << 16 | MBARRIER | index as Key
}

pub(crate) fn grid_of(key: Key) -> u32 {
    (key >> 36) as u32
}

/// Grid and block: equal for the actors of one block.
pub(crate) fn block_of(key: Key) -> Key {
    key >> 16
}

/// Block within the grid, warp, and lane.
type Place = (u64, Option<(u32, Option<u32>)>);

/// Where an actor is, as far as its key says. None for timelines.
pub(crate) fn place_of(key: Key) -> Option<Place> {
    if is_timeline(key) {
        return None;
    }
    let block = key >> 16 & (MAX_BLOCKS - 1);
    if key & MBARRIER != 0 {
        return Some((block, None));
    }
    let within = key & WITHIN_WARP;
    let lane = within.checked_sub(LANE).map(|lane| (lane % 32) as u32);
    Some((block, Some(((key >> 7 & 63) as u32 - 1, lane))))
}

/// An actor within a block: the low bits of its key.
type Within = u16;

fn block_number(key: Key) -> u32 {
    (key >> 16 & (MAX_BLOCKS - 1)) as u32
}

fn is_mbarrier(within: Within) -> bool {
    Key::from(within) & MBARRIER != 0
}

fn is_lane(within: Within) -> bool {
    !is_mbarrier(within) && (LANE..STORE_READS).contains(&(Key::from(within) & WITHIN_WARP))
}

fn warp_of(within: Within) -> Within {
    within & !(WITHIN_WARP as Within)
}

/// Number of the warp of a lane or warp: whose accesses a barrier of the block orders.
fn warp_number(within: Within) -> Option<usize> {
    (is_lane(within) || !is_mbarrier(within) && warp_of(within) == within)
        .then(|| (usize::from(within) >> 7).checked_sub(1))?
}

/// A barrier that all warps of a block have passed.
#[derive(Debug)]
struct Barrier {
    /// Counts from 1, in the block.
    number: u32,
    /// The tick that each warp had come to.
    ticks: Box<[u32]>,
}

/// What is known of a block.
#[derive(Clone, Debug)]
struct BlockPart {
    block: u32,
    barrier: Option<Arc<Barrier>>,
    /// Up to which tick of whom, sorted by actor, without what the barrier or a warp stands for.
    entries: Vec<(Within, u32)>,
}

/// What is known of a grid.
#[derive(Clone, Debug)]
struct GridPart {
    grid: u32,
    /// The timeline that it runs on, and the tick there that stands for all of it.
    end: (Key, u32),
    /// Sorted by number.
    blocks: Vec<Arc<BlockPart>>,
}

#[derive(Clone, Debug, Default)]
struct Root {
    /// Sorted by key.
    timelines: Vec<(Key, u32)>,
    /// Sorted by number, without those whose end is known.
    grids: Vec<Arc<GridPart>>,
}

/// Up to which tick everything of which actor is known.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock(Option<Arc<Root>>);

/// Which of two parts has all that both have.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Covers {
    left: bool,
    right: bool,
}

impl Covers {
    const BOTH: Self = Self { left: true, right: true };

    fn and(&mut self, other: Self) {
        self.left &= other.left;
        self.right &= other.right;
    }

    fn of(left: u32, right: u32) -> Self {
        Self { left: left >= right, right: right >= left }
    }
}

/// Goes through two sorted lists together.
fn zip_sorted<'a, T, K: Ord>(
    a: &'a [T],
    b: &'a [T],
    key: impl Fn(&T) -> K,
    mut each: impl FnMut(Option<&'a T>, Option<&'a T>),
) {
    let (mut i, mut k) = (0, 0);
    while i < a.len() || k < b.len() {
        let order = match (a.get(i), b.get(k)) {
            (Some(x), Some(y)) => key(x).cmp(&key(y)),
            (Some(_), None) => Ordering::Less,
            _ => Ordering::Greater,
        };
        let (x, y) = (order.is_le().then(|| &a[i]), order.is_ge().then(|| &b[k]));
        (i, k) = (i + usize::from(x.is_some()), k + usize::from(y.is_some()));
        each(x, y);
    }
}

/// The tick of a key in sorted entries; 0 where there is none.
fn tick_of<K: Ord + Copy>(entries: &[(K, u32)], key: K) -> u32 {
    entries.binary_search_by_key(&key, |e| e.0).map_or(0, |at| entries[at].1)
}

/// Raises an entry of sorted ones.
fn raise_in<K: Ord + Copy>(entries: &mut Vec<(K, u32)>, key: K, tick: u32) {
    match entries.binary_search_by_key(&key, |e| e.0) {
        Ok(at) => entries[at].1 = entries[at].1.max(tick),
        Err(at) => entries.insert(at, (key, tick)),
    }
}

impl BlockPart {
    fn new(block: u32) -> Self {
        Self { block, barrier: None, entries: vec![] }
    }

    fn barrier_number(&self) -> u32 {
        self.barrier.as_ref().map_or(0, |b| b.number)
    }

    /// Whether the barrier stands for this entry.
    fn passed(&self, within: Within, tick: u32) -> bool {
        let ticks = self.barrier.as_ref().map_or(&[][..], |b| &b.ticks);
        !ticks.is_empty() && warp_number(within).and_then(|w| ticks.get(w)).is_some_and(|&t| t >= tick)
    }

    fn knows(&self, within: Within, tick: u32) -> bool {
        self.passed(within, tick)
            || tick_of(&self.entries, within) >= tick
            || is_lane(within) && tick_of(&self.entries, warp_of(within)) >= tick
    }

    fn raise(&mut self, within: Within, tick: u32) {
        raise_in(&mut self.entries, within, tick);
        if warp_of(within) == within && !is_mbarrier(within) {
            // The lanes that this entry now stands for.
            self.entries.retain(|&(w, t)| !(is_lane(w) && warp_of(w) == within && t <= tick));
        }
    }

    fn pass(&mut self, barrier: Arc<Barrier>) {
        self.barrier = Some(barrier);
        let mut entries = std::mem::take(&mut self.entries);
        entries.retain(|&(w, t)| !self.passed(w, t));
        self.entries = entries;
    }

    fn covers(&self, other: &Self) -> bool {
        self.barrier_number() >= other.barrier_number() && other.entries.iter().all(|&(w, t)| self.knows(w, t))
    }

    fn join(a: &Self, b: &Self) -> Self {
        let newer = if a.barrier_number() >= b.barrier_number() { a } else { b };
        let mut joined = Self { block: a.block, barrier: newer.barrier.clone(), entries: vec![] };
        let mut entries = Vec::with_capacity(a.entries.len().max(b.entries.len()) + 4);
        let mut covering = (0, 0);
        zip_sorted(&a.entries, &b.entries, |e| e.0, |x, y| {
            let Some(&(within, tick)) = x.max(y) else { return };
            if joined.passed(within, tick) || is_lane(within) && covering.0 == warp_of(within) && tick <= covering.1 {
                return;
            }
            if warp_of(within) == within {
                covering = (within, tick);
            }
            entries.push((within, tick));
        });
        joined.entries = entries;
        joined
    }
}

/// What two parts know together, for a part that both lists may have: one of the two where it covers the other.
fn join_blocks(a: &Arc<BlockPart>, b: &Arc<BlockPart>) -> (Covers, Arc<BlockPart>) {
    if Arc::ptr_eq(a, b) {
        return (Covers::BOTH, a.clone());
    }
    let covers = Covers { left: a.covers(b), right: b.covers(a) };
    let joined = match covers {
        Covers { left: true, .. } => a.clone(),
        Covers { right: true, .. } => b.clone(),
        _ => Arc::new(BlockPart::join(a, b)),
    };
    (covers, joined)
}

fn join_grids(a: &Arc<GridPart>, b: &Arc<GridPart>) -> (Covers, Arc<GridPart>) {
    if Arc::ptr_eq(a, b) {
        return (Covers::BOTH, a.clone());
    }
    let mut covers = Covers::BOTH;
    let mut blocks = Vec::with_capacity(a.blocks.len().max(b.blocks.len()));
    zip_sorted(&a.blocks, &b.blocks, |p| p.block, |x, y| match (x, y) {
        (Some(x), Some(y)) => {
            let (which, joined) = join_blocks(x, y);
            covers.and(which);
            blocks.push(joined);
        }
        (x, y) => {
            covers.and(Covers { left: x.is_some(), right: y.is_some() });
            blocks.extend(x.or(y).cloned());
        }
    });
    let joined = match covers {
        Covers { left: true, .. } => a.clone(),
        Covers { right: true, .. } => b.clone(),
        _ => Arc::new(GridPart { grid: a.grid, end: a.end.max(b.end), blocks }),
    };
    (covers, joined)
}

fn join_roots(a: &Arc<Root>, b: &Arc<Root>) -> Arc<Root> {
    let mut covers = Covers::BOTH;
    let mut timelines = Vec::with_capacity(a.timelines.len().max(b.timelines.len()));
    zip_sorted(&a.timelines, &b.timelines, |e| e.0, |x, y| {
        covers.and(Covers::of(x.map_or(0, |e| e.1), y.map_or(0, |e| e.1)));
        timelines.extend(x.max(y));
    });
    let ended = |part: &GridPart| tick_of(&timelines, part.end.0) >= part.end.1;
    let mut grids = Vec::with_capacity(a.grids.len().max(b.grids.len()));
    zip_sorted(&a.grids, &b.grids, |p| p.grid, |x, y| match (x, y) {
        (Some(x), Some(y)) => {
            let (which, joined) = join_grids(x, y);
            covers.and(which);
            grids.push(joined);
        }
        // One side knows the end of the grid, so it has all that there is to know.
        (Some(part), None) | (None, Some(part)) if ended(part) => {}
        (x, y) => {
            covers.and(Covers { left: x.is_some(), right: y.is_some() });
            grids.extend(x.or(y).cloned());
        }
    });
    match covers {
        Covers { left: true, .. } => a.clone(),
        Covers { right: true, .. } => b.clone(),
        _ => Arc::new(Root { timelines, grids }),
    }
}

impl Clock {
    fn root(&self) -> &Root {
        static EMPTY: Root = Root { timelines: vec![], grids: vec![] };
        self.0.as_deref().unwrap_or(&EMPTY)
    }

    fn root_mut(&mut self) -> &mut Root {
        Arc::make_mut(self.0.get_or_insert_default())
    }

    fn part(&self, key: Key) -> Option<&BlockPart> {
        let grids = &self.root().grids;
        let grid = &grids[grids.binary_search_by_key(&grid_of(key), |p| p.grid).ok()?];
        Some(&grid.blocks[grid.blocks.binary_search_by_key(&block_number(key), |p| p.block).ok()?])
    }

    /// The part for the block of a key, which comes to be if it is not there.
    fn part_mut(&mut self, key: Key) -> &mut BlockPart {
        let grids = &mut self.root_mut().grids;
        let at = grids.binary_search_by_key(&grid_of(key), |p| p.grid).unwrap_or_else(|at| {
            grids.insert(at, Arc::new(GridPart { grid: grid_of(key), end: (0, u32::MAX), blocks: vec![] }));
            at
        });
        let blocks = &mut Arc::make_mut(&mut grids[at]).blocks;
        let number = block_number(key);
        let at = blocks.binary_search_by_key(&number, |p| p.block).unwrap_or_else(|at| {
            blocks.insert(at, Arc::new(BlockPart::new(number)));
            at
        });
        Arc::make_mut(&mut blocks[at])
    }

    /// Up to which tick a timeline is known.
    pub(crate) fn timeline(&self, key: Key) -> u32 {
        tick_of(&self.root().timelines, key)
    }

    /// Whether tick `tick` of `key` is known, by an entry of its own, or by its warp's or block's. The end of its grid is the caller's
    /// to look for.
    pub(crate) fn knows(&self, key: Key, tick: u32) -> bool {
        if is_timeline(key) {
            return self.timeline(key) >= tick;
        }
        self.part(key).is_some_and(|part| part.knows(key as Within, tick))
    }

    /// Learns `key` up to `tick`.
    pub(crate) fn raise(&mut self, key: Key, tick: u32) {
        if self.knows(key, tick) {
            return;
        }
        if is_timeline(key) {
            let root = self.root_mut();
            raise_in(&mut root.timelines, key, tick);
            root.grids.retain(|part| !(part.end.0 == key && part.end.1 <= tick));
            return;
        }
        self.part_mut(key).raise(key as Within, tick);
    }

    /// A grid begins that will have ended at tick `end.1` of the timeline `end.0`.
    pub(crate) fn begin_grid(&mut self, grid: u32, end: (Key, u32)) {
        let grids = &mut self.root_mut().grids;
        if let Err(at) = grids.binary_search_by_key(&grid, |p| p.grid) {
            grids.insert(at, Arc::new(GridPart { grid, end, blocks: vec![] }));
        }
    }

    /// All of the block of `key` has passed its barrier number `number`, and its warps had come to `ticks`.
    pub(crate) fn pass_barrier(&mut self, key: Key, number: u32, ticks: Box<[u32]>) {
        self.part_mut(key).pass(Arc::new(Barrier { number, ticks }));
    }

    /// Whether both are the same for certain.
    pub(crate) fn same(&self, other: &Clock) -> bool {
        match (&self.0, &other.0) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            (a, b) => a.is_none() && b.is_none(),
        }
    }

    /// Learns all that `other` knows.
    pub(crate) fn join(&mut self, other: &Clock) {
        match (&mut self.0, &other.0) {
            (_, None) => {}
            (Some(a), Some(b)) if Arc::ptr_eq(a, b) => {}
            (Some(a), Some(b)) => *a = join_roots(a, b),
            (mine, theirs) => mine.clone_from(theirs),
        }
    }

    /// How many entries there are.
    #[cfg(test)]
    fn len(&self) -> usize {
        let blocks = self.root().grids.iter().flat_map(|g| &g.blocks);
        self.root().timelines.len() + blocks.map(|b| b.entries.len() + usize::from(b.barrier.is_some())).sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    #[test]
    fn a_warp_stands_for_its_lanes() {
        let w = warp(3, 7, 2);
        let mut c = Clock::default();
        c.raise(lane(w, 5), 4);
        assert!(c.knows(lane(w, 5), 4) && !c.knows(lane(w, 5), 5) && !c.knows(lane(w, 6), 1));
        c.raise(w, 6);
        assert!(c.knows(lane(w, 5), 6) && c.knows(lane(w, 31), 6));
        assert_eq!(c.len(), 1, "the lane's entry says nothing that the warp's does not");
        assert!(!c.knows(store_reads(w, 5), 1), "bulk stores are no accesses of the lane");
        c.raise(lane(w, 5), 9);
        assert!(c.knows(lane(w, 5), 9) && !c.knows(lane(w, 4), 9));
    }

    #[test]
    fn keys_tell_where_they_are() {
        let w = warp(3, 7, 31);
        assert_eq!(place_of(lane(w, 31)), Some((7, Some((31, Some(31))))));
        assert_eq!(place_of(store_writes(w, 4)), Some((7, Some((31, Some(4))))));
        assert_eq!(place_of(w), Some((7, Some((31, None)))));
        assert_eq!(place_of(mbarrier(w, 9)), Some((7, None)));
        assert_eq!(place_of(timeline(4)), None);
        assert_eq!((grid_of(w), block_of(w)), (3, block_of(warp(3, 7, 0))));
    }

    /// Against a map that keeps every lane by itself.
    #[test]
    fn joins_are_the_pointwise_maximum() {
        let mut r = Rng::new(5);
        for _ in 0..500 {
            let mut clocks = [Clock::default(), Clock::default()];
            let mut maps = [std::collections::BTreeMap::new(), std::collections::BTreeMap::new()];
            for _ in 0..40 {
                let (which, w) = (r.below(2) as usize, warp(1, r.below(2), r.below(2) as u32));
                let (l, tick) = (r.below(4) as usize, 1 + r.below(6) as u32);
                if r.below(3) == 0 {
                    clocks[which].raise(w, tick);
                    (0..4).for_each(|l| {
                        let e = maps[which].entry(lane(w, l)).or_insert(0);
                        *e = tick.max(*e);
                    });
                } else {
                    clocks[which].raise(lane(w, l), tick);
                    let e = maps[which].entry(lane(w, l)).or_insert(0);
                    *e = tick.max(*e);
                }
            }
            let [mut a, b] = clocks;
            a.join(&b);
            for (block, w, l, tick) in (0..2).flat_map(|b| {
                (0..2).flat_map(move |w| (0..4).flat_map(move |l| (1..8).map(move |t| (b, w, l, t))))
            }) {
                let key = lane(warp(1, block, w), l);
                let want = maps.iter().any(|m| m.get(&key).is_some_and(|&t| t >= tick));
                assert_eq!(a.knows(key, tick), want);
            }
        }
    }
}
