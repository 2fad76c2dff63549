//! `epoxide bench`: times dispatch and combine apart, and prints every convention that the field counts by.
//!
//! One run gives [`results::Point`]s; everything that is printed, stored or drawn comes from those alone, so that stored
//! results can be printed, drawn and compared later.

mod args;
mod compare;
mod counts;
mod csv;
mod measure;
mod model;
mod plot;
mod report;
mod results;
mod sweep;
mod trace;

use std::sync::Arc;
use std::time::Duration;

use clap::Subcommand;
use epoxide::Error;
use epoxide::driver::Device;
use epoxide::driver::virt::{VirtConfig, VirtualGpu};
use epoxide::group::launch::run_threads;

pub use args::Args;
use args::Backend;
use measure::RankResult;
use results::{Point, Results};

use crate::output;
use crate::stop::{Result, Stop};

/// `epoxide bench`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Bench {
    #[command(subcommand)]
    tool: Option<Tool>,
    #[command(flatten)]
    args: Args,
}

/// What can be done with results.
#[derive(Debug, Subcommand)]
enum Tool {
    /// Draw stored results.
    Plot(plot::Args),
    /// Compare stored results, and say which differences are noise.
    Compare(compare::Args),
    /// Predict times and bytes for sizes that no one here can run.
    Model(model::Args),
}

/// Runs the benchmark, or a tool on its results.
///
/// # Errors
/// Skips where the devices are missing or the sizes do not fit them, and whatever the operations report.
pub fn run(bench: &Bench) -> Result<()> {
    match &bench.tool {
        None => {}
        Some(Tool::Plot(args)) => return plot::run(args),
        Some(Tool::Compare(args)) => return compare::run(args),
        Some(Tool::Model(args)) => return model::run(args),
    }
    let args = &bench.args;
    if let Some(path) = &args.plot {
        plot::check_path(path)?;
    }
    let points = match (&args.sweep, &args.out) {
        (Some(sweep), Some(out)) => sweep::run(args, sweep, out)?,
        _ => single(args)?,
    };
    if let Some(path) = &args.csv {
        csv::write(path, &points)?;
    }
    if let Some(path) = &args.plot {
        plot::draw(&points, &plot::Choice::default(), path)?;
    }
    Ok(())
}

/// One run: text or JSON, and the trace.
fn single(args: &Args) -> Result<Vec<Point>> {
    let (points, ranks) = measure_points(args)?;
    let text: Vec<String> = points.iter().map(report::text).collect();
    match &args.json {
        Some(path) => {
            Results::new(points.clone()).write(path)?;
            if path.as_os_str() != "-" {
                output::text_line(text.join("\n").trim_end())?;
            }
        }
        None => output::text_line(text.join("\n").trim_end())?,
    }
    if let Some(path) = &args.trace {
        trace::write(path, &ranks)?;
    }
    Ok(points)
}

/// Measures all that `args` asks for in one group of ranks.
fn measure_points(args: &Args) -> Result<(Vec<Point>, Vec<RankResult>)> {
    args.check()?;
    let ranks = run_threads(args.ranks_per_node, Duration::from_secs(120), |rank, group| {
        measure::rank(args, open(args, rank)?, &*group)
    })
    .map_err(|failure| stop_of(failure.error))?;
    Ok((report::points(args, &ranks)?, ranks))
}

/// Devices that are missing or too small are reasons to skip.
fn stop_of(error: Error) -> Stop {
    match error {
        Error::OutOfMemory { .. } => Stop::skipped(format!("bench: sizes that do not fit: {error}")),
        error => Stop::from(error),
    }
}

fn open(args: &Args, rank: u32) -> epoxide::Result<Arc<dyn Device>> {
    match args.device {
        Backend::Virtual => Ok(VirtualGpu::new(VirtConfig { ordinal: rank, ..VirtConfig::default() })),
        Backend::Cuda => open_cuda(rank),
    }
}

#[cfg(feature = "cuda")]
fn open_cuda(rank: u32) -> epoxide::Result<Arc<dyn Device>> {
    epoxide::driver::cuda::CudaDevice::open(rank)
}

#[cfg(not(feature = "cuda"))]
fn open_cuda(_rank: u32) -> epoxide::Result<Arc<dyn Device>> {
    Err(Error::Unavailable {
        what: "--device cuda".into(),
        reason: "this binary was built without it; build with --features cuda".into(),
    })
}

#[cfg(test)]
mod tests;
