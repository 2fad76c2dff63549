//! The buffers of this process, and the mapped host memory in which kernels record a buffer's
//! failures, in both modes alike.
//!
//! The report of a wait that has expired lists the other buffers. Ranks that launch the operations
//! of two buffers in different orders wait for each other if both do not fit on the device, which
//! the state of one buffer does not show.

use std::mem::offset_of;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use epoxide_gpu::layout::{
    FAILED_PLANS, FailedPlans, LATE_PEERS, MAX_WORLD, MISSING_TOKENS, STATUS, Section, Status,
};

use super::scratch::Arena;
use super::sequence::Sequence;
use crate::driver::{Device, DevicePtr, MappedMemory, Stream};
use crate::error::{Error, Result};

/// All buffers of this process, and some that are gone.
static BUFFERS: Mutex<Vec<Weak<Activity>>> = Mutex::new(Vec::new());

fn buffers() -> MutexGuard<'static, Vec<Weak<Activity>>> {
    BUFFERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The number of the next buffer of this process, whichever its mode.
pub(super) fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// State from which one sees whether operations of a buffer are in flight.
#[derive(Debug)]
pub(super) struct Activity {
    id: u64,
    device: Arc<dyn Device>,
    pub sequence: Arc<Sequence>,
    pub status: Arc<MappedMemory>,
}

impl Activity {
    /// The memory in which kernels record how operations of a buffer failed, of so many tokens.
    pub fn alloc_status(device: &Arc<dyn Device>, max_tokens: u32) -> Result<Arc<MappedMemory>> {
        let (status_bytes, plans_bytes) = (size_of::<Status>() as u64, size_of::<FailedPlans>() as u64);
        let bytes = MISSING_TOKENS + u64::from(max_tokens);
        let status = MappedMemory::alloc(device, bytes, "status")?;
        status.describe(&[
            Section::one("wait", status_bytes).of(STATUS),
            Section::one("failed_plans", plans_bytes).of(FAILED_PLANS).at(status_bytes),
            Section::array("late_peers", 2 * MAX_WORLD as u64, 8).at(LATE_PEERS),
            Section::array("missing_tokens", max_tokens.into(), 1).at(MISSING_TOKENS),
        ]);
        Ok(Arc::new(status))
    }

    /// The activity of a buffer, listed as long as the buffer holds it.
    pub fn list(
        id: u64,
        device: &Arc<dyn Device>,
        sequence: &Arc<Sequence>,
        status: &Arc<MappedMemory>,
    ) -> Arc<Activity> {
        let activity = Arc::new(Activity {
            id,
            device: device.clone(),
            sequence: sequence.clone(),
            status: status.clone(),
        });
        let mut buffers = buffers();
        buffers.retain(|buffer| buffer.strong_count() > 0);
        buffers.push(Arc::downgrade(&activity));
        activity
    }

    /// Possible causes of an expired wait, for the end of its report: the other buffers of this process and device
    /// with operations in flight, or with one that has failed meanwhile. Empty where there are none.
    pub fn beside(&self) -> String {
        // An upgraded reference may be the last of a buffer that is just dropped: it must not be dropped while the list is locked.
        let others: Vec<Arc<Activity>> = buffers().iter().filter_map(Weak::upgrade).collect();
        let others = others.iter().filter(|other| other.id != self.id && other.is_on(&self.device));
        let named = others.filter_map(|other| other.unfinished());
        let named = named.collect::<Vec<_>>().join(" and ");
        if named.is_empty() {
            return named;
        }
        format!(
            "; {named} on this device: operations of two buffers that are not launched in the same order on every rank wait for each \
             other where both do not fit on the device"
        )
    }

    fn is_on(&self, device: &Arc<dyn Device>) -> bool {
        let (own, other) = (&self.device.info().pci_bus_id, &device.info().pci_bus_id);
        // A GPU may have been opened twice; virtual ones have no address.
        Arc::ptr_eq(&self.device, device) || (!own.is_empty() && own == other)
    }

    /// Whether a kernel of the buffer has recorded that a wait failed.
    pub fn has_failed(&self) -> Result<bool> {
        // The device stores `code` with release after the rest, and this load acquires it.
        Ok(self.status.load(offset_of!(Status, code) as u64)? != 0)
    }

    /// Device address of the word that is not 0 once a wait has failed.
    pub fn status_ptr(&self) -> DevicePtr {
        self.status.ptr().add(offset_of!(Status, code) as u64)
    }

    /// The ranks whose words had not come when waits expired, in ascending order: `peer`, which the
    /// record names, and all that had not entered the operation, or where all had, those of which
    /// something else had not come. `rank_of` gives the rank by what was waited for, a
    /// [`Wait`](epoxide_gpu::layout::Wait), and its number there. A kernel may still be about to note
    /// one.
    pub fn late_ranks(&self, peer: u32, rank_of: impl Fn(u64, u32) -> u32) -> Result<Vec<u32>> {
        let mut late = Vec::new();
        for entry in 0..2 * MAX_WORLD as u32 {
            if entry == MAX_WORLD as u32 && !late.is_empty() {
                break;
            }
            let what = self.status.load(LATE_PEERS + u64::from(entry) * 8)?;
            late.extend((what != 0).then(|| rank_of(what, entry % MAX_WORLD as u32)));
        }
        late.push(peer);
        late.sort_unstable();
        late.dedup();
        Ok(late)
    }

    /// Has `stream` wait for the last operation of the buffer.
    pub fn come_before(&self, stream: &Stream) -> Result<()> {
        self.sequence.come_before(stream)
    }

    /// Device address of the bytes that [`Activity::missing_tokens`] reads.
    pub fn missing_ptr(&self) -> DevicePtr {
        self.status.ptr().add(MISSING_TOKENS)
    }

    /// The tokens, of at most `max_tokens`, that a combine which gave up may have left without their
    /// sums, in ascending order. Behind all that the streams of the device were given.
    pub fn missing_tokens(&self, arena: &Arena, max_tokens: u32, timeout: Duration) -> Result<Vec<u32>> {
        let fence = arena.fence()?;
        let have_ended = fence.wait_timeout(timeout)?;
        arena.give_back(fence);
        if !have_ended {
            let reason = format!("what the device's streams were given has not ended in {timeout:?}");
            return Err(Error::os("missing_tokens", reason));
        }
        let missing = self.status.read_all::<u8>(MISSING_TOKENS, max_tokens)?;
        Ok((0..).zip(missing).filter_map(|(token, is_missing)| (is_missing != 0).then_some(token)).collect())
    }

    fn unfinished(&self) -> Option<String> {
        let (id, operation) = (self.id, self.sequence.last_operation()?);
        if self.has_failed().is_ok_and(|failed| failed) {
            return Some(format!("buffer {id} of this process has a {operation} that failed as well"));
        }
        // Where the driver cannot say, nothing is claimed.
        let in_flight = self.sequence.has_ended().is_ok_and(|ended| !ended);
        in_flight.then(|| format!("buffer {id} of this process has a {operation} in flight"))
    }
}
