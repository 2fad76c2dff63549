//! Requirements of every PTX file, from any compiler.
//!
//! LLVM does not read inline PTX, and several constructs compile to something legal but wrong:
//! these lints are the net. Each rule is one small file, with a snippet that passes and one that
//! does not. Exceptions are in the kernel's attribute, which the PTX repeats.

mod arithmetic;
mod atomics;
mod barriers;
mod collectives;
mod dependent;
mod entries;
mod file;
mod finding;
mod functions;
mod locals;
mod module;
mod opcodes;
mod readonly;
mod rules;
#[cfg(test)]
mod testing;

pub use file::lint_file;
pub use finding::{Expect, Finding};
pub use rules::run;
