//! Happens-before: vector clocks over everything that accesses memory, in a compact form.
//!
//! An *actor* is a lane, a warp as a whole, one side of a lane's bulk stores, a lane's asynchronous
//! copies, the products of a warpgroup, an mbarrier, or a timeline. The mbarrier is the actor of the
//! bulk loads that complete on it. A timeline is a stream or a host thread. Each actor counts its
//! own ticks. A [`VectorClock`] records, per actor, the tick up to which its accesses are in the
//! causal past. Entries stand for many actors where they can. An entry of a warp stands for its
//! lanes. A barrier that all of a block has passed stands for the block's warps. An entry of a
//! timeline stands for all grids that ran there.
//!
//! Clocks are compared and joined at every barrier and every acquire, and are mostly equal. So a
//! clock is a tree whose parts are shared, by grid and by block. Equal parts are the same
//! allocation, and a join visits only parts that differ. The clocks of the lanes of a block keep
//! the entries of their own block beside the tree, because barriers and mbarriers change only these
//! ([`VectorClock::keep_apart`]).

use std::cell::RefCell;
use std::cmp::Ordering;
use std::sync::Arc;

use super::hash::FastMap;

/// An actor. From the top: grid (27 bits), block (20), within the block (16).
pub(crate) type Key = u64;

/// Marks the key of a timeline.
const TIMELINE: Key = 1 << 63;
/// Marks, within a block, the key of an mbarrier.
const MBARRIER: Key = 1 << 15;
/// Bits below a warp: itself (0), its lanes, the two sides of their bulk stores, and the products of
/// its warpgroup. A block has up to 32 warps, so the two bits below [`MBARRIER`] are free.
pub(crate) const WITHIN_WARP: Key = 127;
const LANE: Key = 1;
const STORE_READS: Key = 33;
const STORE_WRITES: Key = 65;
/// Marks, on the key of the reading side, the asynchronous copies of a lane.
const COPIES: Key = 1 << 13;
/// Marks, on the same key, a lane's initialisations of mbarriers that it has fenced.
const INITS: Key = 1 << 14;
const PRODUCTS: Key = 97;

/// Most grids and blocks that a key has bits for.
pub(crate) const MAX_GRIDS: u32 = 1 << 27;
pub(crate) const MAX_BLOCKS: u64 = 1 << 20;

pub(crate) fn timeline(number: u64) -> Key {
    TIMELINE | number
}

pub(crate) fn is_timeline(key: Key) -> bool {
    key & TIMELINE != 0
}

pub(crate) fn warp(grid: u32, block: u64, warp: u32) -> Key {
    // Number 0 within a block is unused.
    Key::from(grid) << 36 | block << 16 | Key::from(warp + 1) << 7
}

/// A lane of the warp `warp`.
pub(crate) fn lane(warp: Key, lane: usize) -> Key {
    warp + LANE + lane as Key
}

/// The warp and the number of a lane; `None` where the key is no lane's.
pub(crate) fn lane_of(key: Key) -> Option<(Key, usize)> {
    let lane = (key & WITHIN_WARP).wrapping_sub(LANE) as usize;
    (!is_timeline(key) && is_lane(key as Within)).then_some((key & !WITHIN_WARP, lane))
}

/// The reading side of the bulk stores of a lane: done once their sources may be overwritten.
pub(crate) fn store_reads(warp: Key, lane: usize) -> Key {
    warp + STORE_READS + lane as Key
}

/// Their writing side: done once they have landed.
pub(crate) fn store_writes(warp: Key, lane: usize) -> Key {
    warp + STORE_WRITES + lane as Key
}

/// The asynchronous copies of a lane (`cp.async`), a tick for each.
pub(crate) fn copies(warp: Key, lane: usize) -> Key {
    store_reads(warp, lane) | COPIES
}

/// The initialisations of mbarriers by `lane`, by the lane's ticks.
pub(crate) fn inits(lane: Key) -> Key {
    (lane + (STORE_READS - LANE)) | INITS
}

/// The products of the warpgroup whose first warp is `warp`: a tick per group.
pub(crate) fn products(warp: Key) -> Key {
    warp + PRODUCTS
}

/// The `index`th mbarrier of the block of `warp`: the bulk loads that complete on it, a tick per
/// phase.
pub(crate) fn mbarrier(warp: Key, index: usize) -> Key {
    block_of(warp) << 16 | MBARRIER | index as Key
}

/// Whether an actor is the warp `warp` or one of its lanes.
pub(crate) fn is_of_warp(key: Key, warp: Key) -> bool {
    key & !WITHIN_WARP == warp && key & WITHIN_WARP < STORE_READS
}

pub(crate) fn grid_of(key: Key) -> u32 {
    (key >> 36) as u32
}

/// Grid and block: equal for the actors of one block.
pub(crate) fn block_of(key: Key) -> Key {
    key >> 16
}

/// The first warp of a block that [`block_of`] has given.
pub(crate) fn warp_of_block(block: Key) -> Key {
    warp((block >> 20) as u32, block & (MAX_BLOCKS - 1), 0)
}

/// Block within the grid, warp, and lane.
type Place = (u64, Option<(u32, Option<u32>)>);

/// Grid, block and lane of an actor, decoded from its key. None for timelines.
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

fn is_warp(within: Within) -> bool {
    !is_mbarrier(within) && warp_of(within) == within
}

/// Number of the warp of a lane or warp, for accesses that a barrier of the block orders.
fn warp_number(within: Within) -> Option<usize> {
    let number = usize::from(within >> 7);
    if is_lane(within) || is_warp(within) { number.checked_sub(1) } else { None }
}

/// A barrier that all warps of a block have passed.
#[derive(Debug)]
struct Barrier {
    /// Counts from 1, in the block.
    number: u32,
    /// The tick that each warp had reached.
    ticks: Box<[u32]>,
}

/// Causal past within a block.
#[derive(Clone, Debug, Default)]
struct BlockPart {
    barrier: Option<Arc<Barrier>>,
    /// Tick per actor, sorted by actor, without the actors that the barrier or a warp stands for.
    entries: Vec<(Within, u32)>,
}

/// Causal past within a grid.
#[derive(Clone, Debug)]
struct GridPart {
    /// The timeline that it runs on, and the tick there that stands for all of it.
    end: (Key, u32),
    /// The blocks by number, sorted.
    blocks: Vec<(u32, Arc<BlockPart>)>,
}

/// Ticks of timelines, sorted by key. `None` where there are none.
type Timelines = Option<Arc<Vec<(Key, u32)>>>;

/// Root of a causal past.
#[derive(Clone, Debug, Default)]
struct Root {
    timelines: Timelines,
    /// The grids by number, sorted, without grids whose end is in the past.
    grids: Vec<(u32, Arc<GridPart>)>,
}

/// The causal past within one block that is kept beside the tree. The tree may have more of it.
#[derive(Clone, Debug)]
struct Own {
    /// In the form of [`block_of`].
    block: Key,
    part: Arc<BlockPart>,
}

/// The last tick of each actor that is included.
#[derive(Clone, Debug, Default)]
pub(crate) struct VectorClock {
    root: Option<Arc<Root>>,
    own: Option<Own>,
}

/// How many lanes of a warp are included in a clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Passed {
    None,
    /// Perhaps all of them, each by an entry of its own.
    Some,
    All,
}

/// An entry of one list, of the other, or of both.
type Either<'a, K, V> = (Option<&'a (K, V)>, Option<&'a (K, V)>);

/// Goes through two sorted lists together.
fn zip_sorted<'a, K: Ord, V>(a: &'a [(K, V)], b: &'a [(K, V)]) -> impl Iterator<Item = Either<'a, K, V>> {
    let (mut a, mut b) = (a.iter().peekable(), b.iter().peekable());
    std::iter::from_fn(move || {
        let order = match (a.peek(), b.peek()) {
            (Some(x), Some(y)) => x.0.cmp(&y.0),
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (None, None) => return None,
        };
        Some((a.next_if(|_| order.is_le()), b.next_if(|_| order.is_ge())))
    })
}

/// The tick of a key in sorted entries; 0 where there is none.
#[inline]
fn tick_of<K: Ord + Copy>(entries: &[(K, u32)], key: K) -> u32 {
    find(entries, key).copied().unwrap_or(0)
}

#[inline]
fn find<K: Ord + Copy, V>(entries: &[(K, V)], key: K) -> Option<&V> {
    entries.binary_search_by_key(&key, |e| e.0).ok().map(|at| &entries[at].1)
}

/// The value of a key in sorted entries, which is inserted if it is missing.
fn find_or<K: Ord + Copy, V>(entries: &mut Vec<(K, V)>, key: K, fresh: impl FnOnce() -> V) -> &mut V {
    let at = entries.binary_search_by_key(&key, |e| e.0).unwrap_or_else(|at| {
        entries.insert(at, (key, fresh()));
        at
    });
    &mut entries[at].1
}

/// A part of a clock that others share.
trait Part: Sized {
    /// Whether this one has all that `other` has.
    fn covers(&self, other: &Self) -> bool;
    /// The join of two parts, neither of which covers the other.
    fn join(a: &Self, b: &Self) -> Self;
}

fn covers<P: Part>(a: &Arc<P>, b: &Arc<P>) -> bool {
    Arc::ptr_eq(a, b) || a.covers(b)
}

/// The join of two parts. It is one of the two if that covers the other, so that both clocks share
/// it from then on.
fn join<P: Part>(a: &Arc<P>, b: &Arc<P>) -> Arc<P> {
    if covers(a, b) {
        a.clone()
    } else if b.covers(a) {
        b.clone()
    } else {
        Arc::new(P::join(a, b))
    }
}

fn join_lists<P: Part>(a: &[(u32, Arc<P>)], b: &[(u32, Arc<P>)]) -> Vec<(u32, Arc<P>)> {
    let mut joined = Vec::with_capacity(a.len().max(b.len()));
    joined.extend(zip_sorted(a, b).filter_map(|pair| match pair {
        (Some((number, x)), Some((_, y))) => Some((*number, join(x, y))),
        (x, y) => x.or(y).cloned(),
    }));
    joined
}

impl BlockPart {
    /// Whether the barrier stands for this entry.
    fn passed(&self, within: Within, tick: u32) -> bool {
        let Some(barrier) = &self.barrier else { return false };
        warp_number(within).and_then(|w| barrier.ticks.get(w)).is_some_and(|&t| t >= tick)
    }

    fn includes(&self, within: Within, tick: u32) -> bool {
        self.passed(within, tick)
            || tick_of(&self.entries, within) >= tick
            || is_lane(within) && tick_of(&self.entries, warp_of(within)) >= tick
    }

    /// How many lanes of the warp `within` are included up to this tick.
    fn passed_by(&self, within: Within, tick: u32) -> Passed {
        if self.includes(within, tick) {
            return Passed::All;
        }
        let first = self.entries.partition_point(|&(w, _)| w < within);
        let mut of_warp = self.entries[first..].iter().take_while(|&&(w, _)| warp_of(w) == within);
        if of_warp.any(|&(w, t)| is_lane(w) && t >= tick) { Passed::Some } else { Passed::None }
    }

    fn raise(&mut self, within: Within, tick: u32) {
        *find_or(&mut self.entries, within, || 0) = tick;
        if is_warp(within) {
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

    fn barriers(&self) -> u32 {
        self.barrier.as_ref().map_or(0, |b| b.number)
    }
}

impl Part for BlockPart {
    fn covers(&self, other: &Self) -> bool {
        self.barriers() >= other.barriers() && other.entries.iter().all(|&(w, t)| self.includes(w, t))
    }

    fn join(a: &Self, b: &Self) -> Self {
        let later = if a.barriers() >= b.barriers() { a } else { b };
        let mut joined = Self { barrier: later.barrier.clone(), entries: vec![] };
        let mut entries = Vec::with_capacity(a.entries.len().max(b.entries.len()) + 4);
        let mut warp = (0, 0);
        for (x, y) in zip_sorted(&a.entries, &b.entries) {
            // The later tick of the two, or the only one.
            let Some(&(within, tick)) = x.max(y) else { continue };
            let by_warp = is_lane(within) && warp.0 == warp_of(within) && tick <= warp.1;
            if by_warp || joined.passed(within, tick) {
                continue;
            }
            if is_warp(within) {
                warp = (within, tick);
            }
            entries.push((within, tick));
        }
        joined.entries = entries;
        joined
    }
}

impl Part for GridPart {
    fn covers(&self, other: &Self) -> bool {
        zip_sorted(&self.blocks, &other.blocks).all(|pair| match pair {
            (Some((_, x)), Some((_, y))) => covers(x, y),
            (mine, _) => mine.is_some(),
        })
    }

    fn join(a: &Self, b: &Self) -> Self {
        Self { end: a.end.max(b.end), blocks: join_lists(&a.blocks, &b.blocks) }
    }
}

impl Root {
    fn timelines(&self) -> &[(Key, u32)] {
        self.timelines.as_ref().map_or(&[], |all| all)
    }

    /// The last tick of a timeline that is included.
    #[inline]
    fn timeline(&self, key: Key) -> u32 {
        let all = self.timelines();
        // Timelines are numbered, and mostly all of them have ticks.
        let guess = all.first().map_or(0, |(first, _)| key.wrapping_sub(*first) as usize);
        match all.get(guess) {
            Some((at, tick)) if *at == key => *tick,
            _ => tick_of(all, key),
        }
    }

    fn ended(&self, part: &GridPart) -> bool {
        self.timeline(part.end.0) >= part.end.1
    }
}

/// Whether both are the same allocation, or nothing.
fn same<T>(a: &Option<Arc<T>>, b: &Option<Arc<T>>) -> bool {
    match (a, b) {
        (Some(a), Some(b)) => Arc::ptr_eq(a, b),
        (a, b) => a.is_none() && b.is_none(),
    }
}

/// The join of the timelines of two clocks. It is one of the two if that has all of the other, so
/// that clocks share it.
fn join_timelines(a: &Root, b: &Root) -> Timelines {
    if same(&a.timelines, &b.timelines) {
        return a.timelines.clone();
    }
    let (a_all, b_all) = (a.timelines(), b.timelines());
    let (mut left, mut right) = (true, true);
    for (x, y) in zip_sorted(a_all, b_all) {
        let (x, y) = (x.map_or(0, |e| e.1), y.map_or(0, |e| e.1));
        (left, right) = (left && x >= y, right && y >= x);
    }
    if left || right {
        return if left { a.timelines.clone() } else { b.timelines.clone() };
    }
    let mut timelines = Vec::with_capacity(a_all.len().max(b_all.len()));
    timelines.extend(zip_sorted(a_all, b_all).filter_map(|(x, y)| x.max(y)));
    Some(Arc::new(timelines))
}

/// Recent joins, by the addresses of both parts. The parts are kept so that their addresses are not
/// reused.
type Lately = FastMap<(usize, usize), [Arc<GridPart>; 3]>;

/// The join of two grids' parts. All blocks of a grid join the same parts of other grids, one after
/// the other. With the cache they share one result, which is computed once.
fn join_grids(a: &Arc<GridPart>, b: &Arc<GridPart>) -> Arc<GridPart> {
    thread_local!(static LATELY: RefCell<Lately> = RefCell::default());
    const MOST: usize = 4096;
    if Arc::ptr_eq(a, b) {
        return a.clone();
    }
    let [x, y] = [a, b].map(|part| Arc::as_ptr(part) as usize);
    LATELY.with_borrow_mut(|lately| {
        if lately.len() >= MOST {
            lately.clear();
        }
        let pair = lately.entry((x.min(y), x.max(y)));
        pair.or_insert_with(|| [a.clone(), b.clone(), join(a, b)])[2].clone()
    })
}

fn join_roots(a: &Arc<Root>, b: &Arc<Root>) -> Arc<Root> {
    let timelines = join_timelines(a, b);
    // Whether one of the two has it all.
    let (mut left, mut right) = (same(&timelines, &a.timelines), same(&timelines, &b.timelines));
    let mut grids = Vec::with_capacity(a.grids.len().max(b.grids.len()));
    for pair in zip_sorted(&a.grids, &b.grids) {
        match pair {
            (Some((number, x)), Some((_, y))) => {
                let both = join_grids(x, y);
                (left, right) = (left && Arc::ptr_eq(&both, x), right && Arc::ptr_eq(&both, y));
                grids.push((*number, both));
            }
            (Some(x), None) if !b.ended(&x.1) => {
                right = false;
                grids.push(x.clone());
            }
            (None, Some(y)) if !a.ended(&y.1) => {
                left = false;
                grids.push(y.clone());
            }
            _ => {}
        }
    }
    if left || right {
        return if left { a.clone() } else { b.clone() };
    }
    Arc::new(Root { timelines, grids })
}

/// The part of a tree for the block of `key`.
fn part_of_tree(root: &mut Arc<Root>, key: Key) -> &mut Arc<BlockPart> {
    // A grid that did not begin in this world never ends in it.
    let fresh = || Arc::new(GridPart { end: (0, u32::MAX), blocks: vec![] });
    let grid = find_or(&mut Arc::make_mut(root).grids, grid_of(key), fresh);
    find_or(&mut Arc::make_mut(grid).blocks, block_number(key), Default::default)
}

impl VectorClock {
    fn root(&self) -> &Root {
        static EMPTY: Root = Root { timelines: None, grids: vec![] };
        self.root.as_deref().unwrap_or(&EMPTY)
    }

    fn root_mut(&mut self) -> &mut Root {
        Arc::make_mut(self.root.get_or_insert_default())
    }

    /// The part of the block of `key` that is kept beside the tree.
    #[inline]
    fn own(&self, key: Key) -> Option<&BlockPart> {
        self.own.as_ref().filter(|own| own.block == block_of(key)).map(|own| &*own.part)
    }

    /// The part of the tree for the block of `key`.
    #[inline]
    fn part(&self, key: Key) -> Option<&BlockPart> {
        let grid = find(&self.root().grids, grid_of(key))?;
        Some(find(&grid.blocks, block_number(key))?)
    }

    /// The part for the block of `key`, to add to.
    fn part_mut(&mut self, key: Key) -> &mut BlockPart {
        match &mut self.own {
            Some(own) if own.block == block_of(key) => Arc::make_mut(&mut own.part),
            _ => Arc::make_mut(part_of_tree(self.root.get_or_insert_default(), key)),
        }
    }

    /// From here on, new entries of the block of `key` are kept beside the tree: the clock is that
    /// of its lanes.
    pub(crate) fn keep_apart(&mut self, key: Key) {
        self.own = Some(Own { block: block_of(key), part: Arc::default() });
    }

    /// The same clock with all of it in the tree, for those that do not belong to its block.
    pub(crate) fn in_tree(&self) -> VectorClock {
        let mut root = self.root.clone();
        if let Some(Own { block, part }) = &self.own
            && (part.barrier.is_some() || !part.entries.is_empty())
        {
            let of_tree = part_of_tree(root.get_or_insert_default(), block << 16);
            *of_tree = join(of_tree, part);
        }
        Self { root, own: None }
    }

    /// The last tick of a timeline that is included.
    pub(crate) fn timeline(&self, key: Key) -> u32 {
        self.root().timeline(key)
    }

    /// Whether tick `tick` of `key` is included, by an entry of its own, of its warp or of its
    /// block. The caller must check for the end of its grid.
    pub(crate) fn includes(&self, key: Key, tick: u32) -> bool {
        if is_timeline(key) {
            return self.timeline(key) >= tick;
        }
        let includes = |part: &BlockPart| part.includes(key as Within, tick);
        self.own(key).is_some_and(includes) || self.part(key).is_some_and(includes)
    }

    /// How many lanes of the warp `key` are included up to tick `tick`. The caller must check for
    /// the end of their grid.
    pub(crate) fn passed(&self, key: Key, tick: u32) -> Passed {
        let passed =
            |part: Option<&BlockPart>| part.map_or(Passed::None, |part| part.passed_by(key as Within, tick));
        match passed(self.own(key)) {
            Passed::All => Passed::All,
            fewer => fewer.max(passed(self.part(key))),
        }
    }

    /// Whether it is the clock of lanes ([`VectorClock::keep_apart`]) of the grid of `key`.
    pub(crate) fn is_of_grid(&self, key: Key) -> bool {
        self.own.as_ref().is_some_and(|own| own.block >> 20 == Key::from(grid_of(key)))
    }

    /// Includes `key` up to `tick`.
    pub(crate) fn raise(&mut self, key: Key, tick: u32) {
        if self.includes(key, tick) {
            return;
        }
        if is_timeline(key) {
            let root = self.root_mut();
            *find_or(Arc::make_mut(root.timelines.get_or_insert_default()), key, || 0) = tick;
            root.grids.retain(|(_, part)| part.end.0 != key || part.end.1 > tick);
            return;
        }
        self.part_mut(key).raise(key as Within, tick);
    }

    /// Begins a grid whose end is tick `end.1` of the timeline `end.0`.
    pub(crate) fn begin_grid(&mut self, grid: u32, end: (Key, u32)) {
        find_or(&mut self.root_mut().grids, grid, || Arc::new(GridPart { end, blocks: vec![] }));
    }

    /// All of the block of `key` has passed its barrier number `number`, and its warps had reached
    /// `ticks`.
    pub(crate) fn pass_barrier(&mut self, key: Key, number: u32, ticks: Box<[u32]>) {
        self.part_mut(key).pass(Arc::new(Barrier { number, ticks }));
    }

    /// Whether both are the same for certain.
    pub(crate) fn same(&self, other: &VectorClock) -> bool {
        let parts = match (&self.own, &other.own) {
            (Some(a), Some(b)) => a.block == b.block && Arc::ptr_eq(&a.part, &b.part),
            (a, b) => a.is_none() && b.is_none(),
        };
        parts && same(&self.root, &other.root)
    }

    /// Whether the trees are the same for certain.
    pub(crate) fn same_tree(&self, other: &VectorClock) -> bool {
        same(&self.root, &other.root)
    }

    /// Joins `other` into this clock.
    pub(crate) fn join(&mut self, other: &VectorClock) {
        match (&mut self.own, &other.own) {
            (_, None) => self.join_tree(&other.root),
            (Some(mine), Some(theirs)) if mine.block == theirs.block => {
                if !Arc::ptr_eq(&mine.part, &theirs.part) {
                    mine.part = join(&mine.part, &theirs.part);
                }
                self.join_tree(&other.root);
            }
            (None, Some(_)) if self.root.is_none() => self.clone_from(other),
            _ => self.join_tree(&other.in_tree().root),
        }
    }

    fn join_tree(&mut self, other: &Option<Arc<Root>>) {
        match (&mut self.root, other) {
            (_, None) => {}
            (Some(mine), Some(theirs)) => {
                if !Arc::ptr_eq(mine, theirs) {
                    *mine = join_roots(mine, theirs);
                }
            }
            (mine, theirs) => mine.clone_from(theirs),
        }
    }

    /// How many entries there are.
    #[cfg(test)]
    fn len(&self) -> usize {
        let blocks = self.root().grids.iter().flat_map(|(_, grid)| &grid.blocks);
        let entries = blocks.map(|(_, b)| b.entries.len() + usize::from(b.barrier.is_some()));
        self.root().timelines().len() + entries.sum::<usize>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seeds::Rng;

    #[test]
    fn a_warp_stands_for_its_lanes() {
        let w = warp(3, 7, 2);
        let mut c = VectorClock::default();
        c.raise(lane(w, 5), 4);
        assert!(c.includes(lane(w, 5), 4) && !c.includes(lane(w, 5), 5) && !c.includes(lane(w, 6), 1));
        c.raise(w, 6);
        assert!(c.includes(lane(w, 5), 6) && c.includes(lane(w, 31), 6));
        assert_eq!(c.len(), 1, "the lane's entry says nothing that the warp's does not");
        assert!(!c.includes(store_reads(w, 5), 1), "bulk stores are no accesses of the lane");
        c.raise(lane(w, 5), 9);
        assert!(c.includes(lane(w, 5), 9) && !c.includes(lane(w, 4), 9));
    }

    #[test]
    fn timelines_are_found_whichever_have_ticks() {
        let mut c = VectorClock::default();
        for number in [4, 5, 6, 9, 2, 12] {
            c.raise(timeline(number), 10 + number as u32);
            let known =
                |n: u64| if c.includes(timeline(n), 10 + n as u32) { c.timeline(timeline(n)) } else { 0 };
            assert_eq!(known(number), 10 + number as u32);
            assert_eq!([1, 3, 7, 13].map(known), [0; 4]);
        }
        let all = [2, 4, 5, 6, 9, 12].map(|n| c.timeline(timeline(n)));
        assert_eq!(all, [12, 14, 15, 16, 19, 22]);
    }

    #[test]
    fn keys_tell_where_they_are() {
        let w = warp(3, 7, 31);
        assert_eq!(place_of(lane(w, 31)), Some((7, Some((31, Some(31))))));
        assert_eq!(place_of(store_writes(w, 4)), Some((7, Some((31, Some(4))))));
        assert_eq!(place_of(w), Some((7, Some((31, None)))));
        assert_eq!(place_of(copies(w, 4)), Some((7, Some((31, Some(4))))));
        assert_eq!(place_of(mbarrier(w, 9)), Some((7, None)));
        assert_eq!(place_of(timeline(4)), None);
        assert_eq!((grid_of(w), block_of(w)), (3, block_of(warp(3, 7, 0))));
    }

    /// Against a map that keeps every lane by itself.
    #[test]
    fn joins_are_the_pointwise_maximum() {
        let mut r = Rng::new(5);
        for _ in 0..500 {
            let mut clocks = [VectorClock::default(), VectorClock::default()];
            // Some are clocks of lanes of one of the two blocks.
            for clock in &mut clocks {
                if let block @ 0..2 = r.below(3) {
                    clock.keep_apart(warp(1, block, 0));
                }
            }
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
                assert_eq!(a.includes(key, tick), want);
                assert_eq!(a.in_tree().includes(key, tick), want);
            }
        }
    }
}
