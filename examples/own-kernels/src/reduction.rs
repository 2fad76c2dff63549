//! The sum of an array, in a fixed order: the same bits in every run.
//!
//! Sound because barriers of the block separate the accesses to the shared memory with sums
//! (`block_sum_f32`), and one thread of each block stores the block's sum.

use epoxide_simt::*;

shared! {
    static struct SumScratch {
        warps: [f32; 32],
    }
}

/// `sums[block]` is the sum of the elements that the block takes. With `blocks = 1` it is the sum of
/// all, so two launches reduce a large array.
#[kernel(
    threads = 256, block = 256, grid = blocks, barriers = 2, registers = 32,
    requires(len <= 1 << 31, blocks >= 1, blocks <= 1024)
)]
pub unsafe fn sum(x: Global<f32>, sums: Global<f32>, len: u32, blocks: u32) {
    let mut own = 0.0;
    grid_stride!(i in 0..len => {
        own += x.ld(i);
    });
    let total = block_sum_f32(own, SumScratch::get().warps());
    if tid() == 0 {
        sums.st(ctaid(), total);
    }
}
