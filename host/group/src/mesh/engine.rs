//! The sockets of a group and the messages received through them.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;

use super::address::address_key;
use super::address::{self, Address, Listener};
use super::conn::{Broken, Conn};
use super::frame::{Header, Kind, Signature};
use super::hello::HelloCheck;
use super::peers::{Health, Peer};
use super::wake::Wake;
use crate::call::Message;
use crate::error::{Error, Result};
use crate::foreign::escaped;
use crate::pending::{ACCEPT_SLICE, Accepted, ConnectionLimits, PendingConnections};
use crate::virtual_time::spawn;
use crate::{JobSecret, Store};

/// Epoll keys: the wake-up, the listeners, then connections by index; far from them the strangers
/// by id.
const WAKE: u64 = 0;
const LISTENER: u64 = 1;
const FIRST_CONN: u64 = 16;
const FIRST_STRANGER: u64 = 1 << 63;
const SCRATCH: usize = 256 << 10;
/// Most slices of connections accepted in search of one that carries a goodbye.
const MOST_SLICES: usize = 64;
/// Operations whose signatures are kept, for later queries of other ranks.
const HISTORY: usize = 16;

/// How long a rank that ends waits for a kernel that takes no more of its last frames.
const FLUSH: Duration = Duration::from_millis(200);
/// How long a rank that leaves waits for a peer's host that acknowledges nothing.
const DELIVERY: Duration = Duration::from_secs(5);

/// How long a rank that ends, or finds another rank gone, waits for the store to answer.
const BOARD: Duration = Duration::from_secs(2);

/// The source of the peers' addresses.
#[derive(Debug)]
pub(crate) enum Directory {
    /// Keys `NAME/mesh/RANK` of the group's store, which ranks set when they join.
    Store,
    /// All known from the start.
    Known(Vec<Address>),
}

/// The operation under way.
#[derive(Debug, Clone)]
pub(crate) struct Current {
    pub sequence: u64,
    pub signature: Signature,
    pub start: Instant,
    pub timeout: Duration,
}

impl Current {
    pub(crate) fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.start.elapsed())
    }

    /// The query for the state of an awaited rank.
    pub(super) fn query(&self) -> Header {
        let (signature, sequence) = (self.signature, self.sequence);
        Header { kind: Kind::Query, signature, sequence, tag: 0, len: 0 }
    }
}

#[derive(Debug)]
pub(crate) struct Engine {
    pub name: String,
    pub rank: u32,
    pub size: u32,
    pub(super) directory: Directory,
    /// Where a rank that gave up stores its reason for ranks without a connection to it.
    pub(super) board: Arc<dyn Store>,
    listener: Option<Listener>,
    /// False while the listeners rest.
    listening: bool,
    pending: PendingConnections,
    pub(super) ours: Address,
    /// The secret that a connecting process has to prove.
    pub(super) secret: Option<JobSecret>,
    epoll: OwnedFd,
    pub wake: Arc<Wake>,
    pub peers: Vec<Peer>,
    /// The connections, by epoll key; `None` once closed.
    pub(super) conns: Vec<Option<Conn>>,
    scratch: Vec<u8>,
    /// Messages of send and receive, in the order of arrival.
    pub messages: VecDeque<Message>,
    pub current: Option<Current>,
    /// Ranks that the operation waits for now.
    pub waiting: Vec<u32>,
    /// When this rank last began to wait for its sockets: messages of peers are read after that.
    pub(super) looked: Option<Instant>,
    history: VecDeque<(u64, Signature)>,
    pub next_sequence: u64,
    /// The abort of the earliest operation that a peer announced: rank, operation, reason.
    pub aborted: Option<(u32, u64, String)>,
    pub mismatch: Option<Error>,
    /// The last frames have been sent.
    ending: bool,
}

impl Engine {
    pub(crate) fn new(
        name: &str,
        rank: u32,
        listener: Listener,
        directory: Directory,
        board: Arc<dyn Store>,
        wake: Arc<Wake>,
        limits: &ConnectionLimits,
    ) -> Result<Engine> {
        let epoll =
            epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|error| Error::system("epoll", error))?;
        let add = |fd: &OwnedFd, key: u64| {
            epoll::add(&epoll, fd, EventData::new_u64(key), EventFlags::IN)
                .map_err(|error| Error::system("epoll", error))
        };
        add(&wake.event, WAKE)?;
        for (key, socket) in (LISTENER..).zip(&listener.sockets) {
            add(socket, key)?;
        }
        let (ours, secret) = (listener.address.clone(), listener.secret.clone());
        let size = ours.size;
        let peers = match &directory {
            Directory::Known(all) => all.iter().map(|address| Peer::new(Some(address.clone()))).collect(),
            Directory::Store => (0..size).map(|_| Peer::new(None)).collect(),
        };
        Ok(Engine {
            name: name.to_owned(),
            rank,
            size,
            directory,
            board,
            listener: Some(listener),
            listening: true,
            pending: PendingConnections::new("process group", limits, size as usize),
            ours,
            secret,
            epoll,
            wake,
            peers,
            conns: Vec::new(),
            scratch: vec![0; SCRATCH],
            messages: VecDeque::new(),
            current: None,
            waiting: Vec::new(),
            looked: None,
            history: VecDeque::new(),
            next_sequence: 0,
            aborted: None,
            mismatch: None,
            ending: false,
        })
    }

    /// An error of the current operation.
    pub(crate) fn error(&self, peers: Vec<u32>, reason: impl Into<String>) -> Error {
        let (operation, sequence) = self.current.as_ref().map_or(("between operations", 0), |current| {
            (current.signature.operation.name(), current.sequence)
        });
        let group = self.name.clone();
        Error::Group { group, rank: self.rank, operation, sequence, peers, reason: reason.into() }
    }

    pub(crate) fn begin(&mut self, signature: Signature, timeout: Duration) {
        let sequence = self.next_sequence;
        self.next_sequence += 1;
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back((sequence, signature));
        self.current = Some(Current { sequence, signature, start: Instant::now(), timeout });
        for peer in 0..self.size {
            if let Some((at, theirs)) = self.peers[peer as usize].seen {
                self.compare(peer, at, &theirs);
            }
        }
    }

    /// Records a mismatch between the operations of `peer` and of this rank with the same number.
    fn compare(&mut self, peer: u32, sequence: u64, theirs: &Signature) {
        let ours = self.history.iter().find(|(number, _)| *number == sequence);
        let Some((what, ours, theirs)) = ours.and_then(|(_, ours)| ours.difference(theirs)) else { return };
        let rank = self.rank;
        self.mismatch.get_or_insert(Error::Mismatch { rank, peer, what, ours, theirs });
    }

    pub(super) fn add(&mut self, conn: Conn) -> Result<usize> {
        let index = self.conns.len();
        let key = EventData::new_u64(FIRST_CONN + index as u64);
        epoll::add(&self.epoll, &conn.socket, key, EventFlags::IN)
            .map_err(|error| Error::system("epoll", error))?;
        self.conns.push(Some(conn));
        Ok(index)
    }

    /// Sends a frame to `peer`, opening a connection where there is none.
    pub(crate) fn send(&mut self, peer: u32, header: &Header, payload: &[u8]) -> Result<()> {
        self.check_given_up()?;
        self.check_health(peer)?;
        let index = self.outgoing(peer)?;
        self.send_on(index, header, payload);
        Ok(())
    }

    /// Sends a frame if there is a connection.
    pub(crate) fn send_if_connected(&mut self, peer: u32, header: &Header, payload: &[u8]) {
        let state = &mut self.peers[peer as usize];
        if let Some(index) = state.send_on.or_else(|| state.conns.first().copied()) {
            state.send_on = Some(index);
            self.send_on(index, header, payload);
        }
    }

    pub(super) fn send_on(&mut self, index: usize, header: &Header, payload: &[u8]) {
        let Some(Some(conn)) = self.conns.get_mut(index) else { return };
        let waited = conn.blocked();
        match conn.send(header, payload) {
            Ok(()) if !waited && conn.blocked() => self.watch(index, EventFlags::IN | EventFlags::OUT),
            Ok(()) => {}
            Err(error) => self.send_failed(index, error),
        }
    }

    /// A failed send: the peer has closed, but frames that it sent before may still be read.
    fn send_failed(&mut self, index: usize, error: Errno) {
        self.read(index);
        self.close(index, &format!("sending to it: {error}"));
    }

    fn watch(&self, index: usize, flags: EventFlags) {
        if let Some(Some(conn)) = self.conns.get(index) {
            let key = EventData::new_u64(FIRST_CONN + index as u64);
            // Cannot fail: the socket is open and in the set.
            let _ = epoll::modify(&self.epoll, &conn.socket, key, flags);
        }
    }

    /// True when everything sent to `peer` is with the kernel, or never will be.
    pub(crate) fn flushed(&self, peer: u32) -> bool {
        let conn = self.peers[peer as usize].send_on.and_then(|index| self.conns[index].as_ref());
        conn.is_none_or(Conn::flushed)
    }

    /// Handles events of the sockets, after a wait of up to `timeout`.
    pub(crate) fn progress(&mut self, timeout: Duration) -> Result<()> {
        // Rounded up to the kernel's milliseconds, so that the last wait does not spin.
        let timeout = if timeout.is_zero() { timeout } else { timeout.max(Duration::from_millis(1)) };
        let timeout = self.pending.next_deadline().map_or(timeout, |look| look.min(timeout));
        let timeout = Timespec::try_from(timeout.min(Duration::from_secs(3600)))
            .map_err(|error| Error::os("epoll", error))?;
        self.listen(!self.pending.paused());
        let mut events = [epoll::Event { flags: EventFlags::empty(), data: EventData::new_u64(0) }; 32];
        let count = match epoll::wait(&self.epoll, &mut events, Some(&timeout)) {
            Ok(count) => count,
            Err(Errno::INTR) => 0,
            Err(error) => return Err(Error::system("epoll", error)),
        };
        for event in &events[..count] {
            let (key, flags) = (event.data.u64(), event.flags);
            if key == WAKE {
                self.wake.clear();
            } else if let Some(id) = key.checked_sub(FIRST_STRANGER) {
                self.greet(id);
            } else if let Some(index) = key.checked_sub(FIRST_CONN) {
                self.handle(index as usize, flags);
            } else {
                self.accept((key - LISTENER) as usize);
            }
        }
        while let Some(id) = self.pending.expired() {
            self.greet_or_close(id);
        }
        Ok(())
    }

    /// True where it takes connections from other hosts.
    pub(crate) fn on_network(&self) -> bool {
        self.ours.on_network()
    }

    /// Takes connections from the host of `theirs`, too.
    pub(super) fn open_network(&mut self, theirs: &Address) -> Result<()> {
        let Some(listener) = &mut self.listener else { return Ok(()) };
        listener.open_network(Some(theirs))?;
        self.ours = listener.address.clone();
        let flags = if self.listening { EventFlags::IN } else { EventFlags::empty() };
        for (key, socket) in (LISTENER..).zip(&listener.sockets).skip(1) {
            epoll::add(&self.epoll, socket, EventData::new_u64(key), flags)
                .map_err(|error| Error::system("epoll", error))?;
        }
        Ok(())
    }

    /// Has the listeners woken this rank, or not.
    fn listen(&mut self, listening: bool) {
        if listening != self.listening
            && let Some(listener) = &self.listener
        {
            self.listening = listening;
            let flags = if listening { EventFlags::IN } else { EventFlags::empty() };
            for (key, socket) in (LISTENER..).zip(&listener.sockets) {
                // Cannot fail: the socket is open and in the set.
                let _ = epoll::modify(&self.epoll, socket, EventData::new_u64(key), flags);
            }
        }
    }

    fn handle(&mut self, index: usize, flags: EventFlags) {
        if flags.contains(EventFlags::OUT)
            && let Some(Some(conn)) = self.conns.get_mut(index)
        {
            match conn.flush() {
                Ok(()) if !conn.blocked() => self.watch(index, EventFlags::IN),
                Ok(()) => {}
                Err(error) => self.send_failed(index, error),
            }
        }
        if flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR) {
            self.read(index);
        }
    }

    /// Takes a slice of the connections that wait at a listener. False once there are no more.
    fn accept(&mut self, which: usize) -> bool {
        for _ in 0..ACCEPT_SLICE {
            let Some(socket) = self.listener.as_ref().and_then(|listener| listener.sockets.get(which)) else {
                return false;
            };
            match self.pending.accept(socket) {
                Accepted::New(id) => self.meet(id),
                Accepted::Evict(id) => self.greet_or_close(id),
                Accepted::None => return false,
            }
        }
        true
    }

    fn meet(&mut self, id: u64) {
        let Some(pending) = self.pending.get_mut(id) else { return };
        address::no_delay(&pending.socket);
        let key = EventData::new_u64(FIRST_STRANGER + id);
        match epoll::add(&self.epoll, &pending.socket, key, EventFlags::IN) {
            // The hello has usually arrived.
            Ok(()) => self.greet(id),
            Err(error) => {
                tracing::debug!("epoll: {error}");
                self.pending.close(id);
            }
        }
    }

    /// Reads the hello of a stranger. Bytes behind a hello are read only after the hello has been
    /// checked.
    fn greet(&mut self, id: u64) {
        let check = HelloCheck {
            name: &self.name,
            rank: self.rank,
            size: self.size,
            address: &self.ours,
            secret: self.secret.as_ref(),
        };
        match self.pending.get_mut(id).map(|pending| check.read_hello(pending)) {
            None | Some(Ok(None)) => {}
            Some(Ok(Some(peer))) => self.welcome(id, peer),
            Some(Err(reason)) => self.pending.reject(id, &reason),
        }
    }

    fn welcome(&mut self, id: u64, peer: u32) {
        let Some(pending) = self.pending.take(id) else { return };
        let index = self.conns.len();
        let key = EventData::new_u64(FIRST_CONN + index as u64);
        // Cannot fail: the socket is open and in the set.
        let _ = epoll::modify(&self.epoll, &pending.socket, key, EventFlags::IN);
        self.conns.push(Some(Conn::accepted(pending.socket, peer, pending.keys)));
        self.peers[peer as usize].conns.push(index);
        self.read(index);
    }

    /// Closes a stranger, unless its hello has arrived in the meantime.
    fn greet_or_close(&mut self, id: u64) {
        self.greet(id);
        self.pending.close(id);
    }

    fn read(&mut self, index: usize) {
        let Some(Some(conn)) = self.conns.get_mut(index) else { return };
        let mut frames = Vec::new();
        let waited = conn.blocked();
        let outcome = conn.read(&mut self.scratch, &mut frames);
        // The answer to a challenge releases the frames that waited for it.
        if !waited && conn.blocked() {
            self.watch(index, EventFlags::IN | EventFlags::OUT);
        }
        let (mut asking, mut leaving) = (None, None);
        for (header, payload) in frames {
            let Some(Some(conn)) = self.conns.get_mut(index) else { return };
            let peer = conn.peer;
            if header.kind == Kind::Goodbye {
                conn.farewell = true;
                leaving = Some(peer);
            } else {
                asking = (header.kind == Kind::Query).then_some(peer).or(asking);
                self.receive(peer, header, payload);
            }
        }
        if let Some(peer) = leaving {
            self.record_farewell(peer);
        }
        match outcome {
            Ok(true) => {}
            Ok(false) => self.close(index, "it closed its connection without saying goodbye"),
            Err(Broken::Connection(reason)) => self.close(index, &reason),
            Err(Broken::Stranger(reason)) => {
                if let Some(Some(conn)) = self.conns.get(index) {
                    self.peers[conn.peer as usize].health = Health::Stranger(reason.clone());
                }
                self.close(index, &reason);
            }
        }
        // Answer last: a failed answer closes the connection, and a goodbye may follow the query.
        if let Some(peer) = asking {
            self.answer(peer);
        }
    }

    /// Accepts the connections that wait for it, and reads the hellos of strangers.
    pub(super) fn accept_waiting(&mut self) {
        for which in 0..self.listener.as_ref().map_or(0, |listener| listener.sockets.len()) {
            let mut slices = 0..MOST_SLICES;
            while self.accept(which) && slices.next().is_some() {}
        }
        let pending: Vec<u64> = self.pending.iter().map(|(id, _)| id).collect();
        pending.into_iter().for_each(|id| self.greet(id));
    }

    /// Records a goodbye of `peer`. The peer sends one on each connection, behind its other frames.
    /// The other connection may still hold frames that a collective waits for, so the peer has left
    /// only once all connections have delivered theirs.
    fn record_farewell(&mut self, peer: u32) {
        self.peers[peer as usize].farewell = true;
        self.accept_waiting();
        let state = &self.peers[peer as usize];
        let open = |index: &usize| self.conns[*index].as_ref().is_some_and(|conn| !conn.farewell);
        if state.health == Health::Alive && !state.conns.iter().any(open) {
            self.peers[peer as usize].health = Health::Left;
        }
    }

    /// Sends `peer` the ranks that this rank waits for.
    fn answer(&mut self, peer: u32) {
        if self.current.is_some() {
            let culprits: Vec<u8> = self.culprits().into_iter().flat_map(|rank| rank.to_le_bytes()).collect();
            self.send_if_connected(peer, &Header::control(Kind::Status, 0, culprits.len()), &culprits);
        }
    }

    fn close(&mut self, index: usize, reason: &str) {
        // Dropping the socket takes it out of the set.
        let Some(conn) = self.conns.get_mut(index).and_then(Option::take) else { return };
        let peer = conn.peer;
        let state = &mut self.peers[peer as usize];
        state.conns.retain(|other| *other != index);
        if state.send_on == Some(index) && !state.conns.is_empty() {
            state.send_on = state.conns.first().copied();
        }
        // Two ranks that connect at once have two connections: the other may hold its goodbye, or
        // show that it is alive.
        for other in state.conns.clone() {
            self.read(other);
        }
        if self.peers[peer as usize].farewell {
            return self.record_farewell(peer);
        }
        let state = &self.peers[peer as usize];
        if state.health == Health::Alive && state.conns.is_empty() {
            // The peer may have left with this connection still in its accept queue.
            let dead = || Health::Dead(reason.to_owned());
            // A rank that ends itself needs no reason from the store.
            let known = conn.received_any() || self.ending;
            let health = if known { dead() } else { self.final_health(peer, reason) };
            self.peers[peer as usize].health = health;
        }
    }

    pub(super) fn receive(&mut self, from: u32, header: Header, payload: Vec<u8>) {
        let peer = &mut self.peers[from as usize];
        match header.kind {
            Kind::Hello => {}
            Kind::Collective => {
                peer.seen = Some((header.sequence, header.signature));
                peer.status = None;
                peer.inbox.push_back((header, payload));
                self.compare(from, header.sequence, &header.signature);
            }
            Kind::Message => self.messages.push_back(Message { from, tag: header.tag, data: payload }),
            Kind::Query => {
                if header.signature.operation.is_collective() {
                    peer.seen = Some((header.sequence, header.signature));
                    self.compare(from, header.sequence, &header.signature);
                }
            }
            Kind::Status => {
                let ranks = payload
                    .chunks_exact(4)
                    .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]));
                peer.status = Some((Instant::now(), ranks.filter(|rank| *rank < self.size).collect()));
            }
            Kind::Abort => {
                let reason = escaped(&payload);
                peer.health = Health::GaveUp(reason.clone());
                // The earliest operation, because one of another rank may end a later operation.
                if self.aborted.as_ref().is_none_or(|(_, first, _)| header.sequence < *first) {
                    self.aborted = Some((from, header.sequence, reason));
                }
            }
            // A goodbye concerns one connection: `read` handles it.
            Kind::Goodbye => {}
        }
    }

    /// Sends a last frame to everyone connected.
    fn send_last(&mut self, kind: Kind, text: &str) {
        self.ending = true;
        // Accept peers that connected meanwhile, so that the frame reaches them as well.
        let _ = self.progress(Duration::ZERO);
        // An end during send and receive, or between operations, applies at once.
        let collective = self.current.as_ref().filter(|current| current.signature.operation.is_collective());
        let sequence = collective.map_or(0, |current| current.sequence);
        let header = Header { sequence, ..Header::control(kind, 0, text.len()) };
        // On every connection, because a peer may read the end of either of two first.
        for index in 0..self.conns.len() {
            self.send_on(index, &header, text.as_bytes());
        }
    }

    /// Closes all sockets once the peers' hosts have acknowledged all bytes. A host that
    /// acknowledges none for `patience` is not waited for. A socket that is closed earlier answers
    /// a peer's next frame with a reset, and the kernel then discards what earlier calls reported
    /// as sent.
    fn close_all(&mut self, patience: Duration) {
        let (mut least, mut since) = (usize::MAX, Instant::now());
        loop {
            let unacknowledged: usize = self.conns.iter().flatten().map(Conn::unacknowledged).sum();
            if unacknowledged < least {
                (least, since) = (unacknowledged, Instant::now());
            }
            let flushed = self.conns.iter().flatten().all(Conn::flushed);
            let patience = if unacknowledged > 0 { patience } else { FLUSH };
            if (flushed && unacknowledged == 0)
                || since.elapsed() >= patience
                || self.progress(Duration::from_millis(5)).is_err()
            {
                break;
            }
        }
        self.listener = None;
        self.pending.clear();
        self.conns.clear();
        for peer in &mut self.peers {
            peer.conns.clear();
            peer.send_on = None;
        }
    }

    /// Aborts the group and sends the reason on all connections.
    pub(crate) fn abort(&mut self, reason: &str) {
        self.send_last(Kind::Abort, reason);
        // A rank that connects later reads this key. Without a store it finds a dead rank.
        let (key, reason) = (self.gone_key(self.rank), reason.to_owned());
        let _ = self.ask_board(move |board| board.set(&key, reason.as_bytes()));
        self.close_all(FLUSH);
    }

    /// Leaves in order.
    pub(crate) fn leave(&mut self) {
        // First, so that a rank that finds no socket finds no address either, and concludes that
        // this rank left.
        if let Directory::Store = &self.directory {
            let key = address_key(&self.name, self.rank);
            // The store may have ended already; then nothing is left to clean.
            let _ = self.ask_board(move |board| board.delete(&key));
        }
        self.send_last(Kind::Goodbye, "");
        self.close_all(DELIVERY);
    }

    /// The result of a call on the board, for which this rank waits at most [`BOARD`]. A call that
    /// takes longer continues on its own thread.
    pub(super) fn ask_board<T: Send + 'static>(
        &self,
        call: impl FnOnce(&dyn Store) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (board, (give, result)) = (self.board.clone(), mpsc::channel());
        let call = move || {
            // Fails if the rank has stopped waiting.
            let _ = give.send(call(&*board));
        };
        let thread = spawn(format!("epoxide-board-{}", self.rank), call)
            .map_err(|error| Error::system("spawn", error))?;
        let Ok(outcome) = result.recv_timeout(BOARD) else {
            return Err(Error::os("store", format!("the group's store did not answer within {BOARD:?}")));
        };
        // The thread has nothing left to do.
        let _ = thread.join();
        outcome
    }
}
