//! The fingerprint of the kernel sources: it shows that committed PTX is stale without compiling
//! anything.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use hmac_sha256::Hash;

use crate::metadata::{Metadata, Package};
use crate::workspace::Workspace;

/// SHA-256, as hex, over `package` and every package that is compiled into it. For packages on this
/// machine it covers the sources, for those from a registry name and version, for those from git
/// the commit as well. The sources are `Cargo.toml` and the folder of the library, `src/` of most.
pub fn fingerprint(ws: &Workspace, metadata: &Metadata, package: &str) -> Result<String> {
    let mut hasher = Hash::new();
    for package in metadata.compiled_into(package)? {
        if !package.local {
            absorb(&mut hasher, format!("{} {}", package.name, package.version).as_bytes());
            package.git.iter().for_each(|commit| absorb(&mut hasher, commit.as_bytes()));
            continue;
        }
        let mut files = Vec::new();
        files.push(package.dir.join("Cargo.toml"));
        collect(&package.library, &package, &mut files)?;
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

/// Collects the Rust files in a folder of a package, without the package's own folder `target`.
fn collect(folder: &Path, package: &Package, files: &mut Vec<PathBuf>) -> Result<()> {
    let reading = || format!("cannot read {}", folder.display());
    for entry in std::fs::read_dir(folder).with_context(reading)? {
        let child = entry.with_context(reading)?.path();
        if child.is_dir() {
            if child != package.dir.join("target") {
                collect(&child, package, files)?;
            }
        } else if child.extension().is_some_and(|extension| extension == "rs") {
            files.push(child);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_in_other_folders_and_commits_count() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let write = |name: &str, text: &str| crate::workspace::write(&root.join(name), text).unwrap();
        write("Cargo.toml", "");
        write("lib.rs", "mod kernels;");
        write("kernels/mod.rs", "");
        let fingerprint = |commit: &str| {
            let metadata = Metadata::of(serde_json::json!({
                "packages": [
                    { "id": "own", "name": "own", "version": "1.0.0", "source": null,
                        "manifest_path": root.join("Cargo.toml"),
                        "targets": [{ "kind": ["lib"], "src_path": root.join("lib.rs") }] },
                    { "id": "dep", "name": "dep", "version": "1.0.0", "source": format!("git+https://h/d#{commit}"),
                        "manifest_path": "/c/dep/Cargo.toml", "targets": [] },
                ],
                "resolve": { "nodes": [{ "id": "own", "deps": [{ "pkg": "dep", "dep_kinds": [{ "kind": null }] }] }] },
            }));
            super::fingerprint(&Workspace::at(root), &metadata, "own").unwrap()
        };
        let first = fingerprint("aa");
        write("target/debug/out.rs", "generated");
        assert_eq!(fingerprint("aa"), first);
        assert_ne!(fingerprint("bb"), first);
        write("kernels/mod.rs", "edited");
        assert_ne!(fingerprint("aa"), first);
    }
}
