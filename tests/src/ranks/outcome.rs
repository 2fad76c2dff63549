//! Outcomes other than a failure: a test passed, or was skipped.

use std::fmt::Display;

use serde::{Deserialize, Serialize};

/// The outcome of a test that did not fail.
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

/// Why a test is skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum SkipCode {
    /// There is no GPU, or no driver for it.
    NoGpu,
    /// There are fewer GPUs than ranks.
    TooFewGpus,
    /// The GPUs cannot reach each other's memory.
    NoPeerAccess,
    /// There is no RDMA device.
    NoRdma,
    /// The test needs an even number of ranks.
    OddWorldSize,
    /// The test needs more ranks.
    TooFewRanks,
    /// A program that the test compares with is not installed.
    NoProgram,
    /// The operating system or the build lacks something.
    Unsupported,
}

impl Display for SkipCode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            SkipCode::NoGpu => "no GPU",
            SkipCode::TooFewGpus => "too few GPUs",
            SkipCode::NoPeerAccess => "no peer access",
            SkipCode::NoRdma => "no RDMA",
            SkipCode::OddWorldSize => "odd world size",
            SkipCode::TooFewRanks => "too few ranks",
            SkipCode::NoProgram => "a program is missing",
            SkipCode::Unsupported => "not supported here",
        })
    }
}

/// The payload of the unwinding that a skip is.
pub(super) struct Skip {
    pub code: SkipCode,
    pub reason: String,
}
