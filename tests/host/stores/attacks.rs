//! The store over TCP under attack by processes that reach its port. The resources of one
//! connection, and of all together, are bounded, and other clients continue.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use epoxide::Result;
use epoxide::group::{ConnectionLimits, Store, TcpStore};
use epoxide::internal::group::TcpStoreServer;
use epoxide_testing::alone::{self, one_test};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::faults::{HELLO, PATIENCE, SHORT, client, server};

const MIB: usize = 1 << 20;

fn limited(limits: ConnectionLimits) -> TcpStoreServer {
    TcpStoreServer::with_limits(TcpListener::bind(("127.0.0.1", 0)).unwrap(), &limits).unwrap()
}

/// A connection that has completed the protocol's greeting.
fn greeted(server: &TcpStoreServer) -> TcpStream {
    let mut socket = TcpStream::connect(server.address()).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket.write_all(&HELLO).unwrap();
    socket
}

fn number(number: usize) -> [u8; 8] {
    (number as u64).to_le_bytes()
}

fn string(bytes: &[u8]) -> Vec<u8> {
    [&number(bytes.len())[..], bytes].concat()
}

/// A request that lists keys: 6 waits for them, 10 gets their values.
fn listing(request: u8, keys: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = [&[request][..], &number(keys.len())].concat();
    keys.iter().for_each(|key| bytes.extend_from_slice(&string(key)));
    bytes
}

fn ping(socket: &mut TcpStream) {
    socket.write_all(&[13, 1, 2, 3, 4]).unwrap();
    let mut answer = [0; 4];
    socket.read_exact(&mut answer).unwrap();
    assert_eq!(answer, [1, 2, 3, 4]);
}

/// Returns true if the server serves the connection, and false if it closes it.
fn is_let_in(mut socket: TcpStream) -> bool {
    socket.write_all(&[13, 1, 2, 3, 4]).and_then(|()| socket.read_exact(&mut [0; 4])).is_ok()
}

/// True once the server has closed the connection.
fn is_closed(mut socket: &TcpStream, within: Duration) -> bool {
    socket.set_read_timeout(Some(within)).unwrap();
    let mut answer = vec![0; MIB];
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

fn held(server: &TcpStoreServer) -> (usize, usize) {
    let held = server.held();
    (held.clients.load(Ordering::Relaxed), held.store.load(Ordering::Relaxed))
}

/// Waits until the server has processed all bytes sent to it.
pub fn settle(store: &TcpStore) {
    for _ in 0..3 {
        store.check("settle").unwrap();
    }
}

/// Processor time of this process so far.
fn processor_time() -> Duration {
    let mut usage = std::mem::MaybeUninit::uninit();
    // SAFETY: the out pointer is valid, and the call fills it where it succeeds, which is checked.
    let usage: libc::rusage = unsafe {
        assert_eq!(libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()), 0);
        usage.assume_init()
    };
    let time = |time: libc::timeval| Duration::new(time.tv_sec as u64, time.tv_usec as u32 * 1000);
    time(usage.ru_utime) + time(usage.ru_stime)
}

/// The server has one thread, so a cancelled wait delays the other clients by its processor time.
/// It must not grow with the waits of other clients, nor with the square of the request's keys.
#[test]
fn cancelled_waits_do_not_hold_up_the_others() {
    // The processor time is the process's.
    alone::run("stores::attacks::cancelled_waits_do_not_hold_up_the_others", cancel_waits);
}

fn cancel_waits() {
    const PAIRS: usize = 30_000;
    /// Caches and clocks change a cost by less than this factor. A scan of all waits or keys
    /// changes it by far more.
    const FACTOR: u32 = 20;
    let server = server();
    let mut canceller = greeted(&server);
    let mut cost = |requests: &[u8], answers: usize| {
        let before = processor_time();
        canceller.write_all(requests).unwrap();
        let mut answer = vec![9; answers];
        canceller.read_exact(&mut answer).unwrap();
        assert!(answer.iter().all(|answer| *answer == 1));
        processor_time() - before
    };
    let pairs = [listing(6, &[b"/x".to_vec()]), vec![12]].concat().repeat(PAIRS);
    let alone = cost(&pairs, PAIRS);
    // 10 MB of keys with a waiting client.
    let mut waiter = greeted(&server);
    let keys: Vec<Vec<u8>> = (0..128 << 10).map(|key| format!("/{key:070}").into_bytes()).collect();
    waiter.write_all(&listing(6, &keys)).unwrap();
    ping(&mut waiter);
    let beside = cost(&pairs, PAIRS);
    println!(
        "{PAIRS} cancelled waits take {alone:?} of a processor, and {beside:?} beside {} other waits",
        keys.len()
    );
    assert!(beside < alone * FACTOR, "{beside:?} beside many waits, {alone:?} alone");
    // As many keys as a request may name: all different, or the same key each time.
    let [mut many, mut one] = [keys, vec![b"/y".to_vec(); 128 << 10]].map(|keys| listing(6, &keys));
    many.push(12);
    one.push(12);
    let (different, same) = (cost(&many, 1), cost(&one, 1));
    println!("a wait for that many keys takes {different:?}, for one key that often {same:?}");
    assert!(same < different * FACTOR, "{same:?} for one key that often, {different:?} for different keys");
}

/// The reader never stops sending requests. The calls of another client end before the reader has
/// received `MOST` bytes.
#[test]
fn a_client_that_reads_fast_does_not_hold_up_the_others() {
    const MOST: usize = 16 << 30;
    const CALLS: u64 = 20;
    let server = server();
    let store = client(&server);
    store.set("large", &vec![7; 8 * MIB]).unwrap();
    let reader = greeted(&server);
    let (read, served) = (&AtomicUsize::new(0), &AtomicU64::new(0));
    std::thread::scope(|scope| {
        let mut writer = &reader;
        scope.spawn(move || {
            let get = [&[3][..], &string(b"/large")].concat().repeat(64);
            // Until the connection is shut down.
            while writer.write_all(&get).is_ok() {}
        });
        let mut reader = &reader;
        scope.spawn(move || {
            let mut answers = vec![0; MIB];
            while served.load(Ordering::Relaxed) < CALLS && read.load(Ordering::Relaxed) < MOST {
                let length = reader.read(&mut answers).unwrap();
                assert!(length > 0, "the server has closed the connection");
                read.fetch_add(length, Ordering::Relaxed);
            }
            reader.shutdown(Shutdown::Both).unwrap();
        });
        // Wait until the reader has begun to read.
        while read.load(Ordering::Relaxed) < 8 * MIB {
            std::thread::yield_now();
        }
        for _ in 0..CALLS {
            store.set("other", b"1").unwrap();
            served.fetch_add(1, Ordering::Relaxed);
        }
    });
    let read = read.load(Ordering::Relaxed) / MIB;
    println!("{CALLS} calls of another while a client reads {read} MiB");
    assert!(read < MOST / MIB, "{CALLS} calls of another had to wait until a client had read {read} MiB");
}

#[test]
fn answers_of_many_values_are_made_as_they_are_read() {
    let server = server();
    let store = client(&server);
    let keys: Vec<String> = (0..30).map(|key| format!("{key}")).collect();
    for (index, key) in keys.iter().enumerate() {
        store.set(key, &vec![index as u8; 8 * MIB]).unwrap();
    }
    let request = listing(10, &keys.iter().map(|key| format!("/{key}").into_bytes()).collect::<Vec<_>>());
    let mut sockets: Vec<TcpStream> = (0..8).map(|_| greeted(&server)).collect();
    for socket in &mut sockets {
        // Requests of 3 KB for 240 MiB each.
        socket.write_all(&request.repeat(8)).unwrap();
    }
    settle(&store);
    let (clients, values) = held(&server);
    assert!(clients < 4 * MIB && values < 241 * MIB, "{clients}, {values}");
    // Clients get the values at their request, and values that only they hold are counted.
    for key in &keys {
        store.delete(key).unwrap();
    }
    settle(&store);
    assert!(held(&server).1 > 239 * MIB, "{:?}", held(&server));
    let mut answer = vec![0; 8 + 8 * MIB];
    for index in 0..keys.len() {
        sockets[0].read_exact(&mut answer).unwrap();
        assert!(answer[..8] == number(8 * MIB) && answer[8..].iter().all(|byte| *byte == index as u8));
    }
    drop(sockets);
    let start = Instant::now();
    while held(&server).1 > MIB {
        assert!(start.elapsed() < PATIENCE, "{:?}", held(&server));
        settle(&store);
    }
}

#[test]
fn a_full_store_refuses_more_and_goes_on() {
    let server = limited(ConnectionLimits { max_store_bytes: MIB, ..ConnectionLimits::default() });
    let store = client(&server);
    let mut set = 0;
    let error = loop {
        match store.set(&format!("key{set}"), &[1; 60_000]) {
            Ok(()) => set += 1,
            Err(error) => break error.to_string(),
        }
    };
    assert!(set == 17 && error.contains("ConnectionLimits") && error.contains("its log"), "{set}: {error}");
    store.set("filler", &vec![2; MIB - held(&server).1 - 300]).unwrap();
    let large = vec![3; 4096];
    let refused = |outcome: Result<()>| {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("ConnectionLimits"), "{error}");
    };
    refused(store.append("key0", &large));
    refused(store.append("new", &large));
    refused(store.queue_push("queue", &large));
    refused(store.compare_set("new", b"", &large).map(drop));
    refused(store.multi_set(&[("a", &large), ("b", b"")]));
    let add = |key: usize| store.add(&format!("{key}{}", "c".repeat(100)), 1);
    refused((0..3).try_for_each(|key| add(key).map(drop)));
    assert!(held(&server).1 <= MIB, "{:?}", held(&server));
    // Stored values stay, and may be replaced and counted on.
    assert_eq!(store.get("key0", PATIENCE).unwrap(), [1; 60_000]);
    store.set("key0", &[4; 60_000]).unwrap();
    assert!(store.delete("key1").unwrap() && store.delete("key2").unwrap());
    store.set("key1", &[5; 50_000]).unwrap();
    store.append("key1", &large).unwrap();
}

#[test]
fn names_of_keys_are_listed_in_slices() {
    let server = server();
    let store = client(&server);
    let names: Vec<String> = (0..20_000).map(|key| format!("{key:01000}")).collect();
    for names in names.chunks(5000) {
        let entries: Vec<(&str, &[u8])> = names.iter().map(|name| (name.as_str(), &b""[..])).collect();
        store.multi_set(&entries).unwrap();
    }
    let mut sockets: Vec<TcpStream> = (0..20).map(|_| greeted(&server)).collect();
    for socket in &mut sockets {
        socket.write_all(&[17; 1000]).unwrap();
    }
    settle(&store);
    // Requests for 400 MB at once, and 400 GB in total.
    assert!(held(&server).0 < 30 * MIB, "{:?}", held(&server));
    let mut listed = store.list_keys().unwrap();
    listed.sort();
    assert!(listed == names);
}

#[test]
fn a_client_without_a_greeting_holds_no_memory() {
    let server = server();
    let store = client(&server);
    settle(&store);
    let before = held(&server).0;
    // The greeting without its last byte, and then a request of 240 MiB in place of that byte; and
    // such a request at once.
    let request = [&[11][..], &number(30), &string(b"k"), &number(8 * MIB), &vec![0; 2 * MIB]].concat();
    for start in [&HELLO[..4], &[]] {
        let mut socket = TcpStream::connect(server.address()).unwrap();
        // The server may close the connection during a write.
        let _ = socket.write_all(start).and_then(|()| socket.write_all(&request));
        settle(&store);
        assert!(held(&server).0 <= before, "{:?}", held(&server));
        assert!(is_closed(&socket, PATIENCE));
    }
}

#[test]
fn the_client_that_holds_the_most_is_closed() {
    let server = limited(ConnectionLimits { max_client_bytes: 6 * MIB, ..ConnectionLimits::default() });
    let store = client(&server);
    let part = |bytes: usize| {
        let mut socket = greeted(&server);
        // The server may close it in the middle.
        let _ = socket.write_all(&[&[1][..], &string(b"/k"), &number(8 * MIB), &vec![0; bytes]].concat());
        settle(&store);
        socket
    };
    let sockets: Vec<TcpStream> = (0..3).map(|_| part(MIB)).collect();
    let most = part(4 * MIB);
    assert!(is_closed(&most, PATIENCE));
    assert!(held(&server).0 <= 6 * MIB, "{:?}", held(&server));
    assert!(sockets.iter().all(|socket| !is_closed(socket, Duration::from_millis(20))));
    // Keys with a waiting client count as well.
    let mut waiter = greeted(&server);
    let keys: Vec<Vec<u8>> = (0..30_000).map(|key| format!("/{key:030}").into_bytes()).collect();
    let _ = waiter.write_all(&listing(6, &keys));
    assert!(is_closed(&waiter, PATIENCE));
    store.set("still", b"there").unwrap();
}

#[test]
fn no_more_clients_than_allowed_and_idle_ones_stay() {
    // Longer than a client takes to greet on a busy machine.
    let patience = Duration::from_secs(3);
    let server = limited(ConnectionLimits {
        max_clients: 4,
        authentication_timeout: patience,
        ..ConnectionLimits::default()
    });
    let mut silent = TcpStream::connect(server.address()).unwrap();
    silent.write_all(&HELLO[..2]).unwrap();
    let mut clients: Vec<TcpStream> = (0..4).map(|_| greeted(&server)).collect();
    clients.iter_mut().for_each(ping);
    assert!(is_closed(&greeted(&server), PATIENCE));
    assert!(is_closed(&silent, PATIENCE), "it has not shown who it is");
    // The others have been idle for about as long.
    std::thread::sleep(SHORT);
    clients.iter_mut().for_each(ping);
    drop(clients.pop());
    let start = Instant::now();
    while !is_let_in(greeted(&server)) {
        assert!(start.elapsed() < PATIENCE);
    }
}

/// A client's requests are done even if it leaves at once.
#[test]
fn requests_of_a_client_that_has_left_are_done() {
    let server = server();
    let mut socket = greeted(&server);
    let add = [&[4][..], &string(b"/n"), &number(1)].concat();
    socket.write_all(&add.repeat(3000)).unwrap();
    socket.shutdown(std::net::Shutdown::Write).unwrap();
    let mut answers = Vec::new();
    socket.read_to_end(&mut answers).unwrap();
    assert_eq!(answers.len(), 3000 * 8);
    assert_eq!(client(&server).add("n", 0).unwrap(), 3000);
}

/// Makes `silent_connections_do_not_use_up_the_descriptors` the process that is attacked.
const ATTACKED: &str = "EPOXIDE_TEST_ATTACKED";

#[test]
fn silent_connections_do_not_use_up_the_descriptors() {
    if std::env::var_os(ATTACKED).is_some() {
        let limit = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(256), ..limit }).unwrap();
        let server = server();
        eprintln!("server at {}", server.address());
        std::io::stdin().read_exact(&mut [0]).unwrap();
        assert!(std::fs::File::open("/dev/null").is_ok(), "the rest of the process has descriptors");
        return;
    }
    let mut attacked = one_test("stores::attacks::silent_connections_do_not_use_up_the_descriptors")
        .env(ATTACKED, "1")
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(attacked.stderr.take().unwrap()).lines().map(|line| line.unwrap());
    let address = lines.find_map(|line| line.strip_prefix("server at ").map(str::to_owned)).unwrap();
    let address: SocketAddr = address.parse().unwrap();
    let silent: Vec<_> = (0..300).map(|_| TcpStream::connect(address).unwrap()).collect();
    // Idle connections that have greeted are bounded as well.
    let mut speaking: Vec<_> = (0..300).map(|_| TcpStream::connect(address).unwrap()).collect();
    let first = TcpStore::connect("127.0.0.1", address.port(), PATIENCE).unwrap();
    speaking.iter_mut().for_each(|socket| drop(socket.write_all(&HELLO)));
    first.set("k", b"v").unwrap();
    assert_eq!(first.get("k", PATIENCE).unwrap(), b"v");
    attacked.stdin.take().unwrap().write_all(b"g").unwrap();
    let rest: Vec<String> = lines.collect();
    assert!(attacked.wait().unwrap().success(), "{rest:?}");
    drop((silent, speaking));
}
