//! The parts of every algorithm, payloads to and from peers; and all-gather and all-to-all.

use super::blocks;
use crate::error::{Error, Result};
use crate::mesh::Engine;

/// One collective under way.
pub(crate) struct Run<'a> {
    pub engine: &'a mut Engine,
    pub rank: u32,
    pub size: u32,
}

impl Run<'_> {
    /// Sends to one rank while receiving from one; payloads of one step.
    pub(super) fn swap(&mut self, to: u32, payload: &[u8], from: u32) -> Result<Vec<u8>> {
        self.engine.exchange(&[(to, payload)], &[from]).map(|mut all| all.pop().unwrap_or_default())
    }

    pub(super) fn send(&mut self, to: u32, payload: &[u8]) -> Result<()> {
        self.engine.exchange(&[(to, payload)], &[]).map(drop)
    }

    pub(super) fn receive(&mut self, from: u32) -> Result<Vec<u8>> {
        self.engine.exchange(&[], &[from]).map(|mut all| all.pop().unwrap_or_default())
    }

    /// A peer's payload that does not have the shape the algorithm needs.
    pub(super) fn malformed(&self, peer: u32, what: impl std::fmt::Display) -> Error {
        self.engine.error(vec![peer], format!("rank {peer} sent {what}"))
    }

    /// An error if a peer has sent another number of bytes than this rank has.
    pub(super) fn check_length(&self, peer: u32, theirs: &[u8], ours: &[u8]) -> Result<()> {
        if theirs.len() == ours.len() {
            return Ok(());
        }
        Err(self.malformed(peer, format!("{} bytes instead of {}", theirs.len(), ours.len())))
    }

    /// Bruck: every round doubles the blocks a rank has. Moves no more bytes than a ring, in the
    /// logarithm of its rounds.
    pub(crate) fn all_gather(&mut self, data: Vec<u8>) -> Result<Vec<Vec<u8>>> {
        let size = self.size as usize;
        // Block `i` is that of the rank `i` after this one.
        let mut all = Vec::with_capacity(size);
        all.push(data);
        while all.len() < size {
            let distance = all.len() as u32;
            let count = all.len().min(size - all.len());
            let from = (self.rank + distance) % self.size;
            let to = (self.rank + self.size - distance) % self.size;
            let payload = blocks::pack(all[..count].iter().map(Vec::as_slice));
            let theirs = self.swap(to, &payload, from)?;
            let theirs = blocks::unpack(&theirs, count)
                .ok_or_else(|| self.malformed(from, "blocks that do not fit the round"))?;
            all.extend(theirs);
        }
        all.rotate_right(self.rank as usize);
        Ok(all)
    }

    /// All pairs at the same time, starting with the next rank so that no one gets everything at
    /// once.
    pub(super) fn all_to_all(&mut self, mut parts: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
        let own = std::mem::take(&mut parts[self.rank as usize]);
        let order = |step: u32| (self.rank + step) % self.size;
        let peers: Vec<u32> = (1..self.size).map(order).collect();
        let sends: Vec<(u32, &[u8])> =
            peers.iter().map(|peer| (*peer, parts[*peer as usize].as_slice())).collect();
        let theirs = self.engine.exchange(&sends, &peers)?;
        for (peer, part) in peers.iter().zip(theirs) {
            parts[*peer as usize] = part;
        }
        parts[self.rank as usize] = own;
        Ok(parts)
    }
}
