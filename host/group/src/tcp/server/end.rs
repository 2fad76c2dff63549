//! The server's end of a client's connection: bytes in and out, in slices.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;

use crate::board::Shared;
use crate::secret::{Keys, Signer};
use crate::tcp::protocol::{Framer, Violation};
use crate::tcp::record::{Opener, seal};

/// Bytes read from one connection, and bytes made ready for it, before the others get their turn.
pub(super) const SLICE: usize = 64 * 1024;
/// Bytes sent on one connection before the others get their turn.
const SEND_BYTES: usize = 1024 * 1024;
/// No further request of a client is taken while more bytes than this wait for it to read them.
const MAX_UNREAD_BYTES: usize = 256 * 1024;

#[derive(Debug)]
pub(super) struct End {
    pub(super) socket: TcpStream,
    pub(super) closed: bool,
    /// The client sends nothing more.
    pub(super) ended: bool,
    /// Complete requests are left.
    pub(super) busy: bool,
    /// The server was ending when it came.
    pub(super) late: bool,
    /// The number of its first ping, which all connections of a client share.
    pub(super) client: Option<u32>,
    /// The queue that it was woken for and has not read yet.
    pub(super) woken_for: Option<Vec<u8>>,
    /// Bytes that it was last found to hold.
    pub(super) counted: usize,
    /// Where the job has a secret: checks received records.
    opener: Option<Opener>,
    input: Input,
    output: Output,
}

/// Bytes received; those before `taken` have been dealt with.
#[derive(Debug, Default)]
pub(super) struct Input {
    bytes: Vec<u8>,
    taken: usize,
    framer: Framer,
}

/// Bytes to send; bytes before `sent` have been sent. `rest` follows; its next slice is encoded
/// once `bytes` are sent.
#[derive(Debug, Default)]
struct Output {
    bytes: Vec<u8>,
    sent: usize,
    rest: VecDeque<Piece>,
    /// How much of the first piece has been made ready.
    ready: usize,
    /// Where the job has a secret: signs what is sent.
    signer: Option<Signer>,
    /// Signed bytes; bytes before `signed_sent` have been sent.
    signed: Vec<u8>,
    signed_sent: usize,
}

#[derive(Debug)]
enum Piece {
    Plain(Vec<u8>),
    /// With its length before it.
    String(Shared),
}

impl End {
    /// The end of a client's connection, whose messages are signed with `keys` where the job has a
    /// secret.
    pub(super) fn new(socket: TcpStream, keys: Option<Keys>, late: bool) -> End {
        let (signer, opener) = keys.map(|keys| (keys.send, Opener::new(keys.receive))).unzip();
        End {
            socket,
            closed: false,
            ended: false,
            busy: false,
            late,
            client: None,
            woken_for: None,
            counted: 0,
            opener,
            input: Input::default(),
            output: Output { signer, ..Output::default() },
        }
    }

    /// True when its next request may be read.
    pub(super) fn takes_requests(&self) -> bool {
        !self.closed && self.output.rest.is_empty() && self.output.unsent() <= MAX_UNREAD_BYTES
    }

    /// True when more may be read from it.
    pub(super) fn reads(&self) -> bool {
        self.takes_requests() && !self.busy && !self.ended
    }

    /// True while there is something to send.
    pub(super) fn sends(&self) -> bool {
        self.output.unsent() > 0 || !self.output.rest.is_empty() || self.output.unsent_records() > 0
    }

    /// Bytes held. The values of unsent answers count for the store.
    pub(super) fn bytes(&self) -> usize {
        let rest = self.output.rest.capacity() * size_of::<Piece>();
        let woken_for = self.woken_for.as_ref().map_or(0, Vec::len);
        let records = self.output.signed.capacity() + self.opener.as_ref().map_or(0, Opener::bytes);
        self.input.bytes.capacity() + self.output.bytes.capacity() + records + rest + woken_for
    }

    /// Reads a slice of the received bytes.
    pub(super) fn receive(&mut self) -> Result<(), Violation> {
        let mut chunk = [0; SLICE];
        match (self.socket.read(&mut chunk), &mut self.opener) {
            (Ok(0), _) => self.ended = true,
            (Ok(length), None) => self.input.add(&chunk[..length]),
            (Ok(length), Some(opener)) => {
                let mut plain = Vec::with_capacity(length);
                opener.open(&chunk[..length], &mut plain)?;
                self.input.add(&plain);
            }
            (Err(error), _) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            (Err(_), _) => self.closed = true,
        }
        Ok(())
    }

    /// The input, while its requests, which borrow it, change this and other connections; it is to
    /// be put back.
    pub(super) fn take_input(&mut self) -> Input {
        std::mem::take(&mut self.input)
    }

    pub(super) fn put_back(&mut self, mut input: Input) {
        input.forget_taken();
        self.input = input;
    }

    /// Puts bytes behind all that is to be sent.
    pub(super) fn send(&mut self, bytes: &[u8]) {
        if self.output.rest.is_empty() {
            self.output.bytes.extend_from_slice(bytes);
        } else {
            self.output.rest.push_back(Piece::Plain(bytes.to_vec()));
        }
    }

    /// Puts a string, with its length, behind all that is to be sent.
    pub(super) fn send_string(&mut self, string: &Shared) {
        if self.output.rest.is_empty() && self.output.unsent() + string.len() <= SLICE {
            self.output.bytes.extend_from_slice(&(string.len() as u64).to_le_bytes());
            self.output.bytes.extend_from_slice(string);
        } else {
            self.output.rest.push_back(Piece::String(string.clone()));
        }
    }

    /// Sends what the socket takes, up to a slice.
    pub(super) fn flush(&mut self) {
        let mut left = SEND_BYTES;
        while left > 0 && !self.closed {
            let Some((ready, sent)) = self.output.next() else { return };
            match self.socket.write(&ready[..ready.len().min(left)]) {
                Ok(0) => self.closed = true,
                Ok(length) => {
                    *sent += length;
                    left -= length;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => self.closed = true,
            }
        }
    }
}

impl Input {
    fn add(&mut self, bytes: &[u8]) {
        let (length, needed) = (self.bytes.len(), self.bytes.len() + bytes.len());
        if needed > self.bytes.capacity() {
            // Less than doubling it: the bytes of a client are bounded.
            self.bytes.reserve_exact(bytes.len() + length / 4);
        }
        self.bytes.extend_from_slice(bytes);
    }

    /// The next request, once it is complete.
    pub(super) fn next(&mut self) -> Result<Option<&[u8]>, Violation> {
        let rest = &self.bytes[self.taken..];
        let length = self.framer.advance(rest)?;
        Ok(length.map(|length| {
            self.taken += length;
            &rest[..length]
        }))
    }

    fn forget_taken(&mut self) {
        if self.taken == self.bytes.len() {
            self.bytes.clear();
        } else if self.taken > SLICE {
            self.bytes.drain(..self.taken);
        } else {
            return;
        }
        self.taken = 0;
        // A large request is rare; its memory need not stay.
        if self.bytes.len() <= SLICE {
            self.bytes.shrink_to(SLICE);
        }
    }
}

impl Output {
    fn unsent(&self) -> usize {
        self.bytes.len() - self.sent
    }

    fn unsent_records(&self) -> usize {
        self.signed.len() - self.signed_sent
    }

    /// The bytes to be sent next, and the count of those sent. `None` when there are none.
    fn next(&mut self) -> Option<(&[u8], &mut usize)> {
        if self.unsent_records() == 0 && self.unsent() == 0 && !self.refill() {
            return None;
        }
        let Some(signer) = &mut self.signer else {
            return Some((&self.bytes[self.sent..], &mut self.sent));
        };
        if self.signed.len() == self.signed_sent {
            self.signed.clear();
            self.signed_sent = 0;
            let part = &self.bytes[self.sent..];
            let part = &part[..part.len().min(SLICE)];
            seal(signer, part, &mut self.signed);
            self.sent += part.len();
        }
        Some((&self.signed[self.signed_sent..], &mut self.signed_sent))
    }

    /// Encodes the next slice once the last is sent. False when none is left.
    fn refill(&mut self) -> bool {
        self.bytes.clear();
        self.sent = 0;
        // Many small answers are rare; their memory need not stay.
        self.bytes.shrink_to(SLICE);
        while self.bytes.len() < SLICE
            && let Some(piece) = self.rest.front()
        {
            let bytes: &[u8] = match piece {
                Piece::Plain(bytes) => bytes,
                Piece::String(string) => {
                    if self.ready == 0 {
                        self.bytes.extend_from_slice(&(string.len() as u64).to_le_bytes());
                    }
                    string
                }
            };
            let part = &bytes[self.ready..];
            let part = &part[..part.len().min(SLICE)];
            self.bytes.extend_from_slice(part);
            self.ready += part.len();
            if self.ready == bytes.len() {
                self.rest.pop_front();
                self.ready = 0;
                if self.rest.is_empty() {
                    self.rest = VecDeque::new();
                }
            }
        }
        !self.bytes.is_empty()
    }
}
