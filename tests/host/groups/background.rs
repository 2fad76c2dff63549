//! Operations in the background.

use std::time::Duration;

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
            let queued = group.start_barrier();
            std::thread::sleep(Duration::from_millis(50));
            drop(group);
            return vec![waiting.wait().err(), queued.wait().err()];
        }
        vec![group.barrier(PATIENCE).err()]
    });
    assert!(errors.into_iter().flatten().all(|error| error.is_some()));
}
