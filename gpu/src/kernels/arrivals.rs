//! Rows of a channel that have arrived from each node: the last warp of a receiving block polls the
//! arrival words in wire memory, and the other warps read its copies in shared memory. One warp
//! polls, because a GPU loads a line of host memory for one warp after the other, 1.8 us each.
//!
//! Soundness: the polling lane acquires a node's word and releases its copy, so that a warp that
//! acquires the copy finds the rows. A lane alone writes the copy of its node.

use super::epoch::aborted;
use super::peer_wait::PeerWait;
use super::rail::{Path, arrival, arrival_word, rows_arrived};
use crate::layout::{Comm, Wait, Wire};
use crate::simt::*;

/// The copies: a word for each node.
pub struct Arrivals {
    words: SharedArray<u32, 32>,
}

impl Arrivals {
    /// The words lie at offset `at` of dynamic shared memory, where a block that sends has its
    /// [`super::progress::Progress`]. The first warp calls it, and the block meets before any warp
    /// uses them.
    ///
    /// # Safety
    /// The host has sized shared memory for them; no thread reads them before the block has met.
    #[device]
    pub unsafe fn new(at: u32) -> Self {
        let words = SharedArray::new(dynamic_shared() + at);
        if tid() < 32 {
            words.st(tid(), 0);
        }
        Arrivals { words }
    }

    /// Rows that are known to have arrived from `node`; they are visible to the calling lane.
    ///
    /// # Safety
    /// The node has a word.
    #[device]
    pub unsafe fn rows(&self, node: u32) -> u32 {
        ld_acquire_cta_shared_u32(self.words.at(node))
    }

    /// Waits until more than `row` rows have arrived from `node`; false when any wait of this rank
    /// has expired. Any lanes call it.
    ///
    /// # Safety
    /// The node has a word, and a warp of the block executes [`Arrivals::watch`].
    #[device]
    pub unsafe fn wait(&self, comm: &Comm, node: u32, row: u32) -> bool {
        let mut turns: u32 = 0;
        while self.rows(node) <= row {
            turns += 1;
            if turns.is_multiple_of(64) && aborted(comm) {
                return false;
            }
        }
        true
    }

    /// Polls until all rows of the channel have arrived, or a wait of this rank has expired. Lane n
    /// gives the number that node n sends. One warp calls it; a wait that expires is of this name.
    /// For rows of the own node there is no deadline: they come from the other block of the
    /// channel, which itself waits for other nodes first.
    ///
    /// # Safety
    /// The words are in this rank's wire memory.
    #[device]
    pub unsafe fn watch(&self, comm: &Comm, wire: &Wire, channel: u32, rows: u32, epoch: u64, what: Wait) {
        let node = laneid();
        let mut word = 0;
        if node < wire.num_nodes {
            word = Path::to(wire, node).memory + arrival_word(wire, node, channel);
        }
        let mut seen = 0;
        let mut wait = PeerWait::new(comm, node, epoch, what);
        while ballot(seen < rows) != 0 {
            let mut gives_up = false;
            if seen < rows {
                let now = rows_arrived(word, epoch);
                if now != seen {
                    st_release_cta_shared_u32(self.words.at(node), now);
                    seen = now;
                    wait = PeerWait::new(comm, node, epoch, what);
                } else if wait.has_expired() {
                    if node != wire.node {
                        wait.record(arrival(epoch, seen + 1), arrival(epoch, seen));
                    }
                    gives_up = (node != wire.node) | aborted(comm);
                }
            }
            if ballot(gives_up) != 0 {
                return;
            }
        }
    }
}
