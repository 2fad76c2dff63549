//! The sender of a channel: its worker warps.

use super::copies::{self, Copies, Late};
use super::metadata::Metadata;
use super::route::{forward_start, note_rows, note_selections, relayed_before, send_source, slot_shape};
use crate::kernels::dispatch::{Cursor, copy_scales, is_first_of_rank, load_piece, scale_place, store_plain};
use crate::kernels::epoch::pool_of;
use crate::kernels::ids::Id;
use crate::kernels::list::Destination;
use crate::kernels::progress::Progress;
use crate::kernels::rail::{Path, channel_rows};
use crate::kernels::ring::{Ring, Turn, channel_range};
use crate::layout::{
    DispatchArgs, ExpertRoute, FEW_RANKS, InternodeDispatchArgs, SlotShape, bulk_scale_bytes, row_stride,
};
use crate::simt::*;

/// Pieces that a worker warp of the sender may have under way when it publishes its progress:
/// enough to keep the links busy.
const UNFINISHED: u32 = 8;

/// Where a token goes, and its metadata. Lane j holds rank j of this node, lane n node n, lane k
/// top-k entry k.
#[derive(Clone, Copy)]
struct Token {
    /// Index in the (channel, rank of this node) stream, or -1.
    head: i32,
    /// Index in the (channel, node) stream, or -1.
    node_head: i32,
    /// Where there are no more ranks than lanes, and metadata travels: index in the (channel, rank)
    /// stream of rank l, or -1.
    world_head: i32,
    /// By expert: where entry k goes on this node.
    to: Destination,
    /// By expert: the number of entry k among this rank's selections of its expert.
    number: u32,
    /// The entry's id, which `arrive` makes part of the metadata.
    id: Id,
    metadata: Metadata,
}

impl Token {
    const NONE: Token = Token {
        head: -1,
        node_head: -1,
        world_head: -1,
        to: Destination { row: -1, rank: 0 },
        number: 0,
        id: Id::NONE,
        metadata: Metadata::NONE,
    };

    /// Reads a token's entries, a turn before they are used.
    ///
    /// # Safety
    /// The entries lie inside their tensors.
    #[device]
    unsafe fn fetch<const BY_EXPERT: bool>(
        args: &InternodeDispatchArgs,
        by_expert: &ExpertRoute,
        token: u32,
        end: u32,
    ) -> Token {
        let (rows, wire, lane) = (&args.dispatch, &args.wire, laneid());
        let (nodes, per_node) = (wire.num_nodes, rows.comm.num_ranks);
        let mut this = Token::NONE;
        if BY_EXPERT {
            this.to = Destination::of_lane(rows.send_row.0, token, token < end);
        }
        if token < end {
            if !BY_EXPERT && lane < per_node {
                let entry = token as u64 * (nodes * per_node) as u64 + (wire.node * per_node + lane) as u64;
                this.head = args.send_head.array::<i32>().ld(entry);
            }
            if lane < nodes {
                this.node_head = args.route.send_rdma_head.array::<i32>().ld(row_major(token, nodes, lane));
            }
            if !BY_EXPERT && rows.with_metadata != 0 && lane < nodes * per_node {
                let entry = row_major(token, nodes * per_node, lane);
                this.world_head = args.send_head.array::<i32>().ld(entry);
            }
            if rows.with_metadata != 0 && lane < rows.num_topk {
                let entry = row_major(token, rows.num_topk, lane);
                this.id = Id::load(rows.topk_idx, rows.narrow_ids, entry);
                if BY_EXPERT {
                    this.number = by_expert.numbers.array::<u32>().ld(entry);
                    let is_weighted = !rows.topk_weights.is_null();
                    this.metadata.weight = ld_f32_if(is_weighted, rows.topk_weights.array::<f32>().at(entry));
                } else {
                    this.metadata.weight = ld_f32(rows.topk_weights.0 + entry * 4);
                }
            }
        }
        this
    }

    /// Makes it the token at hand. This is not done when the token is fetched, because using a
    /// value waits for its load.
    #[device]
    fn arrive<const BY_EXPERT: bool>(&mut self, rows: &DispatchArgs, starts: u32) {
        self.metadata.expert = self.id.value(rows.narrow_ids);
        if BY_EXPERT {
            (self.metadata.row, self.metadata.rank) = (self.to.row, self.to.rank);
            return;
        }
        if self.head >= 0 {
            self.metadata.row = (starts + self.head as u32) as i32;
        }
    }
}

/// A worker warp of the sender: its share of the channel's tokens.
///
/// # Safety
/// Rows and slots were planned inside their memory.
#[allow(clippy::too_many_arguments)]
#[device]
pub unsafe fn send<const BY_EXPERT: bool>(
    args: &InternodeDispatchArgs,
    by_expert: &ExpertRoute,
    copies: &Copies,
    ring: &Ring,
    channel: u32,
    workers: u32,
    progress: &Progress,
    epoch: u64,
) {
    let (rows, wire) = (&args.dispatch, &args.wire);
    let (comm, lane, warp) = (&rows.comm, laneid(), tid() / 32);
    let shape = slot_shape::<BY_EXPERT>(args);
    let (begin, end) = channel_range(rows.num_tokens, args.route.num_channels, channel);
    let first = begin + warp;

    // Lane j: the pool of rank j; by expert, that of the rank of its row.
    let mut peer = pool_of(comm, lane);
    let own = shfl_u64(peer, comm.rank);
    // The rank of the lane's row.
    let mut to = lane;
    let mut late = Late::new();
    // Lane j: where this channel's rows start at rank j. Lane n: where its slots for node n
    // start.
    let mut starts = 0;
    if !BY_EXPERT && lane < comm.num_ranks {
        starts = forward_start(args, wire.node, channel).ld(lane);
    }
    let (mut slots, mut slot_base) = (0, 0);
    let mut on_device = false;
    if lane < wire.num_nodes {
        let prefix = args.route.rdma_channel_prefix_matrix.0;
        slots = channel_rows(prefix, args.route.num_channels, lane, channel).0;
        let path = Path::to(wire, lane);
        slot_base = path.slots_out(wire, lane);
        on_device = path.leads_to_device(wire, lane) & (lane != wire.node);
    }
    let any_on_device = ballot(on_device) != 0;
    let relayed = relayed_before(args, wire.node);

    let mut load = Cursor::new(first, workers);
    while load.piece < rows.stages && load.token < end {
        load_piece(ring, rows, load.token, load.offset, load.piece);
        load.advance(rows);
    }
    let mut turn = Turn::first();
    let mut next = Token::fetch::<BY_EXPERT>(args, by_expert, first, end);
    let mut token = Token::NONE;
    let (mut slot, mut previous) = (0, 0);
    let pieces = at_least_one(rows.row_bytes.div_ceil(rows.piece_bytes));
    let mut sent = Cursor::new(first, workers);
    while sent.token < end {
        if sent.offset == 0 {
            token = next;
            token.arrive::<BY_EXPERT>(rows, starts);
            next = Token::fetch::<BY_EXPERT>(args, by_expert, sent.token + workers, end);
            if BY_EXPERT {
                to = token.metadata.rank;
                peer = pool_of(comm, to);
            }
            // Lane n: the token's slot for another node, or 0.
            slot = 0;
            if token.node_head >= 0 && lane != wire.node {
                slot = slot_base + (slots + token.node_head as u32) as u64 * args.slot_bytes as u64;
            }
            if rows.with_metadata != 0 {
                if BY_EXPERT {
                    let source = wire.node * comm.num_ranks + comm.rank;
                    token.metadata.send_selection(rows, sent.token, source, peer);
                } else {
                    token.metadata.send(rows, sent.token, lane);
                    send_source(args, token.metadata.row, peer, wire.node);
                }
                // Tokens for this node do not pass the wire, but are noted with those that the
                // forwarder relays.
                let node_head = shfl_u32(token.node_head as u32, wire.node) as i32;
                if node_head >= 0 {
                    let start = shfl_u32(slots, wire.node);
                    let entry = relayed + start + node_head as u32;
                    if BY_EXPERT {
                        note_selections(args, by_expert, entry, &token.metadata);
                    } else {
                        note_rows(args, entry, token.metadata.row);
                    }
                }
                pack::<BY_EXPERT>(args, &shape, &token, sent.token, slot);
            }
            if BY_EXPERT {
                // Other ranks copy their further rows.
                let is_first = is_first_of_rank(token.metadata.row >= 0, to);
                token.metadata.row = if is_first | (to == comm.rank) { token.metadata.row } else { -1 };
            }
            if rows.num_scales != 0 && bulk_scale_bytes(rows.num_scales) == 0 {
                let from = rows.scales.array::<f32>().at(row_major(sent.token, rows.num_scales, 0));
                copy_scales(from, rows.num_scales, scale_place(rows, peer, token.metadata.row));
                copy_scales(from, rows.num_scales, if slot != 0 { slot + shape.scales as u64 } else { 0 });
            }
        }
        let (bytes, buffer) = (sent.bytes(rows), ring.buffer(turn.slot));
        let row_offset = comm.pool.recv_x + sent.offset as u64;
        let stride = row_stride(rows.row_bytes as u64);
        let scale_bytes = if sent.offset == 0 { bulk_scale_bytes(rows.num_scales) } else { 0 };
        ring.wait(&turn);
        let row = token.metadata.row;
        if row >= 0 {
            // Several rows of the own rank are more than ordinary stores have time for.
            if BY_EXPERT || to != comm.rank {
                bulk_store(peer + row_offset + row as u64 * stride, buffer, bytes);
            }
            if scale_bytes != 0 {
                bulk_store(scale_place(rows, peer, row), buffer + rows.piece_bytes, scale_bytes);
            }
        }
        if slot != 0 && on_device {
            bulk_store(slot + sent.offset as u64, buffer, bytes);
            if scale_bytes != 0 {
                bulk_store(slot + shape.scales as u64, buffer + rows.piece_bytes, scale_bytes);
            }
        }
        bulk_commit();
        // Into the host's memory by ordinary stores: a warp that waits for bulk stores there
        // flushes the bus, which takes 1.6 us and is done for one warp of the device after the
        // other.
        let mut on_host = ballot((slot != 0) & !on_device);
        while on_host != 0 {
            let to = shfl_u64(slot, on_host.trailing_zeros());
            on_host &= on_host - 1;
            store_plain(to + sent.offset as u64, buffer, bytes, lane);
            if scale_bytes != 0 {
                store_plain(to + shape.scales as u64, buffer + rows.piece_bytes, scale_bytes, lane);
            }
        }
        if BY_EXPERT {
            if copies.warps() != 0 && same_in_lanes(sent.offset) == 0 {
                // Tokens that do not come to this node have no record.
                let row = shfl_u32(token.node_head as u32, wire.node);
                let nth = if row as i32 >= 0 { copies.token(wire.node, row) } else { copies::NONE };
                late.turn(copies, rows, epoch, nth, token.to);
            }
        } else {
            let own_row = shfl_u32(row as u32, comm.rank) as i32;
            if own_row >= 0 {
                store_plain(own + row_offset + own_row as u64 * stride, buffer, bytes, lane);
            }
        }

        // Refill the stage before this one: its store has had a whole turn to read it.
        if load.token < end && sent.piece >= 1 {
            bulk_wait_read::<1>();
            syncwarp();
            load_piece(ring, rows, load.token, load.offset, previous);
            load.advance(rows);
        }
        previous = turn.slot;
        turn.advance(ring);
        sent.advance(rows);
        if sent.offset == 0 {
            // The pieces that are packed by now: all but the last ones, where bulk stores carry
            // them.
            let mut packed = sent.piece;
            if any_on_device {
                bulk_wait::<UNFINISHED>();
                packed = packed.saturating_sub(UNFINISHED);
                // The wait keeps a warp from running ahead of the links, which saves 40 us in
                // 520. Without it, some blocks take most of the links and end early, and the
                // others alone do not fill them.
                fence_proxy_async();
            }
            publish_packed(progress, packed / pieces, first - begin, workers);
        }
    }
    bulk_wait::<0>();
    publish_packed(progress, sent.piece / pieces, end - begin + warp, workers);
    if BY_EXPERT && copies.warps() != 0 {
        late.end(copies, rows, epoch);
    }
}

/// Publishes to the posting warp that this warp has packed `count` tokens. The word is the first
/// token that this warp lacks, counted from the channel's first.
///
/// # Safety
/// Lane 0 publishes what all lanes wrote before they met; their bulk stores have completed.
#[device]
unsafe fn publish_packed(progress: &Progress, count: u32, first: u32, workers: u32) {
    syncwarp();
    if laneid() == 0 {
        progress.publish(first + count * workers);
    }
}

/// Writes a token's metadata into its slots; lane n has the address of the one for node n, or 0.
///
/// # Safety
/// The slots are inside wire memory.
#[device]
unsafe fn pack<const BY_EXPERT: bool>(
    args: &InternodeDispatchArgs,
    shape: &SlotShape,
    entries: &Token,
    token: u32,
    slot: u64,
) {
    let (rows, metadata, lane) = (&args.dispatch, &entries.metadata, laneid());
    let per_node = rows.comm.num_ranks;
    let world = args.wire.num_nodes * per_node;
    let heads = args.send_head.array::<i32>().skip(row_major(token, world, 0));
    let mut nodes = ballot(slot != 0);
    while nodes != 0 {
        let node = nodes.trailing_zeros();
        nodes &= nodes - 1;
        let meta = shfl_u64(slot, node) + shape.meta as u64;
        let rank = node * per_node + lane;
        // Fetched ahead if all ranks' fit: a load here would hold the warp up for each node.
        let fetched = if BY_EXPERT { 0 } else { shfl_u32(entries.world_head as u32, rank.min(31)) as i32 };
        if !BY_EXPERT && lane < FEW_RANKS as u32 {
            let mut head = -1;
            if lane < per_node {
                head = if world <= 32 { fetched } else { heads.ld(rank) };
            }
            st_i32(meta + SlotShape::HEADS as u64 + lane as u64 * 4, head);
        }
        if lane == 0 {
            st_u32(meta + SlotShape::TOKEN as u64, token);
        }
        if lane < rows.num_topk {
            let at = meta + SlotShape::TOPK as u64 + lane as u64 * 4;
            st_i32(at, metadata.expert as i32);
            st_f32(at + rows.num_topk as u64 * 4, metadata.weight);
            if BY_EXPERT {
                st_u32(at + rows.num_topk as u64 * 8, entries.number);
            }
        }
    }
}
