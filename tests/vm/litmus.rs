//! Litmus tests of the PTX memory model. Check mode must report the model's races and no others.
//! Weak memory must show outcomes that the model allows, and never a forbidden one.
//!
//! `EPOXIDE_LITMUS_RUNS` is the number of runs of each test, which differ by seed. Without it the
//! tier decides.

use std::sync::Arc;

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use epoxide_testing::litmus::many;
use epoxide_testing::litmus::program::{BYTES, NO_RESULT, RESULTS, Wanted};
use epoxide_testing::litmus::program::{Form, Program};
use epoxide_testing::litmus::table::{NEVER_REACHED, NOT_SHOWN, RACY_ELSEWHERE, TESTS, Test, Verdict};
use epoxide_testing::tier;
use epoxide_vgpu::{
    CheckConfig, Checker, DeviceConfig, FaultKind, Grid, GridConfig, Kernel, Memory, Module, Progress,
    Region, Schedule,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Most steps of a run.
const ROUNDS: usize = 100_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RunOutcome {
    /// The condition holds.
    Met,
    /// The guarded reads had their values, the rest is not what the condition asks for.
    Reached,
    Other,
    Race,
}

/// How often a test runs.
#[derive(Clone, Copy)]
struct Runs {
    /// Where an outcome must not show.
    nothing: u64,
    /// Where an outcome must show; the first run that shows it is the last. The rarest outcome
    /// takes 729 runs: a bulk store that lands between two steps of another block.
    something: u64,
}

fn runs() -> Runs {
    let asked = std::env::var("EPOXIDE_LITMUS_RUNS").ok();
    let asked = asked.map(|runs| runs.parse().expect("EPOXIDE_LITMUS_RUNS is a number"));
    Runs { nothing: asked.unwrap_or(tier::pick(100, 2000)), something: asked.unwrap_or(10_000) }
}

/// A test, ready to run.
struct Ready {
    test: &'static Test,
    program: Program,
    /// The kernels of each device.
    kernels: Vec<Vec<Arc<Kernel>>>,
}

impl Ready {
    fn new(test: &'static Test) -> Self {
        let program = Program::new(test.text, Form::One);
        let kernels = program
            .devices
            .iter()
            .map(|d| {
                let module =
                    Module::parse(&d.ptx).unwrap_or_else(|e| panic!("{}: {e}\n{}", test.text, d.ptx));
                (0..d.kernels).map(|k| module.kernel(&format!("k{k}")).expect("a kernel")).collect()
            })
            .collect();
        Self { test, program, kernels }
    }

    /// The PTX of all devices, for messages.
    fn ptx(&self) -> String {
        self.program.devices.iter().map(|d| d.ptx.as_str()).collect()
    }
}

/// Runs a test once.
fn run(ready: &Ready, seed: u64, races: bool) -> RunOutcome {
    let Ready { test, program, kernels } = ready;
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
        Grid::new(kernels[device][kernel].clone(), memories[device].clone(), &config, shape, &params)
            .unwrap_or_else(|e| panic!("{}: {e}", test.number))
    };
    let mut order = ChaCha8Rng::seed_from_u64(seed);
    // The running grid of each device, and the index of its kernel.
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
                let more = next < kernels[device].len();
                running[device] = more.then(|| (launch(device, next), next));
            }
            Ok(_) => {}
            Err(fault) if matches!(fault.kind, FaultKind::Race(_)) && races => {
                let expected = test.verdict == Verdict::Racy || elsewhere(test);
                assert!(
                    expected,
                    "#{} {} (seed {seed}) has no race, but: {fault}\n{}",
                    test.number,
                    test.text,
                    ready.ptx()
                );
                return RunOutcome::Race;
            }
            Err(fault) => panic!("#{} {} (seed {seed}): {fault}\n{}", test.number, test.text, ready.ptx()),
        }
    }
    assert!(
        running.iter().all(Option::is_none),
        "#{} (seed {seed}) does not end\n{}",
        test.number,
        ready.ptx()
    );
    let mut bytes = vec![0; BYTES as usize];
    memories[0].read(first.addr(), &mut bytes).expect("the results");
    let word = |at: u64| u32::from_ne_bytes(std::array::from_fn(|i| bytes[at as usize + i]));
    let holds = |wanted: &[Wanted]| wanted.iter().all(|&(at, v)| word(at) == v);
    match (holds(&program.wanted), holds(&program.guards)) {
        (true, _) => RunOutcome::Met,
        (_, true) => RunOutcome::Reached,
        _ => RunOutcome::Other,
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

/// The messages of `judge` about all tests, run on all cores.
fn all_tests(judge: impl Fn(&'static Test) -> Option<String> + Sync) -> Vec<String> {
    let next = AtomicUsize::new(0);
    let worker = || -> Vec<String> {
        let mine = || TESTS.get(next.fetch_add(1, Ordering::Relaxed));
        std::iter::from_fn(mine).filter_map(&judge).collect()
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let started: Vec<_> = (0..workers).map(|_| scope.spawn(worker)).collect();
        let joined = started.into_iter().map(|w| w.join().unwrap_or_else(|panic| resume_unwind(panic)));
        joined.flatten().collect()
    })
}

#[test]
fn races_are_reported_and_nothing_else() {
    let rarest = AtomicU64::new(0);
    let missed = all_tests(|test| {
        let ready = Ready::new(test);
        let due = test.verdict == Verdict::Racy || elsewhere(test);
        let runs = if due { runs().something } else { runs().nothing };
        let raced = (0..runs).find(|&seed| run(&ready, seed, true) == RunOutcome::Race);
        rarest.fetch_max(raced.unwrap_or_default(), Ordering::Relaxed);
        (due && raced.is_none()).then(|| format!("#{} {}", test.number, test.text))
    });
    println!("the rarest race took {} runs", rarest.into_inner() + 1);
    assert!(missed.is_empty(), "races that no run has reported:\n{}", missed.join("\n"));
}

#[test]
fn weak_memory_shows_what_the_model_allows() {
    let (rarest, rarest_guards) = (AtomicU64::new(0), AtomicU64::new(0));
    let wrong = all_tests(|test| {
        let ready = Ready::new(test);
        let expected = test.verdict != Verdict::Forbidden && NOT_SHOWN.iter().all(|(n, _)| *n != test.number);
        let reachable = NEVER_REACHED.iter().all(|(n, _)| *n != test.number);
        let (mut seen, mut reached) = (None, false);
        for seed in 0..runs().something {
            let missing = expected || (reachable && !reached);
            if seen.is_some() || (seed >= runs().nothing && !missing) {
                break;
            }
            let outcome = run(&ready, seed, false);
            seen = (outcome == RunOutcome::Met).then_some(seed);
            if outcome != RunOutcome::Other && !reached {
                reached = true;
                rarest_guards.fetch_max(seed, Ordering::Relaxed);
            }
        }
        rarest.fetch_max(seen.unwrap_or_default(), Ordering::Relaxed);
        let guards = reached == reachable;
        let Test { number, text, verdict, .. } = test;
        (seen.is_some() != expected || !guards).then(|| {
            format!("#{number} {text} {verdict:?}: seen with seed {seen:?}; guards passed: {reached}")
        })
    });
    let [rarest, guards] = [rarest, rarest_guards].map(|seed| seed.into_inner() + 1);
    println!("the rarest outcome took {rarest} runs, the rarest guards {guards}");
    assert!(wrong.is_empty(), "outcomes that are not as the table says:\n{}", wrong.join("\n"));
}

/// Instances of a run: those that passed the guards, those that met the condition, and those whose
/// threads did not start together.
type Counts = [u32; 3];

/// Runs two groups of instances of a test in one launch for each kernel, beside a stress block, as
/// `examples/litmus.rs` does on a GPU. None if a race ended it that the test may have.
fn run_many(test: &Test, program: &Program, races: bool) -> Option<Counts> {
    let seed = u64::from(test.number);
    let (groups, stride, stress) = (2, many::STRIDE[0] as u32, 1);
    let instances = groups * program.packed;
    let weak_memory = (!races).then_some(seed);
    let checker = Checker::new(CheckConfig { races, weak_memory, strict_exits: false });
    let memories: Vec<Memory> =
        program.devices.iter().map(|_| Memory::checked(seed, Some(checker.clone()))).collect();
    let counts = memories[0].alloc(12, "counts").expect("memory");
    let first = memories[0].alloc(many::BYTES, "litmus").expect("memory");
    let rest: Vec<Region> = memories[1..]
        .iter()
        .map(|m| m.import(first.export().expect("a descriptor"), many::BYTES, "litmus").expect("memory"))
        .collect();
    let bases: Vec<u64> = std::iter::once(&first).chain(&rest).map(Region::addr).collect();
    memories[0].write(counts.addr(), &[0; 12]).expect("zeroes");
    let scratch = vec![0; (many::BYTES - many::SCRATCH_AT) as usize];
    memories[0].write(first.addr() + many::SCRATCH_AT, &scratch).expect("zeroes");

    let modules: Vec<Module> = program
        .devices
        .iter()
        .map(|d| Module::parse(&d.ptx).unwrap_or_else(|e| panic!("{}: {e}\n{}", test.text, d.ptx)))
        .collect();
    let config = DeviceConfig { schedule_seed: Some(seed), ..DeviceConfig::default() };
    let grid =
        |device: usize, name: &str, [blocks, threads]: [u32; 2], addresses: &[u64], numbers: &[u32]| {
            let shape = GridConfig { grid: [blocks, 1, 1], block: [threads, 1, 1], dynamic_shared_bytes: 0 };
            let addresses = addresses.iter().flat_map(|v| v.to_ne_bytes());
            let params: Vec<u8> = addresses.chain(numbers.iter().flat_map(|v| v.to_ne_bytes())).collect();
            let kernel = modules[device].kernel(name).expect("a kernel");
            Grid::new(kernel, memories[device].clone(), &config, shape, &params)
                .unwrap_or_else(|e| panic!("#{}: {e}", test.number))
        };
    // Whether the grid has ended; None for a race that the test may have.
    let step = |grid: &mut Grid| match grid.step(16) {
        Ok(progress) => Some(progress == Progress::Done),
        Err(f)
            if matches!(f.kind, FaultKind::Race(_)) && (test.verdict == Verdict::Racy || elsewhere(test)) =>
        {
            None
        }
        Err(fault) => {
            panic!("#{} {}: {fault}\n{}", test.number, test.text, program.devices[0].ptx)
        }
    };
    let [buf, results] = [0, many::RESULTS_AT].map(|at| bases[0] + at);
    let mut clear = grid(0, "clear", [1, 64], &[buf, results], &[stride, instances]);
    while !step(&mut clear)? {}
    let launch = |d: usize, k: usize| {
        let device = &program.devices[d];
        let addresses = [0, many::RESULTS_AT, many::SCRATCH_AT].map(|at| bases[d] + at);
        let shape = [stress + device.blocks * groups, device.threads];
        let (shift, seed, spread, warm, zero) = (1, 7, 64, 1, 0);
        let numbers = [groups, stride, shift, seed, spread, warm, stress, zero];
        grid(d, &format!("k{k}"), shape, &addresses, &numbers)
    };
    // The running grid of each device, and the index of its kernel.
    let mut running: Vec<Option<(Grid, usize)>> =
        (0..program.devices.len()).map(|d| Some((launch(d, 0), 0))).collect();
    while running.iter().any(Option::is_some) {
        for (device, slot) in running.iter_mut().enumerate() {
            let Some((grid, kernel)) = slot else { continue };
            if step(grid)? {
                let next = *kernel + 1;
                *slot = (next < program.devices[device].kernels).then(|| (launch(device, next), next));
            }
        }
    }
    let mut check = grid(0, "check", [1, 64], &[buf, results, counts.addr()], &[stride, instances]);
    while !step(&mut check)? {}
    let mut bytes = [0; 12];
    memories[0].read(counts.addr(), &mut bytes).expect("the counts");
    Some([0, 4, 8].map(|i| u32::from_ne_bytes(std::array::from_fn(|b| bytes[i + b]))))
}

/// GPUs get the same tests, and these have no races of their own.
#[test]
fn many_instances_in_one_launch_are_tests_as_well() {
    let (mut shown, mut late) = (0, 0);
    for test in tier::sample(&TESTS) {
        let program = Program::new(test.text, Form::Many);
        run_many(test, &program, true);
        let counts = run_many(test, &program, false).expect("races are not watched");
        assert!(
            test.verdict != Verdict::Forbidden || counts[1] == 0,
            "#{} {}: {counts:?}",
            test.number,
            test.text
        );
        shown += u32::from(counts[1] > 0);
        late += counts[2];
    }
    // So few instances do not show all that could be.
    assert!(shown >= tier::pick(3, 10), "only {shown} tests have shown what they may");
    assert_eq!(late, 0, "threads that did not meet at the start");
}
