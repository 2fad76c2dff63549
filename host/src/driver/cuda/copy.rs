//! Copies and fills.

use super::device::Bound;
use super::{ffi, stream};
use crate::driver::{CopyEnd, DevicePtr};
use crate::error::Result;

/// [`Driver::copy`](crate::driver::device::Driver::copy).
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
            // SAFETY: passed on to the caller; with unified addressing a host pointer is a valid
            // CUdeviceptr.
            unsafe { ffi::cuMemcpyAsync(dst as u64, src as u64, bytes, stream) }.check("cuMemcpyAsync")
        }
    }
}

/// [`Driver::fill`](crate::driver::device::Driver::fill).
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
