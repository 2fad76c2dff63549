//! Arrays in global memory.

use core::fmt;
use core::marker::PhantomData;

use bytemuck::{Pod, Zeroable};

use crate::device;
use crate::device_ptr::DevicePtr;
use crate::memory::*;

/// A number that one weak load or store moves.
pub trait Element: Copy + sealed::Sealed + 'static {
    /// Its size.
    const BYTES: u64;
    /// Loads it from address `p`.
    ///
    /// # Safety
    /// `p` is a live global address, aligned to the number.
    unsafe fn load(p: u64) -> Self;
    /// Stores it at address `p`.
    ///
    /// # Safety
    /// `p` is a live, writable global address, aligned to the number.
    unsafe fn store(p: u64, v: Self);
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($ty:ty: $bytes:literal, $load:ident, $store:ident;)*) => { $(
        impl sealed::Sealed for $ty {}
        impl Element for $ty {
            const BYTES: u64 = $bytes;
            #[device]
            unsafe fn load(p: u64) -> Self {
                $load(p)
            }
            #[device]
            unsafe fn store(p: u64, v: Self) {
                $store(p, v)
            }
        }
    )* };
}

elements! {
    u32: 4, ld_u32, st_u32;
    i32: 4, ld_i32, st_i32;
    f32: 4, ld_f32, st_f32;
    u64: 8, ld_u64, st_u64;
    i64: 8, ld_i64, st_i64;
}

/// The address of an array of `T` in global memory, as a kernel takes it. It has no length: a
/// kernel takes that as a parameter, and the virtual GPU reports an access beyond the end.
#[repr(transparent)]
pub struct Global<T> {
    address: DevicePtr,
    of: PhantomData<T>,
}

impl<T> Clone for Global<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Global<T> {}

impl<T> fmt::Debug for Global<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.address.0)
    }
}

// SAFETY: transparent over `DevicePtr`, of which zero is a value.
unsafe impl<T> Zeroable for Global<T> {}
// SAFETY: transparent over `DevicePtr`, which is plain data; the marker has no bytes.
unsafe impl<T: 'static> Pod for Global<T> {}

impl<T> Global<T> {
    /// The array at this address.
    pub const fn new(address: u64) -> Self {
        Global { address: DevicePtr(address), of: PhantomData }
    }

    /// The address of its first element.
    #[device]
    pub const fn address(self) -> u64 {
        self.address.0
    }
}

impl<T> From<DevicePtr> for Global<T> {
    fn from(address: DevicePtr) -> Self {
        Global { address, of: PhantomData }
    }
}

impl<T: Element> Global<T> {
    /// The address of element `i`, for instructions that take one.
    #[device]
    pub fn at(self, i: u32) -> u64 {
        self.address.0 + i as u64 * T::BYTES
    }

    /// Loads element `i`, weak: `ld.global`.
    ///
    /// # Safety
    /// The array is live and has that element.
    #[device]
    pub unsafe fn ld(self, i: u32) -> T {
        T::load(self.at(i))
    }

    /// Stores element `i`, weak: `st.global`.
    ///
    /// # Safety
    /// The array is live and writable, and has that element.
    #[device]
    pub unsafe fn st(self, i: u32, v: T) {
        T::store(self.at(i), v)
    }
}

/// Four elements at once, 16 bytes.
macro_rules! vectors {
    ($($ty:ty: $from:expr, $into:expr;)*) => { $(
        impl Global<$ty> {
            /// Loads elements `i` to `i + 3`, weak: `ld.global.v4.b32`.
            ///
            /// # Safety
            /// The array is live and has those elements; their address is a multiple of 16.
            #[device]
            pub unsafe fn ld_v4(self, i: u32) -> [$ty; 4] {
                ld_v4(self.at(i)).map($from)
            }

            /// Stores elements `i` to `i + 3`, weak: `st.global.v4.b32`.
            ///
            /// # Safety
            /// The array is live and writable, and has those elements; their address is a multiple of
            /// 16.
            #[device]
            pub unsafe fn st_v4(self, i: u32, v: [$ty; 4]) {
                st_v4(self.at(i), v.map($into))
            }
        }
    )* };
}

vectors! {
    u32: |v| v, |v| v;
    i32: |v| v as i32, |v| v as u32;
    f32: f32::from_bits, f32::to_bits;
}
