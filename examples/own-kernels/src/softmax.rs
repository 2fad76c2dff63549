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

/// The most columns: 96 KiB of shared memory, which each GPU of sm_80 and newer has for a block.
pub const MAX_SOFTMAX_COLUMNS: u32 = 24_000;

/// `out[row, c] = exp(x[row, c]) / sum of exp(x[row, ..])`, for arrays `[rows, columns]`. Inputs are numbers.
#[kernel(
    threads = 256, block = 256, grid = rows, shared = RowScratch::BYTES + columns * 4,
    barriers = 4, registers = 40,
    requires(
        rows >= 1, columns >= 4, columns.is_multiple_of(4), columns <= MAX_SOFTMAX_COLUMNS,
        rows <= u32::MAX / MAX_SOFTMAX_COLUMNS,
    )
)]
pub unsafe fn softmax(x: Global<f32>, out: Global<f32>, rows: u32, columns: u32) {
    let _ = rows;
    let scratch = RowScratch::dynamic();
    let row = SharedArray::<f32, { MAX_SOFTMAX_COLUMNS as usize }>::new(dynamic_shared() + RowScratch::BYTES);
    let first = ctaid() * columns;

    // Sixteen columns of a thread at a time: four loads are in flight before the first value is
    // used. A thread with fewer loads the row's last ones instead, which change no maximum.
    let mut largest = f32::NEG_INFINITY;
    stride!(c in tid() * 4..columns, 4 * ntid() * 4 => {
        let mut v = [[0.0; 4]; 4];
        unroll!(4, N => {
            v[N] = x.ld_v4(first + (c + N as u32 * ntid() * 4).min(columns - 4));
        });
        unroll!(4, N => {
            let at = c + N as u32 * ntid() * 4;
            if at < columns {
                row.st_v4(at, v[N]);
            }
            unroll!(4, I => {
                largest = if v[N][I] > largest { v[N][I] } else { largest };
            });
        });
    });
    let largest = block_max_f32(largest, scratch.warps());

    let mut sum = 0.0;
    stride!(c in tid() * 4..columns, ntid() * 4 => {
        let mut v = row.ld_v4(c);
        unroll!(4, I => {
            v[I] = ex2_approx((v[I] - largest) * LOG2_E);
            sum += v[I];
        });
        row.st_v4(c, v);
    });
    let scale = 1.0 / block_sum_f32(sum, scratch.warps());

    stride!(c in tid() * 4..columns, ntid() * 4 => {
        out.st_v4(first + c, row.ld_v4(c).map(|v| v * scale));
    });
}
