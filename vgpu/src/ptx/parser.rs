//! PTX text to [`ast`](super::ast). The parser checks the grammar, not the instructions.

use std::collections::HashMap;

use super::ast::*;
use super::lexer::{Tok, Token, error_at, tokenize};
use crate::PtxError;

/// Parses one module. The parser checks the grammar, not the instructions: an unknown one is no
/// error.
///
/// # Errors
/// Text that is not PTX, with its place.
pub fn parse(text: &str) -> Result<File, PtxError> {
    let tokens = tokenize(text)?;
    let mut p = Parser {
        variable_bytes: 0,
        text,
        tokens,
        at: 0,
        file: File::default(),
        locs: Locs::default(),
        calls: HashMap::new(),
    };
    p.module()?;
    Ok(p.file)
}

/// Most bytes of a module's variables: a short text must not take all memory.
const MAX_VARIABLE_BYTES: usize = 64 << 20;
/// Largest alignment of a variable or a parameter.
const MAX_ALIGN: usize = 1 << 16;
/// Most nested calls of an inlined line.
const MAX_CALLS: usize = 64;
/// Most nested braces of an initialiser.
const MAX_DIMENSIONS: usize = 8;

struct Parser<'a> {
    /// Bytes of the `.global` and `.const` variables so far.
    variable_bytes: usize,
    text: &'a str,
    tokens: Vec<Token<'a>>,
    at: usize,
    file: File,
    locs: Locs,
    /// Numbers of the inlined calls of the file.
    calls: HashMap<InlinedCall, u32>,
}

/// The `.loc`s of one kernel.
#[derive(Default)]
struct Locs {
    /// Source position of the last `.loc`.
    source: Option<Source>,
    /// The kernel's own file: that of its first `.loc`.
    home: Option<u32>,
    /// The latest line in it, and the calls that it was inlined for.
    latest_home: Vec<SourceLine>,
    /// Call sites of inlined functions: file, line and column of a line, to those of its call site.
    inlined_at: HashMap<[u32; 3], [u32; 3]>,
}

impl Locs {
    /// The kernel's own line for a `.loc`, and the calls that it was inlined for, the nearest
    /// first. Each place is file, line and column. `listed` has the same of a comment, without an
    /// own line that is the `.loc` itself.
    fn chain(
        &mut self,
        place: [u32; 3],
        inlined_at: Option<[u32; 3]>,
        listed: Vec<SourceLine>,
    ) -> Vec<SourceLine> {
        let home = *self.home.get_or_insert(place[0]);
        match inlined_at {
            Some(caller) => self.inlined_at.insert(place, caller),
            None => self.inlined_at.remove(&place),
        };
        let own = if listed.is_empty() {
            self.called(place)
        } else {
            let first = (place[0] == home).then(|| line_of(place));
            first.into_iter().chain(listed).collect()
        };
        if own[0].file == home {
            self.latest_home.clone_from(&own);
        }
        own
    }

    /// The kernel's own line for a `.loc`, and its calls, by the callers of all `.loc`s so far.
    fn called(&self, place: [u32; 3]) -> Vec<SourceLine> {
        let has_caller = self.inlined_at.contains_key(&place);
        // A chain is as long as calls are nested; a cycle is cut off.
        let mut chain = vec![place];
        while chain.len() < MAX_CALLS
            && let Some(caller) = self.inlined_at.get(&chain[chain.len() - 1])
            && !chain.contains(caller)
        {
            chain.push(*caller);
        }
        let mut chain: Vec<SourceLine> = chain.into_iter().map(line_of).collect();
        match chain.iter().position(|line| Some(line.file) == self.home) {
            Some(first) => chain.split_off(first),
            // Without the chain, the kernel's line before this one is the best guess.
            None if !has_caller && !self.latest_home.is_empty() => self.latest_home.clone(),
            None => chain.split_off(chain.len() - 1),
        }
    }
}

fn line_of([file, line, _]: [u32; 3]) -> SourceLine {
    SourceLine { file, line }
}

/// Bytes of a fundamental PTX type, written with its dot.
pub(crate) fn type_bytes(ty: &str) -> Option<usize> {
    Some(match ty {
        ".b8" | ".u8" | ".s8" => 1,
        ".b16" | ".u16" | ".s16" | ".f16" | ".bf16" => 2,
        ".b32" | ".u32" | ".s32" | ".f32" | ".f16x2" | ".bf16x2" => 4,
        ".b64" | ".u64" | ".s64" | ".f64" => 8,
        ".b128" => 16,
        _ => return None,
    })
}

/// The places after `inlined_at` in a comment: `F L, F L`. Columns are left out.
fn listed_calls(line: &str) -> Vec<SourceLine> {
    let place = |place: &str| {
        let mut numbers = place.split_whitespace().map_while(|word| word.parse().ok());
        Some(SourceLine { file: numbers.next()?, line: numbers.next()? })
    };
    let comment = line.split_once("//").and_then(|(_, comment)| comment.split_once("inlined_at "));
    let places = comment.map_or("", |(_, places)| places).split(',');
    places.map_while(place).take(MAX_CALLS).collect()
}

/// The variable that an initialiser is for.
struct Initialised<'n> {
    pos: Span,
    name: &'n str,
    /// Type and bytes of an element.
    ty: &'n str,
    elem: usize,
}

/// The contents that an initialiser gives.
#[derive(Default)]
struct Initial {
    bytes: Vec<u8>,
    addresses: Vec<InitialAddress>,
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Token<'a> {
        self.tokens[self.at]
    }

    fn next(&mut self) -> Token<'a> {
        let t = self.tokens[self.at];
        if t.tok != Tok::Eof {
            self.at += 1;
        }
        t
    }

    fn pos(&self) -> Span {
        self.peek().span
    }

    /// From `start` to the last token that was taken.
    fn since(&self, start: Span) -> Span {
        let end = self.at.checked_sub(1).map_or(start.end, |last| self.tokens[last].span.end);
        Span { end, ..start }
    }

    fn error<T>(&self, at: Span, message: impl Into<String>) -> Result<T, PtxError> {
        Err(error_at(self.text, at.line, at.column, message))
    }

    fn unexpected<T>(&self, wanted: &str) -> Result<T, PtxError> {
        let found = match self.peek().tok {
            Tok::Word(w) | Tok::Decimal(w) => format!("'{w}'"),
            Tok::Int(v) => format!("'{v}'"),
            Tok::F32(v) => format!("'0f{v:08X}'"),
            Tok::F64(v) => format!("'0d{v:016X}'"),
            Tok::Str(s) => format!("\"{s}\""),
            Tok::Punct(c) => format!("'{c}'"),
            Tok::Eof => "the end of the file".to_string(),
        };
        self.error(self.pos(), format!("expected {wanted}, found {found}"))
    }

    fn eat(&mut self, c: char) -> bool {
        let hit = self.peek().tok == Tok::Punct(c);
        if hit {
            self.at += 1;
        }
        hit
    }

    fn expect(&mut self, c: char) -> Result<(), PtxError> {
        if self.eat(c) { Ok(()) } else { self.unexpected(&format!("'{c}'")) }
    }

    fn eat_word(&mut self, w: &str) -> bool {
        let hit = self.peek().tok == Tok::Word(w);
        if hit {
            self.at += 1;
        }
        hit
    }

    fn word(&mut self, what: &str) -> Result<&'a str, PtxError> {
        match self.peek().tok {
            Tok::Word(w) => {
                self.at += 1;
                Ok(w)
            }
            _ => self.unexpected(what),
        }
    }

    fn int(&mut self, what: &str) -> Result<u64, PtxError> {
        match self.peek().tok {
            Tok::Int(v) => {
                self.at += 1;
                Ok(v)
            }
            _ => self.unexpected(what),
        }
    }

    fn int32(&mut self, what: &str) -> Result<u32, PtxError> {
        let pos = self.pos();
        let v = self.int(what)?;
        u32::try_from(v).or_else(|_| self.error(pos, format!("{v} is too large for {what}")))
    }

    /// Skips a `{ .. }` block, starting at its `{`.
    fn skip_block(&mut self) -> Result<(), PtxError> {
        self.expect('{')?;
        let mut depth = 1;
        while depth > 0 {
            match self.next().tok {
                Tok::Punct('{') => depth += 1,
                Tok::Punct('}') => depth -= 1,
                Tok::Eof => return self.unexpected("'}'"),
                _ => {}
            }
        }
        Ok(())
    }

    fn module(&mut self) -> Result<(), PtxError> {
        loop {
            let pos = self.pos();
            match self.peek().tok {
                Tok::Eof => break,
                Tok::Punct(';') => {
                    self.at += 1;
                }
                Tok::Word(".version") => {
                    self.at += 1;
                    let version = match self.next().tok {
                        Tok::Decimal(v) => v.parse().ok(),
                        _ => None,
                    };
                    match version {
                        Some(v) => self.file.version = v,
                        None => return self.error(pos, ".version needs a number such as 8.4"),
                    }
                }
                Tok::Word(".target") => {
                    self.at += 1;
                    self.file.target = self.word("a target such as sm_90")?.to_string();
                    while self.eat(',') {
                        let option = self.word("a target option")?.to_string();
                        self.file.target_options.push(option);
                    }
                }
                Tok::Word(".address_size") => {
                    self.at += 1;
                    if self.int("an address size")? != 64 {
                        return self.error(pos, "only .address_size 64 is supported");
                    }
                }
                Tok::Word(".file" | ".loc" | ".pragma") => self.line_directive()?,
                Tok::Word(".section") => {
                    self.at += 1;
                    self.word("a section name")?;
                    self.skip_block()?;
                }
                Tok::Word(".visible" | ".weak" | ".extern" | ".common") => {
                    self.at += 1;
                }
                Tok::Word(".entry") => {
                    self.at += 1;
                    let entry = self.entry()?;
                    self.file.entries.push(entry);
                }
                Tok::Word(".func") => {
                    self.at += 1;
                    let function = self.function()?;
                    self.file.functions.push(function);
                }
                Tok::Word(".global" | ".const" | ".shared") => {
                    let before = self.at.checked_sub(1).map(|before| self.tokens[before].tok);
                    let vars = self.variables(before == Some(Tok::Word(".extern")))?;
                    self.file.variables.extend(vars);
                }
                _ => return self.unexpected("a module-level directive"),
            }
        }
        if self.file.version == Version::default() {
            return self.error(Span { line: 1, column: 1, ..Span::default() }, "no .version directive");
        }
        Ok(())
    }

    /// `.file`, `.loc`, `.pragma`.
    fn line_directive(&mut self) -> Result<(), PtxError> {
        let t = self.next();
        match t.tok {
            Tok::Word(".file") => {
                let n = self.int32("a file number")?;
                match self.next().tok {
                    Tok::Str(s) => self.file.lines.files.push((n, s.to_string())),
                    _ => return self.unexpected("a file name"),
                }
                // Optional `, timestamp, size`.
                while self.eat(',') {
                    self.int("a time stamp or size")?;
                }
            }
            Tok::Word(".loc") => {
                let file = self.int32("a file number")?;
                let line = self.int32("a line")?;
                let column = self.column()?;
                let mut caller = None;
                while self.eat(',') {
                    if self.eat_word("function_name") {
                        self.word("a label")?;
                        if self.eat('+') {
                            self.int("an offset")?;
                        }
                    } else if self.eat_word("inlined_at") {
                        caller = Some([self.int32("a file number")?, self.int32("a line")?, self.column()?]);
                    } else {
                        return self.unexpected("'function_name' or 'inlined_at'");
                    }
                }
                // `// inlined_at F L, F L` gives the same in a comment, because ptxas rejects a
                // call site that has no `.loc` of its own.
                let listed = || self.text[t.span.start..].lines().next().map(listed_calls);
                let listed = if caller.is_none() { listed().unwrap_or_default() } else { vec![] };
                self.source_line([file, line, column], caller, listed);
            }
            _ => {
                while !self.eat(';') {
                    if self.next().tok == Tok::Eof {
                        return self.unexpected("';'");
                    }
                }
            }
        }
        Ok(())
    }

    /// Gives the instructions from here on their source; see [`Locs::chain`].
    fn source_line(&mut self, place: [u32; 3], caller: Option<[u32; 3]>, listed: Vec<SourceLine>) {
        if place[1] == 0 {
            self.locs.source = None;
            return;
        }
        let chain = self.locs.chain(place, caller, listed);
        let calls = &mut self.file.lines.calls;
        let call = chain[1..].iter().rev().fold(None, |outer, &at| {
            let number = self.calls.entry(InlinedCall { at, outer }).or_insert_with_key(|call| {
                calls.push(*call);
                calls.len() as u32 - 1
            });
            Some(*number)
        });
        let (innermost, own) = (line_of(place), chain[0]);
        self.locs.source = Some(Source { innermost, column: place[2], own, call });
    }

    /// The column of a `.loc`, which may be left out.
    fn column(&mut self) -> Result<u32, PtxError> {
        if matches!(self.peek().tok, Tok::Int(_)) { self.int32("a column") } else { Ok(0) }
    }

    fn entry(&mut self) -> Result<Entry, PtxError> {
        let pos = self.pos();
        let mut e = Entry {
            pos,
            name: self.word("a kernel name")?.to_string(),
            params: self.params()?,
            max_block: None,
            max_threads: None,
            required_block: None,
            required_cluster: None,
            explicit_cluster: false,
            max_cluster: None,
            min_blocks_per_sm: None,
            body: vec![],
        };
        loop {
            let pos = self.pos();
            match self.peek().tok {
                Tok::Punct('{') => break,
                Tok::Word(w @ (".maxntid" | ".reqntid")) => {
                    self.at += 1;
                    let dims = self.dimensions("a block dimension")?;
                    let Some(n) = dims.iter().try_fold(1u32, |a, &d| a.checked_mul(d)) else {
                        return self.error(pos, "block dimensions overflow");
                    };
                    e.max_block = Some(dims);
                    e.max_threads = Some(e.max_threads.map_or(n, |m| m.min(n)));
                    if w == ".reqntid" {
                        e.required_block = Some(dims);
                    }
                }
                Tok::Word(".minnctapersm") => {
                    self.at += 1;
                    e.min_blocks_per_sm = Some(self.int32("a count")?);
                }
                Tok::Word(".reqnctapercluster") => {
                    self.at += 1;
                    e.required_cluster = Some(self.dimensions("a cluster dimension")?);
                }
                Tok::Word(".explicitcluster") => {
                    self.at += 1;
                    e.explicit_cluster = true;
                }
                Tok::Word(".maxclusterrank") => {
                    self.at += 1;
                    e.max_cluster = Some(self.int32("a count")?);
                }
                Tok::Word(".maxnctapersm" | ".maxnreg") => {
                    self.at += 1;
                    self.int("a count")?;
                }
                Tok::Word(".pragma" | ".loc" | ".file") => self.line_directive()?,
                _ => return self.unexpected("a performance directive or '{'"),
            }
        }
        self.locs = Locs::default();
        e.body = self.body()?;
        Ok(e)
    }

    /// One to three numbers; those that are missing are 1.
    fn dimensions(&mut self, what: &str) -> Result<[u32; 3], PtxError> {
        let mut dims = [1u32; 3];
        for (i, d) in dims.iter_mut().enumerate() {
            if i == 0 || self.eat(',') {
                *d = self.int32(what)?;
            }
        }
        Ok(dims)
    }

    /// `(results) name (params)` and a body, or `;` where it is only declared.
    fn function(&mut self) -> Result<Function, PtxError> {
        let results = self.params()?;
        let pos = self.pos();
        let name = self.word("a function name")?.to_string();
        let params = self.params()?;
        self.eat_word(".noreturn");
        self.locs = Locs::default();
        let body = if self.eat(';') { None } else { Some(self.body()?) };
        Ok(Function { pos, name, results, params, body })
    }

    /// `(.param .., ..)`, or nothing.
    fn params(&mut self) -> Result<Vec<Param>, PtxError> {
        let mut params = vec![];
        if self.eat('(') {
            while !self.eat(')') {
                params.push(self.param()?);
                if !self.eat(',') {
                    self.expect(')')?;
                    break;
                }
            }
        }
        Ok(params)
    }

    fn param(&mut self) -> Result<Param, PtxError> {
        if !self.eat_word(".param") {
            return self.unexpected("'.param'");
        }
        let (mut align, mut size) = (None, None);
        loop {
            let pos = self.pos();
            let w = self.word("a parameter type or name")?;
            match w {
                ".align" => {
                    let a = self.int("an alignment")? as usize;
                    // `.ptr .align N` describes the pointee, and stands after the type.
                    if size.is_none() {
                        align = Some(a);
                    }
                }
                ".ptr" | ".global" | ".shared" | ".const" | ".local" => {}
                _ if w.starts_with('.') => match type_bytes(w) {
                    Some(b) => size = Some(b),
                    None => return self.error(pos, format!("unknown parameter type '{w}'")),
                },
                name => {
                    let Some(elem) = size else { return self.error(pos, "parameter without a type") };
                    let mut size = elem;
                    if self.eat('[') {
                        let n = self.int("an array length")? as usize;
                        self.expect(']')?;
                        size = n.saturating_mul(elem);
                    }
                    let align = align.unwrap_or(elem);
                    if !align.is_power_of_two() || align > MAX_ALIGN || size > 1 << 20 {
                        return self.error(pos, "bad parameter size or alignment");
                    }
                    return Ok(Param { name: name.to_string(), size, align });
                }
            }
            if self.peek().tok == Tok::Punct(',') {
                return self.error(pos, "parameter without a name");
            }
        }
    }

    /// `.shared .align 16 .b8 name[64] = {..}, other;` at module or function level. Variables
    /// behind `.extern` are `external`.
    fn variables(&mut self, external: bool) -> Result<Vec<Variable>, PtxError> {
        let space = match self.word("a state space")? {
            ".global" => VarSpace::Global,
            ".const" => VarSpace::Const,
            ".shared" => VarSpace::Shared,
            ".local" => VarSpace::Local,
            ".param" => VarSpace::Param,
            w => return self.error(self.pos(), format!("unknown state space '{w}'")),
        };
        let (mut align, mut elem, mut lanes, mut ty) = (None, None, 1, "");
        while let Tok::Word(w) = self.peek().tok {
            if !w.starts_with('.') {
                break;
            }
            let pos = self.pos();
            self.at += 1;
            match w {
                ".align" => align = Some(self.int("an alignment")? as usize),
                ".v2" => lanes = 2,
                ".v4" => lanes = 4,
                _ => match type_bytes(w) {
                    Some(b) => (elem, ty) = (Some(b), w),
                    None => return self.error(pos, format!("unknown variable attribute '{w}'")),
                },
            }
        }
        let Some(elem) = elem else { return self.unexpected("a variable type") };
        let align = align.unwrap_or(elem * lanes);
        let mut vars = vec![];
        loop {
            let pos = self.pos();
            if !align.is_power_of_two() || align > MAX_ALIGN {
                return self.error(pos, format!("alignment {align} is not a power of two up to {MAX_ALIGN}"));
            }
            let name = self.word("a variable name")?.to_string();
            let mut dims = vec![];
            while self.eat('[') {
                if self.eat(']') {
                    if !dims.is_empty() {
                        return self
                            .error(pos, format!("'{name}': only the first dimension may be left out"));
                    }
                    dims.push(None);
                } else {
                    dims.push(Some(self.int("an array length")? as usize));
                    self.expect(']')?;
                }
            }
            if lanes > 1 {
                dims.push(Some(lanes));
            }
            let mut bytes = dims.iter().try_fold(elem, |bytes, d| Some(bytes.saturating_mul((*d)?)));
            if matches!(space, VarSpace::Global | VarSpace::Const) {
                // Padding for alignment counts as well.
                self.variable_bytes =
                    self.variable_bytes.saturating_add(bytes.unwrap_or(0)).saturating_add(align);
            }
            self.fits(pos, &name, bytes.unwrap_or(0).max(self.variable_bytes))?;
            let mut init = Initial::default();
            if self.eat('=') {
                if !matches!(space, VarSpace::Global | VarSpace::Const) {
                    return self.error(pos, "only .global and .const variables can have an initialiser");
                }
                if external {
                    return self.error(pos, format!("'{name}' is .extern, so it has no initialiser"));
                }
                let of = Initialised { pos, name: &name, ty, elem };
                self.initializer(&of, &dims, 0, &mut init)?;
                if bytes.is_none() {
                    self.variable_bytes = self.variable_bytes.saturating_add(init.bytes.len());
                    self.fits(pos, &name, self.variable_bytes)?;
                }
                let len = *bytes.get_or_insert(init.bytes.len());
                if init.bytes.len() > len {
                    return self.error(pos, format!("initialiser of '{name}' is longer than the variable"));
                }
                init.bytes.resize(len, 0);
            }
            let Initial { bytes: init, addresses } = init;
            vars.push(Variable { pos, name, space, align, external, bytes, init, addresses });
            if !self.eat(',') {
                break;
            }
        }
        self.expect(';')?;
        Ok(vars)
    }

    /// An error where variables of so many bytes are too large.
    fn fits(&self, pos: Span, name: &str, bytes: usize) -> Result<(), PtxError> {
        if bytes <= MAX_VARIABLE_BYTES {
            return Ok(());
        }
        let rule = format!("the variables of a module may have {MAX_VARIABLE_BYTES} bytes");
        self.error(pos, format!("variable '{name}' is too large: {rule}"))
    }

    /// An element, or a list for these dimensions. A list that is short ends with zeros.
    fn initializer(
        &mut self,
        of: &Initialised<'_>,
        dims: &[Option<usize>],
        depth: usize,
        out: &mut Initial,
    ) -> Result<(), PtxError> {
        if depth > MAX_DIMENSIONS {
            return self
                .error(self.pos(), format!("an initialiser of more than {MAX_DIMENSIONS} dimensions"));
        }
        if !self.eat('{') {
            return self.initial_element(of, out);
        }
        let Initialised { pos, name, elem, .. } = *of;
        let (items, inner) = dims.split_first().map_or((Some(1), dims), |(&d, inner)| (d, inner));
        let item = inner.iter().flatten().fold(elem, |bytes, &d| bytes.saturating_mul(d));
        let start = out.bytes.len();
        let most = items.map(|n| n.saturating_mul(item));
        while !self.eat('}') {
            let at = self.pos();
            if self.peek().tok == Tok::Punct('{') && !(out.bytes.len() - start).is_multiple_of(item) {
                return self.error(at, format!("this list begins inside of a row of '{name}'"));
            }
            self.initializer(of, inner, depth + 1, out)?;
            if most.is_some_and(|most| out.bytes.len() - start > most) {
                let whole = if depth == 0 { "the variable" } else { "its row" };
                return self.error(at, format!("initialiser of '{name}' is longer than {whole}"));
            }
            if !self.eat(',') {
                self.expect('}')?;
                break;
            }
        }
        let len = out.bytes.len() - start;
        let rows = || len.checked_next_multiple_of(item.max(1)).unwrap_or(usize::MAX);
        let end = start.saturating_add(most.unwrap_or_else(rows));
        self.fits(pos, name, end)?;
        out.bytes.resize(end, 0);
        Ok(())
    }

    /// A number, or the address of a variable: `x`, `generic(x)`, either with an offset.
    fn initial_element(&mut self, of: &Initialised<'_>, out: &mut Initial) -> Result<(), PtxError> {
        let pos = self.pos();
        let generic = self.peek().tok == Tok::Word("generic");
        let op = if generic && self.tokens[self.at + 1].tok == Tok::Punct('(') {
            self.at += 2;
            let name = self.word("a variable")?.to_string();
            self.expect(')')?;
            self.behind_name(name)?
        } else {
            self.operand()?.0
        };
        let bits = match (op, of.ty) {
            (Operand::Int(v), ".f32") => u64::from((v as f32).to_bits()) as i128,
            (Operand::Int(v), ".f64") => (v as f64).to_bits() as i128,
            (Operand::Int(v), _) => v,
            (Operand::F32(v), _) => v as i128,
            (Operand::F64(v), ".f32") => (f64::from_bits(v) as f32).to_bits() as i128,
            (Operand::F64(v), _) => v as i128,
            (Operand::Name(variable), _) => return self.initial_address(pos, variable, 0, of, out),
            (Operand::Offset { name, offset }, _) => {
                return self.initial_address(pos, name, offset, of, out);
            }
            _ => return self.error(pos, "only numbers and addresses can stand in an initialiser"),
        };
        out.bytes.extend_from_slice(&bits.to_le_bytes()[..of.elem]);
        Ok(())
    }

    fn initial_address(
        &self,
        pos: Span,
        variable: String,
        offset: i64,
        of: &Initialised<'_>,
        out: &mut Initial,
    ) -> Result<(), PtxError> {
        if of.elem != 8 {
            let bits = 8 * of.elem;
            return self
                .error(pos, format!("an address has 64 bits, an element of '{}' has {bits}", of.name));
        }
        out.addresses.push(InitialAddress { pos, at: out.bytes.len(), variable, offset });
        out.bytes.extend_from_slice(&[0; 8]);
        Ok(())
    }

    fn body(&mut self) -> Result<Vec<Stmt>, PtxError> {
        self.expect('{')?;
        let mut out = vec![];
        let mut depth = 0usize;
        loop {
            let pos = self.pos();
            match self.peek().tok {
                Tok::Eof => return self.unexpected("'}'"),
                Tok::Punct('}') => {
                    self.at += 1;
                    if depth == 0 {
                        return Ok(out);
                    }
                    depth -= 1;
                    out.push(Stmt::Close);
                }
                Tok::Punct('{') => {
                    self.at += 1;
                    depth += 1;
                    out.push(Stmt::Open);
                }
                Tok::Punct(';') => self.at += 1,
                Tok::Word(".loc" | ".file" | ".pragma") => self.line_directive()?,
                Tok::Word(".reg") => {
                    self.at += 1;
                    self.registers(pos, &mut out)?;
                }
                Tok::Word(".local" | ".shared" | ".param") => {
                    out.extend(self.variables(false)?.into_iter().map(Stmt::Var));
                }
                Tok::Punct('@') => {
                    self.at += 1;
                    let negated = self.eat('!');
                    let p = self.word("a predicate register")?.to_string();
                    let inst = self.instruction(pos, Some((p, negated)))?;
                    out.push(Stmt::Inst(inst));
                }
                // The shape of a function that is called through a pointer.
                Tok::Word(".callprototype") => {
                    while !self.eat(';') {
                        if self.peek().tok == Tok::Eof {
                            return self.unexpected("';'");
                        }
                        self.at += 1;
                    }
                }
                Tok::Word(w) if w.starts_with('.') => {
                    return self.error(pos, format!("directive '{w}' is not supported inside a kernel"));
                }
                Tok::Word(w) => {
                    if self.tokens[self.at + 1].tok == Tok::Punct(':') {
                        self.at += 2;
                        out.push(self.label(pos, w.to_string())?);
                    } else {
                        let inst = self.instruction(pos, None)?;
                        out.push(Stmt::Inst(inst));
                    }
                }
                _ => return self.unexpected("a statement"),
            }
        }
    }

    fn label(&mut self, pos: Span, name: String) -> Result<Stmt, PtxError> {
        if !self.eat_word(".branchtargets") {
            return Ok(Stmt::Label { pos, name });
        }
        let mut labels = vec![];
        loop {
            let p = self.pos();
            labels.push((self.word("a label")?.to_string(), p));
            if !self.eat(',') {
                break;
            }
        }
        self.expect(';')?;
        Ok(Stmt::Targets { pos, name, labels })
    }

    fn registers(&mut self, pos: Span, out: &mut Vec<Stmt>) -> Result<(), PtxError> {
        let ty = self.word("a register type")?.to_string();
        loop {
            let name = self.word("a register name")?.to_string();
            let mut count = None;
            if self.eat('<') {
                count = Some(self.int32("a register count")?);
                self.expect('>')?;
            }
            if count.is_some_and(|c| c > 1 << 20) {
                return self.error(pos, "too many registers");
            }
            out.push(Stmt::Reg { pos, ty: ty.clone(), name, count });
            if !self.eat(',') {
                break;
            }
        }
        self.expect(';')
    }

    /// `start`: where its guard begins, or the opcode.
    fn instruction(&mut self, start: Span, guard: Option<(String, bool)>) -> Result<Instruction, PtxError> {
        let pos = self.pos();
        let opcode = self.word("an instruction")?.to_string();
        let mut operands = vec![];
        let mut whole = self.since(start);
        while !self.eat(';') {
            let at = self.pos();
            if !operands.is_empty() {
                self.expect(',')?;
            }
            if self.peek().tok == Tok::Eof {
                return self.error(at, "instruction without ';'");
            }
            // Only a call has lists in parentheses.
            operands.push(if opcode.starts_with("call") && self.peek().tok == Tok::Punct('(') {
                (self.list()?, at)
            } else {
                self.operand()?
            });
            whole = self.since(start);
        }
        Ok(Instruction { pos, whole, guard, opcode, operands, source: self.locs.source })
    }

    fn list(&mut self) -> Result<Operand, PtxError> {
        self.expect('(')?;
        let mut items = vec![];
        while !self.eat(')') {
            items.push(self.operand()?.0);
            if !self.eat(',') {
                self.expect(')')?;
                break;
            }
        }
        Ok(Operand::List(items))
    }

    fn operand(&mut self) -> Result<(Operand, Span), PtxError> {
        let pos = self.pos();
        let op = match self.peek().tok {
            Tok::Punct('!') => {
                self.at += 1;
                Operand::Not(self.word("a predicate register")?.to_string())
            }
            Tok::Punct('{') => Operand::Vector(self.vector()?),
            Tok::Punct('[') => {
                self.at += 1;
                let base = self.simple()?;
                let mut offset = 0i64;
                let mut coordinates = None;
                while self.peek().tok != Tok::Punct(']') {
                    if coordinates.is_none() && self.eat(',') {
                        if self.peek().tok != Tok::Punct('{') {
                            return self.unexpected("coordinates in braces");
                        }
                        coordinates = Some(self.vector()?);
                        continue;
                    }
                    let Some(more) = self.offset()? else { return self.unexpected("'+', '-' or ']'") };
                    offset = offset.wrapping_add(more);
                }
                self.expect(']')?;
                let address = Operand::Address { base: Box::new(base), offset };
                match coordinates {
                    Some(coordinates) => Operand::Tensor { map: Box::new(address), coordinates },
                    None => address,
                }
            }
            _ => match self.simple()? {
                Operand::Name(name) => self.behind_name(name)?,
                other => other,
            },
        };
        if self.eat('|') {
            let second = self.simple()?;
            return Ok((Operand::Pair(Box::new(op), Box::new(second)), self.since(pos)));
        }
        Ok((op, self.since(pos)))
    }

    /// `+ 4` or `- 4`, if one of them comes.
    fn offset(&mut self) -> Result<Option<i64>, PtxError> {
        let negative = match (self.eat('+'), self.eat('-')) {
            (false, false) => return Ok(None),
            (_, negative) => negative,
        };
        let v = self.int("an offset")? as i64;
        Ok(Some(if negative { v.wrapping_neg() } else { v }))
    }

    /// A name with the offset or the index behind it, if there is one.
    fn behind_name(&mut self, name: String) -> Result<Operand, PtxError> {
        if self.eat('[') {
            let index = self.int("an index")?;
            self.expect(']')?;
            return Ok(Operand::Element { name, index });
        }
        Ok(match self.offset()? {
            Some(offset) => Operand::Offset { name, offset },
            None => Operand::Name(name),
        })
    }

    /// `{a, b, ..}`. Its elements are names and numbers, so that a short text cannot nest lists.
    fn vector(&mut self) -> Result<Vec<Operand>, PtxError> {
        self.expect('{')?;
        let mut items = vec![];
        while !self.eat('}') {
            if matches!(self.peek().tok, Tok::Punct(c) if c != '-') {
                return self.unexpected("an element of a vector");
            }
            items.push(self.simple()?);
            if !self.eat(',') {
                self.expect('}')?;
                break;
            }
        }
        Ok(items)
    }

    fn simple(&mut self) -> Result<Operand, PtxError> {
        let pos = self.pos();
        let start = self.at;
        let negative = self.eat('-');
        let op = match self.next().tok {
            Tok::Word("_") if !negative => Operand::Sink,
            Tok::Word("WARP_SZ") if !negative => Operand::Int(32),
            Tok::Word(w) if !negative => Operand::Name(w.to_string()),
            Tok::Int(v) => Operand::Int(if negative { -(v as i128) } else { v as i128 }),
            Tok::F32(v) => Operand::F32(if negative { v ^ 1 << 31 } else { v }),
            Tok::F64(v) => Operand::F64(if negative { v ^ 1 << 63 } else { v }),
            Tok::Decimal(s) => {
                let v: f64 = s.parse().or_else(|_| self.error(pos, format!("'{s}' is not a number")))?;
                Operand::F64(if negative { -v } else { v }.to_bits())
            }
            _ => {
                self.at = start;
                return self.unexpected("an operand");
            }
        };
        Ok(op)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = ".version 8.4\n.target sm_90, debug\n.address_size 64\n";

    #[test]
    fn a_kernel_as_llvm_writes_it() {
        let text = format!(
            "{HEAD}
.extern .shared .align 128 .b8 DYN[];
.global .align 4 .b8 TABLE[8] = {{1, 2, 3, 255}};
.visible .entry k(
	.param .u64 .ptr .global .align 1 k_param_0,
	.param .align 8 .b8 k_param_1[24]
)
.maxntid 128, 1, 1
.minnctapersm 1
{{
	.reg .pred 	%p<3>;
	.reg .b32 	%r<5>;
	.loc	1 7 0
	ld.param.b64 	%rd1, [k_param_1+8];
$L__func_begin0:
	.loc	1 9 3, function_name $L__info_string0, inlined_at 1 7 0
	// begin inline asm
	{{ .reg .pred p; setp.eq.u32 p|q, %r1, -1; @!p bra $L1; }}
	// end inline asm
	.pragma \"nounroll\";
$L1:
	ret;
}}
	.file	1 \"/src/k.rs\"
	.section	.debug_str
	{{
$L__info_string0:
.b8 1,2
	}}
"
        );
        let f = parse(&text).unwrap();
        assert_eq!((f.version.to_string(), f.target.as_str()), ("8.4".to_string(), "sm_90"));
        assert_eq!(f.target_options, ["debug"]);
        assert_eq!(f.lines.files, vec![(1, "/src/k.rs".to_string())]);
        assert_eq!(f.variables[0].bytes, None);
        assert_eq!(f.variables[1].init, vec![1, 2, 3, 255, 0, 0, 0, 0]);
        let e = &f.entries[0];
        assert_eq!(e.max_threads, Some(128));
        assert_eq!(e.params.iter().map(|p| (p.size, p.align)).collect::<Vec<_>>(), vec![(8, 8), (24, 8)]);
        let insts: Vec<_> = e.instructions().collect();
        assert_eq!(insts[2].whole.of(&text), "@!p bra $L1");
        assert_eq!(insts[0].operands[1].1.of(&text), "[k_param_1+8]");
        assert_eq!(insts.len(), 4);
        let line = |file, line| SourceLine { file, line };
        let (innermost, own) = (line(1, 9), line(1, 9));
        assert_eq!(insts[1].source, Some(Source { innermost, column: 3, own, call: Some(0) }));
        assert_eq!(insts[1].operands[2].0, Operand::Int(-1));
        assert_eq!(insts[2].guard, Some(("p".to_string(), true)));
        assert_eq!(e.body.iter().filter(|s| matches!(s, Stmt::Open)).count(), 1);
    }

    /// File and line of the innermost and of the kernel's own line, for each instruction.
    fn sources(body: &str) -> Vec<[u32; 4]> {
        let f = parse(&format!("{HEAD}.visible .entry k()\n{{\n{body}\n}}")).unwrap();
        f.entries[0]
            .instructions()
            .map(|i| i.source.unwrap_or_default())
            .map(|s| [s.innermost.file, s.innermost.line, s.own.file, s.own.line])
            .collect()
    }

    #[test]
    fn the_kernels_own_line_is_where_the_chain_of_inlining_meets_its_file() {
        // LLVM writes it so: each caller's place has a `.loc` of its own, with its own caller.
        let nested = ".loc 1 10 1\n.loc 1 20 5, function_name $L, inlined_at 1 10 1
            .loc 3 30 7, function_name $L+8, inlined_at 1 20 5
            .loc 2 40 9, function_name $L+4, inlined_at 3 30 7\nret;";
        assert_eq!(sources(nested), [[2, 40, 1, 20]]);
        // In a comment, as in shipped PTX.
        let shipped = ".loc 1 10 0\nret;\n.loc\t2 40 9 // inlined_at 1 25\nret;\n.loc 1 26 1\nret;";
        assert_eq!(sources(shipped), [[1, 10, 1, 10], [2, 40, 1, 25], [1, 26, 1, 26]]);
        // Nothing of the kernel's file in the chain: its outermost place.
        assert_eq!(
            sources(".loc 1 10 0\n.loc 2 40 9, function_name $L, inlined_at 3 50 1\nret;"),
            [[2, 40, 3, 50]]
        );
        // A place that is its own caller ends somewhere.
        assert_eq!(
            sources(".loc 1 1 0\n.loc 2 4 9, function_name $L, inlined_at 2 4 9\nret;"),
            [[2, 4, 2, 4]]
        );
    }

    /// The lines of the calls around the own line, for each instruction, in a file with so many
    /// calls.
    fn calls(body: &str) -> (Vec<Vec<u32>>, usize) {
        let f = parse(&format!("{HEAD}.visible .entry k()\n{{\n{body}\n}}\n.file 1 \"k.rs\"\n")).unwrap();
        let place = |i: &Instruction| f.lines.instruction(1, "", i.source);
        let of = |i: &Instruction| place(i).callers.into_iter().map(|(_, line)| line).collect();
        (f.entries[0].instructions().map(of).collect(), f.lines.calls.len())
    }

    #[test]
    fn calls_around_the_own_line_are_known() {
        let nested = ".loc 1 10 1\n.loc 1 20 5, function_name $L, inlined_at 1 10 1
            .loc 1 30 7, function_name $L+8, inlined_at 1 20 5\nret;
            .loc 2 40 9, function_name $L+4, inlined_at 1 30 7\nret;\n.loc 1 10 2\nret;";
        assert_eq!(calls(nested), (vec![vec![20, 10], vec![20, 10], vec![]], 2));
        let listed = ".loc 1 10 0\n.loc 1 30 7 // inlined_at 1 20, 1 12\nret;
            .loc 2 40 9 // inlined_at 1 30, 1 20, 1 12\nret;
            .loc 2 40 9 // inlined_at 1 20, 1 12\nret;\n.loc 2 40 9 // inlined_at 1 12\nret;";
        assert_eq!(calls(listed), (vec![vec![20, 12], vec![20, 12], vec![12], vec![]], 2));
        let own = [[1, 30, 1, 30], [2, 40, 1, 30], [2, 40, 1, 20], [2, 40, 1, 12]];
        assert_eq!(sources(listed), own);
        // A line without its chain is taken for one of the latest own line.
        let latest = ".loc 1 10 0\n.loc 1 30 7 // inlined_at 1 20\nret;\n.loc 2 40 9\nret;";
        assert_eq!(calls(latest), (vec![vec![20], vec![20]], 1));
        let long: Vec<String> = (0..1000).map(|line| format!("1 {line}")).collect();
        assert_eq!(calls(&format!(".loc 1 9 1 // inlined_at {}\nret;", long.join(", "))).1, MAX_CALLS);
        // The same call in two places is one; the column of a comment is left out.
        assert_eq!(calls(".loc 1 9 1 // inlined_at 1 5 8, 1 2 3\nret;"), (vec![vec![5, 2]], 2));
    }

    #[test]
    fn without_the_chain_the_kernels_latest_line_stands_for_it() {
        let body = ".loc 1 10 0\nret;\n.loc 2 40 9\nret;\n.loc 1 12 3\n.loc 3 5 1\nret;\n.loc 1 0 0\nret;";
        assert_eq!(sources(body), [[1, 10, 1, 10], [2, 40, 1, 10], [3, 5, 1, 12], [0, 0, 0, 0]]);
        assert_eq!(sources("ret;"), [[0; 4]]);
    }

    #[test]
    fn statements_stand_behind_a_loc() {
        assert_eq!(sources(".loc 1 10 0 ret;"), [[1, 10, 1, 10]]);
        assert_eq!(sources(".loc 1 10 ret; .loc 1 11 ret;"), [[1, 10, 1, 10], [1, 11, 1, 11]]);
        let inlined =
            ".loc 1 10 0\n.loc 2 40 9, function_name $L + 4, inlined_at 1 25 1 ret; // inlined_at 1 26";
        assert_eq!(sources(inlined), [[2, 40, 1, 25]]);
        let e = parse(&format!("{HEAD}.visible .entry k()\n{{\n.loc 1 2 3, where 4\nret;\n}}")).unwrap_err();
        assert!(e.message.contains("'function_name' or 'inlined_at'"), "{e}");
    }

    #[test]
    fn functions_and_calls() {
        let text = format!(
            "{HEAD}
.extern .func give_up (.param .b64 a) .noreturn;
.func (.param .b32 r) f
(
	.param .align 4 .b8 p[12]
)
{{
	ret;
}}
.entry k()
{{
	{{ // callseq 0, 0
	.param .align 4 .b8 param0[12];
	.param .b32 retval0;
	call.uni (retval0),
	f,
	(
	param0
	);
	}}
}}
"
        );
        let f = parse(&text).unwrap();
        assert_eq!(f.functions.len(), 2);
        assert!(f.functions[0].body.is_none());
        assert_eq!(f.functions[1].params[0].size, 12);
        assert_eq!(f.functions[1].results[0].name, "r");
        let call = f.entries[0].instructions().next();
        let operands: Vec<_> = call.unwrap().operands.iter().map(|o| o.0.clone()).collect();
        let name = |n: &str| Operand::Name(n.to_string());
        let list = |n: &str| Operand::List(vec![name(n)]);
        assert_eq!(operands, [list("retval0"), name("f"), list("param0")]);
    }

    #[test]
    fn errors_point_at_the_place() {
        let e = parse(&format!("{HEAD}.visible .entry k()\n{{\n  add.u32 %r1 %r2;\n}}")).unwrap_err();
        assert_eq!((e.line, e.column), (6, 15));
        assert_eq!(e.source_line, "  add.u32 %r1 %r2;");
        assert!(e.to_string().contains("6:15"), "{e}");
        let e = parse(&format!("{HEAD}.func f(.reg .b32 %r1) {{ ret; }}")).unwrap_err();
        assert!(e.message.contains("'.param'"), "{e}");
        assert!(parse("ret;").is_err());
        assert!(parse("").unwrap_err().message.contains(".version"));
        assert!(parse(&format!("{HEAD}.entry k() {{ ret;")).is_err());
    }
}
