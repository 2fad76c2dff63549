//! The shadow against a plain model: for each byte, its last writes and every read since, and for
//! each warp a clock with an entry for each thread.

use super::clock::{self, Key, VectorClock};
use super::grids::Grids;
use super::past::{CausalPast, PastView};
use super::record::{Accessor, How, ROW_LANES, Record, Row, Update, Violation, ViolationAt};
use super::shadow::{NOT_KEPT, Shadow};
use crate::exec::lanes::lanes;
use crate::ir::{Scope, Sem};
use crate::seeds::{Rng, for_each_seed};

/// Two pages, of which the accesses touch the end of the first and the begin of the second.
const START: u64 = 4096 - 256;
const BYTES: u64 = 512;
const WARPS: usize = 3;
/// Lanes of all warps, and as many bulk copies, one of each lane.
const THREADS: usize = 2 * 32 * WARPS;

/// A warp, a lane of it, and whether the thread is the lane's bulk copies.
fn thread(warp: usize, lane: usize, bulk: bool) -> usize {
    (usize::from(bulk) * WARPS + warp) * 32 + lane
}

fn key(thread: usize) -> Key {
    let (warp, lane) = (clock::warp(1, 0, (thread / 32 % WARPS) as u32), thread % 32);
    if thread < 32 * WARPS { clock::lane(warp, lane) } else { clock::store_writes(warp, lane) }
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Event {
    thread: usize,
    tick: u32,
    pc: u32,
    strong: bool,
}

#[derive(Clone, Default)]
struct Byte {
    written: bool,
    write: Option<Event>,
    reads: Vec<Event>,
    /// Strong reads of the last write by threads that nothing had ordered behind it.
    seen: Vec<Event>,
    /// Writes before the last one that it is not ordered behind, and the strong reads of them.
    earlier: Vec<(Event, Vec<Event>)>,
}

/// The first byte with a violation: of a race, whether it is with a write, and the accesses that it
/// may be with.
type Verdict = Option<(u64, Option<(bool, Vec<Event>)>)>;

/// Each thread's last tick that is included.
type Dense = [u32; THREADS];

struct Model {
    bytes: Vec<Byte>,
    past: [Dense; WARPS],
    /// The past that bulk copies may rely on.
    published: [Dense; WARPS],
}

impl Model {
    /// Whether an access of `me`, of this warp, comes after `other`.
    fn after(&self, warp: usize, me: usize, other: &Event) -> bool {
        let bulk = |thread| thread >= 32 * WARPS;
        if bulk(other.thread) {
            return self.past[warp][other.thread] >= other.tick;
        }
        let clock = if bulk(me) { &self.published } else { &self.past };
        other.thread == me || clock[warp][other.thread] >= other.tick
    }

    fn access(
        &mut self,
        warp: usize,
        me: Event,
        at: u64,
        bytes: u64,
        write: Option<&dyn Fn(u64) -> bool>,
    ) -> Verdict {
        let mut found = None;
        for at in at..at + bytes {
            let byte = &self.bytes[(at - START) as usize];
            let races = |other: &&Event| !(self.after(warp, me.thread, other) || me.strong && other.strong);
            let unordered = |(write, seen): &(Event, Vec<Event>)| {
                let observed = |s: &Event| s.thread == me.thread || self.after(warp, me.thread, s);
                !self.after(warp, me.thread, write) && !seen.iter().any(observed)
            };
            let earlier = byte.earlier.iter().filter(|write| unordered(write)).cloned();
            let last = byte.write.map(|write| (write, byte.seen.clone())).filter(unordered);
            let unordered_writes: Vec<_> = earlier.chain(last).collect();
            let raced: Vec<_> =
                unordered_writes.iter().map(|(write, _)| *write).filter(|w| races(&w)).collect();
            let mut race = (!raced.is_empty()).then_some((true, raced));
            match write {
                None if !byte.written => {
                    found = found.or(Some((at, None)));
                    continue;
                }
                None => {
                    let of = &mut self.bytes[(at - START) as usize];
                    of.reads.push(me);
                }
                Some(unchanged) => {
                    race = race.filter(|_| !unchanged(at & !3));
                    let reads: Vec<_> = byte.reads.iter().filter(races).copied().collect();
                    race = race.or((!reads.is_empty()).then_some((false, reads)));
                    let earlier = if race.is_some() { vec![] } else { unordered_writes };
                    let fresh = Byte { written: true, write: Some(me), earlier, ..Byte::default() };
                    self.bytes[(at - START) as usize] = fresh;
                }
            }
            if race.is_some() {
                found = found.or(Some((at, race)));
            }
        }
        found
    }

    /// A strong read has returned the last write.
    fn saw(&mut self, warp: usize, me: Event, at: u64, bytes: u64) {
        for at in at..at + bytes {
            let write = self.bytes[(at - START) as usize].write;
            if write.is_some_and(|w| w.strong && !self.after(warp, me.thread, &w)) {
                self.bytes[(at - START) as usize].seen.push(me);
            }
        }
    }
}

/// The same verdict, and one of the accesses that the model lets the violation name.
fn assert_same(want: &Verdict, got: Option<ViolationAt>, what: &str) {
    match (want, got) {
        (None, None) => {}
        (Some((at, None)), Some((found, Violation::Unwritten))) => assert_eq!(*at, found, "{what}"),
        (Some((at, Some((wrote, others)))), Some((found, Violation::Race { other, wrote: found_wrote }))) => {
            assert_eq!((*at, *wrote), (found, found_wrote), "{what}");
            let named = |e: &Event| {
                other.actors().any(|actor| actor == key(e.thread)) && (e.tick, e.pc) == (other.tick, other.pc)
            };
            assert!(others.iter().any(named), "{what}: {other:?} is none of {others:?}");
        }
        (want, got) => panic!("{what}: {got:?} instead of {want:?}"),
    }
}

#[test]
fn violations_are_those_of_a_model_in_even_runs() {
    for_each_seed(200, |seed| equals_a_model(2 * seed));
}

#[test]
fn violations_are_those_of_a_model_in_odd_runs() {
    for_each_seed(200, |seed| equals_a_model(2 * seed + 1));
}

/// Compares the violations of a random run with those of a model that has every byte and every
/// thread. Strong accesses are all of 4 bytes, and their runs have no reads by bulk copies: a strong
/// read stands for earlier weak reads of its thread, which a strong write may race with alone.
fn equals_a_model(run: u64) {
    let mut rng = Rng::new(run);
    let strong = run % 4 == 3;
    let grids = Grids::default();
    let filled = rng.below(2) == 0;
    let mut shadow = Shadow::new(false, filled);
    // Finds the same, although it notes reads later.
    let mut deferring = Shadow::deferring(filled);
    let mut model = Model {
        bytes: vec![Byte { written: filled, ..Byte::default() }; BYTES as usize],
        past: [[0; THREADS]; WARPS],
        published: [[0; THREADS]; WARPS],
    };
    let mut pasts: [CausalPast; WARPS] = Default::default();
    let mut published: [VectorClock; WARPS] = Default::default();
    let (mut ticks, mut groups) = ([1; WARPS], [0u32; THREADS]);
    for step in 0..300 {
        let warp = rng.below(WARPS as u64) as usize;
        let warp_key = clock::warp(1, 0, warp as u32);
        let what = format!("step {step}");
        match rng.below(10) {
            // A release of all lanes or of one, which a warp acquires, perhaps the same.
            0 | 1 => {
                let (to, one) = (rng.below(WARPS as u64) as usize, rng.below(3) == 0);
                let past = pasts[warp].clone();
                pasts[to].join(&past);
                let from = model.past[warp];
                model.past[to].iter_mut().zip(from).for_each(|(to, from)| *to = from.max(*to));
                let lane = rng.below(32) as usize;
                let of = if one { clock::lane(warp_key, lane) } else { warp_key };
                pasts[to].all.raise(of, ticks[warp]);
                let all = if one { lane..lane + 1 } else { 0..32 };
                all.for_each(|lane| model.past[to][thread(warp, lane, false)] = ticks[warp]);
                ticks[warp] += 1;
            }
            // A barrier of the warp, and a proxy fence by all lanes.
            2 => {
                pasts[warp].all.raise(warp_key, ticks[warp]);
                (0..32).for_each(|l| model.past[warp][thread(warp, l, false)] = ticks[warp]);
                published[warp] = pasts[warp].all.clone();
                model.published[warp] = model.past[warp];
                ticks[warp] += 1;
            }
            // A bulk copy. Its warp may wait for a write at once. It waits for no read, since
            // an access before the copy would get a proxy fence on its way through the copy.
            3 => {
                let lane = rng.below(32) as usize;
                let t = thread(warp, lane, true);
                groups[t] += 1;
                let bytes = 16 * (1 + rng.below(16));
                let at = START + 16 * rng.below((BYTES - bytes) / 16 + 1);
                let me = Event { thread: t, tick: groups[t], pc: step, strong: false };
                let record = Record::of(key(t), me.tick, step, How::BULK);
                let view = PastView::all(&pasts[warp]);
                let who = Accessor { record, own: 0, view, published: Some(&published[warp]) };
                let never = |_: u64| false;
                let write = strong || rng.below(2) == 0;
                let (want, [got, later]) = if write {
                    let shadows = [&mut shadow, &mut deferring];
                    let got = shadows.map(|s| s.write(&grids, at, bytes, &who, never, NOT_KEPT).1);
                    (model.access(warp, me, at, bytes, Some(&never)), got)
                } else {
                    let got = [&mut shadow, &mut deferring].map(|s| s.read(&grids, at, bytes, &who));
                    (model.access(warp, me, at, bytes, None), got)
                };
                assert_eq!(later.all, got.all, "{what}");
                assert_same(&want, got.first(), &what);
                if write && rng.below(2) == 0 {
                    pasts[warp].all.raise(key(t), me.tick);
                    model.past[warp][t] = me.tick;
                }
            }
            // A row of lanes, several lanes at one place, or one lane.
            shape => {
                let write = rng.below(2) == 0;
                let first = rng.below(32) as usize;
                let row = shape < 7;
                let size = if strong { 4 } else { 1 << (rng.below(3) + if row { 2 } else { 0 }) };
                let most = (32 - first as u64).min(BYTES / size);
                let mask = match shape {
                    _ if row => (u32::MAX >> (32 - (1 + rng.below(most)))) << first,
                    7 if !write => rng.next() as u32 | 1 << first,
                    _ => 1 << first,
                };
                let (first, count) = (mask.trailing_zeros() as usize, u64::from(mask.count_ones()));
                let bytes = if row { size * count } else { size };
                let at = START + size * rng.below((BYTES - bytes) / size + 1);
                // A row may read parts of words, and not what lies between.
                let apart = row && !write && !strong && count > 1 && rng.below(3) == 0;
                let width = if apart { 1 + rng.below(2) } else { size };
                let at = at + width * rng.below(size / width);
                let sem = if strong { Sem::Relaxed } else { Sem::Weak };
                let how = How::generic(sem, Scope::Sys, size as u8, Update::No);
                let record = Record::of(warp_key, ticks[warp], step, how);
                let lone = clock::lane(warp_key, first);
                let (record, own) = match (count, write) {
                    (1, true) => (Record { actor: lone, ..record }, lone),
                    (1, false) => (Record { lanes: mask, ..record }, lone),
                    _ if row => {
                        (Record { lanes: ROW_LANES, row: Row::new(at, size, first), ..record }, warp_key)
                    }
                    _ => (Record { lanes: mask, ..record }, warp_key),
                };
                let who = Accessor { record, own, view: PastView::all(&pasts[warp]), published: None };
                let salt = rng.below(3);
                let unchanged = |word: u64| word / 4 % 3 == salt;
                let [got, later] = [&mut shadow, &mut deferring].map(|shadow| {
                    if write {
                        return shadow.write(&grids, at, bytes, &who, unchanged, NOT_KEPT).1;
                    }
                    let got = match apart {
                        true => {
                            let bytes = size * (count - 1) + width;
                            shadow.read_apart(&grids, (at, size, width), bytes, &who)
                        }
                        false => shadow.read(&grids, at, bytes, &who),
                    };
                    if strong && got.may_observe {
                        shadow.saw(&grids, at, bytes, &who);
                    }
                    got
                });
                assert_eq!(later.all, got.all, "{what}");
                let mut got = got.all.into_iter().peekable();
                for (i, lane) in (0..).zip(lanes(mask)) {
                    let at = if row { at + i * size } else { at };
                    let me = Event { thread: thread(warp, lane, false), tick: ticks[warp], pc: step, strong };
                    let unchanged: &dyn Fn(u64) -> bool = &unchanged;
                    let want = model.access(warp, me, at, width, write.then_some(unchanged));
                    if strong && !write {
                        model.saw(warp, me, at, size);
                    }
                    let found = got.next_if(|(found, _)| count == 1 || *found == lane);
                    assert_same(&want, found.map(|(_, found)| found), &format!("{what}, lane {lane}"));
                }
            }
        }
    }
}

/// If a row of lanes is found settled, no lane may read an older value of its element.
#[test]
fn settled_rows_have_no_older_values() {
    let grids = Grids::default();
    let mut found = [0; 2];
    for_each_seed(100, |seed| {
        let mut rng = Rng::new(seed);
        let mut shadow = Shadow::new(false, true);
        let mut pasts: [CausalPast; WARPS] = Default::default();
        let mut ticks = [1; WARPS];
        for step in 0..200 {
            let warp = rng.below(WARPS as u64) as usize;
            let warp_key = clock::warp(1, 0, warp as u32);
            let (first, size) = (rng.below(32) as usize, 4 << rng.below(3));
            let count = 1 + rng.below((32 - first as u64).min(BYTES / size));
            let at = START + size * rng.below((BYTES - size * count) / size + 1);
            let how = How::generic(Sem::Weak, Scope::Sys, size as u8, Update::No);
            let record = Record::of(warp_key, ticks[warp], step, how);
            let lone = |lane: usize, write: bool| match write {
                true => Record { actor: clock::lane(warp_key, lane), ..record },
                false => Record { lanes: 1 << lane, ..record },
            };
            let row = Record { lanes: ROW_LANES, row: Row::new(at, size, first), ..record };
            let (past, write) = (pasts[warp].clone(), rng.below(3) == 0);
            let who = |record, own| Accessor { record, own, view: PastView::all(&past), published: None };
            let all = match count {
                1 => who(lone(first, write), clock::lane(warp_key, first)),
                _ => who(row, warp_key),
            };
            if rng.below(3) == 0 {
                let to = rng.below(WARPS as u64) as usize;
                pasts[to].join(&past);
                pasts[to].all.raise(warp_key, ticks[warp]);
                ticks[warp] += 1;
            } else if write {
                shadow.write(&grids, at, size * count, &all, |_| false, Some(|_| 7));
            } else {
                let settled = shadow.is_settled(&grids, at, size * count, &all);
                found[usize::from(settled)] += 1;
                let older = (0..count).any(|i| {
                    let lane = first + i as usize;
                    let who = who(lone(lane, false), clock::lane(warp_key, lane));
                    shadow.stale(&grids, at + i * size, size, &who).is_some()
                });
                assert!(!(settled && older), "step {step}");
            }
        }
    });
    assert!(found.iter().all(|count| *count > 100), "{found:?}");
}

/// Each lane of a warp may find the first words of its vector unchanged, but not the last.
#[test]
fn equal_values_in_one_word_excuse_no_other_word() {
    let (grids, past) = (Grids::default(), CausalPast::default());
    let mut shadow = Shadow::new(false, false);
    let how = How::generic(Sem::Weak, Scope::Sys, 16, Update::No);
    let mut write = |warp: u32, unchanged: fn(u64) -> bool| {
        let own = clock::lane(clock::warp(1, 0, warp), 0);
        let record = Record::of(own, 1, 0, how);
        let who = Accessor { record, own, view: PastView::all(&past), published: None };
        shadow.write(&grids, 0, 16, &who, unchanged, NOT_KEPT).1.first()
    };
    assert_eq!(write(0, |_| false), None);
    assert!(matches!(write(1, |word| word == 0), Some((4, Violation::Race { wrote: true, .. }))));
}
