//! Where sender and forwarder find what the count exchange has planned, and where they note what
//! became of it.

use super::metadata::Metadata;
use crate::kernels::list::entry_at;
use crate::layout::{ExpertRoute, InternodeDispatchArgs, SEND_ROW_STRIDE, SlotShape};
use crate::simt::*;

/// The slots of this operation.
#[device]
pub fn slot_shape<const BY_EXPERT: bool>(args: &InternodeDispatchArgs) -> SlotShape {
    let rows = &args.dispatch;
    let topk = if rows.with_metadata != 0 { Some(rows.num_topk) } else { None };
    if BY_EXPERT {
        return SlotShape::by_expert(rows.row_bytes, rows.num_scales, topk);
    }
    SlotShape::new(rows.row_bytes, rows.num_scales, topk)
}

/// Writes the source of a row to every rank of this node that gets it: lane j to rank j.
///
/// # Safety
/// The row was planned inside the pool.
#[device]
pub unsafe fn send_source(args: &InternodeDispatchArgs, row: i32, peer: u64, node: u32) {
    let wanted = ballot(row >= 0);
    if row >= 0 {
        let meta = Global::<[u32; 2]>::new(peer + args.dispatch.comm.pool.recv_src_meta).at(row);
        st_u32(meta, node);
        st_u32(meta + 4, wanted);
    }
}

/// Notes where a relayed token's rows went, for combine and cached dispatches: lane j those at rank
/// j.
///
/// # Safety
/// The entry is one of the tokens that this rank relays.
#[device]
pub unsafe fn note_rows(args: &InternodeDispatchArgs, entry: u32, row: i32) {
    let lane = laneid();
    if lane < SEND_ROW_STRIDE {
        Global::<i32>::new(forward_row(args, entry)).st(lane, row);
    }
}

/// Notes where a relayed token's selections went, with their weights where there are some: lane k
/// that of entry k.
///
/// # Safety
/// The entry is one of the tokens that this rank relays.
#[device]
pub unsafe fn note_selections(
    args: &InternodeDispatchArgs,
    by_expert: &ExpertRoute,
    entry: u32,
    selection: &Metadata,
) {
    let (lane, topk) = (laneid(), args.dispatch.num_topk);
    let mut to = -1;
    if selection.row >= 0 {
        to = (selection.rank as i64) << 32 | selection.row as i64;
    }
    st_i64(entry_at(args.route.forward_row.0, entry, lane), to);
    if !by_expert.forward_weights.is_null() && lane < topk {
        let at = row_major(entry, topk, lane);
        by_expert.forward_weights.array::<f32>().st(at, selection.weight);
    }
}

/// Bytes of a token's rows at the ranks of this node.
pub const FORWARD_ROW_BYTES: u32 = SEND_ROW_STRIDE * 4;
const _: () =
    assert!(FORWARD_ROW_BYTES.is_multiple_of(16) && FORWARD_ROW_BYTES <= SlotShape::metadata_bytes(0));

/// Where a relayed token's rows at the ranks of this node are noted.
#[device]
pub fn forward_row(args: &InternodeDispatchArgs, entry: u32) -> u64 {
    args.route.forward_row.row(entry, FORWARD_ROW_BYTES)
}

/// Where the first rows of a node's channel are at the ranks of this node: address of the entry for
/// rank 0.
#[device]
pub fn forward_start(args: &InternodeDispatchArgs, node: u32, channel: u32) -> Global<u32> {
    let entry = (node * args.route.num_channels + channel) * SEND_ROW_STRIDE;
    args.forward_start.array::<u32>().skip(entry)
}

/// Tokens that this rank relays for the nodes before `node`.
///
/// # Safety
/// The entry lies inside the array.
#[device]
pub unsafe fn relayed_before(args: &InternodeDispatchArgs, node: u32) -> u32 {
    if node == 0 { 0 } else { args.route.recv_rdma_rank_prefix_sum.array::<u32>().ld(node - 1) }
}
