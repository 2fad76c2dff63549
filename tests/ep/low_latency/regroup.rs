//! Ranks that are left out, and taken in again.

use std::sync::Arc;
use std::time::Duration;

use epoxide::driver::Device;
use epoxide::driver::virt::{CheckConfig, Checker, VirtConfig, VirtualGpu};
use epoxide::group::ProcessGroup;
use epoxide::internal::{driver, regroup_ahead};
use epoxide::low_latency::{DispatchRequest, Options, Shape};
use epoxide::transport::{TransportKind, TransportOptions};
use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
use epoxide::{Error, Result};
use epoxide_testing::harness::{NodeLinks, PATIENCE, run_ranks, sleep};
use epoxide_testing::low_latency::{LowLatencyCase, LowLatencyRank};
use epoxide_testing::oracle::Style;
use epoxide_testing::tier;
use epoxide_vgpu::for_each_seed;
use half::bf16;
use proptest::prelude::*;

use super::faults::captured_combine;
use super::ones::Ones;
use super::property::case as random_case;
use crate::failing::{FailingDevice, REFUSAL};
use crate::property::config;
use crate::shapes::routing;
use crate::valid::refused;

const DEADLINE: Duration = Duration::from_millis(150);

/// At which call those that go stop.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gone {
    BeforeDispatch,
    /// Before a dispatch of which the others have launched the first half, and launch no more.
    BetweenHalves,
    BeforeCombine,
}

const ALL: [Gone; 3] = [Gone::BeforeDispatch, Gone::BetweenHalves, Gone::BeforeCombine];

/// One pair of calls of a member. The call that waits for the lost ranks runs into its deadline.
fn fail(rank: &mut LowLatencyRank, case: &LowLatencyCase, gone: Gone, is_gone: bool) -> Result<()> {
    let inputs = case.inputs(rank)?;
    let mut place = rank.buffer.place(0)?;
    let order = StreamOrder::on(&rank.stream);
    if is_gone && gone != Gone::BeforeCombine {
        return Ok(());
    }
    let request = inputs.request(case.quantise).timeout(DEADLINE);
    if gone == Gone::BetweenHalves {
        drop(rank.buffer.dispatch_send(&mut place, request, order)?);
        let error = rank.buffer.dispatch(&mut place, request, order).unwrap_err();
        assert!(matches!(error, Error::Broken { .. }), "{error}");
        return Ok(());
    }
    let received = rank.buffer.dispatch(&mut place, request, order)?;
    rank.stream.synchronize()?;
    if gone == Gone::BeforeCombine && !is_gone {
        rank.buffer.combine(received, inputs.experts(case).timeout(DEADLINE), order)?;
        rank.stream.synchronize()?;
    }
    if is_gone {
        return rank.buffer.check();
    }
    let error = rank.buffer.check().unwrap_err();
    let Error::PeerTimeout { waited, .. } = &error else { panic!("{error}") };
    assert!(*waited >= DEADLINE, "{error}");
    Ok(())
}

/// Runs `case` with all, then without the ranks `gone`, then with all again; everything is compared
/// with the oracle. Each time rows and weights are others, so that none left behind is right.
pub fn leave_out_and_take_in(case: &LowLatencyCase, gone: &[u32], when: Gone) {
    let [failing, without, again] =
        [1, 2, 3].map(|more| LowLatencyCase { seed: case.seed.wrapping_add(more), ..case.clone() });
    let without = without.without(gone);
    case.run(|rank| {
        case.verify(rank)?;
        let (all, is_gone) = (rank.group.clone(), gone.contains(&rank.rank));
        let part = all.split(is_gone.into())?;
        all.barrier(PATIENCE)?;
        fail(rank, &failing, when, is_gone)?;
        if !is_gone {
            rank.group = part;
            rank.buffer.regroup(&*rank.group.clone())?;
            rank.buffer.check()?;
            assert!(rank.buffer.members().iter().all(|member| !gone.contains(member)));
            without.verify(rank)?;
        }
        all.barrier(PATIENCE)?;
        rank.group = all;
        rank.buffer.regroup(&*rank.group.clone())?;
        assert_eq!(rank.buffer.members().len(), case.routing.num_ranks() as usize);
        rank.round_trip(&again)
    });
}

fn case(packet_tokens: u32) -> LowLatencyCase {
    LowLatencyCase {
        packet_tokens,
        rounds: tier::pick(2, 3),
        places: 2,
        ..LowLatencyCase::new(routing(&[6, 5, 7, 3], 4, 8, Style::WithHoles), 256)
    }
}

#[test]
fn the_others_go_on_and_take_it_in_again() {
    for when in ALL {
        for packet_tokens in tier::sample([5, 0, 8]) {
            leave_out_and_take_in(&case(packet_tokens), &[1], when);
        }
    }
}

#[test]
fn one_goes_on_alone() {
    for case in [case(4), LowLatencyCase { nodes: two_nodes(TransportKind::Shm), ..case(4) }] {
        leave_out_and_take_in(&case, &[0, 1, 3], Gone::BeforeCombine);
    }
}

fn two_nodes(transport: TransportKind) -> Option<NodeLinks> {
    Some(NodeLinks { ranks_per_node: 2, transport, queues: 1 })
}

#[test]
fn ranks_of_this_node_and_of_another_one_go_and_come_again() {
    for when in ALL {
        for transport in tier::sample([TransportKind::Shm, TransportKind::Direct, TransportKind::Tcp]) {
            leave_out_and_take_in(&LowLatencyCase { nodes: two_nodes(transport), ..case(0) }, &[1, 2], when);
        }
    }
}

#[test]
fn the_checker_finds_nothing_while_ranks_come_and_go() {
    let mut moments = ALL.into_iter().cycle();
    let across = two_nodes(TransportKind::Direct);
    let all = [(Some(7), across), (None, across), (Some(7), None), (None, None)];
    for (weak_memory, nodes) in all.into_iter().take(tier::pick(1, 4)) {
        let config = CheckConfig { races: weak_memory.is_none(), weak_memory, ..CheckConfig::default() };
        let checker = Some(Checker::new(config));
        let hidden = tier::pick(64, 256);
        let case = LowLatencyCase { nodes, checker, hidden, schedule_seed: Some(3), ..case(5) };
        for when in tier::pick(vec![moments.next().unwrap()], ALL.to_vec()) {
            leave_out_and_take_in(&case, &[2], when);
        }
    }
}

/// Operations whose waits expire do not affect later ones, in any state. One rank is late in each
/// round: to the dispatch, or to the combine alone.
#[test]
fn missed_deadlines_leave_nothing_behind() {
    for_each_seed(tier::pick(2, 6), |seed| {
        let nodes = if seed % 2 == 0 { None } else { two_nodes(TransportKind::Shm) };
        let case = LowLatencyCase { nodes, schedule_seed: Some(seed), chunk_tokens: 3, ..case(0) };
        case.run(|rank| {
            let group = rank.group.clone();
            for round in 0..4 {
                // Other rows in each round, so that none left behind is right.
                let case = LowLatencyCase { seed: u64::from(round) + 2, ..case.clone() };
                let inputs = case.inputs(rank)?;
                let is_late = rank.rank == round;
                let come = |device: &Device| {
                    if is_late {
                        sleep(device, DEADLINE);
                    }
                };
                let mut place = rank.buffer.place(0)?;
                let (stream, at_once) = (rank.stream.clone(), Duration::from_nanos(1));
                let order = StreamOrder::on(&stream);
                if round % 2 == 0 {
                    come(rank.device());
                }
                let request = inputs.request(case.quantise).timeout(at_once);
                let received = rank.buffer.dispatch(&mut place, request, order)?;
                if round % 2 == 1 {
                    come(stream.device());
                }
                // The dispatch's wait may have expired by now.
                let combined = rank.buffer.combine(received, inputs.experts(&case).timeout(at_once), order);
                let known = matches!(&combined, Ok(_) | Err(Error::PeerTimeout { .. }));
                assert!(known, "{:?}", combined.map(drop));
                stream.synchronize()?;
                let outcome = rank.buffer.check();
                let has_expired = matches!(outcome, Err(Error::PeerTimeout { .. }));
                assert!(has_expired || is_late, "rank {}, round {round}: {outcome:?}", rank.rank);
                rank.buffer.regroup(&*group)?;
            }
            rank.round_trip(&case)
        });
    });
}

proptest! {
    #![proptest_config(config(16))]

    #[test]
    fn any_ranks_may_go(
        case in random_case(6, 6),
        gone in prop::collection::vec(any::<bool>(), 6),
        when in prop::sample::select(ALL.to_vec()),
    ) {
        let ranks = case.routing.num_ranks();
        // At least one rank stays, and at least one leaves.
        let gone: Vec<u32> = (1..ranks).filter(|&rank| gone[rank as usize] || rank == 1).collect();
        prop_assume!(!gone.is_empty());
        leave_out_and_take_in(&case, &gone, when);
    }
}

const TOKENS: u64 = 4;
const HIDDEN: u64 = 16;

/// A rank of three on a device that refuses the second half of an operation on request.
fn of_three(number: u32, group: &Arc<dyn ProcessGroup>) -> Result<(Ones, Arc<FailingDevice>)> {
    let device = VirtualGpu::new(VirtConfig { ordinal: number, ..VirtConfig::default() });
    let failing = FailingDevice::new(device, &["low_latency_wait"]);
    let shape = Shape { max_tokens: 2, hidden: HIDDEN, num_topk: 1, num_experts: 3 };
    let options = |options: Options| options.timeout(DEADLINE);
    let rank = Ones::new(driver::device(failing.clone()), group.clone(), shape, options, &[0, 1])?;
    Ok((rank, failing))
}

#[test]
fn a_rank_that_cannot_go_on_gives_the_others_its_reason() {
    run_ranks(3, |number, group| {
        let (mut rank, failing) = of_three(number, &group)?;
        if number == 1 {
            let mut place = rank.buffer.place(0)?;
            let waits = TypedTensor::from_host(&rank.stream, &[3], &[0i64; 3])?;
            failing.refuse_next();
            let request = DispatchRequest::new(&rank.x, &rank.topk_idx).cumulative_wait_ns(&waits);
            let sent = rank.buffer.dispatch(&mut place, request, StreamOrder::on(&rank.stream));
            refused(sent.map(drop), &[REFUSAL]);
        }
        let error = rank.buffer.regroup(&*group).unwrap_err();
        let is_known = match &error {
            Error::Broken { call: "low-latency dispatch", .. } => number == 1,
            Error::PeerFailed { peer: 1, reason, .. } => number != 1 && reason.contains(REFUSAL),
            _ => false,
        };
        assert!(is_known, "rank {number}: {error:?}");
        rank.stream.synchronize()?;
        group.barrier(PATIENCE)
    });
}

/// Some ranks give the values that the others leave out: those of a buffer of three ranks.
#[test]
fn two_of_three_ranks_have_the_same_options_as_before() {
    run_ranks(3, |number, group| {
        let device = VirtualGpu::new(VirtConfig { ordinal: number, ..VirtConfig::default() });
        let shape = Shape { max_tokens: 128, hidden: HIDDEN, num_topk: 1, num_experts: 3 };
        let options = |options: Options| match number {
            0 => options.packet_tokens(Options::default_packet_tokens(3)).ranks_per_node(3),
            _ => options,
        };
        let mut rank = Ones::new(device, group.clone(), shape, options, &[0, 1])?;
        let survivors = group.split((number == 2).into())?;
        if number != 2 {
            rank.buffer.regroup(&*survivors)?;
            let mut place = rank.buffer.place(0)?;
            let received = rank.dispatch(&mut place)?;
            let combined = rank.combine(received)?;
            assert_eq!(combined.x.to_host::<bf16>(&rank.stream)?, rank.sums(1.0)?);
        }
        group.barrier(PATIENCE)
    });
}

/// A recording that was given up between the halves is forgotten, as a half that ran is.
#[test]
fn a_half_that_was_recorded_alone_is_discarded() {
    run_ranks(3, |number, group| {
        let (mut rank, _) = of_three(number, &group)?;
        let mut place = rank.buffer.place(0)?;
        drop(rank.dispatch(&mut place)?);
        rank.stream.synchronize()?;
        let (stream, order) = (rank.stream.clone(), StreamOrder::on(&rank.stream));
        let given_up: Result<_> = stream.capture(|| {
            let request = DispatchRequest::new(&rank.x, &rank.topk_idx);
            drop(rank.buffer.dispatch_send(&mut place, request, order)?);
            Err(Error::os("capture", REFUSAL))
        });
        refused(given_up, &[REFUSAL]);
        let next = stream.capture(|| rank.dispatch(&mut place).map(drop));
        refused(next, &["first half of a low-latency dispatch was recorded", "begin_warmup"]);
        rank.buffer.regroup(&*group)?;
        drop(stream.capture(|| rank.dispatch(&mut place).map(drop))?);
        group.barrier(PATIENCE)
    });
}

/// After so many operations the low half of their number wraps, which is what most words and
/// packets hold.
#[test]
fn rounds_go_on_where_the_low_half_of_an_epoch_wraps() {
    let case = LowLatencyCase::new(routing(&[TOKENS as u32; 3], 2, 6, Style::DistinctTopK), HIDDEN as u32);
    let direct = NodeLinks { ranks_per_node: 1, transport: TransportKind::Direct, queues: 1 };
    let shm = NodeLinks { transport: TransportKind::Shm, ..direct };
    for nodes in [None, Some(direct), Some(shm)] {
        let case = LowLatencyCase { rounds: 10, unanswered: 2, nodes, ..case.clone() };
        case.run(|rank| {
            let all: Arc<_> = rank.group.clone();
            regroup_ahead(&mut rank.buffer, &*all, (1 << 32) - 8)?;
            rank.round_trip(&case)
        });
    }
}

/// Ready words between nodes are those of a dispatch behind an unanswered one. One that was never
/// written has the low half of the epoch 2^32.
#[test]
fn a_late_rank_is_in_no_other_call_where_the_low_half_of_an_epoch_is_0() {
    /// More polls than a wait makes before it checks for other calls.
    const POLLS: u64 = 200;
    for kind in [TransportKind::Direct, TransportKind::Shm] {
        let checker = Checker::new(CheckConfig { races: false, ..CheckConfig::default() });
        checker.count_loads();
        let loads_of_the_other = || -> u64 {
            checker.loads().iter().filter(|loaded| loaded.by == 0).map(|loaded| loaded.loads).sum()
        };
        run_ranks(2, |number, group| {
            let shape = Shape { max_tokens: TOKENS as u32, hidden: HIDDEN, num_topk: 2, num_experts: 4 };
            let transport = TransportOptions::new(kind);
            let options = |options: Options| {
                options.ranks_per_node(1).keep_nodes().transport(transport).timeout(PATIENCE)
            };
            let checker = Some(checker.clone());
            let device = VirtualGpu::new(VirtConfig { ordinal: number, checker, ..VirtConfig::default() });
            let mut rank = Ones::new(device, group.clone(), shape, options, &[0, 2, 1, 3, 3, 0, 2, 1])?;
            let mut place = rank.buffer.place(0)?;
            // Two rounds, so that words of the operations 1 and 2 have been written again.
            for ahead in [None, None, Some((1 << 32) - 5)] {
                if let Some(ahead) = ahead {
                    regroup_ahead(&mut rank.buffer, &*group, ahead)?;
                    if number == 1 {
                        // No time of the ranks passes, so that the other one polls.
                        let before = loads_of_the_other();
                        while loads_of_the_other() < before + POLLS {
                            std::thread::sleep(Duration::from_millis(1));
                        }
                    }
                }
                let received = rank.dispatch(&mut place)?;
                rank.combine(received)?;
                rank.outcome()?;
            }
            Ok(())
        });
    }
}

/// The rows that the lost rank was to return lie in memory of before.
#[test]
fn a_combine_of_before_is_replayed_by_no_member() {
    run_ranks(3, |number, group| {
        let part = group.split((number == 2).into())?;
        let shape = Shape { max_tokens: TOKENS as u32, hidden: HIDDEN, num_topk: 2, num_experts: 6 };
        let case =
            LowLatencyCase::new(routing(&[TOKENS as u32; 3], 2, 6, Style::DistinctTopK), HIDDEN as u32);
        for packet_tokens in [0, 4] {
            let options = |options: Options| options.packet_tokens(packet_tokens).timeout(PATIENCE);
            let device = case.device(number);
            let mut rank = Ones::new(device, group.clone(), shape, options, &[0, 4, 4, 5, 2, 3, -1, -1])?;
            let mut place = rank.buffer.place(0)?;
            let received = rank.dispatch(&mut place)?;
            let combine = captured_combine(&mut rank, received)?;
            rank.outcome()?;
            if number != 2 {
                rank.buffer.regroup(&*part)?;
                // SAFETY: the recorded addresses are the rank's, which waits for the stream.
                unsafe { combine.launch(&rank.stream)? };
                let error = rank.outcome().unwrap_err();
                assert!(matches!(error, Error::Broken { call: "low-latency combine", .. }), "{error}");
                assert!(error.to_string().contains("no dispatch came to its place"), "{error}");
            }
            group.barrier(PATIENCE)?;
        }
        Ok(())
    });
}

#[test]
fn captured_steps_follow_the_members_and_rows_from_before_are_stale() {
    let case = LowLatencyCase::new(routing(&[TOKENS as u32; 3], 2, 6, Style::DistinctTopK), HIDDEN as u32);
    run_ranks(3, |number, group| {
        let part = group.split((number == 2).into())?;
        // The first token of each rank is sent to ranks 0 and 2, the second to rank 2 alone, the
        // third to 1, the last to none.
        let ids = [0, 4, 4, 5, 2, 3, -1, -1];
        let shape = Shape { max_tokens: TOKENS as u32, hidden: HIDDEN, num_topk: 2, num_experts: 6 };
        let options = |options: Options| options.chunk_tokens(4).packet_tokens(4).timeout(PATIENCE);
        let mut rank = Ones::new(case.device(number), group.clone(), shape, options, &ids)?;
        let mut place = rank.buffer.place(0)?;
        let sums = Tensor::alloc(rank.stream.device(), DType::Bf16, &[TOKENS, HIDDEN])?;
        let stream = rank.stream.clone();
        let step = stream.capture(|| {
            let received = rank.dispatch(&mut place)?;
            let combined = rank.combine(received)?;
            // SAFETY: both have so many bytes, and live until the last replay has ended.
            unsafe { stream.copy(sums.ptr(), combined.x.ptr(), TOKENS * HIDDEN * 2) }
        })?;
        let replay = |rank: &Ones| -> Result<Vec<f32>> {
            for _ in 0..3 {
                // SAFETY: the recorded addresses are this function's, which waits below.
                unsafe { step.launch(&stream)? };
            }
            rank.outcome()?;
            let all = sums.to_host::<bf16>(&stream)?;
            Ok(all.chunks(HIDDEN as usize).map(|row| row[0].to_f32()).collect())
        };
        assert_eq!(replay(&rank)?, [2.0, 1.0, 1.0, 0.0]);
        let stale = rank.dispatch(&mut place)?;
        stream.synchronize()?;
        if number != 2 {
            rank.buffer.regroup(&*part)?;
            let error = rank.combine(stale).unwrap_err();
            assert!(matches!(error, Error::StaleHandle(_)), "{error}");
            assert_eq!(replay(&rank)?, [1.0, 0.0, 1.0, 0.0]);
        }
        rank.buffer.regroup(&*group)?;
        assert_eq!(replay(&rank)?, [2.0, 1.0, 1.0, 0.0]);
        group.barrier(PATIENCE)
    });
}
