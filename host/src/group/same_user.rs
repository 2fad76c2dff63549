//! Who is at the other end of a Unix socket.

use std::os::fd::AsFd;

use rustix::net::sockopt::socket_peercred;

/// Refuses a peer that runs as another user: with the reason, for the log.
///
/// Sockets with abstract names have no owner and no mode, so anyone on the host can connect to one, or take a name that
/// has become free. Root is no exception: it needs no socket of ours, and a job whose ranks run as several users is a
/// mistake that is better seen at once.
pub(crate) fn check(socket: impl AsFd) -> Result<(), String> {
    let peer = socket_peercred(socket).map_err(|error| format!("who is at the other end: {error}"))?;
    let (theirs, ours) = (peer.uid.as_raw(), rustix::process::geteuid().as_raw());
    if theirs == ours {
        return Ok(());
    }
    Err(format!(
        "process {} of user {theirs}; only processes of user {ours} are let in",
        peer.pid.as_raw_pid()
    ))
}
