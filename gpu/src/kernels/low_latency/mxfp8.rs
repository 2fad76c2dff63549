//! MXFP8 on the way: dispatches whose rows become e4m3 with a power of two as scale for each block
//! of 32 elements.
//!
//! Soundness: as in `dispatch.rs`, within a node and across nodes, whose functions these kernels
//! call. The word with the scales of 128 elements has the place and the writer of their f32 scale.

use super::dispatch::{dispatch, dispatch_by_expert};
use super::internode::dispatch as internode;
use super::ranks::{Few, Many};
use crate::layout::{
    FEW_RANKS, LowLatencyArgs, LowLatencyDispatchArgs, LowLatencyExpertDispatchArgs, LowLatencyExpertRows,
    LowLatencyInternodeDispatchArgs, LowLatencyInternodeExpertDispatchArgs, MAX_MEMBERS, MAX_RANKS, Quantise,
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
    threads = 512, barriers = 19, registers = 128, dependent,
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
    threads = 512, barriers = 20, registers = 128, dependent,
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
    threads = 512, barriers = 21, registers = 128,
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
