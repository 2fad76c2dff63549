//! The buffers of this process, for the report of a wait that has expired: where ranks launch the operations of two of them in different
//! orders, and both do not fit on the device, they wait for each other, which no look at one buffer tells.

use std::mem::offset_of;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use epoxide_gpu::layout::Status;

use super::sequence::Sequence;
use crate::driver::{Device, DevicePtr, MappedMemory};
use crate::error::Result;

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

/// What tells whether operations of a buffer are in flight.
#[derive(Debug)]
pub(super) struct Activity {
    id: u64,
    device: Arc<dyn Device>,
    pub sequence: Arc<Sequence>,
    pub status: Arc<MappedMemory>,
}

impl Activity {
    /// Of a buffer, as long as the buffer holds it.
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

    /// What a wait that has expired may have been up against, for the end of its report: the other buffers of this process and device
    /// with operations in flight, or with one that has failed meanwhile. Empty where there are none.
    pub fn beside(&self) -> String {
        // What the list gives may be the last of a buffer that is just dropped: it must not go while the list is locked.
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
