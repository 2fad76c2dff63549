//! `cargo xtask kernel-coverage`: which instructions and Rust lines of the kernels a test run
//! executes.

use std::process::Command;

use anyhow::Result;
use clap::Args;
use epoxide_build_ptx::coverage::{self, DIRECTORY_VARIABLE, Missed};

use crate::workspace::{self, Workspace};

/// Round trips of the default run, as arguments of `epoxide`.
const ROUNDTRIPS: [&str; 4] = [
    "roundtrip --mode intranode",
    "roundtrip --mode intranode --dtype fp8 --iterations 4 --random",
    "roundtrip --mode internode --ranks-per-node 2",
    "roundtrip --mode internode --ranks-per-node 2 --dtype fp8 --iterations 4 --random",
];

/// Tests of the default run, as arguments of `cargo test --release`.
const TESTS: &str = "--package epoxide-tests --test ep";

#[derive(Args)]
pub struct Options {
    /// List the Rust lines and the instructions that were never executed
    #[arg(long)]
    missed: bool,
    /// Only look at what an earlier run has left in this folder
    #[arg(long, value_name = "DIR", conflicts_with = "tests")]
    from: Option<std::path::PathBuf>,
    /// Arguments of `cargo test --release` [default: round trips, and the tests of one node and of
    /// several]
    #[arg(last = true)]
    tests: Vec<String>,
}

/// Runs the tests and prints the table.
pub fn run(ws: &Workspace, options: &Options) -> Result<()> {
    let directory = match &options.from {
        Some(directory) => directory.clone(),
        None => {
            let directory = ws.target("kernel-coverage");
            workspace::fresh_dir(&directory)?;
            for mut command in commands(ws, &options.tests) {
                workspace::run(command.env(DIRECTORY_VARIABLE, &directory))?;
            }
            directory
        }
    };
    let missed = if options.missed { Missed::Listed } else { Missed::Counted };
    print!("{}", coverage::report(epoxide_gpu::PTX, &directory, missed)?);
    Ok(())
}

fn commands(ws: &Workspace, tests: &[String]) -> Vec<Command> {
    let cargo = |words: &[&str]| {
        let mut command = ws.cargo();
        if let Some(target_dir) = workspace::env_path("CARGO_TARGET_DIR") {
            command.env("CARGO_TARGET_DIR", target_dir);
        }
        command.args(words);
        command
    };
    let test = |arguments: &[&str]| cargo(&[&["test", "--release"], arguments].concat());
    if !tests.is_empty() {
        return vec![test(&tests.iter().map(String::as_str).collect::<Vec<_>>())];
    }
    let words = |text: &'static str| text.split(' ').collect::<Vec<_>>();
    let binary = ["run", "--quiet", "--release", "--package", "epoxide-cli", "--bin", "epoxide", "--"];
    let roundtrips = ROUNDTRIPS.iter().map(|arguments| cargo(&[&binary[..], &words(arguments)].concat()));
    roundtrips.chain([test(&words(TESTS))]).collect()
}
