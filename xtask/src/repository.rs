//! This repository, as a workspace of the builder, and its tests on a PTX file.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use epoxide_build_ptx::job::Job;
use epoxide_build_ptx::lint::lint_file;
use epoxide_build_ptx::workspace::{Workspace, describe, read};

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
    run_tests(&mut tests).with_context(|| format!("the tests fail with {}", ws.display(&file)))
}

/// Runs test programs and shows what they print. An error where one fails, or where no test runs.
pub fn run_tests(command: &mut Command) -> Result<()> {
    let spawned = command.stdout(Stdio::piped()).spawn();
    let mut child = spawned.with_context(|| format!("cannot start `{}`", describe(command)))?;
    let printed = child.stdout.take().context("the output of the tests")?;
    let mut number = 0;
    let mut shown = std::io::stdout();
    for line in BufReader::new(printed).split(b'\n') {
        let line = line.context("cannot read the output of the tests")?;
        number += tests_in(&String::from_utf8_lossy(&line));
        shown.write_all(&line).and_then(|()| shown.write_all(b"\n")).context("cannot print")?;
    }
    let status = child.wait().context("cannot wait for the tests")?;
    ensure!(status.success(), "`{}` failed: {status}", describe(command));
    ensure_tests(number, command)
}

/// An error where no test has run: a name that is misspelt selects none, and the program succeeds.
pub fn ensure_tests(number: u64, command: &Command) -> Result<()> {
    ensure!(number > 0, "`{}` runs no test: no test has such a name", describe(command));
    Ok(())
}

/// The number of tests that test programs start, by what they print.
pub fn tests_in(printed: &str) -> u64 {
    let counts = printed.lines().filter_map(|line| {
        let (count, tests) = line.strip_prefix("running ")?.split_once(' ')?;
        count.parse::<u64>().ok().filter(|_| matches!(tests.trim_end(), "test" | "tests"))
    });
    counts.sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use epoxide_build_ptx::described;
    use epoxide_build_ptx::kernels::Kernels;
    use epoxide_build_ptx::lint::{Expect, run};
    use epoxide_build_ptx::toolchain::rustup::CHANNEL;

    #[test]
    fn a_name_that_no_test_has_is_an_error() {
        let tests = |script: &str| run_tests(Command::new("sh").args(["-c", script]));
        tests("printf 'running 0 tests\\n\\nrunning 1 test\\n'").unwrap();
        let error = tests("echo running 0 tests").unwrap_err().to_string();
        assert!(error.contains("runs no test"), "{error}");
        let error = tests("echo running 2 tests; exit 3").unwrap_err().to_string();
        assert!(error.contains("exit status: 3"), "{error}");
        assert_eq!(tests_in("running 12 tests\ntest a ... ok\nrunning late\nrunning 1 test\n"), 13);
    }

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
