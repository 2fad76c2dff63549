//! The expert-major copy. Every round trip that is compared step by step compares it as well; here
//! are its own cases.

use epoxide::low_latency::Quantise;
use epoxide::{DType, StreamOrder, Tensor, TypedTensor};
use epoxide::{Error, Result};
use epoxide_testing::low_latency::{LowLatencyCase, LowLatencyRank};
use epoxide_testing::oracle::{Routing, Style};
use epoxide_testing::tier;

use crate::shapes::routing;

fn gathers(routing: Routing, hidden: u32) -> LowLatencyCase {
    LowLatencyCase { gathers: true, ..LowLatencyCase::new(routing, hidden) }
}

#[test]
fn gathered_rows_that_experts_return_unchanged() {
    gathers(routing(&[9, 5, 0, 12], 3, 8, Style::WithHoles), 24).check();
    // Rows of several pieces, the last one short.
    gathers(routing(&[3, 4], 2, 4, Style::DistinctTopK), 1024 + 2048 + 8).check();
    LowLatencyCase {
        rounds: tier::pick(12, 60),
        places: 2,
        ..gathers(routing(&[3, 5, 2], 3, 6, Style::Repeats), 40)
    }
    .check_chained();
}

#[test]
fn more_experts_than_a_warp_has_lanes() {
    for style in [Style::DistinctTopK, Style::Skewed] {
        gathers(routing(&[40, 31], 6, 2 * 75, style), 16).check();
    }
    let quantise = Quantise::Fp8;
    LowLatencyCase { quantise, ..LowLatencyCase::new(routing(&[7, 9], 8, 2 * 64, Style::WithHoles), 2304) }
        .check();
}

#[test]
fn a_captured_step_with_the_copy_run_many_times() {
    gathers(routing(&[3, 5, 0, 2], 3, 8, Style::WithHoles), 16).check_replayed(tier::pick(8, 30));
    LowLatencyCase {
        rounds: 3,
        places: 2,
        halves: true,
        ..gathers(routing(&[6, 2], 2, 6, Style::WithHoles), 16)
    }
    .check_replayed(tier::pick(2, 5));
}

#[test]
fn a_copy_beside_other_work() {
    let case = gathers(routing(&[4, 6], 2, 4, Style::DistinctTopK), 64);
    case.run(|rank| {
        let inputs = case.inputs(rank)?;
        let LowLatencyRank { buffer, stream, .. } = rank;
        let mut place = buffer.place(0)?;
        let received =
            buffer.dispatch(&mut place, inputs.request(Quantise::None), StreamOrder::comm(stream))?;
        let shape = [u64::from(buffer.local_experts()) * buffer.rows(), 64];
        let copies = [(); 2]
            .map(|()| Tensor::from_host(stream, DType::Bf16, &shape, &vec![7u16; shape[0] as usize * 64]));
        let [beside, behind] = copies;
        let (beside, behind) = (beside?, behind?);
        let order = StreamOrder::comm(stream).asynchronous();
        let event = buffer.gather_by_expert(&received, &beside, None, order)?.expect("it is asynchronous");
        assert!(buffer.gather_by_expert(&received, &behind, None, StreamOrder::on(stream))?.is_none());
        event.synchronize()?;
        let rows = behind.to_host::<u16>(stream)?;
        assert!(rows.iter().any(|&x| x != 7), "no row was copied");
        assert_eq!(beside.to_host::<u16>(stream)?, rows);
        buffer.check()
    });
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    let bf16 = LowLatencyCase::new(routing(&[4, 6], 2, 4, Style::DistinctTopK), 256);
    for case in [LowLatencyCase { quantise: Quantise::Fp8, ..bf16.clone() }, bf16] {
        case.run(|rank| refusals(&case, rank));
    }
}

/// With one expert on a rank, received rows have the shape of those of the experts.
#[test]
fn rows_are_not_gathered_over_themselves() {
    let case = LowLatencyCase::new(routing(&[4, 6], 2, 2, Style::DistinctTopK), 256);
    case.run(|rank| {
        let inputs = case.inputs(rank)?;
        let LowLatencyRank { buffer, stream, .. } = rank;
        let (order, mut place) = (StreamOrder::on(stream), buffer.place(0)?);
        let received = buffer.dispatch(&mut place, inputs.request(case.quantise), order)?;
        let error = buffer.gather_by_expert(&received, &received.x, None, order).unwrap_err();
        assert!(error.to_string().contains("shares memory with received.x"), "{error}");
        stream.synchronize()?;
        buffer.check()
    });
}

fn refusals(case: &LowLatencyCase, rank: &mut LowLatencyRank) -> Result<()> {
    let inputs = case.inputs(rank)?;
    let LowLatencyRank { buffer, stream, .. } = rank;
    let order = StreamOrder::on(stream);
    let mut place = buffer.place(0)?;
    let mut received = buffer.dispatch(&mut place, inputs.request(case.quantise), order)?;
    let (experts, rows, hidden) = (u64::from(buffer.local_experts()), buffer.rows(), u64::from(case.hidden));
    let tensor = |dtype, shape: [u64; 2]| Tensor::alloc(stream.device(), dtype, &shape);
    let of_scales =
        |shape: [u64; 2]| TypedTensor::from_host(stream, &shape, &vec![0f32; (shape[0] * shape[1]) as usize]);
    let (dtype, other, has_scales) = match case.quantise {
        Quantise::None => (DType::Bf16, DType::Fp8E4m3, false),
        _ => (DType::Fp8E4m3, DType::Bf16, true),
    };
    let x = tensor(dtype, [experts * rows, hidden])?;
    let scales = of_scales([experts * hidden / 128, rows])?;
    let fitting = has_scales.then_some(&scales);
    let mut refused = |x: &Tensor<'_>, scales: Option<&TypedTensor<'_, f32>>, part: &str| {
        let error = buffer.gather_by_expert(&received, x, scales, order).unwrap_err();
        assert!(error.to_string().contains(part), "{error}");
        error
    };
    let too_few = tensor(dtype, [experts * rows - 1, hidden])?;
    assert!(matches!(refused(&too_few, fitting, "local_experts * rows"), Error::Shape { .. }));
    assert!(matches!(
        refused(&tensor(dtype, [experts * rows, hidden * 2])?, fitting, "hidden"),
        Error::Shape { .. }
    ));
    assert!(matches!(
        refused(&tensor(other, [experts * rows, hidden])?, fitting, "x has dtype"),
        Error::DType { .. }
    ));
    let error = refused(&x, if has_scales { None } else { Some(&scales) }, "scales");
    assert!(matches!(error, Error::Argument { .. }), "{error}");
    if has_scales {
        let error = refused(&x, Some(&of_scales([experts, rows])?), "local_experts * (hidden / 128)");
        assert!(matches!(error, Error::Shape { .. }), "{error}");
    }
    let columns =
        |shape: [u64; 2]| TypedTensor::from_host(stream, &shape, &vec![0i32; (shape[0] * shape[1]) as usize]);
    // Rows without columns; a field of the caller's with too many words is held against the room.
    let error =
        buffer.gather_columns_by_expert(&received, &x, &columns([experts, rows])?, order).unwrap_err();
    assert!(error.to_string().contains("received rows have 0 words"), "{error}");
    received.columns.push(columns([1000, rows])?);
    let error =
        buffer.gather_columns_by_expert(&received, &x, &columns([experts, rows])?, order).unwrap_err();
    assert!(error.to_string().contains("must have 1 to 2"), "{error}");
    received.columns = vec![columns([2, rows])?];
    let error =
        buffer.gather_columns_by_expert(&received, &x, &columns([experts, rows])?, order).unwrap_err();
    assert!(error.to_string().contains("local_experts * words"), "{error}");
    received.columns.clear();
    // The rows' places do not depend on these fields, but a field with a wrong shape is rejected as
    // well.
    let kept = std::mem::replace(&mut received.x, tensor(dtype, [rows, hidden / 2])?);
    let error = buffer.gather_by_expert(&received, &x, fitting, order).unwrap_err();
    assert!(error.to_string().contains("received.x"), "{error}");
    received.x = kept;
    // No work was enqueued, and the buffer still works.
    buffer.gather_by_expert(&received, &x, fitting, order)?;
    stream.synchronize()?;
    buffer.check()
}
