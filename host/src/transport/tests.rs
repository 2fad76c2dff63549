//! Ranks as threads, with a host thread in the place of the kernel that posts.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use epoxide_gpu::layout::{PutRequest, QueueWords, RING_ENTRIES};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::links::{Links, PeerQueue};
use super::open::wire_memory;
use super::options::Hooks;
use super::proxy::Proxy;
use super::put::{Interrupt, Put, PutQueue};
use super::setup::JOIN_TIMEOUT;
use super::shaping::Shaping;
use super::*;
use crate::driver::virt::{VirtConfig, VirtualGpu};
use crate::driver::{Device, DevicePtr, Memory, MemoryKind};
use crate::error::{Error, Result};
use crate::group::{JobSecret, ProcessGroup, run_threads};

/// Longer than anything takes on a busy machine that is meant to end.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A rank's wire memory: counters, then a part to send from, then parts that puts arrive in, one
/// per queue of each peer.
const COUNTERS: u64 = 4096;
const PART: u64 = 64 << 10;
const SEND: u64 = COUNTERS;
const ARRIVE: u64 = SEND + PART;

fn bytes(parts: u32) -> u64 {
    ARRIVE + u64::from(parts) * PART
}

fn counter(size: u32, queue: u32, peer: u32) -> u64 {
    u64::from(queue * size + peer) * 8
}

fn part(size: u32, queue: u32, peer: u32) -> u64 {
    ARRIVE + u64::from(queue * size + peer) * PART
}

struct Rank {
    group: Arc<dyn ProcessGroup>,
    device: Device,
    memory: Arc<Memory>,
    peers: Vec<u32>,
}

impl Rank {
    fn new(group: Arc<dyn ProcessGroup>, bytes: u64) -> Rank {
        let device = VirtualGpu::new(VirtConfig::default());
        let memory = Memory::alloc(&device, bytes, MemoryKind::SharedHost, "wire").unwrap().into();
        let peers = (0..group.size()).filter(|peer| *peer != group.rank()).collect();
        Rank { group, device, memory, peers }
    }

    fn connect(&self, options: &TransportOptions) -> Result<Links> {
        connect(options, &self.memory, &*self.group, &self.peers, TIMEOUT)
    }

    fn proxies(&self, options: &TransportOptions) -> Proxies {
        Proxies::start(&self.device, self.connect(options).unwrap()).unwrap()
    }

    fn word(&self, offset: u64) -> &AtomicU64 {
        assert!(offset + 8 <= self.memory.bytes());
        // SAFETY: within the memory of a virtual GPU.
        unsafe { AtomicU64::from_ptr((self.memory.ptr().0 + offset) as *mut u64) }
    }

    fn write(&self, offset: u64, data: &[u8]) {
        assert!(offset + data.len() as u64 <= self.memory.bytes());
        // SAFETY: within the memory of a virtual GPU; no put reads it now.
        unsafe {
            std::ptr::copy_nonoverlapping(
                data.as_ptr(),
                (self.memory.ptr().0 + offset) as *mut u8,
                data.len(),
            );
        }
    }

    fn read(&self, offset: u64, bytes: u64) -> Vec<u8> {
        assert!(offset + bytes <= self.memory.bytes());
        // SAFETY: within the memory of a virtual GPU; no put writes it now.
        unsafe { std::slice::from_raw_parts((self.memory.ptr().0 + offset) as *const u8, bytes as usize) }
            .to_vec()
    }

    fn wait(&self, offset: u64, value: u64) {
        eventually(|| self.word(offset).load(Ordering::Acquire) >= value);
    }

    fn barrier(&self) {
        self.group.barrier(TIMEOUT).unwrap();
    }
}

fn eventually(mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < TIMEOUT, "it never came");
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// Plays the kernel that posts to a queue.
struct Poster {
    ring: DevicePtr,
    posted: u64,
}

impl Poster {
    fn new(proxies: &Proxies, queue: u32, peer: u32) -> Poster {
        Poster { ring: proxies.handle(queue, peer).unwrap(), posted: 0 }
    }

    fn word(&self, offset: u64) -> &AtomicU64 {
        // SAFETY: callers stay within the queue's memory, which the proxies keep.
        unsafe { AtomicU64::from_ptr((self.ring.0 + offset) as *mut u64) }
    }

    fn taken(&self) -> u64 {
        self.word(0).load(Ordering::Acquire)
    }

    fn completed(&self) -> u64 {
        self.word(128).load(Ordering::Acquire)
    }

    fn post(&mut self, put: Put) {
        eventually(|| self.posted - self.taken() < RING_ENTRIES);
        self.post_blindly(put);
    }

    /// Posts without a check for room.
    fn post_blindly(&mut self, put: Put) {
        let entry =
            size_of::<QueueWords>() as u64 + self.posted % RING_ENTRIES * size_of::<PutRequest>() as u64;
        for (field, value) in (1..).zip([put.from, put.to, put.bytes, put.counter, put.value]) {
            self.word(entry + field * 8).store(value, Ordering::Relaxed);
        }
        self.posted += 1;
        self.word(entry).store(self.posted, Ordering::Release);
    }

    fn quiet(&self) {
        eventually(|| self.completed() >= self.posted);
    }
}

/// With tcp, puts of more than a few bytes are divided among three connections.
fn options(kind: TransportKind, queues: u32) -> TransportOptions {
    let hooks = Hooks { smallest_part: Some(24), ..Hooks::default() };
    TransportOptions {
        queues_per_peer: queues,
        connections_per_queue: (kind == TransportKind::Tcp).then_some(3),
        timeout: TIMEOUT,
        hooks,
        ..TransportOptions::new(kind)
    }
}

/// The transports whose bytes the host moves.
const ALL: [TransportKind; 2] = [TransportKind::Shm, TransportKind::Tcp];

/// Runs `test` with each of [`ALL`] at the same time, since most of it is waiting.
fn each_at_once(test: impl Fn(TransportKind) + Sync) {
    let test = &test;
    std::thread::scope(|scope| ALL.map(|kind| drop(scope.spawn(move || test(kind)))));
}

/// The memory that `from` sends from.
fn source(from: u32) -> Vec<u8> {
    let mut data = vec![0; PART as usize];
    ChaCha8Rng::seed_from_u64(u64::from(from) + 1000).fill(&mut data[..]);
    data
}

/// The puts of one queue: the same on both sides.
fn puts(size: u32, from: u32, queue: u32, count: u64) -> impl Iterator<Item = Put> {
    let mut random = ChaCha8Rng::seed_from_u64(u64::from(from * 64 + queue));
    (1..=count).map(move |value| {
        let most = if random.random_bool(0.2) { PART } else { 512 };
        let bytes = if random.random_bool(0.2) { 0 } else { random.random_range(1..=most) };
        Put {
            from: SEND + random.random_range(0..=PART - bytes),
            to: part(size, queue, from) + random.random_range(0..=PART - bytes),
            bytes,
            counter: counter(size, queue, from),
            value,
        }
    })
}

fn random_puts(options: &TransportOptions, size: u32, queues: u32, count: u64) {
    run_threads(size, TIMEOUT, |rank, group| {
        let it = Rank::new(group, bytes(size * queues));
        it.write(SEND, &source(rank));
        let mut proxies = it.proxies(options);
        let mut posters: Vec<(u32, Poster, Vec<Put>)> = Vec::new();
        for queue in 0..queues {
            for peer in &it.peers {
                let poster = Poster::new(&proxies, queue, *peer);
                posters.push((queue, poster, puts(size, rank, queue, count).collect()));
            }
        }
        for index in 0..count as usize {
            for (_, poster, puts) in &mut posters {
                poster.post(puts[index]);
            }
        }
        for (_, poster, _) in &posters {
            poster.quiet();
        }
        for (queue, peer) in (0..queues).flat_map(|queue| it.peers.iter().map(move |peer| (queue, *peer))) {
            it.wait(counter(size, queue, peer), count);
            let mut expected = vec![0; PART as usize];
            let theirs = source(peer);
            for put in puts(size, peer, queue, count) {
                let (to, from) = ((put.to - part(size, queue, peer)) as usize, (put.from - SEND) as usize);
                let bytes = put.bytes as usize;
                expected[to..to + bytes].copy_from_slice(&theirs[from..from + bytes]);
            }
            let arrived = it.read(part(size, queue, peer), PART);
            assert!(arrived == expected, "queue {queue} of rank {peer}");
            assert_eq!(it.word(counter(size, queue, peer)).load(Ordering::Acquire), count);
        }
        let sent: Vec<Put> = posters.iter().flat_map(|(_, _, puts)| puts.clone()).collect();
        let stats = proxies.stats();
        assert_eq!(stats.puts, sent.len() as u64);
        assert_eq!(stats.bytes, sent.iter().map(|put| put.bytes).sum::<u64>());
        assert_eq!(stats.counter_puts, sent.iter().filter(|put| put.bytes == 0).count() as u64);
        it.barrier();
        assert!(proxies.failure().is_none(), "{:?}", proxies.failure());
        proxies.close(TIMEOUT);
        it.barrier();
        assert!(proxies.failure().is_none(), "{:?}", proxies.failure());
        Ok(())
    })
    .unwrap();
}

#[test]
fn random_puts_arrive_exactly_and_rings_wrap() {
    for kind in ALL {
        random_puts(&options(kind, 1), 2, 1, 5 * RING_ENTRIES + 3);
        random_puts(&options(kind, 3), 2, 3, 300);
        random_puts(&options(kind, 1), 4, 1, 300);
        random_puts(&options(kind, 3), 4, 3, 100);
    }
    // The most connections, threads that poll, and one connection alone.
    for (connections, polls) in [(MAX_CONNECTIONS, false), (2, true), (1, true), (1, false)] {
        let mut options = options(TransportKind::Tcp, 1);
        options.connections_per_queue = Some(connections);
        options.hooks.polls = Some(polls);
        random_puts(&options, 2, 1, 300);
    }
}

/// Blocks of one value each, sent again and again; the receiver reads a block as soon as its
/// counter has arrived.
#[test]
fn no_counter_comes_before_its_bytes() {
    const BLOCKS: u64 = 8;
    const BLOCK: u64 = PART / BLOCKS;
    const COUNT: u64 = 3000;
    for kind in ALL {
        run_threads(2, TIMEOUT, |rank, group| {
            let it = Rank::new(group, bytes(2));
            let proxies = it.proxies(&options(kind, 1));
            let mut poster = Poster::new(&proxies, 0, 1 - rank);
            if rank == 0 {
                for value in 1..=COUNT {
                    let at = value % BLOCKS * BLOCK;
                    // Its last put has been sent.
                    eventually(|| poster.completed() + BLOCKS > poster.posted);
                    for word in 0..BLOCK / 8 {
                        it.word(SEND + at + word * 8).store(value, Ordering::Relaxed);
                    }
                    let (from, to) = (SEND + at, part(2, 0, 0) + at);
                    poster.post(Put { from, to, bytes: BLOCK, counter: counter(2, 0, 0), value });
                }
            } else {
                let mut seen = 0;
                let start = Instant::now();
                while seen < COUNT {
                    assert!(start.elapsed() < TIMEOUT);
                    let now = it.word(counter(2, 0, 0)).load(Ordering::Acquire);
                    assert!(now >= seen, "a counter went back from {seen} to {now}");
                    seen = now;
                    if now == 0 {
                        continue;
                    }
                    for word in (0..BLOCK / 8).rev() {
                        let at = part(2, 0, 0) + now % BLOCKS * BLOCK + word * 8;
                        let value = it.word(at).load(Ordering::Relaxed);
                        assert!(
                            value >= now && value % BLOCKS == now % BLOCKS,
                            "{value} under counter {now}"
                        );
                    }
                }
            }
            it.barrier();
            drop(proxies);
            Ok(())
        })
        .unwrap();
    }
}

fn tiny(value: u64) -> Put {
    Put { from: SEND, to: part(2, 0, 0), bytes: 16, counter: counter(2, 0, 0), value }
}

#[test]
fn a_full_ring_backs_up_and_completion_waits_for_the_queue() {
    each_at_once(|kind| {
        run_threads(2, TIMEOUT, |rank, group| {
            let it = Rank::new(group, bytes(2));
            // The whole ring takes more than four minutes.
            let lag = Duration::from_secs(1);
            let mut options = options(kind, 1);
            options.hooks.shaping = Some(Shaping::new(1).lag(1, 0, lag));
            let start = Instant::now();
            // The number of puts that may have left by now.
            let most = || (start.elapsed().as_nanos() / lag.as_nanos()) as u64;
            let mut proxies = it.proxies(&options);
            if rank == 0 {
                let mut poster = Poster::new(&proxies, 0, 1);
                for value in 1..=RING_ENTRIES {
                    poster.post_blindly(tiny(value));
                }
                // The queue has one batch, the rest stays in the ring.
                eventually(|| poster.taken() > 0);
                std::thread::sleep(Duration::from_millis(20));
                let (taken, completed) = (poster.taken(), poster.completed());
                assert!(taken <= most() + 16, "{taken} taken");
                assert!(completed <= most(), "{completed} completed");
            } else {
                it.wait(counter(2, 0, 0), 1);
                let arrived = it.word(counter(2, 0, 0)).load(Ordering::Acquire);
                assert!(arrived <= most(), "{arrived} arrived");
            }
            it.barrier();
            proxies.close(Duration::from_millis(100));
            // The slow put is interrupted: a leaked proxy would report that.
            let failure = proxies.failure().map(|error| error.to_string());
            assert_eq!(failure.is_some_and(|failure| failure.contains("interrupted")), rank == 0);
            Ok(())
        })
        .unwrap();
    });
}

#[test]
fn a_lagging_queue_is_overtaken_by_others_and_keeps_its_own_order() {
    each_at_once(|kind| {
        run_threads(2, TIMEOUT, |rank, group| {
            let it = Rank::new(group, bytes(4));
            let mut options = options(kind, 2);
            let lag = Duration::from_millis(300);
            options.hooks.shaping =
                Some(Shaping::new(5).lag(1, 0, lag).delay_up_to(Duration::from_millis(2)));
            let start = Instant::now();
            let proxies = it.proxies(&options);
            const COUNT: u64 = 10;
            let [slow, fast] = [0, 1].map(|queue| counter(2, queue, 0));
            if rank == 0 {
                let mut posters = [0, 1].map(|queue| Poster::new(&proxies, queue, 1));
                for value in 1..=COUNT {
                    for (queue, poster) in (0..).zip(&mut posters) {
                        poster.post(Put { counter: counter(2, queue, 0), ..tiny(value) });
                    }
                }
                posters.iter().for_each(Poster::quiet);
            } else {
                let (mut last, mut steps) = (0, 0);
                let mut overtaken = false;
                eventually(|| {
                    let now = it.word(slow).load(Ordering::Acquire);
                    assert!(now >= last, "{now} after {last}");
                    assert!(start.elapsed() >= lag * now as u32, "{now} after {:?}", start.elapsed());
                    steps += u64::from(now > last);
                    last = now;
                    overtaken |= it.word(fast).load(Ordering::Acquire) == COUNT
                        && it.word(slow).load(Ordering::Acquire) < COUNT;
                    now == COUNT
                });
                // The slow queue takes three seconds, so this thread has polled before its end.
                assert!(overtaken, "the fast queue never was ahead");
                assert!(steps > 1, "{steps} steps: the puts came in one lump");
            }
            it.barrier();
            Ok(())
        })
        .unwrap();
    });
}

#[test]
fn a_narrow_link_carries_no_more_than_it_should() {
    run_threads(2, TIMEOUT, |rank, group| {
        let it = Rank::new(group, bytes(2));
        let mut options = options(TransportKind::Shm, 1);
        options.hooks.shaping = Some(Shaping::new(0).bandwidth(4 << 20));
        let proxies = it.proxies(&options);
        if rank == 0 {
            let mut poster = Poster::new(&proxies, 0, 1);
            let start = Instant::now();
            for value in 1..=32 {
                poster.post(Put { bytes: PART, ..tiny(value) });
            }
            poster.quiet();
            // 2 MiB at 4 MiB/s.
            assert!(start.elapsed() >= Duration::from_millis(490), "{:?}", start.elapsed());
        }
        it.barrier();
        Ok(())
    })
    .unwrap();
}

#[test]
fn over_a_cut_link_nothing_arrives_and_leaving_is_prompt() {
    for kind in ALL {
        run_threads(3, TIMEOUT, |rank, group| {
            let it = Rank::new(group, bytes(3));
            let mut options = options(kind, 1);
            let shaping = Shaping::new(0).cut_after(1, 3);
            options.hooks.shaping = Some(shaping.clone());
            let mut proxies = it.proxies(&options);
            if rank == 0 {
                let mut posters = [1, 2].map(|peer| Poster::new(&proxies, 0, peer));
                for value in 1..=10 {
                    posters.iter_mut().for_each(|poster| poster.post(tiny(value)));
                }
                posters[1].quiet();
                shaping.cut(2);
                posters[1].post(tiny(11));
                eventually(|| posters[0].taken() == 10 && posters[1].taken() == 11);
                std::thread::sleep(Duration::from_millis(50));
                assert_eq!(posters.map(|poster| poster.completed()), [3, 10]);
                assert!(proxies.failure().is_none(), "a cut link is silent");
            }
            it.barrier();
            std::thread::sleep(Duration::from_millis(20));
            let arrived = it.word(counter(2, 0, 0)).load(Ordering::Acquire);
            assert_eq!(arrived, [0, 3, 10][rank as usize]);
            // No proxy is leaked.
            proxies.close(Duration::from_millis(100));
            assert!(proxies.failure().is_none(), "{:?}", proxies.failure());
            it.barrier();
            Ok(())
        })
        .unwrap();
    }
    // A queue itself reports that its puts were not sent.
    run_threads(2, TIMEOUT, |rank, group| {
        let it = Rank::new(group, bytes(2));
        let mut options = options(TransportKind::Shm, 1);
        options.hooks.shaping = Some(Shaping::new(0).cut_after(1, 1));
        let mut links = it.connect(&options).unwrap();
        if rank == 0 {
            let queue = &mut links.queues()[0].queue;
            queue.put_with_counter(&[tiny(1)]).unwrap();
            queue.quiet(TIMEOUT).unwrap();
            queue.put_with_counter(&[tiny(2)]).unwrap();
            let text = queue.quiet(Duration::from_millis(30)).unwrap_err().to_string();
            assert!(text.contains("did not leave within 30ms"), "{text}");
        }
        it.barrier();
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_put_after_the_peers_goodbye_is_an_error_that_names_it() {
    for kind in ALL {
        run_threads(2, TIMEOUT, |rank, group| {
            let it = Rank::new(group, bytes(2));
            let mut proxies = it.proxies(&options(kind, 1));
            let mut poster = Poster::new(&proxies, 0, 1 - rank);
            if rank == 0 {
                poster.post(tiny(1));
                poster.quiet();
                it.barrier();
                it.barrier();
                poster.post(tiny(2));
                eventually(|| proxies.failure().is_some());
                let text = proxies.failure().unwrap().to_string();
                assert!(text.contains("put, rank 0 with rank 1: it said goodbye"), "{text}");
                // Later requests are taken, so that no poster waits for room, and never complete.
                for value in 3..3 * RING_ENTRIES {
                    poster.post(tiny(value));
                }
                eventually(|| poster.taken() == poster.posted);
                // Over tcp the second put is sent, because the goodbye is read behind it.
                let left = 1 + u64::from(kind == TransportKind::Tcp);
                assert_eq!((poster.completed(), proxies.stats().puts), (left, left));
            } else {
                it.wait(counter(2, 0, 0), 1);
                it.barrier();
                proxies.close(TIMEOUT);
                assert!(proxies.failure().is_none());
                it.barrier();
            }
            it.barrier();
            assert_eq!(it.word(counter(2, 0, 0)).load(Ordering::Acquire), u64::from(rank));
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn puts_out_of_range_are_refused() {
    for kind in ALL {
        run_threads(2, TIMEOUT, |rank, group| {
            let it = Rank::new(group, bytes(2));
            let end = it.memory.bytes();
            let wrong = [
                (Put { from: end - 15, ..tiny(1) }, "from + bytes must be within"),
                (Put { to: end - 15, ..tiny(1) }, "to + bytes must be within"),
                (Put { to: u64::MAX, ..tiny(1) }, "to + bytes must be within"),
                (Put { bytes: u64::MAX, ..tiny(1) }, "from + bytes must be within"),
                (Put { counter: end, ..tiny(1) }, "counter + 8 must be within"),
                (Put { counter: !7, ..tiny(1) }, "counter + 8 must be within"),
                (Put { counter: 4, ..tiny(1) }, "multiple of 8"),
            ];
            for (put, expected) in wrong {
                let proxies = it.proxies(&options(kind, 1));
                if rank == 0 {
                    Poster::new(&proxies, 0, 1).post(put);
                    eventually(|| proxies.failure().is_some());
                    let text = proxies.failure().unwrap().to_string();
                    assert!(text.contains(expected), "{text}");
                }
                it.barrier();
            }
            // The last bytes are within.
            let proxies = it.proxies(&options(kind, 1));
            if rank == 0 {
                let mut poster = Poster::new(&proxies, 0, 1);
                poster.post(Put { from: end - 16, to: end - 24, counter: end - 8, ..tiny(9) });
                poster.quiet();
            } else {
                it.wait(end - 8, 9);
            }
            it.barrier();
            Ok(())
        })
        .unwrap();
    }
}

/// The mistake of a rank: its options, its peers, or the bytes of its wire memory.
type Change<'a> = &'a (dyn Fn(u32, &mut TransportOptions, &mut Vec<u32>, &mut u64) + Sync);

#[test]
fn a_failed_setup_fails_on_every_rank_and_says_why() {
    let with = |change: Change<'_>| {
        let errors = run_threads(3, TIMEOUT, |rank, group| {
            let mut options = options(TransportKind::Tcp, 1);
            let mut peers = (0..3).filter(|peer| *peer != rank).collect();
            let mut size = 4096;
            change(rank, &mut options, &mut peers, &mut size);
            let it = Rank::new(group, size);
            let outcome = connect(&options, &it.memory, &*it.group, &peers, TIMEOUT);
            Ok(outcome.expect_err("must fail").to_string())
        });
        errors.unwrap()
    };
    let kinds = with(&|rank, options, _, _| {
        if rank == 1 {
            options.kind = TransportKind::Shm;
        }
    });
    assert!(kinds[0].contains("rank 1 disagree on the transport: tcp here, shm there"), "{kinds:?}");
    assert!(kinds[1].contains("shm here, tcp there"), "{kinds:?}");
    let sizes = with(&|rank, _, _, bytes| *bytes += 4096 * u64::from(rank));
    assert!(sizes[2].contains("the bytes of wire memory: 12288 here, 4096 there"), "{sizes:?}");
    let queues = with(&|rank, options, _, _| options.queues_per_peer = rank);
    assert!(queues[0].contains("queues_per_peer = 0: give 1 to 64"), "{queues:?}");
    assert!(queues[1].contains("rank 0 cannot take part: queues_per_peer = 0"), "{queues:?}");
    let lonely = with(&|rank, _, peers, _| peers.retain(|peer| rank != 2 || *peer != 0));
    assert!(
        lonely.iter().all(|text| text.contains("rank 0 lists rank 2 among its peers, but")),
        "{lonely:?}"
    );
    let itself = with(&|rank, _, peers, _| {
        if rank == 0 {
            *peers = vec![0, 1, 2];
        }
    });
    assert!(itself[0].contains("without rank 0 itself"), "{itself:?}");
}

/// A group with a fault on one of its ranks.
#[derive(Debug)]
struct Faulty {
    group: Arc<dyn ProcessGroup>,
    fault: Option<Fault>,
}

#[derive(Debug, Clone, Copy)]
enum Fault {
    /// The descriptors of a part's ranks do not come.
    Descriptors,
    /// The job's secret is malformed.
    Secret,
}

impl ProcessGroup for Faulty {
    fn rank(&self) -> u32 {
        self.group.rank()
    }

    fn size(&self) -> u32 {
        self.group.size()
    }

    fn timeout(&self) -> Duration {
        self.group.timeout()
    }

    fn barrier(&self, timeout: Duration) -> Result<()> {
        self.group.barrier(timeout)
    }

    fn all_gather(&self, data: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.group.all_gather(data)
    }

    fn broadcast(&self, root: u32, data: &[u8]) -> Result<Vec<u8>> {
        self.group.broadcast(root, data)
    }

    fn exchange_fds(&self, fds: &[BorrowedFd<'_>]) -> Result<Vec<Vec<OwnedFd>>> {
        let received = self.group.exchange_fds(fds)?;
        match self.fault {
            Some(Fault::Descriptors) => Err(Error::os("recvmsg", "no room")),
            _ => Ok(received),
        }
    }

    fn split(&self, color: u64) -> Result<Arc<dyn ProcessGroup>> {
        Ok(Arc::new(Faulty { group: self.group.split(color)?, fault: self.fault }))
    }

    fn job_secret(&self) -> Result<Option<JobSecret>> {
        match self.fault {
            Some(Fault::Secret) => Err(Error::argument("EPOXIDE_JOB_SECRET", "..", "malformed")),
            _ => Ok(None),
        }
    }

    fn destroy(&self) -> Result<()> {
        self.group.destroy()
    }
}

/// The errors of all ranks where one has a fault. The group is in step afterwards.
fn errors_with(size: u32, kind: TransportKind, faulty: u32, fault: Fault) -> Vec<String> {
    run_threads(size, TIMEOUT, |rank, group| {
        let fault = (rank == faulty).then_some(fault);
        let it = Rank::new(Arc::new(Faulty { group, fault }), bytes(size));
        let mut options = options(kind, 1);
        // Two ranks of each host.
        options.hooks.host = Some(format!("host {}", rank / 2));
        let error = it.connect(&options).unwrap_err().to_string();
        it.barrier();
        Ok(error)
    })
    .unwrap()
}

#[test]
fn descriptors_that_do_not_come_on_one_host_fail_all_ranks() {
    for kind in [TransportKind::Auto, TransportKind::Direct] {
        let errors = errors_with(4, kind, 0, Fault::Descriptors);
        assert!(errors[0].contains("no room"), "{errors:?}");
        let says = |error: &String| error.contains("rank 0 failed") && error.contains("no room");
        assert!(errors[2..].iter().all(says), "{kind}: {errors:?}");
    }
}

#[test]
fn a_malformed_secret_is_the_reason_on_every_rank() {
    for kind in [TransportKind::Shm, TransportKind::Direct] {
        let errors = errors_with(2, kind, 1, Fault::Secret);
        assert!(errors[1].contains("EPOXIDE_JOB_SECRET"), "{errors:?}");
        let says = ["rank 1 cannot take part", "EPOXIDE_JOB_SECRET"];
        assert!(says.iter().all(|part| errors[0].contains(part)), "{kind}: {errors:?}");
    }
}

#[test]
fn only_listed_peers_are_connected() {
    for kind in ALL {
        // Two nodes of two ranks.
        run_threads(4, TIMEOUT, |rank, group| {
            let it = Rank { peers: vec![(rank + 2) % 4], ..Rank::new(group, bytes(4)) };
            let mut links = it.connect(&options(kind, 2)).unwrap();
            let pairs: Vec<(u32, u32)> = links.queues().iter().map(|link| (link.index, link.peer)).collect();
            assert_eq!(pairs, [(0, it.peers[0]), (1, it.peers[0])]);
            let proxies = Proxies::start(&it.device, links).unwrap();
            assert!(proxies.handle(1, it.peers[0]).is_some() && proxies.handle(0, rank ^ 1).is_none());
            assert!(proxies.handle(2, it.peers[0]).is_none());
            Poster::new(&proxies, 1, it.peers[0]).post(Put { counter: u64::from(rank) * 8, ..tiny(7) });
            it.wait(u64::from(it.peers[0]) * 8, 7);
            it.barrier();
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn traces_have_every_put_in_order() {
    run_threads(2, TIMEOUT, |rank, group| {
        let it = Rank::new(group, bytes(2));
        let proxies = it.proxies(&options(TransportKind::Shm, 1));
        let mut poster = Poster::new(&proxies, 0, 1 - rank);
        let post = |poster: &mut Poster, count: u64| {
            for _ in 0..count {
                poster.post(Put { bytes: poster.posted, counter: 8 * u64::from(rank), ..tiny(1) });
            }
            poster.quiet();
        };
        let before = Instant::now();
        post(&mut poster, 5);
        assert_eq!(proxies.take_trace(), [], "off by default");
        proxies.start_trace(20);
        post(&mut poster, 30);
        let mut trace = Vec::new();
        eventually(|| {
            trace.extend(proxies.take_trace());
            trace.len() == 20
        });
        assert_eq!(trace.iter().map(|put| put.bytes).collect::<Vec<_>>(), (5..25).collect::<Vec<_>>());
        assert!(trace.iter().all(|put| put.peer == 1 - rank && put.queue == 0));
        assert!(trace.iter().all(|put| before < put.begin && put.begin <= put.end));
        post(&mut poster, 5);
        assert_eq!(proxies.take_trace(), []);
        it.barrier();
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_trace_has_no_put_that_was_under_way_at_its_start() {
    let device = VirtualGpu::new(VirtConfig::default());
    let completed = Arc::<AtomicU64>::default();
    let (puts, closed) = (Arc::default(), Arc::default());
    let queue = Box::new(Recording { puts, completed: completed.clone(), closed });
    let links = vec![PeerQueue { peer: 1, index: 0, queue }];
    let links = Links { links, mapped: Vec::new(), receiving: Vec::new() };
    let proxies = Proxies::start(&device, links).unwrap();
    let mut poster = Poster::new(&proxies, 0, 1);
    proxies.start_trace(10);
    poster.post(tiny(1));
    eventually(|| poster.taken() == 1);
    assert_eq!(proxies.take_trace(), []);
    proxies.start_trace(10);
    completed.store(1, Ordering::Release);
    eventually(|| poster.completed() == 1);
    assert_eq!(proxies.take_trace(), []);
}

/// The feature is lacking, or the device; on a machine with another device the name is what is
/// wrong.
#[test]
fn verbs_that_cannot_be_had_are_unavailable_on_every_rank() {
    let verbs = Some(VerbsOptions { devices: vec!["no such card".into()], ..VerbsOptions::default() });
    let options = TransportOptions { verbs, ..options(TransportKind::Verbs, 1) };
    let check = |error: Error| {
        let text = error.to_string();
        assert!(matches!(error, Error::Unavailable { .. }), "{text}");
        assert!(cfg!(feature = "rdma") || text.contains("cargo build --release --features rdma"), "{text}");
    };
    run_threads(2, TIMEOUT, |_, group| {
        let it = Rank::new(group, bytes(2));
        check(it.connect(&options).unwrap_err());
        check(wire_memory(&options, &it.device, &*it.group, 4096).unwrap_err());
        Ok(())
    })
    .unwrap();
    // On one rank alone: the other gets the reason.
    run_threads(2, TIMEOUT, |rank, group| {
        let it = Rank::new(group, bytes(2));
        let kind = if rank == 0 { TransportKind::Verbs } else { TransportKind::Shm };
        let options = TransportOptions { kind, ..options.clone() };
        let error = wire_memory(&options, &it.device, &*it.group, 4096).unwrap_err();
        if rank == 1 {
            let text = error.to_string();
            assert!(
                text.contains("rank 1 with rank 0: rank 0 failed") && text.contains("not available"),
                "{text}"
            );
        } else {
            check(error);
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn wire_memory_is_where_its_transport_reaches_it() {
    run_threads(2, TIMEOUT, |_, group| {
        let it = Rank::new(group, bytes(2));
        for (kind, on_host, is_shared) in [
            (TransportKind::Auto, false, true),
            (TransportKind::Direct, false, true),
            (TransportKind::Shm, true, true),
            (TransportKind::Tcp, true, false),
        ] {
            let memory = wire_memory(&options(kind, 1), &it.device, &*it.group, 4096)?;
            assert_eq!(memory.bytes(), 4096);
            assert_eq!(!memory.host_ptr().is_null(), on_host, "{kind}");
            assert_eq!(memory.export().is_ok(), is_shared, "{kind}");
        }
        Ok(())
    })
    .unwrap();
}

/// Device memory is not for threads to touch.
#[test]
fn transports_of_the_host_need_host_memory() {
    run_threads(2, TIMEOUT, |_, group| {
        let mut it = Rank::new(group, bytes(2));
        it.memory = Memory::alloc(&it.device, bytes(2), MemoryKind::Shareable, "wire")?.into();
        for kind in ALL {
            let error = it.connect(&options(kind, 1)).unwrap_err().to_string();
            assert!(error.contains("needs host memory"), "{error}");
        }
        Ok(())
    })
    .unwrap();
}

/// Mapped memory is the peer's own: one rank reads directly the bytes that the other writes.
#[test]
fn mapped_peers_share_memory_and_need_no_queue() {
    for kind in [TransportKind::Direct, TransportKind::Auto, TransportKind::Shm] {
        run_threads(3, TIMEOUT, |rank, group| {
            let it = Rank::new(group, bytes(3));
            let (ways, mut links) =
                open(&options(kind, 2), &it.device, &*it.group, 4096, &it.peers, TIMEOUT, Writer::Kernels)?;
            assert!(links.queues().is_empty());
            assert_eq!(ways.iter().map(|way| way.peer).collect::<Vec<_>>(), it.peers);
            let word = |memory: &Memory, at: u32| {
                // SAFETY: within the memory of a virtual GPU, whose addresses are this process's.
                unsafe { AtomicU64::from_ptr((memory.ptr().0 + u64::from(at) * 8) as *mut u64) }
            };
            for way in &ways {
                let theirs = way.mapped.as_ref().unwrap();
                assert_eq!(theirs.bytes(), 4096);
                word(theirs, rank).store(u64::from(100 + rank), Ordering::Release);
            }
            for way in &ways {
                eventually(|| {
                    word(&way.memory, way.peer).load(Ordering::Acquire) == u64::from(100 + way.peer)
                });
            }
            it.barrier();
            assert!(links.failures().is_empty());
            links.close();
            it.barrier();
            assert!(links.failures().is_empty(), "a goodbye is no death");
            Ok(())
        })
        .unwrap();
    }
}

#[test]
fn a_mapped_peer_that_dies_is_told() {
    for kind in [TransportKind::Direct, TransportKind::Shm] {
        run_threads(2, TIMEOUT, |rank, group| {
            let it = Rank::new(group, bytes(2));
            let (_ways, mut links) =
                open(&options(kind, 1), &it.device, &*it.group, 4096, &it.peers, TIMEOUT, Writer::Kernels)?;
            if rank == 1 {
                // Simulates a killed process: its descriptors are closed, without a goodbye.
                links.receiving.clear();
            } else {
                eventually(|| !links.failures().is_empty());
                let (peer, failure) = links.failures().remove(0);
                let text = failure.to_string();
                assert_eq!(peer, 1);
                assert!(text.contains("rank 0 with rank 1") && text.contains("it died"), "{text}");
            }
            it.barrier();
            Ok(())
        })
        .unwrap();
    }
}

/// A link that a test makes worse is one of queues, at its own end alone.
#[test]
fn shaped_links_are_queues_where_kernels_would_write() {
    run_threads(2, TIMEOUT, |rank, group| {
        let it = Rank::new(group, bytes(2));
        let mut options = options(TransportKind::Shm, 2);
        options.hooks.shaping = (rank == 1).then(|| Shaping::new(1));
        let (ways, mut links) =
            open(&options, &it.device, &*it.group, 4096, &it.peers, TIMEOUT, Writer::Kernels)?;
        assert_eq!(
            (links.queues().len(), ways[0].mapped.is_none()),
            if rank == 1 { (2, true) } else { (0, false) }
        );
        it.barrier();
        links.close();
        it.barrier();
        Ok(())
    })
    .unwrap();
}

/// A queue that needs the driver, as none may.
#[derive(Debug)]
struct Calling(Device);

impl PutQueue for Calling {
    fn put_with_counter(&mut self, _puts: &[Put]) -> Result<()> {
        self.0.free_memory().map(drop)
    }

    fn completed(&mut self) -> Result<u64> {
        Ok(0)
    }

    fn close(&mut self) {}
}

#[test]
fn a_proxy_that_calls_the_driver_makes_the_device_unusable() {
    let device = VirtualGpu::new(VirtConfig::default());
    let queue = Box::new(Calling(device.clone()));
    let proxy = Proxy::start(&device, PeerQueue { peer: 1, index: 0, queue }).unwrap();
    let mut poster = Poster { ring: proxy.handle(), posted: 0 };
    device.free_memory().unwrap();
    poster.post_blindly(tiny(1));
    eventually(|| proxy.failure().is_some());
    let fault = device.free_memory().unwrap_err().to_string();
    assert!(fault.contains("made by a proxy"), "{fault}");
}

/// A queue with a bug.
#[derive(Debug)]
struct Panicking;

impl PutQueue for Panicking {
    fn put_with_counter(&mut self, _puts: &[Put]) -> Result<()> {
        panic!("a bug of the test's");
    }

    fn completed(&mut self) -> Result<u64> {
        Ok(0)
    }

    fn close(&mut self) {}
}

#[test]
fn failures_of_all_peers_are_there_and_a_panic_is_one() {
    let device: Device = VirtualGpu::new(VirtConfig::default());
    let link = |peer| PeerQueue { peer, index: 0, queue: Box::new(Panicking) };
    let links = Links { links: vec![link(1), link(3)], mapped: Vec::new(), receiving: Vec::new() };
    let mut proxies = Proxies::start(&device, links).unwrap();
    for peer in [3, 1] {
        Poster { ring: proxies.handle(0, peer).unwrap(), posted: 0 }.post_blindly(tiny(1));
        eventually(|| proxies.failures().iter().any(|(failed, _)| *failed == peer));
    }
    for ((peer, failure), expected) in proxies.failures().into_iter().zip([1, 3]) {
        let text = failure.to_string();
        assert_eq!(peer, expected);
        assert!(text.contains(&format!("queue 0 to rank {peer}: its thread panicked")), "{text}");
        assert!(text.contains("a bug of the test's"), "{text}");
    }
    proxies.close(TIMEOUT);
}

#[test]
fn a_peer_that_was_given_up_does_not_keep_a_rank() {
    let device: Device = VirtualGpu::new(VirtConfig::default());
    let lists = [1, 2].map(|_| Arc::<Mutex<Vec<_>>>::default());
    let completed = [1, 2].map(|_| Arc::<AtomicU64>::default());
    let closed = Arc::<AtomicU64>::default();
    let link = |peer: u32| {
        let index = peer as usize - 1;
        let (puts, completed) = (lists[index].clone(), completed[index].clone());
        PeerQueue { peer, index: 0, queue: Box::new(Recording { puts, completed, closed: closed.clone() }) }
    };
    let links = Links { links: vec![link(1), link(2)], mapped: Vec::new(), receiving: Vec::new() };
    let mut proxies = Proxies::start(&device, links).unwrap();
    for peer in [1, 2] {
        Poster { ring: proxies.handle(0, peer).unwrap(), posted: 0 }.post_blindly(tiny(1));
    }
    eventually(|| lists.iter().all(|puts| !puts.lock().unwrap().is_empty()));
    // The put to rank 1 is sent while the proxies close, that to rank 2 never.
    proxies.give_up(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(300));
            completed[0].store(1, Ordering::Release);
        });
        let start = Instant::now();
        proxies.close(Duration::from_secs(3600));
        assert!(start.elapsed() < TIMEOUT);
    });
    assert_eq!(closed.load(Ordering::Acquire), 1, "rank 1 alone gets a goodbye");
}

/// A queue whose card's driver does not return until it is released.
#[derive(Debug)]
struct Stuck {
    interrupt: Interrupt,
    released: Arc<AtomicBool>,
}

impl PutQueue for Stuck {
    fn put_with_counter(&mut self, _puts: &[Put]) -> Result<()> {
        self.interrupt.during(&"ibv_post_send", || {
            while !self.released.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        Ok(())
    }

    fn completed(&mut self) -> Result<u64> {
        Ok(0)
    }

    fn close(&mut self) {}

    fn interrupt(&self) -> Interrupt {
        self.interrupt.clone()
    }
}

#[test]
fn a_proxy_in_a_call_that_does_not_return_is_named_and_left_behind() {
    let device: Device = VirtualGpu::new(VirtConfig::default());
    let released = Arc::<AtomicBool>::default();
    let queue = Box::new(Stuck { interrupt: Interrupt::default(), released: released.clone() });
    let link = PeerQueue { peer: 1, index: 0, queue };
    let links = Links { links: vec![link], mapped: Vec::new(), receiving: Vec::new() };
    let mut proxies = Proxies::start(&device, links).unwrap();
    assert!(proxies.in_calls().is_empty());
    let mut poster = Poster { ring: proxies.handle(0, 1).unwrap(), posted: 0 };
    poster.post_blindly(tiny(1));
    let named = ["the proxy of queue 0 to rank 1 is in ibv_post_send, which does not return"];
    eventually(|| proxies.in_calls() == named);
    let start = Instant::now();
    proxies.close(Duration::ZERO);
    assert!((JOIN_TIMEOUT..TIMEOUT).contains(&start.elapsed()), "{:?}", start.elapsed());
    let failure = proxies.failure().unwrap().to_string();
    assert!(failure.contains("queue 0 to rank 1 is in ibv_post_send"), "{failure}");
    drop(proxies);
    // The thread owns everything it uses, so it may continue at any time.
    released.store(true, Ordering::Release);
}

#[test]
fn names() {
    for kind in TransportKind::ALL {
        assert_eq!(kind.to_string().parse::<TransportKind>().unwrap(), kind);
    }
    assert!("pigeon".parse::<TransportKind>().unwrap_err().to_string().contains("pigeon"));
}

/// A queue that keeps its puts, and completes them only on request.
#[derive(Debug)]
struct Recording {
    puts: Arc<Mutex<Vec<Vec<Put>>>>,
    completed: Arc<AtomicU64>,
    closed: Arc<AtomicU64>,
}

impl PutQueue for Recording {
    fn put_with_counter(&mut self, puts: &[Put]) -> Result<()> {
        self.puts.lock().unwrap().push(puts.to_vec());
        Ok(())
    }

    fn completed(&mut self) -> Result<u64> {
        Ok(self.completed.load(Ordering::Acquire))
    }

    fn close(&mut self) {
        self.closed.fetch_add(1, Ordering::Release);
    }
}

#[test]
fn proxies_batch_publish_completion_and_say_goodbye_only_when_drained() {
    for drained in [true, false] {
        let device = VirtualGpu::new(VirtConfig::default());
        let (puts, completed, closed) =
            (Arc::default(), Arc::<AtomicU64>::default(), Arc::<AtomicU64>::default());
        let queue =
            Recording { puts: Arc::clone(&puts), completed: completed.clone(), closed: closed.clone() };
        let mut proxy =
            Proxy::start(&device, PeerQueue { peer: 3, index: 0, queue: Box::new(queue) }).unwrap();
        let mut poster = Poster { ring: proxy.handle(), posted: 0 };
        for value in 1..=100 {
            poster.post(tiny(value));
        }
        eventually(|| poster.taken() == 100);
        assert_eq!(poster.completed(), 0);
        completed.store(60, Ordering::Release);
        eventually(|| poster.completed() == 60);
        if drained {
            completed.store(100, Ordering::Release);
        }
        proxy.stop(if drained { TIMEOUT } else { Duration::from_millis(300) });
        assert_eq!(closed.load(Ordering::Acquire), u64::from(drained));
        let batches = puts.lock().unwrap();
        assert!(batches.iter().all(|batch| (1..=16).contains(&batch.len())));
        let values: Vec<u64> = batches.iter().flatten().map(|put| put.value).collect();
        assert_eq!(values, (1..=100).collect::<Vec<_>>());
    }
}

#[test]
fn puts_are_counted_before_they_are_made() {
    let device = VirtualGpu::new(VirtConfig::default());
    let (puts, completed) = (Arc::<Mutex<Vec<_>>>::default(), Arc::new(AtomicU64::new(1)));
    let queue = Recording { puts: Arc::clone(&puts), completed, closed: Arc::default() };
    let mut proxy = Proxy::start(&device, PeerQueue { peer: 3, index: 0, queue: Box::new(queue) }).unwrap();
    let mut poster = Poster { ring: proxy.handle(), posted: 0 };
    // The queue cannot make the put while this is locked.
    let made = puts.lock().unwrap();
    poster.post(tiny(1));
    eventually(|| proxy.stats().puts == 1);
    assert!(made.is_empty());
    drop(made);
    eventually(|| poster.completed() == 1);
    assert_eq!(proxy.stats().puts, 1);
    proxy.stop(TIMEOUT);
}
