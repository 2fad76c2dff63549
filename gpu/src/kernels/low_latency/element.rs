//! The types of rows that a combine sums.

use super::super::combine::{Bf16, F16, F32, Summand};
use super::super::fp8::from_bf16;
use crate::simt::*;

/// A type whose rows a low-latency combine sums.
pub(super) trait Element: Summand {
    /// The numbers of 16 bytes of a row; zeros behind them where they are fewer than eight.
    fn numbers(vector: [u32; 4]) -> [f32; 8];
}

impl Element for Bf16 {
    #[device]
    fn numbers(vector: [u32; 4]) -> [f32; 8] {
        from_bf16(vector)
    }
}

impl Element for F16 {
    #[device]
    fn numbers(vector: [u32; 4]) -> [f32; 8] {
        let mut numbers = [0.0; 8];
        unroll!(4, J => {
            numbers[2 * J] = f16x2_lo(vector[J]);
            numbers[2 * J + 1] = f16x2_hi(vector[J]);
        });
        numbers
    }
}

impl Element for F32 {
    #[device]
    fn numbers(vector: [u32; 4]) -> [f32; 8] {
        let mut numbers = [0.0; 8];
        unroll!(4, J => { numbers[J] = f32::from_bits(vector[J]) });
        numbers
    }
}
