//! PTX as written, with unresolved names: the output of the parser and the input of the lowering.

use std::fmt;
use std::str::FromStr;

use crate::fault::InstructionPlace;

/// A piece of the PTX text. Line and column are counted from 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// The line that it begins on.
    pub line: usize,
    /// The column that it begins at.
    pub column: usize,
    /// Its first byte in the text.
    pub start: usize,
    /// The byte behind its last.
    pub end: usize,
}

impl Span {
    /// The piece itself, with white space as written.
    #[must_use]
    pub fn of(self, text: &str) -> &str {
        text.get(self.start..self.end).unwrap_or("")
    }
}

/// A PTX ISA version, as in `.version 8.4`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The number before the dot.
    pub major: u32,
    /// The number behind the dot.
    pub minor: u32,
}

impl Version {
    /// The version that a module's `.version` directive gives.
    #[must_use]
    pub fn of(text: &str) -> Option<Self> {
        let line = text.lines().map(str::trim_start).find_map(|line| line.strip_prefix(".version"))?;
        line.split("//").next()?.trim().parse().ok()
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl FromStr for Version {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once('.').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
        let (major, minor) = parts.ok_or_else(|| format!("`{text}` is not a PTX version"))?;
        Ok(Self { major, minor })
    }
}

/// An instruction operand.
#[derive(Clone, Debug, PartialEq)]
pub enum Operand {
    /// Register, special register, variable or label.
    Name(String),
    /// `name + offset`: an address in or near a variable.
    Offset {
        /// The variable.
        name: String,
        /// In bytes.
        offset: i64,
    },
    /// `name[index]`: the address of an element of a variable.
    Element {
        /// The variable.
        name: String,
        /// In elements.
        index: u64,
    },
    /// `!%p`.
    Not(String),
    /// Integer constant, two's complement.
    Int(i128),
    /// `0f...`.
    F32(u32),
    /// `0d...` or a decimal.
    F64(u64),
    /// `(a, b, ..)` of a call.
    List(Vec<Operand>),
    /// `{a, b, ..}`.
    Vector(Vec<Operand>),
    /// `[base + offset]`.
    Address {
        /// A register, a variable or a number.
        base: Box<Operand>,
        /// In bytes.
        offset: i64,
    },
    /// `[base, {x, y}]`: a tensor map and coordinates.
    Tensor {
        /// The address of the map.
        map: Box<Operand>,
        /// One for each dimension, the innermost first.
        coordinates: Vec<Operand>,
    },
    /// `p|q`.
    Pair(Box<Operand>, Box<Operand>),
    /// `_`.
    Sink,
}

/// An instruction.
#[derive(Clone, Debug)]
pub struct Instruction {
    /// The opcode's place.
    pub pos: Span,
    /// The statement with its guard, without its semicolon.
    pub whole: Span,
    /// `(register, negated)`.
    pub guard: Option<(String, bool)>,
    /// Opcode with modifiers.
    pub opcode: String,
    /// Operands with the place of each.
    pub operands: Vec<(Operand, Span)>,
    /// Source position, if a `.loc` precedes the instruction.
    pub source: Option<Source>,
}

impl Instruction {
    /// The opcode without its modifiers, such as `ld`.
    #[must_use]
    pub fn base(&self) -> &str {
        self.opcode.split('.').next().unwrap_or("")
    }

    /// Whether the opcode, without its modifiers, is `name`.
    #[must_use]
    pub fn is(&self, name: &str) -> bool {
        self.base() == name
    }

    /// Whether the opcode has this modifier, given without its dot.
    #[must_use]
    pub fn has(&self, modifier: &str) -> bool {
        self.opcode.split('.').skip(1).any(|part| part == modifier)
    }

    /// The operand that the instruction writes, if it writes registers: the first one.
    #[must_use]
    pub fn destination(&self) -> Option<&Operand> {
        const NONE: [&str; 13] = [
            "st",
            "red",
            "bra",
            "brx",
            "bar",
            "barrier",
            "fence",
            "membar",
            "cp",
            "nanosleep",
            "ret",
            "exit",
            "trap",
        ];
        let votes = matches!(self.base(), "bar" | "barrier") && self.has("red");
        let first = self.operands.first().map(|(operand, _)| operand)?;
        let writes = votes || !NONE.contains(&self.base());
        (writes && !matches!(first, Operand::Address { .. })).then_some(first)
    }
}

impl Operand {
    /// All names in it, in the order of the text: registers, special registers, variables, labels.
    #[must_use]
    pub fn names(&self) -> Vec<&str> {
        match self {
            Operand::Name(name) | Operand::Not(name) => vec![name],
            Operand::Offset { name, .. } | Operand::Element { name, .. } => vec![name],
            Operand::List(parts) | Operand::Vector(parts) => parts.iter().flat_map(Operand::names).collect(),
            Operand::Address { base, .. } => base.names(),
            Operand::Tensor { map, coordinates } => {
                map.names().into_iter().chain(coordinates.iter().flat_map(Operand::names)).collect()
            }
            Operand::Pair(first, second) => [first.names(), second.names()].concat(),
            Operand::Int(_) | Operand::F32(_) | Operand::F64(_) | Operand::Sink => vec![],
        }
    }
}

/// File number and line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SourceLine {
    /// Number of the file, as `.file` gives it.
    pub file: u32,
    /// Line in the file, from 1.
    pub line: u32,
}

/// Source position that a `.loc` gives the instructions after it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Source {
    /// The line itself, maybe of a function that was inlined.
    pub innermost: SourceLine,
    /// The column there.
    pub column: u32,
    /// The line in the kernel's own file that it was inlined into, or the same.
    pub own: SourceLine,
    /// The call that `own` was inlined for, by its number in [`LineTable::calls`].
    pub call: Option<u32>,
}

/// A call of a function that was inlined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct InlinedCall {
    /// The line of the call.
    pub at: SourceLine,
    /// The call that this line was inlined for in turn, by its number.
    pub outer: Option<u32>,
}

/// The source files and the inlined calls that the `.loc`s of a PTX text name.
#[derive(Clone, Debug, Default)]
pub struct LineTable {
    /// `.file` number to path.
    pub files: Vec<(u32, String)>,
    /// Each call once.
    pub calls: Vec<InlinedCall>,
}

impl LineTable {
    /// The path and line of a source position, if the path is known.
    #[must_use]
    pub fn place(&self, at: SourceLine) -> Option<(String, u32)> {
        let (_, path) = self.files.iter().find(|(number, _)| *number == at.file && at.line != 0)?;
        Some((path.clone(), at.line))
    }

    /// The place of an instruction, whose lines are those of `source`.
    #[must_use]
    pub fn instruction(&self, ptx_line: usize, ptx_text: &str, source: Option<Source>) -> InstructionPlace {
        let Source { innermost, own, call, .. } = source.unwrap_or_default();
        let call_of = |number: Option<u32>| self.calls.get(number? as usize);
        let calls = std::iter::successors(call_of(call), |inner| call_of(inner.outer));
        InstructionPlace {
            ptx_line,
            ptx_text: ptx_text.trim().to_owned(),
            source: self.place(own),
            inlined: self.place(innermost).filter(|_| innermost != own),
            callers: calls.filter_map(|call| self.place(call.at)).collect(),
        }
    }
}

/// State space of a declared variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VarSpace {
    /// `.global`.
    Global,
    /// `.const`.
    Const,
    /// `.shared`.
    Shared,
    /// `.local`.
    Local,
    /// `.param` in a body: an argument or a result of a call.
    Param,
}

/// A variable: `.shared .align 16 .b8 name[64];`.
#[derive(Clone, Debug)]
pub struct Variable {
    /// Its name's place.
    pub pos: Span,
    /// Its name.
    pub name: String,
    /// Where it lies.
    pub space: VarSpace,
    /// Alignment in bytes.
    pub align: usize,
    /// Declared by `.extern`, and defined elsewhere.
    pub external: bool,
    /// Bytes; `None` for an `.extern` array without a length.
    pub bytes: Option<usize>,
    /// Initial bytes, padded with zeros to `bytes`; empty when there is no initialiser.
    pub init: Vec<u8>,
    /// Addresses in the initialiser; `init` holds zeros in their places.
    pub addresses: Vec<InitialAddress>,
}

/// An address in an initialiser: `x`, `generic(x)` or `generic(x) + 8`.
#[derive(Clone, Debug)]
pub struct InitialAddress {
    /// The place in the text.
    pub pos: Span,
    /// The first byte in the variable that it initialises.
    pub at: usize,
    /// The variable whose address it is.
    pub variable: String,
    /// Bytes from there on.
    pub offset: i64,
}

/// A statement of a kernel body.
#[derive(Clone, Debug)]
pub enum Stmt {
    /// `{`.
    Open,
    /// `}`.
    Close,
    /// `.reg .b32 %r<5>` gives names `%r0..%r4`; without a count one name.
    Reg {
        /// The directive's place.
        pos: Span,
        /// Type, with its dot.
        ty: String,
        /// Name, or the part before the numbers.
        name: String,
        /// How many registers, if they are numbered.
        count: Option<u32>,
    },
    /// A variable.
    Var(Variable),
    /// `name:`.
    Label {
        /// Its place.
        pos: Span,
        /// Its name.
        name: String,
    },
    /// `name: .branchtargets a, b, ..;`.
    Targets {
        /// Its name's place.
        pos: Span,
        /// Its name.
        name: String,
        /// The labels, in the order of the table, with their places.
        labels: Vec<(String, Span)>,
    },
    /// An instruction.
    Inst(Instruction),
}

/// A kernel parameter.
#[derive(Clone, Debug)]
pub struct Param {
    /// Its name.
    pub name: String,
    /// Bytes.
    pub size: usize,
    /// Alignment in bytes.
    pub align: usize,
}

/// A `.entry`.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Its name's place.
    pub pos: Span,
    /// Its name.
    pub name: String,
    /// Its parameters, in order.
    pub params: Vec<Param>,
    /// Threads in x, y, z of the largest block, as `.maxntid` or `.reqntid` gives them.
    pub max_block: Option<[u32; 3]>,
    /// Most threads per block.
    pub max_threads: Option<u32>,
    /// `.reqntid`.
    pub required_block: Option<[u32; 3]>,
    /// `.reqnctapercluster`: blocks of a cluster in x, y, z.
    pub required_cluster: Option<[u32; 3]>,
    /// `.explicitcluster`: a launch must name the cluster.
    pub explicit_cluster: bool,
    /// `.maxclusterrank`: most blocks of a cluster.
    pub max_cluster: Option<u32>,
    /// `.minnctapersm`.
    pub min_blocks_per_sm: Option<u32>,
    /// Its statements, those of inner scopes included.
    pub body: Vec<Stmt>,
}

impl Entry {
    /// The instructions of the body, in the order of the text.
    pub fn instructions(&self) -> impl Iterator<Item = &Instruction> {
        self.body.iter().filter_map(|stmt| if let Stmt::Inst(inst) = stmt { Some(inst) } else { None })
    }
}

/// A `.func`. Its results are parameters that it writes.
#[derive(Clone, Debug)]
pub struct Function {
    /// Its name's place.
    pub pos: Span,
    /// Its name.
    pub name: String,
    /// Its results.
    pub results: Vec<Param>,
    /// Its parameters.
    pub params: Vec<Param>,
    /// `None` for a declaration.
    pub body: Option<Vec<Stmt>>,
}

/// A whole module.
#[derive(Clone, Debug, Default)]
pub struct File {
    /// `.version`.
    pub version: Version,
    /// `.target`, such as `sm_90`.
    pub target: String,
    /// The words behind it.
    pub target_options: Vec<String>,
    /// Variables outside of bodies.
    pub variables: Vec<Variable>,
    /// The kernels.
    pub entries: Vec<Entry>,
    /// Functions, declared and defined.
    pub functions: Vec<Function>,
    /// Source files and inlined calls.
    pub lines: LineTable,
}
