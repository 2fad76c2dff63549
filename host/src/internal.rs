//! Items for the other crates of this repository; users of the library do not need them. These
//! items are no public interface: any version may change them.

pub mod fuzz;

/// Process groups and stores.
pub use epoxide_group::internal as group;
pub use epoxide_vgpu::Schedule;

pub use crate::bounded::{JSON, PTX, read_text, read_text_file};
pub use crate::ep::core::{Instruments, TracedLaunch};
pub use crate::ep::low_latency::regroup_ahead;
pub use crate::ep::throughput::{
    CeilingShape, Direction, Fields, Tuning, copy_by_expert, count_message_bytes, launch_ceiling,
    launch_local_ceiling, local_parts, run_ahead,
};
pub use crate::ep::topology::Topology;
pub use crate::virtual_time::{Membership, VirtualTime, as_member};

use crate::Result;
use crate::ep::throughput;

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

/// Checks the rules between a configuration and a number of nodes.
///
/// # Errors
/// [`Error::Argument`](crate::Error::Argument) with the rule and its numbers.
pub fn check_nodes(config: &throughput::Config, nodes: u32) -> Result<()> {
    config.check_nodes(nodes)
}
