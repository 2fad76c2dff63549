//! A trace: when every block of every operation reached each phase, on the device's own clock.

use epoxide_gpu::layout::{BlockTrace, DevicePtr};

use crate::driver::{Device, Memory, MemoryKind, Stream};
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
pub struct Trace {
    memory: Memory,
    launches: Vec<(&'static str, u32)>,
    used: u64,
    dropped: u64,
}

impl Trace {
    /// With room for `blocks` blocks in all, at least 1.
    pub fn new(device: &Device, blocks: u64) -> Result<Trace> {
        if blocks == 0 {
            return Err(Error::argument("blocks", blocks, "must be at least 1"));
        }
        let memory = Memory::alloc(device, blocks * ENTRY, MemoryKind::Device, "trace")?;
        Ok(Trace { memory, launches: Vec::new(), used: 0, dropped: 0 })
    }

    /// The recorded traces, and how many launches went untraced. The launches have ended; `stream`
    /// carries the copy.
    pub fn read(self, stream: &Stream) -> Result<(Vec<TracedLaunch>, u64)> {
        let mut launches = Vec::with_capacity(self.launches.len());
        let mut at = self.memory.ptr();
        for (operation, blocks) in self.launches {
            let mut entries = vec![BlockTrace::default(); blocks as usize];
            // SAFETY: the memory holds the entries of every launch that it gave a place to.
            unsafe { stream.read(bytemuck::cast_slice_mut(&mut entries), at)? };
            at = at.add(blocks as u64 * ENTRY);
            launches.push(TracedLaunch { operation, blocks: entries });
        }
        Ok((launches, self.dropped))
    }

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
