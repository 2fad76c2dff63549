//! The halves of an operation, and the kernels that enter and end one by themselves.
//!
//! Invariant: an operation whose [`EnterArgs::holds`] is 1 ends with `end_operation`, or the buffer
//! is given up, because its epoch would not advance.

use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::Zeroable as _;
use epoxide_gpu::kernels::COPY_STAGES;
use epoxide_gpu::layout::{CombineArgs, Comm, DevicePtr, EndArgs, EnterArgs, ExpertDispatchArgs, ring_bytes};

use super::combine::{CombineLaunch, Combined};
use super::handle::HandleState;
use super::kernels::OneNode;
use super::received::Received;
use super::{Buffer, StreamOrder, Tensor, TypedTensor};
use crate::driver::{Event, Stream};
use crate::ep::core::{Halves, Uses, add_counts, check_wait_ns};
use crate::error::{Error, Result};

/// The operation that a kernel enters or ends, and the tensor to which it adds its waits.
#[derive(Debug, Clone, Copy)]
pub struct Waits {
    pub comm: Comm,
    pub waited: Option<DevicePtr>,
    pub is_combine: bool,
}

/// The results of an operation once its second half has run: [`Pending::receive`] launches that. No
/// other operation of the buffer is possible before. Both halves run, or both are recorded: else
/// the second one is [`Error::Broken`]. Dropping this without the second half makes the buffer
/// unusable, since its operation does not end.
#[derive(Debug)]
#[must_use = "the operation ends with its second half: call `receive`"]
pub struct Pending<'b, T> {
    buffer: &'b mut Buffer,
    second: Second,
    output: T,
}

/// The second half of an operation.
#[derive(Debug)]
pub(super) enum Second {
    Dispatch(Box<DispatchEnd>, Arc<HandleState>),
    Combine(Box<CombineLaunch>),
}

/// The borrow of the caller's tensors for sums and for sums of weights: the output of
/// [`Buffer::combine_send_into`].
#[derive(Debug)]
pub struct CombineOutputs<'o> {
    pub(super) borrowed: PhantomData<&'o Tensor<'o>>,
}

impl<'p> Pending<'_, Received<'p>> {
    /// Launches the second half: waits for the peers' rows. Collective.
    ///
    /// # Errors
    /// Whatever the driver reports. A peer's silence shows in [`Buffer::check`].
    pub fn receive(self, order: StreamOrder<'_>) -> Result<Received<'p>> {
        let (event, output) = self.launch(order)?;
        Ok(Received { event, ..output })
    }
}

impl Pending<'_, Combined> {
    /// Launches the second half: gathers the peers' rows and sums. Collective.
    ///
    /// # Errors
    /// Whatever the driver reports. A peer's silence shows in [`Buffer::check`].
    pub fn receive(self, order: StreamOrder<'_>) -> Result<Combined> {
        let (event, output) = self.launch(order)?;
        Ok(Combined { event, ..output })
    }
}

impl Pending<'_, CombineOutputs<'_>> {
    /// Launches the second half of [`Buffer::combine_send_into`]: gathers the peers' rows, and sums
    /// into the tensors given there. Returns the event of an asynchronous call. Collective.
    ///
    /// # Errors
    /// Whatever the driver reports. A peer's silence shows in [`Buffer::check`].
    pub fn receive(self, order: StreamOrder<'_>) -> Result<Option<Event>> {
        Ok(self.launch(order)?.0)
    }
}

impl<T> Pending<'_, T> {
    fn launch(self, order: StreamOrder<'_>) -> Result<(Option<Event>, T)> {
        Ok((self.buffer.receive(&self.second, order)?, self.output))
    }
}

/// The kernels that follow those of a dispatch.
#[derive(Debug)]
pub(super) struct DispatchEnd {
    /// The name of the call.
    pub name: &'static str,
    /// The end of a dispatch that a separate kernel entered.
    pub waits: Option<Waits>,
    /// Copies of rows by expert that its kernel has not made.
    pub copies: Option<Copies>,
    /// The caller's counts, and those that are added to them.
    pub counts: Option<AddedCounts>,
    /// Memory that must live as long as a recording of it.
    pub uses: Uses,
}

/// Copies of rows by expert behind a dispatch.
#[derive(Debug, Clone)]
pub(super) struct Copies {
    pub node: Arc<OneNode>,
    pub args: ExpertDispatchArgs,
    pub blocks: u32,
    /// Warps of a block.
    pub warps: u32,
}

/// Counts to be added to the caller's.
#[derive(Debug, Clone, Copy)]
pub(super) struct AddedCounts {
    pub header: DevicePtr,
    pub counts: DevicePtr,
    pub cumulative: DevicePtr,
    pub local_experts: u32,
}

impl Buffer {
    /// The first half of an operation has been launched.
    pub(super) fn pending<T>(&mut self, second: Second, output: T) -> Pending<'_, T> {
        Pending { buffer: self, second, output }
    }

    /// The first half of a dispatch has been launched.
    pub(super) fn pending_dispatch<'b, 'p>(
        &'b mut self,
        end: DispatchEnd,
        received: Received<'p>,
    ) -> Pending<'b, Received<'p>> {
        let handle = received.handle.0.clone();
        self.pending(Second::Dispatch(Box::new(end), handle), received)
    }

    /// Launches the second half of an operation.
    fn receive(&mut self, second: &Second, order: StreamOrder<'_>) -> Result<Option<Event>> {
        let capturing = self.core.begin(order)?;
        match second {
            Second::Dispatch(end, handle) => {
                let named = Some((end.name, Halves::Receive));
                // SAFETY: the memory of inputs, outputs and the handle's block is freed only behind
                // all work enqueued on streams, and a recording keeps them.
                let event = self.run(order, capturing, named, &end.uses, |buffer, stream| unsafe {
                    buffer.end_dispatch(stream, end)
                })?;
                Ok(event.map(|event| event.of(handle.clone())))
            }
            Second::Combine(launch) => self.launch_combine(launch, Halves::Receive, order, capturing),
        }
    }

    /// Enqueues a kernel that publishes this rank's entry into an operation. `header`: the plan
    /// that it follows, null where it will make one. `holds`: whether `end_operation` will end it.
    /// If waits are added up, the kernel also waits for the peers' entries.
    ///
    /// # Safety
    /// The addresses are live until the stream has passed the kernel. The operation follows on the
    /// stream.
    pub(super) unsafe fn enter(
        &self,
        stream: &Stream,
        waits: &Waits,
        header: DevicePtr,
        holds: bool,
    ) -> Result<()> {
        let comm = Comm { trace: DevicePtr::NULL, ..waits.comm };
        let waited = waits.waited.unwrap_or(DevicePtr::NULL).into();
        let args =
            EnterArgs { comm, header, waited, holds: holds.into(), is_combine: waits.is_combine.into() };
        // SAFETY: the caller keeps the memory; the words are the buffer's.
        unsafe { self.kernels.enter_operation.call_named(stream, args) }
    }

    /// Enqueues the end of an operation that has been entered with `holds`. `combine`: the sums of
    /// a combine.
    ///
    /// # Safety
    /// The same as of [`Buffer::enter`]. The kernels of the operation precede it on the stream.
    pub(super) unsafe fn end(&self, stream: &Stream, waits: &Waits, combine: CombineArgs) -> Result<()> {
        let comm = Comm { trace: DevicePtr::NULL, ..waits.comm };
        let waited = waits.waited.unwrap_or(DevicePtr::NULL).into();
        let combine = CombineArgs { comm, ..combine };
        let args = EndArgs { combine, waited, is_combine: waits.is_combine.into() };
        // SAFETY: the caller keeps the memory; the words are the buffer's.
        unsafe { self.kernels.end_operation.call_named(stream, args) }
    }

    /// Enqueues what follows the kernels of a dispatch.
    ///
    /// # Safety
    /// All addresses are live until the stream has passed the kernels, which follow those of the
    /// dispatch.
    pub(super) unsafe fn end_dispatch(&self, stream: &Stream, end: &DispatchEnd) -> Result<()> {
        // SAFETY: the caller keeps the memory.
        unsafe {
            if let Some(waits) = &end.waits {
                self.end(stream, waits, CombineArgs::zeroed())?;
            }
            if let Some(Copies { node, args, blocks, warps }) = &end.copies {
                let shared = ring_bytes(*warps, COPY_STAGES, args.dispatch.stage_bytes);
                node.by_expert.copy.call(stream, *blocks, warps * 32, shared, *args)?;
            }
            if let Some(AddedCounts { header, counts, cumulative, local_experts }) = end.counts {
                let to = (cumulative, local_experts);
                add_counts(&self.kernels.add_counts, stream, self.comm, header, counts, to)?;
            }
        }
        Ok(())
    }

    /// [`Buffer::end_dispatch`] in the call that has begun the dispatch. Without its end no operation
    /// can follow. `capturing`: whether it is only recorded.
    ///
    /// # Safety
    /// The same as of [`Buffer::end_dispatch`].
    pub(super) unsafe fn end_or_give_up(
        &self,
        stream: &Stream,
        end: &DispatchEnd,
        capturing: bool,
    ) -> Result<()> {
        // SAFETY: the caller keeps the memory.
        let ended = unsafe { self.end_dispatch(stream, end) };
        if let (Err(error), Some(_), false) = (&ended, &end.waits, capturing) {
            self.core.give_up(end.name, error);
        }
        ended
    }

    /// The address to which an operation adds its waits, if any.
    pub(super) fn wait_ns(
        &self,
        times: Option<&TypedTensor<'_, i64>>,
        uses: &mut Uses,
    ) -> Result<Option<DevicePtr>> {
        let Some(times) = times else { return Ok(None) };
        check_wait_ns(times, self.num_ranks())?;
        if self.num_nodes() > 1 {
            let rule = "ranks of other nodes are not waited for one by one, since their rows are relayed: \
                        leave it out, or measure in low latency";
            return Err(Error::argument("cumulative_wait_ns", "given", rule));
        }
        uses.extend(self.core.owners([("cumulative_wait_ns", Some(&**times))])?);
        uses.fills(times, self.core.faults());
        Ok(Some(times.ptr()))
    }
}
