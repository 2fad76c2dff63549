//! Diagnosis of this machine for building PTX, with a remedy for each missing part.

use anyhow::Result;

use crate::workspace::{Workspace, capture};
use crate::{nvvm, ptxas, toolchain};

/// Prints the report. It never fails: all of it is optional for users of the library.
pub fn run(ws: &Workspace) -> Result<()> {
    println!("Kernel compiler, the first one wins:");
    for (place, found) in toolchain::survey(ws) {
        match found {
            Ok(compiler) => have(place, &format!("{}, {}", compiler.version, compiler.rustc.display())),
            Err(error) => lack(place, &format!("{:#}", error.root_cause()), &format!("{error}")),
        }
    }

    println!("\nptxas, for the last lint:");
    match ptxas::find(ws) {
        Some(file) => match capture(std::process::Command::new(&file).arg("--version")) {
            Ok(version) => have("ptxas", &format!("{}, {}", last_line(&version), file.display())),
            Err(error) => lack("ptxas", &format!("{error:#}"), ptxas::REMEDY),
        },
        None => lack("ptxas", "not found", ptxas::REMEDY),
    }

    println!("\nThe optional nvvm back end:");
    match nvvm::Parts::find(ws) {
        Ok(_) => have("nvvm", "complete"),
        Err(missing) => println!("  {missing}"),
    }

    let channel = toolchain::rustup::CHANNEL;
    println!(
        "\nIf cargo stops with \"toolchain '{channel}' is not installed\": `rustup toolchain install {channel}`, or name one you have: \
         `RUSTUP_TOOLCHAIN=stable cargo ..`. Any stable from {} on builds programs that launch kernels.",
        env!("CARGO_PKG_RUST_VERSION")
    );
    Ok(())
}

fn have(what: &str, detail: &str) {
    println!("  [x] {what}: {detail}");
}

fn lack(what: &str, why: &str, remedy: &str) {
    println!("  [ ] {what}: {why}\n      remedy: {remedy}");
}

fn last_line(text: &str) -> &str {
    text.lines().last().unwrap_or_default()
}
