//! Dispatch across nodes. A channel has two blocks: the *sender* writes its tokens' rows to the ranks of this node and a slot for
//! every other node that wants the token, into the peer's wire memory or for a put to take; the *forwarder* writes the rows that
//! arrive from other nodes to the ranks of this one.
//!
//! What makes it sound: rows are written as within a node. A slot is written once its node has said that it is ready, at the place that
//! the count exchange has planned for its token and for no other, and read once the arrival word says that it has come, with a proxy
//! fence before the copy engine reads it. One warp delivers what all have released to it through their progress. The kernel ends when
//! its puts have left and its stores have landed. Collectives stand where all lanes of a warp arrive: what a warp branches on around
//! them is the same in all lanes.

mod forwarder;
mod metadata;
mod poster;
mod sender;

use epoxide_macros::kernel;

use super::epoch::{Entry, Phase, current_epoch, leave, tell_ready, trace, warp_aborted};
use super::progress::{Progress, workers};
use super::rail::{Operation, tell_nodes_ready, wait_mapped_ready};
use super::ring::Ring;
use crate::layout::{
    InternodeDispatchArgs, MAX_NODES, SEND_ROW_STRIDE, SlotShape, Wait, bulk_scale_bytes, ring_bytes,
};
use crate::simt::*;
use forwarder::forward;
use poster::post_channel;
use sender::send;

/// Moves rows (and, unless cached, their metadata) to the ranks that want them, on this node and on others. The last warp of
/// a block posts puts in the sender and is idle in the forwarder; the others have a ring each. Shared memory: the rings, then a
/// word for each warp.
#[kernel(
    threads = 288, min_blocks = 1, barriers = 3, registers = 200,
    requires(
        args.dispatch.row_bytes.is_multiple_of(16),
        args.dispatch.row_bytes >= 16,
        args.dispatch.stages >= 2,
        args.dispatch.stages <= 32,
        args.dispatch.piece_bytes.is_multiple_of(16),
        args.dispatch.piece_bytes >= 16,
        args.dispatch.stage_bytes.is_multiple_of(128),
        args.dispatch.stage_bytes >= args.dispatch.piece_bytes
            + bulk_scale_bytes(args.dispatch.num_scales)
            + SlotShape::metadata_bytes(args.dispatch.num_topk),
        args.dispatch.local_experts >= 1,
        args.slot_bytes.is_multiple_of(16),
        args.slot_bytes as u64 * args.wire.layout.slots <= args.wire.layout.node_bytes,
        args.wire.num_nodes >= 2,
        args.wire.num_nodes <= MAX_NODES as u32,
        args.dispatch.comm.num_ranks >= 1,
        args.wire.num_queues >= 1,
        args.wire.chunk >= 1,
        args.route.num_channels >= 1,
    )
)]
pub unsafe fn internode_dispatch(args: InternodeDispatchArgs) {
    let (rows, comm, wire) = (&args.dispatch, &args.dispatch.comm, &args.wire);
    let workers = workers();
    let (channel, forwards) = (ctaid() / 2, ctaid() & 1 == 1);
    trace(comm, Phase::Enter);
    let entry = Entry::read(comm, rows.header.0);
    let epoch = current_epoch(comm);
    let ready = entry.ready_word(comm, epoch);
    let operation = Operation { epoch, ready, queue_wait: Wait::DispatchQueue };
    if ctaid() == 0 && tid() < 32 {
        if rows.with_metadata == 0 {
            tell_ready(comm, ready);
        }
        tell_nodes_ready(comm, wire, operation);
    }
    let planned = entry.is_planned();
    let progress = Progress::new(ring_bytes(workers, rows.stages, rows.stage_bytes), workers);
    let joined = wait_mapped_ready(comm, wire, operation, Wait::DispatchReady, Wait::DispatchNodeReady);
    if tid() / 32 == workers {
        if !forwards && joined {
            post_channel(&args, channel, planned, &progress, operation);
        }
    } else if joined && planned {
        // The peers have released the rows and slots to this thread that are overwritten now; the copy engine comes behind that too.
        fence_proxy_async_global();
        let ring = Ring::new(rows.stages, rows.stage_bytes, workers);
        if forwards {
            forward(&args, &ring, channel, workers, epoch);
        } else {
            send(&args, &ring, channel, workers, &progress);
        }
        // The stores have landed for this thread, so that the releases in `leave` pass them on: no proxy fence.
        bulk_wait::<0>();
    }
    // A wait that expired in any warp keeps the block from saying that it has done its part.
    barrier_sync();
    leave(comm, epoch, joined & !warp_aborted(comm), Wait::DispatchDone);
}

/// The slots of this operation.
#[inline(always)]
fn slot_shape(args: &InternodeDispatchArgs) -> SlotShape {
    let rows = &args.dispatch;
    let topk = if rows.with_metadata != 0 { Some(rows.num_topk) } else { None };
    SlotShape::new(rows.row_bytes, rows.num_scales, topk)
}

/// Writes the source of a row to every rank of this node that gets it: lane j to rank j.
#[inline(always)]
unsafe fn send_source(args: &InternodeDispatchArgs, row: i32, peer: u64, node: u32) {
    // SAFETY: the row was planned inside the pool.
    unsafe {
        let wanted = ballot(row >= 0);
        if row >= 0 {
            let meta = peer + args.dispatch.comm.pool.recv_src_meta + row as u64 * 8;
            st_u32(meta, node);
            st_u32(meta + 4, wanted);
        }
    }
}

/// Notes where a relayed token's rows went, for combine and cached dispatches: lane j those at rank j.
#[inline(always)]
unsafe fn note_rows(args: &InternodeDispatchArgs, entry: u32, head: i32, row: i32) {
    // SAFETY: the entry is one of the tokens that this rank relays.
    unsafe {
        let (lane, per_node) = (laneid(), args.dispatch.comm.num_ranks);
        if lane < SEND_ROW_STRIDE {
            st_i32(forward_row(args, entry) + lane as u64 * 4, row);
        }
        if lane < per_node {
            let at = entry as u64 * per_node as u64 + lane as u64;
            st_i32(args.send_nvl_head.0 + at * 4, head);
        }
    }
}

/// Bytes of a token's rows at the ranks of this node.
const FORWARD_ROW_BYTES: u32 = SEND_ROW_STRIDE * 4;
const _: () =
    assert!(FORWARD_ROW_BYTES.is_multiple_of(16) && FORWARD_ROW_BYTES <= SlotShape::metadata_bytes(0));

/// Where a relayed token's rows at the ranks of this node are noted.
#[inline(always)]
fn forward_row(args: &InternodeDispatchArgs, entry: u32) -> u64 {
    args.route.forward_row.0 + entry as u64 * FORWARD_ROW_BYTES as u64
}

/// Where the first rows of a node's channel are at the ranks of this node: address of the entry for rank 0.
#[inline(always)]
fn forward_start(args: &InternodeDispatchArgs, node: u32, channel: u32) -> u64 {
    let entry = (node * args.route.num_channels + channel) * SEND_ROW_STRIDE;
    args.forward_start.0 + entry as u64 * 4
}

/// Tokens that this rank relays for the nodes before `node`.
#[inline(always)]
unsafe fn relayed_before(args: &InternodeDispatchArgs, node: u32) -> u32 {
    // SAFETY: the entry lies inside the array.
    unsafe {
        if node == 0 { 0 } else { ld_u32(args.route.recv_rdma_rank_prefix_sum.0 + (node - 1) as u64 * 4) }
    }
}
