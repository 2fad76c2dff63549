//! Measures dispatch and combine on ranks, counts what they move, models what they take, and stores the results. It prints nothing and
//! knows no flags: `epoxide bench` is the command.
//!
//! A [`Plan`] says what to measure, [`measure()`] does on threads of this process, and [`measure::rank`] on one rank of any group. What
//! comes of it is [`results::Point`]s: everything that is printed, stored or drawn comes from those alone.

mod bench;
pub mod compare;
pub mod counts;
mod error;
pub mod low_latency;
pub mod measure;
mod measured;
pub mod model;
pub mod network;
mod plan;
pub mod points;
pub mod puts;
mod replay;
pub mod results;
mod shapes;
pub mod sweep;
pub mod trace;

use std::sync::Arc;

use epoxide::driver::Device;
use epoxide::group::launch::run_threads;

pub use error::{Error, Result};
pub use plan::Plan;
pub use shapes::Shapes;

/// Measures all that a plan asks for on ranks that are threads of this process; `open` makes the device of a rank. The points, and what
/// each rank measured.
///
/// # Errors
/// [`Error::DoesNotFit`] for sizes that cannot be run here, and whatever the operations report.
pub fn measure(
    plan: &Plan,
    open: impl Fn(u32) -> epoxide::Result<Arc<dyn Device>> + Sync,
) -> Result<(Vec<results::Point>, Vec<measure::RankResult>)> {
    plan.check()?;
    let ranks = run_threads(plan.topology.ranks(), measure::TIMEOUT, |rank, group| {
        measure::rank(plan, open(rank)?, &group)
    });
    let ranks = ranks.map_err(|failure| failure.error)?;
    Ok((points::points(plan, &ranks)?, ranks))
}

#[cfg(test)]
mod tests;
