//! The device side of epoxide: the structs that host and device share ([`layout`]), the kernel DSL
//! ([`simt`]), the kernels ([`kernels`]) and their PTX.
//!
//! Built for a GPU by `cargo xtask build-ptx`. Built for the host, this crate offers the layouts,
//! one typed launcher per kernel, and the committed PTX. So consumers need neither a nightly
//! compiler nor the core library's source.
//!
//! The DSL is a crate of its own, `epoxide-simt`: a kernel of yours needs that one and not this one
//! (docs/OWN-KERNELS.md). docs/KERNELS.md says how the kernels here are written. Items that only
//! the library's own host needs are public, because the host is another crate, but hidden from this
//! documentation.

pub mod kernels;
pub mod layout;
pub use epoxide_simt as simt;

/// The kernels as PTX for sm_90, as `cargo xtask build-ptx` wrote and linted them.
#[cfg(not(target_arch = "nvptx64"))]
pub const PTX: &str = include_str!("../ptx/epoxide.sm_90.ptx");

/// [`PTX`], cut into its kernels once a process.
#[doc(hidden)]
#[cfg(not(target_arch = "nvptx64"))]
pub fn shipped() -> &'static simt::ptx::CutPtx<'static> {
    static SHIPPED: std::sync::LazyLock<simt::ptx::CutPtx<'static>> =
        std::sync::LazyLock::new(|| simt::ptx::CutPtx::new(PTX));
    &SHIPPED
}

#[cfg(test)]
mod tests {
    use super::*;
    use simt::ptx::{DESCRIPTION, check_fresh};

    /// The lines that describe kernels.
    fn descriptions() -> Vec<&'static str> {
        PTX.lines().filter(|line| line.starts_with(DESCRIPTION)).collect()
    }

    #[test]
    fn every_kernel_describes_itself_once() {
        let described: Vec<_> =
            descriptions().iter().map(|line| line[DESCRIPTION.len()..].split_once(':').unwrap().0).collect();
        assert!(described.len() >= 20);
        assert_eq!(described, shipped().names().collect::<Vec<_>>());
        for name in described {
            assert_eq!(shipped().only(&[name]).matches(".entry").count(), 1, "{name}");
        }
    }

    #[test]
    fn kernels_that_wait_say_so() {
        let waiting: Vec<_> = shipped().waiting().collect();
        let dependent = descriptions().into_iter().filter(|line| line.contains(" dependent=1 "));
        assert!(
            dependent.clone().all(|line| waiting.iter().any(|name| line.contains(&format!(" {name}: "))))
        );
        assert_eq!(dependent.count(), waiting.len());
    }

    #[test]
    fn the_ptx_is_of_these_sources() {
        check_fresh::<kernels::MoeTopk>(PTX).unwrap();
        check_fresh::<kernels::Dispatch>(PTX).unwrap();
    }
}
