//! One test of this test binary, in a process of its own.

use std::collections::HashSet;
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

/// The command that runs the test at `path`, as `cargo test -- --list` prints it, alone and with
/// what it prints shown.
///
/// # Panics
/// This binary does not have exactly that test. With the name of an absent test it would run none
/// and succeed.
#[track_caller]
pub fn one_test(path: &str) -> Command {
    assert!(tests().contains(path), "this test binary has no test {path}");
    let mut command = Command::new(this_binary());
    command.args(["--exact", path, "--nocapture", "--test-threads=1"]);
    command
}

/// The paths of this binary's tests.
fn tests() -> &'static HashSet<String> {
    static TESTS: OnceLock<HashSet<String>> = OnceLock::new();
    TESTS.get_or_init(|| {
        let listed = Command::new(this_binary()).args(["--list", "--format", "terse"]).output();
        let listed = listed.expect("this test binary lists its tests");
        let text = String::from_utf8_lossy(&listed.stdout);
        text.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect()
    })
}

fn this_binary() -> PathBuf {
    std::env::current_exe().expect("this test binary")
}

/// Names the test that a process was started for by [`run`].
const ALONE: &str = "EPOXIDE_TEST_ALONE";

/// Runs `test`, the body of the test at `path`, in a process that runs nothing else. Tests that
/// count descriptors, threads or memory of their process need one.
///
/// # Panics
/// That process fails; the message has its output.
#[track_caller]
pub fn run(path: &str, test: impl FnOnce()) {
    if std::env::var_os(ALONE).is_some_and(|named| named == path) {
        return test();
    }
    let ended = one_test(path).env(ALONE, path).output().expect("this test binary starts");
    let [out, err] = [&ended.stdout, &ended.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(ended.status.success(), "{path}, alone in its process: {}\n{out}\n{err}", ended.status);
    print!("{out}");
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

    #[test]
    fn a_test_that_fails_alone_fails() {
        let own = std::process::id();
        let path = "alone::tests::a_test_that_fails_alone_fails";
        let failed = std::panic::catch_unwind(|| {
            run(path, || panic!("process {}, alone", std::process::id()));
        });
        if std::env::var_os(ALONE).is_some() {
            // This process runs the test, and fails.
            std::panic::resume_unwind(failed.unwrap_err());
        }
        let message = *failed.unwrap_err().downcast::<String>().unwrap();
        assert!(message.contains("alone\n") && !message.contains(&format!("process {own},")), "{message}");
    }
}
