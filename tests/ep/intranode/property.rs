//! Random routings, shapes and settings.

use proptest::prelude::*;

use crate::cases::case;
use crate::harness::Nodes;

/// Tokens of each of 1 to 8 ranks, often none.
fn one_node() -> impl Strategy<Value = (Vec<u32>, Option<Nodes>)> {
    let tokens = prop_oneof![1 => Just(0), 1 => 1..=8u32, 3 => 0..=64u32];
    prop::collection::vec(tokens, 1..=8).prop_map(|tokens| (tokens, None))
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 96,
        max_shrink_iters: 40,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn every_quantity_equals_the_oracle(case in case(one_node())) {
        case.check();
    }
}
