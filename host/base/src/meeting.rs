//! Where threads of a process wait for each other by means that a race checker does not see: a
//! message, a barrier of a process group.
//!
//! The checker of virtual GPUs has to know of it, and the crate of process groups does not know the
//! checker. The driver of virtual GPUs sets the function that tells the checker.

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
