//! Links between nodes that break.

use epoxide::Error;
use epoxide::internal::transport::Shaping;
use epoxide::throughput::DispatchRequest;
use epoxide::transport::TransportKind;
use epoxide::{DType, Tensor};
use epoxide_testing::harness::{NodeLinks, PATIENCE, Rank, Setup, run_ranks, try_run_ranks};

use crate::timeouts::TIMEOUT;
use crate::turns::{HIDDEN, ROW, combine_in_pool};

/// The link from rank 1 to rank 0 breaks after so many puts. Each dispatch puts counts, its
/// readiness and one chunk of rows, each combine its readiness and one chunk of sums.
#[test]
fn a_broken_link_is_named_with_its_lost_puts() {
    let every_rank = vec![vec![0i64, 1]; 2];
    let nodes = NodeLinks { ranks_per_node: 1, transport: TransportKind::Shm, queues: 1 };
    for (puts, operation, word) in [
        (0, "notify", "counts of the node"),
        (2, "dispatch", "rows of the node"),
        (4, "combine", "sums of the node"),
    ] {
        let outcome = try_run_ranks(2, |number, group| {
            let mut setup = Setup::new(2, 1, 2, ROW).nodes(Some(nodes)).timeout(TIMEOUT);
            if number == 1 {
                setup.fields().transport.hooks.shaping = Some(Shaping::new(1).cut_after(0, puts));
            }
            let mut rank = Rank::join(&setup, group.clone())?;
            let topk_idx = rank.upload_typed(2, &every_rank)?;
            let x = Tensor::alloc(rank.device(), DType::Bf16, &[2, HIDDEN as u64])?;
            let layout = rank.layout(&topk_idx, 2)?;
            let mut place = rank.place()?;
            let request = DispatchRequest::new(&x, &layout).counts(rank.on_device());
            let handle = rank.dispatch(&mut place, request)?.handle;
            rank.stream.synchronize()?;
            let combined = combine_in_pool(&mut rank, &place, &handle);
            rank.stream.synchronize()?;
            let error = combined.and_then(|_| rank.buffer.check()).expect_err("the link is broken");
            // Rank 0 lacks what was lost; rank 1 waits until it has left.
            let on = if number == 0 { word } else { "the queue to it" };
            let Error::PeerTimeout { rank: me, peer, operation: at, word, .. } = &error else {
                panic!("{error} is no PeerTimeout");
            };
            assert_eq!((*me, *peer, *at, *word), (number, 1 - number, operation, on), "{error}");
            group.barrier(PATIENCE)
        });
        outcome.unwrap_or_else(|failure| panic!("after {puts} puts: {failure}"));
    }
}

/// Rank 1 has closed its links, and the put of rank 0 fails: the error has the reason.
#[test]
fn the_reason_of_a_failed_put_is_in_the_error() {
    let nodes = NodeLinks { ranks_per_node: 1, transport: TransportKind::Tcp, queues: 1 };
    run_ranks(2, |number, group| {
        let setup = Setup::new(2, 1, 2, ROW).nodes(Some(nodes)).timeout(TIMEOUT);
        let mut rank = Rank::join(&setup, group.clone())?;
        if number == 1 {
            drop(rank);
            return group.barrier(PATIENCE);
        }
        group.barrier(PATIENCE)?;
        let topk_idx = rank.upload_typed(2, &[vec![0i64, 1]])?;
        let x = Tensor::alloc(rank.device(), DType::Bf16, &[1, HIDDEN as u64])?;
        let layout = rank.layout(&topk_idx, 2)?;
        let mut place = rank.place()?;
        let request = DispatchRequest::new(&x, &layout).counts(rank.on_device());
        let received = rank.dispatch(&mut place, request)?;
        // A read of a result returns the error as well, without access to the buffer.
        let read = received.recv_x.to_host::<half::bf16>(&rank.stream).unwrap_err();
        for error in [read, rank.buffer.check().unwrap_err()] {
            assert!(matches!(error, Error::PeerTimeout { .. }), "{error}");
            assert!(error.to_string().contains("it said goodbye"), "{error}");
        }
        Ok(())
    });
}
