//! The launcher as a command, and what it prints.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use epoxide_launch::default_interrupts;

/// The command, which heeds SIGINT though these tests may be a script's background job, whose
/// processes ignore it.
pub fn epoxide(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_epoxide"));
    command.args(arguments).env_remove("OMP_NUM_THREADS").stdin(Stdio::null());
    default_interrupts(&mut command);
    command
}

pub fn launcher(flags: &[&str], command: &[&str]) -> Command {
    epoxide(&[&["launch"], flags, &["--"], command].concat())
}

/// Runs a shell script on every rank.
pub fn script(flags: &[&str], script: &str) -> Output {
    launcher(flags, &["sh", "-c", script]).output().unwrap()
}

/// Writes a shell script that can be started as a program.
pub fn write_program(path: impl AsRef<Path>, script: &str) {
    fs::write(&path, script).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The lines, sorted.
pub fn lines(bytes: &[u8]) -> Vec<String> {
    let mut lines: Vec<String> = text(bytes).lines().map(str::to_owned).collect();
    lines.sort();
    lines
}
