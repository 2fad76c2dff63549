//! Shared memory with a layout: constant offsets and a constant size, known on both sides.

use core::marker::PhantomData;

use crate::device;
use crate::memory::*;

/// A number of four bytes that one instruction moves to or from shared memory.
pub trait SharedElement: Copy + sealed::Sealed {
    /// Loads it from offset `s`.
    ///
    /// # Safety
    /// `s` is an offset inside the block's shared memory, 4-byte aligned.
    unsafe fn load(s: u32) -> Self;
    /// Stores it at offset `s`.
    ///
    /// # Safety
    /// `s` is an offset inside the block's shared memory, 4-byte aligned.
    unsafe fn store(s: u32, v: Self);
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($ty:ty: $from:expr, $into:expr;)*) => { $(
        impl sealed::Sealed for $ty {}
        impl SharedElement for $ty {
            #[device]
            unsafe fn load(s: u32) -> Self {
                $from(ld_shared_u32(s))
            }
            #[device]
            unsafe fn store(s: u32, v: Self) {
                st_shared_u32(s, $into(v))
            }
        }
    )* };
}

elements! {
    u32: |v| v, |v| v;
    i32: |v| v as i32, |v| v as u32;
    f32: f32::from_bits, f32::to_bits;
}

/// An array of `N` numbers in the block's shared memory.
pub struct SharedArray<T, const N: usize> {
    offset: u32,
    of: PhantomData<T>,
}

impl<T, const N: usize> Clone for SharedArray<T, N> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, const N: usize> Copy for SharedArray<T, N> {}

impl<T: SharedElement, const N: usize> SharedArray<T, N> {
    /// The array at this offset of the shared window.
    #[inline(always)]
    pub const fn new(offset: u32) -> Self {
        SharedArray { offset, of: PhantomData }
    }

    /// The offset of element `i` in the shared window, for instructions that take one.
    #[inline(always)]
    pub fn at(self, i: u32) -> u32 {
        self.offset + i * 4
    }

    /// Loads element `i`: `ld.shared`.
    ///
    /// # Safety
    /// The launch gives the block this memory, `i` is below `N`, and no other thread writes the
    /// element meanwhile.
    #[device]
    pub unsafe fn ld(self, i: u32) -> T {
        T::load(self.at(i))
    }

    /// Stores element `i`: `st.shared`.
    ///
    /// # Safety
    /// See [`ld`](Self::ld); no other thread accesses the element meanwhile.
    #[device]
    pub unsafe fn st(self, i: u32, v: T) {
        T::store(self.at(i), v)
    }
}

/// Declares a block's shared memory as a struct of arrays of four-byte numbers.
///
/// The struct has the offsets of its fields in the shared window. It has a method for each field,
/// and the constant `BYTES` for host and device. `pub struct` is in dynamic shared memory, which
/// the launch allocates: the kernel's attribute has `shared = Tiles::BYTES`, and the kernel calls
/// `Tiles::dynamic()`. `pub static struct` has memory of its own, which the PTX declares, and the
/// kernel calls `Tiles::get()`.
///
/// ```
/// epoxide_simt::shared! {
///     /// A tile of each operand.
///     pub struct Tiles {
///         /// Rows of the left one.
///         a: [f32; 256],
///         /// Rows of the right one.
///         b: [f32; 256],
///     }
/// }
/// assert_eq!(Tiles::BYTES, 2048);
/// assert_eq!(Tiles::at(100).b().at(1), 100 + 1024 + 4);
/// ```
#[macro_export]
macro_rules! shared {
    ($(#[$meta:meta])* $vis:vis struct $name:ident { $($fields:tt)* }) => {
        $crate::shared!(@ $(#[$meta])* $vis $name { $($fields)* });
        impl $name {
            /// The struct at the start of the block's dynamic shared memory.
            #[inline(always)]
            #[allow(dead_code)]
            $vis fn dynamic() -> Self {
                Self::at($crate::dynamic_shared())
            }
        }
    };
    ($(#[$meta:meta])* $vis:vis static struct $name:ident { $($fields:tt)* }) => {
        $crate::shared!(@ $(#[$meta])* $vis $name { $($fields)* });
        // Module and place in the source distinguish structs of one name.
        #[cfg(target_arch = "nvptx64")]
        ::core::arch::global_asm!(
            concat!(
                ".shared .align 16 .b8 SHARED_", stringify!($name), "_{module}_", line!(), "_", column!(),
                "[{bytes}];"
            ),
            module = const $crate::__private::hash_of_name(module_path!()),
            bytes = const $name::BYTES
        );
        impl $name {
            /// The struct in the memory that the PTX declares for it.
            #[inline(always)]
            #[allow(dead_code)]
            $vis fn get() -> Self {
                #[cfg(target_arch = "nvptx64")]
                {
                    let r: u32;
                    // SAFETY: takes the address of the symbol declared above.
                    unsafe {
                        ::core::arch::asm!(
                            concat!(
                                "mov.u32 {r}, SHARED_", stringify!($name), "_{module}_", line!(), "_", column!(), ";"
                            ),
                            module = const $crate::__private::hash_of_name(module_path!()),
                            r = out(reg32) r, options(pure, nomem, nostack)
                        )
                    };
                    Self::at(r)
                }
                #[cfg(not(target_arch = "nvptx64"))]
                panic!("shared memory exists on the device only")
            }
        }
    };
    (@ $(#[$meta:meta])* $vis:vis $name:ident {
        $( $(#[$field_meta:meta])* $field:ident : [$of:ty ; $len:expr] ),* $(,)?
    }) => {
        $(#[$meta])*
        #[derive(Clone, Copy)]
        #[allow(dead_code)]
        $vis struct $name {
            $( $field: $crate::SharedArray<$of, { $len }> ),*
        }
        const _: () = {
            #[allow(dead_code)]
            #[repr(C, align(16))]
            struct Layout { $( $field: [$of; $len] ),* }
            impl $name {
                /// Bytes of shared memory that it takes, a multiple of 16.
                $vis const BYTES: u32 = ::core::mem::size_of::<Layout>() as u32;

                /// The struct at this offset of the shared window, a multiple of 16.
                #[inline(always)]
                $vis const fn at(offset: u32) -> Self {
                    $name {
                        $(
                            $field: $crate::SharedArray::new(
                                offset + ::core::mem::offset_of!(Layout, $field) as u32
                            )
                        ),*
                    }
                }

                $(
                    $(#[$field_meta])*
                    #[inline(always)]
                    #[allow(dead_code)]
                    $vis fn $field(self) -> $crate::SharedArray<$of, { $len }> {
                        self.$field
                    }
                )*
            }
        };
    };
}

impl<const N: usize> SharedArray<f32, N> {
    /// Loads elements `i` to `i + 3`: `ld.shared.v4.b32`.
    ///
    /// # Safety
    /// The launch gives the block this memory, `i + 3` is below `N`, their offset is a multiple of
    /// 16, and no other thread writes the elements meanwhile.
    #[device]
    pub unsafe fn ld_v4(self, i: u32) -> [f32; 4] {
        ld_shared_v4(self.at(i)).map(f32::from_bits)
    }

    /// Stores elements `i` to `i + 3`: `st.shared.v4.b32`.
    ///
    /// # Safety
    /// See [`ld_v4`](Self::ld_v4); no other thread accesses the elements meanwhile.
    #[device]
    pub unsafe fn st_v4(self, i: u32, v: [f32; 4]) {
        st_shared_v4(self.at(i), v.map(f32::to_bits))
    }
}
