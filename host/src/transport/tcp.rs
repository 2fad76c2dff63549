//! Puts over TCP: every queue has a connection of its own to the peer, with a thread there that takes the puts.
//!
//! A connection starts with a hello (see [`hello`]) and the peer's answer. Then frames go one way: a header of four u64,
//! little endian (bytes, to, counter, value), and the bytes. The other way there is at most a farewell: the receiver's
//! goodbye, or why it refused a frame.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt;

use super::greeting::{self, MAGIC, PHASE, VERSION};
use super::staging::Staging;
use super::{Interrupt, LOOK, Link, Links, Place, Put, Queue, Receiving, Setup, store_counter};
use crate::driver::{DevicePtr, Memory};
use crate::error::{Error, Result};
use crate::group::interface_address;

const TOKEN: usize = 16;
/// Magic u64, version u32, phase u32, token, rank u32, queue u32, bytes of wire memory u64; little endian.
const HELLO: usize = 48;
const HEADER: usize = 32;
/// In place of a header's bytes: nothing is put any more.
const GOODBYE: u64 = u64::MAX;
/// In place of the length of a refusal: this rank takes nothing any more.
const FAREWELL: u32 = u32::MAX;
/// Longest text of a refusal, in bytes.
const MAX_REASON: usize = 1024;
/// Puts per system call: two pieces each, of at most 1024.
const WRITE_PUTS: usize = 256;
/// Pieces of staging per connection, and their bytes: enough that copies and the network overlap.
const PIECES: usize = 4;
const PIECE_BYTES: u64 = 256 << 10;
/// Start of a receiving piece: the counter's value. The bytes follow, aligned.
const PIECE_HEAD: u64 = 128;
/// Connections that have not said who they are, beside those expected.
const STRANGERS: usize = 64;
/// How long a goodbye may take.
const GOODBYE_TIME: Duration = Duration::from_millis(200);

pub(super) fn connect(setup: &Setup<'_>) -> Result<Links> {
    let door = greeting::check_arguments(setup).and_then(|()| Door::open(setup));
    let address = door.as_ref().map(Door::address).map_err(Error::clone);
    let all = greeting::meet(setup, address)?;
    let door = door?;
    let (links, receivers) = greeting::agree(setup, make_links(setup, &door, &all))?;
    Ok(Links { links, receiving: Box::new(receivers) })
}

fn make_links(setup: &Setup<'_>, door: &Door, all: &[greeting::Greeting]) -> Result<(Vec<Link>, Receivers)> {
    let deadline = Instant::now() + setup.timeout;
    // Connect, accept, and only then wait for answers: no rank waits for one that waits.
    let mut outgoing = Vec::new();
    for (queue, peer) in setup.pairs() {
        let address = all.get(peer as usize).and_then(|greeting| greeting.address.as_deref().ok());
        outgoing.push((queue, peer, dial(setup, address.unwrap_or_default(), queue, peer, deadline)?));
    }
    let incoming = door.accept(setup, deadline)?;
    let mut links = Vec::new();
    for (index, peer, mut socket) in outgoing {
        let place = setup.place(peer);
        read_answer(&mut socket, deadline).map_err(|reason| place.error("connect", reason))?;
        links.push(Link { peer, index, queue: Box::new(TcpQueue::new(setup, place, socket)?) });
    }
    Ok((links, Receivers::start(setup, incoming)?))
}

/// What a connection says first.
fn hello(version: u32, phase: u32, token: &[u8; TOKEN], rank: u32, queue: u32, memory: u64) -> [u8; HELLO] {
    let mut bytes = [0; HELLO];
    bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
    bytes[8..12].copy_from_slice(&version.to_le_bytes());
    bytes[12..16].copy_from_slice(&phase.to_le_bytes());
    bytes[16..32].copy_from_slice(token);
    bytes[32..36].copy_from_slice(&rank.to_le_bytes());
    bytes[36..40].copy_from_slice(&queue.to_le_bytes());
    bytes[40..].copy_from_slice(&memory.to_le_bytes());
    bytes
}

fn word32(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].iter().take(4).rev().fold(0, |word, byte| word << 8 | u32::from(*byte))
}

fn word64(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].iter().take(8).rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

/// Connects to a peer and says who this is.
fn dial(setup: &Setup<'_>, address: &str, queue: u32, peer: u32, deadline: Instant) -> Result<TcpStream> {
    let fail = |reason: String| setup.place(peer).error("connect", reason);
    let (token, socket_address) =
        parse_address(address).ok_or_else(|| fail(format!("it announced no address but {address:?}")))?;
    let failed = |error: std::io::Error| {
        fail(format!(
            "{socket_address}: {error}; is it reachable from here? EPOXIDE_SOCKET_IFNAME chooses the interface"
        ))
    };
    let mut socket = TcpStream::connect_timeout(&socket_address, left(deadline)).map_err(failed)?;
    socket.set_nodelay(true).map_err(failed)?;
    // So that a host that vanished shows even where all bytes fit the socket's buffer.
    let limit = u32::try_from(setup.options.timeout.as_millis()).unwrap_or(u32::MAX);
    let _ = sockopt::set_tcp_user_timeout(&socket, limit);
    socket.set_write_timeout(Some(left(deadline))).map_err(failed)?;
    let hello = hello(VERSION, PHASE, &token, setup.group.rank(), queue, setup.memory.bytes());
    socket.write_all(&hello).map_err(failed)?;
    Ok(socket)
}

/// Takes the answer to a hello.
fn read_answer(socket: &mut TcpStream, deadline: Instant) -> Result<(), String> {
    let mut take = |bytes: &mut [u8]| {
        socket.set_read_timeout(Some(left(deadline)))?;
        socket.read_exact(bytes)
    };
    let mut len = [0; 4];
    take(&mut len).map_err(|error| format!("no answer to the hello: {error}"))?;
    let mut text = vec![0; (u32::from_le_bytes(len) as usize).min(MAX_REASON)];
    if text.is_empty() {
        return Ok(());
    }
    take(&mut text).map_err(|error| format!("refused, but did not say why: {error}"))?;
    Err(format!("refused: {}", String::from_utf8_lossy(&text)))
}

fn left(deadline: Instant) -> Duration {
    // Zero would mean for ever.
    deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}

/// A refusal as it goes over the connection.
fn refusal(reason: &str) -> Vec<u8> {
    let text = &reason.as_bytes()[..reason.len().min(MAX_REASON)];
    let mut bytes = (text.len() as u32).to_le_bytes().to_vec();
    bytes.extend_from_slice(text);
    bytes
}

fn parse_address(text: &str) -> Option<([u8; TOKEN], SocketAddr)> {
    let (token, address) = text.split_once('@')?;
    let token = u128::from_str_radix(token, 16).ok()?.to_be_bytes();
    Some((token, address.parse().ok()?))
}

/// Where the peers' connections come in while links are set up.
#[derive(Debug)]
struct Door {
    listener: TcpListener,
    address: SocketAddr,
    /// Keeps strangers out.
    token: [u8; TOKEN],
}

/// What a hello deserves.
#[derive(Debug)]
enum Verdict {
    /// There is more of it to come.
    Incomplete,
    /// It is the connection of this (queue, peer).
    Welcome(u32, u32),
    /// Somebody who does not belong here.
    Stranger(String),
    /// A rank of this group that got something wrong.
    Wrong(u32, String),
}

impl Door {
    fn open(setup: &Setup<'_>) -> Result<Door> {
        let mut token = [0; TOKEN];
        std::fs::File::open("/dev/urandom")
            .and_then(|mut source| source.read_exact(&mut token))
            .map_err(|error| Error::os("read /dev/urandom", error))?;
        let ip = interface_address(None)?;
        let expected = setup.pairs().count();
        let open = || {
            let listener = TcpListener::bind((ip, 0))?;
            // All peers connect before any of them is accepted.
            rustix::net::listen(&listener, i32::try_from(expected + STRANGERS).unwrap_or(i32::MAX))?;
            listener.set_nonblocking(true)?;
            let address = listener.local_addr()?;
            Ok(Door { listener, address, token })
        };
        open().map_err(|error: std::io::Error| Error::os("listen", format!("{ip}: {error}")))
    }

    fn address(&self) -> String {
        format!("{:032x}@{}", u128::from_be_bytes(self.token), self.address)
    }

    /// The connections of all peers' queues.
    fn accept(&self, setup: &Setup<'_>, deadline: Instant) -> Result<BTreeMap<(u32, u32), TcpStream>> {
        let expected = setup.pairs().count();
        let mut accepted = BTreeMap::new();
        let mut pending: Vec<(TcpStream, Vec<u8>)> = Vec::new();
        while accepted.len() < expected {
            if Instant::now() >= deadline {
                let missing: Vec<(u32, u32)> =
                    setup.pairs().filter(|pair| !accepted.contains_key(pair)).collect();
                let (queue, peer) = missing.first().copied().unwrap_or_default();
                let reason = format!(
                    "queue {queue} did not connect within {:?}, as did {} other(s); the rank may have died, or the network \
                     does not let it through",
                    setup.timeout,
                    missing.len() - 1
                );
                return Err(setup.place(peer).error("connect", reason));
            }
            for index in self.ready(&pending)?.into_iter().rev() {
                let (socket, bytes) = &mut pending[index];
                let verdict = match take_hello(socket, bytes) {
                    Ok(()) => self.judge(setup, bytes, &accepted),
                    Err(reason) => Verdict::Stranger(reason),
                };
                if matches!(verdict, Verdict::Incomplete) {
                    continue;
                }
                let (mut socket, _) = pending.swap_remove(index);
                match verdict {
                    Verdict::Incomplete => {}
                    Verdict::Welcome(queue, peer) => {
                        let ready = socket.write_all(&[0; 4]).and_then(|()| socket.set_nonblocking(false));
                        ready.map_err(|error| setup.place(peer).error("connect", error.to_string()))?;
                        accepted.insert((queue, peer), socket);
                    }
                    Verdict::Stranger(reason) => {
                        tracing::warn!("tcp transport: refused a connection: {reason}");
                        let _ = socket.write_all(&refusal(&reason));
                    }
                    Verdict::Wrong(peer, reason) => {
                        let _ = socket.write_all(&refusal(&reason));
                        return Err(setup.place(peer).error("connect", reason));
                    }
                }
            }
            loop {
                match self.listener.accept() {
                    Ok((socket, _)) => {
                        if socket.set_nonblocking(true).is_ok() {
                            pending.push((socket, Vec::new()));
                        }
                        if pending.len() > expected + STRANGERS {
                            // The one that has been silent for longest.
                            pending.remove(0);
                        }
                    }
                    Err(error) => match Errno::from_io_error(&error) {
                        Some(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => break,
                        _ => return Err(Error::os("accept", error)),
                    },
                }
            }
        }
        Ok(accepted)
    }

    /// Waits a moment for any of the sockets; which of `pending` can be read, ascending.
    fn ready(&self, pending: &[(TcpStream, Vec<u8>)]) -> Result<Vec<usize>> {
        let sockets = pending.iter().map(|(socket, _)| socket.as_fd());
        let mut polled: Vec<PollFd<'_>> = std::iter::once(self.listener.as_fd())
            .chain(sockets)
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        wait_for(&mut polled, LOOK).map_err(|error| Error::os("poll", error))?;
        let readable = polled[1..].iter().enumerate().filter(|(_, fd)| !fd.revents().is_empty());
        Ok(readable.map(|(index, _)| index).collect())
    }

    fn judge(&self, setup: &Setup<'_>, bytes: &[u8], accepted: &BTreeMap<(u32, u32), TcpStream>) -> Verdict {
        // The first words stay what they are in every version, however long its hello is.
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
        if bytes[16..32] != self.token {
            return Verdict::Stranger(
                "wrong token: the connection is meant for another rank or group".into(),
            );
        }
        let (phase, peer, queue, memory) =
            (word32(bytes, 12), word32(bytes, 32), word32(bytes, 36), word64(bytes, 40));
        let own = setup.memory.bytes();
        if phase != PHASE {
            return Verdict::Wrong(peer, format!("phase {phase}; this rank connects phase {PHASE}"));
        }
        if memory != own {
            return Verdict::Wrong(peer, format!("wire memory of {memory} bytes; this rank has {own}"));
        }
        if !setup.pairs().any(|pair| pair == (queue, peer)) || accepted.contains_key(&(queue, peer)) {
            return Verdict::Wrong(
                peer,
                format!("queue {queue} of rank {peer} is not expected, or is there already"),
            );
        }
        Verdict::Welcome(queue, peer)
    }
}

/// Reads what there is of a hello. What is behind it stays in the socket.
fn take_hello(socket: &mut TcpStream, bytes: &mut Vec<u8>) -> Result<(), String> {
    let mut buffer = [0; HELLO];
    match socket.read(&mut buffer[bytes.len()..]) {
        Ok(0) => Err("closed before its hello".into()),
        Ok(count) => {
            bytes.extend_from_slice(&buffer[bytes.len()..][..count]);
            Ok(())
        }
        Err(error) => match Errno::from_io_error(&error) {
            Some(Errno::AGAIN | Errno::INTR) => Ok(()),
            _ => Err(error.to_string()),
        },
    }
}

fn wait_for(polled: &mut [PollFd<'_>], timeout: Duration) -> Result<(), Errno> {
    let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: i64::from(timeout.subsec_nanos()) };
    match poll(polled, Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error),
    }
}

/// The sending end of a queue.
#[derive(Debug)]
struct TcpQueue {
    // First, so that its stream is through before the memory is freed.
    staging: Option<Staging>,
    place: Place,
    /// Does not block.
    socket: TcpStream,
    source: Arc<Memory>,
    timeout: Duration,
    interrupt: Interrupt,
    sent: u64,
    /// What came of the peer's farewell.
    farewell: Vec<u8>,
    failed: Option<Error>,
}

impl TcpQueue {
    fn new(setup: &Setup<'_>, place: Place, socket: TcpStream) -> Result<TcpQueue> {
        socket.set_nonblocking(true).map_err(|error| place.error("connect", error.to_string()))?;
        let staging =
            if setup.direct { None } else { Some(Staging::new(setup.memory.device(), PIECES, PIECE_BYTES)?) };
        Ok(TcpQueue {
            staging,
            place,
            socket,
            source: setup.memory.clone(),
            timeout: setup.options.timeout,
            interrupt: Interrupt::default(),
            sent: 0,
            farewell: Vec::new(),
            failed: None,
        })
    }

    fn put(&mut self, puts: &[Put]) -> Result<()> {
        let deadline = Instant::now() + self.timeout;
        if let Some(reason) = self.farewell() {
            return Err(self.place.error("put", reason));
        }
        for put in puts {
            put.check(self.source.bytes()).map_err(|reason| self.place.error("put", reason))?;
        }
        match self.staging.take() {
            None => self.put_from_host(puts, deadline),
            Some(mut staging) => {
                let outcome = self.put_from_device(&mut staging, puts, deadline);
                self.staging = Some(staging);
                outcome
            }
        }
    }

    fn put_from_host(&mut self, puts: &[Put], deadline: Instant) -> Result<()> {
        for batch in puts.chunks(WRITE_PUTS) {
            let headers: Vec<[u8; HEADER]> = batch.iter().map(header).collect();
            let mut pieces = Vec::with_capacity(2 * batch.len());
            for (put, header) in batch.iter().zip(&headers) {
                pieces.push(Bytes { start: header.as_ptr(), len: HEADER });
                if put.bytes > 0 {
                    let start = (self.source.ptr().0 + put.from) as *const u8;
                    pieces.push(Bytes { start, len: put.bytes as usize });
                }
            }
            // SAFETY: the headers outlive the call; the rest was checked to lie in the source, which this queue keeps.
            unsafe { self.send(&mut pieces, deadline)? };
            self.sent += batch.len() as u64;
        }
        Ok(())
    }

    /// Fills pieces of staging with frames. While one is on its way to the network, the next is copied.
    fn put_from_device(&mut self, staging: &mut Staging, puts: &[Put], deadline: Instant) -> Result<()> {
        let mut frames = Frames { puts, offset: 0, in_payload: false };
        // The stream is through with what was sent before: it was waited for.
        let mut next = 0;
        let mut filled = self.fill(staging, next, &mut frames)?;
        while filled > 0 {
            let current = (next, filled);
            next = (next + 1) % staging.pieces();
            filled = self.fill(staging, next, &mut frames)?;
            staging.wait(current.0, deadline, &self.interrupt, self.place, "put")?;
            let mut piece = [Bytes { start: staging.piece(current.0).0, len: current.1 }];
            // SAFETY: the piece lives in staging; the stream is through with it, and nothing writes it before the next fill.
            unsafe { self.send(&mut piece, deadline)? };
        }
        self.sent += puts.len() as u64;
        Ok(())
    }

    /// Starts to fill a piece; how many bytes it will have.
    fn fill(&self, staging: &mut Staging, index: usize, frames: &mut Frames<'_>) -> Result<usize> {
        let (host, device) = staging.piece(index);
        let room = staging.piece_bytes();
        let mut at = 0;
        let mut copies = false;
        while let Some(put) = frames.puts.first() {
            if !frames.in_payload {
                if room - at < HEADER as u64 {
                    break;
                }
                // SAFETY: there is room for it, and the stream is through with the piece.
                unsafe { std::ptr::copy_nonoverlapping(header(put).as_ptr(), host.add(at as usize), HEADER) };
                at += HEADER as u64;
                (frames.in_payload, frames.offset) = (true, 0);
            }
            let bytes = (put.bytes - frames.offset).min(room - at);
            if bytes > 0 {
                let from = DevicePtr(self.source.ptr().0 + put.from + frames.offset);
                // SAFETY: the put was checked to lie in the source, which this queue keeps; `Staging` waits for its stream
                // before it is dropped, and this queue's staging is dropped before its source.
                unsafe { staging.stream().copy(DevicePtr(device.0 + at), from, bytes)? };
                copies = true;
            }
            at += bytes;
            frames.offset += bytes;
            if frames.offset < put.bytes {
                break;
            }
            frames.puts = &frames.puts[1..];
            frames.in_payload = false;
        }
        if copies {
            staging.enqueued(index)?;
        }
        Ok(at as usize)
    }

    /// Writes all of `pieces` to the socket.
    ///
    /// # Safety
    /// Each is live memory until this returns.
    unsafe fn send(&mut self, pieces: &mut [Bytes], deadline: Instant) -> Result<()> {
        let mut first = 0;
        while first < pieces.len() {
            let rest = &mut pieces[first..];
            // SAFETY: all zeros is a message without anything.
            let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
            message.msg_iov = rest.as_mut_ptr().cast();
            message.msg_iovlen = rest.len() as _;
            // SAFETY: `Bytes` is laid out like an iovec, and the caller vouches for what they point to. The kernel reads
            // through the addresses, so that what a device writes at the same time makes for stale bytes, nothing worse.
            let sent = unsafe { libc::sendmsg(self.socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) };
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
            } else {
                self.handle_send_error(std::io::Error::last_os_error(), deadline)?;
            }
        }
        Ok(())
    }

    /// Waits for room where that is what is missing.
    fn handle_send_error(&mut self, error: std::io::Error, deadline: Instant) -> Result<()> {
        match Errno::from_io_error(&error) {
            Some(Errno::INTR) => return Ok(()),
            Some(Errno::AGAIN) => {}
            _ => {
                // It may have said why.
                let reason = self.farewell().unwrap_or_else(|| format!("the connection broke: {error}"));
                return Err(self.place.error("put", reason));
            }
        }
        if self.interrupt.is_raised() {
            return Err(self.place.error("put", "interrupted: this rank closes the link"));
        }
        if Instant::now() >= deadline {
            let reason = format!(
                "it did not take all bytes within {:?}: it hangs, or the network is down",
                self.timeout
            );
            return Err(self.place.error("put", reason));
        }
        if let Some(reason) = self.farewell() {
            return Err(self.place.error("put", reason));
        }
        let mut polled = [PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::OUT)];
        wait_for(&mut polled, LOOK.min(left(deadline))).map_err(|error| Error::os("poll", error))
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
                return Some("it said goodbye before; close only after a barrier".into());
            }
            if self.farewell.len() - 4 >= len as usize || !ended.is_empty() {
                return Some(format!("it refused a frame: {}", String::from_utf8_lossy(&self.farewell[4..])));
            }
        }
        Some(ended).filter(|reason| !reason.is_empty())
    }
}

impl Queue for TcpQueue {
    fn put_with_counter(&mut self, puts: &[Put]) -> Result<()> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let outcome = self.put(puts);
        self.failed = outcome.as_ref().err().cloned();
        outcome
    }

    fn completed(&mut self) -> Result<u64> {
        // What the socket took is a copy.
        Ok(self.sent)
    }

    fn quiet(&mut self, _timeout: Duration) -> Result<()> {
        match &self.failed {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    fn close(&mut self) {
        if self.failed.is_none() {
            let goodbye = header(&Put { bytes: GOODBYE, ..Put::default() });
            let mut piece = [Bytes { start: goodbye.as_ptr(), len: HEADER }];
            // SAFETY: the header outlives the call.
            if let Err(error) = unsafe { self.send(&mut piece, Instant::now() + GOODBYE_TIME) } {
                tracing::debug!("goodbye: {error}");
            }
            let _ = self.socket.shutdown(std::net::Shutdown::Write);
            self.failed = Some(self.place.error("put", "this rank has closed the queue"));
        }
    }

    fn interrupt(&self) -> Interrupt {
        self.interrupt.clone()
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

/// What of a batch is yet to be put into frames.
struct Frames<'a> {
    puts: &'a [Put],
    /// Bytes of the first put that have been.
    offset: u64,
    /// The header of the first put has been.
    in_payload: bool,
}

fn header(put: &Put) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    for (word, value) in bytes.chunks_exact_mut(8).zip([put.bytes, put.to, put.counter, put.value]) {
        word.copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

/// The receiving ends of a rank: a thread each.
#[derive(Debug)]
struct Receivers {
    readers: Vec<(Arc<TcpStream>, JoinHandle<()>)>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// This rank takes nothing any more, so that broken connections are no failures.
    closing: AtomicBool,
    failure: Mutex<Option<Error>>,
}

impl Receivers {
    fn start(setup: &Setup<'_>, incoming: BTreeMap<(u32, u32), TcpStream>) -> Result<Receivers> {
        let mut receivers = Receivers { readers: Vec::new(), shared: Arc::default() };
        for ((queue, peer), socket) in incoming {
            let staging = if setup.direct {
                None
            } else {
                Some((Staging::new(setup.memory.device(), PIECES, PIECE_HEAD + PIECE_BYTES)?, 0))
            };
            let socket = Arc::new(socket);
            let mut reader = Reader {
                staging,
                place: setup.place(peer),
                socket: socket.clone(),
                target: setup.memory.clone(),
                timeout: setup.options.timeout,
                interrupt: Interrupt::default(),
            };
            let shared = receivers.shared.clone();
            let run = move || {
                if let Err(error) = reader.run()
                    && !shared.closing.load(Ordering::Acquire)
                {
                    tracing::debug!("queue {queue}: {error}");
                    shared.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                }
            };
            let thread = std::thread::Builder::new().name(format!("from {peer} q{queue}")).spawn(run);
            receivers.readers.push((socket, thread.map_err(|error| Error::os("spawn thread", error))?));
        }
        Ok(receivers)
    }
}

impl Receiving for Receivers {
    fn failure(&self) -> Option<Error> {
        self.shared.failure.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn close(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        for (socket, _) in &self.readers {
            // A peer that left does not need it; it always fits the buffer.
            let _ = rustix::net::send(socket.as_fd(), &FAREWELL.to_le_bytes(), send_flags());
            // Ends the reader's wait.
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
        for (_, thread) in self.readers.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Drop for Receivers {
    fn drop(&mut self) {
        self.close();
    }
}

fn send_flags() -> rustix::net::SendFlags {
    rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT
}

/// The receiving end of a queue.
struct Reader {
    // First, so that its stream is through before the memory is freed.
    staging: Option<(Staging, usize)>,
    place: Place,
    socket: Arc<TcpStream>,
    target: Arc<Memory>,
    timeout: Duration,
    interrupt: Interrupt,
}

impl Reader {
    /// Takes puts until the peer says goodbye.
    fn run(&mut self) -> Result<()> {
        loop {
            let mut header = [0; HEADER];
            // SAFETY: the header is as long.
            unsafe { self.take(header.as_mut_ptr(), HEADER)? };
            let [bytes, to, counter, value] = [0, 8, 16, 24].map(|at| word64(&header, at));
            if bytes == GOODBYE {
                return Ok(());
            }
            let put = Put { from: to, to, bytes, counter, value };
            if let Err(reason) = put.check(self.target.bytes()) {
                let _ = rustix::net::send(self.socket.as_fd(), &refusal(&reason), send_flags());
                let _ = self.socket.shutdown(std::net::Shutdown::Both);
                return Err(self.place.error("receive", format!("refused a frame of it: {reason}")));
            }
            self.store(&put)?;
        }
    }

    fn store(&mut self, put: &Put) -> Result<()> {
        let target = self.target.ptr();
        let Some((mut staging, mut next)) = self.staging.take() else {
            // SAFETY: checked by the caller: all of it lies in the target, which the reader keeps.
            unsafe {
                self.take((target.0 + put.to) as *mut u8, put.bytes as usize)?;
                store_counter(target, put.counter, put.value);
            }
            return Ok(());
        };
        let mut offset = 0;
        loop {
            let deadline = Instant::now() + self.timeout;
            staging.wait(next, deadline, &self.interrupt, self.place, "receive")?;
            let (host, device) = staging.piece(next);
            let bytes = (put.bytes - offset).min(staging.piece_bytes() - PIECE_HEAD);
            let last = offset + bytes == put.bytes;
            // SAFETY: the stream is through with the piece, which has room for the bytes behind its head. On the device's
            // side it is as above; `Staging` waits for its stream before the target can go.
            unsafe {
                self.take(host.add(PIECE_HEAD as usize), bytes as usize)?;
                let stream = staging.stream();
                if bytes > 0 {
                    stream.copy(
                        DevicePtr(target.0 + put.to + offset),
                        DevicePtr(device.0 + PIECE_HEAD),
                        bytes,
                    )?;
                }
                if last {
                    host.cast::<u64>().write_volatile(put.value);
                    stream.copy(DevicePtr(target.0 + put.counter), device, 8)?;
                }
            }
            staging.enqueued(next)?;
            next = (next + 1) % staging.pieces();
            offset += bytes;
            if last {
                self.staging = Some((staging, next));
                return Ok(());
            }
        }
    }

    /// Takes exactly `len` bytes from the connection.
    ///
    /// # Safety
    /// `to` is live memory of at least `len` bytes.
    unsafe fn take(&self, to: *mut u8, len: usize) -> Result<()> {
        let mut taken = 0;
        while taken < len {
            // SAFETY: within the caller's memory. The kernel writes through the address; no reference is made.
            let count = unsafe {
                libc::recv(self.socket.as_raw_fd(), to.add(taken).cast(), len - taken, libc::MSG_WAITALL)
            };
            match count {
                0 => {
                    let reason =
                        "the connection ended without a goodbye: the rank died, or gave up puts under way";
                    return Err(self.place.error("receive", reason));
                }
                1.. => taken += count as usize,
                _ => {
                    let error = std::io::Error::last_os_error();
                    if Errno::from_io_error(&error) != Some(Errno::INTR) {
                        return Err(self.place.error("receive", format!("the connection broke: {error}")));
                    }
                }
            }
        }
        Ok(())
    }
}
