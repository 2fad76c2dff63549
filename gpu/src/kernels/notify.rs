//! Notify: the count exchange. Every rank sends each peer one message of counts; from all of them each rank derives
//! where every one of its tokens' rows goes in every peer's pool, so that nothing is decided while rows move.
//!
//! What makes it sound: packets carry data and flag in one atomic word, and each has one writer. The threads of a block meet at a barrier
//! between the writers and readers of each word of shared memory. Each entry of an output has one thread; the header is written by one,
//! behind a barrier. Collectives stand where all lanes of a warp arrive: what a warp branches on around them is the same in all lanes.

use core::mem::offset_of;

use epoxide_macros::kernel;

use super::epoch::{
    Phase, aborted, current_epoch, send_packet, tell_planning, trace, wait_packet, wait_packets,
};
use super::ring::channel_range;
use super::verdict::Verdict;
use crate::layout::{
    MAX_CHANNELS, MAX_LOCAL_EXPERTS, MAX_RANKS, NotifyArgs, PlanHeader, PlanStatus, SEND_ROW_STRIDE, message,
};
use crate::simt::*;

/// Warp w of a block works for destination rank w, so a block has at least this many warps.
const THREADS: u32 = 512;

/// Packets that every block needs from each source: signature, verdict of the layout, and tokens for each rank. They are
/// neighbours in the message and in shared memory.
const HEAD: u32 = message::RANK_COUNTS + MAX_RANKS as u32;
/// Words of shared memory for the heads of all sources.
const HEADS: u32 = HEAD * MAX_RANKS as u32;

/// Dynamic shared memory of notify, in bytes: the heads; tokens of earlier channels by destination; whether a wait expired.
pub const NOTIFY_SHARED_BYTES: u32 = (HEADS + MAX_RANKS as u32 + 1) * 4;

/// Loads of a thread that are in flight together, where it goes through tokens: as many as `unroll4` repeats.
const TOGETHER: usize = 4;

/// What must agree between ranks, in the order of `SIGNATURE_NAMES`.
#[inline(always)]
fn signature(args: &NotifyArgs) -> [u32; message::INVALID as usize] {
    [args.row_signature, args.columns, args.num_experts, args.num_channels, args.comm.pool.rows as u32]
}

/// Exchanges counts and plans where rows go. One block per channel.
#[kernel(
    threads = 512, min_blocks = 1, barriers = 4, registers = 128,
    requires(
        args.num_channels >= 1,
        args.num_channels <= MAX_CHANNELS,
        args.comm.num_ranks >= 1,
        args.comm.num_ranks <= MAX_RANKS as u32,
        args.num_experts >= args.comm.num_ranks,
        args.num_experts.is_multiple_of(args.comm.num_ranks),
        args.num_experts / args.comm.num_ranks <= MAX_LOCAL_EXPERTS,
        args.expert_alignment >= 1,
    )
)]
pub unsafe fn notify(args: NotifyArgs) {
    let comm = &args.comm;
    let (thread, lane, warp) = (tid(), laneid(), tid() / 32);
    let (ranks, channel) = (comm.num_ranks, ctaid());
    trace(comm, Phase::Enter);
    let shared = dynamic_shared();
    let (heads, earlier, expired) = (shared, shared + HEADS * 4, shared + (HEADS + MAX_RANKS as u32) * 4);
    let head = |source: u32, word: u32| ld_shared_u32(heads + (source * HEAD + word) * 4);
    let count = |source: u32, rank: u32| head(source, message::RANK_COUNTS + rank);
    let local_experts = args.num_experts / ranks;

    // Block 0 sends what the layout already counted, before anything else. All loads are under way together, that of the epoch too.
    let sends = channel == 0;
    let (peer, rank) = (thread / ranks, thread % ranks);
    let tokens = ld_i32_if(sends & (peer < ranks), args.num_tokens_per_rank.0 + rank as u64 * 4, 0);
    let selections = |expert: u32| {
        let at = args.num_tokens_per_expert.0 + expert as u64 * 4;
        ld_i32_if(sends & (expert < args.num_experts), at, 0) as u32
    };
    let (mut expert, mut selected) = (thread, selections(thread));
    let invalid = [0, 4].map(|half| ld_i32_if(sends & (thread < ranks), args.invalid.0 + half, -1));
    let epoch = current_epoch(comm);
    if sends {
        // By a warp that has no packets to send in front of the experts' ones.
        if warp == THREADS / 32 - 1 {
            tell_planning(comm, epoch);
        }
        if peer < ranks {
            send_packet(comm, peer, message::RANK_COUNTS + rank, tokens as u32, epoch);
        }
        if thread < ranks {
            let bad = invalid != [-1, -1];
            send_packet(comm, thread, message::INVALID, bad as u32, epoch);
            let signature = signature(&args);
            unroll8!(WORD => {
                if WORD < signature.len() {
                    let value = signature[WORD % signature.len()];
                    send_packet(comm, thread, message::SIGNATURE + WORD as u32, value, epoch);
                }
            });
        }
        while expert < args.num_experts {
            let word = message::EXPERT_COUNTS + expert % local_experts;
            send_packet(comm, expert / local_experts, word, selected, epoch);
            expert += THREADS;
            selected = selections(expert);
        }
    }

    // Tokens of the channels before this one, by destination. Each block counts for itself: it costs microseconds and
    // spares a wait between blocks.
    if thread <= MAX_RANKS as u32 {
        st_shared_u32(earlier + thread * 4, 0); // and `expired`, which follows
    }
    barrier_sync();
    let (begin, end) = channel_range(args.num_tokens, args.num_channels, channel);
    let mut sums = [0u32; MAX_RANKS];
    let mut token = thread;
    while token < begin {
        // Several tokens a turn, with all their loads in flight together.
        let mut parts = [[0u32; MAX_RANKS]; TOGETHER];
        unroll4!(PART => {
            let mine = token + PART as u32 * THREADS;
            let row = args.is_token_in_rank.0 + mine as u64 * ranks as u64;
            unroll8!(RANK => {
                parts[PART][RANK] = ld_u8_if((mine < begin) & ((RANK as u32) < ranks), row + RANK as u64);
            });
        });
        unroll4!(PART => {
            unroll8!(RANK => { sums[RANK] += parts[PART][RANK] });
        });
        token += TOGETHER as u32 * THREADS;
    }
    // All warp sums before the first branch: behind one, the compiler may give its sides a copy each of the next sum.
    unroll8!(RANK => { sums[RANK] = redux_add(sums[RANK]) });
    unroll8!(RANK => {
        if lane == 0 && sums[RANK] != 0 {
            red_relaxed_cta_shared_add_u32(earlier + RANK as u32 * 4, sums[RANK]);
        }
    });
    barrier_sync();

    // Tell each peer where this channel starts.
    if thread < ranks {
        let start = ld_shared_u32(earlier + thread * 4);
        send_packet(comm, thread, message::CHANNEL_STARTS + channel, start, epoch);
    }

    // Warp w numbers this channel's tokens for rank w, 32 at a time, in token order, while the peers' heads are on their way.
    if warp < ranks {
        let (mut group, mut number) = (begin, 0);
        while group < end {
            let mut wanted = [0u32; TOGETHER];
            unroll4!(PART => {
                let token = group + PART as u32 * 32 + lane;
                let at = args.is_token_in_rank.0 + (token * ranks + warp) as u64;
                wanted[PART] = ld_u8_if(token < end, at);
            });
            unroll4!(PART => {
                let token = group + PART as u32 * 32 + lane;
                let hits = ballot(wanted[PART] != 0);
                let index = number + (hits & lanemask_lt()).count_ones();
                if token < end {
                    let index = if wanted[PART] != 0 { index as i32 } else { -1 };
                    st_i32(args.send_head.0 + (token * ranks + warp) as u64 * 4, index);
                }
                number += hits.count_ones();
            });
            group += TOGETHER as u32 * 32;
        }
        if lane == 0 {
            let entry = warp * args.num_channels + channel;
            let start = ld_shared_u32(earlier + warp * 4);
            st_u32(args.channel_prefix_matrix.0 + entry as u64 * 4, start + number);
        }
    }

    // Collect everybody's heads, one packet a thread.
    if thread < ranks * HEAD {
        let (source, word) = (thread / HEAD, thread % HEAD);
        // A message holds the counts for `ranks` ranks only.
        if word < message::RANK_COUNTS + ranks {
            match wait_packet(comm, source, word, epoch) {
                Some(value) => st_shared_u32(heads + thread * 4, value),
                None => {
                    st_shared_u32(heads + thread * 4, 0);
                    st_shared_u32(expired, 1);
                }
            }
        }
    }
    barrier_sync();
    trace(comm, Phase::Ready);

    // Everybody has the same heads, hence the same verdict: either all ranks move rows or none does.
    // The status is what all threads turn on; the rest of the verdict is for the answer.
    let (mut status, mut verdict) = (PlanStatus::Empty as u32, Verdict::OPEN);
    if ld_shared_u32(expired) != 0 {
        status = PlanStatus::Timeout as u32;
    }
    // Lane r looks whether rank r differs. Only where one does, all look for the first.
    let (mut differs, expected) = (0, signature(&args));
    unroll8!(WORD => {
        if WORD <= message::INVALID as usize {
            let ours = if WORD < expected.len() { expected[WORD % expected.len()] } else { 0 };
            differs |= head(lane.min(ranks - 1), WORD as u32) ^ ours;
        }
    });
    let objections = ballot(differs != 0);
    let mut source = 0;
    while source < ranks && objections != 0 {
        let mut word = 0;
        while status == 0 && word < message::INVALID {
            (verdict.theirs, verdict.ours) = (head(source, word), head(comm.rank, word));
            if verdict.theirs != verdict.ours {
                (status, verdict.peer, verdict.detail) = (PlanStatus::Mismatch as u32, source, word);
            }
            word += 1;
        }
        if status == 0 && head(source, message::INVALID) != 0 {
            (status, verdict.peer) = (PlanStatus::InvalidExpert as u32, source);
        }
        source += 1;
    }
    // Lane r: the rows that rank r receives.
    let (mut total, mut source) = (0, 0);
    while source < ranks && lane < ranks && status != PlanStatus::Timeout as u32 {
        total += count(source, lane);
        if channel == 0 && warp == 0 {
            st_u32(args.rank_prefix_matrix.0 + (source * ranks + lane) as u64 * 4, total);
        }
        source += 1;
    }
    syncwarp();
    let receives = shfl_u32(total, comm.rank);
    let over = ballot(total as u64 > comm.pool.rows);
    let first_over = over.trailing_zeros() & 31; // of any lane, where there is none
    let its_total = shfl_u32(total, first_over);
    if status == 0 && over != 0 {
        (status, verdict.peer, verdict.detail) = (PlanStatus::Capacity as u32, first_over, its_total);
    }
    if status == 0 {
        status = PlanStatus::Ready as u32;
    }

    // Rows follow from the numbers: an entry a thread, always of the same rank.
    let to = thread % SEND_ROW_STRIDE;
    let mut first = 0; // row of this channel's first token for that rank
    if to < ranks {
        first = ld_shared_u32(earlier + to * 4);
        let mut source = 0;
        while source < comm.rank {
            first += count(source, to);
            source += 1;
        }
    }
    let mut token = begin + thread / SEND_ROW_STRIDE;
    while token < end {
        let mut numbers = [0; TOGETHER];
        unroll4!(PART => {
            let token = token + PART as u32 * (THREADS / SEND_ROW_STRIDE);
            let at = args.send_head.0 + (token * ranks + to) as u64 * 4;
            numbers[PART] = ld_i32_if((token < end) & (to < ranks), at, -1);
        });
        unroll4!(PART => {
            let token = token + PART as u32 * (THREADS / SEND_ROW_STRIDE);
            if token < end {
                let row = if numbers[PART] >= 0 { first as i32 + numbers[PART] } else { -1 };
                st_i32(args.send_row.0 + (token * SEND_ROW_STRIDE + to) as u64 * 4, row);
            }
        });
        token += TOGETHER as u32 * (THREADS / SEND_ROW_STRIDE);
    }

    trace(comm, Phase::Moved);

    // Entry 0: where this channel starts at every source. In block 0 the others: how many selections each local expert
    // has.
    let agreed = Verdict::agrees(status);
    let entries = if channel == 0 { 1 + local_experts } else { 1 };
    let mut entry = thread;
    while entry < entries && agreed {
        let word =
            if entry == 0 { message::CHANNEL_STARTS + channel } else { message::EXPERT_COUNTS + entry - 1 };
        let Some(values) = wait_packets(comm, word, epoch) else { break };
        let mut total = 0;
        unroll8!(SOURCE => {
            total += values[SOURCE];
            if entry == 0 && (SOURCE as u32) < ranks {
                let to = (SOURCE as u32 * args.num_channels + channel) as u64 * 4;
                st_u32(args.recv_channel_prefix_matrix.0 + to, values[SOURCE]);
            }
        });
        if entry != 0 {
            let aligned = total.div_ceil(args.expert_alignment) * args.expert_alignment;
            let to = (entry - 1) as u64 * 4;
            st_u32(args.num_recv_tokens_per_expert.0 + to, aligned);
            if !args.host.is_null() {
                st_u32(args.host.0 + size_of::<PlanHeader>() as u64 + to, aligned);
            }
        }
        entry += THREADS;
    }

    // Block 0 answers for the plan; the barrier makes its answer cover what the block's other threads wrote.
    if channel == 0 {
        barrier_sync();
        if thread == 0 {
            if aborted(comm) {
                status = PlanStatus::Timeout as u32;
            }
            let verdict = Verdict { status, ..verdict };
            verdict.write(args.header.0, receives, epoch);
            if args.host.is_null() {
                verdict.report(comm, receives, epoch);
            } else {
                verdict.write(args.host.0, receives, epoch);
                st_release_sys_u64(args.host.0 + offset_of!(PlanHeader, tag) as u64, args.tag);
            }
        }
    }
    trace(comm, Phase::Done);
}
