//! A PTX file, by text and by ptxas.

use std::path::Path;

use anyhow::{Result, ensure};

use super::finding::{Expect, Finding};
use super::rules;
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
