//! Rows of any type with columns, which arrive as words, a row's in a column of the tensor.

use epoxide::driver::virt::{CheckConfig, Checker};
use epoxide::low_latency::{CombineRequest, DispatchRequest, Quantise, Received};
use epoxide::transport::TransportKind;
use epoxide::{DType, Payload, Result, StreamOrder, Tensor, TypedTensor};
use epoxide_testing::harness::NodeLinks;
use epoxide_testing::low_latency::{LowLatencyCase, LowLatencyRank, Segments};
use epoxide_testing::oracle::{Routing, Style, by_expert, low_latency_plan, recv_order};
use epoxide_testing::payload::{Format, rng_of};
use epoxide_testing::tier;
use epoxide_vgpu::for_each_seed;
use half::bf16;
use rand::RngCore;

use crate::shapes::routing;
use crate::valid::refused;

/// Elements of a row: whole blocks of each format.
const HIDDEN: u64 = 512;
const FORMATS: [Format; 6] =
    [Format::Bf16, Format::F16, Format::Fp8E5m2, Format::Fp8Ue8m0, Format::Mxfp8, Format::Nvfp4];

fn case(tokens: &[u32], format: Format) -> LowLatencyCase {
    let experts = 2 * tokens.len() as u32;
    let routing = routing(tokens, 3, experts, Style::WithHoles);
    let max_scales = format.payload(HIDDEN).max_scales();
    LowLatencyCase { max_scales, ..LowLatencyCase::new(routing, HIDDEN as u32) }
}

/// Each of three nodes gets all tokens of the others. A column has as many words as there is room
/// for without `max_scales`, so that messages are full to the last slot.
#[test]
fn full_messages_have_room_for_a_column() {
    const TOKENS: u32 = 128;
    const HIDDEN: u64 = 2048;
    let to_all: Vec<i64> = (0..8).map(|entry| entry % 3 * 8 + entry).collect();
    let topk_idx = vec![vec![to_all; TOKENS as usize]; 3];
    let nodes = Some(NodeLinks { ranks_per_node: 1, transport: TransportKind::Direct, queues: 1 });
    let routing = Routing { num_experts: 24, num_topk: 8, topk_idx };
    let case = LowLatencyCase { nodes, ..LowLatencyCase::new(routing, HIDDEN as u32) };
    case.run(|rank| {
        let topk_idx = rank.upload_typed(8, &case.routing.topk_idx[rank.rank as usize])?;
        let x = upload(rank, &case, 0, 0, (DType::Bf16, HIDDEN))?;
        let column = upload(rank, &case, 0, 1, (DType::F32, HIDDEN / 128))?;
        let mut place = rank.buffer.place(0)?;
        let stream = rank.stream.clone();
        let request = DispatchRequest::new(&x, &topk_idx).column(&column);
        let received = rank.buffer.dispatch(&mut place, request, StreamOrder::on(&stream))?;
        for (source, token) in recv_order(&case.routing, rank.rank) {
            let row = (source * case.max_tokens + token) as usize;
            let (got, sent) = (rank.row_of(&received.x, row)?, (source, token));
            rank.equal(&format!("row {row}"), &got, &bytes(0, sent, 0, HIDDEN * 2));
            let got = words_of(rank, &received.columns[0], row)?;
            rank.equal(&format!("column of row {row}"), &got, &bytes(0, sent, 1, HIDDEN / 32));
        }
        Ok(())
    });
}

/// The bytes of a token's row (part 0), or of a column of it.
fn bytes(turn: u64, (rank, token): (u32, u32), part: usize, count: u64) -> Vec<u8> {
    let mut bytes = vec![0; count as usize];
    rng_of(&[turn, rank.into(), token.into(), part as u64]).fill_bytes(&mut bytes);
    bytes
}

/// The part of each token that this rank sends: `elements` of the dtype.
fn upload(
    rank: &LowLatencyRank,
    case: &LowLatencyCase,
    turn: u64,
    part: usize,
    (dtype, elements): (DType, u64),
) -> Result<Tensor<'static>> {
    let tokens = case.routing.num_tokens(rank.rank);
    let count = elements * dtype.size();
    let rows: Vec<_> = (0..tokens).map(|token| bytes(turn, (rank.rank, token), part, count)).collect();
    rank.upload_rows(dtype, elements, &rows)
}

/// Compares a received row and its columns.
fn check_row(
    rank: &mut LowLatencyRank,
    format: Format,
    (turn, source): (u64, (u32, u32)),
    (x, columns): (&Tensor<'_>, &[TypedTensor<'_, i32>]),
    row: usize,
) -> Result<()> {
    let got = rank.row_of(x, row)?;
    let want = bytes(turn, source, 0, format.payload(HIDDEN).row_bytes());
    rank.equal(&format!("row {row} of {source:?}"), &got, &want);
    check_columns(rank, format, (turn, source), columns, row)
}

/// The words of a row's column.
fn words_of(rank: &LowLatencyRank, words: &TypedTensor<'_, i32>, row: usize) -> Result<Vec<u8>> {
    let mut got = vec![0u8; words.rows() as usize * 4];
    for (word, to) in got.chunks_exact_mut(4).enumerate() {
        let at = words.ptr().add(word as u64 * words.row_stride() + row as u64 * 4);
        // SAFETY: it is one of the tensor's elements.
        unsafe { rank.stream.read(to, at)? };
    }
    Ok(got)
}

/// Compares the columns of a row.
fn check_columns(
    rank: &mut LowLatencyRank,
    format: Format,
    (turn, source): (u64, (u32, u32)),
    columns: &[TypedTensor<'_, i32>],
    row: usize,
) -> Result<()> {
    let payload = format.payload(HIDDEN);
    rank.check(columns.len() == payload.columns().len(), "columns are those of the payload");
    for (index, (words, &(dtype, elements))) in columns.iter().zip(payload.columns()).enumerate() {
        let want = bytes(turn, source, index + 1, elements * dtype.size());
        let mut got = words_of(rank, words, row)?;
        got.truncate(want.len());
        rank.equal(&format!("column {index} of row {row} of {source:?}"), &got, &want);
    }
    Ok(())
}

fn check_received(
    rank: &mut LowLatencyRank,
    case: &LowLatencyCase,
    format: Format,
    turn: u64,
    received: &Received<'_>,
) -> Result<()> {
    for (source, token) in recv_order(&case.routing, rank.rank) {
        let row = (source * case.max_tokens + token) as usize;
        check_row(rank, format, (turn, (source, token)), (&received.x, &received.columns), row)?;
    }
    let (Some(got), Some(segments)) = (&received.by_expert, case.segments) else { return Ok(()) };
    let x = got.recv_x.as_ref().expect("in memory of the call");
    for (row, of) in by_expert(&case.routing, rank.rank, segments.alignment).rows.iter().enumerate() {
        let Some((source, token, _)) = *of else { continue };
        check_row(rank, format, (turn, (source, token)), (x, &got.recv_columns), row)?;
    }
    Ok(())
}

/// Compares the expert-major copy of rows and columns.
fn check_gathered(
    rank: &mut LowLatencyRank,
    case: &LowLatencyCase,
    format: Format,
    turn: u64,
    received: &Received<'_>,
) -> Result<()> {
    let stream = rank.stream.clone();
    let (experts, rows) = (u64::from(rank.buffer.local_experts()), rank.buffer.rows());
    let x = Tensor::alloc(stream.device(), received.x.dtype(), &[experts * rows, received.x.columns()])?;
    let lines: Vec<u64> = received.columns.iter().map(|column| column.rows()).collect();
    let words = lines.iter().sum::<u64>();
    let untouched = vec![0x5a5a_5a5ai32; (experts * words * rows) as usize];
    let columns = TypedTensor::from_host(&stream, &[experts * words, rows], &untouched)?;
    let order = StreamOrder::on(&stream);
    match words {
        0 => rank.buffer.gather_by_expert(received, &x, None, order)?,
        _ => rank.buffer.gather_columns_by_expert(received, &x, &columns, order)?,
    };
    let all = columns.values(&stream)?;
    for (expert, list) in low_latency_plan(&case.routing, rank.rank).expert_rows.iter().enumerate() {
        // The columns of this expert's rows, each as the dispatch would bring them.
        let mut first = expert as u64 * words;
        let mut of_expert = Vec::new();
        for &lines in &lines {
            let at = (first * rows) as usize..((first + lines) * rows) as usize;
            of_expert.push(TypedTensor::from_host(&stream, &[lines, rows], &all[at])?);
            first += lines;
        }
        for (index, &source) in list.iter().enumerate() {
            let line = expert * rows as usize + index;
            rank.equal(
                &format!("row {index} of expert {expert}"),
                &rank.row_of(&x, line)?,
                &bytes(turn, source, 0, format.payload(HIDDEN).row_bytes()),
            );
            check_columns(rank, format, (turn, source), &of_expert, index)?;
        }
        let behind = |line: usize| &all[line * rows as usize..][list.len()..rows as usize];
        let lines = expert * words as usize..(expert + 1) * words as usize;
        let is_kept = lines.clone().all(|line| behind(line).iter().all(|word| *word == untouched[0]));
        rank.check(is_kept, format!("words behind the rows of expert {expert} are as they were"));
    }
    Ok(())
}

/// Dispatches of a format, each answered by a combine.
fn check(case: &LowLatencyCase, format: Format) {
    case.run(|rank| {
        let stream = rank.stream.clone();
        let (mut place, payload) = (rank.buffer.place(0)?, format.payload(HIDDEN));
        let tokens = u64::from(case.routing.num_tokens(rank.rank));
        let ids = case.routing.flat_topk_idx(rank.rank);
        let ids = TypedTensor::from_host(&stream, &[tokens, case.routing.num_topk.into()], &ids)?;
        let ones = vec![bf16::ONE; (rank.buffer.rows() * HIDDEN) as usize];
        let ones = Tensor::from_host(&stream, DType::Bf16, &[rank.buffer.rows(), HIDDEN], &ones)?;
        for turn in 0..3 {
            let x = upload(rank, case, turn, 0, payload.row())?;
            let columns = (1..).zip(payload.columns());
            let columns =
                columns.map(|(part, &of)| upload(rank, case, turn, part, of)).collect::<Result<Vec<_>>>()?;
            let request = DispatchRequest::new(&x, &ids).payload(&payload);
            let request = columns.iter().fold(request, DispatchRequest::column);
            let request = case.segments.iter().fold(request, |it, of| it.by_expert(of.alignment));
            let order = StreamOrder::on(&stream);
            let received = match case.halves {
                false => rank.buffer.dispatch(&mut place, request, order)?,
                true => rank.buffer.dispatch_send(&mut place, request, order)?.receive(order)?,
            };
            stream.synchronize()?;
            rank.buffer.check()?;
            check_received(rank, case, format, turn, &received)?;
            check_gathered(rank, case, format, turn, &received)?;
            let combined = rank.buffer.combine(received, CombineRequest::by_row(&ones), order)?;
            let sums = combined.x.to_host::<bf16>(&stream)?;
            for token in 0..tokens as u32 {
                let want = bf16::from_f32(case.routing.num_destinations(rank.rank, token) as f32);
                let got = &sums[(u64::from(token) * HIDDEN) as usize..][..HIDDEN as usize];
                rank.check(got.iter().all(|&it| it == want), format!("sum of token {token} is {want}"));
            }
        }
        Ok(())
    });
}

#[test]
fn every_format_within_a_node() {
    for (number, format) in FORMATS.into_iter().enumerate() {
        check(&LowLatencyCase { halves: number % 2 == 1, ..case(&[7, 0, 5], format) }, format);
    }
}

/// Blocks with several tokens send their words together.
#[test]
fn more_tokens_than_blocks() {
    for format in [Format::Mxfp8, Format::Nvfp4] {
        check(&LowLatencyCase { sm_count: 2, ..case(&[21, 40], format) }, format);
    }
}

#[test]
fn every_format_across_nodes() {
    let transports = tier::pick(vec![TransportKind::Direct], vec![TransportKind::Direct, TransportKind::Tcp]);
    for (format, transport) in FORMATS.into_iter().flat_map(|of| transports.iter().map(move |&it| (of, it))) {
        let nodes = Some(NodeLinks { ranks_per_node: 1, transport, queues: 1 });
        check(&LowLatencyCase { nodes, ..case(&[7, 5], format) }, format);
    }
}

#[test]
fn columns_by_expert() {
    for format in [Format::Mxfp8, Format::Fp8Ue8m0, Format::F16] {
        for nodes in
            [None, Some(NodeLinks { ranks_per_node: 1, transport: TransportKind::Direct, queues: 1 })]
        {
            let segments = Some(Segments::aligned(4));
            check(&LowLatencyCase { nodes, segments, ..case(&[7, 5], format) }, format);
        }
    }
}

/// A caller's graph allocates nothing if a column needs no copy first. Its replays send the
/// contents of rows and column at that time, and padding keeps its contents.
#[test]
fn a_graph_with_memory_of_the_caller_brings_new_columns() {
    for format in [Format::Mxfp8, Format::Fp8Ue8m0] {
        let segments = Some(Segments::aligned(4));
        let case = LowLatencyCase { segments, ..case(&[7, 5], format) };
        check_given(&case, &format.payload(HIDDEN), Recorded::ByCaller);
    }
    let nodes = Some(NodeLinks { ranks_per_node: 1, transport: TransportKind::Direct, queues: 1 });
    let case = LowLatencyCase { nodes, segments: Some(Segments::aligned(4)), ..case(&[4, 6], Format::Mxfp8) };
    check_given(&case, &Format::Mxfp8.payload(HIDDEN), Recorded::ByCaller);
}

/// Several columns are lines of one tensor, and `Buffer::capture` makes the block for their copy.
#[test]
fn several_columns_come_to_memory_of_the_caller() {
    let parts = [(DType::U8, 5), (DType::F16, 1), (DType::I32, 1)];
    let payload =
        parts.iter().try_fold(Payload::rows(DType::Bf16, HIDDEN).unwrap(), |payload, &(dtype, n)| {
            payload.column(dtype, n)
        });
    let payload = payload.unwrap();
    assert_eq!(payload.max_scales(), 4);
    let case = LowLatencyCase {
        segments: Some(Segments::aligned(4)),
        max_scales: payload.max_scales(),
        ..case(&[7, 5], Format::Bf16)
    };
    check_given(&case, &payload, Recorded::ByBuffer);
}

/// Recorder of a graph.
#[derive(Clone, Copy)]
enum Recorded {
    ByCaller,
    ByBuffer,
}

/// Checks replays of a dispatch by expert into the caller's memory for rows and columns.
fn check_given(case: &LowLatencyCase, payload: &Payload, recorded: Recorded) {
    case.run(|rank| {
        let stream = rank.stream.clone();
        let mut place = rank.buffer.place(0)?;
        let tokens = u64::from(case.routing.num_tokens(rank.rank));
        let ids = case.routing.flat_topk_idx(rank.rank);
        let ids = TypedTensor::from_host(&stream, &[tokens, case.routing.num_topk.into()], &ids)?;
        let parts: Vec<_> = std::iter::once(payload.row()).chain(payload.columns().iter().copied()).collect();
        let inputs = |rank: &LowLatencyRank, turn| -> Result<Vec<Tensor<'static>>> {
            (0..).zip(&parts).map(|(part, &of)| upload(rank, case, turn, part, of)).collect()
        };
        let given = inputs(rank, 0)?;
        let (room, lines) = (case.room_by_expert().expect("segments"), u64::from(payload.max_scales()));
        let recv_x = Tensor::alloc(stream.device(), payload.row().0, &[room, payload.row().1])?;
        let before = vec![0x5a5a_a5a5; (lines * room) as usize];
        let columns = TypedTensor::<i32>::from_host(&stream, &[lines, room], &before)?;
        let request = DispatchRequest::new(&given[0], &ids).payload(payload).by_expert(4);
        let request = given[1..].iter().fold(request, DispatchRequest::column);
        let request = request.recv_x(&recv_x).recv_columns(&columns);
        let (mut graph, mut step) = (None, None);
        match recorded {
            Recorded::ByCaller => {
                let record = || {
                    let received = rank.buffer.dispatch(&mut place, request, StreamOrder::on(&stream))?;
                    let got = received.by_expert.as_ref().expect("asked for");
                    assert!(got.recv_x.is_none() && got.recv_columns.is_empty(), "they are the caller's");
                    Ok(())
                };
                graph = Some(stream.capture(record)?);
            }
            Recorded::ByBuffer => {
                step = Some(rank.buffer.capture(&stream, |buffer, order| {
                    Ok(buffer.dispatch(&mut place, request, order)?.detach())
                })?);
            }
        }
        let plan = by_expert(&case.routing, rank.rank, 4).rows;
        for turn in 1..4 {
            let fresh = inputs(rank, turn)?;
            for (to, from) in given.iter().zip(&fresh) {
                // SAFETY: both have as many bytes, and outlive the stream's work.
                unsafe { stream.copy(to.ptr(), from.ptr(), to.rows() * to.row_bytes())? };
            }
            columns.write(&stream, &before)?;
            // SAFETY: the recorded addresses are this function's, which waits below.
            graph.iter().try_for_each(|graph| unsafe { graph.launch(&stream) })?;
            step.iter().try_for_each(|step| step.launch(&stream))?;
            stream.synchronize()?;
            rank.buffer.check()?;
            let got = columns.values(&stream)?;
            let word = |line: u64, row: usize| got[line as usize * room as usize + row].to_le_bytes();
            for (row, of) in plan.iter().enumerate() {
                let Some((source, token, _)) = *of else {
                    let is_kept = (0..lines).all(|line| word(line, row) == 0x5a5a_a5a5i32.to_le_bytes());
                    rank.check(is_kept, format!("padding row {row} was written"));
                    continue;
                };
                let of = (source, token);
                let x = rank.row_of(&recv_x, row)?;
                rank.equal(&format!("row {row} of {of:?}"), &x, &bytes(turn, of, 0, payload.row_bytes()));
                let mut first = 0;
                for (index, &(dtype, elements)) in payload.columns().iter().enumerate() {
                    let want = bytes(turn, of, index + 1, elements * dtype.size());
                    let end = first + (want.len() as u64).div_ceil(4);
                    let mut got: Vec<_> = (first..end).flat_map(|line| word(line, row)).collect();
                    got.truncate(want.len());
                    rank.equal(&format!("column {index} of row {row} of {of:?}"), &got, &want);
                    first = end;
                }
            }
            rank.synchronize()?;
        }
        Ok(())
    });
}

/// Columns are packed in each run, of what they hold then.
#[test]
fn runs_of_a_step_bring_new_columns() {
    let (case, format) = (case(&[5, 3], Format::Nvfp4), Format::Nvfp4);
    case.run(|rank| {
        let stream = rank.stream.clone();
        let (mut place, payload) = (rank.buffer.place(0)?, format.payload(HIDDEN));
        let tokens = u64::from(case.routing.num_tokens(rank.rank));
        let ids = case.routing.flat_topk_idx(rank.rank);
        let ids = TypedTensor::from_host(&stream, &[tokens, case.routing.num_topk.into()], &ids)?;
        let parts: Vec<_> = std::iter::once(payload.row()).chain(payload.columns().iter().copied()).collect();
        let inputs = |rank: &LowLatencyRank, turn| -> Result<Vec<Tensor<'static>>> {
            (0..).zip(&parts).map(|(part, &of)| upload(rank, &case, turn, part, of)).collect()
        };
        let given = inputs(rank, 0)?;
        let step = rank.buffer.capture(&stream, |buffer, order| {
            let request = DispatchRequest::new(&given[0], &ids).payload(&payload);
            let request = given[1..].iter().fold(request, DispatchRequest::column);
            Ok(buffer.dispatch(&mut place, request, order)?.detach())
        })?;
        for turn in 1..4 {
            let fresh = inputs(rank, turn)?;
            for (to, from) in given.iter().zip(&fresh) {
                // SAFETY: both have as many bytes, and outlive the stream's work.
                unsafe { stream.copy(to.ptr(), from.ptr(), to.rows() * to.row_bytes())? };
            }
            step.launch(&stream)?;
            step.check(&stream)?;
            check_received(rank, &case, format, turn, step.output().at(&place)?)?;
            rank.synchronize()?;
        }
        Ok(())
    });
}

#[test]
fn the_checker_finds_nothing() {
    for_each_seed(tier::pick(2, 20), |seed| {
        let weak = (seed % 2 == 1).then_some(seed);
        let config = CheckConfig { races: weak.is_none(), weak_memory: weak, ..CheckConfig::default() };
        let (checker, schedule_seed) = (Some(Checker::new(config)), Some(seed));
        let format = if seed % 4 < 2 { Format::Nvfp4 } else { Format::Mxfp8 };
        check(&LowLatencyCase { checker, schedule_seed, ..case(&[5, 3], format) }, format);
    });
}

/// As many bytes in columns of another type are another call.
#[test]
fn ranks_with_other_columns_are_told_apart() {
    for nodes in [None, Some(NodeLinks { ranks_per_node: 1, transport: TransportKind::Direct, queues: 1 })] {
        let case = LowLatencyCase { nodes, ..case(&[4, 4], Format::Mxfp8) };
        case.run(|rank| {
            let stream = rank.stream.clone();
            let (mut place, order) = (rank.buffer.place(0)?, StreamOrder::on(&stream));
            let ids = TypedTensor::from_host(&stream, &[4, 3], &case.routing.flat_topk_idx(rank.rank))?;
            let payload = Format::Mxfp8.payload(HIDDEN);
            let x = upload(rank, &case, 0, 0, payload.row())?;
            let dtype = if rank.rank == 0 { DType::Ue8m0 } else { DType::U8 };
            let column = upload(rank, &case, 0, 1, (dtype, payload.columns()[0].1))?;
            let request = DispatchRequest::new(&x, &ids).column(&column);
            let received = rank.buffer.dispatch(&mut place, request, order)?;
            stream.synchronize()?;
            let usual =
                "place 0 with 512 x fp8 (512 bytes) per row and UE8M0 scales of 32 elements on rank 0";
            refused(rank.buffer.check(), &[usual, "that are none of the usual formats (number "]);
            drop(received);
            Ok(())
        });
    }
}

/// As many bytes of another type are another call.
#[test]
fn ranks_with_rows_of_other_types_are_told_apart() {
    for nodes in [None, Some(NodeLinks { ranks_per_node: 1, transport: TransportKind::Direct, queues: 1 })] {
        let types = [
            [DType::Bf16, DType::F16],
            [DType::Fp8E4m3, DType::Fp8E5m2],
            [DType::Fp8E4m3, DType::U8],
            [DType::Bf16, DType::Fp8E4m3],
        ];
        for dtypes in types {
            let case = LowLatencyCase { nodes, ..case(&[4, 4], Format::Bf16) };
            case.run(|rank| {
                let stream = rank.stream.clone();
                let (mut place, order) = (rank.buffer.place(0)?, StreamOrder::on(&stream));
                let ids = TypedTensor::from_host(&stream, &[4, 3], &case.routing.flat_topk_idx(rank.rank))?;
                let x = Tensor::alloc(stream.device(), dtypes[rank.rank as usize], &[4, HIDDEN])?;
                let received = rank.buffer.dispatch(&mut place, DispatchRequest::new(&x, &ids), order)?;
                stream.synchronize()?;
                let rows = dtypes.map(|dtype| {
                    format!("in place 0 with 512 x {dtype} ({} bytes) per row", 512 * dtype.size())
                });
                refused(rank.buffer.check(), &[&rows[0], &rows[1]]);
                drop(received);
                Ok(())
            });
        }
    }
}

#[test]
fn wrong_payloads_are_refused() {
    let case = LowLatencyCase {
        segments: Some(Segments::aligned(4)),
        max_scales: 44,
        ..case(&[4, 4], Format::Bf16)
    };
    case.run(|rank| {
        let stream = rank.stream.clone();
        let (mut place, order) = (rank.buffer.place(0)?, StreamOrder::on(&stream));
        let ids = case.routing.flat_topk_idx(rank.rank);
        let ids = TypedTensor::from_host(&stream, &[4, 3], &ids)?;
        let tensor = |dtype, columns| Tensor::alloc(stream.device(), dtype, &[4, columns]);
        let (x, long) = (tensor(DType::U8, 512)?, tensor(DType::U8, 1040)?);
        let (words, many) = (tensor(DType::I32, 44)?, tensor(DType::I32, 45)?);
        let mut refuse = |request: DispatchRequest<'_>, parts: &[&str]| {
            refused(rank.buffer.dispatch(&mut place, request, order), parts);
        };
        refuse(DispatchRequest::new(&long, &ids), &["x = 1040 bytes", "at most", "1024"]);
        refuse(DispatchRequest::new(&many, &ids), &["x has dtype i32", "expected bf16 or fp8"]);
        let request = || DispatchRequest::new(&x, &ids);
        refuse(request().column(&many), &["columns = 45 words", "max_scales >= 45"]);
        refuse(request().column(&words).by_expert(4), &["columns = 44 words", "4 of these"]);
        let all = Tensor::alloc(stream.device(), DType::U8, &[44, HIDDEN])?;
        // SAFETY: no kernel accesses it.
        let first = unsafe { Tensor::from_raw(all.ptr(), DType::U8, &[4, HIDDEN]) };
        let within = DispatchRequest::new(&first, &ids).by_expert(4).recv_x(&all);
        refuse(within, &["recv_x", "shares memory with x"]);
        let rows = tensor(DType::Bf16, HIDDEN)?;
        let quantised = DispatchRequest::new(&rows, &ids).quantise(Quantise::Fp8).column(&words);
        refuse(quantised, &["columns = given", "in the place of scales"]);
        let (e5m2, scales) =
            (tensor(DType::Fp8E5m2, HIDDEN)?, TypedTensor::from_host(&stream, &[4, 4], &[0f32; 16])?);
        let with_scales = DispatchRequest::new(&e5m2, &ids).scales(&scales);
        refuse(with_scales, &["scales = given", "only e4m3 rows", "x is fp8_e5m2", "`column`"]);
        Ok(())
    });
}
