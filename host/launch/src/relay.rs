//! Passing the ranks' output on, by lines.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{PipeReader, PipeWriter, Write};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::error::{Error, Result};
use crate::lock::lock;

/// A longer line is cut, so that a rank that writes no line ends does not fill this process's
/// memory.
const MAX_LINE: usize = 1 << 20;
/// The last lines of a rank that are kept.
const TAIL_LINES: usize = 20;
const TAIL_BYTES: usize = 4096;
/// How long output is waited for after the ranks have ended: their own children may hold the pipe.
const DRAIN: Duration = Duration::from_secs(1);
/// Time for the reader of the output once a signal ends the launch.
const READER: Duration = Duration::from_secs(2);

/// The destinations of output. One lock for all, so that lines are not mixed.
#[derive(Clone)]
pub struct Sinks(Arc<Mutex<Pair>>);

struct Pair {
    out: Box<dyn Write + Send>,
    err: Box<dyn Write + Send>,
}

impl Sinks {
    /// Passes the ranks' standard output to `out`, their standard error to `err`.
    pub fn new(out: Box<dyn Write + Send>, err: Box<dyn Write + Send>) -> Sinks {
        Sinks(Arc::new(Mutex::new(Pair { out, err })))
    }

    /// This process's standard output and standard error.
    pub fn standard() -> Sinks {
        Sinks::new(Box::new(std::io::stdout()), Box::new(std::io::stderr()))
    }

    /// Writes whole lines.
    fn write(&self, kind: Kind, lines: &[u8]) -> std::io::Result<()> {
        let mut pair = lock(&self.0);
        let sink = if kind == Kind::Out { &mut pair.out } else { &mut pair.err };
        sink.write_all(lines)?;
        sink.flush()
    }

    /// Writes a line of the launcher's own.
    pub(super) fn say(&self, line: &str) {
        // A failure here has no one to report to.
        let _ = self.write(Kind::Err, format!("{line}\n").as_bytes());
    }
}

impl std::fmt::Debug for Sinks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Sinks")
    }
}

/// Which of a rank's two streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Out,
    Err,
}

/// One rank's stream.
pub(super) struct RankOutput {
    /// The prefix of every line.
    pub prefix: String,
    /// The read end of the rank's pipe.
    pub pipe: OwnedFd,
    /// Gets the bytes as they are.
    pub log: Option<File>,
}

/// The rest of a relay.
#[derive(Debug, Default)]
pub(super) struct Relayed {
    /// Every rank's last lines.
    pub tails: Vec<Tail>,
    /// Why output was lost, unless its reader closed it.
    pub lost: Option<std::io::Error>,
}

/// A thread that passes on one kind of output of all ranks of this host.
pub(super) struct Relay {
    thread: JoinHandle<Relayed>,
    /// Closed when the ranks have ended.
    running: PipeWriter,
}

impl Relay {
    pub fn start(kind: Kind, streams: Vec<RankOutput>, sinks: Sinks) -> Result<Relay> {
        let (ended, running) = std::io::pipe().map_err(|error| Error::system("pipe", error))?;
        let builder = std::thread::Builder::new().name(format!("relay {kind:?}"));
        let thread = builder.spawn(move || pump(kind, streams, &sinks, &ended));
        Ok(Relay { thread: thread.map_err(|error| Error::system("spawn thread", error))?, running })
    }

    /// Passes on the rest. The reader of the output has unlimited time, but only a little more once
    /// `hurry` is true. A thread that is in the middle of a write is then leaked, and nothing is
    /// returned.
    pub fn finish(self, mut hurry: impl FnMut() -> bool) -> Relayed {
        drop(self.running);
        let mut end = None;
        while !self.thread.is_finished() {
            if end.is_none() && hurry() {
                end = Some(Instant::now() + READER);
            }
            if end.is_some_and(|end| Instant::now() >= end) {
                return Relayed::default();
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        self.thread.join().unwrap_or_default()
    }
}

fn pump(kind: Kind, streams: Vec<RankOutput>, sinks: &Sinks, ended: &PipeReader) -> Relayed {
    let mut lines: Vec<Lines> = streams.iter().map(|stream| Lines::new(&stream.prefix)).collect();
    let mut streams: Vec<Option<RankOutput>> = streams.into_iter().map(Some).collect();
    let mut chunk = vec![0; 1 << 16];
    let mut out = Vec::new();
    let mut deadline: Option<Instant> = None;
    let mut lost = None;
    loop {
        let open: Vec<usize> = (0..streams.len()).filter(|index| streams[*index].is_some()).collect();
        if open.is_empty() || deadline.is_some_and(|deadline| Instant::now() > deadline) {
            break;
        }
        let mut fds: Vec<PollFd<'_>> =
            streams.iter().flatten().map(|stream| PollFd::new(&stream.pipe, PollFlags::IN)).collect();
        if deadline.is_none() {
            fds.push(PollFd::new(ended, PollFlags::IN));
        }
        let short = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
        match poll(&mut fds, deadline.map(|_| &short)) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => break,
            // The ranks have ended and the pipes are empty.
            Ok(0) => break,
            Ok(_) => {}
        }
        let ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        for (index, _) in open.iter().zip(&ready).filter(|(_, ready)| **ready) {
            let Some(stream) = &mut streams[*index] else { continue };
            match rustix::io::read(&stream.pipe, &mut chunk[..]) {
                Err(rustix::io::Errno::INTR) => {}
                Ok(0) | Err(_) => streams[*index] = None,
                Ok(count) => {
                    if let Some(log) = &mut stream.log
                        && let Err(error) = log.write_all(&chunk[..count])
                    {
                        tracing::warn!("a rank's log file: {error}; no more is written to it");
                        stream.log = None;
                    }
                    lines[*index].push(&chunk[..count], &mut out);
                }
            }
        }
        if !out.is_empty()
            && let Err(error) = sinks.write(kind, &out)
        {
            lost = Some(error);
            // The reader has closed. The ranks get SIGPIPE, as they would without a launcher.
            streams.iter_mut().for_each(|stream| *stream = None);
        }
        out.clear();
        if deadline.is_none() && ready.len() > open.len() && ready.last() == Some(&true) {
            deadline = Some(Instant::now() + DRAIN);
        }
    }
    lines.iter_mut().for_each(|lines| lines.end(&mut out));
    if lost.is_none() {
        lost = sinks.write(kind, &out).err();
    }
    let lost = lost.filter(|error| error.kind() != std::io::ErrorKind::BrokenPipe);
    Relayed { tails: lines.into_iter().map(|lines| lines.tail).collect(), lost }
}

/// Cuts bytes into lines behind a prefix.
struct Lines {
    prefix: Vec<u8>,
    /// The line that has begun.
    line: Vec<u8>,
    tail: Tail,
}

impl Lines {
    fn new(prefix: &str) -> Lines {
        Lines { prefix: prefix.into(), line: Vec::new(), tail: Tail::default() }
    }

    /// Takes bytes; adds the lines that they complete to `out`.
    fn push(&mut self, mut bytes: &[u8], out: &mut Vec<u8>) {
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            self.line.extend_from_slice(&bytes[..end]);
            self.flush(out);
            bytes = &bytes[end + 1..];
        }
        self.line.extend_from_slice(bytes);
        if self.line.len() > MAX_LINE {
            self.flush(out);
        }
    }

    /// A last line without an end gets one.
    fn end(&mut self, out: &mut Vec<u8>) {
        if !self.line.is_empty() {
            self.flush(out);
        }
    }

    fn flush(&mut self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.prefix);
        out.extend_from_slice(&self.line);
        out.push(b'\n');
        self.tail.push(&self.line);
        self.line.clear();
    }
}

/// A rank's last lines.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Tail {
    lines: VecDeque<String>,
    bytes: usize,
}

impl Tail {
    fn push(&mut self, line: &[u8]) {
        let start = line.len().saturating_sub(TAIL_BYTES);
        let line = String::from_utf8_lossy(&line[start..]).into_owned();
        self.bytes += line.len();
        self.lines.push_back(line);
        while self.lines.len() > TAIL_LINES || (self.bytes > TAIL_BYTES && self.lines.len() > 1) {
            self.bytes -= self.lines.pop_front().map_or(0, |line| line.len());
        }
    }

    pub fn into_lines(self) -> Vec<String> {
        self.lines.into()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn lines_are_kept_whole() {
        let mut lines = Lines::new("[rank 3] ");
        let mut out = Vec::new();
        lines.push(b"one\ntw", &mut out);
        assert_eq!(out, b"[rank 3] one\n");
        lines.push(b"o\xff\0\n\n", &mut out);
        lines.push(b"end", &mut out);
        lines.end(&mut out);
        assert_eq!(out, b"[rank 3] one\n[rank 3] two\xff\0\n[rank 3] \n[rank 3] end\n");
        assert_eq!(lines.tail.into_lines(), ["one", "two\u{fffd}\0", "", "end"]);
    }

    #[test]
    fn the_tail_is_short() {
        let mut tail = Tail::default();
        (0..100).for_each(|number| tail.push(format!("line {number}").as_bytes()));
        let lines = tail.clone().into_lines();
        assert_eq!((lines.len(), lines[0].as_str(), lines[19].as_str()), (20, "line 80", "line 99"));
        tail.push(&vec![b'x'; 3 * TAIL_BYTES]);
        assert_eq!(tail.into_lines(), ["x".repeat(TAIL_BYTES)]);
    }

    #[test]
    fn the_last_output_arrives_though_a_pipe_stays_open() {
        let (reader, mut writer) = std::io::pipe().unwrap();
        let (mut passed, sink) = std::io::pipe().unwrap();
        let sinks = Sinks::new(Box::new(sink), Box::new(std::io::sink()));
        let stream = RankOutput { prefix: "> ".to_owned(), pipe: reader.into(), log: None };
        let relay = Relay::start(Kind::Out, vec![stream], sinks).unwrap();
        writer.write_all(b"a\nb").unwrap();
        // The writer is still open, as that of a rank's daemon would be.
        assert_eq!(relay.finish(|| false).tails[0].clone().into_lines(), ["a", "b"]);
        let mut bytes = [0; 8];
        passed.read_exact(&mut bytes).unwrap();
        assert_eq!(&bytes, b"> a\n> b\n");
    }

    #[test]
    fn a_reader_that_stalls_does_not_hold_up_the_end() {
        let (reader, mut writer) = std::io::pipe().unwrap();
        // No process reads from it, and it holds 64 KiB.
        let (_stalled, sink) = std::io::pipe().unwrap();
        let sinks = Sinks::new(Box::new(sink), Box::new(std::io::sink()));
        let stream = RankOutput { prefix: String::new(), pipe: reader.into(), log: None };
        let relay = Relay::start(Kind::Out, vec![stream], sinks).unwrap();
        let lines = std::thread::spawn(move || {
            let _ = writer.write_all(&b"line\n".repeat(1 << 16));
        });
        let start = Instant::now();
        assert!(relay.finish(|| start.elapsed() > Duration::from_millis(100)).tails.is_empty());
        assert!(start.elapsed() >= READER);
        drop(_stalled);
        lines.join().unwrap();
    }
}
