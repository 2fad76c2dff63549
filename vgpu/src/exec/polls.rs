//! Finds that lanes wait: they read memory again and find the value of before, and their warp has
//! changed nothing since.
//!
//! A loop that computes and reads the same word in each turn looks alike. Each group of a wait
//! executes at most [`LONGEST_WAIT`] instructions between two reads, and lanes wait no longer once
//! they have executed more. A [`Machine`](crate::Machine) runs all waits on for a while, with the
//! clock held, before it reports a hang.

use std::sync::atomic::Ordering;

use super::access::{SHARED_TAG, TAG, read};
use super::lanes::lanes;
use super::state::{Exec, SharedMemory, Warp};
use crate::check::hash::FastMap;
use crate::check::hooks::Hooks;
use crate::fault::WaitingFor;
use crate::ir::{GUARD_NOT, Inst, NO_GUARD, Op};
use crate::memory::Table;

/// The most instructions of a group of lanes between two reads of a wait. Kernels of high throughput
/// need between 2,048 and 4,096 while lanes wait apart.
const LONGEST_WAIT: u32 = 16 * 1024;
/// The most reads that a warp remembers: 16 of each lane, where all are apart.
const MOST_POLLS: usize = 32 * 16;
/// Stands for the clock among the addresses that a warp polls.
const TIMER: u64 = u64::MAX;

/// A read that lanes may repeat: the instruction, its lanes, and the address of the first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Poll {
    pc: u32,
    lanes: u32,
    addr: u64,
}

/// The outcome of a read, and its time in instructions of the warp.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen {
    value: u64,
    at: u32,
}

/// The reads of a warp since it has last changed anything.
pub(super) type Polls = FastMap<Poll, Seen>;

impl<W: Hooks> Exec<'_, W> {
    /// Notes a read of memory that others may change. True when the same read gave the same value
    /// before and nothing was changed since: its lanes spin.
    #[inline(always)]
    pub(super) fn poll(&mut self, addr: u64, value: u64) -> bool {
        let now = self.now();
        let before = self.remember(addr, Seen { value, at: now });
        let spins = before.is_some_and(|before| before.value == value && self.warp.is_wait(before.at, now));
        self.warp.spinning = spins;
        self.read_same |= spins;
        self.spun = if spins { now.max(1) } else { 0 };
        spins
    }

    /// The same for a strong read of memory. A lane has read `value` at `addr`, and `seen` is a
    /// digest of what all lanes have read.
    #[inline(always)]
    pub(super) fn poll_memory(&mut self, (addr, value): (u64, u64), seen: u64) -> bool {
        self.warp.waiting = Some(WaitingFor::Memory { addr, value });
        // Global memory alone has neither a tag nor an address of 32 bits.
        self.block.read_outside |= addr & TAG == 0 && addr >> 32 != 0;
        self.poll(addr, seen)
    }

    /// The lanes `m` have read `now_ns` from a clock that stands between the steps of its owner.
    pub(super) fn note_clock_reading(&mut self, now_ns: u64, m: u32) {
        let seen = if self.warp.clock_seen.0 == now_ns { self.warp.clock_seen.1 } else { 0 };
        self.warp.clock_seen = (now_ns, seen | m);
        self.warp.clock_readers |= m;
        // A loop that reads nothing but such a clock waits for its owner.
        let (pc, lanes) = (self.pc, self.mask);
        let last = self.warp.polls.get(&Poll { pc, lanes, addr: TIMER }).map(|seen| seen.at);
        let reads_memory = |last: u32| {
            let (now, mut polls) = (self.now(), self.warp.polls.iter());
            polls.any(|(poll, seen)| {
                let since = now.wrapping_sub(seen.at) < now.wrapping_sub(last);
                since && poll.addr != TIMER && poll.lanes & lanes != 0
            })
        };
        if last.is_some_and(reads_memory) {
            self.remember(TIMER, Seen { value: now_ns, at: self.now() });
        } else {
            self.poll(TIMER, now_ns);
        }
    }

    /// Remembers a read. Returns its last outcome.
    #[inline(always)]
    fn remember(&mut self, addr: u64, seen: Seen) -> Option<Seen> {
        let poll = Poll { pc: self.pc, lanes: self.mask, addr };
        if let Some(before) = self.warp.polls.get_mut(&poll) {
            return Some(std::mem::replace(before, seen));
        }
        if self.warp.polls.len() >= MOST_POLLS {
            self.forget_polls();
        }
        self.warp.polls.insert(poll, seen);
        None
    }

    /// Makes room for reads: those of lanes that have parted or joined since will not come again.
    #[cold]
    fn forget_polls(&mut self) {
        let (running, groups) = (self.mask, &self.warp.groups);
        self.warp
            .polls
            .retain(|poll, _| poll.lanes == running || groups.iter().any(|g| g.mask == poll.lanes));
        if self.warp.polls.len() > MOST_POLLS / 2 {
            self.warp.polls.clear();
        }
    }

    /// Instructions that the warp has executed, modulo 2^32.
    pub(super) fn now(&self) -> u32 {
        self.warp.executed.wrapping_add(self.executed as u32)
    }
}

/// A word that lanes poll.
pub(crate) struct PolledWord {
    pub(crate) lanes: u32,
    pub(crate) addr: u64,
    /// The contents now; of an access of several elements, the first.
    pub(crate) value: u64,
}

impl Warp {
    /// The words that a group of lanes polls, each once, that of the first lane first. Empty where
    /// its last read was no load, where the address registers have changed since, or where a word is
    /// in shared memory of another block.
    pub(crate) fn polled_words(
        &self,
        code: &[Inst],
        group: u32,
        table: &Table,
        shared: &SharedMemory,
    ) -> Vec<PolledWord> {
        let of_group = self.polls.iter().filter(|(poll, _)| poll.lanes == group && poll.addr != TIMER);
        let last = of_group.min_by_key(|(_, seen)| self.executed.wrapping_sub(seen.at));
        let Some((poll, _)) = last else { return vec![] };
        let Inst { op: Op::Ld(load), guard, .. } = &code[poll.pc as usize] else { return vec![] };
        let guarded = match *guard {
            NO_GUARD => group,
            guard if guard & GUARD_NOT != 0 => group & !self.regs.pred[(guard & !GUARD_NOT) as usize],
            guard => group & self.regs.pred[guard as usize],
        };
        let mut words: Vec<PolledWord> = vec![];
        for lane in lanes(guarded) {
            let addr = self.regs.address(&load.addr, lane);
            if words.is_empty() && addr != poll.addr {
                return vec![];
            }
            match words.iter_mut().find(|word| word.addr == addr) {
                Some(word) => word.lanes |= 1 << lane,
                None => {
                    let Some(value) = peek(table, shared, addr, load.bytes) else { return vec![] };
                    words.push(PolledWord { lanes: 1 << lane, addr, value });
                }
            }
        }
        words
    }

    /// Whether lanes that read at `last` can be in a wait at `now`. All groups of the warp may have
    /// run meanwhile.
    #[inline(always)]
    pub(super) fn is_wait(&self, last: u32, now: u32) -> bool {
        now.wrapping_sub(last) <= LONGEST_WAIT * (self.groups.len() as u32 + 1)
    }

    /// Whether lanes read a stepped clock in their wait, which its owner may end.
    pub(crate) fn waits_for_the_clock(&self) -> bool {
        self.polls.iter().any(|(poll, seen)| poll.addr == TIMER && self.is_wait(seen.at, self.executed))
    }
}

/// The contents of memory that a load of `bytes` bytes could read there now.
fn peek(table: &Table, shared: &SharedMemory, addr: u64, bytes: u8) -> Option<u64> {
    if !addr.is_multiple_of(u64::from(bytes)) {
        return None;
    }
    let is_shared = addr & TAG == SHARED_TAG || addr >> 32 == 0;
    let at = match is_shared {
        true => shared.pointer(addr & !TAG, bytes.into()).ok()?,
        false => table.find(addr, bytes.into()).map(|_| addr as *mut u8)?,
    };
    // SAFETY: the block's shared memory, or a region that the table keeps mapped, holds these bytes,
    // and the address is aligned to them.
    Some(unsafe { read(at, bytes, Ordering::Relaxed) })
}
