//! Softmax over rows: a block takes a row, and keeps it in dynamic shared memory.
//!
//! Sound because each thread touches columns of its own, in shared memory too, and the block exchanges
//! maximum and sum through `block_max_f32` and `block_sum_f32`, which have barriers.

use core::f32::consts::LOG2_E;

use epoxide_simt::*;

shared! {
    /// The row lies behind it.
    struct RowScratch {
        warps: [f32; 32],
    }
}

/// The most columns: 48 KiB of shared memory, which every launch may have.
pub const MAX_SOFTMAX_COLUMNS: u32 = 12_000;

/// `out[row, c] = exp(x[row, c]) / sum of exp(x[row, ..])`, for arrays `[rows, columns]`. Inputs are numbers.
#[kernel(
    threads = 256, block = 256, grid = rows, shared = RowScratch::BYTES + columns * 4,
    barriers = 4, registers = 40,
    requires(rows >= 1, columns >= 1, columns <= MAX_SOFTMAX_COLUMNS, rows <= u32::MAX / MAX_SOFTMAX_COLUMNS)
)]
pub unsafe fn softmax(x: Global<f32>, out: Global<f32>, rows: u32, columns: u32) {
    let _ = rows;
    let scratch = RowScratch::dynamic();
    let row = SharedArray::<f32, { MAX_SOFTMAX_COLUMNS as usize }>::new(dynamic_shared() + RowScratch::BYTES);
    let first = ctaid() * columns;

    let mut largest = f32::NEG_INFINITY;
    block_stride!(c in 0..columns => {
        let v = x.ld(first + c);
        row.st(c, v);
        largest = if v > largest { v } else { largest };
    });
    let largest = block_max_f32(largest, scratch.warps());

    let mut sum = 0.0;
    block_stride!(c in 0..columns => {
        let power = ex2_approx((row.ld(c) - largest) * LOG2_E);
        row.st(c, power);
        sum += power;
    });
    let sum = block_sum_f32(sum, scratch.warps());

    block_stride!(c in 0..columns => {
        out.st(first + c, row.ld(c) / sum);
    });
}
