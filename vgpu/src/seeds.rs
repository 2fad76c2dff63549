//! Runs of one test over many seeds.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// Names the one seed to run, to replay a failure.
const VARIABLE: &str = "EPOXIDE_VGPU_SEED";

/// Calls `run` with the seeds `0..n`. If one panics, its seed is printed, and the panic propagates.
/// With `EPOXIDE_VGPU_SEED` set, only that seed runs.
///
/// # Panics
/// If `run` does, and if the variable holds no number.
pub fn for_each_seed(n: u64, run: impl FnMut(u64)) {
    let only = std::env::var(VARIABLE).ok().map(|text| match text.parse() {
        Ok(seed) => seed,
        Err(e) => panic!("{VARIABLE}={text}: {e}"),
    });
    run_seeds(n, only, run, |message| eprintln!("{message}"));
}

fn run_seeds(n: u64, only: Option<u64>, mut run: impl FnMut(u64), tell: impl Fn(String)) {
    for seed in only.map_or(0..n, |seed| seed..seed + 1) {
        // The panic propagates, so no code sees half-done state.
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(seed))) {
            tell(format!("failed with seed {seed}; {VARIABLE}={seed} replays it"));
            resume_unwind(panic);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn a_failure_names_its_seed_and_goes_on() {
        let (mut ran, told) = (vec![], RefCell::new(vec![]));
        let result = catch_unwind(AssertUnwindSafe(|| {
            run_seeds(
                5,
                None,
                |seed| {
                    ran.push(seed);
                    assert_ne!(seed, 3, "this one fails");
                },
                |message| told.borrow_mut().push(message),
            );
        }));
        let panic = result.expect_err("the panic goes on");
        assert!(panic.downcast_ref::<String>().is_some_and(|text| text.contains("this one fails")));
        assert_eq!(ran, [0, 1, 2, 3]);
        assert_eq!(told.into_inner(), ["failed with seed 3; EPOXIDE_VGPU_SEED=3 replays it"]);
    }

    #[test]
    fn a_replay_runs_one_seed() {
        let mut ran = vec![];
        run_seeds(5, Some(77), |seed| ran.push(seed), |_| ());
        assert_eq!(ran, [77]);
    }
}
