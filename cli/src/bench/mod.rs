//! `epoxide bench`: times dispatch and combine apart, and prints every convention that the field
//! counts by.
//!
//! One run gives [`results::Point`]s. All printed, stored or drawn figures come from those alone,
//! so that stored results can be printed, drawn and compared later.

mod ab;
mod args;
mod compare;
mod csv;
mod model;
mod network;
mod plot;
mod report;
mod start;
mod sweep;

use clap::Subcommand;
use epoxide_bench::results::{Point, Results};
use epoxide_bench::{Plan, trace};

pub use args::Args;

use self::start::{announce, launched, measure_points};
use crate::error::{CommandError, Result};
use crate::output::{self, Progress};
use crate::ranks;

/// `epoxide bench`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Bench {
    #[command(subcommand)]
    tool: Option<Tool>,
    #[command(flatten)]
    args: Args,
}

/// Operations on results.
#[derive(Debug, Subcommand)]
enum Tool {
    /// Draw stored results (built with `--features plots`).
    Plot(plot::Args),
    /// Compare stored results, and mark the differences that are noise.
    Compare(compare::Args),
    /// Measure two programs, or two files of kernels, in turn, and compare.
    Ab(Box<ab::Args>),
    /// Measure the network between nodes alone: bandwidth and latency of puts, by size and depth.
    Wire(network::Args),
    /// Predict times and bytes for sizes that no one here can run.
    Model(model::Args),
}

/// Runs the benchmark, or a tool on its results.
///
/// # Errors
/// Bad usage for impossible sizes; skips if devices are missing or have no room for the sizes; and
/// errors of the operations.
pub fn run(bench: &Bench) -> Result<()> {
    match &bench.tool {
        None => {}
        Some(Tool::Plot(args)) => return plot::run(args),
        Some(Tool::Compare(args)) => return compare::run(args),
        Some(Tool::Ab(args)) => return ab::run(args),
        Some(Tool::Model(args)) => return model::run(args),
        Some(Tool::Wire(args)) => return network::run(args),
    }
    let args = &bench.args;
    let plans = args.plans()?;
    let Some(plan) = plans.first() else { return Ok(()) };
    if let Some(path) = &args.plot {
        plot::check_path(path)?;
    }
    // Ranks of other hosts write no files, and may lack the folder.
    let files =
        [("--json", &args.json), ("--csv", &args.csv), ("--plot", &args.plot), ("--trace", &args.trace)];
    output::check_distinct(&[&files[..], &[("--out", &args.out)]].concat())?;
    for (flag, path) in files.into_iter().filter(|_| ranks::prints()) {
        output::check_file(flag, path.as_deref())?;
    }
    // Before anything is made: a sweep would leave out size after size.
    if let Some(baseline) = plan.baseline {
        baseline.check()?;
    }
    if args.sweep.is_some() && launched()?.is_some() {
        let remedy = "start it without a launcher: its ranks are threads then";
        return Err(CommandError::usage(format!("--sweep: not for ranks that a launcher started; {remedy}")));
    }
    let points = match (&args.sweep, &args.out) {
        // Each point is checked by itself.
        (Some(sweep), Some(out)) => sweep::run(args, &plans, sweep, out)?,
        _ => single(args, &plans)?,
    };
    if !ranks::prints() {
        return Ok(());
    }
    if let Some(path) = &args.csv {
        csv::write(path, &points)?;
    }
    if let Some(path) = &args.plot {
        plot::draw_points(&points, path)?;
    }
    Ok(())
}

/// One run: text or JSON, and the trace.
fn single(args: &Args, plans: &[Plan]) -> Result<Vec<Point>> {
    plans.iter().try_for_each(Plan::check)?;
    announce(plans, args.sizes.leaves_sizes_open());
    let steps = plans.iter().map(|plan| u64::from(plan.repeat) * plan.steps()).sum();
    let progress = Progress::new("bench", steps, ranks::prints());
    let (points, results) = measure_points(plans, &progress)?;
    drop(progress);
    if !ranks::prints() {
        return Ok(points);
    }
    if args.json.as_ref().is_none_or(|path| path.as_os_str() != "-") {
        output::text_line(report::whole(&points).trim_end())?;
    }
    if let Some(path) = &args.json {
        output::write_text(path, &Results::new(points.clone()).json()?)?;
    }
    if let Some(path) = &args.trace {
        output::write_text(path, &trace::text(&results))?;
    }
    Ok(points)
}

#[cfg(test)]
mod baseline_tests;
#[cfg(test)]
mod low_latency_tests;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
