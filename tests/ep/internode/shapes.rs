//! Numbers of nodes and ranks, all transports, and shapes that are of several nodes alone.

use epoxide::transport::TransportKind;
use epoxide_testing::harness::NodeLinks;
use epoxide_testing::oracle::{Routing, Style};
use epoxide_testing::roundtrip::Case;
use epoxide_testing::tier;

use crate::shapes::routing;

const TRANSPORTS: [TransportKind; 4] =
    [TransportKind::Direct, TransportKind::Auto, TransportKind::Shm, TransportKind::Tcp];

/// Nodes of so many ranks, shared memory between them, two queues.
fn on(ranks_per_node: u32, routing: Routing, row_bytes: u32) -> Case {
    let nodes = NodeLinks { ranks_per_node, transport: TransportKind::Shm, queues: 2 };
    Case { nodes: Some(nodes), num_channels: 3, ..Case::new(routing, row_bytes) }
}

/// Checks a case of many ranks: in the default tier a round trip, in the long one everything.
fn check(case: &Case) {
    if tier::is_long() || case.routing.num_ranks() < 8 {
        case.check();
    } else {
        case.setup().run(|rank| rank.round_trip(case).map(drop));
    }
}

/// Unequal numbers of tokens on all ranks, over each transport.
fn world(nodes: u32, ranks_per_node: u32) {
    let ranks = nodes * ranks_per_node;
    let tokens: Vec<u32> = (0..ranks).map(|rank| [7, 0, 13, 1, 5][rank as usize % 5]).collect();
    for transport in tier::sample(TRANSPORTS) {
        let case = on(ranks_per_node, routing(&tokens, 4, 2 * ranks, Style::WithHoles), 48);
        // Each queue to a peer of another node has a thread.
        let queues = if ranks < 8 { 2 } else { tier::pick(1, 2) };
        let case = Case { nodes: Some(NodeLinks { ranks_per_node, transport, queues }), ..case };
        check(&case);
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

/// More ranks than a warp has lanes.
#[test]
fn more_ranks_than_lanes() {
    let tokens: Vec<u32> = (0..35).map(|rank| [3, 0, 5, 1][rank as usize % 4]).collect();
    let case = on(7, routing(&tokens, 6, 70, Style::WithHoles), 48);
    let nodes = case.nodes.map(|nodes| NodeLinks { queues: tier::pick(1, 2), ..nodes });
    check(&Case { num_channels: 2, nodes, ..case });
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
fn more_channels_than_queues_and_more_queues_than_channels() {
    for (num_channels, queues) in [(7, tier::pick(1, 2)), (1, tier::pick(2, 4))] {
        let case = on(2, routing(&[20, 9, 0, 31], 3, 8, Style::Repeats), 48);
        let nodes = case.nodes.map(|nodes| NodeLinks { queues, ..nodes });
        Case { nodes, num_channels, ..case }.check();
    }
}

#[test]
fn everything_stays_on_its_node() {
    let of_node = |ids: [i64; 2], tokens| vec![ids.to_vec(); tokens];
    let topk_idx = vec![of_node([0, 2], 5), of_node([1, 3], 9), of_node([4, 6], 2), of_node([7, 7], 8)];
    on(2, Routing { num_experts: 8, num_topk: 2, topk_idx }, 48).check();
}
