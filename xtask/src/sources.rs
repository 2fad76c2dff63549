//! The fingerprint of the kernel sources: it shows that committed PTX is stale without compiling anything.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use hmac_sha256::Hash;

use crate::metadata::Metadata;
use crate::workspace::Workspace;

/// The package that holds the kernels.
pub const PACKAGE: &str = "epoxide-gpu";

/// What goes into the fingerprint, from the repository root.
const INPUTS: [&str; 4] = ["gpu/Cargo.toml", "gpu/src", "gpu/macros/Cargo.toml", "gpu/macros/src"];

/// SHA-256, as hex, over the kernel sources and the name and version of every registry package compiled into them.
pub fn fingerprint(ws: &Workspace, metadata: &Metadata) -> Result<String> {
    let mut files = Vec::new();
    for input in INPUTS {
        collect(&ws.root.join(input), &mut files)?;
    }
    files.sort();
    let mut hasher = Hash::new();
    for file in &files {
        let name = file.strip_prefix(&ws.root).unwrap_or(file).to_string_lossy().replace('\\', "/");
        let contents = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
        absorb(&mut hasher, name.as_bytes());
        absorb(&mut hasher, &contents);
    }
    for package in metadata.compiled_into(PACKAGE)?.iter().filter(|package| !package.local) {
        absorb(&mut hasher, format!("{} {}", package.name, package.version).as_bytes());
    }
    Ok(hasher.finalize().iter().fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    }))
}

/// Hashes a length before the bytes, so that two neighbours cannot trade bytes unnoticed.
fn absorb(hasher: &mut Hash, bytes: &[u8]) {
    hasher.update((bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

fn collect(path: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if !path.is_dir() {
        files.push(path.to_owned());
        return Ok(());
    }
    let entries = std::fs::read_dir(path).with_context(|| format!("cannot read {}", path.display()))?;
    for entry in entries {
        let child = entry.with_context(|| format!("cannot read {}", path.display()))?.path();
        if child.is_dir() || child.extension().is_some_and(|extension| extension == "rs") {
            collect(&child, files)?;
        }
    }
    Ok(())
}
