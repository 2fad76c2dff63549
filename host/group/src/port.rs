//! TCP ports that the kernel assigns to no other program.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::sockopt::{set_ipv6_v6only, set_socket_reuseaddr};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, getsockname, listen, socket_with};

use crate::error::{Error, Result};

/// A free TCP port of this host, held until this is dropped.
///
/// The port is bound, for IPv4 and IPv6, but not listened on. Meanwhile the kernel assigns it to no
/// socket that requests any port, neither to bind nor to connect from. A server that binds this
/// very port with `SO_REUSEADDR`, as the servers of Rust's standard library, PyTorch and libuv do,
/// gets it. The port can be used again after the server has closed it.
///
/// So no program gets the port by chance. A process that tries all ports with `SO_REUSEADDR` can
/// take it as long as no socket listens, even as another user. The server then fails with "address
/// in use". A program that must not fail listens at once, and passes on the socket or serves
/// itself. The launcher of several nodes does so for its ranks.
///
/// ```
/// let port = epoxide_group::internal::HeldPort::any()?;
/// let server = std::net::TcpListener::bind(("127.0.0.1", port.number())).unwrap();
/// # drop(server);
/// # Ok::<(), epoxide_group::Error>(())
/// ```
#[derive(Debug)]
pub struct HeldPort {
    _socket: OwnedFd,
    number: u16,
}

impl HeldPort {
    /// Takes any free port. Checks afterwards that no socket listens there.
    pub fn any() -> Result<HeldPort> {
        for _ in 0..TRIES {
            let port = HeldPort::next()?;
            if port.is_free() {
                return Ok(port);
            }
        }
        let reason = format!(
            "{TRIES} ports in a row were taken as soon as they were chosen; `ss -tlp` lists the listeners"
        );
        Err(Error::os("bind", reason))
    }

    /// True where a server could listen at the port now.
    pub fn is_free(&self) -> bool {
        bound(self.number).and_then(|socket| listen(&socket, 1)).is_ok()
    }

    fn next() -> Result<HeldPort> {
        let held = || -> rustix::io::Result<HeldPort> {
            let socket = bound(0)?;
            let number = SocketAddr::try_from(getsockname(&socket)?)?.port();
            Ok(HeldPort { _socket: socket, number })
        };
        held().map_err(|error| {
            let reason = format!("no free TCP port: {error}; see net.ipv4.ip_local_port_range");
            Error::os("bind", reason).with_errno(&error)
        })
    }

    /// The port.
    pub fn number(&self) -> u16 {
        self.number
    }
}

/// A socket that is bound to a port of all addresses, of IPv4 alone on a host without IPv6.
fn bound(port: u16) -> rustix::io::Result<OwnedFd> {
    match bound_at((Ipv6Addr::UNSPECIFIED, port).into()) {
        Err(Errno::AFNOSUPPORT | Errno::ADDRNOTAVAIL) => bound_at((Ipv4Addr::UNSPECIFIED, port).into()),
        socket => socket,
    }
}

/// A socket for a server at `address`. One of all IPv6 addresses takes IPv4 clients as well,
/// whatever the host's default is (`net.ipv6.bindv6only`).
pub(crate) fn bound_at(address: SocketAddr) -> rustix::io::Result<OwnedFd> {
    let family = if address.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
    let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    set_socket_reuseaddr(&socket, true)?;
    if address.is_ipv6() {
        set_ipv6_v6only(&socket, false)?;
    }
    bind(&socket, &address)?;
    Ok(socket)
}

/// Ports tried before giving up.
const TRIES: u32 = 64;

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::io::ErrorKind;
    use std::net::{Ipv6Addr, TcpListener, TcpStream, ToSocketAddrs};
    use std::time::{Duration, Instant};

    use super::*;

    /// Binds an address that another server had. A child of another test holds that server's socket
    /// open until it runs its own program.
    fn bind_again(address: impl ToSocketAddrs + Copy) -> TcpListener {
        let start = Instant::now();
        loop {
            match TcpListener::bind(address) {
                Err(error)
                    if error.kind() == ErrorKind::AddrInUse && start.elapsed() < Duration::from_secs(120) =>
                {
                    std::thread::sleep(Duration::from_millis(5));
                }
                server => return server.unwrap(),
            }
        }
    }

    #[test]
    fn a_held_port_serves_one_server_after_another() {
        let port = HeldPort::any().unwrap();
        for _ in 0..3 {
            let server = bind_again((Ipv4Addr::LOCALHOST, port.number()));
            let client = TcpStream::connect((Ipv4Addr::LOCALHOST, port.number())).unwrap();
            // The server's side closes first, so that the port is left in TIME_WAIT.
            drop(server.accept().unwrap());
            drop((client, server));
        }
        // Hosts without IPv6 have nothing to show here.
        if TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).is_ok() {
            bind_again((Ipv6Addr::UNSPECIFIED, port.number()));
        }
    }

    #[test]
    fn a_port_that_was_taken_is_known_to_be() {
        let port = HeldPort::any().unwrap();
        assert!(port.is_free() && port.is_free(), "looking takes nothing");
        // Any user can do this.
        let server = bind_again((Ipv4Addr::UNSPECIFIED, port.number()));
        assert!(!port.is_free());
        drop(server);
    }

    /// A port that is held for IPv4 alone may be assigned to a socket of IPv6.
    #[test]
    fn a_held_port_is_held_for_both_families() {
        let port = HeldPort::any().unwrap();
        for (family, address) in [
            (AddressFamily::INET, SocketAddr::from((Ipv4Addr::LOCALHOST, port.number()))),
            (AddressFamily::INET6, SocketAddr::from((Ipv6Addr::LOCALHOST, port.number()))),
        ] {
            // Hosts without IPv6 have nothing to show for it.
            if TcpListener::bind((address.ip(), 0)).is_err() {
                continue;
            }
            let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
            assert_eq!(bind(&socket, &address), Err(Errno::ADDRINUSE), "{address}");
        }
    }

    #[test]
    fn no_port_is_held_twice() {
        let ports: Vec<_> = (0..200).map(|_| HeldPort::any().unwrap()).collect();
        let numbers: BTreeSet<_> = ports.iter().map(HeldPort::number).collect();
        assert_eq!(numbers.len(), ports.len());
        let listeners: Vec<_> =
            (0..200).map(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap()).collect();
        for listener in &listeners {
            assert!(!numbers.contains(&listener.local_addr().unwrap().port()));
        }
    }
}
