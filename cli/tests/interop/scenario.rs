//! One rank's part in a scenario that uses all of the store; scenario.py is the same for PyTorch.

use std::time::Duration;

use epoxide::group::{Store, TcpStore};

pub const PATIENCE: Duration = Duration::from_secs(120);

/// Plays rank `rank` of `size`.
pub fn play(store: &TcpStore, rank: u32, size: u32) {
    let barrier = |name: &str| store.barrier(&format!("barrier/{name}"), size, PATIENCE).unwrap();
    let names = |prefix: &str| (0..size).map(|peer| format!("{prefix}/{peer}")).collect::<Vec<_>>();
    let neighbour = (rank + 1) % size;
    store.join().unwrap();

    // Values: text, bytes, empty, large.
    store.set(&format!("k/{rank}"), format!("value {rank}").as_bytes()).unwrap();
    let keys = names("k");
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    store.wait(&keys, PATIENCE).unwrap();
    let expected: Vec<_> = (0..size).map(|peer| format!("value {peer}").into_bytes()).collect();
    assert_eq!(store.multi_get(&keys, PATIENCE).unwrap(), expected);
    let own = [format!("bytes/{rank}"), format!("empty/{rank}")];
    store.multi_set(&[(&own[0], b"\x00\xff\x80"), (&own[1], b"")]).unwrap();
    let large = |rank: u32| vec![b'a' + rank as u8; 4 << 20];
    store.set(&format!("large/{rank}"), &large(rank)).unwrap();
    assert!(store.get(&format!("large/{neighbour}"), PATIENCE).unwrap() == large(neighbour));
    barrier("values");
    assert_eq!(store.get(&format!("bytes/{neighbour}"), PATIENCE).unwrap(), b"\x00\xff\x80");
    assert_eq!(store.get(&format!("empty/{neighbour}"), PATIENCE).unwrap(), b"");

    // Counters.
    store.add("sum", i64::from(rank) + 1).unwrap();
    barrier("sum");
    let sum = i64::from(size * (size + 1) / 2);
    assert_eq!(store.get("sum", PATIENCE).unwrap(), sum.to_string().as_bytes());
    assert_eq!(store.add("sum", 0).unwrap(), sum);

    // Compare and set, append.
    let leader = store.compare_set("leader", b"", format!("rank {rank}").as_bytes()).unwrap();
    assert_eq!(store.get("leader", PATIENCE).unwrap(), leader);
    let none = format!("none/{rank}");
    assert_eq!(store.compare_set(&none, b"x", b"y").unwrap(), b"x");
    assert!(!store.check(&none).unwrap());
    let own = format!("k/{rank}");
    assert_eq!(store.compare_set(&own, format!("value {rank}").as_bytes(), b"new").unwrap(), b"new");
    store.append("log", format!("<{rank}>").as_bytes()).unwrap();
    barrier("log");
    let log = String::from_utf8(store.get("log", PATIENCE).unwrap()).unwrap();
    assert!((0..size).all(|peer| log.contains(&format!("<{peer}>"))), "{log}");
    assert_eq!(log.len() as u32, 3 * size);

    // Queues.
    for index in 0..3 {
        store.queue_push(&format!("q/{neighbour}"), format!("{rank}:{index}").as_bytes()).unwrap();
    }
    let (queue, previous) = (format!("q/{rank}"), (rank + size - 1) % size);
    for index in 0..3 {
        let value = store.queue_pop(&queue, PATIENCE).unwrap();
        assert_eq!(value.as_deref(), Some(format!("{previous}:{index}").as_bytes()));
    }
    assert_eq!(store.queue_len(&queue).unwrap(), 0);
    assert_eq!(store.queue_pop(&queue, Duration::ZERO).unwrap(), None);
    assert_eq!(store.queue_pop(&queue, Duration::from_millis(50)).unwrap(), None);

    // Keys that exist.
    assert!(store.check_all(&[&own, "sum"]).unwrap());
    assert!(!store.check_all(&[&own, "never"]).unwrap());
    assert!(store.delete(&own).unwrap());
    assert!(!store.delete(&own).unwrap());
    barrier("deleted");
    if rank == 0 {
        let keys = store.list_keys().unwrap();
        assert!(keys.iter().any(|key| key == "sum") && !keys.contains(&own), "{keys:?}");
        // The count of arrivals is one more.
        assert_eq!(store.num_keys().unwrap(), keys.len() as u64 + 1);
        store.set("counted", b"").unwrap();
    }
    store.wait(&["counted"], PATIENCE).unwrap();

    // Waits in vain; the store is usable afterwards.
    let error = store.wait(&["sum", "never"], Duration::from_millis(200)).unwrap_err().to_string();
    assert!(error.contains("never"), "{error}");
    let error = store.get("never", Duration::from_millis(200)).unwrap_err().to_string();
    assert!(error.contains("never"), "{error}");
    assert_eq!(store.get("counted", PATIENCE).unwrap(), b"");
    barrier("end");
}
