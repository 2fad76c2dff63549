//! Traffic within a node of rows by expert from other nodes and from the own one: a row is sent to
//! each rank once, which copies it to its other places.

use std::collections::BTreeMap;
use std::sync::Mutex;

use epoxide::driver::virt::{CheckConfig, Checker};
use epoxide::transport::TransportKind;
use epoxide_testing::harness::{NodeLinks, PATIENCE};
use epoxide_testing::oracle::{self, Routing, Style};
use epoxide_testing::payload::rng_of;
use epoxide_testing::roundtrip::Case;

const KERNEL: &str = "internode_dispatch_by_expert";
const PER_NODE: u32 = 2;

/// Rows that rank `by` stores in received rows of rank `on`, of its node, in one dispatch: its own
/// tokens, and those of the ranks with its index on other nodes.
fn rows(routing: &Routing, by: u32, on: u32) -> u64 {
    let sources = (0..routing.num_ranks()).filter(|source| source % PER_NODE == by % PER_NODE);
    let tokens = sources.flat_map(|source| (0..routing.num_tokens(source)).map(move |token| (source, token)));
    let entries = |(source, token): (u32, u32)| {
        let entries = &routing.topk_idx[source as usize][token as usize];
        entries.iter().filter(|&&expert| routing.owner(expert) == Some(on)).count() as u64
    };
    // A rank writes all of its own places itself.
    tokens.map(|token| if by == on { entries(token) } else { entries(token).min(1) }).sum()
}

#[test]
fn rows_by_expert_go_to_each_rank_of_a_node_once() {
    for transport in [TransportKind::Direct, TransportKind::Shm] {
        let routing = Routing::random(&mut rng_of(&[21]), &[9, 0, 14, 5], 6, 8, Style::WithHoles);
        let nodes = Some(NodeLinks { ranks_per_node: PER_NODE, transport, queues: 2 });
        let case = Case { nodes, ..Case::new(routing.clone(), 256) };
        let checker = Checker::new(CheckConfig::default());
        checker.count_stores();
        let mut setup = case.setup_by_expert(8);
        setup.device.checker = Some(checker.clone());
        let counted = Mutex::new(Vec::new());
        setup.run(|rank| {
            rank.check_by_expert(&case, 8)?;
            // All pools still exist, and all ranks have finished their stores.
            rank.group.barrier(PATIENCE)?;
            if rank.rank == 0 {
                *counted.lock().unwrap() = checker.stores();
            }
            rank.group.barrier(PATIENCE)
        });
        let counted = counted.into_inner().unwrap();
        let stored = counted.iter().filter(|it| it.kernel == KERNEL && it.part == "recv_x");
        let stored: BTreeMap<(u32, u32), u64> = stored.map(|it| ((it.by, it.on), it.bytes)).collect();
        // The case makes two dispatches with counts and a cached one.
        let dispatches = if case.num_channels > 1 { 3 } else { 2 };
        let bytes = dispatches * u64::from(case.row_bytes);
        for by in 0..routing.num_ranks() {
            for on in 0..routing.num_ranks() {
                let same_node = by / PER_NODE == on / PER_NODE;
                let mut want = if same_node { rows(&routing, by, on) } else { 0 };
                if by == on {
                    // The rank also copies rows that the others of its node have written.
                    let others = (0..routing.num_ranks()).filter(|other| *other != by);
                    let others = others.filter(|other| other / PER_NODE == by / PER_NODE);
                    let written: u64 = others.map(|other| rows(&routing, other, by)).sum();
                    let own = rows(&routing, by, by);
                    let counts = oracle::by_expert(&routing, by, 8).counts;
                    let all: u64 = counts.iter().map(|count| *count as u64).sum();
                    want = own + (all - own - written);
                }
                let got = stored.get(&(by, on)).copied().unwrap_or(0);
                assert_eq!(got, want * bytes, "{transport:?}: by rank {by} on rank {on}");
            }
        }
    }
}
