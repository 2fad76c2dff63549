//! Peers that do not come, or come late.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::SeedableRng;
use rand::rngs::SmallRng;

use epoxide::driver::virt::{Executor, Machine};
use epoxide::ep::{CombineRows, DType, DispatchOutput, DispatchRequest, StreamOrder};
use epoxide::group::ProcessGroup;
use epoxide::group::launch::run_threads;
use epoxide::{Error, Result};
use epoxide_testing::lockstep;
use epoxide_testing::oracle::{Routing, Style};

use crate::harness::{PATIENCE, Rank, Setup, assert_names};
use crate::roundtrip::Case;
use crate::turns::{HIDDEN, Inputs, ROW, Turn, echo};

/// Long enough for ranks that do come, on a busy machine.
const TIMEOUT: Duration = Duration::from_millis(1500);
/// Within this a wait must have been given up.
const SOON: Duration = Duration::from_secs(10);
/// On a machine.
const VIRTUAL_TIMEOUT: Duration = Duration::from_secs(30);
const TOKENS: [u32; 3] = [6, 4, 5];
const POOL_ROWS: CombineRows<'static> = CombineRows::InPool { dtype: DType::Bf16, hidden: HIDDEN as u64 };

fn setup() -> Setup {
    Setup::new(3, 1, 6, ROW).timeout(TIMEOUT)
}

fn turn() -> Turn {
    Turn::random(0, &TOKENS, 1)
}

/// An exact dispatch of the turn.
fn dispatch(rank: &mut Rank, turn: &Turn, inputs: &Inputs) -> Result<DispatchOutput> {
    let layout = rank.layout(&inputs.topk_idx, turn.routing.num_experts)?;
    rank.dispatch(DispatchRequest::new(&inputs.x, &layout))
}

/// Has the ranks go through a whole turn, and all but rank 2 then through `call`, which rank 2 does not make; that must end
/// in an error that says so.
fn without_rank_2(
    operation: &str,
    word: &str,
    call: impl Fn(&mut Rank, &Turn, &Inputs, &DispatchOutput) -> Result<()> + Sync,
) {
    let turn = turn();
    setup().run(|rank| {
        let inputs = Inputs::upload(&turn, rank)?;
        let (output, _) = echo(rank, &inputs, turn.routing.num_experts)?;
        rank.synchronize()?;
        if rank.rank == 2 {
            return Ok(());
        }
        let start = Instant::now();
        let error = call(rank, &turn, &inputs, &output).expect_err("rank 2 did not come");
        let took = start.elapsed();
        rank.check((TIMEOUT..SOON).contains(&took), format!("noticed after {took:?}"));
        check_names_rank_2(rank, &error, operation, word);

        // From now on every call says the same, at once.
        let start = Instant::now();
        let later = [
            rank.buffer.check().expect_err("the buffer is of no use"),
            rank.layout(&inputs.topk_idx, turn.routing.num_experts).expect_err("the buffer is of no use"),
            rank.dispatch_cached(&inputs.x, None, &output.handle).expect_err("the buffer is of no use"),
            rank.combine(POOL_ROWS, None, &output.handle).expect_err("the buffer is of no use"),
        ];
        rank.check(start.elapsed() < TIMEOUT, "later calls do not wait");
        later.iter().for_each(|later| assert_eq!(later.to_string(), error.to_string()));
        rank.stream.synchronize()
    });
}

/// Checks that `error` says how long this rank waited for rank 2, where and for what.
fn check_names_rank_2(rank: &mut Rank, error: &Error, operation: &str, word: &str) {
    let &Error::PeerTimeout { rank: me, peer, operation: at, word: on, needed, seen, waited, .. } = error
    else {
        return rank.check(false, format!("{error} is no PeerTimeout"));
    };
    rank.check((me, peer) == (rank.rank, 2), format!("rank {me} waited for rank {peer}"));
    rank.check(
        (at, on) == (operation, word),
        format!("waited in {at} for {on}, expected {operation}, {word}"),
    );
    rank.check(seen < needed, format!("saw {seen}, needed {needed}"));
    rank.check((TIMEOUT..SOON).contains(&waited), format!("waited {waited:?}"));
    assert_names(error, &[&format!("rank {me} waited"), operation, word, "rank 2 may have died"]);
}

#[test]
fn a_rank_that_does_not_dispatch_is_named() {
    without_rank_2("notify", "counts", |rank, turn, inputs, _| dispatch(rank, turn, inputs).map(drop));
    // A smaller group in the same process does not suffer from it.
    let routing = Routing::random(&mut SmallRng::seed_from_u64(3), &[5, 8], 2, 4, Style::WithHoles);
    Case::new(routing, 48).check();
}

#[test]
fn a_rank_that_does_not_dispatch_shows_without_a_host_wait() {
    without_rank_2("notify", "counts", |rank, turn, inputs, _| {
        let layout = rank.layout(&inputs.topk_idx, turn.routing.num_experts)?;
        let counts = rank.on_device();
        let output = rank.dispatch(DispatchRequest { counts, ..DispatchRequest::new(&inputs.x, &layout) })?;
        rank.buffer.check_dispatch(&output.handle, &rank.stream)
    });
}

#[test]
fn a_rank_that_does_not_make_a_cached_dispatch_is_named() {
    without_rank_2("dispatch", "ready", |rank, _, inputs, output| {
        rank.dispatch_cached(&inputs.x, None, &output.handle)?;
        rank.stream.synchronize()?;
        rank.buffer.check()
    });
}

#[test]
fn a_rank_that_does_not_combine_is_named() {
    without_rank_2("combine", "ready", |rank, _, _, output| {
        rank.combine(POOL_ROWS, None, &output.handle)?;
        rank.stream.synchronize()?;
        rank.buffer.check()
    });
}

#[test]
fn operations_queued_behind_an_expired_one_do_not_wait_again() {
    without_rank_2("notify", "counts", |rank, turn, inputs, _| {
        let queued = (0..30).map(|_| echo(rank, inputs, turn.routing.num_experts));
        // The timeout may already show while calls are still being made.
        let queued: Result<Vec<_>> = queued.collect();
        rank.stream.synchronize()?;
        queued.and_then(|_| rank.buffer.check())
    });
}

#[test]
fn a_slow_rank_is_waited_for() {
    let turn = turn();
    setup().timeout(10 * TIMEOUT).run(|rank| {
        let inputs = Inputs::upload(&turn, rank)?;
        rank.synchronize()?;
        if rank.rank == 2 {
            std::thread::sleep(TIMEOUT / 2);
        }
        let output = dispatch(rank, &turn, &inputs)?;
        let got = rank.row_bytes(&output.recv_x)?;
        rank.equal("recv_x", &got, &turn.recv(rank.rank));
        Ok(())
    });
}

#[test]
fn a_rank_that_comes_too_late_is_not_given_rows_that_never_came() {
    let turn = turn();
    setup().run(|rank| {
        let inputs = Inputs::upload(&turn, rank)?;
        if rank.rank != 2 {
            let error = dispatch(rank, &turn, &inputs).expect_err("rank 2 comes too late");
            check_names_rank_2(rank, &error, "notify", "counts");
        }
        rank.synchronize()?;
        if rank.rank == 2 {
            // The counts came in time, so the call may succeed; but then the rows did not come, and that must show.
            let outcome = dispatch(rank, &turn, &inputs).and_then(|output| {
                rank.stream.synchronize()?;
                rank.buffer.check().map(|()| output)
            });
            match outcome {
                Err(error) => rank.check(matches!(error, Error::PeerTimeout { .. }), error.to_string()),
                Ok(output) => {
                    let rows = rank.row_bytes(&output.recv_x)?;
                    rank.equal("recv_x of a dispatch without an error", &rows, &turn.recv(rank.rank));
                }
            }
        }
        Ok(())
    });
}

#[test]
fn a_rank_that_goes_away_does_not_break_the_others() {
    let turn = turn();
    let setup = setup();
    let outcome = run_threads(3, PATIENCE, |_, group: Arc<dyn ProcessGroup>| {
        let mut rank = Rank::join(&setup, group.clone())?;
        let inputs = Inputs::upload(&turn, &rank)?;
        if rank.rank == 2 {
            // Its pool stays mapped by the others.
            drop((inputs, rank));
            group.barrier(PATIENCE)?;
        } else {
            group.barrier(PATIENCE)?;
            let error = dispatch(&mut rank, &turn, &inputs).expect_err("rank 2 is gone");
            check_names_rank_2(&mut rank, &error, "notify", "counts");
            assert!(rank.failures.is_empty(), "{:?}", rank.failures);
        }
        Ok(())
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn a_buffer_can_be_dropped_with_work_in_flight() {
    let turn = turn();
    for on_comm_stream in [false, true] {
        let setup = Setup::new(3, 1, 6, ROW);
        let outcome = run_threads(3, PATIENCE, |_, group| {
            let mut rank = Rank::join(&setup, group)?;
            let inputs = Inputs::upload(&turn, &rank)?;
            for _ in 0..5 {
                let order = match on_comm_stream {
                    true => StreamOrder::comm(&rank.stream).asynchronous(),
                    false => StreamOrder::on(&rank.stream),
                };
                let layout =
                    rank.buffer.get_dispatch_layout(&inputs.topk_idx, turn.routing.num_experts, order)?;
                let counts = rank.on_device();
                let request = DispatchRequest { counts, ..DispatchRequest::new(&inputs.x, &layout) };
                rank.buffer.dispatch(request, order)?;
            }
            let Rank { stream, buffer, .. } = rank;
            drop(buffer);
            stream.synchronize()
        });
        outcome.unwrap_or_else(|failure| panic!("{failure}"));
    }
}

#[test]
fn on_a_machine_a_deadline_passes_in_virtual_time() {
    let turn = turn();
    let run = || {
        let machine = Machine::new(9);
        let mut setup = setup().timeout(VIRTUAL_TIMEOUT);
        setup.device.executor = Executor::Manual(machine.clone());
        let mut ranks = lockstep::run(3, |group| Rank::join(&setup, group)).unwrap();
        let inputs: Vec<_> = ranks.iter().map(|rank| Inputs::upload(&turn, rank).unwrap()).collect();
        let outputs: Vec<_> = ranks
            .iter_mut()
            .zip(&inputs)
            .take(2)
            .map(|(rank, inputs)| echo(rank, inputs, turn.routing.num_experts).unwrap())
            .collect();
        let errors = ranks.iter().zip(&outputs).map(|(rank, (output, _))| {
            rank.stream.synchronize().unwrap();
            rank.buffer.check_dispatch(&output.handle, &rank.stream).unwrap_err()
        });
        errors.collect::<Vec<_>>()
    };
    let start = Instant::now();
    let errors = run();
    assert!(
        start.elapsed() < VIRTUAL_TIMEOUT,
        "{VIRTUAL_TIMEOUT:?} of virtual time took {:?}",
        start.elapsed()
    );
    for (number, error) in (0..).zip(&errors) {
        let &Error::PeerTimeout { rank, peer, waited, .. } = error else { panic!("{error}") };
        assert_eq!((rank, peer), (number, 2));
        assert!(waited >= VIRTUAL_TIMEOUT, "{waited:?}");
    }
    let texts = |errors: Vec<Error>| errors.iter().map(Error::to_string).collect::<Vec<_>>();
    assert_eq!(texts(errors), texts(run()), "the same seed, the same error to the nanosecond");
}
