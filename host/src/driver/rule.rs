//! Enforces a rule: all that a running kernel waits for makes progress without a driver call.
//!
//! Freeing memory and loading modules hold the context's lock until running kernels have ended, and
//! any part of the process may do so. A kernel that waits for a thread which needs any call of that
//! context is then in a deadlock.

use std::cell::Cell;
use std::marker::PhantomData;

use crate::error::{Error, Result};

thread_local! {
    /// Name of this thread, if it must not call the driver.
    static FORBIDDEN: Cell<Option<&'static str>> = const { Cell::new(None) };
}

/// While this lives, a driver call of its thread is an error. On the virtual GPU such a call makes
/// the device unusable, so that no test passes with one.
#[derive(Debug)]
pub struct NoDriverCalls {
    outer: Option<&'static str>,
    // The guard is for the thread that made it.
    _not_send: PhantomData<*const ()>,
}

impl NoDriverCalls {
    /// Forbids driver calls on this thread; errors name it by `who`.
    pub fn new(who: &'static str) -> NoDriverCalls {
        NoDriverCalls { outer: FORBIDDEN.replace(Some(who)), _not_send: PhantomData }
    }

    /// An error if this thread must not call the driver. Every driver call checks this first.
    pub(crate) fn check() -> Result<()> {
        match FORBIDDEN.get() {
            None => Ok(()),
            Some(who) => Err(Error::internal(
                "driver call",
                format!(
                    "made by {who}, for which running kernels may wait: the call may itself wait for those kernels \
                     (docs/waits.md, \"Driver calls that wait for kernels\")"
                ),
            )),
        }
    }
}

impl Drop for NoDriverCalls {
    fn drop(&mut self) {
        FORBIDDEN.set(self.outer);
    }
}
