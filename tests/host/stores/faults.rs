//! Faults of the store over TCP: an error or a clean end, without leaks.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use epoxide::group::{Store, TcpStore};
use epoxide::internal::group::TcpStoreServer;
use epoxide_testing::{HeldPort, alone};

use super::attacks::settle;

/// Longer than any operation that should end takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// A deadline that is meant to expire.
pub const SHORT: Duration = Duration::from_millis(200);
/// A client's greeting.
pub const HELLO: [u8; 5] = [0, 0xce, 0xf7, 0x85, 0x3c];

pub fn server() -> TcpStoreServer {
    TcpStoreServer::bind(("127.0.0.1", 0)).unwrap()
}

pub fn client(server: &TcpStoreServer) -> TcpStore {
    TcpStore::connect("127.0.0.1", server.port(), PATIENCE).unwrap()
}

/// Sends bytes to the server; true when it then closes the connection.
fn closes(server: &TcpStoreServer, bytes: &[u8]) -> bool {
    let mut socket = TcpStream::connect(server.address()).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    // The server may have closed it in the middle.
    let _ = socket.write_all(bytes);
    let mut answer = [0; 64];
    loop {
        match socket.read(&mut answer) {
            Ok(0) => return true,
            Ok(_) => {}
            // As after a stop.
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return error.kind() == ErrorKind::ConnectionReset,
        }
    }
}

#[test]
fn a_server_that_goes_away() {
    let server = server();
    let mut stores: Vec<TcpStore> = (0..4).map(|_| client(&server)).collect();
    std::thread::scope(|scope| {
        let waits: Vec<_> = stores.iter().map(|store| scope.spawn(|| store.get("never", PATIENCE))).collect();
        std::thread::sleep(SHORT);
        drop(server);
        for wait in waits {
            let error = wait.join().unwrap().unwrap_err().to_string();
            assert!(error.contains("closed the connection"), "{error}");
        }
    });
    for store in &mut stores {
        store.set_timeout(SHORT);
        let error = store.set("k", b"").unwrap_err().to_string();
        assert!(error.contains("no store server at 127.0.0.1"), "{error}");
    }
}

#[test]
fn a_server_that_stops_answering() {
    // Accepts connections, and sends nothing.
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let error = TcpStore::connect("127.0.0.1", port, SHORT).unwrap_err().to_string();
    assert!(error.contains(&port.to_string()), "{error}");
}

/// A server that answers a greeting, sends `answer` after the next request, and then reads what
/// comes.
fn impostor(answer: &'static [u8]) -> (u16, std::thread::JoinHandle<()>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let thread = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut hello = [0; 10];
        socket.read_exact(&mut hello).unwrap();
        socket.write_all(&hello[6..]).unwrap();
        socket.read_exact(&mut [0]).unwrap();
        socket.write_all(answer).unwrap();
        // Until the client has had enough.
        let _ = std::io::copy(&mut socket, &mut std::io::sink());
    });
    (port, thread)
}

#[test]
fn a_server_that_stops_in_the_middle() {
    for wait in [false, true] {
        let (port, thread) = impostor(&[]);
        let mut store = TcpStore::connect("127.0.0.1", port, PATIENCE).unwrap();
        store.set_timeout(SHORT);
        let error = match wait {
            true => store.barrier("b", 2, SHORT).unwrap_err(),
            false => store.add("n", 1).unwrap_err(),
        };
        assert!(error.to_string().contains("did not answer within 200ms"), "{error}");
        drop(store);
        thread.join().unwrap();
    }
}

#[test]
fn answers_that_break_the_protocol() {
    // A value of 2^64 - 1 bytes, one of 2^60, and a wait that is answered with 7.
    let cases: [&[u8]; 3] = [&[0xff; 9], &[0, 0, 0, 0, 0, 0, 0, 0, 0x10], &[7]];
    for (index, answer) in cases.into_iter().enumerate() {
        let (port, thread) = impostor(answer);
        let store = TcpStore::connect("127.0.0.1", port, PATIENCE).unwrap();
        let error = match index {
            2 => store.barrier("b", 2, PATIENCE).unwrap_err(),
            _ => store.get("k", PATIENCE).unwrap_err(),
        };
        assert!(error.to_string().contains("does not speak the protocol"), "{error}");
        drop(store);
        thread.join().unwrap();
    }
}

#[test]
fn endless_timeouts() {
    let host = TcpStore::host(0, Duration::MAX, Duration::ZERO).unwrap();
    host.set("k", b"v").unwrap();
    assert_eq!(host.get("k", Duration::MAX).unwrap(), b"v");
    host.barrier("b", 1, Duration::MAX).unwrap();
}

#[test]
fn no_server() {
    let port = HeldPort::any().unwrap();
    // The first attempt has to be over before that.
    let timeout = Duration::from_secs(2);
    let start = Instant::now();
    let error = TcpStore::connect("127.0.0.1", port.number(), timeout).unwrap_err().to_string();
    assert!(error.contains("refused") && error.contains("2s"), "{error}");
    assert!(start.elapsed() >= timeout);
    let error = TcpStore::connect("no-such-host.invalid", port.number(), SHORT).unwrap_err().to_string();
    assert!(error.contains("no-such-host.invalid"), "{error}");
}

#[test]
fn a_server_that_starts_late() {
    let port = HeldPort::any().unwrap();
    std::thread::scope(|scope| {
        let client = scope.spawn(|| TcpStore::connect("127.0.0.1", port.number(), PATIENCE));
        std::thread::sleep(SHORT);
        let _server = TcpStoreServer::bind(("127.0.0.1", port.number())).unwrap();
        client.join().unwrap().unwrap().set("k", b"v").unwrap();
    });
}

#[test]
fn a_port_in_use() {
    let server = server();
    let error = TcpStoreServer::bind(("127.0.0.1", server.port())).unwrap_err().to_string();
    assert!(error.contains("in use") && error.contains("another port"), "{error}");
    assert!(error.contains(&server.port().to_string()), "{error}");
    let all = TcpStoreServer::bind_all(0).unwrap();
    let error = TcpStore::host(all.port(), PATIENCE, Duration::ZERO).unwrap_err().to_string();
    assert!(error.contains("in use"), "{error}");
}

#[test]
fn garbage_closes_its_connection_only() {
    let server = server();
    let store = client(&server);
    let number = |value: u64| value.to_le_bytes();
    let greeted = |bytes: &[&[u8]]| [&HELLO[..], &bytes.concat()].concat();
    let cases = [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0xff; 100_000],
        vec![0; 5],
        // A request before the greeting.
        [&[7][..]].concat(),
        greeted(&[&[19]]),
        greeted(&[b"\x01", &number(u64::MAX)]),
        greeted(&[b"\x03", &number(8193)]),
        greeted(&[b"\x01", &number(1), b"k", &number(1 << 40)]),
        greeted(&[b"\x06", &number(1 << 60)]),
        greeted(&[b"\x0b", &number(u64::MAX)]),
        // An add to bytes.
        greeted(&[b"\x04", &number(6), b"/bytes", &number(1)]),
        // A wait in a wait.
        greeted(&[&[b"\x06", &number(1)[..], &number(1), b"x"].concat().repeat(2)]),
    ];
    store.set("bytes", b"not a number").unwrap();
    for (index, case) in cases.iter().enumerate() {
        assert!(closes(&server, case), "case {index}");
        store.set("alive", &[index as u8]).unwrap();
        assert_eq!(store.get("alive", PATIENCE).unwrap(), [index as u8]);
    }
    // Requests cut short are dropped with their connection.
    for length in 0..40 {
        let request = greeted(&[b"\x01", &number(6), b"/alive", &number(16), &[9; 16]]);
        let mut socket = TcpStream::connect(server.address()).unwrap();
        socket.write_all(&request[..length.min(request.len() - 1)]).unwrap();
    }
    assert_eq!(store.get("alive", PATIENCE).unwrap(), [cases.len() as u8 - 1]);
}

#[test]
fn unread_answers_do_not_pile_up() {
    // The memory is the process's.
    alone::run("stores::faults::unread_answers_do_not_pile_up", ask_and_read_nothing);
}

fn ask_and_read_nothing() {
    let server = server();
    let store = client(&server);
    store.set("large", &vec![7; 8 << 20]).unwrap();
    let mut socket = TcpStream::connect(server.address()).unwrap();
    socket.set_write_timeout(Some(PATIENCE)).unwrap();
    let mut request = HELLO.to_vec();
    for _ in 0..1000 {
        request.push(3);
        request.extend_from_slice(&6u64.to_le_bytes());
        request.extend_from_slice(b"/large");
    }
    socket.write_all(&request).unwrap();
    let before = memory_kib();
    store.set("alive", b"").unwrap();
    std::thread::sleep(SHORT);
    assert!(memory_kib() < before + 200 * 1024, "{} KiB, then {} KiB", before, memory_kib());
    // A request for all of them at once is rejected.
    let keys = vec!["large"; 100];
    let error = store.multi_get(&keys, PATIENCE).unwrap_err().to_string();
    assert!(error.contains("closed the connection"), "{error}");
    // A client that does read gets all of them.
    let mut answers = vec![0; 1 << 20];
    let mut left: u64 = 1000 * (8 + (8 << 20));
    left /= 100;
    while left > 0 {
        let length = socket.read(&mut answers).unwrap() as u64;
        assert!(length > 0);
        left = left.saturating_sub(length);
    }
}

fn memory_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
fn large_requests_are_refused_by_the_client() {
    let server = server();
    let store = client(&server);
    let error = store.set(&"k".repeat(8192), b"").unwrap_err().to_string();
    assert!(error.contains("shorten") && error.len() < 400, "{error}");
    let error = store.set("k", &vec![0; (8 << 20) + 1]).unwrap_err().to_string();
    assert!(error.contains("8388609") && error.contains("8388608"), "{error}");
    assert_eq!(store.num_keys().unwrap(), 0);
}

#[test]
fn sixty_four_clients_at_once() {
    let server = server();
    let total = Mutex::new(0);
    std::thread::scope(|scope| {
        for rank in 0..64u32 {
            let (server, total) = (&server, &total);
            scope.spawn(move || {
                let store = client(server);
                for round in 0..10 {
                    store.set(&format!("{round}/{rank}"), &rank.to_le_bytes()).unwrap();
                    store.barrier(&format!("barrier{round}"), 64, PATIENCE).unwrap();
                    let other = (rank + 7 * round) % 64;
                    let value = store.get(&format!("{round}/{other}"), Duration::ZERO).unwrap();
                    assert_eq!(value, other.to_le_bytes());
                    *total.lock().unwrap() += store.add("sum", 1).map(|_| 1).unwrap();
                }
            });
        }
    });
    assert_eq!(*total.lock().unwrap(), 640);
    assert_eq!(client(&server).add("sum", 0).unwrap(), 640);
}

#[test]
fn a_barrier_without_all() {
    let server = server();
    let store = client(&server);
    let error = store.barrier("b", 2, SHORT).unwrap_err().to_string();
    assert!(error.contains("2 ranks did not come"), "{error}");
    store.set("k", b"usable").unwrap();
}

#[test]
fn threads_of_a_client_do_not_hold_each_other_up() {
    let server = server();
    let store = client(&server);
    std::thread::scope(|scope| {
        let wait = scope.spawn(|| store.get("late", PATIENCE));
        std::thread::sleep(SHORT);
        store.set("late", b"v").unwrap();
        assert_eq!(wait.join().unwrap().unwrap(), b"v");
    });
}

#[test]
fn an_entry_is_not_lost_with_the_client_that_was_woken_for_it() {
    let server = server();
    let store = client(&server);
    let mut waiter = TcpStream::connect(server.address()).unwrap();
    let wait = [&HELLO[..], &[6], &1u64.to_le_bytes(), &2u64.to_le_bytes(), b"/q"].concat();
    waiter.write_all(&wait).unwrap();
    // This client waits before the other does.
    settle(&store);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| client(&server).queue_pop("q", PATIENCE).unwrap());
        std::thread::sleep(SHORT);
        store.queue_push("q", b"entry").unwrap();
        let mut answer = [9];
        waiter.read_exact(&mut answer).unwrap();
        assert_eq!(answer, [0]);
        drop(waiter);
        assert_eq!(other.join().unwrap().as_deref(), Some(&b"entry"[..]));
    });
}

#[test]
fn the_host_stays_for_the_others() {
    let port = HeldPort::any().unwrap();
    let host = TcpStore::host(port.number(), PATIENCE, PATIENCE).unwrap();
    let late = TcpStore::connect("localhost", port.number(), PATIENCE).unwrap();
    std::thread::scope(|scope| {
        let end = scope.spawn(move || drop(host));
        std::thread::sleep(SHORT);
        late.set("still", b"there").unwrap();
        drop(late);
        end.join().unwrap();
    });
    assert!(TcpStore::connect("localhost", port.number(), SHORT).is_err());

    // The drop does not wait forever.
    let host = TcpStore::host(0, PATIENCE, SHORT).unwrap();
    let mut late = TcpStore::connect("localhost", host.port(), PATIENCE).unwrap();
    let start = Instant::now();
    drop(host);
    assert!((SHORT..PATIENCE).contains(&start.elapsed()), "{:?}", start.elapsed());
    late.set_timeout(SHORT);
    assert!(late.set("gone", b"").is_err());
}

#[test]
fn arrivals_are_counted() {
    let host = TcpStore::host(0, PATIENCE, Duration::ZERO).unwrap();
    assert_eq!(host.join().unwrap(), 1);
    let error = host.wait_for_workers(2, SHORT).unwrap_err().to_string();
    assert!(error.contains("1 of 2 clients"), "{error}");
    let other = TcpStore::connect("localhost", host.port(), PATIENCE).unwrap();
    assert_eq!(other.join().unwrap(), 2);
    host.wait_for_workers(2, Duration::ZERO).unwrap();
    other.set("a", b"").unwrap();
    assert_eq!(host.list_keys().unwrap(), ["a"]);
}
