//! Round trips as replays of one graph, with other routings and rows each time.

use epoxide::Result;
use epoxide::driver::Stream;
use epoxide::throughput::{
    Buffer, CombineRequest, Combined, Counts, Detached, DispatchLayout, DispatchRequest, Place,
};
use epoxide::{DType, StreamOrder, Tensor, TypedTensor};

use super::case::Case;
use super::check::{DeviceScales, Expected, compare_weights};
use super::{Cases, Replays};
use crate::harness::Rank;
use crate::oracle::Style;

/// Case numbers of replays start past those of other round trips.
const FIRST_CASE: u64 = 1 << 32;
/// An argument of the dispatch, so a graph has one.
const ALIGNMENT: u32 = 4;

/// Inputs of a graph: at fixed addresses, rewritten between replays.
struct Inputs {
    topk_idx: TypedTensor<'static, i64>,
    topk_weights: TypedTensor<'static, f32>,
    x: Tensor<'static>,
    x_scales: DeviceScales,
    columns: Vec<Tensor<'static>>,
}

/// Outputs of the three operations.
struct Trip {
    layout: DispatchLayout<'static>,
    dispatched: Detached,
    combined: Combined,
}

impl Rank {
    /// Captures layout, dispatch and combine in a graph and replays it `replays` times, each with
    /// another routing and other rows. All have one size and one alignment, which are arguments of
    /// the graph. The outputs of a replay are compared with the oracle, and so are those of the
    /// same calls without the graph right behind it, whose combine takes its rows from a tensor:
    /// the next replay's rows then overwrite the ones that it has copied into the pool. `step` is
    /// called after each.
    pub(super) fn replay_graph(&mut self, cases: &Cases, replays: u64, step: impl Fn()) -> Result<Replays> {
        let case = |replay: u64| {
            let style = Style::ALL[replay as usize % Style::ALL.len()];
            Case { expert_alignment: ALIGNMENT, ..Case::full_size(cases, FIRST_CASE + replay, style) }
        };
        let first = case(0);
        let inputs = self.graph_inputs(&first)?;
        let mut place = self.place()?;
        let work = |buffer: &mut Buffer, order: StreamOrder<'_>| {
            enqueue(buffer, &mut place, order, (&first, &inputs), None)
        };
        let recorded = self.buffer.capture(&self.stream, work)?;

        let mut found = Replays::default();
        for replay in 0..replays {
            let case = case(replay);
            let fresh = self.graph_inputs(&case)?;
            inputs.overwrite(&fresh, &self.stream)?;
            if !is_verified(replay, replays) {
                recorded.launch(&self.stream)?;
                self.stream.synchronize()?;
                step();
                continue;
            }
            let expected = self.expect(&case);
            self.prepare(&case, 2 * replay, &expected, &place)?;
            recorded.launch(&self.stream)?;
            recorded.check(&self.stream)?;
            let what = format!("replay {replay}");
            self.verify(&case, 2 * replay, &expected, &place, recorded.output(), &what)?;

            self.prepare(&case, 2 * replay + 1, &expected, &place)?;
            let sources = &expected.plan.recv_src;
            let rows = Tensor::alloc(self.device(), DType::Bf16, &[sources.len() as u64, case.hidden()])?;
            self.write_returned(&case, 2 * replay + 1, sources, &rows)?;
            let order = StreamOrder::on(&self.stream);
            let eager = enqueue(&mut self.buffer, &mut place, order, (&case, &inputs), Some(&rows))?;
            let what = format!("the same calls without a graph, behind replay {replay}");
            self.verify(&case, 2 * replay + 1, &expected, &place, &eager, &what)?;
            found.verified += 1;
            found.rows += u64::from(expected.plan.num_recv_tokens);
            step();
        }
        Ok(found)
    }

    /// This rank's inputs of a case, on the device.
    fn graph_inputs(&self, case: &Case) -> Result<Inputs> {
        let (topk_idx, topk_weights) = self.topk(case)?;
        let (x, x_scales) = self.payload(case, 0)?;
        let columns = self.columns(case, 0)?;
        Ok(Inputs { topk_idx, topk_weights, x, x_scales, columns })
    }

    /// Writes the experts' outputs for expected rows to the memory that peers gather, and
    /// overwrites the memory that dispatch must write.
    fn prepare(&self, case: &Case, turn: u64, expected: &Expected, place: &Place) -> Result<()> {
        let sources = &expected.plan.recv_src;
        self.poison_received(sources.len() as u64)?;
        let rows = place.combine_rows(DType::Bf16, sources.len() as u64, case.hidden())?;
        self.write_returned(case, turn, sources, rows.tensor())
    }

    /// Waits for a trip and compares all of it.
    fn verify(
        &mut self,
        case: &Case,
        turn: u64,
        expected: &Expected,
        place: &Place,
        trip: &Trip,
        what: &str,
    ) -> Result<()> {
        let Trip { layout, dispatched, combined } = trip;
        self.stream.synchronize()?;
        self.buffer.check_dispatch(dispatched.handle(), &self.stream)?;
        let named = |difference| format!("{what}: {difference}");
        let difference = self.compare_layout(layout, expected)?;
        self.note(difference.map(named));
        let dispatched = dispatched.at(place)?;
        self.learn_regions(dispatched);
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
            (Some(&*self.topk_idx), Some(&*with.topk_idx)),
            (Some(&*self.topk_weights), Some(&*with.topk_weights)),
            (Some(&self.x), Some(&with.x)),
            (self.x_scales.as_deref(), with.x_scales.as_deref()),
        ];
        let columns = self.columns.iter().zip(&with.columns).map(|(to, from)| (Some(to), Some(from)));
        for (to, from) in pairs.into_iter().chain(columns) {
            let (Some(to), Some(from)) = (to, from) else { continue };
            // SAFETY: both are contiguous and of one shape, as all cases of a graph are. The
            // callers hold them until they have synchronised the stream.
            unsafe { stream.copy(to.ptr(), from.ptr(), to.rows() * to.row_bytes())? };
        }
        Ok(())
    }
}

/// The first 100 replays are verified, each tenth of those behind them, and the last.
fn is_verified(replay: u64, replays: u64) -> bool {
    replay < 100 || replay.is_multiple_of(10) || replay + 1 == replays
}

/// Enqueues the three operations; the host does not wait. The experts' rows are `given`, else in the
/// pool.
fn enqueue(
    buffer: &mut Buffer,
    place: &mut Place,
    order: StreamOrder<'_>,
    (case, inputs): (&Case, &Inputs),
    given: Option<&Tensor>,
) -> Result<Trip> {
    let layout = buffer.get_dispatch_layout(&inputs.topk_idx, case.routing.num_experts, order)?;
    let counts = Counts::OnDevice { capacity: buffer.capacity() };
    let request = DispatchRequest::new(&inputs.x, &layout).topk_weights(&inputs.topk_weights);
    let request = request.expert_alignment(case.expert_alignment).counts(counts).quantise(case.quantise);
    let request = inputs.x_scales.iter().fold(request, DispatchRequest::scales);
    let request = inputs.columns.iter().fold(request, DispatchRequest::column);
    let dispatched = buffer.dispatch(place, request, order)?;
    let combined = {
        let rows;
        let request = match given {
            Some(given) => CombineRequest::new(given, &dispatched.handle),
            None => {
                rows = dispatched.combine_rows(DType::Bf16, case.hidden())?;
                CombineRequest::new(&rows, &dispatched.handle)
            }
        };
        let weights = dispatched.recv_topk_weights.iter();
        buffer.combine(weights.fold(request, CombineRequest::topk_weights), order)?
    };
    Ok(Trip { layout, dispatched: dispatched.detach(), combined })
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
