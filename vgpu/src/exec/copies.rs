//! Asynchronous copies of threads: `cp.async` without `.bulk`, from global to shared memory.
//!
//! A copy happens after its instruction, lane by lane, at points that are drawn from the seed. The
//! last point is the wait of its thread that covers it, or, for an arrival on an mbarrier, the
//! moment when no warp can go on without it. A kernel that does not wait then finds the old
//! contents of the destination. Copies that nothing waits for end with their block.

use std::collections::VecDeque;

use super::access::LOADS;
use super::bulk::Late;
use super::bulk_queue::Landed;
use super::lanes::{lanes, mask_of};
use super::state::{BlockState, Exec, Run, stop};
use crate::check::hooks::{Completion, Copy, Hooks, Place};
use crate::check::record::How;
use crate::fault::FaultKind;
use crate::ir::{Addr, CopyOp, SINK};
use crate::memory::{Found, Table};
use crate::racing;
use crate::seeds::Rng;

/// One in so many instructions copies as late as possible, so that a missing wait shows.
const LATE_ONE_IN: u64 = 4;

/// The copies of one instruction, one for each lane.
#[derive(Debug)]
struct Started {
    warp: u32,
    pc: u32,
    /// Lanes whose copies have not happened yet.
    lanes: u32,
    /// The number of each lane's copy among those of its thread, from 1.
    number: [u32; 32],
    dst: [u64; 32],
    src: [u64; 32],
    /// Bytes that each lane writes, and how many of them it reads; the rest are zeros.
    bytes: u8,
    read: [u8; 32],
    /// Whether the copies happen only when no warp can run or a wait covers them. Drawn when they
    /// might first have happened.
    late: Option<bool>,
    /// In weak-memory mode: bytes that a lane reads as they were before, from an offset on.
    stale: Vec<(usize, usize, [u8; 4])>,
}

/// A lane's arrival on an mbarrier, once its first `copies` copies have happened.
#[derive(Debug)]
struct Arrival {
    warp: u32,
    pc: u32,
    lane: usize,
    mbar: u64,
    copies: u32,
}

/// The copies of a thread so far.
#[derive(Clone, Debug, Default)]
struct Thread {
    started: u32,
    /// How many had been started when each group was closed, without groups that were waited for.
    groups: VecDeque<u32>,
    /// How many copies a wait of the thread has covered.
    waited: u32,
}

/// The asynchronous copies of a block's threads.
#[derive(Debug, Default)]
pub(crate) struct CopyQueue {
    started: Vec<Started>,
    arrivals: Vec<Arrival>,
    /// Empty before the first copy.
    threads: Vec<Thread>,
}

impl CopyQueue {
    pub(crate) fn reset(&mut self) {
        self.started.clear();
        self.arrivals.clear();
        self.threads.clear();
    }

    /// Instructions of which copies are under way.
    pub(super) fn instructions(&self) -> usize {
        self.started.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.started.is_empty() && self.arrivals.is_empty()
    }
}

impl Started {
    /// Executes the copies of the lanes `m`.
    fn land(&mut self, block: &mut BlockState, table: &Table, m: u32) -> Result<(), FaultKind> {
        let mut region = Found::default();
        for lane in lanes(self.lanes & m) {
            let mut data = [0; 16];
            let (addr, read) = (self.src[lane], usize::from(self.read[lane]));
            if read > 0 {
                // Neighbours mostly read the same region.
                if !region.holds(addr, read as u64) {
                    let found = table.find(addr, read as u64);
                    region = found.ok_or_else(|| table.out_of_bounds(addr, read as u64))?;
                }
                // SAFETY: the table, which keeps its regions mapped, has the source's bytes; `read`
                // is at most 16, the length of the buffer.
                unsafe { racing::load(addr as *const u8, data.as_mut_ptr(), read) };
            }
            for (_, at, old) in self.stale.iter().filter(|(of, ..)| *of == lane) {
                data[*at..read].iter_mut().zip(old).for_each(|(to, from)| *to = *from);
            }
            let bytes = usize::from(self.bytes);
            let to = block.shared.pointer(self.dst[lane], bytes as u64)?;
            // SAFETY: `pointer` checked the destination for `bytes` bytes, at most 16.
            unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, bytes) };
        }
        self.lanes &= !m;
        Ok(())
    }
}

impl BlockState {
    /// Executes copies: each instruction's with probability 1/2, all lanes or some of them, but for
    /// late ones; or all of them. Returns whether anything happened.
    pub(super) fn progress_copies(&mut self, table: &Table, mut rng: Option<&mut Rng>) -> Result<bool, Late> {
        let mut moved = false;
        let mut started = std::mem::take(&mut self.copies.started);
        let mut failed = None;
        for copies in &mut started {
            let m = match &mut rng {
                None => u32::MAX,
                Some(rng) => {
                    let late = *copies.late.get_or_insert_with(|| rng.below(LATE_ONE_IN) == 0);
                    match rng.below(4) {
                        _ if late => 0,
                        0 => u32::MAX,
                        1 => rng.next() as u32,
                        _ => 0,
                    }
                }
            };
            moved |= copies.lanes & m != 0;
            if let Err(kind) = copies.land(self, table, m) {
                failed = failed.or(Some((kind, copies.warp, copies.pc)));
            }
        }
        self.copies.started = started;
        failed.map_or(Ok(()), Err)?;
        self.settle_copies()?;
        Ok(moved)
    }

    /// Executes all copies of an instruction.
    pub(super) fn step_instruction(&mut self, table: &Table, index: usize) -> Result<(), Late> {
        let mut copies = self.copies.started.remove(index);
        let landed = copies.land(self, table, u32::MAX);
        landed.map_err(|kind| (kind, copies.warp, copies.pc))?;
        self.settle_copies()
    }

    /// Drops copies that have happened, and executes the arrivals behind them.
    fn settle_copies(&mut self) -> Result<(), Late> {
        self.copies.started.retain(|copies| copies.lanes != 0);
        let mut arrivals = std::mem::take(&mut self.copies.arrivals);
        let mut result = Ok(());
        arrivals.retain(|a| {
            let before = |copies: &Started| {
                copies.warp == a.warp && copies.lanes >> a.lane & 1 != 0 && copies.number[a.lane] <= a.copies
            };
            if result.is_err() || self.copies.started.iter().any(before) {
                return true;
            }
            let &Arrival { warp, lane, mbar: offset, copies, .. } = a;
            self.landed.push(Landed::Copies { offset, warp, lane, copies });
            result = self.arrive_of_copies(offset).map_err(|kind| (kind, a.warp, a.pc));
            false
        });
        self.copies.arrivals = arrivals;
        result
    }

    /// Executes the copies of the lanes `m` of a warp, up to a number for each lane.
    fn land_up_to(&mut self, table: &Table, warp: u32, m: u32, upto: &[u32; 32]) -> Result<(), Late> {
        let mut started = std::mem::take(&mut self.copies.started);
        let mut failed = None;
        for copies in started.iter_mut().filter(|copies| copies.warp == warp) {
            let due = copies.lanes & m & mask_of(|i| copies.number[i] <= upto[i]);
            if let Err(kind) = copies.land(self, table, due) {
                failed = failed.or(Some((kind, copies.warp, copies.pc)));
            }
        }
        self.copies.started = started;
        failed.map_or(Ok(()), Err)?;
        self.settle_copies()
    }
}

impl<W: Hooks> Exec<'_, W> {
    /// Executes an instruction of the `cp.async` family for the lanes `m`.
    pub(super) fn copy(&mut self, op: &CopyOp, m: u32) -> Run<()> {
        if self.block.copies.threads.is_empty() {
            let threads = self.block.warps as usize * 32;
            self.block.copies.threads.resize(threads, Thread::default());
        }
        let first = self.warp.index as usize * 32;
        match *op {
            CopyOp::Start { dst, src, bytes, read } => self.start_copy(&dst, &src, bytes, read, m),
            CopyOp::Commit => {
                for i in lanes(m) {
                    let thread = &mut self.block.copies.threads[first + i];
                    thread.groups.push_back(thread.started);
                }
                Ok(())
            }
            CopyOp::Wait { allowed } => {
                let mut upto = [0; 32];
                for i in lanes(m) {
                    let thread = &mut self.block.copies.threads[first + i];
                    upto[i] = thread.waited;
                    while thread.groups.len() > allowed as usize {
                        upto[i] = thread.groups.pop_front().unwrap_or_default();
                    }
                }
                self.wait_for_copies(m, &upto)
            }
            CopyOp::WaitAll => {
                let mut upto = [0; 32];
                for i in lanes(m) {
                    let thread = &mut self.block.copies.threads[first + i];
                    thread.groups.clear();
                    upto[i] = thread.started;
                }
                self.wait_for_copies(m, &upto)
            }
            CopyOp::Arrive { mbar, space, counted } => {
                for i in lanes(m) {
                    let address = self.address(&mbar, i);
                    let offset = Self::shared_offset(space, address).or_else(|kind| stop(kind, Some(i)))?;
                    let copies = self.block.copies.threads[first + i].started;
                    self.watch_copy_arrival(offset, i)?;
                    let ready = match counted {
                        true => self.block.initialised(offset),
                        false => self.block.expect_one_more(offset),
                    };
                    ready.or_else(|kind| stop(kind, Some(i)))?;
                    let (warp, pc) = (self.warp.index, self.pc);
                    self.block.copies.arrivals.push(Arrival { warp, pc, lane: i, mbar: offset, copies });
                }
                self.changed();
                let settled = self.block.settle_copies();
                self.note_landed();
                settled.or_else(|late| self.stop_at(late))
            }
        }
    }

    /// Starts the copies of the lanes `m`. Bad addresses are reported here, not where the copies
    /// happen.
    fn start_copy(&mut self, dst: &Addr, src: &Addr, bytes: u8, read: u32, m: u32) -> Run<()> {
        let size = u64::from(bytes);
        let (dst, src) = (self.addresses(dst), self.addresses(src));
        let sizes = (read != SINK).then(|| self.warp.regs.r32[read as usize]);
        if let Some((i, n)) =
            sizes.and_then(|sizes| lanes(m).map(|i| (i, sizes[i])).find(|(_, n)| *n > bytes.into()))
        {
            let message = format!("it reads {n} bytes (src-size), and copies {bytes} (cp-size)");
            return stop(FaultKind::AsyncCopy { message }, Some(i));
        }
        let read = sizes.map_or([bytes; 32], |sizes| sizes.map(|n| n as u8));
        let (warp, pc, first) = (self.warp.index, self.pc, self.warp.index as usize * 32);
        let (mut number, mut stale) = ([0; 32], vec![]);
        for i in lanes(m) {
            let from_memory = u64::from(read[i]);
            let addresses = [Some(dst[i]), (from_memory > 0).then_some(src[i])];
            if let Some(addr) = addresses.into_iter().flatten().find(|addr| !addr.is_multiple_of(size)) {
                return stop(FaultKind::Misaligned { addr, align: size }, Some(i));
            }
            self.block.shared.pointer(dst[i], size).or_else(|kind| stop(kind, Some(i)))?;
            if from_memory > 0 {
                self.global(LOADS, src[i], from_memory).or_else(|kind| stop(kind, Some(i)))?;
            }
            let thread = &mut self.block.copies.threads[first + i];
            thread.started += 1;
            number[i] = thread.started;
            if W::ON {
                let region = self.warp.regions[LOADS][0];
                let from = match from_memory {
                    0 => Place::Private,
                    _ => Place::Global { shadow: region.shadow, offset: src[i] - region.start },
                };
                let copy = Copy {
                    src: vec![(from, from_memory)],
                    dst: vec![(Place::Shared { offset: dst[i] }, size)],
                    lane: i,
                    pc,
                    completion: Completion::Thread(number[i]),
                    writes: How::ASYNC,
                };
                let (old, violations) = self.watch.copy(&copy);
                stale.extend(old.into_iter().map(|(at, value)| (i, at as usize, value.to_ne_bytes())));
                for (place, write, violation) in violations {
                    self.blame(place, violation, i, How::ASYNC, write)?;
                }
            }
        }
        let started = Started { warp, pc, lanes: m, number, dst, src, bytes, read, late: None, stale };
        self.block.copies.started.push(started);
        self.changed();
        Ok(())
    }

    /// Waits for the copies of the lanes `m`, up to a number for each lane.
    fn wait_for_copies(&mut self, m: u32, upto: &[u32; 32]) -> Run<()> {
        let (warp, first) = (self.warp.index, self.warp.index as usize * 32);
        for i in lanes(m) {
            let waited = &mut self.block.copies.threads[first + i].waited;
            if W::ON && upto[i] > *waited {
                self.watch.waited_for_copies(i, self.pc, upto[i]);
            }
            *waited = (*waited).max(upto[i]);
        }
        if self.block.copies.is_empty() {
            return Ok(());
        }
        let landed = self.block.land_up_to(&self.env.table, warp, m, upto);
        self.note_landed();
        landed.or_else(|late| self.stop_at(late))?;
        self.changed();
        Ok(())
    }

    /// Reports to the checks the arrivals and phases that copies have caused.
    fn note_landed(&mut self) {
        for landed in std::mem::take(&mut self.block.landed) {
            self.watch.landed(&landed);
        }
    }

    /// Stops at the instruction of a copy that failed.
    fn stop_at<T>(&mut self, (kind, _, pc): Late) -> Run<T> {
        self.pc = pc;
        stop(kind, None)
    }
}
