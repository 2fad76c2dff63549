//! Litmus tests of the PTX memory model. Check mode must report the model's races and no others.
//! Weak memory must show outcomes that the model allows, and never a forbidden one.
//!
//! `EPOXIDE_LITMUS_RUNS` is the number of runs of each test, which differ by seed. Without it the
//! tier decides.

use std::panic::resume_unwind;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use epoxide_testing::litmus::many;
use epoxide_testing::litmus::program::{BYTES, NO_RESULT, RESULTS, Wanted};
use epoxide_testing::litmus::program::{Form, Program};
use epoxide_testing::litmus::table::{
    CLUSTER_TESTS, NEVER_REACHED, NOT_SHOWN, RACY_ELSEWHERE, TESTS, Test, Verdict,
};
use epoxide_testing::tier;
use epoxide_vgpu::{
    Argument, Array, CheckConfig, Coverage, DeviceConfig, Explore, FaultKind, GridConfig, Machine,
    MachineError, Module, Schedule,
};

/// Most warp instructions of a run without progress.
const LIMIT: u64 = 100_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RunOutcome {
    /// The condition holds.
    Met,
    /// The guarded reads had their values, the rest of the condition failed.
    Reached,
    Other,
    Race,
}

/// The number of runs of a test.
#[derive(Clone, Copy)]
struct Runs {
    /// Runs if an outcome must not occur.
    nothing: u64,
    /// Most runs if an outcome must occur; the first run with it is the last. The rarest outcome
    /// takes 729 runs: a bulk store that lands between two steps of another block.
    something: u64,
}

fn runs() -> Runs {
    let asked = std::env::var("EPOXIDE_LITMUS_RUNS").ok();
    let asked = asked.map(|runs| runs.parse().expect("EPOXIDE_LITMUS_RUNS is a number"));
    Runs { nothing: asked.unwrap_or(tier::pick(100, 1000)), something: asked.unwrap_or(10_000) }
}

/// A test, ready to run.
struct Ready {
    test: &'static Test,
    program: Program,
    /// The kernels of each device.
    modules: Vec<Module>,
}

impl Ready {
    fn new(test: &'static Test, form: Form) -> Self {
        let program = Program::new(test.text, form).unwrap_or_else(|e| panic!("{}: {e}", test.text));
        let parse = |ptx: &str| Module::parse(ptx).unwrap_or_else(|e| panic!("{}: {e}\n{ptx}", test.text));
        let modules = program.devices.iter().map(|device| parse(&device.ptx)).collect();
        Self { test, program, modules }
    }

    /// A machine for a run, whose devices take turns of up to `turn` warp instructions.
    fn machine(&self, config: DeviceConfig, races: bool, turn: u64) -> Machine {
        let weak_memory = config.schedule_seed.filter(|_| !races);
        let check = CheckConfig { races, weak_memory, ..CheckConfig::default() };
        let config = DeviceConfig { livelock_limit: Some(LIMIT), ..config };
        Machine::with_config(self.modules.len(), config, Some(check)).with_longest_turn(turn)
    }

    /// Runs what was launched to its end; `None` for a race that the test may have.
    fn run(&self, machine: &mut Machine) -> Option<()> {
        let Test { number, text, .. } = self.test;
        match machine.run() {
            Ok(()) => Some(()),
            Err(MachineError::Fault(fault))
                if matches!(fault.kind, FaultKind::Race(_)) && self.may_race() =>
            {
                None
            }
            Err(error) => {
                let ptx: String = self.program.devices.iter().map(|d| d.ptx.as_str()).collect();
                panic!("#{number} {text}: {error}\n{ptx}")
            }
        }
    }

    fn may_race(&self) -> bool {
        self.test.verdict == Verdict::Racy || elsewhere(self.test)
    }
}

/// A buffer of the first device, and how every device addresses it.
fn on_all_devices(machine: &Machine, buf: Array<u32>) -> Vec<Array<u32>> {
    let near: Vec<_> = (1..machine.devices()).map(|d| machine.map(d, &buf).expect("memory")).collect();
    std::iter::once(buf).chain(near).collect()
}

/// Runs a test once, under a seed.
fn run(ready: &Ready, seed: u64, races: bool) -> RunOutcome {
    let schedule = if seed.is_multiple_of(2) { Schedule::Random } else { Schedule::Preemptions(3) };
    let config = DeviceConfig { schedule_seed: Some(seed), schedule, ..DeviceConfig::default() };
    run_on(ready, ready.machine(config, races, 1))
}

/// Runs a test once, on a machine of its own.
fn run_on(ready: &Ready, mut machine: Machine) -> RunOutcome {
    let Ready { program, modules, .. } = ready;
    let mut words = vec![0u32; BYTES as usize / 4];
    words[RESULTS as usize / 4..].fill(NO_RESULT);
    program.initial.iter().for_each(|&(at, v)| words[at as usize / 4] = v);
    let bufs = on_all_devices(&machine, machine.upload(0, "litmus", &words).expect("memory"));
    for (device, d) in program.devices.iter().enumerate() {
        let shape = GridConfig::new(d.blocks, d.threads, 0).in_clusters_of([d.cluster, 1, 1]);
        for kernel in 0..d.kernels {
            let name = format!("k{kernel}");
            machine.launch_with(device, &modules[device], &name, shape, &[&bufs[device]]).expect("a kernel");
        }
    }
    if ready.run(&mut machine).is_none() {
        return RunOutcome::Race;
    }
    let words = bufs[0].download().expect("the results");
    let holds = |wanted: &[Wanted]| wanted.iter().all(|&(at, v)| words[at as usize / 4] == v);
    match (holds(&program.wanted), holds(&program.guards)) {
        (true, _) => RunOutcome::Met,
        (_, true) => RunOutcome::Reached,
        _ => RunOutcome::Other,
    }
}

fn elsewhere(test: &Test) -> bool {
    RACY_ELSEWHERE.iter().any(|(n, _)| *n == test.number)
}

fn every_test() -> impl Iterator<Item = &'static Test> {
    TESTS.iter().chain(&CLUSTER_TESTS)
}

#[test]
fn the_table_is_whole() {
    assert!(every_test().zip(1..).all(|(t, n)| t.number == n));
    for t in every_test() {
        assert!(!t.rule.is_empty(), "#{} has no rule", t.number);
        // The table differs from Dat3M only with a stated reason.
        assert!(
            t.dat3m.is_empty() || t.dat3m.starts_with(['=', '~']) || t.dat3m.contains("8."),
            "#{}",
            t.number
        );
    }
    let known = |n: u32, v: Verdict| every_test().any(|t| t.number == n && t.verdict == v);
    assert!(RACY_ELSEWHERE.iter().all(|(n, _)| known(*n, Verdict::Forbidden)));
    assert!(NOT_SHOWN.iter().all(|(n, _)| !known(*n, Verdict::Forbidden)));
}

/// The messages of `judge` about all tests, run on all cores.
fn all_tests(judge: impl Fn(&'static Test) -> Option<String> + Sync) -> Vec<String> {
    let next = AtomicUsize::new(0);
    let worker = || -> Vec<String> {
        let mine = || every_test().nth(next.fetch_add(1, Ordering::Relaxed));
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
        let ready = Ready::new(test, Form::One);
        let due = ready.may_race();
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
        let ready = Ready::new(test, Form::One);
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

/// Whether the threads of a test are lanes of one warp. Explorations leave the order of lanes
/// alone.
fn is_of_one_warp(test: &Test) -> bool {
    test.text.split(['‖', ';', ':']).any(|step| step == "b")
}

/// Outcomes that the runs of a test's exploration have shown.
struct Shown {
    runs: u64,
    coverage: Coverage,
    met: bool,
    reached: bool,
    raced: bool,
}

fn explore(test: &'static Test, runs: u64, races: bool) -> Shown {
    let ready = Ready::new(test, Form::Explored);
    let (mut met, mut reached, mut raced) = (false, false, false);
    let explored = Explore::new().runs(runs).run(|path| {
        let config = DeviceConfig { schedule_seed: Some(0), ..DeviceConfig::default() };
        let outcome = run_on(&ready, ready.machine(config, races, 1).explored(path));
        met |= outcome == RunOutcome::Met;
        reached |= matches!(outcome, RunOutcome::Met | RunOutcome::Reached);
        raced |= outcome == RunOutcome::Race;
        Ok::<(), ()>(())
    });
    Shown { runs: explored.runs, coverage: explored.coverage, met, reached, raced }
}

/// Runs of an exploration at the most. The largest complete one takes 6,802.
const EXPLORED_RUNS: u64 = 10_000;

/// Tests of which the number of runs does not cover every schedule: the moves of a bulk copy depend
/// on everything else, and so does the barrier of a cluster.
const NOT_COVERED: [u32; 7] = [48, 49, 53, 54, 60, 108, 115];

/// A complete exploration has exactly the outcomes that weak memory has here: a forbidden one is
/// absent, and an allowed one occurs.
#[test]
fn explorations_show_every_outcome_and_no_forbidden_one() {
    let most = AtomicU64::new(0);
    let wrong = all_tests(|test| {
        if is_of_one_warp(test) {
            return None;
        }
        let covered = !NOT_COVERED.contains(&test.number);
        let expected = test.verdict != Verdict::Forbidden && NOT_SHOWN.iter().all(|(n, _)| *n != test.number);
        let reachable = NEVER_REACHED.iter().all(|(n, _)| *n != test.number);
        let runs = if covered { EXPLORED_RUNS } else { tier::pick(500, EXPLORED_RUNS) };
        let weak = explore(test, runs, false);
        let right = match covered {
            true => weak.met == expected && weak.reached == reachable,
            // Some of the schedules may show an outcome, and none a forbidden one.
            false => !weak.met || expected,
        };
        most.fetch_max(if covered { weak.runs } else { 0 }, Ordering::Relaxed);
        let Shown { runs, coverage, met, reached, .. } = weak;
        (!right || coverage.is_complete() != covered).then(|| {
            format!(
                "#{} {} {:?}: {runs} runs, {coverage}; met: {met}, guards passed: {reached}",
                test.number, test.text, test.verdict
            )
        })
    });
    println!("the largest exploration took {} runs", most.into_inner());
    assert!(wrong.is_empty(), "explorations that are not as the table says:\n{}", wrong.join("\n"));
}

#[test]
fn explorations_report_every_race_and_no_other() {
    let wrong = all_tests(|test| {
        if is_of_one_warp(test) {
            return None;
        }
        let due = test.verdict == Verdict::Racy || elsewhere(test);
        let covered = !NOT_COVERED.contains(&test.number);
        let runs = if covered { EXPLORED_RUNS } else { tier::pick(500, EXPLORED_RUNS) };
        let Shown { runs, coverage, raced, .. } = explore(test, runs, true);
        let right = raced == due && (coverage.is_complete() || !covered);
        (!right).then(|| format!("#{} {}: {runs} runs, {coverage}; raced: {raced}", test.number, test.text))
    });
    assert!(wrong.is_empty(), "races that are not as the table says:\n{}", wrong.join("\n"));
}

/// Instances of a run: those that passed the guards, those that met the condition, and those whose
/// threads did not start together.
type Counts = [u32; 3];

/// Runs two groups of instances of a test in one launch for each kernel, beside a stress block, as
/// `examples/litmus.rs` does on a GPU. None if a race ended it that the test may have.
fn run_many(ready: &Ready, races: bool) -> Option<Counts> {
    let Ready { program, modules, test } = ready;
    let seed = u64::from(test.number);
    let (groups, stride, stress) = (2, many::STRIDE[0] as u32, 1);
    let instances = groups * program.packed;
    let config = DeviceConfig { schedule_seed: Some(seed), ..DeviceConfig::default() };
    let mut machine = ready.machine(config, races, 16);
    let counts = machine.upload(0, "counts", &[0u32; 3]).expect("memory");
    let bufs =
        on_all_devices(&machine, machine.alloc(0, "litmus", many::BYTES as usize / 4).expect("memory"));
    let first = bufs[0].addr();
    let scratch = many::BYTES - many::SCRATCH_AT;
    machine.memory(0).and_then(|m| Ok(m.fill(first + many::SCRATCH_AT, 0, scratch)?)).expect("zeroes");
    let results = first + many::RESULTS_AT;

    let once = |machine: &mut Machine, kernel: &str, arguments: &[&dyn Argument]| {
        let shape = GridConfig::new(1, 64, 0);
        machine.launch_with(0, &modules[0], kernel, shape, arguments).expect("a kernel");
        ready.run(machine)
    };
    once(&mut machine, "clear", &[&first, &results, &stride, &instances])?;
    for (at, device) in program.devices.iter().enumerate() {
        let addresses = [0, many::RESULTS_AT, many::SCRATCH_AT].map(|offset| bufs[at].addr() + offset);
        let (shift, seed, spread, warm, zero) = (1, 7, 64, 1, 0);
        let numbers: [u32; 8] = [groups, stride, shift, seed, spread, warm, stress, zero];
        let addresses = addresses.iter().map(|address| address as &dyn Argument);
        let arguments: Vec<_> =
            addresses.chain(numbers.iter().map(|number| number as &dyn Argument)).collect();
        let shape = GridConfig::new(stress + device.blocks * groups, device.threads, 0);
        for kernel in 0..device.kernels {
            machine
                .launch_with(at, &modules[at], &format!("k{kernel}"), shape, &arguments)
                .expect("a kernel");
        }
    }
    ready.run(&mut machine)?;
    once(&mut machine, "check", &[&first, &results, &counts, &stride, &instances])?;
    counts.download().expect("the counts").try_into().ok()
}

/// The tests for GPUs have no races of their own.
#[test]
fn many_instances_in_one_launch_are_tests_as_well() {
    let (mut shown, mut late) = (0, 0);
    for test in tier::sample(&TESTS) {
        let ready = Ready::new(test, Form::Many);
        run_many(&ready, true);
        let counts = run_many(&ready, false).expect("races are not watched");
        assert!(
            test.verdict != Verdict::Forbidden || counts[1] == 0,
            "#{} {}: {counts:?}",
            test.number,
            test.text
        );
        shown += u32::from(counts[1] > 0);
        late += counts[2];
    }
    // Few instances do not show all possible outcomes.
    assert!(shown >= tier::pick(3, 10), "only {shown} tests have shown what they may");
    assert_eq!(late, 0, "threads that did not meet at the start");
}
