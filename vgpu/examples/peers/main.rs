//! Runs kernels of another project against an oracle, and compares the reports of check mode with a
//! stored list. `vgpu/peers/check.sh` compiles the kernels and calls it; `vgpu/peers/README.md`
//! tells what was found.
//!
//! `cargo run --release -p epoxide-vgpu --example peers -- PROJECT LIST STEP=FILE.ptx..`
//!
//! A step is the project's source as it is, or with the repairs of all steps before it. Each runs
//! with a number of seeds; a run ends at its first report. The list has the reports of each step.

mod deepep;
mod one_sided;

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;

use epoxide_vgpu::{CheckConfig, FaultKind, MachineError, Module};

/// Runs of each step.
const SEEDS: u64 = 24;

/// The outcome of a run: the name of its report, and its text; none if the oracle agreed.
type Outcome = Option<(String, String)>;

/// The name of a report: its kind, and the lines of the source on both sides.
fn named(error: &MachineError) -> String {
    let MachineError::Fault(fault) = error else {
        return error.to_string().lines().next().unwrap_or_default().to_owned();
    };
    // The host's own kernels have no source but their PTX.
    let at = |source: &Option<(String, u32)>, kernel: &str| match source {
        Some((file, line)) => format!("{}:{line}", file.rsplit('/').next().unwrap_or(file)),
        None => format!("kernel '{kernel}'"),
    };
    let here = at(&fault.source, &fault.kernel);
    match &fault.kind {
        FaultKind::Race(race) => {
            // Which of the two comes second depends on the schedule.
            let mut ends = [
                format!("{} at {here}", race.access),
                format!("{} at {}", race.other.access, at(&race.other.source, &race.other.kernel)),
            ];
            ends.sort();
            format!("race on {}: {}, {}", race.label, ends[0], ends[1])
        }
        FaultKind::Unwritten { label, .. } => format!("unwritten {label}: read at {here}"),
        kind => format!("{} at {here}", kind.to_string().lines().next().unwrap_or_default()),
    }
}

/// The name of the one kernel whose mangled name has all of these parts.
fn kernel(module: &Module, parts: &[&str]) -> Result<String, Box<dyn Error>> {
    let names: Vec<_> = module
        .kernels()
        .map(|kernel| kernel.name())
        .filter(|name| parts.iter().all(|part| name.contains(part)))
        .collect();
    match names.as_slice() {
        [name] => Ok((*name).to_owned()),
        names => Err(format!("{} kernels with {parts:?} in their name", names.len()).into()),
    }
}

/// A list: steps in order, with the reports of each.
fn read_list(text: &str) -> BTreeMap<String, BTreeSet<String>> {
    let mut steps = BTreeMap::new();
    let mut step = String::new();
    for line in text.lines() {
        if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            step = name.to_owned();
            steps.entry(step.clone()).or_insert_with(BTreeSet::new);
        } else if let Some(report) = line.strip_prefix("report: ") {
            steps.entry(step.clone()).or_insert_with(BTreeSet::new).insert(report.to_owned());
        }
    }
    steps
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [project, list, steps @ ..] = arguments.as_slice() else {
        return Err("usage: peers PROJECT LIST STEP=FILE.ptx ..".into());
    };
    let run = match project.as_str() {
        "one-sided" => one_sided::run,
        "deepep" => deepep::run,
        other => return Err(format!("no project '{other}': there are one-sided and deepep").into()),
    };
    let text = std::fs::read_to_string(list).map_err(|error| format!("{list}: {error}"))?;
    let expected = read_list(&text);
    let mut differs = false;
    for step in steps {
        let (name, path) = step.split_once('=').ok_or("a step is NAME=FILE.ptx")?;
        let ptx = std::fs::read_to_string(path).map_err(|error| format!("{path}: {error}"))?;
        let module = Module::parse(&ptx).map_err(|error| format!("{path}: {error}"))?;
        let mut found: BTreeMap<String, (u64, String)> = BTreeMap::new();
        for seed in 0..SEEDS {
            if let Some((report, text)) = run(&module, seed, Some(CheckConfig::default()))? {
                found.entry(report).or_insert((0, text)).0 += 1;
            }
        }
        // Without check mode the results alone decide, under the weakest memory that the model has.
        let weak = |seed| CheckConfig {
            races: false,
            weak_memory: Some(seed),
            strict_exits: false,
            ..CheckConfig::default()
        };
        let mut wrong = 0;
        for seed in 0..SEEDS {
            wrong += u64::from(run(&module, seed, Some(weak(seed)))?.is_some());
        }
        let right = SEEDS - found.values().map(|(runs, _)| runs).sum::<u64>();
        println!("[{name}] {SEEDS} seeds: {right} without a report; weak memory: {wrong} of {SEEDS} fail");
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
    }
    if differs { Err(format!("the reports are not those of {list}").into()) } else { Ok(()) }
}
