//! The first step of the count exchange across nodes: this rank numbers its tokens.
//!
//! Soundness: the kernel reads the output of an earlier kernel, which is not written meanwhile.
//! Each entry that it writes has one warp. A warp's ballots stand where all its lanes arrive:
//! columns and groups of tokens are the same in all lanes.

use super::ring::channel_range;
use crate::layout::InternodeCountArgs;
use crate::simt::*;

/// Numbers the tokens of each channel, for each rank and each node, in token order. One block per
/// channel.
#[kernel(threads = 512, registers = 64, grid = args.num_channels, block >= 32)]
pub unsafe fn internode_count(args: InternodeCountArgs) {
    let (lane, warp, warps) = (laneid(), tid() / 32, ntid() / 32);
    let (ranks, nodes) = (args.num_ranks, args.num_ranks / args.ranks_per_node);
    let channel = ctaid();
    let (begin, end) = channel_range(args.num_tokens, args.num_channels, channel);
    // A warp takes a column: a rank, or behind the ranks a node.
    stride!(column in warp..ranks + nodes, warps => {
        let (first, width) = if column < ranks {
            (column, 1)
        } else {
            ((column - ranks) * args.ranks_per_node, args.ranks_per_node)
        };
        let (mut group, mut count) = (begin, 0);
        while group < end {
            // Lanes behind the end read the last token: a branch around the load would come
            // twice, and so would the ballot between its two halves.
            let token = (group + lane).min(end - 1);
            let mut hit = 0;
            stride!(rank in first..first + width => {
                hit |= ld_u8(args.is_token_in_rank.array::<u8>().at(row_major(token, ranks, rank)));
            });
            let inside = group + lane < end;
            let hits = ballot((hit != 0) & inside);
            if inside {
                let number = count + (hits & lanemask_lt()).count_ones();
                let number = if hit != 0 { number as i32 } else { -1 };
                let to = if column < ranks {
                    args.send_head.array::<i32>().at(row_major(token, ranks, column))
                } else {
                    args.send_rdma_head.array::<i32>().at(row_major(token, nodes, column - ranks))
                };
                st_i32(to, number);
            }
            count += hits.count_ones();
            group += 32;
        }
        if lane == 0 {
            args.channel_counts.array::<u32>().st(channel * (ranks + nodes) + column, count);
        }
    });
}
