//! Bulk copies (the TMA), of consecutive bytes and of boxes of tensors.
//!
//! A copy happens after it was issued, in pieces. Each piece is read from the source and later
//! written to the destination. The points and the order are drawn from the seed; the last point is
//! a kernel's wait for the copy. A kernel that does not wait then reads wrong data, here as on a
//! GPU. A block that ends while the hardware may still read or write its shared memory is a fault.

use std::ops::Range;

use super::access::rmw;
use super::bulk_queue::{Buffer, End, PIECES, Pending, Stage, Stages};
use super::cluster::{map_shared, rank_of};
use super::descriptor::ranges;
use super::lanes::lanes;
use super::simd::prefetch;
use super::state::{BlockState, Env, Exec, Run, stop};
use crate::check::hooks::Place;
use crate::check::hooks::{Completion, Copy, Hooks};
use crate::check::record::{How, Update};
use crate::fault::FaultKind;
use crate::ir::{BulkOp, Combine, Multicast, Reduction, RemoteStore, SINK, Scope, TensorCopy, Way};
use crate::memory::Table;
use crate::racing;
use crate::seeds::Rng;
use crate::tensor_map::{
    MOST_AXES, MOST_DIMENSIONS, Reads, Tensor, Unit, WORDS, WORDS_OF_PIXELS, is_of_pixels,
};

/// One in so many copies lands as late as possible, so that a missing wait shows.
const LATE_ONE_IN: u64 = 8;

/// Bytes at the ends of a copy that are prefetched when the copy is issued.
const MOST_AHEAD: u32 = 8192;

/// A copy that failed when it was carried out: the fault, warp and instruction.
pub(crate) type Late = (FaultKind, u32, u32);

impl Pending {
    /// Moves pieces that are at the same stage on to the next one.
    fn advance(
        &mut self,
        block: &mut BlockState,
        table: &Table,
        pieces: Range<usize>,
    ) -> Result<(), FaultKind> {
        let range = self.range(pieces.start).start..self.range(pieces.end - 1).end;
        let next = match self.stages.of(pieces.start) {
            Stage::Issued if !self.units.is_empty() => {
                for at in range.step_by(16) {
                    let mut bytes = self.reads.outside();
                    if let Some((p, part)) = self.unit_pointer(block, table, at, self.src)? {
                        let inside = &mut bytes[part];
                        // SAFETY: `unit_pointer` checked the part's bytes.
                        unsafe { racing::load(p, inside.as_mut_ptr(), inside.len()) };
                        self.reads.convert(inside);
                    }
                    self.data.of_length(self.bytes)[at..at + 16].copy_from_slice(&bytes);
                }
                Stage::Read
            }
            Stage::Read if !self.units.is_empty() => {
                for at in range.step_by(16) {
                    if let Some((p, part)) = self.unit_pointer(block, table, at, self.dst)? {
                        let from = &self.data.0[at..][part];
                        match self.reduces {
                            // SAFETY: as above.
                            None => unsafe { racing::store(from.as_ptr(), p, from.len()) },
                            // SAFETY: as above. Units begin at multiples of 16 bytes of the tensor.
                            Some(combine) => unsafe { change(p, combine, from) },
                        }
                    }
                }
                Stage::Landed
            }
            Stage::Issued => {
                let src = end_pointer(block, table, self.src, self.bytes)?;
                let into = &mut self.data.of_length(self.bytes)[range.clone()];
                // SAFETY: `end_pointer` checked the source for the copy's length, in which the
                // range lies; the buffer is ours.
                unsafe { racing::load(src.add(range.start), into.as_mut_ptr(), into.len()) };
                for &(at, value) in self.stale.iter().filter(|(at, _)| range.contains(&(*at as usize))) {
                    self.data.0[at as usize..][..4].copy_from_slice(&value.to_ne_bytes());
                }
                Stage::Read
            }
            Stage::Read => {
                let dst = end_pointer(block, table, self.dst, self.bytes)?;
                let from = &self.data.0[range.clone()];
                match self.reduces {
                    // SAFETY: as above, for the destination.
                    None => unsafe {
                        racing::store(from.as_ptr(), dst.add(range.start), from.len());
                    },
                    // SAFETY: as above. Destination and range are aligned to the elements,
                    // which was checked at the issue.
                    Some(combine) => unsafe { change(dst.add(range.start), combine, from) },
                }
                Stage::Landed
            }
            Stage::Landed => Stage::Landed,
        };
        self.stages.set(pieces, next);
        Ok(())
    }

    /// The bytes of the unit at `at` of a box at one end of the copy, with their place in the unit.
    /// `None` where the unit is outside of the tensor.
    fn unit_pointer(
        &self,
        block: &mut BlockState,
        table: &Table,
        at: usize,
        end: End,
    ) -> Result<Option<(*mut u8, Range<usize>)>, FaultKind> {
        let unit = self.units[at / 16];
        if let End::Shared(_) = end {
            return Ok(Some((end_pointer(block, table, End::Shared(unit.shared), 16)?, 0..16)));
        }
        if unit.len == 0 {
            return Ok(None);
        }
        let first = usize::from(unit.first);
        let p = end_pointer(block, table, End::Global(unit.global), unit.len.into())?;
        Ok(Some((p, first..first + usize::from(unit.len))))
    }

    /// Reads and writes pieces of consecutive bytes that have not been read.
    fn copy(&mut self, block: &mut BlockState, table: &Table, pieces: Range<usize>) -> Result<(), FaultKind> {
        let range = self.range(pieces.start).start..self.range(pieces.end - 1).end;
        let src = end_pointer(block, table, self.src, self.bytes)?;
        let dst = end_pointer(block, table, self.dst, self.bytes)?;
        // SAFETY: `end_pointer` checked both for the copy's length, in which the range lies. They
        // may overlap.
        unsafe { racing::copy(src.add(range.start), dst.add(range.start), range.len()) };
        self.stages.set(pieces, Stage::Landed);
        Ok(())
    }

    /// Moves all pieces on to a stage.
    fn advance_to(&mut self, block: &mut BlockState, table: &Table, stage: Stage) -> Result<(), FaultKind> {
        let mut first = 0;
        while first < PIECES {
            let from = self.stages.of(first);
            let same = (first..PIECES).take_while(|piece| self.stages.of(*piece) == from).count();
            let alike = first..first + same;
            let plain = self.units.is_empty() && self.stale.is_empty() && self.reduces.is_none();
            if plain && from == Stage::Issued && stage == Stage::Landed {
                self.copy(block, table, alike.clone())?;
            }
            while self.stages.of(first) < stage {
                self.advance(block, table, alike.clone())?;
            }
            first = alike.end;
        }
        Ok(())
    }
}

/// Changes the elements at `dst` by those of `from`, each at once.
///
/// # Safety
/// `dst` must be valid for as many bytes as `from` has, and aligned to the elements.
unsafe fn change(dst: *mut u8, Combine { op, bytes }: Combine, from: &[u8]) {
    for (at, element) in from.chunks_exact(bytes.into()).enumerate() {
        let mut operand = [0; 8];
        operand[..element.len()].copy_from_slice(element);
        // SAFETY: passed on to the caller.
        unsafe { rmw(dst.add(at * usize::from(bytes)), bytes, op, u64::from_ne_bytes(operand), 0) };
    }
}

fn end_pointer(block: &mut BlockState, table: &Table, end: End, bytes: u32) -> Result<*mut u8, FaultKind> {
    match end {
        End::Shared(address) => block.in_cluster(address, u64::from(bytes)),
        End::Global(addr) => {
            if !block.bulk.regions.iter().any(|region| region.holds(addr, u64::from(bytes))) {
                let found = table.find(addr, u64::from(bytes));
                let found = found.ok_or_else(|| table.out_of_bounds(addr, u64::from(bytes)))?;
                block.bulk.regions.rotate_right(1);
                block.bulk.regions[0] = found;
            }
            Ok(addr as *mut u8)
        }
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
        // One draw decides for many copies, a bit each: this runs after every other slice of every
        // warp.
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
            !landed
        });
        self.bulk.pending = pending;
        failed.map_or(Ok(moved), Err)
    }

    /// Moves the copies of a thread in groups before one on to a stage, at which they leave the
    /// queue if it is the last.
    fn end_groups(
        &mut self,
        env: &Env,
        thread: u32,
        done_before: u32,
        stage: Stage,
    ) -> Result<(), FaultKind> {
        let mut pending = std::mem::take(&mut self.bulk.pending);
        let mut result = Ok(());
        pending.retain_mut(|p| {
            if p.thread != thread || p.mbar.is_some() || p.group >= done_before || result.is_err() {
                return true;
            }
            p.awaited = true;
            result = p.advance_to(self, &env.table, stage);
            stage != Stage::Landed
        });
        self.bulk.pending = pending;
        result
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

    /// The warp and the instruction of a copy under way to the shared memory of the block `rank`.
    pub(crate) fn copies_to(&self, rank: u32) -> Option<(u32, u32)> {
        let writes = |p: &&Pending| matches!(p.dst, End::Shared(address) if rank_of(address) == rank);
        self.bulk.pending.iter().find(writes).map(|p| (p.warp, p.pc))
    }

    /// The thread and the group, counted from 1, of the store that [`Self::finish_bulk`] reports.
    pub(crate) fn store_without_wait(&self) -> Option<(u32, u32)> {
        let is_late = |p: &&Pending| matches!(p.dst, End::Global(_)) && !p.awaited;
        self.bulk.pending.iter().find(is_late).map(|p| (p.thread, p.group + 1))
    }

    /// The block's warps have all exited. The hardware gives its shared memory to another block: a
    /// copy must not need it any more.
    pub(crate) fn finish_bulk(&mut self, table: &Table) -> Result<(), Late> {
        for p in &self.bulk.pending {
            let what = match p.dst {
                End::Shared(address) if self.is_remote(address) => match p.src {
                    End::Shared(_) if !p.has_reached(Stage::Read) => {
                        "a copy to another block may still read its source, in shared memory that is gone: meet that block behind its wait on the mbarrier"
                    }
                    _ => continue,
                },
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
        let mut issuers = None;
        for i in lanes(m) {
            let done = match *op {
                BulkOp::Load { dst, src, size, mbar } => {
                    let (dst, src) = (End::Shared(self.address(&dst, i)), End::Global(self.address(&src, i)));
                    self.issue(env, i, dst, src, size, Some(self.address(&mbar, i)), None)?
                }
                BulkOp::Store { dst, src, size } => {
                    let (dst, src) = (End::Global(self.address(&dst, i)), End::Shared(self.address(&src, i)));
                    self.issue(env, i, dst, src, size, None, None)?
                }
                BulkOp::SharedToShared { dst, src, size, mbar } => {
                    let (dst, src) = (End::Shared(self.address(&dst, i)), End::Shared(self.address(&src, i)));
                    self.issue(env, i, dst, src, size, Some(self.address(&mbar, i)), None)?
                }
                BulkOp::Prefetch { src, size } => {
                    let bytes = self.warp.regs.r32[size as usize][i];
                    check_shape(&[End::Global(self.address(&src, i))], bytes)
                }
                BulkOp::Tensor { copy } => self.issue_tensor(env, i, copy)?,
                BulkOp::Multicast { copy } => self.issue_multicast(env, i, copy)?,
                BulkOp::RemoteStore { store } => self.issue_store(i, store)?,
                BulkOp::Reduce { copy } => self.issue_reduction(env, i, copy)?,
                BulkOp::Commit => {
                    let thread = self.thread(i) as usize;
                    let queue = &mut self.block.bulk;
                    queue.committed[thread] += 1;
                    let group = queue.committed[thread];
                    if W::ON && queue.used[thread] == group {
                        self.watch.closed(i, self.pc, group);
                    }
                    Ok(())
                }
                BulkOp::Wait { pending, read_only } => {
                    // Most lanes that wait have issued no copy.
                    let has_copies = *issuers.get_or_insert_with(|| self.block.bulk.issuers(self.warp.index));
                    self.wait_groups(env, i, pending, read_only, has_copies >> i & 1 != 0)
                }
            };
            done.or_else(|kind| stop(kind, Some(i)))?;
        }
        Ok(())
    }

    fn thread(&self, lane: usize) -> u32 {
        self.warp.index * 32 + lane as u32
    }

    /// Issues a copy, or a reduction. The inner error is about the form of the copy, the outer one
    /// is a finding of the checks.
    #[allow(clippy::too_many_arguments)] // The parts of a copy, once each.
    fn issue(
        &mut self,
        env: &Env,
        lane: usize,
        dst: End,
        src: End,
        size: u32,
        mbar: Option<u64>,
        reduces: Option<Combine>,
    ) -> Run<Result<(), FaultKind>> {
        let bytes = self.warp.regs.r32[size as usize][lane];
        let own = match src {
            End::Shared(address) => self.block.shared.pointer(address, u64::from(bytes)).map(drop),
            End::Global(_) => Ok(()),
        };
        let formed = check_shape(&[dst, src], bytes)
            // Bad addresses are reported where the copy is issued, not where it lands.
            .and(own)
            .and_then(|()| end_pointer(self.block, &env.table, src, bytes))
            .and_then(|_| end_pointer(self.block, &env.table, dst, bytes))
            .and_then(|_| self.mbarrier_of_copy(dst, mbar));
        if let Err(kind) = formed {
            return Ok(Err(kind));
        }
        // The copy happens some slices later.
        for end in [src, dst] {
            if let End::Global(at) = end {
                prefetch(at as *const u8, bytes.min(MOST_AHEAD) as usize);
            }
        }
        let ends = match W::ON {
            true => [src, dst].map(|end| vec![(self.end_place(end, bytes), u64::from(bytes))]),
            false => Default::default(),
        };
        self.begin(lane, dst, src, bytes, (vec![], Reads::default()), mbar, ends, reduces)?;
        Ok(Ok(()))
    }

    /// Checks the mbarrier of a copy to `dst`.
    fn mbarrier_of_copy(&mut self, dst: End, mbar: Option<u64>) -> Result<(), FaultKind> {
        let (Some(mbar), End::Shared(dst)) = (mbar, dst) else { return Ok(()) };
        if rank_of(mbar) != rank_of(dst) {
            let message = format!(
                "the mbarrier is in block number {} of the cluster, the destination in number {}: both are in one block",
                rank_of(mbar),
                rank_of(dst)
            );
            return Err(FaultKind::BulkCopy { message });
        }
        self.block.initialised(mbar)
    }

    /// The blocks of the cluster that a mask of a multicast names.
    fn targets(&self, blocks: u32, lane: usize) -> Result<Vec<u32>, FaultKind> {
        let mask = self.warp.regs.r32[blocks as usize][lane] & 0xffff;
        let size = self.block.cluster.as_ref().map_or(1, |cluster| cluster.size());
        match lanes(mask).find(|&rank| rank as u32 >= size) {
            Some(rank) => Err(FaultKind::OutOfCluster { rank: rank as u32, blocks: size }),
            None => Ok(lanes(mask).map(|rank| rank as u32).collect()),
        }
    }

    /// Issues a load to several blocks of the cluster, at the same offset in each, as
    /// [`Exec::issue`] does.
    fn issue_multicast(&mut self, env: &Env, lane: usize, copy: u32) -> Run<Result<(), FaultKind>> {
        let Multicast { dst, src, size, mbar, blocks } = env.kernel.operands.multicasts[copy as usize];
        let [dst, src, mbar] = [dst, src, mbar].map(|a| self.address(&a, lane));
        let targets = match self.targets(blocks, lane) {
            Ok(targets) => targets,
            Err(kind) => return Ok(Err(kind)),
        };
        for rank in targets {
            let (to, mbar) = (End::Shared(map_shared(dst, rank)), map_shared(mbar, rank));
            if let Err(kind) = self.issue(env, lane, to, End::Global(src), size, Some(mbar), None)? {
                return Ok(Err(kind));
            }
        }
        Ok(Ok(()))
    }

    /// Issues a copy that changes its destination, as [`Exec::issue`] does.
    fn issue_reduction(&mut self, env: &Env, lane: usize, copy: u32) -> Run<Result<(), FaultKind>> {
        let Reduction { dst, src, size, mbar, combine } = env.kernel.operands.reductions[copy as usize];
        let (dst, src) = (self.address(&dst, lane), End::Shared(self.address(&src, lane)));
        let mbar = mbar.map(|mbar| self.address(&mbar, lane));
        let has_cluster = self.block.cluster.is_some() || env.kernel.required_cluster.is_some();
        if mbar.is_some() && !has_cluster {
            // An H200 reports the same fault. A required cluster of one block counts as a cluster.
            let message = "a reduction into shared memory, by a block that is in no cluster".to_owned();
            return Ok(Err(FaultKind::BulkCopy { message }));
        }
        let dst = if mbar.is_some() { End::Shared(dst) } else { End::Global(dst) };
        self.issue(env, lane, dst, src, size, mbar, Some(combine))
    }

    /// Issues `st.async` or `red.async`, as [`Exec::issue`] does.
    fn issue_store(&mut self, lane: usize, store: u32) -> Run<Result<(), FaultKind>> {
        let RemoteStore { dst, mbar, op, bytes: each, n, regs } =
            self.kernel.operands.remote_stores[store as usize];
        let [to, mbar] = [dst, mbar].map(|a| self.address(&a, lane));
        let bytes = u32::from(each) * u32::from(n);
        let size = u64::from(bytes);
        if !to.is_multiple_of(size) {
            return Ok(Err(FaultKind::Misaligned { addr: to, align: size }));
        }
        let there = self.block.in_cluster(to, size).map(drop);
        if let Err(kind) = there.and_then(|()| self.mbarrier_of_copy(End::Shared(to), Some(mbar))) {
            return Ok(Err(kind));
        }
        let mut data = vec![];
        for slot in &regs[..usize::from(n)] {
            let (narrow, wide) = (&self.warp.regs.r32, &self.warp.regs.r64);
            match each {
                8 => data.extend_from_slice(&wide[*slot as usize][lane].to_ne_bytes()),
                _ => data.extend_from_slice(&narrow[*slot as usize][lane].to_ne_bytes()),
            }
        }
        let how = match op {
            Some(_) => How { strong: Some(Scope::Cluster), size: each, rmw: Update::Modifies, ..How::ASYNC },
            None => How::ASYNC,
        };
        let mut stale = vec![];
        if W::ON {
            let dst = vec![(Place::Shared { offset: to }, size)];
            let completion = Completion::Store(mbar);
            let copy = Copy { src: vec![], dst, lane, pc: self.pc, completion, writes: how };
            let (old, violations) = self.watch.copy(&copy);
            stale = old;
            for (place, write, violation) in violations {
                self.blame(place, violation, lane, how, write)?;
            }
        }
        self.changed();
        let thread = self.thread(lane);
        self.block.bulk.pending.push(Pending {
            dst: End::Shared(to),
            src: End::Shared(to),
            bytes,
            units: vec![],
            reads: Reads::default(),
            mbar: Some(mbar),
            thread,
            group: 0,
            data: Buffer(data),
            reduces: op.map(|op| Combine { op, bytes: each }),
            stages: Stages::READ,
            late: None,
            awaited: true,
            stale,
            warp: self.warp.index,
            pc: self.pc,
        });
        Ok(Ok(()))
    }

    /// Issues a copy of a box of a tensor, as [`Exec::issue`] does.
    fn issue_tensor(&mut self, env: &Env, lane: usize, copy: u32) -> Run<Result<(), FaultKind>> {
        let TensorCopy { way, map, rank, coordinates, shared, blocks, offsets } =
            env.kernel.operands.tensor_copies[copy as usize];
        let bad = |message: String| Ok(Err(FaultKind::BulkCopy { message }));
        let at = self.address(&map, lane);
        if !at.is_multiple_of(64) {
            return bad(format!("the address {at:#x} of a tensor map is no multiple of 64 bytes"));
        }
        let mut words = [0; WORDS_OF_PIXELS];
        for i in 0..words.len() {
            if i < WORDS || is_of_pixels(&words) {
                words[i] = self.read_generic(at + 8 * i as u64, 8, lane)?;
            }
        }
        let Some(tensor) = Tensor::decode(&words) else {
            return bad(format!("there is no tensor map at {at:#x}: cuTensorMapEncodeTiled makes one"));
        };
        let tensor = match tensor {
            Ok(tensor) => tensor,
            Err(error) => return bad(format!("{error}, in the map at {at:#x}")),
        };
        if tensor.rank != usize::from(rank) {
            return bad(format!("a copy of {rank} dimensions, and the tensor map has {}", tensor.rank));
        }
        if tensor.is_of_pixels() != offsets.is_some() {
            let [copied, described] = match tensor.is_of_pixels() {
                true => ["a box", "pixels"],
                false => ["pixels", "boxes"],
            };
            return bad(format!("a copy of {copied} by a tensor map of {described}"));
        }
        let value = |slot: u32| self.warp.regs.r32[slot as usize][lane];
        let coordinates = coordinates.map(|slot| value(slot) as i32);
        let offsets = match (way, offsets) {
            (Way::Load(_), Some(slots)) => slots.map(|slot| value(slot) as u16),
            _ => [0; MOST_AXES],
        };
        if let Err(message) =
            tensor.check_coordinates(&coordinates, matches!(way, Way::Store | Way::Reduce(_)))
        {
            return bad(message);
        }
        let mbar = match way {
            Way::Prefetch => return Ok(Ok(())),
            Way::Load(mbar) => Some(self.address(&mbar, lane)),
            Way::Store | Way::Reduce(_) => None,
        };
        let reduces = match way {
            Way::Reduce(reduce) => match tensor.combine(reduce) {
                None => return bad(format!("{reduce:?} is no operation of the tensor's elements")),
                combine => combine,
            },
            _ => None,
        };
        let offset = self.address(&shared, lane);
        if !offset.is_multiple_of(128) {
            return Ok(Err(FaultKind::Misaligned { addr: offset, align: 128 }));
        }
        if blocks == SINK {
            return self.copy_box(env, lane, (&tensor, at), (&coordinates, offsets), offset, mbar, reduces);
        }
        let targets = match self.targets(blocks, lane) {
            Ok(targets) => targets,
            Err(kind) => return Ok(Err(kind)),
        };
        for rank in targets {
            let (offset, mbar) = (map_shared(offset, rank), mbar.map(|mbar| map_shared(mbar, rank)));
            if let Err(kind) =
                self.copy_box(env, lane, (&tensor, at), (&coordinates, offsets), offset, mbar, None)?
            {
                return Ok(Err(kind));
            }
        }
        Ok(Ok(()))
    }

    #[allow(clippy::too_many_arguments)] // The parts of a copy, once each.
    /// Issues the copy of a box of the tensor, whose map is at an address, from or to `offset`: a
    /// load if it has an mbarrier.
    fn copy_box(
        &mut self,
        env: &Env,
        lane: usize,
        (tensor, at): (&Tensor, u64),
        (coordinates, offsets): (&[i32; MOST_DIMENSIONS], [u16; MOST_AXES]),
        offset: u64,
        mbar: Option<u64>,
        reduces: Option<Combine>,
    ) -> Run<Result<(), FaultKind>> {
        let (bytes, room) = (tensor.bytes(), tensor.shared_bytes());
        let there = match mbar {
            Some(_) => self.block.in_cluster(offset, room),
            None => self.block.shared.pointer(offset, room),
        };
        let formed = there.and_then(|_| self.mbarrier_of_copy(End::Shared(offset), mbar));
        if let Err(kind) = formed {
            return Ok(Err(kind));
        }
        let mut units = tensor.units(coordinates, offsets, offset);
        if mbar.is_none() {
            // Where a row of the tensor ends in a unit, an H200 stores the rest of the unit too,
            // and reduces it. A unit ends with its memory here: on a GPU no other memory begins
            // there.
            let element = reduces.map_or(1, |combine| u64::from(combine.bytes));
            for unit in units.iter_mut().filter(|unit| unit.len > 0) {
                if let Some(found) = env.table.find(unit.global, unit.len.into()) {
                    let room = (found.start + found.bytes - unit.global).min(16);
                    unit.len = (room - room % element) as u8;
                }
            }
        }
        // Parts of the tensor that follow each other, and the bytes in shared memory.
        let mut parts: Vec<Range<u64>> = vec![];
        for unit in units.iter().filter(|unit| unit.len > 0) {
            let end = unit.global + u64::from(unit.len);
            match parts.last_mut() {
                Some(last) if last.end == unit.global => last.end = end,
                _ => parts.push(unit.global..end),
            }
        }
        for part in &parts {
            let len = part.end - part.start;
            if env.table.find(part.start, len).is_none() {
                return Ok(Err(env.table.out_of_bounds(part.start, len)));
            }
        }
        let box_ = ranges(units.iter().map(|unit| unit.shared));
        let place = |end: fn(u64) -> End, part: &Range<u64>| {
            let len = part.end - part.start;
            (self.end_place(end(part.start), len as u32), len)
        };
        let of_tensor: Vec<_> = parts.iter().map(|part| place(End::Global, part)).collect();
        let of_box: Vec<_> = box_.iter().map(|part| place(End::Shared, part)).collect();
        let (global, shared) = (End::Global(at), End::Shared(offset));
        let (src, dst, ends) = match mbar {
            None => (shared, global, [of_box, of_tensor]),
            Some(_) => (global, shared, [of_tensor, of_box]),
        };
        // A store takes bytes as they are.
        let reads = if mbar.is_some() { tensor.reads } else { Reads::default() };
        self.begin(lane, dst, src, bytes as u32, (units, reads), mbar, ends, reduces)?;
        Ok(Ok(()))
    }

    /// Begins a copy that is well formed. `ends` are the source and the destination for checks.
    #[allow(clippy::too_many_arguments)] // The parts of a copy, once each.
    fn begin(
        &mut self,
        lane: usize,
        dst: End,
        src: End,
        bytes: u32,
        (units, reads): (Vec<Unit>, Reads),
        mbar: Option<u64>,
        ends: [Vec<(Place, u64)>; 2],
        reduces: Option<Combine>,
    ) -> Run<()> {
        let thread = self.thread(lane);
        let group = self.block.bulk.committed[thread as usize];
        if mbar.is_none() {
            self.block.bulk.used[thread as usize] = group + 1;
        }
        let mut stale = vec![];
        if W::ON {
            let [src, dst] = ends;
            let completion = mbar.map_or(Completion::Group(group), Completion::Mbarrier);
            // Each element of a reduction is relaxed, of scope .gpu.
            let writes = match reduces {
                Some(Combine { bytes, .. }) => {
                    How { strong: Some(Scope::Gpu), size: bytes, rmw: Update::Modifies, ..How::BULK }
                }
                None => How::BULK,
            };
            let copy = Copy { src, dst, lane, pc: self.pc, completion, writes };
            let (old, violations) = self.watch.copy(&copy);
            // A box has no words in a row.
            stale = if units.is_empty() { old } else { vec![] };
            for (place, write, violation) in violations {
                self.blame(place, violation, lane, if write { writes } else { How::BULK }, write)?;
            }
        }
        self.changed();
        let (warp, pc) = (self.warp.index, self.pc);
        let p = Pending {
            dst,
            src,
            bytes,
            units,
            reads,
            mbar,
            thread,
            group,
            data: Buffer::default(),
            reduces,
            stages: Stages::default(),
            late: None,
            awaited: false,
            stale,
            warp,
            pc,
        };
        self.block.bulk.pending.push(p);
        Ok(())
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
    /// `has_copies`: some of its copies are under way.
    fn wait_groups(
        &mut self,
        env: &Env,
        lane: usize,
        allowed: u32,
        read_only: bool,
        has_copies: bool,
    ) -> Result<(), FaultKind> {
        let thread = self.thread(lane);
        let done_before = self.block.bulk.committed[thread as usize].saturating_sub(allowed);
        let used = self.block.bulk.used[thread as usize];
        if W::ON && used > 0 {
            self.watch.waited(lane, self.pc, done_before.min(used), !read_only);
        }
        let stage = if read_only { Stage::Read } else { Stage::Landed };
        let done = if has_copies { self.block.end_groups(env, thread, done_before, stage) } else { Ok(()) };
        if !read_only {
            self.changed();
        }
        done
    }
}

/// Addresses and sizes must be multiples of 16 bytes.
fn check_shape(ends: &[End], bytes: u32) -> Result<(), FaultKind> {
    if !bytes.is_multiple_of(16) {
        let message = format!("size {bytes} is not a multiple of 16 bytes");
        return Err(FaultKind::BulkCopy { message });
    }
    for end in ends {
        let at = match *end {
            End::Global(at) | End::Shared(at) => at,
        };
        if !at.is_multiple_of(16) {
            return Err(FaultKind::Misaligned { addr: at, align: 16 });
        }
    }
    Ok(())
}
