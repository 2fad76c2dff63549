//! Findings of check mode as text.

use std::collections::HashSet;
use std::sync::Arc;

use super::block::BlockCheck;
use super::clock::{self, Key};
use super::cluster::Peers;
use super::gaps;
use super::grids::Grids;
use super::history::{Sight, Step, Strong, Wait, Writes};
use super::hooks::Place;
use super::past::CausalPast;
use super::record::{How, Record, Violation};
use super::releases::{OWN, Releases};
use super::reports::Class;
use super::world::World;
use crate::exec::cluster::offset_of;
use crate::exec::state::RecentStep;
use crate::fault::{
    Attempt, Fault, FaultKind, Gap, GapKind, Hazard, Launch, Nearby, Party, Race, Side, Trace, TraceStep,
    address_of,
};
use crate::ir::{MbarOp, Op, Scope, Sem, Space, WarpOp};
use crate::kernel::Kernel;
use crate::memory_error::Spot;
use crate::names::brief_name;
use crate::ptx::SourceLine;

/// The access that was stopped, and the causal past of its lane.
pub(crate) struct Me<'a> {
    pub(crate) record: &'a Record,
    /// The lane.
    pub(crate) own: Key,
    pub(crate) wrote: bool,
    pub(crate) past: &'a CausalPast,
    pub(crate) block: &'a BlockCheck,
    pub(crate) peers: &'a Peers<'a>,
    /// Lanes that execute the instruction together.
    pub(crate) beside: u32,
    /// The last steps of its warp, latest first.
    pub(crate) recent: &'a [RecentStep],
}

pub(super) fn scope_name(scope: Scope) -> &'static str {
    match scope {
        Scope::Cta => ".cta",
        Scope::Cluster => ".cluster",
        Scope::Gpu => ".gpu",
        Scope::Sys => ".sys",
    }
}

/// Manner of an access, as in "weak read".
pub(super) fn manner(how: How, wrote: bool) -> String {
    let what = match (how.is_rmw(), wrote) {
        (true, _) => "read-modify-write",
        (false, true) => "write",
        (false, false) => "read",
    };
    match (how.bulk, how.strong) {
        (false, None) if how.read_only => "read by ld.global.nc".into(),
        (true, _) if how.product => format!("{what} by wgmma"),
        (true, _) => format!("{what} by a bulk copy"),
        (false, None) if how.late => format!("{what} by cp.async"),
        (false, None) => format!("weak {what}"),
        (false, Some(scope)) => format!("strong {what} of scope {}", scope_name(scope)),
    }
}

/// The kinds of two accesses, the later one first. An atomic counts as a write.
pub(super) fn hazard((how, wrote): (How, bool), (other, other_wrote): (How, bool)) -> Hazard {
    Hazard::new(wrote || how.is_rmw(), other_wrote || other.is_rmw())
}

/// Describes the actor of `access` by instruction `pc`, as seen from the lane `me`.
pub(super) fn party(grids: &Grids, access: String, actor: Key, pc: u32, me: Key) -> Party {
    let (Some(facts), Some((block, within))) = (grids.facts(actor), clock::place_of(actor)) else {
        return Party { access, ..Party::host() };
    };
    let [x, y, _] = facts.grid.map(u64::from);
    let launch = match grids.facts(me) {
        Some(mine) if mine.device != facts.device => Launch::OtherDevice,
        Some(_) if clock::grid_of(me) != clock::grid_of(actor) => Launch::Other,
        _ => Launch::Same,
    };
    Party {
        access,
        kernel: facts.kernel.name.clone(),
        device: grids.number_of(facts.device),
        block: [block % x, block / x % y, block / x / y].map(|v| v as u32),
        warp: within.map(|w| w.0),
        lane: within.and_then(|w| w.1),
        launch,
        at: facts.kernel.place_of(pc),
    }
}

/// The actor of an access; of several lanes the first.
pub(super) fn actor_of(record: &Record) -> Key {
    match record.lanes {
        0 => record.actor,
        lanes => clock::lane(record.actor, lanes.trailing_zeros() as usize),
    }
}

/// Whether an access of manner `how` by the lane `own` with causal past `past` is a bulk copy that
/// is ordered behind a generic one, and lacks a proxy fence alone.
pub(crate) fn lacks_proxy_fence(
    grids: &Grids,
    how: How,
    own: Key,
    past: &CausalPast,
    other: &Record,
) -> bool {
    how.bulk && !other.how.bulk && is_ordered(grids, own, past, other)
}

/// Whether an access of a lane with causal past `past`, without its own accesses, is behind
/// another.
fn is_ordered(grids: &Grids, own: Key, past: &CausalPast, other: &Record) -> bool {
    let theirs = actor_of(other);
    theirs == own || grids.includes_tick(&past.all, theirs, other.tick)
}

/// The assumption under which a race would be none, and the edge that is missing without it.
fn assumption(world: &World, me: &Me<'_>, other: &Record, way: &[Step]) -> Option<String> {
    if me.record.how.read_only || other.how.read_only {
        let (mine, theirs) = (me.record.how, other.how);
        let is_behind = |key: Key| key == me.own || world.grids.includes_tick(&me.past.all, key, other.tick);
        // A copy needs more than the order of its issue.
        let would_do = other.actors().all(is_behind) && !mine.bulk && !theirs.bulk && !theirs.late;
        return would_do
            .then(|| format!("{READ_ONLY} (assume CoherentLoads to rely on the order that they have)"));
    }
    let theirs = actor_of(other);
    let place = clock::place_of(theirs).and_then(|(_, within)| within);
    if let Some((warp, Some(lane))) = place
        && !me.record.how.bulk
        && !other.how.bulk
        && theirs & !clock::WITHIN_WARP == me.own & !clock::WITHIN_WARP
        && other.pc != me.record.pc
        && me.block.is_in_step(warp, me.beside, lane as usize, other.tick)
    {
        return Some(
            "bar.warp.sync between the lanes (running in step orders no memory, and neither does a collective such as elect.sync; \
             assume ConvergedWarps to rely on it)"
                .into(),
        );
    }
    // A bulk copy would need a proxy fence as well.
    let first = way.first().filter(|_| !me.record.how.bulk)?;
    let releases = match first.read.place {
        Place::Private => None,
        Place::Global { shadow, offset } => world.releases.get(shadow, offset),
        Place::Shared { offset } => me.block.releases.get(OWN, offset),
    };
    let (scope, ahead) = releases?.ahead()?;
    let acquired = (0..).zip(way).all(|(at, Step { read, write })| {
        let reaches = |write: &Strong| {
            let scope = if at == 0 { write.scope.min(*scope) } else { write.scope };
            world.grids.mutual(read.scope, read.by, scope, write.by)
        };
        write.as_ref().is_some_and(reaches) && read.sem.acquires()
    });
    let fenced = world.grids.includes_tick(&ahead.all, theirs, other.tick);
    (fenced && acquired).then(|| {
        "a fence behind the barrier, by the thread that sets the flag: the fence of the earlier access stands ahead of the \
         barrier, and so makes no release of another thread's store (assume FenceBeforeBarrier to rely on it)"
            .into()
    })
}

const READ_ONLY: &str = "ld.global.nc is for memory that no thread, peer or copy writes while its kernel runs: a plain \
                         ld.global with an order of its own, or a kernel boundary between the two";

/// The synchronisation that would have ordered the two accesses.
fn missing(world: &World, me: &Me<'_>, other: &Record, other_wrote: bool) -> String {
    let grids = &world.grids;
    let Me { record: mine, own, past, .. } = *me;
    let wait = if other_wrote { "wait_group (without .read)" } else { "wait_group.read" };
    let theirs = actor_of(other);
    let ordered = is_ordered(grids, own, past, other);
    let order = || match (clock::place_of(own), clock::place_of(theirs)) {
        (Some((_, Some((w, _)))), Some((_, Some((v, _)))))
            if clock::block_of(own) == clock::block_of(theirs) =>
        {
            if w == v {
                "bar.warp.sync between the lanes"
            } else {
                "a barrier, or release and acquire of scope .cta or wider"
            }
        }
        (Some(_), Some(_)) if grids.same_cluster(own, theirs) => {
            "barrier.cluster.arrive and .wait, or release and acquire of scope .cluster or wider, observed by the later one"
        }
        (Some(_), Some(_)) if grids.mutual(Scope::Gpu, own, Scope::Gpu, theirs) => {
            "release and acquire of scope .gpu or wider, observed by the later one, or a kernel boundary"
        }
        (Some(_), Some(_)) => {
            "release and acquire of scope .sys, observed by the later one, or a wait of the host"
        }
        (Some(_), None) => {
            "an acquire of scope .sys of a word that the host releases behind it, the order of a stream, or a wait of the host"
        }
        _ => "a wait of the host, or the order of a stream",
    };
    if mine.how.read_only || other.how.read_only {
        return READ_ONLY.into();
    }
    if other.how.late && !other.how.bulk {
        let seen = "the copy was not seen to complete: cp.async.wait_group or .wait_all by its own thread, or an mbarrier's phase \
                    behind cp.async.mbarrier.arrive";
        let its_thread = clock::place_of(own) == clock::place_of(theirs)
            && clock::block_of(own) == clock::block_of(theirs);
        return if its_thread { seen.into() } else { format!("{seen}, and from there {}", order()) };
    }
    match (mine.how.bulk, other.how.bulk) {
        (_, true) if other.how.product => format!("the product was not seen to complete: wgmma.wait_group for its group by a warp of its warpgroup, and from there {}", order()),
        (_, true) if thread_of(theirs).is_some_and(|thread| world.history.is_open(thread, other.tick)) => {
            format!("the copy was not seen to complete: {NO_COMMIT}, {wait}, and from there {}", order())
        }
        (_, true) => format!("the copy was not seen to complete: its mbarrier's phase, or {wait} by its own thread, and from there {}", order()),
        (true, false) if ordered && me.wrote && !other_wrote => {
            "a fence.proxy.async between the ordering and the bulk copy, which overwrites what was read (assume \
             ReadsBeforeBulkCopies to rely on the ordering)"
                .into()
        }
        (true, false) if ordered => {
            "a fence.proxy.async (of both spaces, or of the space accessed) between the ordering and the bulk copy or wgmma".into()
        }
        (true, false) => format!("{}, and then a fence.proxy.async", order()),
        (false, false) => match (mine.how.strong, other.how.strong) {
            (Some(a), Some(b)) if !grids.mutual(a, own, b, theirs) => {
                let wide = match () {
                    () if grids.same_cluster(own, theirs) => ".cluster",
                    () if grids.mutual(Scope::Gpu, own, Scope::Gpu, theirs) => ".gpu",
                    () => ".sys",
                };
                format!("both are strong, but a scope does not reach the other thread: {wide} or wider")
            }
            _ => order().into(),
        },
    }
}

/// Releases of its thread behind a bulk copy that a report lists.
const MOST_RELEASES: usize = 2;
const RELEASE: &str = "release";
const NO_COMMIT: &str =
    "a commit_group of its thread behind the copy, without which no wait_group waits for it";
const NO_RELEASE: &str = "orders nothing: the write is no release, and no fence stands before it";
const NO_REACH: &str = "orders nothing: a scope does not reach the other thread";

/// Describes the writer of a strong write.
fn writer(grids: &Grids, &Strong { by, pc, sem, scope, rmw, .. }: &Strong, me: Key) -> Party {
    let scope = scope_name(scope);
    let manner = match (sem, rmw) {
        (Sem::Weak, _) => "weak write".to_string(),
        (Sem::Release | Sem::AcqRel, _) => format!("release of scope {scope}"),
        (_, true) => format!("relaxed read-modify-write of scope {scope}"),
        (_, false) => format!("relaxed write of scope {scope}"),
    };
    party(grids, manner, by, pc, me)
}

/// `gaps`: the gaps of this step, where they were computed.
fn read_attempt(grids: &Grids, step: &Step, me: Key, gaps: Option<&[Gap]>) -> Attempt {
    let Step { read: Sight { by, pc, sem, scope, .. }, write } = *step;
    let acquires = sem.acquires();
    let what = if acquires { "acquire" } else { "relaxed read" };
    let what = party(grids, format!("{what} of scope {}", scope_name(scope)), by, pc, me);
    let Some(write) = write else {
        return Attempt { what, of: None, verdict: "finds nothing that a strong write has left".into() };
    };
    let of = Some(writer(grids, &write, me));
    let has =
        |side, kind| gaps.is_some_and(|gaps| gaps.iter().any(|gap| (gap.side, gap.kind) == (side, kind)));
    let is_fenced = gaps.is_some() && !has(Side::Reader, GapKind::NoFence);
    let verdict = match () {
        () if !write.releases => NO_RELEASE,
        () if !grids.mutual(scope, by, write.scope, write.by) => NO_REACH,
        () if has(Side::Writer, GapKind::NarrowFence) => {
            "orders nothing: the scope of the fence before the write does not reach the reader"
        }
        () if has(Side::Reader, GapKind::NarrowFence) => {
            "orders nothing: the scope of the fence behind the read does not reach the writer"
        }
        () if !acquires && is_fenced => {
            "orders what its thread did before the write's fence, or before its release, and what this thread does behind its fence"
        }
        () if !acquires => "orders nothing, unless a fence follows: the read is no acquire",
        () if !write.sem.releases() => {
            "orders what its thread did before its fence, and what this thread does behind the read"
        }
        () => "orders what its thread did before the write, and what this thread does behind the read",
    };
    Attempt { what, of, verdict: verdict.into() }
}

/// The thread of a bulk copy in a group, or of another actor that is a lane's.
pub(super) fn thread_of(actor: Key) -> Option<Key> {
    let (_, within) = clock::place_of(actor)?;
    Some(clock::lane(actor & !clock::WITHIN_WARP, within?.1? as usize))
}

/// The instruction that has closed the bulk group of a thread's store, and the last waits of the
/// thread. `wrote`: whether the store has to arrive, and not only to be read.
/// `next`: see [`unwaited`].
fn waits_for(
    world: &World,
    (thread, group): (Key, u32),
    wrote: bool,
    next: &[(&str, u32)],
    me: Key,
) -> Vec<Attempt> {
    let at = |access, pc, verdict| Attempt {
        what: party(&world.grids, access, thread, pc, me),
        of: None,
        verdict,
    };
    let closed_by = world.history.closed_by(thread, group);
    let closed = closed_by.map(|pc| {
        at(format!("commit_group of group {group} of its thread"), pc, "closes the group of this copy".into())
    });
    let next = next.iter().map(|(what, pc)| {
        let verdict = "stands behind the copy in the code: no wait for the copy was seen between the two";
        at(format!("next {what} of its thread"), *pc, verdict.into())
    });
    let waits = world.history.waits_of(thread).map(|wait| {
        let read = if wait.landed { "" } else { ".read" };
        let verdict = match (wait.group >= group, wait.landed || !wrote) {
            (false, _) => format!("does not wait for this copy, of group {group}"),
            (true, false) => "waits for the copy to be read, not for it to arrive".into(),
            (true, true) => "waits for the copy; what its thread does behind it comes after the copy".into(),
        };
        at(format!("wait_group{read} for the first {} groups of its thread", wait.group), wait.pc, verdict)
    });
    closed.into_iter().chain(waits).chain(next).collect()
}

/// The next barrier and the next releases of a thread behind the commit of a bulk group, in the
/// order of the code. Empty where a wait for the group was seen ahead of the barrier or of the
/// first release. `wrote`: see [`waits_for`].
fn unwaited(world: &World, (thread, group): (Key, u32), wrote: bool) -> Vec<(&'static str, u32)> {
    let Some(commit) = world.history.closed_by(thread, group) else { return vec![] };
    let Some(facts) = world.grids.facts(thread) else { return vec![] };
    let releases = |op: &Op| match op {
        Op::St(access) => access.sem.releases(),
        Op::Atom(atomic) => atomic.sem.releases(),
        _ => false,
    };
    let behind = || (0..).zip(&facts.kernel.code).skip(commit as usize + 1);
    let mut known = HashSet::new();
    // The same line of a function that is called twice counts twice.
    let mut is_new = |pc: u32| known.insert((facts.kernel.lines(pc), facts.kernel.place_of(pc).callers));
    let next_barrier = behind().find(|(_, inst)| barrier(&inst.op).is_some()).map(|(pc, _)| ("barrier", pc));
    let next_releases = behind().filter(|(_, inst)| releases(&inst.op)).map(|(pc, _)| (RELEASE, pc));
    let next_releases = next_releases.filter(|(_, pc)| is_new(*pc));
    let next: Vec<_> = next_barrier.into_iter().chain(next_releases.take(MOST_RELEASES)).collect();
    // Ahead of the barrier or the first release a wait would order the copy.
    let is_ahead = |wait: &Wait| {
        let release = next.iter().find(|(what, _)| *what == RELEASE);
        next_barrier.iter().chain(release).any(|(_, pc)| wait.pc < *pc)
    };
    let is_enough = |wait: &Wait| is_ahead(wait) && commit < wait.pc && wait.is_for(group, wrote);
    if world.history.waits_of(thread).any(is_enough) { vec![] } else { next }
}

/// The same for a store whose block has ended, as lines behind a message.
pub(crate) fn waits_for_store(world: &World, thread: Key, group: u32) -> String {
    let open = if world.history.is_open(thread, group) {
        format!("\n  missing: {NO_COMMIT}")
    } else {
        String::new()
    };
    let next = unwaited(world, (thread, group), false);
    let seen = waits_for(world, (thread, group), false, &next, thread);
    seen.iter().fold(open, |text, seen| format!("{text}\n  seen: {seen}"))
}

/// The last step of the lane of the access that `pick` takes, with its name, and the order it
/// makes.
fn last_step(
    world: &World,
    me: &Me<'_>,
    pick: impl Fn(&Op) -> Option<(&'static str, &'static str)>,
) -> Option<(Party, &'static str)> {
    let (facts, (_, within)) = (world.grids.facts(me.own)?, clock::place_of(me.own)?);
    let lane = within?.1?;
    let mut of_lane = me.recent.iter().filter(|(_, lanes)| lanes >> lane & 1 != 0);
    let (pc, (what, orders)) =
        of_lane.find_map(|(pc, _)| Some((*pc, pick(&facts.kernel.code.get(*pc as usize)?.op)?)))?;
    Some((party(&world.grids, what.into(), me.own, pc, me.own), orders))
}

/// A barrier of the block or the warp.
fn barrier(op: &Op) -> Option<(&'static str, &'static str)> {
    match op {
        Op::Warp { op: WarpOp::Sync, .. } => Some(("bar.warp.sync", "orders lanes of the warp alone")),
        Op::Barrier { .. } => Some(("barrier", "orders what came before it in the threads that met")),
        _ => None,
    }
}

/// An acquire.
fn acquire(op: &Op) -> Option<(&'static str, &'static str)> {
    match op {
        Op::Ld(access) if access.sem.acquires() => (),
        Op::Atom(atomic) if atomic.sem.acquires() => (),
        _ => return None,
    }
    Some(("last acquire of its lane", "orders the generic proxy alone, unless a fence.proxy.async follows"))
}

/// A test of an mbarrier.
fn mbarrier_test(op: &Op) -> Option<(&'static str, &'static str)> {
    let Op::Mbar { op: MbarOp::TestState { .. } | MbarOp::TestParity { .. }, .. } = op else { return None };
    Some(("test of an mbarrier", "orders the copies of the phase that it has seen complete"))
}

/// A barrier, or a wait for arrivals at an mbarrier.
fn meeting(op: &Op) -> Option<(&'static str, &'static str)> {
    let arrivals = "orders what came before the arrivals of the phase that it has seen complete";
    barrier(op).or_else(|| mbarrier_test(op).map(|(what, _)| (what, arrivals)))
}

/// Most blocks of earlier kernels whose reads are searched.
const MOST_EARLIER: usize = 64;

/// The device of an actor's kernel.
fn device_of(world: &World, actor: Key) -> Option<u64> {
    world.grids.facts(actor).map(|facts| facts.device)
}

/// The blocks of a device's kernels that have read global memory, those of the latest grid first.
fn blocks_of(world: &World, device: u64) -> impl Iterator<Item = Key> {
    let device_of = |block: &Key| device_of(world, clock::warp_of_block(*block));
    world.history.blocks().filter(move |block| device_of(block) == Some(device))
}

/// The part of a report about an order between two accesses.
struct Order {
    /// The observed synchronisation, with the step at which it failed.
    attempts: Vec<Attempt>,
    gaps: Vec<Gap>,
    /// The assumption under which the race would be none.
    assumed: Option<String>,
}

/// The synchronisation between the two accesses of a race at a place.
fn order(world: &World, me: &Me<'_>, other: &Record, other_wrote: bool, place: Place) -> Order {
    let theirs = actor_of(other);
    let mut found = vec![];
    let copied_by = thread_of(theirs).filter(|_| other.how.bulk && !other.how.product);
    let next = copied_by.map(|thread| unwaited(world, (thread, other.tick), other_wrote)).unwrap_or_default();
    if let Some(thread) = copied_by {
        found.extend(waits_for(world, (thread, other.tick), other_wrote, &next, me.own));
    }
    let latest = world.history.waits_of(theirs).next();
    if let Some(wait) = latest.filter(|_| other.how.late && !other.how.bulk) {
        let verdict = match wait.group >= other.tick {
            false => format!("does not wait for this copy, number {} of its thread", other.tick),
            true => "waits for the copy; what its thread does behind it comes after the copy".into(),
        };
        let access = format!("wait for the first {} copies of its thread", wait.group);
        let what = party(&world.grids, access, theirs, wait.pc, me.own);
        found.push(Attempt { what, of: None, verdict });
    }
    let writes = |block: Key, place: Place| match place {
        Place::Private | Place::Global { .. } => world.writes(place),
        // Shared memory of other clusters is out of reach.
        Place::Shared { offset } => {
            let here = world.grids.same_cluster(clock::warp_of_block(block), me.own);
            let releases = &me.peers.at(me.block, offset).releases;
            releases.get(OWN, offset_of(offset)).filter(|_| here).map(|r| &r.writes)
        }
    };
    let of = clock::place_of(theirs).map(|_| clock::block_of(theirs));
    let here = clock::block_of(me.own);
    // Reads of earlier kernels of the device count too, because a stream orders the kernels.
    let first = clock::block_of(clock::warp(clock::grid_of(me.own), 0, 0));
    let blocks = world.grids.facts(me.own).map(|facts| blocks_of(world, facts.device));
    let earlier = blocks.into_iter().flatten().filter(|block| *block < first).take(MOST_EARLIER);
    let mut starts = std::iter::once(here).chain(earlier);
    let way = of.and_then(|of| starts.find_map(|start| world.history.way(start, of, writes)));
    let assumed = assumption(world, me, other, way.as_deref().unwrap_or_default());
    let (grids, how) = (&world.grids, me.record.how);
    let is_proxy = lacks_proxy_fence(grids, how, me.own, me.past, other);
    // A flag orders a copy only behind its thread's wait; ahead of the flag in the code, if the
    // thread sets it itself.
    let may_order = |step: &Step| {
        let ahead = |wait: &Wait| step.write.is_none_or(|w| Some(w.by) != copied_by || wait.pc < w.pc);
        let is_enough = |wait: &Wait| wait.is_for(other.tick, other_wrote);
        let mut waits = copied_by.into_iter().flat_map(|thread| world.history.waits_of(thread));
        waits.any(|wait| is_enough(wait) && ahead(wait))
    };
    let has_no_way = way.is_none();
    let is_apart = has_no_way && of.is_some() && of != Some(here);
    let needs_flag = !other.how.late || way.as_ref().and_then(|way| way.first()).is_some_and(may_order);
    let (steps, judged) = match (way, of) {
        (Some(way), Some(of)) if !is_proxy && !how.read_only && !other.how.read_only && needs_flag => {
            // The assumption holds for this way alone.
            let flags = world.history.steps_to(here, |by| clock::block_of(by) == of, writes);
            let flags = flags.filter(|flag| assumed.is_none() && (!other.how.late || may_order(flag)));
            gaps::closest(world, me, other, way, flags)
        }
        (way, _) => (way.unwrap_or_else(|| world.history.last_reads(here, of, writes)), None),
    };
    let of_step = judged.as_deref().filter(|_| steps.len() == 1);
    found.extend(steps.iter().map(|step| read_attempt(grids, step, me.own, of_step)));
    let peer = device_of(world, theirs);
    if has_no_way && peer != device_of(world, me.own) {
        found.extend(reads_of_peer(world, me.own, peer, &steps));
    }
    // Within a block a barrier orders threads, and so does one behind the read of a flag by
    // another.
    let within = of == Some(here) && theirs != me.own;
    let last = match () {
        () if how.read_only || other.how.read_only => None,
        () if other.how.bulk && !other.how.product && of == Some(here) => last_step(world, me, mbarrier_test),
        () if is_proxy => last_step(world, me, meeting),
        // Another warp of the block may have read a flag.
        () if (within || is_apart) && !other.how.late => last_step(world, me, barrier),
        () => None,
    };
    let acquired = is_proxy.then(|| last_step(world, me, acquire)).flatten();
    let is_new = |what: &Party| found.iter().all(|seen: &Attempt| seen.what.at.ptx_line != what.at.ptx_line);
    let acquired = acquired.filter(|(what, _)| is_new(what));
    let last = last.into_iter().chain(acquired);
    found.extend(last.map(|(what, orders)| Attempt { what, of: None, verdict: orders.into() }));
    if let Some(gaps) = &judged {
        found.extend(around_flag(world, me, (theirs, other), gaps));
    }
    let no_wait = copied_by.and_then(|thread| {
        // A flag of the copy's thread that its wait comes before falls short elsewhere.
        let is_flag = |step: &Step| step.write.is_some_and(|write| write.by == thread) && may_order(step);
        if judged.is_some() && steps.first().is_some_and(is_flag) {
            return None;
        }
        // Other blocks rely on a release, if there is one.
        let release = next.iter().find(|(what, _)| *what == RELEASE && of != Some(here));
        let (what, pc) = release.or(next.first())?;
        let at = party(grids, (*what).into(), thread, *pc, me.own);
        Some(Gap { side: Side::Writer, kind: GapKind::NoWait, scope: "", needs: "", at })
    });
    let scopes = gaps::of_scopes(grids, me, other, other_wrote);
    let gaps = match () {
        () if is_proxy => gaps::of_proxy(world, me, other, place),
        () if !scopes.is_empty() => scopes,
        () => judged.unwrap_or_default().into_iter().chain(no_wait).collect(),
    };
    Order { attempts: found, gaps, assumed }
}

/// Identifies the line of a read.
fn reader_line(world: &World, step: &Step) -> Option<(*const Kernel, [SourceLine; 2])> {
    let kernel = &world.grids.facts(step.read.by)?.kernel;
    Some((Arc::as_ptr(kernel), kernel.lines(step.read.pc)))
}

/// Reads of words of the host, or of another device, that the report of a race with one of its
/// accesses lists beside those of the block.
const MOST_OF_PEER: usize = 8;

/// The last reads by kernels of the device of `me` of words that the device `peer`, or the host, has
/// written last, each line once: an earlier launch may have waited for it. `known` are listed
/// already.
fn reads_of_peer(world: &World, me: Key, peer: Option<u64>, known: &[Step]) -> Vec<Attempt> {
    let is_of_peer = |by| device_of(world, by) == peer;
    let known = known.iter().filter(|step| step.write.is_some_and(|write| is_of_peer(write.by)));
    let mut known: HashSet<_> = known.map(|step| reader_line(world, step)).collect();
    let Some(facts) = world.grids.facts(me) else { return vec![] };
    let reads = blocks_of(world, facts.device).flat_map(|block| world.reads_of(block, is_of_peer));
    let new = reads.filter(|step| known.insert(reader_line(world, step))).take(MOST_OF_PEER);
    new.map(|step| {
        let mut read = read_attempt(&world.grids, &step, me, None);
        if step.is_early() {
            read.verdict += "; it came before the last write there";
        }
        read
    })
    .collect()
}

/// Reads of shared memory by the writer of a flag that a report lists.
const MOST_OF_WRITER: usize = 2;

/// Where a flag's release does not cover the earlier access, or its acquire not the later one: the
/// barriers and the strong accesses of shared memory by which the block's threads may have been
/// meant to meet.
fn around_flag(world: &World, me: &Me<'_>, (theirs, other): (Key, &Record), gaps: &[Gap]) -> Vec<Attempt> {
    let grids = &world.grids;
    let is_uncovered = |side| gaps.iter().any(|gap| gap.kind == GapKind::Uncovered && gap.side == side);
    let mut found = vec![];
    let at = |what: String, by, pc, verdict: &str| Attempt {
        what: party(grids, what, by, pc, me.own),
        of: None,
        verdict: verdict.into(),
    };
    if is_uncovered(Side::Writer) {
        for (what, pc) in meetings_around(world, theirs, other.pc) {
            let verdict = match pc < other.pc {
                true => "stands ahead of the earlier access in the code, and behind it in a loop",
                false => "stands behind the earlier access in the code",
            };
            found.push(at(format!("{what} of its thread"), theirs, pc, verdict));
        }
        let writers = gaps.iter().filter(|gap| gap.kind == GapKind::Uncovered && gap.side == Side::Writer);
        let of_warp = |read: &&Sight| {
            let place = clock::place_of(read.by).and_then(|(_, within)| within);
            writers.clone().any(|gap| place.map(|(warp, _)| warp) == gap.at.warp)
        };
        let mut known = HashSet::new();
        let reads = world.history.shared_reads(clock::block_of(theirs)).filter(of_warp);
        let reads = reads.filter(|read| known.insert(read.pc));
        for read in reads.take(MOST_OF_WRITER) {
            let (what, verdict) = match read.sem.acquires() {
                true => ("acquire", "orders what came before the release that it has read"),
                false => ("relaxed read", "orders nothing, unless a fence follows: the read is no acquire"),
            };
            let what = format!("last {what} of shared memory by the flag's writer");
            found.push(at(what, read.by, read.pc, verdict));
        }
    }
    if is_uncovered(Side::Reader)
        && let Some((what, orders)) = last_step(world, me, barrier)
    {
        found.push(Attempt { what, of: None, verdict: orders.into() });
    }
    found
}

/// The nearest barriers around an instruction of an actor, and the next strong write of shared
/// memory behind it, in the order of the code.
fn meetings_around(world: &World, actor: Key, pc: u32) -> Vec<(&'static str, u32)> {
    let Some(facts) = world.grids.facts(actor) else { return vec![] };
    let writes = |op: &Op| match op {
        Op::St(access) => access.sem != Sem::Weak && access.space == Space::Shared,
        Op::Atom(atomic) => atomic.space == Space::Shared,
        _ => false,
    };
    let code = &facts.kernel.code;
    let behind = || (0..).zip(code).skip(pc as usize + 1);
    let next_barrier = behind().find(|(_, inst)| barrier(&inst.op).is_some());
    let next_write = behind().find(|(_, inst)| writes(&inst.op));
    let last_barrier = (0..pc).rev().find(|pc| barrier(&code[*pc as usize].op).is_some());
    let found = [
        ("next barrier", next_barrier.map(|found| found.0)),
        ("last barrier", last_barrier),
        ("next strong write of shared memory", next_write.map(|found| found.0)),
    ];
    found.into_iter().filter_map(|(what, at)| Some((what, at?))).collect()
}

/// A fault that is collected, so that no grid has added its place. `check`: the block's state.
pub(crate) fn collected(
    grids: &Grids,
    kind: FaultKind,
    (own, pc): (Key, u32),
    check: Option<&BlockCheck>,
    recent: impl Iterator<Item = RecentStep>,
) -> Fault {
    let Party { kernel, device, block, warp, lane, at, .. } = party(grids, String::new(), own, pc, own);
    let warp = warp.unwrap_or_default();
    let kernel_of = grids.facts(own).map(|facts| &facts.kernel);
    let writers = |pc| check.map(|check| check.shared_writers(own, pc)).unwrap_or_default();
    let address = kernel_of.map(|kernel| address_of(kernel, pc, &kind, &writers)).unwrap_or_default();
    let steps = kernel_of.map(|kernel| TraceStep::list(kernel, recent)).unwrap_or_default();
    let traces = if steps.is_empty() { vec![] } else { vec![Trace { block, warp, steps }] };
    Fault { kernel, device, block, warp, lane, at, kind, address, traces }
}

/// The fault for a violation at a place that `label` names.
pub(crate) fn fault(
    world: &World,
    label: String,
    place: Place,
    (at, violation): (u64, Violation),
    me: &Me<'_>,
) -> FaultKind {
    let space = if matches!(place, Place::Shared { .. }) { "shared" } else { "global" };
    let part = match place {
        Place::Global { shadow, .. } => world.part(shadow, at),
        Place::Shared { .. } => {
            world.grids.facts(me.own).map(|facts| facts.kernel.shared_part(at)).unwrap_or_default()
        }
        Place::Private => String::new(),
    };
    match violation {
        Violation::Unwritten => {
            let last = last_step(world, me, |op| barrier(op).or_else(|| mbarrier_test(op)));
            let behind = last.filter(|_| space == "shared").map(|(at, _)| Box::new(at));
            let writes = near_writes(world, place, at, me.own, |_, _| true);
            let is_global = space == "global";
            let origin = || address_lines(world, me.own) + &early_lines(world, me.own, None);
            let origin = if is_global { origin() } else { String::new() };
            let near = Box::new(Nearby { writes, origin });
            FaultKind::Unwritten { space, label, offset: at, part, bytes: 4, behind, near }
        }
        Violation::Race { other, wrote: other_wrote } => {
            let grids = &world.grids;
            let Order { attempts, gaps, assumed } = order(world, me, &other, other_wrote, place);
            let class = match assumed {
                _ if lacks_proxy_fence(grids, me.record.how, me.own, me.past, &other) => Class::Proxy,
                Some(_) => Class::Model,
                None => Class::Corrupts,
            };
            let missing = assumed.unwrap_or_else(|| missing(world, me, &other, other_wrote));
            let hazard = hazard((me.record.how, me.wrote), (other.how, other_wrote));
            // Two writes to one place: one address may be wrong.
            let is_address = space == "global" && hazard == Hazard::WriteAfterWrite;
            let origin = if is_address { address_lines(world, me.own) } else { String::new() };
            // A report lists the reads of the host's words elsewhere.
            let is_of_kernel = clock::place_of(actor_of(&other)).is_some() && space == "global";
            let early =
                if is_of_kernel { early_lines(world, me.own, Some(actor_of(&other))) } else { String::new() };
            let origin = early + &origin;
            FaultKind::Race(Box::new(Race {
                space,
                label,
                offset: at,
                part,
                access: manner(me.record.how, me.wrote),
                other: party(grids, manner(other.how, other_wrote), actor_of(&other), other.pc, me.own),
                hazard,
                missing,
                attempts,
                gaps,
                origin,
                class,
            }))
        }
    }
}

/// The kernels' writes of the nearest words before and after one of global memory, of those that
/// `is_meant` takes.
fn near_writes(
    world: &World,
    place: Place,
    at: u64,
    me: Key,
    is_meant: impl Fn(u64, &Record) -> bool,
) -> Vec<Party> {
    let Place::Global { shadow, .. } = place else { return vec![] };
    let Some(memory) = world.shadows.get(shadow as usize) else { return vec![] };
    let near = memory.written_near(at, is_meant).into_iter().flatten();
    near.map(|(there, write)| {
        let side = if there < at { "before" } else { "after" };
        let part = world.part(shadow, there);
        let part = if part.is_empty() { part } else { format!(", {part},") };
        let access = format!("{} {} bytes {side} it{part}", manner(write.how, true), there.abs_diff(at));
        party(&world.grids, access, actor_of(&write), write.pc, me)
    })
    .collect()
}

/// Writes of the nearest words of the same array by later launches of the same device. One may have
/// been meant for this word. Without names of its parts, memory has no arrays.
fn later_writes(world: &World, shadow: u32, offset: u64, write: &Record) -> Vec<Party> {
    let array = |at: u64| {
        let part = world.part(shadow, at);
        part.split_once('[').map(|(array, _)| array.to_owned())
    };
    let Some(own) = array(offset) else { return vec![] };
    let by = actor_of(write);
    let is_later = |at, other: &Record| {
        let other = actor_of(other);
        clock::grid_of(other) > clock::grid_of(by)
            && device_of(world, other) == device_of(world, by)
            && array(at).as_ref() == Some(&own)
    };
    near_writes(world, Place::Global { shadow, offset }, offset, by, is_later)
}

/// A place in memory as reports name it, by the label that its first device has given.
fn spot(world: &World, shadow: u32, offset: u64) -> String {
    let label = world.origin_of(shadow).map_or_else(|| "memory".into(), |(_, label)| label);
    Spot { label: &label, offset, part: &world.part(shadow, offset) }.to_string()
}

/// The kernel and line of an access.
fn line_of(world: &World, actor: Key, pc: u32) -> String {
    let Some(facts) = world.grids.facts(actor) else { return "no kernel".into() };
    format!("kernel '{}' at {}", brief_name(&facts.kernel.name), facts.kernel.place_of(pc).line())
}

/// Identifies an instruction of a kernel.
fn instruction(world: &World, actor: Key, pc: u32) -> Option<(*const Kernel, u32)> {
    Some((Arc::as_ptr(&world.grids.facts(actor)?.kernel), pc))
}

/// Reads that a report of a wrong value lists at the most.
const MOST_SOURCES: usize = 8;
/// Reads that such a report lists of the kernels that wrote what was read, and of each of them.
const MOST_BEHIND: [usize; 2] = [8, 6];
/// Reads that a report of a race, or of a read of unwritten memory, lists at the most.
const MOST_OF_ADDRESS: usize = 6;

/// A read of global memory, and the last write by a kernel there.
struct Source {
    shadow: u32,
    at: u64,
    read: Record,
    write: Option<Record>,
}

/// The global memory that the block of an actor has read. The reads of the actor's warp come first,
/// the latest first of all.
fn sources(world: &World, by: Key) -> Vec<Source> {
    let (block, warp) = (clock::block_of(by), by & !clock::WITHIN_WARP);
    let is_of_warp = |read: &Record| read.actor & !clock::WITHIN_WARP == warp;
    sources_of(world, |actor| clock::block_of(actor) == block, is_of_warp)
}

/// The global memory that the actors which `is_meant` takes have read, the latest reads that
/// `is_first` takes in front. Reads of an array by one file's lines of a kernel occur once for each
/// file that has written there, and so do reads of memory without names by one line.
fn sources_of(
    world: &World,
    is_meant: impl Fn(Key) -> bool,
    is_first: impl Fn(&Record) -> bool,
) -> Vec<Source> {
    let mut all = vec![];
    for (shadow, memory) in (0..).zip(&world.shadows) {
        let found = memory.last_reads(|read| is_meant(read.actor));
        all.extend(found.into_iter().map(|(at, read, write)| Source { shadow, at, read, write }));
    }
    all.sort_by_key(|source| (!is_first(&source.read), std::cmp::Reverse(source.read.tick)));
    let line = |record: &Record, has_name: bool| {
        let facts = world.grids.facts(record.actor)?;
        let own = facts.kernel.lines(record.pc)[0];
        Some((Arc::as_ptr(&facts.kernel), own.file, if has_name { 0 } else { own.line }))
    };
    let mut known = HashSet::new();
    all.retain(|Source { shadow, at, read, write }| {
        let part = world.part(*shadow, *at);
        let array = part.split(['[', ' ']).next().unwrap_or_default().to_owned();
        let has_name = !array.is_empty();
        let write = write.as_ref().map(|write| line(write, has_name));
        known.insert((*shadow, array, line(read, has_name), write))
    });
    all
}

/// The kernel and line of the last write of a source.
fn last_writer(world: &World, write: Option<&Record>) -> String {
    write.map_or_else(|| "no kernel".into(), |write| line_of(world, actor_of(write), write.pc))
}

/// Lines about memory that `whose` threads have read.
fn source_lines(world: &World, whose: &str, sources: &[Source]) -> String {
    let mut text = String::new();
    for Source { shadow, at, read, write } in sources {
        let reader = line_of(world, read.actor, read.pc);
        text += &format!("\n  {whose} has read {} in {reader}", spot(world, *shadow, *at));
        text += &format!("\n    last written by {}", last_writer(world, write.as_ref()));
    }
    text
}

/// Lines of the code that a report of a wrong value lists for each kind of access of shared memory.
const MOST_SHARED: usize = 4;

/// A line about the accesses of shared memory ahead of an instruction in the code, those of the
/// same call first, the nearest line first: a value may come through there. Within a call the order
/// of lines is used, because compilers put the blocks of a function in any order. Empty without any.
fn shared_line(world: &World, actor: Key, pc: u32) -> String {
    let Some(facts) = world.grids.facts(actor) else { return String::new() };
    let writes = |op: &Op| match op {
        Op::St(access) => access.space == Space::Shared,
        Op::Atom(atomic) => atomic.space == Space::Shared,
        _ => false,
    };
    let reads = |op: &Op| matches!(op, Op::Ld(access) if access.space == Space::Shared);
    let of = |what: &str, is_meant: &dyn Fn(&Op) -> bool| {
        let kernel = &facts.kernel;
        let own = kernel.lines(pc)[0];
        let line = |at: &u32| kernel.lines(*at)[0];
        let all = (0..kernel.code.len() as u32).filter(|at| is_meant(&kernel.code[*at as usize].op));
        let (mut near, far): (Vec<_>, Vec<_>) = all.partition(|at| kernel.are_of_one_call(*at, pc));
        near.retain(|at| line(at).file == own.file && (line(at).line, *at) < (own.line, pc));
        near.sort_by_key(|at| std::cmp::Reverse(line(at).line));
        let far = far.into_iter().rev().filter(|at| *at < pc);
        let mut known = HashSet::new();
        let ahead = near.into_iter().chain(far).filter(|at| known.insert(line(at))).take(MOST_SHARED);
        let places: Vec<_> = ahead.map(|pc| facts.kernel.place_of(pc).line()).collect();
        let last = format!("\n  ahead of it in the code, shared memory is {what} at {}", places.join(", "));
        if places.is_empty() { String::new() } else { last }
    };
    of("written", &writes) + &of("read", &reads)
}

/// Lines about what the kernels that wrote the sources of a value have read.
fn lines_behind(world: &World, sources: &[Source]) -> String {
    let mut text = String::new();
    let kernel_of = |actor: Key| world.grids.facts(actor).map(|facts| Arc::as_ptr(&facts.kernel));
    let mut known: HashSet<_> = sources.iter().map(|source| kernel_of(source.read.actor)).collect();
    let writers = sources.iter().filter_map(|source| source.write.as_ref().map(actor_of));
    let writers = writers.filter(|by| known.insert(kernel_of(*by))).collect::<Vec<_>>();
    let behind = writers.into_iter().flat_map(|by| self::sources(world, by).into_iter().take(MOST_BEHIND[1]));
    for Source { shadow, at, read, write } in behind.take(MOST_BEHIND[0]) {
        let (reader, spot) = (line_of(world, read.actor, read.pc), spot(world, shadow, at));
        let writer = last_writer(world, write.as_ref());
        text += &format!("\n  before that {spot} was read in {reader}\n    last written by {writer}");
    }
    text
}

/// Lines about the memory that the block of an actor has read and another launch has written: an
/// address of its may come from there.
fn address_lines(world: &World, by: Key) -> String {
    let is_of_other = |write: &Record| clock::grid_of(actor_of(write)) != clock::grid_of(by);
    let of_others = |source: &Source| source.write.as_ref().is_some_and(is_of_other);
    let sources: Vec<_> = sources(world, by).into_iter().filter(of_others).take(MOST_OF_ADDRESS).collect();
    source_lines(world, "its block", &sources)
}

/// Reads before a write that a report lists at the most.
const MOST_EARLY: usize = 4;

/// Lines about strong reads of global memory by kernels of a device that came before another
/// block's write there, and have not been repeated since: a wait may have ended too early. Reads by
/// the block of `me` come first. With the actor `other` of another launch, the writes are its
/// launch's. Without any of these, the reads are those of the launch of `me`: later operations
/// write anew what earlier launches have read.
fn early_lines_of(world: &World, device: u64, me: Option<Key>, other: Option<Key>) -> String {
    let here = me.map(clock::block_of);
    let others = blocks_of(world, device).filter(|block| Some(*block) != here);
    let early_by = |block| {
        let is_other = move |by| clock::place_of(by).is_none() || clock::block_of(by) != block;
        world.reads_of(block, is_other).filter(Step::is_early)
    };
    let mut early: Vec<_> = here.into_iter().chain(others).flat_map(early_by).collect();
    let launch = |by: Key| clock::place_of(by).map(|_| clock::grid_of(by));
    let mine = me.and_then(launch);
    let other = other.and_then(launch).filter(|grid| mine != Some(*grid));
    let is_for_other =
        |step: &Step| other.is_some() && step.write.and_then(|write| launch(write.by)) == other;
    if early.iter().any(is_for_other) {
        early.retain(is_for_other);
    } else {
        early.retain(|step| launch(step.read.by) == mine);
    }
    let mut known = HashSet::new();
    early.retain(|step| known.insert(reader_line(world, step)));
    let mut text = String::new();
    for Step { read, write } in early.into_iter().take(MOST_EARLY) {
        let (Place::Global { shadow, offset }, Some(write)) = (read.place, write) else { continue };
        let reader = line_of(world, read.by, read.pc);
        let writer = match launch(write.by) {
            Some(_) => format!("in {}", line_of(world, write.by, write.pc)),
            None => "by the host".into(),
        };
        text += &format!(
            "\n  the last read of {} in {reader}\n    came before its write {writer}: a wait may have ended too early",
            spot(world, shadow, offset)
        );
    }
    text
}

/// The same lines for the device of an actor, and its block.
fn early_lines(world: &World, by: Key, other: Option<Key>) -> String {
    let Some(facts) = world.grids.facts(by) else { return String::new() };
    early_lines_of(world, facts.device, Some(by), other)
}

/// The last write of a byte by a kernel, later launches' writes beside it, and the global memory
/// that its block has read, with the last writes there. The reads of the writer's warp come first,
/// the latest first of all. If no kernel has written the byte last, returns the same for the writes
/// of the nearest words, because a missing add leaves no write. Behind these, the reads of the
/// kernels that wrote what was read. `None` without any.
pub(crate) fn origin(world: &World, shadow: u32, offset: u64) -> Option<String> {
    let memory = world.shadows.get(shadow as usize)?;
    let (text, by) = match memory.last_write(offset) {
        Some(write) => {
            let by = actor_of(&write);
            let party = party(&world.grids, manner(write.how, true), by, write.pc, by);
            let later = later_writes(world, shadow, offset, &write);
            let later = later.iter().map(|write| format!("\n  beside it, by a later launch: {write}"));
            let later = later.collect::<String>();
            (format!("last written by a {party}{later}{}", shared_line(world, by, write.pc)), by)
        }
        None => {
            let any = |_, _: &Record| true;
            let (_, write) = memory.written_near(offset, any).into_iter().flatten().next()?;
            let near = near_writes(world, Place::Global { shadow, offset }, offset, actor_of(&write), any);
            let beside = near.iter().map(|write| format!("\n  beside it: {write}")).collect::<String>();
            (format!("last written by no kernel{beside}"), actor_of(&write))
        }
    };
    let sources: Vec<_> = sources(world, by).into_iter().take(MOST_SOURCES).collect();
    let text = text + &source_lines(world, "its block", &sources) + &lines_behind(world, &sources);
    Some(text + &early_lines(world, by, None))
}

/// The strong reads that have found the same value most often in a row, each instruction once, with
/// the last writes there: waits that have expired are among them. Behind them the latest atomics,
/// each instruction once: the last part of a count often publishes what is awaited.
pub(crate) fn longest_waits(world: &World, most: usize) -> String {
    let mut known = vec![];
    let mut text = String::new();
    for sight in world.history.repeated() {
        let Place::Global { shadow, offset } = sight.place else { continue };
        if known.len() == most {
            break;
        }
        let instruction = instruction(world, sight.by, sight.pc);
        if known.contains(&instruction) {
            continue;
        }
        known.push(instruction);
        let access = format!("{} times the same value: a read", sight.repeats);
        let read = party(&world.grids, access, sight.by, sight.pc, sight.by);
        text += &format!("\n  {read}\n   of {}", spot(world, shadow, offset));
        let write = world.writes(sight.place).and_then(Writes::last);
        text += &match write {
            Some(write) => format!("\n   last written by a {}", writer(&world.grids, write, sight.by)),
            None => "\n   which no kernel has written by a strong write".into(),
        };
    }
    let last_of = |(shadow, offset, of): (u32, u64, &Releases)| Some((shadow, offset, *of.writes.last()?));
    let mut atomics: Vec<_> = world.releases.all().filter_map(last_of).filter(|last| last.2.rmw).collect();
    atomics.sort_unstable_by_key(|(.., last)| std::cmp::Reverse(last.at));
    let mut counted = vec![];
    for (shadow, offset, last) in atomics {
        let instruction = instruction(world, last.by, last.pc);
        if counted.len() == 2 * most {
            break;
        }
        if counted.contains(&instruction) {
            continue;
        }
        counted.push(instruction);
        let (line, spot) = (line_of(world, last.by, last.pc), spot(world, shadow, offset));
        text += &format!("\n  one of the latest atomics, which may count parts: {line}\n   of {spot}");
    }
    text
}

/// A race of the host, or of a copy in a stream of a device.
pub(crate) fn host_race(world: &World, device: u64, violation: Violation, write: bool) -> String {
    let what = if write { "write" } else { "read" };
    match violation {
        Violation::Unwritten => format!("the {what} finds unwritten memory"),
        Violation::Race { other: earlier, wrote } => {
            let by = actor_of(&earlier);
            let other = party(&world.grids, manner(earlier.how, wrote), by, earlier.pc, 0);
            let seen = flags_of(world, device, clock::block_of(by));
            let seen: String = seen.iter().map(|seen| format!("\n  seen: {seen}")).collect();
            let early = early_lines_of(world, device, None, Some(by));
            let seen = seen + &early + &reads_of_grid(world, device, by);
            format!(
                "a {what} by the host or a stream, not ordered behind a {other}\n  missing: a wait of the host, the order of a stream, \
                 or a release of scope .sys that the host acquires{}{seen}",
                host_attempt(world, &earlier).unwrap_or_default()
            )
        }
    }
}

/// The flags by which a kernel of a device has read what the block `of` of another device
/// published. A kernel that acquires them orders what the block did ahead of what its stream does
/// next.
fn flags_of(world: &World, device: u64, of: Key) -> Vec<Attempt> {
    if device_of(world, clock::warp_of_block(of)).is_none_or(|other| other == device) {
        return vec![];
    }
    let way = blocks_of(world, device)
        .take(MOST_EARLIER)
        .find_map(|block| world.history.way(block, of, |_, place| world.writes(place)));
    let way = way.unwrap_or_default();
    way.iter().map(|step| read_attempt(&world.grids, step, 0, None)).collect()
}

/// Lines about what kernels of a device have read of the grid of an actor of another device: any of
/// its blocks may publish what the actor wrote.
fn reads_of_grid(world: &World, device: u64, of: Key) -> String {
    if device_of(world, of).is_none_or(|other| other == device) {
        return String::new();
    }
    let is_of_grid = |write: &Record| clock::grid_of(actor_of(write)) == clock::grid_of(of);
    let reads = sources_of(world, |actor| device_of(world, actor) == Some(device), |_| true);
    let reads = reads.into_iter().filter(|source| source.write.as_ref().is_some_and(is_of_grid));
    source_lines(world, "its device", &reads.take(MOST_OF_ADDRESS).collect::<Vec<_>>())
}

/// A word that the host has loaded and that may have been meant to release the access `earlier` to
/// it: one of the block of that access, or the last word of all if its write releases nothing to
/// the host.
fn host_attempt(world: &World, earlier: &Record) -> Option<String> {
    let by = actor_of(earlier);
    clock::place_of(by)?;
    let judged = |(age, (shadow, at, read)): (usize, &(u32, u64, Option<u64>))| {
        let write = world.writes(Place::Global { shadow: *shadow, offset: *at })?.last()?;
        let is_of_block = clock::block_of(write.by) == clock::block_of(by);
        let is_judged = *read == Some(write.at) && !earlier.how.late && is_of_block;
        let mut gap = String::new();
        let verdict = match () {
            () if age > 0 && !is_of_block => return None,
            () if !write.releases => NO_RELEASE,
            () if write.scope != Scope::Sys => NO_REACH,
            () if !is_judged => return None,
            // Behind a fence the write releases what came before the fence.
            () if write.by == by && !write.sem.releases() => return None,
            () if write.by == by => "releases what its thread did before it: the access came later",
            () => {
                let at = party(&world.grids, RELEASE.into(), write.by, write.pc, 0);
                let missing = Gap { side: Side::Writer, kind: GapKind::Uncovered, scope: "", needs: "", at };
                gap = format!("\n  gap: {missing}");
                "releases what its thread did before it: a barrier between the two threads is missing"
            }
        };
        let of = writer(&world.grids, write, 0);
        let word = if age == 0 {
            "the word that the host has loaded last"
        } else {
            "a word that the host has loaded"
        };
        Some(format!("{gap}\n  seen: {word} was written by a {of}\n   {verdict}"))
    };
    world.hosts.get(&world.host_id())?.loaded.iter().enumerate().find_map(judged)
}
