//! Low latency across nodes: each rank sends each one message in a dispatch and one in a combine,
//! over any link.
//!
//! A message lies where its receiver reads it if the receiver's memory is mapped, within a node or
//! across; else where it was written, from which a put takes it there. Behind it comes the packet
//! with the call that the sender has entered.

use bytemuck::{Pod, Zeroable};
use epoxide_simt::kernel_args;

use super::assert::layout_assert;
use super::device_ptr::DevicePtr;
use super::low_latency::{LowLatencyCombineArgs, LowLatencyDispatchArgs, LowLatencyExpertRows};
use super::wire::{QueueHandle, SLOT_ALIGN};

/// Most ranks of a low-latency buffer across nodes: a bit, and a lane, for each.
pub const MAX_MEMBERS: usize = 32;

/// The words that one rank writes for another.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct LowLatencyWords {
    /// As [`super::LowLatencyControl::ready`], as a packet with the call.
    pub ready: u64,
    /// As [`super::LowLatencyControl::calls`], and the message of that operation is here.
    pub calls: [u64; 2],
    _line: [u64; 13],
}

layout_assert!(LowLatencyWords, size = 128, _line at 24);

/// Where the messages of a kind are that two ranks send each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct LowLatencyMessage {
    /// Where this rank writes the one for the peer.
    pub written: DevicePtr,
    /// Where the peer's arrives.
    pub arrives: DevicePtr,
    /// Where a put takes it from, as an offset in this rank's wire memory.
    pub from: u64,
    /// Where a put takes it, as an offset in the peer's.
    pub to: u64,
}

layout_assert!(LowLatencyMessage, size = 32, to at 24);

/// The way to a rank, and from it; a place has a table of them, `[num_ranks]`. The own rank's leads
/// to itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct LowLatencyRoute {
    /// [`LowLatencyWords`] that the peer writes.
    pub words_in: DevicePtr,
    /// Those that this rank writes, where they are mapped. Null: puts write them.
    pub words_out: DevicePtr,
    /// Those that puts write, as an offset in the peer's wire memory.
    pub words_to: u64,
    /// Not 0: `words_in` and what arrives are in host memory.
    pub is_on_host: u64,
    /// Messages of a dispatch: a [header](DISPATCH_HEADER), then slots.
    pub dispatch: LowLatencyMessage,
    /// Messages of a combine: the rows of the peer's dispatch message, in the order of its slots.
    pub answer: LowLatencyMessage,
    /// Where puts are posted.
    pub queue: QueueHandle,
}

layout_assert!(LowLatencyRoute, size = 112, queue at 96);

/// Bytes of a dispatch message in front of its slots: a u32, the number of slots.
pub const DISPATCH_HEADER: u32 = SLOT_ALIGN;

/// A slot of a dispatch message: the row, its scales, the token's index on its rank as a u32, and
/// its entries. An entry is the local expert, u32, all ones where it is not for the receiver, and
/// the f32 weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LowLatencySlot {
    /// Where the index is; scales begin where the row ends.
    pub token: u32,
    /// Where the entries are.
    pub entries: u32,
    /// Bytes of the slot.
    pub bytes: u32,
}

impl LowLatencySlot {
    /// For rows with so many bytes, a multiple of 16.
    #[inline(always)]
    pub const fn new(row_bytes: u32, num_scales: u32, num_topk: u32) -> LowLatencySlot {
        let token = (row_bytes + num_scales * 4).next_multiple_of(16);
        let entries = token + 16;
        LowLatencySlot { token, entries, bytes: (entries + num_topk * 8).next_multiple_of(SLOT_ALIGN) }
    }
}

/// Bytes of the copy of a slot's head: the index of its token, on 8 bytes, and its entries.
#[inline(always)]
pub const fn low_latency_head_bytes(num_topk: u32) -> u32 {
    8 + num_topk * 8
}

/// Copies of the words of each rank whose words are in host memory. One block writes them, and the
/// others poll them.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct LowLatencyCopies {
    /// The last packet. The packet of a dispatch is published behind the copies of its message's
    /// heads.
    pub calls: [u64; MAX_MEMBERS],
    /// The last ready word.
    pub ready: [u64; MAX_MEMBERS],
}

layout_assert!(LowLatencyCopies, size = 16 * MAX_MEMBERS, ready at 8 * MAX_MEMBERS);

/// Bytes of a returned row and its scales in a combine's message.
#[inline(always)]
pub const fn answer_slot_bytes(row_bytes: u32, num_scales: u32) -> u32 {
    (row_bytes + num_scales * 4).next_multiple_of(SLOT_ALIGN)
}

/// A place's arguments of the kernels across nodes, beside those of the kernels within a node.
/// `rows` stands for `num_ranks * max_tokens`.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct LowLatencyMessages {
    /// [`LowLatencyRoute`] `[num_ranks]`.
    pub routes: DevicePtr,
    /// Out of a dispatch, receiver side: rows `[rows]`.
    pub recv_x: DevicePtr,
    /// Out of a dispatch, receiver side: f32 `[num_scales, rows]`.
    pub recv_scales: DevicePtr,
    /// Out of a dispatch, receiver side: u32 `[MAX_MEMBERS]`, slots of each rank's message.
    pub num_slots: DevicePtr,
    /// Out of a dispatch, receiver side: u32 `[rows]`, the tokens of a rank's slots, from
    /// `source * max_tokens` on.
    pub slot_tokens: DevicePtr,
    /// Out of a dispatch, sender side: u32 `[max_tokens, MAX_MEMBERS]`, the token's slot in the
    /// message for each rank that it went to.
    pub positions: DevicePtr,
    /// u64: tokens of a dispatch that have been written, in shares of `QUANTUM`.
    pub written: DevicePtr,
    /// u64 `[MAX_MEMBERS]`: rows of a rank that have been returned, in shares of `QUANTUM`.
    pub returned: DevicePtr,
    /// [`LowLatencyCopies`] and behind them heads, `[num_ranks * max_tokens]`, of
    /// [`low_latency_head_bytes`]: copies of what ranks write in host memory. One block writes
    /// them.
    pub copies: DevicePtr,
}

layout_assert!(LowLatencyMessages, size = 72, copies at 64);

/// Arguments of `low_latency_internode_dispatch`.
#[kernel_args]
pub struct LowLatencyInternodeDispatchArgs {
    /// As within a node, without pools and without what is in them.
    pub dispatch: LowLatencyDispatchArgs,
    /// Messages of the place.
    pub messages: LowLatencyMessages,
}

/// Arguments of `low_latency_internode_dispatch_by_expert`.
#[kernel_args]
pub struct LowLatencyInternodeExpertDispatchArgs {
    /// As without rows by expert.
    pub dispatch: LowLatencyInternodeDispatchArgs,
    /// Where rows go.
    pub to: LowLatencyExpertRows,
}

/// Arguments of the kernels `low_latency_internode_combine_*`.
#[kernel_args]
pub struct LowLatencyInternodeCombineArgs {
    /// As within a node, without pools and without what is in them.
    pub combine: LowLatencyCombineArgs,
    /// Messages of the place.
    pub messages: LowLatencyMessages,
}
