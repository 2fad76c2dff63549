//! Places for received rows: who holds one, and when it may be overwritten.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use epoxide_gpu::layout::{PoolLayout, row_stride};

use super::captured::Overwrites;
use super::scratch::Arena;
use super::tensor::{Element, Owner};
use super::{DType, Tensor, TypedTensor};
use crate::driver::{Fence, Memory, Stream, give_up};
use crate::error::{Error, Result, Scope};

/// Room in the pool for what one dispatch brings, and for the rows of its combine. A buffer has
/// [`BufferOptions::places`](super::BufferOptions::places) of them, and each is handed out once, by [`Buffer::place`](super::Buffer::place).
///
/// A dispatch borrows its place mutably, and what it brings holds on to that borrow: a second dispatch there does not compile while
/// the first one's rows are in use. All ranks give a dispatch the place of the same index.
#[derive(Debug)]
pub struct Place(pub(super) Arc<PlaceState<Room>>);

impl Place {
    /// Its index in the buffer.
    pub fn index(&self) -> u32 {
        self.0.index
    }

    /// Rows here that peers gather from, for a combine without a dispatch before it, such as that of a backward pass;
    /// see [`DispatchOutput::combine_rows`](super::DispatchOutput::combine_rows).
    ///
    /// # Errors
    /// [`Error::Capacity`] where `rows` or the row is larger than the pool was made for, [`Error::Argument`] where they are given out
    /// already.
    pub fn combine_rows(&self, dtype: DType, rows: u64, hidden: u64) -> Result<PoolRows<'_>> {
        self.0.combine_rows(self.0.share(), dtype, rows, hidden)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.take_back();
    }
}

/// The pool: peers map it, so that giving it back unmaps it at once. Waits for all streams of the device first.
#[derive(Debug)]
pub(super) struct Pool {
    memory: Arc<Memory>,
    arena: Arc<Arena>,
    timeout: Duration,
}

impl Pool {
    pub fn new(memory: Arc<Memory>, arena: &Arc<Arena>, timeout: Duration) -> Arc<Pool> {
        Arc::new(Pool { memory, arena: arena.clone(), timeout })
    }

    pub fn memory(&self) -> &Memory {
        &self.memory
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let ended = self.arena.fence().and_then(|fence| fence.wait_timeout(self.timeout));
        match ended {
            Ok(true) => {}
            // Running work may write to it.
            Ok(false) => give_up(self.memory.device(), "work that may use a pool", self.timeout),
            // The device runs nothing any more.
            Err(error) => tracing::warn!("a pool is unmapped although its device failed: {error}"),
        }
    }
}

/// A place of either mode. `R`: what there is in it.
#[derive(Debug)]
pub(super) struct PlaceState<R> {
    pub index: u32,
    pub buffer: u64,
    pub room: R,
    pool: Arc<Pool>,
    arena: Arc<Arena>,
    /// Handed out to the caller.
    taken: AtomicBool,
    /// Which dispatch's rows are there.
    generation: AtomicU64,
    lease: Mutex<LastLease<R>>,
}

/// Rows of a dispatch, and those of its combine.
#[derive(Debug)]
pub(super) struct Room {
    /// The pool's layout with the rows of this place.
    pub layout: PoolLayout,
    pub max_row_bytes: u64,
    /// The combine rows are given out.
    pub rows_given: AtomicBool,
}

#[derive(Debug)]
struct LastLease<R> {
    dispatches: u64,
    last: Weak<Lease<R>>,
    /// Behind all that streams had been given when the last lease ended.
    ended: Option<Fence>,
}

/// The right to what one dispatch brought, or its combine, shared by the tensors. When the last of
/// them goes, streams may still read: the next operation here comes behind what they have been
/// given by then.
#[derive(Debug)]
pub(super) struct Lease<R> {
    pub place: Arc<PlaceState<R>>,
    pub generation: u64,
    /// Nothing is borrowed any more: it says at use whether what it was for is still there.
    pub detached: AtomicBool,
}

impl<R> PlaceState<R> {
    pub fn new(index: u32, buffer: u64, room: R, pool: Arc<Pool>, arena: Arc<Arena>) -> Arc<PlaceState<R>> {
        Arc::new(PlaceState {
            index,
            buffer,
            room,
            pool,
            arena,
            taken: AtomicBool::new(false),
            generation: AtomicU64::new(0),
            lease: Mutex::new(LastLease { dispatches: 0, last: Weak::new(), ended: None }),
        })
    }

    /// Hands out the place of index `index`.
    ///
    /// # Errors
    /// [`Error::Argument`] where there is no such place, or it is out already.
    pub fn hand_out(places: &[Arc<Self>], index: u32) -> Result<Arc<Self>> {
        let Some(place) = places.get(index as usize) else {
            let rule = format!("the buffer has {}: create it with more places", places.len());
            return Err(Error::argument("place", index, rule));
        };
        if place.taken.swap(true, Ordering::AcqRel) {
            return Err(Error::argument("place", index, "it is handed out already: drop that Place first"));
        }
        Ok(place.clone())
    }

    pub fn take_back(&self) {
        self.taken.store(false, Ordering::Release);
    }

    fn last_lease(&self) -> MutexGuard<'_, LastLease<R>> {
        self.lease.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a dispatch here, which overwrites what is there. It comes behind whoever reads that;
    /// see [`PlaceState::come_before`].
    pub fn begin(self: &Arc<Self>) -> Result<Arc<Lease<R>>> {
        self.settle()?;
        let generation = {
            let mut state = self.last_lease();
            state.dispatches += 1;
            state.dispatches
        };
        self.generation.store(generation, Ordering::Release);
        Ok(self.lease(generation))
    }

    /// The same, with `stream` behind whoever reads what is there.
    pub fn begin_on(self: &Arc<Self>, stream: &Stream) -> Result<Arc<Lease<R>>> {
        let lease = self.begin()?;
        self.come_before(stream)?;
        Ok(lease)
    }

    /// The right to what the dispatch `generation` brought, which nobody else has.
    pub fn lease(self: &Arc<Self>, generation: u64) -> Arc<Lease<R>> {
        let lease = Arc::new(Lease { place: self.clone(), generation, detached: AtomicBool::new(false) });
        self.last_lease().last = Arc::downgrade(&lease);
        lease
    }

    /// Notes what streams have been given by now where a lease has not ended: it is detached, and
    /// its tensors may be in use.
    fn settle(&self) -> Result<()> {
        let mut state = self.last_lease();
        if state.last.strong_count() != 0 {
            let fence = self.arena.fence()?;
            if let Some(before) = state.ended.replace(fence) {
                self.arena.give_back(before);
            }
        }
        Ok(())
    }

    /// Makes `stream` wait for all that streams had been given while they could read what was here.
    pub fn come_before(&self, stream: &Stream) -> Result<()> {
        let Some(fence) = self.last_lease().ended.take() else { return Ok(()) };
        let outcome = fence.come_before(stream);
        self.arena.give_back(fence);
        outcome
    }

    /// An error where rows here are borrowed that a run of a captured step would overwrite.
    fn check_free(&self, own: &Arc<Lease<R>>) -> Result<()> {
        // Not under the lock, which the lease takes when it goes.
        let last = self.last_lease().last.clone().upgrade();
        let is_borrowed =
            |lease: &Arc<Lease<R>>| !Arc::ptr_eq(lease, own) && !lease.detached.load(Ordering::Acquire);
        if last.as_ref().is_some_and(is_borrowed) {
            let rule = "rows of a dispatch there are in use: drop or detach them before the step that was captured with this place runs";
            return Err(Error::argument("place", self.index, rule));
        }
        Ok(())
    }

    /// Which dispatch's rows are there.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }
}

impl PlaceState<Room> {
    /// An error where a combine would stage its rows over those that the caller is writing.
    pub fn check_rows_free(&self) -> Result<()> {
        if self.room.rows_given.load(Ordering::Acquire) {
            let rule = "its combine rows are given out (PoolRows): combine those, or drop them first";
            return Err(Error::argument("place", self.index, rule));
        }
        Ok(())
    }

    fn share(&self) -> Owner {
        self.pool.clone()
    }

    /// Rows of this place as a tensor.
    pub fn rows<'p>(&self, owner: Owner, offset: u64, dtype: DType, rows: u64, hidden: u64) -> Tensor<'p> {
        let at = self.pool.memory().ptr().add(offset);
        Tensor::in_memory(at, dtype, &[rows, hidden], owner)
            .with_row_stride(row_stride(hidden * dtype.size()))
    }

    /// A contiguous tensor in this place.
    pub fn tensor<'p, T: Element>(&self, owner: Owner, offset: u64, shape: &[u64]) -> TypedTensor<'p, T> {
        TypedTensor::in_memory(self.pool.memory().ptr().add(offset), shape, owner)
    }

    pub fn combine_rows<'p>(
        self: &Arc<Self>,
        owner: Owner,
        dtype: DType,
        rows: u64,
        hidden: u64,
    ) -> Result<PoolRows<'p>> {
        let too_large = |what, needed, have, unit, remedy: &str| {
            Err(Error::Capacity { what, needed, have, unit, remedy: remedy.into(), scope: Scope::ThisRank })
        };
        let row_bytes = hidden.saturating_mul(dtype.size());
        if row_bytes > self.room.max_row_bytes {
            let remedy = format!("create the buffer with max_row_bytes >= {row_bytes}");
            return too_large("hidden", row_bytes, self.room.max_row_bytes, "bytes", &remedy);
        }
        if rows > self.room.layout.rows {
            let remedy = "ask for as many as the dispatch received";
            return too_large("combine rows", rows, self.room.layout.rows, "rows", remedy);
        }
        if self.room.rows_given.swap(true, Ordering::AcqRel) {
            let rule = "its combine rows are given out already: drop those first";
            return Err(Error::argument("place", self.index, rule));
        }
        let rows = self.rows(owner, self.room.layout.combine_x, dtype, rows, hidden).named("rows");
        Ok(PoolRows { rows, place: self.clone() })
    }
}

impl<R: Send + Sync + std::fmt::Debug> Overwrites for Lease<R> {
    fn begin_again(self: Arc<Self>, stream: &Stream) -> Result<()> {
        self.place.check_free(&self)?;
        // This run waits for readers of the previous run's results on other streams.
        if self.check_current().is_err() {
            self.place.settle()?;
            self.place.come_before(stream)?;
        }
        self.place.last_lease().last = Arc::downgrade(&self);
        self.place.generation.store(self.generation, Ordering::Release);
        Ok(())
    }
}

impl<R> Lease<R> {
    /// An error where a later dispatch has overwritten the rows.
    pub fn check_current(&self) -> Result<()> {
        if self.place.generation() == self.generation {
            return Ok(());
        }
        Err(Error::StaleHandle(format!(
            "the rows were those of dispatch {} in place {} and have been overwritten since, by dispatch {}",
            self.generation,
            self.place.index,
            self.place.generation()
        )))
    }
}

impl<R> Drop for Lease<R> {
    fn drop(&mut self) {
        let fence = self.place.arena.fence();
        let mut state = self.place.last_lease();
        // Another dispatch may have begun here since; it has waited for this one's readers itself.
        if state.dispatches == self.generation || self.place.generation() == self.generation {
            state.ended = fence.inspect_err(|error| tracing::debug!("{error}")).ok();
        }
    }
}

/// Rows `[rows, hidden]` of a place that peers gather from: experts that write their output here spare combine a copy
/// ([`CombineRows::InPool`](super::CombineRows::InPool)). Rows are `row_stride()` bytes apart.
///
/// They are the caller's from the end of one combine to the start of the next.
#[derive(Debug)]
pub struct PoolRows<'p> {
    rows: Tensor<'p>,
    pub(super) place: Arc<PlaceState<Room>>,
}

impl<'p> PoolRows<'p> {
    /// The rows.
    pub fn tensor(&self) -> &Tensor<'p> {
        &self.rows
    }
}

impl Drop for PoolRows<'_> {
    fn drop(&mut self) {
        self.place.room.rows_given.store(false, Ordering::Release);
    }
}
