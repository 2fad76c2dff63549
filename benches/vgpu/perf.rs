//! Makes `perf` sample only while a measured program runs, not during others of its set-up.

use std::fs::File;
use std::io::{Read, Write};
use std::sync::OnceLock;

use super::Result;

/// The pipe of commands to `perf`, and that of its answers.
static PIPES: OnceLock<[File; 2]> = OnceLock::new();
/// The programs that are measured, by a part of their names. All of them if empty.
static NAMES: OnceLock<Vec<String>> = OnceLock::new();

/// Opens the pipes `CONTROL,ACK` of `perf record --control fifo:CONTROL,ACK`.
pub fn open(names: &str) -> Result<()> {
    let (control, ack) = names.split_once(',').ok_or("--perf needs two pipes: CONTROL,ACK")?;
    let pipes = [File::options().write(true).open(control)?, File::open(ack)?];
    PIPES.set(pipes).map_err(|_| "--perf is given twice")?;
    Ok(())
}

/// Sets the programs that are measured.
pub fn measures(names: Vec<String>) {
    NAMES.get_or_init(|| names);
}

/// Whether a program is among those named: by its whole name, or by a part of it. A part that is
/// the whole name of a program selects only that one.
pub fn names(names: &[String], program: &str) -> bool {
    let whole = |part: &str| super::PROGRAMS.iter().any(|all| all.contains(&part));
    let named = |part: &String| if whole(part) { part == program } else { program.contains(part.as_str()) };
    names.is_empty() || names.iter().any(named)
}

fn command(command: &str) -> Result<()> {
    let Some([control, ack]) = PIPES.get() else { return Ok(()) };
    (&*control).write_all(command.as_bytes())?;
    // `perf` answers "ack", a line feed and a zero byte.
    (&*ack).read_exact(&mut [0; 5])?;
    Ok(())
}

/// Samples are taken until this is dropped.
pub struct Sampled(());

/// Begins to sample a program, if it is measured and `perf` listens.
pub fn sampled(program: &str) -> Result<Option<Sampled>> {
    if PIPES.get().is_none() || !NAMES.get().is_some_and(|all| names(all, program)) {
        return Ok(None);
    }
    command("enable\n")?;
    Ok(Some(Sampled(())))
}

impl Drop for Sampled {
    fn drop(&mut self) {
        if let Err(error) = command("disable\n") {
            eprintln!("perf does not answer: {error}");
        }
    }
}
