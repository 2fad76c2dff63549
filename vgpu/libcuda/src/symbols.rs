//! Functions by name: `cuGetProcAddress`, and functions that exist but are not supported.

use std::collections::HashSet;
use std::ffi::{c_char, c_int, c_ulonglong, c_void};
use std::sync::{Mutex, PoisonError};

use crate::abi::*;
use crate::calls::device::VERSION;
use crate::calls::{self, api};

/// The address of a function.
#[derive(Clone, Copy)]
pub(crate) struct Symbol(pub(crate) *const ());

// SAFETY: the address of code, which is the same in all threads.
unsafe impl Sync for Symbol {}

/// All functions by subject.
const TABLES: &[&[(&str, Symbol)]] = &[
    calls::context::SYMBOLS,
    calls::device::SYMBOLS,
    calls::event::SYMBOLS,
    calls::graph::SYMBOLS,
    calls::launch::SYMBOLS,
    calls::memory::SYMBOLS,
    calls::module::SYMBOLS,
    calls::multicast::SYMBOLS,
    calls::sharing::SYMBOLS,
    calls::stream::SYMBOLS,
    calls::tensor::SYMBOLS,
    SYMBOLS,
    UNSUPPORTED,
];

/// Suffixed names that a program of an older API must not get, with the version that introduced
/// them as `1000 * major + 10 * minor`.
const SINCE: &[(&str, c_int)] = &[
    ("cuCtxCreate_v3", 11040),
    ("cuCtxCreate_v4", 12050),
    ("cuCtxSynchronize_v2", 13000),
    ("cuDeviceGetUuid_v2", 11040),
    ("cuEventElapsedTime_v2", 12080),
    ("cuGetProcAddress_v2", 12000),
    ("cuMemAdvise_v2", 12020),
    ("cuMemPrefetchAsync_v2", 12020),
    ("cuGraphAddDependencies_v2", 12030),
    ("cuGraphAddNode_v2", 12030),
    ("cuGraphGetEdges_v2", 12030),
    ("cuGraphNodeGetDependencies_v2", 12030),
    ("cuGraphNodeGetDependentNodes_v2", 12030),
    ("cuGraphRemoveDependencies_v2", 12030),
    ("cuMemcpy3DBatchAsync_v2", 13000),
    ("cuMemcpyBatchAsync_v2", 13000),
    ("cuMulticastBindAddr_v2", 13010),
    ("cuMulticastBindMem_v2", 13010),
    ("cuStreamGetCaptureInfo_v3", 12030),
    ("cuStreamGetCtx_v2", 12050),
    ("cuStreamUpdateCaptureDependencies_v2", 12030),
];

/// The first version with functions to look up.
const OLDEST: c_int = 2000;

fn find(name: &str) -> Option<*const ()> {
    let all = TABLES.iter().flat_map(|table| table.iter());
    all.into_iter().find(|(own, _)| *own == name).map(|(_, symbol)| symbol.0)
}

/// The newest function of a name that a program of this version of the API may call. `c_int::MAX`
/// stands for every version. Names with a suffix are not looked up.
fn newest(name: &str, version: c_int) -> Option<*const ()> {
    let is_suffixed = name.rsplit_once("_v").is_some_and(|(_, number)| number.parse::<u8>().is_ok());
    if is_suffixed || version < OLDEST {
        return None;
    }
    let allowed = |name: &str| SINCE.iter().all(|(own, since)| *own != name || version >= *since);
    let suffixes = ["_v4", "_v3", "_v2", ""];
    suffixes
        .iter()
        .map(|suffix| format!("{name}{suffix}"))
        .filter(|name| allowed(name))
        .find_map(|name| find(&name))
}

/// The names of all functions.
#[doc(hidden)]
pub fn names() -> impl Iterator<Item = &'static str> {
    TABLES.iter().flat_map(|table| table.iter()).map(|(name, _)| *name)
}

/// Reports once per name that a function is not supported.
pub(crate) fn report_once(name: &'static str) {
    static REPORTED: Mutex<Option<HashSet<&str>>> = Mutex::new(None);
    let mut reported = REPORTED.lock().unwrap_or_else(PoisonError::into_inner);
    if reported.get_or_insert_default().insert(name) {
        eprintln!("libcuda of virtual GPUs: {name} is not supported");
    }
}

/// Looks a function up. Without one it gives the status of `cuGetProcAddress_v2`: 1 where no
/// function has the name, and 2 where one of a newer version has.
fn look_up(name: In<c_char>, version: c_int) -> Res<Result<*const c_void, c_int>> {
    let name = name.text()?;
    if version > VERSION {
        return Err(INVALID_VALUE);
    }
    let found = newest(&name, version).map(<*const ()>::cast);
    Ok(found.ok_or_else(|| if newest(&name, c_int::MAX).is_some() { 2 } else { 1 }))
}

api! {
    /// The address of a function. Flags for per-thread default streams change nothing.
    fn cuGetProcAddress(name: In<c_char>, to: Out<*const c_void>, version: c_int, _flags: c_ulonglong) {
        to.required()?;
        to.put(look_up(name, version)?.map_err(|_| NOT_FOUND)?)
    }

    /// The same, with a status that says why a function is not found. The address is null then, and
    /// the call succeeds.
    fn cuGetProcAddress_v2(
        name: In<c_char>,
        to: Out<*const c_void>,
        version: c_int,
        _flags: c_ulonglong,
        status: Out<c_int>,
    ) {
        to.required()?;
        let found = look_up(name, version)?;
        status.put_optional(found.err().unwrap_or(0));
        to.put(found.unwrap_or(std::ptr::null()))
    }
}

macro_rules! unsupported {
    ($($name:ident)*) => {
        $(
            /// Returns `CUDA_ERROR_NOT_SUPPORTED`, whatever the arguments.
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> CUresult {
                report_once(stringify!($name));
                NOT_SUPPORTED
            }
        )*
        const UNSUPPORTED: &[(&str, Symbol)] = &[$((stringify!($name), Symbol($name as *const ()))),*];
    };
}

// Callers pass arguments, which a function of C that takes none ignores.
unsupported! {
    cuArray3DCreate_v2 cuArray3DGetDescriptor_v2 cuArrayCreate_v2 cuArrayDestroy cuArrayGetDescriptor_v2
    cuArrayGetMemoryRequirements cuArrayGetPlane cuArrayGetSparseProperties cuCoredumpGetAttribute
    cuCoredumpGetAttributeGlobal cuCoredumpSetAttribute cuCoredumpSetAttributeGlobal cuCtxAttach
    cuCtxDetach cuCtxFromGreenCtx cuCtxGetDevResource cuCtxGetExecAffinity cuCtxRecordEvent
    cuCtxWaitEvent cuDestroyExternalMemory cuDestroyExternalSemaphore cuDevResourceGenerateDesc
    cuDevSmResourceSplit cuDevSmResourceSplitByCount cuDeviceGetDevResource
    cuDeviceGetExecAffinitySupport cuDeviceGetGraphMemAttribute cuDeviceGetHostAtomicCapabilities
    cuDeviceGetLuid cuDeviceGetNvSciSyncAttributes cuDeviceGetP2PAtomicCapabilities
    cuDeviceGetProperties cuDeviceGetTexture1DLinearMaxWidth cuDeviceGraphMemTrim
    cuDeviceRegisterAsyncNotification cuDeviceSetGraphMemAttribute cuDeviceUnregisterAsyncNotification
    cuExternalMemoryGetMappedBuffer cuExternalMemoryGetMappedMipmappedArray cuFlushGPUDirectRDMAWrites
    cuFuncSetBlockShape cuFuncSetSharedSize cuGetExportTable cuGraphAddBatchMemOpNode
    cuGraphAddChildGraphNode cuGraphAddDependencies cuGraphAddDependencies_v2 cuGraphAddEmptyNode
    cuGraphAddEventRecordNode cuGraphAddEventWaitNode cuGraphAddExternalSemaphoresSignalNode
    cuGraphAddExternalSemaphoresWaitNode cuGraphAddHostNode cuGraphAddKernelNode cuGraphAddKernelNode_v2
    cuGraphAddMemAllocNode cuGraphAddMemFreeNode cuGraphAddMemcpyNode cuGraphAddMemsetNode
    cuGraphAddNode cuGraphAddNode_v2 cuGraphBatchMemOpNodeGetParams cuGraphBatchMemOpNodeSetParams
    cuGraphChildGraphNodeGetGraph cuGraphConditionalHandleCreate cuGraphDebugDotPrint cuGraphDestroyNode
    cuGraphEventRecordNodeGetEvent cuGraphEventRecordNodeSetEvent cuGraphEventWaitNodeGetEvent
    cuGraphEventWaitNodeSetEvent cuGraphExecBatchMemOpNodeSetParams cuGraphExecChildGraphNodeSetParams
    cuGraphExecEventRecordNodeSetEvent cuGraphExecEventWaitNodeSetEvent
    cuGraphExecExternalSemaphoresSignalNodeSetParams cuGraphExecExternalSemaphoresWaitNodeSetParams
    cuGraphExecGetFlags cuGraphExecGetId cuGraphExecHostNodeSetParams cuGraphExecKernelNodeSetParams
    cuGraphExecKernelNodeSetParams_v2 cuGraphExecMemcpyNodeSetParams cuGraphExecMemsetNodeSetParams
    cuGraphExecNodeSetParams cuGraphExecUpdate cuGraphExecUpdate_v2
    cuGraphExternalSemaphoresSignalNodeGetParams cuGraphExternalSemaphoresSignalNodeSetParams
    cuGraphExternalSemaphoresWaitNodeGetParams cuGraphExternalSemaphoresWaitNodeSetParams
    cuGraphGetEdges cuGraphGetEdges_v2 cuGraphGetId cuGraphGetNodes cuGraphGetRootNodes
    cuGraphHostNodeGetParams cuGraphHostNodeSetParams cuGraphKernelNodeCopyAttributes
    cuGraphKernelNodeGetAttribute cuGraphKernelNodeGetParams cuGraphKernelNodeGetParams_v2
    cuGraphKernelNodeSetAttribute cuGraphKernelNodeSetParams cuGraphKernelNodeSetParams_v2
    cuGraphMemAllocNodeGetParams cuGraphMemFreeNodeGetParams cuGraphMemcpyNodeGetParams
    cuGraphMemcpyNodeSetParams cuGraphMemsetNodeGetParams cuGraphMemsetNodeSetParams
    cuGraphNodeFindInClone cuGraphNodeGetContainingGraph cuGraphNodeGetDependencies
    cuGraphNodeGetDependencies_v2 cuGraphNodeGetDependentNodes cuGraphNodeGetDependentNodes_v2
    cuGraphNodeGetEnabled cuGraphNodeGetLocalId cuGraphNodeGetToolsId cuGraphNodeGetType
    cuGraphNodeSetEnabled cuGraphNodeSetParams cuGraphReleaseUserObject cuGraphRemoveDependencies
    cuGraphRemoveDependencies_v2 cuGraphRetainUserObject cuGraphicsMapResources
    cuGraphicsResourceGetMappedMipmappedArray cuGraphicsResourceGetMappedPointer_v2
    cuGraphicsResourceSetMapFlags_v2 cuGraphicsSubResourceGetMappedArray cuGraphicsUnmapResources
    cuGraphicsUnregisterResource cuGreenCtxCreate cuGreenCtxDestroy cuGreenCtxGetDevResource
    cuGreenCtxGetId cuGreenCtxRecordEvent cuGreenCtxStreamCreate cuGreenCtxWaitEvent
    cuImportExternalMemory cuImportExternalSemaphore cuIpcGetEventHandle cuIpcOpenEventHandle cuLaunch
    cuLaunchCooperativeKernelMultiDevice cuLaunchGrid cuLaunchGridAsync cuLibraryEnumerateKernels
    cuLibraryGetManaged cuLibraryGetUnifiedFunction cuLogsCurrent cuLogsDumpToFile cuLogsDumpToMemory
    cuLogsRegisterCallback cuLogsUnregisterCallback cuMemBatchDecompressAsync
    cuMemDiscardAndPrefetchBatchAsync cuMemDiscardBatchAsync cuMemGetDefaultMemPool
    cuMemGetHandleForAddressRange cuMemGetMemPool
    cuMemMapArrayAsync cuMemPoolExportPointer cuMemPoolExportToShareableHandle cuMemPoolGetAccess
    cuMemPoolImportFromShareableHandle cuMemPoolImportPointer cuMemPoolSetAccess cuMemPrefetchBatchAsync
    cuMemRangeGetAttribute cuMemRangeGetAttributes cuMemSetMemPool cuMemcpy3DAsync_v2
    cuMemcpy3DBatchAsync cuMemcpy3DBatchAsync_v2 cuMemcpy3DPeer cuMemcpy3DPeerAsync cuMemcpy3D_v2
    cuMemcpyAtoA_v2 cuMemcpyAtoD_v2 cuMemcpyAtoHAsync_v2 cuMemcpyAtoH_v2 cuMemcpyBatchAsync
    cuMemcpyBatchAsync_v2 cuMemcpyDtoA_v2 cuMemcpyHtoAAsync_v2 cuMemcpyHtoA_v2 cuMemsetD2D16Async
    cuMipmappedArrayCreate cuMipmappedArrayDestroy cuMipmappedArrayGetLevel
    cuMipmappedArrayGetMemoryRequirements cuMipmappedArrayGetSparseProperties cuModuleGetSurfRef
    cuModuleGetTexRef
    cuOccupancyMaxActiveClusters cuOccupancyMaxPotentialClusterSize cuParamSetSize cuParamSetTexRef
    cuParamSetf cuParamSeti cuParamSetv cuProfilerInitialize cuSignalExternalSemaphoresAsync
    cuStreamBatchMemOp cuStreamBatchMemOp_v2 cuStreamBeginCaptureToGraph cuStreamCopyAttributes
    cuStreamGetAttribute cuStreamGetCaptureInfo cuStreamGetDevResource cuStreamGetGreenCtx
    cuStreamSetAttribute cuStreamUpdateCaptureDependencies cuStreamUpdateCaptureDependencies_v2
    cuStreamWaitValue32 cuStreamWaitValue32_v2 cuStreamWaitValue64 cuStreamWaitValue64_v2
    cuStreamWriteValue32 cuStreamWriteValue32_v2 cuStreamWriteValue64 cuStreamWriteValue64_v2
    cuSurfObjectCreate cuSurfObjectDestroy cuSurfObjectGetResourceDesc cuSurfRefGetArray
    cuSurfRefSetArray cuTensorMapEncodeIm2colWide
    cuTensorMapReplaceAddress cuTexObjectCreate cuTexObjectDestroy cuTexObjectGetResourceDesc
    cuTexObjectGetResourceViewDesc cuTexObjectGetTextureDesc cuTexRefCreate cuTexRefDestroy
    cuTexRefGetAddressMode cuTexRefGetAddress_v2 cuTexRefGetArray cuTexRefGetBorderColor
    cuTexRefGetFilterMode cuTexRefGetFlags cuTexRefGetFormat cuTexRefGetMaxAnisotropy
    cuTexRefGetMipmapFilterMode cuTexRefGetMipmapLevelBias cuTexRefGetMipmapLevelClamp
    cuTexRefGetMipmappedArray cuTexRefSetAddress2D_v3 cuTexRefSetAddressMode cuTexRefSetAddress_v2
    cuTexRefSetArray cuTexRefSetBorderColor cuTexRefSetFilterMode cuTexRefSetFlags cuTexRefSetFormat
    cuTexRefSetMaxAnisotropy cuTexRefSetMipmapFilterMode cuTexRefSetMipmapLevelBias
    cuTexRefSetMipmapLevelClamp cuTexRefSetMipmappedArray cuUserObjectCreate cuUserObjectRelease
    cuUserObjectRetain cuWaitExternalSemaphoresAsync
}
