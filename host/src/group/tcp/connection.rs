//! One connection of a client: finding the server, and what goes over the wire.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use super::protocol::{MAGIC, MAX_MESSAGE_BYTES, Message, Query, READY, STOP_WAITING, WAIT_CANCELED};
use crate::error::{Error, Result};

/// Waits between attempts to connect grow from this ...
const FIRST_RETRY: Duration = Duration::from_millis(10);
/// ... to this.
const LAST_RETRY: Duration = Duration::from_millis(500);

/// How long one attempt to connect may take.
const CONNECT: Duration = Duration::from_secs(5);

/// Bytes of an answer read at a time: memory is taken as they come, not as the answer's length says.
const CHUNK_BYTES: usize = 1024 * 1024;

#[derive(Debug, Clone)]
pub(super) struct Address {
    pub host: String,
    pub port: u16,
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "[{}]:{}", self.host, self.port),
            false => write!(f, "{}:{}", self.host, self.port),
        }
    }
}

/// One connection, at rest between two requests.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    nonce: u32,
}

impl Connection {
    /// Connects and has the server answer once. Tries again, as the server may not be there yet, until `deadline`.
    pub fn open(address: &Address, deadline: Instant, timeout: Duration) -> Result<Connection> {
        Connection::open_unless(address, deadline, timeout, || false)
    }

    /// The same, unless `stop` says otherwise, which is asked after every attempt that failed.
    pub fn open_unless(
        address: &Address,
        deadline: Instant,
        timeout: Duration,
        mut stop: impl FnMut() -> bool,
    ) -> Result<Connection> {
        let mut pause = FIRST_RETRY;
        let mut cause: Option<io::Error> = None;
        loop {
            match Connection::attempt(address, deadline) {
                Ok(connection) => return Ok(connection),
                // The last attempt may have had no time left; the one before says more.
                Err(error) if error.kind() == ErrorKind::TimedOut && cause.is_some() => {}
                Err(error) => cause = Some(error),
            }
            // What answers in another language will not be replaced by a store.
            let hopeless = cause.as_ref().is_some_and(|cause| cause.kind() == ErrorKind::InvalidData);
            let left = deadline.saturating_duration_since(Instant::now());
            if hopeless || left.is_zero() || stop() {
                let cause = cause.map(|cause| cause.to_string()).unwrap_or_default();
                let reason = format!(
                    "no store server at {address} within {timeout:?}: {cause}; the rank that hosts it may not have \
                     started, or have ended, or the address is wrong"
                );
                return Err(Error::os("connect", reason));
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(LAST_RETRY);
        }
    }

    fn attempt(address: &Address, deadline: Instant) -> io::Result<Connection> {
        let mut last = io::Error::new(ErrorKind::NotFound, "the name has no address");
        let addresses: Vec<SocketAddr> = (address.host.as_str(), address.port).to_socket_addrs()?.collect();
        for address in addresses {
            match Connection::attempt_at(address, deadline) {
                Ok(connection) => return Ok(connection),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn attempt_at(address: SocketAddr, deadline: Instant) -> io::Result<Connection> {
        let stream = TcpStream::connect_timeout(&address, remaining(deadline)?.min(CONNECT))?;
        // A port of the range for clients may be connected to itself while nobody listens there.
        if stream.local_addr()? == stream.peer_addr()? {
            return Err(ErrorKind::ConnectionRefused.into());
        }
        stream.set_nodelay(true)?;
        let mut connection = Connection { stream, nonce: std::process::id() };
        let nonce = connection.nonce();
        let hello = Message::query(Query::Validate).word(MAGIC).then(Query::Ping).word(nonce);
        let deadline = deadline.min(after(CONNECT));
        connection.send(&hello, deadline)?;
        connection.expect_nonce(nonce, deadline)?;
        Ok(connection)
    }

    pub fn nonce(&mut self) -> u32 {
        self.nonce = self.nonce.wrapping_add(1);
        self.nonce
    }

    pub fn send(&mut self, message: &Message, deadline: Instant) -> io::Result<()> {
        let mut rest = message.0.as_slice();
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

    /// Fills `buffer`. What came before an error is in it.
    fn receive(&mut self, buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
        let mut filled = 0;
        while filled < buffer.len() {
            self.stream.set_read_timeout(Some(remaining(deadline)?))?;
            match self.stream.read(&mut buffer[filled..]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(length) => filled += length,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
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
        let mut bytes = [0; 4];
        self.receive(&mut bytes, deadline)?;
        match u32::from_le_bytes(bytes) {
            answer if answer == nonce => Ok(()),
            answer => Err(broken(format!("answered a ping of {nonce:#x} with {answer:#x}"))),
        }
    }

    /// Sends a request that waits. False when `timeout` is over; the server has `patience` to answer beyond that.
    pub fn wait(&mut self, message: &Message, timeout: Duration, patience: Duration) -> io::Result<bool> {
        self.send(message, after(patience))?;
        match self.byte(after(timeout)) {
            Ok(STOP_WAITING) => return Ok(true),
            Ok(byte) => return Err(broken(format!("answered a wait with {byte}"))),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return Err(error),
        }
        self.cancel_wait(after(patience))
    }

    /// Ends a wait. True when it was over before the server heard of this.
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

fn broken(what: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}

/// The time when `timeout` is over.
pub(super) fn after(timeout: Duration) -> Instant {
    let now = Instant::now();
    // So long that the clock cannot tell: as good as a year.
    now.checked_add(timeout).unwrap_or(now + Duration::from_secs(365 * 24 * 3600))
}

fn remaining(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    // A read timeout below a microsecond would mean none at all.
    if left < Duration::from_micros(1) { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}
