//! Addresses.

use bytemuck::{Pod, Zeroable};

use crate::device;
use crate::global::{Global, Index};

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

    /// The array of `T` at the address, for kernels whose argument has no type.
    #[device]
    pub const fn array<T>(self) -> Global<T> {
        Global::new(self.0)
    }

    /// The address of row `i` of rows that begin `bytes` apart.
    ///
    /// ```
    /// use epoxide_simt::DevicePtr;
    /// assert_eq!(DevicePtr(0x1000).row(3u32, 0x40u64), 0x10c0);
    /// ```
    #[device]
    pub fn row(self, i: impl Index, bytes: impl Index) -> u64 {
        self.0 + i.wide() * bytes.wide()
    }
}
