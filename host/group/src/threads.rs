//! Ranks that are threads of this process.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::lock::lock;
use crate::mesh_group::Connect;
use crate::virtual_time::{VirtualTime, as_member};
use crate::{HashStore, MeshGroup, MeshOptions, ProcessGroup};

/// Why [`run_threads`] failed: the first rank that did, and how.
#[derive(Debug, Clone)]
pub struct RankFailure {
    /// The rank that failed first.
    pub rank: u32,
    /// Its result, or its panic as [`Error::Os`].
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

/// Runs `rank_main(rank, group)` on `size` threads that form a group over a [`HashStore`];
/// collectives wait up to `timeout`. Returns the results, indexed by rank.
///
/// The first rank that fails or panics is reported. The store is then poisoned
/// ([`Error::Aborted`](crate::Error::Aborted)), so ranks that wait in a call of the group fail at
/// once. All threads are joined in every case.
///
/// ```
/// use std::time::Duration;
/// use epoxide_group::run_threads;
///
/// let gathered = run_threads(3, Duration::from_secs(60), |rank, group| {
///     Ok(group.all_gather(&[10 * rank as u8])?.concat())
/// })?;
/// assert_eq!(gathered, [[0, 10, 20]; 3]);
/// # Ok::<(), epoxide_group::RankFailure>(())
/// ```
///
/// # Errors
/// [`RankFailure`] with the rank that failed first, and its error or panic.
#[allow(clippy::result_large_err)] // Once per run at most, and plain to match on.
pub fn run_threads<T, F>(size: u32, timeout: Duration, rank_main: F) -> Result<Vec<T>, RankFailure>
where
    T: Send,
    F: Fn(u32, Arc<dyn ProcessGroup>) -> Result<T> + Sync,
{
    // As long as ranks have ended: a `size` of billions fails at its threads, without their memory.
    let results = Mutex::new(Vec::<Option<T>>::new());
    join_threads(size, timeout, &|rank, group| {
        let result = rank_main(rank, group)?;
        let mut results = lock(&results);
        let len = results.len().max(rank as usize + 1);
        results.resize_with(len, || None);
        results[rank as usize] = Some(result);
        Ok(())
    })?;
    let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok(results.into_iter().flatten().collect())
}

/// [`run_threads`] without results, compiled once for all that run. Each thread has returned `Ok`
/// where this does.
#[allow(clippy::result_large_err)] // As of `run_threads`.
fn join_threads(
    size: u32,
    timeout: Duration,
    rank_main: &(dyn Fn(u32, Arc<dyn ProcessGroup>) -> Result<()> + Sync),
) -> Result<(), RankFailure> {
    let store = Arc::new(HashStore::new());
    let first_failure = Mutex::new(None);
    let report = |rank: u32, error: Error| {
        let mut first = lock(&first_failure);
        if first.is_none() {
            // Before the poison, so that what it causes elsewhere is not taken for the first
            // failure.
            store.poison(&format!("rank {rank} failed: {error}"));
            *first = Some(RankFailure { rank, error });
        }
    };
    let run = |rank: u32| {
        let options = MeshOptions { timeout, connect: Connect::Eager, ..MeshOptions::default() };
        let group = match MeshGroup::new(store.clone(), rank, size, "threads", options) {
            Ok(group) => Arc::new(group),
            Err(error) => return report(rank, error),
        };
        let main = || rank_main(rank, group.clone());
        let outcome = catch_unwind(AssertUnwindSafe(main)).unwrap_or_else(|panic| {
            Err(Error::os("rank thread", format!("panicked: {}", panic_text(&*panic))))
        });
        if let Err(error) = outcome {
            // Report first, before the consequences on other ranks. Then abort the group, so that
            // no rank waits for this one.
            let reason = error.to_string();
            report(rank, error);
            group.abort(&reason);
        }
    };
    // If the system does not list blocked threads, devices use the real clock.
    let time = VirtualTime::of_this_thread().or_else(VirtualTime::new);
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for rank in 0..size {
            let run = &run;
            let builder = std::thread::Builder::new().name(format!("rank {rank}"));
            match builder.spawn_scoped(scope, as_member(time.clone(), move || run(rank))) {
                Ok(thread) => threads.push((rank, thread)),
                Err(error) => {
                    report(rank, Error::system("spawn thread", error));
                    break;
                }
            }
        }
        // A panic of `rank_main` was caught above.
        for (rank, thread) in threads {
            if thread.join().is_err() {
                report(rank, Error::os("rank thread", "ended without a result"));
            }
        }
    });
    match first_failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(failure) => Err(failure),
        None => Ok(()),
    }
}

/// The message of a panic.
pub fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("a value that is no text")
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(120);

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
        assert!(start.elapsed() < TIMEOUT);
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

    #[test]
    fn numbers_of_ranks_have_bounds() {
        let store = Arc::new(HashStore::new());
        let error = MeshGroup::new(store, 0, u32::MAX, "g", MeshOptions::default()).unwrap_err();
        assert!(error.to_string().contains("a group has at most 65536 ranks"), "{error}");
    }
}
