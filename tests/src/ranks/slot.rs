//! Record of a rank's current work, which can be read after the rank has died.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use epoxide::{Error, Result};

/// Bytes of a slot in a file.
const BYTES: usize = 256;

/// One rank's slot.
#[derive(Debug, Clone)]
pub(super) enum Slot {
    /// A thread's slot.
    Memory(Arc<Mutex<String>>),
    /// A process's slot: its bytes stay in the file when the process is killed.
    File(Arc<File>),
}

impl Slot {
    pub fn memory() -> Slot {
        Slot::Memory(Arc::default())
    }

    pub fn file(path: &Path) -> Result<Slot> {
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path);
        file.map(|file| Slot::File(Arc::new(file)))
            .map_err(|error| Error::os("open", format!("{}: {error}", path.display())))
    }

    pub fn write(&self, text: &str) {
        match self {
            Slot::Memory(slot) => {
                let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
                slot.clear();
                slot.push_str(text);
            }
            Slot::File(file) => {
                let mut record = [0; BYTES];
                let length = text.len().min(BYTES);
                record[..length].copy_from_slice(&text.as_bytes()[..length]);
                // The record only helps to diagnose failures, so a failed write is ignored.
                let _ = file.write_all_at(&record, 0);
            }
        }
    }

    pub fn read(&self) -> String {
        match self {
            Slot::Memory(slot) => slot.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            Slot::File(file) => {
                let mut record = [0; BYTES];
                let length = file.read_at(&mut record, 0).unwrap_or(0);
                let text = String::from_utf8_lossy(&record[..length]);
                text.trim_end_matches(['\0', '\u{fffd}']).to_owned()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_text_is_read() {
        let directory = tempfile::tempdir().unwrap();
        for slot in [Slot::memory(), Slot::file(&directory.path().join("slot")).unwrap()] {
            assert_eq!(slot.read(), "");
            slot.write("a long operation");
            slot.write("short");
            assert_eq!(slot.read(), "short");
        }
        let slot = Slot::file(&directory.path().join("slot")).unwrap();
        assert_eq!(slot.read(), "short");
        slot.write(&"ä".repeat(1000));
        assert_eq!(slot.read(), "ä".repeat(BYTES / 2));
    }
}
