//! `epoxide bench ab`: runs two programs, or two files of kernels, in turn, and compares the
//! results.
//!
//! The order within each pair is drawn by lot, because the test of the comparison relies on it.
//! Runs that differ in the kernels alone happen in this process, which keeps a device open, so that
//! a run costs only a buffer. Other programs, low latency and replays of graphs are started for each
//! run.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use epoxide::driver::Device;
use epoxide::group::run_threads;
use epoxide::internal::{PTX, read_text_file};
use epoxide_bench::compare::{Comparison, Verdict};
use epoxide_bench::results::{Point, Results, Run, percentile, seconds_since_1970};
use epoxide_bench::{Effort, Error, Plan, TIMEOUT, Watch, measure, points};
use epoxide_launch::die_with_parent;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::args::{PlanFlags, flags_of};
use super::compare::VerdictFlags;
use super::start::{announce, device_of, launched, measure_points, open};
use crate::error::{CommandError, Result, SKIPPED, USAGE};
use crate::output::{self, Progress, write_text};

/// Flags of `epoxide bench ab`.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    #[command(flatten)]
    sizes: PlanFlags,
    /// Program of side A, another build of this one [default: this one].
    #[arg(long, value_name = "PROGRAM")]
    a: Option<PathBuf>,
    /// Program of side B [default: this one].
    #[arg(long, value_name = "PROGRAM")]
    b: Option<PathBuf>,
    /// Kernels of side A, in place of those that the program has.
    #[arg(long, value_name = "FILE.ptx")]
    a_ptx: Option<PathBuf>,
    /// Kernels of side B.
    #[arg(long, value_name = "FILE.ptx")]
    b_ptx: Option<PathBuf>,
    /// Runs of each side, in pairs; of fewer than 9 nothing can be told. Runs of low latency and with
    /// --graph are processes of their own.
    #[arg(long, value_name = "N", default_value_t = 12)]
    repeat: u32,
    /// Compare so many times, with new runs each time, and count the verdicts of a difference.
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with_all = ["json_a", "json_b", "fail_if_slower"])]
    comparisons: u32,
    /// Write the results of side A as JSON to this file.
    #[arg(long, value_name = "FILE")]
    json_a: Option<PathBuf>,
    /// Write the results of side B as JSON to this file.
    #[arg(long, value_name = "FILE")]
    json_b: Option<PathBuf>,
    #[command(flatten)]
    verdict: VerdictFlags,
}

/// One side.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Side {
    name: &'static str,
    /// Where it is not this one.
    program: Option<PathBuf>,
    ptx: Option<PathBuf>,
}

/// Most runs of both sides together: each keeps its samples.
const MOST_RUNS: u32 = 100_000;

/// Alternates, compares, and prints.
pub fn run(args: &Args) -> Result<()> {
    if launched()?.is_some() {
        let remedy = "start it without one: its ranks are threads then";
        return Err(CommandError::usage(format!("ab: not for ranks that a launcher started; {remedy}")));
    }
    for (flag, value) in [("--repeat", args.repeat), ("--comparisons", args.comparisons)] {
        if !(1..=MOST_RUNS).contains(&value) {
            return Err(CommandError::usage(format!("{flag} {value}: must be 1 to {MOST_RUNS}")));
        }
    }
    let sides = args.sides()?;
    let files = [("--json-a", &args.json_a), ("--json-b", &args.json_b)];
    output::check_distinct(&files)?;
    for (flag, path) in files {
        output::check_file(flag, path.as_deref())?;
    }
    let runs = args.repeat.saturating_mul(args.comparisons).saturating_mul(2);
    if runs > MOST_RUNS {
        let rule = format!("twice their product must be at most {MOST_RUNS}");
        return Err(CommandError::usage(format!("--repeat and --comparisons: {runs} runs, and {rule}")));
    }
    let plans = args.sizes.plans()?.into_iter();
    let plans: Vec<Plan> = plans.map(|plan| Plan { no_ceiling: true, ..plan }).collect();
    plans.iter().try_for_each(Plan::check)?;
    let effort = if are_here(&plans, &sides) { Effort::Phases } else { Effort::Whole };
    let all_runs = |plan: &Plan| Plan { repeat: runs, effort, ..plan.clone() };
    announce(&plans.iter().map(all_runs).collect::<Vec<_>>(), args.sizes.leaves_sizes_open());
    let progress = Progress::new("bench ab", u64::from(runs), true);
    let mut runner = Runner::new(plans, sides.clone(), &progress)?;
    args.compare(&sides, &mut || runner.alternate(args.repeat), &progress)
}

/// Whether runs are made in this process: of one plan and program, whose phases alone are timed.
fn are_here(plans: &[Plan], sides: &[Side; 2]) -> bool {
    let has_phases_alone = |plan: &Plan| plan.low_latency.is_none() && plan.graph.is_none();
    matches!(plans, [plan] if has_phases_alone(plan) && sides.iter().all(|side| side.program.is_none()))
}

/// The generator that draws the order within each pair.
fn lot() -> ChaCha8Rng {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
    ChaCha8Rng::seed_from_u64(now ^ u64::from(std::process::id()) << 32)
}

/// The side of each run: `pairs` pairs, one run of each side in random order.
fn order(lot: &mut ChaCha8Rng, pairs: u32) -> Vec<usize> {
    (0..pairs).flat_map(|_| if lot.random() { [1, 0] } else { [0, 1] }).collect()
}

/// The points of A and of B.
fn by_side(order: &[usize], runs: &[Vec<Point>]) -> [Vec<Point>; 2] {
    [0, 1].map(|side| {
        let runs = order.iter().zip(runs).filter(|(of, _)| **of == side);
        points::join_runs(runs.map(|(_, points)| points.clone()).collect())
    })
}

/// The points of a run that began then: programs from before do not record it.
fn began(text: &str, started: f64) -> std::result::Result<Vec<Point>, String> {
    let mut points = Results::of_text(text)?.points;
    points.iter_mut().for_each(|point| point.runs = vec![Run { started }]);
    Ok(points)
}

impl Side {
    /// The program, for people.
    fn program(&self) -> Result<PathBuf> {
        match &self.program {
            Some(program) => Ok(program.clone()),
            None => std::env::current_exe()
                .map_err(|error| CommandError::failed(format!("ab: this program: {error}"))),
        }
    }

    /// The measured program and its kernels.
    fn text(&self) -> String {
        let side = self.name.to_uppercase();
        let program = match &self.program {
            None => "this program".into(),
            Some(program) => program.display().to_string(),
        };
        let kernels = match &self.ptx {
            None => match std::env::var_os("EPOXIDE_PTX") {
                None => "its own kernels".into(),
                Some(ptx) => format!("kernels of {} (EPOXIDE_PTX)", Path::new(&ptx).display()),
            },
            Some(ptx) => format!("kernels of {}", ptx.display()),
        };
        format!("{side}: {program}, {kernels}")
    }

    fn failed(&self, why: &str) -> CommandError {
        let program = self.program().unwrap_or_default();
        CommandError::failed(format!("ab: side {}: {}: {why}", self.name, program.display()))
    }

    /// The JSON that a run of the program prints.
    fn measure(&self, flags: &[String], progress: &Progress) -> Result<String> {
        progress.doing(0, self.name);
        let program = self.program()?;
        let mut command = Command::new(&program);
        command.arg("bench").args(flags).args(["--json", "-"]).stdin(Stdio::null());
        if let Some(ptx) = &self.ptx {
            command.env("EPOXIDE_PTX", ptx);
        }
        // A measurement that outlives this process would disturb the next one on these GPUs.
        die_with_parent(&mut command);
        let name = || format!("ab: side {}: {}", self.name, program.display());
        let output = command.output().map_err(|error| CommandError::usage(format!("{}: {error}", name())))?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            let message = format!("{}: {}: {}", name(), output.status, said.lines().last().unwrap_or(""));
            return Err(match output.status.code() {
                Some(code) if code == i32::from(SKIPPED) => CommandError::skipped(message),
                Some(code) if code == i32::from(USAGE) => CommandError::usage(message),
                _ => CommandError::failed(message),
            });
        }
        progress.step(0);
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

impl Args {
    /// Compares the runs of `alternate`, as often as requested, and prints the results.
    fn compare(
        &self,
        sides: &[Side; 2],
        alternate: &mut dyn FnMut() -> Result<[Vec<Point>; 2]>,
        progress: &Progress,
    ) -> Result<()> {
        let mut tally = Tally::default();
        for number in 1..=self.comparisons {
            let [a, b] = alternate()?;
            let comparison = self.verdict.compare(&a, &b);
            if self.comparisons == 1 {
                progress.end();
                let print = |comparison: Comparison| {
                    sides.iter().try_for_each(|side| output::text_line(&side.text()))?;
                    self.verdict.print(&comparison)
                };
                // The runs are kept whatever becomes of the comparison.
                let verdict = comparison.and_then(print);
                for (path, points) in [(&self.json_a, a), (&self.json_b, b)] {
                    if let Some(path) = path {
                        write_text(path, &Results::new(points).json()?)?;
                    }
                }
                return verdict;
            }
            if let Some(line) = tally.add(number, &comparison?) {
                progress.line(&line)?;
            }
        }
        progress.end();
        output::text_line(&tally.text())
    }

    fn sides(&self) -> Result<[Side; 2]> {
        let this = std::env::current_exe().and_then(std::fs::canonicalize);
        let side = |name, program: &Option<PathBuf>, ptx: &Option<PathBuf>| -> Result<Side> {
            let missing = |flag: &str, path: &Path, error: std::io::Error| {
                CommandError::usage(format!("ab: --{flag} {}: {error}", path.display()))
            };
            let program = match program {
                None => None,
                Some(path) => {
                    let whole = std::fs::canonicalize(path).map_err(|error| missing(name, path, error))?;
                    if this.as_ref().is_ok_and(|this| *this == whole) { None } else { Some(whole) }
                }
            };
            if let Some(path) = ptx {
                read_text_file(path, PTX).map_err(|error| missing(&format!("{name}-ptx"), path, error))?;
            }
            Ok(Side { name, program, ptx: ptx.clone() })
        };
        Ok([side("a", &self.a, &self.a_ptx)?, side("b", &self.b, &self.b_ptx)?])
    }
}

/// The error of a run, with the side that it was of.
fn of_side(name: &str, error: CommandError) -> CommandError {
    CommandError { message: error.message.map(|message| format!("ab: side {name}: {message}")), ..error }
}

/// Makes the runs.
struct Runner<'a> {
    /// One plan, or in low latency one for each number of tokens.
    plans: Vec<Plan>,
    sides: [Side; 2],
    /// The ranks' devices, where runs are made in this process.
    devices: Option<Vec<Device>>,
    lot: ChaCha8Rng,
    progress: &'a Progress,
}

impl<'a> Runner<'a> {
    /// Ready to run: where runs are made here, each side's results have been checked.
    fn new(plans: Vec<Plan>, sides: [Side; 2], progress: &'a Progress) -> Result<Runner<'a>> {
        let mut devices = None;
        if are_here(&plans, &sides) {
            let plan = &plans[0];
            progress.doing(0, "checking results");
            for side in if sides[0].ptx == sides[1].ptx { &sides[..1] } else { &sides[..] } {
                let once = Plan { warmup: 0, iters: 1, graph: None, ..plan_of(plan, side) };
                let checked = measure_points(&[Plan { effort: Effort::Whole, ..once }], &());
                checked.map_err(|error| of_side(side.name, error))?;
            }
            let opened = (0..plan.topology.ranks()).map(|rank| open(device_of(plan), rank));
            devices = Some(opened.collect::<epoxide::Result<Vec<_>>>().map_err(Error::from)?);
        }
        Ok(Runner { plans, sides, devices, lot: lot(), progress })
    }

    /// Makes `pairs` pairs of runs, one of each side in random order. Returns both sides' points.
    fn alternate(&mut self, pairs: u32) -> Result<[Vec<Point>; 2]> {
        let order = order(&mut self.lot, pairs);
        let runs = match &self.devices {
            Some(devices) => self.run_here(devices, &order)?,
            None => order.iter().map(|&side| self.start(&self.sides[side])).collect::<Result<_>>()?,
        };
        Ok(by_side(&order, &runs))
    }

    fn run_here(&self, devices: &[Device], order: &[usize]) -> Result<Vec<Vec<Point>>> {
        let plans = self.sides.each_ref().map(|side| plan_of(&self.plans[0], side));
        let failed = OnceLock::new();
        let ranks = run_threads(plans[0].topology.ranks(), TIMEOUT, |rank, group| {
            let run = |&side: &usize| {
                self.progress.doing(rank, self.sides[side].name);
                let result = measure::rank(&plans[side], devices[rank as usize].clone(), &group, &())
                    .inspect_err(|_| _ = failed.set(self.sides[side].name))?;
                self.progress.step(rank);
                Ok(result)
            };
            order.iter().map(run).collect::<epoxide::Result<Vec<_>>>()
        });
        let ranks = ranks.map_err(|failure| {
            let error = Error::from(failure.error).into();
            failed.get().into_iter().fold(error, |error, name| of_side(name, error))
        });
        Ok(points::by_run(&plans[0], ranks?)?)
    }

    /// One run of a program.
    fn start(&self, side: &Side) -> Result<Vec<Point>> {
        let started = seconds_since_1970();
        let text = side.measure(&flags_of(&self.plans), self.progress)?;
        began(&text, started).map_err(|why| side.failed(&why))
    }
}

/// The plan of a run of a side in this process.
fn plan_of(plan: &Plan, side: &Side) -> Plan {
    Plan { effort: Effort::Phases, ptx: side.ptx.clone(), ..plan.clone() }
}

/// Sums over many comparisons.
#[derive(Default)]
struct Tally {
    comparisons: u32,
    differing: u32,
    lines: Vec<(String, Verdicts)>,
}

/// Verdicts of one line over all comparisons.
#[derive(Default)]
struct Verdicts {
    faster: u32,
    slower: u32,
    untold: u32,
    ratios: Vec<f64>,
}

impl Tally {
    /// Counts a comparison. Returns the text for one with a verdict of a difference.
    fn add(&mut self, number: u32, comparison: &Comparison) -> Option<String> {
        self.comparisons += 1;
        for line in &comparison.lines {
            let what = match self.sizes_differ(comparison) {
                true => format!("{} tokens, {} SMs, {}", line.key.tokens, line.key.num_sms, line.what),
                false => line.what.clone(),
            };
            let at = self.lines.iter().position(|(other, _)| *other == what).unwrap_or_else(|| {
                self.lines.push((what, Verdicts::default()));
                self.lines.len() - 1
            });
            let verdicts = &mut self.lines[at].1;
            verdicts.ratios.push(line.ratio);
            verdicts.faster += u32::from(line.verdict == Verdict::Faster);
            verdicts.slower += u32::from(line.verdict == Verdict::Slower);
            verdicts.untold += u32::from(!line.verdict.is_told());
        }
        let differences: Vec<String> =
            comparison.differences().map(|line| format!("{} {:.3}", line.what, line.ratio)).collect();
        if differences.is_empty() {
            return None;
        }
        self.differing += 1;
        Some(format!("comparison {number}: B / A differs: {}", differences.join(", ")))
    }

    fn sizes_differ(&self, comparison: &Comparison) -> bool {
        comparison.lines.iter().any(|line| line.key != comparison.lines[0].key)
    }

    fn text(&self) -> String {
        let width = self.lines.iter().map(|(what, _)| what.len()).max().unwrap_or(0);
        let mut out = format!(
            "{:<width$}    slower    faster     noise  not told |     B / A     least      most\n",
            "comparisons that call B"
        );
        for (what, verdicts) in &self.lines {
            let Verdicts { faster, slower, untold, ratios } = verdicts;
            let noise = self.comparisons - faster - slower - untold;
            let [median, least, most] = [0.5, 0.0, 1.0].map(|q| percentile(ratios, q));
            out += &format!(
                "{what:<width$} {slower:>9} {faster:>9} {noise:>9} {untold:>9} | {median:>9.3} {least:>9.3} {most:>9.3}\n"
            );
        }
        out + &format!("{} of {} comparisons call a difference", self.differing, self.comparisons)
    }
}

#[cfg(test)]
mod tests {
    use epoxide_testing::tier;

    use super::*;
    use crate::testing;

    fn args(line: &str) -> Args {
        let small = "ab --ranks-per-node 2 --tokens 2 --hidden 64 --experts 4 --topk 2 --num-sms 2 --warmup 0 --iters 5";
        testing::parse(small.split_whitespace().chain(line.split_whitespace())).unwrap()
    }

    #[test]
    fn runs_alternate_and_are_kept_apart() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        let mut args = args("--repeat 3");
        std::fs::write(file("same.ptx"), epoxide_gpu::PTX).unwrap();
        (args.json_a, args.json_b) = (Some(file("a.json")), Some(file("b.json")));
        args.b_ptx = Some(file("same.ptx"));
        run(&args).unwrap();
        let [a, b] = ["a.json", "b.json"].map(|name| Results::read(&file(name)).unwrap().points);
        for point in [&a[0], &b[0]] {
            assert_eq!(point.runs.len(), 3);
            assert!(point.phases.iter().all(|phase| phase.call.samples_us.len() == 15));
            assert!(
                point.phases.iter().all(|phase| phase.back_to_back.is_none() && phase.kernel_us.is_none())
            );
        }
        // Every run has its pair, but there are too few pairs.
        let comparison = args.verdict.compare(&a, &b).unwrap();
        assert!(comparison.text().contains("3 pairs") && comparison.text().contains("too few runs (3 < 9)"));
    }

    #[test]
    fn runs_that_cannot_be_compared_are_stored() {
        let folder = tempfile::tempdir().unwrap();
        let files = ["a.json", "b.json"].map(|name| folder.path().join(name));
        let mut args = args("");
        [args.json_a, args.json_b] = files.clone().map(Some);
        let a = crate::bench::testing::measured("").0;
        let mut b = a.clone();
        b[0].routing_digest = Some("another".into());
        let mut alternate = || Ok([a.clone(), b.clone()]);
        let error = args.compare(&args.sides().unwrap(), &mut alternate, &Progress::new("test", 0, false));
        let message = error.unwrap_err().message.unwrap();
        assert!(message.contains("different routings"), "{message}");
        assert_eq!(files.map(|file| Results::read(&file).unwrap().points), [a, b]);
    }

    #[test]
    fn low_latency_runs_alternate_by_sides() {
        let (mut lot, pairs) = (lot(), 40);
        let order = order(&mut lot, pairs);
        assert!(order.chunks(2).all(|pair| pair[0] + pair[1] == 1));
        // Equal 40 times in a row: once in 10^12.
        assert!(order.chunks(2).any(|pair| pair == [0, 1]) && order.chunks(2).any(|pair| pair == [1, 0]));

        let args = crate::bench::testing::parse(
            "bench --mode low-latency --ranks-per-node 2 --tokens 2 --hidden 64 --experts 4 --topk 2 --warmup 0 --iters 5 --graph=1",
        );
        let plans = args.unwrap().plans().unwrap();
        let mut clock = 1.0;
        let mut run = |_: &usize| {
            clock += 1.0;
            // Stored and read again, as what another program prints is.
            let text = Results::new(measure_points(&plans, &()).unwrap().0).json().unwrap();
            began(&text, clock).unwrap()
        };
        let order = &order[..6];
        let runs: Vec<_> = order.iter().map(&mut run).collect();
        let [a, b] = by_side(order, &runs);
        let samples = |point: &Point| point.phases[0].call.samples_us.len();
        assert_eq!((a[0].runs.len(), b[0].runs.len(), samples(&a[0])), (3, 3, 15));
        let text = super::super::compare::tests::verdict("").compare(&a, &b).unwrap().text();
        for part in ["3 pairs", "pair of 1", "kernel of combine", "too few runs (3 < 9)"] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
    }

    #[test]
    fn sides_are_named_with_their_kernels() {
        let folder = tempfile::tempdir().unwrap();
        let ptx = folder.path().join("same.ptx");
        std::fs::write(&ptx, epoxide_gpu::PTX).unwrap();
        let ptx = ptx.display();
        let [a, b] = args(&format!("--a /bin/sh --b-ptx {ptx}")).sides().unwrap();
        let own =
            if std::env::var_os("EPOXIDE_PTX").is_none() { "sh, its own kernels" } else { "sh, kernels of" };
        assert!(a.text().starts_with("A: /") && a.text().contains(own), "{}", a.text());
        assert_eq!(b.text(), format!("B: this program, kernels of {ptx}"));
    }

    #[test]
    fn errors_name_the_side() {
        let folder = tempfile::tempdir().unwrap();
        let wrong = folder.path().join("wrong.ptx");
        std::fs::write(&wrong, epoxide_gpu::PTX.replace("add.rn.f32", "sub.rn.f32")).unwrap();
        let mut of_b = args(&format!("--b-ptx {}", wrong.display()));
        of_b.sizes.topk = Some(4);
        let message = run(&of_b).unwrap_err().message.unwrap();
        assert!(message.starts_with("ab: side b: ") && message.contains("verify"), "{message}");

        let (args, progress) = (args(""), Progress::new("test", 0, false));
        let sides = args.sides().unwrap();
        let mut runner = Runner::new(args.sizes.plans().unwrap(), sides, &progress).unwrap();
        runner.sides[1].ptx = Some("/no/such.ptx".into());
        let message = runner.alternate(1).unwrap_err().message.unwrap();
        assert!(message.starts_with("ab: side b: ") && message.contains("/no/such.ptx"), "{message}");
    }

    #[test]
    fn equal_kernels_are_not_called_different() {
        // The comparison has tests of its own; this one needs many runs.
        if !tier::is_long() {
            return;
        }
        let progress = Progress::new("test", 0, false);
        let args = args("");
        let plans = args.sizes.plans().unwrap();
        let mut runner = Runner::new(plans, args.sides().unwrap(), &progress).unwrap();
        let mut tally = Tally::default();
        let comparisons = 4;
        for number in 1..=comparisons {
            let [a, b] = runner.alternate(9).unwrap();
            tally.add(number, &args.verdict.compare(&a, &b).unwrap());
        }
        assert_eq!(tally.lines.len(), 4);
        // A comparison calls a difference once in two hundred times, however noisy the machine is:
        // the order in a pair is drawn by lot.
        assert!(tally.differing <= 2, "{}", tally.text());
        assert!(tally.text().ends_with(&format!("of {comparisons} comparisons call a difference")));
    }

    /// In this process the phases alone are timed.
    #[test]
    fn replays_of_graphs_are_measured_in_other_processes() {
        let is_here = |line: &str| {
            let args = args(line);
            are_here(&args.sizes.plans().unwrap(), &args.sides().unwrap())
        };
        assert_eq!(["", "--graph=3", "--mode low-latency"].map(is_here), [true, false, false]);
    }

    #[test]
    fn files_that_cannot_be_written_are_bad_usage_before_anything_is_measured() {
        for flag in ["--json-a", "--json-b"] {
            let error = run(&args(&format!("{flag} /no/such/folder/a.json"))).unwrap_err();
            assert_eq!(error.code, USAGE);
            let message = error.message.unwrap();
            assert!(message.starts_with(&format!("{flag} /no/such/folder/a.json: ")), "{message}");
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.json");
        let error = run(&args(&format!("--json-a {0} --json-b {0}", path.display()))).unwrap_err();
        assert_eq!(error.code, USAGE);
        assert!(error.message.as_ref().is_some_and(|message| message.contains("the same file")), "{error:?}");
    }

    #[test]
    fn impossible_flags_are_rejected_by_name() {
        for (line, part) in [
            ("--a /no/such/program", "--a /no/such/program"),
            ("--b-ptx /no/such.ptx", "--b-ptx /no/such.ptx"),
            ("--repeat 0", "--repeat 0"),
            ("--repeat 3000000000", "--repeat 3000000000: must be 1 to 100000"),
            ("--repeat 70000 --comparisons 70000", "4294967295 runs"),
            ("--mode low-latency --combine-dtype fp8", "--hidden 64: must be a positive multiple of 128"),
        ] {
            let error = run(&args(line)).unwrap_err();
            assert_eq!(error.code, USAGE);
            assert!(error.message.as_ref().is_some_and(|message| message.contains(part)), "{error:?}");
        }
        let mut args = args("");
        args.sizes.topk = Some(33);
        assert!(run(&args).unwrap_err().message.unwrap().starts_with("--topk 33: must be 1 to 4"));
    }
}
