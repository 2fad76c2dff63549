//! How a test ended well.

use serde::{Deserialize, Serialize};

use super::skip::SkipCode;

/// How a test that did not fail ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[must_use = "a test that was skipped has shown nothing"]
pub enum Outcome {
    /// Every rank passed.
    Passed,
    /// Every rank skipped it, for the same cause.
    Skipped {
        /// The missing requirement.
        code: SkipCode,
        /// In words, from rank 0.
        reason: String,
    },
}
