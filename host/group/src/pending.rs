//! Unauthenticated connections: one policy for all listeners.
//!
//! Any process that reaches a listener can connect, stay silent, send slowly, or connect by the
//! thousand. The resources of such a connection are bounded here, before its bytes are trusted.
//! [`ConnectionLimits`] bounds its number and its age. The length of a hello bounds its bytes:
//! later bytes stay in the socket until the hello has been checked. No failure of `accept` ends a
//! listener.

use std::collections::VecDeque;
use std::mem;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketFlags};
use rustix::process::{Resource, getrlimit};

use super::secret::{Keys, PROOF, Purpose, REPLY, Responder};
use super::{JobSecret, same_user};

/// Connections taken from a listener before what is connected gets its turn.
pub const ACCEPT_SLICE: usize = 64;
/// Connections that may wait at a listener: all ranks of a job connect at the same time, perhaps
/// behind others. Waiting connections take no descriptor; the kernel may allow fewer.
pub const BACKLOG: i32 = 4096;
/// How long a listener rests after the system had nothing left for a new connection.
const PAUSE: Duration = Duration::from_millis(50);
/// No connection is younger than this when it makes room for another. All ranks of a job connect at
/// once, and their hellos are on the way.
const GRACE: Duration = Duration::from_millis(100);
/// How long a burst of troubles is that is logged once.
const QUIET: Duration = Duration::from_secs(10);

/// Limits on the connections of a listener.
///
/// A connection is *pending* until it has authenticated. A rank does so by the token of the
/// listener, a client of a store server by the protocol's first message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectionLimits {
    /// Most pending connections of one listener, in addition to the connections that it expects. For one
    /// more, the oldest is closed. Never more than an eighth of the descriptors that the process
    /// may have (`ulimit -n`). Default: 256.
    pub max_unauthenticated: usize,
    /// Longest time for a connection to authenticate. Those of a [`MeshGroup`](super::MeshGroup) have
    /// at least the group's timeout, because a rank sends only while it is in an operation.
    /// Default: 30 s.
    pub authentication_timeout: Duration,
    /// How many clients a store server has. One more is rejected, and existing clients stay: a
    /// client may idle for hours in a job. Never more than three quarters of the descriptors that
    /// the process may have. Default: 16384.
    pub max_clients: usize,
    /// Bytes that a store server holds for its clients in all: incomplete requests, awaited keys,
    /// answers not yet read. When there are more, the client that holds the most is closed.
    /// Default: 512 MiB.
    pub max_client_bytes: usize,
    /// Bytes that the keys and values of a store server may take, each counted with 64 more. A
    /// request that would exceed it closes its connection, and the log records it. Default: 1 GiB.
    pub max_store_bytes: usize,
}

impl Default for ConnectionLimits {
    /// 256 pending connections for 30 s, 16384 clients, 512 MiB for clients, 1 GiB for keys and values.
    fn default() -> ConnectionLimits {
        ConnectionLimits {
            max_unauthenticated: 256,
            authentication_timeout: Duration::from_secs(30),
            max_clients: 16 << 10,
            max_client_bytes: 512 << 20,
            max_store_bytes: 1 << 30,
        }
    }
}

/// `parts` eighths of the descriptors that this process may have.
pub(super) fn descriptors(parts: u64) -> usize {
    let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    usize::try_from(most / 8 * parts).unwrap_or(usize::MAX)
}

/// An unauthenticated connection.
#[derive(Debug)]
pub struct PendingConnection {
    /// Never that of another of its listener; later ones have larger ones.
    pub id: u64,
    pub socket: OwnedFd,
    since: Instant,
    /// Bytes that [`PendingConnection::read`] has read.
    pub hello: Vec<u8>,
    /// The progress of its proof of the job's secret.
    pub challenge: Challenge,
    /// The keys that sign all later messages, once it has proved the job's secret.
    pub keys: Option<Keys>,
}

/// The progress of a challenge.
#[derive(Debug)]
pub enum Challenge {
    /// It has not been challenged.
    NotStarted,
    /// Its proof is to come.
    Sent(Box<Responder>),
    /// It has proven the secret, or the job has none.
    Passed,
}

impl PendingConnection {
    /// Reads the present bytes among its first `want` bytes; later bytes stay in the socket.
    pub fn read(&mut self, want: usize) -> Result<bool, String> {
        let mut buffer = [0; 256];
        while self.hello.len() < want {
            let missing = (want - self.hello.len()).min(buffer.len());
            match rustix::net::recv(&self.socket, &mut buffer[..missing], RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return Err("closed before its hello".to_owned()),
                Ok((_, count)) => self.hello.extend_from_slice(&buffer[..count]),
                Err(Errno::AGAIN) => return Ok(false),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.to_string()),
            }
        }
        Ok(true)
    }

    /// Sends what fits the buffer of a socket to which little was sent before.
    pub fn send(&self, bytes: &[u8]) -> Result<(), String> {
        match rustix::net::send(&self.socket, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            Ok(count) if count == bytes.len() => Ok(()),
            Ok(_) => Err("it does not take what it is sent".to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// The reply to the opening that begins at `at` of its hello; its proof is to come.
    pub fn ask(
        &mut self,
        secret: &JobSecret,
        purpose: Purpose,
        claims: &[u8],
        at: usize,
    ) -> Result<[u8; REPLY], String> {
        let opening =
            self.hello.get(at..).and_then(<[u8]>::first_chunk).ok_or("a hello without an opening")?;
        let (responder, reply) =
            Responder::new(secret, purpose, claims, opening).map_err(|error| error.to_string())?;
        self.challenge = Challenge::Sent(Box::new(responder));
        Ok(reply)
    }

    /// Checks the proof that begins at `at` of its hello.
    pub fn prove(&mut self, at: usize) -> Result<(), String> {
        let proof = self.hello.get(at..).and_then(<[u8]>::first_chunk::<PROOF>).ok_or("no proof")?;
        match mem::replace(&mut self.challenge, Challenge::NotStarted) {
            Challenge::Sent(responder) => {
                self.keys = Some(responder.check(proof).map_err(|wrong| wrong.to_string())?);
            }
            Challenge::NotStarted | Challenge::Passed => return Err("a proof without a challenge".to_owned()),
        }
        self.challenge = Challenge::Passed;
        Ok(())
    }
}

/// The next step for a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accepted {
    /// This connection is new: its hello may have arrived.
    New(u64),
    /// This connection must make room, unless its hello has arrived: read, then
    /// [`PendingConnections::close`].
    Evict(u64),
    /// No connection waits, or the listener rests.
    None,
}

/// Bytes that can be read without waiting.
#[derive(Debug)]
pub struct Ready {
    pub listener: bool,
    /// Oldest first.
    pub pending: Vec<u64>,
}

/// The pending connections of one listener.
#[derive(Debug)]
pub struct PendingConnections {
    /// The name of the listener, for the log.
    what: &'static str,
    most: usize,
    patience: Duration,
    /// How long a connection keeps its place: [`GRACE`], and other times in tests.
    grace: Duration,
    /// How long the listener rests: [`PAUSE`], and other times in tests.
    pause: Duration,
    /// Oldest first, by ascending id.
    waiting: VecDeque<PendingConnection>,
    next: u64,
    accept_again: Option<Instant>,
    log: LogLimit,
}

/// Logs an error once per burst: any client could fill the log otherwise.
#[derive(Debug, Default)]
pub struct LogLimit {
    quiet_until: Option<Instant>,
}

impl LogLimit {
    pub fn warn(&mut self, trouble: std::fmt::Arguments<'_>) {
        let now = Instant::now();
        if self.quiet_until.is_none_or(|until| now >= until) {
            tracing::warn!("{trouble}");
            self.quiet_until = Some(now + QUIET);
        } else {
            tracing::debug!("{trouble}");
        }
    }
}

impl PendingConnections {
    /// None yet, of a listener that waits for `expected` connections.
    pub fn new(what: &'static str, limits: &ConnectionLimits, expected: usize) -> PendingConnections {
        let most = expected.saturating_add(limits.max_unauthenticated.min(descriptors(1)).max(1));
        let (waiting, patience) = (VecDeque::new(), limits.authentication_timeout);
        PendingConnections {
            what,
            most,
            patience,
            grace: GRACE,
            pause: PAUSE,
            waiting,
            next: 0,
            accept_again: None,
            log: LogLimit::default(),
        }
    }

    /// Takes a connection from the listener. Call it again until it returns [`Accepted::None`], but
    /// no more than [`ACCEPT_SLICE`] times in a row.
    pub fn accept(&mut self, listener: impl AsFd) -> Accepted {
        let is_pending = || {
            let mut polled = [PollFd::from_borrowed_fd(listener.as_fd(), PollFlags::IN)];
            // If `poll` fails, `accept` returns the reason.
            poll(&mut polled, Some(&Timespec::default())).is_err() || !polled[0].revents().is_empty()
        };
        let accept = || rustix::net::accept_with(&listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
        self.accept_by(is_pending, accept)
    }

    /// Takes a connection from `accept`. `is_pending` returns whether one waits: only then is a
    /// connection closed to make room.
    fn accept_by(
        &mut self,
        is_pending: impl FnOnce() -> bool,
        mut accept: impl FnMut() -> Result<OwnedFd, Errno>,
    ) -> Accepted {
        if self.paused() {
            return Accepted::None;
        }
        if self.waiting.len() >= self.most
            && let Some(oldest) = self.waiting.front()
        {
            if !is_pending() {
                return Accepted::None;
            }
            let (id, age) = (oldest.id, oldest.since.elapsed());
            if age < self.grace {
                self.accept_again = Some(Instant::now() + (self.grace - age));
                return Accepted::None;
            }
            self.warn("too many connections; the oldest that has not said who it is makes room");
            return Accepted::Evict(id);
        }
        for _ in 0..ACCEPT_SLICE {
            match accept() {
                Ok(socket) => {
                    if let Err(reason) = same_user::check(&socket) {
                        self.warn(&format!("refused a connection: {reason}"));
                        continue;
                    }
                    let id = self.next;
                    self.next += 1;
                    let (since, hello, challenge) = (Instant::now(), Vec::new(), Challenge::NotStarted);
                    self.waiting.push_back(PendingConnection {
                        id,
                        socket,
                        since,
                        hello,
                        challenge,
                        keys: None,
                    });
                    return Accepted::New(id);
                }
                Err(Errno::AGAIN) => return Accepted::None,
                // This connection broke before it was taken, or a rule of the host forbids it;
                // there may be others.
                Err(
                    Errno::INTR
                    | Errno::CONNABORTED
                    | Errno::PERM
                    | Errno::PROTO
                    | Errno::NOPROTOOPT
                    | Errno::OPNOTSUPP
                    | Errno::NETDOWN
                    | Errno::NETUNREACH
                    | Errno::HOSTDOWN
                    | Errno::HOSTUNREACH
                    | Errno::NONET,
                ) => {}
                // No descriptor or no memory: close the oldest connection and try again.
                Err(error) => {
                    self.warn(&format!("accept: {error}; raise the limit on open files (ulimit -n)"));
                    self.accept_again = Some(Instant::now() + self.pause);
                    let oldest = self.waiting.front().filter(|oldest| oldest.since.elapsed() >= self.grace);
                    return oldest.map_or(Accepted::None, |oldest| Accepted::Evict(oldest.id));
                }
            }
        }
        Accepted::None
    }

    /// The oldest connection, once its time is over: read it once more, then
    /// [`PendingConnections::close`].
    pub fn expired(&self) -> Option<u64> {
        let oldest = self.waiting.front()?;
        (oldest.since.elapsed() > self.patience).then_some(oldest.id)
    }

    /// True while the listener rests; it is not to be waited for then.
    pub fn paused(&self) -> bool {
        self.accept_again.is_some_and(|when| Instant::now() < when)
    }

    /// Time to the next check without input: to the end of a rest or of the oldest one's time.
    pub fn next_deadline(&self) -> Option<Duration> {
        let left = |when: Instant| when.saturating_duration_since(Instant::now());
        let rest = self.accept_again.map(left).filter(|left| !left.is_zero());
        let oldest = self.waiting.front().map(|oldest| self.patience.saturating_sub(oldest.since.elapsed()));
        [rest, oldest].into_iter().flatten().min().map(|left| left.max(Duration::from_millis(1)))
    }

    /// The connection of this number.
    pub fn get_mut(&mut self, id: u64) -> Option<&mut PendingConnection> {
        let index = self.find(id)?;
        self.waiting.get_mut(index)
    }

    /// Takes out one that has authenticated.
    pub fn take(&mut self, id: u64) -> Option<PendingConnection> {
        let index = self.find(id)?;
        self.waiting.remove(index)
    }

    /// Closes one, if it is still pending.
    pub fn close(&mut self, id: u64) {
        drop(self.take(id));
        // The listener may have lacked a descriptor.
        self.accept_again = None;
    }

    /// Closes one that is not let in.
    pub fn reject(&mut self, id: u64, reason: &str) {
        self.warn(&format!("refused a connection: {reason}"));
        self.close(id);
    }

    /// Waits until the listener or a pending connection can be read.
    pub fn wait_readable(&self, listener: impl AsFd, timeout: Duration) -> Result<Ready, Errno> {
        // A listener that rests would be readable all the time.
        let flags = if self.paused() { PollFlags::empty() } else { PollFlags::IN };
        let mut polled = vec![PollFd::from_borrowed_fd(listener.as_fd(), flags)];
        polled.extend(self.iter().map(|(_, fd)| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        // A timeout that the kernel cannot express is as good as none.
        match poll(&mut polled, Timespec::try_from(timeout).ok().as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
        let readable = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let pending = self.iter().zip(&polled[1..]).filter(|(_, fd)| readable(fd));
        Ok(Ready { listener: readable(&polled[0]), pending: pending.map(|((id, _), _)| id).collect() })
    }

    /// All, oldest first.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (u64, BorrowedFd<'_>)> {
        self.waiting.iter().map(|pending| (pending.id, pending.socket.as_fd()))
    }

    /// True without any connection that still has to authenticate.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Closes all.
    pub fn clear(&mut self) {
        self.waiting.clear();
    }

    /// Logs what is wrong, once per burst.
    pub fn warn(&mut self, trouble: &str) {
        self.log.warn(format_args!("{}: {trouble}", self.what));
    }

    fn find(&self, id: u64) -> Option<usize> {
        self.waiting.binary_search_by_key(&id, |pending| pending.id).ok()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Longer than a test takes: no wait for it returns.
    const LONG: Duration = Duration::from_secs(600);

    /// Connections whose listener rests, and which stay young, for longer than a test.
    fn young(pending: usize) -> PendingConnections {
        PendingConnections {
            grace: LONG,
            pause: LONG,
            ..PendingConnections::new("test", &limits(pending, LONG), 1)
        }
    }

    /// The listener's rest is over.
    fn rested(pending: &mut PendingConnections) {
        pending.accept_again = Some(Instant::now());
    }

    /// The listener's rest is over, and its connections are old.
    fn grow_old(pending: &mut PendingConnections) {
        pending.grace = Duration::ZERO;
        rested(pending);
    }

    fn limits(pending: usize, patience: Duration) -> ConnectionLimits {
        ConnectionLimits {
            max_unauthenticated: pending,
            authentication_timeout: patience,
            ..ConnectionLimits::default()
        }
    }

    /// Makes a connection arrive, and returns its other end.
    fn come(pending: &mut PendingConnections) -> (Accepted, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut ours = Some(OwnedFd::from(ours));
        (pending.accept_by(|| true, || ours.take().ok_or(Errno::AGAIN)), theirs)
    }

    #[test]
    fn the_oldest_makes_room_even_after_others_left() {
        let mut pending = young(3);
        let mut ends: Vec<_> = (0..4).map(|_| come(&mut pending)).collect();
        assert!((0..).zip(&ends).all(|(id, (next, _))| *next == Accepted::New(id)), "{ends:?}");
        // A connection that sent bytes leaves from the middle.
        ends[1].1.write_all(b"hello").unwrap();
        let spoke = pending.wait_readable(&ends[0].1, LONG).unwrap().pending;
        assert_eq!(spoke, [1]);
        assert!(pending.get_mut(1).unwrap().read(3).unwrap());
        assert_eq!(pending.take(1).unwrap().hello, b"hel", "no more than was asked for");
        assert_eq!(come(&mut pending).0, Accepted::New(4));
        // Hellos may be on the way.
        assert_eq!(come(&mut pending).0, Accepted::None);
        assert!(pending.paused() && pending.next_deadline().unwrap() <= LONG);
        grow_old(&mut pending);
        for oldest in [0, 2, 3] {
            assert_eq!(come(&mut pending).0, Accepted::Evict(oldest));
            pending.close(oldest);
            assert!(matches!(come(&mut pending).0, Accepted::New(_)));
        }
        let nobody = pending.accept_by(|| false, || unreachable!("nobody is there to be taken"));
        assert_eq!(nobody, Accepted::None, "nobody makes room for nobody");
        assert!(!pending.paused());
    }

    #[test]
    fn no_failure_of_accept_is_the_end_or_a_busy_loop() {
        let mut pending = young(9);
        let fail = |pending: &mut PendingConnections, error| {
            let mut calls = 0;
            let next = pending.accept_by(
                || true,
                || {
                    calls += 1;
                    Err(error)
                },
            );
            assert!(calls <= ACCEPT_SLICE);
            (next, pending.paused())
        };
        for error in [Errno::CONNABORTED, Errno::INTR, Errno::PERM, Errno::PROTO, Errno::AGAIN] {
            assert_eq!(fail(&mut pending, error), (Accepted::None, false), "{error}");
        }
        // A broken connection does not hide the next one.
        let mut outcomes = vec![Ok(UnixStream::pair().unwrap().0.into()), Err(Errno::CONNABORTED)];
        assert_eq!(pending.accept_by(|| true, || outcomes.pop().unwrap()), Accepted::New(0));
        grow_old(&mut pending);
        for error in [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM, Errno::INVAL] {
            assert_eq!(fail(&mut pending, error), (Accepted::Evict(0), true), "{error}");
            assert_eq!(fail(&mut pending, error), (Accepted::None, true), "it rests");
            rested(&mut pending);
        }
        pending.close(0);
        assert_eq!(fail(&mut pending, Errno::MFILE), (Accepted::None, true), "nobody to give up");
        rested(&mut pending);
        assert_eq!(come(&mut pending).0, Accepted::New(1));
    }

    #[test]
    fn the_silent_are_overdue_in_their_order() {
        let mut pending = young(9);
        let _ends: Vec<_> = (0..2).map(|_| come(&mut pending)).collect();
        assert!(pending.expired().is_none() && pending.next_deadline().is_some());
        pending.patience = Duration::ZERO;
        for oldest in 0..2 {
            assert_eq!(pending.expired(), Some(oldest));
            pending.close(oldest);
        }
        assert!(pending.expired().is_none() && pending.is_empty() && pending.next_deadline().is_none());
    }

    #[test]
    fn no_time_to_authenticate_is_too_long() {
        let mut pending = PendingConnections::new("test", &limits(9, Duration::MAX), 1);
        let (_, mut theirs) = come(&mut pending);
        theirs.write_all(b"hello").unwrap();
        let ready = pending.wait_readable(&theirs, pending.next_deadline().unwrap()).unwrap();
        assert_eq!((ready.pending.as_slice(), pending.expired()), ([0].as_slice(), None));
    }

    #[test]
    fn strangers_leave_the_process_its_descriptors() {
        let pending = PendingConnections::new("test", &limits(usize::MAX, LONG), 5);
        assert_eq!(pending.most, descriptors(1).saturating_add(5));
    }
}
