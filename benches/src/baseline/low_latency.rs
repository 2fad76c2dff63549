//! Low-latency dispatch and combine as one of the ways.

use std::cell::RefCell;

use epoxide::driver::Stream;
use epoxide::low_latency::{Buffer, Detached, Place, Quantise, Received};
use epoxide::{Error, Result, StreamOrder};
use epoxide_testing::low_latency::{LowLatencyCase, LowLatencyInputs, LowLatencyRank, ReturnPath};

use super::{Exchange, link_rows};
use crate::Plan;
use crate::high_throughput::HighThroughput;
use crate::low_latency::{options, quantise};
use crate::script::Script;

/// Launched call by call, as the other ways are.
pub(crate) struct LowLatencyCalls {
    case: LowLatencyCase,
    inputs: LowLatencyInputs,
    rank: u32,
    state: RefCell<State>,
}

struct State {
    sent: Option<Detached<Received<'static>>>,
    place: Place,
    rank: LowLatencyRank,
}

/// A second buffer with the same ranks and stream. Ready to be timed, after a dispatch and a
/// combine with correct results. Collective.
pub(crate) fn low_latency(script: &Script<'_, HighThroughput>) -> Result<LowLatencyCalls> {
    let (plan, stream) = (script.plan, &script.stream);
    let mut options = options(plan, plan.tokens);
    if plan.is_virtual {
        // Each multiprocessor of an interpreter costs as much as it does work.
        options = options.num_sms(plan.num_sms[0]);
    }
    let buffer = Buffer::new(stream.device().clone(), &*script.group, options)?;
    // An expert's rank gives back a row for each token, in the pool, as in high throughput.
    let case = LowLatencyCase {
        quantise: quantise(plan.dtype),
        combine_rows: ReturnPath::InPool,
        seed: plan.seed,
        ..LowLatencyCase::new(script.mode.case.routing.clone(), plan.hidden as u32)
    };
    let mut rank = LowLatencyRank::with(script.group.clone(), stream.clone(), buffer);
    case.verify(&mut rank)?;
    let inputs = case.inputs(&rank)?;
    let place = rank.buffer.place(0)?;
    let state = RefCell::new(State { sent: None, place, rank });
    Ok(LowLatencyCalls { rank: script.group.rank(), case, inputs, state })
}

impl Exchange for LowLatencyCalls {
    fn dispatch(&self, stream: &Stream) -> Result<()> {
        let State { sent, place, rank } = &mut *self.state.borrow_mut();
        let request = self.inputs.request(self.case.quantise);
        *sent = Some(rank.buffer.dispatch(place, request, StreamOrder::on(stream))?.detach());
        Ok(())
    }

    fn combine(&self, stream: &Stream) -> Result<()> {
        let State { sent, place, rank } = &mut *self.state.borrow_mut();
        let sent = sent.take().ok_or_else(|| Error::Unavailable {
            what: "combine".into(),
            reason: "no dispatch before it".into(),
        })?;
        let received = sent.attach(place)?;
        rank.buffer.combine(received, self.inputs.experts(&self.case), StreamOrder::on(stream)).map(drop)
    }

    fn in_pairs(&self) -> bool {
        true
    }

    fn check(&self) -> Result<()> {
        self.state.borrow().rank.buffer.check()
    }

    fn link_bytes(&self) -> (u64, u64) {
        let (case, hidden) = (&self.case, u64::from(self.case.hidden));
        let (dispatched, combined) = link_rows(&case.routing, self.rank);
        let row_bytes = |quantise| Plan::bytes_of_row(hidden, quantise == Quantise::None);
        (dispatched * row_bytes(case.quantise), combined * row_bytes(case.quantise_back))
    }
}

impl Drop for LowLatencyCalls {
    fn drop(&mut self) {
        // After an error of the timing, calls may be under way that read the inputs. The timing's
        // error already reports the stream's fault.
        let _ = self.state.get_mut().rank.stream.synchronize();
    }
}
