//! A trace: when every block of every operation reached each phase, on the device's own clock.

use epoxide_gpu::layout::{BlockTrace, DevicePtr};

use super::Buffer;
use crate::driver::{Memory, MemoryKind, Stream};
use crate::error::{Error, Result};

/// Bytes of one block's entry.
const ENTRY: u64 = size_of::<BlockTrace>() as u64;

/// One launch of an operation's kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TracedLaunch {
    /// The kernel's operation: `notify`, `dispatch` or `combine`.
    pub operation: &'static str,
    /// Times by block.
    pub blocks: Vec<BlockTrace>,
}

/// Where launches write their times, one run of entries after the other.
#[derive(Debug)]
pub(super) struct Trace {
    memory: Memory,
    launches: Vec<(&'static str, u32)>,
    used: u64,
    dropped: u64,
}

impl Trace {
    /// The place for a launch of `blocks` blocks, or null where there is no more room.
    pub fn place(&mut self, operation: &'static str, blocks: u32) -> DevicePtr {
        let (start, bytes) = (self.used, blocks as u64 * ENTRY);
        if start + bytes > self.memory.bytes() {
            self.dropped += 1;
            return DevicePtr::NULL;
        }
        self.used += bytes;
        self.launches.push((operation, blocks));
        self.memory.ptr().add(start)
    }
}

impl Buffer {
    /// Has the kernels that follow write down when each of their blocks reached each phase, up to `blocks` blocks in all;
    /// launches beyond that go untraced. The staging copy of a combine across nodes and the layout have no phases and are not in it.
    ///
    /// A CUDA graph that was captured meanwhile keeps writing to the trace: end its use before [`Buffer::take_trace`].
    ///
    /// # Errors
    /// [`Error::Argument`] for no blocks, [`Error::OutOfMemory`].
    #[doc(hidden)]
    pub fn start_trace(&mut self, blocks: u64) -> Result<()> {
        if blocks == 0 {
            return Err(Error::argument("blocks", blocks, "must be at least 1"));
        }
        let memory = Memory::alloc(&self.device, blocks * ENTRY, MemoryKind::Device, "trace")?;
        self.trace = Some(Trace { memory, launches: Vec::new(), used: 0, dropped: 0 });
        Ok(())
    }

    /// Ends the trace and reads it: the launches in order, and how many went untraced. Waits for the last operation; `stream`
    /// carries the copy. Empty without a trace.
    ///
    /// # Errors
    /// Whatever the driver reports.
    #[doc(hidden)]
    pub fn take_trace(&mut self, stream: &Stream) -> Result<(Vec<TracedLaunch>, u64)> {
        let Some(trace) = self.trace.take() else {
            return Ok((Vec::new(), 0));
        };
        if !self.sequence.wait(self.options.timeout.saturating_mul(2))? {
            return Err(Error::os("take_trace", "the last operation has not ended"));
        }
        let mut launches = Vec::with_capacity(trace.launches.len());
        let mut at = trace.memory.ptr();
        for (operation, blocks) in trace.launches {
            let mut entries = vec![BlockTrace::default(); blocks as usize];
            // SAFETY: the trace's memory holds the entries of every launch that it gave a place to.
            unsafe { stream.read(bytemuck::cast_slice_mut(&mut entries), at)? };
            at = at.add(blocks as u64 * ENTRY);
            launches.push(TracedLaunch { operation, blocks: entries });
        }
        Ok((launches, trace.dropped))
    }
}

/// Where a launch writes its times; null where nobody asked for them.
pub(super) fn trace_place(trace: &mut Option<Trace>, operation: &'static str, blocks: u32) -> DevicePtr {
    trace.as_mut().map_or(DevicePtr::NULL, |trace| trace.place(operation, blocks))
}
