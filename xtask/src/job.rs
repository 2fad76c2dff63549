//! What is to be built or checked.

use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;

use crate::backend::{Arch, Backend};
use crate::header::Header;
use crate::workspace::{Workspace, read};

/// The target triple of both back ends.
pub const TARGET: &str = "nvptx64-nvidia-cuda";

/// One build to do or to check.
pub struct Job {
    /// Who compiles.
    pub backend: Backend,
    /// For which GPU.
    pub arch: Arch,
    /// The file to write or to check.
    pub out: PathBuf,
}

impl Job {
    /// A job; without `out` it is about the committed file, or for nvvm about a file under `target/`.
    pub fn new(ws: &Workspace, backend: Backend, arch: Arch, out: Option<PathBuf>) -> Self {
        let out = out.unwrap_or_else(|| match backend {
            Backend::InTree => ws.root.join(format!("gpu/ptx/epoxide.{arch}.ptx")),
            Backend::Nvvm => ws.target("ptx").join(format!("epoxide.{arch}.nvvm.ptx")),
        });
        Self { backend, arch, out }
    }

    /// The job that a PTX file belongs to: of the back end that its header names, unless `backend` says another.
    pub fn of_file(
        ws: &Workspace,
        backend: Option<Backend>,
        arch: Arch,
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
        Ok(Self::new(ws, backend, arch, file))
    }

    /// The build directory. Each (architecture, back end) has its own: the compiler's file name is always the same.
    pub fn target_dir(&self, ws: &Workspace) -> PathBuf {
        ws.target("ptx").join(format!("{}-{}", self.arch, self.backend))
    }

    /// The command that lints and tests a job's file.
    pub fn test_command(&self, ws: &Workspace) -> String {
        format!("cargo xtask ptx-test --arch {} {}", self.arch, ws.display(&self.out))
    }
}
