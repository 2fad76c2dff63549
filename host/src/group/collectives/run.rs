//! The parts of every algorithm: payloads to and from peers.

use crate::error::{Error, Result};
use crate::group::mesh::Engine;

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
}
