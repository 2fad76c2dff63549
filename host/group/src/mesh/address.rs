//! The addresses at which ranks listen, and their announcement.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::pending::BACKLOG;
use crate::{JobSecret, same_user, secret};

/// Variable with the network interface, or its address, that ranks of other hosts reach this one
/// by.
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

/// The announcement of a rank about itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Address {
    /// How many ranks it takes the group to have.
    pub size: u32,
    /// The token that a connection must show first; keeps strangers out.
    pub token: String,
    /// Boot and network name space: Unix names are only good where this is the same.
    host: String,
    /// The abstract name of its Unix socket.
    unix: String,
    /// None while all ranks that have announced an address share its host.
    tcp: Option<SocketAddr>,
    /// A connecting process must prove the job's secret.
    pub secret: bool,
}

impl Address {
    /// True where the ranks reach each other's Unix sockets.
    pub(super) fn shares_host(&self, ours: &Address) -> bool {
        !self.host.is_empty() && self.host == ours.host
    }

    /// True where `ours` can connect to it.
    pub(super) fn reachable(&self, ours: &Address) -> bool {
        self.tcp.is_some() || self.shares_host(ours)
    }

    /// True where it takes connections from other hosts.
    pub(crate) fn on_network(&self) -> bool {
        self.tcp.is_some()
    }

    /// The address to connect to.
    pub(super) fn called(&self, unix: bool) -> String {
        match (unix, self.tcp) {
            (true, _) => self.unix.clone(),
            (false, tcp) => tcp.map(|tcp| tcp.to_string()).unwrap_or_default(),
        }
    }
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
    /// The secret that a connecting process has to prove.
    pub(super) secret: Option<JobSecret>,
    interface: Option<String>,
}

impl Listener {
    /// A Unix socket, and with `network` one for other hosts, too.
    pub(crate) fn open(
        size: u32,
        sockets: Sockets,
        interface: Option<&str>,
        secret: Option<JobSecret>,
        network: bool,
    ) -> Result<Listener> {
        let token = secret::hex(&secret::random::<16>()?);
        let unix = format!("epoxide-mesh-{}-{}", std::process::id(), secret::hex(&secret::random::<8>()?));

        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
            .map_err(os("socket"))?;
        let name = SocketAddrUnix::new_abstract_name(unix.as_bytes()).map_err(os("bind"))?;
        rustix::net::bind(&socket, &name).map_err(os("bind"))?;
        rustix::net::listen(&socket, BACKLOG).map_err(os("listen"))?;

        let host = if sockets == Sockets::Tcp { String::new() } else { host_id() };
        let network = network || host.is_empty();
        let address = Address { size, token, host, unix, tcp: None, secret: secret.is_some() };
        let interface = interface.map(str::to_owned);
        let mut listener = Listener { sockets: vec![socket], address, secret, interface };
        if network {
            listener.open_network(None)?;
        }
        Ok(listener)
    }

    /// Starts to listen for other hosts as well; `theirs` is the address of a rank on one, if
    /// known.
    pub(super) fn open_network(&mut self, theirs: Option<&Address>) -> Result<()> {
        let interface = requested(self.interface.as_deref());
        let ip = interface_address(interface.as_deref())?;
        let elsewhere = theirs.is_some_and(|theirs| !theirs.host.is_empty() && !self.address.host.is_empty());
        if ip.is_loopback() && interface.is_none() && elsewhere {
            let rule = "a rank is on another host, and this host has no address but loopback to be reached by; give it \
                        one, or name the interface or the address here";
            return Err(Error::argument(SOCKET_IFNAME, "unset", rule));
        }
        let open = || {
            let socket = TcpListener::bind((ip, 0))?;
            socket.set_nonblocking(true)?;
            rustix::net::listen(&socket, BACKLOG)?;
            Ok((socket.local_addr()?, socket))
        };
        let (address, socket) = open().map_err(|error: std::io::Error| {
            Error::os("bind", format!("{ip}: {error}")).with_errno(&error)
        })?;
        self.address.tcp = Some(address);
        self.sockets.push(socket.into());
        Ok(())
    }
}

/// Starts a connection; it may not be through when this returns. `None` when the queue of the other
/// side is full.
pub(crate) fn connect(address: &Address, ours: &Address) -> Result<Option<OwnedFd>, String> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let text = |error: Errno| error.to_string();
    let (socket, outcome) = if address.shares_host(ours) {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let socket = socket.map_err(text)?;
        let name = SocketAddrUnix::new_abstract_name(address.unix.as_bytes()).map_err(text)?;
        let outcome = rustix::net::connect(&socket, &name);
        if outcome.is_ok() {
            same_user::check(&socket)?;
        }
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

/// Equal for all processes that can reach each other's abstract Unix sockets; empty if unknown.
pub fn host_id() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let space = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    if boot.is_empty() || space.as_os_str().is_empty() {
        return String::new();
    }
    format!("{} {}", boot.trim(), space.display())
}

/// This host's address for others: that of the requested interface, else of the default route, else
/// of any route, else loopback.
pub fn interface_address(interface: Option<&str>) -> Result<IpAddr> {
    let requested = requested(interface);
    if let Some(ip) = requested.as_ref().and_then(|requested| requested.parse().ok()) {
        return Ok(ip);
    }
    let all = || -> Result<Vec<(String, IpAddr)>> {
        let all = if_addrs::get_if_addrs().map_err(|error| Error::system("getifaddrs", error))?;
        Ok(all.into_iter().map(|interface| (interface.name.clone(), interface.ip())).collect())
    };
    match requested {
        Some(requested) => choose(&requested, &all()?).ok_or_else(|| {
            Error::argument(
                SOCKET_IFNAME,
                requested,
                "no such network interface with an address of its own (addresses of one link alone, fe80::/10, do not \
                 count); give its name or its address",
            )
        }),
        None => Ok(match route_out() {
            Some(ip) => ip,
            None => {
                let lead = all()?.into_iter().map(|(_, ip)| ip).find(|ip| !ip.is_loopback() && known_elsewhere(ip));
                lead.unwrap_or_else(loopback)
            }
        }),
    }
}

/// The requested interface.
fn requested(interface: Option<&str>) -> Option<String> {
    let requested = interface.map(str::to_owned).or_else(|| std::env::var(SOCKET_IFNAME).ok());
    requested.filter(|requested| !requested.is_empty())
}

/// This host's address on its default route, by IPv4 or else by IPv6.
fn route_out() -> Option<IpAddr> {
    // Connecting a datagram socket sends nothing; it only picks the route. The addresses are those
    // of documentation.
    let out = |from: IpAddr, to: IpAddr| {
        let socket = UdpSocket::bind((from, 0)).ok()?;
        socket.connect((to, 9)).ok()?;
        Some(socket.local_addr().ok()?.ip()).filter(|ip| !ip.is_unspecified() && known_elsewhere(ip))
    };
    let to = Ipv4Addr::new(192, 0, 2, 1);
    out(Ipv4Addr::UNSPECIFIED.into(), to.into())
        .or_else(|| out(Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into()))
}

/// The address by which this host reaches itself.
pub fn loopback() -> IpAddr {
    let here = |ip: &IpAddr| UdpSocket::bind((*ip, 0)).is_ok();
    Some(IpAddr::V4(Ipv4Addr::LOCALHOST)).filter(here).unwrap_or(IpAddr::V6(Ipv6Addr::LOCALHOST))
}

/// False for addresses that mean nothing without the link that they are of.
fn known_elsewhere(ip: &IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => !ip.is_link_local(),
        IpAddr::V6(ip) => !ip.is_unicast_link_local(),
    }
}

/// The address of an interface: IPv4 before IPv6.
fn choose(name: &str, all: &[(String, IpAddr)]) -> Option<IpAddr> {
    let own = all.iter().filter(|(interface, ip)| interface == name && known_elsewhere(ip));
    own.map(|(_, ip)| *ip).min_by_key(IpAddr::is_ipv6)
}

fn os(call: &'static str) -> impl Fn(Errno) -> Error {
    move |error| Error::system(call, error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pending::{Accepted, ConnectionLimits, PendingConnections};

    #[test]
    fn interfaces_by_name() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let interface = |name: &str, address: &str| (name.to_owned(), ip(address));
        let all = [
            interface("eth0", "fe80::1"),
            interface("eth0", "2001:db8::5"),
            interface("eth0", "172.17.0.2"),
            interface("six", "fe80::2"),
            interface("six", "2001:db8::6"),
            interface("link", "fe80::3"),
        ];
        assert_eq!(choose("eth0", &all), Some(ip("172.17.0.2")));
        assert_eq!(choose("six", &all), Some(ip("2001:db8::6")), "IPv6 alone");
        assert_eq!(choose("link", &all), None);
        assert_eq!(choose("eth1", &all), None);
        let error = interface_address(Some("nonesuch9")).unwrap_err().to_string();
        assert!(error.contains("nonesuch9") && error.contains("give its name or its address"), "{error}");
        assert_eq!(interface_address(Some("127.0.0.1")).unwrap(), IpAddr::V4(Ipv4Addr::LOCALHOST));
        assert!(interface_address(Some("lo")).unwrap().is_loopback());
    }

    #[test]
    fn no_network_socket_before_a_rank_of_another_host_is_known() {
        let mut listener = Listener::open(2, Sockets::Auto, Some("lo"), None, false).unwrap();
        assert_eq!((listener.sockets.len(), listener.address.on_network()), (1, false));
        listener.open_network(None).unwrap();
        assert!(listener.address.tcp.unwrap().ip().is_loopback());
        assert_eq!(listener.sockets.len(), 2);
        assert!(Listener::open(2, Sockets::Tcp, Some("lo"), None, false).unwrap().address.on_network());
    }

    #[test]
    fn another_user_connects_to_nobody() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("not root: another user is not tried");
            return;
        }
        let listener = Listener::open(2, Sockets::Auto, None, None, false).unwrap();
        let (address, limits) = (listener.address.clone(), ConnectionLimits::default());
        let mut pending = PendingConnections::new("test", &limits, 2);
        let (theirs, socket) = same_user::tests::as_user(65534, || {
            let name = SocketAddrUnix::new_abstract_name(address.unix.as_bytes()).unwrap();
            let kind = SocketType::STREAM;
            let socket =
                rustix::net::socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).unwrap();
            rustix::net::connect(&socket, &name).unwrap();
            (connect(&address, &address), socket)
        });
        // Ranks check the user of the process that they call.
        let error = theirs.unwrap_err();
        assert!(error.contains("of user 0; only processes of user 65534 are let in"), "{error}");
        // The kernel let both through, and nothing of either is read.
        assert_eq!(pending.accept(&listener.sockets[0]), Accepted::None);
        assert!(pending.is_empty());
        drop(socket);
        assert!(connect(&address, &address).unwrap().is_some());
        assert!(matches!(pending.accept(&listener.sockets[0]), Accepted::New(_)));
    }
}
