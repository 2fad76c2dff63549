//! High throughput in two halves, and how long calls wait for each rank.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use half::bf16;
use proptest::prelude::*;
use rand::Rng as _;

use epoxide::driver::virt::{CheckConfig, Checker, VirtConfig, VirtualGpu};
use epoxide::driver::{Device, Event, Stream};
use epoxide::group::ProcessGroup;
use epoxide::throughput::{
    Buffer, CachedDispatchRequest, CombineRequest, Config, Counts, DispatchHandle, DispatchLayout,
    DispatchRequest, Options, Place, Received, Shape,
};
use epoxide::transport::TransportKind;
use epoxide::{DType, Error, Result, StreamOrder, Tensor, TypedTensor};
use epoxide_testing::harness::{NodeLinks, PATIENCE, Rank, Setup, rank_counts, run_ranks, sleep};
use epoxide_testing::oracle::{Routing, Style};
use epoxide_testing::payload::rng_of;
use epoxide_testing::roundtrip::Case;
use epoxide_testing::tier;
use epoxide_vgpu::for_each_seed;

use crate::cases;
use crate::failing::{DriverCall, FailingDevice, REFUSAL};
use crate::property::{config, several_nodes};
use crate::spread::Spread;
use crate::valid::{refused, setup as two_ranks, then_dispatch};

const RANKS: u32 = 3;
const TOKENS: u32 = 5;
const HIDDEN: u64 = 8;
/// The delay of the slow rank, rank 1.
const DELAY: Duration = Duration::from_millis(60);
const DEADLINE: Duration = Duration::from_millis(400);
/// The times before.
const BEFORE: i64 = 1 << 40;

fn setup() -> Setup {
    let setup = Setup::new(RANKS, 2, TOKENS, 2 * HIDDEN).max_topk(4).timeout(DEADLINE);
    Setup { options: setup.options.rows_by_expert(1024), ..setup }
}

/// The inputs of a rank whose tokens go to all ranks, an expert of each, twice to rank 0.
struct Inputs {
    layout: DispatchLayout<'static>,
    x: Tensor<'static>,
}

impl Inputs {
    fn new(rank: &mut Rank) -> Result<Inputs> {
        let topk_idx = rank.upload_typed(4, &vec![vec![0i64, 1, 2, 5]; TOKENS as usize])?;
        let ones = vec![bf16::ONE; (u64::from(TOKENS) * HIDDEN) as usize];
        Ok(Inputs {
            layout: rank.layout(&topk_idx, 2 * RANKS)?,
            x: Tensor::from_host(&rank.stream, DType::Bf16, &[TOKENS.into(), HIDDEN], &ones)?,
        })
    }
}

/// The kind of a dispatch.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Exact,
    OnDevice,
    ByExpert,
    Cached,
}

const KINDS: [Kind; 4] = [Kind::Exact, Kind::OnDevice, Kind::ByExpert, Kind::Cached];

/// Dispatches, and adds up waits if there is a tensor for them.
fn dispatch<'p>(
    rank: &mut Rank,
    place: &'p mut Place,
    inputs: &Inputs,
    (kind, handle): (Kind, &DispatchHandle),
    waits: Option<&TypedTensor<'_, i64>>,
    in_halves: bool,
) -> Result<Received<'p>> {
    let stream = rank.stream.clone();
    let order = StreamOrder::on(&stream);
    if kind == Kind::Cached {
        let request = CachedDispatchRequest::new(&inputs.x, handle);
        let request = waits.into_iter().fold(request, CachedDispatchRequest::cumulative_wait_ns);
        return match in_halves {
            true => rank.buffer.dispatch_cached_send(place, request, order)?.receive(order),
            false => rank.buffer.dispatch_cached(place, request, order),
        };
    }
    let request = DispatchRequest::new(&inputs.x, &inputs.layout);
    let request = match kind {
        Kind::OnDevice => request.counts(rank.on_device()),
        Kind::ByExpert => request.by_expert(4),
        _ => request,
    };
    let request = waits.into_iter().fold(request, DispatchRequest::cumulative_wait_ns);
    match in_halves {
        true => rank.buffer.dispatch_send(place, request, order)?.receive(order),
        false => rank.buffer.dispatch(place, request, order),
    }
}

fn times(rank: &Rank) -> Result<TypedTensor<'static, i64>> {
    TypedTensor::from_host(&rank.stream, &[RANKS.into()], &[BEFORE; RANKS as usize])
}

/// Lets rank 1 begin late, when all ranks are here.
fn begin(rank: &Rank) -> Result<()> {
    rank.stream.synchronize()?;
    rank.group.barrier(PATIENCE)?;
    if rank.rank == 1 {
        sleep(rank.device(), DELAY);
    }
    Ok(())
}

/// Checks what the times have grown by since all were `since`, where rank 1 was late `calls` times.
/// Gives what they are now.
fn check(
    rank: &Rank,
    what: &str,
    waits: &TypedTensor<'_, i64>,
    since: &[i64],
    calls: i64,
) -> Result<Vec<i64>> {
    let now = waits.values(&rank.stream)?;
    let delay = DELAY.as_nanos() as i64;
    for (source, (now, before)) in (0..).zip(now.iter().zip(since)) {
        let waited = now - before;
        let is_right = match source {
            own if own == rank.rank => waited == 0,
            1 => waited >= calls * delay && waited < 2 * calls * delay,
            _ => (0..delay / 4).contains(&waited),
        };
        assert!(is_right, "{what}: rank {} waited {waited} ns for rank {source}, {calls} calls", rank.rank);
    }
    Ok(now)
}

/// The slow rank itself waits for no rank; the others wait for it alone.
#[test]
fn the_others_wait_for_a_slow_rank() {
    for in_halves in [false, true] {
        setup().run(|rank| {
            let (inputs, mut place) = (Inputs::new(rank)?, rank.place()?);
            let handle = rank.dispatch(&mut place, DispatchRequest::new(&inputs.x, &inputs.layout))?.handle;
            let (there, back) = (times(rank)?, times(rank)?);
            let [mut since_there, mut since_back] = [vec![BEFORE; 3], vec![BEFORE; 3]];
            for kind in KINDS {
                begin(rank)?;
                let received = dispatch(rank, &mut place, &inputs, (kind, &handle), Some(&there), in_halves)?;
                rank.outcome()?;
                let what = format!("{kind:?}, halves: {in_halves}");
                since_there = check(rank, &what, &there, &since_there, 1)?;
                begin(rank)?;
                let request =
                    CombineRequest::new(&received.recv_x, &received.handle).cumulative_wait_ns(&back);
                let order = StreamOrder::on(&rank.stream);
                let combined = match in_halves {
                    true => rank.buffer.combine_send(request, order)?.receive(order)?,
                    false => rank.buffer.combine(request, order)?,
                };
                rank.outcome()?;
                since_back = check(rank, &format!("combine of {what}"), &back, &since_back, 1)?;
                let sum = if kind == Kind::ByExpert { 4.0 } else { 3.0 };
                let sums = vec![bf16::from_f32(sum); (u64::from(TOKENS) * HIDDEN) as usize];
                assert_eq!(combined.combined_x.to_host::<bf16>(&rank.stream)?, sums, "{what}");
            }
            Ok(())
        });
    }
}

/// A rank that has entered a combine, and gathers late, is waited for at the end.
#[test]
fn a_rank_that_gathers_late_is_waited_for() {
    setup().run(|rank| {
        let (inputs, mut place) = (Inputs::new(rank)?, rank.place()?);
        let received = rank.dispatch(&mut place, DispatchRequest::new(&inputs.x, &inputs.layout))?;
        let back = times(rank)?;
        rank.synchronize()?;
        let order = StreamOrder::on(&rank.stream);
        let request = CombineRequest::new(&received.recv_x, &received.handle).cumulative_wait_ns(&back);
        let pending = rank.buffer.combine_send(request, order)?;
        if rank.rank == 1 {
            sleep(rank.stream.device(), DELAY);
        }
        drop(pending.receive(order)?);
        rank.outcome()?;
        check(rank, "combine", &back, &[BEFORE; 3], 1)?;
        Ok(())
    });
}

#[test]
fn replays_of_halves_add_up() {
    setup().run(|rank| {
        let (inputs, mut place) = (Inputs::new(rank)?, rank.place()?);
        let (there, back) = (times(rank)?, times(rank)?);
        let (stream, counts) = (rank.stream.clone(), rank.on_device());
        let step = rank.buffer.capture(&stream, |buffer, order| {
            let request = DispatchRequest::new(&inputs.x, &inputs.layout).counts(counts);
            let request = request.cumulative_wait_ns(&there);
            let received = buffer.dispatch_send(&mut place, request, order)?.receive(order)?;
            let request = CombineRequest::new(&received.recv_x, &received.handle).cumulative_wait_ns(&back);
            let combined = buffer.combine_send(request, order)?.receive(order)?;
            Ok((combined, received.detach()))
        })?;
        stream.synchronize()?;
        let since = there.values(&stream)?;
        for _ in 0..3 {
            begin(rank)?;
            step.launch(&stream)?;
        }
        step.check(&stream)?;
        check(rank, "three replays", &there, &since, 3)?;
        let sums = step.output().0.combined_x.to_host::<bf16>(&stream)?;
        assert_eq!(sums, vec![bf16::from_f32(3.0); sums.len()]);
        Ok(())
    });
}

/// Rank 1 times out in a dispatch that the others enter. The first half of rank 0 ends anyway; the
/// second half has the deadline of the call, and its error names rank 1.
#[test]
fn the_second_half_names_a_rank_whose_rows_do_not_come() {
    for (by_expert, in_halves) in [(false, false), (false, true), (true, false), (true, true)] {
        setup().run(|rank| {
            let (inputs, mut place) = (Inputs::new(rank)?, rank.place()?);
            let request = DispatchRequest::new(&inputs.x, &inputs.layout);
            let request = if by_expert { request.by_expert(2) } else { request };
            let handle = rank.dispatch(&mut place, request)?.handle;
            let waits = times(rank)?;
            rank.synchronize()?;
            let stream = rank.stream.clone();
            let (start, order) = (rank.now(), StreamOrder::on(&stream));
            let request = CachedDispatchRequest::new(&inputs.x, &handle);
            match rank.rank {
                1 => drop(rank.dispatch_cached(&mut place, request.timeout(DELAY / 4))?),
                2 => {
                    sleep(rank.device(), DELAY);
                    drop(rank.dispatch_cached(&mut place, request)?);
                }
                _ if in_halves => {
                    let pending = rank.buffer.dispatch_cached_send(&mut place, request, order)?;
                    stream.synchronize()?;
                    assert!(now(&stream) - start < DEADLINE / 2, "the first half waits for rows");
                    drop(pending.receive(order)?);
                }
                _ => drop(rank.dispatch_cached(&mut place, request.cumulative_wait_ns(&waits))?),
            }
            let error = rank.outcome().unwrap_err();
            let late = if rank.rank == 1 { 2 } else { 1 };
            let Error::PeerTimeout { peer, operation: "dispatch", waited, .. } = &error else {
                panic!("{error}")
            };
            assert!(*peer == late && (late == 2 || *waited >= DEADLINE), "rank {}: {error}", rank.rank);
            assert!(rank.now() - start < 2 * DEADLINE, "{error} after {:?}", rank.now() - start);
            if rank.rank == 0 && !in_halves {
                assert!(matches!(waits.values(&stream), Err(Error::PeerTimeout { peer: 1, .. })));
            }
            rank.group.barrier(PATIENCE)
        });
    }
}

fn now(stream: &Stream) -> Duration {
    epoxide_testing::harness::now(stream.device())
}

/// Without a second half no rows are gathered. The peers' errors name it.
#[test]
fn a_rank_without_its_second_half_is_named() {
    setup().run(|rank| {
        let (inputs, mut place) = (Inputs::new(rank)?, rank.place()?);
        let received = rank.dispatch(&mut place, DispatchRequest::new(&inputs.x, &inputs.layout))?;
        rank.synchronize()?;
        let stream = rank.stream.clone();
        let order = StreamOrder::on(&stream);
        let request = CombineRequest::new(&received.recv_x, &received.handle);
        let pending = rank.buffer.combine_send(request, order)?;
        if rank.rank == 1 {
            drop(pending);
            let broken = rank.buffer.combine(request, order);
            let refusal = ["combine", "its first half has run, but what it brings was not received"];
            refused(broken, &refusal);
            refused(rank.outcome(), &refusal);
        } else {
            drop(pending.receive(order)?);
            let error = rank.outcome().unwrap_err();
            let Error::PeerTimeout { peer: 1, operation: "combine", .. } = &error else { panic!("{error}") };
        }
        rank.group.barrier(PATIENCE)
    });
}

/// A combine of a tensor in halves copies its rows first, and is another call than one that does so
/// meanwhile.
#[test]
fn ranks_do_not_mix_whole_combines_of_tensors_with_halves() {
    setup().run(|rank| {
        let (inputs, mut place) = (Inputs::new(rank)?, rank.place()?);
        let received = rank.dispatch(&mut place, DispatchRequest::new(&inputs.x, &inputs.layout))?;
        rank.synchronize()?;
        let stream = rank.stream.clone();
        let (start, order) = (rank.now(), StreamOrder::on(&stream));
        let request = CombineRequest::new(&received.recv_x, &received.handle);
        match rank.rank {
            1 => drop(rank.buffer.combine_send(request, order)?.receive(order)?),
            _ => drop(rank.buffer.combine(request, order)?),
        }
        let error = rank.outcome().unwrap_err();
        assert!(matches!(error, Error::OtherCall { .. }), "{error}");
        assert!(rank.now() - start < DEADLINE, "{error}");
        rank.group.barrier(PATIENCE)
    });
}

/// A dispatch that moves no row ends, in halves too.
#[test]
fn a_refused_plan_ends_the_first_half() {
    then_dispatch(two_ranks(Spread::OneNode), |rank, valid, place| {
        let wrong = rank.upload_typed(2, &vec![vec![0i64, 77]; 5])?;
        let layout = rank.layout(&wrong, 4)?;
        let stream = rank.stream.clone();
        let request = valid.request_along(&layout);
        for _ in 0..2 {
            let sent = rank.buffer.dispatch_send(place, request, StreamOrder::on(&stream));
            assert!(matches!(sent, Err(Error::InvalidExpert { .. })), "{sent:?}");
        }
        // The host gets this error later.
        let request = request.counts(Counts::OnDevice { capacity: rank.buffer.capacity() });
        let order = StreamOrder::on(&stream);
        let handle = rank.buffer.dispatch_send(place, request, order)?.receive(order)?.handle;
        let outcome = rank.buffer.check_dispatch(&handle, &stream);
        assert!(matches!(outcome, Err(Error::InvalidExpert { .. })), "{outcome:?}");
        assert!(rank.buffer.check().is_err());
        Ok(())
    });
}

#[test]
fn times_have_an_entry_for_each_rank_of_one_node() {
    then_dispatch(two_ranks(Spread::OneNode), |rank, valid, place| {
        let three = TypedTensor::from_host(&rank.stream, &[3], &[0i64; 3])?;
        let named = ["cumulative_wait_ns has shape [3]", "[num_ranks = 2]"];
        refused(rank.dispatch(place, valid.request().cumulative_wait_ns(&three)), &named);
        let handle = rank.dispatch(place, valid.request())?.handle;
        let cached = CachedDispatchRequest::new(&valid.x, &handle).cumulative_wait_ns(&three);
        refused(rank.dispatch_cached(place, cached), &named);
        let rows = Tensor::alloc(rank.device(), DType::Bf16, &[10, 8])?;
        let request = CombineRequest::new(&rows, &handle).cumulative_wait_ns(&three);
        refused(rank.combine(request), &named);
        Ok(())
    });
    then_dispatch(two_ranks(Spread::SeveralNodes), |rank, valid, place| {
        let times = TypedTensor::from_host(&rank.stream, &[2], &[0i64; 2])?;
        let named = ["cumulative_wait_ns = given", "relayed", "low latency"];
        refused(rank.dispatch(place, valid.request().cumulative_wait_ns(&times)), &named);
        Ok(())
    });
}

/// An operation that was entered, and whose end cannot be launched, is the buffer's last.
#[test]
fn an_end_that_is_not_launched_breaks_the_buffer() {
    for call in ["dispatch", "cached dispatch", "combine", "halves"] {
        run_ranks(1, |_, group| {
            let failing = FailingDevice::new(VirtualGpu::new(VirtConfig::default()), &["end_operation"]);
            let options = Setup::new(1, 1, TOKENS, 2 * HIDDEN).max_topk(4).options;
            let mut rank = Rank::new(epoxide::internal::driver::device(failing.clone()), group, options)?;
            let mut place = rank.place()?;
            let topk_idx = rank.upload_typed(1, &vec![vec![0i64]; TOKENS as usize])?;
            let layout = rank.layout(&topk_idx, 1)?;
            let x = Tensor::alloc(rank.device(), DType::Bf16, &[TOKENS.into(), HIDDEN])?;
            let waits = TypedTensor::from_host(&rank.stream, &[1], &[0i64])?;
            let request = DispatchRequest::new(&x, &layout);
            let handle = rank.dispatch(&mut place, request)?.handle;
            let cached = CachedDispatchRequest::new(&x, &handle);
            failing.refuse_next();
            let stream = rank.stream.clone();
            let order = StreamOrder::on(&stream);
            let outcome = match call {
                "dispatch" => rank.dispatch(&mut place, request.cumulative_wait_ns(&waits)).map(drop),
                "cached dispatch" => {
                    rank.dispatch_cached(&mut place, cached.cumulative_wait_ns(&waits)).map(drop)
                }
                "combine" => {
                    rank.combine(CombineRequest::new(&x, &handle).cumulative_wait_ns(&waits)).map(drop)
                }
                _ => rank.buffer.dispatch_send(&mut place, request, order)?.receive(order).map(drop),
            };
            refused(outcome, &[REFUSAL]);
            let later = rank.dispatch(&mut place, request).map(drop);
            let named = if call == "halves" { "dispatch" } else { call };
            assert!(matches!(&later, Err(Error::Broken { call, .. }) if *call == named), "{call}: {later:?}");
            rank.stream.synchronize()
        });
    }
}

/// A thread that launches a step of the buffer while another one is in either half.
#[test]
fn no_step_runs_within_a_half() {
    run_ranks(1, |_, group| {
        let device = FailingDevice::new(VirtualGpu::new(VirtConfig::default()), &[]);
        let options = Setup::new(1, 1, TOKENS, 2 * HIDDEN).max_topk(4).options;
        let mut rank = Rank::new(epoxide::internal::driver::device(device.clone()), group, options)?;
        let mut place = rank.place()?;
        let topk_idx = rank.upload_typed(1, &vec![vec![0i64]; TOKENS as usize])?;
        let layout = rank.layout(&topk_idx, 1)?;
        let x = Tensor::alloc(rank.device(), DType::Bf16, &[TOKENS.into(), HIDDEN])?;
        let stream = rank.stream.clone();
        let handle = rank.dispatch(&mut place, DispatchRequest::new(&x, &layout))?.handle;
        let request = CombineRequest::new(&x, &handle);
        let step = Arc::new(rank.buffer.capture(&stream, |buffer, order| buffer.combine(request, order))?);
        let (sender, launched) = mpsc::channel();
        let launch_within = |call| {
            let (step, stream, sender) = (step.clone(), stream.clone(), sender.clone());
            device.call_within(call, move || sender.send(step.launch(&stream)).unwrap());
        };
        let expect_refused = |call| {
            let refusal = [call, "its first half has run, but what it brings was not received"];
            refused(launched.try_recv().expect("no launch within the half"), &refusal);
        };
        let (event, order) = (Event::new(stream.device())?, StreamOrder::on(&stream));
        event.record(&stream)?;

        launch_within(DriverCall::CreateEvent);
        let cached = CachedDispatchRequest::new(&x, &handle);
        let pending = rank.buffer.dispatch_cached_send(&mut place, cached, order.asynchronous())?;
        expect_refused("cached dispatch");
        launch_within(DriverCall::WaitForEvent);
        drop(pending.receive(order.after(&event))?);
        expect_refused("cached dispatch");

        launch_within(DriverCall::CreateEvent);
        let pending = rank.buffer.combine_send(request, order.asynchronous())?;
        expect_refused("combine");
        launch_within(DriverCall::WaitForEvent);
        drop(pending.receive(order.after(&event))?);
        expect_refused("combine");
        step.launch(&stream)?;
        step.check(&stream)
    });
}

/// Calls `run` on one rank that has dispatched and combined, with the combine and its output.
fn with_a_combine(run: impl Fn(&mut Rank, CombineRequest<'_>, &Tensor<'_>) -> Result<()> + Sync) {
    run_ranks(1, |_, group| {
        let options = Setup::new(1, 1, TOKENS, 2 * HIDDEN).max_topk(4).options;
        let mut rank = Rank::new(VirtualGpu::new(VirtConfig::default()), group, options)?;
        let mut place = rank.place()?;
        let topk_idx = rank.upload_typed(1, &vec![vec![0i64]; TOKENS as usize])?;
        let layout = rank.layout(&topk_idx, 1)?;
        let x = Tensor::alloc(rank.device(), DType::Bf16, &[TOKENS.into(), HIDDEN])?;
        let out = Tensor::alloc(rank.device(), DType::Bf16, &[TOKENS.into(), HIDDEN])?;
        let handle = rank.dispatch(&mut place, DispatchRequest::new(&x, &layout))?.handle;
        let (request, stream) = (CombineRequest::new(&x, &handle), rank.stream.clone());
        rank.buffer.combine_into(request, &out, None, StreamOrder::on(&stream))?;
        run(&mut rank, request, &out)
    });
}

/// A first half that is recorded has no second one that runs, and the other way round.
#[test]
fn halves_are_both_recorded_or_both_run() {
    with_a_combine(|rank, request, out| {
        let stream = rank.stream.clone();
        let order = StreamOrder::on(&stream);

        // A step without the second half is none.
        let mut runs = 0;
        let step = rank.buffer.capture(&stream, |buffer, order| {
            runs += 1;
            let pending = buffer.combine_send_into(request, out, None, order)?;
            if runs == 1 { pending.receive(order).map(drop) } else { Ok(()) }
        });
        refused(step, &["combine", "its second half was not recorded"]);
        rank.buffer.combine_into(request, out, None, order)?;

        let mixed = ["combine", "one of its halves is recorded and the other one is not"];
        let mut pending = None;
        drop(stream.capture(|| {
            pending = Some(rank.buffer.combine_send_into(request, out, None, order)?);
            Ok(())
        })?);
        refused(pending.take().expect("a first half").receive(order), &mixed);
        // Nothing was enqueued.
        rank.buffer.combine_into(request, out, None, order)?;

        let pending = rank.buffer.combine_send_into(request, out, None, order)?;
        refused(stream.capture(|| pending.receive(order).map(drop)), &mixed);
        let later = rank.buffer.combine_into(request, out, None, order);
        refused(later, &["combine", "what it brings was not received"]);
        rank.stream.synchronize()
    });
}

/// A recording that another library gives up between the halves is made anew behind a warm-up.
#[test]
fn a_recording_that_ends_between_the_halves_is_made_anew() {
    with_a_combine(|rank, request, out| {
        let stream = rank.stream.clone();
        let order = StreamOrder::on(&stream);
        stream.synchronize()?;

        let given_up: Result<_> = stream.capture(|| {
            drop(rank.buffer.combine_send_into(request, out, None, order)?);
            Err(Error::os("capture", REFUSAL))
        });
        refused(given_up, &[REFUSAL]);
        let next = stream.capture(|| rank.buffer.combine_into(request, out, None, order).map(drop));
        refused(next, &["first half of a combine was recorded", "begin_warmup"]);
        rank.buffer.combine_into(request, out, None, order)?;

        rank.buffer.begin_warmup();
        rank.buffer.combine_into(request, out, None, order)?;
        stream.synchronize()?;
        rank.buffer.end_warmup();
        let graph = stream.capture(|| rank.buffer.combine_into(request, out, None, order).map(drop))?;
        // SAFETY: the buffer and the tensors outlive the replay.
        unsafe { graph.launch(&stream)? };
        stream.synchronize()?;
        rank.buffer.check()
    });
}

/// Every check of a case, where some calls are launched as halves and some are measured.
fn check_apart(setup: &Setup, case: &Case, by_expert: Option<u32>, seed: u64) {
    setup.run(|rank| {
        rank.launch_apart(seed)?;
        match by_expert {
            None => rank.check_everything(case)?,
            Some(alignment) => rank.check_by_expert(case, alignment)?,
        }
        let (waited, own) = (rank.waited()?, rank.rank as usize);
        rank.check(waited.iter().all(|&ns| ns >= 0) && waited[own] == 0, format!("{waited:?} ns"));
        Ok(())
    });
}

#[test]
fn halves_are_clean_in_both_check_modes() {
    let across = NodeLinks { ranks_per_node: 2, transport: TransportKind::Direct, queues: 1 };
    for_each_seed(tier::pick(4, 16), |seed| {
        let weak = (seed % 2 == 1).then_some(seed);
        let config = CheckConfig { races: weak.is_none(), weak_memory: weak, ..CheckConfig::default() };
        let routing = Routing::random(&mut rng_of(&[seed]), &[7, 4, 0, 5], 3, 8, Style::Repeats);
        let nodes = (seed % 3 == 2).then_some(across);
        let case = Case { nodes, schedule_seed: Some(seed), ..Case::new(routing, 48) };
        let by_expert = (seed % 4 >= 2).then_some(4);
        let mut setup = by_expert.map_or_else(|| case.setup(), |alignment| case.setup_by_expert(alignment));
        setup.device.checker = Some(Checker::new(config));
        check_apart(&setup, &case, by_expert, seed);
    });
}

#[test]
fn halves_of_many_ranks() {
    let tokens = [3, 0, 5, 2, 4, 1, 3, 2, 6, 1];
    let routing = Routing::random(&mut rng_of(&[9]), &tokens, 4, 30, Style::DistinctTopK);
    let case = Case::new(routing, 48);
    check_apart(&case.setup(), &case, None, 3);
    check_apart(&case.setup_by_expert(4), &case, Some(4), 4);
}

proptest! {
    #![proptest_config(config(64))]

    #[test]
    fn random_calls_apart_equal_the_oracle(
        case in cases::case(prop::collection::vec(0..=24u32, rank_counts(1..=6)).prop_map(|tokens| (tokens, None))),
        by_expert in prop::option::of(0..=5u32),
        seed in any::<u64>(),
    ) {
        let by_expert = by_expert.map(|log| 1 << log);
        let setup = by_expert.map_or_else(|| case.setup(), |alignment| case.setup_by_expert(alignment));
        check_apart(&setup, &case, by_expert, seed);
    }

    #[test]
    fn random_calls_apart_equal_the_oracle_across_nodes(case in cases::case(several_nodes()), seed in any::<u64>()) {
        case.setup().run(|rank| {
            rank.launch_apart(seed)?;
            rank.check_everything(&case)
        });
    }
}

/// A buffer of a batch, and its stream.
struct Lane {
    buffer: Buffer,
    place: Place,
    stream: Stream,
}

impl Lane {
    fn new(device: &Device, group: &dyn ProcessGroup) -> Result<Lane> {
        let shape = Shape { max_tokens: 9, hidden: HIDDEN, dtype: DType::Bf16, max_topk: 3, max_scales: 0 };
        let options = Options::new(shape).config(Config::with_sms(4)?);
        let buffer = Buffer::new(device.clone(), group, options)?;
        Ok(Lane { place: buffer.place(0)?, buffer, stream: Stream::new(device)? })
    }
}

/// The elements of a token's row: small, so that sums over ranks are exact.
fn value(batch: u64, rank: u32, token: u32) -> f32 {
    ((u64::from(rank) * 7 + u64::from(token) * 3 + batch * 5) % 32 + 1) as f32
}

/// A batch of a rank: its routing, rows and layout.
struct Batch {
    number: u64,
    routing: Routing,
    x: Tensor<'static>,
    layout: DispatchLayout<'static>,
}

impl Batch {
    fn new(lane: &mut Lane, number: u64, rank: u32) -> Result<Batch> {
        let mut rng = rng_of(&[number, 11]);
        let tokens: Vec<u32> = (0..RANKS).map(|_| rng.random_range(0..=9)).collect();
        let style = Style::ALL[number as usize % Style::ALL.len()];
        let routing = Routing::random(&mut rng, &tokens, 3, 6, style);
        let (stream, count) = (&lane.stream, u64::from(tokens[rank as usize]));
        let row = |token| vec![bf16::from_f32(value(number, rank, token)); HIDDEN as usize];
        let rows: Vec<bf16> = (0..count as u32).flat_map(row).collect();
        let ids = TypedTensor::from_host(stream, &[count, 3], &routing.flat_topk_idx(rank))?;
        let layout = lane.buffer.get_dispatch_layout(&ids, 6, StreamOrder::on(&lane.stream))?;
        let x = Tensor::from_host(&lane.stream, DType::Bf16, &[count, HIDDEN], &rows)?;
        Ok(Batch { number, routing, x, layout })
    }

    /// Every destination rank of a token returns its row unchanged.
    fn check(&self, sums: &[bf16], rank: u32) {
        let of_token = |token| {
            let ranks = (0..RANKS).filter(|&to| self.routing.hits(rank, token, to)).count();
            vec![bf16::from_f32(ranks as f32 * value(self.number, rank, token)); HIDDEN as usize]
        };
        let expected: Vec<bf16> = (0..self.routing.num_tokens(rank)).flat_map(of_token).collect();
        assert_eq!(sums, expected, "batch {}, rank {rank}", self.number);
    }
}

/// Each batch has one half under way while the other's is launched.
#[test]
fn halves_of_two_batches_interleave() {
    for_each_seed(tier::pick(2, 8), |seed| {
        let weak = (seed % 2 == 1).then_some(seed);
        let config = CheckConfig { races: weak.is_none(), weak_memory: weak, ..CheckConfig::default() };
        let checker = Checker::new(config);
        run_ranks(RANKS, |rank, group| {
            let device = VirtualGpu::new(VirtConfig {
                ordinal: rank,
                checker: Some(checker.clone()),
                schedule_seed: Some(seed * u64::from(RANKS) + u64::from(rank)),
                ..VirtConfig::default()
            });
            let (mut a, mut b) = (Lane::new(&device, &*group)?, Lane::new(&device, &*group)?);
            for round in 0..tier::pick(2, 4) {
                let number = seed * 100 + 2 * round;
                let (first, second) =
                    (Batch::new(&mut a, number, rank)?, Batch::new(&mut b, number + 1, rank)?);
                let (on_a, on_b) = (StreamOrder::on(&a.stream), StreamOrder::on(&b.stream));
                let request = DispatchRequest::new(&first.x, &first.layout);
                let sent_a = a.buffer.dispatch_send(&mut a.place, request, on_a)?;
                let request = DispatchRequest::new(&second.x, &second.layout);
                let sent_b = b.buffer.dispatch_send(&mut b.place, request, on_b)?;
                let there_a = sent_a.receive(on_a)?;
                let request = CombineRequest::new(&there_a.recv_x, &there_a.handle);
                let sent_a = a.buffer.combine_send(request, on_a)?;
                let there_b = sent_b.receive(on_b)?;
                let request = CombineRequest::new(&there_b.recv_x, &there_b.handle);
                let out = Tensor::alloc(&device, DType::Bf16, &[second.x.rows(), HIDDEN])?;
                let sent_b = b.buffer.combine_send_into(request, &out, None, on_b)?;
                let sums = sent_a.receive(on_a)?.combined_x;
                sent_b.receive(on_b)?;
                first.check(&sums.to_host(&a.stream)?, rank);
                second.check(&out.to_host(&b.stream)?, rank);
            }
            // No pool is freed before all peers have finished both.
            group.barrier(PATIENCE)
        });
    });
}

/// Both batches' halves in turn, with rows that the host does not count, into `sums`.
fn interleave([a, b]: [&mut Lane; 2], batches: [&Batch; 2], sums: [&Tensor<'_>; 2]) -> Result<()> {
    fn request(batch: &Batch, capacity: u64) -> DispatchRequest<'_> {
        DispatchRequest::new(&batch.x, &batch.layout).counts(Counts::OnDevice { capacity })
    }
    let [on_a, on_b] = [StreamOrder::on(&a.stream), StreamOrder::on(&b.stream)];
    let first = request(batches[0], a.buffer.capacity());
    let sent_a = a.buffer.dispatch_send(&mut a.place, first, on_a)?;
    let second = request(batches[1], b.buffer.capacity());
    let sent_b = b.buffer.dispatch_send(&mut b.place, second, on_b)?;
    let there_a = sent_a.receive(on_a)?;
    let back_a = CombineRequest::new(&there_a.recv_x, &there_a.handle);
    let sent_a = a.buffer.combine_send_into(back_a, sums[0], None, on_a)?;
    let there_b = sent_b.receive(on_b)?;
    let back_b = CombineRequest::new(&there_b.recv_x, &there_b.handle);
    let sent_b = b.buffer.combine_send_into(back_b, sums[1], None, on_b)?;
    sent_a.receive(on_a)?;
    sent_b.receive(on_b).map(drop)
}

/// One graph has both batches, on two branches, and finds other rows in each replay.
#[test]
fn a_graph_has_the_halves_of_two_batches() {
    run_ranks(RANKS, |rank, group| {
        let checker = Checker::new(CheckConfig::default());
        let device =
            VirtualGpu::new(VirtConfig { ordinal: rank, checker: Some(checker), ..VirtConfig::default() });
        let [mut a, mut b] = [Lane::new(&device, &*group)?, Lane::new(&device, &*group)?];
        let batches = [Batch::new(&mut a, 3, rank)?, Batch::new(&mut b, 4, rank)?];
        let sums_of = |batch: &Batch| Tensor::alloc(&device, DType::Bf16, &[batch.x.rows(), HIDDEN]);
        let sums = [sums_of(&batches[0])?, sums_of(&batches[1])?];
        let (both, into) = ([&batches[0], &batches[1]], [&sums[0], &sums[1]]);
        for lane in [&mut a, &mut b] {
            lane.buffer.begin_warmup();
        }
        interleave([&mut a, &mut b], both, into)?;
        for lane in [&mut a, &mut b] {
            lane.stream.synchronize()?;
            lane.buffer.end_warmup();
        }
        let (fork, join) = (Event::new(&device)?, Event::new(&device)?);
        let recorder = Stream::new(&device)?;
        let graph = recorder.capture(|| {
            fork.record(&recorder)?;
            [&a, &b].into_iter().try_for_each(|lane| lane.stream.wait(&fork))?;
            interleave([&mut a, &mut b], both, into)?;
            [&a, &b].into_iter().try_for_each(|lane| {
                join.record(&lane.stream)?;
                recorder.wait(&join)
            })
        })?;
        for replay in 1..=tier::pick(2, 4) {
            for batch in &batches {
                let factor = f32::from(1u8 << replay);
                let row =
                    |token| vec![bf16::from_f32(factor * value(batch.number, rank, token)); HIDDEN as usize];
                let rows: Vec<bf16> = (0..batch.routing.num_tokens(rank)).flat_map(row).collect();
                batch.x.write(&recorder, &rows)?;
            }
            // SAFETY: both buffers, the batches and the streams outlive the replay.
            unsafe { graph.launch(&recorder)? };
            recorder.synchronize()?;
            for (batch, sums) in batches.iter().zip(&sums) {
                let scaled: Vec<bf16> = sums.to_host(&recorder)?;
                let factor = f32::from(1u8 << replay);
                let plain: Vec<bf16> = scaled.iter().map(|it| bf16::from_f32(it.to_f32() / factor)).collect();
                batch.check(&plain, rank);
            }
        }
        a.buffer.check()?;
        b.buffer.check()?;
        group.barrier(PATIENCE)
    });
}
