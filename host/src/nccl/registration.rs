//! Memory that NCCL may use without copying.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use super::communicator::Communicator;
use crate::driver::Memory;
use crate::error::{Error, Result};

/// Memory that is registered with a [`Communicator`], as [`Communicator::register`] gives it. It stays so until
/// [`Communicator::deregister`], or until the communicator goes, which releases all that is left in the order of registration.
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
    pub id: u64,
    pub handle: Handle,
    /// Lives at least as long as the registration.
    pub memory: Arc<Memory>,
}

impl Communicator {
    /// Registers memory, so that NCCL can use it without copying it. The communicator holds it until it is deregistered.
    ///
    /// # Errors
    /// [`Error::Unavailable`] with NCCL before 2.19; [`Error::Argument`] for another device's memory; NCCL's, which ends the communicator.
    pub fn register(&self, memory: &Arc<Memory>) -> Result<Registration> {
        let core = self.core();
        let register = core.library.require(core.functions().ncclCommRegister, "ncclCommRegister")?;
        core.library.require(core.functions().ncclCommDeregister, "ncclCommDeregister")?;
        self.check_device("memory", memory.device())?;
        self.wait_ready()?;
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        core.with_turn("register", Instant::now() + core.identity.timeout, |turn| {
            let mut handle = std::ptr::null_mut();
            turn.call("ncclCommRegister", |_, comm| {
                // SAFETY: a live communicator, memory that the registration keeps alive, and a valid out pointer.
                unsafe { register(comm, memory.ptr().0 as *mut c_void, memory.bytes() as usize, &mut handle) }
            })?;
            core.keep_registration(Registered { id, handle: Handle(handle), memory: memory.clone() });
            Ok(Registration { id })
        })
    }

    /// Ends a registration.
    ///
    /// # Errors
    /// [`Error::Argument`] for a registration of another communicator; NCCL's, which ends the communicator.
    pub fn deregister(&self, registration: Registration) -> Result<()> {
        let core = self.core();
        let deregister = core.library.require(core.functions().ncclCommDeregister, "ncclCommDeregister")?;
        core.with_turn("deregister", Instant::now() + core.identity.timeout, |turn| {
            let registered = core.take_registration(registration.id).ok_or_else(|| {
                Error::argument("registration", registration.id, "must be of this communicator")
            })?;
            turn.call("ncclCommDeregister", |_, comm| {
                // SAFETY: a live communicator, and a handle that it gave and that is given back once.
                unsafe { deregister(comm, registered.handle.0) }
            })
        })
    }

    /// The memory that is registered, in the order of registration.
    pub fn registered(&self) -> Vec<Arc<Memory>> {
        self.core().registered_memory()
    }
}
