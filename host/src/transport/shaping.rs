//! Worse networks for tests: delays, queues that lag, narrow links, cut links.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::lock::lock;

/// How to degrade the queues of a rank. Clones are handles of the same links: a link cut by one is
/// cut for all.
#[derive(Debug, Clone, Default)]
pub struct Shaping {
    pub(super) seed: u64,
    pub(super) delay: Duration,
    pub(super) lags: Vec<(u32, u32, Duration)>,
    pub(super) bytes_per_second: Option<u64>,
    pub(super) cut_after: Vec<(u32, u64)>,
    pub(super) cut: Arc<Mutex<BTreeSet<u32>>>,
}

impl Shaping {
    /// Changes nothing yet; `seed` draws the random delays.
    pub fn new(seed: u64) -> Shaping {
        Shaping { seed, ..Shaping::default() }
    }

    /// Every put waits for a random time below `most` before it starts. Its queue waits with it.
    pub fn delay_up_to(mut self, most: Duration) -> Shaping {
        self.delay = most;
        self
    }

    /// Every put of this queue to `peer` waits for `delay`, on top of a random one: the queue lags
    /// behind the others.
    pub fn lag(mut self, peer: u32, queue: u32, delay: Duration) -> Shaping {
        self.lags.push((peer, queue, delay));
        self
    }

    /// The most that a queue carries, in bytes of payload per second.
    pub fn bandwidth(mut self, bytes_per_second: u64) -> Shaping {
        self.bytes_per_second = Some(bytes_per_second.max(1));
        self
    }

    /// Cuts each queue to `peer` after its first `puts` puts.
    pub fn cut_after(mut self, peer: u32, puts: u64) -> Shaping {
        self.cut_after.push((peer, puts));
        self
    }

    /// Cuts the link to `peer` now: later puts vanish without an error and never complete.
    pub fn cut(&self, peer: u32) {
        lock(&self.cut).insert(peer);
    }

    pub(super) fn is_cut(&self, peer: u32, puts: u64) -> bool {
        self.cut_after.iter().any(|(cut, after)| *cut == peer && puts >= *after)
            || lock(&self.cut).contains(&peer)
    }
}
