//! Places for received rows.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use epoxide_gpu::layout::{DevicePtr, LowLatencyMessages, LowLatencyPlace, LowLatencyTables};

use crate::driver::{Fence, Memory, Stream};
use crate::ep::place::Pool;
use crate::ep::scratch::Arena;
use crate::error::Result;

/// Room for what one dispatch brings and for what comes back of it. [`Buffer::place`](super::Buffer::place) hands it out; whoever holds the
/// rows of a dispatch borrows it.
#[derive(Debug)]
pub struct Place(pub(super) Arc<PlaceState>);

impl Place {
    /// Its index: every rank dispatches to the place of the same one.
    pub fn index(&self) -> u32 {
        self.0.index
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.taken.store(false, Ordering::Release);
    }
}

/// What is known of a place.
#[derive(Debug)]
pub(super) struct PlaceState {
    pub index: u32,
    pub buffer: u64,
    /// Where it is in every pool; nowhere across nodes.
    pub at: LowLatencyPlace,
    /// Received rows, and their scales.
    pub recv_x: DevicePtr,
    pub recv_scales: DevicePtr,
    /// What kernels are told of it across nodes.
    pub messages: Option<LowLatencyMessages>,
    /// What this rank keeps of it.
    pub tables: LowLatencyTables,
    /// Where sums go.
    pub combined_x: DevicePtr,
    /// What its rows and its tables are in.
    _pool: Arc<Pool>,
    _tables: Arc<Memory>,
    arena: Arc<Arena>,
    taken: AtomicBool,
    /// Behind all that streams had been given when its rows or sums were last let go.
    ended: Mutex<Option<Fence>>,
}

impl PlaceState {
    pub fn new(
        index: u32,
        buffer: u64,
        (at, messages): (LowLatencyPlace, Option<LowLatencyMessages>),
        (tables, combined_x): (LowLatencyTables, DevicePtr),
        (_pool, _tables): (Arc<Pool>, Arc<Memory>),
        arena: Arc<Arena>,
    ) -> Arc<PlaceState> {
        let (taken, ended) = (AtomicBool::new(false), Mutex::new(None));
        let in_pool = |offset| _pool.memory().ptr().add(offset);
        let (recv_x, recv_scales) = match messages {
            Some(messages) => (messages.recv_x, messages.recv_scales),
            None => (in_pool(at.recv_x), in_pool(at.recv_scales)),
        };
        Arc::new(PlaceState {
            index,
            buffer,
            at,
            recv_x,
            recv_scales,
            messages,
            tables,
            combined_x,
            _pool,
            _tables,
            arena,
            taken,
            ended,
        })
    }

    /// Hands the place out, unless it is out already.
    pub fn hand_out(self: &Arc<Self>) -> Option<Place> {
        (!self.taken.swap(true, Ordering::AcqRel)).then(|| Place(self.clone()))
    }

    /// Makes `stream` wait for whoever was given work on what the place held until it was let go.
    pub fn come_behind_readers(&self, stream: &Stream) -> Result<()> {
        let Some(fence) = self.ended.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            return Ok(());
        };
        let outcome = fence.come_before(stream);
        self.arena.give_back(fence);
        outcome
    }

    fn let_go(&self) {
        let fence = self.arena.fence().inspect_err(|error| tracing::debug!("{error}")).ok();
        let before =
            std::mem::replace(&mut *self.ended.lock().unwrap_or_else(PoisonError::into_inner), fence);
        if let Some(before) = before {
            self.arena.give_back(before);
        }
    }
}

/// The right to what an operation left in a place, shared by its tensors. When the last of them goes, streams may still read it: the next
/// operation there comes behind what they have been given by then.
#[derive(Debug)]
pub(super) struct Lease(pub Arc<PlaceState>);

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.let_go();
    }
}
