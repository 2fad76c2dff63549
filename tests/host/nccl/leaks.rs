//! Communicators leak no descriptor and no thread, however they end. Alone in its process, as it
//! counts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use epoxide::driver::{Memory, MemoryKind};
use epoxide::group::ReduceOp;
use epoxide_nccl::{Communicator, Config, Watchdog};
use epoxide_testing::{alone, tier};

use super::fake::{Fake, HANG, HANG_FOR_GOOD, HELD, PATIENCE, SOON, device, hurried, patient, tensor};

fn open() -> (usize, usize) {
    let count = |directory: &str| std::fs::read_dir(directory).unwrap().count();
    (count("/proc/self/fd"), count("/proc/self/task"))
}

/// A thread that was joined may be in /proc for a moment.
#[track_caller]
fn assert_back_to(before: (usize, usize), what: &str) {
    let start = Instant::now();
    while open() != before && start.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(open(), before, "descriptors and threads after {what}");
}

#[test]
fn nothing_stays() {
    alone::run("nccl::leaks::nothing_stays", leak_nothing);
}

fn leak_nothing() {
    let fake = Fake::new();
    let soon = Config { timeout: SOON, ..patient() };
    let watched = Config { watchdog: Some(Watchdog::default()), ..patient() };
    let before = open();
    type End<'a> = (&'a str, &'a dyn Fn());
    let ends: [End<'_>; 9] = [
        ("finalize", &|| fake.single(watched.clone()).finalize().unwrap()),
        ("drop", &|| drop(fake.single(watched.clone()))),
        ("abort", &|| fake.single(watched.clone()).abort("done").unwrap()),
        ("creation that never ends", &|| drop(fake.alone(soon.clone()).unwrap_err())),
        ("drop while it is made", &|| {
            drop(Communicator::start(&fake.library, &device(), &fake.id(), 0, 2, watched.clone()).unwrap());
        }),
        ("a collective that never ends", &|| {
            fake.ranks(2, &patient(), |parent| {
                let communicator = hurried(&parent, &Config { timeout: SOON, ..watched.clone() });
                if communicator.rank() == 0 {
                    let (stream, data) = tensor(communicator.device(), &[1.0]);
                    drop(communicator.all_reduce(&data, ReduceOp::Sum, &stream).unwrap_err());
                }
            });
        }),
        ("a part", &|| {
            let communicator = fake.single(watched.clone());
            let part = communicator.split(Some(1), 0, None).unwrap();
            drop(communicator);
            drop(part);
        }),
        ("registrations", &|| {
            let communicator = fake.single(patient());
            let memory = Memory::alloc(communicator.device(), 64, MemoryKind::Shareable, "test").unwrap();
            let _registration = communicator.register(&Arc::new(memory)).unwrap();
        }),
        ("a call that hangs", &|| {
            let communicator = fake.single(Config { close_timeout: HELD, ..patient() });
            fake.set("ncclAllReduce", HANG);
            std::thread::scope(|scope| {
                let (communicator, working) = (&communicator, fake.calls("ncclAllReduce"));
                scope.spawn(move || {
                    let (stream, data) = tensor(communicator.device(), &[1.0]);
                    drop(communicator.all_reduce(&data, ReduceOp::Sum, &stream).unwrap_err());
                });
                while fake.calls("ncclAllReduce") == working {
                    std::thread::yield_now();
                }
                communicator.abort("stuck").unwrap();
            });
            fake.set("ncclAllReduce", 0);
        }),
    ];
    for (what, end) in ends {
        for _ in 0..tier::pick(1, 3) {
            end();
        }
        assert_back_to(before, what);
        fake.assert_clean();
    }
    // A communicator that NCCL does not release stays, with one thread, until NCCL releases it.
    fake.set("ncclCommAbort", HANG_FOR_GOOD);
    drop(fake.single(Config { close_timeout: SOON, ..patient() }));
    assert!(open().1 > before.1, "the thread that is left behind");
    fake.release();
    assert_back_to(before, "an abort that took too long");
}
