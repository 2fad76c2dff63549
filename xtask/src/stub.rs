//! `cargo xtask stub-cuda`: a libcuda.so that links and does nothing.
//!
//! Each function returns 34 (`CUDA_ERROR_STUB_LIBRARY`). The linker's copy and the loader's copy lie in different folders: cargo puts
//! link folders under `target/` on the library path of what it runs, and a stub found there would shadow the real driver.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::metadata::Metadata;
use crate::workspace::{Workspace, capture, read, write as write_file};

/// Writes the stub.
pub fn write(ws: &Workspace) -> Result<()> {
    let symbols = symbols(ws)?;
    let dir = ws.target("cuda-stub");
    let source = dir.join("stub.rs");
    write_file(&source, stub_source(&symbols))?;

    // `libcuda.so` in lib64 is what cust's build script looks for.
    let for_linker = dir.join("lib64/libcuda.so");
    let for_loader = dir.join("run/libcuda.so.1");
    write_file(&for_linker, "")?;
    compile(&source, &for_linker)?;
    write_file(&for_loader, std::fs::read(&for_linker)?)?;

    println!("wrote {} ({} functions)", ws.display(&for_linker), symbols.len());
    println!(
        "where there is no CUDA driver, run what links to it with LD_LIBRARY_PATH={}",
        for_loader.parent().unwrap_or(&dir).display()
    );
    Ok(())
}

/// Every driver function that someone may link to: those that `cust_raw` declares and those that the host crate declares itself.
fn symbols(ws: &Workspace) -> Result<BTreeSet<String>> {
    let metadata = Metadata::query(ws, &["--features", "epoxide/cuda"])?;
    let bindings =
        metadata.package("cust_raw").context("the feature `cuda` of epoxide brings no cust_raw")?;
    let mut found = BTreeSet::new();
    for dir in [bindings.dir.join("src"), ws.root.join("host/src")] {
        for file in rust_files(&dir)? {
            found.extend(declared(&read(&file)?));
        }
    }
    ensure!(found.contains("cuInit"), "no driver functions in {}", bindings.dir.display());
    Ok(found)
}

fn rust_files(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(dir) = todo.pop() {
        let entries = std::fs::read_dir(&dir).with_context(|| format!("cannot read {}", dir.display()))?;
        for entry in entries {
            let path = entry?.path();
            if path.is_dir() {
                todo.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                files.push(path);
            }
        }
    }
    Ok(files)
}

/// The names after `fn` that look like the driver's: `cu` and a capital letter.
fn declared(text: &str) -> impl Iterator<Item = String> {
    text.split("fn cu").skip(1).filter_map(|rest| {
        let end = rest.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))?;
        let (name, after) = rest.split_at(end);
        let is_driver = name.starts_with(|c: char| c.is_ascii_uppercase()) && after.starts_with('(');
        is_driver.then(|| format!("cu{name}"))
    })
}

fn stub_source(symbols: &BTreeSet<String>) -> String {
    let mut text = String::from(
        "#![no_std]\n\
         #[panic_handler]\n\
         fn panic(_: &core::panic::PanicInfo) -> ! { loop {} }\n\
         macro_rules! stub { ($($name:ident)*) => { $(\n\
         #[unsafe(no_mangle)] pub extern \"C\" fn $name() -> i32 { 34 }\n\
         )* } }\n\
         stub! {\n",
    );
    for symbol in symbols {
        let _ = writeln!(text, "    {symbol}");
    }
    text + "}\n"
}

fn compile(source: &Path, output: &Path) -> Result<()> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| OsString::from("rustc"));
    let mut command = Command::new(rustc);
    command
        .args([
            "--edition=2024",
            "--crate-type=cdylib",
            "--crate-name=cuda",
            "-Anon_snake_case",
            "-Copt-level=s",
        ])
        .args(["-Cpanic=abort", "-Clink-arg=-nostdlib", "-Clink-arg=-Wl,-soname,libcuda.so.1", "-o"])
        .arg(output)
        .arg(source);
    capture(&mut command).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_declarations_only() {
        let text = "pub fn cuInit(Flags: c_uint) -> CUresult;\n fn custom(a: u32);\n fn cuMemCreate(x: u64) -> i32;\n // cuFoo( \n";
        assert_eq!(declared(text).collect::<Vec<_>>(), ["cuInit", "cuMemCreate"]);
    }

    #[test]
    fn the_stub_compiles_and_has_its_symbols() {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("stub.rs");
        let output = dir.path().join("libcuda.so");
        write_file(&source, stub_source(&BTreeSet::from(["cuInit".to_owned()]))).unwrap();
        compile(&source, &output).unwrap();
        let bytes = std::fs::read(&output).unwrap();
        assert!(bytes.windows(7).any(|window| window == b"cuInit\0"));
    }
}
