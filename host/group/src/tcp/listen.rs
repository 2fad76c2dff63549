//! Where a server listens.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};

use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::pending::BACKLOG;
use crate::port::bound_at;

/// Listens at `address`.
pub(super) fn listen(address: impl ToSocketAddrs + std::fmt::Debug) -> Result<TcpListener> {
    let listen = || {
        let mut outcome = Err(io::Error::new(ErrorKind::InvalidInput, "the name has no address"));
        for address in address.to_socket_addrs()? {
            outcome = listen_at(address);
            if outcome.is_ok() {
                break;
            }
        }
        outcome
    };
    listen().map_err(|error| {
        let remedy = match error.kind() {
            ErrorKind::AddrInUse => {
                "; another store or an earlier run has the port: end it, or take another port"
            }
            ErrorKind::AddrNotAvailable => "; this host does not have the address",
            ErrorKind::PermissionDenied => "; take a port above 1023",
            _ => "",
        };
        Error::os("bind", format!("store server at {address:?}: {error}{remedy}")).with_errno(&error)
    })
}

fn listen_at(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = bound_at(address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(TcpListener::from(socket))
}

/// Ports tried where one is needed that is free at two addresses.
const TRIES: u32 = 64;

/// Listens at `port` of all of this host's addresses.
pub(super) fn listen_all(port: u16) -> Result<TcpListener> {
    // IPv6 sockets take IPv4 as well, but not every host has IPv6. Any other failure is an error:
    // with IPv4 alone, the owner of the IPv6 port would get the clients that try IPv6 first.
    match has(Ipv6Addr::UNSPECIFIED.into()) {
        true => listen((Ipv6Addr::UNSPECIFIED, port)),
        false => listen((Ipv4Addr::UNSPECIFIED, port)),
    }
}

/// Listens where clients of `host` connect. An address is listened on alone. A name for loopback
/// means both loopback addresses, because clients may try either first. Any other name may mean one
/// address here and another elsewhere, and an address may be translated by a network. For such
/// names the server listens at all addresses of this host.
pub(super) fn listen_for(host: &str, port: u16) -> Result<Vec<TcpListener>> {
    if host.eq_ignore_ascii_case("localhost") {
        return listen_loopback(port);
    }
    match host.parse::<IpAddr>() {
        Ok(ip) if has(ip) => Ok(vec![listen((ip, port))?]),
        _ => Ok(vec![listen_all(port)?]),
    }
}

/// Listens at both loopback addresses, as far as this host has them.
fn listen_loopback(port: u16) -> Result<Vec<TcpListener>> {
    let mut ips: Vec<IpAddr> = vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
    ips.retain(|ip| has(*ip));
    let Some((first, others)) = ips.split_first() else { return Ok(vec![listen_all(port)?]) };
    let mut tries = 0;
    loop {
        tries += 1;
        let listener = listen((*first, port))?;
        let taken = listener.local_addr().map_err(|error| Error::system("getsockname", error))?.port();
        let rest: Result<Vec<TcpListener>> = others.iter().map(|ip| listen((*ip, taken))).collect();
        match rest {
            Ok(rest) => return Ok([listener].into_iter().chain(rest).collect()),
            // A port that is free at one address need not be at the other.
            Err(_) if port == 0 && tries < TRIES => {}
            Err(error) => return Err(error),
        }
    }
}

/// True where this host has the address. An address that cannot be had for another reason counts as
/// there.
pub(super) fn has(ip: IpAddr) -> bool {
    !TcpListener::bind((ip, 0)).is_err_and(|error| is_missing(&error))
}

/// Whether an error of `bind` means that the host lacks an address or its family.
fn is_missing(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::ADDRNOTAVAIL | Errno::AFNOSUPPORT | Errno::PROTONOSUPPORT)
    )
}
