//! Readable names of kernels.

/// A number of things, as in `1 report` or `3 reports`.
pub(crate) fn counted(number: u64, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// The name of a kernel in its source, as reports show it: without a compiler's mangling, and without
/// the hash of a Rust function. A name that no compiler has mangled is returned as it is, and so are
/// all names without the crate's feature `demangle`.
///
/// ```
/// # if cfg!(feature = "demangle") {
/// assert_eq!(epoxide_vgpu::readable_name("_Z5scalePfj"), "scale(float*, unsigned int)");
/// # }
/// assert_eq!(epoxide_vgpu::readable_name("triton_kernel"), "triton_kernel");
/// ```
#[must_use]
pub fn readable_name(name: &str) -> String {
    #[cfg(feature = "demangle")]
    {
        if let Ok(rust) = rustc_demangle::try_demangle(name) {
            // Without the hash behind it.
            return format!("{rust:#}");
        }
        if let Some(cpp) = cpp_demangle::Symbol::new(name).ok().and_then(|symbol| symbol.demangle().ok()) {
            return cpp;
        }
    }
    name.to_owned()
}
