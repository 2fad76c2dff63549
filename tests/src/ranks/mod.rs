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
//! Processes are this test binary again, with the one test. It runs up to the same call of
//! [`Run::run`], where it turns into the rank and ends after it. So code before the call runs on
//! every rank too, and should be cheap.
//!
//! A rank that panics or returns an error fails the test: the group is aborted, so that the other
//! ranks do not wait. The panic of the test names the rank that failed first, with its message, its
//! backtrace, and the ends of the others. After the timeout it lists for every rank the current
//! operation ([`Context::doing`] and the calls of its group) and its backtrace. All processes are
//! ended and reaped in every case; their ports are [`HeldPort`](super::HeldPort)s.
//!
//! A [`Session`] keeps the ranks and their group for many tests.

mod capture;
mod child;
mod context;
mod noted;
mod outcome;
mod processes;
mod report;
mod run;
mod session;
mod slot;
mod threads;
mod trace;
mod verdict;

pub use context::Context;
pub use outcome::{Outcome, SkipCode};
pub use report::{End, Failed, Kind, RankReport};
pub use run::Run;
pub use session::Session;
pub use verdict::{Cause, IntoVerdict};
