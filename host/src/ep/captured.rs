//! What a capture keeps, in either mode.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::place::Lease;
use super::tensor::{Outcome, Owner};
use crate::driver::Stream;
use crate::error::Result;

/// What is known of a step while it is captured.
#[derive(Debug, Default)]
pub(super) struct Captured {
    /// What its kernels use.
    pub kept: Vec<Owner>,
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
