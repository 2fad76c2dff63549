//! PTX as lines, each with its kernel's own Rust line. A line holds one statement, as LLVM writes
//! it, or a block, `{ .reg .pred p; mbarrier.. }`. A faulty text has as many lines as the sound
//! one, so that line numbers mean the same in both.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use epoxide_vgpu::ptx::{self, Instruction, Stmt};

/// Rust file and line.
pub type Place = (String, u32);

/// A line of a kernel.
#[derive(Clone, Debug, Default)]
pub struct Line {
    /// Number in the text, from 1.
    pub number: usize,
    /// The line as it is, trimmed: a statement, a label, or a remark.
    pub text: String,
    /// Its instructions, each with its operands as written.
    instructions: Vec<(Instruction, Vec<String>)>,
    /// Whether the line has a label.
    labelled: bool,
    /// The place in the kernel; `None` if the line is no instruction.
    pub own: Option<Place>,
    /// Where it was inlined from, if it was.
    pub inlined: Option<Place>,
    /// The calls that `own` was inlined for, the nearest first.
    pub callers: Vec<Place>,
}

/// The lines from a kernel's first instruction to its last.
#[derive(Debug)]
pub struct Body {
    /// The entry's name.
    pub kernel: String,
    /// Its lines.
    pub lines: Vec<Line>,
}

/// The bodies of these kernels, in this order; those that the text lacks are left out.
pub fn bodies(text: &str, kernels: &[&str]) -> Result<Vec<Body>> {
    let file = ptx::parse(text).context("the PTX to make faults in")?;
    let texts: Vec<&str> = text.lines().collect();
    let bodies = kernels.iter().filter_map(|name| file.entries.iter().find(|entry| entry.name == *name));
    let body = |entry: &ptx::Entry| {
        let mut lines: BTreeMap<usize, Line> = BTreeMap::new();
        for stmt in &entry.body {
            match stmt {
                Stmt::Label { pos, .. } => lines.entry(pos.line).or_default().labelled = true,
                Stmt::Inst(inst) => {
                    let line = lines.entry(inst.whole.line).or_default();
                    if line.instructions.is_empty() {
                        let place = file.lines.instruction(inst.whole.line, "", inst.source);
                        (line.own, line.inlined, line.callers) = (place.source, place.inlined, place.callers);
                    }
                    let operands = inst.operands.iter().map(|(_, span)| span.of(text).to_owned()).collect();
                    line.instructions.push((inst.clone(), operands));
                }
                _ => {}
            }
        }
        let mut numbers = entry.instructions().map(|inst| inst.whole.line);
        let (first, last) = (numbers.next().unwrap_or(1), numbers.last().unwrap_or(0));
        let line = |number: usize| {
            let line = lines.remove(&number).unwrap_or_default();
            Line { number, text: texts.get(number - 1).map_or("", |text| text.trim()).to_owned(), ..line }
        };
        Body { kernel: entry.name.clone(), lines: (first..=last).map(line).collect() }
    };
    Ok(bodies.map(body).collect())
}

impl Line {
    /// The main instruction. The other instructions of a block prepare it or take its result.
    fn main(&self) -> Option<&(Instruction, Vec<String>)> {
        let is_main = |(inst, _): &&(Instruction, _)| ["mbarrier", "vote"].contains(&inst.base());
        self.instructions.iter().find(is_main).or(self.instructions.first())
    }

    /// Whether the line is a block of its own.
    fn is_block(&self) -> bool {
        self.text.starts_with('{')
    }

    /// Opcode with modifiers, of the main instruction in a block. Empty for labels, directives and
    /// remarks.
    pub fn opcode(&self) -> &str {
        self.main().map_or("", |(inst, _)| &inst.opcode)
    }

    /// Whether control can enter or leave here: labels and branches.
    pub fn ends_block(&self) -> bool {
        self.labelled
            || self.main().is_some_and(|(inst, _)| ["bra", "brx", "ret", "exit"].contains(&inst.base()))
    }

    /// The operands of a statement that is no block, as written.
    pub fn operands(&self) -> Vec<&str> {
        let operands = self.main().filter(|_| !self.is_block()).map(|(_, operands)| operands);
        operands.into_iter().flatten().map(String::as_str).collect()
    }

    /// All registers of the line.
    pub fn registers(&self) -> Vec<&str> {
        let names = self.instructions.iter().flat_map(|(inst, _)| {
            let guard = inst.guard.iter().map(|(name, _)| name.as_str());
            guard.chain(inst.operands.iter().flat_map(|(operand, _)| operand.names()))
        });
        names.filter(is_register).collect()
    }

    /// The registers that the line writes; of a block, all it names.
    pub fn writes(&self) -> Vec<&str> {
        if self.is_block() {
            return self.registers();
        }
        let destination = self.main().and_then(|(inst, _)| inst.destination());
        destination.map_or_else(Vec::new, |operand| operand.names()).into_iter().filter(is_register).collect()
    }
}

/// Special registers such as `%tid.x` have no number.
fn is_register(name: &&str) -> bool {
    name.starts_with('%') && name.ends_with(|c: char| c.is_ascii_digit())
}

/// The text with some lines replaced: `(number, new text)`.
pub fn with_lines(text: &str, edits: &[(usize, String)]) -> String {
    let mut out = String::with_capacity(text.len() + 256);
    for (index, line) in text.lines().enumerate() {
        let edit = edits.iter().find(|(number, _)| *number == index + 1);
        out.push_str(edit.map_or(line, |(_, new)| new));
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The line between two others.
    fn line(text: &str) -> Line {
        let text = format!(".version 8.4\n.entry k()\n{{\nret;\n{text}\nret;\n}}");
        bodies(&text, &["k"]).unwrap().remove(0).lines.remove(1)
    }

    #[test]
    fn opcodes_and_registers() {
        let wait = line(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%r4], %r5; selp.u32 %r6, 1, 0, p; }",
        );
        assert_eq!(wait.opcode(), "mbarrier.try_wait.parity.shared.b64");
        assert_eq!(wait.writes(), ["%r4", "%r5", "%r6"]);
        let vector = line("@%p3 ld.global.v4.b32 \t{%r1, %r2, %r3, %r4}, [%rd7+16];");
        assert_eq!(vector.opcode(), "ld.global.v4.b32");
        assert_eq!(vector.writes(), ["%r1", "%r2", "%r3", "%r4"]);
        assert_eq!(vector.registers(), ["%p3", "%r1", "%r2", "%r3", "%r4", "%rd7"]);
        let add = line("add.s64 \t%rd3, %rd1, %rd2;");
        assert_eq!((add.writes(), add.operands()), (vec!["%rd3"], vec!["%rd3", "%rd1", "%rd2"]));
        assert!(line("st.global.b32 [%rd1], %r1;").writes().is_empty());
        assert_eq!(line("mov.u32 %r19, %laneid;").registers(), ["%r19"]);
        for text in ["$L__BB0_3:", ".loc 1 2 3", "// begin inline asm", ""] {
            assert_eq!(line(text).opcode(), "", "{text}");
        }
        assert!(line("$L__BB0_3:").ends_block() && line("@%p1 bra \t$L__BB0_3;").ends_block());
        assert!(!line("bar.warp.sync 0xffffffff;").ends_block());
    }

    #[test]
    fn replaced_lines_keep_the_others_numbers() {
        assert_eq!(with_lines("a\nb\nc\n", &[(2, "x y".to_owned())]), "a\nx y\nc\n");
        assert_eq!(with_lines("a\nb\n", &[(1, String::new())]), "\nb\n");
    }
}
