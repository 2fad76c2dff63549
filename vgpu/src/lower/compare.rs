//! `setp` and `set`: comparisons of one pair of numbers, or of two pairs of 16-bit floats.

use super::arith::comparison;
use super::decode::Emit;
use super::state::{Lower, Lowered};
use super::types::{Mods, Ty};
use crate::compiled::native::{Compared, Logic, Native, Width};
use crate::exec::lanes::{Combine, Spec, op_pred, op1, op2, op3};
use crate::float::flush_f16;
use crate::ir::{File, GUARD_NOT, Init, SINK};
use crate::ptx::{Operand, Span};

const COMPARISONS: &[&str] = &[
    "eq", "ne", "lt", "le", "gt", "ge", "lo", "ls", "hi", "hs", "equ", "neu", "ltu", "leu", "gtu", "geu",
    "num", "nan",
];

/// Common part of `setp` and `set`: comparison, combination, `.ftz`.
fn compare_head(m: &mut Mods) -> Result<(&'static str, Combine, bool), String> {
    let Some(name) = COMPARISONS.iter().copied().find(|n| m.has(n)) else {
        return Err(format!("'{}' lacks a comparison", m.opcode));
    };
    let combine = m
        .one_of(&[("and", Combine::And), ("or", Combine::Or), ("xor", Combine::Xor)])
        .unwrap_or(Combine::None);
    Ok((name, combine, m.has("ftz")))
}

/// A comparison with its type, as [`Compare::emit`] adds it.
#[derive(Clone)]
struct Compare {
    spec: Spec,
    /// The type of a single number.
    ty: Ty,
    /// Two numbers at a time.
    pair: bool,
    /// Operands of 16 bits are flushed first. The operation flushes those of f32.
    flush: bool,
    combine: Combine,
}

impl Compare {
    fn new(name: &str, combine: Combine, ftz: bool, ty: Ty) -> Option<Self> {
        let (ty, pair) = match ty {
            Ty::F16x2 => (Ty::F16, true),
            Ty::Bf16x2 => (Ty::Bf16, true),
            single => (single, false),
        };
        let flush = ftz && ty == Ty::F16;
        let spec = comparison(ty, name, ftz && !flush)?;
        let compared = match ty {
            _ if ftz => None,
            Ty::U32 | Ty::B32 => Some(Compared::Unsigned(Width::W32)),
            Ty::U64 | Ty::B64 => Some(Compared::Unsigned(Width::W64)),
            Ty::S32 => Some(Compared::Signed(Width::W32)),
            Ty::S64 => Some(Compared::Signed(Width::W64)),
            Ty::F32 => Some(Compared::F32),
            _ => None,
        };
        let native = compared.map_or(Native::Function, |compared| Native::comparison(compared, name));
        let spec = spec.compiled_as(native);
        Some(Compare { spec, ty, pair, flush, combine })
    }

    /// The number of operands: the result, two numbers, and a predicate to combine with.
    fn operands(&self) -> usize {
        3 + usize::from(self.combine != Combine::None)
    }

    /// Adds the comparison of operands 1 and 2, combined with operand 3. `to` are the predicates of
    /// the result and of the opposite comparison, combined in the same way; of a pair, they are the
    /// results of the lower and of the upper half.
    fn emit(&self, l: &mut Lower, ops: &[(Operand, Span)], to: [u32; 2]) -> Lowered<()> {
        let c = if self.combine == Combine::None { SINK } else { l.source_of::<bool>(&ops[3])? };
        let one = |l: &mut Lower, p: u32, q: u32, a: u32, b: u32| {
            l.push_spec(&self.spec, [p, q, a, b, c, self.combine as u32]);
        };
        if !self.pair {
            let (a, b) = (l.operand(&ops[1], &self.spec.sig[2])?, l.operand(&ops[2], &self.spec.sig[3])?);
            let [a, b] = [a, b].map(|v| self.flushed(l, v));
            one(l, to[0], to[1], a, b);
            return Ok(());
        }
        let (a, b) = (l.source_of::<u32>(&ops[1])?, l.source_of::<u32>(&ops[2])?);
        // A result may be the predicate that the other half is combined with.
        let results = [l.slot(File::Pred), l.slot(File::Pred)];
        for (half, p) in results.into_iter().enumerate() {
            let part = if half == 0 { op1(|v: u32| v as u16) } else { op1(|v: u32| (v >> 16) as u16) };
            let [a, b] = [a, b].map(|v| {
                let d = l.slot(File::R32);
                l.push_alu(part.f, [d, v, 0, 0, 0, 0], part.sig);
                self.flushed(l, d)
            });
            one(l, p, SINK, a, b);
        }
        let copy = op_pred(|a, _| a).compiled_as(Native::Logic(Logic::Move));
        // A result that is the guard comes last.
        let first = usize::from(l.guard & !GUARD_NOT == to[0]);
        for half in [first, 1 - first] {
            l.push_spec(&copy, [to[half], results[half], results[half], 0, 0, 0]);
        }
        Ok(())
    }

    fn flushed(&self, l: &mut Lower, v: u32) -> u32 {
        if !self.flush {
            return v;
        }
        let (d, flush) = (l.slot(File::R32), op1(flush_f16));
        l.push_alu(flush.f, [d, v, 0, 0, 0, 0], flush.sig);
        d
    }
}

/// `setp`
pub(super) fn setp(m: &mut Mods) -> Result<Emit, String> {
    let (name, combine, ftz) = compare_head(m)?;
    let ty = m.ty()?;
    let Some(compare) = Compare::new(name, combine, ftz, ty) else { return m.unsupported() };
    Ok(Box::new(move |l, ops| {
        l.count(ops, compare.operands()..=compare.operands())?;
        let to = match &ops[0].0 {
            Operand::Pair(p, q) => {
                let (p, q) = ((Operand::clone(p), ops[0].1), (Operand::clone(q), ops[0].1));
                [l.dest_of::<bool>(&p)?, l.dest_of::<bool>(&q)?]
            }
            _ if compare.pair => return Err((ops[0].1, "two predicates are needed: p|q".to_owned())),
            _ => [l.dest_of::<bool>(&ops[0])?, SINK],
        };
        compare.emit(l, ops, to)
    }))
}

/// `set`: a comparison into scratch predicates, and a selection of all ones (or 1.0) or zero for
/// each.
pub(super) fn set(m: &mut Mods) -> Result<Emit, String> {
    let (name, combine, ftz) = compare_head(m)?;
    let (d, ty) = (m.ty()?, m.ty()?);
    let Some(compare) = Compare::new(name, combine, ftz, ty) else { return m.unsupported() };
    let half = matches!(compare.ty, Ty::F16 | Ty::Bf16);
    let (one, bits) = match d {
        Ty::U32 | Ty::S32 if compare.pair => (0xffff, 32),
        Ty::U32 | Ty::S32 => (u64::from(u32::MAX), 32),
        Ty::F32 if !half => (u64::from(1f32.to_bits()), 32),
        Ty::U16 | Ty::S16 if half && !compare.pair => (0xffff, 16),
        Ty::F16 if !compare.pair && ty != Ty::Bf16 => (0x3c00, 16),
        Ty::Bf16 if !compare.pair && !ftz => (0x3f80, 16),
        Ty::F16x2 if ty == d => (0x3c00, 32),
        Ty::Bf16x2 if ty == d => (0x3f80, 32),
        _ => return m.unsupported(),
    };
    let select = op3(|a: u32, b: u32, c: bool| if c { a } else { b });
    let join = op2(|low: u32, high: u32| low | high << 16);
    Ok(Box::new(move |l, ops| {
        l.count(ops, compare.operands()..=compare.operands())?;
        let (p, q) = (l.slot(File::Pred), if compare.pair { l.slot(File::Pred) } else { SINK });
        compare.emit(l, ops, [p, q])?;
        let d = l.dest(&ops[0], File::R32, bits)?;
        let (one, zero) = (l.constant(File::R32, Init::Bits(one)), l.constant(File::R32, Init::Bits(0)));
        if !compare.pair {
            l.push_alu(select.f, [d, one, zero, p, 0, 0], select.sig);
            return Ok(());
        }
        let halves = [p, q].map(|p| {
            let half = l.slot(File::R32);
            l.push_alu(select.f, [half, one, zero, p, 0, 0], select.sig);
            half
        });
        l.push_alu(join.f, [d, halves[0], halves[1], 0, 0, 0], join.sig);
        Ok(())
    }))
}
