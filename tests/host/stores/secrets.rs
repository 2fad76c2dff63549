//! With a job's secret, a store admits only clients that have it.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use epoxide::group::{ConnectionLimits, JobSecret, Store, TcpStore, TcpStoreOptions};

const PATIENCE: Duration = Duration::from_secs(120);
/// The start of PyTorch's clients, and a request to set the key "k" behind it.
const SET: [u8; 25] = *b"\0\xce\xf7\x85\x3c\x01\x02\0\0\0\0\0\0\0/k\x01\0\0\0\0\0\0\0v";

fn secret(character: char) -> JobSecret {
    JobSecret::new(&character.to_string().repeat(32)).unwrap()
}

fn host(secret: Option<&JobSecret>) -> TcpStore {
    TcpStore::host_with(0, &options(secret)).unwrap()
}

fn options(secret: Option<&JobSecret>) -> TcpStoreOptions {
    TcpStoreOptions { secret: secret.cloned(), ..TcpStoreOptions::new(PATIENCE) }
}

/// The server's answer to these bytes, until it closes the connection.
fn said(port: u16, bytes: &[u8]) -> Vec<u8> {
    let mut socket = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket.write_all(bytes).unwrap();
    let mut answer = Vec::new();
    match socket.read_to_end(&mut answer) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
    }
    answer
}

#[test]
fn clients_with_the_secret_use_the_store() {
    let secret = secret('a');
    let host = host(Some(&secret));
    let connect = || TcpStore::connect_with("127.0.0.1", host.port(), &options(Some(&secret))).unwrap();
    let store = connect();
    std::thread::scope(|scope| {
        let late = scope.spawn(|| connect().get("key", PATIENCE));
        store.set("key", &[7; 1 << 20]).unwrap();
        assert_eq!(late.join().unwrap().unwrap(), [7; 1 << 20]);
    });
    assert_eq!(host.add("count", 3).unwrap(), 3);
    // By every address of the host that means it.
    for address in ["localhost", "0.0.0.0", "127.0.0.1", "127.8.7.6"] {
        let store = TcpStore::connect_with(address, host.port(), &options(Some(&secret)));
        store.unwrap_or_else(|error| panic!("{address}: {error}")).set(address, b"").unwrap();
    }
}

#[test]
fn a_stranger_changes_nothing_in_a_store_with_a_secret() {
    let secret = secret('a');
    let store = host(Some(&secret));
    // PyTorch's clients begin with this request.
    let answer = said(store.port(), &SET);
    assert!(
        String::from_utf8_lossy(&answer).contains("lets in only who shows the job's secret"),
        "{answer:?}"
    );
    // With an opening: then no proof, a wrong one, or the server's own sent back.
    let opening = [b"EPXS".as_slice(), &[1; 32]].concat();
    let mut socket = TcpStream::connect((Ipv4Addr::LOCALHOST, store.port())).unwrap();
    socket.write_all(&opening).unwrap();
    let mut reply = [0; 8 + 64];
    socket.read_exact(&mut reply).unwrap();
    socket.write_all(&reply[8 + 32..]).unwrap();
    let _ = socket.write_all(&SET);
    let mut rest = Vec::new();
    let _ = socket.read_to_end(&mut rest);
    assert_eq!(rest, b"", "closed without a word");
    let wrong = [&opening, [0; 32].as_slice(), &SET].concat();
    assert_eq!(said(store.port(), &wrong).len(), 8 + 64, "the reply, and no more");
    let skipped = [&opening, SET.as_slice(), &[0; 64]].concat();
    assert_eq!(said(store.port(), &skipped).len(), 8 + 64);
    assert!(!store.check("k").unwrap());
    // The same bytes are a request where there is no secret.
    let open = host(None);
    let mut socket = TcpStream::connect((Ipv4Addr::LOCALHOST, open.port())).unwrap();
    socket.write_all(&SET).unwrap();
    assert_eq!(open.get("k", PATIENCE).unwrap(), b"v");
}

#[test]
fn a_missing_wrong_or_superfluous_secret_is_an_error_at_once() {
    let (ours, other) = (secret('a'), secret('b'));
    let (closed, open) = (host(Some(&ours)), host(None));
    let cases = [
        (closed.port(), None, "lets in only who shows the job's secret"),
        (closed.port(), Some(&other), "does not know this job's secret"),
        (open.port(), Some(&ours), "this store has no secret, and the client has one"),
    ];
    for (port, secret, reason) in cases {
        let start = Instant::now();
        let error = TcpStore::connect_with("127.0.0.1", port, &options(secret)).unwrap_err().to_string();
        assert!(error.contains(reason) && error.contains(&port.to_string()), "{error}");
        assert!(error.contains("EPOXIDE_JOB_SECRET") || error.contains("give the process"), "{error}");
        assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
    }
}

/// Bytes that set a terminal's title and its clipboard, and begin a line of their own.
const FORGED: &[u8] = b"\x1b]0;owned\x07\x1b]52;c;Y3VybA==\x07 \"quoted\"\nPASS\r\x1b[2J";

#[test]
fn a_strangers_refusal_is_shown_as_its_words_without_control_characters() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for mut socket in listener.incoming().map_while(Result::ok) {
            let length = (1u32 << 31 | FORGED.len() as u32).to_le_bytes();
            let _ = socket.write_all(&[b"EPXS", length.as_slice(), FORGED].concat());
            let _ = socket.read(&mut [0; 256]);
        }
    });
    for secret in [None, Some(secret('a'))] {
        let error = TcpStore::connect_with("127.0.0.1", port, &options(secret.as_ref())).unwrap_err();
        let error = error.to_string();
        assert!(!error.chars().any(char::is_control), "{error:?}");
        assert!(error.contains("the listener there, without a proof"), "{error}");
        assert!(error.contains(r#"answers "\u{1b}]0;owned\u{7}"#), "{error}");
        assert!(error.contains(r#" \"quoted\"\nPASS\r\u{1b}[2J""#), "{error}");
    }
}

#[test]
fn values_of_a_store_without_a_secret_are_shown_without_control_characters() {
    let store = host(None);
    let address = format!("tcp://127.0.0.1:{}?rank=1&world_size=2", store.port());
    store.set("epoxide/world_size", FORGED).unwrap();
    let limits = ConnectionLimits::default();
    let error = epoxide::group::Rendezvous::at_with(&address, PATIENCE, None, limits).unwrap_err();
    let error = error.to_string();
    assert!(!error.chars().any(char::is_control), "{error:?}");
    assert!(error.contains("the rank that came first says") && error.contains("nPASS"), "{error}");
}

/// PyTorch's server closes a connection whose first byte is no request.
#[test]
fn a_server_that_knows_no_challenge_is_named_in_time() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || listener.incoming().for_each(drop));
    let start = Instant::now();
    let error = TcpStore::connect_with("127.0.0.1", port, &options(Some(&secret('a')))).unwrap_err();
    assert!(error.to_string().contains("as servers of PyTorch do"), "{error}");
    assert!(start.elapsed() < PATIENCE, "{:?}", start.elapsed());
}

/// If clients are given a loopback address, only loopback is listened on.
#[test]
fn a_store_for_loopback_listens_there_alone() {
    let sockets = |port: u16| -> Vec<String> {
        ["/proc/net/tcp", "/proc/net/tcp6"]
            .iter()
            .filter_map(|path| std::fs::read_to_string(path).ok())
            .flat_map(|table| table.lines().map(str::to_owned).collect::<Vec<_>>())
            .filter_map(|line| {
                let fields: Vec<&str> = line.split_whitespace().collect();
                let listens = fields.get(3) == Some(&"0A");
                fields
                    .get(1)
                    .filter(|address| listens && address.ends_with(&format!(":{port:04X}")))
                    .map(|address| (*address).to_owned())
            })
            .collect()
    };
    for host in ["127.0.0.1", "localhost", "elsewhere.invalid"] {
        let held = epoxide::internal::group::HeldPort::any().unwrap();
        let address = format!("tcp://{host}:{}?rank=0&world_size=1", held.number());
        let rendezvous = epoxide::group::Rendezvous::at(&address, PATIENCE).unwrap();
        let listening = sockets(held.number());
        let loopback = format!("0100007F:{:04X}", held.number());
        match host {
            // Clients with another name connect at another address.
            "elsewhere.invalid" => assert!(listening[0].starts_with("000000"), "{listening:?}"),
            "localhost" if listening.len() > 1 => {
                let loopback6 = format!("00000000000000000000000001000000:{:04X}", held.number());
                assert_eq!(listening, [loopback, loopback6]);
            }
            _ => assert_eq!(listening, [loopback]),
        }
        drop(rendezvous);
    }
}
