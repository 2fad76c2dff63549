//! Host data on its way to and from a device, through page-locked memory.
//!
//! A copy between the device and pageable memory waits in the driver until its stream reaches the
//! copy. It shares the driver's own staging with every other such copy of the process. A copy
//! through page-locked memory waits only for its own event.

use epoxide_gpu::layout::DevicePtr;

use super::device::Device;
use super::raw::{CopyEnd, MemoryKind};
use super::staging::{PIECE_BYTES, Piece};
use crate::error::Result;

/// Which way the bytes go.
enum Way<'a> {
    ToDevice(&'a [u8]),
    ToHost(&'a mut [u8]),
}

/// Copies host bytes to the device in stream order, and waits for it.
///
/// # Safety
/// `dst` is device memory of as many bytes, live until this returns.
pub(super) unsafe fn write(device: &Device, stream: u64, dst: DevicePtr, src: &[u8]) -> Result<()> {
    // SAFETY: passed on to the caller.
    unsafe { copy(device, stream, dst, Way::ToDevice(src)) }
}

/// Copies device bytes to the host in stream order, and waits for it.
///
/// # Safety
/// `src` is device memory of as many bytes, live until this returns.
pub(super) unsafe fn read(device: &Device, stream: u64, dst: &mut [u8], src: DevicePtr) -> Result<()> {
    // SAFETY: passed on to the caller.
    unsafe { copy(device, stream, src, Way::ToHost(dst)) }
}

unsafe fn copy(device: &Device, stream: u64, at: DevicePtr, mut way: Way<'_>) -> Result<()> {
    let bytes = match &way {
        Way::ToDevice(src) => src.len(),
        Way::ToHost(dst) => dst.len(),
    };
    if bytes == 0 {
        return Ok(());
    }
    let piece = match device.driver.staging().take() {
        Some(piece) => piece,
        None => Piece(device.driver.alloc(PIECE_BYTES, MemoryKind::MappedHost, "staging of host data")?),
    };
    let outcome = (0..bytes).step_by(PIECE_BYTES as usize).try_for_each(|from| {
        let len = (bytes - from).min(PIECE_BYTES as usize);
        let (host, at) = (CopyEnd::Host(piece.0.host), CopyEnd::Device(DevicePtr(at.0 + from as u64)));
        // SAFETY: the piece is this call's alone, as large as `len`, and the stream is through with
        // it after each turn. The device's side is the caller's promise.
        unsafe {
            match &mut way {
                Way::ToDevice(src) => {
                    piece.0.host.copy_from_nonoverlapping(src[from..].as_ptr(), len);
                    device.driver.copy(stream, at, host, len as u64)?;
                    device.driver.stream_synchronize(stream)
                }
                Way::ToHost(dst) => {
                    device.driver.copy(stream, host, at, len as u64)?;
                    device.driver.stream_synchronize(stream)?;
                    dst[from..from + len].as_mut_ptr().copy_from_nonoverlapping(piece.0.host, len);
                    Ok(())
                }
            }
        }
    });
    if outcome.is_ok() {
        device.driver.staging().give_back(piece);
    }
    // After an error the stream may still use the piece: it stays taken, until the process ends.
    outcome
}
