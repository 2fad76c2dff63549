//! Traffic across nodes: a rank's wire memory, the queues to its peers, and the requests in them.
//!
//! A rank's peers on other nodes write to its wire memory. It holds control words first, then count
//! messages, then slots that rows are sent from and arrive in. Where a peer's wire memory is
//! mapped, kernels write slots and words there themselves. Elsewhere a kernel asks for a put by
//! writing a [`PutRequest`] to a queue's ring in mapped host memory, and a proxy thread carries it
//! out.

use bytemuck::{Pod, Zeroable};
use epoxide_simt::kernel_args;

use super::assert::layout_assert;
use super::device_ptr::DevicePtr;
use super::handle::SEND_LIST_STRIDE;
use super::limits::{FEW_RANKS, MAX_CHANNELS, MAX_LOCAL_EXPERTS};
use super::pool::ControlWord;

/// Most nodes: one lane each.
pub const MAX_NODES: usize = 32;
/// Most ranks of all nodes.
pub const MAX_WORLD: usize = MAX_NODES * FEW_RANKS;
/// Requests that a queue's ring holds.
pub const RING_ENTRIES: u64 = 256;
/// An arrival word is `epoch << ARRIVAL_SHIFT | rows`: rows of a channel that have arrived in this
/// epoch.
pub const ARRIVAL_SHIFT: u32 = 28;

/// A put and the counter behind it. Offsets are in bytes from the start of wire memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct PutRequest {
    /// The request's position in its queue, from 1 on. Stored last: the entry is valid where it has
    /// the expected value.
    pub ticket: u64,
    /// Where the bytes are in this rank's wire memory.
    pub from: u64,
    /// Where they go in the peer's.
    pub to: u64,
    /// How many, a multiple of 16; 0 where only the counter is wanted.
    pub bytes: u64,
    /// The peer's word that is written once the bytes are visible there, 8-byte aligned.
    pub counter: u64,
    /// The value that is stored in the counter. One queue writes the counter.
    pub value: u64,
    _pad: [u64; 2],
}

layout_assert!(PutRequest, size = 64, _pad at 48);

/// Start of a queue's mapped host memory; the ring `[RING_ENTRIES]` of [`PutRequest`] follows. The
/// proxy writes these words.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct QueueWords {
    /// Requests taken out of the ring: their entries may be written again.
    pub taken: ControlWord,
    /// Requests whose bytes have left: the memory that they came from may be written again.
    pub completed: ControlWord,
}

layout_assert!(QueueWords, size = 256, completed at 128);

/// Bytes of a queue's mapped host memory.
pub const QUEUE_BYTES: u64 = size_of::<QueueWords>() as u64 + RING_ENTRIES * size_of::<PutRequest>() as u64;

/// A queue as a kernel sees it. The table of them is indexed `queue * num_ranks + peer`, over all
/// ranks in ascending order; ranks that this one does not talk to, itself included, have a
/// placeholder of zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct QueueHandle {
    /// [`QueueWords`] and the ring, in mapped host memory.
    pub queue: DevicePtr,
    /// u64 in device memory: requests posted so far.
    pub posted: DevicePtr,
}

layout_assert!(QueueHandle, size = 16, posted at 8);

/// Where things are in wire memory: offsets in bytes, the same on every rank. `[n]` is the node at
/// the other end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct WireLayout {
    /// [`ControlWord`] `[MAX_NODES]`: `ready[n]` has the epoch: the peer there has entered the
    /// operation, so its incoming slots may be overwritten; as [`super::Control::ready`].
    pub ready: u64,
    /// [`ControlWord`] `[MAX_NODES]`: `counts[n] >= epoch`: the count message from there has
    /// arrived.
    pub counts: u64,
    /// u64 `[MAX_NODES][MAX_CHANNELS]`: arrival words.
    pub arrived: u64,
    /// Count messages to send through queues, `[num_nodes]`.
    pub messages_out: u64,
    /// Count messages that arrived, `[num_nodes]`; the own node's too.
    pub messages_in: u64,
    /// Bytes from one count message to the next.
    pub message_bytes: u64,
    /// Slots to send from through queues, `[num_nodes][slots]`.
    pub slots_out: u64,
    /// Slots that rows arrive in, `[num_nodes][slots]`; in a combine the own node's sums are in
    /// here too.
    pub slots_in: u64,
    /// Bytes from one node's slots to the next node's.
    pub node_bytes: u64,
    /// Slots per node: most tokens of a rank.
    pub slots: u64,
    /// Bytes of the whole.
    pub bytes: u64,
}

layout_assert!(WireLayout, size = 88, bytes at 80);

/// The way to a node: to the rank there with this one's index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct NodePath {
    /// This rank's wire memory that the peer writes to. All nodes have the same, unless they are
    /// reached in different ways.
    pub memory: DevicePtr,
    /// The peer's wire memory, where it is mapped: then what goes there is written into it. Null:
    /// it goes through the queues. The own node's is [`NodePath::memory`].
    pub peer: DevicePtr,
    /// 1 if [`NodePath::peer`] is host memory, which kernels write with ordinary stores only; else
    /// 0.
    pub peer_on_host: u64,
}

layout_assert!(NodePath, size = 24, peer_on_host at 16);

/// The paths and queues by which a kernel reaches the other nodes. [`super::Comm`] stands for the
/// own node: there, `rank` is the index in it.
#[kernel_args(requires(
    self.num_nodes >= 2,
    self.num_nodes <= MAX_NODES as u32,
    self.num_queues >= 1,
    self.chunk >= 1,
))]
pub struct Wire {
    /// Table of [`NodePath`], `[num_nodes]`.
    pub paths: DevicePtr,
    /// Table of [`QueueHandle`].
    pub queues: DevicePtr,
    /// This node.
    pub node: u32,
    /// Nodes.
    pub num_nodes: u32,
    /// Queues per peer; channel c uses queue `c % num_queues`, everything else queue 0.
    pub num_queues: u32,
    /// Rows that travel together in one put, at least 1.
    pub chunk: u32,
    /// The layout of every rank's wire memory.
    pub layout: WireLayout,
}

layout_assert!(Wire, size = 120, layout at 32);

/// A count message between nodes, from a rank to its peer on another node: u32 words. These are
/// their indices. Matrices are packed: their rows are as long as there are channels, or experts per
/// rank, in this operation.
pub mod wire_message {
    use super::*;

    /// Words that must agree between ranks; [`crate::layout::SIGNATURE_NAMES`] names them.
    pub const SIGNATURE: u32 = 0;
    /// 1 if the sender's layout saw an expert id out of range.
    pub const INVALID: u32 = SIGNATURE + crate::layout::SIGNATURE_NAMES.len() as u32;
    /// Tokens the sender has for each node, `[MAX_NODES]`.
    pub const NODE_COUNTS: u32 = INVALID + 1;
    /// Tokens the sender has for each rank, `[MAX_WORLD]`.
    pub const RANK_COUNTS: u32 = NODE_COUNTS + MAX_NODES as u32;
    /// Where the sender's channels start, `[1 + ranks of a node][channels]`: row 0 among its tokens
    /// for the receiver's node, row 1 + j among those for rank j of that node.
    pub const CHANNEL_STARTS: u32 = RANK_COUNTS + MAX_WORLD as u32;
    /// Selections the sender has for each expert of the receiver's node,
    /// `[ranks of a node][experts per rank]`.
    pub const EXPERT_COUNTS: u32 = CHANNEL_STARTS + (1 + FEW_RANKS as u32) * MAX_CHANNELS;
    /// Most words of a message.
    pub const WORDS: u32 = EXPERT_COUNTS + FEW_RANKS as u32 * MAX_LOCAL_EXPERTS;
}

/// The part of a count message that its receiver relays to each rank of its node: packets
/// `epoch << 32 | value` in the pool, as in [`super::message`], `[num_ranks][WORDS]` by the
/// message's source. Up to [`wire_message::CHANNEL_STARTS`] the words are the same.
pub mod relay_message {
    use super::*;

    /// Where the source's channels start among its tokens for this rank, `[MAX_CHANNELS]`.
    pub const CHANNEL_STARTS: u32 = wire_message::CHANNEL_STARTS;
    /// Selections the source has for each expert of this rank, `[MAX_LOCAL_EXPERTS]`.
    pub const EXPERT_COUNTS: u32 = CHANNEL_STARTS + MAX_CHANNELS;
    /// Packets per message.
    pub const WORDS: u32 = EXPERT_COUNTS + MAX_LOCAL_EXPERTS;
}

/// Slots begin at multiples of this many bytes, a cache line: rows that straddle lines take the
/// links a tenth longer.
pub const SLOT_ALIGN: u32 = 128;

/// The contents of a slot of a dispatch: the row, its scales, and unless cached its metadata.
/// Offsets in bytes; the parts start at multiples of 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotShape {
    /// Where the scales are, f32.
    pub scales: u32,
    /// Where the metadata is.
    pub meta: u32,
    /// Bytes of the slot.
    pub bytes: u32,
}

impl SlotShape {
    /// In the metadata: the token's index in the (channel, rank) stream of each rank of the
    /// receiving node, or -1, i32 `[FEW_RANKS]`.
    pub const HEADS: u32 = 0;
    /// In the metadata: the token's index on its rank, u32.
    pub const TOKEN: u32 = Self::HEADS + FEW_RANKS as u32 * 4;
    /// In the metadata: global expert ids, i32 `[num_topk]`, then weights, f32 `[num_topk]`.
    pub const TOPK: u32 = Self::TOKEN + 16;

    /// The shape for these sizes; `num_topk` is `None` where no metadata travels.
    #[inline(always)]
    pub const fn new(row_bytes: u32, num_scales: u32, num_topk: Option<u32>) -> Self {
        let meta = (row_bytes + num_scales * 4).next_multiple_of(16);
        let meta_bytes = match num_topk {
            Some(num_topk) => Self::metadata_bytes(num_topk),
            None => 0,
        };
        SlotShape { scales: row_bytes, meta, bytes: (meta + meta_bytes).next_multiple_of(SLOT_ALIGN) }
    }

    /// The shape with rows by expert: behind the weights of the metadata is the number of each
    /// entry among its rank's selections of the expert, u32 `[num_topk]`.
    #[inline(always)]
    pub const fn by_expert(row_bytes: u32, num_scales: u32, num_topk: Option<u32>) -> Self {
        let shape = Self::new(row_bytes, num_scales, None);
        let meta_bytes = match num_topk {
            Some(num_topk) => Self::metadata_bytes_by_expert(num_topk),
            None => 0,
        };
        SlotShape { bytes: (shape.meta + meta_bytes).next_multiple_of(SLOT_ALIGN), ..shape }
    }

    /// Bytes of the metadata with rows by expert.
    #[inline(always)]
    pub const fn metadata_bytes_by_expert(num_topk: u32) -> u32 {
        (Self::TOPK + num_topk * 12).next_multiple_of(16)
    }

    /// Bytes of the metadata.
    #[inline(always)]
    pub const fn metadata_bytes(num_topk: u32) -> u32 {
        (Self::TOPK + num_topk * 8).next_multiple_of(16)
    }
}

/// Bytes that a dispatch of rows by expert across nodes loads into a stage behind a row: a slot's
/// metadata, or the list of where a relayed token's rows went.
#[inline(always)]
pub const fn tail_bytes_by_expert(num_topk: u32) -> u32 {
    let (metadata, list) = (SlotShape::metadata_bytes_by_expert(num_topk), SEND_LIST_STRIDE * 8);
    if metadata > list { metadata } else { list }
}

/// Bytes of a slot of a combine: a row, then `num_topk` weights, f32.
#[inline(always)]
pub const fn combine_slot_bytes(row_bytes: u32, num_topk: u32) -> u32 {
    (row_bytes + num_topk * 4).next_multiple_of(SLOT_ALIGN)
}
