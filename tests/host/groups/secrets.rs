//! Groups of a job that has a secret: admitted and rejected connections.

use std::io::{Read, Write};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::sync::Arc;

use epoxide::Error;
use epoxide::group::Connect;
use epoxide::group::{HashStore, JobSecret, MeshGroup, MeshOptions, ProcessGroup, Sockets, Store};
use epoxide_testing::tier;

use super::harness::{PATIENCE, options, threads};

fn secret(character: &str) -> Option<JobSecret> {
    Some(JobSecret::new(&character.repeat(32)).unwrap())
}

fn store() -> Arc<dyn Store> {
    Arc::new(HashStore::new())
}

/// A hello of rank 1 for the listener with this token, with `rest` in its payload behind it.
fn hello(token: &str, rest: &[u8]) -> Vec<u8> {
    let mut bytes = [0u8; 48];
    bytes[..4].copy_from_slice(b"EPXG");
    // A hello; then operation, dtype and reduction, in the ranks' encoding.
    bytes[4..8].copy_from_slice(&[1, 1, 2, 1]);
    bytes[16..24].copy_from_slice(&1u64.to_le_bytes());
    bytes[24..28].fill(0xff);
    bytes[32..40].fill(0xff);
    bytes[40..48].copy_from_slice(&((token.len() + rest.len()) as u64).to_le_bytes());
    [&bytes, token.as_bytes(), rest].concat()
}

/// A frame of a trusted rank that ends a group.
fn abort() -> Vec<u8> {
    let mut frame = hello("", b"");
    frame[4] = 6;
    frame
}

/// The token of rank 0, and where it listens.
fn rank_0(store: &dyn Store) -> (String, SocketAddr) {
    let address: serde_json::Value =
        serde_json::from_slice(&store.get("g/mesh/0", PATIENCE).unwrap()).unwrap();
    let text = |name: &str| address[name].as_str().unwrap().to_owned();
    (text("token"), SocketAddr::from_abstract_name(text("unix")).unwrap())
}

#[test]
fn ranks_with_the_secret_take_part() {
    for sockets in [Sockets::Auto, Sockets::Tcp] {
        for connect in [Connect::Lazy, Connect::Eager] {
            let interface = Some("lo".to_owned());
            let options =
                MeshOptions { sockets, connect, interface, secret: secret("a"), ..options(PATIENCE) };
            threads(4, options, |group| {
                let rank = group.rank();
                // All connect to each other at once, and much waits for the proofs.
                let large = vec![rank as u8; 3 << 20];
                for _ in 0..tier::pick(1, 3) {
                    assert_eq!(group.all_gather(&large).unwrap()[2], vec![2; 3 << 20]);
                }
                let half = group.split_group(Some(u64::from(rank % 2)), 0).unwrap().unwrap();
                assert_eq!(half.all_gather(&[rank as u8]).unwrap(), [[rank as u8 % 2], [rank as u8 % 2 + 2]]);
                half.destroy().unwrap();
                group.destroy().unwrap();
            });
        }
    }
}

#[test]
fn ranks_with_different_secrets_part_with_the_reason() {
    for sockets in [Sockets::Auto, Sockets::Tcp] {
        let store = store();
        let errors: Vec<Error> = std::thread::scope(|scope| {
            let join = |(rank, character)| {
                let store = store.clone();
                let (connect, interface) = (Connect::Eager, Some("lo".to_owned()));
                let secret = secret(character);
                let options = MeshOptions { sockets, connect, interface, secret, ..options(PATIENCE) };
                scope.spawn(move || MeshGroup::new(store, rank, 2, "g", options).unwrap_err())
            };
            let ranks = [(0, "a"), (1, "b")].map(join);
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        for error in errors.iter().map(Error::to_string) {
            assert!(error.contains("does not know this job's secret"), "{error}");
            assert!(error.contains("EPOXIDE_JOB_SECRET") && !error.contains("aaaa"), "{error}");
        }
    }
}

#[test]
fn a_rank_without_the_secret_is_told_so() {
    if std::env::var_os(epoxide::group::JOB_SECRET).is_some() {
        return;
    }
    let (store, options) = (store(), options(PATIENCE));
    let with =
        MeshGroup::new(store.clone(), 0, 2, "g", MeshOptions { secret: secret("a"), ..options.clone() });
    let with = with.unwrap();
    let without = MeshGroup::new(store, 1, 2, "g", options).unwrap();
    let error = without.barrier(PATIENCE).unwrap_err();
    let what = "whether the job has a secret (EPOXIDE_JOB_SECRET or EPOXIDE_JOB_SECRET_FILE)";
    assert!(
        matches!(&error, Error::Mismatch { what: said, peer: 0, ours, theirs, .. } if *said == what && ours == "no" && theirs == "yes"),
        "{error}"
    );
    assert!(matches!(with.barrier(PATIENCE).unwrap_err(), Error::Mismatch { .. }));
}

/// Purpose of the secret: with the token alone a stranger ends the group.
#[test]
fn a_client_of_the_store_ends_a_group_without_a_secret() {
    if std::env::var_os(epoxide::group::JOB_SECRET).is_some() {
        return;
    }
    let store = store();
    let group = MeshGroup::new(store.clone(), 0, 2, "g", options(PATIENCE)).unwrap();
    let (token, name) = rank_0(&*store);
    let mut stranger = UnixStream::connect_addr(&name).unwrap();
    stranger.write_all(&[hello(&token, b""), abort()].concat()).unwrap();
    let error = group.all_gather(&[0]).unwrap_err().to_string();
    assert!(error.contains("rank 1 gave the group up"), "{error}");
}

/// A reason that a stranger has written to the store, which keeps no secret.
#[test]
fn the_reason_of_a_rank_that_is_gone_is_shown_without_control_characters() {
    let store = store();
    store.set("g/gone/1", b"\x1b]0;owned\x07\nPASS").unwrap();
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let closed = listener.local_addr().unwrap().to_string();
    drop(listener);
    let impostor = serde_json::json!({
        "size": 2, "token": "t".repeat(32), "host": "elsewhere", "unix": "none", "tcp": closed,
        "secret": std::env::var_os(epoxide::group::JOB_SECRET).is_some(),
    });
    store.set("g/mesh/1", impostor.to_string().as_bytes()).unwrap();
    let group = MeshGroup::new(store, 0, 2, "g", options(PATIENCE)).unwrap();
    let error = group.barrier(PATIENCE).unwrap_err().to_string();
    assert!(error.contains(r"\u{1b}]0;owned\u{7}\nPASS"), "{error}");
    assert!(!error.chars().any(char::is_control), "{error:?}");
}

/// A stranger that reads and writes the store, as torchrun's permits, and so has the token of every
/// rank.
#[test]
fn a_client_of_the_store_alone_takes_no_ranks_place() {
    let store = store();
    let options = MeshOptions { secret: secret("a"), ..options(PATIENCE) };
    let first = MeshGroup::new(store.clone(), 0, 2, "g", options.clone()).unwrap();
    let (token, name) = rank_0(&*store);
    let (token, abort) = (&*token, abort());
    let mut strangers = Vec::new();
    for bytes in [
        [hello(token, b""), abort.clone()].concat(),
        [hello(token, &[5; 32]), vec![0; 32], abort.clone()].concat(),
        [hello(token, &[5; 32]), abort.clone()].concat(),
    ] {
        let mut stranger = UnixStream::connect_addr(&name).unwrap();
        stranger.write_all(&bytes).unwrap();
        strangers.push(stranger);
    }
    // A connection that gets a reply, and sends its proof back.
    let reflector = std::thread::spawn({
        let mut stranger = UnixStream::connect_addr(&name).unwrap();
        stranger.write_all(&hello(token, &[6; 32])).unwrap();
        move || {
            let mut reply = [0; 64];
            stranger.read_exact(&mut reply).unwrap();
            // The group may close the connection during the write.
            let _ = stranger.write_all(&[&reply[32..], &abort].concat());
            let mut rest = Vec::new();
            let _ = stranger.read_to_end(&mut rest);
            assert!(rest.is_empty());
        }
    });
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let second = MeshGroup::new(store.clone(), 1, 2, "g", options.clone()).unwrap();
            for _ in 0..50 {
                assert_eq!(second.all_gather(&[1]).unwrap(), [[0], [1]]);
            }
            second.destroy().unwrap();
        });
        for _ in 0..50 {
            assert_eq!(first.all_gather(&[0]).unwrap(), [[0], [1]]);
        }
        first.destroy().unwrap();
    });
    reflector.join().unwrap();
}

/// An impostor at a rank's address gets only the hello.
#[test]
fn an_impostor_at_a_ranks_address_gets_no_data() {
    let store = store();
    let options = MeshOptions { secret: secret("a"), ..options(PATIENCE) };
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let impostor = serde_json::json!({
        "size": 2, "token": "t".repeat(32), "host": "elsewhere", "unix": "none",
        "tcp": listener.local_addr().unwrap().to_string(), "secret": true,
    });
    store.set("g/mesh/1", impostor.to_string().as_bytes()).unwrap();
    let group = MeshGroup::new(store, 0, 2, "g", options).unwrap();
    let heard = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut heard = vec![0; 48 + 32 + 32];
        socket.read_exact(&mut heard).unwrap();
        // Send the group's own opening back, without a proof.
        let _ = socket.write_all(&[&heard[80..], &[0; 32]].concat());
        let mut rest = Vec::new();
        let _ = socket.read_to_end(&mut rest);
        rest
    });
    let error = group.all_gather(&[9; 1000]).unwrap_err().to_string();
    assert!(
        error.contains("rank 1 is not let in: the other side does not know this job's secret"),
        "{error}"
    );
    drop(group);
    assert_eq!(heard.join().unwrap(), b"");
}

/// Groups that connect while they join first get the host of each rank.
#[test]
fn ranks_of_one_host_have_no_network_socket() {
    let store = store();
    let options = MeshOptions { connect: Connect::Eager, ..options(PATIENCE) };
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let (store, options) = (store.clone(), options.clone());
            scope.spawn(move || {
                let group = MeshGroup::new(store.clone(), rank, 3, "g", options).unwrap();
                assert!(group.shares_host());
                let address = store.get(&format!("g/mesh/{rank}"), PATIENCE).unwrap();
                let address: serde_json::Value = serde_json::from_slice(&address).unwrap();
                assert!(address["tcp"].is_null(), "{address}");
                let part = group.split_group(Some(0), 0).unwrap().unwrap();
                assert!(part.shares_host());
                part.destroy().unwrap();
                group.destroy().unwrap();
            });
        }
    });
}
