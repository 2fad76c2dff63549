//! The launcher as a command, and what it prints.

use std::process::{Command, Output, Stdio};

pub fn launcher(flags: &[&str], command: &[&str]) -> Command {
    let mut launcher = Command::new(env!("CARGO_BIN_EXE_epoxide"));
    launcher.arg("launch").args(flags).arg("--").args(command);
    launcher.env_remove("OMP_NUM_THREADS").stdin(Stdio::null());
    launcher
}

/// Runs a shell script on every rank.
pub fn script(flags: &[&str], script: &str) -> Output {
    launcher(flags, &["sh", "-c", script]).output().unwrap()
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
