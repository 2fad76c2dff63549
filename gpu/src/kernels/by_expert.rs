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
//! the readers of each word of shared memory. One thread writes the header, behind a barrier.
//! Padding is marked in rows of the own pool that no plan gives to a peer. It is marked after this
//! rank has published that its rows may be overwritten, and before the rank enters the movement of
//! rows. Collectives stand where all lanes of a warp arrive.

use core::mem::offset_of;

use super::epoch::{aborted, current_epoch, pool_at, send_count, wait_count};
use super::ids::ld_id;
use super::list::entry_at;
use super::segments::sum_upto;
use super::verdict::Verdict;
use crate::layout::{
    Comm, ExpertPlanArgs, MAX_LOCAL_EXPERTS, NumberArgs, PlanHeader, PlanStatus, SEND_LIST_STRIDE, message,
};
use crate::simt::*;

/// Loads of a lane that are in flight together: as many as `unroll!(4, ..)` repeats.
const TOGETHER: u32 = 4;

/// Numbers the selections of each physical expert, in the order of tokens and entries. A warp takes
/// an expert, and stops behind the last of its selections.
#[kernel(threads = 512, registers = 64, dependent, block >= 32)]
pub unsafe fn number_selections(args: NumberArgs) {
    let (lane, warps) = (laneid(), ntid() / 32);
    let entries = args.num_tokens * args.num_topk;
    stride!(expert in tid() / 32 * nctaid() + ctaid()..args.num_experts, nctaid() * warps => {
        let selections = ld_u32(args.num_tokens_per_expert.0 + expert as u64 * 4);
        let (mut first, mut number) = (0, 0);
        while number < selections && first < entries {
            let mut ids = [-1i64; TOGETHER as usize];
            unroll!(4, PART => {
                let entry = first + PART as u32 * 32 + lane;
                if entry < entries {
                    ids[PART] = ld_id(args.topk_idx, args.narrow_ids, entry as u64);
                }
            });
            unroll!(4, PART => {
                let hits = ballot(ids[PART] == expert as i64);
                if ids[PART] == expert as i64 {
                    let entry = first + PART as u32 * 32 + lane;
                    let index = number + (hits & lanemask_lt()).count_ones();
                    st_u32(args.numbers.0 + entry as u64 * 4, index);
                }
                number += hits.count_ones();
            });
            first += TOGETHER * 32;
        }
    });
}

shared! {
    struct PlanShared {
        /// Rows that each local expert's segment takes, then where it begins; behind them, rows of
        /// all segments.
        segments: [u32; MAX_LOCAL_EXPERTS as usize + 1],
    }
}

/// Dynamic shared memory of `plan_by_expert`, in bytes.
pub const PLAN_BY_EXPERT_SHARED_BYTES: u32 = PlanShared::BYTES;

/// Plans where rows by expert go, behind `notify`. Block 0 plans for what comes here and sends the
/// ranks their first rows; all blocks list what goes out.
#[kernel(
    threads = 512, barriers = 3, registers = 64, dependent,
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
    if ctaid() == 0 {
        received = lay_out_segments(&args, &Node { comm: &args.comm, epoch });
    }
    list_rows(&args, epoch);
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
/// Both headers are live.
#[device]
pub unsafe fn answer(args: &ExpertPlanArgs, verdict: Verdict, rows: u32, epoch: u64) {
    verdict.write(args.header.0, rows, epoch);
    if !args.host.is_null() {
        verdict.write(args.host.0, rows, epoch);
        st_release_sys_u64(args.host.0 + offset_of!(PlanHeader, tag) as u64, args.tag);
    }
}

#[device]
fn segments() -> SharedArray<u32, { MAX_LOCAL_EXPERTS as usize + 1 }> {
    PlanShared::dynamic().segments()
}

/// Rows that a segment takes: sums saturate, so that more rows than can be counted are more than
/// there is room for.
#[device]
fn aligned(rows: u32, alignment: u32) -> u32 {
    rows.saturating_add(alignment - 1) & !(alignment - 1)
}

/// Words that a plan of segments reads and publishes: counts of the sources, and first rows for them.
pub trait Exchange {
    /// Ranks whose rows come here.
    fn sources(&self) -> u32;
    /// Rows of `source` for a local expert.
    unsafe fn count(&self, source: u32, expert: u32) -> u32;
    /// Ranks that are sent the rows of all segments.
    fn ranks(&self) -> u32;
    /// Sends `rank` the rows of all segments.
    unsafe fn send_rows(&self, rank: u32, rows: u32);
    /// Publishes the first row of `source` for a local expert.
    unsafe fn send_start(&self, source: u32, expert: u32, row: u32);
}

/// The exchange within a node.
struct Node<'a> {
    comm: &'a Comm,
    epoch: u64,
}

impl Exchange for Node<'_> {
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
    unsafe fn send_rows(&self, rank: u32, rows: u32) {
        send_count::<true>(self.comm, rank, message::EXPERT_ROWS, rows, self.epoch);
    }

    #[device]
    unsafe fn send_start(&self, source: u32, expert: u32, row: u32) {
        send_count::<true>(self.comm, source, message::EXPERT_STARTS + expert, row, self.epoch);
    }
}

/// Plans the segments of the local experts, sends each rank its first rows, and marks what is
/// padding; gives the rows of all segments. All threads of block 0 call it.
///
/// # Safety
/// Tables have an entry for each local expert; rows that are marked lie inside the pool.
#[device]
pub unsafe fn lay_out_segments(args: &ExpertPlanArgs, exchange: &impl Exchange) -> u32 {
    let comm = &args.comm;
    let (thread, lane, experts) = (tid(), laneid(), args.local_experts);
    let (sources, ranks) = (exchange.sources(), exchange.ranks());
    block_stride!(expert in 0..experts => {
        let mut rows = 0u32;
        stride!(source in 0..sources => {
            rows = rows.saturating_add(exchange.count(source, expert));
        });
        st_u32(args.expert_counts.0 + expert as u64 * 4, rows);
        st_shared_u32(segments().at(expert), aligned(rows, args.alignment));
    });
    barrier_sync();
    if thread < 32 {
        // Prefix sums, 32 experts at a time.
        let (mut first, mut before) = (0, 0u32);
        while first < experts {
            let expert = first + lane;
            let rows = if expert < experts { segments().ld(expert) } else { 0 };
            let upto = sum_upto(rows, u32::saturating_add);
            let front = shfl_u32(upto, lane.wrapping_sub(1) & 31);
            let front = before.saturating_add(if lane == 0 { 0 } else { front });
            if expert < experts {
                segments().st(expert, front);
            }
            before = before.saturating_add(shfl_u32(upto, 31));
            first += 32;
        }
        if lane == 0 {
            segments().st(experts, before);
        }
    }
    barrier_sync();
    let total = segments().ld(experts);
    if thread < ranks {
        exchange.send_rows(thread, total);
    }
    block_stride!(expert in 0..experts => {
        let start = segments().ld(expert);
        let mut row = start;
        stride!(source in 0..sources => {
            exchange.send_start(source, expert, row);
            row = row.saturating_add(exchange.count(source, expert));
        });
        st_u32(args.expert_starts.0 + expert as u64 * 4, start);
        st_u32(args.psum_expert.0 + expert as u64 * 4, row);
    });
    if thread == 0 {
        st_u32(args.expert_starts.0 + experts as u64 * 4, total);
        st_u32(args.psum_expert.0 + experts as u64 * 4, total);
    }
    // Padding, a warp to an expert.
    let source_of = pool_at::<true>(comm, comm.rank) + comm.pool.recv_src_idx;
    let mut expert = thread / 32;
    while expert < experts && total as u64 <= comm.pool.rows {
        let rows = ld_u32(args.expert_counts.0 + expert as u64 * 4);
        let mut row = segments().ld(expert) + rows + lane;
        while row < segments().ld(expert + 1) {
            st_u32(source_of + row as u64 * 4, u32::MAX);
            row += 32;
        }
        expert += ntid() / 32;
    }
    total
}

/// Lists where each token's rows go: entry k of a token is its row at the rank of its expert k.
///
/// # Safety
/// A token has a list; ids are those of physical experts, since the plan is ready.
#[device]
unsafe fn list_rows(args: &ExpertPlanArgs, epoch: u64) {
    let experts = at_least_one(args.local_experts);
    grid_stride!(at in 0..args.num_tokens * SEND_LIST_STRIDE => {
        let (token, k) = (at / SEND_LIST_STRIDE, at % SEND_LIST_STRIDE);
        let mut to = -1;
        if k < args.num_topk {
            let entry = token as u64 * args.num_topk as u64 + k as u64;
            let id = ld_id(args.topk_idx, args.narrow_ids, entry);
            if id >= 0 {
                let (rank, local) = (id as u32 / experts, id as u32 % experts);
                let start = wait_count::<true>(&args.comm, rank, message::EXPERT_STARTS + local, epoch);
                if let Some(start) = start {
                    let row = start.wrapping_add(ld_u32(args.numbers.0 + entry * 4));
                    to = (rank as i64) << 32 | row as i64;
                }
            }
        }
        st_i64(entry_at(args.send_row.0, token, k), to);
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
