//! One process per rank.

use std::process::Stdio;

use rand::SeedableRng;
use rand::rngs::SmallRng;

use epoxide::group::launch::{RankExit, current_exe, spawn_ranks};
use epoxide::group::rendezvous;
use epoxide::testing::oracle::{Routing, Style};

use crate::harness::{PATIENCE, Rank, assert_no_failures};
use crate::roundtrip::{Case, Expected};

/// Set where this test binary runs as a rank.
const ROLE: &str = "EPOXIDE_TEST_ROLE";

fn case() -> Case {
    let mut rng = SmallRng::seed_from_u64(11);
    let routing = Routing::random(&mut rng, &[17, 0, 30, 5], 4, 16, Style::WithHoles);
    Case { num_channels: 3, expert_alignment: 8, ..Case::new(routing, 112) }
}

/// A rank of the test below; does nothing as a test of its own.
#[test]
fn as_a_rank() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let case = case();
    let group = rendezvous(PATIENCE).unwrap();
    let mut rank = Rank::join(&case.setup(), std::sync::Arc::new(group)).unwrap();
    Expected::new(&case).check(&mut rank).unwrap();
    rank.synchronize().unwrap();
    assert_no_failures(rank.failures);
}

#[test]
fn processes_exchange_the_same_rows_as_threads() {
    let outcome = spawn_ranks(4, PATIENCE, |_| {
        let mut command = current_exe()?;
        command.args(["--exact", "processes::as_a_rank", "--nocapture", "--test-threads=1"]);
        command.env(ROLE, "rank").stdout(Stdio::null());
        Ok(command)
    });
    assert_eq!(outcome.unwrap().exits, [RankExit::Code(0); 4]);
}
