//! Operations on several streams, in several buffers, and in graphs.

use epoxide::Result;
use epoxide::driver::{Event, Stream};
use epoxide::throughput::{
    CachedDispatchRequest, CombineRequest, Combined, Detached, DispatchRequest, Place, Step,
};
use epoxide::{DType, StreamOrder, Tensor};

use crate::turns::{HIDDEN, Inputs, ROW, Turn, check_sums, echo, echo_on};
use epoxide_testing::harness::{Rank, Setup, keep};

#[test]
fn two_buffers_at_once() {
    let setup = Setup::new(3, 1, 8, ROW);
    let turns: Vec<Turn> = (0..40).map(|seed| Turn::random(seed, &[8, 3, 6], 1)).collect();
    setup.run(|rank| {
        // A second buffer on the same device, with a stream of its own, so that the two overlap.
        let mut other = Rank::new(rank.device().clone(), rank.group.clone(), setup.options.clone())?;
        let mut places = [rank.place()?, other.place()?];
        let mut inputs = Vec::new();
        let mut outputs = Vec::new();
        for (index, turn) in turns.iter().enumerate() {
            let at = if index % 2 == 0 { &mut *rank } else { &mut other };
            inputs.push(Inputs::upload(turn, at)?);
            let place = &mut places[index % 2];
            let (output, back) = echo(at, place, &inputs[index])?;
            outputs.push((output.handle, back));
        }
        rank.stream.synchronize()?;
        other.stream.synchronize()?;
        rank.buffer.check()?;
        other.buffer.check()?;
        for (index, (turn, (_, back))) in turns.iter().zip(&outputs).enumerate() {
            check_sums(rank, &format!("combined_x of turn {index}"), back, turn)?;
        }
        // No pool is freed before all peers have finished both.
        rank.synchronize()
    });
}

#[test]
fn the_comm_stream_orders_itself_with_the_caller() {
    let setup = Setup::new(2, 1, 8, ROW);
    let turns: Vec<Turn> = (0..20).map(|seed| Turn::random(seed, &[8, 5], 1)).collect();
    setup.run(|rank| {
        rank.on_comm_stream = true;
        let (inputs, mut place) = turns[0].begin(rank)?;
        for (index, turn) in turns.iter().enumerate() {
            // Inputs are written in the caller's stream, over and over in the same place, and so
            // are the rows for combine. The operations run on the other stream. They must wait for
            // the writes, and later writes must wait for them.
            let fresh = Inputs::upload(turn, rank)?;
            inputs.overwrite(rank, &fresh)?;
            let (output, back) = echo(rank, &mut place, &inputs)?;
            rank.check(output.event.is_none() && back.event.is_none(), "no events where the caller waits");
            check_sums(rank, &format!("combined_x of turn {index}"), &back, turn)?;
        }
        rank.stream.synchronize()
    });
}

#[test]
fn asynchronous_calls_are_ordered_by_their_events() {
    let setup = Setup::new(2, 1, 8, ROW);
    let turns: Vec<Turn> = (0..20).map(|seed| Turn::random(seed, &[8, 5], 1)).collect();
    setup.run(|rank| {
        let mut place = rank.place()?;
        for (index, turn) in turns.iter().enumerate() {
            let inputs = Inputs::upload(turn, rank)?;
            let start = event(rank)?;
            let order = StreamOrder::comm(&rank.stream).after(&start).asynchronous();
            let layout =
                rank.buffer.get_dispatch_layout(&inputs.topk_idx, turn.routing.num_experts, order)?;
            let laid_out = layout.event().expect("an asynchronous call has an event");
            let order = StreamOrder::comm(&rank.stream).after(laid_out).asynchronous();
            let request = DispatchRequest::new(&inputs.x, &layout).counts(rank.on_device());
            let output = rank.buffer.dispatch(&mut place, request, order)?;
            let (handle, dispatched) = (output.handle, output.event);

            // A cached dispatch on top, ordered by events alone, then the experts on the caller's
            // stream.
            let dispatched = dispatched.expect("an asynchronous call has an event");
            let order = StreamOrder::comm(&rank.stream).after(&dispatched).asynchronous();
            let request = CachedDispatchRequest::new(&inputs.x, &handle);
            let again = rank.buffer.dispatch_cached(&mut place, request, order)?;
            rank.stream.wait(again.event.as_ref().expect("an asynchronous call has an event"))?;
            let rows = again.combine_rows(DType::Bf16, HIDDEN as u64)?;
            let to = rows.tensor();
            // SAFETY: both are in the pool, which lives as long as the buffer.
            unsafe { rank.stream.copy(to.ptr(), again.recv_x.ptr(), to.rows() * to.row_stride())? };
            let computed = event(rank)?;
            let order = StreamOrder::comm(&rank.stream).after(&computed).asynchronous();
            let back = rank.buffer.combine(CombineRequest::new(&rows, &handle), order)?;
            back.event.as_ref().expect("an asynchronous call has an event").synchronize()?;
            check_sums(rank, &format!("combined_x of turn {index}"), &back, turn)?;
        }
        Ok(())
    });
}

#[test]
fn a_call_on_the_callers_stream_can_be_asynchronous_and_wait_for_an_event() {
    let setup = Setup::new(2, 1, 8, ROW);
    let turn = Turn::random(5, &[8, 5], 1);
    setup.run(|rank| {
        // Inputs are written on another stream; the event orders them before the layout.
        let side = Stream::new(rank.device())?;
        let inputs = Inputs::upload(&turn, rank)?;
        let topk_idx = Tensor::alloc(rank.device(), DType::I64, inputs.topk_idx.shape())?.typed::<i64>()?;
        // SAFETY: both tensors live until the synchronise below.
        unsafe { side.copy(topk_idx.ptr(), inputs.topk_idx.ptr(), topk_idx.rows() * topk_idx.row_stride())? };
        let copied = Event::new(rank.device())?;
        copied.record(&side)?;
        let order = StreamOrder::on(&rank.stream).after(&copied).asynchronous();
        let layout = rank.buffer.get_dispatch_layout(&topk_idx, turn.routing.num_experts, order)?;
        layout.event().expect("an asynchronous call has an event").synchronize()?;
        let got = rank.values::<i32>(&layout.num_tokens_per_rank())?;
        rank.equal("num_tokens_per_rank", &got, &turn.plans[rank.rank as usize].layout.num_tokens_per_rank);
        Ok(())
    });
}

/// A turn that was captured.
type CapturedTurn = Step<(Detached, Combined)>;

fn capture(rank: &mut Rank, place: &mut Place, inputs: &Inputs) -> Result<CapturedTurn> {
    let (stream, on_comm_stream) = (rank.stream.clone(), rank.on_comm_stream);
    rank.buffer.capture(&stream, |buffer, order| {
        let order = if on_comm_stream { StreamOrder::comm(&stream) } else { order };
        let (output, back) = echo_on(buffer, place, order, &stream, inputs)?;
        Ok((output.detach(), back))
    })
}

#[test]
fn a_graph_replays_with_other_routings() {
    let turns: Vec<Turn> = (0..12).map(|seed| Turn::random(seed, &[9, 2, 6], 2)).collect();
    for on_comm_stream in [false, true] {
        Setup::new(3, 2, 9, ROW).run(|rank| {
            rank.on_comm_stream = on_comm_stream;
            let (inputs, mut place) = turns[0].begin(rank)?;
            let step = capture(rank, &mut place, &inputs)?;
            let (output, back) = step.output();
            for (index, turn) in turns.iter().enumerate() {
                let fresh = Inputs::upload(turn, rank)?;
                inputs.overwrite(rank, &fresh)?;
                step.launch(&rank.stream)?;
                let want = turn.recv(rank.rank);
                let got = rank.row_bytes(&output.at(&place)?.recv_x)?;
                rank.equal(&format!("recv_x of replay {index}"), &got[..want.len()], &want);
                check_sums(rank, &format!("combined_x of replay {index}"), back, turn)?;
                let count = output.handle().num_recv_tokens(&rank.stream)?;
                rank.equal("num_recv_tokens of a replay", &[count], &[want.len() as u32]);
                step.check(&rank.stream)?;

                // Calls outside of the graph in between stay in step with it.
                if index % 3 == 0 {
                    let (_, eager) = echo(rank, &mut place, &fresh)?;
                    check_sums(rank, "combined_x without the graph", &eager, turn)?;
                }
                rank.stream.synchronize()?;
            }
            Ok(())
        });
    }
}

#[test]
fn replays_need_no_host_wait_between_them() {
    const REPLAYS: usize = 50;
    let setup = Setup::new(2, 1, 6, ROW);
    let turns: Vec<Turn> = (0..REPLAYS as u64).map(|seed| Turn::random(seed, &[6, 4], 1)).collect();
    setup.run(|rank| {
        let inputs = Inputs::upload(&turns[0], rank)?;
        let fresh: Vec<_> = turns.iter().map(|turn| Inputs::upload(turn, rank)).collect::<Result<_>>()?;
        let mut place = rank.place()?;
        let step = capture(rank, &mut place, &inputs)?;
        check_replays(rank, &turns, &inputs, &fresh, &step.output().1, |stream| step.launch(stream))
    });
}

/// A framework records without a step of the buffer.
#[test]
fn a_graph_that_was_captured_without_the_buffer_replays() {
    const REPLAYS: usize = 20;
    let setup = Setup::new(2, 1, 6, ROW);
    let turns: Vec<Turn> = (0..REPLAYS as u64).map(|seed| Turn::random(seed, &[6, 4], 1)).collect();
    for on_comm_stream in [false, true] {
        setup.run(|rank| {
            rank.on_comm_stream = on_comm_stream;
            let inputs = Inputs::upload(&turns[0], rank)?;
            let fresh: Vec<_> = turns.iter().map(|turn| Inputs::upload(turn, rank)).collect::<Result<_>>()?;
            let mut place = rank.place()?;
            // Once without a graph first: the capture may not allocate, and finds the memory that
            // this gives back.
            drop(echo(rank, &mut place, &inputs)?);
            rank.synchronize()?;
            let mut back = None;
            let stream = rank.stream.clone();
            let graph = stream.capture(|| {
                back = Some(echo(rank, &mut place, &inputs)?.1);
                Ok(())
            })?;
            let back = back.expect("the capture has run");
            // SAFETY: the buffer keeps what was recorded, and outlives the runs.
            let launch = |stream: &Stream| unsafe { graph.launch(stream) };
            check_replays(rank, &turns, &inputs, &fresh, &back, launch)
        });
    }
}

/// Replays each turn with its inputs, and waits once at the end.
fn check_replays(
    rank: &mut Rank,
    turns: &[Turn],
    inputs: &Inputs,
    fresh: &[Inputs],
    back: &Combined,
    launch: impl Fn(&Stream) -> Result<()>,
) -> Result<()> {
    let mut kept = Vec::new();
    for fresh in fresh {
        inputs.overwrite(rank, fresh)?;
        launch(&rank.stream)?;
        kept.push(keep(&rank.stream, &back.combined_x, back.combined_x.rows())?);
    }
    rank.stream.synchronize()?;
    for (index, (turn, kept)) in turns.iter().zip(&kept).enumerate() {
        let want = &turn.sums[rank.rank as usize];
        let got = rank.row_bytes(kept)?;
        rank.equal(&format!("combined_x of replay {index}"), &got, want);
    }
    Ok(())
}

/// An event at the end of the stream's work.
fn event(rank: &Rank) -> Result<Event> {
    let event = Event::new(rank.device())?;
    event.record(&rank.stream)?;
    Ok(event)
}

impl Inputs {
    /// Copies other inputs of the same shapes over these, in stream order. Both live until the
    /// caller has synchronised.
    pub fn overwrite(&self, rank: &Rank, other: &Inputs) -> Result<()> {
        for (to, from) in [(&*self.topk_idx, &*other.topk_idx), (&self.x, &other.x)] {
            assert_eq!(to.shape(), from.shape());
            // SAFETY: as documented; every caller is a test that keeps them.
            unsafe { rank.stream.copy(to.ptr(), from.ptr(), from.rows() * from.row_stride())? };
        }
        Ok(())
    }
}
