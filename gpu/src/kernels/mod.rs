//! The kernels, a file or a folder per family.
//!
//! Every operation between ranks has the same three steps, carried by two words per peer
//! (`layout::Control`): *ready* (I have entered operation `epoch`), *move*, *done* (I have done my
//! part towards you). `epoch` module holds them; docs/protocol.md explains why no two operations
//! can meet in a region.

// `unroll!(8, ..)` covers every rank of few.
const _: () = assert!(crate::layout::FEW_RANKS == 8);

/// Kernels of one contract, each with its documentation, its name and its body.
macro_rules! kernels {
    (
        kernel $contract:tt;
        fn($args:ident: $Args:ident);
        $($(#[$doc:meta])* $name:ident { $($body:tt)* })*
    ) => {$(
        $(#[$doc])*
        #[kernel $contract]
        pub unsafe fn $name($args: $Args) {
            $($body)*;
        }
    )*};
}

/// Pairs of kernels of one contract, and then what is that of few ranks or of many: one for up to
/// [`FEW_RANKS`](crate::layout::FEW_RANKS) ranks, and one for more. In the body, `R` is what the
/// kernel knows of its ranks.
macro_rules! few_and_many {
    (
        kernel $contract:tt;
        few $of_few:tt many $of_many:tt;
        requires $clauses:tt;
        ranks $comm:tt;
        fn $args:tt;
        $($(#[$doc:meta])* $few:ident, $many:ident<$R:ident> $body:tt)*
    ) => {$(
        few_and_many! {
            @one $contract $of_few $clauses ($comm <= FEW_RANKS) $args
            $(#[$doc])* $few<$R = Few> $body
        }
        few_and_many! {
            @one $contract $of_many $clauses ($comm > FEW_RANKS) $args
            #[doc = concat!("The same as `", stringify!($few), "` between up to 64 ranks.")]
            $many<$R = Many> $body
        }
    )*};
    (
        @one ($($contract:tt)*) ($($own:tt)*) ($($clause:tt)*) (($($comm:tt)*) $than:tt FEW_RANKS)
        ($args:ident: $Args:ident)
        $(#[$doc:meta])* $name:ident<$R:ident = $Ranks:ident> { $($body:tt)* }
    ) => {
        $(#[$doc])*
        #[kernel(
            $($contract)*, $($own)*, requires($($clause)*, $($comm)*.num_ranks $than FEW_RANKS as u32)
        )]
        pub unsafe fn $name($args: $Args) {
            type $R = $Ranks;
            $($body)*;
        }
    };
}

mod add_counts;
mod arrivals;
mod by_expert;
mod ceiling;
mod columns;
mod combine;
mod copy_by_expert;
mod dispatch;
mod epoch;
mod example;
mod first_tokens;
mod fp8;
mod halves;
mod ids;
mod internode_by_expert;
mod internode_combine;
mod internode_count;
mod internode_dispatch;
mod internode_notify;
mod layout;
mod list;
mod low_latency;
mod notify;
mod peer_wait;
mod progress;
mod quantise;
mod rail;
mod ring;
mod segments;
mod verdict;

#[cfg(not(target_arch = "nvptx64"))]
pub use epoxide_simt::launch::{Call, ContractError, Entry, KernelInfo, ParamLayout, Shape};

// A kernel's type has its name in camel case.
#[cfg(not(target_arch = "nvptx64"))]
pub use example::{MoeGemm, MoeGemmWeights, MoeSwiglu, MoeSwigluBackward, MoeTopk, MoeTopkBackward};

/// The library's own kernels, which its host launches, and what it needs to know of them.
mod own {
    pub use super::by_expert::{PLAN_BY_EXPERT_SHARED_BYTES, number_shared_bytes};
    pub use super::dispatch::{COPY_STAGES, copy_rings_behind};
    pub use super::epoch::JOINED_BYTES;
    pub use super::internode_combine::MAX_INTERNODE_SLOT_BYTES;
    pub use super::internode_notify::INTERNODE_NOTIFY_SHARED_BYTES;
    pub use super::low_latency::{
        LOW_LATENCY_INTERNODE_SHARED_BYTES, LOW_LATENCY_MANY_SHARED_BYTES, LOW_LATENCY_SHARED_BYTES,
        low_latency_by_expert_shared_bytes, low_latency_dispatch_batch_shared_bytes,
        low_latency_dispatch_shared_bytes, low_latency_internode_by_expert_shared_bytes,
    };
    pub use super::notify::notify_shared_bytes;
    pub use super::progress::PROGRESS_BYTES;
    pub use crate::layout::{MAX_SLOT_BYTES, MAX_WAITED_SLOT_BYTES};

    #[cfg(not(target_arch = "nvptx64"))]
    pub use super::{
        add_counts::AddCounts,
        by_expert::{NumberSelections, PlanByExpert},
        ceiling::{CeilingPull, CeilingPush},
        columns::{PackColumns, TransposeColumn},
        combine::{
            CombineBf16, CombineByExpertBf16, CombineByExpertF16, CombineByExpertF32, CombineF16, CombineF32,
            CombineManyBf16, CombineManyF16, CombineManyF32, CombineStagedBf16, CombineStagedF32,
            CombineStagedManyBf16, CombineStagedManyF32, StageByExpert, StageCombine, WeightGradients,
        },
        copy_by_expert::CopyByExpert,
        dispatch::{
            AnnounceTokens, CopyReceivedRows, Dispatch, DispatchByExpert, DispatchClaiming, DispatchMany,
            DispatchManyClaiming,
        },
        first_tokens::FirstTokens,
        halves::{EndOperation, EnterOperation},
        internode_by_expert::InternodePlanByExpert,
        internode_combine::{
            InternodeCombine, InternodeCombineByExpert, InternodeCombineByExpertF16,
            InternodeCombineByExpertF32, InternodeCombineF16, InternodeCombineF32,
        },
        internode_count::InternodeCount,
        internode_dispatch::{InternodeDispatch, InternodeDispatchByExpert},
        internode_notify::InternodeNotify,
        layout::DispatchLayout,
        low_latency::{
            LowLatencyCombineBf16, LowLatencyCombineF16, LowLatencyCombineF32, LowLatencyCombineFp8,
            LowLatencyCombineManyBf16, LowLatencyCombineManyF16, LowLatencyCombineManyF32,
            LowLatencyCombineManyFp8, LowLatencyCombineManyPooled, LowLatencyCombineManySummed,
            LowLatencyCombinePooled, LowLatencyCombineSummed, LowLatencyCombineTwoPooled, LowLatencyDispatch,
            LowLatencyDispatchBatch, LowLatencyDispatchByExpert, LowLatencyDispatchByExpertMxfp8,
            LowLatencyDispatchByExpertScalePackets, LowLatencyDispatchMany, LowLatencyDispatchManyBatch,
            LowLatencyDispatchManyByExpert, LowLatencyDispatchManyByExpertMxfp8, LowLatencyDispatchManyMxfp8,
            LowLatencyDispatchMxfp8, LowLatencyDispatchScalePackets, LowLatencyGather,
            LowLatencyGatherColumns, LowLatencyInternodeCombineBf16, LowLatencyInternodeCombineF16,
            LowLatencyInternodeCombineF32, LowLatencyInternodeCombineFp8, LowLatencyInternodeDispatch,
            LowLatencyInternodeDispatchByExpert, LowLatencyInternodeDispatchByExpertMxfp8,
            LowLatencyInternodeDispatchMxfp8, LowLatencyInternodeWait, LowLatencyWait, LowLatencyWaitMany,
        },
        notify::{Notify, NotifyMany},
        quantise::QuantiseRows,
    };
}
#[doc(hidden)]
pub use own::*;

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::path::Path;

    use bytemuck::Zeroable;

    use crate::kernels::{InternodeCount, StageCombine};
    use crate::layout::{
        DispatchArgs, InternodeCountArgs, LowLatencyCombineArgs, LowLatencyInternodeExpertDispatchArgs,
        NotifyArgs, StageArgs, StagedCombineArgs, phase, ring_bytes,
    };

    #[test]
    fn a_clause_that_does_not_hold_shows_its_values() {
        let args = StageArgs { row_bytes: 24, ..StageArgs::zeroed() };
        let error = StageCombine::call(args).err().unwrap();
        let text = "kernel stage_combine requires args.row_bytes.is_multiple_of(16): args.row_bytes = 24";
        assert_eq!((error.to_string(), format!("{error:?}")), (text.to_owned(), text.to_owned()));
        let args =
            InternodeCountArgs { num_channels: 1, num_ranks: 3, ranks_per_node: 2, ..Zeroable::zeroed() };
        let error = InternodeCount::call(args).err().unwrap();
        assert_eq!(error.values, "args.num_ranks = 3, args.ranks_per_node = 2");
        let error = InternodeCount::call(InternodeCountArgs { num_channels: 0, ..args }).err().unwrap();
        assert_eq!(error.values, "0 against 1");
    }

    /// The sources below a folder.
    fn sources(folder: &Path, found: &mut Vec<(String, String)>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                sources(&path, found);
            } else {
                found.push((path.display().to_string(), std::fs::read_to_string(&path).unwrap()));
            }
        }
    }

    #[test]
    fn a_launch_has_the_warps_and_the_memory_that_a_kernel_divides() {
        let mut args = LowLatencyCombineArgs::zeroed();
        let common = &mut args.common;
        (common.comm.num_ranks, common.num_topk, common.local_experts) = (1, 1, 1);
        (common.chunk_tokens, common.max_tokens, common.num_tokens) = (1, 1, 1);
        common.phases = phase::SEND | phase::RECEIVE;
        let common = *common;
        let combine = super::LowLatencyCombineSummed::call(args).unwrap();
        let clause_of = |threads, bytes| combine.shape_of(1, threads, bytes).unwrap_err().clause;
        let bytes = super::LOW_LATENCY_SHARED_BYTES;
        assert!(combine.shape_of(1, 512, bytes).is_ok());
        assert_eq!(clause_of(256, bytes), "block = ..");
        assert_eq!(clause_of(512, bytes - 1), "shared = ..");

        let mut args = LowLatencyInternodeExpertDispatchArgs::zeroed();
        args.dispatch.dispatch.common = common;
        args.to.alignment = 1;
        let dispatch = super::LowLatencyInternodeDispatchByExpert::call(args).unwrap();
        let bytes = super::low_latency_internode_by_expert_shared_bytes(&args);
        assert!(dispatch.shape_of(1, 512, bytes).is_ok());
        // Warps of one part of a block wait for each other by their number.
        assert_eq!(dispatch.shape_of(1, 128, bytes).unwrap_err().clause, "block = ..");
    }

    #[test]
    fn the_count_exchange_has_one_shape() {
        let mut args = NotifyArgs::zeroed();
        (args.comm.num_ranks, args.num_experts, args.num_channels, args.expert_alignment) = (2, 4, 3, 1);
        let call = super::Notify::call(args).unwrap();
        let shape = call.shape().unwrap();
        assert_eq!((shape.grid, shape.block), (3, 512));
        assert_eq!(shape.shared_bytes, super::notify_shared_bytes(false));
        // The kernel's threads stride by a constant: fewer would leave out tokens.
        assert_eq!(call.shape_of(3, 256, shape.shared_bytes).unwrap_err().clause, "block = ..");
        assert_eq!(call.shape_of(2, 512, shape.shared_bytes).unwrap_err().clause, "grid = ..");
    }

    #[test]
    fn a_launch_has_room_for_the_rings_of_its_warps() {
        let mut args = DispatchArgs::zeroed();
        (args.row_bytes, args.piece_bytes, args.stage_bytes, args.stages) = (256, 256, 256, 3);
        (args.local_experts, args.metadata_warps, args.fixed_tokens) = (1, 2, 3);
        let call = super::Dispatch::call(args).unwrap();
        // A ring is full before a warp has its first claim.
        let too_few = DispatchArgs { fixed_tokens: 2, ..args };
        assert!(super::Dispatch::call(too_few).is_err());
        let bytes = |warps| ring_bytes(warps, 3, 256) + super::JOINED_BYTES;
        assert!(call.shape_of(5, 128, bytes(2)).is_ok());
        assert_eq!(call.shape_of(5, 128, bytes(2) - 1).unwrap_err().clause, "shared = ..");
        assert_eq!(call.shape_of(5, 160, bytes(2)).unwrap_err().clause, "shared = ..");
        assert_eq!(call.shape_of(5, 64, bytes(2)).unwrap_err().clause, "block >= ..");
        // Rings that no launch has room for are none that fit because a product overflows.
        let huge = DispatchArgs { stage_bytes: u32::MAX - 127, ..args };
        let call = super::Dispatch::call(huge).unwrap();
        assert_eq!(call.shape_of(5, 128, u32::MAX - 1).unwrap_err().clause, "shared = ..");
    }

    #[test]
    fn a_staged_combine_has_blocks_that_gather() {
        let mut args = StagedCombineArgs::zeroed();
        let rows = &mut args.combine;
        (rows.row_bytes, rows.slots, rows.slot_bytes, rows.pieces) = (16, 2, 16, 1);
        rows.comm.num_ranks = 2;
        (args.stagers, args.channels, args.parts, args.blocks_per_channel) = (4, 2, 1, 2);
        (args.step_rows, args.gather_warps) = (1, 3);
        let call = super::CombineStagedBf16::call(args).unwrap();
        let bytes = ring_bytes(3, 2, 16) + super::JOINED_BYTES;
        assert!(call.shape_of(6, 96, bytes).is_ok());
        assert_eq!(call.shape_of(5, 96, bytes).unwrap_err().clause, "grid >= ..");
        assert_eq!(call.shape_of(6, 64, bytes).unwrap_err().clause, "block >= ..");
    }

    #[test]
    fn the_head_of_every_kernel_file_argues_its_soundness() {
        let mut files = Vec::new();
        sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/kernels"), &mut files);
        let begins = ["#[kernel(", "kernels! {", "few_and_many! {"];
        files.retain(|(_, text)| text.lines().any(|line| begins.iter().any(|begin| line.starts_with(begin))));
        let words: HashSet<_> = files
            .iter()
            .flat_map(|(_, text)| text.split(|c: char| !c.is_alphanumeric() && c != '_'))
            .collect();
        for name in crate::shipped().names() {
            assert!(words.contains(name), "{name} is in none of the files");
        }
        for (path, text) in files {
            let mut head = text.lines().take_while(|line| line.starts_with("//!"));
            let says = head.any(|line| line.starts_with("//! Soundness: "));
            assert!(says, "{path}");
        }
    }
}
