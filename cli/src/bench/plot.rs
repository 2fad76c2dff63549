//! `epoxide bench plot` and `--plot`: the flags. The feature `plots` brings what draws, in
//! drawing.rs.
//!
//! The feature is off by default: its crates compile for a sixth of the time that the rest takes,
//! and a round trip needs none of them. The flags are there in any case, so that `--help` lists
//! them.

#[cfg(feature = "plots")]
mod drawing;

use std::path::{Path, PathBuf};

use clap::ValueEnum;

#[cfg(feature = "plots")]
pub use self::drawing::{draw_points, run};
#[cfg(not(feature = "plots"))]
pub use self::without::{draw_points, run};
use crate::error::{CommandError, Result};

/// Flags of `epoxide bench plot`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Results, or the JSON lines of sweeps; each file is a series of its own.
    #[arg(required = true, value_name = "RESULT.json")]
    files: Vec<PathBuf>,
    /// The drawing: .svg or .png.
    #[arg(long, value_name = "FILE.svg|png")]
    out: PathBuf,
    #[command(flatten)]
    choice: Choice,
}

/// Contents of the drawing.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Choice {
    /// Quantity on the x axis [default: the one for which the points have the most values].
    #[arg(long, value_enum)]
    x: Option<Axis>,
    /// Quantity to draw: bandwidth, and against tokens the times of calls, too; distributions of
    /// times if there is one configuration.
    #[arg(long, value_enum, default_value = "auto")]
    what: What,
}

/// An x axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Axis {
    /// Tokens per rank.
    Tokens,
    /// Multiprocessors.
    Sms,
    /// Ranks.
    Ranks,
    /// Nodes.
    Nodes,
    /// Rows of a put between nodes.
    RdmaSend,
}

/// Kinds of panels.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum What {
    /// All kinds that the results have.
    #[default]
    Auto,
    /// Bandwidth over the axis.
    Bandwidth,
    /// Times of calls over the axis.
    Latency,
    /// Distributions of the times.
    Distribution,
}

/// Rejects a drawing that cannot be made, before anything is measured for it.
///
/// # Errors
/// Bad usage in a program without the feature `plots`, and for a file name that is neither `.svg`
/// nor `.png`.
pub fn check_path(path: &Path) -> Result<()> {
    #[cfg(not(feature = "plots"))]
    without::reject("bench --plot")?;
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("svg" | "png") => Ok(()),
        _ => Err(CommandError::usage(format!("{}: a drawing ends in .svg or .png", path.display()))),
    }
}

/// Replaces drawing.rs in a program without the feature `plots`: every drawing is bad usage.
#[cfg(not(feature = "plots"))]
mod without {
    use std::path::Path;

    use epoxide_bench::results::Point;

    use super::Args;
    use crate::error::{CommandError, Result};

    pub fn run(_: &Args) -> Result<()> {
        reject("bench plot")
    }

    pub fn draw_points(_: &[Point], _: &Path) -> Result<()> {
        reject("bench --plot")
    }

    /// The error of `command`, which draws.
    pub fn reject(command: &str) -> Result<()> {
        Err(CommandError::without_feature(command, "plots"))
    }

    #[cfg(test)]
    mod tests {
        use crate::bench::testing::flags;
        use crate::error::USAGE;
        use crate::testing::parse;

        #[test]
        fn without_the_feature_a_drawing_is_bad_usage_and_says_how_to_get_it() {
            let args: crate::bench::plot::Args = parse(["plot", "a.json", "--out", "a.svg"]).unwrap();
            let error = super::run(&args).unwrap_err();
            let expected = "bench plot: this program was built without the feature plots; \
                            `cargo run --release --features plots -- bench plot ..` builds it in";
            assert_eq!((error.code, error.message.as_deref()), (USAGE, Some(expected)));

            // Nothing is measured: impossible sizes are reported later.
            let mut args = flags("--tokens 0");
            args.plot = Some("a.svg".into());
            let error = crate::bench::run(&crate::bench::Bench { tool: None, args }).unwrap_err();
            let message = error.message.unwrap();
            assert_eq!(error.code, USAGE, "{message}");
            assert!(message.contains("cargo run --release --features plots -- bench --plot .."), "{message}");
            assert!(!std::path::Path::new("a.svg").exists());
        }
    }
}
