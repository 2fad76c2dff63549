//! Low-latency dispatch across nodes: the rows of the tokens that another rank gets travel behind
//! each other, in one message.
//!
//! Soundness: a slot has one writer, one block of one rank. The block that wrote the rank's last
//! token releases the packets of its messages, and has acquired the stores of the rank's other
//! blocks. A message is read only behind its packet. An expert's tables have one block, a received
//! row has one warp. A barrier stands between the writers and the readers of each word of shared
//! memory. Collectives stand where all lanes of a warp arrive.

use super::super::super::epoch::{Phase, note_missing_token, share, trace};
use super::super::super::fp8::{from_bf16, mx_quantised, quantised};
use super::super::super::ids::{ld_id, place, recorded_token};
use super::super::super::peer_wait::PeerWait;
use super::super::by_expert::{Arrivals, Home, Placing, RowShape, Scratch, home_of};
use super::super::dispatch::{Blocks, Pair, TopkEntry, bytes_of_x};
use super::super::list::{Listed, Words};
use super::super::ranks::Few;
use super::super::team::Team;
use super::super::{Opened, Opening, begin, completes, finish};
use super::{
    COPIED, Incoming, Kind, MEMBERS, MemberShared, Route, deliver, wait_members_ready, wait_messages,
};
use crate::layout::{
    DISPATCH_HEADER, LowLatencyArgs, LowLatencyCall, LowLatencyDispatchArgs, LowLatencyExpertRows,
    LowLatencyInternodeDispatchArgs, LowLatencyInternodeExpertDispatchArgs, LowLatencySlot, MAX_MEMBERS,
    Quantise, SCALE_BLOCK, Wait, low_latency_head_bytes, phase, row_stride,
};
use crate::simt::*;

/// Sends rows, or waits for them and lists each expert's rows, or both.
#[kernel(
    threads = 512, barriers = 13, registers = 128,
    block = 512, shared = super::LOW_LATENCY_INTERNODE_SHARED_BYTES,
    requires(
        ..LowLatencyArgs(args.dispatch.common),
        ..LowLatencyDispatchArgs(args.dispatch),
        args.dispatch.common.comm.num_ranks <= MAX_MEMBERS as u32,
    )
)]
pub unsafe fn low_latency_internode_dispatch(args: LowLatencyInternodeDispatchArgs) {
    dispatch::<false>(&args);
}

/// `MX`: whether rows are quantised as [`Quantise::Mxfp8`]. The kernels that quantise otherwise, or
/// not at all, have no instruction for it.
#[device]
pub(in super::super) unsafe fn dispatch<const MX: bool>(args: &LowLatencyInternodeDispatchArgs) {
    let common = &args.dispatch.common;
    let shared = MemberShared::dynamic();
    trace(&common.comm, Phase::Enter);
    let opening = Opening::<Few>::load::<false>(common, tid() == 0);
    let opened = begin::<Few, false>(common, &opening, shared.opened());
    if common.phases & phase::SEND != 0 {
        send::<MX>(args, &shared, &opened);
        trace(&common.comm, Phase::Moved);
    }
    if common.phases & phase::RECEIVE != 0 {
        receive(args, &shared, &opened);
        finish(&common.comm);
    }
}

/// The same as [`LowLatencyInternodeDispatch`], and copies each row to the segments of its experts
/// when it is copied to its place.
#[kernel(
    threads = 512, barriers = 21, registers = 128,
    block = 512, shared = super::low_latency_internode_by_expert_shared_bytes(&args),
    requires(
        ..LowLatencyArgs(args.dispatch.dispatch.common),
        ..LowLatencyDispatchArgs(args.dispatch.dispatch),
        ..LowLatencyExpertRows(args.to),
        args.dispatch.dispatch.common.comm.num_ranks <= MAX_MEMBERS as u32,
    )
)]
pub unsafe fn low_latency_internode_dispatch_by_expert(args: LowLatencyInternodeExpertDispatchArgs) {
    dispatch_by_expert::<false>(&args);
}

/// `MX`: as of [`dispatch`].
#[device]
pub(in super::super) unsafe fn dispatch_by_expert<const MX: bool>(
    args: &LowLatencyInternodeExpertDispatchArgs,
) {
    let (dispatched, common) = (&args.dispatch, &args.dispatch.dispatch.common);
    let shared = MemberShared::dynamic();
    trace(&common.comm, Phase::Enter);
    let opening = Opening::<Few>::load::<false>(common, tid() == 0);
    let opened = begin::<Few, false>(common, &opening, shared.opened());
    if common.phases & phase::SEND != 0 {
        send::<MX>(dispatched, &shared, &opened);
        trace(&common.comm, Phase::Moved);
    }
    if common.phases & phase::RECEIVE != 0 {
        receive_by_expert(args, &shared, &opened);
        finish(&common.comm);
    }
}

/// Scales of a row as it travels.
#[device]
fn scales_of(args: &LowLatencyInternodeDispatchArgs) -> u32 {
    if args.dispatch.quantise == Quantise::None as u32 {
        args.dispatch.num_scales
    } else {
        args.dispatch.row_bytes / SCALE_BLOCK
    }
}

#[device]
fn slot_of(args: &LowLatencyInternodeDispatchArgs) -> LowLatencySlot {
    LowLatencySlot::new(args.dispatch.row_bytes, scales_of(args), args.dispatch.common.num_topk)
}

/// Writes this rank's tokens into the messages, a token to a block.
#[device]
unsafe fn send<const MX: bool>(
    args: &LowLatencyInternodeDispatchArgs,
    shared: &MemberShared,
    opened: &Opened<Few>,
) {
    let (common, messages) = (&args.dispatch.common, &args.messages);
    let (thread, warp) = (tid(), tid() / 32);
    let mut takes_part = opened.takes_part();
    if !opened.is_answered() {
        let is_ready = !takes_part || warp != 0 || wait_members_ready(common, messages, opened);
        takes_part &= !barrier_any(!is_ready);
    }
    if takes_part {
        if thread < MEMBERS {
            shared.of_rank().st(thread, 0);
        }
        let (mut token, mut counted) = (ctaid(), 0);
        while token < common.num_tokens {
            // Behind this barrier, all threads have read the shared memory of the token before.
            barrier_sync();
            count(args, shared, counted, token, opened);
            counted = token;
            barrier_sync();
            if thread < common.comm.num_ranks {
                let position = shared.of_rank().ld(thread);
                messages.positions.array::<u32>().st(token * MEMBERS + thread, position);
                let at = slot_at(args, 0, position);
                shared.set_address(thread, Route::to(messages, thread).written(Kind::Dispatch) + at);
            }
            barrier_sync();
            let mask = write_entries(args, shared, token, opened);
            if thread == 0 {
                common.tables.token_ranks.array::<u32>().st(token, mask);
            }
            write_row::<MX>(args, shared, token, mask);
            barrier_sync();
            if warp == 0 {
                say_written(args, token, opened);
            }
            token += nctaid();
        }
        if common.num_tokens == 0 && ctaid() == 0 && warp == 0 {
            send_messages(args, opened);
        }
    }
    // As within a node: all threads have read it in front of a barrier.
    if thread == 0 {
        red_relaxed_gpu_add_u64(common.tables.turns.0, share(ctaid(), nctaid()));
    }
}

/// Adds the tokens from `from` to `to` to those that each rank has in its message. All threads of
/// the block call it.
#[device]
unsafe fn count(
    args: &LowLatencyInternodeDispatchArgs,
    shared: &MemberShared,
    from: u32,
    to: u32,
    opened: &Opened<Few>,
) {
    let (lane, mut turn, mut own) = (laneid(), tid() / 32, 0);
    while from + turn * 32 < to {
        let token = from + turn * 32 + lane;
        own += votes_of(args, if token < to { ranks_of(args, token, opened) } else { 0 });
        turn += ntid() / 32;
    }
    if lane < args.dispatch.common.comm.num_ranks {
        red_relaxed_cta_shared_add_u32(shared.of_rank().at(lane), own);
    }
}

/// In lane r, of how many lanes the mask has bit r. The whole warp calls it.
#[device]
unsafe fn votes_of(args: &LowLatencyInternodeDispatchArgs, mask: u32) -> u32 {
    let (lane, mut own) = (laneid(), 0);
    stride!(rank in 0..args.dispatch.common.comm.num_ranks => {
        let votes = ballot(mask >> rank & 1 != 0).count_ones();
        own += if lane == rank { votes } else { 0 };
    });
    own
}

/// The physical expert of an id of a token.
#[device]
unsafe fn place_of(args: &LowLatencyInternodeDispatchArgs, id: i64, token: u32) -> i64 {
    let common = &args.dispatch.common;
    let experts = common.local_experts * common.comm.num_ranks;
    place(&args.dispatch.table, id, token, common.comm.rank, experts)
}

/// The member that a physical expert is of, with the id on that rank.
///
/// # Safety
/// The experts on ranks that are left out add nothing to a token's sum.
#[device]
unsafe fn owner_of(
    args: &LowLatencyInternodeDispatchArgs,
    expert: i64,
    opened: &Opened<Few>,
) -> Option<(u32, u32)> {
    let common = &args.dispatch.common;
    if expert < 0 || expert >= (common.local_experts * common.comm.num_ranks) as i64 {
        return None;
    }
    let (rank, local) = (expert as u32 / common.local_experts, expert as u32 % common.local_experts);
    opened.has_member(rank).then_some((rank, local))
}

/// The ranks that a token goes to, as bits, by one thread alone.
///
/// # Safety
/// Inputs are there from the kernel's start.
#[device]
unsafe fn ranks_of(args: &LowLatencyInternodeDispatchArgs, token: u32, opened: &Opened<Few>) -> u32 {
    let topk = args.dispatch.common.num_topk;
    let mut mask = 0;
    stride!(entry in 0..topk => {
        let (dispatch, at) = (&args.dispatch, (token * topk + entry) as u64);
        let id = ld_id(dispatch.topk_idx, dispatch.narrow_ids, at);
        let expert = place_of(args, id, token);
        if let Some((rank, _)) = owner_of(args, expert, opened) {
            mask |= 1 << rank;
        }
    });
    mask
}

/// The ranks that a token goes to, as bits; writes its index and its entries into their slots. All
/// threads of the block call it.
///
/// # Safety
/// The first warp alone writes.
#[device]
unsafe fn write_entries(
    args: &LowLatencyInternodeDispatchArgs,
    shared: &MemberShared,
    token: u32,
    opened: &Opened<Few>,
) -> u32 {
    let common = &args.dispatch.common;
    let entry = TopkEntry::of(&args.dispatch, token, true);
    let experts = (common.local_experts * common.comm.num_ranks) as i64;
    let expert = place_of(args, entry.id.value(args.dispatch.narrow_ids), token);
    if expert >= experts || expert < -1 {
        let (peer, named) = (common.comm.rank, recorded_token(&args.dispatch.table, token));
        let failure = PeerWait::new(&common.comm, peer, opened.epoch(), Wait::LowLatencyExpert);
        failure.note(named, expert as u64);
        note_missing_token(&common.comm, token);
    }
    let (rank, local) = owner_of(args, expert, opened).unwrap_or((u32::MAX, 0));
    let mask = redux_or(if rank < MEMBERS { 1 << rank } else { 0 });
    let (slot, lane, mut left) = (slot_of(args), laneid(), mask);
    while left != 0 && tid() < 32 {
        let to = left.trailing_zeros();
        left &= left - 1;
        let at = shared.address(to);
        if lane == 0 {
            st_u32(at + slot.token as u64, token);
        }
        if lane < common.num_topk {
            let at = Global::<u64>::new(at + slot.entries as u64).at(lane);
            st_u32(at, if rank == to { local } else { u32::MAX });
            st_f32(at + 4, entry.weight);
        }
    }
    mask
}

/// Writes a token's row, as it is or quantised, and its scales into the slots of the ranks of
/// `mask`. All threads of the block call it.
#[device]
unsafe fn write_row<const MX: bool>(
    args: &LowLatencyInternodeDispatchArgs,
    shared: &MemberShared,
    token: u32,
    mask: u32,
) {
    let dispatch = &args.dispatch;
    let mut turn = 0;
    while turn * ntid() * 32 < bytes_of_x(dispatch) {
        let pair = Pair::of(dispatch, Team::block(), token, turn, true);
        let (first, second) = Pair::offsets(dispatch, Team::block(), turn);
        if dispatch.quantise == Quantise::None as u32 {
            let mut left = mask;
            while left != 0 {
                let at = shared.address(left.trailing_zeros());
                left &= left - 1;
                if first < dispatch.row_bytes {
                    st_v4(at + first as u64, pair.first);
                }
                if second < dispatch.row_bytes {
                    st_v4(at + second as u64, pair.second);
                }
            }
        } else {
            let numbers = [from_bf16(pair.first), from_bf16(pair.second)];
            let (vector, scale) =
                if MX { mx_quantised(&numbers) } else { quantised(&numbers, dispatch.quantise) };
            let (at, mut left) = (first / 2, mask);
            while left != 0 && at < dispatch.row_bytes {
                let slot = shared.address(left.trailing_zeros());
                left &= left - 1;
                st_v4(slot + at as u64, vector);
                if at.is_multiple_of(SCALE_BLOCK) {
                    st_f32(slot + (dispatch.row_bytes + at / SCALE_BLOCK * 4) as u64, scale);
                }
            }
        }
        turn += 1;
    }
    block_stride!(scale in 0..dispatch.num_scales => {
        let value = dispatch.scales.array::<f32>().ld(token * dispatch.num_scales + scale);
        let mut left = mask;
        while left != 0 {
            let slot = shared.address(left.trailing_zeros());
            left &= left - 1;
            st_f32(slot + (dispatch.row_bytes + scale * 4) as u64, value);
        }
    });
}

/// Adds a token that the block has written, and sends all messages where it was the rank's last. A
/// warp calls it, behind a barrier of the block.
#[device]
unsafe fn say_written(args: &LowLatencyInternodeDispatchArgs, token: u32, opened: &Opened<Few>) {
    let is_last = laneid() == 0 && completes(args.messages.written.0, token, args.dispatch.common.num_tokens);
    if ballot(is_last) != 0 {
        // `syncwarp` orders the whole warp behind the acquire of the first lane.
        syncwarp();
        send_messages(args, opened);
    }
}

/// Sends each member the message for it. A warp calls it, behind all that was written.
///
/// # Safety
/// A message's header has this lane as its only writer.
#[device]
unsafe fn send_messages(args: &LowLatencyInternodeDispatchArgs, opened: &Opened<Few>) {
    let (common, lane) = (&args.dispatch.common, laneid());
    let (mut first, mut slots) = (0, 0);
    while first < common.num_tokens {
        let token = first + lane;
        let is_there = token < common.num_tokens;
        let mask = common.tables.token_ranks.array::<u32>().ld(if is_there { token as u64 } else { 0 });
        slots += votes_of(args, if is_there { mask } else { 0 });
        first += 32;
    }
    if opened.has_member(lane) {
        let route = Route::to(&args.messages, lane);
        st_u32(route.written(Kind::Dispatch), slots);
        let bytes = DISPATCH_HEADER as u64 + slots as u64 * slot_of(args).bytes as u64;
        deliver(common, route, lane, Kind::Dispatch, bytes, opened.epoch());
    }
}

/// Waits for the messages, lists each expert's rows, and copies the rows to their places.
#[device]
unsafe fn receive(args: &LowLatencyInternodeDispatchArgs, shared: &MemberShared, opened: &Opened<Few>) {
    let (common, messages, thread) = (&args.dispatch.common, &args.messages, tid());
    if !wait_messages::<true>(common, messages, shared, opened) {
        return;
    }
    if ctaid() == 0 && thread < MEMBERS {
        st_u32(common.tables.num_tokens.array::<u32>().at(thread), shared.tokens().ld(thread));
        st_u32(messages.num_slots.array::<u32>().at(thread), shared.slots().ld(thread));
    }
    let all = shared.all_slots(common.comm.num_ranks);
    if ctaid() == 0 {
        copy_heads(args, shared, all);
        barrier_sync();
        if opened.has_member(thread) {
            let tokens = shared.tokens().ld(thread);
            let call = common.comm.call as u32 & !LowLatencyCall::TOKEN_BITS | tokens;
            let incoming = Incoming::of(messages, thread);
            incoming.publish(incoming.copy_of_call, opened.epoch() << 32 | call as u64);
        }
    }
    stride!(expert in ctaid()..common.local_experts, nctaid() => {
        list_rows(args, shared, expert, all);
    });
    let first = tid() / 32 * nctaid() + (nctaid() - 1 - ctaid());
    stride!(number in first..all, nctaid() * (ntid() / 32) => {
        let (source, index) = shared.slot(common.comm.num_ranks, number);
        take_row(args, shared, source, index);
    });
}

/// The same, and copies rows to the segments of their experts.
#[device]
unsafe fn receive_by_expert(
    expert_args: &LowLatencyInternodeExpertDispatchArgs,
    shared: &MemberShared,
    opened: &Opened<Few>,
) {
    let args = &expert_args.dispatch;
    let (common, messages, thread) = (&args.dispatch.common, &args.messages, tid());
    let (at, ranks) = (dynamic_shared() + MemberShared::BYTES, common.comm.num_ranks);
    let scratch = Scratch::<MAX_MEMBERS> { at, ranks, experts: common.local_experts };
    scratch.clear(Team::block());
    if !wait_messages::<true>(common, messages, shared, opened) {
        return;
    }
    if ctaid() == 0 && thread < MEMBERS {
        st_u32(common.tables.num_tokens.array::<u32>().at(thread), shared.tokens().ld(thread));
        st_u32(messages.num_slots.array::<u32>().at(thread), shared.slots().ld(thread));
    }
    let all = shared.all_slots(common.comm.num_ranks);
    if ctaid() == 0 {
        copy_heads(args, shared, all);
        barrier_sync();
        if opened.has_member(thread) {
            let tokens = shared.tokens().ld(thread);
            let call = common.comm.call as u32 & !LowLatencyCall::TOKEN_BITS | tokens;
            let incoming = Incoming::of(messages, thread);
            incoming.publish(incoming.copy_of_call, opened.epoch() << 32 | call as u64);
        }
    }
    let come = Messages { args, shared };
    let (to, shape, team) = (&expert_args.to, come.shape(), Team::block());
    Placing { args: common, to, shape, team, blocks: Blocks::all(), scratch, come: &come }.place_rows();
    // Kernels behind this one need the lists.
    stride!(expert in ctaid()..common.local_experts, nctaid() => {
        list_rows(args, shared, expert, all);
    });
}

/// The slots of all messages, which are here.
struct Messages<'a> {
    args: &'a LowLatencyInternodeDispatchArgs,
    shared: &'a MemberShared,
}

impl Messages<'_> {
    #[device]
    fn shape(&self) -> RowShape {
        RowShape { bytes: self.args.dispatch.row_bytes, scales: scales_of(self.args) }
    }
}

impl Arrivals for Messages<'_> {
    #[device]
    unsafe fn wait_for_counts(&self) -> bool {
        true
    }

    #[device]
    unsafe fn count(&self, source: u32) -> u32 {
        self.shared.slots().ld(source)
    }

    #[device]
    unsafe fn load(&self, source: u32, index: u32, pair: u32) -> u64 {
        let entries = head(self.args, self.shared, source, index).1;
        let entries = Global::<[u64; 2]>::new(entries).at(pair);
        let has_high = pair * 2 + 1 < self.args.dispatch.common.num_topk;
        // A load of the first one again where there is no second.
        let high = ld_u32(if has_high { entries + 8 } else { entries });
        (if has_high { high } else { u32::MAX } as u64) << 32 | ld_u32(entries) as u64
    }

    #[device]
    unsafe fn load_ahead(&self, _: u32, _: u32, _: u32) -> Option<u64> {
        None
    }

    #[device]
    unsafe fn pair(&self, seen: u64, _: u32, _: u32, _: u32) -> (u32, u32) {
        (seen as u32, (seen >> 32) as u32)
    }

    #[device]
    unsafe fn weight(&self, source: u32, index: u32, entry: u32) -> u32 {
        ld_u32(Global::<u64>::new(head(self.args, self.shared, source, index).1).at(entry) + 4)
    }

    #[device]
    unsafe fn token(&self, source: u32, index: u32) -> u32 {
        token_of(self.args, head(self.args, self.shared, source, index).0)
    }

    #[device]
    unsafe fn is_here(&self, _: u32) -> bool {
        true
    }

    #[device]
    unsafe fn wait(&self, _: u32, _: u32) -> bool {
        true
    }

    #[device]
    unsafe fn row(&self, source: u32, index: u32) -> u64 {
        arrived(self.args, source, index)
    }

    #[device]
    unsafe fn scale(&self, source: u32, index: u32, scale: u32) -> f32 {
        ld_f32(arrived(self.args, source, index) + (self.args.dispatch.row_bytes + scale * 4) as u64)
    }

    /// [`Home`] has them.
    #[device]
    unsafe fn keep_scale(&self, _: u32, _: u32, _: u32, _: f32) {}

    #[device]
    unsafe fn home(&self, source: u32, index: u32) -> Option<Home> {
        let (common, messages) = (&self.args.dispatch.common, &self.args.messages);
        let (first, rows) = (source * common.max_tokens, common.comm.num_ranks * common.max_tokens);
        let row = first + self.token(source, index);
        Some(home_of(messages, self.shape(), row, rows))
    }

    #[device]
    unsafe fn note(&self, source: u32, index: u32) {
        let at = source * self.args.dispatch.common.max_tokens + index;
        st_u32(self.args.messages.slot_tokens.array::<u32>().at(at), self.token(source, index));
    }
}

/// Where a slot of a rank's message is.
#[device]
unsafe fn arrived(args: &LowLatencyInternodeDispatchArgs, source: u32, index: u32) -> u64 {
    let message = Route::to(&args.messages, source).arrives(Kind::Dispatch);
    slot_at(args, message, index)
}

/// Where slot `index` of the message at `message` is.
#[device]
fn slot_at(args: &LowLatencyInternodeDispatchArgs, message: u64, index: u32) -> u64 {
    DevicePtr(message + DISPATCH_HEADER as u64).row(index, slot_of(args).bytes)
}

/// Copies the heads of messages in host memory, [`COPIED`], for the other blocks: each would load
/// them from there. All threads of the first block call it.
///
/// # Safety
/// The messages are here, and a copy has one writer.
#[device]
unsafe fn copy_heads(args: &LowLatencyInternodeDispatchArgs, shared: &MemberShared, all: u32) {
    let (common, layout) = (&args.dispatch.common, slot_of(args));
    // The token's index, and the entries.
    let words = common.num_topk + 1;
    block_stride!(item in 0..all * words => {
        let (word, (source, index)) = (item % words, shared.slot(common.comm.num_ranks, item / words));
        let (token, entries) = head(args, shared, source, index);
        if shared.address(source) & COPIED != 0 {
            let slot = arrived(args, source, index);
            if word == 0 {
                st_u32(token, ld_u32(slot + layout.token as u64));
            } else {
                let from = Global::<u64>::new(slot + layout.entries as u64);
                st_u64(Global::<u64>::new(entries).at(word - 1), from.ld(word - 1));
            }
        }
    });
}

/// Where a slot's head is, copied or not: the token's index, and the entries.
///
/// # Safety
/// `wait_messages` has set the addresses.
#[device]
unsafe fn head(
    args: &LowLatencyInternodeDispatchArgs,
    shared: &MemberShared,
    source: u32,
    index: u32,
) -> (u64, u64) {
    let address = shared.address(source);
    if address & COPIED != 0 {
        let bytes = low_latency_head_bytes(args.dispatch.common.num_topk);
        let at = (address ^ COPIED) + (index * bytes) as u64;
        return (at, at + 8);
    }
    let slot = slot_at(args, address, index);
    (slot + slot_of(args).token as u64, slot + slot_of(args).entries as u64)
}

/// The index at `at` of a slot's token on its rank.
///
/// # Safety
/// The result is an index for any word that a peer stores.
#[device]
unsafe fn token_of(args: &LowLatencyInternodeDispatchArgs, at: u64) -> u32 {
    ld_u32(at).min(args.dispatch.common.max_tokens - 1)
}

/// Puts a row and its scales where they belong. The whole warp calls it.
///
/// # Safety
/// A token is in its source's message once.
#[device]
unsafe fn take_row(args: &LowLatencyInternodeDispatchArgs, shared: &MemberShared, source: u32, index: u32) {
    let (dispatch, common, messages) = (&args.dispatch, &args.dispatch.common, &args.messages);
    let slot = arrived(args, source, index);
    let (first, lane) = (source * common.max_tokens, laneid());
    let token = token_of(args, head(args, shared, source, index).0);
    let row = first + token;
    if lane == 0 {
        messages.slot_tokens.array::<u32>().st(first + index, token);
    }
    let to = messages.recv_x.row(row, row_stride(dispatch.row_bytes as u64));
    let mut at = lane * 16;
    while at < dispatch.row_bytes {
        // Four at a time, so that their loads are in flight together.
        let mut vectors = [[0; 4]; 4];
        unroll!(4, J => {
            let at = at + J as u32 * 512;
            vectors[J] = ld_stream_v4_if(at < dispatch.row_bytes, slot + at as u64);
        });
        unroll!(4, J => {
            let at = at + J as u32 * 512;
            if at < dispatch.row_bytes {
                st_v4(to + at as u64, vectors[J]);
            }
        });
        at += 2048;
    }
    let rows = common.comm.num_ranks * common.max_tokens;
    stride!(scale in lane..scales_of(args), 32 => {
        let value = ld_f32(slot + (dispatch.row_bytes + scale * 4) as u64);
        messages.recv_scales.array::<f32>().st(row_major(scale, rows, row), value);
    });
}

/// Lists the rows of a local expert; `all`: slots of all messages. All threads of the block call
/// it.
///
/// # Safety
/// The messages are here.
#[device]
unsafe fn list_rows(args: &LowLatencyInternodeDispatchArgs, shared: &MemberShared, expert: u32, all: u32) {
    let common = &args.dispatch.common;
    let words = Words { of_source: shared.of_rank().at(0), of_warp: shared.of_warp() };
    let look = |number: u32| {
        let (source, index) = shared.slot(common.comm.num_ranks, number);
        let (token, entries) = head(args, shared, source, index);
        let weights = entries + 4;
        let mut listed = Listed { source, token: token_of(args, token), weights, ..Listed::NONE };
        stride!(first in 0..common.num_topk, 8 => {
            // Eight at a time, so that their loads are in flight together.
            let mut of = [0; 8];
            unroll!(8, J => {
                let entry = first + J as u32;
                // A load of the first again where there is no such entry.
                let entry = if entry < common.num_topk { entry } else { first };
                of[J] = ld_u32(Global::<u64>::new(entries).at(entry));
            });
            unroll!(8, J => {
                let entry = first + J as u32;
                let is_there = entry < common.num_topk;
                listed.entries |= ((is_there & (of[J] == expert)) as u32) << (entry & 31);
                listed.of_others |= ((is_there & (of[J] >= common.local_experts)) as u32) << (entry & 31);
            });
        });
        listed
    };
    let weight = |listed: &Listed, entry: u32| ld_u32(Global::<u64>::new(listed.weights).at(entry));
    super::super::list::list_rows::<MAX_MEMBERS, 0>(common, Team::block(), &words, expert, all, look, weight);
}
