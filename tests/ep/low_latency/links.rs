//! Traffic of each link: one row for each token and rank, and the protocol's bytes of everything
//! else. The sizes and limits below are those of `docs/protocol.md`, so that a change of the
//! library's fails the test.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use epoxide::driver::virt::{CheckConfig, Checker, Loaded};
use epoxide::low_latency::Quantise;
use epoxide_testing::harness::PATIENCE;
use epoxide_testing::low_latency::{LowLatencyCase, ReturnPath, Segments};
use epoxide_testing::oracle::{Routing, Style, by_expert};
use epoxide_testing::tier;

use crate::shapes::routing;

/// Bytes of a packet with payload and epoch.
const PACKET: u64 = 16;
/// Tokens of a rank whose f32 scales travel as packets.
const SCALE_PACKET_TOKENS: RangeInclusive<u32> = 65..=128;

/// Bytes on the links of a row that returns as packets: 128 for each piece of 1,536 bytes.
fn packets_of_row(row_bytes: u32) -> u64 {
    u64::from(row_bytes.div_ceil(1536)) * 128 * PACKET
}

/// Bytes on the links of a row's f32 scales as packets, three to each.
fn packets_of_scales(scales: u64) -> u64 {
    scales.div_ceil(3) * PACKET
}

/// The kernel of a case's dispatches.
fn dispatch_of(case: &LowLatencyCase) -> &'static str {
    match (case.segments.is_some(), case.quantise == Quantise::Mxfp8) {
        (false, false) if has_packets(case) => "low_latency_dispatch_scale_packets",
        (true, false) if has_packets(case) => "low_latency_dispatch_by_expert_scale_packets",
        (false, false) => "low_latency_dispatch",
        (false, true) => "low_latency_dispatch_mxfp8",
        (true, false) => "low_latency_dispatch_by_expert",
        (true, true) => "low_latency_dispatch_by_expert_mxfp8",
    }
}

/// Whether some scales travel as packets: between up to 8 ranks, with up to 512 tokens in all.
fn has_packets(case: &LowLatencyCase) -> bool {
    let ranks = case.routing.num_ranks();
    let has_room = SCALE_PACKET_TOKENS.contains(&case.max_tokens) && case.max_tokens * ranks <= 512;
    case.quantise == Quantise::Fp8 && ranks <= 8 && has_room
}

/// Bytes by kernel, sending rank, receiving rank and part of the receiver's pool; parts with none
/// are left out.
type Links = BTreeMap<(&'static str, u32, u32, &'static str), u64>;

/// Expected bytes between the ranks of a case in one round trip, from the routing alone.
fn predicted(case: &LowLatencyCase) -> Links {
    let (routing, dispatch) = (&case.routing, dispatch_of(case));
    let ranks = 0..routing.num_ranks();
    let links = ranks.clone().flat_map(|from| ranks.clone().map(move |to| (from, to)));
    let mut all = Links::new();
    for (from, to) in links.filter(|(from, to)| from != to) {
        let mut add = |kernel, part, bytes: u64| {
            if bytes > 0 {
                all.insert((kernel, from, to, part), bytes);
            }
        };
        // A token's row is sent to a rank once, for any number of its experts.
        let tokens = u64::from(routing.num_tokens(from));
        let rows = rows_between(routing, from, to);
        let is_fp8 = case.quantise != Quantise::None;
        let row_bytes = case.hidden * if is_fp8 { 1 } else { 2 };
        let scales = if is_fp8 { u64::from(case.hidden / 128) } else { 0 };
        let chunks = |tokens: u64| tokens.div_ceil(case.chunk_tokens.into());
        add(dispatch, "recv_x", rows * u64::from(row_bytes));
        if has_packets(case) && SCALE_PACKET_TOKENS.contains(&(tokens as u32)) {
            add(dispatch, "scale_packets", rows * packets_of_scales(scales));
        } else {
            add(dispatch, "recv_scales", rows * scales * 4);
        }
        add(dispatch, "arrived", chunks(tokens) * 8);
        add(dispatch, "control.calls", 8);
        // The ids of all tokens, two to a packet, and a weight for each entry that is for the
        // receiver.
        add(dispatch, "ids", tokens * u64::from(routing.num_topk.div_ceil(2)) * 8);
        let entries = routing.topk_idx[from as usize].iter().flatten();
        add(
            dispatch,
            "weights",
            entries.filter(|&&expert| routing.owner(expert) == Some(to)).count() as u64 * 8,
        );

        // A combine returns one row for each received row, in the form that its owner's number of
        // tokens requires.
        let (rows, tokens) = (rows_between(routing, to, from), u64::from(routing.num_tokens(to)));
        let (combine, row_bytes, scales) = travels_back(case, from);
        if case.combine_rows == ReturnPath::InPool {
            add(combine, "returned_packets", pushed_between(case, to, from) * packets_of_row(row_bytes));
        } else if tokens <= case.packet_tokens.min(case.max_tokens).into() {
            add(combine, "returned_packets", rows * packets_of_row(row_bytes));
            add(combine, "returned_scales", rows * scales * 8);
        } else {
            // Scales stand behind their row.
            add(combine, "returned_x", rows * (u64::from(row_bytes) + scales * 4));
            add(combine, "returned", chunks(tokens) * 8);
        }
        add(combine, "control.calls", 8);
    }
    all
}

/// The kernel by which rank `from` returns rows, the bytes of a row without scales, and its scales.
fn travels_back(case: &LowLatencyCase, from: u32) -> (&'static str, u32, u64) {
    let tokens = case.routing.num_tokens(from);
    let has_many = tokens > 2 * case.sm_count && tokens > case.packet_tokens;
    match case.quantise_back {
        _ if case.combine_rows == ReturnPath::InPool => {
            let is_two = case.routing.num_ranks() <= 2;
            let kernel = if is_two { "low_latency_combine_two_pooled" } else { "low_latency_combine_pooled" };
            (kernel, case.hidden * 2, 0)
        }
        Quantise::None if case.combine_rows == ReturnPath::ByRow && has_many => {
            ("low_latency_combine_summed", case.hidden * 2, 0)
        }
        Quantise::None => ("low_latency_combine_bf16", case.hidden * 2, 0),
        _ => ("low_latency_combine_fp8", case.hidden, u64::from(case.hidden / 128)),
    }
}

/// Tokens of one rank that have an expert on another.
fn rows_between(routing: &Routing, from: u32, to: u32) -> u64 {
    (0..routing.num_tokens(from)).filter(|&token| routing.hits(from, token, to)).count() as u64
}

/// The first tokens of a rank, whose rows return as packets though owners gather the others.
fn pushed_between(case: &LowLatencyCase, from: u32, to: u32) -> u64 {
    let routing = &case.routing;
    let most = match routing.num_ranks() {
        2 => 32,
        3 => 16,
        4 | 5 => 8,
        ranks => panic!("no case has {ranks} ranks"),
    };
    let pushed = routing.num_tokens(from).min(most).min(case.packet_tokens);
    (0..pushed).filter(|&token| routing.hits(from, token, to)).count() as u64
}

/// Runs a case, every bit of it against the oracle, and compares what its kernels stored in peers'
/// pools with the prediction.
fn check(case: &LowLatencyCase) {
    let checker = Checker::new(CheckConfig::default());
    checker.count_stores();
    checker.count_loads();
    let case = LowLatencyCase { checker: Some(checker.clone()), ..case.clone() };
    let counted = std::sync::Mutex::new((Vec::new(), Vec::new()));
    case.run(|rank| {
        rank.round_trip(&case)?;
        // All pools still exist, and all ranks have finished their stores.
        rank.group.barrier(PATIENCE)?;
        if rank.rank == 0 {
            *counted.lock().unwrap() = (checker.stores(), checker.loads());
        }
        rank.group.barrier(PATIENCE)
    });
    let (counted, loads) = counted.into_inner().unwrap();
    let on_links = counted.iter().filter(|stored| stored.by != stored.on);
    let got: BTreeMap<_, u64> = on_links
        .map(|stored| {
            assert_eq!(stored.memory, "low-latency pool", "{stored:?}");
            ((stored.kernel.as_str(), stored.by, stored.on, stored.part.as_str()), stored.bytes)
        })
        .collect();
    let want = predicted(&case);
    let keys = got.keys().chain(want.keys());
    let differing: Vec<_> = keys
        .filter(|&key| got.get(key) != want.get(key))
        .map(|key| format!("{key:?}: {:?}, predicted {:?}", got.get(key), want.get(key)))
        .collect();
    assert!(differing.is_empty(), "{}\n{case:?}", differing.join("\n"));
    if case.combine_rows == ReturnPath::InPool {
        gathers_the_others(&case, &loads);
    }
    let Some(segments) = case.segments else { return };
    // Within a rank: a row is read once, and stored once for each selection. The own rows come from
    // the input, whose loads are not counted.
    let (routing, kernel, row_bytes) = (&case.routing, dispatch_of(&case), u64::from(case.hidden) * 2);
    for rank in 0..routing.num_ranks() {
        let plan = by_expert(routing, rank, segments.alignment);
        let selections = plan.counts.iter().map(|count| *count as u64).sum::<u64>();
        let is_own = |by: u32, on: u32, of: &str| by == rank && on == rank && of == kernel;
        let stored = counted.iter().filter(|it| is_own(it.by, it.on, &it.kernel));
        let stored = stored.filter(|it| it.part == "recv_x_by_expert").map(|it| it.bytes);
        assert_eq!(stored.sum::<u64>(), selections * row_bytes, "stored by rank {rank}");
        let loaded = loads.iter().filter(|it| is_own(it.by, it.on, &it.kernel));
        let loaded = loaded.filter(|it| it.part == "recv_x").map(|it| it.loads * 16);
        let others = (0..routing.num_ranks()).filter(|from| *from != rank);
        let rows: u64 = others.map(|from| rows_between(routing, from, rank)).sum();
        assert_eq!(loaded.sum::<u64>(), rows * row_bytes, "loaded by rank {rank}");
    }
}

/// Compares the rows that were read in other ranks' pools with those that were not sent as packets.
/// Rows are of whole pieces, so that every load is of another part of a row.
fn gathers_the_others(case: &LowLatencyCase, loads: &[Loaded]) {
    let (routing, ranks) = (&case.routing, 0..case.routing.num_ranks());
    for (by, on) in ranks.clone().flat_map(|by| ranks.clone().map(move |on| (by, on))) {
        let read = loads.iter().filter(|it| it.by == by && it.on == on && it.part == "returned_x");
        let rows = rows_between(routing, by, on) - pushed_between(case, by, on);
        let bytes = rows * u64::from(case.hidden) * 2;
        if by != on {
            assert_eq!(read.map(|it| it.loads * 16).sum::<u64>(), bytes, "rank {by} of rank {on}");
        }
    }
}

/// Bytes that were counted by hand, for two ranks of two experts. Two of the three tokens of rank 0
/// have experts on rank 1, with three entries. The token of rank 1 has both its experts on rank 0,
/// and its row returns as packets. Chunks have two tokens.
#[test]
fn the_prediction_is_what_a_count_by_hand_gives() {
    let topk_idx = vec![vec![vec![0, 2], vec![3, 2], vec![1, -1]], vec![vec![0, 1]]];
    let routing = Routing { num_experts: 4, num_topk: 2, topk_idx };
    let case = LowLatencyCase { chunk_tokens: 2, packet_tokens: 1, ..LowLatencyCase::new(routing, 256) };
    let dispatch = [("control.calls", [8, 8]), ("arrived", [16, 8]), ("ids", [24, 8]), ("weights", [24, 16])];
    let combine = [("control.calls", [8, 8]), ("returned", [0, 16])];
    // The bytes of each part, from rank 0 to rank 1 and from 1 to 0.
    let bf16_rows = [("recv_x", [1024, 512])];
    let bf16_sums = [("returned_packets", [2048, 0]), ("returned_x", [0, 1024])];
    let fp8_rows = [("recv_x", [512, 256]), ("recv_scales", [16, 8])];
    // Two scales stand behind each row, and are packets of 8 bytes beside a row in packets.
    let fp8_sums = [("returned_packets", [2048, 0]), ("returned_scales", [16, 0]), ("returned_x", [0, 528])];
    let links = |kernel, parts: &[(&'static str, [u64; 2])]| {
        let both = parts.iter().flat_map(|&(part, [there, back])| [(0, 1, part, there), (1, 0, part, back)]);
        let some = both.filter(|(.., bytes)| *bytes > 0);
        some.map(|(from, to, part, bytes)| ((kernel, from, to, part), bytes)).collect::<Links>()
    };
    for (quantise, rows, back, sums) in [
        (Quantise::None, &bf16_rows[..], "low_latency_combine_bf16", &bf16_sums[..]),
        (Quantise::Fp8, &fp8_rows[..], "low_latency_combine_fp8", &fp8_sums[..]),
    ] {
        let case = LowLatencyCase { quantise, quantise_back: quantise, ..case.clone() };
        let mut by_hand = links("low_latency_dispatch", &[&dispatch, rows].concat());
        by_hand.extend(links(back, &[&combine, sums].concat()));
        assert_eq!(predicted(&case), by_hand);
        check(&case);
    }
}

/// Kinds of rows: bf16 and both kinds of fp8, either way, and mxfp8 on the way there.
fn each_kind(case: &LowLatencyCase) {
    for quantise in tier::sample([Quantise::None, Quantise::Fp8, Quantise::Fp8PowerOfTwo, Quantise::Mxfp8]) {
        check(&LowLatencyCase { quantise, ..case.clone() });
    }
    for quantise_back in tier::sample([Quantise::Fp8, Quantise::Fp8PowerOfTwo]) {
        check(&LowLatencyCase { quantise_back, ..case.clone() });
    }
}

#[test]
fn scales_of_some_ranks_travel_as_packets() {
    for counts in [[66, 9], [128, 64]] {
        let case = LowLatencyCase::new(routing(&counts, 3, 6, Style::WithHoles), 256);
        check(&LowLatencyCase { quantise: Quantise::Fp8, packet_tokens: 0, ..case });
    }
}

#[test]
fn rows_with_words_go_to_each_rank_once() {
    let case = LowLatencyCase::new(routing(&[9, 6, 0, 7], 5, 8, Style::WithHoles), 256);
    each_kind(&LowLatencyCase { packet_tokens: 0, ..case.clone() });
    each_kind(&LowLatencyCase { packet_tokens: 0, chunk_tokens: 1, combine_rows: ReturnPath::ByRow, ..case });
}

#[test]
fn rows_in_packets_go_to_each_rank_once() {
    let case = LowLatencyCase::new(routing(&[3, 8, 0, 5], 4, 12, Style::DistinctTopK), 1024);
    if tier::is_long() {
        each_kind(&LowLatencyCase { packet_tokens: 8, ..case.clone() });
    }
    // Some ranks with packets, some with words.
    each_kind(&LowLatencyCase { packet_tokens: 5, ..case });
}

/// Ranks that gather a part of their rows, all of them, or none: the first rows are packets.
#[test]
fn rows_in_the_pool_cross_a_link_once() {
    let case = LowLatencyCase {
        combine_rows: ReturnPath::InPool,
        ..LowLatencyCase::new(routing(&[23, 6, 0, 12], 5, 8, Style::WithHoles), 3072)
    };
    for packet_tokens in tier::sample([32, 0, 5]) {
        check(&LowLatencyCase { packet_tokens, ..case.clone() });
    }
}

/// Rows of whole pieces, so that every load is of another part of the row.
#[test]
fn rows_by_expert_cost_the_links_nothing_and_are_read_once() {
    for style in [Style::WithHoles, Style::Repeats] {
        let case = LowLatencyCase::new(routing(&[9, 6, 0, 7], 5, 8, style), 1024);
        check(&LowLatencyCase { segments: Some(Segments::aligned(16)), ..case });
    }
}

#[test]
fn experts_that_share_a_rank_cost_no_row_more() {
    // All entries of a token on one rank, or the same expert again and again.
    for style in [Style::Skewed, Style::Repeats] {
        let case = LowLatencyCase::new(routing(&[7, 5, 6], 8, 24, style), 128);
        let (routing, entries) = (&case.routing, case.routing.num_topk * (7 + 5 + 6));
        let ranks = 0..routing.num_ranks();
        let rows: u64 = ranks
            .clone()
            .flat_map(|from| ranks.clone().map(move |to| (from, to)))
            .map(|(from, to)| rows_between(routing, from, to))
            .sum();
        assert!(
            rows * 2 < entries.into(),
            "{rows} rows of {entries} entries: no example of what it is to show"
        );
        // In the default tier words for one style and packets for the other.
        let packets = if style == Style::Skewed { [0, 32] } else { [32, 0] };
        for packet_tokens in packets.into_iter().take(tier::pick(1, 2)) {
            check(&LowLatencyCase { packet_tokens, ..case.clone() });
        }
    }
}
