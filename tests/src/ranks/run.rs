//! The settings of a test's run.

use std::panic::Location;
use std::time::Duration;

use super::context::Context;
use super::outcome::Outcome;
use super::report::Failed;
use super::session::Session;
use super::verdict::IntoVerdict;

/// The settings of a test's run on several ranks.
#[derive(Debug, Clone)]
pub struct Run {
    pub(super) size: u32,
    /// Each rank is a process; else a thread.
    pub(super) processes: bool,
    pub(super) timeout: Duration,
    /// The path of the test, where it is given.
    pub(super) test: Option<String>,
}

impl Run {
    /// On `size` ranks, as threads, for at most a minute.
    pub fn new(size: u32) -> Run {
        Run { size, processes: false, timeout: Duration::from_secs(60), test: None }
    }

    /// Each rank is a process.
    pub fn processes(self) -> Run {
        Run { processes: true, ..self }
    }

    /// Each rank is a thread. One that hangs cannot be ended: it is left behind when the test
    /// fails.
    pub fn threads(self) -> Run {
        Run { processes: false, ..self }
    }

    /// The time limit of the ranks: to start, and for each test of a [`Session`].
    pub fn timeout(self, timeout: Duration) -> Run {
        Run { timeout, ..self }
    }

    /// The path of the test as `cargo test -- --list` prints it, which processes are started with.
    /// Needed only if the thread's name and the function do not determine it: in a helper that is
    /// called under `--test-threads=1`.
    pub fn test(self, path: impl Into<String>) -> Run {
        Run { test: Some(path.into()), ..self }
    }

    /// Runs `rank_main` on every rank.
    ///
    /// # Panics
    /// Where [`Run::try_run`] returns an error, with that.
    #[track_caller]
    pub fn run<R: IntoVerdict>(self, rank_main: impl Fn(&Context) -> R + Send + Sync + 'static) -> Outcome {
        match self.try_run(rank_main) {
            Ok(outcome) => outcome,
            Err(failed) => panic!("{failed}"),
        }
    }

    /// Runs `rank_main` on every rank.
    ///
    /// # Errors
    /// A rank failed, died, or took too long; some ranks skip the test and others do not; or the
    /// ranks cannot be started.
    #[track_caller]
    pub fn try_run<R: IntoVerdict>(
        self,
        rank_main: impl Fn(&Context) -> R + Send + Sync + 'static,
    ) -> Result<Outcome, Failed> {
        let function = std::any::type_name_of_val(&rank_main);
        Session::open(self, Location::caller(), Some(function))?.try_test("", rank_main)
    }

    /// Starts the ranks for several tests.
    ///
    /// # Panics
    /// Where the ranks cannot be started.
    #[track_caller]
    pub fn session(self) -> Session {
        match Session::open(self, Location::caller(), None) {
            Ok(session) => session,
            Err(failed) => panic!("{failed}"),
        }
    }
}
