//! Integer and logic instructions that kernels seldom have.

use super::arith::{low24, sext24};
use super::decode::{Emit, simple};
use super::types::{Mods, Ty};
use crate::compiled::native::Native;
use crate::exec::lanes::{Lane, Sig, Spec, arg, def, lanes, op1, op2, op4, rare2, rare3};
use crate::ir::{File, Init, SINK};
use crate::ptx::Operand;
use crate::registers::Regs;

/// `lop3`, and `lop3.{and,or}` with a predicate.
pub(super) fn lop3(m: &mut Mods) -> Result<Emit, String> {
    let with = m.one_of(&[("and", true), ("or", false)]);
    if !m.has("b32") {
        return m.unsupported();
    }
    let logic = op4(|a: u32, b: u32, c: u32, table: u32| {
        (0..8).filter(|k| table >> k & 1 != 0).fold(0, |r, k| {
            let pick = |v: u32, bit: u32| if k & bit != 0 { v } else { !v };
            r | pick(a, 4) & pick(b, 2) & pick(c, 1)
        })
    });
    let Some(and) = with else { return Ok(simple(logic)) };
    // The result, compared with zero, and combined with the last operand.
    let combine = match and {
        true => op2(|v: u32, q: bool| v != 0 && q),
        false => op2(|v: u32, q: bool| v != 0 || q),
    };
    Ok(Box::new(move |l, ops| {
        l.count(ops, 6..=6)?;
        let Operand::Pair(d, p) = &ops[0].0 else {
            return Err((ops[0].1, "a register and a predicate are needed: d|p".to_owned()));
        };
        let (d, p) = ((Operand::clone(d), ops[0].1), (Operand::clone(p), ops[0].1));
        let mut s = [SINK; 6];
        for (slot, op) in s[1..].iter_mut().zip(&ops[1..5]) {
            *slot = l.source_of::<u32>(op)?;
        }
        let q = l.source_of::<bool>(&ops[5])?;
        let (d, p) = (l.dest_of::<u32>(&d)?, l.dest_of::<bool>(&p)?);
        s[0] = l.slot(File::R32);
        l.push_alu(logic.f, s, logic.sig);
        let copy = op1(|v: u32| v);
        l.push_alu(copy.f, [d, s[0], s[0], 0, 0, 0], copy.sig);
        // Last, since it may be the guard.
        l.push_alu(combine.f, [p, s[0], q, 0, 0, 0], combine.sig);
        Ok(())
    }))
}

/// `dp2a`, `szext`, `fns`
pub(super) fn seldom(m: &mut Mods) -> Result<Option<Spec>, String> {
    match m.base {
        "dp2a" => dp2a(m),
        "szext" => szext(m),
        _ => {
            let b32 = m.has("b32");
            Ok(b32.then(|| rare3(find_nth_set)))
        }
    }
}

/// Two halves of `a` times two bytes of `b`, added to `c`.
fn dp2a(m: &mut Mods) -> Result<Option<Spec>, String> {
    fn dot(a: [i32; 2], b: [i32; 2], c: u32) -> u32 {
        (0..2).fold(c, |sum, i| sum.wrapping_add(a[i].wrapping_mul(b[i]) as u32))
    }
    fn unsigned_halves(v: u32) -> [i32; 2] {
        [v as u16, (v >> 16) as u16].map(i32::from)
    }
    fn signed_halves(v: u32) -> [i32; 2] {
        [v as i16, (v >> 16) as i16].map(i32::from)
    }
    fn unsigned_bytes(v: u32) -> [i32; 2] {
        [v as u8, (v >> 8) as u8].map(i32::from)
    }
    fn signed_bytes(v: u32) -> [i32; 2] {
        [v as i8, (v >> 8) as i8].map(i32::from)
    }
    macro_rules! of {
        ($halves:ident, $bytes:ident, $shift:literal) => {
            rare3(|a: u32, b: u32, c: u32| dot($halves(a), $bytes(b >> $shift), c))
        };
    }
    let Some(high) = m.one_of(&[("lo", false), ("hi", true)]) else { return m.unsupported() };
    Ok(Some(match (m.ty()?, m.ty()?, high) {
        (Ty::U32, Ty::U32, false) => of!(unsigned_halves, unsigned_bytes, 0),
        (Ty::U32, Ty::U32, true) => of!(unsigned_halves, unsigned_bytes, 16),
        (Ty::U32, Ty::S32, false) => of!(unsigned_halves, signed_bytes, 0),
        (Ty::U32, Ty::S32, true) => of!(unsigned_halves, signed_bytes, 16),
        (Ty::S32, Ty::U32, false) => of!(signed_halves, unsigned_bytes, 0),
        (Ty::S32, Ty::U32, true) => of!(signed_halves, unsigned_bytes, 16),
        (Ty::S32, Ty::S32, false) => of!(signed_halves, signed_bytes, 0),
        (Ty::S32, Ty::S32, true) => of!(signed_halves, signed_bytes, 16),
        _ => return Ok(None),
    }))
}

/// `szext`: a number of `b` bits. None are 0, and all are what they are.
fn szext(m: &mut Mods) -> Result<Option<Spec>, String> {
    fn unsigned(v: u32, bits: u32) -> u32 {
        match bits {
            0 => 0,
            1..=31 => v << (32 - bits) >> (32 - bits),
            _ => v,
        }
    }
    fn signed(v: u32, bits: u32) -> u32 {
        match bits {
            0 => 0,
            1..=31 => ((v << (32 - bits)) as i32 >> (32 - bits)) as u32,
            _ => v,
        }
    }
    let Some(clamp) = m.one_of(&[("clamp", true), ("wrap", false)]) else { return m.unsupported() };
    Ok(match (m.ty()?, clamp) {
        (Ty::U32, true) => Some(rare2(unsigned)),
        (Ty::S32, true) => Some(rare2(signed)),
        (Ty::U32, false) => Some(rare2(|v: u32, bits: u32| unsigned(v, bits & 31))),
        (Ty::S32, false) => Some(rare2(|v: u32, bits: u32| signed(v, bits & 31))),
        _ => None,
    })
}

/// `fns`: the position of the set bit of `mask` that is number `offset` from `base` on, up or down;
/// all ones if there is none. Bit `base` counts.
fn find_nth_set(mask: u32, base: u32, offset: i32) -> u32 {
    let mut left = offset.unsigned_abs().max(1);
    let mut at = i64::from(base);
    while (0..32).contains(&at) {
        left -= mask >> at & 1;
        if left == 0 {
            return at as u32;
        }
        if offset == 0 {
            break;
        }
        at += i64::from(offset.signum());
    }
    u32::MAX
}

/// `mad24.hi`: bits 16 to 47 of the product, and a sum. `.sat` clamps the sum of s32.
pub(super) fn mad24_high(ty: Ty, saturates: bool) -> Option<Spec> {
    fn signed(a: i32, b: i32) -> i32 {
        ((i64::from(sext24(a)) * i64::from(sext24(b))) >> 16) as i32
    }
    match (ty, saturates) {
        (Ty::U32, false) => Some(rare3(|a: u32, b: u32, c: u32| {
            (((u64::from(low24(a)) * u64::from(low24(b))) >> 16) as u32).wrapping_add(c)
        })),
        (Ty::S32, false) => Some(rare3(|a: i32, b: i32, c: i32| signed(a, b).wrapping_add(c))),
        (Ty::S32, true) => Some(rare3(|a: i32, b: i32, c: i32| signed(a, b).saturating_add(c))),
        _ => None,
    }
}

/// `mad.hi.sat.s32`
pub(super) fn mad_high_saturated(ty: Ty) -> Option<Spec> {
    (ty == Ty::S32).then(|| {
        rare3(|a: i32, b: i32, c: i32| (((i64::from(a) * i64::from(b)) >> 32) as i32).saturating_add(c))
    })
}

/// `min.relu` and `max.relu`: a negative result is zero.
pub(super) fn extreme_or_zero(ty: Ty, max: bool) -> Option<Spec> {
    fn halves(a: u32, b: u32, f: fn(i16, i16) -> i16) -> u32 {
        let half = |shift: u32| u32::from(f((a >> shift) as i16, (b >> shift) as i16).max(0) as u16) << shift;
        half(0) | half(16)
    }
    match (ty, max) {
        (Ty::S32, false) => Some(rare2(|a: i32, b: i32| a.min(b).max(0))),
        (Ty::S32, true) => Some(rare2(|a: i32, b: i32| a.max(b).max(0))),
        (Ty::S16x2, false) => Some(rare2(|a: u32, b: u32| halves(a, b, i16::min))),
        (Ty::S16x2, true) => Some(rare2(|a: u32, b: u32| halves(a, b, i16::max))),
        _ => None,
    }
}

/// `cvt.pack.sat`: two numbers, clamped to a type of so many bits, in front of the low bits of a
/// third operand. The type is a number in the slots behind the operands.
pub(super) fn pack(m: &mut Mods) -> Result<Emit, String> {
    let saturates = m.has("pack") & m.has("sat");
    let types = [
        ("u16", (16, false)),
        ("s16", (16, true)),
        ("u8", (8, false)),
        ("s8", (8, true)),
        ("u4", (4, false)),
        ("s4", (4, true)),
        ("u2", (2, false)),
        ("s2", (2, true)),
    ];
    let Some((bits, signed)) = m.one_of(&types) else { return m.unsupported() };
    let more = m.has("b32");
    if !saturates || !m.has("s32") || more != (bits < 16) {
        return m.unsupported();
    }
    fn run(r: &mut Regs, s: &[u32; 6], m: u32) {
        let (bits, signed) = (s[4], s[5] != 0);
        let (min, max) = match signed {
            true => (-(1 << (bits - 1)), (1 << (bits - 1)) - 1),
            false => (0, (1 << bits) - 1),
        };
        let mask = u32::MAX >> (32 - bits);
        lanes(m).for_each(|lane| {
            let part = |slot: u32| i32::get(r, slot, lane).clamp(min, max) as u32 & mask;
            let packed = u64::from(part(s[1]) << bits | part(s[2]));
            let v = packed | u64::from(u32::get(r, s[3], lane)) << (2 * bits);
            u32::set(r, s[0], lane, v as u32);
        });
    }
    const SIG: &[Sig] = &[def::<u32>(), arg::<i32>(), arg::<i32>(), arg::<u32>()];
    let spec = Spec { f: run, sig: SIG, native: Native::Function };
    Ok(Box::new(move |l, ops| {
        l.count(ops, 3 + usize::from(more)..=3 + usize::from(more))?;
        let (d, a, b) =
            (l.dest_of::<u32>(&ops[0])?, l.source_of::<i32>(&ops[1])?, l.source_of::<i32>(&ops[2])?);
        let c = match ops.get(3) {
            Some(c) => l.source_of::<u32>(c)?,
            None => l.constant(File::R32, Init::Bits(0)),
        };
        l.push_alu(spec.f, [d, a, b, c, bits, u32::from(signed)], spec.sig);
        Ok(())
    }))
}
