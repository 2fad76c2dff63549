//! `vgpu check`: everything in PTX files that the virtual GPU rejects.

use std::path::{Path, PathBuf};

use anyhow::Result;
use epoxide_vgpu::{
    Class, InstructionPlace, Module, Refusal, ReportPlace, UnwrittenRegister, brief_name, ptx,
};
use serde_json::{Map, json};

use crate::names::readable;
use crate::output::{Document, Finding, Format, Place, Verdict, read};

/// Arguments of the command.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// PTX files
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Form of the output
    #[arg(long, value_enum, default_value = "text")]
    format: Format,
}

/// Lists everything that is rejected in each file.
///
/// # Errors
/// A file cannot be read.
pub fn run(args: &Args) -> Result<Verdict> {
    let mut document = Document { command: "check", findings: vec![], notes: vec![], more: Map::new() };
    let mut files = vec![];
    for path in &args.files {
        let text = read(path)?;
        let (module, refusals) = match Module::parse_supported(&text) {
            Ok((module, refusals)) => (Some(module), refusals),
            Err(error) => (None, vec![Refusal { kernel: String::new(), error }]),
        };
        let kernels = ptx::parse(&text).map_or(0, |file| file.entries.len());
        let mut refused: Vec<&str> = refusals.iter().map(|refusal| refusal.kernel.as_str()).collect();
        refused.sort_unstable();
        refused.dedup();
        // An error outside of all kernels keeps all of them from running.
        let runs = if refused.contains(&"") { 0 } else { kernels - refused.len() };
        document.notes.extend(module.iter().flat_map(unwritten_registers));
        document.notes.push(format!("{}: {runs} of {kernels} kernels run", path.display()));
        files.push(json!({ "file": path.display().to_string(), "kernels": kernels, "run": runs }));
        document.findings.extend(refusals.iter().map(|refusal| finding(path, &text, refusal)));
    }
    document.more.insert("files".into(), json!(files));
    document.print(args.format)
}

/// A line of the source that reads registers which nothing can have written.
struct UnwrittenRead {
    place: ReportPlace,
    /// The registers in the first kernel.
    registers: Vec<String>,
    kernels: Vec<String>,
}

/// Notes on such lines: instances of a template have one many times.
fn unwritten_registers(module: &Module) -> Vec<String> {
    let mut lines: Vec<UnwrittenRead> = vec![];
    for kernel in module.kernels() {
        for UnwrittenRegister { register, at } in kernel.unwritten_registers() {
            let name = brief_name(kernel.name());
            // Whichever kernel.
            let place = ReportPlace { kernel: String::new(), at };
            match lines.iter_mut().find(|line| line.place.is_same_line(&place)) {
                Some(line) => {
                    if line.place == place {
                        line.registers.push(register);
                    }
                    if !line.kernels.contains(&name) {
                        line.kernels.push(name);
                    }
                }
                None => lines.push(UnwrittenRead { place, registers: vec![register], kernels: vec![name] }),
            }
        }
    }
    let note = |UnwrittenRead { place, registers, kernels }: &UnwrittenRead| {
        let (at, registers) = (&place.at, registers.join("', '"));
        let ptx = at.source.as_ref().map_or_else(String::new, |_| format!(" (PTX line {})", at.ptx_line));
        let others = match kernels.len() - 1 {
            0 => String::new(),
            1 => ", and as many in another kernel".to_owned(),
            more => format!(", and as many in {more} other kernels"),
        };
        format!("{}: nothing writes '{registers}', read {at}{ptx}{others}", kernels[0])
    };
    lines.iter().map(note).collect()
}

/// The finding of a rejection in a file with this text.
pub fn finding(path: &Path, text: &str, Refusal { kernel, error, .. }: &Refusal) -> Finding {
    let kernel = readable(kernel);
    let at = place_of(text, error.line, &error.source_line);
    let mut message = String::new();
    if !kernel.is_empty() {
        message += &format!("  in kernel '{kernel}'\n");
    }
    if at.source.is_some() {
        message += &format!("  {at}\n");
    }
    message += &format!("  {}:{}:{}: {}", path.display(), error.line, error.column, error.message);
    message += &format!("\n  | {}", error.source_line.trim());
    let place = Place { kernel, ptx: path.to_owned(), at };
    Finding {
        kind: "refused".into(),
        class: Class::Stopped,
        hazard: None,
        text: message,
        places: vec![place],
        occurrences: 1,
        seeds: vec![],
        accepted: None,
        ended_run: false,
        gaps: vec![],
        cause: None,
    }
}

/// The place of the instruction at a line of the PTX.
fn place_of(text: &str, line: usize, source_line: &str) -> InstructionPlace {
    let file = ptx::parse(text).unwrap_or_default();
    let functions = file.functions.iter().filter_map(|function| function.body.as_ref());
    let bodies = file.entries.iter().map(|entry| &entry.body).chain(functions);
    let source = bodies.flatten().find_map(|stmt| match stmt {
        ptx::Stmt::Inst(inst) if inst.pos.line == line => inst.source,
        _ => None,
    });
    file.lines.instruction(line, source_line, source)
}
