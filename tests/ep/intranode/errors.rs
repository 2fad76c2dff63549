//! Bad input, on one node, as it does not depend on nodes: every error names the argument, its value and the rule, and leaves the buffer usable.

use epoxide::Error;
use epoxide::driver::Module;
use epoxide::ep::{
    BufferShape, CachedDispatchRequest, CombineRows, Config, Counts, DType, DispatchRequest, StreamOrder,
    Tensor, Tuning,
};
use epoxide_gpu::layout::DevicePtr;
use epoxide_testing::oracle::Routing;

use crate::turns::{HIDDEN, Inputs, ROW, Turn, echo};
use crate::valid::{EXPERTS, RANKS, TOKENS, refused, tensor, then_dispatch};
use epoxide_testing::harness::{POISON, Rank, Setup, assert_names};
use epoxide_testing::roundtrip::Case;

fn setup() -> Setup {
    Setup::new(RANKS, 1, TOKENS as u32, 64)
}

#[test]
fn rows_must_be_multiples_of_16_bytes() {
    then_dispatch(setup(), |rank, valid| {
        for (dtype, hidden, value) in [
            (DType::Bf16, 7, "7 x bf16 (14 bytes per row)"),
            (DType::Fp8E4m3, 24, "24 x fp8 (24 bytes per row)"),
            (DType::Bf16, 0, "0 x bf16 (0 bytes per row)"),
        ] {
            let x = tensor(rank, dtype, &[TOKENS, hidden]);
            let parts = ["hidden", value, "multiple of 16 bytes"];
            refused(rank.dispatch(DispatchRequest { x: &x, ..valid.request() }), &parts);
        }
        let handle = rank.dispatch(valid.request())?.handle;
        let x = tensor(rank, DType::F32, &[2 * TOKENS, 5]);
        let parts = ["hidden", "5 x f32 (20 bytes per row)", "multiple of 16 bytes"];
        refused(rank.combine(CombineRows::Tensor(&x), None, &handle), &parts);
        let rows = CombineRows::InPool { dtype: DType::Bf16, hidden: 9 };
        refused(rank.combine(rows, None, &handle), &["hidden", "9 x bf16", "multiple of 16 bytes"]);
        let x = tensor(rank, DType::Bf16, &[TOKENS, 7]);
        refused(rank.dispatch_cached(&x, None, &handle), &["hidden", "7 x bf16"]);
        Ok(())
    });
}

#[test]
fn rows_must_start_at_multiples_of_16_bytes() {
    then_dispatch(setup(), |rank, valid| {
        let memory = tensor(rank, DType::Bf16, &[TOKENS + 1, 8]);
        let at = DevicePtr(memory.ptr().0 + 8);
        // SAFETY: the rows lie in `memory`.
        let x = unsafe { Tensor::from_raw(at, DType::Bf16, &[TOKENS, 8]) };
        let parts = ["x = ", &format!("{:#x}", at.0), "multiple of 16 bytes"];
        refused(rank.dispatch(DispatchRequest { x: &x, ..valid.request() }), &parts);
        Ok(())
    });
}

#[test]
fn rows_to_dispatch_must_be_contiguous() {
    then_dispatch(setup(), |rank, valid| {
        let x = rank.buffer.combine_rows(DType::Bf16, TOKENS, 8)?;
        let parts = ["x = row stride 128 bytes", "contiguous, 16 bytes apart"];
        refused(rank.dispatch(DispatchRequest { x: &x, ..valid.request() }), &parts);
        Ok(())
    });
}

#[test]
fn scales_that_the_copy_engine_moves_must_start_at_multiples_of_16_bytes() {
    then_dispatch(setup().max_scales(4), |rank, valid| {
        let x = tensor(rank, DType::Fp8E4m3, &[TOKENS, 16]);
        let memory = tensor(rank, DType::F32, &[TOKENS + 1, 4]);
        let at = DevicePtr(memory.ptr().0 + 4);
        for (columns, aligned) in [(4, false), (3, true)] {
            // SAFETY: the scales lie in `memory`.
            let scales = unsafe { Tensor::from_raw(at, DType::F32, &[TOKENS, columns]) };
            let request = DispatchRequest { x: &x, x_scales: Some(&scales), ..valid.request() };
            match aligned {
                true => drop(rank.dispatch(request)?),
                false => {
                    refused(rank.dispatch(request), &["x_scales = ", "multiple of 16 bytes with 4 scales"])
                }
            }
        }
        rank.stream.synchronize()
    });
}

#[test]
fn experts_must_divide_among_the_ranks() {
    then_dispatch(setup(), |rank, valid| {
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
    then_dispatch(setup(), |rank, _| {
        for topk in [0u64, 33] {
            let topk_idx = tensor(rank, DType::I64, &[TOKENS, topk]);
            let parts = [&format!("num_topk = {topk}"), "1 to 32"];
            refused(rank.layout(&topk_idx, EXPERTS), &parts.map(|part| part as &str));
        }
        Ok(())
    });
}

#[test]
fn dtypes_are_checked() {
    then_dispatch(setup(), |rank, valid| {
        let wrong =
            |name: &str, have: &str, expected: &str| format!("{name} has dtype {have}, expected {expected}");
        let idx = tensor(rank, DType::I32, &[TOKENS, 2]);
        refused(rank.layout(&idx, EXPERTS), &[&wrong("topk_idx", "i32", "i64")]);
        let request = DispatchRequest { topk_idx: Some(&idx), ..valid.request() };
        refused(rank.dispatch(request), &[&wrong("topk_idx", "i32", "i64")]);
        let weights = tensor(rank, DType::Bf16, &[TOKENS, 2]);
        let request = DispatchRequest { topk_weights: Some(&weights), ..valid.request() };
        refused(rank.dispatch(request), &[&wrong("topk_weights", "bf16", "f32")]);
        for dtype in [DType::I64, DType::Bool] {
            let x = tensor(rank, dtype, &[TOKENS, 16]);
            let request = DispatchRequest { x: &x, ..valid.request() };
            refused(rank.dispatch(request), &[&wrong("x", dtype.name(), "bf16 or f32 or fp8 or i32")]);
        }
        let x = tensor(rank, DType::Fp8E4m3, &[TOKENS, 16]);
        let scales = tensor(rank, DType::Bf16, &[TOKENS, 1]);
        let request = DispatchRequest { x: &x, x_scales: Some(&scales), ..valid.request() };
        refused(rank.dispatch(request), &[&wrong("x_scales", "bf16", "f32")]);

        let handle = rank.dispatch(valid.request())?.handle;
        let rows = tensor(rank, DType::Fp8E4m3, &[2 * TOKENS, 16]);
        refused(
            rank.combine(CombineRows::Tensor(&rows), None, &handle),
            &[&wrong("x", "fp8", "bf16 or f32")],
        );
        let in_pool = CombineRows::InPool { dtype: DType::I32, hidden: 16 };
        refused(rank.combine(in_pool, None, &handle), &[&wrong("x", "i32", "bf16 or f32")]);
        let in_pool = CombineRows::InPool { dtype: DType::F32, hidden: 16 };
        let weights = tensor(rank, DType::I32, &[2 * TOKENS, 2]);
        let parts = [&*wrong("topk_weights", "i32", "f32")];
        refused(rank.combine(in_pool, Some(&weights), &handle), &parts);
        Ok(())
    });
}

#[test]
fn a_combine_without_known_counts_reads_no_more_rows_than_it_is_given() {
    then_dispatch(setup(), |rank, valid| {
        let counts = Counts::OnDevice { capacity: 10 };
        let handle = rank.dispatch(DispatchRequest { counts, ..valid.request() })?.handle;
        // 10 rows came. A virtual GPU faults on what lies behind these tensors' pages.
        let rows = rank.upload_rows(DType::Bf16, 8, &vec![vec![0; 16]; 3])?;
        let weights = rank.upload(DType::F32, 2, &vec![vec![1.0f32, 2.0]; 2])?;
        rank.combine(CombineRows::Tensor(&rows), None, &handle)?;
        let in_pool = CombineRows::InPool { dtype: DType::Bf16, hidden: 8 };
        rank.combine(in_pool, Some(&weights), &handle)?;
        rank.stream.synchronize()
    });
}

#[test]
fn optional_arguments_go_together() {
    then_dispatch(setup().max_scales(4), |rank, valid| {
        let scales = tensor(rank, DType::F32, &[TOKENS, 1]);
        let request = DispatchRequest { x_scales: Some(&scales), ..valid.request() };
        refused(rank.dispatch(request), &["x_scales", "1-byte elements", "x is bf16"]);
        let request = DispatchRequest { topk_idx: None, ..valid.request() };
        refused(rank.dispatch(request), &["topk_idx = none", "goes with topk_weights"]);
        let request = DispatchRequest { topk_weights: None, ..valid.request() };
        refused(rank.dispatch(request), &["topk_weights = none", "goes with topk_idx"]);
        let request = DispatchRequest { expert_alignment: 0, ..valid.request() };
        refused(rank.dispatch(request), &["expert_alignment = 0", "at least 1"]);
        let handle = rank.dispatch(valid.request())?.handle;
        let request = CachedDispatchRequest { x: &valid.x, x_scales: Some(&scales), handle: &handle };
        let cached = rank.buffer.dispatch_cached(request, StreamOrder::on(&rank.stream));
        refused(cached, &["x_scales", "1-byte elements", "x is bf16"]);
        Ok(())
    });
}

#[test]
fn what_the_buffer_was_not_made_for_is_named_with_the_option() {
    then_dispatch(setup().max_topk(2).max_scales(3), |rank, valid| {
        let x = tensor(rank, DType::Bf16, &[TOKENS, 40]);
        let request = DispatchRequest { x: &x, ..valid.request() };
        refused(rank.dispatch(request), &["hidden: needs 80 bytes, has 64 bytes", "max_row_bytes >= 80"]);
        let x = tensor(rank, DType::Fp8E4m3, &[TOKENS, 16]);
        let scales = tensor(rank, DType::F32, &[TOKENS, 4]);
        let request = DispatchRequest { x: &x, x_scales: Some(&scales), ..valid.request() };
        refused(rank.dispatch(request), &["x_scales: needs 4 scales, has 3 scales", "max_scales >= 4"]);
        let idx = rank.upload(DType::I64, 3, &vec![vec![0i64; 3]; TOKENS as usize])?;
        let weights = tensor(rank, DType::F32, &[TOKENS, 3]);
        let layout = rank.layout(&idx, EXPERTS)?;
        let request = DispatchRequest {
            topk_idx: Some(&idx),
            topk_weights: Some(&weights),
            layout: &layout,
            ..valid.request()
        };
        refused(rank.dispatch(request), &["num_topk: needs 3 entries, has 2 entries", "max_topk >= 3"]);
        let request = DispatchRequest { counts: Counts::OnDevice { capacity: 11 }, ..valid.request() };
        refused(rank.dispatch(request), &["capacity: needs 11 rows, has 10 rows"]);
        refused(rank.buffer.combine_rows(DType::Bf16, 11, 8), &["combine rows: needs 11 rows, has 10 rows"]);
        refused(rank.buffer.combine_rows(DType::Bf16, 1, 40), &["hidden: needs 80 bytes, has 64 bytes"]);
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
    let shape = |change: &dyn Fn(&mut BufferShape)| make(&|setup| change(&mut setup.options.shape));
    let tuning = |change: &dyn Fn(&mut Tuning)| make(&|setup| change(&mut setup.options.tuning));
    assert_names(&shape(&|s| s.max_row_bytes = 24), &["hidden = 24 bytes per row", "multiple of 16 bytes"]);
    assert_names(&shape(&|s| s.max_row_bytes = 0), &["hidden = 0 bytes per row", "positive"]);
    assert_names(&shape(&|s| s.max_topk = 0), &["num_topk = 0", "1 to 32"]);
    assert_names(&shape(&|s| s.max_topk = 33), &["num_topk = 33", "1 to 32"]);
    let parts = ["max_tokens_per_rank = 4294967295", "8589934590 rows for 2 ranks", "31 bits"];
    assert_names(&shape(&|s| s.max_tokens_per_rank = u32::MAX), &parts);
    let none = Config { num_sms: 0, ..Config::default() };
    assert_names(&make(&|setup| setup.options.config = none), &["num_sms = 0", "0 channels"]);
    let many = Config { num_sms: 1000, ..Config::default() };
    assert_names(&make(&|setup| setup.options.config = many), &["num_sms = 1000", "500 channels"]);
    assert_names(&make(&|setup| setup.ranks = 9), &["group size = 9", "1 to 8 ranks"]);
    assert_names(&tuning(&|t| t.dispatch_warps = 17), &["dispatch_warps = 17", "must be 1 to"]);
    assert_names(&tuning(&|t| t.combine_slots = 1), &["combine_slots = 1", "must be 2 to"]);
    let error = make(&|setup| setup.options.num_nvl_bytes = Some(1000));
    assert_names(&error, &["num_nvl_bytes: needs", "has 1000 bytes"]);
}

#[test]
fn ranks_must_agree_on_the_number_of_experts() {
    // A count that never comes would show after this.
    let timeout = std::time::Duration::from_secs(5);
    then_dispatch(setup().timeout(timeout), |rank, valid| {
        let layout = rank.layout(&valid.topk_idx, if rank.rank == 1 { 2 * EXPERTS } else { EXPERTS })?;
        let result = rank.dispatch(DispatchRequest { layout: &layout, ..valid.request() });
        refused(result, &["disagree on num_experts", "4", "8"]);
        Ok(())
    });
}

/// Rank 1 receives 6 tokens of each rank: 12 rows, more than a pool of `rows` rows holds.
fn too_much(rows: u64) -> (Setup, Case) {
    let to_rank_1 = Routing { num_experts: 4, num_topk: 2, topk_idx: vec![vec![vec![2, 3]; 6]; 2] };
    let case = Case::new(to_rank_1, ROW as u32);
    let mut setup = case.setup();
    let shape = setup.options.shape;
    // The pool's bytes for that many rows, found as a user would: from the error of a smaller one.
    setup.options.num_nvl_bytes = Some(bytes_for_one_row(&setup) + (rows - 1) * bytes_per_row(&shape));
    (setup, case)
}

fn bytes_for_one_row(setup: &Setup) -> u64 {
    let setup = Setup {
        options: epoxide::ep::BufferOptions { num_nvl_bytes: Some(0), ..setup.options.clone() },
        ..setup.clone()
    };
    match epoxide_testing::lockstep::run(1, |group| Rank::join(&setup, group)) {
        Err(Error::Capacity { what: "num_nvl_bytes", needed, .. }) => needed,
        other => panic!("{other:?}"),
    }
}

/// A row in the receive pool and in the combine pool, with its metadata.
fn bytes_per_row(shape: &BufferShape) -> u64 {
    2 * shape.max_row_bytes.next_multiple_of(128) + u64::from(shape.max_topk) * (8 + 4 + 4) + 4
}

#[test]
fn a_pool_that_is_too_small_is_an_error_on_every_rank_before_any_row_moves() {
    let (setup, case) = too_much(8);
    let sent = u64::from(case.plans()[1].num_recv_tokens);
    assert_eq!(sent, 12);
    let needed_bytes = setup.run(|rank| {
        rank.equal("capacity", &[rank.buffer.capacity()], &[8]);
        let whole = {
            // A small dispatch gives the pool's places, and shows that rows get there at all.
            let topk_idx = rank.upload(DType::I64, 2, &[vec![0i64, 3]])?;
            let layout = rank.layout(&topk_idx, 4)?;
            let x = rank.upload_rows(DType::Bf16, HIDDEN as u64, &[vec![7; ROW as usize]])?;
            let counts = rank.on_device();
            let output = rank.dispatch(DispatchRequest { counts, ..DispatchRequest::new(&x, &layout) })?;
            let rows = rank.row_bytes(&output.recv_x)?;
            rank.equal("rows that fit", &rows[..2], &[vec![7; ROW as usize], vec![7; ROW as usize]]);
            rank.stream.synchronize()?;
            output
        };
        let mine = rank.rank as usize;
        let topk_idx = rank.upload(DType::I64, 2, &case.routing.topk_idx[mine])?;
        let weights = rank.upload(DType::F32, 2, &vec![vec![1.0f32; 2]; 6])?;
        let x = rank.upload_rows(DType::Bf16, HIDDEN as u64, &vec![vec![9; ROW as usize]; 6])?;
        let layout = rank.layout(&topk_idx, 4)?;
        let src_idx = whole.recv_src_idx.as_ref().expect("a full dispatch");
        rank.poison(&whole.recv_x)?;
        rank.poison(src_idx)?;
        rank.group.barrier(epoxide_testing::harness::PATIENCE)?;
        let request = DispatchRequest {
            topk_idx: Some(&topk_idx),
            topk_weights: Some(&weights),
            ..DispatchRequest::new(&x, &layout)
        };

        let mut needed_bytes = 0;
        for counts in [Counts::Exact, Counts::OnDevice { capacity: 8 }, Counts::OnDevice { capacity: 5 }] {
            let result = rank.dispatch(DispatchRequest { counts, ..request });
            let result = match counts {
                Counts::Exact => result.map(drop),
                Counts::OnDevice { .. } => rank.buffer.check_dispatch(&result?.handle, &rank.stream),
            };
            let error = result.expect_err("rank 1 cannot receive 12 rows");
            let have = if counts == (Counts::OnDevice { capacity: 5 }) { 5 } else { 8 };
            let parts =
                [format!("needs {sent} rows, has {have} rows"), format!("rank 1 would receive {sent} rows")];
            assert_names(&error, &[&parts[0], &parts[1], "max_tokens_per_rank >= 6"]);
            if counts == Counts::Exact {
                let text = error.to_string();
                let bytes = text.split("num_nvl_bytes >= ").nth(1).expect("the error says how many bytes");
                needed_bytes = bytes.trim().parse().expect("a number of bytes");
            }
        }
        // Whoever is through first has not seen what others may still write.
        rank.synchronize()?;
        let poisoned = |bytes: Vec<u8>| bytes.iter().all(|&byte| byte == POISON);
        let (rows, indices) = (rank.raw(&whole.recv_x)?, rank.raw(src_idx)?);
        rank.check(poisoned(rows) && poisoned(indices), "no row moved");

        // The buffer still works, with what fits.
        let turn = Turn::random(4, &[4, 4], 1);
        let inputs = Inputs::upload(&turn, rank)?;
        let (_, back) = echo(rank, &inputs, turn.routing.num_experts)?;
        let got = rank.row_bytes(&back.combined_x)?;
        rank.equal("combined_x afterwards", &got, &turn.sums[mine]);
        rank.stream.synchronize()?;
        Ok(needed_bytes)
    });

    // What the error asked for is enough, and no more than it takes.
    assert_eq!(needed_bytes[0], needed_bytes[1]);
    let mut setup = setup;
    setup.options.num_nvl_bytes = Some(needed_bytes[0]);
    setup.run(|rank| {
        rank.equal("capacity", &[rank.buffer.capacity()], &[sent]);
        rank.check_everything(&case)
    });
}

#[test]
fn a_capacity_that_is_too_small_is_named_before_the_pool_is() {
    then_dispatch(setup(), |rank, valid| {
        let counts = Counts::OnDevice { capacity: 9 };
        let handle = rank.dispatch(DispatchRequest { counts, ..valid.request() })?.handle;
        let parts =
            ["needs 10 rows, has 9 rows", "rank 0 would receive 10 rows: dispatch with capacity >= 10"];
        refused(rank.buffer.check_dispatch(&handle, &rank.stream), &parts);
        Ok(())
    });
}

#[test]
fn a_dispatch_that_waits_for_counts_cannot_be_captured() {
    then_dispatch(setup(), |rank, valid| {
        // The memory that this gives back is all that the capture needs: it must fail for the wait alone.
        drop(rank.dispatch(valid.request())?);
        let stream = rank.stream.clone();
        let captured = stream.capture(|| rank.dispatch(valid.request()).map(drop));
        refused(captured, &["while the stream is being captured"]);
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
