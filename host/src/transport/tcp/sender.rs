//! The sending end of a queue.

use std::io::Read;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use super::{FAREWELL, GOODBYE, HEADER, MAX_REASON, PIECE_BYTES, PIECES, header, left, wait_for, word32};
use crate::driver::{DevicePtr, Memory};
use crate::error::{Error, Result};
use crate::transport::staging::Staging;
use crate::transport::{Interrupt, LOOK, Place, Put, Queue, Setup, deadline};

/// Puts per system call: two pieces each, of at most 1024.
const WRITE_PUTS: usize = 256;
/// How long a goodbye may take.
const GOODBYE_TIME: Duration = Duration::from_millis(200);

/// A connection that puts go over.
#[derive(Debug)]
pub(super) struct TcpQueue {
    // First, so that its stream is through before the memory is freed.
    staging: Option<Staging>,
    place: Place,
    /// Does not block.
    socket: TcpStream,
    source: Arc<Memory>,
    pub(super) timeout: Duration,
    interrupt: Interrupt,
    sent: u64,
    /// What came of the peer's farewell.
    farewell: Vec<u8>,
    failed: Option<Error>,
}

impl TcpQueue {
    pub(super) fn new(setup: &Setup<'_>, place: Place, socket: TcpStream) -> Result<TcpQueue> {
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
        let deadline = deadline(self.timeout);
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
            if let Err(error) = unsafe { self.send(&mut piece, deadline(GOODBYE_TIME)) } {
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
