//! Operations under way.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use super::core::{Core, Phase};
use crate::driver::Event;
use crate::error::{Error, Result};
use crate::group::work::Pending;
use crate::group::{CallResult, Operation};

/// The first pause between two looks of a thread that waits; each is twice as long, up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_micros(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(2);

#[derive(Debug, Clone)]
enum Progress {
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
    core: Weak<Core>,
    pub sequence: u64,
    pub operation: Operation,
    timeout: Duration,
    deadline: Instant,
    progress: Mutex<Progress>,
}

impl InFlight {
    pub fn new(core: &Arc<Core>, sequence: u64, operation: Operation, timeout: Duration) -> Arc<InFlight> {
        let deadline = Instant::now() + timeout;
        let progress = Mutex::new(Progress::Enqueuing);
        Arc::new(InFlight { core: core.weak(), sequence, operation, timeout, deadline, progress })
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It is in the stream, in front of `event`.
    pub fn enqueued(&self, event: Event) {
        *self.progress() = Progress::Enqueued(Arc::new(event));
    }

    /// Ends it, unless it has ended.
    pub fn end(&self, core: &Core, result: Result<()>) -> Result<()> {
        let result = {
            let mut progress = self.progress();
            if let Progress::Ended(result) = &*progress {
                return result.clone();
            }
            *progress = Progress::Ended(result.clone());
            result
        };
        let error = result.as_ref().err().map(Error::to_string);
        core.recorder.finish(self.sequence, error.as_deref());
        core.unlist(self);
        result
    }

    /// Ends it if its event has passed. Asks nobody else, and gives nothing up.
    pub fn reap(&self) {
        // Looked at first, and not under the lock: the end takes it again.
        let progress = self.progress().clone();
        if let Progress::Enqueued(event) = progress
            && let (Some(core), Ok(true)) = (self.core.upgrade(), event.is_done())
        {
            let _ = self.end(&core, Ok(()));
        }
    }

    /// Looks how far it is. What has gone wrong, or takes too long, ends the communicator.
    pub fn poll(&self) -> Option<Result<()>> {
        let progress = self.progress().clone();
        if let Progress::Ended(result) = progress {
            return Some(result);
        }
        let name = self.operation.name();
        let Some(core) = self.core.upgrade() else {
            return Some(Err(Error::os(name, "the communicator was dropped before the operation had ended")));
        };
        if let Progress::Enqueued(event) = &progress {
            match event.is_done() {
                Ok(false) => {}
                Ok(true) => return Some(self.end(&core, Ok(()))),
                Err(error) => return Some(self.end(&core, Err(core.fail(error)))),
            }
        }
        let phase = core.phase();
        if let Phase::Aborted(reason) = &phase {
            let reason = format!("the communicator was aborted: {reason}");
            return Some(self.end(&core, Err(core.error(name, self.sequence, reason))));
        }
        if let Err(error) = core.check_async() {
            return Some(self.end(&core, Err(core.fail(error))));
        }
        if Instant::now() >= self.deadline {
            let reason = format!(
                "it has not ended within {:?}; a peer may not have made the call, hang or have died",
                self.timeout
            );
            let error = core.error(name, self.sequence, reason);
            return Some(self.end(&core, Err(core.fail(error))));
        }
        None
    }
}

impl Pending for InFlight {
    fn outcome(&self) -> Option<Result<CallResult>> {
        self.poll().map(|result| result.map(|()| CallResult::Done))
    }

    fn is_over(&self) -> bool {
        self.poll().is_some()
    }

    fn wait(&self, until: Option<Instant>) {
        let mut pause = FIRST_PAUSE;
        while !self.is_over() {
            let left = until.map_or(pause, |until| until.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return;
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}
