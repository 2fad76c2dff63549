//! The flight recorder: the last operations of a group, for the analysis of failures.

use std::collections::VecDeque;
use std::fmt;
use std::io::Write as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

use super::call::Operation;
use super::threads::panic_text;
use crate::lock::lock;
use crate::own_file;

/// Variable with the start of the path of the dumps; `.GROUP.rankR.json` is appended. Dumps are for
/// this user alone (mode 0600), and no link or file of another user in their place is written to.
pub const FLIGHT_RECORDER: &str = "EPOXIDE_FLIGHT_RECORDER";

/// Takes the dumps, each a JSON document.
pub type Writer = Arc<dyn Fn(&str) + Send + Sync>;

/// How far an operation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Under way.
    Started,
    /// Over.
    Completed,
    /// Over, with an error.
    Failed,
}

/// One operation.
#[derive(Debug, Clone, Serialize)]
pub struct Entry {
    /// Its number in the group.
    pub sequence: u64,
    /// Its name.
    pub operation: &'static str,
    /// Bytes of this rank's input.
    pub bytes: u64,
    /// The element type and reduction, where it has them.
    pub reduction: Option<String>,
    /// The root, where it has one.
    pub root: Option<u32>,
    /// How far it is.
    pub state: State,
    /// Microseconds since 1970 at its start.
    pub started_us: u64,
    /// Microseconds since 1970 at its end.
    pub ended_us: Option<u64>,
    /// The error it ended with.
    pub error: Option<String>,
}

impl Entry {
    /// Ends it, unless it has ended.
    fn end(&mut self, error: Option<&str>) {
        if self.state != State::Started {
            return;
        }
        self.state = if error.is_some() { State::Failed } else { State::Completed };
        self.ended_us = Some(now_us());
        self.error = error.map(str::to_owned);
    }
}

/// The ring of one group.
pub struct Recorder {
    group: String,
    rank: u32,
    size: u32,
    capacity: usize,
    writer: Option<Writer>,
    entries: Mutex<VecDeque<Entry>>,
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder")
            .field("group", &self.group)
            .field("rank", &self.rank)
            .finish_non_exhaustive()
    }
}

#[derive(Serialize)]
struct Dump<'a> {
    group: &'a str,
    rank: u32,
    size: u32,
    reason: &'a str,
    operations: Vec<Entry>,
}

impl Recorder {
    /// An empty ring of a rank's group that keeps `capacity` operations.
    pub fn new(group: &str, rank: u32, size: u32, capacity: usize, writer: Option<Writer>) -> Recorder {
        Recorder { group: group.to_owned(), rank, size, capacity, writer, entries: Mutex::default() }
    }

    /// An operation begins.
    pub fn start(
        &self,
        sequence: u64,
        operation: Operation,
        bytes: u64,
        root: Option<u32>,
        reduction: Option<String>,
    ) {
        let mut entries = lock(&self.entries);
        while entries.len() >= self.capacity.max(1) {
            entries.pop_front();
        }
        entries.push_back(Entry {
            sequence,
            operation: operation.name(),
            bytes,
            reduction,
            root,
            state: State::Started,
            started_us: now_us(),
            ended_us: None,
            error: None,
        });
    }

    /// Ends the operation that started last.
    pub fn end(&self, error: Option<&str>) {
        let mut entries = lock(&self.entries);
        if let Some(entry) = entries.back_mut() {
            entry.end(error);
        }
    }

    /// Ends the operation of this number, where several are under way.
    pub fn finish(&self, sequence: u64, error: Option<&str>) {
        let mut entries = lock(&self.entries);
        if let Some(entry) = entries.iter_mut().rev().find(|entry| entry.sequence == sequence) {
            entry.end(error);
        }
    }

    /// Oldest first.
    pub fn entries(&self) -> Vec<Entry> {
        lock(&self.entries).iter().cloned().collect()
    }

    /// Writes the ring to the user's file and writer; a failure to do so is only logged.
    pub fn dump(&self, reason: &str) {
        let prefix = std::env::var_os(FLIGHT_RECORDER).filter(|prefix| !prefix.is_empty());
        if self.writer.is_none() && prefix.is_none() {
            return;
        }
        let Recorder { group, rank, size, .. } = self;
        let dump = Dump { group, rank: *rank, size: *size, reason, operations: self.entries() };
        let text = match serde_json::to_string_pretty(&dump) {
            Ok(text) => text,
            Err(error) => return tracing::warn!("flight recorder: {error}"),
        };
        if let Some(writer) = &self.writer
            && let Err(panic) = catch_unwind(AssertUnwindSafe(|| writer(&text)))
        {
            tracing::warn!("flight recorder: its writer panicked: {}", panic_text(&*panic));
        }
        if let Some(mut path) = prefix {
            // A group's name may hold separators.
            let name: String =
                group.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' }).collect();
            path.push(format!(".{name}.rank{rank}.json"));
            let write = || own_file::create(path.as_ref())?.write_all(text.as_bytes());
            if let Err(error) = write() {
                tracing::warn!("flight recorder: {}: {error}", std::path::Path::new(&path).display());
            }
        }
    }
}

fn now_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_the_last_and_dumps_them() {
        let text = Arc::new(Mutex::new(String::new()));
        let sink = text.clone();
        let writer: Writer = Arc::new(move |dump| sink.lock().unwrap().push_str(dump));
        let recorder = Recorder::new("g", 1, 2, 2, Some(writer));
        for sequence in 0..3 {
            recorder.start(sequence, Operation::AllReduce, 8, None, Some("f32 sum".into()));
            recorder.end((sequence == 2).then_some("boom"));
        }
        recorder.dump("why");
        let dump: serde_json::Value = serde_json::from_str(&text.lock().unwrap()).unwrap();
        assert_eq!(dump["reason"], "why");
        assert_eq!(dump["operations"].as_array().unwrap().len(), 2);
        assert_eq!(dump["operations"][0]["state"], "completed");
        assert_eq!(dump["operations"][1]["error"], "boom");
    }
}
