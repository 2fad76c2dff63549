//! Litmus tests of the PTX memory model: check mode must report the races that the model sees and no others, and weak memory must show
//! what the model allows and never what it forbids.
//!
//! `EPOXIDE_LITMUS_RUNS` is the number of runs of each test, which differ by seed.

mod program;
mod table;

use epoxide_vgpu::{
    CheckConfig, Checker, DeviceConfig, FaultKind, Grid, GridConfig, Memory, Progress, Region, Schedule,
};
use program::{BYTES, NO_RESULT, Program, RESULTS, Wanted};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use table::{NEVER_REACHED, NOT_SHOWN, RACY_ELSEWHERE, TESTS, Test, Verdict};

/// Most steps of a run.
const ROUNDS: usize = 100_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// What the condition asks for.
    Met,
    /// The guarded reads had their values, the rest is not what the condition asks for.
    Reached,
    Other,
    Race,
}

/// So many that what is rarest, a bulk store that lands between two steps of another block, which is not resident from the start in a
/// quarter of the runs, shows.
fn runs() -> u64 {
    std::env::var("EPOXIDE_LITMUS_RUNS").map_or(1600, |v| v.parse().expect("EPOXIDE_LITMUS_RUNS is a number"))
}

/// Runs a test once.
fn run(test: &Test, program: &Program, seed: u64, races: bool) -> Outcome {
    let weak_memory = (!races).then_some(seed);
    let checker = Checker::new(CheckConfig { races, weak_memory, strict_exits: false });
    let memories: Vec<Memory> =
        program.devices.iter().map(|_| Memory::checked(seed, Some(checker.clone()))).collect();
    let first = memories[0].alloc(BYTES, "litmus").expect("memory");
    let rest: Vec<Region> = memories[1..]
        .iter()
        .map(|m| m.import(first.export().expect("a descriptor"), BYTES, "litmus").expect("memory"))
        .collect();
    let regions: Vec<&Region> = std::iter::once(&first).chain(&rest).collect();
    let mut words = vec![0u32; BYTES as usize / 4];
    words[RESULTS as usize / 4..].fill(NO_RESULT);
    program.initial.iter().for_each(|&(at, v)| words[at as usize / 4] = v);
    let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
    memories[0].write(first.addr(), &bytes).expect("a first write");

    let schedule = if seed.is_multiple_of(2) { Schedule::Random } else { Schedule::Preemptions(3) };
    let config = DeviceConfig { schedule_seed: Some(seed), schedule, ..DeviceConfig::default() };
    let launch = |device: usize, kernel: usize| {
        let d = &program.devices[device];
        let shape = GridConfig { grid: [d.blocks, 1, 1], block: [d.threads, 1, 1], dynamic_shared_bytes: 0 };
        let params = regions[device].addr().to_ne_bytes();
        Grid::new(d.kernels[kernel].clone(), memories[device].clone(), &config, shape, &params)
            .unwrap_or_else(|e| panic!("{}: {e}", test.number))
    };
    let mut order = SmallRng::seed_from_u64(seed);
    // What runs on each device, and which of its kernels that is.
    let mut running: Vec<Option<(Grid, usize)>> =
        (0..program.devices.len()).map(|d| Some((launch(d, 0), 0))).collect();
    for _ in 0..ROUNDS {
        let live: Vec<usize> = (0..running.len()).filter(|&d| running[d].is_some()).collect();
        if live.is_empty() {
            break;
        }
        let device = live[order.random_range(0..live.len())];
        let Some((grid, kernel)) = &mut running[device] else { continue };
        match grid.step(1) {
            Ok(Progress::Done) => {
                let next = *kernel + 1;
                let more = next < program.devices[device].kernels.len();
                running[device] = more.then(|| (launch(device, next), next));
            }
            Ok(_) => {}
            Err(fault) if matches!(fault.kind, FaultKind::Race(_)) && races => {
                let expected = test.verdict == Verdict::Racy || elsewhere(test);
                assert!(
                    expected,
                    "#{} {} (seed {seed}) has no race, but: {fault}\n{}",
                    test.number, test.text, program.ptx
                );
                return Outcome::Race;
            }
            Err(fault) => panic!("#{} {} (seed {seed}): {fault}\n{}", test.number, test.text, program.ptx),
        }
    }
    assert!(
        running.iter().all(Option::is_none),
        "#{} (seed {seed}) does not end\n{}",
        test.number,
        program.ptx
    );
    let mut bytes = vec![0; BYTES as usize];
    memories[0].read(first.addr(), &mut bytes).expect("the results");
    let word = |at: u64| u32::from_ne_bytes(std::array::from_fn(|i| bytes[at as usize + i]));
    let holds = |wanted: &[Wanted]| wanted.iter().all(|&(at, v)| word(at) == v);
    match (holds(&program.wanted), holds(&program.guards)) {
        (true, _) => Outcome::Met,
        (_, true) => Outcome::Reached,
        _ => Outcome::Other,
    }
}

fn elsewhere(test: &Test) -> bool {
    RACY_ELSEWHERE.iter().any(|(n, _)| *n == test.number)
}

#[test]
fn the_table_is_whole() {
    assert!(TESTS.iter().zip(1..).all(|(t, n)| t.number == n));
    for t in &TESTS {
        assert!(!t.rule.is_empty(), "#{} has no rule", t.number);
        // Where Dat3M says otherwise, so does the table, with the reason.
        assert!(
            t.dat3m.is_empty() || t.dat3m.starts_with(['=', '~']) || t.dat3m.contains("8."),
            "#{}",
            t.number
        );
    }
    let known = |n: u32, v: Verdict| TESTS.iter().any(|t| t.number == n && t.verdict == v);
    assert!(RACY_ELSEWHERE.iter().all(|(n, _)| known(*n, Verdict::Forbidden)));
    assert!(NOT_SHOWN.iter().all(|(n, _)| !known(*n, Verdict::Forbidden)));
}

#[test]
fn races_are_reported_and_nothing_else() {
    let mut missed = vec![];
    for test in &TESTS {
        let program = Program::new(test.text);
        // One report is enough; that there is none takes all runs.
        let raced = (0..runs()).any(|seed| run(test, &program, seed, true) == Outcome::Race);
        if !raced && (test.verdict == Verdict::Racy || elsewhere(test)) {
            missed.push((test.number, test.text));
        }
    }
    assert!(missed.is_empty(), "races that no run has reported: {missed:?}");
}

#[test]
fn weak_memory_shows_what_the_model_allows() {
    let mut wrong = vec![];
    for test in &TESTS {
        let program = Program::new(test.text);
        let mut reached = false;
        let seen = (0..runs()).find(|&seed| {
            let outcome = run(test, &program, seed, false);
            reached |= outcome != Outcome::Other;
            outcome == Outcome::Met
        });
        if reached == NEVER_REACHED.iter().any(|(n, _)| *n == test.number) {
            wrong.push(format!("#{} {}: guards passed: {reached}", test.number, test.text));
        }
        let expected = test.verdict != Verdict::Forbidden && NOT_SHOWN.iter().all(|(n, _)| *n != test.number);
        if seen.is_some() != expected {
            wrong.push(format!("#{} {} {:?}: seen with seed {seen:?}", test.number, test.text, test.verdict));
        }
    }
    assert!(wrong.is_empty(), "outcomes that are not as the table says:\n{}", wrong.join("\n"));
}
