//! The state that a dispatch leaves for combine and for cached dispatches.

use bytemuck::{Pod, Zeroable};

use super::assert::layout_assert;
use super::limits::{FEW_RANKS, MAX_TOPK};

/// Row stride of `send_row`, in entries: one per possible rank.
pub const SEND_ROW_STRIDE: u32 = FEW_RANKS as u32;

/// List stride of `send_row` with more ranks, in entries: a token has no more destinations than
/// entries.
pub const SEND_LIST_STRIDE: u32 = MAX_TOPK;

/// Verdict of the count exchange. It is the same on every rank for [`PlanStatus::Capacity`] and
/// [`PlanStatus::InvalidExpert`]: each derives it from the same counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum PlanStatus {
    /// No plan has been made.
    Empty = 0,
    /// The rows have places; they may move.
    Ready = 1,
    /// Some rank would receive more rows than a pool holds: `detail` is that many rows, `peer` the
    /// rank.
    Capacity = 2,
    /// A token of rank `peer` named an expert out of range.
    InvalidExpert = 3,
    /// Signature word `detail` of rank `peer` differs: `theirs` there, `ours` here.
    Mismatch = 4,
    /// A peer's counts did not come in time; [`super::Status`] has the details.
    Timeout = 5,
    /// Rank `peer` has `detail` tokens for one node, more than its slots there.
    Slots = 6,
}

/// Start of a handle's device memory, also written to mapped host memory for exact-size calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct PlanHeader {
    /// A [`PlanStatus`].
    pub status: u32,
    /// Rows this rank receives.
    pub num_recv_tokens: u32,
    /// See [`PlanStatus`].
    pub peer: u32,
    /// See [`PlanStatus`].
    pub detail: u32,
    /// See [`PlanStatus`].
    pub theirs: u32,
    /// See [`PlanStatus`].
    pub ours: u32,
    /// On the host: the call that this header answers, stored last. On the device: unused.
    pub tag: u64,
    /// Tokens whose rows this rank relays to its node, own ones included; 0 with one node.
    pub num_rdma_recv_tokens: u32,
    /// The low bits of the epoch of the dispatch that made the plan: the same on every rank, and
    /// another for each dispatch.
    pub epoch: u32,
}

layout_assert!(PlanHeader, size = 40, epoch at 36);
