//! Random routings, shapes and settings.

use std::ops::RangeInclusive;

use proptest::prelude::*;

use epoxide::DType;
use epoxide::driver::virt::{CheckConfig, Checker};
use epoxide::low_latency::Quantise;
use epoxide::transport::TransportKind;
use epoxide_testing::harness::{NodeLinks, rank_counts};
use epoxide_testing::low_latency::{LowLatencyCase, ReturnPath, RowMemory, Segments};

use crate::cases::{draws, routed};
use crate::property::config;

pub(super) fn case(most_tokens: u32, most_ranks: usize) -> impl Strategy<Value = LowLatencyCase> {
    case_of(most_tokens, 1..=most_ranks)
}

/// The same of so many ranks.
pub(super) fn case_of(
    most_tokens: u32,
    ranks: RangeInclusive<usize>,
) -> impl Strategy<Value = LowLatencyCase> {
    let tokens = prop_oneof![1 => Just(0), 4 => 0..=most_tokens];
    let tokens = prop::collection::vec(tokens, rank_counts(ranks));
    let routing = (tokens, draws(6)).prop_map(|(tokens, draws)| routed(&tokens, draws));
    let row = prop_oneof![
        3 => (1..=40u32).prop_map(|eighth| (8 * eighth, Quantise::None)),
        // Rows of several pieces.
        1 => (90..=220u32).prop_map(|eighth| (8 * eighth, Quantise::None)),
        1 => (1..=5u32).prop_map(|block| (128 * block, Quantise::Fp8)),
        1 => (1..=14u32).prop_map(|block| (128 * block, Quantise::Fp8PowerOfTwo)),
        1 => (1..=14u32).prop_map(|block| (128 * block, Quantise::Mxfp8)),
        1 => (1..=14u32).prop_map(|block| (128 * block, Quantise::None)),
    ];
    let settings = (
        (1..=12u32, prop::sample::select(vec![0, 3, 32])),
        1..=6u32,
        1..=3u32,
        0..=3u32,
        1..=3u32,
        (
            prop::sample::select(vec![ReturnPath::ByExpert, ReturnPath::ByRow, ReturnPath::InPool]),
            any::<bool>(),
            any::<bool>(),
            any::<bool>(),
        ),
        (
            any::<(u64, Option<u32>, Option<u64>)>(),
            prop::sample::select(vec![Quantise::None, Quantise::Fp8, Quantise::Fp8PowerOfTwo]),
            prop::option::of(segments()),
            prop::sample::select(vec![DType::Bf16, DType::Bf16, DType::F16, DType::F32]),
        ),
        prop_oneof![1 => Just(None), 1 => (any::<prop::sample::Index>(), transport()).prop_map(Some)],
    );
    (routing, row, settings).prop_map(
        |(
            (routing, ids),
            (hidden, quantise),
            (
                (chunk_tokens, packet_tokens),
                sm_count,
                rounds,
                unanswered,
                places,
                (combine_rows, weighted, halves, gathers),
                ((seed, schedule, sms_seed), back, segments, combine_dtype),
                spread,
            ),
        )| {
            let ranks = routing.num_ranks();
            let nodes = spread.map(|(index, transport)| {
                let divisors: Vec<u32> = (1..=ranks.min(8)).filter(|of| ranks.is_multiple_of(*of)).collect();
                NodeLinks { ranks_per_node: *index.get(&divisors), transport, queues: 1 }
            });
            // Ranks of one node gather rows of bf16, as they are.
            let is_bf16 = combine_dtype == DType::Bf16;
            let combine_rows = match combine_rows {
                ReturnPath::InPool if nodes.is_some() || !is_bf16 => ReturnPath::ByRow,
                rows => rows,
            };
            let by_expert = combine_rows == ReturnPath::ByExpert;
            let may_quantise = is_bf16 && hidden.is_multiple_of(128) && combine_rows != ReturnPath::InPool;
            LowLatencyCase {
                ids,
                nodes,
                quantise,
                quantise_back: if may_quantise { back } else { Quantise::None },
                combine_dtype,
                combine_rows,
                gathers: gathers && is_bf16 && by_expert && quantise == Quantise::None,
                segments,
                weighted: weighted && by_expert,
                halves,
                own_memory: seed % 2 == 1,
                chunk_tokens,
                packet_tokens,
                sm_count,
                rounds,
                unanswered,
                places,
                seed,
                schedule_seed: schedule.map(u64::from),
                sms_seed,
                measures: seed % 3 == 0,
                ..LowLatencyCase::new(routing, hidden)
            }
        },
    )
}

fn segments() -> impl Strategy<Value = Segments> {
    let memory = prop::sample::select(vec![RowMemory::Library, RowMemory::Caller]);
    (0..=7u32, memory, any::<bool>()).prop_map(|(power, memory, unweighted)| Segments {
        alignment: 1 << power,
        memory,
        unweighted,
    })
}

fn transport() -> impl Strategy<Value = TransportKind> {
    use TransportKind::{Auto, Direct, Shm, Tcp};
    prop::sample::select(vec![Auto, Direct, Shm, Tcp])
}

proptest! {
    #![proptest_config(config(96))]

    #[test]
    fn every_quantity_equals_the_oracle(case in case(24, 8)) {
        case.check();
    }
}

proptest! {
    #![proptest_config(config(24))]

    #[test]
    fn the_checker_finds_nothing(case in case(6, 4), weak in any::<Option<u64>>()) {
        let config = match weak {
            None => CheckConfig::default(),
            seed => CheckConfig { races: false, weak_memory: seed, ..CheckConfig::default() },
        };
        let schedule_seed = case.schedule_seed.or(Some(case.seed >> 8));
        LowLatencyCase { checker: Some(Checker::new(config)), schedule_seed, ..case }.check();
    }
}
