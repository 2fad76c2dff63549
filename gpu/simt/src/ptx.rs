//! PTX text as hosts handle it: a module split into its kernels, and the description of each.

use alloc::borrow::ToOwned;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt;

use crate::launch::{Entry, KernelInfo};

/// The beginning of a line that describes a kernel.
pub const DESCRIPTION: &str = "// kernel ";

impl fmt::Display for KernelInfo {
    /// The line that describes the kernel in the PTX.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{DESCRIPTION}{}: threads={} min_blocks={} barriers={} registers={} traps={} dependent={} \
             source={} params=",
            self.name,
            self.max_threads,
            self.min_blocks_per_sm,
            self.barriers,
            self.max_registers,
            self.traps_allowed,
            self.dependent as u32,
            self.source,
        )?;
        for (at, param) in self.params.iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            write!(f, "{comma}{}:{}:{}", param.name, param.size, param.align)?;
        }
        match self.local_depot_allowed {
            Some(why) => write!(f, " local={why}"),
            None => Ok(()),
        }
    }
}

/// PTX that was compiled from another source than the program that launches it.
#[derive(Clone, PartialEq, Eq)]
pub struct StalePtx {
    /// The kernel.
    pub kernel: &'static str,
    /// How its source describes it.
    pub source: String,
    /// How the PTX describes it, if it has the kernel.
    pub ptx: Option<String>,
}

impl fmt::Display for StalePtx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the PTX is not what the source of kernel {} compiles to: run `cargo build-ptx`",
            self.kernel
        )?;
        match &self.ptx {
            Some(ptx) => write!(f, "\n  source: {}\n  PTX:    {ptx}", self.source),
            None => write!(f, "; the PTX has no such kernel"),
        }
    }
}

impl fmt::Debug for StalePtx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl core::error::Error for StalePtx {}

/// Checks that a PTX module has kernel `K`, compiled from the source that this program was built
/// with: attribute, parameters and body, and fields and clauses of the argument struct. A struct in
/// a field is compared where it is of `#[kernel_args]` too, else only by its size. Functions that
/// the body calls, and the values of constants in clauses and body, are not compared: the check of
/// `cargo build-ptx --check` has all of them.
///
/// # Errors
/// Both descriptions, where they differ.
pub fn check_fresh<K: Entry>(ptx: &str) -> Result<(), StalePtx> {
    describes(&K::INFO, ptx)
}

/// [`check_fresh`], compiled once for all kernels.
fn describes(kernel: &KernelInfo, ptx: &str) -> Result<(), StalePtx> {
    let source = format!("{kernel}");
    let begins = format!("{DESCRIPTION}{}: ", kernel.name);
    let found = ptx.lines().find(|line| line.starts_with(&begins));
    match found {
        Some(line) if line == source => Ok(()),
        other => Err(StalePtx { kernel: kernel.name, source, ptx: other.map(str::to_owned) }),
    }
}

/// A PTX module, cut into its kernels.
#[derive(Debug)]
pub struct CutPtx<'a> {
    head: &'a str,
    kernels: Vec<KernelText<'a>>,
    tail: &'a str,
}

#[derive(Debug)]
struct KernelText<'a> {
    name: &'a str,
    text: &'a str,
    lines: usize,
}

impl<'a> CutPtx<'a> {
    /// Cuts a module. Text without a kernel stays whole.
    pub fn new(ptx: &'a str) -> CutPtx<'a> {
        const ENTRY: &str = ".visible .entry ";
        let entries: Vec<usize> = ptx.match_indices(ENTRY).map(|(at, _)| at).collect();
        // File names and other trailing directives follow the closing brace of the last kernel.
        let tail = entries.last().and_then(|last| ptx[*last..].find("\n}").map(|end| last + end + 2));
        let Some(tail) = tail else { return CutPtx { head: ptx, kernels: Vec::new(), tail: "" } };
        // A kernel begins with the line that describes it.
        let starts: Vec<usize> = entries.iter().map(|entry| described_from(ptx, *entry)).collect();
        let ends = starts.iter().skip(1).chain([&tail]);
        let kernel = |((entry, start), end): ((&usize, &usize), &usize)| {
            let name = ptx[entry + ENTRY.len()..].split(|c: char| !c.is_alphanumeric() && c != '_').next();
            let text = &ptx[*start..*end];
            let lines = text.bytes().filter(|byte| *byte == b'\n').count();
            KernelText { name: name.unwrap_or_default(), text, lines }
        };
        let kernels = entries.iter().zip(&starts).zip(ends).map(kernel).collect();
        CutPtx { head: &ptx[..starts[0]], kernels, tail: &ptx[tail..] }
    }

    /// The names of all kernels, in their order.
    pub fn names(&self) -> impl Iterator<Item = &'a str> {
        self.kernels.iter().map(|kernel| kernel.name)
    }

    /// The lines that describe kernels, each with its end.
    pub fn descriptions(&self) -> impl Iterator<Item = &'a str> {
        let first = |kernel: &KernelText<'a>| kernel.text.split_inclusive('\n').next();
        self.kernels.iter().filter_map(first).filter(|line| line.starts_with(DESCRIPTION))
    }

    /// The kernels that wait for the one in front of them in the stream.
    pub fn waiting(&self) -> impl Iterator<Item = &'a str> {
        let waits = |kernel: &&KernelText<'_>| kernel.text.contains("griddepcontrol.wait");
        self.kernels.iter().filter(waits).map(|kernel| kernel.name)
    }

    /// The part that the kernels `names` need. Lines of other kernels are left empty, so that line
    /// numbers in errors are those of the whole.
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

/// The beginning of the line in front of `entry` if that describes a kernel, or else `entry`.
fn described_from(ptx: &str, entry: usize) -> usize {
    let Some(before) = ptx[..entry].strip_suffix('\n') else { return entry };
    let line = before.rfind('\n').map_or(0, |end| end + 1);
    if before[line..].starts_with(DESCRIPTION) { line } else { entry }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    use crate::{Global, kernel};

    #[test]
    fn a_part_keeps_header_tail_and_line_numbers() {
        let ptx = "HEAD\n.visible .entry a(\n)\n{\n}\n.visible .entry ab(\n)\n{\nB\n}\nTAIL\n";
        let cut = CutPtx::new(ptx);
        assert_eq!(cut.only(&["a"]), "HEAD\n.visible .entry a(\n)\n{\n}\n\n\n\n\n\nTAIL\n");
        assert_eq!(cut.only(&["ab"]), "HEAD\n\n\n\n\n.visible .entry ab(\n)\n{\nB\n}\nTAIL\n");
        assert_eq!(cut.only(&["ab", "a"]), ptx);
        assert_eq!(cut.names().collect::<Vec<_>>(), ["a", "ab"]);
        assert_eq!(CutPtx::new("no kernel").only(&["a"]), "no kernel");
    }

    #[test]
    fn a_part_describes_its_own_kernels_alone() {
        let entry = |name: &str| format!("\n.visible .entry {name}(\n)\n{{\n}}\n\n");
        let (first, second) = (compiled::Stored::INFO, Explained::INFO);
        let ptx = format!("HEAD\n\n{first}{}{second}{}", entry("stored"), entry("explained"));
        let cut = CutPtx::new(&ptx);
        let (stored, explained) = (cut.only(&["stored"]), cut.only(&["explained"]));
        check_fresh::<compiled::Stored>(&stored).unwrap();
        check_fresh::<Explained>(&explained).unwrap();
        assert!(check_fresh::<Explained>(&stored).is_err());
        assert!(check_fresh::<compiled::Stored>(&explained).is_err());
        assert_eq!(cut.only(&["explained", "stored"]), ptx);
        assert_eq!(cut.descriptions().collect::<Vec<_>>(), [format!("{first}\n"), format!("{second}\n")]);
        let lines = |text: &str| text.matches('\n').count();
        assert_eq!((lines(&stored), lines(&explained)), (lines(&ptx), lines(&ptx)));
    }

    #[test]
    fn kernels_that_wait_are_named() {
        let ptx = ".visible .entry a(\n)\n{\ngriddepcontrol.wait;\n}\n.visible .entry b(\n)\n{\n}\n";
        assert_eq!(CutPtx::new(ptx).waiting().collect::<Vec<_>>(), ["a"]);
    }

    /// The kernel in a compiled form.
    mod compiled {
        use super::*;
        #[kernel(threads = 64, barriers = 1, traps = 2, local_memory = "small {table}")]
        pub unsafe fn stored(out: Global<u32>, v: u32) {
            out.st(0, v);
        }
    }

    /// The kernel as it was edited later.
    mod edited {
        use super::*;
        #[kernel(threads = 64, barriers = 1, traps = 2, local_memory = "small {table}")]
        pub unsafe fn stored(out: Global<u32>, v: u32) {
            out.st(0, v + 1);
        }
    }

    #[test]
    fn a_body_that_was_edited_is_stale() {
        let ptx = format!(".version 8.4\n{}\n.visible .entry stored(\n", compiled::Stored::INFO);
        check_fresh::<compiled::Stored>(&ptx).unwrap();
        let stale = check_fresh::<edited::Stored>(&ptx).unwrap_err();
        assert!(stale.to_string().contains("run `cargo build-ptx`"), "{stale}");
        assert!(stale.ptx.is_some_and(|line| line.contains("threads=64")));
        let missing = check_fresh::<edited::Stored>(".version 8.4\n").unwrap_err();
        assert!(missing.to_string().contains("has no such kernel"), "{missing}");
    }

    /// Kernels with the same text, whose argument structs differ by the macro's arguments.
    macro_rules! taking {
        ($name:ident, $least:literal, { $($field:ident: $of:ty),* }, { $($inner:ident),* }) => {
            mod $name {
                use super::*;
                #[crate::kernel_args]
                pub struct Pair {
                    $($inner: u32),*
                }
                #[crate::kernel_args(requires(self.len >= $least))]
                pub struct Args {
                    $($field: $of),*
                }
                #[kernel(threads = 64)]
                pub unsafe fn stored(args: Args) {
                    args.out.st(0, args.len);
                }
            }
        };
    }
    taking!(built, 1, { out: Global<u32>, len: u32, many: u32, of: [Pair; 2] }, { a, b });
    taking!(swapped, 1, { out: Global<u32>, many: u32, len: u32, of: [Pair; 2] }, { a, b });
    taking!(looser, 2, { out: Global<u32>, len: u32, many: u32, of: [Pair; 2] }, { a, b });
    taking!(inner, 1, { out: Global<u32>, len: u32, many: u32, of: [Pair; 2] }, { b, a });

    #[test]
    fn an_argument_struct_that_was_edited_is_stale() {
        let ptx = format!("{}\n", built::Stored::INFO);
        check_fresh::<built::Stored>(&ptx).unwrap();
        assert!(check_fresh::<swapped::Stored>(&ptx).is_err(), "fields of one size");
        assert!(check_fresh::<looser::Stored>(&ptx).is_err(), "a clause");
        assert!(check_fresh::<inner::Stored>(&ptx).is_err(), "fields of a struct in a field");
    }

    #[kernel(
        threads = 64,
        local_memory = "a table \
                                           that is indexed,
                                           in two lines "
    )]
    unsafe fn explained(out: Global<u32>, v: u32) {
        out.st(0, v);
    }

    #[test]
    fn a_reason_of_several_lines_is_one_line_of_ptx() {
        let line = Explained::INFO.to_string();
        assert!(line.ends_with(" local=a table that is indexed, in two lines"), "{line}");
        check_fresh::<Explained>(&format!("{line}\n")).unwrap();
    }

    #[test]
    fn a_description_has_the_whole_contract() {
        let text = compiled::Stored::INFO.to_string();
        let (before, after) = text.split_once("source=").unwrap();
        assert_eq!(
            before,
            "// kernel stored: threads=64 min_blocks=1 barriers=1 registers=255 traps=2 dependent=0 "
        );
        let (source, after) = after.split_once(' ').unwrap();
        assert_eq!(source, compiled::Stored::INFO.source.to_string());
        assert_eq!(after, "params=args:16:8 local=small {table}");
    }
}
