//! Memory: plain, mapped host, and shareable through CUDA's virtual memory management.
//!
//! [`RawMemory::handle`] holds no driver handle, only the [`Origin`], which decides how the memory
//! is freed. For shareable memory the mapping itself keeps the physical memory alive, and the
//! driver finds the allocation by its address.

use std::ffi::c_void;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::calls::raw;
use super::context::check_alloc;
use super::device::Bound;
use super::error::unavailable;
use super::ffi::{self, CuDevicePtr, CuResult};
use super::late;
use super::vmm::{self, Mapping, Physical};
use crate::driver::{DevicePtr, FabricHandle, MemoryKind, RawMemory};
use crate::error::{Error, Result};

// Sizes are u64 in the trait and usize in the driver.
const _: () = assert!(size_of::<usize>() == size_of::<u64>());

/// How a [`RawMemory`] was allocated, and so how it is freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
enum Origin {
    /// The device's pool.
    Pooled = 1,
    /// `cuMemHostAlloc`.
    MappedHost = 2,
    /// Mapped into a reserved address range: ours or a peer's.
    Mapped = 3,
    /// A file in memory, mapped and registered with `cuMemHostRegister`.
    SharedHost = 4,
    /// `cuMemAlloc`.
    Unpooled = 5,
}

impl Origin {
    fn of(memory: &RawMemory) -> Option<Origin> {
        [Origin::Pooled, Origin::MappedHost, Origin::Mapped, Origin::SharedHost, Origin::Unpooled]
            .into_iter()
            .find(|origin| *origin as u64 == memory.handle)
    }
}

/// [`Driver::alloc`](crate::driver::device::Driver::alloc).
pub fn alloc(bound: &Bound<'_>, bytes: u64, kind: MemoryKind, label: &str) -> Result<RawMemory> {
    // The driver rejects an allocation of 0 bytes.
    let bytes = bytes.max(1);
    match kind {
        MemoryKind::Device => {
            // SAFETY: no memory is given.
            unsafe { free_pooled(bound, None) };
            let ptr = bound.device.pool.alloc(&bound.current, bytes, label)?;
            Ok(on_device(Origin::Pooled, ptr, bytes))
        }
        MemoryKind::Unpooled => alloc_plain(bound, bytes, label),
        MemoryKind::MappedHost => alloc_host(bound, bytes, label),
        MemoryKind::SharedHost => alloc_shared_host(bound, bytes, label),
        MemoryKind::Shareable => alloc_shareable(bound, bytes, label),
    }
}

/// [`Driver::free`](crate::driver::device::Driver::free).
///
/// # Safety
/// No work in flight uses the memory, except for pooled memory in the device's known streams, and
/// it is not freed twice.
pub unsafe fn free(bound: &Bound<'_>, memory: &RawMemory) {
    match Origin::of(memory) {
        // SAFETY: passed on to the caller.
        Some(Origin::Pooled) => unsafe { free_pooled(bound, Some(memory.ptr.0)) },
        // SAFETY: passed on to the caller.
        Some(Origin::SharedHost) => unsafe { free_shared_host(bound, memory) },
        // SAFETY: passed on to the caller.
        Some(Origin::Unpooled) => unsafe { ffi::cuMemFree_v2(memory.ptr.0) }.log("cuMemFree"),
        // SAFETY: passed on to the caller.
        Some(Origin::MappedHost) => unsafe { ffi::cuMemFreeHost(memory.host.cast()) }.log("cuMemFreeHost"),
        // SAFETY: `mapped` released these two; the caller upholds the rest.
        Some(Origin::Mapped) => drop(unsafe { Mapping::from_raw(memory.ptr, memory.bytes) }),
        None => tracing::warn!(?memory, "this memory is not of the CUDA driver; it is not freed"),
    }
}

/// Frees memory of the pool, and memory that it has kept.
///
/// # Safety
/// The memory is from the device's pool, only streams of the device's list use it, and it is not
/// freed twice.
unsafe fn free_pooled(bound: &Bound<'_>, memory: Option<CuDevicePtr>) {
    let list = bound.device.streams.hold();
    let streams = list.streams.iter().map(|listed| raw(listed.handle));
    // SAFETY: passed on to the caller.
    unsafe { bound.device.pool.free(memory, streams) };
}

fn alloc_plain(bound: &Bound<'_>, bytes: u64, label: &str) -> Result<RawMemory> {
    let mut ptr: CuDevicePtr = 0;
    // SAFETY: the out pointer is valid and a context is bound.
    let result = unsafe { ffi::cuMemAlloc_v2(&mut ptr, bytes as usize) };
    check_alloc(&bound.current, result, "cuMemAlloc", bytes, label)?;
    Ok(on_device(Origin::Unpooled, ptr, bytes))
}

fn on_device(origin: Origin, ptr: CuDevicePtr, bytes: u64) -> RawMemory {
    RawMemory { handle: origin as u64, ptr: DevicePtr(ptr), host: std::ptr::null_mut(), bytes }
}

/// Bytes of the file behind `bytes` of shared host memory: whole huge pages where the system gives
/// them, which are fewer entries for the device's address translation.
pub(super) fn file_bytes(bytes: u64, label: &str) -> Result<u64> {
    let most = i64::MAX as u64;
    let whole = bytes.max(1).checked_next_multiple_of(2 << 20);
    whole.filter(|whole| *whole <= most).ok_or_else(|| {
        let rule = format!("wanted for {label}: a file in memory has at most {most}; make it smaller");
        Error::argument("bytes", bytes, rule)
    })
}

/// The error of a system call for the memory `label`.
fn refused(call: &'static str, label: &str) -> impl Fn(rustix::io::Errno) -> Error {
    move |error| Error::os(call, format!("{error}, for {label}")).with_errno(&error)
}

fn alloc_shared_host(bound: &Bound<'_>, bytes: u64, label: &str) -> Result<RawMemory> {
    let bytes = file_bytes(bytes, label)?;
    let file = memfd_create("epoxide", MemfdFlags::CLOEXEC).map_err(refused("memfd_create", label))?;
    ftruncate(&file, bytes).map_err(refused("ftruncate", label))?;
    register_shared_host(bound, file, bytes, label)
}

/// [`Driver::import_host`](crate::driver::device::Driver::import_host).
pub fn import_host(bound: &Bound<'_>, file: OwnedFd, bytes: u64, peer: &str) -> Result<RawMemory> {
    let bytes = file_bytes(bytes, peer)?;
    // Behind the end of the file an access would be a fault of this process.
    let has = rustix::fs::fstat(&file).map_err(refused("fstat", peer))?.st_size as u64;
    if has < bytes {
        let rule = format!("the file behind {peer} must have {bytes} bytes");
        return Err(Error::argument("memory", format!("{has} bytes"), rule));
    }
    register_shared_host(bound, file, bytes, peer)
}

/// Maps the first `bytes` of a file in memory into this process and into the device's address
/// space.
fn register_shared_host(bound: &Bound<'_>, file: OwnedFd, bytes: u64, label: &str) -> Result<RawMemory> {
    // SAFETY: a fresh mapping at an address of the system's choice.
    let host = unsafe {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        mmap(std::ptr::null_mut(), bytes as usize, prot, flags, &file, 0).map_err(refused("mmap", label))?
    };
    let memory =
        RawMemory { handle: Origin::SharedHost as u64, ptr: DevicePtr::NULL, host: host.cast(), bytes };
    // SAFETY: the range was mapped just now; advice changes no contents.
    let advised = unsafe { rustix::mm::madvise(host, bytes as usize, rustix::mm::Advice::LinuxHugepage) };
    if let Err(error) = advised {
        tracing::debug!("no huge pages for {label}: {error}");
    }
    let flags = ffi::CU_MEMHOSTREGISTER_PORTABLE | ffi::CU_MEMHOSTREGISTER_DEVICEMAP;
    // SAFETY: the range was mapped just now and stays until `free_shared_host`.
    let registered = unsafe { ffi::cuMemHostRegister_v2(host, bytes as usize, flags) };
    if let Err(error) = check_host_alloc(registered, "cuMemHostRegister", bytes, label) {
        // SAFETY: the mapping's address has not left this function.
        let _ = unsafe { munmap(host, bytes as usize) };
        return Err(error);
    }
    bound.device.keep_file(host as u64, file);
    let mut ptr: CuDevicePtr = 0;
    // SAFETY: `host` was registered just now with DEVICEMAP.
    let mapped = unsafe { ffi::cuMemHostGetDevicePointer_v2(&mut ptr, host, 0) };
    if let Err(error) = mapped.check("cuMemHostGetDevicePointer") {
        // SAFETY: the memory's address has not left this function.
        unsafe { free_shared_host(bound, &memory) };
        return Err(error);
    }
    Ok(RawMemory { ptr: DevicePtr(ptr), ..memory })
}

/// # Safety
/// The memory is of [`register_shared_host`], nothing uses it, and it is not freed twice.
unsafe fn free_shared_host(bound: &Bound<'_>, memory: &RawMemory) {
    // Before the range is unmapped: another thread may map a file at the same address then.
    let file = bound.device.take_file(memory.host as u64);
    // SAFETY: registered by us; passed on to the caller.
    unsafe { ffi::cuMemHostUnregister(memory.host.cast()) }.log("cuMemHostUnregister");
    // SAFETY: mapped by us with this size; passed on to the caller.
    if let Err(error) = unsafe { munmap(memory.host.cast(), memory.bytes as usize) } {
        tracing::warn!("munmap: {error}");
    }
    drop(file);
}

fn alloc_host(_: &Bound<'_>, bytes: u64, label: &str) -> Result<RawMemory> {
    let mut host: *mut c_void = std::ptr::null_mut();
    let flags = ffi::CU_MEMHOSTALLOC_PORTABLE | ffi::CU_MEMHOSTALLOC_DEVICEMAP;
    // SAFETY: the out pointer is valid and a context is bound.
    let result = unsafe { ffi::cuMemHostAlloc(&mut host, bytes as usize, flags) };
    check_host_alloc(result, "cuMemHostAlloc", bytes, label)?;
    let mut ptr: CuDevicePtr = 0;
    // SAFETY: `host` was allocated just now with DEVICEMAP.
    let mapped = unsafe { ffi::cuMemHostGetDevicePointer_v2(&mut ptr, host, 0) };
    if let Err(error) = mapped.check("cuMemHostGetDevicePointer") {
        // SAFETY: the memory's address has not left this function.
        unsafe { ffi::cuMemFreeHost(host) }.log("cuMemFreeHost");
        return Err(error);
    }
    Ok(RawMemory { handle: Origin::MappedHost as u64, ptr: DevicePtr(ptr), host: host.cast(), bytes })
}

/// Out of memory is not [`Error::OutOfMemory`] here, which is for device memory.
fn check_host_alloc(result: CuResult, call: &'static str, bytes: u64, label: &str) -> Result<()> {
    if result != CuResult::OUT_OF_MEMORY {
        return result.check(call);
    }
    Err(result.error_with(
        call,
        format!(
            "; {bytes} bytes of page-locked host memory wanted for {label}: free host memory, or raise the container's \
             memory limit"
        ),
    ))
}

fn alloc_shareable(bound: &Bound<'_>, bytes: u64, label: &str) -> Result<RawMemory> {
    let sharing = bound.device.sharing.clone()?;
    let len = vmm::round_up(bound, bytes, sharing, label)?;
    let physical = Physical::create(bound, len, sharing, label)?;
    let mapping = Mapping::new(&physical, len)?;
    mapping.grant(bound).check("cuMemSetAccess")?;
    Ok(mapped(mapping.zero(bound)?))
}

fn mapped(mapping: Mapping) -> RawMemory {
    let (ptr, bytes) = mapping.into_raw();
    RawMemory { handle: Origin::Mapped as u64, ptr, host: std::ptr::null_mut(), bytes }
}

/// [`Driver::export`](crate::driver::device::Driver::export).
pub fn export(bound: &Bound<'_>, memory: &RawMemory) -> Result<OwnedFd> {
    match Origin::of(memory) {
        Some(Origin::Mapped) => Physical::at(memory.ptr)?.export(),
        Some(Origin::SharedHost) => bound.device.file(memory.host as u64),
        _ => Err(Error::argument(
            "memory",
            format!("{:#x}", memory.ptr.0),
            "only MemoryKind::Shareable and MemoryKind::SharedHost can be exported",
        )),
    }
}

/// [`Driver::import`](crate::driver::device::Driver::import).
pub fn import(bound: &Bound<'_>, fd: OwnedFd, bytes: u64, peer: &str) -> Result<RawMemory> {
    map_peer(bound, Physical::import(&fd, peer)?, bytes, peer)
}

/// [`Driver::export_fabric`](crate::driver::device::Driver::export_fabric).
pub fn export_fabric(_: &Bound<'_>, memory: &RawMemory) -> Result<FabricHandle> {
    if Origin::of(memory) != Some(Origin::Mapped) {
        let rule = "only MemoryKind::Shareable has a fabric handle";
        return Err(Error::argument("memory", format!("{:#x}", memory.ptr.0), rule));
    }
    Physical::at(memory.ptr)?.export_fabric()
}

/// [`Driver::import_fabric`](crate::driver::device::Driver::import_fabric).
pub fn import_fabric(bound: &Bound<'_>, handle: &FabricHandle, bytes: u64, peer: &str) -> Result<RawMemory> {
    map_peer(bound, Physical::import_fabric(handle, peer)?, bytes, peer)
}

fn map_peer(bound: &Bound<'_>, physical: Physical, bytes: u64, peer: &str) -> Result<RawMemory> {
    let sharing = bound.device.sharing.clone()?;
    let len = vmm::round_up(bound, bytes.max(1), sharing, peer)?;
    let mapping = Mapping::new(&physical, len)?;
    let granted = mapping.grant(bound);
    if granted != CuResult::SUCCESS {
        return Err(vmm::no_peer_access(bound, granted, physical.owner(), peer));
    }
    Ok(mapped(mapping))
}

/// A dma-buf descriptor for device memory, for `ibv_reg_dmabuf_mr`. `ptr` and `bytes` must be
/// multiples of the page size, as those of [`MemoryKind::Shareable`] are. A context must be current
/// on this thread. Any call of the memory's device makes one current where there was none.
///
/// [`Error::Unavailable`] where driver or kernel cannot do it.
pub fn export_dma_buf(ptr: DevicePtr, bytes: u64) -> Result<OwnedFd> {
    let name = "cuMemGetHandleForAddressRange";
    let function = late::require(late::late().mem_get_handle_for_address_range, name, "CUDA 11.7 (R515)")?;
    let mut fd: RawFd = -1;
    // SAFETY: for this handle type the driver writes one `int`; it checks the range.
    let result = unsafe {
        function((&raw mut fd).cast(), ptr.0, bytes as usize, ffi::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0)
    };
    if result == CuResult::NOT_SUPPORTED {
        return Err(unavailable(
            "a dma-buf of device memory",
            "the driver says CUDA_ERROR_NOT_SUPPORTED; it takes the open kernel modules (`modinfo nvidia`) and \
             Linux 5.12",
        ));
    }
    result.check(name)?;
    // SAFETY: the driver made this descriptor for us, and has given it to no other code.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
