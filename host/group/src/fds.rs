//! Descriptors from rank to rank over Unix sockets.
//!
//! Each rank opens a [`Mailbox`]: a listening socket in the abstract name space, with a random name
//! and token that the group announces. A sender connects, sends one packet (token, rank,
//! descriptors) and closes. The kernel keeps the packet until the mailbox's owner receives it, so
//! all ranks send first and then receive, in any order.
//!
//! The kernel bounds how many descriptors of an ordinary user are under way, by the limit on open
//! files (`ulimit -n`). A rank that waits to send therefore takes packets from its own mailbox, and
//! no rank waits for anything else before it has taken all of its own.
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
    rank: u32,
    /// Accepted connections whose packet has not been read.
    pending: PendingConnections,
    /// The descriptors of the packets read so far, by rank.
    received: Vec<Option<Vec<OwnedFd>>>,
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
    /// The mailbox of `rank` in a group of `size` ranks.
    pub(super) fn open(
        rank: u32,
        size: u32,
        limits: &ConnectionLimits,
        secret: Option<JobSecret>,
    ) -> Result<Mailbox> {
        // The token keeps strangers out; the name, which anyone can list, only has to be free.
        let mut address = secret::random::<TOKEN_BYTES>()?.to_vec();
        address.extend_from_slice(format!("epoxide-{}-", std::process::id()).as_bytes());
        address.extend(secret::hex(&secret::random::<8>()?).into_bytes());

        let socket = open_socket()?;
        let name = SocketAddrUnix::new_abstract_name(&address[TOKEN_BYTES..]).map_err(os("bind"))?;
        bind(&socket, &name).map_err(os("bind"))?;
        listen(&socket, BACKLOG).map_err(os("listen"))?;
        let pending = PendingConnections::new("descriptor mailbox", limits, size as usize);
        let received = (0..size).map(|peer| (peer == rank).then(Vec::new)).collect();
        Ok(Mailbox { socket, address, secret, rank, pending, received })
    }

    /// The address with which [`send`] reaches this mailbox.
    pub(super) fn address(&self) -> &[u8] {
        &self.address
    }

    /// Takes one packet of every other rank; this rank's entry stays empty. `alive` is called
    /// regularly with the ranks whose packets are missing; its error ends the wait once no packet
    /// is pending.
    pub(super) fn receive(
        &mut self,
        timeout: Duration,
        mut alive: impl FnMut(&[u32]) -> Result<()>,
    ) -> Result<Received> {
        let start = Instant::now();
        loop {
            let missing = self.missing();
            if missing.is_empty() {
                return Ok(Received::All(std::mem::take(&mut self.received).into_iter().flatten().collect()));
            }
            let left = timeout.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Ok(Received::Missing(missing));
            }
            let alive = alive(&missing);
            let pause = if alive.is_ok() { left.min(HEALTH_CHECK) } else { Duration::ZERO };
            if !self.take(pause)? {
                alive?;
            }
        }
    }

    /// The ranks whose packets have not been read.
    fn missing(&self) -> Vec<u32> {
        (0..).zip(&self.received).filter(|(_, fds)| fds.is_none()).map(|(peer, _)| peer).collect()
    }

    /// Waits up to `pause` for packets and reads those that are here. False where nothing came.
    pub(super) fn take(&mut self, pause: Duration) -> Result<bool> {
        let ready = self.pending.wait_readable(&self.socket, pause).map_err(os("poll"))?;
        let came = ready.listener || !ready.pending.is_empty();
        for id in ready.pending {
            self.read_packet(id)?;
        }
        while let Some(id) = self.pending.expired() {
            self.read_packet(id)?;
        }
        for _ in 0..if ready.listener { ACCEPT_SLICE } else { 0 } {
            match self.pending.accept(&self.socket) {
                // The packet is read once `poll` reports it.
                Accepted::New(_) => {}
                Accepted::Evict(id) => self.read_packet(id)?,
                Accepted::None => break,
            }
        }
        Ok(came)
    }

    /// Reads the packet of a connection and closes the connection.
    fn read_packet(&mut self, id: u64) -> Result<()> {
        let packet = match self.pending.get_mut(id) {
            Some(pending) => take_packet(&self.address, self.secret.as_ref(), self.rank, &pending.socket),
            None => Ok(None),
        };
        self.pending.close(id);
        let Some((peer, fds)) = packet? else { return Ok(()) };
        match self.received.get_mut(peer as usize) {
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

/// Sends duplicates of `fds` to the mailbox at `address`, which belongs to rank `peer`. `pause` is
/// called while the mailbox is full, or too many of the user's descriptors are under way: for a
/// moment, and its error ends the wait.
pub(super) fn send(
    address: &[u8],
    secret: Option<&JobSecret>,
    rank: u32,
    peer: u32,
    fds: &[BorrowedFd<'_>],
    timeout: Duration,
    mut pause: impl FnMut() -> Result<()>,
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
            Errno::AGAIN | Errno::INTR if start.elapsed() < timeout => pause()?,
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
    while let Err(error) = sendmsg(&socket, &[IoSlice::new(&packet)], &mut control, SendFlags::NOSIGNAL) {
        let remedy = match error {
            Errno::TOOMANYREFS if start.elapsed() < timeout => {
                pause()?;
                continue;
            }
            Errno::TOOMANYREFS => {
                "; the system lets a user have no more descriptors under way than a process may have open: raise the \
                 limit on open files (ulimit -n)"
            }
            _ => "",
        };
        let reason = format!("descriptors to rank {peer}: {error}{remedy}");
        return Err(Error::os("sendmsg", reason).with_errno(&error));
    }
    Ok(())
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
    use crate::{HashStore, MeshGroup, MeshOptions, ProcessGroup as _, TcpStore, TcpStoreOptions};

    const PATIENCE: Duration = Duration::from_secs(120);

    fn secret(character: &str) -> JobSecret {
        JobSecret::new(&character.repeat(32)).unwrap()
    }

    fn open(secret: Option<&JobSecret>) -> Mailbox {
        Mailbox::open(0, 2, &ConnectionLimits::default(), secret.cloned()).unwrap()
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
            let mut mailbox = open(secret);
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
            let received = mailbox.receive(PATIENCE, |_| Ok(())).unwrap();
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
        let mut mailbox = open(None);
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
        let received = mailbox.receive(Duration::from_millis(200), |_| Ok(())).unwrap();
        assert!(matches!(&received, Received::Missing(ranks) if *ranks == [1]), "{received:?}");
    }

    /// A part of this process's test for a process of its own, if this is one.
    const PART: &str = "EPOXIDE_TEST_RANK";

    /// A user that no other test acts as: the kernel counts descriptors under way by user.
    fn user(test: u32) -> u32 {
        20_000 + std::process::id() % 20_000 * 2 + test
    }

    /// Runs parts of the test `name` in processes that may have 1024 descriptors. Each
    /// acts as another user in a thread, since that user may not read the program.
    fn as_ordinary_users(name: &str, parts: &[String]) {
        let start = |part: &String| {
            let mut command = std::process::Command::new("sh");
            command.args(["-c", "ulimit -n 1024; exec \"$@\"", "sh"]).arg(std::env::current_exe().unwrap());
            command.args(["--exact", &format!("fds::tests::{name}"), "--nocapture"]).env(PART, part);
            command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
            command.env_remove("EPOXIDE_JOB_SECRET").env_remove("EPOXIDE_JOB_SECRET_FILE").spawn().unwrap()
        };
        if !rustix::process::geteuid().is_root() {
            eprintln!("not root: another user is not tried");
            return;
        }
        for part in parts.iter().map(start).collect::<Vec<_>>() {
            let output = part.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
    }

    /// Three ranks have 1500 descriptors under way, and their user's limit is 1024.
    #[test]
    fn ordinary_users_exchange_more_than_may_be_under_way() {
        if let Ok(part) = std::env::var(PART) {
            let [user, port, rank] = part.split(' ').collect::<Vec<_>>()[..] else { panic!("{part}") };
            crate::same_user::tests::as_user(user.parse().unwrap(), || {
                let options = TcpStoreOptions::new(PATIENCE);
                let store = TcpStore::connect_with("127.0.0.1", port.parse().unwrap(), &options).unwrap();
                let options = MeshOptions { timeout: PATIENCE, ..MeshOptions::default() };
                let group = MeshGroup::new(Arc::new(store), rank.parse().unwrap(), 3, "g", options).unwrap();
                let null = std::fs::File::open("/dev/null").unwrap();
                let all = group.exchange_fds(&[null.as_fd(); MAX_FDS]).unwrap();
                assert!(all.len() == 3 && all.iter().all(|fds| fds.len() == MAX_FDS));
                group.destroy().unwrap();
            });
            return;
        }
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let store = TcpStore::host_on(listener, &TcpStoreOptions::new(PATIENCE)).unwrap();
        let parts = [0, 1, 2].map(|rank| format!("{} {} {rank}", user(0), store.port()));
        as_ordinary_users("ordinary_users_exchange_more_than_may_be_under_way", &parts);
    }

    #[test]
    fn an_ordinary_user_waits_while_too_many_are_under_way() {
        let Ok(part) = std::env::var(PART) else {
            let name = "an_ordinary_user_waits_while_too_many_are_under_way";
            return as_ordinary_users(name, &[user(1).to_string()]);
        };
        crate::same_user::tests::as_user(part.parse().unwrap(), || {
            let null = std::fs::File::open("/dev/null").unwrap();
            let fds = [null.as_fd(); MAX_FDS];
            let mut full = [(); 5].map(|()| open(None));
            full.iter().for_each(|mailbox| send(mailbox.address(), None, 1, 0, &fds).unwrap());
            let mut mailbox = open(None);
            let error = send(mailbox.address(), None, 1, 0, &fds).unwrap_err().to_string();
            assert!(error.contains("to rank 0") && error.contains("ulimit -n"), "{error}");
            let pause = || full[0].take(PATIENCE).map(drop);
            super::send(mailbox.address(), None, 1, 0, &fds, PATIENCE, pause).unwrap();
            let received = mailbox.receive(PATIENCE, |_| Ok(())).unwrap();
            assert!(matches!(&received, Received::All(all) if all[1].len() == MAX_FDS), "{received:?}");
        });
    }

    #[test]
    fn the_silent_make_room() {
        let limits = ConnectionLimits { max_unauthenticated: 50, ..ConnectionLimits::default() };
        let mailbox = Mailbox::open(0, 2, &limits, None).unwrap();
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
        let patient = |mut mailbox: Mailbox| mailbox.receive(PATIENCE, |_| Ok(())).unwrap();
        let Received::All(all) = patient(mailbox) else { panic!("nothing came") };
        assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), [0, 1]);
        drop(silent);
    }

    #[test]
    fn the_group_being_given_up_ends_the_wait() {
        let mut mailbox = open(None);
        let start = Instant::now();
        let error = mailbox.receive(PATIENCE, |_| Err(Error::os("test", "given up"))).unwrap_err();
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
        let mut mailbox = open(None);
        send(mailbox.address(), None, 1, 0, &[std::io::stdin().as_fd()]).unwrap();
        let received = mailbox.receive(PATIENCE, |_| Err(Error::os("test", "given up"))).unwrap();
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
                // Open until rank 1 has the reason, as in an exchange.
                let mailbox = open(None);
                let _ = groups[0].core.run(|engine, recorder| {
                    let signature = Signature::new(Operation::ExchangeFds);
                    within(engine, recorder, signature, 0, None, PATIENCE, |run| {
                        run.all_gather(mailbox.address().to_owned())?;
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
