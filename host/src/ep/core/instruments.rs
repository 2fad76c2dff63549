//! Measurements of a buffer, for benchmarks and tests. A trace has when every block of every
//! operation reached each phase, on the device's own clock.

use epoxide_gpu::layout::{BlockTrace, DevicePtr};

use super::HasCore;
use crate::driver::{Device, Memory, MemoryKind, Stream};
use crate::error::{Error, Result};
use crate::transport::{PutTrace, QueueStats, proxy::Proxy};

/// Bytes of one block's entry.
const ENTRY: u64 = size_of::<BlockTrace>() as u64;

/// One launch of an operation's kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TracedLaunch {
    /// The kernel's operation: `notify`, `dispatch` or `combine`.
    pub operation: &'static str,
    /// Times by block; 0 for a phase that the block has no part in.
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
        let stream = Stream::new(device)?;
        // SAFETY: the memory is live, and nothing else has its address yet.
        unsafe { stream.fill(memory.ptr(), 0, memory.bytes())? };
        stream.synchronize()?;
        Ok(Trace { memory, launches: Vec::new(), used: 0, dropped: 0 })
    }

    /// The recorded traces, and the number of launches not traced. The launches have ended;
    /// `stream` carries the copy.
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

    /// The memory for a launch of `blocks` blocks, or null if it does not fit any more.
    pub fn reserve(&mut self, operation: &'static str, blocks: u32) -> DevicePtr {
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

/// Measurements of a buffer, for benchmarks and tests.
pub trait Instruments: HasCore {
    /// Later kernels record when each of their blocks reached each phase, up to `blocks` blocks in
    /// all; launches beyond that are not traced. Kernels without phases, such as those of layouts
    /// and copies, are not in it.
    ///
    /// A CUDA graph that was captured meanwhile keeps writing to the trace: end its use before
    /// [`Instruments::take_trace`].
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) for no blocks,
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory).
    fn start_trace(&mut self, blocks: u64) -> Result<()> {
        let core = self.core();
        core.trace = Some(Trace::new(&core.device, blocks)?);
        Ok(())
    }

    /// Ends the trace and reads it: the launches in order, and the number of launches not traced.
    /// Waits for the last operation; `stream` carries the copy. Empty without a trace.
    ///
    /// # Errors
    /// Errors of the driver.
    fn take_trace(&mut self, stream: &Stream) -> Result<(Vec<TracedLaunch>, u64)> {
        let core = self.core();
        if core.trace.is_some() && !core.enqueuer.sequence().wait(core.patience())? {
            return Err(Error::timeout("take_trace", core.unended("the last operation")));
        }
        core.trace.take().map_or(Ok((Vec::new(), 0)), |trace| trace.read(stream))
    }

    /// The ranks of other nodes whose wire memory is device memory that kernels here write
    /// themselves, ascending.
    fn mapped_peers(&self) -> Vec<u32> {
        let ways = self.core_ref().network().map_or(&[][..], |network| network.ways());
        ways.iter().filter(|way| way.mapped.is_some() && !way.is_on_host()).map(|way| way.peer).collect()
    }

    /// Statistics of the puts so far: (peer, queue, statistics), in ascending order of (queue,
    /// peer). Empty with one node, and where all peers are mapped.
    fn wire_stats(&self) -> Vec<(u32, u32, QueueStats)> {
        self.core_ref().network().map_or_else(Vec::new, |network| {
            let stats = |proxy: &Proxy| (proxy.peer(), proxy.queue(), proxy.stats());
            network.proxies().all().iter().map(stats).collect()
        })
    }

    /// Records when each put is carried out from now on, up to `capacity` of them.
    fn start_put_trace(&self, capacity: usize) {
        if let Some(network) = self.core_ref().network() {
            network.proxies().start_trace(capacity);
        }
    }

    /// The puts since [`Instruments::start_put_trace`]; ends the recording.
    fn take_put_trace(&self) -> Vec<PutTrace> {
        self.core_ref().network().map_or_else(Vec::new, |network| network.proxies().take_trace())
    }
}

impl<B: HasCore> Instruments for B {}
