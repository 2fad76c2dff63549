//! Dispatch across nodes. A channel has two blocks: the *sender* writes its tokens' rows to the
//! ranks of this node. It also writes a slot for every other node that gets the token, into the
//! peer's wire memory or for a put to take. The *forwarder* writes the rows that arrive from other
//! nodes to the ranks of this one. Of rows by expert each writes one to each rank, which copies it.
//!
//! Soundness: rows are written as within a node. A slot is written behind its node's ready word, at
//! the place that the count exchange has planned for its token alone. It is read behind the arrival
//! word, with a proxy fence before the copy engine reads it. One warp delivers the slots that all
//! warps have released to it through their progress. The kernel ends when its puts have left and
//! its stores have landed. Collectives stand where all lanes of a warp arrive: the conditions
//! around them are the same in all lanes.

mod copies;
mod forwarder;
mod metadata;
mod poster;
mod route;
mod sender;

use super::arrivals::Arrivals;
use super::dispatch::copy_rings_behind;
use super::epoch::{Phase, ReadyEntry, current_epoch, leave, tell_ready, trace, warp_aborted};
use super::progress::{PROGRESS_BYTES, Progress, workers};
use super::rail::{Operation, tell_nodes_ready, wait_mapped_ready};
use super::ring::Ring;
use crate::layout::{
    DispatchArgs, ExpertRoute, InternodeDispatchArgs, InternodeExpertDispatchArgs, SlotShape, Wait, Wire,
    bulk_scale_bytes, ring_bytes, tail_bytes_by_expert,
};
use crate::simt::*;
use copies::Copies;
use forwarder::forward;
use poster::post_channel;
use sender::send;

/// Moves rows (and, unless cached, their metadata) to the ranks that want them, on this node and on
/// others. The last warp of a block delivers in the sender and polls arrival words in the
/// forwarder; the others have a ring each. Shared memory: the rings, then a word for each warp.
#[kernel(
    threads = 288, barriers = 3, registers = 200,
    grid = args.route.num_channels.saturating_mul(2), block >= 64,
    shared = crate::layout::shared_with_rings(
        block / 32 - 1, args.dispatch.stages, args.dispatch.stage_bytes, super::progress::PROGRESS_BYTES
    ),
    requires(
        ..DispatchArgs(args.dispatch),
        ..Wire(args.wire),
        args.dispatch.stage_bytes >= args.dispatch.piece_bytes
            + bulk_scale_bytes(args.dispatch.num_scales)
            + SlotShape::metadata_bytes(args.dispatch.num_topk),
    )
)]
pub unsafe fn internode_dispatch(args: InternodeDispatchArgs) {
    move_rows::<false>(&args, &ExpertRoute::NONE, &Copies::NONE);
}

/// The same of rows by expert: lane k has the row of a token's entry k, and several may be of one
/// rank. A row goes to each other rank of this node once, to the place of the token's first entry
/// for that rank. There a block's last warps copy it to the places of the others; their rings stand
/// behind the words of the warps.
#[kernel(
    threads = 384, barriers = 3, registers = 168,
    grid = args.rows.route.num_channels.saturating_mul(2),
    block >= args.copy_warps.saturating_mul(32).saturating_add(64),
    shared = shared_bytes_by_expert(&args, block),
    requires(
        ..InternodeDispatchArgs(args.rows),
        ..DispatchArgs(args.rows.dispatch),
        ..Wire(args.rows.wire),
        args.rows.dispatch.num_topk <= 32,
        args.rows.dispatch.stage_bytes >= args.rows.dispatch.piece_bytes
            + bulk_scale_bytes(args.rows.dispatch.num_scales)
            + tail_bytes_by_expert(args.rows.dispatch.num_topk),
    )
)]
pub unsafe fn internode_dispatch_by_expert(args: InternodeExpertDispatchArgs) {
    move_rows::<true>(&args.rows, &args.by_expert, &Copies::of(&args, ctaid() / 2));
}

#[device]
unsafe fn move_rows<const BY_EXPERT: bool>(
    args: &InternodeDispatchArgs,
    by_expert: &ExpertRoute,
    copies: &Copies,
) {
    let (rows, comm, wire) = (&args.dispatch, &args.dispatch.comm, &args.wire);
    let workers = if BY_EXPERT { at_least_one(workers() - copies.warps()) } else { workers() };
    let (channel, forwards) = (ctaid() / 2, ctaid() & 1 == 1);
    trace(comm, Phase::Enter);
    let entry = ReadyEntry::read(comm, rows.header.0);
    let epoch = current_epoch(comm);
    let ready = entry.ready_word(comm, epoch);
    let operation = Operation { epoch, ready, queue_wait: Wait::DispatchQueue };
    if ctaid() == 0 && tid() < 32 {
        if rows.with_metadata == 0 {
            tell_ready::<false>(comm, ready);
        }
        tell_nodes_ready(comm, wire, operation);
    }
    let planned = entry.is_planned();
    let at = ring_bytes(workers, rows.stages, rows.stage_bytes);
    let (progress, arrivals) = (Progress::new(at, workers), Arrivals::new(at));
    // Forwarders write on this node alone.
    let of_node = if forwards { None } else { Some(Wait::DispatchNodeReady) };
    let joined = wait_mapped_ready(comm, wire, operation, Wait::DispatchReady, of_node);
    if tid() / 32 == workers {
        if joined && !forwards {
            post_channel(args, channel, planned, &progress, operation);
        } else if joined && planned {
            forwarder::watch(args, &arrivals, channel, epoch);
        }
    } else if joined && planned {
        // The peers have released the rows and slots to this thread that are overwritten now; the
        // copy engine comes behind that too.
        fence_proxy_async_global();
        if BY_EXPERT && tid() / 32 > workers {
            let rings =
                copy_rings_behind(ring_bytes(workers, rows.stages, rows.stage_bytes) + PROGRESS_BYTES);
            let (rings, nth) = (dynamic_shared() + rings, tid() / 32 - workers - 1);
            copies::make(args, copies, epoch, forwards, rings, nth);
        } else {
            let ring = Ring::new(rows.stages, rows.stage_bytes, workers);
            if forwards {
                forward::<BY_EXPERT>(args, by_expert, copies, &arrivals, &ring, channel, workers, epoch);
            } else {
                send::<BY_EXPERT>(args, by_expert, copies, &ring, channel, workers, &progress, epoch);
            }
        }
        // The stores have landed for this thread, so that the releases in `leave` pass them on: no
        // proxy fence.
        bulk_wait::<0>();
    }
    // A wait that expired in any warp keeps the block from saying that it has done its part.
    barrier_sync();
    leave::<false>(comm, epoch, joined & !warp_aborted(comm), Wait::DispatchDone);
}

/// Shared memory of a block of so many threads: the rings, a word for each warp, and the rings of
/// the warps that copy.
#[cfg(not(target_arch = "nvptx64"))]
fn shared_bytes_by_expert(args: &InternodeExpertDispatchArgs, block: u32) -> u32 {
    let rows = &args.rows.dispatch;
    let workers = block / 32 - 1 - args.copy_warps;
    let rings = crate::layout::shared_with_rings(workers, rows.stages, rows.stage_bytes, PROGRESS_BYTES);
    if args.copy_warps == 0 {
        return rings;
    }
    let behind = copy_rings_behind(rings);
    crate::layout::shared_with_rings(args.copy_warps, super::dispatch::COPY_STAGES, rows.stage_bytes, behind)
}
