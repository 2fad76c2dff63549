//! The device side of epoxide: the structs that host and device share ([`layout`]), the kernel DSL ([`simt`]), the
//! kernels ([`kernels`]) and their PTX.
//!
//! Built for a GPU by `cargo xtask build-ptx`. Built for the host, this crate offers the layouts, one typed launcher per
//! kernel, and the committed PTX, so that consumers need neither a nightly compiler nor the core library's source.
//!
//! Whoever writes a kernel needs [`simt`], [`layout::DevicePtr`] and, to launch it, what [`kernels`] documents: docs/KERNELS.md is the
//! way in. What only the library's own host needs is public, as that is another crate, but hidden from this documentation.
#![cfg_attr(target_arch = "nvptx64", no_std, feature(abi_ptx, asm_experimental_arch))]
#![cfg_attr(
    epoxide_backend = "nvvm",
    allow(unused_features, internal_features),
    feature(link_llvm_intrinsics)
)]

pub mod kernels;
pub mod layout;
pub mod simt;

/// The kernels as PTX for sm_90, as `cargo xtask build-ptx` wrote and linted them.
#[cfg(not(target_arch = "nvptx64"))]
pub const PTX: &str = include_str!("../ptx/epoxide.sm_90.ptx");

/// A PTX module, cut into its kernels.
#[doc(hidden)]
#[cfg(not(target_arch = "nvptx64"))]
#[derive(Debug)]
pub struct CutPtx<'a> {
    head: &'a str,
    kernels: Vec<KernelText<'a>>,
    tail: &'a str,
}

#[cfg(not(target_arch = "nvptx64"))]
#[derive(Debug)]
struct KernelText<'a> {
    name: &'a str,
    text: &'a str,
    lines: usize,
}

#[cfg(not(target_arch = "nvptx64"))]
impl CutPtx<'static> {
    /// [`PTX`], cut once a process.
    pub fn shipped() -> &'static CutPtx<'static> {
        static SHIPPED: std::sync::LazyLock<CutPtx<'static>> = std::sync::LazyLock::new(|| CutPtx::new(PTX));
        &SHIPPED
    }
}

#[cfg(not(target_arch = "nvptx64"))]
impl<'a> CutPtx<'a> {
    pub fn new(ptx: &'a str) -> CutPtx<'a> {
        const ENTRY: &str = ".visible .entry ";
        let mut starts: Vec<usize> = ptx.match_indices(ENTRY).map(|(at, _)| at).collect();
        // File names and other trailing directives follow the closing brace of the last kernel.
        let tail = starts.last().and_then(|last| ptx[*last..].find("\n}").map(|end| last + end + 2));
        let (Some(&first), Some(tail)) = (starts.first(), tail) else {
            return CutPtx { head: ptx, kernels: Vec::new(), tail: "" };
        };
        starts.push(tail);
        let kernel = |span: &[usize]| {
            let text = &ptx[span[0]..span[1]];
            let name = text[ENTRY.len()..].split(|c: char| !c.is_alphanumeric() && c != '_').next();
            let lines = text.bytes().filter(|byte| *byte == b'\n').count();
            KernelText { name: name.unwrap_or_default(), text, lines }
        };
        CutPtx { head: &ptx[..first], kernels: starts.windows(2).map(kernel).collect(), tail: &ptx[tail..] }
    }

    /// The kernels that wait for the one in front of them in the stream.
    pub fn waiting(&self) -> impl Iterator<Item = &'a str> {
        let waits = |kernel: &&KernelText<'_>| kernel.text.contains("griddepcontrol.wait");
        self.kernels.iter().filter(waits).map(|kernel| kernel.name)
    }

    /// The part that the kernels `names` need: everything but the other kernels, whose lines stay as empty ones, so
    /// that line numbers in errors are those of the whole. A driver compiles what it loads, so a module of five
    /// kernels loads in half the time of one of ten.
    pub fn only(&self, names: &[&str]) -> String {
        let mut text = self.head.to_owned();
        for kernel in &self.kernels {
            if names.contains(&kernel.name) {
                text.push_str(kernel.text);
            } else {
                text.push_str(&"\n".repeat(kernel.lines));
            }
        }
        text.push_str(self.tail);
        text
    }
}

/// Kernels hold no panicking code (a lint counts traps); this exists because `no_std` wants it.
#[cfg(target_arch = "nvptx64")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_keeps_header_tail_and_line_numbers() {
        let ptx = "HEAD\n.visible .entry a(\n)\n{\n}\n.visible .entry ab(\n)\n{\nB\n}\nTAIL\n";
        let cut = CutPtx::new(ptx);
        assert_eq!(cut.only(&["a"]), "HEAD\n.visible .entry a(\n)\n{\n}\n\n\n\n\n\nTAIL\n");
        assert_eq!(cut.only(&["ab"]), "HEAD\n\n\n\n\n.visible .entry ab(\n)\n{\nB\n}\nTAIL\n");
        assert_eq!(cut.only(&["ab", "a"]), ptx);
        assert_eq!(CutPtx::new("no kernel").only(&["a"]), "no kernel");
    }

    #[test]
    fn kernels_that_wait_are_named() {
        let ptx = ".visible .entry a(\n)\n{\ngriddepcontrol.wait;\n}\n.visible .entry b(\n)\n{\n}\n";
        assert_eq!(CutPtx::new(ptx).waiting().collect::<Vec<_>>(), ["a"]);
        let waiting: Vec<_> = CutPtx::shipped().waiting().collect();
        let dependent = kernels::MANIFEST.iter().filter(|info| info.dependent);
        assert!(dependent.clone().all(|info| waiting.contains(&info.name)));
        assert_eq!(dependent.count(), waiting.len());
    }

    #[test]
    fn every_kernel_of_the_manifest_is_there_once() {
        for info in kernels::MANIFEST {
            assert_eq!(CutPtx::shipped().only(&[info.name]).matches(".entry").count(), 1, "{}", info.name);
        }
    }
}
