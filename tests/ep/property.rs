//! Random routings, shapes and settings, on one node and on several.

use proptest::prelude::*;

use epoxide::transport::TransportKind;
use epoxide_testing::harness::{NodeLinks, rank_counts};
use epoxide_testing::tier;

use crate::cases::case;

/// Tokens of each of 1 to 8 ranks, often none.
fn one_node() -> impl Strategy<Value = (Vec<u32>, Option<NodeLinks>)> {
    let tokens = prop_oneof![1 => Just(0), 1 => 1..=8u32, 3 => 0..=64u32];
    prop::collection::vec(tokens, rank_counts(1..=8)).prop_map(|tokens| (tokens, None))
}

/// Few tokens of each of more ranks than kernels keep in registers.
fn many_ranks() -> impl Strategy<Value = (Vec<u32>, Option<NodeLinks>)> {
    let tokens = prop_oneof![1 => Just(0), 3 => 0..=12u32];
    prop::collection::vec(tokens, rank_counts(9..=tier::pick(16, 64))).prop_map(|tokens| (tokens, None))
}

/// Most ranks: each is several threads.
const MOST_RANKS: usize = 8;

/// Tokens of each rank, often none or fewer than channels.
pub fn several_nodes() -> impl Strategy<Value = (Vec<u32>, Option<NodeLinks>)> {
    let transport = prop::sample::select(vec![
        TransportKind::Direct,
        TransportKind::Auto,
        TransportKind::Shm,
        TransportKind::Tcp,
    ]);
    let counts = rank_counts(1..=MOST_RANKS);
    let places = (1..=4u32, prop::sample::select(vec![1u32, 2, 4, 8]))
        .prop_filter("few ranks", move |(nodes, each)| counts.contains(&((nodes * each) as usize)));
    (places, transport, 1..=3u32).prop_flat_map(|((nodes, ranks_per_node), transport, queues)| {
        let tokens = prop_oneof![Just(0u32), Just(1), Just(5), Just(13), 0..=40u32];
        let place = NodeLinks { ranks_per_node, transport, queues };
        (prop::collection::vec(tokens, (nodes * ranks_per_node) as usize), Just(Some(place)))
    })
}

pub fn config(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases: tier::pick((cases / 32).max(1), cases / 4),
        max_shrink_iters: 40,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

mod intranode {
    use super::*;

    proptest! {
        #![proptest_config(config(96))]

        #[test]
        fn every_quantity_equals_the_oracle(case in case(one_node())) {
            case.check();
        }
    }
}

mod many {
    use super::*;

    proptest! {
        #![proptest_config(config(16))]

        #[test]
        fn every_quantity_equals_the_oracle(case in case(many_ranks())) {
            case.check();
        }
    }
}

mod internode {
    use super::*;

    proptest! {
        #![proptest_config(config(64))]

        #[test]
        fn every_quantity_equals_the_oracle(case in case(several_nodes()), joins in any::<bool>()) {
            let setup = if joins { case.setup().join_nodes() } else { case.setup() };
            setup.run(|rank| rank.check_everything(&case));
        }
    }
}
