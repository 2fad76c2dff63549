//! Dispatch: rows go to the ranks that hold their experts.

use std::sync::{Arc, OnceLock};

use epoxide_gpu::kernels::{
    Dispatch, INTERNODE_NOTIFY_SHARED_BYTES, InternodeCount, InternodeDispatch, InternodeNotify, Kernel as _,
    NOTIFY_SHARED_BYTES, Notify, PROGRESS_BYTES,
};
use epoxide_gpu::layout::{
    DevicePtr, DispatchArgs, InternodeCountArgs, InternodeDispatchArgs, InternodeNotifyArgs, NotifyArgs,
    PlanHeader, SlotShape,
};

use super::buffer::RowBytes;
use super::fault::check_plan;
use super::handle::{DispatchHandle, HandleShape, Inner, Places, Routing};
use super::kernels::ModeKernels;
use super::trace::trace_place;
use super::{Buffer, DType, DispatchLayout, StreamOrder, Tensor};
use crate::driver::{Event, Stream};
use crate::error::{Error, Result};

/// Threads per block of the notify kernel, as its source fixes them.
const NOTIFY_THREADS: u32 = 512;
/// Where expert counts start in the host's copy of the counts.
pub(super) const HOST_EXPERTS: u64 = size_of::<PlanHeader>() as u64;

/// Whether the host waits for the counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counts {
    /// The host waits, and outputs have exactly as many rows as were received.
    Exact,
    /// The host does not wait: outputs have `capacity` rows, the count stays on the device. Can be captured in a graph.
    /// The same on every rank; a dispatch that needs more rows moves none, on any rank.
    OnDevice {
        /// Rows of the outputs, at most [`Buffer::capacity`].
        capacity: u64,
    },
}

/// Arguments of [`Buffer::dispatch`].
#[derive(Debug, Clone, Copy)]
pub struct DispatchRequest<'a> {
    /// Rows to send, `[num_tokens, hidden]`, any dtype whose rows are a multiple of 16 bytes.
    pub x: &'a Tensor,
    /// f32 `[num_tokens, num_scales]` (or `[num_tokens]`); only with 1-byte elements.
    pub x_scales: Option<&'a Tensor>,
    /// i64 `[num_tokens, num_topk]`, the one that `layout` was made of; with `topk_weights` or not at all.
    pub topk_idx: Option<&'a Tensor>,
    /// f32 `[num_tokens, num_topk]`.
    pub topk_weights: Option<&'a Tensor>,
    /// The counts of this routing.
    pub layout: &'a DispatchLayout,
    /// Per-expert counts are rounded up to multiples of this; nothing else changes. At least 1.
    pub expert_alignment: u32,
    /// Whether the host waits for the counts.
    pub counts: Counts,
}

impl<'a> DispatchRequest<'a> {
    /// Rows without scales and top-k, alignment 1, exact counts.
    pub fn new(x: &'a Tensor, layout: &'a DispatchLayout) -> Self {
        DispatchRequest {
            x,
            x_scales: None,
            topk_idx: None,
            topk_weights: None,
            layout,
            expert_alignment: 1,
            counts: Counts::Exact,
        }
    }
}

/// Arguments of [`Buffer::dispatch_cached`].
#[derive(Debug, Clone, Copy)]
pub struct CachedDispatchRequest<'a> {
    /// Rows to send, `[num_tokens, hidden]`, with the token count of the handle.
    pub x: &'a Tensor,
    /// f32 `[num_tokens, num_scales]` (or `[num_tokens]`); only with 1-byte elements.
    pub x_scales: Option<&'a Tensor>,
    /// The routing of an earlier dispatch.
    pub handle: &'a DispatchHandle,
}

/// What a dispatch brings. The tensors lie in the pool: the next dispatch of the same buffer overwrites them.
///
/// Rows are grouped by source rank, ascending, and inside a source sorted by token index. Always.
#[derive(Debug)]
pub struct DispatchOutput {
    /// `[num_recv_tokens, hidden]`, dtype of x. Rows are `row_stride()` bytes apart, a multiple of 128.
    pub recv_x: Tensor,
    /// As `x_scales`, with `num_recv_tokens` rows.
    pub recv_x_scales: Option<Tensor>,
    /// i64 `[num_recv_tokens, num_topk]`: local expert ids, or -1 where the expert is not on this rank. `None` where
    /// top-k was not sent.
    pub recv_topk_idx: Option<Tensor>,
    /// f32 `[num_recv_tokens, num_topk]`: 0 where `recv_topk_idx` is -1.
    pub recv_topk_weights: Option<Tensor>,
    /// i32 `[num_recv_tokens]`: the token's index on its source rank. `None` in a cached dispatch.
    pub recv_src_idx: Option<Tensor>,
    /// i32 `[num_recv_tokens, 2]`: the source node, and a word whose bit j says that rank j of this node gets the token too. `None`
    /// in a cached dispatch and within one node.
    pub recv_src_meta: Option<Tensor>,
    /// Rows received; `None` where the host did not wait for the counts.
    pub num_recv_tokens: Option<u32>,
    /// Selections of each local expert, each rounded up to the alignment; empty where the host did not wait, or cached.
    pub num_recv_tokens_per_expert: Vec<u32>,
    /// The routing, for combine and cached dispatches.
    pub handle: DispatchHandle,
    /// Where an asynchronous call ends.
    pub event: Option<Event>,
}

/// What the count exchange of a dispatch is told.
struct CountExchange<'a> {
    layout: &'a DispatchLayout,
    capacity: u64,
    num_topk: u32,
    expert_alignment: u32,
    host: DevicePtr,
    tag: u64,
}

/// A handle of a buffer with another number of nodes, which [`Buffer::check_handle`] does not let through.
pub(super) fn other_mode() -> Error {
    Error::StaleHandle(
        "it was made by a buffer with another number of nodes; dispatch with this one first".into(),
    )
}

/// Rows and scales of a dispatch, checked.
struct Payload {
    dtype: DType,
    hidden: u64,
    row_bytes: u32,
    num_scales: u32,
    scales_one_dimensional: bool,
    x: DevicePtr,
    scales: DevicePtr,
}

impl Buffer {
    /// Sends every token's row to each rank that has one of its experts. Collective.
    ///
    /// # Errors
    /// Arguments that break a rule, on this rank alone; [`Error::Capacity`], [`Error::Mismatch`] and ids out of range, on
    /// every rank and before any row moved; [`Error::PeerTimeout`] where a peer does not come. Where the host does not
    /// wait for the counts ([`Counts::OnDevice`]) the latter show in [`Buffer::check_dispatch`].
    pub fn dispatch(
        &mut self,
        request: DispatchRequest<'_>,
        order: StreamOrder<'_>,
    ) -> Result<DispatchOutput> {
        self.check()?;
        let layout = request.layout;
        let payload = self.check_payload(request.x, request.x_scales, layout.num_tokens)?;
        let num_topk = self.check_topk(&request)?;
        if request.expert_alignment == 0 {
            return Err(Error::argument("expert_alignment", 0, "must be at least 1"));
        }
        let capacity = match request.counts {
            Counts::Exact => self.capacity(),
            Counts::OnDevice { capacity } => capacity,
        };
        self.check_column_capacity(
            "capacity",
            capacity,
            self.capacity(),
            "max_tokens_per_rank * num_ranks",
            "rows",
        )?;

        let local_experts = layout.num_experts / self.num_ranks;
        let num_channels = self.config.num_channels();
        let (pieces, places) = Places::lay_out(HandleShape {
            ranks: self.num_ranks,
            nodes: self.num_nodes,
            channels: num_channels,
            tokens: layout.num_tokens,
            local_experts,
            relayed: self.wire.as_ref().map_or(0, |side| side.wire.layout.slots * self.num_nodes as u64),
        });
        let block = Arc::new(self.arena.take(&pieces)?);
        let places = places(block.ptr());
        self.tag += 1;
        let exact = request.counts == Counts::Exact;
        let counts = CountExchange {
            layout,
            capacity,
            num_topk,
            expert_alignment: request.expert_alignment,
            host: if exact { self.host_counts.ptr() } else { DevicePtr::NULL },
            tag: self.tag,
        };
        let null = DevicePtr::NULL;
        let topk =
            (request.topk_idx.map_or(null, Tensor::ptr), request.topk_weights.map_or(null, Tensor::ptr));
        let metadata = Some((topk, num_topk, local_experts));
        let rows = self.dispatch_args(&payload, &places, layout.num_tokens, metadata);

        let mut header = PlanHeader::default();
        let event = self.run(order, |buffer, stream| {
            // SAFETY: inputs are held by the caller and outputs by the result, until the stream has passed.
            unsafe {
                buffer.launch_notify(stream, &counts, &payload, &places)?;
                buffer.launch_dispatch(stream, rows, &places)?;
            }
            if exact {
                // Rows are already on their way while the host waits.
                header = buffer.wait_counts(stream, counts.tag)?;
                check_status_then_plan(buffer, &header, capacity)?;
            }
            Ok(())
        })?;

        let rows = if exact { header.num_recv_tokens as u64 } else { capacity };
        let counts = if exact { self.expert_counts(local_experts)? } else { Vec::new() };
        let num_recv_tokens = exact.then_some(header.num_recv_tokens);
        let num_rdma_recv_tokens = exact.then_some(header.num_rdma_recv_tokens);
        let handle = DispatchHandle(Arc::new(Inner {
            buffer_id: self.id,
            block,
            places,
            num_tokens: layout.num_tokens,
            num_ranks: self.num_ranks,
            num_nodes: self.num_nodes,
            num_channels,
            local_experts,
            num_topk: request.topk_idx.map(|_| num_topk),
            capacity,
            num_recv_tokens: num_recv_tokens.map_or_else(OnceLock::new, OnceLock::from),
            num_rdma_recv_tokens: num_rdma_recv_tokens.map_or_else(OnceLock::new, OnceLock::from),
        }));
        let pool = self.comm.pool;
        let with_topk = request.topk_idx.is_some();
        let columns = [rows, num_topk as u64];
        Ok(DispatchOutput {
            recv_x: self.pool_rows(pool.recv_x, payload.dtype, rows, payload.hidden),
            recv_x_scales: self.recv_scales(&payload, rows),
            recv_topk_idx: with_topk.then(|| self.pool_tensor(pool.recv_topk_idx, DType::I64, &columns)),
            recv_topk_weights: with_topk
                .then(|| self.pool_tensor(pool.recv_topk_weights, DType::F32, &columns)),
            recv_src_idx: Some(self.pool_tensor(pool.recv_src_idx, DType::I32, &[rows])),
            recv_src_meta: (self.num_nodes > 1)
                .then(|| self.pool_tensor(pool.recv_src_meta, DType::I32, &[rows, 2])),
            num_recv_tokens,
            num_recv_tokens_per_expert: counts,
            handle,
            event,
        })
    }

    /// Sends rows along the routing of an earlier dispatch: no counts are exchanged, and neither top-k nor source
    /// indices travel. Collective, with handles of the same dispatch on every rank.
    ///
    /// # Errors
    /// [`Error::StaleHandle`] where the handle is of another buffer, and as [`Buffer::dispatch`].
    pub fn dispatch_cached(
        &mut self,
        request: CachedDispatchRequest<'_>,
        order: StreamOrder<'_>,
    ) -> Result<DispatchOutput> {
        self.check()?;
        let handle = request.handle;
        self.check_handle(handle)?;
        if self.num_nodes > 1 && self.config.num_sms <= 3 {
            let rule = "a cached dispatch across nodes takes more than 3: dispatch anew, or give more";
            return Err(Error::argument("num_sms", self.config.num_sms, rule));
        }
        let payload = self.check_payload(request.x, request.x_scales, handle.0.num_tokens)?;
        let places = handle.0.places;
        let args = self.dispatch_args(&payload, &places, handle.0.num_tokens, None);
        // SAFETY: inputs are held by the caller and the routing by the handle, until the stream has passed.
        let event =
            self.run(order, |buffer, stream| unsafe { buffer.launch_dispatch(stream, args, &places) })?;
        let rows = handle.0.output_rows();
        Ok(DispatchOutput {
            recv_x: self.pool_rows(self.comm.pool.recv_x, payload.dtype, rows, payload.hidden),
            recv_x_scales: self.recv_scales(&payload, rows),
            recv_topk_idx: None,
            recv_topk_weights: None,
            recv_src_idx: None,
            recv_src_meta: None,
            num_recv_tokens: handle.0.num_recv_tokens.get().copied(),
            num_recv_tokens_per_expert: Vec::new(),
            handle: handle.clone(),
            event,
        })
    }

    /// Checks, after `stream` has passed the dispatch, what an exact-size dispatch would have returned as an error.
    pub fn check_dispatch(&self, handle: &DispatchHandle, stream: &Stream) -> Result<()> {
        self.check_handle(handle)?;
        let mut header = PlanHeader::default();
        stream.read(bytemuck::bytes_of_mut(&mut header), handle.0.places.header)?;
        check_status_then_plan(self, &header, handle.0.capacity)
    }

    pub(super) fn check_handle(&self, handle: &DispatchHandle) -> Result<()> {
        let channels = (handle.0.num_channels, self.config.num_channels());
        if handle.0.buffer_id == self.id && self.num_nodes > 1 && channels.0 != channels.1 {
            return Err(Error::StaleHandle(format!(
                "it was made with {} channels and the buffer now has {}; across nodes they must be the same: set the config back, \
                 or dispatch anew",
                channels.0, channels.1
            )));
        }
        if handle.0.buffer_id == self.id {
            return Ok(());
        }
        Err(Error::StaleHandle("it was made by another buffer; dispatch with this one first".into()))
    }

    fn check_payload(&self, x: &Tensor, scales: Option<&Tensor>, num_tokens: u32) -> Result<Payload> {
        let dtypes = [DType::Bf16, DType::F32, DType::Fp8E4m3, DType::I32];
        x.expect("x", &dtypes, &[("num_tokens", Some(num_tokens as u64)), ("hidden", None)])?;
        x.expect_rows_of_16("x")?;
        self.check_row_capacity(x.row_bytes())?;
        let mut num_scales = 0;
        if let Some(scales) = scales {
            if x.dtype().size() != 1 {
                let rule = format!("scales go with 1-byte elements such as fp8; x is {}", x.dtype());
                return Err(Error::argument("x_scales", "given", rule));
            }
            let rows = ("num_tokens", Some(num_tokens as u64));
            match scales.shape().len() {
                1 => scales.expect("x_scales", &[DType::F32], &[rows])?,
                _ => scales.expect("x_scales", &[DType::F32], &[rows, ("num_scales", None)])?,
            }
            num_scales = scales.columns();
            // The copy engine moves them where it can: in units of 16 bytes.
            if num_scales.is_multiple_of(4) && !scales.ptr().0.is_multiple_of(16) {
                let rule =
                    format!("the address must be a multiple of 16 bytes with {num_scales} scales per token");
                return Err(Error::argument("x_scales", format!("{:#x}", scales.ptr().0), rule));
            }
            let have = self.options.shape.max_scales as u64;
            self.check_column_capacity("x_scales", num_scales, have, "max_scales", "scales")?;
        }
        Ok(Payload {
            dtype: x.dtype(),
            hidden: x.columns(),
            row_bytes: x.row_bytes() as u32,
            num_scales: num_scales as u32,
            scales_one_dimensional: scales.is_some_and(|scales| scales.shape().len() == 1),
            x: x.ptr(),
            scales: scales.map_or(DevicePtr::NULL, Tensor::ptr),
        })
    }

    /// Checks top-k arguments; gives the number of entries per token, 0 without.
    fn check_topk(&self, request: &DispatchRequest<'_>) -> Result<u32> {
        let (idx, weights) = match (request.topk_idx, request.topk_weights) {
            (None, None) => return Ok(0),
            (Some(idx), Some(weights)) => (idx, weights),
            (Some(_), None) => {
                return Err(Error::argument(
                    "topk_weights",
                    "none",
                    "goes with topk_idx: give both or neither",
                ));
            }
            (None, Some(_)) => {
                return Err(Error::argument(
                    "topk_idx",
                    "none",
                    "goes with topk_weights: give both or neither",
                ));
            }
        };
        let (tokens, topk) = (request.layout.num_tokens as u64, request.layout.num_topk as u64);
        let dims = [("num_tokens", Some(tokens)), ("num_topk", Some(topk))];
        idx.expect("topk_idx", &[DType::I64], &dims)?;
        weights.expect("topk_weights", &[DType::F32], &dims)?;
        let have = self.options.shape.max_topk as u64;
        self.check_column_capacity("num_topk", topk, have, "max_topk", "entries")?;
        Ok(topk as u32)
    }

    /// `metadata`: ((topk_idx, topk_weights), num_topk, local experts), or `None` in a cached dispatch.
    fn dispatch_args(
        &self,
        payload: &Payload,
        places: &Places,
        num_tokens: u32,
        metadata: Option<((DevicePtr, DevicePtr), u32, u32)>,
    ) -> DispatchArgs {
        let with_metadata = metadata.is_some() as u32;
        let ((topk_idx, topk_weights), num_topk, local_experts) = metadata.unwrap_or_default();
        let (ring, piece_bytes) =
            self.kernels.dispatch_ring(payload.row_bytes, payload.num_scales, num_topk, self.config.num_sms);
        DispatchArgs {
            comm: self.comm,
            x: payload.x,
            scales: payload.scales,
            topk_idx,
            topk_weights,
            send_row: match places.routing {
                Routing::Intranode(places) => places.send_row,
                Routing::Internode(_) => DevicePtr::NULL,
            },
            header: places.header,
            num_tokens,
            row_bytes: payload.row_bytes,
            num_scales: payload.num_scales,
            num_topk,
            local_experts: local_experts.max(1),
            stages: ring.count,
            piece_bytes,
            stage_bytes: ring.bytes,
            with_metadata,
            first_expert: self.node() * self.ranks_per_node() * local_experts,
        }
    }

    /// Enqueues the count exchange.
    ///
    /// # Safety
    /// The layout's block and the handle's are live until the stream has passed the kernels.
    unsafe fn launch_notify(
        &mut self,
        stream: &Stream,
        counts: &CountExchange<'_>,
        payload: &Payload,
        places: &Places,
    ) -> Result<()> {
        let layout = counts.layout;
        let (num_channels, num_ranks) = (self.config.num_channels(), self.num_ranks);
        let local_experts = layout.num_experts / num_ranks;
        let columns = counts.num_topk << 16 | payload.num_scales;
        let mut comm = self.comm;
        comm.pool.rows = counts.capacity;
        // SAFETY: passed on to the caller.
        unsafe {
            match (&self.kernels.mode, places.routing, &self.wire) {
                (ModeKernels::Intranode { notify, .. }, Routing::Intranode(routing), _) => {
                    comm.trace = trace_place(&mut self.trace, "notify", num_channels);
                    let args = NotifyArgs {
                        comm,
                        is_token_in_rank: layout.places.is_token_in_rank,
                        num_tokens_per_rank: layout.places.num_tokens_per_rank,
                        num_tokens_per_expert: layout.places.num_tokens_per_expert,
                        invalid: layout.places.invalid,
                        header: places.header,
                        rank_prefix_matrix: routing.rank_prefix_matrix,
                        channel_prefix_matrix: routing.channel_prefix_matrix,
                        recv_channel_prefix_matrix: routing.recv_channel_prefix_matrix,
                        send_head: places.send_head,
                        send_row: routing.send_row,
                        num_recv_tokens_per_expert: places.num_recv_tokens_per_expert,
                        host: counts.host,
                        tag: counts.tag,
                        num_tokens: layout.num_tokens,
                        num_channels,
                        num_experts: layout.num_experts,
                        expert_alignment: counts.expert_alignment,
                        row_bytes: payload.row_bytes,
                        columns,
                    };
                    let call = Notify::call(args);
                    stream.call(notify, num_channels, NOTIFY_THREADS, NOTIFY_SHARED_BYTES, call)
                }
                (ModeKernels::Internode { count, notify, .. }, Routing::Internode(routing), Some(side)) => {
                    let args = InternodeCountArgs {
                        is_token_in_rank: layout.places.is_token_in_rank,
                        send_head: places.send_head,
                        send_rdma_head: routing.route.send_rdma_head,
                        channel_counts: routing.channel_counts,
                        num_tokens: layout.num_tokens,
                        num_channels,
                        num_ranks,
                        ranks_per_node: self.ranks_per_node(),
                    };
                    stream.call(count, num_channels, NOTIFY_THREADS, 0, InternodeCount::call(args))?;
                    comm.trace = trace_place(&mut self.trace, "notify", 1);
                    let args = InternodeNotifyArgs {
                        comm,
                        wire: side.wire,
                        channel_counts: routing.channel_counts,
                        num_tokens_per_expert: layout.places.num_tokens_per_expert,
                        invalid: layout.places.invalid,
                        header: places.header,
                        rdma_channel_prefix_matrix: routing.route.rdma_channel_prefix_matrix,
                        gbl_channel_prefix_matrix: routing.gbl_channel_prefix_matrix,
                        recv_rdma_channel_prefix_matrix: routing.route.recv_rdma_channel_prefix_matrix,
                        recv_rdma_rank_prefix_sum: routing.route.recv_rdma_rank_prefix_sum,
                        recv_gbl_channel_prefix_matrix: routing.recv_gbl_channel_prefix_matrix,
                        recv_gbl_rank_prefix_sum: routing.recv_gbl_rank_prefix_sum,
                        num_recv_tokens_per_expert: places.num_recv_tokens_per_expert,
                        forward_start: routing.forward_start,
                        host: counts.host,
                        tag: counts.tag,
                        num_channels,
                        local_experts,
                        expert_alignment: counts.expert_alignment,
                        row_bytes: payload.row_bytes,
                        columns,
                        reserved: 0,
                    };
                    let (threads, shared) =
                        (InternodeNotify::INFO.max_threads, INTERNODE_NOTIFY_SHARED_BYTES);
                    stream.call(notify, 1, threads, shared, InternodeNotify::call(args))
                }
                _ => Err(other_mode()),
            }
        }
    }

    /// Enqueues the movement of rows.
    ///
    /// # Safety
    /// The addresses in `args` and the handle's block are live until the stream has passed the kernel.
    unsafe fn launch_dispatch(
        &mut self,
        stream: &Stream,
        mut args: DispatchArgs,
        places: &Places,
    ) -> Result<()> {
        let grid = self.config.num_sms;
        self.describe_rows(RowBytes { recv: args.row_bytes as u64, ..self.row_bytes });
        args.comm.trace = trace_place(&mut self.trace, "dispatch", grid);
        let (ring, _) = self.kernels.dispatch_ring(args.row_bytes, args.num_scales, args.num_topk, grid);
        // SAFETY: passed on to the caller.
        unsafe {
            match (&self.kernels.mode, places.routing, &self.wire) {
                (ModeKernels::Intranode { dispatch, .. }, Routing::Intranode(_), _) => {
                    stream.call(dispatch, grid, ring.threads(), ring.shared_bytes(), Dispatch::call(args))
                }
                (ModeKernels::Internode { dispatch, .. }, Routing::Internode(routing), Some(side)) => {
                    let num_topk = (args.with_metadata != 0).then_some(args.num_topk);
                    let args = InternodeDispatchArgs {
                        dispatch: args,
                        wire: side.wire,
                        route: routing.route,
                        send_head: places.send_head,
                        forward_start: routing.forward_start,
                        send_nvl_head: routing.send_nvl_head,
                        slot_bytes: SlotShape::new(args.row_bytes, args.num_scales, num_topk).bytes,
                        reserved: 0,
                    };
                    let (block, shared) = (ring.threads() + 32, ring.shared_bytes() + PROGRESS_BYTES);
                    stream.call(dispatch, grid, block, shared, InternodeDispatch::call(args))
                }
                _ => Err(other_mode()),
            }
        }
    }

    fn recv_scales(&self, payload: &Payload, rows: u64) -> Option<Tensor> {
        let offset = self.comm.pool.recv_scales;
        match (payload.scales.is_null(), payload.scales_one_dimensional) {
            (true, _) => None,
            (false, true) => Some(self.pool_tensor(offset, DType::F32, &[rows])),
            (false, false) => Some(self.pool_tensor(offset, DType::F32, &[rows, payload.num_scales as u64])),
        }
    }

    /// The host's copy of the expert counts; valid once `wait_counts` has returned.
    fn expert_counts(&self, local_experts: u32) -> Result<Vec<u32>> {
        self.host_counts.read_all(HOST_EXPERTS, local_experts)
    }
}

/// `capacity`: rows that the dispatch had room for.
fn check_status_then_plan(buffer: &Buffer, header: &PlanHeader, capacity: u64) -> Result<()> {
    buffer.check()?;
    check_plan(header, buffer, capacity)
}
