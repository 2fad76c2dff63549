//! Dispatch across nodes. A channel has two blocks: the *sender* writes its tokens' rows to the ranks of this node and a slot for
//! every other node that wants the token, into the peer's wire memory or for a put to take; the *forwarder* writes the rows that arrive from other nodes to the
//! ranks of this one.

use epoxide_macros::kernel;

use super::dispatch::{
    Cursor, Metadata, Tail, copy_scales, load_piece, load_stage, scale_place, store_plain,
};
use super::epoch::{Phase, aborted, current_epoch, leave, pool_of, tell_ready, trace};
use super::ring::{Ring, Turn, channel_range, shared_bytes};
use super::wire::{
    Operation, Path, Posted, Progress, Put, arrival, arrival_word, channel_rows, deliver, rows_arrived,
    tell_nodes_ready, wait_mapped_ready, wait_node_ready, wait_quiet, wait_rows, workers,
};
#[cfg(not(target_arch = "nvptx64"))]
use super::{Call, ContractError, Kernel, KernelInfo, ParamLayout};
use crate::layout::{
    InternodeDispatchArgs, MAX_NODES, MAX_RANKS, PlanStatus, SEND_ROW_STRIDE, SlotShape, Wait,
    bulk_scale_bytes, row_stride,
};
use crate::simt::*;

/// Pieces that a worker warp of the sender may have under way when it says how far it has come: enough to keep the links busy.
const UNFINISHED: u32 = 8;

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
    let epoch = current_epoch(comm);
    let operation = Operation { epoch, queue: Wait::DispatchQueue };
    if ctaid() == 0 && tid() < 32 {
        tell_ready(comm, epoch);
        tell_nodes_ready(comm, wire, operation);
    }
    let planned = ld_u32(rows.header.0) == PlanStatus::Ready as u32;
    let progress = Progress::new(shared_bytes(workers, rows.stages, rows.stage_bytes), workers);
    let joined = wait_mapped_ready(comm, wire, epoch, Wait::DispatchReady, Wait::DispatchNodeReady);
    if tid() / 32 == workers {
        if !forwards && joined {
            post_channel(&args, channel, planned, &progress, operation);
        }
    } else if joined && planned {
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
    leave(comm, epoch, joined & !aborted(comm), Wait::DispatchDone);
}

/// The slots of this operation.
#[inline(always)]
fn slot_shape(args: &InternodeDispatchArgs) -> SlotShape {
    let rows = &args.dispatch;
    let topk = if rows.with_metadata != 0 { Some(rows.num_topk) } else { None };
    SlotShape::new(rows.row_bytes, rows.num_scales, topk)
}

/// Where a token goes, and its metadata. Lane j knows rank j of this node, lane n node n, lane k top-k entry k.
#[derive(Clone, Copy)]
struct Token {
    /// Index in the (channel, rank of this node) queue, or -1.
    head: i32,
    /// Index in the (channel, node) queue, or -1.
    node_head: i32,
    /// Where there are no more ranks than lanes, and metadata travels: index in the (channel, rank) queue of rank l, or -1.
    world_head: i32,
    metadata: Metadata,
}

impl Token {
    const NONE: Token = Token { head: -1, node_head: -1, world_head: -1, metadata: Metadata::NONE };

    /// Reads a token's entries, a turn before they are used.
    #[inline(always)]
    unsafe fn fetch(args: &InternodeDispatchArgs, token: u32, end: u32) -> Token {
        // SAFETY: the entries lie inside their tensors.
        unsafe {
            let (rows, wire, lane) = (&args.dispatch, &args.wire, laneid());
            let (nodes, per_node) = (wire.num_nodes, rows.comm.num_ranks);
            let mut this = Token::NONE;
            if token < end {
                if lane < per_node {
                    let entry =
                        token as u64 * (nodes * per_node) as u64 + (wire.node * per_node + lane) as u64;
                    this.head = ld_i32(args.send_head.0 + entry * 4);
                }
                if lane < nodes {
                    let entry = token as u64 * nodes as u64 + lane as u64;
                    this.node_head = ld_i32(args.route.send_rdma_head.0 + entry * 4);
                }
                if rows.with_metadata != 0 && lane < nodes * per_node {
                    let entry = token as u64 * (nodes * per_node) as u64 + lane as u64;
                    this.world_head = ld_i32(args.send_head.0 + entry * 4);
                }
                if rows.with_metadata != 0 && lane < rows.num_topk {
                    let entry = token as u64 * rows.num_topk as u64 + lane as u64;
                    this.metadata.expert = ld_i64(rows.topk_idx.0 + entry * 8);
                    this.metadata.weight = ld_f32(rows.topk_weights.0 + entry * 4);
                }
            }
            this
        }
    }

    /// Makes it the token at hand. Not when it is fetched: whoever looks at a value waits for its load.
    #[inline(always)]
    fn arrive(&mut self, starts: u32) {
        if self.head >= 0 {
            self.metadata.row = (starts + self.head as u32) as i32;
        }
    }
}

/// A worker warp of the sender: its share of the channel's tokens.
#[inline(always)]
unsafe fn send(args: &InternodeDispatchArgs, ring: &Ring, channel: u32, workers: u32, progress: &Progress) {
    // SAFETY: as the argument struct documents; rows and slots were planned inside their memory.
    unsafe {
        let (rows, wire) = (&args.dispatch, &args.wire);
        let (comm, lane, warp) = (&rows.comm, laneid(), tid() / 32);
        let shape = slot_shape(args);
        let (begin, end) = channel_range(rows.num_tokens, args.route.num_channels, channel);
        let first = begin + warp;

        let peer = if lane < comm.num_ranks { pool_of(comm, lane) } else { 0 };
        let own = shfl_u64(peer, comm.rank);
        let mut pools = [0u64; MAX_RANKS];
        unroll8!(RANK => { pools[RANK] = shfl_u64(peer, RANK as u32) });
        // Lane j: where this channel's rows start at rank j. Lane n: where its slots for node n start.
        let mut starts = 0;
        if lane < comm.num_ranks {
            starts = ld_u32(forward_start(args, wire.node, channel) + lane as u64 * 4);
        }
        let (mut slots, mut slot_base) = (0, 0);
        let mut mapped = false;
        if lane < wire.num_nodes {
            let prefix = args.route.rdma_channel_prefix_matrix.0;
            slots = channel_rows(prefix, args.route.num_channels, lane, channel).0;
            let path = Path::to(wire, lane);
            slot_base = path.slots_out(wire, lane);
            mapped = (path.peer != 0) & (lane != wire.node);
        }
        let any_mapped = ballot(mapped) != 0;
        let relayed = relayed_before(args, wire.node);

        let mut load = Cursor::new(first, workers);
        while load.piece < rows.stages && load.token < end {
            load_piece(ring, rows, &load, load.piece);
            load.advance(rows);
        }
        let mut turn = Turn::first();
        let mut next = Token::fetch(args, first, end);
        let mut token = Token::NONE;
        let (mut slot, mut previous) = (0, 0);
        let pieces = rows.row_bytes.div_ceil(rows.piece_bytes).max(1);
        let mut sent = Cursor::new(first, workers);
        while sent.token < end {
            if sent.offset == 0 {
                token = next;
                token.arrive(starts);
                next = Token::fetch(args, sent.token + workers, end);
                // Lane n: the token's slot for another node, or 0.
                slot = 0;
                if token.node_head >= 0 && lane != wire.node {
                    slot = slot_base + (slots + token.node_head as u32) as u64 * args.slot_bytes as u64;
                }
                if rows.with_metadata != 0 {
                    token.metadata.send(rows, sent.token, &pools, lane);
                    send_source(args, token.metadata.row, peer, wire.node);
                    // Tokens for this node do not pass the wire, but are in the forwarder's books.
                    let node_head = shfl_u32(token.node_head as u32, wire.node) as i32;
                    if node_head >= 0 {
                        let start = shfl_u32(slots, wire.node);
                        let entry = relayed + start + node_head as u32;
                        book(args, entry, token.head, token.metadata.row);
                    }
                    pack(args, &shape, &token, sent.token, slot);
                }
                if rows.num_scales != 0 && bulk_scale_bytes(rows.num_scales) == 0 {
                    let from = rows.scales.0 + sent.token as u64 * rows.num_scales as u64 * 4;
                    copy_scales(from, rows.num_scales, scale_place(rows, peer, token.metadata.row));
                    copy_scales(
                        from,
                        rows.num_scales,
                        if slot != 0 { slot + shape.scales as u64 } else { 0 },
                    );
                }
            }
            let (bytes, buffer) = (sent.bytes(rows), ring.buffer(turn.slot));
            let row_offset = comm.pool.recv_x + sent.offset as u64;
            let stride = row_stride(rows.row_bytes as u64);
            let scale_bytes = if sent.offset == 0 { bulk_scale_bytes(rows.num_scales) } else { 0 };
            ring.wait(&turn);
            let row = token.metadata.row;
            if row >= 0 {
                if lane != comm.rank {
                    bulk_store(peer + row_offset + row as u64 * stride, buffer, bytes);
                }
                if scale_bytes != 0 {
                    bulk_store(scale_place(rows, peer, row), buffer + rows.piece_bytes, scale_bytes);
                }
            }
            if slot != 0 && mapped {
                bulk_store(slot + sent.offset as u64, buffer, bytes);
                if scale_bytes != 0 {
                    bulk_store(slot + shape.scales as u64, buffer + rows.piece_bytes, scale_bytes);
                }
            }
            bulk_commit();
            // Into the host's memory by ordinary stores: a warp that waits for bulk stores there flushes the bus, which takes 1.6 us and
            // is done for one warp of the device after the other.
            let mut on_host = ballot((slot != 0) & !mapped);
            while on_host != 0 {
                let to = shfl_u64(slot, on_host.trailing_zeros());
                on_host &= on_host - 1;
                store_plain(to + sent.offset as u64, buffer, bytes, lane);
                if scale_bytes != 0 {
                    store_plain(to + shape.scales as u64, buffer + rows.piece_bytes, scale_bytes, lane);
                }
            }
            let own_row = shfl_u32(row as u32, comm.rank) as i32;
            if own_row >= 0 {
                store_plain(own + row_offset + own_row as u64 * stride, buffer, bytes, lane);
            }

            // Refill the stage before this one: its store has had a whole turn to read it.
            if load.token < end && sent.piece >= 1 {
                bulk_wait_read::<1>();
                syncwarp();
                load_piece(ring, rows, &load, previous);
                load.advance(rows);
            }
            previous = turn.slot;
            turn.advance(ring);
            sent.advance(rows);
            if sent.offset == 0 {
                // What is packed by now: all but the last pieces, where bulk stores carry them.
                let mut packed = sent.piece;
                if any_mapped {
                    bulk_wait::<UNFINISHED>();
                    packed = packed.saturating_sub(UNFINISHED);
                    // It keeps a warp from running ahead of what the links carry, which is worth 40 us in 520: without it some blocks
                    // take most of the links and end early, and the others alone do not fill them.
                    fence_proxy_async();
                }
                say_packed(progress, packed / pieces, first - begin, workers);
            }
        }
        bulk_wait::<0>();
        say_packed(progress, sent.piece / pieces, end - begin + warp, workers);
    }
}

/// Tells the warp that posts that this warp has packed `count` tokens: the first that it lacks, counted from the channel's first.
#[inline(always)]
unsafe fn say_packed(progress: &Progress, count: u32, first: u32, workers: u32) {
    // SAFETY: lane 0 publishes what all lanes wrote before they met; their bulk stores have completed.
    unsafe {
        syncwarp();
        if laneid() == 0 {
            progress.publish(first + count * workers);
        }
    }
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

/// Notes where a relayed token's rows went: lane j those at rank j.
#[inline(always)]
unsafe fn book(args: &InternodeDispatchArgs, entry: u32, head: i32, row: i32) {
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

/// Writes a token's metadata into its slots; lane n has the address of the one for node n, or 0.
#[inline(always)]
unsafe fn pack(args: &InternodeDispatchArgs, shape: &SlotShape, entries: &Token, token: u32, slot: u64) {
    // SAFETY: the slots are inside wire memory.
    unsafe {
        let (rows, metadata, lane) = (&args.dispatch, &entries.metadata, laneid());
        let per_node = rows.comm.num_ranks;
        let world = args.wire.num_nodes * per_node;
        let heads = args.send_head.0 + token as u64 * world as u64 * 4;
        let mut nodes = ballot(slot != 0);
        while nodes != 0 {
            let node = nodes.trailing_zeros();
            nodes &= nodes - 1;
            let meta = shfl_u64(slot, node) + shape.meta as u64;
            let rank = node * per_node + lane;
            // Fetched ahead if all ranks' fit: a load here would hold the warp up for each node.
            let fetched = shfl_u32(entries.world_head as u32, rank.min(31)) as i32;
            if lane < MAX_RANKS as u32 {
                let mut head = -1;
                if lane < per_node {
                    head = if world <= 32 { fetched } else { ld_i32(heads + rank as u64 * 4) };
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
            }
        }
    }
}

/// The last warp of a sender: delivers each chunk of tokens for a node when it is packed. Lane n serves node n.
#[inline(always)]
unsafe fn post_channel(
    args: &InternodeDispatchArgs,
    channel: u32,
    planned: bool,
    progress: &Progress,
    operation: Operation,
) {
    // SAFETY: as `send`; the words at the peers have this rank's queue as their only writer.
    unsafe {
        let (rows, wire, comm) = (&args.dispatch, &args.wire, &args.dispatch.comm);
        // The peers' slots must be free, and a rank that enters late must find this one still here.
        if !wait_node_ready(comm, wire, operation.epoch, Wait::DispatchNodeReady) || !planned {
            return;
        }
        let (begin, end) = channel_range(rows.num_tokens, args.route.num_channels, channel);
        let node = laneid();
        let serves = node < wire.num_nodes && node != wire.node;
        let path = Path::of_lane(wire);
        let mut first = 0;
        if serves {
            let prefix = args.route.rdma_channel_prefix_matrix.0;
            first = channel_rows(prefix, args.route.num_channels, node, channel).0;
        }
        let (mut seen, mut packed, mut sent) = (begin, 0, 0);
        let mut posted = Posted::NONE;
        while seen < end {
            let upto = (begin + progress.slowest()).min(end);
            if serves {
                // The last of the new tokens that goes to this node says how many do.
                let mut token = upto;
                while token > seen {
                    token -= 1;
                    let entry = token as u64 * wire.num_nodes as u64 + node as u64;
                    let head = ld_i32(args.route.send_rdma_head.0 + entry * 4);
                    if head >= 0 {
                        packed = head as u32 + 1;
                        token = seen;
                    }
                }
                if packed - sent >= wire.chunk || (upto == end && packed != sent) {
                    let bytes = args.slot_bytes as u64;
                    let from = (first + sent) as u64 * bytes;
                    let put = Put {
                        from: wire.layout.slots_out + node as u64 * wire.layout.node_bytes + from,
                        to: wire.layout.slots_in + wire.node as u64 * wire.layout.node_bytes + from,
                        bytes: (packed - sent) as u64 * bytes,
                        counter: arrival_word(wire, wire.node, channel),
                        value: arrival(operation.epoch, packed),
                    };
                    posted = deliver(comm, wire, &path, node, channel, put, operation);
                    sent = packed;
                }
            }
            syncwarp();
            seen = upto;
        }
        // The slots may be packed anew as soon as the operation has ended.
        wait_quiet(comm, node, posted, operation);
    }
}

/// A warp's place among the pieces of what arrives on a channel: chunk after chunk, and of each chunk node after node, so that
/// no node holds the others up.
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
    #[inline(always)]
    unsafe fn new(args: &InternodeDispatchArgs, rows: u32, workers: u32) -> Self {
        // SAFETY: the warp is whole here.
        unsafe {
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
    }

    /// True behind the last row.
    #[inline(always)]
    fn ended(&self) -> bool {
        self.from >= self.most
    }

    /// Goes on until the row is one of the chunk and of the node.
    #[inline(always)]
    unsafe fn settle(&mut self) {
        // SAFETY: the walk is the same in all lanes.
        unsafe {
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
    }

    #[inline(always)]
    unsafe fn advance(&mut self, row_bytes: u32, piece_bytes: u32) {
        // SAFETY: passed on.
        unsafe {
            self.offset += piece_bytes;
            if self.offset >= row_bytes {
                self.offset = 0;
                self.row += self.workers;
                self.settle();
            }
        }
    }
}

/// A worker warp of the forwarder: its share of what arrives on the channel.
#[inline(always)]
unsafe fn forward(args: &InternodeDispatchArgs, ring: &Ring, channel: u32, workers: u32, epoch: u64) {
    // SAFETY: as `send`. A slot is read once its node has said that it has arrived.
    unsafe {
        let (rows, wire) = (&args.dispatch, &args.wire);
        let (comm, lane) = (&rows.comm, laneid());
        let shape = slot_shape(args);
        let peer = if lane < comm.num_ranks { pool_of(comm, lane) } else { 0 };
        let mut pools = [0u64; MAX_RANKS];
        unroll8!(RANK => { pools[RANK] = shfl_u64(peer, RANK as u32) });

        // Lane n: what comes on the channel from node n: how many rows, their slots and arrival word, and where they are in the books.
        let (mut count, mut entries) = (0, 0);
        let (mut slots, mut word) = (0, 0);
        if lane < wire.num_nodes {
            let path = Path::to(wire, lane);
            word = path.memory + arrival_word(wire, lane, channel);
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
        // Lane j: where the rows of the channel from `start_node` begin at rank j.
        let (mut start, mut start_node) = (0, u32::MAX);
        while !sent.ended() {
            while in_flight + 1 < rows.stages && !load.ended() {
                if shfl_u32(arrived, load.node) <= load.row {
                    let word = shfl_u64(word, load.node);
                    let seen = shfl_u32(rows_arrived(word, epoch), 0);
                    // What lane 0 acquired is every lane's after this.
                    syncwarp();
                    if lane == load.node {
                        arrived = seen;
                    }
                    if seen <= load.row {
                        if in_flight != 0 {
                            break;
                        }
                        let what = Wait::DispatchArrival;
                        let came = wait_rows(comm, word, load.node, load.row + 1, epoch, what);
                        if ballot(came) != u32::MAX {
                            return;
                        }
                        continue;
                    }
                    fence_proxy_async();
                }
                let slot = slot_of(&load);
                // Behind the row: its metadata, or in a cached dispatch where it went, so that no warp waits for a load of its own.
                let entry = shfl_u32(entries, load.node) + load.row;
                let tail = if rows.with_metadata != 0 {
                    Tail { from: slot + shape.meta as u64, bytes: SlotShape::metadata_bytes(rows.num_topk) }
                } else {
                    Tail { from: forward_row(args, entry), bytes: FORWARD_ROW_BYTES }
                };
                load_stage(ring, rows, load_slot, slot, slot + shape.scales as u64, tail, load.offset);
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
                if rows.with_metadata != 0 {
                    if sent.node != start_node && lane < comm.num_ranks {
                        start = ld_u32(forward_start(args, sent.node, channel) + lane as u64 * 4);
                    }
                    start_node = sent.node;
                    let mut token = Metadata::NONE;
                    let mut head = -1;
                    if lane < comm.num_ranks {
                        head = ld_shared_u32(tail + SlotShape::HEADS + lane * 4) as i32;
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
                    token.send(rows, ld_shared_u32(tail + SlotShape::TOKEN), &pools, lane);
                    send_source(args, row, peer, sent.node);
                    book(args, entry, head, row);
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
            // The stage before this one has been read: it is free for the next load.
            bulk_wait_read::<1>();
            syncwarp();
            in_flight -= 1;
            turn.advance(ring);
            sent.advance(rows.row_bytes, rows.piece_bytes);
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
