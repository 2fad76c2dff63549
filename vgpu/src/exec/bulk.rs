//! Bulk copies (the TMA without tensors).
//!
//! A copy happens after it was issued, in pieces. Each piece is read from the source and later
//! written to the destination. The points and the order are drawn from the seed; the last point is
//! a kernel's wait for the copy. A kernel that does not wait then sees wrong data, here as on a
//! GPU. A block that ends while the hardware may still read or write its shared memory is a fault.

use std::ops::Range;

use super::bulk_queue::{End, PIECES, Pending, Stage};
use super::lanes::lanes;
use super::state::{BlockState, Env, Exec, Run, stop};
use crate::check::hooks::Place;
use crate::check::hooks::{Completion, Copy, Hooks};
use crate::check::record::How;
use crate::fault::FaultKind;
use crate::ir::{Addr, BulkOp};
use crate::memory::Table;
use crate::seeds::Rng;

/// One in so many copies lands as late as possible, so that a missing wait shows.
const LATE_ONE_IN: u64 = 8;

/// A copy that failed when it was carried out: the fault, warp and instruction.
pub(crate) type Late = (FaultKind, u32, u32);

impl Pending {
    /// Moves pieces that have come equally far on by one stage.
    fn advance(
        &mut self,
        block: &mut BlockState,
        table: &Table,
        pieces: Range<usize>,
    ) -> Result<(), FaultKind> {
        let range = self.range(pieces.start).start..self.range(pieces.end - 1).end;
        let next = match self.pieces[pieces.start] {
            Stage::Issued => {
                let src = end_pointer(block, table, self.src, self.bytes)?;
                let into = &mut self.data[range.clone()];
                // SAFETY: `end_pointer` checked the source for the copy's length, in which the
                // range lies; the buffer is ours.
                unsafe { std::ptr::copy_nonoverlapping(src.add(range.start), into.as_mut_ptr(), into.len()) };
                for &(at, value) in self.stale.iter().filter(|(at, _)| range.contains(&(*at as usize))) {
                    self.data[at as usize..][..4].copy_from_slice(&value.to_ne_bytes());
                }
                Stage::Read
            }
            Stage::Read => {
                let dst = end_pointer(block, table, self.dst, self.bytes)?;
                let from = &self.data[range.clone()];
                // SAFETY: as above, for the destination.
                unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), dst.add(range.start), from.len()) };
                Stage::Landed
            }
            Stage::Landed => Stage::Landed,
        };
        self.pieces[pieces].fill(next);
        Ok(())
    }

    /// Moves all pieces on to a stage.
    fn advance_to(&mut self, block: &mut BlockState, table: &Table, stage: Stage) -> Result<(), FaultKind> {
        let mut first = 0;
        while first < PIECES {
            let from = self.pieces[first];
            let same = self.pieces[first..].iter().take_while(|piece| **piece == from).count();
            let alike = first..first + same;
            while self.pieces[first] < stage {
                self.advance(block, table, alike.clone())?;
            }
            first = alike.end;
        }
        Ok(())
    }
}

fn end_pointer(block: &mut BlockState, table: &Table, end: End, bytes: u32) -> Result<*mut u8, FaultKind> {
    match end {
        End::Shared(offset) => block.shared.pointer(offset, u64::from(bytes)),
        End::Global(addr) => match table.find(addr, u64::from(bytes)) {
            Some(_) => Ok(addr as *mut u8),
            None => Err(table.out_of_bounds(addr, u64::from(bytes))),
        },
    }
}

impl BlockState {
    /// Moves copies on, of both kinds; see [`BlockState::progress_bulk`] and
    /// [`BlockState::progress_copies`]. Returns whether anything moved.
    pub(crate) fn progress(&mut self, table: &Table, mut rng: Option<&mut Rng>) -> Result<bool, Late> {
        let bulk = !self.bulk.is_empty() && self.progress_bulk(table, rng.as_deref_mut())?;
        let own = !self.copies.is_empty() && self.progress_copies(table, rng)?;
        Ok(bulk || own)
    }

    /// Moves pending bulk copies on: each by one piece with probability 1/2, but for late ones, or
    /// all of them to the end. Returns whether anything moved.
    fn progress_bulk(&mut self, table: &Table, mut rng: Option<&mut Rng>) -> Result<bool, Late> {
        // One draw decides for many copies, a bit each: this is asked after every other slice of
        // every warp.
        let mut bits = (0, 0);
        let mut one_in_two = |rng: &mut Rng| {
            bits = if bits.1 == 0 { (rng.next(), u64::BITS) } else { bits };
            bits = (bits.0 >> 1, bits.1 - 1);
            bits.0 & 1 == 0
        };
        let mut pending = std::mem::take(&mut self.bulk.pending);
        let mut moved = false;
        let mut failed = None;
        pending.retain_mut(|p| {
            let rests = rng.as_mut().is_some_and(|rng| {
                *p.late.get_or_insert_with(|| rng.below(LATE_ONE_IN) == 0) || !one_in_two(rng)
            });
            if failed.is_some() || rests {
                return true;
            }
            moved = true;
            let done = match &mut rng {
                None => p.advance_to(self, table, Stage::Landed),
                // Half of the time everything, so that copies do not take for ever; else any piece.
                Some(rng) => match rng.below(2 * PIECES as u64) as usize {
                    piece @ 0..PIECES => p.advance(self, table, piece..piece + 1),
                    _ => p.advance_to(
                        self,
                        table,
                        if p.has_reached(Stage::Read) { Stage::Landed } else { Stage::Read },
                    ),
                },
            };
            let landed = p.has_reached(Stage::Landed);
            let done = done.and_then(|()| match p.mbar {
                Some(mbar) if landed => self.complete_tx(mbar, p.bytes),
                _ => Ok(()),
            });
            if let Err(kind) = done {
                failed = Some((kind, p.warp, p.pc));
            }
            if landed {
                self.bulk.spare.push(std::mem::take(&mut p.data));
            }
            !landed
        });
        self.bulk.pending = pending;
        failed.map_or(Ok(moved), Err)
    }

    /// How many copies are under way, each a step of an exploration.
    pub(crate) fn copy_steps(&self) -> usize {
        self.bulk.pending.len() + self.copies.instructions()
    }

    /// Moves one copy on, as a whole: a bulk copy by one stage, the copies of an instruction to
    /// their ends.
    pub(crate) fn step_copy(&mut self, table: &Table, index: usize) -> Result<(), Late> {
        if index >= self.bulk.pending.len() {
            return self.step_instruction(table, index - self.bulk.pending.len());
        }
        let mut p = self.bulk.pending.remove(index);
        let next = if p.has_reached(Stage::Read) { Stage::Landed } else { Stage::Read };
        let moved = p.advance_to(self, table, next).and_then(|()| match p.mbar {
            Some(mbar) if next == Stage::Landed => self.complete_tx(mbar, p.bytes),
            _ => Ok(()),
        });
        moved.map_err(|kind| (kind, p.warp, p.pc))?;
        if next == Stage::Read {
            self.bulk.pending.insert(index, p);
        }
        Ok(())
    }

    /// The block's warps have all exited. The hardware gives its shared memory to another block: a
    /// copy must not need it any more.
    pub(crate) fn finish_bulk(&mut self, table: &Table) -> Result<(), Late> {
        for p in &self.bulk.pending {
            let what = match p.dst {
                End::Shared(_) => {
                    "a bulk load is under way without a wait; it writes to shared memory that is gone: wait on its mbarrier"
                }
                End::Global(_) if !p.awaited => {
                    "a bulk store may still read its source, in shared memory that is gone: wait with cp.async.bulk.wait_group or .wait_group.read"
                }
                End::Global(_) => continue,
            };
            let message = format!("the block has ended, and {what} before the last thread ends");
            return Err((FaultKind::CopyOutlivesBlock { message }, p.warp, p.pc));
        }
        self.progress(table, None).map(|_| ())
    }
}

impl<W: Hooks> Exec<'_, W> {
    pub(super) fn bulk(&mut self, op: &BulkOp, m: u32) -> Run<()> {
        let env = self.env;
        for i in lanes(m) {
            let done = match *op {
                BulkOp::Load { dst, src, size, mbar } => {
                    let (dst, src) = (End::Shared(self.address(&dst, i)), End::Global(self.address(&src, i)));
                    self.issue(env, i, dst, src, size, Some(mbar))?
                }
                BulkOp::Store { dst, src, size } => {
                    let (dst, src) = (End::Global(self.address(&dst, i)), End::Shared(self.address(&src, i)));
                    self.issue(env, i, dst, src, size, None)?
                }
                BulkOp::SharedToShared { dst, src, size, mbar } => {
                    let (dst, src) = (End::Shared(self.address(&dst, i)), End::Shared(self.address(&src, i)));
                    self.issue(env, i, dst, src, size, Some(mbar))?
                }
                BulkOp::Prefetch { src, size } => {
                    let bytes = self.warp.regs.r32[size as usize][i];
                    check_shape(&[End::Global(self.address(&src, i))], bytes)
                }
                BulkOp::Commit => {
                    let thread = self.thread(i) as usize;
                    self.block.bulk.committed[thread] += 1;
                    Ok(())
                }
                BulkOp::Wait { pending, read_only } => self.wait_groups(env, i, pending, read_only),
            };
            done.or_else(|kind| stop(kind, Some(i)))?;
        }
        Ok(())
    }

    fn thread(&self, lane: usize) -> u32 {
        self.warp.index * 32 + lane as u32
    }

    /// Issues a copy. The inner error is about the form of the copy, the outer one is a finding of
    /// the checks.
    fn issue(
        &mut self,
        env: &Env,
        lane: usize,
        dst: End,
        src: End,
        size: u32,
        mbar: Option<Addr>,
    ) -> Run<Result<(), FaultKind>> {
        let bytes = self.warp.regs.r32[size as usize][lane];
        let mbar = mbar.map(|a| self.address(&a, lane));
        let formed = check_shape(&[dst, src], bytes)
            // Bad addresses are reported where the copy is issued, not where it lands.
            .and_then(|()| end_pointer(self.block, &env.table, src, bytes))
            .and_then(|_| end_pointer(self.block, &env.table, dst, bytes))
            .and_then(|_| mbar.map_or(Ok(()), |offset| self.block.initialised(offset)));
        if let Err(kind) = formed {
            return Ok(Err(kind));
        }
        let thread = self.thread(lane);
        let group = self.block.bulk.committed[thread as usize];
        if mbar.is_none() {
            self.block.bulk.used[thread as usize] = group + 1;
        }
        let mut stale = vec![];
        if W::ON {
            let (from, to) = (self.end_place(src, bytes), self.end_place(dst, bytes));
            let copy = Copy {
                src: from,
                dst: to,
                read: u64::from(bytes),
                bytes: u64::from(bytes),
                lane,
                pc: self.pc,
                completion: mbar.map_or(Completion::Group(group), Completion::Mbarrier),
            };
            let (old, violations) = self.watch.copy(&copy);
            stale = old;
            for (place, write, violation) in violations {
                self.blame(place, violation, lane, How::BULK, write)?;
            }
        }
        self.changed();
        let mut data = self.block.bulk.spare.pop().unwrap_or_default();
        data.resize(bytes as usize, 0);
        let (warp, pc) = (self.warp.index, self.pc);
        let pieces = [Stage::Issued; PIECES];
        let p = Pending {
            dst,
            src,
            bytes,
            mbar,
            thread,
            group,
            data,
            pieces,
            late: None,
            awaited: false,
            stale,
            warp,
            pc,
        };
        self.block.bulk.pending.push(p);
        Ok(Ok(()))
    }

    fn end_place(&self, end: End, bytes: u32) -> Place {
        match end {
            End::Shared(offset) => Place::Shared { offset },
            End::Global(addr) => match self.env.table.find(addr, u64::from(bytes)) {
                Some(found) => Place::Global { shadow: found.shadow, offset: addr - found.start },
                None => Place::Private,
            },
        }
    }

    /// `cp.async.bulk.wait_group`: all but the latest `allowed` groups of this thread.
    fn wait_groups(
        &mut self,
        env: &Env,
        lane: usize,
        allowed: u32,
        read_only: bool,
    ) -> Result<(), FaultKind> {
        let thread = self.thread(lane);
        let done_before = self.block.bulk.committed[thread as usize].saturating_sub(allowed);
        if W::ON {
            // Many lanes wait, few have copied.
            let group = done_before.min(self.block.bulk.used[thread as usize]);
            self.watch.waited(lane, self.pc, group, !read_only);
        }
        let mut pending = std::mem::take(&mut self.block.bulk.pending);
        let mut result = Ok(());
        pending.retain_mut(|p| {
            if p.thread != thread || p.mbar.is_some() || p.group >= done_before || result.is_err() {
                return true;
            }
            p.awaited = true;
            result =
                p.advance_to(self.block, &env.table, if read_only { Stage::Read } else { Stage::Landed });
            read_only
        });
        self.block.bulk.pending = pending;
        if read_only {
            return result;
        }
        self.changed();
        result
    }
}

/// Addresses and sizes must be multiples of 16 bytes.
fn check_shape(ends: &[End], bytes: u32) -> Result<(), FaultKind> {
    if !bytes.is_multiple_of(16) {
        let message = format!("size {bytes} is not a multiple of 16 bytes");
        return Err(FaultKind::BulkCopy { message });
    }
    for end in ends {
        let (what, at) = match *end {
            End::Global(a) => ("global address", a),
            End::Shared(o) => ("shared offset", o),
        };
        if !at.is_multiple_of(16) {
            let message = format!("{what} {at:#x} is not a multiple of 16 bytes");
            return Err(FaultKind::BulkCopy { message });
        }
    }
    Ok(())
}
