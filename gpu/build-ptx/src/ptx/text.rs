//! Statements with their lines, grouped by entry.

/// A PTX module, cut into statements.
#[derive(Debug, Default)]
pub struct Module {
    /// Statements outside every body: directives and variables.
    pub items: Vec<Statement>,
    /// The `.entry` kernels.
    pub entries: Vec<Entry>,
    /// The `.func` definitions and declarations, by their header.
    pub functions: Vec<Statement>,
}

/// One kernel.
#[derive(Debug)]
pub struct Entry {
    /// The name the host looks up.
    pub name: String,
    /// The line its header starts on.
    pub line: usize,
    /// Its parameters, in order.
    pub params: Vec<Param>,
    /// Directives between the parameters and the body, such as
    /// `.maxntid 256, 1, 1 .minnctapersm 2`.
    pub directives: String,
    /// The statements of the body, nested scopes included.
    pub body: Vec<Statement>,
}

/// Size and alignment of one kernel parameter, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Param {
    /// Bytes it takes.
    pub size: usize,
    /// Bytes it is aligned to.
    pub align: usize,
}

/// One statement without its semicolon, white space reduced to single blanks.
#[derive(Clone, Debug)]
pub struct Statement {
    /// The line it starts on, from 1.
    pub line: usize,
    /// Its text.
    pub text: String,
    /// Whether it stands between the compiler's marks around an `asm!`.
    pub inline_asm: bool,
}

impl Statement {
    /// The opcode with its modifiers, or `None` for directives, declarations and labels.
    pub fn opcode(&self) -> Option<&str> {
        let mut words = self.text.split(' ');
        let mut word = words.next()?;
        if word.starts_with('@') {
            word = words.next()?;
        }
        (!word.starts_with('.') && !word.ends_with(':')).then_some(word)
    }

    /// The guard without its `@`, such as `%p1` or `!%p1`.
    pub fn guard(&self) -> Option<&str> {
        self.text.strip_prefix('@')?.split(' ').next()
    }

    /// The name of a label.
    pub fn label(&self) -> Option<&str> {
        self.text.strip_suffix(':')
    }

    /// The operands of an instruction, as written: `%r1`, `[%rd1+8]`, `{%r1, %r2}`.
    pub fn operands(&self) -> Vec<&str> {
        let Some((_, text)) = self.opcode().and_then(|opcode| self.text.split_once(opcode)) else {
            return Vec::new();
        };
        let (mut depth, mut start, mut found) = (0, 0, Vec::new());
        for (at, c) in text.char_indices() {
            match c {
                '{' | '[' | '(' => depth += 1,
                '}' | ']' | ')' => depth -= 1,
                ',' if depth == 0 => {
                    found.push(text[start..at].trim());
                    start = at + 1;
                }
                _ => {}
            }
        }
        found.push(text[start..].trim());
        found.retain(|operand| !operand.is_empty());
        found
    }

    /// Whether the opcode, without its modifiers, is `name`.
    pub fn is(&self, name: &str) -> bool {
        self.opcode().is_some_and(|opcode| opcode.split('.').next() == Some(name))
    }

    /// Whether the opcode has this modifier, given without its dot.
    pub fn has_modifier(&self, modifier: &str) -> bool {
        self.opcode().is_some_and(|opcode| opcode.split('.').skip(1).any(|part| part == modifier))
    }

    /// The words of the statement: identifiers, registers and numbers.
    pub fn words(&self) -> impl Iterator<Item = &str> {
        self.text.split(|c: char| !is_name_char(c)).filter(|word| !word.is_empty())
    }
}

impl Module {
    /// Reads a module. Never fails: text that is not PTX gives statements that the lints or ptxas
    /// refuse.
    pub fn read(text: &str) -> Self {
        let mut reader = Reader::default();
        for (index, line) in text.lines().enumerate() {
            reader.line(index + 1, line);
        }
        reader.flush();
        reader.module
    }

    /// All statements in bodies, each with the entry it belongs to.
    pub fn instructions(&self) -> impl Iterator<Item = (&Entry, &Statement)> {
        self.entries.iter().flat_map(|entry| entry.body.iter().map(move |statement| (entry, statement)))
    }

    /// The Rust source behind a line of an entry, by the `.loc` before it. Code from the `simt`
    /// wrappers and from `core` has their location. The place where the kernel's own code called it
    /// follows; if that is unknown, the last line of a kernel before it.
    pub fn source(&self, entry: &Entry, line: usize) -> Option<String> {
        let before = entry.body.iter().take_while(|statement| statement.line <= line);
        let locations: Vec<_> = before.filter(|statement| statement.text.starts_with(".loc ")).collect();
        let last = locations.last()?;
        let here = self.location(&last.text)?;
        if let Some((_, caller)) = last.text.split_once(" inlined_at ") {
            let caller = self.location(&format!(".loc {caller}")).filter(|caller| *caller != here);
            return Some(caller.map_or(here.clone(), |caller| format!("{here}, inlined at {caller}")));
        }
        let mut kernels = locations.iter().rev().filter_map(|statement| self.location(&statement.text));
        let kernel = kernels.find(|location| location.contains("/kernels/"))?;
        Some(if here == kernel { here } else { format!("{here}, after {kernel}") })
    }

    /// `file:line` of a `.loc <file> <line> <column>`.
    fn location(&self, loc: &str) -> Option<String> {
        let mut numbers = loc.strip_prefix(".loc ")?.split(' ');
        let (file, line) = (numbers.next()?, numbers.next()?);
        let start = format!(".file {file} ");
        let path = self.items.iter().find_map(|item| item.text.strip_prefix(&start))?;
        Some(format!("{}:{line}", path.trim_matches('"')))
    }
}

fn is_name_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%')
}

#[derive(Default)]
struct Reader {
    module: Module,
    text: String,
    start_line: usize,
    start_asm: bool,
    in_asm: bool,
    /// Open braces inside the current statement: vector operands, initialisers, sections.
    operand_braces: usize,
    /// Open bodies and scopes; 0 is module scope.
    scopes: usize,
    in_entry: bool,
}

impl Reader {
    fn line(&mut self, number: usize, line: &str) {
        let (code, comment) = split_comment(line);
        match comment.trim() {
            "begin inline asm" => self.in_asm = true,
            "end inline asm" => self.in_asm = false,
            _ => {}
        }
        let mut quoted = false;
        let mut chars = code.chars().peekable();
        while let Some(c) = chars.next() {
            if quoted || c == '"' {
                quoted ^= c == '"';
                self.push(number, c);
                continue;
            }
            match c {
                ';' if self.operand_braces == 0 => self.flush(),
                '{' if self.opens_body() => self.open(),
                '{' => {
                    self.operand_braces += 1;
                    self.push(number, c);
                }
                '}' if self.operand_braces > 0 => {
                    self.operand_braces -= 1;
                    self.push(number, c);
                    if self.operand_braces == 0 && self.text.starts_with(".section") {
                        self.flush();
                    }
                }
                '}' => self.close(),
                ':' if chars.peek() != Some(&':') && self.is_label() => {
                    self.push(number, c);
                    self.flush();
                }
                _ => self.push(number, c),
            }
        }
        // The comment of a `.loc` belongs to the statement.
        if self.text.starts_with(".loc") && comment.trim_start().starts_with("inlined_at ") {
            comment.chars().for_each(|c| self.push(number, c));
        }
        let ends_with_line = [".version", ".target", ".address_size", ".loc", ".file"];
        if ends_with_line.iter().any(|directive| self.text.starts_with(directive)) {
            self.flush();
        }
        self.push(number, ' ');
    }

    fn push(&mut self, line: usize, c: char) {
        if c.is_whitespace() {
            if !self.text.is_empty() && !self.text.ends_with(' ') {
                self.text.push(' ');
            }
            return;
        }
        if self.text.is_empty() {
            self.start_line = line;
            self.start_asm = self.in_asm;
        }
        self.text.push(c);
    }

    fn is_header(&self, kind: &str) -> bool {
        self.scopes == 0 && self.text.split([' ', '(']).any(|word| word == kind)
    }

    fn opens_body(&self) -> bool {
        self.text.is_empty() || self.is_header(".entry") || self.is_header(".func")
    }

    fn is_label(&self) -> bool {
        !self.text.is_empty() && self.text.chars().all(is_name_char)
    }

    fn take(&mut self) -> Option<Statement> {
        let text = std::mem::take(&mut self.text);
        let text = text.trim_end();
        (!text.is_empty()).then(|| Statement {
            line: self.start_line,
            text: text.to_owned(),
            inline_asm: self.start_asm,
        })
    }

    fn open(&mut self) {
        let is_entry = self.is_header(".entry");
        self.scopes += 1;
        let Some(header) = self.take() else { return };
        if is_entry {
            self.in_entry = true;
            self.module.entries.push(entry(&header));
        } else {
            self.module.functions.push(header);
        }
    }

    fn close(&mut self) {
        self.flush();
        self.scopes = self.scopes.saturating_sub(1);
        self.in_entry &= self.scopes > 0;
    }

    fn flush(&mut self) {
        let is_function = self.is_header(".func");
        let Some(statement) = self.take() else { return };
        let list = match self.module.entries.last_mut() {
            Some(entry) if self.in_entry => &mut entry.body,
            _ if is_function => &mut self.module.functions,
            _ => &mut self.module.items,
        };
        list.push(statement);
    }
}

/// Cuts a `//` comment off, leaving quoted text alone.
pub fn split_comment(line: &str) -> (&str, &str) {
    let mut quoted = false;
    let bytes = line.as_bytes();
    for (i, byte) in bytes.iter().enumerate() {
        match byte {
            b'"' => quoted = !quoted,
            b'/' if !quoted && bytes.get(i + 1) == Some(&b'/') => return (&line[..i], &line[i + 2..]),
            _ => {}
        }
    }
    (line, "")
}

fn entry(header: &Statement) -> Entry {
    let after = header.text.split_once(".entry").map_or("", |(_, rest)| rest).trim_start();
    let name_end = after.find(|c: char| !is_name_char(c)).unwrap_or(after.len());
    let (name, rest) = after.split_at(name_end);
    let (params, directives) = match rest.trim_start().strip_prefix('(') {
        Some(rest) => rest.split_once(')').unwrap_or((rest, "")),
        None => ("", rest),
    };
    Entry {
        name: name.to_owned(),
        line: header.line,
        params: params.split(',').filter(|text| !text.trim().is_empty()).map(param).collect(),
        directives: directives.trim().to_owned(),
        body: Vec::new(),
    }
}

/// Reads `.param .u64 .ptr .align 1 name` or `.param .align 8 .b8 name[40]`. The alignment after
/// `.ptr` is that of the pointee.
fn param(text: &str) -> Param {
    let words: Vec<&str> = text.split_whitespace().collect();
    let number_after = |key: &str, within: &[&str]| {
        let at = within.iter().position(|word| *word == key)?;
        within.get(at + 1)?.parse::<usize>().ok()
    };
    let pointer = words.iter().position(|word| *word == ".ptr").unwrap_or(words.len());
    let scalar = words.iter().find_map(|word| {
        let bits = word.strip_prefix(['.']).and_then(|kind| kind.strip_prefix(['u', 's', 'b', 'f']))?;
        bits.parse::<usize>().ok().map(|bits| bits / 8)
    });
    let element = scalar.unwrap_or(0);
    let count = text.split_once('[').and_then(|(_, rest)| rest.split(']').next()?.trim().parse().ok());
    Param {
        size: element * count.unwrap_or(1),
        align: number_after(".align", &words[..pointer]).unwrap_or(element),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
.version 8.4
.target sm_90
.address_size 64
.extern .shared .align 128 .b8 DYN[];
.visible .entry first(
	.param .u64 .ptr .align 1 first_param_0,
	.param .align 8 .b8 first_param_1[40],
	.param .u8 first_param_2
)
.maxntid 256, 1, 1
.minnctapersm 2
{
	.reg .b32 	%r<5>;
	.loc	1 39 0
	// begin inline asm
	{ .reg .u32 b; mov.u32 b, DYN; @!p cp.async.bulk.shared::cluster.global [b], %r1; }
	// end inline asm
$L__BB0_2:
	mov.b32 	{_, %rs6}, %r2; // trailing ; remark
	ret;
}
.visible .entry second()
{
	ret;
}
	.section	.debug_macinfo	{	}
	.file	1 "a//b;c.rs"
"#;

    #[test]
    fn entries_params_and_directives() {
        let module = Module::read(TEXT);
        assert_eq!(module.entries.len(), 2);
        let first = &module.entries[0];
        assert_eq!((first.name.as_str(), first.line), ("first", 6));
        let expected = [(8, 8), (40, 8), (1, 1)].map(|(size, align)| Param { size, align });
        assert_eq!(first.params, expected);
        assert_eq!(first.directives, ".maxntid 256, 1, 1 .minnctapersm 2");
        assert_eq!(module.entries[1].name, "second");
        assert!(module.entries[1].params.is_empty());
        assert!(module.functions.is_empty());
    }

    #[test]
    fn statements_keep_lines_and_asm_marks() {
        let module = Module::read(TEXT);
        let body = &module.entries[0].body;
        let opcodes: Vec<_> = body.iter().filter_map(Statement::opcode).collect();
        assert_eq!(opcodes, ["mov.u32", "cp.async.bulk.shared::cluster.global", "mov.b32", "ret"]);
        let bulk = body.iter().find(|s| s.is("cp")).unwrap();
        assert!(bulk.inline_asm && bulk.line == 17 && bulk.has_modifier("bulk"));
        let ret = body.iter().find(|s| s.is("ret")).unwrap();
        assert!(!ret.inline_asm);
    }

    #[test]
    fn operands_guards_and_labels() {
        let module = Module::read(".entry f() {\nL1:\n@!%p1 ld.global.v2.b32 {%r1, %r2}, [%rd1+8];\nret;\n}");
        let body = &module.entries[0].body;
        assert_eq!(body[0].label(), Some("L1"));
        assert_eq!((body[1].guard(), body[1].label()), (Some("!%p1"), None));
        assert_eq!(body[1].operands(), ["{%r1, %r2}", "[%rd1+8]"]);
        assert!(body[2].operands().is_empty() && body[2].guard().is_none());
    }

    #[test]
    fn module_scope() {
        let module = Module::read(TEXT);
        let items: Vec<_> = module.items.iter().map(|s| s.text.as_str()).collect();
        assert_eq!(items[0], ".version 8.4");
        assert_eq!(items[3], ".extern .shared .align 128 .b8 DYN[]");
        assert_eq!(items.last(), Some(&r#".file 1 "a//b;c.rs""#));
    }

    #[test]
    fn sources_name_the_kernel_too() {
        let text = ".entry f() {\n.loc 1 7 3\nnop;\n.loc 2 9 1\nret;\n}\n.file 1 \"gpu/src/kernels/f.rs\"\n.file 2 \"rust/c.rs\"";
        let module = Module::read(text);
        let source = |line| module.source(&module.entries[0], line);
        assert_eq!(source(1), None);
        assert_eq!(source(3).as_deref(), Some("gpu/src/kernels/f.rs:7"));
        assert_eq!(source(5).as_deref(), Some("rust/c.rs:9, after gpu/src/kernels/f.rs:7"));

        let text = text.replace(".loc 2 9 1", ".loc 2 9 1 // inlined_at 1 8");
        let module = Module::read(&text);
        let source = |line| module.source(&module.entries[0], line);
        assert_eq!(source(5).as_deref(), Some("rust/c.rs:9, inlined at gpu/src/kernels/f.rs:8"));
    }

    #[test]
    fn functions_are_kept_apart() {
        let module =
            Module::read(".extern .func (.param .b32 r) vprintf (.param .b64 a);\n.func f() { ret; }");
        assert_eq!(module.functions.len(), 2);
        assert!(module.entries.is_empty());
    }
}
