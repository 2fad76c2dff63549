//! Where the store of a launch on one host is.

use std::fs::{File, Permissions};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags, flock, fstat, open, stat};
use tempfile::TempDir;

use super::leftovers;
use crate::error::{Error, Result};

/// The prefix of the names of such directories. The kernel's number of this boot follows, then the
/// process that made it, then a random part.
const PREFIX: &str = "epoxide-store-";
/// How often a directory is made anew after another launch swept it before it was locked.
const ATTEMPTS: u32 = 100;

/// The directory of a launch's store, closed to other users. Dropping removes it.
///
/// Its owner holds a lock on it, which the kernel releases however the owner ends. Making a
/// directory removes abandoned ones, and ends the remaining processes of their ranks. A directory
/// is abandoned if it has no lock, and is of this user, below the same `TMPDIR`. It must be of this
/// boot of this kernel, because the locks of another host may be invisible here. A launch leaves
/// nothing else behind: its sockets have abstract names, its shared memory has none.
#[derive(Debug)]
pub struct StoreDirectory {
    /// Where it is.
    pub path: PathBuf,
    // Dropped before the lock, so that no launch sweeps a directory that is being removed.
    _directory: TempDir,
    _lock: OwnedFd,
}

impl StoreDirectory {
    /// Makes an empty one, below `TMPDIR` or, if that is unset, `/tmp`.
    pub fn create() -> Result<StoreDirectory> {
        let folder = std::env::temp_dir();
        // An empty TMPDIR counts as unset.
        StoreDirectory::below(if folder.as_os_str().is_empty() { Path::new("/tmp") } else { &folder })
    }

    fn below(parent: &Path) -> Result<StoreDirectory> {
        let prefix = format!("{PREFIX}{}-", boot());
        sweep(parent, &prefix);
        for _ in 0..ATTEMPTS {
            let directory = tempfile::Builder::new()
                .prefix(&format!("{prefix}{}-", std::process::id()))
                .permissions(Permissions::from_mode(0o700))
                .tempdir_in(parent)
                .map_err(|error| {
                    let reason =
                        format!("{}: {error}; point TMPDIR at a writable directory", parent.display());
                    Error::os("mkdir", reason).with_errno(&error)
                })?;
            // Another launch's clean-up may have removed it before it was locked.
            if let Some(lock) = lock(directory.path()) {
                return Ok(StoreDirectory {
                    path: directory.path().to_owned(),
                    _directory: directory,
                    _lock: lock,
                });
            }
        }
        Err(Error::os("flock", format!("{}: does not stay locked; point TMPDIR elsewhere", parent.display())))
    }

    /// Records that a process leads its own group, whose processes may survive if this process is
    /// killed.
    pub(super) fn note_group(&self, leader: u32) {
        let mut options = File::options();
        let file = options.append(true).create(true).mode(0o600).open(self.path.join(leftovers::GROUPS));
        // The launch works without the file; a killed launcher then leaves more behind.
        if let Err(error) = file.and_then(|mut file| writeln!(file, "{leader}")) {
            tracing::warn!("{}: {error}", self.path.display());
        }
    }
}

/// The first part of this boot's number; the same in all containers of a kernel, and on no other
/// host.
fn boot() -> String {
    let number = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    number.split('-').next().unwrap_or_default().to_owned()
}

/// Opens a directory and locks it. `None` if another process holds it, or if it was removed.
fn lock(path: &Path) -> Option<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = open(path, flags, Mode::empty()).ok()?;
    match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
        Err(rustix::io::Errno::WOULDBLOCK) => return None,
        // A file system without locks: no other launch can take it for abandoned either.
        Err(_) => return Some(directory),
        Ok(()) => {}
    }
    let (held, there) = (fstat(&directory).ok()?, stat(path).ok()?);
    ((held.st_dev, held.st_ino) == (there.st_dev, there.st_ino)).then_some(directory)
}

/// Removes the directories without a lock, and ends the remaining processes of their ranks.
fn sweep(parent: &Path, prefix: &str) {
    // Without a number of the boot, directories of other hosts cannot be distinguished.
    if prefix.len() == PREFIX.len() + 1 {
        return;
    }
    let entries = std::fs::read_dir(parent).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix)) {
        let path = entry.path();
        let user = rustix::process::geteuid().as_raw();
        let Some(abandoned) = lock(&path) else { continue };
        // A free lock is a sign only if locks work: a second descriptor must not get it.
        if fstat(&abandoned).is_ok_and(|stat| stat.st_uid == user) && lock(&path).is_none() {
            leftovers::end(&path);
            // The lock is held until after, so that a process that has just made it does not take
            // it for its own.
            let _ = std::fs::remove_dir_all(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_other_user_may_look_into_it_and_dropping_removes_it() {
        let directory = StoreDirectory::create().unwrap();
        let path = directory.path.clone();
        std::fs::write(path.join("k"), b"").unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        drop(directory);
        assert!(!path.exists());
    }

    #[test]
    fn directories_without_a_lock_are_swept_and_no_others() {
        let parent = tempfile::tempdir().unwrap();
        let held = StoreDirectory::below(parent.path()).unwrap();
        let make = |name: String| {
            let path = parent.path().join(name);
            std::fs::create_dir_all(path.join("store")).unwrap();
            std::fs::write(path.join("store/key"), b"value").unwrap();
            path
        };
        let abandoned = make(format!("{PREFIX}{}-1-x", boot()));
        let of_another_host = make(format!("{PREFIX}00000000-1-x"));
        let others = make("epoxide".to_owned());
        let linked = parent.path().join(format!("{PREFIX}{}-1-link", boot()));
        std::os::unix::fs::symlink(&others, &linked).unwrap();
        let next = StoreDirectory::below(parent.path()).unwrap();
        assert!(!abandoned.exists());
        for path in [&held.path, &next.path, &of_another_host, &others.join("store/key"), &linked] {
            assert!(path.exists(), "{}", path.display());
        }
    }

    #[test]
    fn directories_that_are_made_at_once_are_not_swept() {
        let parent = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        let directory = StoreDirectory::below(parent.path()).unwrap();
                        std::fs::write(directory.path.join("key"), b"value").unwrap();
                        assert!(directory.path.join("key").exists());
                    }
                });
            }
        });
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
    }
}
