//! How ranks ended, and launches of them.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use serde::{Deserialize, Serialize};

use super::signals;

/// How one rank ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RankExit {
    /// It exited with this code.
    Code(i32),
    /// This signal ended it.
    Signal(i32),
}

impl RankExit {
    /// True for exit code 0.
    pub fn success(self) -> bool {
        self == RankExit::Code(0)
    }

    /// The exit code a shell would report: the code itself, or 128 plus the signal.
    pub fn code(self) -> i32 {
        match self {
            RankExit::Code(code) => code,
            RankExit::Signal(signal) => 128i32.saturating_add(signal),
        }
    }
}

impl From<ExitStatus> for RankExit {
    fn from(status: ExitStatus) -> RankExit {
        match (status.code(), status.signal()) {
            (Some(code), _) => RankExit::Code(code),
            (None, signal) => RankExit::Signal(signal.unwrap_or_default()),
        }
    }
}

impl std::fmt::Display for RankExit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            RankExit::Code(code) => write!(f, "exited with code {code}"),
            RankExit::Signal(signal) => {
                write!(f, "was ended by signal {signal}")?;
                signals::name(*signal).map_or(Ok(()), |name| write!(f, " ({name})"))
            }
        }
    }
}

/// How all ranks ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankExits {
    /// Indexed by rank.
    pub exits: Vec<RankExit>,
    /// The rank that failed first; those that failed after it may have been ended by the launcher.
    pub first_failure: Option<u32>,
}

impl RankExits {
    /// The exit code of the launch: 0, or that of the first rank that failed.
    pub fn code(&self) -> i32 {
        self.first_failure.and_then(|rank| self.exits.get(rank as usize)).map_or(0, |exit| exit.code())
    }
}

/// The rank that failed first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FirstFailure {
    /// Its number.
    pub rank: u32,
    /// Its host's number.
    pub node: u32,
    /// Its number on its host.
    pub local_rank: u32,
    /// Its process.
    pub pid: u32,
    /// How it ended.
    pub exit: RankExit,
    /// The last lines of its standard error; only its own host has them.
    #[serde(skip)]
    pub stderr: Vec<String>,
}

impl std::fmt::Display for FirstFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} {}", self.rank, self.exit)?;
        if !self.stderr.is_empty() {
            write!(f, "; its last lines on standard error:")?;
        }
        self.stderr.iter().try_for_each(|line| write!(f, "\n  {line}"))
    }
}

/// How a launch ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LaunchEnd {
    /// The first failure of the last start, if a rank failed before a signal ended the launch.
    pub failure: Option<FirstFailure>,
    /// The signal that ended the launch.
    pub signal: Option<i32>,
    /// How often the ranks were started again.
    pub restarts: u32,
    /// How the ranks of this host ended the last time, by their numbers here; empty if a signal
    /// arrived before they were started.
    pub exits: Vec<RankExit>,
}

impl LaunchEnd {
    /// The exit code of the launch: 0, 128 plus the signal that ended it, or that of the first rank
    /// that failed.
    pub fn code(&self) -> i32 {
        match (&self.failure, self.signal) {
            (Some(failure), _) => failure.exit.code(),
            (None, Some(signal)) => 128i32.saturating_add(signal),
            (None, None) => 0,
        }
    }
}
