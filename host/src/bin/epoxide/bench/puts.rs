//! Puts without a kernel: host code posts requests to the proxies' rings, as kernels do, and waits for what the peers put. What
//! it measures is what a kernel sees of the transport: ring, proxy, queue and network.

use std::mem::offset_of;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use epoxide::driver::{Device, Memory, Stream};
use epoxide::group::ProcessGroup;
use epoxide::transport::{Proxies, Put, TransportOptions, connect, wire_memory};
use epoxide::{Error, Result};
use epoxide_gpu::layout::{PutRequest, QueueWords, RING_ENTRIES};

use crate::options::World;

/// A rank's queues to the ranks with its index on other nodes, and memory to put from and to.
///
/// Wire memory: a word for each (source rank, queue) with the number of the round that has come in whole, as many words for the
/// counters of other puts, the region that puts come from, and one for each node that they go to.
pub struct Poster<'a> {
    // The proxies go first: they use the rest.
    proxies: Proxies,
    memory: Arc<Memory>,
    stream: Stream,
    group: &'a dyn ProcessGroup,
    world: World,
    queues: u32,
    timeout: Duration,
    /// Bytes that puts to a peer come from and go to; larger totals go over them again.
    region: u64,
    lanes: Vec<Lane>,
    /// Rounds so far, the same on every rank.
    round: u64,
}

/// A queue to a peer.
struct Lane {
    node: u32,
    peer: u32,
    queue: u32,
    /// The [`QueueWords`] and the ring.
    ring: u64,
    posted: u64,
}

impl Lane {
    fn word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: mapped host memory, which a device and the host reach by the same address, and which the proxies keep; offsets are
        // of 8-byte words in it. The proxy accesses them atomically.
        unsafe { AtomicU64::from_ptr((self.ring as *mut u64).byte_add(offset)) }
    }

    /// Requests whose bytes have not left.
    fn in_flight(&self) -> u64 {
        self.posted - self.word(offset_of!(QueueWords, completed)).load(Ordering::Acquire)
    }

    /// Posts a request; fewer than [`RING_ENTRIES`] are in flight, so that its entry is free.
    fn post(&mut self, put: Put) {
        self.posted += 1;
        let slot = ((self.posted - 1) % RING_ENTRIES) as usize;
        let entry = size_of::<QueueWords>() + slot * size_of::<PutRequest>();
        for (field, value) in [
            (offset_of!(PutRequest, from), put.from),
            (offset_of!(PutRequest, to), put.to),
            (offset_of!(PutRequest, bytes), put.bytes),
            (offset_of!(PutRequest, counter), put.counter),
            (offset_of!(PutRequest, value), put.value),
        ] {
            self.word(entry + field).store(value, Ordering::Relaxed);
        }
        self.word(entry + offset_of!(PutRequest, ticket)).store(self.posted, Ordering::Release);
    }
}

impl<'a> Poster<'a> {
    /// Most requests in flight on a queue.
    pub const DEEPEST: u64 = RING_ENTRIES;
    /// Most bytes of a region.
    pub const LARGEST: u64 = 32 << 20;

    /// Connects; puts to a peer go over `region` bytes, the same number on every rank. Collective.
    pub fn new(
        device: &Arc<dyn Device>,
        group: &'a dyn ProcessGroup,
        world: World,
        options: &TransportOptions,
        region: u64,
    ) -> Result<Poster<'a>> {
        let (rank, queues) = (group.rank(), options.queues_per_peer);
        let (node, index) = (rank / world.ranks_per_node, rank % world.ranks_per_node);
        let stream = Stream::new(device, false)?;
        let region = region.clamp(1, Self::LARGEST).next_multiple_of(128);
        let words = 2 * u64::from(world.ranks()) * u64::from(queues) * 8;
        let bytes = words.next_multiple_of(128) + (1 + u64::from(world.nodes)) * region;
        let memory = wire_memory(options, device, group, bytes)?;
        stream.write(memory.ptr(), &vec![0; words as usize])?;
        let rail = |node: u32| node * world.ranks_per_node + index;
        let peers: Vec<u32> = (0..world.nodes).filter(|other| *other != node).map(rail).collect();
        let links = connect(options, &memory, group, &peers, group.timeout())?;
        let proxies = Proxies::start(device, links)?;
        let lanes = proxies.all().iter().map(|proxy| Lane {
            node: proxy.peer() / world.ranks_per_node,
            peer: proxy.peer(),
            queue: proxy.queue(),
            ring: proxy.handle().0,
            posted: 0,
        });
        let lanes = lanes.collect();
        let timeout = options.timeout;
        Ok(Poster { proxies, memory, stream, group, world, queues, timeout, region, lanes, round: 0 })
    }

    /// Puts `bytes[n]` bytes to node n, `repeat` times over, in puts of `message` bytes spread over the queues, with at most `depth` in
    /// flight on each; all ranks at once. The time until all has left and all of the peers' has come. Collective.
    pub fn put_all(&mut self, bytes: &[u64], message: u64, depth: u64, repeat: u32) -> Result<Duration> {
        let message = message.clamp(1, self.region);
        let (depth, slots) = (depth.clamp(1, Self::DEEPEST), self.region / message);
        let scratch = u64::from(self.world.ranks() * self.queues) * 8;
        // By node: bytes that are still to be posted, of this copy and how many copies.
        let mut left: Vec<(u64, u32)> = bytes.iter().map(|bytes| (*bytes, repeat)).collect();
        let (own, out, into) = (self.own_word(0), self.region(0), self.region(1 + self.node()));
        self.group.barrier(self.group.timeout())?;
        let start = Instant::now();
        let mut waits = Wait::new(self.timeout);
        loop {
            let (mut open, mut posted) = (false, false);
            for lane in &mut self.lanes {
                let node = lane.node as usize;
                let (rest, copies) = left[node];
                if copies == 0 || bytes[node] == 0 {
                    continue;
                }
                open = true;
                if lane.in_flight() >= depth {
                    continue;
                }
                let at = bytes[node] - rest;
                let place = at / message % slots * message;
                let size = rest.min(message);
                let counter = own + scratch + u64::from(lane.queue) * 8;
                let value = lane.posted + 1;
                lane.post(Put { from: out + place, to: into + place, bytes: size, counter, value });
                left[node] = if rest == size { (bytes[node], copies - 1) } else { (rest - size, copies) };
                posted = true;
            }
            if !open {
                break;
            }
            if posted {
                waits = Wait::new(self.timeout);
            } else {
                self.pause(&mut waits)?;
            }
        }
        self.round += 1;
        for lane in 0..self.lanes.len() {
            self.tell(lane, 0)?;
        }
        for lane in 0..self.lanes.len() {
            self.hear(lane)?;
            self.quiet(lane, 0)?;
        }
        Ok(start.elapsed())
    }

    /// Half the time of a put of `message` bytes there and one back, `rounds` times, in microseconds, between the two nodes of a pair
    /// (0 and 1, 2 and 3, ..). Nothing on ranks that answer or have no partner. Collective.
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
                self.hear(lane)?;
                times.push(start.elapsed().as_secs_f64() * 1e6 / 2.0);
            } else {
                self.hear(lane)?;
                self.tell(lane, message)?;
            }
        }
        Ok(times)
    }

    /// Ends all queues once every rank is done. Collective.
    pub fn close(self) -> Result<()> {
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
        self.lanes[lane].post(put);
        Ok(())
    }

    /// Waits until this round's number has come from a lane's peer.
    fn hear(&self, lane: usize) -> Result<()> {
        let Lane { peer, queue, .. } = self.lanes[lane];
        let at = self.memory.ptr().add(u64::from(peer * self.queues + queue) * 8);
        let mut wait = Wait::new(self.timeout);
        loop {
            let seen = if self.memory.device().info().is_virtual {
                // SAFETY: a device address of a virtual GPU is one of this process, and the word is only accessed atomically.
                unsafe { AtomicU64::from_ptr(at.0 as *mut u64) }.load(Ordering::Acquire)
            } else {
                let mut word = [0; 8];
                self.stream.read(&mut word, at)?;
                u64::from_le_bytes(word)
            };
            if seen >= self.round {
                return Ok(());
            }
            self.pause(&mut wait).map_err(|error| match error {
                Error::PeerTimeout { rank, operation, word, epoch, needed, waited, .. } => {
                    Error::PeerTimeout { rank, peer, operation, word, epoch, needed, seen, waited }
                }
                error => error,
            })?;
        }
    }

    /// Waits until at most `most` requests of a lane have not left.
    fn quiet(&self, lane: usize, most: u64) -> Result<()> {
        let mut wait = Wait::new(self.timeout);
        while self.lanes[lane].in_flight() > most {
            self.pause(&mut wait)?;
        }
        Ok(())
    }

    /// Gives way to others, which may need the processor to move the bytes, for a small part of the wait so far. An error where a queue
    /// has failed or the wait takes too long.
    fn pause(&self, wait: &mut Wait) -> Result<()> {
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
        if wait.since.elapsed() < wait.longest {
            return Ok(());
        }
        let rank = self.group.rank();
        Err(Error::PeerTimeout {
            rank,
            peer: self.lanes.first().map_or(rank, |lane| lane.peer),
            operation: "put without a kernel",
            word: "the puts",
            epoch: self.round,
            needed: self.round,
            seen: 0,
            waited: wait.longest,
        })
    }

    fn node(&self) -> u32 {
        self.group.rank() / self.world.ranks_per_node
    }

    /// Where this rank's word for a queue is at its peers.
    fn own_word(&self, queue: u32) -> u64 {
        u64::from(self.group.rank() * self.queues + queue) * 8
    }

    /// Where region `index` begins: 0 to put from, 1 + n for what node n puts.
    fn region(&self, index: u32) -> u64 {
        let words = 2 * u64::from(self.world.ranks() * self.queues) * 8;
        words.next_multiple_of(128) + u64::from(index) * self.region
    }
}

/// A wait under way.
struct Wait {
    since: Instant,
    turns: u32,
    longest: Duration,
}

impl Wait {
    fn new(longest: Duration) -> Wait {
        Wait { since: Instant::now(), turns: 0, longest }
    }
}
