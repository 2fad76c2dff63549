//! Traffic of the network: each token once to each node with a destination, and one sum of each
//! such node back.

use epoxide::DType;
use epoxide::internal::Instruments;
use epoxide::throughput::{CachedDispatchRequest, CombineRequest, DispatchRequest};
use epoxide::transport::TransportKind;
use epoxide_testing::oracle;

use epoxide_gpu::layout::{SlotShape, combine_slot_bytes};

use crate::turns::{HIDDEN, Inputs, ROW, TOPK, Turn, echo};
use epoxide_testing::harness::{NodeLinks, Rank, Setup};

const CHANNELS: u32 = 3;

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
    for (nodes, ranks_per_node, transport) in
        [(2, 2, TransportKind::Shm), (3, 1, TransportKind::Tcp), (3, 2, TransportKind::Shm)]
    {
        let ranks = nodes * ranks_per_node;
        let tokens: Vec<u32> = (0..ranks).map(|rank| [9, 0, 20, 3][rank as usize % 4]).collect();
        let spread = NodeLinks { ranks_per_node, transport, queues: 2 };
        let setup = Setup::new(ranks, CHANNELS, 20, ROW).nodes(Some(spread));
        let turns: Vec<Turn> = (0..4).map(|seed| Turn::random(seed, &tokens, CHANNELS)).collect();
        setup.run(|rank| {
            let own = rank.rank / ranks_per_node;
            let sent = |rank: &Rank| bytes_sent(rank, nodes, ranks_per_node);
            let row_bytes = ROW as u32;
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
                let slot = u64::from(SlotShape::new(row_bytes, 0, None).bytes);
                let want = times(&plan.wire_sent, slot);
                rank.equal("bytes of a cached dispatch", &difference(&cached, &first), &want);
                let slot = u64::from(combine_slot_bytes(row_bytes, 0));
                let want = times(&plan.wire_received, slot);
                rank.equal("bytes of a combine", &difference(&combined, &cached), &want);
                // A dispatch sends its counts as well, in a message of the same size to every other
                // node.
                let slot = u64::from(SlotShape::new(row_bytes, 0, Some(0)).bytes);
                let rows = times(&plan.wire_sent, slot);
                let other = difference(&difference(&first, &before), &rows);
                counts.extend((0..nodes).zip(other).filter(|(node, _)| *node != own).map(|(_, bytes)| bytes));
            }
            rank.check(counts.iter().all(|bytes| *bytes == counts[0]), format!("count messages: {counts:?}"));
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

/// # Panics
/// Where something was more before than after.
fn difference(after: &[u64], before: &[u64]) -> Vec<u64> {
    let minus = |(after, before): (&u64, &u64)| after.checked_sub(*before).expect("no fewer bytes than rows");
    after.iter().zip(before).map(minus).collect()
}

fn times(counts: &[u32], bytes: u64) -> Vec<u64> {
    counts.iter().map(|&count| u64::from(count) * bytes).collect()
}
