//! Traffic of the network: each token once to each node with a destination, and one sum of each
//! such node back.

use epoxide::DType;
use epoxide::driver::virt::{CheckConfig, Checker};
use epoxide::internal::Instruments;
use epoxide::throughput::{CachedDispatchRequest, CombineRequest, DispatchRequest};
use epoxide::transport::TransportKind;
use epoxide_testing::oracle::{self, Routing, Style};
use epoxide_testing::payload::rng_of;
use epoxide_testing::roundtrip::Case;

use crate::turns::{HIDDEN, Inputs, ROW, TOPK, Turn, echo};
use epoxide_testing::harness::{NodeLinks, PATIENCE, Rank, Setup};

const CHANNELS: u32 = 3;
/// Bytes of a slot: a cache line. A row has 48, and its metadata in a dispatch without top-k as many:
/// an index for each of 8 ranks, and the token's own, in 16.
const SLOT: u64 = 128;

/// Bytes that this rank has put on the wire so far, by node.
fn bytes_sent(rank: &Rank, nodes: u32, ranks_per_node: u32) -> Vec<u64> {
    let mut bytes = vec![0; nodes as usize];
    for (peer, _, stats) in rank.buffer.wire_stats() {
        assert_eq!(peer % ranks_per_node, rank.rank % ranks_per_node, "ranks talk to those with their index");
        bytes[(peer / ranks_per_node) as usize] += stats.bytes;
    }
    bytes
}

#[test]
fn the_wire_carries_the_rows_of_the_layout() {
    for (nodes, ranks_per_node) in [(2, 2), (3, 1), (3, 2)] {
        let ranks = nodes * ranks_per_node;
        let tokens: Vec<u32> = (0..ranks).map(|rank| [9, 0, 20, 3][rank as usize % 4]).collect();
        let spread = NodeLinks { ranks_per_node, transport: TransportKind::Tcp, queues: 2 };
        let setup = Setup::new(ranks, CHANNELS, 20, ROW).nodes(Some(spread));
        let turns: Vec<Turn> = (0..4).map(|seed| Turn::random(seed, &tokens, CHANNELS)).collect();
        setup.run(|rank| {
            let own = rank.rank / ranks_per_node;
            let sent = |rank: &Rank| bytes_sent(rank, nodes, ranks_per_node);
            let mut counts = Vec::new();
            let mut place = rank.place()?;
            for turn in &turns {
                let plan =
                    oracle::InternodeOracle::new(&turn.routing, ranks_per_node).plan(rank.rank, CHANNELS);
                let inputs = Inputs::upload(turn, rank)?;
                let layout = inputs.layout(rank)?;
                if let Some(counted) = layout.num_tokens_per_rdma_rank() {
                    let mut counted: Vec<u32> = rank.values(&counted)?;
                    counted[own as usize] = 0;
                    rank.equal("tokens for other nodes", &counted, &plan.wire_sent);
                }

                let before = sent(rank);
                let handle = rank.dispatch(&mut place, DispatchRequest::new(&inputs.x, &layout))?.handle;
                rank.synchronize()?;
                let first = sent(rank);
                let request = CachedDispatchRequest::new(&inputs.x, &handle);
                let output = rank.dispatch_cached(&mut place, request)?;
                rank.synchronize()?;
                let cached = sent(rank);
                let rows = output.combine_rows(DType::Bf16, HIDDEN as u64)?;
                rank.combine(CombineRequest::new(&rows, &handle))?;
                rank.synchronize()?;
                let combined = sent(rank);

                // Rows and nothing else, so their number is that of the bytes.
                let want = times(&plan.wire_sent, SLOT);
                rank.equal("bytes of a cached dispatch", &difference(&cached, &first), &want);
                let want = times(&plan.wire_received, SLOT);
                rank.equal("bytes of a combine", &difference(&combined, &cached), &want);
                // A dispatch sends its counts as well, in a message of the same size to every other
                // node.
                let rows = times(&plan.wire_sent, SLOT);
                let other = difference(&difference(&first, &before), &rows);
                counts.extend((0..nodes).zip(other).filter(|(node, _)| *node != own).map(|(_, bytes)| bytes));
            }
            let is_message = |bytes: &u64| *bytes > 0 && *bytes == counts[0];
            rank.check(counts.iter().all(is_message), format!("count messages: {counts:?}"));
            Ok(())
        });
    }
}

#[test]
fn one_node_has_no_wire() {
    let turn = Turn::random(1, &[5, 3], 1);
    let spread = NodeLinks { ranks_per_node: 2, transport: TransportKind::Shm, queues: 2 };
    Setup::new(2, 1, 5, ROW).max_topk(TOPK).nodes(Some(spread)).run(|rank| {
        let (inputs, mut place) = turn.begin(rank)?;
        echo(rank, &mut place, &inputs)?;
        rank.synchronize()?;
        rank.check(rank.buffer.wire_stats().is_empty(), "there is no queue");
        Ok(())
    });
}

/// Over shm kernels store slots and words in the peers' host memory: nothing is put, and no slot is
/// stored to be sent. Even blocks send and wait for other nodes to enter. Odd blocks receive, and
/// only they load arrival words.
#[test]
fn kernels_write_shared_host_memory() {
    let routing = Routing::random(&mut rng_of(&[33]), &[9, 0, 14, 5], 6, 8, Style::WithHoles);
    let spread = NodeLinks { ranks_per_node: 2, transport: TransportKind::Shm, queues: 2 };
    let case = Case { nodes: Some(spread), num_channels: 3, ..Case::new(routing, 256) };
    let checker = Checker::new(CheckConfig::default());
    checker.count_stores();
    checker.count_loads();
    let mut setup = case.setup();
    setup.device.checker = Some(checker.clone());
    setup.run(|rank| {
        rank.round_trip(&case)?;
        rank.check(rank.buffer.wire_stats().is_empty(), "there is no queue");
        // All memory still exists.
        rank.group.barrier(PATIENCE)?;
        if rank.rank == 0 {
            let on_wire = |memory: &str| memory.contains("wire memory") && memory != "own wire memory";
            let mut stored = checker.stores();
            stored.retain(|it| on_wire(&it.memory));
            for part in ["slots_in", "arrived", "ready", "messages_in"] {
                let of_part = || stored.iter().filter(|it| it.part.starts_with(part));
                assert!(of_part().count() > 0, "{part}: {stored:?}");
                assert!(of_part().all(|it| it.by != it.on && it.by % 2 == it.on % 2), "{part}: {stored:?}");
            }
            assert!(stored.iter().all(|it| !it.part.ends_with("_out")), "{stored:?}");

            let moves = |kernel: &str| ["internode_dispatch", "internode_combine"].contains(&kernel);
            let mut loaded = checker.loads();
            loaded.retain(|it| on_wire(&it.memory) && moves(&it.kernel));
            for (part, parity) in [("ready", 0), ("arrived", 1)] {
                let of_part = || loaded.iter().filter(|it| it.part.starts_with(part));
                assert!(of_part().count() > 0, "{part}: {loaded:?}");
                assert!(of_part().all(|it| it.block % 2 == parity), "{part}: {loaded:?}");
            }
        }
        rank.group.barrier(PATIENCE)
    });
}

/// # Panics
/// A count decreased.
fn difference(after: &[u64], before: &[u64]) -> Vec<u64> {
    let minus = |(after, before): (&u64, &u64)| after.checked_sub(*before).expect("no fewer bytes than rows");
    after.iter().zip(before).map(minus).collect()
}

fn times(counts: &[u32], bytes: u64) -> Vec<u64> {
    counts.iter().map(|&count| u64::from(count) * bytes).collect()
}
