//! Places for the rows of dispatches: their holders, and when they may be overwritten.
//!
//! Invariant: an operation overwrites a place behind all work that could read its previous
//! contents.

use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use super::arena::Arena;
use super::nanoseconds;
use super::step::Overwrites;
use crate::driver::{Device, DevicePtr, Fence, Memory, Stream, give_up_unless};
use crate::ep::tensor::{Owner, Owns};
use crate::error::{Error, Result};
use crate::lock::lock;

/// The host waits at least so long for work of the device: the deadlines of calls are for peers,
/// and the caller's own work may take longer.
pub const LEAST_PATIENCE: Duration = Duration::from_secs(30);

/// Most places of a buffer.
const MAX_PLACES: u32 = 64;

/// An error unless a buffer can have so many places.
pub fn check_count(places: u32) -> Result<()> {
    if (1..=MAX_PLACES).contains(&places) {
        return Ok(());
    }
    Err(Error::argument("places", places, format!("must be 1 to {MAX_PLACES}")))
}

/// The pool: peers map it, so that giving it back unmaps it at once. Waits for all streams of the
/// device first.
#[derive(Debug)]
pub struct Pool {
    memory: Arc<Memory>,
    arena: Arc<Arena>,
    /// The longest deadline of the buffer's calls so far, in ns.
    longest_ns: AtomicU64,
}

impl Pool {
    pub fn new(memory: Arc<Memory>, arena: &Arc<Arena>, timeout: Duration) -> Arc<Pool> {
        Arc::new(Pool { memory, arena: arena.clone(), longest_ns: nanoseconds(timeout).into() })
    }

    /// Records the deadline of a call, in ns.
    pub fn may_take(&self, timeout_ns: u64) {
        self.longest_ns.fetch_max(timeout_ns, Ordering::Relaxed);
    }

    /// How long the host waits for work that may use it. The waits of calls end before.
    pub fn patience(&self) -> Duration {
        let longest = Duration::from_nanos(self.longest_ns.load(Ordering::Relaxed));
        longest.saturating_mul(2).max(LEAST_PATIENCE)
    }

    pub fn memory(&self) -> &Memory {
        &self.memory
    }
}

impl Owns for Pool {
    fn device(&self) -> &Device {
        self.memory.device()
    }

    fn arena(&self) -> Option<&Arc<Arena>> {
        Some(&self.arena)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // Nothing of a device that was given up is freed.
        if self.memory.device().driver.streams().are_given_up() {
            return;
        }
        // Running work may write to it.
        let ended = self.arena.wait_all(self.patience());
        give_up_unless(ended, self.memory.device(), "work that may use a pool", self.patience());
    }
}

/// A place of either mode. `R`: what there is in it.
#[derive(Debug)]
pub struct PlaceState<R> {
    index: u32,
    buffer: u64,
    room: R,
    pool: Arc<Pool>,
    arena: Arc<Arena>,
    /// Taken by the caller.
    taken: AtomicBool,
    /// The dispatch whose rows the place holds.
    current: AtomicU64,
    lease: Mutex<LastLease<R>>,
}

#[derive(Debug)]
struct LastLease<R> {
    dispatches: u64,
    last: Weak<Lease<R>>,
    /// Its dispatch.
    last_dispatch: u64,
    /// Leases of that dispatch that have not ended. A lease that is being dropped counts until its
    /// fence is stored.
    live: u32,
    /// Behind all work that was enqueued when the last lease ended.
    ended: Option<Fence>,
}

/// The right to the results of one dispatch, or of its combine, shared by the tensors. When the
/// last tensor is dropped, streams may still read: the next operation here runs behind all work
/// that was enqueued by then.
#[derive(Debug)]
pub struct Lease<R> {
    place: Arc<PlaceState<R>>,
    /// 0 until its operation is enqueued.
    dispatch: AtomicU64,
    /// Nothing is borrowed any more: each use checks whether the rows are still valid.
    detached: AtomicBool,
    /// Its dispatch is part of a step, and each run overwrites the rows: the lease stays detached.
    recorded: AtomicBool,
}

/// A place in use by the caller. Others can take it once this is dropped.
#[derive(Debug)]
pub struct Held<R>(Arc<PlaceState<R>>);

impl<R> Held<R> {
    /// Takes the place of index `index`.
    ///
    /// # Errors
    /// [`Error::Argument`] where there is no such place, or it is in use already.
    pub fn take(places: &[Arc<PlaceState<R>>], index: u32) -> Result<Held<R>> {
        let Some(place) = places.get(index as usize) else {
            let rule = format!("the buffer has {}: create it with more places", places.len());
            return Err(Error::argument("place", index, rule));
        };
        if place.taken.swap(true, Ordering::AcqRel) {
            return Err(Error::argument("place", index, "it is handed out already: drop that Place first"));
        }
        Ok(Held(place.clone()))
    }

    /// The place.
    pub fn place(&self) -> &Arc<PlaceState<R>> {
        &self.0
    }
}

impl<R> Drop for Held<R> {
    fn drop(&mut self) {
        self.0.taken.store(false, Ordering::Release);
    }
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
            current: AtomicU64::new(0),
            lease: Mutex::new(LastLease {
                dispatches: 0,
                last: Weak::new(),
                last_dispatch: 0,
                live: 0,
                ended: None,
            }),
        })
    }

    /// Its index in the buffer.
    pub fn index(&self) -> u32 {
        self.index
    }

    /// The number of its buffer.
    pub fn buffer(&self) -> u64 {
        self.buffer
    }

    /// Its contents.
    pub fn room(&self) -> &R {
        &self.room
    }

    /// The pool that it is in, as the owner of tensors there.
    pub fn pool(&self) -> Owner {
        self.pool.clone()
    }

    /// Address of the byte `offset` of the pool.
    pub fn at(&self, offset: u64) -> DevicePtr {
        self.pool.memory().ptr().add(offset)
    }

    /// Begins a dispatch here, which overwrites the contents. The dispatch runs behind all readers
    /// of those rows; see [`PlaceState::order_before`].
    pub fn begin(self: &Arc<Self>) -> Result<Arc<Lease<R>>> {
        let lease = self.lease();
        self.begin_with(&lease)?;
        Ok(lease)
    }

    /// The same, with a lease of this place as the right to the results.
    pub fn begin_with(&self, lease: &Arc<Lease<R>>) -> Result<()> {
        let dispatch = {
            let mut state = lock(&self.lease);
            self.fence_readers(&mut state)?;
            state.dispatches += 1;
            state.dispatches
        };
        self.current.store(dispatch, Ordering::Release);
        lease.hold(dispatch);
        Ok(())
    }

    /// The same, with `stream` behind all readers of the present rows.
    pub fn begin_on(self: &Arc<Self>, stream: &Stream) -> Result<Arc<Lease<R>>> {
        let lease = self.begin()?;
        self.order_before(stream)?;
        Ok(lease)
    }

    /// The right to the results of an operation that is enqueued later.
    pub fn lease(self: &Arc<Self>) -> Arc<Lease<R>> {
        let (detached, recorded) = (AtomicBool::new(false), AtomicBool::new(false));
        Arc::new(Lease { place: self.clone(), dispatch: AtomicU64::new(0), detached, recorded })
    }

    /// Makes `stream` wait for all work that could read the rows that are here, enqueued by now.
    pub fn order_behind_readers(&self, stream: &Stream) -> Result<()> {
        self.fence_readers(&mut lock(&self.lease))?;
        self.order_before(stream)
    }

    /// Makes `stream` wait for all work enqueued by now.
    pub fn order_behind_all(&self, stream: &Stream) -> Result<()> {
        self.fence(&mut lock(&self.lease))?;
        self.order_before(stream)
    }

    /// Records a fence behind all work enqueued by now if a lease has not ended: its tensors may be
    /// in use.
    fn fence_readers(&self, state: &mut LastLease<R>) -> Result<()> {
        if state.live != 0 { self.fence(state) } else { Ok(()) }
    }

    /// Records a fence behind all work enqueued by now. The caller holds the lock, so that the
    /// fence takes the place of older ones alone.
    fn fence(&self, state: &mut LastLease<R>) -> Result<()> {
        let fence = self.arena.fence()?;
        if let Some(before) = state.ended.replace(fence) {
            self.arena.give_back(before);
        }
        Ok(())
    }

    /// Makes `stream` wait for all work that could read the rows that were here.
    pub fn order_before(&self, stream: &Stream) -> Result<()> {
        let Some(fence) = lock(&self.lease).ended.take() else { return Ok(()) };
        let outcome = fence.order_before(stream);
        match outcome {
            Ok(()) => self.arena.give_back(fence),
            // Another try waits for it.
            Err(_) => drop(lock(&self.lease).ended.get_or_insert(fence)),
        }
        outcome
    }

    /// The dispatch whose rows the place holds.
    fn current(&self) -> u64 {
        self.current.load(Ordering::Acquire)
    }
}

impl<R: Send + Sync + Debug> Overwrites for Lease<R> {
    fn check_free(&self) -> Result<()> {
        // Not under the lock, which the lease takes when it is dropped.
        let last = lock(&self.place.lease).last.clone().upgrade();
        let is_borrowed = |lease: &Arc<Lease<R>>| {
            !std::ptr::eq(Arc::as_ptr(lease), self) && !lease.detached.load(Ordering::Acquire)
        };
        if last.as_ref().is_some_and(is_borrowed) {
            let rule = "rows of a dispatch there are in use: drop or detach them before the step that was captured with this place runs";
            return Err(Error::argument("place", self.place.index, rule));
        }
        Ok(())
    }

    fn begin_again(self: Arc<Self>, stream: &Stream) -> Result<()> {
        // Rows of the run before are the step's own: `Step::launch` leaves their readers to its
        // caller.
        if self.check_current().is_err() {
            self.place.order_behind_readers(stream)?;
        }
        let mut state = lock(&self.place.lease);
        if state.last_dispatch != self.dispatch() {
            (state.last_dispatch, state.live) = (self.dispatch(), 1);
        }
        state.last = Arc::downgrade(&self);
        drop(state);
        self.place.current.store(self.dispatch(), Ordering::Release);
        Ok(())
    }
}

impl<R> Lease<R> {
    /// The place that it is for.
    pub fn place(&self) -> &Arc<PlaceState<R>> {
        &self.place
    }

    /// The number of its dispatch into the place.
    pub fn dispatch(&self) -> u64 {
        self.dispatch.load(Ordering::Acquire)
    }

    /// Makes it a right to the results of the dispatch `dispatch`, whose operation is enqueued now.
    pub fn hold(self: &Arc<Self>, dispatch: u64) {
        self.dispatch.store(dispatch, Ordering::Release);
        let mut state = lock(&self.place.lease);
        state.live = if state.last_dispatch == dispatch { state.live + 1 } else { 1 };
        (state.last, state.last_dispatch) = (Arc::downgrade(self), dispatch);
    }

    /// Ends the borrow of the place: later uses check whether the rows are still there.
    pub fn detach(&self) {
        self.detached.store(true, Ordering::Release);
    }

    /// Ends the borrow for good: its dispatch is part of a step.
    pub fn record(&self) {
        self.recorded.store(true, Ordering::Release);
        self.detach();
    }

    /// The place is borrowed again, unless the dispatch is part of a step.
    pub fn attach(&self) {
        self.detached.store(self.recorded.load(Ordering::Acquire), Ordering::Release);
    }

    /// An error unless detached rows are in `place` and have not been overwritten.
    pub fn check_in(&self, place: &Arc<PlaceState<R>>) -> Result<()> {
        if !Arc::ptr_eq(&self.place, place) {
            let rule = format!("the rows lie in place {} of their buffer", self.place.index);
            return Err(Error::argument("place", place.index, rule));
        }
        self.check_current()
    }

    /// An error where a later dispatch has overwritten the rows.
    pub fn check_current(&self) -> Result<()> {
        if self.place.current() == self.dispatch() {
            return Ok(());
        }
        Err(Error::StaleHandle(format!(
            "the rows were those of dispatch {} in place {} and have been overwritten since, by dispatch {}",
            self.dispatch(),
            self.place.index,
            self.place.current()
        )))
    }
}

impl<R: Debug + Send + Sync> Owns for Lease<R> {
    fn device(&self) -> &Device {
        self.place.pool.memory().device()
    }

    fn arena(&self) -> Option<&Arc<Arena>> {
        Some(&self.place.arena)
    }
}

impl<R> Drop for Lease<R> {
    fn drop(&mut self) {
        let mut state = lock(&self.place.lease);
        // Another dispatch may have begun here since; it has waited for this one's readers itself.
        let is_last = state.dispatches == self.dispatch() || self.place.current() == self.dispatch();
        if is_last && let Err(error) = self.place.fence(&mut state) {
            // The lease stays one of those that have not ended, so that the next operation here
            // makes the fence, or fails.
            return tracing::warn!("a fence behind readers of a dispatch: {error}");
        }
        if state.last_dispatch == self.dispatch() {
            state.live = state.live.saturating_sub(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::MemoryKind;
    use crate::driver::virt::{VirtConfig, VirtualGpu};

    fn place(device: &Device) -> Arc<PlaceState<()>> {
        let arena = Arena::new(device);
        let memory = Memory::alloc(device, 4096, MemoryKind::Device, "pool").unwrap();
        let pool = Pool::new(Arc::new(memory), &arena, Duration::from_secs(1));
        PlaceState::new(0, 1, (), pool, arena)
    }

    /// The fence of a lease that ends is made where no other one can be stored in between, which
    /// would be behind more work.
    #[test]
    fn an_older_fence_takes_the_place_of_no_newer_one() {
        let device = VirtualGpu::new(VirtConfig::default());
        let place = place(&device);
        let first = Stream::new(&device).unwrap();
        let lease = place.begin().unwrap();
        let streams_of_fence = || {
            let mut events = Vec::new();
            lock(&place.lease).ended.take().expect("a fence").into_spare(&mut events);
            events.len()
        };
        place.fence_readers(&mut lock(&place.lease)).unwrap();
        let before = streams_of_fence();
        let state = lock(&place.lease);
        let ends = std::thread::spawn(move || drop(lease));
        // A fence that is made before the lock is taken is made now.
        while state.last.strong_count() != 0 {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(20));
        let second = Stream::new(&device).unwrap();
        drop(state);
        ends.join().unwrap();
        assert_eq!(streams_of_fence(), before + 1);
        drop((first, second));
    }

    /// Streams may read the rows of a lease until its fence is stored.
    #[test]
    fn a_lease_that_is_being_dropped_has_readers() {
        let device = VirtualGpu::new(VirtConfig::default());
        let place = place(&device);
        let lease = place.begin().unwrap();
        lease.detach();
        let has_fence = || lock(&place.lease).ended.is_some();
        assert!(!has_fence());
        // No reference is left, as when its drop has begun on another thread.
        let lease = Arc::try_unwrap(lease).unwrap();
        let next = place.begin().unwrap();
        assert!(has_fence());
        drop(lease);
        assert!(has_fence());
        place.order_before(&Stream::new(&device).unwrap()).unwrap();
        drop(next);
        assert!(has_fence(), "that of the dispatch behind it");
    }
}
