//! Developer chores: `cargo xtask <command>`.
//!
//! Nothing here is needed to *use* epoxide: the host crate embeds the committed PTX. These commands rebuild that PTX from
//! the kernels in `gpu/`, check it and the virtual GPU that runs it, and prepare machines that lack CUDA.

#![forbid(unsafe_code)]

mod backend;
mod build;
mod check;
mod coverage;
mod debs;
mod deny;
mod doctor;
#[cfg(test)]
mod features;
mod flaky;
mod fuzz;
mod header;
mod job;
mod lint;
mod manifest;
mod metadata;
mod mutate;
mod nvvm;
mod postprocess;
mod ptx;
mod ptxas;
// Without its feature, the command starts xtask again with it, and only tests call the rest.
#[cfg_attr(not(feature = "public-api"), allow(dead_code))]
mod public_api;
mod rdma_vm;
mod sources;
mod toolchain;
mod wheel;
mod workspace;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};

use backend::{Arch, Backend};
use workspace::Workspace;

/// Exit code where a part that this command cannot fetch by itself is missing from the machine.
const EXIT_MISSING_PARTS: u8 = 2;

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
    /// Lint a PTX file against the kernel manifest
    PtxLint {
        /// The PTX file; the committed one by default
        file: Option<PathBuf>,
        /// The compiler back end that wrote it (sets the `.version` ceiling) [default: the one that its header names]
        #[arg(long, value_enum)]
        backend: Option<Backend>,
        /// The architecture it is for
        #[arg(long, default_value = "sm_90")]
        arch: Arch,
    },
    /// Lint a PTX file, and run the tests with it in place of the embedded PTX
    PtxTest {
        /// The PTX file; the committed one by default
        file: Option<PathBuf>,
        /// The compiler back end that wrote it (sets the `.version` ceiling) [default: the one that its header names]
        #[arg(long, value_enum)]
        backend: Option<Backend>,
        /// The architecture it is for
        #[arg(long, default_value = "sm_90")]
        arch: Arch,
        /// Arguments of `cargo test --release` in place of all tests that launch kernels
        #[arg(last = true)]
        selection: Vec<String>,
    },
    /// Fetch ptxas into target/ (a Python wheel, by pip)
    FetchPtxas,
    /// Fetch Rust-CUDA's back end and what it needs into target/nvvm, as far as this machine can
    FetchNvvm,
    /// Hold the virtual GPU against the PTX manual on random modules
    PtxFuzz(fuzz::Options),
    /// Run a program in virtual machines that have RDMA devices (Soft-RoCE)
    RdmaVm(rdma_vm::Options),
    /// Say which instructions and Rust lines of the kernels a test run on the virtual GPU executes
    KernelCoverage(coverage::Options),
    /// Make single faults in the kernels, and look whether the checks notice
    Mutate(mutate::Options),
    /// Write the list of the library's public items, docs/PUBLIC-API.txt, or check it
    PublicApi(public_api::Options),
    /// Run the tests many times beside busy processes, and say which fail how often
    Flaky(flaky::Options),
    /// Keep one processor busy until standard input ends
    #[command(hide = true)]
    Spin,
    /// Check licences, sources and versions of all crates that anything here is built from
    /// (deny.toml)
    Deny,
    /// Say what this machine has for building PTX, and the remedy for what it lacks
    Doctor,
}

#[derive(Args)]
struct BuildPtx {
    /// The compiler back end: rustc's own nvptx64 target, or Rust-CUDA's rustc_codegen_nvvm
    #[arg(long, value_enum, default_value_t = Backend::InTree)]
    backend: Backend,
    /// The GPU architecture
    #[arg(long, default_value = "sm_90")]
    arch: Arch,
    /// Check that the committed PTX is what the sources give; write nothing
    #[arg(long, conflicts_with = "print_command")]
    check: bool,
    /// Fetch ptxas first where this machine has none
    #[arg(long)]
    fetch_ptxas: bool,
    /// Where to write the PTX, or with --check, the file to check [default: gpu/ptx/epoxide.ARCH.ptx; of nvvm target/ptx/epoxide.ARCH.nvvm.ptx]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Fetch first what the nvvm back end lacks
    #[arg(long)]
    fetch_nvvm: bool,
    /// Print the compiler's command line and stop
    #[arg(long)]
    print_command: bool,
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            match error.downcast_ref::<nvvm::MissingParts>() {
                Some(_) => ExitCode::from(EXIT_MISSING_PARTS),
                None => ExitCode::FAILURE,
            }
        }
    }
}

fn run(command: Command) -> Result<ExitCode> {
    let ws = Workspace::find()?;
    match command {
        Command::BuildPtx(args) => {
            if args.fetch_ptxas {
                ptxas::find_or_fetch(&ws)?;
            }
            if args.fetch_nvvm {
                nvvm::fetch(&ws)?;
            }
            let job = job::Job::new(&ws, args.backend, args.arch, args.out);
            match (args.print_command, args.check) {
                (true, _) => build::print_command(&ws, &job),
                (_, true) => check::run(&ws, &job),
                _ => build::run(&ws, &job),
            }
        }
        Command::PtxLint { file, backend, arch } => {
            let job = job::Job::of_file(&ws, backend, arch, file)?;
            let text = workspace::read(&job.out)?;
            lint::lint_file(&ws, &job, &job.out, &text)
        }
        Command::FetchPtxas => {
            println!("{}", ptxas::find_or_fetch(&ws)?.display());
            Ok(())
        }
        Command::PtxTest { file, backend, arch, selection } => {
            let job = job::Job::of_file(&ws, backend, arch, file)?;
            check::test_file(&ws, &job, &job.out, &selection)
        }
        Command::FetchNvvm => nvvm::fetch(&ws),
        Command::PtxFuzz(options) => fuzz::run(&options),
        Command::RdmaVm(options) => return rdma_vm::run(&ws, options),
        Command::KernelCoverage(options) => coverage::run(&ws, &options),
        Command::Mutate(options) => mutate::run(&ws, &options),
        Command::PublicApi(options) => return public_api::run(&ws, &options),
        Command::Flaky(options) => return flaky::run(&ws, &options),
        Command::Spin => flaky::spin(),
        Command::Deny => deny::run(&ws),
        Command::Doctor => doctor::run(&ws),
    }
    .map(|()| ExitCode::SUCCESS)
}
