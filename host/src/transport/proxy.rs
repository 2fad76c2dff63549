//! Proxies: threads that carry out the puts that kernels post.

use std::collections::VecDeque;
use std::mem::offset_of;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use epoxide_gpu::layout::{PutRequest, QUEUE_BYTES, QueueWords, RING_ENTRIES};

use super::links::{Links, PeerQueue};
use super::put::{Interrupt, Put, PutQueue};
use super::setup::{JOIN_TIMEOUT, caught, deadline};
use crate::driver::{Device, DevicePtr, Memory, MemoryKind, NoDriverCalls};
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::virtual_time::{Poller, spawn};

/// Most puts that are given to a queue at once.
const BATCH: usize = 16;
/// How long a dropped proxy may continue with posted requests. [`Proxies::close`] and
/// [`Proxy::stop`] take another grace.
const GRACE: Duration = Duration::from_millis(100);
/// Time between two readings of a proxy's call: one that does not return is in both.
const MOMENT: Duration = Duration::from_millis(20);

/// Statistics of a proxy's puts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct QueueStats {
    /// All puts.
    pub puts: u64,
    /// Bytes, counters not included.
    pub bytes: u64,
    /// Puts with a counter only.
    pub counter_puts: u64,
}

/// When a put was carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PutTrace {
    /// The destination rank.
    pub peer: u32,
    /// The queue's index among those to the peer.
    pub queue: u32,
    /// Bytes, the counter not included.
    pub bytes: u64,
    /// The proxy took it out of the ring.
    pub begin: Instant,
    /// The proxy saw that its bytes had left.
    pub end: Instant,
}

/// All proxies of a rank, and the receiving side of its links. Closed on drop.
#[derive(Debug)]
pub struct Proxies {
    proxies: Vec<Proxy>,
    links: Links,
}

impl Proxies {
    /// Starts a proxy for every queue of `links`; `device` runs the kernels that post.
    pub fn start(device: &Device, mut links: Links) -> Result<Proxies> {
        let queues = links.take();
        let proxies = queues.into_iter().map(|link| Proxy::start(device, link)).collect::<Result<_>>()?;
        Ok(Proxies { proxies, links })
    }

    /// The proxies, in ascending order of (queue, peer).
    pub fn all(&self) -> &[Proxy] {
        &self.proxies
    }

    /// The [`QueueWords`] and ring of a queue, as a kernel reaches them; `None` where there is no
    /// such queue.
    pub fn handle(&self, queue: u32, peer: u32) -> Option<DevicePtr> {
        let here = |proxy: &&Proxy| proxy.queue == queue && proxy.peer == peer;
        self.proxies.iter().find(here).map(Proxy::handle)
    }

    /// The wire memory of a peer that is mapped here.
    pub fn mapped(&self, peer: u32) -> Option<&Arc<Memory>> {
        self.links.mapped(peer)
    }

    /// The failures of all proxies, then of the receiving side, with their peers.
    pub fn failures(&self) -> Vec<(u32, Error)> {
        let failure = |proxy: &Proxy| Some((proxy.peer, proxy.failure()?));
        self.proxies.iter().filter_map(failure).chain(self.links.failures()).collect()
    }

    /// The first of [`Proxies::failures`].
    pub fn failure(&self) -> Option<Error> {
        self.failures().into_iter().next().map(|(_, failure)| failure)
    }

    /// The proxies that are in the same call of the system now and a moment later, with the call.
    /// For the report of an expired wait.
    pub fn in_calls(&self) -> Vec<String> {
        let before: Vec<_> = self.proxies.iter().map(Proxy::call).collect();
        if before.iter().all(Option::is_none) {
            return Vec::new();
        }
        std::thread::sleep(MOMENT);
        let still = self
            .proxies
            .iter()
            .zip(before)
            .filter(|(proxy, before)| before.is_some() && proxy.call() == *before);
        let name = |(proxy, call): (&Proxy, Option<(&str, u64)>)| {
            let call = call.map_or("", |(call, _)| call);
            format!(
                "the proxy of queue {} to rank {} is in {call}, which does not return",
                proxy.queue, proxy.peer
            )
        };
        still.map(name).collect()
    }

    /// Sum over all proxies.
    pub fn stats(&self) -> QueueStats {
        self.proxies.iter().map(Proxy::stats).fold(QueueStats::default(), |sum, one| QueueStats {
            puts: sum.puts + one.puts,
            bytes: sum.bytes + one.bytes,
            counter_puts: sum.counter_puts + one.counter_puts,
        })
    }

    /// Records every put from now on, up to `capacity` per proxy; earlier records are lost.
    pub fn start_trace(&self, capacity: usize) {
        for proxy in &self.proxies {
            let mut trace = lock(&proxy.shared.trace);
            *trace = Trace { since: Some(Instant::now()), puts: Vec::new() };
            proxy.shared.trace_capacity.store(capacity as u64, Ordering::Release);
        }
    }

    /// Ends the recording; the puts by (queue, peer), and each queue's in order.
    pub fn take_trace(&self) -> Vec<PutTrace> {
        let take = |proxy: &Proxy| {
            proxy.shared.trace_capacity.store(0, Ordering::Release);
            std::mem::take(&mut *lock(&proxy.shared.trace)).puts
        };
        self.proxies.iter().flat_map(take).collect()
    }

    /// Ends the waits of the proxies to `peer`, which need not carry out what was posted.
    pub fn give_up(&self, peer: u32) {
        let to_peer = self.proxies.iter().filter(|proxy| proxy.peer == peer);
        to_peer.for_each(|proxy| proxy.interrupt.raise());
    }

    /// Ends all proxies: a proxy that carries out all posted puts within `grace` sends a goodbye,
    /// the others are interrupted. Then the receiving side is closed. Before the call, kernels must
    /// have stopped posting, and have got all that they need of peers, whose later puts fail.
    pub fn close(&mut self, grace: Duration) {
        stop(&mut self.proxies, grace);
        self.links.close();
    }
}

impl Drop for Proxies {
    fn drop(&mut self) {
        self.close(GRACE);
    }
}

/// Ends the threads of all `proxies` at the same time.
fn stop(proxies: &mut [Proxy], grace: Duration) {
    let until = deadline(grace);
    for proxy in proxies.iter() {
        proxy.shared.stop.store(true, Ordering::Release);
        if let Some(thread) = &proxy.thread {
            thread.thread().unpark();
        }
    }
    let running = |proxy: &Proxy| proxy.thread.as_ref().is_some_and(|thread| !thread.is_finished());
    while proxies.iter().any(running) && Instant::now() < until {
        std::thread::sleep(Duration::from_micros(200));
    }
    for proxy in proxies.iter() {
        proxy.interrupt.raise();
        if let Some(thread) = &proxy.thread {
            thread.thread().unpark();
        }
    }
    let until = deadline(JOIN_TIMEOUT);
    while proxies.iter().any(running) && Instant::now() < until {
        std::thread::sleep(Duration::from_micros(200));
    }
    for proxy in proxies {
        let Some(thread) = proxy.thread.take() else { continue };
        if !thread.is_finished() {
            // The leaked thread owns what it uses: the ring and the queue, with the wire memory at
            // both ends. So no memory that it may still touch is freed; it ends when its call
            // returns.
            let error = proxy.stuck();
            tracing::error!("left behind: {error}");
            lock(&proxy.shared.failure).get_or_insert(error);
        } else {
            let _ = thread.join();
        }
    }
}

/// A thread that takes the requests out of a queue's ring and carries them out. Ended on drop.
#[derive(Debug)]
pub struct Proxy {
    peer: u32,
    queue: u32,
    ring: Arc<Memory>,
    shared: Arc<ProxyState>,
    interrupt: Interrupt,
    thread: Option<JoinHandle<()>>,
}

/// The puts that a trace has recorded since its start.
#[derive(Debug, Default)]
struct Trace {
    since: Option<Instant>,
    puts: Vec<PutTrace>,
}

#[derive(Debug, Default)]
struct ProxyState {
    stop: AtomicBool,
    failure: Mutex<Option<Error>>,
    puts: AtomicU64,
    bytes: AtomicU64,
    counter_puts: AtomicU64,
    /// 0: nothing is recorded.
    trace_capacity: AtomicU64,
    trace: Mutex<Trace>,
}

impl ProxyState {
    /// Adds puts to the statistics, or takes them back.
    fn count(&self, batch: &[Put], change: fn(&AtomicU64, u64, Ordering) -> u64) {
        let bytes = batch.iter().fold(0, |sum: u64, put| sum.saturating_add(put.bytes));
        let counters = batch.iter().filter(|put| put.bytes == 0).count();
        change(&self.puts, batch.len() as u64, Ordering::Relaxed);
        change(&self.bytes, bytes, Ordering::Relaxed);
        change(&self.counter_puts, counters as u64, Ordering::Relaxed);
    }
}

impl Proxy {
    /// Starts the proxy of a link; `device` runs the kernels that post.
    pub fn start(device: &Device, link: PeerQueue) -> Result<Proxy> {
        let PeerQueue { peer, index, queue } = link;
        let ring = Arc::new(Memory::alloc(device, QUEUE_BYTES, MemoryKind::MappedHost, "queue of puts")?);
        ring.watch_host();
        let shared = Arc::new(ProxyState::default());
        let interrupt = queue.interrupt();
        let mut worker = Worker {
            peer,
            index,
            queue,
            ring: ring.clone(),
            shared: shared.clone(),
            interrupt: interrupt.clone(),
            idle: Idle { since: None, is_virtual: device.info().is_virtual, is_first: index == 0 },
            taken: 0,
            posted: 0,
            completed: 0,
            traced: VecDeque::new(),
        };
        let thread = spawn(format!("to {peer} q{index}"), move || {
            let _rule = NoDriverCalls::new("a proxy");
            let run = || {
                worker.run(&Poller::of_this_thread());
                Ok(())
            };
            let failed = |reason| Error::internal("proxy", format!("queue {index} to rank {peer}: {reason}"));
            if let Err(error) = caught(run, failed) {
                lock(&worker.shared.failure).get_or_insert(error);
            }
        })
        .map_err(|error| Error::system("spawn thread", error))?;
        Ok(Proxy { peer, queue: index, ring, shared, interrupt, thread: Some(thread) })
    }

    /// The rank that it puts to.
    pub fn peer(&self) -> u32 {
        self.peer
    }

    /// The queue's index among those to the peer.
    pub fn queue(&self) -> u32 {
        self.queue
    }

    /// The [`QueueWords`] and the ring, as a kernel reaches them.
    pub fn handle(&self) -> DevicePtr {
        self.ring.ptr()
    }

    /// Why the proxy carries out nothing any more: it takes and discards posted puts.
    pub fn failure(&self) -> Option<Error> {
        lock(&self.shared.failure).clone()
    }

    /// Statistics of its puts so far.
    pub fn stats(&self) -> QueueStats {
        QueueStats {
            puts: self.shared.puts.load(Ordering::Relaxed),
            bytes: self.shared.bytes.load(Ordering::Relaxed),
            counter_puts: self.shared.counter_puts.load(Ordering::Relaxed),
        }
    }

    /// The call that it is in now, and its number.
    fn call(&self) -> Option<(&'static str, u64)> {
        self.interrupt.call()
    }

    /// The error of one that does not end.
    fn stuck(&self) -> Error {
        let what = match self.call() {
            Some((call, _)) => format!("is in {call}"),
            None => "is in no call of the system's".to_owned(),
        };
        let reason = format!(
            "queue {} to rank {} {what} since it was told to end {JOIN_TIMEOUT:?} ago",
            self.queue, self.peer
        );
        Error::timeout("proxy", reason)
    }

    /// Ends the thread. If all posted puts have been sent within `grace`, the proxy sends a
    /// goodbye; otherwise it is interrupted, and looks dead to the peer.
    pub fn stop(&mut self, grace: Duration) {
        stop(std::slice::from_mut(self), grace);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop(GRACE);
    }
}

/// The thread's own.
struct Worker {
    peer: u32,
    index: u32,
    queue: Box<dyn PutQueue>,
    ring: Arc<Memory>,
    shared: Arc<ProxyState>,
    interrupt: Interrupt,
    idle: Idle,
    /// Requests read from the ring.
    taken: u64,
    /// Requests passed to the queue.
    posted: u64,
    completed: u64,
    /// Number, begin and bytes of the traced puts that are under way.
    traced: VecDeque<(u64, Instant, u64)>,
}

impl Worker {
    fn run(&mut self, poller: &Poller) {
        let mut batch = Vec::with_capacity(BATCH);
        let mut healthy = true;
        loop {
            // Load before reading the ring: puts posted before the order to stop are carried out.
            let stop = self.shared.stop.load(Ordering::Acquire);
            let taken = self.take(&mut batch);
            if !batch.is_empty() {
                poller.acts();
            }
            let completed = self.completed;
            if healthy && let Err(error) = taken.and_then(|()| self.carry_out(&batch)) {
                healthy = false;
                tracing::debug!("proxy of queue {} to rank {}: {error}", self.index, self.peer);
                lock(&self.shared.failure).get_or_insert(error);
            }
            if stop {
                if healthy && batch.is_empty() && self.completed == self.posted {
                    self.queue.close();
                    return;
                }
                if !healthy || self.interrupt.is_raised() {
                    return;
                }
            }
            if self.completed != completed {
                poller.acts();
            } else if batch.is_empty() {
                poller.found_nothing();
            }
            if batch.is_empty() {
                self.idle.wait(self.completed < self.posted);
            } else {
                self.idle.since = None;
            }
        }
    }

    /// Reads the posted requests, up to a batch, and frees their entries. An error where a device
    /// that checks finds that a kernel posted one before it had written it, or the bytes that it is
    /// for.
    fn take(&mut self, batch: &mut Vec<Put>) -> Result<()> {
        batch.clear();
        while batch.len() < BATCH {
            let entry =
                size_of::<QueueWords>() as u64 + self.taken % RING_ENTRIES * size_of::<PutRequest>() as u64;
            let word = |field: usize| self.word(entry + field as u64);
            if word(offset_of!(PutRequest, ticket)).load(Ordering::Acquire) != self.taken + 1 {
                break;
            }
            self.ring.host_has_loaded(entry + offset_of!(PutRequest, ticket) as u64)?;
            // The rest of the entry.
            const TICKET: u64 = offset_of!(PutRequest, from) as u64;
            self.ring.host_takes(entry + TICKET, size_of::<PutRequest>() as u64 - TICKET)?;
            let field = |field: usize| word(field).load(Ordering::Relaxed);
            let put = Put {
                from: field(offset_of!(PutRequest, from)),
                to: field(offset_of!(PutRequest, to)),
                bytes: field(offset_of!(PutRequest, bytes)),
                counter: field(offset_of!(PutRequest, counter)),
                value: field(offset_of!(PutRequest, value)),
            };
            if let Some(source) = self.queue.source() {
                source.host_takes(put.from, put.bytes)?;
            }
            batch.push(put);
            self.taken += 1;
        }
        if !batch.is_empty() {
            self.ring.host_store(offset_of!(QueueWords, taken) as u64, self.taken)?;
        }
        Ok(())
    }

    fn carry_out(&mut self, batch: &[Put]) -> Result<()> {
        if !batch.is_empty() {
            let capacity = self.shared.trace_capacity.load(Ordering::Acquire);
            if capacity > 0 {
                let begin = Instant::now();
                let numbered = (self.posted + 1..).zip(batch);
                self.traced.extend(numbered.map(|(number, put)| (number, begin, put.bytes)));
            }
            // Count first: as long as the queue works, the counts include every put that a peer has
            // received. A batch that fails is not counted, though some of it may have arrived.
            self.shared.count(batch, AtomicU64::fetch_add);
            let put = self.queue.put_with_counter(batch);
            put.inspect_err(|_| self.shared.count(batch, AtomicU64::fetch_sub))?;
            self.posted += batch.len() as u64;
        }
        if self.completed < self.posted {
            let completed = self.queue.completed()?;
            if completed > self.completed {
                self.completed = completed;
                // The record of a put is there once its completion is seen.
                self.trace_completed();
                self.ring.host_store(offset_of!(QueueWords, completed) as u64, completed)?;
            }
        }
        // Behind the completion of puts that have left before the queue ended.
        match self.queue.failure() {
            Some(error) if self.completed == self.posted => Err(error),
            _ => Ok(()),
        }
    }

    fn trace_completed(&mut self) {
        if self.traced.is_empty() {
            return;
        }
        let end = Instant::now();
        let capacity = self.shared.trace_capacity.load(Ordering::Acquire) as usize;
        let mut trace = lock(&self.shared.trace);
        while let Some((number, begin, bytes)) = self.traced.front().copied() {
            if number > self.completed {
                break;
            }
            self.traced.pop_front();
            // Puts that were under way at the start are none of it.
            if trace.since.is_some_and(|since| begin >= since) && trace.puts.len() < capacity {
                trace.puts.push(PutTrace { peer: self.peer, queue: self.index, bytes, begin, end });
            }
        }
    }

    /// A u64 of the queue's memory. `offset` is a multiple of 8 within it.
    fn word(&self, offset: u64) -> &AtomicU64 {
        debug_assert!(offset.is_multiple_of(8) && offset + 8 <= QUEUE_BYTES);
        // SAFETY: within the ring's memory, which this worker keeps and which is aligned to more
        // than 8. The kernel and this thread access its words with atomic loads and stores, or in
        // the order that `ticket` and `taken` establish.
        unsafe { AtomicU64::from_ptr(self.ring.host_ptr().add(offset as usize).cast()) }
    }
}

/// How a proxy waits for work: it spins, then yields, then sleeps for longer and longer, an eighth
/// of the wait so far. With a GPU the sleep is 100 us at most, 50 with puts under way. With a
/// virtual one it is 1 ms, and after a second without any puts 4 ms. 48 idle proxies then take 5 %
/// of one processor, measured on 2 virtual processors (18 % at 1 ms). If a processor carries the
/// puts, as with Soft-RoCE, waking every 50 us takes time from it. Writes of 1 MiB are 3 % faster
/// with 1 ms, and 10 % faster on busy processors.
///
/// Further queues to a peer, which carry only rows, sleep after 30 us. With eight queues, sending
/// and receiving threads are as many as processors, and a spinning thread takes the processor from
/// a copying one. Calls of 128 tokens over tcp thus take half the time.
#[derive(Debug)]
struct Idle {
    since: Option<Instant>,
    /// Kernels are interpreted, by threads that need the same processors.
    is_virtual: bool,
    /// The queue is the first one to its peer, which carries the words that a call begins with.
    is_first: bool,
}

impl Idle {
    /// `in_flight`: puts are under way, and callers may wait for their end.
    fn wait(&mut self, in_flight: bool) {
        let elapsed = self.since.get_or_insert_with(Instant::now).elapsed();
        let (spin, give_way) = match (self.is_virtual, self.is_first) {
            (true, _) => (5, 20),
            (false, true) => (1_000, 5_000),
            (false, false) => (30, 30),
        };
        if elapsed < Duration::from_micros(spin) {
            for _ in 0..16 {
                std::hint::spin_loop();
            }
        } else if elapsed < Duration::from_micros(give_way) {
            std::thread::yield_now();
        } else {
            let longest = match elapsed.as_secs() {
                _ if in_flight && !self.is_virtual => Duration::from_micros(50),
                // A machine with GPUs has spare processors, and a training step may begin after any
                // pause.
                _ if !self.is_virtual => Duration::from_micros(100),
                seconds if seconds == 0 || in_flight => Duration::from_millis(1),
                _ => Duration::from_millis(4),
            };
            // An order to stop ends it.
            std::thread::park_timeout(
                (elapsed / 8).clamp(Duration::from_micros(if self.is_virtual { 100 } else { 20 }), longest),
            );
        }
    }
}
