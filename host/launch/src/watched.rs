//! The one watcher of processes: of the ranks of a launch, and of those that
//! [`spawn_ranks`](super::spawn_ranks) starts.

use std::os::fd::{AsFd, OwnedFd};
use std::process::Child;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, pidfd_open, waitid,
};

use super::exit::{FirstFailure, RankExit};
use super::signals::Signals;
use crate::error::{Error, Result};

/// How often ranks are polled if the kernel cannot wake us.
const POLL: Duration = Duration::from_millis(10);
/// How long the drop of a [`Process`] waits for a killed process. The end takes a moment, except in
/// a call of a driver or a file system that does not return.
const REAP: Duration = Duration::from_secs(10);

/// Whether `fd` is readable.
fn readable(fd: &OwnedFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(fd, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
}

/// One of the standard signals.
fn standard(signal: i32) -> Signal {
    // SAFETY: only numbers of the standard signals come here, which the C library does not use for
    // itself.
    unsafe { Signal::from_raw_unchecked(signal) }
}

/// A process that is watched. It is reaped only when this is dropped, so its number is not reused
/// until then. Dropping ends one that still runs; if it has a process group of its own, all of the
/// group. A process that does not end after SIGKILL is left behind after 10 s.
#[derive(Debug)]
pub struct Process {
    rank: u32,
    node: u32,
    child: Child,
    /// Readable once it has ended; none where the kernel does not have that.
    ended: Option<OwnedFd>,
    exit: Option<RankExit>,
    /// It has not ended in time.
    given_up: bool,
    /// It leads a process group.
    leads: bool,
}

impl Process {
    /// Watches a child, the rank of this number on this node.
    pub fn new(rank: u32, node: u32, child: Child) -> Process {
        let pid = Pid::from_raw(child.id() as i32);
        let ended = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        Process { rank, node, child, ended, exit: None, given_up: false, leads: false }
    }

    /// The child was started as a process group of its own.
    pub fn as_group_leader(mut self) -> Process {
        self.leads = true;
        self
    }

    /// Its number.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// How it has ended, if a call has detected its end.
    pub fn exit(&self) -> Option<RankExit> {
        self.exit
    }

    /// Polls for its end, and returns how it ended.
    pub fn try_wait(&mut self) -> Result<Option<RankExit>> {
        if self.exit.is_some() {
            return Ok(self.exit);
        }
        let Some(pid) = Pid::from_raw(self.child.id() as i32) else { return Ok(None) };
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        let status = waitid(WaitId::Pid(pid), options).map_err(|error| {
            Error::os("waitid", format!("rank {}: {error}", self.rank)).with_errno(&error)
        })?;
        if status.is_none() && self.ended.as_ref().is_some_and(readable) {
            // The process is dead, but a debugger has not read its status yet: poll from now on.
            self.ended = None;
        }
        self.exit = status.map(|status| match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => RankExit::Code(code),
            (None, signal) => RankExit::Signal(signal.unwrap_or_default()),
        });
        Ok(self.exit)
    }

    /// Describes a rank that does not end.
    fn stuck(&self) -> String {
        let pid = self.child.id();
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        // The program's name is in parentheses and may contain some itself.
        let state = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().next()).unwrap_or("?");
        let meaning = match state {
            "D" => " (it waits in the kernel, for a device or a file system)",
            "Z" => " (it has ended, and a debugger holds it)",
            _ => "",
        };
        format!(
            "rank {} (process {pid}), killed, in state {state}{meaning}; see /proc/{pid}/stack",
            self.rank
        )
    }

    /// Sends to its own process group if it leads one, else to it alone.
    fn signal(&self, signal: i32) {
        if let Some(pid) = Pid::from_raw(self.child.id() as i32) {
            // All of it may have ended by itself just now.
            let _ = match self.leads {
                true => kill_process_group(pid, standard(signal)),
                false => kill_process(pid, standard(signal)),
            };
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.exit.is_none() {
            self.signal(libc::SIGKILL);
        }
        let end = Instant::now() + if self.given_up { Duration::ZERO } else { REAP };
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() >= end {
                // The process that inherits it reaps it when it ends; it holds no resource of this
                // process.
                tracing::warn!("left behind: {}", self.stuck());
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The ranks of this host. Dropping ends those that still run, and then what the others have left.
#[derive(Default)]
pub(super) struct Watched(pub(super) Vec<Process>);

impl Watched {
    pub fn running(&self) -> usize {
        self.0.iter().filter(|process| process.exit.is_none()).count()
    }

    /// How each has ended, in the order of the ranks, once none runs.
    pub fn exits(&self) -> Vec<RankExit> {
        self.0.iter().map(|process| process.exit.unwrap_or(RankExit::Signal(0))).collect()
    }

    /// Returns when a rank has ended, a signal was caught, or the time is over.
    pub fn wait(&self, signals: Option<&Signals>, timeout: Option<Duration>) -> Result<()> {
        let running = || self.0.iter().filter(|process| process.exit.is_none());
        let blind = running().any(|process| process.ended.is_none());
        let timeout = if blind { Some(timeout.map_or(POLL, |timeout| timeout.min(POLL))) } else { timeout };
        // Not before the time: rounded up to a millisecond.
        let timeout = timeout.map(|timeout| timeout + Duration::from_millis(1));
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        let caught = signals.map(Signals::ready);
        let fds = running().filter_map(|process| process.ended.as_ref().map(AsFd::as_fd)).chain(caught);
        let mut fds: Vec<PollFd<'_>> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(Error::system("poll", error)),
        }
    }

    /// Records which have ended; returns one that failed. If several did, it is one that a signal
    /// ended: the others tend to fail because of it.
    pub fn try_wait(&mut self) -> Result<Option<FirstFailure>> {
        let mut failed: Option<FirstFailure> = None;
        for (local_rank, process) in (0u32..).zip(&mut self.0).filter(|(_, process)| process.exit.is_none()) {
            let Some(exit) = process.try_wait()? else { continue };
            let earlier = failed.as_ref().is_some_and(|failure| {
                matches!(failure.exit, RankExit::Signal(_)) || matches!(exit, RankExit::Code(_))
            });
            if !exit.success() && !earlier {
                let (rank, node, pid) = (process.rank, process.node, process.child.id());
                failed = Some(FirstFailure { rank, node, local_rank, pid, exit, stderr: Vec::new() });
            }
        }
        Ok(failed)
    }

    /// Signals the ranks that still run, but not what they have started: that may not expect it.
    pub fn pass(&self, signal: i32) {
        for process in self.0.iter().filter(|process| process.exit.is_none()) {
            if let Some(pid) = Pid::from_raw(process.child.id() as i32) {
                let _ = kill_process(pid, standard(signal));
            }
        }
    }

    /// Signals the ranks that still run, with what they have started.
    pub fn signal(&self, signal: i32) {
        self.0.iter().filter(|process| process.exit.is_none()).for_each(|process| process.signal(signal));
    }

    /// Gives up processes that still run after SIGKILL, and returns their description.
    pub fn give_up(&mut self) -> String {
        let running = self.0.iter_mut().filter(|process| process.exit.is_none());
        let stuck = running.map(|process| {
            process.given_up = true;
            process.stuck()
        });
        stuck.collect::<Vec<_>>().join("; ")
    }

    /// Kills what failed ranks have left of their process groups.
    pub fn sweep_failed(&self) {
        let failed = self.0.iter().filter(|process| process.exit.is_some_and(|exit| !exit.success()));
        failed.for_each(|process| process.signal(libc::SIGKILL));
    }

    /// Kills all that is left of the ranks' process groups.
    pub fn sweep(&self) {
        self.0.iter().for_each(|process| process.signal(libc::SIGKILL));
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if self.running() > 0 {
            self.sweep();
        }
    }
}
