//! Which of two forms of a kernel's entry is compiled. The choice stands here, because it is a
//! matter of this crate's configuration and not of the crate that has the kernel. The tokens are
//! all the attribute's own, so that line tables name the kernel's file.

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
