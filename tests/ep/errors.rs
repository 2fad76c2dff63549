//! Bad input, on one node and on several: every error names the argument, its value and the rule,
//! and leaves the buffer usable.

use std::panic::{AssertUnwindSafe, catch_unwind};

use epoxide::driver::virt::{VirtConfig, VirtualGpu};
use epoxide::driver::{Memory, MemoryKind, Stream};
use epoxide::internal::{Fields, driver};
use epoxide::throughput::{
    Buffer, CachedDispatchRequest, CombineRequest, Counts, DispatchRequest, Options, Place, Shape,
};
use epoxide::transport::TransportKind;
use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
use epoxide_testing::harness::{Rank, Setup, run_ranks};

use crate::failing::{FailingDevice, REFUSAL};
use crate::spread::{Spread, in_every_spread};
use crate::valid::{EXPERTS, TOKENS, Valid, errors_of, refused, setup, tensor, then_dispatch, typed};

in_every_spread! {
    an_expert_id_out_of_range_is_an_error_on_every_rank,
    shapes_are_checked,
    ranks_must_make_equal_buffers,
    ranks_must_make_equal_dispatches,
    a_handle_of_another_buffer_is_refused,
}

#[test]
fn tensors_have_one_or_two_dimensions_and_less_than_2_to_the_63_bytes() {
    let device = VirtualGpu::new(VirtConfig::default());
    let of = |shape: &[u64]| Tensor::alloc(&device, DType::I32, shape);
    for shape in [&[][..], &[1024, 1024, 0], &[2, 2, 2]] {
        refused(of(shape), &[&format!("shape = {shape:?}"), "[rows] or [rows, columns]"]);
    }
    for shape in [[4, 1 << 62], [u64::MAX, u64::MAX], [1 << 61, 1]] {
        refused(of(&shape), &[&format!("shape = {shape:?}"), "at most 2^63 bytes"]);
    }
    assert_eq!(of(&[0, u64::MAX]).unwrap().rows(), 0);
}

#[test]
fn sizes_that_fit_no_type_are_refused() {
    let shape = Shape { max_tokens: 4096, hidden: 7168, dtype: DType::F32, max_topk: 8, max_scales: 0 };
    let sizes = |shape| Options::new(shape).sizes(8);
    sizes(shape).unwrap();
    let rule = "hidden * element size must be a positive multiple of 16 bytes, below 16 MiB";
    // No dispatch takes rows of 16 MiB.
    for hidden in [1 << 22, 1 << 23, 1 << 60, u64::MAX / 16 * 4] {
        let value = format!("hidden = {hidden} x f32 (");
        refused(sizes(Shape { hidden, ..shape }), &[&value, " bytes per row)", rule]);
    }
    refused(sizes(Shape { hidden: 1021, ..shape }), &["hidden = 1021 x f32 (4084 bytes per row)", rule]);
    sizes(Shape { max_tokens: 1, hidden: (1 << 22) - 4, ..shape }).unwrap();
    for max_scales in [1 << 16, 1 << 30, u32::MAX] {
        let text = format!("max_scales = {max_scales}");
        refused(sizes(Shape { max_scales, ..shape }), &[&text, "at most 65535"]);
    }
}

#[test]
fn memory_that_a_stream_may_still_use_is_leaked() {
    let failing = FailingDevice::new(VirtualGpu::new(VirtConfig::default()), &[]);
    let device = driver::device(failing.clone());
    let alloc = || Memory::alloc(&device, 1 << 20, MemoryKind::Device, "test").unwrap();
    let (freed, leaked, stream) = (alloc(), alloc(), Stream::new(&device).unwrap());
    let before = device.free_memory().unwrap();
    drop(freed);
    let behind = device.free_memory().unwrap();
    assert!(behind > before, "{before} and {behind} bytes");
    failing.refuse_order();
    let error = stream.capture(|| Ok(())).unwrap_err().to_string();
    assert!(error.contains(REFUSAL), "{error}");
    drop(stream);
    drop(leaked);
    assert_eq!(device.free_memory().unwrap(), behind);
}

/// Memory is freed behind the streams of its device: others may still use it then.
#[test]
fn streams_of_another_device_are_refused() {
    then_dispatch(setup(Spread::OneNode), |rank, valid, place| {
        let stream = Stream::new(&VirtualGpu::new(VirtConfig::default()))?;
        let order = StreamOrder::on(&stream);
        let refusal = ["order = on a stream of", "stream of the buffer's device"];
        refused(rank.buffer.dispatch(place, valid.request(), order), &refusal);
        let step = rank.buffer.capture(&rank.stream.clone(), |_, _| Ok(()))?;
        refused(step.launch(&stream), &["stream = one of", "device that the graph was recorded on"]);
        Ok(())
    });
}

/// A free of memory of another device does not wait for the streams that read it here.
#[test]
fn tensors_of_another_device_are_refused() {
    then_dispatch(setup(Spread::OneNode), |rank, valid, place| {
        let other = VirtualGpu::new(VirtConfig { ordinal: 7, ..VirtConfig::default() });
        let x = Tensor::alloc(&other, DType::Bf16, &[TOKENS, 8])?;
        let refusal = ["x = in memory of device 7", "memory of the buffer's device, device"];
        refused(rank.dispatch(place, valid.request_of(&x)), &refusal);
        let ids = Tensor::alloc(&other, DType::I64, &[TOKENS, 2])?.named("ids of layer 7");
        let layout = rank.layout(&ids.typed::<i64>()?, EXPERTS);
        refused(layout, &["topk_idx = ids of layer 7, in memory of device 7"]);
        Ok(())
    });
}

/// Rows in a pool, and outputs of the buffer's own.
#[test]
fn results_of_another_device_are_refused() {
    run_ranks(1, |_, group| {
        let device = |ordinal| VirtualGpu::new(VirtConfig { ordinal, ..VirtConfig::default() });
        let options = || Setup::new(1, 1, TOKENS as u32, 64).options;
        let mut one = Rank::new(device(1), group.clone(), options())?;
        let mut two = Rank::new(device(2), group, options())?;
        let (valid, mut place) = (Valid::new(&mut one)?, one.place()?);
        let received = one.dispatch(&mut place, DispatchRequest::new(&valid.x, &valid.layout))?;
        let sums = one.combine(CombineRequest::new(&received.recv_x, &received.handle))?;
        let (valid, mut place) = (Valid::new(&mut two)?, two.place()?);
        let x = &sums.combined_x;
        let refusal = [&format!("x = {}, in memory of device 1", x.name())[..]];
        refused(two.dispatch(&mut place, DispatchRequest::new(x, &valid.layout)), &refusal);
        let handle = two.dispatch(&mut place, DispatchRequest::new(&valid.x, &valid.layout))?.handle;
        let rows = &received.recv_x;
        refused(two.combine(CombineRequest::new(rows, &handle)), &["x = recv_x, in memory of device 1"]);
        // Nor are they read on a stream of the other device.
        let refusal = ["stream = one of device 2", "to_host takes one of the tensor's device, device 1"];
        refused(rows.to_host::<half::bf16>(&two.stream), &refusal);
        refused(valid.x.write(&one.stream, &[half::bf16::ONE; 40]), &["stream = one of device 1", "write"]);
        two.stream.synchronize()
    });
}

/// The driver does not report whether work from before the capture has ended.
#[test]
fn a_buffer_that_is_dropped_while_its_stream_is_captured_is_leaked() {
    run_ranks(1, |_, group| {
        let device = VirtualGpu::new(VirtConfig::default());
        let mut rank = Rank::new(device.clone(), group, Setup::new(1, 1, TOKENS as u32, 64).options)?;
        let valid = Valid::new(&mut rank)?;
        let Rank { stream, mut buffer, .. } = rank;
        let order = StreamOrder::comm(&stream);
        // The capture is given its memory.
        drop(buffer.get_dispatch_layout(&valid.topk_idx, EXPERTS, order)?);
        stream.synchronize()?;
        let before = device.free_memory()?;
        let captured = stream.capture(|| {
            drop(buffer.get_dispatch_layout(&valid.topk_idx, EXPERTS, order)?);
            drop(buffer);
            Ok(())
        });
        refused(captured, &["stream_query was called"]);
        assert_eq!(device.free_memory()?, before);
        Ok(())
    });
}

#[test]
fn a_panic_in_a_capture_ends_it() {
    then_dispatch(setup(Spread::OneNode), |rank, valid, place| {
        let (stream, counts) = (rank.stream.clone(), rank.on_device());
        for panics_in in [1, 2] {
            let mut run = 0;
            let captured = catch_unwind(AssertUnwindSafe(|| {
                rank.buffer.capture(&stream, |_, _| {
                    run += 1;
                    assert_ne!(run, panics_in, "meant to fail");
                    Ok(())
                })
            }));
            assert!(captured.is_err());
            assert!(!stream.is_capturing()?);
        }
        let step = rank.buffer.capture(&stream, |buffer, order| {
            let received = buffer.dispatch(place, valid.request().counts(counts), order)?;
            Ok(received.detach())
        })?;
        step.launch(&stream)?;
        step.check(&stream)
    });
}

/// A recording has no results yet, and nothing can be allocated in it.
#[test]
fn calls_that_cannot_be_recorded_give_the_remedy() {
    setup(Spread::OneNode).run(|rank| {
        let (valid, mut place) = (Valid::new(rank)?, rank.place()?);
        let received = rank.dispatch(&mut place, valid.request())?;
        rank.stream.synchronize()?;
        let stream = rank.stream.clone();
        let read = stream.capture(|| received.recv_x.to_host::<half::bf16>(&stream).map(drop));
        refused(read, &["stream = under capture", "to_host waits", "behind a launch of the recording"]);
        let written = stream.capture(|| valid.x.write(&stream, &[half::bf16::ONE; 40]));
        refused(written, &["stream = under capture", "write waits", "before the capture"]);
        let waited = stream.capture(|| stream.synchronize());
        refused(waited, &["stream_synchronize", "read results behind a launch of the recording"]);
        let taken = stream.capture(|| Tensor::alloc(stream.device(), DType::U8, &[1 << 20]).map(drop));
        refused(taken, &["an allocation", "called once before, in `Buffer::capture`", "`begin_warmup`"]);
        // The captures have ended.
        rank.stream.synchronize()
    });
}

/// Kernels count in each other's memory; over such a link every operation would run into its
/// deadline.
#[test]
fn gpus_whose_links_have_no_atomics_make_no_buffer_on_any_rank() {
    let errors = errors_of(3, |group| {
        let mut setup = Setup::new(3, 1, TOKENS as u32, 64);
        setup.device.hooks.native_atomics = group.rank() != 1;
        Rank::join(&setup, group)
    });
    assert_eq!(errors.len(), 3, "{errors:?}");
    for error in errors {
        assert!(error.contains("ranks 1 and 0 share") && error.contains("no native atomics"), "{error}");
    }
}

fn an_expert_id_out_of_range_is_an_error_on_every_rank(spread: Spread) {
    for bad in [i64::from(EXPERTS), -2, i64::MAX, i64::MIN, 1 << 32] {
        then_dispatch(setup(spread), |rank, valid, place| {
            let mut ids = vec![vec![0i64, 3]; TOKENS as usize];
            if rank.rank == 1 {
                ids[2][1] = bad;
                ids[4][0] = bad;
            }
            let topk_idx = rank.upload_typed(2, &ids)?;
            let layout = rank.layout(&topk_idx, EXPERTS)?;
            let validated = layout.validate(&rank.stream);
            if rank.rank == 1 {
                let value = format!("topk_idx = {bad} (token 2, entry 1)");
                refused(validated, &[&value, "-1 or 0 to num_experts - 1 = 3"]);
                let named = topk_idx.clone().named("ids of layer 7");
                let validated = rank.layout(&named, EXPERTS)?.validate(&rank.stream);
                refused(validated, &[&format!("{value} of ids of layer 7: ")]);
            } else {
                validated?;
            }
            let request = valid.request_along(&layout);
            let parts = ["topk_idx of rank 1", "-1 or 0 to num_experts - 1", "DispatchLayout::validate"];
            refused(rank.dispatch(place, request), &parts);
            let handle = rank.dispatch(place, request.counts(rank.on_device()))?.handle;
            refused(rank.buffer.check_dispatch(&handle, &rank.stream), &parts);
            Ok(())
        });
    }
}

fn shapes_are_checked(spread: Spread) {
    then_dispatch(setup(spread), |rank, valid, place| {
        let wrong = |name: &str, have: &[u64], expected: &str| {
            format!("{name} has shape {have:?}, expected {expected}")
        };
        let idx = typed::<i64>(rank, &[TOKENS]);
        refused(rank.layout(&idx, EXPERTS), &[&wrong("topk_idx", &[5], "[num_tokens, num_topk]")]);
        // SAFETY: no kernel accesses it.
        let idx = unsafe { TypedTensor::<i64>::from_raw(valid.topk_idx.ptr(), &[1 << 25, 2]) };
        refused(rank.layout(&idx, EXPERTS), &["num_tokens = 33554432", "at most 33554431"]);
        for experts in [0u32, 1, 7] {
            let value = format!("num_experts = {experts}");
            refused(rank.layout(&valid.topk_idx, experts), &[&value, "multiple of the number of ranks, 2"]);
        }
        let x = tensor(rank, DType::Bf16, &[TOKENS, 7]);
        let parts = ["hidden", "7 x bf16", "multiple of 16 bytes"];
        refused(rank.dispatch(place, valid.request_of(&x)), &parts);
        let x = tensor(rank, DType::Bf16, &[4, 8]);
        let parts = wrong("x", &[4, 8], "[num_tokens = 5, hidden]");
        refused(rank.dispatch(place, valid.request_of(&x)), &[&parts]);
        for shape in [[6, 2], [5, 3]] {
            let weights = typed::<f32>(rank, &shape);
            let parts = wrong("topk_weights", &shape, "[num_tokens = 5, num_topk = 2]");
            refused(rank.dispatch(place, valid.request().topk_weights(&weights)), &[&parts]);
        }
        let x = tensor(rank, DType::Fp8E4m3, &[TOKENS, 16]);
        for (shape, expected) in [(vec![4], "[num_tokens = 5]"), (vec![6, 1], "[num_tokens = 5, num_scales]")]
        {
            let scales = typed::<f32>(rank, &shape);
            let request = valid.request_of(&x).scales(&scales);
            refused(rank.dispatch(place, request), &[&wrong("x_scales", &shape, expected)]);
        }

        let handle = rank.dispatch(place, valid.request())?.handle;
        let x = tensor(rank, DType::Bf16, &[6, 8]);
        let request = CachedDispatchRequest::new(&x, &handle);
        refused(rank.dispatch_cached(place, request), &["num_tokens = 5"]);
        let rows = tensor(rank, DType::Bf16, &[9, 8]);
        let parts = wrong("x", &[9, 8], "[num_recv_tokens = 10, hidden]");
        refused(rank.combine(CombineRequest::new(&rows, &handle)), &[&parts]);
        let (dtype, hidden) = (DType::F32, 4);
        let rows = place.combine_rows(dtype, 9, hidden)?;
        let parts = wrong("rows", &[9, hidden], "[num_recv_tokens = 10, hidden]");
        refused(rank.combine(CombineRequest::new(&rows, &handle)), &[&parts]);
        drop(rows);
        let rows = place.combine_rows(dtype, 10, hidden)?;
        for shape in [[10, 3], [11, 2]] {
            let weights = typed::<f32>(rank, &shape);
            let parts = wrong("topk_weights", &shape, "[num_recv_tokens = 10, num_topk = 2]");
            let request = CombineRequest::new(&rows, &handle).topk_weights(&weights);
            refused(rank.combine(request), &[&parts]);
        }
        rank.stream.synchronize()
    });
}

fn ranks_must_make_equal_buffers(spread: Spread) {
    // Rank 2 is the odd one; of two nodes it is on the other one.
    let ranks = if spread == Spread::OneNode { 3 } else { 4 };
    let odd = |change: fn(&mut Fields)| {
        errors_of(ranks, |group| {
            let mut setup = Setup { ranks, ..setup(spread) }.nodes(spread.nodes(2));
            if group.rank() == 2 {
                change(setup.fields());
            }
            Rank::join(&setup, group)
        })
    };
    let says = |rank: u32| {
        let (peer, ours, theirs) = if rank == 2 { (0, 64, 32) } else { (2, 32, 64) };
        format!(
            "rank {rank} and rank {peer} disagree on hidden: {ours} here, {theirs} there; collective calls need the same \
             on every rank"
        )
    };
    let errors = odd(|fields| fields.shape.hidden = 64);
    assert_eq!(errors, (0..ranks).map(says).collect::<Vec<_>>());
    type Odd = (fn(&mut Fields), &'static str);
    let anywhere: [Odd; 5] = [
        (|fields| fields.shape.max_topk = 3, "max_topk"),
        (|fields| fields.shape.max_scales = 1, "max_scales"),
        (|fields| fields.shape.max_tokens = 6, "max_tokens"),
        (|fields| fields.places = 2, "places"),
        (|fields| fields.config.num_sms += 2, "num_sms"),
    ];
    let on_nodes: [Odd; 7] = [
        (|fields| fields.ranks_per_node = Some(1), "ranks_per_node"),
        (|fields| fields.transport.queues_per_peer = 3, "queues_per_peer"),
        (|fields| fields.transport.kind = TransportKind::Tcp, "transport"),
        (|fields| fields.config.num_max_nvl_chunked_send_tokens = 7, "num_max_nvl_chunked_send_tokens"),
        (|fields| fields.config.num_max_nvl_chunked_recv_tokens = 512, "num_max_nvl_chunked_recv_tokens"),
        (|fields| fields.config.num_max_rdma_chunked_send_tokens = 3, "num_max_rdma_chunked_send_tokens"),
        (|fields| fields.config.num_max_rdma_chunked_recv_tokens = 516, "num_max_rdma_chunked_recv_tokens"),
    ];
    let on_nodes = if spread == Spread::SeveralNodes { &on_nodes[..] } else { &[] };
    for &(change, what) in anywhere.iter().chain(on_nodes) {
        let errors = odd(change);
        let named = errors.iter().all(|error| error.contains(&format!("disagree on {what}")));
        assert!(errors.len() as u32 == ranks && named, "{what}: {errors:?}");
    }
}

fn ranks_must_make_equal_dispatches(spread: Spread) {
    let wide = |rank: &Rank, wide: bool| tensor(rank, DType::Bf16, &[TOKENS, if wide { 16 } else { 8 }]);
    then_dispatch(setup(spread), |rank, valid, place| {
        let odd = rank.rank == 1;
        let mine = |ours: u32, theirs: u32| if odd { (theirs, ours) } else { (ours, theirs) };
        let disagree = |rank: &Rank, what: &str, (here, there): (u32, u32)| {
            let (me, peer) = (rank.rank, 1 - rank.rank);
            format!("rank {me} and rank {peer} disagree on {what}: {here} here, {there} there")
        };
        let x = wide(rank, odd);
        let result = rank.dispatch(place, valid.request_of(&x));
        refused(result, &[&disagree(rank, "bytes per row", mine(16, 32))]);
        let layout = rank.layout(&valid.topk_idx, if odd { 2 * EXPERTS } else { EXPERTS })?;
        let result = rank.dispatch(place, valid.request_along(&layout));
        refused(result, &[&disagree(rank, "num_experts", mine(EXPERTS, 2 * EXPERTS))]);
        let request = if odd { DispatchRequest::new(&valid.x, &valid.layout) } else { valid.request() };
        let given = |is_odd| if is_odd { "none" } else { "given" };
        let here_and_there = format!("topk_weights: {} here, {} there", given(odd), given(!odd));
        refused(rank.dispatch(place, request), &[&here_and_there]);
        let counts = Counts::OnDevice { capacity: if odd { 10 } else { 9 } };
        let handle = rank.dispatch(place, valid.request().counts(counts))?.handle;
        let parts = disagree(rank, "capacity in rows", mine(9, 10));
        refused(rank.buffer.check_dispatch(&handle, &rank.stream), &[&parts]);
        Ok(())
    });
}

fn a_handle_of_another_buffer_is_refused(spread: Spread) {
    then_dispatch(setup(spread), |rank, valid, place| {
        let mut other = Buffer::new(rank.device().clone(), &*rank.group, setup(spread).options)?;
        let mut there: Place = other.place(0)?;
        let handle = rank.dispatch(place, valid.request())?.handle;
        let order = StreamOrder::on(&rank.stream);
        let parts = ["stale handle", "another buffer"];
        let rows = there.combine_rows(DType::Bf16, 10, 8)?;
        refused(other.combine(CombineRequest::new(&rows, &handle), order), &parts);
        drop(rows);
        let request = CachedDispatchRequest::new(&valid.x, &handle);
        refused(other.dispatch_cached(&mut there, request, order), &parts);
        refused(other.check_dispatch(&handle, &rank.stream), &parts);
        refused(other.dispatch(&mut there, valid.request(), order), &parts);
        let parts = ["place = 0", "of another buffer"];
        refused(rank.dispatch(&mut there, valid.request()), &parts);
        let rows = there.combine_rows(DType::Bf16, 10, 8)?;
        refused(rank.combine(CombineRequest::new(&rows, &handle)), &parts);
        rank.synchronize()
    });
}
