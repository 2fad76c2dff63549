//! Runs that a test does not write out itself, and several of them in one test.

use epoxide_testing::ranks::{Outcome, Run};

use super::common::{PATIENCE, sum_of_ranks, threads};

/// Runs on processes from a place of its own.
fn group_of(size: u32) -> Outcome {
    Run::new(size).processes().timeout(PATIENCE).run(sum_of_ranks)
}

#[test]
fn each_visit_of_a_place_has_its_own_ranks() {
    for size in [1, 2, 3] {
        assert_eq!(group_of(size), Outcome::Passed);
    }
    let outcome = threads(2).run(|ctx| assert!(ctx.size() == 2));
    assert_eq!(outcome, Outcome::Passed);
}
