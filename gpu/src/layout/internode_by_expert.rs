//! Rows by expert across nodes: the argument structs of their kernels, and the packets by which
//! receivers give their first rows to the ranks that relay.

use bytemuck::{Pod, Zeroable};
use epoxide_simt::kernel_args;

use super::args::{ExpertPlanArgs, InternodeCombineArgs, InternodeDispatchArgs};
use super::assert::layout_assert;
use super::device_ptr::DevicePtr;
use super::limits::{FEW_RANKS, MAX_LOCAL_EXPERTS, MAX_TOPK};
use super::wire::{MAX_NODES, Wire, relay_message};

/// Packets from a rank of a node to one that relays there, for each source node: `epoch << 32 |
/// value`, behind the relayed count messages of the pool, `[num_nodes, ranks of a node][WORDS]` by
/// the source node and the receiver. These are their indices.
pub mod expert_message {
    use super::*;

    /// The receiver's first row for each of its experts of the rows of the rank on the source node
    /// that has the relaying rank's index, `[MAX_LOCAL_EXPERTS]`.
    pub const STARTS: u32 = 0;
    /// In the message of the own node: rows of all segments of the receiver, padding included.
    pub const ROWS: u32 = STARTS + MAX_LOCAL_EXPERTS;
    /// Packets per message.
    pub const WORDS: u32 = ROWS + 1;
}

/// Offset of packet `word` of the message from `receiver` for rows of node `source`, in bytes from
/// [`super::PoolLayout::messages`].
#[inline(always)]
pub const fn expert_message_offset(
    num_nodes: u32,
    per_node: u32,
    source: u32,
    receiver: u32,
    word: u32,
) -> u64 {
    let relayed = (num_nodes * per_node) as u64 * relay_message::WORDS as u64;
    let message = (source * per_node + receiver) as u64;
    (relayed + message * expert_message::WORDS as u64 + word as u64) * 8
}

/// Offset of the records of copies in a pool of several nodes with rows by expert, in bytes from
/// [`super::PoolLayout::messages`]: u64 `[ranks of a node][num_nodes][num_channels]
/// [copy_records_of_channel][max_topk]`, by the rank that writes tokens here and the node that they
/// come from.
#[inline(always)]
pub const fn internode_copies_offset(num_nodes: u32, per_node: u32) -> u64 {
    expert_message_offset(num_nodes, per_node, num_nodes, 0, 0)
}

/// Offset of the word that publishes a node's verdict, behind [`super::WireLayout::counts`] of the node:
/// the epoch of a plan that the node has judged.
pub const JUDGED: u64 = 8;
/// Offset of the word in front of it there: `rank << 32 | rows` of the first rank of the node that
/// has no room for its rows, else 0.
pub const CROWDED: u64 = 16;

/// Arguments of `internode_plan_by_expert`.
#[kernel_args(requires(
    self.plan.comm.num_ranks <= FEW_RANKS as u32,
    self.wire.num_nodes <= MAX_NODES as u32,
))]
pub struct InternodeExpertPlanArgs {
    /// The ranks of this node, and what a plan within a node has too. `send_row` has the rows at
    /// ranks of this node, by their index there.
    pub plan: ExpertPlanArgs,
    /// The other nodes.
    pub wire: Wire,
    /// Out, forwarder side: u32 `[num_nodes, ranks of a node, local_experts]`, first row at each
    /// expert of this node of the rows that this rank relays from each node.
    pub bases: DevicePtr,
}

layout_assert!(InternodeExpertPlanArgs, size = size_of::<ExpertPlanArgs>() + 128, bases at size_of::<ExpertPlanArgs>() + 120);

/// The tables of rows by expert that a dispatch across nodes reads and writes, in addition to those
/// of [`super::Route`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct ExpertRoute {
    /// In, of `number_selections`: u32 `[num_tokens, num_topk]`.
    pub numbers: DevicePtr,
    /// In, of `internode_plan_by_expert`.
    pub bases: DevicePtr,
    /// Out, or null: the weights of the relayed tokens' entries, f32
    /// `[num_rdma_recv_tokens, num_topk]`.
    pub forward_weights: DevicePtr,
}

impl ExpertRoute {
    /// Stands for none, where rows are not by expert.
    pub const NONE: ExpertRoute =
        ExpertRoute { numbers: DevicePtr::NULL, bases: DevicePtr::NULL, forward_weights: DevicePtr::NULL };
}

layout_assert!(ExpertRoute, size = 24, forward_weights at 16);

/// Arguments of `internode_dispatch_by_expert`.
#[kernel_args(requires(
    self.rows.dispatch.num_tokens <= self.max_tokens,
    self.copy_warps >= 1 || self.rows.dispatch.comm.num_ranks <= 1,
    self.copy_words >= 1,
    self.copy_words <= MAX_TOPK,
))]
pub struct InternodeExpertDispatchArgs {
    /// Rows, nodes and routing. `send_row` has the rows at ranks of this node; `route.forward_row`
    /// is i64 `[num_rdma_recv_tokens, SEND_LIST_STRIDE]`, where entry k of a relayed token goes as
    /// `rank << 32 | row`, or -1.
    pub rows: InternodeDispatchArgs,
    /// The tables of rows by expert.
    pub by_expert: ExpertRoute,
    /// Tokens of a rank that the pool has records of copies for.
    pub max_tokens: u32,
    /// Words of such a record.
    pub copy_words: u32,
    /// Last warps of a block, which copy rows; 0 where a node has one rank.
    pub copy_warps: u32,
    /// Zero.
    pub reserved: u32,
}

layout_assert!(InternodeExpertDispatchArgs, size = size_of::<InternodeDispatchArgs>() + 40, by_expert at size_of::<InternodeDispatchArgs>());

/// Arguments of `internode_combine_by_expert`.
#[kernel_args]
pub struct InternodeExpertCombineArgs {
    /// Rows, nodes and routing; `send_row` of its rows is the list that the dispatch has left in
    /// `route.forward_row`.
    pub rows: InternodeCombineArgs,
    /// In, or null for 1: [`ExpertRoute::forward_weights`].
    pub weights: DevicePtr,
    /// Entries per token.
    pub num_topk: u64,
}

layout_assert!(InternodeExpertCombineArgs, size = size_of::<InternodeCombineArgs>() + 16, num_topk at size_of::<InternodeCombineArgs>() + 8);
