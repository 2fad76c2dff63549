//! The command, as `cargo build-ptx` and `cargo xtask build-ptx` have it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;

use crate::backend::{Arch, Backend};
use crate::coverage::{self, Missed};
use crate::job::{Commands, Job};
use crate::kernels::Kernels;
use crate::workspace::{Workspace, quote, read};
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
        let job = self.job(ws, kernels, command);
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

    /// The job that the options ask for.
    fn job(&self, ws: &Workspace, kernels: Kernels, command: &str) -> Job {
        let (arch, out) = (self.arch.clone(), self.out.clone());
        let mut job = Job::new(ws, kernels, command, self.backend, arch, out);
        job.options = self.choice();
        if self.verbose {
            job.commands = Commands::Shown;
        }
        job
    }

    /// The options that choose the kernels, the GPUs and the file, each behind a blank.
    fn choice(&self) -> String {
        let arch = self.arch.as_ref().map(Arch::to_string);
        let chosen = [
            ("--package", self.package.as_ref().map(OsStr::new)),
            ("--arch", arch.as_ref().map(OsStr::new)),
            ("--out", self.out.as_ref().map(|out| out.as_os_str())),
        ];
        let given = chosen.iter().filter_map(|(option, value)| Some((option, (*value)?)));
        given.map(|(option, value)| format!(" {option} {}", quote(value))).collect()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        build: BuildPtx,
    }

    #[test]
    fn the_remedy_of_a_check_builds_the_file_that_was_checked() {
        let remedy = |options: &[&str]| {
            let kernels = Kernels {
                package: "k".into(),
                library: "k".into(),
                dir: "/w/k".into(),
                stem: "k".into(),
                arch: Arch::default(),
            };
            let cli = Cli::parse_from(["build-ptx", "--check"].iter().chain(options));
            let job = cli.build.job(&Workspace::at("/w"), kernels, "cargo build-ptx");
            assert_eq!(job.command, "cargo build-ptx", "headers name the command alone");
            check::fix(&job)
        };
        assert_eq!(remedy(&[]), "run `cargo build-ptx` and commit the result");
        assert_eq!(
            remedy(&["--arch", "sm_80", "-p", "k", "--out", "of k.ptx"]),
            "run `cargo build-ptx --package k --arch sm_80 --out 'of k.ptx'` and commit the result"
        );
        assert_eq!(
            remedy(&["--backend", "nvvm", "--arch", "sm_90"]),
            "run `cargo build-ptx --arch sm_90 --backend nvvm`"
        );
    }
}
