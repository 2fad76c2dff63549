//! Arithmetic on 16-bit floats with modifiers that kernels seldom have, and `.xorsign.abs`. The
//! modifiers are a number in the slot behind the operands.

use half::{bf16, f16};

use super::decode::Emit;
use super::types::{Mods, Ty};
use crate::exec::lanes::{Lane, Sig, Spec, arg, def, lanes, rare1};
use crate::float::{self, Half, MinMax};
use crate::ir::AluFn;
use crate::registers::Regs;

/// Results are those of the low half, and of packed operands those of the upper half as well.
const PAIR: u32 = 1 << 8;
/// `.ftz`
const FTZ: u32 = 1 << 9;
/// `.sat`
const SAT: u32 = 1 << 10;
/// `.relu`
const RELU: u32 = 1 << 11;
/// `max`, and not `min`.
const GREATER: u32 = 1 << 12;
/// `.NaN`
const NAN: u32 = 1 << 13;
/// `.xorsign.abs`
const SIGN_OF_BOTH: u32 = 1 << 14;

/// The operation of [`compute`], in the low bits of its modifiers.
const ADD: u32 = 0;
const SUB: u32 = 1;
const MUL: u32 = 2;
const FMA: u32 = 3;

/// Decodes what only this module has; `None` for everything else.
pub(super) fn modified(m: &mut Mods) -> Option<Result<Emit, String>> {
    let names: Vec<&str> = m.names().collect();
    let has = |name: &str| names.contains(&name);
    let ty = Ty::parse(names.last()?)?;
    let half = matches!(ty, Ty::F16 | Ty::F16x2 | Ty::Bf16 | Ty::Bf16x2);
    match m.base {
        "add" | "sub" | "mul" | "fma" if half && ["ftz", "sat", "relu"].into_iter().any(has) => {
            Some(arithmetic(m))
        }
        "min" | "max" if has("xorsign") || half && has("ftz") => Some(extreme(m)),
        "abs" | "neg" if half && has("ftz") => Some(sign(m)),
        "ex2" | "tanh" if half => Some(approximation(m)),
        _ => None,
    }
}

/// An instruction of which `modifiers` are a number in the slot behind its operands.
fn with_modifiers(f: AluFn, sig: &'static [Sig], modifiers: u32) -> Emit {
    let spec = Spec { f, sig, native: crate::compiled::native::Native::Function };
    Box::new(move |l, ops| l.alu(&spec, ops, &[modifiers]))
}

/// Operands and result of an instruction of `n` operands, in registers of so many bits.
fn signature(bits: u32, n: usize) -> &'static [Sig] {
    const NARROW: &[Sig] = &[def::<u16>(), arg::<u16>(), arg::<u16>(), arg::<u16>()];
    const WIDE: &[Sig] = &[def::<u32>(), arg::<u32>(), arg::<u32>(), arg::<u32>()];
    if bits == 16 { &NARROW[..=n] } else { &WIDE[..=n] }
}

/// `add`, `sub`, `mul` and `fma` with `.ftz`, `.sat` or `.relu`.
fn arithmetic(m: &mut Mods) -> Result<Emit, String> {
    m.has("rn");
    let (ftz, sat, relu) = (m.has("ftz"), m.has("sat"), m.has("relu"));
    let ty = m.ty()?;
    let (op, n) = match m.base {
        "add" => (ADD, 2),
        "sub" => (SUB, 2),
        "mul" => (MUL, 2),
        _ => (FMA, 3),
    };
    let f16 = matches!(ty, Ty::F16 | Ty::F16x2);
    if (ftz || sat) && !f16 || relu && (sat || op != FMA) {
        return m.unsupported();
    }
    let flag = |there: bool, flag: u32| if there { flag } else { 0 };
    let pair = matches!(ty, Ty::F16x2 | Ty::Bf16x2);
    let modifiers = op | flag(pair, PAIR) | flag(ftz, FTZ) | flag(sat, SAT) | flag(relu, RELU);
    let run: AluFn = match (f16, n) {
        (true, 2) => run_arithmetic::<f16, 2>,
        (true, _) => run_arithmetic::<f16, 3>,
        (false, _) => run_arithmetic::<bf16, 3>,
    };
    Ok(with_modifiers(run, signature(if pair { 32 } else { 16 }, n), modifiers))
}

fn run_arithmetic<H: Half, const N: usize>(r: &mut Regs, s: &[u32; 6], m: u32) {
    let modifiers = s[N + 1];
    lanes(m).for_each(|lane| {
        let operand = |i: usize| if i <= N { u32::get(r, s[i], lane) } else { 0 };
        let (a, b, c) = (operand(1), operand(2), operand(3));
        let half = |shift: u32| {
            u32::from(compute::<H>(modifiers, (a >> shift) as u16, (b >> shift) as u16, (c >> shift) as u16))
        };
        let high = if modifiers & PAIR == 0 { 0 } else { half(16) << 16 };
        let v = half(0) | high;
        u32::set(r, s[0], lane, v);
    });
}

/// One operation of [`arithmetic`].
fn compute<H: Half>(modifiers: u32, a: u16, b: u16, c: u16) -> u16 {
    let has = |flag: u32| modifiers & flag != 0;
    let [a, b, c] = [a, b, c].map(|v| H::of_bits(if has(FTZ) { float::flush_f16(v) } else { v }).wide());
    let op = modifiers & 3;
    let v = match op {
        ADD => float::add_odd(a, b),
        SUB => float::add_odd(a, -b),
        // Exact in f64.
        MUL => a * b,
        _ => float::add_odd(a * b, c),
    };
    let rounded = H::narrow(v);
    if has(SAT) {
        // Only f16 has it. NaN becomes 0.
        let v = if has(FTZ) { float::flush_tiny_f16(rounded.bits(), v) } else { rounded.bits() };
        return match f16::from_bits(v) {
            v if v > f16::ONE => f16::ONE.to_bits(),
            v if v > f16::ZERO => v.to_bits(),
            _ => 0,
        };
    }
    let bits = if has(FTZ) { float::flush_tiny_f16(rounded.bits(), v) } else { rounded.bits() };
    if has(RELU) && bits & 0x8000 != 0 { 0 } else { bits }
}

/// A float of 16 or 32 bits, as `min` and `max` take it.
trait Number: MinMax {
    const SIGN: u32;
    const EXPONENT: u32;
    fn raw(self) -> u32;
    fn of_raw(v: u32) -> Self;
}

impl Number for f32 {
    const SIGN: u32 = 1 << 31;
    const EXPONENT: u32 = 0xff << 23;
    fn raw(self) -> u32 {
        self.to_bits()
    }
    fn of_raw(v: u32) -> Self {
        f32::from_bits(v)
    }
}

macro_rules! number {
    ($t:ty, $exponent:expr) => {
        impl Number for $t {
            const SIGN: u32 = 1 << 15;
            const EXPONENT: u32 = $exponent;
            fn raw(self) -> u32 {
                self.to_bits().into()
            }
            fn of_raw(v: u32) -> Self {
                <$t>::from_bits(v as u16)
            }
        }
    };
}
number!(f16, 0x1f << 10);
number!(bf16, 0xff << 7);

/// `min` and `max` with `.xorsign.abs`, or with `.ftz` on f16.
fn extreme(m: &mut Mods) -> Result<Emit, String> {
    let flag = |there: bool, flag: u32| if there { flag } else { 0 };
    let (ftz, nan, xorsign) = (m.has("ftz"), m.has("NaN"), m.has("xorsign") & m.has("abs"));
    let ty = m.ty()?;
    let (run, pair): (AluFn, bool) = match ty {
        Ty::F32 => (run_extreme::<f32>, false),
        Ty::F16 => (run_extreme::<f16>, false),
        Ty::F16x2 => (run_extreme::<f16>, true),
        Ty::Bf16 if !ftz => (run_extreme::<bf16>, false),
        Ty::Bf16x2 if !ftz => (run_extreme::<bf16>, true),
        _ => return m.unsupported(),
    };
    let modifiers = flag(m.base == "max", GREATER)
        | flag(pair, PAIR)
        | flag(ftz, FTZ)
        | flag(nan, NAN)
        | flag(xorsign, SIGN_OF_BOTH);
    Ok(with_modifiers(run, signature(if ty.bits() == 16 { 16 } else { 32 }, 2), modifiers))
}

fn run_extreme<T: Number>(r: &mut Regs, s: &[u32; 6], m: u32) {
    let modifiers = s[3];
    lanes(m).for_each(|lane| {
        let (a, b) = (u32::get(r, s[1], lane), u32::get(r, s[2], lane));
        let v = if modifiers & PAIR == 0 {
            extreme_of::<T>(modifiers, a, b)
        } else {
            extreme_of::<T>(modifiers, a & 0xffff, b & 0xffff)
                | extreme_of::<T>(modifiers, a >> 16, b >> 16) << 16
        };
        u32::set(r, s[0], lane, v);
    });
}

/// One `min` or `max`, by the manual's pseudo code.
fn extreme_of<T: Number>(modifiers: u32, a: u32, b: u32) -> u32 {
    let has = |flag: u32| modifiers & flag != 0;
    let flush = |v: u32| if has(FTZ) && v & T::EXPONENT == 0 { v & T::SIGN } else { v };
    let (a, b) = (flush(a), flush(b));
    let sign = (a ^ b) & T::SIGN;
    let [x, y] = [a, b].map(|v| T::of_raw(if has(SIGN_OF_BOTH) { v & !T::SIGN } else { v }));
    let v = match (has(GREATER), has(NAN)) {
        (false, false) => float::min::<T, false>(x, y),
        (false, true) => float::min::<T, true>(x, y),
        (true, false) => float::max::<T, false>(x, y),
        (true, true) => float::max::<T, true>(x, y),
    };
    if has(SIGN_OF_BOTH) && !v.nan() { v.raw() & !T::SIGN | sign } else { v.raw() }
}

/// `abs.ftz` and `neg.ftz` of f16.
fn sign(m: &mut Mods) -> Result<Emit, String> {
    m.has("ftz");
    fn both(v: u32, f: impl Fn(u16) -> u16) -> u32 {
        u32::from(f(v as u16)) | u32::from(f((v >> 16) as u16)) << 16
    }
    let abs = |v: u16| float::flush_f16(v) & 0x7fff;
    let neg = |v: u16| float::flush_f16(v) ^ 0x8000;
    let spec = match (m.base, m.ty()?) {
        ("abs", Ty::F16) => rare1(abs),
        ("abs", Ty::F16x2) => rare1(move |v: u32| both(v, abs)),
        ("neg", Ty::F16) => rare1(neg),
        ("neg", Ty::F16x2) => rare1(move |v: u32| both(v, neg)),
        _ => return m.unsupported(),
    };
    Ok(super::decode::simple(spec))
}

/// `ex2.approx` and `tanh.approx`, computed as well as the host can.
fn approximation(m: &mut Mods) -> Result<Emit, String> {
    fn one<H: Half>(v: u16, f: fn(f64) -> f64) -> u16 {
        H::narrow(f(H::of_bits(v).wide())).bits()
    }
    fn both<H: Half>(v: u32, f: fn(f64) -> f64) -> u32 {
        u32::from(one::<H>(v as u16, f)) | u32::from(one::<H>((v >> 16) as u16, f)) << 16
    }
    /// Subnormal numbers of bf16 are flushed. 2 to the power of one is 1, as it is of zero.
    fn flushed(v: u16) -> u16 {
        if v & 0x7f80 == 0 { v & 0x8000 } else { v }
    }
    fn flushed_power(v: u16) -> u16 {
        flushed(one::<bf16>(v, f64::exp2))
    }
    let (approx, ftz) = (m.has("approx"), m.has("ftz"));
    let ty = m.ty()?;
    let spec = match (m.base, ty, ftz) {
        _ if !approx => return m.unsupported(),
        ("ex2", Ty::F16, false) => rare1(|v: u16| one::<f16>(v, f64::exp2)),
        ("ex2", Ty::F16x2, false) => rare1(|v: u32| both::<f16>(v, f64::exp2)),
        ("ex2", Ty::Bf16, true) => rare1(flushed_power),
        ("ex2", Ty::Bf16x2, true) => rare1(|v: u32| {
            u32::from(flushed_power(v as u16)) | u32::from(flushed_power((v >> 16) as u16)) << 16
        }),
        ("tanh", Ty::F16, false) => rare1(|v: u16| one::<f16>(v, f64::tanh)),
        ("tanh", Ty::F16x2, false) => rare1(|v: u32| both::<f16>(v, f64::tanh)),
        ("tanh", Ty::Bf16, false) => rare1(|v: u16| one::<bf16>(v, f64::tanh)),
        ("tanh", Ty::Bf16x2, false) => rare1(|v: u32| both::<bf16>(v, f64::tanh)),
        _ => return m.unsupported(),
    };
    Ok(super::decode::simple(spec))
}
