//! Output of the parser and input of the lowering: PTX as written, with unresolved names.

/// Where something stands in the PTX text (line and column, from 1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Pos {
    pub(crate) line: usize,
    pub(crate) column: usize,
}

/// An instruction operand.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Operand {
    /// Register, special register, variable or label.
    Name(String),
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
    Address { base: Box<Operand>, offset: i64 },
    /// `p|q`.
    Pair(Box<Operand>, Box<Operand>),
    /// `_`.
    Sink,
}

/// An instruction.
#[derive(Clone, Debug)]
pub(crate) struct Instruction {
    pub(crate) pos: Pos,
    /// `(register, negated)`.
    pub(crate) guard: Option<(String, bool)>,
    /// Opcode with modifiers.
    pub(crate) opcode: String,
    /// Operands with the place of each.
    pub(crate) operands: Vec<(Operand, Pos)>,
    /// Source position, if a `.loc` precedes the instruction.
    pub(crate) source: Option<Source>,
}

/// File number and line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SourceLine {
    pub(crate) file: u32,
    pub(crate) line: u32,
}

/// Source position that a `.loc` gives the instructions after it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Source {
    /// The line itself, maybe of a function that was inlined.
    pub(crate) innermost: SourceLine,
    /// The line in the kernel's own file that it was inlined into, or the same.
    pub(crate) own: SourceLine,
}

/// State space of a declared variable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VarSpace {
    Global,
    Const,
    Shared,
    Local,
}

/// A variable: `.shared .align 16 .b8 name[64];`.
#[derive(Clone, Debug)]
pub(crate) struct Variable {
    pub(crate) pos: Pos,
    pub(crate) name: String,
    pub(crate) space: VarSpace,
    pub(crate) align: usize,
    /// Bytes; `None` for an `.extern` array without a length.
    pub(crate) bytes: Option<usize>,
    /// Initial bytes, padded with zeros to `bytes`; empty when there is no initialiser.
    pub(crate) init: Vec<u8>,
}

/// A statement of a kernel body.
#[derive(Clone, Debug)]
pub(crate) enum Stmt {
    Open,
    Close,
    /// `.reg .b32 %r<5>` gives names `%r0..%r4`; without a count one name.
    Reg {
        pos: Pos,
        ty: String,
        name: String,
        count: Option<u32>,
    },
    Var(Variable),
    Label {
        pos: Pos,
        name: String,
    },
    /// `name: .branchtargets a, b, ..;`.
    Targets {
        pos: Pos,
        name: String,
        labels: Vec<(String, Pos)>,
    },
    Inst(Instruction),
}

/// A kernel parameter.
#[derive(Clone, Debug)]
pub(crate) struct Param {
    pub(crate) name: String,
    pub(crate) size: usize,
    pub(crate) align: usize,
}

/// A `.entry`.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) params: Vec<Param>,
    pub(crate) max_threads: Option<u32>,
    pub(crate) required_block: Option<[u32; 3]>,
    pub(crate) body: Vec<Stmt>,
}

/// A `.func`. Its results are parameters that it writes.
#[derive(Clone, Debug)]
pub(crate) struct Function {
    pub(crate) name: String,
    pub(crate) results: Vec<Param>,
    pub(crate) params: Vec<Param>,
    /// `None` for a declaration.
    pub(crate) body: Option<Vec<Stmt>>,
}

/// A whole file.
#[derive(Clone, Debug, Default)]
pub(crate) struct File {
    pub(crate) version: (u32, u32),
    pub(crate) target: String,
    pub(crate) variables: Vec<Variable>,
    pub(crate) entries: Vec<Entry>,
    pub(crate) functions: Vec<Function>,
    /// `.file` number to path.
    pub(crate) files: Vec<(u32, String)>,
}
