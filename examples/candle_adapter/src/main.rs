//! An MoE layer whose experts are [candle](https://crates.io/crates/candle-core)'s operations, spread
//! over ranks whose tokens epoxide moves. It is compared with the same layer on one device.
//!
//! ```text
//! cargo run                            # candle's CPU device, and virtual GPUs
//! cargo run --release --features cuda  # two GPUs; candle needs CUDA's toolkit to be built
//! ```
//!
//! | file | holds |
//! |---|---|
//! | `adapter.rs` | the trait that takes tensors in and out of epoxide's calls |
//! | `cpu.rs`, `cuda.rs` | the trait on candle's CPU device, by copies, and on its CUDA device, without |
//! | `layer.rs` | the layer: router, dispatch, experts, combine; and the dense one |

mod adapter;
#[cfg(not(feature = "cuda"))]
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
mod layer;

use std::process::ExitCode;
use std::time::Duration;

use adapter::{Adapter, candle};
use candle_core::{DType, Tensor};
use epoxide::Result;
use epoxide::group::run_threads;
use layer::{Layer, Sizes, Weights};

#[cfg(not(feature = "cuda"))]
use cpu::Cpu as Rank;
#[cfg(feature = "cuda")]
use cuda::Cuda as Rank;

const RANKS: u32 = 2;

const SIZES: Sizes = Sizes { hidden: 64, intermediate: 96, num_experts: 8, num_topk: 3, max_tokens: 12 };

/// Tokens of each rank in a pass.
const PASSES: [[usize; RANKS as usize]; 3] = [[12, 12], [1, 7], [9, 2]];

/// The largest error that a result may have, as part of the largest one. BF16 rounds by 2^-9 of a
/// number: here each expert's result, and their sum.
const TOLERANCE: f32 = 0.01;

fn main() -> ExitCode {
    match run() {
        Ok(lines) => {
            lines.iter().for_each(|line| println!("{line}"));
            println!("PASS");
            ExitCode::SUCCESS
        }
        Err(text) => {
            eprintln!("{text}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the ranks, each a thread. Gives a line for each rank's comparison of each pass.
fn run() -> Result<Vec<String>, String> {
    let ended = run_threads(RANKS, Duration::from_secs(300), |rank, group| {
        let adapter = Rank::new(rank)?;
        let mut layer = Layer::new(SIZES, &adapter, &*group)?;
        let dense = Weights::new(SIZES, 0..SIZES.num_experts, adapter.candle()).map_err(candle)?;
        let mut compared = Vec::new();
        for counts in PASSES {
            let count = counts[rank as usize];
            let x = layer::tokens(&SIZES, rank, count, adapter.candle()).map_err(candle)?;
            let out = layer.forward(&adapter, &x)?;
            let outcome = dense.dense(&x).and_then(|want| compare(&out, &want)).map_err(candle)?;
            compared.push(outcome.map(|line| format!("rank {rank}, {count} tokens: {line}")));
        }
        Ok(compared)
    });
    ended.map_err(|failure| failure.to_string())?.into_iter().flatten().collect()
}

/// A line about the largest error, or about the first element that is wrong.
fn compare(got: &Tensor, want: &Tensor) -> candle_core::Result<Result<String, String>> {
    let flat = |tensor: &Tensor| tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
    let (got, want) = (flat(got)?, flat(want)?);
    if got.len() != want.len() {
        return Ok(Err(format!("{} elements, expected {}", got.len(), want.len())));
    }
    let largest = want.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    let mut worst = 0.0f32;
    for (at, (got, want)) in got.iter().zip(&want).enumerate() {
        let error = (got - want).abs() / largest;
        // Written so that not-a-number is wrong.
        let is_right = error <= TOLERANCE;
        if !is_right {
            return Ok(Err(format!("element {at} is {got}, expected {want}; the largest is {largest}")));
        }
        worst = worst.max(error);
    }
    Ok(Ok(format!("{} elements, error {worst:.1e} of {largest:.3}", got.len())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_spread_layer_is_the_dense_one() {
        let lines = run().unwrap_or_else(|text| panic!("{text}"));
        assert_eq!(lines.len(), PASSES.len() * RANKS as usize);
    }

    #[cfg(not(feature = "cuda"))]
    #[test]
    fn tensors_that_do_not_fit_are_rejected() {
        let rank = Rank::new(0).unwrap();
        let x = Tensor::zeros((4, 6), DType::F32, rank.candle()).unwrap();
        let shape = |x: &Tensor| rank.input(x, |x: &epoxide::TypedTensor<'_, f32>| Ok(x.shape().to_vec()));
        // A part of another tensor's memory, with its offset.
        assert_eq!(shape(&x.narrow(0, 1, 2).unwrap()).unwrap(), [2, 6]);
        for (x, rule) in [
            (x.t().unwrap(), "call contiguous()"),
            (x.flatten_all().unwrap(), "2"),
            (x.to_dtype(DType::BF16).unwrap(), "dtype"),
        ] {
            let error = shape(&x).unwrap_err().to_string();
            assert!(error.contains(rule), "{error}");
        }
    }
}
