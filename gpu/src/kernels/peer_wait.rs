//! Waits for the words of peers.
//!
//! A wait is a [`PeerWait`]: which peer, in which operation, for which word, and since when. Its
//! methods poll one word. A loop of another form polls itself, asks [`PeerWait::has_expired`] after
//! each miss, and gives up with [`PeerWait::record`]. The first wait that expires is recorded for the
//! host, and raises the abort word, which ends the others.

use super::epoch::{abort_mark, aborted};
use crate::layout::{Comm, LATE_PEERS, LOCAL_ABORT, LOCAL_RECORDED, MAX_WORLD, Status, Wait};
use crate::simt::*;

/// Polls between two checks of the clock and the abort word.
const POLLS_PER_CHECK: u32 = 64;
/// The same where the deadline is so short, in ns, that as many polls would take a good part of it.
const POLLS_OF_SHORT: u32 = 4;
const SHORT_NS: u64 = 2_000_000;

/// A thread's wait for a word of a peer.
#[derive(Clone, Copy)]
pub struct PeerWait<'a> {
    pub comm: &'a Comm,
    /// The rank or the node that is waited for.
    pub peer: u32,
    /// The operation.
    pub epoch: u64,
    /// The name of the word in the record.
    pub what: Wait,
    /// The clock at the first miss; 0 before it.
    start: u64,
    /// For so many ns, when the clock was last read; 0 where it was not.
    pub waited: u64,
    polls: u32,
}

impl<'a> PeerWait<'a> {
    /// A wait that has not begun: its time begins with the first miss. One that never begins records
    /// what the peer has done instead.
    #[device]
    pub fn new(comm: &'a Comm, peer: u32, epoch: u64, what: Wait) -> PeerWait<'a> {
        PeerWait { comm, peer, epoch, what, start: 0, waited: 0, polls: 0 }
    }

    /// The same wait, as long as it has lasted, for another peer.
    #[device]
    pub fn of(&self, peer: u32) -> PeerWait<'a> {
        PeerWait { peer, ..*self }
    }

    /// Waits until `*word >= needed`; false when the wait expired. The load acquires.
    ///
    /// # Safety
    /// `word` is a live control word.
    #[device]
    pub unsafe fn at_least(self, word: u64, needed: u64) -> bool {
        self.at_least_unless(word, needed, || false)
    }

    /// The same, but the wait ends as well once `is_in_vain` is true. It is called now and then, and
    /// only in a long wait.
    ///
    /// # Safety
    /// `word` is a live control word.
    #[device]
    pub unsafe fn at_least_unless(mut self, word: u64, needed: u64, is_in_vain: impl Fn() -> bool) -> bool {
        loop {
            let seen = ld_acquire_sys_u64(word);
            if seen >= needed {
                return true;
            }
            if self.has_expired() {
                self.record(needed, seen);
                return false;
            }
            if self.is_long() && is_in_vain() {
                return false;
            }
        }
    }

    /// Waits for the packet at `packet`; `None` when the wait expired. `ACQUIRE`: whether the stores
    /// before the packet's release are visible after the wait. Data and flag of a packet are one
    /// atomic word: it needs no acquire for its own data, and relaxed loads are many times cheaper.
    ///
    /// # Safety
    /// The address is live.
    #[device]
    pub unsafe fn packet<const ACQUIRE: bool>(self, packet: u64) -> Option<u32> {
        self.packet_unless::<ACQUIRE>(packet, || false)
    }

    /// The same, but the wait ends as well once `is_in_vain` is true, as
    /// [`PeerWait::at_least_unless`].
    ///
    /// # Safety
    /// The address is live.
    #[device]
    pub unsafe fn packet_unless<const ACQUIRE: bool>(
        mut self,
        packet: u64,
        is_in_vain: impl Fn() -> bool,
    ) -> Option<u32> {
        loop {
            let seen = if ACQUIRE { ld_acquire_sys_u64(packet) } else { ld_relaxed_sys_u64(packet) };
            if (seen >> 32) as u32 == self.epoch as u32 {
                return Some(seen as u32);
            }
            if self.has_expired() {
                self.record(self.epoch, seen >> 32);
                return None;
            }
            if self.is_long() && is_in_vain() {
                return None;
            }
        }
    }

    /// Whether the wait has expired, asked behind each poll that misses: the deadline has passed, or
    /// another wait of this rank has expired. The clock is read on the first miss, and then every
    /// [`POLLS_PER_CHECK`] polls or, with a short deadline, every [`POLLS_OF_SHORT`].
    ///
    /// # Safety
    /// The abort word is live.
    #[device]
    pub unsafe fn has_expired(&mut self) -> bool {
        self.polls += 1;
        let polls = if self.comm.timeout_ns < SHORT_NS { POLLS_OF_SHORT } else { POLLS_PER_CHECK };
        if self.polls & (polls - 1) != 1 {
            return false;
        }
        if self.start == 0 {
            self.start = globaltimer();
            return aborted(self.comm);
        }
        self.waited = globaltimer() - self.start;
        self.waited > self.comm.timeout_ns || aborted(self.comm)
    }

    /// Whether to stop polling a word that another block of this rank publishes once it has come:
    /// another wait of the rank has expired. That block has the deadline and names who is late. It
    /// raises the abort word wherever it does not publish.
    ///
    /// # Safety
    /// The abort word is live.
    #[device]
    pub unsafe fn is_given_up(&mut self) -> bool {
        self.polls += 1;
        self.polls.is_multiple_of(4) && aborted(self.comm)
    }

    /// Whether it is time to check the clock and the abort word: after every [`POLLS_PER_CHECK`]
    /// polls.
    #[device]
    pub fn is_long(&self) -> bool {
        self.polls.is_multiple_of(POLLS_PER_CHECK)
    }

    /// Records that this wait has expired, or that the peer came with something else, and raises the
    /// abort word, which ends all other waits of this rank.
    ///
    /// # Safety
    /// `local` is live.
    #[device]
    pub unsafe fn record(&self, needed: u64, seen: u64) {
        self.record_behind(self.epoch, needed, seen);
    }

    /// The same, where the rank enters no operation behind `last`, which is this one or the one
    /// before.
    ///
    /// # Safety
    /// As [`Self::record`].
    #[device]
    pub unsafe fn record_behind(&self, last: u64, needed: u64, seen: u64) {
        self.note_late();
        if atom_acq_rel_gpu_cas_u32(self.comm.local.0 + LOCAL_ABORT, 0, abort_mark(last)) != 0 {
            return;
        }
        self.note(needed, seen);
    }

    /// Records that the words of the peer have not come. A wait that began shortly before another
    /// one ended it is not recorded: it is no evidence about the peer.
    ///
    /// # Safety
    /// Each peer has two words.
    #[device]
    pub unsafe fn note_late(&self) {
        let (comm, peer) = (self.comm, self.peer);
        if self.waited <= comm.timeout_ns / 2 {
            return;
        }
        let entry = if self.what.is_for_entry() { peer } else { MAX_WORLD as u32 + peer };
        let late = Global::<u64>::new(comm.status.0 + LATE_PEERS);
        st_relaxed_sys_u64(late.at(entry), self.what as u64);
    }

    /// Records a failure, unless another one is recorded, and ends nothing.
    ///
    /// # Safety
    /// The winner of the swap is the record's only writer; `code` is released last.
    #[device]
    pub unsafe fn note(&self, needed: u64, seen: u64) {
        let comm = self.comm;
        if atom_acq_rel_gpu_cas_u32(comm.local.0 + LOCAL_RECORDED, 0, 1) != 0 {
            return;
        }
        let status = comm.status.0;
        st_relaxed_sys_u64(field!(status, Status.peer), self.peer as u64);
        st_relaxed_sys_u64(field!(status, Status.epoch), self.epoch);
        st_relaxed_sys_u64(field!(status, Status.needed), needed);
        st_relaxed_sys_u64(field!(status, Status.seen), seen);
        st_relaxed_sys_u64(field!(status, Status.waited_ns), self.waited);
        st_relaxed_sys_u64(field!(status, Status.call), comm.call);
        st_release_sys_u64(field!(status, Status.code), self.what as u64);
    }
}
