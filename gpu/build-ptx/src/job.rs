//! Jobs: PTX to build or to check.

use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;

use crate::backend::{Arch, Backend};
use crate::header::Header;
use crate::kernels::Kernels;
use crate::workspace::{Workspace, read};

/// The target triple of both back ends.
pub const TARGET: &str = "nvptx64-nvidia-cuda";

/// One build to do or to check.
#[derive(Clone, Debug)]
pub struct Job {
    /// The kernels to compile.
    pub kernels: Kernels,
    /// The command that does it, for headers and remedies: `cargo build-ptx`.
    pub command: String,
    /// Options of the command that the user chose the kernels, the GPUs and the file by, for
    /// remedies: ` --arch sm_80`, with a blank in front of each. Headers leave them out.
    pub options: String,
    /// The back end that compiles.
    pub backend: Backend,
    /// For which GPU.
    pub arch: Arch,
    /// The file to write or to check.
    pub out: PathBuf,
    /// The compiler's command line in the output.
    pub commands: Commands,
}

/// The compiler's command line in the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Commands {
    /// The compiler's own messages alone.
    #[default]
    Hidden,
    /// The command line too.
    Shown,
}

impl Job {
    /// A job; without `arch` it is for the kernels' own architecture, without `out` it is about the file in the package's folder `ptx/`, or for nvvm about
    /// a file under `target/`.
    pub fn new(
        ws: &Workspace,
        kernels: Kernels,
        command: &str,
        backend: Backend,
        arch: Option<Arch>,
        out: Option<PathBuf>,
    ) -> Self {
        let arch = arch.unwrap_or_else(|| kernels.arch.clone());
        let (command, options, commands) = (command.to_owned(), String::new(), Commands::default());
        let mut job = Self { kernels, command, options, backend, arch, out: PathBuf::new(), commands };
        job.out = out.unwrap_or_else(|| job.default_out(ws));
        job
    }

    /// Default path of its PTX.
    pub fn default_out(&self, ws: &Workspace) -> PathBuf {
        let Self { kernels, arch, .. } = self;
        match self.backend {
            Backend::InTree => kernels.dir.join("ptx").join(format!("{}.{arch}.ptx", kernels.stem)),
            Backend::Nvvm => ws.target("ptx").join(format!("{}.{arch}.nvvm.ptx", kernels.stem)),
        }
    }

    /// The job that a PTX file belongs to: of the back end that its header names, unless `backend`
    /// says another.
    pub fn of_file(
        ws: &Workspace,
        kernels: Kernels,
        command: &str,
        backend: Option<Backend>,
        arch: Option<Arch>,
        file: Option<PathBuf>,
    ) -> Result<Self> {
        let backend = match (backend, &file) {
            (Some(backend), _) => backend,
            (None, Some(file)) => {
                let named = Header::parse(&read(file)?).map(|header| header.backend);
                let known = named.and_then(|name| Backend::from_str(&name, false).ok());
                known.unwrap_or(Backend::InTree)
            }
            (None, None) => Backend::InTree,
        };
        Ok(Self::new(ws, kernels, command, backend, arch, file))
    }

    /// The build directory. Each (architecture, back end) has its own: the compiler's file name is
    /// always the same.
    pub fn target_dir(&self, ws: &Workspace) -> PathBuf {
        ws.target("ptx").join(format!("{}-{}", self.arch, self.backend))
    }
}
