//! The server: one thread, all sockets in one `poll`.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::admission::admit;
use super::protocol::{
    Framer, MAGIC, MAX_MESSAGE_BYTES, Message, NOT_READY, Query, READY, Request, STOP_WAITING, Violation,
    WAIT_CANCELED,
};
use crate::error::{Error, Result};
use crate::group::JobSecret;
use crate::group::board::Board;
use crate::group::strangers::{ACCEPT_SLICE, ConnectionLimits, Next, Stranger, Strangers};

/// Longer than anyone waits, and short enough to be added to the time.
const MAX_LINGER: Duration = Duration::from_secs(24 * 3600);
/// Bytes read from one connection before the others get their turn.
const READ_BYTES: usize = 64 * 1024;
/// No further request of a client is taken while more bytes than this wait for it to read them.
const MAX_UNREAD_BYTES: usize = 1024 * 1024;
const BACKLOG: i32 = 4096;
/// How often a server that ends looks whether it may.
const ENDING: Duration = Duration::from_millis(10);

/// A server of the store protocol, for [`TcpStore`](super::TcpStore) and for PyTorch's clients.
///
/// Without a secret anyone who reaches the port can read and write the store, as with PyTorch's. With one
/// ([`TcpStoreServer::with_secret`]) only a [`TcpStore`](super::TcpStore) that knows it can. Dropping the server closes the port and
/// all connections, and ends its thread; [`TcpStoreServer::finish`] lets the clients leave first.
#[derive(Debug)]
pub struct TcpStoreServer {
    address: SocketAddr,
    /// Closing it wakes the thread.
    wake: Option<UnixStream>,
    /// Until when the thread goes on after that, while there are clients.
    until: Arc<Mutex<Option<Instant>>>,
    thread: Option<JoinHandle<()>>,
}

impl TcpStoreServer {
    /// A server at `address`, such as `("127.0.0.1", 0)`; port 0 takes a free one.
    pub fn bind(address: impl ToSocketAddrs + std::fmt::Debug) -> Result<TcpStoreServer> {
        TcpStoreServer::from_listener(listen(address)?)
    }

    /// A server at `port` of all of this host's addresses; port 0 takes a free one.
    pub fn bind_all(port: u16) -> Result<TcpStoreServer> {
        TcpStoreServer::from_listener(listen_all(port)?)
    }

    /// A server on a socket that listens already, for example one that was inherited.
    pub fn from_listener(listener: TcpListener) -> Result<TcpStoreServer> {
        TcpStoreServer::start(listener, None, &ConnectionLimits::default())
    }

    /// Like [`TcpStoreServer::from_listener`]; lets in only clients that know `secret`, where there is one.
    pub fn with_secret(listener: TcpListener, secret: Option<JobSecret>) -> Result<TcpStoreServer> {
        TcpStoreServer::start(listener, secret, &ConnectionLimits::default())
    }

    /// Like [`TcpStoreServer::from_listener`], with other limits than the default.
    pub fn with_limits(listener: TcpListener, limits: &ConnectionLimits) -> Result<TcpStoreServer> {
        TcpStoreServer::start(listener, None, limits)
    }

    fn start(
        listener: TcpListener,
        secret: Option<JobSecret>,
        limits: &ConnectionLimits,
    ) -> Result<TcpStoreServer> {
        let os = |call: &'static str| move |error: std::io::Error| Error::os(call, error);
        // Once more, for the longer backlog: all ranks of a job connect at the same time.
        rustix::net::listen(&listener, BACKLOG).map_err(|error| Error::os("listen", error))?;
        listener.set_nonblocking(true).map_err(os("set_nonblocking"))?;
        let address = listener.local_addr().map_err(os("getsockname"))?;
        let (wake, woken) = UnixStream::pair().map_err(os("socketpair"))?;
        let until = Arc::new(Mutex::new(None));
        let server = Server {
            listener,
            secret,
            woken,
            until: until.clone(),
            board: Board::default(),
            waiters: HashMap::new(),
            connections: BTreeMap::new(),
            next: 0,
            changed: Vec::new(),
            strangers: Strangers::new("store server", limits, 0),
        };
        let thread = std::thread::Builder::new()
            .name("epoxide-store".to_owned())
            .spawn(move || server.run())
            .map_err(os("spawn"))?;
        Ok(TcpStoreServer { address, wake: Some(wake), until, thread: Some(thread) })
    }

    /// The address it listens at.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The port it listens at.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Ends the server once all clients have left, or when `linger` is over.
    pub fn finish(mut self, linger: Duration) {
        self.end(linger);
    }

    fn end(&mut self, linger: Duration) {
        *self.until.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(Instant::now() + linger.min(MAX_LINGER));
        drop(self.wake.take());
        if let Some(thread) = self.thread.take() {
            // It has said why, if it panicked; its sockets are closed in any case.
            let _ = thread.join();
        }
    }
}

impl Drop for TcpStoreServer {
    fn drop(&mut self) {
        self.end(Duration::ZERO);
    }
}

fn listen(address: impl ToSocketAddrs + std::fmt::Debug) -> Result<TcpListener> {
    TcpListener::bind(&address).map_err(|error| {
        let remedy = match error.kind() {
            ErrorKind::AddrInUse => {
                "; another store or an earlier run has the port: end it, or take another port"
            }
            ErrorKind::AddrNotAvailable => "; this host does not have the address",
            ErrorKind::PermissionDenied => "; take a port above 1023",
            _ => "",
        };
        Error::os("bind", format!("store server at {address:?}: {error}{remedy}"))
    })
}

/// Listens at `port` of all of this host's addresses.
pub(super) fn listen_all(port: u16) -> Result<TcpListener> {
    // IPv6 sockets take IPv4 as well, but not every host has IPv6.
    match TcpListener::bind(("::", port)) {
        Ok(listener) => Ok(listener),
        Err(_) => listen(("0.0.0.0", port)),
    }
}

/// Listens where clients come that were told `host`: at that address alone where it is one, at loopback alone where the
/// name says so. Any other name may mean one address here and another elsewhere, and an address may be one that a network
/// translates: then at all of this host's.
pub(super) fn listen_for(host: &str, port: u16) -> Result<TcpListener> {
    let addresses = match host.parse::<IpAddr>() {
        Ok(ip) => vec![ip],
        Err(_) if host.eq_ignore_ascii_case("localhost") => {
            vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]
        }
        Err(_) => return listen_all(port),
    };
    let elsewhere = |error: &std::io::Error| error.kind() == ErrorKind::AddrNotAvailable;
    let not_here = |ip: &IpAddr| TcpListener::bind((*ip, 0)).is_err_and(|error| elsewhere(&error));
    match addresses.into_iter().find(|ip| !not_here(ip)) {
        Some(ip) => listen((ip, port)),
        None => listen_all(port),
    }
}

/// What the thread works on.
struct Server {
    listener: TcpListener,
    secret: Option<JobSecret>,
    woken: UnixStream,
    until: Arc<Mutex<Option<Instant>>>,
    board: Board,
    /// Who waits for a key, oldest first.
    waiters: HashMap<Vec<u8>, VecDeque<u64>>,
    connections: BTreeMap<u64, Connection>,
    /// The next connection's number.
    next: u64,
    /// Connections with something to send, or to be closed.
    changed: Vec<u64>,
    strangers: Strangers,
}

struct Connection {
    socket: TcpStream,
    closed: bool,
    /// Bytes received; those before `taken` have been dealt with.
    input: Vec<u8>,
    taken: usize,
    framer: Framer,
    /// Bytes to send; those before `sent` are gone.
    output: Vec<u8>,
    sent: usize,
    /// How many keys it waits for; 0 when it does not wait.
    awaited: usize,
    /// The queue it was woken for, and has not looked at yet.
    woken_for: Option<Vec<u8>>,
}

impl Connection {
    fn new(socket: TcpStream) -> Connection {
        Connection {
            socket,
            closed: false,
            input: Vec::new(),
            taken: 0,
            framer: Framer::default(),
            output: Vec::new(),
            sent: 0,
            awaited: 0,
            woken_for: None,
        }
    }

    fn unsent(&self) -> usize {
        self.output.len() - self.sent
    }

    /// True when its next request may be looked at.
    fn takes_requests(&self) -> bool {
        !self.closed && self.unsent() <= MAX_UNREAD_BYTES
    }

    /// Takes what has come.
    fn receive(&mut self) {
        let mut chunk = [0; READ_BYTES];
        match self.socket.read(&mut chunk) {
            Ok(0) => self.closed = true,
            Ok(length) => self.input.extend_from_slice(&chunk[..length]),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(_) => self.closed = true,
        }
    }

    /// Sends what the socket takes.
    fn flush(&mut self) {
        while self.unsent() > 0 {
            match self.socket.write(&self.output[self.sent..]) {
                Ok(0) => self.closed = true,
                Ok(length) => {
                    self.sent += length;
                    continue;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(_) => self.closed = true,
            }
            return;
        }
        self.sent = 0;
        self.output.clear();
        // A large answer is rare; its memory need not stay.
        self.output.shrink_to(READ_BYTES);
    }
}

/// What `poll` says.
struct Ready {
    woken: bool,
    listener: bool,
    strangers: Vec<u64>,
    readable: Vec<u64>,
    writable: Vec<u64>,
}

impl Server {
    fn run(mut self) {
        let mut ending = false;
        loop {
            if ending {
                let until = *self.until.lock().unwrap_or_else(PoisonError::into_inner);
                if self.connections.is_empty() && self.strangers.is_empty()
                    || until.is_none_or(|until| Instant::now() >= until)
                {
                    return;
                }
            }
            let ready = match self.poll(ending) {
                Ok(ready) => ready,
                Err(rustix::io::Errno::INTR | rustix::io::Errno::NOMEM) => continue,
                Err(error) => {
                    tracing::error!("store server at {:?}: poll: {error}", self.listener.local_addr());
                    return;
                }
            };
            ending |= ready.woken;
            for id in ready.readable {
                self.take_input(id);
            }
            self.changed.extend(ready.writable);
            for id in ready.strangers {
                self.greet(id);
            }
            while let Some(id) = self.strangers.overdue() {
                self.look_last(id);
            }
            if ready.listener {
                self.accept();
            }
            self.settle();
        }
    }

    fn take_input(&mut self, id: u64) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.receive();
            self.serve(id);
        }
    }

    fn poll(&self, ending: bool) -> rustix::io::Result<Ready> {
        let mut fds = Vec::with_capacity(2 + self.connections.len());
        // Once closed it would be readable for ever.
        let wake_events = if ending { PollFlags::empty() } else { PollFlags::IN };
        fds.push(PollFd::new(&self.woken, wake_events));
        // A listener that rests would be readable all the time.
        let accept_events = if self.strangers.paused() { PollFlags::empty() } else { PollFlags::IN };
        fds.push(PollFd::new(&self.listener, accept_events));
        fds.extend(self.strangers.iter().map(|(_, fd)| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        for connection in self.connections.values() {
            let mut events = PollFlags::empty();
            events.set(PollFlags::IN, connection.takes_requests());
            events.set(PollFlags::OUT, connection.unsent() > 0);
            fds.push(PollFd::new(&connection.socket, events));
        }
        let end = ending.then_some(ENDING);
        let timeout = [end, self.strangers.next_look()].into_iter().flatten().min();
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: timeout.subsec_nanos().into(),
        });
        if ending {
            // The closed end is always ready: leave it out.
            poll(&mut fds[1..], timeout.as_ref())?;
        } else {
            poll(&mut fds, timeout.as_ref())?;
        }

        let [wake, listener, sockets @ ..] = fds.as_slice() else {
            return Err(rustix::io::Errno::INVAL);
        };
        let (strangers, sockets) = sockets.split_at(self.strangers.iter().len());
        let spoke = self.strangers.iter().zip(strangers).filter(|(_, fd)| !fd.revents().is_empty());
        let having = |flags: PollFlags| {
            let ids = self.connections.keys().zip(sockets);
            ids.filter(move |(_, fd)| fd.revents().intersects(flags)).map(|(id, _)| *id).collect()
        };
        Ok(Ready {
            woken: !ending && !wake.revents().is_empty(),
            listener: listener.revents().contains(PollFlags::IN),
            strangers: spoke.map(|((id, _), _)| id).collect(),
            readable: having(PollFlags::IN | PollFlags::HUP | PollFlags::ERR),
            writable: having(PollFlags::OUT),
        })
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPT_SLICE {
            match self.strangers.accept(&self.listener) {
                Next::Greet(id) => self.greet(id),
                Next::LastLook(id) => self.look_last(id),
                Next::Nobody => return,
            }
        }
    }

    /// Hears whether a stranger speaks the protocol. Of what it sends behind its first message nothing is read before that is known.
    fn greet(&mut self, id: u64) {
        let Some(stranger) = self.strangers.get_mut(id) else { return };
        let heard = admit(stranger, self.secret.as_ref()).and_then(|inside| match inside {
            true => validate(stranger),
            false => Ok(false),
        });
        match heard {
            Ok(false) => {}
            Ok(true) => {
                if let Some(stranger) = self.strangers.take(id) {
                    let socket = TcpStream::from(stranger.socket);
                    // Without this the connection would only be slower.
                    let _ = socket.set_nodelay(true);
                    let id = self.next;
                    self.next += 1;
                    self.connections.insert(id, Connection::new(socket));
                    self.take_input(id);
                }
            }
            Err(reason) => self.strangers.refuse(id, &reason),
        }
    }

    /// Closes a stranger, unless it has spoken in the meantime.
    fn look_last(&mut self, id: u64) {
        self.greet(id);
        self.strangers.close(id);
    }

    /// Sends what is to be sent, which may let clients go on whose answers were waiting.
    fn settle(&mut self) {
        while let Some(id) = self.changed.pop() {
            let Some(connection) = self.connections.get_mut(&id) else {
                continue;
            };
            let full = !connection.takes_requests();
            connection.flush();
            if full && connection.takes_requests() {
                self.serve(id);
            }
        }
        self.remove_closed();
    }

    fn remove_closed(&mut self) {
        let closed: Vec<u64> =
            self.connections.iter().filter(|(_, connection)| connection.closed).map(|(id, _)| *id).collect();
        for id in closed {
            self.forget_waits(id);
            let woken_for = self.connections.remove(&id).and_then(|connection| connection.woken_for);
            self.pass_on(woken_for);
            for id in std::mem::take(&mut self.changed) {
                if let Some(connection) = self.connections.get_mut(&id) {
                    connection.flush();
                }
            }
        }
    }

    /// Wakes the next one for a queue whose entry a woken client was to take, and has not.
    fn pass_on(&mut self, queue: Option<Vec<u8>>) {
        if let Some(key) = queue.filter(|key| self.board.queue_len(key) > 0) {
            self.wake(&key, true);
        }
    }

    /// Answers the requests that a connection has sent in full.
    fn serve(&mut self, id: u64) {
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        // Out of the connection while the requests, which borrow it, change other connections.
        let input = std::mem::take(&mut connection.input);
        let mut framer = std::mem::take(&mut connection.framer);
        let mut taken = connection.taken;
        let outcome = loop {
            if self.connections.get(&id).is_none_or(|connection| !connection.takes_requests()) {
                break Ok(());
            }
            let length = match framer.advance(&input[taken..]) {
                Ok(Some(length)) => length,
                Ok(None) => break Ok(()),
                Err(violation) => break Err(violation),
            };
            let request = Request::decode(&input[taken..taken + length]);
            taken += length;
            match request.and_then(|request| self.answer(id, request)) {
                Ok(Some(answer)) => self.send(id, &answer.0),
                Ok(None) => {}
                Err(violation) => break Err(violation),
            }
        };
        self.changed.push(id);
        let Some(connection) = self.connections.get_mut(&id) else {
            return;
        };
        connection.input = input;
        connection.framer = framer;
        connection.taken = taken;
        if taken == connection.input.len() {
            connection.input.clear();
            connection.input.shrink_to(READ_BYTES);
            connection.taken = 0;
        } else if taken > READ_BYTES {
            connection.input.drain(..taken);
            connection.taken = 0;
        }
        if let Err(Violation(reason)) = outcome {
            let peer = connection.socket.peer_addr();
            tracing::warn!("store server: closing the connection of {peer:?}: {reason}");
            connection.flush();
            connection.closed = true;
        }
    }

    /// Does what a request asks for. Those that wait are answered later.
    fn answer(&mut self, id: u64, request: Request<'_>) -> std::result::Result<Option<Message>, Violation> {
        let Some(connection) = self.connections.get_mut(&id) else {
            return Ok(None);
        };
        match request {
            Request::Validate(magic) if magic != MAGIC => {
                return Err(Violation(format!("{magic:#x} where {MAGIC:#x} is expected")));
            }
            _ => {}
        }
        let message = Message::default();
        let answer = match request {
            Request::Validate(_) => return Ok(None),
            Request::Ping(nonce) => message.word(nonce),
            Request::Set { key, value } => {
                self.board.set(key, value);
                self.wake(key, false);
                return Ok(None);
            }
            Request::CompareSet { key, expected, desired } => {
                let now = self.board.compare_set(key, expected, desired);
                if self.board.has(key) {
                    self.wake(key, false);
                }
                message.string(&now)
            }
            Request::Get(key) => message.string(self.board.get(key).unwrap_or_default()),
            Request::Add { key, delta } => {
                let sum = self.count(key, delta)?;
                self.wake(key, false);
                message.number(sum)
            }
            Request::Check(keys) => {
                let all = keys.iter().all(|key| self.board.has(key));
                Message(vec![if all { READY } else { NOT_READY }])
            }
            Request::Wait(keys) => {
                let missing: Vec<_> = keys.into_iter().filter(|key| !self.board.has(key)).collect();
                if !missing.is_empty() {
                    self.wait(id, &missing)?;
                    return Ok(None);
                }
                Message(vec![STOP_WAITING])
            }
            Request::NumKeys => message.count(self.board.len()),
            Request::DeleteKey(key) => message.number(self.board.remove(key).into()),
            Request::Append { key, value } => {
                let length = self.board.get(key).map_or(0, <[u8]>::len) + value.len();
                if length > MAX_MESSAGE_BYTES {
                    return Err(Violation(format!("appends to a value that would have {length} bytes")));
                }
                self.board.append(key, value);
                self.wake(key, false);
                return Ok(None);
            }
            Request::MultiGet(keys) => {
                let values: Vec<&[u8]> =
                    keys.iter().map(|key| self.board.get(key).unwrap_or_default()).collect();
                let length: usize = values.iter().map(|value| value.len()).sum();
                if length > MAX_MESSAGE_BYTES {
                    return Err(Violation(format!("asks for {length} bytes at once")));
                }
                values.into_iter().fold(message, Message::string)
            }
            Request::MultiSet(entries) => {
                for (key, value) in entries {
                    self.board.set(key, value);
                    self.wake(key, false);
                }
                return Ok(None);
            }
            Request::CancelWait => {
                let woken_for = connection.woken_for.take();
                self.forget_waits(id);
                self.pass_on(woken_for);
                Message(vec![WAIT_CANCELED])
            }
            Request::QueuePush { key, value } => {
                self.board.push(key, value);
                self.wake(key, true);
                return Ok(None);
            }
            Request::QueuePop(key) => {
                connection.woken_for = None;
                let length = self.board.queue_len(key);
                let message = message.count(length);
                match self.board.pop(key) {
                    Some(value) => message.string(&value),
                    None => message,
                }
            }
            Request::QueueLen(key) => message.count(self.board.queue_len(key)),
            Request::ListKeys => self.board.keys().fold(message.count(self.board.len()), Message::string),
            Request::Barrier { key, size } => {
                if self.count(key, 1)? < size {
                    self.wait(id, &[key])?;
                    return Ok(None);
                }
                self.wake(key, false);
                Message(vec![STOP_WAITING])
            }
        };
        Ok(Some(answer))
    }

    /// Adds to a counter. A barrier's counter is looked at by those who come, not by those who wait.
    fn count(&mut self, key: &[u8], delta: i64) -> std::result::Result<i64, Violation> {
        let name = String::from_utf8_lossy(key).into_owned();
        let sum = self.board.add(key, delta);
        sum.map_err(|error| Violation(format!("adds {delta} to {name:?}: {error:?}")))
    }

    fn send(&mut self, id: u64, bytes: &[u8]) {
        if let Some(connection) = self.connections.get_mut(&id) {
            connection.output.extend_from_slice(bytes);
            self.changed.push(id);
        }
    }

    /// Has a connection wait for `keys`.
    fn wait(&mut self, id: u64, keys: &[&[u8]]) -> std::result::Result<(), Violation> {
        if let Some(connection) = self.connections.get_mut(&id) {
            if connection.awaited > 0 {
                return Err(Violation("waits while it waits".to_owned()));
            }
            connection.awaited = keys.len();
            connection.woken_for = None;
            for key in keys {
                self.waiters.entry((*key).to_owned()).or_default().push_back(id);
            }
        }
        Ok(())
    }

    /// Tells those who wait for `key` that it is there. An entry of a queue is for one of them only.
    fn wake(&mut self, key: &[u8], one: bool) {
        let Some(mut ids) = self.waiters.remove(key) else {
            return;
        };
        while let Some(id) = ids.pop_front() {
            let Some(connection) = self.connections.get_mut(&id) else {
                continue;
            };
            connection.awaited = connection.awaited.saturating_sub(1);
            if connection.awaited == 0 {
                connection.woken_for = one.then(|| key.to_owned());
                self.send(id, &[STOP_WAITING]);
                if one {
                    break;
                }
            }
        }
        if !ids.is_empty() {
            self.waiters.insert(key.to_owned(), ids);
        }
    }

    fn forget_waits(&mut self, id: u64) {
        let waits = self.connections.get_mut(&id).is_some_and(|connection| {
            let awaited = std::mem::take(&mut connection.awaited);
            awaited > 0
        });
        if waits {
            self.waiters.retain(|_, ids| {
                ids.retain(|other| *other != id);
                !ids.is_empty()
            });
        }
    }
}

/// Hears whether a stranger speaks the protocol. True once its first request has come.
fn validate(stranger: &mut Stranger) -> std::result::Result<bool, String> {
    let validate = Message::query(Query::Validate).word(MAGIC).0;
    let all = stranger.read(validate.len())?;
    match validate.starts_with(&stranger.hello) {
        true => Ok(all),
        false => Err("it does not speak the protocol".to_owned()),
    }
}
