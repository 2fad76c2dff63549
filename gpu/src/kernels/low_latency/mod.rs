//! Low latency: dispatch and combine of few tokens, where waiting is what takes time.
//!
//! A row of token t from rank s has its place, `s * max_tokens + t`, before anything is counted; so nobody waits before rows leave. Within
//! an operation each rank tells each other one that it has entered, with which call and how many tokens, and that a chunk of its tokens is
//! complete. Nothing is zeroed: words say epochs, packets carry them.
//!
//! Why nothing is overwritten that somebody still reads. What a rank writes into a peer's place, rows, ids and weights, the peer reads until
//! it says that it has returned the rows of their chunk, and a combine ends once all peers have said so of all chunks. So a dispatch into a
//! place whose last dispatch a combine has answered waits for nobody; one into a place without an answer waits until all have entered, which
//! says that all kernels that they were given before have ended ([`LowLatencyControl::ready`](crate::layout::LowLatencyControl)). Returned
//! rows are read within their combine, and between that and the next of the place lies a dispatch that all have entered.

use super::epoch::{Deadline, Phase, aborted, pool_of, record, share, trace};
use crate::layout::{
    Comm, LOCAL_TICKET, LowLatencyArgs, LowLatencyCall, MAX_RANKS, QUANTUM, Wait, call_offset, ready_offset,
};
use crate::simt::*;

mod combine;
mod dispatch;

#[cfg(not(target_arch = "nvptx64"))]
pub use {combine::LowLatencyCombine, dispatch::LowLatencyDispatch};

/// Shared memory of a low-latency kernel, in bytes: tokens of each rank; tokens of an expert from each rank; rows of an expert that each
/// warp has found; whether a wait expired.
pub const LOW_LATENCY_SHARED_BYTES: u32 = (2 * MAX_RANKS as u32 + 32 + 1) * 4;

/// The parts of shared memory, as offsets in the shared window.
struct Shared {
    tokens: u32,
    of_source: u32,
    of_warp: u32,
    expired: u32,
}

impl Shared {
    #[inline(always)]
    fn lay_out() -> Shared {
        let tokens = dynamic_shared();
        let of_source = tokens + MAX_RANKS as u32 * 4;
        let of_warp = of_source + MAX_RANKS as u32 * 4;
        Shared { tokens, of_source, of_warp, expired: of_warp + 32 * 4 }
    }
}

/// Adds a part's share to the word at `word`, behind all that the block has done, and says whether it was the last one; then all that the
/// others did is visible. One warp calls it, behind a barrier of the block.
#[inline(always)]
unsafe fn completes(word: u64, part: u32, parts: u32) -> bool {
    // SAFETY: the caller vouches for the word. What lane 0 acquires is passed on to the warp.
    unsafe {
        let mut last = false;
        // Whoever has a part knows of one.
        core::hint::assert_unchecked(parts >= 1);
        if laneid() == 0 {
            let share = share(part, parts);
            last = (atom_acq_rel_gpu_add_u64(word, share) + share).is_multiple_of(QUANTUM);
        }
        let last = ballot(last) != 0;
        syncwarp();
        last
    }
}

/// Begins a block's part of the operation; all threads call it. Gives the epoch; the place's dispatches, where `turns` are its
/// [`LowLatencyTurns`](crate::layout::LowLatencyTurns); and whether the rank takes part: one that gave up waiting in an operation before
/// sends nothing any more, so that no peer takes what it left undone for done.
#[inline(always)]
unsafe fn begin(args: &LowLatencyArgs, shared: &Shared) -> Begun {
    // SAFETY: `local` and the place's turns are live. Thread 0 asks for the block, since a wait may expire meanwhile in another one.
    unsafe {
        trace(&args.comm, Phase::Enter);
        if tid() == 0 {
            st_shared_u32(shared.expired, aborted(&args.comm) as u32);
        }
        // Stable for a block until it has added its shares, which it does behind a barrier.
        let epoch = ld_relaxed_gpu_u64(args.comm.local.0 + LOCAL_TICKET) / QUANTUM + 1;
        let dispatches = ld_relaxed_gpu_u64(args.tables.turns.0) / QUANTUM;
        barrier_sync();
        Begun { epoch, dispatches, takes_part: ld_shared_u32(shared.expired) == 0 }
    }
}

/// What [`begin`] says.
struct Begun {
    epoch: u64,
    dispatches: u64,
    takes_part: bool,
}

/// Tells every rank that this one has entered the operation, with which call. The first warp of a block that has the least else to do calls
/// it.
#[inline(always)]
unsafe fn tell_call(comm: &Comm, epoch: u64) {
    // SAFETY: pools are mapped; the packet has this rank as its only writer. It is released, since it also says that the kernels before
    // have ended.
    unsafe {
        let lane = laneid();
        if ctaid() == nctaid() - 1 && tid() < comm.num_ranks {
            let packet = epoch << 32 | comm.call;
            st_release_sys_u64(pool_of(comm, lane) + call_offset(comm.rank, epoch), packet);
        }
    }
}

/// Waits until every rank has entered the operation with the call of this one, and notes their numbers of tokens; all threads of the block
/// call it. False when one has not: the same in all threads.
#[inline(always)]
unsafe fn wait_calls(args: &LowLatencyArgs, shared: &Shared, epoch: u64) -> bool {
    // SAFETY: packets are in this rank's own pool; each word of shared memory has one writer, and a barrier behind it.
    unsafe {
        let comm = &args.comm;
        let thread = tid();
        if thread < MAX_RANKS as u32 {
            let mut tokens = 0;
            if thread < comm.num_ranks {
                let packet = pool_of(comm, comm.rank) + call_offset(thread, epoch);
                match wait_packet::<true>(comm, packet, thread, epoch, Wait::LowLatencyEnter) {
                    Some(call) if (call ^ comm.call as u32) & !LowLatencyCall::TOKEN_BITS == 0 => {
                        tokens = (call & LowLatencyCall::TOKEN_BITS).min(args.max_tokens);
                    }
                    Some(call) => {
                        record(comm, 0, thread, epoch, comm.call, call as u64, Wait::LowLatencyOtherCall);
                        st_shared_u32(shared.expired, 1);
                    }
                    None => st_shared_u32(shared.expired, 1),
                }
            }
            st_shared_u32(shared.tokens + thread * 4, tokens);
        }
        barrier_sync();
        trace(comm, Phase::Ready);
        ld_shared_u32(shared.expired) == 0
    }
}

/// Waits for the packet at `packet` in the own pool; `None` when the wait expired. `ACQUIRE`: what it was released behind is visible after
/// it; the data of any packet comes with it, and loads that order nothing are many times cheaper.
#[inline(always)]
unsafe fn wait_packet<const ACQUIRE: bool>(
    comm: &Comm,
    packet: u64,
    peer: u32,
    epoch: u64,
    what: Wait,
) -> Option<u32> {
    // SAFETY: the caller vouches for the address.
    unsafe {
        let mut deadline = Deadline::start();
        loop {
            let seen = if ACQUIRE { ld_acquire_sys_u64(packet) } else { ld_relaxed_sys_u64(packet) };
            if (seen >> 32) as u32 == epoch as u32 {
                return Some(seen as u32);
            }
            if deadline.expired(comm) {
                record(comm, deadline.waited, peer, epoch, epoch, seen >> 32, what);
                return None;
            }
        }
    }
}

/// Waits until all ranks have entered a dispatch into a place that they may still use, having told them of this one. One warp of a block
/// calls it, each block before it sends.
#[inline(always)]
unsafe fn wait_ready(comm: &Comm, epoch: u64) -> bool {
    // SAFETY: pools are mapped; the word at a peer has this rank as its only writer, whichever block stores it.
    unsafe {
        let lane = laneid();
        let mut ready = true;
        if lane < comm.num_ranks {
            if ctaid() == 0 {
                st_release_sys_u64(pool_of(comm, lane) + ready_offset(comm.rank), epoch);
            }
            let word = pool_of(comm, comm.rank) + ready_offset(lane);
            ready = super::epoch::wait_at_least(comm, word, epoch, lane, epoch, Wait::LowLatencyReady);
        }
        ballot(!ready) == 0
    }
}

/// Ends a block's part of the operation; all threads call it.
#[inline(always)]
unsafe fn finish(comm: &Comm) {
    // SAFETY: `local` is live. The end of the kernel publishes the ticket to the next one.
    unsafe {
        barrier_sync();
        trace(comm, Phase::Done);
        if tid_now() == 0 {
            red_relaxed_gpu_add_u64(comm.local.0 + LOCAL_TICKET, share(ctaid(), nctaid()));
        }
    }
}

/// Tokens of chunk `chunk` of a rank with `num_tokens` tokens.
#[inline(always)]
fn tokens_in_chunk(args: &LowLatencyArgs, num_tokens: u32, chunk: u32) -> u32 {
    (num_tokens - chunk * args.chunk_tokens).min(args.chunk_tokens)
}

/// Chunks of a rank with `num_tokens` tokens.
#[inline(always)]
fn chunks_of(args: &LowLatencyArgs, num_tokens: u32) -> u32 {
    num_tokens.div_ceil(args.chunk_tokens)
}

/// Offset of a chunk's word of rank `rank`, in bytes from the start of an array `[MAX_RANKS, chunks]`.
#[inline(always)]
fn chunk_offset(args: &LowLatencyArgs, rank: u32, chunk: u32) -> u64 {
    (rank * chunks_of(args, args.max_tokens) + chunk) as u64 * 8
}

/// Packets with the expert ids of a token.
#[inline(always)]
fn id_packets(args: &LowLatencyArgs) -> u32 {
    args.num_topk.div_ceil(2)
}

/// Offset of a row's first packet of ids, in bytes from the start of a place's.
#[inline(always)]
fn ids_offset(args: &LowLatencyArgs, row: u32) -> u64 {
    (row * id_packets(args)) as u64 * 8
}
