//! Output of the command: lines, one JSON object, errors, and progress on a terminal.

use std::fmt::Display;
use std::fs::Permissions;
use std::io::{ErrorKind, IsTerminal, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use epoxide_bench::Watch;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use tempfile::NamedTempFile;

use crate::error::{CommandError, Result};

/// Why lines were lost, unless their reader closed the pipe.
static LOST: OnceLock<String> = OnceLock::new();

/// An error where a line that was printed is lost, as on a full device.
pub fn check_lost() -> Result<()> {
    // Unless it is a terminal, buffered output is still written here.
    match std::io::stdout().flush() {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            let _ = LOST.set(format!("standard output: {error}"));
        }
        _ => {}
    }
    LOST.get().map_or(Ok(()), |lost| Err(CommandError::failed(lost)))
}

/// Prints an error, on one line of standard error.
pub fn complain(message: &str) {
    // A failure of this cannot be reported anywhere.
    let _ = writeln!(std::io::stderr(), "epoxide: {message}");
}

/// Prints one JSON object, a row on a line.
pub fn json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| CommandError::failed(format!("JSON: {error}")))?;
    text_line(&rows_on_lines(&text))
}

/// Pretty JSON with each innermost array on one line.
fn rows_on_lines(pretty: &str) -> String {
    let (mut out, mut rest, mut in_string) = (String::with_capacity(pretty.len()), pretty, false);
    while let Some(at) = rest.find(['[', '"', '\\']) {
        let (before, from) = rest.split_at(at);
        out += before;
        // A character after a backslash, and a quote or a bracket in a string, are no delimiters.
        let taken = match from.as_bytes()[0] {
            b'\\' => from.chars().take(2).map(char::len_utf8).sum(),
            b'[' if !in_string => {
                let inner = &from[1..];
                match inner.find(['[', ']', '{', '"']) {
                    Some(end) if inner.as_bytes()[end] == b']' => {
                        let row: Vec<&str> = inner[..end].split_whitespace().collect();
                        out += &format!("[{}]", row.join(" "));
                        rest = &inner[end + 1..];
                        continue;
                    }
                    _ => 1,
                }
            }
            b'[' => 1,
            _ => {
                in_string = !in_string;
                1
            }
        };
        out += &from[..taken];
        rest = &from[taken..];
    }
    out + rest
}

/// Prints text and a line end. A reader that has closed the pipe is no error: files are still to be
/// written, and the exit code may carry a verdict.
pub fn text_line(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            Err(CommandError::failed(format!("standard output: {error}")))
        }
        _ => Ok(()),
    }
}

/// Writes text and a line end to a file, `-` for standard output.
pub fn write_text(path: &Path, text: &str) -> Result<()> {
    if path.as_os_str() == "-" {
        return text_line(text);
    }
    let text = format!("{text}\n");
    let written = match replacement(path) {
        Ok(Some((mut file, path))) => file
            .write_all(text.as_bytes())
            .and_then(|()| file.persist(path).map(drop).map_err(|error| error.error)),
        Ok(None) => std::fs::write(path, text),
        Err(error) => Err(error),
    };
    written.map_err(|error| CommandError::failed(format!("{}: {error}", path.display())))
}

/// Rejects a path of a flag that no file can be written to, before anything is measured for it.
pub fn check_file(flag: &str, path: Option<&Path>) -> Result<()> {
    let Some(path) = path.filter(|path| path.as_os_str() != "-") else { return Ok(()) };
    let rule = |error| {
        let remedy = "name a file in a folder that exists and can be written to";
        CommandError::usage(format!("{flag} {}: {error}; {remedy}", path.display()))
    };
    replacement(path).map(drop).map_err(rule)
}

/// Rejects flags that name one file: the later result would overwrite the earlier one.
pub fn check_distinct(files: &[(&str, &Option<PathBuf>)]) -> Result<()> {
    for (at, (flag, path)) in files.iter().enumerate() {
        let Some(path) = path.as_ref().filter(|path| path.as_os_str() != "-") else { continue };
        if let Some((other, _)) = files[..at].iter().find(|(_, other)| other.as_ref() == Some(path)) {
            let rule = format!("{other} has the same file; name another one");
            return Err(CommandError::usage(format!("{flag} {}: {rule}", path.display())));
        }
    }
    Ok(())
}

/// A new file, and the path that it is to replace once it is whole. `None` for a path that cannot be
/// replaced, such as that of a device or a pipe.
fn replacement(path: &Path) -> std::io::Result<Option<(NamedTempFile, PathBuf)>> {
    // A link stays one.
    let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let permissions = match std::fs::metadata(&path) {
        Ok(old) if old.is_dir() => return Err(ErrorKind::IsADirectory.into()),
        Ok(old) if !old.is_file() => return Ok(None),
        Ok(old) => old.permissions(),
        // The user's mask removes permissions from these.
        Err(_) => Permissions::from_mode(0o666),
    };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let file = tempfile::Builder::new().permissions(permissions).tempfile_in(folder)?;
    Ok(Some((file, path)))
}

/// A time for people.
pub fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 90.0 => format!("{} s", s.ceil().max(1.0)),
        s if s < 5400.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

/// Bytes of memory that this machine can still give; `None` if unknown.
pub fn memory_left() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<f64>().ok()? * 1024.0)
}

/// Progress on standard error: on a terminal a bar, elsewhere a line at intervals, after the first
/// two seconds.
pub struct Progress {
    shared: Arc<Shared>,
    bar: Option<ProgressBar>,
    writer: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    ended: Condvar,
}

struct State {
    what: String,
    done: u64,
    total: u64,
    has_ended: bool,
}

impl Progress {
    /// No line for the first seconds, then a line at this interval, if standard error is no
    /// terminal.
    const QUIET: Duration = Duration::from_secs(2);
    const PAUSE: Duration = Duration::from_secs(10);

    /// Progress over `total` steps, 0 if unknown; written only if `prints`.
    pub fn new(name: &'static str, total: u64, prints: bool) -> Progress {
        let state = State { what: String::new(), done: 0, total, has_ended: false };
        let shared = Arc::new(Shared { state: Mutex::new(state), ended: Condvar::new() });
        let on_terminal = std::io::stderr().is_terminal();
        let bar = (prints && on_terminal).then(|| {
            let bar = ProgressBar::new(total);
            let form = "{prefix}: {percent:>3} % {bar:20} {elapsed}, {eta} left: {msg}";
            bar.set_prefix(name);
            if let Ok(style) = ProgressStyle::with_template(form) {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        let writer = (prints && !on_terminal).then(|| {
            let shared = shared.clone();
            std::thread::spawn(move || shared.write_lines(name))
        });
        Progress { shared, bar, writer }
    }

    /// Records that `done` of `total` steps are done, and the current work.
    pub fn reached(&self, what: String, done: u64, total: u64) {
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(done);
            bar.set_message(what.clone());
        }
        let mut state = self.shared.lock();
        (state.what, state.done, state.total) = (what, done, total);
    }

    /// Writes nothing from now on, so that results can be printed.
    pub fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        self.shared.lock().has_ended = true;
        self.shared.ended.notify_all();
    }

    /// Prints a line of the result between those of the bar.
    pub fn line(&self, text: &str) -> Result<()> {
        match &self.bar {
            Some(bar) => bar.suspend(|| text_line(text)),
            None => text_line(text),
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_lines(&self, name: &str) {
        let (start, mut pause) = (Instant::now(), Progress::QUIET);
        let mut state = self.lock();
        loop {
            let (guard, timeout) = match self.ended.wait_timeout_while(state, pause, |state| !state.has_ended)
            {
                Ok(woken) => woken,
                Err(poisoned) => poisoned.into_inner(),
            };
            state = guard;
            if !timeout.timed_out() {
                return;
            }
            pause = Progress::PAUSE;
            let share = match state.total {
                0 => String::new(),
                total => format!("{} %, ", (100 * state.done / total).min(100)),
            };
            complain(&format!("{name}: {share}{}: {}", duration(start.elapsed().as_secs_f64()), state.what));
        }
    }
}

impl Watch for Progress {
    fn doing(&self, rank: u32, what: &str) {
        if rank == 0 {
            if let Some(bar) = &self.bar {
                bar.set_message(what.to_owned());
            }
            self.shared.lock().what = what.to_owned();
        }
    }

    fn step(&self, rank: u32) {
        if rank == 0 {
            if let Some(bar) = &self.bar {
                bar.inc(1);
            }
            self.shared.lock().done += 1;
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.end();
        if let Some(writer) = self.writer.take() {
            // A failure of the thread lost only progress lines.
            let _ = writer.join();
        }
    }
}

/// The output of a group of ranks: lines on standard output and, on a terminal, a progress line.
pub struct Console {
    lines: bool,
    prints: bool,
    bar: Option<ProgressBar>,
    /// Progress lines of a long run without a terminal.
    progress: Option<Progress>,
}

impl Console {
    /// A console of one rank, which prints lines if `lines`, and nothing unless `prints`. One rank
    /// of a group prints.
    pub fn new(prints: bool, lines: bool) -> Console {
        let bar = (prints && std::io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new_spinner();
            bar.enable_steady_tick(Duration::from_millis(100));
            bar
        });
        Console { lines: prints && lines, prints, bar, progress: None }
    }

    /// Writes progress where standard error is no terminal, too: a line each ten seconds.
    pub fn with_progress(mut self, name: &'static str) -> Console {
        self.progress = (self.prints && self.bar.is_none()).then(|| Progress::new(name, 0, true));
        self
    }

    /// Prints a line. A closed pipe must not stop one rank of many, so the error is ignored.
    /// Another error is reported at the command's end, by [`check_lost`].
    pub fn line(&self, text: impl Display) {
        if !self.lines {
            return;
        }
        let print = || {
            if let Err(error) = writeln!(std::io::stdout(), "{text}")
                && error.kind() != std::io::ErrorKind::BrokenPipe
            {
                let _ = LOST.set(format!("standard output: {error}"));
            }
        };
        match &self.bar {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }

    /// Shows the current work.
    pub fn doing(&self, what: &'static str) {
        if let Some(bar) = &self.bar {
            bar.set_message(what);
        }
        if let Some(progress) = &self.progress {
            progress.reached(what.to_owned(), 0, 0);
        }
    }

    /// Counts up to `total` from now on.
    pub fn count(&self, total: u64) {
        if let Some(progress) = &self.progress {
            progress.shared.lock().total = total;
        }
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(0);
            if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {wide_bar} {pos}/{len} ({eta})")
            {
                bar.set_style(style);
            }
        }
    }

    /// Counts one more finished step.
    pub fn step(&self) {
        if let Some(bar) = &self.bar {
            bar.inc(1);
        }
        if let Some(progress) = &self.progress {
            progress.shared.lock().done += 1;
        }
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn innermost_arrays_are_rows_on_a_line() {
        let value = serde_json::json!({"a": [[1, 2], [3, -4], []], "b": [], "c": [{"d": [5]}, "[1,\n2]", "\\", "\""], "e": "[ 1"});
        let pretty = serde_json::to_string_pretty(&value).unwrap();
        let text = rows_on_lines(&pretty);
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
        for line in ["    [1, 2],", "    [3, -4],", "    []", "      \"d\": [5]", "  \"e\": \"[ 1\""] {
            assert!(text.lines().any(|of_text| of_text == line), "{line}: {text}");
        }
    }

    #[test]
    fn files_are_replaced_whole_and_others_written_to() {
        let folder = tempfile::tempdir().unwrap();
        let [file, link] = ["a.json", "link.json"].map(|name| folder.path().join(name));
        std::fs::write(&file, "before, and longer than what follows").unwrap();
        std::fs::set_permissions(&file, Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let mut reader = std::fs::File::open(&file).unwrap();
        check_file("--json", Some(&link)).unwrap();
        write_text(&link, "after").unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "after\n");
        assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);
        // The old file was not written to: a reader that has opened it has all of it.
        let mut before = String::new();
        std::io::Read::read_to_string(&mut reader, &mut before).unwrap();
        assert_eq!(before, "before, and longer than what follows");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);

        for path in ["-", "/dev/null"] {
            check_file("--json", Some(Path::new(path))).unwrap();
        }
        write_text(Path::new("/dev/null"), "nothing").unwrap();
        assert!(!std::fs::metadata("/dev/null").unwrap().is_file());
        for path in [folder.path().join("none/a.json"), folder.path().to_owned()] {
            let error = check_file("--json", Some(&path)).unwrap_err();
            let message = error.message.unwrap();
            assert_eq!(error.code, crate::error::USAGE);
            assert!(message.starts_with(&format!("--json {}: ", path.display())), "{message}");
        }
    }

    #[test]
    fn times_are_for_people() {
        assert_eq!([0.2, 12.0, 600.0, 9000.0].map(duration), ["1 s", "12 s", "10 min", "2.5 h"]);
    }
}
