//! Combines of tensors, whose rows some blocks copy into the pools while others gather them.
use epoxide::internal::Tuning;
use epoxide::throughput::{CombineRequest, Config, Counts, DispatchRequest};
use epoxide_testing::harness::Setup;
use epoxide_testing::oracle::Style;
use epoxide_testing::roundtrip::Case;
use epoxide_testing::tier;

use crate::shapes::routing;
use crate::turns::{Inputs, ROW, Turn, check_sums};

/// Every round trip combines rows of BF16 with weights and rows of FP32 without, from tensors and
/// from the pool.
fn check(tokens: &[u32], num_channels: u32, row_bytes: u32, combine_stagers: Option<u32>) {
    for schedule_seed in tier::pick(vec![Some(3)], vec![None, Some(3)]) {
        let routing = routing(tokens, 2, 2 * tokens.len() as u32, Style::DistinctTopK);
        let tuning = Tuning { combine_stagers, ..Tuning::default() };
        Case { num_channels, tuning, schedule_seed, ..Case::new(routing, row_bytes) }.check();
    }
}

#[test]
fn ranks_with_few_many_and_no_rows() {
    for stagers in tier::sample([Some(5), None, Some(1)]) {
        check(&[0, 1, 60], 3, 80, stagers);
    }
}

#[test]
fn fewer_rows_than_units() {
    check(&[3, 2], 8, 48, None);
    check(&[3, 2], 8, 48, Some(3));
}

#[test]
fn channels_in_parts() {
    // One channel of four ranks is copied in eight parts; of one rank in 32, of which most have a
    // row or none.
    for stagers in tier::sample([Some(9), None, Some(3)]) {
        check(&[40, 3, 17, 0], 1, 80, stagers);
        check(&[37], 1, 80, stagers);
    }
}

#[test]
fn more_blocks_than_multiprocessors() {
    // All that there are gather, and the units are as many as there can be.
    check(&[90, 70], 66, 48, None);
}

#[test]
fn rows_of_which_a_step_takes_one() {
    check(&[7, 12], 1, 40_016, Some(1));
}

#[test]
fn a_captured_combine_of_a_tensor_replays() {
    let turns: Vec<Turn> = (0..tier::pick(3, 8)).map(|seed| Turn::random(seed, &[9, 2, 6], 2)).collect();
    Setup::new(3, 2, 9, ROW).run(|rank| {
        let (inputs, mut place) = turns[0].begin(rank)?;
        let (stream, experts) = (rank.stream.clone(), turns[0].routing.num_experts);
        let step = rank.buffer.capture(&stream, |buffer, order| {
            let layout = buffer.get_dispatch_layout(&inputs.topk_idx, experts, order)?;
            let counts = Counts::OnDevice { capacity: buffer.capacity() };
            let request = DispatchRequest::new(&inputs.x, &layout).counts(counts);
            let output = buffer.dispatch(&mut place, request, order)?;
            let back = buffer.combine(CombineRequest::new(&output.recv_x, &output.handle), order)?;
            Ok((output.detach(), back))
        })?;
        for (index, turn) in turns.iter().enumerate() {
            let fresh = Inputs::upload(turn, rank)?;
            inputs.overwrite(rank, &fresh)?;
            step.launch(&stream)?;
            check_sums(rank, &format!("combined_x of replay {index}"), &step.output().1, turn)?;
            step.check(&stream)?;
            // Another grid in between, of another operation.
            let output = inputs.dispatch_exact(rank, &mut place)?;
            let before = *rank.buffer.config();
            rank.buffer.set_config(Config { num_sms: 2, ..before })?;
            let back = rank.combine(CombineRequest::new(&output.recv_x, &output.handle))?;
            rank.buffer.set_config(before)?;
            check_sums(rank, "combined_x without the graph", &back, turn)?;
        }
        Ok(())
    });
}

#[test]
fn ranks_may_gather_with_other_numbers_of_multiprocessors_than_each_other_and_than_the_dispatch() {
    let turn = Turn::random(0, &[26, 15], 2);
    Setup::new(2, 3, 26, ROW).run(|rank| {
        let (inputs, mut place) = turn.begin(rank)?;
        let output = inputs.dispatch_exact(rank, &mut place)?;
        let before = *rank.buffer.config();
        for num_sms in [[2, 4], [6, 2], [14, 12], [4, 10]] {
            rank.buffer.set_config(Config { num_sms: num_sms[rank.rank as usize], ..before })?;
            let back = rank.combine(CombineRequest::new(&output.recv_x, &output.handle))?;
            check_sums(rank, "combined_x", &back, &turn)?;
        }
        Ok(())
    });
}
