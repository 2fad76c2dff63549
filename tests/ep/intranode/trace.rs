//! Traces: their contents, and that they change no result.

use epoxide::driver::virt::Time;
use epoxide::internal::Instruments;
use epoxide_gpu::layout::BlockTrace;

use crate::turns::{ROW, Turn, check_sums, echo};
use epoxide_testing::harness::Setup;

#[test]
fn a_trace_holds_every_block_of_every_launch_and_changes_nothing() {
    // Three channels.
    let mut setup = Setup::new(2, 3, 8, ROW);
    // A trace records real times, which deadlines do not need.
    setup.device.time = Time::Real;
    let turn = Turn::random(5, &[8, 5], 3);
    setup.run(|rank| {
        let (inputs, mut place) = turn.begin(rank)?;
        let (untraced, dropped) = rank.buffer.take_trace(&rank.stream)?;
        rank.check(untraced.is_empty() && dropped == 0, "a trace that was not started");

        rank.buffer.start_trace(15)?;
        let (_, back) = echo(rank, &mut place, &inputs)?;
        let (launches, dropped) = rank.buffer.take_trace(&rank.stream)?;
        check_sums(rank, "combined_x", &back, &turn)?;
        let shapes: Vec<_> = launches.iter().map(|launch| (launch.operation, launch.blocks.len())).collect();
        // Six multiprocessors: a notify has a block for each channel, the others one for each token
        // at most.
        let blocks = [6, 5][rank.rank as usize];
        rank.equal("launches", &shapes, &[("notify", 3), ("dispatch", blocks), ("combine", blocks)]);
        rank.check(dropped == 0, "nothing was dropped");
        let mut before = 0;
        for launch in &launches {
            let ordered = |block: &BlockTrace| {
                block.enter <= block.ready && block.ready <= block.moved && block.moved <= block.done
            };
            rank.check(launch.blocks.iter().all(ordered), "phases in order");
            // A launch starts when the one before it has ended.
            rank.check(launch.blocks.iter().all(|block| block.enter > before), "launches in order");
            before = launch.blocks.iter().map(|block| block.done).max().unwrap_or(0);
        }

        // Room for notify alone: the others run untraced, all the same.
        rank.buffer.start_trace(5)?;
        let (_, back) = echo(rank, &mut place, &inputs)?;
        let (launches, dropped) = rank.buffer.take_trace(&rank.stream)?;
        check_sums(rank, "combined_x without room", &back, &turn)?;
        rank.check(
            launches.len() == 1 && dropped == 2,
            format!("{} launches, {dropped} dropped", launches.len()),
        );
        let refused = rank.buffer.start_trace(0).is_err();
        rank.check(refused, "a trace of nothing");
        Ok(())
    });
}
