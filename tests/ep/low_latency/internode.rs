//! Low latency across nodes: the same calls and the same results, whatever joins the nodes.

use epoxide::low_latency::Quantise;
use epoxide::transport::TransportKind;
use epoxide_testing::harness::Nodes;
use epoxide_testing::low_latency::LowLatencyCase;
use epoxide_testing::oracle::Style;

use crate::shapes::routing;

fn nodes(ranks_per_node: u32, transport: TransportKind) -> Option<Nodes> {
    Some(Nodes { ranks_per_node, transport, queues: 1 })
}

#[test]
fn two_nodes_of_two() {
    for transport in [TransportKind::Direct, TransportKind::Shm, TransportKind::Tcp, TransportKind::Auto] {
        let case = LowLatencyCase::new(routing(&[9, 5, 0, 12], 3, 8, Style::DistinctTopK), 24);
        LowLatencyCase { nodes: nodes(2, transport), rounds: 3, ..case }.check();
    }
}

#[test]
fn quantised_either_way() {
    for quantise in [Quantise::Not, Quantise::Fp8, Quantise::Fp8PowerOfTwo] {
        for quantise_back in [Quantise::Not, Quantise::Fp8, Quantise::Fp8PowerOfTwo] {
            let case = LowLatencyCase::new(routing(&[6, 5, 3], 2, 6, Style::DistinctTopK), 384);
            let case =
                LowLatencyCase { nodes: nodes(1, TransportKind::Shm), quantise, quantise_back, ..case };
            case.check();
            LowLatencyCase { by_expert: false, ..case }.check();
        }
    }
}
