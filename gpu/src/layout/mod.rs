//! Structs that host and device share: `#[repr(C)]`, plain data, no padding, addresses as [`DevicePtr`]. The size and
//! offset asserts compile on both sides.
//!
//! What the library's own kernels and its host share is public for the host crate, and not documented here: it is no interface.

use bytemuck::{Pod, Zeroable};

mod args;
mod call;
mod example;
mod handle;
mod pool;
mod ring;
#[cfg(not(target_arch = "nvptx64"))]
mod sections;
mod wire;

pub use example::*;

// What the library's own kernels and its host share. Whoever writes another kernel needs none of it.
#[doc(hidden)]
pub use args::*;
#[doc(hidden)]
pub use call::*;
#[doc(hidden)]
pub use handle::*;
#[doc(hidden)]
pub use pool::*;
#[doc(hidden)]
pub use ring::*;
#[cfg(not(target_arch = "nvptx64"))]
#[doc(hidden)]
pub use sections::*;
#[doc(hidden)]
pub use wire::*;

/// Most ranks of one NVLink domain.
pub const MAX_RANKS: usize = 8;
/// Most entries per token in `topk_idx`: one lane each.
pub const MAX_TOPK: u32 = 32;
/// Most experts on one rank.
pub const MAX_LOCAL_EXPERTS: u32 = 1024;
/// Most channels of a `Config`.
pub const MAX_CHANNELS: u32 = 256;
/// Rows in a pool start at multiples of this many bytes.
pub const ROW_ALIGN: u64 = 128;

/// A device address in bytes; 0 is "none".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Pod, Zeroable)]
#[repr(transparent)]
pub struct DevicePtr(pub u64);

impl DevicePtr {
    /// No address.
    pub const NULL: DevicePtr = DevicePtr(0);

    /// True for [`DevicePtr::NULL`].
    #[inline(always)]
    pub const fn is_null(self) -> bool {
        self.0 == 0
    }

    /// The address `bytes` further on.
    #[inline(always)]
    pub const fn add(self, bytes: u64) -> DevicePtr {
        DevicePtr(self.0 + bytes)
    }
}

/// Bytes from one row to the next in a pool, for rows of `row_bytes`.
#[inline(always)]
pub const fn row_stride(row_bytes: u64) -> u64 {
    (row_bytes + ROW_ALIGN - 1) & !(ROW_ALIGN - 1)
}

/// Bytes of a token's scales that dispatch moves by bulk copy, behind the row in its stage; 0 where they are not a multiple of
/// 16 bytes or too many, and go by ordinary stores.
#[doc(hidden)]
#[inline(always)]
pub const fn bulk_scale_bytes(num_scales: u32) -> u32 {
    if num_scales.is_multiple_of(4) && num_scales <= 1024 { num_scales * 4 } else { 0 }
}

/// Asserts a struct's size and the offset of its last field, so that host and device cannot drift apart.
macro_rules! layout_assert {
    ($ty:ty, size = $size:expr, $field:ident at $offset:expr) => {
        const _: () = assert!(core::mem::size_of::<$ty>() == $size);
        const _: () = assert!(core::mem::offset_of!($ty, $field) == $offset);
    };
}
use layout_assert;
