//! Floating point as the PTX manual has it, computed by `rustc_apfloat`.

use std::cmp::Ordering;

use rustc_apfloat::ieee::{BFloat, Double, Float8E4M3FN, Float8E5M2, Half, Quad, Single};
use rustc_apfloat::{Float, FloatConvert, Round};

use super::kind::Format;

/// Evaluates an expression with a type alias bound to the type of a format.
macro_rules! with {
    ($format:expr, $F:ident => $e:expr) => {
        match $format {
            Format::E5m2 => {
                type $F = Float8E5M2;
                $e
            }
            Format::E4m3 => {
                type $F = Float8E4M3FN;
                $e
            }
            Format::F16 => {
                type $F = Half;
                $e
            }
            Format::Bf16 => {
                type $F = BFloat;
                $e
            }
            Format::F32 => {
                type $F = Single;
                $e
            }
            Format::F64 => {
                type $F = Double;
                $e
            }
        }
    };
}

/// The four roundings of PTX.
pub const ROUNDS: [(&str, Round); 4] = [
    ("rn", Round::NearestTiesToEven),
    ("rz", Round::TowardZero),
    ("rm", Round::TowardNegative),
    ("rp", Round::TowardPositive),
];

/// To nearest, ties to even.
pub const NEAREST: Round = Round::NearestTiesToEven;

/// An operation whose result is rounded once.
#[derive(Clone, Copy, Debug)]
pub enum Op {
    Add,
    Sub,
    Mul,
    Fma,
    Div,
    Rcp,
    Sqrt,
}

/// Format and modifiers of an instruction.
#[derive(Clone, Copy, Debug)]
pub struct Mode {
    pub format: Format,
    pub round: Round,
    pub ftz: bool,
    pub sat: bool,
}

impl Mode {
    /// To nearest, without further modifiers.
    pub fn plain(format: Format) -> Self {
        Mode { format, round: NEAREST, ftz: false, sat: false }
    }
}

/// `op` on numbers of one format.
pub fn arithmetic(op: Op, mode: Mode, x: &[u64]) -> u64 {
    with!(mode.format, F => {
        let arg = |i: usize| flush_if(mode.ftz, F::from_bits(x[i].into()));
        let one = F::from_u128(1).value;
        let r = mode.round;
        let v = match op {
            Op::Add => arg(0).add_r(arg(1), r).value,
            Op::Sub => arg(0).sub_r(arg(1), r).value,
            Op::Mul => arg(0).mul_r(arg(1), r).value,
            Op::Fma => arg(0).mul_add_r(arg(1), arg(2), r).value,
            Op::Div => arg(0).div_r(arg(1), r).value,
            Op::Rcp => one.div_r(arg(0), r).value,
            Op::Sqrt => sqrt(arg(0), mode),
        };
        let tiny = mode.ftz && v.abs() == F::smallest_normalized() && tiny(op, mode, x);
        finish(if tiny { F::ZERO.copy_sign(v) } else { v }, mode)
    })
}

/// Whether a result that rounds to the smallest normal number is smaller when rounded as if
/// exponents had no end.
fn tiny(op: Op, mode: Mode, x: &[u64]) -> bool {
    let format = mode.format;
    let arg =
        |i: usize| wide(with!(format, F => bits(flush_if(true, F::from_bits(x[i].into())), format)), format);
    let exact = match op {
        Op::Mul => (arg(0) * arg(1)).value,
        Op::Fma => arg(0).mul_add(arg(1), arg(2)).value,
        Op::Div => arg(0).div_r(arg(1), Round::TowardZero).value,
        Op::Rcp => Quad::from_u128(1).value.div_r(arg(0), Round::TowardZero).value,
        Op::Add | Op::Sub | Op::Sqrt => return false,
    };
    is_tiny(exact, mode)
}

/// The hardware flushes what is subnormal when rounded as if exponents had no end, even if rounding
/// to a subnormal makes it normal.
fn is_tiny(v: Quad, mode: Mode) -> bool {
    let smallest = wide(1 << mode.format.bits().1, mode.format);
    // To where all numbers have as many digits, and none is infinite.
    let scale = Quad::from_u128(if mode.format == Format::F16 { 1 << 14 } else { 1 << 64 }).value;
    let rounded = wide(narrow((v * scale).value, mode.format, mode.round), mode.format);
    v.abs() < smallest && rounded.abs() < (smallest * scale).value
}

fn flush_if<F: Float>(ftz: bool, v: F) -> F {
    if ftz && v.is_denormal() { F::ZERO.copy_sign(v) } else { v }
}

/// `.ftz` and `.sat` of a result, and its bits.
fn finish<F: Float>(v: F, mode: Mode) -> u64 {
    let v = flush_if(mode.ftz, v);
    let one = F::from_u128(1).value;
    let v = match (mode.sat, v.partial_cmp(&one)) {
        (false, _) => v,
        (true, Some(Ordering::Greater)) => one,
        (true, Some(_)) if !v.is_negative() => v,
        // Negative numbers, zero among them, and NaN.
        (true, _) => F::ZERO,
    };
    bits(v, mode.format)
}

fn bits<F: Float>(v: F, format: Format) -> u64 {
    if v.is_nan() { format.nan() } else { v.to_bits() as u64 }
}

/// Square root by integers: the root of the significand with more bits than the format has. One
/// more bit is set if there is a remainder.
fn sqrt<F: Float>(v: F, mode: Mode) -> F {
    if v.is_zero() || v.is_nan() || v.is_pos_infinity() {
        return v;
    }
    if v.is_negative() {
        return F::NAN;
    }
    let (width, mantissa) = mode.format.bits();
    let raw = v.to_bits();
    let field = (raw >> mantissa) as i32;
    let bias = (1 << (width - mantissa - 2)) - 1;
    let hidden = if field == 0 { 0 } else { 1 << mantissa };
    let significand = raw & ((1 << mantissa) - 1) | hidden;
    let exponent = field.max(1) - bias - mantissa as i32;
    let mut shift = significand.leading_zeros() as i32;
    if (exponent - shift) % 2 != 0 {
        shift -= 1;
    }
    let scaled = significand << shift;
    let root = scaled.isqrt();
    let sticky = u128::from(root * root != scaled);
    F::from_u128_r(root << 1 | sticky, mode.round).value.scalbn((exponent - shift) / 2 - 1)
}

fn wide(v: u64, format: Format) -> Quad {
    with!(format, F => FloatConvert::<Quad>::convert(F::from_bits(v.into()), &mut false).value)
}

fn narrow(v: Quad, format: Format, round: Round) -> u64 {
    with!(format, F => bits(FloatConvert::<F>::convert_r(v, round, &mut false).value, format))
}

/// `cvt` between formats. `mode` is that of the result.
pub fn convert(v: u64, from: Format, mode: Mode) -> u64 {
    let is_subnormal = |v: u64, f: Format| with!(f, F => F::from_bits(v.into()).is_denormal());
    let sign_only = |v: Quad| Quad::ZERO.copy_sign(v);
    let mut v = match wide(v, from) {
        exact if mode.ftz && from == Format::F32 && is_subnormal(v, from) => sign_only(exact),
        exact => exact,
    };
    if mode.ftz && mode.format == Format::F32 && is_tiny(v, mode) {
        v = sign_only(v);
    }
    let v = narrow(v, mode.format, mode.round);
    with!(mode.format, F => finish(F::from_bits(v.into()), Mode { ftz: false, ..mode }))
}

/// `.satfinite`: numbers that are too large become the largest number.
pub fn convert_finite(v: u64, from: Format, to: Format, round: Round) -> u64 {
    let v = wide(v, from);
    let largest = with!(to, F => F::largest().to_bits() as u64);
    if v.abs() > wide(largest, to) {
        return largest | u64::from(v.is_negative()) << (to.bits().0 - 1);
    }
    narrow(v, to, round)
}

/// `.relu`: negative numbers become zero.
pub fn relu(v: u64, format: Format) -> u64 {
    let negative =
        with!(format, F => !F::from_bits(v.into()).is_nan() && F::from_bits(v.into()).is_negative());
    if negative { 0 } else { v }
}

/// `cvt` from an integer.
pub fn from_integer(v: i128, mode: Mode) -> u64 {
    with!(mode.format, F => finish(F::from_i128_r(v, mode.round).value, mode))
}

/// `cvt` to an integer: rounded, and clamped to the range. `None` for NaN.
pub fn to_integer(v: u64, mode: Mode, range: (i128, i128)) -> Option<i128> {
    let v = with!(mode.format, F => bits(flush_if(mode.ftz, F::from_bits(v.into())), mode.format));
    let v = wide(v, mode.format);
    (!v.is_nan()).then(|| v.to_i128_r(128, mode.round, &mut false).value.clamp(range.0, range.1))
}

/// `cvt.rni` and its like: a whole number of the same format.
pub fn round_to_integral(v: u64, mode: Mode) -> u64 {
    with!(mode.format, F => {
        let v = flush_if(mode.ftz, F::from_bits(v.into()));
        finish(v.round_to_integral(mode.round).value, mode)
    })
}

/// How two numbers compare; `None` if one is NaN.
pub fn compare(a: u64, b: u64, format: Format, ftz: bool) -> Option<Ordering> {
    with!(format, F => {
        flush_if(ftz, F::from_bits(a.into())).partial_cmp(&flush_if(ftz, F::from_bits(b.into())))
    })
}

/// `min` (`greater` false) or `max`: -0.0 is below +0.0; a NaN loses, unless `.NaN` (`nan`) makes
/// it win.
pub fn min_max(greater: bool, nan: bool, mode: Mode, x: &[u64]) -> u64 {
    with!(mode.format, F => {
        let [a, b] = [0, 1].map(|i| flush_if(mode.ftz, F::from_bits(x[i].into())));
        let a_wins = match a.partial_cmp(&b) {
            None if nan || a.is_nan() && b.is_nan() => return mode.format.nan(),
            None => b.is_nan(),
            Some(Ordering::Equal) => a.is_negative() != greater,
            Some(order) => (order == Ordering::Greater) == greater,
        };
        bits(if a_wins { a } else { b }, mode.format)
    })
}

/// `testp`
pub fn test(what: &str, v: u64, format: Format) -> bool {
    with!(format, F => {
        let v = F::from_bits(v.into());
        match what {
            "finite" => v.is_finite(),
            "infinite" => v.is_infinite(),
            "number" => !v.is_nan(),
            "notanumber" => v.is_nan(),
            // Zero counts as normal.
            "normal" => v.is_normal() || v.is_zero(),
            _ => v.is_denormal(),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn square_roots() {
        let root = |v: f32, round| {
            let mode = Mode { round, ..Mode::plain(Format::F32) };
            f32::from_bits(arithmetic(Op::Sqrt, mode, &[v.to_bits().into()]) as u32)
        };
        for v in [2.0f32, 9.0, 1e-40, f32::MAX, 0.3, f32::from_bits(1)] {
            assert_eq!(root(v, NEAREST), v.sqrt());
            let (down, up) = (root(v, Round::TowardNegative), root(v, Round::TowardPositive));
            assert!(f64::from(down).powi(2) <= v.into() && f64::from(up).powi(2) >= v.into());
            assert!(down == up || down.to_bits() + 1 == up.to_bits());
        }
        let two = [2f64.to_bits()];
        assert_eq!(arithmetic(Op::Sqrt, Mode::plain(Format::F64), &two), 2f64.sqrt().to_bits());
    }

    #[test]
    fn conversions() {
        let f32_of = |v: f64, ftz| {
            let mode = Mode { ftz, ..Mode::plain(Format::F32) };
            convert(v.to_bits(), Format::F64, mode) as u32
        };
        assert_eq!(f32_of(0.1, true), 0.1f32.to_bits());
        let below = 2f64.powi(-126) * (1.0 - 2f64.powi(-24));
        assert_eq!((f32_of(below, false), f32_of(below, true)), (0x0080_0000, 0));
        let just_below = 2f64.powi(-126) * (1.0 - 2f64.powi(-27));
        assert_eq!(f32_of(just_below, true), 0x0080_0000, "as an H200 gives it");
        let e4m3 = |v: f32| convert_finite(v.to_bits().into(), Format::F32, Format::E4m3, NEAREST);
        assert_eq!([e4m3(1.0), e4m3(-1e9), e4m3(f32::NAN), e4m3(460.0)], [0x38, 0xfe, 0x7f, 0x7e]);
        let mode = Mode { round: Round::TowardZero, ..Mode::plain(Format::F32) };
        let int = |v: f32| to_integer(v.to_bits().into(), mode, (-128, 127));
        assert_eq!([int(-1.9), int(1e30), int(f32::NAN)], [Some(-1), Some(127), None]);
    }
}
