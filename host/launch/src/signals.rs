//! The signals that a launcher passes on.

use std::io::{ErrorKind, PipeReader, PipeWriter, Read};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::{FdFlags, fcntl_setfd};

use crate::error::{Error, Result};

/// The pipe of the handler. Never closed: a handler that began before its [`Signals`] ended may
/// still write, and another file could have the descriptor's number by then.
static PIPE: OnceLock<(PipeReader, PipeWriter)> = OnceLock::new();
/// Whether there is a [`Signals`].
static CATCHING: AtomicBool = AtomicBool::new(false);

/// Signals that are passed on.
const PASSED: [i32; 8] = [
    libc::SIGINT,
    libc::SIGTERM,
    libc::SIGHUP,
    libc::SIGQUIT,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGALRM,
    libc::SIGWINCH,
];

/// Catches the signals that a launcher passes on to its ranks (SIGINT, SIGTERM, SIGHUP, SIGQUIT,
/// SIGUSR1, SIGUSR2, SIGALRM, SIGWINCH) while it lives. Those that were ignored before stay
/// ignored, as under `nohup`.
#[derive(Debug)]
pub struct Signals {
    caught: &'static PipeReader,
    before: Vec<(i32, Action)>,
}

/// A signal's action, to be put back.
#[derive(Clone, Copy)]
struct Action(libc::sigaction);

impl std::fmt::Debug for Action {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Action")
    }
}

/// Writes the signal's number to the pipe.
extern "C" fn note(signal: i32) {
    let byte = signal as u8;
    let Some((_, writer)) = PIPE.get() else { return };
    // SAFETY: errno belongs to this thread; write reads one byte of this frame. Both may be used in
    // a signal handler.
    unsafe {
        let errno = *libc::__errno_location();
        // A full pipe already wakes the launcher.
        libc::write(writer.as_raw_fd(), (&raw const byte).cast(), 1);
        *libc::__errno_location() = errno;
    }
}

/// Sets a signal's action; returns the one before.
fn set_action(signal: i32, action: Option<&libc::sigaction>) -> Result<libc::sigaction> {
    // SAFETY: all zeros is a valid sigaction: the default action with an empty mask.
    let mut before: libc::sigaction = unsafe { std::mem::zeroed() };
    let action = action.map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: `action` is null or valid, `before` is valid; a handler in it is `note`, which may
    // run at any time, or was there before.
    match unsafe { libc::sigaction(signal, action, &mut before) } {
        0 => Ok(before),
        _ => {
            let error = std::io::Error::last_os_error();
            Err(Error::os("sigaction", format!("signal {signal}: {error}")).with_errno(&error))
        }
    }
}

/// Sets SIGCHLD to its default action if this process ignores it, as a parent may have left it. The
/// kernel keeps no exit status of the children of a process that ignores SIGCHLD.
pub fn default_sigchld() -> Result<()> {
    if set_action(libc::SIGCHLD, None)?.sa_sigaction == libc::SIG_IGN {
        // SAFETY: all zeros is a valid sigaction: the default action with an empty mask.
        let default: libc::sigaction = unsafe { std::mem::zeroed() };
        set_action(libc::SIGCHLD, Some(&default))?;
    }
    Ok(())
}

/// A pipe that blocks neither its reader nor the handler.
fn pipe() -> Result<(PipeReader, PipeWriter)> {
    let (caught, writer) = std::io::pipe().map_err(|error| Error::system("pipe", error))?;
    for fd in [caught.as_fd(), writer.as_fd()] {
        rustix::io::ioctl_fionbio(fd, true).map_err(|error| Error::system("fionbio", error))?;
        fcntl_setfd(fd, FdFlags::CLOEXEC).map_err(|error| Error::system("fcntl", error))?;
    }
    Ok((caught, writer))
}

impl Signals {
    /// Starts to catch. One at a time in a process.
    pub fn catch() -> Result<Signals> {
        let (caught, _) = match PIPE.get() {
            Some(pipe) => pipe,
            None => {
                let pipe = pipe()?;
                PIPE.get_or_init(|| pipe)
            }
        };
        if CATCHING.swap(true, Ordering::SeqCst) {
            return Err(Error::os(
                "sigaction",
                "another launcher of this process catches the signals already",
            ));
        }
        let mut signals = Signals { caught, before: Vec::new() };
        // Those of an earlier launch.
        while !signals.take().is_empty() {}
        for signal in PASSED {
            let before = set_action(signal, None)?;
            if before.sa_sigaction == libc::SIG_IGN {
                continue;
            }
            // SAFETY: as above.
            let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
            action.sa_sigaction = note as extern "C" fn(i32) as libc::sighandler_t;
            action.sa_flags = libc::SA_RESTART;
            set_action(signal, Some(&action))?;
            signals.before.push((signal, Action(before)));
        }
        Ok(signals)
    }

    /// The signals caught since the last call.
    pub fn take(&mut self) -> Vec<i32> {
        let mut bytes = [0; 64];
        loop {
            match self.caught.read(&mut bytes) {
                Ok(count) => return bytes[..count].iter().map(|byte| i32::from(*byte)).collect(),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return Vec::new(),
            }
        }
    }

    /// Readable when a signal has been caught.
    pub(super) fn ready(&self) -> BorrowedFd<'_> {
        self.caught.as_fd()
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for (signal, Action(before)) in &self.before {
            // It was accepted when it was first set.
            let _ = set_action(*signal, Some(before));
        }
        CATCHING.store(false, Ordering::SeqCst);
    }
}

/// Whether the signal ends a launch.
pub(super) fn ends(signal: i32) -> bool {
    matches!(signal, libc::SIGINT | libc::SIGTERM | libc::SIGHUP | libc::SIGQUIT)
}

/// Whether the signal, behind one that ends the launch, means not to wait for the ranks. Others
/// repeat a request: of a closed terminal both the kernel and the shell send SIGHUP, and `timeout`
/// sends SIGTERM twice. A program without patience sends SIGKILL, with which the ranks end too.
pub(super) fn hurries(signal: i32) -> bool {
    matches!(signal, libc::SIGINT | libc::SIGQUIT)
}

/// The name of a signal; `None` for those without one.
pub(super) fn name(signal: i32) -> Option<&'static str> {
    Some(match signal {
        libc::SIGHUP => "SIGHUP",
        libc::SIGINT => "SIGINT",
        libc::SIGQUIT => "SIGQUIT",
        libc::SIGILL => "SIGILL",
        libc::SIGTRAP => "SIGTRAP",
        libc::SIGABRT => "SIGABRT",
        libc::SIGBUS => "SIGBUS",
        libc::SIGFPE => "SIGFPE",
        libc::SIGKILL => "SIGKILL",
        libc::SIGUSR1 => "SIGUSR1",
        libc::SIGSEGV => "SIGSEGV",
        libc::SIGUSR2 => "SIGUSR2",
        libc::SIGPIPE => "SIGPIPE",
        libc::SIGALRM => "SIGALRM",
        libc::SIGTERM => "SIGTERM",
        libc::SIGXCPU => "SIGXCPU",
        libc::SIGXFSZ => "SIGXFSZ",
        libc::SIGSYS => "SIGSYS",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn the_pipe_outlasts_a_handler_that_began_before_the_end() {
        let signals = Signals::catch().unwrap();
        assert!(Signals::catch().unwrap_err().to_string().contains("catches the signals already"));
        let writer = format!("/proc/self/fd/{}", PIPE.get().unwrap().1.as_raw_fd());
        let pipe = || std::fs::metadata(&writer).unwrap().ino();
        let before = pipe();
        drop(signals);
        assert_eq!(pipe(), before);
        note(libc::SIGUSR1);
        // A later launch does not take it for its own.
        let mut signals = Signals::catch().unwrap();
        assert_eq!((signals.take(), pipe()), (vec![], before));
    }
}
