//! Low-latency dispatch and combine as one of the ways.

use epoxide::Result;
use epoxide::driver::Stream;
use epoxide::low_latency::Buffer;
use epoxide_testing::low_latency::{CombineRows, LowLatencyCase};

use super::{Exchange, link_rows};
use crate::high_throughput::HighThroughput;
use crate::low_latency::{LowLatency, options, quantise};
use crate::results::PhaseName;
use crate::script::{Mode, Script};

/// A second buffer with the same ranks and stream.
pub(crate) struct LowLatencyWay {
    mode: LowLatency,
    link_bytes: (u64, u64),
}

impl LowLatencyWay {
    /// Ready to be timed, after a dispatch and a combine with correct results. Collective.
    pub fn checked(script: &Script<'_, HighThroughput>) -> Result<LowLatencyWay> {
        let (plan, case, stream) = (script.plan, &script.mode.case, &script.stream);
        let mut options = options(plan, plan.tokens);
        if plan.is_virtual {
            // Each multiprocessor of an interpreter costs as much as it does work.
            options = options.num_sms(plan.num_sms[0]);
        }
        let buffer = Buffer::new(stream.device().clone(), &*script.group, options)?;
        // As in high throughput, experts' rank gives back a row for each token.
        let same = LowLatencyCase {
            quantise: quantise(plan.dtype),
            combine_rows: CombineRows::ByRow,
            seed: plan.seed,
            ..LowLatencyCase::new(case.routing.clone(), plan.hidden as u32)
        };
        let mode = LowLatency::checked(same, buffer, &script.group, stream, 1)?;
        let (dispatched, combined) = link_rows(case, script.group.rank());
        let link_bytes = (dispatched * plan.dispatch_row_bytes(), combined * plan.combine_row_bytes());
        Ok(LowLatencyWay { mode, link_bytes })
    }
}

impl Exchange for LowLatencyWay {
    fn dispatch(&self, _: &Stream) -> Result<()> {
        self.mode.replay(PhaseName::LowLatencyDispatch)
    }

    fn combine(&self, _: &Stream) -> Result<()> {
        self.mode.replay(PhaseName::LowLatencyCombine)
    }

    fn in_pairs(&self) -> bool {
        true
    }

    fn check(&self) -> Result<()> {
        self.mode.check()
    }

    fn link_bytes(&self) -> (u64, u64) {
        self.link_bytes
    }
}
