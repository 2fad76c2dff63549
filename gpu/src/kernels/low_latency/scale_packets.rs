//! Dispatches within a node, of few tokens of few ranks, whose scales travel as packets.
//!
//! A block has one token there. Its scales have their places far apart, in a table `[scales, rows]`,
//! and as words they would take a third of the time that the row takes on the links. Packets lie side
//! by side: 19 of 16 bytes for 56 scales. Receivers put the scales into the table while rows are still
//! on their way. Ranks decide alike, by [`has_scale_packets`](crate::layout::has_scale_packets).
//!
//! These are kernels of their own: as a branch of [`LowLatencyDispatch`](super::LowLatencyDispatch)
//! they cost calls of more tokens 0.5 us.
//!
//! Soundness: as in `dispatch.rs`. A packet of scales has one writer, one warp of one rank, and is
//! read together with its epoch. A scale in the table has one writer, a warp of the receiving rank:
//! the one that places its row's packets or, by expert, the one that copies its piece of the row.

use super::super::peer_wait::PeerWait;
use super::dispatch::{dispatch, dispatch_by_expert, most_ranks};
use super::ranks::{Few, Ranks, each_pool};
use super::team::Team;
use super::{NodeShared, Scales, id_packets, ids_offset, packet_seen};
use crate::layout::{
    FEW_RANKS, LowLatencyArgs, LowLatencyDispatchArgs, LowLatencyExpertDispatchArgs, LowLatencyExpertRows,
    Quantise, SCALE_PACKET_BYTES, SCALES_IN_PACKET, Wait, has_scale_packets, scale_packets,
    sends_scale_packets,
};
use crate::simt::*;

/// The same as [`LowLatencyDispatch`](super::LowLatencyDispatch), of rows whose scales travel as
/// packets.
#[kernel(
    threads = 512, barriers = 11, registers = 128, dependent,
    block = 512, shared = super::low_latency_dispatch_shared_bytes(&args),
    requires(
        ..LowLatencyArgs(args.common),
        has_scale_packets(args.common.max_tokens, args.common.comm.num_ranks),
        args.common.comm.num_ranks <= FEW_RANKS as u32,
        args.quantise != Quantise::Mxfp8 as u32,
    )
)]
pub unsafe fn low_latency_dispatch_scale_packets(args: LowLatencyDispatchArgs) {
    dispatch::<Few, false, false, true>(&args);
}

/// The same as [`LowLatencyDispatchByExpert`](super::LowLatencyDispatchByExpert), of rows whose scales
/// travel as packets.
#[kernel(
    threads = 512, barriers = 21, registers = 128, dependent,
    block = 512, shared = super::low_latency_by_expert_shared_bytes(&args),
    requires(
        ..LowLatencyArgs(args.dispatch.common),
        ..LowLatencyDispatchArgs(args.dispatch),
        ..LowLatencyExpertRows(args.to),
        has_scale_packets(args.dispatch.common.max_tokens, args.dispatch.common.comm.num_ranks),
        args.dispatch.common.comm.num_ranks <= FEW_RANKS as u32,
        args.dispatch.quantise != Quantise::Mxfp8 as u32,
    )
)]
pub unsafe fn low_latency_dispatch_by_expert_scale_packets(args: LowLatencyExpertDispatchArgs) {
    dispatch_by_expert::<Few, { most_ranks::<Few>() }, false, true>(&args);
}

/// Where a packet of a row's scales is in every pool, in bytes from the pool's start.
#[device]
fn packet_offset(args: &LowLatencyDispatchArgs, row: u32, packet: u32) -> u64 {
    let number = row * scale_packets(args.row_scales()) + packet;
    args.common.place.scale_packets + number as u64 * SCALE_PACKET_BYTES as u64
}

/// Sends the scales of `count` tokens from `first` on, of which `scales` has the ranks, and the
/// scales if rows are quantised on their way. All threads of the team call it, behind a barrier: a
/// warp has a token, the last one the first.
#[device]
pub(super) unsafe fn send<R: Ranks>(
    args: &LowLatencyDispatchArgs,
    moves: Team<2>,
    first: u32,
    count: u32,
    scales: Scales<R>,
    epoch: u64,
) {
    let (number, num_scales) = (moves.warps() - 1 - moves.warp(), args.row_scales());
    if number >= count {
        return;
    }
    let (token, ranks) = (first + number, scales.ranks(number));
    let row = args.common.comm.rank * args.common.max_tokens + token;
    stride!(packet in laneid()..scale_packets(num_scales), 32 => {
        let mut words = [0, 0, 0, epoch as u32];
        unroll!(3, J => {
            let scale = packet * SCALES_IN_PACKET + J as u32;
            if scale < num_scales {
                words[J] = if args.quantise == Quantise::None as u32 {
                    args.scales.array::<u32>().ld(token * num_scales + scale)
                } else {
                    ld_shared_u32(scales.at(number, scale))
                };
            }
        });
        let offset = packet_offset(args, row, packet);
        each_pool!(R, args.common.comm, ranks, pool => { st_relaxed_sys_b128(pool + offset, words) });
    });
}

/// Puts the scales of received rows into their table, as their packets come: a row to a warp. All
/// threads of the team call it.
///
/// # Safety
/// A row's scales have one warp, which loads packets of this rank's own pool.
#[device]
pub(super) unsafe fn place<R: Ranks, const BARRIER: u32>(
    args: &LowLatencyDispatchArgs,
    team: Team<BARRIER>,
    shared: &NodeShared<R>,
    epoch: u64,
) {
    let (common, num_scales, lane) = (&args.common, args.row_scales(), laneid());
    let (pool, rows) = (R::pool(&common.comm, common.comm.rank), common.comm.num_ranks * common.max_tokens);
    let table = Global::<u32>::new(pool + common.place.recv_scales);
    let mut come = false;
    unroll!(8, SOURCE => { come |= sends_scale_packets(shared.tokens.ld(SOURCE as u32)) });
    if !come {
        return;
    }
    // From the last warp on: the first ones list rows.
    let first = (team.warps() - 1 - team.warp()) * nctaid() + nctaid() - 1 - ctaid();
    stride!(number in first..shared.all_tokens(), team.warps() * nctaid() => {
        let (source, token) = shared.find(number);
        let row = source * common.max_tokens + token;
        let packets = scale_packets(num_scales);
        let at = |packet| pool + packet_offset(args, row, packet);
        // Loads that are in flight together.
        let mut seen = ld_relaxed_sys_b128(at(lane.min(packets - 1)));
        if sends_scale_packets(shared.tokens.ld(source)) && has_entries(args, pool, row, source, epoch) {
            stride!(packet in lane..packets, 32 => {
                if packet != lane {
                    seen = ld_relaxed_sys_b128(at(packet));
                }
                // Scales that do not come are recorded as an error.
                let wait = PeerWait::new(&common.comm, source, epoch, Wait::LowLatencyRows);
                if let Some(words) = wait_packet(wait, at(packet), seen) {
                    unroll!(3, J => {
                        let scale = packet * SCALES_IN_PACKET + J as u32;
                        if scale < num_scales {
                            table.st(row_major(scale, rows, row), words[J]);
                        }
                    });
                }
            });
        }
    });
}

/// Whether a received row has entries for local experts: only then it comes. The whole warp calls it.
#[device]
unsafe fn has_entries(args: &LowLatencyDispatchArgs, pool: u64, row: u32, source: u32, epoch: u64) -> bool {
    let (common, lane, mut has) = (&args.common, laneid(), false);
    if lane < id_packets(common) {
        let at = Global::<u64>::new(pool + common.place.ids + ids_offset(common, row)).at(lane);
        let seen = ld_relaxed_sys_u64(at);
        // A packet that does not come names no expert.
        let ids = packet_seen(&common.comm, at, seen, source, epoch, Wait::LowLatencyIds).unwrap_or(u32::MAX);
        has = ids & 0xffff != 0xffff || ids >> 16 != 0xffff;
    }
    ballot(has) != 0
}

/// Waits for the packet at `at`, of which `seen` was loaded before; `None` when the wait expired.
///
/// # Safety
/// The address is live.
#[device]
unsafe fn wait_packet(mut wait: PeerWait, at: u64, seen: [u32; 4]) -> Option<[u32; 3]> {
    let [mut a, mut b, mut c, mut epoch] = seen;
    while epoch != wait.epoch as u32 {
        if wait.has_expired() {
            wait.record(wait.epoch, epoch as u64);
            return None;
        }
        [a, b, c, epoch] = ld_relaxed_sys_b128(at);
    }
    Some([a, b, c])
}

/// A scale of a row whose word for its chunk has come, which releases its packets too.
///
/// # Safety
/// The packet is in `pool`, this rank's own.
#[device]
pub(super) unsafe fn scale(args: &LowLatencyDispatchArgs, pool: u64, row: u32, scale: u32) -> f32 {
    let packet = pool + packet_offset(args, row, scale / SCALES_IN_PACKET);
    Global::<f32>::new(packet).ld(scale % SCALES_IN_PACKET)
}
