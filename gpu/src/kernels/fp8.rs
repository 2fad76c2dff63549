//! e4m3 with a scale for each block of elements: how rows are quantised, and converted back. The
//! OCP Microscaling Formats (MX) specification, version 1.0, defines the scale of MXFP8, UE8M0
//! (5.4.1), and the conversion (6.3).

use crate::layout::{MX_BLOCK, Quantise, SCALE_BLOCK};
use crate::simt::*;

/// Lanes that quantise a block of elements together: each has as many as make 16 bytes.
pub(super) const LANES_PER_SCALE: u32 = SCALE_BLOCK / 16;
/// The largest e4m3 number.
const E4M3_MAX: f32 = 448.0;
/// The least magnitude that a scale is made for.
const LEAST_AMAX: f32 = 1e-4;

/// Lanes that quantise a block of MXFP8 together.
const LANES_PER_BLOCK: u32 = MX_BLOCK / 16;
/// Exponent of the largest power of two in e4m3.
const E4M3_EMAX: u32 = 8;
/// The scale that is not a number.
const UE8M0_NAN: u32 = 0xff;
/// The bits of the infinite magnitude.
const INFINITE: u32 = 0x7f80_0000;

/// Numbers of 16 bytes of e4m3.
pub(super) type Sixteen = [[f32; 8]; 2];

/// The numbers of 16 bytes of BF16.
#[device]
pub(super) fn from_bf16(vector: [u32; 4]) -> [f32; 8] {
    let mut numbers = [0.0; 8];
    unroll!(4, J => {
        numbers[2 * J] = bf16x2_lo(vector[J]);
        numbers[2 * J + 1] = bf16x2_hi(vector[J]);
    });
    numbers
}

/// The numbers of 16 bytes of e4m3, without their scale.
#[device]
pub(super) fn from_e4m3(vector: [u32; 4]) -> Sixteen {
    let mut numbers = [[0.0; 8]; 2];
    unroll!(4, J => {
        let (low, high) = (unpack_e4m3x2(vector[J] as u16), unpack_e4m3x2((vector[J] >> 16) as u16));
        let half = &mut numbers[J / 2];
        let at = J % 2 * 4;
        half[at] = f16x2_lo(low);
        half[at + 1] = f16x2_hi(low);
        half[at + 2] = f16x2_lo(high);
        half[at + 3] = f16x2_hi(high);
    });
    numbers
}

/// 16 numbers as e4m3, and the scale of the block that the lanes of eight such have together. The
/// whole warp calls it, with whole blocks one after the other.
#[device]
pub(super) unsafe fn quantised(numbers: &Sixteen, quantise: u32) -> ([u32; 4], f32) {
    let lane = laneid();
    let mut amax = largest_magnitude(numbers);
    let mut step = 1;
    while step < LANES_PER_SCALE {
        amax = amax.max(shfl_u32(amax, lane ^ step));
        step *= 2;
    }
    let (scale, inverse) = scales(f32::from_bits(amax), quantise);
    let mut vector = [0; 4];
    unroll!(4, J => {
        let half = &numbers[J / 2];
        let at = J % 2 * 4;
        let pack = |at: usize| pack_e4m3x2(half[at] * inverse, half[at + 1] * inverse);
        vector[J] = pack(at) | pack(at + 2) << 16;
    });
    (vector, scale)
}

/// The bits of the largest magnitude of 16 numbers, that of a NaN where one is a NaN.
#[device]
pub(super) fn largest_magnitude(numbers: &Sixteen) -> u32 {
    // Magnitudes of floats order as their bits do.
    let mut amax = 0;
    unroll!(8, J => {
        let magnitude = |number: f32| number.to_bits() & 0x7fff_ffff;
        amax = amax.max(magnitude(numbers[0][J])).max(magnitude(numbers[1][J]));
    });
    amax
}

/// The scale of a block with the largest magnitude `amax`, and the scale's inverse. An e4m3 number
/// times the scale is the original number; that number times the inverse is the e4m3 number.
#[device]
fn scales(amax: f32, quantise: u32) -> (f32, f32) {
    // Not `max`, which takes a NaN for a small number.
    let amax = if amax < LEAST_AMAX { LEAST_AMAX } else { amax };
    let scale = amax / E4M3_MAX;
    // An infinite scale, or one that is not a number, has no next power of two.
    if quantise == Quantise::Fp8PowerOfTwo as u32 && scale < f32::INFINITY {
        // The exponent is what counts; the inverse has the opposite one.
        let exponent = (scale.to_bits() + 0x007f_ffff) >> 23;
        return (f32::from_bits(exponent << 23), f32::from_bits((254 - exponent) << 23));
    }
    (scale, E4M3_MAX / amax)
}

/// 16 numbers as e4m3, and the scales of the four blocks that the lanes of eight such have
/// together: the bytes of a word, that of the first block lowest. The whole warp calls it, with
/// blocks one after the other.
#[device]
pub(super) unsafe fn mx_quantised(numbers: &Sixteen) -> ([u32; 4], f32) {
    let lane = laneid();
    let mut amax = largest_magnitude(numbers);
    let mut step = 1;
    while step < LANES_PER_BLOCK {
        amax = amax.max(shfl_u32(amax, lane ^ step));
        step *= 2;
    }
    let (scale, inverse) = mx_scale(amax);
    let mut scales = scale << (lane / LANES_PER_BLOCK % 4 * 8);
    while step < LANES_PER_SCALE {
        scales |= shfl_u32(scales, lane ^ step);
        step *= 2;
    }
    // `quantised` has the same step: a function for both would rename registers of its kernels.
    let mut vector = [0; 4];
    unroll!(4, J => {
        let half = &numbers[J / 2];
        let at = J % 2 * 4;
        let pack = |at: usize| pack_e4m3x2(half[at] * inverse, half[at + 1] * inverse);
        vector[J] = pack(at) | pack(at + 2) << 16;
    });
    (vector, f32::from_bits(scales))
}

/// The scale of a block with a largest magnitude of these bits, as UE8M0, and the inverse of the
/// scale.
#[device]
fn mx_scale(amax: u32) -> (u32, f32) {
    // Exponents of f32 and of UE8M0 have the same bias, 127. The least scale is 2^-127; that of an
    // infinite magnitude is the next one behind those of finite numbers.
    let scale = (amax >> 23).saturating_sub(E4M3_EMAX);
    // The opposite exponent, 7 to 254: a normal number. Products of bf16 with it are exact, or so
    // small that they become zeros.
    let inverse = f32::from_bits((254 - scale) << 23);
    (if amax > INFINITE { UE8M0_NAN } else { scale }, inverse)
}
