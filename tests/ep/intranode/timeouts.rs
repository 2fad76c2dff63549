//! Absent or late peers, in ways that only one node has.

use std::sync::Arc;
use std::time::Duration;

use epoxide::Error;
use epoxide::group::ProcessGroup;
use epoxide::internal::driver::{Executor, ManualGpus};
use epoxide_testing::harness::{PATIENCE, Rank, run_ranks};
use epoxide_testing::lockstep;

use crate::timeouts::{Ranks, check_timeout};
use crate::turns::{Inputs, echo};

/// On a machine.
const VIRTUAL_TIMEOUT: Duration = Duration::from_secs(30);

#[test]
fn a_rank_that_comes_too_late_is_not_given_rows_that_never_came() {
    let turn = Ranks::of_one_node().turn();
    Ranks::of_one_node().setup().run(|rank| {
        let (inputs, mut place) = turn.begin(rank)?;
        if rank.rank != 2 {
            let error = inputs.dispatch_exact(rank, &mut place).expect_err("rank 2 comes too late");
            assert_eq!(check_timeout(rank.rank, &error, "notify"), (2, "counts"));
        }
        rank.synchronize()?;
        if rank.rank == 2 {
            // The counts arrived in time, so the call may succeed. But the rows did not, which must
            // be an error.
            let outcome =
                inputs.dispatch_exact(rank, &mut place).and_then(|output| rank.outcome().map(|()| output));
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
    let turn = Ranks::of_one_node().turn();
    let setup = Ranks::of_one_node().setup();
    run_ranks(3, |_, group: Arc<dyn ProcessGroup>| {
        let mut rank = Rank::join(&setup, group.clone())?;
        let inputs = Inputs::upload(&turn, &rank)?;
        if rank.rank == 2 {
            // Its pool stays mapped by the others.
            drop((inputs, rank));
            group.barrier(PATIENCE)?;
        } else {
            group.barrier(PATIENCE)?;
            let mut place = rank.place()?;
            let error = inputs.dispatch_exact(&mut rank, &mut place).expect_err("rank 2 is gone");
            assert_eq!(check_timeout(rank.rank, &error, "notify"), (2, "counts"));
        }
        Ok(())
    });
}

#[test]
fn on_a_machine_a_deadline_passes_in_virtual_time() {
    let turn = Ranks::of_one_node().turn();
    let run = || {
        let machine = ManualGpus::new(9);
        let mut setup = Ranks::of_one_node().setup().timeout(VIRTUAL_TIMEOUT);
        setup.device.hooks.executor = Executor::Manual(machine.clone());
        let mut ranks = lockstep::run(3, |group| Rank::join(&setup, group)).unwrap();
        let inputs: Vec<_> = ranks.iter().map(|rank| Inputs::upload(&turn, rank).unwrap()).collect();
        let outputs: Vec<_> = ranks
            .iter_mut()
            .zip(&inputs)
            .take(2)
            .map(|(rank, inputs)| {
                let mut place = rank.place().unwrap();
                let (output, back) = echo(rank, &mut place, inputs).unwrap();
                (output.handle, back)
            })
            .collect();
        let errors = ranks.iter().zip(&outputs).map(|(rank, (handle, _))| {
            rank.stream.synchronize().unwrap();
            rank.buffer.check_dispatch(handle, &rank.stream).unwrap_err()
        });
        errors.collect::<Vec<_>>()
    };
    let errors = run();
    for (number, error) in (0..).zip(&errors) {
        let &Error::PeerTimeout { rank, peer, waited, .. } = error else { panic!("{error}") };
        assert_eq!((rank, peer), (number, 2));
        assert!(waited >= VIRTUAL_TIMEOUT, "{waited:?}");
    }
    let texts = |errors: Vec<Error>| errors.iter().map(Error::to_string).collect::<Vec<_>>();
    assert_eq!(texts(errors), texts(run()), "the same seed, the same error to the nanosecond");
}
