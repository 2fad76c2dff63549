//! TCP ports that no other program comes by.

use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;

use rustix::net::sockopt::set_socket_reuseaddr;
use rustix::net::{
    AddressFamily, SocketAddrAny, SocketFlags, SocketType, bind, getsockname, listen, socket_with,
};

use crate::error::{Error, Result};

/// A free TCP port of this host, held until this is dropped.
///
/// The port is bound but not listened on. Meanwhile the kernel assigns it to no socket that asks
/// for any port, neither to bind nor to connect from. A server that asks for this very port with
/// `SO_REUSEADDR`, as the servers of Rust's standard library, PyTorch and libuv do, gets it. The
/// port can be used again after the server has closed it.
///
/// So no program comes by the port by chance. A process that tries all ports with `SO_REUSEADDR`
/// can take it as long as no socket listens, even as another user. The server then fails with
/// "address in use". A program that must not fail listens at once, and hands on the socket or
/// serves itself. The launcher of several nodes does so for its ranks.
///
/// ```
/// let port = epoxide::internal::launch::HeldPort::any()?;
/// let server = std::net::TcpListener::bind(("127.0.0.1", port.number())).unwrap();
/// # drop(server);
/// # Ok::<(), epoxide::Error>(())
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
        let probe = || -> rustix::io::Result<()> {
            let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
            set_socket_reuseaddr(&socket, true)?;
            bind(&socket, &SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, self.number))?;
            listen(&socket, 1)
        };
        probe().is_ok()
    }

    fn next() -> Result<HeldPort> {
        let error = |error: rustix::io::Errno| {
            Error::os("bind", format!("no free TCP port: {error}; see net.ipv4.ip_local_port_range"))
        };
        let socket = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None);
        let socket = socket.map_err(error)?;
        set_socket_reuseaddr(&socket, true).map_err(error)?;
        bind(&socket, &SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0)).map_err(error)?;
        let address: SocketAddrAny = getsockname(&socket).map_err(error)?;
        let address = SocketAddrV4::try_from(address).map_err(error)?;
        Ok(HeldPort { _socket: socket, number: address.port() })
    }

    /// The port.
    pub fn number(&self) -> u16 {
        self.number
    }
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
