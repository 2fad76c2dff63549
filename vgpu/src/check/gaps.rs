//! The gaps of a race: the fences, scopes and barriers without which a flag does not order the two
//! accesses.
//!
//! A flag orders them by a release pattern of its writer, which covers the earlier access, and an
//! acquire pattern of its reader, behind which the later access stands. Each part of the two that
//! does not hold is a gap, with the instruction that falls short.

use super::clock::{self, Key};
use super::grids::Grids;
use super::history::{FenceSite, Fenced, Sight, Step, Strong};
use super::hooks::Place;
use super::past::CausalPast;
use super::record::Record;
use super::releases::{OWN, Release, Releases};
use super::report::{Me, actor_of, party, scope_name, thread_of};
use super::world::World;
use crate::fault::{Gap, GapKind, Party, Side};
use crate::ir::{Fence, Op, Scope};

/// The most flags that are judged.
const MOST_FLAGS: usize = 16;

/// The reader of a flag.
struct Reader {
    by: Key,
    /// The widest fence behind the read.
    fence: Option<FenceSite>,
    /// Whether the later access is ordered behind the read, or behind the fence.
    is_ahead: bool,
}

/// The narrowest scope that includes both actors.
fn needed(grids: &Grids, a: Key, b: Key) -> &'static str {
    let all = [Scope::Cta, Scope::Cluster, Scope::Gpu];
    scope_name(all.into_iter().find(|scope| grids.includes(*scope, a, b)).unwrap_or(Scope::Sys))
}

/// The place of a fence.
fn at_fence(grids: &Grids, by: Key, (pc, scope): FenceSite, me: Key) -> Party {
    party(grids, format!("fence of scope {}", scope_name(scope)), by, pc, me)
}

/// The reader of a flag: the lane of the later access itself, if its warp has read it lately.
fn reader(world: &World, me: &Me<'_>, read: &Sight) -> Reader {
    let grids = &world.grids;
    let own_lane = clock::place_of(me.own).and_then(|(_, within)| within?.1).unwrap_or(0);
    let mine = |lanes: u32| lanes >> own_lane & 1 != 0;
    if clock::block_of(read.by) == clock::block_of(me.own)
        && let Some(at) = me.recent.iter().position(|(pc, lanes)| *pc == read.pc && mine(*lanes))
        && let Some(facts) = grids.facts(me.own)
    {
        let behind = me.recent[..at].iter().filter(|(_, lanes)| mine(*lanes));
        let fences = behind.filter_map(|(pc, _)| match facts.kernel.code.get(*pc as usize)?.op {
            Op::Fence(fence) => Some((*pc, fence.acquires()?)),
            _ => None,
        });
        return Reader { by: me.own, fence: fences.max_by_key(|(_, scope)| *scope), is_ahead: true };
    }
    let behind = world.history.fences_of(read.by).filter(|fence| fence.tick >= read.tick);
    let behind = behind.filter_map(|&Fenced { pc, tick, fence, .. }| Some(((pc, fence.acquires()?), tick)));
    let widest = behind.max_by_key(|((_, scope), _)| *scope);
    let tick = widest.filter(|_| !read.sem.acquires()).map_or(read.tick, |(_, tick)| tick);
    let is_ahead = read.by == me.own || grids.includes_tick(&me.past.all, read.by, tick);
    Reader { by: read.by, fence: widest.map(|(site, _)| site), is_ahead }
}

/// A relaxed read by the lane of the later access, of a word that the flag's reader, another warp of
/// its block, has released. As an acquire it would order the later access behind the flag.
fn handed_on(world: &World, me: &Me<'_>, reader: &Reader) -> Option<Sight> {
    let here = clock::block_of(me.own);
    let own_lane = clock::place_of(me.own).and_then(|(_, within)| within?.1).unwrap_or(0);
    let warp_of = |by: Key| by & !clock::WITHIN_WARP;
    // All warps read by one instruction, of which the last read is kept.
    let is_mine =
        |read: &Sight| me.recent.iter().any(|(pc, lanes)| *pc == read.pc && lanes >> own_lane & 1 != 0);
    let of_reader = |by| warp_of(by) == warp_of(reader.by);
    let writes = |_, place| releases_at(world, me, place).map(|found| &found.writes);
    let releases = |step: &Step| step.write.is_some_and(|write| write.releases);
    let mut steps = world.history.steps_to(here, of_reader, writes);
    let found = steps.find(|step| !step.read.sem.acquires() && releases(step) && is_mine(&step.read));
    found.map(|step| step.read)
}

/// The releases of the place that a read has read.
fn releases_at<'a>(world: &'a World, me: &'a Me<'_>, place: Place) -> Option<&'a Releases> {
    match place {
        Place::Private => None,
        Place::Global { shadow, offset } => world.releases.get(shadow, offset),
        Place::Shared { offset } => me.block.releases.get(OWN, offset),
    }
}

/// The gaps of a flag. `first`: its writer is of the earlier access's block, and `last`: its reader
/// of the later one's.
fn of_flag(world: &World, me: &Me<'_>, other: &Record, step: &Step, first: bool, last: bool) -> Vec<Gap> {
    let Step { read, write: Some(write) } = step else { return vec![] };
    let (grids, theirs) = (&world.grids, actor_of(other));
    let reader = reader(world, me, read);
    let needs = needed(grids, write.by, reader.by);
    let gap = |side, kind, scope: Option<Scope>, at| Gap {
        side,
        kind,
        scope: scope.map_or("", scope_name),
        needs,
        at,
    };
    let leaves_out = |scope, by, other| !grids.includes(scope, by, other);
    let mut gaps = vec![];

    let &Strong { by, pc, sem, scope, rmw, fence, .. } = write;
    let at_write = || {
        let what = match (sem.releases(), rmw) {
            (true, _) => "release",
            (false, true) => "read-modify-write",
            (false, false) => "write",
        };
        party(grids, what.into(), by, pc, me.own)
    };
    if leaves_out(scope, by, reader.by) {
        gaps.push(gap(Side::Writer, GapKind::NarrowAccess, Some(scope), at_write()));
    }
    let found = releases_at(world, me, read.place);
    let ahead = found.and_then(Releases::ahead);
    // A copy has no fences of its own.
    let covers_theirs = |past: &CausalPast| grids.includes_tick(&past.all, theirs, other.tick);
    let ahead = ahead.filter(|(_, past)| first && !other.how.late && covers_theirs(past));
    // Whether the writer's own release covers the earlier access, where it has one.
    let covers = |release: &Release| grids.includes_tick(&release.past.all, theirs, other.tick);
    let by_writer = |release: &&Release| release.by == by || release.shared;
    let patterns = found.into_iter().flat_map(|all| all.last().iter().chain(all.before())).filter(by_writer);
    let covered = patterns.map(covers).reduce(|one, another| one || another);
    // The first fence of the earlier access's thread behind it.
    let of_theirs = || {
        let behind = world.history.fences_of(theirs).filter(|fence| fence.tick >= other.tick);
        behind.filter_map(|fence| Some((fence.pc, fence.fence.releases()?))).last()
    };
    let ahead = ahead.filter(|_| !sem.releases() && covered != Some(true)).and_then(|_| of_theirs());
    let (fenced_by, fence) = ahead.map_or((by, fence), |site| (theirs, Some(site)));
    let at_release = || match fence.filter(|_| !sem.releases()) {
        Some(site) => at_fence(grids, fenced_by, site, me.own),
        None => at_write(),
    };
    if ahead.is_some() {
        let scope = fence.map(|(_, scope)| scope);
        gaps.push(gap(Side::Writer, GapKind::FenceAheadOfBarrier, scope, at_release()));
    } else if !write.releases {
        gaps.push(gap(Side::Writer, GapKind::NoFence, None, at_write()));
    }
    if let Some((_, scope)) = fence
        && !sem.releases()
        && leaves_out(scope, fenced_by, reader.by)
    {
        gaps.push(gap(Side::Writer, GapKind::NarrowFence, Some(scope), at_release()));
    }
    // A copy is not behind its instruction, but behind its thread's wait.
    if first && covered == Some(false) && gaps.is_empty() {
        let thread = if other.how.late { thread_of(theirs) } else { Some(theirs) };
        let kind = if thread == Some(by) { GapKind::AheadOfAccess } else { GapKind::Uncovered };
        gaps.push(gap(Side::Writer, kind, None, at_release()));
    }

    let &Sight { pc, sem, scope, .. } = read;
    let at_read = || {
        let what = if sem.acquires() { "acquire" } else { "read" };
        party(grids, what.into(), reader.by, pc, me.own)
    };
    if leaves_out(scope, reader.by, by) {
        gaps.push(gap(Side::Reader, GapKind::NarrowAccess, Some(scope), at_read()));
    }
    if !sem.acquires() {
        match reader.fence {
            None => gaps.push(gap(Side::Reader, GapKind::NoFence, None, at_read())),
            Some((pc, scope)) if leaves_out(scope, reader.by, by) => {
                let at = at_fence(grids, reader.by, (pc, scope), me.own);
                gaps.push(gap(Side::Reader, GapKind::NarrowFence, Some(scope), at));
            }
            Some(_) => {}
        }
    }
    if gaps.is_empty() && last && !reader.is_ahead {
        gaps.push(match handed_on(world, me, &reader) {
            Some(read) => Gap {
                needs: scope_name(Scope::Cta),
                at: party(grids, "read".into(), me.own, read.pc, me.own),
                ..gap(Side::Reader, GapKind::NoFence, None, at_read())
            },
            None => gap(Side::Reader, GapKind::Uncovered, None, at_read()),
        });
    }
    gaps
}

/// How far a flag is from an order between the two accesses. A flag whose release does not cover
/// the earlier access is mostly meant for another access.
fn distance(gaps: Option<&[Gap]>) -> usize {
    let weight = |gap: &Gap| match gap.kind {
        GapKind::AheadOfAccess | GapKind::Uncovered => 3,
        _ => 2,
    };
    let known = gaps.filter(|gaps| !gaps.is_empty());
    known.map_or(7, |gaps| gaps.iter().map(weight).sum())
}

/// The flag that comes closest to an order between the accesses, or the chain of flags `way`, and
/// its gaps, where it can be judged.
pub(super) fn closest(
    world: &World,
    me: &Me<'_>,
    other: &Record,
    way: Vec<Step>,
    flags: impl Iterator<Item = Step>,
) -> (Vec<Step>, Option<Vec<Gap>>) {
    let (theirs, here) = (actor_of(other), clock::block_of(me.own));
    let is_same_block = clock::block_of(theirs) == here;
    let of_way = |way: &[Step]| {
        let ends_here = way.last().is_some_and(|step| clock::block_of(step.read.by) == here);
        let of = |(at, step)| of_flag(world, me, other, step, at == 0, ends_here && at + 1 == way.len());
        way.iter().enumerate().flat_map(of).collect::<Vec<_>>()
    };
    if way.len() > 1 {
        let gaps = of_way(&way);
        return (way, Some(gaps));
    }
    let mut known = vec![];
    let mut candidates: Vec<Vec<Step>> = vec![way];
    for flag in flags {
        let key = flag.write.map(|write| (flag.read.pc, flag.read.place, write.pc, write.by));
        if known.len() < MOST_FLAGS && !known.contains(&key) {
            known.push(key);
            candidates.push(vec![flag]);
        }
    }
    // In one block a flag counts only between the two threads: others have barriers.
    let judged = candidates.into_iter().filter(|way| !way.is_empty()).map(|way| {
        let step = &way[0];
        let between =
            step.write.is_some_and(|write| write.by == theirs) && reader(world, me, &step.read).by == me.own;
        let gaps = (!is_same_block || between).then(|| of_way(&way));
        (way, gaps)
    });
    // The first of equal ones, which is the latest.
    judged.min_by_key(|(_, gaps)| distance(gaps.as_deref())).unwrap_or_default()
}

/// The gaps of two strong accesses that race by their scopes.
pub(super) fn of_scopes(grids: &Grids, me: &Me<'_>, other: &Record, other_wrote: bool) -> Vec<Gap> {
    let (theirs, mine) = (actor_of(other), me.record);
    let (Some(a), Some(b)) = (mine.how.strong, other.how.strong) else { return vec![] };
    let needs = needed(grids, me.own, theirs);
    let sides = [(a, me.own, theirs, mine, me.wrote), (b, theirs, me.own, other, other_wrote)];
    let narrow = sides.into_iter().filter(|(scope, by, of, ..)| !grids.includes(*scope, *by, *of));
    let gap = |(scope, by, _, record, wrote): (Scope, Key, Key, &Record, bool)| Gap {
        side: if wrote { Side::Writer } else { Side::Reader },
        kind: GapKind::NarrowAccess,
        scope: scope_name(scope),
        needs,
        at: party(grids, super::report::manner(record.how, wrote), by, record.pc, me.own),
    };
    narrow.map(gap).collect()
}

/// The gap of a bulk copy that is ordered behind a generic access, but for its proxy.
pub(super) fn of_proxy(world: &World, me: &Me<'_>, other: &Record, place: Place) -> Vec<Gap> {
    let (grids, theirs) = (&world.grids, actor_of(other));
    let is_shared = matches!(place, Place::Shared { .. });
    let fences = || {
        let of = |by| world.history.fences_of(by).map(move |fence| (by, fence));
        of(me.own).chain(of(theirs).filter(|_| theirs != me.own))
    };
    let at = |(by, fence): (Key, &Fenced)| party(grids, "fence".into(), by, fence.pc, me.own);
    let (mut early, mut elsewhere, mut generic) = (None, None, None);
    for (by, fence) in fences() {
        let found = match fence.fence {
            Fence::Async { shared, global } if if is_shared { shared } else { global } => &mut early,
            Fence::Async { .. } => &mut elsewhere,
            Fence::MbarrierInit | Fence::Other => continue,
            _ => &mut generic,
        };
        found.get_or_insert((by, fence));
    }
    let absent = || party(grids, "copy".into(), me.own, me.record.pc, me.own);
    let (kind, at) = match (elsewhere, early, generic) {
        (Some(fence), ..) => (GapKind::OtherSpace, at(fence)),
        (_, Some(fence), _) => (GapKind::ProxyFenceAhead, at(fence)),
        (_, _, Some(fence)) => (GapKind::OtherProxy, at(fence)),
        _ => (GapKind::NoProxyFence, absent()),
    };
    vec![Gap { side: Side::Reader, kind, scope: "", needs: "", at }]
}
