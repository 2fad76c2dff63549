//! Rows by expert within a node and across nodes.

use std::sync::Arc;
use std::time::Duration;

use half::bf16;
use proptest::prelude::*;

use epoxide::driver::DevicePtr;
use epoxide::driver::virt::{CheckConfig, Checker, VirtConfig, VirtualGpu};
use epoxide::internal::{Tuning, copy_by_expert, driver};
use epoxide::throughput::{Buffer, CombineRequest, Counts, DispatchRequest};
use epoxide::transport::TransportKind;
use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
use epoxide::{Error, Result};
use epoxide_gpu::layout::Status;
use epoxide_testing::harness::{NodeLinks, POISON, Rank, Setup, rank_counts, run_ranks};
use epoxide_testing::ids::{Ids, Logical};
use epoxide_testing::oracle::{self, Routing, Style};
use epoxide_testing::payload::rng_of;
use epoxide_testing::roundtrip::{Case, Scales};
use epoxide_testing::tier;
use epoxide_vgpu::for_each_seed;

use crate::cases;
use crate::failing::{FailingDevice, REFUSAL};
use crate::promises::{found, has_no_rows, is_nan, status};
use crate::property::{config, several_nodes};
use crate::valid::{EXPERTS, RANKS, TOKENS, Valid, expect_gone, refused, then_dispatch};

fn case(tokens: &[u32], topk: u32, experts: u32, style: Style) -> Case {
    Case::new(Routing::random(&mut rng_of(&[5]), tokens, topk, experts, style), 48)
}

#[test]
fn segments_of_any_alignment() {
    for alignment in tier::pick(vec![1, 64], vec![1, 2, 8, 64, 128]) {
        case(&[9, 0, 14, 5], 3, 8, Style::WithHoles).check_by_expert(alignment);
    }
}

#[test]
fn a_token_may_select_an_expert_twice() {
    case(&[12, 7], 6, 4, Style::Repeats).check_by_expert(8);
}

#[test]
fn most_tokens_go_to_few_experts() {
    case(&[40, 33, 1], 4, 9, Style::Skewed).check_by_expert(16);
}

#[test]
fn nothing_is_selected() {
    let topk_idx = vec![vec![vec![-1, -1]; 3], vec![], vec![vec![-1, -1]]];
    Case::new(Routing { num_experts: 6, num_topk: 2, topk_idx }, 48).check_by_expert(8);
}

#[test]
fn more_ranks_than_fit_in_registers() {
    case(&[3, 0, 5, 2, 4, 1, 3, 2, 6, 1], 4, 30, Style::DistinctTopK).check_by_expert(4);
}

#[test]
fn more_local_experts_than_lanes() {
    case(&[30, 21], 8, 2 * 70, Style::DistinctTopK).check_by_expert(8);
}

#[test]
fn experts_at_any_places() {
    let logical = Logical::random(&mut rng_of(&[8]), &[9, 4, 0, 7, 5], 3, Style::WithHoles);
    let routing = logical.routing(logical.local_experts());
    Case { ids: Ids::Placed(Arc::new(logical)), ..Case::new(routing, 48) }.check_by_expert(8);
}

#[test]
fn rows_with_scales_and_long_rows() {
    let fp8 = case(&[9, 8], 3, 4, Style::DistinctTopK);
    for columns in [3, 4] {
        let scales = Scales::Columns(columns);
        Case { dtype: DType::Fp8E4m3, scales, ..fp8.clone() }.check_by_expert(8);
    }
    let long = Routing::random(&mut rng_of(&[6]), &[5, 6], 2, 4, Style::DistinctTopK);
    Case::new(long, 14336).check_by_expert(64);
}

#[test]
fn the_checker_finds_nothing() {
    for_each_seed(tier::pick(2, 24), |seed| {
        let weak = (seed % 2 == 1).then_some(seed);
        let config = CheckConfig { races: weak.is_none(), weak_memory: weak, ..CheckConfig::default() };
        let style = Style::ALL[seed as usize % 4];
        let routing = Routing::random(&mut rng_of(&[seed]), &[7, 3, 5], 3, 6, style);
        let case = Case { schedule_seed: Some(seed), ..Case::new(routing, 48) };
        let mut setup = case.setup_by_expert(4);
        setup.device.checker = Some(Checker::new(config));
        setup.run(|rank| rank.check_by_expert(&case, 4));
    });
}

/// Tokens with several entries at each rank, more than a warp requests late copies for, and rows of
/// one piece and of several.
#[test]
fn the_checker_finds_nothing_in_copies() {
    for_each_seed(tier::pick(4, 8), |seed| {
        let weak = (seed % 2 == 1).then_some(seed);
        let config = CheckConfig { races: weak.is_none(), weak_memory: weak, ..CheckConfig::default() };
        let routing = Routing::random(&mut rng_of(&[seed, 9]), &[26, 31], 6, 6, Style::DistinctTopK);
        let tuning = Tuning {
            dispatch_warps: 1,
            dispatch_stage_bytes: 512,
            dispatch_stages: 2,
            dispatch_copy_warps: 2,
            ..Tuning::default()
        };
        let row_bytes = [1040, 256][seed as usize / 2 % 2];
        let case =
            Case { schedule_seed: Some(seed), tuning, num_channels: 1, ..Case::new(routing, row_bytes) };
        let mut setup = case.setup_by_expert(4);
        setup.device.checker = Some(Checker::new(config));
        setup.run(|rank| rank.check_by_expert(&case, 4));
    });
}

/// Scales that leave by ordinary stores from the stage of their row, and more tokens than all warps
/// claim at first.
#[test]
fn the_checker_finds_nothing_in_claims_with_scales() {
    for_each_seed(tier::pick(4, 8), |seed| {
        let weak = (seed % 2 == 1).then_some(seed);
        let config = CheckConfig { races: weak.is_none(), weak_memory: weak, ..CheckConfig::default() };
        let routing = Routing::random(&mut rng_of(&[seed, 10]), &[29, 2, 17], 6, 6, Style::DistinctTopK);
        let tuning =
            Tuning { dispatch_warps: 1, dispatch_stages: 3, dispatch_copy_warps: 2, ..Tuning::default() };
        let case = Case {
            schedule_seed: Some(seed),
            tuning,
            num_channels: 2,
            dtype: DType::Fp8E4m3,
            scales: Scales::Columns(4),
            ..Case::new(routing, 256)
        };
        let mut setup = case.setup_by_expert(4);
        setup.device.checker = Some(Checker::new(config));
        setup.run(|rank| rank.check_by_expert(&case, 4));
    });
}

/// The same across nodes: rows of the own node, and relayed ones.
#[test]
fn the_checker_finds_nothing_in_copies_across_nodes() {
    for_each_seed(tier::pick(4, 8), |seed| {
        let weak = (seed % 2 == 1).then_some(seed);
        let config = CheckConfig { races: weak.is_none(), weak_memory: weak, ..CheckConfig::default() };
        let routing = Routing::random(&mut rng_of(&[seed, 9]), &[16, 11, 13, 9], 8, 8, Style::DistinctTopK);
        let tuning = Tuning {
            internode_dispatch_warps: 1,
            dispatch_stage_bytes: 512,
            dispatch_stages: 2,
            dispatch_copy_warps: 2,
            ..Tuning::default()
        };
        let row_bytes = [1040, 256][seed as usize / 2 % 2];
        let case =
            Case { schedule_seed: Some(seed), tuning, num_channels: 2, ..Case::new(routing, row_bytes) };
        let transport = if seed % 4 < 2 { TransportKind::Direct } else { TransportKind::Shm };
        let case = across(case, transport);
        let mut setup = case.setup_by_expert(4);
        setup.device.checker = Some(Checker::new(config));
        setup.run(|rank| rank.check_by_expert(&case, 4));
    });
}

fn ranks() -> impl Strategy<Value = (Vec<u32>, Option<NodeLinks>)> {
    let tokens = prop_oneof![1 => Just(0), 1 => 1..=8u32, 3 => 0..=40u32];
    prop::collection::vec(tokens, rank_counts(1..=10)).prop_map(|tokens| (tokens, None))
}

proptest! {
    #![proptest_config(config(64))]

    #[test]
    fn every_quantity_equals_the_oracle(case in cases::case(ranks()), alignment in 0..=6u32) {
        case.check_by_expert(1 << alignment);
    }
}

proptest! {
    #![proptest_config(config(64))]

    #[test]
    fn every_quantity_equals_the_oracle_across_nodes(
        case in cases::case(several_nodes()),
        alignment in 0..=6u32,
    ) {
        case.check_by_expert(1 << alignment);
    }
}

/// Rows of ones for every token, by experts 0 and 3.
fn request<'a>(
    x: &'a Tensor<'a>,
    layout: &'a epoxide::throughput::DispatchLayout<'a>,
) -> DispatchRequest<'a> {
    DispatchRequest::new(x, layout).by_expert(8)
}

fn ones(rank: &Rank) -> Result<Tensor<'static>> {
    rank.upload_rows(DType::Bf16, 8, &vec![vec![1; 16]; TOKENS as usize])
}

fn setup(rows: Option<u64>) -> Setup {
    let mut setup = Setup::new(RANKS, 1, TOKENS as u32, 64);
    setup.fields().rows_by_expert = rows;
    setup
}

#[test]
fn arguments_are_checked() {
    then_dispatch(setup(Some(64)), |rank, valid, place| {
        let x = ones(rank)?;
        for alignment in [0, 3, 12] {
            let request = DispatchRequest::new(&x, &valid.layout).by_expert(alignment);
            refused(rank.dispatch(place, request), &[&format!("alignment = {alignment}"), "power of two"]);
        }
        let plain = || DispatchRequest::new(&x, &valid.layout);
        for both in [plain().by_expert(8).expert_alignment(1), plain().expert_alignment(1).by_expert(8)] {
            refused(rank.dispatch(place, both), &["expert_alignment = 1", "give one of the two"]);
        }
        let by_rank = rank.dispatch(place, valid.request())?.handle;
        let rows = Tensor::alloc(rank.device(), DType::Bf16, &[10, 8])?;
        let weights: TypedTensor<'_, f32> =
            Tensor::alloc(rank.device(), DType::F32, &[TOKENS, 2])?.typed()?;
        let weighted = CombineRequest::new(&rows, &by_rank).weights(&weights);
        refused(rank.combine(weighted), &["weights = given", "only rows by expert", "by_expert"]);

        let handle = rank.dispatch(place, request(&x, &valid.layout))?.handle;
        let rows = Tensor::alloc(rank.device(), DType::Bf16, &[16, 8])?;
        let summed: TypedTensor<'_, f32> = Tensor::alloc(rank.device(), DType::F32, &[16, 2])?.typed()?;
        let sums_weights = CombineRequest::new(&rows, &handle).topk_weights(&summed);
        refused(rank.combine(sums_weights), &["topk_weights = given", "leave topk_weights out"]);
        let weights: TypedTensor<'_, f32> =
            Tensor::alloc(rank.device(), DType::F32, &[TOKENS, 3])?.typed()?;
        let weighted = CombineRequest::new(&rows, &handle).weights(&weights);
        refused(rank.combine(weighted), &["weights has shape [5, 3]", "[num_tokens = 5, num_topk = 2]"]);
        let few = Tensor::alloc(rank.device(), DType::Bf16, &[15, 8])?;
        refused(rank.combine(CombineRequest::new(&few, &handle)), &["x has shape [15, 8]"]);
        Ok(())
    });
    then_dispatch(setup(None), |rank, valid, place| {
        let x = ones(rank)?;
        let parts = ["by_expert = asked for", "Options::rows_by_expert"];
        refused(rank.dispatch(place, request(&x, &valid.layout)), &parts);
        Ok(())
    });
    // Across nodes the weights are those that travelled.
    then_dispatch(two_nodes(2), |rank, valid, place| {
        let x = ones(rank)?;
        let rows = Tensor::alloc(rank.device(), DType::Bf16, &[16, 8])?;
        let weights: TypedTensor<'_, f32> =
            Tensor::alloc(rank.device(), DType::F32, &[TOKENS, 2])?.typed()?;
        let handle = rank.dispatch(place, request(&x, &valid.layout))?.handle;
        let weighted = CombineRequest::new(&rows, &handle).weights(&weights);
        refused(rank.combine(weighted), &["weights = another tensor", "as topk_weights"]);
        let bytes = Tensor::alloc(rank.device(), DType::U8, &[16, 16])?;
        refused(
            rank.combine(CombineRequest::new(&bytes, &handle)),
            &["x has dtype u8", "bf16", "f32", "f16"],
        );
        Ok(())
    });
}

/// Two ranks of two nodes, with so many entries at most.
fn two_nodes(max_topk: u32) -> Setup {
    let mut setup = setup(Some(64)).nodes(Some(nodes(1, TransportKind::Shm)));
    setup.fields().shape.max_topk = max_topk;
    setup
}

/// Across nodes a rank weighs the rows that it gathers for others.
#[test]
fn weights_of_one_rank_alone_are_another_call_across_nodes() {
    two_nodes(2).run(|rank| {
        let (valid, mut place) = (Valid::new(rank)?, rank.place()?);
        let x = ones(rank)?;
        let request = request(&x, &valid.layout).topk_weights(&valid.topk_weights);
        let received = rank.dispatch(&mut place, request)?;
        let mut combine = CombineRequest::new(&received.recv_x, &received.handle);
        if rank.rank == 0 {
            combine = combine.weights(&valid.topk_weights);
        }
        drop(rank.buffer.combine(combine, StreamOrder::on(&rank.stream))?);
        rank.stream.synchronize()?;
        refused(rank.buffer.check(), &["and 0 top-k weights per row", "and 1 top-k weights per row"]);
        Ok(())
    });
}

/// Slots have room for the entries of a token, whether or not their weights travel.
#[test]
fn all_ranks_have_as_many_entries_and_no_more_than_the_buffer() {
    for setup in [setup(Some(64)), two_nodes(2)] {
        then_dispatch(setup, |rank, valid, place| {
            let x = ones(rank)?;
            let one = rank.upload_typed(1, &vec![vec![0i64]; TOKENS as usize])?;
            let layout = rank.layout(&one, EXPERTS)?;
            let layout = if rank.rank == 1 { &layout } else { &valid.layout };
            refused(rank.dispatch(place, request(&x, layout)), &["disagree on num_topk"]);
            let mut weighted = request(&x, &valid.layout);
            if rank.rank == 1 {
                weighted = weighted.topk_weights(&valid.topk_weights);
            }
            refused(rank.dispatch(place, weighted), &["disagree on topk_weights: "]);
            Ok(())
        });
    }
    two_nodes(1).run(|rank| {
        let (valid, mut place) = (Valid::new(rank)?, rank.place()?);
        let x = ones(rank)?;
        refused(rank.dispatch(&mut place, request(&x, &valid.layout)), &["num_topk", "max_topk"]);
        Ok(())
    });
}

/// Frameworks give empty tensors a null address. The rank relays the rows of others all the same.
#[test]
fn a_rank_without_tokens_may_have_weights_at_a_null_address() {
    for spread in [setup(Some(64)), two_nodes(2)] {
        spread.run(|rank| {
            let (valid, mut place) = (Valid::new(rank)?, rank.place()?);
            let x = Tensor::alloc(rank.device(), DType::Bf16, &[TOKENS, 8])?;
            x.write(&rank.stream, &vec![bf16::ONE; 8 * TOKENS as usize])?;
            let (no_x, no_ids) = (
                Tensor::alloc(rank.device(), DType::Bf16, &[0, 8])?,
                TypedTensor::<i64>::from_host(&rank.stream, &[0, 2], &[])?,
            );
            // SAFETY: there is no element.
            let no_weights = unsafe { TypedTensor::<f32>::from_raw(DevicePtr(0), &[0, 2]) };
            let no_layout = rank.layout(&no_ids, EXPERTS)?;
            let (x, layout, weights) = match rank.rank {
                0 => (&x, &valid.layout, &valid.topk_weights),
                _ => (&no_x, &no_layout, &no_weights),
            };
            let received = rank.dispatch(&mut place, request(x, layout).topk_weights(weights))?;
            let combine = CombineRequest::new(&received.recv_x, &received.handle).weights(weights);
            let combined = rank.buffer.combine(combine, StreamOrder::on(&rank.stream))?;
            let sums = combined.combined_x.to_host::<bf16>(&rank.stream)?;
            // Each token has weights of 1 and 2.
            rank.equal("sums", &sums, &vec![bf16::from_f32(3.0); sums.len()]);
            Ok(())
        });
    }
}

/// The benchmark holds dispatches by expert against an ordinary one with this copy behind it.
#[test]
fn received_rows_are_copied_to_segments() {
    let fp8 = Case { dtype: DType::Fp8E4m3, ..case(&[9, 0, 14], 5, 9, Style::WithHoles) };
    for case in [
        case(&[12, 7], 6, 4, Style::Repeats),
        Case { row_bytes: 14336 + 48, ..case(&[5, 6], 32, 40, Style::DistinctTopK) },
        Case { scales: Scales::Columns(3), ..fp8.clone() },
        Case { scales: Scales::Columns(36), row_bytes: 4096 + 512, ..fp8 },
    ] {
        let mut setup = case.setup_by_expert(8);
        setup.device.checker = Some(Checker::new(CheckConfig::default()));
        setup.run(|rank| {
            let plan = oracle::by_expert(&case.routing, rank.rank, 8);
            let sources = oracle::recv_order(&case.routing, rank.rank);
            let (rows, topk) = (plan.rows.len() as u64, case.routing.num_topk);
            let shape = [sources.len() as u64, topk.into()];
            let places = TypedTensor::from_host(&rank.stream, &shape, &plan.places(&sources, topk))?;
            let out = Tensor::alloc(rank.device(), case.dtype, &[rows, case.hidden()])?;
            let scales =
                Tensor::alloc(rank.device(), DType::F32, &[rows, case.scale_bytes() / 4])?.typed()?;
            let scales = (case.scale_bytes() > 0).then_some(&scales);

            let (topk_idx, _) = rank.topk(&case)?;
            let layout = rank.layout(&topk_idx, case.routing.num_experts)?;
            let (x, x_scales) = rank.payload(&case, 1)?;
            let request = x_scales.iter().fold(DispatchRequest::new(&x, &layout), DispatchRequest::scales);
            let mut place = rank.place()?;
            let stream = rank.stream.clone();
            let order = StreamOrder::on(&stream);
            let received = rank.buffer.dispatch(&mut place, request, order)?;
            // Padding keeps what it holds.
            rank.stream.synchronize()?;
            rank.poison(&out)?;
            copy_by_expert(&mut rank.buffer, &received, &places, (&out, scales), order)?;
            let of_scales = scales.map(|scales| &**scales);
            rank.check_segments(&case, 1, &plan, "copy", (&out, of_scales))?;
            rank.outcome()?;
            assert_eq!(rank.take_failure(), None);
            // The comparison can fail.
            rank.check_segments(&case, 2, &plan, "rows of another turn", (&out, of_scales))?;
            assert_eq!(rank.take_failure().is_some(), plan.rows.iter().any(Option::is_some));
            for row in (0..plan.rows.len()).filter(|row| plan.rows[*row].is_none()) {
                let got = rank.row_of(&out, row)?;
                rank.equal("padding", &got, &vec![POISON; case.row_bytes as usize]);
            }

            // Tensors that do not fit are named.
            let mut refuse = |places: &TypedTensor<'_, i32>, out: (&Tensor<'_>, _), parts: &[&str]| {
                refused(copy_by_expert(&mut rank.buffer, &received, places, out, order), parts);
            };
            let more =
                TypedTensor::from_host(&rank.stream, &[shape[0] + 1, 1], &vec![-1; sources.len() + 1])?;
            refuse(&more, (&out, scales), &["places = ", "at most the"]);
            let wide = Tensor::alloc(rank.stream.device(), case.dtype, &[rows, 2 * case.hidden()])?;
            refuse(&places, (&wide, scales), &["out has shape"]);
            let other = Tensor::alloc(rank.stream.device(), DType::F32, &[rows, case.hidden()])?;
            refuse(&places, (&other, scales), &["out has dtype f32"]);
            match scales {
                Some(_) => refuse(&places, (&out, None), &["out_scales = none", "scales came with each row"]),
                None => {
                    let none = Tensor::alloc(rank.stream.device(), DType::F32, &[rows, 1])?.typed()?;
                    refuse(&places, (&out, Some(&none)), &["out_scales has shape", "num_scales = 0"]);
                }
            }
            Ok(())
        });
    }
}

/// Nodes of so many ranks.
fn nodes(ranks_per_node: u32, transport: TransportKind) -> NodeLinks {
    NodeLinks { ranks_per_node, transport, queues: 2 }
}

/// The case across nodes of two ranks.
fn across(case: Case, transport: TransportKind) -> Case {
    Case { nodes: Some(nodes(2, transport)), ..case }
}

#[test]
fn across_nodes() {
    use TransportKind::{Direct, Shm};
    across(case(&[9, 0, 14, 5], 3, 8, Style::WithHoles), Shm).check_by_expert(8);
    across(case(&[9, 0, 14, 5], 3, 8, Style::WithHoles), Direct).check_by_expert(1);
    across(case(&[7, 12, 3, 8, 0, 5], 6, 12, Style::Repeats), Shm).check_by_expert(4);
    across(case(&[17, 5], 4, 2 * 70, Style::Skewed), Direct).check_by_expert(16);
    let routing = Routing::random(&mut rng_of(&[7]), &[5, 6, 2, 3], 2, 8, Style::DistinctTopK);
    let fp8 = Case { dtype: DType::Fp8E4m3, ..Case::new(routing.clone(), 48) };
    across(Case { scales: Scales::Columns(3), ..fp8.clone() }, Shm).check_by_expert(8);
    across(Case { scales: Scales::Columns(4), ..fp8 }, Direct).check_by_expert(8);
    across(Case::new(routing, 14336), Shm).check_by_expert(64);
}

/// More of them than a thread has in flight at once.
#[test]
fn a_thread_lists_many_selections_across_nodes() {
    across(case(&[600, 3, 2, 5], 16, 32, Style::WithHoles), TransportKind::Direct).check_by_expert(8);
}

#[test]
fn the_checker_finds_nothing_across_nodes() {
    for_each_seed(tier::pick(4, 8), |seed| {
        let weak = (seed % 2 == 1).then_some(seed);
        let config = CheckConfig { races: weak.is_none(), weak_memory: weak, ..CheckConfig::default() };
        let routing =
            Routing::random(&mut rng_of(&[seed]), &[7, 3, 5, 4], 3, 8, Style::ALL[seed as usize % 4]);
        let case = Case { schedule_seed: Some(seed), ..Case::new(routing, 48) };
        let transport = if seed % 4 < 2 { TransportKind::Shm } else { TransportKind::Direct };
        let case = across(case, transport);
        let mut setup = case.setup_by_expert(4);
        setup.device.checker = Some(Checker::new(config));
        setup.run(|rank| rank.check_by_expert(&case, 4));
    });
}

/// The rank without room is on another node than half of the ranks that get the error.
#[test]
fn rows_that_do_not_fit_are_an_error_on_every_node() {
    for transport in [TransportKind::Shm, TransportKind::Direct] {
        let several = setup(Some(15)).nodes(Some(nodes(1, transport)));
        then_dispatch(several, |rank, valid, place| {
            let x = ones(rank)?;
            let parts = ["would receive 16 rows", "rows_by_expert >= 16"];
            refused(rank.dispatch(place, request(&x, &valid.layout)), &parts);
            let on_device = request(&x, &valid.layout).counts(Counts::OnDevice { capacity: 15 });
            let handle = rank.dispatch(place, on_device)?.handle;
            refused(rank.buffer.check_dispatch(&handle, &rank.stream), &parts);
            refused(rank.buffer.check(), &parts);
            rank.buffer.check()
        });
    }
}

/// Each rank has 10 selections of one of its two experts: 16 rows.
#[test]
fn rows_that_do_not_fit_are_an_error_on_every_rank() {
    then_dispatch(setup(Some(15)), |rank, valid, place| {
        let x = ones(rank)?;
        let parts = ["receive pool", "16", "15 rows", "rank 0 would receive 16 rows", "rows_by_expert >= 16"];
        refused(rank.dispatch(place, request(&x, &valid.layout)), &parts);
        let on_device = request(&x, &valid.layout).counts(Counts::OnDevice { capacity: 15 });
        let handle = rank.dispatch(place, on_device)?.handle;
        refused(rank.buffer.check_dispatch(&handle, &rank.stream), &parts);
        refused(rank.buffer.check(), &parts);
        rank.buffer.check()
    });
    // The pool has room, the dispatch not: less even than there are rows by rank.
    for capacity in [15, 9] {
        then_dispatch(setup(Some(16)), |rank, valid, place| {
            let x = ones(rank)?;
            let on_device = request(&x, &valid.layout).counts(Counts::OnDevice { capacity });
            let handle = rank.dispatch(place, on_device)?.handle;
            let parts = ["would receive 16 rows", "capacity >= 16"];
            refused(rank.buffer.check_dispatch(&handle, &rank.stream), &parts);
            refused(rank.buffer.check(), &parts);
            Ok(())
        });
    }
}

/// The exchange finds that the rows by rank do not fit, and the plan behind it that the rows by expert
/// do not. A caller that looks between the two kernels would be given the smaller number.
#[test]
fn a_plan_that_failed_is_reported_once() {
    for spread in [setup(Some(16)), two_nodes(2)] {
        then_dispatch(spread, |rank, valid, place| {
            let x = ones(rank)?;
            // 16 rows by expert are received, and 10 by rank.
            for (reports, capacity) in [(1, 15), (2, 9)] {
                let on_device = request(&x, &valid.layout).counts(Counts::OnDevice { capacity });
                drop(rank.dispatch(place, on_device)?);
                let plans = rank.buffer.status_ptr().0 + size_of::<Status>() as u64;
                assert_eq!(status(&rank.stream, DevicePtr(plans))?, reports, "capacity {capacity}");
            }
            Ok(())
        });
    }
}

/// Kernels of a captured step read the counts in place of the host.
#[test]
fn a_plan_that_failed_has_no_rows_on_the_device() {
    for spread in [setup(Some(16)), two_nodes(2)] {
        then_dispatch(spread, |rank, valid, place| {
            let x = ones(rank)?;
            // The tables of the failing ones lie where those of this one lay.
            drop(rank.dispatch(place, request(&x, &valid.layout))?);
            // 16 rows by expert are received, and 10 by rank.
            for capacity in [15, 9] {
                let on_device = request(&x, &valid.layout).counts(Counts::OnDevice { capacity });
                let handle = rank.dispatch(place, on_device)?.handle;
                has_no_rows(rank, &handle)?;
            }
            Ok(())
        });
    }
}

/// The counts of the rank have left.
#[test]
fn a_plan_that_is_not_launched_breaks_the_buffer() {
    run_ranks(1, |_, group| {
        let failing = FailingDevice::new(VirtualGpu::new(VirtConfig::default()), &["number_selections"]);
        let options = Setup { ranks: 1, ..setup(Some(64)) }.options;
        let mut rank = Rank::new(driver::device(failing.clone()), group, options)?;
        let (x, valid, mut place) = (ones(&rank)?, Valid::new(&mut rank)?, rank.place()?);
        drop(rank.dispatch(&mut place, request(&x, &valid.layout))?);
        failing.refuse_next();
        refused(rank.dispatch(&mut place, request(&x, &valid.layout)), &[REFUSAL]);
        let later = rank.dispatch(&mut place, request(&x, &valid.layout)).map(drop);
        assert!(matches!(&later, Err(Error::Broken { call: "dispatch", .. })), "{later:?}");
        rank.stream.synchronize()
    });
}

#[test]
fn ranks_must_agree() {
    then_dispatch(setup(Some(64)), |rank, valid, place| {
        let x = ones(rank)?;
        let layout = &valid.layout;
        let request = if rank.rank == 0 { request(&x, layout) } else { DispatchRequest::new(&x, layout) };
        let error = rank.dispatch(place, request).map(drop).expect_err("ranks differ");
        assert!(matches!(error, Error::Mismatch { what: "by_expert", .. }), "{error}");
        Ok(())
    });
}

/// The error names an absent peer, and no result is read.
#[test]
fn a_peer_that_is_gone() {
    without_a_peer(None);
    without_a_peer(Some(nodes(1, TransportKind::Shm)));
}

fn without_a_peer(links: Option<NodeLinks>) {
    let mut setup = setup(Some(64)).nodes(links);
    setup.fields().timeout = Duration::from_millis(200);
    setup.run(|rank| {
        let (x, valid, mut place) = (ones(rank)?, Valid::new(rank)?, rank.place()?);
        if rank.rank == 1 {
            return rank.stream.synchronize();
        }
        let on_device = request(&x, &valid.layout).counts(Counts::OnDevice { capacity: 64 });
        let output = rank.dispatch(&mut place, on_device)?;
        expect_gone(output.recv_x.to_host::<u16>(&rank.stream));
        Ok(())
    });
}

/// One graph, whose routing changes.
#[test]
fn a_step_brings_the_rows_of_each_replay() {
    replay(None);
    replay(Some(nodes(1, TransportKind::Shm)));
}

fn replay(links: Option<NodeLinks>) {
    let turns: Vec<Case> = (0..tier::pick(2, 4))
        .map(|seed| {
            let style = Style::ALL[seed as usize];
            Case::new(Routing::random(&mut rng_of(&[seed]), &[6, 3, 8], 3, 6, style), 48)
        })
        .collect();
    let mut setup = turns[0].setup().nodes(links);
    setup.fields().rows_by_expert = Some(3 * 17 * 3 + 6 * 7);
    setup.run(|rank| {
        let (stream, mut place) = (rank.stream.clone(), rank.place()?);
        let (ids, _) = rank.topk(&turns[0])?;
        let (x, _) = rank.payload(&turns[0], 1)?;
        let capacity = rank.buffer.capacity();
        let work = |buffer: &mut Buffer, order: StreamOrder<'_>| {
            let layout = buffer.get_dispatch_layout(&ids, 6, order)?;
            let request = DispatchRequest::new(&x, &layout).by_expert(8);
            let output = buffer.dispatch(&mut place, request.counts(Counts::OnDevice { capacity }), order)?;
            // The rows are returned unchanged, as by experts that do nothing.
            let (rows, handle) = (output.recv_x.clone(), output.handle.clone());
            let sums = buffer.combine(CombineRequest::new(&rows, &handle), order)?;
            drop(rows);
            Ok((output.detach(), sums))
        };
        let step = rank.buffer.capture(&stream, work)?;
        for case in &turns {
            ids.write(&stream, &case.routing.flat_topk_idx(rank.rank))?;
            step.launch(&stream)?;
            step.check(&stream)?;
            let (output, sums) = step.output();
            let plan = oracle::by_expert(&case.routing, rank.rank, 8);
            let tables = output.handle().by_expert().expect("a dispatch by expert");
            rank.equal("psum", &tables.psum().values(&stream)?, &plan.psum);
            rank.check_rows_by_expert(&turns[0], 1, &plan, "a replay", output.at(&place)?)?;
            let sums = rank.row_bytes(&sums.combined_x)?;
            for (token, got) in (0..).zip(sums) {
                let row: Vec<half::bf16> =
                    epoxide_testing::payload::values_of(&turns[0].row(1, rank.rank, token));
                let row: Vec<f32> = row.iter().map(|value| value.to_f32()).collect();
                let (columns, per_node) = (row.len(), links.map(|links| links.ranks_per_node));
                let (routing, ones) = (&case.routing, [1.0; 3]);
                let made = |_, _| row.clone();
                let sum = oracle::combine_by_expert(
                    routing,
                    rank.rank,
                    token,
                    columns,
                    &ones,
                    per_node,
                    DType::Bf16,
                    made,
                );
                let expected: Vec<half::bf16> = sum.into_iter().map(half::bf16::from_f32).collect();
                let got: Vec<half::bf16> = epoxide_testing::payload::values_of(&got);
                let equal = got
                    .iter()
                    .zip(&expected)
                    .all(|(a, b)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()));
                rank.check(equal, format!("sums of token {token}"));
            }
        }
        Ok(())
    });
}

/// The sums of one rank would lack rows of another.
#[test]
fn a_combine_of_fewer_rows_than_came_fails_on_every_rank() {
    for in_pool in [false, true] {
        let mut setup = setup(Some(64));
        setup.fields().timeout = Duration::from_millis(200);
        setup.run(|rank| {
            let (x, valid, mut place) = (ones(rank)?, Valid::new(rank)?, rank.place()?);
            let on_device = request(&x, &valid.layout).counts(Counts::OnDevice { capacity: 64 });
            let handle = rank.dispatch(&mut place, on_device)?.handle;
            // 10 rows were received, and 6 of padding.
            let given = if rank.rank == 1 { 15 } else { 16 };
            let (tensor, pool);
            let combine = if in_pool {
                pool = place.combine_rows(DType::Bf16, given, 8)?;
                CombineRequest::new(&pool, &handle)
            } else {
                tensor = Tensor::alloc(rank.device(), DType::Bf16, &[given, 8])?;
                CombineRequest::new(&tensor, &handle)
            };
            let sums = rank.combine(combine)?;
            let read = sums.combined_x.to_host::<u16>(&rank.stream).map(drop);
            let left = found(&rank.stream, &sums.combined_x)?;
            assert!(left.iter().all(|sum| is_nan(sum)), "rank {}: {left:?}", rank.rank);
            match (rank.rank, &read) {
                (1, Err(Error::Broken { reason, .. })) => {
                    assert!(reason.contains("15") && reason.contains("16"), "{reason}");
                }
                (0, Err(Error::PeerTimeout { peer: 1, .. })) => {}
                (number, read) => panic!("rank {number} got {read:?}"),
            }
            Ok(())
        });
    }
}
