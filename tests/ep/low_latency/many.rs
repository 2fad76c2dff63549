//! More ranks of one node than kernels keep in arguments and registers, up to as many as there may
//! be: every quantity against the oracle.

use std::time::Duration;

use epoxide::driver::virt::{CheckConfig, Checker};
use epoxide::low_latency::{Options, Quantise, Shape};
use epoxide::transport::TransportKind;
use epoxide::{DType, Error, Result};
use epoxide_testing::harness::{NodeLinks, PATIENCE, run_ranks};
use epoxide_testing::low_latency::{LowLatencyCase, ReturnPath, Segments};
use epoxide_testing::oracle::{Routing, Style};
use epoxide_testing::tier;
use epoxide_vgpu::for_each_seed;
use proptest::prelude::*;

use super::ones::Ones;
use super::property::case_of;
use super::regroup::{Gone, leave_out_and_take_in};
use crate::property::config;
use crate::shapes::routing;

/// Unequal numbers of tokens, none on some ranks.
fn on(ranks: u32, most: u32, topk: u32, hidden: u32) -> LowLatencyCase {
    let tokens: Vec<u32> = (0..ranks).map(|rank| rank * 7 % (most + 1)).collect();
    LowLatencyCase::new(routing(&tokens, topk, 2 * ranks, Style::WithHoles), hidden)
}

#[test]
fn one_rank_more_than_few() {
    LowLatencyCase { rounds: 2, places: 2, ..on(9, 5, 3, 24) }.check();
    LowLatencyCase { segments: Some(Segments::aligned(8)), packet_tokens: 2, ..on(9, 7, 4, 1024) }.check();
}

/// Two ranks for each lane of a warp.
#[test]
fn as_many_ranks_as_there_may_be() {
    LowLatencyCase { packet_tokens: 1, ..on(64, 2, tier::pick(4, 32), 16) }.check();
}

/// A token of every rank for every rank that it can go to.
#[test]
fn every_entry_of_a_token_goes_to_another_rank() {
    for ranks in tier::pick(vec![33], vec![33, 64]) {
        let of_rank = |rank: i64| vec![(0..32).map(|entry| (rank + entry * 2) % i64::from(ranks)).collect()];
        let topk_idx = (0..i64::from(ranks)).map(of_rank).collect();
        let routing = Routing { num_experts: ranks, num_topk: 32, topk_idx };
        let combine_rows = ReturnPath::InPool;
        LowLatencyCase { combine_rows, rounds: 2, ..LowLatencyCase::new(routing, 16) }.check();
    }
}

#[test]
fn rows_travel_as_e4m3_either_way() {
    const ALL: [Quantise; 3] = [Quantise::None, Quantise::Fp8, Quantise::Fp8PowerOfTwo];
    let each = ALL.into_iter().flat_map(|there| ALL.map(|back| (there, back)));
    for (number, (quantise, quantise_back)) in each.enumerate().skip(4).step_by(tier::pick(9, 1)) {
        for packet_tokens in [0, 32] {
            let ranks = tier::pick(9, [9, 16, 33][number % 3]);
            LowLatencyCase { quantise, quantise_back, packet_tokens, ..on(ranks, 4, 3, 384) }.check();
        }
    }
}

/// With each wait measured, as packets and as rows.
#[test]
fn rows_of_f16_and_f32_return() {
    for (combine_dtype, combine_rows) in [(DType::F16, ReturnPath::ByRow), (DType::F32, ReturnPath::ByExpert)]
    {
        for packet_tokens in [0, 32] {
            let ranks = tier::pick(9, 33);
            LowLatencyCase {
                combine_dtype,
                combine_rows,
                packet_tokens,
                measures: true,
                ..on(ranks, 4, 3, 24)
            }
            .check();
        }
    }
}

/// Blocks with more than two tokens to sum return rows meanwhile.
#[test]
fn rows_return_while_others_are_summed() {
    for ranks in tier::pick(vec![9], vec![9, 33, 64]) {
        LowLatencyCase {
            combine_rows: ReturnPath::ByRow,
            packet_tokens: 2,
            chunk_tokens: 2,
            sm_count: 2,
            ..on(ranks, 7, 4, 24)
        }
        .check();
    }
}

#[test]
fn sixteen_ranks_and_more() {
    if !tier::is_long() {
        return;
    }
    for ranks in [16, 33, 64] {
        for combine_rows in [ReturnPath::ByExpert, ReturnPath::ByRow, ReturnPath::InPool] {
            for packet_tokens in [0, 3, 32] {
                LowLatencyCase { combine_rows, packet_tokens, rounds: 2, ..on(ranks, 6, 5, 40) }.check();
            }
        }
        LowLatencyCase { segments: Some(Segments::aligned(4)), ..on(ranks, 9, 6, 1024) }.check();
        LowLatencyCase { halves: true, unanswered: 2, places: 2, rounds: 3, ..on(ranks, 3, 4, 16) }.check();
    }
}

#[test]
fn a_captured_step_run_many_times() {
    LowLatencyCase { rounds: 3, places: 2, unanswered: 2, ..on(9, 3, 3, 16) }
        .check_replayed(tier::pick(2, 10));
}

#[test]
fn the_checker_finds_nothing() {
    for_each_seed(tier::pick(1, 6), |seed| {
        // The default tier has number 7.
        let seed = (seed + 7) % 8;
        let races = CheckConfig::default();
        let weak = CheckConfig { races: false, weak_memory: Some(seed), ..CheckConfig::default() };
        for config in [races, weak] {
            LowLatencyCase {
                checker: Some(Checker::new(config)),
                schedule_seed: Some(seed * 8),
                unanswered: seed as u32 % 3,
                segments: (seed % 2 == 1).then_some(Segments::aligned(8)),
                packet_tokens: if seed < 3 { 1 } else { 4 },
                rounds: 2,
                ..on(9, 3, 3, 16)
            }
            .check();
        }
    });
}

/// Ranks whose bits are in either half of a set.
#[test]
fn the_others_go_on_and_take_them_in_again() {
    for (ranks, gone) in tier::pick(vec![(9, vec![1, 8])], vec![(9, vec![1, 8]), (40, vec![0, 31, 32, 39])]) {
        for when in [Gone::BeforeDispatch, Gone::BeforeCombine] {
            let case = LowLatencyCase { places: 2, packet_tokens: 1, ..on(ranks, 3, 3, 16) };
            leave_out_and_take_in(&case, &gone, when);
        }
    }
}

/// Every rank but the last one runs into its deadline, for the last one.
#[test]
fn a_rank_beyond_the_first_half_that_is_gone_is_named() {
    const DEADLINE: Duration = Duration::from_millis(150);
    let ranks = tier::pick(34, 64);
    let shape = Shape { max_tokens: 1, hidden: 16, num_topk: 1, num_experts: ranks };
    let cases = on(ranks, 1, 1, 16);
    run_ranks(ranks, |number, group| -> Result<()> {
        let options = |options: Options| options.timeout(DEADLINE);
        let ids = [i64::from((number + 1) % ranks)];
        let mut rank = Ones::new(cases.device(number), group.clone(), shape, options, &ids)?;
        let mut place = rank.buffer.place(0)?;
        let received = rank.dispatch(&mut place)?;
        rank.outcome()?;
        group.barrier(PATIENCE)?;
        if number != ranks - 1 {
            drop(rank.combine(received)?);
            let error = rank.outcome().expect_err("the last rank does not come");
            let Error::PeerTimeout { peer, waited, .. } = &error else { panic!("{error}") };
            assert_eq!(*peer, ranks - 1, "{error}");
            assert!(*waited >= DEADLINE, "{error}");
        }
        group.barrier(PATIENCE)
    });
}

#[test]
fn mapped_ranks_of_several_nodes_are_one_node() {
    for (joins_nodes, nodes) in [(true, 1), (false, 3)] {
        let links = NodeLinks { ranks_per_node: 4, transport: TransportKind::Direct, queues: 1 };
        let case = LowLatencyCase { nodes: Some(links), joins_nodes, ..on(12, 4, 3, 24) };
        case.run(|rank| {
            assert_eq!(rank.buffer.num_nodes(), nodes);
            rank.round_trip(&case)
        });
    }
}

proptest! {
    #![proptest_config(config(24))]

    #[test]
    fn every_quantity_equals_the_oracle(case in case_of(6, 9..=12)) {
        case.check();
    }
}
