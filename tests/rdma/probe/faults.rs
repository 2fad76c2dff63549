//! Every fault ends in an error that names it, and never in a hang.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use epoxide::group::{MeshGroup, ProcessGroup};
use epoxide::internal::transport::{Links, Put, PutQueue};
use epoxide::{Error, Result};
use rustix::process::{Signal, getpid, kill_process};
use serde_json::Value;

use crate::puts::pull_cable;
use crate::rank::{Rank, wrong};

const BYTES: u64 = 1 << 20;
/// Time that a slow machine may take for an event that is immediate elsewhere.
const SLACK: Duration = Duration::from_secs(60);
const PUT: Put = Put { from: 0, to: 4096, bytes: 65536, counter: 0, value: 1 };

/// A group that changes ranks' descriptions of their wire memory in their greetings, by (rank,
/// greeting, own greeting).
#[derive(Debug)]
struct Liar<'a> {
    group: &'a MeshGroup,
    change: fn(usize, &mut Value, &Value) -> Option<()>,
}

impl ProcessGroup for Liar<'_> {
    fn rank(&self) -> u32 {
        self.group.rank()
    }

    fn size(&self) -> u32 {
        self.group.size()
    }

    fn timeout(&self) -> Duration {
        self.group.timeout()
    }

    fn barrier(&self, timeout: Duration) -> Result<()> {
        self.group.barrier(timeout)
    }

    fn all_gather(&self, data: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut all = self.group.all_gather(data)?;
        // Data that is no greeting passes unchanged.
        let Ok(own) = serde_json::from_slice::<Value>(data) else { return Ok(all) };
        for (rank, bytes) in all.iter_mut().enumerate() {
            let mut greeting: Value = serde_json::from_slice(bytes).map_err(wrong)?;
            (self.change)(rank, &mut greeting, &own).ok_or_else(|| wrong("no such field"))?;
            *bytes = serde_json::to_vec(&greeting).map_err(wrong)?;
        }
        Ok(all)
    }

    fn broadcast(&self, root: u32, data: &[u8]) -> Result<Vec<u8>> {
        self.group.broadcast(root, data)
    }

    fn exchange_fds(&self, fds: &[BorrowedFd<'_>]) -> Result<Vec<Vec<OwnedFd>>> {
        self.group.exchange_fds(fds)
    }
}

/// Rank 0 has a wrong key of rank 1's memory.
pub fn wrong_key(rank: &Rank) -> Result<()> {
    let group = Liar {
        group: &rank.group,
        change: |from, greeting, _| {
            // The offer, as text.
            let address = greeting.pointer_mut("/address/Ok")?;
            let mut offer: Value = serde_json::from_str(address.as_str()?).ok()?;
            let key = offer.pointer_mut("/cards/0/rkey")?;
            *key = (key.as_u64()? ^ if from == 1 { 0x5500 } else { 0 }).into();
            *address = offer.to_string().into();
            Some(())
        },
    };
    remote_access(rank, BYTES, &group, PUT)
}

/// Rank 1's region is smaller than rank 0 assumes, and rank 0 puts behind its end.
pub fn small_region(rank: &Rank) -> Result<()> {
    let group = Liar {
        group: &rank.group,
        change: |_, greeting, own| {
            *greeting.get_mut("memory")? = own.get("memory")?.clone();
            Some(())
        },
    };
    let bytes = if rank.rank() == 1 { BYTES } else { 4 * BYTES };
    remote_access(rank, bytes, &group, Put { to: 2 * BYTES, ..PUT })
}

/// Rank 0 puts what rank 1's card refuses.
fn remote_access(rank: &Rank, bytes: u64, group: &Liar<'_>, put: Put) -> Result<()> {
    let wire = rank.wire_memory(bytes)?;
    let mut links = rank.connect(&wire, group, 1)?;
    if rank.rank() == 0 {
        let queue = &mut *links.queues()[0].queue;
        let posted = Instant::now();
        let error = queue.put_with_counter(&[put]).and_then(|()| queue.quiet(rank.timeout / 2)).err();
        expect(error.as_ref(), &["remote access error", "rank 1", "put #1"], posted)?;
        // The queue is broken from then on, and returns the same error.
        let again = queue.put_with_counter(&[PUT]).err().map(|error| error.to_string());
        if again != error.map(|error| error.to_string()) {
            return Err(wrong(format!("the next put says {again:?}")));
        }
    }
    rank.leave(links)
}

/// Rank 1 dies in the middle of its puts.
pub fn peer_killed(rank: &Rank) -> Result<()> {
    let wire = rank.wire_memory(BYTES)?;
    let mut links = rank.connect(&wire, &rank.group, 1)?;
    // Rank 1 dies after the others are connected, because they cannot connect without it.
    let connected = |rank: u32| format!("connected/{rank}");
    if rank.rank() == 1 {
        for peer in rank.peers() {
            rank.group.store().get(&connected(peer), rank.timeout)?;
        }
        for value in 1..=20 {
            links.queues()[0].queue.put_with_counter(&[Put { value, ..PUT }])?;
        }
        return Err(die());
    }
    rank.group.store().set(&connected(rank.rank()), b"")?;
    let (dead, alive): (Vec<_>, Vec<_>) = links.queues().iter_mut().partition(|link| link.peer == 1);
    for link in dead {
        let (error, posted) = put_until_error(rank, &mut *link.queue)?;
        expect(Some(&error), &["rank 1"], posted)?;
    }
    // The other queues are not concerned.
    for link in alive {
        link.queue.put_with_counter(&[PUT])?;
        link.queue.quiet(rank.timeout)?;
    }
    leave_without_1(links, rank)
}

/// Rank 1 leaves, and rank 0 puts all the same.
pub fn goodbye(rank: &Rank) -> Result<()> {
    let wire = rank.wire_memory(BYTES)?;
    let mut links = rank.connect(&wire, &rank.group, 1)?;
    if rank.rank() == 1 {
        links.close();
    }
    rank.group.barrier(rank.timeout)?;
    if rank.rank() == 0 {
        let error = links.queues()[0].queue.put_with_counter(&[PUT]).err();
        let text = error.map(|error| error.to_string()).unwrap_or_default();
        if !text.contains("rank 0 with rank 1: it said goodbye") {
            return Err(wrong(format!("a put after the goodbye: {text}")));
        }
        println!("as it should be: {text}");
    }
    rank.leave(links)
}

/// Ends this process as `kill -9` does.
pub fn die() -> Error {
    let _ = kill_process(getpid(), Signal::KILL);
    wrong("it lives after kill -9")
}

/// The network is down, the queue is full, and this rank leaves.
pub fn interrupted(rank: &Rank) -> Result<()> {
    let wire = rank.wire_memory(BYTES)?;
    let mut links = rank.connect(&wire, &rank.group, 1)?;
    rank.group.barrier(rank.timeout)?;
    let queue = &mut *links.queues()[0].queue;
    pull_cable(None)?;
    let interrupt = queue.interrupt();
    let raised = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_secs(2));
        interrupt.raise();
        Instant::now()
    });
    let error = loop {
        if let Err(error) = queue.put_with_counter(&[PUT]) {
            break error.to_string();
        }
        rank.in_time(|| "the queue never was full".into())?;
    };
    let late = raised.join().map_err(|_| wrong("a thread panicked"))?.elapsed();
    if !error.contains("interrupted") || late > SLACK {
        return Err(wrong(format!("after {late:?}: {error}")));
    }
    let start = Instant::now();
    drop(links);
    if start.elapsed() > SLACK {
        return Err(wrong(format!("leaving took {:?}", start.elapsed())));
    }
    println!("as it should be, after {late:.2?}: {error}");
    // The group would say goodbye over the same network.
    std::process::exit(0)
}

/// The network of rank 0 is down for good.
pub fn link_lost(rank: &Rank, lose: fn() -> Result<()>) -> Result<()> {
    let wire = rank.wire_memory(BYTES)?;
    let mut links = rank.connect(&wire, &rank.group, 1)?;
    let queue = &mut *links.queues()[0].queue;
    queue.put_with_counter(&[PUT])?;
    queue.quiet(rank.timeout)?;
    rank.group.barrier(rank.timeout)?;
    if rank.rank() == 0 {
        lose()?;
    }
    let (error, posted) = put_until_error(rank, queue)?;
    expect(Some(&error), &["rank"], posted)?;
    // The group would say goodbye over the same network.
    std::process::exit(0)
}

/// Sets the interface of the first device down.
pub fn interface_down() -> Result<()> {
    match std::process::Command::new("ip").args(["link", "set", "wire0", "down"]).status() {
        Ok(status) if status.success() => Ok(()),
        other => Err(wrong(format!("ip link set wire0 down: {other:?}"))),
    }
}

/// Closes the links after a barrier of the ranks but rank 1, which is dead: a rank that leaves
/// early looks dead to the others.
fn leave_without_1(links: Links, rank: &Rank) -> Result<()> {
    if rank.group.size() == 2 {
        return Ok(());
    }
    let alive = rank.group.shrink_group(&[1])?;
    alive.barrier(rank.timeout)?;
    drop(links);
    alive.destroy()
}

/// The error, and when the put that brought it was posted.
fn put_until_error(rank: &Rank, queue: &mut dyn PutQueue) -> Result<(Error, Instant)> {
    loop {
        let posted = Instant::now();
        if let Err(error) = queue.put_with_counter(&[PUT]).and_then(|()| queue.quiet(rank.timeout / 2)) {
            return Ok((error, posted));
        }
        rank.in_time(|| "puts still succeed".into())?;
    }
}

/// Checks that the error is of verbs and contains these parts.
fn expect(error: Option<&Error>, parts: &[&str], posted: Instant) -> Result<()> {
    let text = error.map_or("no error".to_owned(), Error::to_string);
    let of_verbs = matches!(error, Some(Error::Verbs { peer: Some(_), .. }));
    if !of_verbs || !parts.iter().all(|part| text.contains(part)) {
        return Err(wrong(format!("wanted an error with {parts:?}, got: {text}")));
    }
    println!("as it should be, after {:.2?}: {text}", posted.elapsed());
    Ok(())
}
