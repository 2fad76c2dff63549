//! A group's sockets under attack by whoever reaches them.

use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Duration;

use epoxide::group::{ConnectionLimits, FileStore, MeshGroup, MeshOptions, ProcessGroup, Sockets, Store};
use epoxide_testing::alone::one_test;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::harness::{PATIENCE, options};

/// Directory of the store; makes `silent_connections_do_not_use_up_the_descriptors` the rank that is attacked.
const ATTACKED: &str = "EPOXIDE_TEST_ATTACKED";
const NAME: &str = "g";

fn join(directory: &str, rank: u32, limits: ConnectionLimits) -> (Arc<dyn Store>, MeshGroup) {
    let tcp =
        MeshOptions { sockets: Sockets::Tcp, interface: Some("lo".to_owned()), limits, ..options(PATIENCE) };
    let store: Arc<dyn Store> = Arc::new(FileStore::new(directory).unwrap());
    (store.clone(), MeshGroup::new(store, rank, 2, NAME, tcp).unwrap())
}

/// Where a rank takes connections.
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
    let mut attacked = one_test("strangers::silent_connections_do_not_use_up_the_descriptors")
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

/// The token that a rank asks for is no part of what is guessed here: a hello without it, and frames behind that.
#[test]
fn nothing_behind_a_wrong_hello_is_kept() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().to_str().unwrap();
    let limits = ConnectionLimits { strangers: 2, ..ConnectionLimits::default() };
    std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| join(path, rank, limits.clone()));
        let address = address(&*ranks[0].0, 0);
        // A hello with a token of the right length, and a frame that says it has 256 MiB, of which 64 come.
        let frame = |kind: u8, len: u64| {
            let mut bytes = [0; 48];
            bytes[..4].copy_from_slice(b"EPXG");
            bytes[4] = kind;
            bytes[16] = 1;
            bytes[24..28].copy_from_slice(&u32::MAX.to_le_bytes());
            bytes[32..40].copy_from_slice(&u64::MAX.to_le_bytes());
            bytes[40..].copy_from_slice(&len.to_le_bytes());
            bytes
        };
        let attack = [&frame(1, 32)[..], &[b'0'; 32], &frame(3, 256 << 20), &vec![0; 64 << 20]].concat();
        let attackers: Vec<_> = (0..4)
            .map(|_| {
                let (address, attack) = (address.clone(), attack.clone());
                scope.spawn(move || TcpStream::connect(address).unwrap().write_all(&attack).unwrap_err())
            })
            .collect();
        std::thread::sleep(Duration::from_millis(100));
        let before = memory_kib();
        for (_, group) in ranks {
            scope.spawn(move || {
                for _ in 0..50 {
                    group.barrier(PATIENCE).unwrap();
                }
                group.destroy().unwrap();
            });
        }
        for attacker in attackers {
            attacker.join().unwrap();
        }
        let after = memory_kib();
        assert!(after < before + (64 << 10), "{before} KiB, then {after} KiB");
    });
}

fn memory_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}
