//! The script of a measurement, the same in both modes: phases, traces and pairs are timed, and the
//! steps counted that [`Plan::steps`] announces. A [`Mode`] makes the calls.

use std::sync::Arc;
use std::time::Instant;

use epoxide::driver::{Event, Memory, MemoryKind, Stream};
use epoxide::group::ProcessGroup;
use epoxide::internal::Instruments;
use epoxide::{Error, Result};

use crate::hold::Hold;
use crate::measured::{PhaseTimes, Samples, Times, TracedCall, WireCount};
use crate::results::PhaseName;
use crate::{Effort, Plan, TIMEOUT, Watch};

/// Puts that a trace has room for, of each queue.
const TRACED_PUTS: usize = 1 << 16;
/// Calls of each phase that are kept for a trace file, apart from the timed ones.
const TRACED_CALLS: u32 = 3;

/// A mode on one rank: its buffer, its calls, and what they must give.
pub(crate) trait Mode: Sized {
    /// Its buffer.
    type Buffer: Instruments;

    /// The front of the phases' calls.
    const FRONT: Front<'static>;
    /// The front of a chain of pairs.
    const FRONT_OF_PAIRS: Front<'static>;

    /// The buffer.
    fn buffer(&mut self) -> &mut Self::Buffer;

    /// Returns an error that an operation of the buffer has met.
    fn check(&self) -> Result<()>;

    /// Compares every received row and every sum with the oracle, bit for bit. Collective.
    fn verify(&mut self) -> Result<()>;

    /// Enqueues a call of a phase, as it is timed.
    fn call(&mut self, name: PhaseName) -> Result<()>;

    /// Enqueues so many rounds of calls as kernels that can be traced.
    fn traced(&mut self, names: &[PhaseName], rounds: u32) -> Result<()>;

    /// Enqueues the pairs of a chain, so many.
    fn pairs(&mut self, chain: u32) -> Result<()>;

    /// Enqueues a barrier between the devices, for fronts and calls that need one.
    fn barrier(&mut self) -> Result<()> {
        Ok(())
    }

    /// Measures what this mode alone has.
    fn others(script: &mut Script<'_, Self>, times: &mut Times) -> Result<()> {
        let _ = (script, times);
        Ok(())
    }
}

/// Work that is enqueued in front of each round, and not timed.
#[derive(Clone, Copy)]
pub(crate) enum Front<'f> {
    /// Only a barrier of the hosts before the first round. The event that ends a call begins the
    /// next.
    Nothing,
    /// A barrier of the hosts, once the devices are idle.
    Hosts,
    /// A barrier between the devices.
    Devices,
    /// Emptied L2 caches, then a barrier between the devices.
    EmptiedCaches,
    /// The same behind a call.
    Behind(&'f dyn Fn() -> Result<()>),
    /// The same as `EmptiedCaches`, behind a kernel that holds the device until the host has enqueued
    /// the round. There is none without [`Script::hold`].
    Held,
}

/// One rank's measurement.
pub(crate) struct Script<'a, M> {
    pub plan: &'a Plan,
    pub group: Arc<dyn ProcessGroup>,
    pub stream: Arc<Stream>,
    pub mode: M,
    pub traced: Vec<TracedCall>,
    /// Memory that is written to empty the L2 cache.
    pub flush: Option<Memory>,
    /// Holds rounds back, for [`Front::Held`].
    pub hold: Option<Hold>,
    watch: &'a dyn Watch,
}

impl<'a, M: Mode> Script<'a, M> {
    pub fn new(
        plan: &'a Plan,
        group: &Arc<dyn ProcessGroup>,
        stream: &Arc<Stream>,
        watch: &'a dyn Watch,
        mode: M,
    ) -> Result<Self> {
        let empties = matches!(M::FRONT, Front::EmptiedCaches) && plan.empties_caches();
        let alloc = || Memory::alloc(stream.device(), plan.flush_mib << 20, MemoryKind::Device, "L2 flush");
        let flush = empties.then(alloc).transpose()?;
        let (group, stream) = (group.clone(), stream.clone());
        Ok(Script { plan, group, stream, mode, traced: Vec::new(), flush, hold: None, watch })
    }

    /// Reports the current work.
    pub fn doing(&self, what: &str) {
        self.watch.doing(self.group.rank(), &format!("{} tokens, {what}", self.plan.tokens));
    }

    /// Reports so many steps.
    pub fn step(&self, steps: u32) {
        (0..steps).for_each(|_| self.watch.step(self.group.rank()));
    }

    /// Makes `count` events before the first is recorded, so that calls do not include the host's
    /// time for it.
    fn events(&self, count: usize) -> Result<Vec<Event>> {
        (0..count).map(|_| Event::timed(self.stream.device())).collect()
    }

    /// Writes another value in each round.
    fn empty_cache(&self, front: Front<'_>, round: u32) -> Result<()> {
        match (front, &self.flush) {
            // SAFETY: the memory lives as long as the script, which waits for the stream.
            (Front::EmptiedCaches | Front::Held | Front::Behind(_), Some(flush)) => unsafe {
                self.stream.fill(flush.ptr(), round as u8, flush.bytes())
            },
            _ => Ok(()),
        }
    }

    /// Aligns the ranks.
    fn align(&mut self, front: Front<'_>) -> Result<()> {
        match front {
            Front::Nothing => Ok(()),
            Front::Hosts => self.group.barrier(TIMEOUT),
            Front::Devices | Front::EmptiedCaches | Front::Held | Front::Behind(_) => self.mode.barrier(),
        }
    }

    /// Times rounds of `calls` calls, so many untimed and so many timed: each call by itself,
    /// between two events. All of it is enqueued ahead, so that the host's own delays stay out. A
    /// round counts as `steps` steps.
    fn rounds(
        &mut self,
        front: Front<'_>,
        [untimed, timed]: [u32; 2],
        steps: u32,
        calls: usize,
        mut call: impl FnMut(&mut Self, usize) -> Result<()>,
    ) -> Result<Vec<Samples>> {
        if matches!(front, Front::Nothing) {
            self.group.barrier(TIMEOUT)?;
        }
        // The event before the one that ends a call begins it.
        let (mut events, mut ends) = (Vec::new(), Vec::new());
        for round in 0..untimed + timed {
            if let Front::Behind(call) = front {
                call()?;
            }
            if let (Front::Held, Some(hold)) = (front, &self.hold) {
                hold.enqueue(&self.stream)?;
            }
            self.empty_cache(front, round)?;
            self.align(front)?;
            let begins = round == 0 || !matches!(front, Front::Nothing);
            let first = events.len() + usize::from(begins);
            events.append(&mut self.events(calls + usize::from(begins))?);
            if begins {
                events[first - 1].record(&self.stream)?;
            }
            for (at, end) in (first..first + calls).enumerate() {
                call(self, at)?;
                events[end].record(&self.stream)?;
                ends.push(end);
            }
            if let Some(hold) = &self.hold {
                hold.release();
            }
            if matches!(front, Front::Hosts) {
                self.stream.synchronize()?;
                self.step(steps);
            }
        }
        // The host has given the device all of it: it only looks on.
        for ends in ends.chunks(calls).filter(|_| !matches!(front, Front::Hosts)) {
            ends.last().map_or(Ok(()), |&end| events[end].synchronize())?;
            self.step(steps);
        }
        self.stream.synchronize()?;
        self.mode.check()?;
        let us = |&end: &usize| Ok(f64::from(events[end - 1].elapsed_ms(&events[end])?) * 1e3);
        let ends = &ends[untimed as usize * calls..];
        (0..calls).map(|at| ends.iter().skip(at).step_by(calls).map(us).collect()).collect()
    }

    /// The time of one of `chain` calls between two events, for every timed iteration.
    pub fn chains(
        &mut self,
        front: Front<'_>,
        repetitions: [u32; 2],
        chain: u32,
        mut calls: impl FnMut(&mut Self) -> Result<()>,
    ) -> Result<Samples> {
        let rounds = self.rounds(front, repetitions, chain, 1, |script, _| calls(script))?;
        Ok(rounds.into_iter().flatten().map(|us| us / f64::from(chain)).collect())
    }

    /// Times every iteration of a call by itself.
    pub fn isolated(
        &mut self,
        front: Front<'_>,
        call: impl FnMut(&mut Self) -> Result<()>,
    ) -> Result<Samples> {
        self.chains(front, self.plan.repetitions(), 1, call)
    }

    /// The same with emptied caches, of a call that [`Plan::steps`] does not announce.
    pub fn unannounced(&mut self, mut call: impl FnMut(&mut Self) -> Result<()>) -> Result<Samples> {
        let repetitions = self.plan.repetitions();
        let rounds = self.rounds(Front::EmptiedCaches, repetitions, 0, 1, |script, _| call(script))?;
        Ok(rounds.into_iter().flatten().collect())
    }

    /// Mean microseconds of calls that follow each other directly: one pair of events around all of
    /// them.
    pub fn back_to_back(&mut self, mut call: impl FnMut(&mut Self) -> Result<()>) -> Result<f64> {
        let [untimed, timed] = self.plan.repetitions();
        for _ in 0..untimed {
            call(self)?;
            self.step(1);
        }
        self.mode.barrier()?;
        let events = self.events(2)?;
        events[0].record(&self.stream)?;
        (0..timed).try_for_each(|_| call(self))?;
        events[1].record(&self.stream)?;
        self.stream.synchronize()?;
        self.step(timed);
        Ok(f64::from(events[0].elapsed_ms(&events[1])?) * 1e3 / f64::from(timed))
    }

    /// Puts of the proxies so far. All puts of an operation have left when it has ended.
    fn wire_count(&mut self) -> WireCount {
        let stats = self.mode.buffer().wire_stats();
        stats.iter().fold(WireCount::default(), |sum, (_, _, stats)| WireCount {
            bytes: sum.bytes + stats.bytes,
            puts: sum.puts + stats.puts.saturating_sub(stats.counter_puts),
        })
    }

    /// All times with `num_sms` multiprocessors. Collective.
    pub fn times(&mut self, num_sms: u32) -> Result<Times> {
        let plan = self.plan;
        let mut times = Times { num_sms, ..Times::default() };
        for names in plan.rounds() {
            self.doing(&names.iter().map(|name| name.text()).collect::<Vec<_>>().join(", "));
            // An exact-size dispatch returns while its rows are on their way.
            self.stream.synchronize()?;
            let before = self.wire_count();
            let call = |script: &mut Self, at: usize| script.mode.call(names[at]);
            let samples = self.rounds(M::FRONT, plan.repetitions(), 1, names.len(), call)?;
            let after = self.wire_count();
            let wire = match names {
                [_] => WireCount {
                    bytes: after.bytes - before.bytes,
                    puts: after.puts.saturating_sub(before.puts),
                },
                _ => WireCount::default(),
            };
            let phases = names.iter().zip(samples);
            times
                .phases
                .extend(phases.map(|(&name, calls)| PhaseTimes { wire, ..PhaseTimes::new(name, calls) }));
        }
        if plan.effort == Effort::Phases {
            return Ok(times);
        }
        self.doing("traces");
        for names in plan.rounds() {
            self.trace(names, &mut times)?;
        }
        if let Some((chain, repetitions)) = plan.pairs() {
            self.doing("pairs");
            let call = |script: &mut Self| script.mode.pairs(chain);
            times.pair = self.chains(M::FRONT_OF_PAIRS, repetitions, chain, call)?;
        }
        M::others(self, &mut times)?;
        Ok(times)
    }

    /// Traces calls apart from the timed ones: a few, each in a trace of its own behind the same
    /// front, or all rounds in one trace where no front keeps them apart.
    fn trace(&mut self, names: &[PhaseName], times: &mut Times) -> Result<()> {
        let (num_sms, tokens) = (times.num_sms, self.plan.tokens);
        let is_aligned = !matches!(M::FRONT, Front::Nothing);
        let [untimed, timed] = if is_aligned { [0, 1] } else { self.plan.repetitions() };
        // A call has a barrier and at most two launches, of one of which all multiprocessors may
        // have a block more.
        let blocks = 3 * num_sms + self.stream.device().info().sm_count;
        let calls = (untimed + timed) as usize * names.len();
        for _ in 0..if is_aligned { TRACED_CALLS } else { 1 } {
            let buffer = self.mode.buffer();
            buffer.start_trace(u64::from(blocks) * calls as u64)?;
            buffer.start_put_trace(TRACED_PUTS);
            self.empty_cache(M::FRONT, 0)?;
            self.stream.synchronize()?;
            if !is_aligned {
                self.group.barrier(TIMEOUT)?;
            }
            let start = Instant::now();
            self.align(M::FRONT)?;
            self.mode.traced(names, untimed + timed)?;
            let (launches, dropped) = self.mode.buffer().take_trace(&self.stream)?;
            let host = (start, Instant::now());
            // Puts of several calls in one trace cannot be assigned to a call.
            let puts = Some(self.mode.buffer().take_put_trace()).filter(|_| calls == 1).unwrap_or_default();
            let (barrier, launches) = match (is_aligned, &launches[..]) {
                (true, [barrier, launches @ ..]) => (Some(barrier.clone()), launches),
                (_, launches) => (None, launches),
            };
            if dropped > 0 || launches.len() < calls {
                return Err(Error::os("trace", format!("{dropped} launches had no room")));
            }
            let of_calls = launches.chunks(launches.len() / calls).zip(names.iter().cycle());
            for (launches, &phase) in of_calls.skip(untimed as usize * names.len()) {
                let Some(PhaseTimes { kernels, .. }) = times.phase_mut(phase) else { continue };
                kernels.add(launches);
                if kernels.done.len() <= TRACED_CALLS as usize {
                    let (barrier, launches, puts) = (barrier.clone(), launches.to_vec(), puts.clone());
                    self.traced.push(TracedCall { phase, num_sms, tokens, barrier, launches, puts, host });
                }
            }
        }
        self.mode.check()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use epoxide::group::run_threads;
    use epoxide::throughput::Buffer;

    use super::*;
    use crate::tests::{open, plan};

    /// A mode without calls of its own.
    struct Bare;

    impl Mode for Bare {
        type Buffer = Buffer;

        const FRONT: Front<'static> = Front::Nothing;
        const FRONT_OF_PAIRS: Front<'static> = Front::Held;

        fn buffer(&mut self) -> &mut Buffer {
            unreachable!("no phase is timed")
        }

        fn check(&self) -> Result<()> {
            Ok(())
        }

        fn verify(&mut self) -> Result<()> {
            Ok(())
        }

        fn call(&mut self, _: PhaseName) -> Result<()> {
            Ok(())
        }

        fn traced(&mut self, _: &[PhaseName], _: u32) -> Result<()> {
            Ok(())
        }

        fn pairs(&mut self, _: u32) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_held_round_begins_once_the_host_has_enqueued_it() {
        let plan = plan("");
        let ran = run_threads(1, TIMEOUT, |rank, group| {
            let device = open(rank)?;
            let stream = Arc::new(Stream::new(&device)?);
            let mut script = Script::new(&plan, &group, &stream, &(), Bare)?;
            script.hold = Some(Hold::new(&device, Duration::from_secs(3600))?);
            script.chains(Front::Held, [1, 2], 4, |script| {
                let event = Event::timed(&device)?;
                event.record(&script.stream)?;
                std::thread::sleep(Duration::from_millis(5));
                assert!(!event.is_done()?);
                Ok(())
            })
        });
        assert_eq!(ran.map_err(|failure| failure.error).unwrap()[0].len(), 2);
    }
}
