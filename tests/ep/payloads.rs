//! Rows of any type with up to four columns: every byte of both arrives, within a node and across
//! nodes, and wrong ones are refused.

use epoxide::driver::virt::{CheckConfig, Checker};
use epoxide::throughput::{CachedDispatchRequest, Counts, DispatchRequest};
use epoxide::transport::TransportKind;
use epoxide::{DType, Payload, StreamOrder, Tensor, TypedTensor};
use epoxide_gpu::layout::DevicePtr;
use epoxide_testing::harness::{NodeLinks, Setup};
use epoxide_testing::oracle::{self, Routing, Style};
use epoxide_testing::payload::{Format, rng_of};
use epoxide_testing::roundtrip::{Case, Scales};
use epoxide_testing::tier;
use epoxide_vgpu::for_each_seed;

use crate::valid::{RANKS, TOKENS, Valid, refused, tensor, then_dispatch};

/// A routing with holes and a rank without tokens, and rows of a format.
fn case(format: Format, hidden: u64, tokens: &[u32], topk: u32) -> Case {
    let routing = Routing::random(
        &mut rng_of(&[hidden, format as u64]),
        tokens,
        topk,
        2 * tokens.len() as u32,
        Style::WithHoles,
    );
    let payload = format.payload(hidden);
    let scales = Scales::of(&payload);
    Case { dtype: payload.row().0, scales, ..Case::new(routing, payload.row_bytes() as u32) }
}

#[test]
fn every_format_within_a_node() {
    for format in Format::ALL {
        case(format, 32 * 9, &[7, 0, 5], 3).check();
    }
}

#[test]
fn every_format_across_nodes() {
    let transports = tier::pick(vec![TransportKind::Direct], vec![TransportKind::Direct, TransportKind::Tcp]);
    for (format, transport) in
        Format::ALL.into_iter().flat_map(|of| transports.iter().map(move |&it| (of, it)))
    {
        let nodes = Some(NodeLinks { ranks_per_node: 2, transport, queues: 1 });
        let case = Case { nodes, ..case(format, 32 * 9, &[5, 0, 6, 3], 3) };
        case.setup().run(|rank| rank.check_everything(&case));
    }
}

#[test]
fn formats_by_expert() {
    for format in tier::sample([Format::Nvfp4, Format::Mxfp8, Format::Fp8Ue8m0, Format::F16]) {
        case(format, 32 * 5, &[7, 0, 5], 3).check_by_expert(4);
    }
}

/// Four columns of odd numbers of bytes, and one that is too long for the copy engine.
#[test]
fn columns_of_any_bytes() {
    let lists: [&[(DType, u32)]; 4] = [
        &[(DType::U8, 1), (DType::Bf16, 3), (DType::Ue8m0, 7), (DType::F32, 1)],
        &[(DType::U8, 7)],
        &[(DType::I32, 1030)],
        &[(DType::U8, 4099), (DType::Fp8E4m3, 1)],
    ];
    for list in lists {
        let rows = case(Format::Bf16, 24, &[6, 9], 2);
        Case { scales: Scales::any(list), num_channels: 1, ..rows }.check();
    }
    let many: Vec<u32> = (0..9).map(|rank| rank % 4).collect();
    Case { scales: Scales::any(lists[0]), ..case(Format::F16, 24, &many, 3) }.check();
}

#[test]
fn the_checker_finds_nothing() {
    for_each_seed(tier::pick(2, 20), |seed| {
        let weak = (seed % 2 == 1).then_some(seed);
        let config = CheckConfig { races: weak.is_none(), weak_memory: weak, ..CheckConfig::default() };
        let format = if seed % 4 < 2 { Format::Nvfp4 } else { Format::Mxfp8 };
        let across = NodeLinks { ranks_per_node: 1, transport: TransportKind::Direct, queues: 1 };
        for nodes in [None, Some(across)] {
            let case = Case { nodes, schedule_seed: Some(seed), ..case(format, 32 * 3, &[5, 3], 2) };
            let mut setup = case.setup();
            setup.device.checker = Some(Checker::new(config));
            setup.run(|rank| rank.check_everything(&case));
        }
    });
}

/// A dispatch whose columns are transposed, by expert or not, with exact counts or a capacity.
fn check_transposed(format: Format, alignment: Option<u32>, on_device: bool) {
    let case = case(format, 32 * 5, &[37, 0, 5], 3);
    let setup = alignment.map_or_else(|| case.setup(), |alignment| case.setup_by_expert(alignment));
    setup.run(|rank| {
        let (ids, _) = rank.topk(&case)?;
        let layout = rank.layout(&ids, case.routing.num_experts)?;
        let (x, scales) = rank.payload(&case, 1)?;
        rank.check(scales.is_none(), "scales are columns");
        let (columns, mut place) = (rank.columns(&case, 1)?, rank.place()?);
        let request = columns.iter().fold(DispatchRequest::new(&x, &layout), DispatchRequest::column);
        let request = alignment.into_iter().fold(request, DispatchRequest::by_expert);
        let counts = Counts::OnDevice { capacity: rank.buffer.capacity() };
        let received = rank.dispatch(&mut place, if on_device { request.counts(counts) } else { request })?;
        let sources: Vec<Option<(u32, u32)>> = match alignment {
            None => oracle::recv_order(&case.routing, rank.rank).into_iter().map(Some).collect(),
            Some(alignment) => {
                let plan = oracle::by_expert(&case.routing, rank.rank, alignment).rows;
                plan.into_iter().map(|of| of.map(|(source, token, _)| (source, token))).collect()
            }
        };
        for (index, (dtype, elements)) in case.scales.list().into_iter().enumerate() {
            let bytes = elements as usize * dtype.size() as usize;
            let room = (received.recv_x.rows() + 3).next_multiple_of(4);
            let shape = [bytes.div_ceil(4) as u64, room];
            let out = TypedTensor::from_host(&rank.stream, &shape, &vec![-1i32; (shape[0] * room) as usize])?;
            let order = StreamOrder::on(&rank.stream);
            rank.buffer.transpose_column(&received, index, &out, order)?;
            let got = out.values(&rank.stream)?;
            for row in 0..room as usize {
                let column = |it: (u32, u32)| case.column(1, it, index);
                let want = sources.get(row).copied().flatten().map(column);
                let words = got.iter().skip(row).step_by(room as usize);
                let words: Vec<u8> = words.flat_map(|word| word.to_le_bytes()).collect();
                let mut want = want.unwrap_or_else(|| vec![0xff; words.len()]);
                want.resize(words.len(), 0);
                rank.equal(&format!("column {index} of row {row}"), &words, &want);
            }
        }
        rank.stream.synchronize()
    });
}

#[test]
fn columns_are_transposed() {
    for (format, on_device) in [(Format::Mxfp8, false), (Format::Fp8Ue8m0, true), (Format::Nvfp4, false)] {
        check_transposed(format, None, on_device);
        check_transposed(format, Some(8), on_device);
    }
}

#[test]
fn wrong_transpositions_are_refused() {
    then_dispatch(setup(10), |rank, valid, place| {
        let order_on = rank.stream.clone();
        let order = StreamOrder::on(&order_on);
        let bytes = tensor(rank, DType::U8, &[TOKENS, 7]);
        let received = rank.dispatch(place, valid.request().column(&bytes))?;
        let mut refuse = |index, shape: &[u64], parts: &[&str]| {
            let out =
                TypedTensor::from_host(&order_on, shape, &vec![0i32; shape.iter().product::<u64>() as usize])
                    .expect("memory for a tensor");
            refused(rank.buffer.transpose_column(&received, index, &out, order), parts);
        };
        refuse(1, &[2, 10], &["index = 1", "1 columns came"]);
        refuse(0, &[1, 10], &["out has shape [1, 10], expected [words = 2, rows]"]);
        refuse(0, &[2, 9], &["out = 9 rows", "at least the 10 rows"]);
        drop(received);
        let words = tensor(rank, DType::I32, &[TOKENS, 10]);
        let received = rank.dispatch(place, valid.request().column(&words))?;
        let out = received.recv_columns[0].clone().typed()?;
        let transposed = rank.buffer.transpose_column(&received, 0, &out, order);
        refused(transposed, &["out", "shares memory with recv_columns"]);
        Ok(())
    });
}

fn setup(max_scales: u32) -> Setup {
    Setup::new(RANKS, 1, TOKENS as u32, 64).max_scales(max_scales)
}

#[test]
fn wrong_columns_are_refused() {
    then_dispatch(setup(4), |rank, valid, place| {
        let given = [(DType::U8, 3), (DType::I64, 1), (DType::U8, 0), (DType::U8, 13)];
        let [bytes, wide, empty, long] =
            given.map(|(dtype, elements)| tensor(rank, dtype, &[TOKENS, elements]));
        let five = [(); 5].iter().fold(valid.request(), |request, ()| request.column(&bytes));
        refused(rank.dispatch(place, five), &["columns = 5", "at most 4"]);
        refused(rank.dispatch(place, valid.request().column(&wide)), &["column = i64", "at most 4 bytes"]);
        refused(rank.dispatch(place, valid.request().column(&empty)), &["column = 0", "1 to 65536 bytes"]);
        let longer = tensor(rank, DType::U8, &[TOKENS + 1, 3]);
        let request = valid.request().column(&longer);
        refused(rank.dispatch(place, request), &["column has shape [6, 3]", "num_tokens = 5"]);
        // Two columns are rounded up to 16 bytes.
        let request = valid.request().column(&long).column(&bytes);
        let parts = ["columns: needs 8 words of 4 bytes, has 4", "max_scales >= 8"];
        refused(rank.dispatch(place, request), &parts);
        let x = tensor(rank, DType::Fp8E4m3, &[TOKENS, 32]);
        let scales = tensor(rank, DType::F32, &[TOKENS, 1]).typed()?;
        let request = valid.request_of(&x).scales(&scales).column(&bytes);
        refused(rank.dispatch(place, request), &["x_scales = given", "one of those"]);

        let handle = rank.dispatch(place, valid.request())?.handle;
        let request = CachedDispatchRequest::new(&valid.x, &handle).column(&wide);
        refused(rank.dispatch_cached(place, request), &["column = i64", "at most 4 bytes"]);
        Ok(())
    });
}

#[test]
fn tensors_are_held_against_their_payload() {
    then_dispatch(setup(4), |rank, valid, place| {
        let payload = Payload::mxfp8(DType::Fp8E4m3, 32)?;
        let x = tensor(rank, DType::Fp8E4m3, &[TOKENS, 32]);
        let scales = tensor(rank, DType::Ue8m0, &[TOKENS, 1]);
        let flat = tensor(rank, DType::Ue8m0, &[TOKENS]);
        let received =
            rank.dispatch(place, valid.request_of(&x).payload(&payload).column(&scales))?.recv_columns.len();
        rank.equal("columns", &[received], &[1]);
        drop(rank.dispatch(place, valid.request_of(&x).payload(&payload).column(&flat))?);
        let request = valid.request().payload(&payload).column(&scales);
        refused(rank.dispatch(place, request), &["x has dtype bf16, expected fp8"]);
        let request = valid.request_of(&x).payload(&payload);
        refused(rank.dispatch(place, request), &["columns = 0", "the payload has 1"]);
        let other = tensor(rank, DType::U8, &[TOKENS, 1]);
        let request = valid.request_of(&x).payload(&payload).column(&other);
        refused(rank.dispatch(place, request), &["column has dtype u8, expected ue8m0"]);
        Ok(())
    });
}

/// As many bytes of other types are another payload.
#[test]
fn ranks_must_agree_on_their_columns() {
    let timeout = std::time::Duration::from_secs(5);
    then_dispatch(setup(4).timeout(timeout), |rank, valid, place| {
        let columns = [(DType::U8, 4), (DType::Ue8m0, 4)];
        let (dtype, elements) = columns[rank.rank as usize];
        let column = tensor(rank, dtype, &[TOKENS, elements]);
        let result = rank.dispatch(place, valid.request().column(&column));
        refused(result, &["disagree on a hash of the types and bytes of columns"]);
        Ok(())
    });
}

/// No counts are exchanged, by which ranks compare formats: the call has them.
#[test]
fn ranks_must_agree_on_the_columns_of_a_cached_dispatch() {
    const HIDDEN: u64 = 3584;
    Setup::new(RANKS, 1, TOKENS as u32, HIDDEN).max_topk(2).max_scales(7).run(|rank| {
        let (valid, mut place) = (Valid::new(rank)?, rank.place()?);
        let handle = rank.dispatch(&mut place, valid.request())?.handle;
        let x = tensor(rank, DType::Fp8E4m3, &[TOKENS, HIDDEN]);
        let scales = tensor(rank, DType::I32, &[TOKENS, HIDDEN / 512]);
        let request = CachedDispatchRequest::new(&x, &handle);
        let request = if rank.rank == 0 { request } else { request.column(&scales) };
        drop(rank.dispatch_cached(&mut place, request)?);
        refused(rank.outcome(), &["cached dispatch in place 0", "bytes, dtype and columns"]);
        Ok(())
    });
}

/// A column at an odd address is copied by the kernel that packs.
#[test]
fn a_column_may_begin_anywhere() {
    then_dispatch(setup(4), |rank, valid, place| {
        let memory = tensor(rank, DType::U8, &[TOKENS * 4 + 1]);
        let bytes: Vec<u8> = (0..TOKENS as u8 * 4 + 1).map(|at| at ^ (rank.rank as u8) << 7).collect();
        memory.write(&rank.stream, &bytes)?;
        // SAFETY: the column lies in `memory`.
        let column = unsafe { Tensor::from_raw(DevicePtr(memory.ptr().0 + 1), DType::U8, &[TOKENS, 4]) };
        let output = rank.dispatch(place, valid.request().column(&column))?;
        let got = output.recv_columns[0].to_host::<u8>(&rank.stream)?;
        let sources = output.recv_src_idx.as_ref().expect("a dispatch").values(&rank.stream)?;
        let mut source = 0u8;
        for (row, &token) in sources.iter().enumerate() {
            if row > 0 && token <= sources[row - 1] {
                source += 1;
            }
            let begin = 1 + token as u8 * 4;
            let expected: Vec<u8> = (begin..begin + 4).map(|at| at ^ source << 7).collect();
            rank.equal("column", &got[row * 4..row * 4 + 4], &expected);
        }
        Ok(())
    });
}
