//! How bytes cross nodes: ordered queues of puts between the wire memories of two ranks.
//!
//! A kernel posts [`PutRequest`](epoxide_gpu::layout::PutRequest)s to a ring; a proxy thread takes them out and gives them to a
//! [`Queue`]. The only order to build on is that of one queue: a put's bytes are visible at the peer before its counter,
//! and its counter before that of the next put. Nothing is ordered between queues.

#[cfg(feature = "rdma")]
pub mod verbs;

use std::fmt::Debug;
use std::time::Duration;

use crate::error::Result;

/// Bytes from the own wire memory to a peer's, and the counter behind them. Offsets are in bytes from the start of wire memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Put {
    /// Where the bytes are here.
    pub from: u64,
    /// Where they go there.
    pub to: u64,
    /// How many; 0 where only the counter is wanted.
    pub bytes: u64,
    /// The word there that gets `value` once the bytes are visible, 8-byte aligned.
    pub counter: u64,
    /// What is stored in it: absolute, never an increment, so that no atomics of a network card are needed.
    pub value: u64,
}

/// An ordered queue to one peer. One thread uses it.
pub trait Queue: Send + Debug {
    /// Starts the puts, in order, as one batch. May wait for the network, not longer than the queue's timeout.
    ///
    /// # Errors
    /// The peer said goodbye, died, or cannot be reached; the queue is of no use from then on.
    fn put_with_counter(&mut self, puts: &[Put]) -> Result<()>;

    /// How many puts, of all posted so far, have left: the memory that their bytes came from may be written again. Does not
    /// wait.
    fn completed(&mut self) -> Result<u64>;

    /// Waits until all puts have left.
    fn quiet(&mut self, timeout: Duration) -> Result<()>;

    /// Says goodbye: nothing is put after it.
    fn close(&mut self);
}
