//! The fingerprint of the kernel sources: it shows that committed PTX is stale without compiling
//! anything.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use hmac_sha256::Hash;

use crate::metadata::{Metadata, Package};
use crate::workspace::Workspace;

/// SHA-256, as hex, over `package` and every package that is compiled into it. For packages on this
/// machine it covers the sources, for those from a registry name and version, for those from git
/// the commit as well. The sources are `Cargo.toml` and the folder of the library, `src/` of most,
/// and `files`, which [`others`] finds.
pub fn fingerprint(ws: &Workspace, metadata: &Metadata, package: &str, files: &[String]) -> Result<String> {
    let mut hasher = Hash::new();
    for package in metadata.compiled_into(package)? {
        if !package.local {
            absorb(&mut hasher, format!("{} {}", package.name, package.version).as_bytes());
            package.git.iter().for_each(|commit| absorb(&mut hasher, commit.as_bytes()));
            continue;
        }
        for file in &own_files(&package)? {
            absorb(&mut hasher, name_of(ws, &package, file).as_bytes());
            absorb_file(&mut hasher, file)?;
        }
    }
    for file in files {
        absorb(&mut hasher, file.as_bytes());
        absorb_file(&mut hasher, &ws.root.join(file))?;
    }
    Ok(hex(hasher.finalize()))
}

/// A hash as text.
pub fn hex(hash: [u8; 32]) -> String {
    hash.iter().fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

/// The files on this machine that the compiler has read beside those of the libraries' folders:
/// modules with a `path`, included files, build scripts. `dependencies` is what cargo writes beside
/// a product, `product: file file ..`. Products of builds are left out: those below `target/`, and
/// PTX, which a crate may include and whose header has the hash. So are folders, which build
/// scripts may name.
pub fn others(ws: &Workspace, metadata: &Metadata, package: &str, dependencies: &str) -> Result<Vec<String>> {
    let resolved =
        |path: &Path| path.canonicalize().with_context(|| format!("cannot find {}", path.display()));
    let root = resolved(&ws.root)?;
    let mut known = BTreeSet::new();
    for package in metadata.compiled_into(package)?.iter().filter(|package| package.local) {
        for file in own_files(package)? {
            known.insert(resolved(&file)?);
        }
    }
    let mut found = BTreeSet::new();
    for path in dependencies_of(dependencies) {
        let path = ws.root.join(path);
        // A build script may name files that do not exist.
        if !path.is_file() || path.extension().is_some_and(|extension| extension == "ptx") {
            continue;
        }
        let file = resolved(&path)?;
        if !known.contains(&file) && !file.starts_with(root.join("target")) {
            found.insert(from(&root, &file));
        }
    }
    Ok(found.into_iter().collect())
}

/// The paths behind the colon of cargo's lines, which have a backslash before each blank.
fn dependencies_of(text: &str) -> BTreeSet<String> {
    let lines = text.lines().filter_map(|line| line.split_once(": "));
    let words = lines
        .flat_map(|(_, files)| files.replace("\\ ", "\0").split(' ').map(str::to_owned).collect::<Vec<_>>());
    words.filter(|word| !word.is_empty()).map(|word| word.replace('\0', " ")).collect()
}

/// The path `to` as seen from a folder, both absolute.
fn from(folder: &Path, to: &Path) -> String {
    let shared = folder.components().zip(to.components()).take_while(|(a, b)| a == b).count();
    let up = folder.components().skip(shared).map(|_| "..".to_owned());
    let down = to.components().skip(shared).map(|part| part.as_os_str().to_string_lossy().into_owned());
    up.chain(down).collect::<Vec<_>>().join("/")
}

/// The files of a package that count without the compiler's list, in order.
fn own_files(package: &Package) -> Result<Vec<PathBuf>> {
    let mut files = vec![package.dir.join("Cargo.toml")];
    collect(&package.library, package, &mut files)?;
    files.sort();
    Ok(files)
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

fn absorb_file(hasher: &mut Hash, file: &Path) -> Result<()> {
    let contents = std::fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    absorb(hasher, &contents);
    Ok(())
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
        let metadata = |commit: &str| {
            Metadata::of(serde_json::json!({
                "packages": [
                    { "id": "own", "name": "own", "version": "1.0.0", "source": null,
                        "manifest_path": root.join("Cargo.toml"),
                        "targets": [{ "kind": ["lib"], "src_path": root.join("lib.rs") }] },
                    { "id": "dep", "name": "dep", "version": "1.0.0", "source": format!("git+https://h/d#{commit}"),
                        "manifest_path": "/c/dep/Cargo.toml", "targets": [] },
                ],
                "resolve": { "nodes": [{ "id": "own", "deps": [{ "pkg": "dep", "dep_kinds": [{ "kind": null }] }] }] },
            }))
        };
        let ws = Workspace::at(root);
        let fingerprint = |commit: &str| super::fingerprint(&ws, &metadata(commit), "own", &[]).unwrap();
        let first = fingerprint("aa");
        write("target/debug/out.rs", "generated");
        assert_eq!(fingerprint("aa"), first);
        assert_ne!(fingerprint("bb"), first);
        write("kernels/mod.rs", "edited");
        assert_ne!(fingerprint("aa"), first);
    }

    #[test]
    fn files_that_the_compiler_reads_elsewhere_count() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("own");
        let write = |name: &str, text: &str| crate::workspace::write(&root.join(name), text).unwrap();
        write("Cargo.toml", "");
        write("build.rs", "");
        write("src/lib.rs", "");
        write("src/a table.bin", "1 2 3");
        write("../shared/k.rs", "");
        write("target/ptx/out/generated.rs", "");
        write("ptx/own.sm_90.ptx", "");
        let metadata = Metadata::of(serde_json::json!({
            "packages": [{ "id": "own", "name": "own", "version": "1.0.0", "source": null,
                "manifest_path": root.join("Cargo.toml"),
                "targets": [{ "kind": ["lib"], "src_path": root.join("src/lib.rs") }] }],
            "resolve": { "nodes": [] },
        }));
        let ws = Workspace::at(&root);
        let list = format!(
            "/t/own.ptx: {0}/build.rs {0}/src/../../shared/k.rs {0}/src/a\\ table.bin {0}/src/lib.rs \
             {0}/target/ptx/out/generated.rs {0}/ptx/own.sm_90.ptx {0}/ptx {0}/missing.txt\n",
            root.display()
        );
        let files = others(&ws, &metadata, "own", &list).unwrap();
        assert_eq!(files, ["../shared/k.rs", "build.rs", "src/a table.bin"]);
        let fingerprint = || super::fingerprint(&ws, &metadata, "own", &files).unwrap();
        for (file, old) in [("../shared/k.rs", ""), ("build.rs", ""), ("src/a table.bin", "1 2 3")] {
            let before = fingerprint();
            write(file, "edited");
            assert_ne!(fingerprint(), before, "{file}");
            write(file, old);
            assert_eq!(fingerprint(), before, "{file}");
        }
        std::fs::remove_file(root.join("build.rs")).unwrap();
        let error = super::fingerprint(&ws, &metadata, "own", &files).unwrap_err();
        assert!(error.to_string().contains("build.rs"), "{error}");
    }
}
