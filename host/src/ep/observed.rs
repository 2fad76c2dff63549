//! Observations of a buffer's operations: when its blocks reached their phases, and which puts its proxies made.

use epoxide_gpu::layout::wire_message;

use super::Buffer;
use super::trace::{Trace, TracedLaunch};
use crate::driver::Stream;
use crate::error::Result;
use crate::transport::{PutTrace, QueueStats};

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
        self.trace = Some(Trace::new(&self.device, blocks)?);
        Ok(())
    }

    /// Ends the trace and reads it: the launches in order, and how many went untraced. Waits for the last operation; `stream`
    /// carries the copy. Empty without a trace.
    ///
    /// # Errors
    /// Whatever the driver reports.
    #[doc(hidden)]
    pub fn take_trace(&mut self, stream: &Stream) -> Result<(Vec<TracedLaunch>, u64)> {
        Trace::take(&mut self.trace, &self.sequence, self.options.timeout, stream)
    }

    /// The ranks of other nodes whose wire memory kernels here write themselves, ascending; queues lead to the others.
    #[doc(hidden)]
    pub fn mapped_peers(&self) -> Vec<u32> {
        let ways = self.kernels.wire_side().into_iter().flat_map(|side| &side.ways);
        ways.filter(|way| way.mapped.is_some()).map(|way| way.peer).collect()
    }

    /// Statistics of the puts of the proxies so far: (peer, queue, statistics), in ascending order of (queue, peer). Empty with one
    /// node, and where all peers are mapped.
    #[doc(hidden)]
    pub fn wire_stats(&self) -> Vec<(u32, u32, QueueStats)> {
        let proxies = self.kernels.wire_side().into_iter().flat_map(|side| side.proxies.all());
        proxies.map(|proxy| (proxy.peer(), proxy.queue(), proxy.stats())).collect()
    }

    /// Notes when each put is carried out from now on, up to `capacity` of them.
    #[doc(hidden)]
    pub fn start_put_trace(&self, capacity: usize) {
        if let Some(side) = self.kernels.wire_side() {
            side.proxies.start_trace(capacity);
        }
    }

    /// The puts noted since [`Buffer::start_put_trace`]; ends the trace.
    #[doc(hidden)]
    pub fn take_put_trace(&self) -> Vec<PutTrace> {
        self.kernels.wire_side().map_or_else(Vec::new, |side| side.proxies.take_trace())
    }

    /// Bytes on the wire of one count message, of which an uncached dispatch sends one to every other node.
    #[doc(hidden)]
    pub fn count_message_bytes(&self, num_experts: u32) -> u64 {
        let words = wire_message::EXPERT_COUNTS + num_experts / self.num_nodes();
        (words as u64 * 4).next_multiple_of(16)
    }
}
