//! Why a command ends before its work is done.

use epoxide::Error;
use serde::{Deserialize, Serialize};

/// `Result` with [`CommandError`].
pub type Result<T, E = CommandError> = std::result::Result<T, E>;

/// A check failed.
pub const FAILED: u8 = 1;
/// Bad usage.
pub const USAGE: u8 = 2;
/// Exit code if this machine lacks a requirement.
pub const SKIPPED: u8 = 77;

/// Why a command ends, and with which exit code.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommandError {
    /// The exit code.
    pub code: u8,
    /// One line with the error and the remedy; `None` if another process prints it.
    pub message: Option<String>,
    /// Another rank's failure caused this one. Report that failure if it is available.
    pub consequence: bool,
    /// A wait for a peer timed out; the peer may only be slow.
    pub timed_out: bool,
    /// Every rank of the group ends for this reason, so that one of them can print it for all.
    pub agreed: bool,
}

impl CommandError {
    fn new(code: u8, message: impl Into<String>) -> CommandError {
        CommandError {
            code,
            message: Some(message.into()),
            consequence: false,
            timed_out: false,
            agreed: false,
        }
    }

    /// A check failed, or something broke.
    pub fn failed(message: impl Into<String>) -> CommandError {
        CommandError::new(FAILED, message)
    }

    /// The command line or the input is wrong.
    pub fn usage(message: impl Into<String>) -> CommandError {
        CommandError::new(USAGE, message)
    }

    /// `command` needs a feature of this package that is off: bad usage, with the command line that
    /// builds it in.
    #[cfg(not(all(feature = "plots", feature = "manual")))]
    pub fn without_feature(command: &str, feature: &str) -> CommandError {
        let remedy = format!("`cargo run --release --features {feature} -- {command} ..` builds it in");
        CommandError::usage(format!(
            "{command}: this program was built without the feature {feature}; {remedy}"
        ))
    }

    /// The error if this machine lacks a requirement.
    pub fn skipped(message: impl Into<String>) -> CommandError {
        CommandError::new(SKIPPED, format!("skipped: {}", message.into()))
    }

    /// An exit code whose reason has been printed.
    pub fn reported(code: u8) -> CommandError {
        CommandError { message: None, ..CommandError::new(code, "") }
    }

    /// The error of a command with the flag `--timeout`. The flag is a remedy if the error is a
    /// timeout: on a virtual GPU a slow machine looks like a peer that hangs.
    pub fn of_timeout_flag(mut self) -> CommandError {
        let remedy = |message| format!("{message}; if it is only slow, raise --timeout");
        if self.timed_out {
            self.message = self.message.map(remedy);
        }
        self
    }

    /// The message with the failed rank.
    pub fn on_rank(mut self, rank: u32) -> CommandError {
        self.message = self.message.map(|message| format!("rank {rank}: {message}"));
        self
    }
}

impl From<Error> for CommandError {
    fn from(error: Error) -> CommandError {
        let message = error.to_string();
        match error {
            Error::Argument { .. }
            | Error::Shape { .. }
            | Error::DType { .. }
            | Error::Capacity { .. }
            | Error::Mismatch { .. } => CommandError::usage(message),
            Error::Unavailable { .. } => CommandError::skipped(message),
            Error::PeerTimeout { .. } => {
                CommandError { consequence: true, timed_out: true, ..CommandError::failed(message) }
            }
            // The launcher, or the rank that failed, reports why the group was given up.
            Error::Aborted { .. } => CommandError { consequence: true, ..CommandError::reported(FAILED) },
            Error::Store { .. } | Error::Group { .. } | Error::PeerFailed { .. } => {
                CommandError { consequence: true, ..CommandError::failed(message) }
            }
            _ => CommandError::failed(message),
        }
    }
}

impl From<epoxide_bench::Error> for CommandError {
    fn from(error: epoxide_bench::Error) -> CommandError {
        match error {
            epoxide_bench::Error::Usage(message) => CommandError::usage(message),
            epoxide_bench::Error::DoesNotFit(message) => CommandError::skipped(message),
            epoxide_bench::Error::Failed(message) => CommandError::failed(message),
            epoxide_bench::Error::Operation(error) => CommandError::from(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flag_is_a_remedy_only_of_commands_that_have_it() {
        let timeout = Error::PeerTimeout {
            rank: 0,
            peer: 1,
            operation: "dispatch",
            place: None,
            late_ranks: [1].into(),
            word: "ready",
            epoch: 1,
            needed: 1,
            seen: 0,
            waited: std::time::Duration::from_secs(1),
            other_causes: "".into(),
        };
        let error = CommandError::from(timeout);
        assert!(error.message.as_ref().is_some_and(|message| !message.contains("--timeout")), "{error:?}");
        let message = error.of_timeout_flag().message.unwrap();
        assert!(message.ends_with("; if it is only slow, raise --timeout"), "{message}");
        let other = CommandError::failed("broke");
        assert_eq!(other.clone().of_timeout_flag(), other);
    }
}
