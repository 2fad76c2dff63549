//! The wait between the halves of an operation, and how long it took for each rank.
//!
//! It stands between the halves of an operation whose waits are measured. The kernels of the halves
//! are those of any other operation, so that measuring costs others nothing. What this kernel has
//! seen, the second half polls again.
//!
//! Soundness: all words are in this rank's own memory, and are only read. Each time of the caller's
//! has one thread. The conditions around a barrier are the same in all threads of a block.

use super::super::epoch::add_wait;
use super::super::peer_wait::PeerWait;
use super::internode::{is_message_here, wait_message_alone};
use super::ranks::{Few, Many, Ranks};
use super::{Opened, Opening, Piece, begin, call_of, chunk_offset, chunks_of, in_packets};
use crate::layout::{
    Comm, FEW_RANKS, LowLatencyArgs, LowLatencyCall, LowLatencyWaitArgs, PIECE_PACKET_BYTES, Wait, pieces_of,
};
use crate::simt::*;

few_and_many! {
    kernel(threads = 128, barriers = 4, registers = 64, grid = args.common.comm.num_ranks, block = 128);
    few(shared = super::LOW_LATENCY_SHARED_BYTES) many(shared = super::LOW_LATENCY_MANY_SHARED_BYTES);
    requires(..LowLatencyArgs(args.common));
    ranks(args.common.comm);
    fn(args: LowLatencyWaitArgs);

    /// Waits until all that other ranks have sent in the operation is here, a rank to a block, and adds
    /// the time that each was late to the caller's. A rank whose rows are here at the first look is not
    /// late.
    low_latency_wait, low_latency_wait_many<R> { wait::<R>(&args) }
}

#[device]
unsafe fn wait<R: Ranks>(args: &LowLatencyWaitArgs) {
    let (common, source, start) = (&args.common, ctaid(), globaltimer());
    let opened = open::<R>(args);
    if source == common.comm.rank || !opened.has_member(source) {
        return;
    }
    if !barrier_any(!is_here::<R, false>(args, &opened, source)) {
        return;
    }
    is_here::<R, true>(args, &opened, source);
    barrier_sync();
    if tid() == 0 {
        add_wait(args.waited, source, start);
    }
}

/// The same across nodes, where a rank's message is here with its packet.
#[kernel(
    threads = 32, barriers = 2, registers = 64,
    grid = args.common.comm.num_ranks, block = 32, shared = super::LOW_LATENCY_SHARED_BYTES,
    requires(..LowLatencyArgs(args.common))
)]
pub unsafe fn low_latency_internode_wait(args: LowLatencyWaitArgs) {
    let (common, source, start) = (&args.common, ctaid(), globaltimer());
    let opened = open::<Few>(&args);
    let epoch = opened.epoch();
    let waits = source != common.comm.rank && opened.has_member(source) && tid() == 0;
    if waits && !is_message_here(&args.messages, source, epoch) {
        wait_message_alone(&common.comm, &args.messages, source, epoch);
        add_wait(args.waited, source, start);
    }
}

/// The operation that the first half has begun.
///
/// # Safety
/// As of [`begin`].
#[device]
unsafe fn open<R: Ranks>(args: &LowLatencyWaitArgs) -> Opened<R> {
    let (common, words) = (&args.common, R::shared().opened);
    if args.is_combine != 0 {
        begin::<R, true>(common, &Opening::load::<true>(common, tid() == 0), words)
    } else {
        begin::<R, false>(common, &Opening::load::<false>(common, tid() == 0), words)
    }
}

/// Whether this thread's share of what the source sends is here. `WAITS`: waits for it; false when
/// a wait expired, which is recorded. Nothing will come of a source that makes another call, which
/// the second half records.
///
/// # Safety
/// Words are in this rank's own memory, and guard nothing that is read here.
#[device]
unsafe fn is_here<R: Ranks, const WAITS: bool>(
    args: &LowLatencyWaitArgs,
    opened: &Opened<R>,
    source: u32,
) -> bool {
    let (common, epoch) = (&args.common, opened.epoch());
    let Some(call) = its_call::<R, WAITS>(&common.comm, source, epoch) else { return false };
    if (call ^ common.comm.call as u32) & !LowLatencyCall::TOKEN_BITS != 0 {
        return true;
    }
    if args.is_combine == 0 {
        let tokens = (call & LowLatencyCall::TOKEN_BITS).min(common.max_tokens);
        return has_chunks::<R, WAITS>(
            common,
            common.place.arrived,
            source,
            tokens,
            epoch,
            Wait::LowLatencyRows,
        );
    }
    if args.row_bytes == 0 {
        return true;
    }
    if in_packets(common, common.num_tokens) {
        return has_pieces::<R, WAITS>(args, source, epoch);
    }
    let returned = common.place.returned;
    has_chunks::<R, WAITS>(common, returned, source, common.num_tokens, epoch, Wait::LowLatencyReturned)
}

/// The call of the source, once it has entered the operation.
///
/// # Safety
/// As of [`is_here`].
#[device]
unsafe fn its_call<R: Ranks, const WAITS: bool>(comm: &Comm, source: u32, epoch: u64) -> Option<u32> {
    let packet = call_of::<R>(comm, source, epoch);
    if WAITS {
        return PeerWait::new(comm, source, epoch, Wait::LowLatencyEnter).packet::<false>(packet);
    }
    let seen = ld_relaxed_sys_u64(packet);
    if (seen >> 32) as u32 == epoch as u32 { Some(seen as u32) } else { None }
}

/// Whether the thread's chunks of `tokens` tokens are here, by the words `words` of the place.
///
/// # Safety
/// As of [`is_here`].
#[device]
unsafe fn has_chunks<R: Ranks, const WAITS: bool>(
    args: &LowLatencyArgs,
    words: u64,
    source: u32,
    tokens: u32,
    epoch: u64,
    what: Wait,
) -> bool {
    let comm = &args.comm;
    let words = R::pool(comm, comm.rank) + words;
    let mut are_here = true;
    stride!(chunk in tid()..chunks_of(args, tokens), ntid() => {
        let word = words + chunk_offset(args, source, chunk);
        are_here &= if WAITS {
            PeerWait::new(comm, source, epoch, what).at_least(word, epoch)
        } else {
            ld_relaxed_sys_u64(word) >= epoch
        };
    });
    are_here
}

/// Whether the pieces that the source returns of the thread's tokens are here: of each, its last
/// packet. The second half of the combine waits for the others.
///
/// # Safety
/// As of [`is_here`]; a dispatch that an earlier kernel has completed wrote the table of ranks.
#[device]
unsafe fn has_pieces<R: Ranks, const WAITS: bool>(
    args: &LowLatencyWaitArgs,
    source: u32,
    epoch: u64,
) -> bool {
    let (common, comm) = (&args.common, &args.common.comm);
    let packets = R::pool(comm, comm.rank) + common.place.returned_packets;
    stride!(token in tid()..common.num_tokens, ntid() => {
        let ranks = common.tables.token_ranks.array::<R>().ld(token);
        let mut index = 0;
        while ranks.has(source) && index < pieces_of(args.row_bytes) {
            let piece = Piece { rank: source, token, index };
            let last = piece.offset(common, args.row_bytes, source) + PIECE_PACKET_BYTES as u64 - 16;
            let mut wait = PeerWait::new(comm, source, epoch, Wait::LowLatencyReturned);
            loop {
                let [.., seen] = ld_relaxed_sys_b128(packets + last);
                if seen == epoch as u32 {
                    break;
                }
                if !WAITS {
                    return false;
                }
                if wait.has_expired() {
                    wait.record(epoch, seen as u64);
                    return false;
                }
            }
            index += 1;
        }
    });
    true
}
