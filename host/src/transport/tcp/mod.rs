//! Puts over TCP: every queue has a connection of its own to the peer, with a thread there that takes the puts. Both ends are
//! page-locked host memory, from and to which the sockets copy.
//!
//! A connection starts with a hello and the peer's answer. Then frames go one way: a header of four u64, little endian
//! (bytes, to, counter, value), and the bytes. The other way there is at most a farewell: the receiver's goodbye, or why it
//! refused a frame.

mod door;
mod receiver;
mod sender;
#[cfg(test)]
mod tests;

use std::time::{Duration, Instant};

use rustix::event::{PollFd, Timespec, poll};
use rustix::io::Errno;

use self::door::{Door, dial, read_answer};
use self::receiver::Receivers;
use self::sender::TcpQueue;
use super::greeting;
use super::links::{Link, Links};
use super::put::Put;
use super::setup::{Setup, WireHost, deadline};
use crate::error::{Error, Result};

const HEADER: usize = 32;
/// In place of a header's bytes: nothing is put any more.
const GOODBYE: u64 = u64::MAX;
/// In place of the length of a refusal: this rank takes nothing any more.
const FAREWELL: u32 = u32::MAX;
/// Longest text of a refusal, in bytes.
const MAX_REASON: usize = 1024;

pub(super) fn connect(setup: &Setup<'_>) -> Result<Links> {
    let door =
        greeting::check_arguments(setup).and_then(|()| WireHost::of(setup)).and_then(|_| Door::open(setup));
    let address = door.as_ref().map(Door::address).map_err(Error::clone);
    let all = greeting::meet(setup, address)?;
    let door = door?;
    let (links, receivers) =
        greeting::agree(setup.group, setup.options.kind, make_links(setup, &door, &all))?;
    Ok(Links { links, mapped: Vec::new(), receiving: vec![Box::new(receivers)] })
}

fn make_links(setup: &Setup<'_>, door: &Door, all: &[greeting::Greeting]) -> Result<(Vec<Link>, Receivers)> {
    let deadline = deadline(setup.timeout);
    // Connect, accept, and only then wait for answers: no rank waits for one that waits.
    let mut outgoing = Vec::new();
    for (queue, peer) in setup.pairs() {
        let address = all.get(peer as usize).and_then(|greeting| greeting.address.as_deref().ok());
        outgoing.push((queue, peer, dial(setup, address.unwrap_or_default(), queue, peer, deadline)?));
    }
    let incoming = door.accept(setup, deadline)?;
    let mut links = Vec::new();
    for (index, peer, mut socket) in outgoing {
        let place = setup.place(peer);
        read_answer(&mut socket, deadline).map_err(|reason| place.error("connect", reason))?;
        links.push(Link { peer, index, queue: Box::new(TcpQueue::new(setup, place, socket)?) });
    }
    Ok((links, Receivers::start(setup, incoming)?))
}

fn header(put: &Put) -> [u8; HEADER] {
    let mut bytes = [0; HEADER];
    for (word, value) in bytes.chunks_exact_mut(8).zip([put.bytes, put.to, put.counter, put.value]) {
        word.copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

/// A refusal as it goes over the connection.
fn refusal(reason: &str) -> Vec<u8> {
    let text = &reason.as_bytes()[..reason.len().min(MAX_REASON)];
    let mut bytes = (text.len() as u32).to_le_bytes().to_vec();
    bytes.extend_from_slice(text);
    bytes
}

fn word32(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].iter().take(4).rev().fold(0, |word, byte| word << 8 | u32::from(*byte))
}

fn word64(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].iter().take(8).rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

fn left(deadline: Instant) -> Duration {
    // Zero would mean for ever.
    deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}

fn wait_for(polled: &mut [PollFd<'_>], timeout: Duration) -> Result<(), Errno> {
    let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: i64::from(timeout.subsec_nanos()) };
    match poll(polled, Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error),
    }
}
