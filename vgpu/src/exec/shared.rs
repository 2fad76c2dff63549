//! Shared memory.

use crate::fault::FaultKind;

/// First valid offset of the shared window. As on sm_90, the first KiB belongs to the system; so
/// offset 0, the usual sign of a missing initialisation, is a fault.
pub(crate) const SHARED_BASE: u32 = 1024;

/// Shared memory of one block.
#[derive(Debug, Default)]
pub(crate) struct SharedMemory {
    words: Vec<u128>,
    bytes: u64,
}

impl SharedMemory {
    /// Memory of `bytes` bytes that holds `poison` everywhere.
    pub(crate) fn reset(&mut self, bytes: u32, poison: u64) {
        let word = u128::from(poison) << 64 | u128::from(poison);
        self.words.clear();
        // 128-byte alignment is by offset only: nothing looks at the host address.
        self.words.resize(bytes.div_ceil(16) as usize, word);
        self.bytes = u64::from(bytes);
    }

    /// Pointer to `offset` of the window, if `bytes` bytes from there on exist.
    pub(crate) fn pointer(&mut self, offset: u64, bytes: u64) -> Result<*mut u8, FaultKind> {
        let at = offset.wrapping_sub(u64::from(SHARED_BASE));
        if at > self.bytes || bytes > self.bytes - at {
            return Err(window("shared", offset, bytes, u64::from(SHARED_BASE), self.bytes));
        }
        // SAFETY: `at` is inside of (or one past) the allocation, which has at least `self.bytes`
        // bytes.
        Ok(unsafe { self.words.as_mut_ptr().cast::<u8>().add(at as usize) })
    }
}

pub(super) fn window(space: &'static str, offset: u64, bytes: u64, start: u64, len: u64) -> FaultKind {
    FaultKind::OutOfWindow { space, offset, bytes, start, end: start + len }
}
