//! `cargo xtask flaky`: runs the tests many times beside busy processes, and counts which fail.
//!
//! A test that depends on the speed of the machine passes on an idle one. With more busy processes
//! than processors, each of its threads waits to be scheduled, as on a shared machine.

mod load;
mod output;

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;

use crate::mutate::run::run_limited;
use crate::repository;
use crate::workspace::{self, Workspace};
use load::Load;
pub use load::spin;
use output::{Failure, Outcome};

#[derive(Args)]
pub struct Options {
    /// How often the tests run
    #[arg(value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    runs: u32,
    /// Busy processes beside the tests; twice as many as processors is a heavy load
    #[arg(long, value_name = "LOOPS", default_value_t = 4)]
    loops: u32,
    /// Longest run, in seconds: one that takes longer is ended and has failed
    #[arg(long, value_name = "SECONDS", default_value_t = 3600)]
    limit: u64,
    /// Arguments of `cargo test --release`, as in `cargo xtask flaky 20 -- --test ep -- deadline`
    #[arg(last = true, value_name = "ARGS")]
    selection: Vec<String>,
}

/// The outcome of one run.
struct Run {
    took: Duration,
    failures: Vec<Failure>,
}

/// Builds the tests, runs them, and prints which failed how often. Exit code 1 where any failed.
pub fn run(ws: &Workspace, options: &Options) -> Result<ExitCode> {
    build(ws, options)?;
    let logs = ws.target("flaky");
    workspace::fresh_dir(&logs)?;
    let _load = Load::start(options.loops)?;
    let mut runs = Vec::new();
    for number in 1..=options.runs {
        let log = logs.join(format!("run-{number}.log"));
        let run = one_run(ws, options, &log)?;
        println!("run {number} of {}: {:.1} s, {} failed", options.runs, seconds(&run), run.failures.len());
        for failure in &run.failures {
            println!("    {failure}");
        }
        if run.failures.is_empty() {
            std::fs::remove_file(&log).with_context(|| format!("cannot remove {}", log.display()))?;
        } else {
            println!("    whole output: {}", ws.display(&log));
        }
        runs.push(run);
    }
    print!("\n{}", table(&runs));
    let all_passed = runs.iter().all(|run| run.failures.is_empty());
    Ok(if all_passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// `cargo test --release` with the arguments of the command line, and `more` in front of those that
/// are for the test programs.
fn cargo_test(ws: &Workspace, options: &Options, more: &str) -> Command {
    let (of_cargo, of_programs) = match options.selection.iter().position(|word| word == "--") {
        Some(at) => options.selection.split_at(at),
        None => (&options.selection[..], &[][..]),
    };
    let mut command = ws.cargo_in_callers_target();
    command.args(["test", "--release", more]).args(of_cargo).args(of_programs);
    command
}

/// Builds without the load: the time of the build does not matter.
fn build(ws: &Workspace, options: &Options) -> Result<()> {
    workspace::run(&mut cargo_test(ws, options, "--no-run"))
}

/// Runs the tests once; `log` receives their output.
fn one_run(ws: &Workspace, options: &Options, log: &Path) -> Result<Run> {
    let mut command = cargo_test(ws, options, "--no-fail-fast");
    command.env("CARGO_TERM_COLOR", "never");
    let limit = Duration::from_secs(options.limit);
    let start = Instant::now();
    // One file for both streams: cargo names a program on standard error, and the program's lines
    // on standard output follow.
    let ended = run_limited(&mut command, log, limit)?;
    let took = start.elapsed();
    let printed = std::fs::read(log).with_context(|| format!("cannot read {}", log.display()))?;
    let printed = String::from_utf8_lossy(&printed);
    let outcome = match ended.code {
        Some(0) => {
            repository::ensure_tests(repository::tests_in(&printed), &command)?;
            Outcome::Passed
        }
        Some(code) => Outcome::Failed(code),
        None => Outcome::Stopped(limit),
    };
    Ok(Run { took, failures: output::failures(&printed, outcome) })
}

fn seconds(run: &Run) -> f64 {
    run.took.as_secs_f64()
}

/// Each test that failed with the number of runs it failed in, the worst first, and the times.
fn table(runs: &[Run]) -> String {
    let mut counts: BTreeMap<&Failure, usize> = BTreeMap::new();
    for failure in runs.iter().flat_map(|run| &run.failures) {
        *counts.entry(failure).or_default() += 1;
    }
    let mut counts: Vec<(&Failure, usize)> = counts.into_iter().collect();
    counts.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
    let mut text = String::new();
    if !counts.is_empty() {
        let cells =
            |failure: &Failure, count: &str| [failure.test.clone(), failure.program.clone(), count.into()];
        let head = ["test", "program", "failed in"].map(str::to_owned);
        let lines =
            counts.iter().map(|(failure, count)| cells(failure, &format!("{count} of {} runs", runs.len())));
        let lines: Vec<[String; 3]> = std::iter::once(head).chain(lines).collect();
        let widths = [0, 1].map(|column| lines.iter().map(|line| line[column].len()).max().unwrap_or(0));
        for [test, program, count] in &lines {
            text += &format!("{test:<w0$}  {program:<w1$}  {count}\n", w0 = widths[0], w1 = widths[1]);
        }
    }
    let failed = runs.iter().filter(|run| !run.failures.is_empty()).count();
    let mut times: Vec<f64> = runs.iter().map(seconds).collect();
    times.sort_by(f64::total_cmp);
    let (Some(min), Some(max)) = (times.first(), times.last()) else { return text };
    let median = times[times.len() / 2];
    text += &format!("{failed} of {} runs failed; ", runs.len());
    text + &format!("a run took {min:.1} s at least, {median:.1} s in the median, {max:.1} s at most\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure(program: &str, test: &str) -> Failure {
        Failure { program: program.into(), test: test.into() }
    }

    #[test]
    fn the_table_counts_runs_and_has_the_worst_first() {
        let run = |seconds, failures: &[Failure]| Run {
            took: Duration::from_secs(seconds),
            failures: failures.to_vec(),
        };
        let (a, b) =
            (failure("ep (tests/ep/main.rs)", "a"), failure("groups (tests/groups/main.rs)", "store::b"));
        let text = table(&[run(3, &[]), run(9, &[a.clone(), b.clone()]), run(5, &[b])]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines,
            [
                "test      program                        failed in",
                "store::b  groups (tests/groups/main.rs)  2 of 3 runs",
                "a         ep (tests/ep/main.rs)          1 of 3 runs",
                "2 of 3 runs failed; a run took 3.0 s at least, 5.0 s in the median, 9.0 s at most",
            ]
        );
        let text = table(&[run(1, &[]), run(2, &[])]);
        assert!(text.starts_with("0 of 2 runs failed; "), "{text}");
    }

    #[test]
    fn arguments_of_test_programs_stay_behind_their_dashes() {
        let options = Options {
            runs: 1,
            loops: 0,
            limit: 60,
            selection: ["--test", "ep", "--", "name"].map(str::to_owned).into(),
        };
        let ws = crate::repository::find().unwrap();
        let words = |more| {
            let command = cargo_test(&ws, &options, more);
            command.get_args().map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(words("--no-run"), "test --release --no-run --test ep -- name");
        assert_eq!(words("--no-fail-fast"), "test --release --no-fail-fast --test ep -- name");
    }
}
