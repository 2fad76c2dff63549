//! Low-latency dispatch: every token's row goes to each rank that has one of its experts, once, at
//! its final place.
//!
//! Soundness: a row has one writer, one block of one rank, and is read only behind that rank's word
//! for its chunk. The block that sent the chunk's last token releases the word, and has acquired
//! the stores of the chunk's other blocks. A packet, of ids or of a weight, has one writer, one
//! warp of one rank. It is read together with its epoch: all of it or nothing. An expert's tables
//! have one block. A barrier, of all warps of a block or of those that receive, stands between the
//! writers and the readers of each word of shared memory. Collectives stand where all lanes of a
//! warp arrive.
//!
//! The call of a rank with tokens is stored without a fence. What the rank did before is released
//! by the words of its chunks, all of which a dispatch acquires before it ends. A dispatch that a
//! chunk does not reach fails. Then nothing orders the rank's kernels before but that its launch
//! stands behind them in its stream: they had ended before the call was stored.
//!
//! Blocks that receive wait for packets and rows of blocks that send, as for those of other ranks:
//! a launch of both halves is resident as a whole.

use super::super::epoch::{Phase, note_missing_token, share, trace, trace_by};
use super::super::fp8::{from_bf16, mx_quantised, quantised};
use super::super::ids::{Id, place, recorded_token};
use super::super::peer_wait::PeerWait;
use super::batch;
use super::by_expert::{Arrivals, Home, Placing, RowShape, Scratch};
use super::list::{Listed, Words, list_few_rows, list_rows};
use super::ranks::{Few, Many, Ranks, each_pool};
use super::scale_packets;
use super::team::Team;
use super::{
    NodeShared, Opened, Opening, Scales, begin, chunk_offset, chunks_of, completes, dispatch_shared_bytes,
    fence_call, fences_dispatch, finish, have_all_called, id_packets, ids_offset, last_warp, let_next_launch,
    packet_seen, publishes_call, store_call, tokens_in_chunk, wait_calls, wait_node_members_ready,
};
use crate::layout::{
    Comm, FEW_RANKS, FEW_TOKENS, GIVING_UP_NS, LOW_LATENCY_TOKENS_AT_ONCE, LowLatencyArgs, LowLatencyCall,
    LowLatencyDispatchArgs, LowLatencyExpertDispatchArgs, LowLatencyExpertRows, MAX_MEMBERS, MAX_RANKS,
    Quantise, SCALE_BLOCK, Wait, gave_up_offset, phase, row_stride, sends_scale_packets,
};
use crate::simt::*;

few_and_many! {
    kernel(
        threads = 512, registers = 128, dependent,
        block = 512, shared = super::low_latency_dispatch_shared_bytes(&args)
    );
    few(barriers = 10) many(barriers = 11);
    requires(..LowLatencyArgs(args.common));
    ranks(args.common.comm);
    fn(args: LowLatencyDispatchArgs);

    /// Sends rows, or waits for them and lists each expert's rows, or both.
    low_latency_dispatch, low_latency_dispatch_many<R> { dispatch::<R, false, false, false>(&args) }
}

/// `MX`: whether rows are quantised as [`Quantise::Mxfp8`]. The kernels that quantise otherwise, or
/// not at all, have no instruction for it. `BATCH`: whether blocks share their work as in [`batch`].
/// `PACKS`: whether scales travel as [`scale_packets`].
#[device]
pub(super) unsafe fn dispatch<R: Ranks, const MX: bool, const BATCH: bool, const PACKS: bool>(
    args: &LowLatencyDispatchArgs,
) {
    let comm = &args.common.comm;
    let shared = R::shared();
    let sends = args.common.phases & phase::SEND != 0;
    trace(comm, Phase::Enter);
    let publishes = publishes_call(&args.common);
    fence_call(fences_dispatch(&args.common, publishes));
    let opening = Opening::<R>::load::<false>(&args.common, tid() == 0);
    let roles = if BATCH { Roles::of_batch(&args.common) } else { Roles::together() };
    let (lists, moves) = if BATCH && roles.are_apart {
        // A block has one of the two.
        (Team { first: 0, threads: ntid() }, Team { first: 0, threads: ntid() })
    } else {
        teams(&args.common, roles)
    };
    let work = Work::of_warp::<BATCH>(&args.common, roles, lists);
    let first = TokenAhead::first(args, moves, &work, sends);
    // Warps of a batch announce one token and move another.
    let moved_entry = TopkEntry::of(args, work.tokens.first, BATCH && sends && !work.tokens.is_empty());
    if tid() == 0 {
        shared.set_call_targets(opening.call_targets::<false>(&args.common));
    }
    let opened = begin::<R, false>(&args.common, &opening, shared.opened);
    if publishes {
        store_call(&args.common, &shared, opened.epoch());
    }
    if sends {
        send::<R, MX, PACKS, BATCH>(args, &work, moves, &shared, &opened, first, moved_entry);
        trace_by(comm, Phase::Moved, || tid() == moves.first);
    }
    griddepcontrol_launch_dependents();
    if args.common.phases & phase::RECEIVE != 0 {
        if let Some(blocks) = roles.receivers() {
            receive::<R, BATCH, PACKS>(args, lists, blocks, &shared, &opened);
        }
        finish(comm);
    }
}

few_and_many! {
    kernel(
        threads = 512, registers = 128, dependent,
        block = 512, shared = super::low_latency_by_expert_shared_bytes(&args)
    );
    few(barriers = 21) many(barriers = 20);
    requires(
        ..LowLatencyArgs(args.dispatch.common),
        ..LowLatencyDispatchArgs(args.dispatch),
        ..LowLatencyExpertRows(args.to)
    );
    ranks(args.dispatch.common.comm);
    fn(args: LowLatencyExpertDispatchArgs);

    /// The same as [`LowLatencyDispatch`], and copies each row to the segments of its experts as soon as
    /// it has come.
    low_latency_dispatch_by_expert, low_latency_dispatch_many_by_expert<R> {
        dispatch_by_expert::<R, { most_ranks::<R>() }, false, false>(&args)
    }
}

/// The ranks that tables in shared memory have room for.
pub(super) const fn most_ranks<R: Ranks>() -> usize {
    if R::MANY { MAX_RANKS } else { MAX_MEMBERS }
}

/// `MOST`: as of [`most_ranks`]. `MX` and `PACKS`: as of [`dispatch`].
#[device]
pub(super) unsafe fn dispatch_by_expert<R: Ranks, const MOST: usize, const MX: bool, const PACKS: bool>(
    args: &LowLatencyExpertDispatchArgs,
) {
    let comm = &args.dispatch.common.comm;
    let shared = R::shared();
    let sends = args.dispatch.common.phases & phase::SEND != 0;
    trace(comm, Phase::Enter);
    let publishes = publishes_call(&args.dispatch.common);
    fence_call(fences_dispatch(&args.dispatch.common, publishes));
    let opening = Opening::<R>::load::<false>(&args.dispatch.common, tid() == 0);
    let roles = Roles::apart(&args.dispatch.common);
    let (lists, moves) = teams(&args.dispatch.common, roles);
    let work = Work::of_warp::<false>(&args.dispatch.common, roles, lists);
    let first = TokenAhead::first(&args.dispatch, moves, &work, sends);
    if tid() == 0 {
        shared.set_call_targets(opening.call_targets::<false>(&args.dispatch.common));
    }
    let opened = begin::<R, false>(&args.dispatch.common, &opening, shared.opened);
    if publishes {
        store_call(&args.dispatch.common, &shared, opened.epoch());
    }
    if sends {
        let unused = TopkEntry::of(&args.dispatch, 0, false);
        send::<R, MX, PACKS, false>(&args.dispatch, &work, moves, &shared, &opened, first, unused);
        trace_by(comm, Phase::Moved, || tid() == moves.first);
    }
    let_next_launch(&args.dispatch.common);
    if args.dispatch.common.phases & phase::RECEIVE != 0 {
        if let Some(blocks) = roles.receivers() {
            receive_by_expert::<R, MOST, PACKS>(args, roles, blocks, &shared, &opened);
        }
        finish(comm);
    }
}

/// Warps that list rows while the others of a block move them.
const LISTING_WARPS: u32 = 8;

/// The warps that list received rows, and those that move rows. Where a block has one of few tokens,
/// all warps move it, and then all but the last one list rows; otherwise half of them list while
/// the other half moves rows.
#[device]
fn teams(args: &LowLatencyArgs, roles: Roles) -> (Team<1>, Team<2>) {
    let (all, listing) = (ntid(), LISTING_WARPS * 32);
    if overlaps(args, roles) {
        (Team { first: 0, threads: listing }, Team { first: listing, threads: all - listing })
    } else {
        (Team { first: 0, threads: last_warp() * 32 }, Team { first: 0, threads: all })
    }
}

/// Whether a block lists rows while it moves rows.
#[device]
fn overlaps(args: &LowLatencyArgs, roles: Roles) -> bool {
    args.phases == phase::SEND | phase::RECEIVE
        && !roles.are_apart
        && (roles.have_several(args) || args.num_tokens > FEW_TOKENS / 2)
        && last_warp() >= LISTING_WARPS
}

/// Tokens of this rank that a block sends, one after the other, so that words in adjacent memory
/// are stored together.
#[derive(Clone, Copy)]
struct Tokens {
    first: u32,
    end: u32,
}

impl Tokens {
    /// `BATCH`: some blocks have one token more than the others. Otherwise the last one may have
    /// fewer, and others none.
    #[device]
    fn of_block<const BATCH: bool>(args: &LowLatencyArgs, roles: Roles) -> Tokens {
        if BATCH {
            // SAFETY: a grid has blocks that send.
            unsafe { core::hint::assert_unchecked(roles.senders >= 1) };
            let (each, more) = (args.num_tokens / roles.senders, args.num_tokens % roles.senders);
            let first = ctaid() * each + ctaid().min(more);
            let end = first + each + (ctaid() < more) as u32;
            return Tokens { first, end: end.min(args.num_tokens) };
        }
        let mut each = 1;
        if roles.have_several(args) {
            // SAFETY: where there are tokens, blocks send them.
            unsafe { core::hint::assert_unchecked(roles.senders >= 1) };
            each = args.num_tokens.div_ceil(roles.senders);
        }
        let first = ctaid() * each;
        Tokens { first, end: (first + each).min(args.num_tokens) }
    }

    #[device]
    fn is_empty(self) -> bool {
        self.first >= self.end
    }
}

/// Some of a grid's blocks, which follow each other, and the number of this one among them.
#[derive(Clone, Copy)]
pub(super) struct Blocks {
    pub(super) number: u32,
    pub(super) count: u32,
}

impl Blocks {
    /// All blocks of the grid.
    #[device]
    pub(super) fn all() -> Blocks {
        Blocks { number: ctaid(), count: nctaid() }
    }
}

/// Which blocks send rows: the first ones. The others receive, if the two are apart.
#[derive(Clone, Copy)]
struct Roles {
    senders: u32,
    are_apart: bool,
}

impl Roles {
    /// All blocks send and receive.
    #[device]
    fn together() -> Roles {
        Roles { senders: nctaid(), are_apart: false }
    }

    /// Blocks with a token send it, and the others receive, where those are at least half of all: a
    /// load waits in its multiprocessor behind the stores of a row.
    #[device]
    fn apart(args: &LowLatencyArgs) -> Roles {
        if args.phases != phase::SEND | phase::RECEIVE || args.num_tokens > nctaid() / 2 {
            return Roles::together();
        }
        Roles { senders: args.num_tokens, are_apart: true }
    }

    /// A batch is listed by blocks that send nothing, where a grid has enough blocks.
    #[device]
    fn of_batch(args: &LowLatencyArgs) -> Roles {
        if args.phases != phase::SEND | phase::RECEIVE || batch::listers() == 0 {
            return Roles::together();
        }
        Roles { senders: nctaid() - batch::listers(), are_apart: true }
    }

    /// Whether blocks send more than one token.
    #[device]
    fn have_several(self, args: &LowLatencyArgs) -> bool {
        args.num_tokens > self.senders
    }

    /// The blocks that receive, if this is one.
    #[device]
    fn receivers(self) -> Option<Blocks> {
        if !self.are_apart {
            return Some(Blocks::all());
        }
        if ctaid() < self.senders {
            return None;
        }
        Some(Blocks { number: ctaid() - self.senders, count: nctaid() - self.senders })
    }
}

/// Tokens whose ids a warp sends ahead of all rows: each `step`th from `first` on.
#[derive(Clone, Copy)]
struct Announced {
    first: u32,
    end: u32,
    step: u32,
}

impl Announced {
    /// Those of this warp. Of a batch, blocks announce what they send. Otherwise blocks that only
    /// receive have one each at most: they are no fewer than tokens.
    #[device]
    fn of_warp<const BATCH: bool>(
        args: &LowLatencyArgs,
        roles: Roles,
        lists: Team<1>,
        tokens: Tokens,
    ) -> Announced {
        let warp = tid() / 32;
        if BATCH && roles.are_apart {
            return Announced { first: tokens.first + warp, end: tokens.end, step: ntid() / 32 };
        }
        if roles.are_apart {
            if let Some(Blocks { number, .. }) = roles.receivers()
                && warp == 0
            {
                return Announced { first: number, end: args.num_tokens, step: args.num_tokens };
            }
        } else if overlaps(args, roles) && lists.has_this_warp() {
            return Announced { first: tokens.first + warp, end: tokens.end, step: LISTING_WARPS };
        }
        Announced { first: 0, end: 0, step: 1 }
    }
}

/// The tokens that a block sends, and those that a warp of it announces.
struct Work {
    roles: Roles,
    tokens: Tokens,
    announced: Announced,
}

impl Work {
    #[device]
    fn of_warp<const BATCH: bool>(args: &LowLatencyArgs, roles: Roles, lists: Team<1>) -> Work {
        let tokens = Tokens::of_block::<BATCH>(args, roles);
        Work { roles, tokens, announced: Announced::of_warp::<BATCH>(args, roles, lists, tokens) }
    }
}

/// A thread's first loads of a token. Loads that are in flight together take the time of one.
struct TokenAhead {
    entry: TopkEntry,
    /// The thread's share of the first turn through the row.
    pair: Pair,
}

impl TokenAhead {
    /// Loads for the first token that the block moves, and the entry of the first one that the warp
    /// announces. No warp has both.
    ///
    /// # Safety
    /// Inputs are there from the kernel's start.
    #[device]
    unsafe fn first(args: &LowLatencyDispatchArgs, moves: Team<2>, work: &Work, sends: bool) -> TokenAhead {
        let Work { tokens, announced, .. } = *work;
        let moves_row = sends & moves.has_this_warp() & !tokens.is_empty();
        let announces = sends & (announced.first < announced.end);
        let token = if announces { announced.first } else { tokens.first };
        TokenAhead {
            entry: TopkEntry::of(args, token, moves_row | announces),
            pair: Pair::of(args, moves, tokens.first, 0, moves_row),
        }
    }

    /// Loads for token `token`, if `is_there`.
    ///
    /// # Safety
    /// Inputs are there from the kernel's start.
    #[device]
    unsafe fn of(args: &LowLatencyDispatchArgs, moves: Team<2>, token: u32, is_there: bool) -> TokenAhead {
        TokenAhead {
            entry: TopkEntry::of(args, token, is_there),
            pair: Pair::of(args, moves, token, 0, is_there),
        }
    }
}

/// The lane's entry of a token.
pub(super) struct TopkEntry {
    pub(super) id: Id,
    pub(super) weight: f32,
}

impl TopkEntry {
    /// # Safety
    /// Inputs are there from the kernel's start.
    #[device]
    pub(super) unsafe fn of(args: &LowLatencyDispatchArgs, token: u32, is_there: bool) -> TopkEntry {
        let at = (token * args.common.num_topk + laneid()) as u64;
        let mut entry = TopkEntry { id: Id::NONE, weight: 1.0 };
        if is_there && laneid() < args.common.num_topk {
            entry.id = Id::load(args.topk_idx, args.narrow_ids, at);
            if !args.topk_weights.is_null() {
                entry.weight = args.topk_weights.array::<f32>().ld(at);
            }
        }
        entry
    }
}

/// A thread's two vectors of a turn through a row, 32 bytes for each thread of the team: as rows
/// travel, a team's worth of 16 bytes apart, so that a warp's stores are whole lines; of rows that
/// are quantised first, the two that make one.
pub(super) struct Pair {
    pub(super) first: [u32; 4],
    pub(super) second: [u32; 4],
}

impl Pair {
    /// Offsets of the two in the row at `x`.
    #[device]
    pub(super) fn offsets<const BARRIER: u32>(
        args: &LowLatencyDispatchArgs,
        moves: Team<BARRIER>,
        turn: u32,
    ) -> (u32, u32) {
        let (start, thread) = (turn * moves.threads * 32, moves.thread());
        if args.quantise == Quantise::None as u32 {
            (start + thread * 16, start + thread * 16 + moves.threads * 16)
        } else {
            (start + thread * 32, start + thread * 32 + 16)
        }
    }

    /// Zeros where the row ends before them.
    ///
    /// # Safety
    /// Loads that are made lie in the row.
    #[device]
    pub(super) unsafe fn of<const BARRIER: u32>(
        args: &LowLatencyDispatchArgs,
        moves: Team<BARRIER>,
        token: u32,
        turn: u32,
        is_there: bool,
    ) -> Pair {
        let bytes = bytes_of_x(args);
        let from = args.x.row(token, bytes);
        let (first, second) = Pair::offsets(args, moves, turn);
        Pair {
            first: ld_stream_v4_if(is_there & (first < bytes), from + first as u64),
            second: ld_stream_v4_if(is_there & (second < bytes), from + second as u64),
        }
    }
}

/// Bytes of a row at `x`.
#[device]
pub(super) fn bytes_of_x(args: &LowLatencyDispatchArgs) -> u32 {
    if args.quantise == Quantise::None as u32 { args.row_bytes } else { args.row_bytes * 2 }
}

/// Sends the block's tokens. `MX`, `PACKS` and `BATCH`: as of [`dispatch`]. `moved_entry`: of a batch,
/// the entry of the first token that the block moves.
#[device]
unsafe fn send<R: Ranks, const MX: bool, const PACKS: bool, const BATCH: bool>(
    args: &LowLatencyDispatchArgs,
    work: &Work,
    moves: Team<2>,
    shared: &NodeShared<R>,
    opened: &Opened<R>,
    first: TokenAhead,
    moved_entry: TopkEntry,
) {
    let Work { roles, tokens, announced } = *work;
    let (common, comm) = (&args.common, &args.common.comm);
    let (thread, warp, lane) = (tid(), tid() / 32, laneid());
    let mut takes_part = opened.takes_part();
    // A place that no combine has answered since its last dispatch may be in use: then all wait
    // for all.
    if !opened.is_answered() {
        let is_ready = !takes_part || warp != 0 || wait_node_members_ready(common, opened);
        takes_part &= !barrier_any(!is_ready);
    }
    // The kernel that waits for rows may be another one, of another grid: the turn belongs to
    // this half. All threads have read it in front of a barrier.
    if thread == 0 {
        red_relaxed_gpu_add_u64(common.tables.turns.0, share(ctaid(), nctaid()));
    }
    // Ids first: all ranks list rows by them while rows are under way.
    let (mut token, mut ahead) = (announced.first, first);
    while token < announced.end && takes_part {
        let row = comm.rank * common.max_tokens + token;
        let ranks = send_ids(args, token, row, &ahead.entry, true, opened);
        if lane == 0 {
            common.tables.token_ranks.array::<R>().st(token, ranks);
        }
        token += announced.step;
        ahead.entry = TopkEntry::of(args, token, token < announced.end);
    }
    if BATCH && roles.are_apart {
        ahead.entry = moved_entry;
    }
    if !moves.has_this_warp() {
        return;
    }
    let announces_first = overlaps(common, roles) | roles.are_apart;
    let (mut token, mut unsaid) = (tokens.first, 0);
    let packs_scales = PACKS && sends_scale_packets(common.num_tokens);
    let keeps_scales = (packs_scales || roles.have_several(common)) && args.row_scales() != 0;
    let scales = if keeps_scales { Some(shared.scales()) } else { None };
    while token < tokens.end && takes_part {
        let row = comm.rank * common.max_tokens + token;
        let ranks = send_ids(args, token, row, &ahead.entry, !announces_first & (warp == 0), opened);
        if !announces_first && thread == 0 {
            common.tables.token_ranks.array::<R>().st(token, ranks);
        }
        if let Some(scales) = scales
            && moves.thread() == 0
        {
            scales.set_ranks(unsaid, ranks);
        }
        let next = token + 1;
        let load_next = || TokenAhead::of(args, moves, next, next < tokens.end);
        // A load waits behind the stores in front of it.
        let loaded = if BATCH { Some(load_next()) } else { None };
        send_row::<R, MX>(args, moves, token, row, ranks, ahead.pair, scales.map(|scales| (scales, unsaid)));
        // On its way while the block waits below.
        ahead = match loaded {
            Some(next) => next,
            None => load_next(),
        };
        unsaid += 1;
        if unsaid == LOW_LATENCY_TOKENS_AT_ONCE || next >= tokens.end {
            moves.sync();
            if let Some(scales) = scales {
                if packs_scales {
                    scale_packets::send(args, moves, next - unsaid, unsaid, scales, opened.epoch());
                } else {
                    send_scales(args, moves, next - unsaid, unsaid, scales);
                }
                moves.sync();
            }
            if warp == last_warp() && lane < unsaid {
                say_sent(args, token - lane, opened);
            }
            unsaid = 0;
        }
        token = next;
    }
}

/// Adds a token that the block has sent to its chunk. After the chunk's last token it publishes the
/// chunk to all members. The last warp calls it, which waits until all of it has arrived: that
/// takes as long as the links do. The warp does nothing else from the block's last row on, and the
/// others do not wait for it.
///
/// # Safety
/// The fence and each store behind it release the block's stores in front of its barrier, and the
/// stores that the last of a chunk's blocks has acquired.
#[device]
unsafe fn say_sent<R: Ranks>(args: &LowLatencyDispatchArgs, token: u32, opened: &Opened<R>) {
    let (common, comm) = (&args.common, &args.common.comm);
    let chunk = token / common.chunk_tokens;
    let parts = tokens_in_chunk(common, common.num_tokens, chunk);
    let word = common.tables.sent.array::<u64>().at(chunk);
    if completes(word, token - chunk * common.chunk_tokens, parts) {
        fence_acq_rel_sys();
        let (members, epoch) = (opened.members(), opened.epoch());
        let word = common.place.arrived + chunk_offset(common, comm.rank, chunk);
        each_pool!(R, comm, members, pool => { st_relaxed_sys_u64(pool + word, epoch) });
    }
}

/// The ranks that a token goes to. `sends`: whether to send every member the token's
/// entries for its experts, with their weights. The whole warp calls it.
#[device]
unsafe fn send_ids<R: Ranks>(
    args: &LowLatencyDispatchArgs,
    token: u32,
    row: u32,
    entry: &TopkEntry,
    sends: bool,
    opened: &Opened<R>,
) -> R {
    let (common, comm) = (&args.common, &args.common.comm);
    let (lane, epoch) = (laneid(), opened.epoch());
    let members = opened.members();
    let experts = (common.local_experts * comm.num_ranks) as i64;
    let id = entry.id.value(args.narrow_ids);
    let expert = place(&args.table, id, token, comm.rank, experts as u32);
    let is_id = expert >= 0 && expert < experts;
    if expert >= experts || expert < -1 {
        // Peers get the token's other entries, and the tokens of blocks that begin later.
        let named = recorded_token(&args.table, token);
        let failure = PeerWait::new(comm, comm.rank, epoch, Wait::LowLatencyExpert);
        failure.note(named, expert as u64);
        note_missing_token(comm, token);
    }
    let expert = expert as u32;
    let rank = expert / common.local_experts;
    let local = expert - rank * common.local_experts;
    // The experts on ranks that are left out add nothing to a token's sum.
    let is_known = is_id && members.has(rank & (R::BITS - 1));
    let ranks = (if is_known { R::only(rank) } else { R::NONE }).of_warp();
    if !sends {
        return ranks;
    }
    let of_lane = if is_known { rank << 16 | local } else { u32::MAX };
    let id_of = |of: u32, rank: u32| if of >> 16 == rank { of & 0xffff } else { 0xffff };
    if R::MANY {
        // The packets of all ranks, side by side. Lanes from the last one on have none.
        let packets = id_packets(common);
        core::hint::assert_unchecked(packets >= 1);
        stride!(first in 0..comm.num_ranks * packets, 32 => {
            let (to, packet) = ((first + lane) / packets, (first + lane) % packets);
            let low = shfl_u32(of_lane, (packet * 2) & 31);
            let high = shfl_u32(of_lane, (packet * 2 + 1) & 31);
            if to < comm.num_ranks && members.has(to) {
                let ids = epoch << 32 | (id_of(high, to) << 16 | id_of(low, to)) as u64;
                let at = R::pool(comm, to) + common.place.ids + ids_offset(common, row);
                st_relaxed_sys_u64(Global::<u64>::new(at).at(packet), ids);
            }
        });
    } else {
        // Lane w has packet w, of the entries 2 w and 2 w + 1; lanes from 16 on have none, and
        // their sources are any.
        let low = shfl_u32(of_lane, (lane * 2) & 31);
        let high = shfl_u32(of_lane, (lane * 2 + 1) & 31);
        if lane < id_packets(common) {
            unroll!(8, RANK => {
                if members.has(RANK as u32) {
                    let id = |of: u32| id_of(of, RANK as u32);
                    let packet = epoch << 32 | (id(high) << 16 | id(low)) as u64;
                    let at = comm.pools[RANK].0 + common.place.ids + ids_offset(common, row);
                    st_relaxed_sys_u64(Global::<u64>::new(at).at(lane), packet);
                }
            });
        }
    }
    if is_known {
        let weights = Global::<u64>::new(R::pool(comm, rank) + common.place.weights);
        let at = weights.at(row * common.num_topk + lane);
        st_relaxed_sys_u64(at, epoch << 32 | entry.weight.to_bits() as u64);
    }
    ranks
}

/// Sends a row to `ranks`, as it is or quantised, with its scales; those of a quantised
/// row are left in `scales`, if there are such, with the number of the token there. All threads of
/// the team call it.
#[device]
unsafe fn send_row<R: Ranks, const MX: bool>(
    args: &LowLatencyDispatchArgs,
    moves: Team<2>,
    token: u32,
    row: u32,
    ranks: R,
    first: Pair,
    scales: Option<(Scales<R>, u32)>,
) {
    let (mut turn, mut pair) = (0, first);
    while turn * moves.threads * 32 < bytes_of_x(args) {
        if args.quantise == Quantise::None as u32 {
            let (first, second) = Pair::offsets(args, moves, turn);
            if first < args.row_bytes {
                store(args, row, ranks, first, pair.first);
            }
            if second < args.row_bytes {
                store(args, row, ranks, second, pair.second);
            }
        } else {
            quantise_pair::<R, MX>(args, row, ranks, Pair::offsets(args, moves, turn).0 / 2, pair, scales);
        }
        turn += 1;
        pair = Pair::of(args, moves, token, turn, true);
    }
    let mut scale = moves.thread();
    while scale < args.num_scales && scales.is_none() {
        let value = args.scales.array::<f32>().ld(token * args.num_scales + scale);
        store_scale(args, row, ranks, scale, value);
        scale += moves.threads;
    }
}

/// Stores 16 bytes of a row, from byte `at` on, at `ranks`.
#[device]
unsafe fn store<R: Ranks>(args: &LowLatencyDispatchArgs, row: u32, ranks: R, at: u32, vector: [u32; 4]) {
    let rows = DevicePtr(args.common.place.recv_x);
    let offset = rows.row(row, row_stride(args.row_bytes as u64)) + at as u64;
    each_pool!(R, args.common.comm, ranks, pool => { st_v4(pool + offset, vector) });
}

/// Stores a scale of a row at `ranks`.
#[device]
unsafe fn store_scale<R: Ranks>(args: &LowLatencyDispatchArgs, row: u32, ranks: R, scale: u32, value: f32) {
    let rows = args.common.comm.num_ranks * args.common.max_tokens;
    let offset = Global::<f32>::new(args.common.place.recv_scales).at(row_major(scale, rows, row));
    each_pool!(R, args.common.comm, ranks, pool => { st_f32(pool + offset, value) });
}

/// Sends the scales of `count` tokens from `first` on, of which `scales` has the ranks, and the
/// scales if rows are quantised on their way. All threads of the team call it: adjacent lanes store
/// adjacent tokens' words.
#[device]
unsafe fn send_scales<R: Ranks>(
    args: &LowLatencyDispatchArgs,
    moves: Team<2>,
    first: u32,
    count: u32,
    scales: Scales<R>,
) {
    let first_row = args.common.comm.rank * args.common.max_tokens + first;
    stride!(index in moves.thread()..args.row_scales() * LOW_LATENCY_TOKENS_AT_ONCE, moves.threads => {
        let (scale, number) = (index / LOW_LATENCY_TOKENS_AT_ONCE, index % LOW_LATENCY_TOKENS_AT_ONCE);
        if number < count {
            let value = if args.quantise == Quantise::None as u32 {
                args.scales.array::<f32>().ld((first + number) * args.num_scales + scale)
            } else {
                f32::from_bits(ld_shared_u32(scales.at(number, scale)))
            };
            store_scale(args, first_row + number, scales.ranks(number), scale, value);
        }
    });
}

/// Sends 16 BF16 elements of a row as e4m3, from byte `at` on, and the scale of each 128 of them, as
/// MXFP8 the word with four, to `ranks`. The whole warp calls it.
#[device]
unsafe fn quantise_pair<R: Ranks, const MX: bool>(
    args: &LowLatencyDispatchArgs,
    row: u32,
    ranks: R,
    at: u32,
    pair: Pair,
    scales: Option<(Scales<R>, u32)>,
) {
    let numbers = [from_bf16(pair.first), from_bf16(pair.second)];
    let (vector, scale) = if MX { mx_quantised(&numbers) } else { quantised(&numbers, args.quantise) };
    if at < args.row_bytes {
        store(args, row, ranks, at, vector);
        if at.is_multiple_of(SCALE_BLOCK) {
            match scales {
                Some((scales, number)) => st_shared_u32(scales.at(number, at / SCALE_BLOCK), scale.to_bits()),
                None => store_scale(args, row, ranks, at / SCALE_BLOCK, scale),
            }
        }
    }
}

/// The warps that place scales, and whether they are others than those that list rows: where a block
/// lists rows while it moves some, those that have moved them, but for the last one, which waits until
/// its rows have arrived. A load waits behind the stores of rows, and a list has two of them one after
/// the other.
#[device]
fn scale_team(args: &LowLatencyDispatchArgs, lists: Team<1>) -> (Team<2>, bool) {
    if sends_scale_packets(args.common.num_tokens) && overlaps(&args.common, Roles::together()) {
        let first = LISTING_WARPS * 32;
        return (Team { first, threads: last_warp() * 32 - first }, true);
    }
    (Team { first: lists.first, threads: lists.threads }, false)
}

/// Lists the rows of each expert, and waits for them. `BATCH` and `PACKS`: as of [`dispatch`].
#[device]
unsafe fn receive<R: Ranks, const BATCH: bool, const PACKS: bool>(
    args: &LowLatencyDispatchArgs,
    team: Team<1>,
    blocks: Blocks,
    shared: &NodeShared<R>,
    opened: &Opened<R>,
) {
    let (common, comm) = (&args.common, &args.common.comm);
    let thread = tid();
    let epoch = opened.epoch();
    let lists = team.has_this_warp();
    let (places, are_apart) =
        if PACKS { scale_team(args, team) } else { (Team { first: 0, threads: 0 }, false) };
    let both = team.threads + places.threads;
    if lists {
        let have_called = wait_calls(common, team, shared, opened);
        if are_apart {
            barrier_arrive_part::<4>(both);
        }
        if !have_called {
            return say_given_up::<R>(comm, epoch);
        }
        if blocks.number == 0 && thread < R::ROOM {
            st_u32(common.tables.num_tokens.array::<u32>().at(thread), shared.tokens.ld(thread));
        }
        if BATCH {
            batch::list(args, team, blocks, shared, epoch);
        } else {
            list(args, team, blocks, shared, epoch);
        }
    } else if PACKS && are_apart && places.has_this_warp() {
        barrier_sync_part::<4>(both);
        if !have_all_called(shared, opened) {
            return;
        }
    }
    if PACKS && places.has_this_warp() {
        scale_packets::place(args, places, shared, epoch);
    }
    if !lists {
        return;
    }
    // Each chunk has a thread that waits for it, in the blocks that have the least else to do.
    let chunks = chunks_of(common, common.max_tokens);
    core::hint::assert_unchecked(chunks >= 1);
    let first = (blocks.count - 1 - blocks.number) * team.threads + thread;
    stride!(index in first..comm.num_ranks * chunks, blocks.count * team.threads => {
        let (source, chunk) = (index / chunks, index % chunks);
        let tokens = shared.tokens.ld(source);
        if chunk < chunks_of(common, tokens) {
            wait_chunk::<R>(args, source, chunk, epoch);
        }
    });
}

/// Warps that list rows while the others place them. Kernels behind this one need the lists; the
/// places of rows come first.
const LISTING_BESIDE: u32 = 4;

/// The warps that place rows, and those that list them: behind those that move rows meanwhile,
/// the same.
#[device]
fn teams_by_expert(moves_rows: bool) -> (Team<1>, Team<3>) {
    let all = last_warp() * 32;
    let placing = if moves_rows { LISTING_WARPS } else { last_warp() - LISTING_BESIDE } * 32;
    (Team { first: 0, threads: placing }, Team { first: placing, threads: all - placing })
}

/// The same, and copies rows to the segments of their experts.
#[device]
unsafe fn receive_by_expert<R: Ranks, const MOST: usize, const PACKS: bool>(
    args: &LowLatencyExpertDispatchArgs,
    roles: Roles,
    blocks: Blocks,
    shared: &NodeShared<R>,
    opened: &Opened<R>,
) {
    let (dispatched, common) = (&args.dispatch, &args.dispatch.common);
    let (epoch, ranks) = (opened.epoch(), common.comm.num_ranks);
    let moves_rows = overlaps(common, roles);
    let (places, lists) = teams_by_expert(moves_rows);
    let both = places.threads + lists.threads;
    let listing_waits = !R::MANY && !moves_rows;
    if lists.has_this_warp() {
        let have_called = if listing_waits {
            // The other team counts its own tokens meanwhile.
            let have_called = wait_calls(common, lists, shared, opened);
            barrier_arrive_part::<4>(both);
            have_called
        } else {
            barrier_sync_part::<4>(both);
            have_all_called(shared, opened)
        };
        if have_called {
            list(dispatched, lists, blocks, shared, epoch);
        }
    }
    if !places.has_this_warp() {
        return;
    }
    let at = dynamic_shared() + dispatch_shared_bytes::<R>(dispatched);
    let scratch = Scratch::<MOST> { at, ranks, experts: common.local_experts };
    scratch.clear(places);
    let shape = RowShape { bytes: dispatched.row_bytes, scales: dispatched.row_scales() };
    let pool = R::pool(&common.comm, common.comm.rank);
    let come = Coming::<R, PACKS> {
        args: dispatched,
        shared,
        opened,
        blocks,
        places,
        both,
        listing_waits,
        pool,
        epoch,
    };
    let placing = Placing { args: common, to: &args.to, shape, team: places, blocks, scratch, come: &come };
    if !placing.place_rows() {
        say_given_up::<R>(&common.comm, epoch);
    }
}

/// Waits for the rows of a source's chunk; false when the wait expired.
///
/// # Safety
/// The word is in this rank's own pool.
#[device]
unsafe fn wait_chunk<R: Ranks>(args: &LowLatencyDispatchArgs, source: u32, chunk: u32, epoch: u64) -> bool {
    let (common, comm) = (&args.common, &args.common.comm);
    let word = R::pool(comm, comm.rank) + common.place.arrived + chunk_offset(common, source, chunk);
    PeerWait::new(comm, source, epoch, Wait::LowLatencyRows).at_least(word, epoch)
}

/// The tokens of all ranks within a node, of which ids come first, as packets.
struct Coming<'a, R, const PACKS: bool> {
    args: &'a LowLatencyDispatchArgs,
    shared: &'a NodeShared<R>,
    opened: &'a Opened<R>,
    /// The blocks that receive.
    blocks: Blocks,
    /// The team that places rows.
    places: Team<1>,
    /// Threads of that team, and of those that wait at barrier 4 until all calls are here.
    both: u32,
    /// Whether the warps that list rows wait for the calls, while the others count their rank's own
    /// tokens: among few ranks, where they move no rows meanwhile.
    listing_waits: bool,
    /// This rank's pool.
    pool: u64,
    epoch: u64,
}

impl<R: Ranks, const PACKS: bool> Coming<'_, R, PACKS> {
    /// The row of a token among those received.
    #[device]
    fn row_of(&self, source: u32, index: u32) -> u32 {
        source * self.args.common.max_tokens + index
    }

    /// The place of a row's scale in the table of received scales.
    #[device]
    fn scale_at(&self, source: u32, index: u32, scale: u32) -> u64 {
        let common = &self.args.common;
        row_major(scale, common.comm.num_ranks * common.max_tokens, self.row_of(source, index))
    }

    /// Where a packet of a token's ids is.
    #[device]
    fn ids(&self, source: u32, index: u32, pair: u32) -> u64 {
        let common = &self.args.common;
        let ids = self.pool + common.place.ids + ids_offset(common, self.row_of(source, index));
        Global::<u64>::new(ids).at(pair)
    }
}

impl<R: Ranks, const PACKS: bool> Arrivals for Coming<'_, R, PACKS> {
    #[device]
    unsafe fn wait_for_counts(&self) -> bool {
        let (common, thread) = (&self.args.common, tid());
        let are_here = if self.listing_waits {
            barrier_sync_part::<4>(self.both);
            trace(&common.comm, Phase::Ready);
            have_all_called(self.shared, self.opened)
        } else {
            let are_here = wait_calls(common, self.places, self.shared, self.opened);
            barrier_arrive_part::<4>(self.both);
            are_here
        };
        if are_here && self.blocks.number == 0 && thread < R::ROOM {
            st_u32(common.tables.num_tokens.array::<u32>().at(thread), self.shared.tokens.ld(thread));
        }
        are_here
    }

    #[device]
    unsafe fn count(&self, source: u32) -> u32 {
        let common = &self.args.common;
        if source != common.comm.rank {
            return self.shared.tokens.ld(source);
        }
        // As `wait_call` gives it. A rank that takes no part sends nothing.
        let tokens = common.comm.call as u32 & LowLatencyCall::TOKEN_BITS;
        if self.opened.takes_part() { tokens.min(common.max_tokens) } else { 0 }
    }

    #[device]
    unsafe fn load(&self, source: u32, index: u32, pair: u32) -> u64 {
        ld_relaxed_sys_u64(self.ids(source, index, pair))
    }

    #[device]
    unsafe fn load_ahead(&self, source: u32, index: u32, pair: u32) -> Option<u64> {
        Some(self.load(source, index, pair))
    }

    #[device]
    unsafe fn pair(&self, seen: u64, source: u32, index: u32, pair: u32) -> (u32, u32) {
        let (comm, at) = (&self.args.common.comm, self.ids(source, index, pair));
        // A packet that does not come names no expert.
        let ids = packet_seen(comm, at, seen, source, self.epoch, Wait::LowLatencyIds).unwrap_or(u32::MAX);
        (ids & 0xffff, ids >> 16)
    }

    #[device]
    unsafe fn weight(&self, source: u32, index: u32, entry: u32) -> u32 {
        let common = &self.args.common;
        let weights = Global::<u64>::new(self.pool + common.place.weights);
        let packet = weights.at(self.row_of(source, index) * common.num_topk + entry);
        // A weight that does not come is recorded as an error.
        let wait = PeerWait::new(&common.comm, source, self.epoch, Wait::LowLatencyIds);
        wait.packet::<false>(packet).unwrap_or(0)
    }

    #[device]
    unsafe fn token(&self, _: u32, index: u32) -> u32 {
        index
    }

    /// Rows of this rank are taken from the input, which is there from the kernel's start, as they are,
    /// unless another kernel has sent them.
    #[device]
    unsafe fn is_here(&self, source: u32) -> bool {
        let common = &self.args.common;
        source == common.comm.rank
            && self.args.quantise == Quantise::None as u32
            && common.phases == phase::SEND | phase::RECEIVE
    }

    #[device]
    unsafe fn wait(&self, source: u32, index: u32) -> bool {
        if self.is_here(source) {
            return true;
        }
        let chunk_tokens = self.args.common.chunk_tokens;
        core::hint::assert_unchecked(chunk_tokens >= 1);
        // Few tokens have a chunk each: then nothing is divided.
        let chunk = if chunk_tokens == 1 { index } else { index / chunk_tokens };
        wait_chunk::<R>(self.args, source, chunk, self.epoch)
    }

    #[device]
    unsafe fn row(&self, source: u32, index: u32) -> u64 {
        if self.is_here(source) {
            return self.args.x.0 + (index * self.args.row_bytes) as u64;
        }
        let stride = row_stride(self.args.row_bytes as u64);
        DevicePtr(self.pool + self.args.common.place.recv_x).row(self.row_of(source, index), stride)
    }

    #[device]
    unsafe fn scale(&self, source: u32, index: u32, scale: u32) -> f32 {
        let common = &self.args.common;
        if self.is_here(source) {
            return self.args.scales.array::<f32>().ld(index * self.args.num_scales + scale);
        }
        if PACKS && sends_scale_packets(self.count(source)) {
            return scale_packets::scale(self.args, self.pool, self.row_of(source, index), scale);
        }
        Global::<f32>::new(self.pool + common.place.recv_scales).ld(self.scale_at(source, index, scale))
    }

    /// Scales that came as packets have no other kernel that puts them into their table.
    #[device]
    unsafe fn keep_scale(&self, source: u32, index: u32, scale: u32, value: f32) {
        if PACKS && sends_scale_packets(self.count(source)) {
            let table = Global::<f32>::new(self.pool + self.args.common.place.recv_scales);
            table.st(self.scale_at(source, index, scale), value);
        }
    }

    #[device]
    unsafe fn home(&self, _: u32, _: u32) -> Option<Home> {
        None
    }

    #[device]
    unsafe fn note(&self, _: u32, _: u32) {}
}

/// Publishes to every rank that this one ends the dispatch without all of them. The kernels behind it may
/// write rows that a late rank still reads in the combine before, so that it waits until that rank
/// has ended this or will see the word.
///
/// # Safety
/// Pools are mapped, and the word has this rank as its only writer.
#[device]
unsafe fn say_given_up<R: Ranks>(comm: &Comm, epoch: u64) {
    if tid() < comm.num_ranks {
        let word = R::pool(comm, tid()) + gave_up_offset(R::ROOM, comm.rank);
        st_relaxed_sys_u64(word, epoch);
        fence_acq_rel_sys();
        let start = globaltimer();
        while globaltimer() - start < GIVING_UP_NS {}
    }
}

/// Lists the rows of all local experts. All threads of the team call it.
#[device]
unsafe fn list<R: Ranks, const BARRIER: u32>(
    args: &LowLatencyDispatchArgs,
    team: Team<BARRIER>,
    blocks: Blocks,
    shared: &NodeShared<R>,
    epoch: u64,
) {
    let (common, comm) = (&args.common, &args.common.comm);
    let pool = R::pool(comm, comm.rank);
    let total = shared.all_tokens();
    let look = |expert: u32, number: u32| {
        let (source, token) = shared.find(number);
        let listed = Listed { source, token, ..Listed::NONE };
        let (entries, of_others) = entries_of(args, pool, listed.row(common), source, expert, epoch);
        let weights =
            Global::<u64>::new(pool + common.place.weights).at(listed.row(common) * common.num_topk);
        Listed { entries, of_others, weights, ..listed }
    };
    let weight = |listed: &Listed, entry: u32| {
        let packet = Global::<u64>::new(listed.weights).at(entry);
        // A weight that does not come is recorded as an error, so that the value here does not
        // matter.
        PeerWait::new(comm, listed.source, epoch, Wait::LowLatencyIds).packet::<false>(packet).unwrap_or(0)
    };
    if total <= FEW_TOKENS {
        let first = team.warp() * blocks.count + blocks.number;
        stride!(expert in first..common.local_experts, team.threads / 32 * blocks.count => {
            let is_there = laneid() < total;
            let listed = if is_there { look(expert, laneid()) } else { Listed::NONE };
            list_few_rows(common, shared, expert, listed, weight);
        });
    } else {
        let words = Words { of_source: shared.of_source.at(0), of_warp: shared.of_warp };
        stride!(expert in blocks.number..common.local_experts, blocks.count => {
            let look = |number| look(expert, number);
            if R::MANY {
                list_rows::<MAX_RANKS, BARRIER>(common, team, &words, expert, total, look, weight);
            } else {
                list_rows::<FEW_RANKS, BARRIER>(common, team, &words, expert, total, look, weight);
            }
        });
    }
}

/// The entries of a row, as bits, that are for the local expert `expert`, and those that are for no
/// expert of this rank; also those of which a wait expired.
#[device]
unsafe fn entries_of(
    args: &LowLatencyDispatchArgs,
    pool: u64,
    row: u32,
    source: u32,
    expert: u32,
    epoch: u64,
) -> (u32, u32) {
    let (common, comm) = (&args.common, &args.common.comm);
    let ids = Global::<u64>::new(pool + common.place.ids + ids_offset(common, row));
    let (mut entries, mut of_others) = (0, 0);
    stride!(first in 0..id_packets(common), 4 => {
        // Four at a time, so that their loads are in flight together; most are there by then.
        let mut seen = [0; 4];
        unroll!(4, J => {
            let packet = first + J as u32;
            // A load of the first again where there is no such packet.
            let packet = if packet < id_packets(common) { packet } else { first };
            seen[J] = ld_relaxed_sys_u64(ids.at(packet));
        });
        unroll!(4, J => {
            let packet = first + J as u32;
            if packet < id_packets(common) {
                // A packet that does not come names no expert.
                let pair = packet_seen(comm, ids.at(packet), seen[J], source, epoch, Wait::LowLatencyIds);
                let pair = pair.unwrap_or(u32::MAX);
                let (low, high) = (pair & 0xffff, pair >> 16);
                entries |= ((low == expert) as u32) << (packet * 2);
                entries |= ((high == expert) as u32) << (packet * 2 + 1);
                of_others |= ((low == 0xffff) as u32) << (packet * 2);
                of_others |= ((high == 0xffff) as u32) << (packet * 2 + 1);
            }
        });
    });
    // An odd number of entries leaves the last packet's upper half without one.
    (entries, of_others & (u32::MAX >> (32 - common.num_topk)))
}
