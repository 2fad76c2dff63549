//! Selects which of two forms of a kernel's entry is compiled. The choice is made here because it
//! depends on this crate's configuration, not on that of the crate with the kernel. All tokens come
//! from the attribute, so that line tables name the kernel's file.

/// Keeps the entry for rustc's own back end.
#[cfg(all(target_arch = "nvptx64", not(epoxide_backend = "nvvm")))]
#[doc(hidden)]
#[macro_export]
macro_rules! __entry {
    ({ $($in_tree:tt)* } { $($nvvm:tt)* }) => { $($in_tree)* };
}

/// Keeps the entry for rustc_codegen_nvvm.
#[cfg(all(target_arch = "nvptx64", epoxide_backend = "nvvm"))]
#[doc(hidden)]
#[macro_export]
macro_rules! __entry {
    ({ $($in_tree:tt)* } { $($nvvm:tt)* }) => { $($nvvm)* };
}

/// On the host there is no entry.
#[cfg(not(target_arch = "nvptx64"))]
#[doc(hidden)]
#[macro_export]
macro_rules! __entry {
    ($($any:tt)*) => {};
}
