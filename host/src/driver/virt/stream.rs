//! What the host has enqueued: streams, marks (what events stand for) and the work in between.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use epoxide_vgpu::{Memory, MemoryError, Past, Timeline};

use super::capture::Launch;

/// How many ops a stream holds that are not done. Who wants to enqueue one more waits.
const QUEUE_OPS: u64 = 1024;

/// A point in a stream. Each record of an event makes a new one, so that those who waited for an earlier record keep
/// waiting for that one.
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

    /// What came before it; `None` if the stream has not come here yet.
    fn past(&self) -> Option<&Past> {
        self.passed.get().map(|passed| &passed.1)
    }

    /// When the stream came here, in nanoseconds of the device's clock; `None` if it has not yet.
    pub(super) fn passed_ns(&self) -> Option<u64> {
        self.passed.get().map(|passed| passed.0)
    }
}

/// A host address that a copy reads or writes later, from another thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct HostPtr(pub(super) *mut u8);

// SAFETY: an address without thread affinity; `Device::copy` has its caller keep the range alive and unshared until
// the stream has passed the copy.
unsafe impl Send for HostPtr {}
// SAFETY: as above; `&HostPtr` gives out the address only.
unsafe impl Sync for HostPtr {}

impl HostPtr {
    /// A copy of what is there now.
    ///
    /// # Safety
    /// `bytes` bytes are readable.
    pub(super) unsafe fn read(self, bytes: u64) -> Box<[u8]> {
        let mut copy = vec![0; bytes as usize].into_boxed_slice();
        // SAFETY: the caller vouches for the source; `copy` is our own and as long.
        unsafe { std::ptr::copy_nonoverlapping(self.0, copy.as_mut_ptr(), copy.len()) };
        copy
    }
}

/// Where a copy reads.
#[derive(Debug, Clone)]
pub(super) enum Source {
    Device(u64),
    /// Host memory, read when the stream comes to the copy.
    Host(HostPtr),
    /// Pageable host memory as it was when the copy was enqueued.
    Staged(Box<[u8]>),
}

impl Source {
    /// A copy of what is there now.
    fn read(&self, memory: &Memory, bytes: u64) -> Result<Box<[u8]>, MemoryError> {
        match self {
            Source::Device(address) => {
                let mut copy = vec![0; bytes as usize].into_boxed_slice();
                memory.read(*address, &mut copy).map(|()| copy)
            }
            // SAFETY: the caller of `Device::copy` keeps the source alive until the stream has passed it.
            Source::Host(host) => Ok(unsafe { host.read(bytes) }),
            Source::Staged(staged) => Ok(staged.clone()),
        }
    }
}

/// Where a copy writes.
#[derive(Debug, Clone)]
pub(super) enum Target {
    Device(u64),
    /// Host memory, written when the stream comes to the copy.
    Host(HostPtr),
    /// What the calling thread, which waits for it, then copies to pageable memory. So nothing writes there after the call has ended,
    /// not even where it stopped waiting.
    Staged(Arc<OnceLock<Box<[u8]>>>),
}

/// A copy or a fill.
#[derive(Debug, Clone)]
pub(super) enum Transfer {
    Copy { target: Target, source: Source, bytes: u64 },
    Fill { target: u64, value: u8, bytes: u64 },
}

impl Transfer {
    /// Carries it out; the error says which address was wrong.
    pub(super) fn run(&self, memory: &Memory) -> Result<(), String> {
        let outcome = match self {
            Transfer::Fill { target, value, bytes } => memory.fill(*target, *value, *bytes),
            Transfer::Copy { target, source, bytes } => match (target, source) {
                (Target::Device(target), Source::Device(source)) => {
                    memory.copy_device(*target, *source, *bytes)
                }
                (Target::Device(target), Source::Host(source)) => {
                    // SAFETY: the caller of `Device::copy` keeps the source alive until the stream has passed it.
                    unsafe { memory.copy_from_host(*target, source.0, *bytes) }
                }
                (Target::Device(target), Source::Staged(source)) => memory.write(*target, source),
                (Target::Host(target), Source::Device(source)) => {
                    // SAFETY: the caller of `Device::copy` keeps the target alive until the stream has passed it.
                    unsafe { memory.copy_to_host(target.0, *source, *bytes) }
                }
                (Target::Host(target), Source::Host(source)) => {
                    // SAFETY: as for the two cases above; `copy` allows an overlap.
                    unsafe { std::ptr::copy(source.0, target.0, *bytes as usize) };
                    Ok(())
                }
                (Target::Host(target), Source::Staged(source)) => {
                    // SAFETY: the target as above; the staged bytes are our own and `bytes` long.
                    unsafe { std::ptr::copy_nonoverlapping(source.as_ptr(), target.0, source.len()) };
                    Ok(())
                }
                (Target::Staged(landed), source) => source.read(memory, *bytes).map(|read| {
                    // A copy to pageable memory runs once.
                    let _ = landed.set(read);
                }),
            },
        };
        outcome.map_err(|error| error.to_string())
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
pub(super) struct Queue {
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
    /// What has happened before whatever comes next, in check mode.
    pub(super) past: Past,
    /// Names the queue to the checker.
    pub(super) timeline: Option<Timeline>,
    /// The capture that records it, with this queue's number in there.
    pub(super) capture: Option<(u64, usize)>,
}

impl Queue {
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

    /// Takes the next launch or transfer, after passing the marks in front of it. `passed` is set if there were any.
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
