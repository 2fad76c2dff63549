//! Readers of received rows: what keeps the rows' memory, and which calls wait.

use std::time::Duration;

use epoxide::driver::virt::VirtConfig;
use epoxide::driver::{Event, Stream};
use epoxide::low_latency::{Options, Shape};
use epoxide::transport::{TransportKind, TransportOptions};
use epoxide_testing::harness::{PATIENCE, keep, open_device, run_ranks};
use half::bf16;

use super::ones::{Ones, numbers};
use crate::gate::Gate;

const HIDDEN: u64 = 16;
const SHAPE: Shape = Shape { max_tokens: 2, hidden: HIDDEN, num_topk: 2, num_experts: 2 };
/// The ids of two tokens: each goes to both ranks.
const TO_BOTH: [i64; 4] = [0, 1, 1, 0];

fn across_nodes(options: Options) -> Options {
    options.ranks_per_node(1).keep_nodes().transport(TransportOptions::new(TransportKind::Tcp))
}

#[test]
fn received_rows_outlive_their_buffer() {
    for spread in [|options| options, across_nodes] {
        run_ranks(2, |ordinal, group| {
            let device = open_device(VirtConfig { ordinal, ..VirtConfig::default() })?;
            let mut rank = Ones::new(device, group.clone(), SHAPE, spread, &TO_BOTH)?;
            let mut place = rank.buffer.place(0)?;
            let received = rank.dispatch(&mut place)?.detach();
            rank.outcome()?;
            group.barrier(PATIENCE)?;
            let Ones { stream, buffer, .. } = rank;
            drop(buffer);
            assert_eq!(received.at(&place)?.x.to_host::<bf16>(&stream)?, numbers(4 * HIDDEN, 1.0));
            group.barrier(PATIENCE)
        });
    }
}

/// Rank 1 may store other rows once rank 0 has entered the combine.
#[test]
fn a_combine_waits_for_readers_of_a_clone_of_its_rows() {
    run_ranks(2, |ordinal, group| {
        let device = open_device(VirtConfig { ordinal, ..VirtConfig::default() })?;
        let (gate, side) = (Gate::new(&device)?, Stream::new(&device)?);
        let mut rank = Ones::new(device, group.clone(), SHAPE, |options| options, &TO_BOTH)?;
        let mut place = rank.buffer.place(0)?;
        let received = rank.dispatch(&mut place)?;
        if rank.rank == 0 {
            let rows = received.x.clone();
            gate.hold(&side)?;
            let kept = keep(&side, &rows, 4)?;
            drop(rank.combine(received)?);
            let combined = Event::new(rank.stream.device())?;
            combined.record(&rank.stream)?;
            assert!(!combined.wait_timeout(Duration::from_millis(50))?, "the combine has not waited");
            gate.open();
            assert_eq!(kept.to_host::<bf16>(&side)?, numbers(4 * HIDDEN, 1.0));
        } else {
            drop(rank.combine(received)?);
        }
        rank.x.write(&rank.stream, &numbers(2 * HIDDEN, 2.0))?;
        drop(rank.dispatch(&mut place)?);
        rank.outcome()?;
        group.barrier(PATIENCE)
    });
}
