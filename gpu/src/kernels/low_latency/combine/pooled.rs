//! Low-latency combine of rows that the experts have left in their rank's pool: each token's owner
//! gathers them there, and no row is copied.
//!
//! Soundness: a rank publishes that it has entered the combine behind the kernels that wrote its
//! rows, and a warp of each block acquires that of every member ahead of a barrier. The fence in
//! front of the publication is the first thing that its warp does: it and the store behind it
//! release what the kernels before have written. No row is written before the rank's next dispatch
//! into the place has ended, which every member enters behind its combine. A dispatch that ends
//! without a member has told that one before, in time ([`has_one_given_up`]). A piece of a sum has
//! one warp. Collectives stand where all lanes of a warp arrive: the numbers and masks of pieces
//! are the same in all lanes.

use super::super::super::combine::{Bf16, Summand};
use super::super::super::epoch::{Phase, trace};
use super::super::super::peer_wait::PeerWait;
use super::super::ranks::{Few, Many, Ranks, each_rank};
use super::super::{
    Opened, Opening, PieceOf, add_share, begin, fence_call, have_all_entered, in_packets, inside, last_warp,
    let_next_launch, note_answer, store_call,
};
use super::add_ranks;
use super::receive::{ranks_of, spoil_pieces};
use crate::layout::{
    Comm, FEW_RANKS, GATHER_NS, LowLatencyArgs, LowLatencyCombineArgs, Quantise, Wait, gave_up_offset, phase,
    row_stride,
};
use crate::simt::*;

few_and_many! {
    kernel(threads = 512, barriers = 6, registers = 128, dependent, block = 512);
    few(shared = super::super::LOW_LATENCY_SHARED_BYTES) many(shared = super::super::LOW_LATENCY_MANY_SHARED_BYTES);
    requires(..LowLatencyArgs(args.common), args.quantise == Quantise::Not as u32, args.by_expert == 0);
    ranks(args.common.comm);
    fn(args: LowLatencyCombineArgs);

    /// Sums the BF16 rows of every rank's pool, which are weighted and summed over experts already.
    low_latency_combine_pooled, low_latency_combine_many_pooled<R> { combine::<R>(&args) }
}

/// Many tokens are summed in pieces of 2,048 bytes: 256 rows of 7168 elements have fewer of them than
/// 132 multiprocessors have warps, so that no warp waits for reads twice. Few tokens are in pieces of
/// 1,536 bytes, for which more warps read.
#[device]
unsafe fn combine<R: Ranks>(args: &LowLatencyCombineArgs) {
    if in_packets(&args.common, args.common.num_tokens) {
        combine_pieces::<R, 3>(args);
    } else {
        combine_pieces::<R, 4>(args);
    }
}

/// `VECTORS`: a lane's vectors of a piece.
#[device]
unsafe fn combine_pieces<R: Ranks, const VECTORS: usize>(args: &LowLatencyCombineArgs) {
    let (common, comm) = (&args.common, &args.common.comm);
    let shared = R::shared();
    trace(comm, Phase::Enter);
    let publishes = publishes_from_first(common);
    fence_call(publishes);
    let opening = Opening::<R>::load::<true>(common, tid() == 0);
    let (mut number, pieces) =
        (PieceOf::<VECTORS>::first_to_receive(), PieceOf::<VECTORS>::count(args.row_bytes));
    let mut ranks: R = ranks_of(args, PieceOf::<VECTORS>::of(number, args.row_bytes, 1).token);
    if tid() == 0 {
        shared.set_told(opening.told::<true>(common));
    }
    let opened = begin::<R, true>(common, &opening, shared.opened);
    if publishes {
        store_call(common, &shared, opened.epoch());
    }
    if common.phases & phase::SEND != 0 && opened.takes_part() && ctaid() == 0 && tid() == 0 {
        note_answer(common, &opening);
    }
    trace(comm, Phase::Moved);
    let_next_launch(common);
    if common.phases & phase::RECEIVE != 0 {
        let (first, asks) = (number, tid() / 32 == last_warp());
        let mut failed = !opened.takes_part() || (asks && !have_all_entered(common, opened));
        failed = barrier_any(failed);
        if !failed {
            let start = globaltimer();
            failed = asks && has_one_given_up(comm, opened);
            while number < common.num_tokens * pieces {
                let piece = PieceOf::<VECTORS>::of(number, args.row_bytes, 1);
                number += nctaid() * (ntid() / 32);
                let next_ranks = ranks_of(args, PieceOf::<VECTORS>::of(number, args.row_bytes, 1).token);
                sum(args, &piece, ranks.of_warp());
                ranks = next_ranks;
            }
            if globaltimer() - start > GATHER_NS {
                fence_acq_rel_sys();
                failed |= has_one_given_up(comm, opened);
            }
        }
        if barrier_any(failed) {
            spoil_pieces::<false, VECTORS>(args, first);
        }
        add_share(comm);
    }
}

/// Whether this warp publishes the call: the last one of the first block, which has the fewest
/// pieces.
#[device]
fn publishes_from_first(args: &LowLatencyArgs) -> bool {
    args.phases & phase::SEND != 0 && ctaid() == 0 && tid() / 32 == last_warp()
}

/// Whether a member has ended a later dispatch without this rank, or will not enter this combine: its
/// rows may be others by now, or half of each. A rank that gives up says so [`GIVING_UP_NS`] before it
/// writes any. So rows are right that are read within [`GATHER_NS`] from here on. It is recorded.
///
/// # Safety
/// Words are in this rank's own pool.
#[device]
unsafe fn has_one_given_up<R: Ranks>(comm: &Comm, opened: Opened<R>) -> bool {
    let (lane, mut has_given_up) = (laneid(), false);
    each_rank!(R, lane, rank => { has_given_up |= has_rank_given_up(comm, opened, rank) });
    has_given_up
}

/// The same of one rank.
#[device]
unsafe fn has_rank_given_up<R: Ranks>(comm: &Comm, opened: Opened<R>, rank: u32) -> bool {
    let epoch = opened.epoch();
    if rank >= R::ROOM || !opened.has_member(rank) {
        return false;
    }
    let word = R::pool(comm, comm.rank) + gave_up_offset(R::ROOM, rank);
    let seen = ld_relaxed_sys_u64(word);
    if seen >= epoch {
        PeerWait::new(comm, rank, epoch, Wait::LowLatencyGaveUp).record(epoch, seen);
    }
    seen >= epoch
}

/// Sums a piece of the rows of `ranks`. The whole warp calls it.
#[device]
unsafe fn sum<R: Ranks, const VECTORS: usize>(
    args: &LowLatencyCombineArgs,
    piece: &PieceOf<VECTORS>,
    ranks: R,
) {
    let (common, comm) = (&args.common, &args.common.comm);
    let number = comm.rank * common.max_tokens + piece.token;
    let of_row = DevicePtr(common.place.returned_x).row(number, row_stride(args.row_bytes as u64));
    let mut ats = [0; VECTORS];
    few!(4, vector in 0..VECTORS => { ats[vector] = piece.at(vector as u32) });
    let insides = ats.map(|at| inside(at, args.row_bytes));
    let mut sums = [[0.0; 8]; VECTORS];
    let row = |rank| (R::pool(comm, rank) + of_row, 1.0);
    add_ranks::<Bf16, R, 2, VECTORS>(ranks, &insides, &mut sums, row);
    let to = args.combined_x.row(piece.token, args.row_bytes);
    few!(4, vector in 0..VECTORS => {
        if ats[vector] < args.row_bytes {
            st_v4(to + ats[vector] as u64, Bf16::round(&sums[vector]));
        }
    });
}
