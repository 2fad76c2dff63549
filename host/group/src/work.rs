//! Handles of operations in the background.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::call::CallResult;
use crate::error::{Error, Result};
use crate::lock::lock;

/// The state of a running operation.
pub trait Pending: Send + Sync {
    /// How it ended, if it has.
    fn outcome(&self) -> Option<Result<CallResult>>;

    /// Whether it has.
    fn is_over(&self) -> bool;

    /// Blocks until it has ended, or until `until`.
    fn wait(&self, until: Option<Instant>);
}

/// An operation whose outcome a [`Promise`] gives.
#[derive(Debug, Default)]
struct Promised {
    result: Mutex<Option<Result<CallResult>>>,
    ended: Condvar,
}

impl Pending for Promised {
    fn outcome(&self) -> Option<Result<CallResult>> {
        lock(&self.result).clone()
    }

    fn is_over(&self) -> bool {
        lock(&self.result).is_some()
    }

    fn wait(&self, until: Option<Instant>) {
        let mut result = lock(&self.result);
        while result.is_none() {
            result = match until.map(|until| until.saturating_duration_since(Instant::now())) {
                None => self.ended.wait(result).unwrap_or_else(PoisonError::into_inner),
                Some(left) if left.is_zero() => return,
                Some(left) => self.ended.wait_timeout(result, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }
}

/// An operation under way. Dropping it does not end the operation.
#[must_use = "an operation's error shows in its handle only"]
pub struct Work<T = CallResult> {
    operation: Arc<dyn Pending>,
    convert: Box<dyn FnOnce(CallResult) -> Result<T> + Send>,
}

impl<T> fmt::Debug for Work<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("completed", &self.is_completed()).finish()
    }
}

impl Work {
    /// The handle of an operation.
    pub(crate) fn of(operation: Arc<dyn Pending>) -> Work {
        Work { operation, convert: Box::new(Ok) }
    }

    /// An operation that has ended.
    pub(crate) fn ready(result: Result<CallResult>) -> Work {
        Work::of(Arc::new(Promised { result: Mutex::new(Some(result)), ended: Condvar::new() }))
    }

    /// An operation to come, and the promise of its outcome.
    pub(crate) fn pending() -> (Work, Promise) {
        let operation = Arc::new(Promised::default());
        (Work::of(operation.clone()), Promise(operation))
    }
}

impl<T: 'static> Work<T> {
    /// The same operation; `convert` maps its result when the caller waits.
    pub(crate) fn map<U>(self, convert: impl FnOnce(T) -> Result<U> + Send + 'static) -> Work<U> {
        let first = self.convert;
        Work { operation: self.operation, convert: Box::new(move |outcome| convert(first(outcome)?)) }
    }
}

impl<T> Work<T> {
    /// Waits for the end. The operation's own deadline bounds the wait.
    ///
    /// # Errors
    /// The operation's.
    pub fn wait(self) -> Result<T> {
        loop {
            if let Some(result) = self.operation.outcome() {
                return (self.convert)(result?);
            }
            self.operation.wait(None);
        }
    }

    /// Waits for the end up to `timeout`; true when it is over. The operation continues in either
    /// case.
    pub fn wait_timeout(&self, timeout: Duration) -> bool {
        // A time beyond the clock's range is none.
        self.operation.wait(Instant::now().checked_add(timeout));
        self.is_completed()
    }

    /// True when it is over, well or not.
    pub fn is_completed(&self) -> bool {
        self.operation.is_over()
    }

    /// The error it ended with.
    pub fn error(&self) -> Option<Error> {
        self.operation.outcome()?.err()
    }
}

/// The end of a [`Work`] that sets its outcome.
#[derive(Debug)]
pub(crate) struct Promise(Arc<Promised>);

impl Promise {
    pub(crate) fn complete(&self, result: Result<CallResult>) {
        lock(&self.0.result).get_or_insert(result);
        self.0.ended.notify_all();
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.complete(Err(Error::os("process group", "the group was dropped before the operation ran")));
    }
}
