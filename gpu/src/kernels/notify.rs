//! Notify: the count exchange. Every rank sends each peer one message of counts; from all of them
//! each rank derives the place of each of its tokens' rows in every peer's pool. So nothing is
//! decided while rows move.
//!
//! Soundness: packets carry data and flag in one atomic word, and each has one writer. A barrier of
//! the block stands between the writers and the readers of each word of shared memory. Each entry
//! of an output has one thread; one thread writes the header, behind a barrier. Collectives stand
//! where all lanes of a warp arrive: the conditions around them are the same in all lanes.

use core::mem::offset_of;

use super::epoch::{
    Phase, aborted, current_epoch, send_count, tell_planning, trace, wait_count, wait_counts,
};
use super::list::entry_at;
use super::ring::channel_range;
use super::verdict::Verdict;
use crate::layout::{FEW_RANKS, MAX_RANKS, NotifyArgs, PlanHeader, PlanStatus, SEND_ROW_STRIDE, message};
use crate::simt::*;

/// Warp w of a block works for destination rank w, and with `MANY` ranks for every 16th from there
/// on.
const THREADS: u32 = 512;
const WARPS: u32 = THREADS / 32;

/// Most ranks.
const fn most_ranks(many: bool) -> u32 {
    if many { MAX_RANKS as u32 } else { FEW_RANKS as u32 }
}

/// Packets that every block needs from each source: signature, verdict of the layout, and tokens
/// for each rank. They are neighbours in the message and in shared memory.
const fn head_words(many: bool) -> u32 {
    message::RANK_COUNTS + most_ranks(many)
}

/// Dynamic shared memory of notify, in bytes: the heads of all sources; tokens of earlier channels
/// by destination; whether a wait expired; of many ranks, the row of the channel's first token by
/// destination.
pub const fn notify_shared_bytes(many: bool) -> u32 {
    let by_rank = if many { 2 } else { 1 };
    (most_ranks(many) * (head_words(many) + by_rank) + 1) * 4
}

/// Loads of a thread that are in flight together, where it goes through tokens: as many as
/// `unroll!(4, ..)` repeats.
const TOGETHER: usize = 4;

/// The values that must agree between ranks, in the order of `SIGNATURE_NAMES`.
#[device]
fn signature(args: &NotifyArgs) -> [u32; message::INVALID as usize] {
    [args.row_signature, args.columns, args.num_experts, args.num_channels, args.comm.pool.rows as u32]
}

/// Exchanges counts and plans where rows go. One block per channel.
#[kernel(
    threads = 512, barriers = 4, registers = 128, dependent,
    grid = args.num_channels, block = THREADS, shared = notify_shared_bytes(false),
    requires(args.comm.num_ranks <= FEW_RANKS as u32)
)]
pub unsafe fn notify(args: NotifyArgs) {
    exchange::<false>(&args);
}

/// The same of up to 64 ranks, for which a token's destinations are listed.
#[kernel(
    threads = 512, barriers = 5, registers = 128, dependent,
    grid = args.num_channels, block = THREADS, shared = notify_shared_bytes(true),
    requires(args.comm.num_ranks <= MAX_RANKS as u32)
)]
pub unsafe fn notify_many(args: NotifyArgs) {
    exchange::<true>(&args);
}

#[device]
unsafe fn exchange<const MANY: bool>(args: &NotifyArgs) {
    let comm = &args.comm;
    let (thread, lane, warp) = (tid(), laneid(), tid() / 32);
    let (ranks, channel) = (comm.num_ranks, ctaid());
    core::hint::assert_unchecked(ranks >= 1);
    trace(comm, Phase::Enter);
    let shared = dynamic_shared();
    let (most, head_words) = (most_ranks(MANY), head_words(MANY));
    let (heads, earlier) = (shared, shared + most * head_words * 4);
    let expired = earlier + most * 4;
    let head = |source: u32, word: u32| ld_shared_u32(heads + (source * head_words + word) * 4);
    let count = |source: u32, rank: u32| head(source, message::RANK_COUNTS + rank);
    let local_experts = args.num_experts / ranks;

    // Block 0 sends what the layout already counted, before anything else. All loads are under
    // way together, that of the epoch too.
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
        if warp == WARPS - 1 {
            tell_planning::<MANY>(comm, epoch);
        }
        if peer < ranks {
            send_count::<MANY>(comm, peer, message::RANK_COUNTS + rank, tokens as u32, epoch);
        }
        let mut pair = thread + THREADS;
        while MANY && pair < ranks * ranks {
            let (peer, rank) = (pair / ranks, pair % ranks);
            let tokens = ld_u32(args.num_tokens_per_rank.0 + rank as u64 * 4);
            send_count::<MANY>(comm, peer, message::RANK_COUNTS + rank, tokens, epoch);
            pair += THREADS;
        }
        if thread < ranks {
            let bad = invalid != [-1, -1];
            send_count::<MANY>(comm, thread, message::INVALID, bad as u32, epoch);
            let signature = signature(args);
            unroll!(8, WORD => {
                if WORD < signature.len() {
                    let value = signature[WORD % signature.len()];
                    send_count::<MANY>(comm, thread, message::SIGNATURE + WORD as u32, value, epoch);
                }
            });
        }
        while expert < args.num_experts {
            let word = message::EXPERT_COUNTS + expert % local_experts;
            send_count::<MANY>(comm, expert / local_experts, word, selected, epoch);
            expert += THREADS;
            selected = selections(expert);
        }
    }

    // Tokens of the channels before this one, by destination. Each block counts for itself: it
    // costs microseconds and spares a wait between blocks.
    if thread <= most {
        st_shared_u32(earlier + thread * 4, 0); // and `expired`, which follows
    }
    barrier_sync();
    let (begin, end) = channel_range(args.num_tokens, args.num_channels, channel);
    if MANY {
        count_of_many(args, begin, earlier);
    } else {
        let mut sums = [0u32; FEW_RANKS];
        stride!(token in thread..begin, TOGETHER as u32 * THREADS => {
            // Several tokens a turn, with all their loads in flight together.
            let mut parts = [[0u32; FEW_RANKS]; TOGETHER];
            unroll!(4, PART => {
                let mine = token + PART as u32 * THREADS;
                let row = args.is_token_in_rank.0 + mine as u64 * ranks as u64;
                unroll!(8, RANK => {
                    parts[PART][RANK] = ld_u8_if((mine < begin) & ((RANK as u32) < ranks), row + RANK as u64);
                });
            });
            unroll!(4, PART => {
                unroll!(8, RANK => { sums[RANK] += parts[PART][RANK] });
            });
        });
        // All warp sums before the first branch: behind one, the compiler may give its sides a
        // copy each of the next sum.
        unroll!(8, RANK => { sums[RANK] = redux_add(sums[RANK]) });
        unroll!(8, RANK => {
            if lane == 0 && sums[RANK] != 0 {
                red_relaxed_cta_shared_add_u32(earlier + RANK as u32 * 4, sums[RANK]);
            }
        });
    }
    barrier_sync();

    // Tell each peer where this channel starts.
    if thread < ranks {
        let start = ld_shared_u32(earlier + thread * 4);
        send_count::<MANY>(comm, thread, message::CHANNEL_STARTS + channel, start, epoch);
    }

    // Warp w numbers this channel's tokens for rank w, 32 at a time, in token order, while the
    // peers' heads are on their way.
    stride!(to in warp..ranks, WARPS => {
        let mut number = 0;
        stride!(group in begin..end, TOGETHER as u32 * 32 => {
            let mut wanted = [0u32; TOGETHER];
            unroll!(4, PART => {
                let token = group + PART as u32 * 32 + lane;
                let at = args.is_token_in_rank.0 + (token * ranks + to) as u64;
                wanted[PART] = ld_u8_if(token < end, at);
            });
            unroll!(4, PART => {
                let token = group + PART as u32 * 32 + lane;
                let hits = ballot(wanted[PART] != 0);
                let index = number + (hits & lanemask_lt()).count_ones();
                if token < end {
                    let index = if wanted[PART] != 0 { index as i32 } else { -1 };
                    st_i32(args.send_head.0 + (token * ranks + to) as u64 * 4, index);
                }
                number += hits.count_ones();
            });
        });
        if lane == 0 {
            let entry = to * args.num_channels + channel;
            let start = ld_shared_u32(earlier + to * 4);
            st_u32(args.channel_prefix_matrix.0 + entry as u64 * 4, start + number);
        }
        if !MANY {
            break;
        }
    });

    // Collect the heads of all ranks, one packet a thread.
    stride!(packet in thread..ranks * head_words, THREADS => {
        let (source, word) = (packet / head_words, packet % head_words);
        // A message holds the counts for `ranks` ranks only.
        if word < message::RANK_COUNTS + ranks {
            match wait_count::<MANY>(comm, source, word, epoch) {
                Some(value) => st_shared_u32(heads + packet * 4, value),
                None => {
                    st_shared_u32(heads + packet * 4, 0);
                    st_shared_u32(expired, 1);
                }
            }
        }
        if !MANY {
            break;
        }
    });
    barrier_sync();
    trace(comm, Phase::Ready);

    // Every rank has the same heads, hence the same verdict: either all ranks move rows or none
    // does. All threads branch on the status; the rest of the verdict is for the answer.
    let (mut status, mut verdict) = (PlanStatus::Empty as u32, Verdict::OPEN);
    if ld_shared_u32(expired) != 0 {
        status = PlanStatus::Timeout as u32;
    }
    // Lane r looks whether rank r differs. Only where one does, all look for the first.
    let (mut differs, expected) = (0, signature(args));
    unroll!(8, WORD => {
        if WORD <= message::INVALID as usize {
            let ours = if WORD < expected.len() { expected[WORD % expected.len()] } else { 0 };
            differs |= head(lane.min(ranks - 1), WORD as u32) ^ ours;
            if MANY {
                differs |= head((lane + 32).min(ranks - 1), WORD as u32) ^ ours;
            }
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
    // Lane r: the rows that rank r receives, and of many ranks those of the rank 32 further.
    let mut totals = [0; 2];
    unroll!(2, HALF => {
        let (rank, mut source) = (lane + HALF as u32 * 32, 0);
        while (MANY || HALF == 0) && source < ranks && rank < ranks && status != PlanStatus::Timeout as u32 {
            totals[HALF] += count(source, rank);
            if channel == 0 && warp == 0 {
                st_u32(args.rank_prefix_matrix.0 + (source * ranks + rank) as u64 * 4, totals[HALF]);
            }
            source += 1;
        }
    });
    syncwarp();
    let mut receives = shfl_u32(totals[0], comm.rank);
    let over = ballot(totals[0] as u64 > comm.pool.rows);
    let first_over = over.trailing_zeros() & 31; // of any lane, where there is none
    let its_total = shfl_u32(totals[0], first_over);
    let mut most_over = (over != 0).then_some((first_over, its_total));
    if MANY {
        let of_second_half = shfl_u32(totals[1], comm.rank);
        receives = if comm.rank < 32 { receives } else { of_second_half };
        let over = ballot(totals[1] as u64 > comm.pool.rows);
        let first_over = over.trailing_zeros() & 31;
        let its_total = shfl_u32(totals[1], first_over);
        most_over = most_over.or((over != 0).then_some((32 + first_over, its_total)));
    }
    if let (0, Some((peer, total))) = (status, most_over) {
        (status, verdict.peer, verdict.detail) = (PlanStatus::Capacity as u32, peer, total);
    }
    if status == 0 {
        status = PlanStatus::Ready as u32;
    }

    if MANY {
        list_destinations(args, begin, end, earlier, expired + 4, count);
    } else {
        // Rows follow from the numbers: an entry a thread, always of the same rank.
        let to = thread % SEND_ROW_STRIDE;
        let mut first = 0; // row of this channel's first token for that rank
        if to < ranks {
            first = ld_shared_u32(earlier + to * 4);
            stride!(source in 0..comm.rank => {
                first += count(source, to);
            });
        }
        let step = TOGETHER as u32 * (THREADS / SEND_ROW_STRIDE);
        stride!(token in begin + thread / SEND_ROW_STRIDE..end, step => {
            let mut numbers = [0; TOGETHER];
            unroll!(4, PART => {
                let token = token + PART as u32 * (THREADS / SEND_ROW_STRIDE);
                let at = args.send_head.0 + (token * ranks + to) as u64 * 4;
                numbers[PART] = ld_i32_if((token < end) & (to < ranks), at, -1);
            });
            unroll!(4, PART => {
                let token = token + PART as u32 * (THREADS / SEND_ROW_STRIDE);
                if token < end {
                    let row = if numbers[PART] >= 0 { first as i32 + numbers[PART] } else { -1 };
                    st_i32(args.send_row.0 + (token * SEND_ROW_STRIDE + to) as u64 * 4, row);
                }
            });
        });
    }

    trace(comm, Phase::Moved);

    // Entry 0: where this channel starts at every source. In block 0 the others: how many
    // selections each local expert has.
    let agreed = Verdict::agrees(status);
    let entries = if channel == 0 { 1 + local_experts } else { 1 };
    let mut entry = thread;
    'entries: while entry < entries && agreed {
        let word =
            if entry == 0 { message::CHANNEL_STARTS + channel } else { message::EXPERT_COUNTS + entry - 1 };
        let (mut total, mut first) = (0, 0);
        loop {
            let Some(values) = wait_counts::<MANY>(comm, first, word, epoch) else { break 'entries };
            unroll!(8, SOURCE => {
                total += values[SOURCE];
                let source = first + SOURCE as u32;
                if entry == 0 && source < ranks {
                    let to = (source * args.num_channels + channel) as u64 * 4;
                    st_u32(args.recv_channel_prefix_matrix.0 + to, values[SOURCE]);
                }
            });
            first += FEW_RANKS as u32;
            if !MANY || first >= ranks {
                break;
            }
        }
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

    // Block 0 answers for the plan; the barrier makes its answer cover what the block's other
    // threads wrote.
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

/// Adds up, for each of many ranks, the tokens before `begin`, in the words of shared memory at
/// `earlier`. A thread counts for one rank.
///
/// # Safety
/// The words are added to by atomics alone, between two barriers.
#[device]
unsafe fn count_of_many(args: &NotifyArgs, begin: u32, earlier: u32) {
    const TOKENS: u32 = THREADS / MAX_RANKS as u32;
    let (ranks, rank) = (args.comm.num_ranks, tid() % MAX_RANKS as u32);
    let mut sum = 0;
    stride!(token in tid() / MAX_RANKS as u32..begin, TOGETHER as u32 * TOKENS => {
        let mut parts = [0; TOGETHER];
        unroll!(4, PART => {
            let mine = token + PART as u32 * TOKENS;
            let at = args.is_token_in_rank.0 + mine as u64 * ranks as u64 + rank as u64;
            parts[PART] = ld_u8_if((mine < begin) & (rank < ranks), at);
        });
        unroll!(4, PART => { sum += parts[PART] });
    });
    if sum != 0 {
        red_relaxed_cta_shared_add_u32(earlier + rank * 4, sum);
    }
}

/// Lists where each of the channel's tokens goes, by the numbers in `send_head`: a warp has a
/// token, a lane two ranks. `starts`: words of shared memory for the row of the channel's first
/// token by rank; `count`: tokens of a source for a rank. All threads call it.
///
/// # Safety
/// Each word and each entry of a list has one thread, with a barrier in front of the words'
/// readers.
#[device]
unsafe fn list_destinations(
    args: &NotifyArgs,
    begin: u32,
    end: u32,
    earlier: u32,
    starts: u32,
    count: impl Fn(u32, u32) -> u32,
) {
    let (thread, lane, ranks) = (tid(), laneid(), args.comm.num_ranks);
    if thread < ranks {
        let mut first = ld_shared_u32(earlier + thread * 4);
        stride!(source in 0..args.comm.rank => {
            first += count(source, thread);
        });
        st_shared_u32(starts + thread * 4, first);
    }
    barrier_sync();
    stride!(token in begin + thread / 32..end, WARPS => {
        let heads = args.send_head.0 + token as u64 * ranks as u64 * 4;
        let entry = |nth: u32| entry_at(args.send_row.0, token, nth);
        let number = |rank: u32| ld_i32_if(rank < ranks, heads + rank as u64 * 4, -1);
        let numbers = [number(lane), number(lane + 32)];
        let hits = [ballot(numbers[0] >= 0), ballot(numbers[1] >= 0)];
        let before = [0, hits[0].count_ones()];
        unroll!(2, HALF => {
            if numbers[HALF] >= 0 {
                let rank = lane + HALF as u32 * 32;
                let row = ld_shared_u32(starts + rank * 4) + numbers[HALF] as u32;
                let place = before[HALF] + (hits[HALF] & lanemask_lt()).count_ones();
                st_i64(entry(place), (rank as i64) << 32 | row as i64);
            }
        });
        // A token has as many entries as it may have destinations.
        if lane >= before[1] + hits[1].count_ones() {
            st_i64(entry(lane), -1);
        }
    });
}
