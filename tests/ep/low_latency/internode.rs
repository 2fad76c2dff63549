//! Low latency across nodes: the same calls and the same results over any transport.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use epoxide::driver::virt::{CheckConfig, Checker, VirtConfig, VirtualGpu};
use epoxide::internal::Instruments;
use epoxide::internal::transport::Shaping;
use epoxide::low_latency::{Buffer, Options, Quantise, Shape};
use epoxide::transport::{TransportKind, TransportOptions};
use epoxide::{Error, Result};
use epoxide_testing::harness::{NodeLinks, PATIENCE, run_ranks, sleep};
use epoxide_testing::low_latency::{LowLatencyCase, ReturnPath};
use epoxide_testing::oracle::Style;
use epoxide_testing::tier;

use super::ones::Ones;
use crate::shapes::routing;

fn nodes(ranks_per_node: u32, transport: TransportKind) -> Option<NodeLinks> {
    Some(NodeLinks { ranks_per_node, transport, queues: 1 })
}

#[test]
fn two_nodes_of_two() {
    use TransportKind::{Auto, Direct, Shm, Tcp};
    for transport in tier::sample([Shm, Direct, Tcp, Auto]) {
        let case = LowLatencyCase::new(routing(&[9, 5, 0, 12], 3, 8, Style::DistinctTopK), 24);
        LowLatencyCase { nodes: nodes(2, transport), rounds: 3, ..case }.check();
    }
}

#[test]
fn quantised_either_way() {
    const ALL: [Quantise; 3] = [Quantise::None, Quantise::Fp8, Quantise::Fp8PowerOfTwo];
    let each = ALL.into_iter().flat_map(|there| ALL.map(|back| (there, back)));
    let all = each.flat_map(|each| [(each, ReturnPath::ByExpert), (each, ReturnPath::ByRow)]);
    // Every fifth in the default tier: each kind in either direction, by expert and not.
    for ((quantise, quantise_back), combine_rows) in all.step_by(tier::pick(5, 1)) {
        let case = LowLatencyCase::new(routing(&[6, 5, 3], 2, 6, Style::DistinctTopK), 384);
        let nodes = nodes(1, TransportKind::Tcp);
        LowLatencyCase { nodes, quantise, quantise_back, combine_rows, ..case }.check();
    }
}

#[test]
fn many_ranks() {
    // More than fit in one node, and as many as there may be.
    for (ranks, ranks_per_node) in tier::sample([(12, 4), (16, 8), (32, 8), (32, 1)]) {
        let tokens: Vec<u32> = (0..ranks).map(|rank| rank % 4).collect();
        let case = LowLatencyCase::new(routing(&tokens, 5, 2 * ranks, Style::WithHoles), 16);
        LowLatencyCase { nodes: nodes(ranks_per_node, TransportKind::Direct), sm_count: 1, ..case }.check();
    }
}

#[test]
fn more_ranks_than_there_may_be() {
    run_ranks(33, |rank, group| {
        let device = VirtualGpu::new(VirtConfig { ordinal: rank, ..VirtConfig::default() });
        let options = Options::new(Shape { max_tokens: 1, hidden: 8, num_topk: 1, num_experts: 33 })
            .ranks_per_node(3)
            .keep_nodes();
        let error = Buffer::new(device, &*group, options).unwrap_err().to_string();
        assert!(error.contains("at most 32 ranks"), "{error}");
        Ok(())
    });
}

/// Only block 0 of a kernel polls words in host memory, however long it waits. The other blocks
/// load only rows of messages from there. Each load from host memory takes the device microseconds,
/// one after the other.
#[test]
fn only_the_first_block_polls_host_memory() {
    const TOKENS: u64 = 4;
    /// Polls after which a wait checks for other calls.
    const POLLS: u64 = 64;
    let dispatches = tier::pick(2, 4);
    let checker = Checker::new(CheckConfig { races: false, ..CheckConfig::default() });
    checker.count_loads();
    let case = LowLatencyCase {
        sm_count: 6,
        checker: Some(checker.clone()),
        ..LowLatencyCase::new(routing(&[TOKENS as u32; 3], 3, 6, Style::DistinctTopK), 16)
    };
    let shm = TransportOptions::new(TransportKind::Shm);
    run_ranks(3, |number, group| {
        let options = |options: Options| options.ranks_per_node(1).transport(shm.clone()).timeout(PATIENCE);
        let shape = Shape { max_tokens: TOKENS as u32, hidden: 16, num_topk: 3, num_experts: 6 };
        let ids = case.routing.flat_topk_idx(number);
        let mut rank = Ones::new(case.device(number), group.clone(), shape, options, &ids)?;
        let mut place = rank.buffer.place(0)?;
        // The others poll for rank 1 in each operation, in each step of the ranks' clock.
        let come_late = |rank: &Ones| -> Result<()> {
            rank.group.barrier(PATIENCE)?;
            if rank.rank == 1 {
                sleep(rank.stream.device(), Duration::from_secs(1));
            }
            Ok(())
        };
        for dispatch in 0..dispatches {
            come_late(&rank)?;
            let received = rank.dispatch(&mut place)?;
            rank.outcome()?;
            // A dispatch behind one without a combine waits for the entry of all ranks first.
            if dispatch % 2 == 0 {
                continue;
            }
            come_late(&rank)?;
            let sums = rank.combine(received)?.x.to_host::<half::bf16>(&rank.stream)?;
            assert_eq!(sums, rank.sums(1.0)?);
        }
        group.barrier(PATIENCE)?;
        if number == 0 {
            let mut loads = checker.loads();
            loads.retain(|loaded| loaded.memory == "wire memory");
            let (mut words, mut rows) = (loads.clone(), loads);
            words.retain(|loaded| loaded.part == "words");
            rows.retain(|loaded| loaded.part == "dispatch_in" && loaded.block != 0);
            for by in [0, 2] {
                let polls = words.iter().filter(|loaded| loaded.by == by && loaded.block == 0);
                let polls = polls.map(|loaded| (loaded.kernel.as_str(), loaded.loads));
                let polls: BTreeMap<_, u64> = polls.collect();
                assert_eq!(polls.len(), 2, "dispatches and combines: {polls:?}");
                assert!(polls.values().all(|polls| *polls > 2 * POLLS), "rank {by} did not wait: {polls:?}");
            }
            words.retain(|loaded| loaded.block != 0);
            assert!(words.is_empty(), "{words:?}");
            // A row is two vectors, and a rank gets at most all tokens of the other two. Heads of 14
            // slots at most would be 100 loads and more for each expert.
            let of_rows: u64 = rows.iter().map(|loaded| loaded.loads).sum();
            assert!(of_rows <= 3 * dispatches * 2 * TOKENS * 2, "{of_rows} loads from messages");
        }
        group.barrier(PATIENCE)
    });
}

/// Each operation has one put to each rank of another node. The put has the rank's rows with their
/// metadata, and nothing else.
#[test]
fn one_put_for_each_peer_and_operation() {
    let (hidden, topk, max_tokens) = (256, 4, 9);
    let case = LowLatencyCase::new(routing(&[9, 6, 0, 7], topk, 12, Style::WithHoles), hidden);
    for (quantise, quantise_back) in
        [(Quantise::None, Quantise::Fp8), (Quantise::Fp8, Quantise::None), (Quantise::Mxfp8, Quantise::None)]
    {
        let nodes = nodes(2, TransportKind::Tcp);
        let case = LowLatencyCase { nodes, max_tokens, quantise, quantise_back, ..case.clone() };
        case.run(|rank| {
            rank.round_trip(&case)?;
            // A combine ends when the peers' messages are here, not when the own ones have been
            // counted.
            let start = Instant::now();
            while rank.buffer.wire_stats().iter().any(|(_, _, stats)| stats.puts < 2)
                && start.elapsed() < PATIENCE
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            let number = rank.rank;
            let rows = |from: u32, to: u32| {
                (0..case.routing.num_tokens(from)).filter(|&token| case.routing.hits(from, token, to)).count()
            };
            let bytes =
                |quantise| if quantise == Quantise::None { 2 * hidden } else { hidden + hidden / 128 * 4 };
            let slot = |bytes: u32| u64::from(bytes.next_multiple_of(128));
            let entries = 16 + topk * 8;
            for (peer, _, stats) in rank.buffer.wire_stats() {
                assert_ne!(peer / 2, number / 2);
                let there =
                    128 + rows(number, peer) as u64 * slot(bytes(quantise).next_multiple_of(16) + entries);
                let back = rows(peer, number) as u64 * slot(bytes(quantise_back));
                assert_eq!((stats.puts, stats.bytes), (2, there + back), "rank {number} to {peer}");
            }
            assert_eq!(rank.buffer.wire_stats().len(), 2);
            Ok(())
        });
    }
}

/// Rank 1 has closed its links, and the put of rank 0 fails: the error has the reason.
#[test]
fn the_reason_of_a_failed_put_is_in_the_error() {
    let case = LowLatencyCase::new(routing(&[1, 1], 1, 2, Style::DistinctTopK), 8);
    run_ranks(2, |number, group| {
        let options = |options: Options| {
            let options = options.ranks_per_node(1).transport(TransportOptions::new(TransportKind::Tcp));
            options.timeout(Duration::from_millis(100))
        };
        let shape = Shape { max_tokens: 1, hidden: 8, num_topk: 1, num_experts: 2 };
        let mut rank = Ones::new(case.device(number), group.clone(), shape, options, &[1])?;
        if number == 1 {
            drop(rank);
            return group.barrier(PATIENCE);
        }
        group.barrier(PATIENCE)?;
        let mut place = rank.buffer.place(0)?;
        let received = rank.dispatch(&mut place)?;
        let read = received.x.to_host::<half::bf16>(&rank.stream).unwrap_err();
        for error in [read, rank.buffer.check().unwrap_err()] {
            assert!(matches!(error, Error::PeerTimeout { .. }), "{error}");
            assert!(error.to_string().contains("it said goodbye"), "{error}");
        }
        Ok(())
    });
}

/// The put of rank 0 leaves long after its call has succeeded, and the rank leaves at once.
#[test]
fn a_rank_that_leaves_after_its_call_sends_what_peers_need() {
    for transport in [TransportKind::Tcp, TransportKind::Shm] {
        let case = LowLatencyCase::new(routing(&[1, 1], 1, 2, Style::DistinctTopK), 8);
        run_ranks(2, |number, group| {
            let mut transport = TransportOptions::new(transport);
            let late = || Shaping::new(1).lag(1, 0, Duration::from_secs(1));
            transport.hooks.shaping = (number == 0).then(late);
            let options = |options: Options| options.ranks_per_node(1).transport(transport);
            let shape = Shape { max_tokens: 1, hidden: 8, num_topk: 1, num_experts: 2 };
            let mut rank = Ones::new(case.device(number), group.clone(), shape, options, &[1])?;
            let mut place = rank.buffer.place(0)?;
            drop(rank.dispatch(&mut place)?);
            rank.outcome()?;
            drop(rank);
            group.barrier(PATIENCE)
        });
    }
}

/// Rank 1 leaves, the others regroup, and rank 2 leaves: the error has the reason of the latter.
#[test]
fn the_reason_of_a_rank_that_was_left_out_hides_no_other() {
    let case = LowLatencyCase::new(routing(&[1, 1, 1], 1, 3, Style::DistinctTopK), 8);
    run_ranks(3, |number, group| {
        let options = |options: Options| {
            let options = options.ranks_per_node(1).transport(TransportOptions::new(TransportKind::Tcp));
            options.timeout(Duration::from_millis(100))
        };
        let shape = Shape { max_tokens: 1, hidden: 8, num_topk: 1, num_experts: 3 };
        let rank = Ones::new(case.device(number), group.clone(), shape, options, &[1])?;
        let survivors = group.split((number == 1).into())?;
        let alone = survivors.split(number.into())?;
        let mut rank = Some(rank).filter(|_| number != 1);
        group.barrier(PATIENCE)?;
        let fails = |rank: &mut Ones| -> epoxide::Result<String> {
            let mut place = rank.buffer.place(0)?;
            drop(rank.dispatch(&mut place)?);
            let error = rank.outcome().unwrap_err();
            assert!(matches!(error, Error::PeerTimeout { .. }), "{error}");
            Ok(error.to_string())
        };
        let goodbye = |peer: u32| format!("rank {number} with rank {peer}: it said goodbye");
        if let Some(rank) = &mut rank {
            let error = fails(rank)?;
            assert!(error.contains(&goodbye(1)), "{error}");
            rank.buffer.regroup(&*survivors)?;
        }
        rank = rank.filter(|_| number == 0);
        group.barrier(PATIENCE)?;
        if let Some(rank) = &mut rank {
            let error = fails(rank)?;
            assert!(error.contains(&goodbye(2)) && !error.contains(&goodbye(1)), "{error}");
            rank.buffer.regroup(&*alone)?;
            drop(rank.dispatch(&mut rank.buffer.place(0)?)?);
            rank.outcome()?;
        }
        drop(rank);
        group.barrier(PATIENCE)
    });
}

/// The queue from rank 0 to rank 1 has ended for good, and both stay.
#[test]
fn ranks_with_a_failed_queue_do_not_regroup() {
    let case = LowLatencyCase::new(routing(&[1, 1, 1], 1, 3, Style::DistinctTopK), 8);
    run_ranks(3, |number, group| {
        let mut transport = TransportOptions::new(TransportKind::Tcp);
        transport.hooks.shaping = (number == 0).then(|| Shaping::new(1).fail_after(1, 0));
        let options = |options: Options| {
            options.ranks_per_node(1).transport(transport).timeout(Duration::from_millis(100))
        };
        let shape = Shape { max_tokens: 1, hidden: 8, num_topk: 1, num_experts: 3 };
        let mut rank = Ones::new(case.device(number), group.clone(), shape, options, &[1])?;
        drop(rank.dispatch(&mut rank.buffer.place(0)?)?);
        let outcome = rank.outcome();
        assert!(number != 1 || matches!(outcome, Err(Error::PeerTimeout { .. })), "{outcome:?}");
        let error = rank.buffer.regroup(&*group).unwrap_err().to_string();
        assert!(error.contains("the queue fails, for a test"), "rank {number}: {error}");
        // Without rank 1 the others go on.
        let part = group.split((number == 1).into())?;
        if number != 1 {
            rank.buffer.regroup(&*part)?;
            drop(rank.dispatch(&mut rank.buffer.place(0)?)?);
            rank.outcome()?;
        }
        drop(rank);
        group.barrier(PATIENCE)
    });
}
