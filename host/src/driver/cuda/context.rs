//! Start-up, facts about devices, and the primary context, made current on a thread.

use std::ffi::{CStr, c_char, c_int};

use cust::context::Context;
use cust::device::Device as CustDevice;

use super::error::{from_cust, unavailable};
use super::ffi::{self, CuContext, CuResult};
use super::library;
use crate::driver::{DeviceInfo, RdmaWriteOrder};
use crate::error::{Error, Result};

/// The devices this process sees, in the driver's order (`CUDA_VISIBLE_DEVICES` applies).
///
/// [`Error::Unavailable`] where there is no driver or no device.
pub fn devices() -> Result<Vec<DeviceInfo>> {
    (0..device_count()?).map(|ordinal| describe(cust_device(ordinal)?)).collect()
}

/// Starts the driver and counts its devices; none is an error.
pub(super) fn device_count() -> Result<u32> {
    initialise()?;
    let count = CustDevice::num_devices().map_err(from_cust("cuDeviceGetCount"))?;
    if count == 0 {
        return Err(unavailable("a CUDA device", CuResult::NO_DEVICE.remedy()));
    }
    Ok(count)
}

/// `cuInit`, which may be called any number of times. Not `cust::init`: it turns the codes for a
/// missing driver and for a broken driver into `UnknownError`.
pub(super) fn initialise() -> Result<()> {
    if let Err(reason) = library::library() {
        let remedy =
            "install the NVIDIA driver, R550 or newer, or in a container pass the GPUs in (`--gpus all`)";
        return Err(unavailable("the CUDA driver", format!("it cannot be loaded: {reason}; {remedy}")));
    }
    // SAFETY: no argument but the flags, which must be 0.
    let result = unsafe { ffi::cuInit(0) };
    match result.check("cuInit") {
        Ok(()) => Ok(()),
        Err(Error::Cuda { name, code, .. }) => {
            let remedy = match result.remedy() {
                "" => "is the NVIDIA driver installed and loaded? `nvidia-smi` tells",
                known => known,
            };
            Err(unavailable("the CUDA driver", format!("cuInit says {name} ({code}); {remedy}")))
        }
        Err(other) => Err(other),
    }
}

/// `cust`'s handle of a device. Only after [`initialise`].
pub(super) fn cust_device(ordinal: u32) -> Result<CustDevice> {
    CustDevice::get_device(ordinal).map_err(from_cust("cuDeviceGet"))
}

/// One integer fact of a device.
pub(super) fn attribute(device: CustDevice, attribute: c_int) -> Result<c_int> {
    let mut value = 0;
    // SAFETY: the out pointer is valid; an unknown attribute is an error, not a fault.
    unsafe { ffi::cuDeviceGetAttribute(&mut value, attribute, device.as_raw()) }
        .check("cuDeviceGetAttribute")?;
    Ok(value)
}

/// Whether the device has an attribute. Older drivers may lack the attribute's number, which counts
/// as "no".
pub(super) fn supports(device: CustDevice, which: c_int) -> bool {
    attribute(device, which).is_ok_and(|value| value != 0)
}

/// Compute capability, as `(major, minor)`.
pub(super) fn compute_capability(device: CustDevice) -> Result<(c_int, c_int)> {
    Ok((
        attribute(device, ffi::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(device, ffi::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    ))
}

/// The CUDA version of the driver, as 1000 * major + 10 * minor.
pub(super) fn driver_version() -> Result<u32> {
    let version = cust::CudaApiVersion::get().map_err(from_cust("cuDriverGetVersion"))?;
    Ok((version.major() * 1000 + version.minor() * 10) as u32)
}

/// All fields of [`DeviceInfo`].
pub(super) fn describe(device: CustDevice) -> Result<DeviceInfo> {
    Ok(DeviceInfo {
        ordinal: device.as_raw() as u32,
        name: device.name().map_err(from_cust("cuDeviceGetName"))?,
        is_virtual: false,
        sm_count: attribute(device, ffi::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)? as u32,
        max_shared_bytes_per_block: attribute(
            device,
            ffi::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        )? as u32,
        total_memory: device.total_memory().map_err(from_cust("cuDeviceTotalMem"))? as u64,
        driver_version: driver_version()?,
        pci_bus_id: pci_bus_id(device)?,
        rdma_write_order: rdma_write_order(device),
    })
}

/// A driver without the attribute promises no order.
pub(super) fn rdma_write_order(device: CustDevice) -> RdmaWriteOrder {
    match attribute(device, ffi::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING) {
        Ok(ffi::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES..) => RdmaWriteOrder::AllDevices,
        Ok(ffi::CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER..) => RdmaWriteOrder::Owner,
        _ => RdmaWriteOrder::None,
    }
}

fn pci_bus_id(device: CustDevice) -> Result<String> {
    let mut text = [0 as c_char; 32];
    // SAFETY: the buffer has the given length; the driver terminates the text.
    unsafe { ffi::cuDeviceGetPCIBusId(text.as_mut_ptr(), text.len() as c_int, device.as_raw()) }
        .check("cuDeviceGetPCIBusId")?;
    // SAFETY: the last byte is zero in any case, so the string ends within the buffer.
    Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
}

/// Whether a device can use atomics in a peer's memory. NVLink has no attribute of its own; native
/// atomics are its difference from PCIe.
pub(super) fn native_atomics(device: c_int, peer: c_int) -> bool {
    let mut value = 0;
    // SAFETY: the out pointer is valid; both devices exist.
    let result = unsafe {
        ffi::cuDeviceGetP2PAttribute(
            &mut value,
            ffi::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED,
            device,
            peer,
        )
    };
    result == ffi::CuResult::SUCCESS && value != 0
}

/// [`native_atomics`] with the device at a PCI address; true if it is the same device, or not
/// visible to this process.
pub(super) fn has_native_atomics(device: CustDevice, peer: &str) -> Result<bool> {
    for ordinal in 0..device_count()? {
        let other = cust_device(ordinal)?;
        if pci_bus_id(other)? == peer {
            return Ok(other.as_raw() == device.as_raw() || native_atomics(device.as_raw(), other.as_raw()));
        }
    }
    Ok(true)
}

/// Retains the device's primary context, which every other user of the device in this process
/// shares. The thread's current context is left as it was.
pub(super) fn retain_primary(device: CustDevice) -> Result<Context> {
    let mut current: CuContext = std::ptr::null_mut();
    // SAFETY: the out pointer is valid.
    unsafe { ffi::cuCtxGetCurrent(&mut current) }.check("cuCtxGetCurrent")?;

    // `Context::new` would hold codes such as CUDA_ERROR_DEVICE_UNAVAILABLE in an enum that lacks
    // them. With the context already retained by us, its own retain has nothing left to fail at.
    let mut primary: CuContext = std::ptr::null_mut();
    // SAFETY: the out pointer is valid and the device exists.
    unsafe { ffi::cuDevicePrimaryCtxRetain(&mut primary, device.as_raw()) }
        .check("cuDevicePrimaryCtxRetain")?;
    let context = Context::new(device).map_err(from_cust("cuDevicePrimaryCtxRetain"));
    // SAFETY: releases the retain above, once; `context` holds its own.
    unsafe { ffi::cuDevicePrimaryCtxRelease_v2(device.as_raw()) }.log("cuDevicePrimaryCtxRelease");

    // `Context::new` made the context current.
    // SAFETY: the driver reported `current` a moment ago; null unbinds.
    unsafe { ffi::cuCtxSetCurrent(current) }.check("cuCtxSetCurrent")?;
    context
}

/// The ordinal of the device whose primary context is current on this thread.
///
/// # Errors
/// [`Error::Unavailable`] where no context is current, or another one than the primary.
pub(super) fn current_ordinal() -> Result<u32> {
    initialise()?;
    let what = "this thread's current CUDA device";
    let mut current: CuContext = std::ptr::null_mut();
    // SAFETY: the out pointer is valid.
    unsafe { ffi::cuCtxGetCurrent(&mut current) }.check("cuCtxGetCurrent")?;
    if current.is_null() {
        let rule = "no context is current: call cudaSetDevice or cuCtxSetCurrent on this thread first, or \
                    name the device with CudaDevice::open";
        return Err(unavailable(what, rule));
    }
    let mut device = 0;
    // SAFETY: the out pointer is valid and a context is current.
    unsafe { ffi::cuCtxGetDevice(&mut device) }.check("cuCtxGetDevice")?;
    let mut primary: CuContext = std::ptr::null_mut();
    // SAFETY: the out pointer is valid and the device exists, since it has a context.
    unsafe { ffi::cuDevicePrimaryCtxRetain(&mut primary, device) }.check("cuDevicePrimaryCtxRetain")?;
    // SAFETY: releases the retain above, once.
    unsafe { ffi::cuDevicePrimaryCtxRelease_v2(device) }.log("cuDevicePrimaryCtxRelease");
    if primary != current {
        let rule = format!(
            "a context of device {device} is current that is not its primary one, which epoxide uses: \
             make the primary context current, as the CUDA runtime and cudarc do"
        );
        return Err(unavailable(what, rule));
    }
    Ok(device as u32)
}

/// A context that is current on this thread.
///
/// On drop, the thread's previous context becomes current again, if there was another one. So a
/// caller that drives its own context from this thread sees no change. A thread without a context
/// keeps ours, so that binding costs it one query from then on. The current context is not cached
/// here: other libraries switch contexts too, and the driver's query is a read of a thread-local.
pub(super) struct Current {
    previous: CuContext,
}

impl Current {
    /// Makes `context` current on the calling thread.
    pub(super) fn set(context: &Context) -> Result<Current> {
        let ours: CuContext = context.as_raw().cast();
        let mut current: CuContext = std::ptr::null_mut();
        // SAFETY: the out pointer is valid.
        unsafe { ffi::cuCtxGetCurrent(&mut current) }.check("cuCtxGetCurrent")?;
        if current == ours {
            return Ok(Current { previous: std::ptr::null_mut() });
        }
        // SAFETY: the context is retained as long as `context` lives.
        unsafe { ffi::cuCtxSetCurrent(ours) }.check("cuCtxSetCurrent")?;
        Ok(Current { previous: current })
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if !self.previous.is_null() {
            // SAFETY: it was this thread's current context when `set` ran, and its owner runs on
            // this thread.
            unsafe { ffi::cuCtxSetCurrent(self.previous) }.log("cuCtxSetCurrent");
        }
    }
}

/// While this lives, captures under way restrict the thread only on streams under capture and
/// events recorded there. Without it other calls, too, fail and invalidate the capture. For calls
/// that never use captured streams or events.
pub(super) struct Relaxed(c_int);

impl Relaxed {
    pub(super) fn new() -> Relaxed {
        let mut mode = ffi::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the pointer is valid; the mode before replaces the new one there.
        unsafe { ffi::cuThreadExchangeStreamCaptureMode(&mut mode) }.log("cuThreadExchangeStreamCaptureMode");
        Relaxed(mode)
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { ffi::cuThreadExchangeStreamCaptureMode(&mut self.0) }
            .log("cuThreadExchangeStreamCaptureMode");
    }
}

/// Bytes of device memory now free.
pub(super) fn free_bytes(_: &Current) -> Result<u64> {
    let (mut free, mut total) = (0, 0);
    // SAFETY: both out pointers are valid and a context is bound.
    unsafe { ffi::cuMemGetInfo_v2(&mut free, &mut total) }.check("cuMemGetInfo")?;
    Ok(free as u64)
}

/// `OUT_OF_MEMORY` as [`Error::OutOfMemory`], the rest as usual.
pub(super) fn check_alloc(
    current: &Current,
    result: CuResult,
    call: &'static str,
    requested: u64,
    label: &str,
) -> Result<()> {
    if result == CuResult::OUT_OF_MEMORY {
        let available = free_bytes(current).unwrap_or(0);
        return Err(Error::OutOfMemory { what: label.into(), requested, available });
    }
    result.check(call)
}
