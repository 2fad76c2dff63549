//! `cvt`: between integers and floats of all widths.

use half::f16;

use super::decode::{Emit, simple};
use super::types::{Mods, Ty};
use crate::compiled::native::Native;
use crate::exec::lanes::{Lane, Role, Sig, Spec, every_lane, lanes, op1, op2, rare1, rare2};
use crate::float::{self, F32, Format, Overflow, Round, TF32};
use crate::ir::{AluFn, File};
use crate::registers::Regs;

const ROUND: &[(&str, (Round, bool))] = &[
    ("rn", (Round::Nearest, false)),
    ("rna", (Round::Away, false)),
    ("rz", (Round::Zero, false)),
    ("rm", (Round::Down, false)),
    ("rp", (Round::Up, false)),
    ("rni", (Round::Nearest, true)),
    ("rzi", (Round::Zero, true)),
    ("rmi", (Round::Down, true)),
    ("rpi", (Round::Up, true)),
];

/// All that a conversion depends on. Travels in the unused slots of the instruction.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Conversion {
    to: Ty,
    from: Ty,
    round: Round,
    /// Round to an integer value.
    integral: bool,
    ftz: bool,
    sat: bool,
    satfinite: bool,
    relu: bool,
}

/// `cvt`
pub(super) fn cvt(m: &mut Mods) -> Result<Emit, String> {
    if m.names().any(|name| name == "pack") {
        return super::integer::pack(m);
    }
    if m.has("tf32") {
        return to_tf32(m);
    }
    let round = m.one_of(ROUND);
    let (ftz, satfinite, relu, sat) = (m.has("ftz"), m.has("satfinite"), m.has("relu"), m.has("sat"));
    let (to, from) = (m.ty()?, m.ty()?);
    let (mode, integral) = round.unwrap_or((Round::Nearest, false));
    let c = Conversion { to, from, round: mode, integral, ftz, sat, satfinite, relu };
    if let Some(spec) = packed(&c) {
        return Ok(simple(spec));
    }
    let scalar = |t: Ty| t.is_integer() || t.is_float();
    // A conversion that rounds must give a mode; no other may.
    let rounds = match (to.is_float(), from.is_float()) {
        (true, true) => to.bits() < from.bits() || to.bits() == 16 && from.bits() == 16 && to != from,
        (false, false) => false,
        _ => true,
    };
    let round_ok = match round {
        None => !rounds,
        // Exact, whatever the rounding: the manual has an example of bf16.
        Some((_, false)) => to.is_float() && (rounds || from == Ty::Bf16 && to.bits() > 16),
        Some((_, true)) => from.is_float() && (to.is_integer() || to == from),
    };
    let narrow_ok = !(satfinite || relu) || to.is_float() && to.bits() == 16;
    if !scalar(to) || !scalar(from) || !round_ok || !narrow_ok {
        return m.unsupported();
    }
    let fast = common(&c);
    Ok(Box::new(move |l, ops| {
        l.count(ops, 2..=2)?;
        // Registers may be wider than the types.
        let wider = |t: Ty, r: Option<(File, u32, u32)>, op: &(crate::ptx::Operand, crate::ptx::Span)| match r
        {
            Some((File::Pred, ..)) => Err((op.1, "cvt does not take predicates".to_string())),
            Some((_, bits, _)) if bits < t.bits() || t.is_float() && bits != t.bits() => {
                Err((op.1, format!("a {bits}-bit register does not fit {t:?}")))
            }
            other => Ok(other),
        };
        let d = wider(to, l.any_register(&ops[0])?, &ops[0])?;
        let a = wider(from, l.any_register(&ops[1])?, &ops[1])?;
        let (d_wide, d_bits, d) = match d {
            Some((file, bits, slot)) => (file == File::R64, bits, slot),
            None => {
                let bits = to.bits().max(16);
                (to.file() == File::R64, bits, l.dest(&ops[0], to.file(), bits)?)
            }
        };
        let (a_wide, a_bits, a) = match a {
            Some((file, bits, slot)) => (file == File::R64, bits, slot),
            None => {
                let bits = from.bits().max(16);
                (from.file() == File::R64, bits, l.source(&ops[1], from.file(), bits)?)
            }
        };
        if let (Some(spec), true, true) = (&fast, d_bits == to.bits(), a_bits == from.bits()) {
            l.push_spec(spec, [d, a, 0, 0, 0, 0]);
            return Ok(());
        }
        let plain_int = to.is_integer() && from.is_integer() && !c.sat;
        if let (true, Some((bits, signed))) = (plain_int, kept(to, from)) {
            let spec = match (d_wide, a_wide) {
                (false, false) => cut::<u32, u32>(bits, signed),
                (false, true) => cut::<u32, u64>(bits, signed),
                (true, false) => cut::<u64, u32>(bits, signed),
                (true, true) => cut::<u64, u64>(bits, signed),
            };
            let wide = [(spec.sig[0], d_bits), (spec.sig[1], a_bits)];
            let sig = wide.map(|(sig, bits)| Sig { bits, ..sig });
            let native = match (d_wide, a_wide, bits) {
                (true, false, 32) => Native::Extend { signed },
                (false, true, 32) => Native::Truncate,
                (false, false, 8 | 16) if !signed => Native::Keep(bits),
                _ => Native::Function,
            };
            l.push_native(spec.f, [d, a, 0, 0, 0, 0], &sig, native);
            return Ok(());
        }
        let f: AluFn = match (plain_int, d_wide, a_wide) {
            (true, false, false) => resize::<u32, u32>,
            (true, false, true) => resize::<u32, u64>,
            (true, true, false) => resize::<u64, u32>,
            (true, true, true) => resize::<u64, u64>,
            (false, false, false) => general::<u32, u32>,
            (false, false, true) => general::<u32, u64>,
            (false, true, false) => general::<u64, u32>,
            (false, true, true) => general::<u64, u64>,
        };
        let flags = c.round as u32
            | u32::from(c.integral) << 8
            | u32::from(c.ftz) << 9
            | u32::from(c.sat) << 10
            | u32::from(c.satfinite) << 11
            | u32::from(c.relu) << 12;
        let file = |wide: bool| if wide { File::R64 } else { File::R32 };
        let sig = [
            Sig { role: Role::Def, file: file(d_wide), bits: d_bits },
            Sig { role: Role::Use, file: file(a_wide), bits: a_bits },
        ];
        l.push_alu(f, [d, a, to as u32, from as u32, flags, 0], &sig);
        Ok(())
    }))
}

/// Conversions that are a single operation of the host.
fn common(c: &Conversion) -> Option<Spec> {
    if c.ftz || c.sat || c.satfinite || c.relu {
        return None;
    }
    Some(match (c.to, c.from, c.round, c.integral) {
        (Ty::F32, Ty::S32, Round::Nearest, _) => op1(|a: i32| a as f32),
        (Ty::F32, Ty::U32, Round::Nearest, _) => op1(|a: u32| a as f32),
        (Ty::F64, Ty::S32, Round::Nearest, _) => op1(|a: i32| f64::from(a)),
        (Ty::F64, Ty::U32, Round::Nearest, _) => op1(|a: u32| f64::from(a)),
        (Ty::F64, Ty::F32, ..) if !c.integral => op1(|a: f32| f64::from(a)),
        (Ty::F32, Ty::F64, Round::Nearest, false) => op1(|a: f64| float::canonical(a as f32)),
        (Ty::F32, Ty::F16, ..) if !c.integral => op1(|a: f16| float::canonical(a.to_f32())),
        (Ty::F32, Ty::Bf16, ..) if !c.integral => {
            op1(|a: u16| f32::from_bits(u32::from(a) << 16)).compiled_as(Native::WidenBf16)
        }
        (Ty::Bf16, Ty::F32, Round::Nearest, false) => op1(float::bf16_rn),
        (Ty::S32, Ty::F32, Round::Zero, true) => op1(|a: f32| a as i32),
        (Ty::U32, Ty::F32, Round::Zero, true) => op1(|a: f32| a as u32),
        _ => return None,
    })
}

fn conversion(s: &[u32; 6]) -> Conversion {
    const MODES: [Round; 5] = [Round::Nearest, Round::Away, Round::Zero, Round::Down, Round::Up];
    let flag = |bit: u32| s[4] >> bit & 1 != 0;
    Conversion {
        to: Ty::from_number(s[2]),
        from: Ty::from_number(s[3]),
        round: MODES[(s[4] & 0xff) as usize % 5],
        integral: flag(8),
        ftz: flag(9),
        sat: flag(10),
        satfinite: flag(11),
        relu: flag(12),
    }
}

/// A register word as 64 bits and back.
trait Word: Lane {
    fn widen(self) -> u64;
    fn narrow(v: u64) -> Self;
}

impl Word for u32 {
    #[inline(always)]
    fn widen(self) -> u64 {
        self.into()
    }
    #[inline(always)]
    fn narrow(v: u64) -> Self {
        v as u32
    }
}

impl Word for u64 {
    #[inline(always)]
    fn widen(self) -> u64 {
        self
    }
    #[inline(always)]
    fn narrow(v: u64) -> Self {
        v
    }
}

/// Low bits that an integer conversion keeps, and whether it extends their sign; `None` if it does
/// more than that.
fn kept(to: Ty, from: Ty) -> Option<(u32, bool)> {
    let narrower = if to.bits() <= from.bits() { to } else { from };
    // A negative number that grows into a wider unsigned type is cut to that type.
    let cut_again = to.bits() > from.bits() && from.is_signed() && !to.is_signed();
    (!cut_again).then(|| (narrower.bits(), narrower.is_signed()))
}

/// Keeps so many low bits of a register.
fn cut<D: Word, S: Word>(bits: u32, signed: bool) -> Spec {
    macro_rules! through {
        ($u:ty, $s:ty) => {
            if signed {
                op1(|a: S| D::narrow(i64::from(a.widen() as $s) as u64))
            } else {
                op1(|a: S| D::narrow(u64::from(a.widen() as $u)))
            }
        };
    }
    match bits {
        8 => through!(u8, i8),
        16 => through!(u16, i16),
        32 => through!(u32, i32),
        _ => op1(|a: S| D::narrow(a.widen())),
    }
}

/// Integer to integer without saturation: cut to the source type, extend, cut to the result type,
/// extend.
fn resize<D: Word, S: Word>(r: &mut Regs, s: &[u32; 6], m: u32) {
    let c = conversion(s);
    let (from, to) = (64 - c.from.bits(), 64 - c.to.bits());
    let (from_signed, to_signed) = (c.from.is_signed(), c.to.is_signed());
    let extend = |v: u64, shift: u32, signed: bool| {
        if signed { ((v << shift) as i64 >> shift) as u64 } else { v << shift >> shift }
    };
    let convert = |v: u64| extend(extend(v, from, from_signed), to, to_signed);
    if m == crate::ir::FULL {
        let a = S::view(r, s[1]);
        let v = every_lane(|i| D::narrow(convert(S::at(&a, i).widen())));
        D::store(r, s[0], &v);
    } else {
        lanes(m).for_each(|i| {
            let v = S::get(r, s[1], i);
            D::set(r, s[0], i, D::narrow(convert(v.widen())));
        });
    }
}

fn general<D: Word, S: Word>(r: &mut Regs, s: &[u32; 6], m: u32) {
    let c = conversion(s);
    lanes(m).for_each(|i| {
        let v = S::get(r, s[1], i);
        D::set(r, s[0], i, D::narrow(convert_scalar(&c, v.widen())));
    });
}

fn format(ty: Ty) -> Format {
    match ty {
        Ty::F16 => float::F16,
        Ty::Bf16 => float::BF16,
        Ty::F32 => float::F32,
        _ => float::F64,
    }
}

fn sign_extend(v: u64, bits: u32) -> i64 {
    ((v << (64 - bits)) as i64) >> (64 - bits)
}

fn int_range(ty: Ty) -> (i128, i128) {
    let bits = ty.bits();
    if ty.is_signed() { (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) } else { (0, (1 << bits) - 1) }
}

/// Any scalar conversion. `raw` is the source register; the result is extended to 64 bits.
fn convert_scalar(c: &Conversion, raw: u64) -> u64 {
    let bits = c.from.bits();
    let raw = if bits == 64 { raw } else { raw & ((1 << bits) - 1) };
    let (min, max) = if c.to.is_integer() { int_range(c.to) } else { (0, 0) };
    if c.from.is_integer() {
        let v = if c.from.is_signed() { i128::from(sign_extend(raw, bits)) } else { i128::from(raw) };
        if c.to.is_integer() {
            return v.clamp(min, max) as u64;
        }
        let v = float::from_int(v, format(c.to), c.round);
        return finish_float(c, v);
    }
    let raw = if c.ftz && c.from == Ty::F32 {
        u64::from(float::flush(f32::from_bits(raw as u32)).to_bits())
    } else {
        raw
    };
    if c.to.is_integer() {
        // Every source fits f64 exactly.
        let v = f64::from_bits(float::convert(raw, format(c.from), float::F64, Round::Zero, Overflow::Ieee));
        if v.is_nan() {
            // Zero, except where a 64-bit type takes part.
            let wide = c.from == Ty::F64 || c.to.bits() == 64;
            let top = 1u64 << (c.to.bits() - 1);
            return match (wide, c.to.is_signed()) {
                (false, _) => 0,
                (true, false) => top,
                (true, true) => sign_extend(top, c.to.bits()) as u64,
            };
        }
        return float::to_int(v, c.round, min, max) as u64;
    }
    if c.integral {
        let v = f64::from_bits(float::convert(raw, format(c.from), float::F64, Round::Zero, Overflow::Ieee));
        let v = float::round_to_integer(v, c.round);
        return finish_float(
            c,
            float::convert(v.to_bits(), float::F64, format(c.to), Round::Nearest, Overflow::Ieee),
        );
    }
    if c.from == c.to {
        return finish_float(c, raw);
    }
    if c.ftz && (c.to, c.from) == (Ty::F32, Ty::F64) {
        return finish_float(c, float::narrow_ftz(f64::from_bits(raw), c.round).to_bits().into());
    }
    let overflow = if c.satfinite { Overflow::Finite } else { Overflow::Ieee };
    let convert = |to| match c.from {
        Ty::F64 => float::narrow_f64(raw, to, c.round, overflow),
        from => float::convert(raw, format(from), to, c.round, overflow),
    };
    finish_float(c, convert(format(c.to)))
}

/// `.sat`, `.relu` and `.ftz` on a float result.
fn finish_float(c: &Conversion, v: u64) -> u64 {
    let f = format(c.to);
    let wide = f64::from_bits(float::convert(v, f, float::F64, Round::Zero, Overflow::Ieee));
    if c.sat {
        let clamped = if wide > 0.0 { wide.min(1.0) } else { 0.0 };
        return float::convert(clamped.to_bits(), float::F64, f, Round::Nearest, Overflow::Ieee);
    }
    if c.relu && wide <= 0.0 {
        return 0;
    }
    if c.ftz && c.to == Ty::F32 {
        return u64::from(float::flush(f32::from_bits(v as u32)).to_bits());
    }
    v
}

/// Two values at a time. The first source goes to the high half.
fn packed(c: &Conversion) -> Option<Spec> {
    if c.ftz || c.sat || c.integral {
        return None;
    }
    fn two(a: f32, b: f32, bits: u32, f: Format, mode: Round, relu: bool, overflow: Overflow) -> u32 {
        let one = |v: f32| {
            let v = if relu && v <= 0.0 { 0.0 } else { v };
            float::convert(v.to_bits().into(), float::F32, f, mode, overflow) as u32
        };
        one(a) << bits | one(b)
    }
    /// Both bytes of an fp8 pair as f16.
    fn widen(v: u16, f: Format, relu: bool) -> u32 {
        let one = |b: u16| {
            let v = float::convert(b.into(), f, float::F16, Round::Zero, Overflow::Ieee) as u32;
            let negative = v & 0x8000 != 0;
            if relu && negative { 0 } else { v }
        };
        one(v >> 8) << 16 | one(v & 0xff)
    }
    /// A pair of f16 as fp8.
    fn narrow(v: u32, f: Format, relu: bool) -> u16 {
        let h = |b: u32| f16::from_bits(b as u16).to_f32();
        two(h(v >> 16), h(v), 8, f, Round::Nearest, relu, Overflow::Finite) as u16
    }
    const NEAREST: Round = Round::Nearest;
    const ZERO: Round = Round::Zero;
    const IEEE: Overflow = Overflow::Ieee;
    const FINITE: Overflow = Overflow::Finite;
    use float::{BF16, E4M3, E5M2, F16};
    /// Two f32 as a pair in a `$pair`. With `.relu` and without it are functions of their own.
    macro_rules! pair {
        ($op:ident, $pair:ty, $format:ident, $mode:ident, $overflow:ident) => {
            if c.relu {
                $op(|a: f32, b: f32| two(a, b, <$pair>::BITS / 2, $format, $mode, true, $overflow) as $pair)
            } else {
                $op(|a: f32, b: f32| two(a, b, <$pair>::BITS / 2, $format, $mode, false, $overflow) as $pair)
            }
        };
    }
    // The round mode is optional only for conversions that do not round; `Nearest` is then its
    // default.
    let small = (c.satfinite, c.relu);
    Some(match (c.to, c.from, c.round, small) {
        (Ty::Bf16x2, Ty::F32, NEAREST, (false, false)) => {
            op2(|a: f32, b: f32| u32::from(float::bf16_rn(a)) << 16 | u32::from(float::bf16_rn(b)))
                .compiled_as(Native::PackBf16)
        }
        (Ty::Bf16x2, Ty::F32, NEAREST, (false, _)) => pair!(op2, u32, BF16, NEAREST, IEEE),
        (Ty::Bf16x2, Ty::F32, ZERO, (false, _)) => pair!(op2, u32, BF16, ZERO, IEEE),
        (Ty::Bf16x2, Ty::F32, NEAREST, (true, _)) => pair!(op2, u32, BF16, NEAREST, FINITE),
        (Ty::Bf16x2, Ty::F32, ZERO, (true, _)) => pair!(rare2, u32, BF16, ZERO, FINITE),
        (Ty::F16x2, Ty::F32, NEAREST, (false, _)) => pair!(op2, u32, F16, NEAREST, IEEE),
        (Ty::F16x2, Ty::F32, ZERO, (false, _)) => pair!(op2, u32, F16, ZERO, IEEE),
        (Ty::F16x2, Ty::F32, NEAREST, (true, _)) => pair!(rare2, u32, F16, NEAREST, FINITE),
        (Ty::F16x2, Ty::F32, ZERO, (true, _)) => pair!(rare2, u32, F16, ZERO, FINITE),
        (Ty::E4m3x2, Ty::F32, NEAREST, (true, _)) => pair!(op2, u16, E4M3, NEAREST, FINITE),
        (Ty::E5m2x2, Ty::F32, NEAREST, (true, _)) => pair!(op2, u16, E5M2, NEAREST, FINITE),
        (Ty::E4m3x2, Ty::F16x2, NEAREST, (true, false)) => op1(|v: u32| narrow(v, E4M3, false)),
        (Ty::E4m3x2, Ty::F16x2, NEAREST, (true, true)) => op1(|v: u32| narrow(v, E4M3, true)),
        (Ty::E5m2x2, Ty::F16x2, NEAREST, (true, false)) => op1(|v: u32| narrow(v, E5M2, false)),
        (Ty::E5m2x2, Ty::F16x2, NEAREST, (true, true)) => op1(|v: u32| narrow(v, E5M2, true)),
        (Ty::F16x2, Ty::E4m3x2, NEAREST, (false, false)) => op1(|v: u16| widen(v, E4M3, false)),
        (Ty::F16x2, Ty::E4m3x2, NEAREST, (false, true)) => op1(|v: u16| widen(v, E4M3, true)),
        (Ty::F16x2, Ty::E5m2x2, NEAREST, (false, false)) => op1(|v: u16| widen(v, E5M2, false)),
        (Ty::F16x2, Ty::E5m2x2, NEAREST, (false, true)) => op1(|v: u16| widen(v, E5M2, true)),
        _ => return None,
    })
}

/// `cvt.{rn,rna,rz}{.relu}{.satfinite}.tf32.f32`: a number of 32 bits whose last 13 are 0.
fn to_tf32(m: &mut Mods) -> Result<Emit, String> {
    fn narrow(v: f32, round: Round, finite: bool, relu: bool) -> u32 {
        let overflow = if finite { Overflow::Finite } else { Overflow::Ieee };
        let bits = float::convert(v.to_bits().into(), F32, TF32, round, overflow) as u32;
        match () {
            () if v.is_nan() => 0x7fff_ffff,
            () if relu && v.is_sign_negative() => 0,
            () => bits << 13,
        }
    }
    let round = m.one_of(&[("rn", Round::Nearest), ("rna", Round::Away), ("rz", Round::Zero)]);
    let (finite, relu) = (m.has("satfinite"), m.has("relu"));
    if !m.has("f32") {
        return m.unsupported();
    }
    let spec = match (round, finite, relu) {
        (Some(Round::Nearest), false, false) => rare1(|v: f32| narrow(v, Round::Nearest, false, false)),
        (Some(Round::Nearest), false, true) => rare1(|v: f32| narrow(v, Round::Nearest, false, true)),
        (Some(Round::Nearest), true, false) => rare1(|v: f32| narrow(v, Round::Nearest, true, false)),
        (Some(Round::Nearest), true, true) => rare1(|v: f32| narrow(v, Round::Nearest, true, true)),
        (Some(Round::Zero), false, false) => rare1(|v: f32| narrow(v, Round::Zero, false, false)),
        (Some(Round::Zero), false, true) => rare1(|v: f32| narrow(v, Round::Zero, false, true)),
        (Some(Round::Zero), true, false) => rare1(|v: f32| narrow(v, Round::Zero, true, false)),
        (Some(Round::Zero), true, true) => rare1(|v: f32| narrow(v, Round::Zero, true, true)),
        (Some(Round::Away), false, false) => rare1(|v: f32| narrow(v, Round::Away, false, false)),
        (Some(Round::Away), true, false) => rare1(|v: f32| narrow(v, Round::Away, true, false)),
        _ => return m.unsupported(),
    };
    Ok(simple(spec))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A conversion by `f` of every lane of a register, from a wide or narrow one to a wide or
    /// narrow one.
    fn converted(f: AluFn, s: [u32; 6], words: &[u64; 32], d_wide: bool) -> [u64; 32] {
        let r32 = vec![words.map(|v| v as u32), [0; 32]];
        let mut r = Regs::of_warps(1, [r32.len() as u32, 2, 1]).remove(0);
        r.r32.copy_from_slice(&r32);
        r.r64[0] = *words;
        // SAFETY: the constructor of `f` checked that this processor has the instructions that it
        // uses.
        unsafe { f(&mut r, &s, crate::ir::FULL) };
        if d_wide { r.r64[1] } else { r.r32[1].map(u64::from) }
    }

    #[test]
    fn keeping_low_bits_is_what_an_integer_conversion_does() {
        let types = [Ty::U8, Ty::S8, Ty::U16, Ty::S16, Ty::U32, Ty::S32, Ty::U64, Ty::S64];
        let mut rng = crate::seeds::Rng::new(5);
        let words: [u64; 32] = std::array::from_fn(|_| rng.next());
        for (to, from) in types.into_iter().flat_map(|to| types.map(|from| (to, from))) {
            let Some((bits, signed)) = kept(to, from) else { continue };
            let compare = |general: AluFn, d_wide: bool, spec: Spec| {
                let want = converted(general, [1, 0, to as u32, from as u32, 0, 0], &words, d_wide);
                assert_eq!(converted(spec.f, [1, 0, 0, 0, 0, 0], &words, d_wide), want, "{to:?} {from:?}");
            };
            let (narrow, wide) = (to.bits() < 64, from.bits() == 64);
            compare(resize::<u64, u64>, true, cut::<u64, u64>(bits, signed));
            if narrow {
                compare(resize::<u32, u64>, false, cut::<u32, u64>(bits, signed));
            }
            if !wide {
                compare(resize::<u64, u32>, true, cut::<u64, u32>(bits, signed));
            }
            if narrow && !wide {
                compare(resize::<u32, u32>, false, cut::<u32, u32>(bits, signed));
            }
        }
    }
}
