//! The store of processes that share a directory.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, OFlags, flock};

use super::store::{Store, get_timed_out, parse_counter, poisoned, store_error, sum_counter, wait_timed_out};
use crate::error::{Error, Result};
use crate::foreign::escaped;
use crate::own_file;
use crate::secret;

/// How long what changes a value in place waits for the lock file. A holder keeps it for
/// microseconds.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30);
/// Longest encoded key, in bytes; file names end at 255.
const MAX_KEY_BYTES: usize = 240;
/// Begins the name of a value's file.
const VALUE: &str = "k.";
/// Begins the name of a queue's file: entries, each after its length in 8 bytes. An empty queue has
/// no file.
const QUEUE: &str = "q.";
const LOCK_FILE: &str = "lock";
const POISON_FILE: &str = "poison";

/// A [`Store`] in a directory, with one file per key, replaced by rename. Operations that depend on
/// the old value, such as counters and queues, hold a lock file. [`Store::set`] takes no lock: a
/// set that races with an add, append or compare of the same key may be lost or may replace it.
///
/// Works across processes of one host, and across hosts where the file system has working `rename`
/// and `flock`. The directory should be fresh for each run: keys of an earlier run would be taken
/// for this one's.
///
/// New directories have mode 0700 and files mode 0600, so only this user has access. A user who may
/// write in the directory can take any rank's place. So a directory of another user, or one that
/// all users may write in, is rejected. One that its group may write in causes a warning. Links and
/// files of other users in it are errors, never followed or read. The directories above it are not
/// checked.
#[derive(Debug)]
pub struct FileStore {
    directory: PathBuf,
}

/// Rejects a directory in which another user may write.
fn check_owner(directory: &Path) -> Result<()> {
    let fail = |reason: String| store_error("open", &directory.to_string_lossy(), reason);
    // Without following links: another user may have put a link there since the path was resolved.
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW;
    let opened = OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(directory);
    let metadata = opened.and_then(|file| file.metadata()).map_err(|error| fail(error.to_string()))?;
    let user = rustix::process::geteuid().as_raw();
    let mode = metadata.mode() & 0o7777;
    if metadata.uid() != user {
        let owner = metadata.uid();
        let reason = format!(
            "the directory is user {owner}'s, who could take any rank's place, and this process runs as user {user}; \
             name one of your own, or one that does not exist yet"
        );
        return Err(fail(reason));
    }
    if mode & 0o002 != 0 {
        let reason = format!(
            "all users may write in the directory (mode {mode:04o}), and so take any rank's place; \
             `chmod o-w` it, or name one that does not exist yet"
        );
        return Err(fail(reason));
    }
    if mode & 0o020 != 0 {
        let group = metadata.gid();
        tracing::warn!(
            "store in {}: all of group {group} may write in it (mode {mode:04o}), and so take any rank's place; \
             `chmod g-w` it if they are not to",
            directory.display()
        );
    }
    Ok(())
}

/// Distinguishes the temporary files of one process.
static NEXT_TEMPORARY: AtomicU64 = AtomicU64::new(0);

impl FileStore {
    /// The store in `directory`, which is created if need be.
    ///
    /// # Errors
    /// Where it cannot be created, is another user's, or may be written in by all.
    pub fn new(directory: impl Into<PathBuf>) -> Result<FileStore> {
        let directory = directory.into();
        // Without following links: the store must use the directory that was checked.
        let directory = DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&directory)
            .and_then(|()| fs::canonicalize(&directory))
            .map_err(|error| store_error("open", &directory.to_string_lossy(), error))?;
        check_owner(&directory)?;
        Ok(FileStore { directory })
    }

    /// Gives the store up: every call from now on, and every call that waits now, fails with
    /// `reason` in every process. The last reason stays.
    pub(crate) fn poison(&self, reason: &str) -> Result<()> {
        self.replace("poison", "", &self.directory.join(POISON_FILE), reason.as_bytes())
    }

    /// The file of a key: `k.` and the key, with everything but letters, digits, `-`, `_` and `.`
    /// as `%xx`.
    fn path(&self, operation: &'static str, key: &str) -> Result<PathBuf> {
        self.file(VALUE, operation, key)
    }

    /// The file of a queue: `q.` and the key.
    fn queue_path(&self, operation: &'static str, key: &str) -> Result<PathBuf> {
        self.file(QUEUE, operation, key)
    }

    fn file(&self, kind: &str, operation: &'static str, key: &str) -> Result<PathBuf> {
        let mut name = String::from(kind);
        for byte in key.bytes() {
            if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.') {
                name.push(char::from(byte));
            } else {
                name.push_str(&format!("%{byte:02x}"));
            }
        }
        if name.len() > MAX_KEY_BYTES {
            return Err(store_error(
                operation,
                key,
                format!(
                    "the key takes {} bytes as a file name, at most {MAX_KEY_BYTES} fit; shorten it",
                    name.len()
                ),
            ));
        }
        Ok(self.directory.join(name))
    }

    fn ensure_usable(&self, operation: &'static str, key: &str) -> Result<()> {
        match own_file::read(&self.directory.join(POISON_FILE)) {
            Ok(reason) => Err(poisoned(operation, key, &escaped(&reason))),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            Err(error) => Err(store_error(operation, key, error)),
        }
    }

    /// Writes `value` to `path` atomically: a reader gets all of it or nothing.
    fn replace(&self, operation: &'static str, key: &str, path: &Path, value: &[u8]) -> Result<()> {
        let number = NEXT_TEMPORARY.fetch_add(1, Ordering::Relaxed);
        // Containers have the same process numbers.
        let drawn = secret::hex(&secret::random::<8>()?);
        let temporary = self.directory.join(format!("tmp.{}.{number}.{drawn}", std::process::id()));
        let write = || {
            let mut file = own_file::create(&temporary)?;
            file.write_all(value)?;
            fs::rename(&temporary, path)
        };
        write().map_err(|error| {
            let _ = fs::remove_file(&temporary);
            self.io_error(operation, key, error)
        })
    }

    fn read(&self, operation: &'static str, key: &str, path: &Path) -> Result<Option<Vec<u8>>> {
        match own_file::read(path) {
            Ok(value) => Ok(Some(value)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(self.io_error(operation, key, error)),
        }
    }

    /// Takes the lock file; dropping the file releases it.
    fn lock(&self, operation: &'static str, key: &str) -> Result<File> {
        let file = own_file::open_or_create(&self.directory.join(LOCK_FILE))
            .map_err(|error| self.io_error(operation, key, error))?;
        let start = Instant::now();
        let mut backoff = Backoff::new();
        loop {
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(file),
                Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => {}
                Err(error) => return Err(self.io_error(operation, key, error.into())),
            }
            if start.elapsed() > LOCK_TIMEOUT {
                let reason = format!(
                    "another process has held {}/{LOCK_FILE} for {LOCK_TIMEOUT:?}; look for a stopped rank",
                    self.directory.display()
                );
                return Err(store_error(operation, key, reason));
            }
            backoff.sleep(LOCK_TIMEOUT);
        }
    }

    /// True when the key has a value, or its queue an entry.
    fn has(&self, operation: &'static str, key: &str) -> Result<bool> {
        for path in [self.path(operation, key)?, self.queue_path(operation, key)?] {
            if path.try_exists().map_err(|error| self.io_error(operation, key, error))? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Tries `attempt` until it gives something or `timeout` is over (`None`).
    fn wait_for<T>(
        &self,
        operation: &'static str,
        key: &str,
        timeout: Duration,
        mut attempt: impl FnMut() -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let start = Instant::now();
        let mut backoff = Backoff::new();
        loop {
            self.ensure_usable(operation, key)?;
            if let Some(value) = attempt()? {
                return Ok(Some(value));
            }
            let Some(left) = timeout.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) else {
                return Ok(None);
            };
            backoff.sleep(left);
        }
    }

    /// The entries of a queue's file.
    fn entries<'a>(&self, operation: &'static str, key: &str, bytes: &'a [u8]) -> Result<Vec<&'a [u8]>> {
        split_entries(bytes).ok_or_else(|| {
            let reason =
                format!("the queue's file in {} is damaged; use a fresh directory", self.directory.display());
            store_error(operation, key, reason)
        })
    }

    fn io_error(&self, operation: &'static str, key: &str, error: io::Error) -> Error {
        let hint = if error.kind() == ErrorKind::NotFound { "; the directory was removed" } else { "" };
        store_error(operation, key, format!("{error} in {}{hint}", self.directory.display()))
    }
}

impl Store for FileStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let path = self.path("set", key)?;
        self.ensure_usable("set", key)?;
        self.replace("set", key, &path, value)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let path = self.path("get", key)?;
        self.wait_for("get", key, timeout, || self.read("get", key, &path))?
            .ok_or_else(|| get_timed_out(key, timeout))
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        let path = self.path("add", key)?;
        self.ensure_usable("add", key)?;
        let _lock = self.lock("add", key)?;
        let value = self.read("add", key, &path)?.map_or(Ok(0), |value| parse_counter(key, &value))?;
        let sum = sum_counter(key, value, delta)?;
        self.replace("add", key, &path, sum.to_string().as_bytes())?;
        Ok(sum)
    }

    fn check(&self, key: &str) -> Result<bool> {
        self.ensure_usable("check", key)?;
        self.has("check", key)
    }

    fn delete(&self, key: &str) -> Result<bool> {
        let path = self.path("delete", key)?;
        self.ensure_usable("delete", key)?;
        // A change of the value that is under way would bring it back.
        let _lock = self.lock("delete", key)?;
        match fs::remove_file(path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(self.io_error("delete", key, error)),
        }
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        let mut missing = keys.to_vec();
        self.wait_for("wait", keys.first().unwrap_or(&""), timeout, || {
            while let Some(key) = missing.last() {
                if !self.has("wait", key)? {
                    return Ok(None);
                }
                missing.pop();
            }
            Ok(Some(()))
        })?
        .ok_or_else(|| wait_timed_out("wait", missing.last().unwrap_or(&""), timeout))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let path = self.path("compare_set", key)?;
        self.ensure_usable("compare_set", key)?;
        let _lock = self.lock("compare_set", key)?;
        match self.read("compare_set", key, &path)? {
            Some(value) if value != expected => return Ok(value),
            None if !expected.is_empty() => return Ok(expected.to_owned()),
            _ => self.replace("compare_set", key, &path, desired)?,
        }
        Ok(desired.to_owned())
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        let path = self.path("append", key)?;
        self.ensure_usable("append", key)?;
        let _lock = self.lock("append", key)?;
        let mut all = self.read("append", key, &path)?.unwrap_or_default();
        all.extend_from_slice(value);
        self.replace("append", key, &path, &all)
    }

    fn num_keys(&self) -> Result<u64> {
        self.ensure_usable("num_keys", "")?;
        let error = |error| self.io_error("num_keys", "", error);
        let mut count = 0;
        for entry in fs::read_dir(&self.directory).map_err(error)? {
            let name = entry.map_err(error)?.file_name();
            count += u64::from(name.as_encoded_bytes().starts_with(VALUE.as_bytes()));
        }
        Ok(count)
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        let path = self.queue_path("queue_push", key)?;
        self.ensure_usable("queue_push", key)?;
        let _lock = self.lock("queue_push", key)?;
        let mut all = self.read("queue_push", key, &path)?.unwrap_or_default();
        all.extend_from_slice(&(value.len() as u64).to_le_bytes());
        all.extend_from_slice(value);
        self.replace("queue_push", key, &path, &all)
    }

    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Option<Vec<u8>>> {
        let path = self.queue_path("queue_pop", key)?;
        let error = |error| self.io_error("queue_pop", key, error);
        self.wait_for("queue_pop", key, timeout, || {
            if !path.try_exists().map_err(error)? {
                return Ok(None);
            }
            let _lock = self.lock("queue_pop", key)?;
            // Another rank may have taken the last entry just now.
            let Some(all) = self.read("queue_pop", key, &path)? else {
                return Ok(None);
            };
            let entries = self.entries("queue_pop", key, &all)?;
            let Some((first, rest)) = entries.split_first() else {
                return Ok(None);
            };
            if rest.is_empty() {
                fs::remove_file(&path).map_err(error)?;
            } else {
                self.replace("queue_pop", key, &path, &all[size_of::<u64>() + first.len()..])?;
            }
            Ok(Some(first.to_vec()))
        })
    }

    fn queue_len(&self, key: &str) -> Result<u64> {
        let path = self.queue_path("queue_len", key)?;
        self.ensure_usable("queue_len", key)?;
        let all = self.read("queue_len", key, &path)?.unwrap_or_default();
        Ok(self.entries("queue_len", key, &all)?.len() as u64)
    }
}

/// The entries that a queue's file holds, unless it is damaged.
fn split_entries(mut bytes: &[u8]) -> Option<Vec<&[u8]>> {
    let mut entries = Vec::new();
    while !bytes.is_empty() {
        let (length, rest) = bytes.split_first_chunk()?;
        let (entry, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        entries.push(entry);
        bytes = rest;
    }
    Some(entries)
}

/// Parses the files of a store: a queue's, which holds nothing but entries, and a counter's.
pub fn fuzz_store_files(bytes: &[u8]) {
    if let Some(entries) = split_entries(bytes) {
        let again = entries.iter().flat_map(|entry| [&(entry.len() as u64).to_le_bytes(), *entry].concat());
        assert!(again.eq(bytes.iter().copied()));
    }
    if let Ok(value) = parse_counter("key", bytes) {
        let sum = sum_counter("key", value, 1);
        assert_eq!(sum.ok(), value.checked_add(1));
    }
}

/// A queue's file and a counter's.
pub fn sample_store_files() -> Vec<Vec<u8>> {
    let entry = |bytes: &[u8]| [&(bytes.len() as u64).to_le_bytes(), bytes].concat();
    vec![
        [entry(b"first"), entry(b""), entry(&[3; 40])].concat(),
        b"-42".to_vec(),
        i64::MAX.to_string().into(),
    ]
}

/// Sleeps that grow from 20 µs to 5 ms.
struct Backoff {
    next: Duration,
}

impl Backoff {
    const LONGEST: Duration = Duration::from_millis(5);

    fn new() -> Backoff {
        Backoff { next: Duration::from_micros(20) }
    }

    /// Sleeps for the next step, but no longer than `left`.
    fn sleep(&mut self, left: Duration) {
        std::thread::sleep(self.next.min(left));
        self.next = (self.next * 2).min(Backoff::LONGEST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn store() -> (tempfile::TempDir, FileStore) {
        let directory = tempfile::tempdir().unwrap();
        let store = FileStore::new(directory.path().join("board")).unwrap();
        (directory, store)
    }

    #[test]
    fn round_trip_with_awkward_keys() {
        let (_directory, store) = store();
        for key in ["a", "../b", "c/d", "e%f", "", "ä.tmp", "lock", "poison"] {
            assert!(!store.check(key).unwrap(), "{key}");
            store.set(key, key.as_bytes()).unwrap();
        }
        for key in ["a", "../b", "c/d", "e%f", "", "ä.tmp", "lock", "poison"] {
            assert_eq!(store.get(key, Duration::ZERO).unwrap(), key.as_bytes());
            assert!(store.delete(key).unwrap());
            assert!(!store.delete(key).unwrap());
        }
        assert!(store.set(&"x".repeat(300), b"").unwrap_err().to_string().contains("shorten"));
    }

    #[test]
    fn get_times_out() {
        let (_directory, store) = store();
        let start = Instant::now();
        let error = store.get("who", Duration::from_millis(30)).unwrap_err();
        assert!(start.elapsed() >= Duration::from_millis(30));
        assert!(matches!(&error, Error::Store { operation: "get", key, .. } if key == "who"), "{error}");
    }

    #[test]
    fn counters_are_exact_between_threads() {
        let (_directory, store) = store();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        // A store of its own, as another process would have.
                        FileStore::new(&store.directory).unwrap().add("n", 1).unwrap();
                    }
                });
            }
        });
        assert_eq!(store.add("n", 0).unwrap(), 400);
    }

    #[test]
    fn poison_reaches_waiters() {
        let (_directory, store) = store();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| store.get("never", Duration::from_secs(60)));
            std::thread::sleep(Duration::from_millis(20));
            store.poison("rank 2 failed").unwrap();
            let error = waiter.join().unwrap().unwrap_err();
            assert!(matches!(&error, Error::Aborted { reason, .. } if reason == "rank 2 failed"), "{error}");
        });
        assert!(store.add("n", 1).is_err());
    }

    #[test]
    fn another_user_reads_nothing_and_no_directory_of_others_is_taken() {
        use std::os::unix::fs::PermissionsExt as _;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("board");
        let store = FileStore::new(&path).unwrap();
        store.set("token", b"secret").unwrap();
        store.add("count", 1).unwrap();
        store.queue_push("queue", b"entry").unwrap();
        store.poison("over").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&path), 0o700);
        for entry in fs::read_dir(&path).unwrap() {
            let entry = entry.unwrap().path();
            assert_eq!(mode(&entry), 0o600, "{}", entry.display());
        }
        // Files are closed to others even where the directory is not.
        for open in [directory.path(), &path] {
            fs::set_permissions(open, fs::Permissions::from_mode(0o755)).unwrap();
        }
        if rustix::process::geteuid().is_root() {
            use std::os::unix::process::CommandExt as _;
            let cat = |file: &str| {
                std::process::Command::new("cat").arg(path.join(file)).uid(65534).gid(65534).output().unwrap()
            };
            assert!(!cat("k.token").status.success());
            fs::write(path.join("open"), b"all").unwrap();
            fs::set_permissions(path.join("open"), fs::Permissions::from_mode(0o644)).unwrap();
            assert!(cat("open").status.success(), "the other user does get as far as the directory");
            std::os::unix::fs::chown(&path, Some(65534), None).unwrap();
            let error = FileStore::new(&path).unwrap_err().to_string();
            assert!(error.contains("user 65534's") && error.contains("name one of your own"), "{error}");
            std::os::unix::fs::chown(&path, Some(0), None).unwrap();
        } else {
            eprintln!("not root: access by another user is not tried");
        }
        for mode in [0o777, 0o1777, 0o702] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            let error = FileStore::new(&path).unwrap_err().to_string();
            assert!(error.contains("chmod o-w"), "{mode:o}: {error}");
        }
        fs::set_permissions(&path, fs::Permissions::from_mode(0o770)).unwrap();
        FileStore::new(&path).unwrap();
    }

    #[test]
    fn links_in_the_directory_are_neither_read_nor_written() {
        let (directory, store) = store();
        let victim = directory.path().join("victim");
        fs::write(&victim, "of somebody else").unwrap();
        // A member of the directory's group may have put them there.
        let link = |name: &str| std::os::unix::fs::symlink(&victim, store.directory.join(name)).unwrap();
        link("k.linked");
        link("tmp.0.0");
        link(LOCK_FILE);
        let linked = |error: Error| {
            let error = error.to_string();
            assert!(error.contains("a link is there, which is not followed"), "{error}");
        };
        linked(store.get("linked", Duration::ZERO).unwrap_err());
        linked(store.add("count", 1).unwrap_err());
        // A value is put in a link's place.
        store.set("linked", b"value").unwrap();
        assert_eq!(store.get("linked", Duration::ZERO).unwrap(), b"value");
        link(POISON_FILE);
        linked(store.check("linked").unwrap_err());
        assert_eq!(fs::read(&victim).unwrap(), b"of somebody else");
    }

    #[test]
    fn a_removed_directory_is_named() {
        let (directory, store) = store();
        drop(directory);
        assert!(store.set("k", b"").unwrap_err().to_string().contains("removed"));
    }
}
