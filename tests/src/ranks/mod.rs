//! Tests on several ranks: the same function on each, as threads of the test or as processes.
//!
//! ```no_run
//! use std::time::Duration;
//! use epoxide_testing::ranks::{Run, SkipCode};
//!
//! #[test]
//! fn ranks_agree() {
//!     let _ = Run::new(4).processes().timeout(Duration::from_secs(20)).run(|ctx| -> epoxide::Result<()> {
//!         if ctx.size() % 2 == 1 {
//!             ctx.skip(SkipCode::OddWorldSize, "pairs of ranks are needed");
//!         }
//!         let all = ctx.group()?.all_gather(&[ctx.rank() as u8])?;
//!         assert_eq!(all.concat(), [0, 1, 2, 3]);
//!         Ok(())
//!     });
//! }
//! ```
//!
//! Processes are this test binary again, with the one test: it runs up to the same call of [`Run::run`], where it turns
//! into the rank and ends after it. So what stands before the call runs on every rank too, and should be cheap.
//!
//! A rank that panics or returns an error fails the test: the group is given up, so that the other ranks do not wait, and
//! the panic of the test tells which rank failed first, with its message, its backtrace, and how the others ended. After
//! the timeout it tells for every rank what it was doing ([`Context::doing`] and the calls of its group) and its
//! backtrace. All processes are ended and reaped in every case; their ports are [`HeldPort`](super::HeldPort)s.
//!
//! A [`Session`] keeps the ranks and their group for many tests.

mod capture;
mod child;
mod context;
mod noted;
mod processes;
mod report;
mod session;
mod skip;
mod slot;
mod started;
mod threads;
mod trace;
mod verdict;

use std::panic::Location;
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use context::Context;
pub use report::{End, Failed, Kind, RankReport};
pub use session::Session;
pub use skip::SkipCode;
pub use verdict::IntoVerdict;

/// How a test that did not fail ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[must_use = "a test that was skipped has shown nothing"]
pub enum Outcome {
    /// Every rank passed.
    Passed,
    /// Every rank skipped it, for the same cause.
    Skipped {
        /// What is lacking.
        code: SkipCode,
        /// In words, from rank 0.
        reason: String,
    },
}

/// How a test is run on several ranks.
#[derive(Debug, Clone)]
pub struct Run {
    size: u32,
    processes: bool,
    timeout: Duration,
    test: Option<String>,
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

    /// Each rank is a thread. One that hangs cannot be ended: it is left behind when the test fails.
    pub fn threads(self) -> Run {
        Run { processes: false, ..self }
    }

    /// How long the ranks may take: to start, and for each test of a [`Session`].
    pub fn timeout(self, timeout: Duration) -> Run {
        Run { timeout, ..self }
    }

    /// The path of the test as `cargo test -- --list` prints it, which processes are started with. Needed only where it
    /// cannot be told from the thread's name and the function: in a helper that is called under `--test-threads=1`.
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
    /// Where a rank failed, died, or took too long; where some ranks skip the test and others do not; and where the
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
