//! Low latency: the arguments of the kernels, and the layout of the memory that they share.
//!
//! A pool begins with words of the rank as a whole ([`LowLatencyControl`]); behind them each place
//! has words, packets and rows ([`LowLatencyPlace`]). A row of token t from rank s lies at
//! `s * max_tokens + t`, independent of all other rows: nothing is counted before it is sent.

use bytemuck::{Pod, Zeroable};
use epoxide_simt::{Global, kernel_args};

use super::assert::layout_assert;
use super::device_ptr::DevicePtr;
use super::experts::ExpertTable;
use super::limits::{FEW_RANKS, MAX_RANKS, MAX_TOPK};
use super::pool::{Comm, ControlWord};
use super::quantise::{Quantise, SCALE_BLOCK};

/// Start of every low-latency pool, with room for so many ranks: [`FEW_RANKS`], or [`MAX_RANKS`]
/// where there are more.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LowLatencyControl<const RANKS: usize = FEW_RANKS> {
    /// `ready[src] >= epoch`: rank `src` has entered that dispatch, so that its place may be
    /// overwritten. A rank publishes it, and waits for it, only if no operation in between has
    /// shown the same.
    pub ready: [ControlWord; RANKS],
    /// `calls[src][epoch % 2]` is a packet: rank `src` has entered the operation, with this
    /// [`LowLatencyCall`]. A rank is at most one operation ahead of what its peers have yet to
    /// read.
    pub calls: [[u64; 2]; RANKS],
    /// `gave_up[src] >= epoch`: rank `src` has ended a dispatch without this one, so that its rows
    /// are not those of a combine of that epoch any more.
    pub gave_up: [u64; RANKS],
}

layout_assert!(LowLatencyControl, size = (128 + 16 + 8) * FEW_RANKS, gave_up at (128 + 16) * FEW_RANKS);
layout_assert!(LowLatencyControl<MAX_RANKS>, size = (128 + 16 + 8) * MAX_RANKS, gave_up at (128 + 16) * MAX_RANKS);

/// Ranks that the words of a pool, and the tables of each rank, have room for in a group of
/// `num_ranks`.
#[inline(always)]
pub const fn room_for_ranks(num_ranks: u32) -> u32 {
    if num_ranks > FEW_RANKS as u32 { MAX_RANKS as u32 } else { FEW_RANKS as u32 }
}

/// Offset of `gave_up[src]` in a low-latency pool with room for `room` ranks, in bytes.
#[inline(always)]
pub const fn gave_up_offset(room: u32, src: u32) -> u64 {
    call_offset(room, room, 0) + src as u64 * 8
}

/// Longest time that a rank reads peers' rows without asking whether they gave up meanwhile, in ns.
pub const GATHER_NS: u64 = 250_000;
/// Time between a rank's word that it gave up and the end of the operation, in ns. Within it a peer
/// that has not seen the word ends a read of [`GATHER_NS`], also where clocks differ and the word
/// is under way.
pub const GIVING_UP_NS: u64 = 1_000_000;

/// Offset of `calls[src][epoch % 2]` in a low-latency pool with room for `room` ranks, in bytes.
#[inline(always)]
pub const fn call_offset(room: u32, src: u32, epoch: u64) -> u64 {
    size_of::<ControlWord>() as u64 * room as u64 + src as u64 * 16 + (epoch & 1) * 8
}

/// Where the things of a place are: offsets in bytes from the start of every pool. `room` stands for
/// [`room_for_ranks`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct LowLatencyPlace {
    /// u64 `[room, chunks]`: `arrived[src][c] >= epoch` where all that chunk c of rank `src`'s
    /// tokens has for this rank is here.
    pub arrived: u64,
    /// u64 `[room, chunks]`: `returned[src][c] >= epoch` where rank `src` has returned all
    /// that it has of chunk c of this rank's tokens.
    pub returned: u64,
    /// Packets `[room, max_tokens, num_topk / 2 rounded up]`: two local expert ids each, 16
    /// bits, all ones where the expert is on another rank.
    pub ids: u64,
    /// Packets `[room, max_tokens, num_topk]`: the f32 weights of the experts on this rank.
    pub weights: u64,
    /// Received rows `[num_ranks * max_tokens]`.
    pub recv_x: u64,
    /// f32 `[num_scales, num_ranks * max_tokens]`.
    pub recv_scales: u64,
    /// Packets `[num_ranks * max_tokens]`, [`scale_packets`] of each row: its scales on their way to
    /// `recv_scales`, where ranks [send them so](has_scale_packets).
    pub scale_packets: u64,
    /// Returned rows `[num_ranks * max_tokens]`: row `src * max_tokens + t` is rank `src`'s share
    /// of this rank's token t, as it is summed, or in e4m3 with its f32 scales behind it. Where ranks
    /// gather, it is this rank's share of rank `src`'s token t, for that rank to read.
    pub returned_x: u64,
    /// Returned rows of a rank with few tokens, in [pieces](PIECE_BYTES):
    /// `[num_ranks * packet_tokens, pieces]`.
    pub returned_packets: u64,
    /// Packets `[num_ranks * packet_tokens, num_scales]`: the f32 scales of those rows.
    pub returned_scales: u64,
}

layout_assert!(LowLatencyPlace, size = 80, returned_scales at 72);

/// Tokens of all ranks that one warp lists for an expert, a lane each; of more, all warps of a
/// block do.
pub const FEW_TOKENS: u32 = 32;

/// More tokens of all ranks than this are a batch, if each rank has as many as this one.
const BATCH_TOKENS: u32 = 512;
/// More tokens of a rank than this are a batch: they are more than a block each.
const BATCH_TOKENS_OF_RANK: u32 = 128;
/// Experts of a token that the kernels of a batch read: one load of four packets.
pub const BATCH_TOPK: u32 = 8;

/// Whether a rank with so many tokens dispatches them by the kernels of a batch. Other ranks need not
/// do the same.
#[inline(always)]
pub const fn is_batch(num_tokens: u32, num_ranks: u32) -> bool {
    num_tokens > BATCH_TOKENS_OF_RANK || num_tokens * num_ranks > BATCH_TOKENS
}

/// Blocks of a batch's grid for each that lists rows and sends none. Smaller grids have none, and each
/// of their blocks sends first.
pub const BLOCKS_FOR_A_LISTER: u32 = 32;

/// Tokens of a dispatch's block whose scales leave together, and which are then published: a scale's
/// words of so many tokens are a sector of 32 bytes. Words of single tokens took as long as a quarter
/// of the rows.
pub const LOW_LATENCY_TOKENS_AT_ONCE: u32 = 8;

/// Scales in a packet of 16 bytes. The fourth word is the epoch.
pub const SCALES_IN_PACKET: u32 = 3;
/// Bytes of such a packet.
pub const SCALE_PACKET_BYTES: u32 = 16;

/// Whether a rank with so many tokens sends scales as packets, if ranks [do](has_scale_packets): packets
/// of fewer tokens come no sooner than words do.
#[inline(always)]
pub const fn sends_scale_packets(num_tokens: u32) -> bool {
    num_tokens > 64
}

/// Whether ranks with at most so many tokens send f32 scales as packets: where a block has
/// one token, and rows are not listed by a batch.
#[inline(always)]
pub const fn has_scale_packets(max_tokens: u32, num_ranks: u32) -> bool {
    sends_scale_packets(max_tokens) && num_ranks <= FEW_RANKS as u32 && !is_batch(max_tokens, num_ranks)
}

/// Packets of so many scales of a row.
#[inline(always)]
pub const fn scale_packets(scales: u32) -> u32 {
    scales.div_ceil(SCALES_IN_PACKET)
}

/// Bytes of a row that travel together as packets: a lane of a warp has three vectors of 16 bytes,
/// a warp's worth apart. The last piece of a row is filled up with zeros.
pub const PIECE_BYTES: u32 = 3 * 32 * 16;
/// Bytes of a piece's packets, `[4, 32]` of 16 bytes, which are written and read at once. The
/// fourth word of each is the epoch; the others of a lane's first three packets are the first three
/// words of its vectors, those of the last packet the fourth ones.
pub const PIECE_PACKET_BYTES: u32 = 4 * 32 * 16;

/// Where ranks gather rows in the pool, the rows of a rank's first tokens return as packets: of so
/// many tokens between two ranks, of half as many among three, of a quarter up to five, and so on.
/// The packets take about as long on the links as the word needs by which owners learn that they
/// may read.
pub const PUSHED_TOKENS: u32 = 32;

/// Pieces of a row.
#[inline(always)]
pub const fn pieces_of(row_bytes: u32) -> u32 {
    row_bytes.div_ceil(PIECE_BYTES)
}

/// A rank's tables of a place's rows, in memory that only this rank accesses. `rows` stands for
/// `num_ranks * max_tokens`, `room` for [`room_for_ranks`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct LowLatencyTables {
    /// Out of a dispatch, receiver side: u32 `[room]`, tokens of each source rank.
    pub num_tokens: DevicePtr,
    /// Out of a dispatch, sender side: u32 `[max_tokens]`, a bit for each rank that the token went
    /// to; u64 within a node of more than [`FEW_RANKS`] ranks.
    pub token_ranks: DevicePtr,
    /// Out of a dispatch, receiver side: i32 `[local_experts]`.
    pub expert_counts: DevicePtr,
    /// Out of a dispatch, receiver side: i32 `[local_experts, rows]`, the row of each of an
    /// expert's tokens.
    pub expert_rows: DevicePtr,
    /// Out of a dispatch, receiver side: i32 `[local_experts, rows]`, its index on its source rank.
    pub src_info: DevicePtr,
    /// Out of a dispatch, receiver side: i64 `[local_experts, num_ranks]`, count in the low half,
    /// begin in the high one.
    pub layout_range: DevicePtr,
    /// Out of a dispatch, receiver side: i32 `[rows, num_topk]`, where in `expert_rows` the entry
    /// is, from its start; -1 where the expert is on another rank.
    pub slots: DevicePtr,
    /// Out of a dispatch, receiver side: f32 `[rows, num_topk]`, the weights of entries that have a
    /// slot.
    pub weights: DevicePtr,
    /// u64 `[chunks]`: tokens of a chunk that have been sent, in shares of `QUANTUM`.
    pub sent: DevicePtr,
    /// u64 `[room, chunks]`: rows of a rank's chunk that have been returned, in shares of
    /// `QUANTUM`.
    pub answered: DevicePtr,
    /// [`LowLatencyTurns`] of the place.
    pub turns: DevicePtr,
}

layout_assert!(LowLatencyTables, size = 88, turns at 80);

/// How often a place was filled and emptied. Monotonic, never reset.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct LowLatencyTurns {
    /// Blocks of a dispatch add shares of `QUANTUM`.
    pub dispatches: u64,
    /// The last combine: its epoch, and in the low half how many dispatches there had been.
    pub answered: u64,
}

layout_assert!(LowLatencyTurns, size = 16, answered at 8);

/// The halves of an operation.
pub mod phase {
    /// Rows leave.
    pub const SEND: u32 = 1;
    /// Rows are waited for.
    pub const RECEIVE: u32 = 2;
}

/// The arguments that all low-latency kernels share.
#[kernel_args(requires(
    self.comm.num_ranks >= 1,
    self.comm.num_ranks <= MAX_RANKS as u32,
    self.num_topk >= 1,
    self.num_topk <= MAX_TOPK,
    self.local_experts >= 1,
    self.chunk_tokens >= 1,
    self.num_tokens <= self.max_tokens,
))]
pub struct LowLatencyArgs {
    /// The peers. Its layout of a high-throughput pool is not used, and zero.
    pub comm: Comm,
    /// Where the place is in every pool.
    pub place: LowLatencyPlace,
    /// This rank's tables of the place.
    pub tables: LowLatencyTables,
    /// Tokens of this rank.
    pub num_tokens: u32,
    /// Most tokens of a rank.
    pub max_tokens: u32,
    /// Entries per token, 1 to 32.
    pub num_topk: u32,
    /// Experts on each rank.
    pub local_experts: u32,
    /// Tokens of a chunk; the last one of a rank may have fewer.
    pub chunk_tokens: u32,
    /// [`phase`] bits.
    pub phases: u32,
    /// Ranks with so many tokens, or fewer, get their rows back as packets.
    pub packet_tokens: u32,
    /// Zero.
    pub reserved: u32,
}

layout_assert!(LowLatencyArgs, size = size_of::<Comm>() + 200, reserved at size_of::<Comm>() + 196);

/// Arguments of `low_latency_dispatch`.
#[kernel_args(requires(
    self.row_bytes.is_multiple_of(16),
    self.quantise == Quantise::None as u32 || self.row_bytes.is_multiple_of(SCALE_BLOCK),
))]
pub struct LowLatencyDispatchArgs {
    /// Peers, place and shapes.
    pub common: LowLatencyArgs,
    /// In: rows of `row_bytes`, or of bf16 where they are quantised, `[num_tokens]`, contiguous.
    pub x: DevicePtr,
    /// In, or null: f32 `[num_tokens, num_scales]`, of rows that are quantised already.
    pub scales: DevicePtr,
    /// In: expert ids or -1, i64 or i32 `[num_tokens, num_topk]`.
    pub topk_idx: DevicePtr,
    /// Where the experts are.
    pub table: ExpertTable,
    /// In, or null for 1: f32 `[num_tokens, num_topk]`.
    pub topk_weights: DevicePtr,
    /// Bytes of a row as it travels, a multiple of 16.
    pub row_bytes: u32,
    /// Scales of a row in `scales`.
    pub num_scales: u32,
    /// [`Quantise`].
    pub quantise: u32,
    /// 1 where ids are i32.
    pub narrow_ids: u32,
}

layout_assert!(LowLatencyDispatchArgs, size = size_of::<LowLatencyArgs>() + 64, narrow_ids at size_of::<LowLatencyArgs>() + 60);

impl LowLatencyDispatchArgs {
    /// Scales of a row as it arrives, given or made on its way.
    pub fn row_scales(&self) -> u32 {
        if self.quantise == Quantise::None as u32 { self.num_scales } else { self.row_bytes / SCALE_BLOCK }
    }
}

/// Where a dispatch puts rows by expert. `rows` is the room, in rows of all segments.
#[kernel_args(requires(
    self.alignment.is_power_of_two(),
    self.x_stride.is_multiple_of(16),
))]
pub struct LowLatencyExpertRows {
    /// Out: rows `[rows]`, a row for each selection.
    pub x: DevicePtr,
    /// Bytes from one row of `x` to the next, a multiple of 16.
    pub x_stride: u64,
    /// Out, where rows have scales: f32 `[num_scales, rows]`.
    pub scales: DevicePtr,
    /// Out: i32 `[local_experts]`, rows of each, without padding.
    pub expert_counts: DevicePtr,
    /// Out: i32 `[local_experts + 1]`, where each expert's segment begins; then the rows of all.
    pub expert_starts: DevicePtr,
    /// Out: i32 `[local_experts + 1]`, where each expert's rows end; then the rows of all segments.
    pub psum_expert: DevicePtr,
    /// Out: i32 `[num_ranks * max_tokens, num_topk]`, the row of each entry of a received row, or
    /// -1. In place of [`LowLatencyTables::slots`] in a combine.
    pub slots: DevicePtr,
    /// Out: i32 `[rows]`, the token's index on its source rank, or -1 in padding.
    pub src_idx: DevicePtr,
    /// Out: i32 `[rows, 2]`, the source rank, and which entry selected the expert.
    pub src_entry: DevicePtr,
    /// Out: f32 `[rows]`, the weights of the selections.
    pub weights: DevicePtr,
    /// Room, in rows.
    pub rows: u32,
    /// Segments begin at multiples of this, a power of two.
    pub alignment: u32,
}

layout_assert!(LowLatencyExpertRows, size = 88, alignment at 84);

/// Most experts of all ranks where rows come by expert: a block counts their selections in shared
/// memory.
pub const MAX_EXPERTS_OF_ROWS: u32 = 4096;

/// Arguments of `low_latency_dispatch_by_expert`.
#[kernel_args]
pub struct LowLatencyExpertDispatchArgs {
    /// As without rows by expert.
    pub dispatch: LowLatencyDispatchArgs,
    /// Where rows go.
    pub to: LowLatencyExpertRows,
}

/// Arguments of the kernels `low_latency_combine_*`.
#[kernel_args(requires(
    self.row_bytes.is_multiple_of(16),
    self.x_stride.is_multiple_of(16),
))]
pub struct LowLatencyCombineArgs {
    /// Peers, place and shapes.
    pub common: LowLatencyArgs,
    /// In: rows of the kernel's type; `[local_experts * rows]` where they are by expert, else
    /// `[rows]` as received, weighted and summed already.
    pub x: DevicePtr,
    /// Bytes from one row of `x` to the next, a multiple of 16.
    pub x_stride: u64,
    /// Out: rows of the same type `[num_tokens]`, contiguous.
    pub combined_x: DevicePtr,
    /// Bytes of a row as it travels, without scales, a multiple of 16.
    pub row_bytes: u32,
    /// 1 where the rows of `x` are by expert.
    pub by_expert: u32,
    /// [`Quantise`]: what rows return as.
    pub quantise: u32,
    /// 1 where what is not summed is to be NaN, [`NAN_BITS`](super::NAN_BITS).
    pub spoils: u32,
}

layout_assert!(LowLatencyCombineArgs, size = size_of::<LowLatencyArgs>() + 40, spoils at size_of::<LowLatencyArgs>() + 36);

/// Arguments of `low_latency_gather`. `rows` stands for `num_ranks * max_tokens`.
#[kernel_args(requires(
    self.local_experts >= 1,
    self.row_bytes >= 16,
    self.row_bytes.is_multiple_of(16),
    self.num_scales <= self.row_bytes.div_ceil(SCALE_BLOCK),
))]
pub struct LowLatencyGatherArgs {
    /// In: i32 `[local_experts]`.
    pub expert_counts: Global<u32>,
    /// In: i32 `[local_experts, rows]`, the received row of each of an expert's.
    pub expert_rows: Global<u32>,
    /// In: received rows `[rows]`, [`row_stride`](super::row_stride) bytes apart.
    pub recv_x: DevicePtr,
    /// In, where rows have scales: f32 `[num_scales, rows]`.
    pub recv_scales: Global<f32>,
    /// Out: rows `[local_experts, rows]`, contiguous; as many of each expert's as it has.
    pub x: DevicePtr,
    /// Out, where rows have scales: f32 `[local_experts, num_scales, rows]`.
    pub scales: Global<f32>,
    /// Places for received rows.
    pub rows: u32,
    /// Experts of this rank.
    pub local_experts: u32,
    /// Bytes of a row, a multiple of 16.
    pub row_bytes: u32,
    /// Scales of a row, 0 for none.
    pub num_scales: u32,
}

layout_assert!(LowLatencyGatherArgs, size = 64, num_scales at 60);

/// The call that a rank publishes when it enters a low-latency operation, in the low half of a
/// packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LowLatencyCall {
    /// Whether it is a combine.
    pub is_combine: bool,
    /// Whether rows have scales.
    pub has_scales: bool,
    /// The place's index, below 64.
    pub place: u32,
    /// Bytes of a row as it travels, a multiple of 16. Lengths that differ by less than 128 KiB
    /// have different calls. 0 where ranks gather rows from the pools.
    pub row_bytes: u32,
    /// Tokens of the rank, at most [`LowLatencyCall::MAX_TOKENS`]: the one thing in which ranks may
    /// differ.
    pub num_tokens: u32,
}

impl LowLatencyCall {
    /// Most tokens of a rank.
    pub const MAX_TOKENS: u32 = 1024;
    /// The bits of [`LowLatencyCall::bits`] that hold the number of tokens.
    pub const TOKEN_BITS: u32 = (1 << 11) - 1;

    /// Its bits in a packet.
    #[inline(always)]
    pub const fn bits(self) -> u32 {
        (self.has_scales as u32) << 31
            | (self.is_combine as u32) << 30
            | (self.place & 63) << 24
            | ((self.row_bytes / 16) & 0x1fff) << 11
            | self.num_tokens & Self::TOKEN_BITS
    }

    /// The call with the bits of a packet.
    pub const fn of(bits: u32) -> LowLatencyCall {
        LowLatencyCall {
            is_combine: bits >> 30 & 1 != 0,
            has_scales: bits >> 31 != 0,
            place: bits >> 24 & 63,
            row_bytes: (bits >> 11 & 0x1fff) * 16,
            num_tokens: bits & Self::TOKEN_BITS,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_control_words_are_where_their_struct_has_them() {
        for (room, bytes) in [
            (FEW_RANKS, size_of::<LowLatencyControl>()),
            (MAX_RANKS, size_of::<LowLatencyControl<MAX_RANKS>>()),
        ] {
            let room = room as u32;
            assert_eq!((room_for_ranks(room), room_for_ranks(9)), (room, MAX_RANKS as u32));
            assert_eq!(call_offset(room, 2, 7), 128 * u64::from(room) + 40);
            assert_eq!(gave_up_offset(room, room), bytes as u64);
        }
    }

    #[test]
    fn a_packet_holds_a_call() {
        for (is_combine, has_scales) in [(false, false), (false, true), (true, false)] {
            for (place, row_bytes, num_tokens) in [(0, 16, 0), (63, (1 << 17) - 16, 1024), (5, 14336, 128)] {
                let call = LowLatencyCall { is_combine, has_scales, place, row_bytes, num_tokens };
                assert_eq!(LowLatencyCall::of(call.bits()), call);
            }
        }
    }
}
