//! One test of this test binary, in a process of its own.

use std::process::Command;

/// The command that runs the test at `path`, as `cargo test -- --list` prints it, alone and with what it prints shown.
///
/// # Panics
/// Where this binary does not have exactly that test: asked to run a test that is not there, it would run none and succeed.
#[track_caller]
pub fn one_test(path: &str) -> Command {
    let exe = std::env::current_exe().expect("this test binary");
    let listed = Command::new(&exe).args(["--exact", path, "--list", "--format", "terse"]).output();
    let listed = listed.expect("this test binary lists its tests");
    let text = String::from_utf8_lossy(&listed.stdout);
    assert_eq!(text.trim(), format!("{path}: test"), "the tests of this binary at {path}");
    let mut command = Command::new(exe);
    command.args(["--exact", path, "--nocapture", "--test-threads=1"]);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_that_is_not_there_is_missed() {
        let _ = one_test("alone::tests::a_test_that_is_not_there_is_missed");
        for path in ["alone::tests::renamed", "alone::tests::a_test", "alone"] {
            assert!(std::panic::catch_unwind(|| one_test(path)).is_err(), "{path}");
        }
    }
}
