//! How bytes cross nodes. Where a peer's wire memory is mapped here, kernels write it themselves; elsewhere there are ordered queues
//! of puts between the wire memories of two ranks.
//!
//! A kernel posts [`PutRequest`](epoxide_gpu::layout::PutRequest)s to a ring; a proxy thread ([`Proxies`]) takes them out
//! and gives them to a [`Queue`]. The only order to build on is that of one queue: a put's bytes are visible at the peer
//! before its counter, and its counter before that of the next put. Nothing is ordered between queues.
//!
//! [`open`] allocates wire memory and finds a way to every peer: [`wire_memory`] is the allocation alone, [`connect`] the rest. Leaving
//! is ordered: the ranks wait until all they posted has left and arrived, meet at a barrier, and then close; a rank that closes earlier
//! fails its peers' later puts.
//!
//! Kernels wait for what the threads here do, so none of them makes a driver call between connecting and closing
//! ([`NoDriverCalls`](crate::driver::NoDriverCalls)): shm and tcp move bytes between page-locked host memories, verbs has the card do it.

mod greeting;
mod mapped;
mod presence;
mod proxy;
mod shaping;
mod shm;
mod tcp;
#[cfg(test)]
mod tests;
#[cfg(feature = "rdma")]
pub mod verbs;
#[cfg(not(feature = "rdma"))]
#[path = "no_verbs.rs"]
mod verbs;
mod verbs_options;

use std::fmt::Debug;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[doc(hidden)]
pub use proxy::{Proxies, Proxy, PutTrace, QueueStats};
#[doc(hidden)]
pub use shaping::{Shaped, Shaping};
pub use verbs_options::VerbsOptions;

use crate::driver::{Device, Memory, MemoryKind};
use crate::error::{Error, Result};
use crate::group::ProcessGroup;

/// How often a wait looks whether it was interrupted.
const LOOK: Duration = Duration::from_millis(20);

/// The end of a wait that starts now.
fn deadline(timeout: Duration) -> Instant {
    // Longer than any process lives; an `Instant` cannot be arbitrarily late.
    const LONGEST: Duration = Duration::from_secs(1 << 30);
    Instant::now() + timeout.min(LONGEST)
}

/// Bytes from the own wire memory to a peer's, and the counter behind them. Offsets are in bytes from the start of wire memory.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
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

impl Put {
    /// Refuses what reaches beyond wire memory of `memory` bytes, at either end. Every queue asks before it touches memory.
    pub(crate) fn check(&self, memory: u64) -> Result<(), String> {
        let outside = |at: u64, bytes: u64| at.checked_add(bytes).is_none_or(|end| end > memory);
        let rule = if self.bytes > 0 && outside(self.from, self.bytes) {
            "from + bytes"
        } else if self.bytes > 0 && outside(self.to, self.bytes) {
            "to + bytes"
        } else if outside(self.counter, 8) {
            "counter + 8"
        } else if !self.counter.is_multiple_of(8) {
            return Err(format!("{self:?}: counter must be a multiple of 8"));
        } else {
            return Ok(());
        };
        Err(format!("{self:?}: {rule} must be within the {memory} bytes of wire memory"))
    }
}

/// An ordered queue to one peer. One thread uses it.
#[doc(hidden)]
pub trait Queue: Send + Debug {
    /// Starts the puts, in order, as one batch. May wait for the network, not longer than the queue's timeout.
    ///
    /// # Errors
    /// The peer said goodbye, died, or cannot be reached, or a put reaches beyond wire memory; the queue is of no use from
    /// then on.
    fn put_with_counter(&mut self, puts: &[Put]) -> Result<()>;

    /// How many puts, of all posted so far, have left: the memory that their bytes came from may be written again. Does not
    /// wait.
    fn completed(&mut self) -> Result<u64>;

    /// Waits until all puts have left.
    fn quiet(&mut self, timeout: Duration) -> Result<()>;

    /// Says goodbye: nothing is put after it. A queue that is dropped without it looks to the peer like one whose rank died.
    fn close(&mut self);

    /// Ends the waits of the thread that uses the queue. A queue that waits looks at it every few milliseconds; one that
    /// never does can do with this default.
    fn interrupt(&self) -> Interrupt {
        Interrupt::default()
    }
}

/// Ends the waits of a queue, from any thread; clones are the same. The queue is of no use afterwards.
#[doc(hidden)]
#[derive(Debug, Clone, Default)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Ends the current wait and all later ones.
    pub fn raise(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether it was raised.
    pub fn is_raised(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// What carries the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TransportKind {
    /// [`TransportKind::Direct`] to the peers whose wire memory can be mapped, [`TransportKind::Tcp`] to the others.
    Auto,
    /// Kernels write into the peers' wire memory, which is mapped: the ranks are on one host, or in one NVLink domain whose driver has
    /// fabric handles. There are no queues and no threads.
    Direct,
    /// Shared host memory: the ranks are on one host and play several nodes.
    Shm,
    /// TCP connections between page-locked host memories, over any network.
    Tcp,
    /// RDMA writes by ibverbs, over InfiniBand or RoCE. [`Error::Unavailable`] without the feature `rdma`, or without a device.
    Verbs,
}

impl TransportKind {
    /// All of them.
    pub const ALL: [TransportKind; 5] = [
        TransportKind::Auto,
        TransportKind::Direct,
        TransportKind::Shm,
        TransportKind::Tcp,
        TransportKind::Verbs,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            TransportKind::Auto => "auto",
            TransportKind::Direct => "direct",
            TransportKind::Shm => "shm",
            TransportKind::Tcp => "tcp",
            TransportKind::Verbs => "verbs",
        }
    }
}

impl std::fmt::Display for TransportKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for TransportKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<TransportKind> {
        TransportKind::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| {
            let rule = "give auto, direct (mapped memory), shm (ranks of one host), tcp or verbs (RDMA)";
            Error::argument("transport", text, rule)
        })
    }
}

/// How ranks are connected.
#[derive(Debug, Clone)]
pub struct TransportOptions {
    /// What carries the bytes; the same on every rank.
    pub kind: TransportKind,
    /// Queues to each peer that has any, 1 to [`MAX_QUEUES`]; the same on every rank. A queue has a thread of its own at the sending
    /// end, and with [`TransportKind::Tcp`] a connection and a thread at the receiving end.
    pub queues_per_peer: u32,
    /// Makes the queues of this rank worse than they are, for tests. Nothing to what kernels write themselves.
    #[doc(hidden)]
    pub shaping: Option<Shaping>,
    /// How long a put waits for the network.
    pub timeout: Duration,
    /// The host that this rank is on: ranks of differing ones do not share memory by descriptors. `None`: what the system says. A test
    /// plays several hosts with it.
    pub host: Option<String>,
    /// Of [`TransportKind::Verbs`]: which devices, and how. `None`: what the environment says ([`VerbsOptions::from_env`]).
    pub verbs: Option<VerbsOptions>,
}

/// Most queues to a peer.
pub const MAX_QUEUES: u32 = 64;

impl TransportOptions {
    /// Not shaped, 30 s, and as many queues as a fast network takes: eight where a processor moves the bytes, one where a card does.
    pub fn new(kind: TransportKind) -> TransportOptions {
        let queues_per_peer = match kind {
            TransportKind::Shm | TransportKind::Tcp | TransportKind::Auto => 8,
            TransportKind::Direct | TransportKind::Verbs => 1,
        };
        TransportOptions {
            kind,
            queues_per_peer,
            shaping: None,
            timeout: Duration::from_secs(30),
            host: None,
            verbs: None,
        }
    }
}

/// A queue, and where it leads.
#[doc(hidden)]
#[derive(Debug)]
pub struct Link {
    /// The rank at the other end.
    pub peer: u32,
    /// Its index among the queues to this peer.
    pub index: u32,
    /// The queue.
    pub queue: Box<dyn Queue>,
}

/// The side of a transport where the peers' puts come in. Dropping it without [`Receiving::close`] looks like a death.
pub(crate) trait Receiving: Send + Sync + Debug {
    /// The first thing that went wrong.
    fn failure(&self) -> Option<Error>;

    /// Tells the peers that nothing is taken any more, and ends all threads.
    fn close(&mut self);
}

/// A peer whose wire memory is mapped here.
#[derive(Debug)]
pub(crate) struct MappedPeer {
    peer: u32,
    memory: Arc<Memory>,
}

/// All queues of a rank, the peers it needs none for, and what receives from its peers. Closed on drop.
#[doc(hidden)]
#[derive(Debug)]
pub struct Links {
    /// In ascending order of (queue, peer).
    links: Vec<Link>,
    mapped: Vec<MappedPeer>,
    receiving: Vec<Box<dyn Receiving>>,
}

impl Links {
    /// The queues, in ascending order of (queue, peer).
    pub fn queues(&mut self) -> &mut [Link] {
        &mut self.links
    }

    /// The wire memory of a peer that is mapped here.
    pub fn mapped(&self, peer: u32) -> Option<&Arc<Memory>> {
        self.mapped.iter().find(|mapped| mapped.peer == peer).map(|mapped| &mapped.memory)
    }

    /// What went wrong on the receiving side: a peer that died without a goodbye, or one that sent what is refused.
    pub fn failure(&self) -> Option<Error> {
        self.receiving.iter().find_map(|side| side.failure())
    }

    /// Says goodbye to all peers and ends every thread. What peers put from now on fails there. Memory that is mapped stays so until
    /// this is dropped.
    pub fn close(&mut self) {
        for mut link in self.links.drain(..) {
            link.queue.close();
        }
        self.receiving.iter_mut().for_each(|side| side.close());
    }

    fn extend(&mut self, mut more: Links) {
        self.links.append(&mut more.links);
        self.mapped.append(&mut more.mapped);
        self.receiving.append(&mut more.receiving);
    }

    fn take(&mut self) -> Vec<Link> {
        std::mem::take(&mut self.links)
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        self.close();
    }
}

/// The way to a peer.
#[doc(hidden)]
#[derive(Debug)]
pub struct Way {
    /// The rank at the other end.
    pub peer: u32,
    /// This rank's wire memory that the peer writes to.
    pub memory: Arc<Memory>,
    /// The peer's wire memory, if kernels here write to it themselves; else there are queues to the peer.
    pub mapped: Option<Arc<Memory>>,
}

/// Allocates wire memory of `bytes` and finds a way to each of `peers`, as [`connect`] says. Ways are in the order of `peers`.
/// Collective over the group.
///
/// # Errors
/// As [`wire_memory`] and [`connect`].
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

/// Allocates wire memory where the transport reaches it; its contents are zero, which is where counters begin. Collective over
/// the group.
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

/// Connects this rank to `peers`, the ranks of the group that it exchanges bytes with: ascending, without itself, and each
/// lists this one. `memory` is this rank's [`wire_memory`], of the same size on every rank; it is kept until the links are
/// closed. With [`TransportKind::Auto`] there are links to the peers that can be mapped alone. Collective over the group; `timeout`
/// bounds the waits for peers, beside the group's own.
///
/// # Errors
/// On every rank, where the ranks' options, sizes or versions differ or one of them cannot take part, and with
/// [`TransportKind::Direct`] where one cannot map another's memory.
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
            let queue = Box::new(Shaped::new(queue, shaping, setup.place(peer), index));
            Link { peer, index, queue }
        };
        links.links = links.take().into_iter().map(shape).collect();
    }
    Ok(links)
}

/// What [`connect`] was given.
struct Setup<'a> {
    options: &'a TransportOptions,
    memory: &'a Arc<Memory>,
    group: &'a dyn ProcessGroup,
    peers: &'a [u32],
    timeout: Duration,
}

impl Setup<'_> {
    fn place(&self, peer: u32) -> Place {
        Place { transport: self.options.kind.name(), rank: self.group.rank(), peer }
    }

    /// (queue, peer) of every link, ascending.
    fn pairs(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        (0..self.options.queues_per_peer).flat_map(|queue| self.peers.iter().map(move |peer| (queue, *peer)))
    }
}

/// The two ends of a link, for errors.
#[derive(Debug, Clone, Copy)]
struct Place {
    transport: &'static str,
    rank: u32,
    peer: u32,
}

impl Place {
    fn error(&self, operation: &'static str, reason: impl Into<String>) -> Error {
        let Place { transport, rank, peer } = *self;
        Error::Transport { transport, rank, peer, operation, reason: reason.into() }
    }
}

/// Wire memory as the host has it: what shm and tcp move bytes from and to.
#[derive(Debug, Clone)]
struct WireHost {
    base: *mut u8,
    memory: Arc<Memory>,
}

// SAFETY: an address range without thread affinity, which `memory` keeps; what is in it is reached through raw pointers and atomics.
unsafe impl Send for WireHost {}
// SAFETY: as above; `&WireHost` gives out addresses only.
unsafe impl Sync for WireHost {}

impl WireHost {
    /// The host's side of a rank's wire memory.
    fn of(setup: &Setup<'_>) -> Result<WireHost> {
        let base = setup.memory.host_ptr();
        if base.is_null() {
            let rule =
                format!("{} needs host memory; allocate it with transport::wire_memory", setup.options.kind);
            return Err(Error::argument("memory", format!("{:#x}", setup.memory.ptr().0), rule));
        }
        Ok(WireHost { base, memory: setup.memory.clone() })
    }

    fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    /// The address of the byte at `offset`, which must lie in the memory where it is used.
    fn at(&self, offset: u64) -> *mut u8 {
        self.base.wrapping_add(offset as usize)
    }
}

/// Stores a counter in wire memory.
///
/// # Safety
/// `base` is the first byte of live memory in which `counter` lies with its 8 bytes; it is aligned.
unsafe fn store_counter(base: *mut u8, counter: u64, value: u64) {
    // SAFETY: passed on to the caller; whoever else reads the word does so with an atomic load.
    unsafe { AtomicU64::from_ptr(base.add(counter as usize).cast()) }.store(value, Ordering::Release);
}
