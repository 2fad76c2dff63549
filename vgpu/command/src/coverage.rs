//! `vgpu coverage`: how many instructions of PTX files have opcodes that the virtual GPU supports.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Result;
use epoxide_vgpu::{Class, Module, ptx, supported_opcode};
use serde_json::{Map, json};

use crate::check;
use crate::names::readable;
use crate::output::{Document, Finding, Format, Place, Verdict, read};

/// Arguments of the command.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// PTX files
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// List the supported opcodes too
    #[arg(long)]
    all: bool,
    /// Form of the output
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

/// An opcode with its modifiers, over all files.
#[derive(Default)]
struct Opcode {
    count: u64,
    kernels: u64,
    first: Option<Place>,
}

/// Counts the opcodes, and names those that are not supported and the files that are no PTX.
///
/// # Errors
/// A file cannot be read.
pub fn run(args: &Args) -> Result<Verdict> {
    let mut document = Document { command: "coverage", findings: vec![], notes: vec![], more: Map::new() };
    let mut opcodes: BTreeMap<String, Opcode> = BTreeMap::new();
    let (mut kernels, mut runs) = (0, 0);
    for path in &args.files {
        let text = read(path)?;
        let refusals = Module::refusals(&text);
        let Ok(file) = ptx::parse(&text) else {
            // A file without counts is no clean file.
            document.findings.extend(refusals.iter().map(|refusal| check::finding(path, &text, refusal)));
            continue;
        };
        kernels += file.entries.len();
        let mut refused: Vec<String> = refusals.into_iter().map(|r| r.kernel).collect();
        refused.sort_unstable();
        refused.dedup();
        if refused.first().is_none_or(|first| !first.is_empty()) {
            runs += file.entries.len() - refused.len();
        }
        let functions = file.functions.iter().filter_map(|f| Some((&f.name, f.body.as_ref()?)));
        for (name, body) in file.entries.iter().map(|e| (&e.name, &e.body)).chain(functions) {
            let mut here: BTreeMap<&str, u64> = BTreeMap::new();
            for stmt in body {
                let ptx::Stmt::Inst(inst) = stmt else { continue };
                *here.entry(&inst.opcode).or_default() += 1;
                let opcode = opcodes.entry(inst.opcode.clone()).or_default();
                opcode.first.get_or_insert_with(|| Place {
                    kernel: readable(name),
                    ptx: path.clone(),
                    at: file.lines.instruction(inst.pos.line, inst.whole.of(&text), inst.source),
                });
            }
            for (opcode, count) in here {
                let known = opcodes.entry(opcode.to_owned()).or_default();
                (known.count, known.kernels) = (known.count + count, known.kernels + 1);
            }
        }
    }
    let mut sorted: Vec<(&String, &Opcode)> = opcodes.iter().collect();
    sorted.sort_by_key(|(name, opcode)| (std::cmp::Reverse(opcode.count), *name));
    let mut list = vec![];
    let (mut all, mut have) = (0, 0);
    for (name, Opcode { count, kernels, first }) in sorted {
        let supported = supported_opcode(name);
        (all, have) = (all + count, have + if supported { *count } else { 0 });
        list.push(json!({ "opcode": name, "count": count, "kernels": kernels, "supported": supported }));
        if supported {
            if args.all {
                document.notes.push(format!("{count:>8}  {name}"));
            }
            continue;
        }
        let place = first.as_ref().map(|place| format!("{}:{}", place.ptx.display(), place.at.ptx_line));
        document.findings.push(Finding {
            kind: "unsupported-opcode".into(),
            class: Class::Stopped,
            hazard: None,
            text: format!(
                "  {name}, in {kernels} kernels or functions, first at {}",
                place.unwrap_or_default()
            ),
            places: first.iter().cloned().collect(),
            occurrences: *count,
            seeds: vec![],
            accepted: None,
            ended_run: false,
            gaps: vec![],
            cause: None,
        });
    }
    document.notes.push(format!(
        "{have} of {all} instructions ({:.2} %) have opcodes that the virtual GPU supports; {runs} of {kernels} kernels run",
        if all == 0 { 100.0 } else { 100.0 * have as f64 / all as f64 }
    ));
    document.more.insert("instructions".into(), json!({ "all": all, "supported": have }));
    document.more.insert("kernels".into(), json!({ "all": kernels, "run": runs }));
    document.more.insert("opcodes".into(), json!(list));
    document.print(args.format)
}
