//! Dispatch and combine beside another library of the same process. Its allocations, frees, module
//! loads and copies wait for running kernels, and block every other call of the device meanwhile.

use std::time::Duration;

use epoxide::transport::TransportKind;
use epoxide_testing::neighbour::Neighbour;

use crate::turns::{Inputs, ROW, Turn, check_sums, echo};
use epoxide_testing::harness::{NodeLinks, Setup};
use epoxide_testing::tier;

const RANKS: u32 = 4;
const TOKENS: [u32; RANKS as usize] = [6, 4, 5, 3];
const CHANNELS: u32 = 2;
/// Between two calls of each of its threads; an interpreter's processors have other things to do as
/// well.
const PAUSE: Duration = Duration::from_millis(2);

fn pairs_beside_a_neighbour(nodes: Option<NodeLinks>) {
    let setup = Setup::new(RANKS, CHANNELS, 6, ROW).nodes(nodes);
    let rounds = setup.run(|rank| {
        let neighbour = Neighbour::start(rank.device(), PAUSE);
        let mut place = rank.place()?;
        for number in 0..tier::pick(2, 20) {
            let turn = Turn::random(number, &TOKENS, CHANNELS);
            let inputs = Inputs::upload(&turn, rank)?;
            let (_, back) = echo(rank, &mut place, &inputs)?;
            rank.stream.synchronize()?;
            check_sums(rank, "combined_x", &back, &turn)?;
        }
        rank.buffer.check()?;
        neighbour.stop()
    });
    assert!(rounds.iter().all(|rounds| *rounds > 0), "{rounds:?}");
}

fn across_nodes(transport: TransportKind) {
    pairs_beside_a_neighbour(Some(NodeLinks { ranks_per_node: 2, transport, queues: 2 }));
}

#[test]
fn within_a_node() {
    pairs_beside_a_neighbour(None);
}

#[test]
fn into_mapped_memory() {
    across_nodes(TransportKind::Direct);
}

#[test]
fn over_shared_host_memory() {
    across_nodes(TransportKind::Shm);
}

#[test]
fn over_tcp() {
    across_nodes(TransportKind::Tcp);
}
