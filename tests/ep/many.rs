//! More ranks than kernels keep in registers, up to as many as there may be.

use epoxide::DType;
use epoxide::driver::virt::{CheckConfig, Checker};
use epoxide_testing::oracle::{Routing, Style};
use epoxide_testing::roundtrip::{Case, Scales};
use epoxide_testing::tier;

use crate::shapes::routing;

/// Unequal numbers of tokens, none on some ranks.
fn on(ranks: u32, most: u32, topk: u32) -> Case {
    let tokens: Vec<u32> = (0..ranks).map(|rank| rank * 7 % (most + 1)).collect();
    Case { num_channels: 1, ..Case::new(routing(&tokens, topk, 2 * ranks, Style::WithHoles), 48) }
}

#[test]
fn one_rank_more_than_few() {
    let case = Case { dtype: DType::Fp8E4m3, scales: Scales::Columns(5), num_channels: 3, ..on(9, 13, 4) };
    case.check();
}

/// Two ranks for each lane of a warp.
#[test]
fn as_many_ranks_as_there_may_be() {
    let case = on(tier::pick(34, 64), 2, tier::pick(8, 32));
    case.setup().run(|rank| rank.round_trip(&case).map(drop));
}

/// A token of every rank for every rank that it can go to.
#[test]
fn every_entry_of_a_token_goes_to_another_rank() {
    for ranks in tier::sample([33, 64]) {
        let of_rank = |rank: i64| vec![(0..32).map(|entry| (rank + entry * 2) % i64::from(ranks)).collect()];
        let topk_idx = (0..i64::from(ranks)).map(of_rank).collect();
        let case = Case::new(Routing { num_experts: ranks, num_topk: 32, topk_idx }, 16);
        case.setup().run(|rank| rank.round_trip(&case).map(drop));
    }
}

#[test]
fn the_checker_finds_nothing() {
    let case = Case { schedule_seed: Some(7), ..on(9, 3, 4) };
    let mut setup = case.setup();
    setup.device.checker = Some(Checker::new(CheckConfig::default()));
    setup.run(|rank| rank.round_trip(&case).map(drop));
}
