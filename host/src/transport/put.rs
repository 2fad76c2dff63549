//! A put, and the queues that carry it.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::time::Duration;

use crate::driver::Memory;
use crate::error::{Error, Result};

/// Why a queue takes no further put for a peer that has closed in order.
pub(super) const GOODBYE_BEFORE: &str = "it said goodbye before: it has dropped its buffer; make the same \
                                         calls on every rank before dropping one";

/// Bytes from the own wire memory to a peer's, and the counter behind them. Offsets are in bytes
/// from the start of wire memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Put {
    /// Offset of the bytes in this rank's memory.
    pub from: u64,
    /// Their offset in the peer's memory.
    pub to: u64,
    /// Number of bytes; 0 for a counter only.
    pub bytes: u64,
    /// The word there that gets `value` once the bytes are visible, 8-byte aligned.
    pub counter: u64,
    /// The value to store in it: absolute, never an increment, so that no atomics of a network card
    /// are needed.
    pub value: u64,
}

impl Put {
    /// Rejects a put beyond wire memory of `memory` bytes, at either end. Every queue checks before
    /// it touches memory.
    pub(crate) fn check(&self, memory: u64) -> Result<(), String> {
        let outside = |at: u64, bytes: u64| at.checked_add(bytes).is_none_or(|end| end > memory);
        let rule = if self.bytes > 0 && outside(self.from, self.bytes) {
            "from + bytes"
        } else if self.bytes > 0 && outside(self.to, self.bytes) {
            "to + bytes"
        } else if outside(self.counter, 8) {
            "counter + 8"
        } else if !self.counter.is_multiple_of(8) {
            return Err(format!("{self:?}: counter must be a multiple of 8"));
        } else {
            return Ok(());
        };
        Err(format!("{self:?}: {rule} must be within the {memory} bytes of wire memory"))
    }
}

/// An ordered queue to one peer. One thread uses it.
pub trait PutQueue: Send + Debug {
    /// Starts the puts, in order, as one batch. May wait for the network while it takes bytes, and
    /// for the queue's timeout while it takes none.
    ///
    /// # Errors
    /// The peer left, died, or cannot be reached, or a put exceeds wire memory; the queue cannot be
    /// used any more.
    fn put_with_counter(&mut self, puts: &[Put]) -> Result<()>;

    /// How many of all posted puts have been sent: their source memory may be written again. Does
    /// not wait.
    fn completed(&mut self) -> Result<u64>;

    /// The error of the next put, if already determined. Puts before it may have been sent.
    fn failure(&self) -> Option<Error> {
        None
    }

    /// Waits until all puts have been sent. The default is for queues whose puts are sent when the
    /// call returns.
    fn quiet(&mut self, _timeout: Duration) -> Result<()> {
        self.completed().map(drop)
    }

    /// Sends a goodbye, the last message. To the peer, a queue dropped without one looks like a
    /// dead rank.
    fn close(&mut self);

    /// The source wire memory.
    fn source(&self) -> Option<&Memory> {
        None
    }

    /// Ends the waits of the thread that uses the queue. A queue that waits polls it every few
    /// milliseconds; a queue that never waits can use this default.
    fn interrupt(&self) -> Interrupt {
        Interrupt::default()
    }
}

/// Ends the waits of a queue, from any thread, and records the call that the queue is in. Clones
/// share the state. The queue cannot be used once it is raised.
#[derive(Debug, Clone, Default)]
pub struct Interrupt(Arc<State>);

#[derive(Debug, Default)]
struct State {
    raised: AtomicBool,
    /// The call that the queue's thread is in; null outside of any.
    call: AtomicPtr<&'static str>,
    /// How many calls it has begun.
    calls: AtomicU64,
}

impl Interrupt {
    /// Ends the current wait and all later ones.
    pub fn raise(&self) {
        self.0.raised.store(true, Ordering::Release);
    }

    /// Whether it was raised.
    pub fn is_raised(&self) -> bool {
        self.0.raised.load(Ordering::Acquire)
    }

    /// Makes a call of the system, or of a card's driver, that may never return.
    pub fn during<T>(&self, call: &'static &'static str, make: impl FnOnce() -> T) -> T {
        self.0.calls.fetch_add(1, Ordering::Relaxed);
        self.0.call.store(std::ptr::from_ref(call).cast_mut(), Ordering::Relaxed);
        let outcome = make();
        self.0.call.store(std::ptr::null_mut(), Ordering::Relaxed);
        outcome
    }

    /// The call that the queue's thread is in now, and its number.
    pub fn call(&self) -> Option<(&'static str, u64)> {
        let call = self.0.call.load(Ordering::Relaxed);
        // SAFETY: null, or the address of a `&'static`; only such addresses are stored. Nothing
        // writes through it.
        let call = unsafe { call.as_ref() };
        call.map(|call| (*call, self.0.calls.load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_tells_the_call_that_is_under_way() {
        let interrupt = Interrupt::default();
        let seen = interrupt.clone();
        let outcome = interrupt.during(&"sendmsg", || seen.call());
        assert_eq!(outcome, Some(("sendmsg", 1)));
        assert_eq!(seen.call(), None);
        assert_eq!(interrupt.during(&"poll", || seen.call()), Some(("poll", 2)));
    }
}
