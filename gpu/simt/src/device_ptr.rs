//! Addresses.

use bytemuck::{Pod, Zeroable};

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
