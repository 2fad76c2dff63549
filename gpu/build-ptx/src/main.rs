//! `cargo build-ptx`: compiles the kernels of the crate in the current folder.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use epoxide_build_ptx::check::NotCompared;
use epoxide_build_ptx::command::BuildPtx;
use epoxide_build_ptx::workspace::Workspace;
use epoxide_build_ptx::{doctor, nvvm};

/// Exit code where a part that this command cannot fetch by itself is missing from the machine, and
/// where a check could not compare the PTX with a rebuild.
const EXIT_SKIPPED: u8 = 77;

/// The command as cargo calls it: with the name of the subcommand as the first argument.
#[derive(Parser)]
#[command(name = "cargo", bin_name = "cargo", version, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Compile the crate's kernels to PTX and lint them, or check the committed PTX
    #[command(version, after_help = FAULTS)]
    BuildPtx(Options),
}

/// Shown below the flags: a question that another program answers.
const FAULTS: &str =
    "Would the tests notice a fault? `xtask` of a checkout of epoxide, here by the path EPOXIDE:
  cargo build --release --manifest-path $EPOXIDE/Cargo.toml -p xtask
  $EPOXIDE/target/release/xtask mutate --sample all --missed --ptx ptx/NAME.sm_90.ptx -- cargo test";

#[derive(Args)]
struct Options {
    #[command(flatten)]
    build: BuildPtx,
    /// Check this machine's tools for building PTX, and give the remedy for each missing one
    #[arg(long)]
    doctor: bool,
}

fn main() -> ExitCode {
    let Command::BuildPtx(options) = Cli::parse().command;
    let run = || {
        let ws = Workspace::around(&std::env::current_dir()?)?;
        if options.doctor {
            return doctor::run(&ws);
        }
        options.build.run(&ws, "cargo build-ptx", &|ws, _, file| {
            let why = "the compiler is another one than the header names. What it makes passes the lints: test it \
                       before you commit it";
            Err(NotCompared(format!("{why}: {}", ws.display(file))).into())
        })
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            if error.is::<nvvm::MissingParts>() || error.is::<NotCompared>() {
                return ExitCode::from(EXIT_SKIPPED);
            }
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_flags_are_those_that_cargo_passes_on() {
        Cli::command().debug_assert();
        let parsed = Cli::try_parse_from(["cargo", "build-ptx", "--check", "-p", "own-kernels"]).unwrap();
        let Command::BuildPtx(options) = parsed.command;
        assert!(options.build.check && !options.doctor);
        assert_eq!(options.build.package.as_deref(), Some("own-kernels"));
    }
}
