//! Starting the ranks of a group: as threads with [`run_threads`], as processes with [`spawn_ranks`], and as
//! processes under the rules of torchrun with [`Launch`], which `epoxide launch` is the command of.

mod meeting;
mod place;
mod port;
mod relay;
mod signals;
mod supervisor;
mod watched;

use std::any::Any;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use rustix::process::{Pid, Signal, getpid, getppid, kill_process, set_parent_process_death_signal};

pub use place::{MASTER_ADDR, MASTER_PORT, Place, RESTART_COUNT};
pub use port::HeldPort;
pub use relay::Sinks;
pub use signals::Signals;
pub use supervisor::{Ended, Failure, Launch, Nodes};

use super::{Connect, FileStore, HashStore, MeshGroup, MeshOptions, ProcessGroup, RANK, STORE, WORLD_SIZE};
use crate::error::{Error, Result};

/// Variable with the rank's number among the ranks of its host.
pub const LOCAL_RANK: &str = "LOCAL_RANK";
/// Variable with the number of ranks on the host.
pub const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";

/// How long a rank that was asked to end (SIGTERM) may take before it is killed.
const TERMINATION: Duration = Duration::from_secs(1);
/// How often the launcher looks at its ranks.
const POLL: Duration = Duration::from_millis(5);

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
            RankExit::Signal(signal) => 128 + signal,
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
pub struct Outcome {
    /// Indexed by rank.
    pub exits: Vec<RankExit>,
    /// The rank that failed first; those that failed after it may have been ended by the launcher.
    pub first_failure: Option<u32>,
}

impl Outcome {
    /// The exit code of the launch: 0, or that of the first rank that failed.
    pub fn code(&self) -> i32 {
        self.first_failure.and_then(|rank| self.exits.get(rank as usize)).map_or(0, |exit| exit.code())
    }
}

/// A [`Command`] for this very executable, without arguments; a start for [`spawn_ranks`].
pub fn current_exe() -> Result<Command> {
    std::env::current_exe().map(Command::new).map_err(|error| Error::os("current_exe", error))
}

/// Starts `size` ranks as processes and waits until all have ended.
///
/// `command` makes each rank's command line; [`RANK`], [`WORLD_SIZE`], [`LOCAL_RANK`], [`LOCAL_WORLD_SIZE`] and
/// [`STORE`] are added to its environment, so that the rank can call [`rendezvous`](super::rendezvous). The store is a
/// fresh directory, removed at the end.
///
/// When a rank fails, the store is given up, so that the others fail at their next call of the group; those still
/// running after `grace` are sent SIGTERM, and a second later SIGKILL. All processes are waited for in every case,
/// and the kernel kills them if the thread that called this dies.
pub fn spawn_ranks(size: u32, grace: Duration, command: impl Fn(u32) -> Result<Command>) -> Result<Outcome> {
    if size == 0 {
        return Err(Error::argument("size", size, "a group has at least one rank"));
    }
    let directory = StoreDirectory::create()?;
    let store = FileStore::new(&directory.path)?;
    let mut ranks = Ranks::default();
    for rank in 0..size {
        let mut command = command(rank)?;
        command
            .env(RANK, rank.to_string())
            .env(WORLD_SIZE, size.to_string())
            .env(LOCAL_RANK, rank.to_string())
            .env(LOCAL_WORLD_SIZE, size.to_string())
            .env(STORE, format!("file://{}", directory.path.display()));
        die_with_parent(&mut command);
        match command.spawn() {
            Ok(child) => ranks.0.push(Rank { child, exit: None }),
            Err(error) => {
                let program = Path::new(command.get_program()).display();
                return Err(Error::os("spawn", format!("rank {rank}, {program}: {error}")));
            }
        }
    }

    let mut failure: Option<(u32, Instant)> = None;
    let mut signalled = None;
    loop {
        if let Some((rank, exit)) = ranks.poll()? {
            tracing::error!(rank, "{exit}");
            if failure.is_none() {
                store.poison(&format!("rank {rank} {exit}"))?;
                failure = Some((rank, Instant::now()));
            }
        }
        if ranks.all_ended() {
            break;
        }
        if let Some((_, when)) = failure {
            let signal = match when.elapsed().checked_sub(grace) {
                None => None,
                Some(over) if over < TERMINATION => Some(Signal::TERM),
                Some(_) => Some(Signal::KILL),
            };
            if signal != signalled {
                ranks.signal(signal);
                signalled = signal;
            }
        }
        std::thread::sleep(POLL);
    }
    let exits = ranks.0.iter().map(|rank| rank.exit.unwrap_or(RankExit::Signal(0))).collect();
    Ok(Outcome { exits, first_failure: failure.map(|(rank, _)| rank) })
}

/// Has the kernel kill the child when the thread that spawns it ends.
#[doc(hidden)]
pub fn die_with_parent(command: &mut Command) {
    let parent = getpid();
    let prepare = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died before the line above: then nobody would send the signal.
        if getppid() != Some(parent) {
            return Err(rustix::io::Errno::SRCH.into());
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure makes two system calls; it neither allocates nor takes a lock.
    unsafe { command.pre_exec(prepare) };
}

struct Rank {
    child: Child,
    /// Set once it has been waited for.
    exit: Option<RankExit>,
}

/// The processes. Dropping ends and reaps those that still run.
#[derive(Default)]
struct Ranks(Vec<Rank>);

impl Ranks {
    /// Reaps the ranks that have ended; returns the lowest that failed.
    fn poll(&mut self) -> Result<Option<(u32, RankExit)>> {
        let mut failed = None;
        for (number, rank) in (0u32..).zip(&mut self.0) {
            if rank.exit.is_some() {
                continue;
            }
            let status = rank.child.try_wait();
            let status = status.map_err(|error| Error::os("waitpid", format!("rank {number}: {error}")))?;
            if let Some(status) = status {
                let exit = RankExit::from(status);
                rank.exit = Some(exit);
                if !exit.success() {
                    failed = failed.or(Some((number, exit)));
                }
            }
        }
        Ok(failed)
    }

    fn all_ended(&self) -> bool {
        self.0.iter().all(|rank| rank.exit.is_some())
    }

    /// Signals the ranks that still run.
    fn signal(&self, signal: Option<Signal>) {
        for rank in self.0.iter().filter(|rank| rank.exit.is_none()) {
            // Not reaped yet, so the number is still its own.
            if let (Some(signal), Some(pid)) = (signal, Pid::from_raw(rank.child.id() as i32)) {
                // It may have ended by itself just now.
                let _ = kill_process(pid, signal);
            }
        }
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.signal(Some(Signal::KILL));
        for rank in self.0.iter_mut().filter(|rank| rank.exit.is_none()) {
            let _ = rank.child.wait();
        }
    }
}

/// The directory of a launch's store. Dropping removes it.
#[doc(hidden)]
#[derive(Debug)]
pub struct StoreDirectory {
    /// Where it is.
    pub path: PathBuf,
}

impl StoreDirectory {
    /// Makes an empty one.
    pub fn create() -> Result<StoreDirectory> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // A leftover of an earlier process with this number must not be taken over: its keys are stale.
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = std::env::temp_dir().join(format!("epoxide-store-{}-{number}", std::process::id()));
            match std::fs::create_dir(&path) {
                Ok(()) => return Ok(StoreDirectory { path }),
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    let reason = format!("{}: {error}; point TMPDIR at a writable directory", path.display());
                    return Err(Error::os("mkdir", reason));
                }
            }
        }
    }
}

impl Drop for StoreDirectory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// Why [`run_threads`] failed: the first rank that did, and how.
#[derive(Debug, Clone)]
pub struct RankFailure {
    /// The rank that failed first.
    pub rank: u32,
    /// What it returned, or its panic as [`Error::Os`].
    pub error: Error,
}

impl std::fmt::Display for RankFailure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {}: {}", self.rank, self.error)
    }
}

impl std::error::Error for RankFailure {}

impl From<RankFailure> for Error {
    fn from(failure: RankFailure) -> Error {
        failure.error
    }
}

/// Runs `rank_main(rank, group)` on `size` threads that form a group over a [`HashStore`]; collectives wait up to
/// `timeout`. Returns the results, indexed by rank.
///
/// The first rank that fails or panics is reported. The store is then given up, so that ranks which wait in a call of
/// the group fail at once; all threads are joined in every case.
///
/// ```
/// use std::time::Duration;
/// use epoxide::group::launch::run_threads;
///
/// let gathered = run_threads(3, Duration::from_secs(10), |rank, group| {
///     Ok(group.all_gather(&[10 * rank as u8])?.concat())
/// })?;
/// assert_eq!(gathered, [[0, 10, 20]; 3]);
/// # Ok::<(), epoxide::group::launch::RankFailure>(())
/// ```
pub fn run_threads<T, F>(size: u32, timeout: Duration, rank_main: F) -> Result<Vec<T>, RankFailure>
where
    T: Send,
    F: Fn(u32, Arc<dyn ProcessGroup>) -> Result<T> + Sync,
{
    let store = Arc::new(HashStore::new());
    let first_failure = Mutex::new(None);
    let report = |rank: u32, error: Error| {
        let mut first = first_failure.lock().unwrap_or_else(PoisonError::into_inner);
        if first.is_none() {
            // Before the poison, so that what it causes elsewhere is not taken for the first failure.
            store.poison(&format!("rank {rank} failed: {error}"));
            *first = Some(RankFailure { rank, error });
        }
    };
    let run = |rank: u32| -> Option<T> {
        let options = MeshOptions { timeout, connect: Connect::Eager, ..MeshOptions::default() };
        let group = MeshGroup::new(store.clone(), rank, size, "threads", options);
        let group = group.map(Arc::new).map_err(|error| report(rank, error)).ok()?;
        let main = || rank_main(rank, group.clone());
        let outcome = catch_unwind(AssertUnwindSafe(main)).unwrap_or_else(|panic| {
            Err(Error::os("rank thread", format!("panicked: {}", panic_text(&*panic))))
        });
        outcome
            .map_err(|error| {
                // Reported first, so that what it causes elsewhere is not; then told, so that nobody waits for this rank.
                let reason = error.to_string();
                report(rank, error);
                group.abort(&reason);
            })
            .ok()
    };
    let results = std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for rank in 0..size {
            let run = &run;
            let builder = std::thread::Builder::new().name(format!("rank {rank}"));
            match builder.spawn_scoped(scope, move || run(rank)) {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    report(rank, Error::os("spawn thread", error));
                    break;
                }
            }
        }
        // A thread's own panic was caught above.
        threads.into_iter().map(|thread| thread.join().ok().flatten()).collect::<Option<Vec<T>>>()
    });
    match (first_failure.into_inner().unwrap_or_else(PoisonError::into_inner), results) {
        (None, Some(results)) => Ok(results),
        (Some(failure), _) => Err(failure),
        (None, None) => {
            Err(RankFailure { rank: 0, error: Error::os("rank thread", "ended without a result") })
        }
    }
}

/// The message of a panic.
#[doc(hidden)]
pub fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("a value that is no text")
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;
    use std::process::Stdio;

    use super::*;
    use crate::group::rendezvous;

    const TIMEOUT: Duration = Duration::from_secs(30);
    /// Tells a re-execution of this test binary what to do.
    const ROLE: &str = "EPOXIDE_TEST_ROLE";

    /// The command that runs one test of this binary, which must have it: asked for a test that is not there, it runs none and succeeds.
    #[track_caller]
    pub(crate) fn one_test(path: &str) -> Command {
        let list = ["--exact", path, "--list", "--format", "terse"];
        let listed = current_exe().unwrap().args(list).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&listed.stdout).trim(), format!("{path}: test"));
        let mut command = current_exe().unwrap();
        command.args(["--exact", path, "--nocapture", "--test-threads=1"]);
        command
    }

    /// This test binary again, as a rank that runs [`as_a_rank`] in `role`.
    fn rank_command(role: &str) -> Result<Command> {
        let mut command = one_test("group::launch::tests::as_a_rank");
        command.env(ROLE, role).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(command)
    }

    /// The ranks of the tests below; does nothing as a test of its own.
    #[test]
    fn as_a_rank() {
        let Ok(role) = std::env::var(ROLE) else { return };
        let group = rendezvous(TIMEOUT);
        let rank: u32 = std::env::var(RANK).unwrap().parse().unwrap();
        match role.as_str() {
            "fds" => exchange_files(&group.unwrap()),
            "fail" if rank == 1 => std::process::exit(7),
            "fail" => {
                // From the connection that breaks, or, when late, from the launcher through the store.
                let error = group.and_then(|group| group.barrier(TIMEOUT)).unwrap_err();
                assert!(error.to_string().contains("rank 1"), "{error}");
            }
            "hang" if rank == 0 => std::process::abort(),
            "hang" => std::thread::sleep(TIMEOUT),
            other => panic!("no role {other}"),
        }
    }

    fn exchange_files(group: &MeshGroup) {
        let mut own = tempfile::tempfile().unwrap();
        own.write_all(&[group.rank() as u8]).unwrap();
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        // The first exchange opens what the group keeps.
        drop(group.exchange_fds(&[own.as_fd()]).unwrap());
        let before = open();
        for _ in 0..50 {
            let all = group.exchange_fds(&[own.as_fd()]).unwrap();
            for (peer, mut fds) in all.into_iter().enumerate() {
                assert_eq!(fds.len(), 1);
                let mut byte = [0xff];
                File::from(fds.remove(0)).read_exact_at(&mut byte, 0).unwrap();
                assert_eq!(byte, [peer as u8]);
            }
        }
        let after = open();
        // Nobody's leaving may close a connection before all have counted.
        group.barrier(TIMEOUT).unwrap();
        assert_eq!(after, before, "descriptors leak");
    }

    #[test]
    fn processes_exchange_descriptors() {
        let outcome = spawn_ranks(3, TIMEOUT, |_| rank_command("fds")).unwrap();
        assert_eq!(outcome, Outcome { exits: vec![RankExit::Code(0); 3], first_failure: None });
        assert_eq!(outcome.code(), 0);
    }

    #[test]
    fn a_failing_process_fails_the_others_fast() {
        let start = Instant::now();
        let outcome = spawn_ranks(3, TIMEOUT, |_| rank_command("fail")).unwrap();
        assert_eq!(outcome.exits, [RankExit::Code(0), RankExit::Code(7), RankExit::Code(0)]);
        assert_eq!((outcome.first_failure, outcome.code()), (Some(1), 7));
        assert!(start.elapsed() < TIMEOUT / 2);
    }

    #[test]
    fn a_hanging_process_is_ended() {
        let outcome = spawn_ranks(2, Duration::from_millis(50), |_| rank_command("hang")).unwrap();
        let (abort, term) = (Signal::ABORT.as_raw(), Signal::TERM.as_raw());
        assert_eq!(outcome.exits, [RankExit::Signal(abort), RankExit::Signal(term)]);
        assert_eq!((outcome.first_failure, outcome.code()), (Some(0), 128 + abort));
    }

    #[test]
    fn a_command_that_does_not_start_is_named() {
        let error = spawn_ranks(2, TIMEOUT, |_| Ok(Command::new("/no/such/program"))).unwrap_err();
        assert!(error.to_string().contains("rank 0, /no/such/program"), "{error}");
        assert!(spawn_ranks(0, TIMEOUT, |_| current_exe()).is_err());
    }

    #[test]
    fn threads_return_their_results() {
        let sums = run_threads(4, TIMEOUT, |rank, group| {
            let all = group.all_gather(&[rank as u8])?;
            Ok(all.iter().map(|data| u32::from(data[0])).sum::<u32>())
        });
        assert_eq!(sums.unwrap(), [6; 4]);
    }

    #[test]
    fn a_failing_thread_fails_the_others_fast() {
        let start = Instant::now();
        let failure = run_threads(3, TIMEOUT, |rank, group| {
            if rank == 1 {
                return Err(Error::argument("x", 1, "bad"));
            }
            group.barrier(TIMEOUT)
        })
        .unwrap_err();
        assert_eq!(failure.rank, 1);
        assert!(matches!(failure.error, Error::Argument { argument: "x", .. }));
        assert!(start.elapsed() < TIMEOUT / 2);
    }

    #[test]
    fn a_panicking_thread_is_reported() {
        let failure = run_threads(2, TIMEOUT, |rank, group| {
            assert_eq!(rank, 0, "not mine");
            group.exchange_fds(&[])
        })
        .unwrap_err();
        assert_eq!(failure.rank, 1);
        assert!(failure.to_string().contains("not mine"), "{failure}");
    }
}
