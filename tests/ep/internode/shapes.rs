//! Numbers of nodes and ranks, all transports, and shapes at the edges of what is allowed.

use rand::SeedableRng;
use rand::rngs::SmallRng;

use epoxide::ep::{DType, Tuning};
use epoxide::transport::TransportKind;
use epoxide_testing::oracle::{Routing, Style};

use crate::harness::Nodes;
use crate::roundtrip::{Case, Scales};

const TRANSPORTS: [TransportKind; 4] =
    [TransportKind::Direct, TransportKind::Auto, TransportKind::Shm, TransportKind::Tcp];

fn routing(tokens_per_rank: &[u32], num_topk: u32, num_experts: u32, style: Style) -> Routing {
    Routing::random(&mut SmallRng::seed_from_u64(7), tokens_per_rank, num_topk, num_experts, style)
}

/// Every token of every rank selects just these.
fn uniform(tokens_per_rank: &[u32], num_experts: u32, ids: &[i64]) -> Routing {
    let topk_idx = tokens_per_rank.iter().map(|&tokens| vec![ids.to_vec(); tokens as usize]).collect();
    Routing { num_experts, num_topk: ids.len() as u32, topk_idx }
}

/// Nodes of so many ranks, shared memory between them, two queues.
fn on(ranks_per_node: u32, routing: Routing, row_bytes: u32) -> Case {
    let nodes = Nodes { ranks_per_node, transport: TransportKind::Shm, queues: 2 };
    Case { nodes: Some(nodes), num_channels: 3, ..Case::new(routing, row_bytes) }
}

/// Unequal numbers of tokens on all ranks, over both transports.
fn world(nodes: u32, ranks_per_node: u32) {
    let ranks = nodes * ranks_per_node;
    let tokens: Vec<u32> = (0..ranks).map(|rank| [7, 0, 13, 1, 5][rank as usize % 5]).collect();
    for transport in TRANSPORTS {
        let case = on(ranks_per_node, routing(&tokens, 4, 2 * ranks, Style::WithHoles), 48);
        let nodes = Some(Nodes { ranks_per_node, transport, queues: 2 });
        Case { nodes, ..case }.check();
    }
}

#[test]
fn two_nodes_of_one() {
    world(2, 1);
}

#[test]
fn two_nodes_of_two() {
    world(2, 2);
}

#[test]
fn two_nodes_of_four() {
    world(2, 4);
}

#[test]
fn three_nodes_of_two() {
    world(3, 2);
}

#[test]
fn four_nodes_of_four() {
    world(4, 4);
}

#[test]
fn eight_nodes_of_one() {
    world(8, 1);
}

/// A lane of a warp cannot stand for each rank any more.
#[test]
fn more_ranks_than_lanes() {
    let tokens: Vec<u32> = (0..35).map(|rank| [3, 0, 5, 1][rank as usize % 4]).collect();
    Case { num_channels: 2, ..on(7, routing(&tokens, 6, 70, Style::WithHoles), 48) }.check();
}

#[test]
fn one_node_is_a_world_without_a_network() {
    world(1, 4);
}

#[test]
fn the_worked_example() {
    let tokens = |ids: [[i64; 2]; 4]| ids.map(Vec::from).to_vec();
    let topk_idx = vec![
        tokens([[0, 6], [3, 5], [7, 6], [1, -1]]),
        tokens([[2, 4], [6, 1], [0, 1], [5, 7]]),
        tokens([[7, 0], [1, 2], [4, 5], [3, 6]]),
        tokens([[0, 2], [6, 7], [5, 1], [4, 3]]),
    ];
    let routing = Routing { num_experts: 8, num_topk: 2, topk_idx };
    Case { num_channels: 2, ..on(2, routing, 32) }.check();
}

#[test]
fn rows_of_7168_bf16() {
    Case { num_channels: 1, ..on(2, routing(&[5, 3, 0, 2], 4, 8, Style::DistinctTopK), 2 * 7168) }.check();
}

#[test]
fn rows_in_many_pieces() {
    let tuning = Tuning {
        dispatch_warps: 2,
        internode_dispatch_warps: 2,
        dispatch_stage_bytes: 1024,
        dispatch_stages: 2,
        combine_warps: 2,
        combine_slot_bytes: 512,
        combine_slots: 2,
    };
    // 7168 BF16 are 14 pieces in dispatch and 28 in combine; with 16 bytes more, the last piece is a short one.
    for row_bytes in [2 * 7168, 2 * 7168 + 16] {
        Case { tuning, ..on(2, routing(&[6, 1, 3, 4], 4, 8, Style::DistinctTopK), row_bytes) }.check();
    }
}

#[test]
fn fewer_tokens_than_channels() {
    Case { num_channels: 8, ..on(2, routing(&[3, 1, 7, 2], 4, 12, Style::DistinctTopK), 48) }.check();
}

#[test]
fn more_than_a_warp_of_tokens_per_channel() {
    Case { num_channels: 2, ..on(1, routing(&[333, 150], 2, 8, Style::DistinctTopK), 16) }.check();
}

#[test]
fn more_channels_than_queues_and_more_queues_than_channels() {
    for (num_channels, queues) in [(7, 2), (1, 4)] {
        let case = on(2, routing(&[20, 9, 0, 31], 3, 8, Style::Repeats), 48);
        let nodes = case.nodes.map(|nodes| Nodes { queues, ..nodes });
        Case { nodes, num_channels, ..case }.check();
    }
}

#[test]
fn all_ranks_without_tokens() {
    on(2, routing(&[0; 4], 3, 8, Style::DistinctTopK), 48).check();
}

#[test]
fn no_selection_at_all() {
    on(1, uniform(&[4, 6, 2], 6, &[-1, -1, -1]), 48).check();
}

#[test]
fn everything_to_one_rank_of_another_node() {
    on(2, uniform(&[20, 3, 0, 11], 8, &[6, 7]), 48).check();
}

#[test]
fn everything_stays_on_its_node() {
    let of_node = |ids: [i64; 2], tokens| vec![ids.to_vec(); tokens];
    let topk_idx = vec![of_node([0, 2], 5), of_node([1, 3], 9), of_node([4, 6], 2), of_node([7, 7], 8)];
    on(2, Routing { num_experts: 8, num_topk: 2, topk_idx }, 48).check();
}

#[test]
fn everything_to_every_rank() {
    let all: Vec<i64> = (0..8).collect();
    on(4, uniform(&[5; 8], 8, &all), 80).check();
}

#[test]
fn one_expert_in_every_entry() {
    on(1, uniform(&[6, 6], 4, &[3; 32]), 48).check();
}

#[test]
fn the_most_experts_on_a_rank() {
    on(1, routing(&[40, 3], 8, 2 * 1024, Style::DistinctTopK), 16).check();
}

#[test]
fn fp8_with_scales() {
    for scales in [Scales::Flat, Scales::Columns(3), Scales::Columns(67)] {
        let case = on(2, routing(&[7, 12, 0, 5], 3, 8, Style::DistinctTopK), 208);
        Case { dtype: DType::Fp8E4m3, scales, ..case }.check();
    }
}

#[test]
fn any_dtype_travels() {
    for dtype in [DType::F32, DType::I32] {
        Case { dtype, ..on(1, routing(&[4, 4], 2, 4, Style::DistinctTopK), 64) }.check();
    }
}

#[test]
fn a_layer_of_256_experts_on_2_nodes_of_4() {
    let case = on(4, routing(&[16; 8], 8, 256, Style::DistinctTopK), 2 * 7168);
    Case { num_channels: 4, expert_alignment: 128, ..case }.check();
}
