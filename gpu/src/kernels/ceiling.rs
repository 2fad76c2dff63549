//! The links' ceiling: the bulk copies of dispatch (push) and combine (pull) without routing,
//! metadata or sums. Every benchmark can quote its own ceiling by them.
//!
//! Soundness: rows are read at `from` and written at `to` of pools. The launcher keeps the two
//! areas apart, and no other kernel uses either meanwhile. Each row written has one writer. A stage
//! is loaded again once the stores from it have read it, and the block ends once all of them have
//! landed. Collectives stand where all lanes of a warp arrive: every condition around them is the
//! same in all lanes.

use super::ring::{Ring, Turn};
use crate::layout::CeilingArgs;
use crate::simt::*;

/// Loads each of `rows` local rows once and stores it to `fanout` peers.
#[kernel(
    threads = 512, registers = 64, block >= 32,
    shared = crate::layout::shared_with_rings(block / 32, args.stages, args.row_bytes, 0)
)]
pub unsafe fn ceiling_push(args: CeilingArgs) {
    let (lane, step) = (laneid(), nctaid() * (ntid() / 32));
    let first = ctaid() * (ntid() / 32) + tid() / 32;
    let ring = Ring::new(args.stages, args.row_bytes, ntid() / 32);
    let pool = if lane < args.num_ranks { args.pools.ld(lane) } else { 0 };
    let from = DevicePtr(shfl_u64(pool, args.rank) + args.from);

    let (mut load, mut loaded) = (first, 0);
    while loaded < args.stages && load < args.rows {
        keep_loop();
        if lane == 0 {
            ring.load(loaded, from.row(load, args.row_bytes), args.row_bytes);
        }
        (load, loaded) = (load + step, loaded + 1);
    }
    let (mut turn, mut previous) = (Turn::first(), 0);
    stride!(row in first..args.rows, step => {
        assume(args.num_ranks - 1 != 0);
        let peer = (args.rank + 1 + (row + lane) % (args.num_ranks - 1)) % args.num_ranks;
        let to = DevicePtr(shfl_u64(pool, peer) + args.to);
        let to = to.row(args.rank * args.rows + row, args.row_bytes);
        ring.wait(&turn);
        if lane < args.fanout {
            bulk_store(to, ring.buffer(turn.slot), args.row_bytes);
        }
        bulk_commit();
        if load < args.rows && row != first {
            bulk_wait_read::<1>();
            syncwarp();
            if lane == 0 {
                ring.load(previous, from.row(load, args.row_bytes), args.row_bytes);
            }
            load += step;
        }
        previous = turn.slot;
        turn.advance(&ring);
    });
    bulk_wait::<0>();
}

/// Loads each of `rows` rows from `fanout` peers and stores them locally.
#[kernel(
    threads = 512, registers = 64, block >= 32,
    shared = crate::layout::shared_with_rings(block / 32, args.stages, args.row_bytes, 0)
)]
pub unsafe fn ceiling_pull(args: CeilingArgs) {
    let (lane, step) = (laneid(), nctaid() * (ntid() / 32));
    let first = ctaid() * (ntid() / 32) + tid() / 32;
    let ring = Ring::new(args.stages, args.row_bytes, ntid() / 32);
    let pool = if lane < args.num_ranks { args.pools.ld(lane) } else { 0 };
    let own = shfl_u64(pool, args.rank);
    let pieces = args.rows * args.fanout;

    // Lane 0 loads; the address is a matter of the whole warp.
    let fetch = |slot: u32, piece: u32| {
        assume(args.num_ranks - 1 != 0);
        let (row, turned) = (piece / args.fanout, piece % args.fanout);
        let peer = (args.rank + 1 + (row + turned) % (args.num_ranks - 1)) % args.num_ranks;
        let from = DevicePtr(shfl_u64(pool, peer) + args.from).row(row, args.row_bytes);
        if lane == 0 {
            ring.load(slot, from, args.row_bytes);
        }
    };
    let (mut load, mut loaded) = (first, 0);
    while loaded < args.stages && load < pieces {
        fetch(loaded, load);
        (load, loaded) = (load + step, loaded + 1);
    }
    let (mut turn, mut previous) = (Turn::first(), 0);
    stride!(piece in first..pieces, step => {
        ring.wait(&turn);
        if lane == 0 {
            let to = DevicePtr(own + args.to).row(piece, args.row_bytes);
            bulk_store(to, ring.buffer(turn.slot), args.row_bytes);
        }
        bulk_commit();
        if load < pieces && piece != first {
            bulk_wait_read::<1>();
            fetch(previous, load);
            load += step;
        }
        previous = turn.slot;
        turn.advance(&ring);
    });
    bulk_wait::<0>();
}
