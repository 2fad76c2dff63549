//! What happened before: vector clocks over everything that touches memory, in a form that stays small.
//!
//! An *actor* is a lane, a warp as a whole, one side of a lane's bulk stores, an mbarrier (for the bulk loads that complete on it), or a
//! timeline: a stream or a host thread. Each counts its own ticks, and a [`Clock`] says up to which tick of which actor everything is
//! known. Most of it is said in few words: an entry of a warp stands for its lanes, one of a timeline for all grids that ran there.

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
    // Number 0 within a block is the block.
    Key::from(grid) << 36 | block << 16 | Key::from(warp + 1) << 7
}

/// The block of an actor, as an actor: a tick for each barrier that all of it has passed.
pub(crate) fn block(key: Key) -> Key {
    key & !0xffff
}

fn is_block(key: Key) -> bool {
    key & (TIMELINE | 0xffff) == 0
}

/// Number of the warp of a lane's or warp's key within its block.
pub(crate) fn warp_number(key: Key) -> Option<usize> {
    let accesses = key & (TIMELINE | MBARRIER) == 0 && (key & WITHIN_WARP) < STORE_READS;
    ((key >> 7 & 63) as usize).checked_sub(1).filter(|_| accesses)
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
    if key & MBARRIER != 0 || is_block(key) {
        return Some((block, None));
    }
    let within = key & WITHIN_WARP;
    let lane = within.checked_sub(LANE).map(|lane| (lane % 32) as u32);
    Some((block, Some(((key >> 7 & 63) as u32 - 1, lane))))
}

fn warp_of(key: Key) -> Key {
    key & !WITHIN_WARP
}

fn is_warp(key: Key) -> bool {
    key & (TIMELINE | MBARRIER | WITHIN_WARP) == 0 && !is_block(key)
}

fn is_lane(key: Key) -> bool {
    key & (TIMELINE | MBARRIER) == 0 && (LANE..LANE + 32).contains(&(key & WITHIN_WARP))
}

/// Up to which tick an actor is known.
type Entry = (Key, u32);

/// Entries that differ from a clock's base, at most: beyond, they become a base of their own.
const MOST_NEWS: usize = 48;

/// Up to which tick everything of which actor is known: a base that many clocks share, and what is new since, both sorted by actor.
/// Actors that meet often, such as the warps of a block, have the same base, so that what they tell each other is short.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock {
    base: Arc<Vec<Entry>>,
    news: Vec<Entry>,
}

/// The tick of a key in sorted entries; 0 where there is none.
fn tick_of(entries: &[Entry], key: Key) -> u32 {
    let at = entries.partition_point(|e| e.0 < key);
    entries.get(at).filter(|e| e.0 == key).map_or(0, |e| e.1)
}

/// Whether sorted entries have tick `tick` of `key`, or of the warp `from` of a lane `key`.
fn has(entries: &[Entry], from: Key, key: Key, tick: u32) -> bool {
    let at = entries.partition_point(|e| e.0 < from);
    entries[at..].iter().take_while(|e| e.0 <= key).any(|e| (e.0 == key || e.0 == from) && e.1 >= tick)
}

/// Both lists in one, without lanes that their warp stands for.
fn merge(a: &[Entry], b: &[Entry]) -> Vec<Entry> {
    let mut merged = Vec::with_capacity(a.len() + b.len());
    let (mut i, mut k) = (0, 0);
    let mut covering = (0, 0);
    while i < a.len() || k < b.len() {
        let (x, y) = (a.get(i), b.get(k));
        let (key, tick) = match (x, y) {
            (Some(x), Some(y)) if x.0 == y.0 => {
                (i, k) = (i + 1, k + 1);
                (x.0, x.1.max(y.1))
            }
            (Some(x), y) if y.is_none_or(|y| x.0 < y.0) => {
                i += 1;
                *x
            }
            (_, Some(y)) => {
                k += 1;
                *y
            }
            // Neither list has more: the loop has ended.
            _ => break,
        };
        if is_warp(key) {
            covering = (key, tick);
        } else if is_lane(key) && covering.0 == warp_of(key) && tick <= covering.1 {
            continue;
        }
        merged.push((key, tick));
    }
    merged
}

impl Clock {
    pub(crate) fn get(&self, key: Key) -> u32 {
        tick_of(&self.base, key).max(tick_of(&self.news, key))
    }

    /// Whether tick `tick` of `key` is known, by an entry of its own or, for a lane, of its warp.
    pub(crate) fn knows(&self, key: Key, tick: u32) -> bool {
        let from = if is_lane(key) { warp_of(key) } else { key };
        has(&self.news, from, key, tick) || has(&self.base, from, key, tick)
    }

    /// Learns `key` up to `tick`.
    pub(crate) fn raise(&mut self, key: Key, tick: u32) {
        if self.knows(key, tick) {
            return;
        }
        let at = self.news.partition_point(|e| e.0 < key);
        match self.news.get_mut(at).filter(|e| e.0 == key) {
            Some(entry) => entry.1 = tick,
            None => self.news.insert(at, (key, tick)),
        }
        if is_warp(key) {
            // The lanes that this entry now stands for.
            self.news.retain(|&(k, t)| !(is_lane(k) && warp_of(k) == key && t <= tick));
        }
        if self.news.len() > MOST_NEWS {
            self.settle();
        }
    }

    /// Makes one base of everything.
    fn settle(&mut self) {
        if !self.news.is_empty() {
            self.base = Arc::new(merge(&self.base, &self.news));
            self.news = vec![];
        }
    }

    /// How many entries there are.
    pub(crate) fn len(&self) -> usize {
        self.base.len() + self.news.len()
    }

    pub(crate) fn same(&self, other: &Clock) -> bool {
        Arc::ptr_eq(&self.base, &other.base) && self.news == other.news
    }

    /// Learns all that `other` knows.
    pub(crate) fn join(&mut self, other: &Clock) {
        if !Arc::ptr_eq(&self.base, &other.base) && !self.covers(&other.base) {
            if other.covers(&self.base) {
                // The other base serves both.
                let mine = std::mem::replace(self, other.clone());
                mine.news.iter().for_each(|&(key, tick)| self.raise(key, tick));
                return;
            }
            self.base = Arc::new(merge(&self.base, &other.base));
        }
        other.news.iter().for_each(|&(key, tick)| self.raise(key, tick));
    }

    /// Whether each of these entries is known here too.
    fn covers(&self, entries: &[Entry]) -> bool {
        let mut mine = self.base.iter();
        entries.iter().all(|theirs| {
            mine.by_ref().find(|e| e.0 >= theirs.0).is_some_and(|e| e.0 == theirs.0 && e.1 >= theirs.1)
        })
    }

    /// Forgets the entries for which `f` is false.
    pub(crate) fn retain(&mut self, f: impl Fn(Key, u32) -> bool) {
        if self.base.iter().chain(&self.news).any(|&(key, tick)| !f(key, tick)) {
            self.settle();
            self.base = Arc::new(self.base.iter().copied().filter(|&(key, tick)| f(key, tick)).collect());
        }
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
