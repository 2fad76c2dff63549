//! `cargo xtask miri`: runs unit tests of the virtual GPU in miri, which finds undefined behaviour
//! and data races of Rust's memory model.
//!
//! Miri interprets, and so the default is a list of tests that end soon. The command never fetches
//! a toolchain.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::Result;
use clap::Args;

use crate::workspace::{self, Workspace};

/// Miri is part of nightly toolchains alone.
const TOOLCHAIN: &str = "nightly";

/// Brings all that the command needs.
const REMEDY: &str = "rustup toolchain install nightly --component miri,rust-src";

/// The tests of the default run: parts of their names.
const TESTS: &str = "check:: exec:: kernel:: machine::tests::a mbarrier:: memory:: racing:: seeds:: stream::";

/// Tests of long random sequences among them, which take minutes in miri.
const SKIP: &str = "--skip check::oracle --skip joins_are_the_pointwise --skip the_latest_reads_are_kept";

/// Device addresses are integers, so provenance cannot be strict. Tests read the environment and
/// the clock. A word may be accessed in parts, and miri then ends with an error of its own where it
/// emulates weak memory.
const FLAGS: &str =
    "-Zmiri-permissive-provenance -Zmiri-disable-isolation -Zmiri-disable-weak-memory-emulation";

#[derive(Args)]
pub struct Options {
    /// Parts of the names of unit tests of the virtual GPU, and other arguments of the test program
    /// [default: tests that end soon]
    #[arg(last = true, value_name = "TESTS")]
    tests: Vec<String>,
}

/// Runs the tests. Exit code 77 where miri is not installed.
pub fn run(ws: &Workspace, options: &Options) -> Result<ExitCode> {
    let missing = installed().err().or_else(|| {
        let built = workspace::succeeds(miri(ws).arg("setup")).unwrap_or(false);
        (!built).then(|| "miri cannot compile the standard library here".to_owned())
    });
    if let Some(missing) = missing {
        println!("skipped: {missing}\nto install it: {REMEDY}");
        return Ok(ExitCode::from(crate::SKIPPED));
    }
    crate::repository::run_tests(&mut test(ws, options))?;
    Ok(ExitCode::SUCCESS)
}

/// Whether the toolchain has miri and the source of the standard library, which miri compiles. The
/// query to rustup is for a path, and installs nothing.
fn installed() -> Result<(), String> {
    let mut rustup = Command::new("rustup");
    rustup.args(["which", "cargo-miri", "--toolchain", TOOLCHAIN]).env("RUSTUP_AUTO_INSTALL", "0");
    let miri = workspace::capture(&mut rustup)
        .map_err(|_| format!("the toolchain `{TOOLCHAIN}` with miri is not on this machine"))?;
    match source(Path::new(&miri)) {
        Some(source) if source.is_dir() => Ok(()),
        _ => Err(format!("the toolchain `{TOOLCHAIN}` has miri, but no rust-src")),
    }
}

/// The folder of the component rust-src in the toolchain that has this program in its `bin`.
fn source(program: &Path) -> Option<PathBuf> {
    Some(program.parent()?.parent()?.join("lib/rustlib/src/rust/library"))
}

/// `cargo miri`. Its builds are in the folder `miri` of the build directory.
fn miri(ws: &Workspace) -> Command {
    // The running cargo is the pinned toolchain's. The nightly one gets the same variables.
    let pinned = ws.cargo_in_callers_target();
    let mut command = Command::new("rustup");
    command.current_dir(&ws.root).args(["run", TOOLCHAIN, "cargo", "miri"]).env("MIRIFLAGS", FLAGS);
    for (variable, value) in pinned.get_envs() {
        match value {
            Some(value) => command.env(variable, value),
            None => command.env_remove(variable),
        };
    }
    command
}

/// Runs the tests.
fn test(ws: &Workspace, options: &Options) -> Command {
    let mut command = miri(ws);
    command.args(["test", "--release", "--package", "epoxide-tests", "--test", "vgpu-units", "--"]);
    match &options.tests[..] {
        [] => command.args(TESTS.split(' ')).args(SKIP.split(' ')),
        tests => command.args(tests),
    };
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_of_the_command_line_take_the_place_of_the_default_ones() {
        let ws = crate::repository::find().unwrap();
        let words = |tests: &[&str]| {
            let options = Options { tests: tests.iter().map(ToString::to_string).collect() };
            let command = test(&ws, &options);
            command.get_args().map(|word| word.to_string_lossy().into_owned()).collect::<Vec<_>>().join(" ")
        };
        let all = "run nightly cargo miri test --release --package epoxide-tests --test vgpu-units --";
        assert_eq!(words(&["memory::", "--exact"]), format!("{all} memory:: --exact"));
        assert_eq!(words(&[]), format!("{all} {TESTS} {SKIP}"));
    }

    #[test]
    fn the_source_lies_beside_the_programs_of_a_toolchain() {
        let library = source(Path::new("/toolchain/bin/cargo-miri")).unwrap();
        assert_eq!(library, Path::new("/toolchain/lib/rustlib/src/rust/library"));
    }
}
