//! Measures dispatch and combine on ranks, counts their traffic, models their times, and stores the
//! results. Printing and flags are in the command, `epoxide bench`.
//!
//! A [`Plan`] describes a measurement. [`measure()`] runs it on threads of this process,
//! [`measure::rank`] on one rank of any group. The results are [`results::Point`]s: all printed,
//! stored or drawn figures come from those alone.

mod baseline;
mod between;
mod by_expert;
pub mod compare;
pub mod counts;
mod estimate;
pub mod figures;
mod high_throughput;
mod hold;
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
mod script;
pub mod sweep;
pub mod trace;
mod version_1;
pub mod versions;
pub mod ways;

use epoxide::driver::Device;
use epoxide::group::run_threads;

pub use epoxide_testing::low_latency::ReturnPath;
pub use estimate::Estimate;
pub use measure::{Counted, Watch};
pub use plan::{Baseline, Effort, LowLatencySettings, Plan, Shapes, TIMEOUT};

/// `Result` with [`enum@Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The reason why a measurement failed.
#[derive(Clone, thiserror::Error)]
pub enum Error {
    /// The request is wrong, or a file has the wrong form.
    #[error("{0}")]
    Usage(String),
    /// This machine, or the library, has no room for the sizes.
    #[error("{0}")]
    DoesNotFit(String),
    /// Something broke, or what was measured contradicts itself.
    #[error("{0}")]
    Failed(String),
    /// An operation failed.
    #[error(transparent)]
    Operation(epoxide::Error),
}

impl std::fmt::Debug for Error {
    /// The text itself, for a `main` that returns it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

impl From<epoxide::Error> for Error {
    /// Devices that are too small are no failure.
    fn from(error: epoxide::Error) -> Error {
        match error {
            epoxide::Error::OutOfMemory { .. } => {
                Error::DoesNotFit(format!("bench: sizes that do not fit: {error}"))
            }
            error => Error::Operation(error),
        }
    }
}

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
