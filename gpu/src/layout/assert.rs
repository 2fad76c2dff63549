//! What keeps host and device from drifting apart.

pub(super) use epoxide_simt::layout_assert;
