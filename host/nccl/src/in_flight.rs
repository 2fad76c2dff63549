//! The record of operations under way.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use epoxide_base::deadline;

use crate::driver::Event;
use crate::error::Result;
use crate::lock::lock;
use epoxide_group::internal::Operation;

/// How far an operation is.
#[derive(Debug, Clone)]
pub(super) enum Progress {
    /// NCCL has not put it into the stream yet.
    Enqueuing,
    /// It is over when the event has passed.
    Enqueued(Arc<Event>),
    /// It is over.
    Ended(Result<()>),
}

/// An operation under way, and how it ended.
#[derive(Debug)]
pub(super) struct InFlight {
    pub sequence: u64,
    pub operation: Operation,
    pub timeout: Duration,
    pub deadline: Instant,
    progress: Mutex<Progress>,
}

impl InFlight {
    pub fn new(sequence: u64, operation: Operation, timeout: Duration) -> Arc<InFlight> {
        let deadline = deadline(timeout);
        let progress = Mutex::new(Progress::Enqueuing);
        Arc::new(InFlight { sequence, operation, timeout, deadline, progress })
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        lock(&self.progress)
    }

    /// Its progress, as a copy: the event must not be queried under the lock.
    pub fn progress(&self) -> Progress {
        self.lock().clone()
    }

    /// Records that it is in the stream, before `event`.
    pub fn enqueued(&self, event: Event) {
        *self.lock() = Progress::Enqueued(Arc::new(event));
    }

    /// Ends it with `result`. If it has ended before, that result stays and is returned.
    pub fn end(&self, result: &Result<()>) -> Option<Result<()>> {
        let before = {
            let mut progress = self.lock();
            if let Progress::Ended(earlier) = &*progress {
                return Some(earlier.clone());
            }
            std::mem::replace(&mut *progress, Progress::Ended(result.clone()))
        };
        // Frees its event, which must not happen under the lock.
        drop(before);
        None
    }
}

/// The operations of a communicator that are under way.
#[derive(Debug, Default)]
pub(super) struct UnderWay(Mutex<List>);

#[derive(Debug, Default)]
struct List {
    /// The number of the next operation.
    next: u64,
    operations: Vec<Arc<InFlight>>,
}

impl UnderWay {
    fn lock(&self) -> MutexGuard<'_, List> {
        lock(&self.0)
    }

    /// Lists an operation, with the number it gets.
    pub fn list(&self, make: impl FnOnce(u64) -> Arc<InFlight>) -> Arc<InFlight> {
        let mut list = self.lock();
        let operation = make(list.next);
        list.next += 1;
        list.operations.push(operation.clone());
        operation
    }

    pub fn unlist(&self, operation: &InFlight) {
        self.lock().operations.retain(|other| !std::ptr::eq(&**other, operation));
    }

    /// All of them, in the order of their numbers.
    pub fn all(&self) -> Vec<Arc<InFlight>> {
        self.lock().operations.clone()
    }
}
