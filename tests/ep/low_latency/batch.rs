//! Dispatches of so many tokens that some blocks list rows and send none, where a grid has enough
//! blocks: every quantity against the oracle.

use epoxide::driver::virt::{CheckConfig, Checker};
use epoxide::low_latency::Quantise;
use epoxide_gpu::layout::is_batch;
use epoxide_testing::harness::PATIENCE;
use epoxide_testing::low_latency::LowLatencyCase;
use epoxide_testing::oracle::Style;
use epoxide_testing::tier;
use epoxide_vgpu::for_each_seed;

use super::rounds::{check_other_tokens_between, weak};
use crate::shapes::routing;

/// A case with `tokens[rank]` tokens on each rank, and three experts a rank.
fn on(tokens: &[u32], topk: u32, hidden: u32) -> LowLatencyCase {
    let ranks = tokens.len() as u32;
    let most = *tokens.iter().max().unwrap();
    assert!(is_batch(most, ranks), "{most} tokens of {ranks} ranks");
    LowLatencyCase {
        sm_count: 4,
        ..LowLatencyCase::new(routing(tokens, topk, 3 * ranks, Style::WithHoles), hidden)
    }
}

/// Tokens of more ranks than the kernel of few ranks has.
fn nine() -> Vec<u32> {
    (0..9).map(|rank| 60 - rank * 5).collect()
}

/// More and fewer tokens than a block has places for at once, ranks that are no batch of their own,
/// an odd number of experts, and more of them than the kernels of a batch handle.
#[test]
fn rows_are_listed_in_order() {
    on(&[300, 280], 8, 16).check();
    on(&[257, 0], 5, 16).check();
    on(&[300, 41], 9, 16).check();
    for tokens in tier::pick(vec![], vec![vec![600, 599], vec![200, 3, 131, 199], vec![1024, 1]]) {
        LowLatencyCase { rounds: 2, places: 2, ..on(&tokens, 7, 40) }.check();
    }
}

#[test]
fn rows_are_listed_behind_a_dispatch_that_no_combine_answers() {
    for case in [on(&[140, 133], 3, 8), on(&nine(), 6, 16)] {
        check_other_tokens_between(&LowLatencyCase { checker: weak(), ..case });
    }
}

#[test]
fn rows_that_are_quantised_are_listed() {
    LowLatencyCase { quantise: Quantise::Fp8, ..on(&[260, 300], 4, 128) }.check();
    LowLatencyCase { quantise: Quantise::Fp8, sm_count: 35, ..on(&[130, 300], 4, 256) }.check();
}

/// One block that lists, or two: more experts than a block lists at once, more tokens than its
/// threads, a source whose tokens end within a warp, and a rank with fewer tokens than blocks.
#[test]
fn blocks_that_send_nothing_list_rows() {
    let many_experts = |tokens: &[u32], topk| {
        let experts = 70 * tokens.len() as u32;
        let case = LowLatencyCase::new(routing(tokens, topk, experts, Style::WithHoles), 16);
        LowLatencyCase { sm_count: 66, ..case }
    };
    many_experts(&[300, 290], 8).check();
    many_experts(&[129, 7], 3).check();
    LowLatencyCase { sm_count: 32, ..on(&[171, 174, 180], 8, 16) }.check();
    for tokens in tier::pick(vec![], vec![vec![1024, 990], vec![131, 131, 131, 131], vec![140, 0]]) {
        LowLatencyCase { rounds: 2, places: 2, ..many_experts(&tokens, 8) }.check();
    }
}

/// A block of a batch lists rows and sends none, in a kernel of its own. Ranks with few tokens have
/// the other one beside it.
#[test]
fn a_batch_has_its_kernel() {
    for (case, kernel) in [
        (on(&[300, 280], 8, 16), Some("low_latency_dispatch_batch")),
        (on(&nine(), 6, 16), Some("low_latency_dispatch_many_batch")),
        // More entries than blocks of a batch handle.
        (on(&[300, 41], 9, 16), None),
    ] {
        let checker = Checker::new(CheckConfig::default());
        checker.count_stores();
        let case = LowLatencyCase { checker: Some(checker.clone()), ..case };
        case.run(|rank| {
            rank.round_trip(&case)?;
            rank.group.barrier(PATIENCE)?;
            let stores = checker.stores();
            let of_batch =
                stores.iter().map(|stored| stored.kernel.as_str()).find(|name| name.contains("batch"));
            assert_eq!(of_batch, kernel);
            rank.group.barrier(PATIENCE)
        });
    }
}

/// The kernel of many ranks.
#[test]
fn rows_of_many_ranks_are_listed() {
    on(&nine(), 6, 16).check();
    LowLatencyCase { sm_count: 32, ..on(&nine(), 6, 16) }.check();
}

#[test]
fn the_checker_finds_nothing() {
    for_each_seed(tier::pick(1, 4), |seed| {
        // The default tier has number 3.
        let seed = (seed + 3) % 4;
        let races = CheckConfig::default();
        let weak = CheckConfig { races: false, weak_memory: Some(seed), ..CheckConfig::default() };
        for config in [races, weak] {
            LowLatencyCase {
                checker: Some(Checker::new(config)),
                schedule_seed: Some(seed * 8),
                ..on(&[270, 250], 3, 8)
            }
            .check();
            LowLatencyCase {
                checker: Some(Checker::new(config)),
                schedule_seed: Some(seed * 8 + 1),
                sm_count: 33,
                ..on(&[140, 133], 3, 8)
            }
            .check();
        }
    });
}
