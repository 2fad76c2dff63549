//! Low-latency combine of rows that the experts have left in their rank's pool: each token's owner
//! gathers them there, and no row is copied. An owner may read them only behind the call of their
//! rank. Until then each rank sends the rows of its peers' first tokens to them as packets.
//!
//! Soundness: a rank publishes that it has entered the combine behind the kernels that wrote its
//! rows, and a warp of each block acquires that of every member ahead of a barrier. The fence in
//! front of the publication is the first thing that its warp does: it and the store behind it
//! release what the kernels before have written. No row is written before the rank's next dispatch
//! into the place has ended, which every member enters behind its combine. A dispatch that ends
//! without a member has warned that one before, in time ([`has_one_given_up`]). A packet has one
//! writer, a warp of one rank, and is read together with its epoch: all of it or nothing. A piece of
//! a sum has one warp. Collectives stand where all lanes of a warp arrive: the numbers and masks of
//! pieces are the same in all lanes.

use super::super::super::combine::{Bf16, Summand};
use super::super::super::epoch::{Phase, trace};
use super::super::super::peer_wait::PeerWait;
use super::super::ranks::{Few, Many, Ranks, each_rank};
use super::super::{
    Opened, Opening, Piece, PieceOf, add_share, begin, fence_call, have_all_entered, in_packets, inside,
    last_warp, let_next_launch, note_answer, store_call,
};
use super::add_ranks;
use super::receive::{ranks_of, spoil_piece, sum_pieces};
use super::send::{Pushing, push_pieces, pushed_tokens};
use crate::layout::{
    Comm, FEW_RANKS, GATHER_NS, LowLatencyArgs, LowLatencyCombineArgs, Quantise, Wait, gave_up_offset, phase,
    row_stride,
};
use crate::simt::*;

few_and_many! {
    kernel(threads = 512, barriers = 3, registers = 128, dependent, block = 512);
    few(shared = super::super::LOW_LATENCY_SHARED_BYTES) many(shared = super::super::LOW_LATENCY_MANY_SHARED_BYTES);
    requires(
        ..LowLatencyArgs(args.common), args.quantise == Quantise::None as u32, args.by_expert == 0,
        args.common.comm.num_ranks > 2
    );
    ranks(args.common.comm);
    fn(args: LowLatencyCombineArgs);

    /// Sums the BF16 rows of every rank's pool, which are weighted and summed over experts already.
    low_latency_combine_pooled, low_latency_combine_many_pooled<R> { combine::<R, false>(&args) }
}

/// The same as `low_latency_combine_pooled` between two ranks.
#[kernel(
    threads = 512, barriers = 3, registers = 128, dependent, block = 512,
    shared = super::super::LOW_LATENCY_SHARED_BYTES,
    requires(
        ..LowLatencyArgs(args.common), args.quantise == Quantise::None as u32, args.by_expert == 0,
        args.common.comm.num_ranks <= 2
    )
)]
pub unsafe fn low_latency_combine_two_pooled(args: LowLatencyCombineArgs) {
    combine::<Few, true>(&args);
}

#[device]
unsafe fn combine<R: Ranks, const TWO: bool>(args: &LowLatencyCombineArgs) {
    let (common, comm) = (&args.common, &args.common.comm);
    let shared = R::shared();
    let sends = common.phases & phase::SEND != 0;
    trace(comm, Phase::Enter);
    let publishes = publishes_from_first(common);
    fence_call(publishes);
    let opening = Opening::<R>::load::<true>(common, tid() == 0);
    let pushing = Pushing::first(args, sends);
    let pieces = Pieces::<TWO>::of(args);
    let first = pieces.at(Piece::first_to_receive());
    let ranks: R = ranks_of(args, first.token);
    if tid() == 0 {
        shared.set_call_targets(opening.call_targets::<true>(common));
    }
    let opened = begin::<R, true>(common, &opening, shared.opened);
    if publishes {
        store_call(common, &shared, opened.epoch());
    }
    if sends && opened.takes_part() {
        if ctaid() == 0 && tid() == 0 {
            note_answer(common, &opening);
        }
        push_pieces::<R>(args, pushing, opened.epoch());
    }
    trace(comm, Phase::Moved);
    let_next_launch(common);
    if common.phases & phase::RECEIVE != 0 {
        // Nothing is computed between the calls and the first reads that could be before.
        let (ranks, step) = (ranks.of_warp(), pieces.step());
        let (gathers, polls) = (pieces.gathers(), tid() / 32 == last_warp());
        let mut failed = !opened.takes_part() || (polls && !have_all_entered(common, opened));
        // A check behind the barrier is later than each warp's time, however long a warp stands still.
        let start = globaltimer();
        // Packets need no call: where all rows come as such, no warp waits for the last one here.
        if gathers {
            failed = barrier_any(failed);
        }
        if !failed {
            failed = gathers && polls && has_one_given_up(comm, opened);
            failed |= !pieces.sum_all::<R>(args, first, step, ranks, opened);
            if gathers && globaltimer() - start > GATHER_NS {
                fence_acq_rel_sys();
                failed |= has_one_given_up(comm, opened);
            }
        }
        if barrier_any(failed) {
            pieces.spoil(args, first.number);
        }
        add_share(comm);
    }
}

/// The pieces of sums: first those of tokens whose rows come as packets, then those of tokens whose
/// rows are gathered.
///
/// Between `TWO` ranks rows of many tokens are gathered in pieces of 2,048 bytes: 256 rows of 7168
/// elements have fewer of them than 132 multiprocessors have warps, so that no warp waits for reads
/// twice. Few tokens are in pieces of 1,536 bytes, for which more warps read.
///
/// Between more ranks a warp reads pieces of 1,024 bytes of up to four rows at once. The sum has the
/// order of the ranks, so warps with two rows in flight would all read from ranks 0 and 1 first, and
/// half of the links would idle: 256 tokens took 51 us in place of 45 between four H200.
#[derive(Clone, Copy)]
struct Pieces<const TWO: bool> {
    /// Tokens whose rows come as packets.
    pushed_tokens: u32,
    /// Pieces of one of their rows.
    of_pushed: u32,
    /// Their pieces.
    pushed: u32,
    /// Whether the others are in pieces of 1,536 bytes.
    are_small: bool,
    /// Pieces of one of the other rows.
    of_gathered: u32,
    /// All pieces.
    all: u32,
}

impl<const TWO: bool> Pieces<TWO> {
    #[device]
    fn of(args: &LowLatencyCombineArgs) -> Self {
        let tokens = args.common.num_tokens;
        let pushed_tokens = pushed_tokens(&args.common).min(tokens);
        let are_small = in_packets(&args.common, tokens);
        let small = PieceOf::<3>::count(args.row_bytes);
        let of_gathered = if !TWO {
            PieceOf::<2>::count(args.row_bytes)
        } else if are_small {
            small
        } else {
            PieceOf::<4>::count(args.row_bytes)
        };
        let pushed = pushed_tokens * small;
        let all = pushed + (tokens - pushed_tokens) * of_gathered;
        Pieces { pushed_tokens, of_pushed: small, pushed, are_small, of_gathered, all }
    }

    /// Whether rows are gathered: not all come as packets.
    #[device]
    fn gathers(&self) -> bool {
        self.all > self.pushed
    }

    /// Piece number `number`: its token is behind the last one where there is no such piece.
    #[device]
    fn at(&self, number: u32) -> Numbered {
        let is_pushed = number < self.pushed;
        let (first, of_row) =
            if is_pushed { (0, self.of_pushed) } else { (self.pushed_tokens, self.of_gathered) };
        let in_part = if is_pushed { number } else { number - self.pushed };
        // SAFETY: a row has bytes: the kernels' contracts.
        unsafe { core::hint::assert_unchecked(of_row >= 1) };
        Numbered { number, token: first + in_part / of_row, index: in_part % of_row }
    }

    /// From one piece of a warp that is gathered to the next.
    #[device]
    fn step(&self) -> Numbered {
        let number = nctaid() * (ntid() / 32);
        // SAFETY: as in `at`.
        unsafe { core::hint::assert_unchecked(self.of_gathered >= 1) };
        Numbered { number, token: number / self.of_gathered, index: number % self.of_gathered }
    }

    /// Sums the warp's pieces from `at` on, whose token went to `ranks`. False when packets did not
    /// come: the same in all lanes. The whole warp calls it.
    #[device]
    unsafe fn sum_all<R: Ranks>(
        &self,
        args: &LowLatencyCombineArgs,
        mut at: Numbered,
        step: Numbered,
        mut ranks: R,
        opened: Opened<R>,
    ) -> bool {
        while at.number < self.pushed {
            let to = args.combined_x.row(at.token, args.row_bytes);
            if !sum_pieces::<Bf16, R, true>(args, &at.piece(), ranks, to, opened) {
                return false;
            }
            at = self.at(at.number + step.number);
            ranks = ranks_of::<R>(args, at.token).of_warp();
        }
        while at.number < self.all {
            let mut next = Numbered {
                number: at.number + step.number,
                token: at.token + step.token,
                index: at.index + step.index,
            };
            if next.index >= self.of_gathered {
                (next.token, next.index) = (next.token + 1, next.index - self.of_gathered);
            }
            let next_ranks: R = ranks_of(args, next.token);
            if !TWO {
                sum::<R, 4, 2>(args, &at.piece(), ranks);
            } else if self.are_small {
                sum::<R, 2, 3>(args, &at.piece(), ranks);
            } else {
                sum::<R, 2, 4>(args, &at.piece(), ranks);
            }
            (at, ranks) = (next, next_ranks.of_warp());
        }
        true
    }

    /// Leaves NaN in the warp's pieces from the one of number `first` on, and notes their tokens.
    /// The whole warp calls it.
    #[device]
    unsafe fn spoil(&self, args: &LowLatencyCombineArgs, first: u32) {
        stride!(number in first..self.all, nctaid() * (ntid() / 32) => {
            let at = self.at(number);
            if number < self.pushed || (TWO && self.are_small) {
                spoil_piece::<false, 3>(args, &at.piece());
            } else if !TWO {
                spoil_piece::<false, 2>(args, &at.piece());
            } else {
                spoil_piece::<false, 4>(args, &at.piece());
            }
        });
    }
}

/// A piece of a sum by its number among all.
#[derive(Clone, Copy)]
struct Numbered {
    number: u32,
    token: u32,
    index: u32,
}

impl Numbered {
    #[device]
    fn piece<const VECTORS: usize>(&self) -> PieceOf<VECTORS> {
        PieceOf { rank: 0, token: self.token, index: self.index }
    }
}

/// Whether this warp publishes the call: the last one of the first block, which has the fewest
/// pieces.
#[device]
fn publishes_from_first(args: &LowLatencyArgs) -> bool {
    args.phases & phase::SEND != 0 && ctaid() == 0 && tid() / 32 == last_warp()
}

/// Whether a member has ended a later dispatch without this rank, or will not enter this combine: its
/// rows may be others by now, or half of each. A rank publishes that it gives up [`GIVING_UP_NS`] before
/// it writes any, so rows read within [`GATHER_NS`] from here on are right. A failure is recorded.
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

/// Sums a piece of the rows of `ranks`, up to `ROWS` of which are in flight. The whole warp calls it.
#[device]
unsafe fn sum<R: Ranks, const ROWS: usize, const VECTORS: usize>(
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
    add_ranks::<Bf16, R, ROWS, VECTORS>(ranks, &insides, &mut sums, row);
    let to = args.combined_x.row(piece.token, args.row_bytes);
    few!(4, vector in 0..VECTORS => {
        if ats[vector] < args.row_bytes {
            st_v4(to + ats[vector] as u64, Bf16::round(&sums[vector]));
        }
    });
}
