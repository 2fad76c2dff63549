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

/// The same without parameters and result, for texts of many reports.
///
/// ```
/// assert_eq!(epoxide_vgpu::brief_name("_Z5scalePfj"), "scale");
/// ```
#[must_use]
pub fn brief_name(name: &str) -> String {
    let options = cpp_demangle::DemangleOptions::new().no_params().no_return_type();
    let symbol = cpp_demangle::Symbol::new(name).ok();
    let brief = symbol.and_then(|symbol| symbol.demangle_with_options(&options).ok());
    brief.unwrap_or_else(|| readable_name(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn brief_names_have_no_parameters_and_no_result() {
        let template = "_ZN7deep_ep9intranode7combineI13__nv_bfloat16Li2ELi768ELi4096EEEvPT_PfPKS3_";
        let rust = "_RNvCs1234_7kernels3sum";
        for (mangled, brief) in [
            ("_Z5scalePfj", "scale"),
            (template, "deep_ep::intranode::combine<__nv_bfloat16, 2, 768, 4096>"),
            (rust, "kernels::sum"),
            ("triton_kernel", "triton_kernel"),
        ] {
            assert_eq!(brief_name(mangled), brief, "{mangled}");
        }
        assert!(readable_name(template).contains('('));
    }
}
