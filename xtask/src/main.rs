//! Developer chores: `cargo xtask <command>`.
//!
//! Nothing here is needed to *use* epoxide: the host crate embeds the committed PTX. These commands
//! rebuild that PTX from the kernels in `gpu/`, check it and the virtual GPU that runs it, and
//! prepare machines that lack CUDA.

#![deny(unsafe_code)]

mod coverage;
mod deny;
#[cfg(test)]
mod features;
mod flaky;
mod miri;
mod mutate;
// Without the feature, the command starts xtask again with it, and only tests call the rest.
#[cfg_attr(not(feature = "public-api"), allow(dead_code))]
mod public_api;
mod rdma_vm;
mod repository;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use epoxide_build_ptx::backend::{Arch, Backend};
use epoxide_build_ptx::check::NotCompared;
use epoxide_build_ptx::command::BuildPtx;
use epoxide_build_ptx::job::Job;
use epoxide_build_ptx::kernels::Kernels;
use epoxide_build_ptx::{doctor, lint, nvvm, packages, ptxas, workspace};

/// Exit code where this machine lacks a part that the command does not fetch by itself, or a check
/// had no compiler for a rebuild. Usage errors have another one, so that a script can skip for
/// these alone.
const SKIPPED: u8 = 77;

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Developer chores of epoxide", disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Compile the kernels in gpu/ to PTX, or check the committed PTX
    BuildPtx(BuildPtx),
    /// Lint a PTX file
    PtxLint {
        /// The PTX file; the committed one by default
        file: Option<PathBuf>,
        /// The compiler back end that wrote it (sets the `.version` ceiling) [default: the one that
        /// its header names]
        #[arg(long, value_enum)]
        backend: Option<Backend>,
        /// The architecture it is for [default: that of the committed one]
        #[arg(long)]
        arch: Option<Arch>,
    },
    /// Lint a PTX file, and run the tests with it in place of the embedded PTX
    PtxTest {
        /// The PTX file; the committed one by default
        file: Option<PathBuf>,
        /// The compiler back end that wrote it (sets the `.version` ceiling) [default: the one that
        /// its header names]
        #[arg(long, value_enum)]
        backend: Option<Backend>,
        /// The architecture it is for [default: that of the committed one]
        #[arg(long)]
        arch: Option<Arch>,
        /// Arguments of `cargo test --release` in place of all tests that launch kernels
        #[arg(last = true)]
        selection: Vec<String>,
    },
    /// Fetch ptxas into target/ (a Python wheel, by pip)
    FetchPtxas,
    /// Fetch Rust-CUDA's back end and what it needs into target/nvvm, as far as this machine can
    FetchNvvm,
    /// Run a program in virtual machines that have RDMA devices (Soft-RoCE)
    RdmaVm(rdma_vm::Options),
    /// List the instructions and Rust lines of the kernels that a test run on the virtual GPU
    /// executes
    KernelCoverage(coverage::Options),
    /// Make single faults in the kernels, and look whether the checks notice
    Mutate(mutate::Options),
    /// Write the list of the library's public items, docs/PUBLIC-API.txt, or check it
    PublicApi(public_api::Options),
    /// Run the tests many times beside busy processes, and list the failures with their counts
    Flaky(flaky::Options),
    /// Run unit tests of the virtual GPU in miri, which finds data races and undefined behaviour
    Miri(miri::Options),
    /// Keep one processor busy until standard input ends
    #[command(hide = true)]
    Spin,
    /// Check licences, sources and versions of all crates that anything here is built from
    /// (deny.toml)
    Deny,
    /// Check this machine's tools for building PTX, and give the remedy for each missing one
    Doctor,
}

/// How this repository builds PTX.
const BUILD: &str = "cargo xtask build-ptx";

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            if error.is::<nvvm::MissingParts>() || error.is::<NotCompared>() {
                return ExitCode::from(SKIPPED);
            }
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<ExitCode> {
    let ws = repository::find()?;
    let job = |backend, arch, file| {
        Job::of_file(&ws, Kernels::find(&ws, None, &ws.root)?, BUILD, backend, arch, file)
    };
    match command {
        Command::BuildPtx(options) => {
            options.run(&ws, BUILD, &|ws, job, file| repository::test_file(ws, job, file, &[]))
        }
        Command::PtxLint { file, backend, arch } => {
            let job = job(backend, arch, file)?;
            let text = workspace::read(&job.out)?;
            lint::lint_file(&ws, &job, &job.out, &text)
        }
        Command::FetchPtxas => {
            println!("{}", ptxas::find_or_fetch(&ws)?.display());
            Ok(())
        }
        Command::PtxTest { file, backend, arch, selection } => {
            let job = job(backend, arch, file)?;
            repository::test_file(&ws, &job, &job.out, &selection)
        }
        Command::FetchNvvm => nvvm::fetch(&ws),
        Command::RdmaVm(options) => return rdma_vm::run(&ws, options),
        Command::KernelCoverage(options) => coverage::run(&ws, &options),
        Command::Mutate(options) => mutate::run(&ws, &options),
        Command::PublicApi(options) => return public_api::run(&ws, &options),
        Command::Flaky(options) => return flaky::run(&ws, &options),
        Command::Miri(options) => return miri::run(&ws, &options),
        Command::Spin => flaky::spin(),
        Command::Deny => deny::run(&ws),
        Command::Doctor => {
            println!(
                "Building epoxide needs none of this: the PTX is committed. Changing the kernels does.\n"
            );
            doctor::run(&ws)
        }
    }
    .map(|()| ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `tests/nvvm/run.sh` passes with this code.
    #[test]
    fn a_wrong_command_line_is_no_missing_part() {
        let parsed = Cli::try_parse_from(["cargo xtask", "build-ptx", "--back-end", "nvvm"]);
        let code = parsed.err().expect("no such flag").exit_code();
        assert_ne!(code, i32::from(SKIPPED));
    }
}
