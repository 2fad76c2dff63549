//! The bulk copies of a block that are under way.

use std::cell::RefCell;
use std::ops::Range;

use crate::check::hooks::Stale;
use crate::ir::Combine;
use crate::memory::Found;
use crate::tensor_map::{Reads, Unit};

/// Most pieces of a copy.
pub(super) const PIECES: usize = 4;

/// Progress of copies that is reported to the checks.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Landed {
    /// The first `copies` copies of a lane have happened, and the lane arrives on the mbarrier at
    /// `offset` for it.
    Copies { offset: u64, warp: u32, lane: usize, copies: u32 },
    /// A bulk copy that completes on the mbarrier at this offset has landed.
    Copy { offset: u64 },
    /// A phase of the mbarrier at this offset is complete.
    Phase { offset: u64 },
}

/// One end of a copy.
#[derive(Clone, Copy, Debug)]
pub(super) enum End {
    Global(u64),
    Shared(u64),
}

/// Progress of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    Issued,
    Read,
    Landed,
}

/// The stages of the pieces of a copy, as sets of pieces, one bit each.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Stages {
    read: u8,
    landed: u8,
}

impl Stages {
    const ALL: u8 = (1 << PIECES) - 1;

    /// The data was there when the copy was issued.
    pub(super) const READ: Stages = Stages { read: Self::ALL, landed: 0 };

    pub(super) fn of(self, piece: usize) -> Stage {
        match (self.read >> piece & 1, self.landed >> piece & 1) {
            (_, 1) => Stage::Landed,
            (1, _) => Stage::Read,
            _ => Stage::Issued,
        }
    }

    pub(super) fn set(&mut self, pieces: Range<usize>, stage: Stage) {
        let set = (1 << pieces.end) - (1 << pieces.start);
        if stage >= Stage::Read {
            self.read |= set;
        }
        if stage == Stage::Landed {
            self.landed |= set;
        }
    }

    fn have_reached(self, stage: Stage) -> bool {
        match stage {
            Stage::Issued => true,
            Stage::Read => self.read == Self::ALL,
            Stage::Landed => self.landed == Self::ALL,
        }
    }
}

/// Buffers that a thread keeps, and the longest of them.
const MOST_SPARE: usize = 64;
const LONGEST_SPARE: usize = 16384;

thread_local! {
    /// Buffers of copies that are over: few of them are in the nearest cache for all blocks.
    static SPARE: RefCell<Vec<Vec<u8>>> = const { RefCell::new(vec![]) };
}

/// Bytes on the way from one end of a copy to the other.
#[derive(Debug, Default)]
pub(super) struct Buffer(pub(super) Vec<u8>);

impl Buffer {
    /// The bytes, all `bytes` of which the copy writes before it reads them.
    pub(super) fn of_length(&mut self, bytes: u32) -> &mut [u8] {
        if self.0.is_empty() {
            self.0 = SPARE.with_borrow_mut(Vec::pop).unwrap_or_default();
            self.0.resize(bytes as usize, 0);
        }
        &mut self.0
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if self.0.is_empty() || self.0.len() > LONGEST_SPARE {
            return;
        }
        let bytes = std::mem::take(&mut self.0);
        // Without effect while the thread ends.
        let _ = SPARE.try_with(|spare| {
            let mut spare = spare.borrow_mut();
            if spare.len() < MOST_SPARE {
                spare.push(bytes);
            }
        });
    }
}

/// A copy that has been issued but has not landed.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) dst: End,
    pub(super) src: End,
    pub(super) bytes: u32,
    /// For a box of a tensor: its parts of 16 bytes. Empty where both ends are consecutive bytes.
    pub(super) units: Vec<Unit>,
    pub(super) reads: Reads,
    /// Shared offset of the mbarrier to complete on; else a member of a bulk group.
    pub(super) mbar: Option<u64>,
    /// Thread that issued it, and its bulk group.
    pub(super) thread: u32,
    pub(super) group: u32,
    /// Buffer of the bytes read, empty before, and the stage of each piece.
    pub(super) data: Buffer,
    /// For reductions: how the data changes the destination.
    pub(super) reduces: Option<Combine>,
    pub(super) stages: Stages,
    /// Whether it proceeds only when no warp can run: the latest legal completion. Drawn when it
    /// might first have proceeded.
    pub(super) late: Option<bool>,
    /// Whether a wait for the read of its source has returned.
    pub(super) awaited: bool,
    /// Words that it reads as they were before, in weak-memory mode.
    pub(super) stale: Stale,
    /// The warp and the instruction that issued it, for messages.
    pub(super) warp: u32,
    pub(super) pc: u32,
}

impl Pending {
    /// The bytes of a piece: whole units of 16, which land as one. A copy of fewer is the last
    /// piece.
    pub(super) fn range(&self, piece: usize) -> Range<usize> {
        if self.bytes < 16 {
            return if piece + 1 == PIECES { 0..self.bytes as usize } else { 0..0 };
        }
        let units = self.bytes as usize / 16;
        units * piece / PIECES * 16..units * (piece + 1) / PIECES * 16
    }

    pub(super) fn has_reached(&self, stage: Stage) -> bool {
        self.stages.have_reached(stage)
    }
}

/// The copies of a block that are under way.
#[derive(Debug, Default)]
pub(crate) struct BulkQueue {
    pub(super) pending: Vec<Pending>,
    /// Groups committed so far, per thread, and those up to the last that had a copy in it.
    pub(super) committed: Vec<u32>,
    pub(super) used: Vec<u32>,
    /// The regions looked up last, latest first.
    pub(super) regions: [Found; 4],
}

impl BulkQueue {
    pub(crate) fn reset(&mut self, threads: u32) {
        self.pending.clear();
        self.committed.clear();
        self.committed.resize(threads as usize, 0);
        self.used.clear();
        self.used.resize(threads as usize, 0);
    }

    /// Looks regions up again, after the table has changed.
    pub(crate) fn forget_regions(&mut self) {
        self.regions = Default::default();
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// The lanes of a warp that have issued members of bulk groups which are under way.
    pub(super) fn issuers(&self, warp: u32) -> u32 {
        let of_warp = self.pending.iter().filter(|p| p.mbar.is_none() && p.thread / 32 == warp);
        of_warp.fold(0, |lanes, p| lanes | 1 << (p.thread % 32))
    }
}
