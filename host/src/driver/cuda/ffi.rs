//! The CUDA driver's C interface, as far as epoxide calls it.
//!
//! Results are [`CuResult`], an integer, so that every code a driver may return is a valid value.
//! The functions jump to the library that `library` finds at run time. Names ending in `_v2` are
//! the expansions of the C header's macros.

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use std::mem::{offset_of, size_of};

/// `CUresult`.
#[repr(transparent)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a driver call may have failed"]
pub struct CuResult(pub i32);

/// The result codes that epoxide treats specially.
impl CuResult {
    pub const SUCCESS: Self = Self(0);
    pub const INVALID_VALUE: Self = Self(1);
    pub const OUT_OF_MEMORY: Self = Self(2);
    pub const NOT_INITIALIZED: Self = Self(3);
    pub const DEINITIALIZED: Self = Self(4);
    pub const STUB_LIBRARY: Self = Self(34);
    pub const DEVICE_UNAVAILABLE: Self = Self(46);
    pub const NO_DEVICE: Self = Self(100);
    pub const INVALID_DEVICE: Self = Self(101);
    pub const INVALID_IMAGE: Self = Self(200);
    pub const NO_BINARY_FOR_GPU: Self = Self(209);
    pub const INVALID_PTX: Self = Self(218);
    pub const JIT_COMPILER_NOT_FOUND: Self = Self(221);
    pub const UNSUPPORTED_PTX_VERSION: Self = Self(222);
    pub const JIT_COMPILATION_DISABLED: Self = Self(223);
    pub const INVALID_SOURCE: Self = Self(300);
    pub const OPERATING_SYSTEM: Self = Self(304);
    pub const INVALID_HANDLE: Self = Self(400);
    pub const NOT_FOUND: Self = Self(500);
    pub const NOT_READY: Self = Self(600);
    pub const ILLEGAL_ADDRESS: Self = Self(700);
    pub const LAUNCH_OUT_OF_RESOURCES: Self = Self(701);
    pub const LAUNCH_TIMEOUT: Self = Self(702);
    pub const CONTEXT_IS_DESTROYED: Self = Self(709);
    pub const ASSERT: Self = Self(710);
    pub const HARDWARE_STACK_ERROR: Self = Self(714);
    pub const LAUNCH_FAILED: Self = Self(719);
    pub const COOPERATIVE_LAUNCH_TOO_LARGE: Self = Self(720);
    pub const NOT_SUPPORTED: Self = Self(801);
    pub const SYSTEM_NOT_READY: Self = Self(802);
    pub const SYSTEM_DRIVER_MISMATCH: Self = Self(803);
    pub const COMPAT_NOT_SUPPORTED_ON_DEVICE: Self = Self(804);
    pub const STREAM_CAPTURE_UNSUPPORTED: Self = Self(900);
    pub const STREAM_CAPTURE_WRONG_THREAD: Self = Self(908);
    pub const UNKNOWN: Self = Self(999);
}

/// `CUdevice`: an ordinal.
pub type CuDevice = c_int;
/// `CUcontext`.
pub type CuContext = *mut c_void;
/// `CUmodule`.
pub type CuModule = *mut c_void;
/// `CUfunction`.
pub type CuFunction = *mut c_void;
/// `CUstream`.
pub type CuStream = *mut c_void;
/// `CUevent`.
pub type CuEvent = *mut c_void;
/// `CUgraph`.
pub type CuGraph = *mut c_void;
/// `CUgraphExec`.
pub type CuGraphExec = *mut c_void;
/// `CUdeviceptr`.
pub type CuDevicePtr = u64;
/// `CUmemoryPool`.
pub type CuMemoryPool = *mut c_void;
/// `CUmemGenericAllocationHandle`.
pub type CuAllocation = c_ulonglong;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct CuMemLocation {
    pub kind: c_int,
    pub id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CuMemAllocationProp {
    pub kind: c_int,
    pub requested_handle_types: c_int,
    pub location: CuMemLocation,
    pub win32_handle_meta_data: *mut c_void,
    pub compression_type: u8,
    pub gpu_direct_rdma_capable: u8,
    pub usage: u16,
    pub reserved: [u8; 4],
}

const _: () = assert!(size_of::<CuMemAllocationProp>() == 32);
const _: () = assert!(offset_of!(CuMemAllocationProp, location) == 8);
const _: () = assert!(offset_of!(CuMemAllocationProp, gpu_direct_rdma_capable) == 25);

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CuMemAccessDesc {
    pub location: CuMemLocation,
    pub flags: c_int,
}

const _: () = assert!(size_of::<CuMemAccessDesc>() == 12);

/// `CUmemPoolProps`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CuMemPoolProps {
    pub allocation_type: c_int,
    pub handle_types: c_int,
    pub location: CuMemLocation,
    pub win32_security_attributes: *mut c_void,
    pub max_bytes: usize,
    pub reserved: [u8; 56],
}

const _: () = assert!(size_of::<CuMemPoolProps>() == 88);

pub const CU_MEM_LOCATION_TYPE_DEVICE: c_int = 1;
pub const CU_MEM_ALLOCATION_TYPE_PINNED: c_int = 1;
pub const CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: c_int = 1;
pub const CU_MEM_HANDLE_TYPE_FABRIC: c_int = 8;
/// Bytes of a `CUmemFabricHandle`.
pub const CU_IPC_HANDLE_SIZE: usize = 64;
pub const CU_MEM_ACCESS_FLAGS_PROT_READWRITE: c_int = 3;
pub const CU_MEM_ALLOC_GRANULARITY_RECOMMENDED: c_int = 1;
pub const CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD: c_int = 1;
pub const CU_MEMHOSTALLOC_PORTABLE: c_uint = 1;
pub const CU_MEMHOSTALLOC_DEVICEMAP: c_uint = 2;

pub const CU_MEMHOSTREGISTER_PORTABLE: c_uint = 1;
pub const CU_MEMHOSTREGISTER_DEVICEMAP: c_uint = 2;
pub const CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES: c_int = 3;
pub const CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: c_int = 4;

pub const CU_STREAM_NON_BLOCKING: c_uint = 1;
pub const CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: c_int = 1;
pub const CU_STREAM_CAPTURE_MODE_RELAXED: c_int = 2;
pub const CU_STREAM_CAPTURE_STATUS_NONE: c_int = 0;
pub const CU_EVENT_DEFAULT: c_uint = 0;
pub const CU_EVENT_DISABLE_TIMING: c_uint = 2;

pub const CU_JIT_INFO_LOG_BUFFER: c_int = 3;
pub const CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES: c_int = 4;
pub const CU_JIT_ERROR_LOG_BUFFER: c_int = 5;
pub const CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: c_int = 6;

pub const CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: c_int = 0;
pub const CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: c_int = 1;
pub const CU_FUNC_ATTRIBUTE_NUM_REGS: c_int = 4;
pub const CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: c_int = 8;
pub const CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: c_int = 9;

pub const CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: c_int = 16;
pub const CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY: c_int = 19;
pub const CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: c_int = 75;
pub const CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: c_int = 76;
pub const CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH: c_int = 95;
pub const CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: c_int = 97;
pub const CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: c_int = 102;
pub const CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: c_int = 103;
pub const CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: c_int = 110;
pub const CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: c_int = 115;
pub const CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING: c_int = 118;
pub const CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED: c_int = 124;
pub const CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED: c_int = 128;

pub const CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER: c_int = 100;
pub const CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES: c_int = 200;

pub const CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED: c_int = 3;

unsafe extern "C" {
    pub fn cuInit(flags: c_uint) -> CuResult;
    pub fn cuGetErrorName(error: c_int, name: *mut *const c_char) -> CuResult;
    pub fn cuGetProcAddress(
        symbol: *const c_char,
        function: *mut *mut c_void,
        cuda_version: c_int,
        flags: c_ulonglong,
    ) -> CuResult;

    pub fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: CuDevice) -> CuResult;
    pub fn cuDeviceGetPCIBusId(text: *mut c_char, len: c_int, device: CuDevice) -> CuResult;
    pub fn cuDeviceCanAccessPeer(yes: *mut c_int, device: CuDevice, peer: CuDevice) -> CuResult;
    pub fn cuDeviceGetP2PAttribute(
        value: *mut c_int,
        attribute: c_int,
        src: CuDevice,
        dst: CuDevice,
    ) -> CuResult;
    pub fn cuDevicePrimaryCtxRetain(context: *mut CuContext, device: CuDevice) -> CuResult;
    pub fn cuDevicePrimaryCtxRelease_v2(device: CuDevice) -> CuResult;
    pub fn cuCtxGetCurrent(context: *mut CuContext) -> CuResult;
    pub fn cuCtxSetCurrent(context: CuContext) -> CuResult;
    pub fn cuCtxGetDevice(device: *mut CuDevice) -> CuResult;
    pub fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> CuResult;

    pub fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> CuResult;
    pub fn cuMemAlloc_v2(ptr: *mut CuDevicePtr, bytes: usize) -> CuResult;
    pub fn cuMemFree_v2(ptr: CuDevicePtr) -> CuResult;
    pub fn cuMemHostAlloc(ptr: *mut *mut c_void, bytes: usize, flags: c_uint) -> CuResult;
    pub fn cuMemHostGetDevicePointer_v2(ptr: *mut CuDevicePtr, host: *mut c_void, flags: c_uint) -> CuResult;
    pub fn cuMemFreeHost(ptr: *mut c_void) -> CuResult;
    pub fn cuMemHostRegister_v2(ptr: *mut c_void, bytes: usize, flags: c_uint) -> CuResult;
    pub fn cuMemHostUnregister(ptr: *mut c_void) -> CuResult;

    pub fn cuMemPoolCreate(pool: *mut CuMemoryPool, props: *const CuMemPoolProps) -> CuResult;
    pub fn cuMemPoolDestroy(pool: CuMemoryPool) -> CuResult;
    pub fn cuMemPoolSetAttribute(pool: CuMemoryPool, attribute: c_int, value: *mut c_void) -> CuResult;
    pub fn cuMemPoolTrimTo(pool: CuMemoryPool, bytes_to_keep: usize) -> CuResult;
    pub fn cuMemAllocFromPoolAsync(
        ptr: *mut CuDevicePtr,
        bytes: usize,
        pool: CuMemoryPool,
        stream: CuStream,
    ) -> CuResult;
    pub fn cuMemFreeAsync(ptr: CuDevicePtr, stream: CuStream) -> CuResult;

    pub fn cuMemGetAllocationGranularity(
        granularity: *mut usize,
        prop: *const CuMemAllocationProp,
        option: c_int,
    ) -> CuResult;
    pub fn cuMemCreate(
        allocation: *mut CuAllocation,
        bytes: usize,
        prop: *const CuMemAllocationProp,
        flags: c_ulonglong,
    ) -> CuResult;
    pub fn cuMemRelease(allocation: CuAllocation) -> CuResult;
    pub fn cuMemRetainAllocationHandle(allocation: *mut CuAllocation, address: *mut c_void) -> CuResult;
    pub fn cuMemGetAllocationPropertiesFromHandle(
        prop: *mut CuMemAllocationProp,
        allocation: CuAllocation,
    ) -> CuResult;
    pub fn cuMemAddressReserve(
        ptr: *mut CuDevicePtr,
        bytes: usize,
        alignment: usize,
        hint: CuDevicePtr,
        flags: c_ulonglong,
    ) -> CuResult;
    pub fn cuMemAddressFree(ptr: CuDevicePtr, bytes: usize) -> CuResult;
    pub fn cuMemMap(
        ptr: CuDevicePtr,
        bytes: usize,
        offset: usize,
        allocation: CuAllocation,
        flags: c_ulonglong,
    ) -> CuResult;
    pub fn cuMemUnmap(ptr: CuDevicePtr, bytes: usize) -> CuResult;
    pub fn cuMemSetAccess(
        ptr: CuDevicePtr,
        bytes: usize,
        descriptors: *const CuMemAccessDesc,
        count: usize,
    ) -> CuResult;
    pub fn cuMemExportToShareableHandle(
        handle: *mut c_void,
        allocation: CuAllocation,
        kind: c_int,
        flags: c_ulonglong,
    ) -> CuResult;
    pub fn cuMemImportFromShareableHandle(
        allocation: *mut CuAllocation,
        handle: *mut c_void,
        kind: c_int,
    ) -> CuResult;

    pub fn cuMemcpyAsync(dst: CuDevicePtr, src: CuDevicePtr, bytes: usize, stream: CuStream) -> CuResult;
    pub fn cuMemcpyHtoDAsync_v2(
        dst: CuDevicePtr,
        src: *const c_void,
        bytes: usize,
        stream: CuStream,
    ) -> CuResult;
    pub fn cuMemcpyDtoHAsync_v2(
        dst: *mut c_void,
        src: CuDevicePtr,
        bytes: usize,
        stream: CuStream,
    ) -> CuResult;
    pub fn cuMemcpyDtoDAsync_v2(
        dst: CuDevicePtr,
        src: CuDevicePtr,
        bytes: usize,
        stream: CuStream,
    ) -> CuResult;
    pub fn cuMemsetD8Async(dst: CuDevicePtr, value: u8, count: usize, stream: CuStream) -> CuResult;

    pub fn cuModuleLoadDataEx(
        module: *mut CuModule,
        image: *const c_void,
        option_count: c_uint,
        options: *mut c_int,
        values: *mut *mut c_void,
    ) -> CuResult;
    pub fn cuModuleUnload(module: CuModule) -> CuResult;
    pub fn cuModuleGetFunction(function: *mut CuFunction, module: CuModule, name: *const c_char) -> CuResult;
    pub fn cuFuncGetAttribute(value: *mut c_int, attribute: c_int, function: CuFunction) -> CuResult;
    pub fn cuFuncSetAttribute(function: CuFunction, attribute: c_int, value: c_int) -> CuResult;
    pub fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int,
        function: CuFunction,
        block_size: c_int,
        dynamic_shared: usize,
    ) -> CuResult;
    pub fn cuLaunchKernel(
        function: CuFunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: CuStream,
        params: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> CuResult;
    pub fn cuLaunchCooperativeKernel(
        function: CuFunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared_bytes: c_uint,
        stream: CuStream,
        params: *mut *mut c_void,
    ) -> CuResult;

    pub fn cuStreamCreateWithPriority(stream: *mut CuStream, flags: c_uint, priority: c_int) -> CuResult;
    pub fn cuStreamGetCtx(stream: CuStream, context: *mut CuContext) -> CuResult;
    pub fn cuStreamDestroy_v2(stream: CuStream) -> CuResult;
    pub fn cuStreamSynchronize(stream: CuStream) -> CuResult;
    pub fn cuStreamQuery(stream: CuStream) -> CuResult;
    pub fn cuStreamWaitEvent(stream: CuStream, event: CuEvent, flags: c_uint) -> CuResult;

    pub fn cuEventCreate(event: *mut CuEvent, flags: c_uint) -> CuResult;
    pub fn cuEventDestroy_v2(event: CuEvent) -> CuResult;
    pub fn cuEventRecord(event: CuEvent, stream: CuStream) -> CuResult;
    pub fn cuEventSynchronize(event: CuEvent) -> CuResult;
    pub fn cuEventQuery(event: CuEvent) -> CuResult;
    pub fn cuEventElapsedTime(milliseconds: *mut f32, start: CuEvent, end: CuEvent) -> CuResult;

    pub fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) -> CuResult;
    pub fn cuStreamIsCapturing(stream: CuStream, status: *mut c_int) -> CuResult;
    pub fn cuStreamGetCaptureInfo_v2(
        stream: CuStream,
        status: *mut c_int,
        id: *mut u64,
        graph: *mut CuGraph,
        nodes: *mut *const c_void,
        num_nodes: *mut usize,
    ) -> CuResult;
    pub fn cuStreamBeginCapture_v2(stream: CuStream, mode: c_int) -> CuResult;
    pub fn cuStreamEndCapture(stream: CuStream, graph: *mut CuGraph) -> CuResult;
    pub fn cuGraphInstantiateWithFlags(
        exec: *mut CuGraphExec,
        graph: CuGraph,
        flags: c_ulonglong,
    ) -> CuResult;
    pub fn cuGraphDestroy(graph: CuGraph) -> CuResult;
    pub fn cuGraphLaunch(exec: CuGraphExec, stream: CuStream) -> CuResult;
    pub fn cuGraphExecDestroy(exec: CuGraphExec) -> CuResult;
}
