//! Reductions over a warp and over a block. All lanes get the same bits.

#[cfg(target_arch = "nvptx64")]
use core::arch::asm;

use crate::device;
use crate::order::barrier_sync;
use crate::shared::SharedArray;
use crate::sreg::{laneid, ntid, tid};
use crate::warp::shfl_bfly_u32;

/// Combines the values of all lanes, in the same order in every lane.
///
/// # Safety
/// All 32 lanes call it.
#[device]
unsafe fn warp_reduce(mut v: f32, combine: impl Fn(f32, f32) -> f32) -> f32 {
    crate::unroll!(5, N => {
        let theirs = shfl_bfly_u32::<{ 16 >> N }>(v.to_bits());
        v = combine(v, f32::from_bits(theirs));
    });
    v
}

/// The sum over all lanes of the warp, in a fixed order: five `shfl.sync.bfly.b32` and additions.
///
/// # Safety
/// All 32 lanes call it.
#[device]
pub unsafe fn warp_sum_f32(v: f32) -> f32 {
    warp_reduce(v, |a, b| a + b)
}

/// The larger of two numbers, `max.f32 r, a, b;`. Of two zeros it is +0.0, on each side of an
/// exchange: a comparison would leave each lane its own.
#[device]
fn larger(a: f32, b: f32) -> f32 {
    #[cfg(target_arch = "nvptx64")]
    {
        let r: f32;
        // SAFETY: arithmetic on registers.
        unsafe {
            asm!("max.f32 {r}, {a}, {b};",
                r = out(reg32) r, a = in(reg32) a, b = in(reg32) b, options(pure, nomem, nostack))
        };
        r
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        let _ = (a, b);
        crate::device_only("larger")
    }
}

/// The largest value of all lanes of the warp, +0.0 where the largest are zeros of both signs: five
/// `shfl.sync.bfly.b32` and `max.f32`. Values are numbers.
///
/// # Safety
/// All 32 lanes call it.
#[device]
pub unsafe fn warp_max_f32(v: f32) -> f32 {
    warp_reduce(v, larger)
}

/// Combines the values of all threads of the block. `neutral` changes no value.
///
/// # Safety
/// All threads of the block call it, in whole warps, and no other code uses `scratch` meanwhile.
#[device]
unsafe fn block_reduce(
    v: f32,
    neutral: f32,
    scratch: SharedArray<f32, 32>,
    combine: impl Fn(f32, f32) -> f32,
) -> f32 {
    let (lane, warps) = (laneid(), ntid() / 32);
    let of_warp = warp_reduce(v, &combine);
    if lane == 0 {
        scratch.st(tid() / 32, of_warp);
    }
    barrier_sync();
    // Lanes without a warp of their own load the last one's: no branch in front of the
    // collective.
    let theirs = scratch.ld(lane.min(warps - 1));
    let total = warp_reduce(if lane < warps { theirs } else { neutral }, &combine);
    // The next reduction may write the memory.
    barrier_sync();
    total
}

/// The sum over all threads of the block, in a fixed order. Two block barriers.
///
/// # Safety
/// All threads of the block call it; the block has whole warps; no other code uses `scratch`
/// meanwhile.
#[device]
pub unsafe fn block_sum_f32(v: f32, scratch: SharedArray<f32, 32>) -> f32 {
    block_reduce(v, 0.0, scratch, |a, b| a + b)
}

/// The largest value of all threads of the block, +0.0 where the largest are zeros of both signs.
/// Two block barriers. Values are numbers.
///
/// # Safety
/// All threads of the block call it; the block has whole warps; no other code uses `scratch`
/// meanwhile.
#[device]
pub unsafe fn block_max_f32(v: f32, scratch: SharedArray<f32, 32>) -> f32 {
    block_reduce(v, f32::NEG_INFINITY, scratch, larger)
}
