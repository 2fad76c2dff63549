//! Causal pasts of the lanes of a block, and the operations that extend them.

use super::clock::{self, Key, VectorClock};
use super::cluster::Visit;
use super::grids::Grids;
use super::hash::FastMap;
use super::history::FenceSite;
use super::hooks::Place;
use super::past::{Acquired, CausalPast, GLOBAL, PastView, SHARED};
use super::record::Record;
use super::releases::{Fenced, Release, ReleaseMap};
use super::shadow::Shadow;
use crate::exec::bulk_queue::Landed;
use crate::exec::cluster::offset_of;
use crate::exec::lanes::lanes;
use crate::ir::{BARRIERS, FULL, Fence, Order, Scope};

/// All that was released to hidden memory, as a chain.
pub(super) const OUTSIDE: u64 = 0;
/// Most chains whose acquired pasts a lane keeps apart.
const MOST_ACQUIRED: usize = 16;

/// Causal past of a lane.
#[derive(Clone, Debug, Default)]
struct Lane {
    past: CausalPast,
    /// Tick up to which the causal past includes all lanes of the warp, where `past` may lack them.
    /// A warp synchronises far more often than it releases.
    met: u32,
    /// Results of the lane's last acquires. A polling loop acquires in many iterations, and its
    /// last result includes the earlier ones. So the results are joined into `past` only before the
    /// lane releases.
    acquired: Vec<Acquired>,
    /// The joined causal pasts at fences of all lanes that met this one at a barrier afterwards,
    /// and the narrowest scope of these fences. By the model, no store of this lane publishes them.
    /// They do not count for [`Warp::fenced_since`].
    ahead: Option<Fenced>,
    /// Releases that relaxed reads have observed. A fence after the reads acquires them.
    seen: Vec<(Scope, Release)>,
}

impl Lane {
    /// Whether acquiring `past` from a chain once more changes nothing.
    fn has_acquired(&self, chain: u64, past: &CausalPast) -> bool {
        self.acquired.iter().any(|h| h.chain == chain && h.joined && h.past.same(past))
    }

    /// Whether observing a release once more by a relaxed read of this scope changes nothing.
    fn has_seen(&self, scope: Scope, release: &Release) -> bool {
        let same = |old: &Release| {
            (old.by, old.chain, old.scope) == (release.by, release.chain, release.scope)
                && old.past.same(&release.past)
        };
        self.seen.iter().any(|(by, old)| *by == scope && same(old))
    }

    /// Acquires `past`, the causal past of a chain.
    fn acquire(&mut self, chain: u64, past: &CausalPast) {
        match self.acquired.iter_mut().find(|h| h.chain == chain) {
            Some(last) if last.past.same(past) => {
                // A polling lane compares these pasts at each poll: one is faster than several.
                if !last.joined {
                    last.joined = true;
                    self.past.join(past);
                }
            }
            Some(last) => (last.past, last.joined) = (past.clone(), false),
            None => {
                if self.acquired.len() == MOST_ACQUIRED {
                    self.join_acquired();
                    self.acquired.remove(0);
                }
                self.acquired.push(Acquired { chain, past: past.clone(), joined: false });
            }
        }
    }

    /// Joins the results of all acquires into `past`.
    fn join_acquired(&mut self) {
        for acquired in self.acquired.iter_mut().filter(|h| !h.joined) {
            self.past.join(&acquired.past);
            acquired.joined = true;
        }
    }

    fn has_joined_all(&self) -> bool {
        self.acquired.iter().all(|h| h.joined)
    }

    /// Joins all parts of its causal past into `past`. `warp` is its warp's key.
    fn settle(&mut self, warp: Key) {
        self.join_acquired();
        if self.met > 0 {
            self.past.all.raise(warp, self.met);
            self.met = 0;
        }
    }

    fn view(&self, warp: Key) -> PastView<'_> {
        PastView { past: &self.past, acquired: &self.acquired, met: (warp, self.met) }
    }

    /// Joins the lane's causal past into `all`. `warp` is its warp's key.
    fn add_to(&self, warp: Key, all: &mut CausalPast) {
        all.join(&self.past);
        self.acquired.iter().filter(|h| !h.joined).for_each(|h| all.join(&h.past));
        if self.met > 0 {
            all.all.raise(warp, self.met);
        }
    }
}

/// Adds fenced causal pasts to others.
pub(super) fn join_fenced(all: &mut Option<Fenced>, more: Option<&Fenced>) {
    match (all, more) {
        (_, None) => {}
        (Some((scope, past)), Some((narrower, more))) => {
            *scope = (*scope).min(*narrower);
            past.join(more);
        }
        (all, more) => *all = more.cloned(),
    }
}

/// A strong read of one element that changed nothing, neither in the shadow nor in a causal past:
/// the same read changes nothing again, as long as all of these are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Poll {
    pub(super) pc: u32,
    pub(super) lanes: u32,
    pub(super) place: Place,
    pub(super) size: u64,
    /// [`Shadow::stamps`] of the element.
    stamps: [u32; 4],
    tick: u32,
    changes: u64,
}

/// Recorded reads of a warp, by their instructions and first lanes.
const POLLS: usize = 16;

impl Poll {
    /// Whether these are the stamps of the element then.
    pub(super) fn has(&self, stamps: [u32; 4]) -> bool {
        self.stamps == stamps
    }

    fn index(&self) -> usize {
        (self.pc + self.lanes.trailing_zeros()) as usize % POLLS
    }
}

/// The lanes of a warp, in groups with equal causal pasts.
#[derive(Debug, Default)]
struct Warp {
    key: Key,
    /// Increases by 1 whenever a lane publishes.
    tick: u32,
    threads: u32,
    groups: Vec<(u32, Lane)>,
    /// Increases whenever a causal past of the groups may have changed.
    changes: u64,
    /// The last barrier at which the whole warp has arrived, and `changes` then.
    arrived: Option<(usize, u64)>,
    polls: [Option<Poll>; POLLS],
    /// A lane's own accesses have been published to bulk copies: `fenced` is not all zero.
    has_fenced: bool,
    /// Tick up to which each lane's own accesses have been published to bulk copies, in shared and
    /// in global memory. Kept outside the groups: it would split lanes whose causal pasts are equal
    /// otherwise.
    fenced: [[u32; 32]; 2],
    /// By lane, the causal past at its last fence, outside of the groups for the same reason, and
    /// before it those at the last fences of wider scopes, the widest first. A strong store after
    /// the fences publishes them. `None` before the first.
    fences: Option<Box<[Vec<Fenced>; 32]>>,
    /// For reports: the last fence of each lane. `None` before the first.
    fence_sites: Option<Box<[Option<FenceSite>; 32]>>,
    /// Lanes that have fenced since [`Lane::ahead`] was set.
    fenced_since: u32,
    /// Tick of each lane's last `fence.mbarrier_init`. `None` before the first.
    init_fences: Option<Box<[u32; 32]>>,
    /// For reports, by lane: the tick of each other lane up to which both ran in step, which orders
    /// no memory. `None` before the lanes first parted.
    in_step: Option<Box<[[u32; 32]; 32]>>,
}

/// An mbarrier.
#[derive(Debug)]
struct Mbarrier {
    key: Key,
    /// The instructions that have initialised it and arrived last, for reports.
    init: u32,
    arrival: Option<u32>,
    /// `mbarrier.inval` has not ended it.
    live: bool,
    /// Phases completed.
    phases: u32,
    /// A test has returned true for the last phase that has completed, or none has completed.
    seen: bool,
    /// Bulk copies that complete on it and have not landed.
    under_way: u32,
    /// The last phase behind which all copies that were issued up to its end had landed. A phase
    /// with copies whose bytes are not expected completes without them.
    covered: u32,
    /// Joined causal pasts of the lanes that have arrived in this phase.
    arrived: CausalPast,
    /// Joined causal pasts of the lanes that arrived in the last phase, and of its copies.
    completed: CausalPast,
}

/// A block barrier that fills.
#[derive(Debug, Default)]
struct Gathering {
    past: CausalPast,
    /// Causal pasts at the fences of the lanes that have arrived.
    fenced: Option<Fenced>,
    /// Warps that have arrived with all of their threads, and their ticks.
    whole: Vec<(u32, u32)>,
}

/// A block under check.
#[derive(Debug)]
pub(crate) struct BlockCheck {
    warps: Vec<Warp>,
    /// The causal past at the begin of the kernel.
    pub(crate) start: CausalPast,
    pub(crate) shared: Shadow,
    pub(crate) releases: ReleaseMap,
    /// Causal pasts gathered from the warps that have arrived, and those of the last completion.
    gathering: [Gathering; BARRIERS],
    opened: [CausalPast; BARRIERS],
    /// The fenced causal pasts of the last completions.
    opened_fenced: [Option<Fenced>; BARRIERS],
    /// Barriers that all warps have passed with all of their threads.
    passed: u32,
    mbarriers: FastMap<u64, Mbarrier>,
    /// The last accesses of other blocks of the cluster to its shared memory, by actor.
    pub(super) visits: FastMap<Key, Visit>,
    /// The kernel has fences that lend their order to relaxed accesses.
    has_fences: bool,
}

impl Warp {
    /// Calls `f` for the groups that make up `mask`, splitting those that reach beyond it.
    fn each(&mut self, mask: u32, mut f: impl FnMut(&mut Lane)) {
        self.changes += 1;
        for at in 0..self.groups.len() {
            let (lanes, lane) = &mut self.groups[at];
            let here = *lanes & mask;
            if here == 0 {
                continue;
            }
            if here != *lanes {
                let rest = (*lanes & !here, lane.clone());
                *lanes = here;
                f(lane);
                self.groups.push(rest);
            } else {
                f(lane);
            }
        }
    }

    /// The lanes of a mask whose causal past is that of its first lane, and this lane's state.
    fn alike(&self, mask: u32) -> Option<(u32, &Lane)> {
        // Mostly all of the warp is one group.
        if let [(lanes, lane)] = self.groups.as_slice() {
            return Some((lanes & mask, lane)).filter(|(alike, _)| *alike != 0);
        }
        let first = mask.trailing_zeros() % 32;
        let (lanes, lane) = self.groups.iter().find(|(lanes, _)| lanes >> first & 1 != 0)?;
        let mut alike = lanes & mask;
        if alike != mask && lane.has_joined_all() {
            let same =
                |other: &Lane| other.has_joined_all() && other.met == lane.met && other.past.same(&lane.past);
            let more = self.groups.iter().filter(|(lanes, other)| lanes & mask != 0 && same(other));
            alike = more.fold(alike, |alike, (lanes, _)| alike | lanes & mask);
        }
        Some((alike, lane))
    }

    fn lane(&self, lane: usize) -> Option<&Lane> {
        self.groups.iter().find(|(mask, _)| mask >> lane & 1 != 0).map(|(_, lane)| lane)
    }

    /// Joins the causal pasts and the own accesses of the lanes of `mask`. Moves the tick.
    fn publish(&mut self, mask: u32) -> CausalPast {
        let mut all = CausalPast::default();
        self.changes += 1;
        for (lanes, lane) in &mut self.groups {
            if *lanes & mask != 0 {
                lane.settle(self.key);
                all.join(&lane.past);
            }
        }
        self.publish_own(mask, &mut all);
        all
    }

    /// Adds the own accesses of the lanes of `mask` to `all`. Moves the tick.
    fn publish_own(&mut self, mask: u32, all: &mut CausalPast) {
        if mask & self.threads == self.threads {
            all.all.raise(self.key, self.tick);
        } else {
            lanes(mask).for_each(|l| all.all.raise(clock::lane(self.key, l), self.tick));
        }
        self.add_fenced(mask, &mut all.published);
        self.tick += 1;
    }

    /// Joins the causal pasts of the lanes of `mask` into `all`, own accesses excepted where it is
    /// all of the warp. The lanes keep the results of their acquires apart: a barrier gives all of
    /// them `all` instead.
    fn gather(&self, mask: u32, all: &mut CausalPast) {
        // Groups of lanes mostly differ in their last acquires alone.
        let mut last: Option<&CausalPast> = None;
        for (_, lane) in self.groups.iter().filter(|(lanes, _)| lanes & mask != 0) {
            if !last.is_some_and(|last| last.same(&lane.past)) {
                all.join(&lane.past);
                last = Some(&lane.past);
            }
            for acquired in lane.acquired.iter().filter(|h| !h.joined) {
                all.join(&acquired.past);
            }
            if lane.met > 0 && mask & self.threads != self.threads {
                all.all.raise(self.key, lane.met);
            }
        }
    }

    /// Adds the accesses that the lanes of `mask` have published themselves to `published`.
    fn add_fenced(&self, mask: u32, published: &mut [VectorClock; 2]) {
        if !self.has_fenced {
            return;
        }
        let equal = published[SHARED].same(&published[GLOBAL]) && self.fenced[SHARED] == self.fenced[GLOBAL];
        if equal {
            // Both stay one allocation, which is changed in place if nothing else has it.
            published[GLOBAL] = VectorClock::default();
        }
        let spaces = if equal { 1 } else { 2 };
        for (published, fenced) in published.iter_mut().zip(&self.fenced).take(spaces) {
            let all = mask & self.threads == self.threads;
            let common = if all { lanes(self.threads).map(|l| fenced[l]).min().unwrap_or(0) } else { 0 };
            if common > 0 {
                // Lanes that went through a fence together make one entry.
                published.raise(self.key, common);
            }
            lanes(mask)
                .filter(|&l| fenced[l] > common)
                .for_each(|l| published.raise(clock::lane(self.key, l), fenced[l]));
        }
        if equal {
            published[GLOBAL] = published[SHARED].clone();
        }
    }

    /// The joined causal pasts of the lanes of `mask` at their fences, and at fences ahead of
    /// barriers that they have passed.
    fn fences_of(&self, mask: u32) -> Option<Fenced> {
        let mut all = None;
        if let Some(fences) = &self.fences {
            lanes(mask)
                .filter_map(|lane| fences[lane].last())
                .for_each(|fence| join_fenced(&mut all, Some(fence)));
        }
        for (_, lane) in self.groups.iter().filter(|(lanes, _)| lanes & mask & !self.fenced_since != 0) {
            join_fenced(&mut all, lane.ahead.as_ref());
        }
        all
    }

    /// The causal past of a lane at its last fence, and before it at the last of wider scopes.
    fn fences(&self, lane: usize) -> &[Fenced] {
        self.fences.as_ref().map_or(&[], |fences| &fences[lane])
    }

    /// The causal past of a lane at its last fence.
    fn fence(&self, lane: usize) -> Option<&Fenced> {
        self.fences(lane).last()
    }

    /// [`Lane::ahead`] of a lane.
    fn ahead(&self, lane: usize) -> Option<&Fenced> {
        let counts = self.fenced_since >> lane & 1 == 0;
        self.lane(lane).filter(|_| counts)?.ahead.as_ref()
    }

    /// The lanes of `mask` are behind a barrier, ahead of which these fences stood.
    fn fences_stood_ahead(&mut self, mask: u32, fences: &Option<Fenced>) {
        if fences.is_some() {
            self.each(mask, |lane| lane.ahead.clone_from(fences));
            self.fenced_since &= !mask;
        }
    }

    /// Makes one group of the lanes of `mask`, with a causal past that includes those of all.
    fn merge(&mut self, mask: u32, past: &CausalPast) {
        self.changes += 1;
        if let [(lanes, lane)] = self.groups.as_mut_slice()
            && *lanes == mask
            && lane.seen.is_empty()
        {
            lane.past.clone_from(past);
            (lane.met, lane.ahead) = (0, None);
            lane.acquired.iter_mut().for_each(|h| h.joined = true);
            return;
        }
        // Lanes with relaxed reads of their own stay in their groups.
        if self.groups.iter().any(|(lanes, lane)| lanes & mask != 0 && !lane.seen.is_empty()) {
            self.each(mask, |lane| {
                lane.past = past.clone();
                lane.met = 0;
                lane.acquired.iter_mut().for_each(|h| h.joined = true);
            });
            return;
        }
        let mut acquired: Vec<Acquired> = vec![];
        for (lanes, lane) in self.groups.iter_mut().filter(|(lanes, _)| lanes & mask != 0) {
            *lanes &= !mask;
            let theirs = if *lanes == 0 { std::mem::take(&mut lane.acquired) } else { lane.acquired.clone() };
            for theirs in theirs {
                if acquired.len() < MOST_ACQUIRED && !acquired.iter().any(|h| h.chain == theirs.chain) {
                    acquired.push(Acquired { joined: true, ..theirs });
                }
            }
        }
        self.groups.retain(|(lanes, _)| *lanes != 0);
        self.groups.push((mask, Lane { past: past.clone(), acquired, ..Lane::default() }));
    }
}

impl BlockCheck {
    pub(crate) fn new(grid: u32, block: u64, threads: u32, start: &CausalPast, has_fences: bool) -> Self {
        let mut begin = start.clone();
        begin.keep_apart(clock::warp(grid, block, 0));
        let warps = (0..threads.div_ceil(32)).map(|w| {
            let count = (threads - w * 32).min(32);
            let mask = if count == 32 { FULL } else { (1 << count) - 1 };
            let lane = Lane { past: begin.clone(), ..Lane::default() };
            Warp {
                key: clock::warp(grid, block, w),
                tick: 1,
                threads: mask,
                groups: vec![(mask, lane)],
                changes: 0,
                arrived: None,
                polls: [None; POLLS],
                has_fenced: false,
                fenced: [[0; 32]; 2],
                fences: None,
                fence_sites: None,
                fenced_since: 0,
                init_fences: None,
                in_step: None,
            }
        });
        Self {
            warps: warps.collect(),
            start: start.clone(),
            shared: Shadow::deferring(false),
            releases: ReleaseMap::default(),
            gathering: Default::default(),
            opened: Default::default(),
            opened_fenced: Default::default(),
            passed: 0,
            mbarriers: FastMap::default(),
            visits: FastMap::default(),
            has_fences,
        }
    }

    /// The instructions that have last written the words of shared memory which a lane has read by
    /// instruction `pc`, those of the latest read first.
    pub(crate) fn shared_writers(&self, lane: Key, pc: u32) -> Vec<u32> {
        let within = clock::place_of(lane).and_then(|(_, within)| within?.1).unwrap_or(0);
        let is_own = |read: &Record| match read.lanes {
            0 => read.actor == lane,
            lanes => read.actor == lane & !clock::WITHIN_WARP && lanes >> within & 1 != 0,
        };
        let mut reads = self.shared.last_reads(|read| read.pc == pc && is_own(read));
        reads.sort_by_key(|(_, read, _)| std::cmp::Reverse(read.tick));
        reads.into_iter().filter_map(|(_, _, write)| Some(write?.pc)).collect()
    }

    pub(crate) fn key(&self, warp: u32) -> Key {
        self.warps[warp as usize].key
    }

    pub(crate) fn tick(&self, warp: u32) -> u32 {
        self.warps[warp as usize].tick
    }

    /// The record of a read, for the case that it changes nothing.
    pub(super) fn poll(
        &self,
        warp: u32,
        pc: u32,
        (place, lanes, size): (Place, u32, u64),
        stamps: [u32; 4],
    ) -> Poll {
        let Warp { tick, changes, .. } = self.warps[warp as usize];
        Poll { pc, lanes, place, size, stamps, tick, changes }
    }

    /// Whether this read changed nothing before.
    pub(super) fn remembers(&self, warp: u32, poll: &Poll) -> bool {
        self.warps[warp as usize].polls[poll.index()].as_ref() == Some(poll)
    }

    /// Whether the causal pasts and the tick of a warp are those at a recorded read.
    pub(super) fn is_as_at(&self, warp: u32, poll: &Poll) -> bool {
        let Warp { tick, changes, .. } = self.warps[warp as usize];
        (tick, changes) == (poll.tick, poll.changes)
    }

    /// Records a read that changes nothing.
    pub(super) fn remember(&mut self, warp: u32, poll: Poll) {
        self.warps[warp as usize].polls[poll.index()] = Some(poll);
    }

    /// The shadow of shared memory, and the causal past of the lanes of `mask`. None where they
    /// have different ones.
    pub(crate) fn shared_and_view(&mut self, warp: u32, mask: u32) -> Option<(&mut Shadow, PastView<'_>)> {
        let warp = &self.warps[warp as usize];
        let (alike, lane) = warp.alike(mask)?;
        (mask == alike).then_some((&mut self.shared, lane.view(warp.key)))
    }

    /// The lanes of a mask whose causal past is that of its first lane.
    pub(crate) fn alike(&self, warp: u32, mask: u32) -> u32 {
        self.warps[warp as usize].alike(mask).map_or(mask & mask.wrapping_neg(), |(alike, _)| alike)
    }

    /// The causal past of a lane, without its own accesses.
    pub(crate) fn past(&self, warp: u32, lane: usize) -> CausalPast {
        let mut past = CausalPast::default();
        let warp = &self.warps[warp as usize];
        if let Some(lane) = warp.lane(lane) {
            lane.add_to(warp.key, &mut past);
        }
        past
    }

    /// Joins a lane's acquires before it releases.
    pub(crate) fn join_acquired(&mut self, warp: u32, lane: usize) {
        let Warp { key, groups, changes, .. } = &mut self.warps[warp as usize];
        *changes += 1;
        let of_lane = groups.iter_mut().filter(|(lanes, _)| lanes >> lane & 1 != 0);
        of_lane.for_each(|(_, lane)| lane.settle(*key));
    }

    /// The release pattern of a release by `lane`.
    pub(crate) fn release(&mut self, warp: u32, lane: usize, scope: Scope) -> Release {
        let warp = &mut self.warps[warp as usize];
        let by = clock::lane(warp.key, lane);
        Release { scope, by, shared: false, chain: 0, past: warp.publish(1 << lane).in_tree() }
    }

    /// The release pattern of a relaxed store by `lane` behind a fence, and those of fences of
    /// wider scopes before it. `assumed`: fences ahead of a barrier count as well
    /// ([`Assumptions::fence_before_barrier`]).
    ///
    /// [`Assumptions::fence_before_barrier`]: crate::Assumptions::fence_before_barrier
    pub(crate) fn fenced(
        &self,
        warp: u32,
        lane: usize,
        scope: Scope,
        assumed: bool,
    ) -> Option<(Release, Vec<Release>)> {
        let warp = &self.warps[warp as usize];
        let by = clock::lane(warp.key, lane);
        let (mut fence, ahead) = (warp.fence(lane).cloned(), warp.ahead(lane));
        // A wide fence of its own is not narrowed by those of others.
        let narrower = |(own, _): &Fenced| ahead.is_some_and(|a| a.0 < *own);
        if assumed && !fence.as_ref().is_some_and(narrower) {
            join_fenced(&mut fence, ahead);
        }
        let (fence, past) = fence?;
        let release =
            |fence: Scope, past| Release { scope: scope.min(fence), by, shared: false, chain: 0, past };
        let last = release(fence, past);
        let [wider @ .., _] = warp.fences(lane) else { return Some((last, vec![])) };
        // A store of narrow scope makes them no wider.
        let wider = wider.iter().filter(|(fence, _)| scope.min(*fence) > last.scope);
        let wider = wider.map(|(fence, past)| release(*fence, past.clone())).collect();
        Some((last, wider))
    }

    /// Accesses before fences that stood ahead of a barrier, for `lane` behind it.
    pub(crate) fn fenced_ahead(&self, warp: u32, lane: usize) -> Option<Fenced> {
        self.warps[warp as usize].ahead(lane).cloned()
    }

    /// The lanes of `mask` have run in step up to here.
    pub(crate) fn in_step(&mut self, warp: u32, mask: u32) {
        let warp = &mut self.warps[warp as usize];
        let ticks = warp.in_step.get_or_insert_default();
        let mut all = [0; 32];
        for lane in lanes(mask) {
            all.iter_mut().zip(&ticks[lane]).for_each(|(all, tick)| *all = (*all).max(*tick));
        }
        lanes(mask).for_each(|lane| all[lane] = warp.tick);
        lanes(mask).for_each(|lane| ticks[lane] = all);
        warp.tick += 1;
    }

    /// Whether a lane of `mask` has run in step with lane `lane` since its tick `tick`, or does so
    /// now.
    pub(crate) fn is_in_step(&self, warp: u32, mask: u32, lane: usize, tick: u32) -> bool {
        let ticks = self.warps.get(warp as usize).and_then(|warp| warp.in_step.as_ref());
        mask >> lane & 1 != 0 || ticks.is_some_and(|ticks| lanes(mask).any(|l| ticks[l][lane % 32] >= tick))
    }

    /// Whether a strong read may acquire anything: at once, or at a fence behind it.
    pub(crate) fn acquires(&self, acquire: bool) -> bool {
        acquire || self.has_fences
    }

    /// The lanes of `mask` observe release patterns by a read of scope `scope`: an acquire takes
    /// them over, and so does a fence behind a relaxed read.
    pub(crate) fn observe(
        &mut self,
        grids: &Grids,
        warp: u32,
        mask: u32,
        scope: Scope,
        acquire: bool,
        found: &[Release],
    ) {
        if found.is_empty() || !self.acquires(acquire) {
            return;
        }
        let warp = &mut self.warps[warp as usize];
        let reader = clock::lane(warp.key, mask.trailing_zeros() as usize % 32);
        let fitting = || found.iter().filter(|r| grids.mutual(r.scope, r.by, scope, reader));
        // A warp that polls mostly observes the same again.
        let again = |(lanes, lane): &(u32, Lane)| {
            let same = |r: &Release| {
                if acquire { lane.has_acquired(r.chain, &r.past) } else { lane.has_seen(scope, r) }
            };
            lanes & mask == 0 || lanes & !mask == 0 && fitting().all(same)
        };
        if fitting().next().is_none() || warp.groups.iter().all(again) {
            return;
        }
        warp.each(mask, |lane| {
            for r in fitting() {
                if acquire {
                    lane.acquire(r.chain, &r.past);
                } else {
                    // A writer's releases of several scopes cover different accesses.
                    lane.seen.retain(|(by, old)| (*by, old.by, old.scope) != (scope, r.by, r.scope));
                    lane.seen.push((scope, Release::clone(r)));
                }
            }
        });
    }

    /// Adds the releases to hidden memory so far to the causal pasts of the lanes.
    pub(crate) fn acquire(&mut self, warp: u32, mask: u32, outside: &CausalPast) {
        self.warps[warp as usize].each(mask, |lane| lane.acquire(OUTSIDE, outside));
    }

    /// Accesses that a bulk copy by a lane with causal past `past` may rely on in a space:
    /// published accesses, those of the lane itself included.
    pub(crate) fn published(&self, warp: u32, lane: usize, past: &CausalPast, space: usize) -> VectorClock {
        let warp = &self.warps[warp as usize];
        let mut published = past.published[space].clone();
        if warp.fenced[space][lane] > 0 {
            published.raise(clock::lane(warp.key, lane), warp.fenced[space][lane]);
        }
        published
    }

    /// For reports: the lanes of a mask fence by this instruction. Returns the warp's tick.
    pub(super) fn note_fence(&mut self, warp: u32, mask: u32, pc: u32, fence: Fence) -> u32 {
        let warp = &mut self.warps[warp as usize];
        if let Some(scope) = fence.releases() {
            let sites = warp.fence_sites.get_or_insert_default();
            lanes(mask).for_each(|lane| sites[lane] = Some((pc, scope)));
        }
        warp.tick
    }

    /// For reports: the last fence of a lane that a release pattern may have.
    pub(super) fn fence_site(&self, warp: u32, lane: usize) -> Option<FenceSite> {
        self.warps[warp as usize].fence_sites.as_ref()?[lane]
    }

    /// A fence by the lanes of `mask`.
    pub(crate) fn fence(
        &mut self,
        grids: &Grids,
        fences: &mut FastMap<(Scope, Key), Release>,
        warp: u32,
        mask: u32,
        fence: Fence,
    ) {
        let w = &mut self.warps[warp as usize];
        match fence {
            Fence::Other => {}
            Fence::MbarrierInit => {
                let fences = w.init_fences.get_or_insert_default();
                lanes(mask).for_each(|l| fences[l] = w.tick);
                w.tick += 1;
            }
            Fence::Async { shared, global } => {
                w.has_fenced = true;
                let key = w.key;
                for (space, on) in [(SHARED, shared), (GLOBAL, global)] {
                    if on {
                        w.each(mask, |lane| {
                            lane.settle(key);
                            lane.past.published[space] = lane.past.all.clone();
                        });
                        lanes(mask).for_each(|l| w.fenced[space][l] = w.tick);
                    }
                }
                w.tick += 1;
            }
            Fence::Acquire(scope) | Fence::Release(scope) | Fence::AcqRel(scope) | Fence::Sc(scope) => {
                let sequential = matches!(fence, Fence::Sc(_));
                for l in lanes(mask) {
                    let own = clock::lane(w.key, l);
                    let mut acquired: Vec<CausalPast> = vec![];
                    if sequential {
                        acquired.extend(
                            fences
                                .values()
                                .filter(|f| grids.mutual(f.scope, f.by, scope, own))
                                .map(|f| f.past.clone()),
                        );
                    }
                    // A fence that acquires nothing leaves the lane in its group.
                    let acquires = fence.acquires().is_some()
                        && (!acquired.is_empty() || w.lane(l).is_some_and(|lane| !lane.seen.is_empty()));
                    w.each(if acquires { 1 << l } else { 0 }, |lane| {
                        acquired.iter().for_each(|k| lane.past.join(k));
                        let Lane { seen, past, .. } = lane;
                        // A wider fence may follow.
                        seen.retain(|(read, r)| {
                            let reaches = grids.mutual(r.scope, r.by, scope.min(*read), own);
                            if reaches {
                                past.join(&r.past);
                            }
                            !reaches
                        });
                    });
                    if fence.releases().is_none() {
                        continue;
                    }
                    let past = w.publish(1 << l).in_tree();
                    if sequential {
                        let place = (scope, clock::block_of(own));
                        let all = fences.entry(place).or_insert_with(|| Release {
                            scope,
                            by: own,
                            shared: true,
                            chain: 0,
                            past: CausalPast::default(),
                        });
                        all.past.join(&past);
                    }
                    let fences = &mut w.fences.get_or_insert_default()[l];
                    fences.retain(|(wider, _)| *wider > scope);
                    fences.push((scope, past));
                    w.fenced_since |= 1 << l;
                }
            }
        }
    }

    /// `bar.warp.sync` by the lanes of `mask`.
    pub(crate) fn sync_warp(&mut self, warp: u32, mask: u32) {
        let warp = &mut self.warps[warp as usize];
        let fenced = if self.has_fences { warp.fences_of(mask) } else { None };
        if mask == warp.threads
            && let [(lanes, lane)] = warp.groups.as_mut_slice()
            && *lanes == mask
        {
            // The causal pasts are equal already, except for the lanes' own accesses: no copies.
            lane.join_acquired();
            (lane.met, lane.ahead) = (warp.tick, fenced);
            warp.fenced_since = 0;
            if warp.has_fenced {
                let mut published = std::mem::take(&mut lane.past.published);
                warp.add_fenced(mask, &mut published);
                warp.groups[0].1.past.published = published;
            }
            warp.tick += 1;
            warp.changes += 1;
            return;
        }
        let mut past = CausalPast::default();
        warp.gather(mask, &mut past);
        warp.publish_own(mask, &mut past);
        warp.merge(mask, &past);
        warp.fences_stood_ahead(mask, &fenced);
    }

    /// A warp with these lanes arrives at a block barrier.
    pub(crate) fn arrive(&mut self, warp: u32, mask: u32, barrier: usize) {
        let w = &mut self.warps[warp as usize];
        let gathering = &mut self.gathering[barrier];
        if self.has_fences {
            join_fenced(&mut gathering.fenced, w.fences_of(mask).as_ref());
        }
        // Raised behind the joins: mostly in place then, without a copy for each warp.
        w.gather(mask, &mut gathering.past);
        if mask & w.threads == w.threads {
            // Its own accesses are added when the barrier completes.
            gathering.whole.push((warp, w.tick));
            w.add_fenced(mask, &mut gathering.past.published);
            w.tick += 1;
            w.arrived = Some((barrier, w.changes));
        } else {
            w.publish_own(mask, &mut gathering.past);
        }
    }

    /// Clears [`Warp::arrived`] of a warp that has arrived at a barrier in another way.
    pub(super) fn forget_arrival(&mut self, warp: u32) {
        self.warps[warp as usize].arrived = None;
    }

    /// A block barrier completes.
    pub(crate) fn complete(&mut self, barrier: usize) {
        let Gathering { mut past, fenced, mut whole } = std::mem::take(&mut self.gathering[barrier]);
        whole.sort_unstable();
        let mut first = whole.clone();
        first.dedup_by_key(|w| w.0);
        if first.len() == self.warps.len() {
            // One entry replaces those of all warps.
            self.passed += 1;
            let ticks = first.into_iter().map(|w| w.1).collect();
            past.all.pass_barrier(self.warps[0].key, self.passed, ticks);
        }
        whole.into_iter().for_each(|(warp, tick)| past.all.raise(self.warps[warp as usize].key, tick));
        self.opened[barrier] = past;
        self.opened_fenced[barrier] = fenced;
    }

    /// Lanes go on behind a block barrier.
    pub(crate) fn pass(&mut self, warp: u32, mask: u32, barrier: usize) {
        if mask == 0 {
            return;
        }
        let past = self.opened[barrier].clone();
        // The gathered causal past includes the lane's own accesses.
        let warp = &mut self.warps[warp as usize];
        let covers_all = mask & warp.threads == warp.threads;
        if covers_all && warp.arrived.take() == Some((barrier, warp.changes)) {
            warp.merge(mask, &past);
        } else if covers_all {
            let mut all = past;
            warp.gather(mask, &mut all);
            let met = warp.groups.iter().map(|(_, lane)| lane.met).max();
            met.filter(|met| *met > 0).into_iter().for_each(|met| all.all.raise(warp.key, met));
            warp.merge(mask, &all);
        } else {
            warp.each(mask, |lane| lane.past.join(&past));
        }
        warp.fences_stood_ahead(mask, &self.opened_fenced[barrier]);
    }

    pub(crate) fn init_mbarrier(&mut self, pc: u32, offset: u64) {
        let old = self.mbarriers.get(&offset);
        let index = old.map_or(self.mbarriers.len(), |m| (m.key & 0x7fff) as usize);
        let (phases, under_way, covered) = old.map_or((0, 0, 0), |m| (m.phases + 1, m.under_way, m.covered));
        let key = clock::mbarrier(self.warps[0].key, index);
        let (arrived, completed) = (CausalPast::default(), CausalPast::default());
        let fresh = Mbarrier {
            key,
            init: pc,
            arrival: None,
            live: true,
            phases,
            seen: true,
            under_way,
            covered,
            arrived,
            completed,
        };
        self.mbarriers.insert(offset, fresh);
    }

    pub(crate) fn inval_mbarrier(&mut self, offset: u64) {
        if let Some(m) = self.mbarriers.get_mut(&offset) {
            m.live = false;
        }
    }

    /// Whether an mbarrier has been initialised, and not ended.
    pub(crate) fn has_mbarrier(&self, offset: u64) -> bool {
        self.mbarriers.get(&offset).is_some_and(|m| m.live)
    }

    /// Whether no test has returned true for the last completed phase of an mbarrier. By the manual
    /// one does, of any thread, before an arrival in the next phase.
    pub(crate) fn is_unseen(&self, offset: u64) -> bool {
        self.mbarriers.get(&offset).is_some_and(|m| !m.seen)
    }

    /// The causal past that an arrival of a lane at an mbarrier releases: a relaxed one that of its
    /// last fence. `reach` is the narrowest scope that includes the block of the mbarrier: a
    /// relaxed arrival of a narrower one releases nothing, and narrower fences do not count.
    pub(crate) fn arrival(&mut self, warp: u32, lane: usize, order: Order, reach: Scope) -> CausalPast {
        let warp = &mut self.warps[warp as usize];
        if !order.relaxed {
            return warp.publish(1 << lane);
        }
        let reaches = |(scope, _): &&Fenced| order.scope.min(*scope) >= reach;
        warp.fences(lane).iter().rfind(reaches).map_or_else(CausalPast::default, |(_, past)| past.clone())
    }

    /// A lane arrives at an mbarrier and releases this to its block.
    pub(crate) fn arrive_mbarrier(&mut self, past: &CausalPast, pc: u32, offset: u64) {
        if let Some(m) = self.mbarriers.get_mut(&offset) {
            m.arrived.join(past);
            m.arrival = Some(pc);
        }
    }

    /// The instructions that have initialised an mbarrier and arrived at it last.
    pub(crate) fn mbarrier_past(&self, offset: u64) -> Option<(u32, Option<u32>)> {
        self.mbarriers.get(&offset).map(|m| (m.init, m.arrival))
    }

    pub(crate) fn complete_mbarrier(&mut self, offset: u64) {
        if let Some(m) = self.mbarriers.get_mut(&offset) {
            m.phases += 1;
            m.seen = false;
            m.completed = std::mem::take(&mut m.arrived);
            if m.under_way == 0 {
                m.covered = m.phases;
            }
            m.completed.raise(m.key, m.covered);
        }
    }

    /// The actor of a bulk copy that is issued and completes on this mbarrier, and its tick.
    pub(crate) fn load_actor(&mut self, offset: u64) -> (Key, u32) {
        self.mbarriers.get_mut(&offset).map_or((0, 0), |m| {
            m.under_way += 1;
            (m.key, m.phases + 1)
        })
    }

    /// The lanes of a mask have observed that the last phase is complete: they acquire it, or a
    /// fence behind a relaxed test does.
    pub(crate) fn pass_mbarrier(&mut self, warp: u32, mask: u32, offset: u64, order: Order) {
        let Some(m) = self.mbarriers.get_mut(&offset) else { return };
        m.seen = true;
        if !order.relaxed {
            self.warps[warp as usize].each(mask, |lane| lane.past.join(&m.completed));
        } else if self.has_fences {
            let past = m.completed.clone();
            let seen = Release { scope: Scope::Cluster, by: m.key, shared: true, chain: 0, past };
            self.warps[warp as usize].each(mask, |lane| {
                lane.seen.retain(|(_, old)| old.by != seen.by);
                lane.seen.push((order.scope, seen.clone()));
            });
        }
    }

    /// The causal past behind the last completion of a barrier, and another in its place.
    pub(super) fn opened(&self, barrier: usize) -> &CausalPast {
        &self.opened[barrier]
    }

    pub(super) fn open(&mut self, barrier: usize, past: &CausalPast) {
        self.opened[barrier] = past.clone();
    }

    /// The causal past of the lanes that have arrived at a barrier.
    pub(super) fn gathered(&mut self, barrier: usize) -> &mut CausalPast {
        &mut self.gathering[barrier].past
    }

    /// The causal past of lanes at their fences of scope `.cluster` and wider, and the last of
    /// their fenced initialisations of mbarriers.
    pub(super) fn fenced_by(&self, warp: u32, mask: u32) -> (CausalPast, Vec<(Key, u32)>) {
        let warp = &self.warps[warp as usize];
        let mut fenced = CausalPast::default();
        let fences = lanes(mask).flat_map(|lane| warp.fences(lane));
        fences.filter(|(scope, _)| *scope >= Scope::Cluster).for_each(|(_, past)| fenced.join(past));
        let ticks = warp.init_fences.iter().flat_map(|fences| fences.iter().enumerate());
        let inits = ticks.filter(|(l, tick)| mask >> l & 1 != 0 && **tick > 0);
        (fenced, inits.map(|(l, tick)| (clock::inits(clock::lane(warp.key, l)), *tick)).collect())
    }

    /// A lane has waited for its bulk stores up to group `group`; `landed`: also for their arrival.
    pub(crate) fn waited(&mut self, warp: u32, lane: usize, group: u32, landed: bool) {
        if group == 0 {
            return;
        }
        let w = &mut self.warps[warp as usize];
        let key = w.key;
        w.each(1 << lane, |l| {
            l.past.raise(clock::store_reads(key, lane), group);
            if landed {
                l.past.raise(clock::store_writes(key, lane), group);
            }
        });
    }

    /// A lane has waited for its copies by `cp.async` up to number `copies`.
    pub(crate) fn waited_for_copies(&mut self, warp: u32, lane: usize, copies: u32) {
        let w = &mut self.warps[warp as usize];
        let key = clock::copies(w.key, lane);
        // Not for bulk copies: those need a proxy fence.
        w.each(1 << lane, |l| l.past.all.raise(key, copies));
    }

    /// Records the progress of copies. The arrival of copies releases only them, not their thread's
    /// past.
    pub(crate) fn landed(&mut self, landed: &Landed) {
        match *landed {
            Landed::Copies { offset, warp, lane, copies } => {
                let key = clock::copies(self.key(warp), lane);
                if let Some(m) = self.mbarriers.get_mut(&offset) {
                    m.arrived.all.raise(key, copies);
                }
            }
            Landed::Copy { offset } => {
                if let Some(m) = self.mbarriers.get_mut(&offset_of(offset)) {
                    m.under_way = m.under_way.saturating_sub(1);
                }
            }
            Landed::Phase { offset } => self.complete_mbarrier(offset_of(offset)),
        }
    }

    /// The products of a warp's warpgroup.
    pub(crate) fn products(&self, warp: u32) -> Key {
        clock::products(self.warps[warp as usize & !3].key)
    }

    /// A warp has waited for the products of its warpgroup up to group `group`.
    pub(crate) fn waited_products(&mut self, warp: u32, group: u32) {
        let key = self.products(warp);
        self.warps[warp as usize].each(FULL, |lane| lane.past.raise(key, group));
    }

    /// Joined causal pasts of all lanes at the end of the block.
    pub(crate) fn end(&self) -> CausalPast {
        let mut all = CausalPast::default();
        for warp in &self.warps {
            warp.groups.iter().for_each(|(_, lane)| lane.add_to(warp.key, &mut all));
        }
        all.in_tree()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::check::record::{Accessor, How, Record, Update};
    use crate::ir::Sem;

    /// A block of two warps, in a kernel with fences that lend their order.
    fn block() -> BlockCheck {
        BlockCheck::new(1, 0, 64, &CausalPast::default(), true)
    }

    fn lane(warp: u32, lane: usize) -> Key {
        clock::lane(clock::warp(1, 0, warp), lane)
    }

    /// The last tick of a lane of one warp that a lane of another includes.
    fn known(block: &mut BlockCheck, warp: u32, by: usize, of: Key) -> u32 {
        let past = block.past(warp, by).all;
        let (_, view) = block.shared_and_view(warp, 1 << by).unwrap();
        let last =
            (0..50).take_while(|tick| *tick == 0 || view.includes(&Grids::default(), of, *tick)).last();
        let in_past = (0..50).take_while(|tick| *tick == 0 || past.includes(of, *tick)).last();
        assert_eq!(last, in_past, "the view of a lane and its past for reports");
        last.unwrap_or(0)
    }

    fn outside(tick: u32) -> CausalPast {
        let mut past = CausalPast::default();
        past.raise(clock::lane(clock::warp(1, 7, 0), 0), tick);
        past
    }

    #[test]
    fn a_warp_that_meets_includes_its_lanes_up_to_there_and_releases_that() {
        let mut b = block();
        b.sync_warp(0, FULL);
        let met = b.tick(0) - 1;
        assert_eq!(known(&mut b, 0, 3, lane(0, 5)), met);
        assert_eq!(known(&mut b, 0, 3, lane(1, 5)), 0);
        let release = b.release(0, 3, Scope::Gpu);
        assert!(
            release.past.all.includes(lane(0, 5), met) && !release.past.all.includes(lane(0, 5), met + 1)
        );
        assert!(release.past.all.includes(lane(0, 3), met + 1), "its own accesses behind the meeting");
        // Half of the warp synchronises again: the other half acquires nothing.
        b.sync_warp(0, 0xffff);
        let again = b.tick(0) - 1;
        assert_eq!(known(&mut b, 0, 3, lane(0, 5)), again);
        assert_eq!(known(&mut b, 0, 20, lane(0, 5)), met);
        assert_eq!(known(&mut b, 0, 3, lane(0, 20)), met);
        assert!(b.end().all.includes(lane(0, 5), again));
    }

    #[test]
    fn behind_a_barrier_warps_include_each_other_up_to_their_arrival() {
        let mut b = block();
        b.sync_warp(0, FULL);
        let arrived = [0, 1].map(|warp| {
            b.arrive(warp, FULL, 0);
            b.tick(warp) - 1
        });
        b.complete(0);
        (0..2).for_each(|warp| b.pass(warp, FULL, 0));
        for (by, of) in [(0, 1), (1, 0), (0, 0)] {
            assert_eq!(known(&mut b, by, 9, lane(of, 4)), arrived[of as usize]);
        }
        // One of two warps passes a barrier of its own.
        b.arrive(1, FULL, 2);
        let later = b.tick(1) - 1;
        b.complete(2);
        b.pass(1, FULL, 2);
        assert_eq!(known(&mut b, 1, 9, lane(1, 4)), later);
        assert_eq!(known(&mut b, 0, 9, lane(1, 4)), arrived[1]);
    }

    #[test]
    fn a_warp_keeps_what_it_acquires_between_its_arrival_and_its_passing() {
        let mut b = block();
        let other = clock::lane(clock::warp(1, 7, 0), 0);
        b.acquire(0, FULL, &outside(3));
        (0..2).for_each(|warp| b.arrive(warp, FULL, 1));
        b.acquire(0, 1 << 4, &outside(8));
        b.complete(1);
        (0..2).for_each(|warp| b.pass(warp, FULL, 1));
        assert_eq!(known(&mut b, 0, 4, other), 8);
        assert_eq!(known(&mut b, 1, 4, other), 3);
    }

    #[test]
    fn a_fence_lends_its_order_to_stores_of_its_own_lane_alone() {
        let (mut b, grids, mut fences) = (block(), Grids::default(), FastMap::default());
        b.fence(&grids, &mut fences, 0, 1 << 2, Fence::AcqRel(Scope::Gpu));
        let fenced = b.tick(0) - 1;
        let released = |b: &BlockCheck, lane| b.fenced(0, lane, Scope::Gpu, false).map(|(last, _)| last);
        assert!(released(&b, 3).is_none());
        let release = released(&b, 2).unwrap();
        assert!(release.past.all.includes(lane(0, 2), fenced) && !release.past.all.includes(lane(0, 3), 1));
        assert_eq!(b.alike(0, FULL), FULL, "the lanes' causal pasts are still the same");
        // Behind a meeting the fence stands ahead of all lanes, until they fence themselves.
        assert!(b.fenced_ahead(0, 3).is_none());
        b.sync_warp(0, FULL);
        assert!(b.fenced_ahead(0, 3).is_some() && b.fenced_ahead(0, 4).is_some());
        b.fence(&grids, &mut fences, 0, 1 << 3, Fence::AcqRel(Scope::Gpu));
        assert!(b.fenced_ahead(0, 3).is_none() && b.fenced_ahead(0, 4).is_some());
        assert!(released(&b, 3).is_some_and(|release| release.past.all.includes(lane(0, 9), fenced)));
    }

    #[test]
    fn lanes_are_alike_while_they_include_the_same() {
        let mut b = block();
        assert_eq!(b.alike(0, FULL), FULL);
        b.acquire(0, 0xf0, &outside(3));
        assert_eq!((b.alike(0, FULL), b.alike(0, 0xff0)), (!0xf0, 0xf0));
        b.sync_warp(0, FULL);
        assert_eq!(b.alike(0, FULL), FULL);
        b.waited(0, 6, 1, true);
        assert_eq!((b.alike(0, FULL), b.alike(0, 1 << 6)), (!(1 << 6), 1 << 6));
    }

    /// A check of a read is skipped only if it would have the same outcome.
    #[test]
    fn a_poll_is_remembered_until_the_word_or_the_causal_past_changes() {
        let (mut b, grids) = (block(), Grids::default());
        let place = Place::Shared { offset: 16 };
        let poll = |b: &BlockCheck| b.poll(0, 5, (place, 2, 8), b.shared.stamps(16, 8).unwrap());
        let how = How::generic(Sem::Relaxed, Scope::Cta, 8, Update::No);
        let access = |b: &mut BlockCheck, by: Key, tick, bytes, write: bool| {
            let past = CausalPast::default();
            let (actor, lanes) =
                if write { (by, 0) } else { (by & !clock::WITHIN_WARP, 1 << ((by & 127) - 1)) };
            let record = Record { lanes, ..Record::of(actor, tick, 5, how) };
            let who = Accessor { record, own: by, published: None, view: PastView::all(&past) };
            if write {
                b.shared.write(&grids, 16, bytes, &who, |_| false, super::super::shadow::NOT_KEPT);
            } else {
                b.shared.read(&grids, 16, bytes, &who);
                b.shared.saw(&grids, 16, bytes, &who);
            }
        };
        access(&mut b, lane(1, 0), 1, 8, true);
        access(&mut b, lane(0, 1), 1, 8, false);
        let mut last = poll(&b);
        b.remember(0, last);
        access(&mut b, lane(0, 1), 1, 8, false);
        assert!(b.remembers(0, &poll(&b)), "the same read changes nothing");
        let changes: [&dyn Fn(&mut BlockCheck); 8] = [
            &|b| access(b, lane(1, 0), 1, 8, true),
            &|b| access(b, lane(1, 0), 1, 4, true),
            &|b| access(b, lane(1, 4), 1, 8, false),
            &|b| access(b, lane(0, 2), 1, 8, false),
            &|b| b.shared.renew(20, 4),
            &|b| b.acquire(0, FULL, &outside(3)),
            &|b| b.sync_warp(0, FULL),
            &|b| drop(b.release(0, 1, Scope::Gpu)),
        ];
        for (i, change) in changes.iter().enumerate() {
            change(&mut b);
            assert!(!b.remembers(0, &poll(&b)), "change {i}");
            last = poll(&b);
            b.remember(0, last);
            assert!(b.remembers(0, &poll(&b)));
        }
    }
}
