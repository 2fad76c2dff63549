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

/// The number of an element or row: `u32`, or `u64` where 32 bits are too few. `i32`, which is the
/// type of a literal, keeps its sign. A product of two `u32` wraps at 2^32 before it is an index:
/// [`row_major`] multiplies in 64 bits.
pub trait Index: Copy + sealed::Sealed {
    /// The number in 64 bits.
    fn wide(self) -> u64;
}

macro_rules! indices {
    ($($ty:ty),*) => { $(
        impl Index for $ty {
            #[device]
            fn wide(self) -> u64 {
                self as u64
            }
        }
    )* };
}

indices!(u32, u64, i32);

/// The index of element `[row, column]` of an array `[.., columns]`, in 64 bits.
///
/// ```
/// use epoxide_simt::*;
///
/// /// The weight of a token's entry `k`, of `weights` `[tokens, num_topk]`.
/// ///
/// /// # Safety
/// /// The array has that element.
/// #[device]
/// unsafe fn weight_of(weights: Global<f32>, token: u32, num_topk: u32, k: u32) -> f32 {
///     weights.ld(row_major(token, num_topk, k))
/// }
/// assert_eq!(Global::<f32>::new(0x1000).at(row_major(3u32, 8u32, 2)), 0x1000 + 26 * 4);
/// ```
#[device]
pub fn row_major(row: impl Index, columns: impl Index, column: impl Index) -> u64 {
    row.wide() * columns.wide() + column.wide()
}

/// The address of a field of the `#[repr(C)]` struct at an address, for instructions that take one:
/// `st_release_sys_u64(field!(header, Header.tag), tag)`.
///
/// ```
/// #[repr(C)]
/// struct Header {
///     status: u32,
///     rows: u32,
/// }
/// assert_eq!(epoxide_simt::field!(0x100, Header.rows), 0x104);
/// ```
#[macro_export]
macro_rules! field {
    ($address:expr, $ty:ident.$field:ident) => {
        $address + ::core::mem::offset_of!($ty, $field) as u64
    };
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

/// The address of an array of `T` in global memory, as a kernel takes it. The length is a separate
/// parameter of the kernel, and the virtual GPU reports an access beyond the end.
///
/// Weak loads and stores take an index. Other instructions take an address: [`Global::at`].
///
/// ```text
/// rows.ld(token)                                    st_release_sys_u64(words.at(rank), epoch)
/// ```
///
/// An array of structs or bytes has addresses alone. A kernel reaches fields by
/// [`field!`](crate::field).
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

    /// True where there is no array: the address is 0.
    #[device]
    pub const fn is_null(self) -> bool {
        self.address.is_null()
    }
}

impl<T> From<DevicePtr> for Global<T> {
    fn from(address: DevicePtr) -> Self {
        Global { address, of: PhantomData }
    }
}

impl<T> Global<T> {
    /// The address of element `i`, for instructions that take one.
    #[device]
    pub fn at(self, i: impl Index) -> u64 {
        self.address.0 + i.wide() * size_of::<T>() as u64
    }

    /// The array behind its first `i` elements.
    #[device]
    pub fn skip(self, i: impl Index) -> Self {
        Global::new(self.at(i))
    }
}

impl<T: Element> Global<T> {
    /// Loads element `i`, weak: `ld.global`.
    ///
    /// # Safety
    /// The array is live and has that element.
    #[device]
    pub unsafe fn ld(self, i: impl Index) -> T {
        T::load(self.at(i))
    }

    /// Stores element `i`, weak: `st.global`.
    ///
    /// # Safety
    /// The array is live and writable, and has that element.
    #[device]
    pub unsafe fn st(self, i: impl Index, v: T) {
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
            pub unsafe fn ld_v4(self, i: impl Index) -> [$ty; 4] {
                $from(ld_v4(self.at(i)))
            }

            /// Stores elements `i` to `i + 3`, weak: `st.global.v4.b32`.
            ///
            /// # Safety
            /// The array is live and writable, and has those elements; their address is a multiple of
            /// 16.
            #[device]
            pub unsafe fn st_v4(self, i: impl Index, v: [$ty; 4]) {
                st_v4(self.at(i), $into(v))
            }
        }
    )* };
}

vectors! {
    u32: |v| v, |v| v;
    i32: |v: [u32; 4]| v.map(|v| v as i32), |v: [i32; 4]| v.map(|v| v as u32);
    f32: |v: [u32; 4]| v.map(f32::from_bits), |v: [f32; 4]| v.map(f32::to_bits);
}
