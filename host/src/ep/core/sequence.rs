//! The order of a buffer's operations on the device: one after the other, in any streams.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError};
use std::time::Duration;

use crate::driver::{Device, Event, Outcome, Stream};
use crate::error::{Error, Result};
use crate::lock::lock;

/// The launches of an operation that a call enqueues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Halves {
    Both,
    Send,
    Receive,
}

/// Name and launches of an operation that waits for peers; none for one that does not.
pub type Operation = Option<(&'static str, Halves)>;

/// The end of a buffer's last operation. Shared with the steps that were captured with it.
#[derive(Debug)]
pub struct Sequence {
    end: Event,
    last: Mutex<Last>,
    /// The last operation that waits for peers.
    operation: Mutex<Option<&'static str>>,
    /// The operation whose first half has run, and whose second half was not enqueued.
    sent: Mutex<Option<&'static str>>,
    /// The same within recordings.
    recorded: Mutex<Option<&'static str>>,
    /// Why no operation can follow.
    broken: OnceLock<Error>,
}

#[derive(Debug, Default)]
struct Last {
    /// The stream of the last operation.
    stream: Option<u64>,
    /// The buffer was dropped.
    closed: bool,
}

/// The exclusive right to enqueue an operation.
#[derive(Debug)]
pub struct Submission<'a> {
    sequence: &'a Sequence,
    last: MutexGuard<'a, Last>,
    operation: Operation,
}

impl Sequence {
    pub fn new(device: &Device) -> Result<Arc<Sequence>> {
        Ok(Arc::new(Sequence {
            end: Event::new(device)?,
            last: Mutex::default(),
            operation: Mutex::default(),
            sent: Mutex::default(),
            recorded: Mutex::default(),
            broken: OnceLock::new(),
        }))
    }

    /// Begins an operation on `stream`, behind the last one.
    pub fn begin(&self, stream: &Stream, operation: Operation) -> Result<Submission<'_>> {
        let last = lock(&self.last);
        if last.closed {
            return Err(Error::StaleHandle("its buffer was dropped".into()));
        }
        self.check()?;
        self.check_received(operation, false)?;
        if last.stream.is_some_and(|id| id != stream.id()) {
            stream.wait(&self.end)?;
        }
        if let Some((name, _)) = operation {
            *lock(&self.operation) = Some(name);
        }
        Ok(Submission { sequence: self, last, operation })
    }

    /// Records that `call` failed with `error` after peers had begun to depend on it. No operation
    /// can follow.
    pub fn give_up(&self, call: &'static str, error: &Error) {
        let _ = self.broken.set(Error::Broken {
            call,
            reason: error.to_string(),
            source: Some(Box::new(error.clone())),
        });
    }

    /// An error where no operation can follow.
    pub fn check(&self) -> Result<()> {
        self.broken.get().cloned().map_or(Ok(()), Err)
    }

    /// Records that the launches of `operation` were enqueued, or recorded where it is `capturing`.
    pub fn enqueued(&self, operation: Operation, capturing: bool) {
        let sent = if capturing { &self.recorded } else { &self.sent };
        match operation {
            Some((call, Halves::Send)) => *lock(sent) = Some(call),
            Some((_, Halves::Receive)) => *lock(sent) = None,
            Some((_, Halves::Both)) | None => {}
        }
    }

    /// Removes and returns the operation whose first half was recorded alone.
    pub fn forget_recorded(&self) -> Option<&'static str> {
        lock(&self.recorded).take()
    }

    /// No second half is outstanding, whether the first one has run or was recorded.
    pub fn forget_sent(&self) {
        *lock(&self.sent) = None;
        self.forget_recorded();
    }

    /// An error where the second half of an operation is outstanding, and `operation` is another one.
    /// Halves that were recorded keep no operation from running.
    pub fn check_received(&self, operation: Operation, capturing: bool) -> Result<()> {
        let (sent, recorded) = (*lock(&self.sent), lock(&self.recorded).filter(|_| capturing));
        // No half is recorded while one that runs is outstanding.
        let is_same = sent.is_some() != capturing && sent.or(recorded).is_some();
        let (call, reason) = match (operation, sent.or(recorded)) {
            (Some((_, Halves::Receive)), _) if is_same => return Ok(()),
            (Some((call, Halves::Receive)), _) => {
                (call, "one of its halves is recorded and the other one is not: record both, or none")
            }
            (_, Some(call)) if sent.is_none() => {
                let rule = format!(
                    "the first half of a {call} was recorded, and its second half was not: record it, or give that recording up and \
                     call begin_warmup"
                );
                return Err(Error::argument("order", "a stream under capture", rule));
            }
            (_, Some(call)) => (call, "its first half has run, but what it brings was not received"),
            (_, None) => return Ok(()),
        };
        Err(Error::Broken { call, reason: reason.into(), source: None })
    }

    /// Makes `stream` wait for the end of the last operation.
    pub fn wait_on(&self, stream: &Stream) -> Result<()> {
        stream.wait(&self.end)
    }

    /// Makes `stream` wait for the end of the last operation, unless that ran on this stream.
    pub fn order_before(&self, stream: &Stream) -> Result<()> {
        match self.last.try_lock() {
            Ok(last) if last.stream.is_none_or(|id| id == stream.id()) => Ok(()),
            _ => stream.wait(&self.end),
        }
    }

    /// The last operation that waits for peers, if there was one. Like [`Sequence::has_ended`], it
    /// waits for no submission. The caller may hold one of another buffer, while the holder of this
    /// buffer's queries that buffer. Waiting would deadlock.
    pub fn last_operation(&self) -> Option<&'static str> {
        *lock(&self.operation)
    }

    /// Whether the last operation has ended. An operation that is just being enqueued has not.
    pub fn has_ended(&self) -> Result<bool> {
        match self.last.try_lock() {
            Err(TryLockError::WouldBlock) => Ok(false),
            _ => self.end.is_done(),
        }
    }

    /// Waits for the end of the last operation; false if `timeout` passes before it.
    pub fn wait(&self, timeout: Duration) -> Result<bool> {
        self.end.wait_timeout(timeout)
    }

    /// Rejects all further operations.
    pub fn close(&self) {
        lock(&self.last).closed = true;
    }
}

/// The outcome of operations that are local to the rank, which cannot fail.
impl Outcome for Sequence {
    fn report(&self) -> Result<()> {
        Ok(())
    }

    fn order_before(&self, stream: &Stream) -> Result<()> {
        Sequence::order_before(self, stream)
    }
}

impl Submission<'_> {
    /// Ends the submission of an operation that was enqueued on `stream` with this outcome. After an
    /// error as well: kernels that were launched still run.
    pub fn end(mut self, stream: &Stream, outcome: Result<()>) -> Result<()> {
        self.last.stream = Some(stream.id());
        if outcome.is_ok() {
            self.sequence.enqueued(self.operation, false);
        }
        outcome.and(self.sequence.end.record(stream))
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use super::*;
    use crate::driver::virt::{VirtConfig, VirtualGpu};

    #[test]
    fn the_error_that_ended_a_buffer_is_the_source_of_later_ones() {
        let sequence = Sequence::new(&VirtualGpu::new(VirtConfig::default())).unwrap();
        sequence.check().unwrap();
        for call in ["dispatch", "combine"] {
            sequence.give_up(call, &Error::os("launch", call));
        }
        let broken = sequence.check().unwrap_err();
        assert!(broken.to_string().contains("since dispatch failed: launch: dispatch; "), "{broken}");
        assert_eq!(broken.source().unwrap().to_string(), "launch: dispatch");
    }
}
