//! Where the store of a launch on one host is.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};

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
