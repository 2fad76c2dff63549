//! The rows of a round by the oracle: as sent, in transit, and as returned.

use half::bf16;
use rand::Rng;

use epoxide::low_latency::Quantise;

use super::case::{LowLatencyCase, ReturnPath};
use crate::oracle::{Travel, low_latency_share, low_latency_sum, mxfp8, quantised};
use crate::payload::{PerToken, bytes_of, per_token, rng_of, rough_bf16, rough_f32};

/// Largest error of an element after quantisation, in scales: half of the largest e4m3 step, 32,
/// and the error from rounding the inverse.
pub(super) const FP8_ERROR: f32 = 16.1;
/// Largest relative error of a scale.
pub(super) const SCALE_ERROR: f32 = 1e-6;

/// The scales of a row as it travels.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Scales {
    None,
    /// One for each 128 elements.
    F32(Vec<f32>),
    /// One for each 32 elements.
    Ue8m0(Vec<u8>),
}

impl Scales {
    /// Those of f32.
    pub(super) fn of_f32(&self) -> &[f32] {
        if let Scales::F32(scales) = self { scales } else { &[] }
    }
}

impl LowLatencyCase {
    /// A row's bytes as it travels, and its scales.
    pub(super) fn as_it_travels(&self, x: &[bf16]) -> (Vec<u8>, Scales) {
        let quantised = |power_of_two| {
            let (bytes, scales) = quantised(&numbers(x), power_of_two);
            (bytes, Scales::F32(scales))
        };
        match self.quantise {
            Quantise::None => (bytes_of(x), Scales::None),
            Quantise::Fp8 => quantised(false),
            Quantise::Fp8PowerOfTwo => quantised(true),
            Quantise::Mxfp8 => {
                let (bytes, scales) = mxfp8(&numbers(x));
                (bytes, Scales::Ue8m0(scales))
            }
        }
    }
}

pub(super) fn numbers(row: &[bf16]) -> Vec<f32> {
    row.iter().map(|value| value.to_f32()).collect()
}

/// By how many scales of its block of 128 an element is off, at most.
pub(super) fn worst_error(row: &[f32], arrived: &[f32], scales: &[f32]) -> f32 {
    let errors = row.iter().zip(arrived).enumerate();
    errors.map(|(at, (row, arrived))| (row - arrived).abs() / scales[at / 128]).fold(0.0, f32::max)
}

/// Rows of all ranks and outputs of all experts, in one round.
#[derive(Debug)]
pub(super) struct Data {
    pub(super) x: PerToken<Vec<bf16>>,
    pub(super) weights: PerToken<Vec<f32>>,
    pub(super) seed: u64,
}

impl Data {
    pub(super) fn new(case: &LowLatencyCase, round: u32) -> Data {
        let routing = &case.routing;
        let tokens: Vec<u32> = (0..routing.num_ranks()).map(|rank| routing.num_tokens(rank)).collect();
        let seed = case.seed ^ u64::from(round) << 32;
        let mut rng = rng_of(&[seed, 1]);
        let mut of_weights = rng_of(&[seed, 2]);
        let mut weight = || if case.weighted { of_weights.random_range(-2.0f32..2.0) } else { 1.0 };
        Data {
            x: per_token(&tokens, |_, _| rough_bf16(&mut rng, case.hidden as usize)),
            weights: per_token(&tokens, |_, _| (0..routing.num_topk).map(|_| weight()).collect()),
            seed,
        }
    }

    /// Output of an expert for a token: arbitrary, but the same on all ranks.
    pub(super) fn output(&self, case: &LowLatencyCase, expert: i64, source: u32, token: u32) -> Vec<f32> {
        if case.gathers {
            return numbers(&self.x[source as usize][token as usize]);
        }
        let mut rng = rng_of(&[self.seed, 3, expert as u64, source.into(), token.into()]);
        Travel::As(case.combine_dtype).arrives(&rough_f32(&mut rng, case.hidden as usize))
    }

    /// A rank's share of a token.
    pub(super) fn share(&self, case: &LowLatencyCase, source: u32, token: u32, dst: u32) -> Option<Vec<f32>> {
        let mut weights = self.weights[source as usize][token as usize].clone();
        if case.combine_rows == ReturnPath::ByExpert && case.segments.is_some_and(|it| it.unweighted) {
            weights.fill(1.0);
        }
        low_latency_share(&case.routing, &weights, source, token, dst, |expert| {
            self.output(case, expert, source, token)
        })
    }

    /// The share as it arrives.
    fn returned(&self, case: &LowLatencyCase, source: u32, token: u32, dst: u32) -> Option<Vec<f32>> {
        let share = self.share(case, source, token, dst)?;
        let as_it_is = Travel::As(case.combine_dtype);
        // Rows that are summed already are given in the type of the combine.
        let share = if case.combine_rows == ReturnPath::ByExpert { share } else { as_it_is.arrives(&share) };
        let travel = match case.quantise_back {
            Quantise::None => as_it_is,
            Quantise::Fp8 => Travel::Fp8 { power_of_two: false },
            Quantise::Fp8PowerOfTwo => Travel::Fp8 { power_of_two: true },
            Quantise::Mxfp8 => unreachable!("a combine does not quantise so"),
        };
        let arrives = travel.arrives(&share);
        if case.quantise_back != Quantise::None {
            let (_, scales) = quantised(&share, case.quantise_back == Quantise::Fp8PowerOfTwo);
            let worst = worst_error(&share, &arrives, &scales);
            assert!(worst <= FP8_ERROR, "a share of token {token} of rank {source} is off by {worst} scales");
        }
        Some(arrives)
    }

    /// Final sums of a rank.
    pub(super) fn combined(&self, case: &LowLatencyCase, rank: u32) -> Vec<Vec<f32>> {
        let ranks = 0..case.routing.num_ranks();
        let sum = |token: u32| {
            let shares = ranks.clone().filter_map(|dst| self.returned(case, rank, token, dst));
            low_latency_sum(shares, case.hidden as usize, case.combine_dtype)
        };
        (0..case.routing.num_tokens(rank)).map(sum).collect()
    }
}
