//! Where the store of a launch on one host is.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use tempfile::TempDir;

use crate::error::{Error, Result};

/// What the names of such directories begin with; the number of the process that made it follows, then a random part.
const PREFIX: &str = "epoxide-store-";

/// The directory of a launch's store, which no other user may look into. Dropping removes it.
#[doc(hidden)]
#[derive(Debug)]
pub struct StoreDirectory {
    /// Where it is.
    pub path: PathBuf,
    _directory: TempDir,
}

impl StoreDirectory {
    /// Makes an empty one, below `TMPDIR`.
    pub fn create() -> Result<StoreDirectory> {
        let parent = std::env::temp_dir();
        let directory = tempfile::Builder::new()
            .prefix(&format!("{PREFIX}{}-", std::process::id()))
            .permissions(Permissions::from_mode(0o700))
            .tempdir_in(&parent)
            .map_err(|error| {
                let reason = format!("{}: {error}; point TMPDIR at a writable directory", parent.display());
                Error::os("mkdir", reason)
            })?;
        Ok(StoreDirectory { path: directory.path().to_owned(), _directory: directory })
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
}
