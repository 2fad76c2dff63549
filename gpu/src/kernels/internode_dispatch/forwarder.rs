//! The forwarder of a channel: what arrives from other nodes goes to the ranks of this one.

use super::copies::{Copies, Late};
use super::metadata::Metadata;
use super::route::{
    FORWARD_ROW_BYTES, forward_row, forward_start, note_rows, note_selections, relayed_before, send_source,
    slot_shape,
};
use crate::kernels::arrivals::Arrivals;
use crate::kernels::dispatch::{Tail, copy_scales, is_first_of_rank, load_stage, scale_place};
use crate::kernels::epoch::pool_of;
use crate::kernels::list::{Destination, entry_at};
use crate::kernels::rail::{Path, channel_rows};
use crate::kernels::ring::{Ring, Turn};
use crate::layout::{
    ExpertRoute, InternodeDispatchArgs, SEND_LIST_STRIDE, SEND_ROW_STRIDE, SlotShape, Wait, bulk_scale_bytes,
    row_stride,
};
use crate::simt::*;

/// A warp's place among the pieces of what arrives on a channel: chunk after chunk, and of each
/// chunk node after node, so that no node holds the others up.
#[derive(Clone, Copy)]
struct Walk {
    /// Lane n: rows that node n sends on this channel; 0 for the own node.
    rows: u32,
    most: u32,
    chunk: u32,
    node: u32,
    /// Row of the channel.
    row: u32,
    /// Start of the chunk that the row is in.
    from: u32,
    /// Offset of the piece in the row, in bytes.
    offset: u32,
    warp: u32,
    workers: u32,
    num_nodes: u32,
    own: u32,
}

impl Walk {
    /// # Safety
    /// The whole warp calls it.
    #[device]
    unsafe fn new(args: &InternodeDispatchArgs, rows: u32, workers: u32) -> Self {
        let wire = &args.wire;
        let most = u32::MAX - redux_min(u32::MAX - rows);
        let warp = tid() / 32;
        // The node behind the own one comes first, so that not all ranks begin with the same.
        let node = if wire.node + 1 == wire.num_nodes { 0 } else { wire.node + 1 };
        let mut walk = Walk {
            rows,
            most,
            chunk: wire.chunk,
            node,
            row: warp,
            from: 0,
            offset: 0,
            warp,
            workers,
            num_nodes: wire.num_nodes,
            own: wire.node,
        };
        walk.settle();
        walk
    }

    /// True behind the last row.
    #[device]
    fn ended(&self) -> bool {
        self.from >= self.most
    }

    /// Goes on until the row is one of the chunk and of the node.
    ///
    /// # Safety
    /// The walk is the same in all lanes.
    #[device]
    unsafe fn settle(&mut self) {
        while !self.ended() {
            let count = shfl_u32(self.rows, self.node);
            if self.row < count && self.row - self.from < self.chunk {
                return;
            }
            self.node = if self.node + 1 == self.num_nodes { 0 } else { self.node + 1 };
            if self.node == self.own {
                self.node = if self.node + 1 == self.num_nodes { 0 } else { self.node + 1 };
                self.from += self.chunk;
            }
            // The warp's first row that is not before the chunk.
            let before = self.from.saturating_sub(self.warp).div_ceil(self.workers);
            self.row = self.warp + before * self.workers;
        }
    }

    /// # Safety
    /// The walk is the same in all lanes, so that the whole warp calls `settle`.
    #[device]
    unsafe fn advance(&mut self, row_bytes: u32, piece_bytes: u32) {
        self.offset += piece_bytes;
        if self.offset >= row_bytes {
            self.offset = 0;
            self.row += self.workers;
            self.settle();
        }
    }
}

/// The last warp of the forwarder: polls the arrival words of the channel.
///
/// # Safety
/// The entries lie inside the matrix.
#[device]
pub unsafe fn watch(args: &InternodeDispatchArgs, arrivals: &Arrivals, channel: u32, epoch: u64) {
    let (wire, lane) = (&args.wire, laneid());
    let mut rows = 0;
    if lane < wire.num_nodes && lane != wire.node {
        let prefix = args.route.recv_rdma_channel_prefix_matrix.0;
        rows = channel_rows(prefix, args.route.num_channels, lane, channel).1;
    }
    arrivals.watch(&args.dispatch.comm, wire, channel, rows, epoch, Wait::DispatchArrival);
}

/// A worker warp of the forwarder: its share of what arrives on the channel.
///
/// # Safety
/// Rows were planned inside the pools, and a slot is read behind the arrival word of its node. The
/// walks are the same in all lanes, so that the warp is whole where it shuffles.
#[allow(clippy::too_many_arguments)]
#[device]
pub unsafe fn forward<const BY_EXPERT: bool>(
    args: &InternodeDispatchArgs,
    by_expert: &ExpertRoute,
    copies: &Copies,
    arrivals: &Arrivals,
    ring: &Ring,
    channel: u32,
    workers: u32,
    epoch: u64,
) {
    let (rows, wire) = (&args.dispatch, &args.wire);
    let (comm, lane) = (&rows.comm, laneid());
    let shape = slot_shape::<BY_EXPERT>(args);
    // Lane j: the pool of rank j; by expert, that of the rank of its row.
    let mut peer = pool_of(comm, lane);

    // Lane n: what comes on the channel from node n: how many rows, their slots, and where they
    // are among the relayed tokens.
    let (mut count, mut entries, mut slots) = (0, 0, 0);
    if lane < wire.num_nodes {
        let path = Path::to(wire, lane);
        let prefix = args.route.recv_rdma_channel_prefix_matrix.0;
        let first;
        (first, count) = channel_rows(prefix, args.route.num_channels, lane, channel);
        slots = path.slots_in(wire, lane) + first as u64 * args.slot_bytes as u64;
        entries = relayed_before(args, lane) + first;
        if lane == wire.node {
            count = 0;
        }
    }
    let slot_of = |walk: &Walk| shfl_u64(slots, walk.node) + walk.row as u64 * args.slot_bytes as u64;
    // Lane n: rows of node n known to have arrived.
    let mut arrived = 0;
    let mut load = Walk::new(args, count, workers);
    let mut sent = load;
    let (mut turn, mut load_slot, mut in_flight) = (Turn::first(), 0, 0);
    let mut row = -1;
    // By expert: where the lane's entry goes. Its row is here only where it is written, since other
    // ranks copy their further rows.
    let (mut to, mut late) = (Destination { row: -1, rank: 0 }, Late::new());
    // Lane j: where the rows of the channel from `start_node` begin at rank j.
    let (mut start, mut start_node) = (0, u32::MAX);
    while !sent.ended() {
        while in_flight + 1 < rows.stages && !load.ended() {
            if shfl_u32(arrived, load.node) <= load.row {
                let seen = shfl_u32(arrivals.rows(load.node), 0);
                // `syncwarp` orders every lane behind the acquire of lane 0.
                syncwarp();
                if lane == load.node {
                    arrived = seen;
                }
                if seen <= load.row {
                    if in_flight != 0 {
                        break;
                    }
                    if ballot(arrivals.wait(comm, load.node, load.row)) != u32::MAX {
                        return;
                    }
                    continue;
                }
                fence_proxy_async();
            }
            let slot = slot_of(&load);
            // Behind the row: its metadata, or in a cached dispatch where it went, so that no
            // warp waits for a load of its own.
            let entry = shfl_u32(entries, load.node) + load.row;
            let tail = if BY_EXPERT && rows.with_metadata != 0 {
                let bytes = SlotShape::metadata_bytes_by_expert(rows.num_topk);
                Tail { from: slot + shape.meta as u64, bytes }
            } else if BY_EXPERT {
                Tail { from: entry_at(args.route.forward_row.0, entry, 0), bytes: SEND_LIST_STRIDE * 8 }
            } else if rows.with_metadata != 0 {
                Tail { from: slot + shape.meta as u64, bytes: SlotShape::metadata_bytes(rows.num_topk) }
            } else {
                Tail { from: forward_row(args, entry), bytes: FORWARD_ROW_BYTES }
            };
            load_stage::<true>(ring, rows, load_slot, slot, slot + shape.scales as u64, tail, load.offset);
            load_slot = if load_slot + 1 == ring.count { 0 } else { load_slot + 1 };
            in_flight += 1;
            load.advance(rows.row_bytes, rows.piece_bytes);
        }

        let offset = sent.offset;
        let (bytes, buffer) = ((rows.row_bytes - offset).min(rows.piece_bytes), ring.buffer(turn.slot));
        ring.wait(&turn);
        if offset == 0 {
            let entry = shfl_u32(entries, sent.node) + sent.row;
            let tail = buffer + Tail::offset(rows);
            row = -1;
            if BY_EXPERT {
                let selection = if rows.with_metadata != 0 {
                    let token = ld_shared_u32(tail + SlotShape::TOKEN);
                    let selection = arrived_selection(args, by_expert, tail, sent.node);
                    let base = pool_of(comm, selection.rank);
                    selection.send_selection(rows, token, sent.node * comm.num_ranks + comm.rank, base);
                    note_selections(args, by_expert, entry, &selection);
                    selection
                } else {
                    let (row, rank) = (ld_shared_u32(tail + lane * 8), ld_shared_u32(tail + lane * 8 + 4));
                    Metadata { row: row as i32, rank, ..Metadata::NONE }
                };
                (row, peer) = (selection.row, pool_of(comm, selection.rank));
                to = Destination { row, rank: selection.rank };
                let is_written = is_first_of_rank(row >= 0, to.rank) | (to.rank == comm.rank);
                row = if is_written { row } else { -1 };
            } else if rows.with_metadata != 0 {
                if sent.node != start_node && lane < comm.num_ranks {
                    start = forward_start(args, sent.node, channel).ld(lane);
                }
                start_node = sent.node;
                let mut token = Metadata::NONE;
                if lane < comm.num_ranks {
                    let head = ld_shared_u32(tail + SlotShape::HEADS + lane * 4) as i32;
                    if head >= 0 {
                        row = (start + head as u32) as i32;
                    }
                }
                token.row = row;
                if lane < rows.num_topk {
                    let at = tail + SlotShape::TOPK + lane * 4;
                    token.expert = ld_shared_u32(at) as i32 as i64;
                    token.weight = f32::from_bits(ld_shared_u32(at + rows.num_topk * 4));
                }
                token.send(rows, ld_shared_u32(tail + SlotShape::TOKEN), lane);
                send_source(args, row, peer, sent.node);
                note_rows(args, entry, row);
            } else if lane < SEND_ROW_STRIDE {
                row = ld_shared_u32(tail + lane * 4) as i32;
            }
            if rows.num_scales != 0 && bulk_scale_bytes(rows.num_scales) == 0 {
                let scales = slot_of(&sent) + shape.scales as u64;
                copy_scales(scales, rows.num_scales, scale_place(rows, peer, row));
            }
        }
        if row >= 0 {
            let stride = row_stride(rows.row_bytes as u64);
            bulk_store(peer + comm.pool.recv_x + offset as u64 + row as u64 * stride, buffer, bytes);
            let scale_bytes = if offset == 0 { bulk_scale_bytes(rows.num_scales) } else { 0 };
            if scale_bytes != 0 {
                bulk_store(scale_place(rows, peer, row), buffer + rows.piece_bytes, scale_bytes);
            }
        }
        bulk_commit();
        if BY_EXPERT && copies.warps() != 0 && same_in_lanes(offset) == 0 {
            let token = copies.token(sent.node, sent.row);
            late.turn(copies, rows, epoch, token, to);
        }
        // The stage before this one has been read: it is free for the next load.
        bulk_wait_read::<1>();
        syncwarp();
        in_flight -= 1;
        turn.advance(ring);
        sent.advance(rows.row_bytes, rows.piece_bytes);
    }
    if BY_EXPERT && copies.warps() != 0 {
        bulk_wait::<0>();
        late.end(copies, rows, epoch);
    }
}

/// By expert: lane k's row on this node, of entry k of a token from `node`, by the metadata at
/// `tail` of shared memory.
///
/// # Safety
/// The metadata has arrived; the table of first rows has every node and expert.
#[device]
unsafe fn arrived_selection(
    args: &InternodeDispatchArgs,
    by_expert: &ExpertRoute,
    tail: u32,
    node: u32,
) -> Metadata {
    let (rows, lane) = (&args.dispatch, laneid());
    let mut selection = Metadata::NONE;
    if lane < rows.num_topk {
        let at = tail + SlotShape::TOPK + lane * 4;
        let experts = rows.comm.num_ranks * rows.local_experts;
        // An entry that selects nothing is below 0, far above all experts of the node.
        let expert = ld_shared_u32(at).wrapping_sub(rows.first_expert);
        selection.weight = f32::from_bits(ld_shared_u32(at + rows.num_topk * 4));
        if expert < experts {
            let number = ld_shared_u32(at + rows.num_topk * 8);
            let base = by_expert.bases.array::<u32>().ld(node * experts + expert);
            selection.row = (base + number) as i32;
            // A clamp, so that the division needs no trap.
            selection.rank = expert / rows.local_experts.max(1);
        }
    }
    selection
}
