//! Rows that become MXFP8 on their way: every byte of elements and scales, by the specification.

use epoxide::driver::virt::{CheckConfig, Checker};
use epoxide::low_latency::{CombineRequest, DispatchRequest, Quantise, Received};
use epoxide::transport::TransportKind;
use epoxide::{DType, Payload, Result, StreamOrder, Tensor, TypedTensor};
use epoxide_testing::harness::NodeLinks;
use epoxide_testing::low_latency::{LowLatencyCase, LowLatencyRank, ReturnPath, RowMemory, Segments};
use epoxide_testing::oracle::{MX_BLOCK, Style, by_expert, mxfp8, recv_order};
use epoxide_testing::payload::{block_of_bf16, bytes_of, rng_of};
use epoxide_testing::tier;
use epoxide_vgpu::for_each_seed;
use half::bf16;

use crate::shapes::routing;
use crate::valid::refused;

fn case(tokens: &[u32], hidden: u32) -> LowLatencyCase {
    let routing = routing(tokens, 3, 2 * tokens.len() as u32, Style::WithHoles);
    LowLatencyCase { quantise: Quantise::Mxfp8, ..LowLatencyCase::new(routing, hidden) }
}

fn across_nodes(transport: TransportKind) -> Option<NodeLinks> {
    Some(NodeLinks { ranks_per_node: 1, transport, queues: 1 })
}

/// The row of a token in a turn: every kind of block occurs in every position.
fn row(turn: u32, hidden: u32, (source, token): (u32, u32)) -> Vec<bf16> {
    let mut rng = rng_of(&[turn.into(), source.into(), token.into()]);
    let blocks = hidden / MX_BLOCK as u32;
    (0..blocks).flat_map(|at| block_of_bf16(&mut rng, turn * 5 + source * 3 + token + at)).collect()
}

/// Elements and scales of the row as it travels.
fn as_it_travels(turn: u32, hidden: u32, of: (u32, u32)) -> (Vec<u8>, Vec<u8>) {
    mxfp8(&row(turn, hidden, of).iter().map(|value| value.to_f32()).collect::<Vec<_>>())
}

/// The rows that this rank sends in a turn.
fn rows(case: &LowLatencyCase, turn: u32, rank: u32) -> Vec<Vec<bf16>> {
    (0..case.routing.num_tokens(rank)).map(|token| row(turn, case.hidden, (rank, token))).collect()
}

fn upload(rank: &LowLatencyRank, case: &LowLatencyCase, turn: u32) -> Result<Tensor<'static>> {
    let rows: Vec<_> = rows(case, turn, rank.rank).iter().map(|row| bytes_of(row)).collect();
    rank.upload_rows(DType::Bf16, case.hidden.into(), &rows)
}

fn ids(rank: &LowLatencyRank, case: &LowLatencyCase) -> Result<TypedTensor<'static, i64>> {
    let shape = [case.routing.num_tokens(rank.rank).into(), case.routing.num_topk.into()];
    TypedTensor::from_host(&rank.stream, &shape, &case.routing.flat_topk_idx(rank.rank))
}

/// Compares a received row, and its scales: byte b of word w is the scale of block 4 w + b.
fn check_row(
    rank: &mut LowLatencyRank,
    (turn, of): (u32, (u32, u32)),
    (x, columns): (&Tensor<'_>, &[TypedTensor<'_, i32>]),
    at: usize,
) -> Result<()> {
    let (elements, scales) = as_it_travels(turn, x.columns() as u32, of);
    let got = rank.row_of(x, at)?;
    rank.equal(&format!("row {at} of {of:?}"), &got, &elements);
    let [words] = columns else { panic!("scales are one column") };
    assert_eq!(words.rows() as usize, scales.len() / 4);
    let mut got = vec![0u8; scales.len()];
    for (word, to) in got.chunks_exact_mut(4).enumerate() {
        let from = words.ptr().add(word as u64 * words.row_stride() + at as u64 * 4);
        // SAFETY: it is one of the tensor's elements.
        unsafe { rank.stream.read(to, from)? };
    }
    rank.equal(&format!("scales of row {at} of {of:?}"), &got, &scales);
    Ok(())
}

/// Compares all rows of a dispatch.
fn check_received(
    rank: &mut LowLatencyRank,
    case: &LowLatencyCase,
    turn: u32,
    received: &Received<'_>,
) -> Result<()> {
    rank.check(received.scales.is_none(), "there are no f32 scales");
    rank.check(received.x.dtype() == DType::Fp8E4m3, "rows are e4m3");
    for (source, token) in recv_order(&case.routing, rank.rank) {
        let at = (source * case.max_tokens + token) as usize;
        check_row(rank, (turn, (source, token)), (&received.x, &received.columns), at)?;
    }
    let (Some(got), Some(segments)) = (&received.by_expert, case.segments) else { return Ok(()) };
    rank.check(got.recv_x_scales.is_none(), "there are no f32 scales by expert");
    let x = got.recv_x.as_ref().expect("in memory of the call");
    for (at, of) in by_expert(&case.routing, rank.rank, segments.alignment).rows.iter().enumerate() {
        let Some((source, token, _)) = *of else { continue };
        check_row(rank, (turn, (source, token)), (x, &got.recv_columns), at)?;
    }
    Ok(())
}

/// Dispatches of rows with every kind of block, each answered by a combine.
fn check(case: &LowLatencyCase) {
    case.run(|rank| {
        let stream = rank.stream.clone();
        let (mut place, order, ids) = (rank.buffer.place(0)?, StreamOrder::on(&stream), ids(rank, case)?);
        let shape = [rank.buffer.rows(), case.hidden.into()];
        let ones = vec![bf16::ONE; (shape[0] * shape[1]) as usize];
        let ones = Tensor::from_host(&stream, DType::Bf16, &shape, &ones)?;
        for turn in 0..tier::pick(2, 6) {
            let x = upload(rank, case, turn)?;
            let request = DispatchRequest::new(&x, &ids).quantise(Quantise::Mxfp8);
            let request = case.segments.iter().fold(request, |it, of| it.by_expert(of.alignment));
            let received = match case.halves {
                false => rank.buffer.dispatch(&mut place, request, order)?,
                true => rank.buffer.dispatch_send(&mut place, request, order)?.receive(order)?,
            };
            stream.synchronize()?;
            rank.buffer.check()?;
            check_received(rank, case, turn, &received)?;
            drop(rank.buffer.combine(received, CombineRequest::by_row(&ones), order)?);
            rank.synchronize()?;
        }
        Ok(())
    });
}

/// Blocks with one token and with several, of one turn through a row and of several.
#[test]
fn every_kind_of_block_within_a_node() {
    let cases = [([7, 0, 5], 512, 24), ([13, 9, 20], 384, 2), ([3, 2, 4], 9088, 3)];
    for (number, (tokens, hidden, sm_count)) in cases.into_iter().enumerate() {
        for halves in tier::pick(vec![number == 0], vec![false, true]) {
            check(&LowLatencyCase { halves, sm_count, ..case(&tokens, hidden) });
        }
    }
}

#[test]
fn every_kind_of_block_across_nodes() {
    for transport in tier::sample([TransportKind::Direct, TransportKind::Shm, TransportKind::Tcp]) {
        let nodes = across_nodes(transport);
        check(&LowLatencyCase { nodes, ..case(&[7, 5, 1], 512) });
    }
}

#[test]
fn every_kind_of_block_by_expert() {
    let segments = Some(Segments::aligned(4));
    check(&LowLatencyCase { segments, ..case(&[7, 5], 1280) });
    check(&LowLatencyCase { segments, nodes: across_nodes(TransportKind::Direct), ..case(&[4, 6], 512) });
}

#[test]
fn every_kind_of_block_between_many_ranks() {
    check(&case(&[3, 0, 4, 1, 2, 2, 0, 5, 3], 256));
    let segments = Some(Segments::aligned(8));
    check(&LowLatencyCase { segments, halves: true, ..case(&[1, 2, 0, 3, 1, 0, 2, 1, 1], 384) });
}

/// Round trips of usual rows, in all ways in which they are sent, received and answered.
#[test]
fn round_trips() {
    let nodes = across_nodes(TransportKind::Shm);
    let caller = Some(Segments { alignment: 8, memory: RowMemory::Caller, unweighted: false });
    let first = LowLatencyCase { rounds: 3, places: 2, ..case(&[6, 5, 3], 640) };
    LowLatencyCase { halves: true, own_memory: true, ..first.clone() }.check();
    LowLatencyCase { combine_rows: ReturnPath::InPool, sm_count: 1, ..first.clone() }.check();
    LowLatencyCase { quantise_back: Quantise::Fp8, packet_tokens: 0, segments: caller, ..first.clone() }
        .check();
    LowLatencyCase { nodes, segments: caller, own_memory: true, ..first.clone() }.check();
    LowLatencyCase { combine_dtype: DType::F32, unanswered: 2, measures: true, ..first }.check();
}

#[test]
fn steps_and_chains() {
    let case = LowLatencyCase { rounds: 3, places: 2, ..case(&[3, 5, 2], 256) };
    case.check_replayed(tier::pick(3, 20));
    LowLatencyCase { rounds: tier::pick(8, 60), segments: Some(Segments::aligned(8)), ..case }
        .check_chained();
}

/// Each run of a step converts the rows' contents at that time.
#[test]
fn runs_of_a_step_convert_new_rows() {
    for nodes in [None, across_nodes(TransportKind::Direct)] {
        let case = LowLatencyCase { nodes, ..case(&[5, 3], 384) };
        case.run(|rank| {
            let stream = rank.stream.clone();
            let (mut place, ids, given) = (rank.buffer.place(0)?, ids(rank, &case)?, upload(rank, &case, 0)?);
            let step = rank.buffer.capture(&stream, |buffer, order| {
                let request = DispatchRequest::new(&given, &ids).quantise(Quantise::Mxfp8);
                Ok(buffer.dispatch(&mut place, request, order)?.detach())
            })?;
            for turn in 1..4 {
                given.write(&stream, &rows(&case, turn, rank.rank).concat())?;
                step.launch(&stream)?;
                step.check(&stream)?;
                check_received(rank, &case, turn, step.output().at(&place)?)?;
                rank.synchronize()?;
            }
            Ok(())
        });
    }
}

/// A caller's graph allocates nothing, and its replays convert the rows' contents at that time.
/// Every byte of the given memory is compared: padding keeps its contents.
#[test]
fn a_graph_with_memory_of_the_caller_converts_new_rows() {
    for nodes in [None, across_nodes(TransportKind::Direct)] {
        let case = LowLatencyCase { nodes, segments: Some(Segments::aligned(4)), ..case(&[5, 3], 384) };
        case.run(|rank| {
            let stream = rank.stream.clone();
            let (mut place, ids, given) = (rank.buffer.place(0)?, ids(rank, &case)?, upload(rank, &case, 0)?);
            let room = case.room_by_expert().expect("there are segments");
            let hidden = u64::from(case.hidden);
            let (lines, device) = (hidden / 128, stream.device());
            let recv_x = Tensor::alloc(device, DType::Fp8E4m3, &[room, hidden])?;
            let columns = TypedTensor::<i32>::from_host(&stream, &[lines, room], &before(lines * room))?;
            let graph = stream.capture(|| {
                let request = DispatchRequest::new(&given, &ids).quantise(Quantise::Mxfp8).by_expert(4);
                let request = request.recv_x(&recv_x).recv_columns(&columns);
                let received = rank.buffer.dispatch(&mut place, request, StreamOrder::on(&stream))?;
                let got = received.by_expert.as_ref().expect("asked for");
                assert!(got.recv_x.is_none() && got.recv_columns.is_empty(), "they are the caller's");
                Ok(())
            })?;
            let plan = by_expert(&case.routing, rank.rank, 4).rows;
            for turn in 1..4 {
                given.write(&stream, &rows(&case, turn, rank.rank).concat())?;
                columns.write(&stream, &before(lines * room))?;
                // SAFETY: the recorded addresses are this function's, which waits below.
                unsafe { graph.launch(&stream)? };
                stream.synchronize()?;
                rank.buffer.check()?;
                let mut want = before(lines * room);
                for (at, of) in plan.iter().enumerate() {
                    let Some((source, token, _)) = *of else { continue };
                    let (elements, scales) = as_it_travels(turn, case.hidden, (source, token));
                    let got = rank.row_of(&recv_x, at)?;
                    rank.equal(&format!("row {at} of turn {turn}"), &got, &elements);
                    for (line, word) in scales.as_chunks::<4>().0.iter().enumerate() {
                        want[line * room as usize + at] = i32::from_le_bytes(*word);
                    }
                }
                rank.equal(&format!("scales of turn {turn}"), &columns.values(&stream)?, &want);
                rank.synchronize()?;
            }
            Ok(())
        });
    }
}

/// Words of memory that nothing was stored to.
fn before(count: u64) -> Vec<i32> {
    vec![0x5a5a_a5a5; count as usize]
}

#[test]
fn the_checker_finds_nothing() {
    for_each_seed(tier::pick(4, 20), |seed| {
        let weak = (seed % 2 == 1).then_some(seed);
        let config = CheckConfig { races: weak.is_none(), weak_memory: weak, ..CheckConfig::default() };
        let (checker, schedule_seed) = (Some(Checker::new(config)), Some(seed));
        let nodes = across_nodes(TransportKind::Shm).filter(|_| seed % 4 == 2);
        let segments = (seed % 4 >= 2).then_some(Segments::aligned(4));
        check(&LowLatencyCase { checker, schedule_seed, nodes, segments, sm_count: 2, ..case(&[9, 3], 256) });
    });
}

/// Rank 0 has its rows converted, the others give rows that are MXFP8 already, with their scales. In
/// buffers of 65 to 128 tokens f32 scales travel as packets.
#[test]
fn rows_that_are_mxfp8_already_come_to_the_same() {
    let few = |nodes| LowLatencyCase { nodes, ..case(&[4, 6, 3], 512) };
    let many = |tokens: [u32; 2], segments| LowLatencyCase { segments, sm_count: 4, ..case(&tokens, 512) };
    let by_expert = Some(Segments::aligned(4));
    for case in [
        few(None),
        few(across_nodes(TransportKind::Direct)),
        many([70, 66], None),
        many([100, 3], None),
        many([3, 100], by_expert),
        many([66, 70], by_expert),
    ] {
        case.run(|rank| {
            let stream = rank.stream.clone();
            let (mut place, ids, hidden) = (rank.buffer.place(0)?, ids(rank, &case)?, case.hidden);
            let bf16 = upload(rank, &case, 0)?;
            let made = (0..case.routing.num_tokens(rank.rank))
                .map(|token| as_it_travels(0, hidden, (rank.rank, token)))
                .collect::<Vec<_>>();
            let (elements, scales): (Vec<_>, Vec<_>) = made.into_iter().unzip();
            let x = rank.upload_rows(DType::Fp8E4m3, hidden.into(), &elements)?;
            let scales = rank.upload_rows(DType::Ue8m0, u64::from(hidden) / 32, &scales)?;
            let payload = Payload::mxfp8(DType::Fp8E4m3, hidden.into())?;
            let request = match rank.rank {
                0 => DispatchRequest::new(&bf16, &ids).quantise(Quantise::Mxfp8),
                _ => DispatchRequest::new(&x, &ids).column(&scales).payload(&payload),
            };
            let request = case.segments.iter().fold(request, |it, of| it.by_expert(of.alignment));
            let received = rank.buffer.dispatch(&mut place, request, StreamOrder::on(&stream))?;
            stream.synchronize()?;
            rank.buffer.check()?;
            check_received(rank, &case, 0, &received)
        });
    }
}

/// Rows with f32 scales have as many bytes, and are another call.
#[test]
fn ranks_that_quantise_otherwise_are_told_apart() {
    let with_f32 = "256 x fp8 (256 bytes) per row and f32 scales";
    for (nodes, other, rows) in [
        (None, Quantise::Fp8, with_f32),
        (None, Quantise::None, "256 x bf16 (512 bytes) per row"),
        (across_nodes(TransportKind::Direct), Quantise::Fp8PowerOfTwo, with_f32),
    ] {
        let texts = [("256 x fp8 (256 bytes) per row and UE8M0 scales of 32 elements", 0), (rows, 1)]
            .map(|(rows, rank)| format!("low-latency dispatch in place 0 with {rows} on rank {rank}"));
        let case = LowLatencyCase { nodes, ..case(&[4, 4], 256) };
        case.run(|rank| {
            let stream = rank.stream.clone();
            let (mut place, ids, x) = (rank.buffer.place(0)?, ids(rank, &case)?, upload(rank, &case, 0)?);
            let quantise = if rank.rank == 0 { Quantise::Mxfp8 } else { other };
            let request = DispatchRequest::new(&x, &ids).quantise(quantise);
            let received = rank.buffer.dispatch(&mut place, request, StreamOrder::on(&stream))?;
            stream.synchronize()?;
            refused(rank.buffer.check(), &[&texts[0], &texts[1]]);
            drop(received);
            Ok(())
        });
    }
}

#[test]
fn wrong_use_is_refused() {
    let uneven = LowLatencyCase { quantise: Quantise::None, ..case(&[4, 4], 96) };
    uneven.run(|rank| {
        let (mut place, ids) = (rank.buffer.place(0)?, ids(rank, &uneven)?);
        let x = Tensor::alloc(rank.stream.device(), DType::Bf16, &[4, 96])?;
        let request = DispatchRequest::new(&x, &ids).quantise(Quantise::Mxfp8);
        let refusal = rank.buffer.dispatch(&mut place, request, StreamOrder::on(&rank.stream));
        refused(refusal, &["quantise = Mxfp8 of 96 x bf16", "multiple of 128"]);
        Ok(())
    });
    let even = LowLatencyCase { segments: Some(Segments::aligned(4)), ..case(&[4, 4], 256) };
    even.run(|rank| {
        let stream = rank.stream.clone();
        let (mut place, order, ids) = (rank.buffer.place(0)?, StreamOrder::on(&stream), ids(rank, &even)?);
        let tensor = |dtype, columns| Tensor::alloc(stream.device(), dtype, &[4, columns]);
        let (x, f16, e4m3) =
            (tensor(DType::Bf16, 256)?, tensor(DType::F16, 256)?, tensor(DType::Fp8E4m3, 256)?);
        let (words, scales) = (tensor(DType::I32, 2)?, tensor(DType::F32, 2)?.typed()?);
        let of = |x| DispatchRequest::new(x, &ids).quantise(Quantise::Mxfp8);
        let mut refuse = |request: DispatchRequest<'_>, parts: &[&str]| {
            refused(rank.buffer.dispatch(&mut place, request, order), parts);
        };
        refuse(of(&f16), &["quantise = Mxfp8 of 256 x f16", "bf16 rows"]);
        refuse(of(&e4m3), &["quantise = Mxfp8 of 256 x fp8", "bf16 rows"]);
        refuse(of(&x).column(&words), &["columns = given", "in the place of scales"]);
        refuse(of(&x).scales(&scales), &["scales = given", "x is bf16"]);
        let room = even.room_by_expert().expect("there are segments");
        let of_rows = Tensor::alloc(stream.device(), DType::F32, &[2, room])?.typed()?;
        refuse(of(&x).by_expert(4).recv_x_scales(&of_rows), &["recv_x_scales = given", "recv_columns"]);
        let words_of = |shape: [u64; 2]| Tensor::alloc(stream.device(), DType::I32, &shape)?.typed::<i32>();
        let (lines, few, right) = (words_of([1, room])?, words_of([2, room - 1])?, words_of([2, room])?);
        let of_words = |words| of(&x).by_expert(4).recv_columns(words);
        refuse(of_words(&lines), &["recv_columns has shape [1, ", "words = 2"]);
        let parts = [format!("[2, {}]", room - 1), format!("rows_by_expert = {room}")];
        refuse(of_words(&few), &["recv_columns has shape", &parts[0], &parts[1]]);
        refuse(of(&x).recv_columns(&right), &["recv_columns = given", "by_expert"]);
        let plain = DispatchRequest::new(&x, &ids).by_expert(4).recv_columns(&right);
        refuse(plain, &["recv_columns = given", "no columns"]);
        refuse(plain.quantise(Quantise::Fp8), &["recv_columns = given", "scales of f32", "recv_x_scales"]);
        let wide = Tensor::alloc(stream.device(), DType::Bf16, &[room, 256])?;
        refuse(of(&x).by_expert(4).recv_x(&wide), &["recv_x has dtype bf16", "fp8"]);
        // No work was enqueued. A combine does not convert so, and the buffer still works.
        let x = upload(rank, &even, 0)?;
        for quantise in [Quantise::Mxfp8, Quantise::None] {
            let received = rank.buffer.dispatch(&mut place, of(&x), order)?;
            let ones = Tensor::alloc(stream.device(), DType::Bf16, &[rank.buffer.rows(), 256])?;
            ones.write(&stream, &vec![bf16::ONE; (ones.rows() * 256) as usize])?;
            let request = CombineRequest::by_row(&ones).quantise(quantise);
            let combined = rank.buffer.combine(received, request, order).map(drop);
            match quantise {
                Quantise::None => combined?,
                _ => refused(combined, &["quantise = Mxfp8", "Fp8PowerOfTwo"]),
            }
        }
        stream.synchronize()?;
        rank.buffer.check()
    });
}
