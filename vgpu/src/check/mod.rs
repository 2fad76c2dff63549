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
//! by [`Memory::load_acquire`](crate::Memory::load_acquire) and [`Memory::host_reads`](crate::Memory::host_reads) is watched like a kernel.
//!
//! | file | |
//! |---|---|
//! | `clock.rs` | vector clocks |
//! | `shadow.rs` | for every word, who wrote and who read it |
//! | `block.rs` | what the lanes of a block know, and how they learn it |
//! | `watch.rs` | what the interpreter calls |
//! | `history.rs` | by which reads an order was meant to come about |
//! | `report.rs` | what was found, in words |

pub(crate) mod block;
pub(crate) mod clock;
pub(crate) mod history;
pub(crate) mod report;
pub(crate) mod shadow;
pub(crate) mod watch;

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

use crate::ir::{Scope, Sem};
use crate::rng::Rng;
use block::{Knows, Release, Releases};
use clock::{Clock, Key};
use history::History;
use shadow::{Accessor, Grids, How, Record, Shadow};

/// What is to be checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckConfig {
    /// Report races and reads of memory that nobody wrote. Off, such accesses have the results that the memory model allows.
    pub races: bool,
    /// Weak memory: a read that may see an older value sometimes does, drawn from this seed, so that a missing fence shows as a wrong
    /// result as well.
    pub weak_memory: Option<u64>,
    /// Report block barriers for all threads that some warps wait at and others end without, which the hardware lets pass.
    pub strict_exits: bool,
}

impl Default for CheckConfig {
    /// Races, with memory that does what the order of execution says.
    fn default() -> Self {
        Self { races: true, weak_memory: None, strict_exits: false }
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

/// What has happened before some point: of a stream, of an event, of a host thread.
#[derive(Clone, Debug, Default)]
pub struct Past(Known);

impl Past {
    pub(crate) fn of(known: Known) -> Self {
        Self(known)
    }

    pub(crate) fn known(&self) -> &Known {
        &self.0
    }

    /// This and `other` have both happened.
    pub fn join(&mut self, other: &Past) {
        self.0.join(&other.0);
    }
}

/// Something that does one thing after the other: a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeline(Key);

/// What an actor knows to have happened.
#[derive(Clone, Debug, Default)]
pub(crate) struct Known {
    pub(crate) all: Clock,
    /// The part of it that bulk copies may rely on, in shared and in global memory: accesses before a proxy fence.
    pub(crate) published: [Clock; 2],
}

/// Indices of [`Known::published`].
pub(crate) const SHARED: usize = 0;
pub(crate) const GLOBAL: usize = 1;

impl Known {
    pub(crate) fn join(&mut self, other: &Known) {
        self.all.join(&other.all);
        let alike = |known: &Known| known.published[SHARED].same(&known.published[GLOBAL]);
        let both = alike(self) && alike(other);
        self.published[SHARED].join(&other.published[SHARED]);
        if both {
            self.published[GLOBAL] = self.published[SHARED].clone();
        } else {
            self.published[GLOBAL].join(&other.published[GLOBAL]);
        }
    }

    /// Whether both are the same for certain.
    pub(crate) fn same(&self, other: &Known) -> bool {
        self.all.same(&other.all) && self.published.iter().zip(&other.published).all(|(a, b)| a.same(b))
    }

    /// Learns something that is known in every proxy.
    pub(crate) fn raise(&mut self, key: Key, tick: u32) {
        self.all.raise(key, tick);
        self.published.iter_mut().for_each(|p| p.raise(key, tick));
    }

    /// Kernel boundaries and the host order all proxies.
    pub(crate) fn publish_all(&mut self) {
        self.published = [self.all.clone(), self.all.clone()];
    }
}

/// A host thread, or the work of a stream while a thread carries it out.
#[derive(Debug, Default)]
struct Host {
    timeline: Key,
    known: Known,
    /// The word of mapped memory that it has loaded last: shadow and offset.
    loaded: Option<(u32, u64)>,
}

/// All that a checker knows.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) config: CheckConfig,
    pub(crate) grids: Grids,
    /// One per piece of memory, by its number; number 0 stands for none.
    pub(crate) shadows: Vec<Shadow>,
    /// Device and inode of the file behind a piece of memory: its number, and how many mappings there are. Keyed so, since a pool has
    /// another address on every rank.
    backings: HashMap<(u64, u64), (u32, u32)>,
    free_shadows: Vec<u32>,
    /// Release patterns that a read of the location may observe.
    pub(crate) releases: HashMap<(u32, u64), Releases>,
    /// Chains of releases so far: the number of the last.
    chains: u64,
    /// What was released to memory that is hidden, for whoever acquires there.
    pub(crate) outside: Known,
    pub(crate) history: History,
    /// What precedes the last sequentially consistent fences: by scope, and by the block where they were.
    pub(crate) fences: HashMap<(Scope, Key), Release>,
    hosts: HashMap<ThreadId, Host>,
    /// What threads have told each other ([`host_meets`]).
    meeting: Known,
    timelines: u64,
    ticks: u32,
    pub(crate) rng: Rng,
}

thread_local! {
    /// The stream whose work this thread carries out just now.
    static ACTING: RefCell<Option<Host>> = const { RefCell::new(None) };
    /// The checker that this thread has last enqueued work under.
    static WATCHED_BY: RefCell<Option<Checker>> = const { RefCell::new(None) };
}

impl World {
    /// A piece of memory is mapped. `filled`: what is in it already counts as written.
    pub(crate) fn map(&mut self, backing: (u64, u64), filled: bool) -> u32 {
        if let Some((number, maps)) = self.backings.get_mut(&backing) {
            *maps += 1;
            return *number;
        }
        let shadow = Shadow::new(false, filled);
        let number = match self.free_shadows.pop() {
            Some(number) => {
                self.shadows[number as usize] = shadow;
                number
            }
            None => {
                self.shadows.push(shadow);
                (self.shadows.len() - 1) as u32
            }
        };
        self.backings.insert(backing, (number, 1));
        number
    }

    pub(crate) fn unmap(&mut self, backing: (u64, u64)) {
        let Some((number, maps)) = self.backings.get_mut(&backing) else { return };
        *maps -= 1;
        if *maps == 0 {
            let number = *number;
            self.backings.remove(&backing);
            self.shadows[number as usize] = Shadow::default();
            self.releases.retain(|(shadow, _), _| *shadow != number);
            self.free_shadows.push(number);
        }
    }

    fn new_timeline(&mut self) -> Key {
        self.timelines += 1;
        clock::timeline(self.timelines)
    }

    fn host(&mut self) -> &mut Host {
        let id = std::thread::current().id();
        if !self.hosts.contains_key(&id) {
            let timeline = self.new_timeline();
            self.hosts.insert(id, Host { timeline, ..Host::default() });
        }
        self.hosts.entry(id).or_default()
    }

    /// What this thread, or the stream that it acts for, knows.
    pub(crate) fn host_known(&mut self) -> Known {
        ACTING
            .with_borrow(|acting| acting.as_ref().map(|host| host.known.clone()))
            .unwrap_or_else(|| self.host().known.clone())
    }

    pub(crate) fn host_learns(&mut self, known: &Known) {
        self.host().known.join(known);
    }

    /// Begins a grid after all that `start` knows, on a timeline or on one of its own; its number.
    pub(crate) fn begin_grid(
        &mut self,
        start: &mut Known,
        timeline: Option<Timeline>,
        device: u64,
        kernel: Arc<crate::kernel::Kernel>,
        shape: [u32; 2],
    ) -> u32 {
        let timeline = timeline.map_or_else(|| self.new_timeline(), |t| t.0);
        let tick = self.next_tick();
        self.grids.0.push(shadow::GridFacts { timeline, tick, device, kernel, shape });
        let number = self.grids.0.len() as u32;
        start.all.begin_grid(number, (timeline, tick));
        start.publish_all();
        number
    }

    /// One count serves all timelines: it moves on with each, and that is all that a tick has to do.
    fn next_tick(&mut self) -> u32 {
        self.ticks += 1;
        self.ticks
    }

    /// The end of a grid: what comes after it knows all of it.
    pub(crate) fn end_grid(&mut self, grid: u32, known: &mut Known) {
        if let Some(facts) = self.grids.0.get(grid as usize - 1) {
            known.all.raise(facts.timeline, facts.tick);
        }
        known.publish_all();
    }

    /// What lies at byte `at` of shadow `number`; empty where it has no name.
    pub(crate) fn part(&self, number: u32, at: u64) -> String {
        let names = self.shadows.get(number as usize).and_then(|shadow| shadow.names.as_ref());
        names.and_then(|names| (names.0)(at)).unwrap_or_default()
    }

    /// An access by the host or a stream to `bytes` bytes of shadow `number` at `at`.
    pub(crate) fn host_access(
        &mut self,
        number: u32,
        at: u64,
        bytes: u64,
        write: bool,
    ) -> Result<(), watch::Trouble> {
        self.host_touches(number, at, bytes, write, How::WEAK)
    }

    /// An acquire load of scope `.sys` by the host of the 8-byte word at `at` in shadow `number`: the host knows what was released there.
    pub(crate) fn host_acquires(&mut self, number: u32, at: u64) -> Result<(), watch::Trouble> {
        self.host_touches(number, at, 8, false, How::generic(Sem::Acquire, Scope::Sys, 8, false))?;
        self.host().loaded = Some((number, at));
        let Some(releases) = self.releases.get(&(number, at)) else { return Ok(()) };
        let mut learnt = Known::default();
        // A narrower scope takes in nobody but the device.
        releases.last.iter().filter(|r| r.scope == Scope::Sys).for_each(|r| learnt.join(&r.known));
        let acted = ACTING.with_borrow_mut(|acting| acting.as_mut().map(|host| host.known.join(&learnt)));
        if acted.is_none() {
            self.host_learns(&learnt);
        }
        Ok(())
    }

    fn host_touches(
        &mut self,
        number: u32,
        at: u64,
        bytes: u64,
        write: bool,
        how: How,
    ) -> Result<(), watch::Trouble> {
        if number == 0 {
            return Ok(());
        }
        let tick = self.next_tick();
        let mut known = Known::default();
        let mut timeline = 0;
        let mut note = |host: &mut Host| {
            timeline = host.timeline;
            known = host.known.clone();
            host.known.raise(host.timeline, tick);
        };
        let acted = ACTING.with_borrow_mut(|acting| acting.as_mut().map(&mut note).is_some());
        if !acted {
            note(self.host());
        }
        let record = Record { actor: timeline, tick, lanes: 0, pc: 0, how, bytes: 0 };
        let who = Accessor { record, own: timeline, published: None, knows: Knows::all(&known) };
        let World { shadows, grids, config, .. } = self;
        let shadow = &mut shadows[number as usize];
        let result = if write {
            shadow.write(grids, at, bytes, &who, |_| false, |_| None).map(drop)
        } else {
            shadow.read(grids, at, bytes, &who)
        };
        match result {
            // The host may look at memory that nobody wrote, as a debugger does.
            Err(trouble @ (_, shadow::Wrong::Race { .. })) if config.races => Err(trouble),
            _ => Ok(()),
        }
    }
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
