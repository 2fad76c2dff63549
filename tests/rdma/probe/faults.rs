//! What goes wrong ends in an error that says what, and never in a hang.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use epoxide::group::{MeshGroup, ProcessGroup};
use epoxide::transport::verbs::Connected;
use epoxide::transport::{Put, Queue};
use epoxide::{Error, Result};
use serde_json::Value;

use crate::rank::{Rank, wrong};

const BYTES: u64 = 1 << 20;
const PUT: Put = Put { from: 0, to: 4096, bytes: 65536, counter: 0, value: 1 };

/// A group that changes one field of what rank 1 says of its wire memory.
#[derive(Debug)]
struct Liar<'a> {
    group: &'a MeshGroup,
    field: &'static str,
    change: fn(u64) -> u64,
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
        let mut offer: Value = serde_json::from_slice(&all[1]).map_err(wrong)?;
        if let Some(field) = offer.pointer_mut(&format!("/Ok/{}", self.field)) {
            let value = field.as_u64().ok_or_else(|| wrong("no number"))?;
            *field = (self.change)(value).into();
            all[1] = serde_json::to_vec(&offer).map_err(wrong)?;
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

pub fn wrong_key(rank: &Rank) -> Result<()> {
    remote_access(rank, "rkey", |key| key ^ 0x5500, PUT)
}

pub fn small_region(rank: &Rank) -> Result<()> {
    remote_access(rank, "bytes", |bytes| bytes * 4, Put { to: 2 * BYTES, ..PUT })
}

/// Rank 0 believes what is not so of rank 1's memory, and puts.
fn remote_access(rank: &Rank, field: &'static str, change: fn(u64) -> u64, put: Put) -> Result<()> {
    let wire = rank.wire_memory(BYTES)?;
    if rank.rank() != 0 {
        let queues = rank.connect(&wire, &rank.group, 1)?;
        return rank.leave(queues);
    }
    let mut queues = rank.connect(&wire, &Liar { group: &rank.group, field, change }, 1)?;
    let queue = &mut *queues[0].2;
    let posted = Instant::now();
    let error = queue.put_with_counter(&[put]).and_then(|()| queue.quiet(rank.timeout / 2)).err();
    expect(error.as_ref(), &["remote access error", "rank 1", "put #1"], posted)?;
    // Of no use from then on, and says the same.
    let again = queue.put_with_counter(&[PUT]).err().map(|error| error.to_string());
    if again != error.map(|error| error.to_string()) {
        return Err(wrong(format!("the next put says {again:?}")));
    }
    rank.leave(queues)
}

/// Rank 1 dies in the middle of its puts.
pub fn peer_killed(rank: &Rank) -> Result<()> {
    let wire = rank.wire_memory(BYTES)?;
    let mut queues = rank.connect(&wire, &rank.group, 1)?;
    if rank.rank() == 1 {
        for value in 1..=20 {
            queues[0].2.put_with_counter(&[Put { value, ..PUT }])?;
        }
        let own = std::process::id().to_string();
        let _ = std::process::Command::new("kill").args(["-9", &own]).status();
        return Err(wrong("it lives after kill -9"));
    }
    let (_, _, queue) = queues.iter_mut().find(|(peer, ..)| *peer == 1).ok_or_else(|| wrong("no rank 1"))?;
    let (error, posted) = put_until_error(rank, &mut **queue)?;
    expect(Some(&error), &["rank 1"], posted)?;
    // The other queues are not concerned.
    for (_, _, queue) in queues.iter_mut().filter(|(peer, ..)| *peer != 1) {
        queue.put_with_counter(&[PUT])?;
        queue.quiet(rank.timeout)?;
    }
    linger(queues, rank)
}

/// The network of rank 0 is gone for good.
pub fn link_lost(rank: &Rank, lose: fn() -> Result<()>) -> Result<()> {
    let wire = rank.wire_memory(BYTES)?;
    let mut queues = rank.connect(&wire, &rank.group, 1)?;
    queues[0].2.put_with_counter(&[PUT])?;
    queues[0].2.quiet(rank.timeout)?;
    rank.group.barrier(rank.timeout)?;
    if rank.rank() == 0 {
        lose()?;
    }
    let (error, posted) = put_until_error(rank, &mut *queues[0].2)?;
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

/// With a rank gone there is no barrier: stays a while, so that those that are alive are not taken for dead.
fn linger(queues: Vec<Connected>, rank: &Rank) -> Result<()> {
    if rank.group.size() > 2 {
        std::thread::sleep(Duration::from_secs(3));
    }
    drop(queues);
    Ok(())
}

/// The error, and when the put that brought it was posted.
fn put_until_error(rank: &Rank, queue: &mut dyn Queue) -> Result<(Error, Instant)> {
    loop {
        let posted = Instant::now();
        if let Err(error) = queue.put_with_counter(&[PUT]).and_then(|()| queue.quiet(rank.timeout / 2)) {
            return Ok((error, posted));
        }
        rank.in_time(|| "puts still succeed".into())?;
    }
}

/// The error is of verbs and says these things.
fn expect(error: Option<&Error>, parts: &[&str], posted: Instant) -> Result<()> {
    let text = error.map_or("no error".to_owned(), Error::to_string);
    let of_verbs = matches!(error, Some(Error::Verbs { peer: Some(_), .. }));
    if !of_verbs || !parts.iter().all(|part| text.contains(part)) {
        return Err(wrong(format!("wanted an error with {parts:?}, got: {text}")));
    }
    println!("as it should be, after {:.2?}: {text}", posted.elapsed());
    Ok(())
}
