//! Rows by expert: where each selection's row goes, in the segment of its expert.
//!
//! A row's place is the start of its expert's segment, the rows of earlier ranks there, and the
//! rank's own selections of the expert in front of it, by token and entry. The sender counts its
//! own ([`NumberSelections`]). The receiver adds up the rest, of what the count exchange has
//! brought, and sends each rank the first row of each expert; the sender lists its rows by that
//! ([`PlanByExpert`]).
//!
//! Soundness: each entry of an output has one warp or one thread. Packets carry data and flag in
//! one atomic word, and each has one writer. A barrier of the block stands between the writers and
//! the readers of each word of shared memory, or a barrier of the warp where one warp has them all.
//! Counters in shared memory are added to by atomics, between two barriers. One thread writes the
//! header, behind a barrier. Padding is marked in rows of the own pool that no plan gives to a
//! peer. It is marked after this rank has published that its rows may be overwritten, and before
//! the rank enters the movement of rows. Collectives stand where all lanes of a warp arrive.

use super::epoch::{Packets, aborted, current_epoch, pool_at, send_count, wait_count};
use super::ids::Id;
use super::list::entry_at;
use super::segments::{sum_upto, sum_upto_of_group};
use super::verdict::Verdict;
use crate::layout::{
    Comm, ExpertPlanArgs, MAX_LOCAL_EXPERTS, NumberArgs, PlanHeader, PlanStatus, SEND_LIST_STRIDE, Wait,
    message, message_offset,
};
use crate::simt::*;

/// Loads of a thread that are in flight together where it counts: as many as `unroll!(8, ..)`
/// repeats.
const COUNTED: u32 = 8;
/// The same where it numbers or lists: as many as `unroll!(4, ..)` repeats.
const TOGETHER: u32 = 4;

/// Most experts that are counted at once: a window. Each warp has a counter for each of them.
const WINDOW: u32 = 1024;

/// Dynamic shared memory of a block of `number_selections` with `threads` threads, in bytes.
pub const fn number_shared_bytes(threads: u32, num_experts: u32) -> u32 {
    let window = if num_experts < WINDOW { num_experts } else { WINDOW };
    threads / 32 * window * 4
}

/// The experts that are counted at once.
struct Window {
    /// The first of them.
    first: u32,
    /// Their number.
    experts: u32,
}

/// In place of an expert of the window.
const OUTSIDE: u32 = u32::MAX;

impl Window {
    /// The number of expert `id` in the window; [`OUTSIDE`] where the window does not have it.
    #[device]
    fn find(&self, id: i64) -> u32 {
        let at = id.wrapping_sub(self.first as i64) as u64;
        if at < self.experts as u64 { at as u32 } else { OUTSIDE }
    }

    /// Adds 1 to the counter of each selected expert, in the entries `first`, `first + step` and so
    /// on in front of `end`. `counters`: where those of the window are in shared memory.
    ///
    /// # Safety
    /// Entries in front of `end` are live. The counters are added to by atomics alone.
    #[device]
    unsafe fn count(&self, args: &NumberArgs, first: u32, step: u32, end: u32, counters: u32) {
        stride!(group in first..end, COUNTED * step => {
            let mut ids = [Id::NONE; COUNTED as usize];
            unroll!(8, PART => {
                let entry = (group + PART as u32 * step).min(end - 1);
                ids[PART] = Id::load(args.topk_idx, args.narrow_ids, entry as u64);
            });
            unroll!(8, PART => {
                let expert = self.find(ids[PART].value(args.narrow_ids));
                if (expert != OUTSIDE) & (group + (PART as u32) * step < end) {
                    red_relaxed_cta_shared_add_u32(counters + expert * 4, 1);
                }
            });
        });
    }

    /// Numbers the selections of the entries from `from` to `end`, which are the warp's own, in
    /// their order. `counters`: where the window's are in shared memory, each with the selections
    /// of the expert in front of `from`. The whole warp calls it.
    ///
    /// # Safety
    /// The entries are live, and no other warp uses the counters.
    #[device]
    unsafe fn number(&self, args: &NumberArgs, from: u32, end: u32, counters: u32) {
        let lane = laneid();
        stride!(group in from..end, TOGETHER * 32 => {
            let mut ids = [Id::NONE; TOGETHER as usize];
            unroll!(4, PART => {
                let entry = (group + PART as u32 * 32 + lane).min(end - 1);
                ids[PART] = Id::load(args.topk_idx, args.narrow_ids, entry as u64);
            });
            let (mut experts, mut alike) = ([OUTSIDE; TOGETHER as usize], [0; TOGETHER as usize]);
            unroll!(4, PART => {
                let expert = self.find(ids[PART].value(args.narrow_ids));
                let is_there = group + PART as u32 * 32 + lane < end;
                experts[PART] = if is_there { expert } else { OUTSIDE };
                alike[PART] = match_any(experts[PART]);
            });
            unroll!(4, PART => {
                // Lanes without a selection load some counter.
                let counter = counters + experts[PART].min(self.experts - 1) * 4;
                let number = ld_shared_u32(counter);
                syncwarp();
                if experts[PART] != OUTSIDE {
                    let before = (alike[PART] & lanemask_lt()).count_ones();
                    if before == 0 {
                        st_shared_u32(counter, number + alike[PART].count_ones());
                    }
                    let entry = group + PART as u32 * 32 + lane;
                    st_u32(args.numbers.array::<u32>().at(entry), number + before);
                }
                syncwarp();
            });
        });
    }
}

/// Numbers the selections of each physical expert, in the order of tokens and entries. A block has
/// a range of the entries, and each of its warps a part of the range. The block counts the
/// selections in front of its range by itself, so that no block waits for another.
#[kernel(
    threads = 512, barriers = 4, registers = 64, dependent,
    block >= 32, shared = number_shared_bytes(block, args.num_experts)
)]
pub unsafe fn number_selections(args: NumberArgs) {
    let (thread, warp, warps) = (tid(), tid() / 32, at_least_one(ntid() / 32));
    let entries = args.num_tokens * args.num_topk;
    let of_warp = entries.div_ceil(nctaid()).div_ceil(warps).div_ceil(32) * 32;
    let of_block = of_warp as u64 * warps as u64;
    let begin = (of_block * ctaid() as u64).min(entries as u64) as u32;
    if begin == entries {
        return;
    }
    let from = (begin as u64 + of_warp as u64 * warp as u64).min(entries as u64) as u32;
    let end = from + of_warp.min(entries - from);
    let mut first = 0;
    while first < args.num_experts {
        let window = Window { first, experts: (args.num_experts - first).min(WINDOW) };
        // Counters of each warp, one row behind the other.
        let counters = |warp: u32| dynamic_shared() + warp * window.experts * 4;
        block_stride!(counter in 0..warps * window.experts => {
            st_shared_u32(counters(0) + counter * 4, 0);
        });
        barrier_sync();
        // Row 0: in front of the block. The row of each other warp: entries of the warp before.
        window.count(&args, thread, ntid(), begin, counters(0));
        if warp + 1 < warps {
            window.count(&args, from + laneid(), 32, end, counters(warp + 1));
        }
        barrier_sync();
        // Sums of the rows up to each warp's: selections in front of the warp's part.
        block_stride!(expert in 0..window.experts => {
            let mut before = 0;
            stride!(warp in 0..warps => {
                let counter = counters(warp) + expert * 4;
                before += ld_shared_u32(counter);
                st_shared_u32(counter, before);
            });
        });
        barrier_sync();
        window.number(&args, from, end, counters(warp));
        barrier_sync();
        first += window.experts;
    }
}

shared! {
    struct PlanShared {
        /// Rows that each local expert's segment takes, then where it begins; behind them, rows of
        /// all segments.
        segments: [u32; MAX_LOCAL_EXPERTS as usize + 1],
        /// Rows of each local expert.
        rows: [u32; MAX_LOCAL_EXPERTS as usize],
    }
}

/// Dynamic shared memory of `plan_by_expert`, in bytes.
pub const PLAN_BY_EXPERT_SHARED_BYTES: u32 = PlanShared::BYTES;

/// Plans where rows by expert go, behind `notify`. Block 0 plans for what comes here and sends the
/// ranks their first rows; all blocks list what goes out.
#[kernel(
    threads = 512, barriers = 3, registers = 96, dependent,
    block >= 32, shared = PLAN_BY_EXPERT_SHARED_BYTES
)]
pub unsafe fn plan_by_expert(args: ExpertPlanArgs) {
    let epoch = current_epoch(&args.comm);
    // The same on every rank, but for one that has given up.
    let exchange = Verdict::read(args.exchange.0);
    if !Verdict::agrees(exchange.status) {
        if ctaid() == 0 && tid() == 0 {
            answer(&args, exchange, 0, epoch);
        }
        return;
    }
    let mut received = 0;
    let node = Node { comm: &args.comm, epoch };
    if ctaid() == 0 {
        received = lay_out_segments(&args, &node);
    }
    list_rows(&args, &node);
    if ctaid() != 0 {
        return;
    }
    let verdict = judge(&args, epoch);
    barrier_sync();
    if tid() == 0 {
        let verdict = Verdict {
            status: if aborted(&args.comm) { PlanStatus::Timeout as u32 } else { verdict.status },
            ..verdict
        };
        if args.host.is_null() {
            verdict.report(&args.comm, received, epoch);
        }
        answer(&args, verdict, received, epoch);
    }
}

/// Writes the plan's header, and publishes it to a host that waits for it. One thread of the grid
/// calls it.
///
/// # Safety
/// Both headers and the counts are live; a barrier is behind all counts that others wrote.
#[device]
pub unsafe fn answer(args: &ExpertPlanArgs, verdict: Verdict, rows: u32, epoch: u64) {
    verdict.clear_unless_ready(args.num_recv_tokens_per_expert, args.local_experts);
    let (counts, experts) = (args.expert_counts.array::<u32>(), args.local_experts);
    let (starts, psum) = (args.expert_starts.array::<u32>(), args.psum_expert.array::<u32>());
    stride!(at in 0..if verdict.is_ready() { 0 } else { experts + 1 } => {
        counts.st(at.min(experts - 1), 0);
        starts.st(at, 0);
        psum.st(at, 0);
    });
    verdict.write(args.header.0, rows, epoch);
    if !args.host.is_null() {
        verdict.write(args.host.0, rows, epoch);
        st_release_sys_u64(field!(args.host.0, PlanHeader.tag), args.tag);
    }
}

/// Rows that a segment takes: sums saturate, so that more rows than can be counted are more than
/// there is room for.
#[device]
fn aligned(rows: u32, alignment: u32) -> u32 {
    rows.saturating_add(alignment - 1) & !(alignment - 1)
}

/// Words that a plan reads and publishes: counts of the sources, and first rows for them and from
/// the ranks of this node.
pub trait Exchange {
    /// Whether entries without a selection get the number 0.
    const NUMBERS_HOLES: bool;
    /// Ranks whose rows come here.
    fn sources(&self) -> u32;
    /// Rows of `source` for a local expert.
    unsafe fn count(&self, source: u32, expert: u32) -> u32;
    /// Ranks of this node: they are sent the rows of all segments.
    fn ranks(&self) -> u32;
    /// The number of the first of them among all ranks.
    fn first_rank(&self) -> u32;
    /// Sends `rank` the rows of all segments.
    unsafe fn send_rows(&self, rank: u32, rows: u32);
    /// Publishes the first row of `source` for a local expert.
    unsafe fn send_start(&self, source: u32, expert: u32, row: u32);
    /// The address of the messages in the own pool.
    unsafe fn messages(&self) -> u64;
    /// Offset there of the packet with this rank's first row for an expert of `rank` of this node.
    fn start_at(&self, rank: u32, expert: u32) -> u64;
    /// Waits for such packets together; `None` where one does not come.
    unsafe fn wait_starts(&self, packets: &Packets) -> Option<[u32; Packets::MOST]>;
}

/// The exchange within a node.
struct Node<'a> {
    comm: &'a Comm,
    epoch: u64,
}

impl Exchange for Node<'_> {
    const NUMBERS_HOLES: bool = false;

    #[device]
    fn sources(&self) -> u32 {
        self.comm.num_ranks
    }

    #[device]
    unsafe fn count(&self, source: u32, expert: u32) -> u32 {
        wait_count::<true>(self.comm, source, message::EXPERT_COUNTS + expert, self.epoch).unwrap_or(0)
    }

    #[device]
    fn ranks(&self) -> u32 {
        self.comm.num_ranks
    }

    #[device]
    fn first_rank(&self) -> u32 {
        0
    }

    #[device]
    unsafe fn send_rows(&self, rank: u32, rows: u32) {
        send_count::<true>(self.comm, rank, message::EXPERT_ROWS, rows, self.epoch);
    }

    #[device]
    unsafe fn send_start(&self, source: u32, expert: u32, row: u32) {
        send_count::<true>(self.comm, source, message::EXPERT_STARTS + expert, row, self.epoch);
    }

    #[device]
    unsafe fn messages(&self) -> u64 {
        pool_at::<true>(self.comm, self.comm.rank) + self.comm.pool.messages
    }

    #[device]
    fn start_at(&self, rank: u32, expert: u32) -> u64 {
        message_offset(rank, message::EXPERT_STARTS + expert)
    }

    #[device]
    unsafe fn wait_starts(&self, packets: &Packets) -> Option<[u32; Packets::MOST]> {
        packets.wait::<true>(self.comm, self.epoch, Wait::Counts)
    }
}

/// Plans the segments of the local experts, sends each rank its first rows, and marks what is
/// padding; gives the rows of all segments. All threads of block 0 call it.
///
/// Counts come from a source to a lane, and an expert has as many lanes as there are sources, up to
/// a warp. So their loads are in flight together.
///
/// # Safety
/// Tables have an entry for each local expert; rows that are marked lie inside the pool.
#[device]
pub unsafe fn lay_out_segments(args: &ExpertPlanArgs, exchange: &impl Exchange) -> u32 {
    let comm = &args.comm;
    let (thread, lane, experts) = (tid(), laneid(), args.local_experts);
    let (segments, rows_of) = (PlanShared::dynamic().segments(), PlanShared::dynamic().rows());
    let (sources, ranks) = (exchange.sources(), exchange.ranks());
    let log2_lanes = (u32::BITS - sources.saturating_sub(1).leading_zeros()).min(5);
    let lanes = 1 << log2_lanes;
    let (group, groups) = (thread >> log2_lanes, ntid() >> log2_lanes);
    let (of_group, last) = (lane & (lanes - 1), lane | (lanes - 1));
    stride!(first in 0..experts, groups => {
        let expert = first + group;
        let mut rows = 0u32;
        if expert < experts {
            stride!(source in of_group..sources, lanes => {
                rows = rows.saturating_add(exchange.count(source, expert));
            });
        }
        let rows = sum_upto_of_group(lanes, rows, u32::saturating_add);
        if (expert < experts) & (lane == last) {
            args.expert_counts.array::<u32>().st(expert, rows);
            rows_of.st(expert, rows);
            segments.st(expert, aligned(rows, args.alignment));
        }
    });
    barrier_sync();
    if thread < 32 {
        // Prefix sums, 32 experts at a time.
        let (mut first, mut before) = (0, 0u32);
        while first < experts {
            let expert = first + lane;
            let rows = if expert < experts { segments.ld(expert) } else { 0 };
            let upto = sum_upto(rows, u32::saturating_add);
            let front = shfl_u32(upto, lane.wrapping_sub(1) & 31);
            let front = before.saturating_add(if lane == 0 { 0 } else { front });
            if expert < experts {
                segments.st(expert, front);
            }
            before = before.saturating_add(shfl_u32(upto, 31));
            first += 32;
        }
        if lane == 0 {
            segments.st(experts, before);
        }
    }
    barrier_sync();
    let total = segments.ld(experts);
    block_stride!(rank in 0..ranks => {
        exchange.send_rows(rank, total);
    });
    stride!(first in 0..experts, groups => {
        let expert = first + group;
        let mut row = if expert < experts { segments.ld(expert) } else { 0 };
        stride!(first in 0..sources, lanes => {
            let source = first + of_group;
            let is_there = (expert < experts) & (source < sources);
            let rows = if is_there { exchange.count(source, expert) } else { 0 };
            let upto = sum_upto_of_group(lanes, rows, u32::saturating_add);
            let front = shfl_u32(upto, lane.wrapping_sub(1) & 31);
            let all = shfl_u32(upto, last);
            if is_there {
                exchange.send_start(source, expert, row.saturating_add(if of_group == 0 { 0 } else { front }));
            }
            row = row.saturating_add(all);
        });
        if (expert < experts) & (of_group == 0) {
            st_u32(args.expert_starts.array::<u32>().at(expert), segments.ld(expert));
            args.psum_expert.array::<u32>().st(expert, row);
        }
    });
    if thread == 0 {
        args.expert_starts.array::<u32>().st(experts, total);
        args.psum_expert.array::<u32>().st(experts, total);
    }
    // Padding, a warp to an expert.
    let source_of = Global::<u32>::new(pool_at::<true>(comm, comm.rank) + comm.pool.recv_src_idx);
    let mut expert = thread / 32;
    while expert < experts && total as u64 <= comm.pool.rows {
        let mut row = segments.ld(expert) + rows_of.ld(expert) + lane;
        while row < segments.ld(expert + 1) {
            source_of.st(row, u32::MAX);
            row += 32;
        }
        expert += ntid() / 32;
    }
    total
}

/// Lists where each token's rows go on this node: entry k of a token is its row at the rank of its
/// expert k, or -1.
///
/// # Safety
/// A token has a list; ids are those of physical experts, since the counts are agreed.
#[device]
pub unsafe fn list_rows<E: Exchange>(args: &ExpertPlanArgs, exchange: &E) {
    let (topk, experts) = (at_least_one(args.num_topk), at_least_one(args.local_experts));
    let (first_rank, ranks) = (exchange.first_rank(), exchange.ranks());
    let messages = exchange.messages();
    grid_stride!(at in 0..args.num_tokens * SEND_LIST_STRIDE => {
        let (token, k) = (at / SEND_LIST_STRIDE, at % SEND_LIST_STRIDE);
        if k >= topk {
            st_i64(entry_at(args.send_row.0, token, k), -1);
        }
    });
    let (entries, step) = (args.num_tokens * topk, nctaid() * ntid());
    stride!(group in ctaid() * ntid() + tid()..entries, TOGETHER * step => {
        let mut ids = [Id::NONE; TOGETHER as usize];
        unroll!(4, PART => {
            let entry = (group + PART as u32 * step).min(entries - 1);
            ids[PART] = Id::load(args.topk_idx, args.narrow_ids, entry as u64);
        });
        let (mut packets, mut at_rank) = (Packets::new(messages), [0; TOGETHER as usize]);
        let mut numbers = [0; TOGETHER as usize];
        unroll!(4, PART => {
            let (entry, id) = (group + PART as u32 * step, ids[PART].value(args.narrow_ids));
            let (global, local) = (id as u32 / experts, id as u32 % experts);
            let rank = global.wrapping_sub(first_rank);
            let goes = (entry < entries) & (id >= 0) & (rank < ranks);
            if goes {
                packets.add::<PART>(messages + exchange.start_at(rank, local), global);
            }
            at_rank[PART] = rank;
            numbers[PART] = ld_i32_if(goes, args.numbers.array::<i32>().at(entry), 0);
            if E::NUMBERS_HOLES && entry < entries && id < 0 {
                args.numbers.array::<u32>().st(entry, 0);
            }
        });
        let starts = exchange.wait_starts(&packets);
        unroll!(4, PART => {
            let entry = group + PART as u32 * step;
            if entry < entries {
                let mut to = -1;
                if let (Some(starts), true) = (starts, packets.has::<PART>()) {
                    let row = starts[PART].wrapping_add(numbers[PART] as u32);
                    to = (at_rank[PART] as i64) << 32 | row as i64;
                }
                st_i64(entry_at(args.send_row.0, entry / topk, entry % topk), to);
            }
        });
    });
}

/// Whether every rank has room, by the counts of all ranks: the same verdict on all of them. The
/// first warp has it.
///
/// # Safety
/// Whole warps call it.
#[device]
unsafe fn judge(args: &ExpertPlanArgs, epoch: u64) -> Verdict {
    let (comm, lane) = (&args.comm, laneid());
    let mut verdict = Verdict { status: PlanStatus::Ready as u32, ..Verdict::OPEN };
    if tid() >= 32 {
        return verdict;
    }
    let mut rows = [0; 2];
    unroll!(2, HALF => {
        let rank = lane + HALF as u32 * 32;
        if rank < comm.num_ranks {
            rows[HALF] = wait_count::<true>(comm, rank, message::EXPERT_ROWS, epoch).unwrap_or(0);
        }
    });
    let over = rows.map(|rows| ballot(rows as u64 > comm.pool.rows));
    unroll!(2, HALF => {
        // The first rank of those, of the first half that has one.
        let first = over[HALF].trailing_zeros() & 31;
        let its_rows = shfl_u32(rows[HALF], first);
        if over[HALF] != 0 && verdict.status == PlanStatus::Ready as u32 {
            verdict.status = PlanStatus::Capacity as u32;
            (verdict.peer, verdict.detail) = (first + HALF as u32 * 32, its_rows);
        }
    });
    verdict
}
