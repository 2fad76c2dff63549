//! How a rank says that it is through with a test.

use std::any::Any;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::{Deserialize, Serialize};

use super::capture::{self, Panic};
use super::context::Context;
use super::outcome::{Skip, SkipCode};
use epoxide::internal::group::panic_text;

/// Result of a rank's function: nothing, or a result whose error fails the test.
pub trait IntoVerdict {
    /// The error's text.
    fn into_result(self) -> Result<(), String>;
}

impl IntoVerdict for () {
    fn into_result(self) -> Result<(), String> {
        Ok(())
    }
}

impl<E: Display> IntoVerdict for Result<(), E> {
    fn into_result(self) -> Result<(), String> {
        self.map_err(|error| error.to_string())
    }
}

/// How a test ended on a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Verdict {
    Passed,
    Skipped { code: SkipCode, reason: String },
    Failed { text: String, backtrace: Option<String> },
}

/// A rank's function.
pub(super) type RankMain = dyn Fn(&Context) -> Verdict + Send + Sync;

/// Runs a rank's function to its verdict, panics included.
pub(super) fn judge<R: IntoVerdict>(rank_main: impl Fn(&Context) -> R, ctx: &Context) -> Verdict {
    capture::arm();
    // Half-done state is the test's own; the ranks are not used after a failure.
    let ended = catch_unwind(AssertUnwindSafe(|| rank_main(ctx).into_result()));
    let panic = capture::disarm();
    match ended {
        Ok(Ok(())) => Verdict::Passed,
        Ok(Err(text)) => Verdict::Failed { text, backtrace: None },
        Err(payload) => of_panic(&*payload, panic),
    }
}

fn of_panic(payload: &(dyn Any + Send), panic: Option<Panic>) -> Verdict {
    if let Some(skip) = payload.downcast_ref::<Skip>() {
        return Verdict::Skipped { code: skip.code, reason: skip.reason.clone() };
    }
    let text = panic_text(payload);
    match panic {
        Some(Panic { place, backtrace }) => {
            Verdict::Failed { text: format!("panicked at {place}: {text}"), backtrace: Some(backtrace) }
        }
        None => Verdict::Failed { text: format!("panicked: {text}"), backtrace: None },
    }
}
