//! Rows for tests: distinct bytes that identify tokens, and small integers whose sums are exact.

use epoxide::{DType, Payload};
use half::{bf16, f16};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::oracle::MX_BLOCK;

/// Elements of a row that share one scale, for 1-byte dtypes.
pub const ELEMENTS_PER_SCALE: u64 = 128;

/// The encoding of numbers as rows of bytes, and the data sent with the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// bf16.
    Bf16,
    /// f16.
    F16,
    /// f32.
    F32,
    /// e4m3 with f32 scales of 128 elements.
    Fp8,
    /// e5m2 with f32 scales of 128 elements.
    Fp8E5m2,
    /// e4m3 with UE8M0 scales of 128 elements, four to an i32.
    Fp8Ue8m0,
    /// e4m3 with UE8M0 scales of 32 elements.
    Mxfp8,
    /// e2m1 with e4m3 scales of 16 elements and an f32 scale.
    Nvfp4,
}

impl Format {
    /// All of them.
    pub const ALL: [Format; 8] = [
        Format::Bf16,
        Format::F16,
        Format::F32,
        Format::Fp8,
        Format::Fp8E5m2,
        Format::Fp8Ue8m0,
        Format::Mxfp8,
        Format::Nvfp4,
    ];

    /// Elements that rows of `hidden` have a multiple of.
    pub fn unit(self) -> u64 {
        match self {
            Format::F32 => 4,
            Format::Bf16 | Format::F16 => 8,
            Format::Fp8 | Format::Fp8E5m2 | Format::Fp8Ue8m0 => 16,
            Format::Mxfp8 | Format::Nvfp4 => 32,
        }
    }

    /// Rows of `hidden` elements, a multiple of [`Format::unit`].
    ///
    /// # Panics
    /// Where it is none.
    pub fn payload(self, hidden: u64) -> Payload {
        let payload = match self {
            Format::Bf16 => Payload::rows(DType::Bf16, hidden),
            Format::F16 => Payload::rows(DType::F16, hidden),
            Format::F32 => Payload::rows(DType::F32, hidden),
            Format::Fp8 => Payload::fp8(DType::Fp8E4m3, hidden),
            Format::Fp8E5m2 => Payload::fp8(DType::Fp8E5m2, hidden),
            Format::Fp8Ue8m0 => Payload::fp8_ue8m0(DType::Fp8E4m3, hidden),
            Format::Mxfp8 => Payload::mxfp8(DType::Fp8E4m3, hidden),
            Format::Nvfp4 => Payload::nvfp4(hidden),
        };
        payload.unwrap_or_else(|error| panic!("{self:?}: {error}"))
    }
}

/// One thing per rank and token, `[rank][token]`.
pub type PerToken<T> = Vec<Vec<T>>;

/// Calls `make(rank, token)` for all tokens of all ranks.
pub fn per_token<T>(tokens_per_rank: &[u32], mut make: impl FnMut(u32, u32) -> T) -> PerToken<T> {
    (0..)
        .zip(tokens_per_rank)
        .map(|(rank, &tokens)| (0..tokens).map(|token| make(rank, token)).collect())
        .collect()
}

/// Random rows of `row_bytes` bytes that start with rank and token, so that no two are equal.
///
/// # Panics
/// Where a row has fewer than 8 bytes.
pub fn distinct_rows(rng: &mut impl Rng, tokens_per_rank: &[u32], row_bytes: usize) -> PerToken<Vec<u8>> {
    per_token(tokens_per_rank, |rank, token| {
        let mut row = vec![0; row_bytes];
        rng.fill(&mut row[..]);
        row[..4].copy_from_slice(&rank.to_le_bytes());
        row[4..8].copy_from_slice(&token.to_le_bytes());
        row
    })
}

/// BF16 integers from -16 to 16: sums of up to 8 of them are exact in any order.
pub fn small_integers(rng: &mut impl Rng, columns: usize) -> Vec<bf16> {
    (0..columns).map(|_| bf16::from_f32(rng.random_range(-16..=16) as f32)).collect()
}

/// BF16 numbers of mixed magnitude, whose sum shows in which order and precision it was made.
pub fn rough_bf16(rng: &mut impl Rng, columns: usize) -> Vec<bf16> {
    rough_f32(rng, columns).into_iter().map(bf16::from_f32).collect()
}

/// A block of MXFP8 before its conversion, of a kind: numbers of all bits, or all that a conversion
/// to e4m3 distinguishes. Every 12th kind is the same.
pub fn block_of_bf16(rng: &mut impl Rng, kind: u32) -> Vec<bf16> {
    let bits = |bits: u16| bf16::from_bits(bits);
    let power = |exponent: i32| bf16::from_f32(2f32.powi(exponent));
    // The neighbours of a number among those of bf16.
    let below = |value: bf16| bits(value.to_bits() - 1);
    let above = |value: bf16| bits(value.to_bits() + 1);
    let mut all = rough_bf16(rng, MX_BLOCK);
    // Rough numbers are below 2^7.
    let exponent = rng.random_range(7..=127);
    let mut put = |value: bf16| {
        let sign = if rng.random_bool(0.5) { -bf16::ONE } else { bf16::ONE };
        all[rng.random_range(0..MX_BLOCK)] = if value.is_nan() { value } else { value * sign };
    };
    match kind % 12 {
        0 => (),
        1 => all = (0..MX_BLOCK as u16).map(|at| bits(at << 15)).collect(),
        // Subnormal numbers, which the least scale is made for.
        2 => all.fill_with(|| bits(rng.random::<u16>() & 0x807f)),
        // Those around the least number with another scale than that, and far smaller ones.
        3 => {
            let least = power(-118).to_bits();
            all.fill_with(|| bits((least - 2 + rng.random_range(0..4)) | rng.random::<u16>() & 0x8000));
        }
        4 => put(below(power(exponent))),
        5 => put(power(exponent)),
        6 => put(above(power(exponent))),
        // As large as can be, next to numbers that vanish.
        7 => put(bf16::MAX),
        8 => put(bf16::INFINITY),
        9 => put(if exponent % 2 == 0 { bf16::NAN } else { -bf16::NAN }),
        10 => [bf16::NAN, bf16::INFINITY, bf16::MAX].into_iter().for_each(put),
        _ => all.fill_with(|| bits(rng.random())),
    }
    all
}

/// FP32 numbers of mixed magnitude, whose sum shows in which order it was made.
pub fn rough_f32(rng: &mut impl Rng, columns: usize) -> Vec<f32> {
    (0..columns).map(|_| rng.random_range(-1.0f32..1.0) * power_of_two(rng.random_range(-8..8))).collect()
}

/// 2 to the power of `exponent`, from -126 to 127.
pub fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((127 + exponent) as u32) << 23)
}

/// A generator for one thing out of many.
pub fn rng_of(what: &[u64]) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(mix(what))
}

/// Mixes numbers into one (SplitMix64).
pub fn mix(numbers: &[u64]) -> u64 {
    numbers.iter().fold(0x9e37_79b9_7f4a_7c15, |state: u64, &number| {
        let mut z = (state ^ number).wrapping_add(0x9e37_79b9_7f4a_7c15);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

/// Widens BF16 rows, for [`super::oracle::combine_f32`].
pub fn widen(rows: &[Vec<bf16>]) -> Vec<Vec<f32>> {
    rows.iter().map(|row| row.iter().map(|value| value.to_f32()).collect()).collect()
}

/// Rounds sums to BF16, to nearest even.
pub fn round(rows: &[Vec<f32>]) -> Vec<Vec<bf16>> {
    rows.iter().map(|row| row.iter().map(|&value| bf16::from_f32(value)).collect()).collect()
}

/// A number rounded to a type that combine sums, to nearest even.
pub fn rounded(dtype: DType, value: f32) -> f32 {
    match dtype {
        DType::F32 => value,
        DType::F16 => f16::from_f32(value).to_f32(),
        _ => bf16::from_f32(value).to_f32(),
    }
}

/// The bytes of numbers as FP32, or rounded to F16 or BF16.
pub fn rounded_bytes(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::F32 => bytes_of(values),
        DType::F16 => bytes_of(&values.iter().map(|&value| f16::from_f32(value)).collect::<Vec<_>>()),
        _ => bytes_of(&values.iter().map(|&value| bf16::from_f32(value)).collect::<Vec<_>>()),
    }
}

/// The numbers that bytes of FP32, F16 or BF16 hold, exactly.
pub fn numbers_of(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::F32 => values_of(bytes),
        DType::F16 => values_of::<f16>(bytes).into_iter().map(f16::to_f32).collect(),
        _ => values_of::<bf16>(bytes).into_iter().map(bf16::to_f32).collect(),
    }
}

/// The bytes of values, as they lie in memory.
pub fn bytes_of<T: bytemuck::Pod>(values: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(values).to_vec()
}

/// The values that bytes hold.
///
/// # Panics
/// Where the number of bytes is no multiple of the size of a value.
pub fn values_of<T: bytemuck::Pod>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use rand::RngCore as _;
    use rand::seq::{IndexedRandom as _, SliceRandom as _};

    use super::*;

    /// A seed that a failed run printed must replay it in later versions: neither the generator nor
    /// what is drawn from it may change.
    #[test]
    fn draws_from_a_seed_are_the_same_for_ever() {
        let mut rng = ChaCha8Rng::seed_from_u64(0);
        assert_eq!([rng.next_u64(), rng.next_u64()], [0xb585_f767_a79a_3b6c, 0x7746_a55f_bad8_c037]);
        assert_eq!([(); 4].map(|()| rng.random_range(0..1000u32)), [507, 699, 560, 60]);
        assert_eq!([(); 4].map(|()| rng.random_range(-5..=5i64)), [4, 1, 4, 5]);
        assert_eq!([(); 6].map(|()| rng.random_bool(0.5)), [false, true, false, false, false, true]);
        assert_eq!(rng.random::<f64>(), 0.764_543_156_617_118_5);
        let mut all: Vec<u32> = (0..8).collect();
        all.shuffle(&mut rng);
        assert_eq!(all, [7, 4, 5, 0, 3, 1, 2, 6]);
        assert_eq!(all.choose(&mut rng), Some(&1));
        assert_eq!(rng_of(&[1, 2]).next_u64(), 0x3f78_f94d_240f_159a);
    }

    #[test]
    fn rows_are_distinct_and_of_the_asked_shape() {
        let rows = distinct_rows(&mut ChaCha8Rng::seed_from_u64(3), &[5, 0, 7], 16);
        assert_eq!(rows.iter().map(Vec::len).collect::<Vec<_>>(), [5, 0, 7]);
        let all: HashSet<_> = rows.iter().flatten().collect();
        assert!(all.len() == 12 && all.iter().all(|row| row.len() == 16));
    }

    #[test]
    fn small_integers_are_exact_and_rough_ones_are_not() {
        let mut rng = ChaCha8Rng::seed_from_u64(4);
        for value in small_integers(&mut rng, 1000) {
            assert!(value.to_f32().fract() == 0.0 && value.to_f32().abs() <= 16.0);
        }
        let terms: Vec<_> = (0..8).map(|_| rough_bf16(&mut rng, 1000)).collect();
        let sum = |order: &mut dyn Iterator<Item = usize>| -> Vec<f32> {
            let mut sum = vec![0.0f32; 1000];
            order.for_each(|i| sum.iter_mut().zip(&terms[i]).for_each(|(sum, term)| *sum += term.to_f32()));
            sum
        };
        assert_ne!(sum(&mut (0..8)), sum(&mut (0..8).rev()));
    }

    #[test]
    fn bytes_and_values_round_trip() {
        let values = [1.0f32, -2.5, 3e9];
        assert_eq!(values_of::<f32>(&bytes_of(&values)), values);
        assert_eq!(round(&widen(&[vec![bf16::from_f32(1.5)]])), [[bf16::from_f32(1.5)]]);
    }
}
