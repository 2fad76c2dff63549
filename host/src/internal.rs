//! Items for the other crates of this repository; users of the library do not need them. These
//! items are no public interface: any version may change them.

pub mod fuzz;

/// Process groups and stores.
pub use epoxide_group::internal as group;
pub use epoxide_vgpu::Schedule;

pub use crate::bounded::{JSON, PTX, read_text, read_text_file};
pub use crate::ep::core::{Instruments, TracedLaunch};
pub use crate::ep::throughput::{CeilingShape, Direction, Fields, Tuning};
pub use crate::ep::topology::Topology;
pub use crate::virtual_time::{Membership, VirtualTime, as_member};

use crate::ep::{low_latency, throughput};
use crate::group::ProcessGroup;
use crate::{Result, StreamOrder, Tensor, TypedTensor};

/// Drivers and their raw handles.
pub mod driver {
    use std::os::fd::OwnedFd;
    use std::sync::Arc;

    pub use crate::driver::device::Driver;
    pub use crate::driver::owned::shipped_ptx;
    pub use crate::driver::raw::{CopyEnd, FabricHandle, RawMemory};
    pub use crate::driver::staging::Staging;
    pub use crate::driver::streams::Streams;
    pub use crate::driver::virt::config::{Executor, Hooks, Stop};
    pub use crate::driver::virt::manual::{Drive, ManualGpus};

    use crate::Result;
    use crate::driver::{Device, Memory, Stream};

    /// The device of a driver.
    pub fn device(driver: Arc<dyn Driver>) -> Device {
        Device { driver }
    }

    /// The driver of a device.
    pub fn driver(device: &Device) -> &Arc<dyn Driver> {
        &device.driver
    }

    /// A descriptor that a peer can [`import`].
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn export(memory: &Memory) -> Result<OwnedFd> {
        memory.export()
    }

    /// Maps `bytes` of memory that a peer exported.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn import(device: &Device, fd: OwnedFd, bytes: u64, peer: &str) -> Result<Memory> {
        Memory::import(device, fd, bytes, peer)
    }

    /// A stream that no fence waits for, like one of another library: memory is reused even if its
    /// work has not ended.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn unfenced_stream(device: &Device) -> Result<Stream> {
        Stream::unfenced(device)
    }

    /// Bytes taken from the device, rounding included.
    pub fn footprint(memory: &Memory) -> u64 {
        memory.footprint()
    }

    /// Copies bytes between device and host addresses, in stream order.
    ///
    /// # Safety
    /// Those of [`Driver::copy`].
    ///
    /// # Errors
    /// Errors of the driver.
    pub unsafe fn copy(stream: &Stream, dst: CopyEnd, src: CopyEnd, bytes: u64) -> Result<()> {
        // SAFETY: passed on to the caller.
        unsafe { stream.copy_ends(dst, src, bytes) }
    }
}

/// Queues of puts between nodes.
pub mod transport {
    pub use crate::transport::links::{Links, PeerQueue};
    pub use crate::transport::open::{Way, connect, open, wire_memory};
    pub use crate::transport::options::Hooks;
    pub use crate::transport::proxy::{Proxies, Proxy, PutTrace, QueueStats};
    pub use crate::transport::put::{Interrupt, Put, PutQueue};
    pub use crate::transport::setup::Writer;
    pub use crate::transport::shaping::Shaping;
}

/// The options of a buffer, to change one by one.
pub fn fields(options: &mut throughput::Options) -> &mut Fields {
    &mut options.fields
}

/// Enqueues one run of a kernel that only moves bytes, among the ranks of this node or, where it
/// has only this one, between nodes whose wire memory is mapped. It overwrites received rows, or
/// slots, on this rank (pull) or on the peers (push). Separate it from operations by a barrier on
/// both sides.
///
/// # Errors
/// [`Error::Argument`](crate::Error::Argument) and [`Error::Launch`](crate::Error::Launch) where the
/// shape does not fit the group, the device or the pool.
pub fn launch_ceiling(
    buffer: &throughput::Buffer,
    direction: Direction,
    shape: CeilingShape,
    stream: &crate::driver::Stream,
) -> Result<()> {
    buffer.launch_ceiling(direction, shape, stream)
}

/// Makes what [`launch_local_ceiling`] needs for a shape, which must not change in between.
///
/// # Errors
/// Those of [`TypedTensor::from_host`](crate::TypedTensor::from_host).
pub fn local_parts(
    buffer: &throughput::Buffer,
    shape: CeilingShape,
    stream: &crate::driver::Stream,
) -> Result<crate::TypedTensor<'static, i64>> {
    buffer.local_parts(shape, stream)
}

/// Enqueues one run of the kernel of [`launch_ceiling`] that stores rows only to this rank's
/// memory. It overwrites received rows on this rank.
///
/// # Errors
/// As of [`launch_ceiling`].
pub fn launch_local_ceiling(
    buffer: &throughput::Buffer,
    parts: &crate::TypedTensor<'static, i64>,
    shape: CeilingShape,
    stream: &crate::driver::Stream,
) -> Result<()> {
    buffer.launch_local_ceiling(parts, shape, stream)
}

/// Copies received rows into `out`, `[num_out_rows, hidden]`, and their scales into the second of
/// the pair, `[num_out_rows, num_scales]`: row r to each row of `places[r]`, `[num_rows,
/// num_topk]`, without those of -1. Only this rank takes part, and the call can be captured. The
/// first call loads the kernel: no operation may be under way then.
///
/// # Errors
/// [`Error::DType`](crate::Error::DType), [`Error::Shape`](crate::Error::Shape) and
/// [`Error::Argument`](crate::Error::Argument) where a tensor breaks a rule;
/// [`Error::StaleHandle`](crate::Error::StaleHandle) where a later dispatch has overwritten the rows.
pub fn copy_by_expert(
    buffer: &mut throughput::Buffer,
    received: &throughput::Received<'_>,
    places: &TypedTensor<'_, i32>,
    out: (&Tensor<'_>, Option<&TypedTensor<'_, f32>>),
    order: StreamOrder<'_>,
) -> Result<()> {
    buffer.copy_by_expert(received, places, out, order).map(drop)
}

/// Bytes on the wire of one count message, of which an uncached dispatch sends one to every other
/// node.
pub fn count_message_bytes(buffer: &throughput::Buffer, num_experts: u32) -> u64 {
    buffer.count_message_bytes(num_experts)
}

/// Checks the rules between a configuration and a number of nodes.
///
/// # Errors
/// [`Error::Argument`](crate::Error::Argument) with the rule and its numbers.
pub fn check_nodes(config: &throughput::Config, nodes: u32) -> Result<()> {
    config.check_nodes(nodes)
}

/// Numbers operations as after `operations` of them, equal on every rank and more than there were.
/// No operation may be under way. For tests of long runs.
///
/// # Errors
/// Errors of the group and of the driver.
pub fn run_ahead(buffer: &throughput::Buffer, group: &dyn ProcessGroup, operations: u64) -> Result<()> {
    buffer.run_ahead(group, operations)
}

/// [`Buffer::regroup`](low_latency::Buffer::regroup) with epochs as after `ahead` more operations,
/// equal on every rank. For tests of long runs.
///
/// # Errors
/// The same.
pub fn regroup_ahead(buffer: &mut low_latency::Buffer, group: &dyn ProcessGroup, ahead: u64) -> Result<()> {
    buffer.regroup_ahead(group, ahead)
}
