//! The fingerprint of the kernel sources: it shows that committed PTX is stale without compiling
//! anything.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use hmac_sha256::Hash;

use crate::metadata::{Metadata, Package};
use crate::workspace::Workspace;

/// SHA-256, as hex, over the sources of `package` and of every package on this machine that is
/// compiled into it, and over name and version of every one from a registry. The sources are
/// `Cargo.toml` and `src/` of a package.
pub fn fingerprint(ws: &Workspace, metadata: &Metadata, package: &str) -> Result<String> {
    let mut hasher = Hash::new();
    for package in metadata.compiled_into(package)? {
        if !package.local {
            absorb(&mut hasher, format!("{} {}", package.name, package.version).as_bytes());
            continue;
        }
        let mut files = Vec::new();
        for input in ["Cargo.toml", "src"] {
            collect(&package.dir.join(input), &mut files)?;
        }
        files.sort();
        for file in &files {
            let name = name_of(ws, &package, file);
            let contents = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
            absorb(&mut hasher, name.as_bytes());
            absorb(&mut hasher, &contents);
        }
    }
    Ok(hasher.finalize().iter().fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    }))
}

/// The file as seen from the workspace's root, or from the package where that lies elsewhere.
fn name_of(ws: &Workspace, package: &Package, file: &Path) -> String {
    let below = |dir: &Path| file.strip_prefix(dir).map(|path| path.to_string_lossy().replace('\\', "/"));
    below(&ws.root)
        .or_else(|_| below(&package.dir).map(|path| format!("{}/{path}", package.name)))
        .unwrap_or_else(|_| file.display().to_string())
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
