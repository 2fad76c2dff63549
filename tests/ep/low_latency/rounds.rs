//! Many round trips behind each other: the host waits for nothing, and no rank for another but where the protocol has it wait.

use epoxide_testing::low_latency::LowLatencyCase;
use epoxide_testing::oracle::Style;

use crate::shapes::routing;

/// A round trip of few short rows.
fn case(rounds: u32) -> LowLatencyCase {
    LowLatencyCase { rounds, ..LowLatencyCase::new(routing(&[3, 5, 0, 2], 3, 8, Style::WithHoles), 16) }
}

#[test]
fn a_thousand_pairs_without_the_host() {
    case(1000).check_chained();
}

#[test]
fn calls_in_halves() {
    LowLatencyCase { halves: true, ..case(200) }.check_chained();
    LowLatencyCase { halves: true, places: 2, unanswered: 3, ..case(7) }.check_replayed(5);
}

#[test]
fn several_places_in_turn() {
    LowLatencyCase { places: 3, ..case(100) }.check_chained();
    LowLatencyCase { places: 2, ..case(10) }.check();
}

#[test]
fn dispatches_that_no_combine_answers() {
    LowLatencyCase { unanswered: 2, ..case(12) }.check();
    LowLatencyCase { unanswered: 1, ..case(12) }.check();
    LowLatencyCase { unanswered: 3, places: 2, ..case(100) }.check_chained();
}

#[test]
fn a_captured_step_run_many_times() {
    case(1).check_replayed(50);
    LowLatencyCase { places: 2, unanswered: 3, ..case(7) }.check_replayed(10);
}

#[test]
fn the_checker_finds_nothing_in_many_rounds() {
    use epoxide::driver::virt::{CheckConfig, Checker};
    let small = LowLatencyCase {
        rounds: 6,
        chunk_tokens: 2,
        ..LowLatencyCase::new(routing(&[3, 0, 2], 2, 6, Style::WithHoles), 16)
    };
    for seed in 0..8 {
        let races = CheckConfig::default();
        let weak = CheckConfig { races: false, weak_memory: Some(seed), ..CheckConfig::default() };
        for config in [races, weak] {
            let schedule_seed = Some(seed * 8);
            let case = LowLatencyCase {
                checker: Some(Checker::new(config)),
                schedule_seed,
                unanswered: seed as u32 % 4,
                halves: seed % 2 == 1,
                gathers: seed % 3 == 2,
                // Rows of all ranks as packets, and of those with tokens in memory behind a word for each chunk.
                packet_tokens: if seed < 4 { 4 } else { 1 },
                ..small.clone()
            };
            case.check();
            let case =
                LowLatencyCase { checker: Some(Checker::new(CheckConfig::default())), places: 2, ..case };
            case.check_chained();
        }
    }
}
