//! Steps: captured once, run any number of times.

use std::sync::Arc;

use epoxide::driver::Stream;
use epoxide::driver::virt::{VirtConfig, VirtualGpu};
use epoxide::low_latency::{Buffer, DispatchRequest, Options, Place, Received};
use epoxide::{DType, Error, Result, StreamOrder, Tensor, TypedTensor};
use half::bf16;

use super::faults::{TOKENS, run};
use super::ones::{CapturedPair, Ones};
use crate::valid::{expect_gone, refused};

fn read(rank: &Ones, step: &CapturedPair, place: &Place) -> Result<Vec<bf16>> {
    step.output().at(place)?.x.to_host(&rank.stream)
}

#[test]
fn each_run_has_its_own_sums_and_a_peer_that_is_gone_is_no_result() {
    run(|rank| {
        let (mut place, stream) = (rank.buffer.place(0)?, rank.stream.clone());
        let step = rank.captured(&mut place)?;
        for value in [3.0, 5.0, 2.0] {
            rank.set_experts(value)?;
            step.launch(&stream)?;
            step.check(&stream)?;
            assert_eq!(read(rank, &step, &place)?, rank.sums(value)?);
        }
        if rank.rank == 1 {
            return Ok(());
        }
        rank.set_experts(7.0)?;
        step.launch(&stream)?;
        let errors = [
            read(rank, &step, &place).map(drop),
            step.check(&stream),
            step.launch(&stream),
            rank.dispatch(&mut place).map(drop),
        ];
        for error in errors {
            expect_gone(error);
        }
        Ok(())
    });
}

/// Kernels of two concurrent steps would read each other's words.
#[test]
fn steps_on_two_streams_and_eager_calls_follow_each_other() {
    run(|rank| {
        let streams = [rank.stream.clone(), Arc::new(Stream::new(rank.stream.device())?)];
        let mut place = rank.buffer.place(0)?;
        rank.experts = rank.rows_of(3.0)?;
        let first = rank.captured(&mut place)?;
        let others = rank.rows_of(5.0)?;
        let _kept = std::mem::replace(&mut rank.experts, others);
        let steps = [first, rank.captured(&mut place)?];
        for turn in 0..4 {
            for index in 0..2 {
                for (step, stream) in steps.iter().zip(&streams) {
                    step.launch(stream)?;
                }
                // The sums of the step that ran last are there, those of the other one were.
                let (last, before) = (&steps[1], &steps[0]);
                streams[1].synchronize()?;
                assert_eq!(read(rank, last, &place)?, rank.sums(5.0)?, "turn {turn}, {index}");
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
        let mut place = rank.buffer.place(0)?;
        let step = rank.captured(&mut place)?;
        step.launch(&rank.stream)?;
        rank.outcome()?;
        drop(place);
        let other = Buffer::new(rank.stream.device().clone(), &*rank.group, Options::new(rank.shape))?;
        drop(std::mem::replace(&mut rank.buffer, other));
        let error = step.launch(&rank.stream).unwrap_err();
        assert!(matches!(error, Error::StaleHandle(_)), "{error}");
        Ok(())
    });
}

/// A step keeps the memory of its own buffer's operations, and is ordered with those.
#[test]
fn a_step_records_its_own_buffer_alone() {
    run(|rank| {
        let (stream, mut place) = (rank.stream.clone(), rank.buffer.place(0)?);
        let mut other = Buffer::new(stream.device().clone(), &*rank.group, Options::new(rank.shape))?;
        let mut of_other = other.place(0)?;
        for order in [StreamOrder::on(&stream), StreamOrder::comm(&stream)] {
            let request = DispatchRequest::new(&rank.x, &rank.topk_idx);
            let captured = rank.buffer.capture(&stream, |buffer, on_stream| {
                let received = buffer.dispatch(&mut place, request, on_stream)?.detach();
                Ok((received, other.dispatch(&mut of_other, request, order)?.detach()))
            });
            let step = format!("order = on a stream that a step of buffer {} records", rank.buffer.id());
            refused(captured, &[&step, &format!("this is buffer {}", other.id()), "`Stream::capture`"]);
        }
        // Both are as good as before.
        let request = DispatchRequest::new(&rank.x, &rank.topk_idx);
        drop(other.dispatch(&mut of_other, request, StreamOrder::on(&stream))?);
        let step = rank.captured(&mut place)?;
        step.launch(&stream)?;
        step.check(&stream)?;
        other.check()
    });
}

/// The step would not keep the memory of the other recording.
#[test]
fn no_other_recording_of_a_buffer_is_made_within_a_capture() {
    run(|rank| {
        let (stream, mut place) = (rank.stream.clone(), rank.buffer.place(0)?);
        for nested_in in [1, 2] {
            let mut run = 0;
            let captured = rank.buffer.capture(&stream, |buffer, _| {
                run += 1;
                if run < nested_in { Ok(()) } else { buffer.capture(&stream, |_, _| Ok(())).map(drop) }
            });
            refused(captured, &["buffer = ", "recording of the buffer has begun", "outer `capture`"]);
        }
        rank.buffer.begin_warmup();
        refused(rank.buffer.capture(&stream, |_, _| Ok(())), &["behind `end_warmup`"]);
        rank.buffer.end_warmup();

        let side = Stream::new(stream.device())?;
        let request = DispatchRequest::new(&rank.x, &rank.topk_idx);
        let captured = rank.buffer.capture(&stream, |buffer, _| {
            let graph = side.capture(|| {
                buffer.dispatch(&mut place, request, StreamOrder::on(&side)).map(Received::detach).map(drop)
            });
            graph.map(drop)
        });
        refused(captured, &["order = on a stream that another capture records"]);
        rank.captured(&mut place)?.launch(&stream)?;
        rank.outcome()
    });
}

#[test]
fn rows_that_a_step_has_overwritten_are_not_gathered() {
    run(|rank| {
        let (stream, mut place) = (rank.stream.clone(), rank.buffer.place(0)?);
        let request = DispatchRequest::new(&rank.x, &rank.topk_idx);
        let step = rank.buffer.capture(&stream, |buffer, order| {
            buffer.dispatch(&mut place, request, order).map(Received::detach)
        })?;
        let detached = rank.dispatch(&mut place)?.detach();
        let received = detached.at(&place)?;
        step.launch(&stream)?;
        let rows = u64::from(rank.buffer.local_experts()) * rank.buffer.rows();
        let by_expert = Tensor::alloc(stream.device(), DType::Bf16, &[rows, rank.shape.hidden])?;
        let order = StreamOrder::on(&stream);
        let gathered = rank.buffer.gather_by_expert(received, &by_expert, None, order);
        assert!(matches!(gathered, Err(Error::StaleHandle(_))), "{gathered:?}");
        let of_step = step.output().at(&place)?;
        rank.buffer.gather_by_expert(of_step, &by_expert, None, order)?;
        rank.outcome()
    });
}

/// Nothing has been enqueued into the place.
#[test]
fn a_refused_dispatch_leaves_the_rows_before_it() {
    run(|rank| {
        let mut place = rank.buffer.place(0)?;
        let received = rank.dispatch(&mut place)?.detach();
        let other = VirtualGpu::new(VirtConfig { ordinal: 7, ..VirtConfig::default() });
        let x = Tensor::alloc(&other, DType::Bf16, &[rank.x.rows(), rank.shape.hidden])?;
        let request = DispatchRequest::new(&x, &rank.topk_idx);
        let order = StreamOrder::on(&rank.stream);
        refused(rank.buffer.dispatch(&mut place, request, order), &["x = in memory of device 7"]);
        let tokens = received.at(&place)?.num_tokens.values(&rank.stream)?;
        assert_eq!(tokens[..3], [TOKENS as i32; 3]);
        rank.outcome()
    });
}
