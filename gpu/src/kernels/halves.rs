//! High throughput: how an operation is entered and ended by kernels of their own. So it can be
//! launched as two halves, and so its waits can be measured.
//!
//! The kernel that moves rows ends its operation in `leave`: the block that completes the ticket
//! waits for all peers and stores the epoch. `enter_operation` can take one for each rank of the
//! node from the ticket. Then no block completes it, and the kernel ends when its own rows have
//! landed. `end_operation` has a block for each rank, which waits for that rank and gives the one
//! back; the last block stores the epoch. The kernels between are those of any other operation.
//!
//! Soundness: all words that are waited for lie in this rank's own pool. A ready word is published
//! behind all earlier kernels of the stream, and again, with the same value, by the kernels that
//! follow. The ticket stays below what the operation needs until the last block of `end_operation`
//! has added to it: [`QUANTUM`] is more than there are ranks. Each time of the caller's has one
//! thread, and each block works with one: a thread without a ticket must not read the epoch.

use super::combine::spoil;
use super::epoch::{
    ReadyEntry, add_wait, current_epoch, done_of, note_gave_up, pool_at, tell_gave_up, wait_done,
    wait_entered, warp_aborted,
};
use super::peer_wait::PeerWait;
use crate::layout::{
    Comm, DONE_GAVE_UP, EndArgs, EnterArgs, LOCAL_EPOCH, LOCAL_TICKET, MAX_RANKS, NO_READY, QUANTUM,
    READY_EPOCHS, READY_SHIFT, Wait, done_offset, ready_offset,
};
use crate::simt::*;

const _: () = assert!((MAX_RANKS as u64) < QUANTUM);

/// Publishes that this rank has entered the operation, a rank to a block. If asked, it keeps the
/// operation from ending before `end_operation`, waits until each rank has entered it, and adds the
/// time that each was late to the caller's. A rank that is here at the first look is not late.
#[kernel(threads = 32, registers = 40, dependent, grid = args.comm.num_ranks, block = 32)]
pub unsafe fn enter_operation(args: EnterArgs) {
    let (comm, peer, start) = (&args.comm, ctaid(), globaltimer());
    if tid() != 0 {
        return;
    }
    let epoch = current_epoch(comm);
    let entry = if args.header.is_null() {
        ReadyEntry::planning(comm, epoch)
    } else {
        ReadyEntry::read(comm, args.header.0)
    };
    let ready = entry.ready_word(comm, epoch);
    if ready != NO_READY {
        st_release_sys_u64(pool_at::<true>(comm, peer) + ready_offset(comm.rank), ready);
    }
    if peer == comm.rank {
        if args.holds != 0 {
            red_relaxed_gpu_add_u64(comm.local.0 + LOCAL_TICKET, (comm.num_ranks as u64).wrapping_neg());
        }
        return;
    }
    if args.waited.is_null() || ready == NO_READY {
        return;
    }
    let word = pool_at::<true>(comm, comm.rank) + ready_offset(peer);
    if ld_relaxed_sys_u64(word) >> READY_SHIFT != epoch & READY_EPOCHS {
        let what = if args.is_combine != 0 { Wait::CombineReady } else { Wait::DispatchReady };
        wait_entered(comm, word, ready, peer, epoch, what);
        add_wait(args.waited, peer, start);
    }
}

/// Waits until each rank has done its part towards this one, a rank to a block, adds the time that
/// each was late to the caller's, if asked, and ends the operation. The last block of a combine
/// that has given up tells the peers, and spoils the sums where a peer has given up.
#[kernel(threads = 32, registers = 48, dependent, grid = args.combine.comm.num_ranks, block = 32)]
pub unsafe fn end_operation(args: EndArgs) {
    let (comm, mut last) = (&args.combine.comm, false);
    if tid() == 0 {
        last = end_with(&args, ctaid());
    }
    if ballot(last) == 0 || args.is_combine == 0 || !warp_aborted(comm) {
        return;
    }
    let mut is_unsure = false;
    stride!(rank in laneid()..comm.num_ranks, 32 => {
        is_unsure |= ld_relaxed_sys_u64(done_word(comm, rank)) & DONE_GAVE_UP != 0;
        tell_gave_up(comm, pool_at::<true>(comm, rank));
    });
    fence_acq_rel_sys();
    if ballot(is_unsure) != 0 {
        // As the arguments' rule says.
        core::hint::assert_unchecked(args.combine.pieces >= 1);
        spoil::<false>(&args.combine, 0, args.combine.num_tokens, 0, 1);
    }
}

/// A block's part, with rank `peer`. Whether it is the last one, which has stored the epoch.
///
/// # Safety
/// As `end_operation`, of one thread.
#[device]
unsafe fn end_with(args: &EndArgs, peer: u32) -> bool {
    let (comm, start) = (&args.combine.comm, globaltimer());
    let epoch = current_epoch(comm);
    let word = done_word(comm, peer);
    let is_late = done_of(ld_relaxed_sys_u64(word)) < epoch * QUANTUM;
    let what = if args.is_combine != 0 { Wait::CombineDone } else { Wait::DispatchDone };
    let wait = PeerWait::new(comm, peer, epoch, what);
    let end = wait_done(wait, word, |wait, needed, done| record_last(wait, needed, done));
    if args.is_combine != 0 {
        note_gave_up(comm, peer, epoch, end.seen);
    }
    if is_late && peer != comm.rank && !args.waited.is_null() {
        add_wait(args.waited, peer, start);
    }
    let is_last = atom_acq_rel_gpu_add_u64(comm.local.0 + LOCAL_TICKET, 1) + 1 == epoch * QUANTUM;
    if is_last {
        // The end of the kernel publishes it; the one thread of every other block has read the old
        // one before its ticket.
        st_u64(comm.local.0 + LOCAL_EPOCH, epoch);
    }
    is_last
}

/// The word in this rank's own pool in which rank `peer` counts the operations that it has done.
#[device]
unsafe fn done_word(comm: &Comm, peer: u32) -> u64 {
    pool_at::<true>(comm, comm.rank) + done_offset(peer)
}

/// Records an expired wait, which saw `seen`, for the rank that is furthest behind. The waits for
/// all ranks expire together, and a rank that has done a part may wait for another one.
///
/// # Safety
/// As [`PeerWait::record`].
#[device]
unsafe fn record_last(wait: &PeerWait, needed: u64, seen: u64) {
    wait.note_late();
    let (mut last, mut least) = (wait.peer, seen);
    for peer in 0..wait.comm.num_ranks {
        no_unroll();
        let seen = done_of(ld_relaxed_sys_u64(done_word(wait.comm, peer)));
        if seen < least {
            (last, least) = (peer, seen);
        }
    }
    wait.of(last).record(needed, least);
}
