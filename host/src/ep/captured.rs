//! The things that recordings of a buffer keep, in either mode.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::place::Lease;
use super::tensor::{Outcome, Owner};
use crate::driver::Stream;
use crate::error::Result;

/// The recordings that are made with a buffer.
#[derive(Debug, Default)]
pub(super) struct Recordings {
    /// The step that is being captured.
    pub step: Option<Captured>,
    /// Inputs and outputs of recordings made otherwise: nobody says when those end.
    kept: Vec<Owner>,
}

impl Recordings {
    /// Keeps inputs and outputs of a call that is recorded, for as long as the recording may run.
    pub fn keep(&mut self, uses: impl IntoIterator<Item = Owner>) {
        match &mut self.step {
            Some(step) => step.kept.extend(uses),
            None => self.kept.extend(uses),
        }
    }
}

/// A step while it is captured, and then as long as it may run.
#[derive(Debug, Default)]
pub(super) struct Captured {
    /// Inputs and outputs of its kernels.
    kept: Vec<Owner>,
    /// The places that it overwrites.
    leases: Vec<Arc<dyn Overwrites>>,
    /// The plans of its dispatches.
    pub plans: Vec<Arc<dyn Outcome>>,
}

impl Captured {
    /// Notes a dispatch. Nothing of it is borrowed once the call that is captured has returned.
    pub fn fills<R: Debug + Send + Sync + 'static>(&mut self, lease: &Arc<Lease<R>>) {
        lease.detached.store(true, Ordering::Release);
        self.leases.push(lease.clone());
    }

    /// Begins a run of its dispatches.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) where rows of one of its places are borrowed.
    pub fn begin_again(&self, stream: &Stream) -> Result<()> {
        self.leases.iter().try_for_each(|lease| lease.clone().begin_again(stream))
    }
}

/// A place that a step overwrites.
pub(super) trait Overwrites: Debug + Send + Sync {
    /// Begins a run of the captured dispatch into it.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) where rows there are borrowed.
    fn begin_again(self: Arc<Self>, stream: &Stream) -> Result<()>;
}
