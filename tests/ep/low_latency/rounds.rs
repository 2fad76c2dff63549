//! Many round trips one after the other. The host does not wait, and ranks wait for each other only
//! in the protocol.

use epoxide::driver::virt::{CheckConfig, Checker};
use epoxide::low_latency::Quantise;
use epoxide::transport::TransportKind;
use epoxide_testing::harness::NodeLinks;
use epoxide_testing::low_latency::{LowLatencyCase, ReturnPath, Segments};
use epoxide_testing::oracle::Style;
use epoxide_testing::tier;
use epoxide_vgpu::for_each_seed;

use crate::shapes::routing;

/// Round trips of few short rows, of four ranks of one node and of two.
/// Within a node, and across nodes in host memory; in the long tier also in device memory and by
/// puts.
fn cases(rounds: u32) -> Vec<LowLatencyCase> {
    let case =
        LowLatencyCase { rounds, ..LowLatencyCase::new(routing(&[3, 5, 0, 2], 3, 8, Style::WithHoles), 16) };
    let across = |transport| LowLatencyCase {
        nodes: Some(NodeLinks { ranks_per_node: 2, transport, queues: 1 }),
        ..case.clone()
    };
    let mut cases = vec![case.clone(), across(TransportKind::Shm)];
    if tier::is_long() {
        cases.extend([TransportKind::Direct, TransportKind::Tcp].map(across));
    }
    cases
}

#[test]
fn many_pairs_without_the_host() {
    cases(tier::pick(5, 400)).iter().for_each(LowLatencyCase::check_chained);
}

#[test]
fn calls_in_halves() {
    for case in cases(tier::pick(3, 200)) {
        LowLatencyCase { halves: true, ..case.clone() }.check_chained();
        let rounds = tier::pick(5, 7);
        LowLatencyCase { rounds, halves: true, places: 2, unanswered: 3, ..case }
            .check_replayed(tier::pick(2, 5));
    }
}

#[test]
fn sums_in_memory_of_the_caller() {
    for (number, case) in cases(tier::pick(4, 100)).into_iter().enumerate() {
        for combine_rows in [ReturnPath::ByExpert, ReturnPath::ByRow, ReturnPath::InPool] {
            if combine_rows == ReturnPath::InPool && case.nodes.is_some() {
                continue;
            }
            let halves = (combine_rows == ReturnPath::ByRow) == (number == 0);
            let own = LowLatencyCase { own_memory: true, combine_rows, halves, ..case.clone() };
            own.check_chained();
            let checker = Some(Checker::new(CheckConfig::default()));
            LowLatencyCase { rounds: 2, checker, ..own.clone() }.check();
            LowLatencyCase { rounds: 3, places: 2, ..own.clone() }.check();
            LowLatencyCase { rounds: 3, unanswered: 3, places: 2, ..own }.check_replayed(tier::pick(2, 5));
        }
    }
}

#[test]
fn several_places_in_turn() {
    for case in cases(tier::pick(4, 100)) {
        LowLatencyCase { places: 3, ..case.clone() }.check_chained();
        LowLatencyCase { rounds: tier::pick(4, 10), places: 2, ..case }.check();
    }
}

#[test]
fn dispatches_that_no_combine_answers() {
    for case in cases(tier::pick(4, 12)) {
        LowLatencyCase { unanswered: 2, ..case.clone() }.check();
        if tier::is_long() {
            LowLatencyCase { unanswered: 1, ..case.clone() }.check();
        }
        LowLatencyCase { rounds: tier::pick(6, 100), unanswered: 3, places: 2, ..case }.check_chained();
    }
}

/// Three dispatches into one place, of which the second has other tokens. A combine answers the
/// third alone: a place otherwise holds packets and words of the previous epoch.
pub fn check_other_tokens_between(case: &LowLatencyCase) {
    let first = LowLatencyCase { unanswered: 1, ..case.clone() };
    let mut other = LowLatencyCase { seed: 2, ..first.clone() };
    // Each token but the first has the place of the one before it.
    for tokens in &mut other.routing.topk_idx {
        tokens.remove(0);
    }
    case.run(|rank| [&first, &other, case].into_iter().try_for_each(|case| case.verify(rank)));
}

/// A checker with weak memory, where a load may give the value of the previous epoch.
pub fn weak() -> Option<Checker> {
    Some(Checker::new(CheckConfig { races: false, weak_memory: Some(1), ..CheckConfig::default() }))
}

#[test]
fn other_tokens_behind_a_dispatch_that_no_combine_answers() {
    let plain = LowLatencyCase {
        checker: Some(Checker::new(CheckConfig::default())),
        ..LowLatencyCase::new(routing(&[3, 3], 2, 4, Style::WithHoles), 128)
    };
    let by_expert = LowLatencyCase { segments: Some(Segments::aligned(1)), ..plain.clone() };
    let mxfp8 = LowLatencyCase { quantise: Quantise::Mxfp8, ..plain.clone() };
    let scale_packets = LowLatencyCase {
        checker: weak(),
        quantise: Quantise::Fp8,
        ..LowLatencyCase::new(routing(&[66, 128], 2, 4, Style::WithHoles), 128)
    };
    let both = LowLatencyCase { segments: Some(Segments::aligned(1)), ..scale_packets.clone() };
    [plain, by_expert, mxfp8, scale_packets, both].iter().for_each(check_other_tokens_between);
}

#[test]
fn a_captured_step_run_many_times() {
    for case in cases(1) {
        case.check_replayed(tier::pick(3, 50));
        let rounds = tier::pick(5, 7);
        LowLatencyCase { rounds, places: 2, unanswered: 3, ..case }.check_replayed(tier::pick(3, 10));
    }
}

#[test]
fn the_checker_finds_nothing_in_many_rounds() {
    use epoxide::driver::virt::{CheckConfig, Checker};
    let small = LowLatencyCase {
        rounds: tier::pick(3, 6),
        chunk_tokens: 2,
        ..LowLatencyCase::new(routing(&[3, 0, 2], 2, 6, Style::WithHoles), 16)
    };
    for_each_seed(tier::pick(1, 8), |seed| {
        // The default tier has number 7.
        let seed = (seed + 7) % 8;
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
                nodes: (seed % 3 == 1).then_some(NodeLinks {
                    ranks_per_node: 1,
                    // Words in device memory, in host memory, and by puts.
                    transport: [TransportKind::Direct, TransportKind::Shm, TransportKind::Tcp]
                        [seed as usize / 3],
                    queues: 1,
                }),
                // Rows return to all ranks as packets, and to those with tokens into memory behind
                // a word for each chunk.
                packet_tokens: if seed < 4 { 4 } else { 1 },
                ..small.clone()
            };
            case.check();
            let case =
                LowLatencyCase { checker: Some(Checker::new(CheckConfig::default())), places: 2, ..case };
            case.check_chained();
        }
    });
}
