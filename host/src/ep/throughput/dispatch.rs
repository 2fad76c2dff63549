//! Dispatch: sends rows to the ranks that hold their experts.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use epoxide_gpu::kernels::{
    COPY_STAGES, JOINED_BYTES, PLAN_BY_EXPERT_SHARED_BYTES, PROGRESS_BYTES, copy_rings_behind,
    number_shared_bytes,
};
use epoxide_gpu::layout::{
    CACHED_DTYPE, COLUMNS_BY_EXPERT, Call, CallKind, Comm, DevicePtr, DispatchArgs, ExpertDispatchArgs,
    ExpertPlanArgs, ExpertRoute, InternodeCountArgs, InternodeDispatchArgs, InternodeExpertDispatchArgs,
    InternodeExpertPlanArgs, InternodeNotifyArgs, NotifyArgs, NumberArgs, PlanHeader, SlotShape, ring_bytes,
};

use super::halves::{AddedCounts, Copies, DispatchEnd, Pending, Waits};
use super::handle::{DispatchHandle, HandleShape, HandleState, HandleTables};
use super::kernels::{RingShape, Spread};
use super::place::{Place, Room};
use super::quantise::Source;
use super::received::Received;
use super::{Buffer, DType, DispatchLayout, StreamOrder, Tensor, TypedTensor};
use super::{HOST_EXPERTS, RowBytes, blocks_for, check_fits};
use crate::driver::{Event, Outcome, Stream};
use crate::ep::core::{
    CUMULATIVE_COUNTS, Halves, Lease, PlaceState, Uses, check_cumulative, check_timeout, setters,
};
use crate::ep::experts::check_alignment;
use crate::ep::payload::{Columns, PlacedColumn, Record};
use crate::ep::tensor::Owner;
use crate::ep::{Payload, Quantise};
use crate::error::{Error, Result};

/// Threads per block of the kernels that count tokens, number selections and plan rows by expert.
pub(super) const PLAN_THREADS: u32 = 512;
/// Types of elements that rows can have.
pub(super) const ROWS: [DType; 9] = [
    DType::Bf16,
    DType::F32,
    DType::Fp8E4m3,
    DType::I32,
    DType::F16,
    DType::Fp8E5m2,
    DType::Ue8m0,
    DType::Fp4E2m1x2,
    DType::U8,
];

/// Whether the host waits for the counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counts {
    /// The host waits, and outputs have exactly as many rows as were received.
    Exact,
    /// The host does not wait: outputs have `capacity` rows, the count stays on the device. Can be
    /// captured in a graph. The same on every rank; a dispatch that needs more rows moves none, on
    /// any rank. Wherever the plan of a dispatch fails, its counts on the device are zeros.
    OnDevice {
        /// Rows of the outputs, at most [`Buffer::capacity`].
        capacity: u64,
    },
}

/// Arguments of [`Buffer::dispatch`].
#[derive(Debug, Clone, Copy)]
pub struct DispatchRequest<'a> {
    x: &'a Tensor<'a>,
    scales: Option<&'a TypedTensor<'a, f32>>,
    columns: Columns<'a>,
    payload: Option<&'a Payload>,
    quantise: Quantise,
    topk_weights: Option<&'a TypedTensor<'a, f32>>,
    layout: &'a DispatchLayout<'a>,
    expert_alignment: Option<u32>,
    by_expert: Option<u32>,
    counts: Counts,
    cumulative_counts: Option<&'a TypedTensor<'a, i32>>,
    cumulative_wait_ns: Option<&'a TypedTensor<'a, i64>>,
    num_sms: Option<u32>,
    timeout: Option<Duration>,
}

impl<'a> DispatchRequest<'a> {
    /// Rows `x` to send, `[num_tokens, hidden]`, contiguous, of any dtype but i64 and bool, along the
    /// routing of `layout`. A row is a multiple of 16 bytes, below 16 MiB. Without scales, columns and
    /// top-k, alignment 1, exact counts.
    pub fn new(x: &'a Tensor<'a>, layout: &'a DispatchLayout<'a>) -> Self {
        DispatchRequest {
            x,
            scales: None,
            columns: Columns::default(),
            payload: None,
            quantise: Quantise::None,
            topk_weights: None,
            layout,
            expert_alignment: None,
            by_expert: None,
            counts: Counts::Exact,
            cumulative_counts: None,
            cumulative_wait_ns: None,
            num_sms: None,
            timeout: None,
        }
    }

    setters! {
        /// Sends scales `[num_tokens, num_scales]` (or `[num_tokens]`) with the rows; only with
        /// 1-byte elements.
        scales: &'a TypedTensor<'a, f32>;
        /// Checks that the given rows and columns are what this describes.
        payload: &'a Payload;
        /// Quantises bf16 rows on their way. Rows arrive as e4m3 with scales, like rows that were
        /// quantised before. The same on every rank, except that f32 scales may be powers of two on
        /// some, and that some may give rows that are quantised already.
        ///
        /// hidden must be a multiple of 128, with [`Quantise::Mxfp8`] of 32. The buffer needs room
        /// for the scales ([`Payload::max_scales`]); columns cannot be sent with them. A kernel
        /// before the sending one converts all rows, into memory of the buffer that the first such
        /// call allocates ([`Sizes::quantise_bytes`](crate::Sizes::quantise_bytes)).
        quantise: Quantise;
        /// Sends these weights `[num_tokens, num_topk]` with the rows, and the top-k ids that the
        /// layout was made of.
        topk_weights: &'a TypedTensor<'a, f32>;
        /// Rounds per-expert counts up to multiples of this; nothing else changes. At least 1. Rows
        /// by expert have an alignment of their own.
        expert_alignment: u32;
    }

    /// Sends one more column with the rows, `[num_tokens, n]` (or `[num_tokens]`), of any type of
    /// at most 4 bytes; up to four times. [`Received::recv_columns`] has them in the same order.
    /// The bytes are sent unchanged. Type and size of each are the same on every rank.
    ///
    /// The buffer needs room for them: [`Payload::max_scales`]. Several columns, and those whose
    /// bytes are no multiple of 4, are first copied together by a kernel.
    pub fn column(mut self, column: &'a Tensor<'a>) -> Self {
        self.columns.push(column);
        self
    }

    /// Brings rows by expert: one for each selection, grouped by local expert, each expert's
    /// segment at a multiple of `alignment` rows, a power of two. [`DispatchHandle::by_expert`]
    /// has the places of the segments. A token that selects an expert twice has two rows there. The
    /// sender writes a token's row once to each rank, and that rank copies it to the places of the
    /// token's other selections.
    ///
    /// The buffer needs [`Options::rows_by_expert`](super::Options::rows_by_expert).
    /// The same on every rank, but for the alignment.
    pub fn by_expert(mut self, alignment: u32) -> Self {
        self.by_expert = Some(alignment);
        self
    }

    setters! {
        /// Whether the host waits for the counts.
        counts: Counts;
        /// Adds the selections of each local expert to these, i32 `[local_experts]`, behind the
        /// dispatch, in the run before a recording, and in each replay. A dispatch that fails adds
        /// nothing. Counts are without rounding. Without rows by expert the alignment must be 1.
        cumulative_counts: &'a TypedTensor<'a, i32>;
        /// Adds the nanoseconds that this rank waited for each rank to this i64 `[num_ranks]`, by
        /// the device's `%globaltimer`. A slow rank or link stands out. This rank waits until the
        /// other has entered the dispatch and, after sending its own rows, until the other's rows
        /// have arrived. A wait is 0 for a rank that was in time, and for this one. The count
        /// exchange in between is not included. Each call, the run before a recording, and each
        /// replay add the time.
        ///
        /// Each rank decides for itself. A small kernel waits before those of the dispatch, and
        /// another one behind them; calls without this have neither. Within one node alone: across
        /// nodes rows are relayed.
        cumulative_wait_ns: &'a TypedTensor<'a, i64>;
        /// Most multiprocessors that move rows, instead of [`Config::num_sms`](super::Config):
        /// even, at least 2.
        ///
        /// Within a node each rank decides for itself. The count exchange before has a block for
        /// each channel of the configuration, on which ranks agree, regardless of this. Across
        /// nodes every rank must give the same number, else every rank gets [`Error::Mismatch`].
        /// There the dispatch and all calls along its handle have `num_sms / 2` channels.
        num_sms: u32;
        /// Longest wait for a peer, instead of the buffer's.
        timeout: Duration;
    }
}

/// Arguments of [`Buffer::dispatch_cached`].
#[derive(Debug, Clone, Copy)]
pub struct CachedDispatchRequest<'a> {
    x: &'a Tensor<'a>,
    scales: Option<&'a TypedTensor<'a, f32>>,
    columns: Columns<'a>,
    payload: Option<&'a Payload>,
    quantise: Quantise,
    handle: &'a DispatchHandle,
    cumulative_wait_ns: Option<&'a TypedTensor<'a, i64>>,
    num_sms: Option<u32>,
    timeout: Option<Duration>,
}

impl<'a> CachedDispatchRequest<'a> {
    /// Rows `x` to send, `[num_tokens, hidden]`, with the token count of `handle`, along its
    /// routing.
    pub fn new(x: &'a Tensor<'a>, handle: &'a DispatchHandle) -> Self {
        let columns = Columns::default();
        CachedDispatchRequest {
            x,
            scales: None,
            columns,
            payload: None,
            quantise: Quantise::None,
            handle,
            cumulative_wait_ns: None,
            num_sms: None,
            timeout: None,
        }
    }

    setters! {
        /// Longest wait for a peer, instead of the buffer's.
        timeout: Duration;
        /// Adds up how long this rank waited for each rank, as
        /// [`DispatchRequest::cumulative_wait_ns`].
        cumulative_wait_ns: &'a TypedTensor<'a, i64>;
        /// Most multiprocessors that move rows, with the rules of
        /// [`CombineRequest::num_sms`](super::CombineRequest::num_sms).
        num_sms: u32;
        /// Sends scales `[num_tokens, num_scales]` (or `[num_tokens]`) with the rows; only with
        /// 1-byte elements.
        scales: &'a TypedTensor<'a, f32>;
        /// Checks that the given rows and columns are what this describes.
        payload: &'a Payload;
        /// Quantises bf16 rows on their way, as [`DispatchRequest::quantise`].
        quantise: Quantise;
    }

    /// Sends one more column with the rows, as [`DispatchRequest::column`].
    pub fn column(mut self, column: &'a Tensor<'a>) -> Self {
        self.columns.push(column);
        self
    }
}

/// Rows, scales and columns of a request, and how rows are to be quantised.
type Given<'a> = (&'a Tensor<'a>, Option<&'a TypedTensor<'a, f32>>, Columns<'a>, Quantise);

/// Arguments of the count exchange of a dispatch.
struct CountExchange<'a> {
    layout: &'a DispatchLayout<'a>,
    capacity: u64,
    /// Entries of a token that are sent.
    num_topk: u32,
    is_weighted: bool,
    num_channels: u32,
    num_sms: u32,
    by_expert: bool,
    expert_alignment: u32,
    host: DevicePtr,
    tag: u64,
    timeout_ns: u64,
}

/// The metadata sent with rows.
#[derive(Debug, Clone, Copy, Default)]
struct Metadata {
    /// Null if no weights are sent, and so are the weights.
    topk_idx: DevicePtr,
    /// 1 where ids are i32.
    narrow_ids: u32,
    topk_weights: DevicePtr,
    num_topk: u32,
    local_experts: u32,
}

/// Rows and columns of a dispatch, checked, and its deadline, if not the buffer's.
pub(super) struct Checked {
    dtype: DType,
    hidden: u64,
    pub(super) row_bytes: u32,
    pub(super) x: DevicePtr,
    /// Columns sent with a row, or its scales.
    pub(super) record: Record,
    is_scales: bool,
    /// How the rows at `x` become those of `dtype`.
    pub(super) quantise: Quantise,
    timeout: Option<Duration>,
}

impl Checked {
    /// Words of a record: to the kernels, they are scales.
    pub(super) fn num_scales(&self) -> u32 {
        self.record.bytes / 4
    }

    /// Signature word 0 of a count message.
    fn row_signature(&self) -> u32 {
        self.record.fingerprint() << 24 | self.row_bytes | self.dtype.code()
    }
}

/// The begin of an operation on received rows: whether it is captured, their place and their
/// handle.
type Begun = (bool, Arc<PlaceState<Room>>, Arc<HandleState>);

impl Buffer {
    /// Sends every token's row to each rank that has one of its experts, into `place`, the one of
    /// the same index on every rank. Collective.
    ///
    /// # Errors
    /// On this rank alone: arguments that break a rule, and [`Error::PeerTimeout`] where a peer
    /// times out. On every rank, before any row moved: [`Error::Mismatch`],
    /// [`Error::InvalidExpert`], and [`Error::Capacity`] where a rank would receive too many rows;
    /// [`Error::scope`] distinguishes the two. With [`Counts::OnDevice`] the host does not wait for
    /// the counts. Then a host read of the results, or of the sums of their combines, returns these
    /// errors. For results that only kernels read, [`Buffer::check`] returns them.
    pub fn dispatch<'p>(
        &mut self,
        place: &'p mut Place,
        request: DispatchRequest<'_>,
        order: StreamOrder<'_>,
    ) -> Result<Received<'p>> {
        self.start_dispatch(place, request, order, Halves::Both).map(|(received, _)| received)
    }

    /// The first half of [`Buffer::dispatch`]: exchanges counts and sends rows. It waits until the
    /// peers have entered the dispatch, and not for their rows. The second, [`Pending::receive`],
    /// waits for the rows; no multiprocessor is held in between. With [`Counts::Exact`] the host
    /// waits for the counts in this call. Collective, as [`Buffer::dispatch`].
    ///
    /// Each rank decides for itself whether it calls the halves. Across nodes the first half relays
    /// rows as well, and so waits for the rows of other nodes that it relays.
    ///
    /// # Errors
    /// The same as [`Buffer::dispatch`].
    pub fn dispatch_send<'b, 'p>(
        &'b mut self,
        place: &'p mut Place,
        request: DispatchRequest<'_>,
        order: StreamOrder<'_>,
    ) -> Result<Pending<'b, Received<'p>>> {
        let (received, end) = self.start_dispatch(place, request, order, Halves::Send)?;
        Ok(self.pending_dispatch(end, received))
    }

    /// Launches a dispatch, or its first half; gives what the second one launches.
    fn start_dispatch<'p>(
        &mut self,
        place: &'p mut Place,
        request: DispatchRequest<'_>,
        order: StreamOrder<'_>,
        halves: Halves,
    ) -> Result<(Received<'p>, DispatchEnd)> {
        let capturing = self.core.begin(order)?;
        let place = place.0.place();
        self.core.check_place(place)?;
        let layout = request.layout;
        self.check_layout(layout)?;
        let DispatchRequest { x, scales, columns, payload, quantise, timeout, .. } = request;
        let given = (x, scales, columns, quantise);
        let payload = self.check_payload(given, payload, layout.num_tokens, timeout)?;
        let num_topk = self.check_topk(&request)?;
        let by_expert = request.by_expert.is_some();
        let expert_alignment = match (request.by_expert, request.expert_alignment) {
            (Some(_), Some(given)) => {
                let rule = "by_expert has the alignment of its segments and counts: give one of the two";
                return Err(Error::argument("expert_alignment", given, rule));
            }
            (by_expert, given) => by_expert.or(given).unwrap_or(1),
        };
        if by_expert {
            self.check_by_expert(expert_alignment)?;
            // Slots and records have room for each entry, with a weight or without.
            let most = self.options.shape.max_topk.into();
            check_fits(("num_topk", "entries"), layout.num_topk.into(), most, "max_topk")?;
        }
        if expert_alignment == 0 {
            return Err(Error::argument("expert_alignment", 0, "must be at least 1"));
        }
        let exact = request.counts == Counts::Exact;
        let capacity = match request.counts {
            Counts::Exact if capturing => {
                let rule = "the host cannot wait for a dispatch that is only recorded: leave the counts on the device";
                return Err(Error::argument("counts", "exact", rule));
            }
            Counts::Exact => self.capacity(),
            Counts::OnDevice { capacity } => capacity,
        };
        let option = "max_tokens * num_ranks";
        check_fits(("capacity", "rows"), capacity, self.capacity(), option)?;

        let local_experts = layout.num_experts / self.core.topology().ranks();
        check_cumulative(request.cumulative_counts, local_experts)?;
        if request.cumulative_counts.is_some() && !by_expert && expert_alignment > 1 {
            let rule = format!(
                "counts are rounded up to multiples of {expert_alignment}: dispatch with expert_alignment 1, or by expert"
            );
            return Err(Error::argument(CUMULATIVE_COUNTS, "given", rule));
        }
        let (num_sms, num_channels) = self.sms_of_dispatch(request.num_sms)?;
        let shape = HandleShape {
            ranks: self.core.topology().ranks(),
            nodes: self.core.topology().nodes,
            channels: num_channels,
            tokens: layout.num_tokens,
            local_experts,
            slots: self.wire().layout.slots,
            by_expert: by_expert.then_some(layout.num_topk),
            is_weighted: request.topk_weights.is_some(),
        };
        let mode = &self.kernels.mode;
        let (block, tables) = self.core.arena().take(|pieces| HandleTables::lay_out(pieces, mode, shape))?;
        self.tag += 1;
        let counts = CountExchange {
            layout,
            capacity,
            // By expert all entries are sent.
            num_topk: if by_expert { layout.num_topk } else { num_topk },
            is_weighted: request.topk_weights.is_some(),
            num_channels,
            num_sms,
            by_expert,
            expert_alignment,
            host: if exact { self.host_counts.ptr() } else { DevicePtr::NULL },
            tag: self.tag,
            timeout_ns: self.core.timeout_ns(request.timeout),
        };
        let mut metadata = Metadata { num_topk, local_experts, ..Metadata::default() };
        if let Some(weights) = request.topk_weights {
            (metadata.topk_idx, metadata.narrow_ids) = layout.ids();
            // Null means no weights, and a rank without tokens may give a null tensor. Such a rank
            // relays the weights of others, and reads none here.
            metadata.topk_weights = if weights.ptr().is_null() { tables.header } else { weights.ptr() };
        }
        if by_expert {
            // A row by expert is that of an entry, whether or not there are weights.
            metadata.num_topk = layout.num_topk;
            (metadata.topk_idx, metadata.narrow_ids) = layout.ids();
        }
        let source = self.source(&payload, layout.num_tokens)?;
        let to_launch = (num_sms, layout.num_tokens);
        let (rows, ring) = self.dispatch_args(&payload, &source, place, &tables, to_launch, Some(metadata));
        let mut uses = Uses::default();
        let waited = self.wait_ns(request.cumulative_wait_ns, &mut uses)?;
        let mut end = self.end_of("dispatch", rows.comm, waited, halves);
        end.counts = request.cumulative_counts.map(|cumulative| AddedCounts {
            header: tables.header,
            counts: tables.by_expert.map_or(tables.num_recv_tokens_per_expert, |at| at.expert_counts),
            cumulative: cumulative.ptr(),
            local_experts,
        });

        let failed_before = self.plans.failed()?;
        let mut header = PlanHeader::default();
        let mut lease = None;
        let (scales, weights) = (scales.map(|it| &**it), request.topk_weights.map(|it| &**it));
        let cumulative = request.cumulative_counts.map(|it| &**it);
        let inputs = [
            ("x", Some(x)),
            ("x_scales", scales),
            ("topk_weights", weights),
            ("topk_idx", Some(layout.topk_idx())),
            (CUMULATIVE_COUNTS, cumulative),
        ];
        let columns = columns.iter().map(|column| ("column", Some(column)));
        uses.extend(self.core.owners(inputs.into_iter().chain(columns))?);
        uses.extend(source.owners());
        uses.extend([layout.block.clone() as Owner, block.clone() as Owner]);
        let event = self.run(order, capturing, Some(("dispatch", halves)), &uses, |buffer, stream| {
            lease = Some(if capturing { place.begin()? } else { place.begin_on(stream)? });
            // SAFETY: the memory of inputs, outputs and the handle's block is freed only behind all
            // work enqueued on streams, and a recording keeps them. `run` orders this behind the
            // buffer's last operation.
            unsafe {
                source.records.launch(stream, &buffer.kernels.pack_columns, 4 * num_sms)?;
                if let Some(waits) = &end.waits {
                    buffer.enter(stream, waits, DevicePtr::NULL, true)?;
                }
                let counted = buffer.launch_notify(stream, &counts, &payload, place, &tables);
                // Peers have this rank's entry, or its counts, and wait for rows that are never
                // sent.
                let is_awaited = end.waits.is_some() || counted.is_ok();
                let planned = counted.and_then(|()| match counts.by_expert {
                    true => buffer.launch_expert_plan(stream, &counts, place, &tables),
                    false => Ok(()),
                });
                let launched = planned
                    .and_then(|()| source.quantise(stream, &buffer.kernels.quantise_rows, num_sms))
                    .and_then(|()| buffer.launch_dispatch(stream, rows, (ring, num_sms), &tables, &mut end));
                if let (Err(error), false, true) = (&launched, capturing, is_awaited) {
                    buffer.core.give_up("dispatch", error);
                }
                launched?;
                if halves == Halves::Both {
                    buffer.end_or_give_up(stream, &end, capturing)?;
                }
            }
            if exact {
                // Rows are already on their way while the host waits.
                let planned = buffer.wait_counts(stream, counts.tag, request.timeout).and_then(|counted| {
                    header = counted;
                    buffer.core.check()?;
                    buffer.plans.check_plan(&header, capacity)
                });
                if let (Err(_), Halves::Send) = (&planned, halves) {
                    // No second half will end it.
                    // SAFETY: as above.
                    unsafe { buffer.end_or_give_up(stream, &end, capturing)? };
                }
                planned?;
            }
            Ok(())
        })?;

        let rows = if exact { header.num_recv_tokens as u64 } else { capacity };
        let counts = if exact { self.expert_counts(local_experts)? } else { Vec::new() };
        let num_recv_tokens = exact.then_some(header.num_recv_tokens);
        let num_rdma_recv_tokens = exact.then_some(header.num_rdma_recv_tokens);
        let handle = DispatchHandle(Arc::new(HandleState {
            buffer_id: self.core.id(),
            block,
            tables,
            place: place.index(),
            num_tokens: layout.num_tokens,
            num_ranks: self.core.topology().ranks(),
            num_nodes: self.core.topology().nodes,
            num_channels,
            local_experts,
            num_topk: request.topk_weights.map(|_| num_topk),
            topk_weights: request.topk_weights.map_or(DevicePtr::NULL, |weights| weights.ptr()),
            capacity,
            num_recv_tokens: num_recv_tokens.map_or_else(OnceLock::new, OnceLock::from),
            num_rdma_recv_tokens: num_rdma_recv_tokens.map_or_else(OnceLock::new, OnceLock::from),
            plans: self.plans.clone(),
            failed_before,
        }));
        let plan = &handle.0;
        end.uses = uses;
        let event = event.map(|event| event.of(plan.clone()));
        if let Some(cumulative) = request.cumulative_counts {
            self.core.fills_tensor(cumulative, plan);
        }
        let lease = self.captured_lease(lease, Some(&handle))?;
        let owner = || lease.clone() as Owner;
        let at = &place.room().layout;
        let columns = [rows, num_topk as u64];
        let with_topk = request.topk_weights.is_some();
        let of_weights = if by_expert { &columns[..1] } else { &columns[..] };
        let received = Received {
            recv_topk_idx: (with_topk && !by_expert)
                .then(|| place.tensor(owner(), at.recv_topk_idx, &columns).result("recv_topk_idx", plan)),
            recv_topk_weights: with_topk.then(|| {
                place.tensor(owner(), at.recv_topk_weights, of_weights).result("recv_topk_weights", plan)
            }),
            recv_src_idx: Some(place.tensor(owner(), at.recv_src_idx, &[rows]).result("recv_src_idx", plan)),
            recv_src_meta: (self.core.topology().nodes > 1 && !by_expert)
                .then(|| place.tensor(owner(), at.recv_src_meta, &[rows, 2]).result("recv_src_meta", plan)),
            recv_src_entry: by_expert
                .then(|| place.tensor(owner(), at.recv_topk_idx, &[rows, 2]).result("recv_src_entry", plan)),
            num_recv_tokens_per_expert: counts,
            ..output_of_rows(&payload, &lease, &handle, event)
        };
        Ok((received, end))
    }

    /// Sends rows along the routing of an earlier dispatch, into `place`, the one of the same index
    /// on every rank. No counts are exchanged, and neither top-k nor source indices are sent.
    /// Collective, with handles of the same dispatch on every rank.
    ///
    /// # Errors
    /// [`Error::StaleHandle`] where the handle is of another buffer, and as [`Buffer::dispatch`].
    pub fn dispatch_cached<'p>(
        &mut self,
        place: &'p mut Place,
        request: CachedDispatchRequest<'_>,
        order: StreamOrder<'_>,
    ) -> Result<Received<'p>> {
        self.start_cached_dispatch(place, request, order, Halves::Both).map(|(received, _)| received)
    }

    /// The first half of [`Buffer::dispatch_cached`], as [`Buffer::dispatch_send`]. Collective.
    ///
    /// # Errors
    /// The same as [`Buffer::dispatch_cached`].
    pub fn dispatch_cached_send<'b, 'p>(
        &'b mut self,
        place: &'p mut Place,
        request: CachedDispatchRequest<'_>,
        order: StreamOrder<'_>,
    ) -> Result<Pending<'b, Received<'p>>> {
        let (received, end) = self.start_cached_dispatch(place, request, order, Halves::Send)?;
        Ok(self.pending_dispatch(end, received))
    }

    /// The same as [`Buffer::start_dispatch`], along a handle.
    fn start_cached_dispatch<'p>(
        &mut self,
        place: &'p mut Place,
        request: CachedDispatchRequest<'_>,
        order: StreamOrder<'_>,
        halves: Halves,
    ) -> Result<(Received<'p>, DispatchEnd)> {
        let capturing = self.core.begin(order)?;
        let place = place.0.place();
        self.core.check_place(place)?;
        let handle = request.handle;
        self.check_handle(handle)?;
        let num_sms = self.sms_along(handle, request.num_sms)?;
        if self.core.topology().nodes > 1 && num_sms <= 3 {
            let rule =
                "a cached dispatch across nodes takes more than 3: give the dispatch more, or dispatch anew";
            return Err(Error::argument("num_sms", num_sms, rule));
        }
        let CachedDispatchRequest { x, scales, columns, payload, quantise, timeout, .. } = request;
        let given = (x, scales, columns, quantise);
        let payload = self.check_payload(given, payload, handle.0.num_tokens, timeout)?;
        let tables = &handle.0.tables;
        let source = self.source(&payload, handle.0.num_tokens)?;
        let to_launch = (num_sms, handle.0.num_tokens);
        let (args, ring) = self.dispatch_args(&payload, &source, place, tables, to_launch, None);
        let mut lease = None;
        let inputs = [("x", Some(x)), ("x_scales", scales.map(|it| &**it))].into_iter();
        let columns = columns.iter().map(|column| ("column", Some(column)));
        let mut uses = Uses::from(self.core.owners(inputs.chain(columns))?);
        uses.push(handle.0.block.clone() as Owner);
        uses.extend(source.owners());
        let waited = self.wait_ns(request.cumulative_wait_ns, &mut uses)?;
        let mut end = self.end_of("cached dispatch", args.comm, waited, halves);
        let named = Some((end.name, halves));
        let event = self.run(order, capturing, named, &uses, |buffer, stream| {
            lease = Some(if capturing { place.begin()? } else { place.begin_on(stream)? });
            // SAFETY: as in `dispatch`.
            unsafe {
                source.records.launch(stream, &buffer.kernels.pack_columns, 4 * num_sms)?;
                source.quantise(stream, &buffer.kernels.quantise_rows, num_sms)?;
                if let Some(waits) = &end.waits {
                    buffer.enter(stream, waits, tables.header, true)?;
                }
                let launched = buffer.launch_dispatch(stream, args, (ring, num_sms), tables, &mut end);
                if let (Err(error), false, true) = (&launched, capturing, end.waits.is_some()) {
                    buffer.core.give_up("cached dispatch", error);
                }
                launched?;
                if halves == Halves::Both {
                    buffer.end_or_give_up(stream, &end, capturing)?;
                }
                Ok(())
            }
        })?;
        end.uses = uses;
        let event = event.map(|event| event.of(handle.0.clone()));
        let lease = self.captured_lease(lease, None)?;
        Ok((output_of_rows(&payload, &lease, handle, event), end))
    }

    /// The kernels that follow those of a dispatch; launching those may add copies.
    fn end_of(
        &self,
        name: &'static str,
        comm: Comm,
        waited: Option<DevicePtr>,
        halves: Halves,
    ) -> DispatchEnd {
        let is_apart = halves == Halves::Send || waited.is_some();
        let waits = is_apart.then_some(Waits { comm, waited, is_combine: false });
        DispatchEnd { name, waits, copies: None, counts: None, uses: Uses::default() }
    }

    /// The lease of a dispatch that has been enqueued; a step that is being captured gets it and
    /// the handle as well.
    fn captured_lease(
        &mut self,
        lease: Option<Arc<Lease<Room>>>,
        handle: Option<&DispatchHandle>,
    ) -> Result<Arc<Lease<Room>>> {
        let lease = lease.ok_or_else(|| Error::internal("dispatch", "nothing was enqueued"))?;
        self.core.fills(&lease, handle.map(|handle| handle.0.clone() as Arc<dyn Outcome>));
        Ok(lease)
    }

    /// Returns the error that an exact-size dispatch would have returned, if any. It waits for
    /// `stream`, on which the dispatch ran or which waited for it.
    pub fn check_dispatch(&self, handle: &DispatchHandle, stream: &Stream) -> Result<()> {
        self.check_handle(handle)?;
        let header = handle.0.header(stream)?;
        self.core.check()?;
        self.plans.check_plan(&header, handle.0.capacity)
    }

    /// Begins an operation on received rows, which must still be there.
    pub(super) fn begin_on(&self, received: &Received<'_>, order: StreamOrder<'_>) -> Result<Begun> {
        let capturing = self.core.begin(order)?;
        let place = received.lease.place().clone();
        self.core.check_place(&place)?;
        received.lease.check_current()?;
        self.check_handle(&received.handle)?;
        Ok((capturing, place, received.handle.0.clone()))
    }

    /// [`Buffer::run`] of this rank's own `work` on received rows, which a step of another thread
    /// may have overwritten since [`Buffer::begin_on`]. A step that is launched from here on runs
    /// behind it.
    pub(super) fn run_on(
        &mut self,
        received: &Received<'_>,
        order: StreamOrder<'_>,
        capturing: bool,
        mut uses: Uses,
        work: impl FnOnce(&mut Self, &Stream) -> Result<()>,
    ) -> Result<Option<Event>> {
        let handle = &received.handle.0;
        uses.push(handle.block.clone() as Owner);
        let event = self.run(order, capturing, None, &uses, |buffer, stream| {
            received.lease.check_current()?;
            work(buffer, stream)
        })?;
        Ok(event.map(|event| event.of(handle.clone())))
    }

    pub(super) fn check_handle(&self, handle: &DispatchHandle) -> Result<()> {
        if handle.0.buffer_id == self.core.id() {
            return Ok(());
        }
        Err(Error::StaleHandle("it was made by another buffer; dispatch with this one first".into()))
    }

    fn check_payload(
        &self,
        (x, scales, columns, quantise): Given<'_>,
        payload: Option<&Payload>,
        num_tokens: u32,
        timeout: Option<Duration>,
    ) -> Result<Checked> {
        check_timeout(timeout)?;
        x.expect("x", &ROWS, &[("num_tokens", Some(num_tokens as u64)), ("hidden", None)])?;
        x.expect_rows_of_16("x")?;
        quantise.check(x.columns(), x.dtype(), quantise.block())?;
        let dtype = if quantise == Quantise::None { x.dtype() } else { DType::Fp8E4m3 };
        let row_bytes = x.columns() * dtype.size();
        self.check_row_capacity(row_bytes)?;
        let mut given = columns;
        if let Some(scales) = scales {
            if x.dtype().size() != 1 {
                let rule = format!("scales go with 1-byte elements such as fp8; x is {}", x.dtype());
                return Err(Error::argument("x_scales", "given", rule));
            }
            if !columns.is_empty() {
                let rule = "columns travel too: give the scales as one of those";
                return Err(Error::argument("x_scales", "given", rule));
            }
            let rows = ("num_tokens", Some(num_tokens as u64));
            match scales.shape().len() {
                1 => scales.expect("x_scales", &[DType::F32], &[rows])?,
                _ => scales.expect("x_scales", &[DType::F32], &[rows, ("num_scales", None)])?,
            }
            // The copy engine moves them where it can: in units of 16 bytes.
            let num_scales = scales.columns();
            if num_scales.is_multiple_of(4) && !scales.ptr().0.is_multiple_of(16) {
                let rule =
                    format!("the address must be a multiple of 16 bytes with {num_scales} scales per token");
                return Err(Error::argument("x_scales", format!("{:#x}", scales.ptr().0), rule));
            }
            let have = self.options.shape.max_scales as u64;
            check_fits(("x_scales", "scales"), num_scales, have, "max_scales")?;
            given.push(scales);
        }
        let record = match quantise {
            Quantise::None => given.lay_out(num_tokens)?,
            _ if !columns.is_empty() => {
                let rule = "the scales that are made travel in their place: leave them out, or send rows that are quantised already";
                return Err(Error::argument("columns", "given", rule));
            }
            _ => quantise.record(row_bytes as u32),
        };
        let name = if quantise == Quantise::None { "columns" } else { "quantise" };
        let (words, have) = (record.bytes as u64 / 4, self.options.shape.max_scales as u64);
        check_fits((name, "words of 4 bytes"), words, have, "max_scales")?;
        if let Some(payload) = payload {
            payload.check(x, given)?;
        }
        Ok(Checked {
            dtype,
            hidden: x.columns(),
            row_bytes: row_bytes as u32,
            x: x.ptr(),
            record,
            is_scales: scales.is_some() || quantise.makes_f32_scales(),
            quantise,
            timeout,
        })
    }

    /// Checks top-k arguments; gives the number of entries per token, 0 without.
    fn check_topk(&self, request: &DispatchRequest<'_>) -> Result<u32> {
        let Some(weights) = request.topk_weights else { return Ok(0) };
        let (tokens, topk) = (request.layout.num_tokens as u64, request.layout.num_topk as u64);
        let dims = [("num_tokens", Some(tokens)), ("num_topk", Some(topk))];
        weights.expect("topk_weights", &[DType::F32], &dims)?;
        let have = self.options.shape.max_topk as u64;
        check_fits(("num_topk", "entries"), topk, have, "max_topk")?;
        Ok(topk as u32)
    }

    /// The arguments of a launch and the rings that they describe. A cached dispatch has no
    /// metadata.
    fn dispatch_args(
        &self,
        payload: &Checked,
        source: &Source,
        place: &PlaceState<Room>,
        tables: &HandleTables,
        (num_sms, num_tokens): (u32, u32),
        metadata: Option<Metadata>,
    ) -> (DispatchArgs, RingShape) {
        let with_metadata = metadata.is_some() as u32;
        let Metadata { topk_idx, narrow_ids, topk_weights, num_topk, local_experts } =
            metadata.unwrap_or_default();
        let (ring, piece_bytes) = self.kernels.dispatch_ring(
            payload.row_bytes,
            payload.num_scales(),
            num_topk,
            num_sms,
            tables.by_expert.is_some(),
        );
        let (index, row_bytes) = (place.index(), payload.row_bytes);
        let call = match metadata {
            // The count exchange compares the rest.
            Some(_) => Call { kind: CallKind::Dispatch, place: 0, row_bytes: 0, columns: 0 },
            // A dispatch along a handle has no count exchange, which compares types.
            None => cached_call(index, row_bytes, payload.dtype, &payload.record),
        };
        let args = DispatchArgs {
            comm: self.comm_in(place, call, payload.timeout),
            x: source.x,
            scales: source.records.at,
            topk_idx,
            topk_weights,
            send_row: match tables.routing {
                Spread::OneNode(_, tables) => tables.send_row,
                Spread::SeveralNodes(_, tables) => tables.by_expert.map_or(DevicePtr::NULL, |it| it.send_row),
            },
            header: tables.header,
            num_tokens,
            row_bytes: payload.row_bytes,
            num_scales: payload.num_scales(),
            num_topk,
            local_experts: local_experts.max(1),
            stages: ring.count,
            piece_bytes,
            stage_bytes: ring.bytes,
            with_metadata,
            first_expert: self.node() * self.ranks_per_node() * local_experts,
            metadata_warps: self.kernels.metadata_warps(metadata.is_some()),
            narrow_ids,
            fixed_tokens: ring.count.div_ceil(payload.row_bytes.div_ceil(piece_bytes)),
            reserved: 0,
        };
        (args, ring)
    }

    /// Enqueues the count exchange.
    ///
    /// # Safety
    /// The layout's block and the handle's are live until the stream has passed the kernels.
    unsafe fn launch_notify(
        &mut self,
        stream: &Stream,
        counts: &CountExchange<'_>,
        payload: &Checked,
        place: &PlaceState<Room>,
        tables: &HandleTables,
    ) -> Result<()> {
        let layout = counts.layout;
        let (num_channels, num_ranks) = (counts.num_channels, self.core.topology().ranks());
        let local_experts = layout.num_experts / num_ranks;
        let columns = place.index() << 24
            | if counts.by_expert { COLUMNS_BY_EXPERT } else { 0 }
            | (counts.is_weighted as u32) << 22
            | counts.num_topk << 16
            | payload.num_scales();
        // With rows by expert the host waits for the plan behind this one.
        let tag = if counts.by_expert { 0 } else { counts.tag };
        let mut comm = Comm { pool: place.room().layout, timeout_ns: counts.timeout_ns, ..self.comm };
        comm.pool.rows = counts.capacity;
        // SAFETY: passed on to the caller.
        unsafe {
            match &tables.routing {
                Spread::OneNode(node, routing) => {
                    comm.trace = self.core.trace("notify", num_channels);
                    let args = NotifyArgs {
                        comm,
                        is_token_in_rank: layout.tables.is_token_in_rank,
                        num_tokens_per_rank: layout.tables.num_tokens_per_rank,
                        num_tokens_per_expert: layout.tables.num_tokens_per_expert,
                        invalid: layout.tables.invalid,
                        header: tables.by_expert.map_or(tables.header, |at| at.exchange),
                        rank_prefix_matrix: routing.rank_prefix_matrix,
                        channel_prefix_matrix: routing.channel_prefix_matrix,
                        recv_channel_prefix_matrix: routing.recv_channel_prefix_matrix,
                        send_head: tables.send_head,
                        send_row: routing.send_row,
                        num_recv_tokens_per_expert: tables.num_recv_tokens_per_expert,
                        host: counts.host,
                        tag,
                        num_tokens: layout.num_tokens,
                        num_channels,
                        num_experts: layout.num_experts,
                        expert_alignment: counts.expert_alignment,
                        row_signature: payload.row_signature(),
                        columns,
                    };
                    node.notify.call_named(stream, args)
                }
                Spread::SeveralNodes(nodes, routing) => {
                    let args = InternodeCountArgs {
                        is_token_in_rank: layout.tables.is_token_in_rank,
                        send_head: tables.send_head,
                        send_rdma_head: routing.route.send_rdma_head,
                        channel_counts: routing.channel_counts,
                        num_tokens: layout.num_tokens,
                        num_channels,
                        num_ranks,
                        ranks_per_node: self.ranks_per_node(),
                    };
                    nodes.count.call(stream, num_channels, PLAN_THREADS, 0, args)?;
                    comm.trace = self.core.trace("notify", 1);
                    let args = InternodeNotifyArgs {
                        comm,
                        wire: self.wire(),
                        channel_counts: routing.channel_counts,
                        num_tokens_per_expert: layout.tables.num_tokens_per_expert,
                        invalid: layout.tables.invalid,
                        header: tables.by_expert.map_or(tables.header, |at| at.exchange),
                        rdma_channel_prefix_matrix: routing.route.rdma_channel_prefix_matrix,
                        recv_rdma_channel_prefix_matrix: routing.route.recv_rdma_channel_prefix_matrix,
                        recv_rdma_rank_prefix_sum: routing.route.recv_rdma_rank_prefix_sum,
                        recv_gbl_channel_prefix_matrix: routing.recv_gbl_channel_prefix_matrix,
                        num_recv_tokens_per_expert: tables.num_recv_tokens_per_expert,
                        forward_start: routing.forward_start,
                        host: counts.host,
                        tag,
                        num_channels,
                        local_experts,
                        expert_alignment: counts.expert_alignment,
                        row_signature: payload.row_signature(),
                        columns,
                        reserved: 0,
                    };
                    nodes.notify.call_named(stream, args)
                }
            }
        }
    }

    /// Enqueues the plan of rows by expert, behind the count exchange.
    ///
    /// # Safety
    /// As of [`Buffer::launch_notify`].
    unsafe fn launch_expert_plan(
        &mut self,
        stream: &Stream,
        counts: &CountExchange<'_>,
        place: &PlaceState<Room>,
        tables: &HandleTables,
    ) -> Result<()> {
        let Some(at) = tables.by_expert else { return Ok(()) };
        let layout = counts.layout;
        let (topk_idx, narrow_ids) = layout.ids();
        let (num_tokens, num_topk) = (layout.num_tokens, layout.num_topk);
        let args = NumberArgs {
            topk_idx,
            numbers: at.numbers,
            num_tokens,
            num_topk,
            num_experts: layout.num_experts,
            narrow_ids,
        };
        let mut comm = Comm { pool: place.room().layout, timeout_ns: counts.timeout_ns, ..self.comm };
        comm.pool.rows = counts.capacity;
        let plan = ExpertPlanArgs {
            comm,
            topk_idx,
            numbers: at.numbers,
            exchange: at.exchange,
            header: tables.header,
            send_row: match tables.routing {
                Spread::OneNode(_, tables) => tables.send_row,
                Spread::SeveralNodes(_, tables) => tables.by_expert.map_or(DevicePtr::NULL, |it| it.send_row),
            },
            expert_counts: at.expert_counts,
            expert_starts: at.expert_starts,
            psum_expert: at.psum_expert,
            num_recv_tokens_per_expert: tables.num_recv_tokens_per_expert,
            host: counts.host,
            tag: counts.tag,
            num_tokens,
            num_topk,
            local_experts: layout.num_experts / self.core.topology().ranks(),
            alignment: counts.expert_alignment,
            narrow_ids,
            reserved: 0,
        };
        let shared = PLAN_BY_EXPERT_SHARED_BYTES;
        // SAFETY: passed on to the caller.
        unsafe {
            let grid = blocks_for(num_tokens, counts.num_sms);
            let numbers = number_shared_bytes(PLAN_THREADS, layout.num_experts);
            self.kernels.number_selections.call(stream, grid, PLAN_THREADS, numbers, args)?;
            match &tables.routing {
                Spread::OneNode(node, _) => {
                    node.by_expert.plan.call(stream, grid, PLAN_THREADS, shared, plan)
                }
                Spread::SeveralNodes(nodes, routing) => {
                    let bases = routing.by_expert.map_or(DevicePtr::NULL, |it| it.bases);
                    let args = InternodeExpertPlanArgs { plan, wire: self.wire(), bases };
                    nodes.by_expert.plan.call(stream, grid, PLAN_THREADS, shared, args)
                }
            }
        }
    }

    /// An error unless the buffer supports rows by expert.
    fn check_by_expert(&self, alignment: u32) -> Result<()> {
        check_alignment(alignment)?;
        if self.options.rows_by_expert.is_none() {
            let rule = "the buffer has no room for them: create it with Options::rows_by_expert";
            return Err(Error::argument("by_expert", "asked for", rule));
        }
        Ok(())
    }

    /// Enqueues the movement of rows. If a separate kernel ends the dispatch, `end` gets the copies
    /// of rows by expert that follow it.
    ///
    /// # Safety
    /// The addresses in `args` and the handle's block are live until the stream has passed the
    /// kernel.
    unsafe fn launch_dispatch(
        &mut self,
        stream: &Stream,
        mut args: DispatchArgs,
        (ring, num_sms): (RingShape, u32),
        tables: &HandleTables,
        end: &mut DispatchEnd,
    ) -> Result<()> {
        let grid = match &tables.routing {
            // A rank with few tokens may have many rows to copy.
            Spread::OneNode(..) if tables.by_expert.is_some() => num_sms,
            Spread::OneNode(..) => blocks_for(args.num_tokens, num_sms),
            Spread::SeveralNodes(..) => num_sms,
        };
        self.describe_rows(RowBytes { recv: args.row_bytes as u64, ..self.row_bytes });
        args.comm.trace = self.core.trace("dispatch", grid);
        // SAFETY: passed on to the caller.
        unsafe {
            match &tables.routing {
                Spread::OneNode(node, _) => {
                    let threads = ring.threads() + args.metadata_warps * 32;
                    if tables.by_expert.is_some() {
                        let (shape, warps) = (&self.options.shape, self.kernels.copy_warps(ring.bytes));
                        let copy_warps = if end.waits.is_some() { 0 } else { warps };
                        let shared = copy_rings_behind(ring.shared_bytes())
                            + ring_bytes(copy_warps, COPY_STAGES, ring.bytes);
                        let (block, shared) = (threads + copy_warps * 32, shared + JOINED_BYTES);
                        let args = ExpertDispatchArgs {
                            dispatch: args,
                            max_tokens: shape.max_tokens,
                            copy_words: shape.max_topk,
                            copy_warps,
                            reserved: 0,
                        };
                        node.by_expert.dispatch.call(stream, grid, block, shared, args)?;
                        if end.waits.is_some() {
                            node.by_expert.announce.call_named(stream, args)?;
                            end.copies = Some(Copies { node: node.clone(), args, blocks: num_sms, warps });
                        }
                        return Ok(());
                    }
                    let (tokens, fixed) = (args.num_tokens, args.fixed_tokens * ring.warps * grid);
                    let claimed = tokens.saturating_sub(fixed);
                    let claims =
                        grid >= self.options.tuning.dispatch_claiming_blocks && claimed >= tokens.div_ceil(4);
                    let kernel = if claims { &node.claiming } else { &node.dispatch };
                    kernel.call(stream, grid, threads, ring.shared_bytes() + JOINED_BYTES, args)
                }
                Spread::SeveralNodes(nodes, routing) => {
                    let num_topk = (args.with_metadata != 0).then_some(args.num_topk);
                    let slot =
                        if routing.by_expert.is_some() { SlotShape::by_expert } else { SlotShape::new };
                    let args = InternodeDispatchArgs {
                        dispatch: args,
                        wire: self.wire(),
                        route: routing.route,
                        send_head: tables.send_head,
                        forward_start: routing.forward_start,
                        slot_bytes: slot(args.row_bytes, args.num_scales, num_topk).bytes,
                        reserved: 0,
                    };
                    let (block, shared) = (ring.threads() + 32, ring.shared_bytes() + PROGRESS_BYTES);
                    if let (Some(at), Some(given)) = (routing.by_expert, tables.by_expert) {
                        let (shape, copy_warps) = (&self.options.shape, self.kernels.copy_warps(ring.bytes));
                        let shared = match copy_warps {
                            0 => shared,
                            _ => copy_rings_behind(shared) + ring_bytes(copy_warps, COPY_STAGES, ring.bytes),
                        };
                        let block = block + copy_warps * 32;
                        let by_expert = ExpertRoute {
                            numbers: given.numbers,
                            bases: at.bases,
                            forward_weights: at.forward_weights,
                        };
                        let args = InternodeExpertDispatchArgs {
                            rows: args,
                            by_expert,
                            max_tokens: shape.max_tokens,
                            copy_words: shape.max_topk,
                            copy_warps,
                            reserved: 0,
                        };
                        return nodes.by_expert.dispatch.call(stream, grid, block, shared, args);
                    }
                    nodes.dispatch.call(stream, grid, block, shared, args)
                }
            }
        }
    }

    /// The host's copy of the expert counts; valid once `wait_counts` has returned.
    fn expert_counts(&self, local_experts: u32) -> Result<Vec<u32>> {
        self.host_counts.read_all(HOST_EXPERTS, local_experts)
    }
}

/// The call of a cached dispatch. Rows without columns count with their bytes and their type alone.
/// Columns change the bytes as well, by which few formats of equally long rows have the same call.
fn cached_call(place: u32, row_bytes: u32, dtype: DType, record: &Record) -> Call {
    let row_bytes = row_bytes.wrapping_add(16 * record.format(dtype));
    let columns = record.bytes / 4 + dtype.code() * CACHED_DTYPE;
    Call { kind: CallKind::CachedDispatch, place, row_bytes, columns }
}

/// The output of every dispatch: rows, with their scales or columns if they have any.
fn output_of_rows<'p>(
    payload: &Checked,
    lease: &Arc<Lease<Room>>,
    handle: &DispatchHandle,
    event: Option<Event>,
) -> Received<'p> {
    let (place, plan, rows) = (lease.place(), &handle.0, handle.0.output_rows());
    let (at, owner) = (place.room().layout, || lease.clone() as Owner);
    let record = &payload.record;
    let shape_of = |column: &PlacedColumn| std::iter::once(rows).chain(column.elements).collect::<Vec<_>>();
    let scales = |column: &PlacedColumn| {
        place.tensor(owner(), at.recv_scales, &shape_of(column)).result("recv_x_scales", plan)
    };
    let received = |column: &PlacedColumn| {
        let at = place.at(at.recv_scales).add(column.offset.into());
        let column = Tensor::in_memory(at, column.dtype, &shape_of(column), owner());
        column.with_row_stride(record.bytes.into()).result("recv_columns", plan)
    };
    let is_scales = payload.is_scales;
    Received {
        recv_x: place.rows(owner(), at.recv_x, payload.dtype, rows, payload.hidden).result("recv_x", plan),
        recv_x_scales: record.columns.first().filter(|_| is_scales).map(scales),
        recv_columns: record.columns.iter().filter(|_| !is_scales).map(received).collect(),
        recv_topk_idx: None,
        recv_topk_weights: None,
        recv_src_idx: None,
        recv_src_meta: None,
        recv_src_entry: None,
        num_recv_tokens: plan.num_recv_tokens.get().copied(),
        num_recv_tokens_per_expert: Vec::new(),
        handle: handle.clone(),
        event,
        record: if is_scales { Record::default() } else { payload.record.clone() },
        lease: lease.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver::virt::{VirtConfig, VirtualGpu};
    use crate::ep::payload::assert_calls_differ;
    use crate::group::run_threads;
    use crate::throughput::{Options, Shape};

    /// The step runs between the check of the arguments and the enqueueing, as one of another
    /// thread may.
    #[test]
    fn work_on_rows_that_a_step_has_overwritten_since_is_not_enqueued() {
        run_threads(1, Duration::from_secs(60), |_, group| {
            let device = VirtualGpu::new(VirtConfig::default());
            let stream = Stream::new(&device)?;
            let order = StreamOrder::on(&stream);
            let shape = Shape { max_tokens: 1, hidden: 8, dtype: DType::Bf16, max_topk: 1, max_scales: 0 };
            let mut buffer = Buffer::new(device, &*group, Options::new(shape))?;
            let mut place = buffer.place(0)?;
            let x = Tensor::from_host(&stream, DType::Bf16, &[1, 8], &[half::bf16::ONE; 8])?;
            let ids = TypedTensor::from_host(&stream, &[1, 1], &[0i64])?;
            let layout = buffer.get_dispatch_layout(&ids, 1, order)?;
            let counts = Counts::OnDevice { capacity: buffer.capacity() };
            let request = DispatchRequest::new(&x, &layout).counts(counts);
            let step = buffer.capture(&stream, |buffer, order| {
                buffer.dispatch(&mut place, request, order).map(Received::detach)
            })?;
            let detached = buffer.dispatch(&mut place, request, order)?.detach();
            let received = detached.at(&place)?;

            let (capturing, ..) = buffer.begin_on(received, order)?;
            step.launch(&stream)?;
            let run = buffer.run_on(received, order, capturing, Uses::default(), |_, _| Ok(()));
            assert!(matches!(run, Err(Error::StaleHandle(_))), "{run:?}");
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn equally_long_rows_of_the_usual_formats_have_different_cached_calls() {
        for row_bytes in (32u64..1 << 14).step_by(32) {
            assert_calls_differ(
                &ROWS,
                |dtype| row_bytes / dtype.size(),
                |format, record| cached_call(3, row_bytes as u32, format.row().0, record).bits(),
            );
        }
    }
}
