//! The user at the other end of a Unix socket.

use std::os::fd::AsFd;

use rustix::net::AddressFamily;
use rustix::net::sockopt::{socket_domain, socket_peercred};

/// Rejects a process of another user at the other end of a Unix socket, with the reason. Other
/// sockets pass.
///
/// Sockets with abstract names have no owner and no mode. So any process on the host can connect to
/// one, or take a name that has become free. Root is rejected too: it needs no socket of ours. A
/// job whose ranks run as several users is a mistake, and an early error is better.
pub(crate) fn check(socket: impl AsFd) -> Result<(), String> {
    let socket = socket.as_fd();
    let unknown = |error| format!("the user at the other end is unknown: {error}");
    if socket_domain(socket).map_err(unknown)? != AddressFamily::UNIX {
        return Ok(());
    }
    let peer = socket_peercred(socket).map_err(unknown)?;
    let (theirs, ours) = (peer.uid.as_raw(), rustix::process::geteuid().as_raw());
    if theirs == ours {
        return Ok(());
    }
    Err(format!(
        "process {} of user {theirs}; only processes of user {ours} are let in",
        peer.pid.as_raw_pid()
    ))
}

#[cfg(test)]
pub(crate) mod tests {
    use rustix::process::Uid;
    use rustix::thread::set_thread_res_uid;

    /// Runs `act` on a thread of another user's; only root can.
    pub(crate) fn as_user<T: Send>(user: u32, act: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let user = Uid::from_raw(user);
                set_thread_res_uid(user, user, user).unwrap();
                act()
            });
            thread.join().unwrap()
        })
    }
}
