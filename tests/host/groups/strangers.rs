//! A group's sockets under attack by processes that reach them.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

use epoxide::group::{ConnectionLimits, FileStore, MeshGroup, MeshOptions, ProcessGroup, Sockets, Store};
use epoxide_testing::alone::one_test;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::harness::{PATIENCE, options};

/// Directory of the store; makes `silent_connections_do_not_use_up_the_descriptors` the rank that
/// is attacked.
const ATTACKED: &str = "EPOXIDE_TEST_ATTACKED";
const NAME: &str = "g";

fn join(directory: &str, rank: u32, limits: ConnectionLimits) -> (Arc<dyn Store>, MeshGroup) {
    let tcp =
        MeshOptions { sockets: Sockets::Tcp, interface: Some("lo".to_owned()), limits, ..options(PATIENCE) };
    let store: Arc<dyn Store> = Arc::new(FileStore::new(directory).unwrap());
    (store.clone(), MeshGroup::new(store, rank, 2, NAME, tcp).unwrap())
}

/// The address at which a rank accepts connections.
fn address(store: &dyn Store, rank: u32) -> String {
    let address = store.get(&format!("{NAME}/mesh/{rank}"), PATIENCE).unwrap();
    let address: serde_json::Value = serde_json::from_slice(&address).unwrap();
    address["tcp"].as_str().unwrap().to_owned()
}

#[test]
fn silent_connections_do_not_use_up_the_descriptors() {
    if let Ok(directory) = std::env::var(ATTACKED) {
        let limit = getrlimit(Resource::Nofile);
        setrlimit(Resource::Nofile, Rlimit { current: Some(256), ..limit }).unwrap();
        let (_, group) = join(&directory, 0, ConnectionLimits::default());
        for _ in 0..20 {
            group.barrier(PATIENCE).unwrap();
        }
        assert!(std::fs::File::open("/dev/null").is_ok(), "the rest of the process has descriptors");
        return group.destroy().unwrap();
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let mut attacked = one_test("groups::strangers::silent_connections_do_not_use_up_the_descriptors")
        .env(ATTACKED, path)
        .spawn()
        .unwrap();
    let (store, group) = join(path, 1, ConnectionLimits::default());
    let address = address(&*store, 0);
    let connect = || (0..300).map(|_| TcpStream::connect(&address).unwrap()).collect::<Vec<_>>();
    let silent = connect();
    for _ in 0..10 {
        group.barrier(PATIENCE).unwrap();
    }
    let more = connect();
    for _ in 0..10 {
        group.barrier(PATIENCE).unwrap();
    }
    group.destroy().unwrap();
    assert!(attacked.wait().unwrap().success());
    drop((silent, more));
}

/// Bytes behind a hello without the token are not read. A connection that is closed with unread
/// bytes is reset.
#[test]
fn nothing_behind_a_wrong_hello_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| join(path, rank, ConnectionLimits::default()));
        let address = address(&*ranks[0].0, 0);
        let frame = |kind: u8, len: usize| {
            let mut bytes = [0; 48];
            bytes[..4].copy_from_slice(b"EPXG");
            (bytes[4], bytes[16]) = (kind, 1);
            bytes[24..28].copy_from_slice(&u32::MAX.to_le_bytes());
            bytes[32..40].copy_from_slice(&u64::MAX.to_le_bytes());
            bytes[40..].copy_from_slice(&len.to_le_bytes());
            bytes
        };
        // A hello, and a message behind it.
        let attack = [&frame(1, 32)[..], &[b'x'; 32], &frame(3, 30_000), &[0; 30_000]].concat();
        let mut attacker = TcpStream::connect(address).unwrap();
        attacker.write_all(&attack).unwrap();
        for (_, group) in ranks {
            scope.spawn(move || {
                for _ in 0..50 {
                    group.barrier(PATIENCE).unwrap();
                }
                group.destroy().unwrap();
            });
        }
        attacker.set_read_timeout(Some(PATIENCE)).unwrap();
        let error = attacker.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    });
}
