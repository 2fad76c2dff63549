//! Memory: plain, mapped host, and shareable through CUDA's virtual memory management; copies.
//!
//! [`RawMemory::handle`] holds no driver handle, only the [`Origin`] that says how to free. For shareable memory the
//! mapping itself keeps the physical memory alive, and the driver finds the allocation by its address.

use std::ffi::c_void;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use super::context::Bound;
use super::error::unavailable;
use super::ffi::{self, CuDevicePtr, CuResult};
use super::vmm::{self, Mapping, Physical};
use super::{late, stream};
use crate::driver::{CopyEnd, DevicePtr, MemoryKind, RawMemory};
use crate::error::{Error, Result};

// Sizes are u64 in the trait and usize in the driver.
const _: () = assert!(size_of::<usize>() == size_of::<u64>());

/// How a [`RawMemory`] came to be, and so how it is freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
enum Origin {
    /// `cuMemAlloc`.
    Plain = 1,
    /// `cuMemHostAlloc`.
    MappedHost = 2,
    /// Mapped into a reserved address range: ours or a peer's.
    Mapped = 3,
}

impl Origin {
    fn of(memory: &RawMemory) -> Option<Origin> {
        [Origin::Plain, Origin::MappedHost, Origin::Mapped]
            .into_iter()
            .find(|origin| *origin as u64 == memory.handle)
    }
}

/// Bytes of device memory now free.
pub fn free_bytes(_: &Bound<'_>) -> Result<u64> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: both out pointers are valid and a context is bound.
    unsafe { ffi::cuMemGetInfo_v2(&mut free, &mut total) }.check("cuMemGetInfo")?;
    Ok(free as u64)
}

/// [`Device::alloc`](crate::driver::Device::alloc).
pub fn alloc(bound: &Bound<'_>, bytes: u64, kind: MemoryKind, label: &str) -> Result<RawMemory> {
    // The driver refuses to allocate nothing.
    let bytes = bytes.max(1);
    match kind {
        MemoryKind::Device => alloc_plain(bound, bytes, label),
        MemoryKind::MappedHost => alloc_host(bound, bytes, label),
        MemoryKind::Shareable => alloc_shareable(bound, bytes, label),
    }
}

/// [`Device::free`](crate::driver::Device::free).
///
/// # Safety
/// No work in flight uses the memory, and it is not freed twice.
pub unsafe fn free(_: &Bound<'_>, memory: &RawMemory) {
    match Origin::of(memory) {
        // SAFETY: passed on to the caller.
        Some(Origin::Plain) => unsafe { ffi::cuMemFree_v2(memory.ptr.0) }.log("cuMemFree"),
        // SAFETY: passed on to the caller.
        Some(Origin::MappedHost) => unsafe { ffi::cuMemFreeHost(memory.host.cast()) }.log("cuMemFreeHost"),
        // SAFETY: `mapped` gave up these two; the rest is passed on to the caller.
        Some(Origin::Mapped) => drop(unsafe { Mapping::from_raw(memory.ptr, memory.bytes) }),
        None => tracing::warn!(?memory, "this memory is not of the CUDA driver; it is not freed"),
    }
}

fn alloc_plain(bound: &Bound<'_>, bytes: u64, label: &str) -> Result<RawMemory> {
    let mut ptr: CuDevicePtr = 0;
    // SAFETY: the out pointer is valid and a context is bound.
    let result = unsafe { ffi::cuMemAlloc_v2(&mut ptr, bytes as usize) };
    check_alloc(bound, result, "cuMemAlloc", bytes, label)?;
    Ok(RawMemory { handle: Origin::Plain as u64, ptr: DevicePtr(ptr), host: std::ptr::null_mut(), bytes })
}

fn alloc_host(_: &Bound<'_>, bytes: u64, label: &str) -> Result<RawMemory> {
    let mut host: *mut c_void = std::ptr::null_mut();
    let flags = ffi::CU_MEMHOSTALLOC_PORTABLE | ffi::CU_MEMHOSTALLOC_DEVICEMAP;
    // SAFETY: the out pointer is valid and a context is bound.
    let result = unsafe { ffi::cuMemHostAlloc(&mut host, bytes as usize, flags) };
    if result == CuResult::OUT_OF_MEMORY {
        // Not `Error::OutOfMemory`, which speaks of device memory.
        return Err(result.error_with(
            "cuMemHostAlloc",
            format!(
                "; {bytes} bytes of page-locked host memory wanted for {label}: free host memory, or raise the \
                 container's memory limit"
            ),
        ));
    }
    result.check("cuMemHostAlloc")?;
    let mut ptr: CuDevicePtr = 0;
    // SAFETY: `host` was allocated just now with DEVICEMAP.
    let mapped = unsafe { ffi::cuMemHostGetDevicePointer_v2(&mut ptr, host, 0) };
    if let Err(error) = mapped.check("cuMemHostGetDevicePointer") {
        // SAFETY: nobody has seen the memory yet.
        unsafe { ffi::cuMemFreeHost(host) }.log("cuMemFreeHost");
        return Err(error);
    }
    Ok(RawMemory { handle: Origin::MappedHost as u64, ptr: DevicePtr(ptr), host: host.cast(), bytes })
}

fn alloc_shareable(bound: &Bound<'_>, bytes: u64, label: &str) -> Result<RawMemory> {
    let sharing = bound.device.sharing.clone()?;
    let len = vmm::round_up(bound, bytes, sharing, label)?;
    let physical = Physical::create(bound, len, sharing, label)?;
    let mapping = Mapping::new(&physical, len)?;
    mapping.grant(bound).check("cuMemSetAccess")?;
    mapping.zero(bound)?;
    Ok(mapped(mapping))
}

fn mapped(mapping: Mapping) -> RawMemory {
    let (ptr, bytes) = mapping.into_raw();
    RawMemory { handle: Origin::Mapped as u64, ptr, host: std::ptr::null_mut(), bytes }
}

/// [`Device::export`](crate::driver::Device::export).
pub fn export(_: &Bound<'_>, memory: &RawMemory) -> Result<OwnedFd> {
    if Origin::of(memory) != Some(Origin::Mapped) {
        return Err(Error::argument(
            "memory",
            format!("{:#x}", memory.ptr.0),
            "only MemoryKind::Shareable can be exported",
        ));
    }
    Physical::at(memory.ptr)?.export()
}

/// [`Device::import`](crate::driver::Device::import).
pub fn import(bound: &Bound<'_>, fd: OwnedFd, bytes: u64, peer: &str) -> Result<RawMemory> {
    let sharing = bound.device.sharing.clone()?;
    let physical = Physical::import(&fd, peer)?;
    let len = vmm::round_up(bound, bytes.max(1), sharing, peer)?;
    let mapping = Mapping::new(&physical, len)?;
    let granted = mapping.grant(bound);
    if granted != CuResult::SUCCESS {
        return Err(vmm::no_peer_access(bound, granted, physical.owner(), peer));
    }
    Ok(mapped(mapping))
}

/// A dma-buf descriptor for device memory, for `ibv_reg_dmabuf_mr`. `ptr` and `bytes` must be multiples of the page
/// size, as those of [`MemoryKind::Shareable`] are. A context must be current on this thread, as it is after any call
/// of the memory's device.
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
    // SAFETY: the driver made this descriptor for us; nobody else closes it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// [`Device::copy`](crate::driver::Device::copy).
///
/// # Safety
/// Both ranges are live until the stream has passed the copy.
pub unsafe fn copy(_: &Bound<'_>, stream: u64, dst: CopyEnd, src: CopyEnd, bytes: u64) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    let (stream, bytes) = (stream::raw(stream), bytes as usize);
    match (dst, src) {
        (CopyEnd::Device(dst), CopyEnd::Host(src)) => {
            // SAFETY: passed on to the caller.
            unsafe { ffi::cuMemcpyHtoDAsync_v2(dst.0, src.cast(), bytes, stream) }.check("cuMemcpyHtoDAsync")
        }
        (CopyEnd::Host(dst), CopyEnd::Device(src)) => {
            // SAFETY: passed on to the caller.
            unsafe { ffi::cuMemcpyDtoHAsync_v2(dst.cast(), src.0, bytes, stream) }.check("cuMemcpyDtoHAsync")
        }
        (CopyEnd::Device(dst), CopyEnd::Device(src)) => {
            // SAFETY: passed on to the caller.
            unsafe { ffi::cuMemcpyDtoDAsync_v2(dst.0, src.0, bytes, stream) }.check("cuMemcpyDtoDAsync")
        }
        (CopyEnd::Host(dst), CopyEnd::Host(src)) => {
            // SAFETY: passed on to the caller; with unified addressing a host pointer is a valid CUdeviceptr.
            unsafe { ffi::cuMemcpyAsync(dst as u64, src as u64, bytes, stream) }.check("cuMemcpyAsync")
        }
    }
}

/// [`Device::fill`](crate::driver::Device::fill).
///
/// # Safety
/// The range is live until the stream has passed the call.
pub unsafe fn fill(_: &Bound<'_>, stream: u64, dst: DevicePtr, value: u8, bytes: u64) -> Result<()> {
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: passed on to the caller.
    unsafe { ffi::cuMemsetD8Async(dst.0, value, bytes as usize, stream::raw(stream)) }
        .check("cuMemsetD8Async")
}

/// `OUT_OF_MEMORY` as [`Error::OutOfMemory`], the rest as usual.
pub fn check_alloc(
    bound: &Bound<'_>,
    result: CuResult,
    call: &'static str,
    requested: u64,
    label: &str,
) -> Result<()> {
    if result == CuResult::OUT_OF_MEMORY {
        let available = free_bytes(bound).unwrap_or(0);
        return Err(Error::OutOfMemory { what: label.into(), requested, available });
    }
    result.check(call)
}
