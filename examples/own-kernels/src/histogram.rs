//! A histogram: each block counts in shared memory, then adds its counts to those of all.
//!
//! Sound because blocks add with atomics, in shared and in global memory, and barriers separate
//! clearing, counting and reading of the block's counts.

use epoxide_simt::*;

/// Adds to `counts[v]` how often `v` is in `values`. Values of `bins` and more are left out.
#[kernel(
    threads = 256, block = 256, grid = len.div_ceil(4096).clamp(1, 264), shared = bins * 4,
    barriers = 2, registers = 32,
    requires(bins >= 1, bins <= 12_288, len <= 1 << 31)
)]
pub unsafe fn histogram(values: Global<u32>, counts: Global<u32>, len: u32, bins: u32) {
    let own = SharedArray::<u32, 12_288>::new(dynamic_shared());
    block_stride!(bin in 0..bins => {
        own.st(bin, 0);
    });
    barrier_sync();
    grid_stride!(i in 0..len => {
        let value = values.ld(i);
        if value < bins {
            red_relaxed_cta_shared_add_u32(own.at(value), 1);
        }
    });
    barrier_sync();
    block_stride!(bin in 0..bins => {
        let count = own.ld(bin);
        if count > 0 {
            red_relaxed_gpu_add_u32(counts.at(bin), count);
        }
    });
}
