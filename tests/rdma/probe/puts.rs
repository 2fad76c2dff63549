//! Random puts on all queues between all ranks. After each counter, every byte of the receiver's
//! slot is compared with what it must be.

use std::collections::VecDeque;
use std::process::Command;
use std::time::{Duration, Instant};

use epoxide::Result;
use epoxide::group::ProcessGroup as _;
use epoxide::internal::transport::{Put, PutQueue};
use rand::{Rng, RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::rank::{Rank, Wire, wrong};

/// Puts in flight on a queue before the receiver has read the first.
const SLOTS: u64 = 8;
/// Bytes of a slot.
const SLOT: u64 = 64 << 10;
/// Most puts handed over at once.
const BATCH: u64 = 4;
/// The counter and the acknowledgement of a lane, a cache line each.
const WORDS: u64 = 128;
/// Bytes of one lane: destinations of incoming puts, and sources of outgoing ones.
const LANE: u64 = WORDS + 2 * SLOTS * SLOT;
/// Twice this is more than the 8 MiB that Soft-RoCE takes in one message.
const LARGE: u64 = 5 << 20;

/// A put, computed by both ends from its place in the sequence.
struct Plan {
    offset: u64,
    bytes: Vec<u8>,
}

impl Plan {
    fn new(from: u32, to: u32, queue: u32, number: u64) -> Plan {
        let seed = [u64::from(from), to.into(), queue.into(), number];
        let seed = seed.iter().fold(0, |seed: u64, part| seed.wrapping_mul(1_000_003) ^ part);
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        // Short, odd, empty and whole ones.
        let bytes = match rng.random_range(0..4) {
            0 => rng.random_range(0..16),
            1 => SLOT,
            _ => rng.random_range(0..=SLOT),
        };
        let mut contents = vec![0; bytes as usize];
        rng.fill_bytes(&mut contents);
        Plan { offset: rng.random_range(0..=SLOT - bytes), bytes: contents }
    }
}

/// Both directions of one queue to one peer.
struct Lane<'a> {
    peer: u32,
    queue: u32,
    /// The lane's offsets on this rank and on the peer: both can compute them from (peer, queue).
    here: u64,
    there: u64,
    puts: &'a mut dyn PutQueue,
    sent: u64,
    seen: u64,
    /// Expected contents of the slots.
    slots: Vec<Vec<u8>>,
    /// Puts and acknowledgements posted on the queue, and the positions of puts that have not left.
    posted: u64,
    leaving: VecDeque<u64>,
}

impl Lane<'_> {
    /// Sends up to a batch, as far as the receiver has room.
    fn send(&mut self, wire: &Wire, rank: u32, total: u64) -> Result<()> {
        let left = self.puts.completed()?;
        while self.leaving.front().is_some_and(|at| *at <= left) {
            self.leaving.pop_front();
        }
        let taken = wire.counter(self.here + 64);
        // A slot is reused when the peer has read its put and the put has left: until then it may
        // be sent again.
        let room = SLOTS - (self.sent - taken).max(self.leaving.len() as u64);
        let mut batch = Vec::new();
        for _ in 0..room.min(total - self.sent).min(BATCH) {
            let plan = Plan::new(rank, self.peer, self.queue, self.sent);
            let slot = self.sent % SLOTS * SLOT;
            let from = self.here + WORDS + SLOTS * SLOT + slot + plan.offset;
            wire.write(from, &plan.bytes);
            self.sent += 1;
            let (to, bytes) = (self.there + WORDS + slot + plan.offset, plan.bytes.len() as u64);
            batch.push(Put { from, to, bytes, counter: self.there, value: self.sent });
            self.posted += 1;
            self.leaving.push_back(self.posted);
        }
        if batch.is_empty() { Ok(()) } else { self.puts.put_with_counter(&batch) }
    }

    /// Checks the received puts, and acknowledges them.
    fn receive(&mut self, wire: &Wire, rank: u32, total: u64) -> Result<()> {
        let counter = wire.counter(self.here);
        if counter == self.seen {
            return Ok(());
        }
        if !(self.seen..=total.min(self.seen + SLOTS)).contains(&counter) {
            return Err(wrong(format!("counter {counter} after {} from rank {}", self.seen, self.peer)));
        }
        let mut have = vec![0; SLOT as usize];
        while self.seen < counter {
            let plan = Plan::new(self.peer, rank, self.queue, self.seen);
            let slot = self.seen % SLOTS;
            let want = &mut self.slots[slot as usize];
            want[plan.offset as usize..][..plan.bytes.len()].copy_from_slice(&plan.bytes);
            wire.read(self.here + WORDS + slot * SLOT, &mut have);
            if let Some(at) = have.iter().zip(&*want).position(|(have, want)| have != want) {
                let (peer, queue, number) = (self.peer, self.queue, self.seen);
                let put = format!("put {number} of rank {peer}, queue {queue}, counter {counter}");
                return Err(wrong(format!("{put}: byte {at} is {:#x}, not {:#x}", have[at], want[at])));
            }
            self.seen += 1;
        }
        self.posted += 1;
        let counter = self.there + 64;
        self.puts.put_with_counter(&[Put { from: 0, to: 0, bytes: 0, counter, value: self.seen }])
    }

    fn done(&self, wire: &Wire, total: u64) -> bool {
        self.sent == total && self.seen == total && wire.counter(self.here + 64) == total
    }
}

/// `total` puts on each of the queues, each way; with the cable of rank 0 out for some time in the
/// middle.
pub fn run(
    rank: &Rank,
    queues: u32,
    total: u64,
    with_large: bool,
    link_down: Option<Duration>,
) -> Result<()> {
    let (own, size) = (rank.rank(), rank.group.size());
    let place = |peer: u32, queue: u32| u64::from(queue * size + peer) * LANE;
    let lanes_end = place(0, queues);
    // Behind the lanes: a counter, and room for one large put, in and out.
    let wire = rank.wire_memory(lanes_end + WORDS + 4 * LARGE)?;
    let mut links = rank.connect(&wire, &rank.group, queues)?;
    let mut lanes: Vec<Lane<'_>> = links
        .queues()
        .iter_mut()
        .map(|link| Lane {
            peer: link.peer,
            queue: link.index,
            here: place(link.peer, link.index),
            there: place(own, link.index),
            puts: &mut *link.queue,
            sent: 0,
            seen: 0,
            slots: vec![vec![0; SLOT as usize]; SLOTS as usize],
            posted: 0,
            leaving: VecDeque::new(),
        })
        .collect();

    let start = Instant::now();
    let (mut last, mut progress, mut pause) = (start, 0, Duration::ZERO);
    let mut pulled = link_down.is_none() || own != 0;
    while !lanes.iter().all(|lane| lane.done(&wire, total)) {
        for lane in &mut lanes {
            lane.send(&wire, own, total)?;
            lane.receive(&wire, own, total)?;
        }
        if !pulled && lanes[0].sent >= total / 2 {
            pulled = true;
            pull_cable(link_down)?;
        }
        let now: u64 = lanes.iter().map(|lane| lane.sent + lane.seen).sum();
        if now > progress {
            (pause, last, progress) = (pause.max(last.elapsed()), Instant::now(), now);
        }
        rank.in_time(|| {
            let lanes = lanes.iter().map(|lane| format!("{}:{}+{}", lane.peer, lane.sent, lane.seen));
            format!("only {} of {total} puts each way", lanes.collect::<Vec<_>>().join(" "))
        })?;
        std::thread::yield_now();
    }
    let took = start.elapsed();
    if with_large {
        large(rank, &wire, lanes_end, lanes[0].puts)?;
        // On the first lane.
        lanes[0].posted += 1;
    }
    for lane in &mut lanes {
        lane.puts.quiet(rank.timeout)?;
        let completed = lane.puts.completed()?;
        if completed != lane.posted {
            return Err(wrong(format!("{completed} puts completed, {} were posted", lane.posted)));
        }
    }
    println!(
        "rank {own}: {total} puts each way on {} queues, exact, {took:.2?}, longest pause {pause:.2?}",
        lanes.len()
    );
    rank.leave(links)
}

/// The peer of the first lane.
fn first_peer(own: u32, size: u32) -> u32 {
    (0..size).find(|peer| *peer != own).unwrap_or(own)
}

/// One put that is larger than the card's largest message, to the first peer. One rank after the
/// other.
fn large(rank: &Rank, wire: &Wire, at: u64, queue: &mut dyn PutQueue) -> Result<()> {
    let contents = |sender: u32| {
        let mut bytes = vec![0; 2 * LARGE as usize];
        ChaCha8Rng::seed_from_u64(sender.into()).fill_bytes(&mut bytes);
        bytes
    };
    let (into, from) = (at + WORDS, at + WORDS + 2 * LARGE);
    wire.write(from, &contents(rank.rank()));
    for sender in 0..rank.group.size() {
        let receiver = first_peer(sender, rank.group.size());
        if rank.rank() == sender {
            queue.put_with_counter(&[Put {
                from,
                to: into,
                bytes: 2 * LARGE,
                counter: at,
                value: u64::from(sender) + 1,
            }])?;
        } else if rank.rank() == receiver {
            while wire.counter(at) != u64::from(sender) + 1 {
                rank.in_time(|| "no large put".into())?;
                std::thread::yield_now();
            }
            let mut have = vec![0; 2 * LARGE as usize];
            wire.read(into, &mut have);
            if have != contents(sender) {
                return Err(wrong(format!("the large put of rank {sender} differs")));
            }
        }
        rank.group.barrier(rank.timeout)?;
    }
    Ok(())
}

/// Takes the cable out, for good or for some time, without waiting.
pub fn pull_cable(time: Option<Duration>) -> Result<()> {
    wire("down")?;
    println!("the cable is out");
    if let Some(time) = time {
        std::thread::spawn(move || {
            std::thread::sleep(time);
            match wire("up") {
                Ok(()) => println!("the cable is in again"),
                Err(error) => println!("{error}"),
            }
        });
    }
    Ok(())
}

fn wire(state: &str) -> Result<()> {
    match Command::new("wire").arg(state).status() {
        Ok(status) if status.success() => Ok(()),
        other => Err(wrong(format!("wire {state}: {other:?}"))),
    }
}
