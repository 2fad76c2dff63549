//! Memory of the caller's: sums in its tensors, a dispatch and its combine as two calls, and sizes
//! before there is a buffer. Round trips of `epoxide_testing` compare the sums.

use epoxide::driver::DevicePtr;
use epoxide::driver::virt::{CheckConfig, Checker};
use epoxide::low_latency;
use epoxide::throughput::{CombineRequest, Counts, DispatchRequest};
use epoxide::transport::TransportKind;
use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
use epoxide_testing::harness::{NodeLinks, POISON, Rank, Setup};
use epoxide_testing::low_latency::{LowLatencyCase, LowLatencyRank, ReturnPath};
use epoxide_testing::oracle::{self, Style};
use epoxide_testing::roundtrip::Case;

use crate::shapes::routing;
use crate::spread::Spread;
use crate::valid::{EXPERTS, RANKS, TOKENS, Valid, refused, setup, tensor, then_dispatch, typed};

/// A tensor in memory of another, from a byte on.
fn within<'a>(other: &'a Tensor<'a>, bytes: u64, dtype: DType, shape: &[u64]) -> Tensor<'a> {
    // SAFETY: callers that pass it to a kernel stay inside of the other tensor.
    unsafe { Tensor::from_raw(other.ptr().add(bytes), dtype, shape) }
}

#[test]
fn sums_of_high_throughput_go_to_tensors_that_fit() {
    then_dispatch(setup(Spread::OneNode), |rank, valid, place| {
        let received = rank.dispatch(place, valid.request())?;
        let (rows, handle) = (received.recv_x.rows(), received.handle.clone());
        let x = tensor(rank, DType::Bf16, &[rows, 8]);
        let request = CombineRequest::new(&x, &handle);
        let fits = tensor(rank, DType::Bf16, &[TOKENS, 8]);
        for (out, parts) in [
            (tensor(rank, DType::F32, &[TOKENS, 8]), ["out has dtype f32", "bf16"]),
            (tensor(rank, DType::Bf16, &[TOKENS + 1, 8]), ["out has shape [6, 8]", "num_tokens = 5"]),
            (tensor(rank, DType::Bf16, &[TOKENS, 16]), ["out has shape [5, 16]", "hidden = 8"]),
            (within(&fits, 2, DType::Bf16, &[TOKENS, 8]), ["out = 0x", "multiple of 16 bytes"]),
            (within(&x, 16, DType::Bf16, &[TOKENS, 8]), ["out = 0x", "shares memory with rows"]),
        ] {
            refused(rank.combine_into(request, &out, None), &parts);
        }

        let given: TypedTensor<'_, f32> = typed(rank, &[rows, 2]);
        let summed: TypedTensor<'_, f32> = typed(rank, &[TOKENS, 2]);
        let parts = ["out_topk_weights = given", "leave them out"];
        refused(rank.combine_into(request, &fits, Some(&summed)), &parts);
        let request = request.topk_weights(&given);
        refused(
            rank.combine_into(request, &fits, None),
            &["out_topk_weights = none", "has topk_weights: give f32 [5, 2]"],
        );
        let wide: TypedTensor<'_, f32> = typed(rank, &[TOKENS, 3]);
        refused(rank.combine_into(request, &fits, Some(&wide)), &["out_topk_weights has shape [5, 3]"]);
        // SAFETY: no kernel accesses it.
        let same = unsafe { TypedTensor::from_raw(given.ptr(), &[TOKENS, 2]) };
        refused(rank.combine_into(request, &fits, Some(&same)), &["shares memory with topk_weights"]);
        // SAFETY: as above.
        let same = unsafe { TypedTensor::from_raw(fits.ptr(), &[TOKENS, 2]) };
        refused(
            rank.combine_into(request, &fits, Some(&same)),
            &["out_topk_weights", "shares memory with out"],
        );

        // Rows of the pool, which peers read, are no place for sums.
        let pool = received.combine_rows(DType::Bf16, 8)?;
        let inside = within(pool.tensor(), 0, DType::Bf16, &[TOKENS, 8]);
        refused(
            rank.combine_into(CombineRequest::new(&pool, &handle), &inside, None),
            &["out = 0x", "shares memory with rows"],
        );
        Ok(())
    });
}

/// Frameworks give empty tensors a null address. Across nodes the rank sums the weights of tokens
/// that it relays.
#[test]
fn a_rank_without_tokens_may_have_sums_of_weights_at_a_null_address() {
    for spread in [Spread::OneNode, Spread::SeveralNodes] {
        setup(spread).run(|rank| {
            let (valid, mut place) = (Valid::new(rank)?, rank.place()?);
            let no_ids = TypedTensor::<i64>::from_host(&rank.stream, &[0, 2], &[])?;
            let (no_layout, no_x) = (rank.layout(&no_ids, EXPERTS)?, tensor(rank, DType::Bf16, &[0, 8]));
            // SAFETY: there is no element.
            let no_weights = unsafe { TypedTensor::<f32>::from_raw(DevicePtr(0), &[0, 2]) };
            let out = tensor(rank, DType::Bf16, &[if rank.rank == 0 { 0 } else { TOKENS }, 8]);
            let sums: TypedTensor<'_, f32> = typed(rank, &[TOKENS, 2]);
            let (request, sums_at) = match rank.rank {
                0 => (DispatchRequest::new(&no_x, &no_layout).topk_weights(&no_weights), &no_weights),
                _ => (valid.request(), &sums),
            };
            let received = rank.dispatch(&mut place, request)?;
            let weights = received.recv_topk_weights.as_ref().expect("weights travel");
            let request = CombineRequest::new(&received.recv_x, &received.handle).topk_weights(weights);
            rank.combine_into(request, &out, Some(sums_at))?;
            if rank.rank == 1 {
                rank.equal("weights", &sums.values(&rank.stream)?, &[1.0, 2.0].repeat(TOKENS as usize));
            }
            rank.outcome()
        });
    }
}

#[test]
fn a_failed_combine_is_an_error_of_the_tensor_that_it_fills() {
    // Rank 1 makes no combine.
    let mut short = setup(Spread::OneNode);
    short = short.timeout(std::time::Duration::from_millis(100));
    short.run(|rank| {
        let valid = crate::valid::Valid::new(rank)?;
        let mut place = rank.place()?;
        let received = rank.dispatch(&mut place, valid.request())?;
        if rank.rank == 0 {
            let out = tensor(rank, DType::Bf16, &[TOKENS, 8]);
            let request = CombineRequest::new(&received.recv_x, &received.handle);
            rank.combine_into(request, &out, None)?;
            let is_failed = || crate::valid::expect_gone(out.to_host::<u16>(&rank.stream).map(drop));
            is_failed();
            let write = || out.write(&rank.stream, &vec![1u16; 8 * TOKENS as usize]);
            assert!(rank.stream.capture(write).is_err());
            is_failed();
            write()?;
            assert_eq!(out.to_host::<u16>(&rank.stream)?, vec![1; 8 * TOKENS as usize]);
        }
        Ok(())
    });
}

/// Dispatches of a case, exact and with counts on the device, whose rows are copied.
fn copies(case: &Case, alignment: Option<u32>) {
    let mut setup = if alignment.is_some() { case.setup_by_expert(4) } else { case.setup() };
    setup.device.checker = Some(Checker::new(CheckConfig::default()));
    setup.run(|rank| {
        let (topk_idx, topk_weights) = rank.topk(case)?;
        let layout = rank.layout(&topk_idx, case.routing.num_experts)?;
        let (x, _) = rank.payload(case, 1)?;
        let mut place = rank.place()?;
        let plan = oracle::plan(&case.routing, rank.rank, 1, 1);
        for counts in [Counts::Exact, rank.on_device()] {
            let request = DispatchRequest::new(&x, &layout).topk_weights(&topk_weights).counts(counts);
            let request = alignment.iter().fold(request, |request, &alignment| request.by_expert(alignment));
            let at = place.recv_x_ptr();
            let received = rank.dispatch(&mut place, request)?;
            rank.check(received.recv_x.ptr() == at, "rows lie where the place has them");
            let rows = received.recv_x.rows();
            let out = tensor(rank, DType::Bf16, &[rows, case.hidden()]);
            rank.poison(&out)?;
            let of_place = received.recv_topk_weights.clone().expect("weights travel");
            let weights: TypedTensor<'_, f32> = typed(rank, of_place.shape());
            let (stream, order) = (rank.stream.clone(), StreamOrder::on(&rank.stream));
            rank.buffer.copy_received(&received, &out, Some(&weights), order)?;
            let sources = received.recv_src_idx.clone().expect("sources travel").values(&stream)?;
            let came = received.handle.num_recv_tokens(&stream)? as usize;
            let is_row = |row: usize| row < came && sources[row] >= 0;
            for row in 0..rows as usize {
                let want = match is_row(row) {
                    true => rank.row_of(&received.recv_x, row)?,
                    false => vec![POISON; out.row_bytes() as usize],
                };
                let got = rank.row_of(&out, row)?;
                rank.equal(&format!("row {row} of {came}"), &got, &want);
                if is_row(row) {
                    let (got, want) = (rank.row_of(&weights, row)?, rank.row_of(&of_place, row)?);
                    rank.equal(&format!("weights of row {row}"), &got, &want);
                }
            }
            if alignment.is_none() {
                rank.equal("rows", &[came], &[plan.recv_src.len()]);
            }
            out.to_host::<u16>(&stream)?;
        }
        Ok(())
    });
}

#[test]
fn received_rows_are_copied_into_tensors_of_the_caller() {
    let case = Case::new(routing(&[9, 0, 14], 3, 6, Style::WithHoles), 128);
    copies(&case, None);
    copies(&case, Some(4));
    let nodes = NodeLinks { ranks_per_node: 1, transport: TransportKind::Shm, queues: 2 };
    copies(&Case { nodes: Some(nodes), ..Case::new(routing(&[5, 7], 2, 4, Style::DistinctTopK), 256) }, None);
}

#[test]
fn copies_go_to_tensors_that_fit() {
    then_dispatch(setup(Spread::OneNode), |rank, valid, place| {
        let dispatched = rank.dispatch(place, DispatchRequest::new(&valid.x, &valid.layout))?;
        let rows = dispatched.recv_x.rows();
        let stream = rank.stream.clone();
        let order = StreamOrder::on(&stream);
        for (out, parts) in [
            (tensor(rank, DType::F32, &[rows, 8]), ["out has dtype f32", "bf16"]),
            (tensor(rank, DType::Bf16, &[rows - 1, 8]), ["out has shape", "num_recv_tokens = 10"]),
            (tensor(rank, DType::Bf16, &[rows, 8]), ["hidden = 8 x bf16", "multiple of 128 bytes"]),
        ] {
            refused(rank.buffer.copy_received(&dispatched, &out, None, order), &parts);
        }
        Ok(())
    });
    let wide = Setup::new(RANKS, 1, TOKENS as u32, 128);
    then_dispatch(wide, |rank, valid, place| {
        let x = rank.upload_rows(DType::Bf16, 64, &vec![vec![1; 128]; TOKENS as usize])?;
        let received = rank.dispatch(place, DispatchRequest::new(&x, &valid.layout))?;
        let out = tensor(rank, DType::Bf16, received.recv_x.shape());
        let weights: TypedTensor<'_, f32> = typed(rank, &[out.rows(), 2]);
        let stream = rank.stream.clone();
        let order = StreamOrder::on(&stream);
        let copied = rank.buffer.copy_received(&received, &out, Some(&weights), order);
        refused(copied, &["out_topk_weights = given", "no weights travelled"]);
        drop(received);
        let request = valid.request_of(&x);
        let mut received = rank.dispatch(place, request)?;
        let weights: TypedTensor<'_, f32> = typed(rank, &[out.rows(), 3]);
        let copied = rank.buffer.copy_received(&received, &out, Some(&weights), order);
        refused(copied, &["out_topk_weights has shape", "num_topk = 2"]);
        // The shape is that of the dispatch, even if the caller has changed its results.
        let more: TypedTensor<'_, f32> = typed(rank, &[out.rows(), 4096]);
        received.recv_topk_weights = Some(more.clone());
        let copied = rank.buffer.copy_received(&received, &out, Some(&more), order);
        refused(copied, &["out_topk_weights has shape", "num_topk = 2"]);
        Ok(())
    });
}

fn low_latency_case(combine_rows: ReturnPath) -> LowLatencyCase {
    let case = LowLatencyCase::new(routing(&[4, 6], 2, 4, Style::DistinctTopK), 64);
    LowLatencyCase { combine_rows, weighted: false, places: 2, ..case }
}

#[test]
fn sums_of_low_latency_go_to_tensors_that_fit() {
    let case = low_latency_case(ReturnPath::ByRow);
    case.run(|rank| {
        let inputs = case.inputs(rank)?;
        let tokens = u64::from(case.routing.num_tokens(rank.rank));
        let LowLatencyRank { buffer, stream, .. } = rank;
        let order = StreamOrder::on(stream);
        let mut place = buffer.place(0)?;
        let rows = Tensor::alloc(stream.device(), DType::Bf16, &[buffer.rows(), 64])?;
        let alloc = |dtype, shape: [u64; 2]| Tensor::alloc(stream.device(), dtype, &shape);
        let fits = alloc(DType::Bf16, [tokens, 64])?;
        for (out, part) in [
            (alloc(DType::F32, [tokens, 64])?, "out has dtype f32"),
            (alloc(DType::Bf16, [tokens + 1, 64])?, "num_tokens = "),
            (alloc(DType::Bf16, [tokens, 32])?, "hidden = 64"),
            (within(&fits, 4, DType::Bf16, &[tokens, 64]), "multiple of 16 bytes"),
            (within(&rows, 128, DType::Bf16, &[tokens, 64]), "shares memory with rows"),
        ] {
            let received = buffer.dispatch(&mut place, inputs.request(case.quantise), order)?;
            let request = low_latency::CombineRequest::by_row(&rows);
            refused(buffer.combine_into(received, request, &out, order), &[part]);
        }
        let received = buffer.dispatch(&mut place, inputs.request(case.quantise), order)?;
        let of_pool = received.combine_rows()?.ptr();
        // SAFETY: no kernel accesses it.
        let inside = unsafe { Tensor::from_raw(of_pool, DType::Bf16, &[tokens, 64]) };
        let request = low_latency::CombineRequest::in_pool();
        let sent = buffer.combine_send_into(received, request, &inside, order);
        refused(sent.map(drop), &["out = 0x", "shares memory with rows"]);
        // No work was enqueued, and the buffer still works.
        stream.synchronize()?;
        buffer.check()
    });
}

#[test]
fn detached_rows_are_attached_where_they_lie_alone() {
    let case = low_latency_case(ReturnPath::ByRow);
    case.run(|rank| {
        let inputs = case.inputs(rank)?;
        let LowLatencyRank { buffer, stream, .. } = rank;
        let order = StreamOrder::on(stream);
        let (mut first, mut second) = (buffer.place(0)?, buffer.place(1)?);
        let dispatch = |buffer: &mut low_latency::Buffer, place: &mut low_latency::Place| {
            buffer.dispatch(place, inputs.request(case.quantise), order).map(low_latency::Received::detach)
        };
        let elsewhere = dispatch(buffer, &mut first)?;
        refused(elsewhere.attach(&mut second), &["place = 1", "the rows lie in place 0"]);
        let stale = dispatch(buffer, &mut first)?;
        let current = dispatch(buffer, &mut first)?;
        refused(stale.attach(&mut first), &["dispatch 2 in place 0", "overwritten since, by dispatch 3"]);
        let received = current.attach(&mut first)?;
        assert_eq!(received.x.rows(), buffer.rows());
        drop(received);
        stream.synchronize()?;
        buffer.check()
    });
}

/// One node, nodes whose memory is mapped and become one, and nodes that are kept apart.
fn spreads() -> [Option<(NodeLinks, bool)>; 3] {
    let links = |transport| NodeLinks { ranks_per_node: 2, transport, queues: 1 };
    [None, Some((links(TransportKind::Direct), true)), Some((links(TransportKind::Shm), false))]
}

/// The driver rounds memory up by less than this.
const GRANULE: u64 = 2 << 20;

#[test]
fn sizes_of_high_throughput_are_those_of_the_buffer() {
    for spread in spreads() {
        let joins = spread.is_some_and(|(_, joins)| joins);
        let mut setup = Setup::new(4, 2, 7, 48).nodes(spread.map(|(links, _)| links));
        setup.fields().places = 2;
        setup.fields().rows_by_expert = (!joins).then_some(100);
        if joins {
            setup = setup.join_nodes();
        }
        let sizes = setup.options.sizes(4).unwrap();
        setup.run(|rank: &mut Rank| {
            let buffer = &rank.buffer;
            assert_eq!(sizes.rows, buffer.capacity());
            assert!((sizes.pool_bytes..sizes.pool_bytes + GRANULE).contains(&buffer.pool_bytes()));
            if buffer.num_nodes() > 1 || spread.is_none() {
                assert_eq!(sizes.wire_bytes, buffer.wire_bytes());
            } else {
                assert!(sizes.wire_bytes > 0, "nodes may turn out to be apart");
            }
            Ok(())
        });
    }
    let options = Setup::new(4, 2, 7, 48).nodes(spreads()[2].map(|(links, _)| links)).options;
    refused(options.sizes(3), &["ranks_per_node = 2", "must divide the number of ranks, 3"]);
    let mut none = Setup::new(4, 2, 7, 48);
    none.fields().num_nvl_bytes = Some(1000);
    refused(none.options.sizes(4), &["num_nvl_bytes", "at least room for one row"]);
}

#[test]
fn sizes_of_low_latency_are_those_of_the_buffer() {
    let base = LowLatencyCase::new(routing(&[3, 1, 4, 2], 2, 8, Style::DistinctTopK), 48);
    for spread in spreads() {
        let nodes = spread.map(|(links, _)| links);
        let joins_nodes = spread.is_some_and(|(_, joins)| joins);
        let case = LowLatencyCase { nodes, joins_nodes, places: 2, ..base.clone() };
        let sizes = case.options(0).sizes(4).unwrap();
        case.run(|rank| {
            let buffer = &rank.buffer;
            assert_eq!(sizes.rows, buffer.rows());
            let pool = buffer.pool_bytes();
            assert!(pool < sizes.pool_bytes + GRANULE && (joins_nodes || pool >= sizes.pool_bytes), "{pool}");
            if buffer.num_nodes() > 1 || spread.is_none() {
                assert_eq!(sizes.wire_bytes, buffer.wire_bytes());
            }
            Ok(())
        });
    }
    refused(base.options(0).sizes(3), &["num_experts = 8", "multiple of the number of ranks, 3"]);
    refused(base.options(0).sizes(0), &["group size = 0"]);
}

#[test]
fn the_worst_rows_by_expert() {
    // All entries of each token of both ranks may select the two experts of a rank, in whose segments
    // padding follows. An entry is a row, an expert that a token has twice included.
    let shape = low_latency::Shape { max_tokens: 3, hidden: 64, num_topk: 4, num_experts: 4 };
    let rows = 2 * 3 * 4;
    assert_eq!(shape.most_rows_by_expert(RANKS, 1), rows);
    assert_eq!(shape.most_rows_by_expert(RANKS, 8), rows + 2 * 7);
    assert_eq!(shape.most_rows_by_expert(RANKS, 0), shape.most_rows_by_expert(RANKS, 1));
    let most =
        low_latency::Shape { max_tokens: u32::MAX, num_topk: u32::MAX, num_experts: u32::MAX, ..shape };
    assert_eq!(most.most_rows_by_expert(u32::MAX, u32::MAX), u64::MAX);
}

/// Tokens of the batches below, at most; every token has an expert on each rank but for one entry.
const MOST: u64 = 6;

fn ids_of_batch() -> Vec<i64> {
    let mut ids: Vec<i64> = (0..MOST).flat_map(|_| [0, 3]).collect();
    ids[2] = -1;
    ids
}

/// Sums of ones where the first `tokens` tokens are there.
fn sums_of_ones(tokens: i32, columns: usize) -> Vec<f32> {
    let ranks = |token: u64| {
        if i64::from(tokens) <= token as i64 {
            0.0
        } else if token == 1 {
            1.0
        } else {
            2.0
        }
    };
    (0..MOST).flat_map(|token| vec![ranks(token); columns]).collect()
}

/// Values of `num_tokens`: all, none, some, and numbers out of range.
const NUMBERS: [i32; 5] = [MOST as i32, 0, 2, -1, i32::MAX];

#[test]
fn the_device_knows_how_many_tokens_there_are_in_high_throughput() {
    let mut setup = Setup::new(RANKS, 1, MOST as u32, 128);
    setup.device.checker = Some(Checker::new(CheckConfig::default()));
    setup.run(|rank| {
        let stream = rank.stream.clone();
        let shape = [MOST, 2];
        let wide = TypedTensor::from_host(&stream, &shape, &ids_of_batch())?;
        let narrow: Vec<i32> = ids_of_batch().iter().map(|&id| id as i32).collect();
        let narrow = TypedTensor::from_host(&stream, &shape, &narrow)?;
        let number = TypedTensor::from_host(&stream, &[1], &[0i32])?;
        for tokens in NUMBERS {
            number.write(&stream, &[tokens])?;
            let there = (tokens.max(0) as usize).min(MOST as usize) * 2;
            let want: Vec<i64> =
                (0..).zip(ids_of_batch()).map(|(at, id)| if at < there { id } else { -1 }).collect();
            let order = StreamOrder::on(&stream);
            let got = rank.buffer.first_tokens(&wide, &number, order)?.values(&stream)?;
            rank.equal("i64", &got, &want);
            let got = rank.buffer.first_tokens(&narrow, &number, order)?.values(&stream)?;
            rank.equal("i32", &got, &want.iter().map(|&id| id as i32).collect::<Vec<_>>());
        }
        let two = TypedTensor::from_host(&stream, &[2], &[0i32; 2])?;
        let order = StreamOrder::on(&stream);
        refused(rank.buffer.first_tokens(&wide, &two, order), &["num_tokens has shape [2]", "[count = 1]"]);
        let flat = TypedTensor::from_host(&stream, &[MOST], &[0i64; MOST as usize])?;
        refused(rank.buffer.first_tokens(&flat, &number, order), &["topk_idx has shape [6]"]);

        let x = Tensor::from_host(&stream, DType::F32, &[MOST, 32], &[1.0f32; 32 * MOST as usize])?;
        let out = tensor(rank, DType::F32, &[MOST, 32]);
        let mut place = rank.place()?;
        let counts = rank.on_device();
        let step = rank.buffer.capture(&stream, |buffer, order| {
            let ids = buffer.first_tokens(&wide, &number, order)?;
            let layout = buffer.get_dispatch_layout(&ids, 4, order)?;
            let received =
                buffer.dispatch(&mut place, DispatchRequest::new(&x, &layout).counts(counts), order)?;
            let request = CombineRequest::new(&received.recv_x, &received.handle);
            buffer.combine_into(request, &out, None, order)?;
            Ok(())
        })?;
        for tokens in NUMBERS {
            number.write(&stream, &[tokens])?;
            step.launch(&stream)?;
            step.check(&stream)?;
            let got = out.to_host::<f32>(&stream)?;
            rank.equal(&format!("{tokens} tokens"), &got, &sums_of_ones(tokens, 32));
        }
        Ok(())
    });
}

#[test]
fn the_device_knows_how_many_tokens_there_are_in_low_latency() {
    let case = LowLatencyCase::new(routing(&[MOST as u32; 2], 2, 4, Style::DistinctTopK), 64);
    for nodes in [None, Some(NodeLinks { ranks_per_node: 1, transport: TransportKind::Shm, queues: 1 })] {
        let checker = Some(Checker::new(CheckConfig::default()));
        LowLatencyCase { nodes, checker, ..case.clone() }.run(|rank| {
            let LowLatencyRank { buffer, stream, .. } = rank;
            let (stream, ones) = (stream.clone(), half::bf16::ONE);
            let topk_idx = TypedTensor::from_host(&stream, &[MOST, 2], &ids_of_batch())?;
            let number = TypedTensor::from_host(&stream, &[1], &[0i32])?;
            let x = Tensor::from_host(&stream, DType::Bf16, &[MOST, 64], &[ones; 64 * MOST as usize])?;
            let rows = vec![ones; 64 * buffer.rows() as usize];
            let rows = Tensor::from_host(&stream, DType::Bf16, &[buffer.rows(), 64], &rows)?;
            let out = Tensor::alloc(stream.device(), DType::Bf16, &[MOST, 64])?;
            let mut place = buffer.place(0)?;
            let step = buffer.capture(&stream, |buffer, order| {
                let ids = buffer.first_tokens(&topk_idx, &number, order)?;
                let received =
                    buffer.dispatch(&mut place, low_latency::DispatchRequest::new(&x, &ids), order)?;
                let request = low_latency::CombineRequest::by_row(&rows);
                buffer.combine_into(received, request, &out, order)?;
                Ok(())
            })?;
            for tokens in NUMBERS {
                number.write(&stream, &[tokens])?;
                step.launch(&stream)?;
                step.check(&stream)?;
                let got: Vec<f32> =
                    out.to_host::<half::bf16>(&stream)?.iter().map(|sum| sum.to_f32()).collect();
                rank.equal(&format!("{tokens} tokens"), &got, &sums_of_ones(tokens, 64));
            }
            Ok(())
        });
    }
}

/// A recording keeps the tables of each layer, and so does the run before it: a recording allocates
/// nothing.
#[test]
fn a_step_of_several_layers_finds_its_memory() {
    Setup::new(RANKS, 1, MOST as u32, 128).run(|rank| {
        let stream = rank.stream.clone();
        let ids = TypedTensor::from_host(&stream, &[MOST, 2], &ids_of_batch())?;
        let x = Tensor::from_host(&stream, DType::F32, &[MOST, 32], &[1.0f32; 32 * MOST as usize])?;
        let outs = [0; 3].map(|_| tensor(rank, DType::F32, &[MOST, 32]));
        let (mut place, counts) = (rank.place()?, rank.on_device());
        let step = rank.buffer.capture(&stream, |buffer, order| {
            let inputs = [&x, &outs[0], &outs[1]];
            for (x, out) in inputs.into_iter().zip(&outs) {
                let layout = buffer.get_dispatch_layout(&ids, 4, order)?;
                let request = DispatchRequest::new(x, &layout).counts(counts);
                let received = buffer.dispatch(&mut place, request, order)?;
                let request = CombineRequest::new(&received.recv_x, &received.handle);
                buffer.combine_into(request, out, None, order)?;
            }
            Ok(())
        })?;
        step.launch(&stream)?;
        step.check(&stream)?;
        let want: Vec<f32> = sums_of_ones(i32::MAX, 32).into_iter().map(|sum| sum * sum * sum).collect();
        rank.equal("sums of three layers", &outs[2].to_host::<f32>(&stream)?, &want);
        Ok(())
    });
}
