//! The loaded kernels, and how large their launches are.

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use epoxide_gpu::kernels::{
    self as gpu, AddCounts, AnnounceTokens, COPY_STAGES, CeilingPull, CeilingPush, CombineBf16,
    CombineByExpertBf16, CombineByExpertF16, CombineByExpertF32, CombineF16, CombineF32, CombineManyBf16,
    CombineManyF16, CombineManyF32, CombineStagedBf16, CombineStagedF32, CombineStagedManyBf16,
    CombineStagedManyF32, CopyByExpert, CopyReceivedRows, Dispatch, DispatchByExpert, DispatchClaiming,
    DispatchLayout, DispatchMany, DispatchManyClaiming, EndOperation, EnterOperation, FirstTokens,
    INTERNODE_NOTIFY_SHARED_BYTES, InternodeCombine, InternodeCombineByExpert, InternodeCombineByExpertF16,
    InternodeCombineByExpertF32, InternodeCombineF16, InternodeCombineF32, InternodeCount, InternodeDispatch,
    InternodeDispatchByExpert, InternodeNotify, InternodePlanByExpert, JOINED_BYTES,
    MAX_INTERNODE_SLOT_BYTES, MAX_SLOT_BYTES, MAX_WAITED_SLOT_BYTES, Notify, NotifyMany, NumberSelections,
    PLAN_BY_EXPERT_SHARED_BYTES, PROGRESS_BYTES, PackColumns, PlanByExpert, QuantiseRows, StageByExpert,
    StageCombine, TransposeColumn, WeightGradients, notify_shared_bytes, number_shared_bytes,
};
use epoxide_gpu::layout::{
    AddCountsArgs, CombineArgs, DispatchArgs, EndArgs, EnterArgs, ExpertCombineArgs, ExpertDispatchArgs,
    ExpertPlanArgs, ExpertStageArgs, FEW_RANKS, FirstTokensArgs, InternodeCombineArgs, InternodeCountArgs,
    InternodeDispatchArgs, InternodeExpertCombineArgs, InternodeExpertDispatchArgs, InternodeExpertPlanArgs,
    InternodeNotifyArgs, LayoutArgs, NotifyArgs, NumberArgs, PackArgs, QuantiseArgs, SlotShape, StageArgs,
    StagedCombineArgs, TransposeArgs, WeightGradientsArgs, bulk_scale_bytes, ring_bytes,
    tail_bytes_by_expert,
};

use super::dispatch::PLAN_THREADS;
use super::options::{MOST_DISPATCH_WARPS, Tuning};
use super::{DType, Fields, Topology};
use crate::driver::{Device, Kernel, Module};
use crate::ep::core::{Choice, Chosen, choice};
use crate::error::Result;

/// Most warps of a dispatch, on all multiprocessors together.
const DISPATCH_WARPS: u32 = 150;
/// Most warps that send rows by expert within a node, on all multiprocessors together: rows of up
/// to [`SHORT_ROW`] bytes, and longer ones. A warp has about a token's rows in flight.
const SHORT_ROW_WARPS: u32 = 600;
const LONG_ROW_WARPS: u32 = 390;
/// Bytes of a row up to which a dispatch within a node has more warps.
const SHORT_ROW: u32 = 8192;
/// Most of them in a block: it also has warps that send metadata and warps that copy.
const MOST_WARPS_BY_EXPERT: u32 = 10;
/// Most warps of a combine that gather, on all multiprocessors together.
const COMBINE_WARPS: u32 = 300;
/// Fewest blocks that stage rows unless the caller sets a number, even if no multiprocessor is left
/// for them: they are launched first.
const LEAST_STAGERS: u32 = 16;
/// Fewest units of staging work: one for each rank, channel and part of its rows. Fewer would delay
/// the gathering blocks.
const LEAST_STAGED_UNITS: u32 = 32;
/// About this many bytes a block stages before it publishes them, so that peers can begin with the
/// first ones.
const STAGE_STEP_BYTES: u32 = 65536;

/// The blocks of a combine of a tensor, and what they do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StageShape {
    /// Blocks that copy rows.
    pub stagers: u32,
    /// Blocks that gather.
    pub gatherers: u32,
    /// Gathering blocks of one channel together.
    pub blocks_per_channel: u32,
    /// Rows that a block copies before it publishes them, in the first step of a channel.
    pub step_rows: u32,
    /// Parts in which a channel's rows are copied, each by one block. Ranks may differ in all
    /// fields above, but not in this one: it is computed from common options.
    pub parts: u32,
}

impl StageShape {
    /// At most `num_sms` blocks gather the rows of `channels` channels, and on a device of
    /// `sm_count` multiprocessors the others copy.
    fn new(
        asked: Option<u32>,
        num_ranks: u32,
        channels: u32,
        num_sms: u32,
        sm_count: u32,
        row_bytes: u32,
    ) -> StageShape {
        let blocks_per_channel = (num_sms / channels).max(1);
        let parts = LEAST_STAGED_UNITS.div_ceil(num_ranks * channels);
        let stagers = asked.unwrap_or(sm_count.saturating_sub(num_sms).max(LEAST_STAGERS));
        StageShape {
            stagers: stagers.min(num_ranks * channels * parts),
            gatherers: (channels * blocks_per_channel).min(num_sms),
            blocks_per_channel,
            step_rows: (STAGE_STEP_BYTES / row_bytes).max(1),
            parts,
        }
    }
}

/// Warps per block, buffers per warp, bytes per buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingShape {
    pub warps: u32,
    pub count: u32,
    pub bytes: u32,
}

impl RingShape {
    /// Fits rings of buffers of `bytes` into `shared_bytes`: up to `count` for each of up to
    /// `warps` warps. Warps are reduced before buffers below three, because three keep loads and
    /// stores in flight together.
    fn fit(bytes: u32, warps: u32, count: u32, shared_bytes: u32) -> RingShape {
        let per_warp = |warps: u32| shared_bytes / ring_bytes(warps, 1, bytes);
        let mut warps = warps;
        while warps > 1 && per_warp(warps) < 3.min(count) {
            warps -= 1;
        }
        RingShape { warps, count: per_warp(warps).clamp(2, count), bytes }
    }

    pub fn shared_bytes(&self) -> u32 {
        ring_bytes(self.warps, self.count, self.bytes)
    }

    pub fn threads(&self) -> u32 {
        self.warps * 32
    }
}

/// One node or several: the kernels of that case, and their owner's data for it. A handle has the
/// places of its matrices. A handle is launched with the kernels stored beside its matrices, so no
/// launch mixes the kernels of one case with the matrices of the other.
#[derive(Debug, Clone)]
pub enum Spread<O, S> {
    /// All ranks map each other's pools.
    OneNode(Arc<OneNode>, O),
    /// Ranks of a node map each other's pools; nodes exchange data over rails.
    SeveralNodes(Arc<SeveralNodes>, S),
}

/// The kernels of a sum, by the type of the rows.
#[derive(Debug)]
pub struct ByType<A> {
    bf16: Choice<A>,
    f16: Choice<A>,
    f32: Choice<A>,
}

impl<A> ByType<A> {
    pub fn of(&self, dtype: DType) -> &Choice<A> {
        match dtype {
            DType::F16 => &self.f16,
            DType::F32 => &self.f32,
            _ => &self.bf16,
        }
    }
}

/// The kernels of operations within one node: those for few ranks, or those for many.
#[derive(Debug)]
pub struct OneNode {
    /// Whether there are more ranks than [`FEW_RANKS`].
    pub is_many: bool,
    pub notify: Choice<NotifyArgs>,
    pub dispatch: Choice<DispatchArgs>,
    pub claiming: Choice<DispatchArgs>,
    pub combine: ByType<CombineArgs>,
    pub combine_staged: Choice<StagedCombineArgs>,
    pub combine_staged_f32: Choice<StagedCombineArgs>,
    pub by_expert: OneNodeByExpert,
}

/// The kernels of rows by expert within one node, of few ranks as of many. A buffer loads them
/// where it has room for such rows.
#[derive(Debug)]
pub struct OneNodeByExpert {
    pub plan: Choice<ExpertPlanArgs>,
    pub dispatch: Choice<ExpertDispatchArgs>,
    /// Between the halves of a dispatch: stores the word that peers wait for which copy while they
    /// move rows.
    pub announce: Choice<ExpertDispatchArgs>,
    /// The copies of a dispatch in two halves.
    pub copy: Choice<ExpertDispatchArgs>,
    pub combine: ByType<ExpertCombineArgs>,
}

/// The kernels of operations across nodes.
#[derive(Debug)]
pub struct SeveralNodes {
    /// Whether a rank has others on its node.
    pub has_neighbours: bool,
    pub count: Choice<InternodeCountArgs>,
    pub notify: Choice<InternodeNotifyArgs>,
    pub dispatch: Choice<InternodeDispatchArgs>,
    pub combine: ByType<InternodeCombineArgs>,
    pub by_expert: SeveralNodesByExpert,
}

/// The kernels of rows by expert across nodes, which are loaded as those within one node.
#[derive(Debug)]
pub struct SeveralNodesByExpert {
    pub plan: Choice<InternodeExpertPlanArgs>,
    pub dispatch: Choice<InternodeExpertDispatchArgs>,
    pub combine: ByType<InternodeExpertCombineArgs>,
}

impl OneNode {
    /// The kernels of a topology. Kernels of rows by expert are added to `by_expert`. `limit`: the
    /// most shared memory of a block.
    fn choose(chosen: &mut Chosen, by_expert: &mut Chosen, topology: Topology, limit: u32) -> OneNode {
        let is_many = topology.ranks_per_node > FEW_RANKS as u32;
        macro_rules! choose {
            ($few:ident | $many:ident, $shared_bytes:expr) => {
                if is_many {
                    choice!(chosen, $many, $shared_bytes)
                } else {
                    choice!(chosen, $few, $shared_bytes)
                }
            };
        }
        OneNode {
            is_many,
            notify: choose!(Notify | NotifyMany, notify_shared_bytes(is_many)),
            dispatch: choose!(Dispatch | DispatchMany, limit),
            claiming: choose!(DispatchClaiming | DispatchManyClaiming, limit),
            combine: ByType {
                bf16: choose!(CombineBf16 | CombineManyBf16, limit),
                f16: choose!(CombineF16 | CombineManyF16, limit),
                f32: choose!(CombineF32 | CombineManyF32, limit),
            },
            combine_staged: choose!(CombineStagedBf16 | CombineStagedManyBf16, limit),
            combine_staged_f32: choose!(CombineStagedF32 | CombineStagedManyF32, limit),
            by_expert: OneNodeByExpert {
                plan: choice!(by_expert, PlanByExpert, PLAN_BY_EXPERT_SHARED_BYTES),
                dispatch: choice!(by_expert, DispatchByExpert, limit),
                announce: choice!(by_expert, AnnounceTokens, 0),
                copy: choice!(by_expert, CopyReceivedRows, limit),
                combine: ByType {
                    bf16: choice!(by_expert, CombineByExpertBf16, limit),
                    f16: choice!(by_expert, CombineByExpertF16, limit),
                    f32: choice!(by_expert, CombineByExpertF32, limit),
                },
            },
        }
    }
}

impl SeveralNodes {
    /// The kernels of a topology. Kernels of rows by expert are added to `by_expert`. `limit`: the
    /// most shared memory of a block.
    fn choose(chosen: &mut Chosen, by_expert: &mut Chosen, topology: Topology, limit: u32) -> SeveralNodes {
        SeveralNodes {
            has_neighbours: topology.ranks_per_node > 1,
            count: choice!(chosen, InternodeCount, 0),
            notify: choice!(chosen, InternodeNotify, INTERNODE_NOTIFY_SHARED_BYTES),
            dispatch: choice!(chosen, InternodeDispatch, limit),
            combine: ByType {
                bf16: choice!(chosen, InternodeCombine, limit),
                f16: choice!(chosen, InternodeCombineF16, limit),
                f32: choice!(chosen, InternodeCombineF32, limit),
            },
            by_expert: SeveralNodesByExpert {
                plan: choice!(by_expert, InternodePlanByExpert, PLAN_BY_EXPERT_SHARED_BYTES),
                dispatch: choice!(by_expert, InternodeDispatchByExpert, limit),
                combine: ByType {
                    bf16: choice!(by_expert, InternodeCombineByExpert, limit),
                    f16: choice!(by_expert, InternodeCombineByExpertF16, limit),
                    f32: choice!(by_expert, InternodeCombineByExpertF32, limit),
                },
            },
        }
    }
}

/// The kernels of one device. Kernels of operations are loaded at once, as one module. Loading
/// waits for running kernels and blocks other calls of the driver, so that a load between
/// operations could deadlock. Kernels of benchmarks are loaded at first use, since a driver takes
/// tens of milliseconds to compile each.
#[derive(Debug)]
pub struct Kernels {
    pub mode: Spread<(), ()>,
    pub dispatch_layout: Choice<LayoutArgs>,
    pub stage_combine: Choice<StageArgs>,
    pub first_tokens: Choice<FirstTokensArgs>,
    pub pack_columns: Choice<PackArgs>,
    pub quantise_rows: Choice<QuantiseArgs>,
    pub transpose_column: Choice<TransposeArgs>,
    pub add_counts: Choice<AddCountsArgs>,
    pub weight_gradients: Choice<WeightGradientsArgs>,
    pub enter_operation: Choice<EnterArgs>,
    pub end_operation: Choice<EndArgs>,
    /// Loaded where the buffer has room for rows by expert, as the next one.
    pub number_selections: Choice<NumberArgs>,
    pub stage_by_expert: Choice<ExpertStageArgs>,
    ceiling_push: OnceLock<Kernel>,
    ceiling_pull: OnceLock<Kernel>,
    copy_by_expert: OnceLock<Kernel>,
    device: Device,
    tuning: Tuning,
    ptx: Option<PathBuf>,
}

impl Kernels {
    /// Loads the kernels of a buffer, from the embedded PTX or a file's.
    ///
    /// # Errors
    /// Errors of the driver.
    pub fn load(device: &Device, topology: Topology, options: &Fields) -> Result<Kernels> {
        let limit = device.info().max_shared_bytes_per_block;
        // For any number of experts.
        let number_bytes = number_shared_bytes(PLAN_THREADS, u32::MAX);
        let (chosen, by_expert) = (&mut Chosen::default(), &mut Chosen::default());
        let kernels = Kernels {
            mode: if topology.nodes > 1 {
                let nodes = SeveralNodes::choose(chosen, by_expert, topology, limit);
                Spread::SeveralNodes(Arc::new(nodes), ())
            } else {
                Spread::OneNode(Arc::new(OneNode::choose(chosen, by_expert, topology, limit)), ())
            },
            dispatch_layout: choice!(chosen, DispatchLayout, limit),
            stage_combine: choice!(chosen, StageCombine, 0),
            first_tokens: choice!(chosen, FirstTokens, 0),
            pack_columns: choice!(chosen, PackColumns, 0),
            quantise_rows: choice!(chosen, QuantiseRows, 0),
            transpose_column: choice!(chosen, TransposeColumn, 0),
            add_counts: choice!(chosen, AddCounts, 0),
            weight_gradients: choice!(chosen, WeightGradients, 0),
            enter_operation: choice!(chosen, EnterOperation, 0),
            end_operation: choice!(chosen, EndOperation, 0),
            number_selections: choice!(by_expert, NumberSelections, number_bytes),
            stage_by_expert: choice!(by_expert, StageByExpert, 0),
            ceiling_push: OnceLock::new(),
            ceiling_pull: OnceLock::new(),
            copy_by_expert: OnceLock::new(),
            device: device.clone(),
            tuning: options.tuning,
            ptx: options.ptx.clone(),
        };
        if options.rows_by_expert.is_some() {
            chosen.extend(by_expert);
        }
        chosen.load(device, options.ptx.as_deref())?;
        Ok(kernels)
    }

    pub fn ceiling_push(&self) -> Result<&Kernel> {
        self.on_demand(&self.ceiling_push, <CeilingPush as gpu::Entry>::INFO)
    }

    pub fn ceiling_pull(&self) -> Result<&Kernel> {
        self.on_demand(&self.ceiling_pull, <CeilingPull as gpu::Entry>::INFO)
    }

    pub fn copy_by_expert(&self) -> Result<&Kernel> {
        self.on_demand(&self.copy_by_expert, <CopyByExpert as gpu::Entry>::INFO)
    }

    fn on_demand<'a>(&self, kernel: &'a OnceLock<Kernel>, info: gpu::KernelInfo) -> Result<&'a Kernel> {
        if let Some(loaded) = kernel.get() {
            return Ok(loaded);
        }
        let module = Module::shipped(&self.device, self.ptx.as_deref(), &[info.name])?;
        let loaded = module.kernel(info.name, self.shared_limit())?;
        Ok(kernel.get_or_init(|| loaded))
    }

    fn shared_limit(&self) -> u32 {
        self.device.info().max_shared_bytes_per_block
    }

    /// Warps of a dispatch's block that do not move rows: one that polls, and those that send
    /// metadata, if any.
    pub fn metadata_warps(&self, with_metadata: bool) -> u32 {
        match self.mode {
            Spread::OneNode(..) if with_metadata => self.tuning.dispatch_metadata_warps,
            Spread::OneNode(..) => 1,
            Spread::SeveralNodes(..) => 0,
        }
    }

    /// The ring of a dispatch, and the bytes of a row that are sent together. A stage holds those
    /// and the scales; across nodes it also holds a slot's metadata.
    pub fn dispatch_ring(
        &self,
        row_bytes: u32,
        num_scales: u32,
        num_topk: u32,
        num_sms: u32,
        is_by_expert: bool,
    ) -> (RingShape, u32) {
        let t = &self.tuning;
        let (warps, most) = match self.mode {
            // These warps wait for their stores, of which at least half are local.
            Spread::OneNode(..) if is_by_expert => {
                let most = if row_bytes <= SHORT_ROW { SHORT_ROW_WARPS } else { LONG_ROW_WARPS };
                ((t.dispatch_warps + 3).min(MOST_WARPS_BY_EXPERT), most)
            }
            Spread::OneNode(..) => {
                // Three warps of short rows do not fill the links where the multiprocessors could.
                let more = row_bytes <= SHORT_ROW && num_sms >= t.dispatch_claiming_blocks;
                ((t.dispatch_warps + u32::from(more)).min(MOST_DISPATCH_WARPS), DISPATCH_WARPS)
            }
            Spread::SeveralNodes(..) if is_by_expert => (t.internode_dispatch_warps, 2 * DISPATCH_WARPS),
            Spread::SeveralNodes(..) => (t.internode_dispatch_warps, DISPATCH_WARPS),
        };
        let warps = warps.min(most / num_sms).max(1);
        // Warps that copy have stages too.
        let most_bytes = if is_by_expert { self.ring_limit() / 8 } else { u32::MAX };
        let pieces = row_bytes.div_ceil(t.dispatch_stage_bytes.min(most_bytes));
        let piece_bytes = row_bytes.div_ceil(pieces).next_multiple_of(16);
        let metadata = match self.mode {
            Spread::OneNode(..) => 0,
            Spread::SeveralNodes(..) if is_by_expert => tail_bytes_by_expert(num_topk),
            Spread::SeveralNodes(..) => SlotShape::metadata_bytes(num_topk),
        };
        let stage_bytes = (piece_bytes + bulk_scale_bytes(num_scales) + metadata).next_multiple_of(128);
        // With room for their alignment.
        let copies = if is_by_expert {
            ring_bytes(self.copy_warps(stage_bytes), COPY_STAGES, stage_bytes) + 128
        } else {
            0
        };
        let limit = self.ring_limit().saturating_sub(copies);
        (RingShape::fit(stage_bytes, warps, t.dispatch_stages, limit), piece_bytes)
    }

    /// Warps of a block that copy received rows, in a dispatch of rows by expert with stages of so
    /// many bytes: their rings take up to half of the shared memory. Across nodes a rank alone on
    /// its node has none, since it writes all of its rows itself.
    pub fn copy_warps(&self, stage_bytes: u32) -> u32 {
        let most = match &self.mode {
            Spread::OneNode(..) => u32::MAX,
            Spread::SeveralNodes(nodes, _) if !nodes.has_neighbours => return 0,
            // In addition to the warps that move rows and the one that delivers.
            Spread::SeveralNodes(..) => {
                InternodeDispatchByExpert::INFO.max_threads / 32 - self.tuning.internode_dispatch_warps - 1
            }
        };
        let most = most.min(self.ring_limit() / 2 / ring_bytes(1, COPY_STAGES, stage_bytes));
        self.tuning.dispatch_copy_warps.min(most).max(1)
    }

    /// The ring of a combine. `is_staged`: of rows that are copied into the pools meanwhile, within
    /// one node.
    pub fn combine_ring(&self, row_bytes: u32, num_sms: u32, is_staged: bool) -> RingShape {
        let t = &self.tuning;
        // Across nodes half of the blocks gather and half finish.
        let (at_once, most_bytes) = match self.mode {
            Spread::OneNode(..) if is_staged => (COMBINE_WARPS, MAX_WAITED_SLOT_BYTES),
            Spread::OneNode(..) => (COMBINE_WARPS, MAX_SLOT_BYTES),
            Spread::SeveralNodes(..) => (2 * COMBINE_WARPS, MAX_INTERNODE_SLOT_BYTES),
        };
        let warps = t.combine_warps.min(at_once / num_sms).clamp(1, self.most_combine_warps(is_staged));
        // A warp's lanes take 512 bytes at a time; whole turns keep all lanes busy.
        let align = if row_bytes < 512 { 16 } else { 512 };
        let pieces = row_bytes.div_ceil(t.combine_slot_bytes.min(most_bytes) / align * align);
        let bytes = row_bytes.div_ceil(pieces).next_multiple_of(align);
        RingShape::fit(bytes, warps, t.combine_slots, self.ring_limit())
    }

    /// How a combine of a tensor stages its rows, with at most `most` blocks that copy.
    pub fn stage_shape(
        &self,
        most: Option<u32>,
        num_ranks: u32,
        channels: u32,
        num_sms: u32,
        row_bytes: u32,
    ) -> StageShape {
        let (sm_count, tuned) = (self.device.info().sm_count, self.tuning.combine_stagers);
        let asked = most.map(|most| tuned.map_or(most, |tuned| tuned.min(most))).or(tuned);
        StageShape::new(asked, num_ranks, channels, num_sms, sm_count, row_bytes)
    }

    /// Shared memory for rings. A block also stores whether it has joined, and across nodes a word
    /// for each of its warps.
    fn ring_limit(&self) -> u32 {
        match self.mode {
            Spread::OneNode(..) => self.shared_limit() - JOINED_BYTES,
            Spread::SeveralNodes(..) => self.shared_limit() - PROGRESS_BYTES,
        }
    }

    /// A kernel that waits for rows keeps more in registers, and so does that across nodes, which
    /// is launched with a warp more.
    fn most_combine_warps(&self, is_staged: bool) -> u32 {
        match self.mode {
            Spread::OneNode(..) if is_staged => <CombineStagedBf16 as gpu::Entry>::INFO.max_threads / 32,
            Spread::OneNode(..) => 16,
            Spread::SeveralNodes(..) => <InternodeCombine as gpu::Entry>::INFO.max_threads / 32 - 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use epoxide_gpu::layout::{MAX_CHANNELS, MAX_RANKS};

    use super::*;

    const SHARED: u32 = 227 * 1024;

    #[test]
    fn rings_fit_in_shared_memory() {
        for bytes in (16..65536).step_by(112) {
            let ring = RingShape::fit(bytes, 8, 8, SHARED);
            assert!(
                ring.shared_bytes() <= SHARED && ring.count >= 2 && ring.bytes == bytes,
                "{bytes}: {ring:?}"
            );
        }
    }

    #[test]
    fn as_many_blocks_stage_as_have_work_and_are_left() {
        let shape = |asked, ranks, channels, sms| StageShape::new(asked, ranks, channels, sms, 132, 14336);
        let usual = StageShape { stagers: 48, gatherers: 24, blocks_per_channel: 2, step_rows: 4, parts: 1 };
        assert_eq!(shape(None, 4, 12, 24), usual);
        assert_eq!(shape(None, 8, 12, 24).stagers, 96);
        assert_eq!(shape(None, 8, 66, 132), StageShape { stagers: 16, gatherers: 132, ..usual });
        // Few channels are copied in parts.
        assert_eq!(shape(None, 4, 2, 4), StageShape { stagers: 32, gatherers: 4, parts: 4, ..usual });
        assert_eq!(shape(None, 8, 3, 6), StageShape { stagers: 48, gatherers: 6, parts: 2, ..usual });
        assert_eq!(shape(None, 1, 1, 2), StageShape { stagers: 32, gatherers: 2, parts: 32, ..usual });
        assert_eq!(shape(Some(1024), 2, 12, 24).stagers, 48);
        assert_eq!(shape(Some(1024), 4, 12, 24).stagers, 48);
        assert_eq!(shape(Some(20), 8, 12, 24).stagers, 20);
        // The handle was made with another number of multiprocessors.
        assert_eq!(
            shape(Some(4), 2, 12, 8),
            StageShape { stagers: 4, gatherers: 8, blocks_per_channel: 1, step_rows: 4, parts: 2 }
        );
        assert_eq!(shape(Some(4), 2, 12, 30).gatherers, 24);
        assert_eq!(StageShape::new(None, 2, 2, 4, 132, 1 << 20).step_rows, 1);
        // Each part of each channel has a word.
        for (ranks, channels) in (1..=MAX_RANKS as u32).flat_map(|r| (1..=MAX_CHANNELS).map(move |c| (r, c)))
        {
            let parts = shape(None, ranks, channels, 2).parts;
            assert!(parts >= 1 && parts * channels <= MAX_CHANNELS, "{ranks} ranks, {channels} channels");
        }
    }

    #[test]
    fn the_benchmark_rows_get_the_measured_shapes() {
        assert_eq!(RingShape::fit(14336, 4, 8, SHARED), RingShape { warps: 4, count: 4, bytes: 14336 });
        assert_eq!(RingShape::fit(3584, 12, 16, SHARED), RingShape { warps: 12, count: 5, bytes: 3584 });
    }
}
