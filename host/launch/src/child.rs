//! Commands for ranks that are processes.

use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

use crate::error::{Error, Result};

/// A [`Command`] for this very executable, without arguments; a start for
/// [`spawn_ranks`](crate::spawn_ranks).
pub fn current_exe() -> Result<Command> {
    std::env::current_exe().map(Command::new).map_err(|error| Error::system("current_exe", error))
}

/// Has the kernel kill the child when the thread that spawns it ends.
pub fn die_with_parent(command: &mut Command) {
    let parent = getpid();
    let prepare = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died before the line above; then the kernel would send no signal.
        if getppid() != Some(parent) {
            return Err(rustix::io::Errno::SRCH.into());
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes two system calls; it neither allocates nor
    // takes a lock.
    unsafe { command.pre_exec(prepare) };
}

/// Gives the child the default action for SIGINT and SIGQUIT. This process may ignore them, as a
/// background job of a script does. The keys of a terminal do not reach a rank's process group, so
/// such a signal is meant for the rank.
pub fn default_interrupts(command: &mut Command) {
    let prepare = || {
        for signal in [libc::SIGINT, libc::SIGQUIT] {
            // SAFETY: it may be called between fork and exec, takes no lock, and the default action
            // accesses no memory.
            if unsafe { libc::signal(signal, libc::SIG_DFL) } == libc::SIG_ERR {
                return Err(std::io::Error::last_os_error());
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes two system calls; it neither allocates nor
    // takes a lock.
    unsafe { command.pre_exec(prepare) };
}

/// The command that runs one test of this test binary, and no other.
///
/// # Panics
/// Where the binary has no such test: for an unknown name it would run none and succeed.
#[track_caller]
pub fn one_test(path: &str) -> Command {
    let exe = || current_exe().expect("the path of the test binary");
    let list = ["--exact", path, "--list", "--format", "terse"];
    let listed = exe().args(list).output().expect("a list of the tests");
    assert_eq!(String::from_utf8_lossy(&listed.stdout).trim(), format!("{path}: test"));
    let mut command = exe();
    command.args(["--exact", path, "--nocapture", "--test-threads=1"]);
    command
}
