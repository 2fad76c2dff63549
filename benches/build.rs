//! Gives the library the commit that it is built from, as `EPOXIDE_COMMIT`: results name it.
#![forbid(unsafe_code)]

use std::process::Command;

/// Paths whose content decides the measurement; changes elsewhere do not make a commit dirty.
const MEASURED: [&str; 7] =
    ["../Cargo.lock", "../gpu", "../host", "../vgpu", "../tests/src", "src", "Cargo.toml"];

fn main() {
    let commit = commit().unwrap_or_else(|| "unknown".to_owned());
    println!("cargo::rustc-env=EPOXIDE_COMMIT={commit}");
    println!("cargo::rerun-if-changed=build.rs");
    let heads = ["HEAD", "logs/HEAD"].map(|name| git(&["rev-parse", "--git-path", name]));
    for path in MEASURED.map(str::to_owned).into_iter().chain(heads.into_iter().flatten()) {
        println!("cargo::rerun-if-changed={path}");
    }
}

fn commit() -> Option<String> {
    let commit = git(&["rev-parse", "--short=7", "HEAD"])?;
    let changes = git(&[&["status", "--porcelain", "--"], &MEASURED[..]].concat())?;
    Some(if changes.is_empty() { commit } else { format!("{commit}-dirty") })
}

/// Output of git; nothing if it fails.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").arg("--no-optional-locks").args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}
