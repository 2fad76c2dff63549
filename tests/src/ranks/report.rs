//! The report of a failed test, rank by rank.

use std::fmt::Display;
use std::time::{Duration, SystemTime};

use super::outcome::Outcome;
use super::outcome::SkipCode;
use super::verdict::{Cause, Verdict};
use epoxide_launch::RankExit;

/// The end of a test on one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum End {
    /// It passed.
    Passed,
    /// It was skipped.
    Skipped {
        /// The missing requirement.
        code: SkipCode,
        /// In words.
        reason: String,
    },
    /// It returned an error or panicked.
    Failed {
        /// The error, or the panic's place and message.
        text: String,
        /// Whether another rank's failure came before.
        cause: Cause,
        /// The panic's backtrace.
        backtrace: Option<String>,
    },
    /// The rank's process ended before the test did.
    Died(RankExit),
    /// The rank had not finished when the wait for it ended.
    Unfinished {
        /// The kernel's state of the rank's threads, and the backtrace of the one that ran the
        /// test.
        trace: String,
    },
}

impl End {
    /// Neither passed nor skipped.
    pub fn is_failure(&self) -> bool {
        !matches!(self, End::Passed | End::Skipped { .. })
    }
}

impl From<Verdict> for End {
    fn from(verdict: Verdict) -> End {
        match verdict {
            Verdict::Passed => End::Passed,
            Verdict::Skipped { code, reason } => End::Skipped { code, reason },
            Verdict::Failed { text, cause, backtrace } => End::Failed { text, cause, backtrace },
        }
    }
}

impl Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            End::Passed => f.write_str("passed"),
            End::Skipped { code, reason } => write!(f, "skipped ({code}: {reason})"),
            End::Failed { text, .. } => f.write_str(text),
            End::Died(exit) => write!(f, "{exit} before the test was through"),
            End::Unfinished { .. } => f.write_str("did not end"),
        }
    }
}

/// Report about one rank of a failed test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankReport {
    /// The rank.
    pub rank: u32,
    /// The end of the test on the rank.
    pub end: End,
    /// Its last operation; empty if it reported none.
    pub operation: String,
    /// The last of what its process printed.
    pub output: String,
}

impl Display for RankReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {}: {}", self.rank, self.end)?;
        if !self.end.is_failure() {
            return Ok(());
        }
        let mut part = |title: &str, text: &str| {
            if text.is_empty() {
                return Ok(());
            }
            write!(f, "\n  {title}:")?;
            text.lines().try_for_each(|line| write!(f, "\n    {line}"))
        };
        part("last operation", &self.operation)?;
        match &self.end {
            End::Failed { backtrace: Some(text), .. } => part("backtrace", text)?,
            End::Unfinished { trace } => part("threads and backtrace", trace)?,
            _ => {}
        }
        part("output", &self.output)
    }
}

/// Kind of failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// A rank failed or died.
    Failed,
    /// The timeout passed.
    TimedOut,
    /// Some ranks skipped the test and others did not, or for another cause.
    Disagreement,
    /// The ranks could not be started.
    NotStarted,
}

/// Why a test on several ranks failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failed {
    /// The test.
    pub test: String,
    /// Kind of failure.
    pub kind: Kind,
    /// One line.
    pub summary: String,
    /// All ranks: those that failed before the others, in the order in which they did.
    pub ranks: Vec<RankReport>,
}

impl Failed {
    pub(super) fn to_start(test: &str, reason: impl Display) -> Failed {
        let summary = format!("the ranks could not be started: {reason}");
        Failed { test: test.to_owned(), kind: Kind::NotStarted, summary, ranks: Vec::new() }
    }
}

impl Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.test, self.summary)?;
        self.ranks.iter().try_for_each(|rank| write!(f, "\n{rank}"))
    }
}

impl std::error::Error for Failed {}

/// The outcome of a test, from all ranks.
pub(super) fn evaluate(
    test: &str,
    timed_out: Option<Duration>,
    mut ranks: Vec<(RankReport, SystemTime)>,
) -> Result<Outcome, Failed> {
    if ranks.iter().all(|(report, _)| report.end == End::Passed) {
        return Ok(Outcome::Passed);
    }
    let codes = |report: &RankReport| match &report.end {
        End::Skipped { code, .. } => Some(*code),
        _ => None,
    };
    let skipped: Vec<_> = ranks.iter().filter_map(|(report, _)| codes(report)).collect();
    let agreed = skipped.len() == ranks.len() && skipped.windows(2).all(|pair| pair[0] == pair[1]);
    if agreed && let Some(End::Skipped { code, reason }) = ranks.first().map(|(report, _)| report.end.clone())
    {
        return Ok(Outcome::Skipped { code, reason });
    }
    // A consequence of another rank's end is sorted after it, regardless of the clocks.
    ranks.sort_by_key(|(report, at)| {
        let order = match &report.end {
            End::Failed { cause: Cause::Group, .. } => 2,
            End::Failed { .. } | End::Died(_) => 0,
            End::Unfinished { .. } => 1,
            End::Skipped { .. } => 3,
            End::Passed => 4,
        };
        (order, *at, report.rank)
    });
    let ranks: Vec<RankReport> = ranks.into_iter().map(|(report, _)| report).collect();
    let first = ranks.iter().find(|report| match &report.end {
        End::Failed { cause, .. } => *cause == Cause::Own,
        End::Died(_) => true,
        _ => false,
    });
    let (kind, summary) = match (first, timed_out) {
        (Some(report), _) => (Kind::Failed, format!("rank {} of {} failed first", report.rank, ranks.len())),
        _ if !skipped.is_empty() => (Kind::Disagreement, disagreement(&ranks)),
        (None, Some(timeout)) => {
            let unfinished: Vec<String> = ranks
                .iter()
                .filter(|report| matches!(report.end, End::Unfinished { .. }))
                .map(|report| report.rank.to_string())
                .collect();
            (Kind::TimedOut, format!("rank {} not through after {timeout:?}", unfinished.join(", ")))
        }
        (None, None) => (Kind::Failed, "a rank failed".to_owned()),
    };
    Err(Failed { test: test.to_owned(), kind, summary, ranks })
}

fn disagreement(ranks: &[RankReport]) -> String {
    let mut sorted: Vec<&RankReport> = ranks.iter().collect();
    sorted.sort_by_key(|report| report.rank);
    let ends: Vec<String> = sorted
        .iter()
        .map(|report| match &report.end {
            End::Skipped { code, .. } => format!("rank {}: {code}", report.rank),
            _ => format!("rank {}: not skipped", report.rank),
        })
        .collect();
    format!(
        "the ranks disagree on skipping the test; all must skip it, for the same cause: {}",
        ends.join(", ")
    )
}
