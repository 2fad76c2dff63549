//! The `vgpu` command: runs PTX on the CPU, and reports races, missing fences, unwritten memory,
//! bad addresses and hangs.
//!
//! Exit codes: 0 nothing to report, 1 reports, 2 bad usage.

mod argument;
mod check;
mod coverage;
mod fuzz;
mod names;
mod output;
mod run;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Runs PTX on the CPU, and reports races, missing fences, unwritten memory, bad addresses and
/// hangs.
#[derive(Debug, Parser)]
#[command(name = "vgpu", version, about, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str = "Exit codes:
  0  nothing to report, or all reports are accepted
  1  reports: races, faults, hangs; refused instructions for `check`
  2  bad usage: wrong flags, a file that cannot be read, a launch that cannot start";

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a kernel, and report what it does wrong.
    #[command(after_help = run::HELP)]
    Run(Box<run::Args>),
    /// List everything in PTX files that the virtual GPU refuses.
    Check(check::Args),
    /// Count the instructions of PTX files whose opcodes the virtual GPU has.
    Coverage(coverage::Args),
    /// Run random programs on the virtual GPU and on another device, and compare.
    #[command(after_help = fuzz::HELP)]
    Fuzz(fuzz::Args),
    /// Run what `fuzz --device cuda` sends by standard input.
    #[cfg(feature = "cuda")]
    #[command(hide = true)]
    ServeGpu(fuzz::ServeArgs),
}

fn main() -> ExitCode {
    // Bad usage ends with 2 here, `--help` with 0.
    let outcome = match Cli::parse().command {
        Command::Run(args) => run::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Coverage(args) => coverage::run(&args),
        Command::Fuzz(args) => fuzz::run(&args),
        #[cfg(feature = "cuda")]
        Command::ServeGpu(args) => fuzz::serve(&args),
    };
    match outcome {
        Ok(output::Verdict::Clean) => ExitCode::SUCCESS,
        Ok(output::Verdict::Reports) => ExitCode::from(1),
        Err(error) => {
            eprintln!("vgpu: {error:#}");
            ExitCode::from(2)
        }
    }
}
