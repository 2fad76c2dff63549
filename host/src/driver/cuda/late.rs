//! Driver functions newer than `cust_raw`'s CUDA 11.4. The table is filled at run time, so on an
//! older driver a feature is missing, and the program still starts.

use std::ffi::{CStr, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use super::error::unavailable;
use super::ffi::{self, CuDevicePtr, CuFunction, CuResult, CuStream};
use crate::error::Result;

/// `cuMemGetHandleForAddressRange`.
pub type MemGetHandleForAddressRange =
    unsafe extern "C" fn(*mut c_void, CuDevicePtr, usize, c_int, c_ulonglong) -> CuResult;
/// `cuFuncLoad`.
pub type FuncLoad = unsafe extern "C" fn(CuFunction) -> CuResult;
/// `cuLaunchKernelEx`.
pub type LaunchKernelEx =
    unsafe extern "C" fn(*const LaunchConfigEx, CuFunction, *mut *mut c_void, *mut *mut c_void) -> CuResult;

/// `cuStreamGetGreenCtx`.
pub type StreamGetGreenCtx = unsafe extern "C" fn(CuStream, *mut *mut c_void) -> CuResult;
/// `cuGreenCtxGetDevResource`.
pub type GreenCtxGetDevResource = unsafe extern "C" fn(*mut c_void, *mut DevResource, c_int) -> CuResult;

/// `CUdevResource` of multiprocessors, with room for more than the driver's 144 bytes.
#[repr(C)]
#[derive(Debug, Clone)]
pub struct DevResource {
    kind: c_int,
    padding: [u8; 92],
    pub sm_count: c_uint,
    rest: [u8; 412],
}

impl DevResource {
    /// `CU_DEV_RESOURCE_TYPE_SM`.
    pub const SM: c_int = 1;
}

impl Default for DevResource {
    fn default() -> DevResource {
        DevResource { kind: 0, padding: [0; 92], sm_count: 0, rest: [0; 412] }
    }
}

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Debug)]
pub struct LaunchConfigEx {
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    pub shared_bytes: c_uint,
    pub stream: CuStream,
    pub attributes: *mut LaunchAttribute,
    pub attribute_count: c_uint,
}

/// `CUlaunchAttribute`: the number of an attribute, and a union of 64 bytes.
#[repr(C)]
#[derive(Debug)]
pub struct LaunchAttribute {
    id: c_int,
    padding: [u8; 4],
    value: c_int,
    rest: [u8; 60],
}

impl LaunchAttribute {
    /// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`: the kernel may be launched before
    /// the previous kernel of the stream has ended.
    pub fn dependent() -> LaunchAttribute {
        LaunchAttribute { id: 6, padding: [0; 4], value: 1, rest: [0; 60] }
    }

    /// `CU_LAUNCH_ATTRIBUTE_COOPERATIVE`: all blocks must be resident at once.
    pub fn cooperative() -> LaunchAttribute {
        LaunchAttribute { id: 2, ..LaunchAttribute::dependent() }
    }
}

/// The functions that this driver has.
#[derive(Debug)]
pub struct Late {
    /// CUDA 11.7: a dma-buf descriptor for device memory.
    pub mem_get_handle_for_address_range: Option<MemGetHandleForAddressRange>,
    /// CUDA 12.4: loads a kernel's code now, not at its first launch.
    pub func_load: Option<FuncLoad>,
    /// CUDA 11.8: launches with attributes. Used from 12.3 on, when its launches can be captured.
    pub launch_kernel_ex: Option<LaunchKernelEx>,
    /// CUDA 12.5: the green context of a stream, which has some of the multiprocessors.
    pub stream_get_green_ctx: Option<StreamGetGreenCtx>,
    /// CUDA 12.5: the resources of a green context.
    pub green_ctx_get_dev_resource: Option<GreenCtxGetDevResource>,
}

/// The table, filled at the first call. The driver must have been initialised.
pub fn late() -> &'static Late {
    static LATE: OnceLock<Late> = OnceLock::new();
    LATE.get_or_init(|| Late {
        // SAFETY: null becomes `None`. Any other value is the function of that name. Since 11.7 its
        // C signature is `(void*, CUdeviceptr, size_t, CUmemRangeHandleType, unsigned long long)`.
        mem_get_handle_for_address_range: unsafe {
            std::mem::transmute::<*mut c_void, Option<MemGetHandleForAddressRange>>(resolve(
                c"cuMemGetHandleForAddressRange",
                11070,
            ))
        },
        // SAFETY: likewise, `(CUfunction)` since 12.4.
        func_load: unsafe {
            std::mem::transmute::<*mut c_void, Option<FuncLoad>>(resolve(c"cuFuncLoad", 12040))
        },
        // SAFETY: likewise, `(const CUlaunchConfig*, CUfunction, void**, void**)` since 11.8.
        launch_kernel_ex: unsafe {
            std::mem::transmute::<*mut c_void, Option<LaunchKernelEx>>(resolve(c"cuLaunchKernelEx", 12030))
        },
        // SAFETY: likewise, `(CUstream, CUgreenCtx*)` since 12.5.
        stream_get_green_ctx: unsafe {
            std::mem::transmute::<*mut c_void, Option<StreamGetGreenCtx>>(resolve(
                c"cuStreamGetGreenCtx",
                12050,
            ))
        },
        // SAFETY: likewise, `(CUgreenCtx, CUdevResource*, CUdevResourceType)` since 12.5.
        green_ctx_get_dev_resource: unsafe {
            std::mem::transmute::<*mut c_void, Option<GreenCtxGetDevResource>>(resolve(
                c"cuGreenCtxGetDevResource",
                12050,
            ))
        },
    })
}

/// The function, or an error that gives the first driver version with it.
pub fn require<F>(function: Option<F>, name: &str, since: &str) -> Result<F> {
    function.ok_or_else(|| unavailable(name, format!("this driver lacks the function; it came with {since}")))
}

pub(super) fn resolve(name: &CStr, version: c_int) -> *mut c_void {
    let mut function = std::ptr::null_mut();
    // SAFETY: `name` is NUL-terminated and the out pointer is valid.
    let found = unsafe { ffi::cuGetProcAddress(name.as_ptr(), &mut function, version, 0) };
    if found == CuResult::SUCCESS { function } else { std::ptr::null_mut() }
}
