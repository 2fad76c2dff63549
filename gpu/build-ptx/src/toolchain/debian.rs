//! Debian's compiler, unpacked under `target/` and never installed: its packages conflict with
//! rustup.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use super::Compiler;
use crate::packages;
use crate::workspace::{self, Workspace, capture};

/// Requirements of [`fetch`].
pub const REMEDY: &str = "on Debian 12 or a machine with its package lists: `apt-get update` as root, then build-ptx again, which unpacks \
                          rustc-web and its source under target/ (about 1 GB)";

/// Packages whose names hold no version.
const PACKAGES: [&str; 4] = ["rustc-web", "libstd-rust-web-dev", "rust-web-src", "rust-web-llvm"];

/// Runs the unpacked compiler with its own libraries. They are set here and nowhere else, so that
/// no other program picks them up.
const WRAPPER: &str = r#"#!/bin/sh
R=$(cd "$(dirname "$0")/root" && pwd)
LD_LIBRARY_PATH=$R/usr/lib/$(uname -m)-linux-gnu:$R/usr/lib exec "$R/usr/bin/rustc" "$@"
"#;

fn dir(ws: &Workspace) -> PathBuf {
    ws.target("kernel-toolchain")
}

/// The compiler unpacked earlier.
pub fn installed(ws: &Workspace) -> Result<Compiler> {
    let rustc = dir(ws).join("rustc");
    if !rustc.is_file() {
        bail!("not unpacked under target/ yet");
    }
    Compiler::probe(&rustc, "Debian packages")
}

/// Downloads and unpacks the packages. An interrupted download starts again.
pub fn fetch(ws: &Workspace) -> Result<()> {
    packages::check_tools()?;
    println!("fetching Debian's rustc and its library source (about 140 MB)");
    let partial = ws.target("kernel-toolchain.partial");
    packages::with_fresh_lists(|| download(&partial))?;
    packages::unpack(&partial, &partial.join("root"))?;
    let wrapper = partial.join("rustc");
    workspace::write(&wrapper, WRAPPER)?;
    capture(Command::new("chmod").arg("755").arg(&wrapper))?;
    workspace::publish_dir(&partial, &dir(ws))
}

fn download(into: &Path) -> Result<()> {
    // The library's package and LLVM's carry versions in their names; follow the archive.
    let library = dependency("libstd-rust-web-dev", "libstd-rust-web-")?;
    let llvm = dependency(&library, "libllvm")?;
    workspace::fresh_dir(into)?;
    packages::download(into, &[&PACKAGES[..], &[&library, &llvm]].concat())
}

/// The package with this prefix that `package` depends on.
fn dependency(package: &str, prefix: &str) -> Result<String> {
    let text = capture(Command::new("apt-cache").args(["depends", package]))?;
    parse_dependency(&text, prefix)
        .with_context(|| format!("the package lists have no `{package}` that depends on `{prefix}..`"))
}

fn parse_dependency(text: &str, prefix: &str) -> Option<String> {
    text.lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "))
        .find(|name| name.starts_with(prefix))
        .map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versioned_names_come_from_the_package_lists() {
        let text = "libstd-rust-web-dev\n  Depends: libstd-rust-web-1.96\n  Conflicts: <rustup>\n";
        assert_eq!(parse_dependency(text, "libstd-rust-web-").as_deref(), Some("libstd-rust-web-1.96"));
        assert_eq!(parse_dependency(text, "libllvm"), None);
    }
}
