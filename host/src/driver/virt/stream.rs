//! Work that the host has enqueued: streams, marks (points that events record) and the work in
//! between.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use epoxide_vgpu::{Past, Timeline};

use super::work::{Launch, Transfer};

/// Most ops of a stream that are not done. Enqueuing one more waits.
const QUEUE_OPS: u64 = 1024;

/// A point in a stream. Each record of an event makes a new one, so that waits for an earlier
/// record are not affected.
#[derive(Debug, Default)]
pub(super) struct Mark {
    passed: OnceLock<(u64, Past)>,
}

impl Mark {
    /// Says that the stream has come here, at `now_ns`, after `past`.
    pub(super) fn pass(&self, now_ns: u64, past: &Past) {
        // A mark is in one stream only, so it is passed once.
        let _ = self.passed.set((now_ns, past.clone()));
    }

    /// The causal past at the mark; `None` if the stream has not reached it yet.
    fn past(&self) -> Option<&Past> {
        self.passed.get().map(|passed| &passed.1)
    }

    /// When the stream came here, in nanoseconds of the device's clock; `None` if it has not yet.
    pub(super) fn passed_ns(&self) -> Option<u64> {
        self.passed.get().map(|passed| passed.0)
    }
}

/// One entry of a stream.
pub(super) enum Op {
    /// A kernel, and the seed of its schedule if it has one.
    Launch(Box<Launch>, Option<u64>),
    Transfer(Transfer),
    Record(Arc<Mark>),
    Wait(Arc<Mark>),
}

/// A queue of work.
#[derive(Default)]
pub(super) struct StreamQueue {
    /// Not yet begun, in order.
    pub(super) ops: VecDeque<Op>,
    /// True while the engine runs the op that was at the front.
    pub(super) busy: bool,
    /// Ops enqueued so far.
    pub(super) submitted: u64,
    /// Ops done so far.
    pub(super) completed: u64,
    /// The owner has let go: the queue goes away once it is empty.
    pub(super) closed: bool,
    /// The causal past for the next work, in check mode.
    pub(super) past: Past,
    /// Names the queue to the checker.
    pub(super) timeline: Option<Timeline>,
    /// The capture that records it, with this queue's number in there.
    pub(super) capture: Option<(u64, usize)>,
}

impl StreamQueue {
    pub(super) fn push(&mut self, op: Op) {
        self.submitted += 1;
        self.ops.push_back(op);
    }

    /// True when one more op can be enqueued, or recorded.
    pub(super) fn has_room(&self) -> bool {
        self.capture.is_some() || self.submitted - self.completed < QUEUE_OPS
    }

    /// True when nothing is pending or running.
    pub(super) fn is_idle(&self) -> bool {
        self.ops.is_empty() && !self.busy
    }

    /// Takes the next launch or transfer, after passing the marks in front of it. `passed` is set
    /// if there were any.
    pub(super) fn next_work(&mut self, now_ns: u64, passed: &mut bool) -> Option<Op> {
        if self.busy {
            return None;
        }
        loop {
            match self.ops.front()? {
                Op::Record(mark) => mark.pass(now_ns, &self.past),
                Op::Wait(mark) => self.past.join(mark.past()?),
                Op::Launch(..) | Op::Transfer(_) => {
                    self.busy = true;
                    return self.ops.pop_front();
                }
            }
            self.ops.pop_front();
            self.completed += 1;
            *passed = true;
        }
    }
}
