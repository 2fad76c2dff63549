//! Check mode: who may rely on what, and who does without being allowed to.
//!
//! Happens-before is tracked with vector clocks, after the PTX memory model (PTX ISA, "Memory Consistency Model"): edges come only from
//! morally strong release and acquire patterns, fences, block and warp barriers, mbarriers, kernel boundaries and what the host waits
//! for. Bulk copies are actors of their own in the async proxy: they rely on generic accesses only across a `fence.proxy.async`, and
//! only an observed completion orders them before others. Where the model's text leaves open at which end of a path the proxy fence
//! must stand, both ends are accepted.
//!
//! One [`Checker`] watches the memory of all devices of a process; [`Memory::checked`](crate::Memory::checked) joins a device to it.
//! Memory that other processes or plain host code access is hidden from it ([`Region::hide`](crate::Region::hide)). Host code that reads
//! by [`Memory::load_acquire`](crate::Memory::load_acquire) and [`Memory::host_reads`](crate::Memory::host_reads) is watched like a kernel; of
//! hidden memory it is told whether kernels released to it what it reads.
//!
//! | file | |
//! |---|---|
//! | `clock.rs` | vector clocks |
//! | `grids.rs` | the grids, and whom a scope takes in |
//! | `known.rs` | what has happened before some point |
//! | `shadow.rs` | for every word, who wrote and who read it |
//! | `block.rs` | what the lanes of a block know, and how they learn it |
//! | `watch.rs`, `place.rs` | what the interpreter calls, and where an access goes |
//! | `world.rs` | all of it together, and what the host does |
//! | `stores.rs` | how many bytes kernels store where, for who counts them |
//! | `history.rs` | by which reads an order was meant to come about |
//! | `report.rs` | what was found, in words |

pub(crate) mod block;
pub(crate) mod clock;
mod config;
pub(crate) mod grids;
pub(crate) mod history;
mod known;
pub(crate) mod place;
pub(crate) mod report;
pub(crate) mod shadow;
mod stores;
pub(crate) mod watch;
pub(crate) mod world;

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::rng::Rng;
use grids::Grids;
use history::History;
use shadow::Shadow;
use stores::Stores;
use world::{ACTING, Host, World};

pub use config::CheckConfig;
pub(crate) use known::Known;
pub use known::{Past, Timeline};
pub use stores::Stored;

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
    /// A checker that has seen nothing yet.
    #[must_use]
    pub fn new(config: CheckConfig) -> Self {
        let none = Shadow::new(true, false);
        Self(Arc::new(Mutex::new(World {
            config,
            grids: Grids::default(),
            shadows: vec![none],
            stores: Stores::default(),
            devices: HashMap::new(),
            backings: HashMap::new(),
            free_shadows: vec![],
            releases: HashMap::new(),
            chains: 0,
            outside: Known::default(),
            history: History::default(),
            fences: HashMap::new(),
            hosts: HashMap::new(),
            meeting: Known::default(),
            timelines: 0,
            ticks: 0,
            rng: Rng::new(config.weak_memory.unwrap_or(0)),
        })))
    }

    pub(crate) fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new stream of work.
    #[must_use]
    pub fn timeline(&self) -> Timeline {
        Timeline(self.world().new_timeline())
    }

    /// What the calling thread knows to have happened: what it did itself, and what it waited for.
    #[must_use]
    pub fn host_past(&self) -> Past {
        WATCHED_BY.with_borrow_mut(|checker| {
            // The latest one: those of earlier worlds have nothing to tell here.
            if !checker.as_ref().is_some_and(|c| Arc::ptr_eq(&c.0, &self.0)) {
                *checker = Some(self.clone());
            }
        });
        Past(self.world().host_known())
    }

    /// The calling thread has waited for `past`.
    pub fn host_waited(&self, past: &Past) {
        self.world().host_learns(&past.0);
    }

    /// Runs `f`, which accesses memory as work of the stream `timeline` does that comes after `past`; afterwards `past` has it too.
    pub fn act<T>(&self, timeline: Timeline, past: &mut Past, f: impl FnOnce() -> T) -> T {
        let acting = Host { timeline: timeline.0, known: std::mem::take(&mut past.0), loaded: None };
        let before = ACTING.replace(Some(acting));
        let result = f();
        if let Some(host) = ACTING.replace(before) {
            past.0 = host.known;
        }
        result
    }
}

/// The calling thread is about to meet other threads, or just has, by a barrier or a message that no checker sees: it tells what it knows
/// to have happened, and learns what others have told. Does nothing for a thread without work under a checker.
pub fn host_meets() {
    let Some(checker) = WATCHED_BY.with_borrow(Clone::clone) else { return };
    let mut world = checker.world();
    let known = world.host().known.clone();
    world.meeting.join(&known);
    let meeting = world.meeting.clone();
    world.host().known.join(&meeting);
}
