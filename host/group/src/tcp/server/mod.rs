//! The server: one thread, all sockets in one `poll`. The server works in slices, so that no client
//! blocks the others: each turn it reads, runs and sends a bounded part for each client.

mod clients;
mod end;
mod waits;

use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::sockopt;

use self::clients::Clients;
use self::end::End;
use super::admission::{Terms, admit};
use super::listen::{listen, listen_all};
use super::protocol::{MAGIC, Message, Query, Request, Violation};
use crate::error::{Error, Result};
use crate::lock::lock;
use crate::pending::{
    ACCEPT_SLICE, Accepted, BACKLOG, ConnectionLimits, LogLimit, PendingConnection, PendingConnections,
    descriptors,
};
use crate::secret::Keys;

/// Longer than anyone waits, and short enough to be added to the time.
const MAX_LINGER: Duration = Duration::from_secs(24 * 3600);
/// Requests of one client before the others get their turn.
const REQUESTS: usize = 1024;
/// How often a server that ends checks whether all clients have left.
const ENDING: Duration = Duration::from_millis(10);
/// A client's host that sends nothing for this long is probed ...
const KEEPALIVE: Duration = Duration::from_secs(60);
/// ... this often ...
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(15);
/// ... and counts as dead after as many unanswered probes.
const KEEPALIVE_COUNT: u32 = 4;

/// A server of the store protocol, for [`TcpStore`](super::TcpStore) and for PyTorch's clients.
///
/// Without a secret any process that reaches the port can read and write the store, as with
/// PyTorch's. If the job has one, only a [`TcpStore`](super::TcpStore) that proves it can. The
/// resources of all clients together are bounded by [`ConnectionLimits`]. A client may be idle
/// forever, but its host must respond to the kernel's keep-alive probes. Dropping the server closes
/// the port and all connections, and ends its thread; [`TcpStoreServer::finish`] lets the clients
/// leave first.
#[derive(Debug)]
pub struct TcpStoreServer {
    address: SocketAddr,
    /// Closing it wakes the thread.
    wake: Option<UnixStream>,
    /// Until when the thread continues after that, while it has clients.
    until: Arc<Mutex<Option<Instant>>>,
    held: Arc<Held>,
    thread: Option<JoinHandle<()>>,
}

/// Memory of a server, in bytes; for tests.
#[derive(Debug, Default)]
pub struct Held {
    /// For its clients: incomplete requests, waits, answers not yet sent.
    pub clients: AtomicUsize,
    /// Keys and values.
    pub store: AtomicUsize,
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
        TcpStoreServer::with_limits(listener, &ConnectionLimits::default())
    }

    /// Like [`TcpStoreServer::from_listener`], with other limits than the default.
    pub fn with_limits(listener: TcpListener, limits: &ConnectionLimits) -> Result<TcpStoreServer> {
        TcpStoreServer::start(vec![listener], Terms::default(), limits)
    }

    /// A server that admits only clients that prove the secret of `terms`, if any. It listens at
    /// all of `listeners`; its address is that of the first.
    pub(super) fn start(
        listeners: Vec<TcpListener>,
        terms: Terms,
        limits: &ConnectionLimits,
    ) -> Result<TcpStoreServer> {
        let os = |call: &'static str| move |error: std::io::Error| Error::system(call, error);
        for listener in &listeners {
            // Once more, for the longer backlog: all ranks of a job connect at the same time.
            rustix::net::listen(listener, BACKLOG).map_err(|error| Error::system("listen", error))?;
            listener.set_nonblocking(true).map_err(os("set_nonblocking"))?;
        }
        let first = listeners.first().ok_or_else(|| Error::os("listen", "no address to listen at"))?;
        let address = first.local_addr().map_err(os("getsockname"))?;
        let (wake, woken) = UnixStream::pair().map_err(os("socketpair"))?;
        let until = Arc::new(Mutex::new(None));
        let held = Arc::new(Held::default());
        let server = Server {
            listeners,
            terms,
            woken,
            until: until.clone(),
            clients: Clients::new(limits.max_store_bytes),
            next: 0,
            ending: false,
            pending: PendingConnections::new("store server", limits, 0),
            most_clients: limits.max_clients.min(descriptors(6)),
            client_bytes: limits.max_client_bytes,
            held: held.clone(),
            log: LogLimit::default(),
        };
        let thread = std::thread::Builder::new()
            .name("epoxide-store".to_owned())
            .spawn(move || server.run())
            .map_err(os("spawn"))?;
        Ok(TcpStoreServer { address, wake: Some(wake), until, held, thread: Some(thread) })
    }

    /// The address it listens at.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The port it listens at.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Its memory.
    pub fn held(&self) -> &Held {
        &self.held
    }

    /// Ends the server once all clients have left, or when `linger` is over. No new client is
    /// admitted meanwhile.
    pub fn finish(mut self, linger: Duration) {
        self.end(linger);
    }

    fn end(&mut self, linger: Duration) {
        *lock(&self.until) = Some(Instant::now() + linger.min(MAX_LINGER));
        drop(self.wake.take());
        if let Some(thread) = self.thread.take() {
            // A panic has printed its reason; the sockets are closed in any case.
            let _ = thread.join();
        }
    }
}

impl Drop for TcpStoreServer {
    fn drop(&mut self) {
        self.end(Duration::ZERO);
    }
}

/// The state of the thread.
struct Server {
    listeners: Vec<TcpListener>,
    terms: Terms,
    woken: UnixStream,
    until: Arc<Mutex<Option<Instant>>>,
    clients: Clients,
    /// The next connection's number.
    next: u64,
    /// The server stays only for the clients that it has.
    ending: bool,
    pending: PendingConnections,
    most_clients: usize,
    client_bytes: usize,
    held: Arc<Held>,
    log: LogLimit,
}

/// The results of `poll`.
struct Ready {
    woken: bool,
    /// The listeners with connections, by index.
    listeners: Vec<usize>,
    pending: Vec<u64>,
    readable: Vec<u64>,
    writable: Vec<u64>,
}

impl Server {
    fn run(mut self) {
        loop {
            if self.ending {
                let until = *lock(&self.until);
                let alone = self.clients.connections.is_empty() && self.pending.is_empty();
                if alone || until.is_none_or(|until| Instant::now() >= until) {
                    return;
                }
            }
            let ready = match self.poll() {
                Ok(ready) => ready,
                Err(rustix::io::Errno::INTR | rustix::io::Errno::NOMEM) => continue,
                Err(error) => {
                    tracing::error!(
                        "store server at {:?}: poll: {error}",
                        self.listeners.first().map(TcpListener::local_addr)
                    );
                    return;
                }
            };
            self.ending |= ready.woken;
            for id in ready.readable {
                if let Some(connection) = self.clients.connections.get_mut(&id) {
                    // Not polled for reading, so this is HUP or ERR: the client has closed it.
                    if !connection.takes_requests() {
                        connection.closed = true;
                    } else if let Err(Violation(reason)) = connection.receive() {
                        self.reject(id, &reason);
                    }
                }
                self.serve(id);
            }
            for id in self.busy() {
                self.serve(id);
            }
            for id in ready.pending {
                self.greet(id);
            }
            while let Some(id) = self.pending.expired() {
                self.greet_or_close(id);
            }
            for index in ready.listeners {
                self.accept(index);
            }
            self.clients.changed.extend(ready.writable);
            self.flush_changed();
            self.bound();
        }
    }

    fn poll(&self) -> rustix::io::Result<Ready> {
        let ending = self.ending;
        let connections = &self.clients.connections;
        let mut fds = Vec::with_capacity(3 + self.pending.iter().len() + connections.len());
        // Once closed it would be readable for ever.
        let wake_events = if ending { PollFlags::empty() } else { PollFlags::IN };
        fds.push(PollFd::new(&self.woken, wake_events));
        // A listener that rests would be readable all the time.
        let accept_events = if self.pending.paused() { PollFlags::empty() } else { PollFlags::IN };
        fds.extend(self.listeners.iter().map(|listener| PollFd::new(listener, accept_events)));
        fds.extend(self.pending.iter().map(|(_, fd)| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        for connection in connections.values() {
            let mut events = PollFlags::empty();
            events.set(PollFlags::IN, connection.reads());
            events.set(PollFlags::OUT, connection.sends());
            fds.push(PollFd::new(&connection.socket, events));
        }
        let busy = connections.values().any(|connection| connection.busy && connection.takes_requests());
        let now = busy.then_some(Duration::ZERO);
        let end = ending.then_some(ENDING);
        let timeout = [now, end, self.pending.next_deadline()].into_iter().flatten().min();
        // A timeout that the kernel cannot express is as good as none.
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        if ending {
            // The closed end is always ready: leave it out.
            poll(&mut fds[1..], timeout.as_ref())?;
        } else {
            poll(&mut fds, timeout.as_ref())?;
        }

        let [wake, sockets @ ..] = fds.as_slice() else {
            return Err(rustix::io::Errno::INVAL);
        };
        let (listeners, sockets) = sockets.split_at(self.listeners.len());
        let (pending, sockets) = sockets.split_at(self.pending.iter().len());
        let spoke = self.pending.iter().zip(pending).filter(|(_, fd)| !fd.revents().is_empty());
        let having = |flags: PollFlags| {
            let ids = connections.keys().zip(sockets);
            ids.filter(move |(_, fd)| fd.revents().intersects(flags)).map(|(id, _)| *id).collect()
        };
        Ok(Ready {
            woken: !ending && !wake.revents().is_empty(),
            listeners: (0..)
                .zip(listeners)
                .filter(|(_, fd)| fd.revents().contains(PollFlags::IN))
                .map(|(index, _)| index)
                .collect(),
            pending: spoke.map(|((id, _), _)| id).collect(),
            readable: having(PollFlags::IN | PollFlags::HUP | PollFlags::ERR),
            writable: having(PollFlags::OUT),
        })
    }

    fn accept(&mut self, index: usize) {
        for _ in 0..ACCEPT_SLICE {
            let Some(listener) = self.listeners.get(index) else { return };
            match self.pending.accept(listener) {
                Accepted::New(id) => self.greet(id),
                Accepted::Evict(id) => self.greet_or_close(id),
                Accepted::None => return,
            }
        }
    }

    /// Reads a stranger's first message: the start of the protocol, or of the challenge if the job
    /// has a secret.
    fn greet(&mut self, id: u64) {
        let Some(pending) = self.pending.get_mut(id) else { return };
        let admitted = admit(pending, &self.terms).and_then(|inside| match inside {
            true if pending.keys.is_some() => Ok(true),
            true => validate(pending),
            false => Ok(false),
        });
        match admitted {
            Ok(false) => {}
            Ok(true) if self.clients.connections.len() >= self.most_clients => {
                self.pending.close(id);
                self.log.warn(format_args!(
                    "store server: {} clients are connected, and no more are taken; raise ConnectionLimits::max_clients, or the limit on open files (ulimit -n)",
                    self.clients.connections.len()
                ));
            }
            Ok(true) => {
                if let Some(pending) = self.pending.take(id) {
                    self.welcome(TcpStream::from(pending.socket), pending.keys);
                }
            }
            Err(reason) => self.pending.reject(id, &reason),
        }
    }

    /// Closes a stranger, unless its hello has arrived in the meantime.
    fn greet_or_close(&mut self, id: u64) {
        self.greet(id);
        self.pending.close(id);
    }

    fn welcome(&mut self, socket: TcpStream, keys: Option<Keys>) {
        // A failure only makes the connection slower ...
        let _ = socket.set_nodelay(true);
        // ... and without these stay when the client's host vanishes.
        let _ = sockopt::set_tcp_keepidle(&socket, KEEPALIVE);
        let _ = sockopt::set_tcp_keepintvl(&socket, KEEPALIVE_INTERVAL);
        let _ = sockopt::set_tcp_keepcnt(&socket, KEEPALIVE_COUNT);
        let _ = sockopt::set_socket_keepalive(&socket, true);
        let id = self.next;
        self.next += 1;
        let mut connection = End::new(socket, keys, self.ending);
        // The first request has usually arrived.
        let received = connection.receive();
        self.clients.connections.insert(id, connection);
        if let Err(Violation(reason)) = received {
            self.reject(id, &reason);
        }
        self.serve(id);
    }

    /// Connections with complete requests that wait for their turn.
    fn busy(&self) -> Vec<u64> {
        let busy = self.clients.connections.iter().filter(|(_, connection)| connection.busy);
        busy.map(|(id, _)| *id).collect()
    }

    /// Answers a slice of a connection's complete requests.
    fn serve(&mut self, id: u64) {
        let Some(connection) = self.clients.connections.get_mut(&id) else { return };
        // Out of the connection while the requests, which borrow it, change other connections.
        let mut input = connection.take_input();
        let mut requests = 0;
        let outcome = loop {
            if requests == REQUESTS
                || self.clients.connections.get(&id).is_none_or(|connection| !connection.takes_requests())
            {
                break Ok(true);
            }
            requests += 1;
            let request = match input.next() {
                Ok(Some(bytes)) => Request::decode(bytes),
                Ok(None) => break Ok(false),
                Err(violation) => break Err(violation),
            };
            if let Err(violation) = request.and_then(|request| self.clients.answer(id, request)) {
                break Err(violation);
            }
        };
        self.clients.changed.push(id);
        let Some(connection) = self.clients.connections.get_mut(&id) else { return };
        connection.put_back(input);
        match outcome {
            Ok(busy) => {
                connection.busy = busy;
                // All its requests are done.
                connection.closed |= connection.ended && !busy;
            }
            Err(Violation(reason)) => self.reject(id, &reason),
        }
    }

    /// Closes the connection of a client that breaks the protocol.
    fn reject(&mut self, id: u64, reason: &str) {
        let Some(connection) = self.clients.connections.get_mut(&id) else { return };
        let peer = connection.socket.peer_addr();
        connection.flush();
        connection.closed = true;
        self.log.warn(format_args!("store server: closing the connection of {peer:?}: {reason}"));
    }

    /// Sends what is to be sent.
    fn flush_changed(&mut self) {
        loop {
            // The closed connection's wakes may pass to others.
            self.remove_closed();
            if self.clients.changed.is_empty() {
                return;
            }
            for id in std::mem::take(&mut self.clients.changed) {
                if let Some(connection) = self.clients.connections.get_mut(&id) {
                    connection.flush();
                    let bytes = connection.bytes() + self.clients.waits.bytes(id);
                    let before = std::mem::replace(&mut connection.counted, bytes);
                    let total = self.held.clients.load(Ordering::Relaxed);
                    self.held.clients.store(total - before + bytes, Ordering::Relaxed);
                }
            }
        }
    }

    /// Closes those that hold the most while all hold too much.
    fn bound(&mut self) {
        self.held.store.store(self.clients.board.bytes(), Ordering::Relaxed);
        while self.held.clients.load(Ordering::Relaxed) > self.client_bytes
            && let Some(most) =
                self.clients.connections.values_mut().max_by_key(|connection| connection.counted)
        {
            most.closed = true;
            let (bytes, peer) = (most.counted, most.socket.peer_addr());
            self.log.warn(format_args!(
                "store server: the clients' requests, waits and unread answers take more than {} bytes; closing the connection of {peer:?}, which \
                 takes {bytes} of them; send less at once, read the answers, or raise ConnectionLimits::max_client_bytes",
                self.client_bytes
            ));
            self.flush_changed();
        }
    }

    fn remove_closed(&mut self) {
        let closed = self.clients.connections.iter().filter(|(_, connection)| connection.closed);
        for id in closed.map(|(id, _)| *id).collect::<Vec<_>>() {
            if let Some(connection) = self.clients.remove(id) {
                self.held.clients.fetch_sub(connection.counted, Ordering::Relaxed);
            }
        }
    }
}

/// Checks the first request of a stranger.
fn validate(pending: &mut PendingConnection) -> std::result::Result<bool, String> {
    let validate = Message::query(Query::Validate).word(MAGIC).0;
    let all = pending.read(validate.len())?;
    match validate.starts_with(&pending.hello) {
        true => Ok(all),
        false => Err("it does not speak the protocol".to_owned()),
    }
}
