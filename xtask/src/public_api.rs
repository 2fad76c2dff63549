//! `cargo xtask public-api`: the public items of the library's crates, one a line, in a committed
//! file. So a change of the interface shows in the commit that makes it.
//!
//! The list has the items that rustdoc documents: hidden items are no interface.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::workspace::{self, Workspace};

/// The list, from the repository root.
const FILE: &str = "docs/PUBLIC-API.txt";
/// The form of rustdoc's JSON that the crate `public-api` reads in the version that Cargo.toml
/// names. The pinned compiler writes it.
const JSON_FORMAT: u64 = 57;
/// The lines above the list.
const HEADER: &str = "# The public items of the library's crates with their features, as `cargo xtask public-api` writes them. Hidden items\n\
                      # are left out, and so are implementations that are derived, automatic or for all types.\n";
/// The crates, and the features of which the list has the items: those that docs.rs shows.
const CRATES: [(&str, &[&str]); 5] = [
    ("epoxide-base", &[]),
    ("epoxide-group", &[]),
    ("epoxide", &["cuda"]),
    ("epoxide-launch", &[]),
    ("epoxide-nccl", &[]),
];

/// Flags of the command.
#[derive(Args)]
pub struct Options {
    /// Compare the committed list with what the sources give; write nothing
    #[arg(long)]
    check: bool,
}

/// Starts xtask again with the feature `public-api`, whose crates take longer to compile than the
/// rest of xtask and are needed here only. Returns the exit code of that process.
#[cfg(not(feature = "public-api"))]
pub fn run(ws: &Workspace, options: &Options) -> Result<ExitCode> {
    let mut again = ws.cargo_in_callers_target();
    again.args(["run", "--quiet", "--release", "--package", "xtask", "--bin", "xtask"]);
    again.args(["--features", "public-api", "--", "public-api"]);
    if options.check {
        again.arg("--check");
    }
    let status = again.status().with_context(|| format!("cannot start `{}`", workspace::describe(&again)))?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Writes the list, or compares it.
#[cfg(feature = "public-api")]
pub fn run(ws: &Workspace, options: &Options) -> Result<ExitCode> {
    write_or_check(ws, options, &list(ws)?).map(|()| ExitCode::SUCCESS)
}

fn write_or_check(ws: &Workspace, options: &Options, list: &str) -> Result<()> {
    let path = ws.root.join(FILE);
    let items = list.lines().filter(|line| !line.starts_with("# ")).count();
    if !options.check {
        workspace::write(&path, list)?;
        println!("wrote {FILE} ({items} items)");
        return Ok(());
    }
    let committed = if path.exists() { workspace::read(&path)? } else { String::new() };
    let changes = changes(&committed, list);
    if changes.is_empty() && committed == list {
        println!("{FILE} is up to date ({items} items)");
        return Ok(());
    }
    bail!(
        "{FILE} is out of date: if the change of the interface is meant, run `cargo xtask public-api` and commit the file\n{}",
        changes.join("\n")
    );
}

/// The list as the sources give it.
#[cfg(feature = "public-api")]
fn list(ws: &Workspace) -> Result<String> {
    let mut items = Vec::new();
    for (package, features) in CRATES {
        let json = rustdoc_json(ws, package, features)?;
        check_format(&workspace::read(&json)?)?;
        let api = public_api::Builder::from_rustdoc_json(&json)
            .omit_blanket_impls(true)
            .omit_auto_trait_impls(true)
            .omit_auto_derived_impls(true)
            .build()
            .with_context(|| format!("cannot read {}", json.display()))?;
        items.extend(api.items().map(ToString::to_string));
    }
    Ok(render(items.into_iter()))
}

/// The lines, sorted by path. The kind of an item precedes its path and is not compared.
fn render(items: impl Iterator<Item = String>) -> String {
    let mut lines: Vec<String> = items.collect();
    lines.sort_by(|a, b| (path_of(a), a).cmp(&(path_of(b), b)));
    lines.dedup();
    let mut text = HEADER.to_owned();
    for line in lines {
        text.push_str(&line);
        text.push('\n');
    }
    text
}

/// The part of a line from the item's path on. An implementation follows its type.
fn path_of(line: &str) -> &str {
    let from =
        if line.starts_with("impl") { line.rfind(" for ").map_or(0, |at| at + " for ".len()) } else { 0 };
    line[from..].find("epoxide").map_or(line, |at| &line[from + at..])
}

/// The lines that only one of the two has, as a diff marks them.
fn changes(committed: &str, fresh: &str) -> Vec<String> {
    let (old, new): (BTreeSet<&str>, BTreeSet<&str>) = (committed.lines().collect(), fresh.lines().collect());
    let mut changes: Vec<(&str, char)> = old.difference(&new).map(|line| (*line, '-')).collect();
    changes.extend(new.difference(&old).map(|line| (*line, '+')));
    changes.sort_by(|a, b| (path_of(a.0), a.1 == '+').cmp(&(path_of(b.0), b.1 == '+')));
    changes.into_iter().map(|(line, mark)| format!("{mark} {line}")).collect()
}

/// Has rustdoc describe a crate; the file. The build directory is one of its own. The variable that
/// allows an unstable option would make cargo rebuild dependencies, back and forth, in a directory
/// shared with other builds.
fn rustdoc_json(ws: &Workspace, package: &str, features: &[&str]) -> Result<PathBuf> {
    let target = ws.target("public-api");
    let mut command = ws.cargo();
    command
        .args(["rustdoc", "--quiet", "--package", package, "--lib", "--features", &features.join(",")])
        .arg("--target-dir")
        .arg(&target)
        .args(["--", "-Z", "unstable-options", "--output-format", "json", "--cap-lints", "allow"])
        .env("RUSTC_BOOTSTRAP", "1");
    workspace::run(&mut command)?;
    Ok(target.join(format!("doc/{}.json", package.replace('-', "_"))))
}

/// Rejects another compiler's output, before its JSON is misread.
fn check_format(json: &str) -> Result<()> {
    #[derive(serde::Deserialize)]
    struct Described {
        format_version: u64,
    }
    let Described { format_version } = serde_json::from_str(json).context("this is not rustdoc's JSON")?;
    ensure!(
        format_version == JSON_FORMAT,
        "this compiler's rustdoc writes JSON of form {format_version}, and form {JSON_FORMAT} is read: use the toolchain that \
         rust-toolchain.toml pins; where that has moved on, take the version of `public-api` that fits it (xtask/Cargo.toml) \
         and change JSON_FORMAT"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_has_what_docs_rs_shows() {
        let ws = crate::repository::find().unwrap();
        let mut command = ws.cargo();
        command.args(["metadata", "--quiet", "--locked", "--no-deps", "--format-version", "1"]);
        let metadata: serde_json::Value =
            serde_json::from_str(&workspace::capture(&mut command).unwrap()).unwrap();
        for (name, features) in CRATES {
            let packages = metadata["packages"].as_array().unwrap();
            let package = packages.iter().find(|package| package["name"] == name).unwrap();
            let shown = package["metadata"]["docs"]["rs"]["features"].as_array().cloned();
            assert_eq!(shown.unwrap_or_default(), features, "{name}: package.metadata.docs.rs");
        }
    }

    #[test]
    fn lines_are_sorted_by_path_and_an_implementation_follows_its_type() {
        let lines = [
            "pub fn epoxide::b::f()",
            "impl core::fmt::Display for epoxide::a::T",
            "pub struct epoxide::a::T",
        ];
        let text = render(lines.iter().map(ToString::to_string));
        let list: Vec<&str> = text.lines().filter(|line| !line.starts_with("# ")).collect();
        assert_eq!(list, [lines[1], lines[2], lines[0]]);
    }

    #[test]
    fn a_changed_line_is_told_twice() {
        let (old, new) =
            ("pub fn epoxide::f()\npub fn epoxide::g()\n", "pub fn epoxide::f(u8)\npub fn epoxide::g()\n");
        assert_eq!(changes(old, new), ["- pub fn epoxide::f()", "+ pub fn epoxide::f(u8)"]);
        assert!(changes(new, new).is_empty());
    }

    #[test]
    fn another_compiler_s_json_is_refused() {
        assert!(check_format(r#"{"root": 0, "format_version": 57}"#).is_ok());
        let error = check_format(r#"{"root": 0, "format_version": 58}"#).unwrap_err().to_string();
        assert!(error.contains("form 58") && error.contains("rust-toolchain.toml"), "{error}");
        assert!(check_format("{}").is_err());
    }
}
