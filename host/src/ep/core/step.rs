//! Steps: operations that are recorded once and run any number of times, and what recordings keep.

use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use super::fault::Faults;
use super::place::Lease;
use super::sequence::{Halves, Sequence};
use super::{Core, HasCore, StreamOrder};
use crate::driver::{Graph, Outcome, Stream};
use crate::ep::Tensor;
use crate::ep::tensor::Owner;
use crate::error::{Error, Result};

/// Operations that were captured by
/// [`throughput::Buffer::capture`](crate::throughput::Buffer::capture) or
/// [`low_latency::Buffer::capture`](crate::low_latency::Buffer::capture), as a CUDA graph. The step
/// owns all memory that its kernels use: inputs, outputs and routing live as long as the step, even
/// if the caller drops them.
#[derive(Debug)]
pub struct Step<T> {
    graph: Graph,
    output: T,
    captured: Captured,
    sequence: Arc<Sequence>,
    faults: Arc<Faults>,
}

impl<T> Step<T> {
    /// Runs it on `stream`, behind the buffer's last operation and behind all readers of other
    /// dispatches' rows in its places. The caller makes `stream` wait for readers of the previous
    /// run's results on other streams. Collective; the host does not wait.
    ///
    /// # Errors
    /// The error of an operation that has failed by now, a run before this one included:
    /// [`Error::PeerTimeout`] or [`Error::OtherCall`]. [`Error::Broken`] where the second half of
    /// an operation is outstanding, [`Error::StaleHandle`] where the buffer was dropped, and errors
    /// of the driver. [`Error::Argument`] where `stream` is of another device, rows of one of its
    /// places are in use by an eager dispatch, combine rows that it would overwrite are in use, or
    /// `stream` is captured.
    /// Failures of this run show in [`Step::check`], and in the next launch behind it. The failed
    /// plan of a dispatch with [`Counts::OnDevice`](crate::throughput::Counts) shows in
    /// [`Step::check`] alone, since that dispatch ends by itself.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        self.faults.check()?;
        self.graph.check_stream(stream)?;
        if stream.is_capturing()? {
            let rule =
                "a step is a recording already: launch it outside of captures, or record its calls instead";
            return Err(Error::argument("stream", "captured", rule));
        }
        let submission = self.sequence.begin(stream, Some(("step", Halves::Both)))?;
        self.captured.begin_again(stream)?;
        // SAFETY: the step owns the memory that the recording uses. The submission proves that the
        // buffer is open: dropping the buffer waits for this run, whose end the submission records.
        let outcome = unsafe { self.graph.launch(stream) };
        submission.end(stream, outcome)
    }

    /// The return value of the captured call. Its tensors hold the results of the last run.
    pub fn output(&self) -> &T {
        &self.output
    }

    /// Waits for `stream`, on which it ran last, and returns the error of its run, if it had one.
    /// Examples are a peer that timed out, and a dispatch with more rows than room.
    ///
    /// # Errors
    /// Those of the buffer's `check`; in high throughput also those of
    /// [`Buffer::check_dispatch`](crate::throughput::Buffer::check_dispatch).
    pub fn check(&self, stream: &Stream) -> Result<()> {
        stream.synchronize()?;
        self.faults.check()?;
        self.captured.plans.iter().try_for_each(|plan| plan.check_behind(stream))
    }
}

impl<R: Debug + Send + Sync + 'static> Core<R> {
    /// Runs `work` once, and once more to record it.
    pub fn capture<B: HasCore<Room = R>, T>(
        buffer: &mut B,
        stream: &Stream,
        mut work: impl FnMut(&mut B, StreamOrder<'_>) -> Result<T>,
    ) -> Result<Step<T>> {
        let order = StreamOrder::on(stream);
        let core = buffer.core();
        if core.recordings.step.is_some() || core.recordings.is_warmup() {
            let rule = "a recording of the buffer has begun: capture behind the outer `capture`, or behind `end_warmup`";
            return Err(Error::argument("buffer", core.id(), rule));
        }
        core.begin_warmup();
        let warmed_up = catch_unwind(AssertUnwindSafe(|| work(buffer, order)));
        let core = buffer.core();
        core.end_warmup();
        drop(warmed_up.unwrap_or_else(|panic| resume_unwind(panic))?);
        core.recordings.step = Some(Captured::default());
        let id = core.id();
        let mut output = None;
        let graph = catch_unwind(AssertUnwindSafe(|| {
            stream.capture_for(Some(id), || {
                output = Some(work(buffer, order)?);
                Ok(())
            })
        }));
        let core = buffer.core();
        let captured = core.recordings.step.take();
        let sent = core.enqueuer.sequence().forget_recorded();
        let graph = graph.unwrap_or_else(|panic| resume_unwind(panic))?;
        if let Some(call) = sent {
            let reason = "its second half was not recorded: receive what it brings in the same step".into();
            return Err(Error::Broken { call, reason, source: None });
        }
        let (Some(output), Some(captured)) = (output, captured) else {
            return Err(Error::internal("capture", "nothing was recorded"));
        };
        let (sequence, faults) = (core.enqueuer.sequence().clone(), core.faults.clone());
        Ok(Step { graph, output, captured, sequence, faults })
    }

    /// Operations from here on keep their memory, as recorded ones do.
    pub fn begin_warmup(&mut self) {
        // A recording that was given up between the halves has no second one.
        self.sequence().forget_recorded();
        self.recordings.warmup.get_or_insert_default();
    }

    /// Frees the memory that operations have kept.
    pub fn end_warmup(&mut self) {
        self.recordings.warmup = None;
    }

    /// Records that an operation fills a tensor of the caller's, where its outcome is known behind
    /// the operation alone; [`Uses::fills`](super::Uses::fills) adds others before.
    pub(crate) fn fills_tensor(&self, tensor: &Tensor<'_>, of: &Arc<impl Outcome + 'static>) {
        self.record(&tensor.filled(of));
    }

    /// Records a dispatch for the step that is being captured, if any, with its plan if that can
    /// fail. Nothing of the dispatch is borrowed once the captured call has returned.
    pub(crate) fn fills(&mut self, lease: &Arc<Lease<R>>, plan: Option<Arc<dyn Outcome>>) {
        if let Some(step) = &mut self.recordings.step {
            lease.record();
            step.overwritten.push(lease.clone());
            step.plans.extend(plan);
        }
    }

    /// Records other rows that the step being captured overwrites, if any.
    pub fn overwrites(&mut self, rows: Arc<dyn Overwrites>) {
        if let Some(step) = &mut self.recordings.step {
            step.overwritten.push(rows);
        }
    }
}

impl<R> Core<R> {
    /// An error unless the capture of `stream` is that of the step that is being captured, or
    /// there is neither: a step keeps what its own buffer's operations use, and orders those alone.
    pub(super) fn check_recorder(&self, stream: &Stream) -> Result<()> {
        let (recorder, step) = (stream.captured_for()?, self.recordings.step.as_ref());
        if recorder == step.map(|_| self.id()) {
            return Ok(());
        }
        let value = match recorder {
            Some(buffer) => format!("on a stream that a step of buffer {buffer} records"),
            None => "on a stream that another capture records".into(),
        };
        let rule = format!(
            "a step records its own buffer alone, and this is buffer {}: capture a step of each, or all \
             of it with `Stream::capture`, whose launch is unsafe",
            self.id()
        );
        Err(Error::argument("order", value, rule))
    }
}

/// The recordings that are made with a buffer.
#[derive(Debug, Default)]
pub struct Recordings {
    /// The step that is being captured.
    step: Option<Captured>,
    /// Inputs and outputs of recordings made otherwise, whose end is unknown.
    kept: Vec<Owner>,
    /// Inputs and outputs of the run before a recording. The recording keeps as many, which are
    /// free by then.
    warmup: Option<Vec<Owner>>,
}

impl Recordings {
    /// Whether calls run before they are recorded.
    pub fn is_warmup(&self) -> bool {
        self.warmup.is_some()
    }

    /// Keeps inputs and outputs of a call that runs before it is recorded.
    pub fn keep_for_warmup(&mut self, uses: impl IntoIterator<Item = Owner>) {
        if let Some(warmup) = &mut self.warmup {
            warmup.extend(uses);
        }
    }

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
struct Captured {
    /// Inputs and outputs of its kernels.
    kept: Vec<Owner>,
    /// The rows that it overwrites.
    overwritten: Vec<Arc<dyn Overwrites>>,
    /// The plans of its dispatches.
    plans: Vec<Arc<dyn Outcome>>,
}

impl Captured {
    /// Begins a run of its operations.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) where rows that it overwrites are borrowed.
    fn begin_again(&self, stream: &Stream) -> Result<()> {
        self.overwritten.iter().try_for_each(|rows| rows.check_free())?;
        self.overwritten.iter().try_for_each(|rows| rows.clone().begin_again(stream))
    }
}

/// Rows that a step overwrites.
pub trait Overwrites: Debug + Send + Sync {
    /// An error where they are borrowed.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument), with the place.
    fn check_free(&self) -> Result<()>;

    /// Begins a run of the captured operation into them, which are free.
    ///
    /// # Errors
    /// The driver's.
    fn begin_again(self: Arc<Self>, stream: &Stream) -> Result<()>;
}
