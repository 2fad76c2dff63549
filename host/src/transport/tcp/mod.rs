//! Puts over TCP: every queue has a connection of its own to the peer, with a thread there that
//! takes the puts. Both ends are page-locked host memory, from and to which the sockets copy.

mod acceptor;
mod frame;
mod receiver;
mod sender;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use rustix::event::{PollFd, Timespec, poll};
use rustix::io::Errno;

use self::acceptor::{Acceptor, dial};
pub use self::acceptor::{fuzz_tcp_hello, sample_tcp_hello};
pub use self::frame::{fuzz_tcp_frames, sample_tcp_frames};
use self::receiver::Receivers;
use self::sender::TcpQueue;
use super::greeting;
use super::links::{Links, PeerQueue};
use super::setup::{Setup, WireHost, deadline};
use crate::error::{Error, Result};

pub(super) fn connect(setup: &Setup<'_>) -> Result<Links> {
    let acceptor = greeting::check_arguments(setup)
        .and_then(|()| WireHost::of(setup))
        .and_then(|_| Acceptor::open(setup));
    let address = acceptor.as_ref().map(Acceptor::address).map_err(Error::clone);
    let all = greeting::meet(setup, address)?;
    let mut acceptor = acceptor?;
    let (links, receivers) =
        greeting::agree(setup.group, setup.options.kind, make_links(setup, &mut acceptor, &all))?;
    Ok(Links { links, mapped: Vec::new(), receiving: vec![Box::new(receivers)] })
}

fn make_links(
    setup: &Setup<'_>,
    acceptor: &mut Acceptor,
    all: &[greeting::Greeting],
) -> Result<(Vec<PeerQueue>, Receivers)> {
    let deadline = deadline(setup.timeout);
    // Connect, accept, and only then wait for answers: no rank waits for one that waits.
    let mut outgoing = Vec::new();
    for (queue, peer) in setup.pairs() {
        let address = all.get(peer as usize).and_then(|greeting| greeting.address.as_deref().ok());
        let (address, secret) = (address.unwrap_or_default(), acceptor.secret.as_ref());
        outgoing.push((queue, peer, dial(setup, address, secret, queue, peer, deadline)?));
    }
    let incoming = acceptor.accept(setup, deadline)?;
    let mut links = Vec::new();
    for (index, peer, dialed) in outgoing {
        let ends = setup.ends(peer);
        let (socket, signer) = dialed.answered(deadline).map_err(|reason| ends.error("connect", reason))?;
        links.push(PeerQueue { peer, index, queue: Box::new(TcpQueue::new(setup, ends, socket, signer)?) });
    }
    Ok((links, Receivers::start(setup, incoming)?))
}

/// The time until a deadline, at least 1 ms.
fn left(deadline: Instant) -> Duration {
    // Zero would mean for ever.
    deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}

/// Waits for one of the sockets, or until the time is over.
fn wait_for(polled: &mut [PollFd<'_>], timeout: Duration) -> Result<(), Errno> {
    let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: i64::from(timeout.subsec_nanos()) };
    match poll(polled, Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error),
    }
}
