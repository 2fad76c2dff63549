//! The ids of the first tokens, for batches whose size only the device knows.
//!
//! Soundness: the kernel reads ids that are not written meanwhile, and each output entry has one
//! thread.

use super::ids::Id;
use crate::layout::FirstTokensArgs;
use crate::simt::*;

/// Copies the ids of the first tokens, and writes -1 behind them: those tokens go nowhere.
#[kernel(threads = 256, registers = 32, dependent)]
pub unsafe fn first_tokens(args: FirstTokensArgs) {
    let tokens = args.num_tokens.ld(0).max(0) as u32;
    // More tokens than the tensor has are those that it has.
    let end = tokens.min(args.max_tokens) * args.num_topk;
    grid_stride!(entry in 0..args.max_tokens * args.num_topk => {
        let mut id = Id::NONE;
        if entry < end {
            id = Id::load(args.topk_idx, args.narrow_ids, entry as u64);
        }
        if args.narrow_ids == 0 {
            st_u64(args.out.array::<u64>().at(entry), id.value(0) as u64);
        } else {
            st_u32(args.out.array::<u32>().at(entry), id.value(1) as u32);
        }
    });
}
