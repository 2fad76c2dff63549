//! The dumps of a communicator that a watchdog looks after: what is in them, where they go, and the pipe that asks for them.
//!
//! The variables are PyTorch's, so that what collects the dumps of a job finds ours too. What is in them is JSON, and not a pickle.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt as _, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags, mknodat};
use serde::Serialize;

use crate::group::recorder::Entry;
use crate::own_file;

/// Variable with the start of the path of a watchdog's dumps; the rank is appended. A named pipe may be there: the dump goes to whoever reads
/// it, or to nobody.
pub const DEBUG_INFO_FILE: &str = "TORCH_NCCL_DEBUG_INFO_TEMP_FILE";
/// Variable with the start of the path of a named pipe that a watchdog makes; the rank and `.pipe` are appended. Whoever writes anything to it
/// gets a dump, while the communicator goes on.
pub const DEBUG_INFO_PIPE: &str = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE";

fn named(variable: &str, suffix: String) -> Option<PathBuf> {
    let mut path = std::env::var_os(variable).filter(|path| !path.is_empty())?;
    path.push(suffix);
    Some(path.into())
}

/// Where the environment wants the dumps of a rank, if anywhere.
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
    /// What the communicator and NCCL say.
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

/// The named pipe at a path, if one is there: this user's, or root's, since whoever owns it gets
/// what is written.
fn open_pipe(path: &Path) -> std::io::Result<Option<File>> {
    if !std::fs::symlink_metadata(path).is_ok_and(|about| about.file_type().is_fifo()) {
        return Ok(None);
    }
    // A pipe that nobody reads must not hold up the watchdog: neither when it is opened nor when it
    // is full.
    let flags = (OFlags::NONBLOCK | OFlags::NOFOLLOW).bits() as i32;
    let file = OpenOptions::new().write(true).custom_flags(flags).open(path)?;
    let about = file.metadata()?;
    let (owner, user) = (about.uid(), rustix::process::geteuid().as_raw());
    if !about.file_type().is_fifo() || (owner != user && owner != 0) {
        let reason = format!("what is there is user {owner}'s, and no pipe of user {user}; remove it");
        return Err(std::io::Error::new(ErrorKind::PermissionDenied, reason));
    }
    Ok(Some(file))
}

/// The pipe that asks for dumps.
#[derive(Debug)]
pub(super) struct Pipe {
    path: PathBuf,
    file: File,
}

impl Pipe {
    /// The pipe that the environment names, made anew, if it names one; a failure to make it is only logged.
    pub fn open(rank: u32) -> Option<Pipe> {
        let path = named(DEBUG_INFO_PIPE, format!("{rank}.pipe"))?;
        let make = || -> std::io::Result<File> {
            // Of an earlier process, which left no reader.
            match std::fs::symlink_metadata(&path) {
                Ok(about) if about.file_type().is_fifo() => std::fs::remove_file(&path)?,
                Ok(_) => {
                    return Err(std::io::Error::new(ErrorKind::AlreadyExists, "something else is there"));
                }
                Err(_) => {}
            }
            mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
            // Opened for both, so that a writer that goes is no end of the file, which would have to be told from no news.
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

    /// Whether somebody has asked since the last look.
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
        // Somebody else may have removed it.
        let _ = std::fs::remove_file(&self.path);
    }
}
