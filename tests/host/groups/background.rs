//! Operations in the background.

use std::time::Instant;

use epoxide::group::{Collectives, ProcessGroup, ReduceOp};

use super::harness::{PATIENCE, options, threads};

#[test]
fn work_runs_in_order_and_mixes_with_calls() {
    threads(4, options(PATIENCE), |group| {
        let rank = group.rank();
        let mut works = Vec::new();
        for round in 0..50i64 {
            works.push(group.start_all_reduce(vec![round + i64::from(rank)], ReduceOp::Sum));
        }
        let barrier = group.start_barrier();
        let gathered = group.all_gather_slices(&[rank]).unwrap();
        assert_eq!(gathered, [[0], [1], [2], [3]]);
        assert!(barrier.wait_timeout(PATIENCE) && barrier.is_completed() && barrier.error().is_none());
        for (round, work) in (0..).zip(works) {
            assert_eq!(work.wait().unwrap(), [4 * round + 6]);
        }
        assert_eq!(group.start_broadcast(2, &[rank]).wait().unwrap(), [2]);
        group.destroy().unwrap();
        assert!(group.start_barrier().wait().is_err());
        assert!(group.barrier(PATIENCE).is_err());
    });
}

#[test]
fn receives_do_not_block_the_sends_behind_them() {
    threads(2, options(PATIENCE), |group| {
        let peer = 1 - group.rank();
        // More than the sockets hold, receives first, tags out of order.
        let data = vec![group.rank() as u8; 3 << 20];
        let first = group.start_recv::<u8>(Some(peer), 1);
        let second = group.start_recv::<u8>(None, 2);
        let sends = [group.start_send(peer, 2, &[9u8]), group.start_send(peer, 1, &data)];
        assert_eq!(first.wait().unwrap().data, vec![peer as u8; 3 << 20]);
        assert_eq!(second.wait().unwrap().data, [9]);
        for send in sends {
            send.wait().unwrap();
        }
        group.barrier(PATIENCE).unwrap();
    });
}

#[test]
fn dropping_a_group_ends_queued_operations() {
    let errors = threads(2, options(PATIENCE), |group| {
        if group.rank() == 0 {
            let waiting = group.start_recv::<u8>(Some(1), 1);
            // A send behind the receive ends once the worker has begun both.
            group.start_send(1, 2, &[9u8]).wait().unwrap();
            let queued = group.start_barrier();
            let start = Instant::now();
            drop(group);
            assert!(start.elapsed() < PATIENCE / 4, "the drop took {:?}", start.elapsed());
            return vec![waiting.wait().map(drop).unwrap_err(), queued.wait().map(drop).unwrap_err()];
        }
        vec![group.barrier(PATIENCE).unwrap_err()]
    });
    for (rank, errors) in errors.iter().enumerate() {
        for error in errors.iter().map(ToString::to_string) {
            assert!(error.contains("was dropped"), "rank {rank}: {error}");
            assert!(rank == 0 || error.contains("rank 0"), "rank {rank}: {error}");
        }
    }
}
