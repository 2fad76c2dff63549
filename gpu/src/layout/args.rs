//! One argument struct per kernel of the library; those of the example are in a file of their own.

use bytemuck::{Pod, Zeroable};
use epoxide_simt::{Global, kernel_args};

use super::assert::layout_assert;
use super::device_ptr::DevicePtr;
use super::experts::ExpertTable;
use super::limits::{
    FEW_RANKS, MAX_CHANNELS, MAX_FIXED_TOKENS, MAX_LOCAL_EXPERTS, MAX_RANKS, MAX_SLOT_BYTES, MAX_TOPK,
    MAX_WAITED_SLOT_BYTES, bulk_scale_bytes,
};
use super::pool::Comm;
use super::wire::{MAX_NODES, MAX_WORLD, Wire, combine_slot_bytes};

/// Arguments of `dispatch_layout`.
#[kernel_args(requires(
    self.num_topk >= 1,
    self.num_topk <= MAX_TOPK,
    self.num_ranks >= 1,
    self.num_ranks <= MAX_WORLD as u32,
    self.ranks_per_node >= 1,
    self.num_ranks.is_multiple_of(self.ranks_per_node),
    self.num_ranks / self.ranks_per_node <= MAX_NODES as u32,
    self.num_experts >= self.num_ranks,
    self.num_experts.is_multiple_of(self.num_ranks),
))]
pub struct LayoutArgs {
    /// In: expert ids or -1, i64 or i32 `[num_tokens, num_topk]`.
    pub topk_idx: DevicePtr,
    /// Where the experts are.
    pub table: ExpertTable,
    /// Out, or null: the physical experts of the ids, or -1, i32 `[num_tokens, num_topk]`.
    pub physical: DevicePtr,
    /// Out, zero before: u32 `[num_ranks]`.
    pub num_tokens_per_rank: DevicePtr,
    /// Out, zero before, or null with one node: u32 `[num_nodes]`.
    pub num_tokens_per_rdma_rank: DevicePtr,
    /// Out, zero before: u32 `[num_experts]`.
    pub num_tokens_per_expert: DevicePtr,
    /// Out: 0 or 1, u8 `[num_tokens, num_ranks]`.
    pub is_token_in_rank: DevicePtr,
    /// Out, all ones before: the lowest `token << 8 | k` whose id is out of range, u64.
    pub invalid: DevicePtr,
    /// Tokens of this rank.
    pub num_tokens: u32,
    /// Entries per token.
    pub num_topk: u32,
    /// Physical experts of all ranks.
    pub num_experts: u32,
    /// Ranks of all nodes.
    pub num_ranks: u32,
    /// Ranks of a node.
    pub ranks_per_node: u32,
    /// This rank, of all nodes.
    pub rank: u32,
    /// 1 where ids are i32.
    pub narrow_ids: u32,
    /// Zero.
    pub reserved: u32,
}

layout_assert!(LayoutArgs, size = 104, reserved at 100);

/// Arguments of `notify`.
#[kernel_args(requires(
    self.num_channels >= 1,
    self.num_channels <= MAX_CHANNELS,
    self.comm.num_ranks >= 1,
    self.num_experts >= self.comm.num_ranks,
    self.num_experts.is_multiple_of(self.comm.num_ranks),
    self.num_experts / self.comm.num_ranks <= MAX_LOCAL_EXPERTS,
    self.expert_alignment >= 1,
))]
pub struct NotifyArgs {
    /// The peers.
    pub comm: Comm,
    /// In, of the layout: u8 `[num_tokens, num_ranks]`.
    pub is_token_in_rank: DevicePtr,
    /// In, of the layout: u32 `[num_ranks]`.
    pub num_tokens_per_rank: DevicePtr,
    /// In, of the layout: u32 `[num_experts]`.
    pub num_tokens_per_expert: DevicePtr,
    /// In, of the layout: all ones where every id was in range, u64.
    pub invalid: DevicePtr,
    /// Out: [`super::PlanHeader`].
    pub header: DevicePtr,
    /// Out: i32 `[num_ranks, num_ranks]`, inclusive over source ranks.
    pub rank_prefix_matrix: DevicePtr,
    /// Out, sender side: i32 `[num_ranks, num_channels]`, inclusive over channels.
    pub channel_prefix_matrix: DevicePtr,
    /// Out, receiver side: i32 `[num_ranks, num_channels]`, exclusive, relative to the source's
    /// block.
    pub recv_channel_prefix_matrix: DevicePtr,
    /// Out: i32 `[num_tokens, num_ranks]`, index in the (channel, destination) stream or -1.
    pub send_head: DevicePtr,
    /// Out: i32 `[num_tokens, SEND_ROW_STRIDE]`, row at the destination or -1. With more than
    /// [`FEW_RANKS`](super::FEW_RANKS) ranks: i64 `[num_tokens, SEND_LIST_STRIDE]`, the token's
    /// destinations in ascending order as `rank << 32 | row`, then -1.
    pub send_row: DevicePtr,
    /// Out: u32 `[experts per rank]`, each rounded up to `expert_alignment`.
    pub num_recv_tokens_per_expert: DevicePtr,
    /// Out, mapped host memory or null: [`super::PlanHeader`], then u32 `[experts per rank]` as
    /// above.
    pub host: DevicePtr,
    /// Stored in the host header's `tag` when all of it is written.
    pub tag: u64,
    /// Tokens of this rank.
    pub num_tokens: u32,
    /// Channels; the grid has one block for each.
    pub num_channels: u32,
    /// Experts of all ranks.
    pub num_experts: u32,
    /// Expert counts are rounded up to multiples of this.
    pub expert_alignment: u32,
    /// Bytes per row, a multiple of 16 below 2^24, in the low four bits the code of their elements'
    /// type, and in the high eight bits a hash of the columns' types and sizes; signature word 0.
    pub row_signature: u32,
    /// Signature word 1, as [`super::SIGNATURE_NAMES`] has it.
    pub columns: u32,
}

layout_assert!(NotifyArgs, size = 336, columns at 332);

/// Arguments of `first_tokens`.
#[kernel_args(requires(self.num_topk >= 1, self.num_topk <= MAX_TOPK))]
pub struct FirstTokensArgs {
    /// In: ids, i64 or i32 `[max_tokens, num_topk]`.
    pub topk_idx: DevicePtr,
    /// In: i32 `[1]`, how many of the tokens are there.
    pub num_tokens: Global<i32>,
    /// Out: ids of the same type and shape, -1 for tokens that are not there.
    pub out: DevicePtr,
    /// Tokens of both tensors.
    pub max_tokens: u32,
    /// Entries per token.
    pub num_topk: u32,
    /// 1 where ids are i32.
    pub narrow_ids: u32,
    /// Zero.
    pub reserved: u32,
}

layout_assert!(FirstTokensArgs, size = 40, reserved at 36);

/// Arguments of `add_counts`.
#[kernel_args]
pub struct AddCountsArgs {
    /// The ranks.
    pub comm: Comm,
    /// In: u32 `[len]`.
    pub counts: Global<u32>,
    /// In and out: u32 `[len]`.
    pub cumulative: Global<u32>,
    /// In, or null: the [`super::PlanHeader`] of the dispatch.
    pub header: DevicePtr,
    /// Counts.
    pub len: u64,
}

layout_assert!(AddCountsArgs, size = size_of::<Comm>() + 32, len at size_of::<Comm>() + 24);

/// Arguments of `number_selections`.
#[kernel_args(requires(self.num_topk >= 1, self.num_topk <= MAX_TOPK, self.num_experts >= 1))]
pub struct NumberArgs {
    /// In: ids of physical experts or -1, i64 or i32 `[num_tokens, num_topk]`.
    pub topk_idx: DevicePtr,
    /// Out, where an id selects an expert: u32 `[num_tokens, num_topk]`, selections of the same
    /// expert before this one.
    pub numbers: DevicePtr,
    /// Tokens of this rank.
    pub num_tokens: u32,
    /// Entries per token.
    pub num_topk: u32,
    /// Physical experts of all ranks.
    pub num_experts: u32,
    /// 1 where ids are i32.
    pub narrow_ids: u32,
}

layout_assert!(NumberArgs, size = 32, narrow_ids at 28);

/// Arguments of `plan_by_expert`.
#[kernel_args(requires(
    self.num_topk >= 1,
    self.num_topk <= MAX_TOPK,
    self.local_experts >= 1,
    self.local_experts <= MAX_LOCAL_EXPERTS,
    self.comm.num_ranks >= 1,
    self.comm.num_ranks <= MAX_RANKS as u32,
    self.alignment.is_power_of_two(),
))]
pub struct ExpertPlanArgs {
    /// The peers.
    pub comm: Comm,
    /// In: ids of physical experts or -1, i64 or i32 `[num_tokens, num_topk]`.
    pub topk_idx: DevicePtr,
    /// In, of `number_selections`.
    pub numbers: DevicePtr,
    /// In, of notify: [`super::PlanHeader`] of the count exchange.
    pub exchange: DevicePtr,
    /// Out: [`super::PlanHeader`], with the rows of all segments in place of those received.
    pub header: DevicePtr,
    /// Out: i64 `[num_tokens, SEND_LIST_STRIDE]`, where entry k of a token goes as
    /// `rank << 32 | row`, or -1.
    pub send_row: DevicePtr,
    /// Out: u32 `[local_experts]`, rows of each expert.
    pub expert_counts: DevicePtr,
    /// Out: u32 `[local_experts + 1]`, the first row of each expert's segment; behind them, rows of
    /// all segments.
    pub expert_starts: DevicePtr,
    /// Out: u32 `[local_experts + 1]`, the row behind each expert's last; behind them, rows of all
    /// segments.
    pub psum_expert: DevicePtr,
    /// The counts of `notify`: u32 `[local_experts]`. Out, zeros, where the plan fails.
    pub num_recv_tokens_per_expert: DevicePtr,
    /// Out, mapped host memory or null: [`super::PlanHeader`].
    pub host: DevicePtr,
    /// Stored in the host header's `tag` when all of it is written.
    pub tag: u64,
    /// Tokens of this rank.
    pub num_tokens: u32,
    /// Entries per token.
    pub num_topk: u32,
    /// Experts on each rank.
    pub local_experts: u32,
    /// Segments begin at multiples of this, a power of two.
    pub alignment: u32,
    /// 1 where ids are i32.
    pub narrow_ids: u32,
    /// Zero.
    pub reserved: u32,
}

layout_assert!(ExpertPlanArgs, size = 320, reserved at 316);

/// Arguments of `dispatch`.
#[kernel_args(requires(
    self.row_bytes.is_multiple_of(16),
    self.row_bytes >= 16,
    self.stages >= 2,
    self.piece_bytes.is_multiple_of(16),
    self.piece_bytes >= 16,
    self.stage_bytes.is_multiple_of(128),
    self.stage_bytes >= self.piece_bytes + bulk_scale_bytes(self.num_scales),
    self.local_experts >= 1,
    self.fixed_tokens <= MAX_FIXED_TOKENS,
    self.stages <= self.fixed_tokens.saturating_mul(self.row_bytes.div_ceil(self.piece_bytes)),
))]
pub struct DispatchArgs {
    /// The peers.
    pub comm: Comm,
    /// In: rows of `row_bytes`, `[num_tokens]`, contiguous.
    pub x: DevicePtr,
    /// In, or null: f32 `[num_tokens, num_scales]`, or records of columns of as many words.
    pub scales: DevicePtr,
    /// In, or null: ids of physical experts or -1, i64 or i32 `[num_tokens, num_topk]`.
    pub topk_idx: DevicePtr,
    /// In, or null: f32 `[num_tokens, num_topk]`.
    pub topk_weights: DevicePtr,
    /// In, of notify: rows or lists of the tokens' destinations ([`NotifyArgs::send_row`]).
    pub send_row: DevicePtr,
    /// In, of notify: [`super::PlanHeader`].
    pub header: DevicePtr,
    /// Tokens of this rank.
    pub num_tokens: u32,
    /// Bytes per row, a multiple of 16.
    pub row_bytes: u32,
    /// Scales per row.
    pub num_scales: u32,
    /// Entries per token.
    pub num_topk: u32,
    /// Experts on each rank.
    pub local_experts: u32,
    /// Shared-memory stages per warp, at least 2.
    pub stages: u32,
    /// Bytes of a row that travel together, a multiple of 16.
    pub piece_bytes: u32,
    /// Bytes per stage, a multiple of 128: a piece, and the scales where there are a multiple of 4
    /// of them.
    pub stage_bytes: u32,
    /// 1 where the rows' metadata travels too: not in a cached dispatch.
    pub with_metadata: u32,
    /// First expert of this node: 0 with one node.
    pub first_expert: u32,
    /// Within one node: the last warps of a block, which send metadata while the others move rows,
    /// at least 1. The last one polls for the block.
    pub metadata_warps: u32,
    /// 1 where ids are i32.
    pub narrow_ids: u32,
    /// Within one node: a warp's first tokens, which it does not claim. They fill its stages.
    pub fixed_tokens: u32,
    /// Zero.
    pub reserved: u32,
}

layout_assert!(DispatchArgs, size = 312, fixed_tokens at 304);

/// Arguments of `dispatch_by_expert`, `announce_tokens` and `copy_received_rows`.
#[kernel_args(requires(
    self.dispatch.num_tokens <= self.max_tokens,
    self.copy_words >= 1,
    self.copy_words <= MAX_TOPK,
))]
pub struct ExpertDispatchArgs {
    /// Those of rows and their metadata.
    pub dispatch: DispatchArgs,
    /// Tokens of a rank that the pool has records of copies for.
    pub max_tokens: u32,
    /// Words of such a record.
    pub copy_words: u32,
    /// Warps of a block that copy rows, between those that send rows and those that send metadata.
    /// 0 where `copy_received_rows` copies them behind the dispatch.
    pub copy_warps: u32,
    /// Zero.
    pub reserved: u32,
}

layout_assert!(ExpertDispatchArgs, size = 328, reserved at 324);

/// Arguments of `stage_combine`.
#[kernel_args(requires(self.row_bytes.is_multiple_of(16), self.x_stride.is_multiple_of(16)))]
pub struct StageArgs {
    /// The peers.
    pub comm: Comm,
    /// In, or null: rows of `row_bytes`, `x_stride` bytes apart.
    pub x: DevicePtr,
    /// Bytes from one row of `x` to the next, a multiple of 16.
    pub x_stride: u64,
    /// Out: rows at the pool's stride.
    pub rows: DevicePtr,
    /// In, or null: f32 `[num_recv_tokens, num_topk]`.
    pub weights: DevicePtr,
    /// Out: f32 `[rows, num_topk]`.
    pub weight_rows: DevicePtr,
    /// In: [`super::PlanHeader`], for the number of rows.
    pub header: DevicePtr,
    /// Rows of the tensors.
    pub num_rows: u64,
    /// Bytes per row, a multiple of 16.
    pub row_bytes: u32,
    /// Entries per row.
    pub num_topk: u32,
    /// 1 where peers read the copies. Nothing is copied then once a wait of this rank has expired.
    pub is_for_peers: u32,
    /// Zero.
    pub reserved: u32,
}

layout_assert!(StageArgs, size = 280, reserved at 276);

/// Arguments of `stage_by_expert`.
#[kernel_args(requires(self.local_experts >= 1))]
pub struct ExpertStageArgs {
    /// The rows.
    pub stage: StageArgs,
    /// In: u32 `[local_experts]`, rows of each expert.
    pub expert_counts: DevicePtr,
    /// In: u32 `[local_experts + 1]`, the first row of each expert's segment.
    pub expert_starts: DevicePtr,
    /// Experts on each rank.
    pub local_experts: u64,
}

layout_assert!(ExpertStageArgs, size = size_of::<StageArgs>() + 24, local_experts at size_of::<StageArgs>() + 16);

/// Arguments of `combine_by_expert_bf16`, `combine_by_expert_f16` and `combine_by_expert_f32`.
#[kernel_args]
pub struct ExpertCombineArgs {
    /// Sums, and the ranks.
    pub combine: CombineArgs,
    /// In, or null for 1: the weights of the tokens' entries, f32 `[num_tokens, num_topk]`.
    pub weights: DevicePtr,
    /// Entries per token.
    pub num_topk: u64,
}

layout_assert!(ExpertCombineArgs, size = size_of::<CombineArgs>() + 16, num_topk at size_of::<CombineArgs>() + 8);

/// Arguments of `combine_bf16`, `combine_f16` and `combine_f32`, and of those for many ranks.
#[kernel_args(requires(
    self.row_bytes.is_multiple_of(16),
    self.row_bytes >= 16,
    self.slots >= 2,
    self.slots <= 32,
    self.slot_bytes.is_multiple_of(16),
    self.slot_bytes >= 16,
    self.slot_bytes <= MAX_SLOT_BYTES,
    self.pieces == self.row_bytes.div_ceil(self.slot_bytes),
    self.pieces >= 1,
))]
pub struct CombineArgs {
    /// The peers.
    pub comm: Comm,
    /// Out: rows of `row_bytes`, `[num_tokens]`, contiguous.
    pub combined_x: DevicePtr,
    /// Out, or null: f32 `[num_tokens, num_topk]`.
    pub combined_weights: DevicePtr,
    /// In, of notify: rows or lists of the tokens' destinations ([`NotifyArgs::send_row`]).
    pub send_row: DevicePtr,
    /// In, of notify: [`super::PlanHeader`].
    pub header: DevicePtr,
    /// Tokens of this rank.
    pub num_tokens: u32,
    /// Bytes per row, a multiple of 16.
    pub row_bytes: u32,
    /// Entries per token.
    pub num_topk: u32,
    /// Shared-memory slots per warp, at least 2.
    pub slots: u32,
    /// Bytes per slot, a multiple of 16 and at most 4096; longer rows travel in pieces.
    pub slot_bytes: u32,
    /// Pieces per row: row bytes over slot bytes, rounded up.
    pub pieces: u32,
    /// 1 where what is not summed is to be NaN, [`NAN_BITS`](super::NAN_BITS).
    pub spoils: u32,
    /// Zero.
    pub reserved: u32,
}

layout_assert!(CombineArgs, size = 272, reserved at 268);

/// Arguments of `combine_staged_bf16` and `combine_staged_f32`.
#[kernel_args(requires(
    self.combine.slot_bytes <= MAX_WAITED_SLOT_BYTES,
    self.combine.comm.num_ranks >= 1,
    self.x_stride.is_multiple_of(16),
    self.stagers >= 1,
    self.channels >= 1,
    self.parts >= 1,
    self.channels as u64 * self.parts <= MAX_CHANNELS as u64,
    self.blocks_per_channel >= 1,
    self.step_rows >= 1,
    self.gather_warps >= 1,
))]
pub struct StagedCombineArgs {
    /// Sums, and the ranks.
    pub combine: CombineArgs,
    /// In: rows of `row_bytes`, `x_stride` bytes apart, in the order of the received ones.
    pub x: DevicePtr,
    /// Bytes from one row of `x` to the next, a multiple of 16.
    pub x_stride: u64,
    /// In, or null: f32 `[num_recv_tokens, num_topk]`.
    pub weights: DevicePtr,
    /// In, of notify: i32 `[num_ranks, num_ranks]`, inclusive over source ranks.
    pub rank_prefix_matrix: DevicePtr,
    /// In, of notify, sender side: i32 `[num_ranks, num_channels]`, inclusive over channels.
    pub channel_prefix_matrix: DevicePtr,
    /// In, of notify, receiver side: i32 `[num_ranks, num_channels]`, exclusive, relative to the
    /// source's block.
    pub recv_channel_prefix_matrix: DevicePtr,
    /// Rows of `x`, and of `weights`.
    pub num_rows: u32,
    /// Blocks of the grid that copy; the others gather.
    pub stagers: u32,
    /// Channels of the dispatch that is answered.
    pub channels: u32,
    /// Blocks that gather the rows of a channel together.
    pub blocks_per_channel: u32,
    /// Rows of a channel's first step: a block publishes them after it has copied so many.
    pub step_rows: u32,
    /// Warps of a block that gather; in a block that copies all do.
    pub gather_warps: u32,
    /// Parts of a channel's rows, which are dealt out row by row to blocks that copy. The same on
    /// all ranks.
    pub parts: u64,
}

layout_assert!(StagedCombineArgs, size = 352, parts at 344);

/// Arguments of `ceiling_push` and `ceiling_pull`.
#[kernel_args(requires(
    self.row_bytes.is_multiple_of(16),
    self.fanout >= 1,
    self.fanout < self.num_ranks,
    self.stages >= 2,
))]
pub struct CeilingArgs {
    /// Device table of pool addresses by rank, u64.
    pub pools: Global<u64>,
    /// Offset in a pool of the rows to read, `[rows]` back to back.
    pub from: u64,
    /// Offset in a pool of the rows to write: `[num_ranks * rows]` back to back.
    pub to: u64,
    /// This rank.
    pub rank: u32,
    /// Ranks.
    pub num_ranks: u32,
    /// Rows to read.
    pub rows: u32,
    /// Bytes per row, a multiple of 16.
    pub row_bytes: u32,
    /// Shared-memory stages per warp, each of a row.
    pub stages: u32,
    /// Peers that each row goes to or comes from.
    pub fanout: u32,
}

layout_assert!(CeilingArgs, size = 48, fanout at 44);

/// Arguments of `internode_count`.
#[kernel_args(requires(
    self.num_channels >= 1,
    self.num_channels <= MAX_CHANNELS,
    self.ranks_per_node >= 1,
    self.num_ranks.is_multiple_of(self.ranks_per_node),
    self.num_ranks / self.ranks_per_node <= MAX_NODES as u32,
    self.ranks_per_node <= FEW_RANKS as u32,
))]
pub struct InternodeCountArgs {
    /// In, of the layout: u8 `[num_tokens, num_ranks]`.
    pub is_token_in_rank: DevicePtr,
    /// Out: i32 `[num_tokens, num_ranks]`, index in the (channel, rank) stream or -1.
    pub send_head: DevicePtr,
    /// Out: i32 `[num_tokens, num_nodes]`, index in the (channel, node) stream or -1.
    pub send_rdma_head: DevicePtr,
    /// Out: u32 `[num_channels, num_ranks + num_nodes]`, tokens of the channel for each rank, then
    /// for each node.
    pub channel_counts: DevicePtr,
    /// Tokens of this rank.
    pub num_tokens: u32,
    /// Channels; the grid has one block for each.
    pub num_channels: u32,
    /// Ranks of all nodes.
    pub num_ranks: u32,
    /// Ranks of a node.
    pub ranks_per_node: u32,
}

layout_assert!(InternodeCountArgs, size = 48, ranks_per_node at 44);

/// Arguments of `internode_notify`.
#[kernel_args(requires(
    self.num_channels >= 1,
    self.num_channels <= MAX_CHANNELS,
    self.comm.num_ranks >= 1,
    self.comm.num_ranks <= FEW_RANKS as u32,
    self.local_experts >= 1,
    self.local_experts <= MAX_LOCAL_EXPERTS,
    self.expert_alignment >= 1,
))]
pub struct InternodeNotifyArgs {
    /// The ranks of this node.
    pub comm: Comm,
    /// The other nodes.
    pub wire: Wire,
    /// In, of `internode_count`: u32 `[num_channels, num_ranks + num_nodes]`.
    pub channel_counts: DevicePtr,
    /// In, of the layout: u32 `[num_experts]`.
    pub num_tokens_per_expert: DevicePtr,
    /// In, of the layout: all ones where every id was in range, u64.
    pub invalid: DevicePtr,
    /// Out: [`super::PlanHeader`].
    pub header: DevicePtr,
    /// Out, sender side: i32 `[num_nodes, num_channels]`, inclusive over channels.
    pub rdma_channel_prefix_matrix: DevicePtr,
    /// Out, forwarder side: i32 `[num_nodes, num_channels]`, inclusive over channels.
    pub recv_rdma_channel_prefix_matrix: DevicePtr,
    /// Out, forwarder side: i32 `[num_nodes]`, inclusive over source nodes.
    pub recv_rdma_rank_prefix_sum: DevicePtr,
    /// Out, receiver side: i32 `[num_ranks, num_channels]`, first row of each source rank's
    /// channel.
    pub recv_gbl_channel_prefix_matrix: DevicePtr,
    /// Out: u32 `[experts per rank]`, each rounded up to `expert_alignment`.
    pub num_recv_tokens_per_expert: DevicePtr,
    /// Out, forwarder side: u32 `[num_nodes, num_channels, SEND_ROW_STRIDE]`, first row at each
    /// rank of this node of the tokens that came from a node's channel.
    pub forward_start: DevicePtr,
    /// Out, mapped host memory or null: [`super::PlanHeader`], then u32 `[experts per rank]` as
    /// above.
    pub host: DevicePtr,
    /// Stored in the host header's `tag` when all of it is written.
    pub tag: u64,
    /// Channels.
    pub num_channels: u32,
    /// Experts on each rank.
    pub local_experts: u32,
    /// Expert counts are rounded up to multiples of this.
    pub expert_alignment: u32,
    /// Bytes per row, a multiple of 16 below 2^24, in the low four bits the code of their elements'
    /// type, and in the high eight bits a hash of the columns' types and sizes; signature word 0.
    pub row_signature: u32,
    /// Signature word 1, as [`super::SIGNATURE_NAMES`] has it.
    pub columns: u32,
    /// Zero.
    pub reserved: u32,
}

layout_assert!(InternodeNotifyArgs, size = 448, reserved at 444);

/// Arguments of `internode_dispatch`.
#[kernel_args(requires(
    self.slot_bytes.is_multiple_of(16),
    self.slot_bytes as u64 * self.wire.layout.slots <= self.wire.layout.node_bytes,
    self.dispatch.comm.num_ranks >= 1,
    self.route.num_channels >= 1,
))]
pub struct InternodeDispatchArgs {
    /// Rows, metadata, and the ranks of this node; `send_row` is not used.
    pub dispatch: DispatchArgs,
    /// The other nodes.
    pub wire: Wire,
    /// Where tokens go.
    pub route: Route,
    /// In, of `internode_count`: i32 `[num_tokens, num_ranks]`.
    pub send_head: DevicePtr,
    /// In, of `internode_notify`: u32 `[num_nodes, num_channels, SEND_ROW_STRIDE]`.
    pub forward_start: DevicePtr,
    /// Bytes of a slot, a multiple of 16.
    pub slot_bytes: u32,
    /// Zero.
    pub reserved: u32,
}

layout_assert!(InternodeDispatchArgs, size = 504, reserved at 500);

/// The routing that a dispatch across nodes leaves for combine and cached dispatches: the sender's
/// and the receiver's side.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Route {
    /// Sender side, of `internode_count`: i32 `[num_tokens, num_nodes]`, index in the (channel,
    /// node) stream or -1.
    pub send_rdma_head: DevicePtr,
    /// Sender side: i32 `[num_nodes, num_channels]`, inclusive over channels.
    pub rdma_channel_prefix_matrix: DevicePtr,
    /// Forwarder side: i32 `[num_nodes, num_channels]`, inclusive over channels.
    pub recv_rdma_channel_prefix_matrix: DevicePtr,
    /// Forwarder side: i32 `[num_nodes]`, inclusive over source nodes.
    pub recv_rdma_rank_prefix_sum: DevicePtr,
    /// Forwarder side: i32 `[num_rdma_recv_tokens, SEND_ROW_STRIDE]`, row of a relayed token at
    /// each rank of this node, or -1. Out of an uncached dispatch, in otherwise.
    pub forward_row: DevicePtr,
    /// Channels; the grid has two blocks for each.
    pub num_channels: u32,
    /// Zero.
    pub reserved: u32,
}

layout_assert!(Route, size = 48, reserved at 44);

/// Arguments of `internode_combine`.
#[kernel_args(requires(
    self.slot_bytes >= combine_slot_bytes(self.combine.row_bytes, self.combine.num_topk),
    self.slot_bytes.is_multiple_of(16),
    self.slot_bytes as u64 * self.wire.layout.slots <= self.wire.layout.node_bytes,
    self.combine.comm.num_ranks >= 1,
    self.route.num_channels >= 1,
))]
pub struct InternodeCombineArgs {
    /// Rows, sums, and the ranks of this node; `send_row` is not used.
    pub combine: CombineArgs,
    /// The other nodes.
    pub wire: Wire,
    /// Where tokens went.
    pub route: Route,
    /// Bytes of a slot, a multiple of 16.
    pub slot_bytes: u32,
    /// Zero.
    pub reserved: u32,
}

layout_assert!(InternodeCombineArgs, size = 448, reserved at 444);
