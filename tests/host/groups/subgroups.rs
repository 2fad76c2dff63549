//! Groups of groups.

use epoxide::Error;
use epoxide::group::{Collectives, ProcessGroup};

use super::harness::{PATIENCE, options, threads};

#[test]
fn subgroups_have_their_own_ranks() {
    threads(6, options(PATIENCE), |world| {
        let rank = world.rank();
        let picked = world.new_group(&[4, 1, 3]).unwrap();
        assert_eq!(picked.is_some(), [1, 3, 4].contains(&rank));
        if let Some(group) = &picked {
            assert_eq!(group.all_gather_slices(&[rank]).unwrap(), [[4], [1], [3]]);
            assert_eq!(
                (group.global_rank(0), group.group_rank(3), group.group_rank(0)),
                (Some(4), Some(2), None)
            );
        }
        let pair = world.new_subgroups(2).unwrap();
        assert_eq!(pair.all_gather_slices(&[rank]).unwrap(), [[rank & !1], [rank | 1]]);
        // Odd and even, from high to low; groups of groups keep the first group's ranks.
        let half = world.split_group(Some(u64::from(rank % 2)), -i64::from(rank)).unwrap().unwrap();
        assert_eq!(half.global_rank(0), Some(4 + rank % 2));
        let last = half.new_group(&[2]).unwrap();
        assert_eq!(last.map(|group| group.global_rank(0)), (rank < 2).then_some(Some(rank)));
        assert!(world.split_group((rank == 0).then_some(1), 0).unwrap().is_none() == (rank != 0));
        world.barrier(PATIENCE).unwrap();
        for (error, text) in [
            (world.new_subgroups(4).unwrap_err(), "group_size = 4: must divide the group's size, 6"),
            (world.new_group(&[0, 0]).unwrap_err(), "ranks = 0: each rank of 0..6 at most once"),
            (world.new_group(&[6]).unwrap_err(), "ranks = 6: each rank of 0..6 at most once"),
        ] {
            assert_eq!(error.to_string(), text);
        }
        world.barrier(PATIENCE).unwrap();
    });
}

#[test]
fn different_plans_are_a_mismatch() {
    let errors = threads(3, options(PATIENCE), |world| {
        let ranks = if world.rank() == 2 { [0, 2] } else { [0, 1] };
        world.new_group(&ranks).unwrap_err()
    });
    assert!(
        errors.iter().all(|error| matches!(error, Error::Mismatch { what: "the new groups", .. })),
        "{errors:?}"
    );
}

#[test]
fn survivors_shrink_and_go_on() {
    threads(5, options(PATIENCE), |world| {
        world.barrier(PATIENCE).unwrap();
        let rank = world.rank();
        if rank == 1 || rank == 3 {
            return;
        }
        // Fails on every survivor, since 1 and 3 left.
        while world.barrier(PATIENCE).is_ok() {}
        let group = world.shrink_group(&[3, 1]).unwrap();
        assert_eq!((group.rank(), group.size()), (rank / 2, 3));
        assert_eq!(group.all_gather_slices(&[rank]).unwrap(), [[0], [2], [4]]);
        assert_eq!(group.global_rank(1), Some(2));
        group.destroy().unwrap();
    });
}

#[test]
fn survivors_of_different_calls_shrink() {
    threads(3, options(PATIENCE), |world| {
        // A rank that left before it was seen has not joined yet, as far as the others know.
        world.barrier(PATIENCE).unwrap();
        let rank = world.rank();
        match rank {
            // Fails while it makes a group from this one, and rank 1 in another call.
            0 => drop(world.split_group(Some(0), 0).unwrap_err()),
            1 => drop(world.barrier(PATIENCE).unwrap_err()),
            _ => return,
        }
        let group = world.shrink_group(&[2]).unwrap();
        assert_eq!(group.all_gather_slices(&[rank]).unwrap(), [[0], [1]]);
        group.destroy().unwrap();
    });
}
