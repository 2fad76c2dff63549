//! Whether and how a device's memory can be shared.

use super::context::{attribute, supports};
use super::error::unavailable;
use super::ffi;
use crate::error::Result;

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
