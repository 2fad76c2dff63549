//! Copies of rows by expert across nodes, as within a node: a sender or a forwarder writes a token
//! to each other rank of this node once, and that rank copies the row to its further places there.
//!
//! A source is a rank of this node, with the tokens that it writes here: its own ones, which its
//! senders write, and those of each other node, which its forwarders write. Of each node and channel
//! there is a record with the number of tokens, then one of each token. A rank writes its own rows
//! itself, without records.
//!
//! Blocks that send wait for records of blocks that send, blocks that forward for those of blocks
//! that forward, always of their own channel. So a block waits for none that comes behind the like
//! of itself, and blocks that follow each other are enough.
//!
//! Soundness: as within a node. A record has the one writer that writes the token's rows. The
//! number of a channel's tokens guards no data; records that it counts are checked by the flags in
//! them. Collectives stand where all lanes of a warp arrive: sources, tokens and numbers of
//! entries are the same in all lanes.

use crate::kernels::dispatch::{self, COPY_STAGES, Place, wait_two_behind};
use crate::kernels::epoch::pool_at;
use crate::kernels::list::Destination;
use crate::kernels::peer_wait::PeerWait;
use crate::kernels::rail::channel_rows;
use crate::kernels::ring::{Ring, Turn};
use crate::layout::{
    DispatchArgs, FEW_RANKS, InternodeDispatchArgs, InternodeExpertDispatchArgs, Wait,
    copy_records_of_channel, internode_copies_offset,
};
use crate::simt::*;

/// In pools of several nodes.
pub struct AcrossNodes {
    num_nodes: u32,
}

impl Place for AcrossNodes {
    #[device]
    fn offset(&self, num_ranks: u32) -> u64 {
        internode_copies_offset(self.num_nodes, num_ranks)
    }
}

/// The copies of a channel.
pub struct Copies {
    /// Their records.
    all: dispatch::Copies<AcrossNodes>,
    num_channels: u32,
    channel: u32,
    /// Records of a channel, of the tokens for one node.
    of_channel: u32,
}

impl Copies {
    /// Those of a dispatch without rows by expert.
    pub const NONE: Copies = Copies {
        all: dispatch::Copies { warps: 0, words: 0, max_tokens: 0, place: AcrossNodes { num_nodes: 0 } },
        num_channels: 0,
        channel: 0,
        of_channel: 0,
    };

    #[device]
    pub fn of(args: &InternodeExpertDispatchArgs, channel: u32) -> Copies {
        let (num_nodes, num_channels) = (args.rows.wire.num_nodes, args.rows.route.num_channels);
        let of_channel = copy_records_of_channel(args.max_tokens, num_channels);
        let all = dispatch::Copies {
            warps: args.copy_warps,
            words: args.copy_words,
            // Behind a record in front of them.
            max_tokens: num_nodes * num_channels * of_channel - 1,
            place: AcrossNodes { num_nodes },
        };
        Copies { all, num_channels, channel, of_channel }
    }

    /// Warps of a block that copy.
    #[device]
    pub fn warps(&self) -> u32 {
        self.all.warps
    }

    /// The record with the number of tokens that a rank writes for `node`.
    #[device]
    fn count(&self, node: u32) -> u32 {
        (node * self.num_channels + self.channel) * self.of_channel
    }

    /// Number `row` of those among the tokens that a source has records for.
    #[device]
    pub fn token(&self, node: u32, row: u32) -> u32 {
        self.count(node) + row
    }
}

/// The last two tokens of a warp, whose copies are not asked for yet: a warp asks two tokens late,
/// so that it waits for no store that has just left.
pub struct Late {
    /// [`Copies::token`], or [`NONE`].
    tokens: [u32; 2],
    to: [Destination; 2],
}

/// Stands for a token without a record.
pub const NONE: u32 = u32::MAX;

impl Late {
    #[device]
    pub fn new() -> Late {
        Late { tokens: [NONE; 2], to: [Destination { row: -1, rank: 0 }; 2] }
    }

    /// Asks for the copies of the token two turns before, and keeps the one at hand. The whole warp
    /// calls it, behind the first store of each token.
    ///
    /// # Safety
    /// The warp's stores since are the groups of two tokens or less.
    #[device]
    pub unsafe fn turn(
        &mut self,
        copies: &Copies,
        args: &DispatchArgs,
        epoch: u64,
        token: u32,
        to: Destination,
    ) {
        if self.tokens[0] != NONE {
            wait_two_behind(args);
            copies.all.send(args, epoch, self.tokens[0], self.to[0]);
        }
        (self.tokens, self.to) = ([self.tokens[1], token], [self.to[1], to]);
    }

    /// Asks for those of the last two tokens. The whole warp calls it.
    ///
    /// # Safety
    /// All stores of the warp have landed, each for the thread that made it.
    #[device]
    pub unsafe fn end(&self, copies: &Copies, args: &DispatchArgs, epoch: u64) {
        unroll!(2, NTH => {
            if self.tokens[NTH] != NONE {
                copies.all.send(args, epoch, self.tokens[NTH], self.to[NTH]);
            }
        });
    }
}

/// Makes the copies of a channel that this warp, the `nth` of those of its block, has a part in:
/// of what the like of this block writes on the other ranks of this node. Its ring is among those at
/// `rings` in shared memory.
///
/// # Safety
/// All ranks of this node have entered the operation, and rows have places.
#[device]
pub unsafe fn make(
    args: &InternodeDispatchArgs,
    copies: &Copies,
    epoch: u64,
    forwards: bool,
    rings: u32,
    nth: u32,
) {
    let (rows, wire, lane) = (&args.dispatch, &args.wire, laneid());
    let comm = &rows.comm;
    // Lane n: whether blocks like this one write tokens of node n.
    let is_source = (lane < wire.num_nodes) & ((lane == wire.node) != forwards);
    if nth == 0 && is_source {
        let matrix = if forwards {
            args.route.recv_rdma_channel_prefix_matrix.0
        } else {
            args.route.rdma_channel_prefix_matrix.0
        };
        let (_, count) = channel_rows(matrix, args.route.num_channels, lane, copies.channel);
        stride!(rank in 0..comm.num_ranks => {
            if rank != comm.rank {
                let at = copies.all.record_at(comm, pool_at::<true>(comm, rank), comm.rank, copies.count(lane));
                st_relaxed_sys_u64(at, epoch << 32 | count as u64);
            }
        });
    }
    let ring = Ring::at(rings, COPY_STAGES, rows.stage_bytes, nth, copies.all.warps);
    ring.init();
    // Lane n: tokens of node n that each rank writes.
    let (mut counts, mut is_missing) = ([0; FEW_RANKS], false);
    stride!(rank in 0..comm.num_ranks => {
        if is_source & (rank != comm.rank) {
            let at = copies.all.record_at(comm, pool_at::<true>(comm, comm.rank), rank, copies.count(lane));
            let count = PeerWait::new(comm, rank, epoch, Wait::DispatchDone).packet::<false>(at);
            is_missing |= count.is_none();
            unroll!(8, RANK => {
                counts[RANK] = if RANK as u32 == rank { count.unwrap_or(0) } else { counts[RANK] };
            });
        }
    });
    if ballot(is_missing) != 0 {
        return;
    }
    let (mut turn, mut row, mut is_left) = (Turn::first(), nth, true);
    while is_left {
        is_left = false;
        // Nodes and ranks begin with the one behind the own one, so that all are waited for alike.
        stride!(distance in 0..wire.num_nodes => {
            let node = behind(wire.node, distance, wire.num_nodes);
            stride!(distance in 1..comm.num_ranks => {
                let rank = behind(comm.rank, distance, comm.num_ranks);
                let mut count = 0;
                unroll!(8, RANK => { count |= if RANK as u32 == rank { counts[RANK] } else { 0 } });
                if row < shfl_u32(count, node) {
                    is_left = true;
                    let waited = copies.all.wait(comm, rank, 1 + copies.token(node, row), epoch);
                    let Some((to, entries)) = waited else { return };
                    // The same in all lanes.
                    let entries = shfl_u32(entries, 0);
                    if entries > 1 {
                        copies.all.copy(rows, &ring, &mut turn, to, entries);
                    }
                }
            });
        });
        row += copies.all.warps;
    }
}

/// The one of `count` that is `distance` behind `first`, in a circle.
#[device]
fn behind(first: u32, distance: u32, count: u32) -> u32 {
    let at = first + distance;
    if at < count { at } else { at - count }
}
