//! Low latency: dispatch and combine of few tokens, where waiting is what takes time.
//!
//! A row of token t from rank s has its place, `s * max_tokens + t`, before anything is counted. So
//! no rank waits before its rows leave. Within an operation, each rank publishes to every other one
//! that it has entered, with its call and its number of tokens. It also publishes each complete
//! chunk of its tokens. Nothing is zeroed: words are epochs, and packets carry them.
//!
//! Invariant: nothing is overwritten while a rank still reads it.
//!
//! - A rank writes ids, weights, words and rows into a peer's place. The peer reads all but the
//!   rows within the dispatch.
//! - The peer reads the rows before it enters the combine that answers the dispatch. It reads rows
//!   that it returns from where they are within that combine, and their owner waits for them.
//! - A peer reads combine rows of this rank's pool within its combine. They are written behind this
//!   rank's next dispatch into the place. A dispatch that ends before a peer has entered it warns
//!   that peer first ([`gave_up`](crate::layout::LowLatencyControl)).
//! - A combine ends once all peers have entered it. So a dispatch does not wait if a combine has
//!   answered the last dispatch into its place.
//! - A dispatch into a place without an answer waits until all peers have entered it. A peer that
//!   has entered has ended all kernels that it was given before
//!   ([`LowLatencyControl::ready`](crate::layout::LowLatencyControl)).
//! - Returned rows are read within their combine. Between that combine and the next one of the
//!   place lies a dispatch that all peers have entered.

use core::marker::PhantomData;

use self::by_expert::Scratch;
use self::ranks::{Few, Many, Ranks, each_rank};
use self::team::Team;
use super::epoch::{Phase, gave_up_before, share, trace, trace_by};
use super::peer_wait::PeerWait;
use super::segments::sum_upto;
use crate::layout::{
    Comm, FEW_RANKS, LOCAL_ABORT, LOCAL_TICKET, LOW_LATENCY_TOKENS_AT_ONCE, LowLatencyArgs, LowLatencyCall,
    LowLatencyDispatchArgs, LowLatencyExpertDispatchArgs, LowLatencyTurns, MAX_MEMBERS, MAX_RANKS,
    PIECE_PACKET_BYTES, QUANTUM, Wait, call_offset, phase, pieces_of, ready_offset,
};
use crate::simt::*;

mod batch;
mod by_expert;
mod combine;
mod dispatch;
mod element;
mod gather;
mod gather_columns;
mod internode;
mod list;
mod mxfp8;
mod ranks;
mod scale_packets;
mod team;
mod wait;

pub use internode::{LOW_LATENCY_INTERNODE_SHARED_BYTES, low_latency_internode_by_expert_shared_bytes};
#[cfg(not(target_arch = "nvptx64"))]
pub use {
    batch::{LowLatencyDispatchBatch, LowLatencyDispatchManyBatch},
    combine::{
        LowLatencyCombineBf16, LowLatencyCombineF16, LowLatencyCombineF32, LowLatencyCombineFp8,
        LowLatencyCombineManyBf16, LowLatencyCombineManyF16, LowLatencyCombineManyF32,
        LowLatencyCombineManyFp8, LowLatencyCombineManyPooled, LowLatencyCombineManySummed,
        LowLatencyCombinePooled, LowLatencyCombineSummed, LowLatencyCombineTwoPooled,
    },
    dispatch::{
        LowLatencyDispatch, LowLatencyDispatchByExpert, LowLatencyDispatchMany,
        LowLatencyDispatchManyByExpert,
    },
    gather::LowLatencyGather,
    gather_columns::LowLatencyGatherColumns,
    internode::{
        LowLatencyInternodeCombineBf16, LowLatencyInternodeCombineF16, LowLatencyInternodeCombineF32,
        LowLatencyInternodeCombineFp8, LowLatencyInternodeDispatch, LowLatencyInternodeDispatchByExpert,
    },
    mxfp8::{
        LowLatencyDispatchByExpertMxfp8, LowLatencyDispatchManyByExpertMxfp8, LowLatencyDispatchManyMxfp8,
        LowLatencyDispatchMxfp8, LowLatencyInternodeDispatchByExpertMxfp8, LowLatencyInternodeDispatchMxfp8,
    },
    scale_packets::{LowLatencyDispatchByExpertScalePackets, LowLatencyDispatchScalePackets},
    wait::{LowLatencyInternodeWait, LowLatencyWait, LowLatencyWaitMany},
};

shared! {
    /// Shared memory of a low-latency kernel for few ranks.
    struct FewShared {
        /// Tokens of each rank.
        tokens: [u32; FEW_RANKS],
        /// Tokens of an expert from each rank.
        of_source: [u32; FEW_RANKS],
        /// Rows of an expert that each warp has found.
        of_warp: [u32; 32],
        /// The words of [`Opened`].
        opened: [u32; 4],
        /// The ranks that the call is published to; four words, so that those behind are aligned.
        call_targets: [u32; 4],
    }
}

shared! {
    /// The same for many ranks.
    struct ManyShared {
        tokens: [u32; MAX_RANKS],
        of_source: [u32; MAX_RANKS],
        of_warp: [u32; 32],
        opened: [u32; 4],
        call_targets: [u32; 4],
        /// Tokens of all ranks in front of each.
        before: [u32; MAX_RANKS],
        /// The high half of each warp's set of ranks.
        ranks_high: [u32; 32],
    }
}

/// Shared memory of a low-latency kernel within a node, [`FewShared`] or [`ManyShared`].
#[derive(Clone, Copy)]
struct NodeShared<R> {
    tokens: SharedArray<u32, MAX_RANKS>,
    of_source: SharedArray<u32, MAX_RANKS>,
    of_warp: SharedArray<u32, 32>,
    opened: SharedArray<u32, 4>,
    call_targets: SharedArray<u32, 4>,
    /// Of many ranks only.
    before: SharedArray<u32, MAX_RANKS>,
    ranks_high: SharedArray<u32, 32>,
    of: PhantomData<R>,
}

/// Shared memory of a low-latency kernel within a node of few ranks, in bytes.
pub const LOW_LATENCY_SHARED_BYTES: u32 = FewShared::BYTES;
/// The same of many ranks.
pub const LOW_LATENCY_MANY_SHARED_BYTES: u32 = ManyShared::BYTES;

/// Shared memory of a dispatch within a node, in bytes: behind the rest, the ranks that the tokens
/// that leave together go to, and their scales.
pub fn low_latency_dispatch_shared_bytes(args: &LowLatencyDispatchArgs) -> u32 {
    if args.common.comm.num_ranks > FEW_RANKS as u32 {
        dispatch_shared_bytes::<Many>(args)
    } else {
        dispatch_shared_bytes::<Few>(args)
    }
}

/// The same of few ranks, or of many.
#[inline(always)]
fn dispatch_shared_bytes<R: Ranks>(args: &LowLatencyDispatchArgs) -> u32 {
    NodeShared::<R>::BYTES + LOW_LATENCY_TOKENS_AT_ONCE * 4 * (Scales::<R>::MASK_WORDS + args.row_scales())
}

/// The same of a dispatch of many tokens: behind the rest, the counts of its lists.
pub fn low_latency_dispatch_batch_shared_bytes(args: &LowLatencyDispatchArgs) -> u32 {
    let room = if args.common.comm.num_ranks > FEW_RANKS as u32 { Many::ROOM } else { Few::ROOM };
    low_latency_dispatch_shared_bytes(args) + batch::words_bytes(room)
}

/// Shared memory of a dispatch within a node that brings rows by expert, in bytes: behind the rest,
/// the words of its counts and places.
pub fn low_latency_by_expert_shared_bytes(args: &LowLatencyExpertDispatchArgs) -> u32 {
    let common = &args.dispatch.common;
    let (ranks, experts) = (common.comm.num_ranks, common.local_experts);
    low_latency_dispatch_shared_bytes(&args.dispatch)
        + if ranks > FEW_RANKS as u32 {
            Scratch::<MAX_RANKS>::bytes(ranks, experts)
        } else {
            Scratch::<MAX_MEMBERS>::bytes(ranks, experts)
        }
}

impl<R: Ranks> NodeShared<R> {
    const BYTES: u32 = if R::MANY { ManyShared::BYTES } else { FewShared::BYTES };

    #[device]
    fn scales(&self) -> Scales<R> {
        Scales { masks: SharedArray::new(self.tokens.at(0) + Self::BYTES), of: PhantomData }
    }

    /// Notes a set of ranks for this warp. One lane calls it.
    ///
    /// # Safety
    /// The words are the warp's; the caller places the barriers.
    #[device]
    unsafe fn set_ranks(&self, ranks: R) {
        let warp = tid() / 32;
        ranks.st_shared(self.of_warp.at(warp), self.ranks_high.at(warp));
    }

    /// The set of ranks that was noted for this warp, the same in all lanes. The whole warp calls
    /// it.
    ///
    /// # Safety
    /// The words are the warp's; the caller places the barriers.
    #[device]
    unsafe fn ranks(&self) -> R {
        let warp = tid() / 32;
        R::ld_shared(self.of_warp.at(warp), self.ranks_high.at(warp)).of_warp()
    }

    /// Notes the ranks that the call is published to. Thread 0 calls it, in front of the barrier of
    /// [`begin`].
    #[device]
    unsafe fn set_call_targets(&self, targets: R) {
        targets.st_shared(self.call_targets.at(0), self.call_targets.at(1));
    }

    /// The ranks that the call is published to.
    ///
    /// # Safety
    /// Behind the barrier of [`begin`]; the words are not written again.
    #[device]
    unsafe fn call_targets(&self) -> R {
        R::ld_shared(self.call_targets.at(0), self.call_targets.at(1))
    }

    /// Tokens of all ranks.
    ///
    /// # Safety
    /// [`wait_calls`] has noted them, in front of a barrier.
    #[device]
    unsafe fn all_tokens(&self) -> u32 {
        if R::MANY {
            let last = MAX_RANKS as u32 - 1;
            return self.before.ld(last) + self.tokens.ld(last);
        }
        let mut all = 0;
        unroll!(8, SOURCE => { all += self.tokens.ld(SOURCE as u32) });
        all
    }

    /// The source, and the index there, of token `number` of all ranks' tokens.
    ///
    /// # Safety
    /// [`wait_calls`] has noted them, in front of a barrier.
    #[device]
    unsafe fn find(&self, number: u32) -> (u32, u32) {
        if R::MANY {
            // The last rank with no more tokens in front of it.
            let (mut source, mut step) = (0, MAX_RANKS as u32 / 2);
            while step != 0 {
                if self.before.ld(source + step) <= number {
                    source += step;
                }
                step /= 2;
            }
            return (source, number - self.before.ld(source));
        }
        let (mut source, mut token) = (0, number);
        unroll!(8, SOURCE => {
            let of_source = self.tokens.ld(SOURCE as u32);
            if source == SOURCE as u32 && token >= of_source {
                (source, token) = (source + 1, token - of_source);
            }
        });
        (source, token)
    }
}

/// The tokens of a dispatch that leave together: the ranks that each goes to, as bits, and behind
/// those their scales `[scales, tokens]`.
#[derive(Clone, Copy)]
struct Scales<R> {
    masks: SharedArray<u32, { LOW_LATENCY_TOKENS_AT_ONCE as usize }>,
    of: PhantomData<R>,
}

impl<R: Ranks> Scales<R> {
    /// Words of a token's ranks, the tokens' first ones first.
    const MASK_WORDS: u32 = 1 + R::MANY as u32;

    /// Notes the ranks of token `number`.
    ///
    /// # Safety
    /// One thread calls it; the caller places the barriers.
    #[device]
    unsafe fn set_ranks(self, number: u32, ranks: R) {
        let high = self.masks.at(LOW_LATENCY_TOKENS_AT_ONCE + number);
        ranks.st_shared(self.masks.at(number), high);
    }

    /// The ranks of token `number`.
    ///
    /// # Safety
    /// Behind a barrier behind [`Scales::set_ranks`].
    #[device]
    unsafe fn ranks(self, number: u32) -> R {
        let high = self.masks.at(LOW_LATENCY_TOKENS_AT_ONCE + number);
        R::ld_shared(self.masks.at(number), high)
    }

    /// Where a scale of token `number` is.
    #[device]
    fn at(self, number: u32, scale: u32) -> u32 {
        self.masks.at(LOW_LATENCY_TOKENS_AT_ONCE * (Self::MASK_WORDS + scale) + number)
    }
}

/// Rows that a block moves before it publishes them. Publishing takes a microsecond, in which the
/// block's first warp moves nothing.
const ROWS_AT_ONCE: u32 = 4;

/// Adds a part's share to the word at `word`, behind the block's stores, and returns whether it was
/// the last part. After the last part, the stores of all other parts are visible. Called behind a
/// barrier of the block.
///
/// # Safety
/// The word is live.
#[device]
unsafe fn completes(word: u64, part: u32, parts: u32) -> bool {
    // No other block has a part, and the caller's barrier orders this block's own stores.
    if parts == 1 {
        return true;
    }
    // `parts >= 1`: callers pass a part of a non-empty set.
    core::hint::assert_unchecked(parts >= 1);
    let share = share(part, parts);
    (atom_acq_rel_gpu_add_u64(word, share) + share).is_multiple_of(QUANTUM)
}

/// The words of device memory that decide how an operation begins. One thread loads them for its
/// block, ahead of everything else, since the loads of all 512 threads would queue up in L2.
struct Opening<R> {
    ticket: u64,
    /// Dispatches into the place before, in shares of `QUANTUM`.
    turns: u64,
    /// The word at [`answered_at`].
    answered: u64,
    left_out: R,
    abort: u32,
    /// Tokens of this rank in the dispatch that a combine answers.
    tokens: u32,
}

impl<R: Ranks> Opening<R> {
    /// Loads the words where `is_needed`: in thread 0.
    ///
    /// # Safety
    /// `local`, the place's turns and its tables are live. Other blocks add to the ticket and the
    /// turns meanwhile, which makes both loads strong; the quotients do not change before this
    /// block has added its shares.
    #[device]
    unsafe fn load<const COMBINE: bool>(args: &LowLatencyArgs, is_needed: bool) -> Self {
        let mut it = Opening { ticket: 0, turns: 0, answered: 0, left_out: R::NONE, abort: 0, tokens: 0 };
        if is_needed {
            it.ticket = ld_relaxed_gpu_u64(args.comm.local.0 + LOCAL_TICKET);
            it.turns = ld_relaxed_gpu_u64(args.tables.turns.0);
            it.answered = ld_relaxed_gpu_u64(answered_at(args));
            it.abort = ld_relaxed_gpu_u32(args.comm.local.0 + LOCAL_ABORT);
            it.left_out = R::left_out(args.comm.local.0);
            if COMBINE {
                it.tokens = args.tables.num_tokens.array::<u32>().ld(args.comm.rank);
            }
        }
        it
    }

    #[device]
    fn epoch(&self) -> u64 {
        self.ticket / QUANTUM + 1
    }

    /// Dispatches into the place before, modulo 2^32.
    #[device]
    fn dispatches(&self) -> u32 {
        (self.turns / QUANTUM) as u32
    }

    /// Whether a combine has answered the last dispatch into the place.
    #[device]
    fn is_answered(&self) -> bool {
        self.dispatches() == self.answered as u32
    }

    /// Whether no dispatch came to the place of this combine. Another block of the combine may have
    /// stored its answer already.
    #[device]
    fn is_unpaired(&self) -> bool {
        self.is_answered() & ((self.answered >> 32) as u32 != self.epoch() as u32)
    }

    /// The ranks that take part: none where this rank takes no part itself. A rank whose
    /// wait expired in an operation before sends nothing any more, so that no peer takes its
    /// unfinished work for complete. Nor does a combine that no dispatch has filled the place for,
    /// or one of other tokens than the dispatch: graphs may be replayed in any order.
    #[device]
    fn members<const COMBINE: bool>(&self, args: &LowLatencyArgs) -> R {
        if self.abort != 0 { R::NONE } else { self.call_targets::<COMBINE>(args) }
    }

    /// The ranks that the call is published to: the members, also behind an abort of this
    /// operation by another block.
    #[device]
    fn call_targets<const COMBINE: bool>(&self, args: &LowLatencyArgs) -> R {
        let is_wrong = COMBINE & (self.is_unpaired() | (self.tokens != args.num_tokens));
        let all = R::all(args.comm.num_ranks);
        if is_wrong | gave_up_before(self.abort, self.epoch()) { R::NONE } else { all.without(self.left_out) }
    }
}

/// Begins a block's part of the operation; all threads call it. Thread 0 decides for the block by
/// `opening`, since a wait may expire meanwhile in another one. `words`: four words of shared
/// memory.
///
/// # Safety
/// Thread 0 writes the words in front of the barrier, and they are not written again.
#[device]
unsafe fn begin<R: Ranks, const COMBINE: bool>(
    args: &LowLatencyArgs,
    opening: &Opening<R>,
    words: SharedArray<u32, 4>,
) -> Opened<R> {
    if tid() == 0 {
        let (epoch, members) = (opening.epoch(), opening.members::<COMBINE>(args));
        if COMBINE && members.is_empty() && opening.abort == 0 {
            let is_unpaired = opening.is_unpaired();
            let what = if is_unpaired { Wait::LowLatencyUnpaired } else { Wait::LowLatencyTokens };
            let (needed, seen) = (opening.tokens as u64, args.num_tokens as u64);
            PeerWait::new(&args.comm, args.comm.rank, epoch, what).record(needed, seen);
        }
        let is_answered = opening.is_answered() as u32;
        st_shared_v4(words.at(0), R::opened_words(epoch, is_answered, members));
    }
    barrier_sync();
    Opened { words, of: PhantomData }
}

/// Address of the place's word for the last answered dispatch, [`LowLatencyTurns::answered`].
#[device]
fn answered_at(args: &LowLatencyArgs) -> u64 {
    field!(args.tables.turns.0, LowLatencyTurns.answered)
}

/// Records that a combine answers the dispatch in its place. Thread 0 of the grid calls it, which has
/// loaded `opening`.
///
/// # Safety
/// The place's turns are live. Other blocks of this operation may read the word before or after.
#[device]
unsafe fn note_answer<R: Ranks>(args: &LowLatencyArgs, opening: &Opening<R>) {
    st_relaxed_sys_u64(answered_at(args), opening.epoch() << 32 | opening.dispatches() as u64);
}

/// The result of [`begin`], the same in all threads of the block. It stays in shared memory,
/// because registers are scarce.
#[derive(Clone, Copy)]
struct Opened<R> {
    /// [`Ranks::opened_words`].
    words: SharedArray<u32, 4>,
    of: PhantomData<R>,
}

impl<R: Ranks> Opened<R> {
    /// # Safety
    /// Written in front of a barrier of `begin`, and never again.
    #[device]
    unsafe fn epoch(&self) -> u64 {
        R::opened_epoch(self.words)
    }

    /// Whether a combine had answered the last dispatch into the place.
    #[device]
    unsafe fn is_answered(&self) -> bool {
        R::is_opened_answered(self.words)
    }

    /// The ranks that are not left out. No rank waits for the others or sends to them. None where
    /// this block takes no part.
    #[device]
    unsafe fn members(&self) -> R {
        R::ld_shared(self.words.at(3), self.words.at(2))
    }

    #[device]
    unsafe fn takes_part(&self) -> bool {
        !self.members().is_empty()
    }

    /// Whether a rank, or any other number, is that of a member.
    #[device]
    unsafe fn has_member(&self, rank: u32) -> bool {
        rank < R::BITS && self.members().has(rank)
    }
}

/// Whether this warp publishes the call of the operation: the last one of the last block, since it
/// has the least else to do.
#[device]
fn publishes_call(args: &LowLatencyArgs) -> bool {
    args.phases & phase::SEND != 0 && ctaid() == nctaid() - 1 && tid() / 32 == last_warp()
}

/// The last warp of a block.
#[device]
fn last_warp() -> u32 {
    ntid() / 32 - 1
}

/// Orders the call of the operation behind the kernels before. The warp that publishes the call
/// does so before anything else: the fence takes three times as long as the loads that decide how
/// the operation begins. Thread 0 loads these meanwhile.
#[device]
unsafe fn fence_call(is_needed: bool) {
    if is_needed {
        fence_acq_rel_sys();
    }
}

/// Whether the call of a dispatch needs a fence of its own. A rank with tokens fences in front of
/// the word of each chunk. Every member waits for all of these before its dispatch ends. So the
/// call gives the number of tokens alone, a microsecond earlier.
#[device]
fn fences_dispatch(args: &LowLatencyArgs, publishes: bool) -> bool {
    publishes & (args.num_tokens == 0)
}

/// Publishes to the ranks of [`NodeShared::call_targets`] that this rank has entered the operation, with
/// which call. The warp of [`fence_call`] calls it, behind the barrier of [`begin`].
///
/// # Safety
/// Pools are mapped; the packet has this rank as its only writer. Fence and store release it,
/// because it also publishes that the kernels before have ended. Without the fence the words of
/// this rank's chunks publish that ([`fences_dispatch`]).
#[device]
unsafe fn store_call<R: Ranks>(args: &LowLatencyArgs, shared: &NodeShared<R>, epoch: u64) {
    let (comm, lane, targets) = (&args.comm, laneid(), shared.call_targets());
    each_rank!(R, lane, rank => {
        if (R::MANY || rank < FEW_RANKS as u32) && targets.has(rank) {
            let packet = epoch << 32 | comm.call;
            let pool = R::pool(comm, rank);
            st_relaxed_sys_u64(pool + call_offset(R::ROOM, comm.rank, epoch), packet);
        }
    });
}

/// Address of the packet of a rank for the operation, in this rank's own pool.
///
/// # Safety
/// The table of pools has every rank.
#[device]
unsafe fn call_of<R: Ranks>(comm: &Comm, rank: u32, epoch: u64) -> u64 {
    R::pool(comm, comm.rank) + call_offset(R::ROOM, rank, epoch)
}

/// Waits until a rank has entered the operation with the call of this one, and gives its number of
/// tokens; `None` where the wait expired or the rank came with another call, which is recorded.
///
/// # Safety
/// Packets are in this rank's own pool.
#[device]
unsafe fn wait_call<R: Ranks>(args: &LowLatencyArgs, rank: u32, epoch: u64) -> Option<u32> {
    let comm = &args.comm;
    let packet = call_of::<R>(comm, rank, epoch);
    let call = PeerWait::new(comm, rank, epoch, Wait::LowLatencyEnter).packet::<true>(packet)?;
    if (call ^ comm.call as u32) & !LowLatencyCall::TOKEN_BITS == 0 {
        return Some((call & LowLatencyCall::TOKEN_BITS).min(args.max_tokens));
    }
    PeerWait::new(comm, rank, epoch, Wait::LowLatencyOtherCall).record(comm.call, call as u64);
    None
}

/// Waits until every member has entered the operation with the call of this one; false, in all
/// lanes, when one has not. The whole warp calls it.
#[device]
unsafe fn have_all_entered<R: Ranks>(args: &LowLatencyArgs, opened: Opened<R>) -> bool {
    let (lane, mut is_here) = (laneid(), true);
    each_rank!(R, lane, rank => {
        is_here &= rank >= R::ROOM
            || !opened.has_member(rank)
            || wait_call::<R>(args, rank, opened.epoch()).is_some();
    });
    let are_here = ballot(!is_here) == 0;
    trace_by(&args.comm, Phase::Ready, || lane == 0);
    are_here
}

/// The wait that a rank whose rows do not come is late for: its entry into the operation, or
/// `rows`.
///
/// # Safety
/// Packets are in this rank's own pool. The packet guards no data, so that its load needs no
/// acquire.
#[device]
unsafe fn late_with<R: Ranks>(comm: &Comm, rank: u32, epoch: u64, rows: Wait) -> Wait {
    let seen = ld_relaxed_sys_u64(call_of::<R>(comm, rank, epoch));
    if (seen >> 32) as u32 == epoch as u32 { rows } else { Wait::LowLatencyEnter }
}

/// In the place of the tokens of a member that has not entered the operation with the same call.
const ABSENT: u32 = u32::MAX;

/// Waits until every member has entered the operation with the call of this one, and notes their
/// numbers of tokens, none of who is left out; all threads of the team call it. False when one has
/// not: the same in all threads.
///
/// # Safety
/// Packets are in this rank's own pool; each word of shared memory has one writer, and a barrier
/// behind it.
#[device]
unsafe fn wait_calls<R: Ranks, const BARRIER: u32>(
    args: &LowLatencyArgs,
    team: Team<BARRIER>,
    shared: &NodeShared<R>,
    opened: &Opened<R>,
) -> bool {
    let (comm, epoch) = (&args.comm, opened.epoch());
    let thread = team.thread();
    if thread < R::ROOM {
        let mut tokens = 0;
        if opened.has_member(thread) {
            tokens = wait_call::<R>(args, thread, epoch).unwrap_or(ABSENT);
        }
        shared.tokens.st(thread, tokens);
    }
    team.sync();
    if R::MANY {
        if team.warp() == 0 {
            note_tokens_before(shared);
        }
        team.sync();
    }
    trace(comm, Phase::Ready);
    have_all_called(shared, opened)
}

/// Notes how many tokens of other ranks come before those of each. One warp calls it, behind a
/// barrier behind the numbers of tokens.
#[device]
unsafe fn note_tokens_before<R: Ranks>(shared: &NodeShared<R>) {
    let lane = laneid();
    let (low, high) = (shared.tokens.ld(lane), shared.tokens.ld(lane + 32));
    // Where a rank is absent the sums wrap, and nothing uses them.
    let add = |a: u32, b: u32| a.wrapping_add(b);
    let (of_low, of_high) = (sum_upto(low, add), sum_upto(high, add));
    shared.before.st(lane, of_low.wrapping_sub(low));
    let all_low = shfl_u32(of_low, 31);
    shared.before.st(lane + 32, add(all_low, of_high).wrapping_sub(high));
}

/// The result of [`wait_calls`], behind a barrier. Whole warps call it.
#[device]
unsafe fn have_all_called<R: Ranks>(shared: &NodeShared<R>, opened: &Opened<R>) -> bool {
    let mut are_here = opened.takes_part();
    if R::MANY {
        each_rank!(R, laneid(), rank => { are_here &= shared.tokens.ld(rank) != ABSENT });
        return ballot(!are_here) == 0;
    }
    unroll!(8, RANK => { are_here &= shared.tokens.ld(RANK as u32) != ABSENT });
    are_here
}

/// Waits for the packet at `packet` in the own pool, that `seen` was loaded from before; `None` when
/// the wait expired.
///
/// # Safety
/// The address is live.
#[device]
unsafe fn packet_seen(comm: &Comm, packet: u64, seen: u64, peer: u32, epoch: u64, what: Wait) -> Option<u32> {
    if (seen >> 32) as u32 == epoch as u32 {
        return Some(seen as u32);
    }
    PeerWait::new(comm, peer, epoch, what).packet::<false>(packet)
}

/// Publishes this rank's entry into a dispatch and waits until all members have entered it with the
/// same call. The place may still be in use, and a rank in another call may go on using it. One warp
/// of a block calls it, each block before it sends.
///
/// # Safety
/// Pools are mapped; word and packet at a peer have this rank as their only writer, whichever block
/// stores them.
#[device]
unsafe fn wait_node_members_ready<R: Ranks>(args: &LowLatencyArgs, opened: &Opened<R>) -> bool {
    let (comm, lane, epoch) = (&args.comm, laneid(), opened.epoch());
    let mut ready = true;
    // Publish to all ranks before waiting for any rank. The last block stores the same call, but may
    // begin only once this one has ended.
    let publish = |rank: u32| {
        let pool = R::pool(comm, rank);
        st_relaxed_sys_u64(pool + call_offset(R::ROOM, comm.rank, epoch), epoch << 32 | comm.call);
        st_release_sys_u64(pool + ready_offset(comm.rank), epoch);
    };
    if R::MANY && ctaid() == 0 && opened.has_member(lane + 32) {
        publish(lane + 32);
    }
    each_rank!(R, lane, rank => {
        if opened.has_member(rank) {
            if ctaid() == 0 && (!R::MANY || rank == lane) {
                publish(rank);
            }
            let pool = R::pool(comm, comm.rank);
            let is_in_other_call = || is_other_call(comm, call_of::<R>(comm, rank, epoch), rank, epoch);
            let word = pool + ready_offset(rank);
            let wait = PeerWait::new(comm, rank, epoch, Wait::LowLatencyReady);
            let is_here = wait.at_least_unless(word, epoch, is_in_other_call);
            ready &= is_here && wait_call::<R>(args, rank, epoch).is_some();
        }
    });
    ballot(!ready) == 0
}

/// Whether the packet at `packet` shows rank `peer` in the operation `epoch` with another call.
/// Another call is recorded.
///
/// # Safety
/// The address is live. The packet guards no data, so that its load needs no acquire.
#[device]
unsafe fn is_other_call(comm: &Comm, packet: u64, peer: u32, epoch: u64) -> bool {
    let seen = ld_relaxed_sys_u64(packet);
    let differs = (seen ^ comm.call) as u32 & !LowLatencyCall::TOKEN_BITS != 0;
    let is_other = (seen >> 32) as u32 == epoch as u32 && differs;
    if is_other {
        let theirs = seen as u32 as u64;
        PeerWait::new(comm, peer, epoch, Wait::LowLatencyOtherCall).record(comm.call, theirs);
    }
    is_other
}

/// Whether a rank with so many tokens gets its rows back as packets. Then no block waits for stores
/// to arrive before it publishes them: the packets are the rows.
#[device]
fn in_packets(args: &LowLatencyArgs, tokens: u32) -> bool {
    tokens <= args.packet_tokens
}

/// The offset `at`, or that of the row's start where the row ends before it: a lane loads something
/// there that it does not use.
#[device]
fn inside(at: u32, row_bytes: u32) -> u32 {
    if at < row_bytes { at } else { 0 }
}

/// Blocks that send pieces: not the last one, if there are others, since it publishes the call
/// ([`publishes_call`]). The fence of that holds back what its block stores, for a microsecond.
#[device]
fn sending_blocks() -> u32 {
    let blocks = (nctaid() - 1).max(1);
    // SAFETY: a maximum with one is not zero.
    unsafe { assume(blocks >= 1) };
    blocks
}

/// A piece of a row that travels as packets or as bytes, [`PIECE_BYTES`](crate::layout::PIECE_BYTES).
type Piece = PieceOf<3>;

/// A piece of a row: the warp that moves it needs no other. `VECTORS`: a lane's vectors of 16 bytes.
struct PieceOf<const VECTORS: usize> {
    /// A rank, and a token of it or for it.
    rank: u32,
    token: u32,
    index: u32,
}

impl<const VECTORS: usize> PieceOf<VECTORS> {
    const BYTES: u32 = VECTORS as u32 * 32 * 16;

    /// Pieces of a row.
    #[device]
    fn count(row_bytes: u32) -> u32 {
        row_bytes.div_ceil(Self::BYTES)
    }

    /// The first piece that the warp sends, `u32::MAX` where it sends none. The warps' pieces
    /// follow each other on different multiprocessors.
    #[device]
    fn first_to_send() -> u32 {
        if ctaid() < sending_blocks() { tid() / 32 * sending_blocks() + ctaid() } else { u32::MAX }
    }

    /// The first piece that the warp receives: from the last block on, since the first ones send.
    #[device]
    fn first_to_receive() -> u32 {
        tid() / 32 * nctaid() + nctaid() - 1 - ctaid()
    }

    /// Piece number `number` of those of `ranks` ranks' tokens, all ranks' first tokens first.
    #[device]
    fn of(number: u32, row_bytes: u32, ranks: u32) -> Self {
        let pieces = Self::count(row_bytes);
        // SAFETY: a row has bytes, and a group ranks: the kernels' contracts.
        unsafe { core::hint::assert_unchecked(pieces >= 1 && ranks >= 1) };
        let row = number / pieces;
        PieceOf { rank: row % ranks, token: row / ranks, index: number % pieces }
    }

    /// Where the lane's vector `vector` begins in the row, in bytes: behind its end where
    /// there is none.
    #[device]
    fn at(&self, vector: u32) -> u32 {
        self.index * Self::BYTES + (vector * 32 + laneid()) * 16
    }
}

impl Piece {
    /// Offset of its packets, in bytes from the start of an array
    /// `[num_ranks * packet_tokens, pieces]`.
    #[device]
    fn offset(&self, args: &LowLatencyArgs, row_bytes: u32, rank: u32) -> u64 {
        let row = rank * args.packet_tokens + self.token;
        (row * pieces_of(row_bytes) + self.index) as u64 * PIECE_PACKET_BYTES as u64
    }
}

/// Stores a lane's packets of the piece at `at`.
///
/// # Safety
/// The address is live.
#[device]
unsafe fn send_packets(at: u64, vectors: &[[u32; 4]; 3], epoch: u64) {
    let (at, [a, b, c], epoch) = (Global::<[u32; 4]>::new(at).at(laneid()), vectors, epoch as u32);
    st_relaxed_sys_b128(at, [a[0], a[1], a[2], epoch]);
    st_relaxed_sys_b128(at + 512, [b[0], b[1], b[2], epoch]);
    st_relaxed_sys_b128(at + 1024, [c[0], c[1], c[2], epoch]);
    st_relaxed_sys_b128(at + 1536, [a[3], b[3], c[3], epoch]);
}

/// A lane's packets of the piece at `at`, as far as they are there.
///
/// # Safety
/// The address is live.
#[device]
unsafe fn load_packets(at: u64) -> [[u32; 4]; 4] {
    let at = Global::<[u32; 4]>::new(at).at(laneid());
    [
        ld_relaxed_sys_b128(at),
        ld_relaxed_sys_b128(at + 512),
        ld_relaxed_sys_b128(at + 1024),
        ld_relaxed_sys_b128(at + 1536),
    ]
}

/// Whether a packet of the piece that `packets` are of has not come. The whole warp calls it.
#[device]
unsafe fn is_piece_late([a, b, c, d]: [[u32; 4]; 4], epoch: u32) -> bool {
    let late = (a[3] ^ epoch) | (b[3] ^ epoch) | (c[3] ^ epoch) | (d[3] ^ epoch);
    ballot(late != 0) != 0
}

/// Waits until all packets of the piece at `at` are there, of which `seen` was loaded before, and
/// gives the lane's vectors; in all lanes the ns that it waited when the wait expired, which the
/// caller records. The whole warp calls it.
///
/// # Safety
/// The address is live. All lanes have the same wait.
#[device]
unsafe fn wait_piece(mut wait: PeerWait, at: u64, seen: [[u32; 4]; 4]) -> Result<[[u32; 4]; 3], u64> {
    let (mut packets, epoch) = (seen, wait.epoch as u32);
    loop {
        let [a, b, c, d] = packets;
        if !is_piece_late(packets, epoch) {
            return Ok([[a[0], a[1], a[2], d[0]], [b[0], b[1], b[2], d[1]], [c[0], c[1], c[2], d[2]]]);
        }
        if ballot(wait.has_expired()) != 0 {
            return Err(wait.waited);
        }
        packets = load_packets(at);
    }
}

/// Lets the next kernel of the stream launch while this one waits, where it has few tokens. With
/// more tokens that does not pay behind a combine and behind rows by expert. A dispatch without them
/// always does so.
#[device]
fn let_next_launch(args: &LowLatencyArgs) {
    if in_packets(args, args.num_tokens) {
        griddepcontrol_launch_dependents();
    }
}

/// Ends a block's part of the operation; all threads call it.
///
/// # Safety
/// All threads are here.
#[device]
unsafe fn finish(comm: &Comm) {
    barrier_sync();
    add_share(comm);
}

/// Adds the block's share to the ticket. All threads call it, behind a barrier with which the
/// block's part of the operation ends.
///
/// # Safety
/// `local` is live. The end of the kernel publishes the ticket to the next one.
#[device]
unsafe fn add_share(comm: &Comm) {
    trace(comm, Phase::Done);
    if tid_now() == 0 {
        red_relaxed_gpu_add_u64(comm.local.0 + LOCAL_TICKET, share(ctaid(), nctaid()));
    }
}

/// Tokens of chunk `chunk` of a rank with `num_tokens` tokens.
#[device]
fn tokens_in_chunk(args: &LowLatencyArgs, num_tokens: u32, chunk: u32) -> u32 {
    (num_tokens - chunk * args.chunk_tokens).min(args.chunk_tokens)
}

/// Chunks of a rank with `num_tokens` tokens.
#[device]
fn chunks_of(args: &LowLatencyArgs, num_tokens: u32) -> u32 {
    num_tokens.div_ceil(args.chunk_tokens)
}

/// Offset of a chunk's word of rank `rank`, in bytes from the start of an array
/// `[room, chunks]`.
#[device]
fn chunk_offset(args: &LowLatencyArgs, rank: u32, chunk: u32) -> u64 {
    (rank * chunks_of(args, args.max_tokens) + chunk) as u64 * 8
}

/// Packets with the expert ids of a token.
#[device]
fn id_packets(args: &LowLatencyArgs) -> u32 {
    args.num_topk.div_ceil(2)
}

/// Offset of a row's first packet of ids, in bytes from the start of a place's.
#[device]
fn ids_offset(args: &LowLatencyArgs, row: u32) -> u64 {
    (row * id_packets(args)) as u64 * 8
}
