//! Streams and events.
//!
//! A stream's handle is its `CUstream`; an adopted one carries [`ADOPTED`] as well, a bit no
//! user-space pointer has.

use std::ffi::c_void;

use super::device::Bound;
use super::ffi::{self, CuContext, CuEvent, CuResult, CuStream};
use super::late::{self, DevResource};
use crate::driver::RawStream;
use crate::error::{Error, Result};

pub(super) const ADOPTED: u64 = 1 << 63;

/// The `CUstream` behind a handle.
pub fn raw(stream: u64) -> CuStream {
    (stream & !ADOPTED) as CuStream
}

/// Creates a stream that does not synchronise with the default stream.
pub fn create(_: &Bound<'_>, high_priority: bool) -> Result<u64> {
    let (mut least, mut greatest) = (0, 0);
    // SAFETY: both out pointers are valid.
    unsafe { ffi::cuCtxGetStreamPriorityRange(&mut least, &mut greatest) }
        .check("cuCtxGetStreamPriorityRange")?;
    let priority = if high_priority { greatest } else { least };
    let mut stream: CuStream = std::ptr::null_mut();
    // SAFETY: the out pointer is valid and a context is bound.
    unsafe { ffi::cuStreamCreateWithPriority(&mut stream, ffi::CU_STREAM_NON_BLOCKING, priority) }
        .check("cuStreamCreateWithPriority")?;
    Ok(stream as u64)
}

/// A handle for the caller's stream: of the device's primary context, or of a green context, which
/// shares the primary context's memory.
///
/// # Safety
/// The stream is live.
pub unsafe fn adopt(bound: &Bound<'_>, stream: RawStream) -> Result<u64> {
    let mut context: CuContext = std::ptr::null_mut();
    // SAFETY: the out pointer is valid; the caller promises a live stream.
    let result = unsafe { ffi::cuStreamGetCtx(stream.0, &mut context) };
    let is_primary = context == bound.device.context.as_raw().cast();
    // A driver may reject the query; only a clear "no" is an error.
    if result == CuResult::SUCCESS && !is_primary && green_context(stream.0).is_none() {
        return Err(Error::argument(
            "stream",
            format!("{:p}", stream.0),
            format!(
                "it belongs to another context; pass a stream of device {}'s primary context",
                bound.device.info.ordinal
            ),
        ));
    }
    Ok(stream.0 as u64 | ADOPTED)
}

/// The green context that a live stream is of.
fn green_context(stream: CuStream) -> Option<*mut c_void> {
    let context_of = late::late().stream_get_green_ctx?;
    let mut context = std::ptr::null_mut();
    // SAFETY: the out pointer is valid, and the stream is live.
    let result = unsafe { context_of(stream, &mut context) };
    (result == CuResult::SUCCESS && !context.is_null()).then_some(context)
}

/// Multiprocessors that kernels of the stream can run on: those of its green context, if it has one.
pub fn multiprocessors(bound: &Bound<'_>, stream: u64) -> Result<u32> {
    let (context, resource_of) = (green_context(raw(stream)), late::late().green_ctx_get_dev_resource);
    let (Some(context), Some(resource_of)) = (context, resource_of) else {
        return Ok(bound.device.info.sm_count);
    };
    let mut resource = DevResource::default();
    // SAFETY: a green context, as the driver has just said, and room for what is known of it.
    unsafe { resource_of(context, &mut resource, DevResource::SM) }.check("cuGreenCtxGetDevResource")?;
    Ok(resource.sm_count)
}

/// Destroys a stream of ours; leaves an adopted one alone.
pub fn destroy(_: &Bound<'_>, stream: u64) {
    if stream & ADOPTED == 0 {
        // SAFETY: its owner gives it back once; the driver lets its work finish.
        unsafe { ffi::cuStreamDestroy_v2(raw(stream)) }.log("cuStreamDestroy");
    }
}

/// Blocks until all work of the stream is done.
pub fn synchronize(_: &Bound<'_>, stream: u64) -> Result<()> {
    // SAFETY: the stream is live, as the trait demands.
    unsafe { ffi::cuStreamSynchronize(raw(stream)) }.check("cuStreamSynchronize")
}

/// True when all work of the stream is done.
pub fn query(_: &Bound<'_>, stream: u64) -> Result<bool> {
    // SAFETY: the stream is live, as the trait demands.
    unsafe { ffi::cuStreamQuery(raw(stream)) }.check_ready("cuStreamQuery")
}

/// True while the stream is being captured, also where that capture can no longer be finished.
pub fn is_capturing(_: &Bound<'_>, stream: u64) -> Result<bool> {
    let mut status = ffi::CU_STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: the stream is live, as the trait demands, and the out pointer is valid.
    unsafe { ffi::cuStreamIsCapturing(raw(stream), &mut status) }.check("cuStreamIsCapturing")?;
    Ok(status != ffi::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// Creates an event.
pub fn event_create(_: &Bound<'_>, timing: bool) -> Result<u64> {
    let flags = if timing { ffi::CU_EVENT_DEFAULT } else { ffi::CU_EVENT_DISABLE_TIMING };
    let mut event: CuEvent = std::ptr::null_mut();
    // SAFETY: the out pointer is valid and a context is bound.
    unsafe { ffi::cuEventCreate(&mut event, flags) }.check("cuEventCreate")?;
    Ok(event as u64)
}

/// Destroys an event; a pending record still completes.
pub fn event_destroy(_: &Bound<'_>, event: u64) {
    // SAFETY: its owner gives it back once.
    unsafe { ffi::cuEventDestroy_v2(event as CuEvent) }.log("cuEventDestroy");
}

/// Records the event in the stream.
pub fn event_record(_: &Bound<'_>, event: u64, stream: u64) -> Result<()> {
    // SAFETY: both are live, as the trait demands.
    unsafe { ffi::cuEventRecord(event as CuEvent, raw(stream)) }.check("cuEventRecord")
}

/// Makes the stream wait for the event's last record.
pub fn wait_event(_: &Bound<'_>, stream: u64, event: u64) -> Result<()> {
    // SAFETY: both are live, as the trait demands.
    unsafe { ffi::cuStreamWaitEvent(raw(stream), event as CuEvent, 0) }.check("cuStreamWaitEvent")
}

/// Blocks until the event's last record has passed.
pub fn event_synchronize(_: &Bound<'_>, event: u64) -> Result<()> {
    // SAFETY: the event is live, as the trait demands.
    unsafe { ffi::cuEventSynchronize(event as CuEvent) }.check("cuEventSynchronize")
}

/// True when the event's last record has passed.
pub fn event_query(_: &Bound<'_>, event: u64) -> Result<bool> {
    // SAFETY: the event is live, as the trait demands.
    unsafe { ffi::cuEventQuery(event as CuEvent) }.check_ready("cuEventQuery")
}

/// Milliseconds between two recorded events.
pub fn event_elapsed_ms(_: &Bound<'_>, start: u64, end: u64) -> Result<f32> {
    let mut milliseconds = 0.0;
    // SAFETY: both are live, as the trait demands, and the out pointer is valid.
    let result = unsafe { ffi::cuEventElapsedTime(&mut milliseconds, start as CuEvent, end as CuEvent) };
    match result {
        CuResult::SUCCESS => Ok(milliseconds),
        CuResult::NOT_READY => Err(result.error_with(
            "cuEventElapsedTime",
            "; an event has not passed yet: synchronise with the later one first".into(),
        )),
        CuResult::INVALID_HANDLE => Err(result.error_with(
            "cuEventElapsedTime",
            "; both events must be created with timing, and recorded outside of a capture".into(),
        )),
        other => Err(other.error("cuEventElapsedTime")),
    }
}
