//! Causal past: vector clocks of everything that a lane, stream or host thread has synchronised
//! with.

use super::clock::{self, Key, Passed, VectorClock};
use super::grids::Grids;

/// The causal past of a stream, an event or a host thread.
#[derive(Clone, Debug, Default)]
pub struct Past(pub(super) CausalPast);

impl Past {
    pub(crate) fn of(past: CausalPast) -> Self {
        Self(past)
    }

    pub(crate) fn inner(&self) -> &CausalPast {
        &self.0
    }

    /// This and `other` have both happened.
    pub fn join(&mut self, other: &Past) {
        self.0.join(&other.0);
    }
}

/// An actor that executes its work in order: a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeline(pub(super) Key);

/// The causal past of an actor.
#[derive(Clone, Debug, Default)]
pub(crate) struct CausalPast {
    pub(crate) all: VectorClock,
    /// The part of it that bulk copies may rely on, in shared and in global memory: accesses before
    /// a proxy fence.
    pub(crate) published: [VectorClock; 2],
}

/// Indices of [`CausalPast::published`].
pub(crate) const SHARED: usize = 0;
pub(crate) const GLOBAL: usize = 1;

impl CausalPast {
    pub(crate) fn join(&mut self, other: &CausalPast) {
        self.all.join(&other.all);
        let equal = |past: &CausalPast| past.published[SHARED].same(&past.published[GLOBAL]);
        let both_equal = equal(self) && equal(other);
        self.published[SHARED].join(&other.published[SHARED]);
        if both_equal {
            self.published[GLOBAL] = self.published[SHARED].clone();
        } else {
            self.published[GLOBAL].join(&other.published[GLOBAL]);
        }
    }

    /// From here on, it is the causal past of lanes of the block of `key`; see
    /// [`VectorClock::keep_apart`].
    pub(crate) fn keep_apart(&mut self, key: Key) {
        let [shared, global] = &mut self.published;
        [&mut self.all, shared].into_iter().for_each(|clock| clock.keep_apart(key));
        if shared.same_tree(global) {
            global.clone_from(shared);
        } else {
            global.keep_apart(key);
        }
    }

    /// The same for others than the lanes of a block.
    pub(crate) fn in_tree(&self) -> CausalPast {
        let [shared, global] = &self.published;
        let first = shared.in_tree();
        let second = if shared.same(global) { first.clone() } else { global.in_tree() };
        CausalPast { all: self.all.in_tree(), published: [first, second] }
    }

    /// Whether both are the same for certain.
    pub(crate) fn same(&self, other: &CausalPast) -> bool {
        self.all.same(&other.all) && self.published.iter().zip(&other.published).all(|(a, b)| a.same(b))
    }

    /// Adds everything up to tick `tick` of `key`, for every proxy.
    pub(crate) fn raise(&mut self, key: Key, tick: u32) {
        self.all.raise(key, tick);
        self.published.iter_mut().for_each(|p| p.raise(key, tick));
    }

    /// Kernel boundaries and the host order all proxies.
    pub(crate) fn publish_all(&mut self) {
        self.published = [self.all.clone(), self.all.clone()];
    }
}

/// Causal past that an acquire took over from a chain.
#[derive(Clone, Debug)]
pub(crate) struct Acquired {
    pub(super) chain: u64,
    pub(super) past: CausalPast,
    /// Whether `past` is joined into the lane's causal past.
    pub(super) joined: bool,
}

/// The causal past of a lane without its own accesses, in parts that count as if they were joined.
#[derive(Clone, Copy)]
pub(crate) struct PastView<'a> {
    pub(super) past: &'a CausalPast,
    pub(super) acquired: &'a [Acquired],
    /// The lane's warp, and the tick up to which it includes all lanes of that.
    pub(super) met: (Key, u32),
}

impl<'a> PastView<'a> {
    pub(crate) fn all(past: &'a CausalPast) -> Self {
        Self { past, acquired: &[], met: (0, 0) }
    }

    /// Whether all of it is in `past`, but for what the warp has met at.
    pub(super) fn is_joined(&self) -> bool {
        self.acquired.iter().all(|h| h.joined)
    }

    /// Whether it includes tick `tick` of a lane or warp because all of its own warp has met.
    #[inline]
    fn has_met(&self, key: Key, tick: u32) -> bool {
        tick <= self.met.1 && clock::is_of_warp(key, self.met.0)
    }

    /// Whether it includes tick `tick` of the timeline `key`.
    pub(crate) fn includes_all(&self, key: Key, tick: u32) -> bool {
        let acquired = self.acquired.iter().filter(|h| !h.joined).map(|h| &h.past);
        std::iter::once(self.past).chain(acquired).any(|past| past.all.timeline(key) >= tick)
    }

    /// Whether it includes tick `tick` of `key`.
    pub(crate) fn includes(&self, grids: &Grids, key: Key, tick: u32) -> bool {
        if self.has_met(key, tick) {
            return true;
        }
        let acquired = self.acquired.iter().filter(|h| !h.joined).map(|h| &h.past);
        std::iter::once(self.past).chain(acquired).any(|past| grids.includes_tick(&past.all, key, tick))
    }

    /// How many lanes of the warp `key` it includes up to tick `tick`.
    pub(crate) fn passed(&self, grids: &Grids, key: Key, tick: u32) -> Passed {
        if self.has_met(key, tick) {
            return Passed::All;
        }
        let acquired = self.acquired.iter().filter(|h| !h.joined).map(|h| &h.past);
        let all = std::iter::once(self.past).chain(acquired);
        all.map(|past| grids.passed(&past.all, key, tick)).max().unwrap_or(Passed::None)
    }
}
