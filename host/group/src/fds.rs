//! Descriptors from rank to rank over Unix sockets.
//!
//! Each rank opens a [`Mailbox`]: a listening socket in the abstract name space, with a random name
//! and token that the group announces. A sender connects, sends one packet (token, rank,
//! descriptors) and closes. The kernel keeps the packet until the mailbox's owner receives it, so
//! all ranks send first and then receive, in any order.
//!
//! Both ends check that the other is of the same user. If the job has a secret, the sender also
//! proves it for this mailbox, whose token is new. The group guarantees that the mailbox is the
//! rank's: its address came over the group's connections, over which both ranks have proven the
//! secret.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, recvmsg,
    sendmsg, socket_with,
};

use super::pending::{ACCEPT_SLICE, Accepted, BACKLOG, ConnectionLimits, PendingConnections};
use super::secret::{self, Initiator, OPENING, PROOF, Purpose, Responder};
use super::{JobSecret, same_user};
use crate::error::{Error, Result};

/// Most descriptors that one rank can give in one exchange; the kernel's limit per packet is 253.
pub const MAX_FDS: usize = 250;

/// How often a wait checks whether the group was aborted.
const HEALTH_CHECK: Duration = Duration::from_millis(50);
const TOKEN_BYTES: usize = 16;
/// Token, rank and number of descriptors.
const PACKET_BYTES: usize = TOKEN_BYTES + 8;
/// The part that follows if the job has a secret: opening and proof.
const PROVEN_BYTES: usize = PACKET_BYTES + OPENING + PROOF;

/// Where the peers' descriptors arrive.
pub(super) struct Mailbox {
    socket: OwnedFd,
    /// Token, then the socket's abstract name.
    address: Vec<u8>,
    secret: Option<JobSecret>,
    /// Accepted connections whose packet has not been read.
    pending: PendingConnections,
}

/// A packet that a mailbox received.
#[derive(Debug)]
pub(super) enum Received {
    /// Every rank's descriptors, by rank.
    All(Vec<Vec<OwnedFd>>),
    /// The timeout has passed without a packet from these ranks.
    Missing(Vec<u32>),
}

impl Mailbox {
    /// A mailbox for the packets of a group of `size` ranks.
    pub(super) fn open(size: u32, limits: &ConnectionLimits, secret: Option<JobSecret>) -> Result<Mailbox> {
        // The token keeps strangers out; the name, which anyone can list, only has to be free.
        let mut address = secret::random::<TOKEN_BYTES>()?.to_vec();
        address.extend_from_slice(format!("epoxide-{}-", std::process::id()).as_bytes());
        address.extend(secret::hex(&secret::random::<8>()?).into_bytes());

        let socket = open_socket()?;
        let name = SocketAddrUnix::new_abstract_name(&address[TOKEN_BYTES..]).map_err(os("bind"))?;
        bind(&socket, &name).map_err(os("bind"))?;
        listen(&socket, BACKLOG).map_err(os("listen"))?;
        let pending = PendingConnections::new("descriptor mailbox", limits, size as usize);
        Ok(Mailbox { socket, address, secret, pending })
    }

    /// The address with which [`send`] reaches this mailbox.
    pub(super) fn address(&self) -> &[u8] {
        &self.address
    }

    /// Takes one packet of every rank but `rank`; that entry stays empty. `alive` is called
    /// regularly; its error ends the wait once no packet is pending.
    pub(super) fn receive(
        mut self,
        rank: u32,
        size: u32,
        timeout: Duration,
        mut alive: impl FnMut() -> Result<()>,
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
            let alive = alive();
            let pause = if alive.is_ok() { left.min(HEALTH_CHECK) } else { Duration::ZERO };
            let ready = self.pending.wait_readable(&self.socket, pause).map_err(os("poll"))?;
            if !ready.listener && ready.pending.is_empty() {
                alive?;
            }
            for id in ready.pending {
                self.read_packet(id, rank, &mut received)?;
            }
            while let Some(id) = self.pending.expired() {
                self.read_packet(id, rank, &mut received)?;
            }
            if !ready.listener {
                continue;
            }
            for _ in 0..ACCEPT_SLICE {
                match self.pending.accept(&self.socket) {
                    // Its packet is read once `poll` reports it.
                    Accepted::New(_) => {}
                    Accepted::Evict(id) => self.read_packet(id, rank, &mut received)?,
                    Accepted::None => break,
                }
            }
        }
        Ok(Received::All(received.into_iter().flatten().collect()))
    }

    /// Reads the packet of a connection and closes the connection.
    fn read_packet(&mut self, id: u64, rank: u32, received: &mut [Option<Vec<OwnedFd>>]) -> Result<()> {
        let packet = match self.pending.get_mut(id) {
            Some(pending) => take_packet(&self.address, self.secret.as_ref(), rank, &pending.socket),
            None => Ok(None),
        };
        self.pending.close(id);
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

/// Reads the packet of a connection, if it has arrived. `None` when it is a stranger's.
fn take_packet(
    address: &[u8],
    secret: Option<&JobSecret>,
    rank: u32,
    connection: &OwnedFd,
) -> Result<Option<(u32, Vec<OwnedFd>)>> {
    let mut packet = [0; PROVEN_BYTES];
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
    let length = secret.map_or(PACKET_BYTES, |_| PROVEN_BYTES);
    if message.bytes != length || packet[..TOKEN_BYTES] != address[..TOKEN_BYTES] {
        return Ok(None);
    }
    let word = |at: usize| u32::from_le_bytes([packet[at], packet[at + 1], packet[at + 2], packet[at + 3]]);
    let (peer, count) = (word(TOKEN_BYTES), word(TOKEN_BYTES + 4));
    if let Some(secret) = secret {
        let claims = claims(peer, rank, count, address);
        let rest = packet[PACKET_BYTES..].split_first_chunk::<OPENING>();
        let proven = rest.and_then(|(opening, proof)| {
            let purpose = Purpose::Descriptors;
            let (responder, _) = Responder::known(secret, purpose, &claims, opening, &address[..TOKEN_BYTES]);
            responder.check(proof.first_chunk()?).ok()
        });
        if proven.is_none() {
            tracing::warn!(
                "descriptor mailbox: refused a packet that does not show that its sender knows the secret"
            );
            return Ok(None);
        }
    }
    if message.flags.contains(ReturnFlags::CTRUNC) || fds.len() != count as usize {
        let reason = format!(
            "rank {peer} sent {count} descriptors, {} came through; raise the limit on open files (ulimit -n)",
            fds.len()
        );
        return Err(Error::os("recvmsg", reason));
    }
    Ok(Some((peer, fds)))
}

/// The claims of a packet: sender, receiver, number of descriptors, and mailbox.
fn claims(from: u32, to: u32, count: u32, address: &[u8]) -> Vec<u8> {
    let numbers = [from, to, count].map(u32::to_le_bytes).concat();
    [&numbers, address].concat()
}

/// Sends duplicates of `fds` to the mailbox at `address`, which belongs to rank `peer`. The error of
/// `alive` ends the wait for a full mailbox.
pub(super) fn send(
    address: &[u8],
    secret: Option<&JobSecret>,
    rank: u32,
    peer: u32,
    fds: &[BorrowedFd<'_>],
    timeout: Duration,
    mut alive: impl FnMut() -> Result<()>,
) -> Result<()> {
    let (token, name) = address
        .split_at_checked(TOKEN_BYTES)
        .ok_or_else(|| Error::os("connect", format!("rank {peer} announced no socket")))?;
    let name = SocketAddrUnix::new_abstract_name(name).map_err(os("connect"))?;
    let socket = open_socket()?;
    let start = Instant::now();
    // The queue of a mailbox holds a connection per rank, so that a full one is a rare and passing
    // state.
    while let Err(error) = connect(&socket, &name) {
        match error {
            Errno::AGAIN | Errno::INTR if start.elapsed() < timeout => {
                alive()?;
                std::thread::sleep(Duration::from_millis(1));
            }
            error => {
                let reason = format!(
                    "rank {peer}'s socket: {error}; the rank may have died, or runs on another host or in another \
                     network namespace"
                );
                return Err(Error::os("connect", reason).with_errno(&error));
            }
        }
    }

    same_user::check(&socket).map_err(|reason| {
        Error::os("connect", format!("rank {peer}'s socket is not its own any more: {reason}"))
    })?;

    // At most MAX_FDS: the caller has checked.
    let count = fds.len() as u32;
    let mut packet = token.to_vec();
    packet.extend_from_slice(&rank.to_le_bytes());
    packet.extend_from_slice(&count.to_le_bytes());
    if let Some(secret) = secret {
        let claims = claims(rank, peer, count, address);
        let initiator = Initiator::new(secret, Purpose::Descriptors, claims)?;
        packet.extend_from_slice(&initiator.opening());
        packet.extend_from_slice(&initiator.proof(token));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Error::os("sendmsg", format!("{} descriptors do not fit a packet", fds.len())));
    }
    sendmsg(&socket, &[IoSlice::new(&packet)], &mut control, SendFlags::NOSIGNAL).map(drop).map_err(|error| {
        Error::os("sendmsg", format!("descriptors to rank {peer}: {error}")).with_errno(&error)
    })
}

/// Duplicates of descriptors, close-on-exec.
pub(super) fn duplicate(fds: &[BorrowedFd<'_>]) -> Result<Vec<OwnedFd>> {
    fds.iter()
        .map(|fd| fd.try_clone_to_owned())
        .collect::<std::io::Result<_>>()
        .map_err(|error| Error::system("fcntl(F_DUPFD_CLOEXEC)", error))
}

fn open_socket() -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).map_err(os("socket"))
}

fn os(call: &'static str) -> impl Fn(Errno) -> Error {
    move |errno| Error::system(call, errno)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::Arc;

    use super::*;
    use crate::call::Operation;
    use crate::collectives::within;
    use crate::mesh::Signature;
    use crate::{HashStore, MeshGroup, MeshOptions, ProcessGroup as _};

    const PATIENCE: Duration = Duration::from_secs(120);

    fn secret(character: &str) -> JobSecret {
        JobSecret::new(&character.repeat(32)).unwrap()
    }

    fn open(secret: Option<&JobSecret>) -> Mailbox {
        Mailbox::open(2, &ConnectionLimits::default(), secret.cloned()).unwrap()
    }

    /// Sends without a wait for a full mailbox.
    fn send(
        address: &[u8],
        secret: Option<&JobSecret>,
        rank: u32,
        peer: u32,
        fds: &[BorrowedFd<'_>],
    ) -> Result<()> {
        super::send(address, secret, rank, peer, fds, Duration::ZERO, || Ok(()))
    }

    #[test]
    fn strangers_are_ignored() {
        let (ours, other) = (secret("a"), secret("b"));
        for secret in [None, Some(&ours)] {
            let mailbox = open(secret);
            let address = mailbox.address().to_vec();
            let mut forged = address.clone();
            forged[0] ^= 1;
            let stdin = std::io::stdin();
            send(&forged, secret, 1, 0, &[stdin.as_fd()]).unwrap();
            // Without the secret where there is one, and the other way round.
            let wrong = if secret.is_some() { None } else { Some(&ours) };
            send(&address, wrong, 1, 0, &[stdin.as_fd()]).unwrap();
            send(&address, Some(&other), 1, 0, &[stdin.as_fd()]).unwrap();
            // A packet for another rank.
            if secret.is_some() {
                send(&address, secret, 1, 1, &[stdin.as_fd()]).unwrap();
            }
            send(&address, secret, 1, 0, &[stdin.as_fd(), stdin.as_fd()]).unwrap();
            let received = mailbox.receive(0, 2, PATIENCE, || Ok(())).unwrap();
            let Received::All(all) = received else { panic!("{received:?}") };
            assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [0, 2]);
        }
    }

    #[test]
    fn another_user_neither_sends_nor_receives() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("not root: another user is not tried");
            return;
        }
        let as_nobody = |address: &[u8]| {
            let stdin = std::io::stdin();
            crate::same_user::tests::as_user(65534, || {
                send(address, None, 1, 0, &[stdin.as_fd()]).map_err(|error| error.to_string())
            })
        };
        let mailbox = open(None);
        // The sender's own check rejects the mailbox; the kernel allows the connection.
        let error = as_nobody(&mailbox.address).unwrap_err();
        assert!(error.contains("of user 0; only processes of user 65534"), "{error}");
        // A sender without that check.
        crate::same_user::tests::as_user(65534, || {
            let name = SocketAddrUnix::new_abstract_name(&mailbox.address[TOKEN_BYTES..]).unwrap();
            let socket = open_socket().unwrap();
            connect(&socket, &name).unwrap();
            let packet = [&mailbox.address[..TOKEN_BYTES], &1u32.to_le_bytes(), &[0; 4]].concat();
            let none = &mut SendAncillaryBuffer::default();
            sendmsg(&socket, &[IoSlice::new(&packet)], none, SendFlags::NOSIGNAL).unwrap();
        });
        let received = mailbox.receive(0, 2, Duration::from_millis(200), || Ok(())).unwrap();
        assert!(matches!(&received, Received::Missing(ranks) if *ranks == [1]), "{received:?}");
    }

    #[test]
    fn the_silent_make_room() {
        let limits = ConnectionLimits { max_unauthenticated: 50, ..ConnectionLimits::default() };
        let mailbox = Mailbox::open(2, &limits, None).unwrap();
        let address = mailbox.address().to_vec();
        let name = SocketAddrUnix::new_abstract_name(&address[TOKEN_BYTES..]).unwrap();
        let silent: Vec<OwnedFd> = (0..300)
            .map(|_| {
                let socket = open_socket().unwrap();
                connect(&socket, &name).unwrap();
                socket
            })
            .collect();
        send(&address, None, 1, 0, &[std::io::stdin().as_fd()]).unwrap();
        let patient = |mailbox: Mailbox| mailbox.receive(0, 2, PATIENCE, || Ok(())).unwrap();
        let Received::All(all) = patient(mailbox) else { panic!("nothing came") };
        assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [0, 1]);
        drop(silent);
    }

    #[test]
    fn the_group_being_given_up_ends_the_wait() {
        let mailbox = open(None);
        let start = Instant::now();
        let error = mailbox.receive(0, 2, PATIENCE, || Err(Error::os("test", "given up"))).unwrap_err();
        assert!(error.to_string().contains("given up") && start.elapsed() < PATIENCE);
    }

    #[test]
    fn the_group_being_given_up_ends_the_wait_for_a_full_mailbox() {
        let mut address = vec![0; TOKEN_BYTES];
        address.extend_from_slice(format!("epoxide-full-{}", std::process::id()).as_bytes());
        let name = SocketAddrUnix::new_abstract_name(&address[TOKEN_BYTES..]).unwrap();
        let full = open_socket().unwrap();
        bind(&full, &name).unwrap();
        listen(&full, 0).unwrap();
        let waiting = open_socket().unwrap();
        connect(&waiting, &name).unwrap();
        let start = Instant::now();
        let given_up = || Err(Error::os("test", "given up"));
        let error = super::send(&address, None, 1, 0, &[], PATIENCE, given_up).unwrap_err();
        assert!(error.to_string().contains("given up") && start.elapsed() < PATIENCE, "{error}");
    }

    #[test]
    fn packets_that_are_here_are_taken_though_the_group_was_given_up() {
        let mailbox = open(None);
        send(mailbox.address(), None, 1, 0, &[std::io::stdin().as_fd()]).unwrap();
        let received = mailbox.receive(0, 2, PATIENCE, || Err(Error::os("test", "given up"))).unwrap();
        assert!(matches!(&received, Received::All(all) if all[1].len() == 1), "{received:?}");
    }

    #[test]
    fn the_end_of_the_group_ends_an_exchange() {
        let options = MeshOptions { timeout: PATIENCE, ..MeshOptions::default() };
        for by_rank_0 in [true, false] {
            let store = Arc::new(HashStore::new());
            let join = |rank| MeshGroup::new(store.clone(), rank, 2, "g", options.clone()).unwrap();
            let groups = [0, 1].map(join);
            let error = std::thread::scope(|scope| {
                let waits = scope.spawn(|| groups[1].exchange_fds(&[]).unwrap_err().to_string());
                // Rank 0 sends no packet, and this thread or rank 0 ends the group instead.
                let _ = groups[0].core.run(|engine, recorder| {
                    let signature = Signature::new(Operation::ExchangeFds);
                    within(engine, recorder, signature, 0, None, PATIENCE, |run| {
                        let mailbox = open(None);
                        run.all_gather(mailbox.address().to_owned())?;
                        run.barrier()?;
                        if by_rank_0 {
                            return Err(run.engine.error(vec![0], "the end"));
                        }
                        groups[1].abort("the end");
                        Ok(())
                    })
                });
                waits.join().unwrap()
            });
            assert!(error.contains("the end"), "by rank 0: {by_rank_0}: {error}");
        }
    }

    #[test]
    fn a_closed_mailbox_is_an_error_with_the_rank() {
        let address = open(None).address().to_vec();
        let error = send(&address, None, 0, 1, &[]).unwrap_err();
        assert!(error.to_string().contains("rank 1"), "{error}");
    }
}
