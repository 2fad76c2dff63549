//! Dumps of a communicator with a watchdog: their contents, their files, and the pipe that requests
//! them.
//!
//! The variables are PyTorch's, so that collectors of a job's dumps find ours too. The contents are
//! JSON, and not a pickle.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt as _, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};
use serde::Serialize;

use crate::own_file;
use epoxide_group::internal::Entry;

/// Variable with the start of the path of a watchdog's dumps; the rank is appended. The path may be
/// a named pipe. The dump then goes to its reader, and is dropped without one.
pub const DEBUG_INFO_FILE: &str = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE";
/// Variable with the start of the path of a named pipe that a watchdog makes; the rank and `.pipe`
/// are appended. A write to it requests a dump; the communicator continues.
pub const DEBUG_INFO_PIPE: &str = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE";

fn named(variable: &str, suffix: String) -> Option<PathBuf> {
    let mut path = std::env::var_os(variable).filter(|path| !path.is_empty())?;
    path.push(suffix);
    Some(path.into())
}

/// The path of a rank's dumps from the environment, if any.
pub(super) fn path(rank: u32) -> Option<PathBuf> {
    named(DEBUG_INFO_FILE, rank.to_string())
}

/// One dump.
#[derive(Serialize)]
pub(super) struct Report<'a> {
    pub group: &'a str,
    pub rank: u32,
    pub size: u32,
    pub reason: &'a str,
    /// State of the communicator and of NCCL.
    pub nccl: BTreeMap<String, String>,
    /// The last operations, oldest first.
    pub operations: Vec<Entry>,
}

impl Report<'_> {
    /// Writes it to a file or a pipe; a failure to do so is only logged.
    pub fn write(&self, path: &Path) {
        let outcome = serde_json::to_vec_pretty(self).map_err(std::io::Error::from).and_then(|text| {
            match open_pipe(path)? {
                Some(mut pipe) => pipe.write_all(&text),
                None => own_file::create(path)?.write_all(&text),
            }
        });
        if let Err(error) = outcome {
            tracing::warn!("debug info: {}: {error}", path.display());
        }
    }
}

/// The named pipe at a path, if there is one. It must belong to this user or root, because its
/// owner can read the dump.
fn open_pipe(path: &Path) -> std::io::Result<Option<File>> {
    if !std::fs::symlink_metadata(path).is_ok_and(|about| about.file_type().is_fifo()) {
        return Ok(None);
    }
    // A pipe without a reader must not block the watchdog, neither at the open nor when it is full.
    let flags = (OFlags::NONBLOCK | OFlags::NOFOLLOW).bits() as i32;
    let file = OpenOptions::new().write(true).custom_flags(flags).open(path)?;
    let about = file.metadata()?;
    let (owner, user) = (about.uid(), rustix::process::geteuid().as_raw());
    if !about.file_type().is_fifo() || (owner != user && owner != 0) {
        let reason = format!(
            "the file is user {owner}'s, or no pipe; it must be a pipe of user {user} or root: remove it"
        );
        return Err(std::io::Error::new(ErrorKind::PermissionDenied, reason));
    }
    Ok(Some(file))
}

/// The pipe that requests dumps.
#[derive(Debug)]
pub(super) struct Pipe {
    path: PathBuf,
    file: File,
}

impl Pipe {
    /// The pipe that the environment names, made anew, if it names one; a failure to make it is
    /// only logged.
    pub fn open(rank: u32) -> Option<Pipe> {
        let path = named(DEBUG_INFO_PIPE, format!("{rank}.pipe"))?;
        let make = || -> std::io::Result<File> {
            // A pipe left by an earlier process; it has no reader.
            match std::fs::symlink_metadata(&path) {
                Ok(about) if about.file_type().is_fifo() => std::fs::remove_file(&path)?,
                Ok(_) => {
                    return Err(std::io::Error::new(ErrorKind::AlreadyExists, "something else is there"));
                }
                Err(_) => {}
            }
            mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
            // Opened for reading and writing: otherwise a closing writer would cause an end of
            // file, which reads like an empty pipe.
            let flags = (OFlags::NONBLOCK | OFlags::NOFOLLOW).bits() as i32;
            OpenOptions::new().read(true).write(true).custom_flags(flags).open(&path)
        };
        match make() {
            Ok(file) => Some(Pipe { path, file }),
            Err(error) => {
                tracing::warn!("debug info: {}: {error}", path.display());
                None
            }
        }
    }

    /// Whether a dump was requested since the last call.
    pub fn asked(&mut self) -> bool {
        let mut bytes = [0; 512];
        let mut asked = false;
        while self.file.read(&mut bytes).is_ok_and(|count| count > 0) {
            asked = true;
        }
        asked
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        // Another process may have removed it.
        let _ = std::fs::remove_file(&self.path);
    }
}
