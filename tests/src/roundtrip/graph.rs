//! Round trips as replays of one graph, with other routings and rows each time.

use epoxide::driver::Stream;
use epoxide::ep::{
    Buffer, CombineOutput, CombineRequest, CombineRows, Counts, DType, DispatchLayout, DispatchOutput,
    DispatchRequest, StreamOrder, Tensor,
};
use epoxide::{Error, Result};

use super::{Case, Expected, compare_weights};
use crate::harness::Rank;

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

impl Rank {
    /// Captures layout, dispatch and combine in a graph and replays it `replays` times; `case` gives the case of a replay, all of one
    /// size and one alignment, which are arguments of the graph. What a replay gives is compared with the oracle, and so is what the
    /// same calls give without the graph right behind it. `step` is called after each. Gives how many replays were verified, and the
    /// rows that those received.
    ///
    /// What is wrong is noted.
    ///
    /// # Errors
    /// Whatever the operations report.
    pub fn replay_graph(
        &mut self,
        case: impl Fn(u64) -> Case,
        replays: u64,
        step: impl Fn(),
    ) -> Result<(u64, u64)> {
        let first = case(0);
        let inputs = self.graph_inputs(&first)?;
        let (buffer, stream) = (&mut self.buffer, &self.stream);
        // A capture may not allocate. It finds the memory of a first trip, all of it, since that is dropped as a whole.
        drop(enqueue(buffer, stream, &first, &inputs)?);
        stream.synchronize()?;
        let mut recorded = None;
        let graph = stream.capture(|| {
            recorded = Some(enqueue(buffer, stream, &first, &inputs)?);
            Ok(())
        })?;
        let Some(recorded) = recorded else {
            return Err(Error::os("capture", "it did not run"));
        };
        self.learn_regions(&recorded.dispatched);

        let (mut verified, mut rows) = (0, 0);
        for replay in 0..replays {
            let case = case(replay);
            let fresh = self.graph_inputs(&case)?;
            inputs.overwrite(&fresh, &self.stream)?;
            if !is_verified(replay, replays) {
                graph.launch(&self.stream)?;
                self.stream.synchronize()?;
                step();
                continue;
            }
            let expected = self.expect(&case);
            self.prepare(&case, 2 * replay, &expected)?;
            graph.launch(&self.stream)?;
            self.verify(&case, 2 * replay, &expected, &recorded, &format!("replay {replay}"))?;

            self.prepare(&case, 2 * replay + 1, &expected)?;
            let eager = enqueue(&mut self.buffer, &self.stream, &case, &inputs)?;
            let what = format!("the same calls without a graph, behind replay {replay}");
            self.verify(&case, 2 * replay + 1, &expected, &eager, &what)?;
            verified += 1;
            rows += u64::from(expected.plan.num_recv_tokens);
            step();
        }
        Ok((verified, rows))
    }

    /// This rank's inputs of a case, on the device.
    fn graph_inputs(&self, case: &Case) -> Result<Inputs> {
        let (topk_idx, topk_weights) = self.topk(case)?;
        let (x, x_scales) = self.payload(case, 0)?;
        Ok(Inputs { topk_idx, topk_weights, x, x_scales })
    }

    /// Writes what the experts will make of the rows to come, where peers gather it, and spoils what dispatch must write.
    fn prepare(&self, case: &Case, turn: u64, expected: &Expected) -> Result<()> {
        let sources = &expected.plan.recv_src;
        self.poison_received(case, sources.len() as u64)?;
        let rows = self.buffer.combine_rows(DType::Bf16, sources.len() as u64, case.hidden())?;
        self.write_returned(case, turn, sources, &rows)
    }

    /// Waits for a trip and compares all of it.
    fn verify(&mut self, case: &Case, turn: u64, expected: &Expected, trip: &Trip, what: &str) -> Result<()> {
        let Trip { layout, dispatched, combined } = trip;
        self.stream.synchronize()?;
        self.buffer.check_dispatch(&dispatched.handle, &self.stream)?;
        let named = |difference| format!("{what}: {difference}");
        let difference = self.compare_layout(layout, expected)?;
        self.note(difference.map(named));
        self.check_dispatch(case, 0, expected, what, dispatched)?;
        let sums = self.compare_sums(case, turn, DType::Bf16, case.hidden(), &combined.combined_x)?;
        let weights = compare_weights(self, case, Some(&self.round_trip_of_weights(case)), combined)?;
        self.note(sums.or(weights).map(named));
        self.poison_combined(combined)
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
            // SAFETY: both are contiguous and of one shape, as all cases of a graph are, and the callers hold them until
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
fn enqueue(buffer: &mut Buffer, stream: &Stream, case: &Case, inputs: &Inputs) -> Result<Trip> {
    let order = StreamOrder::on(stream);
    let layout = buffer.get_dispatch_layout(&inputs.topk_idx, case.routing.num_experts, order)?;
    let request = DispatchRequest {
        x_scales: inputs.x_scales.as_ref(),
        topk_idx: Some(&inputs.topk_idx),
        topk_weights: Some(&inputs.topk_weights),
        expert_alignment: case.expert_alignment,
        counts: Counts::OnDevice { capacity: buffer.capacity() },
        ..DispatchRequest::new(&inputs.x, &layout)
    };
    let dispatched = buffer.dispatch(request, order)?;
    let request = CombineRequest {
        rows: CombineRows::InPool { dtype: DType::Bf16, hidden: case.hidden() },
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
