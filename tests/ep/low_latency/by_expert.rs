//! Rows by expert, which the receiver of a dispatch puts into the segments of its experts.

use epoxide::Result;
use epoxide::driver::virt::{CheckConfig, Checker, VirtConfig};
use epoxide::internal::Instruments;
use epoxide::low_latency::{Buffer, CombineRequest, DispatchRequest, Options, Quantise, Shape};
use epoxide::transport::TransportKind;
use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
use epoxide_testing::harness::{NodeLinks, open_device, run_ranks};
use epoxide_testing::low_latency::{LowLatencyCase, LowLatencyRank, ReturnPath, RowMemory, Segments};
use epoxide_testing::oracle::{Routing, Style};
use epoxide_testing::tier;
use epoxide_vgpu::for_each_seed;

use super::ones::Ones;
use crate::shapes::routing;
use crate::valid::refused;

fn case(routing: Routing, hidden: u32, alignment: u32) -> LowLatencyCase {
    LowLatencyCase { segments: Some(Segments::aligned(alignment)), ..LowLatencyCase::new(routing, hidden) }
}

fn in_memory_of_the_caller(alignment: u32, unweighted: bool) -> Option<Segments> {
    Some(Segments { alignment, memory: RowMemory::Caller, unweighted })
}

#[test]
fn segments_of_any_alignment() {
    for alignment in tier::pick(vec![1, 64], vec![1, 2, 8, 16, 64, 128, 1024]) {
        case(routing(&[9, 0, 14, 5], 3, 8, Style::WithHoles), 48, alignment).check();
    }
}

#[test]
fn a_token_may_select_an_expert_twice() {
    case(routing(&[12, 7], 6, 4, Style::Repeats), 24, 8).check();
    let segments = in_memory_of_the_caller(8, true);
    LowLatencyCase { segments, ..case(routing(&[12, 7], 5, 4, Style::Repeats), 24, 8) }.check();
}

#[test]
fn few_experts_have_most_rows_and_blocks_have_many_tokens() {
    case(routing(&[40, 33, 1], 4, 9, Style::Skewed), 16, 16).check();
    LowLatencyCase { sm_count: 1, ..case(routing(&[19, 22], 4, 6, Style::DistinctTopK), 16, 4) }.check();
}

#[test]
fn more_blocks_than_tokens_have_parts_of_long_rows() {
    let hidden = 1024 * 5 + 8;
    LowLatencyCase { sm_count: 7, ..case(routing(&[2, 1], 2, 4, Style::DistinctTopK), hidden, 8) }.check();
}

/// Blocks with tokens of each rank in numbers from few to several for each block: whole rows, parts of
/// one row, parts of several, and rows of other ranks alone.
#[test]
fn blocks_share_rows_of_one_token_or_several() {
    let counts = [[3, 2], [6, 9], [8, 12], [11, 13], [20, 26], [27, 1]];
    for (number, counts) in counts.into_iter().enumerate() {
        for sm_count in [12, 13] {
            let quantise = if number % 2 == 0 { Quantise::None } else { Quantise::Fp8 };
            let routing = routing(&counts, 4, 8, Style::DistinctTopK);
            LowLatencyCase { sm_count, quantise, ..case(routing, 1024 * 5 + 128, 8) }.check();
        }
    }
    let routing = routing(&[7, 6, 8, 7], 4, 8, Style::DistinctTopK);
    LowLatencyCase { sm_count: 9, ..case(routing, 1024 * 3 + 8, 8) }.check();
}

/// Rows of a rank with more than 64 tokens take their scales from packets, rows of other ranks from
/// the table.
#[test]
fn scales_are_taken_from_packets() {
    for (counts, sm_count) in [([66, 64], 12), ([9, 128], 40)] {
        LowLatencyCase {
            quantise: Quantise::Fp8,
            sm_count,
            checker: Some(Checker::new(CheckConfig::default())),
            rounds: 2,
            ..case(routing(&counts, 3, 6, Style::WithHoles), 384, 8)
        }
        .check();
    }
}

#[test]
fn nothing_is_selected() {
    let topk_idx = vec![vec![vec![-1, -1]; 3], vec![], vec![vec![-1, -1]]];
    case(Routing { num_experts: 6, num_topk: 2, topk_idx }, 48, 8).check();
}

#[test]
fn more_local_experts_than_lanes() {
    case(routing(&[30, 21], 8, 2 * 70, Style::DistinctTopK), 16, 8).check();
}

#[test]
fn rows_with_scales() {
    for (quantise, hidden) in [(Quantise::Fp8, 2304), (Quantise::Fp8PowerOfTwo, 128)] {
        let case = case(routing(&[9, 8], 3, 4, Style::DistinctTopK), hidden, 8);
        LowLatencyCase { quantise, ..case.clone() }.check();
        LowLatencyCase { quantise, segments: in_memory_of_the_caller(8, false), ..case }.check();
    }
}

/// A block that receives no rows of others does not wait for calls.
#[test]
fn traces_have_no_times_of_phases_that_were_left_out() {
    let segments = case(routing(&[16, 16], 8, 256, Style::DistinctTopK), 7168, 64);
    for case in [LowLatencyCase { segments: None, ..segments.clone() }, segments] {
        LowLatencyCase { sm_count: 132, ..case.clone() }.run(|rank| {
            rank.buffer.start_trace(1 << 14)?;
            case.verify(rank)?;
            let (launches, dropped) = rank.buffer.take_trace(&rank.stream)?;
            let of = |name| launches.iter().filter(|launch| launch.operation == name).count();
            assert!(of("dispatch") > 0 && of("combine") > 0 && dropped == 0, "{launches:?}");
            for launch in launches {
                for block in &launch.blocks {
                    let phases = [block.enter, block.ready, block.moved];
                    rank.check(phases.iter().all(|&at| at <= block.done), format!("{block:?}"));
                }
            }
            Ok(())
        });
    }
}

/// Experts that work in place return the rows unchanged.
#[test]
fn rows_that_experts_return_unchanged() {
    for segments in [in_memory_of_the_caller(16, false), Some(Segments::aligned(16))] {
        let case = case(routing(&[9, 5, 0, 12], 3, 8, Style::WithHoles), 24, 16);
        LowLatencyCase { gathers: true, segments, rounds: 2, ..case }.check();
    }
}

/// The rows as they were received are there as well.
#[test]
fn rows_by_row_and_in_the_pool_answer_such_a_dispatch() {
    for combine_rows in [ReturnPath::ByRow, ReturnPath::InPool] {
        let case = case(routing(&[7, 5], 3, 4, Style::DistinctTopK), 24, 8);
        LowLatencyCase { combine_rows, weighted: false, ..case }.check();
    }
}

#[test]
fn steps_and_chains_of_changing_rows() {
    let routing = routing(&[3, 5, 2], 3, 6, Style::Repeats);
    for segments in [in_memory_of_the_caller(8, true), Some(Segments::aligned(8))] {
        let case = LowLatencyCase { gathers: true, segments, ..case(routing.clone(), 40, 8) };
        let chained = LowLatencyCase { rounds: tier::pick(12, 60), places: 2, ..case.clone() };
        chained.check_chained();
        LowLatencyCase { rounds: 3, places: 2, halves: true, ..case }.check_replayed(tier::pick(3, 20));
    }
}

/// The routing of each run is that of the ids that are in the tensor then.
#[test]
fn a_graph_whose_routing_changes() {
    let first = routing(&[6, 4], 3, 6, Style::WithHoles);
    let case = case(first, 16, 8);
    // Six tokens of two ranks with three entries, and the padding of three experts.
    let room = 2 * 6 * 3 + 3 * 7;
    case.run(|rank| {
        let LowLatencyRank { buffer, stream, .. } = rank;
        let (stream, mut place) = (stream.clone(), buffer.place(0)?);
        let shape = [[6, 4][rank.rank as usize], 3];
        let x = Tensor::from_host(&stream, DType::Bf16, &[shape[0], 16], &ones(shape[0] * 16))?;
        let ids = TypedTensor::from_host(&stream, &shape, &vec![0i64; (shape[0] * 3) as usize])?;
        let counts = TypedTensor::from_host(&stream, &[3], &[0i32; 3])?;
        let recv_x = Tensor::alloc(stream.device(), DType::Bf16, &[room, 16])?;
        let step = buffer.capture(&stream, |buffer, order| {
            let request = DispatchRequest::new(&x, &ids).by_expert(8).recv_x(&recv_x);
            let received = buffer.dispatch(&mut place, request, order)?;
            let came = received.by_expert.as_ref().expect("asked for").experts.counts();
            // SAFETY: both have three words, and outlive the stream's work.
            unsafe { stream.copy(counts.ptr(), came.ptr(), 12)? };
            Ok(buffer.combine(received, CombineRequest::by_expert(&recv_x), order)?.detach())
        })?;
        for selected in 1..=tier::pick(3, 6) {
            // Entry k of each token selects expert (k * selected) % 6, or none.
            let id = |k: u64| if k < selected { (k * selected % 6) as i64 } else { -1 };
            let all: Vec<i64> = (0..shape[0] * 3).map(|at| id(at % 3)).collect();
            ids.write(&stream, &all)?;
            step.launch(&stream)?;
            step.check(&stream)?;
            let mut want = [0; 3];
            for k in (0..3).filter(|k| id(*k) >= 0 && id(*k) as u32 / 3 == rank.rank) {
                want[(id(k) % 3) as usize] += 10;
            }
            assert_eq!(counts.values(&stream)?, want, "{selected}");
            let sums: Vec<half::bf16> = step.output().at(&place)?.x.to_host(&stream)?;
            assert!(sums.iter().all(|sum| sum.to_f32() == selected.min(3) as f32), "{selected}");
        }
        Ok(())
    });
}

fn ones(count: u64) -> Vec<half::bf16> {
    vec![half::bf16::ONE; count as usize]
}

#[test]
fn rows_of_other_nodes() {
    for (transport, style) in
        [(TransportKind::Direct, Style::Repeats), (TransportKind::Shm, Style::WithHoles)]
    {
        let nodes = Some(NodeLinks { ranks_per_node: 2, transport, queues: 1 });
        let case = case(routing(&[9, 0, 14, 5], 3, 8, style), 48, 8);
        LowLatencyCase { nodes, rounds: 2, gathers: true, ..case.clone() }.check();
        let quantise = Quantise::Fp8;
        let segments = in_memory_of_the_caller(16, true);
        LowLatencyCase { nodes, hidden: 256, quantise, segments, ..case }.check();
    }
}

/// Results are the caller's to take apart.
#[test]
fn a_combine_knows_its_segments_without_the_field() {
    run_ranks(2, |ordinal, group| {
        let shape = Shape { max_tokens: 4, hidden: 64, num_topk: 1, num_experts: 2 };
        let device = open_device(VirtConfig { ordinal, ..VirtConfig::default() })?;
        let options = |options: Options| options.rows_by_expert(9);
        let mut rank = Ones::new(device, group, shape, options, &[0, 1, 1, 0])?;
        let (mut place, order) = (rank.buffer.place(0)?, StreamOrder::on(&rank.stream));
        let request = DispatchRequest::new(&rank.x, &rank.topk_idx).by_expert(1);
        let mut received = rank.buffer.dispatch(&mut place, request, order)?;
        drop(received.by_expert.take());
        let rows = Tensor::from_host(&rank.stream, DType::Bf16, &[9, 64], &ones(9 * 64))?;
        let combined = rank.buffer.combine(received, CombineRequest::by_expert(&rows), order)?;
        assert_eq!(combined.x.to_host::<half::bf16>(&rank.stream)?, ones(4 * 64));
        Ok(())
    });
}

#[test]
fn the_checker_finds_nothing() {
    for_each_seed(tier::pick(4, 24), |seed| {
        let weak = (seed % 2 == 1).then_some(seed);
        let config = CheckConfig { races: weak.is_none(), weak_memory: weak, ..CheckConfig::default() };
        let nodes = (seed % 4 == 2).then_some(NodeLinks {
            ranks_per_node: 1,
            transport: if seed % 8 < 4 { TransportKind::Tcp } else { TransportKind::Shm },
            queues: 1,
        });
        LowLatencyCase {
            schedule_seed: Some(seed),
            checker: Some(Checker::new(config)),
            rounds: 2,
            gathers: true,
            nodes,
            ..case(routing(&[7, 3, 5], 3, 6, Style::ALL[seed as usize % 4]), 48, 4)
        }
        .check();
    });
}

#[test]
fn the_checker_finds_nothing_in_parts_of_several_rows() {
    for_each_seed(tier::pick(4, 24), |seed| {
        let weak = (seed % 2 == 1).then_some(seed);
        let config = CheckConfig { races: weak.is_none(), weak_memory: weak, ..CheckConfig::default() };
        let counts = [[6, 7], [3, 8]][seed as usize / 2 % 2];
        LowLatencyCase {
            schedule_seed: Some(seed),
            checker: Some(Checker::new(config)),
            rounds: 2,
            sm_count: 9,
            ..case(routing(&counts, 3, 6, Style::DistinctTopK), 1024 + 8, 4)
        }
        .check();
    });
}

#[test]
fn arguments_are_checked() {
    let bf16 = case(routing(&[4, 6], 2, 4, Style::DistinctTopK), 256, 8);
    for case in [LowLatencyCase { quantise: Quantise::Fp8, ..bf16.clone() }, bf16] {
        case.run(|rank| refusals(&case, rank));
    }
}

fn refusals(case: &LowLatencyCase, rank: &mut LowLatencyRank) -> Result<()> {
    let plain = LowLatencyCase { segments: None, ..case.clone() };
    let inputs = plain.inputs(rank)?;
    let LowLatencyRank { buffer, stream, .. } = rank;
    let (order, mut place) = (StreamOrder::on(stream), buffer.place(0)?);
    let has_scales = case.quantise != Quantise::None;
    let (dtype, other) =
        if has_scales { (DType::Fp8E4m3, DType::Bf16) } else { (DType::Bf16, DType::Fp8E4m3) };
    let rows = 2 * 6 * 2 + 2 * 7;
    let tensor = |dtype, shape: [u64; 2]| Tensor::alloc(stream.device(), dtype, &shape);
    let request = || inputs.request(case.quantise);
    let mut refuse = |request: DispatchRequest<'_>, parts: &[&str]| {
        refused(buffer.dispatch(&mut place, request, order), parts);
    };
    for alignment in [0, 3, 12] {
        refuse(request().by_expert(alignment), &[&format!("alignment = {alignment}"), "power of two"]);
    }
    let parts = ["alignment = 16", "up to 54 rows", "room for 38", "rows_by_expert >= 54"];
    refuse(request().by_expert(16), &parts);
    let few = tensor(dtype, [rows - 1, 256])?;
    refuse(request().by_expert(8).recv_x(&few), &["recv_x has shape [37, 256]", "rows_by_expert = 38"]);
    let wrong = tensor(other, [rows, 256])?;
    refuse(request().by_expert(8).recv_x(&wrong), &["recv_x has dtype"]);
    let x = tensor(dtype, [rows, 256])?;
    refuse(request().recv_x(&x), &["recv_x = given", "by_expert"]);
    let scales: TypedTensor<'_, f32> = tensor(DType::F32, [2, rows])?.typed()?;
    refuse(request().recv_x_scales(&scales), &["recv_x_scales = given", "by_expert"]);
    if has_scales {
        let few: TypedTensor<'_, f32> = tensor(DType::F32, [1, rows])?.typed()?;
        refuse(request().by_expert(8).recv_x_scales(&few), &["recv_x_scales has shape [1, 38]"]);
    } else {
        refuse(request().by_expert(8).recv_x_scales(&scales), &["recv_x_scales = given", "no scales"]);
    }
    // No work was enqueued, and the buffer still works.
    let received = buffer.dispatch(&mut place, request().by_expert(8).recv_x(&x), order)?;
    let few = tensor(DType::Bf16, [rows - 1, 256])?;
    refused(
        buffer.combine(received, CombineRequest::by_expert(&few), order),
        &["rows has shape [37, 256]", "[rows_by_expert = 38, hidden = 256]"],
    );
    stream.synchronize()?;
    buffer.check()
}

#[test]
fn a_buffer_without_room_has_no_rows_by_expert() {
    LowLatencyCase { segments: None, ..case(routing(&[2, 2], 2, 4, Style::DistinctTopK), 64, 8) }.run(
        |rank| {
            let x = Tensor::from_host(&rank.stream, DType::Bf16, &[2, 64], &ones(128))?;
            let ids = TypedTensor::from_host(&rank.stream, &[2, 2], &[0i64, 3, 1, -1])?;
            let (mut place, order) = (rank.buffer.place(0)?, StreamOrder::on(&rank.stream));
            let request = DispatchRequest::new(&x, &ids).by_expert(8);
            let parts = ["by_expert = asked for", "Options::rows_by_expert"];
            refused(rank.buffer.dispatch(&mut place, request, order), &parts);
            let shape = Shape { max_tokens: 2, hidden: 64, num_topk: 2, num_experts: 4 };
            for (options, parts) in [
                (Options::new(shape).rows_by_expert(0), ["rows_by_expert = 0", "31 bits"]),
                (
                    Options::new(Shape { num_experts: 4098, ..shape }).rows_by_expert(9),
                    ["num_experts = 4098", "at most"],
                ),
            ] {
                let device = rank.stream.device().clone();
                refused(Buffer::new(device, &*rank.group, options), &parts);
            }
            Ok(())
        },
    );
}
