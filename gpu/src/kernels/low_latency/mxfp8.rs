//! MXFP8 on the way: dispatches whose rows become e4m3 with a power of two as scale for each block
//! of 32 elements.
//!
//! Soundness: as in `dispatch.rs`, within a node and across nodes, whose functions these kernels
//! call. The word with the scales of 128 elements has the place and the writer of their f32 scale.

use super::dispatch::{dispatch, dispatch_by_expert, most_ranks};
use super::internode::dispatch as internode;
use super::ranks::{Few, Many};
use crate::layout::{
    FEW_RANKS, LowLatencyArgs, LowLatencyDispatchArgs, LowLatencyExpertDispatchArgs, LowLatencyExpertRows,
    LowLatencyInternodeDispatchArgs, LowLatencyInternodeExpertDispatchArgs, MAX_MEMBERS, Quantise,
};
use crate::simt::*;

few_and_many! {
    kernel(
        threads = 512, registers = 128, dependent,
        block = 512, shared = super::low_latency_dispatch_shared_bytes(&args)
    );
    few(barriers = 10) many(barriers = 11);
    requires(..LowLatencyArgs(args.common), args.quantise == Quantise::Mxfp8 as u32);
    ranks(args.common.comm);
    fn(args: LowLatencyDispatchArgs);

    /// The same as [`LowLatencyDispatch`](super::LowLatencyDispatch), of rows that become MXFP8 on
    /// their way.
    low_latency_dispatch_mxfp8, low_latency_dispatch_many_mxfp8<R> { dispatch::<R, true, false, false>(&args) }
}

few_and_many! {
    kernel(
        threads = 512, registers = 128, dependent,
        block = 512, shared = super::low_latency_by_expert_shared_bytes(&args)
    );
    few(barriers = 21) many(barriers = 20);
    requires(
        ..LowLatencyArgs(args.dispatch.common),
        ..LowLatencyDispatchArgs(args.dispatch),
        ..LowLatencyExpertRows(args.to),
        args.dispatch.quantise == Quantise::Mxfp8 as u32
    );
    ranks(args.dispatch.common.comm);
    fn(args: LowLatencyExpertDispatchArgs);

    /// The same as [`LowLatencyDispatchByExpert`](super::LowLatencyDispatchByExpert), of rows that
    /// become MXFP8 on their way.
    low_latency_dispatch_by_expert_mxfp8, low_latency_dispatch_many_by_expert_mxfp8<R> {
        dispatch_by_expert::<R, { most_ranks::<R>() }, true, false>(&args)
    }
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
    block = 512, shared = super::low_latency_internode_by_expert_shared_bytes(&args),
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
