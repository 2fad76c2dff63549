//! Arguments of a test's rank.

use std::panic::resume_unwind;
use std::sync::{Arc, OnceLock};

use super::noted::Noted;
use super::outcome::{Skip, SkipCode};
use super::slot::Slot;
use epoxide::Result;
use epoxide::group::ProcessGroup;

type Join = dyn Fn() -> Result<Arc<dyn ProcessGroup>> + Send + Sync;

/// A rank of a test.
pub struct Context {
    rank: u32,
    size: u32,
    slot: Slot,
    join: Box<Join>,
    group: OnceLock<Result<Arc<dyn ProcessGroup>>>,
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").field("rank", &self.rank).field("size", &self.size).finish_non_exhaustive()
    }
}

impl Context {
    pub(super) fn new(rank: u32, size: u32, slot: Slot, join: Box<Join>) -> Context {
        Context { rank, size, slot, join, group: OnceLock::new() }
    }

    /// This rank, `0..size()`.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> u32 {
        self.size
    }

    /// The group of all ranks, joined at the first call. Its collectives wait twice as long as the
    /// test may take, so that the test's timeout expires first. A test that makes its own group
    /// need not call this.
    pub fn group(&self) -> Result<Arc<dyn ProcessGroup>> {
        let join = || {
            self.doing("joining the group");
            let group = (self.join)()?;
            self.doing("after joining the group");
            Ok(Arc::new(Noted::new(group, self.slot.clone())) as Arc<dyn ProcessGroup>)
        };
        self.group.get_or_init(join).clone()
    }

    /// Sets the rank's current work, for the report if it hangs or dies. The group's calls set it
    /// themselves. About a microsecond.
    pub fn doing(&self, what: &str) {
        self.slot.write(what);
    }

    /// Ends the test on this rank, as one that this machine cannot run. All ranks must skip it.
    pub fn skip(&self, code: SkipCode, reason: impl Into<String>) -> ! {
        // Not a panic: no hook, no message.
        resume_unwind(Box::new(Skip { code, reason: reason.into() }))
    }
}
