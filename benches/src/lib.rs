//! Measures dispatch and combine on ranks, counts what they move, models what they take, and stores
//! the results. It prints nothing and knows no flags: `epoxide bench` is the command.
//!
//! A [`Plan`] describes a measurement. [`measure()`] runs it on threads of this process,
//! [`measure::rank`] on one rank of any group. The results are [`results::Point`]s: all printed,
//! stored or drawn figures come from those alone.

mod baseline;
mod bench;
pub mod compare;
pub mod counts;
pub mod digest;
mod error;
mod estimate;
pub mod figures;
mod low_latency;
pub mod measure;
pub mod measured;
pub mod model;
pub mod network;
mod plan;
pub mod points;
pub mod puts;
mod replay;
pub mod results;
mod shapes;
pub mod sweep;
mod timing;
pub mod trace;
mod version_1;
pub mod ways;

use epoxide::driver::Device;
use epoxide::group::launch::run_threads;

pub use epoxide_testing::low_latency::ReturnPath;
pub use error::{Error, Result};
pub use estimate::Estimate;
pub use measure::Watch;
pub use plan::{Baseline, Effort, LowLatency, Plan, TIMEOUT};
pub use shapes::Shapes;

/// Measures all that a plan asks for on ranks that are threads of this process; `open` makes the
/// device of a rank. The points, and what each rank measured in the first run.
///
/// # Errors
/// [`Error::Usage`] for impossible sizes, [`Error::DoesNotFit`] if there is no room for them here,
/// and errors of the operations.
pub fn measure(
    plan: &Plan,
    open: impl Fn(u32) -> epoxide::Result<Device> + Sync,
    watch: &dyn Watch,
) -> Result<(Vec<results::Point>, Vec<measured::RankResult>)> {
    plan.check()?;
    let ranks = run_threads(plan.topology.ranks(), TIMEOUT, |rank, group| {
        measure::runs(plan, &open(rank)?, &group, watch)
    });
    points::of_runs(plan, ranks.map_err(|failure| failure.error)?)
}

#[cfg(test)]
mod tests;
