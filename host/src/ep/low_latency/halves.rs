//! The halves of an operation, and how they are launched.

use std::sync::Arc;

use bytemuck::Zeroable;
use epoxide_gpu::layout::{
    DevicePtr, LowLatencyCombineArgs, LowLatencyDispatchArgs, LowLatencyExpertDispatchArgs,
    LowLatencyMessages, LowLatencyWaitArgs, phase,
};

use super::Buffer;
use super::results::Room;
use super::results::{Combined, Received};
use crate::driver::{Event, Outcome, Stream};
use crate::ep::core::{Halves, Lease, PlaceState, Uses, add_counts, check_wait_ns};
use crate::ep::payload::Records;
use crate::ep::{StreamOrder, Tensor, TypedTensor};
use crate::error::Result;

/// An operation that is ready to be launched.
#[derive(Debug)]
pub struct Operation {
    pub name: &'static str,
    pub kernel: Arguments,
    pub place: Arc<PlaceState<Room>>,
    /// Pieces of work of either half: so many blocks have some.
    pub send_blocks: u32,
    pub receive_blocks: u32,
    /// The right to the results, where it is a dispatch.
    pub fills: Option<Arc<Lease<Room>>>,
    /// The right to the rows of a combine, until it is enqueued.
    pub rows: Option<Arc<Lease<Room>>>,
    /// The right to the sums of a combine, where they are in the place.
    pub sums: Option<Arc<Lease<Room>>>,
    /// The columns of a dispatch's rows, which may have to be packed first.
    pub records: Option<Records>,
    /// Counts of the caller's that the rows of each expert are added to.
    pub cumulative_counts: Option<DevicePtr>,
    /// Most multiprocessors, if not the buffer's.
    pub num_sms: Option<u32>,
    /// Times of the caller's that the waits for each rank are added to.
    pub wait_ns: Option<DevicePtr>,
    /// Whether scales of a dispatch within a node are sent as packets.
    pub packs_scales: bool,
    pub uses: Uses,
}

impl Operation {
    /// Pieces of work of these halves.
    fn pieces(&self, halves: Halves) -> u32 {
        let of = [(phase::SEND, self.send_blocks), (phase::RECEIVE, self.receive_blocks)];
        of.into_iter()
            .filter(|(half, _)| phases(halves) & half != 0)
            .map(|(_, blocks)| blocks)
            .max()
            .unwrap_or(1)
    }
}

/// The launch of either kernel.
#[derive(Debug, Clone, Copy)]
pub enum Arguments {
    Dispatch(LowLatencyDispatchArgs),
    DispatchByExpert(LowLatencyExpertDispatchArgs),
    Combine(LowLatencyCombineArgs),
    PooledCombine(LowLatencyCombineArgs),
}

/// The halves, as bits of a kernel's arguments.
fn phases(halves: Halves) -> u32 {
    match halves {
        Halves::Both => phase::SEND | phase::RECEIVE,
        Halves::Send => phase::SEND,
        Halves::Receive => phase::RECEIVE,
    }
}

/// The results of an operation once its second half has run: [`Pending::receive`] launches that. No
/// other operation of the buffer is possible before. Both halves run, or both are recorded: else
/// the second one is [`Error::Broken`](crate::Error::Broken). Dropping this without the second half
/// makes the buffer unusable, since the peers wait for that half.
#[derive(Debug)]
#[must_use = "the peers wait for its second half: call `receive`"]
pub struct Pending<'b, T> {
    buffer: &'b mut Buffer,
    operation: Operation,
    output: T,
}

impl<'p> Pending<'_, Received<'p>> {
    /// Launches the second half: waits for the peers' rows, and lists the rows of each expert.
    /// Collective.
    ///
    /// # Errors
    /// Whatever the driver reports. A peer's silence shows in [`Buffer::check`].
    pub fn receive(self, order: StreamOrder<'_>) -> Result<Received<'p>> {
        let (event, output) = self.launch(order)?;
        Ok(Received { event, ..output })
    }
}

impl<'p> Pending<'_, Combined<'p>> {
    /// Launches the second half: waits for the peers' rows, and sums. Collective.
    ///
    /// # Errors
    /// Whatever the driver reports. A peer's silence shows in [`Buffer::check`].
    pub fn receive(self, order: StreamOrder<'_>) -> Result<Combined<'p>> {
        let (event, output) = self.launch(order)?;
        Ok(Combined { event, ..output })
    }
}

impl Pending<'_, &Tensor<'_>> {
    /// Launches the second half of [`Buffer::combine_send_into`]: waits for the peers' rows, and
    /// sums into the tensor given there. Returns the event of an asynchronous call. Collective.
    ///
    /// # Errors
    /// Whatever the driver reports. A peer's silence shows in [`Buffer::check`].
    pub fn receive(self, order: StreamOrder<'_>) -> Result<Option<Event>> {
        let (event, _) = self.launch(order)?;
        Ok(event)
    }
}

impl<T> Pending<'_, T> {
    fn launch(mut self, order: StreamOrder<'_>) -> Result<(Option<Event>, T)> {
        Ok((self.buffer.launch(order, &mut self.operation, Halves::Receive)?, self.output))
    }
}

impl Buffer {
    /// Launches the first half of an operation.
    pub(super) fn send<T>(
        &mut self,
        order: StreamOrder<'_>,
        mut operation: Operation,
        output: T,
    ) -> Result<Pending<'_, T>> {
        self.launch(order, &mut operation, Halves::Send)?;
        Ok(Pending { buffer: self, operation, output })
    }

    /// Launches halves of an operation; returns the event of an asynchronous call. Both halves take
    /// two launches where not all blocks may be resident at once.
    pub(super) fn launch(
        &mut self,
        order: StreamOrder<'_>,
        operation: &mut Operation,
        halves: Halves,
    ) -> Result<Option<Event>> {
        let rows = operation.rows.take();
        let operation = &*operation;
        let mut args = operation.kernel;
        let named = Some((operation.name, halves));
        self.run(order, named, &operation.uses, |buffer, stream, capturing| {
            if let Some(rows) = rows {
                rows.check_current()?;
                operation.sums.iter().for_each(|sums| sums.hold(rows.dispatch()));
                // Readers on other streams must finish first: peers may overwrite the rows once
                // this rank has entered the combine. Until here steps found the place in use. The
                // last right to the rows makes a fence as it ends; a clone of them has another.
                let is_shared = Arc::into_inner(rows).is_none();
                if is_shared && !capturing {
                    operation.place.order_behind_readers(stream)?;
                }
            }
            // Not before: a dispatch that is rejected until here leaves the rows that are there.
            if let Some(lease) = operation.fills.as_ref().filter(|_| halves != Halves::Receive) {
                operation.place.begin_with(lease)?;
                buffer.core.fills(lease, None);
            }
            if !capturing {
                operation.place.order_before(stream)?;
            }
            if let Some(records) = operation.records.as_ref().filter(|_| halves != Halves::Receive) {
                let most = buffer.blocks_for(u32::MAX, operation.num_sms);
                // SAFETY: the memory of columns and records is freed only behind all work enqueued
                // on streams, and a recording keeps it.
                unsafe { records.launch(stream, &buffer.kernels.pack_columns, most)? };
            }
            let blocks = buffer.blocks_for(operation.pieces(halves), operation.num_sms);
            let resident = !buffer.options.beside_persistent_kernels && blocks <= stream.multiprocessors();
            let in_two = !resident || operation.wait_ns.is_some();
            let launches = match halves == Halves::Both && in_two {
                true => [Some(Halves::Send), Some(Halves::Receive)],
                false => [Some(halves), None],
            };
            let mut has_left = false;
            let launched = launches.into_iter().flatten().try_for_each(|halves| {
                if halves == Halves::Receive
                    && let Some(waited) = operation.wait_ns
                {
                    buffer.launch_wait(stream, operation, waited)?;
                }
                let grid = buffer.blocks_for(operation.pieces(halves), operation.num_sms);
                let (name, common) = match &mut args {
                    Arguments::Dispatch(args) => ("dispatch", &mut args.common),
                    Arguments::DispatchByExpert(args) => ("dispatch", &mut args.dispatch.common),
                    Arguments::Combine(args) | Arguments::PooledCombine(args) => {
                        ("combine", &mut args.common)
                    }
                };
                common.phases = phases(halves);
                common.comm.trace = buffer.core.trace(name, grid);
                let (packs_scales, messages) = (operation.packs_scales, operation.place.room().messages);
                // SAFETY: the memory of inputs is freed only behind all work enqueued on streams,
                // and a recording keeps them; the rest is the buffer's. The number of nodes decides
                // both the set of kernels and whether the place has messages.
                unsafe { buffer.kernels.launch(stream, grid, args, packs_scales, messages)? };
                has_left = true;
                Ok(())
            });
            // Peers have this rank's rows, and wait for it to end the operation.
            if let (Err(error), true, false) = (&launched, has_left, capturing) {
                buffer.core.give_up(operation.name, error);
            }
            launched?;
            let Some(cumulative) = operation.cumulative_counts.filter(|_| halves != Halves::Send) else {
                return Ok(());
            };
            let counts = operation.place.room().own.tables.expert_counts;
            let cumulative = (cumulative, buffer.local_experts());
            // SAFETY: the place has its tables as long as the buffer; the caller's memory is freed
            // only behind all work enqueued on streams, and a recording keeps it.
            unsafe {
                let kernel = &buffer.kernels.add_counts;
                add_counts(kernel, stream, buffer.comm, DevicePtr::NULL, counts, cumulative)
            }
        })
    }

    /// Launches the wait between the halves of an operation, whose time it adds to `waited`.
    fn launch_wait(&self, stream: &Stream, operation: &Operation, waited: DevicePtr) -> Result<()> {
        let (common, row_bytes, is_combine) = match operation.kernel {
            Arguments::Dispatch(args) => (args.common, args.row_bytes, false),
            Arguments::DispatchByExpert(args) => (args.dispatch.common, args.dispatch.row_bytes, false),
            Arguments::Combine(args) => (args.common, args.row_bytes, true),
            // No rows are sent.
            Arguments::PooledCombine(args) => (args.common, 0, true),
        };
        let messages = operation.place.room().messages.unwrap_or_else(LowLatencyMessages::zeroed);
        let is_combine = is_combine.into();
        let args = LowLatencyWaitArgs { common, messages, waited: waited.into(), row_bytes, is_combine };
        // SAFETY: the place has its words and tables as long as the buffer; the caller's memory is
        // freed only behind all work enqueued on streams, and a recording keeps it.
        unsafe { self.kernels.launch_wait(stream, args) }
    }

    /// The address to which an operation of this outcome adds its waits, if any.
    pub(super) fn wait_ns(
        &self,
        times: Option<&TypedTensor<'_, i64>>,
        outcome: &Arc<impl Outcome + 'static>,
        uses: &mut Uses,
    ) -> Result<Option<DevicePtr>> {
        let Some(times) = times else { return Ok(None) };
        check_wait_ns(times, self.num_ranks())?;
        uses.extend(self.core.owners([("cumulative_wait_ns", Some(&**times))])?);
        uses.fills(times, outcome);
        Ok(Some(times.ptr()))
    }
}
