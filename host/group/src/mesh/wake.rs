//! How other threads reach the one that waits in the mesh.

use std::os::fd::OwnedFd;
use std::sync::Mutex;

use rustix::event::EventfdFlags;

use crate::error::{Error, Result};
use crate::lock::lock;

/// An event counter and the reason of an abort, if any.
#[derive(Debug)]
pub(crate) struct Wake {
    pub event: OwnedFd,
    reason: Mutex<Option<String>>,
}

impl Wake {
    pub(crate) fn new() -> Result<Wake> {
        let event = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| Error::system("eventfd", error))?;
        Ok(Wake { event, reason: Mutex::default() })
    }

    /// Wakes the current wait, which then checks its conditions again.
    pub(crate) fn ring(&self) {
        // Fails only when the counter is full, and then the wait ends anyway.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// Has every operation fail from now on; the first reason stays.
    pub(crate) fn give_up(&self, reason: &str) {
        let mut slot = lock(&self.reason);
        slot.get_or_insert_with(|| reason.to_owned());
        drop(slot);
        self.ring();
    }

    pub(crate) fn reason(&self) -> Option<String> {
        lock(&self.reason).clone()
    }

    pub(crate) fn clear(&self) {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.event, &mut count);
    }
}
