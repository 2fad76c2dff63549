//! Streams for drivers of virtual GPUs: queues of work, marks (points that events record) in
//! between, captures and copies.
//!
//! A driver owns a [`Queue`] for each stream, with the type of its work. Its executor takes work by
//! [`Queue::next_work`] and runs it. A [`Capture`] records work over several streams and becomes a
//! [`Graph`]. [`Launch`] is a kernel with its arguments, and [`Transfer`] a copy or a fill, as work
//! of a stream.

mod capture;
mod launch;
mod transfer;

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

pub use self::capture::{Capture, Graph, Step};
pub use self::launch::Launch;
pub use self::transfer::{HostPtr, Source, Target, Transfer};
use crate::check::{Past, Timeline};

/// Most ops of a stream that are not done. Enqueuing one more waits.
const QUEUE_OPS: u64 = 1024;

/// A point in a stream. Each record of an event makes a new one, so that waits for an earlier
/// record are not affected.
#[derive(Debug, Default)]
pub struct Mark {
    passed: OnceLock<(u64, Past)>,
}

impl Mark {
    /// Records that the stream has reached the mark, at `now_ns`, after `past`.
    fn pass(&self, now_ns: u64, past: &Past) {
        // A mark is in one stream only, so it is passed once.
        let _ = self.passed.set((now_ns, past.clone()));
    }

    /// The causal past at the mark; `None` if the stream has not reached it yet.
    fn past(&self) -> Option<&Past> {
        self.passed.get().map(|passed| &passed.1)
    }

    /// When the stream reached the mark, in nanoseconds of the device's clock; `None` if it has not
    /// yet.
    #[must_use]
    pub fn passed_ns(&self) -> Option<u64> {
        self.passed.get().map(|passed| passed.0)
    }
}

/// One entry of a stream.
#[derive(Debug)]
pub enum Op<W> {
    /// Work for the executor.
    Work(W),
    /// Passes a mark.
    Record(Arc<Mark>),
    /// Waits until a mark has been passed.
    Wait(Arc<Mark>),
}

/// A queue of work.
#[derive(Debug)]
pub struct Queue<W> {
    /// Not yet begun, in order.
    pub ops: VecDeque<Op<W>>,
    /// True while the executor runs the op that was at the front.
    pub busy: bool,
    /// Ops enqueued so far.
    pub submitted: u64,
    /// Ops done so far.
    pub completed: u64,
    /// The owner has released the queue, which is freed once it is empty.
    pub closed: bool,
    /// The causal past for the next work, in check mode.
    pub past: Past,
    /// Names the queue to the checker.
    pub timeline: Option<Timeline>,
    /// The capture that records it, with this queue's number in there.
    pub capture: Option<(u64, usize)>,
}

impl<W> Default for Queue<W> {
    fn default() -> Self {
        Queue {
            ops: VecDeque::new(),
            busy: false,
            submitted: 0,
            completed: 0,
            closed: false,
            past: Past::default(),
            timeline: None,
            capture: None,
        }
    }
}

impl<W> Queue<W> {
    /// Enqueues an op.
    pub fn push(&mut self, op: Op<W>) {
        self.submitted += 1;
        self.ops.push_back(op);
    }

    /// True when one more op can be enqueued, or recorded.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.capture.is_some() || self.submitted - self.completed < QUEUE_OPS
    }

    /// True when nothing is pending or running.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.ops.is_empty() && !self.busy
    }

    /// Takes the next work, after passing the marks in front of it. `passed` is set if there were
    /// any.
    pub fn next_work(&mut self, now_ns: u64, passed: &mut bool) -> Option<W> {
        if self.busy {
            return None;
        }
        loop {
            match self.ops.pop_front()? {
                Op::Record(mark) => mark.pass(now_ns, &self.past),
                Op::Wait(mark) => match mark.past() {
                    Some(past) => self.past.join(past),
                    None => {
                        self.ops.push_front(Op::Wait(mark));
                        return None;
                    }
                },
                Op::Work(work) => {
                    self.busy = true;
                    return Some(work);
                }
            }
            self.completed += 1;
            *passed = true;
        }
    }

    /// Drops all ops and passes their marks, so that no other queue waits for them.
    pub fn abandon(&mut self, now_ns: u64) {
        for op in self.ops.drain(..) {
            if let Op::Record(mark) = op {
                mark.pass(now_ns, &self.past);
            }
        }
        self.busy = false;
        self.completed = self.submitted;
    }

    /// The work taken last is done. In check mode, `past` is the causal past behind it.
    pub fn finish_work(&mut self, past: Option<&Past>) {
        self.busy = false;
        self.completed += 1;
        if let Some(past) = past {
            self.past.join(past);
        }
    }
}
