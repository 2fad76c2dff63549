//! Runs kernels of another project against an oracle, and compares the reports of check mode with a
//! stored list. `vgpu/peers/check.sh` compiles the kernels and calls it; `vgpu/peers/README.md`
//! lists the findings.
//!
//! `cargo run --release -p epoxide-vgpu --example peers -- PROJECT LIST STEP=FILE.ptx..`
//!
//! A step is the source of a project as shipped or with repairs. Each runs with a number of seeds. A
//! step whose name ends with `-in-step` assumes that lanes in step are ordered, `ConvergedWarps`.
//! The list has the reports of each step. A step of the list that does not run is a difference.
//!
//! At the end it lists the kernels that ran without check mode and had all results of the oracle.

mod deepep;
mod deepep_ll;
mod mscclpp;
mod mscclpp_nvls;
mod nccl_allreduce;
mod nccl_ep;
mod one_sided;

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;

use epoxide_vgpu::{
    CheckConfig, Class, DeviceConfig, Fault, FaultKind, Kernel, Machine, MachineError, Module,
};

/// Runs of each step, and of a step that varies the repaired source.
const SEEDS: u64 = 24;
const SEEDS_OF_VARIANTS: u64 = 6;
/// Warp instructions without progress after which a grid hangs: a multiple of what a run needs.
const LIVELOCK_LIMIT: u64 = 1 << 22;

/// Results of a run: the name and the text of each report, or of a result that the oracle rejects.
type Found = Vec<(String, String)>;

/// Runs all enqueued work, and then the oracle, which returns the first wrong result. Reports come
/// before the oracle.
fn outcome(
    machine: &mut Machine,
    oracle: impl FnOnce() -> Result<Option<String>, MachineError>,
) -> Result<Found, MachineError> {
    let result = machine.run();
    let mut found: Found =
        machine.reports().iter().map(|report| (named(&report.fault), report.fault.to_string())).collect();
    match result {
        // It is among the reports.
        Err(MachineError::Fault(_)) => {}
        Err(error) => {
            let text = error.to_string();
            found.push((text.lines().next().unwrap_or_default().to_owned(), text));
        }
        Ok(()) if found.is_empty() => {
            found.extend(
                oracle()?.map(|wrong| (format!("wrong {}", wrong.split(':').next().unwrap_or("")), wrong)),
            );
        }
        Ok(()) => {}
    }
    Ok(found)
}

/// A text without the numbers of devices behind its labels.
fn without_devices(text: &str) -> String {
    let mut parts = text.split(" of device ");
    let first = parts.next().unwrap_or_default().to_owned();
    first + &parts.map(|part| part.trim_start_matches(|c: char| c.is_ascii_digit())).collect::<String>()
}

/// The name of a report: its kind, and the lines of the source on both sides.
fn named(fault: &Fault) -> String {
    // The host's own kernels have no source but their PTX.
    let at = |source: &Option<(String, u32)>, kernel: &str| match source {
        Some((file, line)) => format!("{}:{line}", file.rsplit('/').next().unwrap_or(file)),
        None => format!("kernel '{kernel}'"),
    };
    let here = at(&fault.at.source, &fault.kernel);
    // The schedule decides which device comes first.
    let memory = |label: &str| match without_devices(label) {
        label if label.is_empty() => "shared memory".to_owned(),
        label => label,
    };
    match &fault.kind {
        FaultKind::Race(race) => {
            // The schedule decides which of the two comes second.
            let mut ends = [
                format!("{} at {here}", race.access),
                format!("{} at {}", race.other.access, at(&race.other.at.source, &race.other.kernel)),
            ];
            ends.sort();
            format!("race on {}: {}, {}", memory(&race.label), ends[0], ends[1])
        }
        FaultKind::Unwritten { label, .. } => format!("unwritten {}: read at {here}", memory(label)),
        // The place and the number of instructions depend on the schedule.
        FaultKind::Livelock { .. } => format!("livelock in {}", fault.kernel),
        kind if kind.class() == Class::Bounds => {
            // Without addresses, which differ. So does what is nearest to an address made of garbage.
            let text = without_devices(&kind.to_string());
            let is_far = |word: &str| word.parse().is_ok_and(|bytes: u64| bytes > 1 << 30);
            let text = if text.split(' ').any(is_far) { text.split(';').next().unwrap_or("") } else { &text };
            let words = text.split(' ').map(|word| if word.starts_with("0x") { "0x.." } else { word });
            format!("{} at {here}", words.collect::<Vec<_>>().join(" "))
        }
        kind => format!("{} at {here}", kind.to_string().lines().next().unwrap_or_default()),
    }
}

/// A list: the reports of each step.
fn read_list(text: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut steps: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut step = String::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            step = name.to_owned();
            steps.entry(step.clone()).or_default();
        } else if let Some(report) = line.strip_prefix("report: ") {
            steps.entry(step.clone()).or_default().insert(report.to_owned());
        }
    }
    steps
}

/// A run of a project's kernels.
struct Case<'a> {
    module: &'a Module,
    /// The step that the module is of.
    step: &'a str,
    seed: u64,
    check: CheckConfig,
}

impl Case<'_> {
    /// A machine of `devices` for the run.
    fn machine(&self, devices: usize) -> Machine {
        let livelock_limit = Some(LIVELOCK_LIMIT);
        let config =
            DeviceConfig { schedule_seed: Some(self.seed), livelock_limit, ..DeviceConfig::default() };
        Machine::with_config(devices, config, Some(self.check))
    }

    /// The name of the one kernel whose name has all of these parts.
    fn kernel(&self, parts: &[&str]) -> Result<String, MachineError> {
        Ok(self.module.kernel_like(parts)?.name().to_owned())
    }
}

/// A project: how to run its kernels once, and the checks of a checked run.
struct Project {
    run: fn(&Case) -> Result<Found, Box<dyn Error>>,
    check: CheckConfig,
}

fn project(name: &str) -> Result<Project, String> {
    let first = CheckConfig::default();
    // More than any step has, each direction of a pair by itself.
    let all = CheckConfig { collect: 1000, ..CheckConfig::default() };
    Ok(match name {
        "one-sided" => Project { run: one_sided::run, check: first },
        "deepep" => Project { run: deepep::run, check: all },
        "deepep-ll" => Project { run: deepep_ll::run, check: all },
        "mscclpp" => Project { run: mscclpp::run, check: all },
        "mscclpp-nvls" => Project { run: mscclpp_nvls::run, check: all },
        "nccl-allreduce" => Project { run: nccl_allreduce::run, check: all },
        "nccl-ep" => Project { run: nccl_ep::run, check: all },
        other => {
            let known = "one-sided, deepep, deepep-ll, mscclpp, mscclpp-nvls, nccl-allreduce and nccl-ep";
            return Err(format!("no project '{other}': there are {known}"));
        }
    })
}

/// The outcome of a step.
struct Outcome {
    seeds: u64,
    /// Seeds with a report, or with a wrong result.
    failed: u64,
    /// Seeds with a wrong result or a stop under weak memory, and the first such seed.
    failed_weak: u64,
    first_weak: Option<String>,
    /// Each report: seeds that have it, and its text.
    found: BTreeMap<String, (u64, String)>,
}

fn run_step(project: &Project, step: &str, module: &Module) -> Result<Outcome, Box<dyn Error>> {
    let is_variant = ["without-", "with-", "repaired-"].iter().any(|start| step.starts_with(start));
    let seeds = if is_variant { SEEDS_OF_VARIANTS } else { SEEDS };
    let mut outcome = Outcome { seeds, failed: 0, failed_weak: 0, first_weak: None, found: BTreeMap::new() };
    let mut check = project.check;
    check.assume.converged_warps = step.ends_with("-in-step");
    for seed in 0..seeds {
        let case = Case { module, step, seed, check };
        let found: BTreeMap<_, _> = (project.run)(&case)?.into_iter().collect();
        outcome.failed += u64::from(!found.is_empty());
        for (report, text) in found {
            outcome.found.entry(report).or_insert((0, text)).0 += 1;
        }
        // Without check mode the results alone decide, under the weakest memory that the model has.
        let weak = CheckConfig { races: false, weak_memory: Some(seed), ..CheckConfig::default() };
        if let Some((failure, _)) = (project.run)(&Case { check: weak, ..case })?.into_iter().next() {
            outcome.failed_weak += 1;
            outcome.first_weak.get_or_insert(failure);
        }
    }
    if let (true, Some(failure)) = (outcome.found.is_empty(), &outcome.first_weak) {
        let report = format!("under weak memory alone: {failure}");
        outcome.found.insert(report, (outcome.failed_weak, String::new()));
    }
    Ok(outcome)
}

/// The kernels of one run without check mode, by their mangled names. None where a result is not the
/// oracle's. Kernels of the host side are `extern "C"`, so that no compiler mangles their names.
fn right_kernels(project: &Project, step: &str, ptx: &str) -> Result<BTreeSet<String>, Box<dyn Error>> {
    let module = Module::parse(ptx)?;
    let of_project = || module.kernels().filter(|kernel| kernel.name().starts_with("_Z"));
    of_project().for_each(|kernel| kernel.record_coverage());
    let check = CheckConfig { races: false, ..CheckConfig::default() };
    if !(project.run)(&Case { module: &module, step, seed: 0, check })?.is_empty() {
        return Ok(BTreeSet::new());
    }
    let has_run = |kernel: &Kernel| kernel.coverage().is_some_and(|executed| executed.contains(&true));
    Ok(of_project().filter(|kernel| has_run(kernel)).map(|kernel| kernel.name().to_owned()).collect())
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [name, list, steps @ ..] = arguments.as_slice() else {
        return Err("usage: peers PROJECT LIST STEP=FILE.ptx ..".into());
    };
    run_steps(&project(name)?, list, steps)
}

/// Runs the steps and prints what they report; an error where that is not what the list has.
fn run_steps(project: &Project, list: &str, steps: &[String]) -> Result<(), Box<dyn Error>> {
    let text = std::fs::read_to_string(list).map_err(|error| format!("{list}: {error}"))?;
    let expected = read_list(&text);
    let (mut differs, mut right) = (expected.is_empty(), BTreeSet::new());
    let mut left: BTreeSet<&str> = expected.keys().map(String::as_str).collect();
    for step in steps {
        let (name, path) = step.split_once('=').ok_or("a step is NAME=FILE.ptx")?;
        let ptx = std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
        let module = Module::parse(&ptx).map_err(|error| format!("{path}: {error}"))?;
        let Outcome { seeds, failed, failed_weak, first_weak, found } = run_step(project, name, &module)?;
        let first_weak = first_weak.map(|failure| format!(", {failure}")).unwrap_or_default();
        println!("[{name}] {failed} of {seeds} seeds fail; under weak memory {failed_weak}{first_weak}");
        let wanted = expected.get(name).ok_or_else(|| format!("{list} has no step '{name}'"))?;
        for (report, (runs, text)) in &found {
            let known = wanted.contains(report);
            println!("  {runs:3} x {report}{}", if known { "" } else { "   NOT IN THE LIST" });
            if !known {
                text.lines().for_each(|line| println!("        {line}"));
                differs = true;
            }
        }
        for report in wanted.iter().filter(|report| !found.contains_key(*report)) {
            println!("    - x {report}   NOT SEEN");
            differs = true;
        }
        right.extend(right_kernels(project, name, &ptx)?);
        left.remove(name);
    }
    for name in left {
        println!("[{name}] NOT RUN");
        differs = true;
    }
    println!("{} kernels with all results of the oracle, without check mode:", right.len());
    right.iter().for_each(|kernel| println!("  {kernel}"));
    if differs { Err(format!("the reports are not those of {list}").into()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_reports_have_no_numbers_of_devices() {
        for (text, name) in [
            ("buffer of device 12", "buffer"),
            ("nearest is 'input of device 1' at 0x10 (24 bytes)", "nearest is 'input' at 0x10 (24 bytes)"),
            ("", ""),
        ] {
            assert_eq!(without_devices(text), name);
        }
    }

    #[test]
    fn a_step_of_the_list_that_does_not_run_is_a_difference() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
        let project = Project { run: |_| Ok(Vec::new()), check: CheckConfig::default() };
        std::fs::write(path("kernels.ptx"), ".version 8.0\n.target sm_90\n.address_size 64\n").unwrap();
        let step = |name: &str| format!("{name}={}", path("kernels.ptx"));
        for (list, steps, agrees) in [
            ("[shipped]\n[repaired]\n", &["shipped", "repaired"][..], true),
            ("[shipped]\n[repaired]\n", &["shipped"], false),
            ("[shipped]\n", &[], false),
            ("", &[], false),
            ("[shipped]\nreport: a race\n", &["shipped"], false),
        ] {
            std::fs::write(path("list.txt"), list).unwrap();
            let steps: Vec<String> = steps.iter().map(|name| step(name)).collect();
            let ended = run_steps(&project, &path("list.txt"), &steps);
            assert_eq!(ended.is_ok(), agrees, "{list:?}, {steps:?}: {ended:?}");
        }
    }
}
