//! CUDA's virtual memory management: physical memory, address ranges, mappings, sharing and access
//! rights.
//!
//! On drivers without it (WSL, some vGPUs), memory cannot be shared. The older `cuIpc` handles are
//! not file descriptors and cannot be opened in the process that made them.
//! [`sharing`] returns the error.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use super::context::{Relaxed, attribute, check_alloc, free_bytes, supports};
use super::device::Bound;
use super::error::unavailable;
use super::ffi::{
    self, CuAllocation, CuDevicePtr, CuMemAccessDesc, CuMemAllocationProp, CuMemLocation, CuResult, CuStream,
};
use crate::driver::{DevicePtr, FabricHandle};
use crate::error::{Error, Result};

/// Features of a device for shareable memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sharing {
    /// Memory can be created for RDMA by a network card.
    pub rdma: bool,
    /// Memory can be given to other hosts of the NVLink domain.
    pub fabric: bool,
}

/// The features of a device; the error gives the reason why it cannot share memory.
pub fn sharing(device: cust::device::Device) -> Result<Sharing> {
    const REMEDY: &str = "epoxide shares device memory between ranks as file descriptors, which takes bare Linux or a \
                          virtual machine with the whole GPU passed through, not WSL or a vGPU";
    let what = || format!("shareable memory of CUDA device {}", device.as_raw());
    if attribute(device, ffi::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)? == 0 {
        return Err(unavailable(what(), format!("no virtual memory management here; {REMEDY}")));
    }
    if attribute(device, ffi::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)? == 0 {
        return Err(unavailable(what(), format!("no export as a file descriptor here; {REMEDY}")));
    }
    Ok(Sharing {
        rdma: supports(device, ffi::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED),
        fabric: supports(device, ffi::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED),
    })
}

/// Why this device may not touch the peer's memory.
pub fn no_peer_access(bound: &Bound<'_>, result: CuResult, owner: Option<c_int>, peer: &str) -> Error {
    let own = bound.device.device.as_raw();
    let unreachable = owner.filter(|&owner| owner != own && !can_access_peer(own, owner));
    match unreachable {
        Some(owner) => unavailable(
            format!("peer access to {peer}"),
            format!(
                "CUDA device {own} cannot map memory of device {owner}: there is neither NVLink nor PCIe peer-to-peer \
                 between them; pick devices that `epoxide doctor` lists as peers, or make them separate nodes \
                 (`--ranks-per-node 1 --transport tcp`)"
            ),
        ),
        None => unavailable(
            format!("peer access to {peer}"),
            format!(
                "cuMemSetAccess says {} ({}) on device {own}; both devices must be in one NVLink or PCIe peer-to-peer \
                 domain (`nvidia-smi topo -p2p r`), and a confidential-computing or IOMMU setup may forbid it",
                result.name(),
                result.0
            ),
        ),
    }
}

/// Whether `device` may map memory of `peer`; a failed query counts as "no".
pub fn can_access_peer(device: c_int, peer: c_int) -> bool {
    let mut yes = 0;
    // SAFETY: the out pointer is valid; ordinals are checked by the driver.
    let result = unsafe { ffi::cuDeviceCanAccessPeer(&mut yes, device, peer) };
    result == CuResult::SUCCESS && yes != 0
}

/// Properties of shareable memory on this device.
fn properties(bound: &Bound<'_>, sharing: Sharing) -> CuMemAllocationProp {
    let fabric = if sharing.fabric { ffi::CU_MEM_HANDLE_TYPE_FABRIC } else { 0 };
    CuMemAllocationProp {
        kind: ffi::CU_MEM_ALLOCATION_TYPE_PINNED,
        requested_handle_types: ffi::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | fabric,
        location: location(bound),
        win32_handle_meta_data: std::ptr::null_mut(),
        compression_type: 0,
        gpu_direct_rdma_capable: sharing.rdma.into(),
        usage: 0,
        reserved: [0; 4],
    }
}

fn location(bound: &Bound<'_>) -> CuMemLocation {
    CuMemLocation { kind: ffi::CU_MEM_LOCATION_TYPE_DEVICE, id: bound.device.device.as_raw() }
}

/// `bytes` rounded up to the allocation granularity. Owner and importer must compute the same
/// result, so both use the same properties.
pub fn round_up(bound: &Bound<'_>, bytes: u64, sharing: Sharing, label: &str) -> Result<usize> {
    let mut granularity = 0;
    // SAFETY: both pointers are valid.
    unsafe {
        ffi::cuMemGetAllocationGranularity(
            &mut granularity,
            &properties(bound, Sharing { fabric: false, ..sharing }),
            ffi::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
        )
    }
    .check("cuMemGetAllocationGranularity")?;
    (bytes as usize).checked_next_multiple_of(granularity).ok_or_else(|| Error::OutOfMemory {
        what: label.into(),
        requested: bytes,
        available: free_bytes(&bound.current).unwrap_or(0),
    })
}

/// A reference to physical memory.
pub struct Physical(CuAllocation);

impl Physical {
    /// `len` bytes on the bound device; `label` names them in errors.
    pub fn create(bound: &Bound<'_>, len: usize, sharing: Sharing, label: &str) -> Result<Physical> {
        let mut allocation: CuAllocation = 0;
        let mut create = |sharing| {
            // SAFETY: both pointers are valid, and `len` is a multiple of the granularity.
            unsafe { ffi::cuMemCreate(&mut allocation, len, &properties(bound, sharing), 0) }
        };
        // A device may announce features that its machine rejects: fabric handles without an IMEX
        // channel, RDMA in some virtual machines. Within a node neither is needed.
        let fewer = [sharing, Sharing { fabric: false, ..sharing }, Sharing { fabric: false, rdma: false }];
        let mut result = create(fewer[0]);
        for (before, now) in fewer.into_iter().zip(fewer.into_iter().skip(1)) {
            if before != now && result != CuResult::SUCCESS && result != CuResult::OUT_OF_MEMORY {
                tracing::debug!(code = result.0, ?before, ?now, "memory that can be shared in fewer ways");
                result = create(now);
            }
        }
        check_alloc(&bound.current, result, "cuMemCreate", len as u64, label)?;
        Ok(Physical(allocation))
    }

    /// The memory behind a descriptor; `peer` names its owner in errors.
    pub fn import(fd: &OwnedFd, peer: &str) -> Result<Physical> {
        let mut allocation: CuAllocation = 0;
        // SAFETY: for this handle type the pointer's value is the descriptor, which stays ours.
        let result = unsafe {
            ffi::cuMemImportFromShareableHandle(
                &mut allocation,
                fd.as_raw_fd() as usize as *mut c_void,
                ffi::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            )
        };
        match result {
            CuResult::SUCCESS => Ok(Physical(allocation)),
            CuResult::INVALID_DEVICE => Err(unavailable(
                format!("peer access to {peer}"),
                "its device is not visible to this process; let every rank see all devices of the node (the same \
                 CUDA_VISIBLE_DEVICES) and choose by local rank",
            )),
            other => Err(other.error_with(
                "cuMemImportFromShareableHandle",
                format!("; for {peer}, whose process must be of the same container and user"),
            )),
        }
    }

    /// The memory that is mapped at `ptr`.
    pub fn at(ptr: DevicePtr) -> Result<Physical> {
        let mut allocation: CuAllocation = 0;
        // SAFETY: the out pointer is valid; the driver looks the address up and does not follow it.
        unsafe { ffi::cuMemRetainAllocationHandle(&mut allocation, ptr.0 as *mut c_void) }
            .check("cuMemRetainAllocationHandle")?;
        Ok(Physical(allocation))
    }

    /// A descriptor for it.
    pub fn export(&self) -> Result<OwnedFd> {
        let mut fd: RawFd = -1;
        // SAFETY: for this handle type the driver writes one `int` through the pointer.
        unsafe {
            ffi::cuMemExportToShareableHandle(
                (&raw mut fd).cast(),
                self.0,
                ffi::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                0,
            )
        }
        .check("cuMemExportToShareableHandle")?;
        // SAFETY: the driver made this descriptor for us, and has given it to no other code.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    /// A handle for it on all hosts of the NVLink domain; an error where it was created without.
    pub fn export_fabric(&self) -> Result<FabricHandle> {
        let mut handle = [0u8; ffi::CU_IPC_HANDLE_SIZE];
        // SAFETY: for this handle type the driver writes a `CUmemFabricHandle` of as many bytes.
        let result = unsafe {
            ffi::cuMemExportToShareableHandle(
                handle.as_mut_ptr().cast(),
                self.0,
                ffi::CU_MEM_HANDLE_TYPE_FABRIC,
                0,
            )
        };
        if result != CuResult::SUCCESS {
            let reason = format!(
                "cuMemExportToShareableHandle says {} ({}); it takes NVLink between hosts and an IMEX channel",
                result.name(),
                result.0
            );
            return Err(unavailable("a fabric handle of device memory", reason));
        }
        Ok(FabricHandle(handle.to_vec()))
    }

    /// The memory behind a fabric handle; `peer` names its owner in errors.
    pub fn import_fabric(handle: &FabricHandle, peer: &str) -> Result<Physical> {
        let mut bytes: [u8; ffi::CU_IPC_HANDLE_SIZE] = handle.0.as_slice().try_into().map_err(|_| {
            let rule = format!("of {peer}: a fabric handle has {} bytes", ffi::CU_IPC_HANDLE_SIZE);
            Error::argument("fabric handle", format!("{} bytes", handle.0.len()), rule)
        })?;
        let mut allocation: CuAllocation = 0;
        // SAFETY: for this handle type the driver reads a `CUmemFabricHandle` of as many bytes.
        let result = unsafe {
            ffi::cuMemImportFromShareableHandle(
                &mut allocation,
                bytes.as_mut_ptr().cast(),
                ffi::CU_MEM_HANDLE_TYPE_FABRIC,
            )
        };
        if result != CuResult::SUCCESS {
            let reason = format!(
                "cuMemImportFromShareableHandle says {} ({}); both hosts must be in one NVLink domain and IMEX channel",
                result.name(),
                result.0
            );
            return Err(unavailable(format!("peer access to {peer}"), reason));
        }
        Ok(Physical(allocation))
    }

    /// The device that holds the memory, if the driver returns it.
    pub fn owner(&self) -> Option<c_int> {
        let mut prop = CuMemAllocationProp {
            kind: 0,
            requested_handle_types: 0,
            location: CuMemLocation::default(),
            win32_handle_meta_data: std::ptr::null_mut(),
            compression_type: 0,
            gpu_direct_rdma_capable: 0,
            usage: 0,
            reserved: [0; 4],
        };
        // SAFETY: the out pointer is valid and the handle live.
        let result = unsafe { ffi::cuMemGetAllocationPropertiesFromHandle(&mut prop, self.0) };
        (result == CuResult::SUCCESS && prop.location.kind == ffi::CU_MEM_LOCATION_TYPE_DEVICE)
            .then_some(prop.location.id)
    }
}

impl Drop for Physical {
    fn drop(&mut self) {
        // SAFETY: releases our one reference; mappings hold their own.
        unsafe { ffi::cuMemRelease(self.0) }.log("cuMemRelease");
    }
}

/// A reserved address range.
struct Range {
    ptr: CuDevicePtr,
    bytes: usize,
}

impl Drop for Range {
    fn drop(&mut self) {
        // SAFETY: reserved by us with this size; a mapping in it has been undone before.
        unsafe { ffi::cuMemAddressFree(self.ptr, self.bytes) }.log("cuMemAddressFree");
    }
}

/// Physical memory at an address. Dropped: unmapped, then the address range is freed.
pub struct Mapping {
    range: Range,
}

impl Mapping {
    /// Reserves a range and maps the memory into it. No device has access yet.
    pub fn new(physical: &Physical, bytes: usize) -> Result<Mapping> {
        let mut ptr: CuDevicePtr = 0;
        // SAFETY: the out pointer is valid; alignment, hint and flags 0 mean "any".
        unsafe { ffi::cuMemAddressReserve(&mut ptr, bytes, 0, 0, 0) }.check("cuMemAddressReserve")?;
        let range = Range { ptr, bytes };
        // SAFETY: the range is reserved and empty, the handle live.
        match unsafe { ffi::cuMemMap(ptr, bytes, 0, physical.0, 0) } {
            CuResult::SUCCESS => Ok(Mapping { range }),
            CuResult::INVALID_VALUE => Err(CuResult::INVALID_VALUE.error_with(
                "cuMemMap",
                format!("; does the memory have {bytes} bytes, as its importer says?"),
            )),
            other => Err(other.error("cuMemMap")),
        }
    }

    /// Lets the bound device read and write it.
    pub fn grant(&self, bound: &Bound<'_>) -> CuResult {
        let access =
            CuMemAccessDesc { location: location(bound), flags: ffi::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        // SAFETY: the range is mapped, and one descriptor is passed.
        unsafe { ffi::cuMemSetAccess(self.range.ptr, self.range.bytes, &access, 1) }
    }

    /// Zeroes it, in a stream of its own: the default stream would wait for the caller's work.
    pub fn zero(self, _: &Bound<'_>) -> Result<Mapping> {
        // The stream is never captured. A capture of this thread would forbid the wait for it.
        let _relaxed = Relaxed::new();
        let mut stream: CuStream = std::ptr::null_mut();
        // SAFETY: the out pointer is valid and a context is bound. The mapping outlives the work of
        // the stream, which has no other user.
        unsafe {
            ffi::cuStreamCreateWithPriority(&mut stream, ffi::CU_STREAM_NON_BLOCKING, 0)
                .check("cuStreamCreateWithPriority")?;
            let begun = ffi::cuMemsetD8Async(self.range.ptr, 0, self.range.bytes, stream);
            let ended = ffi::cuStreamSynchronize(stream);
            ffi::cuStreamDestroy_v2(stream).log("cuStreamDestroy");
            begun.check("cuMemsetD8Async")?;
            if let Err(error) = ended.check("cuStreamSynchronize") {
                // Its work may still run, which would fault in unmapped memory.
                std::mem::forget(self);
                return Err(error);
            }
            Ok(self)
        }
    }

    /// Releases ownership: the address and the size, for [`Mapping::from_raw`].
    pub fn into_raw(self) -> (DevicePtr, u64) {
        let raw = (DevicePtr(self.range.ptr), self.range.bytes as u64);
        std::mem::forget(self);
        raw
    }

    /// Takes ownership again.
    ///
    /// # Safety
    /// The two come from [`Mapping::into_raw`], are passed once, and no work in flight uses the
    /// memory when the result is dropped.
    pub unsafe fn from_raw(ptr: DevicePtr, bytes: u64) -> Mapping {
        Mapping { range: Range { ptr: ptr.0, bytes: bytes as usize } }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by us with this size, and no work in flight uses it.
        unsafe { ffi::cuMemUnmap(self.range.ptr, self.range.bytes) }.log("cuMemUnmap");
    }
}
