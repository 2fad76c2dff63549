//! Processes that a killed launcher's ranks have left running. The kernel kills the ranks with
//! their launcher, but not what they had started.

use std::collections::BTreeSet;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::group::internal::LAUNCH;

/// The file in a launch's directory with the process groups of its ranks, one to a line.
pub(super) const GROUPS: &str = "groups";

/// Kills the processes of the launch whose directory this is: those that have it in their
/// environment and are still of a rank's process group. A process that has left its group, as a
/// daemon does, is never ended.
pub(super) fn end(directory: &Path) {
    let groups = std::fs::read_to_string(directory.join(GROUPS)).unwrap_or_default();
    let groups: BTreeSet<i32> = groups.lines().filter_map(|line| line.parse().ok()).collect();
    if groups.is_empty() {
        return;
    }
    let own = [LAUNCH.as_bytes(), b"=", directory.as_os_str().as_bytes()].concat();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let number = entry.file_name().to_str().and_then(|name| name.parse().ok());
        let Some(pid) = number.and_then(Pid::from_raw) else { continue };
        // The process may end and its number be reused. The descriptor always refers to the same
        // process.
        let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { continue };
        // The group of a thread of the kernel is 0, which rustix's `getpgid` takes for impossible.
        // SAFETY: the call takes a number and accesses no memory.
        let group = unsafe { libc::getpgid(pid.as_raw_nonzero().get()) };
        let of_a_rank = groups.contains(&group);
        let environment = if of_a_rank { std::fs::read(entry.path().join("environ")) } else { continue };
        if environment.is_ok_and(|text| text.split(|byte| *byte == 0).any(|variable| variable == own)) {
            tracing::info!(pid = pid.as_raw_nonzero().get(), "ending what a killed launcher has left");
            let _ = pidfd_send_signal(&process, Signal::KILL);
        }
    }
}
