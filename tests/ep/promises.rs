//! Promises of the interface: permitted drops and their times, lifetimes of rows, and the errors of
//! each rank.

use std::time::Duration;

use epoxide::driver::virt::VirtConfig;
use epoxide::driver::{DevicePtr, Event, Stream};
use epoxide::internal::driver::unfenced_stream;
use epoxide::internal::{VirtualTime, as_member, run_ahead};
use epoxide::throughput::{
    Buffer, CachedDispatchRequest, CombineRequest, Combined, Config, Counts, DispatchHandle, DispatchRequest,
    Options, Place, Shape, Step,
};
use epoxide::transport::{TransportKind, TransportOptions};
use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
use epoxide::{Error, Result, Scope};
use epoxide_testing::harness::{
    NodeLinks, PATIENCE, POISON, Rank, Setup, assert_names, keep, open_device, run_ranks,
};
use epoxide_testing::oracle;
use epoxide_testing::payload::values_of;
use epoxide_testing::roundtrip::Case;

use half::{bf16, f16};

use crate::gate::Gate;
use crate::turns::{HIDDEN, Inputs, ROW, TOPK, Turn, check_rows, check_sums, echo, echo_on};
use crate::valid::{EXPERTS, RANKS, TOKENS, expect_gone, refused, tensor, then_dispatch};

/// An event that has not happened within this time counts as waiting.
const WHILE: Duration = Duration::from_millis(60);

/// Two ranks on one node, and on two.
const SPREADS: [Option<NodeLinks>; 2] =
    [None, Some(NodeLinks { ranks_per_node: 1, transport: TransportKind::Shm, queues: 1 })];

fn setup() -> Setup {
    Setup::new(2, 1, 8, ROW)
}

/// Turns of the same shape, and so with memory of the same sizes.
fn turns<const COUNT: usize>() -> [Turn; COUNT] {
    std::array::from_fn(|seed| Turn::random(seed as u64, &[8, 5], 1))
}

/// Runs `main` on both spreads, with a turn that either rank may send.
fn in_both_spreads(main: impl Fn(&mut Rank, &Turn, &Inputs, &mut Place) -> Result<()> + Sync) {
    let [turn] = turns();
    for nodes in SPREADS {
        setup().nodes(nodes).run(|rank| {
            let (inputs, mut place) = turn.begin(rank)?;
            main(rank, &turn, &inputs, &mut place)
        });
    }
}

fn event(stream: &Stream) -> Result<Event> {
    let event = Event::new(stream.device())?;
    event.record(stream)?;
    Ok(event)
}

/// Does what waits for work that a gate holds up, and opens that meanwhile.
fn while_held(gate: &Gate, work: impl FnOnce()) {
    std::thread::scope(|scope| {
        // A member of the ranks' clock: no deadline passes while it sleeps.
        scope.spawn(as_member(VirtualTime::of_this_thread(), || {
            std::thread::sleep(WHILE);
            gate.open();
        }));
        work();
    });
}

/// The status of a buffer as a kernel behind what `stream` has in flight finds it.
pub fn status(stream: &Stream, ptr: DevicePtr) -> Result<i64> {
    let copy = Tensor::alloc(stream.device(), DType::I64, &[1, 2])?;
    // SAFETY: the status has 8 bytes, and lives as long as the caller's buffer. The copy has more,
    // and is live until it has been read.
    unsafe { stream.copy(copy.ptr(), ptr, 8)? };
    Ok(copy.to_host::<i64>(stream)?[0])
}

/// The rows of a tensor as a kernel behind what `stream` has in flight finds them, whether or not
/// the operation that fills it has failed.
pub fn found(stream: &Stream, tensor: &Tensor<'_>) -> Result<Vec<Vec<u8>>> {
    let row_bytes = tensor.columns() * tensor.dtype().size();
    // SAFETY: the tensor is live, and `bare` is read before it is dropped.
    let bare = unsafe { Tensor::from_raw(tensor.ptr(), DType::U8, &[tensor.rows(), tensor.row_stride()]) };
    let bytes = bare.to_host::<u8>(stream)?;
    Ok(bytes.chunks(tensor.row_stride() as usize).map(|row| row[..row_bytes as usize].to_vec()).collect())
}

/// Whether a row is what a combine leaves that failed.
pub fn is_nan(row: &[u8]) -> bool {
    row.chunks(2).all(|number| number == [0xff, 0x7f])
}

/// Records a failed check if a stream finishes although it should wait for work behind a gate.
fn must_wait(rank: &mut Rank, stream: &Stream, what: &str) -> Result<()> {
    let passed = event(stream)?.wait_timeout(WHILE)?;
    rank.check(!passed, format!("{what} did not wait"));
    Ok(())
}

#[test]
fn inputs_may_be_dropped_before_their_dispatch_has_begun() {
    let case = Case::new(turns::<1>()[0].routing.clone(), ROW as u32);
    setup().max_topk(TOPK).run(|rank| {
        let (gate, side) = (Gate::new(rank.device())?, Stream::new(rank.device())?);
        let expected = rank.expect(&case);
        let (topk_idx, topk_weights) = rank.topk(&case)?;
        let (x, _) = rank.payload(&case, 0)?;
        let shapes = [&*topk_idx, &*topk_weights, &x].map(|input| (input.dtype(), input.shape().to_vec()));
        let mut place = rank.place()?;
        gate.hold(&rank.stream)?;
        let layout = rank.layout(&topk_idx, case.routing.num_experts)?;
        let request = DispatchRequest::new(&x, &layout).topk_weights(&topk_weights);
        let output = rank.dispatch(&mut place, request.counts(rank.on_device()))?;
        drop((layout, topk_idx, topk_weights, x));

        // Reusing the memory of the inputs too early would spoil them.
        let mut others = Vec::new();
        for (dtype, shape) in shapes.iter().cycle().take(24) {
            let other = tensor(rank, *dtype, shape);
            // SAFETY: the tensor's memory is live until the synchronise.
            unsafe { side.fill(other.ptr(), POISON, other.rows() * other.row_stride())? };
            others.push(other);
        }
        side.synchronize()?;
        must_wait(rank, &rank.stream.clone(), "the dispatch")?;
        gate.open();
        rank.stream.synchronize()?;
        rank.buffer.check_dispatch(&output.handle, &rank.stream)?;
        rank.check_received(&case, 0, &expected.plan.recv_src, "dispatch", &output)?;
        let metadata = rank.compare_metadata(&case, &expected, &output)?;
        rank.note(metadata);
        Ok(())
    });
}

/// Sums that another stream than the operations' still reads.
struct SumsInUse {
    /// Holds `side` in front of its read.
    gate: Gate,
    side: Stream,
    /// The copy that `side` makes of the sums.
    kept: Tensor<'static>,
    back: Combined,
    /// The dispatch's. Its rows are not in use any more.
    handle: DispatchHandle,
    /// Rows for later combines, whose sums are zeros.
    zeros: Tensor<'static>,
}

impl SumsInUse {
    fn new(rank: &mut Rank, turn: &Turn) -> Result<SumsInUse> {
        let (gate, side) = (Gate::new(rank.device())?, Stream::new(rank.device())?);
        let inputs = Inputs::upload(turn, rank)?;
        let zeros = vec![vec![0; ROW as usize]; rank.buffer.capacity() as usize];
        let zeros = rank.upload_rows(DType::Bf16, HIDDEN as u64, &zeros)?;
        let mut place = rank.place()?;
        let (output, back) = echo(rank, &mut place, &inputs)?;
        let handle = output.handle.clone();
        drop(output);

        side.wait(&event(&rank.stream)?)?;
        gate.hold(&side)?;
        let kept = keep(&side, &back.combined_x, back.combined_x.rows())?;
        Ok(SumsInUse { gate, side, kept, back, handle, zeros })
    }
}

#[test]
fn sums_that_another_stream_still_reads_are_not_handed_out_again() {
    let [turn] = turns();
    setup().run(|rank| {
        let SumsInUse { gate, side, kept, back, handle, zeros } = SumsInUse::new(rank, &turn)?;
        let at = back.combined_x.ptr();
        drop(back);
        let mut later = Vec::new();
        for _ in 0..3 {
            later.push(rank.combine(CombineRequest::new(&zeros, &handle))?);
        }
        let again = later.iter().any(|back| back.combined_x.ptr() == at);
        rank.check(again, "a later combine is given the memory of the sums that were dropped");
        must_wait(rank, &rank.stream.clone(), "a combine that was given memory which a stream still reads")?;
        gate.open();
        side.synchronize()?;
        rank.outcome()?;
        check_rows(rank, "the other stream's copy", &kept, &turn.sums[rank.rank as usize])?;
        for back in &later {
            let rows = rank.row_bytes(&back.combined_x)?;
            rank.equal("later sums", &rows, &vec![vec![0; ROW as usize]; rows.len()]);
        }
        Ok(())
    });
}

/// Sums that are dropped while a step is recorded, which is given their memory.
#[test]
fn a_recording_waits_for_readers_of_memory_that_it_is_given() {
    let [turn] = turns();
    setup().run(|rank| {
        let SumsInUse { gate, side, kept, back, handle, zeros } = SumsInUse::new(rank, &turn)?;
        let (stream, mut back, mut runs) = (rank.stream.clone(), Some(back), 0);
        let recorded = rank.buffer.capture(&stream, |buffer, order| {
            runs += 1;
            if runs == 2 {
                back = None;
            }
            // The second one is given the memory of the sums.
            let request = CombineRequest::new(&zeros, &handle);
            (0..runs).map(|_| buffer.combine(request, order)).collect::<Result<Vec<_>>>()
        });
        refused(recorded, &["capture", "work before it has not ended in"]);
        gate.open();
        side.synchronize()?;
        check_rows(rank, "the other stream's copy", &kept, &turn.sums[rank.rank as usize])?;
        rank.outcome()
    });
}

#[test]
fn received_rows_that_another_stream_still_reads_are_not_overwritten() {
    let [first, second] = turns();
    // The rows are either dropped or only detached from the place.
    for is_detached in [false, true] {
        setup().run(|rank| {
            let (gate, side) = (Gate::new(rank.device())?, Stream::new(rank.device())?);
            let inputs = [Inputs::upload(&first, rank)?, Inputs::upload(&second, rank)?];
            let (next, counts) = (inputs[1].layout(rank)?, rank.on_device());
            let mut place = rank.place()?;
            let output = inputs[0].dispatch(rank, &mut place)?;
            // Kept, so that it is the rows alone for which a dispatch can have to wait.
            let _handle = output.handle.clone();

            // Peers must not write either before the reader is through, and those have none.
            let is_reader = rank.rank == 0;
            side.wait(&event(&rank.stream)?)?;
            if is_reader {
                gate.hold(&side)?;
            }
            let want = first.recv(rank.rank);
            let kept = keep(&side, &output.recv_x, want.len() as u64)?;
            let _detached = is_detached.then_some(output).map(|output| output.detach());
            let request = DispatchRequest::new(&inputs[1].x, &next).counts(counts);
            let output = rank.dispatch(&mut place, request)?;
            if is_reader {
                must_wait(rank, &rank.stream.clone(), "a dispatch to a place that a stream still reads")?;
                gate.open();
            }
            side.synchronize()?;
            rank.stream.synchronize()?;
            rank.buffer.check_dispatch(&output.handle, &rank.stream)?;
            check_rows(rank, "the other stream's copy", &kept, &want)?;
            check_rows(rank, "the rows after it", &output.recv_x, &second.recv(rank.rank))
        });
    }
}

/// A step that dispatches and combines; its output is the sums.
pub fn captured_echo(rank: &mut Rank, place: &mut Place, inputs: &Inputs) -> Result<Step<Combined>> {
    let stream = rank.stream.clone();
    rank.buffer.capture(&stream, |buffer, order| Ok(echo_on(buffer, place, order, &stream, inputs)?.1))
}

/// Fences of a buffer leave out the streams of other buffers, which are ordered by themselves.
#[test]
fn sums_that_another_buffer_still_sends_are_not_overwritten() {
    let [first, second] = turns();
    let setup = setup();
    setup.run(|rank| {
        let mut other = Rank::new(rank.device().clone(), rank.group.clone(), setup.options.clone())?;
        let (gate, side) = (Gate::new(rank.device())?, unfenced_stream(rank.device())?);
        let (stream, mut place, mut other_place) = (rank.stream.clone(), rank.place()?, other.place()?);
        let inputs = [Inputs::upload(&first, rank)?, Inputs::upload(&second, rank)?];
        let (_, sums) = echo(rank, &mut place, &inputs[0])?;
        rank.stream.synchronize()?;

        gate.hold(&side)?;
        let held = event(&side)?;
        let order = StreamOrder::comm(&stream).after(&held).asynchronous();
        let layout = inputs[0].layout_on(&mut other.buffer, StreamOrder::on(&stream))?;
        let request = DispatchRequest::new(&sums.combined_x, &layout).counts(rank.on_device());
        let received = other.buffer.dispatch(&mut other_place, request, order)?;
        drop(sums);
        // Each is given the memory of the sums before it, of which the first are held.
        for _ in 0..2 {
            echo(rank, &mut place, &inputs[1])?;
        }
        must_wait(rank, &stream, "a combine into sums that another buffer sends")?;
        gate.open();
        if let Some(event) = &received.event {
            stream.wait(event)?;
        }
        let want = oracle::recv_rows(&first.plans[rank.rank as usize], &first.sums);
        check_rows(rank, "recv_x of the sums", &received.recv_x, &want)?;
        rank.outcome()
    });
}

#[test]
fn a_step_is_not_launched_within_a_capture() {
    let [turn] = turns();
    setup().run(|rank| {
        let (stream, (inputs, mut place)) = (rank.stream.clone(), turn.begin(rank)?);
        let step = captured_echo(rank, &mut place, &inputs)?;
        let recorded = stream.capture(|| step.launch(&stream)).map(drop);
        refused(recorded, &["stream = captured", "launch it outside of captures"]);
        step.launch(&stream)?;
        check_sums(rank, "combined_x", step.output(), &turn)
    });
}

/// A recording keeps memory that its first run has used again and again.
#[test]
fn a_step_may_drop_results_that_it_records() {
    let [first, _] = turns();
    setup().run(|rank| {
        let (stream, (inputs, mut place)) = (rank.stream.clone(), first.begin(rank)?);
        let step = rank.buffer.capture(&stream, |buffer, order| {
            for _ in 0..3 {
                drop(echo_on(buffer, &mut place, order, &stream, &inputs)?);
            }
            Ok(echo_on(buffer, &mut place, order, &stream, &inputs)?.1)
        })?;
        for run in 0..2 {
            step.launch(&stream)?;
            step.check(&stream)?;
            check_sums(rank, &format!("combined_x of run {run}"), step.output(), &first)?;
        }
        Ok(())
    });
}

#[test]
fn a_step_needs_nothing_that_its_caller_keeps() {
    let [first, second] = turns();
    setup().run(|rank| {
        let stream = rank.stream.clone();
        let (step, shapes) = {
            let (inputs, mut place) = first.begin(rank)?;
            let shapes = [&*inputs.topk_idx, &inputs.x].map(|input| (input.dtype(), input.shape().to_vec()));
            let step = rank.buffer.capture(&stream, |buffer, order| {
                let (output, back) = echo_on(buffer, &mut place, order, &stream, &inputs)?;
                Ok((output.detach(), back))
            })?;
            (step, shapes)
        };
        let mut place = rank.place()?;
        let mut others = Vec::new();
        for (dtype, shape) in shapes.iter().cycle().take(16) {
            others.push(tensor(rank, *dtype, shape));
            rank.poison(&others[others.len() - 1])?;
        }
        for run in 0..3 {
            // Eager work takes all memory that is already free, and writes it.
            let inputs = Inputs::upload(&second, rank)?;
            for _ in 0..2 {
                let (output, back) = echo(rank, &mut place, &inputs)?;
                check_rows(rank, "eager recv_x", &output.recv_x, &second.recv(rank.rank))?;
                check_sums(rank, "eager combined_x", &back, &second)?;
            }
            step.launch(&stream)?;
            step.check(&stream)?;
            let (output, back) = step.output();
            let recv_x = &output.at(&place)?.recv_x;
            check_rows(rank, &format!("recv_x of run {run}"), recv_x, &first.recv(rank.rank))?;
            check_sums(rank, &format!("combined_x of run {run}"), back, &first)?;
        }
        Ok(())
    });
}

/// Sums of the run before would pass for results.
#[test]
fn a_step_does_not_run_again_once_a_peer_has_gone() {
    in_both_spreads(|rank, turn, inputs, place| {
        let stream = rank.stream.clone();
        let step = captured_echo(rank, place, inputs)?;
        step.launch(&stream)?;
        step.check(&stream)?;
        check_sums(rank, "combined_x", step.output(), turn)?;
        assert_eq!(status(&stream, rank.buffer.status_ptr())?, 0);
        if rank.rank == 1 {
            return Ok(());
        }
        // This run is the first without the peer.
        step.launch(&stream)?;
        assert_ne!(status(&stream, rank.buffer.status_ptr())?, 0);
        let read = step.output().combined_x.to_host::<u16>(&stream).map(drop);
        let launched = [step.launch(&stream), step.launch(&stream)];
        for outcome in launched.into_iter().chain([read]) {
            expect_gone(outcome);
        }
        Ok(())
    });
}

/// Sums and rows of the previous turn would look like results.
#[test]
fn rows_of_a_dispatch_without_a_plan_are_not_read() {
    in_both_spreads(|rank, turn, inputs, place| {
        let stream = rank.stream.clone();
        let experts = turn.routing.num_experts;
        drop(echo(rank, place, inputs)?);

        let mut ids = turn.routing.topk_idx[rank.rank as usize].clone();
        if rank.rank == 1 {
            ids[0][0] = experts.into();
        }
        let ids = rank.upload_typed(TOPK as usize, &ids)?;
        let layout = rank.layout(&ids, experts)?;
        let request = DispatchRequest::new(&inputs.x, &layout).counts(rank.on_device());
        let output = rank.dispatch(place, request)?;
        let back = rank.combine(CombineRequest::new(&output.recv_x, &output.handle))?;
        let sources = output.recv_src_idx.as_ref().expect("the dispatch was not cached");
        let reads = [
            output.recv_x.to_host::<u16>(&stream).map(drop),
            sources.values(&stream).map(drop),
            output.handle.num_recv_tokens(&stream).map(drop),
            output.handle.send_head().values(&stream).map(drop),
            back.combined_x.to_host::<u16>(&stream).map(drop),
        ];
        for read in reads {
            let error = read.expect_err("rank 1 has an id out of range");
            assert!(matches!(error, Error::InvalidExpert { rank: 1 }), "{error}");
        }
        drop((output, back));
        let told = rank.buffer.check().expect_err("rank 1 has an id out of range");
        assert!(matches!(told, Error::InvalidExpert { rank: 1 }), "{told}");
        rank.buffer.check()?;

        let (_output, back) = echo(rank, place, inputs)?;
        check_sums(rank, "combined_x of the next turn", &back, turn)
    });
}

/// An engine that waits for an event reads what it likes behind it.
#[test]
fn the_event_of_a_failed_operation_gives_its_error() {
    in_both_spreads(|rank, _, inputs, place| {
        let stream = rank.stream.clone();
        let order = StreamOrder::on(&stream).asynchronous();
        let (output, back) = echo_on(&mut rank.buffer, place, order, &stream, inputs)?;
        let event = back.event.as_ref().expect("the call is asynchronous");
        event.synchronize()?;
        assert!(event.is_done()?);
        if rank.rank == 1 {
            return Ok(());
        }
        let request = CombineRequest::new(&output.recv_x, &output.handle);
        let back = rank.buffer.combine(request, order)?;
        let event = back.event.as_ref().expect("the call is asynchronous");
        let waits = [event.synchronize(), event.is_done().map(drop), event.wait_timeout(PATIENCE).map(drop)];
        for wait in waits {
            expect_gone(wait);
        }
        Ok(())
    });
}

/// A plan that fails ends what is along its handle, and nothing else.
#[test]
fn the_events_along_a_plan_that_failed_give_its_error() {
    in_both_spreads(|rank, turn, inputs, place| {
        let stream = rank.stream.clone();
        let order = StreamOrder::on(&stream).asynchronous();
        let layout = inputs.layout(rank)?;
        let most = turn.plans.iter().map(|plan| plan.num_recv_tokens).max().unwrap_or(0);
        let request = |most: u32| {
            DispatchRequest::new(&inputs.x, &layout).counts(Counts::OnDevice { capacity: most.into() })
        };
        let mut few = rank.buffer.dispatch(place, request(most - 1), order)?;
        let summed = rank.buffer.combine(CombineRequest::new(&few.recv_x, &few.handle), order)?;
        let (event, handle) = (few.event.take(), few.handle.clone());
        drop(few);
        let request_along = CachedDispatchRequest::new(&inputs.x, &handle);
        // Across nodes this requires more blocks than there are here.
        let cached = match rank.buffer.num_nodes() {
            1 => rank.buffer.dispatch_cached(place, request_along, order)?.event,
            _ => None,
        };
        let half = rank.buffer.dispatch_send(place, request(most - 1), order)?.receive(order)?.event;
        let good = rank.buffer.dispatch(place, request(most), order)?;
        let failed: Vec<Event> = [event, summed.event, cached, half].into_iter().flatten().collect();
        assert_eq!(failed.len(), if rank.buffer.num_nodes() == 1 { 4 } else { 3 });
        for event in failed {
            let waits =
                [event.synchronize(), event.is_done().map(drop), event.wait_timeout(PATIENCE).map(drop)];
            for wait in waits {
                assert!(matches!(wait, Err(Error::Capacity { .. })), "{wait:?}");
            }
        }
        good.event.expect("the call is asynchronous").synchronize()?;
        assert!(rank.buffer.check().is_err());
        rank.outcome()
    });
}

/// Steps whose plans fail, more often than the record of failed plans has room for.
#[test]
fn the_plans_of_steps_that_failed_are_told_of() {
    in_both_spreads(|rank, turn, inputs, place| {
        let stream = rank.stream.clone();
        let experts = turn.routing.num_experts;
        let step = captured_echo(rank, place, inputs)?;
        let good = turn.routing.topk_idx[rank.rank as usize].concat();
        let mut bad = good.clone();
        if rank.rank == 1 {
            bad[0] = experts.into();
        }
        for failures in [1, 3, 4, 9] {
            inputs.topk_idx.write(&stream, &bad)?;
            for _ in 0..failures {
                step.launch(&stream)?;
            }
            let read = step.output().combined_x.to_host::<u16>(&stream).map(drop);
            assert!(matches!(read, Err(Error::InvalidExpert { rank: 1 })), "{read:?}");
            let told = rank.buffer.check();
            assert!(matches!(told, Err(Error::InvalidExpert { rank: 1 })), "{told:?}");
            rank.buffer.check()?;
            inputs.topk_idx.write(&stream, &good)?;
            step.launch(&stream)?;
            check_sums(rank, "combined_x", step.output(), turn)?;
            rank.buffer.check()?;
        }
        Ok(())
    });
}

/// One rank's sums would lack rows of another: the rank gets none, and peers use no old rows.
#[test]
fn a_combine_of_fewer_rows_than_came_fails_on_every_rank() {
    let [turn] = turns();
    let ways = [(DType::Bf16, false), (DType::F16, false), (DType::Bf16, true)];
    for (nodes, (dtype, in_pool)) in SPREADS.into_iter().flat_map(|nodes| ways.map(|way| (nodes, way))) {
        let mut setup = setup().nodes(nodes);
        setup.fields().timeout = Duration::from_millis(200);
        setup.run(|rank| {
            let stream = rank.stream.clone();
            let (inputs, mut place) = turn.begin(rank)?;
            let output = inputs.dispatch(rank, &mut place)?;
            let received = output.handle.num_recv_tokens(&stream)?;
            let given = received - u32::from(rank.rank == 1);
            let handle = output.handle.clone();
            drop(output);
            let back = if in_pool {
                let rows = place.combine_rows(dtype, given.into(), HIDDEN as u64)?;
                rank.combine(CombineRequest::new(&rows, &handle))?
            } else {
                let rows = tensor(rank, dtype, &[given.into(), HIDDEN as u64]);
                rank.combine(CombineRequest::new(&rows, &handle))?
            };
            let read = match dtype {
                DType::F16 => back.combined_x.to_host::<f16>(&stream).map(drop),
                _ => back.combined_x.to_host::<u16>(&stream).map(drop),
            };
            if rank.rank == 1 {
                refused(read, &[&format!("{received} rows came, and it was given {given};")]);
            } else {
                assert!(matches!(read, Err(Error::PeerTimeout { peer: 1, .. })), "{read:?}");
            }
            let routing = &turn.routing;
            let waits = |token: &u32| {
                let ids = &routing.topk_idx[rank.rank as usize][*token as usize];
                ids.iter().any(|id| (0..i64::from(routing.num_experts)).contains(id))
            };
            let tokens: Vec<u32> = (0..handle.num_tokens()).filter(waits).collect();
            let sums = found(&stream, &back.combined_x)?;
            for token in &tokens {
                let sum = &sums[*token as usize];
                assert!(is_nan(sum), "rank {}, token {token} of {dtype}: {sum:?}", rank.rank);
            }
            assert!(rank.buffer.check().is_err());
            Ok(())
        });
    }
}

/// Peers may still gather rows of a rank whose combine timed out: a later combine in its stream
/// does not overwrite them.
#[test]
fn rows_of_a_combine_that_expired_stay_for_peers() {
    let [turn] = turns();
    for (nodes, dtype) in SPREADS.into_iter().flat_map(|nodes| [(nodes, DType::Bf16), (nodes, DType::F16)]) {
        let mut setup = setup().nodes(nodes);
        setup.fields().timeout = Duration::from_millis(200);
        setup.run(|rank| {
            let stream = rank.stream.clone();
            let (inputs, mut place) = turn.begin(rank)?;
            let handle = inputs.dispatch_exact(rank, &mut place)?.handle;
            rank.synchronize()?;
            if rank.rank == 0 {
                return rank.group.barrier(PATIENCE);
            }
            let of = |byte: u8| {
                let rows = handle.num_recv_tokens(&stream)? as usize;
                rank.upload_rows(dtype, HIDDEN as u64, &vec![vec![byte; ROW as usize]; rows])
            };
            let [first, second] = [of(1)?, of(2)?];
            for rows in [&first, &second] {
                drop(rank.combine(CombineRequest::new(rows, &handle))?);
            }
            let expired = rank.outcome();
            assert!(matches!(expired, Err(Error::PeerTimeout { peer: 0, .. })), "{expired:?}");
            let rows = place.combine_rows(dtype, first.rows(), HIDDEN as u64)?;
            assert_eq!(found(&stream, rows.tensor())?, vec![vec![1; ROW as usize]; first.rows() as usize]);
            rank.group.barrier(PATIENCE)
        });
    }
}

/// Kernels of a captured step read the counts in place of the host.
#[test]
fn a_plan_that_failed_has_no_rows_on_the_device() {
    in_both_spreads(|rank, turn, inputs, place| {
        let layout = inputs.layout(rank)?;
        let request = DispatchRequest::new(&inputs.x, &layout);
        // The tables of the failing ones lie where those of this one lay.
        drop(rank.dispatch(place, request)?);
        let most = turn.plans.iter().map(|plan| plan.num_recv_tokens).max().unwrap_or(0);
        let counts = Counts::OnDevice { capacity: u64::from(most) - 1 };
        let handle = rank.dispatch(place, request.counts(counts))?.handle;
        has_no_rows(rank, &handle)
    });
}

/// Checks that the plan of a dispatch failed, and that its counts on the device are zeros.
pub fn has_no_rows(rank: &mut Rank, handle: &DispatchHandle) -> Result<()> {
    let stream = rank.stream.clone();
    let told = rank.buffer.check_dispatch(handle, &stream);
    assert!(matches!(told, Err(Error::Capacity { .. })), "{told:?}");
    let mut tables = vec![
        ("num_recv_tokens", handle.num_recv_tokens_on_device()),
        ("num_recv_tokens_per_expert", handle.num_recv_tokens_per_expert()),
    ];
    if let Some(rows) = handle.by_expert() {
        tables.extend([("counts", rows.counts()), ("starts", rows.starts()), ("psum", rows.psum())]);
    }
    for (name, table) in tables {
        let entries = found(&stream, &table)?.concat();
        assert!(!entries.is_empty() && entries.iter().all(|&byte| byte == 0), "{name}: {entries:?}");
    }
    assert!(rank.buffer.check().is_err());
    Ok(())
}

/// A wait decides whether a stream takes part in a capture, and with it whether a call only records.
#[test]
fn events_decide_no_capture_unseen() {
    in_both_spreads(|rank, turn, inputs, _| {
        let (stream, side) = (rank.stream.clone(), Stream::new(rank.stream.device())?);
        let (ids, experts) = (&inputs.topk_idx, turn.routing.num_experts);
        // Work outside the buffer's capture must not allocate.
        let layouts =
            [(); 3].map(|()| rank.buffer.get_dispatch_layout(ids, experts, StreamOrder::on(&stream)));
        drop(layouts);
        stream.synchronize()?;
        let before = event(&stream)?;
        let graph = stream.capture(|| {
            // The buffer's stream stays outside.
            let order = StreamOrder::comm(&stream).after(&before).asynchronous();
            let outside = rank.buffer.get_dispatch_layout(ids, experts, order).map(drop);
            refused(outside, &["after = the given event", "was recorded in it"]);
            // The wait adds this stream to the capture.
            let fork = event(&stream)?;
            let order = StreamOrder::on(&side).after(&fork);
            let joins = rank.buffer.get_dispatch_layout(ids, experts, order).map(drop);
            refused(joins, &["after = the given event", "make the call once more"]);
            drop(rank.buffer.get_dispatch_layout(ids, experts, order)?);
            stream.wait(&event(&side)?)
        })?;
        // SAFETY: the recorded addresses are the buffer's and the rank's, which waits for the stream.
        unsafe { graph.launch(&stream)? };
        rank.outcome()
    });
}

/// The rows of an outstanding combine must stay during other launches.
#[test]
fn no_step_runs_between_the_halves_of_an_operation() {
    in_both_spreads(|rank, turn, inputs, place| {
        let stream = rank.stream.clone();
        let order = StreamOrder::on(&stream);
        let step = captured_echo(rank, place, inputs)?;
        let output = inputs.dispatch_exact(rank, place)?;
        let pending = rank.buffer.combine_send(CombineRequest::new(&output.recv_x, &output.handle), order)?;
        refused(step.launch(&stream), &["combine", "what it brings was not received"]);
        let back = pending.receive(order)?;
        check_sums(rank, "combined_x", &back, turn)?;
        drop(output);
        step.launch(&stream)?;
        check_sums(rank, "combined_x", step.output(), turn)
    });
}

/// A step that copies a tensor's rows into the pool.
#[test]
fn no_step_overwrites_combine_rows_that_are_given_out() {
    in_both_spreads(|rank, turn, inputs, place| {
        let stream = rank.stream.clone();
        let output = inputs.dispatch_exact(rank, place)?;
        let x = rank.upload_rows(DType::Bf16, HIDDEN as u64, &rank.row_bytes(&output.recv_x)?)?;
        let handle = output.handle.clone();
        drop(output);
        let step = rank
            .buffer
            .capture(&stream, |buffer, order| buffer.combine(CombineRequest::new(&x, &handle), order))?;
        let rows = place.combine_rows(DType::Bf16, x.rows(), HIDDEN as u64)?;
        refused(step.launch(&stream), &["place = 0", "its combine rows are given out"]);
        drop(rows);
        step.launch(&stream)?;
        check_sums(rank, "combined_x", step.output(), turn)
    });
}

/// A read on a stream that has not waited for the operation.
#[test]
fn results_are_read_behind_their_operations_on_any_stream() {
    in_both_spreads(|rank, turn, inputs, place| {
        let (stream, other) = (rank.stream.clone(), Stream::new(rank.stream.device())?);
        let want = turn.sums[rank.rank as usize].concat();
        for order in [StreamOrder::on(&stream), StreamOrder::comm(&stream).asynchronous()] {
            let (output, back) = echo_on(&mut rank.buffer, place, order, &stream, inputs)?;
            let sums = back.combined_x.to_host::<u16>(&other)?;
            assert_eq!(sums.into_iter().flat_map(u16::to_le_bytes).collect::<Vec<_>>(), want);
            drop(output);
        }
        let step = captured_echo(rank, place, inputs)?;
        for turn in 0..2 {
            if turn == 1 && rank.rank == 1 {
                return Ok(());
            }
            step.launch(&stream)?;
            let sums = step.output().combined_x.to_host::<u16>(&other);
            let sums = sums.map(|sums| sums.into_iter().flat_map(u16::to_le_bytes).collect::<Vec<_>>());
            if turn == 0 {
                assert_eq!(sums?, want);
            } else {
                assert!(matches!(sums, Err(Error::PeerTimeout { peer: 1, .. })), "{sums:?}");
            }
        }
        Ok(())
    });
}

/// Rows of one byte count and different types.
#[test]
fn ranks_whose_rows_have_different_types_are_told() {
    let [turn] = turns();
    for nodes in SPREADS {
        Setup::new(2, 2, 8, ROW).nodes(nodes).run(|rank| {
            let (inputs, mut place) = turn.begin(rank)?;
            let layout = inputs.layout(rank)?;
            let floats = tensor(rank, DType::F32, &[inputs.x.rows(), HIDDEN as u64 / 2]);
            let x = if rank.rank == 1 { &floats } else { &inputs.x };
            let error = rank.dispatch(&mut place, DispatchRequest::new(x, &layout)).unwrap_err();
            let Error::Mismatch { what: "dtype", ours, theirs, .. } = &error else { panic!("{error}") };
            let [one, two] = if rank.rank == 1 { ["f32", "bf16"] } else { ["bf16", "f32"] };
            assert_eq!((ours.as_str(), theirs.as_str()), (one, two), "{error}");

            // The buffer is whole: a handle of it is, and a dispatch along that has no such
            // exchange.
            let handle = rank.dispatch(&mut place, DispatchRequest::new(&inputs.x, &layout))?.handle;
            rank.dispatch_cached(&mut place, CachedDispatchRequest::new(x, &handle))?;
            let read = rank.outcome();
            let Err(Error::OtherCall { ours, theirs, .. }) = &read else { panic!("{read:?}") };
            assert!(ours != theirs && ours.starts_with("cached dispatch"), "{ours}, {theirs}");
            Ok(())
        });
    }
}

/// Kernels that read sums get no error.
#[test]
fn a_failed_combine_leaves_nan_or_right_sums() {
    let [turn] = turns();
    for (nodes, in_pool) in SPREADS.into_iter().flat_map(|nodes| [(nodes, false), (nodes, true)]) {
        let mut setup = setup().nodes(nodes);
        setup.fields().timeout = Duration::from_millis(200);
        setup.run(|rank| {
            let stream = rank.stream.clone();
            let (inputs, mut place) = turn.begin(rank)?;
            let output = inputs.dispatch_exact(rank, &mut place)?;
            if rank.rank == 1 {
                return Ok(());
            }
            let rows = output.combine_rows(DType::Bf16, HIDDEN as u64)?;
            let request = if in_pool {
                CombineRequest::new(&rows, &output.handle)
            } else {
                drop(rows);
                CombineRequest::new(&output.recv_x, &output.handle)
            };
            let back = rank.combine(request)?;
            let kept = keep(&stream, &back.combined_x, turn.sums[0].len() as u64)?;
            let got = rank.row_bytes(&kept)?;
            assert!(matches!(rank.buffer.check(), Err(Error::PeerTimeout { peer: 1, .. })));
            let missing = rank.buffer.missing_tokens()?;
            assert!(!missing.is_empty(), "in_pool: {in_pool}, {got:?}");
            for (token, (got, want)) in (0..).zip(got.iter().zip(&turn.sums[0])) {
                let is_right = if missing.contains(&token) { is_nan(got) } else { got == want };
                assert!(is_right, "in_pool: {in_pool}, token {token} of {missing:?}: {got:?}, {want:?}");
            }
            Ok(())
        });
    }
}

/// A graph that is replayed after a peer is lost leaves sums of the previous run. Kernels and the
/// host can read which sums those are.
#[test]
fn tokens_that_a_replay_leaves_without_sums_are_noted() {
    let [turn] = turns();
    for nodes in SPREADS {
        let mut setup = setup().nodes(nodes);
        setup.fields().nan_on_failure = false;
        setup.run(|rank| {
            let stream = rank.stream.clone();
            let (inputs, mut place) = turn.begin(rank)?;
            let step = captured_echo(rank, &mut place, &inputs)?;
            step.launch(&stream)?;
            step.check(&stream)?;
            assert!(rank.buffer.missing_tokens()?.is_empty());
            if rank.rank == 1 {
                return Ok(());
            }
            step.launch(&stream)?;
            let tokens = turn.sums[0].len();
            let mask = Tensor::alloc(stream.device(), DType::I64, &[1, 2])?;
            // SAFETY: the mask has a byte for each token that the buffer is for, and stays as long
            // as it.
            unsafe { stream.copy(mask.ptr(), rank.buffer.missing_ptr(), tokens as u64)? };
            let mask: Vec<u8> =
                mask.to_host::<i64>(&stream)?.into_iter().flat_map(i64::to_le_bytes).collect();
            assert_eq!(mask[..tokens], [1].repeat(tokens));
            assert_eq!(rank.buffer.missing_tokens()?, (0..tokens as u32).collect::<Vec<_>>());
            let kept = keep(&stream, &step.output().combined_x, tokens as u64)?;
            assert_eq!(rank.row_bytes(&kept)?, turn.sums[0]);
            Ok(())
        });
    }
}

/// A group that shrinks by one of two dead ranks waits a whole time-out for the other one.
#[test]
fn a_timeout_names_all_ranks_that_did_not_come() {
    const GONE: [u32; 2] = [1, 3];
    let turn = Turn::random(0, &[8, 5, 7, 6], 1);
    let each = |transport| Some(NodeLinks { ranks_per_node: 1, transport, queues: 1 });
    let spreads = [None, each(TransportKind::Direct), each(TransportKind::Shm)];
    for (nodes, is_combine) in spreads.into_iter().flat_map(|nodes| [(nodes, false), (nodes, true)]) {
        let mut setup = Setup::new(4, 1, 8, ROW).nodes(nodes);
        setup.fields().timeout = Duration::from_millis(200);
        setup.run(|rank| {
            let (inputs, mut place) = turn.begin(rank)?;
            let is_gone = GONE.contains(&rank.rank);
            if !is_combine && is_gone {
                return Ok(());
            }
            let output = inputs.dispatch(rank, &mut place)?;
            if is_combine {
                rank.stream.synchronize()?;
                if is_gone {
                    return Ok(());
                }
                rank.combine(CombineRequest::new(&output.recv_x, &output.handle))?;
            }
            let error = rank.outcome().expect_err("two ranks have gone");
            let Error::PeerTimeout { peer, place, late_ranks, .. } = &error else { panic!("{error}") };
            // The wait that expired first may be for one that has entered, and waits as long
            // itself.
            let late: Vec<u32> =
                late_ranks.iter().copied().filter(|r| GONE.contains(r) || r != peer).collect();
            assert_eq!(late, GONE, "{error}");
            assert_eq!(*place, is_combine.then_some(0), "{error}");
            assert!(!GONE.contains(peer) || error.to_string().contains("ranks 1 and 3 may"), "{error}");
            Ok(())
        });
    }
}

/// Rows in use are not overwritten while they are borrowed.
#[test]
fn a_step_does_not_run_while_rows_in_its_place_are_borrowed() {
    let [turn] = turns();
    setup().run(|rank| {
        let stream = rank.stream.clone();
        let (inputs, mut place) = turn.begin(rank)?;
        let step = captured_echo(rank, &mut place, &inputs)?;
        let (output, _) = echo(rank, &mut place, &inputs)?;
        refused(step.launch(&stream), &["place = 0", "in use", "drop or detach them"]);
        drop(output);
        step.launch(&stream)?;
        step.check(&stream)?;
        check_sums(rank, "combined_x", step.output(), &turn)
    });
}

#[test]
fn a_detached_output_says_that_it_was_overwritten_and_where_it_lies() {
    let [first, second] = turns();
    let mut setup = setup();
    setup.fields().places = 2;
    setup.run(|rank| {
        let inputs = [Inputs::upload(&first, rank)?, Inputs::upload(&second, rank)?];
        let (mut place, other) = (rank.place()?, rank.buffer.place(1)?);
        let detached = echo(rank, &mut place, &inputs[0])?.0.detach();
        check_rows(rank, "recv_x", &detached.at(&place)?.recv_x, &first.recv(rank.rank))?;
        let elsewhere = detached.at(&other).expect_err("the rows lie in place 0");
        assert!(matches!(elsewhere, Error::Argument { argument: "place", .. }), "{elsewhere}");
        assert_names(&elsewhere, &["place = 1", "the rows lie in place 0"]);

        let (output, _) = echo(rank, &mut place, &inputs[1])?;
        drop(output);
        let stale = detached.at(&place).expect_err("a dispatch has overwritten the rows");
        assert!(matches!(stale, Error::StaleHandle(_)), "{stale}");
        assert_names(&stale, &["place 0", "overwritten since"]);
        // The routing has memory of its own.
        let rows = detached.handle().num_recv_tokens(&rank.stream)?;
        rank.equal("num_recv_tokens", &[rows as usize], &[first.recv(rank.rank).len()]);
        Ok(())
    });
}

#[test]
fn with_two_places_two_results_are_there_at_once() {
    let [first, second] = turns();
    let mut setup = setup();
    setup.fields().places = 2;
    setup.run(|rank| {
        let inputs = [Inputs::upload(&first, rank)?, Inputs::upload(&second, rank)?];
        let mut places = [rank.place()?, rank.buffer.place(1)?];
        let [left, right] = &mut places;
        let (one, one_back) = echo(rank, left, &inputs[0])?;
        let (two, two_back) = echo(rank, right, &inputs[1])?;
        rank.check(one.recv_x.ptr() != two.recv_x.ptr(), "places do not overlap");
        for ((output, back), turn) in
            [(&one, &one_back), (&two, &two_back)].into_iter().zip([&first, &second])
        {
            check_rows(rank, "recv_x", &output.recv_x, &turn.recv(rank.rank))?;
            check_sums(rank, "combined_x", back, turn)?;
            // The rows of each place can still be combined, in any order of the places.
            let again = rank.combine(CombineRequest::new(&output.recv_x, &output.handle))?;
            check_sums(rank, "combined_x once more", &again, turn)?;
        }
        rank.outcome()
    });
}

#[test]
fn an_error_has_the_scope_of_the_ranks_that_see_it() {
    let mut setup = Setup::new(RANKS, 1, TOKENS as u32, 64);
    setup.fields().places = 2;
    then_dispatch(setup, |rank, valid, place| {
        fn scope<T>(outcome: Result<T>) -> Option<Scope> {
            outcome.err().map(|error| error.scope())
        }
        let (this_rank, every_rank) = (Some(Scope::ThisRank), Some(Scope::EveryRank));
        if rank.rank == 0 {
            // The error is local: no other rank is affected.
            let wide = tensor(rank, DType::Bf16, &[TOKENS, 40]);
            let oversize = rank.dispatch(place, valid.request_of(&wide));
            assert_eq!(scope(oversize), this_rank);
            let request = valid.request().counts(Counts::OnDevice { capacity: 11 });
            assert_eq!(scope(rank.dispatch(place, request)), this_rank);
        }
        let request = valid.request().counts(Counts::OnDevice { capacity: 9 });
        let handle = rank.dispatch(place, request)?.handle;
        assert_eq!(scope(rank.buffer.check_dispatch(&handle, &rank.stream)), every_rank, "10 rows come");

        let ids = vec![vec![if rank.rank == 1 { i64::from(EXPERTS) } else { 0 }; 2]; TOKENS as usize];
        let ids = rank.upload_typed(2, &ids)?;
        let layout = rank.layout(&ids, EXPERTS)?;
        let error = rank.dispatch(place, valid.request_along(&layout)).expect_err("an id is out of range");
        assert!(matches!(error, Error::InvalidExpert { rank: 1 }), "{error}");
        assert_eq!(error.scope(), Scope::EveryRank);
        let own = layout.validate(&rank.stream);
        assert_eq!(scope(own), (rank.rank == 1).then_some(Scope::ThisRank));

        let layout = rank.layout(&valid.topk_idx, if rank.rank == 1 { 2 * EXPERTS } else { EXPERTS })?;
        let error = rank.dispatch(place, valid.request_along(&layout)).expect_err("other experts");
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
        assert_eq!(error.scope(), Scope::EveryRank);

        let mut other = rank.buffer.place(1)?;
        let there = if rank.rank == 1 { &mut other } else { &mut *place };
        let error = rank.dispatch(there, valid.request()).expect_err("other places");
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
        assert_names(&error, &["disagree on place: ", "0", "1"]);
        assert_eq!(error.scope(), Scope::EveryRank);
        Ok(())
    });
}

#[test]
fn calls_on_two_streams_come_in_the_order_in_which_they_were_made() {
    let turns = turns::<10>();
    setup().run(|rank| {
        let (gate, side) = (Gate::new(rank.device())?, Stream::new(rank.device())?);
        let stream = rank.stream.clone();
        let inputs: Vec<_> = turns.iter().map(|turn| Inputs::upload(turn, rank)).collect::<Result<_>>()?;
        let mut place = rank.place()?;
        let mut kept = Vec::new();
        for (index, (turn, inputs)) in turns.iter().zip(&inputs).enumerate() {
            // No event orders the combine after the dispatch, or the next layout after the combine.
            let layout = inputs.layout(rank)?;
            gate.hold(&stream)?;
            let request = DispatchRequest::new(&inputs.x, &layout).counts(rank.on_device());
            let output = rank.buffer.dispatch(&mut place, request, StreamOrder::on(&stream))?;
            let request = CombineRequest::new(&output.recv_x, &output.handle);
            let back = rank.buffer.combine(request, StreamOrder::on(&side))?;
            let rows = keep(&stream, &output.recv_x, turn.recv(rank.rank).len() as u64)?;
            kept.push((rows, keep(&side, &back.combined_x, back.combined_x.rows())?));
            if index < 2 {
                must_wait(rank, &side, "a combine on another stream than its dispatch")?;
            }
            gate.open();
        }
        side.synchronize()?;
        stream.synchronize()?;
        rank.buffer.check()?;
        for (index, (turn, (rows, sums))) in turns.iter().zip(&kept).enumerate() {
            check_rows(rank, &format!("recv_x of turn {index}"), rows, &turn.recv(rank.rank))?;
            let want = &turn.sums[rank.rank as usize];
            check_rows(rank, &format!("combined_x of turn {index}"), sums, want)?;
        }
        Ok(())
    });
}

#[test]
fn received_rows_outlive_their_buffer_and_its_work_in_flight() {
    let [first, second] = turns();
    let setup = setup();
    run_ranks(2, |_, group| {
        let mut rank = Rank::join(&setup, group)?;
        let gate = Gate::new(rank.device())?;
        let inputs = [Inputs::upload(&first, &rank)?, Inputs::upload(&second, &rank)?];
        let mut place = rank.place()?;
        gate.hold(&rank.stream)?;
        echo(&mut rank, &mut place, &inputs[0])?;
        let (output, back) = echo(&mut rank, &mut place, &inputs[1])?;
        let received = output.detach();
        let Rank { rank: number, group, stream, buffer, .. } = rank;
        let side = Stream::new(stream.device())?;
        while_held(&gate, || drop(buffer));
        stream.synchronize()?;
        let want = second.recv(number);
        let flat = |rows: &[Vec<u8>]| values_of::<u16>(&rows.concat());
        let got = received.at(&place)?.recv_x.to_host::<u16>(&stream)?;
        assert_eq!(got[..want.len() * HIDDEN], flat(&want));
        let sums = back.combined_x.to_host::<u16>(&stream)?;
        assert_eq!(sums, flat(&second.sums[number as usize]));

        // A stream must still read the rows when their last owner is dropped.
        gate.hold(&side)?;
        let kept = keep(&side, &received.at(&place)?.recv_x, want.len() as u64)?;
        while_held(&gate, || drop((place, received, back)));
        assert_eq!(kept.to_host::<u16>(&side)?, flat(&want));
        stream.synchronize()?;
        group.barrier(PATIENCE)
    });
}

#[test]
fn host_reads_of_local_operations_wait_for_them() {
    setup().run(|rank| {
        let (gate, side) = (Gate::new(rank.device())?, Stream::new(rank.device())?);
        let stream = rank.stream.clone();
        let ids = TypedTensor::from_host(&stream, &[3, 1], &[0i32, 1, 1])?;
        let two = TypedTensor::from_host(&stream, &[1], &[2i32])?;
        stream.synchronize()?;
        gate.hold(&side)?;
        let held = event(&side)?;
        let order = StreamOrder::comm(&stream).after(&held).asynchronous();
        let layout = rank.buffer.get_dispatch_layout(&ids, 2, order)?;
        let first = rank.buffer.first_tokens(&ids, &two, order)?;
        let (mut counts, mut entries) = (Ok(Vec::new()), Ok(Vec::new()));
        while_held(&gate, || {
            counts = layout.num_tokens_per_rank().values(&stream);
            entries = first.values(&stream);
        });
        let (counts, entries) = (counts?, entries?);
        rank.check(counts == [1, 2], format!("num_tokens_per_rank is {counts:?}"));
        rank.check(entries == [0, 1, -1], format!("first tokens are {entries:?}"));
        Ok(())
    });
}

#[test]
fn a_step_whose_buffer_is_gone_does_not_run() {
    let [turn] = turns();
    let setup = setup();
    setup.run(|rank| {
        let mut other = Rank::new(rank.device().clone(), rank.group.clone(), setup.options.clone())?;
        let stream = other.stream.clone();
        let (inputs, mut place) = turn.begin(&other)?;
        let step = other
            .buffer
            .capture(&stream, |buffer, order| Ok(echo_on(buffer, &mut place, order, &stream, &inputs)?.1))?;
        step.launch(&stream)?;
        step.check(&stream)?;
        check_sums(rank, "combined_x", step.output(), &turn)?;
        other.synchronize()?;
        drop((place, other));
        let gone = step.launch(&stream).expect_err("its buffer is gone");
        assert!(matches!(gone, Error::StaleHandle(_)), "{gone}");
        assert_names(&gone, &["its buffer was dropped"]);
        // The results of the last run are still there.
        check_sums(rank, "combined_x", step.output(), &turn)?;
        drop(step);
        rank.synchronize()
    });
}

#[test]
fn combine_rows_are_one_callers_at_a_time() {
    let mut setup = Setup::new(RANKS, 1, TOKENS as u32, 64);
    setup.fields().places = 2;
    then_dispatch(setup, |rank, valid, place| {
        let twice = ["place = 0", "given out already", "drop those first"];
        let rows = place.combine_rows(DType::Bf16, 1, 8)?;
        refused(place.combine_rows(DType::Bf16, 1, 8), &twice);
        drop(rows);

        let output = rank.dispatch(place, valid.request())?;
        let rows = output.combine_rows(DType::Bf16, 8)?;
        refused(output.combine_rows(DType::Bf16, 8), &twice);
        let x = tensor(rank, DType::Bf16, &[2 * TOKENS, 8]);
        let parts = ["place = 0", "combine rows are given out", "combine those, or drop them first"];
        refused(rank.combine(CombineRequest::new(&x, &output.handle)), &parts);

        // Rows of another place are rejected.
        let other = rank.buffer.place(1)?;
        let elsewhere = other.combine_rows(DType::Bf16, 2 * TOKENS, 8)?;
        let parts = ["rows of place 1", "the dispatch went to place 0"];
        refused(rank.combine(CombineRequest::new(&elsewhere, &output.handle)), &parts);

        rank.combine(CombineRequest::new(&rows, &output.handle))?;
        drop(rows);
        rank.combine(CombineRequest::new(&x, &output.handle))?;
        rank.stream.synchronize()
    });
}

/// A ready word has 24 bits of the number of its operation, and packets and the abort word have the
/// low half. Dispatches have odd and even numbers.
#[test]
fn operations_go_on_where_their_number_wraps() {
    let turns = turns::<4>();
    let shm = NodeLinks { ranks_per_node: 1, transport: TransportKind::Shm, queues: 1 };
    let direct = NodeLinks { transport: TransportKind::Direct, ..shm };
    for nodes in [None, Some(shm), Some(direct)] {
        setup().nodes(nodes).run(|rank| {
            let stream = rank.stream.clone();
            let order = StreamOrder::on(&stream);
            let mut place = rank.place()?;
            for border in [1 << 24, 1 << 32] {
                for (times, odd) in [(1, 0), (2, 1)] {
                    rank.synchronize()?;
                    run_ahead(&rank.buffer, &*rank.group.clone(), times * border - 4 - odd)?;
                    for turn in &turns {
                        let inputs = Inputs::upload(turn, rank)?;
                        let (_, back) = echo(rank, &mut place, &inputs)?;
                        check_sums(rank, "combined_x", &back, turn)?;
                    }
                }
                // In halves, dispatches alone.
                rank.synchronize()?;
                run_ahead(&rank.buffer, &*rank.group.clone(), 3 * border - 2)?;
                for turn in &turns {
                    let inputs = Inputs::upload(turn, rank)?;
                    let (layout, counts) = (inputs.layout(rank)?, rank.on_device());
                    let request = DispatchRequest::new(&inputs.x, &layout).counts(counts);
                    let received = rank.buffer.dispatch_send(&mut place, request, order)?.receive(order)?;
                    check_rows(rank, "recv_x", &received.recv_x, &turn.recv(rank.rank))?;
                }
            }
            Ok(())
        });
    }
}

#[test]
fn a_place_is_handed_out_once() {
    setup().run(|rank| {
        let place = rank.place()?;
        refused(rank.place(), &["place = 0", "handed out already"]);
        refused(rank.buffer.place(1), &["place = 1", "the buffer has 1"]);
        drop(place);
        rank.place().map(drop)
    });
}

/// A dispatch goes by the ids that its layout counted, which the caller has overwritten since. Each
/// rank has two experts, and a token for the first one of each rank.
#[test]
fn a_layout_keeps_the_ids_that_it_counted() {
    run_ranks(2, |number, group| {
        let device = open_device(VirtConfig { ordinal: number, ..VirtConfig::default() })?;
        let stream = Stream::new(&device)?;
        let shape = Shape { max_tokens: 2, hidden: 16, dtype: DType::F32, max_topk: 1, max_scales: 0 };
        let mut buffer = Buffer::new(device, &*group, Options::new(shape).rows_by_expert(4))?;
        let (mut place, order) = (buffer.place(0)?, StreamOrder::on(&stream));
        let row = |rank: u32, token: u32| [(2 * rank + token) as f32; 16];
        let x = [row(number, 0), row(number, 1)].concat();
        let x = Tensor::from_host(&stream, DType::F32, &[2, 16], &x)?;
        let weights = TypedTensor::from_host(&stream, &[2, 1], &[1.0, 1.0])?;
        let want = [row(0, number), row(1, number)].concat();
        for by_expert in [false, true] {
            let ids = TypedTensor::from_host(&stream, &[2, 1], &[0i64, 2])?;
            let layout = buffer.get_dispatch_layout(&ids, 4, order)?;
            ids.write(&stream, &[3i64; 2])?;
            let request = DispatchRequest::new(&x, &layout).topk_weights(&weights);
            let request = if by_expert { request.by_expert(1) } else { request };
            let received = buffer.dispatch(&mut place, request, order)?;
            let rows = received.recv_x.to_host::<f32>(&stream)?;
            assert_eq!(rows[..32], want, "by expert: {by_expert}");
            if let Some(ids) = &received.recv_topk_idx {
                assert_eq!(ids.values(&stream)?, [0, 0]);
            }
        }
        stream.synchronize()?;
        group.barrier(PATIENCE)
    });
}

/// Clones of the rows are a right to them as well. Behind the last one, another stream may still
/// read what a combine of a tensor overwrites.
#[test]
fn combine_rows_are_given_out_until_their_last_clone_is_dropped() {
    let [turn] = turns();
    setup().run(|rank| {
        let (gate, side) = (Gate::new(rank.device())?, Stream::new(rank.device())?);
        let (inputs, mut place) = turn.begin(rank)?;
        let received = inputs.dispatch(rank, &mut place)?;
        let rows = received.combine_rows(DType::Bf16, HIDDEN as u64)?;
        let clone = rows.tensor().clone();
        let want = vec![bf16::from_f32(7.0); rows.tensor().rows() as usize * HIDDEN];
        clone.write(&rank.stream, &want)?;
        rank.combine(CombineRequest::new(&rows, &received.handle))?;
        drop(rows);
        refused(received.combine_rows(DType::Bf16, HIDDEN as u64), &["place = 0", "given out already"]);
        let request = CombineRequest::new(&received.recv_x, &received.handle);
        refused(rank.combine(request), &["place = 0", "combine rows are given out"]);

        gate.hold(&side)?;
        let kept = keep(&side, &clone, clone.rows())?;
        drop(clone);
        let back = rank.combine(request)?;
        must_wait(rank, &rank.stream.clone(), "a combine over rows that a stream still reads")?;
        gate.open();
        assert_eq!(kept.to_host::<bf16>(&side)?, want);
        check_sums(rank, "combined_x", &back, &turn)
    });
}

/// A step keeps the memory of combine rows that its calls were given, and no right to them.
#[test]
fn a_step_leaves_combine_rows_to_others() {
    run_ranks(1, |_, group| {
        let device = open_device(VirtConfig::default())?;
        let stream = Stream::new(&device)?;
        let shape = Shape { max_tokens: 2, hidden: 32, dtype: DType::F32, max_topk: 1, max_scales: 0 };
        let mut buffer = Buffer::new(device, &*group, Options::new(shape))?;
        let mut place = buffer.place(0)?;
        let numbers: Vec<f32> = (0..64).map(|number| number as f32).collect();
        let x = Tensor::from_host(&stream, DType::F32, &[2, 32], &numbers)?;
        let ids = TypedTensor::from_host(&stream, &[2, 1], &[0i64, 0])?;
        let step = buffer.capture(&stream, |buffer, order| {
            let layout = buffer.get_dispatch_layout(&ids, 1, order)?;
            let request = DispatchRequest::new(&x, &layout).counts(Counts::OnDevice { capacity: 2 });
            let received = buffer.dispatch(&mut place, request, order)?;
            let rows = received.combine_rows(DType::F32, 32)?;
            buffer.copy_received(&received, rows.tensor(), None, order)?;
            buffer.combine(CombineRequest::new(&rows, &received.handle), order)
        })?;
        drop(place.combine_rows(DType::F32, 2, 32)?);
        step.launch(&stream)?;
        step.check(&stream)?;
        assert_eq!(step.output().combined_x.to_host::<f32>(&stream)?, numbers);
        Ok(())
    });
}

/// Results of earlier calls may take the sums of another one, and then have its error.
#[test]
fn sums_in_a_result_have_the_error_of_their_own_combine() {
    let [turn] = turns();
    setup().run(|rank| {
        let (inputs, mut place) = turn.begin(rank)?;
        let sums = echo(rank, &mut place, &inputs)?.1.combined_x;
        let layout = inputs.layout(rank)?;
        let request = DispatchRequest::new(&inputs.x, &layout).counts(Counts::OnDevice { capacity: 1 });
        let received = rank.dispatch(&mut place, request)?;
        let handle = received.handle.clone();
        rank.combine_into(CombineRequest::new(&received.recv_x, &handle), &sums, None)?;
        let read = sums.to_host::<bf16>(&rank.stream);
        assert!(matches!(read, Err(Error::Capacity { .. })), "{read:?}");
        Ok(())
    });
}

/// A write is behind the operation that fills a tensor, which ends later than the call.
#[test]
fn a_write_is_behind_the_combine_that_fills_the_tensor() {
    let [turn] = turns();
    setup().run(|rank| {
        let (gate, side) = (Gate::new(rank.device())?, Stream::new(rank.device())?);
        let stream = rank.stream.clone();
        let (inputs, mut place) = turn.begin(rank)?;
        let received = inputs.dispatch(rank, &mut place)?;
        let tokens = inputs.x.rows();
        let out = Tensor::alloc(rank.device(), DType::Bf16, &[tokens, HIDDEN as u64])?;
        gate.hold(&side)?;
        let held = event(&side)?;
        let order = StreamOrder::comm(&stream).after(&held).asynchronous();
        let request = CombineRequest::new(&received.recv_x, &received.handle);
        let event = rank.buffer.combine_into(request, &out, None, order)?.expect("of an asynchronous call");
        let zeros = vec![bf16::ZERO; tokens as usize * HIDDEN];
        let mut written = Ok(());
        while_held(&gate, || written = out.write(&stream, &zeros));
        written?;
        stream.wait(&event)?;
        assert_eq!(out.to_host::<bf16>(&stream)?, zeros);
        Ok(())
    });
}

/// The buffer's own stream has work that no other stream waits for.
#[test]
fn missing_tokens_are_those_of_asynchronous_combines_too() {
    let [turn] = turns();
    setup().timeout(Duration::from_millis(150)).run(|rank| {
        let stream = rank.stream.clone();
        let (inputs, mut place) = turn.begin(rank)?;
        let received = inputs.dispatch(rank, &mut place)?;
        stream.synchronize()?;
        if rank.rank == 1 {
            return Ok(());
        }
        let request = CombineRequest::new(&received.recv_x, &received.handle);
        rank.buffer.combine(request, StreamOrder::comm(&stream).asynchronous())?;
        let missing = rank.buffer.missing_tokens()?;
        assert!(!missing.is_empty());
        Ok(())
    });
}

/// Ranks give options as the hints and `Config::for_nodes` make them, or leave them out.
#[test]
fn options_that_change_nothing_are_accepted() {
    run_ranks(3, |number, group| {
        let device = open_device(VirtConfig { ordinal: number, ..VirtConfig::default() })?;
        let shape = Shape { max_tokens: 2, hidden: 16, dtype: DType::F32, max_topk: 1, max_scales: 0 };
        let options = Options::new(shape).num_rdma_bytes(number.into());
        drop(Buffer::new(device.clone(), &*group, options)?);
        let transport = TransportOptions::new(TransportKind::Shm);
        let options = Options::new(shape).ranks_per_node(1).transport(transport);
        let options = if number == 0 { options.config(Config::default().for_nodes(3)) } else { options };
        drop(Buffer::new(device, &*group, options)?);
        group.barrier(PATIENCE)
    });
}
