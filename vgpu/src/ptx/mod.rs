//! PTX as text and as a tree, for tools that read or change kernels.
//!
//! [`parse`] is the parser of the virtual GPU. It keeps the text's places: with [`Span::of`] a tool
//! finds the text of a statement or an operand, and can replace it.
//!
//! ```
//! let text = ".version 8.4\n.target sm_90\n.entry k()\n{\n@%p1 bra DONE;\nDONE: ret;\n}";
//! let file = epoxide_vgpu::ptx::parse(text)?;
//! let branch = file.entries[0].instructions().next().ok_or("no instruction")?;
//! assert_eq!((branch.base(), branch.whole.line, branch.whole.of(text)), ("bra", 5, "@%p1 bra DONE"));
//! assert_eq!(epoxide_vgpu::ptx::Flow::of(&file.entries[0].body).blocks.len(), 2);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub(crate) mod ast;
pub(crate) mod flow;
pub(crate) mod lexer;
pub(crate) mod parser;

pub use ast::{
    Entry, File, Function, InlinedCall, Instruction, LineTable, Operand, Param, Source, SourceLine, Span,
    Stmt, VarSpace, Variable, Version,
};
pub use flow::{Flow, Scopes};
pub use parser::parse;
