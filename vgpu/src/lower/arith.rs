//! Arithmetic, logic, comparison: one closure per instruction and type.

use half::{bf16, f16};

use super::decode::{Emit, simple};
use super::types::{Mods, Ty};
use super::{compare, half_float, integer};
use crate::compiled::native::{Binary, Float, Logic, Native, Shift, Unary, Width};
use crate::exec::lanes::{Spec, op_carry, op_pred, op_setp, op1, op2, op3, op4, rare1, rare2, rare3};
use crate::float::{self, Directed, Half, Round, SCALE, canonical, flush, saturate};
use crate::ir::{CARRY, File, Init, SINK};
use crate::ptx::{Operand, Span};

/// Evaluates an expression with a type alias bound to the Rust type of a PTX type; `None` for other
/// types.
macro_rules! with_type {
    ($ty:expr, [$($v:ident = $t:ty),* $(,)?], $T:ident => $e:expr) => {
        match $ty {
            $(Ty::$v => { type $T = $t; Some($e) })*
            _ => None,
        }
    };
}

macro_rules! integers {
    ($ty:expr, $T:ident => $e:expr) => {
        with_type!($ty, [U16 = u16, S16 = i16, U32 = u32, S32 = i32, U64 = u64, S64 = i64], $T => $e)
    };
}

macro_rules! signed {
    ($ty:expr, $T:ident => $e:expr) => { with_type!($ty, [S16 = i16, S32 = i32, S64 = i64], $T => $e) };
}

macro_rules! bits {
    ($ty:expr, $T:ident => $e:expr) => { with_type!($ty, [B16 = u16, B32 = u32, B64 = u64], $T => $e) };
}

/// Modifiers of floating-point arithmetic.
#[derive(Clone, Copy)]
struct Flags {
    round: Round,
    ftz: bool,
    sat: bool,
}

impl Flags {
    /// The f32 modifiers are there, which no other type has.
    fn flush_or_saturate(self) -> bool {
        self.ftz || self.sat
    }

    /// Something is there that only f32 and f64 have.
    fn any(self) -> bool {
        self.flush_or_saturate() || self.round != Round::Nearest
    }
}

fn flags(m: &mut Mods) -> Flags {
    let modes = [("rn", Round::Nearest), ("rz", Round::Zero), ("rm", Round::Down), ("rp", Round::Up)];
    let round = m.one_of(&modes).unwrap_or(Round::Nearest);
    Flags { round, ftz: m.has("ftz"), sat: m.has("sat") }
}

/// An instruction by its rounding: `$nearest`, or `$directed` with the constant `$R` for the mode.
/// Closures of instructions capture nothing, so the mode must be a constant.
macro_rules! by_round {
    ($round:expr, $nearest:expr, $R:ident => $directed:expr) => {
        match $round {
            Round::Nearest | Round::Away => $nearest,
            Round::Zero => {
                const $R: Round = Round::Zero;
                $directed
            }
            Round::Down => {
                const $R: Round = Round::Down;
                $directed
            }
            Round::Up => {
                const $R: Round = Round::Up;
                $directed
            }
        }
    };
}

/// Functions of f32 with the modifiers that only these have, which kernels seldom use.
macro_rules! f32_forms {
    ($($name:ident($($arg:ident: $t:ty),*) = $plain:ident or $rare:ident;)*) => {$(
        fn $name<F: Fn($($t),*) -> f32 + Copy + 'static>(g: Flags, f: F) -> Spec {
            match (g.ftz, g.sat) {
                (false, false) => $plain(move |$($arg),*| canonical(f($($arg),*))),
                (true, false) => $rare(move |$($arg),*| canonical(flush(f($(flush($arg)),*)))),
                (false, true) => $rare(move |$($arg),*| saturate(f($($arg),*))),
                (true, true) => $rare(move |$($arg),*| saturate(flush(f($(flush($arg)),*)))),
            }
        }
    )*};
}

f32_forms! {
    f32_1(a: f32) = op1 or rare1;
    f32_2(a: f32, b: f32) = op2 or rare2;
    f32_3(a: f32, b: f32, c: f32) = op3 or rare3;
    f32_rare1(a: f32) = rare1 or rare1;
    f32_rare2(a: f32, b: f32) = rare2 or rare2;
    f32_rare3(a: f32, b: f32, c: f32) = rare3 or rare3;
}

/// The width of a type's registers, as compiled code has operations for them.
fn width(ty: Ty) -> Option<Width> {
    match ty.bits() {
        32 => Some(Width::W32),
        64 => Some(Width::W64),
        _ => None,
    }
}

fn binary(ty: Ty, op: Binary) -> Native {
    width(ty).map_or(Native::Function, |width| Native::Binary(op, width))
}

fn unary(ty: Ty, op: Unary) -> Native {
    width(ty).map_or(Native::Function, |width| Native::Unary(op, width))
}

fn shift_of(ty: Ty, op: Shift) -> Native {
    width(ty).map_or(Native::Function, |width| Native::Shift(op, width))
}

fn divide(ty: Ty, remainder: bool) -> Native {
    if ty == Ty::U32 { Native::Divide { remainder } } else { Native::Function }
}

/// The operation of f32 without modifiers.
fn plain(g: Flags, spec: Spec, native: Native) -> Spec {
    if g.flush_or_saturate() { spec } else { spec.compiled_as(native) }
}

/// Applies a function to both halves of a packed pair.
#[inline(always)]
fn pairwise<H: Half>(a: u32, b: u32, c: u32, f: impl Fn(H, H, H) -> H) -> u32 {
    let half = |v: u32, k: u32| H::of_bits((v >> (16 * k)) as u16);
    let go = |k| u32::from(f(half(a, k), half(b, k), half(c, k)).bits());
    go(0) | go(1) << 16
}

fn halves(a: u32, b: u32, f: impl Fn(u16, u16) -> u16) -> u32 {
    u32::from(f(a as u16, b as u16)) | u32::from(f((a >> 16) as u16, (b >> 16) as u16)) << 16
}

/// A two-operand function on 16-bit floats, single or packed.
macro_rules! half_2 {
    ($ty:expr, $H:ident => $f:expr) => {
        match $ty {
            Ty::F16 => {
                type $H = f16;
                Some(op2(|a: f16, b: f16| $f(a, b)))
            }
            Ty::Bf16 => {
                type $H = bf16;
                Some(op2(|a: bf16, b: bf16| $f(a, b)))
            }
            Ty::F16x2 => {
                type $H = f16;
                Some(op2(|a: u32, b: u32| pairwise::<f16>(a, b, 0, |x, y, _| $f(x, y))))
            }
            Ty::Bf16x2 => {
                type $H = bf16;
                Some(op2(|a: u32, b: u32| pairwise::<bf16>(a, b, 0, |x, y, _| $f(x, y))))
            }
            _ => None,
        }
    };
}

/// Decodes the arithmetic instructions that no other module handles.
pub(super) fn decode(m: &mut Mods) -> Result<Emit, String> {
    match m.base {
        "setp" => return compare::setp(m),
        "set" => return compare::set(m),
        "lop3" => return integer::lop3(m),
        "addc" | "subc" => return carry(m, true),
        _ => {}
    }
    if matches!(m.base, "add" | "sub") && m.has("cc") {
        return carry(m, false);
    }
    if let Some(emit) = half_float::modified(m) {
        return emit;
    }
    let spec = match m.base {
        "add" | "sub" => add_sub(m)?,
        "mul" | "mad" | "mul24" | "mad24" | "fma" => mul(m)?,
        "div" | "rem" => div(m)?,
        "abs" | "neg" => abs_neg(m)?,
        "min" | "max" => min_max(m)?,
        "sad" => {
            let ty = m.ty()?;
            integers!(ty, T => op3(|a: T, b: T, c: T| c.wrapping_add(a.max(b).wrapping_sub(a.min(b)))))
        }
        "and" | "or" | "xor" | "not" | "cnot" => logic(m)?,
        "shl" | "shr" | "shf" => shift(m)?,
        "bfe" | "bfi" | "brev" | "clz" | "popc" | "bfind" | "bmsk" => bit_fields(m)?,
        "prmt" => return permutation(m),
        "dp4a" => dp4a(m)?,
        "dp2a" | "szext" | "fns" => integer::seldom(m)?,
        "selp" => {
            let ty = m.ty()?;
            match ty.bits() {
                16 => Some(op3(|a: u16, b: u16, c: bool| if c { a } else { b })),
                32 => Some(
                    op3(|a: u32, b: u32, c: bool| if c { a } else { b })
                        .compiled_as(Native::Select(Width::W32)),
                ),
                64 => Some(
                    op3(|a: u64, b: u64, c: bool| if c { a } else { b })
                        .compiled_as(Native::Select(Width::W64)),
                ),
                _ => None,
            }
        }
        "slct" => {
            let ftz = m.has("ftz");
            let (d, c) = (m.ty()?, m.ty()?);
            match (d.bits(), c, ftz) {
                (16, Ty::S32, false) => Some(op3(|a: u16, b: u16, c: i32| if c >= 0 { a } else { b })),
                (32, Ty::S32, false) => Some(op3(|a: u32, b: u32, c: i32| if c >= 0 { a } else { b })),
                (64, Ty::S32, false) => Some(op3(|a: u64, b: u64, c: i32| if c >= 0 { a } else { b })),
                // A flushed subnormal is a zero, and so is not negative.
                (16, Ty::F32, true) => {
                    Some(op3(|a: u16, b: u16, c: f32| if flush(c) >= 0.0 { a } else { b }))
                }
                (32, Ty::F32, true) => {
                    Some(op3(|a: u32, b: u32, c: f32| if flush(c) >= 0.0 { a } else { b }))
                }
                (64, Ty::F32, true) => {
                    Some(op3(|a: u64, b: u64, c: f32| if flush(c) >= 0.0 { a } else { b }))
                }
                (16, Ty::F32, false) => Some(op3(|a: u16, b: u16, c: f32| if c >= 0.0 { a } else { b })),
                (32, Ty::F32, false) => Some(op3(|a: u32, b: u32, c: f32| if c >= 0.0 { a } else { b })),
                (64, Ty::F32, false) => Some(op3(|a: u64, b: u64, c: f32| if c >= 0.0 { a } else { b })),
                _ => None,
            }
        }
        "testp" => testp(m)?,
        "copysign" => match m.ty()? {
            // The sign comes from the first operand.
            Ty::F32 => Some(op2(|a: f32, b: f32| b.copysign(a))),
            Ty::F64 => Some(rare2(|a: f64, b: f64| b.copysign(a))),
            _ => None,
        },
        "rcp" | "sqrt" | "rsqrt" | "sin" | "cos" | "lg2" | "ex2" | "tanh" => special_function(m)?,
        other => return Err(format!("instruction '{other}' is not supported")),
    };
    match spec {
        Some(spec) => Ok(simple(spec)),
        None => m.unsupported(),
    }
}

fn add_sub(m: &mut Mods) -> Result<Option<Spec>, String> {
    let sub = m.base == "sub";
    let g = flags(m);
    let ty = m.ty()?;
    Ok(match ty {
        Ty::F32 if sub => Some(
            by_round!(g.round, plain(g, f32_2(g, |a, b| a - b), Native::Float(Float::Sub)), R => f32_rare2(g, |a, b| a.add(-b, R))),
        ),
        Ty::F32 => Some(
            by_round!(g.round, plain(g, f32_2(g, |a, b| a + b), Native::Float(Float::Add)), R => f32_rare2(g, |a, b| a.add(b, R))),
        ),
        Ty::F64 if g.flush_or_saturate() => None,
        Ty::F64 if sub => {
            Some(by_round!(g.round, rare2(|a: f64, b: f64| a - b), R => rare2(|a: f64, b: f64| a.add(-b, R))))
        }
        Ty::F64 => {
            Some(by_round!(g.round, rare2(|a: f64, b: f64| a + b), R => rare2(|a: f64, b: f64| a.add(b, R))))
        }
        Ty::S32 if g.sat && sub => Some(op2(|a: i32, b: i32| a.saturating_sub(b))),
        Ty::S32 if g.sat => Some(op2(|a: i32, b: i32| a.saturating_add(b))),
        _ if g.any() => None,
        Ty::U16x2 | Ty::S16x2 if !sub => Some(op2(|a: u32, b: u32| halves(a, b, u16::wrapping_add))),
        _ if sub => {
            integers!(ty, T => op2(|a: T, b: T| a.wrapping_sub(b)).compiled_as(binary(ty, Binary::Sub)))
                .or_else(|| half_2!(ty, H => float::sub_half::<H>))
        }
        _ => integers!(ty, T => op2(|a: T, b: T| a.wrapping_add(b)).compiled_as(binary(ty, Binary::Add)))
            .or_else(|| half_2!(ty, H => float::add_half::<H>)),
    })
}

/// `add.cc`, `addc{.cc}` and the same for `sub`: the carry flag is a predicate register of its own.
fn carry(m: &mut Mods, with_carry: bool) -> Result<Emit, String> {
    let sub = m.base.starts_with("sub");
    let sets = if with_carry { m.has("cc") } else { true };
    let ty = m.ty()?;
    macro_rules! chain {
        ($t:ty) => {
            if sub {
                // The flag is the borrow.
                op_carry(|a: $t, b: $t, c: bool| {
                    let (v, b1) = a.overflowing_sub(b);
                    let (v, b2) = v.overflowing_sub(<$t>::from(c));
                    (v, b1 | b2)
                })
            } else {
                op_carry(|a: $t, b: $t, c: bool| {
                    let (v, c1) = a.overflowing_add(b);
                    let (v, c2) = v.overflowing_add(<$t>::from(c));
                    (v, c1 | c2)
                })
            }
        };
    }
    let spec = match ty {
        Ty::U32 | Ty::S32 => chain!(u32),
        Ty::U64 | Ty::S64 => chain!(u64),
        _ => return m.unsupported(),
    };
    Ok(Box::new(move |l, ops| {
        l.count(ops, 3..=3)?;
        let carry_in = if with_carry { CARRY } else { l.constant(File::Pred, Init::Bits(0)) };
        let s = [
            l.operand(&ops[0], &spec.sig[0])?,
            l.operand(&ops[1], &spec.sig[1])?,
            l.operand(&ops[2], &spec.sig[2])?,
            carry_in,
            if sets { CARRY } else { SINK },
            0,
        ];
        l.push_alu(spec.f, s, spec.sig);
        Ok(())
    }))
}

fn mul(m: &mut Mods) -> Result<Option<Spec>, String> {
    let add = m.base.starts_with("mad");
    if m.base == "fma" {
        let g = flags(m);
        let relu = m.has("relu");
        return Ok(match m.ty()? {
            _ if relu => None,
            ty @ (Ty::F32 | Ty::F64) => fma(ty, g),
            _ if g.any() => None,
            Ty::F16 => Some(op3(float::fma_half::<f16>)),
            Ty::Bf16 => Some(op3(float::fma_half::<bf16>)),
            Ty::F16x2 => Some(op3(|a: u32, b: u32, c: u32| pairwise::<f16>(a, b, c, float::fma_half))),
            Ty::Bf16x2 => Some(op3(|a: u32, b: u32, c: u32| pairwise::<bf16>(a, b, c, float::fma_half))),
            _ => None,
        });
    }
    #[derive(Clone, Copy, PartialEq)]
    enum Part {
        Low,
        High,
        Wide,
    }
    let part = m.one_of(&[("lo", Part::Low), ("hi", Part::High), ("wide", Part::Wide)]);
    let Some(part) = part else {
        let g = flags(m);
        let ty = m.ty()?;
        return Ok(match ty {
            Ty::F32 | Ty::F64 if add => fma(ty, g),
            Ty::F32 if g.ftz => Some(by_round!(g.round,
                f32_2(g, |a, b| float::flush_tiny(a * b, || a * SCALE * b)),
                R => f32_rare2(g, |a, b| float::flush_tiny(a.mul(b, R), || (a * SCALE).mul(b, R))))),
            Ty::F32 => Some(
                by_round!(g.round, plain(g, f32_2(g, |a, b| a * b), Native::Float(Float::Mul)), R => f32_rare2(g, |a, b| a.mul(b, R))),
            ),
            Ty::F64 if g.flush_or_saturate() => None,
            Ty::F64 => Some(
                by_round!(g.round, rare2(|a: f64, b: f64| a * b), R => rare2(|a: f64, b: f64| a.mul(b, R))),
            ),
            _ if add || g.any() => None,
            _ => half_2!(ty, H => float::mul_half::<H>),
        });
    };
    let ty = m.ty()?;
    if m.base.ends_with("24") {
        // Operands are 24 bits wide.
        return Ok(match (ty, part, add) {
            (Ty::U32, Part::Low, false) => Some(rare2(|a: u32, b: u32| low24(a).wrapping_mul(low24(b)))),
            (Ty::S32, Part::Low, false) => Some(rare2(|a: i32, b: i32| sext24(a).wrapping_mul(sext24(b)))),
            (Ty::U32, Part::Low, true) => {
                Some(rare3(|a: u32, b: u32, c: u32| low24(a).wrapping_mul(low24(b)).wrapping_add(c)))
            }
            (Ty::S32, Part::Low, true) => {
                Some(rare3(|a: i32, b: i32, c: i32| sext24(a).wrapping_mul(sext24(b)).wrapping_add(c)))
            }
            (Ty::U32 | Ty::S32, Part::High, true) => integer::mad24_high(ty, m.has("sat")),
            // Bits 16 to 47 of the 48-bit product.
            (Ty::U32, Part::High, false) => {
                Some(rare2(|a: u32, b: u32| ((u64::from(low24(a)) * u64::from(low24(b))) >> 16) as u32))
            }
            (Ty::S32, Part::High, false) => {
                Some(rare2(|a: i32, b: i32| ((i64::from(sext24(a)) * i64::from(sext24(b))) >> 16) as i32))
            }
            _ => None,
        });
    }
    Ok(match (part, add) {
        (Part::Low, false) => {
            integers!(ty, T => op2(|a: T, b: T| a.wrapping_mul(b)).compiled_as(binary(ty, Binary::Mul)))
        }
        (Part::Low, true) => integers!(ty, T => op3(|a: T, b: T, c: T| a.wrapping_mul(b).wrapping_add(c))
            .compiled_as(width(ty).map_or(Native::Function, Native::MultiplyAdd))),
        (Part::High, false) => {
            integers!(ty, T => op2(|a: T, b: T| ((i128::from(a) * i128::from(b)) >> T::BITS) as T))
                .filter(|_| ty != Ty::U64)
                .or_else(|| {
                    (ty == Ty::U64)
                        .then(|| op2(|a: u64, b: u64| ((u128::from(a) * u128::from(b)) >> 64) as u64))
                })
        }
        (Part::High, true) if m.has("sat") => integer::mad_high_saturated(ty),
        (Part::High, true) if ty == Ty::U64 => Some(op3(|a: u64, b: u64, c: u64| {
            (((u128::from(a) * u128::from(b)) >> 64) as u64).wrapping_add(c)
        })),
        (Part::High, true) => integers!(ty, T => op3(|a: T, b: T, c: T| {
            (((i128::from(a) * i128::from(b)) >> T::BITS) as T).wrapping_add(c)
        })),
        (Part::Wide, false) => match ty {
            Ty::U16 => Some(op2(|a: u16, b: u16| u32::from(a) * u32::from(b))),
            Ty::S16 => Some(op2(|a: i16, b: i16| i32::from(a) * i32::from(b))),
            Ty::U32 => Some(
                op2(|a: u32, b: u32| u64::from(a) * u64::from(b))
                    .compiled_as(Native::MultiplyWide { signed: false }),
            ),
            Ty::S32 => Some(
                op2(|a: i32, b: i32| i64::from(a) * i64::from(b))
                    .compiled_as(Native::MultiplyWide { signed: true }),
            ),
            _ => None,
        },
        (Part::Wide, true) => match ty {
            Ty::U16 => Some(op3(|a: u16, b: u16, c: u32| (u32::from(a) * u32::from(b)).wrapping_add(c))),
            Ty::S16 => Some(op3(|a: i16, b: i16, c: i32| (i32::from(a) * i32::from(b)).wrapping_add(c))),
            Ty::U32 => Some(
                op3(|a: u32, b: u32, c: u64| (u64::from(a) * u64::from(b)).wrapping_add(c))
                    .compiled_as(Native::MultiplyAddWide { signed: false }),
            ),
            Ty::S32 => Some(
                op3(|a: i32, b: i32, c: i64| (i64::from(a) * i64::from(b)).wrapping_add(c))
                    .compiled_as(Native::MultiplyAddWide { signed: true }),
            ),
            _ => None,
        },
    })
}

/// `fma`, and `mad` of floats, which is the same.
fn fma(ty: Ty, g: Flags) -> Option<Spec> {
    match ty {
        Ty::F32 if g.ftz => Some(by_round!(g.round,
            f32_3(g, |a, b, c| float::flush_tiny(a.mul_add(b, c), || (a * SCALE).mul_add(b, c * SCALE))),
            R => f32_rare3(g, |a, b, c| float::flush_tiny(a.fma(b, c, R), || (a * SCALE).fma(b, c * SCALE, R))))),
        Ty::F32 => Some(
            by_round!(g.round, plain(g, f32_3(g, f32::mul_add), Native::FusedMultiplyAdd), R => f32_rare3(g, |a, b, c| a.fma(b, c, R))),
        ),
        _ if g.flush_or_saturate() => None,
        _ => Some(by_round!(
            g.round,
            rare3(|a: f64, b: f64, c: f64| a.mul_add(b, c)),
            R => rare3(|a: f64, b: f64, c: f64| a.fma(b, c, R))
        )),
    }
}

pub(super) fn low24(v: u32) -> u32 {
    v & 0xff_ffff
}

pub(super) fn sext24(v: i32) -> i32 {
    v << 8 >> 8
}

fn div(m: &mut Mods) -> Result<Option<Spec>, String> {
    if m.base == "rem" {
        let ty = m.ty()?;
        // By zero the result is up to the machine.
        return Ok(integers!(ty, T => rare2(|a: T, b: T| if b == 0 { !0 } else { a.wrapping_rem(b) })
            .compiled_as(divide(ty, true))));
    }
    let (approx, full) = (m.has("approx"), m.has("full"));
    let g = flags(m);
    let ty = m.ty()?;
    Ok(match ty {
        _ if g.sat || (approx || full) && g.round != Round::Nearest => None,
        Ty::F32 if approx => Some(f32_rare2(g, float::div_approx)),
        Ty::F32 if g.ftz => Some(by_round!(g.round,
            f32_rare2(g, |a, b| float::flush_tiny(a / b, || a * SCALE / b)),
            R => f32_rare2(g, |a, b| float::flush_tiny(a.div(b, R), || (a * SCALE).div(b, R))))),
        Ty::F32 => {
            Some(by_round!(g.round, f32_rare2(g, |a, b| a / b), R => f32_rare2(g, |a, b| a.div(b, R))))
        }
        _ if g.ftz => None,
        Ty::F64 => {
            Some(by_round!(g.round, rare2(|a: f64, b: f64| a / b), R => rare2(|a: f64, b: f64| a.div(b, R))))
        }
        _ if g.any() => None,
        _ => integers!(ty, T => rare2(|a: T, b: T| if b == 0 { !0 } else { a.wrapping_div(b) })
            .compiled_as(divide(ty, false))),
    })
}

fn abs_neg(m: &mut Mods) -> Result<Option<Spec>, String> {
    let neg = m.base == "neg";
    let ftz = Flags { round: Round::Nearest, ftz: m.has("ftz"), sat: false };
    let ty = m.ty()?;
    Ok(match (neg, ty) {
        (true, Ty::F32) => Some(f32_1(ftz, |a| -a)),
        (false, Ty::F32) => Some(f32_1(ftz, f32::abs)),
        _ if ftz.ftz => None,
        (true, Ty::F64) => Some(rare1(|a: f64| -a)),
        (false, Ty::F64) => Some(rare1(f64::abs)),
        (true, Ty::F16 | Ty::Bf16) => Some(op1(|a: u16| a ^ 0x8000)),
        (false, Ty::F16 | Ty::Bf16) => Some(op1(|a: u16| a & 0x7fff)),
        (true, Ty::F16x2 | Ty::Bf16x2) => Some(op1(|a: u32| a ^ 0x8000_8000)),
        (false, Ty::F16x2 | Ty::Bf16x2) => Some(op1(|a: u32| a & 0x7fff_7fff)),
        (true, _) => signed!(ty, T => op1(|a: T| a.wrapping_neg()).compiled_as(unary(ty, Unary::Negate))),
        (false, _) => signed!(ty, T => op1(|a: T| a.wrapping_abs())),
    })
}

fn min_max(m: &mut Mods) -> Result<Option<Spec>, String> {
    let max = m.base == "max";
    let ftz = Flags { round: Round::Nearest, ftz: m.has("ftz"), sat: false };
    let nan = m.has("NaN");
    let relu = m.has("relu");
    let ty = m.ty()?;
    if relu {
        return Ok(integer::extreme_or_zero(ty, max));
    }
    if ty == Ty::F32 {
        return Ok(Some(match (max, nan) {
            (false, false) => f32_2(ftz, float::min::<f32, false>),
            (false, true) => f32_2(ftz, float::min::<f32, true>),
            (true, false) => f32_2(ftz, float::max::<f32, false>),
            (true, true) => f32_2(ftz, float::max::<f32, true>),
        }));
    }
    if ftz.ftz {
        return Ok(None);
    }
    let half = match (max, nan) {
        (false, false) => half_2!(ty, H => float::min::<H, false>),
        (false, true) => half_2!(ty, H => float::min::<H, true>),
        (true, false) => half_2!(ty, H => float::max::<H, false>),
        (true, true) => half_2!(ty, H => float::max::<H, true>),
    };
    if half.is_some() || nan {
        return Ok(half);
    }
    Ok(match (max, ty) {
        (false, Ty::F64) => Some(rare2(float::min::<f64, false>)),
        (true, Ty::F64) => Some(rare2(float::max::<f64, false>)),
        (false, Ty::U16x2) => Some(op2(|a: u32, b: u32| halves(a, b, u16::min))),
        (true, Ty::U16x2) => Some(op2(|a: u32, b: u32| halves(a, b, u16::max))),
        (false, Ty::S16x2) => {
            Some(op2(|a: u32, b: u32| halves(a, b, |x, y| (x as i16).min(y as i16) as u16)))
        }
        (true, Ty::S16x2) => Some(op2(|a: u32, b: u32| halves(a, b, |x, y| (x as i16).max(y as i16) as u16))),
        (false, _) => integers!(ty, T => op2(|a: T, b: T| a.min(b)).compiled_as(binary(
            ty,
            if ty.is_signed() { Binary::MinSigned } else { Binary::MinUnsigned },
        ))),
        (true, _) => integers!(ty, T => op2(|a: T, b: T| a.max(b)).compiled_as(binary(
            ty,
            if ty.is_signed() { Binary::MaxSigned } else { Binary::MaxUnsigned },
        ))),
    })
}

fn logic(m: &mut Mods) -> Result<Option<Spec>, String> {
    let ty = m.ty()?;
    if ty == Ty::Pred {
        return Ok(match m.base {
            "and" => Some(op_pred(|a, b| a & b).compiled_as(Native::Logic(Logic::And))),
            "or" => Some(op_pred(|a, b| a | b).compiled_as(Native::Logic(Logic::Or))),
            "xor" => Some(op_pred(|a, b| a ^ b).compiled_as(Native::Logic(Logic::Xor))),
            "not" => Some(op1(|a: bool| !a).compiled_as(Native::Logic(Logic::Not))),
            _ => None,
        });
    }
    Ok(match m.base {
        "and" => bits!(ty, T => op2(|a: T, b: T| a & b).compiled_as(binary(ty, Binary::And))),
        "or" => bits!(ty, T => op2(|a: T, b: T| a | b).compiled_as(binary(ty, Binary::Or))),
        "xor" => bits!(ty, T => op2(|a: T, b: T| a ^ b).compiled_as(binary(ty, Binary::Xor))),
        "not" => bits!(ty, T => op1(|a: T| !a).compiled_as(unary(ty, Unary::Not))),
        _ => bits!(ty, T => op1(|a: T| T::from(a == 0))),
    })
}

fn shift(m: &mut Mods) -> Result<Option<Spec>, String> {
    if m.base == "shf" {
        let left = m.one_of(&[("l", true), ("r", false)]);
        let clamp = m.one_of(&[("clamp", true), ("wrap", false)]);
        let b32 = m.has("b32");
        return Ok(match (left, clamp, b32) {
            (Some(true), Some(true), true) => {
                Some(op3(|a: u32, b: u32, c: u32| funnel_left(a, b, c.min(32))))
            }
            (Some(true), Some(false), true) => Some(op3(|a: u32, b: u32, c: u32| funnel_left(a, b, c & 31))),
            (Some(false), Some(true), true) => {
                Some(op3(|a: u32, b: u32, c: u32| funnel_right(a, b, c.min(32))))
            }
            (Some(false), Some(false), true) => {
                Some(op3(|a: u32, b: u32, c: u32| funnel_right(a, b, c & 31)))
            }
            _ => None,
        });
    }
    let ty = m.ty()?;
    Ok(if m.base == "shl" {
        bits!(ty, T => op2(|a: T, n: u32| a.checked_shl(n).unwrap_or(0)).compiled_as(shift_of(ty, Shift::Left)))
    } else {
        // Counts beyond the width act like the width: all sign bits, or zero.
        signed!(ty, T => op2(|a: T, n: u32| a >> n.min(T::BITS - 1)).compiled_as(shift_of(ty, Shift::RightSigned)))
            .or_else(|| {
            with_type!(ty, [B16 = u16, U16 = u16, B32 = u32, U32 = u32, B64 = u64, U64 = u64],
                T => op2(|a: T, n: u32| a.checked_shr(n).unwrap_or(0)).compiled_as(shift_of(ty, Shift::Right)))
        })
    })
}

/// High word of `b:a << n`.
fn funnel_left(a: u32, b: u32, n: u32) -> u32 {
    (((u64::from(b) << 32 | u64::from(a)) << n) >> 32) as u32
}

/// Low word of `b:a >> n`.
fn funnel_right(a: u32, b: u32, n: u32) -> u32 {
    ((u64::from(b) << 32 | u64::from(a)) >> n) as u32
}

/// `bfe` by the pseudo code of the PTX manual: position and length are bytes, bits beyond the top
/// are sign bits.
fn extract(a: u64, width: u32, signed: bool, position: u32, length: u32) -> u64 {
    let (position, length) = (position & 0xff, length & 0xff);
    if length == 0 {
        return 0;
    }
    let sign_at = (position + length - 1).min(width - 1);
    let sign = signed && a >> sign_at & 1 != 0;
    let available = width.saturating_sub(position).min(length);
    let field = if available == 0 { 0 } else { (a >> position) & (u64::MAX >> (64 - available)) };
    if sign && available < 64 { field | u64::MAX << available } else { field }
}

/// `bfi`: the low `length` bits of `a` put into `b` at `position`.
fn insert(a: u64, b: u64, width: u32, position: u32, length: u32) -> u64 {
    let (position, length) = (position & 0xff, length & 0xff);
    let available = width.saturating_sub(position).min(length);
    if available == 0 {
        return b;
    }
    let mask = u64::MAX >> (64 - available) << position;
    b & !mask | a << position & mask
}

/// `bfind`: position of the top bit that differs from the sign, or all ones.
fn find(a: u64, width: u32, signed: bool) -> u32 {
    let a = if signed && a >> (width - 1) & 1 != 0 { !a } else { a };
    let a = if width == 32 { a & 0xffff_ffff } else { a };
    if a == 0 { u32::MAX } else { 63 - a.leading_zeros() }
}

fn permutation(m: &mut Mods) -> Result<Emit, String> {
    let mode = m.one_of(&[("f4e", 0), ("b4e", 1), ("rc8", 2), ("ecl", 3), ("ecr", 4), ("rc16", 5)]);
    if !m.has("b32") {
        return m.unsupported();
    }
    let Some(mode) = mode else {
        let spec = op3(|a: u32, b: u32, c: u32| permute(a, b, |i| c >> (4 * i)));
        return Ok(Box::new(move |l, ops| l.alu(&spec, &taken(ops), &[])));
    };
    Ok(simple(match mode {
        0 => rare3(|a: u32, b: u32, c: u32| permute(a, b, |i| ((c & 3) + i) & 7)),
        1 => rare3(|a: u32, b: u32, c: u32| permute(a, b, |i| (c & 3).wrapping_sub(i) & 7)),
        2 => rare3(|a: u32, b: u32, c: u32| permute(a, b, |_| c & 3)),
        3 => rare3(|a: u32, b: u32, c: u32| permute(a, b, |i| i.max(c & 3))),
        4 => rare3(|a: u32, b: u32, c: u32| permute(a, b, |i| i.min(c & 3))),
        _ => rare3(|a: u32, b: u32, c: u32| permute(a, b, |i| (c & 1) * 2 + (i & 1))),
    }))
}

/// The operands of `prmt`, with 0 in place of a source from which a constant selector takes no
/// byte: nothing reads it.
fn taken(ops: &[(Operand, Span)]) -> Vec<(Operand, Span)> {
    let mut ops = ops.to_vec();
    if let [_, sources @ .., (Operand::Int(selector), _)] = &mut ops[..] {
        for (half, source) in (0..2).zip(sources) {
            if !(0..4).any(|byte| *selector >> (4 * byte + 2) & 1 == half) {
                source.0 = Operand::Int(0);
            }
        }
    }
    ops
}

fn bit_fields(m: &mut Mods) -> Result<Option<Spec>, String> {
    if m.base == "bmsk" {
        let clamp = m.one_of(&[("clamp", true), ("wrap", false)]);
        let b32 = m.has("b32");
        return Ok(match (clamp, b32) {
            (Some(true), true) => Some(rare2(|a: u32, b: u32| mask(a.min(32), b.min(32)))),
            (Some(false), true) => Some(rare2(|a: u32, b: u32| mask(a & 31, b & 31))),
            _ => None,
        });
    }
    let shift_amount = m.base == "bfind" && m.has("shiftamt");
    let ty = m.ty()?;
    Ok(match (m.base, ty) {
        ("bfe", Ty::U32) => Some(op3(|a: u32, p: u32, n: u32| extract(a.into(), 32, false, p, n) as u32)),
        ("bfe", Ty::S32) => Some(op3(|a: u32, p: u32, n: u32| extract(a.into(), 32, true, p, n) as u32)),
        ("bfe", Ty::U64) => Some(rare3(|a: u64, p: u32, n: u32| extract(a, 64, false, p, n))),
        ("bfe", Ty::S64) => Some(rare3(|a: u64, p: u32, n: u32| extract(a, 64, true, p, n))),
        ("bfi", Ty::B32) => {
            Some(op4(|a: u32, b: u32, p: u32, n: u32| insert(a.into(), b.into(), 32, p, n) as u32))
        }
        ("bfi", Ty::B64) => Some(op4(|a: u64, b: u64, p: u32, n: u32| insert(a, b, 64, p, n))),
        ("brev", Ty::B32) => Some(op1(|a: u32| a.reverse_bits())),
        ("brev", Ty::B64) => Some(op1(|a: u64| a.reverse_bits())),
        ("clz", Ty::B32) => {
            Some(op1(|a: u32| a.leading_zeros()).compiled_as(Native::Unary(Unary::LeadingZeros, Width::W32)))
        }
        ("clz", Ty::B64) => Some(op1(|a: u64| a.leading_zeros())),
        ("popc", Ty::B32) => {
            Some(op1(|a: u32| a.count_ones()).compiled_as(Native::Unary(Unary::CountOnes, Width::W32)))
        }
        ("popc", Ty::B64) => Some(op1(|a: u64| a.count_ones())),
        ("bfind", Ty::U32) if shift_amount => {
            Some(rare1(|a: u32| shift_to_top(find(a.into(), 32, false), 31)))
        }
        ("bfind", Ty::S32) if shift_amount => {
            Some(rare1(|a: u32| shift_to_top(find(a.into(), 32, true), 31)))
        }
        ("bfind", Ty::U64) if shift_amount => Some(rare1(|a: u64| shift_to_top(find(a, 64, false), 63))),
        ("bfind", Ty::S64) if shift_amount => Some(rare1(|a: u64| shift_to_top(find(a, 64, true), 63))),
        ("bfind", Ty::U32) => Some(rare1(|a: u32| find(a.into(), 32, false))),
        ("bfind", Ty::S32) => Some(rare1(|a: u32| find(a.into(), 32, true))),
        ("bfind", Ty::U64) => Some(rare1(|a: u64| find(a, 64, false))),
        ("bfind", Ty::S64) => Some(rare1(|a: u64| find(a, 64, true))),
        _ => None,
    })
}

/// `.shiftamt`: how far the found bit is from the top.
fn shift_to_top(found: u32, top: u32) -> u32 {
    if found == u32::MAX { found } else { top - found }
}

/// `length` ones from bit `position` on.
fn mask(position: u32, length: u32) -> u32 {
    if position >= 32 || length == 0 {
        return 0;
    }
    (u64::from(u32::MAX) >> (32 - length) << position) as u32
}

/// Picks four bytes of `b:a`; bit 3 of a selector replicates the sign of the byte.
#[inline(always)]
fn permute(a: u32, b: u32, selector: impl Fn(u32) -> u32) -> u32 {
    let both = u64::from(b) << 32 | u64::from(a);
    (0..4).fold(0, |r, i| {
        let s = selector(i);
        let byte = (both >> (8 * (s & 7))) as u8;
        let byte = if s & 8 != 0 { ((byte as i8) >> 7) as u8 } else { byte };
        r | u32::from(byte) << (8 * i)
    })
}

fn dp4a(m: &mut Mods) -> Result<Option<Spec>, String> {
    fn dot(a: u32, b: u32, c: u32, sa: bool, sb: bool) -> u32 {
        let byte = |v: u32, k: u32, signed: bool| {
            let byte = (v >> (8 * k)) as u8;
            if signed { i32::from(byte as i8) } else { i32::from(byte) }
        };
        (0..4).fold(c, |r, k| r.wrapping_add((byte(a, k, sa) * byte(b, k, sb)) as u32))
    }
    Ok(match (m.ty()?, m.ty()?) {
        (Ty::U32, Ty::U32) => Some(rare3(|a: u32, b: u32, c: u32| dot(a, b, c, false, false))),
        (Ty::U32, Ty::S32) => Some(rare3(|a: u32, b: u32, c: u32| dot(a, b, c, false, true))),
        (Ty::S32, Ty::U32) => Some(rare3(|a: u32, b: u32, c: u32| dot(a, b, c, true, false))),
        (Ty::S32, Ty::S32) => Some(rare3(|a: u32, b: u32, c: u32| dot(a, b, c, true, true))),
        _ => None,
    })
}

fn testp(m: &mut Mods) -> Result<Option<Spec>, String> {
    type Test = (fn() -> Spec, fn() -> Spec);
    macro_rules! test {
        ($f:ident) => {
            (|| rare1(|a: f32| a.$f()), || rare1(|a: f64| a.$f()))
        };
    }
    // Zero counts as normal.
    let normal: Test =
        (|| rare1(|a: f32| a.is_normal() || a == 0.0), || rare1(|a: f64| a.is_normal() || a == 0.0));
    let number: Test = (|| rare1(|a: f32| !a.is_nan()), || rare1(|a: f64| !a.is_nan()));
    let Some((f32_test, f64_test)) = m.one_of::<Test>(&[
        ("finite", test!(is_finite)),
        ("infinite", test!(is_infinite)),
        ("number", number),
        ("notanumber", test!(is_nan)),
        ("normal", normal),
        ("subnormal", test!(is_subnormal)),
    ]) else {
        return m.unsupported();
    };
    Ok(match m.ty()? {
        Ty::F32 => Some(f32_test()),
        Ty::F64 => Some(f64_test()),
        _ => None,
    })
}

fn special_function(m: &mut Mods) -> Result<Option<Spec>, String> {
    // Approximations are computed as well as the host can, which is within their error bounds.
    let approx = m.has("approx");
    let g = flags(m);
    let ty = m.ty()?;
    Ok(match (m.base, ty) {
        _ if g.sat => None,
        ("rcp", Ty::F64) if approx => Some(rare1(|a: f64| float::upper_word(a, |a| 1.0 / a))),
        ("rsqrt", Ty::F64) if approx => Some(rare1(|a: f64| float::upper_word(a, rsqrt))),
        ("rcp", Ty::F32) if g.ftz => Some(by_round!(g.round,
            f32_rare1(g, |a| float::flush_tiny(1.0 / a, || SCALE / a)),
            R => f32_rare1(g, |a| float::flush_tiny(1f32.div(a, R), || SCALE.div(a, R))))),
        ("rcp", Ty::F32) => {
            Some(by_round!(g.round, f32_rare1(g, |a| 1.0 / a), R => f32_rare1(g, |a| 1f32.div(a, R))))
        }
        ("sqrt", Ty::F32) => {
            Some(by_round!(g.round, f32_rare1(g, f32::sqrt), R => f32_rare1(g, |a| Directed::sqrt(a, R))))
        }
        ("rcp", Ty::F64) if !g.ftz => {
            Some(by_round!(g.round, rare1(|a: f64| 1.0 / a), R => rare1(|a: f64| 1f64.div(a, R))))
        }
        ("sqrt", Ty::F64) if !g.ftz => {
            Some(by_round!(g.round, rare1(f64::sqrt), R => rare1(|a: f64| Directed::sqrt(a, R))))
        }
        // The rest are approximations.
        _ if g.round != Round::Nearest => None,
        ("rsqrt", Ty::F32) => Some(f32_rare1(g, |a| rsqrt(f64::from(a)) as f32)),
        ("sin", Ty::F32) => Some(f32_rare1(g, f32::sin)),
        ("cos", Ty::F32) => Some(f32_rare1(g, f32::cos)),
        ("lg2", Ty::F32) => Some(f32_rare1(g, f32::log2)),
        ("ex2", Ty::F32) => Some(f32_rare1(g, f32::exp2)),
        ("tanh", Ty::F32) => Some(f32_rare1(g, f32::tanh)),
        ("rsqrt", Ty::F64) => Some(rare1(rsqrt)),
        _ => None,
    })
}

fn rsqrt(a: f64) -> f64 {
    1.0 / a.sqrt()
}

/// The comparison of `setp`/`set` with its type; operands of `.ftz` are flushed.
// NaN is the point of the unordered forms.
#[allow(clippy::neg_cmp_op_on_partial_ord, clippy::double_comparisons)]
pub(super) fn comparison(ty: Ty, name: &str, ftz: bool) -> Option<Spec> {
    if ftz {
        macro_rules! flushed {
            ($a:ident, $b:ident => $e:expr) => {
                Some(op_setp(|a: f32, b: f32| {
                    let ($a, $b) = (flush(a), flush(b));
                    $e
                }))
            };
        }
        return match name {
            _ if ty != Ty::F32 => None,
            "eq" => flushed!(a, b => a == b),
            "ne" => flushed!(a, b => a < b || a > b),
            "lt" => flushed!(a, b => a < b),
            "le" => flushed!(a, b => a <= b),
            "gt" => flushed!(a, b => a > b),
            "ge" => flushed!(a, b => a >= b),
            "equ" => flushed!(a, b => !(a < b || a > b)),
            "neu" => flushed!(a, b => a != b),
            "ltu" => flushed!(a, b => !(a >= b)),
            "leu" => flushed!(a, b => !(a > b)),
            "gtu" => flushed!(a, b => !(a <= b)),
            "geu" => flushed!(a, b => !(a < b)),
            "num" => flushed!(a, b => !a.is_nan() && !b.is_nan()),
            "nan" => flushed!(a, b => a.is_nan() || b.is_nan()),
            _ => None,
        };
    }
    macro_rules! ordered {
        ($T:ident, $op:tt) => {
            with_type!(ty, [
                U16 = u16, S16 = i16, U32 = u32, S32 = i32, U64 = u64, S64 = i64,
                F16 = f16, Bf16 = bf16, F32 = f32, F64 = f64,
            ], $T => op_setp(|a: $T, b: $T| a $op b))
        };
    }
    macro_rules! floats {
        ($T:ident => $e:expr) => {
            with_type!(ty, [F16 = f16, Bf16 = bf16, F32 = f32, F64 = f64], $T => op_setp($e))
        };
    }
    match name {
        "eq" => ordered!(T, ==)
            .or_else(|| with_type!(ty, [B16 = u16, B32 = u32, B64 = u64], T => op_setp(|a: T, b: T| a == b))),
        // The ordered forms are false when an operand is NaN; Rust's `!=` is the unordered one.
        "ne" if ty.is_float() => floats!(T => |a: T, b: T| a < b || a > b),
        "ne" => integers!(ty, T => op_setp(|a: T, b: T| a != b))
            .or_else(|| bits!(ty, T => op_setp(|a: T, b: T| a != b))),
        "lt" => ordered!(T, <),
        "le" => ordered!(T, <=),
        "gt" => ordered!(T, >),
        "ge" => ordered!(T, >=),
        "lo" => with_type!(ty, [U16 = u16, U32 = u32, U64 = u64], T => op_setp(|a: T, b: T| a < b)),
        "ls" => with_type!(ty, [U16 = u16, U32 = u32, U64 = u64], T => op_setp(|a: T, b: T| a <= b)),
        "hi" => with_type!(ty, [U16 = u16, U32 = u32, U64 = u64], T => op_setp(|a: T, b: T| a > b)),
        "hs" => with_type!(ty, [U16 = u16, U32 = u32, U64 = u64], T => op_setp(|a: T, b: T| a >= b)),
        "equ" => floats!(T => |a: T, b: T| !(a < b || a > b)),
        "neu" => floats!(T => |a: T, b: T| a != b),
        "ltu" => floats!(T => |a: T, b: T| !(a >= b)),
        "leu" => floats!(T => |a: T, b: T| !(a > b)),
        "gtu" => floats!(T => |a: T, b: T| !(a <= b)),
        "geu" => floats!(T => |a: T, b: T| !(a < b)),
        "num" => floats!(T => |a: T, b: T| a.partial_cmp(&b).is_some()),
        "nan" => floats!(T => |a: T, b: T| a.partial_cmp(&b).is_none()),
        _ => None,
    }
}
