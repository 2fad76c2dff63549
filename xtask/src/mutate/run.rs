//! Runs faulty kernels: the workloads, and the analysis of their output.

use std::collections::HashSet;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use epoxide_build_ptx::coverage;
use epoxide_vgpu::Module;
use hmac_sha256::Hash;
use serde_json::{Value, json};

use super::faults::Fault;
use super::text::Place;
use crate::workspace;

/// The checks of the virtual GPU, in the order in which they are tried. A load without a wait
/// passes for a wait that was short: the race checker accepts both, and weak memory shows an older
/// value.
const CHECKS: &[&str] = &["--check", "--check=weak"];
/// The file with the kernels to load instead of those in the binary.
const PTX_VARIABLE: &str = "EPOXIDE_PTX";
/// Flags for a small run: the checks are the same for all sizes.
const SMALL: &str = "--device virtual --threads --tokens 24 --hidden 256 --num-sms 4 --timeout 20";
/// Round trips that together run every line that a round trip can. High throughput runs within a
/// node, across mapped nodes, through queues, and with nodes kept apart whose kernels store to wire
/// memory of a peer. Its rows have one piece or several, with scales, with sizes that differ
/// between ranks, and are replayed. Some fill the rings of all warps more than once, and on 18
/// blocks warps claim the tokens behind the first ones. Within a node and across nodes a rank once
/// has more experts than a warp has lanes. 300 tokens across nodes have so many chunks that some
/// arrive while a warp counts earlier ones, and with random numbers of tokens a rank waits long for
/// the counts of the other. Over TCP nodes wait for each other's slots. Low latency runs with few
/// tokens, whose rows are sent as packets, and with more tokens than a block has threads, where a
/// rank has more experts than blocks. One of 34 blocks lists rows. With 4 tokens most warps place
/// rows by expert. Across nodes its rows have several warps, the last of which has no piece for
/// some of its lanes, and some blocks have no expert.
const WORKLOADS: [&str; 29] = [
    "--mode intranode --ranks-per-node 4 --experts 160",
    "--mode internode --nodes 2 --ranks-per-node 2 --transport direct",
    "--mode internode --nodes 2 --ranks-per-node 2 --transport shm --graph-replays 2",
    "--mode internode --nodes 2 --ranks-per-node 2 --transport direct --keep-nodes --experts 160 --graph-replays 2",
    "--mode internode --nodes 2 --ranks-per-node 2 --transport direct --keep-nodes --tokens 96 --hidden 6144",
    "--mode internode --nodes 2 --ranks-per-node 1 --transport direct --keep-nodes --tokens 300 --hidden 32 --iterations 3",
    "--mode internode --nodes 2 --ranks-per-node 1 --transport direct --keep-nodes --tokens 300 --hidden 1024 --iterations 4 --random",
    "--mode internode --nodes 2 --ranks-per-node 1 --transport tcp --iterations 2",
    "--mode intranode --ranks-per-node 4 --dtype fp8 --iterations 3 --random",
    "--mode internode --nodes 2 --ranks-per-node 2 --transport shm --dtype fp8 --iterations 3 --random",
    "--mode intranode --ranks-per-node 3 --dtype fp8 --quantise --iterations 3 --random",
    "--mode intranode --ranks-per-node 2 --hidden 160 --dtype mxfp8 --quantise --iterations 3 --random",
    "--mode intranode --ranks-per-node 2 --tokens 96 --hidden 6144 --graph-replays 3",
    "--mode internode --nodes 2 --ranks-per-node 2 --transport direct --tokens 96 --hidden 6144 --graph-replays 3",
    "--mode intranode --ranks-per-node 2 --tokens 1000 --num-sms 18",
    "--mode low-latency --ranks-per-node 3 --iterations 4 --random",
    "--mode low-latency --ranks-per-node 2 --tokens 4 --iterations 2",
    "--mode low-latency --ranks-per-node 3 --dtype fp8 --iterations 2 --graph-replays 3",
    "--mode low-latency --ranks-per-node 3 --tokens 200 --experts 36 --iterations 2",
    "--mode low-latency --ranks-per-node 2 --tokens 100 --hidden 1024 --dtype fp8 --iterations 2 --graph-replays 2",
    "--mode low-latency --ranks-per-node 2 --tokens 100 --dtype fp8 --iterations 4 --random",
    "--mode low-latency --ranks-per-node 2 --tokens 140 --hidden 1024 --dtype fp8 --num-sms 34 --iterations 2 --graph-replays 2",
    "--mode low-latency --ranks-per-node 3 --dtype mxfp8 --iterations 2 --graph-replays 3",
    "--mode low-latency --ranks-per-node 3 --dtype mxfp8 --iterations 4 --random",
    "--mode low-latency --nodes 2 --ranks-per-node 2 --transport direct --keep-nodes --iterations 4 --random",
    "--mode low-latency --nodes 2 --ranks-per-node 1 --transport shm --hidden 640 --dtype fp8 --num-sms 8 --iterations 3 --graph-replays 3",
    "--mode low-latency --nodes 2 --ranks-per-node 1 --transport shm --hidden 1024 --dtype mxfp8 --iterations 4 --random",
    "--mode low-latency --nodes 2 --ranks-per-node 1 --transport direct --keep-nodes --dtype mxfp8 --iterations 4 --random",
    "--mode low-latency --nodes 3 --ranks-per-node 1 --transport direct --keep-nodes --tokens 300 --experts 36 --hidden 1024 --iterations 2",
];
/// Longest run on sound kernels.
const LONGEST_SOUND_RUN: Duration = Duration::from_secs(1800);
/// Limit of a run on faulty kernels: this many times the time on sound ones, times the concurrent
/// runs. A fault makes the virtual GPU's own checks wait, and runs share processors.
const SLOWER: u32 = 2;
/// Bytes of output that are parsed.
const LONGEST_OUTPUT: usize = 1 << 20;

/// How runs are made.
pub struct Runner {
    /// Programs that run on faulty kernels.
    pub what: Runs,
    /// A folder for PTX and output.
    pub directory: PathBuf,
    /// The folder from which the PTX names its sources.
    pub sources: PathBuf,
    /// Longest run, at least: a workload that takes long on sound kernels may take longer.
    pub limit: Duration,
    /// Runs at a time.
    pub jobs: u16,
}

/// Programs that run on faulty kernels.
pub enum Runs {
    /// The acceptance test of epoxide, in all modes.
    RoundTrips {
        /// `epoxide`.
        binary: PathBuf,
        /// Seeds to try each workload with.
        seeds: Vec<u64>,
        /// Whether the virtual GPU's checks are on.
        check: bool,
    },
    /// A user's program that loads the sound text on virtual GPUs, which replace it.
    Program(Vec<String>),
}

/// The environment variable of the virtual GPU that names the folder of a sound text and a faulty
/// one.
const FAULTY_VARIABLE: &str = "EPOXIDE_VGPU_FAULTY";

/// A run of a round trip; of a program, all is empty.
#[derive(Clone, Copy)]
struct Run<'a> {
    arguments: &'a str,
    seed: u64,
    /// The flag that turns a check on, or nothing.
    check: &'a str,
}

/// How a run ended.
#[derive(Debug)]
pub struct ProcessEnd {
    /// `None` when it was stopped.
    pub code: Option<i32>,
    /// The beginning of what it printed.
    output: String,
}

/// A workload, and the lines of the PTX that it executes.
pub struct Workload {
    /// The arguments of a round trip, or the command.
    arguments: String,
    executed: HashSet<usize>,
    /// Longest run on faulty kernels. Shorter than a run on sound kernels, each fault would count
    /// as reported.
    limit: Duration,
}

/// Outcome of a fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultOutcome {
    /// The check that reported it; `None` when it survived.
    pub found_by: Option<String>,
    /// How near the report is to the fault.
    pub nearness: Nearness,
    /// Rust lines that the report names.
    pub lines: Vec<Place>,
    /// The run that reported it.
    pub workload: String,
    /// The report's first lines.
    pub report: String,
}

/// Place that a report names, the nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Nearness {
    /// A line at most [`NEAR`] from the fault, as one of the accesses, or as what was to order
    /// them.
    Line,
    /// Lines of the same function before and behind it: where something is missing, there is no
    /// line to name. For a race also calls there that led to the two accesses, or to the
    /// synchronisation that falls short; for a wrong value the call there that led to its write.
    Between,
    /// Such a line only among the last instructions of a warp involved.
    Trace,
    /// The faulty kernel.
    Kernel,
    /// Neither.
    Elsewhere,
}

/// How many lines a report may be off: a statement can span some.
const NEAR: u32 = 3;

impl Workload {
    /// One that executes a single line.
    #[cfg(test)]
    pub fn of_line(line: usize) -> Self {
        let limit = Duration::from_secs(60);
        Self { arguments: String::new(), executed: HashSet::from([line]), limit }
    }

    /// Whether it executes a line of the PTX.
    pub fn executes(&self, line: usize) -> bool {
        self.executed.contains(&line)
    }
}

impl Runner {
    /// Runs every workload with every seed on sound kernels, which must pass; records the lines
    /// that each executes, and its longest time. The first run of a program may compile it and does
    /// not count.
    pub fn sound(&self, text: &str) -> Result<Vec<Workload>> {
        let module = Module::parse(text).context("the PTX to make faults in")?;
        let file = self.directory.join("sound.ptx");
        workspace::write(&file, text)?;
        let mut workloads = Vec::new();
        let all = match &self.what {
            Runs::RoundTrips { .. } => WORKLOADS.map(str::to_owned).to_vec(),
            Runs::Program(words) => vec![words.join(" ")],
        };
        for (index, arguments) in all.into_iter().enumerate() {
            let covered = self.directory.join(format!("coverage-{index}"));
            workspace::fresh_dir(&covered)?;
            let name = format!("sound-{index}");
            let (program, runs) = match &self.what {
                // Another seed may run other lines, in whichever check.
                Runs::RoundTrips { seeds, .. } => {
                    let runs =
                        self.passes().filter(|(check, seed)| *check == self.checks()[0] || *seed == seeds[0]);
                    ("epoxide roundtrip ", runs.collect())
                }
                Runs::Program(_) => ("", vec![("", 0); 2]),
            };
            let mut took = Duration::ZERO;
            for (check, seed) in runs {
                let start = Instant::now();
                let run = Run { arguments: &arguments, seed, check };
                let ended = self.workload(run, &file, &name, LONGEST_SOUND_RUN, Some(&covered))?;
                let (named, before) = match self.what {
                    Runs::RoundTrips { .. } => (format!(" --seed {seed} {check}"), took),
                    Runs::Program(_) => (String::new(), Duration::ZERO),
                };
                took = start.elapsed().max(before);
                ensure!(
                    ended.code == Some(0),
                    "the sound kernels fail `{program}{arguments}{named}`:\n{}",
                    ended.output
                );
            }
            let limit = self.limit.max(took * SLOWER * u32::from(self.jobs));
            if limit > self.limit {
                println!(
                    "`{program}{arguments}` takes {:.0} s: runs on faulty kernels may take {:.0} s",
                    took.as_secs_f64(),
                    limit.as_secs_f64()
                );
            }
            let kernels = coverage::merge(&module, &covered)?;
            let executed = kernels.iter().flat_map(|(kernel, executed)| {
                kernel
                    .places()
                    .zip(executed)
                    .filter(|(_, executed)| **executed)
                    .map(|(place, _)| place.ptx_line)
            });
            workloads.push(Workload { arguments, executed: executed.collect(), limit });
        }
        Ok(workloads)
    }

    /// Runs a faulty kernel on every workload that executes it, until a report names the fault, and
    /// returns the nearest report. `None` when no workload executes it.
    pub fn fault(
        &self,
        fault: &Fault,
        text: &str,
        workloads: &[Workload],
        worker: usize,
    ) -> Result<Option<FaultOutcome>> {
        let executes = |workload: &&Workload| fault.through.iter().any(|line| workload.executes(*line));
        let workloads: Vec<&Workload> = workloads.iter().filter(executes).collect();
        if workloads.is_empty() {
            return Ok(None);
        }
        let file = self.directory.join(format!("faulty-{worker}.ptx"));
        workspace::write(&file, super::text::with_lines(text, &fault.edits))?;
        let source = |file: &str| std::fs::read_to_string(self.sources.join(file)).unwrap_or_default();
        let mut nearest: Option<FaultOutcome> = None;
        let passes =
            self.checks().iter().flat_map(|check| self.seeds().iter().map(move |seed| (check, *seed)));
        for (check, seed) in passes {
            // A report without a place is better than none: only what survives is checked once
            // more.
            if nearest.is_some() && *check != self.checks()[0] {
                break;
            }
            for workload in &workloads {
                let name = format!("faulty-{worker}");
                let run = Run { arguments: &workload.arguments, seed, check };
                let ended = self.workload(run, &file, &name, workload.limit, None)?;
                if let Some(by) = what(ended.code, &ended.output) {
                    let run = match self.what {
                        Runs::RoundTrips { .. } => format!("{} --seed {seed} {check}", workload.arguments),
                        Runs::Program(_) => workload.arguments.clone(),
                    };
                    let found = outcome(fault, by, run, &ended.output, &source);
                    if nearest.as_ref().is_none_or(|before| found.nearness < before.nearness) {
                        nearest = Some(found);
                    }
                    if nearest.as_ref().is_some_and(|found| found.nearness.names_fault()) {
                        return Ok(nearest);
                    }
                }
            }
        }
        Ok(Some(nearest.unwrap_or_else(FaultOutcome::survived)))
    }

    fn workload(
        &self,
        Run { arguments, seed, check }: Run<'_>,
        ptx: &Path,
        name: &str,
        limit: Duration,
        covered: Option<&Path>,
    ) -> Result<ProcessEnd> {
        let mut command = match &self.what {
            Runs::RoundTrips { binary, .. } => {
                let mut command = Command::new(binary);
                // A flag that is given twice counts as it was given last, so a workload may differ
                // from what is small.
                command.arg("roundtrip").args(without_repeats(SMALL, arguments));
                command.args(["--seed", &seed.to_string()]);
                command.args(Some(check).filter(|check| !check.is_empty()));
                command.env(PTX_VARIABLE, ptx);
                command
            }
            Runs::Program(words) => {
                let texts = self.directory.join(format!("{name}.texts"));
                workspace::fresh_dir(&texts)?;
                for (from, to) in [(&*self.directory.join("sound.ptx"), "sound.ptx"), (ptx, "faulty.ptx")] {
                    workspace::write(&texts.join(to), workspace::read(from)?)?;
                }
                let mut command = workspace::user_command(words)?;
                command.env(FAULTY_VARIABLE, texts);
                command
            }
        };
        command.env("RUST_BACKTRACE", "0");
        if let Some(directory) = covered {
            command.env(coverage::DIRECTORY_VARIABLE, directory);
        }
        let output = self.directory.join(format!("{name}.log"));
        run_limited(&mut command, &output, limit)
    }

    /// All that the outcome of a run depends on, except the kernels. A program's tests may be in
    /// any files, so that only its words count.
    pub fn settings(&self) -> Result<Vec<String>> {
        let mut settings = vec![format!("limit {:?}", self.limit)];
        match &self.what {
            Runs::RoundTrips { binary, seeds, check: _ } => {
                let bytes =
                    std::fs::read(binary).with_context(|| format!("cannot read {}", binary.display()))?;
                settings.push(format!("binary {:?}", Hash::hash(&bytes)));
                settings.push(format!("round trips {SMALL}"));
                settings.extend(WORKLOADS.map(|workload| format!("workload {workload}")));
                settings.extend(seeds.iter().map(|seed| format!("seed {seed}")));
                settings.extend(self.checks().iter().map(|check| format!("check {check}")));
            }
            Runs::Program(words) => {
                settings.push("program".to_owned());
                settings.extend(words.iter().cloned());
            }
        }
        Ok(settings)
    }

    /// The flags that turn checks on, each for a pass of its own.
    fn checks(&self) -> &'static [&'static str] {
        match &self.what {
            Runs::RoundTrips { check: true, .. } => CHECKS,
            Runs::RoundTrips { .. } | Runs::Program(_) => &[""],
        }
    }

    /// The checks and seeds of a workload's runs.
    fn passes(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.checks().iter().flat_map(|check| self.seeds().iter().map(move |seed| (*check, *seed)))
    }

    /// Seeds of round trips. A program draws its own.
    fn seeds(&self) -> &[u64] {
        match &self.what {
            Runs::RoundTrips { seeds, .. } => seeds,
            Runs::Program(_) => &[0],
        }
    }
}

/// All flags of `specific`, and those of `general` that it lacks.
fn without_repeats(general: &str, specific: &str) -> Vec<String> {
    let given: Vec<&str> = specific.split(' ').collect();
    let mut words = Vec::new();
    let mut skip = false;
    for word in general.split(' ') {
        if word.starts_with("--") {
            skip = given.contains(&word);
        }
        if !skip {
            words.push(word.to_owned());
        }
    }
    words.extend(given.into_iter().map(str::to_owned));
    words
}

/// Runs a command with its output in a file, and ends it and all that it has started at the limit.
pub fn run_limited(command: &mut Command, output: &Path, limit: Duration) -> Result<ProcessEnd> {
    let create = || format!("cannot write {}", output.display());
    let file = File::create(output).with_context(create)?;
    let both = file.try_clone().with_context(create)?;
    let mut group = Group::start(command.stdin(Stdio::null()).stdout(file).stderr(both))?;
    let start = Instant::now();
    let code = loop {
        if let Some(status) = group.ended()? {
            // A signal is not a report; it has no code of its own.
            break Some(status.code().unwrap_or(-1));
        }
        if start.elapsed() > limit {
            break None;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    // None of its processes writes from here on.
    drop(group);
    let read = || format!("cannot read {}", output.display());
    let mut bytes = Vec::new();
    let file = File::open(output).with_context(read)?;
    file.take(LONGEST_OUTPUT as u64).read_to_end(&mut bytes).with_context(read)?;
    Ok(ProcessEnd { code, output: String::from_utf8_lossy(&bytes).into_owned() })
}

/// A command in a process group of its own. Dropping kills all that is left of the group, such as
/// the tests that `cargo test` has started.
struct Group {
    program: Child,
    /// A process of the group that kills the group once its standard input ends. Ctrl-C does not
    /// reach the group. The guard ends it however xtask ends.
    guard: Option<Child>,
}

impl Group {
    fn start(command: &mut Command) -> Result<Self> {
        let program = command
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().to_string_lossy()))?;
        let mut group = Self { program, guard: None };
        // The program is not reaped yet, so the number of the group is still its own.
        let id = i32::try_from(group.program.id()).context("the number of a process")?;
        let guard = Command::new("sh")
            .args(["-c", "read -r _; kill -s KILL 0"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(id)
            .spawn();
        group.guard = Some(guard.context("cannot start sh, which ends the processes of a run")?);
        Ok(group)
    }

    /// How the program has ended, if it has.
    fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.program.try_wait().context("cannot wait for a run")
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(guard) = &mut self.guard {
            drop(guard.stdin.take());
            let _ = guard.wait();
        }
        // For a program that has left its group, and one without a guard.
        let _ = self.program.kill();
        let _ = self.program.wait();
    }
}

/// Texts in the output of a failed run and the check that they reveal, most significant first.
const SIGNS: [(&str, &[&str]); 9] = [
    ("refused PTX", &["PTX cannot be loaded", "invalid PTX", "\n  | "]),
    ("race", &["data race"]),
    ("unwritten", &["of unwritten ", "finds unwritten memory", "which nothing has written"]),
    ("bounds", &["is outside of every region", "which has been freed", "valid are", "is not a multiple of"]),
    ("mbarrier", &["mbarrier at shared offset"]),
    ("bulk copy", &["bulk copy:"]),
    ("barrier", &["aligned barrier", "member mask", "may be elsewhere since", "\nbarrier"]),
    ("deadlock", &["deadlock", "livelock", "groups of lanes are alive"]),
    ("timeout", &["timed out", "has not", "did not", "waited"]),
];

/// Begins the last instructions of a warp in a report.
const TRACE: &str = "last instructions of block";

/// The check that reported the fault; `None` when none did.
fn what(code: Option<i32>, output: &str) -> Option<&'static str> {
    match code {
        Some(0) => None,
        None => Some("hang"),
        Some(code) if code < 0 => Some("crash"),
        Some(_) => {
            let sign = SIGNS.iter().find(|(_, signs)| signs.iter().any(|sign| output.contains(sign)));
            Some(sign.map_or("wrong result", |(name, _)| *name))
        }
    }
}

/// The outcome of a fault that a check has reported. `source` returns the text of a file.
fn outcome(
    fault: &Fault,
    by: &str,
    workload: String,
    output: &str,
    source: &dyn Fn(&str) -> String,
) -> FaultOutcome {
    // The last instructions are at the end of a report.
    let (said, _) = output.split_once(TRACE).unwrap_or((output, ""));
    let stacks = named_stacks(said);
    let (lines, all) = (own_lines(&stacks), own_lines(&named_stacks(output)));
    let in_kernel = output.contains(&format!("'{}'", fault.kernel));
    // Lines of `simt` are inlined everywhere. One is a kernel's own where the PTX has no other.
    let is_shared_place = is_shared(&fault.own.0);
    let near = |place: &Place, (file, line): &Place| *file == place.0 && line.abs_diff(place.1) <= NEAR;
    let names = |lines: &[Place]| {
        let places = || std::iter::once(&fault.own).chain(&fault.also).filter(|place| !is_shared(&place.0));
        lines.iter().any(|line| places().any(|place| near(place, line)))
            || (is_shared_place && in_kernel && lines.contains(&fault.own))
    };
    let is_between = || {
        // Calls tell no more than that a kernel was there in a hang, and in what was only seen.
        let stacks = match by {
            "race" => named_stacks(&without_seen(said)),
            "wrong result" => named_stacks(last_write(said)),
            _ => vec![],
        };
        let is_around = |calls: &[Place]| {
            (0..=calls.len()).any(|at| {
                let (line, others) = match at.checked_sub(1) {
                    Some(call) => (&calls[call], &[][..]),
                    None => (&fault.own, &lines[..]),
                };
                let lines = [others, &lines_led_to(&stacks, &calls[at..])].concat();
                are_around(&lines, line, source) == Some(true)
            })
        };
        !is_shared_place && fault.callers.iter().any(|calls| is_around(calls))
    };
    let nearness = if names(&lines) {
        Nearness::Line
    } else if is_between() {
        Nearness::Between
    } else if names(&all) {
        Nearness::Trace
    } else if in_kernel || (!is_shared_place && lines.iter().any(|line| line.0 == fault.own.0)) {
        Nearness::Kernel
    } else {
        Nearness::Elsewhere
    };
    let report: Vec<&str> = output.lines().filter(|line| !line.starts_with('[')).take(40).collect();
    FaultOutcome { found_by: Some(by.to_owned()), nearness, lines, workload, report: report.join("\n") }
}

/// The write of a wrong value in its report; empty without one.
fn last_write(text: &str) -> &str {
    let Some((_, behind)) = text.split_once("\n  last written by a ") else { return "" };
    // A detail is indented further than the line that it belongs to.
    let end = behind.match_indices("\n").find(|(at, _)| !behind[at + 1..].starts_with("    "));
    end.map_or(behind, |(at, _)| &behind[..at])
}

/// The text of reports of races without the synchronisation that was seen, unless a gap names its
/// line.
fn without_seen(text: &str) -> String {
    let mut gaps: Vec<Place> = Vec::new();
    let mut kept = String::new();
    let (mut is_of_gap, mut is_seen) = (false, false);
    for line in text.lines() {
        // A detail is indented further than the line that it belongs to.
        if !line.starts_with(if is_seen { "   " } else { "    " }) {
            is_of_gap = line.starts_with("  gap: ");
            is_seen = line.starts_with("  seen: ");
        }
        if is_of_gap {
            gaps.extend(own_lines(&named_stacks(line)));
        }
        let is_gap = || named_stacks(line).iter().any(|stack| gaps.contains(&stack[0]));
        if !is_seen || is_gap() {
            kept = kept + line + "\n";
        }
    }
    kept
}

/// Whether some of the lines are ahead of a line and some behind it, in its function.
fn are_around(lines: &[Place], (file, line): &Place, source: &dyn Fn(&str) -> String) -> Option<bool> {
    let function = function_around(&source(file), *line)?;
    let there = || lines.iter().filter(|at| at.0 == *file && function.contains(&at.1)).map(|at| at.1);
    Some(there().min()? < *line && there().max()? > *line)
}

/// The lines in a report that these calls led to: lines of instructions, and of calls.
fn lines_led_to(stacks: &[Vec<Place>], calls: &[Place]) -> Vec<Place> {
    let line = |stack: &Vec<Place>| {
        let at = stack.len().checked_sub(calls.len() + 1)?;
        stack.ends_with(calls).then(|| stack[at].clone())
    };
    stacks.iter().filter_map(line).collect()
}

/// The lines of the function that a line is in, from its `fn` up to the next one; `None` in front
/// of the first.
fn function_around(source: &str, line: u32) -> Option<Range<u32>> {
    let starts =
        (1..).zip(source.lines()).filter(|(_, text)| starts_function(text)).map(|(number, _)| number);
    let starts: Vec<u32> = starts.collect();
    let behind = starts.partition_point(|start| *start <= line);
    let first = *starts.get(behind.checked_sub(1)?)?;
    Some(first..starts.get(behind).copied().unwrap_or(u32::MAX))
}

/// Whether a line of Rust begins a function.
fn starts_function(text: &str) -> bool {
    let is_qualifier =
        |word: &&str| word.starts_with("pub") || ["const", "unsafe", "extern", "\"C\""].contains(word);
    text.split_whitespace().find(|word| !is_qualifier(word)) == Some("fn")
}

/// Whether a file has no kernels but what all kernels are made of: the language, packages and the
/// standard library; in this repository also the layouts. A folder `gpu` of another crate may have
/// kernels.
fn is_shared(file: &str) -> bool {
    let language = ["gpu/simt/", "gpu/src/layout/", "epoxide-simt/"];
    language.iter().any(|start| file.starts_with(start)) || coverage::is_foreign(file)
}

/// Every `<file>.rs:<line>` in a text, once, each with the calls that led there: `a.rs:1, called at
/// :2, b.rs:3`. A line of `simt` that was inlined is left out.
fn named_stacks(text: &str) -> Vec<Vec<Place>> {
    let mut found: Vec<Vec<Place>> = Vec::new();
    // The calls that led to the line before.
    let mut calls = 0..0;
    for (at, _) in text.match_indices(".rs:") {
        if calls.contains(&at) {
            continue;
        }
        let begin = text[..at].rfind(|c| !is_of_a_path(c)).map_or(0, |before| before + 1);
        let begin = (begin..=at).find(|at| text.is_char_boundary(*at)).unwrap_or(at);
        let file = &text[begin..at + 3];
        let Some((line, behind)) = number_ahead(&text[at + 4..]) else { continue };
        if file.starts_with("gpu/simt/") && text[..begin].ends_with("inlined: ") {
            continue;
        }
        let inlined = behind.strip_prefix(" (inlined: ").and_then(|rest| Some(rest.split_once(')')?.1));
        let mut stack = vec![(file.to_owned(), line)];
        if let Some(list) = inlined.unwrap_or(behind).strip_prefix(", called at ") {
            calls = text.len() - list.len()..text.len() - push_calls(&mut stack, list).len();
        }
        found.push(stack);
    }
    let mut known = HashSet::new();
    found.retain(|stack| known.insert(stack.clone()));
    found
}

/// Adds the calls at the start of a text, `:2, b.rs:3`, to the line that they led to. Returns the
/// text behind them.
fn push_calls<'a>(stack: &mut Vec<Place>, text: &'a str) -> &'a str {
    let mut text = text;
    let mut next = text;
    while let Some((path, behind)) = next.split_once(':')
        && path.chars().all(is_of_a_path)
        && let Some((line, behind)) = number_ahead(behind)
    {
        let file = if path.is_empty() { stack[stack.len() - 1].0.clone() } else { path.to_owned() };
        stack.push((file, line));
        text = behind;
        let Some(behind) = behind.strip_prefix(", ") else { break };
        next = behind;
    }
    text
}

fn is_of_a_path(c: char) -> bool {
    c.is_alphanumeric() || "/._-".contains(c)
}

/// The number that a text begins with, and the text behind it.
fn number_ahead(text: &str) -> Option<(u32, &str)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    Some((text[..digits].parse().ok()?, &text[digits..]))
}

/// The lines of instructions in a report, without the calls that led there.
fn own_lines(stacks: &[Vec<Place>]) -> Vec<Place> {
    let mut known = HashSet::new();
    stacks.iter().map(|stack| stack[0].clone()).filter(|line| known.insert(line.clone())).collect()
}

impl Nearness {
    /// Whether a report names the fault: its line, or the accesses around it.
    fn names_fault(self) -> bool {
        self <= Nearness::Between
    }

    fn name(self) -> &'static str {
        match self {
            Nearness::Line => "line",
            Nearness::Between => "between",
            Nearness::Trace => "trace",
            Nearness::Kernel => "kernel",
            Nearness::Elsewhere => "elsewhere",
        }
    }
}

impl FaultOutcome {
    /// The outcome of a fault that no check has reported.
    fn survived() -> Self {
        Self {
            found_by: None,
            nearness: Nearness::Elsewhere,
            lines: Vec::new(),
            workload: String::new(),
            report: String::new(),
        }
    }

    /// The outcome as it is kept in a file.
    pub fn to_json(&self) -> Value {
        let lines: Vec<String> = self.lines.iter().map(|(file, line)| format!("{file}:{line}")).collect();
        json!({
            "found_by": self.found_by, "nearness": self.nearness.name(), "lines": lines,
            "workload": self.workload, "report": self.report,
        })
    }

    /// The inverse of [`to_json`](Self::to_json); `None` for any other value.
    pub fn from_json(value: &Value) -> Option<Self> {
        let text = |key: &str| Some(value.get(key)?.as_str()?.to_owned());
        let all = [Nearness::Line, Nearness::Between, Nearness::Trace, Nearness::Kernel, Nearness::Elsewhere];
        let place = |text: &Value| {
            let (file, line) = text.as_str()?.rsplit_once(':')?;
            Some((file.to_owned(), line.parse().ok()?))
        };
        Some(Self {
            found_by: text("found_by"),
            nearness: all
                .into_iter()
                .find(|nearness| text("nearness").as_deref() == Some(nearness.name()))?,
            lines: value.get("lines")?.as_array()?.iter().filter_map(place).collect(),
            workload: text("workload")?,
            report: text("report")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::faults::Kind;
    use super::*;

    fn fault() -> Fault {
        Fault {
            id: "k/x/k:40".to_owned(),
            kernel: "k".to_owned(),
            kind: Kind::NextRow,
            own: ("gpu/src/kernels/k.rs".to_owned(), 40),
            callers: vec![vec![
                ("gpu/src/kernels/k.rs".to_owned(), 650),
                ("gpu/src/kernels/k.rs".to_owned(), 1010),
            ]],
            also: vec![("gpu/simt/src/memory.rs".to_owned(), 7)],
            opcode: String::new(),
            edits: Vec::new(),
            through: Vec::new(),
        }
    }

    #[test]
    fn the_output_says_what_reported_a_fault() {
        assert_eq!(what(Some(0), "data race"), None);
        assert_eq!(what(None, ""), Some("hang"));
        assert_eq!(what(Some(1), "a data race\n of lanes in a deadlock"), Some("race"));
        assert_eq!(what(Some(1), "kernel 'k': 2 groups of lanes are alive"), Some("deadlock"));
        let apart =
            epoxide_vgpu::FaultKind::ApartAtBarrier { barrier: 0, together: 1, live: 3, parted_on: 7 };
        assert_eq!(what(Some(1), &format!("rank 0: {apart}")), Some("barrier"));
        assert_eq!(what(Some(1), "row 3 differs"), Some("wrong result"));
        assert_eq!(what(Some(-1), ""), Some("crash"));
    }

    #[test]
    fn reports_are_near_by_the_kernels_own_lines() {
        let line = |number| match number {
            20 | 600 => "    pub(super) unsafe fn f() {\n",
            1000 => "fn g<const N: usize>(",
            _ => "x // fn\n",
        };
        let source: String = (1..1200).map(line).collect();
        let of = |fault: &Fault, text: &str| {
            outcome(fault, "race", String::new(), text, &|_| source.clone()).nearness
        };
        let near = |text: &str| of(&fault(), text);
        assert_eq!(near("at gpu/src/kernels/k.rs:43 (inlined: gpu/simt/src/memory.rs:90)"), Nearness::Line);
        assert_eq!(near("at gpu/src/kernels/k.rs:44"), Nearness::Kernel);
        assert_eq!(near("at gpu/src/kernels/k.rs:30, at gpu/src/kernels/k.rs:44"), Nearness::Between);
        assert_eq!(near("at gpu/src/kernels/k.rs:30, at gpu/src/kernels/j.rs:44"), Nearness::Kernel);
        let trace =
            "at gpu/src/kernels/k.rs:44\n last instructions of block [0, 0, 0]: gpu/src/kernels/k.rs:41";
        assert_eq!(near(trace), Nearness::Trace);
        assert_eq!(near("in kernel 'k', at gpu/src/kernels/other.rs:40"), Nearness::Kernel);
        assert_eq!(
            near("at gpu/src/kernels/other.rs:40 (inlined: gpu/simt/src/memory.rs:7)"),
            Nearness::Elsewhere
        );
        let far = Fault { own: ("gpu/src/kernels/k.rs".to_owned(), 658), ..fault() };
        assert_eq!(of(&far, "at gpu/src/kernels/k.rs:30, at gpu/src/kernels/k.rs:1100"), Nearness::Kernel);
        assert_eq!(of(&far, "at gpu/src/kernels/k.rs:599, at gpu/src/kernels/k.rs:990"), Nearness::Kernel);
        assert_eq!(of(&far, "at gpu/src/kernels/k.rs:601, at gpu/src/kernels/k.rs:990"), Nearness::Between);
        let unknown = outcome(
            &far,
            "race",
            String::new(),
            "at gpu/src/kernels/k.rs:601, at gpu/src/kernels/k.rs:990",
            &|_| String::new(),
        );
        assert_eq!(unknown.nearness, Nearness::Kernel, "the source is not there");
        // Around the call that led to the fault, in the same call of the function with it.
        let ahead = "at gpu/src/kernels/k.rs:620, called at :1010\n";
        let inlined = "at gpu/src/kernels/j.rs:5 (inlined: gpu/simt/src/memory.rs:9)";
        let around =
            |behind: &str| near(&format!("{ahead}{inlined}, called at gpu/src/kernels/k.rs:{behind}"));
        assert_eq!(around("700, :1010"), Nearness::Between);
        assert_eq!(around("650, :1010"), Nearness::Kernel);
        assert_eq!(around("700, gpu/src/kernels/k.rs:1011"), Nearness::Kernel);
        assert_eq!(around("40"), Nearness::Kernel, "a call is not the line of an access");
        let both = format!("{ahead}{inlined}, called at gpu/src/kernels/k.rs:700, :1010");
        let hang = outcome(&fault(), "deadlock", String::new(), &both, &|_| source.clone());
        assert_eq!(hang.nearness, Nearness::Kernel, "the calls of a hang are those of any warp");
        // A missing add, between a read of shared memory and the call that writes the wrong value.
        let wrong = |write: &str| {
            let read = "  ahead of it in the code, shared memory is read at gpu/src/kernels/k.rs:30\n";
            let origin = "  its block has read 'buf' in kernel 'k' at gpu/src/kernels/i.rs:9, called at gpu/src/kernels/k.rs:45, :650, :1010\n";
            let text = format!("x[0] = 1, expected 2\n  last written by a {write}\n{read}{origin}");
            outcome(&fault(), "wrong result", String::new(), &text, &|_| source.clone()).nearness
        };
        let writer = "weak write\n    at gpu/src/kernels/j.rs:5, called at gpu/src/kernels/k.rs:";
        assert_eq!(wrong(&format!("{writer}44, :650, :1010")), Nearness::Between);
        assert_eq!(
            wrong(&format!("{writer}44, :651, :1010")),
            Nearness::Kernel,
            "another call of the function"
        );
        assert_eq!(
            wrong("weak write\n    at gpu/src/kernels/j.rs:5"),
            Nearness::Kernel,
            "reads have other calls"
        );
        let seen = |gap: &str| {
            near(&format!(
                "{ahead}{gap}  seen: a barrier\n    {inlined}, called at gpu/src/kernels/k.rs:700, :1010\n"
            ))
        };
        assert_eq!(seen(""), Nearness::Kernel);
        assert_eq!(
            seen("  gap: a barrier is missing\n    gpu/src/kernels/j.rs:5, PTX line 7: ret;\n"),
            Nearness::Between
        );
        let place = |file: &str, line| (format!("gpu/src/kernels/{file}.rs"), line);
        let text = "at gpu/src/kernels/k.rs:4 (inlined: gpu/src/kernels/j.rs:5), called at :6, gpu/src/kernels/i.rs:7 (PTX line 8)";
        let stacks = [vec![place("k", 4), place("k", 6), place("i", 7)], vec![place("j", 5)]];
        assert_eq!(named_stacks(text), stacks);
    }

    #[test]
    fn a_fault_without_a_line_of_its_kernel_is_named_by_the_line_that_it_has() {
        let fault = Fault { own: ("gpu/simt/src/order.rs".to_owned(), 140), also: vec![], ..fault() };
        let near = |text: &str| outcome(&fault, "race", String::new(), text, &|_| String::new()).nearness;
        assert_eq!(near("kernel 'k', at gpu/simt/src/order.rs:140"), Nearness::Line);
        assert_eq!(near("kernel 'k', at gpu/simt/src/order.rs:141"), Nearness::Kernel);
        let inlined = "at gpu/src/kernels/k.rs:9 (inlined: gpu/simt/src/order.rs:140)";
        assert_eq!(near(&format!("kernel 'k', {inlined}")), Nearness::Kernel);
        assert_eq!(near("kernel 'j', at gpu/simt/src/order.rs:140"), Nearness::Elsewhere);
    }

    #[test]
    fn outcomes_are_read_back() {
        let found = outcome(&fault(), "race", "w".to_owned(), "at gpu/src/kernels/k.rs:43\n[x] y", &|_| {
            String::new()
        });
        assert_eq!(found.lines, [("gpu/src/kernels/k.rs".to_owned(), 43)]);
        assert_eq!(FaultOutcome::from_json(&found.to_json()), Some(found));
        assert_eq!(FaultOutcome::from_json(&json!({"nearness": 3})), None);
    }

    /// Runs a shell script on faulty kernels in place of the sound text `a`.
    fn of_script(directory: &Path, script: &str) -> Runner {
        workspace::write(&directory.join("sound.ptx"), "a\n").unwrap();
        let words = ["sh", "-c", script].map(str::to_owned).to_vec();
        Runner {
            what: Runs::Program(words),
            directory: directory.to_owned(),
            sources: directory.to_owned(),
            limit: Duration::from_secs(20),
            jobs: 1,
        }
    }

    #[test]
    fn a_program_runs_on_faulty_kernels_in_place_of_its_own() {
        let directory = tempfile::tempdir().unwrap();
        let faulty = "[ \"$(cat \"$EPOXIDE_VGPU_FAULTY/faulty.ptx\")\" = b ] && exit 1; \
                      [ \"$(cat \"$EPOXIDE_VGPU_FAULTY/sound.ptx\")\" = a ] || exit 2";
        let runner = of_script(directory.path(), faulty);
        let workloads = [Workload::of_line(1)];
        let of = |edits: Vec<(usize, String)>, line| {
            let fault = Fault { edits, through: vec![line], ..fault() };
            runner.fault(&fault, "a\n", &workloads, 0).unwrap().map(|outcome| outcome.found_by)
        };
        assert_eq!(of(vec![(1, "b".to_owned())], 1), Some(Some("wrong result".to_owned())));
        assert_eq!(of(vec![], 1), Some(None));
        assert_eq!(of(vec![], 2), None, "the program does not come by there");
    }

    #[test]
    fn slow_tests_are_not_taken_for_reports() {
        let text = ".version 8.4\n.target sm_90\n.address_size 64\n.entry k()\n{\nret;\n}\n";
        let module = Module::parse(text).unwrap();
        let kernel = module.kernel("k").unwrap();
        let (file, executed) = (kernel.fingerprint(), "1".repeat(kernel.instruction_count()));
        let script = format!(
            "sleep 0.5; [ -z \"${0}\" ] || printf {executed} >\"${0}/k-{file:016x}-1.2.cover\"",
            coverage::DIRECTORY_VARIABLE
        );
        let directory = tempfile::tempdir().unwrap();
        let limit = Duration::from_millis(1);
        let runner = Runner { limit, jobs: 40, ..of_script(directory.path(), &script) };
        let workloads = runner.sound(text).unwrap();
        let fault = Fault { through: vec![6], ..fault() };
        let outcome = runner.fault(&fault, text, &workloads, 0).unwrap();
        assert_eq!(outcome, Some(FaultOutcome::survived()));
    }

    #[test]
    fn a_line_counts_as_executed_where_any_seed_executes_it() {
        let text = ".version 8.4\n.target sm_90\n.address_size 64\n.entry k()\n{\nret;\n}\n";
        let module = Module::parse(text).unwrap();
        let file = module.kernel("k").unwrap().fingerprint();
        let directory = tempfile::tempdir().unwrap();
        let binary = directory.path().join("epoxide");
        let script = format!(
            "#!/bin/sh\ncase \"$*\" in *'--seed 9'*) hit=11;; *) hit=00;; esac\n\
             printf $hit >\"${0}/k-{file:016x}-$$.1.cover\"\n",
            coverage::DIRECTORY_VARIABLE
        );
        // Another process writes it. A process that a test of another thread starts while it is
        // open here would hold it open, and it could not be started.
        let write = "printf %s \"$1\" >\"$2\" && chmod +x \"$2\"";
        let status = Command::new("sh").args(["-c", write, "sh", &script]).arg(&binary).status();
        assert!(status.unwrap().success());
        let what = Runs::RoundTrips { binary, seeds: vec![4, 9], check: true };
        let runner = Runner { what, ..of_script(directory.path(), "") };
        let workloads = runner.sound(text).unwrap();
        assert!(workloads.iter().all(|workload| workload.executes(6)));
    }

    #[test]
    fn the_nearest_report_of_all_runs_counts() {
        let directory = tempfile::tempdir().unwrap();
        let count = directory.path().join("count");
        // The first run passes, the second fails without a line, the third names it.
        let script = format!(
            "echo >>{0}; case $(wc -l <{0}) in 1) exit 0;; 2) exit 1;; 3) echo gpu/src/kernels/k.rs:41; exit 1;; esac",
            count.display()
        );
        let runner = of_script(directory.path(), &script);
        let fault = Fault { through: vec![1], ..fault() };
        let nearness_of = |runs: usize| {
            let _ = std::fs::remove_file(&count);
            let workloads: Vec<_> = (0..runs).map(|_| Workload::of_line(1)).collect();
            let outcome = runner.fault(&fault, "a\n", &workloads, 0).unwrap().unwrap();
            (outcome.found_by.is_some(), outcome.nearness, workspace::read(&count).unwrap().len())
        };
        assert_eq!(nearness_of(1), (false, Nearness::Elsewhere, 1));
        assert_eq!(nearness_of(2), (true, Nearness::Elsewhere, 2));
        assert_eq!(nearness_of(5), (true, Nearness::Line, 3), "no run follows a report that names the fault");
    }

    #[test]
    fn other_crates_have_their_kernels_in_any_file() {
        let fault = Fault { own: ("src/exchange.rs".to_owned(), 54), ..fault() };
        let text = "data race\n  at src/exchange.rs:54 (inlined: epoxide-simt/src/memory.rs:9)";
        assert_eq!(outcome(&fault, "race", String::new(), text, &|_| String::new()).nearness, Nearness::Line);
        assert!(is_shared("epoxide-simt/src/memory.rs") && is_shared("gpu/src/layout/mod.rs"));
        assert!(is_shared("rust/core/src/cmp.rs") && is_shared("cargo/half-2.7.1/src/lib.rs"));
        for own in ["src/lib.rs", "gpu/src/kernels/k.rs", "gpu/src/exchange.rs", "rust/k/src/lib.rs"] {
            assert!(!is_shared(own), "{own}");
        }
    }

    #[test]
    fn a_workloads_flags_come_before_the_general_ones() {
        assert_eq!(
            without_repeats("--threads --tokens 24 --hidden 8", "--tokens 96 --random").join(" "),
            "--threads --hidden 8 --tokens 96 --random"
        );
    }

    #[test]
    fn runs_that_take_too_long_are_stopped() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let run = |script: &str, limit| {
            run_limited(Command::new("sh").args(["-c", script]), &log, Duration::from_millis(limit)).unwrap()
        };
        let quick = run("echo out; echo err >&2; exit 3", 20_000);
        assert_eq!((quick.code, quick.output.as_str()), (Some(3), "out\nerr\n"));
        assert_eq!(run("sleep 60", 50).code, None);
    }

    #[test]
    fn what_a_stopped_run_has_started_is_stopped() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        let script = "sh -c 'while sleep 0.02; do echo $((n += 1)); [ $n -lt 1000 ] || exit; done' & wait";
        let mut command = Command::new("sh");
        let ended = run_limited(command.args(["-c", script]), &log, Duration::from_millis(500)).unwrap();
        assert_eq!(ended.code, None);
        let length = || std::fs::metadata(&log).unwrap().len();
        let before = length();
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!(length(), before, "a process still writes");
    }

    #[test]
    fn only_the_beginning_of_an_output_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let log = directory.path().join("log");
        // A terabyte without blocks, more than the memory of a machine.
        let script = format!("echo out; truncate -s 1T '{}'", log.display());
        let mut command = Command::new("sh");
        let ended = run_limited(command.args(["-c", &script]), &log, Duration::from_secs(60)).unwrap();
        assert_eq!(ended.code, Some(0), "{}", ended.output.trim_matches('\0'));
        assert!(ended.output.starts_with("out\n\0") && ended.output.len() == LONGEST_OUTPUT);
    }
}
