//! Combine across nodes. A channel has two blocks: the *gatherer* sums this node's rows of each
//! token that this rank relayed in the dispatch. It rounds the sum to the rows' type and sends it to the
//! token's rank, into that rank's wire memory or by a put; the *finisher* sums what the nodes sent
//! for this rank's own tokens. The own node's sums take the same way: its wire memory is always
//! mapped.
//!
//! Soundness: combine rows are read as within a node. A slot is written behind its node's ready
//! word, at the place that the dispatch's count exchange has planned for its token alone. It is
//! read behind the arrival word, with a proxy fence before the copy engine reads it. One warp
//! delivers the slots that all warps have released to it through their progress. The kernel ends
//! when its puts have left. Collectives stand where all lanes of a warp arrive: the conditions
//! around them are the same in all lanes.

use core::cell::Cell;

use super::arrivals::Arrivals;
use super::combine::{
    Bf16, Contributors, F16, F32, Gather, Item, Listed, Outputs, Peers, Ranks, Sink, Summand, VECTORS, spoil,
    sum_rows, vectors_of,
};
use super::epoch::{
    Phase, ReadyEntry, current_epoch, give_up_combine, leave, note_gave_up, pool_of, tell_ready, trace,
    warp_aborted,
};
use super::progress::{Progress, workers};
use super::rail::{
    Delivery, Operation, Path, Posted, arrival, arrival_word, channel_rows, deliver, is_in_vain,
    tell_nodes_ready, wait_mapped_ready, wait_node_ready, wait_quiet,
};
use super::ring::{Ring, Turn, channel_range};
use crate::layout::{
    CombineArgs, Comm, DevicePtr, InternodeCombineArgs, InternodeExpertCombineArgs, SEND_ROW_STRIDE, Wait,
    Wire, done_offset, ring_bytes,
};
use crate::simt::*;

/// Most bytes of a slot: 32 lanes with seven vectors of 16 bytes each.
pub const MAX_INTERNODE_SLOT_BYTES: u32 = 32 * 16 * vectors_of(true) as u32;
/// Most tokens of a channel, those that are none included: the number of one is a word of progress.
const MAX_TOKENS: u64 = u32::MAX as u64;

kernels! {
    kernel(
        threads = 512, barriers = 3, registers = 128,
        grid = args.route.num_channels.saturating_mul(2), block >= 64,
        shared = crate::layout::shared_with_rings(
            block / 32 - 1, args.combine.slots, args.combine.slot_bytes, super::progress::PROGRESS_BYTES
        ),
        requires(
            ..CombineArgs(args.combine),
            ..Wire(args.wire),
            args.combine.slot_bytes <= MAX_INTERNODE_SLOT_BYTES,
            (args.wire.layout.slots + args.wire.chunk as u64) * args.wire.num_nodes as u64 <= MAX_TOKENS,
        )
    );
    fn(args: InternodeCombineArgs);

    /// Sums BF16 rows in FP32 over the ranks of a node in rank order, rounds, sums over nodes in order,
    /// rounds. Unweighted.
    ///
    /// The last warp of a block delivers in the gatherer and polls arrival words in the finisher.
    /// Shared memory: the rings, then a word for each warp, or for each node.
    internode_combine { combine::<Bf16, false>(&args, DevicePtr::NULL, 0) }

    /// Sums F16 rows, otherwise as [`InternodeCombine`]; a sum that is too large for F16 is infinite.
    internode_combine_f16 { combine::<F16, false>(&args, DevicePtr::NULL, 0) }

    /// Sums FP32 rows, otherwise as [`InternodeCombine`].
    internode_combine_f32 { combine::<F32, false>(&args, DevicePtr::NULL, 0) }
}

kernels! {
    kernel(
        threads = 512, barriers = 3, registers = 128,
        grid = args.rows.route.num_channels.saturating_mul(2), block >= 64,
        shared = crate::layout::shared_with_rings(
            block / 32 - 1, args.rows.combine.slots, args.rows.combine.slot_bytes, super::progress::PROGRESS_BYTES
        ),
        requires(
            ..InternodeCombineArgs(args.rows),
            ..CombineArgs(args.rows.combine),
            ..Wire(args.rows.wire),
            args.rows.combine.slot_bytes <= MAX_INTERNODE_SLOT_BYTES,
            (args.rows.wire.layout.slots + args.rows.wire.chunk as u64) * args.rows.wire.num_nodes as u64
                <= MAX_TOKENS,
        )
    );
    fn(args: InternodeExpertCombineArgs);

    /// The same as [`InternodeCombine`] of rows by expert: a node's sum is over the token's entries, in
    /// their order, each times the weight that the dispatch has brought.
    internode_combine_by_expert { combine::<Bf16, true>(&args.rows, args.weights, args.num_topk as u32) }

    /// Sums F16 rows, otherwise as [`InternodeCombineByExpert`]; a sum that is too large for F16 is
    /// infinite.
    internode_combine_by_expert_f16 { combine::<F16, true>(&args.rows, args.weights, args.num_topk as u32) }

    /// Sums FP32 rows, otherwise as [`InternodeCombineByExpert`].
    internode_combine_by_expert_f32 { combine::<F32, true>(&args.rows, args.weights, args.num_topk as u32) }
}

/// `weights` and `num_topk`: by expert, those of relayed tokens' entries.
///
/// # Safety
/// Rows were planned inside the pools, and slots inside wire memory.
#[device]
unsafe fn combine<E: Summand, const BY_EXPERT: bool>(
    args: &InternodeCombineArgs,
    weights: DevicePtr,
    num_topk: u32,
) {
    let (rows, comm, wire) = (&args.combine, &args.combine.comm, &args.wire);
    let workers = workers();
    let (channel, finishes) = (ctaid() / 2, ctaid() & 1 == 1);
    trace(comm, Phase::Enter);
    let entry = ReadyEntry::read(comm, rows.header.0);
    let epoch = current_epoch(comm);
    let ready = entry.ready_word(comm, epoch);
    let operation = Operation { epoch, ready, queue_wait: Wait::CombineQueue };
    if ctaid() == 0 && tid() < 32 {
        tell_ready::<false>(comm, ready);
        tell_nodes_ready(comm, wire, operation);
    }
    let planned = entry.is_planned();
    let at = ring_bytes(workers, rows.slots, rows.slot_bytes);
    let (progress, arrivals) = (Progress::new(at, workers), Arrivals::new(at));
    // Finishers write on this rank alone.
    let of_node = if finishes { None } else { Some(Wait::CombineNodeReady) };
    let joined = wait_mapped_ready(comm, wire, operation, Wait::CombineReady, of_node);
    if tid() / 32 == workers {
        if joined && !finishes {
            post_sums(args, channel, planned, &progress, operation);
        } else if joined && planned {
            watch(args, &arrivals, channel, epoch);
        }
    } else if joined && planned {
        // The peers' rows were released to this thread; the copy engine must see them too.
        fence_proxy_async_global();
        let ring = Ring::new(rows.slots, rows.slot_bytes, workers);
        if finishes {
            let (begin, end) = channel_range(rows.num_tokens, args.route.num_channels, channel);
            let nodes = Nodes::new(args, &arrivals, channel);
            let mut sums = Outputs::<true>::new(rows);
            let turn = &mut Turn::first();
            let gather = Gather::start(rows, &nodes, begin, end, tid() / 32, workers);
            sum_rows::<E, _, _, true>(rows, &ring, turn, &nodes, &mut sums, gather);
        } else {
            gather::<E, BY_EXPERT>(args, (weights, num_topk), &ring, channel, workers, &progress);
        }
    }
    // A wait that expired in any warp keeps the block from saying that it has done its part.
    barrier_sync();
    let is_sound = joined & !warp_aborted(comm);
    if leave::<false>(comm, epoch, is_sound, Wait::CombineDone) && give_up_combine::<false>(comm, epoch) {
        spoil::<true>(rows, 0, rows.num_tokens, 0, 1);
    }
    if finishes && tid() / 32 != workers && !(is_sound && planned) {
        let (begin, end) = channel_range(rows.num_tokens, args.route.num_channels, channel);
        spoil::<true>(rows, begin, end, tid() / 32, workers);
    }
}

/// A number that is divided by again and again: by a multiplication, as a division takes dozens of
/// instructions.
#[derive(Clone, Copy)]
struct Divisor {
    by: u32,
    /// 2^32 - 1 over it, rounded down.
    reciprocal: u32,
}

impl Divisor {
    /// # Safety
    /// `by` is at least 1, which spares a trap.
    #[device]
    unsafe fn new(by: u32) -> Self {
        core::hint::assert_unchecked(by >= 1);
        Divisor { by, reciprocal: u32::MAX / by }
    }

    /// Quotient and remainder.
    #[device]
    fn split(&self, number: u32) -> (u32, u32) {
        // Never too large, and too small by one at the most: the reciprocal is at least 2^32 / by -
        // 1, and the number below 2^32.
        let quotient = ((number as u64 * self.reciprocal as u64) >> 32) as u32;
        let rest = number - quotient * self.by;
        if rest >= self.by { (quotient + 1, rest - self.by) } else { (quotient, rest) }
    }
}

/// The order in which a gatherer takes the tokens that it relayed on a channel: chunk after chunk,
/// and of each chunk node after node, so that all nodes' sums come along evenly and finishers need
/// not wait for the last of them. The nodes behind the own one come first, so that not all ranks
/// send to the same; the own one comes last. Lane n holds what is of node n.
#[derive(Clone, Copy)]
struct Order {
    chunk: Divisor,
    nodes: Divisor,
    own: u32,
    /// Tokens from the node, and the first of its slots.
    count: u32,
    first: u32,
    /// Tokens, counted as if every node had as many as the one with most: some numbers stand for
    /// none.
    end: u32,
}

impl Order {
    /// # Safety
    /// The entries lie inside the matrix; the warp is whole here.
    #[device]
    unsafe fn new(args: &InternodeCombineArgs, channel: u32) -> Self {
        let (wire, route, lane) = (&args.wire, &args.route, laneid());
        let (mut first, mut count) = (0, 0);
        if lane < wire.num_nodes {
            let prefix = route.recv_rdma_channel_prefix_matrix.0;
            (first, count) = channel_rows(prefix, route.num_channels, lane, channel);
        }
        let most = u32::MAX - redux_min(u32::MAX - count);
        let (chunk, nodes) = (Divisor::new(wire.chunk), Divisor::new(wire.num_nodes));
        let rounds = chunk.split(most + wire.chunk - 1).0;
        let end = rounds * wire.chunk * wire.num_nodes;
        Order { chunk, nodes, own: wire.node, count, first, end }
    }

    /// The token's node, and which of the tokens from there it is: none, where there are not that
    /// many.
    #[device]
    fn place(&self, token: u32) -> (u32, u32) {
        let ((group, rest), nodes) = (self.chunk.split(token), self.nodes.by);
        let (round, turn) = self.nodes.split(group);
        let node = self.own + 1 + turn;
        (if node >= nodes { node - nodes } else { node }, round * self.chunk.by + rest)
    }

    /// Lane n: how many of node n's tokens come before `token`.
    #[device]
    fn before(&self, token: u32) -> u32 {
        let (group, rest) = self.chunk.split(token);
        let (round, now) = self.nodes.split(group);
        let (node, behind) = (laneid(), self.own + 1);
        let turn = if node >= behind { node - behind } else { node + self.nodes.by - behind };
        let of_round = match (turn < now, turn == now) {
            (true, _) => self.chunk.by,
            (_, true) => rest,
            _ => 0,
        };
        (round * self.chunk.by + of_round).min(self.count)
    }
}

/// The rows at this node's ranks of relayed tokens, in the gatherer's order.
struct Relayed<'a> {
    order: Order,
    ranks: Ranks<'a>,
    /// Lane n: the rows of the channel's first token from node n.
    table: u64,
}

impl Contributors for Relayed<'_> {
    const FEWER: bool = true;

    /// # Safety
    /// The entries lie inside the table.
    #[device]
    unsafe fn row(&self, token: u32) -> i32 {
        let (node, index) = self.order.place(token);
        let (table, count) = (shfl_u64(self.table, node), shfl_u32(self.order.count, node));
        Ranks::row_at(Global::new(table).skip(row_major(index, SEND_ROW_STRIDE, 0)), index < count)
    }

    #[device]
    fn address(&self, row: i32) -> u64 {
        self.ranks.address(row)
    }

    #[device]
    fn weights(&self, row: i32) -> u64 {
        self.ranks.weights(row)
    }

    #[device]
    unsafe fn wait(&self, _row: i32) {}

    #[device]
    fn lanes(&self) -> u32 {
        self.ranks.lanes()
    }
}

/// The rows by expert at this node's ranks of relayed tokens, in the gatherer's order: lane k has
/// the row of a token's entry k. A row is represented by the number of its entry in the lists.
struct RelayedByExpert<'a> {
    order: Order,
    listed: Listed<'a>,
    /// Lane n: the channel's first token from node n, among the relayed ones.
    entries: u32,
    /// Weights of the relayed tokens' entries, or null for 1, and how many a token has.
    weights: (DevicePtr, u32),
}

impl Contributors for RelayedByExpert<'_> {
    const FEWER: bool = true;
    const WEIGHTED: bool = true;

    /// # Safety
    /// The token has so many weights.
    #[device]
    unsafe fn weight(&self, token: u32) -> f32 {
        let (node, index) = self.order.place(token);
        let (entry, count) = (shfl_u32(self.entries, node) + index, shfl_u32(self.order.count, node));
        let (weights, num_topk) = self.weights;
        let is_given = (index < count) & !weights.is_null() & (laneid() < num_topk);
        let at = row_major(entry, num_topk, laneid());
        let weight = ld_f32_if(is_given, weights.array::<f32>().at(at));
        if is_given { weight } else { 1.0 }
    }

    /// # Safety
    /// A relayed token has a list.
    #[device]
    unsafe fn row(&self, token: u32) -> i32 {
        let (node, index) = self.order.place(token);
        let (entry, count) = (shfl_u32(self.entries, node) + index, shfl_u32(self.order.count, node));
        if index < count { self.listed.row(entry) } else { -1 }
    }

    #[device]
    fn address(&self, row: i32) -> u64 {
        self.listed.address(row)
    }

    #[device]
    fn weights(&self, row: i32) -> u64 {
        self.listed.weights(row)
    }

    #[device]
    unsafe fn wait(&self, _row: i32) {}

    #[device]
    fn lanes(&self) -> u32 {
        self.listed.lanes()
    }
}

/// Sums on their way to slots.
struct Slots<'a> {
    args: &'a InternodeCombineArgs,
    order: Order,
    /// Lane n: the channel's first slot for node n.
    slots: u64,
    /// The slot of the token at hand; 0 where there is no such token.
    slot: u64,
    /// Whether `slot` is kept from piece to piece. FP32 sums leave no registers for it.
    keeps_slot: bool,
    /// Warps that share the channel's tokens.
    workers: u32,
    progress: &'a Progress,
}

impl Slots<'_> {
    /// The slot for the sum of `token`; 0 where there is no such token.
    ///
    /// # Safety
    /// The whole warp calls it.
    #[device]
    unsafe fn slot(&self, token: u32) -> u64 {
        let (node, index) = self.order.place(token);
        let (slots, count) = (shfl_u64(self.slots, node), shfl_u32(self.order.count, node));
        if index < count { DevicePtr(slots).row(index, self.args.slot_bytes) } else { 0 }
    }

    /// Publishes that the sums of the warp's tokens before `token` are complete.
    ///
    /// # Safety
    /// Lane 0 publishes what all lanes wrote before they met.
    #[device]
    unsafe fn publish(&self, token: u32) {
        syncwarp();
        if laneid() == 0 {
            self.progress.publish(token);
        }
    }
}

impl Sink for Slots<'_> {
    /// # Safety
    /// The whole warp calls it.
    #[device]
    unsafe fn weights(&self, token: u32) -> u64 {
        let rows = &self.args.combine;
        let slot = if rows.combined_weights.is_null() { 0 } else { self.slot(token) };
        if slot == 0 { 0 } else { slot + rows.row_bytes as u64 }
    }

    /// # Safety
    /// The slot was planned, and its node is ready.
    #[device]
    unsafe fn store(&mut self, item: Item, bytes: u32, vectors: [[u32; 4]; VECTORS]) {
        let rows = &self.args.combine;
        if item.piece == 0 || !self.keeps_slot {
            self.slot = self.slot(item.token);
        }
        if self.slot != 0 {
            let to = self.slot + (item.piece * rows.slot_bytes) as u64;
            unroll!(8, J => {
                let at = laneid() * 16 + J as u32 * 512;
                if J < vectors_of(true) && at < bytes {
                    st_v4(to + at as u64, vectors[J]);
                }
            });
        }
        if item.piece + 1 == rows.pieces {
            self.publish(item.token + self.workers);
        }
    }
}

/// A worker warp of the gatherer: its share of the tokens that this rank relayed on the channel.
///
/// # Safety
/// Slots were planned inside wire memory.
#[device]
unsafe fn gather<E: Summand, const BY_EXPERT: bool>(
    args: &InternodeCombineArgs,
    weights: (DevicePtr, u32),
    ring: &Ring,
    channel: u32,
    workers: u32,
    progress: &Progress,
) {
    let (rows, wire, route, lane) = (&args.combine, &args.wire, &args.route, laneid());
    let order = Order::new(args, channel);
    let (mut table, mut slots, mut entries) = (0, 0, 0);
    if lane < wire.num_nodes {
        let mut entry = order.first;
        if lane != 0 {
            entry += route.recv_rdma_rank_prefix_sum.array::<u32>().ld(lane - 1);
        }
        entries = entry;
        table = route.forward_row.array::<i32>().at(row_major(entry, SEND_ROW_STRIDE, 0));
        slots = DevicePtr(Path::to(wire, lane).slots_out(wire, lane)).row(order.first, args.slot_bytes);
    }
    let mut to = Slots { args, order, slots, slot: 0, keeps_slot: E::BYTES == 2, workers, progress };
    if BY_EXPERT {
        let from = RelayedByExpert { order, listed: Listed::new(rows), entries, weights };
        let gather = Gather::start(rows, &from, 0, order.end, tid() / 32, workers);
        sum_rows::<E, _, _, true>(rows, ring, &mut Turn::first(), &from, &mut to, gather);
        to.publish(order.end);
        return;
    }
    let from = Relayed { order, ranks: Ranks::new(rows, 0), table };
    let gather = Gather::start(rows, &from, 0, order.end, tid() / 32, workers);
    sum_rows::<E, _, _, true>(rows, ring, &mut Turn::first(), &from, &mut to, gather);
    to.publish(order.end);
}

/// The last warp of a gatherer: delivers each chunk of sums for a node when it is ready. Lane n
/// serves node n.
///
/// # Safety
/// The words at the peers have this rank's queue as their only writer.
#[device]
unsafe fn post_sums(
    args: &InternodeCombineArgs,
    channel: u32,
    planned: bool,
    progress: &Progress,
    operation: Operation,
) {
    let (wire, comm) = (&args.wire, &args.combine.comm);
    // The peers' slots must be free, and a rank that enters late must find this one still here.
    if !wait_node_ready(comm, wire, operation, Wait::CombineNodeReady) || !planned {
        return;
    }
    let node = laneid();
    let path = Path::of_lane(wire);
    let order = Order::new(args, channel);
    let (mut posted, mut sent) = (Posted::NONE, 0);
    let mut turns = 0;
    while ballot(sent < order.count) != 0 && !is_in_vain(comm, &mut turns) {
        let ready = order.before(progress.slowest());
        let is_due = ready - sent >= wire.chunk || (ready == order.count && ready != sent);
        // Sums of rows that may be others are not sent.
        if ballot(is_due) != 0 && has_one_given_up(comm, operation.epoch) {
            break;
        }
        if is_due {
            let bytes = args.slot_bytes as u64;
            let from = (order.first + sent) as u64 * bytes;
            let delivery = Delivery {
                from: DevicePtr(wire.layout.slots_out).row(node, wire.layout.node_bytes) + from,
                to: DevicePtr(wire.layout.slots_in).row(wire.node, wire.layout.node_bytes) + from,
                bytes: (ready - sent) as u64 * bytes,
                counter: arrival_word(wire, wire.node, channel),
                value: arrival(operation.epoch, ready),
            };
            posted = deliver(comm, wire, &path, node, channel, delivery, operation);
            sent = ready;
        }
        syncwarp();
    }
    // The slots may be written anew as soon as the operation has ended.
    wait_quiet(comm, node, posted, operation);
}

/// Whether a rank of this node has given up its combine. The sums that were made before are of its
/// rows. A failure is recorded, which ends the waits for the sums that are not sent. The whole warp
/// calls it.
///
/// # Safety
/// The words are in this rank's own pool.
#[device]
unsafe fn has_one_given_up(comm: &Comm, epoch: u64) -> bool {
    let (rank, mut has_given_up) = (laneid(), false);
    if rank < comm.num_ranks {
        let seen = ld_relaxed_sys_u64(pool_of(comm, comm.rank) + done_offset(rank));
        has_given_up = note_gave_up(comm, rank, epoch, seen);
    }
    ballot(has_given_up) != 0
}

/// The last warp of a finisher: polls the arrival words of the channel.
///
/// # Safety
/// The entries lie inside the matrix.
#[device]
unsafe fn watch(args: &InternodeCombineArgs, arrivals: &Arrivals, channel: u32, epoch: u64) {
    let (wire, lane) = (&args.wire, laneid());
    let mut rows = 0;
    if lane < wire.num_nodes {
        let prefix = args.route.rdma_channel_prefix_matrix.0;
        rows = channel_rows(prefix, args.route.num_channels, lane, channel).1;
    }
    arrivals.watch(&args.combine.comm, wire, channel, rows, epoch, Wait::CombineArrival);
}

/// The sums that the nodes sent for this rank's tokens: lane n holds those of node n. A row is the
/// token's index in the (channel, node) stream.
struct Nodes<'a> {
    args: &'a InternodeCombineArgs,
    /// Where the channel's slots from this node are.
    slots: u64,
    arrivals: &'a Arrivals,
    /// Rows of the channel known to have come.
    known: Cell<u32>,
}

impl<'a> Nodes<'a> {
    /// # Safety
    /// The entries lie inside their arrays.
    #[device]
    unsafe fn new(args: &'a InternodeCombineArgs, arrivals: &'a Arrivals, channel: u32) -> Self {
        let (wire, lane) = (&args.wire, laneid());
        let mut slots = 0;
        if lane < wire.num_nodes {
            let path = Path::to(wire, lane);
            let prefix = args.route.rdma_channel_prefix_matrix.0;
            let first = channel_rows(prefix, args.route.num_channels, lane, channel).0;
            slots = path.slots_in(wire, lane) + first as u64 * args.slot_bytes as u64;
        }
        Nodes { args, slots, arrivals, known: Cell::new(0) }
    }
}

impl Contributors for Nodes<'_> {
    const FEWER: bool = true;

    /// # Safety
    /// The entry lies inside the matrix.
    #[device]
    unsafe fn row(&self, token: u32) -> i32 {
        let (nodes, lane) = (self.args.wire.num_nodes, laneid());
        let entry = row_major(token, nodes, lane);
        ld_i32_if(lane < nodes, self.args.route.send_rdma_head.array::<i32>().at(entry), -1)
    }

    #[device]
    fn address(&self, row: i32) -> u64 {
        DevicePtr(self.slots).row(row, self.args.slot_bytes)
    }

    #[device]
    fn weights(&self, row: i32) -> u64 {
        let offset = row as i64 * self.args.slot_bytes as i64 + self.args.combine.row_bytes as i64;
        self.slots.wrapping_add_signed(offset)
    }

    /// # Safety
    /// The lane's node has a word.
    #[device]
    unsafe fn wait(&self, row: i32) {
        if row as u32 >= self.known.get() {
            self.arrivals.wait(&self.args.combine.comm, laneid(), row as u32);
            self.known.set(self.arrivals.rows(laneid()));
            fence_proxy_async();
        }
    }

    #[device]
    fn lanes(&self) -> u32 {
        self.args.wire.num_nodes
    }
}
