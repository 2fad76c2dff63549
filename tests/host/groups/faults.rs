//! Ranks that do the wrong thing, or nothing: errors name rank and place within the deadline.

use std::io::{ErrorKind, Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use epoxide::Error;
use epoxide::group::{
    Collectives, Connect, HashStore, MeshGroup, MeshOptions, ProcessGroup, ReduceOp, Sockets, Store,
};
use epoxide::internal::group::{Call, poison};
use epoxide_testing::tier;

use super::harness::{LATE, PATIENCE, options, threads};

/// A deadline that expires on purpose, in a wait for an absent rank.
const SHORT: Duration = Duration::from_millis(500);

#[track_caller]
fn blames(error: &Error, rank: u32, operation: &str) {
    let text = error.to_string();
    assert!(text.contains(&format!("rank {rank}")) && text.contains(operation), "{text}");
}

#[test]
fn a_rank_that_does_not_come_is_named_by_all() {
    let meet = std::sync::Barrier::new(6);
    let errors = threads(6, options(LATE), |group| {
        group.barrier(PATIENCE).unwrap();
        let error = (group.rank() != 4).then(|| {
            let error = group.all_reduce(&mut [1.0f32], ReduceOp::Sum).unwrap_err();
            // The group is broken: the error has that reason, not absent ranks.
            assert!(group.barrier(PATIENCE).unwrap_err().to_string().contains("shrink"));
            error
        });
        meet.wait();
        error
    });
    for error in errors.into_iter().flatten() {
        blames(&error, 4, "all_reduce");
    }
}

#[test]
fn a_monitored_barrier_names_all_that_are_missing() {
    let meet = std::sync::Barrier::new(5);
    let errors = threads(5, options(PATIENCE), |group| {
        group.barrier(PATIENCE).unwrap();
        let missing = [1, 3].contains(&group.rank());
        let error = (!missing).then(|| group.monitored_barrier(LATE).unwrap_err());
        meet.wait();
        error
    });
    let named = |error: &Error| matches!(error, Error::Group { peers, .. } if *peers == [1, 3]);
    assert!(errors.iter().flatten().any(named), "{errors:?}");
    for error in errors.into_iter().flatten() {
        assert!(error.to_string().contains("rank 1") && error.to_string().contains("rank 3"), "{error}");
    }
}

#[test]
fn ranks_that_left_or_never_joined_are_missing() {
    let (store, patience) = (Arc::new(HashStore::new()), options(PATIENCE));
    let join = |rank, name| MeshGroup::new(store.clone(), rank, 2, name, patience.clone()).unwrap();
    let missing = |group: &MeshGroup| group.missing_ranks(Duration::from_millis(1)).unwrap();
    let early = join(0, "early");
    assert_eq!(missing(&early), [1]);
    let late = join(1, "early");
    assert_eq!((missing(&early), missing(&late)), (vec![], vec![]));
    drop(late);
    let start = std::time::Instant::now();
    while missing(&early) != [1] {
        assert!(start.elapsed() < PATIENCE, "rank 1 has left");
    }
    // A failed call has seen the rank that it blames.
    let (first, second) = (join(0, "failed"), join(1, "failed"));
    assert_eq!(missing(&first), Vec::<u32>::new());
    drop(second);
    first.barrier(PATIENCE).unwrap_err();
    assert_eq!(first.missing_ranks(PATIENCE).unwrap(), first.failed_ranks());
}

#[test]
fn an_abort_ends_a_wait_for_missing_ranks() {
    let start = std::time::Instant::now();
    // After an abort no rank is missing: a list with the other rank is of a wait that was under way.
    for pause in (1..).map(|number| Duration::from_millis(20 * number)) {
        let group = MeshGroup::new(Arc::new(HashStore::new()), 0, 2, "g", options(PATIENCE)).unwrap();
        let missing = std::thread::scope(|scope| {
            let missing = scope.spawn(|| group.missing_ranks(PATIENCE).unwrap());
            std::thread::sleep(pause);
            group.abort("enough");
            missing.join().unwrap()
        });
        assert!(start.elapsed() < PATIENCE, "the wait went on: {missing:?}");
        if missing == [1] {
            break;
        }
    }
}

#[test]
fn mismatches_name_both_sides() {
    type Call = fn(&MeshGroup, bool) -> Result<(), Error>;
    let cases: [(&str, Call); 6] = [
        ("which collective comes next", |group, odd| {
            if odd { group.barrier(PATIENCE) } else { group.all_gather(&[]).map(drop) }
        }),
        ("the root", |group, odd| group.broadcast(u32::from(odd), &[1]).map(drop)),
        ("the root", |group, odd| group.gather(u32::from(odd), &[1u8]).map(drop)),
        ("the size", |group, odd| group.all_reduce(&mut vec![1i32; 4 + usize::from(odd)], ReduceOp::Sum)),
        ("the reduction", |group, odd| {
            group.all_reduce(&mut [1i32], if odd { ReduceOp::Max } else { ReduceOp::Min })
        }),
        ("the dtype", |group, odd| {
            if odd {
                group.reduce(0, &mut [1i32], ReduceOp::Sum)
            } else {
                group.reduce(0, &mut [1f32], ReduceOp::Sum)
            }
        }),
    ];
    for (what, call) in cases {
        let errors = threads(4, options(PATIENCE), |group| {
            let first = call(&group, group.rank() == 1);
            // A root that only sends may finish before it gets any error.
            first.and_then(|()| group.barrier(PATIENCE)).unwrap_err()
        });
        let direct = |error: &Error| matches!(error, Error::Mismatch { what: w, .. } if *w == what);
        assert!(errors.iter().any(direct), "{what}: {errors:#?}");
        assert!(errors.iter().all(|error| error.to_string().contains("disagree")), "{what}: {errors:#?}");
    }
}

#[test]
fn an_abort_ends_everyone_with_its_reason() {
    let errors = threads(4, options(PATIENCE), |group| {
        group.barrier(PATIENCE).unwrap();
        if group.rank() != 2 {
            return group.all_reduce(&mut [0u8], ReduceOp::Sum).unwrap_err();
        }
        // From another thread, in the middle of an operation of its own.
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| group.recv::<u8>(Some(0), 1).unwrap_err());
            std::thread::sleep(Duration::from_millis(100));
            group.abort("the reactor is hot");
            waiting.join().unwrap()
        })
    });
    assert!(errors.iter().all(|error| error.to_string().contains("the reactor is hot")), "{errors:#?}");
}

#[test]
fn ranks_that_leave_first() {
    let through = std::sync::Barrier::new(3);
    threads(4, options(PATIENCE), |group| {
        group.barrier(PATIENCE).unwrap();
        match group.rank() {
            // Leaves without a word to wait for.
            0 => {}
            // Does not need it any more, and is not disturbed.
            1 => {
                group.send(2, 0, &[5u8]).unwrap();
                through.wait();
            }
            2 => {
                assert_eq!(group.recv::<u8>(Some(1), 0).unwrap().data, [5]);
                through.wait();
            }
            _ => {
                // This ends the group, so wait for the others first.
                through.wait();
                let error = group.recv::<u8>(Some(0), 0).unwrap_err();
                assert!(error.to_string().contains("rank 0 has left"), "{error}");
            }
        }
    });
}

#[test]
fn joining_wrong() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let eager = |timeout| MeshOptions { connect: Connect::Eager, ..options(timeout) };
    let first = MeshGroup::new(store.clone(), 0, 2, "g", options(PATIENCE)).unwrap();
    let error = MeshGroup::new(store.clone(), 0, 2, "g", options(PATIENCE)).unwrap_err();
    assert!(error.to_string().contains("taken"), "{error}");
    let error = MeshGroup::new(store.clone(), 1, 3, "g", eager(PATIENCE)).unwrap_err();
    assert!(matches!(error, Error::Mismatch { what: "the number of ranks", peer: 0, .. }), "{error}");
    let error = first.barrier(PATIENCE).unwrap_err();
    assert!(matches!(error, Error::Mismatch { what: "the number of ranks", peer: 1, .. }), "{error}");
    assert!(MeshGroup::new(store.clone(), 2, 2, "h", options(PATIENCE)).is_err());
    let error = MeshGroup::new(store, 0, 2, "i", eager(SHORT)).unwrap_err();
    assert!(error.to_string().contains("rank 1"), "{error}");
}

#[test]
fn strangers_are_turned_away() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let tcp = MeshOptions { sockets: Sockets::Tcp, interface: Some("lo".to_owned()), ..options(PATIENCE) };
    let goes_on = &AtomicBool::new(true);
    std::thread::scope(|scope| {
        let groups: Vec<_> =
            (0..2).map(|rank| MeshGroup::new(store.clone(), rank, 2, "g", tcp.clone()).unwrap()).collect();
        let address: serde_json::Value =
            serde_json::from_slice(&store.get("g/mesh/0", PATIENCE).unwrap()).unwrap();
        let address = address["tcp"].as_str().unwrap().to_owned();
        let mut strangers = Vec::new();
        for garbage in [&[0xff; 4096][..], b"GET / HTTP/1.1\r\n\r\n", b"EPXG", b""] {
            let mut stranger = std::net::TcpStream::connect(&address).unwrap();
            stranger.write_all(garbage).unwrap();
            strangers.push(stranger);
        }
        for group in groups {
            scope.spawn(move || {
                // Rank 0 ends them.
                while group.all_gather(&[u8::from(goes_on.load(Ordering::Relaxed))]).unwrap()[0] == [1] {}
                group.destroy().unwrap();
            });
        }
        let answers = strangers.into_iter().enumerate().map(|(index, mut stranger)| {
            // The others have sent less than a hello, and are closed with the group at the latest.
            if index == 1 {
                goes_on.store(false, Ordering::Relaxed);
            }
            stranger.set_read_timeout(Some(PATIENCE)).unwrap();
            let mut answer = Vec::new();
            let outcome = stranger.read_to_end(&mut answer).map_err(|error| error.kind());
            (outcome, answer)
        });
        // Before a check fails: the ranks end once all have been read.
        let answers: Vec<_> = answers.collect();
        // Closed, one way or the other, without a byte.
        for (outcome, answer) in answers {
            let is_closed = matches!(outcome, Ok(0) | Err(ErrorKind::ConnectionReset));
            assert!(is_closed && answer.is_empty(), "{outcome:?}, {answer:?}");
        }
    });
}

#[test]
fn the_flight_recorder_shows_the_end() {
    let dumps = Arc::new(Mutex::new(Vec::new()));
    let sink = dumps.clone();
    let recorder = MeshOptions {
        recorder: Some(Arc::new(move |text: &str| sink.lock().unwrap().push(text.to_owned()))),
        recorded: 2,
        ..options(SHORT)
    };
    let meet = std::sync::Barrier::new(2);
    threads(2, recorder, |group| {
        group.barrier(PATIENCE).unwrap();
        group.barrier(PATIENCE).unwrap();
        if group.rank() == 0 {
            group.all_reduce(&mut [1.0f64; 3], ReduceOp::Max).unwrap_err();
        }
        meet.wait();
    });
    let dumps = dumps.lock().unwrap();
    let dump: serde_json::Value = serde_json::from_str(&dumps[0]).unwrap();
    let last = &dump["operations"][1];
    assert_eq!((last["operation"].as_str(), last["state"].as_str()), (Some("all_reduce"), Some("failed")));
    assert_eq!((last["bytes"].as_u64(), last["reduction"].as_str()), (Some(24), Some("f64 max")));
    assert!(dump["reason"].as_str().unwrap().contains("rank 1"));
}

#[test]
fn a_recorder_that_panics_does_not_keep_the_reason_from_the_others() {
    let recorder: Arc<dyn Fn(&str) + Send + Sync> = Arc::new(|_| panic!("the disk is full"));
    for background in [false, true] {
        let options = MeshOptions { recorder: Some(recorder.clone()), ..options(PATIENCE) };
        let errors = threads(2, options, |group| {
            group.barrier(PATIENCE).unwrap();
            if group.rank() == 1 {
                return group.recv::<u8>(Some(0), 1).unwrap_err();
            }
            let outcome = match background {
                false => group.barrier(SHORT),
                true => group.start(Call::Barrier, SHORT).wait().map(drop),
            };
            outcome.unwrap_err()
        });
        for error in errors {
            assert!(error.to_string().contains("timed out after"), "background {background}: {error}");
        }
    }
}

#[test]
fn a_store_that_goes_away_after_an_eager_join() {
    let store = Arc::new(HashStore::new());
    let joined = &std::sync::Barrier::new(3);
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let store = store.clone();
            scope.spawn(move || {
                let eager = MeshOptions { connect: Connect::Eager, ..options(PATIENCE) };
                let group = MeshGroup::new(store.clone(), rank, 3, "g", eager).unwrap();
                if joined.wait().is_leader() {
                    poison(&store, "its host left");
                }
                group.all_reduce(&mut [rank], ReduceOp::Sum).unwrap();
                let pair = group.split_group(Some(0), 0).unwrap().unwrap();
                pair.barrier(PATIENCE).unwrap();
                pair.destroy().unwrap();
                group.destroy().unwrap();
            });
        }
    });
}

/// A rank may leave as soon as its last collective is over. Others may still be in it, have
/// connections to it that it never accepted, or be sending it a query.
#[test]
fn leaving_right_after_a_barrier_is_not_dying() {
    let rounds = std::env::var("EPOXIDE_SOAK")
        .map_or_else(|_| tier::pick(60, 600), |rounds| rounds.parse().expect("a number of rounds"));
    for connect in [Connect::Lazy, Connect::Eager] {
        for _ in 0..rounds {
            let outcomes = threads(6, MeshOptions { connect, ..options(PATIENCE) }, |group| {
                group.all_gather(b"x")?;
                group.exchange_fds(&[])?;
                group.barrier(PATIENCE)
            });
            for (rank, outcome) in outcomes.into_iter().enumerate() {
                outcome.unwrap_or_else(|error| panic!("rank {rank}, {connect:?}: {error}"));
            }
        }
    }
}

/// The others query a late rank for its state, and may have left before it reads the query. Many
/// groups run at once, so that ranks wait for a core at every point.
#[test]
fn leaving_a_late_rank_with_a_question_is_not_dying() {
    let one = || {
        for connect in [Connect::Lazy, Connect::Eager] {
            let outcomes = threads(3, MeshOptions { connect, ..options(PATIENCE) }, |group| {
                group.barrier(PATIENCE)?;
                if group.rank() == 0 {
                    // Longer than the others wait before they send a query.
                    std::thread::sleep(Duration::from_millis(300));
                }
                group.barrier(PATIENCE)
            });
            for (rank, outcome) in outcomes.into_iter().enumerate() {
                outcome.unwrap_or_else(|error| panic!("rank {rank}, {connect:?}: {error}"));
            }
        }
    };
    for _ in 0..tier::pick(1, 3) {
        std::thread::scope(|scope| (0..40).for_each(|_| drop(scope.spawn(one))));
    }
}
