//! Puts without a kernel: host code posts requests to the proxies' rings, as kernels do, and waits
//! for the peers' puts. The time is that of a kernel's put: ring, proxy, queue and network. Puts to
//! peers whose memory is mapped are copies on a stream.

use std::collections::VecDeque;
use std::mem::offset_of;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use epoxide::driver::{Device, DevicePtr, Event, Memory, MemoryKind, Stream};
use epoxide::group::ProcessGroup;
use epoxide::internal::Topology;
use epoxide::internal::transport::{Proxies, Put, Way, Writer, open};
use epoxide::transport::TransportOptions;
use epoxide::{Error, Result};
use epoxide_gpu::layout::{PutRequest, QueueWords, RING_ENTRIES};

/// A rank's queues to the ranks with its index on other nodes, and memory to put from and to.
///
/// Wire memory holds, in this order: a word for each (source rank, queue) with the number of the
/// last complete round; as many words for the counters of other puts; the region that puts read;
/// and one region for each node that they write.
pub struct Poster<'a> {
    // The proxies go first: they use the rest.
    proxies: Proxies,
    lanes: Vec<Lane>,
    ways: Vec<Way>,
    stream: Stream,
    group: &'a dyn ProcessGroup,
    topology: Topology,
    queues: u32,
    timeout: Duration,
    /// Source and destination bytes of puts to a peer; larger totals overwrite them.
    region: u64,
    /// Rounds so far, the same on every rank.
    round: u64,
}

/// A queue to a peer.
struct Lane {
    node: u32,
    peer: u32,
    queue: u32,
    posted: u64,
    carrier: Carrier,
}

/// Carrier of a lane's puts.
enum Carrier {
    /// A proxy: the address of its [`QueueWords`] and ring.
    Ring(u64),
    /// A stream, into memory that is mapped here.
    Copies(Copies),
}

impl Lane {
    /// Requests whose bytes have not left.
    fn in_flight(&mut self) -> Result<u64> {
        match &mut self.carrier {
            Carrier::Ring(ring) => {
                let completed = word(*ring, offset_of!(QueueWords, completed));
                Ok(self.posted - completed.load(Ordering::Acquire))
            }
            Carrier::Copies(copies) => copies.in_flight(),
        }
    }

    /// Posts a request; fewer than [`RING_ENTRIES`] are in flight, so that its entry is free.
    fn post(&mut self, put: Put) -> Result<()> {
        let slot = self.posted % RING_ENTRIES;
        self.posted += 1;
        let ring = match &mut self.carrier {
            Carrier::Ring(ring) => *ring,
            Carrier::Copies(copies) => return copies.post(slot, put),
        };
        let entry = size_of::<QueueWords>() + slot as usize * size_of::<PutRequest>();
        for (field, value) in [
            (offset_of!(PutRequest, from), put.from),
            (offset_of!(PutRequest, to), put.to),
            (offset_of!(PutRequest, bytes), put.bytes),
            (offset_of!(PutRequest, counter), put.counter),
            (offset_of!(PutRequest, value), put.value),
        ] {
            word(ring, entry + field).store(value, Ordering::Relaxed);
        }
        word(ring, entry + offset_of!(PutRequest, ticket)).store(self.posted, Ordering::Release);
        Ok(())
    }
}

/// A word of a queue's memory.
fn word<'a>(ring: u64, offset: usize) -> &'a AtomicU64 {
    // SAFETY: mapped host memory, with the same address for the device and the host. The poster's
    // proxies keep it for as long as its lanes are used. Offsets are of 8-byte words in it. The
    // proxy accesses them atomically.
    unsafe { AtomicU64::from_ptr((ring as *mut u64).byte_add(offset)) }
}

/// Puts as copies on a stream, each counter behind its bytes.
struct Copies {
    // First, so that the stream has finished before memory is freed.
    stream: Stream,
    /// The events of the copies that may not be over, in order.
    events: VecDeque<Event>,
    /// The counters' values, u64 `[RING_ENTRIES]`, which the stream copies from.
    values: Memory,
    source: Arc<Memory>,
    target: Arc<Memory>,
}

impl Copies {
    fn new(source: &Arc<Memory>, target: &Arc<Memory>) -> Result<Copies> {
        let device = source.device();
        Ok(Copies {
            stream: Stream::high_priority(device)?,
            events: VecDeque::new(),
            values: Memory::alloc(device, RING_ENTRIES * 8, MemoryKind::MappedHost, "counters")?,
            source: source.clone(),
            target: target.clone(),
        })
    }

    fn in_flight(&mut self) -> Result<u64> {
        while let Some(event) = self.events.front() {
            if !event.is_done()? {
                break;
            }
            self.events.pop_front();
        }
        Ok(self.events.len() as u64)
    }

    /// `slot` is not in flight.
    fn post(&mut self, slot: u64, put: Put) -> Result<()> {
        let at = |memory: &Memory, offset: u64| DevicePtr(memory.ptr().0 + offset);
        // SAFETY: the poster's puts lie within the regions of wire memory, which has the same size
        // on both sides. The memories live until the stream has finished, and the slot's value is
        // not being copied.
        unsafe {
            self.values.host_ptr().cast::<u64>().add(slot as usize).write_volatile(put.value);
            if put.bytes > 0 {
                self.stream.copy(at(&self.target, put.to), at(&self.source, put.from), put.bytes)?;
            }
            self.stream.copy(at(&self.target, put.counter), at(&self.values, slot * 8), 8)?;
        }
        let event = Event::new(self.stream.device())?;
        event.record(&self.stream)?;
        self.events.push_back(event);
        Ok(())
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        // A device that faulted runs no copies any more.
        let _ = self.stream.synchronize();
    }
}

impl<'a> Poster<'a> {
    /// Most requests in flight on a queue.
    pub const DEEPEST: u64 = RING_ENTRIES;
    /// Most bytes of a region.
    pub const LARGEST: u64 = 32 << 20;

    /// Connects; puts to a peer go over `region` bytes, the same number on every rank. Collective.
    pub fn new(
        device: &Device,
        group: &'a dyn ProcessGroup,
        topology: Topology,
        options: &TransportOptions,
        region: u64,
    ) -> Result<Poster<'a>> {
        let (rank, queues) = (group.rank(), options.queues_per_peer);
        let (node, index) = (rank / topology.ranks_per_node, rank % topology.ranks_per_node);
        let stream = Stream::new(device)?;
        let region = region.clamp(1, Self::LARGEST).next_multiple_of(128);
        let words = 2 * u64::from(topology.ranks()) * u64::from(queues) * 8;
        let bytes = words.next_multiple_of(128) + (1 + u64::from(topology.nodes)) * region;
        let rail = |node: u32| node * topology.ranks_per_node + index;
        let peers: Vec<u32> = (0..topology.nodes).filter(|other| *other != node).map(rail).collect();
        let timeout = group.timeout();
        let (ways, links) = open(options, device, group, bytes, &peers, timeout, Writer::Proxies)?;
        let proxies = Proxies::start(device, links)?;
        let mut lanes = Vec::new();
        for queue in 0..queues {
            for way in &ways {
                let carrier = match (&way.mapped, proxies.handle(queue, way.peer)) {
                    (Some(target), _) => Carrier::Copies(Copies::new(&way.memory, target)?),
                    (None, Some(ring)) => Carrier::Ring(ring.0),
                    (None, None) => continue,
                };
                let node = way.peer / topology.ranks_per_node;
                lanes.push(Lane { node, peer: way.peer, queue, posted: 0, carrier });
            }
        }
        let timeout = options.timeout;
        Ok(Poster { proxies, lanes, ways, stream, group, topology, queues, timeout, region, round: 0 })
    }

    /// Puts `bytes[n]` bytes to node n, `repeat` times over, in puts of `message` bytes spread over
    /// the queues. At most `depth` are in flight on each; all ranks put at once.
    pub fn put_all(&mut self, bytes: &[u64], message: u64, depth: u64, repeat: u32) -> Result<Duration> {
        let message = message.clamp(1, self.region);
        let (depth, slots) = (depth.clamp(1, Self::DEEPEST), self.region / message);
        let scratch = u64::from(self.topology.ranks() * self.queues) * 8;
        // By node: bytes that are still to be posted, of this copy and how many copies.
        let mut left: Vec<(u64, u32)> = bytes.iter().map(|bytes| (*bytes, repeat)).collect();
        let (own, out, into) = (self.own_word(0), self.region(0), self.region(1 + self.node()));
        self.group.barrier(self.group.timeout())?;
        let start = Instant::now();
        let mut waits = Wait::new();
        loop {
            let (mut open, mut posted) = (None, false);
            for (number, lane) in self.lanes.iter_mut().enumerate() {
                let node = lane.node as usize;
                let (rest, copies) = left[node];
                if copies == 0 || bytes[node] == 0 {
                    continue;
                }
                open = open.or(Some(number));
                if lane.in_flight()? >= depth {
                    continue;
                }
                let at = bytes[node] - rest;
                let place = at / message % slots * message;
                let size = rest.min(message);
                let counter = own + scratch + u64::from(lane.queue) * 8;
                let value = lane.posted + 1;
                lane.post(Put { from: out + place, to: into + place, bytes: size, counter, value })?;
                left[node] = if rest == size { (bytes[node], copies - 1) } else { (rest - size, copies) };
                posted = true;
            }
            let Some(open) = open else { break };
            if posted {
                waits = Wait::new();
            } else {
                // No lane with puts to post has room.
                self.pause(&mut waits, open)?;
            }
        }
        self.round += 1;
        for lane in 0..self.lanes.len() {
            self.tell(lane, 0)?;
        }
        for lane in 0..self.lanes.len() {
            self.wait_for_round(lane)?;
            self.quiet(lane, 0)?;
        }
        Ok(start.elapsed())
    }

    /// Half the round-trip time of a put of `message` bytes, in microseconds, measured `rounds`
    /// times between the two nodes of a pair (0 and 1, 2 and 3, ..). Empty on ranks that answer or
    /// have no partner. Collective.
    pub fn ping_pong(&mut self, message: u64, rounds: u32) -> Result<Vec<f64>> {
        self.group.barrier(self.group.timeout())?;
        let partner = self.node() ^ 1;
        let lane = self.lanes.iter().position(|lane| lane.node == partner && lane.queue == 0);
        let mut times = Vec::new();
        for _ in 0..rounds {
            self.round += 1;
            let Some(lane) = lane else { continue };
            if self.node() < partner {
                let start = Instant::now();
                self.tell(lane, message)?;
                self.wait_for_round(lane)?;
                times.push(start.elapsed().as_secs_f64() * 1e6 / 2.0);
            } else {
                self.wait_for_round(lane)?;
                self.tell(lane, message)?;
            }
        }
        Ok(times)
    }

    /// Ends all queues once every rank is done. Collective.
    pub fn close(mut self) -> Result<()> {
        for lane in 0..self.lanes.len() {
            self.quiet(lane, 0)?;
        }
        self.group.barrier(self.group.timeout())
    }

    /// Puts `bytes` and, behind them, the number of this round.
    fn tell(&mut self, lane: usize, bytes: u64) -> Result<()> {
        self.quiet(lane, Self::DEEPEST - 1)?;
        let (from, to) = (self.region(0), self.region(1 + self.node()));
        let counter = self.own_word(self.lanes[lane].queue);
        let put = Put { from, to, bytes, counter, value: self.round };
        self.lanes[lane].post(put)
    }

    /// Waits until a lane's peer has put this round's number.
    fn wait_for_round(&self, lane: usize) -> Result<()> {
        let Lane { peer, queue, .. } = self.lanes[lane];
        let Some(way) = self.ways.iter().find(|way| way.peer == peer) else { return Ok(()) };
        let offset = u64::from(peer * self.queues + queue) * 8;
        let base = match (way.memory.host_ptr().is_null(), way.memory.device().info().is_virtual) {
            (false, _) => Some(way.memory.host_ptr()),
            // Its device memory is this process's.
            (true, true) => Some(way.memory.ptr().0 as *mut u8),
            (true, false) => None,
        };
        let mut wait = Wait::new();
        loop {
            let seen = if let Some(base) = base {
                // SAFETY: the word lies in wire memory, which the way keeps, and is only accessed
                // atomically.
                unsafe { AtomicU64::from_ptr(base.add(offset as usize).cast()) }.load(Ordering::Acquire)
            } else {
                let mut word = [0; 8];
                // SAFETY: the word lies in wire memory of this rank's own, which the way keeps.
                unsafe { self.stream.read(&mut word, way.memory.ptr().add(offset))? };
                u64::from_le_bytes(word)
            };
            if seen >= self.round {
                return Ok(());
            }
            self.pause(&mut wait, lane)?;
        }
    }

    /// Waits until at most `most` requests of a lane have not left.
    fn quiet(&mut self, lane: usize, most: u64) -> Result<()> {
        let mut wait = Wait::new();
        while self.lanes[lane].in_flight()? > most {
            self.pause(&mut wait, lane)?;
        }
        Ok(())
    }

    /// Yields the processor, which proxies may need to move the bytes, for a small part of the wait
    /// so far. An error if a queue has failed or the wait for the peer of `lane` takes too long.
    fn pause(&self, wait: &mut Wait, lane: usize) -> Result<()> {
        match wait.since.elapsed() / 32 {
            short if short < Duration::from_micros(30) => std::thread::yield_now(),
            part => std::thread::sleep(part.min(Duration::from_millis(1))),
        }
        wait.turns += 1;
        if !wait.turns.is_multiple_of(256) {
            return Ok(());
        }
        if let Some(failure) = self.proxies.failure() {
            return Err(failure);
        }
        if wait.since.elapsed() < self.timeout {
            return Ok(());
        }
        let rank = self.group.rank();
        let peer = self.lanes.get(lane).map_or(rank, |lane| lane.peer);
        Err(Error::PeerTimeout {
            rank,
            peer,
            operation: "put without a kernel",
            place: None,
            late_ranks: [peer].into(),
            word: "the puts",
            epoch: self.round,
            needed: self.round,
            seen: 0,
            waited: self.timeout,
            other_causes: "".into(),
        })
    }

    fn node(&self) -> u32 {
        self.group.rank() / self.topology.ranks_per_node
    }

    /// The offset of this rank's word for a queue at its peers.
    fn own_word(&self, queue: u32) -> u64 {
        u64::from(self.group.rank() * self.queues + queue) * 8
    }

    /// The offset of region `index`: 0 to put from, 1 + n for the puts of node n.
    fn region(&self, index: u32) -> u64 {
        let words = 2 * u64::from(self.topology.ranks() * self.queues) * 8;
        words.next_multiple_of(128) + u64::from(index) * self.region
    }
}

/// A wait under way.
struct Wait {
    since: Instant,
    turns: u32,
}

impl Wait {
    fn new() -> Wait {
        Wait { since: Instant::now(), turns: 0 }
    }
}

#[cfg(test)]
mod tests {
    use epoxide::group::run_threads;
    use epoxide::transport::TransportKind;

    use super::*;
    use crate::TIMEOUT;
    use crate::tests::open as open_device;

    #[test]
    fn a_wait_for_room_names_the_peer_whose_queue_is_full() {
        let topology = Topology { nodes: 3, ranks_per_node: 1 };
        let outcomes = run_threads(3, TIMEOUT, |rank, group| {
            let device = open_device(rank)?;
            let timeout = Duration::from_millis(100);
            let shm = TransportOptions::new(TransportKind::Shm);
            let options = TransportOptions { timeout, queues_per_peer: 1, ..shm };
            let mut poster = Poster::new(&device, &*group, topology, &options, 128)?;
            let mut late = None;
            if rank == 0 {
                // No proxy serves this ring.
                let bytes = size_of::<QueueWords>() + RING_ENTRIES as usize * size_of::<PutRequest>();
                let ring = Memory::alloc(&device, bytes as u64, MemoryKind::MappedHost, "a ring")?;
                let lane = poster.lanes.iter_mut().find(|lane| lane.peer == 2).unwrap();
                let served = std::mem::replace(&mut lane.carrier, Carrier::Ring(ring.host_ptr() as u64));
                let Err(Error::PeerTimeout { peer, .. }) = poster.put_all(&[0, 0, 256], 128, 1, 1) else {
                    panic!("nothing came to an end that cannot")
                };
                late = Some(peer);
                poster.lanes.iter_mut().find(|lane| lane.peer == 2).unwrap().carrier = served;
            } else {
                group.barrier(TIMEOUT)?;
            }
            group.barrier(TIMEOUT)?;
            Ok(late)
        });
        assert_eq!(outcomes.map_err(|failure| failure.error).unwrap(), [Some(2), None, None]);
    }
}
