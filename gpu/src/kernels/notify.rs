//! Notify: the count exchange. Every rank sends each peer one message of counts; from all of them
//! each rank derives the place of each of its tokens' rows in every peer's pool. So nothing is
//! decided while rows move.
//!
//! Soundness: packets carry data and flag in one atomic word, and each has one writer. A barrier of
//! the block stands between the writers and the readers of each word of shared memory. Each entry
//! of an output has one thread; one thread writes the header, behind a barrier. Collectives stand
//! where all lanes of a warp arrive: the conditions around them are the same in all lanes.

use core::mem::offset_of;
use core::ops::Range;

use super::epoch::{
    Phase, aborted, current_epoch, send_count, tell_planning, trace, wait_count, wait_counts,
};
use super::list::entry_at;
use super::ring::channel_range;
use super::verdict::{Verdict, counts_behind};
use crate::layout::{FEW_RANKS, MAX_RANKS, NotifyArgs, PlanHeader, PlanStatus, SEND_ROW_STRIDE, message};
use crate::simt::*;

/// Warp w of a block works for destination rank w, and with `MANY` ranks for every 16th from there
/// on.
const THREADS: u32 = 512;
const WARPS: u32 = THREADS / 32;

/// Loads of a thread that are in flight together, where it goes through tokens: as many as
/// `unroll!(4, ..)` repeats.
const TOGETHER: usize = 4;

/// Dynamic shared memory of both kernels, in words.
struct Words<const MANY: bool>;

impl<const MANY: bool> Words<MANY> {
    /// Most ranks.
    const RANKS: u32 = if MANY { MAX_RANKS as u32 } else { FEW_RANKS as u32 };
    /// Packets that every block needs from each source: signature, verdict of the layout, and tokens
    /// for each rank. They are neighbours in the message and in shared memory.
    const HEAD: u32 = message::RANK_COUNTS + Self::RANKS;
    /// Tokens of earlier channels by destination. The heads of all sources are in front of them.
    const EARLIER: u32 = Self::RANKS * Self::HEAD;
    /// Non-zero where a wait for a packet has expired.
    const EXPIRED: u32 = Self::EARLIER + Self::RANKS;
    /// Of many ranks, the row of the channel's first token by destination.
    const STARTS: u32 = Self::EXPIRED + 1;
    const BYTES: u32 = (Self::STARTS + if MANY { Self::RANKS } else { 0 }) * 4;
}

/// Dynamic shared memory of notify, in bytes.
pub const fn notify_shared_bytes(many: bool) -> u32 {
    if many { Words::<true>::BYTES } else { Words::<false>::BYTES }
}

/// Exchanges counts and plans where rows go. One block per channel.
#[kernel(
    threads = 512, barriers = 4, registers = 128, dependent,
    grid = args.num_channels, block = THREADS, shared = notify_shared_bytes(false),
    requires(args.comm.num_ranks <= FEW_RANKS as u32)
)]
pub unsafe fn notify(args: NotifyArgs) {
    plan::<false>(&args);
}

/// The same of up to 64 ranks, for which a token's destinations are listed.
#[kernel(
    threads = 512, barriers = 5, registers = 128, dependent,
    grid = args.num_channels, block = THREADS, shared = notify_shared_bytes(true),
    requires(args.comm.num_ranks <= MAX_RANKS as u32)
)]
pub unsafe fn notify_many(args: NotifyArgs) {
    plan::<true>(&args);
}

/// Both kernels.
///
/// # Safety
/// The launch is as the kernels' attributes say.
#[device]
unsafe fn plan<const MANY: bool>(args: &NotifyArgs) {
    let comm = &args.comm;
    trace(comm, Phase::Enter);
    let exchange = CountExchange::<MANY>::new(args);
    let epoch = exchange.send_counts();
    exchange.clear_words();
    barrier_sync();
    exchange.count_earlier_tokens();
    barrier_sync();
    exchange.send_channel_start(epoch);
    exchange.number_tokens();
    exchange.wait_heads(epoch);
    barrier_sync();
    trace(comm, Phase::Ready);
    let (verdict, received) = exchange.judge();
    if MANY {
        exchange.list_destinations();
    } else {
        exchange.write_rows();
    }
    trace(comm, Phase::Moved);
    exchange.plan_receiving(&verdict, epoch);
    // Block 0 answers for the plan. The barrier makes its answer cover what the block's other
    // threads wrote.
    if exchange.channel == 0 {
        barrier_sync();
        if tid() == 0 {
            exchange.answer(verdict, received, epoch);
        }
    }
    trace(comm, Phase::Done);
}

/// The count exchange of a block, which has a channel, in the order of its methods. All threads call
/// each of them, except `answer`.
struct CountExchange<'a, const MANY: bool> {
    args: &'a NotifyArgs,
    /// Offset of the words in shared memory.
    shared: u32,
    thread: u32,
    lane: u32,
    ranks: u32,
    local_experts: u32,
    channel: u32,
}

impl<'a, const MANY: bool> CountExchange<'a, MANY> {
    /// # Safety
    /// The launch is as the kernels' attributes say.
    #[device]
    unsafe fn new(args: &'a NotifyArgs) -> Self {
        let (ranks, channel) = (args.comm.num_ranks, ctaid());
        core::hint::assert_unchecked(ranks >= 1);
        CountExchange {
            args,
            shared: dynamic_shared(),
            thread: tid(),
            lane: laneid(),
            ranks,
            local_experts: args.num_experts / ranks,
            channel,
        }
    }

    /// Block 0 sends what the layout already counted, before anything else. All loads are under way
    /// together, that of the epoch too, which every block gets.
    ///
    /// # Safety
    /// No other block writes these packets.
    #[device]
    unsafe fn send_counts(&self) -> u64 {
        let (args, comm, ranks) = (self.args, &self.args.comm, self.ranks);
        let (thread, sends) = (self.thread, self.channel == 0);
        let (peer, rank) = (thread / ranks, thread % ranks);
        let tokens = ld_i32_if(sends & (peer < ranks), args.num_tokens_per_rank.array::<i32>().at(rank), 0);
        let selections = |expert: u32| {
            let at = args.num_tokens_per_expert.array::<i32>().at(expert);
            ld_i32_if(sends & (expert < args.num_experts), at, 0) as u32
        };
        let (mut expert, mut selected) = (thread, selections(thread));
        let invalid = [0, 4].map(|half| ld_i32_if(sends & (thread < ranks), args.invalid.0 + half, -1));
        let epoch = current_epoch(comm);
        if !sends {
            return epoch;
        }
        // By a warp that has no packets to send in front of the experts' ones.
        if thread / 32 == WARPS - 1 {
            tell_planning::<MANY>(comm, epoch);
        }
        if peer < ranks {
            send_count::<MANY>(comm, peer, message::RANK_COUNTS + rank, tokens as u32, epoch);
        }
        let mut pair = thread + THREADS;
        while MANY && pair < ranks * ranks {
            let (peer, rank) = (pair / ranks, pair % ranks);
            let tokens = args.num_tokens_per_rank.array::<u32>().ld(rank);
            send_count::<MANY>(comm, peer, message::RANK_COUNTS + rank, tokens, epoch);
            pair += THREADS;
        }
        if thread < ranks {
            let bad = invalid != [-1, -1];
            send_count::<MANY>(comm, thread, message::INVALID, bad as u32, epoch);
            let signature = self.signature();
            unroll!(8, WORD => {
                if WORD < signature.len() {
                    let value = signature[WORD % signature.len()];
                    send_count::<MANY>(comm, thread, message::SIGNATURE + WORD as u32, value, epoch);
                }
            });
        }
        while expert < args.num_experts {
            let word = message::EXPERT_COUNTS + expert % self.local_experts;
            send_count::<MANY>(comm, expert / self.local_experts, word, selected, epoch);
            expert += THREADS;
            selected = selections(expert);
        }
        epoch
    }

    /// Clears the words that are added to, and `EXPIRED` behind them.
    ///
    /// # Safety
    /// No thread uses the words before the next barrier.
    #[device]
    unsafe fn clear_words(&self) {
        if self.thread <= Words::<MANY>::RANKS {
            st_shared_u32(self.earlier(self.thread), 0);
        }
    }

    /// Counts the tokens of the channels before this one, by destination. Each block counts for
    /// itself: it costs microseconds and spares a wait between blocks.
    ///
    /// # Safety
    /// A barrier is in front of it, and one in front of the readers of its words.
    #[device]
    unsafe fn count_earlier_tokens(&self) {
        if MANY {
            self.count_for_a_rank();
        } else {
            self.count_for_all_ranks();
        }
    }

    /// A thread counts tokens for each of few ranks.
    ///
    /// # Safety
    /// As [`Self::count_earlier_tokens`].
    #[device]
    unsafe fn count_for_all_ranks(&self) {
        let (ranks, before) = (self.ranks, self.tokens().start);
        let mut sums = [0u32; FEW_RANKS];
        stride!(token in self.thread..before, TOGETHER as u32 * THREADS => {
            // Several tokens a turn, with all their loads in flight together.
            let mut parts = [[0u32; FEW_RANKS]; TOGETHER];
            unroll!(4, PART => {
                let mine = token + PART as u32 * THREADS;
                let row = self.args.is_token_in_rank.row(mine, ranks as u64);
                unroll!(8, RANK => {
                    parts[PART][RANK] = ld_u8_if((mine < before) & ((RANK as u32) < ranks), row + RANK as u64);
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
            if self.lane == 0 && sums[RANK] != 0 {
                red_relaxed_cta_shared_add_u32(self.earlier(RANK as u32), sums[RANK]);
            }
        });
    }

    /// A thread counts tokens for one of many ranks.
    ///
    /// # Safety
    /// As [`Self::count_earlier_tokens`].
    #[device]
    unsafe fn count_for_a_rank(&self) {
        const TOKENS: u32 = THREADS / MAX_RANKS as u32;
        let (ranks, rank, before) = (self.ranks, self.thread % MAX_RANKS as u32, self.tokens().start);
        let mut sum = 0;
        stride!(token in self.thread / MAX_RANKS as u32..before, TOGETHER as u32 * TOKENS => {
            let mut parts = [0; TOGETHER];
            unroll!(4, PART => {
                let mine = token + PART as u32 * TOKENS;
                let at = self.args.is_token_in_rank.array::<u8>().at(row_major(mine, ranks, rank));
                parts[PART] = ld_u8_if((mine < before) & (rank < ranks), at);
            });
            unroll!(4, PART => { sum += parts[PART] });
        });
        if sum != 0 {
            red_relaxed_cta_shared_add_u32(self.earlier(rank), sum);
        }
    }

    /// Sends each peer where this channel starts.
    ///
    /// # Safety
    /// A barrier is behind the count of earlier tokens.
    #[device]
    unsafe fn send_channel_start(&self, epoch: u64) {
        if self.thread < self.ranks {
            let start = ld_shared_u32(self.earlier(self.thread));
            let word = message::CHANNEL_STARTS + self.channel;
            send_count::<MANY>(&self.args.comm, self.thread, word, start, epoch);
        }
    }

    /// Warp w numbers this channel's tokens for rank w, 32 at a time, in token order, while the
    /// peers' heads are on their way.
    ///
    /// # Safety
    /// A barrier is behind the count of earlier tokens.
    #[device]
    unsafe fn number_tokens(&self) {
        let (args, ranks, lane) = (self.args, self.ranks, self.lane);
        let Range { start: begin, end } = self.tokens();
        stride!(to in self.thread / 32..ranks, WARPS => {
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
                        args.send_head.array::<i32>().st(token * ranks + to, index);
                    }
                    number += hits.count_ones();
                });
            });
            if lane == 0 {
                let entry = to * args.num_channels + self.channel;
                let start = ld_shared_u32(self.earlier(to));
                st_u32(args.channel_prefix_matrix.array::<u32>().at(entry), start + number);
            }
            if !MANY {
                break;
            }
        });
    }

    /// Waits for the heads of all ranks, one packet a thread, and keeps them in shared memory.
    ///
    /// # Safety
    /// Packets are inside the own pool.
    #[device]
    unsafe fn wait_heads(&self, epoch: u64) {
        let head = Words::<MANY>::HEAD;
        stride!(packet in self.thread..self.ranks * head, THREADS => {
            let (source, index) = (packet / head, packet % head);
            // A message holds the counts for `ranks` ranks only.
            if index < message::RANK_COUNTS + self.ranks {
                match wait_count::<MANY>(&self.args.comm, source, index, epoch) {
                    Some(value) => st_shared_u32(self.word(packet), value),
                    None => {
                        st_shared_u32(self.word(packet), 0);
                        st_shared_u32(self.word(Words::<MANY>::EXPIRED), 1);
                    }
                }
            }
            if !MANY {
                break;
            }
        });
    }

    /// The verdict, and the rows that this rank receives. Every rank has the same heads, hence the
    /// same verdict: either all ranks move rows or none does. All threads branch on its status; the
    /// rest of it is for the answer.
    ///
    /// # Safety
    /// A barrier is behind the heads.
    #[device]
    unsafe fn judge(&self) -> (Verdict, u32) {
        let rank = self.args.comm.rank;
        let mut verdict = self.compare_heads();
        let totals = self.sum_rows(verdict.status);
        syncwarp();
        let mut received = shfl_u32(totals[0], rank);
        let mut over = self.first_over(totals[0]);
        if MANY {
            let of_second_half = shfl_u32(totals[1], rank);
            received = if rank < 32 { received } else { of_second_half };
            over = over.or(self.first_over(totals[1]).map(|(lane, total)| (32 + lane, total)));
        }
        if let (0, Some((peer, total))) = (verdict.status, over) {
            (verdict.status, verdict.peer, verdict.detail) = (PlanStatus::Capacity as u32, peer, total);
        }
        if verdict.status == 0 {
            verdict.status = PlanStatus::Ready as u32;
        }
        (verdict, received)
    }

    /// The verdict as far as heads decide it: an expired wait, or the first rank whose head differs
    /// from this rank's or has an invalid id.
    ///
    /// # Safety
    /// As [`Self::judge`].
    #[device]
    unsafe fn compare_heads(&self) -> Verdict {
        let (ranks, lane) = (self.ranks, self.lane);
        let mut verdict = Verdict::OPEN;
        if ld_shared_u32(self.word(Words::<MANY>::EXPIRED)) != 0 {
            verdict.status = PlanStatus::Timeout as u32;
        }
        // Lane r looks whether rank r differs. Only where one does, all look for the first.
        let (mut differs, expected) = (0, self.signature());
        unroll!(8, WORD => {
            if WORD <= message::INVALID as usize {
                let ours = if WORD < expected.len() { expected[WORD % expected.len()] } else { 0 };
                differs |= self.head(lane.min(ranks - 1), WORD as u32) ^ ours;
                if MANY {
                    differs |= self.head((lane + 32).min(ranks - 1), WORD as u32) ^ ours;
                }
            }
        });
        let objections = ballot(differs != 0);
        let mut source = 0;
        while source < ranks && objections != 0 {
            let mut index = 0;
            while verdict.status == 0 && index < message::INVALID {
                verdict.theirs = self.head(source, index);
                verdict.ours = self.head(self.args.comm.rank, index);
                if verdict.theirs != verdict.ours {
                    verdict.status = PlanStatus::Mismatch as u32;
                    (verdict.peer, verdict.detail) = (source, index);
                }
                index += 1;
            }
            if verdict.status == 0 && self.head(source, message::INVALID) != 0 {
                (verdict.status, verdict.peer) = (PlanStatus::InvalidExpert as u32, source);
            }
            source += 1;
        }
        verdict
    }

    /// In lane r the rows that rank r receives, and of many ranks those of the rank 32 further. Block
    /// 0 writes the sums over sources. Zeros where a wait has expired.
    ///
    /// # Safety
    /// As [`Self::judge`].
    #[device]
    unsafe fn sum_rows(&self, status: u32) -> [u32; 2] {
        let (args, ranks) = (self.args, self.ranks);
        let mut totals = [0; 2];
        unroll!(2, HALF => {
            let (rank, mut source) = (self.lane + HALF as u32 * 32, 0);
            while (MANY || HALF == 0) && source < ranks && rank < ranks && status != PlanStatus::Timeout as u32 {
                totals[HALF] += self.count(source, rank);
                if self.channel == 0 && self.thread / 32 == 0 {
                    args.rank_prefix_matrix.array::<u32>().st(source * ranks + rank, totals[HALF]);
                }
                source += 1;
            }
        });
        totals
    }

    /// The first lane whose rank receives more rows than a pool has, with their number.
    ///
    /// # Safety
    /// All lanes of a warp call it.
    #[device]
    unsafe fn first_over(&self, total: u32) -> Option<(u32, u32)> {
        let over = ballot(total as u64 > self.args.comm.pool.rows);
        let first = over.trailing_zeros() & 31; // of any lane, where there is none
        let its_total = shfl_u32(total, first);
        (over != 0).then_some((first, its_total))
    }

    /// Writes the row of each of the channel's tokens at each of few ranks, by the numbers in
    /// `send_head`. A thread writes one entry of a token, always of the same rank.
    ///
    /// # Safety
    /// A barrier is behind the heads and the numbers.
    #[device]
    unsafe fn write_rows(&self) {
        const TOKENS: u32 = THREADS / SEND_ROW_STRIDE;
        let (args, ranks, to) = (self.args, self.ranks, self.thread % SEND_ROW_STRIDE);
        let first = if to < ranks { self.first_row(to) } else { 0 };
        let Range { start: begin, end } = self.tokens();
        stride!(token in begin + self.thread / SEND_ROW_STRIDE..end, TOGETHER as u32 * TOKENS => {
            let mut numbers = [0; TOGETHER];
            unroll!(4, PART => {
                let token = token + PART as u32 * TOKENS;
                let at = args.send_head.array::<i32>().at(token * ranks + to);
                numbers[PART] = ld_i32_if((token < end) & (to < ranks), at, -1);
            });
            unroll!(4, PART => {
                let token = token + PART as u32 * TOKENS;
                if token < end {
                    let row = if numbers[PART] >= 0 { first as i32 + numbers[PART] } else { -1 };
                    args.send_row.array::<i32>().st(token * SEND_ROW_STRIDE + to, row);
                }
            });
        });
    }

    /// Lists where each of the channel's tokens goes among many ranks, by the numbers in `send_head`:
    /// a warp has a token, a lane two ranks.
    ///
    /// # Safety
    /// A barrier is behind the heads and the numbers.
    #[device]
    unsafe fn list_destinations(&self) {
        let (args, ranks, lane) = (self.args, self.ranks, self.lane);
        if self.thread < ranks {
            st_shared_u32(self.word(Words::<MANY>::STARTS + self.thread), self.first_row(self.thread));
        }
        barrier_sync();
        let Range { start: begin, end } = self.tokens();
        stride!(token in begin + self.thread / 32..end, WARPS => {
            let heads = args.send_head.array::<i32>().skip(row_major(token, ranks, 0));
            let entry = |nth: u32| entry_at(args.send_row.0, token, nth);
            let number = |rank: u32| ld_i32_if(rank < ranks, heads.at(rank), -1);
            let numbers = [number(lane), number(lane + 32)];
            let hits = [ballot(numbers[0] >= 0), ballot(numbers[1] >= 0)];
            let before = [0, hits[0].count_ones()];
            unroll!(2, HALF => {
                if numbers[HALF] >= 0 {
                    let rank = lane + HALF as u32 * 32;
                    let row = ld_shared_u32(self.word(Words::<MANY>::STARTS + rank)) + numbers[HALF] as u32;
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

    /// Writes where this channel starts at every source, and in block 0 how many selections each
    /// local expert has, where the ranks agree on channels and experts. A wait that expires ends it.
    ///
    /// # Safety
    /// Packets are inside the own pool.
    #[device]
    unsafe fn plan_receiving(&self, verdict: &Verdict, epoch: u64) {
        let (args, ranks, channel) = (self.args, self.ranks, self.channel);
        // Entry 0 is the channel's start; the others are of experts.
        let entries = if channel == 0 { 1 + self.local_experts } else { 1 };
        let (mut entry, agreed) = (self.thread, Verdict::agrees(verdict.status));
        while entry < entries && agreed {
            let index = if entry == 0 {
                message::CHANNEL_STARTS + channel
            } else {
                message::EXPERT_COUNTS + entry - 1
            };
            let (mut total, mut first) = (0, 0);
            loop {
                let Some(values) = wait_counts::<MANY>(&args.comm, first, index, epoch) else { return };
                unroll!(8, SOURCE => {
                    total += values[SOURCE];
                    let source = first + SOURCE as u32;
                    if entry == 0 && source < ranks {
                        let matrix = args.recv_channel_prefix_matrix.array::<u32>();
                        matrix.st(source * args.num_channels + channel, values[SOURCE]);
                    }
                });
                first += FEW_RANKS as u32;
                if !MANY || first >= ranks {
                    break;
                }
            }
            if entry != 0 {
                let aligned = total.div_ceil(args.expert_alignment) * args.expert_alignment;
                args.num_recv_tokens_per_expert.array::<u32>().st(entry - 1, aligned);
                if !args.host.is_null() {
                    counts_behind(args.host).st(entry - 1, aligned);
                }
            }
            entry += THREADS;
        }
    }

    /// Writes the header, on the device and last of all for the host. One thread calls it.
    ///
    /// # Safety
    /// Both are live headers; the barrier before it makes them cover what the block wrote.
    #[device]
    unsafe fn answer(&self, mut verdict: Verdict, received: u32, epoch: u64) {
        let (args, comm) = (self.args, &self.args.comm);
        if aborted(comm) {
            verdict.status = PlanStatus::Timeout as u32;
        }
        verdict.clear_unless_ready(args.num_recv_tokens_per_expert, self.local_experts);
        verdict.write(args.header.0, received, epoch);
        if args.host.is_null() {
            verdict.report_exchange(comm, args.columns, received, epoch);
        } else {
            verdict.write(args.host.0, received, epoch);
            st_release_sys_u64(args.host.0 + offset_of!(PlanHeader, tag) as u64, args.tag);
        }
    }

    /// The values that must agree between ranks, in the order of `SIGNATURE_NAMES`.
    #[device]
    fn signature(&self) -> [u32; message::INVALID as usize] {
        let args = self.args;
        [args.row_signature, args.columns, args.num_experts, args.num_channels, args.comm.pool.rows as u32]
    }

    /// The channel's tokens.
    #[device]
    fn tokens(&self) -> Range<u32> {
        let (begin, end) = channel_range(self.args.num_tokens, self.args.num_channels, self.channel);
        begin..end
    }

    /// The row of this channel's first token at rank `to`.
    ///
    /// # Safety
    /// A barrier is behind the heads.
    #[device]
    unsafe fn first_row(&self, to: u32) -> u32 {
        let mut first = ld_shared_u32(self.earlier(to));
        stride!(source in 0..self.args.comm.rank => {
            first += self.count(source, to);
        });
        first
    }

    /// Word `index` of the head of `source`.
    ///
    /// # Safety
    /// A barrier is behind the heads.
    #[device]
    unsafe fn head(&self, source: u32, index: u32) -> u32 {
        ld_shared_u32(self.word(source * Words::<MANY>::HEAD + index))
    }

    /// Tokens of `source` for `rank`.
    ///
    /// # Safety
    /// A barrier is behind the heads.
    #[device]
    unsafe fn count(&self, source: u32, rank: u32) -> u32 {
        self.head(source, message::RANK_COUNTS + rank)
    }

    /// Offset of the word for the tokens of earlier channels for `rank`.
    #[device]
    fn earlier(&self, rank: u32) -> u32 {
        self.word(Words::<MANY>::EARLIER + rank)
    }

    /// Offset of a word in shared memory.
    #[device]
    fn word(&self, index: u32) -> u32 {
        self.shared + index * 4
    }
}
