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

/// The part of the PTX module `ptx` that the kernels `names` need: everything but the other kernels, whose lines stay as
/// empty ones, so that line numbers in errors are those of `ptx`. A driver compiles what it loads, so a module of five
/// kernels loads in half the time of one of ten.
#[doc(hidden)]
#[cfg(not(target_arch = "nvptx64"))]
pub fn only_kernels(ptx: &str, names: &[&str]) -> String {
    const ENTRY: &str = ".visible .entry ";
    let mut starts: Vec<usize> = ptx.match_indices(ENTRY).map(|(at, _)| at).collect();
    // File names and other trailing directives follow the closing brace of the last kernel.
    let tail = starts.last().and_then(|last| ptx[*last..].find("\n}").map(|end| last + end + 2));
    let (Some(&first), Some(tail)) = (starts.first(), tail) else { return ptx.to_owned() };
    starts.push(tail);
    let mut text = ptx[..first].to_owned();
    for span in starts.windows(2) {
        let kernel = &ptx[span[0]..span[1]];
        let name = kernel[ENTRY.len()..].split(|c: char| !c.is_alphanumeric() && c != '_').next();
        if name.is_some_and(|name| names.contains(&name)) {
            text.push_str(kernel);
        } else {
            text.push_str(&"\n".repeat(kernel.bytes().filter(|byte| *byte == b'\n').count()));
        }
    }
    text.push_str(&ptx[tail..]);
    text
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
        assert_eq!(only_kernels(ptx, &["a"]), "HEAD\n.visible .entry a(\n)\n{\n}\n\n\n\n\n\nTAIL\n");
        assert_eq!(only_kernels(ptx, &["ab"]), "HEAD\n\n\n\n\n.visible .entry ab(\n)\n{\nB\n}\nTAIL\n");
        assert_eq!(only_kernels(ptx, &["ab", "a"]), ptx);
        assert_eq!(only_kernels("no kernel", &["a"]), "no kernel");
    }

    #[test]
    fn every_kernel_of_the_manifest_is_there_once() {
        for info in kernels::MANIFEST {
            assert_eq!(only_kernels(PTX, &[info.name]).matches(".entry").count(), 1, "{}", info.name);
        }
    }
}
