//! Round trips as replays of one graph, with other routings and rows each time.

use epoxide::driver::Stream;
use epoxide::ep::{
    Buffer, CombineOutput, CombineRequest, CombineRows, Counts, DType, DispatchLayout, DispatchOutput,
    DispatchRequest, StreamOrder, Tensor,
};
use epoxide_testing::oracle::{self, Plan, Style};

use super::{Case, Rig};
use crate::checks;
use crate::options::Setup;
use crate::output::Voice;
use crate::stop::{Result, Stop};

/// Expert counts are rounded up to multiples of this: an argument of the dispatch, so a graph has one.
const ALIGNMENT: u32 = 4;
/// Case numbers of replays start here, past those of other round trips.
const FIRST_CASE: u64 = 1 << 32;
/// What a graph reads: at fixed addresses, rewritten between replays.
struct Inputs {
    topk_idx: Tensor,
    topk_weights: Tensor,
    x: Tensor,
    x_scales: Option<Tensor>,
}

/// What the three operations gave. The graph's must live as long as it is replayed: it writes there.
struct Trip {
    layout: DispatchLayout,
    dispatched: DispatchOutput,
    combined: CombineOutput,
}

impl Rig<'_> {
    /// Captures layout, dispatch and combine in a graph and replays it `replays` times. What a replay gives is compared
    /// with the oracle, and so is what the same calls give without the graph right behind it. Returns how many replays
    /// were verified, and the rows that those received.
    pub fn replay_graph(&mut self, setup: &Setup, replays: u64, voice: &Voice) -> Result<(u64, u64)> {
        let case = |replay: u64| {
            let style = Style::ALL[replay as usize % Style::ALL.len()];
            Case { expert_alignment: ALIGNMENT, ..Case::full_size(setup, FIRST_CASE + replay, style) }
        };
        let inputs = self.inputs(&case(0))?;
        let (buffer, stream) = (&mut self.buffer, &self.stream);
        // A capture may not allocate. It finds the memory of a first trip, all of it, since that is dropped as a whole.
        drop(enqueue(buffer, stream, setup, &inputs)?);
        stream.synchronize()?;
        let mut recorded = None;
        let graph = stream.capture(|| {
            recorded = Some(enqueue(buffer, stream, setup, &inputs)?);
            Ok(())
        })?;
        let Some(recorded) = recorded else {
            return Err(Stop::failed("the capture did not run"));
        };
        self.learn_regions(&recorded.dispatched);

        let (mut verified, mut rows, mut failure) = (0, 0, None);
        for replay in 0..replays {
            let case = case(replay);
            let fresh = self.inputs(&case)?;
            inputs.overwrite(&fresh, &self.stream)?;
            if !is_verified(replay, replays) {
                graph.launch(&self.stream)?;
                self.stream.synchronize()?;
                voice.step();
                continue;
            }
            let channels = self.buffer.config().num_channels();
            let plan = oracle::plan(&case.routing, self.rank.rank, channels, ALIGNMENT);
            self.expect(&case, 2 * replay, &plan)?;
            graph.launch(&self.stream)?;
            self.verify(&case, 2 * replay, &plan, &recorded)?;
            failure = failure.or(self.difference_in(format!("replay {replay}")));

            self.expect(&case, 2 * replay + 1, &plan)?;
            let eager = enqueue(&mut self.buffer, &self.stream, setup, &inputs)?;
            self.verify(&case, 2 * replay + 1, &plan, &eager)?;
            failure = failure
                .or(self.difference_in(format!("the same calls without a graph, behind replay {replay}")));
            verified += 1;
            rows += plan.recv_src.len() as u64;
            voice.step();
        }
        failure.map_or(Ok((verified, rows)), |failure| Err(Stop::failed(failure)))
    }

    /// This rank's inputs of a case, on the device.
    fn inputs(&self, case: &Case) -> Result<Inputs> {
        let (topk_idx, topk_weights) = self.topk(case)?;
        let (x, x_scales) = self.payload(case, 0)?;
        Ok(Inputs { topk_idx, topk_weights, x, x_scales })
    }

    /// Writes what the experts will make of the rows to come, where peers gather it, and spoils what dispatch must write.
    fn expect(&self, case: &Case, salt: u64, plan: &Plan) -> Result<()> {
        self.poison_recv(case, plan)?;
        let rows = self.buffer.combine_rows(DType::Bf16, plan.recv_src.len() as u64, case.hidden)?;
        self.write_expert_output(case, salt, plan, &rows)
    }

    /// Waits for a trip and compares all of it. A difference is noted.
    fn verify(&mut self, case: &Case, salt: u64, plan: &Plan, trip: &Trip) -> Result<()> {
        let Trip { layout, dispatched, combined } = trip;
        self.stream.synchronize()?;
        self.buffer.check_dispatch(&dispatched.handle, &self.stream)?;
        let ranks = case.routing.num_ranks() as usize;
        let difference = checks::layout(&self.stream, layout, &plan.layout, ranks)?;
        self.note(difference);
        self.check_received(case, 0, plan, dispatched)?;
        let difference = self.check_metadata(case, plan, self.nodes_plan(case).as_ref(), dispatched)?;
        self.note(difference);
        let difference = self.check_combined(case, salt, true, combined)?;
        self.note(difference);
        self.poison_combined(combined)
    }

    fn difference_in(&mut self, what: String) -> Option<String> {
        self.take_difference().map(|difference| format!("{what}: {difference}"))
    }
}

impl Inputs {
    /// Copies other inputs here, in stream order. The others may go once the stream has passed.
    fn overwrite(&self, with: &Inputs, stream: &Stream) -> Result<()> {
        let pairs = [
            (Some(&self.topk_idx), Some(&with.topk_idx)),
            (Some(&self.topk_weights), Some(&with.topk_weights)),
            (Some(&self.x), Some(&with.x)),
            (self.x_scales.as_ref(), with.x_scales.as_ref()),
        ];
        for (to, from) in pairs {
            let (Some(to), Some(from)) = (to, from) else { continue };
            // SAFETY: both are contiguous and of one shape, as all cases of a setup are, and the callers hold them until
            // they have synchronised the stream.
            unsafe { stream.copy(to.ptr(), from.ptr(), to.rows() * to.row_bytes())? };
        }
        Ok(())
    }
}

/// The first 100 replays are verified, each tenth of those behind them, and the last.
fn is_verified(replay: u64, replays: u64) -> bool {
    replay < 100 || replay.is_multiple_of(10) || replay + 1 == replays
}

/// Enqueues the three operations; the host does not wait. The experts' rows are in the pool.
fn enqueue(buffer: &mut Buffer, stream: &Stream, setup: &Setup, inputs: &Inputs) -> epoxide::Result<Trip> {
    let order = StreamOrder::on(stream);
    let layout = buffer.get_dispatch_layout(&inputs.topk_idx, setup.experts, order)?;
    let request = DispatchRequest {
        x_scales: inputs.x_scales.as_ref(),
        topk_idx: Some(&inputs.topk_idx),
        topk_weights: Some(&inputs.topk_weights),
        expert_alignment: ALIGNMENT,
        counts: Counts::OnDevice { capacity: buffer.capacity() },
        ..DispatchRequest::new(&inputs.x, &layout)
    };
    let dispatched = buffer.dispatch(request, order)?;
    let request = CombineRequest {
        rows: CombineRows::InPool { dtype: DType::Bf16, hidden: setup.hidden },
        topk_weights: dispatched.recv_topk_weights.as_ref(),
        handle: &dispatched.handle,
    };
    let combined = buffer.combine(request, order)?;
    Ok(Trip { layout, dispatched, combined })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_runs_are_verified_in_part() {
        let verified = |replays| (0..replays).filter(|&replay| is_verified(replay, replays)).count();
        assert_eq!([0, 1, 100, 101, 112, 1000].map(verified), [0, 1, 100, 101, 103, 191]);
    }
}
