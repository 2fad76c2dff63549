//! Bad input, on one node, as it does not depend on nodes. Every error names the argument, its
//! value and the rule, and leaves the buffer usable.

use std::time::Duration;

use epoxide::Error;
use epoxide::driver::Module;
use epoxide::internal::Tuning;
use epoxide::throughput::{CachedDispatchRequest, CombineRequest, Config, Counts, DispatchRequest, Shape};
use epoxide::{DType, Tensor, TypedTensor};
use epoxide_gpu::layout::DevicePtr;
use epoxide_testing::oracle::Routing;

use crate::turns::{HIDDEN, Inputs, ROW, Turn, check_sums, echo};
use crate::valid::{EXPERTS, RANKS, TOKENS, Valid, bytes_in_pool, refused, tensor, then_dispatch, typed};
use epoxide_testing::harness::{POISON, Rank, Setup, assert_names};
use epoxide_testing::roundtrip::Case;

fn setup() -> Setup {
    Setup::new(RANKS, 1, TOKENS as u32, 64)
}

#[test]
fn rows_must_be_multiples_of_16_bytes() {
    then_dispatch(setup(), |rank, valid, place| {
        for (dtype, hidden, value) in [
            (DType::Bf16, 7, "7 x bf16 (14 bytes per row)"),
            (DType::Fp8E4m3, 24, "24 x fp8 (24 bytes per row)"),
            (DType::Bf16, 0, "0 x bf16 (0 bytes per row)"),
        ] {
            let x = tensor(rank, dtype, &[TOKENS, hidden]);
            let parts = ["hidden", value, "multiple of 16 bytes"];
            refused(rank.dispatch(place, valid.request_of(&x)), &parts);
        }
        let output = rank.dispatch(place, valid.request())?;
        let x = tensor(rank, DType::F32, &[2 * TOKENS, 5]);
        let parts = ["hidden", "5 x f32 (20 bytes per row)", "multiple of 16 bytes"];
        refused(rank.combine(CombineRequest::new(&x, &output.handle)), &parts);
        let rows = output.combine_rows(DType::Bf16, 9)?;
        let parts = ["hidden", "9 x bf16", "multiple of 16 bytes"];
        refused(rank.combine(CombineRequest::new(&rows, &output.handle)), &parts);
        drop(rows);
        let handle = output.handle;
        let x = tensor(rank, DType::Bf16, &[TOKENS, 7]);
        let request = CachedDispatchRequest::new(&x, &handle);
        refused(rank.dispatch_cached(place, request), &["hidden", "7 x bf16"]);
        Ok(())
    });
}

#[test]
fn rows_must_start_at_multiples_of_16_bytes() {
    then_dispatch(setup(), |rank, valid, place| {
        let memory = tensor(rank, DType::Bf16, &[TOKENS + 1, 8]);
        let at = DevicePtr(memory.ptr().0 + 8);
        // SAFETY: the rows lie in `memory`.
        let x = unsafe { Tensor::from_raw(at, DType::Bf16, &[TOKENS, 8]) };
        let parts = ["x = ", &format!("{:#x}", at.0), "multiple of 16 bytes"];
        refused(rank.dispatch(place, valid.request_of(&x)), &parts);
        Ok(())
    });
}

#[test]
fn rows_to_dispatch_must_be_contiguous() {
    // Use another place's rows, since a dispatch borrows its own.
    let mut setup = setup();
    setup.fields().places = 2;
    then_dispatch(setup, |rank, valid, place| {
        let other = rank.buffer.place(1)?;
        let rows = other.combine_rows(DType::Bf16, TOKENS, 8)?;
        let parts = ["x = row stride 128 bytes", "contiguous, 16 bytes apart"];
        refused(rank.dispatch(place, valid.request_of(rows.tensor())), &parts);
        Ok(())
    });
}

#[test]
fn scales_that_the_copy_engine_moves_must_start_at_multiples_of_16_bytes() {
    then_dispatch(setup().max_scales(4), |rank, valid, place| {
        let x = tensor(rank, DType::Fp8E4m3, &[TOKENS, 16]);
        let memory = tensor(rank, DType::F32, &[TOKENS + 1, 4]);
        let at = DevicePtr(memory.ptr().0 + 4);
        for (columns, aligned) in [(4, false), (3, true)] {
            // SAFETY: the scales lie in `memory`.
            let scales = unsafe { TypedTensor::from_raw(at, &[TOKENS, columns]) };
            let request = valid.request_of(&x).scales(&scales);
            match aligned {
                true => drop(rank.dispatch(place, request)?),
                false => refused(
                    rank.dispatch(place, request),
                    &["x_scales = ", "multiple of 16 bytes with 4 scales"],
                ),
            }
        }
        rank.stream.synchronize()
    });
}

#[test]
fn experts_must_divide_among_the_ranks() {
    then_dispatch(setup(), |rank, valid, _| {
        for experts in [0u32, 1, 7] {
            let value = format!("num_experts = {experts}");
            refused(rank.layout(&valid.topk_idx, experts), &[&value, "multiple of the number of ranks, 2"]);
        }
        refused(rank.layout(&valid.topk_idx, 2050), &["num_experts = 2050", "at most 1024 per rank"]);
        Ok(())
    });
}

#[test]
fn top_k_is_1_to_32() {
    then_dispatch(setup(), |rank, _, _| {
        for topk in [0u64, 33] {
            let topk_idx = typed::<i64>(rank, &[TOKENS, topk]);
            let parts = [&format!("num_topk = {topk}"), "1 to 32"];
            refused(rank.layout(&topk_idx, EXPERTS), &parts.map(|part| part as &str));
        }
        Ok(())
    });
}

#[test]
fn dtypes_are_checked() {
    then_dispatch(setup(), |rank, valid, place| {
        let wrong =
            |name: &str, have: &str, expected: &str| format!("{name} has dtype {have}, expected {expected}");
        // Ids, weights and scales have a type; a tensor that was made otherwise does not become
        // one.
        let parts = wrong("tensor", "i32", "i64");
        refused(tensor(rank, DType::I32, &[TOKENS, 2]).typed::<i64>(), &[&parts]);
        let parts = wrong("tensor", "bf16", "f32");
        refused(tensor(rank, DType::Bf16, &[TOKENS, 2]).typed::<f32>(), &[&parts]);
        for dtype in [DType::I64, DType::Bool] {
            let x = tensor(rank, dtype, &[TOKENS, 16]);
            let parts = wrong("x", dtype.name(), "bf16 or f32 or fp8 or i32");
            refused(rank.dispatch(place, valid.request_of(&x)), &[&parts]);
        }

        let output = rank.dispatch(place, valid.request())?;
        let rows = tensor(rank, DType::Fp8E4m3, &[2 * TOKENS, 16]);
        let parts = wrong("x", "fp8", "bf16 or f32");
        refused(rank.combine(CombineRequest::new(&rows, &output.handle)), &[&parts]);
        let in_pool = output.combine_rows(DType::I32, 16)?;
        let parts = wrong("rows", "i32", "bf16 or f32");
        refused(rank.combine(CombineRequest::new(&in_pool, &output.handle)), &[&parts]);
        Ok(())
    });
}

#[test]
fn a_combine_without_known_counts_reads_no_more_rows_than_it_is_given() {
    // 10 rows are received. A virtual GPU faults on accesses beyond these tensors' pages.
    for given in ["3 rows", "2 weights"] {
        setup().run(|rank| {
            let (valid, mut place) = (Valid::new(rank)?, rank.place()?);
            let counts = Counts::OnDevice { capacity: 10 };
            let output = rank.dispatch(&mut place, valid.request().counts(counts))?;
            let rows = rank.upload_rows(DType::Bf16, 8, &vec![vec![0; 16]; 3])?;
            let weights = rank.upload_typed(2, &vec![vec![1.0f32, 2.0]; 2])?;
            if given == "3 rows" {
                rank.combine(CombineRequest::new(&rows, &output.handle))?;
            } else {
                let in_pool = output.combine_rows(DType::Bf16, 8)?;
                rank.combine(CombineRequest::new(&in_pool, &output.handle).topk_weights(&weights))?;
            }
            rank.stream.synchronize()?;
            refused(rank.buffer.check(), &[&format!("10 rows came, and it was given {}", &given[..1])]);
            Ok(())
        });
    }
}

#[test]
fn optional_arguments_go_together() {
    then_dispatch(setup().max_scales(4), |rank, valid, place| {
        let scales = typed::<f32>(rank, &[TOKENS, 1]);
        let parts = ["x_scales", "1-byte elements", "x is bf16"];
        refused(rank.dispatch(place, valid.request().scales(&scales)), &parts);
        let request = valid.request().expert_alignment(0);
        refused(rank.dispatch(place, request), &["expert_alignment = 0", "at least 1"]);
        // Ids travel with weights or not at all.
        let without = rank.dispatch(place, DispatchRequest::new(&valid.x, &valid.layout))?;
        let neither = without.recv_topk_idx.is_none() && without.recv_topk_weights.is_none();
        rank.check(neither, "ids and weights of a dispatch without weights");
        let with = rank.dispatch(place, valid.request())?;
        rank.check(with.recv_topk_idx.is_some() && with.recv_topk_weights.is_some(), "both with weights");
        let handle = with.handle;
        let request = CachedDispatchRequest::new(&valid.x, &handle).scales(&scales);
        refused(rank.dispatch_cached(place, request), &parts);
        Ok(())
    });
}

#[test]
fn inputs_beyond_the_buffer_are_named_with_the_option() {
    then_dispatch(setup().max_topk(2).max_scales(3), |rank, valid, place| {
        let x = tensor(rank, DType::Bf16, &[TOKENS, 40]);
        let parts = ["hidden: needs 80 bytes, has 64 bytes", "hidden * dtype.size() >= 80"];
        refused(rank.dispatch(place, valid.request_of(&x)), &parts);
        let too_many = rank.upload_typed(2, &vec![vec![0i64, 3]; TOKENS as usize + 1])?;
        let parts = ["num_tokens: needs 6 tokens, has 5 tokens", "max_tokens >= 6"];
        refused(rank.layout(&too_many, EXPERTS), &parts);
        let x = tensor(rank, DType::Fp8E4m3, &[TOKENS, 16]);
        let scales = typed::<f32>(rank, &[TOKENS, 4]);
        let request = valid.request_of(&x).scales(&scales);
        let parts = ["x_scales: needs 4 scales, has 3 scales", "max_scales >= 4"];
        refused(rank.dispatch(place, request), &parts);
        let idx = rank.upload_typed(3, &vec![vec![0i64; 3]; TOKENS as usize])?;
        let weights = typed::<f32>(rank, &[TOKENS, 3]);
        let layout = rank.layout(&idx, EXPERTS)?;
        let request = DispatchRequest::new(&valid.x, &layout).topk_weights(&weights);
        let parts = ["num_topk: needs 3 entries, has 2 entries", "max_topk >= 3"];
        refused(rank.dispatch(place, request), &parts);
        let request = valid.request().counts(Counts::OnDevice { capacity: 11 });
        refused(rank.dispatch(place, request), &["capacity: needs 11 rows, has 10 rows"]);
        let parts = ["combine rows: needs 11 rows, has 10 rows"];
        refused(place.combine_rows(DType::Bf16, 11, 8), &parts);
        let parts = ["hidden: needs 80 bytes, has 64 bytes"];
        refused(place.combine_rows(DType::Bf16, 1, 40), &parts);
        rank.stream.synchronize()
    });
}

#[test]
fn buffer_options_are_checked() {
    let make = |change: &dyn Fn(&mut Setup)| {
        let mut setup = setup();
        change(&mut setup);
        let made = epoxide_testing::lockstep::run(setup.ranks, |group| Rank::join(&setup, group));
        made.err().unwrap_or_else(|| panic!("{setup:?} should be refused"))
    };
    let shape = |change: &dyn Fn(&mut Shape)| make(&|setup| change(&mut setup.fields().shape));
    let tuning = |change: &dyn Fn(&mut Tuning)| make(&|setup| change(&mut setup.fields().tuning));
    assert_names(
        &shape(&|s| s.hidden = 12),
        &["hidden = 12 x bf16 (24 bytes per row)", "multiple of 16 bytes"],
    );
    assert_names(&shape(&|s| s.hidden = 0), &["hidden = 0 x bf16 (0 bytes per row)", "positive"]);
    assert_names(&shape(&|s| s.max_topk = 0), &["max_topk = 0", "1 to 32"]);
    assert_names(&shape(&|s| s.max_topk = 33), &["max_topk = 33", "1 to 32"]);
    for tokens in [1 << 25, u32::MAX] {
        let value = format!("max_tokens = {tokens}: must be at most 33554431");
        assert_names(&shape(&|s| s.max_tokens = tokens), &[&value]);
    }
    for dtype in [DType::I64, DType::Bool] {
        let value = format!("dtype = {dtype}: no dispatch sends rows of i64 or bool: use u8");
        assert_names(&shape(&|s| s.dtype = dtype), &[&value]);
    }
    let timeout = "timeout = 0 s: must be longer than 0";
    assert_names(&make(&|setup| setup.fields().timeout = Duration::ZERO), &[timeout]);
    let none = Config { num_sms: 0, ..Config::default() };
    assert_names(&make(&|setup| setup.fields().config = none), &["num_sms = 0", "0 channels"]);
    let many = Config { num_sms: 1000, ..Config::default() };
    assert_names(&make(&|setup| setup.fields().config = many), &["num_sms = 1000", "500 channels"]);
    assert_names(&make(&|setup| setup.ranks = 65), &["group size = 65", "1 to 64 ranks"]);
    assert_names(&tuning(&|t| t.dispatch_warps = 17), &["dispatch_warps = 17", "must be 1 to"]);
    assert_names(&tuning(&|t| t.combine_slots = 1), &["combine_slots = 1", "must be 2 to"]);
    let stagers = tuning(&|t| t.combine_stagers = Some(0));
    assert_names(&stagers, &["combine_stagers = 0", "must be 1 to"]);
    let error = make(&|setup| setup.fields().num_nvl_bytes = Some(1000));
    assert_names(&error, &["num_nvl_bytes: needs", "has 1000 bytes"]);
}

#[test]
fn ranks_must_agree_on_the_number_of_experts() {
    // The wait for a missing count would expire after this.
    let timeout = std::time::Duration::from_secs(5);
    then_dispatch(setup().timeout(timeout), |rank, valid, place| {
        let layout = rank.layout(&valid.topk_idx, if rank.rank == 1 { 2 * EXPERTS } else { EXPERTS })?;
        let result = rank.dispatch(place, valid.request_along(&layout));
        refused(result, &["disagree on num_experts", "4", "8"]);
        Ok(())
    });
}

/// Rank 1 receives 6 tokens of each rank: 12 rows, more than a pool of `rows` rows holds.
fn too_much(rows: u64) -> (Setup, Case) {
    let to_rank_1 = Routing { num_experts: 4, num_topk: 2, topk_idx: vec![vec![vec![2, 3]; 6]; 2] };
    let case = Case::new(to_rank_1, ROW as u32);
    let mut setup = case.setup();
    let shape = setup.fields().shape;
    // The pool's bytes for that many rows, found as a user would: from the error of a smaller one.
    setup.fields().num_nvl_bytes = Some(bytes_for_one_row(&setup) + (rows - 1) * bytes_per_row(&shape));
    (setup, case)
}

fn bytes_for_one_row(setup: &Setup) -> u64 {
    let setup = Setup { options: setup.options.clone().num_nvl_bytes(0), ..setup.clone() };
    match epoxide_testing::lockstep::run(setup.ranks, |group| Rank::join(&setup, group)) {
        Err(Error::Capacity { what: "num_nvl_bytes", needed, .. }) => needed,
        other => panic!("{other:?}"),
    }
}

/// A row in the receive pool and in the combine pool, with its metadata.
fn bytes_per_row(shape: &Shape) -> u64 {
    2 * shape.max_row_bytes().next_multiple_of(128) + u64::from(shape.max_topk) * (8 + 4 + 4) + 4
}

#[test]
fn a_pool_that_is_too_small_is_an_error_on_every_rank_before_any_row_moves() {
    let (setup, case) = too_much(8);
    let sent = u64::from(case.plans()[1].num_recv_tokens);
    assert_eq!(sent, 12);
    let needed_bytes = setup.run(|rank| {
        rank.equal("capacity", &[rank.buffer.capacity()], &[8]);
        let mut place = rank.place()?;
        let (recv_x, src_idx) = {
            // A small dispatch returns the pool's addresses, and checks that rows arrive there.
            let topk_idx = rank.upload_typed(2, &[vec![0i64, 3]])?;
            let layout = rank.layout(&topk_idx, 4)?;
            let x = rank.upload_rows(DType::Bf16, HIDDEN as u64, &[vec![7; ROW as usize]])?;
            let request = DispatchRequest::new(&x, &layout).counts(rank.on_device());
            let output = rank.dispatch(&mut place, request)?;
            let rows = rank.row_bytes(&output.recv_x)?;
            rank.equal("rows that fit", &rows[..2], &[vec![7; ROW as usize], vec![7; ROW as usize]]);
            rank.stream.synchronize()?;
            let src_idx = output.recv_src_idx.as_ref().expect("a full dispatch");
            (bytes_in_pool(&output.recv_x), bytes_in_pool(src_idx))
        };
        let mine = rank.rank as usize;
        let topk_idx = rank.upload_typed(2, &case.routing.topk_idx[mine])?;
        let weights = rank.upload_typed(2, &vec![vec![1.0f32; 2]; 6])?;
        let x = rank.upload_rows(DType::Bf16, HIDDEN as u64, &vec![vec![9; ROW as usize]; 6])?;
        let layout = rank.layout(&topk_idx, 4)?;
        rank.poison(&recv_x)?;
        rank.poison(&src_idx)?;
        rank.group.barrier(epoxide_testing::harness::PATIENCE)?;
        let request = DispatchRequest::new(&x, &layout).topk_weights(&weights);

        let mut needed_bytes = 0;
        for counts in [Counts::Exact, Counts::OnDevice { capacity: 8 }, Counts::OnDevice { capacity: 5 }] {
            let result = rank.dispatch(&mut place, request.counts(counts));
            let result = match counts {
                Counts::Exact => result.map(drop),
                Counts::OnDevice { .. } => rank.buffer.check_dispatch(&result?.handle, &rank.stream),
            };
            let error = result.expect_err("rank 1 cannot receive 12 rows");
            let have = if counts == (Counts::OnDevice { capacity: 5 }) { 5 } else { 8 };
            let parts =
                [format!("needs {sent} rows, has {have} rows"), format!("rank 1 would receive {sent} rows")];
            assert_names(&error, &[&parts[0], &parts[1], "max_tokens >= 6"]);
            if counts == Counts::Exact {
                let text = error.to_string();
                let bytes = text.split("num_nvl_bytes >= ").nth(1).expect("the error says how many bytes");
                needed_bytes = bytes.trim().parse().expect("a number of bytes");
            }
        }
        // Other ranks may still write when the first one has finished.
        rank.synchronize()?;
        let poisoned = |bytes: Vec<u8>| bytes.iter().all(|&byte| byte == POISON);
        let (rows, indices) = (rank.raw(&recv_x)?, rank.raw(&src_idx)?);
        rank.check(poisoned(rows) && poisoned(indices), "no row moved");

        // The buffer still works, with what fits.
        let turn = Turn::random(4, &[4, 4], 1);
        let inputs = Inputs::upload(&turn, rank)?;
        let (_, back) = echo(rank, &mut place, &inputs)?;
        check_sums(rank, "combined_x afterwards", &back, &turn)?;
        rank.stream.synchronize()?;
        Ok(needed_bytes)
    });

    // The size in the error is enough, and no more than needed.
    assert_eq!(needed_bytes[0], needed_bytes[1]);
    let mut setup = setup;
    setup.fields().num_nvl_bytes = Some(needed_bytes[0]);
    setup.run(|rank| {
        rank.equal("capacity", &[rank.buffer.capacity()], &[sent]);
        rank.check_everything(&case)
    });
}

#[test]
fn a_capacity_that_is_too_small_is_named_before_the_pool_is() {
    then_dispatch(setup(), |rank, valid, place| {
        let counts = Counts::OnDevice { capacity: 9 };
        let handle = rank.dispatch(place, valid.request().counts(counts))?.handle;
        let parts =
            ["needs 10 rows, has 9 rows", "rank 0 would receive 10 rows: dispatch with capacity >= 10"];
        refused(rank.buffer.check_dispatch(&handle, &rank.stream), &parts);
        Ok(())
    });
}

#[test]
fn a_dispatch_that_waits_for_counts_cannot_be_captured() {
    then_dispatch(setup(), |rank, valid, place| {
        // The memory that this gives back is all that the capture needs: it must fail for the wait
        // alone.
        drop(rank.dispatch(place, valid.request())?);
        let stream = rank.stream.clone();
        let captured = stream.capture(|| rank.dispatch(place, valid.request()).map(drop));
        refused(captured, &["counts = exact", "the host cannot wait for a dispatch that is only recorded"]);
        Ok(())
    });
}

#[test]
fn ptx_that_does_not_parse_is_located() {
    let setup = setup();
    setup.run(|rank| {
        let ptx = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry k()\n{\n    frobnicate.u32 %r1;\n    ret;\n}\n";
        refused(Module::load(rank.device(), ptx), &["PTX module", "line 6, column 5", "frobnicate"]);
        let module = Module::load(rank.device(), epoxide_gpu::PTX)?;
        refused(module.kernel("no_such_kernel", 0), &["no entry no_such_kernel", "dispatch"]);
        Ok(())
    });
}
