//! Where a rank listens, and how the others learn it.

use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::group::strangers::BACKLOG;

/// Variable with the network interface, or its address, that ranks of other hosts reach this one by.
pub const SOCKET_IFNAME: &str = "EPOXIDE_SOCKET_IFNAME";

/// Which sockets the ranks use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Sockets {
    /// Unix sockets between ranks of one host, TCP between hosts.
    #[default]
    Auto,
    /// TCP always; for tests of the network path.
    Tcp,
}

/// What a rank announces about itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Address {
    /// How many ranks it takes the group to have.
    pub size: u32,
    /// What a connection must show first; keeps strangers out.
    pub token: String,
    /// Boot and network name space: Unix names are only good where this is the same.
    host: String,
    /// The abstract name of its Unix socket.
    unix: String,
    tcp: Option<SocketAddr>,
}

/// The key of the group's store that holds the address of `rank`.
pub(crate) fn address_key(name: &str, rank: u32) -> String {
    format!("{name}/mesh/{rank}")
}

/// The sockets a rank accepts connections on.
#[derive(Debug)]
pub(crate) struct Listener {
    pub sockets: Vec<OwnedFd>,
    pub address: Address,
}

impl Listener {
    pub(crate) fn open(size: u32, sockets: Sockets, interface: Option<&str>) -> Result<Listener> {
        let mut random = [0; 24];
        std::fs::File::open("/dev/urandom")
            .and_then(|mut source| source.read_exact(&mut random))
            .map_err(|error| Error::os("read /dev/urandom", error))?;
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let token = hex(&random[..16]);
        let unix = format!("epoxide-mesh-{}-{}", std::process::id(), hex(&random[16..]));

        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map_err(os("socket"))?;
        let name = SocketAddrUnix::new_abstract_name(unix.as_bytes()).map_err(os("bind"))?;
        rustix::net::bind(&socket, &name).map_err(os("bind"))?;
        rustix::net::listen(&socket, BACKLOG).map_err(os("listen"))?;

        let ip = interface_address(interface)?;
        let tcp = TcpListener::bind((ip, 0)).and_then(|tcp| tcp.set_nonblocking(true).map(|()| tcp));
        let tcp = tcp.map_err(|error| Error::os("bind", format!("{ip}: {error}")))?;
        // Once more, for the longer backlog.
        rustix::net::listen(&tcp, BACKLOG).map_err(os("listen"))?;
        let tcp_address = tcp.local_addr().map_err(|error| Error::os("getsockname", error))?;
        let host = if sockets == Sockets::Tcp { String::new() } else { host_id() };
        let address = Address { size, token, host, unix, tcp: Some(tcp_address) };
        Ok(Listener { sockets: vec![socket, tcp.into()], address })
    }
}

/// Starts a connection; it may not be through when this returns. `None` when the queue of the other side is full.
pub(crate) fn connect(address: &Address, ours: &Address) -> Result<Option<OwnedFd>, String> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let text = |error: Errno| error.to_string();
    let (socket, outcome) = if !address.host.is_empty() && address.host == ours.host {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let socket = socket.map_err(text)?;
        let name = SocketAddrUnix::new_abstract_name(address.unix.as_bytes()).map_err(text)?;
        let outcome = rustix::net::connect(&socket, &name);
        (socket, outcome)
    } else {
        let tcp = address.tcp.ok_or("it runs on another host and announced no network address")?;
        let family = if tcp.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None).map_err(text)?;
        no_delay(&socket);
        let outcome = rustix::net::connect(&socket, &tcp);
        (socket, outcome)
    };
    match outcome {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(Some(socket)),
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(error) => Err(text(error)),
    }
}

/// Sends small frames at once. Does nothing to a Unix socket.
pub(crate) fn no_delay(socket: &OwnedFd) {
    let _ = rustix::net::sockopt::set_tcp_nodelay(socket, true);
}

/// The same for all processes that can reach each other's abstract Unix sockets; empty where that cannot be told.
pub(crate) fn host_id() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let space = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    if boot.is_empty() || space.as_os_str().is_empty() {
        return String::new();
    }
    format!("{} {}", boot.trim(), space.display())
}

/// The address to be reached by: that of the interface asked for, else the one that leads out, else loopback.
pub(crate) fn interface_address(interface: Option<&str>) -> Result<IpAddr> {
    let wanted = interface.map(str::to_owned).or_else(|| std::env::var(SOCKET_IFNAME).ok());
    let Some(wanted) = wanted.filter(|wanted| !wanted.is_empty()) else {
        // Connecting a datagram socket sends nothing; it only picks the route.
        let out = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))
            .and_then(|socket| socket.connect(("192.0.2.1", 9)).and_then(|()| socket.local_addr()));
        return Ok(out.map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), |address| address.ip()));
    };
    if let Ok(ip) = wanted.parse() {
        return Ok(ip);
    }
    if wanted == "lo" {
        return Ok(IpAddr::V4(Ipv4Addr::LOCALHOST));
    }
    let routes = std::fs::read_to_string("/proc/net/route").unwrap_or_default();
    let local = std::fs::read_to_string("/proc/net/fib_trie").unwrap_or_default();
    find_address(&wanted, &routes, &local).map(IpAddr::V4).ok_or_else(|| {
        Error::argument(
            SOCKET_IFNAME,
            wanted,
            "no such network interface with an IPv4 address; give its name or its address",
        )
    })
}

/// The local address that lies in a network of the interface, by the kernel's routing tables.
fn find_address(interface: &str, routes: &str, trie: &str) -> Option<Ipv4Addr> {
    let mut locals = Vec::new();
    let mut last = None;
    for line in trie.lines() {
        let line = line.trim();
        if let Some(address) = line.strip_prefix("|-- ") {
            last = address.parse::<Ipv4Addr>().ok();
        } else if line.starts_with("/32 host LOCAL") {
            locals.extend(last);
        }
    }
    routes.lines().skip(1).find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let word = |index: usize| u32::from_str_radix(fields.get(index)?, 16).ok().map(u32::from_be);
        let (destination, mask) = (word(1)?, word(7)?);
        if fields.first() != Some(&interface) || mask == 0 {
            return None;
        }
        locals.iter().copied().find(|local| u32::from(*local) & mask == destination)
    })
}

fn os(call: &'static str) -> impl Fn(Errno) -> Error {
    move |error| Error::os(call, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_by_name() {
        let routes = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n\
                      eth0 00000000 010011AC 0003 0 0 0 00000000 0 0 0\n\
                      eth0 000011AC 00000000 0001 0 0 0 0000FFFF 0 0 0\n";
        let trie = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 172.17.0.2\n        /32 host LOCAL\n";
        assert_eq!(find_address("eth0", routes, trie), Some(Ipv4Addr::new(172, 17, 0, 2)));
        assert_eq!(find_address("eth1", routes, trie), None);
        assert!(interface_address(Some("nonesuch9")).is_err());
        assert_eq!(interface_address(Some("127.0.0.1")).unwrap(), IpAddr::V4(Ipv4Addr::LOCALHOST));
    }
}
