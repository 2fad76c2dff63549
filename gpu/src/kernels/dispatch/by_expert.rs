//! Dispatch of rows by expert within a node: warps claim tokens, and send each token's row to every
//! other rank once, and to each of its places in the own pool.
//!
//! No token is fixed: a block with more copies to make sends fewer rows. Stores limit a
//! multiprocessor, and with fixed tokens the block with the most rows by chance is the last one.
//!
//! Soundness: each token has one claim, so one warp sends its rows and its record. A warp that
//! sends waits for no other rank behind the ready words, so all tokens are sent as soon as one
//! block runs. A record is sent when the row's stores to other ranks have landed for the thread
//! that sends it. Its scales leave by ordinary stores of all lanes in front of the record: a
//! barrier of the warp orders them before the release. A stage is loaded again once the stores from
//! it have read it, and the lanes that read its scales have met.

use super::claims::{Claims, Piece};
use super::copies::{self, Copies, copy_rings_behind};
use super::metadata::{Entries, tokens_at_once};
use super::rows::{copy_scales, load_piece, scale_place, store_scales};
use crate::kernels::epoch::{Phase, ReadyEntry, current_epoch, leave, tell_ready, trace, wait_ranks_ready};
use crate::kernels::list::Destination;
use crate::kernels::ring::{Ring, Turn, block_range};
use crate::layout::{DispatchArgs, MAX_FIXED_TOKENS, Wait, bulk_scale_bytes, ring_bytes, row_stride};
use crate::simt::*;

/// Body of `dispatch_by_expert`.
///
/// # Safety
/// As the kernel.
#[device]
pub unsafe fn send_rows(args: &DispatchArgs, copies: &Copies) {
    let comm = &args.comm;
    let (warp, warps) = (tid() / 32, at_least_one(ntid() / 32 - args.metadata_warps - copies.warps));
    trace(comm, Phase::Enter);
    let entry = ReadyEntry::read(comm, args.header.0);
    let epoch = current_epoch(comm);
    let ready = entry.ready_word(comm, epoch);
    // A dispatch with a count exchange published it in notify.
    if args.with_metadata == 0 && ctaid() == 0 && warp == 0 {
        tell_ready::<true>(comm, ready);
    }

    // With no valid plan, no row moves; the words still do, so that the next operation finds
    // them in step.
    let planned = entry.is_planned();
    let end = args.num_tokens;
    // Few tokens are claimed one at a time, by no more warps of a block than its share has tokens.
    let sends = planned & (warp < warps) & (warp * nctaid() < end);
    let pieces = at_least_one(args.row_bytes.div_ceil(at_least_one(args.piece_bytes)));
    let ahead =
        args.stages.div_ceil(pieces).min(end / at_least_one(nctaid()) / warps).clamp(1, MAX_FIXED_TOKENS);
    let ring = Ring::lay_out(args.stages, args.stage_bytes, warps);
    if warp < warps {
        ring.init();
    }
    let mut claims = Claims::at_once(comm, epoch, if sends { ahead } else { 0 });

    // Fill the ring while the peers' words are on their way.
    let mut send = Piece { nth: 0, token: if sends { claims.token(0) } else { end }, offset: 0 };
    let (mut load, mut loaded) = (send, 0);
    while loaded < args.stages && load.nth < ahead && load.token < end {
        load_piece(&ring, args, load.token, load.offset, loaded);
        loaded += 1;
        load.offset += args.piece_bytes;
        if load.offset >= args.row_bytes {
            load = Piece { nth: load.nth + 1, token: claims.token(load.nth + 1), offset: 0 };
        }
    }

    // The lane's destination, read a turn ahead.
    let rows_of = |token: u32| Destination::of_lane(args.send_row.0, token, token < end);
    let mut next = rows_of(send.token);
    // A warp that moves rows finds no entries to send.
    let (begin, metadata_end) = block_range(args.num_tokens);
    let each = tokens_at_once(args);
    let sends_metadata = args.with_metadata != 0 && warp >= warps + copies.warps;
    let mut first = if sends_metadata { begin + (warp - warps - copies.warps) * each } else { metadata_end };
    let mut entries = Entries::<true, true>::fetch(args, first, metadata_end, planned);
    let mut turn = Turn::first();
    let copy_rings = dynamic_shared() + copy_rings_behind(ring_bytes(warps, args.stages, args.stage_bytes));
    let joined = copies.end_of_rings(args, copy_rings);
    let joined = wait_ranks_ready::<true>(comm, &entry, epoch, ready, joined, Wait::DispatchReady);
    if joined && planned {
        // The peers have released the rows to this thread that are overwritten now; the copy
        // engine comes behind that too.
        fence_proxy_async_global();
        while first < metadata_end {
            let these = entries;
            first += args.metadata_warps * each;
            entries = Entries::<true, true>::fetch(args, first, metadata_end, planned);
            these.send(args);
        }
        if warp >= warps && warp < warps + copies.warps {
            copies.make(args, epoch, copy_rings, warp - warps);
        }
        if send.token < end {
            claims.claim(comm, ahead);
        }
        let mut to = Destination { row: -1, rank: 0 };
        let (mut peer, mut is_sent) = (0, false);
        // Stages that hold pieces, the one at hand included, and the stage of the next load.
        let (mut held, mut free) = (loaded, if loaded < args.stages { loaded } else { 0 });
        let scale_bytes = bulk_scale_bytes(args.num_scales);
        while send.token < end {
            if send.offset == 0 {
                to = next;
                peer = to.pool(comm);
                // A row that is not sent is copied by its rank.
                is_sent = copies::is_first_of_rank(to.row >= 0, to.rank);
                is_sent |= (to.row >= 0) & (to.rank == comm.rank);
                next = rows_of(claims.token(send.nth + 1));
                if args.num_scales != 0 && scale_bytes == 0 {
                    let to = scale_place(args, peer, if is_sent { to.row } else { -1 });
                    copy_scales(args.scales.row(send.token, args.num_scales as u64 * 4), args.num_scales, to);
                }
            }
            let bytes = (args.row_bytes - send.offset).min(args.piece_bytes);
            let buffer = ring.buffer(turn.slot);
            let row_offset = comm.pool.recv_x + send.offset as u64;
            ring.wait(&turn);
            let is_own = to.rank == comm.rank;
            let place = peer + row_offset + to.row as u64 * row_stride(args.row_bytes as u64);
            // Rows of other ranks leave first, in a group of their own: the ranks wait for them.
            if is_sent && !is_own {
                bulk_store(place, buffer, bytes);
            }
            bulk_commit();
            if is_sent && is_own {
                bulk_store(place, buffer, bytes);
            }
            bulk_commit();
            // The copy engine takes as long for a few scales as for half a kilobyte.
            if same_in_lanes(send.offset) == 0 && scale_bytes != 0 {
                let to = scale_place(args, peer, if is_sent { to.row } else { -1 });
                store_scales(buffer + args.piece_bytes, scale_bytes, to);
            }
            if same_in_lanes(send.offset) + bytes == args.row_bytes {
                // The stores to other ranks have landed; those of the own rank may be pending.
                bulk_wait::<1>();
                copies.send(args, epoch, send.token, to);
            }

            // The stage of the next load is the one before this, or one that was never filled: the
            // stores of the turn before have had a whole turn to read it.
            if load.offset == 0 {
                load.token = claims.token(load.nth);
            }
            if load.token < end && held < args.stages {
                bulk_wait_read::<2>();
                syncwarp();
                load_piece(&ring, args, load.token, load.offset, free);
                held += 1;
                free = if free + 1 < args.stages { free + 1 } else { 0 };
                if load.offset == 0 && load.nth >= ahead {
                    claims.claim(comm, load.nth + 1);
                }
                load.offset += args.piece_bytes;
                if load.offset >= args.row_bytes {
                    (load.nth, load.offset) = (load.nth + 1, 0);
                }
            }
            held -= 1;
            turn.advance(&ring);
            send.offset += args.piece_bytes;
            if send.offset >= args.row_bytes {
                send = Piece { nth: send.nth + 1, token: claims.token(send.nth + 1), offset: 0 };
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
    leave::<true>(comm, epoch, joined, Wait::DispatchDone);
}
