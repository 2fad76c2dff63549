//! The state of a dispatch, for combines and cached dispatches.

use std::sync::{Arc, OnceLock};

use epoxide_gpu::layout::{
    DevicePtr, PLAN_HEADER, PlanHeader, Route, SEND_LIST_STRIDE, SEND_ROW_STRIDE, Section,
};

use super::TypedTensor;
use super::fault::Plans;
use super::kernels::Spread;
use crate::driver::{Outcome, Stream};
use crate::ep::ExpertRows;
use crate::ep::core::{Block, Pieces};
use crate::error::Result;

/// The routing of one dispatch. It can feed any number of combines and cached dispatches of the
/// same buffer, forward and backward; nothing rewrites it. Cheap to clone.
///
/// The documentation of each matrix names its side: the *sender* owns tokens before dispatch and
/// gets the sums in combine, the *receiver* runs the experts.
#[derive(Debug, Clone)]
pub struct DispatchHandle(pub(super) Arc<HandleState>);

#[derive(Debug)]
pub struct HandleState {
    pub buffer_id: u64,
    pub block: Arc<Block>,
    pub tables: HandleTables,
    /// The place of the received rows.
    pub place: u32,
    pub num_tokens: u32,
    pub num_ranks: u32,
    pub num_nodes: u32,
    pub num_channels: u32,
    pub local_experts: u32,
    pub num_topk: Option<u32>,
    /// The weights that travelled, or null.
    pub topk_weights: DevicePtr,
    /// Rows that the dispatch had room for.
    pub capacity: u64,
    /// Rows received, once the host has read the count.
    pub num_recv_tokens: OnceLock<u32>,
    /// Tokens relayed, once the host has read the count.
    pub num_rdma_recv_tokens: OnceLock<u32>,
    /// The failed plans of its buffer, and its other faults.
    pub plans: Arc<Plans>,
    /// Plans that had failed before this one was made.
    pub failed_before: u64,
}

impl Outcome for HandleState {
    /// The buffer's fault. Where the host did not wait for the counts, the plan's as well.
    fn report(&self) -> Result<()> {
        self.plans.faults().check()?;
        if self.num_recv_tokens.get().is_some() || self.plans.failed()? == self.failed_before {
            return Ok(());
        }
        // The plan was made before the event. A stream of its own waits for no other work.
        let stream = Stream::new(self.plans.faults().device())?;
        self.plans.check_plan(&self.header(&stream)?, self.capacity)
    }

    fn order_before(&self, stream: &Stream) -> Result<()> {
        self.plans.faults().order_before(stream)
    }

    fn owns_memory(&self) -> bool {
        true
    }

    fn check_behind(&self, stream: &Stream) -> Result<()> {
        self.plans.faults().check()?;
        if self.num_recv_tokens.get().is_some() {
            return Ok(());
        }
        self.plans.check_plan(&self.header(stream)?, self.capacity)
    }
}

/// The addresses of the parts of a handle's block.
#[derive(Debug, Clone)]
pub struct HandleTables {
    pub header: DevicePtr,
    pub send_head: DevicePtr,
    pub num_recv_tokens_per_expert: DevicePtr,
    pub by_expert: Option<ExpertTables>,
    pub routing: Routing,
}

/// The parts of a dispatch of rows by expert.
#[derive(Debug, Clone, Copy)]
pub struct ExpertTables {
    /// The header of the count exchange, behind which the plan is made.
    pub exchange: DevicePtr,
    pub numbers: DevicePtr,
    pub expert_counts: DevicePtr,
    pub expert_starts: DevicePtr,
    pub psum_expert: DevicePtr,
    /// Entries per token.
    pub num_topk: u32,
}

/// The parts that depend on whether there are several nodes, and the kernels that read them.
pub type Routing = Spread<IntranodeTables, InternodeTables>;

#[derive(Debug, Clone, Copy)]
pub struct IntranodeTables {
    pub rank_prefix_matrix: DevicePtr,
    pub channel_prefix_matrix: DevicePtr,
    pub recv_channel_prefix_matrix: DevicePtr,
    pub send_row: DevicePtr,
}

#[derive(Debug, Clone, Copy)]
pub struct InternodeTables {
    pub route: Route,
    pub recv_gbl_channel_prefix_matrix: DevicePtr,
    pub channel_counts: DevicePtr,
    pub forward_start: DevicePtr,
    pub by_expert: Option<InternodeExpertTables>,
}

/// The parts of a dispatch of rows by expert across nodes.
#[derive(Debug, Clone, Copy)]
pub struct InternodeExpertTables {
    /// The destinations of entries on this node.
    pub send_row: DevicePtr,
    pub bases: DevicePtr,
    /// Null if no weights are sent.
    pub forward_weights: DevicePtr,
}

/// The sizes that a handle's block must have room for.
#[derive(Debug, Clone, Copy)]
pub struct HandleShape {
    pub ranks: u32,
    pub nodes: u32,
    pub channels: u32,
    pub tokens: u32,
    pub local_experts: u32,
    /// Slots of wire memory for each node; 0 with one node.
    pub slots: u64,
    /// Entries per token, in a dispatch of rows by expert.
    pub by_expert: Option<u32>,
    /// Whether weights are sent.
    pub is_weighted: bool,
}

impl HandleTables {
    /// Reserves the parts of a handle of a buffer of this mode.
    pub fn lay_out(pieces: &mut Pieces, mode: &Spread<(), ()>, shape: HandleShape) -> HandleTables {
        let HandleShape { ranks, nodes, channels, tokens, local_experts, by_expert, is_weighted, .. } = shape;
        let [ranks, nodes, channels, tokens, experts] =
            [ranks, nodes, channels, tokens, local_experts].map(u64::from);
        let header = |name| Section::one(name, size_of::<PlanHeader>() as u64).of(PLAN_HEADER);
        HandleTables {
            header: pieces.push(header("header")),
            send_head: pieces.array("send_head", tokens * ranks, 4),
            num_recv_tokens_per_expert: pieces.array("num_recv_tokens_per_expert", experts, 4),
            by_expert: by_expert.map(|num_topk| ExpertTables {
                exchange: pieces.push(header("exchange")),
                numbers: pieces.array("numbers", tokens * u64::from(num_topk), 4),
                expert_counts: pieces.array("expert_counts", experts, 4),
                expert_starts: pieces.array("expert_starts", experts + 1, 4),
                psum_expert: pieces.array("psum_expert", experts + 1, 4),
                num_topk,
            }),
            routing: match mode {
                Spread::OneNode(kernels, ()) => {
                    let is_list = kernels.is_many || by_expert.is_some();
                    // A list's entry has two words.
                    let words = if is_list { 2 * SEND_LIST_STRIDE } else { SEND_ROW_STRIDE };
                    let tables = IntranodeTables {
                        rank_prefix_matrix: pieces.array("rank_prefix_matrix", ranks * ranks, 4),
                        channel_prefix_matrix: pieces.array("channel_prefix_matrix", ranks * channels, 4),
                        recv_channel_prefix_matrix: pieces.array(
                            "recv_channel_prefix_matrix",
                            ranks * channels,
                            4,
                        ),
                        send_row: pieces.array("send_row", tokens * u64::from(words), 4),
                    };
                    Spread::OneNode(kernels.clone(), tables)
                }
                Spread::SeveralNodes(kernels, ()) => {
                    // Most tokens that this rank relays.
                    let relayed = shape.slots * nodes;
                    let row = u64::from(SEND_ROW_STRIDE);
                    // By expert a relayed token has a list, whose entries have two words.
                    let list = u64::from(2 * SEND_LIST_STRIDE);
                    let mut matrix = |name, count| pieces.array(name, count, 4);
                    let route = Route {
                        send_rdma_head: matrix("send_rdma_head", tokens * nodes),
                        rdma_channel_prefix_matrix: matrix("rdma_channel_prefix_matrix", nodes * channels),
                        recv_rdma_channel_prefix_matrix: matrix(
                            "recv_rdma_channel_prefix_matrix",
                            nodes * channels,
                        ),
                        recv_rdma_rank_prefix_sum: matrix("recv_rdma_rank_prefix_sum", nodes),
                        forward_row: matrix(
                            "forward_row",
                            relayed * if by_expert.is_some() { list } else { row },
                        ),
                        num_channels: shape.channels,
                        reserved: 0,
                    };
                    let tables = InternodeTables {
                        route,
                        recv_gbl_channel_prefix_matrix: matrix(
                            "recv_gbl_channel_prefix_matrix",
                            ranks * channels,
                        ),
                        channel_counts: matrix("channel_counts", channels * (ranks + nodes)),
                        forward_start: matrix("forward_start", nodes * channels * row),
                        by_expert: by_expert.map(|num_topk| InternodeExpertTables {
                            send_row: matrix("send_row", tokens * list),
                            bases: matrix("bases", ranks * experts),
                            forward_weights: if is_weighted {
                                matrix("forward_weights", relayed * u64::from(num_topk))
                            } else {
                                DevicePtr::NULL
                            },
                        }),
                    };
                    Spread::SeveralNodes(kernels.clone(), tables)
                }
            },
        }
    }
}

impl HandleState {
    /// The plan's header, read behind all work enqueued on `stream`. Waits for that.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn header(&self, stream: &Stream) -> Result<PlanHeader> {
        let mut header = PlanHeader::default();
        // SAFETY: the block holds the header, and lives as long as this.
        unsafe { stream.read(bytemuck::bytes_of_mut(&mut header), self.tables.header)? };
        Ok(header)
    }

    /// Rows of a dispatch's outputs: the received rows, or without a count on the host, the room
    /// for rows.
    pub fn output_rows(&self) -> u64 {
        self.num_recv_tokens.get().map_or(self.capacity, |&rows| rows as u64)
    }
}

impl DispatchHandle {
    /// The matrices of a dispatch within one node; `None` across nodes.
    pub fn intranode(&self) -> Option<IntranodeHandle<'_>> {
        match self.0.tables.routing {
            Spread::OneNode(_, tables) => Some(IntranodeHandle { handle: self, tables }),
            Spread::SeveralNodes(..) => None,
        }
    }

    /// The matrices of a dispatch across nodes; `None` within one.
    pub fn internode(&self) -> Option<InternodeHandle<'_>> {
        match self.0.tables.routing {
            Spread::SeveralNodes(_, tables) => Some(InternodeHandle { handle: self, tables }),
            Spread::OneNode(..) => None,
        }
    }

    /// Sender side, i32 `[num_tokens, num_ranks]`: the token's sequence number among those of its
    /// channel for that rank, or -1.
    pub fn send_head(&self) -> TypedTensor<'static, i32> {
        self.matrix("send_head", self.0.tables.send_head, self.0.num_tokens, self.0.num_ranks)
    }

    /// Receiver side, i32 `[num_experts / num_ranks]`, on the device: selections of each local
    /// expert, each rounded up to the expert alignment.
    pub fn num_recv_tokens_per_expert(&self) -> TypedTensor<'static, i32> {
        self.tensor(
            "num_recv_tokens_per_expert",
            self.0.tables.num_recv_tokens_per_expert,
            &[self.0.local_experts as u64],
        )
    }

    /// Receiver side: where the rows of each local expert are; `None` unless the dispatch was one
    /// of rows by expert.
    pub fn by_expert(&self) -> Option<ExpertRows<'static>> {
        self.0.tables.by_expert.map(|tables| {
            let ptrs = [tables.expert_counts, tables.expert_starts, tables.psum_expert];
            ExpertRows::new(ptrs, self.0.local_experts, |name, ptr, shape| self.tensor(name, ptr, shape))
        })
    }

    /// Receiver side, i32 `[1]`, on the device: rows received. For rows by expert: the rows of all
    /// segments, padding included.
    pub fn num_recv_tokens_on_device(&self) -> TypedTensor<'static, i32> {
        let header = self.0.tables.header;
        self.tensor(
            "num_recv_tokens_on_device",
            header.add(std::mem::offset_of!(PlanHeader, num_recv_tokens) as u64),
            &[1],
        )
    }

    /// Rows received; rows by expert count with their padding. It returns at once if the dispatch
    /// was exact-size. Otherwise it first synchronises `stream`, on which the dispatch ran or which
    /// waited for it.
    ///
    /// # Errors
    /// Those of [`Buffer::check_dispatch`](super::Buffer::check_dispatch).
    pub fn num_recv_tokens(&self, stream: &Stream) -> Result<u32> {
        if let Some(&known) = self.0.num_recv_tokens.get() {
            return Ok(known);
        }
        let count = self.num_recv_tokens_on_device().to_host::<i32>(stream)?[0] as u32;
        Ok(count)
    }

    /// Tokens that this rank sent.
    pub fn num_tokens(&self) -> u32 {
        self.0.num_tokens
    }

    /// Channels that tokens were cut into.
    pub fn num_channels(&self) -> u32 {
        self.0.num_channels
    }

    fn matrix(
        &self,
        name: &'static str,
        ptr: DevicePtr,
        rows: u32,
        columns: u32,
    ) -> TypedTensor<'static, i32> {
        self.tensor(name, ptr, &[rows as u64, columns as u64])
    }

    fn tensor(&self, name: &'static str, ptr: DevicePtr, shape: &[u64]) -> TypedTensor<'static, i32> {
        TypedTensor::in_memory(ptr, shape, self.0.block.clone()).result(name, &self.0)
    }
}

/// The matrices of a dispatch within one node.
#[derive(Debug, Clone, Copy)]
pub struct IntranodeHandle<'a> {
    handle: &'a DispatchHandle,
    tables: IntranodeTables,
}

impl IntranodeHandle<'_> {
    pub(super) fn handle(&self) -> &DispatchHandle {
        self.handle
    }

    /// i32 `[num_ranks, num_ranks]`, the same on all ranks: `[i][j]` = tokens from ranks up to and
    /// with i to rank j.
    pub fn rank_prefix_matrix(&self) -> TypedTensor<'static, i32> {
        let ranks = self.handle.0.num_ranks;
        self.handle.matrix("rank_prefix_matrix", self.tables.rank_prefix_matrix, ranks, ranks)
    }

    /// Sender side, i32 `[num_ranks, num_channels]`: tokens for each destination rank in channels
    /// up to and with c.
    pub fn channel_prefix_matrix(&self) -> TypedTensor<'static, i32> {
        let handle = self.handle;
        handle.matrix(
            "channel_prefix_matrix",
            self.tables.channel_prefix_matrix,
            handle.0.num_ranks,
            handle.0.num_channels,
        )
    }

    /// Receiver side, i32 `[num_ranks, num_channels]`: an exclusive prefix sum. It is the first row
    /// of channel c of source rank r, relative to the block of rows of that source.
    pub fn recv_channel_prefix_matrix(&self) -> TypedTensor<'static, i32> {
        let handle = self.handle;
        handle.matrix(
            "recv_channel_prefix_matrix",
            self.tables.recv_channel_prefix_matrix,
            handle.0.num_ranks,
            handle.0.num_channels,
        )
    }
}

/// The matrices of a dispatch across nodes. The *forwarder* is the rank with the sender's index on
/// the token's destination node. It relays the token to the ranks of its node. `num_nodes` are the
/// "RDMA ranks" of the interface that the names come from.
///
/// No kernel needs the quantities that take a stream: the host computes them, row by row, from
/// those on the device. It waits for the stream, on which the dispatch ran or which waited for it.
#[derive(Debug, Clone, Copy)]
pub struct InternodeHandle<'a> {
    handle: &'a DispatchHandle,
    tables: InternodeTables,
}

impl InternodeHandle<'_> {
    /// Sender side, i32 `[num_nodes, num_channels]`: tokens for each node in channels up to and
    /// with c, each token once per node.
    pub fn rdma_channel_prefix_matrix(&self) -> TypedTensor<'static, i32> {
        self.by_node("rdma_channel_prefix_matrix", self.tables.route.rdma_channel_prefix_matrix)
    }

    /// Sender side, `[num_ranks, num_channels]`: tokens for each rank in channels up to and with c.
    ///
    /// # Errors
    /// Those of [`Tensor::to_host`](crate::Tensor::to_host).
    pub fn gbl_channel_prefix_matrix(&self, stream: &Stream) -> Result<Vec<i32>> {
        let (ranks, channels) = (self.handle.0.num_ranks, self.handle.0.num_channels);
        // Behind the counts of a channel's tokens by rank are those by node.
        let columns = ranks + self.num_nodes();
        let counts = self.handle.matrix("channel_counts", self.tables.channel_counts, channels, columns);
        let counts = counts.values(stream)?;
        let up_to = |rank: usize| {
            counts[rank..].iter().step_by(columns as usize).scan(0, |total, count| {
                *total += count;
                Some(*total)
            })
        };
        Ok((0..ranks as usize).flat_map(up_to).collect())
    }

    /// Forwarder side, i32 `[num_nodes, num_channels]`: tokens that this rank relays from each
    /// node, in channels up to and with c.
    pub fn recv_rdma_channel_prefix_matrix(&self) -> TypedTensor<'static, i32> {
        self.by_node("recv_rdma_channel_prefix_matrix", self.tables.route.recv_rdma_channel_prefix_matrix)
    }

    /// Forwarder side, i32 `[num_nodes]`: tokens that this rank relays from nodes up to and with n.
    pub fn recv_rdma_rank_prefix_sum(&self) -> TypedTensor<'static, i32> {
        let nodes = self.num_nodes() as u64;
        self.handle.tensor("recv_rdma_rank_prefix_sum", self.tables.route.recv_rdma_rank_prefix_sum, &[nodes])
    }

    /// Receiver side, i32 `[num_ranks, num_channels]`: the row of `recv_x` where channel c of a
    /// source rank starts.
    pub fn recv_gbl_channel_prefix_matrix(&self) -> TypedTensor<'static, i32> {
        self.by_rank("recv_gbl_channel_prefix_matrix", self.tables.recv_gbl_channel_prefix_matrix)
    }

    /// Receiver side, `[num_ranks]`: rows received from ranks up to and with r.
    ///
    /// # Errors
    /// Those of [`Tensor::to_host`](crate::Tensor::to_host).
    pub fn recv_gbl_rank_prefix_sum(&self, stream: &Stream) -> Result<Vec<i32>> {
        let starts = self.recv_gbl_channel_prefix_matrix().values(stream)?;
        let behind = starts.into_iter().step_by(self.handle.0.num_channels as usize).skip(1);
        Ok(behind.chain([self.handle.num_recv_tokens(stream)? as i32]).collect())
    }

    /// Sender side, i32 `[num_tokens, num_nodes]`: the token's sequence number among those of its
    /// channel for that node, or -1.
    pub fn send_rdma_head(&self) -> TypedTensor<'static, i32> {
        let tokens = self.handle.0.num_tokens;
        self.handle.matrix("send_rdma_head", self.tables.route.send_rdma_head, tokens, self.num_nodes())
    }

    /// Forwarder side, `[num_rdma_recv_tokens, ranks_per_node]`: sequence numbers of the tokens
    /// that this rank relays (by source node, then in the source's order). An entry numbers the
    /// token in the (channel, source node) stream to a rank of this node, or is -1.
    ///
    /// # Errors
    /// Those of [`Tensor::to_host`](crate::Tensor::to_host).
    pub fn send_nvl_head(&self, stream: &Stream) -> Result<Vec<i32>> {
        let (tokens, per_node) =
            (self.num_rdma_recv_tokens(stream)?, (self.handle.0.num_ranks / self.num_nodes()) as usize);
        let (at, by_expert) = (self.tables.route.forward_row, self.tables.by_expert.is_some());
        let columns = if by_expert { 2 * SEND_LIST_STRIDE } else { SEND_ROW_STRIDE };
        let mut rows = self.handle.matrix("forward_row", at, tokens, columns).values(stream)?;
        if by_expert {
            // A list's entry is a row and a rank; any row of the token stands for it.
            let row_at = |list: &[i32]| {
                let mut rows = [-1; SEND_ROW_STRIDE as usize];
                for entry in list.chunks_exact(2).filter(|entry| entry[0] >= 0) {
                    rows[entry[1] as usize] = entry[0];
                }
                rows
            };
            rows = rows.chunks_exact(columns as usize).flat_map(row_at).collect();
        }
        let ends = self.recv_rdma_channel_prefix_matrix().values(stream)?;
        let mut tokens = rows.chunks_exact(SEND_ROW_STRIDE as usize);
        let mut heads = Vec::with_capacity(tokens.len() * per_node);
        for ends in ends.chunks_exact(self.handle.0.num_channels as usize) {
            let mut start = 0;
            for end in ends {
                let mut next = vec![0; per_node];
                for rows in tokens.by_ref().take((end - start) as usize) {
                    let number = |(row, next): (&i32, &mut i32)| match row {
                        -1 => -1,
                        _ => std::mem::replace(next, *next + 1),
                    };
                    heads.extend(rows.iter().zip(&mut next).map(number));
                }
                start = *end;
            }
        }
        Ok(heads)
    }

    /// Tokens that this rank relays, its own ones for its own node included. It returns at once if
    /// the dispatch was exact-size. Otherwise it first synchronises `stream`, on which the dispatch
    /// ran or which waited for it.
    ///
    /// # Errors
    /// Those of [`Buffer::check_dispatch`](super::Buffer::check_dispatch).
    pub fn num_rdma_recv_tokens(&self, stream: &Stream) -> Result<u32> {
        if let Some(&known) = self.handle.0.num_rdma_recv_tokens.get() {
            return Ok(known);
        }
        let at = std::mem::offset_of!(PlanHeader, num_rdma_recv_tokens) as u64;
        let count = self.handle.tensor("num_rdma_recv_tokens", self.handle.0.tables.header.add(at), &[1]);
        Ok(count.to_host::<i32>(stream)?[0] as u32)
    }

    fn num_nodes(&self) -> u32 {
        self.handle.0.num_nodes
    }

    fn by_node(&self, name: &'static str, ptr: DevicePtr) -> TypedTensor<'static, i32> {
        self.handle.matrix(name, ptr, self.num_nodes(), self.handle.0.num_channels)
    }

    fn by_rank(&self, name: &'static str, ptr: DevicePtr) -> TypedTensor<'static, i32> {
        self.handle.matrix(name, ptr, self.handle.0.num_ranks, self.handle.0.num_channels)
    }
}
