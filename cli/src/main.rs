//! The `epoxide` command: run the acceptance test, start ranks, look inside a routing, see what
//! this machine has.
//!
//! Exit codes: 0 all is well, 1 a check failed, 2 bad usage, 77 skipped because this machine lacks
//! what was asked for.

mod bench;
mod doctor;
mod error;
mod inspect;
mod launch;
mod manual;
mod nccl_check;
mod options;
mod output;
mod ranks;
mod roundtrip;
#[cfg(test)]
mod testing;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use tracing_subscriber::filter::LevelFilter;

/// Expert parallelism in Rust: moves Mixture-of-Experts tokens between GPUs, real or virtual.
#[derive(Debug, Parser)]
#[command(name = "epoxide", version, about, after_help = EXIT_CODES)]
struct Cli {
    /// Print more of the library's log on standard error: first information, then debugging, then everything. Without, warnings; in launch, errors
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,

    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str =
    "Exit codes: 0 pass, 1 a check failed, 2 bad usage, 77 skipped for want of hardware.";

#[derive(Debug, Subcommand)]
enum Command {
    /// Run layout, dispatch and combine on all ranks and check every result.
    Roundtrip(roundtrip::Args),
    /// Measure dispatch and combine.
    Bench(Box<bench::Bench>),
    /// Start the ranks of a group on this host.
    Launch(launch::Args),
    /// Print layouts and handles as JSON.
    Inspect(inspect::Args),
    /// Check the NCCL communicator on the GPUs of this machine: operations, abort, a peer that is
    /// killed.
    NcclCheck(nccl_check::Args),
    /// Check this machine's features, and give the remedy for each missing one.
    Doctor(doctor::Args),
    /// Print what a shell needs to complete this command's words (built with `--features manual`).
    Completions(manual::CompletionArgs),
    /// Print the manual page of this command (built with `--features manual`).
    Man(manual::ManArgs),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return print_clap(&error),
    };
    // The launcher reports what concerns its ranks in its own words: of the log, only errors.
    let quiet = u8::from(matches!(cli.command, Command::Launch(_)));
    log_to_stderr(cli.verbose.saturating_add(1).saturating_sub(quiet));
    let outcome = match cli.command {
        Command::Roundtrip(args) => roundtrip::run(args),
        Command::Bench(args) => bench::run(&args),
        Command::Launch(args) => launch::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::NcclCheck(args) => nccl_check::run(&args),
        Command::Doctor(args) => doctor::run(args),
        Command::Completions(args) => manual::completions(&args, Cli::command()),
        Command::Man(args) => manual::man(&args, Cli::command()),
    };
    match outcome.and_then(|()| output::check_lost()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if let Some(message) = error.message {
                output::complain(&message);
            }
            ExitCode::from(error.code)
        }
    }
}

/// Prints the log of the library and its crates from here on: errors, and with each level more.
fn log_to_stderr(level: u8) {
    let level = match level {
        0 => LevelFilter::ERROR,
        1 => LevelFilter::WARN,
        2 => LevelFilter::INFO,
        3 => LevelFilter::DEBUG,
        _ => LevelFilter::TRACE,
    };
    let log = tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr);
    log.with_target(false).with_ansi(false).without_time().init();
}

/// Prints clap's output: help, the version, or an error in the arguments.
fn print_clap(from_clap: &clap::Error) -> ExitCode {
    match from_clap.print() {
        Err(error) if !from_clap.use_stderr() && error.kind() != std::io::ErrorKind::BrokenPipe => {
            output::complain(&format!("standard output: {error}"));
            ExitCode::from(error::FAILED)
        }
        _ => ExitCode::from(u8::try_from(from_clap.exit_code()).unwrap_or(error::USAGE)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }
}
