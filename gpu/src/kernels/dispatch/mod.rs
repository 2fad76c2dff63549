//! Dispatch: every rank writes its tokens' rows straight to their final places in the peers' pools.
//!
//! Soundness: a row is written behind the ready word of its rank, to the place inside that rank's
//! pool that notify has planned for this row alone. A block's releases in `leave` order its stores.
//! A stage is loaded again once the stores from it have read it, and every load has landed when the
//! block ends. Collectives stand where all lanes of a warp arrive: the conditions around them are
//! the same in all lanes.

mod by_expert;
mod claims;
mod copies;
mod late;
mod metadata;
mod rows;

use super::epoch::{
    Phase, ReadyEntry, current_epoch, leave, pool_at, pool_of, tell_ready, trace, wait_ranks_ready,
};
use super::list::Destination;
use super::ring::{Ring, Turn, block_range};
use crate::layout::{
    CLAIMS_SHIFT, DispatchArgs, ExpertDispatchArgs, SEND_ROW_STRIDE, Wait, bulk_scale_bytes, ring_bytes,
    row_stride,
};
use crate::simt::*;
use claims::{Claims, Piece};
use metadata::{Entries, tokens_at_once};

pub use copies::{COPY_STAGES, Copies, Place, copy_rings_behind, is_first_of_rank, wait_two_behind};
#[cfg(not(target_arch = "nvptx64"))]
pub use late::{AnnounceTokens, CopyReceivedRows};
pub use rows::{Cursor, Tail, copy_scales, load_piece, load_stage, scale_place, store_plain};

/// Moves rows (and, unless cached, their metadata) to the ranks that want them.
///
/// A block owns a contiguous range of tokens, a warp every n-th of them. The warp's copy engine
/// work is a ring of `stages` buffers: one bulk load reads a row (or a piece of it), then lane r's
/// bulk store sends it to rank r. So a row is read once, for any number of receiving ranks. A
/// rank's rows for itself go out through ordinary stores, which leaves the copy engine to the
/// links. The block's last `metadata_warps` warps send metadata, and the last of all polls for the
/// peers while the others fill their rings. Shared memory: the rings, then a word for whether the
/// block has joined.
#[kernel(
    threads = 384, barriers = 2, registers = 168, dependent,
    block >= least_threads(&args), shared = shared_bytes(&args, block),
    requires(args.num_topk <= 32, args.metadata_warps >= 1)
)]
pub unsafe fn dispatch(args: DispatchArgs) {
    send_rows::<false, false>(&args);
}

/// The same to up to 64 ranks, of which lane d has a token's d-th destination.
#[kernel(
    threads = 384, barriers = 2, registers = 168, dependent,
    block >= least_threads(&args), shared = shared_bytes(&args, block),
    requires(args.num_topk <= 32, args.metadata_warps >= 1)
)]
pub unsafe fn dispatch_many(args: DispatchArgs) {
    send_rows::<true, false>(&args);
}

/// As `dispatch`, for more tokens than fill the rings of all warps. These fixed tokens are divided
/// among blocks as there; the warps claim all others.
#[kernel(
    threads = 384, barriers = 2, registers = 168, dependent,
    block >= least_threads(&args), shared = shared_bytes(&args, block),
    requires(args.num_topk <= 32, args.metadata_warps >= 1, args.num_tokens < 1 << (CLAIMS_SHIFT - 1))
)]
pub unsafe fn dispatch_claiming(args: DispatchArgs) {
    send_rows::<false, true>(&args);
}

/// The same to up to 64 ranks.
#[kernel(
    threads = 384, barriers = 2, registers = 168, dependent,
    block >= least_threads(&args), shared = shared_bytes(&args, block),
    requires(args.num_topk <= 32, args.metadata_warps >= 1, args.num_tokens < 1 << (CLAIMS_SHIFT - 1))
)]
pub unsafe fn dispatch_many_claiming(args: DispatchArgs) {
    send_rows::<true, true>(&args);
}

/// The same of rows by expert: lane k has the row of a token's entry k, and several may be of one
/// rank. A row goes over a link once for each rank. There it goes to the place of the token's first
/// entry for that rank, and warps of the receiver copy it to the places of the others.
#[kernel(
    threads = 640, barriers = 2, registers = 96, dependent,
    block >= least_threads(&args.dispatch).saturating_add(args.copy_warps.saturating_mul(32)),
    shared = shared_bytes_by_expert(&args, block),
    requires(
        ..DispatchArgs(args.dispatch),
        args.dispatch.num_topk <= 32,
        args.dispatch.metadata_warps >= 1,
        args.dispatch.num_tokens < 1 << (CLAIMS_SHIFT - 1),
    )
)]
pub unsafe fn dispatch_by_expert(args: ExpertDispatchArgs) {
    by_expert::send_rows(&args.dispatch, &Copies::of(&args));
}

#[device]
unsafe fn send_rows<const MANY: bool, const CLAIMS: bool>(args: &DispatchArgs) {
    let comm = &args.comm;
    let (lane, warp, warps) = (laneid(), tid() / 32, ntid() / 32 - args.metadata_warps);
    trace(comm, Phase::Enter);
    let entry = ReadyEntry::read(comm, args.header.0);
    let epoch = current_epoch(comm);
    let ready = entry.ready_word(comm, epoch);
    // A dispatch with a count exchange published it in notify.
    if args.with_metadata == 0 && ctaid() == 0 && warp == 0 {
        tell_ready::<MANY>(comm, ready);
    }

    // With no valid plan, no row moves; the words still do, so that the next operation finds
    // them in step.
    let planned = entry.is_planned();
    let senders = warps * nctaid();
    let fixed = if CLAIMS { args.num_tokens.min(args.fixed_tokens * senders) } else { args.num_tokens };
    let (mut token, fixed_end) = block_range(fixed);
    token += warp;
    let end = if CLAIMS { args.num_tokens } else { fixed_end };
    let mut claims = Claims::behind_fixed((token, fixed_end, warps), senders, args.fixed_tokens, end);
    // A warp that moves rows finds no entries to send, and one that sends metadata no rows to
    // move.
    let ring = Ring::lay_out(args.stages, args.stage_bytes, warps);
    let (each, mut first, mut metadata_end) = (tokens_at_once(args), end, end);
    if warp < warps {
        ring.init();
    } else if args.with_metadata != 0 {
        (first, metadata_end) = block_range(args.num_tokens);
        first += (warp - warps) * each;
    }
    if warp >= warps || token >= fixed_end || !planned {
        token = end;
    }
    let claims_some = CLAIMS && claims.are_needed(end) && token < end;

    // Fill the ring while the peers' words are on their way.
    let mut send = Piece { nth: 0, token, offset: 0 };
    let (mut load, mut loaded) = (send, 0);
    while loaded < args.stages && load.token < end {
        load_piece(&ring, args, load.token, load.offset, loaded);
        loaded += 1;
        load.offset += args.piece_bytes;
        if load.offset >= args.row_bytes {
            let token = load.token + warps;
            load = Piece { nth: load.nth + 1, token: if token < fixed_end { token } else { end }, offset: 0 };
        }
    }
    if claims_some {
        claims.start(comm, epoch);
    }

    // Lane r: the row at rank r; of many ranks, the lane's destination. Read a turn ahead.
    let rows_of = |token: u32| {
        if MANY {
            return Destination::of_lane(args.send_row.0, token, planned & (token < end));
        }
        let entry = args.send_row.array::<i32>().at(token * SEND_ROW_STRIDE + lane);
        let row = ld_i32_if((lane < SEND_ROW_STRIDE) & planned & (token < end), entry, -1);
        Destination { row, rank: lane }
    };
    let mut next = rows_of(token);
    let mut entries = Entries::<MANY, false>::fetch(args, first, metadata_end, planned);
    let mut turn = Turn::first();
    let joined = dynamic_shared() + ring_bytes(warps, args.stages, args.stage_bytes);
    let joined = wait_ranks_ready::<MANY>(comm, &entry, epoch, ready, joined, Wait::DispatchReady);
    if joined && planned {
        // The peers have released the rows to this thread that are overwritten now; the copy
        // engine comes behind that too.
        fence_proxy_async_global();
        while first < metadata_end {
            let these = entries;
            first += args.metadata_warps * each;
            entries = Entries::<MANY, false>::fetch(args, first, metadata_end, planned);
            these.send(args);
        }
        let mut peer = if MANY { 0 } else { pool_of(comm, lane) };
        let own = pool_at::<MANY>(comm, comm.rank);
        // The rank of the lane's row, and the lane that has the own one's.
        let (mut to, mut own_lane) = (lane, comm.rank);
        let mut row = -1;
        let mut next_token = end;
        if claims_some {
            claims.take_behind(comm, args.fixed_tokens - 1);
        }
        while send.token < end {
            if send.offset == 0 {
                (row, to) = (next.row, next.rank);
                next_token = if CLAIMS { claims.token(send.nth + 1) } else { send.token + warps };
                if MANY {
                    peer = next.pool(comm);
                }
                if MANY {
                    own_lane = ballot(row >= 0 && to == comm.rank).trailing_zeros();
                }
                next = rows_of(next_token);
                if args.num_scales != 0 && bulk_scale_bytes(args.num_scales) == 0 {
                    let scale_bytes = args.num_scales as u64 * 4;
                    let to = scale_place(args, peer, row);
                    copy_scales(args.scales.row(send.token, scale_bytes), args.num_scales, to);
                }
            }
            let bytes = (args.row_bytes - send.offset).min(args.piece_bytes);
            let buffer = ring.buffer(turn.slot);
            let row_offset = comm.pool.recv_x + send.offset as u64;
            let stride = row_stride(args.row_bytes as u64);
            ring.wait(&turn);
            if row >= 0 {
                if to != comm.rank {
                    bulk_store(peer + row_offset + row as u64 * stride, buffer, bytes);
                }
                let scale_bytes = bulk_scale_bytes(args.num_scales);
                if scale_bytes != 0 && send.offset == 0 {
                    bulk_store(scale_place(args, peer, row), buffer + args.piece_bytes, scale_bytes);
                }
            }
            bulk_commit();
            // -1 where the own rank is no destination.
            let own_row = shfl_u32(row as u32, own_lane & 31) as i32;
            let own_row = if MANY && own_lane == 32 { -1 } else { own_row };
            if own_row >= 0 {
                store_plain(own + row_offset + own_row as u64 * stride, buffer, bytes, lane);
            }

            // Refill the stage before this one: its store has had a whole turn to read it.
            if CLAIMS && load.offset == 0 {
                load.token = claims.token(load.nth);
            }
            if load.token < end && send.nth | send.offset != 0 {
                bulk_wait_read::<1>();
                syncwarp();
                load_piece(&ring, args, load.token, load.offset, turn.slot_before(&ring));
                if claims_some && load.offset == 0 {
                    claims.take_behind(comm, load.nth);
                }
                load.offset += args.piece_bytes;
                if load.offset >= args.row_bytes {
                    load = Piece { nth: load.nth + 1, token: load.token + warps, offset: 0 };
                }
            }
            turn.advance(&ring);
            send.offset += args.piece_bytes;
            if send.offset >= args.row_bytes {
                send = Piece { nth: send.nth + 1, token: next_token, offset: 0 };
            }
        }
        // The stores have landed for this thread, so that the releases in `leave` pass them on:
        // no proxy fence.
        bulk_wait::<0>();
    } else {
        // The loads in flight must land before the block gives its shared memory back.
        while loaded != 0 {
            ring.wait(&turn);
            turn.advance(&ring);
            loaded -= 1;
        }
    }
    leave::<MANY>(comm, epoch, joined, Wait::DispatchDone);
}

/// Threads that a block has at least: the warps that send metadata, and one with a ring.
#[cfg(not(target_arch = "nvptx64"))]
fn least_threads(args: &DispatchArgs) -> u32 {
    args.metadata_warps.saturating_add(1).saturating_mul(32)
}

/// Shared memory of a block of so many threads: the rings, then a word for whether it has joined.
#[cfg(not(target_arch = "nvptx64"))]
fn shared_bytes(args: &DispatchArgs, block: u32) -> u32 {
    let warps = block / 32 - args.metadata_warps;
    crate::layout::shared_with_rings(warps, args.stages, args.stage_bytes, super::epoch::JOINED_BYTES)
}

/// The same with the rings of the warps that copy, in front of the word.
#[cfg(not(target_arch = "nvptx64"))]
fn shared_bytes_by_expert(args: &ExpertDispatchArgs, block: u32) -> u32 {
    let rows = &args.dispatch;
    let warps = block / 32 - rows.metadata_warps - args.copy_warps;
    let rings = crate::layout::shared_with_rings(warps, rows.stages, rows.stage_bytes, 0);
    let behind = copy_rings_behind(rings).saturating_add(super::epoch::JOINED_BYTES);
    crate::layout::shared_with_rings(args.copy_warps, COPY_STAGES, rows.stage_bytes, behind)
}
