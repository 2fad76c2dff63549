//! Dispatches of so many tokens that rows are listed four to a thread at once: every quantity
//! against the oracle.

use epoxide::driver::virt::{CheckConfig, Checker};
use epoxide::low_latency::Quantise;
use epoxide_gpu::layout::BATCH_TOKENS;
use epoxide_testing::low_latency::LowLatencyCase;
use epoxide_testing::oracle::Style;
use epoxide_testing::tier;

use crate::shapes::routing;

/// So many tokens on each rank, and three experts a rank.
fn on(tokens: &[u32], topk: u32, hidden: u32) -> LowLatencyCase {
    let ranks = tokens.len() as u32;
    let most = tokens.iter().max().unwrap() * ranks;
    assert!(most > BATCH_TOKENS, "{most} tokens");
    LowLatencyCase {
        sm_count: 4,
        ..LowLatencyCase::new(routing(tokens, topk, 3 * ranks, Style::WithHoles), hidden)
    }
}

/// More and fewer tokens than a block has places for at once, ranks that are no batch of their own,
/// an odd number of experts, and more of them than the kernels of a batch look at.
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
fn rows_that_are_quantised_are_listed() {
    LowLatencyCase { quantise: Quantise::Fp8, ..on(&[260, 300], 4, 128) }.check();
}

/// The kernel of many ranks.
#[test]
fn rows_of_many_ranks_are_listed() {
    let tokens: Vec<u32> = (0..9).map(|rank| 60 - rank * 5).collect();
    on(&tokens, 6, 16).check();
}

#[test]
fn the_checker_finds_nothing() {
    for seed in tier::pick(vec![3], (0..4).collect()) {
        let races = CheckConfig::default();
        let weak = CheckConfig { races: false, weak_memory: Some(seed), ..CheckConfig::default() };
        for config in [races, weak] {
            LowLatencyCase {
                checker: Some(Checker::new(config)),
                schedule_seed: Some(seed * 8),
                ..on(&[270, 250], 3, 8)
            }
            .check();
        }
    }
}
