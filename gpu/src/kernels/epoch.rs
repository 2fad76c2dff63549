//! The protocol of an operation between ranks: enter, wait for peers, leave. Single-writer words
//! that are never reset; a waiter computes what it needs from the epoch, and every wait has a
//! deadline.

use core::mem::offset_of;

use super::peer_wait::PeerWait;
use crate::layout::{
    BlockTrace, Comm, DONE_GAVE_UP, FEW_RANKS, LOCAL_ABORT, LOCAL_EPOCH, LOCAL_TICKET, MISSING_TOKENS,
    NO_READY, PlanHeader, PlanStatus, QUANTUM, READY_EPOCHS, READY_OTHERS, READY_PLANS, READY_SHIFT, Wait,
    done_offset, message_offset, ready_offset,
};
use crate::simt::*;

/// Does something for each rank that a lane stands for: its own number, and of more ranks than
/// lanes (`$many`) the one 32 further. No closure, so that kernels for few ranks come out as if
/// written for them alone.
macro_rules! of_lane {
    ($many:expr, $comm:expr, $lane:expr, $rank:ident => $body:block) => {
        if $lane < $comm.num_ranks {
            let $rank = $lane;
            $body
        }
        if $many && $lane + 32 < $comm.num_ranks {
            let $rank = $lane + 32;
            $body
        }
    };
}

/// The address of rank `rank`'s pool; 0 where there is no such rank. It is chosen among parameters
/// of the launch without a branch: an index that is not known to the compiler would take them to
/// local memory, and a branch would part the lanes.
#[device]
pub fn pool_of(comm: &Comm, rank: u32) -> u64 {
    let mut pool = 0;
    unroll!(8, RANK => { pool |= comm.pools[RANK].0 & ((rank == RANK as u32) as u64).wrapping_neg() });
    pool
}

/// The address of the pool of a rank that there is. `MANY`: among more than [`FEW_RANKS`], by the
/// table.
///
/// # Safety
/// The table has every rank, and is not written meanwhile.
#[device]
pub unsafe fn pool_at<const MANY: bool>(comm: &Comm, rank: u32) -> u64 {
    if !MANY {
        return pool_of(comm, rank);
    }
    comm.pool_table.array::<u64>().ld(rank)
}

/// The epoch of the running operation. Stable for all blocks: only the last one to leave advances
/// it. An earlier kernel wrote it, so that it needs no acquire, behind which all other loads would
/// wait.
///
/// # Safety
/// `local` is live.
#[device]
pub unsafe fn current_epoch(comm: &Comm) -> u64 {
    ld_relaxed_gpu_u64(comm.local.0 + LOCAL_EPOCH) + 1
}

/// True once any wait of this rank has expired, or met another call.
///
/// # Safety
/// `local` is live.
#[device]
pub unsafe fn aborted(comm: &Comm) -> bool {
    ld_relaxed_gpu_u32(comm.local.0 + LOCAL_ABORT) != 0
}

/// The same, with one answer for the warp, since a wait may expire between the loads of two lanes.
/// The whole warp calls it.
#[device]
pub unsafe fn warp_aborted(comm: &Comm) -> bool {
    ballot(aborted(comm)) != 0
}

/// The value that an expired wait of the operation `epoch` writes to the abort word.
#[device]
pub fn abort_mark(epoch: u64) -> u32 {
    epoch as u32 | 1 << 31
}

/// Whether a rank with this abort word enters the operation `epoch` no more: a wait of an operation
/// before has expired. Behind an abort of the same operation it has entered, and its peers must see
/// with which call.
#[device]
pub fn gave_up_before(abort: u32, epoch: u64) -> bool {
    (abort != 0) & (abort != abort_mark(epoch))
}

/// The words that a kernel reads before it enters its operation. They are loaded in front of the
/// epoch, so that all loads are in flight together, and used behind it.
#[derive(Clone, Copy)]
pub struct ReadyEntry {
    status: u32,
    plan: u32,
    abort: u32,
}

impl ReadyEntry {
    /// The entry of an operation that goes by the [`PlanHeader`] at `header`.
    ///
    /// # Safety
    /// The header is live, and an earlier kernel of the stream wrote it.
    #[device]
    pub unsafe fn read(comm: &Comm, header: u64) -> ReadyEntry {
        ReadyEntry {
            abort: ld_relaxed_gpu_u32(comm.local.0 + LOCAL_ABORT),
            status: ld_u32(field!(header, PlanHeader.status)),
            plan: ld_u32(field!(header, PlanHeader.epoch)),
        }
    }

    /// The entry of a dispatch with a count exchange, before it has its plan.
    ///
    /// # Safety
    /// `local` is live.
    #[device]
    pub unsafe fn planning(comm: &Comm, epoch: u64) -> ReadyEntry {
        let abort = ld_relaxed_gpu_u32(comm.local.0 + LOCAL_ABORT);
        ReadyEntry { status: PlanStatus::Empty as u32, plan: epoch as u32, abort }
    }

    /// Whether a wait of this rank had expired before.
    #[device]
    pub fn has_given_up(&self) -> bool {
        self.abort != 0
    }

    /// Whether rows have places.
    #[device]
    pub fn is_planned(&self) -> bool {
        self.status == PlanStatus::Ready as u32
    }

    /// The word that this rank publishes when it enters the operation: the epoch and its call. It
    /// is [`NO_READY`], and is not published, where a wait of an operation before has expired.
    /// Peers that come to that operation late must find the word that was published in it.
    #[device]
    pub fn ready_word(&self, comm: &Comm, epoch: u64) -> u64 {
        if gave_up_before(self.abort, epoch) {
            return NO_READY;
        }
        epoch << READY_SHIFT | comm.call | (self.plan & READY_PLANS) as u64
    }
}

/// Begins a dispatch with a count exchange: publishes to the ranks of this node that this rank has
/// entered it, so that all of them are ready by the time that rows move. One warp calls it, in the
/// kernel that plans; the kernel that moves rows publishes nothing.
///
/// # Safety
/// The plan that this dispatch goes by is its own.
#[device]
pub unsafe fn tell_planning<const MANY: bool>(comm: &Comm, epoch: u64) {
    tell_ready::<MANY>(comm, ReadyEntry::planning(comm, epoch).ready_word(comm, epoch));
}

/// A phase of a block, as the offset of its time in [`BlockTrace`].
#[derive(Clone, Copy)]
#[repr(u64)]
pub enum Phase {
    Enter = offset_of!(BlockTrace, enter) as u64,
    Ready = offset_of!(BlockTrace, ready) as u64,
    Moved = offset_of!(BlockTrace, moved) as u64,
    Done = offset_of!(BlockTrace, done) as u64,
}

/// Stores the time at which this block reached `phase`, if the launch has a trace. Thread 0 of the
/// block does it.
#[device]
pub unsafe fn trace(comm: &Comm, phase: Phase) {
    trace_by(comm, phase, || tid_now() == 0)
}

/// The same by the thread for which `is_tracer` holds: one of a block. The address is a parameter
/// of the launch, so without a trace this is one uniform branch on a constant.
///
/// # Safety
/// The trace has an entry for every block of the grid.
#[device]
pub unsafe fn trace_by(comm: &Comm, phase: Phase, is_tracer: impl FnOnce() -> bool) {
    if !comm.trace.is_null() && is_tracer() {
        let entry = comm.trace.array::<BlockTrace>().at(ctaid());
        st_u64(entry + phase as u64, globaltimer());
    }
}

/// The share of [`QUANTUM`] that part `b` of `n` adds, such as a block of a grid; those of all
/// parts sum to it exactly.
#[device]
pub fn share(b: u32, n: u32) -> u64 {
    // 32-bit division on purpose: the 64-bit one is a routine of a hundred instructions.
    ((QUANTUM as u32 * (b + 1)) / n - (QUANTUM as u32 * b) / n) as u64
}

/// Publishes to every peer that this rank has entered the operation, by
/// [`ReadyEntry::ready_word`]. One warp calls it; lane r stores at rank r.
///
/// # Safety
/// Pools are mapped; the word has this rank as its only writer.
#[device]
pub unsafe fn tell_ready<const MANY: bool>(comm: &Comm, ready: u64) {
    let lane = laneid();
    of_lane!(MANY, comm, lane, rank => {
        if ready != NO_READY {
            st_release_sys_u64(pool_at::<MANY>(comm, rank) + ready_offset(comm.rank), ready);
        }
    });
}

/// Bytes of shared memory in which the wait for the peers publishes its result to the block.
pub const JOINED_BYTES: u32 = 16;

/// Waits until every peer has entered the operation, with the call of `ready`; all threads call it.
/// False when one has not, or a wait of this rank had expired before: the same in all threads of
/// the block, by the word of shared memory at `joined`.
///
/// The last warp polls for the block, which has the least to do in front of it: more would only
/// crowd the words that the peers write.
///
/// # Safety
/// The words are in this rank's own pool, and `joined` is the block's. The barrier passes on what
/// the polling lanes acquired.
#[device]
pub unsafe fn wait_ranks_ready<const MANY: bool>(
    comm: &Comm,
    entry: &ReadyEntry,
    epoch: u64,
    ready: u64,
    joined: u32,
    what: Wait,
) -> bool {
    let lane = laneid();
    if tid() / 32 == ntid() / 32 - 1 {
        let mut has_entered = !entry.has_given_up();
        of_lane!(MANY, comm, lane, rank => {
            let word = pool_at::<MANY>(comm, comm.rank) + ready_offset(rank);
            has_entered &= wait_entered(comm, word, ready, rank, epoch, what);
        });
        let all = ballot(!has_entered) == 0;
        if lane == 0 {
            st_shared_u32(joined, all as u32);
        }
    }
    barrier_sync();
    trace(comm, Phase::Ready);
    ld_shared_u32(joined) != 0
}

/// Waits until rank `peer` of this node has entered the operation, by its ready word at `word`, and
/// holds its call against that of `ready`: where they differ, that is recorded, and all waits of
/// this rank end. False then, and when the wait expired.
#[device]
pub unsafe fn wait_entered(comm: &Comm, word: u64, ready: u64, peer: u32, epoch: u64, what: Wait) -> bool {
    let other = PeerWait::new(comm, peer, epoch, Wait::OtherCall);
    wait_entered_or(PeerWait::new(comm, peer, epoch, what), word, ready, other, |_| false, || false)
}

/// The same, of a node as well: `other` records another call of the peer.
///
/// `has_passed`: whether the epoch of the word is that of a peer which has been here already.
/// `is_counting`: whether the peer is in a count exchange that its word does not show. It is called
/// now and then, and only in a long wait.
///
/// # Safety
/// `word` is a live control word.
#[device]
pub unsafe fn wait_entered_or(
    mut wait: PeerWait,
    word: u64,
    ready: u64,
    other: PeerWait,
    has_passed: impl Fn(u64) -> bool,
    is_counting: impl Fn() -> bool,
) -> bool {
    let (comm, epoch) = (wait.comm, wait.epoch);
    loop {
        let seen = ld_acquire_sys_u64(word);
        let entered = seen >> READY_SHIFT;
        if entered == epoch & READY_EPOCHS {
            if seen != ready {
                other.record(ready, seen);
            }
            return seen == ready;
        }
        if has_passed(entered) {
            return true;
        }
        if wait.has_expired() {
            wait.record(epoch, seen);
            return false;
        }
        if comm.call & READY_OTHERS != 0 && wait.is_long() && is_counting() {
            other.record(ready, epoch << READY_SHIFT);
            return false;
        }
    }
}

/// Whether the ready word at `word` shows a peer, whose counts are waited for, in another call.
/// Another call is recorded by `other`.
///
/// # Safety
/// `word` is a live control word. The word guards no data, so that its load needs no acquire.
#[device]
pub unsafe fn is_in_other_call(other: &PeerWait, word: u64) -> bool {
    let (seen, epoch) = (ld_relaxed_sys_u64(word), other.epoch);
    let is_other = (seen >> READY_SHIFT == epoch & READY_EPOCHS) & (seen & READY_OTHERS != 0);
    if is_other {
        other.record(epoch << READY_SHIFT, seen);
    }
    is_other
}

/// Ends a block's part of the operation; all threads call it. Publishes the block's end to every
/// peer. The last block of the grid waits for all peers and advances the epoch.
///
/// `joined`: whether the block has sent, or read, all that it had to. Otherwise it publishes
/// nothing: a late peer must not take missing rows for complete ones.
///
/// The first warp of the last block of a combine gets true where this rank or a peer has given up:
/// [`give_up_combine`] follows.
///
/// # Safety
/// Pools are mapped; `done[me]` and `local` are written by this rank alone. The barrier makes the
/// whole block's work happen before the releases, which are cumulative: no thread needs a fence of
/// its own.
#[device]
pub unsafe fn leave<const MANY: bool>(comm: &Comm, epoch: u64, joined: bool, what: Wait) -> bool {
    barrier_sync();
    if tid() >= 64 {
        return false;
    }
    trace(comm, Phase::Moved);
    let (warp, lane) = (tid() / 32, laneid());
    let part = share(ctaid(), nctaid());
    // The fences of the ticket and of the remote adds wait for nothing of each other in two
    // warps. In one the ticket goes first: behind the adds, its fence would wait for their
    // round trip.
    let mut last = false;
    if warp == 0 && lane == 0 {
        last = atom_acq_rel_gpu_add_u64(comm.local.0 + LOCAL_TICKET, part) + part == epoch * QUANTUM;
    }
    let publisher = (ntid() > 32) as u32;
    if joined && warp == publisher {
        of_lane!(MANY, comm, lane, rank => {
            red_release_sys_add_u64(pool_at::<MANY>(comm, rank) + done_offset(comm.rank), part);
        });
    }
    if ballot(last) == 0 {
        trace(comm, Phase::Done);
        return false;
    }
    let is_combine = matches!(what, Wait::CombineDone);
    // All other blocks have ended. The word is used behind the waits, beside which it is loaded.
    let abort = if is_combine { ld_relaxed_gpu_u32(comm.local.0 + LOCAL_ABORT) } else { 0 };
    let mut gives_up = false;
    of_lane!(MANY, comm, lane, rank => {
        let word = pool_at::<MANY>(comm, comm.rank) + done_offset(rank);
        let wait = PeerWait::new(comm, rank, epoch, what);
        if is_combine {
            let end = wait_done(wait, word, |wait, needed, done| wait.record(needed, done));
            gives_up |= !end.has_come | (end.seen & DONE_GAVE_UP != 0);
        } else {
            // A peer that has given up enters no operation: its bit is not seen here.
            wait.at_least(word, epoch * QUANTUM);
        }
    });
    if lane == 0 {
        // The end of the kernel publishes it; every other block has read the old one before its
        // ticket.
        st_u64(comm.local.0 + LOCAL_EPOCH, epoch);
    }
    trace(comm, Phase::Done);
    is_combine && ballot(gives_up | (abort != 0)) != 0
}

/// Tells all peers that this rank has given up its combine. Whether one of them has: the rows that
/// this rank has summed may be those of a later operation. The first warp of the last block calls
/// it, behind [`leave`]; the sums of all blocks are before it.
///
/// # Safety
/// Pools are mapped.
#[device]
pub unsafe fn give_up_combine<const MANY: bool>(comm: &Comm, epoch: u64) -> bool {
    let (lane, mut is_unsure) = (laneid(), false);
    of_lane!(MANY, comm, lane, rank => {
        let seen = ld_relaxed_sys_u64(pool_at::<MANY>(comm, comm.rank) + done_offset(rank));
        is_unsure |= note_gave_up(comm, rank, epoch, seen);
        tell_gave_up(comm, pool_at::<MANY>(comm, rank));
    });
    // Before the kernel ends, and with it before later kernels write rows.
    fence_acq_rel_sys();
    syncwarp();
    ballot(is_unsure) != 0
}

/// The end of a wait for a `done` word.
#[derive(Clone, Copy)]
pub struct DoneWait {
    /// Whether the peer has done its part.
    pub has_come: bool,
    /// The word when it was last read.
    pub seen: u64,
}

/// Waits until the peer of `wait` has done its part of the operation, by its word at `word`. Where
/// the wait expires, `record` is called with what was needed and what the peer had done.
///
/// # Safety
/// `word` is a live `done` word.
#[device]
pub unsafe fn wait_done(mut wait: PeerWait, word: u64, record: impl FnOnce(&PeerWait, u64, u64)) -> DoneWait {
    let needed = wait.epoch * QUANTUM;
    loop {
        let seen = ld_acquire_sys_u64(word);
        if done_of(seen) >= needed {
            return DoneWait { has_come: true, seen };
        }
        if wait.has_expired() {
            record(&wait, needed, done_of(seen));
            return DoneWait { has_come: false, seen };
        }
    }
}

/// The operations in a `done` word.
#[device]
pub fn done_of(word: u64) -> u64 {
    word & !DONE_GAVE_UP
}

/// Whether rank `peer` has given up its combine, by its `done` word as `seen` behind the last read
/// of its rows. A failure is recorded.
///
/// # Safety
/// `local` is live.
#[device]
pub unsafe fn note_gave_up(comm: &Comm, peer: u32, epoch: u64, seen: u64) -> bool {
    let gave_up = seen & DONE_GAVE_UP != 0;
    if gave_up {
        PeerWait::new(comm, peer, epoch, Wait::CombineGaveUp).record(epoch, 0);
    }
    gave_up
}

/// Publishes to the rank of `pool` that this one has given up a combine. The caller fences behind
/// it, so that the rank sees it before it sees what later kernels write.
///
/// # Safety
/// The pool is mapped.
#[device]
pub unsafe fn tell_gave_up(comm: &Comm, pool: u64) {
    red_relaxed_sys_or_u64(pool + done_offset(comm.rank), DONE_GAVE_UP);
}

/// Waits for packet `word` of the count message from `peer`; `None` when the wait expired.
///
/// # Safety
/// A message has that word, and this rank's pool a message of every peer.
#[device]
pub unsafe fn wait_count<const MANY: bool>(comm: &Comm, peer: u32, word: u32, epoch: u64) -> Option<u32> {
    wait_count_at::<MANY>(comm, message_offset(peer, word), peer, epoch, Wait::Counts)
}

/// Waits for packet `word` of the count messages of all ranks, or of `MANY` ranks those from `from`
/// on: 0 where there is no such rank; `None` when a wait expired.
///
/// # Safety
/// The packets are in this rank's own pool. Data and flag are one atomic word.
#[device]
pub unsafe fn wait_counts<const MANY: bool>(
    comm: &Comm,
    from: u32,
    word: u32,
    epoch: u64,
) -> Option<[u32; FEW_RANKS]> {
    let messages = pool_at::<MANY>(comm, comm.rank) + comm.pool.messages;
    let mut wait = PeerWait::new(comm, 0, epoch, Wait::Counts);
    let from = if MANY { from } else { 0 };
    let count = if MANY { (comm.num_ranks - from).min(FEW_RANKS as u32) } else { comm.num_ranks };
    let (mut seen, mut late) = ([0u64; FEW_RANKS], (1u32 << count) - 1);
    loop {
        unroll!(8, PEER => {
            if late >> PEER & 1 != 0 {
                seen[PEER] = ld_relaxed_sys_u64(messages + message_offset(from + PEER as u32, word));
            }
        });
        unroll!(8, PEER => {
            if (seen[PEER] >> 32) as u32 == epoch as u32 {
                late &= !(1 << PEER);
            }
        });
        if late == 0 {
            return Some(seen.map(|packet| packet as u32));
        }
        let first = late.trailing_zeros();
        if wait.has_expired() {
            let mut last = 0;
            unroll!(8, PEER => { last = if PEER as u32 == first { seen[PEER] >> 32 } else { last } });
            unroll!(8, PEER => {
                if late >> PEER & 1 != 0 {
                    wait.of(from + PEER as u32).note_late();
                }
            });
            wait.of(from + first).record(epoch, last);
            return None;
        }
        if wait.is_long() && is_sender_in_other_call::<MANY>(comm, from + first, epoch) {
            return None;
        }
    }
}

/// Waits for the packet at `offset` of the messages in the own pool; `None` when the wait expired.
///
/// # Safety
/// The packet is in this rank's own pool. Data and flag are one atomic word, so no acquire is
/// needed.
#[device]
pub unsafe fn wait_count_at<const MANY: bool>(
    comm: &Comm,
    offset: u64,
    peer: u32,
    epoch: u64,
    what: Wait,
) -> Option<u32> {
    let packet = pool_at::<MANY>(comm, comm.rank) + comm.pool.messages + offset;
    let is_in_vain = || is_sender_in_other_call::<MANY>(comm, peer, epoch);
    PeerWait::new(comm, peer, epoch, what).packet_unless::<false>(packet, is_in_vain)
}

/// Whether the rank of this node that sends the counts of `peer` is in another call, which is then
/// recorded.
///
/// # Safety
/// The word is in this rank's own pool.
#[device]
unsafe fn is_sender_in_other_call<const MANY: bool>(comm: &Comm, peer: u32, epoch: u64) -> bool {
    // With several nodes, a rank of this node hands the message on.
    core::hint::assert_unchecked(comm.num_ranks >= 1);
    let from = peer % comm.num_ranks;
    let word = pool_at::<MANY>(comm, comm.rank) + ready_offset(from);
    is_in_other_call(&PeerWait::new(comm, from, epoch, Wait::OtherCall), word)
}

/// Sends packet `word` of the count message to `peer`.
///
/// # Safety
/// A message has that word, and the peer's pool a message of this rank.
#[device]
pub unsafe fn send_count<const MANY: bool>(comm: &Comm, peer: u32, word: u32, value: u32, epoch: u64) {
    send_count_at::<MANY>(comm, peer, message_offset(comm.rank, word), value, epoch)
}

/// Sends the packet at `offset` of the messages in `peer`'s pool.
///
/// # Safety
/// The pool is mapped and this rank is the packet's only writer.
#[device]
pub unsafe fn send_count_at<const MANY: bool>(comm: &Comm, peer: u32, offset: u64, value: u32, epoch: u64) {
    let packet = pool_at::<MANY>(comm, peer) + comm.pool.messages + offset;
    st_relaxed_sys_u64(packet, epoch << 32 | value as u64);
}

/// Notes that a combine may leave a token without its sum, or a part of it.
///
/// # Safety
/// The token is one of this rank, each of which has a byte. All writers of a byte store the same
/// value.
#[device]
pub unsafe fn note_missing_token(comm: &Comm, token: u32) {
    st_relaxed_sys_u8(comm.status.0 + MISSING_TOKENS + token as u64, 1)
}

/// Adds the time since `start` to those for which `rank` was waited for, u64 `[num_ranks]` in ns.
///
/// # Safety
/// One thread of the grid calls it for a rank; there is a time for each.
#[device]
pub unsafe fn add_wait(waited: Global<u64>, rank: u32, start: u64) {
    waited.st(rank, waited.ld(rank) + (globaltimer() - start));
}

/// Up to four packets of the messages in the own pool, which are waited for together.
#[derive(Clone, Copy)]
pub struct Packets {
    /// Where they are. Some packet, where there is none to wait for.
    addresses: [u64; Packets::MOST],
    /// The ranks that they are from, by their number among all.
    peers: [u32; Packets::MOST],
    /// A bit for each one that is waited for.
    wanted: u32,
}

impl Packets {
    /// Most packets: as many as `unroll!(4, ..)` repeats.
    pub const MOST: usize = 4;

    /// No packets. `messages`: the address of the messages.
    #[device]
    pub fn new(messages: u64) -> Packets {
        Packets { addresses: [messages; Packets::MOST], peers: [0; Packets::MOST], wanted: 0 }
    }

    /// Adds packet number `PART`, which is at `address` and from `peer`.
    #[device]
    pub fn add<const PART: usize>(&mut self, address: u64, peer: u32) {
        (self.addresses[PART], self.peers[PART]) = (address, peer);
        self.wanted |= 1 << PART;
    }

    /// Whether there is a packet number `PART`.
    #[device]
    pub fn has<const PART: usize>(&self) -> bool {
        self.wanted >> PART & 1 != 0
    }

    /// Waits for all of them, with their loads in flight together; `None` when the wait expired. In
    /// place of a packet that is not there is any value.
    ///
    /// # Safety
    /// The packets are in this rank's own pool. Data and flag are one atomic word, so no acquire is
    /// needed.
    #[device]
    pub unsafe fn wait<const MANY: bool>(
        &self,
        comm: &Comm,
        epoch: u64,
        what: Wait,
    ) -> Option<[u32; Packets::MOST]> {
        let mut wait = PeerWait::new(comm, 0, epoch, what);
        loop {
            let (mut seen, mut late) = ([0; Packets::MOST], self.wanted);
            unroll!(4, PART => { seen[PART] = ld_relaxed_sys_u64(self.addresses[PART]) });
            unroll!(4, PART => {
                if (seen[PART] >> 32) as u32 == epoch as u32 {
                    late &= !(1 << PART);
                }
            });
            if late == 0 {
                return Some(seen.map(|packet| packet as u32));
            }
            // The first of those that have not come.
            let (mut peer, mut last) = (0, 0);
            unroll!(4, PART => {
                if late.trailing_zeros() == PART as u32 {
                    (peer, last) = (self.peers[PART], seen[PART] >> 32);
                }
            });
            if wait.has_expired() {
                unroll!(4, PART => {
                    if late >> PART & 1 != 0 {
                        wait.of(self.peers[PART]).note_late();
                    }
                });
                wait.of(peer).record(epoch, last);
                return None;
            }
            if wait.is_long() && is_sender_in_other_call::<MANY>(comm, peer, epoch) {
                return None;
            }
        }
    }
}
