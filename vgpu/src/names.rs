//! Readable names of kernels.

/// A number of things, as in `1 report` or `3 reports`.
pub(crate) fn counted(number: u64, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// The name of a kernel in its source, as reports show it: without a compiler's mangling, and without
/// the hash of a Rust function. A name that no compiler has mangled is returned as it is.
///
/// ```
/// assert_eq!(epoxide_vgpu::readable_name("_Z5scalePfj"), "scale(float*, unsigned int)");
/// assert_eq!(epoxide_vgpu::readable_name("triton_kernel"), "triton_kernel");
/// ```
#[must_use]
pub fn readable_name(name: &str) -> String {
    if let Ok(rust) = rustc_demangle::try_demangle(name) {
        // Without the hash behind it.
        return format!("{rust:#}");
    }
    let cpp = cpp_demangle::Symbol::new(name).ok().and_then(|symbol| symbol.demangle().ok());
    cpp.unwrap_or_else(|| name.to_owned())
}
