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
    BATCH_TOPK, FEW_RANKS, LowLatencyCombineArgs, LowLatencyDispatchArgs, LowLatencyExpertDispatchArgs,
    LowLatencyInternodeCombineArgs, LowLatencyInternodeDispatchArgs, LowLatencyInternodeExpertDispatchArgs,
    LowLatencyMessages, LowLatencyWaitArgs, Quantise, is_batch, phase,
};

use super::Options;
use super::halves::Arguments;
use crate::driver::{Device, Kernel, Module, Stream};
use crate::ep::{DType, Topology};
use crate::error::{Error, Result};

/// Launches a kernel on so many blocks, with its arguments, and the messages of its place where
/// ranks are on several nodes.
type Launch<A> = unsafe fn(&Stream, &Kernel, u32, A, LowLatencyMessages) -> Result<()>;

/// One of the kernels that take `A`.
#[derive(Debug)]
struct Choice<A> {
    /// Its place among the buffer's kernels.
    index: usize,
    launch: Launch<A>,
}

/// The choice of a kernel, whose name is added to `$names`. Kernels across nodes are given with the
/// struct that they take.
macro_rules! choice {
    ($names:ident, $kernel:ty) => {
        choice!($names, $kernel, |args, _messages| args)
    };
    ($names:ident, $kernel:ty, |$args:ident, $messages:ident| $all:expr) => {{
        $names.push(<$kernel>::INFO.name);
        Choice {
            index: $names.len() - 1,
            launch: |stream, kernel, grid, $args, $messages| {
                // SAFETY: `Kernels::launch` has the same contract.
                unsafe { stream.launch_blocks(kernel, grid, <$kernel>::call($all)) }
            },
        }
    }};
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
    loaded: Vec<Kernel>,
    dispatch: Dispatches<LowLatencyDispatchArgs>,
    /// Where the buffer has room for rows by expert.
    dispatch_by_expert: Option<Dispatches<LowLatencyExpertDispatchArgs>>,
    combine: Combines,
    wait: Choice<LowLatencyWaitArgs>,
    pub gather: Kernel,
    pub gather_columns: Kernel,
    pub first_tokens: Kernel,
    pub pack_columns: Kernel,
    pub add_counts: Kernel,
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
fn dispatches(kind: Kind, names: &mut Vec<&'static str>) -> Dispatches<LowLatencyDispatchArgs> {
    match kind {
        Kind::Few => Dispatches {
            plain: choice!(names, LowLatencyDispatch),
            mxfp8: choice!(names, LowLatencyDispatchMxfp8),
            packed: Some(choice!(names, LowLatencyDispatchScalePackets)),
            batch: Some(choice!(names, LowLatencyDispatchBatch)),
        },
        Kind::Many => Dispatches {
            plain: choice!(names, LowLatencyDispatchMany),
            mxfp8: choice!(names, LowLatencyDispatchManyMxfp8),
            packed: None,
            batch: Some(choice!(names, LowLatencyDispatchManyBatch)),
        },
        Kind::Nodes => Dispatches {
            plain: choice!(names, LowLatencyInternodeDispatch, |dispatch, messages| {
                LowLatencyInternodeDispatchArgs { dispatch, messages }
            }),
            mxfp8: choice!(names, LowLatencyInternodeDispatchMxfp8, |dispatch, messages| {
                LowLatencyInternodeDispatchArgs { dispatch, messages }
            }),
            packed: None,
            batch: None,
        },
    }
}

/// The choices of a dispatch that brings rows by expert.
fn dispatches_by_expert(
    kind: Kind,
    names: &mut Vec<&'static str>,
) -> Dispatches<LowLatencyExpertDispatchArgs> {
    fn across(
        LowLatencyExpertDispatchArgs { dispatch, to }: LowLatencyExpertDispatchArgs,
        messages: LowLatencyMessages,
    ) -> LowLatencyInternodeExpertDispatchArgs {
        let dispatch = LowLatencyInternodeDispatchArgs { dispatch, messages };
        LowLatencyInternodeExpertDispatchArgs { dispatch, to }
    }
    match kind {
        Kind::Few => Dispatches {
            plain: choice!(names, LowLatencyDispatchByExpert),
            mxfp8: choice!(names, LowLatencyDispatchByExpertMxfp8),
            packed: Some(choice!(names, LowLatencyDispatchByExpertScalePackets)),
            batch: None,
        },
        Kind::Many => Dispatches {
            plain: choice!(names, LowLatencyDispatchManyByExpert),
            mxfp8: choice!(names, LowLatencyDispatchManyByExpertMxfp8),
            packed: None,
            batch: None,
        },
        Kind::Nodes => Dispatches {
            plain: choice!(names, LowLatencyInternodeDispatchByExpert, |args, messages| across(
                args, messages
            )),
            mxfp8: choice!(names, LowLatencyInternodeDispatchByExpertMxfp8, |args, messages| across(
                args, messages
            )),
            packed: None,
            batch: None,
        },
    }
}

/// The choices of a combine of `num_ranks` ranks with sums of `dtype`.
fn combines(kind: Kind, dtype: DType, num_ranks: u32, names: &mut Vec<&'static str>) -> Combines {
    macro_rules! across {
        ($kernel:ty) => {
            choice!(names, $kernel, |combine, messages| LowLatencyInternodeCombineArgs { combine, messages })
        };
    }
    match kind {
        Kind::Few => Combines {
            plain: match dtype {
                DType::F16 => choice!(names, LowLatencyCombineF16),
                DType::F32 => choice!(names, LowLatencyCombineF32),
                _ => choice!(names, LowLatencyCombineBf16),
            },
            quantised: choice!(names, LowLatencyCombineFp8),
            summed: (dtype == DType::Bf16).then(|| choice!(names, LowLatencyCombineSummed)),
            pooled: Some(match num_ranks {
                ..=2 => choice!(names, LowLatencyCombineTwoPooled),
                _ => choice!(names, LowLatencyCombinePooled),
            }),
        },
        Kind::Many => Combines {
            plain: match dtype {
                DType::F16 => choice!(names, LowLatencyCombineManyF16),
                DType::F32 => choice!(names, LowLatencyCombineManyF32),
                _ => choice!(names, LowLatencyCombineManyBf16),
            },
            quantised: choice!(names, LowLatencyCombineManyFp8),
            summed: (dtype == DType::Bf16).then(|| choice!(names, LowLatencyCombineManySummed)),
            pooled: Some(choice!(names, LowLatencyCombineManyPooled)),
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
        let others = [
            LowLatencyGather::INFO.name,
            LowLatencyGatherColumns::INFO.name,
            FirstTokens::INFO.name,
            PackColumns::INFO.name,
            AddCounts::INFO.name,
        ];
        let mut names = Vec::new();
        let dispatch = dispatches(kind, &mut names);
        let dispatch_by_expert = options.rows_by_expert.map(|_| dispatches_by_expert(kind, &mut names));
        let combine = combines(kind, options.combine_dtype, topology.ranks(), &mut names);
        let wait = match kind {
            Kind::Few => choice!(names, LowLatencyWait),
            Kind::Many => choice!(names, LowLatencyWaitMany),
            Kind::Nodes => choice!(names, LowLatencyInternodeWait),
        };
        let module = Module::shipped(device, None, &[&names[..], &others[..]].concat())?;
        let [gather, gather_columns, first_tokens, pack_columns, add_counts] =
            others.map(|name| module.kernel(name, 0));
        Ok(Kernels {
            loaded: names.iter().map(|name| module.kernel(name, 0)).collect::<Result<_>>()?,
            dispatch,
            dispatch_by_expert,
            combine,
            wait,
            gather: gather?,
            gather_columns: gather_columns?,
            first_tokens: first_tokens?,
            pack_columns: pack_columns?,
            add_counts: add_counts?,
        })
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
        // SAFETY: the caller keeps the memory.
        unsafe {
            match args {
                Arguments::Dispatch(args) => {
                    self.launch_choice(self.dispatch.of(&args, packs_scales), stream, grid, args, messages)
                }
                Arguments::DispatchByExpert(args) => {
                    let Some(kernels) = &self.dispatch_by_expert else {
                        let rule =
                            "the buffer has no kernel for them: create it with Options::rows_by_expert";
                        return Err(Error::argument("by_expert", "asked for", rule));
                    };
                    let choice = kernels.of(&args.dispatch, packs_scales);
                    self.launch_choice(choice, stream, grid, args, messages)
                }
                Arguments::Combine(args) => {
                    self.launch_choice(self.combine.of(&args, grid), stream, grid, args, messages)
                }
                Arguments::PooledCombine(args) => match &self.combine.pooled {
                    Some(pooled) => self.launch_choice(pooled, stream, grid, args, messages),
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
        unsafe { self.launch_choice(&self.wait, stream, args.common.comm.num_ranks, args, None) }
    }

    /// Launches a chosen kernel.
    ///
    /// # Safety
    /// The same as of [`Kernels::launch`].
    unsafe fn launch_choice<A>(
        &self,
        choice: &Choice<A>,
        stream: &Stream,
        grid: u32,
        args: A,
        messages: Option<LowLatencyMessages>,
    ) -> Result<()> {
        let messages = messages.unwrap_or_else(LowLatencyMessages::zeroed);
        // SAFETY: the caller keeps the memory.
        unsafe { (choice.launch)(stream, &self.loaded[choice.index], grid, args, messages) }
    }
}
