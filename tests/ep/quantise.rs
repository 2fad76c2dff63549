//! Rows of high throughput that are quantised on their way: every byte of elements and scales.

use epoxide::driver::Stream;
use epoxide::driver::virt::{CheckConfig, Checker};
use epoxide::low_latency;
use epoxide::throughput::{
    CachedDispatchRequest, CombineRequest, Counts, DispatchRequest, Options, Quantise, Received, Shape,
};
use epoxide::transport::TransportKind;
use epoxide::{DType, Payload, StreamOrder, Tensor, TypedTensor};
use epoxide_testing::harness::{NodeLinks, Rank, Setup};
use epoxide_testing::oracle::{self, Routing, Style};
use epoxide_testing::payload::rng_of;
use epoxide_testing::roundtrip::Case;
use epoxide_testing::tier;
use epoxide_vgpu::for_each_seed;

use crate::valid::refused;

/// The ways in which rows are quantised.
const ALL: [Quantise; 3] = [Quantise::Fp8, Quantise::Fp8PowerOfTwo, Quantise::Mxfp8];

/// A routing with holes: some tokens go nowhere.
fn case(quantise: Quantise, hidden: u64, tokens: &[u32], topk: u32) -> Case {
    let experts = 2 * tokens.len() as u32;
    let routing = Routing::random(&mut rng_of(&[hidden, 5]), tokens, topk, experts, Style::WithHoles);
    Case::quantised(routing, hidden, quantise)
}

fn across(ranks_per_node: u32, transport: TransportKind) -> Option<NodeLinks> {
    Some(NodeLinks { ranks_per_node, transport, queues: 1 })
}

/// Dispatches with exact counts, with counts on the device and cached. A row is a turn of a warp, a
/// part of one, and several; the last block of MXFP8 rows is a whole one, or has a quarter.
#[test]
fn every_kind_of_block_within_a_node() {
    for (quantise, hidden, tokens) in [
        (Quantise::Fp8, 640, [11, 0, 6]),
        (Quantise::Fp8PowerOfTwo, 128, [30, 3, 7]),
        (Quantise::Mxfp8, 512, [11, 0, 6]),
        (Quantise::Mxfp8, 32 * 13, [9, 2, 5]),
        (Quantise::Mxfp8, 32, [9, 40, 5]),
    ] {
        case(quantise, hidden, &tokens, 3).check();
    }
    for quantise in tier::sample(ALL) {
        case(quantise, 2048 + 256, &[3, 5], 2).check();
    }
}

#[test]
fn every_kind_of_block_across_nodes() {
    for transport in tier::sample([TransportKind::Direct, TransportKind::Shm, TransportKind::Tcp]) {
        for quantise in tier::sample(ALL) {
            Case { nodes: across(2, transport), ..case(quantise, 384, &[5, 0, 6, 3], 3) }.check();
        }
    }
    let nodes = across(1, TransportKind::Direct);
    Case { nodes, ..case(Quantise::Mxfp8, 32 * 5, &[5, 4], 2) }.check();
}

#[test]
fn every_kind_of_block_by_expert() {
    case(Quantise::Fp8, 256, &[7, 0, 5], 3).check_by_expert(4);
    case(Quantise::Mxfp8, 32 * 5, &[7, 0, 5], 3).check_by_expert(4);
    let nodes = across(2, TransportKind::Direct);
    for quantise in tier::sample([Quantise::Fp8, Quantise::Mxfp8]) {
        Case { nodes, ..case(quantise, 128, &[5, 0, 6, 3], 3) }.check_by_expert(4);
    }
}

#[test]
fn every_kind_of_block_between_many_ranks() {
    let many: Vec<u32> = (0..tier::pick(9, 19)).map(|rank| rank % 4).collect();
    for quantise in tier::sample([Quantise::Fp8, Quantise::Mxfp8]) {
        case(quantise, 256, &many, 3).check();
    }
}

#[test]
fn the_checker_finds_nothing() {
    for_each_seed(tier::pick(4, 20), |seed| {
        let weak = (seed % 2 == 1).then_some(seed);
        let config = CheckConfig { races: weak.is_none(), weak_memory: weak, ..CheckConfig::default() };
        let quantise = if seed % 4 < 2 { Quantise::Mxfp8 } else { Quantise::Fp8 };
        for nodes in [None, across(1, TransportKind::Direct)] {
            let by_expert = seed % 4 == 3;
            let case = Case { nodes, schedule_seed: Some(seed), ..case(quantise, 128, &[5, 3], 2) };
            let mut setup = if by_expert { case.setup_by_expert(4) } else { case.setup() };
            setup.device.checker = Some(Checker::new(config));
            setup.run(|rank| match by_expert {
                true => rank.check_by_expert(&case, 4),
                false => rank.check_everything(&case),
            });
        }
    });
}

/// Ids and weights of a case, its layout and its rows.
type Inputs<'a> = (TypedTensor<'static, f32>, epoxide::throughput::DispatchLayout<'a>, Tensor<'static>);

fn inputs(rank: &mut Rank, case: &Case, turn: u64) -> epoxide::Result<Inputs<'static>> {
    let (ids, weights) = rank.topk(case)?;
    let layout = rank.layout(&ids, case.routing.num_experts)?;
    Ok((weights, layout, rank.payload(case, turn)?.0))
}

/// Each run of a step quantises the rows' contents at that time, before and after other calls.
#[test]
fn runs_of_a_step_quantise_new_rows() {
    for (quantise, nodes) in [(Quantise::Fp8, None), (Quantise::Mxfp8, across(1, TransportKind::Direct))] {
        let case = Case { nodes, ..case(quantise, 256, &[6, 4], 2) };
        case.setup().run(|rank| {
            let stream = rank.stream.clone();
            let sources = oracle::recv_order(&case.routing, rank.rank);
            let (_, layout, x) = inputs(rank, &case, 0)?;
            let counts = Counts::OnDevice { capacity: rank.buffer.capacity() };
            let mut place = rank.place()?;
            let step = rank.buffer.capture(&stream, |buffer, order| {
                let request = DispatchRequest::new(&x, &layout).quantise(quantise).counts(counts);
                let handle = buffer.dispatch(&mut place, request, order)?.handle;
                let again = CachedDispatchRequest::new(&x, &handle).quantise(quantise);
                Ok(buffer.dispatch_cached(&mut place, again, order)?.detach())
            })?;
            for turn in 1..4 {
                let rows = rank.payload(&case, turn)?.0;
                // SAFETY: both tensors have the case's shape and live until the stream is waited for.
                unsafe { stream.copy(x.ptr(), rows.ptr(), x.rows() * x.row_bytes())? };
                step.launch(&stream)?;
                step.check(&stream)?;
                rank.check_received(&case, turn, &sources, "a run", step.output().at(&place)?)?;
                rank.synchronize()?;
                let request = DispatchRequest::new(&rows, &layout).quantise(quantise);
                let received = rank.buffer.dispatch(&mut place, request, StreamOrder::on(&stream))?;
                rank.check_received(&case, turn, &sources, "an eager call", &received)?;
                drop(received);
                rank.synchronize()?;
            }
            Ok(())
        });
    }
}

/// Calls on two streams whose rows share the buffer's memory for quantised ones.
#[test]
fn calls_in_flight_on_two_streams_do_not_meet() {
    for_each_seed(tier::pick(2, 10), |seed| {
        let case = Case { schedule_seed: Some(seed), ..case(Quantise::Fp8, 256, &[9, 7], 2) };
        let mut setup = case.setup();
        setup.fields().places = 2;
        setup.device.checker = Some(Checker::new(CheckConfig::default()));
        setup.run(|rank| {
            let sources = oracle::recv_order(&case.routing, rank.rank);
            let second = Stream::new(rank.stream.device())?;
            let (_, layout, first_rows) = inputs(rank, &case, 1)?;
            let second_rows = rank.payload(&case, 2)?.0;
            let (mut one, mut other) = (rank.buffer.place(0)?, rank.buffer.place(1)?);
            rank.stream.synchronize()?;
            let counts = Counts::OnDevice { capacity: rank.buffer.capacity() };
            let of = |x| DispatchRequest::new(x, &layout).quantise(Quantise::Fp8).counts(counts);
            let order = StreamOrder::on(&rank.stream);
            let first = rank.buffer.dispatch(&mut one, of(&first_rows), order)?;
            let later = rank.buffer.dispatch(&mut other, of(&second_rows), StreamOrder::on(&second))?;
            second.synchronize()?;
            rank.check_received(&case, 1, &sources, "the first stream", &first)?;
            rank.check_received(&case, 2, &sources, "the second stream", &later)
        });
    });
}

/// A batch whose size is on the device: rows after it are not sent.
#[test]
fn first_tokens_are_quantised() {
    let case = case(Quantise::Mxfp8, 256, &[9, 7], 2);
    case.setup().run(|rank| {
        let stream = rank.stream.clone();
        let order = StreamOrder::on(&stream);
        let (ids, _) = rank.topk(&case)?;
        let given = 4u64;
        let count = TypedTensor::from_host(&stream, &[1], &[given as i32])?;
        let ids = rank.buffer.first_tokens(&ids, &count, order)?;
        let layout = rank.buffer.get_dispatch_layout(&ids, case.routing.num_experts, order)?;
        let x = rank.payload(&case, 1)?.0;
        let mut place = rank.place()?;
        let request = DispatchRequest::new(&x, &layout).quantise(Quantise::Mxfp8);
        let received = rank.dispatch(&mut place, request)?;
        let mut sources = oracle::recv_order(&case.routing, rank.rank);
        sources.retain(|&(_, token)| u64::from(token) < given);
        rank.check_received(&case, 1, &sources, "first tokens", &received)
    });
}

/// Rank 0 has its rows quantised, the others give rows that are e4m3 already, with their scales.
#[test]
fn rows_that_are_quantised_already_come_to_the_same() {
    for (quantise, nodes) in
        ALL.into_iter().flat_map(|it| [(it, None), (it, across(1, TransportKind::Direct))])
    {
        let case = Case { nodes, ..case(quantise, 384, &[4, 6, 3], 2) };
        case.setup().run(|rank| {
            let (hidden, me) = (case.hidden(), rank.rank);
            let (_, layout, x) = inputs(rank, &case, 1)?;
            let tokens = case.routing.num_tokens(me);
            let rows: Vec<_> = (0..tokens).map(|token| case.row(1, me, token)).collect();
            let made = rank.upload_rows(DType::Fp8E4m3, hidden, &rows)?;
            let scales: Vec<f32> = (0..tokens).flat_map(|token| case.scales(1, me, token)).collect();
            let mut request = DispatchRequest::new(&x, &layout).quantise(quantise);
            let (f32_scales, column, payload);
            if me > 0 && quantise == Quantise::Mxfp8 {
                let columns: Vec<_> = (0..tokens).map(|token| case.column(1, (me, token), 0)).collect();
                column = rank.upload_rows(DType::Ue8m0, hidden / 32, &columns)?;
                payload = Payload::mxfp8(DType::Fp8E4m3, hidden)?;
                request = DispatchRequest::new(&made, &layout).column(&column).payload(&payload);
            } else if me > 0 {
                let shape = [u64::from(tokens), hidden / 128];
                f32_scales = TypedTensor::from_host(&rank.stream, &shape, &scales)?;
                request = DispatchRequest::new(&made, &layout).scales(&f32_scales);
            }
            let mut place = rank.place()?;
            let received = rank.dispatch(&mut place, request)?;
            let sources = oracle::recv_order(&case.routing, me);
            rank.check_received(&case, 1, &sources, "both", &received)
        });
    }
}

/// Low latency converts the same rows, infinities and NaN among them, to the same bytes.
#[test]
fn low_latency_makes_the_same_bytes() {
    for quantise in ALL {
        let case = case(quantise, 512, &[9, 6], 2);
        case.setup().run(|rank| {
            let stream = rank.stream.clone();
            let order = StreamOrder::on(&stream);
            let (ids, _) = rank.topk(&case)?;
            let layout = rank.layout(&ids, case.routing.num_experts)?;
            let x = rank.payload(&case, 1)?.0;
            let mut place = rank.place()?;
            let got = rank.dispatch(&mut place, DispatchRequest::new(&x, &layout).quantise(quantise))?;

            let shape = low_latency::Shape {
                max_tokens: 9,
                hidden: 512,
                num_topk: case.routing.num_topk,
                num_experts: case.routing.num_experts,
            };
            let options = low_latency::Options::new(shape);
            let mut other = low_latency::Buffer::new(rank.device().clone(), &*rank.group, options)?;
            let mut there = other.place(0)?;
            let request = low_latency::DispatchRequest::new(&x, &ids).quantise(quantise);
            let want = other.dispatch(&mut there, request, order)?;
            stream.synchronize()?;
            other.check()?;
            for (row, (source, token)) in oracle::recv_order(&case.routing, rank.rank).into_iter().enumerate()
            {
                let at = (source * 9 + token) as usize;
                let name = format!("{quantise:?}, row {row}");
                rank.equal(&name, &rank.row_of(&got.recv_x, row)?, &rank.row_of(&want.x, at)?);
                let of_row = match &got.recv_x_scales {
                    Some(scales) => rank.row_of(scales, row)?,
                    None => rank.row_of(&got.recv_columns[0], row)?,
                };
                let words = match &want.scales {
                    Some(scales) => (scales.ptr(), scales.row_stride()),
                    None => (want.columns[0].ptr(), want.columns[0].row_stride()),
                };
                let mut expected = vec![0; of_row.len()];
                for (word, to) in expected.chunks_exact_mut(4).enumerate() {
                    // SAFETY: it is a word of a received row's scales.
                    unsafe { stream.read(to, words.0.add(word as u64 * words.1 + at as u64 * 4))? };
                }
                rank.equal(&format!("scales of {name}"), &of_row, &expected);
            }
            rank.synchronize()
        });
    }
}

/// Scales of other types are another payload.
#[test]
fn ranks_that_quantise_otherwise_are_told_apart() {
    for (mine, parts) in [
        (Quantise::Fp8, "disagree on a hash of the types and bytes of columns"),
        (Quantise::None, "disagree on"),
    ] {
        let case = case(Quantise::Mxfp8, 256, &[4, 4], 2);
        let setup = case.setup().timeout(std::time::Duration::from_secs(5));
        setup.max_scales(4).run(|rank| {
            let (_, layout, x) = inputs(rank, &case, 1)?;
            let quantise = if rank.rank == 0 { Quantise::Mxfp8 } else { mine };
            let mut place = rank.place()?;
            let half = Tensor::alloc(rank.device(), DType::Bf16, &[4, 128])?;
            let x = if quantise == Quantise::None { &half } else { &x };
            refused(rank.dispatch(&mut place, DispatchRequest::new(x, &layout).quantise(quantise)), &[parts]);
            Ok(())
        });
    }
}

/// A plan without room moves no row, and the next call is as if it had not been.
#[test]
fn a_failed_plan_leaves_nothing_behind() {
    let case = case(Quantise::Fp8, 256, &[9, 7], 2);
    case.setup().run(|rank| {
        let (_, layout, x) = inputs(rank, &case, 1)?;
        let mut place = rank.place()?;
        let request = DispatchRequest::new(&x, &layout).quantise(Quantise::Fp8);
        let received = rank.dispatch(&mut place, request.counts(Counts::OnDevice { capacity: 1 }))?;
        refused(rank.buffer.check_dispatch(&received.handle, &rank.stream), &["capacity"]);
        drop(received);
        let received = rank.dispatch(&mut place, request)?;
        let sources = oracle::recv_order(&case.routing, rank.rank);
        rank.check_received(&case, 1, &sources, "behind a failed plan", &received)
    });
}

/// Gradients go along the handle as without.
#[test]
fn the_gradient_of_quantised_rows_is_that_of_rows() {
    let case = case(Quantise::Fp8, 256, &[5, 4], 2);
    // A row of the gradient is BF16.
    let mut setup = case.setup();
    setup.fields().shape.hidden *= 2;
    setup.run(|rank| {
        let (_, layout, x) = inputs(rank, &case, 1)?;
        let mut place = rank.place()?;
        let received: Received<'_> =
            rank.dispatch(&mut place, DispatchRequest::new(&x, &layout).quantise(Quantise::Fp8))?;
        let rows = received.combine_rows(DType::Bf16, 256)?;
        let sources = oracle::recv_order(&case.routing, rank.rank);
        rank.write_returned(&case, 3, &sources, rows.tensor())?;
        let sums = rank.combine(CombineRequest::new(&rows, &received.handle))?;
        let difference = rank.compare_sums(&case, 3, DType::Bf16, 256, &sums.combined_x)?;
        rank.note(difference);
        Ok(())
    });
}

#[test]
fn wrong_use_is_refused() {
    let setup = Setup::new(2, 1, 4, 512).max_topk(2).max_scales(2);
    setup.run(|rank| {
        let ids = TypedTensor::from_host(&rank.stream, &[4, 2], &[0i64, 1, 1, 0, 0, 1, 1, 0])?;
        let layout = rank.layout(&ids, 2)?;
        let mut place = rank.place()?;
        let tensor = |rank: &Rank, dtype, columns| Tensor::alloc(rank.device(), dtype, &[4, columns]);
        for (dtype, columns, quantise, parts) in [
            (
                DType::Bf16,
                192,
                Quantise::Fp8,
                ["quantise = Fp8 of 192 x bf16", "multiple of 128 elements: pad"],
            ),
            (DType::Bf16, 96, Quantise::Fp8PowerOfTwo, ["Fp8PowerOfTwo of 96 x bf16", "multiple of 128"]),
            (DType::Bf16, 48, Quantise::Mxfp8, ["quantise = Mxfp8 of 48 x bf16", "multiple of 32 elements"]),
            (DType::F16, 128, Quantise::Fp8, ["quantise = Fp8 of 128 x f16", "takes bf16 rows"]),
            (DType::Fp8E4m3, 128, Quantise::Mxfp8, ["Mxfp8 of 128 x fp8", "rows that are quantised already"]),
            (DType::Bf16, 640, Quantise::Fp8, ["hidden: needs 640 bytes, has 512", "hidden * dtype.size()"]),
            (
                DType::Bf16,
                512,
                Quantise::Fp8,
                ["quantise: needs 4 words of 4 bytes, has 2", "max_scales >= 4"],
            ),
        ] {
            let x = tensor(rank, dtype, columns)?;
            let request = DispatchRequest::new(&x, &layout).quantise(quantise);
            refused(rank.dispatch(&mut place, request), &parts);
        }
        let (x, column) = (tensor(rank, DType::Bf16, 128)?, tensor(rank, DType::U8, 3)?);
        let of = |quantise| DispatchRequest::new(&x, &layout).quantise(quantise);
        let request = of(Quantise::Mxfp8).column(&column);
        refused(rank.dispatch(&mut place, request), &["columns = given", "scales that are made"]);
        let scales = tensor(rank, DType::F32, 1)?.typed()?;
        let request = of(Quantise::Fp8).scales(&scales);
        refused(rank.dispatch(&mut place, request), &["x_scales = given", "x is bf16"]);
        let payload = Payload::fp8(DType::Fp8E4m3, 128)?;
        let request = of(Quantise::Fp8).payload(&payload);
        refused(rank.dispatch(&mut place, request), &["x has dtype bf16, expected fp8"]);

        x.write(&rank.stream, &[half::bf16::ONE; 512])?;
        let handle = rank.dispatch(&mut place, of(Quantise::Fp8))?.handle;
        let wide = tensor(rank, DType::Bf16, 192)?;
        let request = CachedDispatchRequest::new(&wide, &handle).quantise(Quantise::Fp8);
        refused(rank.dispatch_cached(&mut place, request), &["quantise = Fp8 of 192", "multiple of 128"]);
        Ok(())
    });
}

/// The size is available before the buffer is made.
#[test]
fn the_memory_for_quantised_rows_is_told() {
    let shape = Shape { max_tokens: 4096, hidden: 7168, dtype: DType::Bf16, max_topk: 8, max_scales: 56 };
    let sizes = Options::new(shape).sizes(8).unwrap();
    assert_eq!(sizes.quantise_bytes, 4096 * (7168 + 56 * 4));
}
