//! Synchronisation between threads of a process that a race checker cannot observe: a message, a
//! barrier of a process group.
//!
//! The checker of virtual GPUs needs these events, and the crate of process groups does not depend
//! on the checker. The driver of virtual GPUs sets the function that reports them to the checker.

use std::sync::OnceLock;

static OBSERVER: OnceLock<fn()> = OnceLock::new();

/// Sets the function that [`meet`] calls. Only the first call has an effect.
pub fn observe(observer: fn()) {
    let _ = OBSERVER.set(observer);
}

/// Call it on each thread before the threads wait for each other, and once more behind that.
pub fn meet() {
    if let Some(observer) = OBSERVER.get() {
        observer();
    }
}
