//! Deadlines that pass in the middle of operations, on a machine whose clock the test advances.
//! Blocks of a GPU do not progress alike: a wait of one expires while another is at work.

use std::cell::Cell;
use std::time::Duration;

use epoxide::internal::Schedule;
use epoxide::internal::driver::{Drive, Executor, ManualGpus};
use epoxide::throughput::DispatchRequest;
use epoxide::transport::TransportKind;
use epoxide::{Error, Result};
use epoxide_testing::harness::{NodeLinks, Rank, Setup, assert_no_failures, run_ranks};
use epoxide_testing::{lockstep, tier};
use epoxide_vgpu::for_each_seed;

use crate::promises::is_nan;
use crate::turns::{Inputs, ROW, TOPK, Turn, echo};

const RANKS: u32 = 2;
const CHANNELS: u32 = 2;
/// Short, so that kernels read the clock every few polls.
const DEADLINE: Duration = Duration::from_millis(1);

fn one_rank_a_node() -> Option<NodeLinks> {
    Some(NodeLinks { ranks_per_node: 1, transport: TransportKind::Direct, queues: 1 })
}

/// Points of the operations at which a deadline passes: some of them in each tier.
const POINTS: u64 = 1000;

/// Runs a machine with operations at their beginning, and is given whether a wait has expired.
type Interrupt<'a> = &'a dyn Fn(&ManualGpus, &dyn Fn() -> bool);

/// A round trip of each rank, all enqueued, then `interrupt`. Afterwards every kernel must end, and a
/// result is right or an error. Returns whether a wait has expired.
fn round_trip(nodes: Option<NodeLinks>, seed: u64, interrupt: Interrupt<'_>) -> Result<bool> {
    let turn = Turn::random(seed, &[24, 17], CHANNELS);
    let machine = ManualGpus::new(seed);
    let mut setup = Setup::new(RANKS, CHANNELS, 24, ROW).max_topk(TOPK).nodes(nodes);
    setup.fields().timeout = DEADLINE;
    if seed % 2 == 1 {
        setup.device.hooks.schedule = Schedule::Preemptions(3);
    }
    setup.device.hooks.executor = Executor::Manual(machine.clone());
    let mut ranks = lockstep::run(RANKS, |group| Rank::join(&setup, group))?;
    let inputs = ranks.iter().map(|rank| Inputs::upload(&turn, rank)).collect::<Result<Vec<_>>>()?;
    let mut sums = Vec::new();
    for (rank, inputs) in ranks.iter_mut().zip(&inputs) {
        let mut place = rank.place()?;
        sums.push(echo(rank, &mut place, inputs)?.1.combined_x);
    }
    interrupt(&machine, &|| has_expired(&ranks));
    for (rank, sums) in ranks.iter_mut().zip(&sums) {
        // Gives up with the stuck warps where a kernel does not end.
        rank.stream.synchronize()?;
        let (rows, want) = (rank.row_bytes(sums)?, &turn.sums[rank.rank as usize]);
        match rank.buffer.check() {
            Ok(()) => rank.equal("sums", &rows, want),
            Err(error) if is_late(&error) => {
                let missing = rank.buffer.missing_tokens()?;
                for (token, (got, want)) in (0..).zip(rows.iter().zip(want)) {
                    let is_right = got == want || (is_nan(got) && missing.contains(&token));
                    rank.check(is_right, format!("token {token} of {missing:?}: {got:?}, {want:?}"));
                }
            }
            Err(error) => return Err(error),
        }
    }
    let expired = has_expired(&ranks);
    let failures = ranks.iter_mut().flat_map(|rank| std::mem::take(&mut rank.failures));
    assert_no_failures(failures.map(|failure| format!("seed {seed}: {failure}")).collect());
    Ok(expired)
}

/// Whether a wait of the rank has expired, or one of a peer whose rows it still read.
fn is_late(error: &Error) -> bool {
    match error {
        Error::PeerTimeout { .. } => true,
        Error::Broken { reason, .. } => reason.contains("gave up while"),
        _ => false,
    }
}

/// Whether a wait of a rank has expired.
fn has_expired(ranks: &[Rank]) -> bool {
    ranks.iter().any(|rank| matches!(rank.buffer.check(), Err(Error::PeerTimeout { .. })))
}

/// Runs `operations` of a seed with deadlines that pass at points spread over them, until a wait
/// has expired. They return whether one has.
fn wherever_a_deadline_passes(operations: impl Fn(u64, Interrupt<'_>) -> Result<bool>) {
    // Warp instructions, in steps of 256.
    let length = Cell::new(0);
    let count = |machine: &ManualGpus, _: &dyn Fn() -> bool| {
        while machine.drive(256) != Drive::Idle {
            length.set(length.get() + 256);
        }
    };
    assert!(!operations(0, &count).unwrap(), "no deadline has passed");
    // Point 237 does not end across nodes if posters wait for workers alone.
    let points = (0..POINTS).filter(|point| point % tier::pick(125, 10) == tier::pick(112, 7));
    let (mut expired, mut all) = (0, 0);
    for point in points {
        let interrupt = |machine: &ManualGpus, has_expired: &dyn Fn() -> bool| {
            machine.drive(length.get() * point / POINTS);
            // A deadline passes only for a kernel that waits.
            machine.advance(2 * DEADLINE);
            while machine.drive(256) != Drive::Idle && !has_expired() {
                machine.advance(2 * DEADLINE);
            }
        };
        let has_expired = operations(point, &interrupt);
        expired += u32::from(has_expired.unwrap_or_else(|error| panic!("point {point}: {error}")));
        all += 1;
    }
    // The last points may have no wait behind them.
    assert!(expired + all / 8 >= all, "a wait has expired at {expired} of {all} points");
}

#[test]
fn every_kernel_ends_wherever_a_deadline_passes() {
    wherever_a_deadline_passes(|seed, interrupt| round_trip(None, seed, interrupt));
}

#[test]
fn every_kernel_ends_wherever_a_deadline_passes_across_nodes() {
    wherever_a_deadline_passes(|seed, interrupt| round_trip(one_rank_a_node(), seed, interrupt));
}

/// Dispatches of rows by expert between two nodes of two ranks, whose warps wait for records of
/// copies. `interrupt` is that of [`round_trip`].
fn dispatch_by_expert(seed: u64, interrupt: Interrupt<'_>) -> Result<bool> {
    const RANKS: u32 = 4;
    let turn = Turn::random(seed, &[24, 17, 9, 20], CHANNELS);
    let machine = ManualGpus::new(seed);
    let nodes = NodeLinks { ranks_per_node: 2, transport: TransportKind::Direct, queues: 1 };
    let mut setup = Setup::new(RANKS, CHANNELS, 24, ROW).max_topk(TOPK).nodes(Some(nodes));
    setup.fields().timeout = DEADLINE;
    setup.fields().rows_by_expert = Some(1024);
    setup.device.hooks.executor = Executor::Manual(machine.clone());
    let mut ranks = lockstep::run(RANKS, |group| Rank::join(&setup, group))?;
    let inputs = ranks.iter().map(|rank| Inputs::upload(&turn, rank)).collect::<Result<Vec<_>>>()?;
    for (rank, inputs) in ranks.iter_mut().zip(&inputs) {
        let (mut place, layout) = (rank.place()?, inputs.layout(rank)?);
        let request = DispatchRequest::new(&inputs.x, &layout).by_expert(8).counts(rank.on_device());
        rank.dispatch(&mut place, request)?;
    }
    interrupt(&machine, &|| has_expired(&ranks));
    for rank in &ranks {
        // Gives up with the stuck warps where a kernel does not end.
        rank.stream.synchronize()?;
        match rank.buffer.check() {
            Err(error) if !is_late(&error) => return Err(error),
            _ => {}
        }
    }
    Ok(has_expired(&ranks))
}

#[test]
fn every_kernel_ends_wherever_a_deadline_passes_in_copies_across_nodes() {
    wherever_a_deadline_passes(dispatch_by_expert);
}

/// The clock advances by a microsecond with each turn of the waiting grid.
#[test]
fn a_deadline_of_microseconds_is_kept() {
    const SHORT: Duration = Duration::from_micros(50);
    let turn = Turn::random(0, &[24, 17], CHANNELS);
    for_each_seed(8, |seed| {
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
    });
}
