//! `epoxide bench`: to be written.

use crate::stop::{Result, Stop};

/// Options of `epoxide bench`.
#[derive(Debug, clap::Args)]
pub struct Args {}

/// Runs the benchmark.
pub fn run(_args: Args) -> Result<()> {
    Err(Stop::usage("bench: not built yet in this version"))
}
