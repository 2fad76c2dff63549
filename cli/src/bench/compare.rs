//! `epoxide bench compare A.json B.json`.

use std::path::PathBuf;

use epoxide_bench::compare::text;
use epoxide_bench::results::Results;

use crate::output;
use crate::stop::Result;

/// Flags of `epoxide bench compare`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The results to compare with.
    #[arg(value_name = "A.json")]
    a: PathBuf,
    /// The results that are compared: a ratio above 1 is slower than A.
    #[arg(value_name = "B.json")]
    b: PathBuf,
    /// Percent of difference that counts as noise whatever the test says.
    #[arg(long, default_value_t = 1.0)]
    tolerance: f64,
}

/// Compares and prints.
pub fn run(args: &Args) -> Result<()> {
    let (a, b) = (Results::read(&args.a)?, Results::read(&args.b)?);
    output::text_line(&text(&a.points, &b.points, args.tolerance / 100.0)?)
}
