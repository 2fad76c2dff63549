//! The driver's library, `libcuda.so.1`, found at run time, so that programs with this feature
//! start on machines without a driver.
//!
//! Every function of the driver that `cust_raw` or `ffi` declares is defined here as a jump through
//! an entry of a table. An entry first points to [`resolve`], which looks the function up in the
//! library and stores its address in the entry. Arguments of any types pass through unchanged.
//! Without a library, or without the function, the call returns an error code.
//!
//! The definitions are weak: a program may have others. Linking the real library as well is
//! harmless, because a definition in the program takes precedence over that of a shared library.
//! The lookup returns the library's own address.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

/// The library's name for the loader.
pub const NAME: &CStr = c"libcuda.so.1";

/// `CUDA_ERROR_SHARED_OBJECT_INIT_FAILED`: the result of all calls without a library.
const NO_LIBRARY: c_int = 303;
/// `CUDA_ERROR_NOT_FOUND`: the result of calls that this driver lacks.
const NO_FUNCTION: c_int = 500;

/// An entry of the table, as the assembly below lays it out.
#[repr(C)]
struct Entry {
    target: AtomicPtr<c_void>,
    name: *const c_char,
}

/// The loader's handle of the library, or its error.
pub fn library() -> Result<*mut c_void, &'static str> {
    struct Handle(*mut c_void);
    // SAFETY: a handle of the loader may be used from any thread; this one is never closed.
    unsafe impl Send for Handle {}
    // SAFETY: as above.
    unsafe impl Sync for Handle {}

    static LIBRARY: OnceLock<Result<Handle, String>> = OnceLock::new();
    let found = LIBRARY.get_or_init(|| {
        // SAFETY: the name ends in NUL; the driver's constructors may run on any thread.
        let handle = unsafe { libc::dlopen(NAME.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if !handle.is_null() {
            return Ok(Handle(handle));
        }
        // SAFETY: takes nothing; null or text that lasts until this thread's next call of the
        // loader.
        let said = unsafe { libc::dlerror() };
        if said.is_null() {
            return Err(format!("{}: the loader gives no reason", NAME.to_string_lossy()));
        }
        // SAFETY: it is not null, so it is text that ends in NUL.
        Err(unsafe { CStr::from_ptr(said) }.to_string_lossy().into_owned())
    });
    found.as_ref().map(|handle| handle.0).map_err(String::as_str)
}

extern "C" fn no_library() -> c_int {
    NO_LIBRARY
}

extern "C" fn no_function() -> c_int {
    NO_FUNCTION
}

/// Resolves an entry: returns the target of its calls and stores it. The assembly below calls this
/// once for each function, or more often if threads race.
///
/// # Safety
/// `entry` is one of the table.
unsafe extern "C" fn resolve(entry: *const Entry) -> *mut c_void {
    // SAFETY: entries are never moved nor freed, and all changes in them are atomic.
    let entry = unsafe { &*entry };
    let target = match library() {
        Err(_) => no_library as *mut c_void,
        // SAFETY: the handle is open, and the name ends in NUL.
        Ok(library) => match unsafe { libc::dlsym(library, entry.name) } {
            function if function.is_null() => no_function as *mut c_void,
            function => function,
        },
    };
    entry.target.store(target, Ordering::Relaxed);
    target
}

/// Defines the functions. Only the System V ABI of x86-64 is written here. A call finds its
/// arguments in these registers and on the stack, and a jump leaves them unchanged.
macro_rules! functions {
    ($($name:ident)*) => {
        #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
        std::arch::global_asm!(
            ".pushsection .text.epoxide_cuda, \"ax\", @progbits",
            $(concat!(
                ".weak ", stringify!($name), "\n",
                ".type ", stringify!($name), ", @function\n",
                stringify!($name), ":\n",
                "jmp qword ptr [rip + .Lepoxide_cuda_entry_", stringify!($name), "]\n",
                ".Lepoxide_cuda_first_", stringify!($name), ":\n",
                "lea r11, [rip + .Lepoxide_cuda_entry_", stringify!($name), "]\n",
                "jmp .Lepoxide_cuda_resolve\n",
                ".size ", stringify!($name), ", . - ", stringify!($name), "\n",
                ".pushsection .data.epoxide_cuda, \"aw\", @progbits\n",
                ".p2align 3\n",
                ".Lepoxide_cuda_entry_", stringify!($name), ":\n",
                ".quad .Lepoxide_cuda_first_", stringify!($name), "\n",
                ".quad .Lepoxide_cuda_name_", stringify!($name), "\n",
                ".popsection\n",
                ".pushsection .rodata.epoxide_cuda, \"a\", @progbits\n",
                ".Lepoxide_cuda_name_", stringify!($name), ":\n",
                ".asciz \"", stringify!($name), "\"\n",
                ".popsection",
            ),)*
            // The entry is in r11. All that can hold an argument is kept; the stack is a multiple
            // of 16 at the call.
            ".Lepoxide_cuda_resolve:",
            "push rdi",
            "push rsi",
            "push rdx",
            "push rcx",
            "push r8",
            "push r9",
            "sub rsp, 136",
            "movups [rsp], xmm0",
            "movups [rsp + 16], xmm1",
            "movups [rsp + 32], xmm2",
            "movups [rsp + 48], xmm3",
            "movups [rsp + 64], xmm4",
            "movups [rsp + 80], xmm5",
            "movups [rsp + 96], xmm6",
            "movups [rsp + 112], xmm7",
            "mov rdi, r11",
            "call {resolve}",
            "movups xmm0, [rsp]",
            "movups xmm1, [rsp + 16]",
            "movups xmm2, [rsp + 32]",
            "movups xmm3, [rsp + 48]",
            "movups xmm4, [rsp + 64]",
            "movups xmm5, [rsp + 80]",
            "movups xmm6, [rsp + 96]",
            "movups xmm7, [rsp + 112]",
            "add rsp, 136",
            "pop r9",
            "pop r8",
            "pop rcx",
            "pop rdx",
            "pop rsi",
            "pop rdi",
            "jmp rax",
            ".popsection",
            resolve = sym resolve,
        );
    };
}

// All declarations of `cust_raw` 0.11 and of `ffi`.
functions! {
    cuArray3DCreate_v2 cuArray3DGetDescriptor_v2 cuArrayCreate_v2 cuArrayDestroy cuArrayGetDescriptor_v2 cuArrayGetPlane
    cuArrayGetSparseProperties cuCtxAttach cuCtxCreate_v2 cuCtxCreate_v3 cuCtxDestroy_v2 cuCtxDetach cuCtxDisablePeerAccess
    cuCtxEnablePeerAccess cuCtxGetApiVersion cuCtxGetCacheConfig cuCtxGetCurrent cuCtxGetDevice cuCtxGetExecAffinity cuCtxGetFlags
    cuCtxGetLimit cuCtxGetSharedMemConfig cuCtxGetStreamPriorityRange cuCtxPopCurrent_v2 cuCtxPushCurrent_v2 cuCtxResetPersistingL2Cache
    cuCtxSetCacheConfig cuCtxSetCurrent cuCtxSetLimit cuCtxSetSharedMemConfig cuCtxSynchronize cuDestroyExternalMemory
    cuDestroyExternalSemaphore cuDeviceCanAccessPeer cuDeviceComputeCapability cuDeviceGet cuDeviceGetAttribute cuDeviceGetByPCIBusId
    cuDeviceGetCount cuDeviceGetDefaultMemPool cuDeviceGetExecAffinitySupport cuDeviceGetGraphMemAttribute cuDeviceGetLuid
    cuDeviceGetMemPool cuDeviceGetName cuDeviceGetNvSciSyncAttributes cuDeviceGetP2PAttribute cuDeviceGetPCIBusId cuDeviceGetProperties
    cuDeviceGetTexture1DLinearMaxWidth cuDeviceGetUuid cuDeviceGetUuid_v2 cuDeviceGraphMemTrim cuDevicePrimaryCtxGetState
    cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxReset_v2 cuDevicePrimaryCtxRetain cuDevicePrimaryCtxSetFlags_v2
    cuDeviceSetGraphMemAttribute cuDeviceSetMemPool cuDeviceTotalMem_v2 cuDriverGetVersion cuEventCreate cuEventDestroy_v2
    cuEventElapsedTime cuEventQuery cuEventRecord cuEventRecordWithFlags cuEventSynchronize cuExternalMemoryGetMappedBuffer
    cuExternalMemoryGetMappedMipmappedArray cuFlushGPUDirectRDMAWrites cuFuncGetAttribute cuFuncGetModule cuFuncSetAttribute
    cuFuncSetBlockShape cuFuncSetCacheConfig cuFuncSetSharedMemConfig cuFuncSetSharedSize cuGetErrorName cuGetErrorString
    cuGetExportTable cuGetProcAddress cuGraphAddChildGraphNode cuGraphAddDependencies cuGraphAddEmptyNode cuGraphAddEventRecordNode
    cuGraphAddEventWaitNode cuGraphAddExternalSemaphoresSignalNode cuGraphAddExternalSemaphoresWaitNode cuGraphAddHostNode
    cuGraphAddKernelNode cuGraphAddMemAllocNode cuGraphAddMemFreeNode cuGraphAddMemcpyNode cuGraphAddMemsetNode
    cuGraphChildGraphNodeGetGraph cuGraphClone cuGraphCreate cuGraphDebugDotPrint cuGraphDestroy cuGraphDestroyNode
    cuGraphEventRecordNodeGetEvent cuGraphEventRecordNodeSetEvent cuGraphEventWaitNodeGetEvent cuGraphEventWaitNodeSetEvent
    cuGraphExecChildGraphNodeSetParams cuGraphExecDestroy cuGraphExecEventRecordNodeSetEvent cuGraphExecEventWaitNodeSetEvent
    cuGraphExecExternalSemaphoresSignalNodeSetParams cuGraphExecExternalSemaphoresWaitNodeSetParams cuGraphExecHostNodeSetParams
    cuGraphExecKernelNodeSetParams cuGraphExecMemcpyNodeSetParams cuGraphExecMemsetNodeSetParams cuGraphExecUpdate
    cuGraphExternalSemaphoresSignalNodeGetParams cuGraphExternalSemaphoresSignalNodeSetParams cuGraphExternalSemaphoresWaitNodeGetParams
    cuGraphExternalSemaphoresWaitNodeSetParams cuGraphGetEdges cuGraphGetNodes cuGraphGetRootNodes cuGraphHostNodeGetParams
    cuGraphHostNodeSetParams cuGraphInstantiateWithFlags cuGraphInstantiate_v2 cuGraphKernelNodeCopyAttributes
    cuGraphKernelNodeGetAttribute cuGraphKernelNodeGetParams cuGraphKernelNodeSetAttribute cuGraphKernelNodeSetParams cuGraphLaunch
    cuGraphMemAllocNodeGetParams cuGraphMemFreeNodeGetParams cuGraphMemcpyNodeGetParams cuGraphMemcpyNodeSetParams
    cuGraphMemsetNodeGetParams cuGraphMemsetNodeSetParams cuGraphNodeFindInClone cuGraphNodeGetDependencies cuGraphNodeGetDependentNodes
    cuGraphNodeGetType cuGraphReleaseUserObject cuGraphRemoveDependencies cuGraphRetainUserObject cuGraphUpload cuGraphicsMapResources
    cuGraphicsResourceGetMappedMipmappedArray cuGraphicsResourceGetMappedPointer_v2 cuGraphicsResourceSetMapFlags_v2
    cuGraphicsSubResourceGetMappedArray cuGraphicsUnmapResources cuGraphicsUnregisterResource cuImportExternalMemory
    cuImportExternalSemaphore cuInit cuIpcCloseMemHandle cuIpcGetEventHandle cuIpcGetMemHandle cuIpcOpenEventHandle
    cuIpcOpenMemHandle_v2 cuLaunch cuLaunchCooperativeKernel cuLaunchCooperativeKernelMultiDevice cuLaunchGrid cuLaunchGridAsync
    cuLaunchHostFunc cuLaunchKernel cuLinkAddData_v2 cuLinkAddFile_v2 cuLinkComplete cuLinkCreate_v2 cuLinkDestroy cuMemAddressFree
    cuMemAddressReserve cuMemAdvise cuMemAllocAsync cuMemAllocFromPoolAsync cuMemAllocHost_v2 cuMemAllocManaged cuMemAllocPitch_v2
    cuMemAlloc_v2 cuMemCreate cuMemExportToShareableHandle cuMemFreeAsync cuMemFreeHost cuMemFree_v2 cuMemGetAccess
    cuMemGetAddressRange_v2 cuMemGetAllocationGranularity cuMemGetAllocationPropertiesFromHandle cuMemGetInfo_v2 cuMemHostAlloc
    cuMemHostGetDevicePointer_v2 cuMemHostGetFlags cuMemHostRegister_v2 cuMemHostUnregister cuMemImportFromShareableHandle cuMemMap
    cuMemMapArrayAsync cuMemPoolCreate cuMemPoolDestroy cuMemPoolExportPointer cuMemPoolExportToShareableHandle cuMemPoolGetAccess
    cuMemPoolGetAttribute cuMemPoolImportFromShareableHandle cuMemPoolImportPointer cuMemPoolSetAccess cuMemPoolSetAttribute
    cuMemPoolTrimTo cuMemPrefetchAsync cuMemRangeGetAttribute cuMemRangeGetAttributes cuMemRelease cuMemRetainAllocationHandle
    cuMemSetAccess cuMemUnmap cuMemcpy cuMemcpy2DAsync_v2 cuMemcpy2DUnaligned_v2 cuMemcpy2D_v2 cuMemcpy3DAsync_v2 cuMemcpy3DPeer
    cuMemcpy3DPeerAsync cuMemcpy3D_v2 cuMemcpyAsync cuMemcpyAtoA_v2 cuMemcpyAtoD_v2 cuMemcpyAtoHAsync_v2 cuMemcpyAtoH_v2 cuMemcpyDtoA_v2
    cuMemcpyDtoDAsync_v2 cuMemcpyDtoD_v2 cuMemcpyDtoHAsync_v2 cuMemcpyDtoH_v2 cuMemcpyHtoAAsync_v2 cuMemcpyHtoA_v2 cuMemcpyHtoDAsync_v2
    cuMemcpyHtoD_v2 cuMemcpyPeer cuMemcpyPeerAsync cuMemsetD16Async cuMemsetD16_v2 cuMemsetD2D16Async cuMemsetD2D16_v2
    cuMemsetD2D32Async cuMemsetD2D32_v2 cuMemsetD2D8Async cuMemsetD2D8_v2 cuMemsetD32Async cuMemsetD32_v2 cuMemsetD8Async cuMemsetD8_v2
    cuMipmappedArrayCreate cuMipmappedArrayDestroy cuMipmappedArrayGetLevel cuMipmappedArrayGetSparseProperties cuModuleGetFunction
    cuModuleGetGlobal_v2 cuModuleGetSurfRef cuModuleGetTexRef cuModuleLoad cuModuleLoadData cuModuleLoadDataEx cuModuleLoadFatBinary
    cuModuleUnload cuOccupancyAvailableDynamicSMemPerBlock cuOccupancyMaxActiveBlocksPerMultiprocessor
    cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags cuOccupancyMaxPotentialBlockSize cuOccupancyMaxPotentialBlockSizeWithFlags
    cuParamSetSize cuParamSetTexRef cuParamSetf cuParamSeti cuParamSetv cuPointerGetAttribute cuPointerGetAttributes
    cuPointerSetAttribute cuProfilerInitialize cuProfilerStart cuProfilerStop cuSignalExternalSemaphoresAsync cuStreamAddCallback
    cuStreamAttachMemAsync cuStreamBatchMemOp cuStreamBeginCapture_v2 cuStreamCopyAttributes cuStreamCreate cuStreamCreateWithPriority
    cuStreamDestroy_v2 cuStreamEndCapture cuStreamGetAttribute cuStreamGetCaptureInfo cuStreamGetCaptureInfo_v2 cuStreamGetCtx
    cuStreamGetFlags cuStreamGetPriority cuStreamIsCapturing cuStreamQuery cuStreamSetAttribute cuStreamSynchronize
    cuStreamUpdateCaptureDependencies cuStreamWaitEvent cuStreamWaitValue32 cuStreamWaitValue64 cuStreamWriteValue32
    cuStreamWriteValue64 cuSurfObjectCreate cuSurfObjectDestroy cuSurfObjectGetResourceDesc cuSurfRefGetArray cuSurfRefSetArray
    cuTexObjectCreate cuTexObjectDestroy cuTexObjectGetResourceDesc cuTexObjectGetResourceViewDesc cuTexObjectGetTextureDesc
    cuTexRefCreate cuTexRefDestroy cuTexRefGetAddressMode cuTexRefGetAddress_v2 cuTexRefGetArray cuTexRefGetBorderColor
    cuTexRefGetFilterMode cuTexRefGetFlags cuTexRefGetFormat cuTexRefGetMaxAnisotropy cuTexRefGetMipmapFilterMode
    cuTexRefGetMipmapLevelBias cuTexRefGetMipmapLevelClamp cuTexRefGetMipmappedArray cuTexRefSetAddress2D_v3 cuTexRefSetAddressMode
    cuTexRefSetAddress_v2 cuTexRefSetArray cuTexRefSetBorderColor cuTexRefSetFilterMode cuTexRefSetFlags cuTexRefSetFormat
    cuTexRefSetMaxAnisotropy cuTexRefSetMipmapFilterMode cuTexRefSetMipmapLevelBias cuTexRefSetMipmapLevelClamp
    cuTexRefSetMipmappedArray cuThreadExchangeStreamCaptureMode cuUserObjectCreate cuUserObjectRelease cuUserObjectRetain
    cuWaitExternalSemaphoresAsync
}
