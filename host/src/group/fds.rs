//! Descriptors from rank to rank over Unix sockets.
//!
//! Each rank opens a [`Mailbox`]: a listening socket in the abstract name space, with a random name and token that
//! the store announces. A sender connects, sends one packet (token, rank, descriptors) and leaves; the kernel keeps
//! the packet until the mailbox's owner takes it, so all ranks send first and then receive, in any order.

use std::io::{IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, recvmsg,
    sendmsg, socket_with,
};

use super::strangers::{ACCEPT_SLICE, ConnectionLimits, Next, Strangers};
use crate::error::{Error, Result};

/// Most descriptors that one rank can give in one exchange; the kernel's limit per packet is 253.
pub const MAX_FDS: usize = 250;

/// How often a wait looks whether the group was given up.
const HEALTH_CHECK: Duration = Duration::from_millis(50);
const TOKEN_BYTES: usize = 16;
/// Token, rank and number of descriptors.
const PACKET_BYTES: usize = TOKEN_BYTES + 8;

/// Where the peers' descriptors arrive.
pub(super) struct Mailbox {
    socket: OwnedFd,
    /// Token, then the socket's abstract name.
    address: Vec<u8>,
    /// Accepted, packet not yet seen.
    strangers: Strangers,
}

/// What a mailbox got.
#[derive(Debug)]
pub(super) enum Received {
    /// Every rank's descriptors, by rank.
    All(Vec<Vec<OwnedFd>>),
    /// The time is over, and nothing came from these ranks.
    Missing(Vec<u32>),
}

impl Mailbox {
    /// A mailbox for the packets of a group of `size` ranks.
    pub(super) fn open(size: u32, limits: &ConnectionLimits) -> Result<Mailbox> {
        let mut random = [0; TOKEN_BYTES + 8];
        std::fs::File::open("/dev/urandom")
            .and_then(|mut source| source.read_exact(&mut random))
            .map_err(|error| Error::os("read /dev/urandom", error))?;
        // The token keeps strangers out; the name, which anyone can list, only has to be free.
        let (token, name) = random.split_at(TOKEN_BYTES);
        let mut address = token.to_vec();
        address.extend_from_slice(format!("epoxide-{}-", std::process::id()).as_bytes());
        address.extend(name.iter().flat_map(|byte| format!("{byte:02x}").into_bytes()));

        let socket = open_socket()?;
        let name = SocketAddrUnix::new_abstract_name(&address[TOKEN_BYTES..]).map_err(os("bind"))?;
        bind(&socket, &name).map_err(os("bind"))?;
        let strangers = Strangers::new("descriptor mailbox", limits, size as usize);
        listen(&socket, strangers.backlog()).map_err(os("listen"))?;
        Ok(Mailbox { socket, address, strangers })
    }

    /// What [`send`] needs to reach this mailbox.
    pub(super) fn address(&self) -> &[u8] {
        &self.address
    }

    /// Takes one packet of every rank but `rank`; that entry stays empty. `alive` is asked now and then; its error ends
    /// the wait.
    pub(super) fn receive(
        mut self,
        rank: u32,
        size: u32,
        timeout: Duration,
        alive: impl Fn() -> Result<()>,
    ) -> Result<Received> {
        let start = Instant::now();
        let mut received: Vec<Option<Vec<OwnedFd>>> = (0..size).map(|_| None).collect();
        received[rank as usize] = Some(Vec::new());
        while received.iter().any(Option::is_none) {
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                let missing = (0u32..).zip(&received).filter(|(_, fds)| fds.is_none()).map(|(peer, _)| peer);
                return Ok(Received::Missing(missing.collect()));
            }
            alive()?;
            let ready =
                self.strangers.wait_readable(&self.socket, left.min(HEALTH_CHECK)).map_err(os("poll"))?;
            for id in ready.strangers {
                self.hear(id, &mut received)?;
            }
            while let Some(id) = self.strangers.overdue() {
                self.hear(id, &mut received)?;
            }
            if !ready.listener {
                continue;
            }
            for _ in 0..ACCEPT_SLICE {
                match self.strangers.accept(&self.socket) {
                    // Its packet is looked at when `poll` says that it is there.
                    Next::Greet(_) => {}
                    Next::LastLook(id) => self.hear(id, &mut received)?,
                    Next::Nobody => break,
                }
            }
        }
        Ok(Received::All(received.into_iter().flatten().collect()))
    }

    /// Takes what a connection has to say, which ends it.
    fn hear(&mut self, id: u64, received: &mut [Option<Vec<OwnedFd>>]) -> Result<()> {
        let packet = match self.strangers.get_mut(id) {
            Some(stranger) => take_packet(&self.address, &stranger.socket),
            None => Ok(None),
        };
        self.strangers.close(id);
        let Some((peer, fds)) = packet? else { return Ok(()) };
        match received.get_mut(peer as usize) {
            Some(slot @ None) => *slot = Some(fds),
            _ => {
                let reason = format!("a second packet of rank {peer}, or no such rank");
                return Err(Error::os("recvmsg", reason));
            }
        }
        Ok(())
    }
}

/// Reads the packet of a connection, if it is there. `None` when it is a stranger's.
fn take_packet(address: &[u8], connection: &OwnedFd) -> Result<Option<(u32, Vec<OwnedFd>)>> {
    let mut packet = [0; PACKET_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = match recvmsg(
        connection,
        &mut [IoSliceMut::new(&mut packet)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
    ) {
        Ok(message) => message,
        Err(_) => return Ok(None),
    };
    let fds: Vec<OwnedFd> = control
        .drain()
        .filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten()
        .collect();
    if message.bytes != PACKET_BYTES || packet[..TOKEN_BYTES] != address[..TOKEN_BYTES] {
        return Ok(None);
    }
    let word = |at: usize| u32::from_le_bytes([packet[at], packet[at + 1], packet[at + 2], packet[at + 3]]);
    let (peer, count) = (word(TOKEN_BYTES), word(TOKEN_BYTES + 4));
    if message.flags.contains(ReturnFlags::CTRUNC) || fds.len() != count as usize {
        let reason = format!(
            "rank {peer} sent {count} descriptors, {} came through; raise the limit on open files (ulimit -n)",
            fds.len()
        );
        return Err(Error::os("recvmsg", reason));
    }
    Ok(Some((peer, fds)))
}

/// Sends duplicates of `fds` to the mailbox at `address`, which belongs to rank `peer`.
pub(super) fn send(
    address: &[u8],
    rank: u32,
    peer: u32,
    fds: &[BorrowedFd<'_>],
    timeout: Duration,
) -> Result<()> {
    let (token, name) = address
        .split_at_checked(TOKEN_BYTES)
        .ok_or_else(|| Error::os("connect", format!("rank {peer} announced no socket")))?;
    let name = SocketAddrUnix::new_abstract_name(name).map_err(os("connect"))?;
    let socket = open_socket()?;
    let start = Instant::now();
    // The queue of a mailbox holds a connection per rank, so that a full one is a rare and passing state.
    while let Err(error) = connect(&socket, &name) {
        match error {
            Errno::AGAIN | Errno::INTR if start.elapsed() < timeout => {
                std::thread::sleep(Duration::from_millis(1));
            }
            error => {
                let reason = format!(
                    "rank {peer}'s socket: {error}; the rank may have died, or runs on another host or in another \
                     network namespace"
                );
                return Err(Error::os("connect", reason));
            }
        }
    }

    let mut packet = token.to_vec();
    packet.extend_from_slice(&rank.to_le_bytes());
    // At most MAX_FDS: the caller has checked.
    packet.extend_from_slice(&(fds.len() as u32).to_le_bytes());
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Error::os("sendmsg", format!("{} descriptors do not fit a packet", fds.len())));
    }
    sendmsg(&socket, &[IoSlice::new(&packet)], &mut control, SendFlags::NOSIGNAL)
        .map(drop)
        .map_err(|error| Error::os("sendmsg", format!("descriptors to rank {peer}: {error}")))
}

/// Duplicates of descriptors, close-on-exec.
pub(super) fn duplicate(fds: &[BorrowedFd<'_>]) -> Result<Vec<OwnedFd>> {
    fds.iter()
        .map(|fd| fd.try_clone_to_owned())
        .collect::<std::io::Result<_>>()
        .map_err(|error| Error::os("fcntl(F_DUPFD_CLOEXEC)", error))
}

fn open_socket() -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).map_err(os("socket"))
}

fn os(call: &'static str) -> impl Fn(Errno) -> Error {
    move |errno| Error::os(call, errno)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn strangers_are_ignored() {
        let mailbox = Mailbox::open(2, &ConnectionLimits::default()).unwrap();
        let address = mailbox.address().to_vec();
        let mut forged = address.clone();
        forged[0] ^= 1;
        let stdin = std::io::stdin();
        send(&forged, 1, 0, &[stdin.as_fd()], Duration::ZERO).unwrap();
        send(&address, 1, 0, &[stdin.as_fd(), stdin.as_fd()], Duration::ZERO).unwrap();
        let received = mailbox.receive(0, 2, Duration::from_secs(10), || Ok(())).unwrap();
        let Received::All(all) = received else { panic!("{received:?}") };
        assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [0, 2]);
    }

    #[test]
    fn the_group_being_given_up_ends_the_wait() {
        let mailbox = Mailbox::open(2, &ConnectionLimits::default()).unwrap();
        let start = Instant::now();
        let error = mailbox
            .receive(0, 2, Duration::from_secs(60), || Err(Error::os("test", "given up")))
            .unwrap_err();
        assert!(error.to_string().contains("given up") && start.elapsed() < Duration::from_secs(10));
    }

    #[test]
    fn a_closed_mailbox_is_an_error_with_the_rank() {
        let address = Mailbox::open(2, &ConnectionLimits::default()).unwrap().address().to_vec();
        let error = send(&address, 0, 1, &[], Duration::ZERO).unwrap_err();
        assert!(error.to_string().contains("rank 1"), "{error}");
    }
}
