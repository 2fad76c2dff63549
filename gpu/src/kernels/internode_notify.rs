//! The count exchange across nodes. The kernel sends each node the counts of the tokens that
//! `internode_count` has numbered, and relays the counts of other nodes to the ranks of this one.
//! From all of them it plans where rows go.
//!
//! A count message goes to the rank with the same index on the other node, which relays to each
//! rank of its node what concerns it. All ranks end up with the tokens of every rank for every
//! rank, hence with the same verdict: either all ranks move rows or none does.
//!
//! Soundness: messages out are written behind the operation that sent the ones before, and one warp
//! delivers them behind a block barrier. Messages in are read behind their arrival word. Packets
//! carry data and flag in one atomic word. A barrier of the one block stands between the writers
//! and the readers of each word of shared memory, and each entry of an output has one thread.
//! Collectives stand where all lanes of a warp arrive: the conditions around them are the same in
//! all lanes.

use core::mem::offset_of;

use super::epoch::{
    Phase, aborted, current_epoch, is_in_other_call, send_count_at, tell_planning, trace, wait_count_at,
};
use super::peer_wait::PeerWait;
use super::rail::{Delivery, Operation, Path, Posted, deliver, node_word, wait_quiet};
use super::verdict::{Verdict, counts_behind};
use crate::layout::{
    FEW_RANKS, InternodeNotifyArgs, MAX_LOCAL_EXPERTS, MAX_WORLD, NO_READY, PlanHeader, PlanStatus,
    SEND_ROW_STRIDE, Wait, Wire, relay_message, wire_message,
};
use crate::simt::*;

/// Threads of the one block of `internode_notify`.
const THREADS: u32 = 1024;

// Shared memory of `internode_notify`, in words.
/// Rows that each rank would receive, `[MAX_WORLD]`.
const RECEIVES: u32 = 0;
/// Tokens from each rank for each rank of this node, then where its block of rows starts there,
/// `[MAX_WORLD][FEW_RANKS]`.
const BASES: u32 = RECEIVES + MAX_WORLD as u32;
/// Selections of each local expert.
const EXPERTS: u32 = BASES + (MAX_WORLD * FEW_RANKS) as u32;
/// The lowest number that a warp named, by warp.
const LOWEST: u32 = EXPERTS + MAX_LOCAL_EXPERTS;
/// The verdict: status, peer, detail, theirs, ours.
const VERDICT: u32 = LOWEST + THREADS / 32;
/// Non-zero where a wait for a packet has expired.
const EXPIRED: u32 = VERDICT + Verdict::WORDS;
/// Non-zero where a node's message has not come. It is a word of its own. It is not written any
/// more when threads decide by it whether to relay, so that all threads decide the same.
const UNHEARD: u32 = EXPIRED + 1;
const WORDS: u32 = UNHEARD + 1;

/// Dynamic shared memory of internode_notify, in bytes.
pub const INTERNODE_NOTIFY_SHARED_BYTES: u32 = WORDS * 4;

/// Stands for no rank.
const NONE: u32 = u32::MAX;

/// Exchanges counts across nodes and plans where rows go. One block.
#[kernel(
    threads = 1024, barriers = 8, registers = 64,
    grid = 1, block = THREADS, shared = INTERNODE_NOTIFY_SHARED_BYTES,
    requires(..Wire(args.wire))
)]
pub unsafe fn internode_notify(args: InternodeNotifyArgs) {
    let comm = &args.comm;
    trace(comm, Phase::Enter);
    let exchange = Exchange::new(&args);
    if tid() < 32 {
        tell_planning::<false>(comm, exchange.epoch);
    }
    exchange.write_messages();
    barrier_sync();
    let posted = exchange.swap_messages();
    barrier_sync();
    if ld_shared_u32(word(UNHEARD)) == 0 {
        exchange.relay();
    }
    let objection = exchange.read_heads();
    barrier_sync();
    trace(comm, Phase::Ready);

    let (mut status, received) = exchange.judge(&objection);
    let mut relayed = 0;
    if Verdict::agrees(status) {
        relayed = exchange.plan_forwarding();
        exchange.plan_receiving();
    }
    barrier_sync();
    if Verdict::agrees(status) {
        exchange.count_selections();
    }
    trace(comm, Phase::Moved);

    // The next message must not be written over one that is still being read.
    exchange.wait_quiet(posted);
    barrier_sync();
    if tid() == 0 {
        if aborted(comm) {
            status = PlanStatus::Timeout as u32;
        }
        exchange.answer(status, received, relayed);
    }
    trace(comm, Phase::Done);
}

/// The count exchange of one block, in the order of its methods. All threads call each of them.
struct Exchange<'a> {
    args: &'a InternodeNotifyArgs,
    epoch: u64,
    nodes: u32,
    per_node: u32,
    ranks: u32,
    channels: u32,
    local_experts: u32,
}

impl<'a> Exchange<'a> {
    /// Clears shared memory, which is the block's alone.
    ///
    /// # Safety
    /// The host sizes dynamic shared memory for all words.
    #[device]
    unsafe fn new(args: &'a InternodeNotifyArgs) -> Self {
        stride!(i in tid()..WORDS, THREADS => {
            st_shared_u32(dynamic_shared() + i * 4, 0);
        });
        let (nodes, per_node) = (args.wire.num_nodes, args.comm.num_ranks);
        Exchange {
            args,
            epoch: current_epoch(&args.comm),
            nodes,
            per_node,
            ranks: nodes * per_node,
            channels: args.num_channels,
            local_experts: args.local_experts,
        }
    }

    /// Writes the message for each node, and the sender's prefix matrix of nodes.
    ///
    /// # Safety
    /// The matrix is as large as the argument struct documents; messages out are this rank's until
    /// it posts them.
    #[device]
    unsafe fn write_messages(&self) {
        let (args, thread) = (self.args, tid());
        let (ranks, channels) = (self.ranks, self.channels);
        // Sums over channels; a thread takes a column: a rank, or behind the ranks a node.
        stride!(column in thread..ranks + self.nodes, THREADS => {
            let mut total = 0;
            stride!(channel in 0..channels => {
                let start = total;
                let count = channel * (ranks + self.nodes) + column;
                total += args.channel_counts.array::<u32>().ld(count);
                let (node, row) = if column < ranks {
                    (column / self.per_node, 1 + column % self.per_node)
                } else {
                    let matrix = args.rdma_channel_prefix_matrix.array::<u32>();
                    matrix.st((column - ranks) * channels + channel, total);
                    (column - ranks, 0)
                };
                let index = wire_message::CHANNEL_STARTS + row * channels + channel;
                self.outgoing(node).st(index, start);
            });
            let index = if column < ranks {
                wire_message::RANK_COUNTS + column
            } else {
                wire_message::NODE_COUNTS + column - ranks
            };
            stride!(node in 0..self.nodes => {
                self.outgoing(node).st(index, total);
            });
        });
        if thread < self.nodes {
            let message = self.outgoing(thread);
            unroll!(5, INDEX => { st_u32(message.at(INDEX as u32), self.signature(INDEX as u32)) });
            let bad = ld_u64(args.invalid.0) != u64::MAX;
            st_u32(message.at(wire_message::INVALID), bad as u32);
        }
        let experts_per_node = self.per_node * self.local_experts;
        assume(experts_per_node >= 1);
        stride!(expert in thread..self.nodes * experts_per_node, THREADS => {
            let count = args.num_tokens_per_expert.array::<u32>().ld(expert);
            let index = wire_message::EXPERT_COUNTS + expert % experts_per_node;
            self.outgoing(expert / experts_per_node).st(index, count);
        });
    }

    /// Lane n of the first warp sends node n its message and waits for the one from there.
    ///
    /// # Safety
    /// The words at the peers have this rank's queue 0 as their only writer. The barrier before it
    /// publishes the messages to this warp.
    #[device]
    unsafe fn swap_messages(&self) -> Posted {
        let (comm, wire, node) = (&self.args.comm, &self.args.wire, laneid());
        let mut posted = Posted::NONE;
        if self.serves_node() {
            let words = wire_message::EXPERT_COUNTS + self.per_node * self.local_experts;
            let delivery = Delivery {
                from: wire.layout.messages_out + node as u64 * wire.layout.message_bytes,
                to: wire.layout.messages_in + wire.node as u64 * wire.layout.message_bytes,
                bytes: (words as u64 * 4).next_multiple_of(16),
                counter: node_word(wire.layout.counts, wire.node),
                value: self.epoch,
            };
            let path = Path::to(wire, node);
            posted = deliver(comm, wire, &path, node, 0, delivery, self.operation());
            let arrived = path.memory + node_word(wire.layout.counts, node);
            let ready = path.memory + node_word(wire.layout.ready, node);
            let wait = PeerWait::new(comm, node, self.epoch, Wait::NodeCounts);
            let other = PeerWait::new(comm, node, self.epoch, Wait::OtherNodeCall);
            if !wait.at_least_unless(arrived, self.epoch, || is_in_other_call(&other, ready)) {
                st_shared_u32(word(UNHEARD), 1);
            }
        }
        posted
    }

    /// Hands each rank of this node what concerns it of the messages: their heads, where channels
    /// start, its experts.
    ///
    /// # Safety
    /// The messages have come; packets have this rank as their only writer.
    #[device]
    unsafe fn relay(&self) {
        let (channels, per_node) = (self.channels, self.per_node);
        let head = wire_message::NODE_COUNTS + self.nodes + self.ranks;
        let each = head + channels + self.local_experts;
        stride!(item in tid()..self.nodes * per_node * each, THREADS => {
            let (pair, field) = (item / each, item % each);
            let (node, rank) = (pair / per_node, pair % per_node);
            // (index in the message, index in what is relayed)
            let (from, to) = if field < wire_message::NODE_COUNTS + self.nodes {
                (field, field)
            } else if field < head {
                let index = wire_message::RANK_COUNTS + field - wire_message::NODE_COUNTS - self.nodes;
                (index, index)
            } else if field < head + channels {
                let channel = field - head;
                let from = wire_message::CHANNEL_STARTS + (1 + rank) * channels + channel;
                (from, relay_message::CHANNEL_STARTS + channel)
            } else {
                let expert = field - head - channels;
                let from = wire_message::EXPERT_COUNTS + rank * self.local_experts + expert;
                (from, relay_message::EXPERT_COUNTS + expert)
            };
            let value = self.incoming(node).ld(from);
            let to = relay_offset(self.rail(node), to);
            send_count_at::<false>(&self.args.comm, rank, to, value, self.epoch);
        });
    }

    /// Reads the heads of all ranks: whether the words that must agree do, and the tokens of every
    /// rank for every rank.
    ///
    /// # Safety
    /// Packets are inside the own pool.
    #[device]
    unsafe fn read_heads(&self) -> Verdict {
        let (thread, ranks) = (tid(), self.ranks);
        // The kernel's `requires` clauses guarantee it; it spares a trap in the divisions
        // below.
        core::hint::assert_unchecked(ranks >= 1);
        // A thread takes a source.
        let mut objection = Verdict { peer: NONE, ..Verdict::OPEN };
        if thread < ranks {
            unroll!(5, INDEX => {
                let ours = self.signature(INDEX as u32);
                let theirs = self.packet(thread, wire_message::SIGNATURE + INDEX as u32, ours);
                if theirs != ours && objection.status == 0 {
                    let status = PlanStatus::Mismatch as u32;
                    objection = Verdict { peer: thread, status, detail: INDEX as u32, theirs, ours };
                }
            });
            let invalid = self.packet(thread, wire_message::INVALID, 0);
            if invalid != 0 && objection.status == 0 {
                (objection.peer, objection.status) = (thread, PlanStatus::InvalidExpert as u32);
            }
            stride!(node in 0..self.nodes => {
                let count = self.packet(thread, wire_message::NODE_COUNTS + node, 0);
                if count as u64 > self.args.wire.layout.slots && objection.status == 0 {
                    (objection.peer, objection.status) = (thread, PlanStatus::Slots as u32);
                    objection.detail = count;
                }
            });
        }
        self.keep_lowest(objection.peer);
        stride!(pair in thread..ranks * ranks, THREADS => {
            let (source, rank) = (pair / ranks, pair % ranks);
            let count = self.packet(source, wire_message::RANK_COUNTS + rank, 0);
            red_relaxed_cta_shared_add_u32(word(RECEIVES + rank), count);
            if rank / self.per_node == self.args.wire.node {
                st_shared_u32(base_word(source, rank % self.per_node), count);
            }
        });
        objection
    }

    /// The verdict, the same on every rank: of the lowest source that objects, else of the lowest
    /// rank whose pool is too small. With the rows that this rank receives. Turns tokens of a
    /// source for a rank into where its block of rows starts there.
    ///
    /// # Safety
    /// Shared memory is the block's own; barriers are between its writers and readers.
    #[device]
    unsafe fn judge(&self, objection: &Verdict) -> (u32, u32) {
        let (thread, ranks) = (tid(), self.ranks);
        let objector = self.lowest();
        if objection.peer != NONE && objection.peer == objector {
            st_shared_u32(word(VERDICT), objection.status);
            st_shared_u32(word(VERDICT + 1), objector);
            st_shared_u32(word(VERDICT + 2), objection.detail);
            st_shared_u32(word(VERDICT + 3), objection.theirs);
            st_shared_u32(word(VERDICT + 4), objection.ours);
        }
        let mut crowded = NONE;
        if thread < ranks && ld_shared_u32(word(RECEIVES + thread)) as u64 > self.args.comm.pool.rows {
            crowded = thread;
        }
        barrier_sync();
        self.keep_lowest(crowded);
        if thread < self.per_node {
            let mut total = 0;
            stride!(source in 0..ranks => {
                let at = base_word(source, thread);
                let count = ld_shared_u32(at);
                st_shared_u32(at, total);
                total += count;
            });
        }
        barrier_sync();
        let crowded = self.lowest();
        if thread == 0 {
            // A source that objects has stored its verdict above.
            if self.has_expired() {
                st_shared_u32(word(VERDICT), PlanStatus::Timeout as u32);
            } else if objector == NONE && crowded != NONE {
                st_shared_u32(word(VERDICT), PlanStatus::Capacity as u32);
                st_shared_u32(word(VERDICT + 1), crowded);
                st_shared_u32(word(VERDICT + 2), ld_shared_u32(word(RECEIVES + crowded)));
            } else if objector == NONE {
                st_shared_u32(word(VERDICT), PlanStatus::Ready as u32);
            }
        }
        barrier_sync();
        let mine = self.args.wire.node * self.per_node + self.args.comm.rank;
        (ld_shared_u32(word(VERDICT)), ld_shared_u32(word(RECEIVES + mine)))
    }

    /// Writes the forwarder's plan: how many tokens of each node it relays, and where their rows
    /// go. Thread 0 gets the number of all relayed tokens.
    ///
    /// # Safety
    /// The messages have come, from ranks with as many channels.
    #[device]
    unsafe fn plan_forwarding(&self) -> u32 {
        let (args, channels) = (self.args, self.channels);
        let relayed = |node: u32| self.incoming(node).ld(wire_message::NODE_COUNTS + args.wire.node);
        stride!(item in tid()..self.nodes * channels, THREADS => {
            let (node, channel) = (item / channels, item % channels);
            let starts = self.incoming(node).skip(wire_message::CHANNEL_STARTS);
            let mut end = relayed(node);
            if channel + 1 < channels {
                end = starts.ld(channel + 1);
            }
            args.recv_rdma_channel_prefix_matrix.array::<u32>().st(item, end);
            stride!(rank in 0..self.per_node => {
                let base = ld_shared_u32(base_word(self.rail(node), rank));
                let start = starts.ld((1 + rank) * channels + channel);
                let to = args.forward_start.array::<u32>().at(item * SEND_ROW_STRIDE + rank);
                st_u32(to, base + start);
            });
        });
        let mut total = 0;
        if tid() == 0 {
            stride!(node in 0..self.nodes => {
                total += relayed(node);
                args.recv_rdma_rank_prefix_sum.array::<u32>().st(node, total);
            });
        }
        total
    }

    /// Writes the receiver's plan: where each source's channels start, and how many selections its
    /// experts have.
    ///
    /// # Safety
    /// Packets are inside the own pool.
    #[device]
    unsafe fn plan_receiving(&self) {
        stride!(item in tid()..self.ranks * self.channels, THREADS => {
            let (source, channel) = (item / self.channels, item % self.channels);
            let start = self.packet(source, relay_message::CHANNEL_STARTS + channel, 0);
            let base = ld_shared_u32(base_word(source, self.args.comm.rank));
            st_u32(self.args.recv_gbl_channel_prefix_matrix.array::<u32>().at(item), base + start);
        });
        stride!(item in tid()..self.ranks * self.local_experts, THREADS => {
            let (source, expert) = (item / self.local_experts, item % self.local_experts);
            let count = self.packet(source, relay_message::EXPERT_COUNTS + expert, 0);
            red_relaxed_cta_shared_add_u32(word(EXPERTS + expert), count);
        });
    }

    /// Writes the selections of each local expert, rounded up, for the device and for the host.
    ///
    /// # Safety
    /// There is room for every local expert.
    #[device]
    unsafe fn count_selections(&self) {
        let args = self.args;
        stride!(expert in tid()..self.local_experts, THREADS => {
            let count = ld_shared_u32(word(EXPERTS + expert));
            let aligned = count.div_ceil(args.expert_alignment) * args.expert_alignment;
            args.num_recv_tokens_per_expert.array::<u32>().st(expert, aligned);
            if !args.host.is_null() {
                counts_behind(args.host).st(expert, aligned);
            }
        });
    }

    /// Waits until this rank's messages have left.
    ///
    /// # Safety
    /// The put that a lane waits for is its own.
    #[device]
    unsafe fn wait_quiet(&self, posted: Posted) {
        if self.serves_node() {
            wait_quiet(&self.args.comm, laneid(), posted, self.operation());
        }
    }

    /// Writes the header, on the device and last of all for the host. One thread calls it.
    ///
    /// # Safety
    /// Both are live headers; the barrier before it makes them cover what the block wrote.
    #[device]
    unsafe fn answer(&self, status: u32, received: u32, relayed: u32) {
        let args = self.args;
        let word_of = |index: u32| ld_shared_u32(word(VERDICT + index));
        let (peer, detail) = (word_of(1), word_of(2));
        let verdict = Verdict { status, peer, detail, theirs: word_of(3), ours: word_of(4) };
        verdict.clear_unless_ready(args.num_recv_tokens_per_expert, self.local_experts);
        let write = |to: u64| {
            verdict.write(to, received, self.epoch);
            st_u32(to + offset_of!(PlanHeader, num_rdma_recv_tokens) as u64, relayed);
        };
        write(args.header.0);
        if args.host.is_null() {
            verdict.report_exchange(&args.comm, args.columns, received, self.epoch);
        } else {
            write(args.host.0);
            st_release_sys_u64(args.host.0 + offset_of!(PlanHeader, tag) as u64, args.tag);
        }
    }

    /// Word `index` of the signature, which must be the same on every rank.
    #[device]
    fn signature(&self, index: u32) -> u32 {
        match index {
            0 => self.args.row_signature,
            1 => self.args.columns,
            2 => self.local_experts * self.ranks,
            3 => self.channels,
            _ => self.args.comm.pool.rows as u32,
        }
    }

    /// The rank on a node that this one exchanges messages with.
    #[device]
    fn rail(&self, node: u32) -> u32 {
        node * self.per_node + self.args.comm.rank
    }

    /// True for the lane of the first warp that serves another node.
    #[device]
    fn serves_node(&self) -> bool {
        tid() < self.nodes && tid() != self.args.wire.node
    }

    #[device]
    fn operation(&self) -> Operation {
        Operation { epoch: self.epoch, ready: NO_READY, queue_wait: Wait::NotifyQueue }
    }

    /// The message for a node. The own node's is where it is read.
    ///
    /// # Safety
    /// The table has an entry for every node.
    #[device]
    unsafe fn outgoing(&self, node: u32) -> Global<u32> {
        Global::new(Path::to(&self.args.wire, node).message_out(&self.args.wire, node))
    }

    /// The message from a node.
    ///
    /// # Safety
    /// The table has an entry for every node.
    #[device]
    unsafe fn incoming(&self, node: u32) -> Global<u32> {
        Global::new(Path::to(&self.args.wire, node).message_in(&self.args.wire, node))
    }

    /// Waits for a packet of the message from rank `source`; `otherwise` where it does not come,
    /// which is noted.
    ///
    /// # Safety
    /// The packet is inside the own pool.
    #[device]
    unsafe fn packet(&self, source: u32, index: u32, otherwise: u32) -> u32 {
        let offset = relay_offset(source, index);
        match wait_count_at::<false>(&self.args.comm, offset, source, self.epoch, Wait::RelayedCounts) {
            Some(value) => value,
            None => {
                st_shared_u32(word(EXPIRED), 1);
                otherwise
            }
        }
    }

    /// Whether a wait has expired, as far as threads have met since.
    ///
    /// # Safety
    /// The words are in the block's shared memory.
    #[device]
    unsafe fn has_expired(&self) -> bool {
        (ld_shared_u32(word(EXPIRED)) | ld_shared_u32(word(UNHEARD))) != 0
    }

    /// Keeps the lowest of the block's numbers, for [`Self::lowest`] behind a barrier.
    ///
    /// # Safety
    /// Shared memory has a word for each warp.
    #[device]
    unsafe fn keep_lowest(&self, number: u32) {
        let lowest = redux_min(number);
        if laneid() == 0 {
            st_shared_u32(word(LOWEST + tid() / 32), lowest);
        }
    }

    /// # Safety
    /// Shared memory has a word for each warp, as many as a warp has lanes; all threads call it.
    #[device]
    unsafe fn lowest(&self) -> u32 {
        redux_min(ld_shared_u32(word(LOWEST + laneid())))
    }
}

/// Offset of a word in shared memory.
#[device]
fn word(index: u32) -> u32 {
    dynamic_shared() + index * 4
}

/// Offset of the word for a source and a rank of this node.
#[device]
fn base_word(source: u32, rank: u32) -> u32 {
    word(BASES + source * FEW_RANKS as u32 + rank)
}

/// Offset of a packet from the start of the messages in the pool.
#[device]
fn relay_offset(source: u32, word: u32) -> u64 {
    (source as u64 * relay_message::WORDS as u64 + word as u64) * 8
}
