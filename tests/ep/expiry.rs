//! Deadlines that pass in the middle of operations, on a machine whose clock the test advances.
//! Blocks of a GPU do not progress alike: a wait of one expires while another is at work.

use std::time::Duration;

use epoxide::internal::Schedule;
use epoxide::internal::driver::{Drive, Executor, ManualGpus};
use epoxide::throughput::DispatchRequest;
use epoxide::transport::TransportKind;
use epoxide::{Error, Result};
use epoxide_testing::harness::{NodeLinks, Rank, Setup, assert_no_failures, run_ranks};
use epoxide_testing::tier;

use crate::promises::is_nan;
use crate::turns::{Inputs, ROW, TOPK, Turn, echo};

const RANKS: u32 = 2;
const CHANNELS: u32 = 2;
/// Short, so that kernels look at the clock every few polls.
const DEADLINE: Duration = Duration::from_millis(1);

fn one_rank_a_node() -> Option<NodeLinks> {
    Some(NodeLinks { ranks_per_node: 1, transport: TransportKind::Direct, queues: 1 })
}

/// Points of the operations at which a deadline passes: some of them in each tier.
const POINTS: u64 = 1000;

/// A round trip of each rank, all enqueued. `interrupt` then runs with the machine at its
/// beginning. Afterwards every kernel must end, and a result is right or an error.
fn round_trip(nodes: Option<NodeLinks>, seed: u64, interrupt: impl FnOnce(&ManualGpus)) -> Result<()> {
    let turn = Turn::random(seed, &[24, 17], CHANNELS);
    // The ranks' threads meet in the host while they make their buffers.
    let machine = ManualGpus::with_patience(seed, Duration::from_millis(1));
    let mut setup = Setup::new(RANKS, CHANNELS, 24, ROW).max_topk(TOPK).nodes(nodes);
    setup.fields().timeout = DEADLINE;
    if seed % 2 == 1 {
        setup.device.hooks.schedule = Schedule::Preemptions(3);
    }
    setup.device.hooks.executor = Executor::Manual(machine.clone());
    let mut ranks = run_ranks(RANKS, |_, group| Rank::join(&setup, group));
    let inputs = ranks.iter().map(|rank| Inputs::upload(&turn, rank)).collect::<Result<Vec<_>>>()?;
    let mut sums = Vec::new();
    for (rank, inputs) in ranks.iter_mut().zip(&inputs) {
        let mut place = rank.place()?;
        sums.push(echo(rank, &mut place, inputs)?.1.combined_x);
    }
    interrupt(&machine);
    for (rank, sums) in ranks.iter_mut().zip(&sums) {
        // Gives up with the stuck warps where a kernel does not end.
        rank.stream.synchronize()?;
        let (rows, want) = (rank.row_bytes(sums)?, &turn.sums[rank.rank as usize]);
        match rank.buffer.check() {
            Ok(()) => rank.equal("sums", &rows, want),
            Err(Error::PeerTimeout { .. }) => {
                let missing = rank.buffer.missing_tokens()?;
                for (token, (got, want)) in (0..).zip(rows.iter().zip(want)) {
                    let is_right = got == want || (is_nan(got) && missing.contains(&token));
                    rank.check(is_right, format!("token {token} of {missing:?}: {got:?}, {want:?}"));
                }
            }
            Err(error) => return Err(error),
        }
    }
    let failures = ranks.iter_mut().flat_map(|rank| std::mem::take(&mut rank.failures));
    assert_no_failures(failures.map(|failure| format!("seed {seed}: {failure}")).collect());
    Ok(())
}

/// Warp instructions of the round trip, in steps of 256.
fn length(nodes: Option<NodeLinks>) -> u64 {
    let mut length = 0;
    let count = |machine: &ManualGpus| {
        while machine.drive(256) != Drive::Idle {
            length += 256;
        }
    };
    round_trip(nodes, 0, count).unwrap();
    length
}

fn wherever_a_deadline_passes(nodes: Option<NodeLinks>) {
    let length = length(nodes);
    // With kernels whose posters waited for workers alone, point 237 did not end across nodes.
    for point in (0..POINTS).filter(|point| point % tier::pick(125, 10) == tier::pick(112, 7)) {
        let interrupt = |machine: &ManualGpus| {
            machine.drive(length * point / POINTS);
            machine.advance(2 * DEADLINE);
        };
        round_trip(nodes, point, interrupt).unwrap_or_else(|error| panic!("point {point}: {error}"));
    }
}

#[test]
fn every_kernel_ends_wherever_a_deadline_passes() {
    wherever_a_deadline_passes(None);
}

#[test]
fn every_kernel_ends_wherever_a_deadline_passes_across_nodes() {
    wherever_a_deadline_passes(one_rank_a_node());
}

/// Dispatches of rows by expert between two nodes of two ranks, whose warps wait for records of
/// copies. `interrupt` is that of [`round_trip`].
fn dispatch_by_expert(seed: u64, interrupt: impl FnOnce(&ManualGpus)) -> Result<()> {
    const RANKS: u32 = 4;
    let turn = Turn::random(seed, &[24, 17, 9, 20], CHANNELS);
    let machine = ManualGpus::with_patience(seed, Duration::from_millis(1));
    let nodes = NodeLinks { ranks_per_node: 2, transport: TransportKind::Direct, queues: 1 };
    let mut setup = Setup::new(RANKS, CHANNELS, 24, ROW).max_topk(TOPK).nodes(Some(nodes));
    setup.fields().timeout = DEADLINE;
    setup.fields().rows_by_expert = Some(1024);
    setup.device.hooks.executor = Executor::Manual(machine.clone());
    let mut ranks = run_ranks(RANKS, |_, group| Rank::join(&setup, group));
    let inputs = ranks.iter().map(|rank| Inputs::upload(&turn, rank)).collect::<Result<Vec<_>>>()?;
    for (rank, inputs) in ranks.iter_mut().zip(&inputs) {
        let (mut place, layout) = (rank.place()?, inputs.layout(rank)?);
        let request = DispatchRequest::new(&inputs.x, &layout).by_expert(8).counts(rank.on_device());
        rank.dispatch(&mut place, request)?;
    }
    interrupt(&machine);
    for rank in &ranks {
        // Gives up with the stuck warps where a kernel does not end.
        rank.stream.synchronize()?;
        match rank.buffer.check() {
            Ok(()) | Err(Error::PeerTimeout { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[test]
fn every_kernel_ends_wherever_a_deadline_passes_in_copies_across_nodes() {
    let mut length = 0;
    let count = |machine: &ManualGpus| {
        while machine.drive(256) != Drive::Idle {
            length += 256;
        }
    };
    dispatch_by_expert(0, count).unwrap();
    for point in (0..POINTS).filter(|point| point % tier::pick(125, 10) == tier::pick(112, 7)) {
        let interrupt = |machine: &ManualGpus| {
            machine.drive(length * point / POINTS);
            machine.advance(2 * DEADLINE);
        };
        dispatch_by_expert(point, interrupt).unwrap_or_else(|error| panic!("point {point}: {error}"));
    }
}

/// The clock advances by a microsecond with each turn of the grid that waits.
#[test]
fn a_deadline_of_microseconds_is_kept() {
    const SHORT: Duration = Duration::from_micros(50);
    let turn = Turn::random(0, &[24, 17], CHANNELS);
    for seed in 0..8 {
        let machine = ManualGpus::with_patience(seed, Duration::from_millis(1));
        let mut setup = Setup::new(RANKS, CHANNELS, 24, ROW).max_topk(TOPK);
        setup.fields().timeout = SHORT;
        setup.device.hooks.executor = Executor::Manual(machine.clone());
        let mut ranks = run_ranks(RANKS, |_, group| Rank::join(&setup, group));
        let rank = &mut ranks[0];
        let inputs = Inputs::upload(&turn, rank).unwrap();
        let mut place = rank.place().unwrap();
        let output = echo(rank, &mut place, &inputs).unwrap();
        while machine.drive(1) != Drive::Idle {
            machine.advance(Duration::from_micros(1));
        }
        drop(output);
        let error = rank.buffer.check().expect_err("rank 1 does not come");
        let Error::PeerTimeout { peer: 1, waited, .. } = error else { panic!("{error}") };
        assert!(SHORT < waited && waited < SHORT * 5 / 4, "seed {seed}: {waited:?}");
    }
}
