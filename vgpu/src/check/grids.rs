//! The grids of a checker, and the actors that a scope includes.

use std::collections::HashMap;

use super::clock::{self, Key, Passed, VectorClock};
use crate::ir::Scope;

/// Facts about the grids: the timeline and the device that each ran on.
#[derive(Debug, Default)]
pub(crate) struct Grids {
    pub(crate) all: Vec<GridFacts>,
    /// Numbers of devices, by the identity of their memory.
    pub(crate) devices: HashMap<u64, u32>,
    /// Whether reports name devices.
    pub(crate) names_devices: bool,
}

#[derive(Debug)]
pub(crate) struct GridFacts {
    pub(crate) timeline: Key,
    pub(crate) tick: u32,
    pub(crate) device: u64,
    pub(crate) kernel: std::sync::Arc<crate::kernel::Kernel>,
    /// Blocks of the grid and of a cluster in x, y, z.
    pub(crate) grid: [u32; 3],
    pub(crate) cluster: [u32; 3],
}

impl Grids {
    /// The number of a device, where reports name devices.
    pub(crate) fn number_of(&self, device: u64) -> Option<u32> {
        self.devices.get(&device).copied().filter(|_| self.names_devices)
    }

    pub(crate) fn facts(&self, key: Key) -> Option<&GridFacts> {
        if clock::is_timeline(key) {
            return None;
        }
        // Numbers begin with 1.
        self.all.get((clock::grid_of(key) as usize).checked_sub(1)?)
    }

    /// Whether `clock` includes tick `tick` of `key`.
    pub(crate) fn includes_tick(&self, clock: &VectorClock, key: Key, tick: u32) -> bool {
        clock.includes(key, tick) || self.has_ended(clock, key)
    }

    /// How many lanes of the warp `key` are included in `clock` up to tick `tick`.
    pub(crate) fn passed(&self, clock: &VectorClock, key: Key, tick: u32) -> Passed {
        match clock.passed(key, tick) {
            Passed::All => Passed::All,
            _ if self.has_ended(clock, key) => Passed::All,
            fewer => fewer,
        }
    }

    /// Whether `clock` includes all of the grid of `key`.
    fn has_ended(&self, clock: &VectorClock, key: Key) -> bool {
        // The end of a grid is in the past of none of its lanes.
        !clock.is_of_grid(key) && self.facts(key).is_some_and(|g| clock.timeline(g.timeline) >= g.tick)
    }

    /// Whether the scope of an access by `of` includes `other`.
    pub(crate) fn includes(&self, scope: Scope, of: Key, other: Key) -> bool {
        match scope {
            Scope::Sys => true,
            Scope::Cta => clock::block_of(of) == clock::block_of(other),
            Scope::Cluster => self.same_cluster(of, other),
            Scope::Gpu => match (self.facts(of), self.facts(other)) {
                (Some(a), Some(b)) => a.device == b.device,
                _ => false,
            },
        }
    }

    /// Whether two actors are in blocks of one cluster.
    pub(crate) fn same_cluster(&self, a: Key, b: Key) -> bool {
        if clock::block_of(a) == clock::block_of(b) {
            return true;
        }
        let (Some(facts), Some((a_block, _)), Some((b_block, _))) =
            (self.facts(a), clock::place_of(a), clock::place_of(b))
        else {
            return false;
        };
        if facts.cluster == [1; 3] || clock::grid_of(a) != clock::grid_of(b) {
            return false;
        }
        let [x, y, _] = facts.grid.map(u64::from);
        let cluster = |block: u64| {
            let at = [block % x, block / x % y, block / x / y];
            [0, 1, 2].map(|d| at[d] / u64::from(facts.cluster[d]))
        };
        cluster(a_block) == cluster(b_block)
    }

    /// Whether two actors are in the same block (scope .cta), in the same cluster (.cluster) or on the same device (otherwise), so
    /// that their releases can share a chain: any scope includes both or neither of them.
    pub(crate) fn same_scopes(&self, scope: Scope, a: Key, b: Key) -> bool {
        let narrowest = scope.min(Scope::Gpu);
        self.includes(narrowest, a, b)
    }

    /// Whether the scopes of two accesses include each other's actor.
    pub(crate) fn mutual(&self, a: Scope, of_a: Key, b: Scope, of_b: Key) -> bool {
        self.includes(a, of_a, of_b) && self.includes(b, of_b, of_a)
    }
}
