//! Following operations to their end.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::core::{Core, Phase};
use super::in_flight::{InFlight, Progress};
use crate::error::{Error, Result};
use epoxide_group::internal::CallResult;
use epoxide_group::internal::Pending;

/// The first pause between two polls of a waiting thread; each is twice as long, up to
/// [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_micros(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(2);

impl Core {
    /// Ends an operation, unless it has ended; gives how it ended.
    pub fn end_operation(&self, operation: &InFlight, result: Result<()>) -> Result<()> {
        if let Some(earlier) = operation.end(&result) {
            return earlier;
        }
        let error = result.as_ref().err().map(Error::to_string);
        self.recorder.finish(operation.sequence, error.as_deref());
        self.under_way.unlist(operation);
        result
    }

    /// Ends an operation if its event has passed. It polls no other operation, and aborts nothing.
    pub fn reap(&self, operation: &InFlight) {
        if let Progress::Enqueued(event) = operation.progress()
            && let Ok(true) = event.is_done()
        {
            let _ = self.end_operation(operation, Ok(()));
        }
    }

    /// Polls an operation. An error or a missed deadline ends the communicator.
    pub fn poll(self: &Arc<Core>, operation: &InFlight) -> Option<Result<()>> {
        match operation.progress() {
            Progress::Ended(result) => return Some(result),
            // A kernel that leaves because of an abort ends its event as well. NCCL gets an abort
            // behind the phase.
            Progress::Enqueued(event) => match event.is_done() {
                Ok(true) if !matches!(self.phase(), Phase::Aborted(_)) => {
                    return Some(self.end_operation(operation, Ok(())));
                }
                Ok(_) => {}
                Err(error) => return Some(self.end_operation(operation, Err(self.fail(error)))),
            },
            Progress::Enqueuing => {}
        }
        let name = operation.operation.name();
        if let Phase::Aborted(reason) = &self.phase() {
            let reason = format!("the communicator was aborted: {reason}");
            let error = self.error(name, operation.sequence, reason);
            return Some(self.end_operation(operation, Err(error)));
        }
        if let Err(error) = self.check_async() {
            return Some(self.end_operation(operation, Err(self.fail(error))));
        }
        if Instant::now() >= operation.deadline {
            let reason = format!(
                "it has not ended within {:?}; a peer may not have made the call, hang or have died",
                operation.timeout
            );
            let error = self.error(name, operation.sequence, reason);
            return Some(self.end_operation(operation, Err(self.fail(error))));
        }
        None
    }
}

/// An operation as its [`Work`](epoxide_group::Work) follows it, which may outlive the communicator.
#[derive(Debug)]
pub(super) struct Followed {
    core: Weak<Core>,
    operation: Arc<InFlight>,
}

impl Followed {
    pub fn new(core: &Arc<Core>, operation: Arc<InFlight>) -> Followed {
        Followed { core: core.weak(), operation }
    }

    fn poll(&self) -> Option<Result<()>> {
        if let Some(core) = self.core.upgrade() {
            return core.poll(&self.operation);
        }
        Some(match self.operation.progress() {
            Progress::Ended(result) => result,
            Progress::Enqueuing | Progress::Enqueued(_) => Err(Error::os(
                self.operation.operation.name(),
                "the communicator was dropped before the operation had ended",
            )),
        })
    }
}

impl Pending for Followed {
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
