//! Groups whose ranks are far apart, since relays between them forward a little at a time, and
//! groups whose store ends or stops.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use rustix::net::sockopt::set_socket_recv_buffer_size;

use super::Sockets;
use crate::mesh_group::Connect;
use crate::{HashStore, MeshGroup, MeshOptions, ProcessGroup, Store, TcpStore, TcpStoreOptions};

const PATIENCE: Duration = Duration::from_secs(120);

/// Bytes of rank 0 that relays may forward.
type Allowed = Arc<(Mutex<usize>, Condvar)>;

/// Bytes of rank 0 that each frame of rank 1 allows.
const STEP: usize = 512 << 10;

/// Puts a relay before `rank`, whose address the store holds. Relays hold few bytes themselves.
fn relay(store: &HashStore, rank: u32, allowed: &Allowed) {
    let key = format!("g/mesh/{rank}");
    let mut address: serde_json::Value =
        serde_json::from_slice(&store.get(&key, Duration::ZERO).unwrap()).unwrap();
    let theirs: SocketAddr = address["tcp"].as_str().unwrap().parse().unwrap();
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    set_socket_recv_buffer_size(&listener, 16 << 10).unwrap();
    address["tcp"] = listener.local_addr().unwrap().to_string().into();
    store.set(&key, &serde_json::to_vec(&address).unwrap()).unwrap();
    let allowed = allowed.clone();
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let server = TcpStream::connect(theirs).unwrap();
            set_socket_recv_buffer_size(&server, 16 << 10).unwrap();
            let (client_too, server_too) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            let ends = if rank == 0 {
                (server, client, client_too, server_too)
            } else {
                (client, server, server_too, client_too)
            };
            let (from_0, to_1, from_1, to_0) = ends;
            let (takes, gives) = (allowed.clone(), allowed.clone());
            std::thread::spawn(move || slowly(from_0, to_1, &takes));
            std::thread::spawn(move || asking(from_1, to_0, &gives));
        }
    });
}

/// Forwards the bytes of rank 0, as many as are allowed.
fn slowly(mut from: TcpStream, mut to: TcpStream, (allowed, more): &(Mutex<usize>, Condvar)) {
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        let mut left = more.wait_while(allowed.lock().unwrap(), |left| *left < count).unwrap();
        *left -= count;
        drop(left);
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

/// Forwards the bytes of rank 1. A rank that has ended takes none.
fn asking(mut from: TcpStream, mut to: TcpStream, (allowed, more): &(Mutex<usize>, Condvar)) {
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        let _ = to.write_all(&bytes[..count]);
        *allowed.lock().unwrap() += STEP;
        more.notify_all();
    }
    let _ = to.shutdown(Shutdown::Write);
}

#[test]
fn a_rank_that_leaves_delivers_what_its_last_call_sent() {
    let store = Arc::new(HashStore::new());
    let join = |rank| {
        let sockets = Sockets::Tcp;
        let options = MeshOptions {
            timeout: PATIENCE,
            sockets,
            interface: Some("lo".into()),
            ..MeshOptions::default()
        };
        MeshGroup::new(store.clone(), rank, 2, "g", options).unwrap()
    };
    let [root, other] = [0, 1].map(join);
    let allowed: Allowed = Arc::new((Mutex::new(STEP), Condvar::new()));
    [0, 1].iter().for_each(|rank| relay(&store, *rank, &allowed));
    let data = vec![7; 3 << 20];
    std::thread::scope(|scope| {
        scope.spawn(|| {
            root.broadcast(0, &data).unwrap();
            drop(root);
        });
        let received = other.broadcast(0, &[]).unwrap();
        assert!(received == data, "{} bytes", received.len());
    });
}

/// The port of a relay before a store's server, and a switch that makes it silent: connections
/// stay, and nothing is answered.
fn stoppable(server: u16) -> (u16, Arc<AtomicBool>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let (port, stopped) = (listener.local_addr().unwrap().port(), Arc::new(AtomicBool::new(false)));
    let silent = stopped.clone();
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let server = TcpStream::connect((Ipv4Addr::LOCALHOST, server)).unwrap();
            let back = (server.try_clone().unwrap(), client.try_clone().unwrap());
            for (mut from, mut to) in [(client, server), back] {
                let silent = silent.clone();
                std::thread::spawn(move || {
                    let mut bytes = [0; 4096];
                    while let Ok(count @ 1..) = from.read(&mut bytes) {
                        if !silent.load(Ordering::Acquire) && to.write_all(&bytes[..count]).is_err() {
                            break;
                        }
                    }
                    let _ = to.shutdown(Shutdown::Write);
                });
            }
        }
    });
    (port, stopped)
}

/// The store may take two minutes to answer, and the errors come long before.
#[test]
fn a_store_that_has_ended_or_does_not_answer_delays_no_error_and_no_end() {
    for (ended, aborts) in [(false, true), (false, false), (true, true), (true, false)] {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let host = TcpStore::host_on(listener, &TcpStoreOptions::new(PATIENCE)).unwrap();
        let (port, stopped) = stoppable(host.port());
        let port = if ended { host.port() } else { port };
        let join = |rank| {
            let store = TcpStore::connect_with("127.0.0.1", port, &TcpStoreOptions::new(PATIENCE)).unwrap();
            let store = Arc::new(store);
            let options =
                MeshOptions { timeout: PATIENCE, connect: Connect::Eager, ..MeshOptions::default() };
            (MeshGroup::new(store.clone(), rank, 2, "g", options).unwrap(), store)
        };
        let [(one, store), (other, _)] = std::thread::scope(|scope| {
            [0, 1].map(|rank| scope.spawn(move || join(rank))).map(|rank| rank.join().unwrap())
        });
        if ended {
            drop(host);
            // Takes the open connection, so that the next call would search for the server.
            store.check("k").unwrap_err();
        } else {
            stopped.store(true, Ordering::Release);
        }
        let start = Instant::now();
        if aborts {
            let error = one.barrier(Duration::from_millis(100)).unwrap_err().to_string();
            assert!(error.contains("timed out") && error.contains("rank 1"), "{error}");
            // Rank 0 has done its part of the first one.
            other.barrier(PATIENCE).unwrap();
            let error = other.barrier(PATIENCE).unwrap_err().to_string();
            assert!(error.contains("rank 0 gave the group up"), "{error}");
        }
        drop((one, other));
        let took = start.elapsed();
        assert!(took < PATIENCE / 3, "ended: {ended}, aborts: {aborts}: {took:?}");
    }
}
