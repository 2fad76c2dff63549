//! Programs that must not compile: each breaks one promise that the types of the interface make.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// The correct form of each mistake in the programs; it compiles.
#[allow(dead_code)]
mod allowed;

/// Compiles each program against the library that cargo has built for this test, and compares the
/// compiler's messages with the `.stderr` file beside the program. `EPOXIDE_BLESS=1` writes the
/// files.
#[test]
fn programs_that_break_a_promise_do_not_compile() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/types");
    let library = library();
    let mut programs: Vec<PathBuf> = files(&folder).filter(|path| is_program(path)).collect();
    programs.sort();
    assert_eq!(programs.len(), 7, "{programs:?}");
    let mut differ = String::new();
    for program in &programs {
        let (compiles, messages) = compile(program, &library);
        let expected = program.with_extension("stderr");
        if std::env::var_os("EPOXIDE_BLESS").is_some() {
            std::fs::write(&expected, &messages).unwrap();
        }
        let expected = std::fs::read_to_string(&expected).unwrap();
        if compiles || messages != expected {
            let name = program.display();
            let _ = writeln!(differ, "{name} compiles: {compiles}\nexpected:\n{expected}\nis:\n{messages}");
        }
    }
    assert!(differ.is_empty(), "{differ}");
}

/// Programs have names of several words.
fn is_program(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "rs")
        && path.file_stem().is_some_and(|name| name.to_string_lossy().contains('_'))
}

fn files(folder: &Path) -> impl Iterator<Item = PathBuf> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path())
}

/// The library `epoxide` beside this test. Cargo has brought the one of this test's features up to
/// date, so a newer one with other features has the same sources.
fn library() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let is_library = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.starts_with("libepoxide-") && name.ends_with(".rlib")
    };
    let libraries = files(program.parent().unwrap()).filter(is_library);
    libraries.max_by_key(|path| path.metadata().unwrap().modified().unwrap()).unwrap()
}

/// Whether the program compiles, and the compiler's messages.
fn compile(program: &Path, library: &Path) -> (bool, String) {
    let out = tempfile::tempdir().unwrap();
    let output = Command::new("rustc")
        .args(["--edition", "2024", "--error-format", "json", "--emit", "metadata", "--out-dir"])
        .arg(out.path())
        .arg("--extern")
        .arg(format!("epoxide={}", library.display()))
        .arg("-L")
        .arg(format!("dependency={}", library.parent().unwrap().display()))
        .arg(program)
        .output()
        .unwrap();
    let mut messages = String::new();
    for line in String::from_utf8(output.stderr).unwrap().lines() {
        let message: Value = serde_json::from_str(line).unwrap_or_else(|_| panic!("not of rustc: {line}"));
        // The last ones count the errors.
        if message["spans"].as_array().is_some_and(|spans| !spans.is_empty()) {
            describe(&message, program, &mut messages);
        }
    }
    (output.status.success(), messages)
}

/// Writes level, code and text of a message; file, place and label of its spans; and the same of its
/// notes. Files of the library have no lines here: an edit there would move them.
fn describe(message: &Value, program: &Path, text: &mut String) {
    let string = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let code = message["code"]["code"].as_str().map_or(String::new(), |code| format!("[{code}]"));
    let said = string(&message["message"]);
    // Lists of types change with the library.
    let said =
        if said.starts_with("the following") { said.lines().next().unwrap_or_default() } else { &said };
    let _ = writeln!(text, "{}{code}: {said}", string(&message["level"]));
    for span in message["spans"].as_array().into_iter().flatten() {
        let file = PathBuf::from(string(&span["file_name"]));
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let place = if file == program {
            let [from, to] = ["start", "end"].map(|end| {
                let at = |what| &span[format!("{what}_{end}")];
                format!("{}:{}", at("line"), at("column"))
            });
            format!("{name}:{from}-{to}")
        } else {
            name
        };
        let arrow = if span["is_primary"] == true { "-->" } else { "   " };
        let _ = writeln!(text, "{}", format!("  {arrow} {place} {}", string(&span["label"])).trim_end());
    }
    for note in message["children"].as_array().into_iter().flatten() {
        describe(note, program, text);
    }
}
