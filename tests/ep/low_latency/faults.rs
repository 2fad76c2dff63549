//! Ranks that are absent, make another call, or give wrong arguments.

use std::time::Duration;

use epoxide::driver::virt::{CheckConfig, Checker, VirtConfig, VirtualGpu};
use epoxide::driver::{Graph, Stream};
use epoxide::internal::driver;
use epoxide::low_latency::{Buffer, CombineRequest, DispatchRequest, Options, Quantise, Received, Shape};
use epoxide::transport::{TransportKind, TransportOptions};
use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
use epoxide::{Error, Result};
use epoxide_testing::harness::{PATIENCE, open_device, run_ranks, sleep};
use epoxide_testing::low_latency::LowLatencyCase;
use epoxide_testing::oracle::Style;
use epoxide_testing::tier;
use epoxide_vgpu::for_each_seed;
use half::bf16;

use super::ones::{Ones, numbers};
use crate::failing::{FailingDevice, REFUSAL};
use crate::promises::{found, status};
use crate::shapes::routing;
use crate::valid::{expect_gone, refused};

pub const RANKS: u32 = 3;
pub const TOKENS: u64 = 4;
pub const HIDDEN: u64 = 16;
pub const DEADLINE: Duration = Duration::from_millis(150);

/// Runs `main` on ranks whose waits are short, of one node and of three.
pub fn run(main: impl Fn(&mut Ones) -> Result<()> + Sync) {
    run_on(|options| options, &main);
    let transport = TransportOptions::new(TransportKind::Tcp);
    run_on(|options| options.ranks_per_node(1).keep_nodes().transport(transport.clone()), &main);
}

/// Runs `main` on two ranks of one node in check mode.
fn run_checked(main: impl Fn(&mut Ones) -> Result<()> + Sync) {
    let checker = Checker::new(CheckConfig::default());
    let shape = Shape { max_tokens: 2, hidden: HIDDEN, num_topk: 2, num_experts: 2 };
    run_ranks(2, |ordinal, group| {
        let config = VirtConfig { ordinal, checker: Some(checker.clone()), ..VirtConfig::default() };
        let options = |options: Options| options.timeout(DEADLINE);
        let mut rank = Ones::new(open_device(config)?, group.clone(), shape, options, &[0, 1, 1, 0])?;
        group.barrier(PATIENCE)?;
        main(&mut rank)?;
        group.barrier(PATIENCE)
    });
}

fn run_on(spread: impl Fn(Options) -> Options + Sync, main: &(impl Fn(&mut Ones) -> Result<()> + Sync)) {
    run_of(HIDDEN, None, spread, main);
}

/// The same with rows of so many elements, and warps in the order that a seed draws.
fn run_of(
    hidden: u64,
    seed: Option<u64>,
    spread: impl Fn(Options) -> Options + Sync,
    main: &(impl Fn(&mut Ones) -> Result<()> + Sync),
) {
    let routing = routing(&[TOKENS as u32; RANKS as usize], 2, 6, Style::DistinctTopK);
    let mut case = LowLatencyCase::new(routing, hidden as u32);
    case.schedule_seed = seed;
    run_ranks(RANKS, |number, group| {
        let shape = Shape { max_tokens: TOKENS as u32, hidden, num_topk: 2, num_experts: 6 };
        let options = |options: Options| spread(options.timeout(DEADLINE));
        let ids = case.routing.flat_topk_idx(number);
        let mut rank = Ones::new(case.device(number), group.clone(), shape, options, &ids)?;
        group.barrier(PATIENCE)?;
        let outcome = main(&mut rank);
        group.barrier(PATIENCE)?;
        outcome
    });
}

/// Every rank but 1 runs into its deadline, for rank 1, in `operation`.
fn expect_timeout(rank: &Ones, operation: &str, start: Duration) {
    let error = rank.outcome().unwrap_err();
    let Error::PeerTimeout { peer: 1, operation: ours, waited, .. } = &error else { panic!("{error}") };
    assert_eq!(*ours, operation, "{error}");
    assert!(
        *waited >= DEADLINE && rank.now() - start < 4 * DEADLINE,
        "{error} after {:?}",
        rank.now() - start
    );
}

#[test]
fn a_rank_that_is_gone_before_the_dispatch() {
    run(|rank| {
        if rank.rank == 1 {
            return Ok(());
        }
        let (start, mut place) = (rank.now(), rank.buffer.place(0)?);
        drop(rank.dispatch(&mut place)?);
        expect_timeout(rank, "low-latency dispatch", start);
        // And is of no use any more.
        assert!(matches!(rank.dispatch(&mut place), Err(Error::PeerTimeout { .. })));
        Ok(())
    });
}

#[test]
fn a_rank_that_is_gone_between_dispatch_and_combine() {
    run(|rank| {
        let mut place = rank.buffer.place(0)?;
        let received = rank.dispatch(&mut place)?;
        rank.outcome()?;
        if rank.rank == 1 {
            return Ok(());
        }
        let start = rank.now();
        rank.combine(received)?;
        expect_timeout(rank, "low-latency combine", start);
        Ok(())
    });
}

/// The host has enqueued the combine before the dispatch times out.
#[test]
fn a_timeout_names_the_operation_that_waited() {
    run(|rank| {
        if rank.rank == 1 {
            return Ok(());
        }
        let (start, mut place) = (rank.now(), rank.buffer.place(0)?);
        let received = rank.dispatch(&mut place)?;
        drop(rank.combine(received));
        expect_timeout(rank, "low-latency dispatch", start);
        Ok(())
    });
}

/// A group that shrinks by one of two dead ranks waits a whole time-out for the other one.
#[test]
fn a_timeout_names_all_ranks_that_did_not_come() {
    for is_combine in [false, true] {
        run(|rank| {
            let is_gone = rank.rank != 2;
            let mut place = rank.buffer.place(0)?;
            if !is_combine && is_gone {
                return Ok(());
            }
            let received = rank.dispatch(&mut place)?;
            if is_combine {
                rank.outcome()?;
                if is_gone {
                    return Ok(());
                }
                rank.combine(received)?;
            }
            let error = rank.outcome().expect_err("two ranks have gone");
            let Error::PeerTimeout { place, late_ranks, .. } = &error else { panic!("{error}") };
            assert_eq!((late_ranks[..].to_vec(), *place), (vec![0, 1], Some(0)), "{error}");
            assert!(error.to_string().contains("combine in place 0") == is_combine, "{error}");
            assert!(error.to_string().contains("ranks 0 and 1 may have died"), "{error}");
            Ok(())
        });
    }
}

/// Rows of the round before would pass for results.
#[test]
fn rows_of_a_failed_dispatch_are_not_read() {
    run(|rank| {
        let mut place = rank.buffer.place(0)?;
        let received = rank.dispatch(&mut place)?;
        received.x.to_host::<half::bf16>(&rank.stream)?;
        rank.combine(received)?;
        rank.outcome()?;
        if rank.rank == 1 {
            return Ok(());
        }
        let received = rank.dispatch(&mut place)?;
        let reads = [
            received.x.to_host::<half::bf16>(&rank.stream).map(drop),
            received.expert_counts.to_host::<i32>(&rank.stream).map(drop),
        ];
        for read in reads {
            expect_gone(read);
        }
        Ok(())
    });
}

/// The copy's tensor is the caller's, and the rows in it are the dispatch's.
#[test]
fn an_expert_major_copy_of_a_failed_dispatch_is_not_read() {
    run(|rank| {
        let mut place = rank.buffer.place(0)?;
        let rows = u64::from(rank.buffer.local_experts()) * rank.buffer.rows();
        let by_expert = Tensor::alloc(rank.stream.device(), DType::Bf16, &[rows, HIDDEN])?;
        let earlier_clone = by_expert.clone();
        for turn in 0..2 {
            if turn == 1 && rank.rank == 1 {
                return Ok(());
            }
            let request = DispatchRequest::new(&rank.x, &rank.topk_idx);
            let order = StreamOrder::on(&rank.stream);
            let received = rank.buffer.dispatch(&mut place, request, order)?;
            rank.buffer.gather_by_expert(&received, &by_expert, None, order)?;
            for copy in [&by_expert, &earlier_clone] {
                let read = copy.to_host::<half::bf16>(&rank.stream);
                if turn == 0 {
                    read?;
                } else {
                    assert!(matches!(read, Err(Error::PeerTimeout { peer: 1, .. })), "{read:?}");
                }
            }
            if turn == 0 {
                rank.combine(received)?;
            }
        }
        let zeros = vec![half::bf16::ZERO; (rows * HIDDEN) as usize];
        by_expert.write(&rank.stream, &zeros)?;
        assert_eq!(by_expert.to_host::<half::bf16>(&rank.stream)?, zeros);
        Ok(())
    });
}

/// Rows by expert are in the caller's tensor, tables in the place.
#[test]
fn rows_by_expert_of_a_failed_dispatch_are_not_read() {
    let main = |rank: &mut Ones| {
        let mut place = rank.buffer.place(0)?;
        let recv_x = Tensor::alloc(rank.stream.device(), DType::Bf16, &[30, HIDDEN])?;
        for turn in 0..2 {
            if turn == 1 && rank.rank == 1 {
                return Ok(());
            }
            let request = DispatchRequest::new(&rank.x, &rank.topk_idx).by_expert(4).recv_x(&recv_x);
            let received = rank.buffer.dispatch(&mut place, request, StreamOrder::on(&rank.stream))?;
            if turn == 0 {
                rank.combine(received)?;
                continue;
            }
            let by_expert = received.by_expert.as_ref().expect("asked for");
            let stream = &*rank.stream;
            let reads = [
                recv_x.to_host::<half::bf16>(stream).map(drop),
                by_expert.experts.psum().values(stream).map(drop),
                by_expert.recv_src_idx.values(stream).map(drop),
                by_expert.recv_topk_weights.values(stream).map(drop),
            ];
            for read in reads {
                expect_gone(read);
            }
        }
        Ok(())
    };
    run_on(|options| options.rows_by_expert(30), &main);
    let transport = TransportOptions::new(TransportKind::Tcp);
    let spread = |options: Options| options.ranks_per_node(1).keep_nodes().transport(transport.clone());
    run_on(|options| spread(options.rows_by_expert(30)), &main);
}

/// A read on a stream that has not waited for the operation, and of a failed one once the ranks
/// have regrouped.
#[test]
fn results_are_read_behind_their_operations_on_any_stream_and_stay_failed() {
    run(|rank| {
        let mut place = rank.buffer.place(0)?;
        let other = Stream::new(rank.stream.device())?;
        let part = rank.group.split((rank.rank == 1).into())?;
        for turn in 0..2 {
            if turn == 1 && rank.rank == 1 {
                return Ok(());
            }
            let request = DispatchRequest::new(&rank.x, &rank.topk_idx);
            let order = StreamOrder::comm(&rank.stream).asynchronous();
            let received = rank.buffer.dispatch(&mut place, request, order)?;
            let counts = received.expert_counts.values(&other);
            if turn == 0 {
                rank.stream.synchronize()?;
                let all = rank.group.all_gather(bytemuck::cast_slice(&counts?))?.concat();
                let counts = all.as_chunks().0.iter().copied().map(i32::from_ne_bytes);
                assert_eq!(counts.sum::<i32>(), RANKS as i32 * TOKENS as i32 * 2);
                continue;
            }
            assert!(matches!(counts, Err(Error::PeerTimeout { peer: 1, .. })), "{counts:?}");
            let received = received.detach();
            rank.stream.synchronize()?;
            rank.buffer.regroup(&*part)?;
            let received = received.at(&place)?;
            for read in [
                received.expert_counts.values(&rank.stream).map(drop),
                received.x.to_host::<half::bf16>(&rank.stream).map(drop),
            ] {
                let error = read.expect_err("the dispatch has failed");
                assert!(matches!(error, Error::PeerTimeout { peer: 1, .. }), "{error}");
            }
        }
        // Later operations are read as usual.
        let received = rank.dispatch(&mut place)?;
        received.expert_counts.values(&rank.stream)?;
        rank.combine(received)?;
        rank.outcome()
    });
}

/// An engine that waits for an event reads what it likes behind it.
#[test]
fn the_event_of_a_failed_operation_gives_its_error() {
    run(|rank| {
        let mut place = rank.buffer.place(0)?;
        if rank.rank == 1 {
            return Ok(());
        }
        let order = StreamOrder::on(&rank.stream).asynchronous();
        let request = DispatchRequest::new(&rank.x, &rank.topk_idx);
        let received = rank.buffer.dispatch(&mut place, request, order)?;
        let event = received.event.as_ref().expect("the call is asynchronous");
        let waits = [event.synchronize(), event.is_done().map(drop), event.wait_timeout(PATIENCE).map(drop)];
        for wait in waits {
            expect_gone(wait);
        }
        Ok(())
    });
}

/// Kernels that read sums get no error.
#[test]
fn a_failed_combine_leaves_nan() {
    let combine = |rank: &mut Ones, quantise: Quantise, is_nan: bool| -> Result<()> {
        let mut place = rank.buffer.place(0)?;
        let received = rank.dispatch(&mut place)?;
        rank.outcome()?;
        assert_eq!(status(&rank.stream, rank.buffer.status_ptr())?, 0);
        if rank.rank == 1 {
            return Ok(());
        }
        let rows = CombineRequest::by_row(&rank.experts).quantise(quantise);
        let combined = rank.buffer.combine(received, rows, StreamOrder::on(&rank.stream))?;
        let sums = rank.kept(&combined.x)?;
        assert_eq!(sums.iter().all(|sum| sum.is_nan()), is_nan, "{sums:?}");
        assert_ne!(status(&rank.stream, rank.buffer.status_ptr())?, 0);
        assert_eq!(rank.buffer.missing_tokens()?, (0..TOKENS as u32).collect::<Vec<_>>());
        assert!(matches!(rank.buffer.check(), Err(Error::PeerTimeout { peer: 1, .. })));
        Ok(())
    };
    let transport = TransportOptions::new(TransportKind::Direct);
    for quantise in [Quantise::None, Quantise::Fp8] {
        let is_nan = |rank: &mut Ones| combine(rank, quantise, true);
        run_of(128, None, |options| options, &is_nan);
        // Rows that return with words, and not as packets.
        run_of(128, None, |options| options.packet_tokens(0), &is_nan);
        run_of(
            128,
            None,
            |options| options.ranks_per_node(1).keep_nodes().transport(transport.clone()),
            &is_nan,
        );
    }
    run_on(|options| options.keep_sums_on_failure(), &|rank: &mut Ones| combine(rank, Quantise::None, false));
}

#[test]
fn a_rank_that_is_gone_after_some_rounds() {
    run(|rank| {
        let mut place = rank.buffer.place(0)?;
        for _ in 0..5 {
            let received = rank.dispatch(&mut place)?;
            rank.combine(received)?;
        }
        rank.outcome()?;
        if rank.rank == 1 {
            return Ok(());
        }
        // All that is enqueued behind the first wait that expires ends at once.
        let start = rank.now();
        for _ in 0..20 {
            let Ok(received) = rank.dispatch(&mut place) else { break };
            if rank.combine(received).is_err() {
                break;
            }
        }
        rank.stream.synchronize()?;
        assert!(rank.now() - start < 4 * DEADLINE, "{:?}", rank.now() - start);
        assert!(matches!(rank.buffer.check(), Err(Error::PeerTimeout { peer: 1, .. })));
        Ok(())
    });
}

/// Rank 1 dispatches where the others combine. `is_first`: it is in its call before they begin
/// theirs. Gives the rank's error.
fn make_different_calls(rank: &mut Ones, is_first: bool) -> Result<Error> {
    let mut place = rank.buffer.place(0)?;
    let received = rank.dispatch(&mut place)?;
    rank.outcome()?;
    if is_first && rank.rank != 1 {
        rank.group.barrier(PATIENCE)?;
        // By then rank 1 polls.
        sleep(rank.stream.device(), DEADLINE / 10);
    }
    if rank.rank == 1 {
        drop(received);
        drop(rank.dispatch(&mut place)?);
    } else {
        rank.combine(received)?;
    }
    if is_first && rank.rank == 1 {
        rank.group.barrier(PATIENCE)?;
    }
    let error = rank.outcome().unwrap_err();
    let named = match &error {
        Error::OtherCall { ours, theirs, .. } => (ours.contains("dispatch"), theirs.contains("combine")),
        other => panic!("{other}"),
    };
    assert_eq!(named, (rank.rank == 1, rank.rank == 1), "{error}");
    Ok(error)
}

#[test]
fn ranks_that_make_different_calls() {
    run(|rank| make_different_calls(rank, false).map(drop));
}

/// No combine has answered the dispatches into two places. Rank 1 dispatches into the second one
/// again, and reads the rows of the first one still.
#[test]
fn rows_of_a_place_stay_where_peers_dispatch_into_it_in_another_call() {
    let shape = Shape { max_tokens: 2, hidden: HIDDEN, num_topk: 2, num_experts: 2 };
    for_each_seed(tier::pick(4, 20), |seed| {
        run_ranks(2, |ordinal, group| {
            let device =
                open_device(VirtConfig { ordinal, schedule_seed: Some(seed), ..VirtConfig::default() });
            let options = |options: Options| options.timeout(DEADLINE).places(2);
            let mut rank = Ones::new(device?, group.clone(), shape, options, &[0, 1, 1, 0])?;
            let (mut used, mut other) = (rank.buffer.place(0)?, rank.buffer.place(1)?);
            let received = rank.dispatch(&mut used)?;
            let others = rank.dispatch(&mut other)?;
            rank.outcome()?;
            group.barrier(PATIENCE)?;
            rank.x.write(&rank.stream, &numbers(2 * HIDDEN, 2.0))?;
            if rank.rank == 0 {
                drop((received, others));
                drop(rank.dispatch(&mut used)?);
                assert!(matches!(rank.outcome(), Err(Error::OtherCall { .. })));
                group.barrier(PATIENCE)?;
                return group.barrier(PATIENCE);
            }
            drop(others);
            drop(rank.dispatch(&mut other)?);
            assert!(matches!(rank.outcome(), Err(Error::OtherCall { .. })));
            group.barrier(PATIENCE)?;
            let ones: Vec<u8> = bytemuck::cast_slice(&numbers(HIDDEN, 1.0)).to_vec();
            assert_eq!(found(&rank.stream, &received.x)?, vec![ones; 4], "seed {seed}");
            group.barrier(PATIENCE)
        });
    });
}

/// A block of the others reads rank 1's call before the block that publishes their call begins.
#[test]
fn a_rank_that_makes_another_call_before_the_others() {
    run(|rank| make_different_calls(rank, true).map(drop));
}

/// A kernel that ends early by a fault looks like another call. In check mode the error has the
/// longest waits, here that of rank 1 for the call of rank 0.
#[test]
fn another_call_is_reported_with_the_waits_in_check_mode() {
    run_checked(|rank| {
        let error = make_different_calls(rank, true)?.to_string();
        if rank.rank == 1 {
            assert!(error.contains("the longest waits of kernels:"), "{error}");
            assert!(error.contains("a read in kernel 'low_latency_dispatch'"), "{error}");
        }
        assert!(error.contains("the record was last written by a "), "{error}");
        assert!(error.contains("its block has read 'low-latency pool'"), "{error}");
        Ok(())
    });
}

/// Rows of the first half have left, and peers wait for the second.
#[test]
fn a_second_half_that_is_not_launched_breaks_the_buffer() {
    run_ranks(1, |_, group| {
        let failing = FailingDevice::new(VirtualGpu::new(VirtConfig::default()), &["low_latency_wait"]);
        let shape = Shape { max_tokens: 2, hidden: HIDDEN, num_topk: 2, num_experts: 2 };
        let mut rank =
            Ones::new(driver::device(failing.clone()), group, shape, |options| options, &[0, 1, 1, 0])?;
        let mut place = rank.buffer.place(0)?;
        let waits = TypedTensor::from_host(&rank.stream, &[1], &[0i64])?;
        failing.refuse_next();
        let request = DispatchRequest::new(&rank.x, &rank.topk_idx).cumulative_wait_ns(&waits);
        let order = StreamOrder::on(&rank.stream);
        refused(rank.buffer.dispatch(&mut place, request, order).map(drop), &[REFUSAL]);
        let later = rank.dispatch(&mut place).map(drop);
        assert!(matches!(&later, Err(Error::Broken { call: "low-latency dispatch", .. })), "{later:?}");
        rank.stream.synchronize()
    });
}

/// Runs `work` on one rank of two tokens and two experts, with these ids.
fn on_one_rank(ids: [i64; 4], work: impl Fn(Ones) -> Result<()> + Sync) {
    let shape = Shape { max_tokens: 2, hidden: HIDDEN, num_topk: 2, num_experts: 2 };
    run_ranks(1, |_, group| {
        let device = open_device(VirtConfig::default())?;
        work(Ones::new(device, group, shape, |options| options, &ids)?)
    });
}

/// A rejected call writes nothing: tensors that it was to fill have the outcomes of others.
#[test]
fn a_rejected_call_leaves_the_outcome_of_tensors_alone() {
    on_one_rank([0, 1, 1, 2], |mut rank| {
        let mut place = rank.buffer.place(0)?;
        let times = TypedTensor::from_host(&rank.stream, &[1], &[0i64])?;
        let counts = TypedTensor::from_host(&rank.stream, &[2], &[0i32, 0])?;
        rank.dispatch(&mut place).map(drop)?;
        rank.stream.synchronize()?;
        let request = DispatchRequest::new(&rank.x, &rank.topk_idx).cumulative_wait_ns(&times);
        let request = request.cumulative_counts(&counts);
        let rejected = rank.buffer.dispatch(&mut place, request, StreamOrder::on(&rank.stream));
        refused(rejected.map(drop), &["topk_idx", "2 of token 1"]);
        assert_eq!(times.to_host::<i64>(&rank.stream)?, [0]);
        assert_eq!(counts.to_host::<i32>(&rank.stream)?, [0, 0]);
        Ok(())
    });
}

#[test]
fn a_rejected_gather_leaves_the_outcome_of_its_output_alone() {
    on_one_rank([0, 1, 1, 0], |mut rank| {
        let (stream, mut place) = (rank.stream.clone(), rank.buffer.place(0)?);
        let rows = u64::from(rank.buffer.local_experts()) * rank.buffer.rows();
        let ones = vec![bf16::ONE; (rows * HIDDEN) as usize];
        let x = Tensor::from_host(&stream, DType::Bf16, &[rows, HIDDEN], &ones)?;
        let request = DispatchRequest::new(&rank.x, &rank.topk_idx);
        let step = rank.buffer.capture(&stream, |buffer, order| {
            buffer.dispatch(&mut place, request, order).map(Received::detach)
        })?;
        let detached = rank.dispatch(&mut place)?.detach();
        let received = detached.at(&place)?;
        rank.topk_idx.write(&stream, &[0i64, 1, 1, 2])?;
        step.launch(&stream)?;
        let gathered = rank.buffer.gather_by_expert(received, &x, None, StreamOrder::on(&stream));
        assert!(matches!(gathered, Err(Error::StaleHandle(_))), "{gathered:?}");
        refused(step.check(&stream), &["topk_idx", "2 of token 1"]);
        assert_eq!(x.to_host::<bf16>(&stream)?, ones);
        Ok(())
    });
}

#[test]
fn tensors_that_a_warm_up_fills_have_its_outcome() {
    on_one_rank([0, 1, 1, 2], |mut rank| {
        let mut place = rank.buffer.place(0)?;
        let counts = TypedTensor::from_host(&rank.stream, &[2], &[0i32, 0])?;
        rank.buffer.begin_warmup();
        let request = DispatchRequest::new(&rank.x, &rank.topk_idx).cumulative_counts(&counts);
        rank.buffer.dispatch(&mut place, request, StreamOrder::on(&rank.stream)).map(drop)?;
        rank.buffer.end_warmup();
        refused(counts.to_host::<i32>(&rank.stream), &["topk_idx", "2 of token 1"]);
        Ok(())
    });
}

/// The host waits for a call as long as the call may wait for peers.
#[test]
fn a_call_may_take_longer_than_the_buffers_deadline() {
    let shape = Shape { max_tokens: 2, hidden: HIDDEN, num_topk: 2, num_experts: 2 };
    run_ranks(2, |ordinal, group| {
        let config = VirtConfig { ordinal, ..VirtConfig::default() };
        let options = |options: Options| options.timeout(DEADLINE);
        let mut rank = Ones::new(open_device(config)?, group.clone(), shape, options, &[0, 1, 1, 0])?;
        let mut place = rank.buffer.place(0)?;
        if ordinal == 1 {
            sleep(rank.stream.device(), 10 * DEADLINE);
        }
        let request = DispatchRequest::new(&rank.x, &rank.topk_idx).timeout(40 * DEADLINE);
        let order = StreamOrder::on(&rank.stream);
        drop(rank.buffer.dispatch(&mut place, request, order)?);
        assert!(rank.buffer.missing_tokens()?.is_empty());
        rank.outcome()?;
        group.barrier(PATIENCE)
    });
}

/// The combine of `received`, as a graph.
pub fn captured_combine(rank: &mut Ones, received: Received<'_>) -> Result<Graph> {
    let stream = rank.stream.clone();
    stream.capture(|| rank.combine(received).map(drop))
}

/// The error of a combine that is replayed a second time behind its dispatch.
fn replay_without_a_dispatch(rank: &mut Ones) -> Result<Error> {
    let mut place = rank.buffer.place(0)?;
    let received = rank.dispatch(&mut place)?;
    let graph = captured_combine(rank, received)?;
    // SAFETY: the recorded addresses are the rank's, which waits for the stream.
    unsafe { graph.launch(&rank.stream)? };
    rank.outcome()?;
    // SAFETY: as above.
    unsafe { graph.launch(&rank.stream)? };
    let error = rank.outcome().unwrap_err();
    assert!(matches!(error, Error::Broken { call: "low-latency combine", .. }), "{error}");
    assert!(error.to_string().contains("no dispatch came to its place"), "{error}");
    Ok(error)
}

/// Peers may still sum what the first one returned.
#[test]
fn a_combine_that_is_replayed_without_a_dispatch_fails() {
    run(|rank| replay_without_a_dispatch(rank).map(drop));
}

#[test]
fn a_combine_without_a_dispatch_names_what_its_kernel_has_read_in_check_mode() {
    run_checked(|rank| {
        let error = replay_without_a_dispatch(rank)?.to_string();
        for part in
            ["the record was last written by a ", "its block has read 'low-latency tables'", "(turns["]
        {
            assert!(error.contains(part), "{part}: {error}");
        }
        Ok(())
    });
}

#[test]
fn a_combine_that_is_replayed_behind_a_dispatch_of_other_tokens_fails() {
    run(|rank| {
        let mut place = rank.buffer.place(0)?;
        let received = rank.dispatch(&mut place)?;
        let graph = captured_combine(rank, received)?;
        let half = TOKENS / 2;
        let few = vec![half::bf16::ONE; (half * HIDDEN) as usize];
        rank.x = Tensor::from_host(&rank.stream, DType::Bf16, &[half, HIDDEN], &few)?;
        rank.topk_idx = TypedTensor::from_host(&rank.stream, &[half, 2], &vec![0; half as usize * 2])?;
        drop(rank.dispatch(&mut place)?);
        rank.outcome()?;
        // SAFETY: the recorded addresses are the rank's, which waits for the stream.
        unsafe { graph.launch(&rank.stream)? };
        let error = rank.outcome().unwrap_err();
        assert!(matches!(error, Error::Broken { call: "low-latency combine", .. }), "{error}");
        let parts =
            format!("captured for {TOKENS} tokens of this rank, and the dispatch into its place had {half}");
        assert!(error.to_string().contains(&parts), "{error}");
        Ok(())
    });
}

#[test]
fn an_expert_id_out_of_range_is_named() {
    run(|rank| {
        let mut place = rank.buffer.place(0)?;
        if rank.rank == 2 {
            rank.topk_idx = TypedTensor::from_host(&rank.stream, &[TOKENS, 2], &[0, 1, 2, -1, 4, 6, 5, 5])?;
        }
        drop(rank.dispatch(&mut place)?);
        let outcome = rank.outcome();
        if rank.rank != 2 {
            return outcome;
        }
        assert_eq!(rank.buffer.missing_tokens()?, [2]);
        let error = outcome.unwrap_err();
        assert!(
            matches!(&error, Error::Broken { .. }) && error.to_string().contains("6 of token 2"),
            "{error}"
        );
        Ok(())
    });
}

/// Blocks that begin after the one with the id send their tokens, too, and that block the token's
/// other entry.
#[test]
fn an_expert_id_out_of_range_holds_no_other_token_back() {
    // The ids of each rank, which has two experts. Rank 2 has an id out of range.
    const IDS: [[i64; 8]; 3] = [[0, 1, 2, 3, 4, 5, 0, 5], [0, 1, 2, 3, 4, 5, 0, 5], [6, 0, 2, 1, 4, 0, 2, 5]];
    let main = |rank: &mut Ones| {
        let (me, mut place) = (i64::from(rank.rank), rank.buffer.place(0)?);
        let value = |source: i64, token: u64| bf16::from_f32((source * 8 + token as i64 + 1) as f32);
        let x: Vec<_> = (0..TOKENS).flat_map(|token| vec![value(me, token); HIDDEN as usize]).collect();
        rank.x = Tensor::from_host(&rank.stream, DType::Bf16, &[TOKENS, HIDDEN], &x)?;
        rank.topk_idx = TypedTensor::from_host(&rank.stream, &[TOKENS, 2], &IDS[me as usize])?;
        let received = rank.dispatch(&mut place)?;
        let outcome = rank.outcome();
        if me == 2 {
            assert!(matches!(outcome, Err(Error::Broken { .. })), "{outcome:?}");
            return Ok(());
        }
        outcome?;
        let rows_of = |expert: i64| IDS.iter().flatten().filter(|&&id| id == expert).count() as i32;
        assert_eq!(received.expert_counts.values(&rank.stream)?, [rows_of(2 * me), rows_of(2 * me + 1)]);
        let x = received.x.to_host::<bf16>(&rank.stream)?;
        for (source, ids) in (0..).zip(&IDS) {
            for (token, ids) in (0..).zip(ids.chunks(2)) {
                if ids.iter().any(|id| id / 2 == me) {
                    let row = (source as u64 * TOKENS + token) * HIDDEN;
                    let got = &x[row as usize..][..HIDDEN as usize];
                    assert!(got.iter().all(|&x| x == value(source, token)), "token {token} of {source}");
                }
            }
        }
        Ok(())
    };
    let tcp = TransportOptions::new(TransportKind::Tcp);
    for_each_seed(tier::pick(4, 50), |seed| {
        run_of(HIDDEN, Some(seed), |options| options, &main);
        run_of(HIDDEN, Some(seed), |options| options.ranks_per_node(1).transport(tcp.clone()), &main);
    });
}

#[test]
fn rows_that_were_sent_and_are_never_received() {
    run(|rank| {
        let mut place = rank.buffer.place(0)?;
        let request = DispatchRequest::new(&rank.x, &rank.topk_idx);
        let order = StreamOrder::on(&rank.stream);
        drop(rank.buffer.dispatch_send(&mut place, request, order)?);
        let error = rank.dispatch(&mut place).unwrap_err();
        assert!(matches!(error, Error::Broken { call: "low-latency dispatch", .. }), "{error}");
        refused(rank.outcome(), &[&error.to_string()]);
        let group = rank.group.clone();
        group.barrier(PATIENCE)?;
        rank.buffer.regroup(&*group)?;
        rank.buffer.check()
    });
}

#[test]
fn arguments_that_do_not_fit() {
    run(|rank| {
        let mut place = rank.buffer.place(0)?;
        let order = StreamOrder::on(&rank.stream);
        let device = rank.stream.device();
        let wide = Tensor::alloc(device, DType::Bf16, &[TOKENS, HIDDEN * 2])?;
        let many = Tensor::alloc(device, DType::Bf16, &[TOKENS + 1, HIDDEN])?;
        let float = Tensor::alloc(device, DType::F32, &[TOKENS, HIDDEN])?;
        let refused = |error: Error, text: &str| assert_eq!(error.to_string(), text);
        for (x, text) in [
            (&wide, "x has shape [4, 32], expected [num_tokens = 4, hidden = 16]"),
            (&many, "num_tokens = 5: the buffer was made for at most 4: create it with max_tokens >= 5"),
            (&float, "x has dtype f32, expected bf16 or fp8 or f16 or fp8_e5m2 or fp4 or u8"),
        ] {
            let request = DispatchRequest::new(x, &rank.topk_idx);
            refused(rank.buffer.dispatch(&mut place, request, order).unwrap_err(), text);
        }
        let quantise = DispatchRequest::new(&rank.x, &rank.topk_idx).quantise(Quantise::Fp8);
        refused(
            rank.buffer.dispatch(&mut place, quantise, order).unwrap_err(),
            "quantise = Fp8 of 16 x bf16: quantising takes bf16 rows with a multiple of 128 elements: \
             pad rows, or send rows that are quantised already",
        );
        let text = "place = 0: it is handed out already: drop that Place first";
        refused(rank.buffer.place(0).unwrap_err(), text);
        refused(rank.buffer.place(1).unwrap_err(), "place = 1: the buffer has 1: create it with more places");
        let received = rank.dispatch(&mut place)?;
        let quantise = CombineRequest::by_row(&rank.experts).quantise(Quantise::Fp8PowerOfTwo);
        refused(
            rank.buffer.combine(received, quantise, StreamOrder::on(&rank.stream)).unwrap_err(),
            "quantise = Fp8PowerOfTwo of 16 x bf16: quantising takes bf16 rows with a multiple of 128 \
             elements: pad rows, or send rows that are quantised already",
        );
        let (stream, x, experts) = (rank.stream.clone(), rank.x.clone(), rank.experts.clone());
        for (request, text) in [
            (
                CombineRequest::by_expert(&experts),
                "rows has shape [12, 16], expected [local_experts * rows = 24, hidden = 16]",
            ),
            (CombineRequest::by_row(&x), "rows has shape [4, 16], expected [rows = 12, hidden = 16]"),
            (
                CombineRequest::by_row(&experts).timeout(Duration::ZERO),
                "timeout = 0 s: must be longer than 0: calls wait for their peers so long",
            ),
        ] {
            let received = rank.dispatch(&mut place)?;
            let combined = rank.buffer.combine(received, request, StreamOrder::on(&stream));
            refused(combined.unwrap_err(), text);
        }
        // Rejected calls enqueued no work.
        let received = rank.dispatch(&mut place)?;
        rank.combine(received)?;
        rank.outcome()
    });
}

#[test]
fn options_that_break_a_rule() {
    run_ranks(1, |rank, group| {
        let device = LowLatencyCase::new(routing(&[1], 1, 1, Style::DistinctTopK), 8).device(rank);
        let fails = |options: Options, text: &str| {
            let error = Buffer::new(device.clone(), &*group, options).unwrap_err();
            assert_eq!(error.to_string(), text);
        };
        let shape = Shape { max_tokens: 1, hidden: 8, num_topk: 1, num_experts: 1 };
        let tokens = "must be 1 to 1024; larger batches are what the high-throughput buffer is for";
        fails(Options::new(Shape { max_tokens: 0, ..shape }), &format!("max_tokens = 0: {tokens}"));
        fails(Options::new(Shape { max_tokens: 1025, ..shape }), &format!("max_tokens = 1025: {tokens}"));
        let hidden = "must be a positive multiple of 8, below 65536: rows move 16 bytes at a time";
        fails(Options::new(Shape { hidden: 12, ..shape }), &format!("hidden = 12: {hidden}"));
        fails(Options::new(Shape { hidden: 1 << 16, ..shape }), &format!("hidden = 65536: {hidden}"));
        fails(Options::new(Shape { num_topk: 33, ..shape }), "num_topk = 33: must be 1 to 32");
        fails(
            Options::new(Shape { num_experts: 0, ..shape }),
            "num_experts = 0: must be a positive multiple of the number of ranks, 1",
        );
        fails(Options::new(shape).places(0), "places = 0: must be 1 to 64");
        fails(Options::new(shape).chunk_tokens(0), "chunk_tokens = 0: must be at least 1");
        fails(
            Options::new(shape).timeout(Duration::ZERO),
            "timeout = 0 s: must be longer than 0: calls wait for their peers so long",
        );
        fails(
            Options::new(shape).num_sms(0),
            "num_sms = 0: must be at least 1: leave it out for all that there are",
        );
        fails(
            Options::new(shape).ranks_per_node(0),
            "ranks_per_node = 0: one of several nodes has 1 to 8 ranks, a single one up to 64",
        );
        fails(
            Options::new(shape).ranks_per_node(2),
            "ranks_per_node = 2: must divide the number of ranks, 1: every node has as many",
        );
        Ok(())
    });
}
