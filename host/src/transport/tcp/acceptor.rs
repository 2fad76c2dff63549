//! Setup of connections: the calling side, and the admission of callers.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use super::frame::{MAX_REASON, refusal, word32, word64};
use super::receiver::Incoming;
use super::{MORE_DESCRIPTORS, descriptors, is_out_of_descriptors, left, wait_for};
use crate::error::{Error, Result};
use crate::foreign::quoted;
use crate::group::internal::{
    ACCEPT_SLICE, Accepted, BACKLOG, Initiator, Keys, OPENING, PROOF, PendingConnections, Purpose, Responder,
    Signer, WrongSecret, interface_address, loopback, random,
};
use crate::group::{JobSecret, SOCKET_IFNAME};
use crate::transport::greeting::{MAGIC, PHASE, VERSION};
use crate::transport::setup::{POLL_INTERVAL, Setup};

pub(super) const TOKEN: usize = 16;
/// Magic u64, version u32, phase u32, token, rank u32, queue u32, connection u32, 0 u32, bytes of
/// wire memory u64; little endian.
pub(super) const HELLO: usize = 56;

/// A connection among those of a rank: one of a queue's, numbered from 0, from or to a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Place {
    pub(super) queue: u32,
    pub(super) peer: u32,
    pub(super) connection: u32,
}

impl Place {
    /// Places of the connections to all peers, and from them, so many of each queue; ascending.
    pub(super) fn all(setup: &Setup<'_>, connections: u32) -> impl Iterator<Item = Place> {
        let place =
            move |(queue, peer)| (0..connections).map(move |connection| Place { queue, peer, connection });
        setup.pairs().flat_map(place)
    }
}

/// The first message of a connection; the peer of `place` is the rank itself.
pub(super) fn hello(version: u32, phase: u32, token: &[u8; TOKEN], place: Place, memory: u64) -> [u8; HELLO] {
    let mut bytes = [0; HELLO];
    bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
    bytes[8..12].copy_from_slice(&version.to_le_bytes());
    bytes[12..16].copy_from_slice(&phase.to_le_bytes());
    bytes[16..32].copy_from_slice(token);
    bytes[32..36].copy_from_slice(&place.peer.to_le_bytes());
    bytes[36..40].copy_from_slice(&place.queue.to_le_bytes());
    bytes[40..44].copy_from_slice(&place.connection.to_le_bytes());
    bytes[48..].copy_from_slice(&memory.to_le_bytes());
    bytes
}

/// The claims on which both ends of a connection agree: the group, the two ranks, the queue, the
/// connection of it, and the address. The peer of `from` is the connecting rank.
pub(super) fn claims(setup: &Setup<'_>, from: Place, to: u32, address: SocketAddr) -> Vec<u8> {
    let Place { queue, peer, connection } = from;
    let mut claims = [PHASE, peer, to, queue, connection].map(u32::to_le_bytes).concat();
    claims.extend_from_slice(&setup.memory.bytes().to_le_bytes());
    for text in [setup.group.name(), &address.to_string()] {
        claims.extend_from_slice(&(text.len() as u64).to_le_bytes());
        claims.extend_from_slice(text.as_bytes());
    }
    claims
}

/// A connection to a peer that has received this rank's hello.
#[derive(Debug)]
pub(super) struct Dialed {
    socket: TcpStream,
    /// The proof expected from the peer, if the job has a secret, and its token.
    challenge: Option<(Initiator, [u8; TOKEN])>,
}

impl Dialed {
    /// Reads the answer to the hello. Returns the connection, and its signer of headers where the
    /// job has a secret.
    pub(super) fn answered(mut self, deadline: Instant) -> Result<(TcpStream, Option<Signer>), String> {
        read_answer(&mut self.socket, deadline)?;
        let mut signer = None;
        if let Some((initiator, token)) = &self.challenge {
            let mut proof = [0; PROOF];
            take(&mut self.socket, &mut proof, deadline).map_err(|error| format!("no proof: {error}"))?;
            signer = Some(initiator.check(token, &proof).map_err(|wrong| wrong.to_string())?.send);
        }
        Ok((self.socket, signer))
    }
}

/// Connects to a peer and sends this rank's hello. The peer's listener queues few connections until
/// its rank accepts some, and that rank may wait for this one in turn. So this rank accepts its
/// `expected` ones meanwhile.
pub(super) fn dial(
    acceptor: &mut Acceptor,
    setup: &Setup<'_>,
    address: &str,
    expected: &[Place],
    place: Place,
    deadline: Instant,
) -> Result<Dialed> {
    let peer = place.peer;
    let fail = |reason: String| setup.ends(peer).error("connect", reason);
    let (token, socket_address) =
        parse_address(address).ok_or_else(|| fail(format!("it announced no address but {address:?}")))?;
    let failed = |error: std::io::Error| {
        let remedy = match is_out_of_descriptors(&error) {
            true => MORE_DESCRIPTORS.to_owned(),
            false => {
                let hint = queue_hint(expected.len(), &somaxconn());
                format!("is it reachable from here? {SOCKET_IFNAME} chooses the interface{hint}")
            }
        };
        fail(format!("{socket_address}: {error}; {remedy}"))
    };
    let mut socket = begin(socket_address).map_err(failed)?;
    while !is_connected(&socket).map_err(failed)? {
        if Instant::now() >= deadline {
            return Err(failed(ErrorKind::TimedOut.into()));
        }
        acceptor.accept_some(setup, expected, Duration::ZERO)?;
    }
    acceptor.accept_some(setup, expected, Duration::ZERO)?;
    socket.set_nonblocking(false).map_err(failed)?;
    socket.set_nodelay(true).map_err(failed)?;
    // Detects a vanished host even if all bytes fit the socket's buffer.
    let limit = u32::try_from(setup.options.timeout.as_millis()).unwrap_or(u32::MAX);
    let _ = sockopt::set_tcp_user_timeout(&socket, limit);
    socket.set_write_timeout(Some(left(deadline))).map_err(failed)?;
    let own = Place { peer: setup.group.rank(), ..place };
    let mut hello = hello(VERSION, PHASE, &token, own, setup.memory.bytes()).to_vec();
    let mut challenge = None;
    if let Some(secret) = &acceptor.secret {
        let claims = claims(setup, own, peer, socket_address);
        // The token is new and was received over the group, so the opening can include the proof.
        // No rank waits for an answer before it has accepted.
        let initiator = Initiator::new(secret, Purpose::Transport, claims)?;
        hello.extend_from_slice(&initiator.opening());
        hello.extend_from_slice(&initiator.proof(&token));
        challenge = Some((initiator, token));
    }
    socket.write_all(&hello).map_err(failed)?;
    Ok(Dialed { socket, challenge })
}

/// Begins a connection to a listener.
fn begin(address: SocketAddr) -> std::io::Result<TcpStream> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(socket.into()),
        Err(error) => Err(error.into()),
    }
}

/// Whether a begun connection is established, now or within [`POLL_INTERVAL`].
fn is_connected(socket: &TcpStream) -> std::io::Result<bool> {
    let mut polled = [PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::OUT)];
    wait_for(&mut polled, POLL_INTERVAL)?;
    socket.take_error()?.map_or(Ok(!polled[0].revents().is_empty()), Err)
}

/// A hint for the error of a failed connection, if more are made at once than the system queues at
/// a listener. `somaxconn` is the text of its limit.
pub(super) fn queue_hint(expected: usize, somaxconn: &str) -> String {
    match somaxconn.trim().parse::<usize>() {
        Ok(limit) if expected > limit => format!(
            "; {expected} connections come in at once, and the system queues {limit}: raise net.core.somaxconn, or lower \
             queues_per_peer or connections_per_queue"
        ),
        _ => String::new(),
    }
}

fn somaxconn() -> String {
    // An unreadable limit gives no hint.
    std::fs::read_to_string("/proc/sys/net/core/somaxconn").unwrap_or_default()
}

/// Reads all of `bytes` until the deadline. A peer that sends them one by one does not stretch it.
fn take(socket: &mut TcpStream, mut bytes: &mut [u8], deadline: Instant) -> std::io::Result<()> {
    while !bytes.is_empty() {
        socket.set_read_timeout(Some(left(deadline)))?;
        match socket.read(bytes) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(read) => bytes = &mut bytes[read..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
        // Checked after the read: bytes that have arrived in time count.
        if !bytes.is_empty() && Instant::now() >= deadline {
            return Err(ErrorKind::TimedOut.into());
        }
    }
    Ok(())
}

/// Reads the answer to a hello.
pub(super) fn read_answer(socket: &mut TcpStream, deadline: Instant) -> Result<(), String> {
    let mut len = [0; 4];
    take(socket, &mut len, deadline).map_err(|error| format!("no answer to the hello: {error}"))?;
    let mut text = vec![0; (u32::from_le_bytes(len) as usize).min(MAX_REASON)];
    if text.is_empty() {
        return Ok(());
    }
    take(socket, &mut text, deadline).map_err(|error| format!("rejected, without a reason: {error}"))?;
    Err(format!("rejected; the listener there answers {}", quoted(&text)))
}

fn parse_address(text: &str) -> Option<([u8; TOKEN], SocketAddr)> {
    let (token, address) = text.split_once('@')?;
    let token = u128::from_str_radix(token, 16).ok()?.to_be_bytes();
    Some((token, address.parse().ok()?))
}

/// Accepts the peers' connections while links are set up.
#[derive(Debug)]
pub(super) struct Acceptor {
    pub(super) listener: TcpListener,
    pub(super) address: SocketAddr,
    /// Keeps strangers out.
    pub(super) token: [u8; TOKEN],
    /// The secret that a connecting process has to prove.
    pub(super) secret: Option<JobSecret>,
    pending: PendingConnections,
    accepted: BTreeMap<Place, Incoming>,
}

/// The verdict on a hello.
#[derive(Debug)]
enum Verdict {
    /// The hello is not complete yet.
    Incomplete,
    /// An expected connection, for this place.
    Welcome(Place),
    /// A connection that does not belong to the group.
    Stranger(String),
    /// A rank of this group that got something wrong.
    Wrong(u32, String),
}

impl Acceptor {
    /// `connections`: most connections of a queue.
    pub(super) fn open(setup: &Setup<'_>, connections: u32) -> Result<Acceptor> {
        let (token, secret) = (random()?, setup.group.job_secret()?);
        let interface = setup.group.interface();
        // An interface that was named is taken in any case.
        let named = interface.map(Into::into).or_else(|| std::env::var_os(SOCKET_IFNAME));
        let is_named = named.is_some_and(|name: OsString| !name.is_empty());
        let ip =
            if setup.group.shares_host() && !is_named { loopback() } else { interface_address(interface)? };
        let pending = PendingConnections::new(
            "tcp transport",
            &setup.options.limits,
            Place::all(setup, connections).count(),
        );
        let open = || {
            let listener = TcpListener::bind((ip, 0))?;
            // All peers connect at once.
            rustix::net::listen(&listener, BACKLOG)?;
            listener.set_nonblocking(true)?;
            let address = listener.local_addr()?;
            Ok(Acceptor {
                listener,
                address,
                token,
                secret: secret.clone(),
                pending,
                accepted: BTreeMap::new(),
            })
        };
        open()
            .map_err(|error: std::io::Error| Error::os("listen", format!("{ip}: {error}")).with_errno(&error))
    }

    pub(super) fn address(&self) -> String {
        format!("{:032x}@{}", u128::from_be_bytes(self.token), self.address)
    }

    /// All connections of all peers' queues, so many of each queue.
    pub(super) fn accept(
        &mut self,
        setup: &Setup<'_>,
        connections: u32,
        deadline: Instant,
    ) -> Result<BTreeMap<Place, Incoming>> {
        let expected: Vec<Place> = Place::all(setup, connections).collect();
        loop {
            let mut missing = expected.iter().filter(|place| !self.accepted.contains_key(*place));
            let Some(&Place { queue, peer, connection }) = missing.next() else { break };
            if Instant::now() >= deadline {
                let cause = match descriptors() {
                    (0, most) => {
                        format!("this process has all of its {most} descriptors open: {MORE_DESCRIPTORS}")
                    }
                    _ => {
                        let hint = queue_hint(expected.len(), &somaxconn());
                        format!("the rank may have died, or the network does not let it through{hint}")
                    }
                };
                let reason = format!(
                    "connection {connection} of queue {queue} did not connect within {:?}, as did {} other(s); {cause}",
                    setup.timeout,
                    missing.count(),
                );
                return Err(setup.ends(peer).error("connect", reason));
            }
            self.accept_some(setup, &expected, POLL_INTERVAL)?;
        }
        Ok(std::mem::take(&mut self.accepted))
    }

    /// Accepts connections that are pending or arrive within `wait`.
    pub(super) fn accept_some(
        &mut self,
        setup: &Setup<'_>,
        expected: &[Place],
        wait: Duration,
    ) -> Result<()> {
        let ready = self.pending.wait_readable(&self.listener, wait);
        let ready = ready.map_err(|error| Error::system("poll", error))?;
        for id in ready.pending {
            self.greet(id, setup, expected)?;
        }
        while let Some(id) = self.pending.expired() {
            self.greet_or_close(id, setup, expected)?;
        }
        if !ready.listener {
            return Ok(());
        }
        for _ in 0..ACCEPT_SLICE {
            match self.pending.accept(&self.listener) {
                Accepted::New(id) => self.greet(id, setup, expected)?,
                Accepted::Evict(id) => self.greet_or_close(id, setup, expected)?,
                Accepted::None => break,
            }
        }
        Ok(())
    }

    /// Reads a stranger's hello, and admits it or sends the reason of its rejection.
    fn greet(&mut self, id: u64, setup: &Setup<'_>, expected: &[Place]) -> Result<()> {
        let Some(pending) = self.pending.get_mut(id) else { return Ok(()) };
        let length = HELLO + self.secret.as_ref().map_or(0, |_| OPENING + PROOF);
        let mut answer = vec![0; 4];
        let mut signer = None;
        let verdict = match pending.read(length) {
            Ok(_) => {
                let expects = |place| expected.contains(&place) && !self.accepted.contains_key(&place);
                let rules = Rules { token: &self.token, memory: setup.memory.bytes(), expects: &expects };
                let (hello, rest) = pending.hello.split_at(pending.hello.len().min(HELLO));
                let verdict = judge(&rules, hello);
                // Without the secret a hello is no evidence about a rank.
                match (&self.secret, &verdict) {
                    (Some(secret), Verdict::Welcome(..) | Verdict::Wrong(..)) => {
                        let claims = claims(setup, place_in(hello), setup.group.rank(), self.address);
                        match proven(secret, &claims, &self.token, rest) {
                            Ok(Some((own, keys))) => {
                                answer.extend_from_slice(&own);
                                signer = Some(keys.receive);
                                verdict
                            }
                            Ok(None) => Verdict::Incomplete,
                            Err(wrong) => Verdict::Stranger(wrong.to_string()),
                        }
                    }
                    _ => verdict,
                }
            }
            Err(reason) => Verdict::Stranger(reason),
        };
        if matches!(verdict, Verdict::Incomplete) {
            return Ok(());
        }
        let Some(pending) = self.pending.take(id) else { return Ok(()) };
        let mut socket = TcpStream::from(pending.socket);
        match verdict {
            Verdict::Incomplete => {}
            Verdict::Welcome(place) => {
                let ready = socket.write_all(&answer).and_then(|()| socket.set_nonblocking(false));
                ready.map_err(|error| setup.ends(place.peer).error("connect", error.to_string()))?;
                self.accepted.insert(place, Incoming { socket, signer });
            }
            Verdict::Stranger(reason) => {
                let _ = socket.write_all(&refusal(&reason));
                self.pending.warn(&format!("refused a connection: {reason}"));
            }
            Verdict::Wrong(peer, reason) => {
                let _ = socket.write_all(&refusal(&reason));
                return Err(setup.ends(peer).error("connect", reason));
            }
        }
        Ok(())
    }

    /// Closes a stranger, unless its hello has arrived in the meantime.
    fn greet_or_close(&mut self, id: u64, setup: &Setup<'_>, expected: &[Place]) -> Result<()> {
        self.greet(id, setup, expected)?;
        self.pending.close(id);
        Ok(())
    }
}

/// Checks the opening and the proof behind a hello. Returns this end's own proof and keys, once
/// both have arrived.
fn proven(
    secret: &JobSecret,
    claims: &[u8],
    token: &[u8; TOKEN],
    bytes: &[u8],
) -> Result<Option<([u8; PROOF], Keys)>, WrongSecret> {
    let shown = bytes.split_first_chunk::<OPENING>();
    let Some((opening, Some(proof))) = shown.map(|(opening, proof)| (opening, proof.first_chunk())) else {
        return Ok(None);
    };
    let (responder, own) = Responder::known(secret, Purpose::Transport, claims, opening, token);
    responder.check(proof).map(|keys| Some((own, keys)))
}

/// The connections that a rank accepts.
struct Rules<'a> {
    token: &'a [u8; TOKEN],
    /// Bytes of its wire memory.
    memory: u64,
    /// Whether it waits for this connection.
    expects: &'a dyn Fn(Place) -> bool,
}

/// The place that a hello names.
fn place_in(hello: &[u8]) -> Place {
    Place { peer: word32(hello, 32), queue: word32(hello, 36), connection: word32(hello, 40) }
}

fn judge(rules: &Rules<'_>, bytes: &[u8]) -> Verdict {
    // The first words are the same in every version, whatever the hello's length.
    if bytes.len() >= 8 && word64(bytes, 0) != MAGIC {
        return Verdict::Stranger("no hello of epoxide's transport".into());
    }
    if bytes.len() >= 12 && word32(bytes, 8) != VERSION {
        let theirs = word32(bytes, 8);
        return Verdict::Stranger(format!("protocol version {theirs}; this rank has version {VERSION}"));
    }
    if bytes.len() < HELLO {
        return Verdict::Incomplete;
    }
    if bytes[16..32] != *rules.token {
        return Verdict::Stranger("wrong token: the connection is meant for another rank or group".into());
    }
    let (phase, place, memory) = (word32(bytes, 12), place_in(bytes), word64(bytes, 48));
    let (Place { queue, peer, connection }, own) = (place, rules.memory);
    if phase != PHASE {
        return Verdict::Wrong(peer, format!("phase {phase}; this rank connects phase {PHASE}"));
    }
    if memory != own {
        return Verdict::Wrong(peer, format!("wire memory of {memory} bytes; this rank has {own}"));
    }
    if word32(bytes, 44) != 0 || !(rules.expects)(place) {
        return Verdict::Wrong(
            peer,
            format!(
                "connection {connection} of queue {queue} of rank {peer} is not expected, or is there already"
            ),
        );
    }
    Verdict::Welcome(place)
}

const SAMPLE_TOKEN: [u8; TOKEN] = *b"0123456789abcdef";
const SAMPLE_MEMORY: u64 = 1 << 20;

/// Reads a hello as the acceptor does. It admits only a connection with the token and the expected
/// fields, and sends any other a short reason.
pub fn fuzz_tcp_hello(bytes: &[u8]) {
    let rules = Rules {
        token: &SAMPLE_TOKEN,
        memory: SAMPLE_MEMORY,
        expects: &|place| place.queue < 2 && place.peer == 1 && place.connection < 3,
    };
    let whole = &bytes[..bytes.len().min(HELLO)];
    // Byte by byte: the first verdict counts.
    let early = (0..whole.len()).map(|length| judge(&rules, &whole[..length]));
    let early = early.into_iter().find(|verdict| !matches!(verdict, Verdict::Incomplete));
    match early.unwrap_or_else(|| judge(&rules, whole)) {
        Verdict::Incomplete => assert!(whole.len() < HELLO),
        Verdict::Welcome(place) => {
            assert_eq!(whole, hello(VERSION, PHASE, &SAMPLE_TOKEN, place, SAMPLE_MEMORY));
        }
        Verdict::Stranger(reason) => assert!(refusal(&reason).len() < 200),
        Verdict::Wrong(_, reason) => {
            assert!(whole[16..32] == SAMPLE_TOKEN && refusal(&reason).len() < 200);
        }
    }
}

/// A hello that is let in.
pub fn sample_tcp_hello() -> Vec<Vec<u8>> {
    let place = Place { queue: 1, peer: 1, connection: 2 };
    vec![hello(VERSION, PHASE, &SAMPLE_TOKEN, place, SAMPLE_MEMORY).to_vec()]
}
