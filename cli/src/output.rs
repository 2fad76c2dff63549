//! What the command prints: lines, one JSON object, errors, and progress where somebody watches.

use std::fmt::Display;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::stop::{Result, Stop};

/// Prints an error, on one line of standard error.
pub fn complain(message: &str) {
    // There is nobody left to tell if this fails.
    let _ = writeln!(std::io::stderr(), "epoxide: {message}");
}

/// Prints one JSON object.
pub fn json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(|error| Stop::failed(format!("JSON: {error}")))?;
    text_line(&text)
}

/// Prints text and a line end.
pub fn text_line(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        // Whoever reads has seen enough.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Err(Stop::said(0)),
        Err(error) => Err(Stop::failed(format!("standard output: {error}"))),
    }
}

/// Writes text and a line end to a file, `-` for standard output.
pub fn write_text(path: &Path, text: &str) -> Result<()> {
    if path.as_os_str() == "-" {
        return text_line(text);
    }
    std::fs::write(path, format!("{text}\n"))
        .map_err(|error| Stop::failed(format!("{}: {error}", path.display())))
}

/// Speaks for a group of ranks: lines on standard output and, on a terminal, a progress line under them.
pub struct Voice {
    lines: bool,
    bar: Option<ProgressBar>,
}

impl Voice {
    /// A voice that prints lines if `lines`, and nothing at all unless `speaks`: one rank of a group does.
    pub fn new(speaks: bool, lines: bool) -> Voice {
        let bar = (speaks && std::io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new_spinner();
            bar.enable_steady_tick(Duration::from_millis(100));
            bar
        });
        Voice { lines: speaks && lines, bar }
    }

    /// Prints a line. A reader that has gone away must not stop one rank of many, so nothing comes of it.
    pub fn line(&self, text: impl Display) {
        if !self.lines {
            return;
        }
        let print = || {
            let _ = writeln!(std::io::stdout(), "{text}");
        };
        match &self.bar {
            Some(bar) => bar.suspend(print),
            None => print(),
        }
    }

    /// Says what goes on now.
    pub fn doing(&self, what: &'static str) {
        if let Some(bar) = &self.bar {
            bar.set_message(what);
        }
    }

    /// Counts up to `total` from now on.
    pub fn count(&self, total: u64) {
        if let Some(bar) = &self.bar {
            bar.set_length(total);
            bar.set_position(0);
            if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} {wide_bar} {pos}/{len} ({eta})")
            {
                bar.set_style(style);
            }
        }
    }

    /// One more is done.
    pub fn step(&self) {
        if let Some(bar) = &self.bar {
            bar.inc(1);
        }
    }
}

impl Drop for Voice {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
