//! `cargo build-ptx`: compiles the kernels of the crate in the current folder.

#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use epoxide_build_ptx::command::BuildPtx;
use epoxide_build_ptx::workspace::Workspace;
use epoxide_build_ptx::{doctor, nvvm};

/// Exit code where a part that this command cannot fetch by itself is missing from the machine.
const EXIT_MISSING_PARTS: u8 = 2;

/// As cargo calls it: with the name of the subcommand as the first argument.
#[derive(Parser)]
#[command(name = "cargo", bin_name = "cargo", version, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Compile the crate's kernels to PTX and lint them, or check the committed PTX
    #[command(version)]
    BuildPtx {
        #[command(flatten)]
        options: BuildPtx,
        /// Say what this machine has for building PTX, and the remedy for what it lacks
        #[arg(long)]
        doctor: bool,
    },
}

fn main() -> ExitCode {
    let Command::BuildPtx { options, doctor } = Cli::parse().command;
    let run = || {
        let ws = Workspace::around(&std::env::current_dir()?)?;
        if doctor {
            return doctor::run(&ws);
        }
        options.run(&ws, "cargo build-ptx", &|ws, _, file| {
            println!("it passes the lints; test it before you commit it: {}", ws.display(file));
            Ok(())
        })
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            match error.downcast_ref::<nvvm::MissingParts>() {
                Some(_) => ExitCode::from(EXIT_MISSING_PARTS),
                None => ExitCode::FAILURE,
            }
        }
    }
}
