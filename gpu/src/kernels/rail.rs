//! Communication of kernels across nodes, over their rail. A kernel writes to a peer's wire memory,
//! or posts puts to its queue, and waits for the peers' words.
//!
//! A rank talks to one rank of every other node: the one with its own index there. In this file
//! `node` stands for it.

use super::epoch::{Phase, pool_of, trace, wait_entered, wait_entered_or, warp_aborted};
use super::peer_wait::PeerWait;
use crate::layout::{
    ARRIVAL_SHIFT, Comm, ControlWord, MAX_CHANNELS, NO_READY, NodePath, PutRequest, QueueHandle, QueueWords,
    READY_EPOCHS, RING_ENTRIES, Wait, Wire, ready_offset,
};
use crate::simt::*;

/// A put that is posted: which queue, and its position there.
#[derive(Clone, Copy)]
pub struct Posted {
    queue: u64,
    ticket: u64,
}

impl Posted {
    /// Nothing to wait for.
    pub const NONE: Posted = Posted { queue: 0, ticket: 0 };
}

/// A delivery to a node: bytes, and the counter behind them, in the words of a [`PutRequest`].
pub struct Delivery {
    pub from: u64,
    pub to: u64,
    pub bytes: u64,
    pub counter: u64,
    pub value: u64,
}

/// An operation, for the words to other nodes, and for waits that are for a queue's proxy and not
/// for a peer.
#[derive(Clone, Copy)]
pub struct Operation {
    pub epoch: u64,
    /// The word by which this rank enters it, [`super::epoch::ReadyEntry::ready_word`];
    /// [`NO_READY`] where it publishes none.
    pub ready: u64,
    /// The name of a wait for the proxy in the record of one that expired.
    pub queue_wait: Wait,
}

impl Operation {
    /// A wait for the proxy of the queue to `peer`.
    #[device]
    fn proxy<'a>(&self, comm: &'a Comm, peer: u32) -> PeerWait<'a> {
        PeerWait::new(comm, peer, self.epoch, self.queue_wait)
    }
}

/// The way to a node: addresses of [`NodePath`].
#[derive(Clone, Copy)]
pub struct Path {
    /// The own wire memory that the peer writes to.
    pub memory: u64,
    /// The peer's wire memory, or 0 where queues lead there.
    pub peer: u64,
}

impl Path {
    /// No way, for lanes that serve no node.
    pub const NONE: Path = Path { memory: 0, peer: 0 };

    /// The way to `node`.
    ///
    /// # Safety
    /// The table has an entry for every node.
    #[device]
    pub unsafe fn to(wire: &Wire, node: u32) -> Path {
        let entry = wire.paths.array::<NodePath>().at(node);
        Path { memory: ld_u64(field!(entry, NodePath.memory)), peer: ld_u64(field!(entry, NodePath.peer)) }
    }

    /// Lane n: the way to node n.
    ///
    /// # Safety
    /// The table has an entry for every node.
    #[device]
    pub unsafe fn of_lane(wire: &Wire) -> Path {
        if laneid() < wire.num_nodes { Path::to(wire, laneid()) } else { Path::NONE }
    }

    /// Whether slots for `node` are written into its rank's device memory. False where they go to
    /// host memory: the own, for a put, or the rank's, which kernels write with ordinary stores.
    ///
    /// # Safety
    /// The table has an entry for every node.
    #[device]
    pub unsafe fn leads_to_device(&self, wire: &Wire, node: u32) -> bool {
        let entry = wire.paths.array::<NodePath>().at(node);
        (self.peer != 0) & (ld_u64(field!(entry, NodePath.peer_on_host)) == 0)
    }

    /// Where the slots for `node`, whose path this is, are written: at the peer if its memory is
    /// mapped, else where a put takes them.
    #[device]
    pub fn slots_out(&self, wire: &Wire, node: u32) -> u64 {
        if self.peer != 0 {
            DevicePtr(self.peer + wire.layout.slots_in).row(wire.node, wire.layout.node_bytes)
        } else {
            DevicePtr(self.memory + wire.layout.slots_out).row(node, wire.layout.node_bytes)
        }
    }

    /// Where the slots from `node` arrive.
    #[device]
    pub fn slots_in(&self, wire: &Wire, node: u32) -> u64 {
        DevicePtr(self.memory + wire.layout.slots_in).row(node, wire.layout.node_bytes)
    }

    /// Where the count message for `node` is written, as [`Path::slots_out`].
    #[device]
    pub fn message_out(&self, wire: &Wire, node: u32) -> u64 {
        if self.peer != 0 {
            DevicePtr(self.peer + wire.layout.messages_in).row(wire.node, wire.layout.message_bytes)
        } else {
            DevicePtr(self.memory + wire.layout.messages_out).row(node, wire.layout.message_bytes)
        }
    }

    /// Where the count message from `node` arrives.
    #[device]
    pub fn message_in(&self, wire: &Wire, node: u32) -> u64 {
        DevicePtr(self.memory + wire.layout.messages_in).row(node, wire.layout.message_bytes)
    }
}

/// The queue to `node` that channel `channel` uses.
///
/// # Safety
/// The table has an entry for every queue and rank.
#[device]
unsafe fn queue_of(comm: &Comm, wire: &Wire, node: u32, channel: u32) -> (u64, u64) {
    let peer = node * comm.num_ranks + comm.rank;
    let entry = (channel % wire.num_queues) * (wire.num_nodes * comm.num_ranks) + peer;
    let handle = wire.queues.array::<QueueHandle>().at(entry);
    (ld_u64(field!(handle, QueueHandle.queue)), ld_u64(field!(handle, QueueHandle.posted)))
}

/// Has `delivery` take place at `node`, whose path is given: where the peer's wire memory is mapped
/// the bytes are there already, and the counter is released behind them; else the put is posted.
/// Any one lane calls it; stores that happened before the call are visible before the counter.
///
/// # Safety
/// The counter lies in the peer's wire memory and has this rank as its only writer.
#[device]
pub unsafe fn deliver(
    comm: &Comm,
    wire: &Wire,
    path: &Path,
    node: u32,
    channel: u32,
    delivery: Delivery,
    operation: Operation,
) -> Posted {
    if path.peer != 0 {
        st_release_sys_u64(path.peer + delivery.counter, delivery.value);
        return Posted::NONE;
    }
    post(comm, wire, node, channel, delivery, operation)
}

/// Posts a put on the queue of `channel` to `node`. Any one lane calls it; stores that happened
/// before the call are visible to the proxy.
#[device]
unsafe fn post(
    comm: &Comm,
    wire: &Wire,
    node: u32,
    channel: u32,
    delivery: Delivery,
    operation: Operation,
) -> Posted {
    post_to(comm, queue_of(comm, wire, node, channel), node, delivery, operation)
}

/// The same on a queue of which its memory and the count of what was posted are given; `peer`: whom
/// a wait for its proxy names.
///
/// # Safety
/// The queue's memory is mapped. The position is this caller's alone, and its entry free once the
/// proxy has taken the request that had it before.
#[device]
pub unsafe fn post_to(
    comm: &Comm,
    (queue, posted): (u64, u64),
    peer: u32,
    delivery: Delivery,
    operation: Operation,
) -> Posted {
    let ticket = atom_relaxed_gpu_add_u64(posted, 1) + 1;
    let taken = field!(queue, QueueWords.taken);
    if ticket > RING_ENTRIES && !operation.proxy(comm, peer).at_least(taken, ticket - RING_ENTRIES) {
        return Posted::NONE;
    }
    let slot = (ticket - 1) % RING_ENTRIES;
    let entry = Global::<PutRequest>::new(queue + size_of::<QueueWords>() as u64).at(slot);
    st_u64(field!(entry, PutRequest.from), delivery.from);
    st_u64(field!(entry, PutRequest.to), delivery.to);
    st_u64(field!(entry, PutRequest.bytes), delivery.bytes);
    st_u64(field!(entry, PutRequest.counter), delivery.counter);
    st_u64(field!(entry, PutRequest.value), delivery.value);
    st_release_sys_u64(field!(entry, PutRequest.ticket), ticket);
    Posted { queue, ticket }
}

/// Waits until the bytes of a put have left: the memory that they came from may be written again.
///
/// # Safety
/// The queue's memory is mapped.
#[device]
pub unsafe fn wait_quiet(comm: &Comm, node: u32, posted: Posted, operation: Operation) {
    if posted.ticket != 0 {
        let completed = field!(posted.queue, QueueWords.completed);
        operation.proxy(comm, node).at_least(completed, posted.ticket);
    }
}

/// Publishes to every other node that this rank has entered the operation. One warp calls it; lane n
/// publishes to node n.
///
/// # Safety
/// The word at the peer has this rank as its only writer, through queue 0 if not by a store.
#[device]
pub unsafe fn tell_nodes_ready(comm: &Comm, wire: &Wire, operation: Operation) {
    let node = laneid();
    if node < wire.num_nodes && node != wire.node && operation.ready != NO_READY {
        let counter = node_word(wire.layout.ready, wire.node);
        let delivery = Delivery { from: 0, to: 0, bytes: 0, counter, value: operation.ready };
        deliver(comm, wire, &Path::to(wire, node), node, 0, delivery, operation);
    }
}

/// Waits until every rank of this node has entered the operation. With `of_node`, also until every
/// node has whose wire memory is mapped: from then on the block's workers write there. All threads
/// call it, of two warps or more. False when a wait of this rank has expired, or a call differs;
/// the same in all lanes of a warp.
///
/// # Safety
/// The words are in this rank's own memory. The barrier passes on what the polling lanes acquired.
#[device]
pub unsafe fn wait_mapped_ready(
    comm: &Comm,
    wire: &Wire,
    operation: Operation,
    of_rank: Wait,
    of_node: Option<Wait>,
) -> bool {
    let (warp, lane) = (tid() / 32, laneid());
    let Operation { epoch, ready, .. } = operation;
    if warp == 0 && lane < comm.num_ranks {
        let word = pool_of(comm, comm.rank) + ready_offset(lane);
        wait_entered(comm, word, ready, lane, epoch, of_rank);
    }
    if let Some(of_node) = of_node
        && warp == 1
        && lane < wire.num_nodes
        && lane != wire.node
    {
        let path = Path::to(wire, lane);
        if path.peer != 0 {
            wait_node_entered(comm, wire, &path, lane, operation, of_node);
        }
    }
    barrier_sync();
    trace(comm, Phase::Ready);
    !warp_aborted(comm)
}

/// Waits until `node`, whose path is given, has entered the operation.
///
/// # Safety
/// The words are in this rank's wire memory. The `counts` word shows whether the node is in a count
/// exchange.
#[device]
unsafe fn wait_node_entered(
    comm: &Comm,
    wire: &Wire,
    path: &Path,
    node: u32,
    operation: Operation,
    what: Wait,
) {
    let word = path.memory + node_word(wire.layout.ready, node);
    let counting = path.memory + node_word(wire.layout.counts, node);
    let Operation { epoch, ready, .. } = operation;
    // A node does not need this rank to end an operation, so that it may have entered the next
    // one. Then it has been here too, and found the calls the same.
    let has_passed = |entered| entered == (epoch + 1) & READY_EPOCHS;
    let is_counting = || ld_relaxed_sys_u64(counting) == epoch;
    let other = PeerWait::new(comm, node, epoch, Wait::OtherNodeCall);
    wait_entered_or(PeerWait::new(comm, node, epoch, what), word, ready, other, has_passed, is_counting);
}

/// Lane n waits until node n has entered the operation. One warp calls it. False, in all lanes,
/// when a wait of this rank has expired, or a call differs.
///
/// # Safety
/// The words are in this rank's wire memory.
#[device]
pub unsafe fn wait_node_ready(comm: &Comm, wire: &Wire, operation: Operation, what: Wait) -> bool {
    let node = laneid();
    if node < wire.num_nodes && node != wire.node {
        wait_node_entered(comm, wire, &Path::to(wire, node), node, operation, what);
    }
    syncwarp();
    !warp_aborted(comm)
}

/// Whether a wait of this rank has expired. A warp that waits for others of its block checks it now
/// and then: those may have given up after an expired wait. The whole warp calls it, in each turn
/// of its loop; `turns` counts them.
#[device]
pub unsafe fn is_in_vain(comm: &Comm, turns: &mut u32) -> bool {
    *turns += 1;
    turns.is_multiple_of(64) && warp_aborted(comm)
}

/// Offset of a node's word in an array of control words that starts at `base`.
#[device]
pub fn node_word(base: u64, node: u32) -> u64 {
    Global::<ControlWord>::new(base).at(node)
}

/// Offset in wire memory of the arrival word of a node's channel.
#[device]
pub fn arrival_word(wire: &Wire, node: u32, channel: u32) -> u64 {
    Global::<u64>::new(wire.layout.arrived).at(node * MAX_CHANNELS + channel)
}

/// The value of an arrival word when `rows` rows have come.
#[device]
pub fn arrival(epoch: u64, rows: u32) -> u64 {
    epoch << ARRIVAL_SHIFT | rows as u64
}

/// How many rows have come so far, by the arrival word at this address. The load acquires: rows
/// that have come are visible to this lane.
///
/// # Safety
/// The word is in this rank's wire memory.
#[device]
pub unsafe fn rows_arrived(word: u64, epoch: u64) -> u32 {
    let seen = ld_acquire_sys_u64(word);
    if seen >> ARRIVAL_SHIFT == epoch { (seen & ((1 << ARRIVAL_SHIFT) - 1)) as u32 } else { 0 }
}

/// Where a channel begins and how many rows it has, from an inclusive prefix matrix
/// `[.., channels]`: the entry of `row`.
///
/// # Safety
/// The entry lies inside the matrix.
#[device]
pub unsafe fn channel_rows(prefix: u64, channels: u32, row: u32, channel: u32) -> (u32, u32) {
    let entry = Global::<u32>::new(prefix).at(row * channels + channel);
    let begin = if channel == 0 { 0 } else { ld_u32(entry - 4) };
    (begin, ld_u32(entry) - begin)
}
