//! Combine: every token's owner sums the returned rows.

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use epoxide_gpu::kernels::{CombineStagedBf16, JOINED_BYTES, PROGRESS_BYTES};
use epoxide_gpu::layout::{
    Call, CallKind, CombineArgs, DevicePtr, ExpertCombineArgs, ExpertStageArgs, InternodeCombineArgs,
    InternodeExpertCombineArgs, StageArgs, StagedCombineArgs, combine_slot_bytes,
};

use super::halves::{CombineOutputs, Pending, Second, Waits};
use super::handle::HandleState;
use super::kernels::{RingShape, Spread};
use super::place::PoolRows;
use super::{Buffer, DType, DispatchHandle, StreamOrder, Tensor, TypedTensor};
use super::{RowBytes, blocks_for, check_fits};
use crate::driver::{Event, Stream};
use crate::ep::core::{Halves, Uses, check_timeout, setters};
use crate::ep::tensor::Owner;
use crate::error::{Error, Result};

/// Threads per block of the copy into the pool.
pub(super) const STAGE_THREADS: u32 = 512;
/// Threads per block of a combine that copies meanwhile.
const STAGED_THREADS: u32 = CombineStagedBf16::INFO.max_threads;

/// The location of the rows that this rank returns, in `recv_x` order. Within one node the same on
/// every rank.
#[derive(Debug, Clone, Copy)]
pub enum CombineRows<'a> {
    /// Any tensor `[num_recv_tokens, hidden]`, bf16, f16 or f32, `recv_x` itself included: copied
    /// into the pool, on multiprocessors that the configuration leaves. Within one node peers
    /// gather rows that have been copied while others are being copied. Across nodes, and if rows
    /// are f16, they gather after the last copy.
    ///
    /// Where the host does not know the number of received rows, the tensor may have fewer rows
    /// than the room. It must have all received rows. Otherwise the buffer fails
    /// ([`Error::Broken`]), on its peers too.
    Tensor(&'a Tensor<'a>),
    /// Rows that are in the place already that the dispatch was given: nothing is copied.
    InPool(&'a PoolRows<'a>),
}

impl<'a> From<&'a Tensor<'a>> for CombineRows<'a> {
    fn from(tensor: &'a Tensor<'a>) -> Self {
        CombineRows::Tensor(tensor)
    }
}

impl<'a> From<&'a PoolRows<'a>> for CombineRows<'a> {
    fn from(rows: &'a PoolRows<'a>) -> Self {
        CombineRows::InPool(rows)
    }
}

/// Arguments of [`Buffer::combine`].
#[derive(Debug, Clone, Copy)]
pub struct CombineRequest<'a> {
    rows: CombineRows<'a>,
    topk_weights: Option<&'a TypedTensor<'a, f32>>,
    weights: Option<&'a TypedTensor<'a, f32>>,
    handle: &'a DispatchHandle,
    cumulative_wait_ns: Option<&'a TypedTensor<'a, i64>>,
    num_sms: Option<u32>,
    timeout: Option<Duration>,
}

impl<'a> CombineRequest<'a> {
    /// Returns `rows` for the rows that the dispatch of `handle` received. The experts' weighting,
    /// if any, is already in them: combine sums unweighted. Padding of rows by expert may hold
    /// anything, and is not read.
    pub fn new(rows: impl Into<CombineRows<'a>>, handle: &'a DispatchHandle) -> Self {
        CombineRequest {
            rows: rows.into(),
            topk_weights: None,
            weights: None,
            handle,
            cumulative_wait_ns: None,
            num_sms: None,
            timeout: None,
        }
    }

    setters! {
        /// Weights the rows by expert of this rank's own tokens: that of entry k of token t counts
        /// `weights[t][k]` times, `[num_tokens, num_topk]`. The product is rounded to FP32, and so
        /// is each sum. Within a node each rank decides for itself: the sums of a rank that gives
        /// none are unweighted.
        ///
        /// Across nodes these are the weights that the dispatch was given
        /// ([`DispatchRequest::topk_weights`](super::DispatchRequest::topk_weights)), as they were
        /// then: other nodes sum, and have them from there. Give the same tensor there, on every
        /// rank or on none: else the call is [`Error::OtherCall`].
        weights: &'a TypedTensor<'a, f32>;
        /// Adds the nanoseconds that this rank waited for each rank to these, i64 `[num_ranks]`, as
        /// a dispatch does
        /// ([`DispatchRequest::cumulative_wait_ns`](super::DispatchRequest::cumulative_wait_ns)):
        /// until the rank has entered the combine and, once this rank has its sums, until that rank
        /// has gathered what it needs from here. While a tensor is copied into the pool, waits for
        /// rows of the peers' tensors are not in it.
        cumulative_wait_ns: &'a TypedTensor<'a, i64>;
        /// Most multiprocessors of the call, those that copy rows into the pool included: even, at
        /// least 2. Within a node each rank decides for itself, and a handle of any dispatch will
        /// do. Across nodes it is that of the dispatch, which a call along its handle has anyway.
        ///
        /// Without it, [`Config::num_sms`](super::Config) gather, and copies take those that are
        /// left.
        num_sms: u32;
        /// Longest wait for a peer, instead of the buffer's.
        timeout: Duration;
        /// Sums these weights `[num_recv_tokens, num_topk]` the same way; usually
        /// `recv_topk_weights`.
        topk_weights: &'a TypedTensor<'a, f32>;
    }
}

/// The result of a combine, in memory of its own.
#[derive(Debug)]
#[non_exhaustive]
pub struct Combined {
    /// `[num_tokens, hidden]`, dtype of the rows: the sum over the token's destination ranks. It is
    /// accumulated in FP32 in rank order and rounded once, and so bit for bit reproducible. A token
    /// without a destination has 0. Across nodes each node's sum is made and rounded so. The nodes'
    /// sums are then added in FP32 in node order and rounded again. A sum beyond the largest f16 is
    /// infinite. For rows by expert it is the sum over the token's entries, in their order, and
    /// across nodes each node sums the entries of its experts.
    pub combined_x: Tensor<'static>,
    /// `[num_tokens, num_topk]`, if weights were given.
    pub combined_topk_weights: Option<TypedTensor<'static, f32>>,
    /// Where an asynchronous call ends.
    pub event: Option<Event>,
}

/// A combine that is ready to be launched.
#[derive(Debug)]
pub(super) struct CombineLaunch {
    pub handle: Arc<HandleState>,
    dtype: DType,
    /// Sums of rows in the pool, whether stored or copied there by an earlier kernel.
    args: CombineArgs,
    stage: StageArgs,
    /// Whether the device compares the tensors' rows with the received rows.
    may_be_short: bool,
    /// The combine that copies rows meanwhile, and its blocks that gather.
    staged: Option<(StagedCombineArgs, u32)>,
    ring: RingShape,
    num_sms: u32,
    /// Blocks of an earlier kernel that copies rows, if any.
    copiers: u32,
    /// The weights of entries, at a null address where a rank without tokens has them there.
    entry_weights: Option<DevicePtr>,
    waits: Waits,
    uses: Uses,
}

/// The type and the sizes of a combine's sums.
#[derive(Debug, Clone, Copy)]
struct Sums {
    dtype: DType,
    tokens: u64,
    hidden: u64,
    /// Entries of each token whose weights are summed; 0 for none.
    num_topk: u32,
}

impl Sums {
    /// Bytes of a row, as [`Buffer::check_combine`] has found them to fit.
    fn row_bytes(&self) -> u32 {
        (self.hidden * self.dtype.size()) as u32
    }
}

impl Buffer {
    /// Returns the rows to the owners of their tokens and sums them. Collective; the host does not
    /// wait.
    ///
    /// # Errors
    /// Arguments that break a rule; [`Error::StaleHandle`] where the handle is of another buffer;
    /// [`Error::PeerTimeout`] of an earlier operation. A timeout of this one shows in
    /// [`Buffer::check`].
    pub fn combine(&mut self, request: CombineRequest<'_>, order: StreamOrder<'_>) -> Result<Combined> {
        let capturing = self.core.begin(order)?;
        let (launch, combined) = self.prepare_combine(&request, Halves::Both)?;
        let event = self.launch_combine(&launch, Halves::Both, order, capturing)?;
        Ok(Combined { event, ..combined })
    }

    /// The first half of [`Buffer::combine`]: copies a tensor's rows into the pool, and publishes
    /// that the rows are there. It waits for no peer. The second, [`Pending::receive`], gathers the
    /// peers' rows and sums; no multiprocessor is held in between. Collective.
    ///
    /// Rows in the pool must not be written before the second half has ended, since peers read
    /// them. A tensor is free once the first half has ended. If rows are a tensor, all ranks of a
    /// node call the halves or none does, else they get [`Error::OtherCall`]; with a tensor of f16,
    /// rows by expert or rows in the pool, each rank decides for itself. Across nodes, too, the
    /// first half ends when the rows are in the pool; the second uses the network.
    ///
    /// # Errors
    /// The same as [`Buffer::combine`].
    pub fn combine_send(
        &mut self,
        request: CombineRequest<'_>,
        order: StreamOrder<'_>,
    ) -> Result<Pending<'_, Combined>> {
        let capturing = self.core.begin(order)?;
        let (launch, combined) = self.prepare_combine(&request, Halves::Send)?;
        self.launch_combine(&launch, Halves::Send, order, capturing)?;
        Ok(self.pending(Second::Combine(Box::new(launch)), combined))
    }

    fn prepare_combine(
        &self,
        request: &CombineRequest<'_>,
        halves: Halves,
    ) -> Result<(CombineLaunch, Combined)> {
        let sums = self.check_combine(request)?;
        let Sums { dtype, tokens, hidden, num_topk } = sums;
        let (block, at) = self.core.arena().take(|pieces| {
            let x = pieces.array("combined_x", tokens, sums.row_bytes().into());
            (x, pieces.array("combined_weights", tokens * u64::from(num_topk), 4))
        })?;
        let launch = self.combine_launch(request, halves, sums, at, vec![block.clone() as Owner].into())?;
        let handle = &request.handle.0;
        let weights = || {
            TypedTensor::in_memory(at.1, &[tokens, num_topk.into()], block.clone())
                .result("combined_topk_weights", handle)
        };
        let combined = Combined {
            combined_x: Tensor::in_memory(at.0, dtype, &[tokens, hidden], block.clone())
                .result("combined_x", handle),
            combined_topk_weights: request.topk_weights.map(|_| weights()),
            event: None,
        };
        Ok((launch, combined))
    }

    /// [`Buffer::combine`] with the sums in tensors of the caller, with the values of the fields of
    /// [`Combined`]: `out` `[num_tokens, hidden]`, dtype of the rows, and `out_topk_weights`
    /// `[num_tokens, num_topk]` where the request has
    /// [`topk_weights`](CombineRequest::topk_weights). The receiving rank's kernel writes there;
    /// nothing needs to be registered, and nothing is copied or allocated. Returns the event of an
    /// asynchronous call. Collective, as [`Buffer::combine`]; each rank decides for itself which of
    /// the two it calls.
    ///
    /// Reading them on the host gives the error of the combine, if it has failed, until
    /// [`Tensor::write`] fills them.
    ///
    /// # Errors
    /// The same as [`Buffer::combine`]. [`Error::DType`], [`Error::Shape`] and [`Error::Argument`]
    /// where a tensor breaks a rule, shares memory with an input, is missing or superfluous.
    pub fn combine_into(
        &mut self,
        request: CombineRequest<'_>,
        out: &Tensor<'_>,
        out_topk_weights: Option<&TypedTensor<'_, f32>>,
        order: StreamOrder<'_>,
    ) -> Result<Option<Event>> {
        let capturing = self.core.begin(order)?;
        let launch = self.prepare_combine_into(&request, (out, out_topk_weights), Halves::Both)?;
        self.launch_combine(&launch, Halves::Both, order, capturing)
    }

    /// The first half of [`Buffer::combine_into`], as [`Buffer::combine_send`]. Collective.
    ///
    /// # Errors
    /// The same as [`Buffer::combine_into`].
    pub fn combine_send_into<'b, 'o>(
        &'b mut self,
        request: CombineRequest<'_>,
        out: &'o Tensor<'o>,
        out_topk_weights: Option<&'o TypedTensor<'o, f32>>,
        order: StreamOrder<'_>,
    ) -> Result<Pending<'b, CombineOutputs<'o>>> {
        let capturing = self.core.begin(order)?;
        let launch = self.prepare_combine_into(&request, (out, out_topk_weights), Halves::Send)?;
        self.launch_combine(&launch, Halves::Send, order, capturing)?;
        Ok(self.pending(Second::Combine(Box::new(launch)), CombineOutputs { borrowed: PhantomData }))
    }

    fn prepare_combine_into(
        &self,
        request: &CombineRequest<'_>,
        (out, out_topk_weights): (&Tensor<'_>, Option<&TypedTensor<'_, f32>>),
        halves: Halves,
    ) -> Result<CombineLaunch> {
        let sums = self.check_combine(request)?;
        let tokens = ("num_tokens", Some(sums.tokens));
        out.expect("out", &[sums.dtype], &[tokens, ("hidden", Some(sums.hidden))])?;
        out.expect_rows_of_16("out")?;
        match (out_topk_weights, request.topk_weights) {
            (None, None) => {}
            (Some(given), Some(_)) => {
                let dims = [tokens, ("num_topk", Some(sums.num_topk.into()))];
                given.expect("out_topk_weights", &[DType::F32], &dims)?;
            }
            (None, Some(_)) => {
                let rule =
                    format!("the request has topk_weights: give f32 [{}, {}]", sums.tokens, sums.num_topk);
                return Err(Error::argument("out_topk_weights", "none", rule));
            }
            (Some(_), None) => {
                let rule = "the request has no topk_weights to sum: leave them out";
                return Err(Error::argument("out_topk_weights", "given", rule));
            }
        }
        if let Some(weights) = out_topk_weights {
            weights.expect_apart("out_topk_weights", out, "out")?;
        }
        let outs = [("out", Some(out)), ("out_topk_weights", out_topk_weights.map(|it| &**it))];
        let rows = match request.rows {
            CombineRows::Tensor(x) => x,
            CombineRows::InPool(given) => given.tensor(),
        };
        let inputs = [("rows", Some(rows)), ("topk_weights", request.topk_weights.map(|it| &**it))];
        let inputs = inputs.into_iter().chain([("weights", request.weights.map(|it| &**it))]);
        for (other, read) in inputs {
            for (name, out) in outs {
                let pair = out.zip(read);
                pair.map_or(Ok(()), |(out, read)| out.expect_apart(name, read, other))?;
            }
        }
        let at = (out.ptr(), out_topk_weights.map_or(DevicePtr::NULL, |weights| weights.ptr()));
        let mut uses = Uses::from(self.core.owners(outs)?);
        outs.into_iter().filter_map(|(_, out)| out).for_each(|out| uses.fills_last(out, &request.handle.0));
        self.combine_launch(request, halves, sums, at, uses)
    }

    /// Checks the arguments of a combine; gives the type and the sizes of its sums.
    fn check_combine(&self, request: &CombineRequest<'_>) -> Result<Sums> {
        let handle = &request.handle.0;
        self.check_handle(request.handle)?;
        self.check_weights(request)?;
        self.sms_along(request.handle, request.num_sms)?;
        let received = handle.num_recv_tokens.get().map(|&rows| rows as u64);
        let dtypes = &[DType::Bf16, DType::F32, DType::F16];
        let (dtype, hidden) = match request.rows {
            CombineRows::InPool(given) => {
                self.core.check_place(&given.place)?;
                if given.place.index() != handle.place {
                    let rule =
                        format!("the dispatch went to place {}: take that one's combine rows", handle.place);
                    return Err(Error::argument(
                        "rows",
                        format!("rows of place {}", given.place.index()),
                        rule,
                    ));
                }
                let dims = [("num_recv_tokens", received), ("hidden", None)];
                given.tensor().expect_strided("rows", dtypes, &dims)?;
                (given.tensor().dtype(), given.tensor().columns())
            }
            CombineRows::Tensor(x) => {
                self.core.places()[handle.place as usize].check_rows_free()?;
                let dims = [("num_recv_tokens", received), ("hidden", None)];
                x.expect_strided("x", dtypes, &dims)?;
                x.expect_rows_of_16("x")?;
                (x.dtype(), x.columns())
            }
        };
        let row_bytes = hidden * dtype.size();
        if row_bytes == 0 || row_bytes % 16 != 0 {
            let rule = "hidden * element size must be a positive multiple of 16 bytes";
            return Err(Error::argument("hidden", format!("{hidden} x {dtype}"), rule));
        }
        self.check_row_capacity(row_bytes)?;
        let num_topk = match request.topk_weights {
            None => 0,
            Some(weights) => {
                let topk = handle.num_topk.map(u64::from);
                weights.expect(
                    "topk_weights",
                    &[DType::F32],
                    &[("num_recv_tokens", received), ("num_topk", topk)],
                )?;
                let have = self.options.shape.max_topk as u64;
                check_fits(("num_topk", "entries"), weights.columns(), have, "max_topk")?;
                weights.columns() as u32
            }
        };
        Ok(Sums { dtype, tokens: handle.num_tokens.into(), hidden, num_topk })
    }

    /// A combine that stores its sums and those of weights at the given addresses, in memory that
    /// `outputs` own. In two halves it copies a tensor's rows before it sums.
    fn combine_launch(
        &self,
        request: &CombineRequest<'_>,
        halves: Halves,
        sums: Sums,
        (x_at, weights_at): (DevicePtr, DevicePtr),
        mut uses: Uses,
    ) -> Result<CombineLaunch> {
        let handle = &request.handle.0;
        let num_sms = self.sms_along(request.handle, request.num_sms)?;
        check_timeout(request.timeout)?;
        let Sums { dtype, num_topk, .. } = sums;
        let row_bytes = sums.row_bytes();
        let received = handle.num_recv_tokens.get().map(|&rows| rows as u64);
        let by_expert = handle.tables.by_expert;
        let pool = self.core.pool().ptr();
        let in_tensor = if let CombineRows::Tensor(x) = request.rows { Some(x) } else { None };
        let is_plain = self.core.topology().nodes == 1 && by_expert.is_none();
        let is_staged = in_tensor.is_some() && is_plain && dtype != DType::F16 && halves == Halves::Both;
        let kind = match (dtype, is_staged) {
            (DType::F16, _) => CallKind::CombineF16,
            (DType::F32, true) => CallKind::CombineStagedF32,
            (DType::F32, false) => CallKind::CombineF32,
            (_, true) => CallKind::CombineStagedBf16,
            (_, false) => CallKind::CombineBf16,
        };
        // Rows by expert have no weights to sum. Across nodes a rank applies the weights of others'
        // tokens, so all ranks give some or none does.
        let weighs_others = request.weights.is_some() && self.core.topology().nodes > 1;
        let columns = if by_expert.is_some() { weighs_others.into() } else { num_topk };
        let call = Call { kind, place: handle.place, row_bytes, columns };
        let comm = self.comm_in(&self.core.places()[handle.place as usize], call, request.timeout);
        let null = DevicePtr::NULL;
        let weights = request.topk_weights.map(|weights| &**weights);
        let rows = match request.rows {
            CombineRows::InPool(given) => given.tensor().rows(),
            CombineRows::Tensor(x) => x.rows(),
        };
        // The device compares the number of rows with the received rows if the host has no count.
        let may_be_short = received.is_none() && rows < handle.capacity;
        let given = weights.map_or(rows, |weights| weights.rows().min(rows));
        let stage = StageArgs {
            comm,
            x: in_tensor.map_or(null, Tensor::ptr),
            x_stride: in_tensor.map_or(0, Tensor::row_stride),
            rows: pool.add(comm.pool.combine_x),
            weights: weights.map_or(null, Tensor::ptr),
            weight_rows: pool.add(comm.pool.combine_weights),
            header: handle.tables.header,
            num_rows: given.min(comm.pool.rows),
            row_bytes,
            num_topk,
            is_for_peers: 1,
            reserved: 0,
        };
        // Where the call has a bound, half of its blocks copy and half gather.
        let stagers = request.num_sms.filter(|_| is_staged).map(|num_sms| num_sms / 2);
        let gatherers = stagers.unwrap_or(num_sms);
        let ring = self.kernels.combine_ring(row_bytes, gatherers, is_staged);
        let args = CombineArgs {
            comm,
            combined_x: x_at,
            // Null means no weights, and a rank without tokens may give a null tensor. Such a rank
            // sums the weights of relayed tokens, and stores none here.
            combined_weights: match (num_topk, weights_at) {
                (0, _) => null,
                (_, DevicePtr::NULL) => handle.tables.header,
                (_, at) => at,
            },
            send_row: match handle.tables.routing {
                Spread::OneNode(_, tables) => tables.send_row,
                Spread::SeveralNodes(_, tables) => {
                    tables.by_expert.map_or(null, |_| tables.route.forward_row)
                }
            },
            header: handle.tables.header,
            num_tokens: handle.num_tokens,
            row_bytes,
            num_topk,
            slots: ring.count,
            slot_bytes: ring.bytes,
            pieces: row_bytes.div_ceil(ring.bytes),
            spoils: self.options.nan_on_failure.into(),
            reserved: 0,
        };
        let staged = match &handle.tables.routing {
            Spread::OneNode(_, tables) if is_staged => {
                let ranks = self.core.topology().ranks_per_node;
                let channels = handle.num_channels;
                let shape = self.kernels.stage_shape(stagers, ranks, channels, gatherers, row_bytes);
                let args = StagedCombineArgs {
                    combine: args,
                    x: stage.x,
                    x_stride: stage.x_stride,
                    weights: stage.weights,
                    rank_prefix_matrix: tables.rank_prefix_matrix,
                    channel_prefix_matrix: tables.channel_prefix_matrix,
                    recv_channel_prefix_matrix: tables.recv_channel_prefix_matrix,
                    num_rows: stage.num_rows as u32,
                    stagers: shape.stagers,
                    channels,
                    blocks_per_channel: shape.blocks_per_channel,
                    step_rows: shape.step_rows,
                    gather_warps: ring.warps,
                    parts: shape.parts as u64,
                };
                Some((args, shape.gatherers))
            }
            _ => None,
        };
        let entry_weights = request.weights.map(|weights| &**weights);
        let inputs = [("x", in_tensor), ("topk_weights", weights), ("weights", entry_weights)];
        uses.extend(self.core.owners(inputs)?);
        uses.push(handle.block.clone() as Owner);
        let waited = self.wait_ns(request.cumulative_wait_ns, &mut uses)?;
        Ok(CombineLaunch {
            handle: handle.clone(),
            dtype,
            args,
            stage,
            may_be_short,
            staged,
            ring,
            num_sms,
            copiers: request.num_sms.unwrap_or(self.core.device().info().sm_count),
            entry_weights: entry_weights.map(Tensor::ptr),
            waits: Waits { comm, waited, is_combine: true },
            uses,
        })
    }

    /// Launches halves of a combine. `capturing`: what
    /// [`Core::begin`](crate::ep::core::Core::begin) returned.
    pub(super) fn launch_combine(
        &mut self,
        launch: &CombineLaunch,
        halves: Halves,
        order: StreamOrder<'_>,
        capturing: bool,
    ) -> Result<Option<Event>> {
        let named = Some(("combine", halves));
        let event = self.run(order, capturing, named, &launch.uses, |buffer, stream| {
            let row_bytes = launch.args.row_bytes.into();
            buffer.describe_rows(RowBytes { combine: row_bytes, ..buffer.row_bytes });
            if !launch.stage.x.is_null() {
                let place = buffer.core.places()[launch.handle.place as usize].clone();
                if halves != Halves::Receive && !capturing {
                    place.order_behind_rows(stream)?;
                }
                buffer.core.overwrites(place);
            }
            // SAFETY: the memory of inputs, outputs and the handle's block is freed only behind all
            // work enqueued on streams, and a recording keeps them. The last combine ended when
            // every peer had gathered, so the rows may be written.
            unsafe {
                if halves != Halves::Receive {
                    buffer.stage_rows(stream, launch)?;
                }
                let header = launch.handle.tables.header;
                if halves == Halves::Send {
                    // Peers are waited for behind it.
                    let waits = Waits { waited: None, ..launch.waits };
                    return buffer.enter(stream, &waits, header, false);
                }
                if launch.waits.waited.is_none() {
                    return buffer.sum_rows(stream, launch);
                }
                buffer.enter(stream, &launch.waits, header, true)?;
                let summed = buffer.sum_rows(stream, launch);
                let ended = summed.and_then(|()| buffer.end(stream, &launch.waits, launch.args));
                if let (Err(error), false) = (&ended, capturing) {
                    buffer.core.give_up("combine", error);
                }
                ended
            }
        })?;
        Ok(event.map(|event| event.of(launch.handle.clone())))
    }

    /// Enqueues the copy of a tensor's rows into the pool and the check of their number, unless the
    /// summing kernel does both.
    ///
    /// # Safety
    /// The addresses of the launch are live until the stream has passed the kernel, and no peer
    /// reads combine rows.
    unsafe fn stage_rows(&self, stream: &Stream, launch: &CombineLaunch) -> Result<()> {
        let (stage, handle) = (launch.stage, &launch.handle);
        if launch.staged.is_some() {
            return Ok(());
        }
        // SAFETY: the caller keeps the memory.
        unsafe {
            if let Some(at) = handle.tables.by_expert {
                if stage.x.is_null() && !launch.may_be_short {
                    return Ok(());
                }
                let kernel = &self.kernels.stage_by_expert;
                let args = ExpertStageArgs {
                    stage,
                    expert_counts: at.expert_counts,
                    expert_starts: at.expert_starts,
                    local_experts: handle.local_experts.into(),
                };
                return kernel.call(stream, launch.copiers, STAGE_THREADS, 0, args);
            }
            if stage.x.is_null() && stage.weights.is_null() && !launch.may_be_short {
                return Ok(());
            }
            self.kernels.stage_combine.call(stream, launch.copiers, STAGE_THREADS, 0, stage)
        }
    }

    /// Enqueues the kernel that sums.
    ///
    /// # Safety
    /// The same as of [`Buffer::stage_rows`], behind which it runs.
    unsafe fn sum_rows(&mut self, stream: &Stream, launch: &CombineLaunch) -> Result<()> {
        let CombineLaunch { handle, dtype, staged, ring, num_sms, entry_weights, .. } = launch;
        let (dtype, mut args, by_expert) = (*dtype, launch.args, handle.tables.by_expert);
        // Rows are copied by as many threads as the kernel can have, even if few gather.
        let (blocks, threads, reserved) = match (&handle.tables.routing, staged) {
            (_, Some((staged, gatherers))) => (staged.stagers + gatherers, STAGED_THREADS, JOINED_BYTES),
            (Spread::OneNode(..), None) => {
                (blocks_for(handle.num_tokens, *num_sms), ring.threads(), JOINED_BYTES)
            }
            // One more warp posts puts.
            (Spread::SeveralNodes(..), None) => (*num_sms, ring.threads() + 32, PROGRESS_BYTES),
        };
        let shared = ring.shared_bytes() + reserved;
        args.comm.trace = self.core.trace("combine", blocks);
        // SAFETY: the caller keeps the memory.
        unsafe {
            match (&handle.tables.routing, by_expert, staged) {
                (Spread::OneNode(node, _), Some(at), _) => {
                    let args = ExpertCombineArgs {
                        combine: args,
                        weights: entry_weights.unwrap_or(DevicePtr::NULL),
                        num_topk: at.num_topk.into(),
                    };
                    node.by_expert.combine.of(dtype).call(stream, blocks, threads, shared, args)
                }
                (Spread::OneNode(node, _), None, Some((staged, _))) => {
                    let args = StagedCombineArgs { combine: args, ..*staged };
                    let is_f32 = dtype == DType::F32;
                    let kernel = if is_f32 { &node.combine_staged_f32 } else { &node.combine_staged };
                    kernel.call(stream, blocks, threads, shared, args)
                }
                (Spread::OneNode(node, _), None, None) => {
                    node.combine.of(dtype).call(stream, blocks, threads, shared, args)
                }
                (Spread::SeveralNodes(nodes, routing), ..) => {
                    let args = InternodeCombineArgs {
                        combine: args,
                        wire: self.wire(),
                        route: routing.route,
                        slot_bytes: combine_slot_bytes(args.row_bytes, args.num_topk),
                        reserved: 0,
                    };
                    let (Some(at), Some(tables)) = (by_expert, routing.by_expert) else {
                        return nodes.combine.of(dtype).call(stream, blocks, threads, shared, args);
                    };
                    let args = InternodeExpertCombineArgs {
                        rows: args,
                        weights: entry_weights.map_or(DevicePtr::NULL, |_| tables.forward_weights),
                        num_topk: at.num_topk.into(),
                    };
                    nodes.by_expert.combine.of(dtype).call(stream, blocks, threads, shared, args)
                }
            }
        }
    }

    /// An error unless weights are given where rows have them.
    fn check_weights(&self, request: &CombineRequest<'_>) -> Result<()> {
        let handle = &request.handle.0;
        match (handle.tables.by_expert, request.weights) {
            (None, Some(_)) => {
                let rule =
                    "only rows by expert are weighted here: dispatch with by_expert, or weight rows before";
                Err(Error::argument("weights", "given", rule))
            }
            (Some(_), _) if request.topk_weights.is_some() => {
                let rule = "rows by expert have no weights to sum: leave topk_weights out";
                Err(Error::argument("topk_weights", "given", rule))
            }
            (Some(at), Some(weights)) => {
                let tokens = ("num_tokens", Some(handle.num_tokens.into()));
                weights.expect(
                    "weights",
                    &[DType::F32],
                    &[tokens, ("num_topk", Some(at.num_topk.into()))],
                )?;
                if self.core.topology().nodes > 1 && weights.ptr() != handle.topk_weights {
                    let rule = "across nodes they travel with the dispatch: give the tensor that it was given as topk_weights";
                    return Err(Error::argument("weights", "another tensor", rule));
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}
