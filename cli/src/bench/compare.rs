//! `epoxide bench compare A.json B.json`.

use std::path::PathBuf;

use epoxide_bench::compare::{Comparison, compare};
use epoxide_bench::results::{Point, Results};

use crate::error::{CommandError, Result};
use crate::output;

/// Flags of `epoxide bench compare`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The results to compare with.
    #[arg(value_name = "A.json")]
    a: PathBuf,
    /// The results that are compared: a ratio above 1 is slower than A.
    #[arg(value_name = "B.json")]
    b: PathBuf,
    #[command(flatten)]
    verdict: VerdictFlags,
}

/// Limits of a comparison, and its effect on the exit code.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct VerdictFlags {
    /// Percent of difference that counts as noise, whatever the test's result.
    #[arg(long, value_name = "PERCENT", default_value = "1", value_parser = parse_percent)]
    tolerance: f64,
    /// Exit with 1 if anything of B is slower by so many percent or more, else with 2 if that
    /// cannot be decided.
    #[arg(long, value_name = "PERCENT", value_parser = parse_percent)]
    fail_if_slower: Option<f64>,
}

/// Compares and prints.
pub fn run(args: &Args) -> Result<()> {
    let [a, b] = [&args.a, &args.b].map(|path| Results::read(path));
    let comparison = args.verdict.compare(&a?.points, &b?.points)?;
    args.verdict.print(&comparison)
}

impl VerdictFlags {
    /// Compares.
    pub fn compare(&self, a: &[Point], b: &[Point]) -> Result<Comparison> {
        // A difference that fails the command is no noise.
        let tolerance = self.fail_if_slower.map_or(self.tolerance, |percent| percent.min(self.tolerance));
        Ok(compare(a, b, tolerance / 100.0)?)
    }

    /// Prints the comparison, and fails if it is too slow for `--fail-if-slower`.
    pub fn print(&self, comparison: &Comparison) -> Result<()> {
        output::text_line(&comparison.text())?;
        let Some(percent) = self.fail_if_slower else { return Ok(()) };
        let slower = comparison.slower_by(percent / 100.0)?;
        if slower.is_empty() {
            return Ok(());
        }
        let what = |line: &&epoxide_bench::compare::Line| {
            let key = &line.key;
            let sizes = format!("{} ranks, {} tokens, {} SMs", key.num_ranks, key.tokens, key.num_sms);
            format!("{} ({sizes}) by {:.1} %", line.what, (line.ratio - 1.0) * 100.0)
        };
        let what: Vec<String> = slower.iter().map(what).collect();
        Err(CommandError::failed(format!("compare: B is slower by {percent} % or more: {}", what.join("; "))))
    }
}

/// A number of percent, with or without the sign.
fn parse_percent(text: &str) -> std::result::Result<f64, String> {
    match text.trim().trim_end_matches('%').trim_end().parse::<f64>() {
        Ok(percent) if percent.is_finite() && percent >= 0.0 => Ok(percent),
        _ => Err("give a number of percent, such as 1 or 2.5%".into()),
    }
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::bench::testing::measured;
    use crate::error::{FAILED, USAGE};
    use crate::testing::parse;

    pub fn verdict(line: &str) -> VerdictFlags {
        parse(format!("compare {line}").split_whitespace()).unwrap()
    }

    #[test]
    fn files_of_two_modes_are_not_compared() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let high = file("high.json", &Results::new(measured("--iters 5").0).json().unwrap());
        let line = "bench --mode low-latency --ranks-per-node 2 --tokens 2 --hidden 64 --experts 4 --topk 2 --warmup 0 --iters 1 --graph=1";
        let plans = crate::bench::testing::parse(line).unwrap().plans().unwrap();
        let points = crate::bench::start::measure_points(&plans, &()).unwrap().0;
        let low = file("low.json", &Results::new(points).json().unwrap());
        let broken =
            file("broken.json", "{\"schema_version\": 1, \"points\": [{\"mode\": \"low-latency\"}]}");
        let compare = |a: &PathBuf, b: &PathBuf| {
            let (a, b, verdict) = (a.clone(), b.clone(), verdict(""));
            super::run(&Args { a, b, verdict }).unwrap_err().message.unwrap()
        };
        assert!(compare(&high, &low).contains("compare: different points"));
        assert!(compare(&low, &broken).contains("broken.json: not a results file: missing field"));
    }

    #[test]
    fn a_gate_has_exit_codes() {
        let point = measured("--iters 5").0.remove(0);
        let runs = |factor: f64, first: f64| -> Vec<Point> {
            let run = |at: u32| {
                let mut point = point.clone();
                point.runs[0].started = first + 2.0 * f64::from(at);
                point.phases.iter_mut().for_each(|phase| {
                    let us = factor * (100.0 + f64::from(at % 3));
                    phase.call.samples_us = vec![us; 5];
                });
                point
            };
            (0..10).map(run).collect()
        };
        let (a, b) = (runs(1.0, 1.0), runs(1.05, 2.0));
        let outcome = |line: &str, a: &[Point], b: &[Point]| {
            let verdict = verdict(line);
            verdict
                .print(&verdict.compare(a, b).unwrap())
                .map_err(|error| (error.code, error.message.unwrap()))
        };
        assert_eq!(outcome("", &a, &b), Ok(()));
        let (code, message) = outcome("--fail-if-slower 1%", &a, &b).unwrap_err();
        assert_eq!(code, FAILED);
        assert!(
            message.contains("slower by 1 % or more: dispatch cached") && message.contains("by 5.0 %"),
            "{message}"
        );
        assert_eq!(outcome("--fail-if-slower 6", &a, &b), Ok(()));
        assert_eq!(outcome("--fail-if-slower 1%", &b, &a), Ok(()));
        let (code, message) = outcome("--fail-if-slower 1%", &a[..3], &b[..3]).unwrap_err();
        assert_eq!(code, USAGE);
        assert!(message.contains("too few runs (3 < 9)"), "{message}");
        assert!(parse::<VerdictFlags>(["compare", "--tolerance", "-1"]).is_err());
        assert!(parse::<VerdictFlags>(["compare", "--fail-if-slower", "much"]).is_err());
    }
}
