//! RMS norm of rows of BF16 numbers: a block takes a row.
//!
//! Sound because each thread stores words of its own, and the block exchanges its sum through
//! `block_sum_f32`, which has barriers.

use epoxide_simt::*;

shared! {
    static struct NormScratch {
        warps: [f32; 32],
    }
}

/// `out[row, c] = x[row, c] * weight[c] / sqrt(mean of x[row, ..]^2 + epsilon)`, for BF16 arrays
/// `[rows, columns]` and `[columns]`, two numbers in a word. It computes in f32, and rounds to nearest even
/// at the end.
#[kernel(
    threads = 256, block = 256, grid = rows, barriers = 2, registers = 40,
    requires(
        rows >= 1, columns >= 2, columns.is_multiple_of(2), columns <= 1 << 16, rows <= 1 << 15,
        epsilon >= 0.0,
    )
)]
pub unsafe fn rms_norm(
    x: Global<u32>,
    weight: Global<u32>,
    out: Global<u32>,
    rows: u32,
    columns: u32,
    epsilon: f32,
) {
    let _ = rows;
    let pairs = columns / 2;
    let first = ctaid() * pairs;

    let mut squares = 0.0;
    block_stride!(pair in 0..pairs => {
        let v = x.ld(first + pair);
        squares += bf16x2_lo(v) * bf16x2_lo(v);
        squares += bf16x2_hi(v) * bf16x2_hi(v);
    });
    let mean = block_sum_f32(squares, NormScratch::get().warps()) / columns as f32;
    let scale = 1.0 / sqrt(mean + epsilon);

    block_stride!(pair in 0..pairs => {
        let (v, w) = (x.ld(first + pair), weight.ld(pair));
        let (lo, hi) = (bf16x2_lo(v) * scale * bf16x2_lo(w), bf16x2_hi(v) * scale * bf16x2_hi(w));
        out.st(first + pair, pack_bf16x2(lo, hi));
    });
}
