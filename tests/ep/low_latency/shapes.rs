//! Round trips of many shapes.

use epoxide::driver::virt::{CheckConfig, Checker};
use epoxide::low_latency::{DispatchRequest, Quantise};
use epoxide::{DType, Result, StreamOrder, Tensor, TypedTensor};
use epoxide_testing::low_latency::{LowLatencyCase, LowLatencyRank, ReturnPath};
use epoxide_testing::oracle::{Style, recv_order};
use epoxide_testing::tier;

use crate::shapes::routing;

#[test]
fn rows_that_differ_in_every_bit() {
    LowLatencyCase::new(routing(&[9, 5, 0, 12], 3, 8, Style::DistinctTopK), 24).check();
}

#[test]
fn entries_without_an_expert_and_experts_twice() {
    for style in tier::sample([Style::Repeats, Style::WithHoles, Style::Skewed]) {
        LowLatencyCase::new(routing(&[9, 5, 7], 5, 6, style), 16).check();
    }
}

#[test]
fn rows_that_are_summed_already() {
    LowLatencyCase {
        combine_rows: ReturnPath::ByRow,
        ..LowLatencyCase::new(routing(&[9, 5, 7], 4, 6, Style::WithHoles), 40)
    }
    .check();
}

/// Ranks with many tokens, with few and with none; rows of several pieces; either half alone.
#[test]
fn rows_that_peers_gather_in_the_pool() {
    for (hidden, halves) in tier::sample([(24, false), (2320, true), (768, false)]) {
        for checker in [None, Some(Checker::new(CheckConfig::default()))] {
            LowLatencyCase {
                combine_rows: ReturnPath::InPool,
                halves,
                rounds: 4,
                places: 2,
                schedule_seed: checker.is_some().then_some(7),
                checker,
                ..LowLatencyCase::new(routing(&[23, 3, 0, 9], 4, 8, Style::WithHoles), hidden)
            }
            .check();
        }
    }
    LowLatencyCase {
        combine_rows: ReturnPath::InPool,
        rounds: 3,
        ..LowLatencyCase::new(routing(&[5, 2], 2, 4, Style::WithHoles), 16)
    }
    .check_replayed(tier::pick(4, 20));
}

/// Blocks with more than two tokens to sum return rows meanwhile: ranks with many tokens, with few
/// and with none, with packets and without, and rows of several iterations of a warp.
#[test]
fn rows_return_while_others_are_summed() {
    let cases = [(24, 4, 4), (24, 0, 1), (8448, 0, 2)];
    for (hidden, packet_tokens, chunk_tokens) in tier::sample(cases) {
        for checker in [None, Some(Checker::new(CheckConfig::default()))] {
            LowLatencyCase {
                combine_rows: ReturnPath::ByRow,
                packet_tokens,
                chunk_tokens,
                sm_count: 2,
                rounds: 2,
                schedule_seed: checker.is_some().then_some(5),
                checker,
                ..LowLatencyCase::new(routing(&[23, 3, 0, 9], 4, 8, Style::WithHoles), hidden)
            }
            .check();
        }
    }
}

/// Blocks list rows while they move one row, or two: ranks with few tokens, with more and with many.
#[test]
fn rows_are_listed_while_others_move() {
    for quantise in tier::sample([Quantise::None, Quantise::Fp8]) {
        LowLatencyCase {
            quantise,
            sm_count: 40,
            schedule_seed: Some(3),
            checker: Some(Checker::new(CheckConfig::default())),
            ..LowLatencyCase::new(routing(&[36, 9, 66], 2, 6, Style::WithHoles), 128)
        }
        .check();
    }
}

/// Scales of up to eight tokens of a block leave together; here a block has eleven, or fewer than eight.
#[test]
fn scales_of_several_tokens() {
    for quantise in tier::sample([Quantise::Fp8, Quantise::Fp8PowerOfTwo]) {
        for tokens in [[22, 9], [5, 13]] {
            LowLatencyCase {
                quantise,
                sm_count: 2,
                checker: Some(Checker::new(CheckConfig::default())),
                ..LowLatencyCase::new(routing(&tokens, 2, 4, Style::WithHoles), 384)
            }
            .check();
        }
    }
}

/// Scales of ranks with more than 64 tokens travel as packets: of blocks with one token and with
/// eleven, and of more scales than a warp has packets for at a time.
#[test]
fn scales_of_some_ranks_are_packets() {
    for (tokens, hidden, sm_count) in [([66, 9], 384, 70), ([127, 128], 256, 12), ([65, 64], 128 * 98, 70)] {
        LowLatencyCase {
            quantise: Quantise::Fp8,
            sm_count,
            checker: Some(Checker::new(CheckConfig::default())),
            rounds: 2,
            ..LowLatencyCase::new(routing(&tokens, 2, 4, Style::WithHoles), hidden)
        }
        .check();
    }
}

/// Rows that are e4m3 already take their scales along, of one token of a block at a time and of several,
/// as words and as packets.
#[test]
fn quantised_already() {
    for (tokens, sm_count) in [([19, 5, 0], 2), ([19, 5, 0], 24), ([5, 66, 0], 9)] {
        let routing = routing(&tokens, 2, 6, Style::WithHoles);
        let checker = Some(Checker::new(CheckConfig::default()));
        let case = LowLatencyCase { sm_count, checker, ..LowLatencyCase::new(routing, 400) };
        case.run(|rank| dispatch_quantised_rows(&case, rank));
    }
}

/// Dispatches e4m3 rows with scales, and gives the differences from what each rank was to receive.
fn dispatch_quantised_rows(case: &LowLatencyCase, rank: &mut LowLatencyRank) -> Result<()> {
    let (stream, routing, me, hidden) = (&rank.stream.clone(), &case.routing, rank.rank, case.hidden);
    let of_row = hidden.div_ceil(128);
    let row = |source: u32, token: u32| -> Vec<u8> {
        (0..hidden).map(|at| (source * 89 + token * 31 + at * 7) as u8).collect()
    };
    let scale = |source: u32, token: u32, block: u32| (source * 1000 + token * 10 + block) as f32 + 0.5;
    let tokens = 0..routing.num_tokens(me);
    let shape = |columns: u32| [u64::from(tokens.end), u64::from(columns)];
    let rows: Vec<u8> = tokens.clone().flat_map(|token| row(me, token)).collect();
    let values: Vec<f32> =
        tokens.clone().flat_map(|token| (0..of_row).map(move |block| scale(me, token, block))).collect();
    let x = Tensor::from_host(stream, DType::Fp8E4m3, &shape(hidden), &rows)?;
    let scales = TypedTensor::from_host(stream, &shape(of_row), &values)?;
    let topk_idx = TypedTensor::from_host(stream, &shape(routing.num_topk), &routing.flat_topk_idx(me))?;
    let mut place = rank.buffer.place(0)?;
    let request = DispatchRequest::new(&x, &topk_idx).scales(&scales);
    let received = rank.buffer.dispatch(&mut place, request, StreamOrder::on(stream))?;
    rank.outcome()?;
    let received_scales = received.scales.as_ref().map_or(Ok(Vec::new()), |scales| scales.values(stream))?;
    let received_rows = routing.num_ranks() * case.max_tokens;
    for (source, token) in recv_order(routing, me) {
        let number = source * case.max_tokens + token;
        let got = rank.row_of(&received.x, number as usize)?;
        rank.check(got == row(source, token), format!("row of token {token} of rank {source}"));
        for block in 0..of_row {
            let got = received_scales[(block * received_rows + number) as usize];
            let what = format!("scale {block} of token {token} of rank {source} is {got}");
            rank.check(got == scale(source, token, block), what);
        }
    }
    Ok(())
}

#[test]
fn quantised_on_the_way() {
    for quantise in tier::sample([Quantise::Fp8PowerOfTwo, Quantise::Fp8]) {
        LowLatencyCase { quantise, ..LowLatencyCase::new(routing(&[6, 5], 2, 4, Style::DistinctTopK), 384) }
            .check();
    }
}

#[test]
fn quantised_on_the_way_back() {
    for quantise_back in [Quantise::Fp8, Quantise::Fp8PowerOfTwo] {
        use ReturnPath::{ByExpert, ByRow};
        let kinds = [(0, ByExpert), (0, ByRow), (8, ByExpert), (8, ByRow)];
        for (packet_tokens, combine_rows) in tier::sample(kinds) {
            LowLatencyCase {
                quantise_back,
                packet_tokens,
                combine_rows,
                ..LowLatencyCase::new(routing(&[6, 5], 2, 4, Style::DistinctTopK), 1664)
            }
            .check();
        }
    }
}

#[test]
fn many_rounds_in_one_place() {
    LowLatencyCase { rounds: 12, ..LowLatencyCase::new(routing(&[3, 5, 2], 3, 6, Style::WithHoles), 16) }
        .check();
}

/// A warp lists up to 32 tokens of an expert. A block lists more, in turns of its threads.
#[test]
fn as_many_tokens_as_a_warp_lists_and_more() {
    for tokens in tier::sample([[16, 16], [16, 15], [17, 16], [300, 230]]) {
        // More experts than a block has warps.
        let routing = routing(&tokens, 3, 40, Style::WithHoles);
        LowLatencyCase { sm_count: 1, ..LowLatencyCase::new(routing, 16) }.check();
    }
    for tokens in [[9, 7], [20, 13]] {
        let checker = Some(Checker::new(CheckConfig::default()));
        LowLatencyCase { checker, ..LowLatencyCase::new(routing(&tokens, 2, 36, Style::Repeats), 8) }.check();
    }
}
