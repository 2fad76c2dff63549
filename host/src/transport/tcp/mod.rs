//! Puts over TCP: every queue has its own connections to the peer, with a receiving thread for
//! each. Both ends are page-locked host memory, from and to which the sockets copy.
//!
//! Copying limits a connection: one thread sends and one receives. So a large put is divided among
//! the connections of its queue, and the receiving end stores its counter when all parts have
//! arrived. Threads of the first queue poll their sockets before they block, where the host has
//! processors enough: waking a thread takes longer than sending a token.

mod acceptor;
mod frame;
mod receiver;
mod sender;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use rustix::event::{PollFd, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};
use rustix::thread::{CpuSet, sched_getaffinity};

use self::acceptor::{Acceptor, Place, dial};
pub use self::acceptor::{fuzz_tcp_hello, sample_tcp_hello};
pub use self::frame::{fuzz_tcp_frames, sample_tcp_frames};
use self::receiver::Receivers;
use self::sender::TcpQueue;
use super::greeting;
use super::links::{Links, PeerQueue};
use super::options::MAX_CONNECTIONS;
use super::setup::{Setup, WireHost, deadline};
use crate::error::{Error, Result};
use crate::group::internal::host_id;

/// Connections of a queue by default, if the host has processors for them.
const CONNECTIONS: u32 = 4;
/// How long a thread polls without a pause, and until when it polls and gives way to others. Calls
/// of a model that generates are less than that apart.
const SPIN: Duration = Duration::from_millis(1);
const GIVE_WAY: Duration = Duration::from_millis(5);

/// The entry of a rank in the greeting.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Offer {
    /// The rank's address.
    address: String,
    /// The connections of a queue that its options name.
    connections: Option<u32>,
    /// The same for ranks that may share processors.
    host: String,
    /// A bit for each processor that the rank is bound to; all where that is unknown.
    mask: Vec<u64>,
    /// Processors of its host that it may use; 1 with a virtual GPU, whose threads use them too.
    processors: u32,
    /// Descriptors that its process may still open, and those that it may have at all.
    descriptors: (u64, u64),
    /// The same for ranks that are threads of one process.
    process: u64,
}

impl Offer {
    fn new(setup: &Setup<'_>) -> Offer {
        let is_virtual = setup.memory.device().info().is_virtual;
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get() as u32);
        Offer {
            address: String::new(),
            connections: setup.options.connections_per_queue,
            host: setup.options.hooks.host.clone().unwrap_or_else(host_id),
            mask: affinity(),
            processors: if is_virtual { 1 } else { processors },
            descriptors: descriptors(),
            process: process(),
        }
    }

    /// Whether both ranks may run on one processor.
    fn shares_processors(&self, other: &Offer) -> bool {
        self.host == other.host && self.mask.iter().zip(&other.mask).any(|(ours, theirs)| ours & theirs != 0)
    }
}

/// The processors that this thread and those that it starts may run on, a bit each.
fn affinity() -> Vec<u64> {
    let set = sched_getaffinity(None).ok();
    let bit = |cpu| u64::from(set.is_none_or(|set| set.is_set(cpu))) << (cpu % 64);
    let word = |first| (first..first + 64).map(bit).sum();
    (0..CpuSet::MAX_CPU).step_by(64).map(word).collect()
}

/// A random number of this process. Numbers of the system are those of a container.
fn process() -> u64 {
    static NUMBER: OnceLock<u64> = OnceLock::new();
    *NUMBER.get_or_init(|| RandomState::new().hash_one(std::process::id()))
}

/// Descriptors that this process may still open, and those that it may have at all (`ulimit -n`).
fn descriptors() -> (u64, u64) {
    let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let open = match std::fs::read_dir("/proc/self/fd") {
        // One of them reads the folder.
        Ok(entries) => (entries.count() as u64).saturating_sub(1),
        Err(error) if is_out_of_descriptors(&error) => most,
        // Without /proc, connecting shows it.
        Err(_) => 0,
    };
    (most.saturating_sub(open), most)
}

fn is_out_of_descriptors(error: &std::io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::MFILE | Errno::NFILE))
}

/// The remedy where descriptors are lacking.
const MORE_DESCRIPTORS: &str = "raise the limit on open files (ulimit -n; of the system, fs.file-max), or lower \
                                queues_per_peer or connections_per_queue";

/// An error, the same on every rank, where the connections of one take more descriptors than its
/// process may open.
fn check_descriptors(
    setup: &Setup<'_>,
    offers: &[Offer],
    all: &[greeting::Greeting],
    connections: u32,
) -> Result<()> {
    let of_each_peer = u64::from(setup.options.queues_per_peer) * u64::from(connections);
    for (rank, offer) in (0u32..).zip(offers) {
        let of_process = offers.iter().zip(all).filter(|(other, _)| other.process == offer.process);
        // A socket for each connection to a peer, and one for each from it.
        let needs =
            of_process.map(|(_, greeting)| 2 * of_each_peer * greeting.peers.len() as u64).sum::<u64>();
        let (free, most) = offer.descriptors;
        if needs <= free {
            continue;
        }
        let reason = |rank: &str| {
            format!(
                "the process of {rank} needs {needs} more descriptors for connections and may open {free}, of \
                 {most} in all; {MORE_DESCRIPTORS}"
            )
        };
        return Err(match rank == setup.group.rank() {
            true => Error::os("connect", reason("this rank")),
            false => setup.ends(rank).error("connect", reason(&format!("rank {rank}"))),
        });
    }
    Ok(())
}

/// How many connections and threads the ranks have; the same on all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Plan {
    /// Connections of a queue.
    connections: u32,
    /// Whether threads of the first queue poll.
    polls: bool,
}

impl Plan {
    /// `peers`: most peers of a rank.
    fn new(offers: &[Offer], queues: u32, peers: u32) -> Plan {
        let share = |offer: &Offer| {
            let sharing = offers.iter().filter(|other| offer.shares_processors(other)).count() as u32;
            offer.processors / sharing.max(1)
        };
        let processors = offers.iter().map(share).min().unwrap_or_default();
        // A connection has a thread at either end, and a rank both kinds. Half of its processors
        // are for them, so that all of them may poll.
        let threads = 2 * queues.saturating_mul(peers).max(1);
        let chosen = (processors / 2 / threads).clamp(1, CONNECTIONS);
        let connections = offers.first().and_then(|offer| offer.connections).unwrap_or(chosen);
        Plan { connections, polls: threads.saturating_mul(connections) <= processors / 2 }
    }

    /// The patience of a queue's threads. Further queues carry rows alone.
    fn patience(self, setup: &Setup<'_>, queue: u32) -> Patience {
        Patience { polls: queue == 0 && setup.options.hooks.polls.unwrap_or(self.polls) }
    }
}

/// How long a thread polls before it blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Patience {
    polls: bool,
}

impl Patience {
    /// Flags of a receive: a thread that polls does not block at first, any other blocks for all
    /// bytes.
    fn flags(self) -> libc::c_int {
        if self.polls { libc::MSG_DONTWAIT } else { libc::MSG_WAITALL }
    }

    /// Pauses for a moment and returns true, unless the thread is to block after so long a time
    /// without anything to do.
    fn polls_on(self, since: Instant) -> bool {
        let elapsed = if self.polls { since.elapsed() } else { GIVE_WAY };
        if elapsed < SPIN {
            for _ in 0..16 {
                std::hint::spin_loop();
            }
        } else if elapsed < GIVE_WAY {
            std::thread::yield_now();
        }
        elapsed < GIVE_WAY
    }
}

pub(super) fn connect(setup: &Setup<'_>) -> Result<Links> {
    let offer = Offer::new(setup);
    let acceptor = greeting::check_arguments(setup)
        .and_then(|()| check_connections(offer.connections))
        .and_then(|()| WireHost::of(setup))
        .and_then(|_| Acceptor::open(setup, offer.connections.unwrap_or(CONNECTIONS)));
    let text = acceptor.as_ref().map_err(Error::clone).and_then(|acceptor| {
        let offer = Offer { address: acceptor.address(), ..offer.clone() };
        serde_json::to_string(&offer).map_err(|error| Error::internal("serialise", error))
    });
    let all = greeting::meet(setup, text)?;
    let mut acceptor = acceptor?;
    let made = make_links(setup, &mut acceptor, &offer, &all);
    let (links, receivers) = greeting::agree(setup.group, setup.options.kind, made)?;
    Ok(Links { links, mapped: Vec::new(), receiving: vec![Box::new(receivers)] })
}

fn check_connections(connections: Option<u32>) -> Result<()> {
    match connections {
        Some(count) if count == 0 || count > MAX_CONNECTIONS => {
            Err(Error::argument("connections_per_queue", count, format!("give 1 to {MAX_CONNECTIONS}")))
        }
        _ => Ok(()),
    }
}

/// The entries of all ranks, by rank.
fn offers(setup: &Setup<'_>, own: &Offer, all: &[greeting::Greeting]) -> Result<Vec<Offer>> {
    let offers: Vec<Offer> = greeting::offers(setup, all)?;
    for (peer, theirs) in (0..).zip(&offers) {
        let name = |count: Option<u32>| count.map_or("unset".to_owned(), |count| count.to_string());
        let what = "connections_per_queue";
        greeting::same(setup, peer, what, name(own.connections), name(theirs.connections))?;
    }
    Ok(offers)
}

fn make_links(
    setup: &Setup<'_>,
    acceptor: &mut Acceptor,
    own: &Offer,
    all: &[greeting::Greeting],
) -> Result<(Vec<PeerQueue>, Receivers)> {
    let offers = offers(setup, own, all)?;
    let peers = all.iter().map(|greeting| greeting.peers.len() as u32).max().unwrap_or_default();
    let plan = Plan::new(&offers, setup.options.queues_per_peer, peers);
    check_descriptors(setup, &offers, all, plan.connections)?;
    let deadline = deadline(setup.timeout);
    // Connect and accept, then wait for answers: two ranks must not wait for each other.
    let expected: Vec<Place> = Place::all(setup, plan.connections).collect();
    let mut outgoing = Vec::new();
    for &place in &expected {
        let address = offers.get(place.peer as usize).map_or("", |offer| &offer.address);
        outgoing.push((place, dial(acceptor, setup, address, &expected, place, deadline)?));
    }
    let incoming = acceptor.accept(setup, plan.connections, deadline)?;
    let mut sockets: BTreeMap<(u32, u32), Vec<_>> = BTreeMap::new();
    for (Place { queue, peer, .. }, dialed) in outgoing {
        let answered = dialed.answered(deadline);
        let answered = answered.map_err(|reason| setup.ends(peer).error("connect", reason))?;
        sockets.entry((queue, peer)).or_default().push(answered);
    }
    let mut links = Vec::new();
    for ((index, peer), sockets) in sockets {
        let queue = TcpQueue::new(setup, setup.ends(peer), sockets, plan.patience(setup, index))?;
        links.push(PeerQueue { peer, index, queue: Box::new(queue) });
    }
    Ok((links, Receivers::start(setup, incoming, |queue| plan.patience(setup, queue))?))
}

/// The time until a deadline, at least 1 ms.
fn left(deadline: Instant) -> Duration {
    // Zero would mean for ever.
    deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}

/// Waits for one of the sockets, or until the time is over.
fn wait_for(polled: &mut [PollFd<'_>], timeout: Duration) -> Result<(), Errno> {
    let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: i64::from(timeout.subsec_nanos()) };
    match poll(polled, Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error),
    }
}
