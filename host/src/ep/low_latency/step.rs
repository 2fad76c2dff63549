//! Operations that are recorded once and run any number of times.

use std::sync::Arc;
use std::time::Duration;

use super::buffer::Buffer;
use crate::driver::Stream;
use crate::ep::StreamOrder;
use crate::ep::captured::Captured;
use crate::ep::scratch::Arena;
use crate::ep::sequence::Sequence;
use crate::ep::step::{Captures, Step};
use crate::ep::tensor::Outcome;
use crate::error::Result;

impl Captures for Buffer {
    fn captured(&mut self) -> &mut Option<Captured> {
        &mut self.captured
    }

    fn arena(&self) -> &Arena {
        &self.arena
    }

    fn timeout(&self) -> Duration {
        self.options.timeout
    }

    fn sequence(&self) -> &Arc<Sequence> {
        &self.sequence
    }

    fn faults(&self) -> Arc<dyn Outcome> {
        self.faults.clone()
    }
}

impl Buffer {
    /// Captures what `work` enqueues on `stream`, dispatches with their combines. It is called
    /// twice: once to run, so that recording loads nothing, and once to be recorded. Collective, as
    /// the calls in it are.
    ///
    /// What is returned from `work` is detached ([`Received::detach`](super::Received::detach),
    /// [`Combined::detach`](super::Combined::detach)), since every run of the step brings new rows
    /// and sums.
    ///
    /// A step is ordered with the buffer's other operations on whatever streams they run, and says
    /// when one has failed. A recording that was made otherwise, whose launch is `unsafe`, is
    /// neither: it keeps its inputs for as long as the buffer lives.
    ///
    /// # Errors
    /// What `work` returns, and whatever the driver reports.
    pub fn capture<T>(
        &mut self,
        stream: &Stream,
        work: impl FnMut(&mut Buffer, StreamOrder<'_>) -> Result<T>,
    ) -> Result<Step<T>> {
        self.record(stream, work)
    }
}
