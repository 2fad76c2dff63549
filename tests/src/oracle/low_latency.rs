//! Expected results of low-latency dispatch and combine, from the routing of all ranks.

use std::sync::LazyLock;

use epoxide::DType;

use super::Routing;
use crate::payload;

/// Expected metadata of one rank after a low-latency dispatch. A row of token t from rank s is
/// `s * max_tokens + t`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LowLatencyPlan {
    /// By local expert: source rank and token of each of its rows, by rank, then by token. A token
    /// that selects an expert twice is there once.
    pub expert_rows: Vec<Vec<(u32, u32)>>,
    /// By local expert and source rank: how many of those rows are the rank's, and where they
    /// begin.
    pub layout_range: Vec<Vec<(u32, u32)>>,
}

/// The rows that `rank` receives.
pub fn low_latency_plan(routing: &Routing, rank: u32) -> LowLatencyPlan {
    let rows_from = |source: u32, expert: i64| {
        let selects = move |token: &u32| routing.topk_idx[source as usize][*token as usize].contains(&expert);
        (0..routing.num_tokens(source)).filter(selects).map(move |token| (source, token))
    };
    let mine = (rank * routing.local_experts()..(rank + 1) * routing.local_experts()).map(i64::from);
    let (expert_rows, layout_range) = mine
        .map(|expert| {
            let (mut rows, mut ranges) = (Vec::new(), Vec::new());
            for source in 0..routing.num_ranks() {
                let begin = rows.len();
                rows.extend(rows_from(source, expert));
                ranges.push(((rows.len() - begin) as u32, begin as u32));
            }
            (rows, ranges)
        })
        .unzip();
    LowLatencyPlan { expert_rows, layout_range }
}

/// The share of `dst` in a token of `rank`. It is the sum over the token's entries there, in their
/// order, of weight times the expert's `output`, in FP32. `None` if the token has no expert there.
pub fn low_latency_share(
    routing: &Routing,
    weights: &[f32],
    rank: u32,
    token: u32,
    dst: u32,
    output: impl Fn(i64) -> Vec<f32>,
) -> Option<Vec<f32>> {
    let mut sum: Option<Vec<f32>> = None;
    for (&expert, &weight) in routing.topk_idx[rank as usize][token as usize].iter().zip(weights) {
        if routing.owner(expert) != Some(dst) {
            continue;
        }
        let row = output(expert);
        let sum = sum.get_or_insert_with(|| vec![0.0; row.len()]);
        sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += value * weight);
    }
    sum
}

/// How rows travel: as they are, or in e4m3 with scales, which may be powers of two.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Travel {
    /// Rounded to bf16, f16 or f32.
    As(DType),
    /// [`quantised`].
    Fp8 {
        /// Whether scales are.
        power_of_two: bool,
    },
}

impl Travel {
    /// The row as it arrives.
    pub fn arrives(self, row: &[f32]) -> Vec<f32> {
        let power_of_two = match self {
            Travel::As(dtype) => return row.iter().map(|&value| payload::rounded(dtype, value)).collect(),
            Travel::Fp8 { power_of_two } => power_of_two,
        };
        let (bytes, scales) = quantised(row, power_of_two);
        bytes.iter().enumerate().map(|(at, &byte)| from_e4m3(byte) * scales[at / 128]).collect()
    }
}

/// The sum of what ranks returned of a token, in their order, in FP32, rounded once to bf16, f16 or
/// f32; zeros where none did.
pub fn low_latency_sum(shares: impl IntoIterator<Item = Vec<f32>>, hidden: usize, dtype: DType) -> Vec<f32> {
    let mut sum = vec![0.0f32; hidden];
    for share in shares {
        sum.iter_mut().zip(share).for_each(|(sum, value)| *sum += value);
    }
    Travel::As(dtype).arrives(&sum)
}

/// A row as e4m3 with a scale for each 128 elements: `q * scale` stands for the element. The scale
/// is the largest magnitude, at least 1e-4, over 448, or the next power of two from there on if it
/// is finite. Elements are divided by it and rounded to nearest even. In a block with a NaN, scale
/// and elements are NaN; in one with an infinity, the scale is infinite.
pub fn quantised(row: &[f32], power_of_two: bool) -> (Vec<u8>, Vec<f32>) {
    let block = |block: &[f32]| {
        let mut amax = block.iter().map(|value| value.abs()).fold(1e-4f32, f32::max);
        if block.iter().any(|value| value.is_nan()) {
            // The NaN of a GPU's arithmetic.
            amax = f32::from_bits(0x7fff_ffff);
        }
        let mut scale = amax / 448.0;
        let mut inverse = 448.0 / amax;
        if power_of_two && scale.is_finite() {
            let powers = (-126..=127).map(payload::power_of_two);
            scale = powers.into_iter().find(|power| *power >= scale).expect("the largest is 2^127 / 448");
            inverse = 1.0 / scale;
        }
        (block.iter().map(|value| e4m3(value * inverse)).collect::<Vec<u8>>(), scale)
    };
    let (bytes, scales): (Vec<_>, Vec<_>) = row.chunks(128).map(block).unzip();
    (bytes.concat(), scales)
}

/// The number that an e4m3 byte stands for.
pub fn from_e4m3(byte: u8) -> f32 {
    let (sign, exponent, mantissa) = (byte >> 7, (byte >> 3 & 15) as i32, (byte & 7) as f32);
    let magnitude = match exponent {
        0 => mantissa * payload::power_of_two(-9),
        15 if mantissa == 7.0 => f32::NAN,
        _ => (1.0 + mantissa / 8.0) * payload::power_of_two(exponent - 7),
    };
    if sign == 1 { -magnitude } else { magnitude }
}

/// The e4m3 byte nearest to a number, the even one of two; the largest where it is larger, NaN of a
/// NaN.
pub(super) fn e4m3(value: f32) -> u8 {
    /// The largest.
    const LARGEST: u8 = 0x7e;
    static NUMBERS: LazyLock<[f32; LARGEST as usize + 1]> =
        LazyLock::new(|| std::array::from_fn(|byte| from_e4m3(byte as u8)));
    if value.is_nan() {
        return 0x7f;
    }
    let number = |byte: u8| NUMBERS[byte as usize];
    let magnitude = value.abs();
    // Bytes order as their numbers do: the nearest is the first that is no smaller, or the one
    // before.
    let (mut above, mut size) = (0, LARGEST);
    while size > 0 {
        let half = size / 2;
        if number(above + half) < magnitude {
            (above, size) = (above + half + 1, size - half - 1);
        } else {
            size = half;
        }
    }
    let distance = |byte: &u8| (number(*byte) - magnitude).abs();
    let nearest = [above.saturating_sub(1), above]
        .into_iter()
        .min_by(|a, b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))));
    nearest.unwrap_or(0) | if value.is_sign_negative() { 0x80 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_rounds_to_nearest_even() {
        let cases = [
            (1.0, 0x38),
            (448.0, 0x7e),
            (1e9, 0x7e),
            (-1.0, 0xb8),
            (0.0, 0),
            (2f32.powi(-9), 1),
            (2f32.powi(-10), 0),
        ];
        assert!(cases.iter().all(|&(value, byte)| e4m3(value) == byte));
        assert_eq!((e4m3(3.0 * 2f32.powi(-10)), e4m3(17.0), e4m3(19.0)), (2, e4m3(16.0), e4m3(20.0)));
        assert!((0..=0x7eu8).all(|byte| e4m3(from_e4m3(byte)) == byte));
        // Every number is nearest to the byte that a search over all bytes finds.
        let by_looking = |value: f32| {
            let distance = |byte: &u8| (from_e4m3(*byte) - value).abs();
            (0..=0x7eu8).min_by(|a, b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))))
        };
        assert!(
            (0..4000).map(|step| step as f32 * 0.125).all(|value| Some(e4m3(value)) == by_looking(value))
        );
        assert!(
            (0..4000)
                .map(|step| step as f32 * 2f32.powi(-15))
                .all(|value| Some(e4m3(value)) == by_looking(value))
        );
    }

    #[test]
    fn the_worked_example() {
        // Section 5 of the semantics: two nodes of two ranks, 8 experts, here as one node.
        let topk_idx = vec![
            vec![vec![0, 6], vec![3, 5], vec![7, 6], vec![1, -1]],
            vec![vec![2, 4], vec![6, 1], vec![0, 1], vec![5, 7]],
            vec![vec![7, 0], vec![1, 2], vec![4, 5], vec![3, 6]],
            vec![vec![0, 2], vec![6, 7], vec![5, 1], vec![4, 3]],
        ];
        let routing = Routing { num_experts: 8, num_topk: 2, topk_idx };
        let plan = low_latency_plan(&routing, 0);
        assert_eq!(plan.expert_rows[0], [(0, 0), (1, 2), (2, 0), (3, 0)]);
        assert_eq!(plan.expert_rows[1], [(0, 3), (1, 1), (1, 2), (2, 1), (3, 2)]);
        assert_eq!(plan.layout_range[1], [(1, 0), (2, 1), (1, 3), (1, 4)]);
    }
}
