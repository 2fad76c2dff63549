//! The processes of a launch.

use std::os::fd::{AsFd, OwnedFd};
use std::process::Child;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, pidfd_open, waitid,
};

use super::RankExit;
use super::place::Place;
use super::signals::Signals;
use super::supervisor::Failure;
use crate::error::{Error, Result};

/// How often ranks are looked at where the kernel cannot wake us.
const POLL: Duration = Duration::from_millis(10);

/// One of the standard signals.
fn standard(signal: i32) -> Signal {
    // SAFETY: only numbers of the standard signals come here, which the C library does not use for itself.
    unsafe { Signal::from_raw_unchecked(signal) }
}

pub(super) struct Process {
    rank: u32,
    node: u32,
    child: Child,
    /// Readable once it has ended; none where the kernel does not have that.
    ended: Option<OwnedFd>,
    exit: Option<RankExit>,
}

impl Process {
    pub fn new(place: &Place, child: Child) -> Process {
        let pid = Pid::from_raw(child.id() as i32);
        let ended = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        Process { rank: place.rank(), node: place.node, child, ended, exit: None }
    }

    /// Sends to its process group.
    fn signal(&self, signal: i32) {
        if let Some(pid) = Pid::from_raw(self.child.id() as i32) {
            // All of it may have ended by itself just now.
            let _ = kill_process_group(pid, standard(signal));
        }
    }
}

/// The ranks of this host. Each is reaped only when this is dropped, so that until then its number stays its own.
#[derive(Default)]
pub(super) struct Watched(pub(super) Vec<Process>);

impl Watched {
    pub fn running(&self) -> usize {
        self.0.iter().filter(|process| process.exit.is_none()).count()
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
            Err(error) => Err(Error::os("poll", error)),
        }
    }

    /// Notes which have ended; returns one that failed. Of several, one that a signal ended: the others tend to fail
    /// because of it.
    pub fn look(&mut self) -> Result<Option<Failure>> {
        let mut failed: Option<Failure> = None;
        for (local_rank, process) in (0u32..).zip(&mut self.0).filter(|(_, process)| process.exit.is_none()) {
            let Some(pid) = Pid::from_raw(process.child.id() as i32) else { continue };
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
            let status = waitid(WaitId::Pid(pid), options)
                .map_err(|error| Error::os("waitid", format!("rank {}: {error}", process.rank)))?;
            let Some(status) = status else { continue };
            let exit = match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => RankExit::Code(code),
                (None, signal) => RankExit::Signal(signal.unwrap_or_default()),
            };
            process.exit = Some(exit);
            let earlier = failed.as_ref().is_some_and(|failure| {
                matches!(failure.exit, RankExit::Signal(_)) || matches!(exit, RankExit::Code(_))
            });
            if !exit.success() && !earlier {
                let (rank, node, pid) = (process.rank, process.node, process.child.id());
                failed = Some(Failure { rank, node, local_rank, pid, exit, stderr: Vec::new() });
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
        for process in &mut self.0 {
            let _ = process.child.wait();
        }
    }
}
