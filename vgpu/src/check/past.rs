//! Causal past: vector clocks of everything that a lane, stream or host thread has synchronised
//! with.

use super::clock::{Key, VectorClock};
use super::grids::Grids;

/// The causal past of a stream, an event or a host thread.
#[derive(Clone, Debug, Default)]
pub struct Past(pub(super) Known);

impl Past {
    pub(crate) fn of(known: Known) -> Self {
        Self(known)
    }

    pub(crate) fn known(&self) -> &Known {
        &self.0
    }

    /// This and `other` have both happened.
    pub fn join(&mut self, other: &Past) {
        self.0.join(&other.0);
    }
}

/// Something that does one thing after the other: a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeline(pub(super) Key);

/// The causal past of an actor.
#[derive(Clone, Debug, Default)]
pub(crate) struct Known {
    pub(crate) all: VectorClock,
    /// The part of it that bulk copies may rely on, in shared and in global memory: accesses before
    /// a proxy fence.
    pub(crate) published: [VectorClock; 2],
}

/// Indices of [`Known::published`].
pub(crate) const SHARED: usize = 0;
pub(crate) const GLOBAL: usize = 1;

impl Known {
    pub(crate) fn join(&mut self, other: &Known) {
        self.all.join(&other.all);
        let alike = |known: &Known| known.published[SHARED].same(&known.published[GLOBAL]);
        let both = alike(self) && alike(other);
        self.published[SHARED].join(&other.published[SHARED]);
        if both {
            self.published[GLOBAL] = self.published[SHARED].clone();
        } else {
            self.published[GLOBAL].join(&other.published[GLOBAL]);
        }
    }

    /// Whether both are the same for certain.
    pub(crate) fn same(&self, other: &Known) -> bool {
        self.all.same(&other.all) && self.published.iter().zip(&other.published).all(|(a, b)| a.same(b))
    }

    /// Learns something that is known in every proxy.
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
pub(crate) struct Heard {
    pub(super) chain: u64,
    pub(super) known: Known,
    /// Whether `known` is joined into the lane's causal past.
    pub(super) settled: bool,
}

/// The causal past of a lane without its own accesses, in parts that count as if they were joined.
#[derive(Clone, Copy)]
pub(crate) struct Knows<'a> {
    pub(super) known: &'a Known,
    pub(super) heard: &'a [Heard],
}

impl<'a> Knows<'a> {
    pub(crate) fn all(known: &'a Known) -> Self {
        Self { known, heard: &[] }
    }

    /// Whether tick `tick` of `key` is known.
    pub(crate) fn has(&self, grids: &Grids, key: Key, tick: u32) -> bool {
        let heard = self.heard.iter().filter(|h| !h.settled).map(|h| &h.known);
        std::iter::once(self.known).chain(heard).any(|known| grids.known(&known.all, key, tick))
    }
}
