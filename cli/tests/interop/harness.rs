//! Runs the tests. The standard harness would report "ok" for a test that found no tool to test
//! with; this one reports it as skipped, with the reason.

use std::any::Any;
use std::panic::{catch_unwind, resume_unwind};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::available_parallelism;

/// A test and its name.
pub type Test = (&'static str, fn());

/// The payload of the unwinding that a skip is: why.
struct Skipped(String);

/// Ends the test that calls it.
pub fn skip(reason: String) -> ! {
    resume_unwind(Box::new(Skipped(reason)))
}

/// Options of the command line, with the standard harness's names. Its other flags, such as
/// --nocapture, change nothing here.
#[derive(Default)]
struct Asked {
    filters: Vec<String>,
    not: Vec<String>,
    exact: bool,
    list: bool,
}

impl Asked {
    fn read(mut words: impl Iterator<Item = String>) -> Asked {
        let mut asked = Asked::default();
        while let Some(word) = words.next() {
            match &*word {
                "--exact" => asked.exact = true,
                "--list" => asked.list = true,
                "--skip" => asked.not.extend(words.next()),
                "--test-threads" | "--format" | "--color" => drop(words.next()),
                flag if flag.starts_with('-') => {}
                _ => asked.filters.push(word),
            }
        }
        asked
    }

    fn wants(&self, name: &str) -> bool {
        let fits = |filter: &String| if self.exact { name == filter } else { name.contains(&**filter) };
        (self.filters.is_empty() || self.filters.iter().any(fits)) && !self.not.iter().any(fits)
    }
}

/// Runs those of `tests` that the command line selects, as many at once as there are processors.
/// Returns exit code 101 if one failed.
pub fn run(tests: &[Test]) -> ExitCode {
    let asked = Asked::read(std::env::args().skip(1));
    let wanted: Vec<Test> = tests.iter().copied().filter(|(name, _)| asked.wants(name)).collect();
    if asked.list {
        wanted.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    println!("\nrunning {} tests", wanted.len());
    let (next, ended) = (AtomicUsize::new(0), Mutex::new([0; 3]));
    std::thread::scope(|scope| {
        for _ in 0..available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(&(name, test)) = wanted.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let (kind, said) = of(catch_unwind(test));
                    let mut ended = ended.lock().unwrap();
                    ended[kind] += 1;
                    println!("test {name} ... {said}");
                }
            });
        }
    });
    let [passed, failed, skipped] = ended.into_inner().unwrap();
    let (result, filtered) = (if failed == 0 { "ok" } else { "FAILED" }, tests.len() - wanted.len());
    println!(
        "\ntest result: {result}. {passed} passed; {failed} failed; {skipped} skipped; {filtered} filtered out"
    );
    if skipped > 0 {
        println!("what was skipped runs after tests/interop/setup.sh");
    }
    println!();
    ExitCode::from(if failed == 0 { 0 } else { 101 })
}

/// Returns whether a test passed, failed or was skipped, with its text. A panic has printed its
/// reason.
fn of(ended: Result<(), Box<dyn Any + Send>>) -> (usize, String) {
    match ended.map_err(|payload| payload.downcast::<Skipped>()) {
        Ok(()) => (0, "ok".into()),
        Err(Ok(skipped)) => (2, format!("skipped: {}", skipped.0)),
        Err(Err(_)) => (1, "FAILED".into()),
    }
}
