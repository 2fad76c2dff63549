//! A group that records its current call.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::slot::Slot;
use epoxide::Result;
use epoxide::group::{ProcessGroup, Work};
use epoxide::internal::group::{Call, CallResult};

/// Writes each call to the rank's slot, before and after.
#[derive(Debug)]
pub(super) struct Noted {
    group: Arc<dyn ProcessGroup>,
    slot: Slot,
    calls: AtomicU64,
}

impl Noted {
    pub fn new(group: Arc<dyn ProcessGroup>, slot: Slot) -> Noted {
        Noted { group, slot, calls: AtomicU64::new(0) }
    }

    fn note<T>(&self, name: &str, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        self.slot.write(&format!("{name} (call {number} of the group)"));
        let outcome = call();
        self.slot.write(&format!("after {name} (call {number} of the group)"));
        outcome
    }
}

impl ProcessGroup for Noted {
    fn rank(&self) -> u32 {
        self.group.rank()
    }

    fn size(&self) -> u32 {
        self.group.size()
    }

    fn timeout(&self) -> Duration {
        self.group.timeout()
    }

    fn barrier(&self, timeout: Duration) -> Result<()> {
        self.note("barrier", || self.group.barrier(timeout))
    }

    fn all_gather(&self, data: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.note("all_gather", || self.group.all_gather(data))
    }

    fn broadcast(&self, root: u32, data: &[u8]) -> Result<Vec<u8>> {
        self.note("broadcast", || self.group.broadcast(root, data))
    }

    fn exchange_fds(&self, fds: &[BorrowedFd<'_>]) -> Result<Vec<Vec<OwnedFd>>> {
        self.note("exchange_fds", || self.group.exchange_fds(fds))
    }

    fn name(&self) -> &str {
        self.group.name()
    }

    fn backend(&self) -> &'static str {
        self.group.backend()
    }

    fn description(&self) -> &str {
        self.group.description()
    }

    fn global_rank(&self, rank: u32) -> Option<u32> {
        self.group.global_rank(rank)
    }

    fn group_rank(&self, global: u32) -> Option<u32> {
        self.group.group_rank(global)
    }

    fn call(&self, call: Call, timeout: Duration) -> Result<CallResult> {
        self.note(call.operation().name(), || self.group.call(call, timeout))
    }

    fn start(&self, call: Call, timeout: Duration) -> Work {
        // The operation continues in the background, so only its start is recorded here.
        let number = self.calls.fetch_add(1, Ordering::Relaxed);
        self.slot.write(&format!("{} started (call {number} of the group)", call.operation().name()));
        self.group.start(call, timeout)
    }

    fn abort(&self, reason: &str) {
        self.group.abort(reason);
    }

    fn destroy(&self) -> Result<()> {
        self.note("destroy", || self.group.destroy())
    }
}
