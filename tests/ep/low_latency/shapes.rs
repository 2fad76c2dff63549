//! Round trips of many shapes.

use epoxide::driver::virt::{CheckConfig, Checker};
use epoxide::low_latency::Quantise;
use epoxide_testing::low_latency::LowLatencyCase;
use epoxide_testing::oracle::Style;
use epoxide_testing::tier;

use crate::shapes::routing;

#[test]
fn rows_that_differ_in_every_bit() {
    LowLatencyCase::new(routing(&[9, 5, 0, 12], 3, 8, Style::DistinctTopK), 24).check();
}

#[test]
fn entries_without_an_expert_and_experts_twice() {
    for style in tier::sample([Style::Repeats, Style::WithHoles, Style::Skewed]) {
        LowLatencyCase::new(routing(&[9, 5, 7], 5, 6, style), 16).check();
    }
}

#[test]
fn rows_that_are_summed_already() {
    LowLatencyCase {
        by_expert: false,
        ..LowLatencyCase::new(routing(&[9, 5, 7], 4, 6, Style::WithHoles), 40)
    }
    .check();
}

#[test]
fn quantised_on_the_way() {
    for quantise in tier::sample([Quantise::Fp8PowerOfTwo, Quantise::Fp8]) {
        LowLatencyCase { quantise, ..LowLatencyCase::new(routing(&[6, 5], 2, 4, Style::DistinctTopK), 384) }
            .check();
    }
}

#[test]
fn quantised_on_the_way_back() {
    for quantise_back in [Quantise::Fp8, Quantise::Fp8PowerOfTwo] {
        for (packet_tokens, by_expert) in tier::sample([(0, true), (0, false), (8, true), (8, false)]) {
            LowLatencyCase {
                quantise_back,
                packet_tokens,
                by_expert,
                ..LowLatencyCase::new(routing(&[6, 5], 2, 4, Style::DistinctTopK), 1664)
            }
            .check();
        }
    }
}

#[test]
fn many_rounds_in_one_place() {
    LowLatencyCase { rounds: 12, ..LowLatencyCase::new(routing(&[3, 5, 2], 3, 6, Style::WithHoles), 16) }
        .check();
}

/// A warp lists up to 32 tokens of an expert. A block lists more, in turns of its threads.
#[test]
fn as_many_tokens_as_a_warp_lists_and_more() {
    for tokens in tier::sample([[16, 16], [16, 15], [17, 16], [300, 230]]) {
        // More experts than a block has warps.
        let routing = routing(&tokens, 3, 40, Style::WithHoles);
        LowLatencyCase { sm_count: 1, ..LowLatencyCase::new(routing, 16) }.check();
    }
    for tokens in [[9, 7], [20, 13]] {
        let checker = Some(Checker::new(CheckConfig::default()));
        LowLatencyCase { checker, ..LowLatencyCase::new(routing(&tokens, 2, 36, Style::Repeats), 8) }.check();
    }
}
