//! Random numbers from seeds, and runs of one test over many seeds.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// A small seeded generator (splitmix64): schedules must be the same on every machine and in every
/// release.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Rng(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.skip(1);
        mix(self.0)
    }

    /// Continues as if so many numbers had been drawn.
    pub(crate) fn skip(&mut self, draws: u64) {
        self.0 = self.0.wrapping_add(draws.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    }

    /// A number in `0..n`; `n` must not be 0. The bias is too small to affect a scheduler.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(n)) >> 64) as u64
    }
}

/// Scrambles 64 bits.
pub(crate) fn mix(mut z: u64) -> u64 {
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

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

fn run_seeds(n: u64, only: Option<u64>, mut run: impl FnMut(u64), report: impl Fn(String)) {
    let all = if only.is_none() { 0..n } else { 0..0 };
    for seed in all.chain(only) {
        // The panic propagates, so no code uses half-done state.
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| run(seed))) {
            report(format!("failed with seed {seed}; {VARIABLE}={seed} replays it"));
            resume_unwind(panic);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn skipped_numbers_are_those_that_would_have_been_drawn() {
        let (mut drawn, mut skipped) = (Rng::new(9), Rng::new(9));
        for _ in 0..5 {
            drawn.next();
        }
        skipped.skip(5);
        assert_eq!(drawn.next(), skipped.next());
    }

    #[test]
    fn reference_sequence() {
        // First outputs of splitmix64 for seed 0, as published with the algorithm.
        let mut r = Rng::new(0);
        assert_eq!(r.next(), 0xe220_a839_7b1d_cdaf);
        assert_eq!(r.next(), 0x6e78_9e6a_a1b9_65f4);
        let hits: std::collections::HashSet<u64> = (0..200).map(|_| r.below(7)).collect();
        assert_eq!(hits.len(), 7);
        assert!(hits.iter().all(|&h| h < 7));
    }

    #[test]
    fn a_failure_names_its_seed_and_goes_on() {
        let (mut ran, reported) = (vec![], RefCell::new(vec![]));
        let result = catch_unwind(AssertUnwindSafe(|| {
            run_seeds(
                5,
                None,
                |seed| {
                    ran.push(seed);
                    assert_ne!(seed, 3, "this one fails");
                },
                |message| reported.borrow_mut().push(message),
            );
        }));
        let panic = result.expect_err("the panic goes on");
        assert!(panic.downcast_ref::<String>().is_some_and(|text| text.contains("this one fails")));
        assert_eq!(ran, [0, 1, 2, 3]);
        assert_eq!(reported.into_inner(), ["failed with seed 3; EPOXIDE_VGPU_SEED=3 replays it"]);
    }

    #[test]
    fn a_replay_runs_one_seed() {
        let mut ran = vec![];
        run_seeds(5, Some(77), |seed| ran.push(seed), |_| ());
        run_seeds(5, Some(u64::MAX), |seed| ran.push(seed), |_| ());
        assert_eq!(ran, [77, u64::MAX]);
    }
}
