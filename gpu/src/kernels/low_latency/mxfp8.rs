//! MXFP8 on the way: dispatches whose rows become e4m3 with a power of two as scale for each block
//! of 32 elements. The OCP Microscaling Formats (MX) specification, version 1.0, defines the scale,
//! UE8M0 (5.4.1), and the conversion (6.3).
//!
//! Soundness: as in `dispatch.rs`, within a node and across nodes, whose functions these kernels
//! call. The word with the scales of 128 elements has the place and the writer of their f32 scale.

use super::dispatch::{dispatch, dispatch_by_expert};
use super::fp8::{LANES_PER_SCALE, Sixteen, largest_magnitude};
use super::internode::dispatch as internode;
use super::ranks::{Few, Many};
use crate::layout::{
    FEW_RANKS, LowLatencyArgs, LowLatencyDispatchArgs, LowLatencyExpertDispatchArgs, LowLatencyExpertRows,
    LowLatencyInternodeDispatchArgs, LowLatencyInternodeExpertDispatchArgs, MAX_MEMBERS, MAX_RANKS, MX_BLOCK,
    Quantise,
};
use crate::simt::*;

/// The same as [`LowLatencyDispatch`](super::LowLatencyDispatch), of rows that become MXFP8 on
/// their way.
#[kernel(
    threads = 512, barriers = 10, registers = 128, dependent,
    block = 512, shared = super::low_latency_dispatch_shared_bytes(&args),
    requires(
        ..LowLatencyArgs(args.common),
        args.common.comm.num_ranks <= FEW_RANKS as u32,
        args.quantise == Quantise::Mxfp8 as u32,
    )
)]
pub unsafe fn low_latency_dispatch_mxfp8(args: LowLatencyDispatchArgs) {
    dispatch::<Few, true, false>(&args);
}

/// The same to up to [`MAX_RANKS`] ranks.
#[kernel(
    threads = 512, barriers = 11, registers = 128, dependent,
    block = 512, shared = super::low_latency_dispatch_shared_bytes(&args),
    requires(
        ..LowLatencyArgs(args.common),
        args.common.comm.num_ranks > FEW_RANKS as u32,
        args.quantise == Quantise::Mxfp8 as u32,
    )
)]
pub unsafe fn low_latency_dispatch_many_mxfp8(args: LowLatencyDispatchArgs) {
    dispatch::<Many, true, false>(&args);
}

/// The same as [`LowLatencyDispatchByExpert`](super::LowLatencyDispatchByExpert), of rows that
/// become MXFP8 on their way.
#[kernel(
    threads = 512, barriers = 16, registers = 128, dependent,
    block = 512, shared = super::low_latency_by_expert_shared_bytes(&args),
    requires(
        ..LowLatencyArgs(args.dispatch.common),
        ..LowLatencyDispatchArgs(args.dispatch),
        ..LowLatencyExpertRows(args.to),
        args.dispatch.common.comm.num_ranks <= FEW_RANKS as u32,
        args.dispatch.quantise == Quantise::Mxfp8 as u32,
    )
)]
pub unsafe fn low_latency_dispatch_by_expert_mxfp8(args: LowLatencyExpertDispatchArgs) {
    dispatch_by_expert::<Few, MAX_MEMBERS, true>(&args);
}

/// The same to up to [`MAX_RANKS`] ranks.
#[kernel(
    threads = 512, barriers = 17, registers = 128, dependent,
    block = 512, shared = super::low_latency_by_expert_shared_bytes(&args),
    requires(
        ..LowLatencyArgs(args.dispatch.common),
        ..LowLatencyDispatchArgs(args.dispatch),
        ..LowLatencyExpertRows(args.to),
        args.dispatch.common.comm.num_ranks > FEW_RANKS as u32,
        args.dispatch.quantise == Quantise::Mxfp8 as u32,
    )
)]
pub unsafe fn low_latency_dispatch_many_by_expert_mxfp8(args: LowLatencyExpertDispatchArgs) {
    dispatch_by_expert::<Many, MAX_RANKS, true>(&args);
}

/// The same as [`LowLatencyInternodeDispatch`](super::LowLatencyInternodeDispatch), of rows that
/// become MXFP8 on their way.
#[kernel(
    threads = 512, barriers = 13, registers = 128,
    block = 512, shared = super::LOW_LATENCY_INTERNODE_SHARED_BYTES,
    requires(
        ..LowLatencyArgs(args.dispatch.common),
        ..LowLatencyDispatchArgs(args.dispatch),
        args.dispatch.common.comm.num_ranks <= MAX_MEMBERS as u32,
        args.dispatch.quantise == Quantise::Mxfp8 as u32,
    )
)]
pub unsafe fn low_latency_internode_dispatch_mxfp8(args: LowLatencyInternodeDispatchArgs) {
    internode::dispatch::<true>(&args);
}

/// The same as [`LowLatencyInternodeDispatchByExpert`](super::LowLatencyInternodeDispatchByExpert),
/// of rows that become MXFP8 on their way.
#[kernel(
    threads = 512, barriers = 18, registers = 128,
    shared = super::low_latency_internode_by_expert_shared_bytes(&args),
    requires(
        ..LowLatencyArgs(args.dispatch.dispatch.common),
        ..LowLatencyDispatchArgs(args.dispatch.dispatch),
        ..LowLatencyExpertRows(args.to),
        args.dispatch.dispatch.common.comm.num_ranks <= MAX_MEMBERS as u32,
        args.dispatch.dispatch.quantise == Quantise::Mxfp8 as u32,
    )
)]
pub unsafe fn low_latency_internode_dispatch_by_expert_mxfp8(args: LowLatencyInternodeExpertDispatchArgs) {
    internode::dispatch_by_expert::<true>(&args);
}

/// Lanes that quantise a block together: each has as many elements as make 16 bytes.
const LANES_PER_BLOCK: u32 = MX_BLOCK / 16;
/// Exponent of the largest power of two in e4m3.
const E4M3_EMAX: u32 = 8;
/// The scale that is not a number.
const UE8M0_NAN: u32 = 0xff;
/// The bits of the infinite magnitude.
const INFINITE: u32 = 0x7f80_0000;

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
