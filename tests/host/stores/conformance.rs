//! One set of guarantees, which every store must keep.

use std::sync::Arc;
use std::time::{Duration, Instant};

use epoxide::group::{FileStore, HashStore, PrefixStore, Store, TcpStore};
use epoxide::internal::group::TcpStoreServer;

const PATIENCE: Duration = Duration::from_secs(120);
/// A deadline that is meant to expire.
const SHORT: Duration = Duration::from_millis(60);

/// Each kind of store, as `clients` handles of the same one.
fn each(clients: usize, test: impl Fn(&str, Vec<Arc<dyn Store>>)) {
    let hash: Arc<dyn Store> = Arc::new(HashStore::new());
    test("hash", vec![hash.clone(); clients]);

    let directory = tempfile::tempdir().unwrap();
    let file = || Arc::new(FileStore::new(directory.path()).unwrap()) as Arc<dyn Store>;
    test("file", (0..clients).map(|_| file()).collect());

    let prefix = || Arc::new(PrefixStore::new("a", Arc::new(PrefixStore::new("b", hash.clone()))));
    test("prefix", (0..clients).map(|_| prefix() as Arc<dyn Store>).collect());

    let server = TcpStoreServer::bind(("127.0.0.1", 0)).unwrap();
    let tcp = || Arc::new(TcpStore::connect("127.0.0.1", server.port(), PATIENCE).unwrap());
    test("tcp", (0..clients).map(|_| tcp() as Arc<dyn Store>).collect());

    let shared: Arc<dyn Store> = tcp();
    let shared: Arc<dyn Store> = Arc::new(PrefixStore::new("shared", shared));
    test("tcp, one client of many threads", vec![shared; clients]);
}

#[test]
fn values() {
    each(2, |kind, stores| {
        let [a, b] = stores.as_slice() else { unreachable!() };
        let before = a.num_keys().unwrap();
        assert!(!a.check("k").unwrap(), "{kind}");
        a.set("k", b"one").unwrap();
        assert_eq!(b.get("k", Duration::ZERO).unwrap(), b"one", "{kind}");
        b.set("k", b"").unwrap();
        assert_eq!(a.get("k", Duration::ZERO).unwrap(), b"", "{kind}");
        assert!(a.check("k").unwrap(), "{kind}: an empty value is there");
        a.multi_set(&[("x", b"1"), ("y", b"22"), ("\u{e4}/ \n", b"\0\xff")]).unwrap();
        assert_eq!(b.multi_get(&["y", "\u{e4}/ \n", "x"], PATIENCE).unwrap(), [&b"22"[..], b"\0\xff", b"1"]);
        assert!(b.multi_get(&["y", "z"], SHORT).unwrap_err().to_string().contains('z'), "{kind}");
        assert!(b.check_all(&["x", "y", "k"]).unwrap(), "{kind}");
        assert!(!b.check_all(&["x", "y", "z"]).unwrap(), "{kind}");
        assert!(b.check_all(&[]).unwrap(), "{kind}");
        assert_eq!(a.num_keys().unwrap(), before + 4, "{kind}");
        for key in ["k", "x", "y", "\u{e4}/ \n"] {
            assert!(b.delete(key).unwrap(), "{kind}");
            assert!(!a.delete(key).unwrap(), "{kind}");
        }
        assert_eq!(a.num_keys().unwrap(), before, "{kind}");
    });
}

#[test]
fn large_values() {
    each(2, |kind, stores| {
        for length in [1 << 10, 1 << 20, 8 << 20] {
            let value: Vec<u8> = (0..length).map(|index: usize| (index / 7) as u8).collect();
            stores[0].set("large", &value).unwrap();
            assert!(stores[1].get("large", PATIENCE).unwrap() == value, "{kind}: {length}");
        }
        stores[0].delete("large").unwrap();
    });
}

#[test]
fn compare_and_append() {
    each(2, |kind, stores| {
        let [a, b] = stores.as_slice() else { unreachable!() };
        assert_eq!(
            a.compare_set("c", b"old", b"new").unwrap(),
            b"old",
            "{kind}: missing, expected something"
        );
        assert!(!a.check("c").unwrap(), "{kind}");
        assert_eq!(a.compare_set("c", b"", b"new").unwrap(), b"new", "{kind}: missing, expected nothing");
        assert_eq!(b.compare_set("c", b"other", b"x").unwrap(), b"new", "{kind}: holds something else");
        assert_eq!(b.compare_set("c", b"new", b"newer").unwrap(), b"newer", "{kind}");
        a.append("c", b"er").unwrap();
        assert_eq!(b.get("c", PATIENCE).unwrap(), b"newerer", "{kind}");
        b.append("fresh", b"f").unwrap();
        assert_eq!(a.get("fresh", PATIENCE).unwrap(), b"f", "{kind}");
        a.delete("c").unwrap();
        a.delete("fresh").unwrap();
    });
}

#[test]
fn counters() {
    each(4, |kind, stores| {
        std::thread::scope(|scope| {
            for store in &stores {
                scope.spawn(|| (0..50).for_each(|_| assert!(store.add("n", 3).unwrap() <= 600)));
            }
        });
        assert_eq!(stores[0].add("n", -600).unwrap(), 0, "{kind}");
        assert_eq!(stores[1].get("n", PATIENCE).unwrap(), b"0", "{kind}");
        stores[0].set("bytes", b"x").unwrap();
        assert!(stores[1].add("bytes", 1).is_err(), "{kind}");
        stores[0].add("big", i64::MAX).unwrap();
        assert!(stores[1].add("big", 1).is_err(), "{kind}");
        assert_eq!(stores[1].add("big", 0).unwrap(), i64::MAX, "{kind}: usable after the error");
    });
}

#[test]
fn one_wins_a_compare_set() {
    each(8, |kind, stores| {
        for round in 0..10 {
            let key = format!("leader{round}");
            let winners = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..)
                    .zip(&stores)
                    .map(|(rank, store)| {
                        let key = &key;
                        scope.spawn(move || {
                            let own = format!("rank {rank}");
                            store.compare_set(key, b"", own.as_bytes()).unwrap() == own.as_bytes()
                        })
                    })
                    .collect();
                threads.into_iter().map(|thread| u32::from(thread.join().unwrap())).sum::<u32>()
            });
            assert_eq!(winners, 1, "{kind}");
        }
    });
}

#[test]
fn waits() {
    each(3, |kind, stores| {
        let [a, b, c] = stores.as_slice() else { unreachable!() };
        std::thread::scope(|scope| {
            let all = scope.spawn(|| a.wait(&["w1", "w2", "w1"], PATIENCE));
            let one = scope.spawn(|| b.get("w2", PATIENCE));
            std::thread::sleep(SHORT);
            c.set("w1", b"").unwrap();
            c.append("w2", b"v").unwrap();
            all.join().unwrap().unwrap();
            assert_eq!(one.join().unwrap().unwrap(), b"v", "{kind}");
        });
        let start = Instant::now();
        let error = a.wait(&["w1", "never", "w2"], SHORT).unwrap_err().to_string();
        assert!(error.contains("never"), "{kind}: {error}");
        assert!(start.elapsed() >= SHORT && start.elapsed() < PATIENCE, "{kind}");
        assert!(a.wait(&["never"], Duration::ZERO).is_err(), "{kind}");
        assert!(a.get("never", Duration::ZERO).is_err(), "{kind}");
        assert!(a.get("never", SHORT).unwrap_err().to_string().contains("never"), "{kind}");
        // Usable after waits in vain.
        a.wait(&["w1", "w2"], Duration::ZERO).unwrap();
        a.delete("w1").unwrap();
        a.delete("w2").unwrap();
    });
}

#[test]
fn queues() {
    each(3, |kind, stores| {
        let [a, b, c] = stores.as_slice() else { unreachable!() };
        assert_eq!(a.queue_pop("q", Duration::ZERO).unwrap(), None, "{kind}");
        assert_eq!(a.queue_pop("q", SHORT).unwrap(), None, "{kind}");
        for value in [&b"1"[..], b"", b"333"] {
            a.queue_push("q", value).unwrap();
        }
        assert_eq!(b.queue_len("q").unwrap(), 3, "{kind}");
        assert!(b.check("q").unwrap(), "{kind}");
        assert_eq!(b.queue_pop("q", Duration::ZERO).unwrap().as_deref(), Some(&b"1"[..]), "{kind}");
        assert_eq!(c.queue_pop("q", PATIENCE).unwrap().as_deref(), Some(&b""[..]), "{kind}");
        assert_eq!(b.queue_pop("q", PATIENCE).unwrap().as_deref(), Some(&b"333"[..]), "{kind}");
        assert_eq!((b.queue_len("q").unwrap(), b.check("q").unwrap()), (0, false), "{kind}");

        // Each entry is delivered to one of two waiters.
        let mut taken = std::thread::scope(|scope| {
            let takers = [b, c].map(|store| {
                scope.spawn(|| {
                    let mut taken = Vec::new();
                    while let Some(value) = store.queue_pop("work", PATIENCE).unwrap() {
                        if value == b"end" {
                            return taken;
                        }
                        taken.push(value[0]);
                    }
                    panic!("{kind}: starved");
                })
            });
            for value in 0..100 {
                a.queue_push("work", &[value]).unwrap();
            }
            a.queue_push("work", b"end").unwrap();
            a.queue_push("work", b"end").unwrap();
            takers.map(|taker| taker.join().unwrap()).concat()
        });
        taken.sort_unstable();
        assert_eq!(taken, (0..100).collect::<Vec<_>>(), "{kind}");
    });
}

#[test]
fn an_entry_of_a_queue_is_no_value() {
    each(1, |kind, stores| {
        let store = &stores[0];
        store.set("empty", b"").unwrap();
        store.queue_push("queue", b"entry").unwrap();
        store.wait(&["empty", "queue"], Duration::ZERO).unwrap();
        for timeout in [Duration::ZERO, SHORT] {
            let error = store.get("queue", timeout).unwrap_err().to_string();
            assert!(error.contains("queue"), "{kind}: {error}");
            let error = store.multi_get(&["empty", "queue"], timeout).unwrap_err().to_string();
            assert!(error.contains("queue"), "{kind}: {error}");
        }
        store.set("queue", b"").unwrap();
        assert_eq!(store.get("queue", PATIENCE).unwrap(), b"", "{kind}");
        assert_eq!(store.multi_get(&["queue", "empty"], PATIENCE).unwrap(), [b"", b""], "{kind}");
        assert_eq!(store.queue_len("queue").unwrap(), 1, "{kind}");
        store.queue_pop("queue", Duration::ZERO).unwrap();
        store.delete("queue").unwrap();
        store.delete("empty").unwrap();
    });
}

#[test]
fn an_entry_that_ends_a_wait_is_left_for_those_that_take_it() {
    each(3, |kind, stores| {
        let [a, b, c] = stores.as_slice() else { unreachable!() };
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| a.wait(&["shared"], PATIENCE));
            std::thread::sleep(SHORT);
            let takes = scope.spawn(|| b.queue_pop("shared", PATIENCE));
            std::thread::sleep(SHORT);
            c.queue_push("shared", b"1").unwrap();
            assert_eq!(takes.join().unwrap().unwrap().as_deref(), Some(&b"1"[..]), "{kind}");
            // The wait may have begun after the first entry was taken.
            c.queue_push("shared", b"2").unwrap();
            waits.join().unwrap().unwrap();
        });
        assert_eq!(c.queue_pop("shared", PATIENCE).unwrap().as_deref(), Some(&b"2"[..]), "{kind}");
    });
}

#[test]
fn a_counter_that_was_deleted_starts_again() {
    each(2, |kind, stores| {
        let [a, b] = stores.as_slice() else { unreachable!() };
        let (begun, deleted) = std::thread::scope(|scope| {
            let adds = scope.spawn(|| (0..300).filter(|_| a.add("c", 1).unwrap() == 1).count());
            let mut deleted = 0;
            while !adds.is_finished() {
                deleted += usize::from(b.delete("c").unwrap());
            }
            (adds.join().unwrap(), deleted)
        });
        assert!(begun >= deleted, "{kind}: begun {begun} times, deleted {deleted} times");
        a.delete("c").unwrap();
    });
}

#[test]
fn prefixes_keep_apart() {
    let below: Arc<dyn Store> = Arc::new(HashStore::new());
    let (one, two) = (PrefixStore::new("1", below.clone()), PrefixStore::new("2", below.clone()));
    one.set("k", b"one").unwrap();
    two.set("k", b"two").unwrap();
    assert_eq!(one.get("k", PATIENCE).unwrap(), b"one");
    assert_eq!(below.get("2/k", PATIENCE).unwrap(), b"two");
    assert_eq!(below.num_keys().unwrap(), 2);
}
