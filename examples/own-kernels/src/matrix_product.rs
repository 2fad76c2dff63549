//! A matrix product through tiles in shared memory.
//!
//! Sound because a barrier separates the stores to the tiles from the loads, and another one the
//! loads from the next stores.

use epoxide_simt::*;

/// Rows and columns of a tile; a block computes one.
const TILE: u32 = 16;

shared! {
    static struct Tiles {
        /// A tile of `a`, row by row.
        a: [f32; 256],
        /// A tile of `b`, row by row.
        b: [f32; 256],
    }
}

/// `c[m, n] = a[m, k] * b[k, n]`. Each sum adds the products in order and rounds each, so that a
/// host can repeat it bit for bit.
#[kernel(
    threads = 256, block = TILE * TILE, grid = (m / TILE) * (n / TILE), barriers = 2, registers = 64,
    requires(
        m.is_multiple_of(16), n.is_multiple_of(16), k.is_multiple_of(16),
        m >= 16, n >= 16, k >= 16, m <= 1 << 15, n <= 1 << 15, k <= 1 << 15,
    )
)]
pub unsafe fn matrix_product(a: Global<f32>, b: Global<f32>, c: Global<f32>, m: u32, n: u32, k: u32) {
    let _ = m;
    let tiles = Tiles::get();
    let (row, column) = (tid() / TILE, tid() % TILE);
    let tiles_across = n / TILE;
    let i = ctaid() / tiles_across * TILE + row;
    let j = ctaid() % tiles_across * TILE + column;

    let mut sum = 0.0;
    let mut at = 0;
    while at < k {
        tiles.a().st(tid(), a.ld(i * k + at + column));
        tiles.b().st(tid(), b.ld((at + row) * n + j));
        barrier_sync();
        unroll!(16, S => {
            sum += tiles.a().ld(row * TILE + S as u32) * tiles.b().ld(S as u32 * TILE + column);
        });
        barrier_sync();
        at += TILE;
    }
    c.st(i * n + j, sum);
}
