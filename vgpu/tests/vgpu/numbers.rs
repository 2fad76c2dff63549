//! Types of the elements of matrices, for tests of products.

use half::{bf16, f16};

/// A matrix, row by row.
pub type Matrix = Vec<Vec<f64>>;

/// A matrix of the numbers of `value`.
pub fn matrix(rows: usize, columns: usize, mut value: impl FnMut() -> f64) -> Matrix {
    (0..rows).map(|_| (0..columns).map(|_| value()).collect()).collect()
}

/// A type of elements: its name, its bytes, and the bits and the value of a number that it has.
#[derive(Clone, Copy)]
pub struct Type {
    pub name: &'static str,
    pub bytes: usize,
    pub bits: fn(f64) -> u32,
}

pub const F16: Type = Type { name: "f16", bytes: 2, bits: |x| f16::from_f64(x).to_bits().into() };
pub const BF16: Type = Type { name: "bf16", bytes: 2, bits: |x| bf16::from_f64(x).to_bits().into() };
// Bits below the mantissa of tf32 do not count.
pub const TF32: Type = Type { name: "tf32", bytes: 4, bits: |x| (x as f32).to_bits() | 0x1555 };
pub const F32: Type = Type { name: "f32", bytes: 4, bits: |x| (x as f32).to_bits() };
pub const U8: Type = Type { name: "u8", bytes: 1, bits: |x| (x as u8).into() };
pub const S8: Type = Type { name: "s8", bytes: 1, bits: |x| (x as i8 as u8).into() };
pub const S32: Type = Type { name: "s32", bytes: 4, bits: |x| x as i64 as u32 };
pub const E4M3: Type = Type { name: "e4m3", bytes: 1, bits: |x| small(x, 3, 7) };
pub const E5M2: Type = Type { name: "e5m2", bytes: 1, bits: |x| small(x, 2, 15) };

/// The bits of a normal number, or 0, that a float with few bits has exactly.
fn small(x: f64, mantissa: u32, bias: i32) -> u32 {
    let bits = x.to_bits();
    if x == 0.0 {
        return 0;
    }
    let exponent = (bits >> 52 & 0x7ff) as i32 - 1023 + bias;
    let fraction = bits << 12 >> (64 - mantissa);
    assert!(exponent > 0 && fraction << (64 - mantissa) == bits << 12, "{x} is not exact");
    (bits >> 63 << 7) as u32 | (exponent as u32) << mantissa | fraction as u32
}

/// The f32 that an H200's tensor core makes of a sum of products of numbers that are not subnormal:
/// bits are cut off 25 places below the largest exponent, and behind 24 bits of the sum.
pub fn cut_off(start: f64, products: &[[f64; 2]]) -> u32 {
    let exponent = |x: f64| (x.to_bits() >> 52 & 0x7ff) as i32 - 1023;
    let all =
        products.iter().map(|factors| (factors[0] * factors[1], exponent(factors[0]) + exponent(factors[1])));
    let all: Vec<(f64, i32)> = all.chain([(start, exponent(start))]).filter(|(x, _)| *x != 0.0).collect();
    let Some(top) = all.iter().map(|(_, exponent)| *exponent).max() else { return 0 };
    let unit = 2f64.powi(top - 25);
    let units: i64 = all.iter().map(|(x, _)| (x / unit) as i64).sum();
    let extra = (64 - units.unsigned_abs().leading_zeros()).saturating_sub(24);
    let kept = (units.unsigned_abs() >> extra << extra) as f64 * unit;
    (kept.copysign(units as f64) as f32).to_bits()
}
