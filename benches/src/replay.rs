//! Replays of captured steps, as on a server that decodes through CUDA graphs.

use epoxide::throughput::{Buffer, Counts, Detached, Step};
use epoxide::{DType, StreamOrder, Tensor};
use epoxide::{Error, Result};
use epoxide_testing::harness::Rank;
use epoxide_testing::oracle;
use epoxide_testing::roundtrip::Case;

use crate::bench::{Bench, Calls, RETURNED, ROWS};
use crate::measured::ReplayTimes;
use crate::results::PhaseName;

/// The calls of each step.
const STEPS: [&[PhaseName]; 5] = [
    &[PhaseName::DispatchCached],
    &[PhaseName::DispatchUncached],
    &[PhaseName::CombineInPool],
    &[PhaseName::CombineStaged],
    &[PhaseName::DispatchCached, PhaseName::CombineInPool],
];

/// Output of a step's call, written anew with every replay.
enum Output {
    Rows(Box<Detached>),
    Sums(Tensor<'static>),
}

impl Calls {
    fn record(
        &mut self,
        name: PhaseName,
        staged: &Tensor,
        buffer: &mut Buffer,
        order: StreamOrder<'_>,
    ) -> Result<Output> {
        Ok(match name {
            PhaseName::DispatchCached => {
                Output::Rows(Box::new(self.dispatch_cached(buffer, order)?.detach()))
            }
            PhaseName::DispatchUncached => {
                let counts = Counts::OnDevice { capacity: buffer.capacity() };
                Output::Rows(Box::new(self.dispatch(buffer, order, counts)?.detach()))
            }
            PhaseName::CombineInPool => Output::Sums(self.combine(buffer, order)?),
            PhaseName::CombineStaged => Output::Sums(self.combine_of(staged.into(), buffer, order)?),
            PhaseName::LowLatencyDispatch | PhaseName::LowLatencyCombine => {
                return Err(Error::Unavailable {
                    what: name.text().into(),
                    reason: "low latency has a buffer of its own".into(),
                });
            }
        })
    }
}

impl Bench<'_> {
    /// Captures every step, holds its replays against the oracle, and times them. `staged` are the
    /// rows of the staged combine. Collective.
    pub fn replays(&mut self, chain: u32, case: &Case, staged: &Tensor) -> Result<Vec<ReplayTimes>> {
        STEPS.iter().map(|calls| self.replay(calls, chain, case, staged)).collect()
    }

    fn replay(
        &mut self,
        names: &[PhaseName],
        chain: u32,
        case: &Case,
        staged: &Tensor,
    ) -> Result<ReplayTimes> {
        let (calls, stream) = (&mut self.calls, self.rig.stream.clone());
        let step = self.rig.buffer.capture(&stream, |buffer, order| {
            names.iter().map(|&name| calls.record(name, staged, buffer, order)).collect::<Result<Vec<_>>>()
        })?;
        for replays in [1, chain] {
            self.verify_step(&step, replays, names, case, staged)?;
        }
        let launch = |_: &mut Self| step.launch(&stream);
        let alone = self.isolated(false, launch)?;
        let flushed = if self.flush.is_some() { Some(self.isolated(true, launch)?) } else { None };
        let mut chained = self.isolated(false, |_| (0..chain).try_for_each(|_| step.launch(&stream)))?;
        let more = u64::from(chain - 1) * u64::from(self.plan.warmup + self.plan.iters);
        (0..more).for_each(|_| self.watch.step(self.rig.rank));
        chained.iter_mut().for_each(|us| *us /= f64::from(chain));
        step.check(&stream)?;
        Ok(ReplayTimes { calls: names.to_vec(), chain, alone, flushed, chained })
    }

    /// Spoils what a step must write, replays it so many times without a wait, and compares what
    /// the last replay gave, bit for bit.
    fn verify_step(
        &mut self,
        step: &Step<Vec<Output>>,
        replays: u32,
        names: &[PhaseName],
        case: &Case,
        staged: &Tensor,
    ) -> Result<()> {
        let (rig, place) = (&mut self.rig, &self.calls.place);
        let sources = oracle::recv_order(&case.routing, rig.rank);
        if names.iter().any(|name| !name.is_dispatch()) {
            let in_pool = place.combine_rows(DType::Bf16, self.calls.received, self.calls.hidden)?;
            let (given, other) = match names.contains(&PhaseName::CombineStaged) {
                true => (staged, in_pool.tensor()),
                false => (in_pool.tensor(), staged),
            };
            // Spoil the tensor that a combine must not read, or must overwrite first.
            spoil(rig, other)?;
            rig.write_returned(case, RETURNED, &sources, given)?;
        }
        for output in step.output() {
            match output {
                Output::Sums(sums) => spoil(rig, sums)?,
                Output::Rows(rows) => {
                    let rows = rows.at(place)?;
                    spoil(rig, &rows.recv_x)?;
                    rows.recv_x_scales.iter().try_for_each(|scales| spoil(rig, scales))?;
                }
            }
        }
        (0..replays).try_for_each(|_| step.launch(&rig.stream))?;
        step.check(&rig.stream)?;
        for (name, output) in names.iter().zip(step.output()) {
            let what = format!("{} of {replays} replays", name.text());
            match output {
                Output::Rows(rows) => rig.check_received(case, ROWS, &sources, &what, rows.at(place)?)?,
                Output::Sums(sums) => {
                    let difference =
                        rig.compare_sums(case, RETURNED, DType::Bf16, self.calls.hidden, sums)?;
                    rig.note(difference.map(|difference| format!("{what}: {difference}")));
                }
            }
        }
        self.no_failure()
    }
}

fn spoil(rig: &Rank, tensor: &Tensor) -> Result<()> {
    if tensor.rows() == 0 { Ok(()) } else { rig.poison(tensor) }
}
