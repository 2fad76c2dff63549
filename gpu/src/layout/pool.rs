//! The pool: the one allocation per rank that its peers map. Control words first, at fixed offsets,
//! then the count messages, then rows as structure of arrays.

use bytemuck::{Pod, Zeroable};

use super::assert::layout_assert;
use super::device_ptr::DevicePtr;
use super::handle::PlanHeader;
use super::limits::{FEW_RANKS, MAX_CHANNELS, MAX_LOCAL_EXPERTS, MAX_RANKS};
use super::wire::MAX_WORLD;

/// The amount that every finished operation adds to each `done` word and to the ticket. Blocks add
/// shares of it, so that the target of a waiter is `epoch * QUANTUM` whatever grid the writer ran.
pub const QUANTUM: u64 = 1 << 16;

/// The bit of `done[src]` that rank `src` sets if it ends a combine without having waited for all
/// peers. The rank may write other rows from then on, while they still gather those of the combine.
pub const DONE_GAVE_UP: u64 = 1 << 63;

/// A control word with a cache line of its own. Written by one rank, never reset.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct ControlWord {
    /// The value.
    pub value: u64,
    _line: [u64; 15],
}

/// Start of every pool: two words per peer carry the whole protocol. How far a combine's rows have
/// been staged is apart from it.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Control {
    /// `ready[src]` has the epoch ([`super::READY_SHIFT`]): rank `src` has entered the operation,
    /// with the call in the bits below. In a dispatch its receive rows may be overwritten; in a
    /// combine its combine rows may be read.
    pub ready: [ControlWord; MAX_RANKS],
    /// `done[src] >= epoch * QUANTUM`: rank `src` has done its part towards this rank. In a
    /// dispatch all its rows have been written here; in a combine it has read all that it needed
    /// from here. The highest bit is [`DONE_GAVE_UP`].
    pub done: [ControlWord; MAX_RANKS],
    /// `staged[src][c * parts + p]` is `epoch << 32 | rows`. It counts the rows of channel c that
    /// rank `src` returns to this rank in a combine and that are in `src`'s pool. These are
    /// the rows whose number in the channel leaves p when divided by `parts`.
    pub staged: [[u64; MAX_CHANNELS as usize]; MAX_RANKS],
}

layout_assert!(ControlWord, size = 128, _line at 8);
layout_assert!(Control, size = (128 * 2 + 8 * MAX_CHANNELS as usize) * MAX_RANKS, staged at 128 * 2 * MAX_RANKS);

/// Offset of `ready[src]` in a pool, in bytes.
#[inline(always)]
pub const fn ready_offset(src: u32) -> u64 {
    src as u64 * size_of::<ControlWord>() as u64
}

/// Offset of `done[src]` in a pool, in bytes.
#[inline(always)]
pub const fn done_offset(src: u32) -> u64 {
    (MAX_RANKS as u64 + src as u64) * size_of::<ControlWord>() as u64
}

/// Offset of `staged[src][place]` in a pool, in bytes.
#[inline(always)]
pub const fn staged_offset(src: u32, place: u32) -> u64 {
    done_offset(MAX_RANKS as u32) + (src * MAX_CHANNELS + place) as u64 * 8
}

/// Names of the signature words of a count message, in order.
pub const SIGNATURE_NAMES: [&str; 5] = [
    "columns << 24 | bytes per row | dtype",
    "place << 24 | by_expert << 23 | weighted << 22 | num_topk << 16 | num_scales",
    "num_experts",
    "channels",
    "capacity in rows",
];

/// The bit of signature word 1 that is set with rows by expert.
pub const COLUMNS_BY_EXPERT: u32 = 1 << 23;

/// A count message: `u64` packets, each `epoch << 32 | value`, so that data and flag arrive in one
/// store and nothing is ever zeroed. These are the indices of the packets.
pub mod message {
    use super::*;

    /// Words that must agree between ranks; [`super::SIGNATURE_NAMES`] names them.
    pub const SIGNATURE: u32 = 0;
    /// 1 if the sender's layout saw an expert id out of range.
    pub const INVALID: u32 = SIGNATURE + super::SIGNATURE_NAMES.len() as u32;
    /// Tokens the sender has for each rank, `[MAX_RANKS]`.
    pub const RANK_COUNTS: u32 = INVALID + 1;
    /// Where each of the sender's channels starts in its block of rows at the receiver,
    /// `[MAX_CHANNELS]`.
    pub const CHANNEL_STARTS: u32 = RANK_COUNTS + MAX_RANKS as u32;
    /// Selections the sender has for each expert of the receiver, `[MAX_LOCAL_EXPERTS]`.
    pub const EXPERT_COUNTS: u32 = CHANNEL_STARTS + MAX_CHANNELS;
    /// With rows by expert: rows of all segments of the sender, padding included.
    pub const EXPERT_ROWS: u32 = EXPERT_COUNTS + MAX_LOCAL_EXPERTS;
    /// With rows by expert: the receiver's first row at the sender for each expert of the sender,
    /// `[MAX_LOCAL_EXPERTS]`.
    pub const EXPERT_STARTS: u32 = EXPERT_ROWS + 1;
    /// Packets per message.
    pub const WORDS: u32 = EXPERT_STARTS + MAX_LOCAL_EXPERTS;
}

/// Offset of packet `word` of the message from `src`, in bytes from [`PoolLayout::messages`].
#[inline(always)]
pub const fn message_offset(src: u32, word: u32) -> u64 {
    (src as u64 * message::WORDS as u64 + word as u64) * 8
}

/// Offset of the records of copies in a pool of one node with rows by expert, in bytes from
/// [`PoolLayout::messages`]: u64 `[num_ranks][1 + max_tokens][max_topk]`. The first word of the own
/// rank's is its counter of claims.
#[inline(always)]
pub const fn copies_offset(num_ranks: u32) -> u64 {
    message_offset(num_ranks, 0)
}

/// Records of copies across nodes that a channel of a source has, where there are so many channels:
/// one with its number of tokens, then one of each token.
#[inline(always)]
pub const fn copy_records_of_channel(max_tokens: u32, num_channels: u32) -> u32 {
    1 + max_tokens.div_ceil(if num_channels > 1 { num_channels } else { 1 })
}

/// Where things are in a pool: offsets in bytes from its start, the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct PoolLayout {
    /// Count messages ([`message_offset`]), within a node `[num_ranks]`.
    pub messages: u64,
    /// Received rows.
    pub recv_x: u64,
    /// Scales of received rows, f32 `[rows, num_scales]`, or the records of their columns.
    pub recv_scales: u64,
    /// Local expert ids of received rows, i64 `[rows, num_topk]`. For rows by expert: u32 source
    /// rank, u32 entry of the token, `[rows]`.
    pub recv_topk_idx: u64,
    /// Weights of received rows, f32 `[rows, num_topk]`. For rows by expert: the weight of their
    /// entry, `[rows]`.
    pub recv_topk_weights: u64,
    /// Token index of received rows on their source rank, i32 `[rows]`. For rows by expert: -1 in
    /// padding.
    pub recv_src_idx: u64,
    /// Source of received rows, where there are several nodes, `[rows]`: u32 source node, u32 bits
    /// of this node's ranks that the token goes to.
    pub recv_src_meta: u64,
    /// Rows that peers gather in a combine.
    pub combine_x: u64,
    /// Weights that peers gather in a combine, f32 `[rows, num_topk]`.
    pub combine_weights: u64,
    /// Rows there is room for.
    pub rows: u64,
    /// Bytes of the whole pool.
    pub bytes: u64,
}

layout_assert!(PoolLayout, size = 88, bytes at 80);

/// The addresses and words by which a kernel communicates with the peers.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Comm {
    /// Where each rank's pool is, the own one included, of the first ranks. They are arguments of
    /// the kernel, so that no thread waits for a table's memory.
    pub pools: [DevicePtr; FEW_RANKS],
    /// Where each rank's pool is, u64 `[num_ranks]`.
    pub pool_table: DevicePtr,
    /// [`LocalState`] of this rank.
    pub local: DevicePtr,
    /// [`Status`] of this rank, in mapped host memory.
    pub status: DevicePtr,
    /// Longest wait for a peer, in ns.
    pub timeout_ns: u64,
    /// Out, or null: the launch's [`BlockTrace`]s, one per block of its grid.
    pub trace: DevicePtr,
    /// This rank.
    pub rank: u32,
    /// Ranks.
    pub num_ranks: u32,
    /// The call that this rank publishes with `ready`: [`super::Call::bits`].
    pub call: u64,
    /// The layout of every pool.
    pub pool: PoolLayout,
}

layout_assert!(Comm, size = 144 + 8 * FEW_RANKS, pool at 56 + 8 * FEW_RANKS);

/// When a block reached each phase of its operation, in ns of the device's clock. Thread 0 of the
/// block writes it, and only where [`Comm::trace`] is set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct BlockTrace {
    /// The block started.
    pub enter: u64,
    /// Every peer was ready; in notify, every peer's counts had come. In a block that stages rows,
    /// which does not wait: it began. Zero in a block of low latency that only sends.
    pub ready: u64,
    /// The block's share was moved; in notify, its tokens were numbered.
    pub moved: u64,
    /// The block was through: in the last one of a grid, every peer was as well.
    pub done: u64,
}

layout_assert!(BlockTrace, size = 32, done at 24);

/// State that only this rank's kernels touch. Monotonic, never reset, but by the host where the
/// ranks of a low-latency buffer regroup.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct LocalState {
    /// Operations completed. The running operation is `epoch + 1`; the kernel that ends it stores
    /// that.
    pub epoch: u64,
    /// Blocks add their share of [`QUANTUM`] when they are through; the one that completes
    /// `epoch * QUANTUM` is last.
    pub ticket: u64,
    /// Non-zero once a wait has expired or met another call: every later wait returns at once. Then
    /// the low 31 bits of the operation's epoch, below a set bit.
    pub abort: u32,
    /// A bit for each of the first 32 ranks that is left out of a low-latency buffer. The host
    /// writes it, between operations.
    pub left_out: u32,
    /// `epoch << 16 | blocks`: so many blocks of the operation have started, where they share its
    /// work by the order in which they do.
    pub started: u64,
    /// Non-zero once a block has taken it on itself to write the [`Status`].
    pub recorded: u64,
    /// As `left_out`, of the ranks from 32 on.
    pub left_out_high: u32,
    /// Zero.
    pub reserved: u32,
    /// `epoch << 26 | claims`: so many claims of tokens the warps of a dispatch have made.
    pub claims: u64,
}

layout_assert!(LocalState, size = 56, claims at 48);

/// Offset of [`LocalState::epoch`].
pub const LOCAL_EPOCH: u64 = 0;
/// Offset of [`LocalState::ticket`].
pub const LOCAL_TICKET: u64 = 8;
/// Offset of [`LocalState::abort`].
pub const LOCAL_ABORT: u64 = 16;
/// Offset of [`LocalState::left_out`].
pub const LOCAL_LEFT_OUT: u64 = 20;
/// Offset of [`LocalState::started`].
pub const LOCAL_STARTED: u64 = 24;
/// Offset of [`LocalState::recorded`].
pub const LOCAL_RECORDED: u64 = 32;
/// Offset of [`LocalState::left_out_high`].
pub const LOCAL_LEFT_OUT_HIGH: u64 = 40;
/// Offset of [`LocalState::claims`].
pub const LOCAL_CLAIMS: u64 = 48;
/// Where the epoch begins in [`LocalState::claims`]: a rank has fewer tokens and warps than that.
pub const CLAIMS_SHIFT: u32 = 26;
/// Where the epoch begins in [`LocalState::started`].
pub const STARTED_SHIFT: u32 = 16;

/// The record of the first failure of a kernel, in mapped host memory. `code` is stored last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct Status {
    /// 0, or the [`Wait`].
    pub code: u64,
    /// The peer that the wait was for: the index of a rank of this node, or of a node, or a rank,
    /// depending on the [`Wait`].
    pub peer: u64,
    /// The epoch of the operation.
    pub epoch: u64,
    /// The value that was needed. For a ready word it is the epoch, or where calls differ the
    /// needed word.
    pub needed: u64,
    /// The value last seen.
    pub seen: u64,
    /// How long, in ns.
    pub waited_ns: u64,
    /// The call that the kernel was given, [`Comm::call`](super::Comm::call).
    pub call: u64,
}

layout_assert!(Status, size = 56, waited_ns at 40);

/// A plan that is not ready, of a dispatch whose counts stay on the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct FailedPlan {
    /// The header of the dispatch's handle, but for its tag and the relayed tokens.
    pub header: PlanHeader,
    /// Rows that the dispatch had room for.
    pub capacity: u64,
}

layout_assert!(FailedPlan, size = 48, capacity at 40);

/// The last failed plans of a buffer, behind its [`Status`] in mapped host memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct FailedPlans {
    /// How many there were. Stored last.
    pub count: u64,
    /// Number `n` is at `n % KEPT_PLANS`.
    pub plans: [FailedPlan; KEPT_PLANS],
}

layout_assert!(FailedPlans, size = 200, plans at 8);

/// Offset, in the mapped host memory of a [`Status`], of two words of each peer, u64
/// `[2, MAX_WORLD]`, by the numbers that [`Status::peer`] has: the [`Wait`] for it that lasted at
/// least half of the deadline until this one or another one expired, else 0. Waits that a peer
/// enters come first.
pub const LATE_PEERS: u64 = (size_of::<Status>() + size_of::<FailedPlans>()) as u64;

/// Offset, behind those, of a byte of each token, `[max_tokens]`: 1 where a combine may have left
/// it without its sum or a part of it, else 0.
pub const MISSING_TOKENS: u64 = LATE_PEERS + 2 * MAX_WORLD as u64 * 8;

/// Plans that [`FailedPlans`] has room for.
pub const KEPT_PLANS: usize = 4;

/// The events that a kernel can wait for, and the other failures that it records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Wait {
    /// Packets of a count message.
    Counts = 1,
    /// `ready` in a dispatch.
    DispatchReady = 2,
    /// `done` in a dispatch.
    DispatchDone = 3,
    /// `ready` in a combine.
    CombineReady = 4,
    /// `done` in a combine.
    CombineDone = 5,
    /// The count message of a node; the peer is its rank with this one's index.
    NodeCounts = 6,
    /// A count message that a rank of this node got and hands on; the peer is its source.
    RelayedCounts = 7,
    /// `ready` of another node in a dispatch.
    DispatchNodeReady = 8,
    /// Rows of another node in a dispatch.
    DispatchArrival = 9,
    /// `ready` of another node in a combine.
    CombineNodeReady = 10,
    /// Sums of another node in a combine.
    CombineArrival = 11,
    /// The proxy of a queue, in notify.
    NotifyQueue = 12,
    /// The proxy of a queue, in a dispatch.
    DispatchQueue = 13,
    /// The proxy of a queue, in a combine.
    CombineQueue = 14,
    /// `ready` of a rank of this node, which came with another call.
    OtherCall = 15,
    /// `ready` of another node, which came with another call.
    OtherNodeCall = 16,
    /// Rows that a rank of this node copies into its pool during a combine; counted from the start
    /// of their unit.
    Staged = 17,
    /// Entry of a rank into a low-latency dispatch, whose place the rank may still use.
    LowLatencyReady = 18,
    /// Entry of a rank into a low-latency operation.
    LowLatencyEnter = 19,
    /// Expert ids of a token in a low-latency dispatch.
    LowLatencyIds = 20,
    /// Rows in a low-latency dispatch.
    LowLatencyRows = 21,
    /// Returned rows in a low-latency combine.
    LowLatencyReturned = 22,
    /// Nothing: a peer came to a low-latency operation with another call.
    LowLatencyOtherCall = 23,
    /// Nothing: an expert id is out of range.
    LowLatencyExpert = 24,
    /// The proxy of a queue, in a low-latency operation.
    LowLatencyQueue = 25,
    /// Nothing: a combine was given fewer rows (`seen`) than came (`needed`).
    MissingRows = 26,
    /// Nothing: a low-latency combine found no dispatch into its place since the combine before.
    LowLatencyUnpaired = 27,
    /// Nothing: a low-latency combine is of other tokens (`seen`) than the dispatch into its place
    /// (`needed`).
    LowLatencyTokens = 28,
    /// Nothing: a rank gave up (in operation `seen`) whose rows a low-latency combine read.
    LowLatencyGaveUp = 29,
    /// Nothing: a rank gave up whose rows a combine of high throughput read.
    CombineGaveUp = 30,
}

impl Wait {
    /// Whether the wait is for the first word of a peer in an operation, which the peer publishes
    /// without waiting for others. A peer that has published it may be late because it waits
    /// itself.
    #[inline(always)]
    pub const fn is_for_entry(self) -> bool {
        matches!(
            self,
            Wait::Counts
                | Wait::DispatchReady
                | Wait::CombineReady
                | Wait::NodeCounts
                | Wait::DispatchNodeReady
                | Wait::CombineNodeReady
                | Wait::LowLatencyReady
                | Wait::LowLatencyEnter
        )
    }
}
