//! Ends of communicators: in order, aborted, failed, dropped, in every state and from other
//! threads.

use std::sync::Arc;
use std::time::{Duration, Instant};

use epoxide::Error;
use epoxide::driver::{Memory, MemoryKind, Stream};
use epoxide::group::ReduceOp;
use epoxide::{DType, Tensor};
use epoxide_nccl::{Communicator, Config};

use super::fake::{
    Fake, HANG, HANG_FOR_GOOD, HELD, PATIENCE, REMOTE, SOON, device, hurried, impatient, patient, reason,
    tensor,
};

/// Checks that every use of an aborted communicator returns the reason.
#[track_caller]
fn assert_ended(communicator: &Communicator, why: &str) {
    let (stream, data) = tensor(communicator.device(), &[1.0]);
    let memory = Arc::new(Memory::alloc(communicator.device(), 64, MemoryKind::Shareable, "test").unwrap());
    let uses = [
        ("all_reduce", communicator.all_reduce(&data, ReduceOp::Sum, &stream).map(drop)),
        ("send", communicator.send(0, &data, &stream).map(drop)),
        ("split", communicator.split(Some(0), 0, None).map(drop)),
        ("register", communicator.register(&memory).map(drop)),
        ("check", communicator.check()),
        ("wait_ready", communicator.wait_ready()),
        ("finalize", communicator.finalize()),
    ];
    for (name, outcome) in uses {
        let error = outcome.expect_err(name);
        assert!(reason(&error).contains(why), "{name}: {error}");
    }
}

#[test]
fn creation_that_never_ends_ends_at_the_deadline() {
    for blocking in [false, true] {
        let fake = Fake::new();
        let start = Instant::now();
        let error = fake.alone(Config { blocking, ..impatient() }).unwrap_err();
        assert!(reason(&error).contains("may not have come"), "{error}");
        assert!(start.elapsed() >= SOON && start.elapsed() < PATIENCE);
        if !blocking {
            fake.assert_clean();
        }
    }
}

#[test]
fn abort_during_creation() {
    let fake = Fake::new();
    let communicator = Communicator::start(&fake.library, &device(), &fake.id(), 0, 2, patient()).unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| communicator.wait_ready().unwrap_err());
        std::thread::sleep(SOON);
        communicator.abort("changed my mind").unwrap();
        assert!(reason(&waiting.join().unwrap()).contains("changed my mind"));
    });
    assert_ended(&communicator, "changed my mind");
    fake.assert_clean();
}

#[test]
fn creation_that_fails_says_why() {
    let fake = Fake::new();
    fake.set("ncclCommInitRankConfig", 2);
    let error = fake.alone(patient()).unwrap_err();
    let Error::Nccl { call, code, detail, .. } = error else { panic!("{error:?}") };
    assert_eq!((call, code), ("ncclCommInitRankConfig", 2));
    assert!(detail.contains("the fake's last error"), "{detail}");
    fake.set("ncclGetUniqueId", 3);
    assert!(matches!(epoxide_nccl::UniqueId::new(&fake.library), Err(Error::Nccl { code: 3, .. })));
}

/// Joins two ranks with `config`. The second makes no call; `test` runs on the first.
fn with_a_silent_peer(fake: &Fake, config: &Config, test: impl Fn(&Communicator) + Sync) {
    fake.ranks(2, &patient(), |parent| {
        let communicator = hurried(&parent, config);
        if communicator.rank() == 0 {
            test(&communicator);
        }
        // The other one ends by being dropped: all that it was given is done.
    });
}

#[test]
fn an_operation_whose_peer_never_comes_ends_at_the_deadline() {
    let fake = Fake::new();
    with_a_silent_peer(&fake, &patient(), |_| {});
    let config = Config { timeout: SOON, ..patient() };
    with_a_silent_peer(&fake, &config, |communicator| {
        let (stream, data) = tensor(communicator.device(), &[1.0]);
        let error = communicator.all_reduce(&data, ReduceOp::Sum, &stream).unwrap_err();
        assert!(reason(&error).contains("at the deadline"), "{error}");
        assert_ended(communicator, "at the deadline");
    });
    fake.assert_clean();
}

#[test]
fn abort_during_a_collective_from_another_thread() {
    let fake = Fake::new();
    with_a_silent_peer(&fake, &patient(), |communicator| {
        std::thread::scope(|scope| {
            let working = scope.spawn(|| {
                let (stream, data) = tensor(communicator.device(), &[1.0]);
                communicator.all_reduce(&data, ReduceOp::Sum, &stream).unwrap_err()
            });
            fake.await_call("ncclAllReduce");
            // The thread in the call returns at once, so that no wait lasts until a deadline.
            let start = Instant::now();
            communicator.abort("the job ends").unwrap();
            assert!(start.elapsed() < PATIENCE / 4, "{:?}", start.elapsed());
            assert!(reason(&working.join().unwrap()).contains("the job ends"));
        });
        assert_ended(communicator, "the job ends");
    });
    fake.assert_clean();
}

#[test]
fn abort_of_a_thread_that_a_call_of_nccl_holds() {
    let held = |blocking| {
        let fake = Fake::new();
        let config = Config { blocking, close_timeout: HELD, ..patient() };
        with_a_silent_peer(&fake, &config, |communicator| {
            fake.set("ncclAllReduce", HANG);
            std::thread::scope(|scope| {
                let working = scope.spawn(|| {
                    let (stream, data) = tensor(communicator.device(), &[1.0]);
                    communicator.all_reduce(&data, ReduceOp::Sum, &stream).unwrap_err()
                });
                fake.await_call("ncclAllReduce");
                communicator.abort("stuck").unwrap();
                assert!(reason(&working.join().unwrap()).contains("stuck"));
            });
            assert_ended(communicator, "stuck");
        });
        fake.assert_clean();
    };
    std::thread::scope(|scope| [false, true].map(|blocking| drop(scope.spawn(move || held(blocking)))));
}

#[test]
fn waits_may_be_longer_than_the_clock_can_tell() {
    let fake = Fake::new();
    let long = Config { timeout: Duration::MAX, close_timeout: Duration::MAX, ..patient() };
    let communicator = fake.single(long);
    let (stream, data) = tensor(communicator.device(), &[1.0]);
    communicator.all_reduce(&data, ReduceOp::Sum, &stream).unwrap().wait().unwrap();
    drop(communicator);
    fake.assert_clean();
}

#[test]
fn the_first_reason_stays() {
    let fake = Fake::new();
    let communicator = fake.single(patient());
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| communicator.abort("first").unwrap());
        }
    });
    communicator.abort("second").unwrap();
    assert_ended(&communicator, "first");
    drop(communicator);
    assert_eq!(fake.calls("ncclCommAbort"), 1);
    fake.assert_clean();
}

#[test]
fn an_abort_that_nccl_never_ends_is_left_behind() {
    let fake = Fake::new();
    let communicator = fake.single(Config { close_timeout: SOON, ..patient() });
    fake.set("ncclCommAbort", HANG_FOR_GOOD);
    let start = Instant::now();
    let error = communicator.abort("enough").unwrap_err();
    assert!(reason(&error).contains("left behind"), "{error}");
    assert_ended(&communicator, "enough");
    drop(communicator);
    assert!(start.elapsed() < PATIENCE);
}

#[test]
fn a_parent_that_was_given_up_is_not_split() {
    let fake = Fake::new();
    let communicator = fake.single(patient());
    let part = communicator.split(Some(0), 0, None).unwrap().unwrap();
    communicator.abort("no more").unwrap();
    let error = communicator.split(Some(0), 0, None).unwrap_err();
    assert!(reason(&error).contains("no more"), "{error}");
    assert_eq!(communicator.splits(), 1);
    // A communicator split from it before continues.
    part.check().unwrap();
    part.finalize().unwrap();
    drop((part, communicator));
    fake.assert_clean();
}

#[test]
fn a_split_whose_peer_never_comes_ends_at_the_deadline() {
    let fake = Fake::new();
    let config = Config { timeout: SOON, ..patient() };
    with_a_silent_peer(&fake, &config, |communicator| {
        let error = communicator.split(Some(0), 0, None).unwrap_err();
        assert!(reason(&error).contains("at the deadline"), "{error}");
        assert_ended(communicator, "at the deadline");
    });
    fake.assert_clean();
}

#[test]
fn errors_of_calls_and_of_nccls_threads_end_it() {
    let fake = Fake::new();
    let communicator = fake.single(patient());
    let (stream, data) = tensor(communicator.device(), &[1.0]);
    fake.set("ncclAllReduce", 1);
    let error = communicator.all_reduce(&data, ReduceOp::Sum, &stream).unwrap_err();
    assert!(matches!(error, Error::Nccl { call: "ncclAllReduce", code: 1, .. }), "{error:?}");
    assert_ended(&communicator, "ncclAllReduce failed");

    let other = fake.single(patient());
    other.check().unwrap();
    fake.fail_all(REMOTE);
    let error = other.check().unwrap_err();
    assert!(matches!(error, Error::Nccl { call: "ncclCommGetAsyncError", code: REMOTE, .. }), "{error:?}");
    assert_ended(&other, "remote process exited");
    drop((communicator, other));
    fake.assert_clean();
}

#[test]
fn registrations_are_released_in_order_and_hold_their_memory() {
    let fake = Fake::new();
    type End = fn(Communicator);
    let ends: [End; 3] = [
        |communicator| communicator.finalize().unwrap(),
        |communicator| communicator.abort("done").unwrap(),
        drop,
    ];
    for (round, end) in ends.into_iter().enumerate() {
        let communicator = fake.single(patient());
        let memory = |bytes| {
            Arc::new(Memory::alloc(communicator.device(), bytes, MemoryKind::Shareable, "test").unwrap())
        };
        let (first, second, third) = (memory(100), memory(200), memory(300));
        let _first = communicator.register(&first).unwrap();
        let middle = communicator.register(&second).unwrap();
        let _third = communicator.register(&third).unwrap();
        assert_eq!(Arc::strong_count(&second), 2);
        communicator.deregister(middle).unwrap();
        assert_eq!(Arc::strong_count(&second), 1);
        let sizes: Vec<u64> = communicator.registered().iter().map(|memory| memory.bytes()).collect();
        assert_eq!(sizes, [100, 300]);
        end(communicator);
        assert_eq!((Arc::strong_count(&first), Arc::strong_count(&third)), (1, 1));
        let log = fake.log();
        let expected = ["register 3 of 300 bytes", "deregister 2", "deregister 1", "deregister 3"];
        assert_eq!(log[log.len() - 4..], expected, "round {round}");
    }
    fake.assert_clean();
}

#[test]
fn a_registration_of_another_communicator_is_refused() {
    let fake = Fake::new();
    let (one, other) = (fake.single(patient()), fake.single(patient()));
    let memory = Arc::new(Memory::alloc(one.device(), 64, MemoryKind::Shareable, "test").unwrap());
    let registration = one.register(&memory).unwrap();
    assert!(matches!(other.deregister(registration), Err(Error::Argument { .. })));
    other.check().unwrap();
}

#[test]
fn finalized_is_an_end_too() {
    let fake = Fake::new();
    let communicator = fake.single(patient());
    communicator.finalize().unwrap();
    assert_eq!(fake.live(), 0);
    assert_ended(&communicator, "was finalized");
    communicator.abort("late").unwrap();
    assert_eq!(communicator.dump()["state"], "finalized");
    drop(communicator);
    assert_eq!((fake.calls("ncclCommDestroy"), fake.calls("ncclCommAbort")), (1, 0));
    fake.assert_clean();
}

#[test]
fn finalize_that_never_ends_becomes_an_abort() {
    let fake = Fake::new();
    let parent = fake.single(patient());
    let communicator = hurried(&parent, &Config { timeout: SOON, ..patient() });
    // In progress forever, because the peer never finalizes.
    fake.set("ncclCommFinalize", 7);
    fake.set("ncclCommGetAsyncError", 7);
    let error = communicator.finalize().unwrap_err();
    assert!(reason(&error).contains("at the deadline"), "{error}");
    fake.set("ncclCommGetAsyncError", 0);
    drop(communicator);
    assert_eq!(fake.calls("ncclCommAbort"), 1);
    drop(parent);
    fake.assert_clean();
}

#[test]
fn an_error_of_finalize_is_that_of_nccl() {
    let fake = Fake::new();
    let communicator = fake.single(patient());
    fake.set("ncclCommFinalize", REMOTE);
    let error = communicator.finalize().unwrap_err().to_string();
    assert!(error.contains("ncclCommFinalize") && error.contains("network error"), "{error}");
    // Later uses have the same reason.
    assert_ended(&communicator, "network error");
    drop(communicator);
    fake.assert_clean();
}

#[test]
fn operations_of_several_threads_come_one_after_the_other() {
    const THREADS: usize = 4;
    let fake = Fake::new();
    fake.ranks(2, &patient(), |communicator| {
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    let (stream, data) = tensor(communicator.device(), &[1.0; 8]);
                    for _ in 0..20 {
                        communicator.all_reduce(&data, ReduceOp::Max, &stream).unwrap().wait().unwrap();
                    }
                    assert_eq!(data.to_host::<f32>(&stream).unwrap(), [1.0; 8]);
                });
            }
        });
    });
    fake.assert_clean();
}

#[test]
fn drop_in_every_state_ends() {
    let fake = Fake::new();
    let start = || Communicator::start(&fake.library, &device(), &fake.id(), 0, 2, patient()).unwrap();
    // While it is made.
    drop(start());
    // Ready, and with an operation that has ended and was not polled.
    drop(fake.single(patient()));
    let communicator = fake.single(patient());
    let stream = Stream::new(communicator.device()).unwrap();
    let data = Tensor::from_host(&stream, DType::F32, &[1], &[1.0f32]).unwrap();
    let work = communicator.all_reduce(&data, ReduceOp::Sum, &stream).unwrap();
    drop(communicator);
    work.wait().unwrap();
    // Abort, then finalize.
    let communicator = fake.single(patient());
    communicator.abort("done").unwrap();
    drop(communicator);
    let communicator = fake.single(patient());
    communicator.finalize().unwrap();
    drop(communicator);
    fake.assert_clean();
}

#[test]
fn dumps_hold_the_known_state() {
    let fake = Fake::new();
    let communicator = fake.single(patient());
    let dump = communicator.dump();
    let expected = [
        ("state", "ready"),
        ("rank", "0"),
        ("size", "1"),
        ("nccl_version", "2.28.3"),
        ("nccl_async_error", "no error"),
        ("nccl_last_error", "the fake's last error"),
        ("operations_under_way", ""),
    ];
    for (name, value) in expected {
        assert_eq!(dump[name], value, "{name}");
    }
    communicator.abort("a reason").unwrap();
    assert_eq!(communicator.dump()["state"], "aborted: a reason");
}
