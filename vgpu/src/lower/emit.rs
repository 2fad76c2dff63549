//! The result of decoding an opcode.

use super::state::{Lower, Lowered};
use crate::ast::{Operand, Pos};
use crate::exec::lanes::Spec;
use crate::ir::Op;

/// Takes the operands of an instruction with a decoded opcode, and adds the instruction to the
/// code.
pub(super) type Emit = Box<dyn Fn(&mut Lower, &[(Operand, Pos)]) -> Lowered<()>>;

/// An instruction without anything to do at run time but `op`; its operands are only counted.
pub(super) fn plain(op: Op, operands: usize) -> Emit {
    Box::new(move |l, ops| {
        l.count(ops, operands..=operands)?;
        l.push(op);
        Ok(())
    })
}

/// An instruction whose operands are those of its [`Spec`].
pub(super) fn simple(spec: Spec) -> Emit {
    Box::new(move |l, ops| l.alu(&spec, ops, &[]))
}
