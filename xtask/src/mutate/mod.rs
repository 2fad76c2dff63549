//! `cargo xtask mutate`: makes single faults in the kernels' PTX, and records whether the checks
//! report them.
//!
//! [`faults`] finds the places, [`mod@run`] runs the acceptance test or a user's program on a
//! faulty kernel, this file iterates over all faults. Faults in code that no run executes cannot be
//! found and are counted separately.

mod faults;
mod harmless;
pub mod run;
mod text;

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use hmac_sha256::Hash;
use serde_json::{Value, json};

use crate::workspace::{self, Workspace};
use faults::Fault;
use run::{FaultOutcome, Nearness, Runner, Runs};
use text::Place;

#[derive(Args)]
pub struct Options {
    /// List all faults and stop
    #[arg(long)]
    list: bool,
    /// How many faults to try, of all kinds in all kernels; or `all`
    #[arg(long, value_name = "N", default_value = "100")]
    sample: Sample,
    /// Number of the sample: each has other faults of the same kinds
    #[arg(long, value_name = "N", default_value_t = 0)]
    draw: u64,
    /// Only faults whose id holds this text
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Only faults of these kernels; `*` in a name is any part of one
    #[arg(long = "kernel", value_name = "NAME", value_delimiter = ',')]
    kernels: Vec<String>,
    /// Keep outcomes in this file, a JSON object per line; those that are there already are not run
    /// again, except faults that a program's tests did not report
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Write a Markdown table of the outcomes
    #[arg(long, value_name = "FILE")]
    table: Option<PathBuf>,
    /// List the faults in instructions that no run executes
    #[arg(long, conflicts_with = "list")]
    missed: bool,
    /// The share of faults that must be reported
    #[arg(long, value_name = "SHARE", default_value_t = 0.95)]
    at_least: f64,
    /// Runs at a time
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=256))]
    jobs: u16,
    /// Longest run, in seconds; more where the sound kernels take long
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    limit: u64,
    /// Seeds of each workload
    #[arg(long, value_name = "SEED", value_delimiter = ',', default_value = "1,2")]
    seeds: Vec<u64>,
    /// Leave the race checker off: only wrong results and hangs are noticed
    #[arg(long)]
    plain: bool,
    /// The `epoxide` to run [default: built first, in release]
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
    /// The PTX to make faults in [default: the committed one]
    #[arg(long, value_name = "FILE")]
    ptx: Option<PathBuf>,
    /// A program to run on the faulty kernels in place of round trips, such as `cargo test`. It
    /// loads the text of --ptx on virtual GPUs and fails where it notices something
    #[arg(last = true, value_name = "COMMAND", conflicts_with_all = ["binary", "plain", "seeds"])]
    command: Vec<String>,
}

#[derive(Clone, Copy, Debug)]
struct Sample(usize);

impl std::str::FromStr for Sample {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "all" => Ok(Self(usize::MAX)),
            _ => match text.parse::<std::num::NonZeroUsize>() {
                Ok(number) => Ok(Self(number.get())),
                Err(_) => Err("must be a number of faults, at least 1, or `all`".to_owned()),
            },
        }
    }
}

/// A fault and what became of it; `None` where no workload executes it.
type Tried<'a> = (&'a Fault, Option<FaultOutcome>);

/// All kernels of a PTX text. Faults in those that no workload runs are counted apart.
fn names(text: &str) -> Vec<&str> {
    epoxide_gpu::simt::ptx::CutPtx::new(text).names().collect()
}

/// The folder from which a PTX text names its sources: the root of the workspace that the file is
/// in, and the repository for epoxide's own kernels.
fn sources(ws: &Workspace, text: &str, file: Option<&Path>) -> PathBuf {
    let folder = file.and_then(|file| Some(file.canonicalize().ok()?.parent()?.to_owned()));
    match folder {
        Some(folder) if !harmless::is_own(text) => {
            Workspace::around(&folder).map_or(folder, |around| around.root)
        }
        _ => ws.root.clone(),
    }
}

/// The command for kernels of another crate, where the user is in one and has not named its PTX or
/// its tests; `None` in the repository `ws`.
fn elsewhere(ws: &Workspace, folder: &Path, options: &Options) -> Option<String> {
    if options.ptx.is_some() && !options.command.is_empty() {
        return None;
    }
    let around = Workspace::around(folder).map_or_else(|_| folder.to_owned(), |around| around.root);
    let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let in_repository = match real(&around) {
        root if root == real(&ws.root) => true,
        root => !root.join("Cargo.toml").is_file() && root.starts_with(real(&ws.root)),
    };
    (!in_repository).then(|| {
        format!(
            "{} is not epoxide's repository. For kernels of your own, name their PTX and your tests: `{}`",
            around.display(),
            command_for(folder)
        )
    })
}

/// The command that makes faults in the kernels of the crate in a folder.
fn command_for(folder: &Path) -> String {
    let built = workspace::files(&folder.join("ptx"), "ptx").unwrap_or_default();
    let name = built.first().and_then(|file| file.file_name());
    let name = name.map_or_else(|| "NAME.sm_90.ptx".into(), |name| name.to_string_lossy());
    format!("\"$EPOXIDE/target/release/xtask\" mutate --sample all --ptx ptx/{name} -- cargo test")
}

/// Makes the faults.
pub fn run(ws: &Workspace, options: &Options) -> Result<()> {
    let folder = std::env::current_dir().context("the current folder")?;
    if let Some(error) = elsewhere(ws, &folder, options) {
        bail!(error);
    }
    ensure!(
        options.ptx.is_some() || options.command.is_empty(),
        "`-- {}` is to run on faulty kernels: name the PTX that it loads by --ptx, as in `{}`",
        options.command.join(" "),
        command_for(&folder)
    );
    let text = match &options.ptx {
        Some(file) => workspace::read(file).with_context(|| {
            format!("--ptx is as seen from {}; `cargo build-ptx` writes the file", folder.display())
        })?,
        None => epoxide_gpu::PTX.to_owned(),
    };
    let bodies = text::bodies(&text, &names(&text))?;
    let mut faults = faults::enumerate(&bodies);
    if let Some(only) = &options.only {
        faults.retain(|fault| fault.id.contains(only.as_str()));
    }
    retain_kernels(&mut faults, &options.kernels)?;
    if options.list {
        print!("{}", list(ws, &text, &faults));
        return Ok(());
    }
    ensure!(!faults.is_empty(), "--only {:?}: no fault has this in its id; see --list", options.only);
    ensure!(!options.seeds.is_empty(), "--seeds: at least one is needed");

    let scratch = Scratch::new(ws)?;
    let limit = Duration::from_secs(options.limit);
    let what = if options.command.is_empty() {
        Runs::RoundTrips {
            binary: options.binary.clone().map_or_else(|| build(ws), Ok)?,
            seeds: options.seeds.clone(),
            check: !options.plain,
        }
    } else {
        Runs::Program(options.command.clone())
    };
    let sources = sources(ws, &text, options.ptx.as_deref());
    let runner = Runner { what, directory: scratch.0.clone(), sources, limit, jobs: options.jobs };
    println!("running the sound kernels");
    let workloads = runner.sound(&text)?;
    let all = faults.len();
    let harmless = retain_harmful(ws, &text, &mut faults, &runner.what);
    let executed = |fault: &Fault| {
        fault.through.iter().any(|line| workloads.iter().any(|workload| workload.executes(*line)))
    };
    let (faults, missed): (Vec<_>, Vec<_>) = faults.into_iter().partition(executed);
    let silent = missed.len();
    let faults = faults::sample(faults, options.sample.0, options.draw);
    println!("{all} faults; {harmless}, no workload comes by {silent}; trying {}", faults.len());

    let version = hash(&text, &runner)?;
    let mut known = HashMap::new();
    if let Some(file) = &options.out {
        known = read_known(file, &version, &runner.what)?;
        known.retain(|id, _| faults.iter().any(|fault| fault.id == *id));
        println!("{} outcomes are from {}", known.len(), file.display());
    }
    let outcomes = try_all(&runner, &text, &faults, &workloads, known, options, &version)?;
    let results: Vec<Tried<'_>> = faults.iter().zip(outcomes).collect();
    if let Some(file) = &options.table {
        workspace::write(file, table(&results))?;
    }
    let (summary, share) = summary(&text, &results);
    print!("{summary}");
    if options.missed {
        missed.iter().for_each(|fault| print!("{}", site("never executed", &text, fault)));
    } else if silent > 0 {
        println!("{silent} faults are in instructions that no run executes; --missed lists them");
    }
    ensure!(!results.is_empty(), "nothing was tried: {harmless}, no workload comes by {silent}");
    if share < options.at_least {
        bail!(
            "{:.1} % of the faults were reported; --at-least asks for {:.1} %",
            100.0 * share,
            100.0 * options.at_least
        );
    }
    Ok(())
}

/// A folder for PTX and output of this process alone, since several may run in one repository.
/// Removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(ws: &Workspace) -> Result<Self> {
        let folder = ws.target("mutate").join(std::process::id().to_string());
        workspace::fresh_dir(&folder)?;
        Ok(Self(folder))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Keeps the faults of these kernels; all where none is named. An error is a name without a fault.
fn retain_kernels(faults: &mut Vec<Fault>, kernels: &[String]) -> Result<()> {
    let is_of = |fault: &Fault, pattern: &String| harmless::is_like(&fault.kernel, pattern);
    for pattern in kernels {
        ensure!(
            faults.iter().any(|fault| is_of(fault, pattern)),
            "--kernel {pattern:?}: no fault is in a kernel of this name; see --list"
        );
    }
    if !kernels.is_empty() {
        faults.retain(|fault| kernels.iter().any(|pattern| is_of(fault, pattern)));
    }
    Ok(())
}

/// Removes faults that change nothing; returns how many.
fn retain_harmful(ws: &Workspace, text: &str, faults: &mut Vec<Fault>, runs: &Runs) -> Harmless {
    let in_round_trips = matches!(runs, Runs::RoundTrips { .. });
    let mut counts = Harmless { always: 0, in_round_trips: 0 };
    faults.retain(|fault| {
        match harmless::reason(ws, text, fault) {
            Some(reason) if !reason.only_in_round_trips => counts.always += 1,
            Some(_) if in_round_trips => counts.in_round_trips += 1,
            _ => return true,
        }
        false
    });
    counts
}

/// How many faults change nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Harmless {
    always: usize,
    in_round_trips: usize,
}

impl std::fmt::Display for Harmless {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} are known to change nothing", self.always)?;
        match self.in_round_trips {
            0 => Ok(()),
            number => write!(f, ", {number} to change nothing in a round trip"),
        }
    }
}

/// Builds `epoxide` and returns its path.
fn build(ws: &Workspace) -> Result<PathBuf> {
    let mut command = ws.cargo();
    let target = workspace::env_path("CARGO_TARGET_DIR").unwrap_or_else(|| ws.root.join("target"));
    command.env("CARGO_TARGET_DIR", &target);
    workspace::run(command.args(["build", "--release", "--package", "epoxide-cli", "--bin", "epoxide"]))?;
    Ok(target.join("release/epoxide"))
}

/// Hash of everything that the outcomes depend on, except a program's tests. A change of it starts
/// a new file.
fn hash(text: &str, runner: &Runner) -> Result<String> {
    let mut hasher = Hash::new();
    hasher.update(text);
    runner.settings()?.iter().for_each(|setting| hasher.update(format!("\0{setting}")));
    Ok(hasher.finalize().iter().take(8).fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    }))
}

/// The outcomes in a file that are not run again; none where there is no file. A program's tests
/// may have changed since to report a fault that survived them.
fn read_known(file: &Path, version: &str, runs: &Runs) -> Result<HashMap<String, FaultOutcome>> {
    if !file.exists() {
        return Ok(HashMap::new());
    }
    let mut known = known_in(&workspace::read(file)?, version);
    if matches!(runs, Runs::Program(_)) {
        known.retain(|_, outcome| outcome.found_by.is_some());
    }
    Ok(known)
}

/// The outcomes in a text, by the faults' ids. Lines about other PTX are left out, and so is a line
/// that was cut short.
fn known_in(text: &str, version: &str) -> HashMap<String, FaultOutcome> {
    let objects = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let known = objects.filter(|object| object["version"] == version).filter_map(|object| {
        Some((object.get("id")?.as_str()?.to_owned(), FaultOutcome::from_json(object.get("outcome")?)?))
    });
    known.collect()
}

fn try_all(
    runner: &Runner,
    text: &str,
    faults: &[Fault],
    workloads: &[run::Workload],
    known: HashMap<String, FaultOutcome>,
    options: &Options,
    version: &str,
) -> Result<Vec<Option<FaultOutcome>>> {
    let file = match &options.out {
        None => None,
        Some(path) => {
            let writing = || format!("cannot write {}", path.display());
            let mut file =
                std::fs::OpenOptions::new().create(true).append(true).open(path).with_context(writing)?;
            // A run that was stopped may have left part of a line.
            if std::fs::read(path).is_ok_and(|bytes| bytes.last().is_some_and(|byte| *byte != b'\n')) {
                file.write_all(b"\n").with_context(writing)?;
            }
            Some(Mutex::new(file))
        }
    };
    let next = AtomicUsize::new(0);
    let failed = AtomicBool::new(false);
    let outcomes: Mutex<Vec<Option<FaultOutcome>>> =
        Mutex::new(faults.iter().map(|fault| known.get(&fault.id).cloned()).collect());
    let worker = |number: usize| -> Result<()> {
        // The others stop where a worker has failed: its error shows once all have ended.
        while !failed.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(fault) = faults.get(index) else { break };
            if known.contains_key(&fault.id) {
                continue;
            }
            let outcome = runner.fault(fault, text, workloads, number)?;
            let Some(outcome) = outcome else { continue };
            println!("{:>4}/{} {}: {}", index + 1, faults.len(), fault.id, shown(&outcome));
            if let Some(file) = &file {
                let object = json!({ "version": version, "id": fault.id, "outcome": outcome.to_json() });
                // A single write, so that only the last line of a stopped run can be incomplete.
                locked(file)
                    .write_all(format!("{object}\n").as_bytes())
                    .context("cannot write to the file of --out")?;
            }
            locked(&outcomes)[index] = Some(outcome);
        }
        Ok(())
    };
    let worker = |number| worker(number).inspect_err(|_| failed.store(true, Ordering::Relaxed));
    std::thread::scope(|scope| {
        let worker = &worker;
        let workers: Vec<_> =
            (0..usize::from(options.jobs)).map(|number| scope.spawn(move || worker(number))).collect();
        workers.into_iter().try_for_each(|handle| match handle.join() {
            Ok(result) => result,
            Err(_) => bail!("a worker has panicked"),
        })
    })?;
    Ok(outcomes.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner))
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn shown(outcome: &FaultOutcome) -> String {
    match (&outcome.found_by, outcome.nearness) {
        (None, _) => "SURVIVED".to_owned(),
        (Some(by), Nearness::Line) => format!("{by}, at its line"),
        (Some(by), Nearness::Between) => format!("{by}, between two lines around it"),
        (Some(by), Nearness::Trace) => format!("{by}, its line in the trace"),
        (Some(by), Nearness::Kernel) => format!("{by}, in its kernel"),
        (Some(by), Nearness::Elsewhere) => by.clone(),
    }
}

fn list(ws: &Workspace, ptx: &str, faults: &[Fault]) -> String {
    let mut text = String::new();
    let mut kinds: BTreeMap<_, BTreeMap<&str, usize>> = BTreeMap::new();
    for fault in faults {
        let lines: Vec<String> = fault.edits.iter().map(|(line, _)| line.to_string()).collect();
        let harmless = harmless::reason(ws, ptx, fault).map_or_else(String::new, |reason| {
            let only = if reason.only_in_round_trips { " IN ROUND TRIPS" } else { "" };
            format!("  HARMLESS{only}: {}", reason.why)
        });
        let _ = writeln!(
            text,
            "{:<58} {}:{}  {}  PTX {}{harmless}",
            fault.id,
            fault.own.0,
            fault.own.1,
            fault.description(),
            lines.join(",")
        );
        *kinds.entry(fault.kind).or_default().entry(&fault.kernel).or_default() += 1;
    }
    for (kind, kernels) in &kinds {
        let each: Vec<String> = kernels.iter().map(|(kernel, count)| format!("{kernel} {count}")).collect();
        let _ = writeln!(text, "{:>4} {kind}: {}", kernels.values().sum::<usize>(), each.join(", "));
    }
    let _ = writeln!(text, "{:>4} faults", faults.len());
    text
}

fn table(results: &[Tried<'_>]) -> String {
    let mut text = "| fault | kernel | line | found by what |\n|---|---|---|---|\n".to_owned();
    for (fault, outcome) in results {
        let file = fault.own.0.rsplit('/').next().unwrap_or("");
        let found = outcome.as_ref().map_or_else(|| "not run".to_owned(), shown);
        let _ = writeln!(
            text,
            "| {} | {} | {file}:{} | {found} |",
            fault.description(),
            fault.kernel,
            fault.own.1
        );
    }
    text
}

/// A fault in full, for the author of a test that finds it: the kernel, its Rust line, and each
/// changed line of the PTX before and after.
fn site(state: &str, ptx: &str, fault: &Fault) -> String {
    let place = |(file, line): &Place| format!("{file}:{line}");
    let also: Vec<String> = fault.also.iter().map(place).collect();
    let also = if also.is_empty() { String::new() } else { format!(" (and {})", also.join(", ")) };
    let mut text = format!(
        "{state}: {}\n  kernel {}, {}{also}: {}\n",
        fault.id,
        fault.kernel,
        place(&fault.own),
        fault.description()
    );
    for (number, new) in &fault.edits {
        let old = ptx.lines().nth(number.wrapping_sub(1)).unwrap_or_default();
        let words = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
        let new = if new.is_empty() { "removed".to_owned() } else { words(new) };
        let _ = writeln!(text, "  PTX {number}: {}\n    changed to: {new}", words(old));
    }
    text
}

/// The counts, and the share that was reported; 0 where nothing was tried.
fn summary(ptx: &str, results: &[Tried<'_>]) -> (String, f64) {
    let outcomes: Vec<&FaultOutcome> = results.iter().filter_map(|(_, outcome)| outcome.as_ref()).collect();
    let reported = outcomes.iter().filter(|outcome| outcome.found_by.is_some()).count();
    let near = |nearness| {
        outcomes.iter().filter(|outcome| outcome.found_by.is_some() && outcome.nearness == nearness).count()
    };
    let mut by: BTreeMap<&str, usize> = BTreeMap::new();
    for outcome in &outcomes {
        *by.entry(outcome.found_by.as_deref().unwrap_or("survived")).or_default() += 1;
    }
    let all = outcomes.len();
    let mut text = format!(
        "{reported} of {all} faults reported: {} at their line, {} between two lines around it, {} with it in the trace, {} in \
         their kernel\n",
        near(Nearness::Line),
        near(Nearness::Between),
        near(Nearness::Trace),
        near(Nearness::Kernel)
    );
    for (what, count) in by {
        let _ = writeln!(text, "{count:>5} {what}");
    }
    for (fault, outcome) in results {
        if outcome.as_ref().is_some_and(|outcome| outcome.found_by.is_none()) {
            text += &site("survived", ptx, fault);
        }
    }
    (text, reported as f64 / all.max(1) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_kernels_have_faults_of_every_kind() {
        let faults = faults::enumerate(&text::bodies(epoxide_gpu::PTX, &names(epoxide_gpu::PTX)).unwrap());
        let ids: std::collections::HashSet<&str> = faults.iter().map(|fault| fault.id.as_str()).collect();
        assert_eq!(ids.len(), faults.len(), "ids are unique");
        let kinds: std::collections::HashSet<_> = faults.iter().map(|fault| fault.kind).collect();
        // All but the fence for mbarrier inits, which no kernel needs.
        assert_eq!(kinds.len(), 22, "{kinds:?}");
        let mut without = names(epoxide_gpu::PTX);
        without.retain(|kernel| faults.iter().all(|fault| fault.kernel != *kernel));
        let of_the_example =
            ["moe_gemm_weights", "moe_swiglu", "moe_swiglu_backward", "moe_topk", "moe_topk_backward"];
        let others = ["first_tokens", "low_latency_gather_columns"];
        assert_eq!(without, [&others, &of_the_example[..]].concat(), "kernels that order nothing");
        assert!(faults::sample(faults, 100, 0).len() == 100);
    }

    #[test]
    fn reasons_of_round_trips_do_not_hold_in_other_programs() {
        let ws = crate::repository::find().unwrap();
        let all = faults::enumerate(&text::bodies(epoxide_gpu::PTX, &["notify"]).unwrap());
        let left = |runs| {
            let mut faults = all.clone();
            (retain_harmful(&ws, epoxide_gpu::PTX, &mut faults, &runs), faults)
        };
        let trips = Runs::RoundTrips { binary: PathBuf::new(), seeds: vec![1], check: true };
        let (in_trips, harmful) = left(trips);
        assert!(in_trips.always > 0 && in_trips.in_round_trips > 0, "{in_trips:?}");
        assert_eq!(harmful.len(), all.len() - in_trips.always - in_trips.in_round_trips);
        let (in_program, tried) = left(Runs::Program(vec!["cargo".to_owned()]));
        assert_eq!(in_program, Harmless { in_round_trips: 0, ..in_trips });
        assert_eq!(tried.len(), all.len() - in_trips.always);
        // A load of the abort word.
        let abort = |faults: &[Fault]| {
            faults.iter().any(|fault| {
                fault.kind == faults::Kind::DeviceToBlock && fault.opcode == "ld.relaxed.gpu.global.b32"
            })
        };
        assert!(abort(&tried) && !abort(&harmful));
    }

    #[test]
    fn kernels_are_chosen_by_name_and_by_pattern() {
        let all = faults::enumerate(&text::bodies(epoxide_gpu::PTX, &names(epoxide_gpu::PTX)).unwrap());
        let kernels_of = |patterns: &[&str]| {
            let mut faults = all.clone();
            let patterns: Vec<_> = patterns.iter().map(|&pattern| pattern.to_owned()).collect();
            retain_kernels(&mut faults, &patterns).map(|()| {
                let kernels: std::collections::BTreeSet<_> =
                    faults.into_iter().map(|fault| fault.kernel).collect();
                kernels.into_iter().collect::<Vec<_>>().join(" ")
            })
        };
        assert_eq!(kernels_of(&["notify", "dispatch"]).unwrap(), "dispatch notify");
        assert_eq!(kernels_of(&["*_notify"]).unwrap(), "internode_notify");
        assert_eq!(kernels_of(&[]).unwrap(), kernels_of(&["*"]).unwrap());
        let error = kernels_of(&["notify", "notifies"]).unwrap_err().to_string();
        assert!(error.contains("--kernel \"notifies\""), "{error}");
    }

    #[test]
    fn every_faulty_text_is_valid_ptx() {
        // All faults of a kind at once, because parsing takes most of the time.
        let faults = faults::enumerate(&text::bodies(epoxide_gpu::PTX, &names(epoxide_gpu::PTX)).unwrap());
        let mut kinds: BTreeMap<_, BTreeMap<usize, String>> = BTreeMap::new();
        for fault in &faults {
            kinds.entry(fault.kind).or_default().extend(fault.edits.iter().cloned());
        }
        for (kind, edits) in epoxide_testing::tier::sample(kinds) {
            let edits: Vec<_> = edits.into_iter().collect();
            let faulty = text::with_lines(epoxide_gpu::PTX, &edits);
            epoxide_vgpu::Module::parse(&faulty).unwrap_or_else(|error| panic!("{kind}: {error}"));
        }
    }

    #[test]
    fn malformed_ptx_does_not_panic() {
        // The names of the source files follow the last kernel.
        let (_, files) = epoxide_gpu::PTX.rsplit_once("\n}\n").unwrap();
        let kernels = epoxide_testing::fuzz::sample_kernels(epoxide_gpu::PTX, 12_000);
        let samples: Vec<_> =
            kernels.into_iter().map(|kernel| [kernel, files.as_bytes().to_vec()].concat()).collect();
        let of = |text: &str| text::bodies(text, &names(text)).map(|bodies| faults::enumerate(&bodies));
        assert!(samples.iter().any(|sample| !of(std::str::from_utf8(sample).unwrap()).unwrap().is_empty()));
        epoxide_testing::fuzz::run("ptx faults", 500, &samples, |bytes| {
            let text = String::from_utf8_lossy(bytes);
            let Ok(faults) = of(&text) else { return };
            for fault in faults::sample(faults, 3, 0) {
                assert!(!text::with_lines(&text, &fault.edits).is_empty());
            }
        });
    }

    #[test]
    fn outcomes_that_nobody_would_keep() {
        let outcome = FaultOutcome {
            found_by: Some("race".to_owned()),
            nearness: Nearness::Between,
            lines: vec![("gpu/src/lib.rs".to_owned(), 7)],
            workload: "w".to_owned(),
            report: "r".to_owned(),
        };
        let line = |id: &str| json!({ "version": "v", "id": id, "outcome": outcome.to_json() }).to_string();
        let samples = [line("a"), format!("{}\n{}\n{{\"version\": \"v\"", line("a"), line("b"))];
        epoxide_testing::fuzz::run("outcomes", 5_000, &samples.map(String::into_bytes), |bytes| {
            let text = String::from_utf8_lossy(bytes);
            assert!(known_in(&text, "v").len() <= text.lines().count());
        });
    }

    #[test]
    fn outcomes_on_other_ptx_are_not_taken_over() {
        let outcome = FaultOutcome {
            found_by: Some("race".to_owned()),
            nearness: Nearness::Line,
            lines: vec![],
            workload: "w".to_owned(),
            report: "r".to_owned(),
        };
        let survived = FaultOutcome { found_by: None, ..outcome.clone() };
        let object = |version: &str, id: &str, outcome: &FaultOutcome| json!({ "version": version, "id": id, "outcome": outcome.to_json() });
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("out");
        let trips = Runs::RoundTrips { binary: PathBuf::new(), seeds: vec![1], check: true };
        assert!(read_known(&file, "v", &trips).unwrap().is_empty());
        let lines = [object("v", "a", &outcome), object("other", "b", &outcome), object("v", "c", &survived)];
        let lines = lines.map(|line| line.to_string()).join("\n");
        std::fs::write(&file, format!("{lines}\n{{\"version\": \"v\", \"id\": \"cut")).unwrap();
        let [a, c] = [("a".to_owned(), outcome), ("c".to_owned(), survived)];
        assert_eq!(read_known(&file, "v", &trips).unwrap(), HashMap::from([a.clone(), c]));
        let program = Runs::Program(vec!["cargo".to_owned()]);
        assert_eq!(read_known(&file, "v", &program).unwrap(), HashMap::from([a]), "tests may be new");
    }

    fn parse(words: &[&str]) -> Options {
        <Options as clap::Args>::augment_args(clap::Command::new("mutate"))
            .try_get_matches_from([&["mutate"], words].concat())
            .map(|matches| <Options as clap::FromArgMatches>::from_arg_matches(&matches).unwrap())
            .unwrap()
    }

    #[test]
    fn outcomes_of_other_runs_are_not_taken_over() {
        let runner = |seconds, what| Runner {
            what,
            directory: PathBuf::new(),
            sources: PathBuf::new(),
            limit: Duration::from_secs(seconds),
            jobs: 1,
        };
        let directory = tempfile::tempdir().unwrap();
        let binary = |bytes: &str| {
            let file = directory.path().join(bytes);
            workspace::write(&file, bytes).unwrap();
            file
        };
        let trips_of = |bytes, seeds: &[u64], check| Runs::RoundTrips {
            binary: binary(bytes),
            seeds: seeds.to_vec(),
            check,
        };
        let trips = |seeds: &[u64], check| trips_of("epoxide", seeds, check);
        let program = |words: &[&str]| Runs::Program(words.iter().map(|&word| word.to_owned()).collect());
        let runners = [
            runner(60, trips(&[1, 2], true)),
            runner(30, trips(&[1, 2], true)),
            runner(60, trips(&[1, 3], true)),
            runner(60, trips(&[12], true)),
            runner(60, trips(&[1, 2], false)),
            runner(60, trips_of("another checker", &[1, 2], true)),
            runner(60, program(&["cargo", "test"])),
            runner(60, program(&["cargo test"])),
            runner(30, program(&["cargo", "test"])),
        ];
        let hash = |text: &str, runner: &Runner| hash(text, runner).unwrap();
        let all: std::collections::HashSet<_> = runners.iter().map(|runner| hash("text", runner)).collect();
        assert_eq!(all.len(), runners.len(), "each has a hash of its own");
        assert_eq!(hash("text", &runners[0]), hash("text", &runner(60, trips(&[1, 2], true))));
        assert_ne!(hash("text", &runners[0]), hash("texts", &runners[0]));
        // The workloads of this version are part of it.
        let settings = runners[0].settings().unwrap();
        assert!(settings.iter().any(|setting| setting.contains("--mode low-latency")), "{settings:?}");
    }

    #[test]
    fn runs_side_by_side_have_a_folder_each() {
        let root = tempfile::tempdir().unwrap();
        let ws = Workspace::at(root.path());
        let of_another = ws.target("mutate").join("another");
        workspace::write(&of_another.join("faulty-0.ptx"), "b").unwrap();
        let scratch = Scratch::new(&ws).unwrap();
        let folder = scratch.0.clone();
        workspace::write(&folder.join("faulty-0.ptx"), "a").unwrap();
        drop(scratch);
        assert!(!folder.exists());
        assert_eq!(workspace::read(&of_another.join("faulty-0.ptx")).unwrap(), "b");
    }

    #[test]
    fn a_workers_error_stops_the_others() {
        // The second worker would be busy with them for tens of seconds.
        const FAULTS: usize = 2_000;
        let faults = faults::enumerate(&text::bodies(epoxide_gpu::PTX, &["notify"]).unwrap());
        let fault = Fault { edits: Vec::new(), through: vec![1], ..faults[0].clone() };
        let directory = tempfile::tempdir().unwrap();
        let folder = directory.path();
        let tried = folder.join("tried");
        workspace::write(&folder.join("sound.ptx"), "a\n").unwrap();
        let script = format!("echo >> '{}'", tried.display());
        let what = Runs::Program(["sh", "-c", &script].map(str::to_owned).to_vec());
        let runner = Runner {
            what,
            directory: folder.to_owned(),
            sources: folder.to_owned(),
            limit: Duration::from_secs(60),
            jobs: 2,
        };
        let workloads = [run::Workload::of_line(1)];
        // The first worker cannot write its file.
        std::fs::create_dir(folder.join("faulty-0.ptx")).unwrap();
        let error = try_all(
            &runner,
            "a\n",
            &vec![fault; FAULTS],
            &workloads,
            HashMap::new(),
            &parse(&["--jobs", "2"]),
            "v",
        )
        .unwrap_err();
        assert!(format!("{error:#}").contains("faulty-0.ptx"), "{error:#}");
        let tried = std::fs::read(tried).map_or(0, |lines| lines.len());
        assert!(tried < FAULTS - 1, "{tried} faults were tried");
    }

    #[test]
    fn in_another_crate_the_error_names_the_command_for_it() {
        let ws = crate::repository::find().unwrap();
        let other = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| workspace::write(&other.path().join(name), text).unwrap();
        write("Cargo.toml", "[package]\nname = \"scale\"\n[workspace]\n");
        write("src/lib.rs", "");
        let error = elsewhere(&ws, other.path(), &parse(&[])).unwrap();
        assert!(error.contains("mutate --sample all --ptx ptx/NAME.sm_90.ptx -- cargo test"), "{error}");
        write("ptx/scale.sm_80.ptx", "");
        let error = elsewhere(&ws, &other.path().join("src"), &parse(&["--list"])).unwrap();
        assert!(error.contains("is not epoxide's repository"), "{error}");
        let error = elsewhere(&ws, other.path(), &parse(&["--", "cargo", "test"])).unwrap();
        assert!(error.contains("--ptx ptx/scale.sm_80.ptx"), "{error}");
        // The template is a workspace of its own inside of the repository.
        assert!(elsewhere(&ws, &ws.root.join("examples/own-kernels"), &parse(&[])).is_some());

        let whole = parse(&["--ptx", "ptx/scale.sm_80.ptx", "--", "cargo", "test"]);
        assert_eq!(elsewhere(&ws, other.path(), &whole), None);
        assert_eq!(elsewhere(&ws, &ws.root.join("docs"), &parse(&[])), None);
    }

    #[test]
    fn a_site_names_kernel_line_instruction_and_change() {
        let ptx = ".version 8.4\n.target sm_90\n.address_size 64\n.entry k()\n{\n.reg .b64 %rd<2>;\n.loc 1 7 0\n\
                   st.release.sys.global.u32 \t[%rd1], 1;\nbarrier.sync \t0;\nret;\n}\n.file 1 \"src/k.rs\"\n";
        let faults = faults::enumerate(&text::bodies(ptx, &["k"]).unwrap());
        let of = |kind| faults.iter().find(|fault| fault.kind == kind).unwrap();
        assert_eq!(
            site("survived", ptx, of(faults::Kind::ReleaseToRelaxed)),
            "survived: k/release-to-relaxed/k:7\n  kernel k, src/k.rs:7: a release is relaxed \
             (`st.release.sys.global.u32`)\n  PTX 8: st.release.sys.global.u32 [%rd1], 1;\n    \
             changed to: st.relaxed.sys.global.u32 [%rd1], 1;\n"
        );
        let dropped = site("never executed", ptx, of(faults::Kind::BlockBarrierDropped));
        assert!(dropped.ends_with("  PTX 9: barrier.sync 0;\n    changed to: removed\n"), "{dropped}");
    }

    #[test]
    fn a_run_that_tries_nothing_fails() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("k.ptx");
        let ptx = ".version 8.4\n.target sm_90\n.address_size 64\n.visible .entry k()\n{\n.loc 1 7 0\nbarrier.sync \t0;\nret;\n}\n\
                   .file 1 \"src/k.rs\"\n";
        workspace::write(&file, ptx).unwrap();
        let module = epoxide_vgpu::Module::parse(ptx).unwrap();
        let kernel = module.kernel("k").unwrap();
        // The program loads the kernel and launches none.
        let script = format!(
            "printf {} >\"${}/k-{:016x}-1.2.cover\"",
            "0".repeat(kernel.instruction_count()),
            epoxide_build_ptx::coverage::DIRECTORY_VARIABLE,
            kernel.fingerprint()
        );
        let words = ["--at-least", "0", "--ptx", file.to_str().unwrap(), "--", "sh", "-c", &script];
        let error = run(&Workspace::at(folder.path()), &parse(&words)).unwrap_err().to_string();
        assert_eq!(error, "nothing was tried: 0 are known to change nothing, no workload comes by 1");
        assert!("0".parse::<Sample>().is_err() && "1".parse::<Sample>().is_ok());
    }

    #[test]
    fn survivors_are_counted_and_named() {
        let faults = faults::enumerate(&text::bodies(epoxide_gpu::PTX, &["notify"]).unwrap());
        let outcome = |by: Option<&str>, nearness| {
            let found_by = by.map(str::to_owned);
            Some(FaultOutcome {
                found_by,
                nearness,
                lines: vec![],
                workload: String::new(),
                report: String::new(),
            })
        };
        let results = [
            (&faults[0], outcome(Some("race"), Nearness::Line)),
            (&faults[1], outcome(None, Nearness::Elsewhere)),
            (&faults[2], None),
        ];
        let (text, share) = summary(epoxide_gpu::PTX, &results);
        assert!(text.starts_with("1 of 2 faults reported: 1 at their line, 0 between"), "{text}");
        assert!(text.contains(&format!("survived: {}", faults[1].id)) && share == 0.5, "{text}");
        let (number, _) = &faults[1].edits[0];
        let line = epoxide_gpu::PTX.lines().nth(number - 1).unwrap();
        let line = line.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(text.contains(&format!("\n  PTX {number}: {line}\n    changed to: ")), "{text}");
        let table = table(&results);
        assert!(
            table.contains("| race, at its line |")
                && table.contains("| SURVIVED |")
                && table.contains("not run")
        );
    }
}
