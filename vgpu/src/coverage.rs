//! Which instructions of the kernels a process executed, for `cargo build-ptx --coverage`.
//!
//! `EPOXIDE_VGPU_COVERAGE` names a folder. Every process keeps a file there for each kernel that it
//! has run: `<kernel>-<fingerprint>-<process>.cover`, with `1` for each executed instruction and
//! `0` for each other. A file is replaced as a whole when a grid with newly executed instructions
//! has ended, so a process may end at any time. For development only.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::kernel::Kernel;

/// Names the folder.
const DIRECTORY: &str = "EPOXIDE_VGPU_COVERAGE";

/// Executed instructions of the kernels of all devices of this process.
struct Record {
    directory: PathBuf,
    /// Distinguishes this process from all others, also from those with the same number.
    process: String,
    kernels: Mutex<HashMap<(String, u64), Vec<bool>>>,
}

static RECORD: LazyLock<Option<Record>> = LazyLock::new(|| {
    let directory = std::env::var_os(DIRECTORY).filter(|value| !value.is_empty())?;
    let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos());
    let process = format!("{}.{since}", std::process::id());
    Some(Record { directory: directory.into(), process, kernels: Mutex::default() })
});

/// Turns on coverage for a kernel, if the environment enables it.
pub(crate) fn prepare(kernel: &Kernel) {
    if RECORD.is_some() {
        kernel.record_coverage();
    }
}

/// Adds a kernel's executed instructions to this process's record.
pub(crate) fn note(kernel: &Kernel) {
    if let Some(record) = &*RECORD {
        record.note(kernel);
    }
}

impl Record {
    fn note(&self, kernel: &Kernel) {
        let Some(executed) = kernel.coverage() else { return };
        let key = (kernel.name().to_owned(), kernel.fingerprint());
        let mut kernels = self.kernels.lock().unwrap_or_else(PoisonError::into_inner);
        let all = kernels.entry(key.clone()).or_insert_with(|| vec![false; executed.len()]);
        if !merge(all, &executed) {
            return;
        }
        let text: String = all.iter().map(|&executed| if executed { '1' } else { '0' }).collect();
        let file = format!("{}-{:016x}-{}.cover", key.0, key.1, self.process);
        // Under the lock: a later state must not be replaced by an earlier one.
        if let Err(error) = replace(&self.directory, &file, &text) {
            eprintln!("{DIRECTORY}: {file} cannot be written to {}: {error}", self.directory.display());
        }
    }
}

/// Adds `new` to `all`; false when there is nothing new.
fn merge(all: &mut [bool], new: &[bool]) -> bool {
    let mut changed = false;
    for (all, &new) in all.iter_mut().zip(new) {
        changed |= new && !*all;
        *all |= new;
    }
    changed
}

/// Writes a file atomically: readers find all of it or none.
fn replace(directory: &Path, file: &str, text: &str) -> std::io::Result<()> {
    std::fs::create_dir_all(directory)?;
    let partial = directory.join(format!("{file}.partial"));
    std::fs::write(&partial, text)?;
    std::fs::rename(partial, directory.join(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_a_digit_for_each_instruction() {
        let ptx = ".version 8.4\n.target sm_90\n.address_size 64\n.entry k()\n{\n.reg .b32 %r<2>;\nmov.b32 %r1, 1;\nret;\n}";
        let module = crate::Module::parse(ptx).unwrap();
        let kernel = module.kernel("k").unwrap();
        let directory = tempfile::tempdir().unwrap();
        let record = Record {
            directory: directory.path().join("new"),
            process: "7".to_owned(),
            kernels: Mutex::default(),
        };
        let name = format!("k-{:016x}-7.cover", kernel.fingerprint());
        let file = record.directory.join(&name);
        record.note(&kernel);
        assert!(!file.exists(), "nobody asked");
        kernel.record_coverage();
        record.note(&kernel);
        assert!(!file.exists(), "nothing has run");
        let (launch, memory) = (crate::GridConfig::new(1, 32, 0), crate::Memory::new());
        let mut grid = crate::Grid::new(kernel.clone(), memory, &Default::default(), launch, &[]).unwrap();
        assert_eq!(grid.step(1000).unwrap(), crate::Progress::Done);
        record.note(&kernel);
        // Behind the last instruction stands an end that is never reached.
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "110");
        assert_eq!(std::fs::read_dir(&record.directory).unwrap().count(), 1);
    }

    #[test]
    fn only_what_is_new_changes_the_record() {
        let mut all = [true, false, false];
        assert!(!merge(&mut all, &[true, false, false]));
        assert!(merge(&mut all, &[false, false, true]));
        assert_eq!(all, [true, false, true]);
    }
}
