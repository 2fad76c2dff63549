//! Copies of rows by expert, which the receiver makes: a token goes to each rank once, where it may
//! have several entries. Across nodes the records are others (`internode_dispatch/copies.rs`).
//!
//! The sender lists a token's rows at a rank there, once the first of them is complete. A record
//! has a word for each of them, `epoch << 32 | row`, with [`MORE`] in all but the last one; a token
//! without copies has [`NONE`]. In front of a source's records stands one with its number of
//! tokens. A warp of the receiver takes every n-th token of a source, waits for its record, loads
//! the first row into shared memory and stores it to the others.
//!
//! Any block of the source sends any token (`by_expert.rs`), and sending waits for no copy. So all
//! records come as soon as one block of the source runs, and blocks that follow each other are
//! enough.
//!
//! Soundness: a record's word has one writer, and carries its flag; a peer writes it behind this
//! rank's ready word of the same epoch, with which the operation before has ended here. The release
//! of each word comes behind the completion of the row's stores, by the same thread or in front of
//! a barrier of the warp; the acquire of each word comes before one, in front of the load. The row
//! came through the async proxy and is read through it again, behind a proxy fence. Its scales are
//! read by ordinary loads behind the same acquire. A row that is copied to has this one writer. Collectives stand where all lanes of a warp arrive.

use super::rows::{Cursor, Tail, copy_scales, copy_scales_by_lanes, load_stage, scale_place};
use crate::kernels::epoch::pool_at;
use crate::kernels::list::Destination;
use crate::kernels::peer_wait::PeerWait;
use crate::kernels::ring::{Ring, Turn};
use crate::layout::{
    Comm, DispatchArgs, ExpertDispatchArgs, Wait, bulk_scale_bytes, copies_offset, row_stride,
};
use crate::simt::*;

/// In a word of a record: another one follows.
const MORE: u64 = 1 << 31;
/// The row of a record without copies.
const NONE: u64 = MORE - 1;

/// Stages of a warp that copies.
pub const COPY_STAGES: u32 = 2;

/// Where the rings of warps that copy begin, behind `rings` bytes of other rings: stages are aligned
/// as the copy engine is fastest.
pub const fn copy_rings_behind(rings: u32) -> u32 {
    rings.saturating_add(127) & !127
}

/// How copies are asked for and made.
pub struct Copies<R: Place = WithinNode> {
    /// Warps of a block that copy.
    pub warps: u32,
    /// Words of a record.
    pub words: u32,
    /// Tokens that a source has records for.
    pub max_tokens: u32,
    /// Where they are.
    pub place: R,
}

/// Where records are.
pub trait Place {
    /// Their offset in bytes behind the messages of a pool, with `num_ranks` ranks.
    fn offset(&self, num_ranks: u32) -> u64;
}

/// In pools of one node.
pub struct WithinNode;

impl Place for WithinNode {
    #[device]
    fn offset(&self, num_ranks: u32) -> u64 {
        copies_offset(num_ranks)
    }
}

/// The lanes whose row, if they have one, is at the same rank; none for a lane without.
///
/// # Safety
/// The whole warp calls it.
#[device]
unsafe fn of_same_rank(has_row: bool, rank: u32) -> u32 {
    let (mut same, mut left) = (0, ballot(has_row));
    while left != 0 {
        let first = shfl_u32(rank, left.trailing_zeros());
        let is_same = has_row & (rank == first);
        let lanes = ballot(is_same);
        same = if is_same { lanes } else { same };
        left &= !lanes;
    }
    same
}

/// Whether the lane's row is the token's first one at its rank. The whole warp calls it.
#[device]
pub unsafe fn is_first_of_rank(has_row: bool, rank: u32) -> bool {
    has_row & (of_same_rank(has_row, rank) & lanemask_lt() == 0)
}

/// Waits until the stores of the token two turns before have landed, behind the first store of the
/// one at hand.
///
/// # Safety
/// Stores since are the groups of two tokens or less.
#[device]
pub unsafe fn wait_two_behind(args: &DispatchArgs) {
    // Groups since: the token between, and the first one of this.
    if args.piece_bytes < args.row_bytes {
        bulk_wait::<3>();
    } else {
        bulk_wait::<2>();
    }
}

impl Copies {
    #[device]
    pub fn of(args: &ExpertDispatchArgs) -> Copies {
        Copies {
            warps: args.copy_warps,
            words: args.copy_words,
            max_tokens: args.max_tokens,
            place: WithinNode,
        }
    }

    /// The end of the copying warps' rings, which begin at `rings` in shared memory.
    #[device]
    pub fn end_of_rings(&self, args: &DispatchArgs, rings: u32) -> u32 {
        rings + crate::layout::ring_bytes(self.warps, COPY_STAGES, args.stage_bytes)
    }
}

impl<R: Place> Copies<R> {
    /// Record `nth` of source `source` in the pool at `pool`: 0 has the source's number of tokens,
    /// 1 + t is of token t.
    #[device]
    pub fn record_at(&self, comm: &Comm, pool: u64, source: u32, nth: u32) -> u64 {
        let record = source as u64 * (self.max_tokens as u64 + 1) + nth as u64;
        pool + comm.pool.messages + self.place.offset(comm.num_ranks) + record * self.words as u64 * 8
    }
}

impl Copies {
    /// Publishes the number of tokens to every other rank. A warp of the grid calls it.
    ///
    /// # Safety
    /// The peers have entered the operation.
    #[device]
    pub unsafe fn tell_tokens(&self, args: &DispatchArgs, epoch: u64) {
        let comm = &args.comm;
        stride!(rank in laneid()..comm.num_ranks, 32 => {
            if rank != comm.rank {
                let at = self.record_at(comm, pool_at::<true>(comm, rank), comm.rank, 0);
                st_relaxed_sys_u64(at, epoch << 32 | args.num_tokens as u64);
            }
        });
    }
}

impl<R: Place> Copies<R> {
    /// Sends each other rank the record of `token`, whose destinations are `to`.
    ///
    /// # Safety
    /// The token's rows have landed for the threads that stored them.
    #[device]
    pub unsafe fn send(&self, args: &DispatchArgs, epoch: u64, token: u32, to: Destination) {
        let (comm, lane) = (&args.comm, laneid());
        syncwarp();
        let has_row = to.row >= 0 && to.rank != comm.rank;
        let same = of_same_rank(has_row, to.rank);
        if has_row {
            let nth = (same & lanemask_lt()).count_ones();
            let more = if same >> lane > 1 { MORE } else { 0 };
            let at = self.record_at(comm, to.pool(comm), comm.rank, 1 + token) + nth as u64 * 8;
            st_release_sys_u64(at, epoch << 32 | more | to.row as u64);
        }
        // Ranks that have no row of the token.
        let bit = |half: u32| if has_row && to.rank / 32 == half { 1 << (to.rank % 32) } else { 0 };
        let reached = [redux_or(bit(0)), redux_or(bit(1))];
        unroll!(2, HALF => {
            let rank = lane + HALF as u32 * 32;
            if rank < comm.num_ranks && rank != comm.rank && reached[HALF] >> lane & 1 == 0 {
                let at = self.record_at(comm, pool_at::<true>(comm, rank), comm.rank, 1 + token);
                st_relaxed_sys_u64(at, epoch << 32 | NONE);
            }
        });
    }

    /// Waits for record `nth` of `source`: the lane's word, and how many words it has; `None` when
    /// the wait expired, in all lanes.
    ///
    /// # Safety
    /// The source has that record. The whole warp calls it.
    #[device]
    pub unsafe fn wait(&self, comm: &Comm, source: u32, nth: u32, epoch: u64) -> Option<(u32, u32)> {
        let lane = laneid();
        let at = self.record_at(comm, pool_at::<true>(comm, comm.rank), source, nth);
        let mut wait = PeerWait::new(comm, source, epoch, Wait::DispatchDone);
        loop {
            let word = if lane < self.words { ld_acquire_sys_u64(at + lane as u64 * 8) } else { 0 };
            let is_here = lane < self.words && (word >> 32) as u32 == epoch as u32;
            let (here, more) = (ballot(is_here), ballot(is_here && word & MORE != 0));
            let before = more.trailing_ones();
            if here >> (before & 31) & 1 != 0 && before < 32 {
                return Some((word as u32 & NONE as u32, before + 1));
            }
            if ballot(wait.has_expired()) != 0 {
                if lane == 0 {
                    wait.record(epoch, word >> 32);
                }
                return None;
            }
        }
    }
}

impl Copies {
    /// Makes the copies that this warp, the `nth` of those of its block, has a part in. Its rings
    /// are among those at `rings` in shared memory.
    ///
    /// # Safety
    /// All ranks have entered the operation, and rows have places.
    #[device]
    pub unsafe fn make(&self, args: &DispatchArgs, epoch: u64, rings: u32, nth: u32) {
        let (comm, lane) = (&args.comm, laneid());
        if ctaid() == 0 && nth == 0 {
            self.tell_tokens(args, epoch);
        }
        let ring = Ring::at(rings, COPY_STAGES, args.stage_bytes, nth, self.warps);
        ring.init();
        // Lane r: the tokens of rank r, and of the rank 32 further.
        let mut tokens = [0; 2];
        stride!(source in 0..comm.num_ranks => {
            if source != comm.rank {
                let Some((count, _)) = self.wait(comm, source, 0, epoch) else { return };
                let count = shfl_u32(count, 0);
                unroll!(2, HALF => {
                    if lane + HALF as u32 * 32 == source {
                        tokens[HALF] = count;
                    }
                });
            }
        });
        let (mut turn, mut is_left) = (Turn::first(), true);
        // Every block's first warps have the first tokens.
        let mut token = nth * nctaid() + ctaid();
        while is_left {
            is_left = false;
            // Ranks begin with the one behind them, so that all are waited for alike.
            stride!(distance in 1..comm.num_ranks => {
                let source = comm.rank + distance;
                let source = if source < comm.num_ranks { source } else { source - comm.num_ranks };
                let of_source = shfl_u32(if source < 32 { tokens[0] } else { tokens[1] }, source & 31);
                if token < of_source {
                    is_left = true;
                    let Some((row, count)) = self.wait(comm, source, 1 + token, epoch) else { return };
                    // The same in all lanes.
                    let count = shfl_u32(count, 0);
                    if count > 1 {
                        self.copy(args, &ring, &mut turn, row, count);
                    }
                }
            });
            token += self.warps * nctaid();
        }
    }
}

impl Copies {
    /// Makes the copies of a dispatch that has ended, in which no block did: this warp is the
    /// `nth` of `of` of the grid. All records are here, up to the last token of each source.
    ///
    /// # Safety
    /// Rows had places, and no wait has expired. The ring is the warp's.
    #[device]
    pub unsafe fn make_late(&self, args: &DispatchArgs, epoch: u64, ring: &Ring, (nth, of): (u32, u32)) {
        let (comm, mut turn) = (&args.comm, Turn::first());
        stride!(distance in 1..comm.num_ranks => {
            let source = comm.rank + distance;
            let source = if source < comm.num_ranks { source } else { source - comm.num_ranks };
            let mut token = nth;
            while token < self.max_tokens {
                let at = self.record_at(comm, pool_at::<true>(comm, comm.rank), source, 1 + token);
                let word = if laneid() < self.words { ld_u64(at + laneid() as u64 * 8) } else { 0 };
                let is_here = (word >> 32) as u32 == epoch as u32;
                // Lane 0 has a word of every record.
                if ballot(is_here) & 1 == 0 {
                    break;
                }
                let count = ballot(is_here && word & MORE != 0).trailing_ones() + 1;
                if count > 1 {
                    self.copy(args, ring, &mut turn, word as u32 & NONE as u32, count);
                }
                token += of;
            }
        });
    }
}

impl<R: Place> Copies<R> {
    /// Copies the row of lane 0 to those of the lanes behind it, of `count` lanes.
    ///
    /// # Safety
    /// The first row is complete for all lanes; the others are this warp's to write.
    #[device]
    pub unsafe fn copy(&self, args: &DispatchArgs, ring: &Ring, turn: &mut Turn, row: u32, count: u32) {
        let (comm, lane) = (&args.comm, laneid());
        let own = pool_at::<true>(comm, comm.rank);
        let first = shfl_u32(row, 0);
        let is_copied_to = lane != 0 && lane < count;
        let row = if is_copied_to { row as i32 } else { -1 };
        let row_at = |row: u32| own + comm.pool.recv_x + row as u64 * row_stride(args.row_bytes as u64);
        let (scales, to_scales) = (scale_place(args, own, first as i32), scale_place(args, own, row));
        let scale_bytes = bulk_scale_bytes(args.num_scales);
        syncwarp();
        fence_proxy_async_global();
        let mut piece = Cursor::new(0, 1);
        while piece.token == 0 {
            // The store before the last one has read this stage.
            bulk_wait_read::<1>();
            syncwarp();
            load_stage::<false>(ring, args, turn.slot, row_at(first), 0, Tail::NONE, piece.offset);
            // The copy engine takes as long for a few scales as for half a kilobyte.
            if scale_bytes != 0 && piece.offset == 0 {
                copy_scales_by_lanes(scales, scale_bytes, to_scales);
            }
            ring.wait(turn);
            let (buffer, bytes) = (ring.buffer(turn.slot), piece.bytes(args));
            if is_copied_to {
                bulk_store(row_at(row as u32) + piece.offset as u64, buffer, bytes);
            }
            bulk_commit();
            turn.advance(ring);
            piece.advance(args);
        }
        if args.num_scales != 0 && scale_bytes == 0 {
            copy_scales(scales, args.num_scales, to_scales);
        }
    }
}
