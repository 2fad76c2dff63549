//! Sums of products of floats as an H200 adds them.
//!
//! A step adds all products of a row and a column, and what came before them, at once. The products
//! are exact. Everything is aligned to the largest exponent, where that of a product is the sum of
//! the exponents of its factors. Bits that lie a number of places below are cut off, and the sum of
//! the rest is exact. A sum of f32 is cut off too, one of f16 rounded to nearest even.
//!
//! `docs/decisions/2026-11-28-virtual-gpu-sums-of-products.md` describes how the rule was measured,
//! and `2026-11-28-virtual-gpu-sums-of-wmma-and-sparse-a.md` which products are in a step of `wmma`
//! and of a sparse A. Sums here are computed in double precision, eight columns at a time.

use half::f16;

use super::mma::{COLUMNS, Element, Right, Sum};

/// The instructions that add: a warp's `mma.sync`, `mma.sp` or `wmma`, or a warpgroup's `wgmma`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Adder {
    Warp,
    Warpgroup,
}

/// How products of two types are added.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sums {
    sum: Sum,
    /// Bits behind the largest exponent that stay, and the last of them for an exponent of 0.
    places: i32,
    unit: f64,
    /// The least power of 2 of a factor that is not 0.
    least: [f64; 2],
    /// The same of an element of C.
    least_of_c: f64,
}

/// 2 to the exponent of a number, at least `least`; 0 of 0.
#[inline(always)]
fn least_power(number: f64, least: f64) -> f64 {
    let power = f64::from_bits(number.to_bits() & 0x7ff << 52);
    if number == 0.0 {
        0.0
    } else if power < least {
        least
    } else {
        power
    }
}

impl Sums {
    /// `None` for integers, whose sums are exact.
    pub(super) fn new(a: Element, b: Element, sum: Sum, adder: Adder) -> Option<Sums> {
        // The exponent of the least number that is not subnormal.
        let exponent = |element: Element| match element {
            Element::F16 | Element::E5m2 => Some(-14),
            Element::Bf16 | Element::Tf32 => Some(-126),
            // A warp adds these as f16, of which they are never subnormal.
            Element::E4m3 if adder == Adder::Warp => Some(-14),
            Element::E4m3 => Some(-6),
            Element::U8 | Element::S8 | Element::U4 | Element::S4 => None,
        };
        let places = if a.bits() == 8 && adder == Adder::Warpgroup { 13 } else { 25 };
        Some(Sums {
            sum,
            places,
            unit: 2f64.powi(-places),
            least: [2f64.powi(exponent(a)?), 2f64.powi(exponent(b)?)],
            least_of_c: 2f64.powi(if sum == Sum::F16 { -14 } else { -126 }),
        })
    }

    /// The powers of all elements of B.
    pub(super) fn powers<const K: usize>(&self, right: &Right<K>, k: usize) -> Right<K> {
        let mut powers = [[0.0; COLUMNS]; K];
        for (powers, right) in powers.iter_mut().zip(right).take(k) {
            *powers = right.map(|right| least_power(right, self.least[1]));
        }
        powers
    }

    /// Adds products, each of a number and a row of B, to a row of sums. `right` is B with its powers.
    pub(super) fn add<const K: usize>(
        &self,
        sums: &mut [f64; COLUMNS],
        products: impl Iterator<Item = (f64, usize)> + Clone,
        right: (&Right<K>, &Right<K>),
    ) {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2.
            return unsafe { self.add_by_avx2(sums, products, right) };
        }
        self.add_here(sums, products, right);
    }

    /// # Safety
    /// The processor has AVX2.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    unsafe fn add_by_avx2<const K: usize>(
        &self,
        sums: &mut [f64; COLUMNS],
        products: impl Iterator<Item = (f64, usize)> + Clone,
        right: (&Right<K>, &Right<K>),
    ) {
        self.add_here(sums, products, right);
    }

    #[inline(always)]
    fn add_here<const K: usize>(
        &self,
        sums: &mut [f64; COLUMNS],
        products: impl Iterator<Item = (f64, usize)> + Clone,
        (right, powers): (&Right<K>, &Right<K>),
    ) {
        let mut top = sums.map(|sum| least_power(sum, self.least_of_c));
        let mut exact = *sums;
        for (left, k) in products.clone() {
            let of_left = least_power(left, self.least[0]);
            for column in 0..COLUMNS {
                exact[column] += left * right[k][column];
                let power = of_left * powers[k][column];
                top[column] = if power > top[column] { power } else { top[column] };
            }
        }
        let units = top.map(|top| top * self.unit);
        let mut cut = [0.0; COLUMNS];
        for column in 0..COLUMNS {
            cut[column] = cut_off(sums[column], units[column]);
        }
        for (left, k) in products {
            for column in 0..COLUMNS {
                cut[column] += cut_off(left * right[k][column], units[column]);
            }
        }
        for column in 0..COLUMNS {
            // Infinities, NaNs and zeros alone are as in any order.
            sums[column] = match exact[column].is_finite() && top[column] > 0.0 {
                true => self.rounded(cut[column]),
                false => exact[column],
            };
        }
    }

    fn rounded(&self, sum: f64) -> f64 {
        match self.sum {
            Sum::F16 => to_f16(sum).to_f64(),
            _ if sum.abs() >= 2f64.powi(128) => f64::INFINITY.copysign(sum),
            _ if self.places == 13 => f64::from_bits(sum.to_bits() & !0 << (52 - 13)),
            _ => f64::from(toward_zero(sum)),
        }
    }
}

/// A number without what lies below a power of 2, which is at most 2^51 times less.
#[inline(always)]
fn cut_off(number: f64, unit: f64) -> f64 {
    let (magnitude, magic) = (number.abs(), unit * ((1u64 << 52) as f64));
    let nearest = (magnitude + magic) - magic;
    let below = if nearest > magnitude { nearest - unit } else { nearest };
    below.copysign(number)
}

/// The nearest f16, to even. (`f16::from_f64` ignores the low half of the number.)
pub(super) fn to_f16(number: f64) -> f16 {
    let near = toward_zero(number);
    let is_exact = f64::from(near) == number || !number.is_finite();
    f16::from_f32(if is_exact { near } else { f32::from_bits(near.to_bits() | 1) })
}

/// The f32 that is nearest to a number, of those that are no farther from 0.
fn toward_zero(number: f64) -> f32 {
    let nearest = number as f32;
    if f64::from(nearest).abs() > number.abs() { f32::from_bits(nearest.to_bits() - 1) } else { nearest }
}
