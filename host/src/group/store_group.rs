//! A process group over a [`Store`].

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::store::store_error;
use super::{ProcessGroup, Store, fds};
use crate::error::{Error, Result};

/// A [`ProcessGroup`] whose collectives go through a [`Store`].
///
/// Each collective has a number, and its keys are `NAME.NUMBER.*`: one entry per rank (which call it made, and its
/// bytes) and a counter of the ranks that have read all they need. The last reader deletes the keys, so that the
/// store holds only what is under way. Ranks that make different calls see each other's entries and say so.
#[derive(Debug)]
pub struct StoreGroup {
    store: Arc<dyn Store>,
    name: String,
    rank: u32,
    size: u32,
    timeout: Duration,
    calls: Mutex<Calls>,
}

/// One collective at a time, in the same order on every rank.
#[derive(Debug, Default)]
struct Calls {
    next: u64,
    broken: Option<String>,
}

/// The collective an entry belongs to: the first byte of the entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Operation {
    Barrier = 1,
    AllGather = 2,
    Broadcast = 3,
    ExchangeFds = 4,
}

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Operation::Barrier => "barrier",
            Operation::AllGather => "all_gather",
            Operation::Broadcast => "broadcast",
            Operation::ExchangeFds => "exchange_fds",
        }
    }

    fn name_of(code: u8) -> &'static str {
        [Operation::Barrier, Operation::AllGather, Operation::Broadcast, Operation::ExchangeFds]
            .into_iter()
            .find(|operation| *operation as u8 == code)
            .map_or("an unknown call", Operation::name)
    }
}

impl StoreGroup {
    /// Joins the group `name` as `rank` of `size`. Collectives wait up to `timeout`.
    ///
    /// Joining does not wait for the others. A rank can join a name once; a second group over the same store needs
    /// another name.
    pub fn new(
        store: Arc<dyn Store>,
        rank: u32,
        size: u32,
        name: &str,
        timeout: Duration,
    ) -> Result<StoreGroup> {
        if rank >= size {
            return Err(Error::argument("rank", rank, format!("ranks of a group of {size} are 0..{size}")));
        }
        let key = format!("{name}.join.{rank}");
        if store.add(&key, 1)? != 1 {
            return Err(store_error(
                "join",
                &key,
                format!(
                    "rank {rank} is taken: two ranks have the same number, or the store is left from an earlier \
                     run; use a fresh store or another group name"
                ),
            ));
        }
        Ok(StoreGroup { store, name: name.to_owned(), rank, size, timeout, calls: Mutex::default() })
    }

    /// The store the group meets at.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// Runs one collective, after which the group is either at the next call or broken.
    fn collective<T>(
        &self,
        operation: Operation,
        timeout: Duration,
        body: impl FnOnce(&Call<'_>) -> Result<T>,
    ) -> Result<T> {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reason) = &calls.broken {
            return Err(store_error(
                operation.name(),
                &self.name,
                format!("an earlier call of this group failed, make a new group: {reason}"),
            ));
        }
        let call = Call { group: self, number: calls.next, operation, timeout, start: Instant::now() };
        let outcome = body(&call);
        match &outcome {
            Ok(_) => calls.next += 1,
            Err(error) => calls.broken = Some(error.to_string()),
        }
        outcome
    }
}

impl ProcessGroup for StoreGroup {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    fn barrier(&self, timeout: Duration) -> Result<()> {
        self.collective(Operation::Barrier, timeout, |call| call.barrier())
    }

    fn all_gather(&self, data: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.collective(Operation::AllGather, self.timeout, |call| call.all_gather(data))
    }

    fn broadcast(&self, root: u32, data: &[u8]) -> Result<Vec<u8>> {
        if root >= self.size {
            let rule = format!("ranks of a group of {0} are 0..{0}", self.size);
            return Err(Error::argument("root", root, rule));
        }
        self.collective(Operation::Broadcast, self.timeout, |call| call.broadcast(root, data))
    }

    fn exchange_fds(&self, fds: &[BorrowedFd<'_>]) -> Result<Vec<Vec<OwnedFd>>> {
        if fds.len() > fds::MAX_FDS {
            let rule =
                format!("at most {} descriptors fit one exchange; call it several times", fds::MAX_FDS);
            return Err(Error::argument("fds", fds.len(), rule));
        }
        self.collective(Operation::ExchangeFds, self.timeout, |call| call.exchange_fds(fds))
    }
}

/// One collective under way.
struct Call<'a> {
    group: &'a StoreGroup,
    number: u64,
    operation: Operation,
    timeout: Duration,
    start: Instant,
}

impl Call<'_> {
    fn key(&self, part: impl std::fmt::Display) -> String {
        format!("{}.{}.{part}", self.group.name, self.number)
    }

    fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.start.elapsed())
    }

    /// Shows the others which call this rank makes, and its bytes.
    fn post(&self, data: &[u8]) -> Result<()> {
        let mut entry = Vec::with_capacity(1 + data.len());
        entry.push(self.operation as u8);
        entry.extend_from_slice(data);
        self.group.store.set(&self.key(self.group.rank), &entry)
    }

    /// The bytes that `peer` posted.
    fn entry(&self, peer: u32) -> Result<Vec<u8>> {
        let mut entry = self
            .group
            .store
            .get(&self.key(peer), self.left())
            .map_err(|error| self.waiting_for(&format!("rank {peer}"), error))?;
        if entry.first() != Some(&(self.operation as u8)) {
            return Err(self.mismatch(peer, &entry));
        }
        entry.remove(0);
        Ok(entry)
    }

    /// Counts this rank as having read all it needs; the last one deletes the keys.
    fn finish(&self, others: &[&str]) -> Result<()> {
        let store = &self.group.store;
        let done = self.key("done");
        if store.add(&done, 1)? == i64::from(self.group.size) {
            for rank in 0..self.group.size {
                store.delete(&self.key(rank))?;
            }
            for other in others {
                store.delete(&self.key(other))?;
            }
            store.delete(&done)?;
        }
        Ok(())
    }

    fn barrier(&self) -> Result<()> {
        if self.group.size == 1 {
            return Ok(());
        }
        let store = &self.group.store;
        self.post(&[])?;
        if store.add(&self.key("in"), 1)? == i64::from(self.group.size) {
            store.set(&self.key("go"), &[])?;
        } else {
            store.get(&self.key("go"), self.left()).map_err(|error| self.blame(error))?;
        }
        self.finish(&["in", "go"])
    }

    fn all_gather(&self, data: &[u8]) -> Result<Vec<Vec<u8>>> {
        if self.group.size == 1 {
            return Ok(vec![data.to_owned()]);
        }
        self.post(data)?;
        let all = (0..self.group.size).map(|peer| self.entry(peer)).collect::<Result<_>>()?;
        self.finish(&[])?;
        Ok(all)
    }

    fn broadcast(&self, root: u32, data: &[u8]) -> Result<Vec<u8>> {
        if self.group.size == 1 {
            return Ok(data.to_owned());
        }
        let data = if self.group.rank == root {
            self.post(data)?;
            data.to_owned()
        } else {
            self.entry(root)?
        };
        self.finish(&[])?;
        Ok(data)
    }

    fn exchange_fds(&self, fds: &[BorrowedFd<'_>]) -> Result<Vec<Vec<OwnedFd>>> {
        let group = self.group;
        let mut all = if group.size == 1 {
            vec![Vec::new()]
        } else {
            let mailbox = fds::Mailbox::open(group.size)?;
            let addresses = self.all_gather(mailbox.address())?;
            for (peer, address) in (0u32..).zip(&addresses) {
                if peer != group.rank {
                    fds::send(address, group.rank, peer, fds, self.left())?;
                }
            }
            // A store that was given up fails this check, which ends the wait early.
            let alive = || group.store.check(&self.key("alive")).map(drop);
            match mailbox.receive(group.rank, group.size, self.left(), alive)? {
                fds::Received::All(all) => all,
                fds::Received::Missing(ranks) => {
                    return Err(self.waiting_for(
                        &format!("descriptors of ranks {ranks:?}"),
                        format!("none came within {:?}; these ranks may have died", self.timeout),
                    ));
                }
            }
        };
        all[group.rank as usize] = fds::duplicate(fds)?;
        Ok(all)
    }

    /// Finds out who keeps a barrier waiting.
    fn blame(&self, error: Error) -> Error {
        let mut missing = Vec::new();
        for peer in 0..self.group.size {
            match self.group.store.get(&self.key(peer), Duration::ZERO) {
                Ok(entry) if entry.first() == Some(&(self.operation as u8)) => {}
                Ok(entry) => return self.mismatch(peer, &entry),
                Err(_) => missing.push(peer),
            }
        }
        self.waiting_for(&format!("ranks {missing:?}"), error)
    }

    fn waiting_for(&self, whom: &str, reason: impl ToString) -> Error {
        let reason = reason.to_string();
        let call = self.number;
        store_error(
            self.operation.name(),
            &self.group.name,
            format!("rank {} waits for {whom} in call {call} of the group: {reason}", self.group.rank),
        )
    }

    fn mismatch(&self, peer: u32, entry: &[u8]) -> Error {
        Error::Mismatch {
            rank: self.group.rank,
            peer,
            what: "which collective comes next",
            ours: self.operation.name().to_owned(),
            theirs: entry.first().map_or("nothing", |code| Operation::name_of(*code)).to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};

    use super::*;
    use crate::group::launch::run_threads;
    use crate::group::{FileStore, HashStore};

    const TIMEOUT: Duration = Duration::from_secs(30);

    fn group(store: &Arc<dyn Store>, rank: u32, size: u32, timeout: Duration) -> StoreGroup {
        StoreGroup::new(store.clone(), rank, size, "test", timeout).unwrap()
    }

    #[test]
    fn eight_threads_five_hundred_barriers_leave_no_keys() {
        let store = Arc::new(HashStore::new());
        let passed = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for rank in 0..8 {
                let (store, passed) = (store.clone(), &passed);
                scope.spawn(move || {
                    let group = StoreGroup::new(store, rank, 8, "test", TIMEOUT).unwrap();
                    for round in 0..500 {
                        passed.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                        group.barrier(TIMEOUT).unwrap();
                        assert!(passed.load(std::sync::atomic::Ordering::SeqCst) >= 8 * (round + 1));
                    }
                });
            }
        });
        assert_eq!(store.len(), 8, "only the eight join marks stay");
    }

    #[test]
    fn all_gather_of_unequal_sizes_and_broadcast() {
        run_threads(5, TIMEOUT, |rank, group| {
            for round in 0..20u8 {
                let mine = vec![round ^ rank as u8; rank as usize * 3];
                let all = group.all_gather(&mine)?;
                for (peer, data) in all.iter().enumerate() {
                    assert_eq!(data, &vec![round ^ peer as u8; peer * 3]);
                }
                let root = u32::from(round) % 5;
                let word = group.broadcast(root, &[rank as u8, round])?;
                assert_eq!(word, [root as u8, round]);
            }
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn collectives_over_files() {
        let directory = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for rank in 0..3 {
                let path = directory.path();
                scope.spawn(move || {
                    let store: Arc<dyn Store> = Arc::new(FileStore::new(path).unwrap());
                    let group = group(&store, rank, 3, TIMEOUT);
                    for _ in 0..20 {
                        group.barrier(TIMEOUT).unwrap();
                        assert_eq!(group.all_gather(&[rank as u8]).unwrap(), [[0], [1], [2]]);
                    }
                });
            }
        });
        let left = std::fs::read_dir(directory.path()).unwrap().count();
        assert_eq!(left, 4, "three join marks and the lock");
    }

    #[test]
    fn a_dead_rank_is_named_and_breaks_the_group() {
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        std::thread::scope(|scope| {
            for rank in [0, 2] {
                let group = group(&store, rank, 3, TIMEOUT);
                scope.spawn(move || {
                    let error = group.barrier(Duration::from_millis(100)).unwrap_err();
                    assert!(error.to_string().contains("ranks [1]"), "{error}");
                    let error = group.barrier(TIMEOUT).unwrap_err();
                    assert!(error.to_string().contains("earlier call"), "{error}");
                });
            }
        });
        let late = group(&store, 1, 3, Duration::from_millis(50));
        assert!(late.all_gather(&[]).unwrap_err().to_string().contains("rank 0"));
    }

    #[test]
    fn different_calls_are_told_apart() {
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        std::thread::scope(|scope| {
            let gatherer = group(&store, 0, 2, TIMEOUT);
            let waiter = group(&store, 1, 2, TIMEOUT);
            scope.spawn(move || {
                let error = gatherer.all_gather(&[1]).unwrap_err();
                assert!(error.to_string().contains("barrier there"), "{error}");
            });
            let error = waiter.barrier(Duration::from_millis(100)).unwrap_err();
            assert!(error.to_string().contains("all_gather there"), "{error}");
        });
    }

    #[test]
    fn bad_arguments() {
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        assert!(StoreGroup::new(store.clone(), 2, 2, "test", TIMEOUT).is_err());
        let alone = group(&store, 0, 1, TIMEOUT);
        assert!(alone.broadcast(1, &[]).is_err());
        alone.barrier(TIMEOUT).unwrap();
        let error = StoreGroup::new(store, 0, 1, "test", TIMEOUT).unwrap_err();
        assert!(error.to_string().contains("taken"), "{error}");
    }

    #[test]
    fn descriptors_between_threads() {
        let files = run_threads(4, TIMEOUT, |rank, group| {
            let mut own = Vec::new();
            for index in 0..rank {
                let file = tempfile::tempfile().unwrap();
                std::io::Write::write_all(&mut &file, &[rank as u8, index as u8]).unwrap();
                own.push(file);
            }
            let mut received = Vec::new();
            for _ in 0..3 {
                let fds: Vec<_> = own.iter().map(AsFd::as_fd).collect();
                received = group.exchange_fds(&fds)?;
            }
            Ok(received)
        })
        .unwrap();
        for received in files {
            for (peer, fds) in received.into_iter().enumerate() {
                assert_eq!(fds.len(), peer);
                for (index, fd) in fds.into_iter().enumerate() {
                    let flags = rustix::io::fcntl_getfd(&fd).unwrap();
                    assert!(flags.contains(rustix::io::FdFlags::CLOEXEC), "fd {}", fd.as_raw_fd());
                    let mut bytes = [0; 2];
                    std::os::unix::fs::FileExt::read_exact_at(&std::fs::File::from(fd), &mut bytes, 0)
                        .unwrap();
                    assert_eq!(bytes, [peer as u8, index as u8]);
                }
            }
        }
    }

    #[test]
    fn descriptors_of_a_dead_rank_time_out() {
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        let alive = group(&store, 0, 2, Duration::from_millis(200));
        let dead = group(&store, 1, 2, Duration::from_millis(200));
        std::thread::scope(|scope| {
            // Rank 1 announces a socket that it never sends from, as if it died in between.
            scope.spawn(|| {
                dead.collective(Operation::ExchangeFds, TIMEOUT, |call| {
                    let mailbox = fds::Mailbox::open(2)?;
                    call.all_gather(mailbox.address())?;
                    std::thread::sleep(Duration::from_millis(300));
                    Ok(())
                })
            });
            let error = alive.exchange_fds(&[std::io::stdin().as_fd()]).unwrap_err();
            assert!(error.to_string().contains("ranks [1]"), "{error}");
        });
    }
}
