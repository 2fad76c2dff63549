//! A process between client and server that forwards a challenge unchanged gains nothing behind it.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::admission::{MARK, claims};
use super::protocol::{MAGIC, Message, Query};
use super::record::seal;
use super::{TcpStore, TcpStoreOptions, TcpStoreServer};
use crate::secret::{Initiator, Keys, Purpose, REPLY, Signer};
use crate::{ConnectionLimits, JobSecret, Store};

const PATIENCE: Duration = Duration::from_secs(120);

fn secret() -> JobSecret {
    JobSecret::new(&"s".repeat(32)).unwrap()
}

fn store() -> TcpStore {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    TcpStore::host_on(listener, &options()).unwrap()
}

fn options() -> TcpStoreOptions {
    TcpStoreOptions { secret: Some(secret()), ..TcpStoreOptions::new(PATIENCE) }
}

/// A connection that a client has opened and proved itself on, and its keys.
fn proven(address: SocketAddr, run: &str) -> Option<(TcpStream, Keys)> {
    let mut socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let initiator = Initiator::new(&secret(), Purpose::Store, claims(run, address)).unwrap();
    socket.write_all(&[MARK.as_slice(), &initiator.opening()].concat()).unwrap();
    let mut reply = [0; 8 + REPLY];
    socket.read_exact(&mut reply).unwrap();
    let (proof, keys) = initiator.answer(reply[8..].first_chunk().unwrap()).ok()?;
    socket.write_all(&proof).unwrap();
    Some((socket, keys))
}

fn record(signer: &mut Signer, bytes: &[u8]) -> Vec<u8> {
    let mut record = Vec::new();
    seal(signer, bytes, &mut record);
    record
}

/// True where the server closes the connection without an answer.
fn is_closed(mut socket: TcpStream) -> bool {
    let mut rest = Vec::new();
    let outcome = socket.read_to_end(&mut rest);
    // No answer within the time to read, either, is no end.
    let has_ended = outcome.map_or_else(|error| error.kind() == ErrorKind::ConnectionReset, |_| true);
    has_ended && rest.is_empty()
}

#[test]
fn requests_behind_a_challenge_that_was_forwarded_change_nothing() {
    let store = store();
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, store.port()));
    let hello = Message::query(Query::Validate).word(MAGIC).0;
    let set = |key| Message::query(Query::Set).key(key).string(b"v").0;
    // PyTorch's client would continue like this, or a process that has taken the connection over.
    let (mut socket, _) = proven(address, "").unwrap();
    let _ = socket.write_all(&[&*hello, &set("plain")].concat());
    assert!(is_closed(socket));
    for attack in ["changed", "repeated", "left out", "sent back"] {
        let (mut socket, mut keys) = proven(address, "").unwrap();
        let begin = record(&mut keys.send, &hello);
        let mut next = record(&mut keys.send, &set(attack));
        match attack {
            "changed" => next[16] ^= 1,
            "repeated" => next.clone_from(&begin),
            "left out" => next = record(&mut keys.send, &set(attack)),
            _ => next = record(&mut keys.receive, &set(attack)),
        }
        let _ = socket.write_all(&[begin, next].concat());
        assert!(is_closed(socket), "{attack}");
    }
    assert_eq!(store.list_keys().unwrap(), [""; 0]);
    // The same, signed as it must be.
    let (mut socket, mut keys) = proven(address, "").unwrap();
    let good = record(&mut keys.send, &[&*hello, &set("good")].concat());
    socket.write_all(&good).unwrap();
    assert_eq!(store.get("good", PATIENCE).unwrap(), b"v");
}

#[test]
fn a_server_of_another_run_proves_nothing() {
    let store = store();
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, store.port()));
    assert!(proven(address, "").is_some());
    assert!(proven(address, "/run/1").is_none());
}

#[test]
fn large_requests_and_answers_travel_in_records() {
    let store = store();
    let client = TcpStore::connect_with("127.0.0.1", store.port(), &options()).unwrap();
    let value: Vec<u8> = (0..5_000_000u32).map(|at| at as u8).collect();
    std::thread::scope(|scope| {
        let late = scope.spawn(|| client.get("late", PATIENCE).unwrap());
        for key in ["a", "b", "c", "late"] {
            store.set(key, &value).unwrap();
        }
        assert_eq!(late.join().unwrap(), value);
    });
    assert_eq!(client.multi_get(&["a", "b", "c"], PATIENCE).unwrap(), vec![value; 3]);
}

/// A connection of the client `number` that begins with `request`, if the server admits it.
fn admitted(port: u16, number: u32, request: Message) -> Option<TcpStream> {
    let mut socket = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let hello = Message::query(Query::Validate).word(MAGIC);
    socket.write_all(&[hello.0, request.then(Query::Ping).word(number).0].concat()).unwrap();
    // The answer to a ping as the request.
    let mut answer = [0; 4];
    socket.read_exact(&mut answer).is_ok().then_some(socket)
}

#[test]
fn a_server_that_ends_admits_its_clients_alone() {
    let ping = |number| Message::query(Query::Ping).word(number);
    let server = TcpStoreServer::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = server.port();
    let client = admitted(port, 1, ping(1)).unwrap();
    let ends = std::thread::spawn(|| server.finish(PATIENCE));
    let start = Instant::now();
    let mut number = 2;
    while admitted(port, number, ping(number)).is_some() {
        assert!(start.elapsed() < PATIENCE, "a new client is admitted");
        number += 1;
    }
    let again = admitted(port, 1, ping(1));
    assert!(again.is_some(), "a further connection of a client");
    // Without a ping first, as any process may begin.
    assert!(admitted(port, 1, Message::query(Query::NumKeys)).is_none());
    assert!(admitted(port, 1, Message::query(Query::Ping).word(7)).is_none());
    drop((client, again));
    ends.join().unwrap();
}

#[test]
fn a_server_whose_clients_may_take_any_time_to_begin_serves() {
    let limits = ConnectionLimits { authentication_timeout: Duration::MAX, ..ConnectionLimits::default() };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let server = TcpStoreServer::with_limits(listener, &limits).unwrap();
    let _silent = TcpStream::connect(server.address()).unwrap();
    let client = TcpStore::connect_with("127.0.0.1", server.port(), &TcpStoreOptions::new(PATIENCE)).unwrap();
    client.set("k", b"v").unwrap();
    assert_eq!(client.get("k", PATIENCE).unwrap(), b"v");
}

/// The first ping of a connection, which a test serves.
fn first_ping(listener: &TcpListener) -> [u8; 4] {
    let (mut socket, _) = listener.accept().unwrap();
    let mut hello = [0; 10];
    socket.read_exact(&mut hello).unwrap();
    let number: [u8; 4] = hello[6..].try_into().unwrap();
    socket.write_all(&number).unwrap();
    number
}

#[test]
fn connections_of_a_client_have_its_number() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let numbers = std::thread::spawn(move || [0; 4].map(|_| first_ping(&listener)));
    let options = TcpStoreOptions::new(PATIENCE);
    for _ in 0..2 {
        let client = TcpStore::connect_with("127.0.0.1", port, &options).unwrap();
        // The first call finds its connection closed, and the next one opens another.
        client.num_keys().unwrap_err();
        client.num_keys().unwrap_err();
    }
    let [one, again, other, other_again] = numbers.join().unwrap();
    assert!(one == again && other == other_again && one != other);
}

/// A server that has ended does not start again.
#[test]
fn a_client_does_not_search_for_a_server_that_has_ended() {
    let store = store();
    let client = TcpStore::connect_with("127.0.0.1", store.port(), &options()).unwrap();
    drop(store);
    let start = Instant::now();
    for error in [client.set("k", b"v"), client.set("k", b"v")].map(Result::unwrap_err) {
        assert!(error.to_string().contains("has ended"), "{error}");
    }
    assert!(start.elapsed() < PATIENCE / 2, "{:?}", start.elapsed());
}

/// Forged answers are rejected.
#[test]
fn a_client_believes_no_answer_that_the_server_has_not_signed() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let server = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut opening = [0; 4 + 32];
        socket.read_exact(&mut opening).unwrap();
        let opening = opening[4..].first_chunk().unwrap();
        let claims = claims("", address);
        let (_, reply) = crate::secret::Responder::new(&secret(), Purpose::Store, &claims, opening).unwrap();
        let length = (REPLY as u32).to_le_bytes();
        socket.write_all(&[MARK.as_slice(), &length, &reply].concat()).unwrap();
        // A record with the answer to the ping, without a valid signature.
        let answer = [4u32.to_le_bytes().as_slice(), &[1; 4], &[0; 32]].concat();
        socket.write_all(&answer).unwrap();
        let mut rest = Vec::new();
        let _ = socket.read_to_end(&mut rest);
    });
    let client = TcpStore::connect_with("127.0.0.1", address.port(), &options());
    let error = client.unwrap_err().to_string();
    assert!(error.contains("not signed with this connection's key"), "{error}");
    server.join().unwrap();
}
