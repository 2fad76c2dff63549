//! PTX as lines, each with its kernel's own Rust line. A line holds one statement, as LLVM writes
//! it. A faulty text has as many lines as the sound one, so that line numbers mean the same in
//! both.

use anyhow::{Context, Result};
use epoxide_vgpu::{InstructionPlace, Module};

/// Rust file and line.
pub type Place = (String, u32);

/// A line of a kernel.
#[derive(Clone, Debug)]
pub struct Line {
    /// Number in the text, from 1.
    pub number: usize,
    /// The statement, a label, or a remark.
    pub text: String,
    /// Where it stands in the kernel; `None` for what is no instruction.
    pub own: Option<Place>,
    /// Where it was inlined from, if it was.
    pub inlined: Option<Place>,
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
    let module = Module::parse(text).context("the PTX to make faults in")?;
    let lines: Vec<&str> = text.lines().collect();
    let bodies = kernels.iter().filter_map(|name| module.kernel(name)).map(|kernel| {
        let places: Vec<InstructionPlace> = kernel.places().collect();
        let first = places.iter().map(|place| place.ptx_line).min().unwrap_or(1);
        let last = places.iter().map(|place| place.ptx_line).max().unwrap_or(0);
        let body = (first..=last).map(|number| {
            let place = places.iter().find(|place| place.ptx_line == number);
            Line {
                number,
                text: lines.get(number - 1).copied().unwrap_or("").trim().to_owned(),
                own: place.and_then(|place| place.source.clone()),
                inlined: place.and_then(|place| place.inlined.clone()),
            }
        });
        Body { kernel: kernel.name().to_owned(), lines: body.collect() }
    });
    Ok(bodies.collect())
}

impl Line {
    /// Opcode with modifiers: that of the main instruction where the line is a block of its own,
    /// `{ .reg .pred p; mbarrier.. }`. Empty for labels, directives and remarks.
    pub fn opcode(&self) -> &str {
        let mut rest = self.text.as_str();
        if let Some(block) = rest.strip_prefix('{') {
            // The instruction after the declaration. The block's other instructions prepare it or
            // take its result.
            let mut parts = block.split(';').map(str::trim).filter(|part| !part.starts_with(".reg"));
            let main = |part: &&str| ["mbarrier", "vote"].iter().any(|name| part.starts_with(name));
            rest = parts.clone().find(main).or_else(|| parts.next()).unwrap_or("");
        }
        if rest.starts_with('@') {
            rest = rest.split_once([' ', '\t']).map_or("", |(_, rest)| rest.trim_start());
        }
        let word = rest.split([' ', '\t', ';']).next().unwrap_or("");
        let is_opcode = word.starts_with(|c: char| c.is_ascii_lowercase()) && !word.ends_with(':');
        if is_opcode { word } else { "" }
    }

    /// Whether control can enter or leave here: labels and branches.
    pub fn ends_block(&self) -> bool {
        self.text.ends_with(':')
            || ["bra", "brx", "ret", "exit"].iter().any(|op| self.opcode().starts_with(op))
    }

    /// The operands of a statement that is no block, as written.
    pub fn operands(&self) -> Vec<&str> {
        let Some((_, rest)) = self.text.split_once(self.opcode()) else { return Vec::new() };
        rest.trim().trim_end_matches(';').split(',').map(str::trim).collect()
    }

    /// All registers of the line.
    pub fn registers(&self) -> Vec<&str> {
        let mut found = Vec::new();
        for (at, _) in self.text.match_indices('%') {
            let rest = &self.text[at + 1..];
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric()).unwrap_or(rest.len());
            // Special registers such as %tid.x have no number.
            if rest[..end].ends_with(|c: char| c.is_ascii_digit()) {
                found.push(&self.text[at..at + 1 + end]);
            }
        }
        found
    }

    /// The registers that the line writes; of a block, all it names.
    pub fn writes(&self) -> Vec<&str> {
        const NONE: [&str; 12] = [
            "st.",
            "red.",
            "bra",
            "bar",
            "fence",
            "cp.",
            "ret",
            "exit",
            "trap",
            "nanosleep",
            "mbarrier.init",
            "mbarrier.arrive",
        ];
        let (opcode, registers) = (self.opcode(), self.registers());
        if self.text.starts_with('{') {
            return registers;
        }
        if opcode.is_empty() || NONE.iter().any(|prefix| opcode.starts_with(prefix)) {
            return Vec::new();
        }
        let guard = usize::from(self.text.starts_with('@'));
        let after = self.text.split_once(opcode).map_or("", |(_, rest)| rest.trim_start());
        let many = match after.strip_prefix('{') {
            Some(vector) => vector.split('}').next().unwrap_or("").matches('%').count(),
            None => 1,
        };
        registers.into_iter().skip(guard).take(many).collect()
    }
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

    fn line(text: &str) -> Line {
        Line { number: 1, text: text.to_owned(), own: None, inlined: None }
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
