//! The device side of epoxide: the structs that host and device share ([`layout`]), the kernel DSL ([`simt`]), the
//! kernels ([`kernels`]) and their PTX.
//!
//! Built for a GPU by `cargo xtask build-ptx`. Built for the host, this crate offers the layouts, one typed launcher per
//! kernel, and the committed PTX, so that consumers need neither a nightly compiler nor the core library's source.
#![cfg_attr(target_arch = "nvptx64", no_std, feature(abi_ptx, asm_experimental_arch))]
#![cfg_attr(epoxide_backend = "nvvm", allow(unused_features))]

pub mod kernels;
pub mod layout;
pub mod simt;

/// The kernels as PTX for sm_90, as `cargo xtask build-ptx` wrote and linted them.
#[cfg(not(target_arch = "nvptx64"))]
pub const PTX: &str = include_str!("../ptx/epoxide.sm_90.ptx");

/// The part of the PTX module `ptx` that the kernel `name` needs: everything but the other kernels, whose lines stay as
/// empty ones, so that line numbers in errors are those of `ptx`. The whole module where there is no such kernel, so that
/// the loader's error tells.
#[cfg(not(target_arch = "nvptx64"))]
pub fn single_kernel(ptx: &str, name: &str) -> String {
    const ENTRY: &str = ".visible .entry ";
    let mut starts: Vec<usize> = ptx.match_indices(ENTRY).map(|(at, _)| at).collect();
    // File names and other trailing directives follow the closing brace of the last kernel.
    let tail = starts.last().and_then(|last| ptx[*last..].find("\n}").map(|end| last + end + 2));
    starts.extend(tail);
    let wanted = starts.windows(2).find(|span| {
        let signature = &ptx[span[0] + ENTRY.len()..span[1]];
        signature
            .strip_prefix(name)
            .is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric() || c == '_'))
    });
    match (wanted, starts.first(), tail) {
        (Some(span), Some(first), Some(tail)) => {
            let blank = |text: &str| "\n".repeat(text.matches('\n').count());
            let (before, after) = (blank(&ptx[*first..span[0]]), blank(&ptx[span[1]..tail]));
            [&ptx[..*first], &before, &ptx[span[0]..span[1]], &after, &ptx[tail..]].concat()
        }
        _ => ptx.to_owned(),
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
    fn a_single_kernel_keeps_header_and_tail() {
        let ptx = "HEAD\n.visible .entry a(\n)\n{\n}\n.visible .entry ab(\n)\n{\nB\n}\nTAIL\n";
        assert_eq!(single_kernel(ptx, "a"), "HEAD\n.visible .entry a(\n)\n{\n}\n\n\n\n\n\nTAIL\n");
        assert_eq!(single_kernel(ptx, "ab"), "HEAD\n\n\n\n\n.visible .entry ab(\n)\n{\nB\n}\nTAIL\n");
        assert_eq!(single_kernel(ptx, "b"), ptx);
    }

    #[test]
    fn every_kernel_of_the_manifest_is_there_once() {
        for info in kernels::MANIFEST {
            assert_eq!(single_kernel(PTX, info.name).matches(".entry").count(), 1, "{}", info.name);
        }
    }
}
