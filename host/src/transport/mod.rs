//! How bytes cross nodes. If a peer's wire memory is mapped here, kernels write it themselves.
//! Otherwise there are ordered queues of puts between the wire memories of two ranks.
//!
//! A kernel posts [`PutRequest`](epoxide_gpu::layout::PutRequest)s to a ring; a proxy thread
//! ([`Proxies`]) takes them out and gives them to a [`PutQueue`]. The only order to build on is
//! that of one queue. A put's bytes are visible at the peer before its counter, and its counter
//! before that of the next put. Queues are not ordered among each other. Nothing is ordered between
//! queues.
//!
//! [`open`] allocates wire memory and finds a way to every peer: [`wire_memory`] is the allocation
//! alone, [`connect`] the rest. Closing is ordered: the ranks wait until all their posts have been
//! sent and have arrived, meet at a barrier, and then close. A rank that closes earlier fails its
//! peers' later puts.
//!
//! Kernels wait for the threads here, so none of these makes a driver call between connecting and
//! closing ([`NoDriverCalls`](crate::driver::NoDriverCalls)). The backends shm and tcp move bytes
//! between page-locked host memories, verbs has the card do it.

mod greeting;
mod links;
mod mapped;
mod options;
mod presence;
mod proxy;
mod put;
mod setup;
mod shaped;
mod shaping;
mod shm;
pub(crate) mod tcp;
#[cfg(test)]
mod tests;
#[cfg(feature = "rdma")]
#[cfg_attr(docsrs, doc(cfg(feature = "rdma")))]
pub mod verbs;
#[cfg(not(feature = "rdma"))]
#[path = "no_verbs.rs"]
mod verbs;
mod verbs_options;

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

#[doc(hidden)]
pub use links::{Link, Links};
pub use options::{MAX_QUEUES, TransportKind, TransportOptions};
#[doc(hidden)]
pub use proxy::{Proxies, Proxy, PutTrace, QueueStats};
#[doc(hidden)]
pub use put::{Interrupt, Put, PutQueue};
#[doc(hidden)]
pub use shaped::Shaped;
#[doc(hidden)]
pub use shaping::Shaping;
pub use verbs_options::VerbsOptions;

use setup::Setup;

use crate::driver::{Device, Memory, MemoryKind};
use crate::error::Result;
use crate::group::ProcessGroup;

/// The way to a peer.
#[doc(hidden)]
#[derive(Debug)]
pub struct Way {
    /// The rank at the other end.
    pub peer: u32,
    /// This rank's wire memory that the peer writes to.
    pub memory: Arc<Memory>,
    /// The peer's wire memory, if kernels here write to it themselves; else there are queues to the
    /// peer.
    pub mapped: Option<Arc<Memory>>,
}

/// Allocates wire memory of `bytes` and finds a way to each of `peers`, as [`connect`] says. Ways
/// are in the order of `peers`. Collective over the group.
///
/// # Errors
/// Those of [`wire_memory`] and [`connect`].
#[doc(hidden)]
pub fn open(
    options: &TransportOptions,
    device: &Arc<dyn Device>,
    group: &dyn ProcessGroup,
    bytes: u64,
    peers: &[u32],
    timeout: Duration,
) -> Result<(Vec<Way>, Links)> {
    let memory = wire_memory(options, device, group, bytes)?;
    let mut links = connect(options, &memory, group, peers, timeout)?;
    let way = |links: &Links, peer: u32, memory: &Arc<Memory>| Way {
        peer,
        memory: memory.clone(),
        mapped: links.mapped(peer).cloned(),
    };
    let mut ways: Vec<Way> = peers.iter().map(|peer| way(&links, *peer, &memory)).collect();
    if options.kind != TransportKind::Auto {
        return Ok((ways, links));
    }
    let others: Vec<u32> = peers.iter().copied().filter(|peer| links.mapped(*peer).is_none()).collect();
    let anyone = group.all_gather(&[u8::from(!others.is_empty())])?;
    if anyone.iter().all(|answer| answer[..] == [0]) {
        return Ok((ways, links));
    }
    let options = TransportOptions { kind: TransportKind::Tcp, ..options.clone() };
    let memory = wire_memory(&options, device, group, bytes)?;
    let queued = connect(&options, &memory, group, &others, timeout)?;
    for old in ways.iter_mut().filter(|way| way.mapped.is_none()) {
        *old = way(&queued, old.peer, &memory);
    }
    links.extend(queued);
    Ok((ways, links))
}

/// Allocates wire memory where the transport reaches it; its contents are zero, which is where
/// counters begin. Collective over the group.
///
/// # Errors
/// On every rank, where one of them has no such memory.
#[doc(hidden)]
pub fn wire_memory(
    options: &TransportOptions,
    device: &Arc<dyn Device>,
    group: &dyn ProcessGroup,
    bytes: u64,
) -> Result<Arc<Memory>> {
    let memory = match options.kind {
        TransportKind::Auto | TransportKind::Direct => {
            Memory::alloc(device, bytes, MemoryKind::Shareable, "wire memory").map(Arc::new)
        }
        TransportKind::Shm => {
            Memory::alloc(device, bytes, MemoryKind::SharedHost, "wire memory").map(Arc::new)
        }
        TransportKind::Tcp => {
            Memory::alloc(device, bytes, MemoryKind::MappedHost, "wire memory").map(Arc::new)
        }
        TransportKind::Verbs => verbs::wire_memory(options, device, bytes),
    };
    greeting::agree(group, options.kind, memory)
}

/// Connects this rank to `peers`, the ranks of the group that it exchanges bytes with: ascending,
/// without itself, and each lists this one. `memory` is this rank's [`wire_memory`], of the same
/// size on every rank; it is kept until the links are closed. With [`TransportKind::Auto`] there
/// are links to the peers that can be mapped alone. Collective over the group; `timeout` bounds the
/// waits for peers, beside the group's own.
///
/// # Errors
/// On every rank, if the ranks' options, sizes or versions differ or one of them cannot take part.
/// With [`TransportKind::Direct`], also if one cannot map another's memory.
#[doc(hidden)]
pub fn connect(
    options: &TransportOptions,
    memory: &Arc<Memory>,
    group: &dyn ProcessGroup,
    peers: &[u32],
    timeout: Duration,
) -> Result<Links> {
    let setup = Setup { options, memory, group, peers, timeout };
    let mut links = match options.kind {
        TransportKind::Auto | TransportKind::Direct => mapped::connect(&setup)?,
        TransportKind::Shm => shm::connect(&setup)?,
        TransportKind::Tcp => tcp::connect(&setup)?,
        TransportKind::Verbs => verbs::connect(&setup)?,
    };
    if let Some(shaping) = &options.shaping {
        let shape = |Link { peer, index, queue }| {
            let queue = Box::new(Shaped::new(queue, shaping, setup.ends(peer), index));
            Link { peer, index, queue }
        };
        links.links = links.take().into_iter().map(shape).collect();
    }
    Ok(links)
}
