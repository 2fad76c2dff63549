//! Bulk copies (the TMA without tensors).
//!
//! Without a seed a copy happens at once. With a seed it happens later, in two stages (its source is read, its
//! destination is written) at points drawn from the seed, and at the latest when a kernel waits for it. A kernel that
//! does not wait then sees wrong data, here as on a GPU.

use super::lanes::lanes;
use super::{BlockState, Env, Exec, Run, stop};
use crate::fault::FaultKind;
use crate::ir::{Addr, BulkOp};
use crate::memory::Table;
use crate::rng::Rng;

/// One end of a copy.
#[derive(Clone, Copy, Debug)]
enum End {
    Global(u64),
    Shared(u64),
}

/// A copy that has been issued but has not landed.
#[derive(Debug)]
struct Pending {
    dst: End,
    src: End,
    bytes: u32,
    /// Shared offset of the mbarrier to complete on; else a member of a bulk group.
    mbar: Option<u64>,
    /// Thread that issued it, and its bulk group.
    thread: u32,
    group: u32,
    /// What was read, once it was.
    data: Option<Vec<u8>>,
    /// For messages.
    warp: u32,
    pc: u32,
}

/// The copies of a block that are under way.
#[derive(Debug, Default)]
pub(crate) struct BulkQueue {
    pending: Vec<Pending>,
    /// Groups committed so far, per thread.
    committed: Vec<u32>,
}

/// A copy that failed when it was carried out: the fault, warp and instruction.
pub(crate) type Late = (FaultKind, u32, u32);

impl BulkQueue {
    pub(crate) fn reset(&mut self, threads: u32) {
        self.pending.clear();
        self.committed.clear();
        self.committed.resize(threads as usize, 0);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }
}

fn end_pointer(block: &mut BlockState, table: &Table, end: End, bytes: u32) -> Result<*mut u8, FaultKind> {
    match end {
        End::Shared(offset) => block.shared.pointer(offset, u64::from(bytes)),
        End::Global(addr) => match table.find(addr, u64::from(bytes)) {
            Some(_) => Ok(addr as *mut u8),
            None => {
                let nearest = table.nearest(addr);
                Err(FaultKind::OutOfBounds { addr, bytes: u64::from(bytes), nearest })
            }
        },
    }
}

fn read_stage(block: &mut BlockState, table: &Table, p: &mut Pending) -> Result<(), FaultKind> {
    if p.data.is_none() {
        let src = end_pointer(block, table, p.src, p.bytes)?;
        let mut data = vec![0u8; p.bytes as usize];
        // SAFETY: `end_pointer` checked the source for this length; the buffer is ours.
        unsafe { std::ptr::copy_nonoverlapping(src, data.as_mut_ptr(), data.len()) };
        p.data = Some(data);
    }
    Ok(())
}

fn write_stage(block: &mut BlockState, table: &Table, p: &mut Pending) -> Result<(), FaultKind> {
    read_stage(block, table, p)?;
    let dst = end_pointer(block, table, p.dst, p.bytes)?;
    if let Some(data) = &p.data {
        // SAFETY: `end_pointer` checked the destination for this length; the buffer is ours.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), dst, data.len()) };
    }
    p.mbar.map_or(Ok(()), |mbar| block.complete_tx(mbar, p.bytes))
}

impl BlockState {
    /// Moves pending copies on: each by one stage with probability 1/4, or all of them to the end. Returns whether
    /// anything moved.
    pub(crate) fn progress_bulk(&mut self, table: &Table, mut rng: Option<&mut Rng>) -> Result<bool, Late> {
        let mut pending = std::mem::take(&mut self.bulk.pending);
        let mut moved = false;
        let mut failed = None;
        pending.retain_mut(|p| {
            if failed.is_some() || rng.as_mut().is_some_and(|r| r.below(4) != 0) {
                return true;
            }
            moved = true;
            let last = rng.is_none() || p.data.is_some();
            let done = if last { write_stage(self, table, p) } else { read_stage(self, table, p) };
            if let Err(kind) = done {
                failed = Some((kind, p.warp, p.pc));
            }
            !last
        });
        self.bulk.pending = pending;
        failed.map_or(Ok(moved), Err)
    }

    /// The block's warps have all exited. Copies that have not read their shared source yet read what another block
    /// may have put there by then.
    pub(crate) fn finish_bulk(&mut self, table: &Table) -> Result<(), Late> {
        if self.bulk.pending.iter().any(|p| p.data.is_none() && matches!(p.src, End::Shared(_))) {
            self.shared.poison();
        }
        // Loads that nobody waited for would land in memory that is gone.
        self.bulk.pending.retain(|p| matches!(p.dst, End::Global(_)));
        self.progress_bulk(table, None).map(|_| ())
    }
}

impl Exec<'_> {
    pub(super) fn bulk(&mut self, op: &BulkOp, m: u32) -> Run<()> {
        let env = self.env;
        for i in lanes(m) {
            let done = match *op {
                BulkOp::Load { dst, src, size, mbar } => {
                    let (dst, src) = (End::Shared(self.address(&dst, i)), End::Global(self.address(&src, i)));
                    self.issue(env, i, dst, src, size, Some(mbar))
                }
                BulkOp::Store { dst, src, size } => {
                    let (dst, src) = (End::Global(self.address(&dst, i)), End::Shared(self.address(&src, i)));
                    self.issue(env, i, dst, src, size, None)
                }
                BulkOp::SharedToShared { dst, src, size, mbar } => {
                    let (dst, src) = (End::Shared(self.address(&dst, i)), End::Shared(self.address(&src, i)));
                    self.issue(env, i, dst, src, size, Some(mbar))
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

    fn issue(
        &mut self,
        env: &Env,
        lane: usize,
        dst: End,
        src: End,
        size: u32,
        mbar: Option<Addr>,
    ) -> Result<(), FaultKind> {
        let bytes = self.warp.regs.r32[size as usize][lane];
        check_shape(&[dst, src], bytes)?;
        let mbar = mbar.map(|a| self.address(&a, lane));
        let thread = self.thread(lane);
        let group = self.block.bulk.committed[thread as usize];
        let mut p =
            Pending { dst, src, bytes, mbar, thread, group, data: None, warp: self.warp.index, pc: self.pc };
        // Bad addresses are reported where the copy is issued, not where it lands.
        end_pointer(self.block, &env.table, src, bytes)?;
        end_pointer(self.block, &env.table, dst, bytes)?;
        if let Some(offset) = mbar {
            let bits = self.block.mbarrier_bits(offset)?;
            crate::mbarrier::Mbarrier::from_bits(bits)
                .map_err(|message| FaultKind::Mbarrier { offset, message })?;
        }
        self.changed();
        if env.lazy_bulk {
            self.block.bulk.pending.push(p);
            return Ok(());
        }
        write_stage(self.block, &env.table, &mut p)
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
        let mut pending = std::mem::take(&mut self.block.bulk.pending);
        let mut result = Ok(());
        pending.retain_mut(|p| {
            if p.thread != thread || p.mbar.is_some() || p.group >= done_before || result.is_err() {
                return true;
            }
            result = if read_only {
                read_stage(self.block, &env.table, p)
            } else {
                write_stage(self.block, &env.table, p)
            };
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
