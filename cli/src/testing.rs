//! Flags for tests, as a command line has them.

use std::ffi::OsString;

use clap::Parser;

#[derive(Parser)]
struct Line<A: clap::Args> {
    #[command(flatten)]
    args: A,
}

/// What the flags in `words` are, behind the command's name, if they are any.
pub fn parse<A: clap::Args>(
    words: impl IntoIterator<Item = impl Into<OsString> + Clone>,
) -> Result<A, clap::Error> {
    Line::try_parse_from(words).map(|line| line.args)
}

/// The fake libnccl of the tests, compiled with these flags besides, and the folder that it is in.
pub fn fake_nccl(flags: &[&str]) -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("libnccl.so.2");
    let source = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/host/nccl/fake/lib.rs");
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let made = std::process::Command::new(rustc)
        .args(["--edition=2024", "--crate-type=cdylib", "--crate-name=nccl", "-Copt-level=1"])
        .args(flags)
        .arg("-o")
        .arg(&file)
        .arg(source)
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    (folder, file)
}
