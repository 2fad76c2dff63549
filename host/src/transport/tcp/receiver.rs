//! The receiving ends: a thread per connection.
//!
//! The invariant: the bytes of a put are stored behind the counter of the put before it, and its
//! counter behind all of its bytes. A further connection stores a part once all earlier puts of the
//! queue are complete. The first connection stores the counter once all parts have been stored. So
//! puts of a queue are stored one after the other, on any connections.

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::acceptor::Place;
use super::frame::{FAREWELL, Frame, HEADER, PART_HEADER, Part, read_header, read_part, refusal};
use super::{Patience, left};
use crate::driver::NoDriverCalls;
use crate::error::{Error, Result};
use crate::group::internal::{Signer, TAG};
use crate::lock::lock;
use crate::transport::links::Receiving;
use crate::transport::put::Put;
use crate::transport::setup::{JOIN_TIMEOUT, LinkEnds, Setup, WireHost, caught, deadline, join_until};
use crate::virtual_time::spawn;

/// A connection of a peer that has been let in.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) socket: TcpStream,
    /// Where the job has a secret: checks the headers.
    pub(super) signer: Option<Signer>,
}

/// All receiving ends of a rank.
#[derive(Debug)]
pub(super) struct Receivers {
    pub(super) readers: Vec<(Arc<TcpStream>, JoinHandle<()>)>,
    queues: Vec<Arc<Progress>>,
    shared: Arc<ReceiverState>,
}

#[derive(Debug, Default)]
struct ReceiverState {
    /// This rank receives no more, so broken connections are no failures.
    closing: AtomicBool,
    /// The first failure of each peer.
    failures: Mutex<BTreeMap<u32, Error>>,
}

impl Receivers {
    /// `incoming` has all connections of each queue. `patience` is that of a queue.
    pub(super) fn start(
        setup: &Setup<'_>,
        incoming: BTreeMap<Place, Incoming>,
        patience: impl Fn(u32) -> Patience,
    ) -> Result<Receivers> {
        let mut receivers = Receivers { readers: Vec::new(), queues: Vec::new(), shared: Arc::default() };
        let mut queues: BTreeMap<(u32, u32), Vec<(u32, Incoming)>> = BTreeMap::new();
        for (Place { queue, peer, connection }, incoming) in incoming {
            queues.entry((queue, peer)).or_default().push((connection, incoming));
        }
        for ((queue, peer), connections) in queues {
            let (sockets, signers): (Vec<_>, Vec<_>) = connections
                .into_iter()
                .map(|(connection, Incoming { socket, signer })| (Arc::new(socket), (connection, signer)))
                .unzip();
            let stored = sockets.iter().skip(1).map(|_| AtomicU64::new(0)).collect();
            let progress = Progress { sockets: sockets.clone(), stored, ..Progress::default() };
            let progress = Arc::new(progress);
            receivers.queues.push(progress.clone());
            for (socket, (connection, mut signer)) in sockets.into_iter().zip(signers) {
                let reader = Reader {
                    ends: setup.ends(peer),
                    socket: socket.clone(),
                    target: WireHost::of(setup)?,
                    progress: progress.clone(),
                    timeout: setup.options.timeout,
                    patience: patience(queue),
                };
                let shared = receivers.shared.clone();
                let run = move || {
                    let _rule = NoDriverCalls::new("a receiver");
                    let panicked = |reason| reader.ends.error("receive", reason);
                    if let Err(error) = caught(|| reader.run(connection, signer.as_mut()), panicked) {
                        if !shared.closing.load(Ordering::Acquire) {
                            tracing::debug!("connection {connection} of queue {queue}: {error}");
                            lock(&shared.failures).entry(peer).or_insert(error);
                        }
                        // Behind the failure: it ends the other connections of the queue.
                        reader.progress.fail();
                    }
                };
                let thread = spawn(format!("from {peer} q{queue}.{connection}"), run);
                let thread = thread.map_err(|error| Error::system("spawn thread", error))?;
                receivers.readers.push((socket, thread));
            }
        }
        Ok(receivers)
    }
}

impl Receiving for Receivers {
    fn failures(&self) -> Vec<(u32, Error)> {
        lock(&self.shared.failures).iter().map(|(peer, error)| (*peer, error.clone())).collect()
    }

    fn close(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        for (socket, _) in &self.readers {
            // A peer that left does not need it; it always fits the buffer.
            let _ = rustix::net::send(socket.as_fd(), &FAREWELL.to_le_bytes(), send_flags());
            // Ends the reader's wait.
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
        self.queues.iter().for_each(|queue| queue.fail());
        let until = deadline(JOIN_TIMEOUT);
        for (_, thread) in self.readers.drain(..) {
            join_until(thread, until);
        }
    }
}

impl Drop for Receivers {
    fn drop(&mut self) {
        self.close();
    }
}

/// The progress of a queue's connections.
#[derive(Debug, Default)]
struct Progress {
    /// One for each connection of the queue.
    sockets: Vec<Arc<TcpStream>>,
    /// Puts that are complete: their counters are stored.
    complete: AtomicU64,
    /// For each further connection the number of the last put whose part it has stored.
    stored: Vec<AtomicU64>,
    failed: AtomicBool,
    /// Threads that block in [`Progress::wait`].
    waiting: AtomicU64,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Progress {
    /// Publishes a number; everything that this thread has stored is visible behind it.
    fn publish(&self, word: &AtomicU64, value: u64) {
        // In one order with `waiting`: either a thread that waits finds the number, or it is woken.
        word.store(value, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            drop(lock(&self.lock));
            self.changed.notify_all();
        }
    }

    /// Ends the queue: all waits, and all connections.
    fn fail(&self) {
        self.failed.store(true, Ordering::SeqCst);
        drop(lock(&self.lock));
        self.changed.notify_all();
        for socket in &self.sockets {
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
    }

    /// How long no connection of the queue has received bytes.
    fn idle_time(&self) -> Duration {
        self.sockets.iter().filter_map(|socket| since_last_bytes(socket)).min().unwrap_or(Duration::MAX)
    }

    /// Waits until a number that is published has reached `value`, unless no connection of the
    /// queue receives bytes for so long a time.
    fn wait(&self, word: &AtomicU64, value: u64, timeout: Duration, patience: Patience) -> Outcome {
        let outcome = || {
            if word.load(Ordering::SeqCst) >= value {
                Some(Outcome::Reached)
            } else if self.failed.load(Ordering::SeqCst) {
                Some(Outcome::Failed)
            } else {
                None
            }
        };
        let begin = Instant::now();
        let mut end = deadline(timeout);
        loop {
            if let Some(outcome) = outcome() {
                return outcome;
            }
            if !patience.polls_on(begin) {
                break;
            }
        }
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let mut guard = lock(&self.lock);
        let outcome = loop {
            if let Some(outcome) = outcome() {
                break outcome;
            }
            if Instant::now() >= end {
                let left = timeout.saturating_sub(self.idle_time());
                if left.is_zero() {
                    break Outcome::Expired;
                }
                end = deadline(left);
            }
            let woken = self.changed.wait_timeout(guard, left(end));
            guard = woken.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        };
        drop(guard);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        outcome
    }
}

/// How long ago the socket received its last bytes; `None` where the system does not say.
fn since_last_bytes(socket: &TcpStream) -> Option<Duration> {
    // SAFETY: a struct of numbers, for which zeroes are valid.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    let to = (&raw mut info).cast();
    // SAFETY: the pointers are valid, and the system writes no more than `length` bytes.
    let code =
        unsafe { libc::getsockopt(socket.as_raw_fd(), libc::IPPROTO_TCP, libc::TCP_INFO, to, &mut length) };
    (code == 0).then(|| Duration::from_millis(info.tcpi_last_data_recv.into()))
}

/// The end of a wait for another connection of the queue.
enum Outcome {
    Reached,
    /// Another connection has failed, or this rank takes nothing any more.
    Failed,
    Expired,
}

fn send_flags() -> rustix::net::SendFlags {
    rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT
}

/// The receiving end of a connection.
struct Reader {
    ends: LinkEnds,
    socket: Arc<TcpStream>,
    target: WireHost,
    /// Shared by the connections of the queue.
    progress: Arc<Progress>,
    /// The longest wait for another connection while the queue receives nothing.
    timeout: Duration,
    patience: Patience,
}

impl Reader {
    /// Receives puts, or on a further connection parts, until the peer's goodbye.
    fn run(&self, connection: u32, mut signer: Option<&mut Signer>) -> Result<()> {
        let (memory, further) = (self.target.bytes(), self.progress.stored.len() as u64);
        loop {
            let frame = match connection {
                0 => self.take_header(signer.as_deref_mut(), |header| read_header(header, memory, further)),
                _ => self.take_header(signer.as_deref_mut(), |header: &[u8; PART_HEADER]| {
                    read_part(header, memory)
                }),
            };
            match frame? {
                Frame::Goodbye => return Ok(()),
                Frame::Put(put, parts) => self.store(&put, parts as usize)?,
                Frame::Part(part) => self.store_part(&part, connection as usize - 1)?,
            }
        }
    }

    /// Takes a header, and where there is a `signer` the signature behind it.
    fn take_header<const BYTES: usize>(
        &self,
        signer: Option<&mut Signer>,
        read: impl Fn(&[u8; BYTES]) -> Result<Frame, String>,
    ) -> Result<Frame> {
        let mut bytes = [0; HEADER + TAG];
        let length = BYTES + if signer.is_some() { TAG } else { 0 };
        // SAFETY: `bytes` is at least as long: no header is longer than `HEADER`.
        unsafe { self.take(bytes.as_mut_ptr(), length)? };
        checked(&bytes, signer, read).map_err(|reason| {
            let _ = rustix::net::send(self.socket.as_fd(), &refusal(&reason), send_flags());
            self.ends.error("receive", format!("refused a frame of it: {reason}"))
        })
    }

    fn store(&self, put: &Put, parts: usize) -> Result<()> {
        let progress = &self.progress;
        if put.bytes > 0 {
            self.target.memory.host_gives(put.to, put.bytes)?;
        }
        // SAFETY: the caller has checked that all bytes are in the target, which the reader keeps.
        unsafe { self.take(self.target.at(put.to), put.bytes as usize)? };
        if !progress.stored.is_empty() {
            // Parts of later puts may be stored over it, by other threads.
            self.target.memory.host_takes(put.to, put.bytes)?;
        }
        // Only this thread stores it.
        let number = progress.complete.load(Ordering::Relaxed) + 1;
        for (connection, stored) in (1..).zip(&progress.stored[..parts]) {
            self.wait(stored, number, || format!("the part on connection {connection} of put {number}"))?;
        }
        self.target.memory.host_store(put.counter, put.value)?;
        if !progress.stored.is_empty() {
            progress.publish(&progress.complete, number);
        }
        Ok(())
    }

    /// `index`: that of the further connection.
    fn store_part(&self, part: &Part, index: usize) -> Result<()> {
        let before = part.number.saturating_sub(1);
        self.wait(&self.progress.complete, before, || format!("put {before}, ahead of a part"))?;
        self.target.memory.host_gives(part.to, part.bytes)?;
        // SAFETY: the caller has checked that all bytes are in the target, which the reader keeps.
        unsafe { self.take(self.target.at(part.to), part.bytes as usize)? };
        // The thread of the put passes the part on.
        self.target.memory.host_takes(part.to, part.bytes)?;
        self.progress.publish(&self.progress.stored[index], part.number);
        Ok(())
    }

    /// Waits for another connection of the queue.
    fn wait(&self, word: &AtomicU64, value: u64, what: impl Fn() -> String) -> Result<()> {
        let reason = match self.progress.wait(word, value, self.timeout, self.patience) {
            Outcome::Reached => return Ok(()),
            Outcome::Failed => "another connection of the queue has ended".to_owned(),
            Outcome::Expired => {
                format!("{} did not come within {:?}: it hangs, or the network is down", what(), self.timeout)
            }
        };
        Err(self.ends.error("receive", reason))
    }

    /// Receives exactly `len` bytes from the connection.
    ///
    /// # Safety
    /// `to` is live memory of at least `len` bytes.
    unsafe fn take(&self, to: *mut u8, len: usize) -> Result<()> {
        let (mut taken, mut since) = (0, None);
        // A polling thread blocks only after no bytes have arrived for a while.
        let mut flags = self.patience.flags();
        while taken < len {
            // SAFETY: within the caller's memory. The kernel writes through the address; no
            // reference is made.
            let count =
                unsafe { libc::recv(self.socket.as_raw_fd(), to.add(taken).cast(), len - taken, flags) };
            match count {
                0 => {
                    let reason =
                        "the connection ended without a goodbye: the rank died, or gave up puts under way";
                    return Err(self.ends.error("receive", reason));
                }
                1.. => {
                    taken += count as usize;
                    (since, flags) = (None, self.patience.flags());
                }
                _ => {
                    let error = std::io::Error::last_os_error();
                    match Errno::from_io_error(&error) {
                        Some(Errno::INTR) => {}
                        Some(Errno::AGAIN) => {
                            if !self.patience.polls_on(*since.get_or_insert_with(Instant::now)) {
                                flags = 0;
                            }
                        }
                        _ => {
                            return Err(self.ends.error("receive", format!("the connection broke: {error}")));
                        }
                    }
                }
            }
        }
        Ok(())
    }
}

/// Checks the signature of a header, where there is a `signer`, and reads it.
fn checked<const BYTES: usize>(
    bytes: &[u8; HEADER + TAG],
    signer: Option<&mut Signer>,
    read: impl Fn(&[u8; BYTES]) -> Result<Frame, String>,
) -> Result<Frame, String> {
    let (header, rest) = bytes.split_first_chunk::<BYTES>().ok_or("cut short")?;
    if let Some(signer) = signer {
        let tag = rest.first_chunk::<TAG>().ok_or("cut short")?;
        signer.check(header, tag).map_err(|forged| forged.to_string())?;
    }
    read(header)
}
