//! The archive that Linux unpacks as its first root file system: cpio in "newc" form, uncompressed,
//! all files of root.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result};

const DIR: u32 = 0o040_755;
const FILE: u32 = 0o100_755;
const LINK: u32 = 0o120_777;

/// An archive in memory. Paths are those of the guest, without a leading slash.
#[derive(Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: BTreeSet<String>,
}

impl Archive {
    /// Adds a folder and those above it.
    pub fn dir(&mut self, path: &str) {
        let ends = path.match_indices('/').map(|(end, _)| end).chain([path.len()]);
        for end in ends {
            self.entry(&path[..end], DIR, &[]);
        }
    }

    /// Adds an executable file, and the folders above it. The first of several with one path stays.
    pub fn file(&mut self, path: &str, contents: &[u8]) {
        self.parent(path);
        self.entry(path, FILE, contents);
    }

    /// Adds a copy of a file of this machine.
    pub fn copy(&mut self, path: &str, source: &Path) -> Result<()> {
        if !self.contains(path) {
            let contents =
                std::fs::read(source).with_context(|| format!("cannot read {}", source.display()))?;
            self.file(path, &contents);
        }
        Ok(())
    }

    /// Adds a symbolic link.
    pub fn link(&mut self, path: &str, target: &str) {
        self.parent(path);
        self.entry(path, LINK, target.as_bytes());
    }

    /// Whether something has this path already.
    pub fn contains(&self, path: &str) -> bool {
        self.entries.contains(path)
    }

    /// Ends the archive and returns its bytes.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, &[]);
        self.bytes
    }

    fn parent(&mut self, path: &str) {
        if let Some((parent, _)) = path.rsplit_once('/') {
            self.dir(parent);
        }
    }

    fn entry(&mut self, path: &str, mode: u32, contents: &[u8]) {
        if !self.entries.insert(path.to_owned()) {
            return;
        }
        // Inode numbers must differ: entries with equal ones would be hard links.
        let inode = self.entries.len();
        let (size, name) = (contents.len(), path.len() + 1);
        let head = format!(
            "070701{inode:08x}{mode:08x}{zero}{zero}{links:08x}{zero}{size:08x}{zero}{zero}{zero}{zero}{name:08x}{zero}{path}\0",
            zero = "00000000",
            links = 1,
        );
        self.bytes.extend_from_slice(head.as_bytes());
        self.pad();
        self.bytes.extend_from_slice(contents);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_have_headers_parents_and_padding() {
        let mut archive = Archive::default();
        archive.file("a/b/run", b"hello");
        archive.file("a/b/run", b"a second one is not taken");
        archive.link("a/link", "b/run");
        assert!(archive.contains("a/b") && archive.contains("a/link"));
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 4, 0);
        // Header (110 bytes), "a\0", to a multiple of 4; then the next header.
        assert_eq!(&bytes[..6], b"070701");
        assert_eq!(&bytes[110..112], b"a\0");
        assert_eq!(&bytes[112..118], b"070701");
        let text = String::from_utf8_lossy(&bytes);
        let names: Vec<usize> = ["a/b\0", "a/b/run\0", "hello", "a/link\0", "TRAILER!!!\0"]
            .map(|name| text.find(name).unwrap())
            .into();
        assert!(names.is_sorted(), "{names:?}");
        assert!(!text.contains("second"));
    }
}
