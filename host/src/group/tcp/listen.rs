//! Where a server listens.

use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, ToSocketAddrs};

use crate::error::{Error, Result};

/// Listens at `address`.
pub(super) fn listen(address: impl ToSocketAddrs + std::fmt::Debug) -> Result<TcpListener> {
    TcpListener::bind(&address).map_err(|error| {
        let remedy = match error.kind() {
            ErrorKind::AddrInUse => {
                "; another store or an earlier run has the port: end it, or take another port"
            }
            ErrorKind::AddrNotAvailable => "; this host does not have the address",
            ErrorKind::PermissionDenied => "; take a port above 1023",
            _ => "",
        };
        Error::os("bind", format!("store server at {address:?}: {error}{remedy}"))
    })
}

/// Listens at `port` of all of this host's addresses.
pub(super) fn listen_all(port: u16) -> Result<TcpListener> {
    // IPv6 sockets take IPv4 as well, but not every host has IPv6.
    match TcpListener::bind(("::", port)) {
        Ok(listener) => Ok(listener),
        Err(_) => listen(("0.0.0.0", port)),
    }
}

/// Listens where clients come that were told `host`: at that address alone where it is one, at loopback alone where the
/// name says so. Any other name may mean one address here and another elsewhere, and an address may be one that a network
/// translates: then at all of this host's.
pub(super) fn listen_for(host: &str, port: u16) -> Result<TcpListener> {
    let addresses = match host.parse::<IpAddr>() {
        Ok(ip) => vec![ip],
        Err(_) if host.eq_ignore_ascii_case("localhost") => {
            vec![Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]
        }
        Err(_) => return listen_all(port),
    };
    let elsewhere = |error: &std::io::Error| error.kind() == ErrorKind::AddrNotAvailable;
    let not_here = |ip: &IpAddr| TcpListener::bind((*ip, 0)).is_err_and(|error| elsewhere(&error));
    match addresses.into_iter().find(|ip| !not_here(ip)) {
        Some(ip) => listen((ip, port)),
        None => listen_all(port),
    }
}
