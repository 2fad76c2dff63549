//! The record of memory that NCCL may use without copying.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::driver::Memory;
use crate::error::{Error, Result};
use crate::lock::lock;

/// Memory that is registered with a [`Communicator`], as [`Communicator::register`] gives it. It
/// stays registered until [`Communicator::deregister`], or until the communicator ends, which
/// releases the rest in the order of registration.
///
/// [`Communicator`]: super::Communicator
/// [`Communicator::register`]: super::Communicator::register
/// [`Communicator::deregister`]: super::Communicator::deregister
#[derive(Debug)]
#[must_use = "memory is deregistered by its registration"]
pub struct Registration {
    id: u64,
}

/// NCCL's handle of a registration.
#[derive(Debug, Clone, Copy)]
pub(super) struct Handle(pub *mut c_void);

// SAFETY: an opaque token that NCCL takes from any thread.
unsafe impl Send for Handle {}

#[derive(Debug)]
pub(super) struct Registered {
    id: u64,
    pub handle: Handle,
    /// Lives at least as long as the registration.
    memory: Arc<Memory>,
}

/// Registrations with a communicator, in the order of registration.
#[derive(Debug, Default)]
pub(super) struct Registrations(Mutex<Vec<Registered>>);

impl Registrations {
    fn lock(&self) -> MutexGuard<'_, Vec<Registered>> {
        lock(&self.0)
    }

    pub fn keep(&self, handle: Handle, memory: Arc<Memory>) -> Registration {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        self.lock().push(Registered { id, handle, memory });
        Registration { id }
    }

    /// Removes the memory of `registration`; an error for that of another communicator.
    pub fn take(&self, Registration { id }: Registration) -> Result<Registered> {
        let mut list = self.lock();
        match list.iter().position(|registered| registered.id == id) {
            Some(at) => Ok(list.remove(at)),
            None => Err(Error::argument("registration", id, "must be of this communicator")),
        }
    }

    pub fn take_all(&self) -> Vec<Registered> {
        std::mem::take(&mut *self.lock())
    }

    pub fn memory(&self) -> Vec<Arc<Memory>> {
        self.lock().iter().map(|registered| registered.memory.clone()).collect()
    }
}
