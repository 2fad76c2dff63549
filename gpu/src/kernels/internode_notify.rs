//! The count exchange across nodes. `internode_count` numbers this rank's tokens; `internode_notify` sends each node what
//! it must know of them, hands what comes from other nodes to the ranks of this one, and derives where rows go.
//!
//! A count message goes to the rank with the same index on the other node, which relays to each rank of its node what
//! concerns it. All ranks end up with the tokens of every rank for every rank, hence with the same verdict: either all
//! ranks move rows or none does.

use core::mem::offset_of;

use epoxide_macros::kernel;

use super::epoch::{Phase, aborted, current_epoch, send_packet_at, trace, wait_at_least, wait_packet_at};
use super::notify::write_header;
use super::wire::{Operation, Posted, Put, channel_range, node_word, post, wait_quiet};
#[cfg(not(target_arch = "nvptx64"))]
use super::{Call, ContractError, Kernel, KernelInfo, ParamLayout};
use crate::layout::{
    InternodeCountArgs, InternodeNotifyArgs, MAX_CHANNELS, MAX_LOCAL_EXPERTS, MAX_NODES, MAX_RANKS,
    MAX_WORLD, PlanHeader, PlanStatus, SEND_ROW_STRIDE, Wait, relay_message, wire_message,
};
use crate::simt::*;

/// Numbers the tokens of each channel, for each rank and each node, in token order. One block per channel.
#[kernel(
    threads = 512, min_blocks = 1, barriers = 0, registers = 64,
    requires(
        args.num_channels >= 1,
        args.num_channels <= MAX_CHANNELS,
        args.ranks_per_node >= 1,
        args.num_ranks.is_multiple_of(args.ranks_per_node),
        args.num_ranks / args.ranks_per_node <= MAX_NODES as u32,
        args.ranks_per_node <= MAX_RANKS as u32,
    )
)]
pub unsafe fn internode_count(args: InternodeCountArgs) {
    let (lane, warp, warps) = (laneid(), tid() / 32, ntid() / 32);
    let (ranks, nodes) = (args.num_ranks, args.num_ranks / args.ranks_per_node);
    let channel = ctaid();
    let (begin, end) = channel_range(args.num_tokens, args.num_channels, channel);
    // A warp takes a column: a rank, or behind the ranks a node.
    let mut column = warp;
    while column < ranks + nodes {
        let (first, width) = if column < ranks {
            (column, 1)
        } else {
            ((column - ranks) * args.ranks_per_node, args.ranks_per_node)
        };
        let (mut group, mut count) = (begin, 0);
        while group < end {
            // Lanes behind the end look at the last token: a branch around the load would come twice, and so would the ballot
            // between its two halves.
            let token = (group + lane).min(end - 1);
            let (mut hit, mut rank) = (0, first);
            while rank < first + width {
                hit |= ld_u8(args.is_token_in_rank.0 + token as u64 * ranks as u64 + rank as u64);
                rank += 1;
            }
            let inside = group + lane < end;
            let hits = ballot((hit != 0) & inside);
            if inside {
                let number = count + (hits & lanemask_lt()).count_ones();
                let number = if hit != 0 { number as i32 } else { -1 };
                let to = if column < ranks {
                    args.send_head.0 + (token as u64 * ranks as u64 + column as u64) * 4
                } else {
                    args.send_rdma_head.0 + (token as u64 * nodes as u64 + (column - ranks) as u64) * 4
                };
                st_i32(to, number);
            }
            count += hits.count_ones();
            group += 32;
        }
        if lane == 0 {
            st_u32(args.channel_counts.0 + (channel * (ranks + nodes) + column) as u64 * 4, count);
        }
        column += warps;
    }
}

/// Repeats a block for each word of a signature, as `unroll8` does.
macro_rules! unroll5 {
    ($n:ident => $body:block) => { unroll5!(@ $n $body 0 1 2 3 4) };
    (@ $n:ident $body:block $($value:literal)*) => { $( { const $n: u32 = $value; $body } )* };
}

/// Threads of the one block of `internode_notify`.
const THREADS: u32 = 1024;

// Shared memory of `internode_notify`, in words.
/// Rows that each rank would receive, `[MAX_WORLD]`.
const RECEIVES: u32 = 0;
/// Tokens from each rank for each rank of this node, then where its block of rows starts there, `[MAX_WORLD][MAX_RANKS]`.
const BASES: u32 = RECEIVES + MAX_WORLD as u32;
/// Selections of each local expert.
const EXPERTS: u32 = BASES + (MAX_WORLD * MAX_RANKS) as u32;
/// Lowest source whose message does not fit, by warp.
const BAD: u32 = EXPERTS + MAX_LOCAL_EXPERTS;
/// The verdict: status, peer, detail, theirs, ours, rows this rank receives.
const VERDICT: u32 = BAD + THREADS / 32;
/// Non-zero where a wait has expired.
const EXPIRED: u32 = VERDICT + 6;
const WORDS: u32 = EXPIRED + 1;

/// Dynamic shared memory of internode_notify, in bytes.
pub const INTERNODE_NOTIFY_SHARED_BYTES: u32 = WORDS * 4;

/// Nobody's number.
const NONE: u32 = u32::MAX;

/// Exchanges counts across nodes and plans where rows go. One block.
#[kernel(
    threads = 1024, min_blocks = 1, barriers = 8, registers = 64,
    requires(
        args.num_channels >= 1,
        args.num_channels <= MAX_CHANNELS,
        args.wire.num_nodes >= 2,
        args.wire.num_nodes <= MAX_NODES as u32,
        args.comm.num_ranks >= 1,
        args.comm.num_ranks <= MAX_RANKS as u32,
        args.wire.num_queues >= 1,
        args.local_experts >= 1,
        args.local_experts <= MAX_LOCAL_EXPERTS,
        args.expert_alignment >= 1,
        args.row_bytes.is_multiple_of(16),
    )
)]
pub unsafe fn internode_notify(args: InternodeNotifyArgs) {
    let (comm, wire) = (&args.comm, &args.wire);
    let (thread, lane, warp) = (tid(), laneid(), tid() / 32);
    let (nodes, per_node, channels) = (wire.num_nodes, comm.num_ranks, args.num_channels);
    let ranks = nodes * per_node;
    let local_experts = args.local_experts;
    trace(comm, Phase::Enter);
    let epoch = current_epoch(comm);
    let operation = Operation { epoch, queue: Wait::NotifyQueue };
    let shared = dynamic_shared();
    let word = |index: u32| shared + index * 4;

    let mut i = thread;
    while i < WORDS {
        st_shared_u32(word(i), 0);
        i += THREADS;
    }
    let out = |node: u32| wire.memory.0 + wire.layout.messages_out + node as u64 * wire.layout.message_bytes;
    let incoming = |node: u32| {
        // The own node's message does not travel.
        let base = if node == wire.node { wire.layout.messages_out } else { wire.layout.messages_in };
        wire.memory.0 + base + node as u64 * wire.layout.message_bytes
    };

    // Column sums over channels: the sender's prefix matrices, and the bulk of the messages. A thread takes a column.
    let mut column = thread;
    while column < ranks + nodes {
        let mut total = 0;
        let mut channel = 0;
        while channel < channels {
            let start = total;
            total += ld_u32(args.channel_counts.0 + (channel * (ranks + nodes) + column) as u64 * 4);
            let (prefix, node, row) = if column < ranks {
                let at = args.gbl_channel_prefix_matrix.0 + (column * channels + channel) as u64 * 4;
                (at, column / per_node, 1 + column % per_node)
            } else {
                let node = column - ranks;
                (args.rdma_channel_prefix_matrix.0 + (node * channels + channel) as u64 * 4, node, 0)
            };
            st_u32(prefix, total);
            st_u32(out(node) + (wire_message::CHANNEL_STARTS + row * channels + channel) as u64 * 4, start);
            channel += 1;
        }
        let index = if column < ranks {
            wire_message::RANK_COUNTS + column
        } else {
            wire_message::NODE_COUNTS + column - ranks
        };
        let mut node = 0;
        while node < nodes {
            st_u32(out(node) + index as u64 * 4, total);
            node += 1;
        }
        column += THREADS;
    }
    if thread < nodes {
        let message = out(thread);
        st_u32(message, args.row_bytes);
        st_u32(message + 4, args.columns);
        st_u32(message + 8, local_experts * ranks);
        st_u32(message + 12, channels);
        st_u32(message + 16, comm.pool.rows as u32);
        let bad = ld_u64(args.invalid.0) != u64::MAX;
        st_u32(message + wire_message::INVALID as u64 * 4, bad as u32);
    }
    let experts_per_node = per_node * local_experts;
    let mut expert = thread;
    while expert < nodes * experts_per_node {
        let count = ld_u32(args.num_tokens_per_expert.0 + expert as u64 * 4);
        let index = wire_message::EXPERT_COUNTS + expert % experts_per_node;
        st_u32(out(expert / experts_per_node) + index as u64 * 4, count);
        expert += THREADS;
    }
    barrier_sync();

    // Lane n of the first warp sends node n its message and waits for the one from there.
    let mut posted = Posted::NONE;
    if warp == 0 && lane < nodes && lane != wire.node {
        let words = wire_message::EXPERT_COUNTS + experts_per_node;
        let put = Put {
            from: wire.layout.messages_out + lane as u64 * wire.layout.message_bytes,
            to: wire.layout.messages_in + wire.node as u64 * wire.layout.message_bytes,
            bytes: (words as u64 * 4).next_multiple_of(16),
            counter: node_word(wire.layout.counts, wire.node),
            value: epoch,
        };
        posted = post(comm, wire, lane, 0, put, operation);
        let arrived = wire.memory.0 + node_word(wire.layout.counts, lane);
        if !wait_at_least(comm, arrived, epoch, lane, epoch, Wait::NodeCounts) {
            st_shared_u32(word(EXPIRED), 1);
        }
    }
    barrier_sync();
    let relays = ld_shared_u32(word(EXPIRED)) == 0;

    // Relay: of each message the head, and what concerns the rank: the starts of its channels, its experts.
    let head = wire_message::NODE_COUNTS + nodes + ranks;
    let each = head + channels + local_experts;
    let mut item = thread;
    while relays && item < nodes * per_node * each {
        let (pair, field) = (item / each, item % each);
        let (node, rank) = (pair / per_node, pair % per_node);
        // (index in the message, index in what is relayed)
        let (from, to) = if field < wire_message::NODE_COUNTS + nodes {
            (field, field)
        } else if field < head {
            let index = wire_message::RANK_COUNTS + field - wire_message::NODE_COUNTS - nodes;
            (index, index)
        } else if field < head + channels {
            let channel = field - head;
            let from = wire_message::CHANNEL_STARTS + (1 + rank) * channels + channel;
            (from, relay_message::CHANNEL_STARTS + channel)
        } else {
            let expert = field - head - channels;
            let from = wire_message::EXPERT_COUNTS + rank * local_experts + expert;
            (from, relay_message::EXPERT_COUNTS + expert)
        };
        let value = ld_u32(incoming(node) + from as u64 * 4);
        let source = node * per_node + comm.rank;
        send_packet_at(comm, rank, relay_offset(source, to), value, epoch);
        item += THREADS;
    }

    // Everybody's heads. First the words that must agree: a thread takes a source.
    let mut bad = NONE;
    let mut source = thread;
    let (mut status, mut detail, mut theirs, mut ours) = (0, 0, 0, 0);
    if source < ranks {
        unroll5!(INDEX => {
            let own = match INDEX {
                0 => args.row_bytes,
                1 => args.columns,
                2 => local_experts * ranks,
                3 => channels,
                _ => comm.pool.rows as u32,
            };
            match packet(&args, source, wire_message::SIGNATURE + INDEX, epoch) {
                Some(value) if value != own && status == 0 => {
                    (status, detail, theirs, ours) = (PlanStatus::Mismatch as u32, INDEX, value, own);
                }
                Some(_) => {}
                None => st_shared_u32(word(EXPIRED), 1),
            }
        });
        match packet(&args, source, wire_message::INVALID, epoch) {
            Some(value) if value != 0 && status == 0 => status = PlanStatus::InvalidExpert as u32,
            Some(_) => {}
            None => st_shared_u32(word(EXPIRED), 1),
        }
        let mut node = 0;
        while node < nodes {
            match packet(&args, source, wire_message::NODE_COUNTS + node, epoch) {
                Some(value) if value as u64 > wire.layout.slots && status == 0 => {
                    (status, detail) = (PlanStatus::Slots as u32, value);
                }
                Some(_) => {}
                None => st_shared_u32(word(EXPIRED), 1),
            }
            node += 1;
        }
        if status != 0 {
            bad = source;
        }
    }
    let lowest = redux_min(bad);
    if lane == 0 {
        st_shared_u32(word(BAD + warp), lowest);
    }
    // Then the tokens of every rank for every rank.
    let mut pair = thread;
    while pair < ranks * ranks {
        let rank = pair % ranks;
        source = pair / ranks;
        match packet(&args, source, wire_message::RANK_COUNTS + rank, epoch) {
            Some(value) => {
                red_relaxed_cta_shared_add_u32(word(RECEIVES + rank), value);
                if rank / per_node == wire.node {
                    st_shared_u32(word(BASES + source * MAX_RANKS as u32 + rank % per_node), value);
                }
            }
            None => st_shared_u32(word(EXPIRED), 1),
        }
        pair += THREADS;
    }
    barrier_sync();
    trace(comm, Phase::Ready);

    // The verdict: of the lowest source that does not fit, else of the lowest rank whose pool is too small.
    let first_bad = redux_min(ld_shared_u32(word(BAD + lane)));
    if bad != NONE && bad == first_bad {
        st_shared_u32(word(VERDICT), status);
        st_shared_u32(word(VERDICT + 1), bad);
        st_shared_u32(word(VERDICT + 2), detail);
        st_shared_u32(word(VERDICT + 3), theirs);
        st_shared_u32(word(VERDICT + 4), ours);
    }
    let mut over = NONE;
    if thread < ranks && ld_shared_u32(word(RECEIVES + thread)) as u64 > comm.pool.rows {
        over = thread;
    }
    let lowest = redux_min(over);
    barrier_sync();
    if lane == 0 {
        st_shared_u32(word(BAD + warp), lowest);
    }
    // Where each source's block of rows starts in each rank of this node.
    if thread < per_node {
        let (mut total, mut source) = (0, 0);
        while source < ranks {
            let at = word(BASES + source * MAX_RANKS as u32 + thread);
            let count = ld_shared_u32(at);
            st_shared_u32(at, total);
            total += count;
            if thread == comm.rank {
                st_u32(args.recv_gbl_rank_prefix_sum.0 + source as u64 * 4, total);
            }
            source += 1;
        }
        if thread == comm.rank {
            st_shared_u32(word(VERDICT + 5), total);
        }
    }
    barrier_sync();
    let first_over = redux_min(ld_shared_u32(word(BAD + lane)));
    if thread == 0 {
        // A source that does not fit has said so above.
        if ld_shared_u32(word(EXPIRED)) != 0 {
            st_shared_u32(word(VERDICT), PlanStatus::Timeout as u32);
        } else if first_bad == NONE && first_over != NONE {
            st_shared_u32(word(VERDICT), PlanStatus::Capacity as u32);
            st_shared_u32(word(VERDICT + 1), first_over);
            st_shared_u32(word(VERDICT + 2), ld_shared_u32(word(RECEIVES + first_over)));
        } else if first_bad == NONE {
            st_shared_u32(word(VERDICT), PlanStatus::Ready as u32);
        }
    }
    barrier_sync();
    let mut status = ld_shared_u32(word(VERDICT));
    // Ranks that disagree on channels or experts would wait for packets that never come.
    let agreed = status == PlanStatus::Ready as u32 || status == PlanStatus::Capacity as u32;

    // What the forwarder goes by: how many tokens of each node it relays, and where their rows go.
    let relayed = |node: u32| ld_u32(incoming(node) + (wire_message::NODE_COUNTS + wire.node) as u64 * 4);
    let mut item = thread;
    while agreed && item < nodes * channels {
        let (node, channel) = (item / channels, item % channels);
        let starts = incoming(node) + wire_message::CHANNEL_STARTS as u64 * 4;
        let next =
            if channel + 1 < channels { ld_u32(starts + (channel + 1) as u64 * 4) } else { relayed(node) };
        st_u32(args.recv_rdma_channel_prefix_matrix.0 + item as u64 * 4, next);
        let source = node * per_node + comm.rank;
        let mut rank = 0;
        while rank < per_node {
            let base = ld_shared_u32(word(BASES + source * MAX_RANKS as u32 + rank));
            let start = ld_u32(starts + ((1 + rank) * channels + channel) as u64 * 4);
            st_u32(args.forward_start.0 + (item * SEND_ROW_STRIDE + rank) as u64 * 4, base + start);
            rank += 1;
        }
        item += THREADS;
    }
    let mut relayed_total = 0;
    if thread == 0 && agreed {
        let mut node = 0;
        while node < nodes {
            relayed_total += relayed(node);
            st_u32(args.recv_rdma_rank_prefix_sum.0 + node as u64 * 4, relayed_total);
            node += 1;
        }
    }

    // What the receiver is told: where each source's channels start, and how many selections its experts have.
    let mut item = thread;
    while agreed && item < ranks * channels {
        let (source, channel) = (item / channels, item % channels);
        if let Some(start) = packet(&args, source, relay_message::CHANNEL_STARTS + channel, epoch) {
            let base = ld_shared_u32(word(BASES + source * MAX_RANKS as u32 + comm.rank));
            st_u32(args.recv_gbl_channel_prefix_matrix.0 + item as u64 * 4, base + start);
        }
        item += THREADS;
    }
    let mut item = thread;
    while agreed && item < ranks * local_experts {
        let (source, expert) = (item / local_experts, item % local_experts);
        if let Some(count) = packet(&args, source, relay_message::EXPERT_COUNTS + expert, epoch) {
            red_relaxed_cta_shared_add_u32(word(EXPERTS + expert), count);
        }
        item += THREADS;
    }
    barrier_sync();
    let mut expert = thread;
    while agreed && expert < local_experts {
        let count = ld_shared_u32(word(EXPERTS + expert));
        let aligned = count.div_ceil(args.expert_alignment) * args.expert_alignment;
        st_u32(args.num_recv_tokens_per_expert.0 + expert as u64 * 4, aligned);
        if !args.host.is_null() {
            st_u32(args.host.0 + size_of::<PlanHeader>() as u64 + expert as u64 * 4, aligned);
        }
        expert += THREADS;
    }
    trace(comm, Phase::Moved);
    // The next message must not be written over one that is still being read.
    if warp == 0 && lane < nodes && lane != wire.node {
        wait_quiet(comm, lane, posted, operation);
    }
    barrier_sync();
    if thread == 0 {
        if aborted(comm) {
            status = PlanStatus::Timeout as u32;
        }
        let value = |index: u32| ld_shared_u32(word(VERDICT + index));
        let header = |to: u64| {
            write_header(to, status, value(5), value(1), value(2), value(3), value(4));
            st_u32(to + offset_of!(PlanHeader, num_rdma_recv_tokens) as u64, relayed_total);
        };
        header(args.header.0);
        if !args.host.is_null() {
            header(args.host.0);
            st_release_sys_u64(args.host.0 + offset_of!(PlanHeader, tag) as u64, args.tag);
        }
    }
    trace(comm, Phase::Done);
}

/// Offset of a packet from the start of the messages in the pool.
#[inline(always)]
fn relay_offset(source: u32, word: u32) -> u64 {
    (source as u64 * relay_message::WORDS as u64 + word as u64) * 8
}

/// Waits for a packet of the message from rank `source`.
#[inline(always)]
unsafe fn packet(args: &InternodeNotifyArgs, source: u32, word: u32, epoch: u64) -> Option<u32> {
    // SAFETY: the packet is inside the own pool.
    unsafe { wait_packet_at(&args.comm, relay_offset(source, word), source, epoch, Wait::RelayedCounts) }
}
