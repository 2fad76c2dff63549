//! Backtraces of threads that hang.
//!
//! A signal makes the thread capture its own backtrace and write it to a file. This is **best
//! effort**: capturing allocates and takes locks, which no signal handler may do in general. So a
//! thread that gets the signal inside the allocator hangs in the handler. Only ranks that have
//! timed out get the signal, and the caller does not wait long. The kernel's state of the threads
//! is read in any case.

use std::backtrace::Backtrace;
use std::fmt::Write as _;
use std::fs::File;
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};

use epoxide::{Error, Result};

/// Signal that requests a backtrace.
const ASK: i32 = libc::SIGUSR2;
/// The limit of the wait for all ranks together. Reading the debug information of a large binary
/// takes a while.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// Ends a backtrace in the file.
const END: &str = "\n--- end of backtrace\n";

/// The handler's output file; -1 for none.
static FILE: AtomicI32 = AtomicI32::new(-1);

/// A thread of some process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Thread {
    pub pid: u32,
    pub tid: u32,
}

impl Thread {
    pub fn current() -> Thread {
        Thread { pid: std::process::id(), tid: rustix::thread::gettid().as_raw_nonzero().get() as u32 }
    }
}

extern "C" fn answer(_: i32) {
    // Only [`enable`] stores it, with a file that is never closed.
    let fd = FILE.load(Ordering::Relaxed);
    if fd < 0 {
        return;
    }
    let text = format!("{}{END}", Backtrace::force_capture());
    // SAFETY: the file is open, see above.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let mut bytes = text.as_bytes();
    while !bytes.is_empty() {
        match rustix::io::write(fd, bytes) {
            Ok(count) if count > 0 => bytes = bytes.get(count..).unwrap_or_default(),
            Err(rustix::io::Errno::INTR) => {}
            _ => return,
        }
    }
}

/// Makes this process's threads append their backtraces to `path` on the signal.
pub(super) fn enable(path: &Path) -> Result<()> {
    let file = File::options().create(true).append(true).open(path);
    let file = file.map_err(|error| Error::os("open", format!("{}: {error}", path.display())))?;
    // A handler may still write to the one before, so that stays open.
    FILE.store(file.into_raw_fd(), Ordering::Relaxed);
    // SAFETY: all zeros is a valid sigaction.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = answer as extern "C" fn(i32) as libc::sighandler_t;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: `action` is valid. The module's text explains why its handler does more than a
    // handler may.
    match unsafe { libc::sigaction(ASK, &action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(Error::os("sigaction", std::io::Error::last_os_error())),
    }
}

/// Requests a backtrace from a thread whose process has called [`enable`] for `path`, and waits for
/// it until `end`.
pub(super) fn request(thread: Thread, path: &Path, end: Instant) -> String {
    let mut text = kernel_view(thread);
    if is_stopped(thread) {
        text.push_str("no backtrace: the process is stopped (SIGSTOP or a debugger)\n");
        return text;
    }
    let start = std::fs::metadata(path).map_or(0, |metadata| metadata.len()) as usize;
    let read = || std::fs::read(path).unwrap_or_default().get(start..).unwrap_or_default().to_vec();
    // SAFETY: a system call on numbers.
    let sent = unsafe { libc::syscall(libc::SYS_tgkill, thread.pid, thread.tid, ASK) };
    if sent != 0 {
        let _ = writeln!(text, "no backtrace: {}", std::io::Error::last_os_error());
        return text;
    }
    while Instant::now() < end {
        let written = String::from_utf8_lossy(&read()).into_owned();
        if let Some((backtrace, _)) = written.split_once(END) {
            text.push_str(backtrace);
            text.push('\n');
            return text;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    text.push_str("no backtrace: the thread did not answer in time; it is in the kernel, or slow\n");
    text
}

/// [`request`] for a thread of this process.
pub(super) fn request_here(thread: Thread, end: Instant) -> String {
    // The file of this process's backtraces; one request at a time.
    static HERE: Mutex<Option<PathBuf>> = Mutex::new(None);
    let mut here = HERE.lock().unwrap_or_else(PoisonError::into_inner);
    let open = || {
        let memory = memfd_create("backtraces", MemfdFlags::CLOEXEC);
        let memory = memory.map_err(|error| Error::os("memfd_create", error))?;
        // Stays open, as the handler's file does.
        let path = PathBuf::from(format!("/proc/self/fd/{}", memory.into_raw_fd()));
        enable(&path)?;
        Ok(path)
    };
    match here.take().map_or_else(open, Ok) {
        Ok(path) => request(thread, here.insert(path), end),
        Err(error) => format!("no backtrace: {}", Error::to_string(&error)),
    }
}

/// A stopped thread runs no handler.
fn is_stopped(thread: Thread) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/task/{}/stat", thread.pid, thread.tid));
    // The state follows the name, which is in parentheses and may hold some.
    stat.is_ok_and(|stat| {
        stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with(['T', 't']))
    })
}

/// The kernel's state of the thread, and of the others of its process.
fn kernel_view(thread: Thread) -> String {
    let mut text = String::new();
    let tasks = format!("/proc/{}/task", thread.pid);
    let Ok(entries) = std::fs::read_dir(&tasks) else { return text };
    for name in entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()) {
        let read = |file: &str| std::fs::read_to_string(format!("{tasks}/{name}/{file}")).unwrap_or_default();
        let status = read("status");
        let field = |key: &str| {
            status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim).unwrap_or("?").to_owned()
        };
        let mark = if name == thread.tid.to_string() { " <- the rank" } else { "" };
        let wait = read("wchan");
        let _ = writeln!(text, "thread {name} ({}): {}, in {wait}{mark}", field("Name:"), field("State:"));
    }
    text
}
