//! Public interface of the checker: the devices that it checks, and the synchronisation of host
//! threads.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::past::{Past, Timeline};
use super::report;
use super::reports::Report;
use super::stores::{Loaded, Stored};
use super::world::{ACTING, Host, World};

/// Reports that are collected where a caller names no number.
pub(crate) const MOST_COLLECTED: usize = 100;

/// Configuration of check mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckConfig {
    /// Report races, and reads of unwritten memory and of registers that nothing writes. If false,
    /// such accesses have the results that the memory model allows.
    pub races: bool,
    /// Weak memory: this seed draws the reads that return an older value where they may. So a
    /// missing fence shows as a wrong result as well.
    pub weak_memory: Option<u64>,
    /// Report a block barrier for all threads if some threads wait at it and others end before it,
    /// which CUDA allows.
    pub strict_exits: bool,
    /// The number of reports that are collected ([`Checker::reports`]) before one is a fault. A
    /// race, and a read of unwritten memory or of a register that nothing writes, are collected: the
    /// access then happens as it would without checks. A bad address ends its kernel at once. 0: the
    /// first report is a fault, and a race between lanes that have run in step is of the class
    /// [`Class::Corrupts`](crate::Class::Corrupts).
    pub collect: usize,
    /// Properties beyond the memory model that may be relied on.
    pub assume: Assumptions,
}

/// Properties of hardware beyond the memory model that a program relies on. With none, reports are
/// by the letter of the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Assumptions {
    /// Threads fence and then meet at a barrier: a relaxed store or atomic operation of any of them
    /// behind the barrier is a release of the accesses before all of these fences. By the model, a
    /// fence makes releases of its own thread's stores only.
    pub fence_before_barrier: bool,
    /// Lanes of a warp that execute an instruction together are in step: accesses before it come
    /// before those behind it, for all of them. `elect.sync`, shuffles and votes order memory, and
    /// lanes meet where the arms of a branch join. By the model, only `bar.warp.sync` does.
    pub converged_warps: bool,
    /// An `mbarrier.arrive` without a scope on the mbarrier of another block of the cluster releases
    /// to that block. By the model it is of scope `.cta`, which leaves the block out, and such
    /// arrivals are reports. CUTLASS arrives so.
    pub cluster_arrivals: bool,
    /// A bulk copy may overwrite what ordinary instructions have read, where the reads are ordered
    /// before it: consumers read shared memory and arrive on an mbarrier, and behind it the producer
    /// fills the memory again. By the manual, accesses of two proxies need a `fence.proxy.async`
    /// between them. CUTLASS's pipelines have none there.
    pub reads_before_bulk_copies: bool,
    /// `ld.global.nc` and `ldu` read as `ld.global` does, also where the memory is written while the
    /// kernel runs. By the manual, they may return what a cache has kept. DeepEP reads its peers'
    /// messages so.
    pub coherent_loads: bool,
}

impl Assumptions {
    /// Their names.
    pub const NAMES: [&str; 5] =
        ["FenceBeforeBarrier", "ConvergedWarps", "ClusterArrivals", "ReadsBeforeBulkCopies", "CoherentLoads"];

    /// Adds the assumption of this name.
    ///
    /// # Errors
    /// The name is unknown; the text lists the known ones.
    pub fn state(&mut self, name: &str) -> Result<(), String> {
        match name {
            "FenceBeforeBarrier" => self.fence_before_barrier = true,
            "ConvergedWarps" => self.converged_warps = true,
            "ClusterArrivals" => self.cluster_arrivals = true,
            "ReadsBeforeBulkCopies" => self.reads_before_bulk_copies = true,
            "CoherentLoads" => self.coherent_loads = true,
            _ => {
                return Err(format!(
                    "no assumption is called '{name}': there are {}",
                    Self::NAMES.join(", ")
                ));
            }
        }
        Ok(())
    }
}

impl CheckConfig {
    /// Checks races and collects up to 100 reports.
    #[must_use]
    pub fn collecting() -> Self {
        Self { collect: MOST_COLLECTED, ..Self::default() }
    }
}

impl Default for CheckConfig {
    /// Checks races; loads return the values that the order of execution gives; the first report is
    /// a fault.
    fn default() -> Self {
        Self {
            races: true,
            weak_memory: None,
            strict_exits: false,
            collect: 0,
            assume: Assumptions::default(),
        }
    }
}

/// Watches the memory of all devices that share it. Clones are the same checker.
#[derive(Clone)]
pub struct Checker(Arc<Mutex<World>>);

impl std::fmt::Debug for Checker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Checker").field("config", &self.world().config).finish_non_exhaustive()
    }
}

thread_local! {
    /// The checker that this thread has last enqueued work under.
    static WATCHED_BY: RefCell<Option<Checker>> = const { RefCell::new(None) };
}

impl Checker {
    /// A checker without any recorded access.
    #[must_use]
    pub fn new(config: CheckConfig) -> Self {
        Self(Arc::new(Mutex::new(World::new(config))))
    }

    pub(crate) fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new stream of work.
    #[must_use]
    pub fn timeline(&self) -> Timeline {
        Timeline(self.world().new_timeline())
    }

    /// The causal past of the calling thread: its own work, and all work that it has waited for.
    #[must_use]
    pub fn host_past(&self) -> Past {
        WATCHED_BY.with_borrow_mut(|checker| {
            // Only the latest checker of a thread counts. Checkers of earlier worlds are dropped.
            if !checker.as_ref().is_some_and(|c| Arc::ptr_eq(&c.0, &self.0)) {
                *checker = Some(self.clone());
            }
        });
        Past(self.world().host_past())
    }

    /// The calling thread has waited for `past`.
    pub fn host_waited(&self, past: &Past) {
        self.world().host_acquires_past(&past.0);
    }

    /// Runs `f`, whose accesses count as work of the stream `timeline` after `past`. Then adds the
    /// work to `past`.
    pub fn act<T>(&self, timeline: Timeline, past: &mut Past, f: impl FnOnce() -> T) -> T {
        let acting = Host { timeline: timeline.0, past: std::mem::take(&mut past.0), loaded: vec![] };
        let before = ACTING.replace(Some(acting));
        let result = f();
        if let Some(host) = ACTING.replace(before) {
            past.0 = host.past;
        }
        result
    }

    /// Reads and writes of kernels' lanes that were checked so far, an atomic operation and each
    /// piece of a vector once.
    #[must_use]
    pub fn accesses(&self) -> u64 {
        self.world().accesses
    }

    /// The reports collected so far ([`CheckConfig::collect`]), one for each kind and pair of
    /// lines, in the order in which they were first found.
    #[must_use]
    pub fn reports(&self) -> Vec<Report> {
        self.world().reports.all().to_vec()
    }

    /// The strong reads that have found the same value most often in a row, up to `most` instructions,
    /// and the last writes there; and the latest atomics, up to twice as many: lines for the report of a
    /// wait that has expired.
    #[must_use]
    pub fn longest_waits(&self, most: usize) -> String {
        report::longest_waits(&self.world(), most)
    }

    /// Has stores counted from here on, for [`Checker::stores`].
    pub fn count_stores(&self) {
        self.world().stores.count();
    }

    /// Stores by kernels since [`Checker::count_stores`], to memory that is still allocated.
    #[must_use]
    pub fn stores(&self) -> Vec<Stored> {
        self.world().stored()
    }

    /// Has loads counted from here on, for [`Checker::loads`].
    pub fn count_loads(&self) {
        self.world().loads.count();
    }

    /// Loads by each block since [`Checker::count_loads`], from memory that is still allocated.
    #[must_use]
    pub fn loads(&self) -> Vec<Loaded> {
        self.world().loaded()
    }
}

/// Synchronises the calling thread with other threads. Call it before and after a barrier or a
/// message that the checker does not track. The thread publishes its causal past and acquires those
/// that others have published. Does nothing for a thread without work under a checker.
pub fn host_meets() {
    let Some(checker) = WATCHED_BY.with_borrow(Clone::clone) else { return };
    let mut world = checker.world();
    let past = world.host().past.clone();
    world.meeting.join(&past);
    let meeting = world.meeting.clone();
    world.host().past.join(&meeting);
}
