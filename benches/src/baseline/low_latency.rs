//! Low-latency dispatch and combine as one of the ways.

use epoxide::DType;
use epoxide::Result;
use epoxide::driver::Stream;
use epoxide::low_latency::{Buffer, Options, Place, Quantise, Shape};
use epoxide_testing::low_latency::{LowLatencyCase, LowLatencyInputs, LowLatencyRank, ReturnPath};
use epoxide_testing::roundtrip::Case;

use super::{Exchange, link_rows};
use crate::TIMEOUT;
use crate::bench::Bench;
use crate::low_latency::Recorded;

/// A second buffer with the same ranks and stream, and graphs of one dispatch and one combine. An
/// operation lends its place to the next, so calls cannot be enqueued one by one from different
/// functions.
pub(crate) struct LowLatency {
    // Graphs go before what they were recorded of.
    recorded: Recorded,
    _inputs: LowLatencyInputs,
    _place: Place,
    rank: LowLatencyRank,
    link_bytes: (u64, u64),
}

impl LowLatency {
    /// Ready to be timed, after a dispatch and a combine with correct results. Collective.
    pub fn checked(bench: &Bench<'_>, case: &Case) -> Result<LowLatency> {
        let (plan, rig) = (bench.plan, &bench.rig);
        let hidden = plan.hidden as u32;
        let quantise = if plan.dtype == DType::Bf16 { Quantise::Not } else { Quantise::Fp8 };
        // As in high throughput, experts' rank gives back a row for each token.
        let case_of_it = LowLatencyCase {
            quantise,
            combine_rows: ReturnPath::ByRow,
            seed: plan.seed,
            ..LowLatencyCase::new(case.routing.clone(), hidden)
        };
        let mut options = Options::new(Shape {
            max_tokens: plan.tokens,
            hidden: plan.hidden,
            num_topk: plan.topk,
            num_experts: plan.experts,
        })
        .timeout(TIMEOUT);
        if plan.is_virtual {
            // Each multiprocessor of an interpreter costs as much as it does work.
            options = options.num_sms(plan.num_sms[0]);
        }
        let buffer = Buffer::new(rig.device().clone(), &*rig.group, options)?;
        let mut rank = LowLatencyRank::with(rig.group.clone(), rig.stream.clone(), buffer);
        case_of_it.verify(&mut rank)?;
        let inputs = case_of_it.inputs(&rank)?;
        let mut place = rank.buffer.place(0)?;
        let recorded = Recorded::new(&case_of_it, &mut rank, &inputs, &mut place)?;
        let (dispatched, combined) = link_rows(case, rig.rank);
        let link_bytes = (dispatched * plan.dispatch_row_bytes(), combined * plan.combine_row_bytes());
        Ok(LowLatency { recorded, _inputs: inputs, _place: place, rank, link_bytes })
    }
}

impl Exchange for LowLatency {
    fn dispatch(&self, stream: &Stream) -> Result<()> {
        // SAFETY: the recorded addresses are of this value's fields, which live until the stream
        // has been waited for: `Bench::settle`.
        unsafe { self.recorded.dispatch.launch(stream) }
    }

    fn combine(&self, stream: &Stream) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.recorded.combine.launch(stream) }
    }

    fn in_pairs(&self) -> bool {
        true
    }

    fn check(&self) -> Result<()> {
        self.rank.buffer.check()
    }

    fn link_bytes(&self) -> (u64, u64) {
        self.link_bytes
    }
}

impl Drop for LowLatency {
    fn drop(&mut self) {
        // After an error of the timing, replays may be under way. The timing's error already
        // reports the stream's fault.
        let _ = self.rank.stream.synchronize();
    }
}
