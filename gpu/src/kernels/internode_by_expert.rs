//! Rows by expert across nodes: where each selection's row goes, in the segment of its expert.
//!
//! Each receiver lays out its segments as within a node, behind the count exchange. It gives each
//! rank of its node the first rows of the sources that this one relays for. A relayed slot brings
//! each selection's number on its own rank, so that the relaying rank adds the two. The nodes then
//! exchange whether all of their ranks have room: a word to each node, along the rail.
//!
//! Soundness: each entry of an output has one thread. Packets carry data and flag in one atomic
//! word, and each has one writer. The word that a node has judged is released behind its verdict. A
//! barrier of the block stands between the writers and the readers of each word of shared memory.
//! One thread writes the header, behind a barrier. Padding is marked in rows of the own pool that
//! no plan gives to a peer, behind this rank's ready word and before the rows move. Collectives
//! stand where all lanes of a warp arrive.

#[cfg(not(target_arch = "nvptx64"))]
use super::by_expert::PLAN_BY_EXPERT_SHARED_BYTES;
use super::by_expert::{Exchange, answer, lay_out_segments, list_rows};
use super::epoch::{Packets, aborted, current_epoch, pool_of, send_count_at, wait_count_at};
use super::peer_wait::PeerWait;
use super::rail::{Delivery, Operation, Path, deliver, node_word};
use super::verdict::Verdict;
use crate::layout::{
    CROWDED, ExpertPlanArgs, InternodeExpertPlanArgs, JUDGED, NO_READY, PlanHeader, PlanStatus, Wait, Wire,
    expert_message, expert_message_offset, relay_message,
};
use crate::simt::*;

/// Plans where rows by expert go, behind `internode_notify`. Block 0 plans for what comes here,
/// sends the ranks of the node their first rows, and exchanges verdicts with the other nodes. All
/// blocks list what goes to this node, and the first rows of what this rank relays.
#[kernel(
    threads = 512, barriers = 3, registers = 96,
    block >= 32, shared = PLAN_BY_EXPERT_SHARED_BYTES,
    requires(..ExpertPlanArgs(args.plan), ..Wire(args.wire))
)]
pub unsafe fn internode_plan_by_expert(args: InternodeExpertPlanArgs) {
    let plan = &args.plan;
    let comm = &plan.comm;
    let exchange = Across { args: &args, epoch: current_epoch(comm) };
    let epoch = exchange.epoch;
    // The same on every rank, but for one that has given up.
    let counted = Verdict::read(plan.exchange.0);
    if !Verdict::agrees(counted.status) {
        if ctaid() == 0 && tid() == 0 {
            exchange.finish(counted, 0);
        }
        return;
    }
    let mut received = 0;
    if ctaid() == 0 {
        received = lay_out_segments(plan, &exchange);
    }
    list_rows(plan, &exchange);
    exchange.keep_bases();
    if ctaid() != 0 {
        return;
    }
    let verdict = exchange.judge();
    barrier_sync();
    if tid() == 0 {
        let status = if aborted(comm) { PlanStatus::Timeout as u32 } else { verdict.status };
        let verdict = Verdict { status, ..verdict };
        if plan.host.is_null() {
            verdict.report(comm, received, epoch);
        }
        exchange.finish(verdict, received);
    }
}

/// The exchange of first rows within a node, and of verdicts between nodes.
struct Across<'a> {
    args: &'a InternodeExpertPlanArgs,
    epoch: u64,
}

impl Exchange for Across<'_> {
    /// The sender reads the numbers of all entries of a token.
    const NUMBERS_HOLES: bool = true;

    #[device]
    fn sources(&self) -> u32 {
        self.args.wire.num_nodes * self.ranks()
    }

    /// # Safety
    /// The packet is inside the own pool, and `internode_notify` has seen it.
    #[device]
    unsafe fn count(&self, source: u32, expert: u32) -> u32 {
        let word = row_major(source, relay_message::WORDS, relay_message::EXPERT_COUNTS + expert);
        let comm = &self.args.plan.comm;
        wait_count_at::<false>(comm, word * 8, source, self.epoch, Wait::RelayedCounts).unwrap_or(0)
    }

    #[device]
    fn ranks(&self) -> u32 {
        self.args.plan.comm.num_ranks
    }

    #[device]
    fn first_rank(&self) -> u32 {
        self.args.wire.node * self.ranks()
    }

    /// # Safety
    /// The packet is inside the pool of `rank`, and this rank is its only writer.
    #[device]
    unsafe fn send_rows(&self, rank: u32, rows: u32) {
        let comm = &self.args.plan.comm;
        let at = self.offset(self.args.wire.node, comm.rank, expert_message::ROWS);
        send_count_at::<false>(comm, rank, at, rows, self.epoch);
    }

    /// # Safety
    /// The same, of the pool of the rank that relays for `source`.
    #[device]
    unsafe fn send_start(&self, source: u32, expert: u32, row: u32) {
        let comm = &self.args.plan.comm;
        // The kernel's `requires` clauses guarantee it; it spares a trap.
        let per_node = self.ranks().max(1);
        let (node, relay) = (source / per_node, source % per_node);
        let at = self.offset(node, comm.rank, expert_message::STARTS + expert);
        send_count_at::<false>(comm, relay, at, row, self.epoch);
    }

    #[device]
    unsafe fn messages(&self) -> u64 {
        let comm = &self.args.plan.comm;
        pool_of(comm, comm.rank) + comm.pool.messages
    }

    #[device]
    fn start_at(&self, rank: u32, expert: u32) -> u64 {
        self.offset(self.args.wire.node, rank, expert_message::STARTS + expert)
    }

    /// # Safety
    /// The packets are inside the own pool.
    #[device]
    unsafe fn wait_starts(&self, packets: &Packets) -> Option<[u32; Packets::MOST]> {
        packets.wait::<false>(&self.args.plan.comm, self.epoch, Wait::RelayedCounts)
    }
}

impl Across<'_> {
    /// Offset of a packet from rank `receiver` of this node.
    #[device]
    fn offset(&self, source: u32, receiver: u32, word: u32) -> u64 {
        expert_message_offset(self.args.wire.num_nodes, self.ranks(), source, receiver, word)
    }

    /// Waits for a packet from rank `receiver` of this node; `None` where it does not come.
    ///
    /// # Safety
    /// The packet is inside the own pool.
    #[device]
    unsafe fn packet(&self, source: u32, receiver: u32, word: u32) -> Option<u32> {
        let at = self.offset(source, receiver, word);
        // The rank's number among all.
        let rank = self.args.wire.node * self.ranks() + receiver;
        wait_count_at::<false>(&self.args.plan.comm, at, rank, self.epoch, Wait::RelayedCounts)
    }

    /// Copies the first rows of what this rank relays to the table that the dispatch reads.
    ///
    /// # Safety
    /// The table has an entry for each source node and each expert of this node.
    #[device]
    unsafe fn keep_bases(&self) {
        let (experts, per_node) = (self.args.plan.local_experts.max(1), self.ranks().max(1));
        grid_stride!(at in 0..self.sources() * experts => {
            let (message, expert) = (at / experts, at % experts);
            let start =
                self.packet(message / per_node, message % per_node, expert_message::STARTS + expert);
            st_u32(self.args.bases.array::<u32>().at(at), start.unwrap_or(0));
        });
    }

    /// Whether every rank of every node has room: the same verdict on all ranks. The first warp has
    /// it. Lane n serves node n.
    ///
    /// # Safety
    /// Whole warps call it. The words at the peers have this rank as their only writer, by queue 0
    /// if not by a store. The word with the epoch is released, or put, behind the other one.
    #[device]
    unsafe fn judge(&self) -> Verdict {
        let (comm, wire, lane) = (&self.args.plan.comm, &self.args.wire, laneid());
        let mut verdict = Verdict { status: PlanStatus::Ready as u32, ..Verdict::OPEN };
        if tid() >= 32 {
            return verdict;
        }
        let mut rows = 0;
        if lane < comm.num_ranks {
            rows = self.packet(wire.node, lane, expert_message::ROWS).unwrap_or(0);
        }
        let over = ballot(rows as u64 > comm.pool.rows);
        let first = over.trailing_zeros() & 31;
        let its_rows = shfl_u32(rows, first);
        let mut crowded = 0;
        if over != 0 {
            crowded = ((wire.node * comm.num_ranks + first) as u64) << 32 | its_rows as u64;
        }
        if lane < wire.num_nodes && lane != wire.node {
            let operation = Operation { epoch: self.epoch, ready: NO_READY, queue_wait: Wait::NotifyQueue };
            let path = Path::to(wire, lane);
            let ours = node_word(wire.layout.counts, wire.node);
            unroll!(2, PART => {
                let (counter, value) =
                    if PART == 0 { (ours + CROWDED, crowded) } else { (ours + JUDGED, self.epoch) };
                let delivery = Delivery { from: 0, to: 0, bytes: 0, counter, value };
                deliver(comm, wire, &path, lane, 0, delivery, operation);
            });
            let theirs = path.memory + node_word(wire.layout.counts, lane);
            PeerWait::new(comm, lane, self.epoch, Wait::NodeCounts).at_least(theirs + JUDGED, self.epoch);
            crowded = ld_relaxed_sys_u64(theirs + CROWDED);
        }
        let over = ballot((lane < wire.num_nodes) & (crowded != 0));
        let crowded = shfl_u64(crowded, over.trailing_zeros() & 31);
        if over != 0 {
            verdict.status = PlanStatus::Capacity as u32;
            (verdict.peer, verdict.detail) = ((crowded >> 32) as u32, crowded as u32);
        }
        verdict
    }

    /// Writes the plan's header, and publishes it to a host that waits for it. One thread of the
    /// grid calls it.
    ///
    /// # Safety
    /// The headers are live.
    #[device]
    unsafe fn finish(&self, verdict: Verdict, rows: u32) {
        let plan = &self.args.plan;
        let relayed = ld_u32(field!(plan.exchange.0, PlanHeader.num_rdma_recv_tokens));
        st_u32(field!(plan.header.0, PlanHeader.num_rdma_recv_tokens), relayed);
        if !plan.host.is_null() {
            st_u32(field!(plan.host.0, PlanHeader.num_rdma_recv_tokens), relayed);
        }
        answer(plan, verdict, rows, self.epoch);
    }
}
