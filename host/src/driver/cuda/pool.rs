//! Stream-ordered device memory: a pool of our own.
//!
//! `cuMemFree` waits for the running kernels of the device, and blocks every other call of the
//! context until then. Memory of this pool is freed in a stream instead. The freeing stream waits
//! for all work enqueued in the streams of the device's list. So the owner may free memory that
//! they still use, and the host does not wait.

use std::ffi::{c_int, c_void};
use std::sync::Mutex;

use super::context::{Current, check_alloc};
use super::ffi::{
    self, CuDevicePtr, CuEvent, CuMemLocation, CuMemPoolProps, CuMemoryPool, CuResult, CuStream,
};
use crate::error::Result;
use crate::lock::lock;

/// A device's pool. Every method and the drop require that the device's context is bound.
#[derive(Debug)]
pub struct MemoryPool {
    pool: CuMemoryPool,
    /// Idle but for allocations, so that waiting for one is short.
    allocate: CuStream,
    /// Frees memory. It waits for all streams that may use the memory.
    release: CuStream,
    event: CuEvent,
    /// Freed memory that the driver does not have yet.
    freed: Mutex<Vec<CuDevicePtr>>,
}

// SAFETY: handles of the driver, which accepts them from any thread.
unsafe impl Send for MemoryPool {}
// SAFETY: as above. Callers hold the lock of the device's list of streams around operations that
// must not run at the same time.
unsafe impl Sync for MemoryPool {}

impl MemoryPool {
    /// Without the handles.
    fn none() -> MemoryPool {
        MemoryPool {
            pool: std::ptr::null_mut(),
            allocate: std::ptr::null_mut(),
            release: std::ptr::null_mut(),
            event: std::ptr::null_mut(),
            freed: Mutex::default(),
        }
    }

    /// Takes the pool out, to be dropped with the context bound.
    pub fn take(&mut self) -> MemoryPool {
        std::mem::replace(self, MemoryPool::none())
    }

    /// The pool of a device; its context is bound to this thread.
    pub fn new(device: c_int) -> Result<MemoryPool> {
        let props = CuMemPoolProps {
            allocation_type: ffi::CU_MEM_ALLOCATION_TYPE_PINNED,
            handle_types: 0,
            location: CuMemLocation { kind: ffi::CU_MEM_LOCATION_TYPE_DEVICE, id: device },
            win32_security_attributes: std::ptr::null_mut(),
            max_bytes: 0,
            reserved: [0; 56],
        };
        let mut this = MemoryPool::none();
        // SAFETY: all pointers are valid. If a later call fails, the drop of `this` destroys the
        // pool and the streams made before.
        unsafe {
            ffi::cuMemPoolCreate(&mut this.pool, &props).check("cuMemPoolCreate")?;
            // Keep freed memory for the next allocation: unmapping it at every synchronisation
            // costs more than it saves.
            let mut keep = u64::MAX;
            let threshold = ffi::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            ffi::cuMemPoolSetAttribute(this.pool, threshold, (&raw mut keep).cast::<c_void>())
                .check("cuMemPoolSetAttribute")?;
            // The driver must not order an allocation behind a free that waits for a kernel: the
            // allocation would wait too.
            let mut no: c_int = 0;
            let dependencies = ffi::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES;
            ffi::cuMemPoolSetAttribute(this.pool, dependencies, (&raw mut no).cast::<c_void>())
                .check("cuMemPoolSetAttribute")?;
            for stream in [&mut this.allocate, &mut this.release] {
                ffi::cuStreamCreateWithPriority(stream, ffi::CU_STREAM_NON_BLOCKING, 0)
                    .check("cuStreamCreateWithPriority")?;
            }
            ffi::cuEventCreate(&mut this.event, ffi::CU_EVENT_DISABLE_TIMING).check("cuEventCreate")?;
        }
        Ok(this)
    }

    /// Memory that any stream may use at once.
    pub fn alloc(&self, current: &Current, bytes: u64, label: &str) -> Result<CuDevicePtr> {
        let mut ptr: CuDevicePtr = 0;
        let mut try_it = || {
            // SAFETY: the out pointer is valid, pool and stream are live.
            unsafe { ffi::cuMemAllocFromPoolAsync(&mut ptr, bytes as usize, self.pool, self.allocate) }
        };
        let mut result = try_it();
        if result == CuResult::OUT_OF_MEMORY {
            // Free memory of the pool may be in pieces that are too small.
            // SAFETY: the pool is live; memory in use stays.
            unsafe { ffi::cuMemPoolTrimTo(self.pool, 0) }.log("cuMemPoolTrimTo");
            result = try_it();
        }
        check_alloc(current, result, "cuMemAllocFromPoolAsync", bytes, label)?;
        // Other streams are not ordered behind this one, which has only allocations. SAFETY: the
        // stream is live.
        let waited = unsafe { ffi::cuStreamSynchronize(self.allocate) }.check("cuStreamSynchronize");
        // A capture by other code forbids the wait. The next free has the memory.
        waited.inspect_err(|_| lock(&self.freed).push(ptr))?;
        Ok(ptr)
    }

    /// Frees memory, and memory that was kept before, behind all work of `streams` so far. The
    /// memory is kept for the next call where a stream may still use it: under a capture by other
    /// code, for work from before.
    ///
    /// # Safety
    /// The memory is of this pool and is not freed twice; no other stream uses it. The streams are
    /// live, and their list is held.
    pub unsafe fn free(&self, memory: Option<CuDevicePtr>, mut streams: impl Iterator<Item = CuStream>) {
        let mut freed = lock(&self.freed);
        freed.extend(memory);
        if freed.is_empty() {
            return;
        }
        // SAFETY: the caller holds the list of the streams, which are live.
        let order = |stream| unsafe { self.order_behind(stream) };
        match streams.try_fold(true, |all, stream| order(stream).map(|is_ordered| all && is_ordered)) {
            Ok(true) => {
                for at in freed.drain(..) {
                    // SAFETY: memory of this pool, taken off the only list of what is to be freed.
                    unsafe { ffi::cuMemFreeAsync(at, self.release) }.log("cuMemFreeAsync");
                }
            }
            Ok(false) => {}
            Err(error) => tracing::warn!("device memory is kept: a stream may still use it: {error}"),
        }
    }

    /// Orders later frees behind the work of `stream` so far. False for a stream under capture, for
    /// which no other stream can wait.
    ///
    /// # Errors
    /// Errors of the driver. Later frees may then run before the stream's work.
    ///
    /// # Safety
    /// The stream is live, and the device's list of streams is held: none begins to be captured
    /// meanwhile, and the event is this call's.
    pub unsafe fn order_behind(&self, stream: CuStream) -> Result<bool> {
        if is_captured(stream)? {
            return Ok(false);
        }
        // SAFETY: event and streams are live. A wait is for the event's last record at the time of
        // the call, so that one event serves all streams.
        unsafe {
            ffi::cuEventRecord(self.event, stream).check("cuEventRecord")?;
            ffi::cuStreamWaitEvent(self.release, self.event, 0).check("cuStreamWaitEvent")?;
        }
        Ok(true)
    }
}

/// Whether a live stream is under capture, also one that can no longer be finished.
pub(super) fn is_captured(stream: CuStream) -> Result<bool> {
    let mut status = ffi::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the callers' streams are live; the out pointer is valid.
    unsafe { ffi::cuStreamIsCapturing(stream, &mut status) }.check("cuStreamIsCapturing")?;
    Ok(status != ffi::CU_STREAM_CAPTURE_STATUS_NONE)
}

impl Drop for MemoryPool {
    fn drop(&mut self) {
        // SAFETY: each handle is ours and not used afterwards; the driver finishes work under way.
        // Null ones were never made.
        unsafe {
            for stream in [self.allocate, self.release] {
                if !stream.is_null() {
                    ffi::cuStreamDestroy_v2(stream).log("cuStreamDestroy");
                }
            }
            if !self.event.is_null() {
                ffi::cuEventDestroy_v2(self.event).log("cuEventDestroy");
            }
            if !self.pool.is_null() {
                ffi::cuMemPoolDestroy(self.pool).log("cuMemPoolDestroy");
            }
        }
    }
}
