//! Handles of operations that go on in the background.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::collectives::CallResult;
use crate::error::{Error, Result};

#[derive(Debug, Default)]
struct WorkState {
    result: Mutex<Option<Result<CallResult>>>,
    ended: Condvar,
}

/// An operation under way. Dropping it does not end the operation.
#[must_use = "an operation's error shows in its handle only"]
pub struct Work<T = CallResult> {
    shared: Arc<WorkState>,
    convert: Box<dyn FnOnce(CallResult) -> Result<T> + Send>,
}

impl<T> fmt::Debug for Work<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("completed", &self.is_completed()).finish()
    }
}

impl Work {
    /// An operation that has ended.
    #[doc(hidden)]
    pub fn ready(result: Result<CallResult>) -> Work {
        let shared = Arc::new(WorkState { result: Mutex::new(Some(result)), ended: Condvar::new() });
        Work { shared, convert: Box::new(Ok) }
    }

    /// An operation to come, and the end that says how it went.
    pub(crate) fn pending() -> (Work, Promise) {
        let shared = Arc::new(WorkState::default());
        (Work { shared: shared.clone(), convert: Box::new(Ok) }, Promise(shared))
    }
}

impl<T: 'static> Work<T> {
    /// The same operation, its result turned into another by `convert` once it is asked for.
    #[doc(hidden)]
    pub fn map<U>(self, convert: impl FnOnce(T) -> Result<U> + Send + 'static) -> Work<U> {
        let first = self.convert;
        Work { shared: self.shared, convert: Box::new(move |outcome| convert(first(outcome)?)) }
    }
}

impl<T> Work<T> {
    /// Waits for the end. The operation's own deadline bounds the wait.
    pub fn wait(self) -> Result<T> {
        let mut result = self.shared.result.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(result) = &*result {
                let outcome = result.clone()?;
                return (self.convert)(outcome);
            }
            result = self.shared.ended.wait(result).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits for the end up to `timeout`; true when it is over. The operation goes on in either case.
    pub fn wait_timeout(&self, timeout: Duration) -> bool {
        let start = Instant::now();
        let mut result = self.shared.result.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let left = timeout.saturating_sub(start.elapsed());
            if result.is_some() || left.is_zero() {
                return result.is_some();
            }
            result = self.shared.ended.wait_timeout(result, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// True when it is over, well or not.
    pub fn is_completed(&self) -> bool {
        self.shared.result.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// The error it ended with.
    pub fn error(&self) -> Option<Error> {
        let result = self.shared.result.lock().unwrap_or_else(PoisonError::into_inner);
        result.as_ref().and_then(|result| result.as_ref().err().cloned())
    }
}

/// The end of a [`Work`] that says how it went. Dropping it unused is an error there.
#[derive(Debug)]
pub(crate) struct Promise(Arc<WorkState>);

impl Promise {
    pub(crate) fn complete(&self, result: Result<CallResult>) {
        self.0.result.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(result);
        self.0.ended.notify_all();
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.complete(Err(Error::os("process group", "the group was dropped before the operation ran")));
    }
}
