//! The kernels of a buffer. The ranks, the type of the sums and the room for rows by expert choose
//! them, once for all launches.

use bytemuck::Zeroable;
use epoxide_gpu::kernels::{
    AddCounts, FirstTokens, LowLatencyCombineBf16, LowLatencyCombineF16, LowLatencyCombineF32,
    LowLatencyCombineFp8, LowLatencyCombineManyBf16, LowLatencyCombineManyF16, LowLatencyCombineManyF32,
    LowLatencyCombineManyFp8, LowLatencyCombineManyPooled, LowLatencyCombineManySummed,
    LowLatencyCombinePooled, LowLatencyCombineSummed, LowLatencyCombineTwoPooled, LowLatencyDispatch,
    LowLatencyDispatchBatch, LowLatencyDispatchByExpert, LowLatencyDispatchByExpertMxfp8,
    LowLatencyDispatchByExpertScalePackets, LowLatencyDispatchMany, LowLatencyDispatchManyBatch,
    LowLatencyDispatchManyByExpert, LowLatencyDispatchManyByExpertMxfp8, LowLatencyDispatchManyMxfp8,
    LowLatencyDispatchMxfp8, LowLatencyDispatchScalePackets, LowLatencyGather, LowLatencyGatherColumns,
    LowLatencyInternodeCombineBf16, LowLatencyInternodeCombineF16, LowLatencyInternodeCombineF32,
    LowLatencyInternodeCombineFp8, LowLatencyInternodeDispatch, LowLatencyInternodeDispatchByExpert,
    LowLatencyInternodeDispatchByExpertMxfp8, LowLatencyInternodeDispatchMxfp8, LowLatencyInternodeWait,
    LowLatencyWait, LowLatencyWaitMany, PackColumns,
};
use epoxide_gpu::layout::{
    AddCountsArgs, BATCH_TOPK, FEW_RANKS, FirstTokensArgs, LowLatencyCombineArgs, LowLatencyDispatchArgs,
    LowLatencyExpertDispatchArgs, LowLatencyGatherArgs, LowLatencyGatherColumnsArgs,
    LowLatencyInternodeCombineArgs, LowLatencyInternodeDispatchArgs, LowLatencyInternodeExpertDispatchArgs,
    LowLatencyMessages, LowLatencyWaitArgs, PackArgs, Quantise, is_batch, phase,
};

use super::Options;
use super::halves::Arguments;
use crate::driver::{Device, Stream};
use crate::ep::core::{self, Chosen};
use crate::ep::{DType, Topology};
use crate::error::{Error, Result};

/// One of the kernels that take `A` within a node, or `A` with messages across nodes.
type Choice<A> = core::Choice<(A, LowLatencyMessages)>;

/// The choice of a kernel. Kernels across nodes are given with the function that makes their
/// arguments.
macro_rules! choice {
    ($chosen:ident, $kernel:ty) => {
        choice!($chosen, $kernel, |(args, _)| args)
    };
    ($chosen:ident, $kernel:ty, $arguments:expr) => {
        core::choice!($chosen, $kernel, 0, $arguments)
    };
}

/// The kernels of a dispatch: those of rows by expert have other arguments.
#[derive(Debug)]
struct Dispatches<A> {
    plain: Choice<A>,
    /// The one of rows that become MXFP8.
    mxfp8: Choice<A>,
    /// Within a node of few ranks, with scales that are sent as packets.
    packed: Option<Choice<A>>,
    /// Within a node, of many tokens, except for rows by expert.
    batch: Option<Choice<A>>,
}

impl<A> Dispatches<A> {
    /// The kernel of a dispatch.
    fn of(&self, args: &LowLatencyDispatchArgs, packs_scales: bool) -> &Choice<A> {
        let common = &args.common;
        let is_batch = is_batch(common.num_tokens, common.comm.num_ranks) && common.num_topk <= BATCH_TOPK;
        match self {
            Dispatches { mxfp8, .. } if args.quantise == Quantise::Mxfp8 as u32 => mxfp8,
            Dispatches { packed: Some(packed), .. } if packs_scales => packed,
            Dispatches { batch: Some(batch), .. } if is_batch => batch,
            Dispatches { plain, .. } => plain,
        }
    }
}

/// The kernels of a combine, within a node of few ranks, of many, or across nodes.
#[derive(Debug)]
struct Combines {
    /// The one of rows of [`Options::combine_dtype`].
    plain: Choice<LowLatencyCombineArgs>,
    quantised: Choice<LowLatencyCombineArgs>,
    /// Within a node, of many bf16 rows that are summed over experts already.
    summed: Option<Choice<LowLatencyCombineArgs>>,
    /// Within a node, of rows in the pool.
    pooled: Option<Choice<LowLatencyCombineArgs>>,
}

impl Combines {
    /// The kernel of a combine of a tensor, on `grid` blocks.
    fn of(&self, args: &LowLatencyCombineArgs, grid: u32) -> &Choice<LowLatencyCombineArgs> {
        match self {
            Combines { quantised, .. } if args.quantise != Quantise::None as u32 => quantised,
            Combines { summed: Some(summed), .. } if returns_while_summing(args, grid) => summed,
            Combines { plain, .. } => plain,
        }
    }
}

/// Whether a combine's blocks return rows while they sum. True if each block has more than two
/// tokens to sum, and the rows, of bf16, are summed over experts already. With one or two, half of
/// a block's warps would be idle: 256 tokens on 132 blocks took 8 % longer.
fn returns_while_summing(args: &LowLatencyCombineArgs, grid: u32) -> bool {
    let common = &args.common;
    args.by_expert == 0
        && common.phases == phase::SEND | phase::RECEIVE
        && common.num_tokens > common.packet_tokens
        && common.num_tokens > 2 * grid
}

/// All kernels of a buffer.
#[derive(Debug)]
pub struct Kernels {
    dispatch: Dispatches<LowLatencyDispatchArgs>,
    /// Where the buffer has room for rows by expert.
    dispatch_by_expert: Option<Dispatches<LowLatencyExpertDispatchArgs>>,
    combine: Combines,
    wait: core::Choice<LowLatencyWaitArgs>,
    pub gather: core::Choice<LowLatencyGatherArgs>,
    pub gather_columns: core::Choice<LowLatencyGatherColumnsArgs>,
    pub first_tokens: core::Choice<FirstTokensArgs>,
    pub pack_columns: core::Choice<PackArgs>,
    pub add_counts: core::Choice<AddCountsArgs>,
}

/// The set of kernels that a buffer has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// All ranks are of one node, up to [`FEW_RANKS`].
    Few,
    /// All ranks are of one node, and there are more.
    Many,
    /// Ranks are on several nodes.
    Nodes,
}

impl Kind {
    fn of(topology: Topology) -> Kind {
        match topology {
            Topology { nodes: 1, ranks_per_node } if ranks_per_node <= FEW_RANKS as u32 => Kind::Few,
            Topology { nodes: 1, .. } => Kind::Many,
            _ => Kind::Nodes,
        }
    }
}

/// The choices of a dispatch.
fn dispatches(kind: Kind, chosen: &mut Chosen) -> Dispatches<LowLatencyDispatchArgs> {
    match kind {
        Kind::Few => Dispatches {
            plain: choice!(chosen, LowLatencyDispatch),
            mxfp8: choice!(chosen, LowLatencyDispatchMxfp8),
            packed: Some(choice!(chosen, LowLatencyDispatchScalePackets)),
            batch: Some(choice!(chosen, LowLatencyDispatchBatch)),
        },
        Kind::Many => Dispatches {
            plain: choice!(chosen, LowLatencyDispatchMany),
            mxfp8: choice!(chosen, LowLatencyDispatchManyMxfp8),
            packed: None,
            batch: Some(choice!(chosen, LowLatencyDispatchManyBatch)),
        },
        Kind::Nodes => Dispatches {
            plain: choice!(chosen, LowLatencyInternodeDispatch, |(dispatch, messages)| {
                LowLatencyInternodeDispatchArgs { dispatch, messages }
            }),
            mxfp8: choice!(chosen, LowLatencyInternodeDispatchMxfp8, |(dispatch, messages)| {
                LowLatencyInternodeDispatchArgs { dispatch, messages }
            }),
            packed: None,
            batch: None,
        },
    }
}

/// The choices of a dispatch that brings rows by expert.
fn dispatches_by_expert(kind: Kind, chosen: &mut Chosen) -> Dispatches<LowLatencyExpertDispatchArgs> {
    fn across(
        (args, messages): (LowLatencyExpertDispatchArgs, LowLatencyMessages),
    ) -> LowLatencyInternodeExpertDispatchArgs {
        let dispatch = LowLatencyInternodeDispatchArgs { dispatch: args.dispatch, messages };
        LowLatencyInternodeExpertDispatchArgs { dispatch, to: args.to }
    }
    match kind {
        Kind::Few => Dispatches {
            plain: choice!(chosen, LowLatencyDispatchByExpert),
            mxfp8: choice!(chosen, LowLatencyDispatchByExpertMxfp8),
            packed: Some(choice!(chosen, LowLatencyDispatchByExpertScalePackets)),
            batch: None,
        },
        Kind::Many => Dispatches {
            plain: choice!(chosen, LowLatencyDispatchManyByExpert),
            mxfp8: choice!(chosen, LowLatencyDispatchManyByExpertMxfp8),
            packed: None,
            batch: None,
        },
        Kind::Nodes => Dispatches {
            plain: choice!(chosen, LowLatencyInternodeDispatchByExpert, across),
            mxfp8: choice!(chosen, LowLatencyInternodeDispatchByExpertMxfp8, across),
            packed: None,
            batch: None,
        },
    }
}

/// The choices of a combine of `num_ranks` ranks with sums of `dtype`.
fn combines(kind: Kind, dtype: DType, num_ranks: u32, chosen: &mut Chosen) -> Combines {
    macro_rules! across {
        ($kernel:ty) => {
            choice!(chosen, $kernel, |(combine, messages)| LowLatencyInternodeCombineArgs {
                combine,
                messages
            })
        };
    }
    match kind {
        Kind::Few => Combines {
            plain: match dtype {
                DType::F16 => choice!(chosen, LowLatencyCombineF16),
                DType::F32 => choice!(chosen, LowLatencyCombineF32),
                _ => choice!(chosen, LowLatencyCombineBf16),
            },
            quantised: choice!(chosen, LowLatencyCombineFp8),
            summed: (dtype == DType::Bf16).then(|| choice!(chosen, LowLatencyCombineSummed)),
            pooled: Some(match num_ranks {
                ..=2 => choice!(chosen, LowLatencyCombineTwoPooled),
                _ => choice!(chosen, LowLatencyCombinePooled),
            }),
        },
        Kind::Many => Combines {
            plain: match dtype {
                DType::F16 => choice!(chosen, LowLatencyCombineManyF16),
                DType::F32 => choice!(chosen, LowLatencyCombineManyF32),
                _ => choice!(chosen, LowLatencyCombineManyBf16),
            },
            quantised: choice!(chosen, LowLatencyCombineManyFp8),
            summed: (dtype == DType::Bf16).then(|| choice!(chosen, LowLatencyCombineManySummed)),
            pooled: Some(choice!(chosen, LowLatencyCombineManyPooled)),
        },
        Kind::Nodes => Combines {
            plain: match dtype {
                DType::F16 => across!(LowLatencyInternodeCombineF16),
                DType::F32 => across!(LowLatencyInternodeCombineF32),
                _ => across!(LowLatencyInternodeCombineBf16),
            },
            quantised: across!(LowLatencyInternodeCombineFp8),
            summed: None,
            pooled: None,
        },
    }
}

impl Kernels {
    /// Loads the kernels of a buffer.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn load(device: &Device, topology: Topology, options: &Options) -> Result<Kernels> {
        let kind = Kind::of(topology);
        let chosen = &mut Chosen::default();
        let kernels = Kernels {
            dispatch: dispatches(kind, chosen),
            dispatch_by_expert: options.rows_by_expert.map(|_| dispatches_by_expert(kind, chosen)),
            combine: combines(kind, options.combine_dtype, topology.ranks(), chosen),
            wait: match kind {
                Kind::Few => core::choice!(chosen, LowLatencyWait, 0),
                Kind::Many => core::choice!(chosen, LowLatencyWaitMany, 0),
                Kind::Nodes => core::choice!(chosen, LowLatencyInternodeWait, 0),
            },
            gather: core::choice!(chosen, LowLatencyGather, 0),
            gather_columns: core::choice!(chosen, LowLatencyGatherColumns, 0),
            first_tokens: core::choice!(chosen, FirstTokens, 0),
            pack_columns: core::choice!(chosen, PackColumns, 0),
            add_counts: core::choice!(chosen, AddCounts, 0),
        };
        chosen.load(device, None)?;
        Ok(kernels)
    }

    /// Launches the kernel of an operation on `grid` blocks. `packs_scales`: whether scales of a
    /// dispatch within a node are sent as packets.
    ///
    /// # Safety
    /// The memory of the arguments is live until the stream has passed the kernel. `messages` are
    /// those of the place; there are some where ranks are on several nodes.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        grid: u32,
        args: Arguments,
        packs_scales: bool,
        messages: Option<LowLatencyMessages>,
    ) -> Result<()> {
        let messages = messages.unwrap_or_else(LowLatencyMessages::zeroed);
        // SAFETY: the caller keeps the memory.
        unsafe {
            match args {
                Arguments::Dispatch(args) => {
                    self.dispatch.of(&args, packs_scales).call_on(stream, grid, (args, messages))
                }
                Arguments::DispatchByExpert(args) => {
                    let Some(kernels) = &self.dispatch_by_expert else {
                        let rule =
                            "the buffer has no kernel for them: create it with Options::rows_by_expert";
                        return Err(Error::argument("by_expert", "asked for", rule));
                    };
                    kernels.of(&args.dispatch, packs_scales).call_on(stream, grid, (args, messages))
                }
                Arguments::Combine(args) => {
                    self.combine.of(&args, grid).call_on(stream, grid, (args, messages))
                }
                Arguments::PooledCombine(args) => match &self.combine.pooled {
                    Some(pooled) => pooled.call_on(stream, grid, (args, messages)),
                    None => Err(Error::internal("combine", "no rows are in the pool across nodes")),
                },
            }
        }
    }

    /// Launches the kernel that waits between the halves of an operation.
    ///
    /// # Safety
    /// The memory of the arguments is live until the stream has passed the kernel. The messages are
    /// among them.
    pub unsafe fn launch_wait(&self, stream: &Stream, args: LowLatencyWaitArgs) -> Result<()> {
        // SAFETY: the caller keeps the memory.
        unsafe { self.wait.call_named(stream, args) }
    }
}
