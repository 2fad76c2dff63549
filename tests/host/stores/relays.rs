//! A local process that listens at the address that clients try first, and forwards their bytes to
//! the store. With a secret it can read and change no data.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use epoxide::group::{
    ConnectionLimits, JobSecret, ProcessGroup, Rendezvous, Store, TcpStore, TcpStoreOptions,
};
use epoxide::internal::group::{TcpStoreServer, host_on};
use rustix::net::sockopt::{set_ipv6_v6only, set_socket_reuseaddr};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, socket_with};

use crate::groups::networks::skip;

const PATIENCE: Duration = Duration::from_secs(120);
/// Mark and opening, all that a client sends before the server has proved that it has the secret.
const OPENING: usize = 4 + 32;
/// Mark, length, nonce and proof.
const REPLY: usize = 4 + 4 + 64;

fn secret() -> JobSecret {
    JobSecret::new(&"s".repeat(32)).unwrap()
}

fn limits() -> ConnectionLimits {
    ConnectionLimits::default()
}

/// A process at `address` that forwards every connection to `server`, and records the bytes.
struct Relay {
    /// Bytes of each connection: those of the client, and those of the server.
    heard: Arc<Mutex<Vec<[Vec<u8>; 2]>>>,
}

impl Relay {
    fn start(listener: TcpListener, server: SocketAddr) -> Relay {
        let heard: Arc<Mutex<Vec<[Vec<u8>; 2]>>> = Arc::default();
        let all = heard.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(server) = TcpStream::connect(server) else { continue };
                let index = {
                    let mut all = all.lock().unwrap();
                    all.push([Vec::new(), Vec::new()]);
                    all.len() - 1
                };
                let ends = [(client.try_clone(), server.try_clone()), (Ok(server), Ok(client))];
                for (side, (from, to)) in ends.into_iter().enumerate() {
                    let all = all.clone();
                    let (mut from, mut to) = (from.unwrap(), to.unwrap());
                    std::thread::spawn(move || {
                        let mut bytes = [0; 4096];
                        while let Ok(count @ 1..) = from.read(&mut bytes) {
                            all.lock().unwrap()[index][side].extend(&bytes[..count]);
                            if to.write_all(&bytes[..count]).is_err() {
                                break;
                            }
                        }
                        let _ = to.shutdown(Shutdown::Write);
                    });
                }
            }
        });
        Relay { heard }
    }

    /// Checks that only openings and replies were forwarded, on at least `least` connections.
    fn learnt_nothing(&self, least: usize) {
        let heard = self.heard.lock().unwrap();
        assert!(heard.len() >= least, "{} connections", heard.len());
        for [client, server] in heard.iter() {
            assert!(client.len() <= OPENING && server.len() <= REPLY, "{client:?} {server:?}");
        }
    }
}

/// Listens at `port` of an IPv6 address and leaves that port of IPv4 addresses to others, as a
/// local user can.
fn listen_v6(ip: Ipv6Addr, port: u16) -> Option<TcpListener> {
    let socket = socket_with(AddressFamily::INET6, SocketType::STREAM, SocketFlags::CLOEXEC, None).ok()?;
    set_ipv6_v6only(&socket, true).unwrap();
    set_socket_reuseaddr(&socket, true).unwrap();
    match bind(&socket, &SocketAddr::from((ip, port))) {
        Ok(()) => {}
        Err(rustix::io::Errno::ADDRNOTAVAIL) => return None,
        Err(error) => panic!("[{ip}]:{port}: {error}"),
    }
    listen(&socket, 64).unwrap();
    Some(TcpListener::from(socket))
}

fn options() -> TcpStoreOptions {
    TcpStoreOptions { secret: Some(secret()), limits: limits(), ..TcpStoreOptions::new(PATIENCE) }
}

/// A server at `ip` alone that admits clients with the secret, and a relay at [::1] with the same
/// port.
fn relayed(ip: IpAddr) -> Option<(TcpStore, Relay)> {
    let server = TcpListener::bind((ip, 0)).unwrap();
    let port = server.local_addr().unwrap().port();
    let Some(listener) = listen_v6(Ipv6Addr::LOCALHOST, port) else {
        skip("no IPv6 here: nothing to relay at [::1]");
        return None;
    };
    let store = host_on(server, &options());
    Some((store.unwrap(), Relay::start(listener, (Ipv4Addr::LOCALHOST, port).into())))
}

/// Clients connect to `localhost` and try [::1] first, the relay's address; the server is at
/// 127.0.0.1.
#[test]
fn a_relay_at_the_other_loopback_address_learns_and_changes_nothing() {
    let Some((store, relay)) = relayed(Ipv4Addr::LOCALHOST.into()) else { return };
    store.set("key", b"the value of the key").unwrap();
    // Only the relay's address: the client detects it before it has sent a proof.
    let by = TcpStore::connect_with("::1", store.port(), &options());
    let error = by.unwrap_err().to_string();
    assert!(error.contains("something forwards them") && error.contains("[::1]"), "{error}");
    // Both addresses: the client then connects to the server itself.
    let client = TcpStore::connect_with("localhost", store.port(), &options()).unwrap();
    assert_eq!(client.get("key", PATIENCE).unwrap(), b"the value of the key");
    client.set("other", b"set by the client").unwrap();
    relay.learnt_nothing(1);
    assert_eq!(store.get("other", PATIENCE).unwrap(), b"set by the client");
    assert_eq!(store.num_keys().unwrap(), 2);
}

/// A process has the port of IPv6 before the server starts. The server must not continue with IPv4
/// alone.
#[test]
fn a_store_for_a_host_name_does_not_fall_back_to_ipv4() {
    let Some(listener) = listen_v6(Ipv6Addr::UNSPECIFIED, 0) else {
        skip("no IPv6 here: nothing falls back");
        return;
    };
    let port = listener.local_addr().unwrap().port();
    let relay = Relay::start(listener, (Ipv4Addr::LOCALHOST, port).into());
    let taken = |error: epoxide::Error| {
        let error = error.to_string();
        assert!(error.contains(&port.to_string()) && error.contains("take another port"), "{error}");
    };
    taken(TcpStore::host_with(port, &options()).unwrap_err());
    taken(TcpStoreServer::bind_all(port).unwrap_err());
    let address = format!("tcp://some-host.invalid:{port}?rank=0&world_size=2");
    taken(Rendezvous::at_with(&address, PATIENCE, Some(secret()), limits()).unwrap_err());
    relay.learnt_nothing(0);
}

/// A relay gains nothing if the server listens at IPv4 alone, as on a host without IPv6.
#[test]
fn a_relay_in_front_of_an_ipv4_server_learns_and_changes_nothing() {
    let Some((store, relay)) = relayed(Ipv4Addr::UNSPECIFIED.into()) else { return };
    store.set("key", b"the value of the key").unwrap();
    let by = TcpStore::connect_with("::1", store.port(), &options());
    assert!(by.unwrap_err().to_string().contains("something forwards them"));
    relay.learnt_nothing(1);
    assert_eq!(store.num_keys().unwrap(), 1);
}

/// Ranks with `MASTER_ADDR=localhost`: rank 0 serves both loopback addresses, so that no other
/// process can have either.
#[test]
fn ranks_at_localhost_leave_no_loopback_address_to_a_relay() {
    let Some(listener) = listen_v6(Ipv6Addr::LOCALHOST, 0) else {
        skip("no IPv6 here: 127.0.0.1 is all there is");
        return;
    };
    let port = listener.local_addr().unwrap().port();
    let join = |rank: u32, port: u16| {
        let address = format!("tcp://localhost:{port}?rank={rank}&world_size=2");
        Rendezvous::at_with(&address, PATIENCE, Some(secret()), limits())
    };
    // The relay started first: rank 0 reports it, and no rank joins through it.
    let error = join(0, port).unwrap_err().to_string();
    assert!(error.contains(&format!("[::1]:{port}")) || error.contains("::1"), "{error}");
    assert!(error.contains("take another port"), "{error}");
    drop(listener);
    // The ranks started first: the relay gets neither address, and ranks connect at either.
    let held = epoxide::internal::group::HeldPort::any().unwrap();
    let port = held.number();
    let first = join(0, port).unwrap();
    let late = TcpListener::bind((Ipv6Addr::LOCALHOST, port)).unwrap_err();
    assert_eq!(late.kind(), ErrorKind::AddrInUse);
    let late = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).unwrap_err();
    assert_eq!(late.kind(), ErrorKind::AddrInUse);
    std::thread::scope(|scope| {
        let second = scope.spawn(move || {
            let second = join(1, port).unwrap().group("world", PATIENCE).unwrap();
            assert_eq!(second.all_gather(&[1]).unwrap(), [[0], [1]]);
            second.destroy().unwrap();
        });
        let first = first.group("world", PATIENCE).unwrap();
        assert_eq!(first.all_gather(&[0]).unwrap(), [[0], [1]]);
        first.destroy().unwrap();
        second.join().unwrap();
    });
    for ip in [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()] {
        let socket = TcpStream::connect((ip, port));
        assert!(socket.is_ok(), "{ip}: {socket:?}");
    }
}
