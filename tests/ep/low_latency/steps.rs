//! Steps: captured once, run any number of times.

use std::sync::Arc;

use epoxide::driver::Stream;
use epoxide::low_latency::{Buffer, CombineRequest, Combined, Detached, DispatchRequest, Place};
use epoxide::throughput::Step;
use epoxide::{DType, Tensor, TypedTensor};
use epoxide::{Error, Result};
use half::bf16;

use super::faults::{HIDDEN, Rank, TOKENS, run};

/// A dispatch into `place` and the combine of `experts` rows.
fn captured(
    rank: &mut Rank,
    place: &mut Place,
    experts: &Tensor<'static>,
) -> Result<Step<Detached<Combined<'static>>>> {
    let Rank { buffer, stream, x, topk_idx, .. } = rank;
    buffer.capture(stream, |buffer, order| {
        let received = buffer.dispatch(place, DispatchRequest::new(x, topk_idx), order)?;
        Ok(buffer.combine(received, CombineRequest::by_row(experts), order)?.detach())
    })
}

/// Experts' rows, all of the same number.
fn rows_of(rank: &Rank, value: f32) -> Result<Tensor<'static>> {
    let rows = rank.buffer.rows();
    let numbers = vec![bf16::from_f32(value); (rows * HIDDEN) as usize];
    Tensor::from_host(&rank.stream, DType::Bf16, &[rows, HIDDEN], &numbers)
}

fn set_rows(rank: &Rank, rows: &Tensor<'static>, value: f32) -> Result<()> {
    rows.write(&rank.stream, &vec![bf16::from_f32(value); (rows.rows() * HIDDEN) as usize])
}

/// A token's sum: the experts' number from each rank that has one of its two experts.
fn sums_of(rank: &Rank, value: f32) -> Result<Vec<bf16>> {
    let ids = rank.topk_idx.values(&rank.stream)?;
    let local_experts = i64::from(rank.buffer.local_experts());
    let sums = ids.chunks(2).flat_map(|ids| {
        let ranks = 1 + u8::from(ids[0] / local_experts != ids[1] / local_experts);
        vec![bf16::from_f32(value * f32::from(ranks)); HIDDEN as usize]
    });
    Ok(sums.collect())
}

fn read(rank: &Rank, step: &Step<Detached<Combined<'static>>>, place: &Place) -> Result<Vec<bf16>> {
    step.output().at(place)?.x.to_host(&rank.stream)
}

#[test]
fn each_run_has_its_own_sums_and_a_peer_that_is_gone_is_no_result() {
    run(|rank| {
        let (mut place, rows, stream) = (rank.buffer.place(0)?, rows_of(rank, 1.0)?, rank.stream.clone());
        let step = captured(rank, &mut place, &rows)?;
        for value in [3.0, 5.0, 2.0] {
            set_rows(rank, &rows, value)?;
            step.launch(&stream)?;
            step.check(&stream)?;
            assert_eq!(read(rank, &step, &place)?, sums_of(rank, value)?);
        }
        if rank.number == 1 {
            return Ok(());
        }
        set_rows(rank, &rows, 7.0)?;
        step.launch(&stream)?;
        let errors = [
            read(rank, &step, &place).map(drop),
            step.check(&stream),
            step.launch(&stream),
            rank.dispatch(&mut place).map(drop),
        ];
        for error in errors {
            let error = error.unwrap_err();
            assert!(matches!(error, Error::PeerTimeout { peer: 1, .. }), "{error}");
        }
        Ok(())
    });
}

/// Kernels of two steps that ran at once would take each other's words.
#[test]
fn steps_on_two_streams_and_eager_calls_follow_each_other() {
    run(|rank| {
        let streams = [rank.stream.clone(), Arc::new(Stream::new(rank.stream.device())?)];
        let mut place = rank.buffer.place(0)?;
        let rows = [rows_of(rank, 3.0)?, rows_of(rank, 5.0)?];
        let steps = [captured(rank, &mut place, &rows[0])?, captured(rank, &mut place, &rows[1])?];
        for turn in 0..4 {
            for index in 0..2 {
                for (step, stream) in steps.iter().zip(&streams) {
                    step.launch(stream)?;
                }
                // The sums of the step that ran last are there, those of the other one were.
                let (last, before) = (&steps[1], &steps[0]);
                streams[1].synchronize()?;
                assert_eq!(read(rank, last, &place)?, sums_of(rank, 5.0)?, "turn {turn}, {index}");
                assert!(matches!(before.output().at(&place), Err(Error::StaleHandle(_))));
            }
            let received = rank.dispatch(&mut place)?;
            let error = steps[0].launch(&rank.stream).unwrap_err();
            assert!(error.to_string().contains("in use"), "{error}");
            drop(received);
        }
        Ok(())
    });
}

#[test]
fn results_that_are_detached_say_that_they_are_gone() {
    run(|rank| {
        let mut place = rank.buffer.place(0)?;
        let received = rank.dispatch(&mut place)?.detach();
        let tokens = TypedTensor::values(&received.at(&place)?.num_tokens, &rank.stream)?;
        assert_eq!(tokens[..3], [TOKENS as i32; 3]);
        drop(rank.dispatch(&mut place)?);
        let error = received.at(&place).unwrap_err();
        assert!(matches!(error, Error::StaleHandle(_)), "{error}");
        rank.outcome()
    });
}

#[test]
fn a_step_whose_buffer_is_gone_does_not_run() {
    run(|rank| {
        let (mut place, rows) = (rank.buffer.place(0)?, rows_of(rank, 1.0)?);
        let step = captured(rank, &mut place, &rows)?;
        step.launch(&rank.stream)?;
        rank.outcome()?;
        drop(place);
        let other = Buffer::new(rank.stream.device().clone(), &*rank.group, rank.options.clone())?;
        drop(std::mem::replace(&mut rank.buffer, other));
        let error = step.launch(&rank.stream).unwrap_err();
        assert!(matches!(error, Error::StaleHandle(_)), "{error}");
        Ok(())
    });
}
