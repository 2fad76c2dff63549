//! Steps: operations that are recorded once and run any number of times.

use std::sync::Arc;

use super::captured::Captured;
use super::fault::Faults;
use super::sequence::Sequence;
use super::{Buffer, StreamOrder};
use crate::driver::{Graph, Stream};
use crate::error::Result;

/// Operations that were captured by [`Buffer::capture`], as a CUDA graph. It owns what its kernels use: inputs, outputs and routing live as
/// long as it does, whether or not the caller keeps them.
#[derive(Debug)]
pub struct Step<T> {
    graph: Graph,
    output: T,
    captured: Captured,
    sequence: Arc<Sequence>,
    faults: Arc<Faults>,
}

impl<T> Step<T> {
    /// Runs it on `stream`, behind the buffer's last operation and behind whoever reads what other dispatches brought to its places.
    /// Whoever reads what its run before left, on another stream, has `stream` wait for that. Collective; does not wait for the host.
    ///
    /// # Errors
    /// The error of an operation that has failed by now, a run before this one included: [`Error::PeerTimeout`](crate::Error::PeerTimeout) or
    /// [`Error::OtherCall`](crate::Error::OtherCall). Also [`Error::StaleHandle`](crate::Error::StaleHandle) where the buffer was dropped,
    /// [`Error::Argument`](crate::Error::Argument) where rows of one of its places are in use by an eager dispatch, and whatever the driver
    /// reports. What goes wrong in this run shows in [`Step::check`], and in the next launch behind it.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        self.faults.check()?;
        let turn = self.sequence.begin(stream, Some("step"))?;
        for lease in &self.captured.leases {
            lease.begin_again(stream)?;
        }
        // SAFETY: the step holds what was recorded, and the turn says that the buffer is not gone: its end waits for this run.
        let outcome = unsafe { self.graph.launch(stream) };
        outcome.and(turn.end(stream))
    }

    /// What the captured call returned. Its tensors hold the results of the last run.
    pub fn output(&self) -> &T {
        &self.output
    }

    /// Waits for `stream`, on which it ran last, and gives the error of its run, if it had one: a peer that did not come, a dispatch that
    /// found more rows than it has room for.
    ///
    /// # Errors
    /// As [`Buffer::check_dispatch`].
    pub fn check(&self, buffer: &Buffer, stream: &Stream) -> Result<()> {
        stream.synchronize()?;
        buffer.check()?;
        self.captured.handles.iter().try_for_each(|handle| buffer.check_dispatch(handle, stream))
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
    /// What `work` returns, and whatever the driver reports.
    pub fn capture<T>(
        &mut self,
        stream: &Stream,
        mut work: impl FnMut(&mut Buffer, StreamOrder<'_>) -> Result<T>,
    ) -> Result<Step<T>> {
        let order = StreamOrder::on(stream);
        drop(work(self, order)?);
        self.arena.settle(self.options.timeout.saturating_mul(2))?;
        self.captured = Some(Captured::default());
        let mut output = None;
        let graph = stream.capture(|| {
            output = Some(work(self, order)?);
            Ok(())
        });
        let captured = self.captured.take().unwrap_or_default();
        let graph = graph?;
        let Some(output) = output else {
            return Err(crate::Error::os("capture", "nothing was recorded"));
        };
        Ok(Step { graph, output, captured, sequence: self.sequence.clone(), faults: self.faults.clone() })
    }
}
