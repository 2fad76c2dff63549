//! The verdict of a count exchange, within a node and across nodes. Every rank has the same counts,
//! hence the same verdict: either all ranks move rows or none does.

use crate::layout::{
    COLUMNS_BY_EXPERT, Comm, DevicePtr, FailedPlan, FailedPlans, KEPT_PLANS, PlanHeader, PlanStatus, Status,
};
use crate::simt::*;

/// A verdict, in the words of a [`PlanHeader`]; [`PlanStatus`] documents them.
#[derive(Clone, Copy)]
pub struct Verdict {
    pub peer: u32,
    /// A [`PlanStatus`].
    pub status: u32,
    pub detail: u32,
    pub theirs: u32,
    pub ours: u32,
}

impl Verdict {
    /// Words of a verdict.
    pub const WORDS: u32 = 5;
    /// Nothing has been found yet.
    pub const OPEN: Verdict =
        Verdict { status: PlanStatus::Empty as u32, peer: 0, detail: 0, theirs: 0, ours: 0 };

    /// The verdict in the [`PlanHeader`] at `header`.
    ///
    /// # Safety
    /// The `PlanHeader` is live.
    #[device]
    pub unsafe fn read(header: u64) -> Verdict {
        Verdict {
            status: ld_u32(field!(header, PlanHeader.status)),
            peer: ld_u32(field!(header, PlanHeader.peer)),
            detail: ld_u32(field!(header, PlanHeader.detail)),
            theirs: ld_u32(field!(header, PlanHeader.theirs)),
            ours: ld_u32(field!(header, PlanHeader.ours)),
        }
    }

    /// Whether the ranks agree on the shape of the messages, so that all of a message will come.
    /// Ranks that disagree on channels or experts would wait for packets that never come.
    #[device]
    pub fn agrees(status: u32) -> bool {
        status == PlanStatus::Ready as u32 || status == PlanStatus::Capacity as u32
    }

    /// Whether rows move by it.
    #[device]
    pub fn is_ready(&self) -> bool {
        self.status == PlanStatus::Ready as u32
    }

    /// Writes it to the [`PlanHeader`] at `header`, with the dispatch's epoch and the rows that this
    /// rank receives, none unless it is ready: all words but the tag and the relayed tokens.
    ///
    /// # Safety
    /// The `PlanHeader` is live.
    #[device]
    pub unsafe fn write(&self, header: u64, rows: u32, epoch: u64) {
        st_u32(field!(header, PlanHeader.status), self.status);
        st_u32(field!(header, PlanHeader.num_recv_tokens), if self.is_ready() { rows } else { 0 });
        st_u32(field!(header, PlanHeader.peer), self.peer);
        st_u32(field!(header, PlanHeader.detail), self.detail);
        st_u32(field!(header, PlanHeader.theirs), self.theirs);
        st_u32(field!(header, PlanHeader.ours), self.ours);
        st_u32(field!(header, PlanHeader.epoch), epoch as u32);
    }

    /// Writes zeros over `len` counts unless it is ready: kernels of a caller that read them in place
    /// of the host, such as a grouped GEMM in a captured step, then have no rows. One thread calls
    /// it.
    ///
    /// # Safety
    /// The counts are live, and a barrier is behind all that others wrote there.
    #[device]
    pub unsafe fn clear_unless_ready(&self, counts: DevicePtr, len: u32) {
        if !self.is_ready() {
            stride!(at in 0..len => {
                counts.array::<u32>().st(at, 0);
            });
        }
    }

    /// Reports a plan that is not ready to the host, which does not wait for this dispatch. A wait
    /// that expired has reported itself already. One thread of the grid calls it.
    ///
    /// # Safety
    /// The record lies behind the status. Operations of a buffer follow each other, so this thread
    /// is its only writer.
    #[device]
    pub unsafe fn report(&self, comm: &Comm, rows: u32, epoch: u64) {
        if self.is_ready() || self.status == PlanStatus::Timeout as u32 {
            return;
        }
        let record = comm.status.0 + size_of::<Status>() as u64;
        let count = ld_relaxed_sys_u64(record);
        let plans = Global::<FailedPlan>::new(field!(record, FailedPlans.plans));
        let plan = plans.at(count % KEPT_PLANS as u64);
        self.write(plan, rows, epoch);
        st_u64(field!(plan, FailedPlan.capacity), comm.pool.rows);
        st_release_sys_u64(record, count + 1);
    }

    /// Reports the verdict of a count exchange with these `columns` of the signature. With rows by
    /// expert the kernel of their plan judges behind an exchange in which ranks agree, by the rows
    /// that move, and reports then: a failed plan has one report.
    ///
    /// # Safety
    /// As of [`Self::report`].
    #[device]
    pub unsafe fn report_exchange(&self, comm: &Comm, columns: u32, rows: u32, epoch: u64) {
        if columns & COLUMNS_BY_EXPERT == 0 || !Self::agrees(self.status) {
            self.report(comm, rows, epoch);
        }
    }
}

/// The counts of local experts for the host, behind the [`PlanHeader`] at `header`.
#[device]
pub fn counts_behind(header: DevicePtr) -> Global<u32> {
    Global::new(header.0 + size_of::<PlanHeader>() as u64)
}
