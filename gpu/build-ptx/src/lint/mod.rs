//! Requirements of every PTX file, from any compiler.
//!
//! LLVM does not read inline PTX, and several constructs compile to something legal but wrong:
//! these lints are the net. Each rule is one small file, with a snippet that passes and one that
//! does not. Exceptions are in the kernel's attribute, which the PTX repeats.

mod arithmetic;
mod atomics;
mod barriers;
mod collectives;
mod dependent;
mod entries;
mod finding;
mod functions;
mod locals;
mod module;
mod opcodes;
mod readonly;
mod rules;
#[cfg(test)]
mod testing;

use std::path::Path;

use anyhow::{Result, ensure};

pub use self::finding::{Expect, Finding};
pub use self::rules::run;
use crate::job::Job;
use crate::workspace::Workspace;
use crate::{described, ptxas};

/// Lints a PTX file by text and by ptxas, prints what each kernel uses, and fails on any finding.
pub fn lint_file(ws: &Workspace, job: &Job, file: &Path, text: &str) -> Result<()> {
    let described = described::kernels(text);
    let expect =
        Expect { described: &described, version: job.backend.version_ceiling(), target: job.arch.sm() };
    let mut findings = rules::run(text, &expect);
    match ptxas::find(ws) {
        Some(ptxas) => match ptxas::assemble(&ptxas, file, job.arch.sm()) {
            Ok(usages) => {
                print!("{}", ptxas::table(&usages));
                findings.extend(ptxas::check(&usages, &described));
            }
            Err(error) => findings.push(Finding::new("ptxas", 0, format!("{error:#}"))),
        },
        None => println!("skipped ptxas: {}", ptxas::REMEDY),
    }
    for finding in &findings {
        eprintln!("{}: {finding}", ws.display(file));
    }
    ensure!(findings.is_empty(), "{}: {} lint findings", ws.display(file), findings.len());
    println!("{}: lints pass ({} kernels)", ws.display(file), described.len());
    Ok(())
}
