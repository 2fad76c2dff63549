//! The receiving ends: a thread per connection.

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::io::Errno;

use super::{FAREWELL, GOODBYE, HEADER, PIECE_BYTES, PIECES, refusal, word64};
use crate::driver::{DevicePtr, Memory};
use crate::error::{Error, Result};
use crate::transport::staging::Staging;
use crate::transport::{Interrupt, Place, Put, Receiving, Setup, deadline, store_counter};

/// Start of a receiving piece: the counter's value. The bytes follow, aligned.
const PIECE_HEAD: u64 = 128;

/// All receiving ends of a rank.
#[derive(Debug)]
pub(super) struct Receivers {
    pub(super) readers: Vec<(Arc<TcpStream>, JoinHandle<()>)>,
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    /// This rank takes nothing any more, so that broken connections are no failures.
    closing: AtomicBool,
    failure: Mutex<Option<Error>>,
}

impl Receivers {
    pub(super) fn start(setup: &Setup<'_>, incoming: BTreeMap<(u32, u32), TcpStream>) -> Result<Receivers> {
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
            let deadline = deadline(self.timeout);
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
