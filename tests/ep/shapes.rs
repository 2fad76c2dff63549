//! Shapes at the edges of what is allowed, on one node and on several.

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use epoxide::DType;
use epoxide::internal::Tuning;
use epoxide_testing::oracle::{Routing, Style};
use epoxide_testing::roundtrip::{Case, Scales};
use epoxide_testing::tier;

use crate::spread::{Spread, in_every_spread};

in_every_spread! {
    rows_of_7168_bf16,
    rows_in_many_pieces,
    rows_longer_than_all_shared_memory_of_a_warp,
    the_shortest_row,
    fewer_tokens_than_channels,
    tokens_that_channels_do_not_divide,
    more_than_a_warp_of_tokens_per_channel,
    more_channels_than_the_other_ranks_have_tokens,
    some_ranks_without_tokens,
    all_ranks_without_tokens,
    no_selection_at_all,
    everything_to_one_rank,
    everything_to_every_rank,
    one_expert_in_every_entry,
    the_most_experts_on_a_rank,
    fp8_with_scales,
    any_dtype_travels,
    a_layer_of_256_experts_on_8_ranks,
}

pub fn routing(tokens_per_rank: &[u32], num_topk: u32, num_experts: u32, style: Style) -> Routing {
    Routing::random(&mut ChaCha8Rng::seed_from_u64(7), tokens_per_rank, num_topk, num_experts, style)
}

/// Every token of every rank selects just these.
fn uniform(tokens_per_rank: &[u32], num_experts: u32, ids: &[i64]) -> Routing {
    let topk_idx = tokens_per_rank.iter().map(|&tokens| vec![ids.to_vec(); tokens as usize]).collect();
    Routing { num_experts, num_topk: ids.len() as u32, topk_idx }
}

/// No two entries of a token are the same.
fn distinct(tokens_per_rank: &[u32], num_topk: u32, num_experts: u32) -> Routing {
    routing(tokens_per_rank, num_topk, num_experts, Style::DistinctTopK)
}

/// Along a routing, with some channels; of several nodes each has so many ranks.
fn on(spread: Spread, ranks_per_node: u32, routing: Routing, row_bytes: u32) -> Case {
    let num_channels = if spread == Spread::OneNode { 2 } else { 3 };
    Case { nodes: spread.nodes(ranks_per_node), num_channels, ..Case::new(routing, row_bytes) }
}

/// The smallest buffers: long rows travel in many pieces and the rings go round.
const SMALL: Tuning = Tuning {
    dispatch_warps: 2,
    internode_dispatch_warps: 2,
    dispatch_metadata_warps: 1,
    dispatch_copy_warps: 2,
    dispatch_stage_bytes: 1024,
    dispatch_stages: 2,
    dispatch_claiming_blocks: 1,
    combine_warps: 2,
    combine_slot_bytes: 512,
    combine_slots: 2,
    combine_stagers: Some(1),
};

fn rows_of_7168_bf16(spread: Spread) {
    Case { num_channels: 1, ..on(spread, 2, distinct(&[5, 3, 0, 2], 4, 8), 2 * 7168) }.check();
}

fn rows_in_many_pieces(spread: Spread) {
    // 7168 BF16 are 14 pieces in dispatch and 28 in combine; with 16 bytes more, the last piece is
    // a short one.
    for row_bytes in tier::pick(vec![2 * 7168 + 16], vec![2 * 7168, 2 * 7168 + 16]) {
        Case { tuning: SMALL, ..on(spread, 2, distinct(&[6, 1, 3, 4], 4, 8), row_bytes) }.check();
    }
}

fn rows_longer_than_all_shared_memory_of_a_warp(spread: Spread) {
    let tuning = Tuning { dispatch_stage_bytes: 65536, dispatch_warps: 8, ..Tuning::default() };
    Case { num_channels: 1, tuning, ..on(spread, 1, distinct(&[3, 2], 2, 4), 100_000) }.check();
}

fn the_shortest_row(spread: Spread) {
    on(spread, 1, distinct(&[9, 5, 1], 2, 6), 16).check();
}

fn fewer_tokens_than_channels(spread: Spread) {
    Case { num_channels: 8, ..on(spread, 2, distinct(&[3, 1, 7, 2], 4, 12), 48) }.check();
}

fn tokens_that_channels_do_not_divide(spread: Spread) {
    Case { num_channels: 7, ..on(spread, 2, distinct(&[13, 50, 8, 15], 4, 16), 48) }.check();
}

fn more_than_a_warp_of_tokens_per_channel(spread: Spread) {
    Case { num_channels: 2, ..on(spread, 1, distinct(&[333, 150], 2, 8), 16) }.check();
}

fn more_channels_than_the_other_ranks_have_tokens(spread: Spread) {
    Case { num_channels: 40, ..on(spread, 1, distinct(&[100, 1], 2, 4), 16) }.check();
}

fn some_ranks_without_tokens(spread: Spread) {
    on(spread, 2, distinct(&[0, 9, 0, 4], 3, 8), 48).check();
}

fn all_ranks_without_tokens(spread: Spread) {
    on(spread, 2, distinct(&[0; 4], 3, 8), 48).check();
}

fn no_selection_at_all(spread: Spread) {
    on(spread, 1, uniform(&[4, 6, 2], 6, &[-1, -1, -1]), 48).check();
}

/// To rank 2, and to rank 3: of several nodes, ranks of another node for half of the senders.
fn everything_to_one_rank(spread: Spread) {
    for ids in tier::pick(vec![[6, 7]], vec![[4, 5], [6, 7]]) {
        on(spread, 2, uniform(&[20, 3, 0, 11], 8, &ids), 48).check();
    }
}

fn everything_to_every_rank(spread: Spread) {
    let all: Vec<i64> = (0..8).collect();
    on(spread, 4, uniform(&[5; 8], 8, &all), 80).check();
}

fn one_expert_in_every_entry(spread: Spread) {
    on(spread, 1, uniform(&[6, 6], 4, &[3; 32]), 48).check();
}

fn the_most_experts_on_a_rank(spread: Spread) {
    // Many warps of one block count them: the order in which they do must not matter.
    for schedule_seed in tier::sample([Some(1), None, Some(2), Some(3)]).take(tier::pick(1, 4)) {
        Case { schedule_seed, ..on(spread, 1, distinct(&[40, 3], 8, 2 * 1024), 16) }.check();
    }
}

/// As a list, as a few columns, and as more than a warp has lanes.
fn fp8_with_scales(spread: Spread) {
    for scales in tier::sample([Scales::Columns(67), Scales::Flat, Scales::Columns(3)]) {
        let case = on(spread, 2, distinct(&[7, 12, 0, 5], 3, 8), 208);
        Case { dtype: DType::Fp8E4m3, scales, ..case }.check();
    }
}

fn any_dtype_travels(spread: Spread) {
    for dtype in [DType::F32, DType::I32, DType::Fp8E4m3] {
        Case { dtype, ..on(spread, 1, distinct(&[4, 4], 2, 4), 64) }.check();
    }
}

fn a_layer_of_256_experts_on_8_ranks(spread: Spread) {
    let tokens = [tier::pick(4, 16); 8];
    let case = on(spread, 4, distinct(&tokens, 8, 256), 2 * tier::pick(1024, 7168));
    Case { num_channels: 4, expert_alignment: 128, ..case }.check();
}
