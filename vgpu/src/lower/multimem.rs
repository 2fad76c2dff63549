//! Decoding of `multimem.ld_reduce`, `multimem.st` and `multimem.red`.
//!
//! The forms are those of the PTX manual as ptxas 13.0.88 takes them. ptxas has `min` and `max` of
//! vectors of 16-bit floats in `multimem.red` too, which the manual's grammar leaves out.

use super::decode::Emit;
use super::mem::SCOPES;
use super::types::Mods;
use crate::ir::{File, Multimem, Number, Op, Reduce, Reduces, SINK, Scope, Sem};
use crate::ptx::Operand;

/// The three instructions.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    LoadReduce,
    Store,
    Reduce,
}

/// A type in an opcode.
#[derive(Clone, Copy)]
struct Type {
    number: Number,
    /// `.b32` or `.b64`, which have other operations than numbers.
    is_bits: bool,
    /// Bytes of a number, and numbers in a register.
    bytes: u32,
    packed: u32,
}

const fn integer(number: Number, is_bits: bool, bytes: u32) -> Type {
    Type { number, is_bits, bytes, packed: 1 }
}

const fn float(number: Number, bytes: u32, packed: u32) -> Type {
    Type { number, is_bits: false, bytes, packed }
}

const TYPES: &[(&str, Type)] = &[
    ("b32", integer(Number::Unsigned, true, 4)),
    ("b64", integer(Number::Unsigned, true, 8)),
    ("u32", integer(Number::Unsigned, false, 4)),
    ("u64", integer(Number::Unsigned, false, 8)),
    ("s32", integer(Number::Signed, false, 4)),
    ("s64", integer(Number::Signed, false, 8)),
    ("f16", float(Number::F16, 2, 1)),
    ("f16x2", float(Number::F16, 2, 2)),
    ("bf16", float(Number::Bf16, 2, 1)),
    ("bf16x2", float(Number::Bf16, 2, 2)),
    ("f32", float(Number::F32, 4, 1)),
    ("f64", float(Number::F64, 8, 1)),
    ("e4m3", float(Number::E4m3, 1, 1)),
    ("e4m3x2", float(Number::E4m3, 1, 2)),
    ("e4m3x4", float(Number::E4m3, 1, 4)),
    ("e5m2", float(Number::E5m2, 1, 1)),
    ("e5m2x2", float(Number::E5m2, 1, 2)),
    ("e5m2x4", float(Number::E5m2, 1, 4)),
];

/// Whether a reduction has this operation and type, in `n` registers.
fn is_reduction(kind: Kind, op: Reduce, ty: Type, n: u32) -> bool {
    use Reduce::{Add, And, Max, Min, Or, Xor};
    match (ty.number, op) {
        (Number::Unsigned | Number::Signed, And | Or | Xor) => ty.is_bits,
        (Number::Unsigned, Add | Min | Max) | (Number::Signed, Min | Max) => !ty.is_bits,
        (Number::Signed, Add) => ty.bytes == 4,
        (Number::F32 | Number::F64 | Number::F16 | Number::Bf16, Add) => true,
        (Number::F16 | Number::Bf16, Min | Max) => kind == Kind::LoadReduce || n > 1,
        (Number::E4m3 | Number::E5m2, Add | Min | Max) => kind == Kind::LoadReduce,
        _ => false,
    }
}

pub(super) fn decode(m: &mut Mods) -> Result<Emit, String> {
    let kinds = [("ld_reduce", Kind::LoadReduce), ("st", Kind::Store), ("red", Kind::Reduce)];
    let Some(kind) = m.one_of(&kinds) else { return m.unsupported() };
    let sem = m.one_of(match kind {
        Kind::LoadReduce => &[("weak", Sem::Weak), ("relaxed", Sem::Relaxed), ("acquire", Sem::Acquire)],
        Kind::Store => &[("weak", Sem::Weak), ("relaxed", Sem::Relaxed), ("release", Sem::Release)],
        Kind::Reduce => &[("relaxed", Sem::Relaxed), ("release", Sem::Release)],
    });
    let sem = sem.unwrap_or(if kind == Kind::Reduce { Sem::Relaxed } else { Sem::Weak });
    let scope = m.one_of(SCOPES).unwrap_or(Scope::Sys);
    m.ignore(&["global"]);
    let op = m.one_of(&Reduce::NAMES);
    let wide = m.one_of(&[("acc::f32", Number::F32), ("acc::f16", Number::F16)]);
    let n = m.one_of(&[("v2", 2), ("v4", 4), ("v8", 8)]).unwrap_or(1);
    let Some(ty) = m.one_of(TYPES) else { return m.unsupported() };
    let Type { number, bytes, packed, .. } = ty;
    let bits = 8 * bytes * packed;
    // Vectors are of floats. 32, 64 or 128 bits are accessed.
    let is_vector = !matches!(number, Number::Unsigned | Number::Signed | Number::F64);
    if n > 1 && !is_vector || !matches!(bits * n, 32 | 64 | 128) {
        return m.unsupported();
    }
    let reduces = match (op, kind) {
        (None, Kind::Store) if wide.is_none() => None,
        (Some(op), _) if is_reduction(kind, op, ty, n) => {
            let sums = match (wide, number) {
                (None, _) => number,
                (Some(sums @ Number::F32), Number::F16 | Number::Bf16)
                | (Some(sums @ Number::F16), Number::E4m3 | Number::E5m2)
                    if op == Reduce::Add && kind == Kind::LoadReduce =>
                {
                    sums
                }
                _ => return m.unsupported(),
            };
            Some(Reduces { op, number, bytes: bytes as u8, sums })
        }
        _ => return m.unsupported(),
    };
    let loads = kind == Kind::LoadReduce;
    let file = if bits == 64 { File::R64 } else { File::R32 };
    Ok(Box::new(move |l, ops| {
        l.count(ops, 2..=2)?;
        let (values, at) = if loads { (&ops[0], &ops[1]) } else { (&ops[1], &ops[0]) };
        let parts = match &values.0 {
            Operand::Vector(parts) => parts.clone(),
            one => vec![one.clone()],
        };
        if parts.len() != n as usize {
            return l.error(format!("{} registers given, {n} expected", parts.len()));
        }
        let addr = l.address(at)?;
        let mut regs = [SINK; 8];
        for (slot, part) in regs.iter_mut().zip(parts) {
            let part = (part, values.1);
            *slot = match l.any_register(&part)? {
                // A register of bytes may be wider.
                Some((File::R32, width, slot)) if bits == 8 && width <= 16 => slot,
                _ if loads => l.dest(&part, file, bits)?,
                _ => l.source(&part, file, bits)?,
            };
        }
        let bytes = (bits / 8) as u8;
        l.operands.multimems.push(Multimem { loads, reduces, sem, scope, addr, bytes, n: n as u8, regs });
        l.push(Op::Multimem { access: l.operands.multimems.len() as u32 - 1, loads });
        Ok(())
    }))
}
