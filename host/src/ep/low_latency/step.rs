//! Operations that are recorded once and run any number of times.

use super::buffer::Buffer;
use crate::driver::Stream;
use crate::ep::StreamOrder;
use crate::ep::step::{Recorder, Step};
use crate::error::Result;

impl Buffer {
    /// Captures what `work` enqueues on `stream`, dispatches with their combines. It is called
    /// twice: once to run, so that recording loads nothing, and once to be recorded. Collective, as
    /// the calls in it are.
    ///
    /// Results are returned from `work` detached ([`Received::detach`](super::Received::detach),
    /// [`Combined::detach`](super::Combined::detach)), since every run of the step brings new rows
    /// and sums.
    ///
    /// A step is ordered with the buffer's other operations on whatever streams they run, and says
    /// when one has failed. A recording that was made otherwise, whose launch is `unsafe`, is
    /// neither: it keeps its inputs for as long as the buffer lives.
    ///
    /// # Errors
    /// Errors of `work` and of the driver.
    pub fn capture<T>(
        &mut self,
        stream: &Stream,
        work: impl FnMut(&mut Buffer, StreamOrder<'_>) -> Result<T>,
    ) -> Result<Step<T>> {
        let recorder = Recorder {
            arena: self.arena.clone(),
            timeout: self.options.timeout,
            sequence: self.sequence.clone(),
            faults: self.faults.clone(),
        };
        recorder.record(self, |buffer| &mut buffer.recordings, stream, work)
    }
}
