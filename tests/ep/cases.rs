//! Random cases.

use std::sync::Arc;

use proptest::prelude::*;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use epoxide::DType;
use epoxide::internal::Tuning;
use epoxide::throughput::Quantise;
use epoxide_testing::oracle::{Routing, Style};

use epoxide_testing::harness::NodeLinks;
use epoxide_testing::ids::{Ids, Logical};
use epoxide_testing::roundtrip::{Case, Scales};

/// Entries per token: mostly few, now and then up to the most.
fn topk() -> impl Strategy<Value = u32> {
    prop_oneof![9 => 1..=8u32, 1 => 9..=32u32]
}

fn payload() -> impl Strategy<Value = (DType, Scales)> {
    let with_scales = prop_oneof![
        Just(Scales::None),
        Just(Scales::Flat),
        (1..=8u32).prop_map(Scales::Columns),
        (33..=70u32).prop_map(Scales::Columns),
    ];
    // Odd numbers of bytes, and columns too long for the copy engine.
    let types = vec![DType::U8, DType::Ue8m0, DType::Fp8E4m3, DType::Bf16, DType::F32, DType::I32];
    let elements = prop_oneof![8 => 1..=9u32, 2 => 10..=70u32, 1 => Just(1100u32)];
    let columns = prop::collection::vec((prop::sample::select(types), elements), 1..=4);
    let rows = vec![DType::Bf16, DType::F16, DType::Fp8E4m3, DType::Fp8E5m2, DType::Fp4E2m1x2, DType::U8];
    let any = (prop::sample::select(rows), columns).prop_map(|(dtype, list)| (dtype, Scales::any(&list)));
    prop_oneof![
        3 => any,
        2 => Just((DType::Bf16, Scales::None)),
        1 => Just((DType::F32, Scales::None)),
        3 => with_scales.prop_map(|scales| (DType::Fp8E4m3, scales)),
    ]
}

/// Rows that are quantised on their way, and the blocks of one; mostly none.
fn quantised() -> impl Strategy<Value = Option<(Quantise, u64)>> {
    let ways = prop::sample::select(vec![Quantise::Fp8, Quantise::Fp8PowerOfTwo, Quantise::Mxfp8]);
    prop_oneof![3 => Just(None), 1 => (ways, 1..=6u64).prop_map(Some)]
}

/// Few small buffers, so that rows have several pieces and rings wrap around, or the defaults.
fn tuning() -> impl Strategy<Value = Tuning> {
    let small = (1..=3u32, 1..=2u32, 2..=3u32, 1..=3u32, 2..=3u32, 1..=3u32).prop_map(
        |(dispatch_warps, stage, dispatch_stages, combine_warps, combine_slots, stagers)| Tuning {
            dispatch_warps,
            internode_dispatch_warps: dispatch_warps,
            dispatch_metadata_warps: 1 + dispatch_warps % 4,
            dispatch_copy_warps: 4 - dispatch_warps,
            dispatch_stage_bytes: 128 * stage,
            dispatch_stages,
            // One in three has fixed tokens alone.
            dispatch_claiming_blocks: if stagers == 3 { u32::MAX } else { 1 },
            combine_warps,
            combine_slot_bytes: 512,
            combine_slots,
            combine_stagers: Some(stagers),
        },
    );
    prop_oneof![1 => small, 1 => Just(Tuning::default())]
}

/// Draws of a routing: entries of a token, experts of a rank, the style, a seed, and how experts
/// are named.
type Draws = (u32, u32, Style, u64, u32);

pub fn draws(most_local_experts: u32) -> impl Strategy<Value = Draws> {
    let style = prop::sample::select(Style::ALL.to_vec());
    (topk(), 1..=most_local_experts, style, any::<u64>(), 0..4u32)
}

/// The routing of ranks with so many tokens.
pub fn routed(tokens: &[u32], (topk, local_experts, style, seed, ids): Draws) -> (Routing, Ids) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    if ids < 2 {
        let logical = Logical::random(&mut rng, tokens, topk, style);
        let routing = logical.routing(logical.local_experts());
        return (routing, Ids::Placed(Arc::new(logical)));
    }
    let ids = if ids == 2 { Ids::Wide } else { Ids::Narrow };
    (Routing::random(&mut rng, tokens, topk, local_experts * tokens.len() as u32, style), ids)
}

/// Any case on ranks with so many tokens.
pub fn case(ranks: impl Strategy<Value = (Vec<u32>, Option<NodeLinks>)>) -> impl Strategy<Value = Case> {
    let routing = (ranks, draws(8)).prop_map(|((tokens, nodes), draws)| (routed(&tokens, draws), nodes));
    // Odd multiples of 16 bytes: rows that are not aligned to more.
    let seeds = (any::<u64>(), any::<Option<u64>>(), any::<Option<u64>>());
    (routing, 1..=8u32, 1..=128u32, payload(), 0..=31u32, tuning(), seeds, quantised()).prop_map(
        |(
            routing,
            num_channels,
            expert_alignment,
            (dtype, scales),
            half,
            tuning,
            (seed, schedule_seed, sms),
            quantised,
        )| {
            let ((routing, ids), nodes) = routing;
            let case = Case {
                routing,
                ids,
                nodes,
                num_channels,
                expert_alignment,
                dtype,
                row_bytes: 16 * (2 * half + 1),
                weight: None,
                scales,
                quantise: Quantise::None,
                tuning,
                seed,
                schedule_seed,
                sms_seed: sms.filter(|_| nodes.is_none()),
            };
            let Some((quantise, blocks)) = quantised else { return case };
            let block = if quantise == Quantise::Mxfp8 { 32 } else { 128 };
            let Case { dtype, row_bytes, scales, .. } =
                Case::quantised(case.routing.clone(), block * blocks, quantise);
            Case { dtype, row_bytes, scales, quantise, ..case }
        },
    )
}
