//! The sending end of a queue: its first connection, over which its proxy sends, and a thread for
//! each further one.
//!
//! The invariant: a connection carries its frames in the order of their puts. The receiving end
//! does the rest of the ordering.

use std::collections::VecDeque;
use std::io::Read;
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use super::frame::{FAREWELL, GOODBYE, MAX_REASON, Part, header, part_header, signed, word32};
use super::{Patience, wait_for};
use crate::driver::{Memory, NoDriverCalls};
use crate::error::{Error, Result};
use crate::foreign::quoted;
use crate::group::internal::Signer;
use crate::lock::lock;
use crate::transport::put::{GOODBYE_BEFORE, Interrupt, Put, PutQueue};
use crate::transport::setup::{
    JOIN_TIMEOUT, LinkEnds, POLL_INTERVAL, Setup, WireHost, caught, deadline, join_until,
};
use crate::virtual_time::spawn;

/// Puts per system call: two pieces each, of at most 1024.
const WRITE_PUTS: usize = 32;
/// How long a goodbye may take.
const GOODBYE_TIME: Duration = Duration::from_millis(200);
/// Fewest bytes of a part, except in tests. Sending as many takes about as long as waking a thread.
const SMALLEST_PART: u64 = 16 << 10;
/// Parts begin at multiples of this many bytes of their put.
const PART_ALIGNMENT: u64 = 64;
/// Most parts that wait for a further connection. Headers are sent behind the parts of their batch,
/// and a part is stored only behind the headers of earlier puts. So when a part waits for room, the
/// headers of earlier parts must have been sent.
const MOST_WAITING: u64 = 64;
const _: () = assert!(MOST_WAITING >= 2 * WRITE_PUTS as u64);

/// A queue over one or more connections.
#[derive(Debug)]
pub(super) struct TcpQueue {
    pub(super) first: Connection,
    further: Vec<Further>,
    smallest_part: u64,
    /// Puts of which the first connection has its part.
    sent: u64,
    /// The number and the parts of puts that further connections may not have sent.
    divided: VecDeque<(u64, usize)>,
    /// The peer takes no further puts. Puts sent before count as sent.
    ended: Option<Error>,
    failed: Option<Error>,
}

impl TcpQueue {
    /// `sockets`: the queue's connections, and what signs the headers of each where the job has a
    /// secret; at least one.
    pub(super) fn new(
        setup: &Setup<'_>,
        ends: LinkEnds,
        sockets: Vec<(TcpStream, Option<Signer>)>,
        patience: Patience,
    ) -> Result<TcpQueue> {
        let interrupt = Interrupt::default();
        let connection = |(socket, signer): (TcpStream, Option<Signer>)| {
            socket.set_nonblocking(true).map_err(|error| ends.error("connect", error.to_string()))?;
            Ok(Connection {
                ends,
                socket,
                signer,
                source: WireHost::of(setup)?,
                timeout: setup.options.timeout,
                interrupt: interrupt.clone(),
                calls: Interrupt::default(),
                stopped: Arc::default(),
                farewell: Vec::new(),
                patience,
            })
        };
        let mut connections = sockets.into_iter().map(connection);
        let none = || Error::internal("connect", "a queue without a connection");
        let mut first = connections.next().ok_or_else(none)??;
        first.calls = interrupt.clone();
        let start = |(number, connection): (usize, Result<Connection>)| Further::start(number, connection?);
        let further = (1..).zip(connections).map(start).collect::<Result<_>>()?;
        Ok(TcpQueue {
            first,
            further,
            smallest_part: setup.options.hooks.smallest_part.unwrap_or(SMALLEST_PART).max(1),
            sent: 0,
            divided: VecDeque::new(),
            ended: None,
            failed: None,
        })
    }

    fn put(&mut self, puts: &[Put]) -> Result<()> {
        self.check_further()?;
        for put in puts {
            let checked = put.check(self.first.source.bytes());
            checked.map_err(|reason| self.first.ends.error("put", reason))?;
        }
        for batch in puts.chunks(WRITE_PUTS) {
            let mut frames = Vec::with_capacity(batch.len());
            for (number, put) in (self.sent + 1..).zip(batch) {
                // The other threads begin while this one sends.
                let (bytes, parts) = self.divide(put, number)?;
                let header = header(put, bytes, parts as u64);
                frames.push((signed(&header, self.first.signer.as_mut()), put.from, bytes));
            }
            self.first.send_frames(&frames)?;
            self.sent += batch.len() as u64;
        }
        // Behind the puts, which do not wait for this system call. The peer may have left because
        // it has received them.
        self.ended = self.first.farewell().map(|reason| self.first.ends.error("put", reason));
        Ok(())
    }

    /// Hands parts of a large put to the further connections. The bytes that are left for the first
    /// one, from the put's start on, and the number of parts.
    fn divide(&mut self, put: &Put, number: u64) -> Result<(u64, usize)> {
        let most = (put.bytes / self.smallest_part).min(self.further.len() as u64 + 1);
        if most < 2 {
            return Ok((put.bytes, 0));
        }
        let size = put.bytes.div_ceil(most).next_multiple_of(PART_ALIGNMENT.min(self.smallest_part));
        let (mut at, mut parts) = (size, 0);
        while at < put.bytes {
            let bytes = size.min(put.bytes - at);
            let part = Part { from: put.from + at, to: put.to + at, bytes, number };
            let (first, further) = (&self.first, &self.further[parts]);
            // The further connection itself fails where the network takes nothing.
            further.hand_over(Work::Part(part), || first.check_interrupt())?;
            (at, parts) = (at + bytes, parts + 1);
        }
        self.divided.push_back((number, parts));
        Ok((size.min(put.bytes), parts))
    }

    /// The failure of a further connection.
    fn check_further(&self) -> Result<()> {
        self.further.iter().try_for_each(|further| match &*lock(&further.state.failure) {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        })
    }

    /// Keeps the first failure, and ends all connections: the peer waits for no puts of a queue
    /// that is of no use any more.
    fn keep_failure<T>(&mut self, outcome: Result<T>) -> Result<T> {
        if let Err(error) = &outcome
            && self.failed.is_none()
        {
            self.failed = Some(error.clone());
            self.further.iter().for_each(Further::stop);
            let _ = self.first.socket.shutdown(Shutdown::Both);
        }
        outcome
    }
}

impl PutQueue for TcpQueue {
    fn put_with_counter(&mut self, puts: &[Put]) -> Result<()> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let outcome = match self.ended.take() {
            Some(error) => Err(error),
            None => self.put(puts),
        };
        self.keep_failure(outcome)
    }

    fn completed(&mut self) -> Result<u64> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        // The sockets hold copies of the bytes.
        let left = |further: &[Further], (number, parts): (u64, usize)| {
            further[..parts].iter().all(|further| further.state.sent.load(Ordering::Acquire) >= number)
        };
        while self.divided.front().is_some_and(|put| left(&self.further, *put)) {
            self.divided.pop_front();
        }
        let checked = if self.divided.is_empty() { Ok(()) } else { self.check_further() };
        self.keep_failure(checked)?;
        Ok(self.divided.front().map_or(self.sent, |(number, _)| self.sent.min(number - 1)))
    }

    fn failure(&self) -> Option<Error> {
        self.failed.as_ref().or(self.ended.as_ref()).cloned()
    }

    fn quiet(&mut self, timeout: Duration) -> Result<()> {
        let end = deadline(timeout);
        while self.completed()? < self.sent {
            if Instant::now() >= end {
                return Err(self.first.ends.error("quiet", format!("puts did not leave within {timeout:?}")));
            }
            std::thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    fn source(&self) -> Option<&Memory> {
        Some(&self.first.source.memory)
    }

    fn close(&mut self) {
        if self.failed.is_none() {
            let begin = Instant::now();
            for further in &self.further {
                // A failed connection looks dead to the peer.
                let _ = further.hand_over(Work::Goodbye, || self.first.check_wait(begin, GOODBYE_TIME));
            }
            self.first.send_goodbye(&header(&Put::default(), GOODBYE, 0));
            let end = deadline(GOODBYE_TIME);
            while self.further.iter().any(Further::runs) && Instant::now() < end {
                std::thread::sleep(Duration::from_micros(200));
            }
            self.failed = Some(self.first.ends.error("put", "this rank has closed the queue"));
        }
    }

    fn interrupt(&self) -> Interrupt {
        self.first.interrupt.clone()
    }
}

/// A further connection, and the thread that sends over it. Dropping it ends the thread.
#[derive(Debug)]
struct Further {
    state: Arc<FurtherState>,
    /// Ends the waits of the thread.
    stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct FurtherState {
    work: Mutex<VecDeque<Work>>,
    /// All that was ever handed over, and all of it that was taken.
    handed_over: AtomicU64,
    taken: AtomicU64,
    /// The number of the last put whose part has been sent.
    sent: AtomicU64,
    failure: Mutex<Option<Error>>,
}

#[derive(Debug, Clone, Copy)]
enum Work {
    Part(Part),
    Goodbye,
}

impl Further {
    /// `number`: that of the connection.
    fn start(number: usize, mut connection: Connection) -> Result<Further> {
        let (state, stopped) = (Arc::<FurtherState>::default(), connection.stopped.clone());
        let shared = state.clone();
        let run = move || {
            let _rule = NoDriverCalls::new("a sender");
            let ends = connection.ends;
            let panicked = |reason| ends.error("put", reason);
            if let Err(error) = caught(|| run_further(&mut connection, &shared), panicked) {
                tracing::debug!("connection {number} to rank {}: {error}", connection.ends.peer);
                lock(&shared.failure).get_or_insert(error);
            }
        };
        let thread = spawn(format!("part {number}"), run);
        let thread = thread.map_err(|error| Error::system("spawn thread", error))?;
        Ok(Further { state, stopped, thread: Some(thread) })
    }

    /// Ends the thread, which closes the connection.
    fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
    }

    fn runs(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Passes work to the thread, once it has room; `check` ends a wait for that.
    fn hand_over(&self, work: Work, check: impl Fn() -> Result<()>) -> Result<()> {
        let state = &self.state;
        let waiting = || state.handed_over.load(Ordering::Relaxed) - state.taken.load(Ordering::Acquire);
        while waiting() >= MOST_WAITING {
            if let Some(error) = &*lock(&state.failure) {
                return Err(error.clone());
            }
            check()?;
            std::thread::sleep(Duration::from_micros(20));
        }
        lock(&state.work).push_back(work);
        state.handed_over.fetch_add(1, Ordering::Release);
        if let Some(thread) = &self.thread {
            thread.thread().unpark();
        }
        Ok(())
    }
}

impl Drop for Further {
    fn drop(&mut self) {
        self.stop();
        let Some(thread) = self.thread.take() else { return };
        join_until(thread, deadline(JOIN_TIMEOUT));
    }
}

/// Sends what is handed over, until a goodbye or a failure.
fn run_further(connection: &mut Connection, state: &FurtherState) -> Result<()> {
    let mut idle = Instant::now();
    loop {
        if connection.stopped.load(Ordering::Acquire) {
            return Ok(());
        }
        if state.handed_over.load(Ordering::Acquire) == state.taken.load(Ordering::Relaxed) {
            if !connection.patience.polls_on(idle) {
                std::thread::park();
            }
            continue;
        }
        let work = lock(&state.work).pop_front();
        state.taken.fetch_add(1, Ordering::Release);
        match work {
            Some(Work::Part(part)) => {
                let header = signed(&part_header(&part), connection.signer.as_mut());
                connection.send_frames(&[(header, part.from, part.bytes)])?;
                state.sent.store(part.number, Ordering::Release);
            }
            Some(Work::Goodbye) => {
                connection.send_goodbye(&part_header(&Part { bytes: GOODBYE, ..Part::default() }));
                return Ok(());
            }
            None => {}
        }
        idle = Instant::now();
    }
}

/// A connection for frames. One thread uses it.
#[derive(Debug)]
pub(super) struct Connection {
    ends: LinkEnds,
    /// Does not block.
    socket: TcpStream,
    /// Where the job has a secret: signs the headers.
    signer: Option<Signer>,
    source: WireHost,
    pub(super) timeout: Duration,
    /// Shared by the connections of the queue.
    interrupt: Interrupt,
    /// Records the calls of the thread that uses this connection.
    calls: Interrupt,
    /// Nothing waits any more for the bytes of this connection.
    stopped: Arc<AtomicBool>,
    /// The state of the peer's farewell.
    farewell: Vec<u8>,
    patience: Patience,
}

impl Connection {
    /// Sends frames: each has a header, an offset and a length, which the caller has checked to be
    /// in the source.
    fn send_frames(&mut self, frames: &[(Vec<u8>, u64, u64)]) -> Result<()> {
        let mut pieces = Vec::with_capacity(2 * frames.len());
        for (header, from, bytes) in frames {
            pieces.push(Bytes { start: header.as_ptr(), len: header.len() });
            if *bytes > 0 {
                let start = self.source.at(*from).cast_const();
                pieces.push(Bytes { start, len: *bytes as usize });
            }
        }
        // SAFETY: the headers outlive the call; the rest is in the source, which this connection
        // keeps.
        unsafe { self.send(&mut pieces, self.timeout) }
    }

    /// Sends the goodbye: no put follows.
    fn send_goodbye(&mut self, header: &[u8]) {
        let goodbye = signed(header, self.signer.as_mut());
        let mut piece = [Bytes { start: goodbye.as_ptr(), len: goodbye.len() }];
        // SAFETY: the header outlives the call.
        if let Err(error) = unsafe { self.send(&mut piece, GOODBYE_TIME) } {
            tracing::debug!("goodbye: {error}");
        }
        let _ = self.socket.shutdown(Shutdown::Write);
    }

    /// Writes all of `pieces` to the socket, unless it takes no byte for so long a time.
    ///
    /// # Safety
    /// Each is live memory until this returns.
    unsafe fn send(&mut self, pieces: &mut [Bytes], timeout: Duration) -> Result<()> {
        let mut first = 0;
        let mut full_since = None;
        while first < pieces.len() {
            let rest = &mut pieces[first..];
            // SAFETY: all zeros is a message without anything.
            let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
            message.msg_iov = rest.as_mut_ptr().cast();
            message.msg_iovlen = rest.len() as _;
            let send = || {
                // SAFETY: `Bytes` is laid out like an iovec, and the caller vouches for what they
                // point to. The kernel reads through the addresses, so that what a device writes at
                // the same time makes for stale bytes, nothing worse.
                unsafe { libc::sendmsg(self.socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) }
            };
            let sent = self.calls.during(&"sendmsg", send);
            if sent >= 0 {
                let mut sent = sent as usize;
                while let Some(piece) = pieces.get_mut(first) {
                    let taken = sent.min(piece.len);
                    piece.start = piece.start.wrapping_add(taken);
                    piece.len -= taken;
                    sent -= taken;
                    if piece.len > 0 {
                        break;
                    }
                    first += 1;
                }
                full_since = None;
                if first < pieces.len() {
                    self.check_interrupt()?;
                }
            } else {
                let since = *full_since.get_or_insert_with(Instant::now);
                self.handle_send_error(std::io::Error::last_os_error(), since, timeout)?;
            }
        }
        Ok(())
    }

    /// Waits for room where that is what is missing, which it has been `since` then.
    fn handle_send_error(&mut self, error: std::io::Error, since: Instant, timeout: Duration) -> Result<()> {
        match Errno::from_io_error(&error) {
            Some(Errno::INTR) => return Ok(()),
            Some(Errno::AGAIN) => self.check_wait(since, timeout)?,
            _ => {
                // The peer may have sent the reason.
                let reason = self.farewell().unwrap_or_else(|| format!("the connection broke: {error}"));
                return Err(self.ends.error("put", reason));
            }
        }
        if self.patience.polls_on(since) {
            return Ok(());
        }
        if let Some(reason) = self.farewell() {
            return Err(self.ends.error("put", reason));
        }
        let mut polled = [PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::OUT)];
        let left = timeout.saturating_sub(since.elapsed()).max(Duration::from_millis(1));
        wait_for(&mut polled, POLL_INTERVAL.min(left)).map_err(|error| Error::system("poll", error))
    }

    /// An error where a wait for the network, which has lasted `since` then, has to end.
    fn check_wait(&self, since: Instant, timeout: Duration) -> Result<()> {
        self.check_interrupt()?;
        if since.elapsed() >= timeout {
            let reason = format!("it took no bytes for {timeout:?}: it hangs, or the network is down");
            return Err(self.ends.error("put", reason));
        }
        Ok(())
    }

    fn check_interrupt(&self) -> Result<()> {
        if self.interrupt.is_raised() || self.stopped.load(Ordering::Acquire) {
            return Err(self.ends.error("put", "interrupted: this rank closes the link"));
        }
        Ok(())
    }

    /// Why the peer takes nothing any more, if so.
    fn farewell(&mut self) -> Option<String> {
        let mut buffer = [0; 256];
        let died = "the connection broke: the rank died, or was cut off";
        let ended = loop {
            match self.socket.read(&mut buffer) {
                Ok(0) => break died.to_owned(),
                Ok(count) => {
                    self.farewell.extend_from_slice(&buffer[..count]);
                    if self.farewell.len() > 4 + MAX_REASON {
                        break "it sent garbage".to_owned();
                    }
                }
                Err(error) => match Errno::from_io_error(&error) {
                    Some(Errno::INTR) => {}
                    Some(Errno::AGAIN) => break String::new(),
                    _ => break format!("{died} ({error})"),
                },
            }
        };
        if self.farewell.len() >= 4 {
            let len = word32(&self.farewell, 0);
            if len == FAREWELL {
                return Some(GOODBYE_BEFORE.into());
            }
            if self.farewell.len() - 4 >= len as usize || !ended.is_empty() {
                return Some(format!("it refused a frame, and says {}", quoted(&self.farewell[4..])));
            }
        }
        Some(ended).filter(|reason| !reason.is_empty())
    }
}

/// An address range, laid out like an `iovec`; it is not a slice, as devices may write to it.
#[derive(Debug)]
#[repr(C)]
struct Bytes {
    start: *const u8,
    len: usize,
}

const _: () = assert!(size_of::<Bytes>() == size_of::<libc::iovec>());
