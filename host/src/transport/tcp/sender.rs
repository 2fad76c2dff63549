//! The sending end of a queue.

use std::io::Read;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use super::frame::{FAREWELL, GOODBYE, MAX_REASON, signed_header, word32};
use super::{left, wait_for};
use crate::driver::Memory;
use crate::error::{Error, Result};
use crate::foreign::quoted;
use crate::group::internal::Signer;
use crate::transport::put::{Interrupt, Put, PutQueue};
use crate::transport::setup::{LinkEnds, POLL_INTERVAL, Setup, WireHost, deadline};

/// Puts per system call: two pieces each, of at most 1024.
const WRITE_PUTS: usize = 256;
/// How long a goodbye may take.
const GOODBYE_TIME: Duration = Duration::from_millis(200);

/// A connection that puts go over.
#[derive(Debug)]
pub(super) struct TcpQueue {
    ends: LinkEnds,
    /// Does not block.
    socket: TcpStream,
    /// Where the job has a secret: signs the headers.
    signer: Option<Signer>,
    source: WireHost,
    pub(super) timeout: Duration,
    interrupt: Interrupt,
    sent: u64,
    /// The state of the peer's farewell.
    farewell: Vec<u8>,
    failed: Option<Error>,
}

impl TcpQueue {
    pub(super) fn new(
        setup: &Setup<'_>,
        ends: LinkEnds,
        socket: TcpStream,
        signer: Option<Signer>,
    ) -> Result<TcpQueue> {
        socket.set_nonblocking(true).map_err(|error| ends.error("connect", error.to_string()))?;
        Ok(TcpQueue {
            ends,
            socket,
            signer,
            source: WireHost::of(setup)?,
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
            return Err(self.ends.error("put", reason));
        }
        for put in puts {
            put.check(self.source.bytes()).map_err(|reason| self.ends.error("put", reason))?;
        }
        for batch in puts.chunks(WRITE_PUTS) {
            let sign = |put| signed_header(put, self.signer.as_mut());
            let headers: Vec<Vec<u8>> = batch.iter().map(sign).collect();
            let mut pieces = Vec::with_capacity(2 * batch.len());
            for (put, header) in batch.iter().zip(&headers) {
                pieces.push(Bytes { start: header.as_ptr(), len: header.len() });
                if put.bytes > 0 {
                    let start = self.source.at(put.from).cast_const();
                    pieces.push(Bytes { start, len: put.bytes as usize });
                }
            }
            // SAFETY: the headers outlive the call; the rest was checked to lie in the source,
            // which this queue keeps.
            unsafe { self.send(&mut pieces, deadline)? };
            self.sent += batch.len() as u64;
        }
        Ok(())
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
            let send = || {
                // SAFETY: `Bytes` is laid out like an iovec, and the caller vouches for what they
                // point to. The kernel reads through the addresses, so that what a device writes at
                // the same time makes for stale bytes, nothing worse.
                unsafe { libc::sendmsg(self.socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) }
            };
            let sent = self.interrupt.during(&"sendmsg", send);
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
                return Err(self.ends.error("put", reason));
            }
        }
        if self.interrupt.is_raised() {
            return Err(self.ends.error("put", "interrupted: this rank closes the link"));
        }
        if Instant::now() >= deadline {
            let reason = format!(
                "it did not take all bytes within {:?}: it hangs, or the network is down",
                self.timeout
            );
            return Err(self.ends.error("put", reason));
        }
        if let Some(reason) = self.farewell() {
            return Err(self.ends.error("put", reason));
        }
        let mut polled = [PollFd::from_borrowed_fd(self.socket.as_fd(), PollFlags::OUT)];
        wait_for(&mut polled, POLL_INTERVAL.min(left(deadline))).map_err(|error| Error::system("poll", error))
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
                return Some(format!("it refused a frame, and says {}", quoted(&self.farewell[4..])));
            }
        }
        Some(ended).filter(|reason| !reason.is_empty())
    }
}

impl PutQueue for TcpQueue {
    fn put_with_counter(&mut self, puts: &[Put]) -> Result<()> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        let outcome = self.put(puts);
        self.failed = outcome.as_ref().err().cloned();
        outcome
    }

    fn completed(&mut self) -> Result<u64> {
        // The socket holds a copy of the bytes.
        Ok(self.sent)
    }

    fn source(&self) -> Option<&Memory> {
        Some(&self.source.memory)
    }

    fn close(&mut self) {
        if self.failed.is_none() {
            let put = Put { bytes: GOODBYE, ..Put::default() };
            let goodbye = signed_header(&put, self.signer.as_mut());
            let mut piece = [Bytes { start: goodbye.as_ptr(), len: goodbye.len() }];
            // SAFETY: the header outlives the call.
            if let Err(error) = unsafe { self.send(&mut piece, deadline(GOODBYE_TIME)) } {
                tracing::debug!("goodbye: {error}");
            }
            let _ = self.socket.shutdown(std::net::Shutdown::Write);
            self.failed = Some(self.ends.error("put", "this rank has closed the queue"));
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
