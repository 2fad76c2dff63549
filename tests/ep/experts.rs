//! Ids of either type, and experts at any places: in both modes, on one node and on several.

use std::sync::Arc;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use epoxide::driver::virt::{CheckConfig, Checker};
use epoxide::low_latency;
use epoxide::throughput::{Buffer, Counts, Detached, DispatchRequest, Place};
use epoxide::transport::TransportKind;
use epoxide::{Element, ExpertId, ExpertMap, Placement, StreamOrder, TypedTensor};
use epoxide::{Error, Result};
use epoxide_testing::harness::{NodeLinks, Rank};
use epoxide_testing::ids::{Ids, Logical};
use epoxide_testing::low_latency::LowLatencyCase;
use epoxide_testing::oracle::{Routing, Style};
use epoxide_testing::roundtrip::Case;
use epoxide_testing::tier;

use crate::low_latency::faults;
use crate::spread::{Spread, in_every_spread};
use crate::valid::{EXPERTS, TOKENS, refused, setup, then_dispatch};

in_every_spread! {
    ids_of_32_bits,
    ten_experts_on_four_ranks,
    replicas_take_turns,
    all_experts_on_one_rank,
    ids_of_32_bits_out_of_range_are_errors,
    ids_that_a_map_does_not_have_are_errors,
    entries_of_a_map_that_are_no_experts_are_errors,
    a_map_changes_between_replays,
}

const TOKENS_OF_RANKS: [u32; 4] = [7, 0, 12, 5];

fn rng() -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(11)
}

/// Experts at these places, and tokens that select them.
fn placed(ranks: &[&[u32]], num_experts: u32) -> Logical {
    let topk_idx = Routing::draw(&mut rng(), &TOKENS_OF_RANKS, 3, num_experts, Style::Repeats);
    let ranks = ranks.iter().map(|experts| experts.to_vec()).collect();
    Logical { num_experts, num_topk: 3, ranks, topk_idx }
}

/// Checks a routing in both modes, the low-latency one in check mode. The long tier checks everything
/// of a high-throughput round trip, and low latency without check mode too.
fn check(spread: Spread, ids: Ids, routing: Routing) {
    let nodes = spread.nodes(2);
    let case = Case { ids: ids.clone(), nodes, num_channels: 3, ..Case::new(routing.clone(), 48) };
    let low_latency = LowLatencyCase { ids, nodes, rounds: 2, ..LowLatencyCase::new(routing, 24) };
    if tier::is_long() {
        case.check();
        low_latency.check();
    } else {
        case.setup().run(|rank| rank.round_trip(&case).map(drop));
    }
    let checker = Some(Checker::new(CheckConfig::default()));
    LowLatencyCase { checker, schedule_seed: Some(3), ..low_latency }.check();
}

fn check_placed(spread: Spread, logical: Logical) {
    let routing = logical.routing(logical.local_experts());
    check(spread, Ids::Placed(Arc::new(logical)), routing);
}

fn ids_of_32_bits(spread: Spread) {
    let routing = Routing::random(&mut rng(), &TOKENS_OF_RANKS, 3, 8, Style::WithHoles);
    check(spread, Ids::Narrow, routing);
}

fn ten_experts_on_four_ranks(spread: Spread) {
    let logical = placed(&[&[0, 1, 2], &[3, 4, 5], &[6, 7], &[8, 9]], 10);
    let even = Placement::even(10, 4).expect("a placement");
    assert_eq!(even, logical.placement());
    check_placed(spread, logical);
}

fn replicas_take_turns(spread: Spread) {
    check_placed(spread, placed(&[&[4, 0, 4], &[1, 2, 0], &[], &[3, 0, 1, 2]], 5));
}

fn all_experts_on_one_rank(spread: Spread) {
    check_placed(spread, placed(&[&[], &[], &[2, 0, 1], &[]], 3));
}

/// Ids of two entries for each token, one of which is `bad` on rank 1.
fn ids_with<T: Element + From<i8>>(rank: &Rank, bad: T) -> Result<TypedTensor<'static, T>> {
    let mut ids = vec![vec![T::from(0), T::from(3)]; TOKENS as usize];
    if rank.rank == 1 {
        ids[2][1] = bad;
    }
    rank.upload_typed(2, &ids)
}

/// Has both ranks dispatch along layouts of which rank 1's is bad; `value` and `rule` are what its
/// validation names.
fn refuses(
    rank: &mut Rank,
    place: &mut Place,
    layout: &epoxide::throughput::DispatchLayout<'_>,
    named: &[&str],
) -> Result<()> {
    let x = rank.upload_rows(epoxide::DType::Bf16, 8, &vec![vec![1; 16]; TOKENS as usize])?;
    let validated = layout.validate(&rank.stream);
    if rank.rank == 1 {
        refused(validated, named);
    } else {
        validated?;
    }
    refused(rank.dispatch(place, DispatchRequest::new(&x, layout)), &["topk_idx of rank 1"]);
    Ok(())
}

fn ids_of_32_bits_out_of_range_are_errors(spread: Spread) {
    for bad in tier::sample([EXPERTS as i32, -2, i32::MAX, i32::MIN]) {
        then_dispatch(setup(spread), |rank, _, place| {
            let ids = ids_with(rank, bad)?;
            let layout = rank.layout(&ids, EXPERTS)?;
            let value = format!("topk_idx = {bad} (token 2, entry 1)");
            refuses(rank, place, &layout, &[&value, "-1 or 0 to num_experts - 1 = 3"])
        });
    }
}

fn map_of(rank: &Rank) -> Result<ExpertMap> {
    // As many experts as without a map, and two physical ones more.
    ExpertMap::new(&rank.stream, &Placement::new(EXPERTS, &[vec![0, 3, 1], vec![2, 0]])?)
}

fn refuses_placed<T: ExpertId + From<i8> + Sync>(spread: Spread, bad: T, named: &[&str]) {
    then_dispatch(setup(spread), |rank, _, place| {
        let (ids, map) = (ids_with(rank, bad)?, map_of(rank)?);
        let layout = rank.placed_layout(&ids, &map)?;
        refuses(rank, place, &layout, named)
    });
}

fn ids_that_a_map_does_not_have_are_errors(spread: Spread) {
    // There are physical experts 4 and 5, and no logical ones.
    let named = |bad: i64| [format!("topk_idx = {bad} (token 2, entry 1)"), "num_experts - 1 = 3".into()];
    for bad in tier::sample([4, 5, 6, -2, i32::MAX, i32::MIN]) {
        refuses_placed(spread, bad, &named(bad.into()).each_ref().map(String::as_str));
    }
    for bad in tier::sample([1i64 << 32, 4, i64::MAX, i64::MIN, 1 << 61]) {
        refuses_placed(spread, bad, &named(bad).each_ref().map(String::as_str));
    }
}

fn entries_of_a_map_that_are_no_experts_are_errors(spread: Spread) {
    for bad in tier::sample([6, -2, i32::MAX, i32::MIN]) {
        then_dispatch(setup(spread), |rank, _, place| {
            let (ids, map) = (ids_with(rank, 2i64)?, map_of(rank)?);
            let mut entries = map.entries().values(&rank.stream)?;
            if rank.rank == 1 {
                // Rows of expert 2, which rank 1 alone selects.
                let choices = map.choices() as usize;
                entries[2 * choices..3 * choices].fill(bad);
            }
            map.entries().write(&rank.stream, &entries)?;
            let layout = rank.placed_layout(&ids, &map)?;
            refuses(rank, place, &layout, &["map = its entries of expert 2", "-1 or 0 to 5"])
        });
    }
}

/// An entry of -1 selects nothing.
#[test]
fn an_expert_without_a_place_gets_nothing() {
    setup(Spread::OneNode).run(|rank| {
        let (ids, map) = (ids_with(rank, 1i32)?, map_of(rank)?);
        let mut entries = map.entries().values(&rank.stream)?;
        entries[3 * map.choices() as usize..].fill(-1);
        map.entries().write(&rank.stream, &entries)?;
        let layout = rank.placed_layout(&ids, &map)?;
        layout.validate(&rank.stream)?;
        let physical = layout.physical_topk_idx().expect("there is a map").values(&rank.stream)?;
        let first = |token: i32| if (token + rank.rank as i32) % 2 == 0 { 0 } else { 4 };
        let mut expected: Vec<i32> = (0..TOKENS as i32).flat_map(|token| [first(token), -1]).collect();
        if rank.rank == 1 {
            expected[5] = 2;
        }
        rank.equal("physical experts", &physical, &expected);
        Ok(())
    });
}

#[test]
fn maps_are_for_as_many_ranks() {
    setup(Spread::OneNode).run(|rank| {
        let ids = ids_with(rank, 1i32)?;
        let map = ExpertMap::new(&rank.stream, &Placement::even(EXPERTS, 3)?)?;
        refused(rank.placed_layout(&ids, &map), &["map = for 3 ranks", "the buffer has 2 ranks"]);
        let map = map_of(rank)?;
        let other = Placement::even(5, 2)?;
        refused(map.set(&rank.stream, &other), &["5 experts on 2 ranks", "as many as the map, 4 on 2"]);
        let other = Placement::new(4, &[vec![0, 1, 2, 3], vec![]])?;
        let parts = ["placement = 4 experts on a rank", "room for 3", "with_local_experts(4)"];
        refused(map.set(&rank.stream, &other), &parts);
        let even = Placement::even(4, 2)?.with_local_experts(3)?;
        let replicas = Placement::new(4, &[vec![0, 1, 2], vec![3, 0]])?;
        let parts = ["placement = 2 replicas of expert 0", "1 choices", "with_choices(2)"];
        refused(ExpertMap::new(&rank.stream, &even)?.set(&rank.stream, &replicas), &parts);
        refused(ExpertMap::new(&rank.stream, &replicas.clone().with_choices(1)?), &parts);
        ExpertMap::new(&rank.stream, &even.with_choices(2)?)?.set(&rank.stream, &replicas)?;
        Ok(())
    });
    faults::run(|rank| {
        let mut place = rank.buffer.place(0)?;
        let order = StreamOrder::on(&rank.stream);
        for (ranks, parts) in
            [(2, ["map = for 2 ranks", "3 ranks"]), (3, ["1 experts on a rank", "num_experts = 3"])]
        {
            let map = ExpertMap::new(&rank.stream, &Placement::even(3, ranks)?)?;
            let request = low_latency::DispatchRequest::new(&rank.x, &rank.topk_idx).map(&map);
            refused(rank.buffer.dispatch(&mut place, request, order), &parts);
        }
        Ok(())
    });
}

/// In low latency, ids that are out of range are an error on the rank that gave them.
#[test]
fn low_latency_names_ids_and_entries_of_a_map() {
    for (id, entry, parts) in [
        (6, 1, ["topk_idx = 6 of token 2", "logical expert"]),
        (-2, 1, ["topk_idx = -2 of token 2", "logical expert"]),
        (i32::MAX, 1, ["topk_idx = 2147483647 of token 2", "logical expert"]),
        (5, 6, ["map = its entries of expert 5 of token 2", "-1 or 0 to 5"]),
        (5, -2, ["map = its entries of expert 5 of token 2", "-1 or 0 to 5"]),
    ] {
        faults::run(|rank| {
            let mut place = rank.buffer.place(0)?;
            let map = ExpertMap::new(&rank.stream, &Placement::even(6, 3)?)?;
            let mut ids = vec![0i32; 2 * faults::TOKENS as usize];
            if rank.rank == 2 {
                ids[4] = id;
                map.entries().write(&rank.stream, &[0, 1, 2, 3, 4, entry])?;
            }
            let ids = TypedTensor::from_host(&rank.stream, &[faults::TOKENS, 2], &ids)?;
            let request = low_latency::DispatchRequest::new(&rank.x, &ids).map(&map);
            drop(rank.buffer.dispatch(&mut place, request, StreamOrder::on(&rank.stream))?);
            let outcome = rank.outcome();
            if rank.rank != 2 {
                return outcome;
            }
            assert_eq!(rank.buffer.missing_tokens()?, [2]);
            assert!(matches!(outcome, Err(Error::Broken { .. })), "{outcome:?}");
            refused(outcome, &parts);
            Ok(())
        });
    }
}

/// The first four of several placements of the same experts, with as many local experts each.
fn placements() -> Vec<Logical> {
    let mut rng = rng();
    let mut logical = Logical::random(&mut rng, &TOKENS_OF_RANKS, 3, Style::WithHoles);
    let mut all = Vec::new();
    for _ in 0..4 {
        logical.place(&mut rng);
        all.push(logical.clone());
    }
    all
}

/// Most local experts of any of them.
fn most_local_experts(placements: &[Logical]) -> u32 {
    placements.iter().map(Logical::local_experts).max().expect("there are some")
}

/// A map with room for all of the placements, which take turns.
fn map_for(rank: &Rank, placements: &[Logical]) -> Result<ExpertMap> {
    let placement = placements[0].placement().with_local_experts(most_local_experts(placements))?;
    ExpertMap::new(&rank.stream, &placement.with_choices(60)?)
}

fn a_map_changes_between_replays(spread: Spread) {
    let placements = placements();
    let local_experts = most_local_experts(&placements);
    let case = |logical: &Logical| Case {
        nodes: spread.nodes(2),
        num_channels: 2,
        ..Case::new(logical.routing(local_experts), 48)
    };
    case(&placements[0]).setup().run(|rank| {
        let (stream, mut place) = (rank.stream.clone(), rank.place()?);
        let map = map_for(rank, &placements)?;
        let ids = placements[0].upload(&stream, rank.rank)?;
        let (_, weights) = rank.topk(&case(&placements[0]))?;
        let (x, _) = rank.payload(&case(&placements[0]), 0)?;
        let work = |buffer: &mut Buffer, order: StreamOrder<'_>| {
            let layout = buffer.get_placed_dispatch_layout(&ids, &map, order)?;
            let counts = Counts::OnDevice { capacity: buffer.capacity() };
            let request = DispatchRequest::new(&x, &layout).topk_weights(&weights).counts(counts);
            Ok(buffer.dispatch(&mut place, request, order)?.detach())
        };
        let step = rank.buffer.capture(&stream, work)?;
        for logical in &placements {
            map.set(&stream, &logical.placement())?;
            step.launch(&stream)?;
            step.check(&stream)?;
            let (case, output): (_, &Detached) = (case(logical), step.output());
            let expected = rank.expect(&case);
            let received = output.handle().num_recv_tokens(&stream)?;
            rank.equal("rows", &[received], &[expected.plan.num_recv_tokens]);
            let output = output.at(&place)?;
            rank.check_received(&case, 0, &expected.plan.recv_src, "a replay", output)?;
            let metadata = rank.compare_metadata(&case, &expected, output)?;
            rank.note(metadata);
        }
        Ok(())
    });
}

#[test]
fn a_map_changes_between_replays_of_low_latency() {
    let placements = placements();
    let local_experts = most_local_experts(&placements);
    let several = NodeLinks { ranks_per_node: 2, transport: TransportKind::Shm, queues: 1 };
    for nodes in [None, Some(several)] {
        let case = |logical: &Logical| LowLatencyCase {
            nodes,
            ..LowLatencyCase::new(logical.routing(local_experts), 24)
        };
        case(&placements[0]).run(|rank| {
            let (stream, number) = (rank.stream.clone(), rank.rank);
            let mut place = rank.buffer.place(0)?;
            let placement = placements[0].placement().with_local_experts(local_experts)?;
            let map = ExpertMap::new(&stream, &placement.with_choices(60)?)?;
            let ids = placements[0].upload(&stream, number)?;
            let inputs = case(&placements[0]).inputs(rank)?;
            let step = rank.buffer.capture(&stream, |buffer, order| {
                let request = low_latency::DispatchRequest::new(inputs.x(), &ids).map(&map);
                Ok(buffer.dispatch(&mut place, request, order)?.detach())
            })?;
            for logical in &placements {
                map.set(&stream, &logical.placement())?;
                step.launch(&stream)?;
                step.check(&stream)?;
                let received = step.output().at(&place)?;
                case(logical).check_dispatched(rank, received)?;
            }
            Ok(())
        });
    }
}

/// The remaining ranks divide the experts of the lost rank among themselves.
#[test]
fn a_map_moves_the_experts_of_a_rank_that_is_gone() {
    let placed = |ranks: &[&[u32]]| {
        let topk_idx = vec![vec![vec![0, 4, 5], vec![2, 3, -1]], vec![vec![4, 4, 1]], vec![vec![3, 5, 0]]];
        let ranks = ranks.iter().map(|experts| experts.to_vec()).collect();
        Logical { num_experts: 6, num_topk: 3, ranks, topk_idx }
    };
    let before = placed(&[&[0, 1], &[2, 3], &[4, 5]]);
    let mut after = placed(&[&[0, 1, 4], &[5, 2, 3], &[]]);
    after.topk_idx[2].clear();
    // Room for three experts on each rank.
    let case =
        |logical: &Logical| LowLatencyCase { max_tokens: 2, ..LowLatencyCase::new(logical.routing(3), 24) };
    case(&before).run(|rank| {
        let (stream, number) = (rank.stream.clone(), rank.rank);
        let order = StreamOrder::on(&stream);
        let mut place = rank.buffer.place(0)?;
        let map = ExpertMap::new(&stream, &before.placement().with_local_experts(3)?)?;
        let (ids, inputs) = (before.upload(&stream, number)?, case(&before).inputs(rank)?);
        let request = low_latency::DispatchRequest::new(inputs.x(), &ids).map(&map);
        let received = rank.buffer.dispatch(&mut place, request, order)?;
        case(&before).check_dispatched(rank, &received)?;
        drop(received);
        let survivors = rank.group.split((number == 2).into())?;
        if number != 2 {
            rank.buffer.regroup(&*survivors)?;
            map.set(&stream, &after.placement())?;
            let received = rank.buffer.dispatch(&mut place, request, order)?;
            case(&after).check_dispatched(rank, &received)?;
        }
        Ok(())
    });
}
