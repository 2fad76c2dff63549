//! Ranks that can all map each other's memory are one node, for any `ranks_per_node`.

use epoxide::DType;
use epoxide::throughput::{CombineRequest, DispatchRequest};
use epoxide::transport::TransportKind;
use epoxide_testing::harness::{NodeLinks, Rank};
use epoxide_testing::low_latency::LowLatencyCase;
use epoxide_testing::oracle::{InternodeOracle, Style};
use epoxide_testing::roundtrip::{Case, Return};

use crate::shapes::routing;

fn nodes(ranks_per_node: u32, transport: TransportKind) -> Option<NodeLinks> {
    Some(NodeLinks { ranks_per_node, transport, queues: 1 })
}

fn case(ranks: u32, nodes: Option<NodeLinks>) -> Case {
    let tokens: Vec<u32> = (0..ranks).map(|rank| [7, 0, 13, 1, 5][rank as usize % 5]).collect();
    Case { nodes, num_channels: 3, ..Case::new(routing(&tokens, 4, 2 * ranks, Style::WithHoles), 48) }
}

#[test]
fn mapped_ranks_are_one_node() {
    for (ranks, ranks_per_node, transport) in
        [(2, 1, TransportKind::Direct), (4, 2, TransportKind::Auto), (6, 2, TransportKind::Direct)]
    {
        let case = case(ranks, nodes(ranks_per_node, transport));
        case.setup().join_nodes().run(|rank| {
            let seen = (rank.buffer.num_nodes(), rank.buffer.ranks_per_node(), rank.buffer.node());
            rank.equal("nodes, ranks of each, own node", &[seen], &[(1, ranks, 0)]);
            rank.equal("wire_bytes", &[rank.buffer.wire_bytes()], &[0]);
            rank.check_everything(&case)
        });
    }
}

#[test]
fn ranks_that_are_not_all_mapped_are_several_nodes() {
    // With `Auto` the harness puts two nodes on a host; shm is selected by name.
    for (ranks, transport) in [(3, TransportKind::Auto), (2, TransportKind::Shm)] {
        let case = case(ranks, nodes(1, transport));
        case.setup().join_nodes().run(|rank| {
            rank.equal("num_nodes", &[rank.buffer.num_nodes()], &[ranks]);
            rank.check_everything(&case)
        });
    }
}

/// The host computes the original interface's counts by node if no kernel does.
#[test]
fn counts_by_node_are_those_of_the_oracle() {
    let case = case(6, nodes(2, TransportKind::Direct));
    case.setup().join_nodes().run(|rank| {
        let (topk_idx, _) = rank.topk(&case)?;
        let (x, _) = rank.payload(&case, 0)?;
        let layout = rank.layout(&topk_idx, case.routing.num_experts)?;
        let mut place = rank.place()?;
        let output = rank.dispatch(&mut place, DispatchRequest::new(&x, &layout))?;
        rank.stream.synchronize()?;
        let handle = output.handle.intranode().expect("one node");
        for per_node in [1, 2, 3, 6] {
            let plan = InternodeOracle::new(&case.routing, per_node).plan(rank.rank, case.num_channels);
            let tokens = layout.tokens_per_node(per_node, &rank.stream)?;
            rank.equal("num_tokens_per_rdma_rank", &tokens, &plan.num_tokens_per_rdma_rank);
            let got = handle.by_node(per_node, &rank.stream)?;
            let matrices = [
                (
                    "rdma_channel_prefix_matrix",
                    &got.rdma_channel_prefix_matrix,
                    &plan.rdma_channel_prefix_matrix,
                ),
                ("send_rdma_head", &got.send_rdma_head, &plan.send_rdma_head),
                (
                    "recv_gbl_channel_prefix_matrix",
                    &got.recv_gbl_channel_prefix_matrix,
                    &plan.recv_gbl_channel_prefix_matrix,
                ),
            ];
            for (what, got, want) in matrices {
                rank.equal(what, got, &want.concat());
            }
            let sums = &plan.recv_gbl_rank_prefix_sum;
            rank.equal("recv_gbl_rank_prefix_sum", &got.recv_gbl_rank_prefix_sum, sums);
            let same = handle.channel_prefix_matrix().to_host::<i32>(&rank.stream)?;
            rank.equal("gbl_channel_prefix_matrix", &same, &plan.gbl_channel_prefix_matrix.concat());
        }
        let errors =
            [handle.by_node(4, &rank.stream).map(drop), layout.tokens_per_node(0, &rank.stream).map(drop)];
        for (error, value) in errors.into_iter().zip([4, 0]) {
            let text = error.err().map(|error| error.to_string()).unwrap_or_default();
            let named = text.starts_with(&format!("ranks_per_node = {value}: must divide"));
            rank.check(named, format!("ranks_per_node = {value} gives {text}"));
        }
        Ok(())
    });
}

/// Sums of nodes that are kept apart are rounded for each of them, those of one node once.
#[test]
fn kept_nodes_round_as_nodes_do_over_any_transport() {
    let sums = |transport, joins: bool| -> Vec<Vec<Vec<u8>>> {
        let case = case(4, nodes(2, transport));
        let setup = if joins { case.setup().join_nodes() } else { case.setup() };
        let back = Return::random(&Case { nodes: None, ..case.clone() }, &case.plans(), 0, DType::Bf16);
        setup.run(|rank| combined(rank, &case, &back.rows[rank.rank as usize]))
    };
    let tcp = sums(TransportKind::Tcp, true);
    assert_eq!(sums(TransportKind::Direct, false), tcp);
    assert_ne!(sums(TransportKind::Direct, true), tcp, "some sum is rounded otherwise");
}

/// The bytes of all sums of a rank, which gives back `rows`.
fn combined(rank: &mut Rank, case: &Case, rows: &[Vec<u8>]) -> epoxide::Result<Vec<Vec<u8>>> {
    let (topk_idx, _) = rank.topk(case)?;
    let (x, _) = rank.payload(case, 0)?;
    let layout = rank.layout(&topk_idx, case.routing.num_experts)?;
    let mut place = rank.place()?;
    let handle = rank.dispatch(&mut place, DispatchRequest::new(&x, &layout))?.handle;
    let rows = rank.upload_rows(DType::Bf16, case.hidden(), rows)?;
    let output = rank.combine(CombineRequest::new(&rows, &handle))?;
    rank.row_bytes(&output.combined_x)
}

#[test]
fn low_latency_joins_nodes_too() {
    let case = LowLatencyCase::new(routing(&[9, 5, 0, 12], 3, 8, Style::DistinctTopK), 24);
    let case = LowLatencyCase { rounds: 2, ..case };
    for (transport, joins_nodes, nodes_of_buffer) in
        [(TransportKind::Direct, true, 1), (TransportKind::Direct, false, 2), (TransportKind::Shm, true, 2)]
    {
        let case = LowLatencyCase { nodes: nodes(2, transport), joins_nodes, ..case.clone() };
        case.run(|rank| {
            assert_eq!(rank.buffer.num_nodes(), nodes_of_buffer, "{transport}, {joins_nodes}");
            rank.round_trip(&case)
        });
    }
}
