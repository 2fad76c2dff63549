//! How bytes cross nodes. If a peer's wire memory is mapped here, kernels write it themselves.
//! Otherwise there are ordered queues of puts between the wire memories of two ranks.
//!
//! A kernel posts [`PutRequest`](epoxide_gpu::layout::PutRequest)s to a ring; a proxy thread
//! (`Proxies`) takes them out and passes them to a `PutQueue`. Only puts of one queue are ordered.
//! A put's bytes are visible at the peer before its counter, and its counter before that of the
//! next put. Different queues have no order.
//!
//! A rank closes without a barrier, once its own operations have ended and its posted puts have
//! left. It then needs no further put of a peer. A put to a rank that has closed ends the peer's
//! queue, so that the peer's next operation with that rank times out, with this reason.
//!
//! Kernels wait for the threads here, so none of these makes a driver call between connecting and
//! closing (`NoDriverCalls`). The queues of tcp move bytes between page-locked host memories, and
//! so do those of shm where proxies write. The queues of verbs post writes to the card.

mod greeting;
pub(crate) mod links;
mod mapped;
pub(crate) mod open;
pub(crate) mod options;
mod presence;
pub(crate) mod proxy;
pub(crate) mod put;
pub(crate) mod setup;
pub(crate) mod shaping;
mod shm;
pub(crate) mod tcp;
#[cfg(test)]
mod tests;
// For the command `doctor` alone. A public item here would be one that the documentation and
// docs/PUBLIC-API.txt lack: both are made without libibverbs.
#[cfg(feature = "rdma")]
#[doc(hidden)]
pub mod verbs;
#[cfg(not(feature = "rdma"))]
#[path = "no_verbs.rs"]
mod verbs;
mod verbs_options;

pub(crate) use greeting::agree_or;
pub(crate) use open::{Way, connect, open};
pub use options::{MAX_CONNECTIONS, MAX_QUEUES, TransportKind, TransportOptions};
pub(crate) use proxy::{Proxies, PutTrace, QueueStats};
pub(crate) use setup::Writer;
pub use verbs_options::VerbsOptions;
