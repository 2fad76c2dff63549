//! How the end of a launch comes, in order.

use std::time::{Duration, Instant};

/// How far the end has come.
#[derive(Clone, Copy)]
pub(super) enum Phase {
    Running,
    /// A rank has failed; the others may end by themselves until then.
    Settling(Instant),
    /// They were asked to end and may take until then.
    Ending(Instant),
    /// They were killed, and must be gone by then.
    Killed(Instant),
}

impl Phase {
    /// How long until something has to be done.
    pub fn left(self) -> Option<Duration> {
        match self {
            Phase::Settling(end) | Phase::Ending(end) | Phase::Killed(end) => {
                Some(end.saturating_duration_since(Instant::now()))
            }
            Phase::Running => None,
        }
    }
}
