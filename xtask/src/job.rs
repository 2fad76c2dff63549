//! What is to be built or checked.

use std::path::PathBuf;

use crate::backend::{Arch, Backend};
use crate::workspace::Workspace;

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

    /// The build directory. Each (architecture, back end) has its own: the compiler's file name is always the same.
    pub fn target_dir(&self, ws: &Workspace) -> PathBuf {
        ws.target("ptx").join(format!("{}-{}", self.arch, self.backend))
    }
}
