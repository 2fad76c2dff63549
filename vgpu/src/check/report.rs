//! What was found, in words.

use super::clock;
use super::shadow::{Grids, How, Record, Wrong};
use super::watch::Place;
use super::{Known, World};
use crate::fault::{FaultKind, Party, Race};
use crate::ir::Scope;

/// Manner of an access, as in "weak read".
fn manner(how: How, wrote: bool) -> String {
    let what = match (how.rmw, wrote) {
        (true, _) => "read-modify-write",
        (false, true) => "write",
        (false, false) => "read",
    };
    match (how.bulk, how.strong) {
        (true, _) => format!("{what} by a bulk copy"),
        (false, None) => format!("weak {what}"),
        (false, Some(Scope::Cta)) => format!("strong {what} of scope .cta"),
        (false, Some(Scope::Gpu)) => format!("strong {what} of scope .gpu"),
        (false, Some(Scope::Sys)) => format!("strong {what} of scope .sys"),
    }
}

/// One side of a race, from what was noted of it.
fn party(grids: &Grids, record: &Record, wrote: bool) -> Party {
    let access = manner(record.how, wrote);
    let (Some(facts), Some((block, within))) = (grids.facts(record.actor), clock::place_of(record.actor))
    else {
        return Party { access, ..Party::host() };
    };
    let (ptx_line, ptx_text, source) = facts.kernel.origin(record.pc);
    let [x, y] = facts.shape.map(u64::from);
    let lane = if record.lanes != 0 { Some(record.lanes.trailing_zeros()) } else { within.and_then(|w| w.1) };
    Party {
        access,
        kernel: facts.kernel.name.clone(),
        block: [block % x, block / x % y, block / x / y].map(|v| v as u32),
        warp: within.map(|w| w.0),
        lane,
        ptx_line,
        ptx_text,
        source,
    }
}

/// What would have ordered the two.
fn missing(
    grids: &Grids,
    mine: &Record,
    own: clock::Key,
    known: &Known,
    other: &Record,
    other_wrote: bool,
) -> String {
    let wait = if other_wrote { "wait_group (without .read)" } else { "wait_group.read" };
    let theirs = if other.lanes != 0 {
        clock::lane(other.actor, other.lanes.trailing_zeros() as usize)
    } else {
        other.actor
    };
    let ordered = grids.known(&known.all, theirs, other.tick);
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
        (Some(_), Some(_)) if grids.mutual(Scope::Gpu, own, Scope::Gpu, theirs) => {
            "release and acquire of scope .gpu or wider, observed by the later one, or a kernel boundary"
        }
        (Some(_), Some(_)) => {
            "release and acquire of scope .sys, observed by the later one, or a wait of the host"
        }
        _ => "a wait of the host, or the order of a stream",
    };
    match (mine.how.bulk, other.how.bulk) {
        (_, true) => format!("the copy was not seen to complete: its mbarrier's phase, or {wait} by its own thread, and from there {}", order()),
        (true, false) if ordered => {
            "a fence.proxy.async (of both spaces, or of the space accessed) between the ordering and the bulk copy".into()
        }
        (true, false) => format!("{}, and then a fence.proxy.async", order()),
        (false, false) => match (mine.how.strong, other.how.strong) {
            (Some(a), Some(b)) if !grids.mutual(a, own, b, theirs) => {
                format!("both are strong, but a scope does not reach the other thread: .{} or wider", if grids.mutual(Scope::Gpu, own, Scope::Gpu, theirs) { "gpu" } else { "sys" })
            }
            _ => order().into(),
        },
    }
}

/// The fault for a trouble at a place that `label` names.
#[allow(clippy::too_many_arguments)] // All that a report says.
pub(crate) fn fault(
    world: &World,
    label: String,
    place: Place,
    (at, wrong): (u64, Wrong),
    mine: &Record,
    own: clock::Key,
    known: &Known,
    wrote: bool,
) -> FaultKind {
    let space = if matches!(place, Place::Shared { .. }) { "shared" } else { "global" };
    let part = match place {
        Place::Global { shadow, .. } => world.part(shadow, at),
        _ => String::new(),
    };
    match wrong {
        Wrong::Unwritten => FaultKind::Unwritten { space, label, offset: at, part, bytes: 4 },
        Wrong::Race { other, wrote: other_wrote } => FaultKind::Race(Box::new(Race {
            space,
            label,
            offset: at,
            part,
            access: manner(mine.how, wrote),
            other: party(&world.grids, &other, other_wrote),
            missing: missing(&world.grids, mine, own, known, &other, other_wrote),
        })),
    }
}

/// A race of the host, or of a copy in a stream.
pub(crate) fn host_race(world: &World, wrong: Wrong, write: bool) -> String {
    let what = if write { "write" } else { "read" };
    match wrong {
        Wrong::Unwritten => format!("the {what} finds memory that nobody wrote"),
        Wrong::Race { other, wrote } => format!(
            "a {what} by the host or a stream, not ordered behind a {}; missing: a wait of the host, the order of a stream, or a \
             release of scope .sys that the host acquires",
            party(&world.grids, &other, wrote)
        ),
    }
}
