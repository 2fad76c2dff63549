//! From the compiler's PTX to the PTX we ship.
//!
//! - The line that describes a kernel moves in front of its entry, and launch bounds are made from
//!   it: rustc has no attribute for them.
//! - Source lines (`.loc`, `.file`) stay: the virtual GPU names Rust file and line with them. The
//!   labels, the empty debug section and the repeated or lineless `.loc`s around them go.
//! - A `.loc` of inlined code has a comment with the place where the kernel's own code called it,
//!   and with the calls of that code, the nearest first: `// inlined_at <file> <line>, <file>
//!   <line>`. PTX has the attribute `inlined_at` for that, but LLVM 22 does not write it. ptxas
//!   requires a `.loc` of each caller and a debug section with it. A kernel whose family has a
//!   folder has its own code in all files of it. The virtual GPU counts only the entry's file as
//!   the kernel's own, so a line of another file of the folder names itself. A line of the entry's
//!   file does not: its comment has the calls alone.
//! - The marks around inline assembly stay: one lint reads them.

use hmac_sha256::Hash;

use crate::described::{self, KernelInfo};
use crate::header::Header;
use crate::sources;

/// The PTX to ship, from what the compiler wrote: the header with the hash of the text, and the
/// text.
pub fn ship(raw: &str, header: &Header, described: &[KernelInfo]) -> String {
    let body = body(raw, described);
    let header = Header { text: Some(digest(&body)), ..header.clone() };
    format!("{header}\n{body}")
}

/// The text below the header. An entry without a description gets no launch bounds; the lints
/// report it.
fn body(raw: &str, described: &[KernelInfo]) -> String {
    let files = file_table(raw);
    let mut out = String::new();
    let mut entry: Option<&KernelInfo> = None;
    let mut last_loc = String::new();
    let mut blank = true;
    // File and line of the kernel's first `.loc`: its own file, and the line of the function.
    let mut home = None;
    for line in raw.lines().map(str::trim_end) {
        if is_compiler_remark(line) {
            continue;
        }
        let (line, comment) = if is_asm_mark(line) { (line, "") } else { split_comment(line) };
        let line = line.trim_end();
        if is_debug_label(line) || is_empty_section(line) {
            continue;
        }
        if line.trim().is_empty() {
            if !blank {
                out.push('\n');
            }
            blank = true;
            continue;
        }
        if let Some(name) = entry_name(line) {
            entry = described::find(described, name);
            if let Some(kernel) = entry {
                out.push_str(&kernel.line);
                out.push('\n');
            }
            last_loc.clear();
            home = None;
        }
        if line == "{"
            && let Some(kernel) = entry.take()
        {
            out.push_str(&bounds(kernel));
        }
        if line.trim_start().starts_with(".loc") {
            if !has_line(line) {
                continue;
            }
            let entry = *home.get_or_insert(place_of(line));
            let loc = format!("{line}{}", inlined_at(line, comment, entry, &files).unwrap_or_default());
            if loc != last_loc {
                out.push_str(&loc);
                out.push('\n');
                last_loc = loc;
            }
            blank = false;
            continue;
        }
        blank = false;
        out.push_str(line);
        out.push('\n');
    }
    out
}

/// The text that two builds must agree on: no blank lines, and no comments but those that describe
/// kernels.
pub fn comparable(text: &str) -> Vec<&str> {
    let compared =
        |line: &&str| !line.is_empty() && (!line.starts_with("//") || described::is_description(line));
    text.lines().map(str::trim).filter(compared).collect()
}

/// The hash of a file's [`comparable`] lines, as hex.
pub fn digest(text: &str) -> String {
    sources::hex(Hash::hash(comparable(text).join("\n").as_bytes()))
}

/// `.maxntid` and `.minnctapersm`, for between the parameters and the body.
fn bounds(kernel: &KernelInfo) -> String {
    let mut text = format!(".maxntid {}, 1, 1\n", kernel.max_threads);
    if kernel.min_blocks_per_sm > 0 {
        text += &format!(".minnctapersm {}\n", kernel.min_blocks_per_sm);
    }
    text
}

fn entry_name(line: &str) -> Option<&str> {
    let (_, after) = line.split_once(".entry ")?;
    Some(after.split(['(', ' ', '{']).next().unwrap_or(after))
}

/// Comments only repeat the text, but for the marks around inline assembly.
fn is_compiler_remark(line: &str) -> bool {
    line.trim_start().starts_with("//") && !is_asm_mark(line)
}

fn is_asm_mark(line: &str) -> bool {
    let comment = line.trim_start().strip_prefix("//").map(str::trim);
    matches!(comment, Some("begin inline asm" | "end inline asm"))
}

/// Cuts a `//` comment off, leaving quoted text alone.
fn split_comment(line: &str) -> (&str, &str) {
    let mut quoted = false;
    let bytes = line.as_bytes();
    for (i, byte) in bytes.iter().enumerate() {
        match byte {
            b'"' => quoted = !quoted,
            b'/' if !quoted && bytes.get(i + 1) == Some(&b'/') => return (&line[..i], &line[i + 2..]),
            _ => {}
        }
    }
    (line, "")
}

/// Paths and their numbers, from `.file <number> "<path>"`.
fn file_table(raw: &str) -> Vec<(&str, &str)> {
    let rows =
        raw.lines().filter_map(|line| line.trim_start().strip_prefix(".file")?.trim_start().split_once(' '));
    rows.map(|(number, path)| (path.trim().trim_matches('"'), number)).collect()
}

/// The file's number and the line in `.loc <file> <line> <column>`.
fn place_of(loc: &str) -> (&str, &str) {
    let mut words = loc.split_whitespace().skip(1);
    (words.next().unwrap_or(""), words.next().unwrap_or(""))
}

/// ` // inlined_at <file> <line>, ..`: from LLVM's `a.rs:1:2 @[ b.rs:3:4 @[ c.rs:5:6 ] ]`,
/// innermost first, the places in the kernel's own code. Left out are the `.loc` itself and the
/// macro's code, which is on the lines of the entry's attributes. `None` if none is left.
fn inlined_at(loc: &str, comment: &str, entry: (&str, &str), files: &[(&str, &str)]) -> Option<String> {
    let (home_path, _) = files.iter().find(|(_, number)| *number == entry.0)?;
    let own = comment.split_whitespace().filter_map(|word| {
        let (place, _column) = word.rsplit_once(':')?;
        let (path, line) = place.rsplit_once(':')?;
        let (path, file) = files.iter().find(|(name, _)| *name == path)?;
        (family(path) == family(home_path)).then_some((*file, line))
    });
    let mut own: Vec<_> = own.collect();
    let line_of = |line: &str| line.parse::<u32>().unwrap_or(0);
    let is_of_entry = |(file, line): (&str, &str)| file == entry.0 && line_of(line) <= line_of(entry.1);
    while own.len() > 1 && own.last().is_some_and(|outermost| is_of_entry(*outermost)) {
        own.pop();
    }
    let is_home = place_of(loc).0 == entry.0;
    let places: Vec<String> =
        own.iter().skip(is_home.into()).map(|(file, line)| format!("{file} {line}")).collect();
    (!places.is_empty()).then(|| format!(" // inlined_at {}", places.join(", ")))
}

/// The kernel family that a source file belongs to: its folder's name or its own below `kernels/`,
/// elsewhere its path.
fn family(path: &str) -> &str {
    path.split_once("/kernels/").and_then(|(_, below)| below.split('/').next()).unwrap_or(path)
}

/// Labels that only debug sections would refer to.
fn is_debug_label(line: &str) -> bool {
    let Some(label) = line.strip_suffix(':') else { return false };
    ["$L__tmp", "$L__func_begin", "$L__func_end"].iter().any(|prefix| {
        label.strip_prefix(prefix).is_some_and(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
    })
}

fn is_empty_section(line: &str) -> bool {
    let mut words = line.split_whitespace();
    words.next() == Some(".section") && words.nth(1) == Some("{") && words.next() == Some("}")
}

/// Whether a `.loc <file> <line> <column>` names a line: line 0 is the compiler's own doing.
fn has_line(loc: &str) -> bool {
    loc.split_whitespace().nth(2) != Some("0")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::described::samples::{kernel, line};

    const RAW: &str = "//
// Generated by LLVM NVPTX Back-End
//

.version 8.4


	// .globl	copy
.visible .entry copy(
	.param .u64 copy_param_0
)
{
$L__func_begin0:
	.loc	1 39 0
	// begin inline asm
	mov.u32 %r1, %tid.x;
	// end inline asm
$L__tmp3:
	.loc	1 0 8
	.loc	1 39 0                          // gpu/src/lib.rs:39:0
	.loc	2 7 9                           // rust/a.rs:7:9 @[ gpu/simt/src/lib.rs:3:4 @[ gpu/src/lib.rs:41:5 @[ gpu/src/lib.rs:39:1 ] ] ]
	bra $L__BB0_2;                          // remark
	.loc	2 7 9                           // rust/a.rs:7:9 @[ gpu/src/lib.rs:41:8 @[ gpu/src/lib.rs:39:0 ] ]
	.loc	1 41 9                          // gpu/src/lib.rs:41:9 @[ gpu/src/lib.rs:39:1 ]
$L__BB0_2:                              // =>This Inner Loop Header: Depth=1
	ret;
}
.visible .entry other()
{
	ret;
}
	.section	.debug_macinfo	{	}
	.file	1 \"gpu/src/lib.rs\"
	.file	2 \"rust/core/a.rs\"
";

    const SHIPPED: &str = "
.version 8.4

// kernel copy: threads=256 min_blocks=2 barriers=1 registers=64 traps=0 dependent=0 source=00ff params=src:8:8,n:4:4
.visible .entry copy(
	.param .u64 copy_param_0
)
.maxntid 256, 1, 1
.minnctapersm 2
{
	.loc	1 39 0
	// begin inline asm
	mov.u32 %r1, %tid.x;
	// end inline asm
	.loc	2 7 9 // inlined_at 1 41
	bra $L__BB0_2;
	.loc	1 41 9
$L__BB0_2:
	ret;
}
.visible .entry other()
{
	ret;
}
	.file	1 \"gpu/src/lib.rs\"
	.file	2 \"rust/core/a.rs\"
";

    #[test]
    fn the_files_of_a_folder_are_all_a_kernels_own() {
        const FILES: [(&str, &str); 4] = [
            ("gpu/src/kernels/k/mod.rs", "1"),
            ("gpu/src/kernels/k/part.rs", "2"),
            ("gpu/src/kernels/ring.rs", "3"),
            ("gpu/simt/src/warp.rs", "4"),
        ];
        let at = |loc: &str, comment: &str| inlined_at(loc, comment, ("1", "8"), &FILES);
        let outer = "gpu/src/kernels/k/mod.rs:9:1 @[ gpu/src/kernels/k/mod.rs:7:1 ] ]";
        assert_eq!(at(".loc 1 9 1", outer), None);
        let part = format!("gpu/src/kernels/k/part.rs:20:5 @[ {outer}");
        assert_eq!(at(".loc 2 20 5", &part).unwrap(), " // inlined_at 2 20, 1 9");
        let warp = format!("gpu/simt/src/warp.rs:4:5 @[ gpu/src/kernels/ring.rs:6:7 @[ {part}");
        assert_eq!(at(".loc 4 4 5", &warp).unwrap(), " // inlined_at 2 20, 1 9");
        let own = format!("gpu/src/kernels/k/mod.rs:30:5 @[ {part}");
        assert_eq!(at(".loc 1 30 5", &own).unwrap(), " // inlined_at 2 20, 1 9");
        let ring = format!("gpu/simt/src/warp.rs:4:5 @[ gpu/src/kernels/ring.rs:6:7 @[ {outer}");
        assert_eq!(at(".loc 4 4 5", &ring).unwrap(), " // inlined_at 1 9");
        assert_eq!(at(".loc 4 4 5", "gpu/simt/src/warp.rs:4:5"), None);
    }

    #[test]
    fn adds_bounds_and_drops_debris() {
        let header = Header {
            package: String::new(),
            command: String::new(),
            backend: String::new(),
            compiler: String::new(),
            flags: String::new(),
            sources: String::new(),
            files: Vec::new(),
            text: Some(digest(SHIPPED)),
        };
        let shipped = ship(RAW, &header, &[kernel("copy")]);
        assert_eq!(shipped, format!("{header}{SHIPPED}"));
        assert_eq!(digest(&shipped), digest(SHIPPED));
        assert_ne!(digest(&shipped.replace("mov.u32", "mov.b32")), digest(SHIPPED));
        assert_eq!(comparable(&shipped), comparable(SHIPPED));
        let remarks = comparable(&shipped).into_iter().filter(|line| line.starts_with("//"));
        assert_eq!(remarks.collect::<Vec<_>>(), [line("copy")]);
    }
}
