//! The other side: this process is a rank of a test.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::context::Context;
use super::outcome::Outcome;
use super::slot::Slot;
use super::trace::{self, Thread};
use super::verdict::{Cause, Verdict};
use epoxide::group::{ProcessGroup, RANK, WORLD_SIZE, rendezvous};
use epoxide::{Error, Result};

/// Variable with the [`Call`] that this process is a rank of.
pub(super) const RANKS: &str = "EPOXIDE_TEST_RANKS";

/// The test, and the call in it, that a process is a rank of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Call {
    /// The test's path.
    pub test: String,
    /// File, line and column of the call.
    pub site: String,
    /// The number of earlier visits of the test to the call.
    pub visit: u32,
    /// Where the ranks' files are.
    pub directory: PathBuf,
    /// How long a test may take.
    pub timeout: Duration,
}

/// Messages from the test to a rank.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToRank {
    /// To run the test of this number.
    Go(u64),
    /// The outcome on all ranks.
    Outcome(Outcome),
}

/// Messages from a rank to the test.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FromRank {
    /// The rank runs on this thread.
    Here(u32),
    /// The rank has finished the test.
    Done { number: u64, verdict: Verdict, at: SystemTime },
}

impl Call {
    /// The call that this process is a rank of, if it is one.
    pub fn of_this_process() -> Result<Option<&'static Call>> {
        static CALL: OnceLock<Result<Option<Call>>> = OnceLock::new();
        let read = || match std::env::var(RANKS) {
            Err(_) => Ok(None),
            Ok(text) => serde_json::from_str(&text).map(Some).map_err(|error| {
                Error::argument(RANKS, text, format!("only the test harness sets it, unset it: {error}"))
            }),
        };
        CALL.get_or_init(read).as_ref().map(Option::as_ref).map_err(Error::clone)
    }
}

/// The names of a rank's files in the directory of the call.
pub(super) fn files(call: &Call, rank: u32) -> [PathBuf; 3] {
    ["doing", "trace", "output"].map(|name| call.directory.join(format!("{name}.{rank}")))
}

/// This process, as a rank.
#[derive(Debug)]
pub(super) struct RankProcess {
    control: BufReader<UnixStream>,
    ctx: Context,
}

impl RankProcess {
    pub fn enter(call: &'static Call) -> Result<RankProcess> {
        let number = |name: &'static str| {
            let text = std::env::var(name).unwrap_or_default();
            text.parse::<u32>().map_err(|_| Error::argument(name, text, "the test harness sets a number"))
        };
        let (rank, size) = (number(RANK)?, number(WORLD_SIZE)?);
        let [doing, traces, _] = files(call, rank);
        trace::enable(&traces)?;
        let stdin = std::io::stdin().as_fd().try_clone_to_owned().map_err(|error| Error::os("dup", error))?;
        let control = BufReader::new(UnixStream::from(stdin));
        let join = || rendezvous(call.timeout * 2).map(|group| Arc::new(group) as Arc<dyn ProcessGroup>);
        let ctx = Context::new(rank, size, Slot::file(&doing)?, Box::new(join));
        let mut this = RankProcess { control, ctx };
        this.send(&FromRank::Here(Thread::current().tid));
        Ok(this)
    }

    /// Runs the test of this number once the other side starts it.
    pub fn test(&mut self, number: u64, rank_main: impl FnOnce(&Context) -> Verdict) -> Outcome {
        let ToRank::Go(asked) = self.receive() else { std::process::exit(1) };
        let verdict = if asked == number { rank_main(&self.ctx) } else { astray(asked) };
        self.send(&FromRank::Done { number: asked, verdict, at: SystemTime::now() });
        let ToRank::Outcome(outcome) = self.receive() else { std::process::exit(1) };
        outcome
    }

    fn send(&mut self, what: &FromRank) {
        let Ok(mut line) = serde_json::to_vec(what) else { std::process::exit(1) };
        line.push(b'\n');
        if self.control.get_mut().write_all(&line).is_err() {
            // The test's process has ended.
            std::process::exit(1);
        }
    }

    fn receive(&mut self) -> ToRank {
        let mut line = String::new();
        match self.control.read_line(&mut line) {
            Ok(count) if count > 0 => {}
            // No more tests.
            _ => std::process::exit(0),
        }
        serde_json::from_str(&line).unwrap_or_else(|_| std::process::exit(1))
    }
}

/// The verdict of a rank that reached another test than the parent.
fn astray(number: u64) -> Verdict {
    let text = format!(
        "test {number} of the session is not reached here: which tests run must not depend on what differs between \
         the parent and its ranks"
    );
    Verdict::Failed { text, cause: Cause::Own, backtrace: None }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The test harness of this process reports it, and ends the process.
            return;
        }
        // The rest of the test runs in the parent.
        loop {
            let ToRank::Go(number) = self.receive() else { continue };
            self.send(&FromRank::Done { number, verdict: astray(number), at: SystemTime::now() });
        }
    }
}
