//! Copies between host data and the device, through page-locked memory.

use std::sync::Mutex;

use epoxide_gpu::layout::DevicePtr;

use super::device::Device;
use super::raw::{CopyEnd, MemoryKind, RawMemory};
use crate::error::Result;
use crate::lock::lock;

/// Bytes of a piece.
const PIECE_BYTES: u64 = 4 << 20;

/// Pieces of page-locked memory that are free. They are kept as long as the device, because a free
/// waits for running kernels. Their number is the largest number of threads that ever copied at the
/// same time.
#[derive(Debug, Default)]
pub struct Staging {
    free: Mutex<Vec<Piece>>,
}

#[derive(Debug)]
struct Piece(RawMemory);

// SAFETY: an address range without thread affinity; a piece is in the hands of one thread at a
// time.
unsafe impl Send for Piece {}

impl Staging {
    /// The free pieces, for the drop of a device, which frees them one by one.
    #[cfg(feature = "cuda")]
    pub(super) fn drain(&mut self) -> Vec<RawMemory> {
        lock(&self.free).drain(..).map(|piece| piece.0).collect()
    }
}

/// The host's side of a copy: its source, or its target.
pub(super) enum HostSide<'a> {
    Source(&'a [u8]),
    Target(&'a mut [u8]),
}

/// Copies between host bytes and the device in stream order, and waits for the copy.
///
/// # Safety
/// `at` is device memory of as many bytes, live until this returns.
pub(super) unsafe fn copy(
    device: &Device,
    stream: u64,
    at: DevicePtr,
    mut host_side: HostSide<'_>,
) -> Result<()> {
    let bytes = match &host_side {
        HostSide::Source(src) => src.len(),
        HostSide::Target(dst) => dst.len(),
    };
    if bytes == 0 {
        return Ok(());
    }
    // Only this call uses a free piece until it is returned.
    let free = lock(&device.driver.staging().free).pop();
    let piece = match free {
        Some(piece) => piece,
        None => Piece(device.driver.alloc(PIECE_BYTES, MemoryKind::MappedHost, "staging of host data")?),
    };
    let outcome = (0..bytes).step_by(PIECE_BYTES as usize).try_for_each(|from| {
        let len = (bytes - from).min(PIECE_BYTES as usize);
        let (host, at) = (CopyEnd::Host(piece.0.host), CopyEnd::Device(DevicePtr(at.0 + from as u64)));
        // SAFETY: the piece is this call's alone, as large as `len`, and the stream is through with
        // it after each turn. The device's side is the caller's promise.
        unsafe {
            match &mut host_side {
                HostSide::Source(src) => {
                    piece.0.host.copy_from_nonoverlapping(src[from..].as_ptr(), len);
                    device.driver.copy(stream, at, host, len as u64)?;
                    device.driver.stream_synchronize(stream)
                }
                HostSide::Target(dst) => {
                    device.driver.copy(stream, host, at, len as u64)?;
                    device.driver.stream_synchronize(stream)?;
                    dst[from..from + len].as_mut_ptr().copy_from_nonoverlapping(piece.0.host, len);
                    Ok(())
                }
            }
        }
    });
    if outcome.is_ok() {
        lock(&device.driver.staging().free).push(piece);
    }
    // After an error the stream may still use the piece: it stays taken, until the process ends.
    outcome
}
