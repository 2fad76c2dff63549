//! Groups whose ranks are far apart: relays between them forward a little at a time.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use rustix::net::sockopt::set_socket_recv_buffer_size;

use super::Sockets;
use crate::{HashStore, MeshGroup, MeshOptions, ProcessGroup, Store};

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
