//! Reads what `cargo test --no-fail-fast` prints: which tests of which programs failed.
//!
//! Invariant: a program counts as failed if and only if cargo reports it as failed. A test that
//! passes may print the output of a nested test run, in which tests fail.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

/// A test that failed.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Failure {
    /// The program, as `ep (tests/ep/main.rs)`.
    pub program: String,
    /// The test's name, or in brackets how a program ended that names none.
    pub test: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.program, self.test)
    }
}

/// The outcome of cargo.
#[derive(Debug, Clone, Copy)]
pub enum Outcome {
    Passed,
    /// With this exit code.
    Failed(i32),
    /// Ended by xtask after this time.
    Stopped(Duration),
}

/// The failures in the output of one run, each once and in order.
pub fn failures(printed: &str, cargo: Outcome) -> Vec<Failure> {
    let mut failures = BTreeSet::new();
    let mut current = Program::default();
    for line in printed.lines() {
        match program(line) {
            Some(name) => {
                failures.extend(current.failures());
                current = Program { name, ..Program::default() };
            }
            None => current.line(line),
        }
    }
    if let Outcome::Stopped(limit) = cargo {
        let test = format!("[still ran after {limit:?}, the --limit]");
        let program = if current.name.is_empty() { "cargo test" } else { &current.name };
        failures.insert(Failure { program: program.to_owned(), test });
    }
    failures.extend(current.failures());
    if let (true, Outcome::Failed(code)) = (failures.is_empty(), cargo) {
        failures.insert(Failure { program: "cargo test".into(), test: format!("[exit code {code}]") });
    }
    failures.into_iter().collect()
}

/// The output of a program so far.
#[derive(Debug, Default)]
struct Program {
    /// The same as [`Failure::program`]; empty before the first program.
    name: String,
    /// From lines such as `test NAME ... FAILED`.
    failed_lines: Vec<String>,
    /// From the last list under a line `failures:`.
    failed_list: Vec<String>,
    in_list: bool,
    /// Whether cargo reports that it failed.
    has_failed: bool,
    /// The exit status, where cargo reports it.
    ended: Option<String>,
}

impl Program {
    fn line(&mut self, line: &str) {
        if line == "failures:" {
            self.in_list = true;
            self.failed_list.clear();
            return;
        }
        if self.in_list {
            // Names are indented by four; the first such list is of outputs and has none.
            match line.strip_prefix("    ") {
                Some(name) => return self.failed_list.push(name.trim_end().to_owned()),
                None => self.in_list = false,
            }
        }
        if let Some(name) = line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... FAILED")) {
            self.failed_lines.push(name.trim_end_matches(" - should panic").to_owned());
        } else if line.starts_with("error: test failed, to rerun pass")
            || line.starts_with("error: doctest failed, to rerun pass")
        {
            self.has_failed = true;
        } else if let (true, Some(ended)) =
            (self.has_failed, line.trim().strip_prefix("process didn't exit successfully: "))
        {
            // The line begins with the name, in backquotes.
            let how = ended.rsplit_once("` (").map_or(ended, |(_, how)| how.trim_end_matches(')'));
            self.ended = Some(how.to_owned());
        }
    }

    fn failures(self) -> Vec<Failure> {
        if !self.has_failed {
            return Vec::new();
        }
        let mut tests = if self.failed_list.is_empty() { self.failed_lines } else { self.failed_list };
        if tests.is_empty() {
            tests.push(format!("[{}]", self.ended.as_deref().unwrap_or("no test is named")));
        }
        tests.into_iter().map(|test| Failure { program: self.name.clone(), test }).collect()
    }
}

/// The program that a line of cargo's starts, as `ep (tests/ep/main.rs)`.
fn program(line: &str) -> Option<String> {
    // Cargo aligns what it does to the right, by twelve columns.
    if let Some(package) = line.strip_prefix("   Doc-tests ") {
        return Some(format!("{package} (documentation)"));
    }
    let (source, file) = line.strip_prefix("     Running ")?.strip_suffix(')')?.rsplit_once(" (")?;
    let source = source.strip_prefix("unittests ").unwrap_or(source);
    let file = file.rsplit('/').next()?;
    // Behind the last dash is cargo's hash.
    Some(format!("{} ({source})", file.rsplit_once('-')?.0))
}

#[cfg(test)]
mod tests {
    use super::{Duration, Outcome};

    fn failures(text: &str) -> Vec<String> {
        let failures = super::failures(text, Outcome::Failed(101));
        failures.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn tests_are_named_with_their_program() {
        let text = "
    Finished `release` profile [optimized] target(s) in 0.10s
     Running unittests src/lib.rs (target/release/deps/epoxide-0a1b)

running 2 tests
test a::passes ... ok
test a::fails ... FAILED

failures:

---- a::fails stdout ----
thread 'a::fails' panicked at host/src/a.rs:1:1:
    an indented line

failures:
    a::fails

test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s

error: test failed, to rerun pass `-p epoxide --lib`
     Running tests/ep/main.rs (/else/where/release/deps/ep-77)
test b ... ok
test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.01s
   Doc-tests epoxide
test host/src/lib.rs - (line 5) ... FAILED

failures:
    host/src/lib.rs - (line 5)

test result: FAILED. 0 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.00s

error: doctest failed, to rerun pass `-p epoxide --doc`
error: 2 targets failed:
    `-p epoxide --lib`
    `-p epoxide --doc`
";
        assert_eq!(
            failures(text),
            ["epoxide (documentation): host/src/lib.rs - (line 5)", "epoxide (src/lib.rs): a::fails"]
        );
    }

    #[test]
    fn failures_that_a_passing_test_prints_do_not_count() {
        let text = "
     Running tests/ep/main.rs (target/release/deps/ep-77)
test inner ... FAILED
failures:
    inner
test result: FAILED. 0 passed; 1 failed
test outer ... ok
test result: ok. 1 passed; 0 failed
     Running tests/groups/main.rs (target/release/deps/groups-78)
test inner ... FAILED
failures:
    inner
test outer ... FAILED
failures:

---- outer stdout ----
failures:
    inner

failures:
    outer

test result: FAILED. 0 passed; 1 failed
error: test failed, to rerun pass `-p epoxide-testing --test groups`
";
        assert_eq!(failures(text), ["groups (tests/groups/main.rs): outer"]);
    }

    #[test]
    fn a_program_that_dies_is_named_with_its_signal() {
        let text = "
     Running tests/ep/main.rs (target/release/deps/ep-77)
test a ... ok
error: test failed, to rerun pass `-p epoxide-tests --test ep`

Caused by:
  process didn't exit successfully: `/t/release/deps/ep-77` (signal: 6, SIGABRT: process abort signal)
     Running tests/interop/main.rs (target/release/deps/interop-78)
test launchers::under_mpirun ... FAILED
test result: FAILED. 0 passed; 1 failed; 0 skipped; 0 filtered out
error: test failed, to rerun pass `-p epoxide-cli --test interop`
";
        assert_eq!(
            failures(text),
            [
                "ep (tests/ep/main.rs): [signal: 6, SIGABRT: process abort signal]",
                "interop (tests/interop/main.rs): launchers::under_mpirun"
            ]
        );
    }

    #[test]
    fn a_cargo_that_fails_without_a_test_is_a_failure() {
        assert_eq!(failures("error: could not compile `epoxide`"), ["cargo test: [exit code 101]"]);
        assert!(super::failures("", Outcome::Passed).is_empty());
    }

    #[test]
    fn a_run_that_was_stopped_has_failed_in_its_last_program() {
        let stopped = |text: &str| {
            let failures = super::failures(text, Outcome::Stopped(Duration::from_secs(90)));
            failures.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
        };
        let text = "
     Running tests/ep/main.rs (target/release/deps/ep-77)
test result: ok. 1 passed; 0 failed
     Running tests/vm/main.rs (target/release/deps/vm-78)
test a ... ok
";
        assert_eq!(stopped(text), "vm (tests/vm/main.rs): [still ran after 90s, the --limit]");
        assert_eq!(stopped(""), "cargo test: [still ran after 90s, the --limit]");
    }
}
