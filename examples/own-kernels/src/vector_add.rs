//! `out = a + b`: a grid-stride loop.
//!
//! Sound because each thread stores elements of its own, and no thread writes `a` and `b`.

use epoxide_simt::*;

/// `out[i] = a[i] + b[i]` for all `i` below `len`.
#[kernel(
    threads = 256, block = 256, grid = len.div_ceil(256).min(1024), registers = 32,
    requires(len >= 1, len <= 1 << 31)
)]
pub unsafe fn vector_add(a: Global<f32>, b: Global<f32>, out: Global<f32>, len: u32) {
    grid_stride!(i in 0..len => {
        out.st(i, a.ld(i) + b.ld(i));
    });
}
