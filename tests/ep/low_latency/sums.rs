//! Sums of rows of f16 and f32: every element equals the oracle, bit for bit.

use std::sync::Arc;
use std::time::Duration;

use epoxide::driver::virt::{CheckConfig, Checker, VirtConfig, VirtualGpu};
use epoxide::group::ProcessGroup;
use epoxide::low_latency::{Buffer, CombineRequest, Options, Quantise, Shape};
use epoxide::transport::{TransportKind, TransportOptions};
use epoxide::{DType, Error, Result, StreamOrder, Tensor};
use epoxide_testing::harness::{NodeLinks, PATIENCE, assert_names, keep, run_ranks};
use epoxide_testing::low_latency::{LowLatencyCase, ReturnPath, RowMemory, Segments};
use epoxide_testing::oracle::Style;
use epoxide_testing::payload::numbers_of;
use epoxide_testing::tier;
use half::f16;

use super::ones::Ones;
use crate::shapes::routing;

const TYPES: [DType; 2] = [DType::F16, DType::F32];
/// Each way in which rows are given: their kind, whether they have weights, and segments.
const WAYS: [(ReturnPath, bool, Option<Segments>); 5] = [
    (ReturnPath::ByExpert, true, None),
    (ReturnPath::ByExpert, false, None),
    (ReturnPath::ByRow, false, None),
    (
        ReturnPath::ByExpert,
        true,
        Some(Segments { alignment: 8, memory: RowMemory::Library, unweighted: false }),
    ),
    (
        ReturnPath::ByExpert,
        true,
        Some(Segments { alignment: 1, memory: RowMemory::Caller, unweighted: true }),
    ),
];

fn nodes(ranks_per_node: u32, transport: TransportKind) -> Option<NodeLinks> {
    Some(NodeLinks { ranks_per_node, transport, queues: 1 })
}

/// A case of each type and way, in turn within a node and across nodes, with rows that return as
/// packets and without, of one piece and of several.
fn cases() -> impl Iterator<Item = LowLatencyCase> {
    let all = TYPES.into_iter().flat_map(|dtype| WAYS.map(|way| (dtype, way)));
    let spreads = [None, nodes(1, TransportKind::Direct), nodes(1, TransportKind::Tcp)];
    let all = all.flat_map(move |each| spreads.map(|nodes| (each, nodes)));
    all.enumerate().map(|(number, ((combine_dtype, (combine_rows, weighted, segments)), nodes))| {
        let hidden = [24, 2320, 768][number % 3];
        LowLatencyCase {
            combine_dtype,
            combine_rows,
            weighted,
            segments,
            nodes,
            quantise: if hidden == 768 { Quantise::Fp8 } else { Quantise::None },
            packet_tokens: [0, 5, 32][number / 3 % 3],
            halves: number % 4 == 1,
            own_memory: number % 4 == 2,
            rounds: 2,
            ..LowLatencyCase::new(routing(&[9, 0, 12], 4, 6, Style::WithHoles), hidden)
        }
    })
}

#[test]
fn rows_of_f16_and_f32() {
    // Every other case in the default tier: each type, way and spread is in some.
    for case in cases().step_by(tier::pick(2, 1)) {
        case.check();
    }
}

/// More tokens than blocks, of ranks that are many, and experts that are there twice.
#[test]
fn many_tokens_and_ranks() {
    for dtype in TYPES {
        let tokens: Vec<u32> = (0..8).map(|rank| [70, 1, 0, 23][rank % 4]).collect();
        let case = LowLatencyCase::new(routing(&tokens, 6, 16, Style::Repeats), 64);
        LowLatencyCase { combine_dtype: dtype, ..case.clone() }.check();
        LowLatencyCase { combine_dtype: dtype, combine_rows: ReturnPath::ByRow, ..case.clone() }.check();
        if tier::pick(false, true) {
            LowLatencyCase { combine_dtype: dtype, nodes: nodes(2, TransportKind::Shm), ..case }.check();
        }
    }
}

#[test]
fn replays_of_steps() {
    for (nodes, combine_dtype) in [(None, DType::F16), (nodes(1, TransportKind::Shm), DType::F32)] {
        let case = LowLatencyCase::new(routing(&[7, 5], 3, 4, Style::WithHoles), 40);
        LowLatencyCase { nodes, combine_dtype, rounds: 3, ..case }.check_replayed(tier::pick(3, 20));
    }
}

#[test]
fn the_checker_finds_nothing() {
    let all = cases().map(|case| LowLatencyCase {
        hidden: case.hidden.min(264) / 8 * 8,
        quantise: Quantise::None,
        ..case
    });
    for (seed, case) in (0..).zip(all).step_by(tier::pick(7, 2)) {
        for weak_memory in [None, Some(seed)] {
            let config = CheckConfig { races: weak_memory.is_none(), weak_memory, ..CheckConfig::default() };
            let (checker, schedule_seed) = (Some(Checker::new(config)), Some(seed));
            LowLatencyCase { checker, schedule_seed, ..case.clone() }.check();
        }
    }
}

const TOKENS: u64 = 4;
const SHAPE: Shape = Shape { max_tokens: TOKENS as u32, hidden: 128, num_topk: 2, num_experts: 2 };

/// A rank whose tokens go to both ranks.
fn join(group: &Arc<dyn ProcessGroup>, change: impl Fn(Options) -> Options) -> Result<Ones> {
    let config = VirtConfig { ordinal: group.rank(), sm_count: 2, ..VirtConfig::default() };
    let ids: Vec<i64> = (0..TOKENS).flat_map(|_| [0, 1]).collect();
    Ones::new(VirtualGpu::new(config), group.clone(), SHAPE, change, &ids)
}

#[test]
fn a_sum_that_f16_cannot_hold_is_infinite() {
    run_ranks(2, |_, group| {
        let mut rank = join(&group, |options| options.combine_dtype(DType::F16))?;
        let (mut place, stream) = (rank.buffer.place(0)?, rank.stream.clone());
        let received = rank.dispatch(&mut place)?;
        let rows = vec![f16::from_f32(40000.0); (rank.buffer.rows() * SHAPE.hidden) as usize];
        let rows = Tensor::from_host(&stream, DType::F16, &[rank.buffer.rows(), SHAPE.hidden], &rows)?;
        let combined =
            rank.buffer.combine(received, CombineRequest::by_row(&rows), StreamOrder::on(&stream))?;
        let sums = combined.x.to_host::<f16>(&stream)?;
        assert!(sums.iter().all(|sum| *sum == f16::INFINITY), "{sums:?}");
        group.barrier(PATIENCE)
    });
}

/// Where the other rank never enters the combine, all sums are NaN: of rows that return as packets,
/// with words, and across nodes.
#[test]
fn a_failed_combine_leaves_nan() {
    const DEADLINE: Duration = Duration::from_millis(150);
    let across = TransportOptions::new(TransportKind::Direct);
    for (dtype, number) in TYPES.into_iter().flat_map(|dtype| [(dtype, 0), (dtype, 1), (dtype, 2)]) {
        run_ranks(2, |_, group| {
            let mut rank = join(&group, |options| {
                let options = options.combine_dtype(dtype).timeout(DEADLINE);
                match number {
                    0 => options,
                    1 => options.packet_tokens(0),
                    _ => options.ranks_per_node(1).keep_nodes().transport(across.clone()),
                }
            })?;
            let (mut place, stream) = (rank.buffer.place(0)?, rank.stream.clone());
            let received = rank.dispatch(&mut place)?;
            rank.outcome()?;
            if rank.rank == 0 {
                let rows = Tensor::alloc(stream.device(), dtype, &[rank.buffer.rows(), SHAPE.hidden])?;
                let order = StreamOrder::on(&stream);
                let combined = rank.buffer.combine(received, CombineRequest::by_row(&rows), order)?;
                let sums = keep(&stream, &combined.x, TOKENS)?;
                let mut bytes = vec![0; (TOKENS * sums.row_bytes()) as usize];
                // SAFETY: the tensor has so many bytes.
                unsafe { stream.read(&mut bytes, sums.ptr())? };
                assert!(numbers_of(dtype, &bytes).iter().all(|sum| sum.is_nan()), "{dtype}, {number}");
                assert_eq!(rank.buffer.missing_tokens()?, (0..TOKENS as u32).collect::<Vec<_>>());
                let error = rank.buffer.check().unwrap_err();
                assert!(matches!(error, Error::PeerTimeout { peer: 1, .. }), "{error}");
            }
            group.barrier(PATIENCE)
        });
    }
}

#[test]
fn rows_of_another_type_than_the_buffer_sums() {
    run_ranks(2, |_, group| {
        for dtype in [DType::Bf16, DType::F16, DType::F32] {
            let mut rank = join(&group, |options| options.combine_dtype(dtype))?;
            let (mut place, stream) = (rank.buffer.place(0)?, rank.stream.clone());
            let order = StreamOrder::on(&stream);
            let of = [rank.buffer.rows(), SHAPE.hidden];
            let rows = |dtype| Tensor::alloc(stream.device(), dtype, &of);
            let (own, bytes) = (rows(dtype)?, rows(DType::Fp8E4m3)?);
            let others = [DType::Bf16, DType::F16, DType::F32].into_iter().filter(|other| *other != dtype);
            for other in others {
                let given = rows(other)?;
                let received = rank.dispatch(&mut place)?;
                let error = rank.buffer.combine(received, CombineRequest::by_row(&given), order).unwrap_err();
                let rule = format!("sums rows of {dtype}");
                assert_names(&error, &["rows = of", &other.to_string(), &rule, "Options::combine_dtype"]);
                let out = Tensor::alloc(stream.device(), other, &[TOKENS, SHAPE.hidden])?;
                let received = rank.dispatch(&mut place)?;
                let error = rank
                    .buffer
                    .combine_into(received, CombineRequest::by_row(&own), &out, order)
                    .unwrap_err();
                assert!(matches!(error, Error::DType { .. }), "{error}");
                assert_names(&error, &["out", &dtype.to_string()]);
            }
            let received = rank.dispatch(&mut place)?;
            let error = rank.buffer.combine(received, CombineRequest::by_row(&bytes), order).unwrap_err();
            assert!(matches!(error, Error::DType { .. }), "{error}");
            assert_names(&error, &["rows", &dtype.to_string()]);
            if dtype != DType::Bf16 {
                let received = rank.dispatch(&mut place)?;
                let quantised = CombineRequest::by_row(&own).quantise(Quantise::Fp8);
                let error = rank.buffer.combine(received, quantised, order).unwrap_err();
                assert_names(&error, &["quantise = Fp8", &dtype.to_string(), "bf16 rows"]);
                let received = rank.dispatch(&mut place)?;
                assert_names(&received.combine_rows().unwrap_err(), &["rows in the pool are bf16", "by_row"]);
                let error = rank.buffer.combine(received, CombineRequest::in_pool(), order).unwrap_err();
                assert_names(&error, &["combine_rows", &dtype.to_string(), "by_row"]);
                assert!(place.combine_rows_ptr().is_none());
            }
            stream.synchronize()?;
            group.barrier(PATIENCE)?;
        }
        Ok(())
    });
}

#[test]
fn options_that_combines_cannot_sum() {
    run_ranks(2, |rank, group| {
        let make = |shape: Shape, dtype: DType| {
            let device = VirtualGpu::new(VirtConfig { ordinal: rank, ..VirtConfig::default() });
            Buffer::new(device, &*group, Options::new(shape).combine_dtype(dtype)).unwrap_err()
        };
        for dtype in [DType::Fp8E4m3, DType::I32, DType::U8] {
            assert_names(&make(SHAPE, dtype), &["combine_dtype", &dtype.to_string(), "bf16, f16 or f32"]);
        }
        let wide = Shape { hidden: 1 << 15, ..SHAPE };
        assert_names(&make(wide, DType::F32), &["hidden = 32768", "below 32768", "f32"]);
        let error = make(SHAPE, TYPES[rank as usize]);
        assert!(matches!(error, Error::Mismatch { .. }), "{error}");
        assert_names(&error, &["combine_dtype", "f16", "f32"]);
        Ok(())
    });
}
