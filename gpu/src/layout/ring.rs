//! Rings of buffers in a block's shared memory, one ring for each warp that copies: all warps'
//! buffers come first, then all barriers, one for each buffer. Other shared memory of a kernel
//! follows its rings.

use crate::simt::mbarrier::Mbarrier;

/// Bytes of the rings of `warps` warps, each of `count` buffers of `bytes`.
#[inline(always)]
pub const fn ring_bytes(warps: u32, count: u32, bytes: u32) -> u32 {
    warps * count * (bytes + Mbarrier::BYTES)
}

/// Bytes of shared memory of a launch with such rings and `behind` bytes after them. It saturates:
/// no launch is given that much.
pub const fn shared_with_rings(warps: u32, count: u32, bytes: u32, behind: u32) -> u32 {
    let rings = warps.saturating_mul(count).saturating_mul(bytes.saturating_add(Mbarrier::BYTES));
    rings.saturating_add(behind)
}
