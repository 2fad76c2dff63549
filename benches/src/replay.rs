//! Replays of captured steps, as on a server that decodes through CUDA graphs.

use epoxide::throughput::{Detached, Step};
use epoxide::{DType, Result, Tensor};
use epoxide_testing::harness::Rank;

use crate::high_throughput::{Called, HighThroughput};
use crate::measured::ReplayTimes;
use crate::results::PhaseName;
use crate::script::{Front, Script};

/// The calls of each step; those with a sort are of plans with rows by expert.
pub(crate) const STEPS: [&[PhaseName]; 7] = [
    &[PhaseName::DispatchCached],
    &[PhaseName::DispatchUncached],
    &[PhaseName::CombineInPool],
    &[PhaseName::CombineStaged],
    &[PhaseName::DispatchCached, PhaseName::CombineInPool],
    &[PhaseName::DispatchCachedAndSort],
    &[PhaseName::DispatchUncachedAndSort],
];

/// Output of a step's call, written anew with every replay.
type Output = Called<Detached>;

impl Script<'_, HighThroughput> {
    /// Captures every step, holds its replays against the oracle, and times them. Collective.
    pub fn replays(&mut self, chain: u32) -> Result<Vec<ReplayTimes>> {
        self.plan.replayed().map(|names| self.replay(names, chain)).collect()
    }

    fn replay(&mut self, names: &[PhaseName], chain: u32) -> Result<ReplayTimes> {
        let (calls, stream) = (&mut self.mode.calls, self.stream.clone());
        let step = self.mode.rig.buffer.capture(&stream, |buffer, order| {
            let record = |&name: &PhaseName| {
                Ok(match calls.call(name, buffer, order)? {
                    Called::Rows(rows) => Output::Rows(Box::new(rows.detach())),
                    Called::Sums(sums) => Output::Sums(sums),
                    Called::Sorted => Output::Sorted,
                })
            };
            names.iter().map(record).collect::<Result<Vec<_>>>()
        })?;
        for replays in [1, chain] {
            self.mode.verify_step(&step, replays, names)?;
        }
        let launch = |_: &mut Self| step.launch(&stream);
        let alone = self.isolated(Front::Devices, launch)?;
        let flushed =
            self.flush.is_some().then(|| self.isolated(Front::EmptiedCaches, launch)).transpose()?;
        let launch = |_: &mut Self| (0..chain).try_for_each(|_| step.launch(&stream));
        let chained = self.chains(Front::Devices, self.plan.repetitions(), chain, launch)?;
        step.check(&stream)?;
        Ok(ReplayTimes { calls: names.to_vec(), chain, alone, flushed, chained })
    }
}

impl HighThroughput {
    /// Spoils what a step must write, replays it so many times without a wait, and compares what
    /// the last replay gave, bit for bit.
    fn verify_step(&mut self, step: &Step<Vec<Output>>, replays: u32, names: &[PhaseName]) -> Result<()> {
        if names.iter().any(|name| !name.is_dispatch()) {
            let calls = &self.calls;
            let in_pool = calls.place.combine_rows(DType::Bf16, calls.received, calls.hidden)?;
            let (given, other) = match names.contains(&PhaseName::CombineStaged) {
                true => (&calls.staged, in_pool.tensor()),
                false => (in_pool.tensor(), &calls.staged),
            };
            // Spoil the tensor that a combine must not read, or must overwrite first.
            spoil(&self.rig, other)?;
            self.give_back(given)?;
        }
        let (rig, calls) = (&self.rig, &self.calls);
        for output in step.output() {
            match output {
                Output::Sums(sums) => spoil(rig, sums)?,
                Output::Rows(rows) => {
                    let rows = rows.at(&calls.place)?;
                    spoil(rig, &rows.recv_x)?;
                    rows.recv_x_scales.iter().try_for_each(|scales| spoil(rig, scales))?;
                }
                Output::Sorted => calls.by_expert.iter().try_for_each(|it| it.poison(rig))?,
            }
        }
        (0..replays).try_for_each(|_| step.launch(&rig.stream))?;
        step.check(&rig.stream)?;
        for (name, output) in names.iter().zip(step.output()) {
            let what = format!("{} of {replays} replays", name.text());
            match output {
                Output::Rows(rows) => self.check_rows(&what, rows)?,
                Output::Sums(sums) => self.check_sums(&what, sums)?,
                Output::Sorted => self.check_sorted(&what)?,
            }
        }
        self.no_failure()
    }
}

fn spoil(rig: &Rank, tensor: &Tensor) -> Result<()> {
    if tensor.rows() == 0 { Ok(()) } else { rig.poison(tensor) }
}
