//! The same operations under many interleavings of all warps of all ranks, drawn from seeds. One
//! host thread drives every device, so a seed that fails can be run again.

use std::collections::HashSet;

use epoxide::Result;
use epoxide::internal::Tuning;
use epoxide::internal::driver::{Executor, ManualGpus};
use epoxide_testing::{lockstep, tier};

use super::programs::{Program, ROW};
use epoxide_testing::harness::{Rank, Setup, assert_no_failures};
use epoxide_vgpu::for_each_seed;

const RANKS: u32 = 3;
const TOKENS: u32 = 24;
const CHANNELS: u32 = 2;

/// The setup on devices of one machine. Rings are as short as they can be, so that every buffer is
/// used again and again.
fn setup(machine: &ManualGpus) -> Setup {
    let tuning = Tuning {
        dispatch_warps: 1 + (machine.seed() % 2) as u32,
        dispatch_stages: 2,
        dispatch_claiming_blocks: 1,
        combine_warps: 1 + (machine.seed() % 4) as u32,
        combine_slots: 2,
        ..Tuning::default()
    };
    let mut setup = Setup::new(RANKS, CHANNELS, TOKENS, ROW.into()).tuning(tuning);
    setup.device.hooks.executor = Executor::Manual(machine.clone());
    setup
}

/// Runs a program with only one final wait. Returns the digest of the schedule, and all checked
/// results.
fn run(seed: u64, program: &Program) -> Result<(u64, Vec<Vec<u8>>)> {
    let machine = ManualGpus::new(seed);
    let setup = setup(&machine);
    // Only making the buffers needs the ranks to wait for each other in the host.
    let mut ranks = lockstep::run(setup.ranks, |group| Rank::join(&setup, group))?;
    let inputs = ranks.iter().map(|rank| program.upload(rank)).collect::<Result<Vec<_>>>()?;
    let mut kept = Vec::new();
    for (rank, inputs) in ranks.iter_mut().zip(&inputs) {
        kept.push(program.enqueue(rank, inputs, || {})?);
    }
    for rank in &ranks {
        rank.outcome()?;
    }
    let mut results = Vec::new();
    for (rank, kept) in ranks.iter_mut().zip(&kept) {
        results.push(program.check(rank, kept)?);
    }
    let failures = ranks.iter_mut().flat_map(|rank| std::mem::take(&mut rank.failures));
    assert_no_failures(failures.map(|failure| format!("seed {seed}: {failure}")).collect());
    Ok((machine.schedule_digest(), results))
}

fn program() -> Program {
    Program::random(5, 16, TOKENS, RANKS, CHANNELS, false)
}

#[test]
fn a_seed_repeats_its_run_exactly() {
    let program = program();
    for seed in tier::sample([0xdead_beef, 0, 1]) {
        let (first, second) = (run(seed, &program).unwrap(), run(seed, &program).unwrap());
        assert_eq!(first.0, second.0, "seed {seed} took two schedules");
        assert_eq!(first.1, second.1, "seed {seed} gave two results");
    }
}

#[test]
fn many_schedules_give_the_same_results() {
    let program = program();
    let mut digests = HashSet::new();
    let mut results = HashSet::new();
    let mut schedules = 0;
    for_each_seed(tier::pick(3, 50), |seed| {
        schedules += 1;
        let (digest, bytes) = run(seed, &program).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        digests.insert(digest);
        results.insert(bytes);
    });
    assert_eq!(results.len(), 1, "results depend on the schedule");
    assert_eq!(digests.len(), schedules, "seeds must take different schedules");
}

/// Runs `EPOXIDE_SOAK` random programs, each under its own schedule; a few without the variable.
/// `EPOXIDE_SOAK=10000 cargo test --release --test ep schedules::soak`
#[test]
fn soak() {
    let count = std::env::var("EPOXIDE_SOAK")
        .map_or(tier::pick(2, 25), |count| count.parse().expect("a number of programs"));
    for_each_seed(count, |seed| {
        let program = Program::random(seed, 12, TOKENS, RANKS, CHANNELS, false);
        run(seed, &program).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    });
}
