//! The command, as `cargo build-ptx` and `cargo xtask build-ptx` have it.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;

use crate::backend::{Arch, Backend};
use crate::coverage::{self, Missed};
use crate::job::{Commands, Job};
use crate::kernels::Kernels;
use crate::workspace::{Workspace, read};
use crate::{build, check, nvvm, ptxas};

/// The options of a build.
#[derive(Args, Debug)]
pub struct BuildPtx {
    /// The compiler back end: rustc's own nvptx64 target, or Rust-CUDA's rustc_codegen_nvvm
    #[arg(long, value_enum, default_value_t = Backend::InTree)]
    pub backend: Backend,
    /// The oldest GPUs that are to run the PTX [default: `arch` in [package.metadata.ptx], or sm_90]
    #[arg(long)]
    pub arch: Option<Arch>,
    /// Check that the committed PTX is what the sources give; write nothing
    #[arg(long, conflicts_with = "print_command")]
    pub check: bool,
    /// Report which instructions and Rust lines the tests have executed that ran with
    /// EPOXIDE_VGPU_COVERAGE=DIR, and stop
    #[arg(long, value_name = "DIR", conflicts_with_all = ["check", "print_command"])]
    pub coverage: Option<PathBuf>,
    /// List the lines and the instructions that were never executed
    #[arg(long, requires = "coverage")]
    pub missed: bool,
    /// Fetch ptxas first where this machine has none
    #[arg(long)]
    pub fetch_ptxas: bool,
    /// Where to write the PTX, or with --check, the file to check [default: ptx/NAME.ARCH.ptx of
    /// the package; of nvvm target/ptx/NAME.ARCH.nvvm.ptx]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Fetch first what the nvvm back end lacks
    #[arg(long)]
    pub fetch_nvvm: bool,
    /// Print the compiler's command line and stop
    #[arg(long)]
    pub print_command: bool,
    /// Print the compiler's command line before it runs
    #[arg(long, short)]
    pub verbose: bool,
    /// The package with the kernels [default: the one that depends on epoxide-simt]
    #[arg(long, short, value_name = "NAME")]
    pub package: Option<String>,
}

impl BuildPtx {
    /// Runs the command for a workspace. `command` is the user's command line. `test` runs on PTX
    /// from a compiler other than that of the committed PTX.
    pub fn run(
        self,
        ws: &Workspace,
        command: &str,
        test: &dyn Fn(&Workspace, &Job, &Path) -> Result<()>,
    ) -> Result<()> {
        if self.fetch_ptxas {
            ptxas::find_or_fetch(ws)?;
        }
        if self.fetch_nvvm {
            nvvm::fetch(ws)?;
        }
        let here = std::env::current_dir().context("the current folder")?;
        let kernels = Kernels::find(ws, self.package.as_deref(), &here)?;
        let mut job = Job::new(ws, kernels, command, self.backend, self.arch, self.out);
        if self.verbose {
            job.commands = Commands::Shown;
        }
        if let Some(directory) = &self.coverage {
            let missed = if self.missed { Missed::Listed } else { Missed::Counted };
            print!("{}", coverage::report(&read(&job.out)?, directory, missed)?);
            return Ok(());
        }
        match (self.print_command, self.check) {
            (true, _) => build::print_command(ws, &job),
            (_, true) => check::run(ws, &job, &|file| test(ws, &job, file)),
            _ => build::run(ws, &job),
        }
    }
}
