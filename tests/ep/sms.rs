//! Calls with multiprocessors of their own, in both modes.

use epoxide::driver::Stream;
use epoxide::driver::virt::{CheckConfig, Checker};
use epoxide::internal::Instruments;
use epoxide::throughput::{
    Buffer, CachedDispatchRequest, CombineRequest, Combined, Config, Counts, DispatchRequest, Place, Received,
};
use epoxide::{Error, Result, StreamOrder, low_latency};
use epoxide_testing::harness::{Setup, assert_names};
use epoxide_testing::low_latency::LowLatencyCase;
use epoxide_testing::oracle::{Routing, Style};
use epoxide_testing::payload::rng_of;
use epoxide_testing::tier;
use epoxide_vgpu::for_each_seed;

use crate::low_latency::faults;
use crate::spread::{Spread, in_every_spread};
use crate::turns::{Inputs, ROW, Turn, check_rows, check_sums};
use crate::valid::{TOKENS, refused, setup, then_dispatch};

in_every_spread! {
    a_graph_keeps_the_numbers_of_its_calls,
    numbers_that_break_a_rule_are_named,
}

/// A dispatch and the combine of its rows, with so many multiprocessors each.
fn echo_with<'p>(
    buffer: &mut Buffer,
    place: &'p mut Place,
    inputs: &Inputs,
    [dispatch, combine]: [u32; 2],
    order: StreamOrder<'_>,
) -> Result<(Received<'p>, Combined)> {
    let layout = inputs.layout_on(buffer, order)?;
    let counts = Counts::OnDevice { capacity: buffer.capacity() };
    let request = DispatchRequest::new(&inputs.x, &layout).counts(counts).num_sms(dispatch);
    let output = buffer.dispatch(place, request, order)?;
    let back = CombineRequest::new(&output.recv_x, &output.handle).num_sms(combine);
    let back = buffer.combine(back, order)?;
    Ok((output, back))
}

/// Within a node each rank has numbers of its own, above the configuration's 6 and below its 3
/// channels. Across nodes rows are in the order of channels, so all ranks have the same.
fn a_graph_keeps_the_numbers_of_its_calls(spread: Spread) {
    let turn = Turn::random(1, &[26, 0, 15, 7], 3);
    let mut setup = Setup::new(4, 3, 26, ROW).nodes(spread.nodes(2));
    setup.device.checker = Some(Checker::new(CheckConfig::default()));
    setup.run(|rank| {
        let (inputs, mut place) = turn.begin(rank)?;
        let stream = rank.stream.clone();
        let (captured, live) = match spread {
            Spread::OneNode => ([8 + 2 * rank.rank, 2 + 2 * (rank.rank % 2)], [2, 8 * (1 + rank.rank)]),
            Spread::SeveralNodes => ([10, 10], [4, 4]),
        };
        let step = rank.buffer.capture(&stream, |buffer, order| {
            let (output, back) = echo_with(buffer, &mut place, &inputs, captured, order)?;
            Ok((output.detach(), back))
        })?;
        for _ in 0..2 {
            step.launch(&stream)?;
            check_sums(rank, "combined_x of a replay", &step.output().1, &turn)?;
            step.check(&stream)?;
            // Other numbers in between, without a graph.
            let order = StreamOrder::on(&stream);
            let (output, back) = echo_with(&mut rank.buffer, &mut place, &inputs, live, order)?;
            check_sums(rank, "combined_x", &back, &turn)?;
            // A handle keeps its channels when the configuration changes.
            let before = *rank.buffer.config();
            rank.buffer.set_config(Config { num_sms: 4, ..before })?;
            let handle = output.handle.clone();
            drop(output);
            let again = rank.dispatch_cached(&mut place, CachedDispatchRequest::new(&inputs.x, &handle))?;
            let wanted = turn.recv(rank.rank);
            check_rows(rank, "recv_x", &again.recv_x, &wanted)?;
            let back = rank.combine(CombineRequest::new(&again.recv_x, &handle))?;
            check_sums(rank, "combined_x along the handle", &back, &turn)?;
            rank.buffer.set_config(before)?;
        }
        Ok(())
    });
}

fn numbers_that_break_a_rule_are_named(spread: Spread) {
    let across = spread == Spread::SeveralNodes;
    then_dispatch(setup(spread), |rank, valid, place| {
        let rule = ["even, 2 to 512", "leave it out"];
        for bad in [0, 1, 7, 514, u32::MAX] {
            let named = format!("num_sms = {bad}: ");
            let named = [&named, rule[0], rule[1]];
            refused(rank.dispatch(place, valid.request().num_sms(bad)), &named);
            let layout = rank.layout(&valid.topk_idx, crate::valid::EXPERTS)?;
            let output = rank.dispatch(place, DispatchRequest::new(&valid.x, &layout))?;
            let (rows, handle) = (&output.recv_x, output.handle.clone());
            refused(rank.combine(CombineRequest::new(rows, &handle).num_sms(bad)), &named);
            drop(output);
            let cached = CachedDispatchRequest::new(&valid.x, &handle).num_sms(bad);
            refused(rank.dispatch_cached(place, cached), &named);
        }
        let output = rank.dispatch(place, valid.request().num_sms(8))?;
        let other = CombineRequest::new(&output.recv_x, &output.handle).num_sms(6);
        if across {
            refused(rank.combine(other), &["num_sms = 6", "that of the dispatch, 8", "dispatch with 6"]);
            let own = CombineRequest::new(&output.recv_x, &output.handle).num_sms(8);
            drop(rank.combine(own)?);
            drop(output);
            let few = rank.dispatch(place, valid.request().num_sms(2))?.handle;
            let cached = CachedDispatchRequest::new(&valid.x, &few);
            refused(rank.dispatch_cached(place, cached), &["num_sms = 2", "more than 3"]);
        } else {
            drop(rank.combine(other)?);
        }
        Ok(())
    });
}

/// Across nodes channels follow the number, on which ranks must agree: no row moves.
#[test]
fn ranks_of_several_nodes_agree_on_a_dispatch() {
    then_dispatch(setup(Spread::SeveralNodes), |rank, valid, place| {
        let request = valid.request().num_sms(4 + 2 * rank.rank);
        let error = rank.dispatch(place, request).map(|_| ()).expect_err("ranks differ");
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
        assert_names(&error, &["channels", "the same on every rank"]);
        assert_eq!(valid.x.rows(), TOKENS);
        Ok(())
    });
}

/// The blocks of each launch since the trace began.
fn blocks<B: Instruments>(buffer: &mut B, stream: &Stream) -> Result<Vec<(&'static str, usize)>> {
    let (launches, dropped) = buffer.take_trace(stream)?;
    assert_eq!(dropped, 0);
    Ok(launches.iter().map(|launch| (launch.operation, launch.blocks.len())).collect())
}

/// Ranks have more tokens than blocks, of which there is one for each token at most.
#[test]
fn calls_have_as_many_blocks_as_asked() {
    let turn = Turn::random(1, &[26, 15], 3);
    Setup::new(2, 3, 26, ROW).run(|rank| {
        let (inputs, mut place) = turn.begin(rank)?;
        let stream = rank.stream.clone();
        for [dispatch, combine] in [[4, 4], [10, 2]] {
            rank.buffer.start_trace(64)?;
            let order = StreamOrder::on(&stream);
            drop(echo_with(&mut rank.buffer, &mut place, &inputs, [dispatch, combine], order)?);
            let got = blocks(&mut rank.buffer, &stream)?;
            let want = [("notify", 3), ("dispatch", dispatch as usize), ("combine", combine as usize)];
            rank.equal("blocks", &got, &want);
        }
        Ok(())
    });
    faults::run(|rank| {
        let (stream, mut place) = (rank.stream.clone(), rank.buffer.place(0)?);
        let order = StreamOrder::on(&stream);
        for [dispatch, combine] in [[1, 3], [2, 1]] {
            rank.buffer.start_trace(64)?;
            let request = low_latency::DispatchRequest::new(&rank.x, &rank.topk_idx).num_sms(dispatch);
            let received = rank.buffer.dispatch(&mut place, request, order)?;
            let rows = low_latency::CombineRequest::by_row(&rank.experts).num_sms(combine);
            drop(rank.buffer.combine(received, rows, order)?);
            rank.outcome()?;
            let got = blocks(&mut rank.buffer, &stream)?;
            let got: Vec<_> = got.iter().map(|(_, blocks)| *blocks as u32).collect();
            assert_eq!(got, [dispatch, combine]);
        }
        Ok(())
    });
}

/// Every call of every rank has a number of its own, the device has more or fewer.
#[test]
fn calls_of_low_latency_may_have_any_number_in_replays() {
    for_each_seed(tier::pick(2, 16), |seed| {
        let routing = Routing::random(&mut rng_of(&[seed]), &[9, 0, 5], 2, 6, Style::WithHoles);
        let case = LowLatencyCase {
            sms_seed: Some(seed),
            sm_count: 5,
            rounds: 4,
            places: 1 + seed as u32 % 2,
            halves: seed % 2 == 1,
            ..LowLatencyCase::new(routing, 48)
        };
        case.check_replayed(3);
        let checker = Some(Checker::new(CheckConfig::default()));
        LowLatencyCase { checker, schedule_seed: Some(seed), ..case }.check_chained();
    });
}

#[test]
fn a_call_of_low_latency_needs_a_multiprocessor() {
    faults::run(|rank| {
        let (stream, mut place) = (rank.stream.clone(), rank.buffer.place(0)?);
        let order = StreamOrder::on(&stream);
        let named = ["num_sms = 0", "at least 1", "leave it out"];
        let request = low_latency::DispatchRequest::new(&rank.x, &rank.topk_idx);
        refused(rank.buffer.dispatch(&mut place, request.num_sms(0), order), &named);
        let received = rank.buffer.dispatch(&mut place, request.num_sms(1), order)?;
        let rows = low_latency::CombineRequest::by_row(&rank.experts);
        refused(rank.buffer.combine(received, rows.num_sms(0), order), &named);
        let received = rank.buffer.dispatch(&mut place, request.num_sms(1000), order)?;
        drop(rank.buffer.combine(received, rows.num_sms(2), order)?);
        rank.outcome()
    });
}
