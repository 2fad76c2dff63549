//! Finds a way to every peer: mapped wire memory or queues.

use std::sync::Arc;
use std::time::Duration;

use super::links::{Links, PeerQueue};
use super::options::{TransportKind, TransportOptions};
use super::setup::{Setup, Writer};
use super::shaping::Shaped;
use super::{greeting, mapped, shm, tcp, verbs};
use crate::driver::{Device, Memory, MemoryKind};
use crate::error::Result;
use crate::group::ProcessGroup;

/// The way to a peer.
#[derive(Debug)]
pub struct Way {
    /// The rank at the other end.
    pub peer: u32,
    /// This rank's wire memory that the peer writes to.
    pub memory: Arc<Memory>,
    /// The peer's wire memory, if kernels here write to it themselves; else the peer has queues.
    pub mapped: Option<Arc<Memory>>,
}

impl Way {
    /// Whether bytes for the peer are stored in host memory.
    pub fn is_on_host(&self) -> bool {
        !self.memory.host_ptr().is_null()
    }
}

/// Allocates wire memory of `bytes` and finds a way to each of `peers`, as [`connect`] does. Ways
/// are in the order of `peers`. `writer`: that of the peers' host memory over
/// [`TransportKind::Shm`]; proxies, if links are shaped. Collective over the group.
///
/// # Errors
/// Those of [`wire_memory`] and [`connect`].
pub fn open(
    options: &TransportOptions,
    device: &Device,
    group: &dyn ProcessGroup,
    bytes: u64,
    peers: &[u32],
    timeout: Duration,
    writer: Writer,
) -> Result<(Vec<Way>, Links)> {
    let memory = wire_memory(options, device, group, bytes)?;
    let mut links = connect_by(options, &memory, group, peers, timeout, writer)?;
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
pub fn wire_memory(
    options: &TransportOptions,
    device: &Device,
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
            let memory = Memory::alloc(device, bytes, MemoryKind::MappedHost, "wire memory");
            // This process alone accesses it.
            memory.inspect(Memory::watch_host).map(Arc::new)
        }
        TransportKind::Verbs => verbs::wire_memory(options, device, bytes),
    };
    greeting::agree(group, options.kind, memory)
}

/// Connects this rank to `peers`, the ranks of the group that it exchanges bytes with: ascending,
/// without itself, and each lists this one. `memory` is this rank's [`wire_memory`], of the same
/// size on every rank; it is kept until the links are closed. With [`TransportKind::Auto`] only
/// peers that can be mapped have links. Collective over the group; `timeout` bounds the waits for
/// peers, in addition to the group's own.
///
/// # Errors
/// On every rank, if the ranks' options, sizes or versions differ or one of them has no address.
/// With [`TransportKind::Direct`], also if one cannot map another's memory.
pub fn connect(
    options: &TransportOptions,
    memory: &Arc<Memory>,
    group: &dyn ProcessGroup,
    peers: &[u32],
    timeout: Duration,
) -> Result<Links> {
    connect_by(options, memory, group, peers, timeout, Writer::Proxies)
}

fn connect_by(
    options: &TransportOptions,
    memory: &Arc<Memory>,
    group: &dyn ProcessGroup,
    peers: &[u32],
    timeout: Duration,
    writer: Writer,
) -> Result<Links> {
    // A shaped link is a queue.
    let writer = if options.hooks.shaping.is_some() { Writer::Proxies } else { writer };
    let setup = Setup { options, memory, group, peers, timeout, writer };
    let mut links = match options.kind {
        TransportKind::Auto | TransportKind::Direct => mapped::connect(&setup)?,
        TransportKind::Shm => shm::connect(&setup)?,
        TransportKind::Tcp => tcp::connect(&setup)?,
        TransportKind::Verbs => verbs::connect(&setup)?,
    };
    if let Some(shaping) = &options.hooks.shaping {
        let shape = |PeerQueue { peer, index, queue }| {
            let queue = Box::new(Shaped::new(queue, shaping, setup.ends(peer), index));
            PeerQueue { peer, index, queue }
        };
        links.links = links.take().into_iter().map(shape).collect();
    }
    Ok(links)
}
