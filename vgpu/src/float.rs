//! Floating point as PTX defines it, where the host's arithmetic does not already do the same.

use half::{bf16, f16};

/// Rounding of a result that does not fit its format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Round {
    /// To nearest, ties to even (`.rn`, `.rni`).
    Nearest,
    /// To nearest, ties away from zero (`.rna`).
    Away,
    /// Towards zero (`.rz`, `.rzi`).
    Zero,
    /// Towards minus infinity (`.rm`, `.rmi`).
    Down,
    /// Towards plus infinity (`.rp`, `.rpi`).
    Up,
}

/// A binary floating-point format of up to 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Format {
    /// Bits of the stored significand.
    pub(crate) mantissa: u32,
    /// Bits of the exponent.
    pub(crate) exponent: u32,
    /// Largest finite encoding, sign aside.
    max: u64,
    /// The NaN that conversions give.
    nan: u64,
    /// The format has infinities (e4m3 has not).
    infinite: bool,
}

pub(crate) const F64: Format = Format {
    mantissa: 52,
    exponent: 11,
    max: 0x7fef_ffff_ffff_ffff,
    nan: 0x7fff_ffff_ffff_ffff,
    infinite: true,
};
pub(crate) const F32: Format =
    Format { mantissa: 23, exponent: 8, max: 0x7f7f_ffff, nan: 0x7fff_ffff, infinite: true };
pub(crate) const F16: Format = Format { mantissa: 10, exponent: 5, max: 0x7bff, nan: 0x7fff, infinite: true };
pub(crate) const BF16: Format = Format { mantissa: 7, exponent: 8, max: 0x7f7f, nan: 0x7fff, infinite: true };
/// The first 19 bits of 32.
pub(crate) const TF32: Format =
    Format { mantissa: 10, exponent: 8, max: 0x3_fbff, nan: 0x3_ffff, infinite: true };
pub(crate) const E4M3: Format = Format { mantissa: 3, exponent: 4, max: 0x7e, nan: 0x7f, infinite: false };
pub(crate) const E5M2: Format = Format { mantissa: 2, exponent: 5, max: 0x7b, nan: 0x7f, infinite: true };

impl Format {
    fn bias(self) -> i32 {
        (1 << (self.exponent - 1)) - 1
    }

    fn sign(self, negative: bool) -> u64 {
        u64::from(negative) << (self.mantissa + self.exponent)
    }

    fn infinity(self) -> u64 {
        ((1 << self.exponent) - 1) << self.mantissa
    }
}

/// A number taken apart: `(-1)^negative * magnitude * 2^exponent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Parts {
    Nan,
    Infinite { negative: bool },
    Finite { negative: bool, magnitude: u128, exponent: i32 },
}

/// Takes an encoding apart.
pub(crate) fn unpack(bits: u64, f: Format) -> Parts {
    let negative = bits >> (f.mantissa + f.exponent) & 1 != 0;
    let e = bits >> f.mantissa & ((1 << f.exponent) - 1);
    let m = bits & ((1 << f.mantissa) - 1);
    let magnitude_bits = bits & !f.sign(true) & (f.sign(true).wrapping_mul(2).wrapping_sub(1));
    if magnitude_bits > f.max {
        return if f.infinite && m == 0 { Parts::Infinite { negative } } else { Parts::Nan };
    }
    let (magnitude, e) = if e == 0 { (m, 1) } else { (m | 1 << f.mantissa, e) };
    Parts::Finite { negative, magnitude: magnitude.into(), exponent: e as i32 - f.bias() - f.mantissa as i32 }
}

/// Result above the largest finite number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Overflow {
    /// By IEEE 754: infinity, or the largest number when rounding away from infinity.
    Ieee,
    /// `.satfinite`: the largest number, for infinities too.
    Finite,
}

/// Encodes a number, rounding once.
pub(crate) fn pack(parts: Parts, f: Format, mode: Round, overflow: Overflow) -> u64 {
    let (negative, magnitude, exponent) = match parts {
        Parts::Nan => return f.nan,
        Parts::Infinite { negative } => {
            let finite = overflow == Overflow::Finite || !f.infinite;
            return f.sign(negative) | if finite { f.max } else { f.infinity() };
        }
        Parts::Finite { negative, magnitude, exponent } => (negative, magnitude, exponent),
    };
    let sign = f.sign(negative);
    if magnitude == 0 {
        return sign;
    }
    let e = 127 - magnitude.leading_zeros() as i32 + exponent;
    let e_min = 1 - f.bias();
    // Exponent of the last bit that can be kept.
    let quantum = e.max(e_min) - f.mantissa as i32;
    let shift = quantum - exponent;
    let mut m = if shift <= 0 {
        magnitude << -shift
    } else {
        let (kept, rest, half) = match shift {
            1..=127 => (magnitude >> shift, magnitude & ((1 << shift) - 1), 1u128 << (shift - 1)),
            128 => (0, magnitude, 1u128 << 127),
            // All of it is below half of the last bit.
            _ => (0, 1, 2),
        };
        let up = match mode {
            Round::Nearest => rest > half || rest == half && kept & 1 != 0,
            Round::Away => rest >= half,
            Round::Zero => false,
            Round::Down => negative && rest != 0,
            Round::Up => !negative && rest != 0,
        };
        kept + u128::from(up)
    };
    // A carry out of the significand correctly lands in the exponent.
    if e >= e_min {
        m += ((e - e_min) as u128) << f.mantissa;
    }
    let m = u64::try_from(m).unwrap_or(u64::MAX);
    if m <= f.max {
        return sign | m;
    }
    let towards_infinity = match mode {
        Round::Nearest | Round::Away => true,
        Round::Zero => false,
        Round::Down => negative,
        Round::Up => !negative,
    };
    sign | if towards_infinity && overflow == Overflow::Ieee && f.infinite { f.infinity() } else { f.max }
}

/// Converts between formats.
pub(crate) fn convert(bits: u64, from: Format, to: Format, mode: Round, overflow: Overflow) -> u64 {
    pack(unpack(bits, from), to, mode, overflow)
}

/// The exact product.
fn product(a: Parts, b: Parts) -> Parts {
    use Parts::{Finite, Infinite, Nan};
    match (a, b) {
        (Nan, _) | (_, Nan) => Nan,
        (Infinite { negative: n }, Infinite { negative: m }) => Infinite { negative: n != m },
        (Infinite { negative: n }, Finite { negative: m, magnitude, .. })
        | (Finite { negative: m, magnitude, .. }, Infinite { negative: n }) => {
            if magnitude == 0 {
                Nan
            } else {
                Infinite { negative: n != m }
            }
        }
        (
            Finite { negative: n, magnitude: x, exponent: e },
            Finite { negative: m, magnitude: y, exponent: f },
        ) => Finite { negative: n != m, magnitude: x * y, exponent: e + f },
    }
}

/// The sum. If it has too many bits, the last bit is set for any that are cut off, so that a later
/// rounding is the only one.
fn sum(a: Parts, b: Parts, mode: Round) -> Parts {
    use Parts::{Finite, Infinite, Nan};
    let (x, y) = match (a, b) {
        (Nan, _) | (_, Nan) => return Nan,
        (Infinite { negative: n }, Infinite { negative: m }) if n != m => return Nan,
        (Infinite { .. }, _) => return a,
        (_, Infinite { .. }) => return b,
        (
            Finite { negative: n, magnitude: x, exponent: e },
            Finite { negative: m, magnitude: y, exponent: f },
        ) => match (x, y) {
            (0, 0) if n == m => return a,
            (0, 0) => return Finite { negative: mode == Round::Down, magnitude: 0, exponent: e },
            (0, _) => return b,
            (_, 0) => return a,
            // Top bits at 126. One bit is left for the carry. Products have 106 bits at most, so
            // the rest is left for cancellation.
            _ => {
                let (up, vp) = (x.leading_zeros() - 1, y.leading_zeros() - 1);
                ((n, x << up, e - up as i32), (m, y << vp, f - vp as i32))
            }
        },
    };
    let (large, small) = if (x.2, x.1) >= (y.2, y.1) { (x, y) } else { (y, x) };
    let down = (large.2 - small.2).min(127);
    let lost = small.1 & ((1 << down) - 1) != 0;
    let other = small.1 >> down | u128::from(lost);
    let magnitude = if large.0 == small.0 { large.1 + other } else { large.1 - other };
    let negative = if magnitude == 0 { mode == Round::Down } else { large.0 };
    Finite { negative, magnitude, exponent: large.2 }
}

/// The quotient, with a last bit as in [`sum`].
fn quotient(a: Parts, b: Parts) -> Parts {
    use Parts::{Finite, Infinite, Nan};
    match (a, b) {
        (Nan, _) | (_, Nan) | (Infinite { .. }, Infinite { .. }) => Nan,
        (Infinite { negative: n }, Finite { negative: m, .. }) => Infinite { negative: n != m },
        (Finite { negative: n, .. }, Infinite { negative: m }) => {
            Finite { negative: n != m, magnitude: 0, exponent: 0 }
        }
        (Finite { magnitude: 0, .. }, Finite { magnitude: 0, .. }) => Nan,
        (Finite { negative: n, .. }, Finite { negative: m, magnitude: 0, .. }) => {
            Infinite { negative: n != m }
        }
        (Finite { negative: n, magnitude: 0, .. }, Finite { negative: m, .. }) => {
            Finite { negative: n != m, magnitude: 0, exponent: 0 }
        }
        (
            Finite { negative: n, magnitude: x, exponent: e },
            Finite { negative: m, magnitude: y, exponent: f },
        ) => {
            // 126 bits by 64 are 62 bits or more.
            let (up, vp) = (x.leading_zeros() - 2, y.leading_zeros() - 64);
            let (x, y) = (x << up, y << vp);
            let magnitude = ((x / y) << 1) | u128::from(x % y != 0);
            Finite { negative: n != m, magnitude, exponent: e - f - up as i32 + vp as i32 - 1 }
        }
    }
}

/// The square root, with a last bit as in [`sum`].
fn root(a: Parts) -> Parts {
    match a {
        Parts::Finite { magnitude: 0, .. } | Parts::Infinite { negative: false } => a,
        Parts::Finite { negative: false, magnitude, exponent } => {
            let up = magnitude.leading_zeros() as i32;
            let up = up - (exponent - up).rem_euclid(2);
            let x = magnitude << up;
            let r = x.isqrt();
            let magnitude = r << 1 | u128::from(r * r != x);
            Parts::Finite { negative: false, magnitude, exponent: (exponent - up) / 2 - 1 }
        }
        _ => Parts::Nan,
    }
}

/// f32 and f64, for arithmetic that rounds in a given direction. The host's arithmetic rounds to
/// nearest.
pub(crate) trait Directed: Copy {
    fn parts(self) -> Parts;
    fn round(parts: Parts, mode: Round) -> Self;

    fn add(self, other: Self, mode: Round) -> Self {
        Self::round(sum(self.parts(), other.parts(), mode), mode)
    }
    fn mul(self, other: Self, mode: Round) -> Self {
        Self::round(product(self.parts(), other.parts()), mode)
    }
    fn fma(self, by: Self, other: Self, mode: Round) -> Self {
        Self::round(sum(product(self.parts(), by.parts()), other.parts(), mode), mode)
    }
    fn div(self, other: Self, mode: Round) -> Self {
        Self::round(quotient(self.parts(), other.parts()), mode)
    }
    fn sqrt(self, mode: Round) -> Self {
        Self::round(root(self.parts()), mode)
    }
}

impl Directed for f32 {
    fn parts(self) -> Parts {
        unpack(self.to_bits().into(), F32)
    }
    fn round(parts: Parts, mode: Round) -> Self {
        f32::from_bits(pack(parts, F32, mode, Overflow::Ieee) as u32)
    }
}

impl Directed for f64 {
    fn parts(self) -> Parts {
        unpack(self.to_bits(), F64)
    }
    fn round(parts: Parts, mode: Round) -> Self {
        f64::from_bits(pack(parts, F64, mode, Overflow::Ieee))
    }
}

/// An integer in a format.
pub(crate) fn from_int(v: i128, to: Format, mode: Round) -> u64 {
    let parts = Parts::Finite { negative: v < 0, magnitude: v.unsigned_abs(), exponent: 0 };
    if v == 0 { 0 } else { pack(parts, to, mode, Overflow::Ieee) }
}

/// Rounds to an integer and clamps it to `min..=max`.
pub(crate) fn to_int(v: f64, mode: Round, min: i128, max: i128) -> i128 {
    let r = round_to_integer(v, mode);
    // `as` saturates, and every requested range lies inside of i128.
    (r as i128).clamp(min, max)
}

/// Rounds to an integer, in place.
pub(crate) fn round_to_integer(v: f64, mode: Round) -> f64 {
    match mode {
        Round::Nearest => v.round_ties_even(),
        Round::Away => v.round(),
        Round::Zero => v.trunc(),
        Round::Down => v.floor(),
        Round::Up => v.ceil(),
    }
}

/// f32 to bf16, ties to even: the hot one.
#[inline(always)]
pub(crate) fn bf16_rn(v: f32) -> u16 {
    let b = v.to_bits();
    let rounded = b.wrapping_add(0x7fff + (b >> 16 & 1)) >> 16;
    if b & 0x7fff_ffff > 0x7f80_0000 { 0x7fff } else { rounded as u16 }
}

/// `x + y` rounded to odd: rounding the result once more, to a narrower format, is then exact.
pub(crate) fn add_odd(x: f64, y: f64) -> f64 {
    let s = x + y;
    if !s.is_finite() {
        return s;
    }
    // Knuth's two-sum: `e` is exactly the rounding error of the addition.
    let t = s - x;
    let e = (x - (s - t)) + (y - t);
    if e == 0.0 || s.to_bits() & 1 != 0 {
        return s;
    }
    // The true sum lies between `s`, which is even, and its odd neighbour on the side of `e`.
    let up = (e > 0.0) == (s > 0.0);
    f64::from_bits(if up { s.to_bits() + 1 } else { s.to_bits() - 1 })
}

fn narrow(v: f64, to: Format) -> u16 {
    convert(v.to_bits(), F64, to, Round::Nearest, Overflow::Ieee) as u16
}

/// A 16-bit format: f16 or bf16.
pub(crate) trait Half: super::exec::lanes::Lane {
    const FORMAT: Format;
    fn bits(self) -> u16;
    fn of_bits(bits: u16) -> Self;
    fn wide(self) -> f64;
    /// Rounds once, to nearest.
    fn narrow(v: f64) -> Self {
        Self::of_bits(narrow(v, Self::FORMAT))
    }
}

impl Half for f16 {
    const FORMAT: Format = F16;
    fn bits(self) -> u16 {
        self.to_bits()
    }
    fn of_bits(bits: u16) -> Self {
        f16::from_bits(bits)
    }
    fn wide(self) -> f64 {
        self.to_f64()
    }
}

impl Half for bf16 {
    const FORMAT: Format = BF16;
    fn bits(self) -> u16 {
        self.to_bits()
    }
    fn of_bits(bits: u16) -> Self {
        bf16::from_bits(bits)
    }
    fn wide(self) -> f64 {
        self.to_f64()
    }
}

pub(crate) fn add_half<H: Half>(a: H, b: H) -> H {
    H::narrow(add_odd(a.wide(), b.wide()))
}

pub(crate) fn sub_half<H: Half>(a: H, b: H) -> H {
    H::narrow(add_odd(a.wide(), -b.wide()))
}

pub(crate) fn mul_half<H: Half>(a: H, b: H) -> H {
    // Exact in f64.
    H::narrow(a.wide() * b.wide())
}

pub(crate) fn fma_half<H: Half>(a: H, b: H, c: H) -> H {
    H::narrow(add_odd(a.wide() * b.wide(), c.wide()))
}

pub(crate) fn add_f16(a: f16, b: f16) -> f16 {
    add_half(a, b)
}

pub(crate) fn add_bf16(a: bf16, b: bf16) -> bf16 {
    add_half(a, b)
}

/// The operations of a float type that `min`/`max` need.
pub(crate) trait MinMax: Copy {
    const NAN: Self;
    fn nan(self) -> bool;
    /// `self < other`, with -0.0 below +0.0.
    fn below(self, other: Self) -> bool;
}

macro_rules! min_max {
    ($t:ty, $nan:expr, $int:ty) => {
        impl MinMax for $t {
            const NAN: Self = $nan;
            fn nan(self) -> bool {
                self.is_nan()
            }
            fn below(self, other: Self) -> bool {
                self < other || self == other && (self.to_bits() as $int) < (other.to_bits() as $int)
            }
        }
    };
}
min_max!(f32, f32::from_bits(0x7fff_ffff), i32);
min_max!(f64, f64::from_bits(0x7fff_ffff_ffff_ffff), i64);
min_max!(f16, f16::from_bits(0x7fff), i16);
min_max!(bf16, bf16::from_bits(0x7fff), i16);

/// Minimum; a NaN loses unless both are, or unless `NAN` (`.NaN`) makes it win. The NaN given is
/// the canonical one.
pub(crate) fn min<T: MinMax, const NAN: bool>(a: T, b: T) -> T {
    match (a.nan(), b.nan()) {
        (false, false) => {
            if b.below(a) {
                b
            } else {
                a
            }
        }
        (true, false) if !NAN => b,
        (false, true) if !NAN => a,
        _ => T::NAN,
    }
}

/// Maximum; see [`min`].
pub(crate) fn max<T: MinMax, const NAN: bool>(a: T, b: T) -> T {
    match (a.nan(), b.nan()) {
        (false, false) => {
            if a.below(b) {
                b
            } else {
                a
            }
        }
        (true, false) if !NAN => b,
        (false, true) if !NAN => a,
        _ => T::NAN,
    }
}

/// Replaces a NaN by the one NaN that the GPU's f32 arithmetic gives; the operand's payload is
/// lost.
#[inline(always)]
pub(crate) fn canonical(v: f32) -> f32 {
    // On integers: to the compiler all NaNs are as good as each other, and it drops a choice
    // between two of them.
    let b = v.to_bits();
    f32::from_bits(if b & 0x7fff_ffff > 0x7f80_0000 { 0x7fff_ffff } else { b })
}

/// 2^126: reciprocals of larger numbers are subnormal.
const SMALL_RECIPROCAL: f32 = f32::from_bits((126 + 127) << 23);

/// `div.approx`: the reciprocal of a divisor above 2^126 is subnormal and counts as zero. So the
/// quotient is zero too, or NaN for an infinite dividend.
pub(crate) fn div_approx(a: f32, b: f32) -> f32 {
    if b.abs() > SMALL_RECIPROCAL { a * 0f32.copysign(b) } else { a / b }
}

/// Common part of `rcp.approx.ftz.f64` and `rsqrt.approx.ftz.f64`. They read the upper word of the
/// operand and write the upper word of the result. They flush subnormals at both ends, and have a
/// NaN of their own.
pub(crate) fn upper_word(a: f64, f: impl Fn(f64) -> f64) -> f64 {
    const UPPER: u64 = 0xffff_ffff << 32;
    let flush = |v: f64| if v.is_subnormal() { 0f64.copysign(v) } else { v };
    let v = flush(f(flush(f64::from_bits(a.to_bits() & UPPER))));
    let nan = v.to_bits() << 1 > 0x7ff << 53;
    f64::from_bits(if nan { 0x7fff_ffff << 32 } else { v.to_bits() & UPPER })
}

/// A conversion from f64 to a format of 16 or 32 bits. A NaN keeps its sign and the top of its
/// payload, made quiet. The hardware does so too; all its other NaN results are canonical.
pub(crate) fn narrow_f64(bits: u64, to: Format, mode: Round, overflow: Overflow) -> u64 {
    if unpack(bits, F64) != Parts::Nan {
        return convert(bits, F64, to, mode, overflow);
    }
    let payload = bits >> (F64.mantissa - to.mantissa) & ((1 << to.mantissa) - 1);
    to.sign(bits >> 63 != 0) | to.infinity() | 1 << (to.mantissa - 1) | payload
}

/// f64 to f32 with `.ftz`. A result is flushed if it is subnormal when rounded with unlimited
/// exponents, even if rounding to a subnormal makes it the smallest normal number. The hardware
/// does so too.
pub(crate) fn narrow_ftz(v: f64, mode: Round) -> f32 {
    let narrow = |v: f64| f32::from_bits(narrow_f64(v.to_bits(), F32, mode, Overflow::Ieee) as u32);
    flush(flush_tiny(narrow(v), || narrow(v * f64::from(SCALE))))
}

/// 2^64, by which results near the smallest normal number grow to where all have as many digits.
pub(crate) const SCALE: f32 = 18_446_744_073_709_551_616.0;

/// `.ftz` for a result that rounds to the smallest normal number. `scaled` is the same result,
/// [`SCALE`] times as large; it shows whether the result is as large when rounded with all its
/// digits.
#[inline(always)]
pub(crate) fn flush_tiny(v: f32, scaled: impl FnOnce() -> f32) -> f32 {
    if v.abs() == f32::MIN_POSITIVE && scaled().abs() < f32::MIN_POSITIVE * SCALE {
        0f32.copysign(v)
    } else {
        v
    }
}

/// Flushes a subnormal to zero of its sign.
#[inline(always)]
pub(crate) fn flush(v: f32) -> f32 {
    if v.to_bits() & 0x7f80_0000 == 0 { f32::from_bits(v.to_bits() & 0x8000_0000) } else { v }
}

/// Flushes a subnormal f16 to zero of its sign.
#[inline(always)]
pub(crate) fn flush_f16(v: u16) -> u16 {
    if v & 0x7c00 == 0 { v & 0x8000 } else { v }
}

/// `.ftz` of an f16 result that `exact` was rounded to. As [`flush_tiny`], it flushes what is
/// subnormal when rounded with all its digits.
pub(crate) fn flush_tiny_f16(rounded: u16, exact: f64) -> u16 {
    const SMALLEST: u16 = 1 << 10;
    // 2^14 times as large, the smallest normal number is 1.
    let tiny = rounded & 0x7fff == SMALLEST && narrow(exact.abs() * 16384.0, F16) < f16::ONE.to_bits();
    flush_f16(if tiny { rounded & 0x8000 } else { rounded })
}

/// Clamps to `0.0..=1.0`; NaN becomes 0.
#[inline(always)]
pub(crate) fn saturate(v: f32) -> f32 {
    if v > 0.0 { v.min(1.0) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conversions_agree_with_the_host() {
        let mut r = crate::seeds::Rng::new(1);
        for i in 0..200_000u64 {
            let b = if i < 70_000 { i << 16 } else { r.next() } as u32;
            let v = f32::from_bits(b);
            let ours = convert(b.into(), F32, F16, Round::Nearest, Overflow::Ieee) as u16;
            if v.is_nan() {
                assert_eq!(ours, 0x7fff);
                assert_eq!(bf16_rn(v), 0x7fff);
            } else {
                assert_eq!(ours, f16::from_f32(v).to_bits(), "{b:#x}");
                assert_eq!(bf16_rn(v), bf16::from_f32(v).to_bits(), "{b:#x}");
                let general = convert(b.into(), F32, BF16, Round::Nearest, Overflow::Ieee) as u16;
                assert_eq!(general, bf16_rn(v), "{b:#x}");
                assert_eq!(convert(b.into(), F32, F64, Round::Zero, Overflow::Ieee), f64::from(v).to_bits());
            }
            let d = f64::from_bits(r.next());
            if !d.is_nan() {
                let ours = convert(d.to_bits(), F64, F32, Round::Nearest, Overflow::Ieee) as u32;
                assert_eq!(ours, (d as f32).to_bits());
            }
            let n = r.next() as i64 >> r.below(64);
            assert_eq!(from_int(n.into(), F32, Round::Nearest) as u32, (n as f32).to_bits());
        }
    }

    #[test]
    fn directed_rounding() {
        let go = |v: f64, mode| f32::from_bits(convert(v.to_bits(), F64, F32, mode, Overflow::Ieee) as u32);
        let tenth = 0.1f64;
        assert!(f64::from(go(tenth, Round::Down)) < tenth && f64::from(go(tenth, Round::Up)) > tenth);
        assert_eq!(go(-tenth, Round::Zero), -go(tenth, Round::Down));
        assert_eq!(go(1e300, Round::Zero), f32::MAX);
        assert_eq!(go(1e300, Round::Up), f32::INFINITY);
        assert_eq!(go(-1e300, Round::Up), -f32::MAX);
        assert_eq!(go(1e-300, Round::Up), f32::from_bits(1));
        assert_eq!(go(-1e-300, Round::Up).to_bits(), 0x8000_0000);
        assert_eq!(from_int(16_777_217, F32, Round::Up) as u32, 16_777_218f32.to_bits());
        assert_eq!(from_int(16_777_219, F32, Round::Zero) as u32, 16_777_218f32.to_bits());
        assert_eq!(from_int(-16_777_217, F32, Round::Down) as u32, (-16_777_218f32).to_bits());
    }

    #[test]
    fn exact_arithmetic_rounds_to_nearest_as_the_host_does() {
        let mut r = crate::seeds::Rng::new(2);
        let same =
            |a: f64, b: f64| assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(), "{a:e} {b:e}");
        for i in 0..200_000u64 {
            // Neighbouring exponents, so that sums cancel, and all of them.
            let mut next = || match i % 2 {
                0 => f64::from_bits(r.next() & 0x803f_ffff_ffff_ffff | 0x3fc0 << 48),
                _ => f64::from_bits(r.next()),
            };
            let (a, b, c) = (next(), next(), next());
            const N: Round = Round::Nearest;
            same(a.add(b, N), a + b);
            same(Directed::mul(a, b, N), a * b);
            same(a.fma(b, c, N), a.mul_add(b, c));
            same(a.fma(b, -(a * b), N), a.mul_add(b, -(a * b)));
            same(Directed::div(a, b, N), a / b);
            same(Directed::sqrt(a, N), a.sqrt());
        }
    }

    #[test]
    fn fp8() {
        let e4m3 = |v: f32| convert(v.to_bits().into(), F32, E4M3, Round::Nearest, Overflow::Finite);
        let e5m2 = |v: f32| convert(v.to_bits().into(), F32, E5M2, Round::Nearest, Overflow::Finite);
        assert_eq!(e4m3(1.0), 0x38);
        assert_eq!(e4m3(448.0), 0x7e);
        assert_eq!(e4m3(1e9), 0x7e);
        assert_eq!(e4m3(f32::NEG_INFINITY), 0xfe);
        assert_eq!(e4m3(f32::NAN), 0x7f);
        // Subnormals: the smallest is 2^-9, half of it is a tie to even.
        assert_eq!(e4m3(2f32.powi(-9)), 1);
        assert_eq!(e4m3(2f32.powi(-10)), 0);
        assert_eq!(e4m3(3.0 * 2f32.powi(-10)), 2);
        assert_eq!(e5m2(1.0), 0x3c);
        assert_eq!(e5m2(57344.0), 0x7b);
        assert_eq!(e5m2(1e9), 0x7b);
        assert_eq!(e5m2(f32::NAN), 0x7f);
        assert_eq!(unpack(0x7f, E4M3), Parts::Nan);
        assert_eq!(unpack(0x7c, E5M2), Parts::Infinite { negative: false });
        for b in 0..=0xffu64 {
            for f in [E4M3, E5M2] {
                let wide = convert(b, f, F32, Round::Nearest, Overflow::Ieee);
                if unpack(b, f) != Parts::Nan && !matches!(unpack(b, f), Parts::Infinite { .. }) {
                    assert_eq!(convert(wide, F32, f, Round::Nearest, Overflow::Finite), b);
                }
            }
        }
    }

    #[test]
    fn half_arithmetic_rounds_once() {
        // 1 + 2^-8 is a tie of bf16; the bits far below decide it.
        let one = bf16::from_f32(1.0);
        let x = bf16::from_f32(2f32.powi(-4));
        let tiny = bf16::from_f32(2f32.powi(-120));
        assert_eq!(fma_half(x, x, one), one, "tie to even");
        // 1.00390625 * 1.0 + tiny cannot be written with bf16 operands; use 1.0 + 2^-7 + tie.
        let a = bf16::from_f32(1.0 + 2f32.powi(-7));
        let half_ulp = bf16::from_f32(2f32.powi(-8));
        assert_eq!(add_half(a, half_ulp), bf16::from_f32(1.0 + 2f32.powi(-6)));
        // (1 + 2^-7)^2 = 1 + 2^-6 + 2^-14: no tie. Plus and minus tiny must not change it.
        assert_eq!(fma_half(a, a, tiny), mul_half(a, a));
        // (1 + 2^-4)(1 - 2^-4) = 1 - 2^-8, exact in bf16; minus tiny rounds back to it, not below.
        let p = bf16::from_f32(1.0625);
        let q = bf16::from_f32(0.9375);
        assert_eq!(fma_half(p, q, bf16::from_f32(-2f32.powi(-120))).to_f32(), 1.0 - 2f32.powi(-8));
        // A product that is an exact tie: 3 * (1 + 2^-7) = 3 + 3 * 2^-7 with ulp 2^-6: 1.5 ulp, so
        // a tie.
        let three = bf16::from_f32(3.0);
        assert_eq!(mul_half(three, a).to_f32(), 3.0 + 2.0 * 2f32.powi(-6));
        assert_eq!(fma_half(three, a, -tiny).to_f32(), 3.0 + 2f32.powi(-6));
        assert_eq!(fma_half(-three, a, tiny).to_f32(), -3.0 - 2f32.powi(-6));
        let h = |v: f32| f16::from_f32(v);
        assert_eq!(add_half(h(65504.0), h(16.0)), f16::INFINITY);
        assert_eq!(add_half(h(65504.0), h(15.99)), h(65504.0));
    }

    /// The results are those of an H200.
    #[test]
    fn a_nan_of_f64_keeps_its_sign_and_the_top_of_its_payload() {
        let narrow = |bits, to| narrow_f64(bits, to, Round::Nearest, Overflow::Ieee);
        assert_eq!(narrow(0xffff_5364_141f_1e2c, F32), 0xfffa_9b20);
        assert_eq!(narrow(0x7ff6_11b8_2c5f_efaf, F32), 0x7ff0_8dc1);
        assert_eq!(narrow(0xfff4_749a_84eb_5fb6, F16), 0xff1d);
        assert_eq!(narrow(0xfff3_cb2b_b077_4e0e, BF16), 0xffde);
        assert_eq!(narrow(0x7ff0_0000_0000_0000, F32), 0x7f80_0000, "infinity is none");
    }

    /// The results are those of an H200.
    #[test]
    fn tiny_results_are_flushed_even_if_rounding_makes_them_normal() {
        let below = f32::from_bits(0x00ff_ffff);
        assert_eq!((below * 0.5).to_bits(), 0x0080_0000, "with the digits of a subnormal it is normal");
        assert_eq!(flush_tiny(below * 0.5, || below * SCALE * 0.5), 0.0);
        assert_eq!(flush_tiny(-f32::MIN_POSITIVE, || -f32::MIN_POSITIVE * SCALE), -f32::MIN_POSITIVE);
        let narrow = |bits, mode| narrow_ftz(f64::from_bits(bits), mode).to_bits();
        assert_eq!(narrow(0x380f_ffff_fc00_0000, Round::Nearest), 0x0080_0000);
        assert_eq!(narrow(0x380f_ffff_fc00_0000, Round::Zero), 0);
        assert_eq!(narrow(0x380f_ffff_e000_0000, Round::Nearest), 0);
    }

    #[test]
    fn min_and_max() {
        assert_eq!(min::<f32, false>(f32::NAN, 1.0), 1.0);
        assert_eq!(max::<f32, false>(1.0, f32::NAN), 1.0);
        assert!(min::<f32, true>(f32::NAN, 1.0).is_nan());
        assert_eq!(max::<f32, false>(f32::NAN, f32::NAN).to_bits(), 0x7fff_ffff);
        assert_eq!(min::<f32, false>(0.0, -0.0).to_bits(), 0x8000_0000);
        assert_eq!(max::<f32, false>(-0.0, 0.0).to_bits(), 0);
        assert_eq!(saturate(f32::NAN), 0.0);
        assert_eq!(saturate(2.0), 1.0);
        assert_eq!(flush(f32::from_bits(0x8000_0001)).to_bits(), 0x8000_0000);
        assert_eq!(canonical(-f32::NAN).to_bits(), 0x7fff_ffff);
        assert_eq!(canonical(-1.0), -1.0);
    }
}
