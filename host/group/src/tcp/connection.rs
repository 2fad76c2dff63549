//! One connection of a client: the search for the server, and the exchange of messages.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::admission::{Answer, MARK, Terms, claims};
use super::protocol::{
    MAGIC, MAX_MESSAGE_BYTES, Message, Query, READY, STOP_WAITING, Violation, WAIT_CANCELED,
};
use super::record::{Opener, seal};
use crate::error::{Error, Result};
use crate::foreign::quoted;
use crate::secret::{Initiator, Purpose, REPLY, Signer};

/// Waits between attempts to connect grow from this ...
const FIRST_RETRY: Duration = Duration::from_millis(10);
/// ... to this.
const LAST_RETRY: Duration = Duration::from_millis(500);

/// How long one attempt to connect may take, and to resolve a name.
const CONNECT: Duration = Duration::from_secs(5);
/// Time without success after which a warning gives the reason.
const WARN: Duration = Duration::from_secs(5);

/// How often a server may close the connection during the challenge. A server may have just ended,
/// or reject connections for now; PyTorch's closes every time.
const CLOSED: u32 = 8;

/// Bytes of an answer read at a time: memory is allocated as they arrive, not by the length in the
/// answer.
const CHUNK_BYTES: usize = 1024 * 1024;
/// Bytes of records read at a time.
const RECORD_BYTES: usize = 32 * 1024;

/// The address of a server, and what it must prove.
#[derive(Debug, Clone)]
pub(super) struct Address {
    pub host: String,
    pub port: u16,
    pub terms: Terms,
    /// Drawn for the client: the pings of its connections count from here.
    pub client: u32,
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// The server that a client searches for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Server {
    /// One that may start later.
    MayStart,
    /// One to which the client has been connected.
    HasServed,
}

/// One connection, at rest between two requests.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    nonce: u32,
    /// Where the job has a secret: signs requests and checks answers.
    signed: Option<Signed>,
}

struct Signed {
    send: Signer,
    receive: Opener,
    /// Checked, and not used before `used`.
    plain: Vec<u8>,
    used: usize,
}

impl std::fmt::Debug for Signed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Signed").field("send", &self.send).finish_non_exhaustive()
    }
}

impl Signed {
    /// Moves the available bytes into `buffer`. How much that is.
    fn take(&mut self, buffer: &mut [u8]) -> usize {
        let rest = &self.plain[self.used..];
        let length = rest.len().min(buffer.len());
        buffer[..length].copy_from_slice(&rest[..length]);
        self.used += length;
        length
    }
}

impl Connection {
    /// Connects and waits for a first answer. Retries until `deadline`, as the server may start
    /// later.
    pub fn open(address: &Address, deadline: Instant, timeout: Duration) -> Result<Connection> {
        Connection::open_unless(address, deadline, timeout, |_| false)
    }

    /// The same of a client that has been connected. A refusal is final, because the server has
    /// ended.
    pub fn open_again(address: &Address, deadline: Instant, timeout: Duration) -> Result<Connection> {
        Connection::search(address, deadline, timeout, Server::HasServed, |_| false)
    }

    /// The same, unless `stop` returns true, which is called after every failed attempt. Once
    /// [`WARN`] is over, it gets the reason, once.
    pub fn open_unless(
        address: &Address,
        deadline: Instant,
        timeout: Duration,
        stop: impl FnMut(Option<&str>) -> bool,
    ) -> Result<Connection> {
        Connection::search(address, deadline, timeout, Server::MayStart, stop)
    }

    fn search(
        address: &Address,
        deadline: Instant,
        timeout: Duration,
        server: Server,
        mut stop: impl FnMut(Option<&str>) -> bool,
    ) -> Result<Connection> {
        let start = Instant::now();
        let mut warned = false;
        let mut pause = FIRST_RETRY;
        let mut cause: Option<io::Error> = None;
        let mut closed = 0;
        loop {
            match Connection::attempt(address, deadline) {
                Ok(connection) => return Ok(connection),
                // The last attempt may have had no time left; the error before explains more.
                Err(error) if error.kind() == ErrorKind::TimedOut && cause.is_some() => {}
                Err(error) => cause = Some(error),
            }
            let kind = cause.as_ref().map(io::Error::kind);
            closed += u32::from(kind == Some(ErrorKind::ConnectionAborted));
            if let Some(cause) = &cause {
                let reason = match cause.kind() {
                    ErrorKind::PermissionDenied => Some(format!("the store server at {address}: {cause}")),
                    ErrorKind::ConnectionRefused if server == Server::HasServed => Some(format!(
                        "no store server at {address} any more: {cause}; it has ended, with the rank or the process \
                         that served it"
                    )),
                    _ => None,
                };
                if let Some(reason) = reason {
                    return Err(Error::os("connect", reason).with_errno(cause));
                }
            }
            // A server of another protocol will not be replaced by a store.
            let hopeless = kind == Some(ErrorKind::InvalidData) || closed >= CLOSED;
            let left = deadline.saturating_duration_since(Instant::now());
            let warning = match &cause {
                Some(cause) if !warned && start.elapsed() >= WARN => {
                    warned = true;
                    let warning =
                        format!("no store server at {address} yet: {cause}; trying for {left:.0?} more");
                    tracing::warn!("{warning}");
                    Some(warning)
                }
                _ => None,
            };
            if hopeless || left.is_zero() || stop(warning.as_deref()) {
                let text = cause.as_ref().map(io::Error::to_string).unwrap_or_default();
                let reason = format!(
                    "no store server at {address} within {timeout:?}: {text}; the rank that hosts it may not have \
                     started, or have ended, or the address is wrong"
                );
                let error = Error::os("connect", reason);
                return Err(cause.iter().fold(error, Error::with_errno));
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(LAST_RETRY);
        }
    }

    fn attempt(address: &Address, deadline: Instant) -> io::Result<Connection> {
        let mut last = io::Error::new(ErrorKind::NotFound, "the name has no address");
        let addresses = resolve(&address.host, address.port, deadline.min(epoxide_base::deadline(CONNECT)))?;
        for served in addresses {
            match Connection::attempt_at(served, address, deadline) {
                Ok(connection) => return Ok(connection),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn attempt_at(served: SocketAddr, address: &Address, deadline: Instant) -> io::Result<Connection> {
        let Address { terms, client, .. } = address;
        let stream = TcpStream::connect_timeout(&served, remaining(deadline)?.min(CONNECT))?;
        // A port of the range for clients may be connected to itself while no socket listens there.
        if stream.local_addr()? == stream.peer_addr()? {
            return Err(ErrorKind::ConnectionRefused.into());
        }
        stream.set_nodelay(true)?;
        let mut connection = Connection { stream, nonce: *client, signed: None };
        let nonce = connection.nonce();
        let hello = Message::query(Query::Validate).word(MAGIC).then(Query::Ping).word(nonce);
        let deadline = deadline.min(epoxide_base::deadline(CONNECT));
        if terms.secret.is_some() {
            // The actual peer, not the requested address: 0.0.0.0 means a loopback address.
            let served = connection.stream.peer_addr()?;
            connection.challenge(terms, served, deadline)?;
        }
        connection.send(&hello, deadline)?;
        connection.expect_nonce(nonce, deadline)?;
        Ok(connection)
    }

    /// Runs the challenge with the server at `served`: both sides prove the secret.
    fn challenge(&mut self, terms: &Terms, served: SocketAddr, deadline: Instant) -> io::Result<()> {
        let Some(secret) = &terms.secret else { return Ok(()) };
        let initiator = Initiator::new(secret, Purpose::Store, claims(&terms.run, served))
            .map_err(|error| io::Error::other(error.to_string()))?;
        let opening = [MARK.as_slice(), &initiator.opening()].concat();
        let asked = self.send(&Message(opening), deadline).and_then(|()| self.word(deadline));
        let mark = asked.map_err(|error| match error.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
                let reason = "it closed the connection when it was asked to show that it knows this job's secret, as \
                              servers of PyTorch do: unset the secret here, or have epoxide serve the store";
                io::Error::new(ErrorKind::ConnectionAborted, reason)
            }
            _ => error,
        })?;
        if mark != MARK {
            return Err(denied(
                "it does not know what a job's secret is; unset the secret here, or give it to both",
            ));
        }
        if let Some(reason) = self.refusal(deadline)? {
            return Err(denied(&reason));
        }
        let mut reply = [0; REPLY];
        self.receive(&mut reply, deadline)?;
        let (proof, keys) = initiator.answer(&reply).map_err(|wrong| {
            denied(&format!(
                "{wrong}. Or it is not what takes connections at {served}: something forwards them or translates \
                 addresses, or it serves another run; connect to an address that the server's host has itself"
            ))
        })?;
        self.send(&Message(proof.to_vec()), deadline)?;
        let receive = Opener::new(keys.receive);
        self.signed = Some(Signed { send: keys.send, receive, plain: Vec::new(), used: 0 });
        Ok(())
    }

    /// Reads the length of an answer that begins with the mark, and the reason if it is a
    /// rejection.
    fn refusal(&mut self, deadline: Instant) -> io::Result<Option<String>> {
        let length = u32::from_le_bytes(self.word(deadline)?);
        match Answer::of(length) {
            Some(Answer::Reply) => Ok(None),
            Some(Answer::Reason(length)) => {
                let mut text = vec![0; length];
                self.receive(&mut text, deadline)?;
                Ok(Some(format!(
                    "the listener there, without a proof that it knows the secret, answers {}",
                    quoted(&text)
                )))
            }
            None => Err(broken(format!("an answer of length {length:#x} to a challenge"))),
        }
    }

    fn word(&mut self, deadline: Instant) -> io::Result<[u8; 4]> {
        let mut bytes = [0; 4];
        self.receive(&mut bytes, deadline)?;
        Ok(bytes)
    }

    pub fn nonce(&mut self) -> u32 {
        self.nonce = self.nonce.wrapping_add(1);
        self.nonce
    }

    pub fn send(&mut self, message: &Message, deadline: Instant) -> io::Result<()> {
        let mut records = Vec::new();
        let mut rest = message.0.as_slice();
        if let Some(signed) = &mut self.signed {
            seal(&mut signed.send, rest, &mut records);
            rest = &records;
        }
        while !rest.is_empty() {
            self.stream.set_write_timeout(Some(remaining(deadline)?))?;
            match self.stream.write(rest) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(length) => rest = &rest[length..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Fills `buffer`. After an error it has the bytes read before.
    fn receive(&mut self, buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
        let mut filled = 0;
        while filled < buffer.len() {
            if let Some(signed) = &mut self.signed {
                filled += signed.take(&mut buffer[filled..]);
                if filled < buffer.len() {
                    self.receive_records(deadline)?;
                }
                continue;
            }
            filled += self.read(deadline, |stream| stream.read(&mut buffer[filled..]))?;
        }
        Ok(())
    }

    /// Reads the available records; all that was checked before has been used.
    fn receive_records(&mut self, deadline: Instant) -> io::Result<()> {
        let mut chunk = [0; RECORD_BYTES];
        let length = self.read(deadline, |stream| stream.read(&mut chunk))?;
        let Some(signed) = &mut self.signed else { return Ok(()) };
        signed.plain.clear();
        signed.used = 0;
        signed.receive.open(&chunk[..length], &mut signed.plain).map_err(|Violation(reason)| broken(reason))
    }

    /// Reads once, and again after a signal.
    fn read(
        &mut self,
        deadline: Instant,
        mut read: impl FnMut(&mut TcpStream) -> io::Result<usize>,
    ) -> io::Result<usize> {
        loop {
            self.stream.set_read_timeout(Some(remaining(deadline)?))?;
            match read(&mut self.stream) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                outcome => return outcome,
            }
        }
    }

    pub fn byte(&mut self, deadline: Instant) -> io::Result<u8> {
        let mut byte = [0];
        self.receive(&mut byte, deadline)?;
        Ok(byte[0])
    }

    pub fn number(&mut self, deadline: Instant) -> io::Result<i64> {
        let mut bytes = [0; 8];
        self.receive(&mut bytes, deadline)?;
        Ok(i64::from_le_bytes(bytes))
    }

    pub fn unsigned(&mut self, deadline: Instant) -> io::Result<u64> {
        let number = self.number(deadline)?;
        u64::try_from(number).map_err(|_| broken(format!("{number} where a count is expected")))
    }

    pub fn string(&mut self, deadline: Instant) -> io::Result<Vec<u8>> {
        let length = self.unsigned(deadline)?;
        let length = usize::try_from(length).ok().filter(|length| *length <= MAX_MESSAGE_BYTES);
        let Some(length) = length else {
            return Err(broken(format!("an answer of more than {MAX_MESSAGE_BYTES} bytes")));
        };
        let mut bytes = Vec::new();
        while bytes.len() < length {
            let start = bytes.len();
            bytes.resize(length.min(start + CHUNK_BYTES), 0);
            self.receive(&mut bytes[start..], deadline)?;
        }
        Ok(bytes)
    }

    pub fn check(&mut self, deadline: Instant) -> io::Result<bool> {
        Ok(self.byte(deadline)? == READY)
    }

    pub fn expect_nonce(&mut self, nonce: u32, deadline: Instant) -> io::Result<()> {
        let bytes = self.word(deadline)?;
        match u32::from_le_bytes(bytes) {
            answer if answer == nonce => Ok(()),
            _ if bytes == MARK => match self.refusal(deadline)? {
                Some(reason) => Err(denied(&reason)),
                None => Err(broken("answered without a challenge".to_owned())),
            },
            answer => Err(broken(format!("answered a ping of {nonce:#x} with {answer:#x}"))),
        }
    }

    /// Sends a request that waits. False when `timeout` is over; the server has `patience` to
    /// answer beyond that.
    pub fn wait(&mut self, message: &Message, timeout: Duration, patience: Duration) -> io::Result<bool> {
        self.send(message, epoxide_base::deadline(patience))?;
        match self.byte(epoxide_base::deadline(timeout)) {
            Ok(STOP_WAITING) => return Ok(true),
            Ok(byte) => return Err(broken(format!("answered a wait with {byte}"))),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return Err(error),
        }
        self.cancel_wait(epoxide_base::deadline(patience))
    }

    /// Ends a wait. True if it was over before the server received this.
    pub fn cancel_wait(&mut self, deadline: Instant) -> io::Result<bool> {
        self.send(&Message::query(Query::CancelWait), deadline)?;
        let first = self.byte(deadline)?;
        if first == STOP_WAITING && self.byte(deadline)? == WAIT_CANCELED {
            return Ok(true);
        }
        match first {
            WAIT_CANCELED => Ok(false),
            byte => Err(broken(format!("answered the end of a wait with {byte}"))),
        }
    }

    pub fn pop(&mut self, message: &Message, deadline: Instant) -> io::Result<Option<Vec<u8>>> {
        self.send(message, deadline)?;
        match self.unsigned(deadline)? {
            0 => Ok(None),
            _ => self.string(deadline).map(Some),
        }
    }
}

/// The addresses of a host. The system's resolver may take long and has no deadline: a thread that
/// still runs then is leaked.
fn resolve(host: &str, port: u16, deadline: Instant) -> io::Result<Vec<SocketAddr>> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(vec![(ip, port).into()]);
    }
    let (found, addresses) = mpsc::channel();
    let name = host.to_owned();
    let resolve = move || {
        let addresses = (name.as_str(), port).to_socket_addrs().map(Iterator::collect);
        // Fails if the caller has stopped waiting.
        let _ = found.send(addresses);
    };
    std::thread::Builder::new().name("epoxide-resolve".to_owned()).spawn(resolve)?;
    let outcome = addresses.recv_timeout(remaining(deadline)?);
    outcome.unwrap_or_else(|_| {
        let reason = format!("the name {host:?} did not resolve within {CONNECT:?}");
        Err(io::Error::new(ErrorKind::NotFound, reason))
    })
}

fn broken(what: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}

fn denied(reason: &str) -> io::Error {
    io::Error::new(ErrorKind::PermissionDenied, reason)
}

fn remaining(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    // A read timeout below a microsecond would mean none at all.
    if left < Duration::from_micros(1) { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}
