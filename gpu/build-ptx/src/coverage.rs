//! Reports which instructions and Rust lines of the kernels a test run executed.
//!
//! The virtual GPU writes what each process executes into the folder that `EPOXIDE_VGPU_COVERAGE`
//! names; this merges it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use epoxide_vgpu::{InstructionPlace, Kernel, Module};

use crate::workspace;

/// Names the folder that the virtual GPU writes to.
pub const DIRECTORY_VARIABLE: &str = "EPOXIDE_VGPU_COVERAGE";

/// Lines that were never executed, in a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missed {
    /// Each by its number, with its instructions.
    Listed,
    /// As a share alone.
    Counted,
}

/// The report about the kernels of `ptx`, from the files that runs have left in `directory`.
pub fn report(ptx: &str, directory: &Path, missed: Missed) -> Result<String> {
    let module = Module::parse(ptx).context("the PTX")?;
    let covered = merge(&module, directory)?;
    let rows: Vec<Row> = covered.iter().map(|(kernel, executed)| row(kernel, executed)).collect();
    Ok(match missed {
        Missed::Listed => table(&rows) + &missed_lines(&rows),
        Missed::Counted => table(&rows),
    })
}

/// Executed instructions of all runs that left their files in `directory`, kernel by kernel. Files
/// about other PTX are left out.
pub fn merge(module: &Module, directory: &Path) -> Result<Vec<(Arc<Kernel>, Vec<bool>)>> {
    let mut all: BTreeMap<String, (Arc<Kernel>, Vec<bool>)> = BTreeMap::new();
    for kernel in module.kernels() {
        let key = format!("{}-{:016x}", kernel.name(), kernel.fingerprint());
        all.insert(key, (kernel.clone(), vec![false; kernel.instruction_count()]));
    }
    let reading = || format!("cannot read {}", directory.display());
    let mut files = 0;
    for entry in std::fs::read_dir(directory).with_context(reading)? {
        let path = entry.with_context(reading)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let Some(key) = name.strip_suffix(".cover").and_then(|stem| stem.rsplit_once('-')) else { continue };
        let Some((_, executed)) = all.get_mut(key.0) else { continue };
        let text = workspace::read(&path)?;
        ensure!(
            text.len() == executed.len(),
            "{}: {} instructions, the kernel has {}; remove the folder and run again",
            path.display(),
            text.len(),
            executed.len()
        );
        executed.iter_mut().zip(text.bytes()).for_each(|(all, byte)| *all |= byte == b'1');
        files += 1;
    }
    ensure!(
        files > 0,
        "{}: no run of this PTX has left a file there; set {DIRECTORY_VARIABLE} to the folder's absolute path in runs of tests on the virtual GPU",
        directory.display()
    );
    Ok(all.into_values().collect())
}

/// Coverage of one kernel.
struct Row {
    kernel: String,
    /// Instructions executed, and all.
    instructions: (usize, usize),
    /// Rust lines by file: the number, and whether it was executed. Those of the standard library
    /// and of packages from a registry are left out.
    lines: BTreeMap<String, BTreeMap<u32, bool>>,
    /// Lines of the PTX that were never executed, by their number, with their Rust line and text.
    missed: BTreeMap<usize, String>,
}

fn row(kernel: &Kernel, executed: &[bool]) -> Row {
    let mut lines: BTreeMap<String, BTreeMap<u32, bool>> = BTreeMap::new();
    let mut count = (0, 0);
    let mut missed = BTreeMap::new();
    // The last one is the end that the virtual GPU puts behind a kernel: no instruction of the PTX.
    let executed = &executed[..executed.len() - 1];
    let places: Vec<InstructionPlace> = kernel.places().collect();
    for (place, &executed) in places.iter().zip(executed) {
        if !executed {
            missed.entry(place.ptx_line).or_insert_with(|| instruction(place));
        }
    }
    for (place, &executed) in places.into_iter().zip(executed) {
        if executed {
            missed.remove(&place.ptx_line);
        }
        count = (count.0 + usize::from(executed), count.1 + 1);
        for (file, line) in place.source.into_iter().chain(place.inlined) {
            if !is_foreign(&file) {
                *lines.entry(file).or_default().entry(line).or_default() |= executed;
            }
        }
    }
    Row { kernel: kernel.name().to_owned(), instructions: count, lines, missed }
}

/// Whether a file is of the standard library or of a package from elsewhere, by the name that the
/// builder gives it: `rust/core/src/cmp.rs`, `cargo/half-2.7.1/src/lib.rs`. A workspace may have
/// kernels in a folder `rust`.
pub fn is_foreign(file: &str) -> bool {
    const LIBRARY: [&str; 5] =
        ["rust/core/", "rust/alloc/", "rust/compiler-builtins/", "rust/portable-simd/", "rust/stdarch/"];
    file.starts_with("cargo/") || LIBRARY.iter().any(|start| file.starts_with(start))
}

/// An instruction with its places: `src/k.rs:8 (inlined: src/m.rs:9)  PTX 11: mov.b32 %r1, 2;`.
fn instruction(place: &InstructionPlace) -> String {
    let shown = |(file, line): &(String, u32)| format!("{file}:{line}");
    let source = place.source.as_ref().map_or_else(String::new, |source| format!("{}  ", shown(source)));
    let inlined = place.inlined.as_ref().map(|inlined| format!("(inlined: {})  ", shown(inlined)));
    let words: Vec<&str> = place.ptx_text.split_whitespace().collect();
    format!("{source}{}PTX {}: {}", inlined.unwrap_or_default(), place.ptx_line, words.join(" "))
}

fn table(rows: &[Row]) -> String {
    let mut text =
        format!("{:<20} {:>15} {:>7} {:>12} {:>7}\n", "kernel", "instructions", "%", "Rust lines", "%");
    let percent = |(part, all): (usize, usize)| 100.0 * part as f64 / all.max(1) as f64;
    let mut line = |name: &str, instructions: (usize, usize), lines: (usize, usize)| {
        let of = |(part, all): (usize, usize)| format!("{part}/{all}");
        let _ = writeln!(
            text,
            "{name:<20} {:>15} {:>7.1} {:>12} {:>7.1}",
            of(instructions),
            percent(instructions),
            of(lines),
            percent(lines)
        );
    };
    let add = |a: (usize, usize), b: (usize, usize)| (a.0 + b.0, a.1 + b.1);
    let mut sum = ((0, 0), (0, 0));
    for row in rows {
        let all = row.lines.values().flat_map(BTreeMap::values);
        let lines = all.fold((0, 0), |sum, &executed| add(sum, (usize::from(executed), 1)));
        sum = (add(sum.0, row.instructions), add(sum.1, lines));
        line(&row.kernel, row.instructions, lines);
    }
    line("all", sum.0, sum.1);
    text
}

/// The Rust lines that were never executed, a kernel's file per line; behind them the instructions.
/// A Rust line with one executed instruction counts as executed, though it may have others.
fn missed_lines(rows: &[Row]) -> String {
    let mut text = String::new();
    for row in rows {
        if row.instructions.0 == 0 {
            let _ = writeln!(text, "{} never runs", row.kernel);
            continue;
        }
        for (file, lines) in &row.lines {
            let missed = lines.iter().filter(|(_, executed)| !**executed).map(|(line, _)| *line);
            let list = ranges(missed);
            if !list.is_empty() {
                let _ = writeln!(text, "{} never runs {file}: {list}", row.kernel);
            }
        }
        if !row.missed.is_empty() {
            let _ = writeln!(text, "{} never runs these instructions:", row.kernel);
        }
        row.missed.values().for_each(|instruction| {
            let _ = writeln!(text, "  {instruction}");
        });
    }
    text
}

/// `3, 5-7` for 3, 5, 6, 7.
fn ranges(lines: impl Iterator<Item = u32>) -> String {
    let mut ranges: Vec<(u32, u32)> = Vec::new();
    for line in lines {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == line => *last = line,
            _ => ranges.push((line, line)),
        }
    }
    let shown = ranges.iter().map(|(first, last)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    });
    shown.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    const PTX: &str = ".version 8.4\n.target sm_90\n.address_size 64\n.entry k()\n{\n.reg .b32 %r<2>;\n.loc 1 7 0\n\
                       mov.b32 %r1, 1;\n.loc 2 9 0 // inlined_at 1 8\nmov.b32 %r1, 2;\n.loc 3 1 0 // inlined_at 1 7\nret;\n}\n\
                       .file 1 \"gpu/src/k.rs\"\n.file 2 \"gpu/src/m.rs\"\n.file 3 \"rust/core/a.rs\"\n";

    #[test]
    fn kernels_in_a_folder_rust_are_the_users() {
        let ptx = PTX.replace("gpu/src/k.rs", "rust/src/k.rs");
        let module = Module::parse(&ptx).unwrap();
        let rows = row(&module.kernel("k").unwrap(), &[false; 4]);
        assert_eq!(rows.lines.keys().collect::<Vec<_>>(), ["gpu/src/m.rs", "rust/src/k.rs"]);
    }

    #[test]
    fn files_of_all_processes_are_merged() {
        let module = Module::parse(PTX).unwrap();
        let kernel = module.kernel("k").unwrap();
        let directory = tempfile::tempdir().unwrap();
        assert!(merge(&module, directory.path()).unwrap_err().to_string().contains("no run of this PTX"));
        let write = |name: String, text: &str| std::fs::write(directory.path().join(name), text).unwrap();
        write(format!("k-{:016x}-1.2.cover", kernel.fingerprint()), "1000");
        write(format!("k-{:016x}-3.4.cover", kernel.fingerprint()), "0010");
        write(format!("k-{:016x}-5.6.cover.partial", kernel.fingerprint()), "01");
        write("k-0123456789abcdef-1.2.cover".to_owned(), "0100");
        let merged = merge(&module, directory.path()).unwrap();
        assert_eq!(merged[0].1, [true, false, true, false]);

        let rows = [row(&merged[0].0, &merged[0].1)];
        assert_eq!(rows[0].instructions, (2, 3));
        let table = table(&rows);
        assert!(
            table.contains("k                                2/3    66.7          1/3    33.3\n"),
            "{table}"
        );
        assert_eq!(
            missed_lines(&rows),
            "k never runs gpu/src/k.rs: 8\nk never runs gpu/src/m.rs: 9\nk never runs these instructions:\n  \
             gpu/src/k.rs:8  (inlined: gpu/src/m.rs:9)  PTX 10: mov.b32 %r1, 2;\n"
        );

        assert_eq!(ranges([3, 5, 6, 7, 9].into_iter()), "3, 5-7, 9");
        assert_eq!(missed_lines(&[row(&merged[0].0, &[false; 4])]), "k never runs\n");

        write(format!("k-{:016x}-7.8.cover", kernel.fingerprint()), "00");
        assert!(
            merge(&module, directory.path())
                .unwrap_err()
                .to_string()
                .contains("2 instructions, the kernel has 4")
        );
    }
}
