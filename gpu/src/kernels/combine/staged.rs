//! Combine of rows that are not in the pool yet: some blocks copy them there while the others
//! gather what peers have copied.
//!
//! Soundness: the own combine rows are written behind the end of the operation before. No peer left
//! that operation before it had gathered all its rows from them. (Were operations to end without
//! that wait, blocks that copy would have to wait here.) A row has one warp for each piece of it.
//! The block that copied the row publishes it behind a barrier, by a word that no other block
//! writes. Readers acquire that word first, with a proxy fence before the copy engine reads the
//! row. Blocks that copy do not wait, and are the first that start. Collectives stand where all
//! lanes of a warp arrive: the conditions around them are the same in all lanes.

use core::cell::Cell;

use super::stage::{IN_FLIGHT_BYTES, copy_bytes, note_missing, rows_of_plan};
use super::sum::{Bf16, Contributors, F32, Gather, Listed, Outputs, Peers, Ranks, Summand, spoil, sum_rows};
use crate::kernels::epoch::{
    Phase, ReadyEntry, current_epoch, give_up_combine, leave, pool_at, tell_ready, trace, wait_ranks_ready,
    warp_aborted,
};
use crate::kernels::peer_wait::PeerWait;
use crate::kernels::ring::{Ring, Turn, channel_range};
use crate::layout::{
    CombineArgs, Comm, LOCAL_STARTED, STARTED_SHIFT, StagedCombineArgs, Wait, ring_bytes, row_stride,
    staged_offset,
};
use crate::simt::*;

/// How many times longer than the first step of a channel the last ones are.
const LONGEST_STEP: u32 = 8;

kernels! {
    kernel(
        threads = 384, barriers = 5, registers = 168, dependent,
        grid >= least_blocks(&args), block >= least_threads(&args), shared = shared_bytes(&args),
        requires(..CombineArgs(args.combine))
    );
    fn(args: StagedCombineArgs);

    /// Copies BF16 rows and weights into the pool, and meanwhile sums as [`super::CombineBf16`]. The
    /// first `stagers` blocks that start copy.
    combine_staged_bf16 { combine_staged::<Bf16, Ranks, false>(&args) }

    /// The same for FP32 rows.
    combine_staged_f32 { combine_staged::<F32, Ranks, false>(&args) }

    /// The same for BF16 rows of up to 64 ranks.
    combine_staged_many_bf16 { combine_staged::<Bf16, Listed, true>(&args) }

    /// The same for FP32 rows of up to 64 ranks.
    combine_staged_many_f32 { combine_staged::<F32, Listed, true>(&args) }
}

/// # Safety
/// Rows were planned inside the pools.
#[device]
unsafe fn combine_staged<'a, E: Summand, P: Peers<'a>, const MANY: bool>(args: &'a StagedCombineArgs) {
    let (rows, comm) = (&args.combine, &args.combine.comm);
    trace(comm, Phase::Enter);
    let entry = ReadyEntry::read(comm, rows.header.0);
    // Loaded with the entry's words, so that a stager does not wait for it.
    let came = rows_of_plan(rows.header.0);
    let epoch = current_epoch(comm);
    let ready = entry.ready_word(comm, epoch);
    let (turn, has_given_up) = starting_order(comm, &entry, epoch);
    if turn == 0 && tid() < 32 {
        tell_ready::<MANY>(comm, ready);
    }
    let planned = entry.is_planned();
    if turn < args.stagers {
        trace(comm, Phase::Ready);
        // Where rows are missing, nothing is staged for peers to wait for. Behind an expired wait a
        // peer may still read the rows of the combine before.
        if planned && came <= args.num_rows && !has_given_up {
            stage::<MANY>(args, turn, epoch);
        }
    } else {
        let warps = args.gather_warps;
        let joined = dynamic_shared() + ring_bytes(warps, rows.slots, rows.slot_bytes);
        let joined = wait_ranks_ready::<MANY>(comm, &entry, epoch, ready, joined, Wait::CombineReady);
        if joined && planned && tid() / 32 < warps {
            // This block is one of those that gather. Those of a channel take its tokens in
            // turn, so that all begin where its rows do.
            let (gatherer, each) = (turn - args.stagers, args.blocks_per_channel);
            core::hint::assert_unchecked(each >= 1);
            let (nth, of) = (gatherer % each * warps + tid() / 32, each * warps);
            let ring = Ring::new(rows.slots, rows.slot_bytes, warps);
            let (mut to, mut turn) = (Outputs::<true>::new(rows), Turn::first());
            stride!(channel in gatherer / each..args.channels, (nctaid() - args.stagers) / each => {
                let (begin, end) = channel_range(rows.num_tokens, args.channels, channel);
                let ranks = P::new(rows);
                let (known, known_of) = (Cell::new(0), Cell::new(u32::MAX));
                let from = Staged::<P, MANY> { args, ranks, channel, known, known_of };
                let gather = Gather::start(rows, &from, begin, end, nth, of);
                sum_rows::<E, _, _, false>(rows, &ring, &mut turn, &from, &mut to, gather);
            });
        }
    }
    if planned && came > args.num_rows && turn == 0 {
        note_missing(comm, (came, args.num_rows), epoch, epoch);
    }
    // A wait that expired, in whichever warp, keeps the block from saying that it has done its
    // part.
    barrier_sync();
    let is_sound = !warp_aborted(comm);
    let ends = leave::<MANY>(comm, epoch, is_sound, Wait::CombineDone);
    if !(is_sound && planned) && turn >= args.stagers && tid() / 32 < args.gather_warps {
        spoil_share(args, turn - args.stagers);
    }
    if ends && give_up_combine::<MANY>(comm, epoch) {
        spoil::<false>(rows, 0, rows.num_tokens, 0, 1);
    }
}

/// Leaves NaN in the tokens of a block that gathers, those that it shares with others of the
/// channel in turn.
#[device]
unsafe fn spoil_share(args: &StagedCombineArgs, gatherer: u32) {
    let (rows, each, warps) = (&args.combine, args.blocks_per_channel, args.gather_warps);
    core::hint::assert_unchecked(each >= 1);
    stride!(channel in gatherer / each..args.channels, (nctaid() - args.stagers) / each => {
        let (begin, end) = channel_range(rows.num_tokens, args.channels, channel);
        spoil::<false>(rows, begin, end, gatherer % each * warps + tid() / 32, each * warps);
    });
}

/// How many blocks of the operation have started before this one, and whether a wait of this rank
/// had expired by then; all threads call it, and get the same. Blocks start in any order, and where
/// not all fit, some start when others have ended. The blocks with the lowest numbers do the work
/// that the others wait for.
///
/// # Safety
/// `local` is live. The ring is laid over the word in shared memory behind the barrier of
/// `wait_ranks_ready`, when all threads have read it.
#[device]
unsafe fn starting_order(comm: &Comm, entry: &ReadyEntry, epoch: u64) -> (u32, bool) {
    const GAVE_UP: u32 = 1 << STARTED_SHIFT;
    if tid() == 0 {
        let started = comm.local.0 + LOCAL_STARTED;
        // The first block of the operation begins to count. A launch has fewer blocks than
        // there is room for below the epoch.
        red_relaxed_gpu_max_u64(started, epoch << STARTED_SHIFT);
        let count = atom_relaxed_gpu_add_u64(started, 1) as u32;
        // By one thread's load: another block may expire between those of two warps, and a stager's
        // warps meet at barriers.
        let gave_up = if entry.has_given_up() { GAVE_UP } else { 0 };
        st_shared_u32(dynamic_shared(), count & (GAVE_UP - 1) | gave_up);
    }
    barrier_sync();
    let start = ld_shared_u32(dynamic_shared());
    (start & (GAVE_UP - 1), start & GAVE_UP != 0)
}

/// The first of the rows that rank `from` returns to rank `to`, among all that it returns, and how
/// many there are.
///
/// # Safety
/// The entries lie inside the matrix.
#[device]
unsafe fn returned(args: &StagedCombineArgs, from: u32, to: u32) -> (u32, u32) {
    let ranks = args.combine.comm.num_ranks;
    let up_to = |to: u32| args.rank_prefix_matrix.array::<u32>().ld(to * ranks + from);
    let end = up_to(to);
    let first = if to == 0 { 0 } else { up_to(to - 1) };
    (first, end - first)
}

/// A block that copies: its share of the parts of the channels of all ranks' rows, a step of each
/// in turn, so that all come along evenly.
///
/// # Safety
/// Rows were planned inside the pool. The words at the peers have this rank as their only writer,
/// and of it this block; the barrier makes the whole block's work happen before the release.
#[device]
unsafe fn stage<const MANY: bool>(args: &StagedCombineArgs, stager: u32, epoch: u64) {
    let (comm, channels, parts) = (&args.combine.comm, args.channels, args.parts as u32);
    core::hint::assert_unchecked(parts >= 1 && comm.num_ranks >= 1);
    // Short steps first, so that peers can begin, then longer ones: a release waits for all
    // that its block has stored, and a device does one after the other.
    let (mut staged, mut step_rows, mut more) = (0, args.step_rows, true);
    while more {
        more = false;
        stride!(number in stager..channels * parts * comm.num_ranks, args.stagers => {
            let (place, source) = (number / comm.num_ranks, number % comm.num_ranks);
            let (channel, part) = (place / parts, place % parts);
            let (first, count) = returned(args, comm.rank, source);
            let entry = args.recv_channel_prefix_matrix.array::<u32>().at(source * channels + channel);
            let begin = ld_u32(entry);
            let end = if channel + 1 < channels { ld_u32(entry + 4) } else { count };
            // The rows of the channel whose number leaves `part` when divided by `parts`.
            let rows = (end - begin + (parts - 1 - part)) / parts;
            if staged < rows {
                let step = step_rows.min(rows - staged);
                let now = staged + step;
                more |= now < rows;
                copy_rows::<MANY>(args, first + begin + part + staged * parts, step);
                barrier_sync();
                // The last warp is the one with least to copy.
                if tid() + 32 == ntid() {
                    let word = pool_at::<MANY>(comm, source) + staged_offset(comm.rank, place);
                    st_release_sys_u64(word, epoch << 32 | now as u64);
                }
            }
        });
        staged += step_rows;
        step_rows = (step_rows * 2).min(args.step_rows * LONGEST_STEP);
    }
}

/// Copies `count` rows of a part, and their weights: row `first` and every `parts`-th one behind
/// it. The whole block calls it.
///
/// # Safety
/// The tensors have all rows that came, which have room in the pool.
#[device]
unsafe fn copy_rows<const MANY: bool>(args: &StagedCombineArgs, first: u32, count: u32) {
    let (rows, comm, parts) = (&args.combine, &args.combine.comm, args.parts as u32);
    let (lane, warp, warps) = (laneid(), tid() / 32, ntid() / 32);
    core::hint::assert_unchecked(parts >= 1);
    let pool = pool_at::<MANY>(comm, comm.rank);
    // A warp copies as much of a row at a time as it has in flight. A row is not empty.
    let pieces = (rows.row_bytes - 1) / IN_FLIGHT_BYTES + 1;
    stride!(item in warp..count * pieces, warps => {
        let (row, at) = ((first + item / pieces * parts) as u64, item % pieces * IN_FLIGHT_BYTES);
        let from = args.x.row(row, args.x_stride) + at as u64;
        let to = DevicePtr(pool + comm.pool.combine_x).row(row, row_stride(rows.row_bytes as u64)) + at as u64;
        copy_bytes(from, to, IN_FLIGHT_BYTES.min(rows.row_bytes - at));
    });
    let mut row = warp;
    while row < count && !args.weights.is_null() {
        if lane < rows.num_topk {
            let entry = row_major(first + row * parts, rows.num_topk, lane);
            let to = Global::<f32>::new(pool + comm.pool.combine_weights);
            st_f32(to.at(entry), args.weights.array::<f32>().ld(entry));
        }
        row += warps;
    }
}

/// The combine rows of the ranks, which may be read as far as the ranks have published them.
struct Staged<'a, P, const MANY: bool> {
    args: &'a StagedCombineArgs,
    ranks: P,
    /// The channel whose tokens are summed.
    channel: u32,
    /// Lane r: rank r's rows before this one are known to be in its pool, from the first of the
    /// channel on. A warp takes rows in ascending order. All else that a wait needs is found out
    /// then, which spares registers.
    known: Cell<u32>,
    /// With many ranks, the rank that `known` is of, which may be another one for each token.
    known_of: Cell<u32>,
}

impl<'a, P: Peers<'a>, const MANY: bool> Contributors for Staged<'a, P, MANY> {
    const FEWER: bool = true;

    #[device]
    unsafe fn row(&self, token: u32) -> i32 {
        self.ranks.row(token)
    }

    #[device]
    fn address(&self, row: i32) -> u64 {
        self.ranks.address(row)
    }

    #[device]
    fn weights(&self, row: i32) -> u64 {
        self.ranks.weights(row)
    }

    /// # Safety
    /// The lane has such a row, so that there is a rank of its number.
    #[device]
    unsafe fn wait(&self, row: i32) {
        let (rank, row) = self.ranks.source(row);
        if row >= self.known.get() || (MANY && rank != self.known_of.get()) {
            self.known.set(wait_staged::<MANY>(self.args, self.channel, rank, row));
            self.known_of.set(rank);
        }
    }

    #[device]
    fn lanes(&self) -> u32 {
        self.ranks.lanes()
    }
}

/// Waits until row `row` of rank `peer`, which is of a token of `channel`, may be read, by the copy
/// engine too. As may all of the channel before the row that this gives: any row, where the wait
/// expired.
///
/// # Safety
/// The word is in this rank's own pool.
#[device]
unsafe fn wait_staged<const MANY: bool>(args: &StagedCombineArgs, channel: u32, peer: u32, row: u32) -> u32 {
    let (comm, parts) = (&args.combine.comm, args.parts as u32);
    let epoch = current_epoch(comm);
    let mut begin = returned(args, peer, comm.rank).0;
    if channel != 0 {
        let earlier = peer * args.channels + channel - 1;
        begin += args.channel_prefix_matrix.array::<u32>().ld(earlier);
    }
    let words = Global::<u64>::new(pool_at::<MANY>(comm, comm.rank) + staged_offset(peer, channel * parts));
    let needed = row - begin + 1;
    let mut wait = PeerWait::new(comm, peer, epoch, Wait::Staged);
    // So many of the channel's rows are there without a gap, by the parts so far.
    let (mut staged, mut part) = (u32::MAX, 0);
    while part < parts {
        let seen = ld_acquire_sys_u64(words.at(part));
        let rows = if (seen >> 32) as u32 == epoch as u32 { seen as u32 } else { 0 };
        let there = rows * parts + part;
        if there >= needed {
            staged = staged.min(there);
            part += 1;
        } else if wait.has_expired() {
            wait.record(needed as u64, there as u64);
            return u32::MAX;
        }
    }
    fence_proxy_async_global();
    begin + staged
}

/// Blocks that a launch has at least: those that copy, and those that gather one channel.
#[cfg(not(target_arch = "nvptx64"))]
fn least_blocks(args: &StagedCombineArgs) -> u32 {
    args.stagers.saturating_add(args.blocks_per_channel)
}

/// Threads that a block has at least: the warps that gather.
#[cfg(not(target_arch = "nvptx64"))]
fn least_threads(args: &StagedCombineArgs) -> u32 {
    args.gather_warps.saturating_mul(32)
}

/// Shared memory of a block: the rings of the warps that gather, then a word for whether it has
/// joined.
#[cfg(not(target_arch = "nvptx64"))]
fn shared_bytes(args: &StagedCombineArgs) -> u32 {
    let rows = &args.combine;
    let joined = super::super::epoch::JOINED_BYTES;
    crate::layout::shared_with_rings(args.gather_warps, rows.slots, rows.slot_bytes, joined)
}
