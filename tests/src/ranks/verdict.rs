//! The result of a test on a rank.

use std::any::Any;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};

use serde::{Deserialize, Serialize};

use super::capture::{self, Panic};
use super::context::Context;
use super::outcome::{Skip, SkipCode};
use epoxide::Error;
use epoxide::internal::group::panic_text;

/// Why a rank failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    /// Something of its own.
    Own,
    /// Another rank: an operation of the group failed, or the group was given up.
    Group,
}

impl Cause {
    fn of(error: &dyn Any) -> Cause {
        match error.downcast_ref() {
            Some(Error::Aborted { .. } | Error::Group { .. }) => Cause::Group,
            _ => Cause::Own,
        }
    }
}

/// Result of a rank's function: nothing, or a result whose error fails the test.
pub trait IntoVerdict {
    /// The error's text, and its cause.
    fn into_result(self) -> Result<(), (String, Cause)>;
}

impl IntoVerdict for () {
    fn into_result(self) -> Result<(), (String, Cause)> {
        Ok(())
    }
}

impl<E: Display + 'static> IntoVerdict for Result<(), E> {
    fn into_result(self) -> Result<(), (String, Cause)> {
        self.map_err(|error| (error.to_string(), Cause::of(&error)))
    }
}

/// The end of a test on a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Verdict {
    Passed,
    Skipped { code: SkipCode, reason: String },
    Failed { text: String, cause: Cause, backtrace: Option<String> },
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
        Ok(Err((text, cause))) => Verdict::Failed { text, cause, backtrace: None },
        Err(payload) => of_panic(&*payload, panic),
    }
}

fn of_panic(payload: &(dyn Any + Send), panic: Option<Panic>) -> Verdict {
    if let Some(skip) = payload.downcast_ref::<Skip>() {
        return Verdict::Skipped { code: skip.code, reason: skip.reason.clone() };
    }
    let text = panic_text(payload);
    let (text, backtrace) = match panic {
        Some(Panic { place, backtrace }) => (format!("panicked at {place}: {text}"), Some(backtrace)),
        None => (format!("panicked: {text}"), None),
    };
    Verdict::Failed { text, cause: Cause::Own, backtrace }
}
