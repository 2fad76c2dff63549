//! Arguments and results of the methods of [`Device`](super::Device).

use epoxide_gpu::layout::DevicePtr;

/// Properties and size of a device.
#[derive(Debug, Clone)]
pub struct DeviceInfo {
    /// Index among the devices of this driver.
    pub ordinal: u32,
    /// Marketing name, or `virtual GPU`.
    pub name: String,
    /// True for the virtual GPU: its times are not those of any hardware.
    pub is_virtual: bool,
    /// Streaming multiprocessors.
    pub sm_count: u32,
    /// Most dynamic shared memory of one block, in bytes.
    pub max_shared_bytes_per_block: u32,
    /// Device memory in bytes.
    pub total_memory: u64,
    /// Highest CUDA version the driver supports, as 1000 * major + 10 * minor.
    pub driver_version: u32,
    /// PCI bus id, or an empty string.
    pub pci_bus_id: String,
    /// Order of a network card's writes to this device's memory.
    pub rdma_write_order: RdmaWriteOrder,
}

/// How memory may be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// Device memory from the device's stream-ordered pool. Neither allocation nor free waits or
    /// blocks other calls. The free runs behind all work that was enqueued before in streams of the
    /// device's list ([`Stream::new`](super::Stream::new),
    /// [`Stream::adopt`](super::Stream::adopt)). Work in other streams must have ended before the
    /// free.
    Device,
    /// Device memory that can be exported as a file descriptor and mapped by peers. Freeing unmaps
    /// it at once, and a kernel that still uses it faults; its owner must wait for kernels first.
    Shareable,
    /// Page-locked host memory, mapped into the device's address space. Its free waits for the
    /// device's running kernels and blocks every other call of the device meanwhile, as
    /// `cuMemFreeHost` does. So operations never free it.
    MappedHost,
    /// [`MemoryKind::MappedHost`] that can be exported as a file descriptor, for other processes to
    /// map as ordinary memory, or into their devices' address spaces.
    SharedHost,
    /// Device memory by `cuMemAlloc`, which other libraries of a process use. Its free waits and
    /// blocks other calls like that of [`MemoryKind::MappedHost`]. epoxide itself uses none.
    Unpooled,
}

/// A raw allocation: the result of [`Driver::alloc`](super::Driver::alloc) and
/// [`Driver::import`](super::Driver::import).
#[derive(Debug, Clone, Copy)]
pub struct RawMemory {
    /// The driver's handle for it.
    pub handle: u64,
    /// Device address of the first byte.
    pub ptr: DevicePtr,
    /// Host address of the first byte, for [`MemoryKind::MappedHost`] and
    /// [`MemoryKind::SharedHost`]; else null.
    pub host: *mut u8,
    /// Usable bytes: at least the requested number.
    pub bytes: u64,
}

/// A handle of device memory for every host of its NVLink domain: opaque bytes, to be passed on
/// unchanged.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct FabricHandle(pub Vec<u8>);

/// In which order a network card's writes to device memory become visible to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RdmaWriteOrder {
    /// In none: a counter may become visible before the bytes written before it.
    None,
    /// In the order they were written, to the device that owns the memory.
    Owner,
    /// In the order they were written, to every device.
    AllDevices,
}

/// Grid, block and dynamic shared memory of a launch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchConfig {
    /// Blocks in x.
    pub grid: u32,
    /// Threads per block in x.
    pub block: u32,
    /// Dynamic shared memory in bytes.
    pub shared_bytes: u32,
    /// All blocks must be resident at once: the driver rejects the launch if they cannot be.
    pub cooperative: bool,
    /// The kernel itself first waits for the previous kernel of the stream (`griddepcontrol.wait`).
    /// So it may be launched before that kernel has ended.
    pub dependent: bool,
}

/// The caller's stream (`CUstream`), passed through unchanged. Null is the default stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct RawStream(pub *mut std::ffi::c_void);

// SAFETY: a stream handle is an opaque token; the CUDA driver accepts it from any thread.
unsafe impl Send for RawStream {}
// SAFETY: as above.
unsafe impl Sync for RawStream {}

/// One end of a copy.
#[derive(Debug, Clone, Copy)]
pub enum CopyEnd {
    /// A device address.
    Device(DevicePtr),
    /// A host address that is read or written by the copy.
    Host(*mut u8),
}
