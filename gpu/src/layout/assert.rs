//! Assertions that the structs of host and device have the same layout.

pub(super) use epoxide_simt::layout_assert;
