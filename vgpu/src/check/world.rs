//! State of a checker, and the host's and streams' operations on memory.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::thread::ThreadId;

use super::checker::CheckConfig;
use super::clock::{self, Key};
use super::grids::{GridFacts, Grids};
use super::hash::FastMap;
use super::history::{History, Step, Writes};
use super::hooks::Place;
use super::past::{CausalPast, PastView, Timeline};
use super::record::{Accessor, How, Record, Update, Violation, ViolationAt};
use super::releases::{Release, ReleaseMap};
use super::reports::Reports;
use super::shadow::{NOT_KEPT, Shadow};
use super::stores::{Counts, Loaded, Stored};
use crate::explore::Path;
use crate::ir::{Scope, Sem};
use crate::seeds::Rng;

/// Words that are kept of those that a host thread has loaded.
const MOST_LOADED: usize = 8;

/// A host thread, or the work of a stream while a thread carries it out.
#[derive(Debug, Default)]
pub(super) struct Host {
    pub(super) timeline: Key,
    pub(super) past: CausalPast,
    /// Words of mapped memory that it has loaded last, the latest first: shadow, offset, and the
    /// number of the kernel's write that it has read.
    pub(super) loaded: Vec<(u32, u64, Option<u64>)>,
}

/// State of a checker.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) config: CheckConfig,
    pub(crate) grids: Grids,
    /// One per piece of memory, by its number; number 0 stands for none.
    pub(crate) shadows: Vec<Shadow>,
    /// Device and inode of the file behind a piece of memory: its number, and how many mappings
    /// there are. Keyed so, since a pool has another address on every rank.
    pub(super) backings: HashMap<(u64, u64), (u32, u32)>,
    pub(super) free_shadows: Vec<u32>,
    pub(super) stores: Counts,
    pub(super) loads: Counts,
    /// Reads and writes of lanes so far.
    pub(crate) accesses: u64,
    /// Release patterns that a read of the location may observe.
    pub(crate) releases: ReleaseMap,
    /// Chains of releases so far: the number of the last.
    pub(super) chains: u64,
    /// Causal past that was released to hidden memory, for acquires there.
    pub(crate) outside: CausalPast,
    pub(crate) history: History,
    pub(crate) reports: Reports,
    /// Causal past of the last sequentially consistent fences, by scope and by block.
    pub(crate) fences: FastMap<(Scope, Key), Release>,
    pub(super) hosts: HashMap<ThreadId, Host>,
    /// The thread that all threads of the host count as. Of a machine, one thread at a time acts.
    pub(crate) only_host: Option<ThreadId>,
    /// Causal past that host threads have published ([`host_meets`](super::host_meets)).
    pub(super) meeting: CausalPast,
    /// Reads by host code itself, with the causal past of the threads that made them.
    read_by_host: CausalPast,
    pub(super) timelines: u64,
    pub(super) ticks: u32,
    pub(crate) rng: Rng,
    /// The choices of an exploration, which take the place of `rng`.
    pub(crate) path: Option<Path>,
}

thread_local! {
    /// The stream whose work this thread executes at present.
    pub(super) static ACTING: RefCell<Option<Host>> = const { RefCell::new(None) };
}

impl World {
    /// A world in which nothing has happened yet.
    pub(super) fn new(config: CheckConfig) -> World {
        let none = Shadow::new(true, false);
        World {
            config,
            grids: Grids::default(),
            shadows: vec![none],
            stores: Counts::default(),
            loads: Counts::default(),
            accesses: 0,
            backings: HashMap::new(),
            free_shadows: vec![],
            releases: ReleaseMap::default(),
            chains: 0,
            outside: CausalPast::default(),
            history: History::default(),
            reports: Reports::new(config.collect),
            fences: FastMap::default(),
            hosts: HashMap::new(),
            only_host: None,
            meeting: CausalPast::default(),
            read_by_host: CausalPast::default(),
            timelines: 0,
            ticks: 0,
            rng: Rng::new(config.weak_memory.unwrap_or(0)),
            path: None,
        }
    }

    /// A piece of memory is mapped by the device of this identity, under this label. `filled`: its
    /// contents already count as written.
    pub(crate) fn map(&mut self, backing: (u64, u64), filled: bool, by: (u64, Arc<str>)) -> u32 {
        if let Some((number, maps)) = self.backings.get_mut(&backing) {
            *maps += 1;
            return *number;
        }
        // The device that maps it first is its origin.
        let mut shadow = Shadow::new(false, filled);
        (shadow.origin, shadow.since) = (Some(by), self.history.mark());
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
            self.releases.forget(number);
            self.stores.forget(number);
            self.loads.forget(number);
            self.hosts.values_mut().for_each(|host| host.loaded.retain(|word| word.0 != number));
            self.free_shadows.push(number);
        }
    }

    pub(super) fn new_timeline(&mut self) -> Key {
        self.timelines += 1;
        clock::timeline(self.timelines)
    }

    pub(super) fn host(&mut self) -> &mut Host {
        let id = self.host_id();
        if !self.hosts.contains_key(&id) {
            let timeline = self.new_timeline();
            self.hosts.insert(id, Host { timeline, ..Host::default() });
        }
        self.hosts.entry(id).or_default()
    }

    /// The thread that the calling one counts as.
    pub(super) fn host_id(&self) -> ThreadId {
        self.only_host.unwrap_or_else(|| std::thread::current().id())
    }

    /// Does something for this thread, or for the stream that it acts for.
    fn as_host<T>(&mut self, act: impl FnOnce(&mut Host) -> T) -> T {
        ACTING.with_borrow_mut(|acting| match acting {
            Some(stream) => act(stream),
            None => act(self.host()),
        })
    }

    /// The causal past of this thread, or of the stream that it acts for.
    pub(crate) fn host_past(&mut self) -> CausalPast {
        self.as_host(|host| host.past.clone())
    }

    pub(crate) fn host_acquires_past(&mut self, past: &CausalPast) {
        self.host().past.join(past);
    }

    /// Begins a grid after the causal past `start`, on a timeline or on one of its own. Returns its
    /// number.
    pub(crate) fn begin_grid(
        &mut self,
        start: &mut CausalPast,
        timeline: Option<Timeline>,
        device: u64,
        kernel: Arc<crate::kernel::Kernel>,
        (shape, cluster): ([u32; 3], [u32; 3]),
    ) -> u32 {
        let timeline = timeline.map_or_else(|| self.new_timeline(), |t| t.0);
        let tick = self.next_tick();
        self.grids.all.push(GridFacts { timeline, tick, device, kernel, grid: shape, cluster });
        let number = self.grids.all.len() as u32;
        start.all.begin_grid(number, (timeline, tick));
        start.publish_all();
        number
    }

    /// One counter serves all timelines, because ticks only have to increase.
    pub(super) fn next_tick(&mut self) -> u32 {
        self.ticks += 1;
        self.ticks
    }

    /// Ends a grid: `known` then includes all of it.
    pub(crate) fn end_grid(&mut self, grid: u32, past: &mut CausalPast) {
        if let Some(facts) = self.grids.all.get(grid as usize - 1) {
            past.all.raise(facts.timeline, facts.tick);
        }
        past.publish_all();
    }

    /// The strong writes of a place in global memory.
    pub(super) fn writes(&self, place: Place) -> Option<&Writes> {
        let Place::Global { shadow, offset } = place else { return None };
        self.releases.get(shadow, offset).map(|releases| &releases.writes)
    }

    /// The last strong reads by a block of places in global memory that a thread which `is_meant`
    /// takes has written last, latest first, with that write, which may have come behind the read.
    pub(super) fn reads_of(&self, block: Key, is_meant: impl Fn(Key) -> bool) -> impl Iterator<Item = Step> {
        self.history.reads_by(block).filter_map(move |&read| {
            let Place::Global { shadow, .. } = read.place else { return None };
            let write = *self.writes(read.place)?.last()?;
            // Earlier reads are of memory that is freed.
            let is_there = self.shadows.get(shadow as usize)?.since <= read.at;
            (is_there && is_meant(write.by)).then_some(Step { read, write: Some(write) })
        })
    }

    /// Name of byte `at` of shadow `number`; empty if it has none.
    pub(crate) fn part(&self, number: u32, at: u64) -> String {
        self.shadows.get(number as usize).and_then(|shadow| shadow.name(at)).unwrap_or_default()
    }

    /// Stores by kernels since the count began, to memory that is still allocated.
    pub(super) fn stored(&self) -> Vec<Stored> {
        let mut all: BTreeMap<_, u64> = BTreeMap::new();
        for ((grid, _, shadow, offset), bytes) in self.stores.counted() {
            if let Some(of) = self.by_name(grid, shadow, offset) {
                *all.entry(of).or_default() += bytes;
            }
        }
        let stored = |((by, on, memory, kernel, part), bytes)| Stored { by, on, memory, kernel, part, bytes };
        all.into_iter().map(stored).collect()
    }

    /// Loads by blocks since [`Counts::count`], from memory that is still allocated.
    pub(super) fn loaded(&self) -> Vec<Loaded> {
        let mut all: BTreeMap<_, u64> = BTreeMap::new();
        for ((grid, block, shadow, offset), loads) in self.loads.counted() {
            if let Some(of) = self.by_name(grid, shadow, offset) {
                *all.entry((of, block)).or_default() += loads;
            }
        }
        let loaded = |(((by, on, memory, kernel, part), block), loads)| Loaded {
            by,
            on,
            memory,
            kernel,
            part,
            block,
            loads,
        };
        all.into_iter().map(loaded).collect()
    }

    /// The device of a grid, the device of a piece of memory, its label, the kernel, and the part's
    /// name.
    fn by_name(&self, grid: u32, shadow: u32, offset: u64) -> Option<(u32, u32, String, String, String)> {
        let (by, kernel) = self.kernel_of(grid)?;
        let (on, memory) = self.origin_of(shadow)?;
        let part = self.part(shadow, offset);
        let part = part.split(['[', ' ']).next().unwrap_or_default().to_owned();
        Some((by, on, memory, kernel, part))
    }

    /// The number that a device was given.
    fn device_number(&self, device: u64) -> u32 {
        self.grids.devices.get(&device).copied().unwrap_or_default()
    }

    /// The device of a grid, and the kernel.
    fn kernel_of(&self, grid: u32) -> Option<(u32, String)> {
        // Numbers begin with 1.
        let facts = self.grids.all.get((grid as usize).checked_sub(1)?)?;
        Some((self.device_number(facts.device), facts.kernel.name().to_owned()))
    }

    /// The device that a piece of memory belongs to, and its label there.
    pub(super) fn origin_of(&self, shadow: u32) -> Option<(u32, String)> {
        let (device, label) = self.shadows.get(shadow as usize)?.origin.as_ref()?;
        Some((self.device_number(*device), label.to_string()))
    }

    /// An access by the host or a stream to `bytes` bytes of shadow `number` at `at`.
    pub(crate) fn host_access(
        &mut self,
        number: u32,
        at: u64,
        bytes: u64,
        write: bool,
    ) -> Result<(), ViolationAt> {
        self.host_touches(number, at, bytes, write, How::WEAK)
    }

    /// An acquire load of scope `.sys` by the host of the 8-byte word at `at` in shadow `number`.
    /// The releases there join the host's causal past.
    pub(crate) fn host_acquires(&mut self, number: u32, at: u64) -> Result<(), ViolationAt> {
        self.host_touches(number, at, 8, false, How::generic(Sem::Acquire, Scope::Sys, 8, Update::No))?;
        let write = self.releases.get(number, at).and_then(|found| Some(found.writes.last()?.at));
        let loaded = &mut self.host().loaded;
        loaded.retain(|word| (word.0, word.1) != (number, at));
        loaded.truncate(MOST_LOADED - 1);
        loaded.insert(0, (number, at, write));
        let mut acquired = CausalPast::default();
        if self.shadows.get(number as usize).is_some_and(|shadow| shadow.hidden) {
            acquired.join(&self.outside);
        } else {
            let Some(releases) = self.releases.get(number, at) else { return Ok(()) };
            // A narrower scope does not include the host.
            releases.last().iter().filter(|r| r.scope == Scope::Sys).for_each(|r| acquired.join(&r.past));
        }
        self.as_host(|host| host.past.join(&acquired));
        Ok(())
    }

    /// Host code is about to write memory by itself. Another thread may have passed on what it has
    /// read, through a socket for instance. So the write comes after all reads by host code that
    /// were announced before it.
    pub(crate) fn host_is_to_write(&mut self) {
        let read = std::mem::take(&mut self.read_by_host);
        self.as_host(|host| host.past.join(&read));
        self.read_by_host = read;
    }

    /// Host code has announced a read of memory by itself.
    pub(crate) fn host_has_read(&mut self) {
        let past = self.host_past();
        self.read_by_host.join(&past);
    }

    /// A release store of scope `.sys` by the host of the 8-byte word at `at` in shadow `number`. A
    /// kernel that acquires it comes after what the host thread knows.
    pub(crate) fn host_releases(&mut self, number: u32, at: u64) -> Result<(), ViolationAt> {
        self.host_touches(number, at, 8, true, How::generic(Sem::Release, Scope::Sys, 8, Update::No))?;
        if self.shadows.get(number as usize).is_none_or(|shadow| shadow.hidden) {
            return Ok(());
        }
        self.chains += 1;
        let (by, past) = self.as_host(|host| (host.timeline, host.past.clone()));
        let release = Release { scope: Scope::Sys, by, shared: false, chain: self.chains, past };
        let releases = self.releases.get_or_default(number, at);
        self.history.wrote(&mut releases.writes, (by, 0), (Sem::Release, Scope::Sys), false, (true, None));
        let patterns = releases.patterns.get_or_insert_default();
        patterns.before = std::mem::replace(&mut patterns.last, vec![release]);
        patterns.ahead = None;
        Ok(())
    }

    fn host_touches(
        &mut self,
        number: u32,
        at: u64,
        bytes: u64,
        write: bool,
        how: How,
    ) -> Result<(), ViolationAt> {
        if number == 0 {
            return Ok(());
        }
        let tick = self.next_tick();
        let (timeline, past) = self.as_host(|host| {
            let past = host.past.clone();
            host.past.raise(host.timeline, tick);
            (host.timeline, past)
        });
        let record = Record::of(timeline, tick, 0, how);
        let who = Accessor { record, own: timeline, published: None, view: PastView::all(&past) };
        let World { shadows, grids, config, .. } = self;
        let shadow = &mut shadows[number as usize];
        let found = if shadow.hidden {
            // Host writes to hidden memory are not checked: the checker tracks no other host
            // accesses there. Strong host reads are polls.
            if write || how.strong.is_some() { None } else { shadow.take(grids, at, bytes, &who).first() }
        } else if write {
            shadow.write(grids, at, bytes, &who, |_| false, NOT_KEPT).1.first()
        } else {
            shadow.read(grids, at, bytes, &who).first()
        };
        match found {
            Some(violation @ (_, Violation::Race { .. })) if config.races => Err(violation),
            _ => Ok(()),
        }
    }
}
