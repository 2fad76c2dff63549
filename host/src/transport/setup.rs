//! The parameters that every transport is set up with.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub(super) use epoxide_base::deadline;

use super::options::TransportOptions;
use crate::driver::Memory;
use crate::error::{Error, Result};
use crate::group::ProcessGroup;
use crate::group::internal::panic_text;

/// Longest time for a thread to end after the order to stop, for which all its waits poll. Only a
/// call of the system or of a card's driver that does not return takes longer. Then the thread is
/// leaked, with the memory that it uses.
pub(super) const JOIN_TIMEOUT: Duration = Duration::from_secs(5);
/// How often a wait polls for an interrupt.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// The outcome of a thread's work. A panic is a failure as well: `error` makes one of its text.
pub(super) fn caught(work: impl FnOnce() -> Result<()>, error: impl FnOnce(String) -> Error) -> Result<()> {
    let outcome = catch_unwind(AssertUnwindSafe(work));
    outcome.unwrap_or_else(|panic| {
        Err(error(format!("its thread panicked, please report it: {}", panic_text(&*panic))))
    })
}

/// Joins a thread that was ordered to end. After `until` the thread is leaked: it keeps its memory
/// and sockets until its call returns.
pub(super) fn join_until(thread: JoinHandle<()>, until: Instant) {
    while !thread.is_finished() && Instant::now() < until {
        std::thread::sleep(Duration::from_micros(200));
    }
    if thread.is_finished() {
        let _ = thread.join();
    } else {
        let name = thread.thread().name().unwrap_or_default();
        tracing::error!("left behind: {name:?} did not end within {JOIN_TIMEOUT:?}");
    }
}

/// Writes the host memory that ranks of one host share ([`TransportKind::Shm`]).
///
/// [`TransportKind::Shm`]: super::TransportKind::Shm
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writer {
    /// The proxies of queues copy puts there.
    Proxies,
    /// Kernels store there themselves, and no queue leads there.
    Kernels,
}

/// The arguments of [`connect`](super::connect).
pub(super) struct Setup<'a> {
    pub(super) options: &'a TransportOptions,
    pub(super) memory: &'a Arc<Memory>,
    pub(super) group: &'a dyn ProcessGroup,
    pub(super) peers: &'a [u32],
    pub(super) timeout: Duration,
    pub(super) writer: Writer,
}

impl Setup<'_> {
    pub(super) fn ends(&self, peer: u32) -> LinkEnds {
        LinkEnds { transport: self.options.kind.name(), rank: self.group.rank(), peer }
    }

    /// (queue, peer) of every link, ascending.
    pub(super) fn pairs(&self) -> impl Iterator<Item = (u32, u32)> + '_ {
        (0..self.options.queues_per_peer).flat_map(|queue| self.peers.iter().map(move |peer| (queue, *peer)))
    }
}

/// The two ends of a link, for errors.
#[derive(Debug, Clone, Copy)]
pub(super) struct LinkEnds {
    pub(super) transport: &'static str,
    pub(super) rank: u32,
    pub(super) peer: u32,
}

impl LinkEnds {
    pub(super) fn error(&self, operation: &'static str, reason: impl Into<String>) -> Error {
        let LinkEnds { transport, rank, peer } = *self;
        Error::Transport { transport, rank, peer, operation, reason: reason.into() }
    }
}

/// Wire memory at its host address, for the copies of shm and tcp.
#[derive(Debug, Clone)]
pub(super) struct WireHost {
    pub(super) base: *mut u8,
    pub(super) memory: Arc<Memory>,
}

// SAFETY: an address range without thread affinity, which `memory` keeps; its contents are accessed
// through raw pointers and atomics.
unsafe impl Send for WireHost {}

// SAFETY: as above; `&WireHost` gives out addresses only.
unsafe impl Sync for WireHost {}

impl WireHost {
    /// The host's side of a rank's wire memory.
    pub(super) fn of(setup: &Setup<'_>) -> Result<WireHost> {
        let base = setup.memory.host_ptr();
        if base.is_null() {
            let rule =
                format!("{} needs host memory; allocate it with transport::wire_memory", setup.options.kind);
            return Err(Error::argument("memory", format!("{:#x}", setup.memory.ptr().0), rule));
        }
        Ok(WireHost { base, memory: setup.memory.clone() })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.memory.bytes()
    }

    /// The address of the byte at `offset`, which must be in the memory where it is used.
    pub(super) fn at(&self, offset: u64) -> *mut u8 {
        self.base.wrapping_add(offset as usize)
    }
}
