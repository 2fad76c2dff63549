//! What keeps host and device from drifting apart.

/// Asserts a struct's size and the offset of its last field, so that host and device cannot drift apart.
macro_rules! layout_assert {
    ($ty:ty, size = $size:expr, $field:ident at $offset:expr) => {
        const _: () = assert!(core::mem::size_of::<$ty>() == $size);
        const _: () = assert!(core::mem::offset_of!($ty, $field) == $offset);
    };
}
pub(super) use layout_assert;
