//! This repository, as a workspace of the builder, and its tests on a PTX file.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use epoxide_build_ptx::job::Job;
use epoxide_build_ptx::lint::lint_file;
use epoxide_build_ptx::workspace::{Workspace, read, run as run_command};

/// The workspace around this crate: from cargo's variable, or from the place where it was compiled.
pub fn find() -> Result<Workspace> {
    let manifest_dir = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    let root = manifest_dir.parent().context("xtask/ has no parent directory")?;
    if !root.join("gpu/Cargo.toml").is_file() {
        bail!("{} is not the epoxide repository: run `cargo xtask` inside it", root.display());
    }
    Ok(Workspace::at(root))
}

/// Lints a PTX file, and runs the tests that launch kernels with it in place of the embedded PTX.
/// `selection` gives the tests as arguments of `cargo test --release`; without it, all run.
pub fn test_file(ws: &Workspace, job: &Job, file: &Path, selection: &[String]) -> Result<()> {
    const ALL: [&str; 4] = ["epoxide", "epoxide-testing", "epoxide-tests", "epoxide-cli"];
    // The tests run in other folders.
    let file = file.canonicalize().with_context(|| format!("cannot read {}", file.display()))?;
    lint_file(ws, job, &file, &read(&file)?)?;
    let mut tests = ws.cargo_in_callers_target();
    tests.env("EPOXIDE_PTX", &file).args(["test", "--release"]);
    match selection {
        [] => tests.args(ALL.iter().flat_map(|package| ["--package", package])),
        _ => tests.args(selection),
    };
    run_command(&mut tests).with_context(|| format!("the tests fail with {}", ws.display(&file)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use epoxide_build_ptx::described;
    use epoxide_build_ptx::kernels::Kernels;
    use epoxide_build_ptx::lint::{Expect, run};
    use epoxide_build_ptx::toolchain::rustup::CHANNEL;

    #[test]
    fn the_builder_pins_the_compiler_of_this_repository() {
        let pinned = read(&find().unwrap().root.join("rust-toolchain.toml")).unwrap();
        assert!(pinned.contains(&format!("channel = \"{CHANNEL}\"")), "{pinned}");
    }

    #[test]
    fn the_kernels_of_this_repository_are_found_by_what_they_depend_on() {
        let ws = find().unwrap();
        let kernels = Kernels::find(&ws, None, &ws.root).unwrap();
        assert_eq!((kernels.package.as_str(), kernels.stem.as_str()), ("epoxide-gpu", "epoxide"));
    }

    #[test]
    fn ptx_that_nobody_would_ship() {
        let described = described::kernels(epoxide_gpu::PTX);
        let version = epoxide_vgpu::ptx::Version { major: 8, minor: 4 };
        let expect = Expect { described: &described, version, target: "sm_90" };
        let samples = epoxide_testing::fuzz::sample_ptx(epoxide_gpu::PTX);
        epoxide_testing::fuzz::run("ptx lints", 500, &samples, |bytes| {
            let findings = run(&String::from_utf8_lossy(bytes), &expect);
            assert!(findings.is_sorted_by_key(|finding| finding.line));
        });
    }
}
