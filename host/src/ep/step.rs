//! Steps: operations of either mode that are recorded once and run any number of times.

use std::sync::Arc;
use std::time::Duration;

use super::captured::{Captured, Recordings};
use super::scratch::Arena;
use super::sequence::Sequence;
use super::tensor::Outcome;
use super::{Buffer, StreamOrder};
use crate::driver::{Graph, Stream};
use crate::error::{Error, Result};

/// Operations that were captured by [`Buffer::capture`], or that of
/// [`low_latency`](crate::low_latency::Buffer::capture), as a CUDA graph. It owns what its kernels
/// use: inputs, outputs and routing live as long as it does, whether or not the caller keeps them.
#[derive(Debug)]
pub struct Step<T> {
    graph: Graph,
    output: T,
    captured: Captured,
    sequence: Arc<Sequence>,
    faults: Arc<dyn Outcome>,
}

impl<T> Step<T> {
    /// Runs it on `stream`, behind the buffer's last operation and behind whoever reads what other dispatches brought to its places.
    /// `stream` waits for readers of the previous run's results on other streams. Collective; does not wait for the host.
    ///
    /// # Errors
    /// The error of an operation that has failed by now, a run before this one included: [`Error::PeerTimeout`] or [`Error::OtherCall`]. Also
    /// [`Error::StaleHandle`] where the buffer was dropped, [`Error::Argument`] where rows of one of its places are in use by an eager dispatch,
    /// and errors of the driver. Failures of this run show in [`Step::check`], and in the next launch behind it.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        self.faults.check_behind(stream)?;
        let turn = self.sequence.begin(stream, Some("step"))?;
        self.captured.begin_again(stream)?;
        // SAFETY: the step holds what was recorded, and the turn says that the buffer is not gone: its end waits for this run.
        let outcome = unsafe { self.graph.launch(stream) };
        outcome.and(turn.end(stream))
    }

    /// The return value of the captured call. Its tensors hold the results of the last run.
    pub fn output(&self) -> &T {
        &self.output
    }

    /// Waits for `stream`, on which it ran last, and gives the error of its run, if it had one: a peer that did not come, a dispatch that
    /// found more rows than it has room for.
    ///
    /// # Errors
    /// Those of the buffer's `check`; in high throughput also those of [`Buffer::check_dispatch`].
    pub fn check(&self, stream: &Stream) -> Result<()> {
        stream.synchronize()?;
        self.faults.check_behind(stream)?;
        self.captured.plans.iter().try_for_each(|plan| plan.check_behind(stream))
    }
}

/// The parts of a buffer, of either mode, that its steps share or wait for.
pub(super) struct Recorder {
    pub arena: Arc<Arena>,
    /// The longest wait of the buffer's kernels.
    pub timeout: Duration,
    pub sequence: Arc<Sequence>,
    pub faults: Arc<dyn Outcome>,
}

impl Recorder {
    /// Runs `work` once, and once more to record it. `recordings`: those of the buffer.
    pub fn record<B, T>(
        self,
        buffer: &mut B,
        recordings: fn(&mut B) -> &mut Recordings,
        stream: &Stream,
        mut work: impl FnMut(&mut B, StreamOrder<'_>) -> Result<T>,
    ) -> Result<Step<T>> {
        let Recorder { arena, timeout, sequence, faults } = self;
        let order = StreamOrder::on(stream);
        drop(work(buffer, order)?);
        arena.settle(timeout.saturating_mul(2))?;
        recordings(buffer).step = Some(Captured::default());
        let mut output = None;
        let graph = stream.capture(|| {
            output = Some(work(buffer, order)?);
            Ok(())
        });
        let captured = recordings(buffer).step.take().unwrap_or_default();
        let graph = graph?;
        let output = output.ok_or_else(|| Error::os("capture", "nothing was recorded"))?;
        Ok(Step { graph, output, captured, sequence, faults })
    }
}

impl Buffer {
    /// Captures what `work` enqueues on `stream`. It is called twice: once to run, so that recording allocates and loads nothing, and once
    /// to be recorded. Collective, as the calls in it are. Waits for the first run.
    ///
    /// Received rows are returned from `work` detached ([`DispatchOutput::detach`](super::DispatchOutput::detach)), since every run of the
    /// step brings new ones. Dispatches leave their counts on the device ([`Counts::OnDevice`](super::Counts::OnDevice)).
    ///
    /// A recording that was not made by this method (a framework's own) keeps memory of the buffer and of its inputs for as long as the
    /// buffer lives.
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
