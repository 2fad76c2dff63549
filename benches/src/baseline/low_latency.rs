//! Low-latency dispatch and combine as one of the ways.

use epoxide::Result;
use epoxide::driver::Stream;
use epoxide::low_latency::{Buffer, Quantise};
use epoxide_testing::low_latency::{LowLatencyCase, ReturnPath};

use super::{Exchange, link_rows};
use crate::Plan;
use crate::high_throughput::HighThroughput;
use crate::low_latency::{LowLatency, options, quantise};
use crate::results::PhaseName;
use crate::script::{Mode, Script};

/// A second buffer with the same ranks and stream. Ready to be timed, after a dispatch and a
/// combine with correct results. Collective.
pub(crate) fn low_latency(script: &Script<'_, HighThroughput>) -> Result<LowLatency> {
    let (plan, stream) = (script.plan, &script.stream);
    let mut options = options(plan, plan.tokens);
    if plan.is_virtual {
        // Each multiprocessor of an interpreter costs as much as it does work.
        options = options.num_sms(plan.num_sms[0]);
    }
    let buffer = Buffer::new(stream.device().clone(), &*script.group, options)?;
    // An expert's rank gives back a row for each token, as in high throughput.
    let case = LowLatencyCase {
        quantise: quantise(plan.dtype),
        combine_rows: ReturnPath::ByRow,
        seed: plan.seed,
        ..LowLatencyCase::new(script.mode.case.routing.clone(), plan.hidden as u32)
    };
    LowLatency::checked(case, buffer, &script.group, stream, (1, None))
}

impl Exchange for LowLatency {
    fn dispatch(&self, _: &Stream) -> Result<()> {
        self.replay(PhaseName::LowLatencyDispatch)
    }

    fn combine(&self, _: &Stream) -> Result<()> {
        self.replay(PhaseName::LowLatencyCombine)
    }

    fn in_pairs(&self) -> bool {
        true
    }

    fn check(&self) -> Result<()> {
        Mode::check(self)
    }

    fn link_bytes(&self) -> (u64, u64) {
        let (case, hidden) = (&self.case, u64::from(self.case.hidden));
        let (dispatched, combined) = link_rows(&case.routing, self.rank.group.rank());
        let row_bytes = |quantise| Plan::bytes_of_row(hidden, quantise == Quantise::Not);
        (dispatched * row_bytes(case.quantise), combined * row_bytes(case.quantise_back))
    }
}
