//! Low latency across nodes: each rank sends each one message in a dispatch and one in a combine.
//! Where the receiver's memory is mapped, within a node or across, in device or host memory, the
//! message is written there; elsewhere it is written where one put takes it from. All ranks are alike, but for that.
//!
//! The packet with a rank's call comes behind the rank's message, so that a rank that has acquired
//! all packets has all rows. Messages of a dispatch have no fixed length. The receiver copies their
//! rows to their places, each token's to the row of its number as within a node.
//!
//! Invariant: nothing is overwritten while a rank still reads it, as within a node. A message of a
//! dispatch may be written, here for a put or there, in one of two cases. Either a combine has
//! answered the last dispatch in its place, so that the answer of each rank has come, or all ranks
//! have entered the dispatch. A message of a combine may be written once a dispatch into its place
//! has come from each rank, because that rank has ended the combine before.

use core::mem::offset_of;

use super::super::epoch::{Phase, trace};
use super::super::peer_wait::PeerWait;
use super::super::rail::{Delivery, Operation, post_to};
use super::by_expert::Scratch;
use super::ranks::Few;
use super::{Opened, is_other_call};
use crate::layout::{
    Comm, LowLatencyArgs, LowLatencyCall, LowLatencyCopies, LowLatencyInternodeExpertDispatchArgs,
    LowLatencyMessage, LowLatencyMessages, LowLatencyRoute, LowLatencyWords, MAX_MEMBERS, NO_READY,
    QueueHandle, Wait, low_latency_head_bytes,
};
use crate::simt::*;

mod combine;
pub(super) mod dispatch;

#[cfg(not(target_arch = "nvptx64"))]
pub use {
    combine::{
        LowLatencyInternodeCombineBf16, LowLatencyInternodeCombineF16, LowLatencyInternodeCombineF32,
        LowLatencyInternodeCombineFp8,
    },
    dispatch::{LowLatencyInternodeDispatch, LowLatencyInternodeDispatchByExpert},
};

const MEMBERS: u32 = MAX_MEMBERS as u32;

shared! {
    /// Shared memory of these kernels.
    struct MemberShared {
        /// The low half of an address for each rank.
        low: [u32; MAX_MEMBERS],
        /// The high half.
        high: [u32; MAX_MEMBERS],
        /// Tokens of each rank.
        tokens: [u32; MAX_MEMBERS],
        /// Slots of each rank.
        slots: [u32; MAX_MEMBERS],
        /// How many of an expert's rows are of each rank, or of a token's message before it.
        of_rank: [u32; MAX_MEMBERS],
        /// How many rows each warp has found.
        of_warp: [u32; 32],
        /// The words of [`Opened`].
        opened: [u32; 4],
    }
}

/// Shared memory of these kernels, in bytes.
pub const LOW_LATENCY_INTERNODE_SHARED_BYTES: u32 = MemberShared::BYTES;

/// Shared memory of a dispatch that brings rows by expert, in bytes: behind the rest, the words of
/// its counts and places.
pub fn low_latency_internode_by_expert_shared_bytes(args: &LowLatencyInternodeExpertDispatchArgs) -> u32 {
    let common = &args.dispatch.dispatch.common;
    MemberShared::BYTES + Scratch::<MAX_MEMBERS>::bytes(common.comm.num_ranks, common.local_experts)
}

impl MemberShared {
    /// Notes an address for a rank.
    ///
    /// # Safety
    /// The word is the block's; the caller places the barriers.
    #[device]
    unsafe fn set_address(&self, rank: u32, address: u64) {
        st_shared_u32(self.low().at(rank), address as u32);
        st_shared_u32(self.high().at(rank), (address >> 32) as u32);
    }

    /// The address that was noted for a rank.
    ///
    /// # Safety
    /// The word is the block's; the caller places the barriers.
    #[device]
    unsafe fn address(&self, rank: u32) -> u64 {
        (self.high().ld(rank) as u64) << 32 | self.low().ld(rank) as u64
    }

    /// Which rank's slot the one of number `number` is, all ranks' slots behind each other, and its
    /// number there; the number of ranks where there is no such slot.
    ///
    /// # Safety
    /// The word is the block's; the caller places the barriers.
    #[device]
    unsafe fn slot(&self, num_ranks: u32, number: u32) -> (u32, u32) {
        let (mut of, mut index) = (0, number);
        stride!(rank in 0..num_ranks => {
            let slots = self.slots().ld(rank);
            if of == rank && index >= slots {
                (of, index) = (of + 1, index - slots);
            }
        });
        (of, index)
    }

    /// Slots of all ranks.
    ///
    /// # Safety
    /// The word is the block's; the caller places the barriers.
    #[device]
    unsafe fn all_slots(&self, num_ranks: u32) -> u32 {
        let mut all = 0;
        stride!(rank in 0..num_ranks => {
            all += self.slots().ld(rank);
        });
        all
    }
}

/// A route of the table, by its address.
#[derive(Clone, Copy)]
struct Route(u64);

impl Route {
    #[device]
    fn to(messages: &LowLatencyMessages, rank: u32) -> Route {
        Route(messages.routes.array::<LowLatencyRoute>().at(rank))
    }

    /// The u64 of a [`LowLatencyRoute`] at this offset.
    ///
    /// # Safety
    /// The table has an entry for every rank, which the host wrote.
    #[device]
    unsafe fn field(&self, offset: usize) -> u64 {
        ld_u64(self.0 + offset as u64)
    }

    #[device]
    unsafe fn words_in(&self) -> u64 {
        self.field(offset_of!(LowLatencyRoute, words_in))
    }

    /// A field of a message, of which both offsets are given.
    #[device]
    unsafe fn written(&self, kind: Kind) -> u64 {
        self.field(kind as usize + offset_of!(LowLatencyMessage, written))
    }

    #[device]
    unsafe fn arrives(&self, kind: Kind) -> u64 {
        self.field(kind as usize + offset_of!(LowLatencyMessage, arrives))
    }
}

/// A kind of message, as its offset in a [`LowLatencyRoute`].
#[derive(Clone, Copy)]
#[repr(usize)]
enum Kind {
    Dispatch = offset_of!(LowLatencyRoute, dispatch),
    Answer = offset_of!(LowLatencyRoute, answer),
}

/// Offset of the ready word in [`LowLatencyWords`].
const READY: u64 = offset_of!(LowLatencyWords, ready) as u64;

/// Offset of the packet of an operation in [`LowLatencyWords`].
#[device]
fn call_at(epoch: u64) -> u64 {
    offset_of!(LowLatencyWords, calls) as u64 + (epoch & 1) * 8
}

/// Publishes to a rank that this one has entered the operation, with its call, behind `bytes` bytes
/// of the message for that rank. Any one lane calls it. Stores that happened before the call are
/// visible before the packet.
///
/// # Safety
/// The offsets are those of a message, which the host laid out.
#[device]
unsafe fn deliver(args: &LowLatencyArgs, route: Route, rank: u32, kind: Kind, bytes: u64, epoch: u64) {
    let from = route.field(kind as usize + offset_of!(LowLatencyMessage, from));
    let to = route.field(kind as usize + offset_of!(LowLatencyMessage, to));
    let packet = epoch << 32 | args.comm.call;
    publish_word(args, route, rank, (from, to, bytes), call_at(epoch), packet, epoch);
}

/// Stores `value` in the word at `word` of those that this rank writes for another one, behind the
/// bytes of a put: from, to and how many.
///
/// # Safety
/// The words have this rank as their only writer, through its one queue to the peer where they are
/// not mapped.
#[device]
unsafe fn publish_word(
    args: &LowLatencyArgs,
    route: Route,
    rank: u32,
    (from, to, bytes): (u64, u64, u64),
    word: u64,
    value: u64,
    epoch: u64,
) {
    let words = route.field(offset_of!(LowLatencyRoute, words_out));
    if words != 0 {
        st_release_sys_u64(words + word, value);
        return;
    }
    let counter = route.field(offset_of!(LowLatencyRoute, words_to)) + word;
    let queue = offset_of!(LowLatencyRoute, queue);
    let queue = (route.field(queue), route.field(queue + offset_of!(QueueHandle, posted)));
    let delivery = Delivery { from, to, bytes, counter, value };
    let operation = Operation { epoch, ready: NO_READY, queue_wait: Wait::LowLatencyQueue };
    post_to(&args.comm, queue, rank, delivery, operation);
}

/// The words that a rank writes for this one, as a block of this rank polls them.
///
/// Block 0 alone polls words in host memory. It publishes their values in copies in device memory,
/// which all other blocks poll. If 132 blocks poll host memory they take 240 us, as if the device
/// served one warp after the other.
struct Incoming {
    /// [`LowLatencyWords`].
    words: u64,
    /// The copy of its packet.
    copy_of_call: u64,
    copy_of_ready: u64,
    is_on_host: bool,
}

impl Incoming {
    /// # Safety
    /// The table of routes and the copies have an entry for every rank.
    #[device]
    unsafe fn of(messages: &LowLatencyMessages, rank: u32) -> Incoming {
        let route = Route::to(messages, rank);
        let copy = messages.copies.array::<u64>().at(rank);
        Incoming {
            words: route.words_in(),
            copy_of_call: field!(copy, LowLatencyCopies.calls),
            copy_of_ready: field!(copy, LowLatencyCopies.ready),
            is_on_host: route.field(offset_of!(LowLatencyRoute, is_on_host)) != 0,
        }
    }

    /// Whether this block polls copies. It must not load from `words` then.
    #[device]
    fn is_copied(&self) -> bool {
        self.is_on_host && ctaid() != 0
    }

    /// Where this block polls the packet of an operation.
    #[device]
    fn call(&self, epoch: u64) -> u64 {
        if self.is_copied() { self.copy_of_call } else { self.words + call_at(epoch) }
    }

    /// Where this block polls the ready word.
    #[device]
    fn ready(&self) -> u64 {
        if self.is_copied() { self.copy_of_ready } else { self.words + READY }
    }

    /// Publishes a word that this block has acquired to the blocks that poll its copy.
    ///
    /// # Safety
    /// A copy is written by one lane of block 0 alone, which has this rank.
    #[device]
    unsafe fn publish(&self, copy: u64, seen: u64) {
        if self.is_on_host && !self.is_copied() {
            st_release_sys_u64(copy, seen);
        }
    }
}

/// Publishes this rank's entry into a dispatch and waits for the entry of all members, as within a
/// node. The place may still be in use.
///
/// # Safety
/// The words that are waited for are in this rank's memory.
#[device]
unsafe fn wait_members_ready(
    args: &LowLatencyArgs,
    messages: &LowLatencyMessages,
    opened: &Opened<Few>,
) -> bool {
    let (lane, epoch) = (laneid(), opened.epoch());
    let mut ready = true;
    if opened.has_member(lane) {
        if ctaid() == 0 {
            let route = Route::to(messages, lane);
            publish_word(args, route, lane, (0, 0, 0), READY, epoch << 32 | args.comm.call, epoch);
        }
        ready = wait_member_entered(&args.comm, &Incoming::of(messages, lane), lane, epoch);
    }
    ballot(!ready) == 0
}

/// Waits until the ready word of a rank shows that the rank has entered this operation. The result
/// is false when the wait expired, or when the rank came with another call. The word has the low
/// half of the epoch, which wraps. The rank may have entered the next operation, and then waits
/// there for this one.
///
/// # Safety
/// The words and their copies are in this rank's memory.
#[device]
unsafe fn wait_member_entered(comm: &Comm, incoming: &Incoming, rank: u32, epoch: u64) -> bool {
    let mut wait = PeerWait::new(comm, rank, epoch, Wait::LowLatencyReady);
    loop {
        let seen = ld_acquire_sys_u64(incoming.ready());
        // A word of 0 was never written; the low half of its epoch is that of operation 2^32.
        if seen != 0 && ((seen >> 32) as u32).wrapping_sub(epoch as u32) <= 1 {
            incoming.publish(incoming.copy_of_ready, seen);
            return true;
        }
        if incoming.is_copied() {
            if wait.is_given_up() {
                return false;
            }
            continue;
        }
        if wait.has_expired() {
            wait.record(epoch, seen >> 32);
            return false;
        }
        if wait.is_long() && is_other_call(comm, incoming.call(epoch), rank, epoch) {
            return false;
        }
    }
}

/// Waits until a rank's message has come, and returns its call, which the caller publishes; `None`
/// when the wait expired. A rank that waits for this one in another call will not send the message:
/// then the result is that other call.
///
/// # Safety
/// The words and their copies are in this rank's memory. The ready word is only compared: it guards
/// no data, so that its load needs no acquire.
#[device]
unsafe fn wait_message(comm: &Comm, incoming: &Incoming, rank: u32, epoch: u64) -> Option<u32> {
    let mut wait = PeerWait::new(comm, rank, epoch, Wait::LowLatencyEnter);
    loop {
        let seen = ld_acquire_sys_u64(incoming.call(epoch));
        if (seen >> 32) as u32 == epoch as u32 {
            return Some(seen as u32);
        }
        if incoming.is_copied() {
            if wait.is_given_up() {
                return None;
            }
            continue;
        }
        if wait.has_expired() {
            wait.record(epoch, seen >> 32);
            return None;
        }
        if wait.is_long() {
            let ready = ld_relaxed_sys_u64(incoming.words + READY);
            let is_other = (ready ^ comm.call) as u32 & !LowLatencyCall::TOKEN_BITS != 0;
            // A word of 0 was never written.
            if ready != 0 && (ready >> 32) as u32 == epoch as u32 && is_other {
                return Some(ready as u32);
            }
        }
    }
}

/// Whether a rank's message is here. Any one thread of the rank may look, in its turn.
///
/// # Safety
/// The words are in this rank's memory. Nothing that they guard is read.
#[device]
pub(super) unsafe fn is_message_here(messages: &LowLatencyMessages, rank: u32, epoch: u64) -> bool {
    let words = Route::to(messages, rank).words_in();
    (ld_relaxed_sys_u64(words + call_at(epoch)) >> 32) as u32 == epoch as u32
}

/// Waits for a rank's message, as the only thread that polls that rank's words, wherever they are;
/// false when the wait expired. A rank in another call is not waited for: the operation's second
/// half records it.
///
/// # Safety
/// As of [`wait_message`].
#[device]
pub(super) unsafe fn wait_message_alone(
    comm: &Comm,
    messages: &LowLatencyMessages,
    rank: u32,
    epoch: u64,
) -> bool {
    // No block of this kernel polls copies.
    let incoming = Incoming { is_on_host: false, ..Incoming::of(messages, rank) };
    wait_message(comm, &incoming, rank, epoch).is_some()
}

/// Marks the address of the copies of a message's heads, in place of the message's.
const COPIED: u64 = 1;

/// Waits until every member's message has come, with the call of this rank, and notes how many
/// tokens each has; all threads of the block call it. `DISPATCH`: notes as well the address of each
/// message, or of the copies of its heads, and its number of slots. In a combine they are in
/// `shared` already. False when one has not come: the same in all threads.
///
/// # Safety
/// Packets are in this rank's memory, and their loads acquire the messages in front of them. Each
/// word of shared memory has one writer, and a barrier behind it.
#[device]
unsafe fn wait_messages<const DISPATCH: bool>(
    args: &LowLatencyArgs,
    messages: &LowLatencyMessages,
    shared: &MemberShared,
    opened: &Opened<Few>,
) -> bool {
    let (comm, epoch) = (&args.comm, opened.epoch());
    let (thread, mut failed) = (tid(), !opened.takes_part());
    if thread < MEMBERS {
        let (mut tokens, mut slots) = (0, 0);
        if opened.has_member(thread) {
            let incoming = Incoming::of(messages, thread);
            let call = wait_message(comm, &incoming, thread, epoch);
            let is_same =
                call.is_some_and(|call| (call ^ comm.call as u32) & !LowLatencyCall::TOKEN_BITS == 0);
            if let Some(call) = call {
                // A dispatch publishes it behind the heads of the message.
                if !(DISPATCH && is_same) {
                    incoming.publish(incoming.copy_of_call, epoch << 32 | call as u64);
                }
                if is_same {
                    tokens = (call & LowLatencyCall::TOKEN_BITS).min(args.max_tokens);
                } else {
                    let failure = PeerWait::new(comm, thread, epoch, Wait::LowLatencyOtherCall);
                    failure.record(comm.call, call as u64);
                }
            }
            failed = !is_same;
            if DISPATCH && is_same {
                let header = Route::to(messages, thread).arrives(Kind::Dispatch);
                let copied = messages.num_slots.array::<u32>().at(thread);
                slots = ld_u32(if incoming.is_copied() { copied } else { header }).min(tokens);
                let heads = messages.copies.0
                    + size_of::<LowLatencyCopies>() as u64
                    + (thread * args.max_tokens * low_latency_head_bytes(args.num_topk)) as u64;
                shared.set_address(thread, if incoming.is_on_host { heads | COPIED } else { header });
            }
        }
        if DISPATCH {
            shared.tokens().st(thread, tokens);
            shared.slots().st(thread, slots);
        }
    }
    let failed = barrier_any(failed);
    trace(comm, Phase::Ready);
    !failed
}
