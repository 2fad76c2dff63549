//! Stores leak nothing. Counts threads and descriptors, so runs alone in its process.

use std::time::{Duration, Instant};

use epoxide::group::{Store, TcpStore};
use epoxide::internal::group::TcpStoreServer;
use epoxide_testing::alone;

const PATIENCE: Duration = Duration::from_secs(30);

fn open() -> (usize, usize) {
    let count = |directory: &str| std::fs::read_dir(directory).unwrap().count();
    (count("/proc/self/fd"), count("/proc/self/task"))
}

#[test]
fn no_thread_and_no_socket_stays() {
    alone::run("store_leaks::no_thread_and_no_socket_stays", leave_nothing);
}

fn leave_nothing() {
    let before = open();
    for round in 0..20 {
        let server = TcpStoreServer::bind(("127.0.0.1", 0)).unwrap();
        let stores: Vec<TcpStore> =
            (0..8).map(|_| TcpStore::connect("127.0.0.1", server.port(), PATIENCE).unwrap()).collect();
        std::thread::scope(|scope| {
            for store in &stores {
                scope.spawn(|| store.get("go", PATIENCE).unwrap());
                scope.spawn(|| store.get("go", PATIENCE).unwrap());
            }
            stores[0].set("go", b"").unwrap();
        });
        assert!(open().0 > before.0 && open().1 > before.1, "the count works");
        if round % 2 == 0 {
            drop(server);
            assert!(stores[0].get("k", PATIENCE).is_err());
        } else {
            drop(stores);
            drop(server);
        }
    }
    // A thread that was joined may be in /proc for a moment.
    let start = Instant::now();
    while open() != before && start.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(open(), before, "descriptors and threads");
}
