//! The halves of an operation, and how they are launched.

use std::sync::Arc;

use bytemuck::Zeroable;
use epoxide_gpu::kernels::{
    LOW_LATENCY_INTERNODE_SHARED_BYTES, LOW_LATENCY_MANY_SHARED_BYTES, LOW_LATENCY_SHARED_BYTES,
    LowLatencyCombineBf16, LowLatencyCombineF16, LowLatencyCombineF32, LowLatencyCombineFp8,
    LowLatencyCombineManyBf16, LowLatencyCombineManyF16, LowLatencyCombineManyF32, LowLatencyCombineManyFp8,
    LowLatencyCombineManyPooled, LowLatencyCombineManySummed, LowLatencyCombinePooled,
    LowLatencyCombineSummed, LowLatencyCombineTwoPooled, LowLatencyDispatch, LowLatencyDispatchBatch,
    LowLatencyDispatchByExpert, LowLatencyDispatchByExpertMxfp8, LowLatencyDispatchByExpertScalePackets,
    LowLatencyDispatchMany, LowLatencyDispatchManyBatch, LowLatencyDispatchManyByExpert,
    LowLatencyDispatchManyByExpertMxfp8, LowLatencyDispatchManyMxfp8, LowLatencyDispatchMxfp8,
    LowLatencyDispatchScalePackets, LowLatencyInternodeCombineBf16, LowLatencyInternodeCombineF16,
    LowLatencyInternodeCombineF32, LowLatencyInternodeCombineFp8, LowLatencyInternodeDispatch,
    LowLatencyInternodeDispatchByExpert, LowLatencyInternodeDispatchByExpertMxfp8,
    LowLatencyInternodeDispatchMxfp8, LowLatencyInternodeWait, LowLatencyWait, LowLatencyWaitMany,
    low_latency_by_expert_shared_bytes, low_latency_dispatch_batch_shared_bytes,
    low_latency_dispatch_shared_bytes, low_latency_internode_by_expert_shared_bytes,
};
use epoxide_gpu::layout::{
    BATCH_TOPK, DevicePtr, LowLatencyCombineArgs, LowLatencyDispatchArgs, LowLatencyExpertDispatchArgs,
    LowLatencyInternodeCombineArgs, LowLatencyInternodeDispatchArgs, LowLatencyInternodeExpertDispatchArgs,
    LowLatencyMessages, LowLatencyWaitArgs, Quantise, is_batch, phase,
};

use super::results::Room;
use super::results::{Combined, Received};
use super::{Buffer, Kernels, Kind};
use crate::driver::{Event, Outcome, Stream};
use crate::ep::core::{Halves, Lease, PlaceState, Uses, add_counts, check_wait_ns};
use crate::ep::payload::Records;
use crate::ep::{DType, StreamOrder, Tensor, TypedTensor};
use crate::error::{Error, Result};

/// Threads of a block.
const THREADS: u32 = LowLatencyDispatch::INFO.max_threads;

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

/// Whether a combine's blocks return rows while they sum. True if each block has more than two
/// tokens to sum, and rows are bf16 and summed over experts already. With one or two, half of a
/// block's warps would be idle: 256 tokens on 132 blocks took 8 % longer.
fn returns_while_summing(dtype: DType, args: &LowLatencyCombineArgs, grid: u32) -> bool {
    let common = &args.common;
    dtype == DType::Bf16
        && args.quantise == Quantise::None as u32
        && args.by_expert == 0
        && common.phases == phase::SEND | phase::RECEIVE
        && common.num_tokens > common.packet_tokens
        && common.num_tokens > 2 * grid
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
/// the second one is [`Error::Broken`]. Dropping this without the second half makes the buffer
/// unusable, since the peers wait for that half.
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
                buffer.launch_kernel(stream, operation, args, grid)?;
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
        let (across, grid) = (operation.place.room().messages, self.num_ranks());
        let messages = across.unwrap_or_else(LowLatencyMessages::zeroed);
        let is_combine = is_combine.into();
        let args = LowLatencyWaitArgs { common, messages, waited: waited.into(), row_bytes, is_combine };
        let kernel = &self.kernels.wait;
        // SAFETY: the place has its words and tables as long as the buffer; the caller's memory is
        // freed only behind all work enqueued on streams, and a recording keeps it.
        unsafe {
            if across.is_some() {
                let (threads, call) =
                    (LowLatencyInternodeWait::INFO.max_threads, LowLatencyInternodeWait::call(args));
                return stream.call(kernel, grid, threads, LOW_LATENCY_SHARED_BYTES, call);
            }
            if self.is_many() {
                let (threads, call) = (LowLatencyWaitMany::INFO.max_threads, LowLatencyWaitMany::call(args));
                return stream.call(kernel, grid, threads, LOW_LATENCY_MANY_SHARED_BYTES, call);
            }
            let (threads, call) = (LowLatencyWait::INFO.max_threads, LowLatencyWait::call(args));
            stream.call(kernel, grid, threads, LOW_LATENCY_SHARED_BYTES, call)
        }
    }

    /// Whether the kernels are those of more than a few ranks of one node.
    fn is_many(&self) -> bool {
        Kind::of(self.core.topology()) == Kind::Many
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

    /// Launches the kernel of an operation with so many blocks.
    fn launch_kernel(
        &self,
        stream: &Stream,
        operation: &Operation,
        args: Arguments,
        grid: u32,
    ) -> Result<()> {
        let (across, dtype) = (LOW_LATENCY_INTERNODE_SHARED_BYTES, self.options.combine_dtype);
        let is_many = self.is_many();
        let within = if is_many { LOW_LATENCY_MANY_SHARED_BYTES } else { LOW_LATENCY_SHARED_BYTES };
        let Kernels { combine, quantised_combine, summed_combine, pooled_combine, .. } = &self.kernels;
        // SAFETY: the memory of inputs is freed only behind all work enqueued on streams, and a
        // recording keeps them; the rest is the buffer's. The number of nodes decides both the
        // set of kernels and whether the place has messages.
        unsafe {
            match (args, operation.place.room().messages) {
                (Arguments::Dispatch(args), messages) => {
                    self.launch_dispatch(stream, operation, args, messages, grid)
                }
                (Arguments::DispatchByExpert(args), messages) => {
                    self.launch_dispatch_by_expert(stream, operation, args, messages, grid)
                }
                (Arguments::PooledCombine(args), _) if is_many => {
                    let call = LowLatencyCombineManyPooled::call(args);
                    stream.call(pooled_combine, grid, THREADS, within, call)
                }
                (Arguments::PooledCombine(args), _) if self.num_ranks() > 2 => {
                    let call = LowLatencyCombinePooled::call(args);
                    stream.call(pooled_combine, grid, THREADS, within, call)
                }
                (Arguments::PooledCombine(args), _) => {
                    let call = LowLatencyCombineTwoPooled::call(args);
                    stream.call(pooled_combine, grid, THREADS, within, call)
                }
                (Arguments::Combine(args), None) if is_many => {
                    if returns_while_summing(dtype, &args, grid) {
                        let call = LowLatencyCombineManySummed::call(args);
                        return stream.call(summed_combine, grid, THREADS, within, call);
                    }
                    if args.quantise != Quantise::None as u32 {
                        let call = LowLatencyCombineManyFp8::call(args);
                        return stream.call(quantised_combine, grid, THREADS, within, call);
                    }
                    match dtype {
                        DType::F16 => {
                            stream.call(combine, grid, THREADS, within, LowLatencyCombineManyF16::call(args))
                        }
                        DType::F32 => {
                            stream.call(combine, grid, THREADS, within, LowLatencyCombineManyF32::call(args))
                        }
                        _ => {
                            stream.call(combine, grid, THREADS, within, LowLatencyCombineManyBf16::call(args))
                        }
                    }
                }
                (Arguments::Combine(args), None) if returns_while_summing(dtype, &args, grid) => {
                    let call = LowLatencyCombineSummed::call(args);
                    stream.call(summed_combine, grid, THREADS, within, call)
                }
                (Arguments::Combine(args), None) if args.quantise == Quantise::None as u32 => match dtype {
                    DType::F16 => {
                        stream.call(combine, grid, THREADS, within, LowLatencyCombineF16::call(args))
                    }
                    DType::F32 => {
                        stream.call(combine, grid, THREADS, within, LowLatencyCombineF32::call(args))
                    }
                    _ => stream.call(combine, grid, THREADS, within, LowLatencyCombineBf16::call(args)),
                },
                (Arguments::Combine(args), None) => {
                    stream.call(quantised_combine, grid, THREADS, within, LowLatencyCombineFp8::call(args))
                }
                (Arguments::Combine(args), Some(messages)) => {
                    let is_quantised = args.quantise != Quantise::None as u32;
                    let args = LowLatencyInternodeCombineArgs { combine: args, messages };
                    match dtype {
                        _ if is_quantised => {
                            let call = LowLatencyInternodeCombineFp8::call(args);
                            stream.call(quantised_combine, grid, THREADS, across, call)
                        }
                        DType::F16 => {
                            let call = LowLatencyInternodeCombineF16::call(args);
                            stream.call(combine, grid, THREADS, across, call)
                        }
                        DType::F32 => {
                            let call = LowLatencyInternodeCombineF32::call(args);
                            stream.call(combine, grid, THREADS, across, call)
                        }
                        _ => {
                            let call = LowLatencyInternodeCombineBf16::call(args);
                            stream.call(combine, grid, THREADS, across, call)
                        }
                    }
                }
            }
        }
    }

    /// Launches the kernel of a dispatch.
    ///
    /// # Safety
    /// All memory of the arguments is live until the stream has passed the kernel, and `messages`
    /// are those of their place.
    unsafe fn launch_dispatch(
        &self,
        stream: &Stream,
        operation: &Operation,
        args: LowLatencyDispatchArgs,
        messages: Option<LowLatencyMessages>,
        grid: u32,
    ) -> Result<()> {
        let Kernels { dispatch, batch_dispatch, packed_dispatch, mxfp8_dispatch, .. } = &self.kernels;
        let (is_mxfp8, is_many) = (args.quantise == Quantise::Mxfp8 as u32, self.is_many());
        // SAFETY: the caller keeps the memory. The number of nodes decides both the set of kernels
        // and whether the place has messages.
        unsafe {
            if let Some(messages) = messages {
                let (args, shared) = (
                    LowLatencyInternodeDispatchArgs { dispatch: args, messages },
                    LOW_LATENCY_INTERNODE_SHARED_BYTES,
                );
                if is_mxfp8 {
                    let call = LowLatencyInternodeDispatchMxfp8::call(args);
                    return stream.call(mxfp8_dispatch, grid, THREADS, shared, call);
                }
                return stream.call(dispatch, grid, THREADS, shared, LowLatencyInternodeDispatch::call(args));
            }
            let shared = low_latency_dispatch_shared_bytes(&args);
            let is_batch = is_batch(args.common.num_tokens, args.common.comm.num_ranks)
                && args.common.num_topk <= BATCH_TOPK;
            match (is_many, is_mxfp8) {
                (false, false) if operation.packs_scales => {
                    let call = LowLatencyDispatchScalePackets::call(args);
                    stream.call(packed_dispatch, grid, THREADS, shared, call)
                }
                (false, false) if is_batch => {
                    let shared = low_latency_dispatch_batch_shared_bytes(&args);
                    let call = LowLatencyDispatchBatch::call(args);
                    stream.call(batch_dispatch, grid, THREADS, shared, call)
                }
                (true, false) if is_batch => {
                    let shared = low_latency_dispatch_batch_shared_bytes(&args);
                    let call = LowLatencyDispatchManyBatch::call(args);
                    stream.call(batch_dispatch, grid, THREADS, shared, call)
                }
                (false, false) => {
                    stream.call(dispatch, grid, THREADS, shared, LowLatencyDispatch::call(args))
                }
                (false, true) => {
                    stream.call(mxfp8_dispatch, grid, THREADS, shared, LowLatencyDispatchMxfp8::call(args))
                }
                (true, false) => {
                    stream.call(dispatch, grid, THREADS, shared, LowLatencyDispatchMany::call(args))
                }
                (true, true) => stream.call(
                    mxfp8_dispatch,
                    grid,
                    THREADS,
                    shared,
                    LowLatencyDispatchManyMxfp8::call(args),
                ),
            }
        }
    }

    /// The same, of a dispatch that brings rows by expert.
    ///
    /// # Safety
    /// The same as of [`Buffer::launch_dispatch`].
    unsafe fn launch_dispatch_by_expert(
        &self,
        stream: &Stream,
        operation: &Operation,
        args: LowLatencyExpertDispatchArgs,
        messages: Option<LowLatencyMessages>,
        grid: u32,
    ) -> Result<()> {
        let (is_mxfp8, is_many) = (args.dispatch.quantise == Quantise::Mxfp8 as u32, self.is_many());
        let packs_scales = messages.is_none() && operation.packs_scales;
        let kernel = match &self.kernels {
            Kernels { packed_dispatch_by_expert, .. } if packs_scales => packed_dispatch_by_expert,
            Kernels { mxfp8_dispatch_by_expert, .. } if is_mxfp8 => mxfp8_dispatch_by_expert,
            Kernels { dispatch_by_expert, .. } => dispatch_by_expert,
        };
        let Some(kernel) = kernel else {
            let rule = "the buffer has no kernel for them: create it with Options::rows_by_expert";
            return Err(Error::argument("by_expert", "asked for", rule));
        };
        // SAFETY: as in `launch_dispatch`.
        unsafe {
            if let Some(messages) = messages {
                let dispatch = LowLatencyInternodeDispatchArgs { dispatch: args.dispatch, messages };
                let args = LowLatencyInternodeExpertDispatchArgs { dispatch, to: args.to };
                let shared = low_latency_internode_by_expert_shared_bytes(&args);
                if is_mxfp8 {
                    let call = LowLatencyInternodeDispatchByExpertMxfp8::call(args);
                    return stream.call(kernel, grid, THREADS, shared, call);
                }
                let call = LowLatencyInternodeDispatchByExpert::call(args);
                return stream.call(kernel, grid, THREADS, shared, call);
            }
            let shared = low_latency_by_expert_shared_bytes(&args);
            match (is_many, is_mxfp8) {
                (false, false) if packs_scales => {
                    let call = LowLatencyDispatchByExpertScalePackets::call(args);
                    stream.call(kernel, grid, THREADS, shared, call)
                }
                (false, false) => {
                    stream.call(kernel, grid, THREADS, shared, LowLatencyDispatchByExpert::call(args))
                }
                (false, true) => {
                    stream.call(kernel, grid, THREADS, shared, LowLatencyDispatchByExpertMxfp8::call(args))
                }
                (true, false) => {
                    stream.call(kernel, grid, THREADS, shared, LowLatencyDispatchManyByExpert::call(args))
                }
                (true, true) => stream.call(
                    kernel,
                    grid,
                    THREADS,
                    shared,
                    LowLatencyDispatchManyByExpertMxfp8::call(args),
                ),
            }
        }
    }
}
