//! Combine across nodes. A channel has two blocks: the *gatherer* sums, for each token that this rank relayed in the dispatch, the
//! rows of this node's ranks, rounds to bf16 and sends the sum to the token's rank, into its wire memory or by a put; the *finisher*
//! sums what the nodes sent for this rank's own tokens. The own node's sums take the same way: its wire memory is always mapped.

use core::cell::Cell;

use epoxide_macros::kernel;

use super::combine::{Bf16, Contributors, Item, MAX_SLOT_BYTES, Ranks, Sums, sum_rows};
use super::epoch::{Phase, aborted, current_epoch, leave, tell_ready, trace};
use super::ring::{Ring, Turn, channel_range, shared_bytes};
use super::wire::{
    Operation, Path, Posted, Progress, Put, arrival, arrival_word, channel_rows, deliver, rows_arrived,
    tell_nodes_ready, wait_mapped_ready, wait_node_ready, wait_own_rows, wait_quiet, wait_rows, workers,
};
#[cfg(not(target_arch = "nvptx64"))]
use super::{Call, ContractError, Kernel, KernelInfo, ParamLayout};
use crate::layout::{InternodeCombineArgs, MAX_NODES, PlanStatus, SEND_ROW_STRIDE, Wait, combine_slot_bytes};
use crate::simt::*;

/// Where the number of the node, in the order that gatherers take them, begins in what a warp says of its progress; below it is the
/// number of items.
const TURN_SHIFT: u32 = 26;
/// Most items of a node on a channel.
const MAX_ITEMS: u64 = (1 << TURN_SHIFT) - 1;

/// Sums BF16 rows in FP32 over the ranks of a node in rank order, rounds, sums over nodes in order, rounds. Unweighted.
///
/// The last warp of a block posts puts in the gatherer and is idle in the finisher. Shared memory: the rings, then a word for
/// each warp.
#[kernel(
    threads = 384, min_blocks = 1, barriers = 4, registers = 168,
    requires(
        args.combine.row_bytes.is_multiple_of(16),
        args.combine.row_bytes >= 16,
        args.combine.slots >= 2,
        args.combine.slots <= 32,
        args.combine.slot_bytes.is_multiple_of(16),
        args.combine.slot_bytes >= 16,
        args.combine.slot_bytes <= MAX_SLOT_BYTES,
        args.combine.pieces == args.combine.row_bytes.div_ceil(args.combine.slot_bytes),
        args.combine.pieces >= 1,
        args.slot_bytes >= combine_slot_bytes(args.combine.row_bytes, args.combine.num_topk),
        args.slot_bytes.is_multiple_of(16),
        args.slot_bytes as u64 * args.wire.layout.slots <= args.wire.layout.node_bytes,
        args.wire.layout.slots * (args.combine.pieces as u64) <= MAX_ITEMS,
        args.wire.num_nodes >= 2,
        args.wire.num_nodes <= MAX_NODES as u32,
        args.combine.comm.num_ranks >= 1,
        args.wire.num_queues >= 1,
        args.wire.chunk >= 1,
        args.route.num_channels >= 1,
    )
)]
pub unsafe fn internode_combine(args: InternodeCombineArgs) {
    let (rows, comm, wire) = (&args.combine, &args.combine.comm, &args.wire);
    let workers = workers();
    let (channel, finishes) = (ctaid() / 2, ctaid() & 1 == 1);
    trace(comm, Phase::Enter);
    let epoch = current_epoch(comm);
    let operation = Operation { epoch, queue: Wait::CombineQueue };
    if ctaid() == 0 && tid() < 32 {
        tell_ready(comm, epoch);
        tell_nodes_ready(comm, wire, operation);
    }
    let planned = ld_u32(rows.header.0) == PlanStatus::Ready as u32;
    let progress = Progress::new(shared_bytes(workers, rows.slots, rows.slot_bytes), workers);
    let joined = wait_mapped_ready(comm, wire, epoch, Wait::CombineReady, Wait::CombineNodeReady);
    if tid() / 32 == workers {
        if !finishes && joined {
            post_sums(&args, channel, planned, &progress, operation);
        }
    } else if joined && planned {
        // The peers' rows were released to this thread; the copy engine must see them too.
        fence_proxy_async();
        let ring = Ring::new(rows.slots, rows.slot_bytes, workers);
        if finishes {
            let (begin, end) = channel_range(rows.num_tokens, args.route.num_channels, channel);
            let nodes = Nodes::new(&args, channel, epoch);
            let sums = Sums::contiguous(rows);
            sum_rows::<Bf16, _, _>(
                rows,
                &ring,
                &mut Turn::first(),
                &nodes,
                &sums,
                begin,
                end,
                workers,
                |_| {},
            );
        } else {
            gather(&args, &ring, channel, workers, &progress);
        }
    }
    // A wait that expired in any warp keeps the block from saying that it has done its part.
    barrier_sync();
    leave(comm, epoch, joined & !aborted(comm), Wait::CombineDone);
}

/// The node that comes in turn `turn`: the ones behind the own first, so that not all ranks send to the same; the own last.
#[inline(always)]
fn node_of(args: &InternodeCombineArgs, turn: u32) -> u32 {
    let node = args.wire.node + 1 + turn;
    if node >= args.wire.num_nodes { node - args.wire.num_nodes } else { node }
}

/// A worker warp of the gatherer: its share of the tokens that this rank relayed on the channel.
#[inline(always)]
unsafe fn gather(args: &InternodeCombineArgs, ring: &Ring, channel: u32, workers: u32, progress: &Progress) {
    // SAFETY: as the argument struct documents; slots were planned inside wire memory.
    unsafe {
        let (rows, wire, route) = (&args.combine, &args.wire, &args.route);
        let ranks = Ranks::new(rows, 0);
        let mut at = Turn::first();
        let mut turn = 0;
        while turn < wire.num_nodes {
            let node = node_of(args, turn);
            let prefix = route.recv_rdma_channel_prefix_matrix.0;
            let (first, count) = channel_rows(prefix, route.num_channels, node, channel);
            let mut entry = first;
            if node != 0 {
                entry += ld_u32(route.recv_rdma_rank_prefix_sum.0 + (node - 1) as u64 * 4);
            }
            let table = route.forward_row.0 + entry as u64 * SEND_ROW_STRIDE as u64 * 4;
            let slots = Path::to(wire, node).slots_out(wire, node) + first as u64 * args.slot_bytes as u64;
            let sums = Sums {
                rows: slots,
                stride: args.slot_bytes as u64,
                weights: if rows.combined_weights.is_null() { 0 } else { slots + rows.row_bytes as u64 },
                weight_stride: args.slot_bytes as u64,
            };
            let finished = |next: Item| {
                syncwarp();
                if laneid() == 0 {
                    progress.publish(turn << TURN_SHIFT | (next.token * rows.pieces + next.piece));
                }
            };
            let table = ranks.with_table(table);
            sum_rows::<Bf16, _, _>(rows, ring, &mut at, &table, &sums, 0, count, workers, finished);
            turn += 1;
            syncwarp();
            if laneid() == 0 {
                progress.publish(turn << TURN_SHIFT);
            }
        }
    }
}

/// The last warp of a gatherer: delivers each chunk of sums for a node when it is ready. Lane n serves node n.
#[inline(always)]
unsafe fn post_sums(
    args: &InternodeCombineArgs,
    channel: u32,
    planned: bool,
    progress: &Progress,
    operation: Operation,
) {
    // SAFETY: the words at the peers have this rank's queue as their only writer.
    unsafe {
        let (rows, wire, comm) = (&args.combine, &args.wire, &args.combine.comm);
        // The peers' slots must be free, and a rank that enters late must find this one still here.
        if !wait_node_ready(comm, wire, operation.epoch, Wait::CombineNodeReady) || !planned {
            return;
        }
        let lane = laneid();
        let path = Path::of_lane(wire);
        let mut posted = Posted::NONE;
        let mut turn = 0;
        while turn < wire.num_nodes {
            let node = node_of(args, turn);
            let prefix = args.route.recv_rdma_channel_prefix_matrix.0;
            let (first, count) = channel_rows(prefix, args.route.num_channels, node, channel);
            let mut sent = 0;
            while sent < count {
                let slowest = progress.slowest();
                let at = slowest >> TURN_SHIFT;
                let items = slowest & ((1 << TURN_SHIFT) - 1);
                let mut ready = 0;
                if at > turn {
                    ready = count;
                } else if at == turn {
                    ready = (items / rows.pieces).min(count);
                }
                if ready - sent >= wire.chunk || (ready == count && ready != sent) {
                    if lane == node {
                        let bytes = args.slot_bytes as u64;
                        let from = (first + sent) as u64 * bytes;
                        let put = Put {
                            from: wire.layout.slots_out + node as u64 * wire.layout.node_bytes + from,
                            to: wire.layout.slots_in + wire.node as u64 * wire.layout.node_bytes + from,
                            bytes: (ready - sent) as u64 * bytes,
                            counter: arrival_word(wire, wire.node, channel),
                            value: arrival(operation.epoch, ready),
                        };
                        posted = deliver(comm, wire, &path, node, channel, put, operation);
                    }
                    syncwarp();
                    sent = ready;
                }
            }
            turn += 1;
        }
        // The slots may be written anew as soon as the operation has ended.
        wait_quiet(comm, lane, posted, operation);
    }
}

/// The sums that the nodes sent for this rank's tokens: lane n knows those of node n.
struct Nodes<'a> {
    args: &'a InternodeCombineArgs,
    /// Where this node's slots are.
    slots: u64,
    /// Its arrival word.
    word: u64,
    /// First slot of the channel.
    first: u32,
    epoch: u64,
    /// Rows of the channel known to have come.
    known: Cell<u32>,
}

impl<'a> Nodes<'a> {
    #[inline(always)]
    unsafe fn new(args: &'a InternodeCombineArgs, channel: u32, epoch: u64) -> Self {
        // SAFETY: the entries lie inside their arrays.
        unsafe {
            let (wire, lane) = (&args.wire, laneid());
            let (mut slots, mut word, mut first) = (0, 0, 0);
            if lane < wire.num_nodes {
                let path = Path::to(wire, lane);
                slots = path.slots_in(wire, lane);
                word = path.memory + arrival_word(wire, lane, channel);
                let prefix = args.route.rdma_channel_prefix_matrix.0;
                first = channel_rows(prefix, args.route.num_channels, lane, channel).0;
            }
            Nodes { args, slots, word, first, epoch, known: Cell::new(0) }
        }
    }
}

impl Contributors for Nodes<'_> {
    #[inline(always)]
    unsafe fn row(&self, token: u32) -> i32 {
        // SAFETY: the entry lies inside the matrix.
        unsafe {
            let (nodes, lane) = (self.args.wire.num_nodes, laneid());
            let mut row = -1;
            if lane < nodes {
                let entry = token as u64 * nodes as u64 + lane as u64;
                let head = ld_i32(self.args.route.send_rdma_head.0 + entry * 4);
                if head >= 0 {
                    row = (self.first + head as u32) as i32;
                }
            }
            row
        }
    }

    #[inline(always)]
    unsafe fn address(&self, row: i32) -> u64 {
        self.slots + row as u64 * self.args.slot_bytes as u64
    }

    #[inline(always)]
    unsafe fn weights(&self, row: i32) -> u64 {
        let offset = row as i64 * self.args.slot_bytes as i64 + self.args.combine.row_bytes as i64;
        self.slots.wrapping_add_signed(offset)
    }

    #[inline(always)]
    unsafe fn wait(&self, row: i32) {
        // SAFETY: the word is in this rank's wire memory.
        unsafe {
            let needed = row as u32 - self.first + 1;
            if needed > self.known.get() {
                let (args, node) = (self.args, laneid());
                let (comm, wire) = (&args.combine.comm, &args.wire);
                if node == wire.node {
                    wait_own_rows(comm, self.word, needed, self.epoch);
                } else {
                    wait_rows(comm, self.word, node, needed, self.epoch, Wait::CombineArrival);
                }
                self.known.set(rows_arrived(self.word, self.epoch));
                fence_proxy_async();
            }
        }
    }

    #[inline(always)]
    fn lanes(&self) -> u32 {
        self.args.wire.num_nodes
    }
}
