//! The receiving ends: a thread per connection.

use std::collections::BTreeMap;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::frame::{FAREWELL, Frame, HEADER, header_length, read_header, refusal};
use crate::driver::NoDriverCalls;
use crate::error::{Error, Result};
use crate::group::internal::{Signer, TAG};
use crate::lock::lock;
use crate::transport::links::Receiving;
use crate::transport::put::Put;
use crate::transport::setup::{JOIN_TIMEOUT, LinkEnds, Setup, WireHost, deadline, store_counter};
use crate::virtual_time::spawn;

/// A connection of a peer that has been let in.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) socket: TcpStream,
    /// Where the job has a secret: checks the headers.
    pub(super) signer: Option<Signer>,
}

/// All receiving ends of a rank.
#[derive(Debug)]
pub(super) struct Receivers {
    pub(super) readers: Vec<(Arc<TcpStream>, JoinHandle<()>)>,
    shared: Arc<ReceiverState>,
}

#[derive(Debug, Default)]
struct ReceiverState {
    /// This rank takes nothing any more, so that broken connections are no failures.
    closing: AtomicBool,
    failure: Mutex<Option<Error>>,
}

impl Receivers {
    pub(super) fn start(setup: &Setup<'_>, incoming: BTreeMap<(u32, u32), Incoming>) -> Result<Receivers> {
        let mut receivers = Receivers { readers: Vec::new(), shared: Arc::default() };
        for ((queue, peer), Incoming { socket, mut signer }) in incoming {
            let socket = Arc::new(socket);
            let target = WireHost::of(setup)?;
            let reader = Reader { ends: setup.ends(peer), socket: socket.clone(), target };
            let shared = receivers.shared.clone();
            let run = move || {
                let _rule = NoDriverCalls::new("a receiver");
                if let Err(error) = reader.run(signer.as_mut())
                    && !shared.closing.load(Ordering::Acquire)
                {
                    tracing::debug!("queue {queue}: {error}");
                    lock(&shared.failure).get_or_insert(error);
                }
            };
            let thread = spawn(format!("from {peer} q{queue}"), run);
            receivers.readers.push((socket, thread.map_err(|error| Error::system("spawn thread", error))?));
        }
        Ok(receivers)
    }
}

impl Receiving for Receivers {
    fn failure(&self) -> Option<Error> {
        lock(&self.shared.failure).clone()
    }

    fn close(&mut self) {
        self.shared.closing.store(true, Ordering::Release);
        for (socket, _) in &self.readers {
            // A peer that left does not need it; it always fits the buffer.
            let _ = rustix::net::send(socket.as_fd(), &FAREWELL.to_le_bytes(), send_flags());
            // Ends the reader's wait.
            let _ = socket.shutdown(std::net::Shutdown::Both);
        }
        let until = deadline(JOIN_TIMEOUT);
        for (_, thread) in self.readers.drain(..) {
            while !thread.is_finished() && Instant::now() < until {
                std::thread::sleep(Duration::from_micros(200));
            }
            if thread.is_finished() {
                let _ = thread.join();
            } else {
                // It keeps the wire memory that it writes to, and its socket.
                let name = thread.thread().name().unwrap_or_default();
                tracing::error!(
                    "left behind: the receiver {name:?} is in recv {JOIN_TIMEOUT:?} after its socket was shut down"
                );
            }
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

/// Reads a header, and where there is a `signer` the signature behind it.
fn checked_header(
    bytes: &[u8; HEADER + TAG],
    signer: Option<&mut Signer>,
    memory: u64,
) -> Result<Frame, String> {
    let (header, rest) = bytes.split_first_chunk::<HEADER>().ok_or("cut short")?;
    if let Some(signer) = signer {
        let tag = rest.first_chunk::<TAG>().ok_or("cut short")?;
        signer.check(header, tag).map_err(|forged| forged.to_string())?;
    }
    read_header(header, memory)
}

/// The receiving end of a queue.
struct Reader {
    ends: LinkEnds,
    socket: Arc<TcpStream>,
    target: WireHost,
}

impl Reader {
    /// Takes puts until the peer says goodbye.
    fn run(&self, mut signer: Option<&mut Signer>) -> Result<()> {
        let length = header_length(signer.as_deref());
        loop {
            let mut bytes = [0; HEADER + TAG];
            // SAFETY: `bytes` is at least as long.
            unsafe { self.take(bytes.as_mut_ptr(), length)? };
            match checked_header(&bytes, signer.as_deref_mut(), self.target.bytes()) {
                Ok(Frame::Goodbye) => return Ok(()),
                Ok(Frame::Put(put)) => self.store(&put)?,
                Err(reason) => {
                    let _ = rustix::net::send(self.socket.as_fd(), &refusal(&reason), send_flags());
                    let _ = self.socket.shutdown(std::net::Shutdown::Both);
                    return Err(self.ends.error("receive", format!("refused a frame of it: {reason}")));
                }
            }
        }
    }

    fn store(&self, put: &Put) -> Result<()> {
        // SAFETY: checked by the caller: all of it lies in the target, which the reader keeps.
        unsafe {
            self.take(self.target.at(put.to), put.bytes as usize)?;
            store_counter(self.target.base, put.counter, put.value);
        }
        Ok(())
    }

    /// Takes exactly `len` bytes from the connection.
    ///
    /// # Safety
    /// `to` is live memory of at least `len` bytes.
    unsafe fn take(&self, to: *mut u8, len: usize) -> Result<()> {
        let mut taken = 0;
        while taken < len {
            // SAFETY: within the caller's memory. The kernel writes through the address; no
            // reference is made.
            let count = unsafe {
                libc::recv(self.socket.as_raw_fd(), to.add(taken).cast(), len - taken, libc::MSG_WAITALL)
            };
            match count {
                0 => {
                    let reason =
                        "the connection ended without a goodbye: the rank died, or gave up puts under way";
                    return Err(self.ends.error("receive", reason));
                }
                1.. => taken += count as usize,
                _ => {
                    let error = std::io::Error::last_os_error();
                    if Errno::from_io_error(&error) != Some(Errno::INTR) {
                        return Err(self.ends.error("receive", format!("the connection broke: {error}")));
                    }
                }
            }
        }
        Ok(())
    }
}
