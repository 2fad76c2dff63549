//! A rank stops anywhere in an operation, or makes another call. The other rank gets an error that
//! names it, and reads no wrong number: neither on the host, nor in a kernel, which gets no error.

use std::sync::Arc;
use std::time::Duration;

use epoxide::driver::Stream;
use epoxide::driver::virt::{VirtConfig, VirtualGpu};
use epoxide::group::ProcessGroup;
use epoxide::internal::driver::{Hooks, Stop};
use epoxide::low_latency::{self, Quantise};
use epoxide::throughput::{
    CachedDispatchRequest, CombineRequest, Counts, DispatchHandle, DispatchLayout, DispatchRequest, Place,
};
use epoxide::transport::{TransportKind, TransportOptions};
use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
use epoxide::{Error, Result};
use epoxide_testing::harness::{NodeLinks, PATIENCE, Rank, Setup, keep, run_ranks};
use epoxide_testing::tier;
use half::bf16;

use crate::low_latency::ones::Ones;
use crate::promises::is_nan;
use crate::turns::{HIDDEN, Inputs, ROW, TOPK, Turn, combine_in_pool};

const DEADLINE: Duration = Duration::from_millis(100);
/// Rounds in which the rank may stop, and those behind.
const ROUNDS: usize = 2;
const ALL_ROUNDS: usize = 4;

/// Fault of rank 1.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Fault {
    Nothing,
    /// The rank stops after so many warp instructions.
    Stops(u64),
    /// The rank makes another call instead of its call of this number, and none after it.
    Calls(Other, usize),
}

impl Fault {
    /// Whether the fault has occurred.
    fn has_shown(self, stop: &Stop) -> bool {
        match self {
            Fault::Nothing => false,
            Fault::Stops(_) => stop.left() == 0,
            Fault::Calls(..) => true,
        }
    }

    /// The call that rank 1 makes instead of its call `number`, which is `right`.
    fn other(self, rank: u32, number: usize, right: Other) -> Option<Other> {
        match self {
            Fault::Calls(other, at) if (rank, at) == (1, number) && other != right => Some(other),
            _ => None,
        }
    }
}

/// A call of the two modes.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Other {
    /// The rank makes no call any more.
    Nothing,
    Dispatch,
    /// A dispatch of rows that travel as e4m3.
    Quantised,
    /// Into the other place.
    Elsewhere,
    /// Along a handle of an earlier dispatch.
    Cached,
    Combine,
}

/// Runs `round_trips` with rank 1 stopped at points spread over its rounds. `round_trips` returns
/// whether rank 0 got an error. `EPOXIDE_DEATHS` sets the number of points.
fn sweep(round_trips: impl Fn(&Arc<Stop>, Fault) -> bool) {
    let counting = Stop::of(1);
    round_trips(&counting, Fault::Nothing);
    let executed = u64::MAX - counting.left();
    let points = std::env::var("EPOXIDE_DEATHS").ok().map(|points| points.parse().expect("a number"));
    let points: u64 = points.unwrap_or(tier::pick(3, 30));
    let failed = (0..points).filter(|point| {
        let after = executed * point / points;
        round_trips(&Stop::of(1), Fault::Stops(after))
    });
    // A wait for the other rank takes more or fewer instructions in each run.
    assert!(failed.count() as u64 * 2 > points);
}

/// Runs `round_trips` with each of the calls at each place of `rights`, the calls of all rounds.
fn other_calls(others: &[Other], rights: &[Other], round_trips: impl Fn(&Arc<Stop>, Fault) -> bool) {
    let faults = (0..rights.len()).flat_map(|number| others.iter().map(move |other| (*other, number)));
    let differs = |&(other, number): &(Other, usize)| {
        // The first round has no handle yet.
        other != rights[number] && (number > 0 || !matches!(other, Other::Cached | Other::Combine))
    };
    for (other, number) in faults.filter(differs).step_by(tier::pick(17, 1)) {
        let fault = Fault::Calls(other, number);
        assert!(round_trips(&Stop::of(1), fault), "rank 0 was not told of {fault:?}");
    }
}

/// Whether a read gave an error, which then names rank 1.
fn has_failed<T>(read: &Result<T>) -> bool {
    match read {
        Ok(_) => false,
        Err(Error::PeerTimeout { peer: 1, .. } | Error::OtherCall { peer: 1, .. }) => true,
        Err(error) => panic!("{error}"),
    }
}

fn bytes(words: Vec<u16>) -> Vec<u8> {
    words.into_iter().flat_map(u16::to_le_bytes).collect()
}

/// Runs the rounds of a rank. `round` makes a round, queries for each call which other call to
/// make, and returns whether it is the last. Returns whether rank 0 failed, and whether the fault
/// occurred.
fn rounds(
    (group, stream): (&dyn ProcessGroup, &Stream),
    (stop, fault): (&Stop, Fault),
    mut round: impl FnMut(usize, &mut dyn FnMut(Other) -> Option<Other>) -> Result<bool>,
) -> Result<(bool, bool)> {
    let number = group.rank();
    stream.synchronize()?;
    group.barrier(PATIENCE)?;
    if let (1, Fault::Stops(after)) = (number, fault) {
        stop.after(after);
    }
    let count = if fault == Fault::Nothing { ROUNDS } else { ALL_ROUNDS };
    let mut calls = 0;
    let mut other = |right| {
        calls += 1;
        fault.other(number, calls - 1, right)
    };
    let mut failed = false;
    for index in 0..count {
        let outcome = round(index, &mut other);
        failed = number == 0 && (matches!(outcome, Ok(true)) || has_failed(&outcome));
        // The other call is made, and not refused.
        let is_expected = matches!(outcome, Ok(_) | Err(Error::PeerTimeout { .. } | Error::OtherCall { .. }));
        assert!(is_expected || !matches!(fault, Fault::Calls(..)), "rank {number}: {outcome:?} at {fault:?}");
        if !matches!(outcome, Ok(false)) {
            break;
        }
    }
    let is_at_fault = fault.has_shown(stop);
    group.barrier(PATIENCE)?;
    if let (1, Fault::Stops(_)) = (number, fault) {
        stop.go_on();
    }
    stream.synchronize()?;
    group.barrier(PATIENCE)?;
    Ok((failed, is_at_fault))
}

/// Whether rank 0 got an error, from the results of all ranks.
fn rank_0_failed(outcomes: &[(bool, bool)], fault: Fault) -> bool {
    let (failed, is_at_fault) = outcomes[0];
    assert!(is_at_fault || !failed, "at {fault:?}");
    failed
}

/// How sums are combined.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Rows {
    InPool,
    InTensor,
}

/// A call of rank 1 that does not fit.
fn call(
    rank: &mut Rank,
    place: &mut Place,
    inputs: &Inputs,
    layout: &DispatchLayout<'_>,
    other: Other,
    handle: Option<&DispatchHandle>,
) -> Result<()> {
    let (stream, handle) = (rank.stream.clone(), || handle.expect("there was a dispatch"));
    let order = StreamOrder::on(&stream);
    match other {
        Other::Nothing => Ok(()),
        Other::Dispatch | Other::Elsewhere => {
            let counts = Counts::OnDevice { capacity: rank.buffer.capacity() };
            let request = DispatchRequest::new(&inputs.x, layout).counts(counts);
            rank.buffer.dispatch(place, request, order).map(drop)
        }
        Other::Cached => {
            let request = CachedDispatchRequest::new(&inputs.x, handle());
            rank.buffer.dispatch_cached(place, request, order).map(drop)
        }
        Other::Combine => combine_in_pool(rank, place, handle()).map(drop),
        Other::Quantised => unreachable!("low latency alone has a call of another kind for it"),
    }
}

fn high_throughput(nodes: Option<NodeLinks>, rows: Rows) {
    sweep(|stop, fault| high_throughput_rounds(nodes, rows, stop, fault));
}

/// Returns whether rank 0 got an error.
fn high_throughput_rounds(nodes: Option<NodeLinks>, rows: Rows, stop: &Arc<Stop>, fault: Fault) -> bool {
    let turns: [Turn; ALL_ROUNDS] = std::array::from_fn(|seed| Turn::random(seed as u64, &[8, 5], 1));
    let mut setup = Setup::new(2, 1, 8, ROW).max_topk(TOPK).nodes(nodes);
    setup.fields().timeout = DEADLINE;
    setup.fields().places = 2;
    setup.device.hooks.stop = Some(stop.clone());
    let outcomes = setup.run(|rank| {
        let (stream, mut place) = (rank.stream.clone(), rank.place()?);
        let mut elsewhere = rank.buffer.place(1)?;
        let all: Vec<Inputs> = turns.iter().map(|turn| Inputs::upload(turn, rank)).collect::<Result<_>>()?;
        let (group, mut last) = (rank.group.clone(), None);
        rounds((&*group, &stream), (stop, fault), |index, other| {
            let (turn, inputs) = (&turns[index], &all[index]);
            let order = StreamOrder::on(&stream);
            let layout = inputs.layout(rank)?;
            let mut call = |rank: &mut Rank, place: &mut Place, other, handle: Option<&_>| {
                let place = if other == Other::Elsewhere { &mut elsewhere } else { place };
                call(rank, place, inputs, &layout, other, handle).map(|()| true)
            };
            if let Some(other) = other(Other::Dispatch) {
                return call(rank, &mut place, other, last.as_ref());
            }
            let counts = Counts::OnDevice { capacity: rank.buffer.capacity() };
            let request = DispatchRequest::new(&inputs.x, &layout).counts(counts);
            let output = rank.buffer.dispatch(&mut place, request, order)?;
            let handle = last.insert(output.handle.clone());
            if let Some(other) = other(Other::Combine) {
                drop(output);
                return call(rank, &mut place, other, Some(handle));
            }
            let back = if rows == Rows::InPool {
                let in_pool = output.combine_rows(DType::Bf16, HIDDEN as u64)?;
                let (to, from) = (in_pool.tensor(), &output.recv_x);
                // SAFETY: both are in the pool, which lives as long as the buffer.
                unsafe { stream.copy(to.ptr(), from.ptr(), to.rows() * to.row_stride())? };
                rank.buffer.combine(CombineRequest::new(&in_pool, &output.handle), order)?
            } else {
                rank.buffer.combine(CombineRequest::new(&output.recv_x, &output.handle), order)?
            };
            let has_received = |rows: &Tensor<'_>| {
                let received = rows.to_host::<u16>(&stream).map(bytes);
                if let Ok(received) = &received {
                    let want = turn.recv(0).concat();
                    assert!(received[..want.len()] == want, "at {fault:?}: {received:?}");
                }
                !has_failed(&received)
            };
            let mut complete = true;
            if rank.rank == 0 {
                let want = &turn.sums[0];
                let kept = rank.row_bytes(&keep(&stream, &back.combined_x, want.len() as u64)?)?;
                for (got, want) in kept.iter().zip(want) {
                    assert!(is_nan(got) || got == want, "at {fault:?}: {got:?}, {want:?}");
                }
                let missing = rank.buffer.missing_tokens()?;
                // Plans of two places do not fit together, which ends that dispatch alone.
                let has_plan = !matches!(fault, Fault::Calls(Other::Elsewhere, _));
                for (token, (got, want)) in (0..).zip(kept.iter().zip(want)) {
                    let is_missing = missing.contains(&token) || !has_plan;
                    assert!(is_missing || got == want, "at {fault:?}, {token}: {missing:?}");
                }
                let sums = back.combined_x.to_host::<u16>(&stream).map(bytes);
                if let Ok(sums) = &sums {
                    assert!(*sums == want.concat(), "at {fault:?}: {sums:?}");
                }
                complete = !has_failed(&sums) & has_received(&output.recv_x);
            }
            // Across nodes this requires more blocks than there are here.
            if nodes.is_none() {
                drop(output);
                if let Some(other) = other(Other::Cached) {
                    return call(rank, &mut place, other, Some(handle));
                }
                let request = CachedDispatchRequest::new(&inputs.x, handle);
                let again = rank.buffer.dispatch_cached(&mut place, request, order)?;
                complete &= rank.rank != 0 || has_received(&again.recv_x);
            }
            Ok(!complete)
        })
    });
    rank_0_failed(&outcomes, fault)
}

/// The combine of a rank whose peer gives up.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Gather {
    Pool,
    /// The combine adds up its waits, so that a kernel behind it ends it.
    PoolMeasured,
    Tensor,
}

/// Stops rank 1 after so many warp instructions of a combine, until rank 0 has given up and has
/// written other rows to its pool. No rank may then take these for those that it waited for.
/// Returns whether a rank was told, and the instructions of a rank 1 that did not stop.
fn late_gatherer(nodes: Option<NodeLinks>, gather: Gather, after: u64) -> (bool, u64) {
    let ranks = nodes.map_or(2, |nodes| 2 * nodes.ranks_per_node);
    let turn = Turn::random(0, &vec![5; ranks as usize], 1);
    let stop = Stop::of(1);
    let mut setup = Setup::new(ranks, 1, 8, ROW).max_topk(TOPK).nodes(nodes);
    setup.fields().timeout = 20 * DEADLINE;
    setup.device.hooks.stop = Some(stop.clone());
    let told = setup.run(|rank| {
        let (number, stream, group) = (rank.rank, rank.stream.clone(), rank.group.clone());
        let (inputs, mut place) = turn.begin(rank)?;
        let output = inputs.dispatch_exact(rank, &mut place)?;
        let rows = || output.combine_rows(DType::Bf16, HIDDEN as u64);
        let in_pool = if gather == Gather::Tensor { None } else { Some(rows()?) };
        if let Some(in_pool) = &in_pool {
            let (to, from) = (in_pool.tensor(), &output.recv_x);
            // SAFETY: both are in the pool, which lives as long as the buffer.
            unsafe { stream.copy(to.ptr(), from.ptr(), to.rows() * to.row_stride())? };
        }
        stream.synchronize()?;
        group.barrier(PATIENCE)?;
        if number == 1 {
            stop.after(after);
        }
        let waits = TypedTensor::from_host(&stream, &[ranks.into()], &vec![0i64; ranks as usize])?;
        let mut request = match &in_pool {
            Some(in_pool) => CombineRequest::new(in_pool, &output.handle),
            None => CombineRequest::new(&output.recv_x, &output.handle),
        };
        if gather == Gather::PoolMeasured {
            request = request.cumulative_wait_ns(&waits);
        }
        if number == 0 {
            request = request.timeout(DEADLINE);
        }
        let back = rank.buffer.combine(request, StreamOrder::on(&stream))?;
        if number == 0 {
            drop(stream.synchronize());
            let (rows, x) = (in_pool.map_or_else(rows, Ok)?, &output.recv_x);
            let bytes = vec![0x3f; (x.rows() * x.row_stride()) as usize];
            // SAFETY: as above.
            unsafe { stream.write(rows.tensor().ptr(), &bytes)? };
            stream.synchronize()?;
        }
        group.barrier(PATIENCE)?;
        let executed = after.saturating_sub(stop.left());
        group.barrier(PATIENCE)?;
        stop.go_on();
        let want = &turn.sums[number as usize];
        let kept = rank.row_bytes(&keep(&stream, &back.combined_x, want.len() as u64)?)?;
        let outcome = back.combined_x.to_host::<u16>(&stream).map(bytes);
        group.barrier(PATIENCE)?;
        if number == 0 {
            return Ok((false, executed));
        }
        for (got, want) in kept.iter().zip(want) {
            assert!(is_nan(got) || got == want, "rank {number} after {after}: {got:?}, {want:?}");
        }
        match outcome {
            Ok(sums) => {
                assert!(sums == want.concat(), "rank {number} after {after}: {sums:?}");
                Ok((false, executed))
            }
            Err(Error::Broken { reason, .. }) => {
                assert!(reason.contains("rank 0 gave up while"), "{reason}");
                Ok((true, executed))
            }
            Err(Error::PeerTimeout { .. }) => Ok((false, executed)),
            Err(error) => panic!("{error}"),
        }
    });
    (told.iter().any(|(told, _)| *told), told[1].1)
}

#[test]
fn a_rank_that_gives_up_tells_those_that_still_gather_its_rows() {
    let transport = TransportKind::Shm;
    let several = Some(NodeLinks { ranks_per_node: 2, transport, queues: 1 });
    let combines =
        [(None, Gather::Pool), (None, Gather::PoolMeasured), (None, Gather::Tensor), (several, Gather::Pool)];
    for (nodes, gather) in combines {
        let (_, executed) = late_gatherer(nodes, gather, u64::MAX / 2);
        let points = tier::pick(8, 30);
        let told = (0..points).filter(|point| late_gatherer(nodes, gather, executed * point / points).0);
        assert!(told.count() > 0, "never told of {nodes:?}, {gather:?}");
    }
}

#[test]
fn within_a_node_with_rows_in_the_pool() {
    high_throughput(None, Rows::InPool);
}

#[test]
fn within_a_node_with_rows_of_a_tensor() {
    high_throughput(None, Rows::InTensor);
}

#[test]
fn across_nodes() {
    for transport in [TransportKind::Direct, TransportKind::Shm, TransportKind::Tcp] {
        high_throughput(Some(NodeLinks { ranks_per_node: 1, transport, queues: 1 }), Rows::InPool);
    }
}

fn low_latency(change: impl Fn(low_latency::Options) -> low_latency::Options + Sync) {
    sweep(|stop, fault| low_latency_rounds(&change, stop, fault));
}

/// Returns whether rank 0 got an error.
fn low_latency_rounds(
    change: impl Fn(low_latency::Options) -> low_latency::Options + Sync,
    stop: &Arc<Stop>,
    fault: Fault,
) -> bool {
    const TOKENS: u64 = 4;
    let shape = low_latency::Shape { max_tokens: TOKENS as u32, hidden: 128, num_topk: 2, num_experts: 4 };
    let outcomes = run_ranks(2, |number, group| {
        let hooks = Hooks { stop: Some(stop.clone()), ..Hooks::default() };
        let config = VirtConfig { ordinal: number, sm_count: 4, hooks, ..VirtConfig::default() };
        let options = |options: low_latency::Options| change(options.places(2).timeout(DEADLINE));
        // Tokens for both ranks, for this one and the other alone, and without experts.
        let ids = [0, 3, 1, 0, 2, -1, -1, -1];
        let mut rank = Ones::new(VirtualGpu::new(config), group.clone(), shape, options, &ids)?;
        let (mut place, mut elsewhere) = (rank.buffer.place(0)?, rank.buffer.place(1)?);
        let values = [3.0f32, 5.0, 9.0, 17.0];
        let all: Vec<_> = values
            .iter()
            .map(|&value| Ok((rank.tokens_of(-value)?, rank.rows_of(value)?, rank.sums(value)?)))
            .collect::<Result<_>>()?;
        let stream = rank.stream.clone();
        let order = StreamOrder::on(&stream);
        rounds((&*group, &stream), (stop, fault), |index, other| {
            let (x, experts, want) = &all[index];
            (rank.x, rank.experts) = (x.clone(), experts.clone());
            match other(Other::Dispatch) {
                None => {}
                Some(Other::Nothing) => return Ok(true),
                Some(Other::Elsewhere) => return rank.dispatch(&mut elsewhere).map(|_| true),
                Some(Other::Quantised) => {
                    let request = low_latency::DispatchRequest::new(&rank.x, &rank.topk_idx);
                    let request = request.quantise(Quantise::Fp8);
                    return rank.buffer.dispatch(&mut place, request, order).map(|_| true);
                }
                Some(other) => unreachable!("{other:?}"),
            }
            let received = rank.dispatch(&mut place)?;
            let counts = if number == 0 { Some(received.expert_counts.values(&stream)) } else { None };
            if let Some(Ok(counts)) = &counts {
                assert_eq!(counts[..], [4, 2], "at {fault:?}");
            }
            let rows = if number == 0 { Some(received.x.to_host::<bf16>(&stream)) } else { None };
            if let Some(Ok(rows)) = &rows {
                // The first two tokens of each rank have experts of rank 0.
                let rows =
                    rows.chunks((TOKENS * shape.hidden) as usize).map(|of| &of[..2 * shape.hidden as usize]);
                let is_right = rows.flatten().all(|&got| got == bf16::from_f32(-values[index]));
                assert!(is_right, "at {fault:?}: rows of another round");
            }
            match other(Other::Combine) {
                None => {}
                Some(Other::Nothing) => return Ok(true),
                Some(Other::Quantised) => {
                    let request = low_latency::CombineRequest::by_row(&rank.experts).quantise(Quantise::Fp8);
                    return rank.buffer.combine(received, request, order).map(|_| true);
                }
                Some(other) => {
                    drop(received);
                    let place = if other == Other::Elsewhere { &mut elsewhere } else { &mut place };
                    return rank.dispatch(place).map(|_| true);
                }
            }
            let combined = rank.combine(received)?;
            if number == 1 {
                return Ok(false);
            }
            let kept = rank.kept(&combined.x)?;
            let missing = rank.buffer.missing_tokens()?;
            for (index, (got, want)) in kept.iter().zip(want).enumerate() {
                let is_missing = missing.contains(&((index / shape.hidden as usize) as u32));
                let is_right = got == want || (got.is_nan() && is_missing);
                assert!(is_right, "at {fault:?}, {index}: {got}, {want}, missing {missing:?}");
            }
            let sums = combined.x.to_host::<bf16>(&stream);
            if let Ok(sums) = &sums {
                assert!(sums == want, "at {fault:?}: {sums:?}");
            }
            let rows_failed = rows.is_some_and(|rows| has_failed(&rows));
            Ok(has_failed(&sums) | counts.is_some_and(|counts| has_failed(&counts)) | rows_failed)
        })
    });
    rank_0_failed(&outcomes, fault)
}

#[test]
fn low_latency_with_packets() {
    low_latency(|options| options);
}

#[test]
fn low_latency_with_words() {
    low_latency(|options| options.packet_tokens(0));
}

#[test]
fn low_latency_across_nodes() {
    for transport in [TransportKind::Direct, TransportKind::Shm, TransportKind::Tcp] {
        let transport = TransportOptions::new(transport);
        low_latency(|options| options.ranks_per_node(1).keep_nodes().transport(transport.clone()));
    }
}

/// The calls of all rounds.
fn all_rounds(round: &[Other]) -> Vec<Other> {
    round.repeat(ALL_ROUNDS)
}

#[test]
fn other_calls_within_a_node() {
    use Other::{Cached, Combine, Dispatch, Elsewhere, Nothing};
    for rows in [Rows::InPool, Rows::InTensor] {
        let others = [Nothing, Dispatch, Elsewhere, Cached, Combine];
        other_calls(&others, &all_rounds(&[Dispatch, Combine, Cached]), |stop, fault| {
            high_throughput_rounds(None, rows, stop, fault)
        });
    }
}

#[test]
fn other_calls_across_nodes() {
    use Other::{Combine, Dispatch, Elsewhere, Nothing};
    for transport in [TransportKind::Direct, TransportKind::Shm, TransportKind::Tcp] {
        let nodes = Some(NodeLinks { ranks_per_node: 1, transport, queues: 1 });
        let others = [Nothing, Dispatch, Elsewhere, Combine];
        other_calls(&others, &all_rounds(&[Dispatch, Combine]), |stop, fault| {
            high_throughput_rounds(nodes, Rows::InPool, stop, fault)
        });
    }
}

#[test]
fn other_calls_of_low_latency() {
    let rights = all_rounds(&[Other::Dispatch, Other::Combine]);
    let of_one_node = |options: low_latency::Options| options;
    let with_words = |options: low_latency::Options| options.packet_tokens(0);
    let others = [Other::Nothing, Other::Dispatch, Other::Elsewhere, Other::Quantised];
    other_calls(&others, &rights, |stop, fault| low_latency_rounds(of_one_node, stop, fault));
    other_calls(&others, &rights, |stop, fault| low_latency_rounds(with_words, stop, fault));
    for transport in [TransportKind::Direct, TransportKind::Shm, TransportKind::Tcp] {
        let transport = TransportOptions::new(transport);
        let change = |options: low_latency::Options| {
            options.ranks_per_node(1).keep_nodes().transport(transport.clone())
        };
        other_calls(&others, &rights, |stop, fault| low_latency_rounds(change, stop, fault));
    }
}
